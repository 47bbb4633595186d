"""What is released, typed: the unit, the relation, the observer, the clip, the noise and the sampling.

Sensitivity is computed from these and never typed in, and the accounting event comes from the sampler that
draws the cohort, so the noise, the sampling and the accountant cannot disagree.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

from .._check import positive, positive_int
from ..errors import ConfigError, PrivacyError
from .clip import L2Clip
from .mechanisms import GaussianNoise
from .samplers import BoundSampler, Relation, SamplingLaw
from .settings import Accountant, ClientPrivacy, Observer

Unit = Literal["client", "record"]


@dataclass(frozen=True, kw_only=True)
class ReleasePlan:
    """What an algorithm says about one of its releases, before anything runs.

    Args:
        name: key of the release, unique within an algorithm, such as ``"update"``.
        dimension: length D of the released vector.
        uses: number of steps in which it is released.
        unit: what is protected.
        stateful: whether clients keep private state between steps that later releases depend on.

    Raises:
        ConfigError: an empty name, or a dimension or number of uses below 1.
    """

    name: str
    dimension: int
    uses: int
    unit: Unit = "client"
    stateful: bool

    def __post_init__(self) -> None:
        if not self.name:
            raise ConfigError("ReleasePlan.name is empty; it must name the release.")
        positive_int(self, dimension=self.dimension, uses=self.uses)


@dataclass(frozen=True, kw_only=True)
class Release:
    """One release of a noised, clipped sum over a cohort, divided by a public constant.

    Attributes:
        name, dimension: from the plan.
        unit: what is protected.
        relation: how neighbouring populations differ: one client added or removed, or replaced.
        observer: who sees the release.
        clip: bound on one client's contribution.
        noise: law of the noise, or None for clipping only.
        sampling: who takes part.
        law: what the sampler guarantees against this observer.
        weight_bound: public bound w_max on the weight of one client in the sum; 1 for uniform weights.
    """

    name: str
    dimension: int
    unit: Unit
    observer: Observer
    clip: L2Clip
    noise: GaussianNoise | None
    sampling: BoundSampler
    law: SamplingLaw
    weight_bound: float = 1.0

    def __post_init__(self) -> None:
        positive(self, weight_bound=self.weight_bound)
        if self.unit != "client":
            raise PrivacyError(
                f"Release {self.name!r}: unit={self.unit!r} with {type(self.sampling).__name__} is not "
                f"supported; this sampler draws clients."
            )
        if self.noise is not None and self.noise.norm != self.clip.norm:
            raise PrivacyError(
                f"Release {self.name!r}: {type(self.noise).__name__} needs a bound on the {self.noise.norm} "
                f"norm, but {type(self.clip).__name__} bounds the {self.clip.norm} norm."
            )

    @property
    def relation(self) -> Relation:
        """How neighbouring populations differ."""
        return self.law.relation

    @property
    def sensitivity(self) -> float:
        """S: the most the sum moves between neighbours: w_max C for add/remove, 2 w_max C for replace-one."""
        return self.weight_bound * self.clip.bound * (2.0 if self.relation == "replace" else 1.0)

    @property
    def denominator(self) -> float:
        """m: the public constant that divides the sum."""
        return self.sampling.denominator

    @property
    def noise_std(self) -> float:
        """Standard deviation of one coordinate of the released mean; 0 without noise."""
        return 0.0 if self.noise is None else self.noise.std(self.sensitivity) / self.denominator


@dataclass(frozen=True)
class StepEvent:
    """The accounting event of one step, and the accountant that supports it."""

    event: Any
    accountant: Accountant


def step_law(plans: tuple[ReleasePlan, ...], sampler: BoundSampler, privacy: ClientPrivacy) -> SamplingLaw:
    """What the sampler guarantees to the releases of one step together.

    Raises:
        PrivacyError: a combination no accountant supports, named.
    """
    law = sampler.law(stateful=any(plan.stateful for plan in plans), observer=privacy.observer)
    cap = getattr(sampler, "max_uses", None)
    if law.amplified and cap is not None:
        raise PrivacyError(
            "FixedCohort(max_uses=...) with stateless clients and observer='public' is not supported: a cap "
            "on uses changes the law of the cohort, and sampling without replacement no longer amplifies. "
            "Leave max_uses out, or use observer='clients'."
        )
    if privacy.guarantee == "paper" and law.per_participation:
        raise PrivacyError(
            "guarantee='paper' with FixedCohort is not supported for stateful clients or observer='clients': "
            "the published figure counts on a secret cohort. Use guarantee='sound', or PoissonSampling."
        )
    return law


def step_event(
    noise_multipliers: tuple[float, ...], sampler: BoundSampler, law: SamplingLaw, accountant: Accountant
) -> StepEvent:
    """The event of one step with one Gaussian release per multiplier, all under the same cohort.

    Releases of one step share the coin of each client, so they are one Gaussian release of the concatenated
    vector with multiplier ``sum(z ** -2) ** -0.5``, sampled once; composing them as independently sampled
    would understate epsilon.
    """
    joint = GaussianNoise(sum(z**-2.0 for z in noise_multipliers) ** -0.5)
    event = sampler.event(joint.event(), amplified=law.amplified)
    without_replacement = law.amplified and law.relation == "replace"
    return StepEvent(event, "rdp" if without_replacement else accountant)


def bind_releases(
    plans: tuple[ReleasePlan, ...],
    sampler: BoundSampler,
    law: SamplingLaw,
    privacy: ClientPrivacy,
    noise: GaussianNoise | None,
) -> dict[str, Release]:
    """The typed releases of an algorithm, by name."""
    return {
        plan.name: Release(
            name=plan.name,
            dimension=plan.dimension,
            unit=plan.unit,
            observer=privacy.observer,
            clip=L2Clip(privacy.clip_norm),
            noise=noise,
            sampling=sampler,
            law=law,
        )
        for plan in plans
    }
