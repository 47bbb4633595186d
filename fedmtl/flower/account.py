"""A node's own account: what its answers cost, on its own disk, to any server and however often it asks.

Where the noise is the node's, so is the account: nothing that a server does, or says of itself, can make a node release
more than was planned. Every answer is a session of the node's ledger, of all runs that it ever took part in: the ledger
is opened, charged on the disk, and closed when the answer is on the disk. Rounds in which the node was not asked are
written as such. In secure mode an answer that a crash has lost stays charged.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import closing, contextmanager
from dataclasses import asdict, replace

from .._files import read_json
from .._rounding import rounded_up
from ..algorithms.base import Problem
from ..errors import BudgetExhausted, ResumeError
from ..privacy import RecordPrivacy, Rounds, open_channel
from ..privacy.ledger import Ledger
from ..privacy.opening import most_participations
from ..privacy.report import SIMULATED
from ..privacy.row_noise import row_key
from ..privacy.samplers import BoundAsked, BoundSampler
from ..trainer import Trainer
from ..trainer.engine import releases_of
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
        assert isinstance(trainer.bound, BoundSampler)
        self.sampler = trainer.bound
        privacy = trainer.privacy
        self.records = privacy if isinstance(privacy, RecordPrivacy) and problem.protects_records else None
        if self.records is not None:
            if isinstance(self.records.epsilon, Mapping):
                budgets = dict(zip(population.data.ids, self.records.budgets(population.data.ids), strict=True))
                self.records = replace(self.records, epsilon=budgets[problem.data.ids[0]])
            self.channel = self._of_records(replace(self.records, epsilon=float("inf"), noise_multiplier=None))
            return
        if privacy is not None and not privacy.noiseless:  # the noise on sums is the server's affair
            privacy = replace(privacy, epsilon=None, noise_multiplier=privacy.noise_multiplier or 1.0)
        plans = trainer.algorithm.plan(population, self.sampler)
        channel = open_channel(privacy, plans, self.sampler, seed=trainer.seed, steps=population.rounds)
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
                question of this round was answered.
        """
        self._ask_once(step, asked)
        if self.records is not None:
            with closing(self._of_records(self.records, self.folder)) as channel:
                if channel.account.ledger is not None:  # else it only clips
                    self._reach(channel.account.ledger, step, int(channel.caps[0]))
                channel.start(step)
                channel.begin(step, channel.draw(step))
                yield channel
        elif self.channel.rows:
            with self._of_rows() as ledger:
                self._reach(ledger, step, self.problem.rounds)
                ledger.charge(step, step + 1, [[0]])
                yield self.channel
        else:
            yield self.channel

    def _ask_once(self, step: int, asked: str) -> None:
        """Write down the question of a round where noise is seeded, or refuse one that is another."""
        noisy = self.channel.rows if self.records is None else not self.records.noiseless
        if not noisy or self.channel.source.name != "seeded":
            return
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
        if self.records is not None and not self.records.noiseless:
            with closing(self._of_records(self.records, self.folder)) as channel:
                assert channel.account.ledger is not None
                reached = channel.account.ledger.reached
                channel.start(reached)
                report = channel.report
            facts = report.with_ledger(channel.account.ledger).to_dict()
            write_json(self.folder.public / "privacy.json", facts)
            about = {"algorithm": self.trainer.algorithm.name, "rounds": reached, "planned_rounds": self.trainer.rounds}
            write_json(self.folder.private / "result.json", plain(about | {"stopped": "rounds"} | facts))
            self.folder.write_lists()
            values = self.problem.data.ids[0], rounded_up(report.epsilon), report.publication, self.folder.root
            logger.info("%s: epsilon %s of its records, %s; fedmtl verify %s", *values)
        elif self.channel.rows:
            with self._of_rows() as ledger:
                answers = int(ledger.uses()[0])
            simulated = f"{SIMULATED}; " if self.channel.source.name == "seeded" else ""
            for noise in self.channel.rows.values():
                cost = simulated + noise.text(answers)
                logger.info("%s after %d answers: %s", self.problem.data.ids[0], answers, cost)

    def _of_records(self, privacy: RecordPrivacy, folder: RunFolder | None = None) -> Rounds:
        """Return the channel of the node's own local steps, by its ledger where a folder is given."""
        trainer, problem = self.trainer, self.problem
        most = None if privacy.noiseless else most_participations(self.sampler.capped(problem.rounds), problem.rounds)
        asked = BoundAsked(1, self.sampler.describe(), most)
        channel = open_channel(
            privacy,
            releases_of(trainer.algorithm, problem, asked),
            asked,
            seed=trainer.seed,
            steps=problem.rounds,
            fingerprint=fingerprint(problem, trainer),
            ledger_path=None if folder is None else folder.ledger,
            resume=folder is not None,
            notes=problem.notes,
        )
        assert isinstance(channel, Rounds)
        return channel

    def _of_rows(self) -> Ledger:
        """Return the ledger of answers whose rows have noise."""
        rows, privacy = self.channel.rows, self.trainer.privacy
        plans = [plan for plan in self.channel.plans if plan.name in rows]
        about = {
            "account": "rows",
            "client": self.problem.data.ids[0],
            "answers": self.problem.rounds,  # to which the noise on rows is calibrated
            "clip_norm": None if privacy is None else privacy.initial_norm,
        }
        about |= {row_key(name): noise.multiplier for name, noise in rows.items()}
        about |= {f"rows of {plan.name}": None if plan.rows is None else asdict(plan.rows) for plan in plans}
        return Ledger(
            self.folder.ledger,
            about,
            fingerprint=fingerprint(self.problem, self.trainer),
            replays_free=self.channel.source.name == "seeded",
            clients=1,
            resume=True,
        )

    def _paid(self, answers: int) -> str:
        """Return what so many answers cost, in words."""
        if self.records is None:
            return "; ".join(noise.text(answers) for noise in self.channel.rows.values())
        if not isinstance(self.records.epsilon, (int, float)):
            return f"as many as one client has in {self.trainer.rounds:,} rounds"
        return f"the noise is calibrated to them, for a budget of epsilon {rounded_up(self.records.epsilon, 6)}"

    def _reach(self, ledger: Ledger, step: int, most: int) -> None:
        """Note that rounds before ``step`` that are not charged were not this node's.

        Raises:
            BudgetExhausted: ``most`` answers are charged.
        """
        answers = int(ledger.uses(before=step if ledger.replays_free else None)[0])
        if answers >= most:
            raise BudgetExhausted(
                f"{self.problem.data.ids[0]} has given the {most:,} answers that its privacy pays for, in all runs "
                f"and those that a crash has lost: {self._paid(answers)}. {self.folder.ledger} has them, and no "
                f"run gets more. A new folder begins a new account, whose epsilon adds to that of this one."
            )
        if ledger.reached < step:
            ledger.charge(ledger.reached, step, [[]] * (step - ledger.reached))
