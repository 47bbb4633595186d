"""Buffered answers: the steps of a server that asks some clients at a time and waits for none."""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor

from .._check import bounded, given, non_negative, positive_int
from ..errors import BudgetExhausted, ConfigError
from ..privacy.samplers import BoundSampler
from ..random import Coins
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
        >>> steps = schedule.steps(4)
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
        self,
        clients: int,
        *,
        names: Sequence[str] | None = None,
        keys: Tensor | None = None,
        seed: int = 0,
    ) -> BoundBuffered:
        """Returns the schedule of ``clients`` clients.

        Args:
            clients: n, at least ``concurrency`` and ``rest * buffer``.
            names: their names, for traces and absences; None for "0", "1", ...
            keys: int64 (n,), their keys for random draws, in the order of which they wait at first;
                None to make them of the names, or of the positions without names.
            seed: of the latencies and absences.

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
        return BoundBuffered(
            n=clients,
            cohort=self.buffer,
            max_uses=self.per_client,
            rest=self.rest,
            population=Population(self, times, seed),
        )

    @property
    def law(self) -> str:
        """Returns the law of the latencies in words."""
        if isinstance(self.latency, RandomLatency):
            return f"{self.latency.law} {dict(self.latency.parameters)}"
        if isinstance(self.latency, TraceLatency):
            return "a trace"
        return f"{self.latency:g}"

    def weights(self, staleness: Tensor) -> Tensor:
        """Returns the public weights of answers, in (0, 1], float64.

        Args:
            staleness: int64, at least 0.
        """
        weights = torch.ones(staleness.shape, dtype=torch.float64)
        if self.staleness == "sqrt":
            weights = (1.0 + staleness.double()).rsqrt()
        return weights


@dataclass(frozen=True, eq=False)
class Population:
    """The clients of a buffered schedule.

    Attributes:
        settings: of the schedule.
        times: latencies and absences of the clients.
        seed: of the latencies and absences.
    """

    settings: Buffered
    times: BoundSchedule
    seed: int

    @cached_property
    def order(self) -> Tensor:
        """Returns the clients in the order of their keys, int64 (n,)."""
        return torch.argsort(self.times.keys, stable=True)


@dataclass(frozen=True)
class BoundBuffered(BoundSampler):
    """The buffered schedule of n given clients.

    Who answers when is public: neighbours differ by one client whose data are replaced by nothing,
    and a client is charged for each of its answers that is used.

    Attributes:
        max_uses: most answers of a client that are used; None for no cap.
        rest: least number of steps between two uses of a client's answers.
        population: the clients; None if no cohort is drawn.
    """

    cohort: int
    max_uses: int | None = None
    rest: int = 1
    population: Population | None = field(default=None, repr=False)
    relation = "zero_out"
    per_participation = True
    weighted = True

    @property
    def cap(self) -> int | None:
        return self.max_uses

    @property
    def separation(self) -> int:
        """Returns the least number of steps between two uses of a client's answers."""
        return self.rest

    def capped(self, steps: int) -> BoundBuffered:
        """Returns this schedule with a cap: without one of its own, the most answers of a client
        that ``steps`` steps use.

        Args:
            steps: planned number of steps.
        """
        if self.max_uses is not None:
            return self
        return replace(self, max_uses=max(1, int(self.uses(steps).max())))

    def with_cap(self, max_uses: int) -> BoundBuffered:
        return replace(self, max_uses=max_uses)

    @property
    def recorded(self) -> dict[str, Any]:
        facts: dict[str, Any] = {
            "n": self.n,
            "cohort": self.cohort,
            "max_uses": self.max_uses,
            "rest": self.rest,
        }
        if self.population is not None:
            settings = self.population.settings
            facts |= {
                "concurrency": settings.concurrency,
                "max_staleness": settings.max_staleness,
                "staleness": settings.staleness,
                "latency": settings.law,
            }
        return facts

    def describe(self) -> str:
        text = f"the first {self.cohort} answers of busy clients"
        if self.population is not None:
            settings = self.population.settings
            text = (
                f"the first {self.cohort} answers of {settings.concurrency} busy clients, of "
                f"{self.n}, at most {settings.max_staleness} steps old"
            )
        if self.max_uses is not None:
            text += f", at most {self.max_uses} of each"
        return text

    @property
    def clients(self) -> Population:
        """Returns the population of a schedule that draws cohorts."""
        assert self.population is not None
        return self.population

    @property
    def versions_kept(self) -> int:
        """Returns the most versions of the shared model that are in use at once."""
        settings = self.clients.settings
        return min(settings.max_staleness, settings.concurrency) + 1

    @cached_property
    def _server(self) -> _Server:
        return _Server(self)

    def answers(self, step: int) -> Answers:
        """Returns the answers of a step.

        Args:
            step: its number, from 0. The steps before it are simulated, each once.

        Raises:
            BudgetExhausted: too few clients can answer: they are at the cap, or never come back.
        """
        return self._server.answers(step)

    def steps(self, stop: int) -> Iterator[Answers]:
        """Yields the server steps 0 to ``stop - 1``.

        Args:
            stop: number of steps.

        Raises:
            BudgetExhausted: too few clients can answer.
        """
        for step in range(stop):
            yield self.answers(step)

    def uses(self, steps: int) -> Tensor:
        """Returns the number of answers of each client that are used, int64 (n,).

        Args:
            steps: number of steps; those after which too few clients can answer do not count.
        """
        used = torch.zeros(self.n, dtype=torch.int64)
        with suppress(BudgetExhausted):
            for answers in self.steps(steps):
                used[answers.clients] += 1
        return used

    def draw(self, step: int, coins: Coins, uses: Tensor | None = None) -> Tensor:
        chosen = torch.zeros(self.n, dtype=torch.bool)
        chosen[self.answers(step).clients] = True
        return chosen[self.clients.order].nonzero().flatten()

    def block(self, step: int, clients: Tensor) -> Block:
        """Returns a server step as a round.

        Args:
            step: its number.
            clients: int64 (k,), the clients whose answers are computed, among those of the step.
        """
        answers = self.answers(step)
        versions = torch.zeros(self.n, dtype=torch.int64)
        versions[answers.clients] = answers.versions
        started = versions[clients]
        weights = self.clients.settings.weights(step - started)
        time = torch.tensor([[answers.time]], dtype=torch.float64)
        return Block(step, time, clients[None, None], Asked(started, weights, answers.kept))

    def blocks(self, stop: int) -> Iterator[Block]:
        """Yields the server steps 0 to ``stop - 1`` as rounds.

        Args:
            stop: number of steps.

        Raises:
            BudgetExhausted: too few clients can answer.
        """
        for answers in self.steps(stop):
            yield self.block(answers.step, answers.clients)


@dataclass
class _Server:
    """The simulation: its steps so far, and its state after them."""

    bound: BoundBuffered
    made: list[Answers] = field(default_factory=list)
    now: float = 0.0
    waiting: deque[int] = field(default_factory=deque)  # free clients, in the order of the queue
    questions: int = 0
    # (time of the answer, number of the question, client, version at the question)
    busy: list[tuple[float, int, int, int]] = field(default_factory=list)
    # (client, version) of the answers of this moment that no step has taken
    arrived: deque[tuple[int, int]] = field(default_factory=deque)

    def __post_init__(self) -> None:
        n = self.bound.n
        self.settings = self.bound.clients.settings
        self.waiting.extend(self.bound.clients.order.tolist())
        self.asked = np.zeros(n, np.int64)
        self.used = np.zeros(n, np.int64)
        self.free_from = np.zeros(n, np.int64)  # first version from which a client may start
        self.gaps, self.absences = self.bound.clients.times.draws(self.bound.clients.seed)

    def answers(self, step: int) -> Answers:
        """Returns the answers of a step, after those before it."""
        while len(self.made) <= step:
            self.made.append(self._next(len(self.made)))
        return self.made[step]

    def _next(self, step: int) -> Answers:
        """Returns the answers of the next step."""
        settings = self.settings
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
        cap = self.bound.max_uses
        passed: list[int] = []
        while self.waiting and len(self.busy) < self.settings.concurrency:
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
        if self.settings.latency == 0:
            latency = np.zeros(1)
        due = self.now + latency
        if self.absences is not None:
            due = self.absences.arrive(who, due)
        return float(due[0])

    def _wait(self, step: int) -> None:
        """Waits for the next moment at which answers arrive, and takes all of them."""
        if not self.busy or self.busy[0][0] == np.inf:
            raise BudgetExhausted(
                f"Step {step} needs {self.settings.buffer} answers, but no more clients can "
                "answer: they are at the cap of answers (per_client), or away for good."
            )
        self.now = self.busy[0][0]
        while self.busy and self.busy[0][0] == self.now:
            _, _, client, version = heapq.heappop(self.busy)
            self.arrived.append((client, version))
