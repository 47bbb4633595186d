"""The server that waits for no node: it asks some, and steps when enough have answered."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np
import torch
from flwr.app import RecordDict
from torch import Tensor

from ..algorithms.base import State
from ..algorithms.rounds import RoundAlgorithm
from ..algorithms.starts import weighted
from ..algorithms.store import ClientStore, Fields
from ..errors import TrainingError
from ..privacy import ActivationChannel, BoundSampler, RecordPrivacy, RoundChannel
from ..schedules import Block, BoundBuffered
from ..schedules.answers import Answers, Limits, Server
from ..trainer.run_plan import RunPlan
from .account import schedule_of
from .messages import ROUND, checked_rows, logger
from .node_engine import COUNTED, NodeEngine
from .nodes import pause

_NAMED = 10  # most clients of a round in the log
FREE = "free"  # the first round for which a client may be asked
USED = "used"  # its answers that count for the cap on them


@dataclass(frozen=True)
class Question:
    """A question that a node has not answered.

    Attributes:
        client: position in the data.
        version: of the public state that it was sent.
        end: time at which its place is given to another client.
    """

    client: int
    version: int
    end: float


class Inbox(Server):
    """The questions to nodes, and their answers.

    The server counts versions itself: a node says nothing of the age of its answer. A question
    that has no answer after the patience of the nodes, or one without valid rows, gives its place
    to another client, and its own client is asked again only for a later round.

    The cap on the answers of a client counts those that are used. Under record privacy it counts
    questions: the client's own ledger charges each answer, also one that is lost or too late.

    Args:
        engine: with the nodes, the channel and the state of the run.
        plan: of the run.
        limits: of the questions and answers.
    """

    def __init__(self, engine: BufferedEngine, plan: RunPlan, limits: Limits) -> None:
        store = engine.state.private
        clients = torch.arange(plan.problem.clients)
        free = store.gather(FREE, clients)
        # the client whose last use is the oldest is asked first
        sampler = engine.channel.sampler
        assert isinstance(sampler, BoundBuffered)
        order = sampler.clients.order
        order = order[torch.argsort(free[order], stable=True)]
        super().__init__(order.tolist(), limits)
        self.free_from[:] = free.numpy()
        # a step that was charged and lost is in the account alone
        used = store.gather(USED, clients).numpy()
        self.used[:] = np.maximum(used, engine.channel.accountant.participations[0])
        self.changed: set[int] = set()  # clients with other counts than in the store
        self.by_question = isinstance(plan.settings.privacy, RecordPrivacy)
        self.engine = engine
        self.plan = plan
        self.ids = plan.problem.data.ids
        self.patience = engine.nodes.patience
        self.began = time.monotonic()
        self.open: dict[str, Question] = {}  # by the number of the message, in order
        self.rows: dict[int, dict[str, Tensor]] = {}  # of the answers that no step has taken
        self.failed: dict[int, int] = {}  # the last round in which a client had no answer
        self.asking = 0  # the round for which clients are asked
        self.idle_since: float | None = None  # since when no question is open

    @property
    def now(self) -> float:
        return time.monotonic() - self.began

    @property
    def begun(self) -> Sequence[int]:
        return [question.version for question in self.open.values()]

    def answers(self, step: int) -> Answers:
        if step not in self.made:
            self.asking = step
            self.made = {step: self.next(step)}
        return self.made[step]

    def take(self, clients: Sequence[int]) -> list[dict[str, Tensor]]:
        """Returns the rows of clients by release, each (1, d), and forgets them."""
        return [self.rows.pop(client) for client in clients]

    def save(self, store: ClientStore, clients: Sequence[int]) -> None:
        """Writes the counts of clients to a store, and those that have changed since."""
        changed = torch.tensor(sorted(self.changed.union(clients)))
        self.changed.clear()
        store.scatter(FREE, changed, torch.from_numpy(self.free_from)[changed])
        store.scatter(USED, changed, torch.from_numpy(self.used)[changed])

    def may_ask(self, client: int) -> bool:
        failed = self.failed.get(client) == self.asking
        return not failed and self.ids[client] in self.engine.nodes.there

    def send(self, clients: Sequence[int], version: int) -> None:
        engine = self.engine
        asked = torch.tensor(clients)
        contents = engine.contents(self.plan, engine.channel, engine.state, version, asked)
        names = engine.nodes.send(ROUND, contents)
        places = {self.ids[client]: client for client in clients}
        end = time.monotonic() + self.patience
        for number, name in names.items():
            self.open[number] = Question(places.pop(name), version, end)
        for client in places.values():  # messages that were not taken
            self._fail(client)

    def wait(self, step: int) -> None:
        """Looks once for replies, and pauses if there are none.

        Raises:
            BudgetExhausted: all clients are at their cap.
            TrainingError: no client could be asked for as long as the nodes have patience.
        """
        self.engine.nodes.connected()
        if not self.open:
            self._idle(step)
            return
        self.idle_since = None
        replies = self.engine.nodes.poll(self.open)
        # in the order of the questions
        for number in [number for number in self.open if number in replies]:
            self._hear(self.open.pop(number), replies[number])
        late = [number for number, question in self.open.items() if self._is_late(question)]
        for number in late:
            self._leave_out(self.open.pop(number).client, "no answer in time")
        if not replies and not late:
            pause()

    def drop(self, client: int) -> None:
        del self.rows[client]
        most = self.limits.max_staleness
        self._warn(client, f"its answer is more than {most} rounds old")
        self._lose(client)

    def _is_late(self, question: Question) -> bool:
        return time.monotonic() >= question.end

    def _hear(self, question: Question, reply: RecordDict | None) -> None:
        """Takes the answer to a question."""
        client = question.client
        engine = self.engine
        try:
            self.rows[client] = checked_rows(reply, engine.sizes, engine.run, question.version)
        except ValueError as error:
            self._leave_out(client, str(error))
        else:
            self.arrived.append((client, question.version))

    def _leave_out(self, client: int, reason: str) -> None:
        self._warn(client, reason)
        self._lose(client)
        self._fail(client)

    def _warn(self, client: int, reason: str) -> None:
        text = "round %d: client %r is left out of the sum: %s"
        logger.warning(text, self.asking + 1, self.ids[client], reason)

    def _fail(self, client: int) -> None:
        """Puts a client without an answer at the end of the queue."""
        self.failed[client] = self.asking
        self.waiting.append(client)

    def _lose(self, client: int) -> None:
        """Counts an answer that no step uses, if its client may have been charged for it."""
        if self.by_question:
            self.used[client] += 1
            self.changed.add(client)

    def _idle(self, step: int) -> None:
        """Pauses while there is nobody to ask.

        Raises:
            BudgetExhausted: see :meth:`wait`.
            TrainingError: see :meth:`wait`.
        """
        # those at the cap have left the queue
        if not any(self.free_from[client] <= step for client in self.waiting):
            raise self.exhausted(step)
        if self.idle_since is None:
            self.idle_since = time.monotonic()
        if time.monotonic() - self.idle_since >= self.patience:
            raise TrainingError(
                f"Round {step + 1} needs {self.limits.buffer} answers, and no client is left to be "
                "asked: those that are connected have answered, or had no answer in time. The run "
                "ends before a further round is charged. Start the nodes, or have the server wait "
                "longer for them (patience=), and run again."
            )
        pause()


@dataclass(kw_only=True)
class BufferedEngine(NodeEngine):
    """The engine of a run whose server waits for no node."""

    def init(self, plan: RunPlan, channel: RoundChannel | ActivationChannel) -> State:
        assert isinstance(channel, RoundChannel)  # see open
        self.channel = channel
        self.state = super().init(plan, channel)
        return self.state

    def fields(self) -> Fields:
        return {**super().fields(), FREE: ((), torch.int64), USED: ((), torch.int64)}

    def schedule(self, plan: RunPlan) -> BoundSampler:
        return schedule_of(plan.settings, partial(self._inbox, plan))

    def _inbox(self, plan: RunPlan, limits: Limits) -> Inbox:
        """Returns the inbox of a run, which asks from the first step of this process on."""
        self.inbox = Inbox(self, plan, limits)
        return self.inbox

    def step(
        self, plan: RunPlan, channel: RoundChannel | ActivationChannel, state: State, block: Block
    ) -> State:
        """Computes one round with the answers that have come, each with its public weight."""
        algorithm = plan.algorithm
        assert isinstance(algorithm, RoundAlgorithm)  # see check
        assert isinstance(channel, RoundChannel)  # see open
        step = block.first
        heard = block.ascending()
        clients = heard.cohort
        starts = heard.starts
        assert starts is not None
        logger.info(
            "round %d of %d: %s", step + 1, plan.stop, self._said(heard, plan.problem.data.ids)
        )
        rows = self.stacked(self.inbox.take(clients.tolist()))
        rows = weighted(rows, starts.weights, channel.clips)
        state.public = algorithm.release_and_update(
            plan.problem, state.public, rows, clients, step, channel
        )
        state.private.scatter(COUNTED, clients, starts.versions + 1)
        self.inbox.save(state.private, clients.tolist())
        return state

    def _said(self, block: Block, ids: Sequence[str]) -> str:
        """Returns the clients of a round in words, with the age of their answers."""
        assert block.starts is not None
        said = []
        for client, age in zip(
            block.cohort.tolist(), (block.first - block.starts.versions).tolist(), strict=True
        ):
            text = ids[client]
            if age:
                text += f" ({age} late)"
            said.append(text)
        if len(said) > _NAMED:
            said[_NAMED:] = ["…"]
        return ", ".join(said)
