"""Local training of the clients of a cohort: the stacks in which they are computed.

Clients are trained in stacks of the executor's size, each to its end. Neither the batches of a
client nor the last bits of its model depend on the clients beside it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from .batches import LANES, batch_widths, grain_of, places, plan_batches, plannable
from .executor import Executor
from .optimizers import rows_of
from .train import LocalTraining, Trained

if TYPE_CHECKING:
    from ..data import FederatedDataset
    from ..privacy import LocalSteps
    from .solver import LocalSolver


def pieces_of(
    data: FederatedDataset,
    solver: LocalSolver,
    executor: Executor,
    clients: Tensor,
    *,
    size: int,
    members: Tensor | None = None,
) -> list[Tensor]:
    """Divides clients into pieces, of which each has whole stacks of :func:`train_on_batches`.

    Args:
        data: the clients' data.
        solver: of the training.
        executor: computes the stacks.
        clients: int64 (k,), positions in the data.
        size: of a piece, which has one stack at least.
        members: see :func:`train_on_batches`.

    Returns:
        The clients of every piece, int64 each.
    """
    counts = data.train.counts[clients]
    steps = solver.step_counts(counts)
    widths = batch_widths(counts, solver.batch_size)
    lanes = _ranks(clients, members) % LANES
    pieces = []
    for width in widths.unique().tolist():
        alike = (widths == width).nonzero()[:, 0]
        grain = grain_of(width, executor.chunk)
        # the stacks of all clients of this width; a piece has whole ones
        order, real = places(steps[alike], lanes[alike], grain)
        stack = executor.stack_size(grain)
        whole = max(1, size // stack) * stack
        for place, used in zip(alike[order].split(whole), real.split(whole), strict=True):
            pieces.append(clients[place[used]])
    return pieces


def train_on_batches(
    run: LocalTraining,
    executor: Executor,
    clients: Tensor,
    *,
    seed: int,
    members: Tensor | None = None,
) -> Trained:
    """Trains clients on batches of their examples, by local SGD.

    Clients with batches of one width share a stack, in their lanes, so that no client's last bits
    depend on the numbers of examples of others; see :mod:`fedmtl.local.batches`.

    Args:
        run: the local training, whose models have a row for each client.
        executor: computes the stacks.
        clients: int64 (k,), positions in the data.
        seed: addresses the batches.
        members: int64 (m,), all participants of the round, of whom these clients are a part; None:
            all clients of the data.

    Yields:
        Places among ``clients`` and their models, as they finish. The model of a client without a
        local step is its start.
    """
    counts = run.data.train.counts[clients]
    steps = run.solver.step_counts(counts)
    widths = batch_widths(counts, run.solver.batch_size)
    lanes = _ranks(clients, members) % LANES
    for width in widths[steps > 0].unique().tolist():
        alike = ((widths == width) & (steps > 0)).nonzero()[:, 0]
        grain = grain_of(width, executor.chunk)
        order, real = places(steps[alike], lanes[alike], grain)
        block = plannable(int(steps[alike].max()), width, grain)
        for place, used in zip(alike[order].split(block), real.split(block), strict=True):
            plan = plan_batches(
                run.data,
                run.solver,
                clients[place],
                seed=seed,
                round=run.round,
                steps=torch.where(used, steps[place], 0),  # a filler never finishes
                width=width,
                grain=grain,
            )
            # stacks of the executor's size, each trained to its end
            for part in executor.slices(len(place), grain=grain):
                batches = run.on_batches(executor.stack, plan.part(part), place[part])
                yield from run.train(executor.stack, place[part], batches)
    yield from idle(run, steps)


def train_on_records(
    run: LocalTraining, executor: Executor, clients: Tensor, records: LocalSteps
) -> Trained:
    """Trains clients by DP-SGD, on the local steps that the ledger has charged.

    Args:
        run: the local training, whose models have a row for each client.
        executor: computes the stacks.
        clients: int64 (k,), positions in the data.
        records: the local steps of the round.

    Yields:
        Places among ``clients`` and their models, as they finish. The model of a client without a
        local step is its start.
    """
    width = executor.examples_at_once(float(records.plan.expected.max(initial=0.0)))
    steps = records.steps(clients)
    # clients with many steps come first, so that those of a stack end together
    order = torch.argsort(steps, descending=True, stable=True)
    order = order[steps[order] > 0]
    grain = None
    if executor.chunk < LANES:
        grain = 1
    for part in executor.slices(len(order), grain=grain):
        private = run.on_records(executor.stack, clients[order[part]], records, width)
        yield from run.train(executor.stack, order[part], private)
    yield from idle(run, steps)


def idle(run: LocalTraining, steps: Tensor) -> Trained:
    """Yields the clients without a local step, with their starts as models.

    Args:
        run: the local training.
        steps: (k,), local steps of each client.
    """
    place = (steps == 0).nonzero()[:, 0]
    if len(place):
        yield place, rows_of(run.start, place).expand(len(place), -1)


def _ranks(clients: Tensor, members: Tensor | None) -> Tensor:
    """Returns the position of each client among the participants of the round, int64 (k,)."""
    rank = clients.cpu()
    if members is None:
        return rank
    ordered, order = torch.sort(members)
    return order[torch.searchsorted(ordered, rank)]
