"""Rounds that end at a public time: clients that answer later are left out of their sums."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from .._check import Checked, Positive, positive
from ..errors import ConfigError
from ..privacy.sampler_settings import PoissonSampling, Sampler
from ..privacy.samplers import BoundSampler
from .clocks import Latencies, entries_of
from .latency import RandomLatency, TraceLatency


@dataclass(frozen=True, kw_only=True)
class Deadline(Checked):
    """Draws the cohorts of a sampler, and leaves out the clients that answer after a public time.

    Latencies follow from the settings and the seed. They depend on no data and on no other client,
    so the account of the sampler holds: an observer that knows all latencies sees that a client is
    left out of some rounds, and takes part in the others with the sampler's law. Everybody in the
    cohort is charged, and the sum is divided by its expected size, as without a deadline.

    Args:
        latency: law of the time from the question to the answer; a number is a constant time.
        limit: the time at which a round ends.
        sampler: of the cohorts that are asked.
        scale: factor of the latencies, one number or one for each client.

    Example:
        >>> import torch
        >>> from fedmtl import Deadline
        >>> schedule = Deadline(latency=1.0, limit=2.0, scale=[1.0, 1.0, 5.0])
        >>> in_time = schedule.in_time(["a", "b", "c"], torch.arange(3), seed=0)
        >>> in_time(0).tolist()  # in the first round
        [True, True, False]
    """

    latency: float | RandomLatency | TraceLatency
    limit: Positive
    sampler: Sampler = field(default_factory=PoissonSampling)
    scale: float | Sequence[float] = 1.0

    def __post_init__(self) -> None:
        if not isinstance(self.sampler, Sampler):
            accepted = "give one of cohorts, such as PoissonSampling(cohort=100)"
            raise ConfigError(f"Deadline.sampler is {self.sampler!r}; {accepted}.")
        if not isinstance(self.latency, RandomLatency | TraceLatency):
            positive(self, latency=self.latency)
        positive(self, **entries_of("scale", self.scale))

    def bind(self, n: int) -> BoundSampler:
        """Returns the sampler of the cohorts that are asked.

        Args:
            n: number of clients.

        Raises:
            ConfigError: the cohort exceeds it.
        """
        return self.sampler.bind(n)

    def in_time(self, names: Sequence[str], keys: Tensor, seed: int) -> Callable[[int], Tensor]:
        """Returns a function from the number of a round to a mask of the clients that answer by the
        deadline if they are asked, bool (n,).

        Args:
            names: of the n clients, for traces.
            keys: int64 (n,), their keys for random draws.
            seed: of the latencies.

        Raises:
            ConfigError: another number of factors than clients.
            DataError: a trace is malformed or misses a client.
        """
        times = Latencies(latency=self.latency, per_client=1, scale=self.scale)
        gaps, _ = times.bind(len(names), names=names, keys=keys).draws(seed)
        everyone = np.arange(len(names))

        def answer(step: int) -> Tensor:
            # as many draws as rounds: a client has a latency also where it is not asked
            latencies = gaps(everyone, np.full((len(everyone), 1), step))[:, 0]
            return torch.from_numpy(latencies <= self.limit)

        return answer
