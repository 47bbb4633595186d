"""Opening a channel: refuse what cannot be accounted, calibrate the noise, open the ledger."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from .._check import positive_int
from ..errors import ConfigError, PrivacyError
from ..ranks import SINGLE, Ranks
from .account import Account
from .activations import Activations
from .gradients import GradientPlan, record_prices
from .ledger import Ledger, read_header
from .noise.banded import Bands
from .noise.grid import check_drawable
from .noise.laws import LAWS
from .noise.sources import NoiseSource, SecureSource, SeededSource
from .price import Prices, calibrated
from .quantile import QuantileClip
from .release import Release, ReleasePlan, bind_releases, step_price
from .rounds import Rounds
from .row_noise import bind_rows, refuse_rows, row_facts
from .samplers import BoundFull, BoundSampler
from .settings import ClientPrivacy, Privacy, RecordPrivacy

Plan = ReleasePlan | GradientPlan
OF_RECORDS = {"relation": "zero_out", "amplified": False, "per_participation": True}
"""What is assumed of the cohorts of rounds whose unit is one record, whatever draws them: they are
public."""


@dataclass(frozen=True, kw_only=True)
class _Terms:
    """What a channel is opened on: the noise, and what a ledger writes of it.

    Attributes:
        settings: the privacy of all replicates, or of each.
        caps: int64 (n,), the most uses of each client, where clients have accounts of their own;
            else None.
        prices: what uses cost; None where nothing is noised.
        facts: what the header of the ledger has beside the settings and the prices.
        options: of :class:`Rounds` or :class:`Activations`.
    """

    settings: tuple[Privacy, ...]
    caps: np.ndarray | None
    prices: Prices | None = None
    facts: Mapping[str, Any] = field(default_factory=dict)
    options: dict[str, Any]

    @property
    def header(self) -> dict[str, Any] | None:
        """Return the header of the ledger; None where nothing is charged."""
        if self.prices is None:
            return None
        about = {
            "privacy": asdict(self.settings[0]),
            "delta": self.prices.delta,
            "refuted": self.prices.refuted,
        }
        return {**about, **self.facts, **self.prices.header(self.caps)}


def open_channel(
    privacy: Privacy | Sequence[Privacy] | None,
    plans: Sequence[Plan],
    schedule: BoundSampler | str,
    *,
    seed: int,
    steps: int = 1,
    source: NoiseSource | None = None,
    fingerprint: str = "",
    ledger_path: Path | None = None,
    resume: bool = False,
    notes: tuple[str, ...] = (),
    replicates: int = 1,
    ranks: Ranks = SINGLE,
    order: Tensor | None = None,
    kind: type[Rounds | Activations] | None = None,
) -> Rounds | Activations:
    """Calibrate the noise, open the ledger and return the channel of one run, or of R replicates of
    it: :class:`~fedmtl.privacy.Rounds`, or :class:`~fedmtl.privacy.Activations` where clients act
    one at a time.

    Args:
        privacy: settings, or None for neither clip nor noise. For replicates also a sequence of R
            settings that differ only in epsilon or noise_multiplier, one for each.
        plans: the algorithm's releases. Rows of clients are released in every step; a
            :class:`GradientPlan` is needed by :class:`RecordPrivacy`, and wherever clients act one
            at a time. Empty for algorithms that release nothing.
        schedule: a sampler bound to the population, or one phrase on the public schedule of clients
            that act one at a time.
        seed: of seeded noise and cohorts; unused by ``source="secure"``.
        steps: number of rounds that the noise is calibrated for; activations have caps by client.
        source: of the noise and cohorts, in place of the one that ``privacy.source`` and ``seed``
            give; of the same kind. Not for replicates.
        fingerprint: identifies data, configuration and execution; a seeded resume needs the same
            one.
        ledger_path: JSON-lines file, or None to keep charges in memory. Nothing is written where
            nothing is charged.
        resume: continue the ledger at ``ledger_path``; its noise multiplier is used as it stands.
        notes: what the data's own preparation leaves outside of every epsilon; for the report.
        replicates: R replicates, each with its own noise, released at once: simulations in memory.
            In rounds, everybody takes part in every step. An epsilon is that of one of them.
        ranks: the processes that compute the run; the first one calibrates the noise and keeps the
            ledger.
        order: int64 (n,), the clients in the order by which the sampler of rounds numbers them;
            None: their positions.
        kind: class of the channel, a subclass of these two, such as one with canaries or one that
            records its releases; None for these themselves.

    Raises:
        ConfigError: a budget that cannot be met, or replicates of a private, kept or sampled run.
        PrivacyError: a combination that no accountant supports.
        ResumeError: the ledger belongs to another run, is in use or damaged, or exists without
            ``resume``.
    """
    positive_int("open_channel", replicates=replicates)
    rows = tuple(plan for plan in plans if isinstance(plan, ReleasePlan))
    several = [plan for plan in plans if isinstance(plan, GradientPlan)]
    if len(several) > 1:
        raise PrivacyError(
            f"There are {len(several)} GradientPlans; a run has one, of all its clients."
        )
    settings = _settings(privacy, replicates)
    sources = _sources(settings, seed, replicates, source, ledger_path)
    sampler = None
    if isinstance(schedule, BoundSampler):
        sampler = schedule
        _check_rounds(settings, rows, sampler, steps, replicates, order)
        if not plans:  # a run that releases nothing has no gradient to noise
            settings = tuple(each for each in settings if isinstance(each, ClientPrivacy))
    opening = _Opening(
        settings=settings,
        rows=rows,
        gradients=several[0] if several else None,
        schedule=schedule,
        sampler=sampler,
        steps=steps,
        sources=sources,
        fingerprint=fingerprint,
        resume=resume,
        notes=notes,
        options={"ranks": ranks},
        order=order,
        kind=kind,
    )
    if ranks.size == 1:
        return opening.channel(_header(ledger_path, resume), ledger_path)
    # The first rank calibrates and keeps the ledger. The others read its header, as a resume does.
    first: list[Rounds | Activations] = []

    def open_first() -> dict[str, Any]:
        first.append(opening.channel(_header(ledger_path, resume), ledger_path))
        ledger = first[0].account.ledger
        if ledger is None:
            return {}
        header: dict[str, Any] = json.loads(json.dumps(ledger.header))
        return header

    header = ranks.share(open_first)
    if ranks.first:
        return first[0]
    return opening.channel(header, None)


@dataclass(frozen=True, kw_only=True)
class _Opening:
    """The arguments of :func:`open_channel` after their checks: one channel is opened from them at
    every rank.

    Attributes:
        settings: the privacy of all replicates, or of each; empty without privacy.
        rows: releases of rows of clients.
        gradients: the release of gradients of single records; None without one.
        schedule: a bound sampler, or a phrase on clients that act one at a time.
        sampler: the schedule if it is a sampler, otherwise None.
        sources: of the noise and cohorts, one for each replicate.
        options: further ones of the channel.
        steps, fingerprint, resume, notes, order, kind: see :func:`open_channel`.
    """

    settings: tuple[Privacy, ...]
    rows: tuple[ReleasePlan, ...]
    gradients: GradientPlan | None
    schedule: BoundSampler | str
    sampler: BoundSampler | None
    steps: int
    sources: tuple[NoiseSource, ...]
    fingerprint: str
    resume: bool
    notes: tuple[str, ...]
    options: Mapping[str, Any]
    order: Tensor | None
    kind: type[Rounds | Activations] | None

    def channel(self, prior: Mapping[str, Any], path: Path | None) -> Rounds | Activations:
        """Calibrates the noise, opens the ledger and returns the channel.

        Args:
            prior: header of the ledger that is resumed; its noise multipliers are used as they
                stand. Empty without one.
            path: file of the ledger; None keeps charges in memory.
        """
        terms = self._terms(prior)
        gradients: GradientPlan | None = terms.options.get("gradients")
        outside = self.notes
        if gradients is not None:
            outside = (*outside, *gradients.notes)
        if self.sampler is not None:
            clients = self.sampler.n
        else:
            assert gradients is not None  # clients that act one at a time release nothing else
            clients = len(gradients.ids)
        ledger = self._ledger(terms, clients, outside, path)
        account = Account(
            clients,
            steps=self.steps,
            prices=terms.prices,
            budget=self._budget(),
            caps=terms.caps,
            ledger=ledger,
            replicates=len(self.sources),
        )
        options = {
            **terms.options,
            **self.options,
            "notes": outside,
            "ledger_name": _ledger_name(ledger, path),
        }
        if self.sampler is None:
            make = self.kind or Activations
            return make(
                terms.settings, account, self.sources, schedule=str(self.schedule), **options
            )
        make = self.kind or Rounds
        return make(terms.settings, account, self.sources, order=self.order, **options)

    def _terms(self, prior: Mapping[str, Any]) -> _Terms:
        """Returns the terms of rows of clients if the unit is a client, otherwise those of
        records."""
        of_records = any(isinstance(each, RecordPrivacy) for each in self.settings)
        if self.sampler is None or of_records:
            return _terms_of_records(
                self.settings,
                self.rows,
                self.gradients,
                self.sampler,
                self.steps,
                self.sources,
                prior,
            )
        return _terms_of_rows(
            self.settings, self.rows, self.sampler, self.steps, self.sources, prior
        )

    def _budget(self) -> float | None:
        """Returns the budget that ends a run early: that of one run whose unit is a client."""
        if len(self.sources) == 1 and self.settings and isinstance(self.settings[0], ClientPrivacy):
            return self.settings[0].epsilon
        return None

    def _ledger(
        self, terms: _Terms, clients: int, outside: tuple[str, ...], path: Path | None
    ) -> Ledger | None:
        """Returns the open ledger; None if nothing is charged, and for replicates with accounts by
        client, which are simulations."""
        header = terms.header
        if header is None:
            return None
        if terms.caps is not None and len(self.sources) > 1:
            return None
        header["outside"] = list(outside)
        header.setdefault("sampler", str(self.schedule))  # of clients that act one at a time
        return Ledger(
            path,
            header,
            fingerprint=self.fingerprint,
            replays_free=self.sources[0].name == "seeded",
            clients=None if terms.caps is None else clients,
            resume=self.resume,
        )


def _ledger_name(ledger: Ledger | None, path: Path | None) -> str:
    """Returns the name of the ledger in a report."""
    if ledger is None:
        return "none"
    if path is None:
        return "in memory only: a crash forgets what was spent"
    return path.name


def _check_rounds(
    settings: tuple[Privacy, ...],
    rows: tuple[ReleasePlan, ...],
    sampler: BoundSampler,
    steps: int,
    replicates: int,
    order: Tensor | None,
) -> None:
    """Refuses releases, replicates and an order of clients that rounds cannot have."""
    _check_rows(rows, steps)
    if order is not None and not torch.equal(order.sort().values, torch.arange(sampler.n)):
        raise ConfigError(
            f"order must have each of 0 to {sampler.n - 1} once, a number for each client."
        )
    if replicates > 1:
        _check_replicates(settings, sampler)


def _header(path: Path | None, resume: bool) -> Mapping[str, Any]:
    """Return the header of the ledger that is resumed; nothing without one."""
    if not resume or path is None:
        return {}
    return read_header(path) or {}


def _sources(
    settings: tuple[Privacy, ...],
    seed: int,
    replicates: int,
    source: NoiseSource | None,
    path: Path | None,
) -> tuple[NoiseSource, ...]:
    """Return the source of each replicate's noise and cohorts."""
    secure = any(each.source == "secure" for each in settings)
    if replicates > 1 and (secure or path is not None):
        raise ConfigError(
            f"{replicates} replicates are a simulation: they need source='seeded' and no folder."
        )
    if replicates > 1 and source is not None:
        raise ConfigError(f"{replicates} replicates have noise of their own; leave source out.")
    if source is not None:
        if source.name != ("secure" if secure else "seeded"):
            raise PrivacyError(
                f"The source of the noise is {source.name}, but the settings ask for another one."
            )
        return (source,)
    if secure:
        return (SecureSource(),)
    return tuple(SeededSource(seed, replicate) for replicate in range(replicates))


def _caps(sampler: BoundSampler) -> np.ndarray | None:
    if sampler.cap is None:
        return None
    return np.full(sampler.n, sampler.cap, dtype=np.int64)


# Rows of cohorts


def _terms_of_rows(
    settings: tuple[Privacy, ...],
    plans: tuple[ReleasePlan, ...],
    sampler: BoundSampler,
    steps: int,
    sources: tuple[NoiseSource, ...],
    prior: Mapping[str, Any],
) -> _Terms:
    """Return the terms of R replicates whose protected unit is a client; without ``settings``, of
    no privacy."""
    clients = tuple(each for each in settings if isinstance(each, ClientPrivacy))
    replicates = len(sources)
    # the largest epsilon in reports
    privacy = max(clients, key=lambda c: (not c.noiseless, c.epsilon or 0.0), default=None)
    if privacy is None or privacy.noiseless or not plans:
        refuse_rows(plans)
        releases = bind_releases(plans, sampler, privacy)
        chosen: tuple[Privacy, ...] = ()
        if privacy is not None:
            chosen = (privacy,)
        options = {"sampler": sampler, "releases": releases}
        return _Terms(settings=chosen, caps=_caps(sampler), options=options)

    delta = privacy.resolved_delta(sampler.n)
    bands = _bands(privacy, plans, sampler, steps)
    named_rows = any(plan.rows is not None for plan in plans)
    # Noise on rows, and the noise of each replicate, is calibrated to the planned steps: the price
    # allows no further use.
    most = None
    if not sampler.per_participation and (named_rows or replicates > 1):
        most = steps
    price = step_price(plans, sampler, privacy, delta=delta, most=most, bands=bands)
    if sampler.per_participation and price.weights is not None:
        raise PrivacyError(
            "An allocation of the budget over the steps needs everybody to be charged for each "
            f"step; {sampler.describe()} charges a client for the steps it took part in. Use "
            "FullParticipation()."
        )
    sampler = sampler.capped(steps)
    uses = steps if sampler.cap is None else sampler.cap
    accounts = sampler.n if sampler.per_participation else 1
    asked = [[(price, each.epsilon, each.noise_multiplier, uses)] * accounts for each in clients]
    prices, most_uses = calibrated(asked, prior, refuted=LAWS[privacy.mechanism].refuted)
    if sampler.per_participation:
        sampler = sampler.with_cap(int(most_uses[0]))
    releases = bind_releases(plans, sampler, privacy, max(prices.multipliers), bands)
    for release in releases.values():
        if release.noise is not None:
            sensitivity, bound = release.independent
            largest = replace(
                release.noise, multiplier=release.noise.multiplier / min(price.weights or (1.0,))
            )
            check_drawable(largest, sources[0], release.size, sensitivity=sensitivity, bound=bound)
    rows = bind_rows(plans, releases, steps, delta, prior)
    facts = _facts(sampler) | {
        "releases": [[plan.name, plan.form, plan.dimension] for plan in plans]
    }
    without_data = [plan.name for plan in plans if plan.without_data]
    if without_data:
        facts["without_data"] = without_data
    if bands is not None:
        facts["bands"] = list(bands.coefficients)
    facts |= row_facts(plans, rows)
    options = {"sampler": sampler, "releases": releases, "rows": rows}
    return _Terms(
        settings=(privacy,), caps=_caps(sampler), prices=prices, facts=facts, options=options
    )


def calibrated_release(
    privacy: ClientPrivacy, plan: ReleasePlan, sampler: BoundSampler, steps: int
) -> Release:
    """Return the release of a run in which it is the only one, with its noise; nothing is opened or
    charged."""
    terms = _terms_of_rows((privacy,), (plan,), sampler, steps, (SeededSource(0),), {})
    release: Release = terms.options["releases"][plan.name]
    return release


def _bands(
    privacy: ClientPrivacy, plans: tuple[ReleasePlan, ...], sampler: BoundSampler, steps: int
) -> Bands | None:
    """Returns the correlation of the noise over rounds. :mod:`.noise.banded` states its demands
    on the schedule.

    Raises:
        PrivacyError: participations that may follow each other more closely, or cohorts that are
            not public.
    """
    if privacy.bands is None:
        return None
    if sampler.relation != "zero_out":
        raise PrivacyError(
            "ClientPrivacy.bands needs a public schedule in which a client stays away between its "
            f"turns, so CyclicCohorts(...); not {sampler.describe()}, where it may take part in "
            "two rounds running. Leave bands out for independent noise."
        )
    if any(plan.rows is not None for plan in plans):
        raise PrivacyError(
            "ClientPrivacy.bands is for noise that the server adds; clients add independent noise."
        )
    least = sampler.separation
    automatic = privacy.bands == "auto"
    count = min(least, steps) if automatic else int(privacy.bands)
    if least == 1 or count > least:
        asked = "is" if automatic else f"is {count}, at most"
        remedy = "Take smaller cohorts" if least == 1 else "Take fewer bands"
        raise PrivacyError(
            f"ClientPrivacy.bands {asked} the number of rounds between two turns of a client, "
            f"which {sampler.describe()} makes {least}. {remedy}."
        )
    return Bands.square_root(count)


def _facts(sampler: BoundSampler, **assumed: Any) -> dict[str, Any]:
    """Returns the facts that accounting takes from the sampler or assumes in its place, for
    readers of the ledger."""
    schedule = {"class": type(sampler).__name__, **asdict(sampler), **sampler.facts, **assumed}
    return {"sampler": sampler.describe(), "schedule": schedule}


def _check_rows(plans: tuple[ReleasePlan, ...], steps: int) -> None:
    names = [plan.name for plan in plans]
    if len(set(names)) != len(names):
        raise PrivacyError(f"Two releases have the same name: {sorted(names)}.")
    for plan in plans:
        if plan.allocation is not None and len(plan.allocation) != steps:
            raise PrivacyError(
                f"Release {plan.name!r} has an allocation of {len(plan.allocation)} weights; the "
                f"run has {steps} steps, each with a weight."
            )


# Gradients of single records


def _terms_of_records(
    settings: tuple[Privacy, ...],
    rows: tuple[ReleasePlan, ...],
    plan: GradientPlan | None,
    sampler: BoundSampler | None,
    steps: int,
    sources: tuple[NoiseSource, ...],
    prior: Mapping[str, Any],
) -> _Terms:
    """Return the terms of gradients of single records, in rounds of local training, or of clients
    that act one at a time where there is no sampler."""
    records = tuple(each for each in settings if isinstance(each, RecordPrivacy))
    if len(records) < len(settings):
        raise PrivacyError(
            "Clients that act one at a time protect single records: use RecordPrivacy."
        )
    if plan is None:
        raise PrivacyError(
            "RecordPrivacy needs a GradientPlan: whose records there are, and what "
            "is released of them."
        )
    if sampler is None and rows:
        raise PrivacyError(
            f"Release {rows[0].name!r} is of rows; clients that act one at a time "
            "release gradients."
        )
    plan = plan.under(records)
    plan.check(clients=None if sampler is None else sampler.n)
    options: dict[str, Any] = {"gradients": plan}
    facts: dict[str, Any] = {"dimension": plan.dimension, "public": plan.public_digest}
    if sampler is None:
        assert plan.caps is not None
        caps: np.ndarray | None = plan.caps
        facts["records"] = plan.describe()
        facts["at_cap"] = plan.at_cap
    else:
        _check_post_processing(rows)
        sampler = sampler.capped(steps)
        options["sampler"] = sampler
        options["releases"] = bind_releases(rows, sampler, None)
        facts |= _facts(sampler, **OF_RECORDS) | {"records": plan.describe()}
        caps = np.full(sampler.n, most_participations(sampler, steps), dtype=np.int64)
    terms = _Terms(settings=records, caps=caps, facts=facts, options=options)
    if all(each.noiseless for each in records):
        if sampler is None:
            return terms
        return replace(terms, caps=_caps(sampler))
    privacy = records[0]
    delta = privacy.resolved_delta(int(plan.counts.sum()))
    assert caps is not None
    prices, caps = record_prices(records, plan, caps, delta, header=prior)
    if max(prices.multipliers) > 0:
        least = min(weight for price in prices.kinds for weight in price.weights or (1.0,))
        moved = privacy.initial_norm * (2.0 if plan.relation == "replace" else 1.0)
        loudest = LAWS[privacy.mechanism](max(prices.multipliers) / least)
        check_drawable(
            loudest, sources[0], plan.dimension, sensitivity=moved, bound=privacy.initial_norm
        )
    return replace(terms, caps=caps, prices=prices)


def _check_post_processing(plans: tuple[ReleasePlan, ...]) -> None:
    for plan in plans:
        if plan.allocation is not None or plan.rows is not None:
            raise PrivacyError(
                f"RecordPrivacy: release {plan.name!r} has an allocation or noise on rows; it has "
                "no noise of its own."
            )
        if not plan.from_training:
            raise PrivacyError(
                f"RecordPrivacy: release {plan.name!r} is not made only of locally trained models, "
                "so the noise on their gradients does not cover it. Use ClientPrivacy."
            )


def most_participations(sampler: BoundSampler, steps: int) -> int:
    """Return the hard cap on the participations of one client: the sampler's, or one above the
    average, rounded up."""
    if sampler.cap is not None:
        return sampler.cap
    return min(steps, math.ceil(steps * sampler.probability) + 1)


# Replicates


def _settings(privacy: Privacy | Sequence[Privacy] | None, replicates: int) -> tuple[Privacy, ...]:
    """Return settings of all replicates, or of each, which differ only in their budgets; none
    without privacy."""
    if privacy is None:
        return ()
    if isinstance(privacy, (ClientPrivacy, RecordPrivacy)):
        return (privacy,)
    values = tuple(privacy)
    if len(values) != replicates:
        raise ConfigError(
            f"{len(values)} privacy settings were given for {replicates} replicates; give one each."
        )
    for each in values:
        if not isinstance(each, (ClientPrivacy, RecordPrivacy)):
            raise ConfigError(
                f"The privacy of a replicate is {each!r}; give ClientPrivacy(...) or "
                "RecordPrivacy(...)."
            )
        if type(each) is not type(values[0]):
            raise ConfigError(
                "Replicates have ClientPrivacy or RecordPrivacy, all of them the same."
            )
        if replace(each, epsilon=1.0, noise_multiplier=None) != replace(
            values[0], epsilon=1.0, noise_multiplier=None
        ):
            raise ConfigError(
                "Replicates differ only in epsilon or noise_multiplier, not as "
                f"{values[0]} and {each}."
            )
    return values


def _check_replicates(settings: tuple[Privacy, ...], sampler: BoundSampler) -> None:
    """Raise ConfigError where replicates in rounds cannot be computed at once."""
    if not isinstance(sampler, BoundFull):
        raise ConfigError(
            "Replicates in rounds need FullParticipation(), where all have the same cohort; not "
            f"{sampler.describe()}."
        )
    for each in settings:
        if not isinstance(each, ClientPrivacy) or isinstance(each.clip_norm, QuantileClip):
            raise ConfigError(
                "Replicates in rounds need ClientPrivacy(...) with a number as clip_norm."
            )
        if each.noise_multiplier is not None and each.epsilon is not None:
            raise ConfigError(
                "Replicates take epsilon or noise_multiplier, not both: none of them stops early."
            )
