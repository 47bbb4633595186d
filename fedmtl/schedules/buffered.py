"""Buffered answers: the steps of a server that asks some clients at a time and waits for none."""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Literal

import numpy as np
import torch
from torch import Tensor

from .._check import bounded, given, non_negative, positive_int
from ..errors import BudgetExhausted, ConfigError
from .activations import BoundSchedule
from .block import Asked, Block
from .clocks import COUNT, Latencies
from .dropouts import Dropouts
from .latency import RandomLatency, TraceLatency

Staleness = Literal["sqrt", "none"]


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

    @property
    def staleness(self) -> Tensor:
        """Returns the server steps since each client was asked, int64 (buffer,)."""
        return self.step - self.versions


@dataclass(frozen=True, kw_only=True)
class Buffered:
    """The schedule of buffered aggregation (Nguyen et al., AISTATS 2022; FedBuff).

    The server keeps ``concurrency`` clients busy, and steps when ``buffer`` answers are there.
    Free clients wait in a queue, at first in their order; whoever answers goes to its end. All
    answers of one moment arrive before anybody is asked, in the order of the questions. With
    ``buffer=1`` it is FedAsync (Xie, Koyejo, Gupta, 2019). The schedule follows from the settings
    and the seed, and from no data.

    Args:
        latency: law of the time from the question to the answer; a number is a constant time, 0
            included.
        concurrency: number of busy clients, at most the population.
        buffer: answers of a server step, at most ``concurrency``.
        max_staleness: most server steps from the question to the use of an answer. An older one is
            dropped, and not counted.
        staleness: law of the weights, ``"sqrt"`` for 1 / sqrt(1 + staleness) or ``"none"`` for 1.
        per_client: most answers of a client that are used; None for no cap.
        rest: least number of server steps between two uses of a client's answers.
        scale: factor of the latencies, one number or one for each client.
        dropouts: clients that leave and come back.

    Example:
        >>> from fedmtl.schedules.buffered import Buffered
        >>> schedule = Buffered(latency=1.0, concurrency=2, buffer=1, scale=[1.0, 3.5]).bind(2)
        >>> steps = schedule.steps(seed=0, stop=4)
        >>> [(step.time, step.clients.tolist(), step.versions.tolist()) for step in steps]
        [(1.0, [0], [0]), (2.0, [0], [1]), (3.0, [0], [2]), (3.5, [1], [0])]
    """

    latency: float | RandomLatency | TraceLatency
    concurrency: int = 100
    buffer: int = 10
    max_staleness: int = 20
    staleness: Staleness = "sqrt"
    per_client: int | None = None
    rest: int = 1
    scale: float | Sequence[float] = 1.0
    dropouts: Dropouts | None = None

    def __post_init__(self) -> None:
        counts = {"concurrency": self.concurrency, "buffer": self.buffer, "rest": self.rest}
        positive_int(self, **counts, **given(per_client=self.per_client))
        bounded(self, {"max_staleness": self.max_staleness}, COUNT)
        if not isinstance(self.latency, RandomLatency | TraceLatency):
            non_negative(self, latency=self.latency)
        if self.staleness not in ("sqrt", "none"):
            allowed = "it must be 'sqrt' or 'none'"
            raise ConfigError(f"Buffered.staleness is {self.staleness!r}; {allowed}.")
        if self.buffer > self.concurrency:
            raise ConfigError(
                f"Buffered.buffer is {self.buffer}; it must be at most concurrency, "
                f"{self.concurrency}: no more answers than busy clients can arrive together."
            )
        self._times()  # refuses scales and absences

    def _times(self) -> Latencies:
        """Returns the settings of the latencies; those of a constant 0 are settings of 1."""
        latency = self.latency
        if latency == 0:
            latency = 1.0
        return Latencies(latency=latency, activations=1, scale=self.scale, dropouts=self.dropouts)

    def bind(
        self, clients: int, *, names: Sequence[str] | None = None, keys: Tensor | None = None
    ) -> BoundBuffered:
        """Returns the schedule of ``clients`` clients.

        Args:
            clients: n, at least ``concurrency`` and ``rest * buffer``.
            names: their names, for traces and absences; None for "0", "1", ...
            keys: int64 (n,), their keys for random draws; None to make them of the names, or of the
                positions without names.

        Raises:
            ConfigError: a setting does not fit n clients.
            DataError: a trace is malformed or misses a client.
        """
        if self.concurrency > clients:
            raise ConfigError(
                f"Buffered.concurrency is {self.concurrency}; it must be at most the number of "
                f"clients, {clients}: a client computes one answer at a time."
            )
        if self.rest * self.buffer > clients:
            raise ConfigError(
                f"Buffered.rest is {self.rest}; it must be at most {clients // self.buffer}, the "
                f"steps that {clients} clients fill with {self.buffer} answers each."
            )
        times = self._times().bind(clients, names=names, keys=keys)
        return BoundBuffered(self, times)

    def weights(self, staleness: Tensor) -> Tensor:
        """Returns the public weights of answers, in (0, 1], float64.

        Args:
            staleness: int64, at least 0.
        """
        weights = torch.ones(staleness.shape, dtype=torch.float64)
        if self.staleness == "sqrt":
            weights = (1.0 + staleness.double()).rsqrt()
        return weights


@dataclass(frozen=True)
class BoundBuffered:
    """The buffered schedule of n given clients.

    Attributes:
        settings: of the schedule.
        times: latencies and absences of the clients.
    """

    settings: Buffered
    times: BoundSchedule

    @property
    def separation(self) -> int:
        """Returns the least number of steps between two uses of a client's answers."""
        return self.settings.rest

    @property
    def versions_kept(self) -> int:
        """Returns the most versions of the shared model that are in use at once."""
        return min(self.settings.max_staleness, self.settings.concurrency) + 1

    def steps(self, seed: int, stop: int) -> Iterator[Answers]:
        """Yields the server steps 0 to ``stop - 1``.

        Args:
            seed: of the run.
            stop: number of steps.

        Raises:
            BudgetExhausted: too few clients can answer: they are at the cap, or never come back.
        """
        server = _Server(self, seed)
        for step in range(stop):
            yield server.next(step)

    def blocks(self, seed: int, stop: int) -> Iterator[Block]:
        """Yields the server steps 0 to ``stop - 1`` as rounds.

        Args:
            seed: of the run.
            stop: number of steps.

        Raises:
            BudgetExhausted: too few clients can answer.
        """
        for answers in self.steps(seed, stop):
            weights = self.settings.weights(answers.staleness)
            asked = Asked(answers.versions, weights, answers.kept)
            time = torch.tensor([[answers.time]], dtype=torch.float64)
            yield Block(answers.step, time, answers.clients[None, None], asked)


@dataclass
class _Server:
    """The state of the simulation between two steps."""

    bound: BoundBuffered
    seed: int
    now: float = 0.0
    waiting: deque[int] = field(default_factory=deque)  # free clients, in the order of the queue
    questions: int = 0
    # (time of the answer, number of the question, client, version at the question)
    busy: list[tuple[float, int, int, int]] = field(default_factory=list)
    # (client, version) of the answers of this moment that no step has taken
    arrived: deque[tuple[int, int]] = field(default_factory=deque)

    def __post_init__(self) -> None:
        n = self.bound.times.clients
        self.waiting.extend(range(n))
        self.asked = np.zeros(n, np.int64)
        self.used = np.zeros(n, np.int64)
        self.free_from = np.zeros(n, np.int64)  # first version from which a client may start
        self.gaps, self.absences = self.bound.times.draws(self.seed)

    def next(self, step: int) -> Answers:
        """Returns the answers of a step."""
        settings = self.bound.settings
        taken: list[tuple[int, int]] = []
        while len(taken) < settings.buffer:
            if not self.arrived:
                self._ask(step)
                self._wait(step)
            client, version = self.arrived.popleft()
            self.waiting.append(client)
            if step - version > settings.max_staleness:
                continue
            taken.append((client, version))
            self.used[client] += 1
            self.free_from[client] = step + settings.rest
        clients, versions = torch.tensor(sorted(taken)).T
        oldest = step + 1 - settings.max_staleness
        begun = [version for _, _, _, version in self.busy]
        begun += [version for _, version in self.arrived]
        kept = frozenset(version for version in begun if version >= oldest)
        return Answers(step, self.now, clients, versions, kept)

    def _ask(self, version: int) -> None:
        """Asks free clients in the order of the queue, until ``concurrency`` are busy."""
        cap = self.bound.settings.per_client
        passed: list[int] = []
        while self.waiting and len(self.busy) < self.bound.settings.concurrency:
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
        latency = self.gaps(who, self.asked[who][:, None])[:, 0]
        if self.bound.settings.latency == 0:
            latency = np.zeros(1)
        due = self.now + latency
        if self.absences is not None:
            due = self.absences.arrive(who, due)
        return float(due[0])

    def _wait(self, step: int) -> None:
        """Waits for the next moment at which answers arrive, and takes all of them."""
        if not self.busy or self.busy[0][0] == np.inf:
            raise BudgetExhausted(
                f"Step {step} needs {self.bound.settings.buffer} answers, but no more clients can "
                "answer: they are at the cap of answers (per_client), or away for good."
            )
        self.now = self.busy[0][0]
        while self.busy and self.busy[0][0] == self.now:
            _, _, client, version = heapq.heappop(self.busy)
            self.arrived.append((client, version))
