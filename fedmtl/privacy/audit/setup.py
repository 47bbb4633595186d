"""What is audited (how to open a channel of the run) and what is claimed (read off the event that is charged).

A claim is read off the charged event and public facts alone: the scale of the noise on a sum of rows is z S / m, on a
sum of gradients of single records z S / (q n_i), where z and q are of the event, S follows from the clip norm of the
settings and from how neighbours differ, and n_i is the client's number of records at the time.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from dp_accounting import dp_event
from torch import Tensor

from ...errors import PrivacyError
from ..accounting.composition import epsilon
from ..channel import Channel
from ..gradients import GradientPlan
from ..opening import open_channel
from ..price import Price, Prices
from ..quantile import QuantileClip
from ..release import Form, ReleasePlan
from ..samplers import BoundCyclic, BoundFixed, BoundSampler, Relation
from ..settings import Privacy, RecordPrivacy

Kind = Literal["gaussian", "laplace", "knorm", "pure"]

GRADIENTS = "gradients"
CLIENTS, ACTIVATIONS = 12, 2000
"""Clients examined one by one, and activations of one channel, at most."""

MOST_ELEMENTS = 1 << 22


@dataclass(frozen=True)
class Clocks:
    """The public schedule of clients that act one at a time.

    Attributes:
        phrase: about it, with which a channel is opened.
        blocks: (channel, seed) -> (first activation, clients (1, S) int64) of every block of the run.
    """

    phrase: str
    blocks: Callable[[Channel, int], Iterator[tuple[int, Tensor]]]


@dataclass(frozen=True, kw_only=True)
class Setup:
    """How a run opens its channel, and the public facts.

    Args:
        privacy: the run's settings.
        plans: all releases of the run.
        schedule: the sampler of rounds, bound to the population, or that of clients that act one at a time.
        steps: planned number of steps.
        tensors: sizes of the model's tensors in a released vector; releases of another total are one tensor.
        counts: numbers of records of every client, from the data and not from the plan; None takes the plan's.
        rows: whether channels are opened with the noise that clients add to their own rows, which are then what is
            checked. That noise has another account, and hides what a release adds up.
    """

    privacy: Privacy
    plans: tuple[ReleasePlan | GradientPlan, ...]
    schedule: BoundSampler | Clocks
    steps: int
    tensors: tuple[int, ...] = ()
    counts: tuple[int, ...] | None = None
    rows: bool = False

    @cached_property
    def gradients(self) -> GradientPlan | None:
        """Return the releases of gradients under these settings, where the protected unit is one record."""
        if not isinstance(self.privacy, RecordPrivacy):
            return None
        found = next((plan for plan in self.plans if isinstance(plan, GradientPlan)), None)
        return None if found is None else found.under((self.privacy,))

    @property
    def records(self) -> GradientPlan:
        """Return :attr:`gradients`, where there are some."""
        assert self.gradients is not None
        return self.gradients

    @property
    def releases(self) -> tuple[ReleasePlan, ...]:
        """Return the releases of rows."""
        return tuple(plan for plan in self.plans if isinstance(plan, ReleasePlan))

    def release(self, name: str) -> ReleasePlan:
        """Return the release of rows of this name."""
        return next(plan for plan in self.releases if plan.name == name)

    @property
    def one_at_a_time(self) -> bool:
        """Whether clients act one at a time, and not in rounds."""
        return isinstance(self.schedule, Clocks)

    @property
    def sampler(self) -> BoundSampler:
        """Return the sampler of the rounds."""
        assert isinstance(self.schedule, BoundSampler)
        return self.schedule

    @property
    def clocks(self) -> Clocks:
        """Return the schedule of clients that act one at a time."""
        assert isinstance(self.schedule, Clocks)
        return self.schedule

    @property
    def adaptive(self) -> QuantileClip | None:
        """Return the settings of a clip norm that follows a quantile, or None."""
        return self.privacy.clip_norm if isinstance(self.privacy.clip_norm, QuantileClip) else None

    @property
    def delta(self) -> float:
        """Return the delta of every epsilon; the number of protected units sets the default."""
        return self.privacy.resolved_delta(int(self.sizes.sum()) if self.gradients is not None else self.sampler.n)

    @property
    def secure(self) -> bool:
        """Whether the run takes its coins from the operating system."""
        return self.privacy.source == "secure"

    @property
    def uses_differ(self) -> bool:
        """Whether the budget of sums of rows is allocated, so that their uses have different events."""
        return self.gradients is None and any(plan.allocation is not None for plan in self.releases)

    def seeded(self) -> Setup:
        """Return the same with reproducible noise, so that two channels can share it."""
        return replace(self, privacy=replace(self.privacy, source="seeded"))

    def open(
        self,
        seed: int,
        *,
        ledger: Path | None = None,
        resume: bool = False,
        replicates: int = 1,
        x: Sequence[Tensor] | None = None,
        fingerprint: str = "audit",
    ) -> Channel:
        """Open a channel of the run with another seed, and other rows ``x`` where gradients are multiples of rows."""
        plans: list[ReleasePlan | GradientPlan] = []
        for plan in self.plans:
            if isinstance(plan, GradientPlan):
                plans.append(plan if x is None or plan.x is None else replace(plan, x=x))
            else:
                plans.append(plan if self.rows else replace(plan, rows=None))
        return open_channel(
            self.privacy,
            plans,
            self.schedule.phrase if isinstance(self.schedule, Clocks) else self.schedule,
            seed=seed,
            steps=self.steps,
            fingerprint=fingerprint,
            ledger_path=ledger,
            resume=resume,
            replicates=replicates,
        )

    def name(self, client: int) -> str:
        """Return how findings name a client."""
        return str(client) if self.gradients is None else repr(self.gradients.ids[client])

    def parts(self, dimension: int) -> list[tuple[int, int]]:
        """Return (start, stop) of every tensor in a vector of ``dimension`` numbers; of every number in a short one."""
        sizes = self.tensors if sum(self.tensors) == dimension else (dimension,)
        if len(sizes) == 1 and self.one_at_a_time and 1 < dimension <= 64:
            sizes = (1,) * dimension
        stops = np.cumsum(sizes).tolist()
        return list(zip([0, *stops[:-1]], stops, strict=True))

    # Public facts about records

    @cached_property
    def sizes(self) -> np.ndarray:
        """Return (n,) int64: numbers of records."""
        return self.records.counts if self.counts is None else np.array(self.counts, dtype=np.int64)

    def rate(self, client: int) -> float:
        """Return the probability that a unit takes part in a release: a client in a cohort, or a record of ``client``,
        as set or a batch of its records."""
        if self.gradients is None:
            return expected_cohort(self.sampler) / self.sampler.n
        plan, n = self.records, int(self.sizes[client])
        if plan.batch_size is not None:
            return min(1.0, plan.batch_size / n) if n else 1.0
        return float(np.broadcast_to(plan.rate, len(plan.ids))[client])

    def weight(self, client: int, use: int) -> float:
        """Return the weight of an activation, the mean of a client's weights being 1."""
        given = self.records.allocation
        return 1.0 if given is None else float(given[client][use] / np.mean(given[client]))

    @property
    def linear(self) -> bool:
        """Whether gradients are multiples of rows that the channel has."""
        return self.records.x is not None

    @cached_property
    def x(self) -> list[Tensor]:
        """Return (n_i, D) float64 rows of every client: those of the run, or any, where gradients are of none."""
        given = self.records.x
        if given is not None:
            return list(given)
        generator = torch.Generator().manual_seed(0)
        d = self.records.dimension
        return [torch.randn(n, d, generator=generator, dtype=torch.float64) for n in self.sizes.tolist()]


@dataclass(frozen=True, kw_only=True)
class Claim:
    """What the event charged for one release says, apart from the arithmetic of the channel.

    Attributes:
        kind: law of the noise.
        multiplier: scale of the noise over the sensitivity.
        bound: C, the clip norm in the settings (of the first step, where it adapts).
        relation: how neighbours differ: ``"replace"`` for random cohorts of a fixed size.
        norm: of the sensitivity that this law needs.
        form: what is released of the rows.
        size: noised coordinates.
        denominator: m, the public constant that divides the sum; of gradients q n_i.
        sampled: probability of a Poisson-sampled event, else None.
        event: of one charge: a whole step with all its sums, or one release of gradients.
        bands: of noise that is correlated over rounds, C w is independent noise of this multiplier; empty where noise
            is independent as it is.
    """

    kind: Kind
    multiplier: float
    bound: float
    relation: Relation
    norm: Literal["l1", "l2"]
    form: Form = "vector"
    size: int
    denominator: float
    sampled: float | None
    event: Any
    bands: tuple[float, ...] = ()

    @property
    def sensitivity(self) -> float:
        """Return S, from the clip norm and the relation: C, doubled for replace-one. Of outer products w w^T, C^2; for
        replace-one the farthest are orthogonal, at sqrt(2) C^2 in the L2 norm and 2 C^2 in the L1 norm."""
        if self.form == "vector":
            return self.bound * (2.0 if self.relation == "replace" else 1.0)
        farther = 2.0 if self.norm == "l1" else math.sqrt(2.0)
        return self.bound**2 * (farther if self.relation == "replace" else 1.0)

    @property
    def scale(self) -> float:
        """Return the scale of the noise on the released mean: the standard deviation, for the Gaussian."""
        return self.multiplier * self.sensitivity / self.denominator


class Claims:
    """What is claimed of every release; false where no noise is claimed.

    Args:
        setup: public facts.
        channel: an open one.

    Attributes:
        names: the releases: those of rows, or ``"gradients"``; of a setup with noise on rows ``"rows of <name>"``.
    """

    def __init__(self, setup: Setup, channel: Channel) -> None:
        self._setup = setup
        self._prices = channel.account.prices
        self._bands = {name: one.bands.coefficients for name, one in channel.releases.items() if one.bands is not None}
        self._made: dict[tuple[str, int, int], Claim] = {}
        self._rows = {f"rows of {name}": one.price.event(one.multiplier) for name, one in channel.rows.items()}
        self.names: tuple[str, ...] = tuple(plan.name for plan in setup.releases)
        if setup.gradients is not None:
            self.names = (GRADIENTS,)
        elif setup.rows:
            self.names = tuple(self._rows)

    def __bool__(self) -> bool:
        return bool(self.names) and self._prices is not None

    @property
    def prices(self) -> Prices:
        """Return what the account charges."""
        assert self._prices is not None
        return self._prices

    def _price(self, client: int) -> Price:
        return self.prices.kinds[self.prices.kind[0, client]]

    @property
    def delta(self) -> float:
        """Return the delta of what is charged."""
        return self.prices.delta

    @property
    def refuted(self) -> str | None:
        """Return why the published accounting that is charged does not hold; None where it does."""
        return self.prices.refuted

    def of(self, name: str, client: int = 0, use: int = 0) -> Claim:
        """Return the claim on a release.

        Args:
            name: of the release, or ``"<name>/count"`` for the count of its unclipped clients.
            client: whose account, where the unit is a record; with all its records.
            use: number of the use, from 0; beyond an allocation the last one. Of a clip norm that adapts the first.

        Raises:
            PrivacyError: an event that the audit cannot read.
        """
        key = name, client, use
        if key not in self._made:
            self._made[key] = self._claim(name, client, use)
        return self._made[key]

    def _claim(self, name: str, client: int, use: int) -> Claim:
        setup = self._setup
        if self._prices is None:
            return clip_claim(setup, name)
        if setup.gradients is not None:
            return self._of_gradients(client, use)
        if name in self._rows:
            return self._of_own_noise(name)
        if name.endswith("/count"):  # which one client moves by 1/2, or by 1 where it is replaced
            assert setup.adaptive is not None
            claim = replace(self.of(name.removesuffix("/count")), kind="gaussian", norm="l2", size=1, bound=0.5)
            return replace(claim, multiplier=count_std(setup.adaptive, setup.sampler) / claim.sensitivity)
        return self._of_rows(name, use)

    def repeats(self, client: int) -> int:
        """Return the number of charges in one use: the local steps of a participation."""
        return self._price(client).sums

    def composition(self, client: int, uses: int) -> list[tuple[Any, int]]:
        """Return the events of an account after ``uses``, with their numbers;
        uses beyond an allocation are taken for the last one."""
        weights = self._price(client).weights
        if weights is None:
            return [(self.prices.event(client), uses * self.repeats(client))]
        return [(self.prices.event(client, min(use, len(weights) - 1)), self.repeats(client)) for use in range(uses)]

    def spent(self, client: int, uses: int) -> float:
        """Return epsilon of :meth:`composition`, at the delta of the settings."""
        parts = [(event, count) for event, count in self.composition(client, uses) if count]
        if not parts:
            return 0.0
        whole, count = parts[0] if len(parts) == 1 else (dp_event.ComposedDpEvent([one for one, _ in parts]), 1)
        return epsilon(whole, count, self._setup.delta)

    def _of_rows(self, name: str, use: int) -> Claim:
        setup, weights = self._setup, self._price(0).weights
        charged = self.prices.event(0, use if weights is None else min(use, len(weights) - 1))
        inner, sampled = unsampled(charged)
        parts = dict(zip(self.names, _parts(inner, len(self.names)), strict=True))
        kind, multiplier = law_of(parts[name])
        relation = relation_of(setup.sampler)
        if setup.adaptive is not None:  # the count of unclipped clients takes its part of the step's noise
            count = count_std(setup.adaptive, setup.sampler) / (1.0 if relation == "replace" else 0.5)
            multiplier = (multiplier**-2 - count**-2) ** -0.5
        plan = setup.release(name)
        return Claim(
            kind=kind,
            multiplier=multiplier,
            bound=setup.privacy.initial_norm,
            relation=relation,
            norm="l1" if kind == "laplace" else "l2",
            form=plan.form,
            size=plan.size,
            denominator=expected_cohort(setup.sampler),
            sampled=sampled,
            event=charged,
            bands=self._bands.get(name, ()),
        )

    def _of_own_noise(self, name: str) -> Claim:
        """Return the claim on a client's row, which moves by at most 2 C where all its data are replaced."""
        kind, multiplier = law_of(self._rows[name])
        claim = clip_claim(self._setup, name.removeprefix("rows of "))
        own = replace(claim, kind=kind, multiplier=multiplier, relation="replace", norm="l2", form="vector")
        size = self._setup.release(name.removeprefix("rows of ")).dimension
        return replace(own, size=size, denominator=1.0, event=self._rows[name])

    def _of_gradients(self, client: int, use: int) -> Claim:
        setup, event = self._setup, self.prices.event(client, use)
        inner, sampled = unsampled(event, replaced=setup.one_at_a_time)
        kind, multiplier = law_of(inner)
        return Claim(
            kind=kind,
            multiplier=multiplier,
            bound=setup.privacy.initial_norm,
            relation="replace" if setup.one_at_a_time else "zero_out",
            norm="l1" if kind == "laplace" else "l2",
            size=setup.records.dimension,
            denominator=float(setup.sizes[client]) * (sampled or 1.0),
            sampled=sampled,
            event=event,
        )


def clip_claim(setup: Setup, name: str) -> Claim:
    """Return the claim on a release that is clipped and not noised: a bound on a client, and no event."""
    plan, laplace = setup.release(name), setup.privacy.mechanism == "laplace"
    return Claim(
        kind="laplace" if laplace else "gaussian",
        multiplier=0.0,
        bound=setup.privacy.initial_norm,
        relation=relation_of(setup.sampler),
        norm="l1" if laplace and plan.form == "vector" else "l2",
        form=plan.form,
        size=plan.size,
        denominator=expected_cohort(setup.sampler),
        sampled=None,
        event=None,
    )


def relation_of(sampler: BoundSampler) -> Relation:
    """Return how neighbours differ, by the kind of cohort."""
    if isinstance(sampler, BoundFixed):
        return "replace"
    return "zero_out" if isinstance(sampler, BoundCyclic) else "add_remove"


def unsampled(event: Any, *, replaced: bool = False) -> tuple[Any, float | None]:
    """Return what happens to the units drawn, and the probability of a Poisson draw; ``replaced`` where a unit is
    exchanged for another one, of which a Poisson draw has an event of its own."""
    if type(event).__name__ == ("ReplacedPoissonDpEvent" if replaced else "PoissonSampledDpEvent"):
        return event.event, float(event.sampling_probability)
    return event, None


def _parts(event: Any, releases: int) -> list[Any]:
    """Return the events of the releases of one step; equal shares of a joint Gaussian event."""
    if isinstance(event, dp_event.ComposedDpEvent):
        return list(event.events)
    if isinstance(event, dp_event.SelfComposedDpEvent):
        return [event.event] * event.count
    if isinstance(event, dp_event.GaussianDpEvent) and releases > 1:
        return [dp_event.GaussianDpEvent(event.noise_multiplier * math.sqrt(releases))] * releases
    return [event]


def law_of(event: Any) -> tuple[Kind, float]:
    """Return the law of an elementary event and its multiplier."""
    name = type(event).__name__
    if name == "GaussianDpEvent":
        return "gaussian", float(event.noise_multiplier)
    if name == "LaplaceDpEvent":
        return "laplace", float(event.noise_multiplier)
    if name == "KNormDpEvent":
        return "knorm", 1 / float(event.epsilon)
    if name == "PureDpEvent":
        return "pure", 1 / float(event.epsilon)
    raise PrivacyError(
        f"The audit cannot read the event {event}; it knows Gaussian, Laplace and K-norm noise, and pure claims."
    )


def expected_cohort(sampler: BoundSampler) -> float:
    """Return m, from the setting and not from the sampler's own property."""
    cohort = getattr(sampler, "cohort", None)
    return float(sampler.n if cohort is None else cohort)


def count_std(adaptive: QuantileClip, sampler: BoundSampler) -> float:
    """Return the standard deviation of the noise on the count of unclipped clients: as set, or m / 20."""
    return expected_cohort(sampler) / 20 if adaptive.count_noise is None else adaptive.count_noise
