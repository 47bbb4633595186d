"""Run FedProx in JAX on a given work: one compiled program a round, with its own clip and Gaussian noise.

What a careful user would write for one machine: a loop over local steps within a loop over clients, on as many devices
as there are threads; on a GPU all clients at once by ``vmap``. Updates of whole clients are clipped, or gradients of
single records in every local step. It needs an environment with JAX beside PyTorch and NumPy, and imports nothing of fedmtl.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import torch
from work import Clock, Work, arguments, report

Parameters = list[Any]
"""Weights and biases in the order of ``nn.Module.parameters``."""


class Stage(NamedTuple):
    """A convolution with a ReLU: the zeros on each side, and whether a pool of 2 x 2 follows."""

    padding: int
    pools: bool


STAGES: dict[str, tuple[Stage, ...]] = {
    "logistic": (),
    "mlp": (),
    "cnn": (Stage(0, True), Stage(0, True)),
    "cnn3": (Stage(0, False), Stage(0, True)),
    "cifar": (Stage(1, False), Stage(1, True), Stage(1, False), Stage(1, True)),
}
"""The convolutions of the networks; linear layers follow, with ReLUs between them."""


def forward(model: str, w: Parameters, x: Any) -> Any:
    """The outputs (B, classes) of a network, for x (B, channels, height, width)."""
    import jax

    for padding, pools in STAGES[model]:
        kernel, bias, *w = w
        x = jax.numpy.pad(x, ((0, 0), (0, 0), (padding, padding), (padding, padding)))
        x = jax.nn.relu(convolution(kernel, x) + bias[:, None, None])
        if pools:
            side = x.shape[-1] // 2
            x = x.reshape(*x.shape[:2], side, 2, side, 2).max((3, 5))
    x = x.reshape(len(x), -1)
    while len(w) > 2:
        x, w = jax.nn.relu(x @ w[0].T + w[1]), w[2:]
    return x @ w[0].T + w[1]


def convolution(kernel: Any, x: Any) -> Any:
    """A convolution without padding, as a product with shifted copies.

    XLA's own one, within a loop on a CPU, took many times as long.
    """
    from jax import numpy as jnp

    size = kernel.shape[-1]
    side = x.shape[-1] - size + 1
    places = [(i, j) for i in range(size) for j in range(size)]
    shifted = [x[:, :, i : i + side, j : j + side] for i, j in places]
    flat = kernel.reshape(*kernel.shape[:2], -1)
    return jnp.einsum("ocp,bcphw->bohw", flat, jnp.stack(shifted, 2))


def gradient_of(settings: dict[str, Any]) -> Callable[..., Any]:
    """Return the function (w, x, y, weight, expected, key) -> the gradient that a local step follows.

    Under the unit "client" it is that of the mean loss, whose weights are those of the examples. Under "record" it is
    the noised sum of the examples' clipped gradients over the expected number of them, the weights are 1, and 0 of
    padding.
    """
    import jax
    from jax import numpy as jnp

    def losses(w: Parameters, x: Any, y: Any) -> Any:
        outputs = forward(settings["model"], w, x)
        own = jnp.take_along_axis(outputs, y[:, None], 1)[:, 0]
        return jax.nn.logsumexp(outputs, 1) - own

    def mean(w: Parameters, x: Any, y: Any, weight: Any, expected: Any, key: Any) -> Parameters:
        return jax.grad(lambda w: jnp.sum(losses(w, x, y) * weight))(w)

    def released(w: Parameters, x: Any, y: Any, weight: Any, expected: Any, key: Any) -> Parameters:
        one = jax.grad(lambda w, x, y: losses(w, x[None], y[None])[0])
        each = jax.vmap(one, (None, 0, 0))(w, x, y)
        factor = jax.vmap(partial(clip_factor, settings["clip"]))(each) * weight
        keys = list(jax.random.split(key, len(w)))

        def noised(gradients: Any, key: Any) -> Any:
            total = jnp.tensordot(factor, gradients, 1)
            return (total + settings["noise"] * jax.random.normal(key, total.shape)) / expected

        return jax.tree.map(noised, each, keys)

    if settings.get("unit") == "record":
        return released
    return mean


def clip_factor(bound: float, update: Parameters) -> Any:
    """The factor that makes the norm of an update ``bound`` at most."""
    from jax import numpy as jnp

    norm = jnp.sqrt(sum(jnp.sum(u * u) for u in update))
    return jnp.minimum(1.0, bound / jnp.maximum(norm, 1e-30))


def round_program(settings: dict[str, Any], devices: int, at_once: bool) -> Callable[..., Any]:
    """Return the compiled program of a round.

    It takes the shared model, the examples x and y of all clients, the rows of the batches (k, S, B) and their weights,
    the numbers of steps (k,), with k a multiple of ``devices``, the expected numbers of rows (k,) of a step, the key of
    the round's noise in local steps, and standard normal noise, one array for each parameter; and returns the shared
    model after the round. The clients of a device follow one another, or are computed ``at_once``.
    """
    import jax
    from jax import lax
    from jax import numpy as jnp
    from jax.sharding import PartitionSpec

    rate, lam = settings["lr"], settings["lam"]
    gradient = gradient_of(settings)
    # the clip of single records is in their local steps, and there is no noise after them
    bound, noise = settings["clip"], settings["noise"]
    if settings.get("unit") == "record":
        bound, noise = np.inf, 0.0

    def update(shared: Parameters, x: Any, y: Any, key: Any, own: Any) -> Parameters:
        """The clipped update of a client."""
        rows, weights, count, expected, number = own
        key = jax.random.fold_in(key, number)

        def step(s: Any, w: Parameters) -> Parameters:
            of_step = jax.random.fold_in(key, s)
            g = gradient(w, x[rows[s]], y[rows[s]], weights[s], expected, of_step)
            return jax.tree.map(lambda w, g, a: w - rate * (g + lam * (w - a)), w, g, shared)

        w = lax.fori_loop(0, count, step, shared)
        moved = jax.tree.map(jnp.subtract, w, shared)
        factor = clip_factor(bound, moved)
        return jax.tree.map(lambda u: factor * u, moved)

    def updates(shared: Parameters, x: Any, y: Any, key: Any, *plan: Any) -> Parameters:
        """The sum of the updates of the clients of one device."""
        one = partial(update, shared, x, y, key)
        if at_once:
            total = jax.tree.map(lambda u: u.sum(0), jax.vmap(one)(plan))
        else:

            def added(total: Parameters, own: Any) -> Any:
                return jax.tree.map(jnp.add, total, one(own)), None

            total, _ = lax.scan(added, jax.tree.map(jnp.zeros_like, shared), plan)
        return jax.tree.map(lambda t: lax.psum(t, "clients"), total)

    mesh = jax.sharding.Mesh(np.array(jax.devices()[:devices]), ("clients",))
    all_of_it, own = PartitionSpec(), PartitionSpec("clients")
    specs = (all_of_it,) * 4 + (own,) * 5
    summed = jax.shard_map(updates, mesh=mesh, in_specs=specs, out_specs=all_of_it, check_vma=False)

    @jax.jit
    def program(shared: Parameters, x: Any, y: Any, key: Any, plan: Any, normal: Any) -> Any:
        def moved(s: Any, total: Any, normal: Any) -> Any:
            return s + (total + noise * normal) / settings["denominator"]

        return jax.tree.map(moved, shared, summed(shared, x, y, key, *plan), normal)

    return program


class Shape(NamedTuple):
    """The one shape of the batches of all rounds, so that the program is compiled once: clients, steps, batch."""

    clients: int
    steps: int
    batch: int

    @classmethod
    def of(cls, work: Work, devices: int) -> Shape:
        """The least one, with a multiple of ``devices`` clients."""
        clients = -(-max(map(len, work.cohorts)) // devices) * devices
        size = int(work.settings["batch"])
        if work.lengths is None:
            return cls(clients, int((-(-work.offsets.diff() // size)).max()), size)
        drawn = [lengths for lengths in work.lengths if lengths.numel()]
        steps = max(lengths.shape[1] for lengths in drawn)
        return cls(clients, steps, max(int(lengths.max()) for lengths in drawn))


def plan(work: Work, step: int, shape: Shape) -> tuple[Any, ...]:
    """Return the batches of a round, of the clients of a shape, of which those beyond the cohort make no step."""
    index = np.zeros(shape, np.int32)
    weight = np.zeros(shape, np.float32)
    steps = np.zeros(shape.clients, np.int32)
    expected = np.ones(shape.clients, np.float32)
    for place, (client, own) in enumerate(work.batches(step).items()):
        expected[place] = work.expected(client)
        steps[place] = len(own)
        for number, batch in enumerate(own):
            index[place, number, : len(batch)] = batch.numpy()
            weight[place, number, : len(batch)] = 1.0
            if work.lengths is None:
                weight[place, number] /= len(batch)
    return index, weight, steps, expected, np.arange(shape.clients, dtype=np.int32)


def run(work: Work, clock: Clock, devices: int, at_once: bool = False) -> torch.Tensor:
    """Make all rounds and return the shared model (D,); the first round includes the compilation."""
    import jax

    settings = work.settings
    shapes = [tuple(p.shape) for p in work.module().parameters()]
    ends = np.cumsum([int(np.prod(shape)) for shape in shapes])[:-1]

    def parts(row: Any) -> Parameters:
        pieces = np.split(row, ends)
        return [piece.reshape(shape) for piece, shape in zip(pieces, shapes, strict=True)]

    shape = Shape.of(work, devices)
    program = round_program(settings, devices, at_once)
    x, y = jax.numpy.asarray(work.x.numpy()), jax.numpy.asarray(work.y.numpy().astype(np.int32))
    shared = jax.tree.map(jax.numpy.asarray, parts(work.initial.numpy()))
    draws = np.random.default_rng(int(settings["seed"]))
    key = jax.random.key(int(settings["seed"]))
    for step in range(work.rounds):
        clock.start()
        normal = parts(draws.standard_normal(len(work.initial), np.float32))
        of_round = jax.random.fold_in(key, step)
        shared = program(shared, x, y, of_round, plan(work, step, shape), normal)
        jax.block_until_ready(shared)
        clock.stop()
    return torch.from_numpy(np.concatenate([np.asarray(w).ravel() for w in shared]))


def main() -> None:
    """Time every round: on a CPU client after client on ``--threads`` devices of a core each, on a GPU all at once."""
    given = arguments(__doc__)
    devices = 1
    on_cpu = given.device == "cpu"
    if on_cpu:
        devices = given.threads
        flags = f"--xla_force_host_platform_device_count={devices}"
        os.environ |= {"XLA_FLAGS": flags, "JAX_PLATFORMS": "cpu"}
        cores = sorted(os.sched_getaffinity(0))[:devices]
        os.sched_setaffinity(0, cores)  # XLA has a thread for every core that it sees
    import jax

    if not on_cpu and jax.default_backend() == "cpu":
        raise SystemExit("JAX sees no GPU; install jax[cuda13] or jax[cuda12].")
    work = Work.read(given.work, given.rounds)
    clock = Clock.new("cpu")  # every round waits for its result itself
    module = work.module()
    torch.nn.utils.vector_to_parameters(
        run(work, clock, devices, at_once=not on_cpu), module.parameters()
    )
    more: dict[str, Any] = {"device": given.device}
    if not on_cpu:
        statistics = jax.devices()[0].memory_stats() or {}
        more["gpu_mib"] = round(statistics.get("peak_bytes_in_use", 0) / (1 << 20))
    loss = work.loss(lambda client: module)
    report(work, clock, "JAX", jax.__version__, given.threads, loss, **more)


if __name__ == "__main__":
    main()
