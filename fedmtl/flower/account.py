"""A node's own account: what its answers cost, on its own disk, to any server and however often it asks.

Where the noise is the node's, so is the account: nothing that a server does, or says of itself, can make a node release
more than was planned. Every answer is a session of the node's ledger, of all runs that it ever took part in: the ledger
is opened, charged on the disk, and closed when the answer is on the disk. Rounds in which the node was not asked are
written as such. In secure mode an answer that a crash has lost stays charged.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing, contextmanager
from dataclasses import replace

from .._files import read_json
from .._rounding import rounded_up
from ..algorithms.base import Problem
from ..errors import BudgetExhausted, ResumeError
from ..privacy import RecordPrivacy, Rounds
from ..privacy.ledger import Ledger
from ..privacy.opening import most_participations
from ..privacy.report import SIMULATED
from ..privacy.row_noise import row_facts
from ..privacy.samplers import BoundAsked, BoundSampler
from ..trainer import Trainer
from ..trainer.engine import open_run
from ..trainer.folder import RunFolder, plain, write_json
from ..trainer.problem import fingerprint
from .messages import logger


class NodeAccount:
    """The account of one node, and the channel that its answers go through.

    Records that are protected, or rows that have noise against the server, are charged to the ledger in the private
    part of the folder; where the noise is the server's there is no account here, and the channel only clips.

    Args:
        trainer: the settings, resolved.
        population: the problem of the server.
        problem: the same with the node's own data.
        folder: of the node.

    Attributes:
        channel: for what a node does outside of an answer; it releases nothing.
    """

    def __init__(self, trainer: Trainer, population: Problem, problem: Problem, folder: RunFolder) -> None:
        self.trainer, self.problem, self.folder = trainer, problem, folder
        self.name, self.fingerprint = problem.data.ids[0], fingerprint(problem, trainer)
        privacy, ids = trainer.privacy, trainer.data.ids
        self.records: RecordPrivacy | None = None
        if isinstance(privacy, RecordPrivacy) and problem.protects_records:
            self.records = replace(privacy, epsilon=privacy.budgets(ids)[ids.index(self.name)])
        channel = open_run(trainer if self.records is None else replace(trainer, privacy=None), population)
        assert isinstance(channel, Rounds)
        self.channel = channel

    @contextmanager
    def answer(self, step: int, asked: str) -> Iterator[Rounds]:
        """Charge an answer in round ``step``, where the node pays for its answers, and yield the channel that it goes
        through; on entry the charge is on the disk.

        Args:
            step: of the run.
            asked: a digest of the question and of what the client keeps. Seeded noise is that of the round, in every
                run, so that the answers to two questions differ by what they are without noise: the second is refused.

        Raises:
            BudgetExhausted: all answers that were planned have been given.
            ResumeError: the ledger was written with other settings, or was altered; or the noise is seeded, and another
                question of this round, or a later round but not this one, was answered.
        """
        with self._opened() as (channel, ledger):
            if ledger is not None:
                if ledger.replays_free:
                    self._ask_once(step, asked)
                self._reach(channel, ledger, step)
            if self.records is not None:
                channel.begin(step, channel.draw(step))
            elif ledger is not None:
                ledger.charge(step, step + 1, [[0]])
            yield channel

    @contextmanager
    def _opened(self) -> Iterator[tuple[Rounds, Ledger | None]]:
        """Open the ledger of the answers, None where they cost nothing, and yield it with the channel that they go
        through."""
        if self.records is not None:
            with closing(self._of_records(self.records)) as channel:
                yield channel, channel.account.ledger
        elif self.channel.rows:
            with self._of_rows() as ledger:
                yield self.channel, ledger
        else:
            yield self.channel, None

    def _ask_once(self, step: int, asked: str) -> None:
        """Write down the question of a round, or refuse one that is another."""
        path = self.folder.root / "asked.json"
        before = read_json(path) if path.exists() else {}
        if before.setdefault(str(step), asked) != asked:
            raise ResumeError(
                f"the server asks for round {step + 1} again, in another run with other values. Under seeded noise the "
                f"two answers would have the same, and show the records by their difference: such a node gives one "
                f"answer a round ({path}). Run with privacy.source=secure, or simulate it anew in a new folder."
            )
        write_json(path, before)

    def certify(self) -> None:
        """Write what the account says so far: for records ``public/privacy.json``, which ``fedmtl verify`` compares
        with the ledger; nothing where the node has no account."""
        with self._opened() as (channel, ledger):
            if ledger is None:
                return
            answers, reached = int(ledger.uses()[0]), ledger.reached
            if self.records is not None:
                channel.start(reached)
            report = channel.report
        if self.records is None:
            simulated = f"{SIMULATED}; " if ledger.replays_free else ""
            logger.info("%s after %d answers: %s%s", self.name, answers, simulated, _cost(channel, answers))
            return
        facts = report.with_ledger(ledger).to_dict()
        write_json(self.folder.public / "privacy.json", facts)
        about = {"algorithm": self.trainer.algorithm.name, "rounds": reached, "planned_rounds": self.trainer.rounds}
        write_json(self.folder.private / "result.json", plain(about | {"stopped": "rounds"} | facts))
        self.folder.write_lists()
        values = self.name, rounded_up(report.epsilon), report.publication, self.folder.root
        logger.info("%s: epsilon %s of its records, %s; fedmtl verify %s", *values)

    def _of_records(self, privacy: RecordPrivacy) -> Rounds:
        """Return the channel of the node's own local steps, which continues its ledger."""
        sampler, rounds = self.trainer.bound, self.problem.rounds
        assert isinstance(sampler, BoundSampler)
        most = None if privacy.noiseless else most_participations(sampler.capped(rounds), rounds)
        channel = open_run(
            replace(self.trainer, privacy=privacy),
            self.problem,
            self.fingerprint,
            sampler=BoundAsked(1, 1, sampler.describe(), most),
            ledger=self.folder.ledger,
            resume=True,
        )
        assert isinstance(channel, Rounds)
        return channel

    def _of_rows(self) -> Ledger:
        """Return the ledger of answers whose rows have noise."""
        privacy = self.trainer.privacy
        about = {
            "account": "rows",
            "client": self.name,
            "answers": self.problem.rounds,  # to which the noise on rows is calibrated
            "clip_norm": None if privacy is None else privacy.initial_norm,
        }
        return Ledger(
            self.folder.ledger,
            about | row_facts(self.channel.plans, self.channel.rows),
            fingerprint=self.fingerprint,
            replays_free=self.channel.source.name == "seeded",
            clients=1,
            resume=True,
        )

    def _reach(self, channel: Rounds, ledger: Ledger, step: int) -> None:
        """Note that rounds before ``step`` that are not charged were not this node's.

        Raises:
            BudgetExhausted: all answers that were planned are charged.
            ResumeError: the noise is seeded, and the ledger has passed this round without an answer.
        """
        most = self.problem.rounds if self.records is None else int(channel.caps[0])
        answers = int(ledger.uses(before=step if ledger.replays_free else None)[0])
        if answers >= most:
            raise BudgetExhausted(
                f"{self.name} has given the {most:,} answers that its privacy pays for, in all runs and those that a "
                f"crash has lost: {_cost(channel, answers)}. {self.folder.ledger} has them, and no run gets more. A "
                f"new folder begins a new account, whose epsilon adds to that of this one."
            )
        if ledger.reached < step:
            ledger.charge(ledger.reached, step, [[]] * (step - ledger.reached))
        if ledger.replays_free and step < ledger.reached and int(ledger.uses(before=step + 1)[0]) == answers:
            raise ResumeError(
                f"the server asks for round {step + 1}, which has passed without this node. Under seeded noise a round "
                f"of the past is not charged, since its answer was given before; this one was not ({self.folder.ledger}"
                "). Run with privacy.source=secure, or simulate it anew in a new folder."
            )


def _cost(channel: Rounds, answers: int) -> str:
    """Return what so many answers cost, in words."""
    rows = "; ".join(noise.text(answers) for noise in channel.rows.values())
    return rows or f"epsilon {rounded_up(channel.epsilon_at(answers))} of its records"
