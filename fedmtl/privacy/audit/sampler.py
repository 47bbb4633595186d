"""Check 5, the sampler's law: cohorts, and the records that take part in a release, are what the charged event says.

Subsets of the records of local steps are drawn by the channel and shown to the client. Those of activations the channel
sums over itself: channels are opened with next to no noise, and gradients of 2^-1, 2^-2, ... of the clip norm along
one axis spell the subset in the released sum.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import TypeAlias

import numpy as np
import torch
from scipy import sparse, special, stats

from ..records import LocalSteps
from ..samplers import BoundCyclic, BoundFixed, BoundFull
from .findings import LEVEL, Finding, exact, low_p, skipped
from .play import MARKED, Sample, gathered, played
from .setup import GRADIENTS, MOST_ELEMENTS, Claims, Setup
from .statistics import (
    auditor,
    correlations,
    energy_p,
    from_binomial,
    from_hypergeometric,
    normal_p,
    seeds,
    unrelated_p,
)

_Subsets: TypeAlias = sparse.csr_array
"""(draws, n) 0 or 1: subsets of n units, in sorted rows."""

_UNITS = 512  # whose pairs are examined
_LAGS = (1, 2, 3)
_RECORDS, _QUIET = 16, 1e-13
_LEAST, _COORDINATES = 100, 16


def _law(
    prefix: str, drawn: Sequence[_Subsets], q: float, coins: np.random.Generator, *, secure: bool, fixed: bool = False
) -> list[Finding]:
    """Check that subsets are fair, and independent across units, rounds and channels.

    Args:
        prefix: of the checks' names.
        drawn: the subsets that two channels drew; secure mode has the same seed twice, which must not matter.
        q: probability that one unit is drawn.
        coins: the audit's own.
        secure: whether both channels had the same seed.
        fixed: whether all subsets have the same size.
    """
    made = drawn[0]
    (draws, n), sizes, inclusion = made.shape, np.diff(made.indptr), made.sum(0)
    detail = f"{draws} sizes, mean {sizes.mean():.4g}, variance {sizes.var():.4g}; "
    detail += f"binomial: {n * q:.4g}, {n * q * (1 - q):.4g}"
    if fixed:  # a count of each unit is binomial, their sum is given
        size = exact(f"{prefix}exact size", int((sizes != round(q * n)).sum()), f"cohorts that are not of {q * n:g}")
        spread = float(((inclusion - draws * q) ** 2).sum() / (draws * q * (1 - q)) * (n - 1) / n)
        p = float(energy_p(spread, n - 1))
    else:
        size = low_p(f"{prefix}sizes", normal_p(from_binomial(sizes, n, q, coins)), detail)
        p = normal_p(from_binomial(inclusion, draws, q, coins))
    fair = low_p(f"{prefix}fairness", p, f"uses of one from {inclusion.min()} to {inclusion.max()}")
    both = q * (q * n - 1) / max(n - 1, 1) if fixed else q**2
    pairs, rounds = _pairs(f"{prefix}pairs", made, both, coins), _rounds(f"{prefix}rounds", made, coins)
    return [size, fair, pairs, rounds, _channels(f"{prefix}channels", drawn, coins, secure=secure)]


def _pairs(check: str, made: _Subsets, both: float, coins: np.random.Generator) -> Finding:
    """Check that no pair is drawn too often or too rarely: binomial counts, the most extreme of all pairs."""
    chosen = made[:, np.sort(coins.permutation(made.shape[1])[:_UNITS])]
    pairs = (chosen.T @ chosen).toarray()[np.triu_indices(chosen.shape[1], 1)]
    if not pairs.size:
        return low_p(check, 1.0, "one unit")
    law = stats.binom(made.shape[0], both)
    p = min(1.0, 2 * pairs.size * min(float(law.sf(pairs.max() - 1)), float(law.cdf(pairs.min()))))
    return low_p(check, p, f"{pairs.size} pairs, drawn {pairs.min()} to {pairs.max()}")


def _rounds(check: str, made: _Subsets, coins: np.random.Generator) -> Finding:
    """Check that a subset says nothing of the next ones, and none returns."""
    (draws, n), sizes = made.shape, np.diff(made.indptr)
    p = min(len(_LAGS) * normal_p(_overlaps(made[:-lag], made[lag:], coins)) for lag in _LAGS)
    repeated = draws - len({members.tobytes() for members in np.split(made.indices, made.indptr[1:-1])})
    choices = special.gammaln(n + 1) - special.gammaln(sizes + 1) - special.gammaln(n - sizes + 1)
    chance = 2 * math.log(draws) - float(choices.min())  # log-probability that two are equal, at most
    if repeated and chance < math.log(LEVEL):
        p = 0.0
    return low_p(check, min(p, 1.0), f"overlap of cohorts up to {_LAGS[-1]} rounds distant; {repeated} repeated")


def _channels(check: str, drawn: Sequence[_Subsets], coins: np.random.Generator, *, secure: bool) -> Finding:
    """Check that the subsets of two channels say nothing of one another."""
    seeds = "the same seed, which secure mode must ignore" if secure else "different seeds"
    detail = f"overlap of the cohorts of two channels with {seeds}"
    return low_p(check, normal_p(_overlaps(drawn[0], drawn[1], coins)), detail)


def _overlaps(left: _Subsets, right: _Subsets, coins: np.random.Generator) -> np.ndarray:
    """Return N(0, 1) numbers from the overlaps of the paired subsets, hypergeometric given their sizes."""
    n, first, second = left.shape[1], np.diff(left.indptr), np.diff(right.indptr)
    some = (first > 0) & (first < n) & (second > 0) & (second < n)
    return from_hypergeometric(left.multiply(right).sum(1)[some], n, first[some], second[some], coins)


def _subsets_of(members: Sequence[np.ndarray], n: int) -> _Subsets:
    """Return subsets of ``n`` units by the positions of their members, as rows."""
    stops = np.cumsum([0, *map(len, members)])
    return sparse.csr_array(
        (np.ones(stops[-1], dtype=np.int64), np.concatenate(members), stops), shape=(len(members), n)
    )


def beside_noise(setup: Setup, claims: Claims, seed: int, draws: int) -> list[Finding]:
    """Check that who takes part in a release, or which records do, says nothing of the noise of the same release."""
    size = min(claims.of(name).size for name in claims.names)
    draws = min(2 * draws, max(_LEAST, MOST_ELEMENTS // size))
    (first,) = seeds(seed, "sampler/noise", 1)
    samples = gathered(setup, claims, first, draws * size)
    return [_unrelated(f"sampler: noise of {name}", sample) for name, sample in samples.items() if sample.drawn.any()]


def _unrelated(check: str, noise: Sample) -> Finding:
    """Test the correlations over releases of every unit's part, and of the number of units, with every coordinate of
    the noise, with its size, and with the length of the noise, all N(0, 1) under the claim."""
    units = noise.units[:, :_COORDINATES]
    with np.errstate(invalid="ignore", over="ignore"):
        lengths = special.ndtri(special.gammainc(noise.units.shape[1] / 2, (noise.units**2).sum(1) / 2))
        sizes = special.ndtri(special.erf(np.abs(units) / math.sqrt(2)))
    drawn = np.column_stack([noise.drawn, noise.drawn.sum(1)]).astype(float)
    drawn = (drawn - drawn.mean(0))[:, drawn.std(0) > 0]
    if not drawn.size or len(units) < 3:
        return skipped(check, "the same units take part in every release")
    cosines = correlations(drawn.T, np.column_stack([units, sizes, lengths]).T)
    detail = f"largest correlation {cosines.max():.4g} with who takes part, of {cosines.size} in {len(units)} releases"
    return low_p(check, unrelated_p(cosines, len(units)), detail)


# Cohorts


def sampler(setup: Setup, claims: Claims, seed: int, draws: int) -> list[Finding]:
    """Check ``draws`` cohorts, or subsets of records where the unit is a record, of two channels each; in secure mode
    these have the same seed, which must not matter."""
    if setup.gradients is not None:
        return _subsets(setup, claims, seed, draws)
    return _cohorts(setup, claims.of(claims.names[0]).sampled if claims else None, seed, draws)


def _cohorts(setup: Setup, sampled: float | None, seed: int, draws: int) -> list[Finding]:
    """Check sizes, fairness and independence across clients, rounds and channels.

    Poisson: sizes are binomial with the q of the event, ``sampled``. Fixed: of the exact size. In turn: without coins.
    Full: everybody, always. Where nothing is charged, the sampler's own word is the claim.
    """
    n, bound, coins = setup.sampler.n, setup.sampler, auditor(seed, "cohorts")
    first, second = seeds(seed, "cohorts", 2)
    channels = [setup.open(each) for each in (first, first if setup.secure else second)]
    members = [[channel.draw(step).numpy() for step in range(draws)] for channel in channels]
    wrong = sum(len(set(m.tolist())) != len(m) or bool(len(m) and (m.min() < 0 or m.max() >= n)) for m in members[0])
    findings = [exact("sampler: distinct clients", wrong, f"{draws:,} cohorts of {n:,} clients")]
    sizes = np.array([len(m) for m in members[0]])
    if sampled is None and isinstance(bound, BoundCyclic):
        return [*findings, *_in_turn(members, n, bound.cohort)]
    cohort = getattr(bound, "cohort", bound.denominator)
    if sampled is None and (isinstance(bound, BoundFull) or cohort >= n):  # nothing random is claimed
        missing = int((sizes != n).sum())
        return [*findings, exact("sampler: everybody takes part", missing, f"cohorts without everybody, of {draws}")]
    q = float(cohort) / n if sampled is None else sampled
    fixed = sampled is None and isinstance(bound, BoundFixed)
    drawn = [_subsets_of(each, n) for each in members]
    return [*findings, *_law("sampler: ", drawn, q, coins, secure=setup.secure, fixed=fixed)]


def _in_turn(members: list[list[np.ndarray]], n: int, cohort: int) -> list[Finding]:
    """Check a public order without coins: everybody equally often, and the same in every channel."""
    turns = np.bincount(np.concatenate(members[0]), minlength=n)
    sizes = sum(len(m) != cohort for m in members[0])
    differing = sum(not np.array_equal(a, b) for a, b in zip(*members, strict=True))
    return [
        exact("sampler: exact size", sizes, f"cohorts that are not of {cohort}"),
        exact("sampler: turns", max(0, int(turns.max() - turns.min()) - 1), f"{turns.min()} to {turns.max()} turns"),
        exact("sampler: public order", differing, "cohorts that depend on the seed"),
    ]


# Records


def _subsets(setup: Setup, claims: Claims, seed: int, draws: int) -> list[Finding]:
    """Check sizes, fairness and independence of ``draws`` subsets, of the client with the most records that are
    sampled; where nothing is, that all take part. Where a channel sums over what it has drawn, it is told so by the
    sums, too."""
    able = np.flatnonzero((setup.sizes > 0) & (setup.open(seed).caps > 0)).tolist()
    if not able:
        return [skipped("sampler", "no client has records and may act")]
    client = max(able, key=lambda k: (claims.of(GRADIENTS, k).sampled is not None, int(setup.sizes[k])))
    q, n, coins = claims.of(GRADIENTS, client).sampled, int(setup.sizes[client]), auditor(seed, "subsets")
    if setup.one_at_a_time and q is None:
        return [skipped("sampler", "who acts when is public, and every release uses all records")]
    others = [k for k in able if setup.sizes[k] == n and k != client and q is not None][:1]  # one of the same size
    first, second = seeds(seed, "subsets", 2)
    asked = [(client, first), (client, first if setup.secure else second), *((k, first) for k in others)]
    findings, drawn = list[Finding](), list[_Subsets]()
    if setup.one_at_a_time:
        records = np.sort(coins.permutation(min(MARKED, n))[:_RECORDS])
        spelled = [_spelled(setup, claims, of, other, records, draws) for of, other in asked]
        powers = 2.0 ** np.arange(len(records))
        strange = sum(int((np.abs(sums - subsets @ powers) > 1e-3).sum()) for sums, subsets in spelled)
        detail = f"of {draws} are not sums of the gradients drawn over q n"
        findings.append(exact("sampler: records, sums", strange, detail))
        drawn = [sparse.csr_array(subsets.astype(np.int64)) for _, subsets in spelled]
    else:
        drawn = [_shown(setup, of, other, draws) for of, other in asked]
    if q is None:
        left_out = sum(draws * n - each.nnz for each in drawn)
        return [*findings, exact("sampler: all records", left_out, "records left out, with nothing sampled")]
    findings += _law("sampler: records, ", drawn[:2], q, coins, secure=setup.secure)
    for each in drawn[2:]:
        check = "sampler: records of two clients, channels"
        findings.append(_channels(check, [drawn[0], each], coins, secure=False))
    return findings


def _shown(setup: Setup, client: int, seed: int, draws: int) -> _Subsets:
    """Draw the records of a client in ``draws`` local steps, whether or not so many rounds are paid for."""
    channel, who, subsets = setup.open(seed), torch.tensor([client]), []
    local = int(setup.records.local_steps[client])
    for draw in range(draws):
        if draw % local == 0:
            steps = LocalSteps(channel, draw // local, who)
        index, mask = steps.batch(who)
        subsets.append(torch.sort(index[mask]).values.numpy())
        steps.make(who)
    return _subsets_of(subsets, int(setup.sizes[client]))


def _spelled(
    setup: Setup, claims: Claims, client: int, seed: int, records: np.ndarray, draws: int
) -> tuple[np.ndarray, np.ndarray]:
    """Return at least ``draws`` sums (T,) of 2^i over the i whose ``records[i]`` are drawn, by the releases of one
    channel after the other, with next to no noise; and which are drawn, (T, k)."""
    quiet = replace(setup, privacy=replace(setup.privacy, epsilon=None, noise_multiplier=_QUIET))
    d, unit = setup.records.dimension, setup.privacy.initial_norm * 2.0**-_RECORDS
    rows = torch.zeros(int(records.max()) + 1, d, dtype=torch.float64)
    rows[torch.from_numpy(records), d // 2] = unit * 2.0 ** torch.arange(len(records), dtype=torch.float64)
    made, scale = Sample(d), claims.of(GRADIENTS, client).denominator / unit
    for other in seeds(seed, "channels", 10_000):
        channel = quiet.open(seed if setup.secure else other)
        sample = played(quiet, claims, channel, 0, 64, lambda name, step, who: (rows, who), who=np.array([client]))
        made.releases.extend(sample[GRADIENTS].releases)
        if len(made.releases) >= draws:
            break
    return made.values[:draws, d // 2] * scale, made.drawn[:draws, records]
