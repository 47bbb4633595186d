"""A node's own account: the privacy cost of its answers, in a ledger on its own disk.

If the noise is the node's, so is the account: nothing that a server does, or says of itself, can
make a node release more than was planned. The ledger is that of all runs that the node ever took
part in, for any server. Every answer is a session of it: the ledger is opened, charged on the disk,
and closed when the answer is on the disk. Rounds in which the node was not asked are written as
such. In secure mode an answer that a crash has lost stays charged.

An answer is charged because it is sent, whatever becomes of it. So a server that waits for nobody
is charged for answers that come too late, and after the end, like for those that it uses.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from dataclasses import replace

import torch

from .._files import Json, plain, read_json, write_json
from .._rounding import rounded_up
from ..algorithms.base import Problem
from ..errors import BudgetExhausted, ResumeError
from ..privacy import LocalSteps, Receipt, RecordPrivacy, RoundChannel
from ..privacy.channel_report import privacy_report
from ..privacy.dp_sgd import local_receipt
from ..privacy.ledger import Ledger
from ..privacy.record_calibration import most_participations
from ..privacy.report import SIMULATED
from ..privacy.row_noise import row_facts
from ..privacy.samplers import BoundSampler
from ..privacy.single_client import BoundSingleClient
from ..schedules import BoundBuffered
from ..schedules.answers import Limits, Server
from ..trainer import Trainer
from ..trainer.folder import RunFolder
from ..trainer.run_channel import open_run
from ..trainer.run_fingerprint import fingerprint
from .messages import logger

_REMEDY = "Run with privacy.source=secure, or simulate it anew in a new folder"


def schedule_of(trainer: Trainer, serve: Callable[[Limits], Server] | None = None) -> BoundSampler:
    """Returns the schedule of a run with nodes.

    Args:
        trainer: the settings.
        serve: makes the server that waits for nobody; None on a node.
    """
    bound = trainer.bound_schedule
    assert isinstance(bound, BoundSampler)  # clients that act one at a time have no nodes
    if isinstance(bound, BoundBuffered):
        return bound.deployed(serve)
    return bound


class NodeAccount:
    """The account of one node, and the channel that its answers go through.

    If the node noises the gradients of its own records, or rows have noise against the server,
    answers are charged to the ledger in the private part of the folder. If the noise is the
    server's, there is no account here, and the channel only clips; that of a secure sum is
    :class:`~fedmtl.privacy.secure_sum.ShareAccount`.

    Args:
        trainer: the settings, resolved.
        population: the problem of the server.
        problem: the same with the node's own data.
        folder: of the node.

    Attributes:
        channel: a channel for the time outside of an answer; it releases nothing.
        records: the privacy of the node's own records, with its own epsilon; None without, and in
            a secure sum.
        pooled: True if a secure sum adds up the gradients of the records of all nodes.
    """

    def __init__(
        self, trainer: Trainer, population: Problem, problem: Problem, folder: RunFolder
    ) -> None:
        self.trainer = trainer
        self.problem = problem
        self.folder = folder
        self.name = problem.data.ids[0]
        self.position = trainer.data.ids.index(self.name)
        self.fingerprint = fingerprint(problem, trainer)
        self.records: RecordPrivacy | None = None
        settings = trainer
        privacy = trainer.privacy
        self.pooled = False
        if isinstance(privacy, RecordPrivacy) and problem.protects_records:
            self.pooled = privacy.aggregation is not None
        if isinstance(privacy, RecordPrivacy) and problem.protects_records and not self.pooled:
            ids = trainer.data.ids
            epsilon = privacy.budgets(ids)[ids.index(self.name)]
            self.records = replace(privacy, epsilon=epsilon)
            # outside of an answer the node releases nothing and needs no budget
            settings = replace(trainer, privacy=None)
        channel = open_run(settings, population, sampler=schedule_of(trainer))
        assert isinstance(channel, RoundChannel)
        self.channel = channel

    @contextmanager
    def answer(self, step: int, asked: str) -> Iterator[tuple[RoundChannel, Receipt]]:
        """Charges an answer in round ``step``, if the node has an account, and yields its channel
        and the receipt of its rows.

        On entry the charge is on the disk.

        Args:
            step: the round of the run.
            asked: a digest of the question and of the client's state. Seeded noise is that of the
                round, in every run: the answers to two questions would differ by their values
                without noise, so the second question is refused.

        Raises:
            BudgetExhausted: all answers that were planned have been given.
            ResumeError: the ledger was written with other settings, or was altered. Or the noise is
                seeded, and another question of this round was answered, or a later round was
                answered but not this one.
        """
        with self._opened() as (channel, ledger):
            if ledger is not None:
                if ledger.replays_free:
                    self._ask_once(step, asked)
                self._reach(channel, ledger, step)
            # the channel of records charges its ledger itself; a ledger of rows has no channel
            if self.records is not None:
                channel.begin(step, channel.draw(step))
            elif ledger is not None:
                ledger.charge(step, step + 1, [[0]])
            elif self.pooled:
                channel.local = self._steps_of_sum(channel, step)
            yield channel, Receipt(step, 0, torch.tensor([self.position]))

    def _steps_of_sum(self, channel: RoundChannel, step: int) -> LocalSteps:
        """Returns the local step whose clipped gradients a secure sum adds up: its row is charged
        before it has noise, and leaves the node after that.

        Args:
            channel: of the population.
            step: the round.
        """
        plan = self.trainer.algorithm.gradient_plan(self.problem, 1)
        (release,) = channel.releases.values()
        records = channel.records_of(plan, release.width)
        return LocalSteps(records, local_receipt(plan, step, torch.zeros(1, dtype=torch.int64)))

    @contextmanager
    def _opened(self) -> Iterator[tuple[RoundChannel, Ledger | None]]:
        """Yields the channel of the answers and their open ledger, None if they are free."""
        if self.records is not None:
            with closing(self._of_records(self.records)) as channel:
                yield channel, channel.accountant.ledger
        elif self.channel.row_noise:
            with self._of_rows() as ledger:
                yield self.channel, ledger
        else:
            yield self.channel, None

    def _ask_once(self, step: int, asked: str) -> None:
        """Writes down the question of a round, or refuses one that differs from it."""
        path = self.folder.root / "asked.json"
        before: dict[str, str] = {}
        if path.exists():
            before = read_json(path)
        if before.setdefault(str(step), asked) != asked:
            raise ResumeError(
                f"the server asks for round {step + 1} again, in another run with other values. "
                "Under seeded noise the two answers would have the same, and show the records by "
                f"their difference: such a node gives one answer a round ({path}). {_REMEDY}."
            )
        write_json(path, before)

    def certify(self) -> None:
        """Writes the report of the account so far.

        For records it is ``public/privacy.json``, which ``fedmtl verify`` compares with the ledger.
        A node without an account writes nothing.
        """
        with self._opened() as (channel, ledger):
            if ledger is None:
                return
            answers = int(ledger.uses()[0])
            reached = ledger.reached
            if self.records is not None:
                channel.start(reached)
            report = privacy_report(channel)
        if self.records is None:
            cost = _cost(channel, answers)
            if ledger.replays_free:
                cost = f"{SIMULATED}; {cost}"
            logger.info("%s after %d answers: %s", self.name, answers, cost)
            return
        facts = report.with_ledger(ledger).to_dict()
        write_json(self.folder.public / "privacy.json", facts)
        about = {
            "algorithm": self.trainer.algorithm.name,
            "rounds": reached,
            "planned_rounds": self.trainer.rounds,
            "stopped": "rounds",
        }
        # fedmtl verify reads a node's folder like that of a run
        write_json(self.folder.private / "result.json", plain(about | facts))
        self.folder.write_lists()
        epsilon = f"epsilon {rounded_up(report.epsilon)} of its records"
        verify = f"fedmtl verify {self.folder.root}"
        logger.info("%s: %s, %s; %s", self.name, epsilon, report.publication, verify)

    def _of_records(self, privacy: RecordPrivacy) -> RoundChannel:
        """Returns the channel of the node's own local steps, which continues its ledger."""
        sampler = schedule_of(self.trainer)
        rounds = self.problem.rounds
        most = None
        if not privacy.noiseless:
            most = most_participations(sampler.capped(rounds), rounds)
        channel = open_run(
            replace(self.trainer, privacy=privacy),
            self.problem,
            self.fingerprint,
            # the server decides about the rounds: they are charged without amplification
            sampler=BoundSingleClient(1, 1, sampler.describe(), most),
            ledger=self.folder.ledger,
            resume=True,
        )
        assert isinstance(channel, RoundChannel)
        return channel

    def _of_rows(self) -> Ledger:
        """Returns the ledger of answers whose rows have noise."""
        privacy = self.trainer.privacy
        clip_norm = None
        if privacy is not None:
            clip_norm = privacy.initial_norm
        about: dict[str, Json] = {
            "account": "rows",
            "client": self.name,
            "answers": self.problem.rounds,  # the noise on rows is calibrated to this number
            "clip_norm": clip_norm,
        }
        return Ledger(
            self.folder.ledger,
            about | row_facts(self.channel.plans, self.channel.row_noise),
            fingerprint=self.fingerprint,
            replays_free=self.channel.source.name == "seeded",
            clients=1,
            resume=True,
        )

    def _reach(self, channel: RoundChannel, ledger: Ledger, step: int) -> None:
        """Writes the uncharged rounds before ``step`` to the ledger, as rounds without this node.

        Raises:
            BudgetExhausted: all answers that were planned are charged.
            ResumeError: the noise is seeded, and the ledger has passed this round without an
                answer.
        """
        most = self.problem.rounds
        if self.records is not None:
            most = int(channel.caps[0])
        # a seeded answer to a round of the past is the one that was given, and not charged again
        before = step if ledger.replays_free else None
        answers = int(ledger.uses(before=before)[0])
        if answers >= most:
            raise BudgetExhausted(
                f"{self.name} has given the {most:,} answers that its privacy pays for, in all "
                f"runs and those that a crash has lost: {_cost(channel, answers)}. "
                f"{self.folder.ledger} has them, and no run gets more. A new folder begins a new "
                "account, whose epsilon adds to that of this one."
            )
        # rounds that have passed without a question to this node
        if ledger.reached < step:
            missed = step - ledger.reached
            ledger.charge(ledger.reached, step, [[]] * missed)
        if not ledger.replays_free or step >= ledger.reached:
            return
        if int(ledger.uses(before=step + 1)[0]) == answers:
            raise ResumeError(
                f"the server asks for round {step + 1}, which has passed without this node. Under "
                "seeded noise a round of the past is not charged, since its answer was given "
                f"before; this one was not ({self.folder.ledger}). {_REMEDY}."
            )


def _cost(channel: RoundChannel, answers: int) -> str:
    """Returns the privacy cost of so many answers, in words."""
    if channel.row_noise:
        return "; ".join(noise.text(answers) for noise in channel.row_noise.values())
    return f"epsilon {rounded_up(channel.epsilon_at(answers))} of its records"
