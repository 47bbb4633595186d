"""All checks of one channel, with one level for the whole."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from functools import partial

import numpy as np

from ..._check import one_of, positive, positive_int
from ..channel import Channel
from .canary import canaries_composed, canaries_per_release, shortened
from .charges import charges
from .cohorts import cohorts
from .findings import Finding, skipped
from .grid import channel_grid, owner_grid, record_grid
from .noise import fresh_names, fresh_steps, fresh_within, noise_law, standardized
from .owner_charges import owner_charges
from .owner_noise import owner_freshness, owner_noise, owner_noise_law
from .owner_sensitivity import bounded_sensitivity, owner_sensitivity
from .owner_setup import ACTIVATIONS, OwnerSetup, channel_claims
from .owner_subsamples import owner_subsamples
from .processes import Sample, fresh_forks, fresh_objects, fresh_restores
from .records import (
    gradient_noise,
    owner_claims,
    owners_of,
    record_canaries,
    record_charges,
    record_sensitivity,
    record_subsets,
    training_freshness,
)
from .rows import row_charges, row_claims, row_freshness, row_noise_law, row_sensitivity, rows_noise
from .sensitivity import sensitivity
from .setup import Claim, Setup, claims_of, clip_claims, released
from .stated import stated_channel, stated_owners
from .statistics import auditor, seeds

CHECKS = ("noise law", "freshness", "sensitivity", "canary", "sampler", "charges", "grid", "transcript", "independence")
"""Kinds of checks; the last two need the algorithm: :func:`fedmtl.trainer.audit.suite.transcript` and
:func:`fedmtl.trainer.audit.independence.independence`. So do the sensitivity of first releases and the charge of an
early stop: :mod:`fedmtl.trainer.audit.runs`."""

_CHANNELS = 50  # at most opened for more noise
_STEPS = 96  # in which releases of one step are compared


@dataclass(frozen=True, kw_only=True)
class Effort:
    """How much is drawn, and which checks run.

    Args:
        noise: numbers of noise of every release, at least; more where four steps have more.
        canaries: trials of each canary game, at least; up to 25 times more where the noise is large.
        cohorts: cohorts drawn.
        processes: also compare with the noise of a forked process and of a restored run.
        checks: kinds of checks.
        alpha: level of every statistical finding. An audit has about 15 of them, and correlations above 6 / sqrt(d)
            have probability 2e-9 for each of some thousand pairs, so at 1e-6 the level of the whole is below 5e-5: a
            false alarm in 1,000 audits has probability at most 5 %.
    """

    noise: int = 2_000_000
    canaries: int = 20_000
    cohorts: int = 1000
    processes: bool = True
    checks: tuple[str, ...] = CHECKS
    alpha: float = 1e-6

    def __post_init__(self) -> None:
        positive_int(self, noise=self.noise, canaries=self.canaries, cohorts=self.cohorts)
        positive(self, alpha=self.alpha)
        for check in self.checks:
            one_of(self, CHECKS, checks=check)


def audit_channel(setup: Setup, *, seed: int = 0, effort: Effort | None = None) -> list[Finding]:
    """Every check of the release path of a run, except the transcript, which needs the algorithm.

    Args:
        setup: how the run opens its channel.
        seed: of the audit; in secure mode the run's own coins come from the operating system all the same.
        effort: how much is drawn.

    Returns:
        The findings, in the order of the checks.
    """
    effort = effort or Effort()
    if setup.records:
        return _audit_records(setup, seed, effort)
    claims = claims_of(setup, setup.open(seed))
    findings: list[Finding] = []
    if not claims:
        why = "nothing is released" if not setup.plans else "no noise is claimed: epsilon is infinite"
        findings += [
            skipped(kind, why) for kind in ("noise law", "freshness", "canary", "charges") if kind in effort.checks
        ]
    published = any(claim.kind == "wishart" for claim in claims.values())
    if published:
        why = "the published law is not one of independent coordinates"
        findings += [skipped(kind, why) for kind in ("noise law", "freshness") if kind in effort.checks]
    if claims and not published and {"noise law", "freshness"} & set(effort.checks):
        findings += _noise(setup, claims, seed, effort)
    if "sensitivity" in effort.checks:
        findings += sensitivity(setup, claims or clip_claims(setup), seed, auditor(seed, "sensitivity"))
    if claims and "canary" in effort.checks:
        coins = auditor(seed, "canary")
        named = partial(seeds, seed)
        findings += canaries_per_release(shortened(setup), claims, named, effort.canaries, effort.alpha, coins)
        findings.append(canaries_composed(shortened(setup), claims, named, effort.canaries, effort.alpha, coins))
    if "sampler" in effort.checks:
        one, two = seeds(seed, "cohorts", 2)
        claim = next(iter(claims.values()), None)
        findings += cohorts(setup, claim, (one, two), effort.cohorts, effort.alpha, auditor(seed, "cohorts"))
    if claims and "charges" in effort.checks:
        findings += [*charges(setup, claims, seed), *stated_channel(setup, seed)]
    if claims and not published and "grid" in effort.checks:
        findings += channel_grid(setup, claims, seed, auditor(seed, "grid"))
    return [*findings, *_audit_rows(replace(setup, rows=True), seed, effort)]


def _audit_rows(setup: Setup, seed: int, effort: Effort) -> list[Finding]:
    """The checks of noise that clients add to their own rows, where releases have it."""
    claims = row_claims(setup, setup.open(seed)) if any(plan.rows is not None for plan in setup.plans) else {}
    findings: list[Finding] = []
    if not claims:
        return findings
    if "noise law" in effort.checks:
        findings += row_noise_law(setup, claims, seed, effort.noise, effort.alpha)
    if "freshness" in effort.checks:
        first, second = seeds(seed, "rows/channels", 2)
        findings += row_freshness(setup, claims, first)
        findings += fresh_elsewhere(setup, partial(rows_noise, setup, claims), first, second, 2, effort)
    if "sensitivity" in effort.checks:
        findings += row_sensitivity(setup, claims, seed)
    if "charges" in effort.checks:
        findings += row_charges(setup, claims, seed)
    return findings


def _audit_records(setup: Setup, seed: int, effort: Effort) -> list[Finding]:
    """The checks of gradients that leave single records; cohorts of owners are public and claim nothing."""
    claims = owner_claims(setup, setup.open(seed))
    if claims is None:
        return [skipped("release path", "no noise is claimed: epsilon is infinite")]
    findings: list[Finding] = []
    if {"noise law", "freshness"} & set(effort.checks):
        sample = partial(gradient_noise, setup, claims)
        first, second = seeds(seed, "noise", 2)
        dimension = owners_of(setup).dimension
        noise = _gathered(setup, sample, first, -(-effort.noise // dimension))
        parts = setup.parts(dimension)
        if "noise law" in effort.checks:
            findings += noise_law("gradients", noise, parts, effort.alpha)
        if "freshness" in effort.checks:
            findings += [fresh_steps("gradients", noise), *fresh_within("gradients", noise[:64], parts)]
            findings += training_freshness(setup, claims, first)
            findings += fresh_elsewhere(setup, sample, first, second, min(setup.steps, 4), effort)
    if "sensitivity" in effort.checks:
        findings.append(record_sensitivity(setup, claims, seed, auditor(seed, "sensitivity")))
    if "canary" in effort.checks:
        named = partial(seeds, seed)
        findings += record_canaries(setup, claims, named, effort.canaries, effort.alpha, auditor(seed, "canary"))
    if "sampler" in effort.checks:
        one, two = seeds(seed, "cohorts", 2)
        coins = auditor(seed, "cohorts")
        findings += record_subsets(setup, claims, (one, two), effort.cohorts, effort.alpha, coins)
    if "charges" in effort.checks:
        findings += [*record_charges(setup, claims, seed), *stated_channel(setup, seed)]
    if "grid" in effort.checks:
        findings += record_grid(setup, claims, seed, auditor(seed, "grid"))
    return findings


def audit_owners(setup: OwnerSetup, *, seed: int = 0, effort: Effort | None = None) -> list[Finding]:
    """Every check of the release path of a run whose owners act one at a time, except the transcript.

    Args:
        setup: how the run opens its channel.
        seed: of the audit.
        effort: how much is drawn; there are no cohorts, and no canary games.
    """
    effort = effort or Effort()
    claims = channel_claims(setup, setup.open(seed))
    if claims is None:
        return [skipped("release path", "no noise is claimed: epsilon is infinite")]
    findings: list[Finding] = []
    if "noise law" in effort.checks:
        findings += owner_noise_law(setup, claims, seed, effort.noise, effort.alpha)
    if "freshness" in effort.checks:
        first, second = seeds(seed, "noise", 2)
        findings += owner_freshness(setup, claims, first)
        steps = min(ACTIVATIONS, int(setup.open(first).caps.sum()), 4 * -(-128 // setup.dimension))
        findings += fresh_elsewhere(setup, partial(owner_noise, setup, claims), first, second, steps, effort)
    if "sensitivity" in effort.checks:
        findings.append(owner_sensitivity(setup, claims, seed, auditor(seed, "sensitivity")))
        findings.append(bounded_sensitivity(setup, claims, seed))
    if "canary" in effort.checks:
        findings.append(skipped("canary", "no games are played against owners who act one at a time"))
    if "sampler" in effort.checks:
        coins = auditor(seed, "subsamples")
        findings += owner_subsamples(setup, claims, seed, effort.cohorts, effort.alpha, coins)
    if "charges" in effort.checks:
        findings += [*owner_charges(setup, claims, seed), *stated_owners(setup, claims, seed)]
    if "grid" in effort.checks:
        findings += owner_grid(setup, claims, seed)
    return findings


def _gathered(setup: Setup, sample: Sample, seed: int, wanted: int) -> np.ndarray:
    """At least ``wanted`` rows of noise where the run has them, from as few rounds as give them."""
    few = min(setup.steps, 2)
    rows = sample(setup.open(seed), 0, few)["gradients"]
    if len(rows) < wanted and few < setup.steps:
        more = min(setup.steps, math.ceil(few * wanted / max(1, len(rows))))
        rows = sample(setup.open(seed), 0, more)["gradients"]
    return rows


def _noise(setup: Setup, claims: dict[str, Claim], seed: int, effort: Effort) -> list[Finding]:
    smallest = min(plan.size for plan in setup.plans)
    wanted = max(4, -(-effort.noise // smallest))
    steps = min(setup.steps, wanted)
    first, second = seeds(seed, "noise", 2)
    raw = released(setup.open(first), setup, start=0, stop=steps)
    noise = {name: standardized(raw[name], claim) for name, claim in claims.items()}
    findings: list[Finding] = []
    if "noise law" in effort.checks:
        more = [raw, *_more_noise(setup, seed, wanted - len(next(iter(raw.values()))))]
        for name in raw:
            sample = np.concatenate([found[name] for found in more])
            sample = standardized(sample, claims[name]) if name in claims else sample
            findings += noise_law(name, sample, setup.parts(sample.shape[1]), effort.alpha)
    if "freshness" not in effort.checks:
        return findings
    for name in claims:
        some = noise[name][:64]
        findings += [fresh_steps(name, noise[name]), *fresh_within(name, some, setup.parts(some.shape[1]))]
    together = [raw, *_more_noise(setup, seed, _STEPS - len(next(iter(raw.values()))))] if len(raw) > 1 else [raw]
    findings += fresh_names({name: np.concatenate([one[name] for one in together]) for name in raw})
    findings += fresh_elsewhere(setup, _sample_of(setup, claims), first, second, max(2, min(steps, 32)), effort)
    return findings


def _more_noise(setup: Setup, seed: int, wanted: int) -> list[dict[str, np.ndarray]]:
    """Releases of other channels, where one run has fewer steps than wanted."""
    found: list[dict[str, np.ndarray]] = []
    for other in seeds(seed, "noise/more", _CHANNELS):
        if wanted <= 0:
            break
        found.append(released(setup.open(other), setup, start=0, stop=min(setup.steps, wanted)))
        wanted -= max(1, len(next(iter(found[-1].values()))))
    return found


def _sample_of(setup: Setup, claims: dict[str, Claim]) -> Sample:
    def sample(channel: Channel, start: int, stop: int) -> dict[str, np.ndarray]:
        raw = released(channel, setup, start=start, stop=stop)
        return {name: standardized(raw[name], claim) for name, claim in claims.items()}

    return sample


def fresh_elsewhere(
    setup: Setup | OwnerSetup, sample: Sample, first: int, second: int, steps: int, effort: Effort
) -> list[Finding]:
    """Noise of another channel, of a forked process and of a restored run."""
    findings = fresh_objects(setup, sample, first, second, steps)
    if effort.processes:
        findings += fresh_forks(setup, sample, first, steps)
        findings += fresh_restores(setup, sample, first, steps)
    return findings
