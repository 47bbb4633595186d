"""Runs that an audit repeats on other data with the releases forced to a recording."""

from __future__ import annotations

from collections.abc import Callable, Generator
from contextlib import closing
from typing import Any

from torch import Tensor

from ...algorithms.base import Problem, State
from ...data import FederatedDataset
from ...errors import BudgetExhausted
from ...local import operation_threads
from ...privacy import Channel
from ...privacy.channel import Recording, Tap
from ..trainer import Trainer


def states(
    trainer: Trainer,
    data: FederatedDataset,
    rounds: int,
    *,
    record: list[tuple[int, str, Tensor]] | None = None,
    replay: Recording | None = None,
    tap: Tap | None = None,
    opened: Callable[[Channel], None] | None = None,
    finish: Callable[[Problem, State], None] | None = None,
) -> Generator[tuple[State, Any], None, None]:
    """Yield the states of a run of the trainer's algorithm on ``data``: the first one, then that after every block.

    Under record-level privacy the messages of clients are functions of the released gradients, and only these are
    forced.

    Args:
        trainer: the configuration.
        data: of the clients.
        rounds: rounds, or activations, that are run.
        record: every release is appended.
        replay: what is released in place of what the data give.
        tap: is called with all that is handed to a release.
        opened: is called with the channel before anything happens.
        finish: is called with the problem and the last state.

    Yields:
        The state, which the next block may change in place, and the block, None before the first.
    """
    problem, algorithm = trainer.problem(data=data, device="cpu"), trainer.algorithm
    with closing(problem.executor), operation_threads(problem.clients * problem.dimension):
        channel, source = trainer.open(problem, "audit", replay=replay)
        if opened is not None:
            opened(channel)
        channel.record, channel.tap = record, tap
        state = algorithm.init(problem)
        yield state, None
        with closing(channel):
            channel.start(0)
            try:
                for block in source.blocks(0):
                    source.begin(block)
                    state = algorithm.step(problem, state, block, channel)
                    yield state, block
                    if block.step + 1 >= rounds:
                        break
            except BudgetExhausted:
                pass
        if finish is not None:
            finish(problem, state)
