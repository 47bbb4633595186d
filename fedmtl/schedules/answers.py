"""The answers of clients to a server that waits for nobody, as a simulation in virtual time."""

from __future__ import annotations

import heapq
from collections import deque
from dataclasses import dataclass, field

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
        most: most answers of a client that are used; None for no cap.
        at_once: True if answers take no time, whatever the latencies.
    """

    concurrency: int
    buffer: int
    max_staleness: int
    rest: int
    most: int | None
    at_once: bool


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


@dataclass
class Server:
    """The simulation of a server that waits for nobody: its steps so far, and its state after them.

    Attributes:
        times: latencies and absences of the clients.
        seed: of these.
        limits: of the questions and answers.
        made: the steps so far.
    """

    times: BoundSchedule
    seed: int
    limits: Limits
    made: list[Answers] = field(default_factory=list)
    now: float = 0.0
    waiting: deque[int] = field(default_factory=deque)  # free clients, in the order of the queue
    questions: int = 0
    # (time of the answer, number of the question, client, version at the question)
    busy: list[tuple[float, int, int, int]] = field(default_factory=list)
    # (client, version) of the answers of this moment that no step has taken
    arrived: deque[tuple[int, int]] = field(default_factory=deque)
    # latencies of all clients, by the number of the question
    drawn: list[np.ndarray] = field(default_factory=list)

    def __post_init__(self) -> None:
        n = self.times.clients
        self.waiting.extend(torch.argsort(self.times.keys, stable=True).tolist())
        self.asked = np.zeros(n, np.int64)
        self.used = np.zeros(n, np.int64)
        self.free_from = np.zeros(n, np.int64)  # first version from which a client may start
        self.gaps, self.absences = self.times.draws(self.seed)

    def answers(self, step: int) -> Answers:
        """Returns the answers of a step, after those before it."""
        while len(self.made) <= step:
            self.made.append(self._next(len(self.made)))
        return self.made[step]

    def _next(self, step: int) -> Answers:
        """Returns the answers of the next step."""
        limits = self.limits
        taken: list[tuple[int, int]] = []
        while len(taken) < limits.buffer:
            if not self.arrived:
                self._ask(step)
                self._wait(step)
            client, version = self.arrived.popleft()
            self.waiting.append(client)
            if step - version > limits.max_staleness:
                continue
            taken.append((client, version))
            self.used[client] += 1
            self.free_from[client] = step + limits.rest
        clients, versions = torch.tensor(sorted(taken)).T
        oldest = step + 1 - limits.max_staleness
        begun = [version for _, _, _, version in self.busy]
        begun += [version for _, version in self.arrived]
        kept = frozenset(version for version in begun if version >= oldest)
        return Answers(step, self.now, clients, versions, kept)

    def _ask(self, version: int) -> None:
        """Asks free clients in the order of the queue, until ``concurrency`` are busy."""
        cap = self.limits.most
        passed: list[int] = []
        while self.waiting and len(self.busy) < self.limits.concurrency:
            client = self.waiting.popleft()
            if cap is not None and self.used[client] >= cap:
                continue  # never asked again
            if self.free_from[client] > version:
                passed.append(client)
                continue
            # answers of one moment arrive in the order of their questions
            heapq.heappush(self.busy, (self._due(client), self.questions, client, version))
            self.questions += 1
            self.asked[client] += 1
        self.waiting.extendleft(reversed(passed))

    def _due(self, client: int) -> float:
        """Returns the time of the answer to a question of this moment."""
        who = np.array([client])
        due = self.now + self._latencies(int(self.asked[client]))[who]
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
            if self.limits.at_once:
                latencies = np.zeros(len(everyone))
            self.drawn.append(latencies)
        return self.drawn[number]

    def _wait(self, step: int) -> None:
        """Waits for the next moment at which answers arrive, and takes all of them."""
        if not self.busy or self.busy[0][0] == np.inf:
            raise BudgetExhausted(
                f"Step {step} needs {self.limits.buffer} answers, but no more clients can "
                "answer: they are at the cap of answers (per_client), or away for good."
            )
        self.now = self.busy[0][0]
        while self.busy and self.busy[0][0] == self.now:
            _, _, client, version = heapq.heappop(self.busy)
            self.arrived.append((client, version))
