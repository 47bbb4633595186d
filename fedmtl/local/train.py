"""The loop over local steps, of plain training and of DP-SGD, over a stack of clients.

Under DP-SGD a client's model depends on its records only through noised sums of clipped gradients,
one gradient a record. Abadi et al.: "Deep Learning with Differential Privacy", CCS 2016 (Algorithm
1); inside the silos of a federation, Liu, Hu, Wu, Smith: "On Privacy and Personalization in
Cross-Silo Federated Learning", NeurIPS 2022. The message of a client after such a training is
post-processing of these releases.

A local step in the order of its calls:

    LocalTraining.train         the loop over the steps that on_batches or on_records yields
    StackedOptimizer.step       the optimizer, and the pull to an anchor (optimizers.py)
    PlainStep.descend           the gradients of batches; of records: PrivateStep.descend
    Perceptron.descend          backward through the layers, whose weights move (products.py)
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

import torch
from torch import Tensor
from torch.nn.functional import pad

from .._devices import on_device
from ..privacy.clip import are_long
from .batches import BatchPlan
from .losses import Loss, Pull, example_losses
from .mixture import Mixture, MixtureSteps
from .optimizers import Descent, Strength, rows_of
from .per_example import MICROBATCH, DropoutKeys, example_gradients
from .products import move_along, output_gradient
from .solver import LocalSolver

if TYPE_CHECKING:
    from ..data import FederatedDataset
    from ..privacy import LocalSteps
    from .module import StackedModule


_ONCE = 1 << 18  # numbers of examples that are read at once: 1 MiB of float32 stays in a cache
_DEVICE_ONCE = 1 << 24  # off the CPU: few copies from the host

GradientChunks = Iterator[tuple[Tensor, Tensor]]
"""Gradients of examples (N, D) and the numbers of their copies, int64 (N,), a chunk at a time."""

Trained = Iterator[tuple[Tensor, Tensor]]
"""Clients that have finished, their places int64 (d,) and their models (d, D), as they finish."""


@dataclass(frozen=True)
class PlainStep:
    """A local step of the leading clients of a stack, by the mean gradients of batches.

    Attributes:
        active: number of the leading clients, which make it.
        done: int64 (d,), numbers in the stack of those whose last step it is.
        stack: with the models, its leading rows.
        loss: one value per example.
        x, y: (A, B, ...), the batches.
        weight: (A, B), of the examples in the mean; 0 of padding.
        address: int64 (A, 3), of dropout masks; None without dropout.
        pull: of predictions to others; None without one.
    """

    active: int
    done: Tensor
    stack: StackedModule
    loss: Loss
    x: Tensor
    y: Tensor
    weight: Tensor
    address: Tensor | None
    pull: Pull | None

    @torch.no_grad()
    def descend(self, target: Tensor, keep: float, rate: float) -> None:
        """Moves ``target`` along the gradients, see :data:`~fedmtl.local.optimizers.Descent`.

        They are computed by batched products if the network has them, otherwise by
        :func:`torch.func.vmap`.
        """
        stack = self.stack
        rows = stack.rows[: self.active]
        if stack.network is not None:
            values = stack.network.forward(rows, self.x)
            if values is not None:  # None for inputs that the network does not take
                signal = output_gradient(self.loss, values[-1], self.y, self.weight, self.pull)
                stack.network.descend(rows, values, signal, target, keep=keep, rate=rate)
                return
        # Everything else in training is without gradients; this is the one place that needs them.
        with torch.enable_grad():
            outputs = stack.forward(self.x, address=self.address)
            losses = example_losses(self.loss, outputs, self.y)
            if self.pull is not None:
                losses = losses + self.pull(outputs)
            gradients = stack.backward((losses * self.weight).sum(1))
        move_along(target, gradients, keep=keep, rate=rate)

    descend_by_mean = descend


@dataclass(frozen=True)
class PrivateStep:
    """A local step of the leading clients of a stack, by noised, clipped sums of the gradients of
    single records.

    Attributes:
        active, done: see :class:`PlainStep`.
        gradients: computes the records' gradients at the models, a chunk at a time.
        release: clips, adds up and noises them, (A, D).
        counts: int64 (A,), records drawn.
    """

    active: int
    done: Tensor
    gradients: Callable[[], GradientChunks]
    release: Callable[[GradientChunks], Tensor]
    counts: Tensor

    def descend(self, target: Tensor, keep: float, rate: float) -> None:
        """Moves ``target`` along the released sums of gradients."""
        move_along(target, self.release(self.gradients()).to(target), keep=keep, rate=rate)

    def descend_by_mean(self, target: Tensor, keep: float, rate: float) -> None:
        """Moves ``target`` along the mean gradients, not clipped and without noise: for models
        that stay with their clients."""
        # The sum before the division, so that a chunk need not know how many chunks there are.
        total = torch.zeros_like(target)
        for part, owner in self.gradients():
            total.index_add_(0, owner, part)
        move_along(
            target,
            total.div_(on_device(self.counts.clamp(min=1), target.device)[:, None]),
            keep=keep,
            rate=rate,
        )


@dataclass(frozen=True)
class LocalTraining:
    """The local training of n clients: the parts that all stacks of them share.

    Attributes:
        data: the clients' data.
        loss: one value per example.
        solver: names the optimizer and its step size.
        round: addresses the step size and dropout masks.
        start: (D,) or (n, D), the models before training.
        lam, anchor: the pull (lam / 2) ||w - anchor||^2, anchor (D,) or (n, D); lam may be a tensor
            (D,) or (n, D) with one strength for each coordinate, or a precision matrix.
        divergence: measure of the pull in place of the squared distance of the parameters: a
            function (outputs, outputs of the anchor) -> (N,), averaged over a client's batch as the
            loss is; lam is then one number. Not for training by DP-SGD.
        moving: bool (D,), the coordinates that are trained; all others keep their start, and a
            record's gradient is clipped without them. None trains all.
        mixture: personal models of the n clients that are trained beside, see :class:`Mixture`;
            they follow the gradients of the examples as they are, and nothing of them is released.
            None without.
        correction: (D,) or (n, D), added to every gradient; of DP-SGD to the release. None for
            none.

    Example:
        >>> import torch
        >>> from fedmtl import LocalSGD, load_data
        >>> from fedmtl.local import LocalTraining, StackedModule, plan_batches, prepare_module
        >>> from fedmtl.local.losses import cross_entropy
        >>> data = load_data("digits", clients=3)
        >>> sample = data.spec.sample(2, torch.float32)
        >>> flat = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(64, 10))
        >>> module = prepare_module(flat, sample, seed=0)
        >>> cpu = torch.device("cpu")
        >>> stack = StackedModule(module, capacity=3, device=cpu, dtype=torch.float32)
        >>> solver = LocalSGD(lr=0.1)
        >>> run = LocalTraining(data, cross_entropy, solver, 0, torch.zeros(650))
        >>> clients = torch.arange(3)
        >>> plan = plan_batches(data, solver, clients, seed=0, round=0)
        >>> trained = list(run.train(stack, clients, run.on_batches(stack, plan, clients)))
        >>> [models.shape for _, models in trained]
        [torch.Size([3, 650])]
    """

    data: FederatedDataset
    loss: Loss
    solver: LocalSolver
    round: int
    start: Tensor
    lam: Strength = 0.0
    anchor: Tensor | None = None
    divergence: Loss | None = None
    moving: Tensor | None = None
    mixture: Mixture | None = None
    correction: Tensor | None = None

    def on_batches(
        self, stack: StackedModule, plan: BatchPlan, place: Tensor
    ) -> Iterator[PlainStep]:
        """Yields the local steps on batches.

        A client without a step is computed with the others, and never finishes.

        Args:
            stack: computes the clients.
            plan: of the batches of the k clients.
            place: int64 (k,), the clients' positions among the n.
        """
        like = stack.rows
        towards: Tensor | None = None
        if self.divergence is not None and self.anchor is not None:
            # One row for each client, in memory: predictions read them as a stack.
            towards = rows_of(self.anchor, place).expand(len(place), -1).contiguous()
        # The number of a step addresses its dropout masks.
        examples = self._examples(plan, like)
        for number, batch in enumerate(plan.batches(like.dtype, like.device)):
            active, width = batch.index.shape
            x, y = next(examples)
            if (active, width) != y.shape[:2]:
                x = x[:active, :width]
                y = y[:active, :width]
            address: Tensor | None = None
            if stack.has_dropout:
                # masks are drawn on the device, by the address of the copy
                address = on_device(address_of(plan.keys[:active], self.round, number), like.device)
            pull: Pull | None = None
            if towards is not None:
                pull = self._pull(stack, towards[:active], x)
            yield PlainStep(active, batch.done, stack, self.loss, x, y, batch.weight, address, pull)

    def _examples(self, plan: BatchPlan, like: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
        """Yields the examples of every step of a plan, x (k, B, ...) and y (k, B, ...).

        Those of several steps are read at once, as far as they fit a cache.
        """
        once = _ONCE
        if like.device.type != "cpu":
            once = _DEVICE_ONCE
        steps = int(plan.steps.max())
        numbers = plan.index[0].numel() * math.prod(self.data.spec.shape)  # of one step
        at_once = max(1, once // max(1, numbers))
        for first in range(0, steps, at_once):
            index = plan.index[first : min(first + at_once, steps)]
            x, y = self.data.gather("train", index, dtype=like.dtype, device=like.device)
            yield from zip(x.unbind(0), y.unbind(0), strict=True)

    def _frozen(self, rows: Tensor) -> Tensor | None:
        """Returns the coordinates that stay, int64; None if all are moving."""
        if self.moving is None or bool(self.moving.all()):
            return None
        return on_device((~self.moving).nonzero()[:, 0], rows.device)

    def _pull(self, stack: StackedModule, anchors: Tensor, x: Tensor) -> Pull:
        assert self.divergence is not None
        assert isinstance(self.lam, (int, float))
        if stack.network is not None:
            values = stack.network.forward(anchors, x)
            if values is not None:
                return Pull(self.divergence, values[-1], self.lam)
        return Pull(self.divergence, stack.predict(anchors, x), self.lam)

    def on_records(
        self,
        stack: StackedModule,
        clients: Tensor,
        local_steps: LocalSteps,
        width: int = MICROBATCH,
    ) -> Iterator[PrivateStep]:
        """Yields the local steps of DP-SGD.

        ``local_steps`` has the number of steps of a client and the records of each. The
        regularizer needs no data and is added by the optimizer, after the release.

        Args:
            stack: see :meth:`train`.
            clients: int64 (k,), numbers in the data; each makes a step at least.
            local_steps: of the round, charged; it draws records, clips and adds noise.
            width: of :func:`~fedmtl.local.per_example.example_gradients`.
        """
        like = stack.rows
        steps = local_steps.steps(clients)
        frozen = self._frozen(like)
        first = self.data.train.offsets[clients]
        keys = self.data.keys[clients]
        # A client leads as long as it has a step left.
        for number in range(int(steps.max())):
            active = int((steps > number).sum())
            index, mask = local_steps.batch(clients[:active])
            # Gradients are computed in microbatches of a fixed size, see per_example.py.
            filler = -mask.shape[1] % MICROBATCH
            mask = pad(mask, (0, filler))
            index = torch.where(mask, pad(index, (0, filler)), 0)  # padding is read, but never used
            x, y = self.data.gather(
                "train", first[:active, None] + index, dtype=like.dtype, device=like.device
            )
            dropout = None
            if stack.has_dropout:
                made = local_steps.numbers(clients[:active])
                dropout = DropoutKeys(address_of(keys[:active], self.round, made), index)
            gradients = partial(
                example_gradients, stack, x, y, self.loss, mask=mask, width=width, dropout=dropout
            )
            release = partial(_release, local_steps, clients[:active], frozen)
            yield PrivateStep(
                active, (steps == number + 1).nonzero()[:, 0], gradients, release, mask.sum(1)
            )

    def train(
        self, stack: StackedModule, place: Tensor, steps: Iterator[PlainStep | PrivateStep]
    ) -> Trained:
        """Trains one stack of clients.

        Args:
            stack: computes all clients as one batch; its buffers are overwritten.
            place: int64 (k,), on the host, the clients' positions among the n, in the order of
                decreasing numbers of steps.
            steps: :meth:`on_batches` or :meth:`on_records`.

        Yields:
            Clients that have finished: their positions among the n, int64 (d,), and their models
            (d, D), which the next stack overwrites.
        """
        rows = stack.load(self.start, len(place), place=place)
        lam = self.lam
        if self.divergence is not None:  # the pull is then a part of the loss
            lam = 0.0
        # State such as momentum starts at zero in every participation: clients keep none of it.
        optimizer = self.solver.optimizer(
            rows, round=self.round, lam=rows_of(lam, place), anchor=rows_of(self.anchor, place)
        )
        beside: MixtureSteps | None = None
        if self.mixture is not None:
            beside = MixtureSteps(self.mixture, self.solver, self.round, rows, place)
        frozen = self._frozen(rows)
        still: Tensor | None = None
        if frozen is not None:
            still = rows[:, frozen].clone()
        correction = rows_of(self.correction, place)
        # Clients come in the order of decreasing numbers of steps, so that those with a step left
        # lead.
        for step in steps:
            if beside is not None:
                beside(step.active, step.descend_by_mean)
            descent: Descent = step.descend
            if correction is not None:
                descent = partial(_corrected, descent, rows_of(correction, slice(step.active)))
            optimizer.step(step.active, descent)
            if frozen is not None and still is not None:
                # An optimizer moves a coordinate without a gradient too, by its decay or its pull.
                rows[: step.active, frozen] = still[: step.active]
            if len(step.done):
                if beside is not None:
                    beside.write(step.done)
                # These rows are overwritten by the next stack; a caller that keeps them copies
                # them.
                yield from _finished(place, rows, step.done)


def _finished(place: Tensor, rows: Tensor, done: Tensor) -> Trained:
    """Yields the rows at ``done``, int64 (d,) on the host, ascending, and their places: long rows
    that are not consecutive one by one, since a copy of them costs more than a loop."""
    first = int(done[0])
    last = int(done[-1])
    if last - first + 1 == len(done):
        yield place[first : last + 1], rows[first : last + 1]
    elif rows.device.type == "cpu" and are_long(rows.shape[1]):
        for number in done.tolist():
            yield place[number : number + 1], rows[number : number + 1]
    else:
        yield place[done], rows[on_device(done, rows.device)]


def _corrected(
    descent: Descent, correction: Tensor, target: Tensor, keep: float, rate: float
) -> None:
    """Moves ``target`` along the gradients of ``descent`` plus a correction, (D,) or (A, D)."""
    descent(target, keep, rate)
    target.sub_(correction, alpha=rate)


def _release(
    local_steps: LocalSteps, clients: Tensor, frozen: Tensor | None, chunks: GradientChunks
) -> Tensor:
    """Releases the sums of gradients of records without their ``frozen`` coordinates."""
    if frozen is not None:
        # Before the clip: a frozen coordinate must not use up a part of the norm.
        chunks = ((part.index_fill(1, frozen, 0.0), owner) for part, owner in chunks)
    return local_steps.release(clients, chunks)


def address_of(keys: Tensor, round: int, step: int | Tensor) -> Tensor:
    """Returns the addresses of the dropout masks of a local step: client keys (k,), and the number
    of the step, one or (k,) -> int64 (k, 3)."""
    return torch.stack(
        [keys, torch.full_like(keys, round), torch.as_tensor(step).expand(len(keys))], dim=1
    )
