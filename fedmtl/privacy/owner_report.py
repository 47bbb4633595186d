"""What may be said of a run whose owners act one at a time."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from .report import OUTSIDE, RECORDS_OUTSIDE, SECURE_OUTSIDE, PrivacyReport

if TYPE_CHECKING:
    from .owner_channel import OwnerChannel


@dataclass(frozen=True)
class PublishedClaim:
    """A published accounting that does not hold: the report prints its figure beside an infinite epsilon.

    Attributes:
        claim: from an owner's noise multiplier to the epsilon that is claimed of one answer.
        refuted: why it does not hold, in words.
    """

    claim: Callable[[float], float]
    refuted: str


def owner_report(channel: OwnerChannel) -> PrivacyReport:
    """The report of a channel, as it stands; of repetitions, the worst of them."""
    privacy, account, published = channel.privacy, channel.account, channel.published
    terms, multipliers = account.terms, channel.noise_multipliers
    made = account.firsts
    found = account.epsilons_by_repetition(spent=True) if published is None else None
    by_owner = None if found is None else found.max(0)
    budgets = {budget for one in channel.settings for budget in one.budgets(channel.ids) if budget is not None}
    secure = channel.source == "secure"
    return PrivacyReport(
        private=privacy is not None,
        unit="record",
        relation="replace",
        observer="none" if privacy is None else "server, other clients and public",
        epsilon=channel.epsilon if by_owner is None else float(by_owner.max()),
        delta=None if terms is None else terms.delta,
        claimed=None if published is None or multipliers is None else max(map(published.claim, multipliers.ravel())),
        refuted=None if published is None else published.refuted,
        by_owner=None
        if by_owner is None
        else (float(by_owner.min()), float(np.median(by_owner)), float(by_owner.max())),
        budget=max(budgets, default=None),
        clip_norm=None if privacy is None else privacy.clip_norm,
        noise_multiplier=None if multipliers is None else float(multipliers.max()),
        noise_std=None,
        clipping=f"{'L1' if channel.norm == 'l1' else 'L2'} norm of the gradient of one record",
        mechanism=_mechanism(channel),
        sampler=f"{channel.schedule}; every answer is charged to the owner that gives it{_extra(channel)}",
        records=_records(channel),
        names=("first", "gradient") if channel.first is not None else ("gradient",),
        releases=int(account.spent.max(0).sum()) + made,
        accountant=privacy.accountant if privacy is not None and terms is not None else "none",
        source=channel.source,
        numerics="float64 on a public power-of-two grid" if secure else "float64",
        guarantee="none" if terms is None else "sound" if published is None else "paper",
        ledger=channel.ledger_name,
        forfeited=account.forfeited,
        outside=()
        if privacy is None
        else OUTSIDE + (SECURE_OUTSIDE if secure else ()) + RECORDS_OUTSIDE + channel.notes,
    )


def _mechanism(channel: OwnerChannel) -> str:
    """The law of the noise, with the range of the multipliers of owners that may answer."""
    if channel.privacy is None:
        return "none"
    able = (channel.caps > 0) & (channel.participation.counts > 0)
    z = None if channel.noise_multipliers is None else np.atleast_2d(channel.noise_multipliers)[:, able]
    if z is None or not z.size or z.min() == z.max():
        return channel.privacy.mechanism
    return f"{channel.privacy.mechanism} of multipliers {z.min():.5g} to {z.max():.5g} by owner"


def _extra(channel: OwnerChannel) -> str:
    """What else is charged, and how the budget is divided."""
    text = ""
    if channel.first is not None:
        text += f", and a first release to every owner with data, with {channel.first.share:g} of its weights"
    if channel.account.terms is not None and channel.account.terms.weighted:
        text += "; answers have public weights, and noise in inverse proportion"
    return text


def _records(channel: OwnerChannel) -> str:
    """Which records take part in an answer."""
    taking = channel.participation
    there = "records of an owner that are there" if taking.arriving else "records of an owner"
    if not taking.sampled:
        return f"all {there} in every answer"
    low, high = float(taking.rates.min()), float(taking.rates.max())
    q = f"q = {low:.4g}" if low == high else f"q = {low:.4g} to {high:.4g} by owner"
    return f"Poisson over the {there}, {q}: drawn anew for every answer and secret"
