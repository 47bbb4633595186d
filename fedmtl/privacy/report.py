"""What a run may say about its privacy, and how loud the noise is."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields, replace
from typing import TYPE_CHECKING, Any

import numpy as np

from .._rounding import grouped, rounded_up
from .noise.registry import LAWS
from .quantile import QuantileClip
from .settings import ClientPrivacy, Privacy, RecordPrivacy

if TYPE_CHECKING:
    from .channel import Channel
    from .gradients import GradientPlan
    from .ledger import Ledger
    from .samplers import SamplingLaw

SIMULATED = (
    "simulated: the seed is stored with the run, so these outputs are not private; "
    "epsilon is that of the same run with source=secure"
)
OUTSIDE = (
    "public inputs (model, starting point, hyper-parameters, number of clients)",
    "the choice of hyper-parameters, if they were tuned on these data",
    "metrics on private data printed while the run goes on (private/ folder)",
)
SECURE_OUTSIDE = (
    "a second copy of this run's folder that is resumed as well: each of them releases under the charges of both",
)
EXACT_OUTSIDE = ("how long the noise of a release took to draw, which depends on it",)
ROUNDED_OUTSIDE = (
    "the precision of the noise: it is computed in float64 and then rounded to the public grid, and what its law loses "
    "by that is not accounted for",
)
EXACT = "sums and noise in whole numbers of a public power of two, exact in law"
ON_GRID = "float64 on a public power-of-two grid"
RECORDS_OUTSIDE = ("the number of records of each client and who takes part when, which are public",)


@dataclass(frozen=True, kw_only=True)
class PrivacyReport:
    """Everything an epsilon depends on.

    Attributes:
        unit, relation, observer: what is protected, how neighbours differ, from whom.
        epsilon, delta: spent so far; epsilon is infinite without noise and 0 when nothing was released. Where every
            client has an account of its own, epsilon is the largest.
        claimed: the figure of a published accounting that does not hold; None elsewhere.
        refuted: why it does not hold (epsilon is then infinite), or None.
        by_client: smallest, median and largest epsilon of the clients' own accounts, or None.
        budget: the epsilon that ends the run (the largest of the clients' own), or None.
        clip_norm, noise_multiplier, noise_std: C; noise scale over sensitivity; standard deviation of
            one coordinate of a released mean. A range of multipliers is written as its largest.
        clipping: which norm is bounded, and how C adapts, in words.
        mechanism: the law of the noise.
        sampler: the cohort's law, in words.
        records: the law of the records drawn by a client, in words; None where the unit is a client.
        server: what clients' own noise on their rows guarantees against the server, in words, or None.
        releases: number of releases charged; ``names`` of the vectors.
        accountant, source, numerics: how the figure and the noise were computed.
        ledger: where the charges are kept.
        run: identity of the run, the hash of its ledger's first line; None where no file is kept.
        ledger_lines, ledger_head: number of lines of the ledger and hash of the last one, when the run ended.
        remaining_charged: whether the run stopped because of what it showed, and is charged as if it had gone on.
        elsewhere: who keeps the accounts, where this is the report of a server that keeps none; None elsewhere.
        outside: what the epsilon does not cover.
    """

    private: bool
    unit: str
    relation: str
    observer: str
    epsilon: float
    delta: float | None
    claimed: float | None = None
    refuted: str | None = None
    by_client: tuple[float, float, float] | None = None
    budget: float | None
    clip_norm: float | None
    noise_multiplier: float | None
    noise_std: float | None
    clipping: str = "L2 norm"
    mechanism: str = "gaussian"
    sampler: str
    records: str | None = None
    server: str | None = None
    names: tuple[str, ...]
    releases: int
    accountant: str
    source: str
    numerics: str
    ledger: str
    run: str | None = None
    ledger_lines: int | None = None
    ledger_head: str | None = None
    remaining_charged: bool = False
    elsewhere: str | None = None
    outside: tuple[str, ...]

    def to_dict(self) -> dict[str, Any]:
        """Return JSON-ready fields, the headline first; an infinite epsilon or budget is the string ``"inf"``."""
        values = {"headline": self.headline, **asdict(self)}
        del values["private"]  # the headline says it better
        if self.elsewhere is None:
            del values["elsewhere"]
        values = {key: list(value) if isinstance(value, tuple) else value for key, value in values.items()}
        return {key: "inf" if value == math.inf else value for key, value in values.items()}

    def with_ledger(self, ledger: Ledger | None) -> PrivacyReport:
        """Return this report with the identity of the run and the end of its ledger, as it is now."""
        if ledger is None or ledger.head is None:
            return self
        return replace(self, run=ledger.run, ledger_lines=ledger.head.lines, ledger_head=ledger.head.digest)

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> PrivacyReport:
        """Return the report that :meth:`to_dict` wrote, as a ``privacy.json`` has it; keys of further figures are left
        out.

        Raises:
            ValueError, TypeError: values that are no report.
        """
        kinds = {one.name: str(one.type) for one in fields(cls)}
        found = {name: value for name, value in values.items() if name in kinds}
        for name, value in found.items():
            if "float" in kinds[name] and "tuple" not in kinds[name] and value is not None:
                found[name] = float(value)
            elif isinstance(value, list):
                found[name] = tuple(value)
        return cls(private=values.get("clip_norm") is not None, **found)

    @property
    def trusted(self) -> str:
        """Return who must be trusted for the figure to hold, in words."""
        if not self.names:
            return "nobody: nothing leaves a client"
        if self.elsewhere is not None:
            return f"every node with its own noise and account: {self.elsewhere}"
        if not self.private or self.noise_multiplier is None or self.refuted is not None:
            return "everybody: no finite epsilon holds"
        if self.unit == "record":
            return "nobody: every client adds its noise before anything leaves it"
        beside = ", and the other clients, who are no observers here" if self.observer == "public" else ""
        if self.server is not None:
            return f"the server for this figure{beside}; against the server itself: {self.server}"
        return f"the server, which adds up what clients send before there is noise{beside}"

    @property
    def headline(self) -> str:
        """Return the first line of the printed block."""
        if not self.names:
            return "nothing is released: epsilon = 0"
        if not self.private:
            return "not private: epsilon = inf, no clip, no noise"
        if self.elsewhere is not None:
            return f"no account here: {self.elsewhere}"
        if self.noise_multiplier is None:
            return "not private: epsilon = inf, clip only, no noise"
        if self.refuted is not None:
            return "not private: epsilon = inf, the published accounting does not hold"
        if self.source == "seeded":
            return SIMULATED
        return f"private: epsilon = {rounded_up(self.epsilon)} at delta = {rounded_up(self.delta or 0.0, 3)}"

    @property
    def publication(self) -> str:
        """Return whether what was released may be published, in the words of every place that speaks of it."""
        if not self.names:
            return "nothing is released"
        if self.elsewhere is not None:
            return "protected by the noise of the nodes, as far as their own certificates say"
        if not self.private or self.noise_multiplier is None or self.refuted is not None:
            return "not private, to be kept like private/"
        if self.source == "seeded":
            return "a simulation, not private; to publish, run with privacy.source=secure"
        return f"may be published, at epsilon = {rounded_up(self.epsilon)}"

    def rows(self) -> list[tuple[str, str]]:
        """Return the lines of the printed block under its headline: what each is about, and its text. None without
        privacy."""
        if not self.private:
            return []
        at = "" if self.delta is None else f" at delta = {rounded_up(self.delta, 3)}"
        rows = [("epsilon", f"{rounded_up(self.epsilon)}{at}" if self.elsewhere is None else self.elsewhere)]
        if self.by_client is not None:
            low, middle, high = map(rounded_up, self.by_client)
            rows.append(("by client", f"smallest {low}, median {middle}, largest {high}"))
        if self.claimed is not None:
            rows.append(("claimed", f"{rounded_up(self.claimed)}{at}, by the published accounting"))
        if self.remaining_charged:
            rows.append(("stopped", "early, because of what was released: charged as all the planned rounds"))
        if self.refuted is not None:
            rows.append(("refuted", self.refuted))
        noise = "none" if self.noise_multiplier is None else f"{self.mechanism}, multiplier {self.noise_multiplier:.5g}"
        budget = "none" if self.budget is None else rounded_up(self.budget, 6)
        if self.elsewhere is not None:
            noise, budget = f"{self.mechanism}, of each node's own", "each node's own"
        return [
            *rows,
            ("budget", budget),
            ("protects", f"unit {self.unit}, relation {self.relation}, observer {self.observer}"),
            ("clients", grouped(self.sampler)),
            *([("records", grouped(self.records))] if self.records is not None else []),
            ("releases", f"{self.releases:,} ({', '.join(self.names) or 'nothing is released'})"),
            ("clip norm", f"{self.clip_norm:g} ({self.clipping})"),
            ("noise", noise),
            *([("server", self.server)] if self.server is not None else []),
            ("accountant", self.accountant),
            ("noise source", f"{self.source}, {self.numerics}"),
            ("ledger", self.ledger),
            ("outside", "; ".join(self.outside)),
        ]

    def text(self) -> str:
        """Return one printed block."""
        return "\n".join([self.headline, *(f"  {label:<13}{text}" for label, text in self.rows())])


def channel_report(channel: Channel) -> PrivacyReport:
    """Return the report of a channel, as it stands; of repetitions, the worst of them."""
    privacy, account, law = channel.privacy, channel.account, channel.law
    records = channel.gradients if isinstance(privacy, RecordPrivacy) or channel.sampler is None else None
    names = _names(channel, records)
    epsilons = account.epsilons(spent=True) if names else np.zeros((1, 1))
    by_client = None
    if records is not None and account.prices is not None and account.prices.refuted is None:
        worst = epsilons.max(0)
        by_client = float(worst.min()), float(np.median(worst)), float(worst.max())
    secure, exact = channel.source.name == "secure", LAWS[channel.mechanism or "gaussian"].joint
    stds = [release.noise_std for release in channel.releases.values()]
    relation = law.relation if law is not None else "none" if records is None else records.relation
    return PrivacyReport(
        private=privacy is not None,
        unit="record" if records is not None else "client",
        relation=relation,
        observer=_observer(privacy),
        epsilon=float(epsilons.max()),
        delta=account.delta,
        claimed=_claimed(channel),
        refuted=account.prices.refuted if account.prices is not None else None,
        by_client=by_client,
        budget=_budget(channel),
        clip_norm=_clip_norm(channel),
        noise_multiplier=channel.noise_multiplier,
        noise_std=max(stds) if stds and channel.noised else None,
        clipping=_clipping(channel),
        mechanism=_mechanism(channel),
        sampler=_schedule(channel),
        records=records.describe() if records is not None else None,
        server="; ".join(noise.text(int(account.spent.max())) for noise in channel.rows.values()) or None,
        names=names,
        releases=_releases(channel, len(names)),
        accountant="pld" if account.prices is not None else "none",
        source=channel.source.name,
        numerics=(EXACT if exact and channel.noised else ON_GRID) if secure else "float64",
        ledger=channel.ledger_name,
        remaining_charged=account.remaining_charged,
        outside=()
        if privacy is None
        else OUTSIDE
        + ((EXACT_OUTSIDE if exact else ROUNDED_OUTSIDE) + SECURE_OUTSIDE if secure else ())
        + (RECORDS_OUTSIDE if records is not None else ())
        + channel.notes,
    )


def _names(channel: Channel, records: GradientPlan | None) -> tuple[str, ...]:
    if records is None:
        return tuple(plan.name for plan in channel.plans)
    return ("gradient",)


def _releases(channel: Channel, names: int) -> int:
    """Return the number of releases charged."""
    account, gradients = channel.account, channel.gradients
    if account.prices is not None and gradients is not None:
        return int((account.spent.max(0) * gradients.local_steps).sum())
    if account.by_client and gradients is not None:
        return int(account.spent.max(0).sum())
    if gradients is not None:  # a participation in no account
        return int(account.spent.max()) * int(gradients.local_steps.sum())
    return (account.steps_charged if account.by_client else int(account.spent.max())) * names


def _claimed(channel: Channel) -> float | None:
    """Return the figure of a published accounting that does not hold; None where none is used."""
    account = channel.account
    if account.prices is None or account.prices.refuted is None:
        return None
    if channel.gradients is not None and channel.gradients.published is not None:
        return max(map(channel.gradients.published.claim, account.prices.by_account.ravel()))
    return account.claimed_at(account.spent[0] if account.by_client else int(account.spent.max()))


def _observer(privacy: Privacy | None) -> str:
    if isinstance(privacy, ClientPrivacy):
        return "clients"
    return "none" if privacy is None else "server, other clients and public"


def _budget(channel: Channel) -> float | None:
    budgets: set[float] = set()
    for privacy in channel.settings:
        if isinstance(privacy, ClientPrivacy):
            return privacy.epsilon
        if channel.gradients is not None:
            budgets |= {budget for budget in privacy.budgets(channel.gradients.ids) if budget is not None}
    return max(budgets, default=None)


def _mechanism(channel: Channel) -> str:
    """Return the law of the noise, with the range of its multipliers where there are several."""
    if channel.privacy is None:
        return "none"
    bands = next((release.bands for release in channel.releases.values() if release.bands is not None), None)
    if bands is not None and channel.noised:
        return f"{channel.privacy.mechanism}, correlated over {len(bands)} rounds"
    z, by = np.array(channel.multipliers), "budget"
    prices = channel.account.prices
    if prices is not None and channel.gradients is not None and channel.sampler is None:
        able = (channel.caps > 0) & (channel.gradients.counts > 0)
        z, by = prices.by_account[:, able], "client"
    if not z.size or z.min() == z.max():
        return channel.privacy.mechanism
    return f"{channel.privacy.mechanism} of multipliers {z.min():.5g} to {z.max():.5g} by {by}"


def _schedule(channel: Channel) -> str:
    """Return who takes part, what else is charged, and how the budget is divided."""
    if channel.sampler is not None:
        noised = channel.noised
        text = channel.sampler.describe() + _amplification(channel.law, noised=noised) + _allocation(channel)
        if noised and any(release.bands is not None for release in channel.releases.values()):
            text += f"; {channel.sampler.separation} rounds from one to the next at least, which correlated noise needs"
        return text
    plan = channel.gradients
    text = f"{channel.schedule}; every activation is charged to the client that acts"
    if plan is not None and plan.at_cap == "silent":
        low, high = int(channel.caps.min()), int(channel.caps.max())
        most = f"{high}" if low == high else f"{low} to {high}"
        text += f", and at most {most} of one client release something: later ones read no record and cost nothing"
    prices = channel.account.prices
    if prices is not None and any(price.weights is not None for price in prices.kinds):
        text += "; activations have public weights, and noise in inverse proportion"
    return text


def _allocation(channel: Channel) -> str:
    """Return how the budget is divided: the multipliers printed are those at a weight of 1."""
    weights = [weight for plan in channel.plans for weight in plan.allocation or ()]
    if not weights or not channel.noised:
        return ""
    return f"; steps have public weights {min(weights):.3g} to {max(weights):.3g}, and noise in inverse proportion"


def _clip_norm(channel: Channel) -> float | None:
    if channel.privacy is None:
        return None
    norms = [release.clip.bound for release in channel.releases.values()]
    return max(norms) if norms else float(channel.privacy.initial_norm)


def _clipping(channel: Channel) -> str:
    privacy = channel.privacy
    if privacy is None:
        return "none"
    if isinstance(privacy, RecordPrivacy):
        return f"{channel.sums.norm.upper()} norm of the gradient of one record"
    norm = f"{LAWS[privacy.mechanism].norm.upper()} norm"
    if isinstance(privacy.clip_norm, QuantileClip):
        adapts = privacy.clip_norm
        return f"{norm}; from {adapts.initial:g} on towards the quantile {adapts.quantile:g}, within the budget"
    return norm


def _amplification(law: SamplingLaw | None, *, noised: bool) -> str:
    if law is None or not noised:
        return ""
    if law.per_participation:
        return "; not amplified, a client is charged for each participation"
    if law.relation == "replace":
        return "; amplified by sampling without replacement, valid only against outsiders who see no cohort"
    return ""


@dataclass(frozen=True)
class SignalToNoise:
    """How loud the noise is, from public quantities only.

    Attributes:
        noise_norm: expected L2 norm of the noise on a released mean, about std sqrt(D), the loudest release
            of a step.
        clip_norm: C, the most that the mean of a full cohort can amount to.
        ratio: ``noise_norm / clip_norm``.
        what: the kind of release.
    """

    noise_norm: float
    clip_norm: float
    ratio: float
    what: str = "mean"

    @property
    def warning(self) -> str | None:
        """Return advice when the noise norm exceeds 10 times the clip norm, else None."""
        if self.ratio <= 10:
            return None
        return (
            f"{self.text()}: little will be learned. Use a larger cohort, fewer rounds, a smaller model or "
            f"a larger epsilon."
        )

    def text(self) -> str:
        """Return one line."""
        return (
            f"the noise on a released {self.what} has norm {self.noise_norm:.3g}, "
            f"{self.ratio:.3g} times the clip norm {self.clip_norm:g}"
        )
