"""Local training: what a client does between receiving the shared model and answering."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from .._check import non_negative, one_of, positive, positive_int
from .._devices import sent, waits
from ..errors import ConfigError
from ..privacy.totals import RowTotal
from ..stacked.losses import Loss, Pull, client_means, cross_entropy, example_losses
from ..stacked.perceptron import Ends, Examples, Perceptron, Rule, output_gradient, write_ends
from .batches import BatchPlan, batches_per_epoch
from .device import train_on_device
from .mixture import Mixture, MixtureSteps
from .optimizers import (
    Elementwise,
    StackedOptimizer,
    StackedSGD,
    Strength,
    affine_descent,
    check_elementwise,
    check_stable,
    rows_of,
)
from .precision import Precision

if TYPE_CHECKING:
    from ..data import FederatedDataset
    from ..stacked import StackedModule

_KEPT = 1 << 19  # numbers that are made for several steps at once
_ONE_BY_ONE = 1 << 12  # numbers of a row: rows as long as this are copied faster one by one than by their indices
_WORTH_RECORDING = 10  # rounds: a step size that changes more often would have its steps recorded again and again


@dataclass(frozen=True, kw_only=True)
class LocalSolver(ABC):
    """How long a client trains and on which batches; subclasses say with which optimizer.

    Args:
        lr: step size.
        epochs: passes over a client's own training examples, per participation.
        steps: local steps per participation instead of epochs, the same for every client.
        batch_size: examples per step; ``None`` takes all of a client's examples.
        proximal: take a regularizer's anchor term by its proximal step.
        decay, decay_every: the step size is multiplied by ``decay`` after every ``decay_every`` rounds.
    """

    lr: float
    epochs: int = 1
    steps: int | None = None
    batch_size: int | None = 10
    proximal: bool = False
    decay: float = 1.0
    decay_every: int = 1

    def __post_init__(self) -> None:
        positive(self, lr=self.lr, decay=self.decay)
        positive_int(self, epochs=self.epochs, decay_every=self.decay_every)
        if self.steps is not None:
            positive_int(self, steps=self.steps)
        if self.batch_size is not None:
            positive_int(self, batch_size=self.batch_size)
        if self.decay > 1.0:
            raise ConfigError(f"{type(self).__name__}.decay is {self.decay}; it must be in (0, 1].")

    def lr_at(self, round: int) -> float:
        """Return the step size of a round, counted from 0."""
        return self.lr * self.decay ** (round // self.decay_every)

    def step_counts(self, counts: Tensor) -> Tensor:
        """Local steps of clients with ``counts`` examples: int64 (k,) -> (k,)."""
        if self.steps is not None:
            return torch.full_like(counts, self.steps)
        return self.epochs * batches_per_epoch(counts, self.batch_size)

    @staticmethod
    def check_given(owner: object, solver: object, lam: float = 0.0) -> None:
        """Refuse what an algorithm was given as ``local`` that is no solver, or cannot follow a strength ``lam``.

        Raises:
            ConfigError: naming the class of ``owner``.
        """
        if not isinstance(solver, LocalSolver):
            raise ConfigError(
                f"{type(owner).__name__}.local is {solver!r}; give a local solver, such as LocalSGD(lr=0.1) or "
                "LocalOptimizer(optimizer_name='Adam', lr=0.01)."
            )
        solver.check(lam)

    def check(self, lam: float) -> None:  # noqa: B027 - most solvers follow any
        """Refuse a regularization strength this solver cannot follow."""

    def affine_step(self, round: int, lam: Strength) -> tuple[float, float, float] | None:
        """Return (a, b, c) where every step is w <- a w - b gradient + c anchor; None where it is another rule."""
        return None

    @abstractmethod
    def optimizer(self, rows: Tensor, *, round: int, lam: Strength, anchor: Tensor | None) -> StackedOptimizer:
        """The stacked optimizer of one local run over ``rows`` (k, D)."""


@dataclass(frozen=True, kw_only=True)
class LocalSGD(LocalSolver):
    """Stochastic gradient descent, mean-regularized when the algorithm gives an anchor.

    Args:
        lr, epochs, steps, batch_size, proximal, decay, decay_every: see :class:`LocalSolver`.
        momentum, nesterov, weight_decay: as in ``torch.optim.SGD``; momentum starts at zero in every participation.
    """

    momentum: float = 0.0
    nesterov: bool = False
    weight_decay: float = 0.0

    def __post_init__(self) -> None:
        super().__post_init__()
        non_negative(self, momentum=self.momentum, weight_decay=self.weight_decay)
        if self.momentum >= 1.0:
            raise ConfigError(f"LocalSGD.momentum is {self.momentum}; it must be in [0, 1).")

    def check(self, lam: float) -> None:
        if not self.proximal:
            check_stable(self.lr, lam)

    def affine_step(self, round: int, lam: Strength) -> tuple[float, float, float] | None:
        if self.momentum or not isinstance(lam, (int, float)):
            return None
        return affine_descent(self.lr_at(round), self.weight_decay, float(lam), proximal=self.proximal)

    def optimizer(self, rows: Tensor, *, round: int, lam: Strength, anchor: Tensor | None) -> StackedOptimizer:
        return StackedSGD(
            rows,
            lr=self.lr_at(round),
            momentum=self.momentum,
            nesterov=self.nesterov,
            weight_decay=self.weight_decay,
            lam=lam,
            anchor=anchor,
            proximal=self.proximal,
        )


@dataclass(frozen=True, kw_only=True)
class LocalOptimizer(LocalSolver):
    """Any elementwise optimizer of ``torch.optim``, by name.

    Args:
        lr, epochs, steps, batch_size, proximal, decay, decay_every: see :class:`LocalSolver`.
        optimizer_name: a class of ``torch.optim``, such as ``"Adam"``.
        options: its further arguments.
    """

    optimizer_name: str = "Adam"
    options: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        super().__post_init__()
        names = tuple(n for n, c in vars(torch.optim).items() if isinstance(c, type) and n != "Optimizer")
        one_of(self, names, optimizer_name=self.optimizer_name)
        check_elementwise(self._factory(self.lr))

    def _factory(self, lr: float) -> Callable[..., Any]:
        cls = getattr(torch.optim, self.optimizer_name)
        return lambda params: cls(params, lr=lr, **dict(self.options))

    def optimizer(self, rows: Tensor, *, round: int, lam: Strength, anchor: Tensor | None) -> StackedOptimizer:
        factory = self._factory(self.lr_at(round))
        return Elementwise(rows, factory=factory, lam=lam, anchor=anchor, proximal=self.proximal)


def plan_batches(
    data: FederatedDataset,
    solver: LocalSolver,
    clients: Tensor,
    *,
    seed: int,
    round: int,
    width: int | None = None,
    grain: int = 1,
) -> BatchPlan:
    """Return the batches of a local run of ``clients``, int64 (k,).

    Args:
        data: the clients' data.
        solver: says how many steps each client makes, and on how many examples.
        clients: int64 (k,), best in the order of decreasing numbers of steps.
        seed, round: address the order of the examples.
        width, grain: see :class:`~fedmtl.local.batches.BatchPlan`.
    """
    counts = data.train.counts[clients]
    return BatchPlan(
        counts=counts,
        first=data.train.offsets[clients],
        keys=data.keys[clients],
        steps=solver.step_counts(counts),
        batch_size=solver.batch_size,
        seed=seed,
        round=round,
        width=width,
        grain=grain,
    )


def train_locally(
    stack: StackedModule,
    data: FederatedDataset,
    loss: Loss,
    solver: LocalSolver,
    plan: BatchPlan,
    start: Tensor,
    *,
    out: Tensor | RowTotal,
    place: Tensor,
    less: Tensor | None = None,
    kept: Tensor | None = None,
    sums: Tensor | None = None,
    lam: Strength = 0.0,
    anchor: Tensor | None = None,
    divergence: Loss | None = None,
    moving: Tensor | None = None,
    mixture: Mixture | None = None,
) -> None:
    """Train one stack of clients on their own data, and write each client's model after its own last step.

    Args:
        stack: computes all clients together; its buffers are overwritten.
        data: the clients' data.
        loss: one value per example.
        solver: names the optimizer and its step size in the plan's round.
        plan: batches of the k clients, from :func:`plan_batches`. One without a step is computed with the others, and
            nothing is written of it.
        start: (D,) or (n, D), where the clients start.
        out: (n, D), where the models go, may be ``start``; on the CPU also a sum that they are added to.
        place: int64 (k,), on the host, the clients' rows of ``out``, and of every other argument with n rows.
        lam, anchor: the pull (lam / 2) ||w - anchor||^2, anchor (D,) or (n, D); lam may be a tensor (D,) or (n, D) with
            one strength for each coordinate, or a precision matrix.
        less: (D,), what is subtracted from the models that go to ``out``; None for nothing.
        kept: (n, D), where the models go as they are, beside; None for nowhere.
        sums: (n,), on the CPU alone, where the sum of each model's numbers goes, which is finite where they are; None
            for nowhere.
        divergence: what the pull measures in place of the squared distance of the parameters: a function (outputs,
            outputs of the anchor) -> (N,), averaged over a client's batch as the loss is; lam is then one number.
        moving: bool (D,), the coordinates that are trained; all others keep their start. None trains all.
        mixture: personal models of the n clients that are trained beside, see :mod:`.mixture`; None without.
    """
    plain = divergence is None and moving is None and mixture is None

    def build(rows: Tensor, anchor: Tensor | None, lam: Strength) -> tuple[LocalStep, StackedOptimizer]:
        towards = None if divergence is None or anchor is None else anchor.expand(len(rows), -1).contiguous()
        optimizer = solver.optimizer(rows, round=plan.round, lam=lam if towards is None else 0.0, anchor=anchor)
        frozen, still = frozen_part(rows, moving)
        beside = None
        if mixture is not None:
            beside = MixtureSteps(mixture, solver, plan.round, rows, plan.steps, place)
        return LocalStep(stack, loss, rows, optimizer, divergence, towards, lam, frozen, still, beside), optimizer

    if waits(start.device) or stack.graphs is not None:
        assert isinstance(out, Tensor)
        key = (repr(solver), solver.lr_at(plan.round), loss) if plain else None
        if solver.decay < 1.0 and solver.decay_every < _WORTH_RECORDING:
            key = None
        train_on_device(
            stack, data, plan, start, out=out, place=place, less=less, kept=kept,
            anchor=anchor, lam=lam, build=build, key=key
        )  # fmt: skip
        return
    rule = None
    if plain and loss is cross_entropy:
        affine = solver.affine_step(plan.round, lam)
        if affine is not None and (anchor is not None or affine[2] == 0.0):  # else the optimizer says what is missing
            rule = Rule(*affine, rows_of(anchor, place))
    if rule is not None and less is start and kept is None and _runs_apart(stack, data, rule, start):
        rule, less = rule._replace(anchor=start, apart=True), None
        stack.reserve(len(plan.steps))
        rows = stack.rows[: len(plan.steps)]
    else:
        rows = stack.load(start, len(plan.steps), place=place)
    ends = Ends((plan.steps - 1).tolist(), place.tolist(), None, less, kept, sums)
    with nullcontext() if isinstance(out, Tensor) else out.part() as cells:
        ends = ends._replace(out=out) if isinstance(out, Tensor) else ends._replace(cells=cells, limits=out.limits)
        if rule is not None and _run_by_products(stack, data, plan, rows, rule, ends):
            return
        step, _ = build(rows, rows_of(anchor, place), rows_of(lam, place))
        for number, batch in enumerate(plan.batches()):
            x, y = data.gather("train", batch.index, dtype=rows.dtype, device=rows.device)
            address = address_of(plan.keys[: batch.active], plan.round, number) if stack.has_dropout else None
            step(batch.active, x, y, batch.mask, address)
            if rows.shape[1] >= _ONE_BY_ONE or not isinstance(out, Tensor):
                write_ends(number, rows, *ends)
            elif len(batch.done):
                done = rows[batch.done]
                out.index_copy_(0, place[batch.done], done if less is None else done - less)
                if kept is not None:
                    kept.index_copy_(0, place[batch.done], done)
                if sums is not None:
                    sums.index_copy_(0, place[batch.done], done.sum(1))


@dataclass(frozen=True)
class LocalStep:
    """One local step of the leading clients of a stack.

    Attributes:
        stack, loss: see :func:`train_locally`.
        rows: (K, D), which it moves.
        optimizer: of these.
        divergence, towards, lam: see there; ``towards`` (K, D) are the anchors that predictions are pulled to, where
            there is a divergence.
        frozen, still: from :func:`frozen_part`.
        beside: the personal models that move with these rows; None without.
    """

    stack: StackedModule
    loss: Loss
    rows: Tensor
    optimizer: StackedOptimizer
    divergence: Loss | None
    towards: Tensor | None
    lam: Strength
    frozen: Tensor | None
    still: Tensor | None
    beside: MixtureSteps | None = None

    def __call__(self, active: int, x: Tensor, y: Tensor, mask: Tensor, address: Tensor | None) -> None:
        """Move the first A rows by their batches.

        Args:
            active: A.
            x, y: (A, B, ...).
            mask: bool (A, B), which entries are examples and no padding.
            address: int64 (A, 3), of dropout masks.
        """
        stack, rows, pull = self.stack, self.rows, None
        if self.beside is not None:
            self.beside(active, partial(_gradients, stack, x, y, mask, self.loss, address))
        if self.divergence is not None and self.towards is not None:
            assert not isinstance(self.lam, Precision)
            anchors = self.towards[:active]
            values = None if stack.perceptron is None else stack.perceptron.forward(anchors, x)
            others = stack.predict(anchors, x) if values is None else values[-1]
            pull = Pull(self.divergence, others, float(self.lam))
        if not _by_products(stack, rows[:active], x, y, mask, self.loss, pull, self.optimizer):
            outputs = stack.forward(x, address=address)
            losses = example_losses(self.loss, outputs, y)
            losses = losses if pull is None else losses + pull(outputs)
            rows.grad = stack.grads[: len(rows)]  # backward writes the leading active rows
            stack.backward(client_means(losses, mask))
            self.optimizer.step(active=slice(0, active))
        if self.frozen is not None and self.still is not None:
            rows[:active, self.frozen] = self.still[:active]


def _runs_apart(stack: StackedModule, data: FederatedDataset, rule: Rule, start: Tensor) -> bool:
    """Return whether :func:`_run_by_products` can make all steps in one call, by differences from the ``start``."""
    network = stack.perceptron
    if not isinstance(network, Perceptron) or data.spec.targets or data.stored("train", start.device) is None:
        return False
    return network.runs_apart(data.spec, rule, start)


@torch.no_grad()
def _run_by_products(
    stack: StackedModule, data: FederatedDataset, plan: BatchPlan, rows: Tensor, rule: Rule, ends: Ends
) -> bool:
    """Make all local steps of a stack, on cross-entropies, by batched products, many in one call; False, and nothing is
    done, where the model is no such network of these data."""
    network = stack.perceptron
    if network is None or data.spec.targets or not network.takes(data.spec, rows):
        return False
    index, mask, shapes = plan.index, plan.mask, plan.shapes()
    stored, block = data.stored("train", rows.device), len(shapes)
    if stored is None:
        block = max(1, _KEPT // (math.prod(index.shape[1:]) * math.prod(data.spec.shape)))
    for first in range(0, len(shapes), block):
        part, last = slice(first, first + block), [number - first for number in ends.last]
        active, widths = map(list, zip(*shapes[part], strict=True))
        if stored is None:
            x, y = data.gather("train", index[part].flatten(), dtype=rows.dtype, device=rows.device)
            own = torch.arange(len(y), device=rows.device).view(index[part].shape)
            examples = Examples(x, y, 1.0, 0.0, own, mask[part].to(rows.device), active, widths)
        else:
            examples = Examples(*stored, index[part], mask[part], active, widths)
        network.run(rows, examples, rule, ends._replace(last=last))
    return True


def _gradients(stack: StackedModule, x: Tensor, y: Tensor, mask: Tensor, loss: Loss, address: Tensor | None) -> Tensor:
    """Return the gradients (A, D) of the mean losses of the leading copies, of batches (A, B, ...)."""
    rows = stack.rows[: len(x)]
    values = None if stack.perceptron is None else stack.perceptron.forward(rows, x)
    if stack.perceptron is None or values is None:
        with torch.enable_grad():
            return stack.backward(client_means(example_losses(loss, stack.forward(x, address=address), y), mask))
    signal = output_gradient(loss, values[-1], y, mask, None)
    stack.perceptron.backward(rows, values, signal, stack.grads[: len(rows)])
    return stack.grads[: len(rows)]


@torch.no_grad()
def _by_products(
    stack: StackedModule,
    rows: Tensor,
    x: Tensor,
    y: Tensor,
    mask: Tensor,
    loss: Loss,
    pull: Pull | None,
    optimizer: StackedOptimizer,
) -> bool:
    """Make one step of the leading ``rows`` (A, D) of a stack by batched products; False, and nothing is done, where
    the model is no perceptron."""
    values = None if stack.perceptron is None else stack.perceptron.forward(rows, x)
    if stack.perceptron is None or values is None:
        return False
    signal = output_gradient(loss, values[-1], y, mask, pull)
    affine = optimizer.affine_step()
    if affine is None:
        all_rows: Tensor = optimizer.param_groups[0]["params"][0]
        all_rows.grad = stack.grads[: len(all_rows)]
        stack.perceptron.backward(rows, values, signal, stack.grads[: len(rows)])
        optimizer.step(active=slice(0, len(rows)))
        return True
    keep, rate, towards = affine
    stack.perceptron.descend(rows, values, signal, keep=keep, rate=rate)
    if towards and optimizer.anchor is not None:
        rows.add_(optimizer.anchor if optimizer.anchor.dim() == 1 else optimizer.anchor[: len(rows)], alpha=towards)
    return True


def frozen_part(rows: Tensor, moving: Tensor | None) -> tuple[Tensor | None, Tensor | None]:
    """Return the coordinates of ``rows`` (k, D) that stay, int64, and their values; None twice where all are
    ``moving``."""
    if moving is None or bool(moving.all()):
        return None, None
    frozen = sent((~moving).nonzero()[:, 0], rows.device)
    return frozen, rows[:, frozen].clone()


def address_of(keys: Tensor, round: int, step: int) -> Tensor:
    """Return what addresses the dropout masks of a local step: client keys (k,) -> int64 (k, 3)."""
    tail = torch.tensor([round, step]).expand(len(keys), 2)
    return torch.cat([keys[:, None], tail], dim=1)
