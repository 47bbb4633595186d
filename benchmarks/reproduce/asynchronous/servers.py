"""Three servers for clients of unequal speed: one waits, one has a deadline, one does not wait."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from scipy.optimize import brentq
from scipy.stats import norm
from torch import Tensor

from fedmtl import Buffered, Callback, PoissonSampling
from fedmtl.privacy.samplers import BoundPoisson
from fedmtl.random import Coins
from fedmtl.schedules import RandomLatency

TENTH = 10  # every tenth client is slow


@dataclass(frozen=True)
class Law:
    """The public law of latencies: log-normal of median 1, and longer for every tenth client.

    Attributes:
        spread: standard deviation of the logarithm.
        slow: factor of the latencies of every tenth client.
    """

    spread: float
    slow: float

    @property
    def name(self) -> str:
        """Returns the key of this law in files."""
        return f"{self.spread:g}-{self.slow:g}"

    def scale(self, clients: int) -> np.ndarray:
        """Returns the factor of each client, float64 (clients,)."""
        factors = np.ones(clients)
        factors[TENTH - 1 :: TENTH] = self.slow
        return factors

    def latency(self) -> float | RandomLatency:
        """Returns the law of a client whose factor is 1, as a schedule takes it."""
        if self.spread == 0:
            return 1.0
        return RandomLatency("lognorm", {"s": self.spread})

    def draw(self, clients: int, seed: int, step: int) -> np.ndarray:
        """Returns the latencies of all clients in a round, float64 (clients,)."""
        normal = np.random.default_rng((seed, step)).standard_normal(clients)
        return np.exp(self.spread * normal) * self.scale(clients)

    def in_time(self, clients: int, deadline: float) -> float:
        """Returns the expected share of the clients that answer by a deadline."""
        late = np.log(deadline / self.scale(clients))
        if self.spread == 0:
            return float((late >= 0).mean())
        return float(norm.cdf(late / self.spread).mean())

    def deadline(self, clients: int, share: float) -> float:
        """Returns the time by which a share of the clients answers; 1 for latencies of 1."""
        if self.spread == 0:
            return 1.0

        def excess(time: float) -> float:
            return self.in_time(clients, time) - share

        return float(brentq(excess, 1e-3, 1e4))


@dataclass(frozen=True)
class BoundDeadline(BoundPoisson):
    """Secret Poisson cohorts, of which those take part who answer by a public deadline.

    Latencies depend on no data and on no other client. Whoever knows them all sees a client take
    part with the probability of the cohort in rounds for which it is fast enough, and never in the
    others. So the accounts of Poisson cohorts hold for everybody who is asked.

    Attributes:
        cohort: expected number of clients that answer in time, which divides the sums.
        asked: expected number of clients that are asked.
        limit: the deadline.
        law: of the latencies.
        seed: of the latencies.
        order: the client of each number of this sampler.
    """

    asked: float
    limit: float
    law: Law
    seed: int
    order: Tensor = field(repr=False)

    @property
    def probability(self) -> float:
        return self.asked / self.n

    @property
    def recorded(self) -> dict[str, Any]:
        return {"n": self.n, "cohort": self.cohort, "asked": self.asked, "deadline": self.limit}

    def draw(self, step: int, coins: Coins, uses: Tensor | None = None) -> Tensor:
        asked = BoundPoisson(self.n, self.asked).draw(step, coins, uses)
        latencies = torch.from_numpy(self.law.draw(self.n, self.seed, step))
        return asked[latencies[self.order[asked]] <= self.limit]


@dataclass(frozen=True)
class Deadline:
    """The schedule of :class:`BoundDeadline`.

    Attributes:
        cohort: expected number of clients that are asked.
        share: expected share of them that answer in time.
        law: of the latencies.
        seed: of the latencies.
        keys: int64 (n,), of the clients.
    """

    cohort: int
    share: float
    law: Law
    seed: int
    keys: Tensor = field(repr=False)

    def bind(self, n: int) -> BoundDeadline:
        """Returns the schedule of n clients."""
        limit = self.law.deadline(n, self.share)
        expected = self.cohort * self.law.in_time(n, limit)
        order = torch.argsort(self.keys, stable=True)
        return BoundDeadline(n, expected, self.cohort, limit, self.law, self.seed, order)


class Clock(Callback):
    """The simulated time of a server that waits for its cohort, by the law of latencies.

    Args:
        laws: of the latencies.
        clients: number of all clients.
        seed: of the latencies.
    """

    def __init__(self, laws: Sequence[Law], clients: int, seed: int) -> None:
        self.clients = clients
        self.seed = seed
        self.times = dict.fromkeys(laws, 0.0)

    def on_block(self, block: Any, state: Any) -> None:
        cohort = block.cohort.numpy()
        for law in self.times:
            latencies = law.draw(self.clients, self.seed, block.first)
            self.times[law] += float(latencies[cohort].max(initial=0.0))


class LastTime(Callback):
    """The simulated time of the last step of a server that does not wait."""

    time = 0.0

    def on_block(self, block: Any, state: Any) -> None:
        self.time = float(block.time[0, 0])


@dataclass(frozen=True)
class Turns:
    """The size of the steps of the servers on a problem.

    Attributes:
        cohort: expected number of clients that the servers with rounds ask, and number of busy
            clients of the other.
        buffer: answers of a step of the server that does not wait.
        rest: steps between two uses of a client's answers there.
    """

    cohort: int
    buffer: int
    rest: int

    def waiting(self) -> PoissonSampling:
        """Returns the schedule of a server that waits."""
        return PoissonSampling(cohort=self.cohort)

    def buffered(self, law: Law, clients: int) -> Buffered:
        """Returns the schedule of a server that does not wait."""
        return Buffered(
            latency=law.latency(),
            concurrency=self.cohort,
            buffer=self.buffer,
            rest=self.rest,
            scale=law.scale(clients).tolist(),
        )
