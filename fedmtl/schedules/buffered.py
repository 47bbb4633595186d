"""Buffered answers: the steps of a server that asks some clients at a time and waits for none."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from typing import Annotated, Any, Literal

import torch
from torch import Tensor

from .._check import Checked, Count, non_negative, positive
from ..errors import BudgetExhausted, ConfigError
from ..privacy.samplers import BoundSampler
from ..random import Coins
from .answers import Answers, Limits, Server, Simulation
from .block import Block, Starts
from .clocks import COUNT, Latencies, entries_of
from .dropouts import Dropouts
from .latency import RandomLatency, TraceLatency

Staleness = Literal["sqrt", "none"]
MEASURED = "measured"
"""The law of the latencies of real clients, in the header of a ledger."""


@dataclass(frozen=True, kw_only=True)
class Buffered(Checked):
    """Schedules buffered aggregation (Nguyen et al., AISTATS 2022; FedBuff).

    The server keeps ``concurrency`` clients busy, and steps when ``buffer`` answers are there.
    Free clients wait in a queue, at first in their order; a client that has answered goes to its
    end. All answers of one moment arrive before anybody is asked, in the order of the questions.
    With ``buffer=1`` it is FedAsync (Xie, Koyejo, Gupta, 2019). The schedule follows from the
    settings and the seed, and from no data.

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
    concurrency: Count = 100
    buffer: Count = 10
    max_staleness: Annotated[int, COUNT] = 20
    staleness: Staleness = "sqrt"
    per_client: Count | None = None
    rest: Count = 1
    scale: float | Sequence[float] = 1.0
    dropouts: Dropouts | None = None

    def __post_init__(self) -> None:
        if not isinstance(self.latency, RandomLatency | TraceLatency):
            non_negative(self, latency=self.latency)
        if self.buffer > self.concurrency:
            raise ConfigError(
                f"Buffered.buffer is {self.buffer}; it must be at most concurrency, "
                f"{self.concurrency}: no more answers than busy clients can arrive together."
            )
        positive(self, **entries_of("scale", self.scale))

    def _times(self) -> Latencies:
        """Returns the settings of the latencies; those of a constant 0 are settings of 1."""
        latency = self.latency
        if latency == 0:
            latency = 1.0
        return Latencies(latency=latency, per_client=1, scale=self.scale, dropouts=self.dropouts)

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
        order = torch.argsort(times.keys, stable=True)
        simulation = partial(Simulation, times, seed, self.latency == 0, order.tolist())
        return BoundBuffered(
            n=clients,
            cohort=self.buffer,
            max_uses=self.per_client,
            rest=self.rest,
            population=Population(self, order, simulation),
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
        order: int64 (n,), the clients in the order of their keys.
        serve: makes the server that asks them, from its limits; None on a client.
        foreseen: True if the order of the answers follows from the settings and the seed; False of
            real clients.
    """

    settings: Buffered
    order: Tensor
    serve: Callable[[Limits], Server] | None
    foreseen: bool = True


@dataclass(frozen=True)
class BoundBuffered(BoundSampler):
    """The buffered schedule of n given clients.

    The order of the answers is public: neighbours differ by one client whose data are replaced by
    nothing, and a client is charged for each of its answers that is used.

    Attributes:
        max_uses: most answers of a client that are used; None for no cap.
        rest: least number of steps between two uses of a client's answers.
        population: the clients; None if no cohort is drawn.

    Example:
        >>> from fedmtl import Buffered
        >>> bound = Buffered(latency=1.0, concurrency=2, buffer=1, per_client=3).bind(2)
        >>> bound.relation, bound.max_uses
        ('zero_out', 3)
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
        that ``steps`` steps use, or may use if clients are real.

        Args:
            steps: planned number of steps.
        """
        if self.max_uses is not None:
            return self
        if not self.clients.foreseen:
            return replace(self, max_uses=math.ceil(steps / self.rest))
        return replace(self, max_uses=max(1, int(self.uses(steps).max())))

    def with_cap(self, max_uses: int) -> BoundBuffered:
        """Returns this schedule with another cap.

        Args:
            max_uses: the most answers of a client that are used.
        """
        return replace(self, max_uses=max_uses)

    def deployed(self, serve: Callable[[Limits], Server] | None = None) -> BoundBuffered:
        """Returns this schedule with real clients, which answer when they do.

        Args:
            serve: makes the server that asks them; None for a client, which asks nobody.
        """
        return replace(self, population=replace(self.clients, serve=serve, foreseen=False))

    @property
    def repeatable(self) -> bool:
        """Returns False if clients are real: a step that is repeated has other answers."""
        return self.population is None or self.clients.foreseen

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
            facts.update(
                concurrency=settings.concurrency,
                max_staleness=settings.max_staleness,
                staleness=settings.staleness,
                latency=settings.law,
            )
            if not self.population.foreseen:
                facts["latency"] = MEASURED
        return facts

    def describe(self) -> str:
        """Returns one phrase for the report."""
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
    def _server(self) -> Server:
        clients = self.clients
        settings = clients.settings
        limits = Limits(
            concurrency=settings.concurrency,
            buffer=settings.buffer,
            max_staleness=settings.max_staleness,
            rest=settings.rest,
            max_uses=self.max_uses,
        )
        assert clients.serve is not None
        return clients.serve(limits)

    def answers(self, step: int) -> Answers:
        """Returns the answers of a step.

        Args:
            step: its number, from 0. The steps before it are simulated, each once; real clients
                are asked for this step alone.

        Raises:
            BudgetExhausted: too few clients can answer: they are at the cap, or never come back.
        """
        return self._server.answers(step)

    def kept(self, step: int) -> frozenset[int]:
        """Returns the versions that a checkpoint after a step holds: those from which answers that
        may still be used started. Real clients hold their own.

        Args:
            step: its number.
        """
        if not self.clients.foreseen:
            return frozenset()
        return self.answers(step).kept

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
        """Returns the clients whose answers a step uses. They follow from the schedule, and no coin
        is drawn.

        Args:
            step: number of the step.
            coins: not used.
            uses: not used; the schedule counts the answers itself.

        Returns:
            int64 (k,), sorted numbers in the order of the clients' keys.
        """
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
        return Block(step, time, clients[None, None], Starts(started, weights, answers.kept))
