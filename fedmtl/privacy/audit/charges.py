"""Checks of the accounting: what is charged, and that the figures move the right way. All deterministic."""

from __future__ import annotations

import itertools
import json
import math
import tempfile
from collections import Counter
from pathlib import Path
from typing import Any

from dp_accounting import dp_event

from ...errors import BudgetExhausted, PrivacyError
from ..accounting.composition import epsilon
from ..channel import Channel
from .findings import Finding, exact, skipped, too_large
from .setup import Claim, Setup, charged_events, multipliers_of, silence, uses_differ

_SLACK = 1 + 1e-6
_DOUBLINGS = (1, 2, 4)


def charges(setup: Setup, claims: dict[str, Claim], seed: int, *, thorough: bool = True) -> list[Finding]:
    """All checks of the accounting.

    Args:
        setup: of the run.
        claims: on its releases.
        seed: of the channels.
        thorough: also evaluate the accountant at other rounds, sampling rates and noise (seconds).
    """
    claim = next(iter(claims.values()))
    findings = [_ledger(setup, claim, seed), _event(setup, claims, seed), *_caps(setup, claim, seed)]
    if thorough:
        findings += [*_monotone(setup, claim), _accountants(setup, claim, seed)]
    return findings


def _ledger(setup: Setup, claim: Claim, seed: int) -> Finding:
    """Read back from the file: every step that released was reserved before, and nothing else stays charged."""
    check = "charges: steps in the ledger"
    wrong: list[str] = []
    planned = min(setup.steps, 20)
    participations: Counter[int] = Counter()
    begun = 0
    with tempfile.TemporaryDirectory(prefix="fedmtl-audit-") as folder:
        path = Path(folder) / "ledger.jsonl"
        channel = setup.open(seed, ledger=path)
        rows = silence(setup)
        try:
            for step in range(planned):
                try:
                    ranks = channel.draw(step)
                    channel.begin(step, ranks)
                except BudgetExhausted:
                    break
                if step not in _reserved(path):
                    wrong.append(f"step {step} began without a reservation on the disk")
                for plan in channel.plans:
                    channel.release(plan.name, *rows(step, plan.name, ranks))
                participations.update(ranks.tolist())
                begun += 1
        finally:
            channel.close()
        kept = _reserved(path)
    if sorted(kept) != list(range(begun)):
        wrong.append(f"{begun} steps began, and steps {sorted(kept)[:3]}... ({len(kept)}) stay charged")
    uses = max(participations.values(), default=0) if claim.per_participation else begun
    if channel.uses != uses:
        wrong.append(f"{uses} uses happened, the account has {channel.uses}")
    releases = channel.report.releases
    if releases != begun * len(setup.plans):
        wrong.append(f"{begun * len(setup.plans)} releases happened, the report has {releases}")
    return exact(check, len(wrong), "; ".join(wrong) or f"{begun} steps begun, reserved and charged")


def _reserved(path: Path) -> list[int]:
    """Charged steps of a ledger file, read by the audit's own reader."""
    steps: list[int] = []
    for text in path.read_text(encoding="utf-8").splitlines():
        line = json.loads(text)
        if line["kind"] == "reserve":
            steps += range(line["first"], line["end"])
        elif line["kind"] == "close":
            for step in line["unused"]:
                steps.remove(step)
    return steps


def _event(setup: Setup, claims: dict[str, Claim], seed: int) -> Finding:
    """The typed releases and the event that is charged agree on noise, sensitivity, sampling and denominator."""
    channel, wrong = setup.open(seed), []
    for name, claim in claims.items():
        release = channel.releases[name]
        plan = next(plan for plan in setup.plans if plan.name == name)
        for use in range(plan.uses if uses_differ(setup) else 1):
            noise = release.weighted(plan.weight(use)).noise
            claimed = multipliers_of(setup, channel, use)[name] if uses_differ(setup) else claim.multiplier
            if noise is None or not math.isclose(noise.multiplier, claimed, rel_tol=1e-9):
                wrong.append(f"{name} has noise {noise} in use {use}, the event a multiplier of {claimed:.6g}")
        if not math.isclose(release.sensitivity, claim.sensitivity, rel_tol=1e-12):
            wrong.append(
                f"{name} has sensitivity {release.sensitivity:.6g}, {claim.relation} means {claim.sensitivity:.6g}"
            )
        needed = claim.norm if claim.form == "vector" else "l2"
        if release.clip.norm != needed:
            wrong.append(f"{name} bounds the {release.clip.norm} norm, {claim.kind} noise needs {needed}")
        if release.denominator != claim.denominator or channel.denominator != claim.denominator:
            wrong.append(f"{name} divides by {release.denominator:g}, the expected cohort is {claim.denominator:g}")
    claim = next(iter(claims.values()))
    q = claim.denominator / setup.sampler.n
    if claim.sampled is not None and not math.isclose(claim.sampled, q, rel_tol=1e-12):
        wrong.append(f"the event samples with q = {claim.sampled:.6g}, the cohort is {q:.6g} of the clients")
    return exact(
        "charges: event of a release", len(wrong), "; ".join(wrong) or "noise, sensitivity, sampling, denominator"
    )


def _caps(setup: Setup, claim: Claim, seed: int) -> list[Finding]:
    """Steps go on until they are refused: never past the budget or a client's cap, and a step only once."""
    channel, rows = setup.open(seed), silence(setup)
    budget, delta = setup.privacy.epsilon, channel.delta
    participations: Counter[int] = Counter()
    step, refused, again, limit = 0, False, 0, 4 * setup.steps + 64
    cap = channel.sampler.cap
    while step < limit:
        try:
            ranks = channel.draw(step)
            channel.begin(step, ranks)
        except BudgetExhausted:
            refused = True
            break
        if step % 16 == 0:
            again += _begins_again(channel, step, ranks)
            for plan in channel.plans:
                again += _releases_twice(channel, plan.name, rows(step, plan.name, ranks))
        participations.update(ranks.tolist())
        step += 1
    uses = max(participations.values(), default=0) if claim.per_participation else step
    findings = [exact("charges: a step begins and releases once", again, f"second times accepted, in {step} steps")]
    if not isinstance(budget, (int, float)) or delta is None:
        reason = "no budget is set"
        findings.append(skipped("charges: budget", reason))
    else:
        if uses_differ(setup):
            spent = epsilon(charged_events(channel, uses), 1, delta, accountant=claim.accountant)
        else:
            spent = epsilon(claim.event, uses, delta, accountant=claim.accountant)
        text = f"epsilon of the {uses} uses that were allowed; " + ("then refused" if refused else "never refused")
        findings.append(too_large("charges: budget", spent, budget * _SLACK, text))
    if cap is not None:
        most = max(participations.values(), default=0)
        findings.append(too_large("charges: cap on uses", most, cap, f"uses of one client in {step} steps"))
    return findings


def _begins_again(channel: Channel, step: int, ranks: Any) -> int:
    try:
        channel.begin(step, channel.draw(step))
    except (PrivacyError, BudgetExhausted):
        return 0
    return 1


def _releases_twice(channel: Channel, name: str, sent: tuple[Any, Any]) -> int:
    try:
        channel.release(name, *sent)
        channel.release(name, *sent)
    except PrivacyError:
        return 0
    return 1


def _monotone(setup: Setup, claim: Claim) -> list[Finding]:
    """Epsilon grows with the rounds and the sampling rate, and falls with the noise."""
    delta = setup.delta
    base = max(1, setup.steps // 4)
    rounds = [epsilon(claim.event, base * k, delta, accountant=claim.accountant) for k in _DOUBLINGS]
    falls = sum(b < a for a, b in itertools.pairwise(rounds))
    findings = [exact("charges: monotone in rounds", falls, _shown("rounds", [base * k for k in _DOUBLINGS], rounds))]
    if claim.sampled is not None and claim.largest is None:
        rates = [claim.sampled * f for f in (0.25, 0.5, 1.0)]
        at_q = [epsilon(_with_rate(claim.event, q), base, delta, accountant=claim.accountant) for q in rates]
        falls = sum(b < a for a, b in itertools.pairwise(at_q))
        findings.append(exact("charges: monotone in the sampling rate", falls, _shown("q", rates, at_q)))
    if claim.kind == "gaussian":
        noise = [claim.multiplier * f for f in (4.0, 2.0, 1.0)]
        at_z = [epsilon(_with_noise(claim.event, f), base, delta, accountant=claim.accountant) for f in (4.0, 2.0, 1.0)]
        falls = sum(b < a for a, b in itertools.pairwise(at_z))
        findings.append(exact("charges: monotone in the noise", falls, _shown("z", noise, at_z)))
    return findings


def _accountants(setup: Setup, claim: Claim, seed: int) -> Finding:
    check = "charges: privacy loss distribution against Renyi"
    if claim.kind != "gaussian" or claim.accountant != "pld" or claim.largest is not None:
        return skipped(check, "one of the two accountants does not support the event")
    delta = setup.delta
    cap = setup.open(seed).sampler.cap if claim.per_participation else None
    uses = int(cap or setup.steps)
    tight = epsilon(claim.event, uses, delta, accountant="pld")
    loose = epsilon(claim.event, uses, delta, accountant="rdp")
    return too_large(check, tight, loose * _SLACK, f"epsilon of {uses} uses")


def _with_rate(event: Any, q: float) -> Any:
    return dp_event.PoissonSampledDpEvent(q, event.event)


def _with_noise(event: Any, factor: float) -> Any:
    """The event with ``factor`` times the noise."""
    if isinstance(event, dp_event.GaussianDpEvent):
        return dp_event.GaussianDpEvent(event.noise_multiplier * factor)
    if isinstance(event, dp_event.PoissonSampledDpEvent):
        return dp_event.PoissonSampledDpEvent(event.sampling_probability, _with_noise(event.event, factor))
    if isinstance(event, dp_event.TruncatedSubsampledGaussianDpEvent):
        return dp_event.TruncatedSubsampledGaussianDpEvent(
            event.dataset_size, event.sampling_probability, event.truncated_batch_size, event.noise_multiplier * factor
        )
    return dp_event.SampledWithoutReplacementDpEvent(
        event.source_dataset_size, event.sample_size, _with_noise(event.event, factor)
    )


def _shown(name: str, at: list[Any], values: list[float]) -> str:
    return ", ".join(f"{name} {x:.4g}: {value:.4g}" for x, value in zip(at, values, strict=True))
