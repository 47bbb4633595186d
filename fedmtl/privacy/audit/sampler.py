"""Check 5, the sampler's law: cohorts, and the records that take part in a release, are what the charged event says.

Subsets of the records of local steps are drawn by the channel and shown to the client. Those of activations are not:
channels are opened with next to no noise, and gradients of 2^-1, 2^-2, ... of the clip norm along one axis spell the
subset in the released sum.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import numpy as np
import torch
from scipy import special, stats

from ..local_steps import LocalSteps
from ..samplers import BoundCyclic, BoundFixed, BoundFull
from .findings import LEVEL, Finding, exact, low_p, skipped
from .play import MARKED, Sample, gathered, played
from .setup import CLIENTS, GRADIENTS, MOST_ELEMENTS, Claims, Setup
from .statistics import auditor, correlations, from_binomial, from_hypergeometric, normal_p, seeds

_UNITS = 512  # whose pairs are examined
_LAGS = (1, 2, 3)
_RECORDS, _QUIET = 16, 1e-13
_LEAST, _COORDINATES = 100, 16


@dataclass(frozen=True)
class _Drawn:
    """Subsets of ``n`` units that should be fair, and independent across units, rounds and channels.

    Attributes:
        prefix: of the checks' names.
        members: the subsets that two channels drew, one list each; secure mode has the same seed twice, which must not
            matter.
        n: size of the population.
        q: probability that one unit is drawn.
        coins: the audit's own.
        secure: whether both channels had the same seed.
        fixed: whether all subsets have the same size.
    """

    prefix: str
    members: list[list[np.ndarray]]
    n: int
    q: float
    coins: np.random.Generator
    secure: bool
    fixed: bool = False

    def findings(self) -> list[Finding]:
        """Make all checks."""
        return [self._sizes(), self._fairness(), self._pairs(), self._rounds(), self.channels()]

    def _sizes(self) -> Finding:
        """Check the sizes of independent subsets: binomial."""
        n, q, sizes = self.n, self.q, np.array([len(m) for m in self.members[0]])
        if self.fixed:
            size = round(q * n)
            return exact(f"{self.prefix}exact size", int((sizes != size).sum()), f"cohorts that are not of {size}")
        p = normal_p(from_binomial(sizes, n, q, self.coins))
        detail = f"{len(sizes)} sizes, mean {sizes.mean():.4g}, variance {sizes.var():.4g}; "
        return low_p(f"{self.prefix}sizes", p, detail + f"binomial: {n * q:.4g}, {n * q * (1 - q):.4g}")

    def _fairness(self) -> Finding:
        """Check that everybody takes part equally often: binomial counts, whose sum a fixed size gives as well."""
        n, q, draws = self.n, self.q, len(self.members[0])
        inclusion = np.bincount(np.concatenate(self.members[0]), minlength=n)
        normal = from_binomial(inclusion, draws, q, self.coins)
        if self.fixed:
            spread = float(((inclusion - draws * q) ** 2).sum() / (draws * q * (1 - q)) * (n - 1) / n)
            tails = special.gammainc((n - 1) / 2, spread / 2), special.gammaincc((n - 1) / 2, spread / 2)
            p = min(1.0, 2 * float(min(tails)))
        else:
            p = normal_p(normal)
        return low_p(f"{self.prefix}fairness", p, f"uses of one from {inclusion.min()} to {inclusion.max()}")

    def _pairs(self) -> Finding:
        """Check that no pair is drawn too often or too rarely: binomial counts, the most extreme of all pairs."""
        check, members, n, q = f"{self.prefix}pairs", self.members[0], self.n, self.q
        both = q * (q * n - 1) / max(n - 1, 1) if self.fixed else q**2
        chosen = np.sort(self.coins.permutation(self.n)[:_UNITS])
        index = np.full(self.n, -1)
        index[chosen] = np.arange(len(chosen))
        included = np.zeros((len(members), len(chosen)), dtype=np.float32)
        for step, cohort in enumerate(members):
            which = index[cohort]
            included[step, which[which >= 0]] = 1
        pairs = np.rint(included.T @ included).astype(np.int64)
        upper = pairs[np.triu_indices(len(chosen), 1)]
        if not upper.size:
            return low_p(check, 1.0, "one unit")
        law = stats.binom(len(members), both)
        extreme = min(float(law.sf(upper.max() - 1)), float(law.cdf(upper.min())))
        p = min(1.0, 2 * upper.size * extreme)
        return low_p(check, p, f"{upper.size} pairs, drawn {upper.min()} to {upper.max()}")

    def _rounds(self) -> Finding:
        """Check that a subset says nothing of the next ones, and none returns."""
        n, members, p = self.n, self.members[0], 1.0
        for lag in _LAGS:
            p = min(p, len(_LAGS) * normal_p(self._overlaps(members[:-lag], members[lag:])))
        repeated = len(members) - len({m.tobytes() for m in members})
        sizes = np.array([len(m) for m in members])
        choices = special.gammaln(n + 1) - special.gammaln(sizes + 1) - special.gammaln(n - sizes + 1)
        chance = 2 * math.log(len(members)) - float(choices.min())  # log-probability that two are equal, at most
        if repeated and chance < math.log(LEVEL):
            p = 0.0
        detail = f"overlap of cohorts up to {_LAGS[-1]} rounds distant; {repeated} repeated"
        return low_p(f"{self.prefix}rounds", p, detail)

    def channels(self) -> Finding:
        """Check that the subsets of two channels say nothing of one another."""
        p = normal_p(self._overlaps(*self.members))
        seeds = "the same seed, which secure mode must ignore" if self.secure else "different seeds"
        return low_p(f"{self.prefix}channels", p, f"overlap of the cohorts of two channels with {seeds}")

    def _overlaps(self, left: list[np.ndarray], right: list[np.ndarray]) -> np.ndarray:
        """Return N(0, 1) numbers from the overlaps of the paired subsets, hypergeometric given their sizes."""
        n = self.n
        pairs = [(a, b) for a, b in zip(left, right, strict=True) if 0 < len(a) < n and 0 < len(b) < n]
        if not pairs:
            return np.zeros(0)
        overlap = np.array([len(np.intersect1d(a, b, assume_unique=True)) for a, b in pairs])
        first, second = (np.array([len(pair[side]) for pair in pairs]) for side in (0, 1))
        return from_hypergeometric(overlap, n, first, second, self.coins)


def beside_noise(setup: Setup, claims: Claims, seed: int, draws: int) -> list[Finding]:
    """Check that who takes part in a release, or which records do, says nothing of the noise of the same release."""
    size = min(claims.of(name).size for name in claims.names)
    draws = min(2 * draws, max(_LEAST, MOST_ELEMENTS // size))
    (first,) = seeds(seed, "sampler/noise", 1)
    samples = gathered(setup, claims, first, draws * size)
    return [_unrelated(f"sampler: noise of {name}", sample) for name, sample in samples.items() if sample.drawn.any()]


def _unrelated(check: str, noise: Sample) -> Finding:
    """Test the correlations over releases of every unit's part, and of the number of units, with every coordinate of
    the noise, with its size, and with the length of the noise: under the claim these are N(0, 1), so that a cosine with
    anything independent has Student's law."""
    units = noise.units[:, :_COORDINATES]
    with np.errstate(invalid="ignore", over="ignore"):
        lengths = special.ndtri(special.gammainc(noise.units.shape[1] / 2, (noise.units**2).sum(1) / 2))
        sizes = special.ndtri(special.erf(np.abs(units) / math.sqrt(2)))
    drawn = np.column_stack([noise.drawn, noise.drawn.sum(1)]).astype(float)
    drawn = (drawn - drawn.mean(0))[:, drawn.std(0) > 0]
    if not drawn.size or len(units) < 3:
        return skipped(check, "the same units take part in every release")
    cosines = correlations(drawn.T, np.column_stack([units, sizes, lengths]).T)
    largest, freedom = float(cosines.max()), len(units) - 1
    ratio = largest * math.sqrt(freedom / max(1 - largest**2, 1e-300))
    p = min(1.0, 2 * cosines.size * float(stats.t.sf(ratio, freedom)))
    return low_p(
        check, p, f"largest correlation {largest:.4g} with who takes part, of {cosines.size} in {len(units)} releases"
    )


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
    return [*findings, *_Drawn("sampler: ", members, n, q, coins, setup.secure, fixed).findings()]


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
    """Check sizes, fairness and independence of ``draws`` subsets, of the client with the most records."""
    sampled = [k for k in range(len(setup.sizes)) if claims.of(GRADIENTS, k).sampled is not None]
    client = max(sampled, key=lambda k: int(setup.sizes[k]), default=-1)
    if setup.one_at_a_time:
        if client < 0:
            return [skipped("sampler", "who acts when is public, and every release uses all records")]
        return _of_activations(setup, claims, client, seed, draws)
    if client < 0:
        return [_all_records(setup, seed)]
    return _of_local_steps(setup, claims, client, sampled, seed, draws)


def _of_local_steps(
    setup: Setup, claims: Claims, client: int, sampled: list[int], seed: int, draws: int
) -> list[Finding]:
    n, q, coins = int(setup.sizes[client]), float(claims.of(GRADIENTS, client).sampled or 1.0), auditor(seed, "cohorts")
    first, second = seeds(seed, "cohorts", 2)
    members = [_drawn_records(setup, each, client, draws) for each in (first, first if setup.secure else second)]
    findings = _Drawn("sampler: records, ", members, n, q, coins, setup.secure).findings()
    twins = [k for k in sampled if int(setup.sizes[k]) == n and k != client]
    if twins:  # two clients of one size have subsets of their own
        pair = [members[0], _drawn_records(setup, first, twins[0], draws)]
        findings.append(_Drawn("sampler: records of two clients, ", pair, n, q, coins, secure=False).channels())
    return findings


def _drawn_records(setup: Setup, seed: int, client: int, draws: int) -> list[np.ndarray]:
    """Draw the records of a client in ``draws`` local steps, whether or not so many rounds are paid for."""
    channel, who, subsets = setup.open(seed), torch.tensor([client]), []
    local = int(setup.records.local_steps[client])
    for draw in range(draws):
        if draw % local == 0:
            steps = LocalSteps(channel, draw // local, who)
        index, mask = steps.batch(who)
        subsets.append(torch.sort(index[mask]).values.numpy())
        steps.make(who)
    return subsets


def _all_records(setup: Setup, seed: int) -> Finding:
    clients = torch.arange(len(setup.sizes))[: 4 * CLIENTS]
    index, mask = LocalSteps(setup.open(seed), 0, clients).batch(clients)
    wrong = sum(
        sorted(i[m].tolist()) != list(range(int(n)))
        for i, m, n in zip(index, mask, setup.sizes[clients.numpy()], strict=True)
    )
    return exact("sampler: all records", wrong, "clients that left records out, with nothing sampled")


def _of_activations(setup: Setup, claims: Claims, client: int, seed: int, draws: int) -> list[Finding]:
    if not setup.open(seed).caps[client]:
        return [skipped("sampler", "no client has records and may act")]
    claim, coins = claims.of(GRADIENTS, client), auditor(seed, "subsamples")
    records = np.sort(coins.permutation(min(MARKED, int(setup.sizes[client])))[:_RECORDS])
    samples = [
        _spelled(setup, claims, each, client, records, draws) for each in (seed, seed if setup.secure else seed + 1)
    ]
    count, powers = min(len(sample.releases) for sample in samples), 2.0 ** np.arange(len(records))
    codes = [sample.values[:, setup.records.dimension // 2] for sample in samples]
    strange = sum(
        int((np.abs(code - sample.drawn[:, records] @ powers) > 1e-3).sum())
        for code, sample in zip(codes, samples, strict=True)
    )
    whole = exact("sampler: records, sums", strange, f"of {count} are not sums of the gradients drawn over q n")
    members = [[np.flatnonzero(row) for row in sample.drawn[:count, records]] for sample in samples]
    q = float(claim.sampled or 1.0)
    return [whole, *_Drawn("sampler: records, ", members, len(records), q, coins, setup.secure).findings()]


def _spelled(setup: Setup, claims: Claims, seed: int, client: int, records: np.ndarray, draws: int) -> Sample:
    """Return at least ``draws`` sums of 2^i over the i whose ``records[i]`` are drawn, by the releases of one channel
    after the other, with next to no noise."""
    quiet = replace(setup, privacy=replace(setup.privacy, epsilon=None, noise_multiplier=_QUIET))
    d, unit = setup.records.dimension, setup.privacy.initial_norm * 2.0**-_RECORDS
    rows = torch.zeros(int(records.max(initial=-1)) + 1, d, dtype=torch.float64)
    rows[torch.from_numpy(records), d // 2] = unit * 2.0 ** torch.arange(len(records), dtype=torch.float64)
    scale, sums = claims.of(GRADIENTS, client).denominator / unit, Sample(d)
    for other in seeds(seed, "subsamples", 10_000):
        channel = quiet.open(seed if setup.secure else other)
        sample = played(quiet, claims, channel, 0, 64, lambda name, step, who: (rows, who), who=np.array([client]))
        sums.releases.extend(replace(each, value=each.value * scale) for each in sample[GRADIENTS].releases)
        if len(sums.releases) >= draws:
            break
    return sums
