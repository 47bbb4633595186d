"""Check 5, the sampler's law: cohorts, and the records that take part in a release, have the law of
the charged event.

A cost that is not amplified counts on no secret coin: all take part, or the participants are public
and charged. Then there is no law to check, and only that the choice of the participants is
independent of the noise of the same release.

Subsets of the records of local steps are drawn by the channel and shown to the client. Those of
activations the channel sums over itself: channels are opened without noise, and gradients of 2^-1,
2^-2, ... of the clip norm along one axis spell the subset in the released sum.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TypeAlias

import numpy as np
import torch
from scipy import sparse, special

from .claim import GRADIENTS
from .findings import LEVEL, Finding, exact, low_p, skipped
from .play import played, rounds, silence
from .samples import MARKED, ReleasedValue, Sample
from .setup import MOST_ELEMENTS, Setup
from .statistics import auditor, extreme_p, from_binomial, normal_p, seeds, unrelated

_Subsets: TypeAlias = sparse.csr_array
"""(draws, n) 0 or 1: subsets of n units, in sorted rows."""

_UNITS = 512  # whose pairs are examined
_LAGS = (1, 2, 3)
_RECORDS = 16
_COORDINATES = 16


def _law(
    prefix: str, drawn: Sequence[_Subsets], q: float, coins: np.random.Generator, *, secure: bool
) -> list[Finding]:
    """Checks that subsets are fair, and independent across units, rounds and channels.

    Args:
        prefix: of the checks' names.
        drawn: the subsets that two channels drew, and another client's; secure mode has the same
            seed twice, which must not matter.
        q: probability that one unit is drawn.
        coins: the audit's own.
        secure: True if both channels had the same seed.
    """
    made = drawn[0]
    draws, n = made.shape
    sizes = np.diff(made.indptr)
    inclusion = made.sum(0)
    detail = f"{draws} sizes, mean {sizes.mean():.4g}, variance {sizes.var():.4g}; "
    detail += f"binomial: {n * q:.4g}, {n * q * (1 - q):.4g}"
    fair = 2 * min(
        normal_p(from_binomial(inclusion, draws, q, coins)),
        float(extreme_p(inclusion, draws, q).min()),
    )
    uses = f"uses of one from {inclusion.min()} to {inclusion.max()}"
    return [
        low_p(f"{prefix}sizes", normal_p(from_binomial(sizes, n, q, coins)), detail),
        low_p(f"{prefix}fairness", min(fair, 1.0), uses),
        _pairs(f"{prefix}pairs", made, q**2, coins),
        _rounds(f"{prefix}rounds", made, q, coins),
        _channels(f"{prefix}channels", drawn, q, coins, secure=secure),
    ]


def _pairs(check: str, made: _Subsets, both: float, coins: np.random.Generator) -> Finding:
    """Checks that no pair is drawn too often or too rarely: binomial counts, the most extreme of
    all pairs."""
    chosen = made[:, np.sort(coins.permutation(made.shape[1])[:_UNITS])]
    pairs = (chosen.T @ chosen).toarray()[np.triu_indices(chosen.shape[1], 1)]
    if not pairs.size:
        return low_p(check, 1.0, "one unit")
    p = extreme_p(pairs, made.shape[0], both).min()
    return low_p(check, float(p), f"{pairs.size} pairs, drawn {pairs.min()} to {pairs.max()}")


def _rounds(check: str, made: _Subsets, q: float, coins: np.random.Generator) -> Finding:
    """Checks that a subset says nothing of the next ones, and none returns."""
    draws, n = made.shape
    sizes = np.diff(made.indptr)
    p = min(len(_LAGS) * normal_p(_overlaps(made[:-lag], made[lag:], q, coins)) for lag in _LAGS)
    repeated = draws - len(
        {members.tobytes() for members in np.split(made.indices, made.indptr[1:-1])}
    )
    choices = special.gammaln(n + 1) - special.gammaln(sizes + 1) - special.gammaln(n - sizes + 1)
    # log-probability that two are equal, at most
    chance = 2 * math.log(draws) - float(choices.min())
    if repeated and chance < math.log(LEVEL):
        p = 0.0
    return low_p(
        check,
        min(p, 1.0),
        f"overlap of cohorts up to {_LAGS[-1]} rounds distant; {repeated} repeated",
    )


def _channels(
    check: str, drawn: Sequence[_Subsets], q: float, coins: np.random.Generator, *, secure: bool
) -> Finding:
    """Checks that subsets say nothing of those of another channel, nor of another client's."""
    seeds = "different seeds"
    if secure:
        seeds = "the same seed, which secure mode must ignore"
    detail = f"overlap of the draws of two channels with {seeds}" + ", and of two clients" * (
        len(drawn) > 2
    )
    overlaps = [_overlaps(drawn[0], other, q, coins) for other in drawn[1:]]
    return low_p(check, normal_p(np.concatenate(overlaps)), detail)


def _overlaps(left: _Subsets, right: _Subsets, q: float, coins: np.random.Generator) -> np.ndarray:
    """Returns N(0, 1) numbers from the overlaps of the paired subsets: binomial, given the left one
    and all before."""
    return from_binomial(left.multiply(right).sum(1), np.diff(left.indptr), q, coins)


def _subsets_of(members: Sequence[np.ndarray], n: int) -> _Subsets:
    """Returns subsets of ``n`` units by the positions of their members, as rows."""
    stops = np.cumsum([0, *map(len, members)])
    return sparse.csr_array(
        (np.ones(stops[-1], dtype=np.int64), np.concatenate(members), stops),
        shape=(len(members), n),
    )


def beside_noise(setup: Setup, noise: Mapping[str, Sample]) -> list[Finding]:
    """Checks that the clients or records that take part in a release are independent of the
    ``noise`` of the same release, and that the records of every client are drawn at its own
    rate."""
    findings = [
        _unrelated(f"sampler: noise of {name}", sample)
        for name, sample in noise.items()
        if sample.drawn.any()
    ]
    return findings + ([_rates(setup, noise[GRADIENTS])] if setup.gradients is not None else [])


def _rates(setup: Setup, sample: Sample) -> Finding:
    """Checks the number of records that take part in all releases of each client whose records are
    sampled: it is binomial, the least likely one of all clients."""
    check = "sampler: records, rates"
    made = [each for each in sample.releases if each.claim.sampled is not None]
    if not made:
        return skipped(check, "every release is of all records")
    sizes = [len(each.drawn) for each in made]
    clients, first, place = np.unique(
        [each.client for each in made], return_index=True, return_inverse=True
    )
    trials, taken = (
        np.bincount(place, each).astype(int) for each in (setup.sizes[clients][place], sizes)
    )
    rates = np.array([made[row].claim.sampled for row in first])
    p_values = extreme_p(taken, trials, rates)
    worst = int(p_values.argmin())
    detail = (
        f"{taken[worst]} of {trials[worst]} records of {setup.name(clients[worst])} took part, at "
        f"{rates[worst]:.4g}"
    )
    return low_p(check, float(p_values[worst]), detail)


def _unrelated(check: str, noise: Sample) -> Finding:
    """Tests the correlations over releases of every unit's part, and of the number of units, with
    every coordinate of the noise, with its size, and with the length of the noise, all N(0, 1)
    under the claim."""
    units = noise.units[:, :_COORDINATES]
    with np.errstate(invalid="ignore", over="ignore"):
        lengths = special.ndtri(
            special.gammainc(noise.units.shape[1] / 2, (noise.units**2).sum(1) / 2)
        )
        sizes = special.ndtri(special.erf(np.abs(units) / math.sqrt(2)))
    drawn = np.column_stack([noise.drawn, noise.drawn.sum(1)]).astype(float)
    # nothing where the same units always take part
    drawn = (drawn - drawn.mean(0))[:, drawn.std(0) > 0]
    return unrelated(check, drawn.T, np.column_stack([units, sizes, lengths]).T)


# Cohorts


def sampler(setup: Setup, seed: int, draws: int) -> list[Finding]:
    """Checks ``draws`` cohorts, or subsets of records if the unit is a record, of two channels
    each; in secure mode these have the same seed, which must not matter."""
    if setup.gradients is not None:
        return _subsets(setup, seed, draws)
    if setup.pooled is not None:
        return _pooled_subsets(setup, seed, draws)
    q = setup.claims.of(setup.claims.names[0]).sampled
    n = setup.sampler.n
    coins = auditor(seed, "cohorts")
    if q is None:
        return [
            skipped("sampler", "who takes part is public, or charged: no secret draw is claimed")
        ]
    first, second = seeds(seed, "cohorts", 2)
    channels = [setup.open(each) for each in (first, first if setup.secure else second)]
    members = [[channel.draw(step).numpy() for step in range(draws)] for channel in channels]
    wrong = sum(
        len(np.unique(m)) < len(m) or not np.isin(m, np.arange(n)).all() for m in members[0]
    )
    distinct = exact("sampler: distinct clients", wrong, f"{draws:,} cohorts of {n:,} clients")
    return [
        distinct,
        *_law(
            "sampler: ", [_subsets_of(each, n) for each in members], q, coins, secure=setup.secure
        ),
    ]


# Records


def _subsets(setup: Setup, seed: int, draws: int) -> list[Finding]:
    """Checks sizes, fairness and independence of ``draws`` subsets, of the client with the most
    records among those that are sampled, and of another one with as many. If a channel computes the
    sums over the subsets that it has drawn, the sums must be those of the subsets that it
    states."""
    able = (setup.sizes > 0) & (setup.open(seed).caps > 0)
    sampled = [
        k
        for k in np.flatnonzero(able).tolist()
        if setup.claims.of(GRADIENTS, k).sampled is not None
    ]
    if not sampled:
        return [skipped("sampler", "who acts is public, and every release is of all records")]
    client = max(sampled, key=lambda k: int(setup.sizes[k]))
    q = setup.claims.of(GRADIENTS, client).sampled
    n = int(setup.sizes[client])
    coins = auditor(seed, "subsets")
    assert q is not None
    others = [k for k in sampled if setup.sizes[k] == n and k != client][:1]
    first, second = seeds(seed, "subsets", 2)
    pairs = [
        (client, first),
        (client, first if setup.secure else second),
        *((k, first) for k in others),
    ]
    spelled = coins.permutation(min(MARKED, n))[: _RECORDS * setup.one_at_a_time]
    made = [_released(setup, of, other, spelled, draws) for of, other in pairs]
    drawn = [_subsets_of([each.drawn for each in sample.releases], n) for sample in made]
    findings = list[Finding]()
    if setup.one_at_a_time:
        sums = [subsets.toarray()[:, spelled] @ 2.0 ** np.arange(len(spelled)) for subsets in drawn]
        far = [
            np.abs(sample.values[:, 0] - each) > 1e-3
            for sample, each in zip(made, sums, strict=True)
        ]
        detail = f"of {draws} are not sums of the gradients drawn over q n"
        findings.append(exact("sampler: records, sums", int(np.concatenate(far).sum()), detail))
    return findings + _law("sampler: records, ", drawn, q, coins, secure=setup.secure)


def _pooled_subsets(setup: Setup, seed: int, draws: int) -> list[Finding]:
    """Checks sizes, fairness and independence of ``draws`` subsets of the records that a secure sum
    adds up: of the client with the most records, and of another one."""
    q = setup.rate(0)
    if q == 1:
        return [skipped("sampler", "every release is of all records")]
    client = int(setup.sizes.argmax())
    n = int(setup.sizes[client])
    alike = np.flatnonzero(setup.sizes == n)
    others = [int(k) for k in alike if k != client][:1]
    first, second = seeds(seed, "subsets", 2)
    pairs = [
        (client, first),
        (client, first if setup.secure else second),
        *((k, first) for k in others),
    ]
    drawn = [_subsets_of(_drawn_records(setup, of, other, draws), n) for of, other in pairs]
    coins = auditor(seed, "subsets")
    return _law("sampler: records, ", drawn, q, coins, secure=setup.secure)


def _drawn_records(setup: Setup, client: int, seed: int, draws: int) -> list[np.ndarray]:
    """Returns the records of a client that take part in ``draws`` rounds, of as many channels as
    have them."""
    made: list[np.ndarray] = []
    for other in seeds(seed, "channels", 10_000):
        channel = setup.open(seed if setup.secure else other)
        for _, cohort in rounds(setup, channel):
            if client in cohort.tolist():
                places, mask = channel.local.batch(torch.tensor([client]))
                made.append(np.sort(places[mask].numpy()))
            if len(made) == draws:
                return made
    return made


def _released(setup: Setup, client: int, seed: int, spelled: np.ndarray, draws: int) -> Sample:
    """Returns ``draws`` releases by one channel after the other, without noise: each the sum of 2^i
    over the i whose records ``spelled[i]`` are drawn."""
    quiet = replace(setup, privacy=replace(setup.privacy, epsilon=math.inf, noise_multiplier=None))
    d = setup.records.dimension
    unit = setup.privacy.initial_norm * 2.0**-_RECORDS
    rows = torch.zeros(MARKED, d, dtype=torch.float64)
    made: list[ReleasedValue] = []
    rows[torch.from_numpy(spelled), d // 2] = unit * 2.0 ** torch.arange(
        len(spelled), dtype=torch.float64
    )
    scale = setup.claims.of(GRADIENTS, client).denominator / unit

    def of_records(name: str, step: int, who: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return rows, who

    sent = of_records if setup.one_at_a_time else silence(setup)
    most = max(2, MOST_ELEMENTS // d)  # releases of a channel
    local = 1
    if not setup.one_at_a_time:
        local = min(most, int(setup.records.local_steps[client]))
    for other in seeds(seed, "channels", 10_000):
        channel = quiet.open(seed if setup.secure else other)
        missing = math.ceil((draws - len(made)) / local)
        stop = min(64, most // local, missing)
        few = played(quiet, channel, 0, stop, sent, who=np.array([client]), local=local)
        made += [
            replace(each, value=each.value[d // 2 :][:1] * scale)
            for each in few[GRADIENTS].releases
        ]
        if len(made) >= draws:
            break
    return Sample(1, made[:draws])
