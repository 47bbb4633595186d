"""Local training on a device that is fed by a queue: everything that a round needs is sent at once, no number is asked
for, and the local steps of a size are recorded once and replayed."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from .._devices import sent_together
from ..stacked.graphs import Work
from .batches import BatchPlan
from .optimizers import StackedOptimizer, rows_of
from .precision import Precision

if TYPE_CHECKING:
    from ..data import FederatedDataset
    from ..stacked import StackedModule
    from ..stacked.graphs import Graph

Step = Callable[[int, Tensor, Tensor, Tensor, "Tensor | None"], None]
"""(leading clients A, x (A, B, ...), y (A, B, ...), mask (A, B), address (A, 3)) -> their rows are moved."""

Build = Callable[[Tensor, Any, Any], "tuple[Step, StackedOptimizer]"]
"""(rows (K, D), anchor, strength of the pull) -> a local step of these rows, and its optimizer."""


class SentPlan:
    """The local steps of a plan on a device, sent in one copy.

    Args:
        plan: of k clients.
        place: int64 (k,), on the host, the clients' rows in what they start from and end in.
        size: clients K of the stack, from k on; those beyond k are copies of the first, and nothing is written of them.
        device: where the stack is.
        addressed: whether the model has dropout, whose masks are addressed.
        active: leading clients -> how many are computed, from as many to K.

    Attributes:
        table: int64 (S, K, B + 1), rows of the data and the number of them that are no padding; of a model with dropout
            (S, K, B + 4), with the key, the round and the step behind them.
        rows: int64 (S, K, B), the rows of the data alone, on the host.
        place: int64 (K,).
        active: clients that are computed, by step.
        width: B.
    """

    def __init__(
        self,
        plan: BatchPlan,
        place: Tensor,
        *,
        size: int,
        device: torch.device,
        addressed: bool,
        active: Callable[[int], int],
    ) -> None:
        steps, most = plan.steps, plan.max_steps
        rows, lengths = plan.index[:most], torch.from_numpy(plan.lengths[:most])
        parts = [lengths[..., None]]
        if addressed:
            parts += [
                plan.keys[:, None].expand(most, -1, 1),
                torch.full((most, len(steps), 1), plan.round),
                torch.arange(most)[:, None, None].expand(most, len(steps), 1),
            ]
        members = torch.cat([torch.arange(len(steps)), torch.zeros(size - len(steps), dtype=torch.int64)])
        order = torch.argsort(steps, stable=True)
        order = order[steps[order] > 0]
        self.width = rows.shape[-1]
        self.rows = rows[:, members]
        self.active = [min(size, active(count)) for count in plan.leading()]
        self._ends = [0, *torch.searchsorted(steps[order], torch.arange(1, most + 1), right=True).tolist()]
        self.table, self.place, self._order, self._to = sent_together(
            [torch.cat([self.rows, *(part[:, members] for part in parts)], 2), place[members], order, place[order]],
            device,
        )

    def write(self, step: int, rows: Tensor, out: Tensor, less: Tensor | None, kept: Tensor | None) -> None:
        """Write the models of the clients whose last step this was, less ``less`` (D,), from ``rows`` (K, D) to ``out``
        (n, D), and as they are to ``kept`` (n, D)."""
        done = slice(self._ends[step], self._ends[step + 1])
        if done.start < done.stop:
            ended = rows.index_select(0, self._order[done])
            if kept is not None:
                kept.index_copy_(0, self._to[done], ended)
            out.index_copy_(0, self._to[done], ended if less is None else ended.sub_(less))


def run_step(
    step: Step, data: FederatedDataset, table: Tensor, width: int, dtype: torch.dtype, rows: Tensor | None = None
) -> None:
    """Make a local step of the leading clients, given their part of :attr:`SentPlan.table`, (A, B + 1) or (A, B + 4),
    and of :attr:`SentPlan.rows` where the data are on the host."""
    x, y = data.gather("train", table[:, :width] if rows is None else rows, dtype=dtype, device=table.device)
    mask = torch.arange(width, device=table.device) < table[:, width, None]
    step(len(table), x, y, mask, table[:, width + 1 :] if table.shape[1] > width + 1 else None)


class Program:
    """The local steps of a stack on memory that stays where it is, recorded by the number of clients and the width of
    their batches.

    Args:
        stack: with at least ``size`` copies from now on.
        data: on the stack's device.
        size: most clients K.
        anchor, lam: as they are given in the first run; later ones have the same form.
        build: makes the step.
    """

    def __init__(
        self, stack: StackedModule, data: FederatedDataset, size: int, anchor: Any, lam: Any, build: Build
    ) -> None:
        stack.reserve(size)
        self.buffer, self.rows, self.data, self.size = stack.rows, stack.rows[:size], data, size
        self.anchor, self.lam = (_fixed(value, self.rows) for value in (anchor, lam))
        self.step, self.optimizer = build(self.rows, self.anchor, self.lam)
        self.repeats = self.optimizer.restart()
        self._tables: dict[int, Tensor] = {}
        self._graphs: dict[tuple[int, int], Graph | None] = {}

    def prepare(self, stack: StackedModule, plan: SentPlan, begin: Callable[[], None]) -> bool:
        """Record what is missing for a plan, whose steps start from what ``begin`` writes; the stack's rows are worth
        nothing then. False where that cannot be."""
        assert stack.graphs is not None
        width = plan.width
        if width not in self._tables:
            shape = (self.size, plan.table.shape[-1])
            self._tables[width] = torch.zeros(shape, dtype=torch.int64, device=self.rows.device)
        for active in sorted(set(plan.active), reverse=True):
            if (active, width) in self._graphs:
                continue
            table = self._tables[width][:active]
            table.copy_(plan.table[plan.active.index(active), :active])

            def step(table: Tensor = table) -> None:
                run_step(self.step, self.data, table, width, self.rows.dtype)

            work = Work(step, begin, self.rows[: active : max(1, active - 1)])
            beside = next(filter(None, self._graphs.values()), None)
            self._graphs[active, width] = stack.graphs.capture(work, self.rows.device, beside)
        return all(self._graphs[active, width] is not None for active in set(plan.active))

    def start(self, place: Tensor, anchor: Any, lam: Any) -> None:
        """Begin a run of the clients at ``place`` (K,): write their anchors and strengths, and forget all steps."""
        for fixed, value in ((self.anchor, anchor), (self.lam, lam)):
            if isinstance(fixed, Tensor):
                if fixed.dim() == 2:
                    torch.index_select(value, 0, place, out=fixed[: len(place)])
                else:
                    fixed.copy_(value)
        self.optimizer.restart()

    def run(self, table: Tensor, width: int) -> None:
        """Make a local step by its part of a plan's table, (A, B + 1) or (A, B + 4)."""
        self._tables[width][: len(table)].copy_(table)
        graph = self._graphs[len(table), width]
        assert graph is not None
        graph.replay()


def train_on_device(
    stack: StackedModule,
    data: FederatedDataset,
    plan: BatchPlan,
    start: Tensor,
    *,
    out: Tensor,
    place: Tensor,
    less: Tensor | None,
    kept: Tensor | None,
    anchor: Tensor | None,
    lam: Any,
    build: Build,
    key: Hashable | None,
) -> None:
    """Do what :func:`fedmtl.local.train_locally` does, without waiting for the device.

    Args:
        stack, data, plan, start, out, place, less, kept, anchor, lam: as there; ``place`` on the host.
        build: makes the local step.
        key: of everything that a recorded step depends on beside its memory; None where none can be recorded.
    """
    k, graphs = len(plan.steps), stack.graphs
    here = data.train.x.device == start.device
    dense = here and data.train.x.layout == torch.strided
    records = graphs is not None and key is not None and dense and not isinstance(lam, Precision)

    def rounded(count: int) -> int:
        return (
            graphs.size(count, plan.grain) if records and graphs is not None else -(-count // plan.grain) * plan.grain
        )

    size = max(k, rounded(k)) if records and plan.grain > 1 else k
    sent = SentPlan(plan, place, size=size, device=start.device, addressed=stack.has_dropout, active=rounded)
    program: Program | None = None
    if records and graphs is not None:
        forms = [(tuple(v.shape[1:]), v.dim()) if isinstance(v, Tensor) else v for v in (anchor, lam)]
        program = graphs.program(
            (key, id(data), *forms),
            lambda found: found.buffer is stack.rows and found.size >= size,
            lambda: Program(stack, data, size, anchor, lam, build),
        )

        def begin(program: Program = program) -> None:
            stack.load(start, size, place=sent.place)
            program.start(sent.place, anchor, lam)

        if not program.repeats or not program.prepare(stack, sent, begin):
            program = None
    rows = stack.load(start, size, place=sent.place)
    if program is not None:
        program.start(sent.place, anchor, lam)
        step = None
    else:
        step, _ = build(rows, rows_of(anchor, sent.place), rows_of(lam, sent.place))
    for number, active in enumerate(sent.active):
        table = sent.table[number, :active]
        if program is not None:
            program.run(table, sent.width)
        elif step is not None:
            run_step(step, data, table, sent.width, rows.dtype, None if here else sent.rows[number, :active])
        sent.write(number, rows, out, less, kept)


def _fixed(value: Any, rows: Tensor) -> Any:
    """Return memory for a tensor (D,), or for one of K rows; another value as it is."""
    if not isinstance(value, Tensor):
        return value
    return torch.zeros_like(value) if value.dim() < 2 else value.new_zeros(len(rows), *value.shape[1:])
