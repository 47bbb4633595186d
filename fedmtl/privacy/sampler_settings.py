"""Settings of the sampling of cohorts; bound to a population they are the samplers of
:mod:`.samplers`."""

from __future__ import annotations

from dataclasses import dataclass

from .._check import Checked, Count, Positive, positive_int
from ..errors import ConfigError
from .samplers import USUAL_COHORT, BoundCyclic, BoundFixed, BoundFull, BoundPoisson


@dataclass(frozen=True)
class PoissonSampling(Checked):
    """Every client takes part independently with probability ``cohort / n``; the size of a cohort
    varies.

    Args:
        cohort: expected number of clients a step, above 0 and at most the population; the public
            denominator. None for 100, or all clients in every step if there are fewer.

    Example:
        >>> from fedmtl import PoissonSampling
        >>> PoissonSampling(cohort=100).bind(1000).describe()
        'Poisson, expected cohort 100 of 1000 clients (q = 0.1)'
    """

    cohort: Positive | None = None

    def bind(self, n: int) -> BoundPoisson | BoundFull:
        """Returns the sampler of a population.

        Args:
            n: number of clients.

        Raises:
            ConfigError: the cohort exceeds it.
        """
        _fits(type(self).__name__, self.cohort or 0, n)
        # With few clients a sample hides nobody well, and all of them cost less noise than half.
        if self.cohort is None and n < USUAL_COHORT:
            return BoundFull(n, n)
        if self.cohort is None:
            return BoundPoisson(n, USUAL_COHORT)
        return BoundPoisson(n, self.cohort)


@dataclass(frozen=True)
class FixedCohort(Checked):
    """Draws exactly ``cohort`` clients a step, uniformly without replacement.

    Against other clients nothing is amplified: a client is charged, replace-one, for each
    participation, and ``max_uses`` is a hard cap on them (default under noise: one above the
    average number of uses, rounded up).

    Args:
        cohort: number of clients a step, at most the population.
        max_uses: most steps one client takes part in; clients at the cap are no longer drawn.

    Example:
        >>> from fedmtl import FixedCohort
        >>> FixedCohort(cohort=100, max_uses=5).bind(1000).describe()
        'fixed cohort of 100 of 1000 clients, each at most 5 times'
    """

    cohort: Count
    max_uses: Count | None = None

    def bind(self, n: int) -> BoundFixed:
        """Returns the sampler of a population.

        Args:
            n: number of clients.

        Raises:
            ConfigError: the cohort exceeds it.
        """
        _fits(type(self).__name__, self.cohort, n)
        return BoundFixed(n, self.cohort, self.max_uses)


@dataclass(frozen=True)
class CyclicCohorts(Checked):
    """Clients take turns, ``cohort`` at a time, in a fixed public order: no coin, so nothing is
    amplified.

    The participants of each round are public, so neighbours differ by one client whose data are
    replaced by nothing ("zero_out"); a client is charged for each of its turns.

    Args:
        cohort: number of clients a step, at most the population.

    Example:
        >>> from fedmtl import CyclicCohorts
        >>> CyclicCohorts(cohort=100).bind(1000).separation
        10
    """

    cohort: Count

    def bind(self, n: int) -> BoundCyclic:
        """Returns the sampler of a population.

        Args:
            n: number of clients.

        Raises:
            ConfigError: the cohort exceeds it.
        """
        _fits(type(self).__name__, self.cohort, n)
        return BoundCyclic(n, self.cohort)


@dataclass(frozen=True)
class FullParticipation:
    """Every client takes part in every step.

    Example:
        >>> from fedmtl import FullParticipation
        >>> FullParticipation().bind(1000).describe()
        'all 1000 clients in every step'
    """

    def bind(self, n: int) -> BoundFull:
        """Returns the sampler of a population.

        Args:
            n: number of clients, at least 1.
        """
        positive_int("FullParticipation.bind", n=n)
        return BoundFull(n, n)


Sampler = PoissonSampling | FixedCohort | CyclicCohorts | FullParticipation


def _fits(owner: str, cohort: float, n: int) -> None:
    positive_int(f"{owner}.bind", n=n)
    if cohort > n:
        raise ConfigError(
            f"{owner}.cohort is {cohort:,.10g}, but there are only {n:,} clients; "
            f"it must be at most the population."
        )
