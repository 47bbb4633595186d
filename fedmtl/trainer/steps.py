"""The loop over the steps of a run: every block is charged, then computed."""

from __future__ import annotations

from collections.abc import Iterator

from ..algorithms.base import State
from ..privacy import Activations, Rounds
from ..schedules import Block, BoundBuffered, BoundSchedule, rounds
from .engine import Engine
from .run_plan import RunPlan


def training_steps(
    plan: RunPlan, engine: Engine, channel: Rounds | Activations, state: State, start: int
) -> Iterator[tuple[Block, State]]:
    """Yields the blocks of a run from a step on, each with the state after it.

    A block is a round with its cohort, or several activations of single clients.

    Args:
        plan: of the run.
        engine: computes the clients' part.
        channel: open; it charges a block before it is computed.
        state: before step ``start``; a step may change it in place.
        start: number of steps done.

    Raises:
        BudgetExhausted: a client would exceed its budget in the next block.
    """
    for block in _blocks(plan, channel, start):
        # The charge is on the disk before the data are read, in secure mode.
        channel.begin(block.first, block.clients)
        state = engine.step(plan, channel, state, block)
        yield block, state


def _blocks(plan: RunPlan, channel: Rounds | Activations, start: int) -> Iterator[Block]:
    """Returns the blocks from step ``start`` on.

    They are cohorts that the channel draws with the privacy coins, or activations of the public
    schedule; a block of these ends if the run is evaluated or saved there.
    """
    settings = plan.settings
    schedule = settings.bound
    if isinstance(schedule, BoundSchedule):
        cuts = [plan.every, *filter(None, [settings.checkpoint_every])]
        return schedule.blocks(settings.seed, start, plan.stop, cuts=cuts, replicates=settings.runs)
    assert isinstance(channel, Rounds)
    drawn = rounds(channel.draw, start=start, stop=plan.stop)
    if not isinstance(schedule, BoundBuffered):
        return drawn
    capped = channel.sampler  # with the cap of the account
    assert isinstance(capped, BoundBuffered)
    return (capped.block(block.first, block.cohort) for block in drawn)
