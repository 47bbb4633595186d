"""The privacy report of a run, and its signal-to-noise ratio: both from public facts alone."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from .activations import Activations
from .channel import Channel
from .costs import PrivacyCosts
from .gradients import GradientPlan
from .noise.laws import LAWS, NoiseLaw
from .quantile import QuantileClip
from .records import GRADIENT, Records
from .report import (
    AUTOMATIC,
    EXACT,
    EXACT_OUTSIDE,
    ON_GRID,
    OUTSIDE,
    RECORDS_OUTSIDE,
    ROUNDED_OUTSIDE,
    SECURE_OUTSIDE,
    SHARED,
    SHARED_OUTSIDE,
    PrivacyReport,
    SignalToNoise,
)
from .rounds import Rounds
from .settings import RecordPrivacy


def privacy_report(channel: Rounds | Activations) -> PrivacyReport:
    """Returns the privacy report of a run so far, and of the whole run once its channel is closed.

    Args:
        channel: of the run. If it has replicates, the worst one is reported.

    Example:
        >>> from fedmtl import ClientPrivacy, FullParticipation
        >>> from fedmtl.privacy import ReleasePlan, open_channel, privacy_report
        >>> privacy = ClientPrivacy(clip_norm=1.0, epsilon=8.0, delta=1e-5)
        >>> plan = ReleasePlan(name="update", dimension=3)
        >>> channel = open_channel(privacy, [plan], FullParticipation().bind(10), seed=0, steps=2)
        >>> report = privacy_report(channel)
        >>> report.unit, report.epsilon, report.budget  # nothing has been released yet
        ('client', 0.0, 8.0)
    """
    facts = _common_facts(channel)
    if isinstance(channel, Activations):
        facts |= _record_facts(channel, channel.records)
        facts["sampler"] = _clocks_text(channel)
        facts["mechanism"] += _range_by_client(channel)
    elif channel.records is not None and not channel.records.in_secure_sum:
        facts |= _record_facts(channel, channel.records)
        facts["sampler"] = _rounds_text(channel)
    else:
        facts |= _row_facts(channel)
        if channel.records is not None:
            facts |= _clip_facts(channel, channel.records)
    return PrivacyReport(**facts)


def signal_to_noise(channel: Rounds | Activations) -> SignalToNoise | None:
    """Returns the signal-to-noise ratio of a run, from public quantities only.

    It is that of the loudest release of rows; under record-level privacy that of the mean gradient
    of a client, with the median of the clients' noise, or of all drawn records in a secure sum.

    Args:
        channel: of the run.

    Returns:
        None without noise, and for clients that act one at a time, whose noise has no single scale.

    Example:
        >>> from fedmtl import ClientPrivacy, FullParticipation
        >>> from fedmtl.privacy import ReleasePlan, open_channel, signal_to_noise
        >>> privacy = ClientPrivacy(clip_norm=1.0, epsilon=8.0, delta=1e-5)
        >>> plan = ReleasePlan(name="update", dimension=3)
        >>> channel = open_channel(privacy, [plan], FullParticipation().bind(10), seed=0, steps=2)
        >>> signal_to_noise(channel).clip_norm
        1.0
    """
    if channel.costs is None or isinstance(channel, Activations):
        return None
    records = channel.records
    if records is not None and records.in_secure_sum:
        (release,) = channel.releases.values()
        # of the mean gradient of all records that are drawn
        factor = release.denominator / (float(records.plan.rates[0]) * records.plan.records)
        norm = release.noise_std * factor * math.sqrt(release.size)
        return SignalToNoise(norm, channel.bound, kind="gradient")
    if channel.records is not None:
        size = channel.records.plan.dimension
        std = np.median(channel.costs.by_account[0] / channel.records.plan.expected)
        norm = float(std) * channel.records.law.std(channel.bound, size) * math.sqrt(size)
        return SignalToNoise(norm, channel.bound, kind="gradient")
    loudest = max(
        channel.releases.values(),
        key=lambda release: (
            release.noise_std * math.sqrt(release.model_size) / release.contribution_bound
        ),
    )
    return SignalToNoise(
        loudest.noise_std * math.sqrt(loudest.model_size),
        loudest.contribution_bound,
        # An adaptive clip norm is known in advance for the first round alone.
        first=_adaptive(channel) is not None,
    )


def _common_facts(channel: Rounds | Activations) -> dict[str, Any]:
    """Returns the fields of the report that every run has."""
    account = channel.accountant
    epsilon = 0.0
    if channel.releases_anything:
        epsilon = float(account.epsilons(spent=True).max())
    return {
        "epsilon": epsilon,
        "delta": account.delta,
        "claimed": _claimed(channel),
        "budget": None,
        "noise_multiplier": channel.noise_multiplier,
        "noise_std": None,
        "mechanism": channel.mechanism or "none",
        "source": channel.source.name,
        "numerics": _numerics(channel),
        "ledger": channel.ledger_name,
        "remaining_charged": account.remaining_charged,
        **_clipping_facts(channel),
        **_accounting_facts(channel.costs),
    }


def _clipping_facts(channel: Channel) -> dict[str, Any]:
    """Returns the observer that data are protected from, the clip, and the parts outside of
    epsilon."""
    if channel.privacy is None:
        return {"observer": "none", "clip_norm": None, "clipping": "none", "outside": ()}
    law = _law(channel)
    outside: tuple[str, ...] = OUTSIDE
    if channel.source.name == "secure":
        numerics = ROUNDED_OUTSIDE
        if law.joint:
            numerics = EXACT_OUTSIDE
        outside = (*outside, *numerics, *SECURE_OUTSIDE)
    if _shared(channel):
        outside = (*outside, *SHARED_OUTSIDE)
    return {
        "observer": channel.privacy.observer,
        "clip_norm": channel.bound,
        "clipping": f"{law.norm.upper()} norm",
        "outside": outside + channel.notes,
    }


def _accounting_facts(costs: PrivacyCosts | None) -> dict[str, Any]:
    if costs is None:
        return {"refuted": None, "accountant": "none"}
    return {"refuted": costs.refuted, "accountant": "pld"}


def _shared(channel: Channel) -> bool:
    """Returns True if clients add the noise, as shares in a secure sum."""
    return channel.privacy is not None and channel.privacy.aggregation is not None


def _law(channel: Channel) -> type[NoiseLaw]:
    """Returns the law of the noise; Gaussian if there is none."""
    return LAWS[channel.mechanism or "gaussian"]


def _numerics(channel: Channel) -> str:
    """Returns the arithmetic in which values are released."""
    if _shared(channel) and channel.noised:
        return SHARED
    if channel.source.name != "secure":
        return "float64"
    if _law(channel).joint and channel.noised:
        return EXACT
    return ON_GRID


def _claimed(channel: Rounds | Activations) -> float | None:
    """Returns the figure of a published accounting that does not hold; None if none is used."""
    costs = channel.costs
    if costs is not None and isinstance(channel, Activations):
        published = channel.records.plan.published
        if published is not None:
            return max(map(published.claim, costs.by_account.ravel()))
    if costs is None or costs.refuted is None:
        return None
    account = channel.accountant
    if account.by_client:
        return account.claimed_at(account.spent[0])
    return account.claimed_at(int(account.spent.max()))


# Rows of clients


def _row_facts(channel: Rounds) -> dict[str, Any]:
    """Returns the fields of a run that releases sums over rows."""
    account = channel.accountant
    releases = tuple(channel.releases.values())
    charged = account.steps_charged
    if not account.by_client:
        charged = int(account.spent.max())
    against_server = "; ".join(
        [noise.text(int(account.spent.max())) for noise in channel.rows.values()]
        + [release.shares.text() for release in releases if release.shares is not None]
    )
    unit = "client"
    if any(release.unit == "record" for release in releases):
        unit = "record"
    facts: dict[str, Any] = {
        "unit": unit,
        "relation": "none",
        "names": tuple(channel.releases),
        "releases": charged * len(releases),
        "sampler": _rounds_text(channel),
        "server": against_server or None,
    }
    privacy = channel.privacy
    if privacy is None:
        return facts
    facts["relation"] = channel.sampler.relation
    facts["budget"] = privacy.epsilon
    facts["clipping"] = _clipping_facts(channel)["clipping"] + _adaptive_text(channel)
    facts["mechanism"] = privacy.mechanism + _range_of_multipliers(channel)
    if releases:
        facts["clip_norm"] = max(release.bound for release in releases)
    if channel.noised:
        facts["noise_std"] = max(release.noise_std for release in releases)
    return facts


def _range_of_multipliers(channel: Rounds) -> str:
    """Returns the correlation of the noise over rounds, and the range of multipliers of replicates
    with budgets of their own, in words."""
    text = ""
    if channel.bands is not None:
        text += f", correlated over {len(channel.bands)} rounds"
    if channel.costs is not None:
        each = channel.costs.by_account[:, 0]
        if each.min() < each.max():
            text += f" of multipliers {each.min():.5g} to {each.max():.5g} by budget"
    return text


def _adaptive(channel: Rounds) -> QuantileClip | None:
    if channel.privacy is not None and isinstance(channel.privacy.clip_norm, QuantileClip):
        return channel.privacy.clip_norm
    return None


def _adaptive_text(channel: Rounds) -> str:
    adaptive = _adaptive(channel)
    if adaptive is None:
        return ""
    return (
        f"; from {adaptive.initial:g} on towards the quantile {adaptive.quantile:g}, "
        "within the budget"
    )


def _rounds_text(channel: Rounds) -> str:
    """Returns the participants of rounds, their charges and the shares of the budget, in words."""
    text = channel.sampler.describe()
    if not channel.noised:
        return text
    if channel.accountant.by_client:
        text += "; not amplified, a client is charged for each participation"
    weights = [weight for plan in channel.plans for weight in plan.allocation or ()]
    if weights:
        text += (
            f"; steps have public weights {min(weights):.3g} to {max(weights):.3g}, and noise in "
            "inverse proportion"
        )
    if channel.bands is not None:
        text += (
            f"; {channel.sampler.separation} rounds from one to the next at least, which "
            "correlated noise needs"
        )
    return text


# Gradients of single records


def _record_facts(channel: Channel, records: Records) -> dict[str, Any]:
    """Returns the fields of a run whose unit is a record."""
    account = channel.accountant
    plan = records.plan
    facts: dict[str, Any] = {
        "unit": "record",
        "relation": plan.relation,
        "names": (GRADIENT,),
        "releases": int((account.spent.max(0) * plan.local_steps).sum()),
        "records": plan.describe(),
        "budget": _largest_budget(channel, plan),
    }
    if channel.privacy is not None:
        facts |= _clip_facts(channel, records)
    if channel.costs is not None and channel.costs.refuted is None:
        worst = account.epsilons(spent=True).max(0)
        facts["by_client"] = float(worst.min()), float(np.median(worst)), float(worst.max())
    return facts


def _clip_facts(channel: Channel, records: Records) -> dict[str, Any]:
    """Returns the records that take part, their clip, and the parts outside of epsilon, of a run
    with privacy whose unit is a record."""
    clipping = f"{records.norm.upper()} norm of the gradient of one record"
    if records.clip is not None and records.clip.stability is not None:
        clipping += AUTOMATIC
    return {
        "records": records.plan.describe(),
        "clipping": clipping,
        "outside": _clipping_facts(channel)["outside"] + RECORDS_OUTSIDE,
    }


def _largest_budget(channel: Channel, plan: GradientPlan) -> float | None:
    """Returns the largest budget of a client in any replicate; None if none has one."""
    budgets = [
        budget
        for settings in channel.settings
        if isinstance(settings, RecordPrivacy)
        for budget in settings.budgets(plan.ids)
        if budget is not None
    ]
    return max(budgets, default=None)


def _clocks_text(channel: Activations) -> str:
    """Returns the order of activations and their charges, in words."""
    text = f"{channel.schedule}; every activation is charged to the client that acts"
    if channel.records.plan.at_cap == "silent":
        low = int(channel.caps.min())
        high = int(channel.caps.max())
        most = f"{low} to {high}"
        if low == high:
            most = f"{high}"
        text += (
            f", and at most {most} of one client release something: later ones read no "
            "record and cost nothing"
        )
    costs = channel.costs
    if costs is not None and any(cost.weights is not None for cost in costs.kinds):
        text += "; activations have public weights, and noise in inverse proportion"
    return text


def _range_by_client(channel: Activations) -> str:
    """Returns the range of multipliers of the clients that act, in words."""
    if channel.costs is None:
        return ""
    acting = (channel.caps > 0) & (channel.records.plan.counts > 0)
    each = channel.costs.by_account[:, acting]
    if not each.size or each.min() == each.max():
        return ""
    return f" of multipliers {each.min():.5g} to {each.max():.5g} by client"
