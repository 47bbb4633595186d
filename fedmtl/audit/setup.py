"""What is audited (how to open a channel of the run) and what is claimed (by the price that is
charged).

A claim is read off the price, which is data, and public facts: the scale of the noise on a sum of
rows is z S / m, on a sum of gradients of single records z S / (q n_i), where z and q are of the
price, S follows from the clip norm of the settings and from how neighbours differ, and n_i is the
client's number of records at the time.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any, Literal

import numpy as np
from dp_accounting import dp_event
from torch import Tensor

from ..privacy.accounting.composition import epsilon
from ..privacy.accounting.knorm import KNormDpEvent
from ..privacy.accounting.losses import ReplacedPoissonDpEvent
from ..privacy.activations import Activations
from ..privacy.gradients import GradientPlan
from ..privacy.opening import open_channel
from ..privacy.price import Price
from ..privacy.prices import Prices
from ..privacy.quantile import QuantileClip
from ..privacy.release import Form, ReleasePlan
from ..privacy.rounds import Rounds
from ..privacy.samplers import BoundAsked, BoundCyclic, BoundFixed, BoundSampler, Relation
from ..privacy.settings import Privacy, RecordPrivacy
from .recording import RecordedActivations, RecordedRounds

GRADIENTS = "gradients"
ROWS = "rows of "
CLIENTS = 12
ACTIVATIONS = 2000
"""Clients examined one by one, and activations of one channel, at most."""

MOST_ELEMENTS = 1 << 22


@dataclass(frozen=True)
class Clocks:
    """The public schedule of clients that act one at a time.

    Attributes:
        phrase: about it, with which a channel is opened.
        blocks: (channel, seed) -> (first activation, clients (1, S) int64) of every block of the
            run.
    """

    phrase: str
    blocks: Callable[[Activations, int], Iterator[tuple[int, Tensor]]]


@dataclass(frozen=True, kw_only=True)
class Setup:
    """How a run opens its channel, and the public facts.

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
            has an account of its own, and hides what a release adds up, so that channels are opened
            without it elsewhere.
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
        """Return the releases of gradients under these settings, where the protected unit is one
        record."""
        if not isinstance(self.privacy, RecordPrivacy):
            return None
        gradients = next((plan for plan in self.plans if isinstance(plan, GradientPlan)), None)
        if gradients is None:
            return None
        return gradients.under((self.privacy,))

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
        """Return the release of rows of this name, or the one whose rows are checked."""
        return next(plan for plan in self.releases if plan.name == (self.rows or name))

    def dimension(self, name: str) -> int:
        """Return the length of what one client or record contributes to a release."""
        if self.gradients is not None:
            return self.records.dimension
        return self.release(name).dimension

    def form(self, name: str) -> Form:
        """Returns the form of the release of the rows."""
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
        if isinstance(self.schedule, (BoundCyclic, BoundAsked)):
            return "zero_out"
        return "add_remove"

    def denominator(self, client: int, sampled: float | None) -> float:
        """Return the public constant that divides a sum: the expected cohort, or q n_i of the
        records of ``client``; 1 for rows."""
        if self.gradients is None:
            if self.rows:
                return 1.0
            return expected_cohort(self.sampler)
        return float(self.sizes[client]) * (sampled or 1.0)

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
    def adaptive(self) -> QuantileClip | None:
        """Return the settings of a clip norm that follows a quantile, or None, also for rows."""
        if isinstance(self.privacy.clip_norm, QuantileClip) and not self.rows:
            return self.privacy.clip_norm
        return None

    @property
    def budgets(self) -> tuple[float | None, ...]:
        """Return the budget of every account."""
        noise = self.release(self.rows).rows if self.rows else None
        if noise is not None:
            return (noise.epsilon,)
        if isinstance(self.privacy, RecordPrivacy):
            return self.privacy.budgets(self.records.ids)
        return (self.privacy.epsilon,)

    @property
    def delta(self) -> float:
        """Return the delta of every epsilon; the number of protected units sets the default."""
        noise = self.release(self.rows).rows if self.rows else None
        if noise is not None and noise.delta is not None:
            return noise.delta
        return self.privacy.resolved_delta(
            int(self.sizes.sum()) if self.gradients is not None else self.sampler.n
        )

    @property
    def secure(self) -> bool:
        """Whether the run takes its coins from the operating system."""
        return self.privacy.source == "secure"

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
    ) -> Any:
        """Open a channel of the run with another seed, and other rows ``x`` where gradients are
        multiples of rows."""
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
            fingerprint="audit",
            ledger_path=ledger,
            resume=resume,
            replicates=replicates,
            kind=RecordedActivations if isinstance(self.schedule, Clocks) else RecordedRounds,
        )

    @cached_property
    def claims(self) -> Claims:
        """Returns the claims about the releases, which do not depend on the seed."""
        channel = self.open(0)
        if not isinstance(channel, Rounds) or self.gradients is not None:
            return Claims(self, channel.account.prices)
        if self.rows:
            noise = channel.rows[self.rows]
            return Claims(
                self, Prices((noise.price,), (noise.multiplier,), np.zeros((1, 1), dtype=np.int64))
            )
        bands = {
            name: r.bands.coefficients
            for name, r in channel.releases.items()
            if r.bands is not None
        }
        return Claims(self, channel.account.prices, bands)

    def name(self, client: int) -> str:
        """Returns the name of a client in findings."""
        if self.gradients is None:
            return str(client)
        return repr(self.gradients.ids[client])

    def parts(self, dimension: int) -> list[tuple[int, int]]:
        """Return (start, stop) of every tensor in a vector of ``dimension`` numbers; of every
        number in a short one."""
        if sum(self.tensors) == dimension:
            sizes = self.tensors
        else:
            sizes = (dimension,)
        if len(sizes) == 1 and self.one_at_a_time and 1 < dimension <= 64:
            sizes = (1,) * dimension
        stops = np.cumsum(sizes).tolist()
        return list(zip([0, *stops[:-1]], stops, strict=True))

    # Public facts about records

    @cached_property
    def sizes(self) -> np.ndarray:
        """Return (n,) int64: numbers of records."""
        if self.counts is None:
            return self.records.counts
        return np.array(self.counts, dtype=np.int64)

    def rate(self, client: int) -> float:
        """Return the probability that a unit takes part in a release, by a secret coin: a client in
        a cohort, or a record of ``client``, as set or a batch of its records."""
        if self.gradients is None:
            if self.relation == "add_remove":
                return expected_cohort(self.sampler) / self.sampler.n
            return 1.0
        plan = self.records
        n = int(self.sizes[client])
        if plan.batch_size is not None:
            if n:
                return min(1.0, plan.batch_size / n)
            return 1.0
        return float(np.broadcast_to(plan.rate, len(plan.ids))[client])


@dataclass(frozen=True, kw_only=True)
class Claim:
    """What the price of a release says, without the arithmetic of the channel.

    Attributes:
        law: name of the law of the noise.
        multiplier: scale of the noise over the sensitivity.
        bound: C, the clip norm in the settings (of the first step, where it adapts).
        relation: how the rows of neighbours differ: ``"replace"`` for random cohorts of a fixed
            size, and for zero-out if clients without data send rows.
        norm: of the sensitivity that this law needs.
        form: what is released of the rows.
        size: noised coordinates.
        denominator: m, the public constant that divides the sum; of gradients q n_i.
        sampled: probability of a Poisson-sampled price, else None.
        bands: of noise that is correlated over rounds, C w is independent noise of this multiplier;
            empty where noise is independent as it is.
    """

    law: str
    multiplier: float
    bound: float
    relation: Relation
    norm: Literal["l1", "l2"]
    form: Form = "vector"
    size: int
    denominator: float
    sampled: float | None = None
    bands: tuple[float, ...] = ()

    @property
    def sensitivity(self) -> float:
        """Return S, from the clip norm and the relation: C, doubled for replace-one. Of outer
        products w w^T, C^2; for replace-one the farthest are orthogonal, at sqrt(2) C^2 in the L2
        norm and 2 C^2 in the L1 norm."""
        if self.form == "vector":
            return self.bound * (2.0 if self.relation == "replace" else 1.0)
        farther = 2.0
        if self.norm != "l1":
            farther = math.sqrt(2.0)
        return self.bound**2 * (farther if self.relation == "replace" else 1.0)

    @property
    def scale(self) -> float:
        """Return the scale of the noise on the released mean: the standard deviation, for the
        Gaussian."""
        return self.multiplier * self.sensitivity / self.denominator

    @property
    def std(self) -> float:
        """Return the root mean square of a coordinate of the noise on the sum."""
        # of a symmetric matrix with as many coordinates
        side = (math.sqrt(8 * self.size + 1) - 1) / 2
        units = {
            "gaussian": 1.0,
            "laplace": math.sqrt(2),
            "l2_laplace": math.sqrt(self.size + 1),
            "wishart": math.sqrt(side + 1),  # of the published MP-MTL, its mean included
        }
        unit = units[self.law]
        return unit * self.multiplier * self.sensitivity

    @property
    def width(self) -> float:
        """Return the public width of the grid of the noised sum in secure mode."""
        if self.form == "vector":
            bound = self.bound
        else:
            bound = self.bound**2
        std = self.std
        if self.bands:
            bound = bound / (2 * len(self.bands))
            std = std / self.bands[0]
        return width_of(
            bound, self.norm, self.size, std * (2.0**-40 if self.law == "gaussian" else 2.0**-20)
        )


class Claims:
    """What is claimed of every release; false where no noise is claimed.

    Args:
        setup: public facts.
        prices: what the account charges, or None.
        bands: of noise that is correlated over rounds, by release.

    Attributes:
        names: the releases: those of rows, ``"gradients"``, or ``"rows of <name>"``.
    """

    def __init__(
        self,
        setup: Setup,
        prices: Prices | None,
        bands: Mapping[str, tuple[float, ...]] | None = None,
    ) -> None:
        self._setup = setup
        self._prices = prices
        self._bands = bands or {}
        self._made: dict[tuple[str, int, int], Claim] = {}
        self.names: tuple[str, ...] = tuple(plan.name for plan in setup.releases)
        if setup.gradients is not None:
            self.names = (GRADIENTS,)
        elif setup.rows:
            self.names = (f"{ROWS}{setup.rows}",)

    @property
    def accounts(self) -> range:
        """Return the accounts with prices of their own: one for each client where the unit is a
        record, else one."""
        return range(1 if self._setup.gradients is None else len(self._setup.sizes))

    def charged(self, uses: np.ndarray) -> np.ndarray:
        """Return (m,) the uses of these accounts, from those of all: where clients share a price,
        the most."""
        if self._setup.gradients is None:
            return uses.max(keepdims=True)
        return uses

    def __bool__(self) -> bool:
        return bool(self.names) and self._prices is not None

    @property
    def prices(self) -> Prices:
        """Returns the prices of the account."""
        assert self._prices is not None
        return self._prices

    @property
    def refuted(self) -> str | None:
        """Return why the published accounting that is charged does not hold; None where it does."""
        return self.prices.refuted

    def price(self, client: int = 0) -> tuple[Price, float]:
        """Return the price of an account, of ``client`` where the unit is a record, and its noise
        multiplier."""
        kind = self.prices.kind[0, 0 if self._setup.gradients is None else client]
        return self.prices.kinds[kind], self.prices.multipliers[kind]

    def of(self, name: str, client: int = 0, use: int = 0) -> Claim:
        """Return the claim on a release.

        Args:
            name: of the release, or ``"<name>/count"`` for the count of its unclipped clients.
            client: whose account, where the unit is a record; with all its records.
            use: number of the use, from 0; beyond an allocation the last one. Of a clip norm that
                adapts the first.
        """
        key = name, client, use
        if key not in self._made:
            self._made[key] = self._claim(*key)
        return self._made[key]

    def _claim(self, name: str, client: int, use: int) -> Claim:
        setup = self._setup
        adaptive = self._setup.adaptive
        if name.endswith("/count"):  # which one client moves by 1/2, or by 1 where it is replaced
            assert adaptive is not None
            bound = 1.0 if self._exchanged(name.removesuffix("/count")) else 0.5
            claim = replace(
                self.of(name.removesuffix("/count")), law="gaussian", norm="l2", size=1, bound=bound
            )
            return replace(
                claim, relation="add_remove", multiplier=count_std(adaptive, setup.sampler) / bound
            )
        price, multiplier = (None, 0.0) if self._prices is None else self.price(client)
        if price is None:
            law = setup.privacy.mechanism
        else:
            law = price.mechanism
        if price is None or price.sampled == 1:
            sampled = None
        else:
            sampled = price.sampled
        if price is not None:
            multiplier = weighted(price, multiplier, use)
        form = setup.form(name)
        d = setup.dimension(name)
        if adaptive is not None and price is not None:  # the count takes its part
            count = count_std(adaptive, setup.sampler) / (1.0 if self._exchanged(name) else 0.5)
            multiplier = (multiplier**-2 - count**-2) ** -0.5
        return Claim(
            law=law,
            multiplier=multiplier,
            bound=setup.privacy.initial_norm,
            relation="replace" if self._exchanged(name) else setup.relation,
            norm="l1" if law == "laplace" and form != "symmetric" else "l2",
            form=form,
            size=d * (d + 1) // 2 if form == "symmetric" else d,
            denominator=setup.denominator(client, sampled),
            sampled=sampled,
            bands=self._bands.get(name, ()),
        )

    def _exchanged(self, name: str) -> bool:
        """Returns True if neighbours have two rows in a release instead of one or none. That is
        so if a unit is replaced, or if the data of a client are replaced by nothing and clients
        without data send rows."""
        setup = self._setup
        if setup.gradients is not None or setup.rows or setup.relation != "zero_out":
            return setup.relation == "replace"
        return setup.release(name).without_data

    def facts(self, client: int = 0) -> dict[str, Any]:
        """Returns the price facts of an account that follow from the settings and public facts."""
        setup = self._setup
        of_records = self._setup.gradients is not None
        return {
            "mechanism": "l2_laplace" if setup.rows else setup.privacy.mechanism,
            "sizes": tuple(self.of(name, client).size for name in self.names),
            "delta": setup.delta,
            "sampled": setup.rate(client),
            "replaced": setup.one_at_a_time,
            "sums": int(setup.records.local_steps[client]) if of_records else 1,
            "bands": max([1, *map(len, self._bands.values())]),
        }

    def spent(self, client: int, uses: int) -> float:
        """Return epsilon of an account after ``uses``, at the delta of the settings; see
        :func:`composition`."""
        parts = [(event, count) for event, count in composition(*self.price(client), uses) if count]
        if not parts:
            return 0.0
        whole, count = (
            parts[0]
            if len(parts) == 1
            else (dp_event.ComposedDpEvent([event for event, _ in parts]), 1)
        )
        return epsilon(whole, count, self._setup.delta)


def weighted(price: Price, multiplier: float, use: int) -> float:
    """Return the noise multiplier of a use, of the last one beyond an allocation."""
    if price.weights is None:
        return multiplier
    return multiplier / price.weights[min(use, len(price.weights) - 1)]


def composition(price: Price, multiplier: float, uses: int) -> list[tuple[Any, int]]:
    """Return the events of ``uses``, with their numbers; uses beyond an allocation are taken for
    the last one."""
    if price.weights is None:
        return [(event_of(price, multiplier), uses * price.sums)]
    return [(event_of(price, weighted(price, multiplier, use)), price.sums) for use in range(uses)]


def event_of(price: Price, multiplier: float) -> Any:
    """Return the ``dp_accounting`` event of one noised sum with noise of ``multiplier``, of all its
    releases; a multiplier of 0 is no noise."""
    if multiplier == 0:
        return dp_event.NonPrivateDpEvent()
    events: list[Any] = [dp_event.LaplaceDpEvent(multiplier) for _ in price.sizes]
    if price.mechanism == "gaussian":  # of the concatenated vector
        events = [dp_event.GaussianDpEvent(sum(multiplier**-2.0 for _ in price.sizes) ** -0.5)]
    elif price.mechanism == "l2_laplace":
        events = [KNormDpEvent(1 / multiplier, size) for size in price.sizes]
    if len(events) == 1:
        event = events[0]
    else:
        event = dp_event.ComposedDpEvent(events)
    if price.sampled == 1:
        return event
    return (ReplacedPoissonDpEvent if price.replaced else dp_event.PoissonSampledDpEvent)(
        price.sampled, event
    )


def width_of(bound: float, norm: str, size: int, most: float) -> float:
    """Return the largest power of two that is at most C 2^-21 over the spread of a cell, and at
    most ``most``."""
    if norm == "l1":
        spread = float(size)
    else:
        spread = math.sqrt(size)
    return 2.0 ** math.floor(math.log2(min(bound / spread * 2.0**-21, most)))


def expected_cohort(sampler: BoundSampler) -> float:
    """Return m, from the setting and not from the sampler's own property."""
    cohort = getattr(sampler, "cohort", None)
    return float(sampler.n if cohort is None else cohort)


def count_std(adaptive: QuantileClip, sampler: BoundSampler) -> float:
    """Return the standard deviation of the noise on the count of unclipped clients: as set, or m /
    20."""
    if adaptive.count_noise is None:
        return expected_cohort(sampler) / 20
    return adaptive.count_noise
