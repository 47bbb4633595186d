"""Repetitions of a run in rounds: one channel, R independent noises, each repetition with its own budget."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

from dp_accounting import dp_event

from .._check import positive_int
from ..errors import ConfigError
from .account import Account, Cost
from .accounting.calibration import calibrate_multiplier
from .accounting.composition import StepEvent
from .allocation import steps_of, uses_of, whole_run
from .channel import Channel, Recording
from .ledger import Ledger
from .noise.sources import SeededSource
from .quantile import QuantileClip
from .release import ReleasePlan, step_law
from .row_noise import bind_rows, refuse_rows
from .samplers import BoundFull, BoundSampler
from .settings import ClientPrivacy, Privacy


def open_replicates(
    privacy: Privacy | Sequence[ClientPrivacy] | None,
    plans: tuple[ReleasePlan, ...],
    sampler: BoundSampler,
    seed: int,
    steps: int,
    replicates: int,
    ledger_path: Path | None,
    replay: Recording | None,
    notes: tuple[str, ...],
) -> Channel:
    """As :func:`~fedmtl.privacy.open_channel` for R repetitions; replicate r = 0 has the noise of a single run.

    Raises:
        ConfigError: a run that is kept or secure, a schedule other than full participation, or settings that differ in
            more than epsilon.
    """
    positive_int("open_channel", replicates=replicates)
    settings = _settings(privacy, replicates)
    if ledger_path is not None or any(one.source != "seeded" for one in settings):
        raise ConfigError(f"{replicates} repetitions are a simulation: they need source='seeded' and no folder.")
    if not isinstance(sampler, BoundFull):
        raise ConfigError(
            f"Repetitions in rounds need FullParticipation(), where all have the same cohort; not {sampler.describe()}."
        )
    sources = tuple(SeededSource(seed, r) for r in range(replicates))
    first = max(settings, key=lambda one: (not one.noiseless, one.epsilon or 0.0), default=None)  # loudest in reports
    law = None if first is None else step_law(plans, sampler, first)
    if first is None or law is None or first.noiseless or not plans:
        refuse_rows(plans)
        account = Account(sampler, steps=steps)
        channel = Channel(first, plans, sampler, sources[0], account, law=law, replay=replay)
        channel.replicate(sources, None)
    else:
        delta = first.resolved_delta(sampler.n)
        step = steps_of(plans, sampler, law, first)
        event, uses = whole_run(plans, step, steps)
        multipliers = tuple(_multiplier(one, event, delta, uses) for one in settings)
        silent = (StepEvent(dp_event.NonPrivateDpEvent(), first.accountant),) * steps
        entries = tuple(uses_of(plans, step, z, steps) if z else silent for z in multipliers)
        account = Account(
            sampler,
            steps=steps,
            cost=Cost(delta, entries, refuted=law.refuted),
            ledger=Ledger(None, {}, fingerprint="", replays_free=True),
        )
        channel = Channel(
            first,
            plans,
            sampler,
            sources[0],
            account,
            law=law,
            noise_multiplier=max(multipliers),
            ledger_name="in memory only",
            replay=replay,
        )
        channel.replicate(sources, multipliers)
        channel.rows = bind_rows(plans, channel.releases, delta)
    channel.notes = notes
    return channel


def _multiplier(privacy: ClientPrivacy, event: Callable[[float], StepEvent], delta: float, uses: int) -> float:
    """Noise scale over sensitivity of one repetition; 0 without noise."""
    if privacy.noiseless:
        return 0.0
    if privacy.noise_multiplier is not None:
        return float(privacy.noise_multiplier)
    assert privacy.epsilon is not None
    return calibrate_multiplier(event, target=float(privacy.epsilon), delta=delta, uses=uses)


def _settings(privacy: Privacy | Sequence[ClientPrivacy] | None, replicates: int) -> tuple[ClientPrivacy, ...]:
    """The settings of each repetition; none without privacy."""
    if privacy is None:
        return ()
    settings = tuple(privacy) if isinstance(privacy, Sequence) else (privacy,) * replicates
    if len(settings) != replicates:
        raise ConfigError(f"{len(settings)} privacy settings were given for {replicates} repetitions; give one each.")
    for one in settings:
        if not isinstance(one, ClientPrivacy) or isinstance(one.clip_norm, QuantileClip):
            raise ConfigError("Repetitions in rounds need ClientPrivacy(...) with a number as clip_norm.")
        if one.noise_multiplier is not None and one.epsilon is not None:
            raise ConfigError("Repetitions take epsilon or noise_multiplier, not both: none of them stops early.")
    same = [one for one in settings if isinstance(one, ClientPrivacy)]
    if len({replace(one, epsilon=1.0, noise_multiplier=None) for one in same}) > 1:
        raise ConfigError("The privacy settings of repetitions may differ in epsilon (or noise_multiplier) alone.")
    return tuple(same)
