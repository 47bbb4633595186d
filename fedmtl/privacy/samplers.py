"""Samplers of cohorts: each draws the participants of a step, and states the assumptions of the
accountant about the draw.

Why stateful clients change nothing under Poisson sampling
-----------------------------------------------------------
In personalized learning a client's message depends on its state from earlier rounds, so on its own
past coins. The subsampled Gaussian's epsilon holds all the same. Let y = (y_1 .. y_T) be the
releases, D a population with client k, D' the same without k, B_t ~ Bernoulli(q) the coins of k.

1. Condition on the coins and local randomness c of all *other* clients. Both laws of y are mixtures
   over c with the same weights, because c is drawn independently of everything k does. The
   hockey-stick divergence H_a(P || Q) = integral of max(P - a Q, 0) is jointly convex, so H_a(E_c
   P_c || E_c Q_c) <= sup_c H_a(P_c || Q_c). This also covers an observer who *is* one of the other
   clients and knows its own coins.
2. With c fixed, under D' the law of y_t given y_<t is Q_t = N(mu_t(y_<t), s^2 I). Under D, given
   y_<t and k's past coins b = b_<t, it is P_t^b = (1 - q) N(mu_t, s^2 I) + q N(mu_t + g_t(b, y_<t),
   s^2 I) with ||g_t|| <= C: B_t is independent of (b, y_<t), so the weight is q whatever state k is
   in. The observer does not see b; the law of y_t given only y_<t is a mixture of the P_t^b with
   the posterior weights of b.
3. Every P_t^b is dominated by the pair ((1 - q) N(0, s^2) + q N(C, s^2), N(0, s^2)); Q_t does not
   depend on b. By convexity in the first argument (in the second, for the reverse direction) the
   mixture is dominated by the same pair, for every history y_<t.
4. Adaptive composition of dominating pairs (Zhu, Dong, Wang, "Optimal accounting of differential
   privacy via characteristic function", AISTATS 2022, Theorem 10) gives the T-fold composition that
   the accountant computes.

Step 1 needs the coins of different clients to be independent, and step 2 needs B_t to be
independent of the past.
Cohorts of a fixed size have neither property against clients: the coalition of the other clients
knows whether k was drawn, and the state of k remembers it, so every participation is charged in
full. Two releases in one step share B_t; they are one Gaussian release of the concatenated vector
under one coin, and are accounted as that (:class:`~fedmtl.privacy.cost.PrivacyCost`).
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from dataclasses import asdict, dataclass, replace
from functools import cached_property
from typing import ClassVar, Literal

import torch
from torch import Tensor

from .._files import Json
from ..errors import BudgetExhausted, ConfigError, PrivacyError
from ..random import Coins, binomial_quantile, distinct_numbers

USUAL_COHORT = 100
Relation = Literal["add_remove", "replace", "zero_out"]
"""The relation of neighbouring data: one unit added or removed; one replaced; or the data of one
replaced by nothing, if the participants of each step are public."""
SHIFTS: dict[Relation, float] = {"add_remove": 1.0, "replace": 2.0, "zero_out": 1.0}
"""The sensitivity of a sum of rows of norm 1, by the relation."""


@dataclass(frozen=True)
class BoundSampler(ABC):
    """A sampler bound to a population of ``n`` clients, which it numbers from 0 to n - 1.

    A channel numbers clients in the order of their keys, so that draws do not depend on the order
    in which the data list them.

    Attributes:
        n: the population.
        cohort: m, the expected size of a cohort.
        relation: the neighbour relation of populations, against a coalition of all other clients,
            which keeps state between steps.
        amplified: True if the event of one step accounts for secrecy of the sample.
        per_participation: True if a client is charged for each step it took part in, not everybody
            for every step.
        weighted: True if rows have public weights below 1, which follow the clip.

    Example:
        >>> from fedmtl import FullParticipation
        >>> from fedmtl.privacy import SeededSource
        >>> FullParticipation().bind(3).draw(0, SeededSource(0).coins("cohort", 0)).tolist()
        [0, 1, 2]
    """

    n: int
    cohort: float
    relation: ClassVar[Relation]
    amplified: ClassVar[bool] = False
    per_participation: ClassVar[bool] = False
    weighted: ClassVar[bool] = False

    @cached_property
    def denominator(self) -> float:
        """Returns m as a float: a public constant that divides every sum."""
        return float(self.cohort)

    @cached_property
    def probability(self) -> float:
        """Returns the probability that a given client takes part in a given step."""
        return self.denominator / self.n

    @property
    def cap(self) -> int | None:
        """Returns the hard cap on the steps in which one client takes part, or None."""
        return None

    @property
    def separation(self) -> int:
        """Returns the least number of rounds between two participations of a client."""
        return 1

    @property
    def repeatable(self) -> bool:
        """Returns True if the same coins draw the same cohort again."""
        return True

    def capped(self, steps: int) -> BoundSampler:
        """Returns the sampler with its own cap for a run.

        Args:
            steps: planned number of steps.

        Returns:
            The sampler itself if it needs no cap.
        """
        return self

    def with_cap(self, max_uses: int) -> BoundSampler:
        """Returns the sampler with another cap, if it has one.

        Args:
            max_uses: the most steps of a client.
        """
        return self

    @property
    def to_the_server(self) -> BoundSampler:
        """Returns the sampler for an observer that knows the participants, as a server does.

        Raises:
            PrivacyError: it amplifies, which nothing does against that observer.
        """
        if self.amplified:
            raise PrivacyError(
                "Secure aggregation: the server knows who takes part, so sampling amplifies "
                "nothing against it; take CyclicCohorts or FullParticipation (schedule=cyclic or "
                "full by name)."
            )
        return self

    @property
    def recorded(self) -> dict[str, Json]:
        """Returns the settings for the header of a ledger, JSON-ready."""
        return asdict(self)

    @property
    def facts(self) -> dict[str, str | bool]:
        """Returns the assumptions of the accountant by name."""
        return {
            name: getattr(self, name) for name in ("relation", "amplified", "per_participation")
        }

    @abstractmethod
    def draw(self, step: int, coins: Coins, uses: Tensor | None = None) -> Tensor:
        """Draws a cohort.

        Args:
            step: number of the step (the coins are already specific to it).
            coins: source of uniform numbers.
            uses: (n,) int64, participations so far by number; needed under a cap, ignored
                otherwise.

        Returns:
            Sorted int64 numbers of clients, distinct.
        """

    @abstractmethod
    def describe(self) -> str:
        """Returns one phrase for the report."""


@dataclass(frozen=True)
class BoundPoisson(BoundSampler):
    relation = "add_remove"
    amplified = True

    def draw(self, step: int, coins: Coins, uses: Tensor | None = None) -> Tensor:
        # The size of a Poisson cohort is binomial, and given its size it is a uniform subset.
        size = binomial_quantile(float(coins.uniform(1)[0]), self.n, self.probability)
        return torch.from_numpy(distinct_numbers(self.n, size, coins))

    def describe(self) -> str:
        return (
            f"Poisson, expected cohort {self.cohort:g} of {self.n} clients (q = "
            f"{self.probability:.6g})"
        )


@dataclass(frozen=True)
class _BoundCohort(BoundSampler):
    """Draws cohorts of ``cohort`` clients, with a hard cap on the uses of one of them."""

    cohort: int
    max_uses: int | None = None

    @property
    def cap(self) -> int | None:
        return self.max_uses

    def capped(self, steps: int) -> BoundSampler:
        if self.max_uses is not None:
            return self
        return replace(self, max_uses=self._most(steps))

    @abstractmethod
    def _most(self, steps: int) -> int:
        """Returns the cap for a run of ``steps``."""

    def with_cap(self, max_uses: int) -> BoundSampler:
        return replace(self, max_uses=max_uses)

    @property
    def _at_most(self) -> str:
        if self.max_uses is not None:
            return f", each at most {self.max_uses} times"
        return ""


@dataclass(frozen=True)
class BoundFixed(_BoundCohort):
    relation = "replace"
    per_participation = True

    def _most(self, steps: int) -> int:
        """Returns one above the average number of uses, rounded up, so that cohorts stay full."""
        return min(steps, math.ceil(steps * self.probability) + 1)

    def draw(self, step: int, coins: Coins, uses: Tensor | None = None) -> Tensor:
        if self.max_uses is None:
            return torch.from_numpy(distinct_numbers(self.n, self.cohort, coins))
        if uses is None:
            raise ConfigError(
                "FixedCohort with a cap on uses needs the participations so far to draw a cohort."
            )
        # The clients at the cap are public: participations are charged and may be told.
        eligible = torch.nonzero(uses < self.max_uses).flatten()
        if eligible.numel() < self.cohort:
            raise BudgetExhausted(
                f"Step {step} needs {self.cohort} clients, but only {eligible.numel()} have taken "
                f"part fewer than {self.max_uses} times (the cap on uses of one client)."
            )
        return eligible[torch.from_numpy(distinct_numbers(eligible.numel(), self.cohort, coins))]

    def describe(self) -> str:
        return f"fixed cohort of {self.cohort} of {self.n} clients{self._at_most}"


@dataclass(frozen=True)
class BoundCyclic(_BoundCohort):
    relation = "zero_out"
    per_participation = True

    def _most(self, steps: int) -> int:
        """Returns the most turns that ``steps`` rounds give one client."""
        return math.ceil(steps * self.cohort / self.n)

    @property
    def separation(self) -> int:
        """Returns floor(n / cohort): turns are at distance n in the order, of which a round takes
        ``cohort``."""
        return self.n // self.cohort

    def draw(self, step: int, coins: Coins, uses: Tensor | None = None) -> Tensor:
        # The order goes round and round: a cohort may take the end and the beginning of it.
        return torch.sort((step * self.cohort + torch.arange(self.cohort)) % self.n).values

    def describe(self) -> str:
        return f"{self.cohort} of {self.n} clients in turn, publicly{self._at_most}"


@dataclass(frozen=True)
class BoundFull(BoundSampler):
    relation: ClassVar[Relation] = "add_remove"

    def draw(self, step: int, coins: Coins, uses: Tensor | None = None) -> Tensor:
        return torch.arange(self.n)

    def describe(self) -> str:
        return f"all {self.n} clients in every step"

    @property
    def to_the_server(self) -> BoundSampler:
        return BoundEverybody(self.n, self.cohort)


@dataclass(frozen=True)
class BoundEverybody(BoundFull):
    """Full participation, to an observer that knows the participants: a client cannot be added or
    removed unseen, so only its data can be hidden."""

    relation = "zero_out"

    def describe(self) -> str:
        return f"all {self.n} clients in every step, publicly"
