"""Check 2, freshness: no two steps, releases, clients, replicates, channels, processes or sessions
share noise."""

from __future__ import annotations

import itertools
import multiprocessing
import tempfile
import warnings
from collections.abc import Callable, Mapping, Sequence
from contextlib import closing
from pathlib import Path

import numpy as np
import torch

from ..privacy.activation_channel import ActivationChannel
from ..privacy.round_channel import RoundChannel
from .claim import GRADIENTS
from .findings import Finding, exact, low_p, skipped
from .play import played
from .samples import Sample
from .setup import CLIENTS, Setup
from .statistics import LEAST, seeds, unrelated, unrelated_p

# fewest numbers of consecutive releases that are joined for a comparison; most rows compared
_SHORTEST = 64
_ROWS = 64
_MOST_LAGS = 1 << 12
_LAG_ELEMENTS = 1 << 22
_BESIDE = 4  # steps in which other cohorts are drawn
_PATIENCE = 30.0  # seconds, with a forked process


def freshness(setup: Setup, noise: Mapping[str, Sample], seed: int) -> list[Finding]:
    """Makes all checks of freshness of ``noise``, by release."""
    first, second = seeds(seed, "noise", 2)
    findings = []
    for name, sample in noise.items():
        units = sample.units
        if not name.endswith("/count"):
            findings += _within(name, units, setup.parts(units.shape[1]))
            findings.append(unrelated(f"freshness: releases of {name}", _rows(units)))
        if sample.clients.max(initial=-1) >= 0:
            findings.append(
                unrelated(f"freshness: clients of {name}", _rows(units, sample.clients))
            )
            findings.append(unrelated(f"freshness: steps of {name}", _rows(units, sample.steps)))
        if sample.releases and sample.releases[0].claim.bands:
            findings.append(_lags(f"freshness: rounds of {name}", units.T))
    findings += [
        *_names(noise),
        *training_freshness(setup, first),
        _beside_other_cohorts(setup.seeded(), first),
    ]
    return findings + _elsewhere(setup, first, second)


def training_freshness(setup: Setup, seed: int) -> list[Finding]:
    """Checks that no local training of a participation has the noise of another one, if there
    are several."""
    if setup.one_at_a_time or setup.gradients is None or setup.records.trainings == 1:
        return []
    few = np.arange(len(setup.sizes))[:CLIENTS]
    total = setup.records.local_steps
    sample = played(setup, setup.open(seed), 0, 1, who=few, local=int(total.max()))[GRADIENTS]
    own = sample.steps % total[sample.clients] // (total[sample.clients] // setup.records.trainings)
    first, *later = (sample.units[own == training] for training in range(setup.records.trainings))
    check = "freshness: local trainings, 1 and {}"
    return [
        unrelated(check.format(number), _rows(first), _rows(other))
        for number, other in enumerate(later, 2)
    ]


def _beside_other_cohorts(setup: Setup, seed: int) -> Finding:
    """Checks that noise does not depend on the cohort: that on a sum of rows, on the count of
    unclipped clients, on a client's local step and on its activation."""
    check = "freshness: noise beside other cohorts"
    if setup.shares is not None:
        return skipped(check, "noise is the sum of the shares of those who take part")
    if setup.gradients is not None:
        n = len(setup.sizes)
    else:
        n = setup.sampler.n
    who = np.arange(n)[: None if setup.gradients is None else 2 * CLIENTS]
    steps = _BESIDE * (len(who) if setup.one_at_a_time else 1)
    whole, *fewer = (
        played(setup, setup.open(seed), 0, steps, who=some) for some in (who, who[::2], who[:0])
    )
    pairs = moved = 0
    for name, sample in whole.items():
        units = {
            (each.client, each.step): row
            for each, row in zip(sample.releases, sample.units, strict=True)
        }
        for other in (others[name] for others in fewer):
            for each, row in zip(other.releases, other.units, strict=True):
                if (same := units.get((each.client, each.step))) is not None:
                    pairs += 1
                    moved += not np.allclose(row, same, rtol=0, atol=1e-6)
    if not pairs:
        return skipped(check, "no release fits the budget")
    return exact(
        check, moved, f"of {pairs} releases have other noise where other clients take part"
    )


# Correlations


def _rows(units: np.ndarray, keys: np.ndarray | None = None) -> np.ndarray:
    """Returns at most 64 rows of equal length: the numbers (T, D) of releases with equal ``keys``
    (T,), without those of fewer than 40, or by default of consecutive releases with 64 numbers or
    more."""
    if keys is None:
        group = -(-_SHORTEST // units.shape[1])
        return units[: len(units) // group * group].reshape(-1, group * units.shape[1])[:_ROWS]
    groups = [
        group for key in np.unique(keys) if (group := units[keys == key].ravel()).size >= LEAST
    ]
    length = min(map(len, groups), default=0)
    return np.array([group[:length] for group in groups[:_ROWS]]).reshape(-1, length)


def _within(name: str, noise: np.ndarray, parts: Sequence[tuple[int, int]]) -> list[Finding]:
    """Checks that no vector repeats itself at any lag (the first 4,096 of a long one, short ones
    are concatenated), and no tensor begins as another one does."""
    check = f"freshness: coordinates of {name}"
    d = noise.shape[1]
    if d < _SHORTEST:
        return [_lags(check, noise[: _LAG_ELEMENTS // 128].reshape(1, -1))]
    noise = noise[:_ROWS]
    findings = [_lags(check, noise[: max(1, _LAG_ELEMENTS // d)])]
    if len(parts) > 1:
        parts = [part for part in parts if len(noise) * (part[1] - part[0]) >= LEAST][:_ROWS]
        length = min((stop - start for start, stop in parts), default=0)
        tensors = [noise[:, start : start + length].ravel() for start, _ in parts]
        findings.append(
            unrelated(f"freshness: tensors of {name}", np.array(tensors).reshape(len(parts), -1))
        )
    return findings


def _lags(check: str, noise: np.ndarray) -> Finding:
    """Correlates every vector with itself, shifted: by the Fourier transform, over all steps."""
    steps, d = noise.shape
    lags = np.arange(1, min(d, _MOST_LAGS + 1))
    lags = lags[(d - lags) * steps >= _SHORTEST]
    if not lags.size or not np.isfinite(noise).all():
        if not lags.size:
            return skipped(check, "too few numbers")
        return low_p(check, 0.0, "not finite")
    spectrum = np.fft.rfft(noise, 2 * d, axis=1)
    products = np.fft.irfft((np.abs(spectrum) ** 2).sum(0), 2 * d)[lags]
    squares = np.concatenate([[0.0], np.cumsum((noise**2).sum(0))])
    lengths = np.sqrt(squares[d - lags] * (squares[d] - squares[lags]))
    cosines = np.where(lengths > 0, np.abs(products) / np.where(lengths > 0, lengths, 1.0), 1.0)
    detail = f"largest correlation {cosines.max():.4g} of a vector with itself, at {lags.size} lags"
    return low_p(check, unrelated_p(np.minimum(cosines, 1.0), (d - lags) * steps), detail)


def _names(noise: Mapping[str, Sample]) -> list[Finding]:
    """Checks that releases of one step have noise of their own: of short ones, that no coordinate
    of one follows one of the other from step to step."""
    findings = []
    for (left, first), (right, second) in itertools.combinations(noise.items(), 2):
        d = min(first.size, second.size)
        a, b = (
            sample.units.T if d < _SHORTEST else _rows(sample.units[:, :d])
            for sample in (first, second)
        )
        findings.append(unrelated(f"freshness: {left} and {right}", a, b))
    return findings


# Another channel, a forked process, a restored run

_Noise = dict[str, np.ndarray]
"""Noise (T, D) by release, i.i.d. N(0, 1)."""


def _elsewhere(setup: Setup, first: int, second: int) -> list[Finding]:
    """Compares the noise with that of another channel, of a replicate if clients act one at a
    time, of a forked process and of a restored run.

    In seeded mode channels have different seeds, and processes continue at the next step, since the
    same step is by design the same release. In secure mode seeds and steps are the same, and must
    not matter.
    """
    steps = max(2, min(setup.steps, 32 if setup.gradients is None else 4))
    if setup.one_at_a_time:  # an even number of turns of all clients
        acting = max(1, int(((setup.open(first).caps > 0) & (setup.sizes > 0)).sum()))
        steps = 2 * acting * -(-2 * _SHORTEST // (acting * setup.records.dimension))
    half = max(1, steps // 2)
    start = 0 if setup.secure else half

    def sample(channel: RoundChannel | ActivationChannel, start: int, stop: int) -> _Noise:
        with closing(channel):
            samples = played(setup, channel, start, stop)
        return {name: noise.units for name, noise in samples.items() if not name.endswith("/count")}

    left = sample(setup.open(first), 0, steps)
    pairs = {"channels": (left, sample(setup.open(first if setup.secure else second), 0, steps))}
    if setup.one_at_a_time and not setup.secure:
        pairs["replicates"] = left, sample(setup.open(first, replicates=2), 0, steps)
    channel = setup.open(first)
    channel.start(0)
    theirs = _in_child(lambda: sample(channel, start, start + half))
    pairs["forked process"] = sample(channel, 0, half), theirs or {}
    with tempfile.TemporaryDirectory(prefix="fedmtl-audit-") as folder:
        path = Path(folder) / "ledger.jsonl"
        before = sample(setup.open(first, ledger=path), 0, half)
        after = sample(setup.open(first, ledger=path, resume=True), start, start + half)
    pairs["after a restore"] = before, after
    if theirs is None:
        missing = [skipped("freshness: forked process", "no forked process answered")]
    else:
        missing = []
    return missing + [
        unrelated(f"freshness: {where}, {name}", _rows(ours[name]), _rows(others[name]))
        for where, (ours, others) in pairs.items()
        for name in others
    ]


def _in_child(work: Callable[[], _Noise]) -> _Noise | None:
    """Returns the value of ``work()`` in a forked process; None if it fails or takes too long,
    or if nothing can fork."""
    if "fork" not in multiprocessing.get_all_start_methods():
        return None
    context = multiprocessing.get_context("fork")
    threads = torch.get_num_threads()
    reading, writing = context.Pipe(duplex=False)
    child = context.Process(target=lambda: writing.send(work()))
    torch.set_num_threads(1)  # a child must not enter a pool of threads that only its parent has
    with warnings.catch_warnings():
        # threads of the parent: the child uses none
        warnings.simplefilter("ignore", DeprecationWarning)
        child.start()
    writing.close()
    try:
        if reading.poll(_PATIENCE):
            return reading.recv()
        return None
    except EOFError:
        return None
    finally:
        child.kill()
        child.join()
        reading.close()
        torch.set_num_threads(threads)
