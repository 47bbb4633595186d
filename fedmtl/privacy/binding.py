"""Binding: the releases of an algorithm with the clip and the noise of the settings, and the
privacy cost of a step."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from ..errors import ConfigError, PrivacyError
from .clip import Clip
from .cost import PrivacyCost
from .noise.banded import Bands
from .noise.laws import LAWS
from .quantile import QuantileClip, split_multiplier
from .release import Release, ReleasePlan
from .samplers import BoundSampler
from .settings import ClientPrivacy


def step_cost(
    plans: tuple[ReleasePlan, ...],
    sampler: BoundSampler,
    privacy: ClientPrivacy,
    *,
    delta: float,
    max_steps: int | None = None,
    bands: Bands | None = None,
) -> PrivacyCost:
    """Returns the privacy cost of the steps, each with all its releases.

    Args:
        plans: at least one.
        sampler: the law of the cohorts.
        privacy: settings with noise.
        delta: of every epsilon.
        max_steps: the largest number of steps; None without a limit.
        bands: the correlation of the noise over rounds, or None.

    Raises:
        ConfigError: an allocation beside a clip norm that follows a quantile.
        PrivacyError: releases with different allocations, or a combination no accountant supports,
            named.
    """
    allocation = plans[0].allocation
    for plan in plans:
        if plan.allocation != allocation:
            raise PrivacyError(
                f"Releases {plans[0].name!r} and {plan.name!r} have different allocations; those "
                "of one step share its budget, so ReleasePlan.allocation is the same for all."
            )
        # Wishart-like noise has no meaning on a vector.
        if LAWS[privacy.mechanism].matrices and plan.form != "symmetric":
            raise PrivacyError(
                f"Release {plan.name!r}: mechanism={privacy.mechanism!r} is noise on symmetric "
                "matrices only."
            )
    if allocation is not None and isinstance(privacy.clip_norm, QuantileClip):
        raise ConfigError(
            "An allocation of the budget needs a fixed clip norm; "
            "ClientPrivacy.clip_norm is a number."
        )
    cost = PrivacyCost(
        law=privacy.mechanism,
        sizes=tuple(plan.size for plan in plans),
        delta=delta,
        weights=allocation,
        max_uses=max_steps,
    )
    if sampler.amplified:
        cost = replace(cost, sampled=sampler.probability)
    if bands is not None:
        cost = replace(cost, bands=len(bands))
    return cost


def bind_releases(
    plans: tuple[ReleasePlan, ...],
    sampler: BoundSampler,
    privacy: ClientPrivacy | None,
    multiplier: float = 0.0,
    bands: Bands | None = None,
) -> dict[str, Release]:
    """Returns the typed releases of an algorithm, by name: without ``privacy`` with neither clip
    nor noise; with a :class:`QuantileClip`, with the part of the noise budget that the count
    leaves."""
    options: dict[str, Any] = {}
    releases = {}
    for plan in plans:
        if privacy is not None:
            law = LAWS[privacy.mechanism]
            z = multiplier
            if multiplier and isinstance(privacy.clip_norm, QuantileClip):
                relation = plan.relation_of_rows(sampler.relation)
                # The count takes part of the noise budget of its step, and the rows get the rest.
                z = split_multiplier(
                    multiplier, privacy.clip_norm.count_multiplier(sampler.denominator, relation)
                )
            options = {"noise": None, "bands": bands, "clip": Clip(privacy.initial_norm)}
            if z:
                options["noise"] = law(z)
            if plan.form == "vector":
                options["clip"] = Clip(privacy.initial_norm, law.norm)
        releases[plan.name] = Release(**vars(plan), sampling=sampler, **options)
    return releases
