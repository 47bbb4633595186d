"""All checks of one channel, with one level for the whole."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

from .._check import Checked, Count, one_of
from .charges import charges
from .claim import ROWS
from .findings import Finding, skipped
from .freshness import freshness
from .grid_check import on_public_grids
from .noise_check import noise_laws
from .play import gathered
from .sampler import beside_noise, sampler
from .samples import Sample
from .sensitivity import exact_sums, sensitivity
from .setup import MOST_ELEMENTS, Setup
from .statistics import auditor, seeds

CHECKS = (
    "noise law",
    "freshness",
    "sensitivity",
    "sampler",
    "charges",
    "grid",
    "exact sum",
    "transcript",
    "independence",
)
"""Kinds of checks; the last two need the algorithm: :func:`fedmtl.audit.transcript.transcript` and
:func:`fedmtl.audit.independence.independence`. So does the charge of an early stop:
:mod:`fedmtl.audit.early_stop`."""

# of noise that clients add to their own rows
_OF_ROWS = ("noise law", "freshness", "sensitivity", "charges", "grid")
_LEAST = 100  # releases of pure noise, where these have many numbers


@dataclass(frozen=True, kw_only=True)
class Effort(Checked):
    """Sizes of the samples of an audit, and the checks that run.

    Args:
        noise: numbers of noise of every release, at least; more if four steps have more.
        cohorts: cohorts drawn; of noise twice as many releases, unless these have too many numbers.
        checks: kinds of checks.

    Example:
        >>> from fedmtl.audit import Effort
        >>> Effort(noise=10_000, checks=("charges",)).checks
        ('charges',)
    """

    noise: Count = 2_000_000
    cohorts: Count = 1000
    checks: tuple[str, ...] = CHECKS

    def __post_init__(self) -> None:
        for check in self.checks:
            one_of(self, CHECKS, checks=check)


def audit_channel(setup: Setup, *, seed: int = 0, effort: Effort | None = None) -> list[Finding]:
    """Makes every check of the release path of a run, except those that need the algorithm.

    Args:
        setup: the facts by which the run opens its channel.
        seed: of the audit; in secure mode the run's own coins come from the operating system all
            the same.
        effort: sizes of the samples, and the checks that run.

    Returns:
        The findings, in the order of the checks.

    Example:
        >>> from fedmtl import ClientPrivacy, FullParticipation
        >>> from fedmtl.audit import Effort, Setup, any_refuted, audit_channel
        >>> from fedmtl.privacy import ReleasePlan
        >>> setup = Setup(
        ...     privacy=ClientPrivacy(clip_norm=1.0, epsilon=8.0, delta=1e-5),
        ...     plans=(ReleasePlan(name="update", dimension=3),),
        ...     schedule=FullParticipation().bind(10),
        ...     steps=2,
        ... )
        >>> any_refuted(audit_channel(setup, effort=Effort(noise=10_000, checks=("charges",))))
        False
    """
    effort = effort or Effort()
    findings = _audited(setup, seed, effort)
    own = replace(effort, checks=tuple(kind for kind in effort.checks if kind in _OF_ROWS))
    for plan in setup.releases:
        if plan.rows is not None and setup.gradients is None and not setup.privacy.noiseless:
            of = f"{ROWS}{plan.name}"
            made = _audited(replace(setup, rows=plan.name), seed, own)
            findings += [
                each if of in each.check else replace(each, check=f"{each.check}, {of}")
                for each in made
            ]
    return findings


def _audited(setup: Setup, seed: int, effort: Effort) -> list[Finding]:
    claims = setup.claims
    asked = set(effort.checks)
    without = dict[str, str]()
    sums = setup.gradients is None
    if not claims and not sums:
        return [skipped("release path", "no noise is claimed: epsilon is infinite")]
    if not claims:
        why = "no noise is claimed: epsilon is infinite"
        if not setup.releases:
            why = "nothing is released"
        without = dict.fromkeys(("noise law", "freshness", "sampler", "charges", "grid"), why)
    elif sums and claims.refuted is not None:
        why = "the published law is not one of independent coordinates"
        without = dict.fromkeys(("noise law", "freshness", "grid"), why)
    noise: dict[str, Sample] = {}
    if "noise law" not in without and {"noise law", "freshness", "sampler"} & asked:
        size = min(claims.of(name).size for name in claims.names)
        releases = min(2 * effort.cohorts, max(_LEAST, MOST_ELEMENTS // size))
        noise = gathered(setup, next(seeds(seed, "noise", 1)), max(effort.noise, releases * size))
    checks: dict[str, Callable[[], list[Finding]]] = {
        "noise law": lambda: noise_laws(setup, noise),
        "freshness": lambda: freshness(setup, noise, seed),
        "sensitivity": lambda: sensitivity(setup, seed, auditor(seed, "sensitivity")),
        "sampler": lambda: sampler(setup, seed, effort.cohorts) + beside_noise(setup, noise),
        "charges": lambda: charges(setup, seed),
        "grid": lambda: on_public_grids(setup, seed),
        "exact sum": lambda: exact_sums(setup, seed, auditor(seed, "exact sums")),
    }
    findings: list[Finding] = []
    for kind in [kind for kind in checks if kind in asked]:
        if kind in without:
            findings += [skipped(kind, without[kind])]
        else:
            findings += checks[kind]()
    return findings
