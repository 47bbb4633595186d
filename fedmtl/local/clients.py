"""Local training of the clients of a cohort: the stacks in which they are computed.

Clients are trained in stacks of the executor's size, each to its end. Neither the batches of a
client nor the last bits of its model depend on the clients beside it.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from itertools import chain
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from .._devices import on_device
from .batches import BatchPlan, plan_batches
from .executor import Executor
from .optimizers import rows_of
from .per_example import MICROBATCH
from .stacking import MOST_CLIENTS, batch_widths, lanes, places, stack_sizes
from .train import LocalTraining, Trained

if TYPE_CHECKING:
    from ..data import FederatedDataset
    from ..privacy import LocalSteps
    from .solver import LocalSolver

_PLANNED = 1 << 24  # row numbers of 8 bytes that are planned at once


@dataclass(frozen=True, eq=False)
class PlannedStacks:
    """Clients with batches of one width, in the order of their stacks.

    Attributes:
        data: of the clients.
        solver: of their training.
        seed, round: address the batches.
        order: int64 (P,), the client of each place of the stacks, a position among those that are
            trained; P is a multiple of ``grain``.
        real: bool (P,), False of places that fill up a stack, whose results are not used.
        clients: int64 (P,), the client of each place, a position in the data.
        width: B, columns of every batch.
        grain: number in whose multiples the clients are stacked.
        stack: clients of a stack, at most.
    """

    data: FederatedDataset
    solver: LocalSolver
    seed: int
    round: int
    order: Tensor
    real: Tensor
    clients: Tensor
    width: int
    grain: int
    stack: int

    @cached_property
    def plan(self) -> BatchPlan:
        """Returns the batches of all places, planned at once: a plan costs as much for few clients
        as for many."""
        steps = self.solver.step_counts(self.data.train.counts[self.clients])
        return plan_batches(
            self.data,
            self.solver,
            self.clients,
            seed=self.seed,
            round=self.round,
            steps=torch.where(self.real, steps, 0),  # a filler never finishes
            width=self.width,
            grain=self.grain,
        )


@dataclass(frozen=True, eq=False)
class Piece:
    """A piece of the cohort: clients that are computed in one call, and their planned stacks.

    Attributes:
        clients: int64 (k,), positions in the data.
        planned: has their stacks; None if they are not known before the training.
        stacks: the places of their stacks in ``planned``.
    """

    clients: Tensor
    planned: PlannedStacks | None = None
    stacks: slice | None = None

    def trains(self, training: LocalTraining, clients: Tensor) -> bool:
        """Returns True if the planned batches are those of a training of ``clients``."""
        planned = self.planned
        if planned is None or clients is not self.clients:
            return False
        return training.round == planned.round and training.solver == planned.solver

    def train(self, training: LocalTraining, executor: Executor) -> Tensor:
        """Trains the clients on the planned batches, see :func:`train_on_batches`."""
        planned = self.planned
        assert planned is not None
        assert self.stacks is not None
        # A filler reads the model of the real client before it.
        place = (torch.cumsum(planned.real[self.stacks], 0) - 1).clamp(min=0)
        plan = planned.plan.part(self.stacks)
        finished = _train_stacks(training, executor, planned.stack, plan, place)
        return _models(training, executor, plan.steps[planned.real[self.stacks]], finished)


def pieces_of(
    data: FederatedDataset,
    solver: LocalSolver,
    executor: Executor,
    clients: Tensor,
    *,
    size: int,
    seed: int,
    round: int,
    cohort: Tensor | None = None,
) -> Iterator[Piece]:
    """Divides clients into pieces, of which each has whole stacks of :func:`train_on_batches`.

    Args:
        data: the clients' data.
        solver: of the training.
        executor: computes the stacks.
        clients: int64 (k,), positions in the data.
        size: of a piece, which has one stack at least.
        seed: addresses the batches.
        round: addresses the batches.
        cohort: see :func:`train_on_batches`.

    Yields:
        The pieces, of which those of the same planned stacks share their plan.
    """
    for planned in _planned_stacks(data, solver, executor, clients, seed, round, cohort):
        whole = max(1, size // planned.stack) * planned.stack
        for first in range(0, len(planned.clients), whole):
            stacks = slice(first, first + whole)
            yield Piece(planned.clients[stacks][planned.real[stacks]], planned, stacks)
    still = clients[solver.step_counts(data.train.counts[clients]) == 0]
    if len(still):
        yield from map(Piece, still.split(size))


def train_on_batches(
    training: LocalTraining,
    executor: Executor,
    clients: Tensor,
    *,
    seed: int,
    cohort: Tensor | None = None,
) -> Tensor:
    """Trains clients on batches of their examples, by local SGD.

    Clients with batches of one width share a stack, in their lanes, so that no client's last bits
    depend on the numbers of examples of others; see :mod:`fedmtl.local.stacking`.

    Args:
        training: the local training, whose models have a row for each client.
        executor: computes the stacks.
        clients: int64 (k,), positions in the data.
        seed: addresses the batches.
        cohort: int64 (m,), all participants of the round, of whom these clients are a part; None:
            all clients of the data.

    Returns:
        The models (k, D). That of a client without a local step is its start.
    """
    stacks = _planned_stacks(
        training.data, training.solver, executor, clients, seed, training.round, cohort
    )
    finished = chain.from_iterable(
        _train_stacks(training, executor, planned.stack, planned.plan, planned.order)
        for planned in stacks
    )
    steps = training.solver.step_counts(training.data.train.counts[clients])
    return _models(training, executor, steps, finished)


def _planned_stacks(
    data: FederatedDataset,
    solver: LocalSolver,
    executor: Executor,
    clients: Tensor,
    seed: int,
    round: int,
    cohort: Tensor | None,
) -> Iterator[PlannedStacks]:
    """Yields the clients that make a local step, in blocks whose batches are planned at once."""
    counts = data.train.counts[clients]
    steps = solver.step_counts(counts)
    widths = batch_widths(counts, solver.batch_size)
    lane = lanes(clients, cohort)
    for width in widths[steps > 0].unique().tolist():
        alike = ((widths == width) & (steps > 0)).nonzero()[:, 0]
        grain, stack = stack_sizes(width, executor.chunk)
        order, real = places(steps[alike], lane[alike], grain)
        planned = min(MOST_CLIENTS, _PLANNED // (int(steps[alike].max()) * width))
        size = max(1, planned // grain) * grain
        for some, used in zip(alike[order].split(size), real.split(size), strict=True):
            yield PlannedStacks(
                data, solver, seed, round, some, used, clients[some], width, grain, stack
            )


def _train_stacks(
    training: LocalTraining, executor: Executor, size: int, plan: BatchPlan, place: Tensor
) -> Trained:
    """Trains stacks of at most ``size`` clients, each to its end, on the batches of a plan;
    ``place`` is that of each client among the models of the training."""
    for first in range(0, len(place), size):
        part = slice(first, first + size)
        batches = training.on_batches(executor.stack, plan.part(part), place[part])
        yield from training.train(executor.stack, place[part], batches)


def train_on_records(
    training: LocalTraining, executor: Executor, clients: Tensor, local_steps: LocalSteps
) -> Tensor:
    """Trains clients by DP-SGD, on the local steps that the ledger has charged.

    Args:
        training: the local training, whose models have a row for each client.
        executor: computes the stacks.
        clients: int64 (k,), positions in the data.
        local_steps: of the round, charged.

    Returns:
        The models (k, D). That of a client without a local step is its start.
    """
    width = executor.examples_at_once(float(local_steps.plan.expected.max(initial=0.0)))
    steps = local_steps.steps(clients)
    # clients with many steps come first, so that those of a stack end together
    order = torch.argsort(steps, descending=True, stable=True)
    order = order[steps[order] > 0]
    finished = chain.from_iterable(
        training.train(
            executor.stack,
            order[part],
            training.on_records(executor.stack, clients[order[part]], local_steps, width),
        )
        for part in executor.slices(len(order), width=MICROBATCH)
    )
    return _models(training, executor, steps, finished)


def _models(
    training: LocalTraining, executor: Executor, steps: Tensor, finished: Trained
) -> Tensor:
    """Returns the models of k clients, (k, D), from the places and models of those that finish.

    Those without a local step, of ``steps`` (k,), have their starts.
    """
    rows = executor.stack.rows
    models = rows.new_empty(len(steps), rows.shape[1])
    for place, trained in finished:
        models.index_copy_(0, on_device(place, models.device), trained)
    still = (steps == 0).nonzero()[:, 0]
    if len(still):
        models[on_device(still, models.device)] = rows_of(training.start, still).to(models)
    return models
