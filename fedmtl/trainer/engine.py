"""The engine of a run, whose clients compute in this process and its ranks, and the loop over the
steps: every block is charged, then computed."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor

from ..algorithms.base import Algorithm, State
from ..algorithms.local_only import Local
from ..algorithms.returned import check_state
from ..privacy import ActivationChannel, NoiseSource, RoundChannel
from ..ranks import SINGLE, Ranks
from ..schedules import Block, BoundBuffered, BoundSchedule, Deadline, rounds
from .aggregates import numbers_of, summarize
from .evaluation import Metrics, evaluate_each, evaluate_models
from .run_channel import open_run
from .run_plan import RunPlan


@dataclass(kw_only=True)
class Engine:
    """The execution of the clients' part of a run: in this process, or in one of its ranks each.

    A subclass computes it elsewhere, such as on the nodes of a network.

    Args:
        ranks: the processes that were started; a run of one may start others.
        coins: source of the noise and the cohorts, in place of the seed; all that is public stays
            that of the seed, and nothing is logged, nor are local trainings counted.
        facts: replace those of the channel in the run's report.
        stop: number of steps after which the run ends; None for all that are planned.
    """

    ranks: Ranks = SINGLE
    coins: NoiseSource | None = None
    facts: Mapping[str, Any] = field(default_factory=dict)
    stop: int | None = None

    def open(self, plan: RunPlan, resume: bool) -> RoundChannel | ActivationChannel:
        """Returns the open channel of a run.

        Args:
            plan: of the run.
            resume: True to continue the ledger in the run's folder.
        """
        return open_run(
            plan.settings,
            plan.problem,
            plan.fingerprint,
            ledger=plan.ledger,
            resume=resume,
            coins=self.coins,
        )

    def init(self, plan: RunPlan, channel: RoundChannel | ActivationChannel) -> State:
        """Returns the state before the first step.

        Args:
            plan: of the run.
            channel: open, with the releases of every step.
        """
        state = plan.algorithm.init(plan.problem, plan.settings.runs)
        check_state(type(plan.algorithm).__name__, state, State)
        return state

    def step(
        self, plan: RunPlan, channel: RoundChannel | ActivationChannel, state: State, block: Block
    ) -> State:
        """Returns the state after a block.

        Args:
            plan: of the run.
            channel: the one that has charged the block.
            state: before the block; it may be changed in place.
            block: a round, or activations.
        """
        return plan.algorithm.step(plan.problem, state, block, channel)

    def measure(
        self, plan: RunPlan, state: State
    ) -> tuple[list[dict[str, float]], dict[str, Metrics]]:
        """Returns the numbers of every replicate, and the scores of the first one by model.

        The personal models come last. Nothing is scored by an engine without the data.

        Args:
            plan: with the clients that are evaluated.
            state: that is scored.
        """
        problem = plan.problem
        algorithm = plan.algorithm
        evaluated = plan.evaluated
        metrics = plan.settings.resolved_metrics
        scores = dict[str, Metrics]()
        if plan.settings.runs > 1:
            models = algorithm.models(problem, state, torch.arange(problem.clients))
            each = evaluate_models(problem, models, metrics)
        else:
            if (model := algorithm.shared(state)) is not None:
                scores["shared"] = evaluate_models(
                    evaluated, model.expand(1, evaluated.clients, -1), metrics
                )[0]
            if _is_everyones(plan, model, state):
                each = [scores["shared"]]
            else:
                personal = partial(algorithm.personalize, problem, state)
                each = [evaluate_each(problem, personal, plan.clients, metrics)]
        # Most methods have no objective, and gathering the clients' states is expensive.
        if type(algorithm).objective is not Algorithm.objective:
            state = State(state.public, problem.gathered(state.private))
        objective = algorithm.objective(problem, state)
        numbers = [numbers_of(evaluated, scored) for scored in each]
        if objective is not None:
            numbers = [
                row | {"objective": value}
                for row, value in zip(numbers, objective.tolist(), strict=True)
            ]
        if scores:
            numbers[0] |= summarize(evaluated, scores["shared"], "global_")
        return numbers, scores | {"personal": each[0]}

    def models(
        self, plan: RunPlan, channel: RoundChannel | ActivationChannel, state: State, done: int
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """Returns the personal models (n, D) after the last step, and their decomposition in the
        method's paper by name.

        If clients were drawn for evaluation, they are the models (k, D) of these, without a
        decomposition.

        Args:
            plan: with the clients that are evaluated.
            channel: of the run.
            state: after the last step.
            done: number of steps.
        """
        problem = plan.problem
        algorithm = plan.algorithm
        clients = plan.clients
        if _is_everyones(plan, algorithm.shared(state), state):
            personal = algorithm.personalize(problem, state, clients)
        else:
            personal = problem.spread(
                lambda here: algorithm.personalize(problem, state, here), clients
            )
        if len(clients) < problem.clients or type(algorithm).parts is Algorithm.parts:
            return personal, {}
        whole = State(state.public, problem.gathered(state.private))
        return personal, algorithm.parts(problem, whole, personal)


def _is_everyones(plan: RunPlan, model: Tensor | None, state: State) -> bool:
    """Returns True if the personal models are a view of the shared one, which is then scored
    once."""
    if model is None or state.private.fields:
        return False
    # Two clients show it: a view of one row has a stride of 0, whatever the number of clients.
    rows = plan.algorithm.personalize(plan.problem, state, plan.clients[:2])
    return (len(rows) == 1 or rows.stride(0) == 0) and torch.equal(rows[0], model.to(rows))


def training_steps(
    plan: RunPlan,
    engine: Engine,
    channel: RoundChannel | ActivationChannel,
    state: State,
    start: int,
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
    in_time = _in_time(plan)
    for drawn in _blocks(plan, channel, start):
        # The charge is on the disk before the data are read, in secure mode.
        channel.begin(drawn.first, drawn.clients)
        block = in_time(drawn)
        state = engine.step(plan, channel, state, block)
        yield block, state


def _blocks(
    plan: RunPlan, channel: RoundChannel | ActivationChannel, start: int
) -> Iterator[Block]:
    """Returns the blocks from step ``start`` on.

    They are cohorts that the channel draws with the privacy coins, or activations of the public
    schedule; a block of these ends if the run is evaluated or saved there.
    """
    settings = plan.settings
    schedule = settings.bound_schedule
    if isinstance(schedule, BoundSchedule):
        cuts = [plan.every, *filter(None, [settings.checkpoint_every])]
        return schedule.blocks(settings.seed, start, plan.stop, cuts=cuts, replicates=settings.runs)
    assert isinstance(channel, RoundChannel)
    drawn = rounds(channel.draw, start=start, stop=plan.stop)
    if not isinstance(schedule, BoundBuffered):
        return drawn
    capped = channel.sampler  # with the cap of the account
    assert isinstance(capped, BoundBuffered)
    return (capped.block(block.first, block.cohort) for block in drawn)


def _in_time(plan: RunPlan) -> Callable[[Block], Block]:
    """Returns a function from a round to the part of it that answers by the deadline, if the
    schedule has one. All of the cohort are charged."""
    settings = plan.settings
    schedule = settings.schedule
    # a deadline does not apply to local training
    if not isinstance(schedule, Deadline) or isinstance(plan.algorithm, Local):
        return lambda block: block
    limit = schedule.limit
    answers = schedule.in_time(settings.data.ids, settings.data.keys, settings.seed)

    def kept(block: Block) -> Block:
        there = answers(block.first)
        # canaries behind the clients are never late
        beyond = block.cohort >= len(there)
        cohort = block.cohort[beyond | there[block.cohort.clamp(max=len(there) - 1)]]
        time = torch.full_like(block.time, (block.first + 1) * limit)
        return Block(block.first, time, cohort[None, None])

    return kept
