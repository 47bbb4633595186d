"""Opening a channel: refuse what cannot be accounted, calibrate the noise, open the ledger."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from dp_accounting import dp_event

from .._rounding import rounded_up
from ..errors import ConfigError, PrivacyError
from .account import Account, Cost
from .accounting.calibration import calibrate_multiplier
from .accounting.composition import StepEvent, epsilon, largest_uses
from .allocation import allocation_of, steps_of, uses_of, whole_run
from .channel import Channel, Recording
from .clip import CLIPS
from .ledger import Ledger, read_header
from .noise.registry import LAWS
from .noise.sources import NoiseSource, SecureSource, SeededSource
from .records import Owners, RecordReleases
from .release import ReleasePlan, bind_releases, step_law
from .replicates import open_replicates
from .row_noise import bind_rows, refuse_rows, row_key
from .samplers import BoundSampler, SamplingLaw
from .settings import ClientPrivacy, Privacy, RecordPrivacy


@dataclass(frozen=True)
class _Run:
    """What a run asks for, before its noise is known."""

    plans: tuple[ReleasePlan, ...]
    sampler: BoundSampler
    source: NoiseSource
    steps: int
    fingerprint: str
    ledger_path: Path | None
    resume: bool
    replay: Recording | None
    block: int | None

    @property
    def seeded(self) -> bool:
        return self.source.name == "seeded"

    def prior(self, key: str) -> Any:
        """A field of the header of the ledger that is resumed, or None."""
        header = read_header(self.ledger_path) if self.resume and self.ledger_path is not None else None
        return None if header is None else header.get(key)

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


def open_channel(
    privacy: Privacy | Sequence[ClientPrivacy] | None,
    plans: tuple[ReleasePlan, ...],
    sampler: BoundSampler,
    *,
    seed: int,
    steps: int,
    source: NoiseSource | None = None,
    owners: Owners | None = None,
    fingerprint: str = "",
    ledger_path: Path | None = None,
    resume: bool = False,
    replay: Recording | None = None,
    block: int | None = None,
    notes: tuple[str, ...] = (),
    replicates: int = 1,
) -> Channel:
    """Calibrate the noise, open the ledger and return the channel of one run, or of R repetitions of it.

    Args:
        privacy: settings, or None for neither clip nor noise. For repetitions also a sequence of R settings that
            differ in epsilon alone, one for each.
        plans: the algorithm's releases; each happens in every step. Empty for algorithms that release
            nothing.
        sampler: who takes part, bound to the population.
        seed: of seeded noise and cohorts; unused by ``source="secure"``.
        steps: number of steps that the noise is calibrated for.
        source: of the noise and cohorts, in place of the one that ``privacy.source`` and ``seed`` give; of the same
            kind. Not for repetitions.
        owners: of the records; needed by :class:`RecordPrivacy`.
        fingerprint: identifies data, configuration and execution; a seeded resume needs the same one.
        ledger_path: JSON-lines file, or None to keep charges in memory. Nothing is written where nothing is
            charged.
        resume: continue the ledger at ``ledger_path``; its noise multiplier is used as it stands.
        replay: ``record`` of another run; releases return its values (steps are still reserved and checked).
        block: steps reserved by one flush to disk; by default 16, and 4 in secure mode, where a crash loses
            the rest of a block.
        notes: what the data's own preparation leaves outside of every epsilon; for the report.
        replicates: R repetitions, each with its own noise, released together: simulations in memory, in which
            everybody takes part in every step. An epsilon is that of one of them.

    Raises:
        ConfigError: a budget that cannot be met, or repetitions of a private, kept or sampled run.
        PrivacyError: a combination that no accountant supports.
        ResumeError: the ledger belongs to another run, is in use or damaged, or exists without ``resume``.
    """
    _check_plans(plans, steps)
    if replicates != 1 or isinstance(privacy, Sequence):
        return open_replicates(privacy, plans, sampler, seed, steps, replicates, ledger_path, replay, notes)
    secure = privacy is not None and privacy.source == "secure"
    if source is None:
        source = SecureSource() if secure else SeededSource(seed)
    elif source.name != ("secure" if secure else "seeded"):
        raise PrivacyError(f"The source of the noise is {source.name}, but the settings ask for another one.")
    run = _Run(plans, sampler, source, steps, fingerprint, ledger_path, resume, replay, block)
    if privacy is None:
        refuse_rows(plans)
        return Channel(None, plans, sampler, source, Account(sampler, steps=steps), replay=replay)
    if isinstance(privacy, ClientPrivacy):
        channel = _open_clients(privacy, run)
    elif owners is None:
        raise PrivacyError("RecordPrivacy needs the owners of the records.")
    else:
        channel = _open_records(privacy, run, owners)
    channel.notes = notes
    return channel


def _open_clients(privacy: ClientPrivacy, run: _Run) -> Channel:
    plans, sampler, steps = run.plans, run.sampler, run.steps
    law = step_law(plans, sampler, privacy)
    if privacy.noiseless or not plans:
        refuse_rows(plans)
        account = Account(sampler, steps=steps)
        return Channel(privacy, plans, sampler, run.source, account, law=law, replay=run.replay)

    delta = privacy.resolved_delta(sampler.n)
    step = steps_of(plans, sampler, law, privacy)
    if law.per_participation:
        if allocation_of(plans) is not None:
            raise PrivacyError(
                "An allocation of the budget over the steps needs everybody to be charged for each step; "
                f"{sampler.describe()} charges a client for the steps it took part in. Use FullParticipation()."
            )
        sampler = _capped(sampler, privacy, run, step, delta)
    uses = sampler.cap if law.per_participation and sampler.cap is not None else steps
    multiplier = _multiplier(privacy, run.prior("noise_multiplier"), *whole_run(plans, step, uses), delta)
    limit = steps if not law.per_participation and any(plan.rows is not None for plan in plans) else None
    cost = Cost(delta, (uses_of(plans, step, multiplier, limit),), refuted=law.refuted)  # no use beyond those of rows
    _check_first_step(privacy, multiplier, cost.step(0), delta)
    header = {
        "account": "global",
        "privacy": asdict(privacy),
        "delta": delta,
        "sampler": sampler.describe(),
        "schedule": _facts(sampler, law),
        "max_uses": sampler.cap,
        "noise_multiplier": multiplier,
        "releases": [[plan.name, plan.form, plan.dimension, plan.stateful] for plan in plans],
    }
    rows = bind_rows(plans, bind_releases(plans, sampler, law, privacy, multiplier), delta, run.prior)
    header |= {row_key(name): noise.multiplier for name, noise in rows.items()}
    header |= {f"rows of {plan.name}": asdict(plan.rows) for plan in plans if plan.rows is not None}
    header |= {f"allocation of {plan.name}": list(plan.allocation) for plan in plans if plan.allocation is not None}
    ledger = run.ledger(header, clients=sampler.n if law.per_participation else None)
    account = Account(
        sampler,
        steps=steps,
        cost=cost,
        budget=privacy.epsilon,
        ledger=ledger,
        replays_free=run.seeded,
        per_participation=law.per_participation,
        block=run.block if run.block is not None else (16 if run.seeded else 4),
    )
    channel = Channel(
        privacy,
        plans,
        sampler,
        run.source,
        account,
        law=law,
        noise_multiplier=multiplier,
        ledger_name=run.ledger_name,
        replay=run.replay,
    )
    channel.rows = rows
    return channel


def _open_records(privacy: RecordPrivacy, run: _Run, owners: Owners) -> Channel:
    for plan in run.plans:
        if plan.allocation is not None or plan.rows is not None:
            raise PrivacyError(
                f"RecordPrivacy: release {plan.name!r} has an allocation or noise on rows; it has no noise of its own."
            )
        if not plan.from_training:
            raise PrivacyError(
                f"RecordPrivacy: release {plan.name!r} is not made of locally trained models alone, so the noise on "
                f"their gradients does not cover it. Use ClientPrivacy."
            )
    law = SamplingLaw("zero_out", amplified=False, per_participation=True)
    clip = CLIPS[LAWS[privacy.mechanism].norm](privacy.clip_norm)
    sampler = run.sampler.capped(run.steps)
    if privacy.noiseless:
        records = RecordReleases(owners, clip=clip, noise=None, multipliers=None, source=run.source, replay=run.replay)
        account = Account(sampler, steps=run.steps)
        return Channel(privacy, run.plans, sampler, run.source, account, law=law, records=records, replay=run.replay)

    delta = privacy.resolved_delta(int(owners.counts.sum()))
    cap = _participations(sampler, run.steps)
    multipliers, events, caps = _owner_terms(privacy, owners, cap, delta, run.prior("noise_multipliers"))
    caps = run.prior("max_uses") or caps
    order = torch.argsort(owners.ranks).tolist()
    cost = Cost(delta, tuple(events[k] for k in order), tuple(int(owners.steps[k]) for k in order))
    header = {
        "account": "owner",
        "privacy": asdict(privacy),
        "delta": delta,
        "sampler": sampler.describe(),
        "schedule": _facts(sampler, law),
        "records": owners.describe(),
        "ranks": owners.ranks.tolist(),
        "noise_multipliers": multipliers,
        "max_uses": caps,
        "local_steps": owners.steps.tolist(),
        "rates": owners.probabilities.tolist(),
        "dimension": owners.dimension,
    }
    account = Account(
        sampler,
        steps=run.steps,
        cost=cost,
        ledger=run.ledger(header, clients=sampler.n),
        replays_free=run.seeded,
        per_participation=True,
        caps=np.array([caps[k] for k in order], dtype=np.int64),
    )
    records = RecordReleases(
        owners,
        clip=clip,
        noise=LAWS[privacy.mechanism](1.0),
        multipliers=torch.tensor(multipliers, dtype=torch.float64),
        source=run.source,
        replay=run.replay,
    )
    return Channel(
        privacy,
        run.plans,
        sampler,
        run.source,
        account,
        law=law,
        noise_multiplier=max(multipliers),
        records=records,
        ledger_name=run.ledger_name,
        replay=run.replay,
    )


def _facts(sampler: BoundSampler, law: SamplingLaw) -> dict[str, Any]:
    """What the accounting takes from the sampler, for whoever reads the ledger."""
    return {"class": type(sampler).__name__, **asdict(sampler), **asdict(law)}


def _owner_terms(
    privacy: RecordPrivacy, owners: Owners, cap: int, delta: float, prior: list[float] | None
) -> tuple[list[float], list[StepEvent], list[int]]:
    """Noise multiplier, event of one local step, and cap on participations of each owner, in the clients' order."""
    budgets = privacy.budgets(owners.ids)
    multipliers, events, caps = [], [], []
    for k, budget in enumerate(budgets):
        repeats, q = int(owners.steps[k]), float(owners.probabilities[k])

        def step(multiplier: float, q: float = q) -> StepEvent:
            event = LAWS[privacy.mechanism](multiplier).event(owners.dimension)
            return StepEvent(dp_event.PoissonSampledDpEvent(q, event) if q < 1 else event, privacy.accountant)

        z = _multiplier(privacy, prior[k] if prior is not None else None, step, cap * repeats, delta, budget)
        event, own = step(z), cap
        if privacy.noise_multiplier is not None and budget is not None:
            fitting = largest_uses(event.event, budget, delta, accountant=event.accountant) // repeats
            if fitting < 1:
                raise ConfigError(
                    f"RecordPrivacy: noise_multiplier {z:g} spends more than epsilon = {rounded_up(budget, 6)} of "
                    f"client {owners.ids[k]!r} in one round at delta = {rounded_up(delta, 6)}. Raise "
                    f"noise_multiplier or epsilon."
                )
            own = min(cap, fitting)
        multipliers.append(z)
        events.append(event)
        caps.append(own)
    return multipliers, events, caps


def _participations(sampler: BoundSampler, steps: int) -> int:
    """Hard cap on the participations of one owner: the sampler's, or one above the average, rounded up."""
    if sampler.cap is not None:
        return sampler.cap
    return min(steps, math.ceil(steps * sampler.probability) + 1)


def _check_first_step(privacy: ClientPrivacy, multiplier: float, event: StepEvent, delta: float) -> None:
    budget = privacy.epsilon
    if budget is not None and epsilon(event.event, 1, delta, accountant=event.accountant) > budget:
        raise ConfigError(
            f"ClientPrivacy: noise_multiplier {multiplier:g} spends more than epsilon = {rounded_up(budget, 6)} in "
            f"one step at delta = {rounded_up(delta, 6)}. Raise noise_multiplier or epsilon, or leave the former out."
        )


def _check_plans(plans: tuple[ReleasePlan, ...], steps: int) -> None:
    names = [plan.name for plan in plans]
    if len(set(names)) != len(names):
        raise PrivacyError(f"Two releases have the same name: {sorted(names)}.")
    for plan in plans:
        if plan.uses != steps:
            raise PrivacyError(
                f"Release {plan.name!r} has {plan.uses} uses, but the run has {steps} steps; every release "
                f"happens in every step."
            )


def _capped(
    sampler: BoundSampler, privacy: ClientPrivacy, run: _Run, step: Callable[[float], StepEvent], delta: float
) -> BoundSampler:
    """The sampler with a hard cap on the participations of one client; within the budget where the noise is fixed."""
    prior = run.prior("max_uses")
    if isinstance(prior, int):
        return sampler.with_cap(prior)
    sampler = sampler.capped(run.steps)
    if privacy.noise_multiplier is not None and privacy.epsilon is not None and sampler.cap is not None:
        event = step(privacy.noise_multiplier)
        fitting = largest_uses(event.event, privacy.epsilon, delta, accountant=event.accountant)
        return sampler.with_cap(max(1, min(sampler.cap, fitting)))
    return sampler


def _multiplier(
    privacy: Privacy,
    prior: float | None,
    step: Callable[[float], StepEvent],
    uses: int,
    delta: float,
    budget: float | None = None,
) -> float:
    """Noise scale over sensitivity: that of the resumed ledger, the one asked for, or calibrated to the budget."""
    if isinstance(prior, float):
        return prior
    if privacy.noise_multiplier is not None:
        return float(privacy.noise_multiplier)
    target = privacy.epsilon if budget is None else budget
    assert isinstance(target, (int, float))
    return calibrate_multiplier(step, target=float(target), delta=delta, uses=uses)
