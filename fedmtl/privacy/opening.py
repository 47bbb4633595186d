"""Opening a channel: refuse what cannot be accounted, calibrate the noise, open the ledger."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from torch import Tensor

from .._check import positive_int
from .._rounding import rounded_up
from ..errors import ConfigError, PrivacyError
from ..ranks import ALONE, Ranks
from .account import Account
from .activations import Activations
from .channel import Recording
from .gradients import GradientPlan, prices_header, record_prices
from .ledger import Ledger, read_header
from .noise.banded import Bands
from .noise.grid import check_drawable
from .noise.registry import LAWS
from .noise.sources import NoiseSource, SecureSource, SeededSource
from .price import Price, Prices
from .quantile import QuantileClip
from .release import ReleasePlan, bind_releases, step_law, step_price
from .rounds import Rounds
from .row_noise import bind_rows, refuse_rows, row_key
from .samplers import BoundFull, BoundSampler, SamplingLaw
from .settings import ClientPrivacy, Privacy, RecordPrivacy

Plan = ReleasePlan | GradientPlan


@dataclass(frozen=True)
class _Run:
    """What a run asks for, before its noise is known."""

    plans: tuple[ReleasePlan, ...]
    gradients: GradientPlan | None
    sampler: BoundSampler | None
    schedule: str
    sources: tuple[NoiseSource, ...]
    steps: int
    fingerprint: str
    ledger_path: Path | None
    resume: bool
    replay: Recording | None
    notes: tuple[str, ...]
    ranks: Ranks
    several: bool = False  # repetitions of a run, of which these may be one
    order: Tensor | None = None
    known: dict[str, Any] | None = None

    @property
    def seeded(self) -> bool:
        return self.sources[0].name == "seeded"

    def prior(self, key: str) -> Any:
        """Return a field of the header of the ledger that is resumed, or None."""
        return (self.header or {}).get(key)

    @property
    def header(self) -> dict[str, Any] | None:
        """Return the header of the ledger that is resumed, or of the first rank's ledger; None without one."""
        if self.known is not None:
            return self.known
        return read_header(self.ledger_path) if self.resume and self.ledger_path is not None else None

    def ledger(self, header: dict[str, Any], *, clients: int | None) -> Ledger:
        return Ledger(
            self.ledger_path,
            header,
            fingerprint=self.fingerprint,
            replays_free=self.seeded,
            clients=clients,
            resume=self.resume,
        )

    @property
    def ledger_name(self) -> str:
        if self.ledger_path is None:
            return "in memory only: a crash forgets what was spent"
        return self.ledger_path.name

    def channel(self, settings: tuple[Privacy, ...], account: Account, **options: Any) -> Rounds | Activations:
        ledger_name = self.ledger_name if account.ledger is not None else "none"
        options |= {"notes": self.notes, "replay": self.replay, "ranks": self.ranks, "ledger_name": ledger_name}
        if self.sampler is None:
            assert self.gradients is not None
            return Activations(
                settings, account, self.sources, gradients=self.gradients, schedule=self.schedule, **options
            )
        options = {"sampler": self.sampler, "gradients": self.gradients} | options
        return Rounds(settings, account, self.sources, plans=self.plans, order=self.order, **options)


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
    replay: Recording | None = None,
    notes: tuple[str, ...] = (),
    replicates: int = 1,
    ranks: Ranks = ALONE,
    order: Tensor | None = None,
) -> Any:
    """Calibrate the noise, open the ledger and return the channel of one run, or of R replicates of it:
    :class:`~fedmtl.privacy.Rounds`, or :class:`~fedmtl.privacy.Activations` where clients act one at a time.

    Args:
        privacy: settings, or None for neither clip nor noise. For repetitions also a sequence of R settings that
            differ in epsilon or noise_multiplier alone, one for each.
        plans: the algorithm's releases. Rows of clients are released in every step; a :class:`GradientPlan` is needed
            by :class:`RecordPrivacy`, and wherever clients act one at a time. Empty for algorithms that release
            nothing.
        schedule: a sampler bound to the population, or one phrase on the public schedule of clients that act one at a
            time.
        seed: of seeded noise and cohorts; unused by ``source="secure"``.
        steps: number of rounds that the noise is calibrated for; activations have caps by client.
        source: of the noise and cohorts, in place of the one that ``privacy.source`` and ``seed`` give; of the same
            kind. Not for repetitions.
        fingerprint: identifies data, configuration and execution; a seeded resume needs the same one.
        ledger_path: JSON-lines file, or None to keep charges in memory. Nothing is written where nothing is
            charged.
        resume: continue the ledger at ``ledger_path``; its noise multiplier is used as it stands.
        replay: ``record`` of another run; releases return its values (steps are still charged and checked).
        notes: what the data's own preparation leaves outside of every epsilon; for the report.
        replicates: R repetitions, each with its own noise, released together: simulations in memory. In rounds,
            everybody takes part in every step. An epsilon is that of one of them.
        ranks: the processes that compute the run; the first one calibrates the noise and keeps the ledger.
        order: int64 (n,), the client at each rank of the sampler, in rounds without a :class:`GradientPlan`, which has
            it too; None: its position.

    Raises:
        ConfigError: a budget that cannot be met, or repetitions of a private, kept or sampled run.
        PrivacyError: a combination that no accountant supports.
        ResumeError: the ledger belongs to another run, is in use or damaged, or exists without ``resume``.
    """
    positive_int("open_channel", replicates=replicates)
    repeated = replicates > 1
    rows = tuple(plan for plan in plans if isinstance(plan, ReleasePlan))
    several = [plan for plan in plans if isinstance(plan, GradientPlan)]
    if len(several) > 1:
        raise PrivacyError(f"There are {len(several)} GradientPlans; a run has one, of all its clients.")
    gradients = several[0] if several else None
    sampler = schedule if isinstance(schedule, BoundSampler) else None
    settings = _settings(privacy, replicates)
    secure = any(one.source == "secure" for one in settings)
    if repeated and (secure or ledger_path is not None):
        raise ConfigError(f"{replicates} repetitions are a simulation: they need source='seeded' and no folder.")
    if repeated and source is not None:
        raise ConfigError(f"{replicates} repetitions have noise of their own; leave source out.")
    if source is not None and source.name != ("secure" if secure else "seeded"):
        raise PrivacyError(f"The source of the noise is {source.name}, but the settings ask for another one.")
    sources: tuple[NoiseSource, ...] = tuple(
        SecureSource() if secure else SeededSource(seed, repetition) for repetition in range(replicates)
    )
    run = _Run(
        rows,
        gradients,
        sampler,
        schedule if isinstance(schedule, str) else schedule.describe(),
        sources if source is None else (source,),
        steps,
        fingerprint,
        ledger_path,
        resume,
        replay,
        notes,
        ranks,
        repeated,
        order,
    )
    if sampler is not None:
        _check_rows(rows, steps)
        if repeated:
            _check_repetitions(settings, sampler)
    if ranks.size == 1:
        return _opened(settings, run, gradients)
    found: list[Rounds | Activations] = []

    def open_first() -> dict[str, Any] | None:
        found.append(_opened(settings, run, gradients))
        ledger = found[0].account.ledger
        return None if ledger is None else json.loads(json.dumps(ledger.header))  # as a resume reads it

    header = ranks.share(open_first)
    return (
        found[0]
        if ranks.first
        else _opened(settings, replace(run, ledger_path=None, resume=False, known=header), gradients)
    )


def _opened(settings: tuple[Privacy, ...], run: _Run, gradients: GradientPlan | None) -> Rounds | Activations:
    rows, sampler = run.plans, run.sampler
    of_records = any(isinstance(one, RecordPrivacy) for one in settings)
    if of_records and sampler is not None and not rows and gradients is None:
        settings, of_records = (), False  # nothing is released, so no gradient has noise
    if of_records or sampler is None:
        return _open_gradients(settings, run, gradients)
    assert sampler is not None
    if not settings:
        refuse_rows(rows)
        return run.channel((), _without_noise(sampler, run), gradients=None)
    clients = tuple(one for one in settings if isinstance(one, ClientPrivacy))
    return _open_rows(clients, replace(run, gradients=None), sampler)


def _without_noise(sampler: BoundSampler, run: _Run) -> Account:
    caps = None if sampler.cap is None else np.full(sampler.n, sampler.cap, dtype=np.int64)
    return Account(sampler.n, steps=run.steps, caps=caps, replicates=len(run.sources))


# Rows of cohorts


def _open_rows(settings: tuple[ClientPrivacy, ...], run: _Run, sampler: BoundSampler) -> Rounds | Activations:
    """Open the channel of R repetitions whose protected unit is a client."""
    plans, steps, replicates = run.plans, run.steps, len(run.sources)
    privacy = max(settings, key=lambda one: (not one.noiseless, one.epsilon or 0.0))  # loudest in reports
    law = step_law(plans, sampler, privacy)
    if privacy.noiseless or not plans:
        refuse_rows(plans)
        releases = bind_releases(plans, sampler, law, privacy, None)
        return run.channel((privacy,), _without_noise(sampler, run), law=law, releases=releases)

    delta, bands = privacy.resolved_delta(sampler.n), _bands(privacy, plans, sampler, law, steps)
    named_rows = any(plan.rows is not None for plan in plans)
    # no use beyond those that the noise on rows, or the noise of each repetition, is calibrated to
    most = steps if not law.per_participation and (named_rows or replicates > 1) else None
    price = step_price(plans, sampler, law, privacy, delta=delta, most=most, bands=bands)
    if law.per_participation:
        if price.weights is not None:
            raise PrivacyError(
                "An allocation of the budget over the steps needs everybody to be charged for each step; "
                f"{sampler.describe()} charges a client for the steps it took part in. Use FullParticipation()."
            )
        sampler = _capped(sampler, privacy, run, price)
    uses = sampler.cap if law.per_participation and sampler.cap is not None else steps
    prior = run.prior("noise_multiplier")
    multipliers = tuple(_multiplier(one, prior, price, uses) for one in settings)
    kind = np.arange(len(settings))[:, None]
    if len(settings) == 1 or len(set(multipliers)) == 1:
        multipliers, kind = multipliers[:1] * replicates, kind[:1] * 0
    distinct = multipliers if len(kind) > 1 else multipliers[:1]
    prices = Prices((price,) * len(distinct), distinct, kind, LAWS[privacy.mechanism].refuted)
    if replicates == 1:
        _check_first_step(privacy, multipliers[0], price)
    releases = bind_releases(plans, sampler, law, privacy, max(multipliers), bands)
    for release in releases.values():
        if release.noise is not None:
            sensitivity, bound = release.independent
            largest = replace(release.noise, multiplier=release.noise.multiplier / min(price.weights or (1.0,)))
            check_drawable(largest, run.sources[0], release.size, sensitivity=sensitivity, bound=bound)
    rows = bind_rows(plans, releases, delta, run.prior)
    header: dict[str, Any] = {
        "account": "everybody" if not law.per_participation else "client",
        "privacy": asdict(privacy),
        "delta": delta,
        "sampler": sampler.describe(),
        "schedule": _facts(sampler, law),
        "max_uses": sampler.cap,
        "noise_multiplier": max(multipliers),
        "price": price.to_dict(),
        "releases": [[plan.name, plan.form, plan.dimension] for plan in plans],
        "refuted": prices.refuted,
    }
    if bands is not None:
        header["bands"] = list(bands.coefficients)
    header |= {row_key(name): noise.multiplier for name, noise in rows.items()}
    header |= {f"rows of {plan.name}": asdict(plan.rows) for plan in plans if plan.rows is not None}
    account = Account(
        sampler.n,
        steps=steps,
        prices=prices,
        budget=None if run.several else privacy.epsilon,
        caps=None if sampler.cap is None else np.full(sampler.n, sampler.cap, dtype=np.int64),
        ledger=run.ledger(header, clients=sampler.n if law.per_participation else None),
        by_client=law.per_participation,
        replicates=replicates,
    )
    return run.channel(
        (privacy,), account, sampler=sampler, law=law, releases=releases, multipliers=multipliers, rows=rows
    )


def _bands(
    privacy: ClientPrivacy, plans: tuple[ReleasePlan, ...], sampler: BoundSampler, law: SamplingLaw, steps: int
) -> Bands | None:
    """Return how the noise is correlated over rounds; see :mod:`.noise.banded` for what that needs of the schedule.

    Raises:
        PrivacyError: participations that may follow each other more closely, or cohorts that are not public.
    """
    if privacy.bands is None:
        return None
    if law.relation != "zero_out" or not law.per_participation or law.amplified:
        raise PrivacyError(
            f"ClientPrivacy.bands needs a public schedule in which a client stays away between its turns, so "
            f"CyclicCohorts(...); not {sampler.describe()}, where it may take part in two rounds running. Leave bands "
            f"out for independent noise."
        )
    if any(plan.rows is not None for plan in plans):
        raise PrivacyError("ClientPrivacy.bands is for noise that the server adds; clients add independent noise.")
    least = sampler.separation
    if least == 1 or (privacy.bands != "auto" and privacy.bands > least):
        asked = "is" if privacy.bands == "auto" else f"is {privacy.bands}, at most"
        raise PrivacyError(
            f"ClientPrivacy.bands {asked} the number of rounds between two turns of a client, which "
            f"{sampler.describe()} makes {least}. {'Take smaller cohorts' if least == 1 else 'Take fewer bands'}."
        )
    return Bands.square_root(min(least, steps) if privacy.bands == "auto" else privacy.bands)


def _facts(sampler: BoundSampler, law: SamplingLaw) -> dict[str, Any]:
    """Return what the accounting takes from the sampler, for readers of the ledger."""
    return {"class": type(sampler).__name__, **asdict(sampler), **asdict(law)}


def _check_first_step(privacy: ClientPrivacy, multiplier: float, price: Price) -> None:
    budget = privacy.epsilon
    if budget is not None and price.epsilon(1, multiplier) > budget:
        raise ConfigError(
            f"ClientPrivacy: noise_multiplier {multiplier:g} spends more than epsilon = {rounded_up(budget, 6)} in "
            f"one step at delta = {rounded_up(price.delta, 6)}. Raise noise_multiplier or epsilon, or leave the "
            f"former out."
        )


def _check_rows(plans: tuple[ReleasePlan, ...], steps: int) -> None:
    names = [plan.name for plan in plans]
    if len(set(names)) != len(names):
        raise PrivacyError(f"Two releases have the same name: {sorted(names)}.")
    for plan in plans:
        if plan.uses != steps:
            raise PrivacyError(
                f"Release {plan.name!r} has {plan.uses} uses, but the run has {steps} steps; every release "
                f"happens in every step."
            )


def _capped(sampler: BoundSampler, privacy: ClientPrivacy, run: _Run, price: Price) -> BoundSampler:
    """Return the sampler with a hard cap on the participations of one client; within the budget where the noise is
    fixed."""
    prior = run.prior("max_uses")
    if isinstance(prior, int):
        return sampler.with_cap(prior)
    sampler = sampler.capped(run.steps)
    if privacy.noise_multiplier is not None and privacy.epsilon is not None and sampler.cap is not None:
        return sampler.with_cap(max(1, price.affordable(privacy.epsilon, privacy.noise_multiplier, sampler.cap)))
    return sampler


def _multiplier(privacy: ClientPrivacy, prior: float | None, price: Price, uses: int) -> float:
    """Return noise scale over sensitivity: that of the resumed ledger, the one asked for, or calibrated to the budget;
    0 without noise."""
    if isinstance(prior, float):
        return prior
    if privacy.noiseless:
        return 0.0
    if privacy.noise_multiplier is not None:
        return float(privacy.noise_multiplier)
    assert privacy.epsilon is not None
    return price.multiplier(privacy.epsilon, uses)


# Gradients of single records


def _open_gradients(settings: tuple[Privacy, ...], run: _Run, plan: GradientPlan | None) -> Rounds | Activations:
    """Open the channel of gradients of single records, in rounds of local training or of clients that act one at a
    time."""
    records = tuple(one for one in settings if isinstance(one, RecordPrivacy))
    if len(records) < len(settings):
        raise PrivacyError("Clients that act one at a time protect single records: use RecordPrivacy.")
    if plan is None:
        raise PrivacyError("RecordPrivacy needs a GradientPlan: whose records there are, and what is released of them.")
    sampler = run.sampler
    if sampler is None and run.plans:
        raise PrivacyError(
            f"Release {run.plans[0].name!r} is of rows; clients that act one at a time release gradients."
        )
    plan = plan.under(records)
    plan.check(clients=None if sampler is None else sampler.n)
    run = replace(run, gradients=plan, notes=(*run.notes, *plan.notes))
    rounds: dict[str, Any] = {}
    if sampler is not None:
        _check_post_processing(run.plans)
        law, sampler = SamplingLaw("zero_out", amplified=False, per_participation=True), sampler.capped(run.steps)
        rounds = {"law": law, "sampler": sampler}
        caps = np.full(sampler.n, most_participations(sampler, run.steps), dtype=np.int64)
        facts = {"sampler": sampler.describe(), "schedule": _facts(sampler, law), "records": plan.describe()}
    else:
        assert plan.caps is not None
        caps, facts = plan.caps, {}
    if all(one.noiseless for one in records):
        if sampler is not None:
            return run.channel(records, _without_noise(sampler, run), **rounds)
        account = Account(len(plan.ids), steps=run.steps, caps=caps, by_client=True, replicates=len(run.sources))
        return run.channel(records, account)
    privacy = records[0]
    delta = privacy.resolved_delta(int(plan.counts.sum()))
    prices, caps = record_prices(records, plan, caps, delta, header=run.header)
    if max(prices.multipliers) > 0:
        least = min(weight for price in prices.kinds for weight in price.weights or (1.0,))
        moved = privacy.initial_norm * (2.0 if plan.relation == "replace" else 1.0)
        loudest = LAWS[privacy.mechanism](max(prices.multipliers) / least)
        check_drawable(loudest, run.sources[0], plan.dimension, sensitivity=moved, bound=privacy.initial_norm)
    about = {"account": "client", "privacy": asdict(privacy), "delta": delta, "dimension": plan.dimension}
    about |= {"clients": len(plan.ids), **facts}
    header = about | {"refuted": prices.refuted} | prices_header(prices, caps) | {"public": plan.public_digest}
    account = Account(
        len(plan.ids),
        steps=run.steps,
        prices=prices,
        caps=caps,
        ledger=None if run.several else run.ledger(header, clients=len(plan.ids)),
        by_client=True,
        replicates=len(run.sources),
    )
    return run.channel(records, account, **rounds)


def _check_post_processing(plans: tuple[ReleasePlan, ...]) -> None:
    for plan in plans:
        if plan.allocation is not None or plan.rows is not None:
            raise PrivacyError(
                f"RecordPrivacy: release {plan.name!r} has an allocation or noise on rows; it has no noise of its own."
            )
        if not plan.from_training:
            raise PrivacyError(
                f"RecordPrivacy: release {plan.name!r} is not made of locally trained models alone, so the noise on "
                f"their gradients does not cover it. Use ClientPrivacy."
            )


def most_participations(sampler: BoundSampler, steps: int) -> int:
    """Return the hard cap on the participations of one client: the sampler's, or one above the average, rounded up."""
    if sampler.cap is not None:
        return sampler.cap
    return min(steps, math.ceil(steps * sampler.probability) + 1)


# Repetitions


def _settings(privacy: Privacy | Sequence[Privacy] | None, replicates: int) -> tuple[Privacy, ...]:
    """Return settings of all repetitions, or of each, which differ in the budgets alone; none without privacy."""
    if privacy is None or isinstance(privacy, (ClientPrivacy, RecordPrivacy)):
        return () if privacy is None else (privacy,)
    given = tuple(privacy)
    if len(given) != replicates:
        raise ConfigError(f"{len(given)} privacy settings were given for {replicates} repetitions; give one each.")
    for one in given:
        if not isinstance(one, (ClientPrivacy, RecordPrivacy)):
            raise ConfigError(f"The privacy of a repetition is {one!r}; give ClientPrivacy(...) or RecordPrivacy(...).")
        if type(one) is not type(given[0]):
            raise ConfigError("Repetitions have ClientPrivacy or RecordPrivacy, all of them the same.")
        if replace(one, epsilon=1.0, noise_multiplier=None) != replace(given[0], epsilon=1.0, noise_multiplier=None):
            raise ConfigError(f"Repetitions differ in epsilon or noise_multiplier alone, not as {given[0]} and {one}.")
    return given


def _check_repetitions(settings: tuple[Privacy, ...], sampler: BoundSampler) -> None:
    """Raise ConfigError where repetitions in rounds cannot be computed together."""
    if not isinstance(sampler, BoundFull):
        raise ConfigError(
            f"Repetitions in rounds need FullParticipation(), where all have the same cohort; not {sampler.describe()}."
        )
    for one in settings:
        if not isinstance(one, ClientPrivacy) or isinstance(one.clip_norm, QuantileClip):
            raise ConfigError("Repetitions in rounds need ClientPrivacy(...) with a number as clip_norm.")
        if one.noise_multiplier is not None and one.epsilon is not None:
            raise ConfigError("Repetitions take epsilon or noise_multiplier, not both: none of them stops early.")
