"""Opening a channel: refuse what cannot be accounted, calibrate the noise, open the ledger."""

from __future__ import annotations

from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from ..errors import ConfigError, PrivacyError
from .account import Account
from .calibration import calibrate_noise
from .channel import Channel, Recording
from .composition import epsilon, largest_uses
from .ledger import Ledger, read_header
from .mechanisms import GaussianNoise
from .release import ReleasePlan, StepEvent, step_event, step_law
from .samplers import BoundFixed, BoundSampler, SamplingLaw, default_cap
from .settings import ClientPrivacy
from .sources import NoiseSource, SecureSource, SeededSource


def open_channel(
    privacy: ClientPrivacy | None,
    plans: tuple[ReleasePlan, ...],
    sampler: BoundSampler,
    *,
    seed: int,
    steps: int,
    fingerprint: str = "",
    ledger_path: Path | None = None,
    resume: bool = False,
    replay: Recording | None = None,
    block: int | None = None,
) -> Channel:
    """Calibrate the noise, open the ledger and return the channel of one run.

    Args:
        privacy: settings, or None for neither clip nor noise.
        plans: the algorithm's releases; each happens in every step. Empty for algorithms that release
            nothing.
        sampler: who takes part, bound to the population.
        seed: of seeded noise and cohorts; unused by ``source="secure"``.
        steps: number of steps that the noise is calibrated for.
        fingerprint: identifies data, configuration and execution; a seeded resume needs the same one.
        ledger_path: JSON-lines file, or None to keep charges in memory. Nothing is written where nothing is
            charged.
        resume: continue the ledger at ``ledger_path``; its noise multiplier is used as it stands.
        replay: ``record`` of another run; releases return its values (steps are still reserved and checked).
        block: steps reserved by one flush to disk; by default 16, and 4 in secure mode, where a crash loses
            the rest of a block.

    Raises:
        ConfigError: a budget that cannot be met.
        PrivacyError: a combination that no accountant supports.
        ResumeError: the ledger belongs to another run, is in use or damaged, or exists without ``resume``.
    """
    _check_plans(plans, steps)
    source: NoiseSource = SeededSource(seed)
    if privacy is None:
        return Channel(None, plans, sampler, source, Account(sampler, steps=steps), replay=replay)
    if privacy.source == "secure":
        source = SecureSource()
    law = step_law(plans, sampler, privacy)
    if privacy.noiseless or not plans:
        return Channel(privacy, plans, sampler, source, Account(sampler, steps=steps), law=law, replay=replay)

    delta = privacy.resolved_delta(sampler.n)
    prior = read_header(ledger_path) if resume and ledger_path is not None else None
    if law.per_participation and isinstance(sampler, BoundFixed):
        sampler = replace(sampler, max_uses=_cap(sampler, privacy, plans, law, delta, steps, prior))
    noise = GaussianNoise(_multiplier(sampler, privacy, plans, law, delta, steps, prior))
    event = step_event((noise.multiplier,) * len(plans), sampler, law, privacy.accountant)
    _check_first_step(privacy, noise, event, delta)
    seeded = privacy.source == "seeded"
    ledger = Ledger(
        ledger_path,
        _header(privacy, plans, sampler, noise, delta),
        fingerprint=fingerprint,
        replays_free=seeded,
        clients=sampler.n if law.per_participation else None,
        resume=resume,
    )
    account = Account(
        sampler,
        steps=steps,
        event=event,
        delta=delta,
        budget=privacy.epsilon,
        ledger=ledger,
        replays_free=seeded,
        per_participation=law.per_participation,
        block=block if block is not None else (16 if seeded else 4),
    )
    where = ledger_path.name if ledger_path is not None else "in memory only: a crash forgets what was spent"
    return Channel(privacy, plans, sampler, source, account, law=law, noise=noise, ledger_name=where, replay=replay)


def _header(
    privacy: ClientPrivacy,
    plans: tuple[ReleasePlan, ...],
    sampler: BoundSampler,
    noise: GaussianNoise,
    delta: float,
) -> dict[str, Any]:
    """What a resumed ledger must agree on, and where it finds its noise."""
    return {
        "account": "global",
        "privacy": asdict(privacy),
        "delta": delta,
        "sampler": sampler.describe(),
        "max_uses": getattr(sampler, "max_uses", None),
        "noise_multiplier": noise.multiplier,
        "releases": [[plan.name, plan.dimension, plan.stateful] for plan in plans],
    }


def _check_first_step(privacy: ClientPrivacy, noise: GaussianNoise, event: StepEvent, delta: float) -> None:
    budget = privacy.epsilon
    if budget is not None and epsilon(event.event, 1, delta, accountant=event.accountant) > budget:
        raise ConfigError(
            f"ClientPrivacy: noise_multiplier {noise.multiplier:g} spends more than epsilon = {budget:g} in "
            f"one step at delta = {delta:g}. Raise noise_multiplier or epsilon, or leave the former out."
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


def _cap(
    sampler: BoundFixed,
    privacy: ClientPrivacy,
    plans: tuple[ReleasePlan, ...],
    law: SamplingLaw,
    delta: float,
    steps: int,
    prior: dict[str, Any] | None,
) -> int:
    """Hard cap on the participations of one client; within the budget where the noise is fixed."""
    if prior is not None and isinstance(prior.get("max_uses"), int):
        return int(prior["max_uses"])
    cap = sampler.max_uses if sampler.max_uses is not None else default_cap(steps, sampler.probability)
    if privacy.noise_multiplier is not None and privacy.epsilon is not None:
        event = step_event((privacy.noise_multiplier,) * len(plans), sampler, law, privacy.accountant)
        fitting = largest_uses(event.event, privacy.epsilon, delta, accountant=event.accountant)
        return max(1, min(cap, fitting))
    return cap


def _multiplier(
    sampler: BoundSampler,
    privacy: ClientPrivacy,
    plans: tuple[ReleasePlan, ...],
    law: SamplingLaw,
    delta: float,
    steps: int,
    prior: dict[str, Any] | None,
) -> float:
    if prior is not None and isinstance(prior.get("noise_multiplier"), float):
        return float(prior["noise_multiplier"])
    if privacy.noise_multiplier is not None:
        return float(privacy.noise_multiplier)
    assert privacy.epsilon is not None
    uses = getattr(sampler, "max_uses", None) if law.per_participation else steps
    return calibrate_noise(
        sampler,
        law,
        target=float(privacy.epsilon),
        delta=delta,
        uses=int(uses or steps),
        releases=len(plans),
        accountant=privacy.accountant,
    )
