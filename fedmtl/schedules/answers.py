"""The answers of clients to a server that waits for nobody: its queue, and a simulation of the
clients in virtual time."""

from __future__ import annotations

import heapq
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from ..errors import BudgetExhausted
from .activations import BoundSchedule


@dataclass(frozen=True, kw_only=True)
class Limits:
    """The limits of questions and answers.

    Attributes:
        concurrency: number of busy clients.
        buffer: answers of a server step.
        max_staleness: most server steps from a question to the use of its answer.
        rest: least number of server steps between two uses of a client's answers.
        max_uses: the largest number of answers of a client that are used; None for no cap.
    """

    concurrency: int
    buffer: int
    max_staleness: int
    rest: int
    max_uses: int | None


@dataclass(frozen=True)
class Answers:
    """The answers of one server step, in the order of the clients.

    Attributes:
        step: number s of the step, from 0: it makes version s + 1 of the shared model from s.
        time: virtual time of the step.
        clients: int64 (buffer,), distinct.
        versions: int64 (buffer,), version of the shared model from which each client started, at
            most ``step``.
        kept: the versions up to ``step`` from which answers that may still be used started.
    """

    step: int
    time: float
    clients: Tensor
    versions: Tensor
    kept: frozenset[int]


class Server(ABC):
    """A server that waits for nobody: the queue of its clients, and its steps.

    Args:
        order: all clients, in the order in which they wait at first.
        limits: of the questions and answers.

    Attributes:
        limits: see above.
        made: steps, by number.
        waiting: free clients, in the order of the queue.
        arrived: client and version of the answers that no step has taken yet.
        used: int64 (n,), the answers of each client that were used.
        free_from: int64 (n,), the first version from which a client may start.
    """

    def __init__(self, order: Sequence[int], limits: Limits) -> None:
        self.limits = limits
        self.made: dict[int, Answers] = {}
        self.waiting = deque(order)
        self.arrived: deque[tuple[int, int]] = deque()
        self.used = np.zeros(len(order), np.int64)
        self.free_from = np.zeros(len(order), np.int64)

    @property
    @abstractmethod
    def now(self) -> float:
        """Returns the time."""

    @abstractmethod
    def answers(self, step: int) -> Answers:
        """Returns the answers of a step.

        Raises:
            BudgetExhausted: too few clients can answer.
        """

    @property
    @abstractmethod
    def begun(self) -> Sequence[int]:
        """Returns the versions of the questions without an answer, one for each busy client."""

    @abstractmethod
    def send(self, clients: Sequence[int], version: int) -> None:
        """Asks free clients.

        Args:
            clients: that leave the queue.
            version: of the public state from which they start.
        """

    @abstractmethod
    def wait(self, step: int) -> None:
        """Waits until something has happened, and appends the answers that have come to
        :attr:`arrived`.

        Args:
            step: that needs them.

        Raises:
            BudgetExhausted: no client can answer any more.
        """

    def may_ask(self, client: int) -> bool:
        """Returns True if a client can be asked at this moment; always by default."""
        return True

    @abstractmethod
    def drop(self, client: int) -> None:
        """Leaves out an answer that is too old."""

    def next(self, step: int) -> Answers:
        """Returns the answers of the next step."""
        limits = self.limits
        taken: list[tuple[int, int]] = []
        while len(taken) < limits.buffer:
            while not self.arrived:
                self._ask(step)
                self.wait(step)
            client, version = self.arrived.popleft()
            self.waiting.append(client)
            if step - version > limits.max_staleness:
                self.drop(client)
                continue
            taken.append((client, version))
            self.used[client] += 1
            self.free_from[client] = step + limits.rest
        clients, versions = torch.tensor(sorted(taken)).T
        oldest = step + 1 - limits.max_staleness
        begun = [*self.begun, *(version for _, version in self.arrived)]
        kept = frozenset(version for version in begun if version >= oldest)
        return Answers(step, self.now, clients, versions, kept)

    def _ask(self, version: int) -> None:
        """Asks free clients in the order of the queue, until ``concurrency`` are busy."""
        cap = self.limits.max_uses
        free = self.limits.concurrency - len(self.begun)
        chosen: list[int] = []
        passed: list[int] = []
        while self.waiting and len(chosen) < free:
            client = self.waiting.popleft()
            if cap is not None and self.used[client] >= cap:
                continue  # never asked again
            if self.free_from[client] > version or not self.may_ask(client):
                passed.append(client)
            else:
                chosen.append(client)
        self.waiting.extendleft(reversed(passed))
        if chosen:
            self.send(chosen, version)

    def exhausted(self, step: int) -> BudgetExhausted:
        """Returns the error of a step for which too few clients can answer."""
        return BudgetExhausted(
            f"Step {step} needs {self.limits.buffer} answers, but no more clients can "
            "answer: they are at the cap of answers (per_client), or away for good."
        )


class Simulation(Server):
    """A server whose clients answer after latencies that follow from settings and a seed.

    Args:
        times: latencies and absences of the clients.
        seed: of these.
        at_once: True if answers take no time, whatever the latencies.
        order: see :class:`Server`.
        limits: of the questions and answers.
    """

    def __init__(
        self, times: BoundSchedule, seed: int, at_once: bool, order: Sequence[int], limits: Limits
    ) -> None:
        super().__init__(order, limits)
        self.gaps, self.absences = times.draws(seed)
        self.at_once = at_once
        self.asked = np.zeros(times.clients, np.int64)
        self.questions = 0
        # (time of the answer, number of the question, client, version at the question)
        self.busy: list[tuple[float, int, int, int]] = []
        # latencies of all clients, by the number of the question
        self.drawn: list[np.ndarray] = []
        self._now = 0.0

    @property
    def now(self) -> float:
        return self._now

    @property
    def begun(self) -> Sequence[int]:
        return [version for _, _, _, version in self.busy]

    def answers(self, step: int) -> Answers:
        for number in range(len(self.made), step + 1):
            self.made[number] = self.next(number)
        return self.made[step]

    def send(self, clients: Sequence[int], version: int) -> None:
        for client in clients:
            # answers of one moment arrive in the order of their questions
            heapq.heappush(self.busy, (self._due(client), self.questions, client, version))
            self.questions += 1
            self.asked[client] += 1

    def wait(self, step: int) -> None:
        """Waits for the next moment at which answers arrive, and takes all of them."""
        if not self.busy or self.busy[0][0] == np.inf:
            raise self.exhausted(step)
        self._now = self.busy[0][0]
        while self.busy and self.busy[0][0] == self._now:
            _, _, client, version = heapq.heappop(self.busy)
            self.arrived.append((client, version))

    def drop(self, client: int) -> None:
        """Does nothing: no answer is computed before a step takes it."""

    def _due(self, client: int) -> float:
        """Returns the time of the answer to a question of this moment."""
        who = np.array([client])
        due = self._now + self._latencies(int(self.asked[client]))[who]
        if self.absences is not None:
            due = self.absences.arrive(who, due)
        return float(due[0])

    def _latencies(self, number: int) -> np.ndarray:
        """Returns the latencies of the questions of a number to all clients, float64 (n,)."""
        # drawn for all clients at once, as a draw has a price of its own
        while len(self.drawn) <= number:
            everyone = np.arange(len(self.asked))
            numbers = np.full((len(everyone), 1), len(self.drawn))
            latencies = self.gaps(everyone, numbers)[:, 0]
            if self.at_once:
                latencies = np.zeros(len(everyone))
            self.drawn.append(latencies)
        return self.drawn[number]
