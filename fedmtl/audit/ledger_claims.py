"""The claims that the header of a ledger states: settings, schedule, releases and their cost."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields
from typing import Any

import numpy as np

from ..privacy.account_costs import AccountCosts
from ..privacy.aggregation import SecureAggregation
from ..privacy.cost import PrivacyCost
from ..privacy.gradients import GradientPlan
from ..privacy.noise.banded import Bands
from ..privacy.quantile import QuantileClip
from ..privacy.release import ReleasePlan
from ..privacy.samplers import BoundCyclic, BoundEverybody, BoundFixed, BoundFull, BoundPoisson
from ..privacy.settings import ClientPrivacy, Privacy, RecordPrivacy
from ..privacy.single_client import BoundSingleClient
from ..schedules import BoundBuffered
from .claim import Claim
from .release_claims import ReleaseClaims
from .setup import Setup

_SAMPLERS = {
    sampler.__name__: sampler
    for sampler in (
        BoundPoisson,
        BoundFixed,
        BoundCyclic,
        BoundFull,
        BoundEverybody,
        BoundSingleClient,
        BoundBuffered,
    )
}


def claimed(header: Mapping[str, Any]) -> tuple[Setup, ReleaseClaims]:
    """Returns the settings, the schedule and the releases in the header of a ledger, and the claims
    about these by the cost in it."""
    settings = dict(header["privacy"])
    facts = header["schedule"]
    kind = header["kinds"][0]
    cost = PrivacyCost.from_dict(kind["cost"])
    if isinstance(settings["clip_norm"], dict):
        settings["clip_norm"] = QuantileClip(**settings["clip_norm"])
    if settings.get("aggregation") is not None:
        settings["aggregation"] = SecureAggregation(**settings["aggregation"])
    # from a list of classes, so that a file names no other
    sampler = _SAMPLERS[facts["class"]]
    plans = tuple(
        ReleasePlan(
            name=name,
            form=form,
            dimension=dimension,
            allocation=cost.weights,
            without_data=name in header.get("without_data", ()),
        )
        for name, form, dimension in header["releases"]
    )
    privacy: Privacy
    gradients: tuple[GradientPlan, ...] = ()
    if "records" in header:
        privacy = RecordPrivacy(**settings)
        # of all clients together: a secure sum has one account for the records of all
        records = {"counts": np.array([header["units"]]), "rate": header["rate"]}
        gradients = (GradientPlan(ids=("all",), dimension=plans[0].dimension, **records),)
    else:
        privacy = ClientPrivacy(**settings)
    setup = Setup(
        privacy=privacy,
        plans=(*plans, *gradients),
        schedule=sampler(**{setting.name: facts.get(setting.name) for setting in fields(sampler)}),
        # no step is made: the claims on one are all that is read
        steps=1,
    )
    costs = AccountCosts((cost,), (kind["multiplier"],), np.zeros((1, 1), dtype=np.int64))
    return setup, ReleaseClaims(
        setup,
        costs,
        dict.fromkeys((plan.name for plan in plans), tuple(header.get("bands") or ())),
    )


def noise_std(claim: Claim) -> float:
    """Returns the root mean square of the noise of a coordinate; if the noise is correlated over
    rounds, the limit for many rounds."""
    return claim.std / claim.denominator * (Bands(claim.bands).gain if claim.bands else 1.0)
