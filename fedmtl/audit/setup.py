"""The setup of an audited run: its public facts, and channels that are opened as the run opens its
own."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
from torch import Tensor

from ..errors import PrivacyError
from ..privacy.account_costs import AccountCosts
from ..privacy.activation_channel import ActivationChannel
from ..privacy.channel_setup import open_channel
from ..privacy.gradients import GradientPlan
from ..privacy.quantile import QuantileClip
from ..privacy.release import Form, ReleasePlan
from ..privacy.round_channel import RoundChannel
from ..privacy.samplers import BoundCyclic, BoundFixed, BoundSampler, Relation
from ..privacy.settings import Privacy, RecordPrivacy
from ..privacy.single_client import BoundSingleClient
from ..schedules import BoundBuffered
from .claim import Shares, expected_cohort
from .recording import RecordedActivations, RecordedRounds
from .release_claims import ReleaseClaims

CLIENTS = 12
ACTIVATIONS = 2000
"""Clients examined one by one, and activations of one channel, at most."""


_MOST_SHARES = 1 << 26  # clients of a cohort times those that may be missing

# numbers of one sample of noise, which limits the memory of an audit
MOST_ELEMENTS = 1 << 22


@dataclass(frozen=True)
class Clocks:
    """The public schedule of clients that act one at a time.

    Attributes:
        phrase: about it, with which a channel is opened.
        blocks: (channel, seed) -> (first activation, clients (1, S) int64) of every block of the
            run.

    Example:
        >>> import torch
        >>> from fedmtl.audit import Clocks
        >>> clocks = Clocks("in turn", lambda channel, seed: iter([(0, torch.tensor([[0, 1]]))]))
        >>> [first for first, clients in clocks.blocks(None, 0)]
        [0]
    """

    phrase: str
    blocks: Callable[[ActivationChannel, int], Iterator[tuple[int, Tensor]]]


@dataclass(frozen=True, kw_only=True)
class Setup:
    """The public facts of a run, and the opening of its channel.

    Args:
        privacy: the run's settings.
        plans: all releases of the run.
        schedule: the sampler of rounds, bound to the population, or that of clients that act one at
            a time.
        steps: planned number of steps.
        tensors: sizes of the model's tensors in a released vector; releases of another total are
            one tensor.
        counts: numbers of records of every client, from the data and not from the plan; None takes
            the plan's.
        rows: name of the release, of whose rows the noise that clients add to them is checked. It
            has an account of its own, and hides the sum of a release, so that channels are opened
            without it elsewhere.

    Example:
        >>> from fedmtl import ClientPrivacy, FullParticipation
        >>> from fedmtl.audit import Setup
        >>> from fedmtl.privacy import ReleasePlan
        >>> setup = Setup(
        ...     privacy=ClientPrivacy(clip_norm=1.0, epsilon=8.0, delta=1e-5),
        ...     plans=(ReleasePlan(name="update", dimension=3),),
        ...     schedule=FullParticipation().bind(10),
        ...     steps=2,
        ... )
        >>> setup.relation, setup.claims.of("update").sensitivity
        ('add_remove', 1.0)
    """

    privacy: Privacy
    plans: tuple[ReleasePlan | GradientPlan, ...]
    schedule: BoundSampler | Clocks
    steps: int
    tensors: tuple[int, ...] = ()
    counts: tuple[int, ...] | None = None
    rows: str = ""

    @cached_property
    def gradients(self) -> GradientPlan | None:
        """Returns the gradients that clients noise of their own records, if the unit is a
        record."""
        if self.privacy.aggregation is not None:
            return None
        return self._of_records

    @cached_property
    def pooled(self) -> GradientPlan | None:
        """Returns the gradients of single records that a secure sum adds up; None without one."""
        if self.privacy.aggregation is None:
            return None
        return self._of_records

    @property
    def _of_records(self) -> GradientPlan | None:
        """Returns the gradients of single records, if the protected unit is one record."""
        if not isinstance(self.privacy, RecordPrivacy):
            return None
        gradients = next((plan for plan in self.plans if isinstance(plan, GradientPlan)), None)
        if gradients is None:
            return None
        return gradients.under((self.privacy,))

    @property
    def records(self) -> GradientPlan:
        """Returns :attr:`gradients`, if there are some."""
        assert self.gradients is not None
        return self.gradients

    @property
    def releases(self) -> tuple[ReleasePlan, ...]:
        """Returns the releases of rows."""
        return tuple(plan for plan in self.plans if isinstance(plan, ReleasePlan))

    def release(self, name: str) -> ReleasePlan:
        """Returns the release of rows of this name, or the one whose rows are checked.

        Args:
            name: of a release of rows.
        """
        return next(plan for plan in self.releases if plan.name == (self.rows or name))

    def dimension(self, name: str) -> int:
        """Returns the number of coordinates that one client or record contributes to a release.

        Args:
            name: of a release.

        Returns:
            Length of a row, or of a gradient under record-level privacy.
        """
        if self.gradients is not None:
            return self.records.dimension
        return self.release(name).dimension

    def form(self, name: str) -> Form:
        """Returns the form of a release of rows.

        Args:
            name: of the release.

        Returns:
            ``"vector"``, ``"symmetric"`` or ``"diagonal"``; ``"vector"`` for gradients.
        """
        if self.gradients is not None or self.rows:
            return "vector"
        return self.release(name).form

    @property
    def relation(self) -> Relation:
        """Returns the neighbouring relation by the kind of cohort. For rows with noise of their
        own it is all data of a client."""
        if self.gradients is not None:
            if self.one_at_a_time:
                return "replace"
            return "zero_out"
        if self.rows or isinstance(self.schedule, BoundFixed):
            return "replace"
        if isinstance(self.schedule, (BoundCyclic, BoundSingleClient, BoundBuffered)):
            return "zero_out"
        # the server knows that everybody takes part, so that only data can be hidden from it
        if self.shares is not None:
            return "zero_out"
        return "add_remove"

    def denominator(self, client: int, sampled: float | None) -> float:
        """Returns the public constant that divides a sum.

        Args:
            client: whose records are added up, if the unit is a record.
            sampled: q, the rate at which its records are drawn; None for all.

        Returns:
            The expected cohort; q n_i if the unit is a record; 1 for rows with noise of their own.
        """
        if self.gradients is None:
            if self.rows:
                return 1.0
            return expected_cohort(self.sampler)
        return float(self.sizes[client]) * (sampled or 1.0)

    @property
    def one_at_a_time(self) -> bool:
        """Returns True if clients act one at a time, and not in rounds."""
        return isinstance(self.schedule, Clocks)

    @property
    def sampler(self) -> BoundSampler:
        """Returns the sampler of the rounds."""
        assert isinstance(self.schedule, BoundSampler)
        return self.schedule

    @property
    def adaptive(self) -> QuantileClip | None:
        """Returns the settings of a clip norm that follows a quantile, or None, also for rows."""
        if isinstance(self.privacy.clip_norm, QuantileClip) and not self.rows:
            return self.privacy.clip_norm
        return None

    @property
    def shares(self) -> Shares | None:
        """Returns the shares of the noise of a secure sum; None if the server adds the noise."""
        if self.privacy.aggregation is None:
            return None
        cohort = round(expected_cohort(self.sampler))
        aggregation = self.privacy.aggregation
        colluding = aggregation.colluding
        if colluding is None:
            colluding = math.ceil(cohort / 3)
        missing = aggregation.missing
        # a ledger is given by others, and must not fill the memory of a verification
        if cohort <= colluding + 2 * missing or (missing + 1) * cohort > _MOST_SHARES:
            raise PrivacyError(
                f"A secure sum of {cohort:,} clients, of which {colluding:,} may collude and "
                f"{missing:,} be missing, is none that can be checked."
            )
        units = None
        if self.pooled is not None:
            units = self.pooled.total or int(self.sizes.sum())
        return Shares(cohort, colluding, missing, aggregation.bits, units)

    @property
    def budgets(self) -> tuple[float | None, ...]:
        """Returns the budget of every account."""
        noise = self.release(self.rows).rows if self.rows else None
        if noise is not None:
            return (noise.epsilon,)
        if isinstance(self.privacy, RecordPrivacy) and self.gradients is not None:
            return self.privacy.budgets(self.records.ids)
        assert not isinstance(self.privacy.epsilon, Mapping)
        return (self.privacy.epsilon,)

    @property
    def delta(self) -> float:
        """Returns the delta of every epsilon; the number of protected units sets the default."""
        noise = self.release(self.rows).rows if self.rows else None
        if noise is not None and noise.delta is not None:
            return noise.delta
        plan = self._of_records
        if plan is None:
            return self.privacy.resolved_delta(self.sampler.n)
        return self.privacy.resolved_delta(plan.total or int(self.sizes.sum()))

    @property
    def secure(self) -> bool:
        """Returns True if the run takes its coins from the operating system."""
        return self.privacy.source == "secure"

    def seeded(self) -> Setup:
        """Returns the same with reproducible noise, so that two channels can share it."""
        return replace(self, privacy=replace(self.privacy, source="seeded"))

    def open(
        self,
        seed: int,
        *,
        ledger: Path | None = None,
        resume: bool = False,
        replicates: int = 1,
        x: Sequence[Tensor] | None = None,
    ) -> Any:
        """Opens a channel of the run.

        Args:
            seed: of the noise and the cohorts, in place of the run's.
            ledger: file of the charges; None keeps them in memory.
            resume: True to continue that file.
            replicates: R, the number of runs in one channel.
            x: other rows for each client, if gradients are multiples of rows; None for the run's.

        Returns:
            A :class:`RecordedRounds` or a :class:`RecordedActivations`.
        """
        plans: list[ReleasePlan | GradientPlan] = []
        for plan in self.plans:
            if isinstance(plan, GradientPlan):
                plans.append(plan if x is None or plan.x is None else replace(plan, x=x))
            else:
                # noise on rows would hide the sum of a release
                plans.append(plan if self.rows else replace(plan, rows=None))
        recorded: type[RecordedRounds | RecordedActivations] = RecordedRounds
        if isinstance(self.schedule, Clocks):
            recorded = RecordedActivations
        return open_channel(
            self.privacy,
            plans,
            self.schedule.phrase if isinstance(self.schedule, Clocks) else self.schedule,
            seed=seed,
            steps=self.steps,
            fingerprint="audit",
            ledger_path=ledger,
            resume=resume,
            replicates=replicates,
            channel_class=recorded,
        )

    @cached_property
    def claims(self) -> ReleaseClaims:
        """Returns the claims about the releases, which do not depend on the seed."""
        channel = self.open(0)
        if not isinstance(channel, RoundChannel) or self.gradients is not None:
            return ReleaseClaims(self, channel.accountant.costs)
        if self.rows:
            # rows have an account of their own, with one cost
            noise = channel.row_noise[self.rows]
            return ReleaseClaims(
                self,
                AccountCosts((noise.cost,), (noise.multiplier,), np.zeros((1, 1), dtype=np.int64)),
            )
        bands = {
            name: r.bands.coefficients
            for name, r in channel.releases.items()
            if r.bands is not None
        }
        return ReleaseClaims(self, channel.accountant.costs, bands)

    def name(self, client: int) -> str:
        """Returns the name of a client in findings.

        Args:
            client: its position in the data.
        """
        if self.gradients is None:
            return str(client)
        return repr(self.gradients.ids[client])

    def parts(self, dimension: int) -> list[tuple[int, int]]:
        """Divides a released vector into the tensors of the model.

        Args:
            dimension: of the vector.

        Returns:
            (start, stop) of each tensor, or of each number of a short vector.
        """
        if sum(self.tensors) == dimension:
            sizes = self.tensors
        else:
            sizes = (dimension,)
        # each of a few numbers, so that one without noise is not lost in the total
        if len(sizes) == 1 and self.one_at_a_time and 1 < dimension <= 64:
            sizes = (1,) * dimension
        stops = np.cumsum(sizes).tolist()
        return list(zip([0, *stops[:-1]], stops, strict=True))

    # Public facts about records

    @cached_property
    def sizes(self) -> np.ndarray:
        """Returns (n,) int64: numbers of records."""
        if self.counts is None:
            assert self._of_records is not None
            return self._of_records.counts
        return np.array(self.counts, dtype=np.int64)

    def rate(self, client: int) -> float:
        """Returns the probability that a unit takes part in a release, by a secret coin.

        Args:
            client: whose records are the units, if the unit is one record.
        """
        if self.pooled is not None:
            return float(self.pooled.rates[client])
        if self.gradients is None:
            if self.relation == "add_remove":
                return expected_cohort(self.sampler) / self.sampler.n
            return 1.0
        plan = self.records
        n = int(self.sizes[client])
        # a batch larger than the data has all records
        if plan.batch_size is not None:
            if n:
                return min(1.0, plan.batch_size / n)
            return 1.0
        return float(np.broadcast_to(plan.rate, len(plan.ids))[client])
