"""Check 5, the sampler's law: cohorts are what the charged event says they are."""

from __future__ import annotations

import math

import numpy as np
from scipy import special, stats

from ..channel import Channel
from ..samplers import BoundCyclic, BoundFixed, BoundFull, BoundSampler
from .findings import LEVEL, Finding, exact, low_p
from .setup import Claim, Setup
from .statistics import auditor, from_binomial, from_discrete, from_hypergeometric, normal_p, seeds

_CLIENTS = 512  # clients whose pairs are examined
_LAGS = (1, 2, 3)


def cohorts(setup: Setup, claim: Claim | None, seed: int, draws: int) -> list[Finding]:
    """Sizes, fairness and independence across clients, rounds and channels.

    Poisson: sizes are binomial with the q of the event (cut at its largest). Fixed: of the exact size. In turn: without
    coins. Full: everybody, always.

    Args:
        setup: of the run.
        claim: on a release, or None where nothing is charged; then the sampler's own word is the claim.
        seed: of two channels; in secure mode they have the same one, which must not matter.
        draws: number of cohorts.
    """
    n, sampler, coins = setup.sampler.n, setup.sampler, auditor(seed, "cohorts")
    first, second = seeds(seed, "cohorts", 2)
    members = [_drawn(setup.open(one), draws) for one in (first, first if setup.secure else second)]
    wrong = sum(len(set(m.tolist())) != len(m) or bool(len(m) and (m.min() < 0 or m.max() >= n)) for m in members[0])
    findings = [exact("sampler: distinct clients", wrong, f"{draws} cohorts of {n} clients")]
    sizes = np.array([len(m) for m in members[0]])
    if isinstance(sampler, BoundCyclic) and (claim is None or claim.sampled is None):
        return [*findings, *_in_turn(members, n, sampler.cohort)]
    q = _claimed_probability(sampler, claim)
    if q is None:  # nothing random is claimed
        missing = int((sizes != n).sum())
        return [*findings, exact("sampler: everybody takes part", missing, f"cohorts without everybody, of {draws}")]
    fixed = isinstance(sampler, BoundFixed) and (claim is None or claim.sampled is None)
    both = q * (q * n - 1) / max(n - 1, 1) if fixed else q * q
    if fixed:
        size = round(q * n)
        findings.append(exact("sampler: exact size", int((sizes != size).sum()), f"cohorts that are not of {size}"))
    elif claim is not None and claim.largest is not None:
        law, largest = stats.binom(n, q), claim.largest
        below, full = law.cdf(sizes - 1), sizes == largest
        p = normal_p(from_discrete(below, np.where(full, 1 - below, law.pmf(sizes)), coins))
        findings.append(exact("sampler: largest size", int((sizes > largest).sum()), f"cohorts above {largest}"))
        findings.append(low_p("sampler: sizes", p, f"{draws} sizes of at most {largest}, mean {sizes.mean():.4g}"))
        cut = law.pmf(np.arange(largest + 1))
        cut[largest] += law.sf(largest)
        one, two = (cut * np.arange(largest + 1)).sum(), (cut * np.arange(largest + 1) * np.arange(-1, largest)).sum()
        q, both = one / n, two / (n * (n - 1))
    else:
        findings.append(binomial_sizes("sampler: sizes", members[0], n, q, coins))
    findings += drawn_law("sampler: ", members, n, q, both, coins, fixed=fixed, secure=setup.secure)
    return findings


def binomial_sizes(check: str, members: list[np.ndarray], n: int, q: float, coins: np.random.Generator) -> Finding:
    """Sizes of independent subsets: binomial."""
    sizes = np.array([len(m) for m in members])
    p = normal_p(from_binomial(sizes, n, q, coins))
    detail = f"{len(sizes)} sizes, mean {sizes.mean():.4g}, variance {sizes.var():.4g}; "
    return low_p(check, p, detail + f"binomial: {n * q:.4g}, {n * q * (1 - q):.4g}")


def drawn_law(
    prefix: str,
    members: list[list[np.ndarray]],
    n: int,
    q: float,
    both: float,
    coins: np.random.Generator,
    *,
    fixed: bool,
    secure: bool,
) -> list[Finding]:
    """Subsets of ``n`` are fair, and independent across units, rounds and channels.

    Args:
        prefix: of the checks' names.
        members: the subsets that two channels drew, one list each.
        n: size of the population.
        q, both: probability that one unit, and that two given units, are drawn.
        coins: the audit's own.
        fixed: whether all subsets have the same size.
        secure: whether both channels had the same seed.
    """
    inclusion = np.bincount(np.concatenate(members[0]), minlength=n)
    return [
        _fairness(f"{prefix}fairness", inclusion, len(members[0]), q, fixed, coins),
        _pairs(f"{prefix}pairs", members[0], n, both, coins),
        _rounds(f"{prefix}rounds", members[0], n, coins),
        _between(f"{prefix}channels", members, n, coins, secure),
    ]


def _in_turn(members: list[list[np.ndarray]], n: int, cohort: int) -> list[Finding]:
    """A public order without coins: everybody equally often, and the same in every channel."""
    turns = np.bincount(np.concatenate(members[0]), minlength=n)
    sizes = sum(len(m) != cohort for m in members[0])
    differing = sum(not np.array_equal(a, b) for a, b in zip(*members, strict=True))
    return [
        exact("sampler: exact size", sizes, f"cohorts that are not of {cohort}"),
        exact("sampler: turns", max(0, int(turns.max() - turns.min()) - 1), f"{turns.min()} to {turns.max()} turns"),
        exact("sampler: public order", differing, "cohorts that depend on the seed"),
    ]


def _claimed_probability(sampler: BoundSampler, claim: Claim | None) -> float | None:
    if claim is not None and claim.sampled is not None:
        return claim.sampled
    if isinstance(sampler, BoundFull):
        return None
    cohort = getattr(sampler, "cohort", sampler.denominator)
    return float(cohort) / sampler.n if cohort < sampler.n else None


def _drawn(channel: Channel, draws: int) -> list[np.ndarray]:
    return [channel.draw(step).numpy() for step in range(draws)]


def _fairness(
    check: str, inclusion: np.ndarray, draws: int, q: float, fixed: bool, coins: np.random.Generator
) -> Finding:
    """Every client takes part equally often: binomial counts (under a fixed size their sum is given as well)."""
    normal, n = from_binomial(inclusion, draws, q, coins), len(inclusion)
    if fixed:
        spread = float(((inclusion - draws * q) ** 2).sum() / (draws * q * (1 - q)) * (n - 1) / n)
        tails = special.gammainc((n - 1) / 2, spread / 2), special.gammaincc((n - 1) / 2, spread / 2)
        p = min(1.0, 2 * float(min(tails)))
    else:
        p = normal_p(normal)
    return low_p(check, p, f"uses of one from {inclusion.min()} to {inclusion.max()}")


def _pairs(check: str, members: list[np.ndarray], n: int, both: float, coins: np.random.Generator) -> Finding:
    """No two clients come together too often or too rarely: binomial counts, the most extreme of all pairs."""
    chosen = np.sort(coins.permutation(n)[:_CLIENTS])
    index = np.full(n, -1)
    index[chosen] = np.arange(len(chosen))
    included = np.zeros((len(members), len(chosen)), dtype=np.float32)
    for step, ranks in enumerate(members):
        which = index[ranks]
        included[step, which[which >= 0]] = 1
    together = np.rint(included.T @ included).astype(np.int64)
    upper = together[np.triu_indices(len(chosen), 1)]
    if not upper.size:
        return low_p(check, 1.0, "one unit")
    law = stats.binom(len(members), both)
    extreme = min(float(law.sf(upper.max() - 1)), float(law.cdf(upper.min())))
    p = min(1.0, 2 * upper.size * extreme)
    return low_p(check, p, f"{upper.size} pairs, together {upper.min()} to {upper.max()}")


def _overlaps(one: list[np.ndarray], two: list[np.ndarray], n: int, coins: np.random.Generator) -> np.ndarray:
    """N(0, 1) numbers from the overlaps of the paired cohorts, hypergeometric given their sizes."""
    kept = [(a, b) for a, b in zip(one, two, strict=True) if 0 < len(a) < n and 0 < len(b) < n]
    if not kept:
        return np.zeros(0)
    overlap = np.array([len(np.intersect1d(a, b, assume_unique=True)) for a, b in kept])
    first, second = (np.array([len(pair[side]) for pair in kept]) for side in (0, 1))
    return from_hypergeometric(overlap, n, first, second, coins)


def _rounds(check: str, members: list[np.ndarray], n: int, coins: np.random.Generator) -> Finding:
    """A cohort says nothing of those of the next rounds, and none returns."""
    p = 1.0
    for lag in _LAGS:
        p = min(p, len(_LAGS) * normal_p(_overlaps(members[:-lag], members[lag:], n, coins)))
    repeated = len(members) - len({m.tobytes() for m in members})
    sizes = np.array([len(m) for m in members])
    choices = special.gammaln(n + 1) - special.gammaln(sizes + 1) - special.gammaln(n - sizes + 1)
    chance = 2 * math.log(len(members)) - float(choices.min())  # log-probability that two of them are equal, at most
    if repeated and chance < math.log(LEVEL):
        p = 0.0
    return low_p(check, p, f"overlap of cohorts up to {_LAGS[-1]} rounds apart; {repeated} repeated")


def _between(check: str, members: list[list[np.ndarray]], n: int, coins: np.random.Generator, secure: bool) -> Finding:
    p = normal_p(_overlaps(members[0], members[1], n, coins))
    seeds = "the same seed, which secure mode must ignore" if secure else "different seeds"
    return low_p(check, p, f"overlap of the cohorts of two channels with {seeds}")
