"""Repetitions of a run over several ranks: each computes some of them by itself, and the first one speaks for all.

Repetitions are simulations that share the data and nothing else, so each rank has a channel and a schedule of its own
repetitions. The first rank has the channel of all as well: nothing is released by it, and it says what was charged.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from ..algorithms.base import Algorithm, Problem, State
from ..algorithms.store import ClientStore
from ..errors import BudgetExhausted
from ..privacy import Channel
from ..ranks import Ranks
from ..schedules import Block
from .checkpoint import Checkpoint
from .evaluation import Metrics
from .loop import Loop
from .replicates import measure_all
from .sources import Source


@dataclass(frozen=True, eq=False)
class Part:
    """What one rank computes of R repetitions.

    Attributes:
        numbers: of its repetitions.
        count: R.
        ranks: that compute all of them.
        algorithm: with the settings of these repetitions.
        channel: of these repetitions.
        source: of their steps.
    """

    numbers: range
    count: int
    ranks: Ranks
    algorithm: Algorithm
    channel: Channel
    source: Source

    def init(self, problem: Problem) -> State:
        """Return the state before the first event."""
        return self.algorithm.init(problem, len(self.numbers))

    def join(self, values: Tensor, axis: int = 0, *, at_all: bool = True) -> Tensor:
        """Return values of all repetitions, which stand along ``axis``, from those of every rank."""
        rows = values.movedim(axis, 0).contiguous()
        found = self.ranks.join(rows, torch.tensor(self.numbers), self.count, at_all=at_all)
        return found.movedim(0, axis)

    def cut(self, values: Tensor, axis: int) -> Tensor:
        """Return the values of these repetitions, from those of all along ``axis``."""
        return values.narrow(axis, self.numbers.start, len(self.numbers)).clone()

    def whole(self, problem: Problem, state: State) -> State:
        """Return the state of all repetitions, at the first rank."""
        public, private = self._axes(problem)
        found = dict(state.public)
        for name, axis in public.items():
            found[name] = self.join(found[name], axis, at_all=False)
        everyone, store = torch.arange(problem.clients), state.private
        rows = {name: store.gather(name, everyone) for name in store.fields}
        rows |= {name: self.join(rows[name], axis, at_all=False) for name, axis in private.items()}
        fields = {name: (tuple(value.shape[1:]), value.dtype) for name, value in rows.items()}
        kept = ClientStore(problem.clients, fields, device=store.device if rows else "cpu")
        for name, value in rows.items():
            kept.assign(name, value)
        return State(found, kept)

    def restore(self, checkpoint: Checkpoint, problem: Problem) -> State:
        """Return the state of these repetitions from a checkpoint of all, and set the channel to what they spent."""
        public, private = self._axes(problem)
        state = self.init(problem)
        own = replace(
            checkpoint,
            public=self._cut_all(checkpoint.public, public),
            private=self._cut_all(checkpoint.private, private),
        )
        self.channel.restore(self._cut_all(checkpoint.channel, {"uses": 0}))
        return own.restore(state, problem.initial.device)

    def _cut_all(self, tensors: Mapping[str, Tensor], axes: Mapping[str, int]) -> dict[str, Tensor]:
        return {name: self.cut(value, axes[name]) if name in axes else value for name, value in tensors.items()}

    def _axes(self, problem: Problem) -> tuple[dict[str, int], dict[str, int]]:
        """Return along which axis repetitions stand, of the public tensors and of rows (n, ...) of the clients' own; a
        tensor that is not named is the same for all."""
        one, two = (self.algorithm.init(problem, count) for count in (1, 2))
        public = {name: (value.shape, two.public[name].shape) for name, value in one.public.items()}
        fields = one.private.fields, two.private.fields
        private = {name: ((0, *shape), (0, *fields[1][name][0])) for name, (shape, _) in fields[0].items()}
        return tuple(  # type: ignore[return-value]
            {
                name: next(axis for axis in range(len(first)) if first[axis] != second[axis])
                for name, (first, second) in shapes.items()
                if first != second
            }
            for shapes in (public, private)
        )


class PartSource(Source):
    """The blocks of some repetitions, which end for all ranks where they end for one.

    Args:
        part: of this rank.
        whole: the steps of all repetitions, at the first rank: of rounds it charges them, too.
    """

    def __init__(self, part: Part, whole: Source | None) -> None:
        super().__init__(part.channel, part.source.stop, part.source.every)
        self.part, self.whole = part, whole

    def blocks(self, start: int) -> Iterator[Block]:
        """Everything from step ``start`` on."""
        return self.part.source.blocks(start)

    def begin(self, block: Block) -> None:
        """Charge what happens in the block; raises BudgetExhausted at all ranks, and then it is charged nowhere."""
        account = self.part.channel.account
        before = account.state() if account.by_client else {}
        try:
            with self.part.ranks.agree():
                self.part.source.begin(block)
                if self.whole is not None and not account.by_client:
                    self.whole.channel.draw(block.first)
                    self.whole.begin(block)
        except BudgetExhausted:
            account.restore(before)
            raise


@dataclass
class PartLoop(Loop):
    """The loop of a rank that computes some repetitions; what is written and returned is of all."""

    part: Part = field(kw_only=True)

    def step(self, state: State, block: Block) -> State:
        return self.part.algorithm.step(self.problem, state, block, self.part.channel)

    def measured(self, state: State) -> tuple[dict[str, Tensor], Metrics]:
        columns, first = measure_all(self.problem, self.part.algorithm, state, self.trainer.further_metrics)
        columns = {name: self.part.join(values) for name, values in columns.items()}
        self._charge_whole()
        return columns, self.ranks.share(lambda: first)

    def gathered(self, state: State) -> State:
        self._charge_whole()
        return self.part.whole(self.problem, state)

    def _charge_whole(self) -> None:
        """Bring the account of all repetitions, at the first rank, to what the parts have used."""
        account = self.part.channel.account
        if account.by_client:
            uses = self.part.join(torch.from_numpy(account.participations), at_all=False)
            if self.ranks.first:
                self.channel.account.restore(account.state() | {"uses": uses})

    def shared(self, state: State) -> Tensor | None:
        return self.ranks.share(lambda: self.part.algorithm.shared(state))

    def models(self, state: State) -> tuple[Tensor, dict[str, Tensor]]:
        return self.ranks.share(lambda: super(PartLoop, self).models(state))
