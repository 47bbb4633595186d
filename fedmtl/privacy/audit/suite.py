"""All checks of one channel, with one level for the whole."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import partial

from ..._check import one_of, positive_int
from .canary import canaries
from .charges import charges
from .findings import Finding, skipped
from .freshness import fresh_elsewhere, freshness
from .grid import on_public_grids
from .noise import noise_laws
from .play import gathered
from .rows import row_charges, row_claims, row_freshness, row_noise_law, row_sensitivity, rows_noise
from .sampler import beside_noise, cohorts, subsets
from .sensitivity import exact_sums, sensitivity
from .setup import Claims, Setup
from .stated import stated_figures
from .statistics import auditor, seeds

CHECKS = (
    "noise law",
    "freshness",
    "sensitivity",
    "canary",
    "sampler",
    "charges",
    "grid",
    "exact sum",
    "transcript",
    "independence",
)
"""Kinds of checks; the last two need the algorithm: :func:`fedmtl.trainer.audit.suite.transcript` and
:func:`fedmtl.trainer.audit.independence.independence`. So do the sensitivity of first releases and the charge of an
early stop: :mod:`fedmtl.trainer.audit.runs`."""


@dataclass(frozen=True, kw_only=True)
class Effort:
    """How much is drawn, and which checks run.

    Args:
        noise: numbers of noise of every release, at least; more where four steps have more.
        canaries: trials of each canary game, at least; up to 25 times more where the noise is large.
        cohorts: cohorts drawn.
        processes: also compare with the noise of a forked process and of a restored run.
        checks: kinds of checks.
    """

    noise: int = 2_000_000
    canaries: int = 20_000
    cohorts: int = 1000
    processes: bool = True
    checks: tuple[str, ...] = CHECKS

    def __post_init__(self) -> None:
        positive_int(self, noise=self.noise, canaries=self.canaries, cohorts=self.cohorts)
        for check in self.checks:
            one_of(self, CHECKS, checks=check)


def audit_channel(setup: Setup, *, seed: int = 0, effort: Effort | None = None) -> list[Finding]:
    """Make every check of the release path of a run, except those that need the algorithm.

    Args:
        setup: how the run opens its channel.
        seed: of the audit; in secure mode the run's own coins come from the operating system all the same.
        effort: how much is drawn.

    Returns:
        The findings, in the order of the checks.
    """
    effort = effort or Effort()
    claims = Claims(setup, setup.open(seed))
    if not claims and setup.gradients is not None:
        return [skipped("release path", "no noise is claimed: epsilon is infinite")]
    findings: list[Finding] = []
    published = any(claims.of(name).kind == "wishart" for name in claims.names) if setup.gradients is None else False
    asked = set(effort.checks)
    if not claims:
        why = "nothing is released" if not setup.releases else "no noise is claimed: epsilon is infinite"
        findings += [skipped(kind, why) for kind in ("noise law", "freshness", "canary", "charges") if kind in asked]
        asked &= {"sensitivity", "sampler"}
    if published:
        why = "the published law is not one of independent coordinates"
        findings += [skipped(kind, why) for kind in ("noise law", "freshness") if kind in asked]
        asked -= {"noise law", "freshness", "grid"}
    if {"noise law", "freshness"} & asked:
        noise = gathered(setup, claims, next(seeds(seed, "noise", 1)), effort.noise)
        if "noise law" in asked:
            findings += noise_laws(setup, noise)
        if "freshness" in asked:
            findings += freshness(setup, claims, noise, seed, processes=effort.processes)
    if "sensitivity" in asked:
        findings += sensitivity(setup, claims, seed, auditor(seed, "sensitivity"))
    if "canary" in asked:
        findings += canaries(setup, claims, seed, effort.canaries)
    if "sampler" in asked:
        if setup.gradients is not None:
            findings += subsets(setup, claims, seed, effort.cohorts)
        else:
            claim = claims.of(claims.names[0]) if claims else None
            findings += cohorts(setup, claim, seed, effort.cohorts)
        if claims and not published:
            findings += beside_noise(setup, claims, seed, effort.cohorts)
    if "charges" in asked:
        findings += [*charges(setup, claims, seed), *stated_figures(setup, claims, seed)]
    if "grid" in asked:
        findings += on_public_grids(setup, claims, seed)
    if "exact sum" in effort.checks:
        findings += exact_sums(setup, claims, seed, auditor(seed, "exact sums"))
    return [*findings, *_audit_rows(replace(setup, rows=True), seed, effort)]


def _audit_rows(setup: Setup, seed: int, effort: Effort) -> list[Finding]:
    """Make the checks of noise that clients add to their own rows, where releases have it."""
    if setup.gradients is not None or all(plan.rows is None for plan in setup.releases):
        return []
    claims = row_claims(setup, setup.open(seed))
    findings: list[Finding] = []
    if not claims:
        return findings
    if "noise law" in effort.checks:
        findings += row_noise_law(setup, claims, seed, effort.noise)
    if "freshness" in effort.checks:
        first, second = seeds(seed, "rows/channels", 2)
        findings += row_freshness(setup, claims, first)
        sample = partial(rows_noise, setup, claims)
        findings += fresh_elsewhere(setup, sample, first, second, 2, processes=effort.processes)
    if "sensitivity" in effort.checks:
        findings += row_sensitivity(setup, claims, seed)
    if "charges" in effort.checks:
        findings += row_charges(setup, claims, seed)
    return findings
