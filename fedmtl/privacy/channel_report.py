"""The privacy report of a run, and its signal-to-noise ratio: both from public facts alone."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace

import numpy as np

from .activation_channel import ActivationChannel
from .channel import Channel
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
from .round_channel import RoundChannel
from .settings import RecordPrivacy


def privacy_report(channel: RoundChannel | ActivationChannel) -> PrivacyReport:
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
    if isinstance(channel, ActivationChannel):
        report = _of_records(channel, channel.records, _clocks_text(channel))
        return replace(report, mechanism=report.mechanism + _range_by_client(channel))
    if channel.records is None:
        return _of_rows(channel)
    if channel.records.in_secure_sum:
        return _of_clipped_records(_of_rows(channel), channel.records)
    return _of_records(channel, channel.records, _rounds_text(channel))


def signal_to_noise(channel: RoundChannel | ActivationChannel) -> SignalToNoise | None:
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
    if channel.costs is None or isinstance(channel, ActivationChannel):
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


def _of_any(
    channel: RoundChannel | ActivationChannel,
    *,
    unit: str,
    relation: str,
    names: tuple[str, ...],
    releases: int,
    sampler: str,
) -> PrivacyReport:
    """Returns a report with the fields that every run has in common, and these arguments."""
    account = channel.accountant
    epsilon = 0.0
    if channel.releases_anything:
        epsilon = float(account.epsilons(spent=True).max())
    report = PrivacyReport(
        unit=unit,
        relation=relation,
        observer="none",
        epsilon=epsilon,
        delta=account.delta,
        claimed=_claimed(channel),
        budget=None,
        clip_norm=None,
        noise_multiplier=channel.noise_multiplier,
        noise_std=None,
        clipping="none",
        mechanism=channel.law or "none",
        sampler=sampler,
        names=names,
        releases=releases,
        accountant="none",
        source=channel.source.name,
        numerics=_numerics(channel),
        ledger=channel.ledger_name,
        remaining_charged=account.remaining_charged,
        outside=(),
    )
    if channel.costs is not None:
        report = replace(report, refuted=channel.costs.refuted, accountant="pld")
    if channel.privacy is None:
        return report
    return replace(
        report,
        observer=channel.privacy.observer,
        clip_norm=channel.bound,
        clipping=f"{_law(channel).norm.upper()} norm",
        outside=_outside(channel) + channel.notes,
    )


def _outside(channel: Channel) -> tuple[str, ...]:
    """Returns the parts that no epsilon covers, of a run with privacy."""
    outside: tuple[str, ...] = OUTSIDE
    if channel.source.name == "secure":
        numerics = ROUNDED_OUTSIDE
        if _law(channel).joint:
            numerics = EXACT_OUTSIDE
        outside = (*outside, *numerics, *SECURE_OUTSIDE)
    if _shared(channel):
        outside = (*outside, *SHARED_OUTSIDE)
    return outside


def _shared(channel: Channel) -> bool:
    """Returns True if clients add the noise, as shares in a secure sum."""
    return channel.privacy is not None and channel.privacy.aggregation is not None


def _law(channel: Channel) -> type[NoiseLaw]:
    """Returns the law of the noise; Gaussian if there is none."""
    return LAWS[channel.law or "gaussian"]


def _numerics(channel: Channel) -> str:
    """Returns the arithmetic in which values are released."""
    if _shared(channel) and channel.noised:
        return SHARED
    if channel.source.name != "secure":
        return "float64"
    if _law(channel).joint and channel.noised:
        return EXACT
    return ON_GRID


def _claimed(channel: RoundChannel | ActivationChannel) -> float | None:
    """Returns the figure of a published accounting that does not hold; None if none is used."""
    costs = channel.costs
    if costs is not None and isinstance(channel, ActivationChannel):
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


def _of_rows(channel: RoundChannel) -> PrivacyReport:
    """Returns the report of a run that releases sums over rows."""
    account = channel.accountant
    releases = tuple(channel.releases.values())
    charged = account.steps_charged
    if not account.by_client:
        charged = int(account.spent.max())
    against_server = "; ".join(
        [noise.text(int(account.spent.max())) for noise in channel.row_noise.values()]
        + [release.shares.text() for release in releases if release.shares is not None]
    )
    unit = "client"
    if any(release.unit == "record" for release in releases):
        unit = "record"
    relation = "none"
    if channel.privacy is not None:
        relation = channel.sampler.relation
    report = _of_any(
        channel,
        unit=unit,
        relation=relation,
        names=tuple(channel.releases),
        releases=charged * len(releases),
        sampler=_rounds_text(channel),
    )
    report = replace(report, server=against_server or None)
    privacy = channel.privacy
    if privacy is None:
        return report
    assert not isinstance(privacy.epsilon, Mapping)  # clients have budgets of their own elsewhere
    clipping = report.clipping
    adaptive = _adaptive(channel)
    if adaptive is not None:
        clipping += (
            f"; from {adaptive.initial:g} on towards the quantile {adaptive.quantile:g}, "
            "within the budget"
        )
    report = replace(
        report,
        budget=privacy.epsilon,
        clipping=clipping,
        mechanism=privacy.mechanism + _range_of_multipliers(channel),
    )
    if releases:
        report = replace(report, clip_norm=max(release.bound for release in releases))
    if channel.noised:
        report = replace(report, noise_std=max(release.noise_std for release in releases))
    return report


def _range_of_multipliers(channel: RoundChannel) -> str:
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


def _adaptive(channel: RoundChannel) -> QuantileClip | None:
    if channel.privacy is not None and isinstance(channel.privacy.clip_norm, QuantileClip):
        return channel.privacy.clip_norm
    return None


def _rounds_text(channel: RoundChannel) -> str:
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


def _of_records(
    channel: RoundChannel | ActivationChannel, records: Records, sampler: str
) -> PrivacyReport:
    """Returns the report of a run that releases gradients of single records.

    Args:
        channel: of the run.
        records: the releases.
        sampler: the participants and their charges, in words.
    """
    account = channel.accountant
    plan = records.plan
    report = _of_any(
        channel,
        unit="record",
        relation=plan.relation,
        names=(GRADIENT,),
        releases=int((account.spent.max(0) * plan.local_steps).sum()),
        sampler=sampler,
    )
    budget = _largest_budget(channel, plan)
    report = replace(report, records=plan.describe(), budget=budget)
    if channel.privacy is not None:
        report = _of_clipped_records(report, records)
    if channel.costs is not None and channel.costs.refuted is None:
        worst = account.epsilons(spent=True).max(0)
        by_client = float(worst.min()), float(np.median(worst)), float(worst.max())
        report = replace(report, by_client=by_client)
    return report


def _of_clipped_records(report: PrivacyReport, records: Records) -> PrivacyReport:
    """Returns a report of a run with privacy, with the records that take part and their clip."""
    clipping = f"{records.norm.upper()} norm of the gradient of one record"
    if records.clip is not None and records.clip.stability is not None:
        clipping += AUTOMATIC
    return replace(
        report,
        records=records.plan.describe(),
        clipping=clipping,
        outside=report.outside + RECORDS_OUTSIDE,
    )


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


def _clocks_text(channel: ActivationChannel) -> str:
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


def _range_by_client(channel: ActivationChannel) -> str:
    """Returns the range of multipliers of the clients that act, in words."""
    if channel.costs is None:
        return ""
    acting = (channel.caps > 0) & (channel.records.plan.counts > 0)
    each = channel.costs.by_account[:, acting]
    if not each.size or each.min() == each.max():
        return ""
    return f" of multipliers {each.min():.5g} to {each.max():.5g} by client"
