"""Check 2, freshness: no two steps, releases, clients, replicates, channels, processes or sessions share noise."""

from __future__ import annotations

import itertools
import math
import multiprocessing
import tempfile
import warnings
from collections.abc import Callable, Mapping, Sequence
from contextlib import closing
from pathlib import Path

import numpy as np
import torch

from ..activations import Activations
from ..rounds import Rounds
from .findings import Finding, exact, skipped, too_large
from .play import Sample, gathered, noise_of, steps_for
from .setup import CLIENTS, GRADIENTS, Claims, Setup
from .statistics import correlations, seeds

FRESH = 6.0
"""Correlations above this many times 1 / sqrt(d) are not chance: 2e-9 for one pair under the normal law."""

_SHORTEST, _ROWS = 64, 64  # shortest row for a correlation; most rows compared
_MOST_LAGS, _LAG_ELEMENTS = 1 << 12, 1 << 22
_GROUP = 40  # numbers of a group, in which noise that is shared has a correlation above the limit
_STEPS = 96  # in which releases of one step are compared
_BESIDE = 4  # steps in which other cohorts are drawn
_PATIENCE = 30.0  # seconds, with a forked process


def freshness(
    setup: Setup, claims: Claims, noise: Mapping[str, Sample], seed: int, *, processes: bool
) -> list[Finding]:
    """Make all checks of freshness of ``noise``, by release; with ``processes`` also against a forked process and a
    restored run."""
    first, second = seeds(seed, "noise", 2)
    findings = []
    for name, sample in noise.items():
        if not name.endswith("/count"):
            findings += fresh_within(name, sample.units, setup.parts(sample.units.shape[1]))
            findings.append(unrelated(f"freshness: releases of {name}", _long(sample.units)))
        if sample.clients.max(initial=-1) >= 0:
            findings.append(_fresh_groups(f"freshness: clients of {name}", sample, sample.clients))
            findings.append(_fresh_groups(f"freshness: steps of {name}", sample, sample.steps))
        if sample.releases and sample.releases[0].claim.bands:
            findings.append(_lags(f"freshness: rounds of {name}", sample.units.T))
    if len(noise) > 1:
        smallest = min(claims.of(name).size for name in claims.names)
        findings += fresh_names(gathered(setup, claims, first, _STEPS * smallest))
    findings += [*_of_replicates(setup, claims, first), *training_freshness(setup, claims, first)]
    findings += _beside_other_cohorts(setup.seeded(), claims, first)
    return findings + _elsewhere(setup, claims, first, second, processes=processes)


def _of_replicates(setup: Setup, claims: Claims, seed: int) -> list[Finding]:
    """Check that replicates have noise of their own, where clients act one at a time."""
    if not setup.one_at_a_time or setup.secure:
        return []
    count = steps_for(setup, claims, _ROWS * _SHORTEST)
    single = noise_of(setup, claims, setup.open(seed), 0, count)[GRADIENTS]
    with closing(setup.open(seed, replicates=2)) as both:
        two = noise_of(setup, claims, both, 0, count)[GRADIENTS]
    return [fresh_between("freshness: replicates of gradients", single.units, two.units)]


def training_freshness(setup: Setup, claims: Claims, seed: int) -> list[Finding]:
    """Check that no local training of a participation has the noise of another one, where there are several."""
    if setup.one_at_a_time or setup.gradients is None or setup.records.trainings == 1:
        return []
    few, total = np.arange(len(setup.sizes))[:CLIENTS], setup.records.local_steps
    sample = noise_of(setup, claims, setup.open(seed), 0, 1, who=few, local=int(total.max()))[GRADIENTS]
    own = sample.steps % total[sample.clients] // (total[sample.clients] // setup.records.trainings)
    first, *later = (sample.units[own == training] for training in range(setup.records.trainings))
    check = "freshness: local trainings, 1 and {}"
    return [fresh_between(check.format(number), first, other) for number, other in enumerate(later, start=2)]


def _beside_other_cohorts(setup: Setup, claims: Claims, seed: int) -> list[Finding]:
    """Check that noise does not depend on who takes part: that on a sum of rows, on the count of unclipped clients, on
    a client's local step and on its activation."""
    n = len(setup.sizes) if setup.gradients is not None else setup.sampler.n
    who = np.arange(n)[: None if setup.gradients is None else 2 * CLIENTS]
    steps = _BESIDE * (len(who) if setup.one_at_a_time else 1)
    whole, *fewer = (noise_of(setup, claims, setup.open(seed), 0, steps, who=some) for some in (who, who[::2], who[:0]))
    pairs = moved = 0
    for name, sample in whole.items():
        at = {key: row for row, key in enumerate(zip(sample.clients.tolist(), sample.steps.tolist(), strict=True))}
        for other in (others[name] for others in fewer):
            for row, key in enumerate(zip(other.clients.tolist(), other.steps.tolist(), strict=True)):
                if key in at:
                    pairs += 1
                    moved += not np.allclose(other.units[row], sample.units[at[key]], rtol=0, atol=1e-6)
    check = f"freshness: {'noise on rows' if setup.rows else 'noise'} beside other cohorts"
    if not pairs:
        return [skipped(check, "no release fits the budget")]
    return [exact(check, moved, f"of {pairs} releases have other noise where other clients take part")]


# Correlations


def _long(noise: np.ndarray) -> np.ndarray:
    """Return at most 64 rows of at least the shortest length: consecutive steps joined."""
    group = -(-_SHORTEST // noise.shape[1])
    usable = len(noise) // group * group
    return noise[:usable].reshape(-1, group * noise.shape[1])[:_ROWS]


def unrelated(check: str, rows: np.ndarray, others: np.ndarray | None = None) -> Finding:
    """Check that no row of (a, d) shares noise with one of ``others`` (b, d), by default with another one of its own;
    rows of fewer than 40 numbers are not checked."""
    if min(len(rows), 2 if others is None else len(others)) < (2 if others is None else 1) or rows.shape[1] < _GROUP:
        return skipped(check, "too little noise to compare")
    cosines = correlations(rows, rows) - 2 * np.eye(len(rows)) if others is None else correlations(rows, others)
    pairs = cosines.size // 2 if others is None else cosines.size
    detail = f"correlation times sqrt(d), {pairs} pairs"
    return too_large(check, float(cosines.max()) * math.sqrt(rows.shape[1]), FRESH, detail, pairs * 2e-9)


def _fresh_groups(check: str, sample: Sample, keys: np.ndarray) -> Finding:
    """Check that no two groups of releases with equal ``keys`` (T,) share noise, release by release."""
    groups = [sample.units[keys == key].ravel() for key in np.unique(keys)]
    groups = [group for group in groups if group.size >= _GROUP]
    length = min(map(len, groups), default=0)
    return unrelated(check, np.array([group[:length] for group in groups[:_ROWS]]).reshape(-1, length))


def fresh_between(check: str, first: np.ndarray, second: np.ndarray) -> Finding:
    """Check that no step of one sample shares noise with a step of the other; both (T, D), the first 64 rows of
    each."""
    return unrelated(check, _long(first), _long(second))


def fresh_within(name: str, noise: np.ndarray, parts: Sequence[tuple[int, int]]) -> list[Finding]:
    """Check that no vector repeats itself at any lag (the first 4,096 of a long one, short ones are concatenated), and
    no tensor repeats another one."""
    if noise.shape[1] < _SHORTEST:
        noise = noise[: _LAG_ELEMENTS // 128].reshape(1, -1)
        return [_lags(f"freshness: coordinates of {name}", noise)]
    noise = noise[:_ROWS]
    findings = [_lags(f"freshness: coordinates of {name}", noise[: max(1, _LAG_ELEMENTS // noise.shape[1])])]
    scores = []
    for (a, b), (c, e) in itertools.combinations(parts[:16], 2):
        length = min(b - a, e - c)
        if length * len(noise) >= _SHORTEST:
            first, second = noise[:, a : a + length].reshape(1, -1), noise[:, c : c + length].reshape(1, -1)
            score = float(correlations(first, second)[0, 0]) * math.sqrt(first.size)
            scores.append((score, f"coordinates {a}:{a + length} and {c}:{c + length}"))
    if not scores:
        return findings
    worst, where = max(scores)
    detail = f"correlation times sqrt(d) of {where}, {len(scores)} pairs"
    return [*findings, too_large(f"freshness: tensors of {name}", worst, FRESH, detail, len(scores) * 2e-9)]


def _lags(check: str, noise: np.ndarray) -> Finding:
    """Correlate every vector with itself, shifted: by the Fourier transform, over all steps."""
    steps, d = noise.shape
    lags = np.arange(1, min(d, _MOST_LAGS + 1))
    lags = lags[(d - lags) * steps >= _SHORTEST]
    if not lags.size or not np.isfinite(noise).all():
        return skipped(check, "too few numbers") if not lags.size else too_large(check, math.inf, FRESH, "not finite")
    spectrum = np.fft.rfft(noise, 2 * d, axis=1)
    products = np.fft.irfft((np.abs(spectrum) ** 2).sum(0), 2 * d)[lags]
    squares = np.concatenate([[0.0], np.cumsum((noise**2).sum(0))])
    lengths = np.sqrt(squares[d - lags] * (squares[d] - squares[lags]))
    score = np.where(lengths > 0, np.abs(products) / np.where(lengths > 0, lengths, 1.0), 1.0) * np.sqrt(
        (d - lags) * steps
    )
    worst = int(score.argmax())
    detail = f"correlation times sqrt(d) at lag {lags[worst]}, the worst of {lags.size}"
    return too_large(check, float(score[worst]), FRESH, detail, lags.size * 2e-9)


def fresh_names(noise: Mapping[str, Sample]) -> list[Finding]:
    """Check that releases of one step have noise of their own: of short ones, that no coordinate of one follows one of
    the other from step to step."""
    findings = []
    for (left, first), (right, second) in itertools.combinations(noise.items(), 2):
        check, a, b = f"freshness: {left} and {right}", first.units, second.units
        d = min(a.shape[1], b.shape[1])
        findings.append(unrelated(check, a.T, b.T) if d < _SHORTEST else fresh_between(check, a[:, :d], b[:, :d]))
    return findings


# Another channel, a forked process, a restored run

_Noise = dict[str, np.ndarray]
"""Noise (T, D) by release, i.i.d. N(0, 1)."""


def _elsewhere(setup: Setup, claims: Claims, first: int, second: int, *, processes: bool) -> list[Finding]:
    """Compare the noise with that of another channel, of a forked process and of a restored run.

    In seeded mode channels have different seeds, and processes continue at the next step, since the same step is by
    design the same release. In secure mode seeds and steps are the same, and must not matter.
    """
    steps = max(2, min(setup.steps, 32 if setup.gradients is None else 4))
    if setup.one_at_a_time:  # an even number of turns of all clients
        acting = max(1, int(((setup.open(first).caps > 0) & (setup.sizes > 0)).sum()))
        steps = 2 * acting * -(-2 * _SHORTEST // (acting * setup.records.dimension))
    half = max(1, steps // 2)
    start = 0 if setup.secure else half

    def sample(channel: Rounds | Activations, start: int, stop: int) -> _Noise:
        with closing(channel):
            samples = noise_of(setup, claims, channel, start, stop)
        return {name: noise.units for name, noise in samples.items() if not name.endswith("/count")}

    def compared(where: str, ours: _Noise, theirs: _Noise) -> list[Finding]:
        return [fresh_between(f"freshness: {where}, {name}", ours[name], theirs[name]) for name in ours]

    left, right = (sample(setup.open(seed), 0, steps) for seed in (first, first if setup.secure else second))
    findings = compared("channels", left, right)
    if not processes:
        return findings
    channel = setup.open(first)
    channel.start(0)
    theirs, why = _in_child(lambda: sample(channel, start, start + half))
    if theirs is None:
        findings.append(skipped("freshness: forked process", why))
    else:
        findings += compared("forked process", sample(channel, 0, half), theirs)
    with tempfile.TemporaryDirectory(prefix="fedmtl-audit-") as folder:
        path = Path(folder) / "ledger.jsonl"
        before = sample(setup.open(first, ledger=path), 0, half)
        after = sample(setup.open(first, ledger=path, resume=True), start, start + half)
    return findings + compared("after a restore", before, after)


def _in_child(work: Callable[[], _Noise]) -> tuple[_Noise | None, str]:
    """Return what ``work()`` returns in a forked process; None with the reason if it fails or takes too long."""
    if "fork" not in multiprocessing.get_all_start_methods():
        return None, "this system has no fork"
    context, threads = multiprocessing.get_context("fork"), torch.get_num_threads()
    reading, writing = context.Pipe(duplex=False)
    child = context.Process(target=lambda: writing.send(work()))
    torch.set_num_threads(1)  # a child must not enter a pool of threads that only its parent has
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # threads of the parent: the child uses none
        child.start()
    writing.close()
    try:
        return reading.recv() if reading.poll(_PATIENCE) else None, "the forked process did not answer"
    except EOFError:
        return None, "the forked process did not answer"
    finally:
        child.kill()
        child.join()
        reading.close()
        torch.set_num_threads(threads)
