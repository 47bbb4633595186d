"""What is audited (how to open a channel of the run) and what is claimed (read off the event that is charged)."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from dp_accounting import dp_event
from torch import Tensor

from ...errors import BudgetExhausted, PrivacyError
from ..channel import Channel, Recording
from ..opening import open_channel
from ..quantile import QuantileClip
from ..records import Owners
from ..release import Form, ReleasePlan
from ..samplers import BoundCyclic, BoundFixed, BoundSampler, Relation
from ..settings import Privacy, RecordPrivacy

Kind = Literal["gaussian", "laplace", "knorm", "wishart"]
Rows = Callable[[int, str, Tensor], tuple[Tensor, Tensor]]
"""(step, release, ranks drawn) -> rows (k, D) and the ranks whose rows they are."""

_MOST_ELEMENTS = 1 << 22


@dataclass(frozen=True, kw_only=True)
class Setup:
    """Everything that opening a channel of the run takes.

    Args:
        privacy: the run's settings.
        plans: the algorithm's releases.
        sampler: who takes part, bound to the population.
        steps: planned number of steps.
        tensors: sizes of the model's tensors in a released vector; releases of another total are one tensor.
        owners: of the records, for record-level privacy.
        rows: whether channels are opened with the noise that clients add to their own rows. It is another account, and
            hides what a release adds up, so most checks are made without it.
    """

    privacy: Privacy
    plans: tuple[ReleasePlan, ...]
    sampler: BoundSampler
    steps: int
    tensors: tuple[int, ...] = ()
    owners: Owners | None = None
    rows: bool = False

    @property
    def records(self) -> bool:
        """Whether the protected unit is one record."""
        return isinstance(self.privacy, RecordPrivacy)

    @property
    def adaptive(self) -> QuantileClip | None:
        """The settings of a clip norm that follows a quantile, or None."""
        return self.privacy.clip_norm if isinstance(self.privacy.clip_norm, QuantileClip) else None

    @property
    def population(self) -> int:
        """Number of protected units: it sets the default delta."""
        return int(self.owners.counts.sum()) if self.records and self.owners is not None else self.sampler.n

    @property
    def delta(self) -> float:
        """Of every epsilon."""
        return self.privacy.resolved_delta(self.population)

    @property
    def secure(self) -> bool:
        """Whether the run takes its coins from the operating system."""
        return self.privacy.source == "secure"

    def seeded(self) -> Setup:
        """The same with reproducible noise, so that two channels can share it."""
        return replace(self, privacy=replace(self.privacy, source="seeded"))

    def open(
        self,
        seed: int,
        *,
        ledger: Path | None = None,
        resume: bool = False,
        replay: Recording | None = None,
    ) -> Channel:
        """A channel of the run with another seed."""
        return open_channel(
            self.privacy,
            self.plans if self.rows else tuple(replace(plan, rows=None) for plan in self.plans),
            self.sampler,
            seed=seed,
            steps=self.steps,
            owners=self.owners,
            fingerprint="audit",
            ledger_path=ledger,
            resume=resume,
            replay=replay,
        )

    def parts(self, dimension: int) -> list[tuple[int, int]]:
        """(start, stop) of every tensor in a vector of ``dimension`` numbers."""
        sizes = self.tensors if sum(self.tensors) == dimension else (dimension,)
        stops = np.cumsum(sizes).tolist()
        return list(zip([0, *stops[:-1]], stops, strict=True))

    def zeros(self, dimension: int, ranks: Tensor) -> tuple[Tensor, Tensor]:
        """Zero rows of the cohort, or of a part of it where these would be very many numbers."""
        count = min(len(ranks), max(1, _MOST_ELEMENTS // dimension))
        return torch.zeros(1, dimension).expand(count, -1), ranks[:count]


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
        denominator: m, the public constant.
        sampled: probability of a Poisson-sampled event, else None.
        largest: most units in one cohort of a truncated Poisson event, else None.
        event: of one whole step.
        accountant: that composes it.
        per_participation: a client is charged for the steps it took part in.
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
    largest: int | None = None
    event: Any
    accountant: Any
    per_participation: bool

    @property
    def sensitivity(self) -> float:
        """S, from the clip norm and the relation: C, doubled for replace-one. Of outer products w w^T, C^2; for
        replace-one the farthest are orthogonal, at sqrt(2) C^2 in the L2 norm and 2 C^2 in the L1 norm."""
        if self.form == "vector":
            return self.bound * (2.0 if self.relation == "replace" else 1.0)
        farther = 2.0 if self.norm == "l1" else math.sqrt(2.0)
        return self.bound**2 * (farther if self.relation == "replace" else 1.0)

    @property
    def scale(self) -> float:
        """Scale of the noise on the released mean: the standard deviation, for the Gaussian."""
        return self.multiplier * self.sensitivity / self.denominator


def step_event_of(channel: Channel, use: int = 0) -> Any:
    """The event and the accountant that the channel's account charges for one step; None without noise."""
    cost = channel.account.cost
    return None if cost is None else cost.step(0, use)


def uses_differ(setup: Setup) -> bool:
    """Whether the budget is allocated, so that the uses of a release have different events."""
    return any(plan.allocation is not None for plan in setup.plans)


def charged_events(channel: Channel, uses: int) -> Any:
    """The event of the first ``uses`` steps together; uses beyond the allocation are taken for the last one."""
    last = channel.plans[0].uses - 1
    return dp_event.ComposedDpEvent([step_event_of(channel, min(use, last)).event for use in range(uses)])


def multipliers_of(setup: Setup, channel: Channel, use: int = 0) -> dict[str, float]:
    """Noise multiplier of every release in one use, read off the event that is charged for it."""
    inner, _, _ = unsampled(step_event_of(channel, use).event)
    read = [law_of(event)[1] for event in _parts(inner, len(setup.plans))]
    return dict(zip((plan.name for plan in setup.plans), read, strict=True))


def claims_of(setup: Setup, channel: Channel) -> dict[str, Claim]:
    """The claim on every release, by name.

    Raises:
        PrivacyError: an event that the audit cannot read.
    """
    charged = step_event_of(channel)
    if charged is None:
        return {}
    inner, sampled, largest = unsampled(charged.event)
    read = [law_of(event) for event in _parts(inner, len(setup.plans))]
    adaptive = setup.adaptive
    claims = {}
    relation = _relation(setup, channel)
    for plan, (kind, multiplier) in zip(setup.plans, read, strict=True):
        if adaptive is not None:  # the count of unclipped clients takes its part of the step's noise
            count = count_std(adaptive, setup.sampler) / (1.0 if relation == "replace" else 0.5)
            multiplier = (multiplier**-2 - count**-2) ** -0.5
        claims[plan.name] = Claim(
            kind=kind,
            multiplier=multiplier,
            bound=setup.privacy.initial_norm,
            relation=relation,
            norm="l1" if kind == "laplace" else "l2",
            form=plan.form,
            size=plan.size,
            denominator=expected_cohort(setup.sampler),
            sampled=sampled,
            largest=largest,
            event=charged.event,
            accountant=charged.accountant,
            per_participation=channel.account.per_participation,
        )
    return claims


def clip_claims(setup: Setup) -> dict[str, Claim]:
    """Of releases that are clipped and not noised: the bound on a client, and no event."""
    laplace = setup.privacy.mechanism == "laplace"
    return {
        plan.name: Claim(
            kind="laplace" if laplace else "gaussian",
            multiplier=0.0,
            bound=setup.privacy.initial_norm,
            relation=_relation(setup, None),
            norm="l1" if laplace and plan.form == "vector" else "l2",
            form=plan.form,
            size=plan.size,
            denominator=expected_cohort(setup.sampler),
            sampled=None,
            event=None,
            accountant=None,
            per_participation=False,
        )
        for plan in setup.plans
    }


def _relation(setup: Setup, channel: Channel | None) -> Relation:
    """How neighbours differ, by the kind of cohort; the published accounting of fixed cohorts takes another one."""
    if channel is not None and channel.law is not None and channel.law.refuted is not None:
        return channel.law.relation
    if isinstance(setup.sampler, BoundFixed):
        return "replace"
    return "zero_out" if isinstance(setup.sampler, BoundCyclic) else "add_remove"


def unsampled(event: Any) -> tuple[Any, float | None, int | None]:
    """What happens to the units drawn, the probability of a Poisson draw, and its cap on the size."""
    if isinstance(event, dp_event.PoissonSampledDpEvent):
        return event.event, float(event.sampling_probability), None
    if isinstance(event, dp_event.TruncatedSubsampledGaussianDpEvent):
        inner = dp_event.GaussianDpEvent(event.noise_multiplier)
        return inner, float(event.sampling_probability), int(event.truncated_batch_size)
    if isinstance(event, dp_event.SampledWithoutReplacementDpEvent):
        return event.event, None, None
    return event, None, None


def _parts(event: Any, releases: int) -> list[Any]:
    """The events of the releases of one step; equal shares of a joint Gaussian event."""
    if isinstance(event, dp_event.ComposedDpEvent):
        return list(event.events)
    if isinstance(event, dp_event.SelfComposedDpEvent):
        return [event.event] * event.count
    if isinstance(event, dp_event.GaussianDpEvent) and releases > 1:
        return [dp_event.GaussianDpEvent(event.noise_multiplier * math.sqrt(releases))] * releases
    return [event]


def law_of(event: Any) -> tuple[Kind, float]:
    """The law of an elementary event and its multiplier."""
    name = type(event).__name__
    if name == "GaussianDpEvent":
        return "gaussian", float(event.noise_multiplier)
    if name == "LaplaceDpEvent":
        return "laplace", float(event.noise_multiplier)
    if name == "KNormDpEvent":
        return "knorm", 1 / float(event.epsilon)
    if name == "PureDpEvent":
        return "wishart", 1 / float(event.epsilon)
    raise PrivacyError(
        f"The audit cannot read the event {event}; it knows Gaussian, Laplace, K-norm and Wishart noise."
    )


def expected_cohort(sampler: BoundSampler) -> float:
    """m, from the setting and not from the sampler's own property."""
    cohort = getattr(sampler, "cohort", None)
    return float(sampler.n if cohort is None else cohort)


def count_std(adaptive: QuantileClip, sampler: BoundSampler) -> float:
    """Standard deviation of the noise on the count of unclipped clients: as set, or a twentieth of the cohort."""
    return expected_cohort(sampler) / 20 if adaptive.count_noise is None else adaptive.count_noise


def play(channel: Channel, rows: Rows, *, start: int, stop: int) -> Iterator[tuple[int, Tensor, dict[str, np.ndarray]]]:
    """Steps through the production path (draw, begin, release every plan) until the budget ends.

    Yields:
        step, the ranks drawn, and the released values by name, float64 coordinates (size,).
    """
    for step in range(start, stop):
        try:
            ranks = channel.draw(step)
            channel.begin(step, ranks)
        except BudgetExhausted:
            return
        values = {}
        for plan in channel.plans:
            sent, owners = rows(step, plan.name, ranks)
            values[plan.name] = coordinates(channel.release(plan.name, sent, owners).numpy(), plan.form)
        yield step, ranks, values


def coordinates(value: np.ndarray, form: Form) -> np.ndarray:
    """A release as the coordinates that are noised: the upper triangle of a symmetric matrix, off-diagonals times
    sqrt(2); a matrix that is not symmetric gives NaN."""
    if form != "symmetric":
        return value
    if not np.array_equal(value, value.T):
        return np.full(len(value) * (len(value) + 1) // 2, np.nan)
    upper = np.triu_indices(len(value))
    return value[upper] * np.where(upper[0] == upper[1], 1.0, math.sqrt(2.0))


def silence(setup: Setup) -> Rows:
    """Rows of clients that contribute nothing: zeros, and in every other step nobody answers."""
    dimensions = {plan.name: plan.dimension for plan in setup.plans}

    def rows(step: int, name: str, ranks: Tensor) -> tuple[Tensor, Tensor]:
        return setup.zeros(dimensions[name], ranks if step % 2 == 0 else ranks[:0])

    return rows


def released(channel: Channel, setup: Setup, *, start: int, stop: int) -> dict[str, np.ndarray]:
    """Releases of clients that contribute nothing: {name: (T, size) float64}.

    Where the uses differ, each is in units of its own noise over that of the first use, as the events say.
    Where the clip norm adapts, they are in units of the clip norm of their step over the first one, which the audit
    computes from the released counts by Algorithm 1 of Andrew et al. 2021; noise of the count itself, in units of its
    standard deviation, is under ``"<name>/count"``.
    """
    kept: dict[str, list[np.ndarray]] = {plan.name: [] for plan in setup.plans}
    adaptive = setup.adaptive
    noted: list[tuple[int, str, Tensor]] = []
    if adaptive is not None:
        channel.record = noted
        kept |= {f"{plan.name}/count": [] for plan in setup.plans}
    growth = {plan.name: 1.0 for plan in setup.plans}
    rows = silence(setup)
    first = multipliers_of(setup, channel) if uses_differ(setup) else None
    for step, ranks, values in play(channel, rows, start=start, stop=stop):
        if first is not None:
            now = multipliers_of(setup, channel, channel.uses - 1)
            growth = {name: now[name] / value for name, value in first.items()}
        for name, value in values.items():
            kept[name].append(value / growth[name])
            if adaptive is None:
                continue
            (count,) = [float(v) for at, key, v in noted if (at, key) == (step, f"{name}/count")]
            m, answered = expected_cohort(setup.sampler), len(rows(step, name, ranks)[0])
            kept[f"{name}/count"].append(np.array([(count * m - answered / 2) / count_std(adaptive, setup.sampler)]))
            growth[name] *= math.exp(-adaptive.lr * (count + 0.5 - adaptive.quantile))
    sizes = {plan.name: plan.size for plan in setup.plans}
    return {name: np.stack(found) if found else np.zeros((0, sizes.get(name, 1))) for name, found in kept.items()}
