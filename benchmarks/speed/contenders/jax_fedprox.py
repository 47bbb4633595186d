"""Run FedProx in JAX on a given work: one compiled program a round, with its own clip and Gaussian noise.

What a careful user would write for one machine: a loop over local steps within a loop over clients, on as many devices
as there are threads. It needs an environment with JAX beside PyTorch and NumPy, and imports nothing of fedmtl.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import torch
from work import Clock, Work, arguments, batches, report

Parameters = list[Any]
"""Weights and biases in the order of ``nn.Module.parameters``."""


def forward(model: str, w: Parameters, x: Any) -> Any:
    """The outputs (B, classes) of logistic regression, a perceptron or the CNN, for x (B, channels, height, width)."""
    import jax

    if model == "cnn":
        for kernel, bias in (w[:2], w[2:4]):
            x = jax.nn.relu(convolution(kernel, x) + bias[:, None, None])
            side = x.shape[-1] // 2
            x = x.reshape(*x.shape[:2], side, 2, side, 2).max((3, 5))
        w = w[4:]
    x = x.reshape(len(x), -1)
    if model == "mlp":
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


def round_program(settings: dict[str, Any], devices: int) -> Callable[..., Any]:
    """Return the compiled program of a round.

    It takes the shared model, the examples x and y of all clients, the rows of the batches (k, S, B) and their weights
    in the batch's mean, the numbers of steps (k,), with k a multiple of ``devices``, and standard normal noise, one
    array for each parameter; and returns the shared model after the round.
    """
    import jax
    from jax import lax
    from jax import numpy as jnp
    from jax.sharding import PartitionSpec

    rate, lam, clip = settings["lr"], settings["lam"], settings["clip"]

    def loss(w: Parameters, x: Any, y: Any, weight: Any) -> Any:
        outputs = forward(settings["model"], w, x)
        own = jnp.take_along_axis(outputs, y[:, None], 1)[:, 0]
        return jnp.sum((jax.nn.logsumexp(outputs, 1) - own) * weight)

    def updates(shared: Parameters, x: Any, y: Any, index: Any, weight: Any, steps: Any) -> Any:
        """The sum of the clipped updates of the clients of one device."""

        def client(total: Parameters, own: Any) -> Any:
            rows, weights, count = own

            def step(s: Any, w: Parameters) -> Parameters:
                g = jax.grad(loss)(w, x[rows[s]], y[rows[s]], weights[s])
                return jax.tree.map(lambda w, g, a: w - rate * (g + lam * (w - a)), w, g, shared)

            w = lax.fori_loop(0, count, step, shared)
            update = jax.tree.map(jnp.subtract, w, shared)
            norm = jnp.sqrt(sum(jnp.sum(u * u) for u in update))
            factor = jnp.minimum(1.0, clip / jnp.maximum(norm, 1e-30))
            return jax.tree.map(lambda t, u: t + factor * u, total, update), None

        zeros = jax.tree.map(jnp.zeros_like, shared)
        total, _ = lax.scan(client, zeros, (index, weight, steps))
        return jax.tree.map(lambda t: lax.psum(t, "clients"), total)

    mesh = jax.sharding.Mesh(np.array(jax.devices()[:devices]), ("clients",))
    one, own = PartitionSpec(), PartitionSpec("clients")
    summed = jax.shard_map(
        updates, mesh=mesh, in_specs=(one, one, one, own, own, own), out_specs=one, check_vma=False
    )

    @jax.jit
    def program(shared: Parameters, x: Any, y: Any, i: Any, w: Any, n: Any, normal: Any) -> Any:
        move = partial(moved, settings["noise"], settings["denominator"])
        return jax.tree.map(move, shared, summed(shared, x, y, i, w, n), normal)

    def moved(noise: float, denominator: float, s: Any, total: Any, normal: Any) -> Any:
        return s + (total + noise * normal) / denominator

    return program


def plan(work: Work, step: int, clients: int, most: int) -> tuple[Any, Any, Any]:
    """Return the batches of a round, of ``clients`` clients with ``most`` steps, of which those beyond the cohort make
    no step."""
    size = int(work.settings["batch"])
    index = np.zeros((clients, most, size), np.int32)
    weight = np.zeros((clients, most, size), np.float32)
    steps = np.zeros(clients, np.int32)
    for place, order in enumerate(work.examples(step).values()):
        for number, batch in enumerate(batches(order, size)):
            index[place, number, : len(batch)] = batch.numpy()
            weight[place, number, : len(batch)] = 1 / len(batch)
            steps[place] = number + 1
    return index, weight, steps


def run(work: Work, clock: Clock, devices: int) -> torch.Tensor:
    """Make all rounds and return the shared model (D,); the first round includes the compilation."""
    import jax

    settings = work.settings
    shapes = [tuple(p.shape) for p in work.module().parameters()]
    ends = np.cumsum([int(np.prod(shape)) for shape in shapes])[:-1]

    def parts(row: Any) -> Parameters:
        pieces = np.split(row, ends)
        return [piece.reshape(shape) for piece, shape in zip(pieces, shapes, strict=True)]

    counts = work.offsets.diff()
    most = int((-(-counts // int(settings["batch"]))).max())
    # one shape for all cohorts, so that the program is compiled once
    clients = -(-max(map(len, work.cohorts)) // devices) * devices
    program = round_program(settings, devices)
    x, y = jax.numpy.asarray(work.x.numpy()), jax.numpy.asarray(work.y.numpy().astype(np.int32))
    shared = jax.tree.map(jax.numpy.asarray, parts(work.initial.numpy()))
    draws = np.random.default_rng(int(settings["seed"]))
    for step in range(work.rounds):
        clock.start()
        normal = draws.standard_normal(len(work.initial), np.float32)
        shared = program(shared, x, y, *plan(work, step, clients, most), parts(normal))
        jax.block_until_ready(shared)
        clock.stop()
    return torch.from_numpy(np.concatenate([np.asarray(w).ravel() for w in shared]))


def main() -> None:
    """Time every round, on ``--threads`` devices of a core each, or on a GPU."""
    given = arguments(__doc__)
    devices = 1
    if given.device == "cpu":
        devices = given.threads
        flags = f"--xla_force_host_platform_device_count={devices}"
        os.environ |= {"XLA_FLAGS": flags, "JAX_PLATFORMS": "cpu"}
        cores = sorted(os.sched_getaffinity(0))[:devices]
        os.sched_setaffinity(0, cores)  # XLA has a thread for every core that it sees
    import jax

    work = Work.read(given.work)
    clock = Clock.new("cpu")  # every round waits for its result itself
    module = work.module()
    torch.nn.utils.vector_to_parameters(run(work, clock, devices), module.parameters())
    loss = work.loss(lambda client: module)
    report(work, clock, "JAX", jax.__version__, given.threads, loss, device=given.device)


if __name__ == "__main__":
    main()
