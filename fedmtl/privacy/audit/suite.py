"""All checks of one channel, with one level for the whole."""

from __future__ import annotations

from dataclasses import dataclass

from ..._check import positive, positive_int
from .canary import canaries_composed, canaries_per_release
from .charges import charges
from .cohorts import cohorts
from .findings import Finding, skipped
from .noise import fresh_names, fresh_steps, fresh_within, noise_law, standardized
from .processes import fresh_forks, fresh_objects, fresh_restores
from .sensitivity import sensitivity
from .setup import Claim, Setup, claims_of, released
from .statistics import auditor, seeds


@dataclass(frozen=True, kw_only=True)
class Effort:
    """How much is drawn.

    Args:
        noise: numbers of noise of every release, at least; more where one step has more.
        canaries: trials of each canary game.
        cohorts: cohorts drawn.
        forks: also compare with the noise of a forked process and of a restored run.
        accounting: also run the checks of the accountant, which are deterministic.
        alpha: level of every statistical finding. An audit has about 25 of them, so at 1e-6 the level of the whole
            is below 3e-5: a false alarm in 1,000 audits has probability at most 3 %.
    """

    noise: int = 200_000
    canaries: int = 4000
    cohorts: int = 600
    forks: bool = True
    accounting: bool = True
    alpha: float = 1e-6

    def __post_init__(self) -> None:
        positive_int(self, noise=self.noise, canaries=self.canaries, cohorts=self.cohorts)
        positive(self, alpha=self.alpha)


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
    channel = setup.open(seed)
    claims = claims_of(setup, channel)
    findings: list[Finding] = []
    if claims:
        findings += _noise(setup, claims, seed, effort)
        findings += sensitivity(setup, claims, seed, auditor(seed, "sensitivity"))
        coins = auditor(seed, "canary")

        def seeds_for(purpose: str, count: int) -> list[int]:
            return seeds(seed, purpose, count)

        findings += canaries_per_release(setup, claims, seeds_for, effort.canaries, effort.alpha, coins)
        findings.append(canaries_composed(setup, claims, seeds_for, effort.canaries, effort.alpha, coins))
    else:
        why = "nothing is released" if not setup.plans else "no noise is claimed: epsilon is infinite"
        findings += [skipped(check, why) for check in ("noise law", "freshness", "sensitivity", "canary", "charges")]
    one, two = seeds(seed, "cohorts", 2)
    claim = next(iter(claims.values()), None)
    findings += cohorts(setup, claim, (one, two), effort.cohorts, effort.alpha, auditor(seed, "cohorts"))
    if claims and effort.accounting:
        findings += charges(setup, claims, seed)
    return findings


def _noise(setup: Setup, claims: dict[str, Claim], seed: int, effort: Effort) -> list[Finding]:
    smallest = min(plan.dimension for plan in setup.plans)
    wanted = max(4, -(-effort.noise // smallest))
    steps = min(setup.steps, wanted)
    first, second = seeds(seed, "noise", 2)
    raw = released(setup.open(first), setup, start=0, stop=steps)
    noise = {name: standardized(raw[name], claim) for name, claim in claims.items()}
    findings: list[Finding] = []
    for name in claims:
        parts = setup.parts(noise[name].shape[1])
        findings += noise_law(name, noise[name], parts, effort.alpha)
    for name in claims:
        some = noise[name][:64]
        findings += [fresh_steps(name, some), fresh_within(name, some, setup.parts(some.shape[1]))]
    findings += fresh_names(noise)
    few = max(2, min(steps, 32))
    findings += fresh_objects(setup, claims, first, second, few)
    if effort.forks:
        findings += fresh_forks(setup, claims, first, few)
        findings += fresh_restores(setup, claims, first, few)
    return findings
