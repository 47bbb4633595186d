"""Check 2, freshness: no two steps, releases, clients, repetitions, channels, processes or sessions share noise."""

from __future__ import annotations

import io
import math
import os
import select
import signal
import tempfile
import time
import warnings
from collections.abc import Callable, Mapping, Sequence
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ..channel import GRADIENT, Channel
from .findings import Finding, exact, skipped, too_large
from .play import Noise, Silent, drawing, first_cohort, gathered, local_of, noise_of, rounds, standardized
from .setup import ACTIVATIONS, CLIENTS, Claims, Setup
from .statistics import correlations, seeds

FRESH = 6.0
"""Correlations above this many times 1 / sqrt(d) are not chance: 2e-9 for one pair under the normal law."""

_SHORTEST, _ROWS = 64, 64  # shortest row for a correlation; most rows compared
_MOST_LAGS, _LAG_ELEMENTS = 1 << 12, 1 << 22
_STEPS = 96  # in which releases of one step are compared
_PATIENCE = 30.0  # seconds, with a forked process

Sample = Callable[[Any, int, int], dict[str, np.ndarray]]
"""(channel, first step, end) -> standardized noise (T, d) by release."""


def freshness(setup: Setup, claims: Claims, noise: Mapping[str, Noise], seed: int, *, processes: bool) -> list[Finding]:
    """Make all checks of freshness of ``noise``, by release; with ``processes`` also against a forked process and a
    restored run."""
    first, second = seeds(seed, "noise", 2)
    findings = []
    for name, one in noise.items():
        if not name.endswith("/count"):
            check = f"freshness: steps of {name}"
            findings += [fresh_rows(check, one.units), *fresh_within(name, one.units, setup.parts(one.units.shape[1]))]
        if setup.gradients is None and name in claims.names and claims.of(name).bands:
            findings.append(_lags(f"freshness: rounds of {name}", one.units.T))
    if setup.gradients is None:
        if len(noise) > 1:
            smallest = min(plan.size for plan in setup.releases)
            findings += fresh_names(
                {name: one.units for name, one in gathered(setup, claims, first, _STEPS * smallest).items()}
            )
        findings += _beside_other_cohorts(setup, first)
        steps = max(2, min(setup.steps, 32))
    elif setup.one_at_a_time:
        findings += _of_activations(setup, claims, first)
        steps = min(ACTIVATIONS, int(setup.open(first).caps.sum()), 4 * -(-128 // setup.records.dimension))
    else:
        findings += [*training_freshness(setup, claims, first), *_beside_other_cohorts(setup, first)]
        steps = min(setup.steps, 4)
    return findings + fresh_elsewhere(setup, sample_of(setup, claims), first, second, steps, processes=processes)


def sample_of(setup: Setup, claims: Claims) -> Sample:
    """Return the noise of a window of steps, of noised releases alone."""

    def sample(channel: object, start: int, stop: int) -> dict[str, np.ndarray]:
        found = noise_of(setup, claims, channel, start, stop)  # type: ignore[arg-type]
        return {name: one.units for name, one in found.items() if not name.endswith("/count")}

    return sample


def fresh_elsewhere(
    setup: Setup, sample: Sample, first: int, second: int, steps: int, *, processes: bool
) -> list[Finding]:
    """Compare with the noise of another channel, of a forked process and of a restored run."""
    findings = fresh_objects(setup, sample, first, second, steps)
    if processes:
        findings += fresh_forks(setup, sample, first, steps)
        findings += fresh_restores(setup, sample, first, steps)
    return findings


def _of_activations(setup: Setup, claims: Claims, seed: int) -> list[Finding]:
    """Check that no two uses, clients or repetitions share noise, and a client has its noise whoever else acts."""
    n, d = len(setup.sizes), setup.records.dimension
    caps = setup.open(seed).caps
    who = (caps > 0) & (setup.present(np.arange(n), np.zeros(n, dtype=np.int64)) > 0)
    acting, uses = int(who.sum()), int(min(caps[who], default=0))
    uses = min(uses, max(1, ACTIVATIONS // max(1, acting)))
    if not acting:
        return [skipped("freshness: gradients", "no client may act from the start")]
    played = Silent.played(setup.open(seed), setup, 0, acting * uses, acting, who)  # in blocks in which all act
    cube = played.noise(setup, claims).units.reshape(uses, acting, d)
    findings = [
        fresh_rows("freshness: uses of gradients", cube.reshape(uses, -1)),
        fresh_rows("freshness: clients of gradients", cube.swapaxes(0, 1).reshape(acting, -1)),
        *fresh_within("gradients, use by use", cube.reshape(-1, 1), [(0, 1)]),
    ]
    if setup.secure:
        return findings
    with closing(setup.open(seed, replicates=2)) as both:
        pair = Silent.played(both, setup, 0, acting * uses, None, who)
    one, two = (pair.noise(setup, claims, r).units for r in range(2))
    findings.append(fresh_between("freshness: repetitions of gradients", one, two))
    few = who & (np.cumsum(who) % 2 == 1)
    alone = Silent.played(setup.open(seed), setup, 0, int(few.sum()) * uses, 7, few).noise(setup, claims)
    assert alone.clients is not None
    there = np.flatnonzero(who)
    moved = 0
    for client in np.flatnonzero(few).tolist():
        own = alone.units[alone.clients == client]
        moved += int((~np.isclose(own, cube[: len(own), np.flatnonzero(there == client)[0]], atol=1e-6)).any(1).sum())
    detail = f"of {len(alone.units)} releases have other noise where fewer clients act"
    return [*findings, exact("freshness: noise of a client alone", moved, detail)]


def _beside_other_cohorts(setup: Setup, seed: int) -> list[Finding]:
    """Check that the noise of a round does not depend on who is drawn: that on a sum of rows, that on the count of
    unclipped clients, and that of a client's local step."""
    n, setup = setup.sampler.n, setup.seeded()
    cohorts = torch.arange(n), torch.arange(0, n, 2), torch.arange(0)
    whole, *fewer = (_silent_round(setup, drawing(setup.open(seed), ranks), ranks) for ranks in cohorts)
    pairs = [(value, whole[name]) for one in fewer for name, value in one.items()]
    if not pairs:
        return [skipped("freshness: noise beside other cohorts", "no round fits the budget")]
    moved = sum(not torch.equal(one, two) for one, two in pairs)
    detail = f"of {len(pairs)} releases have other noise where other clients are drawn"
    return [exact("freshness: noise beside other cohorts", moved, detail)]


def _silent_round(setup: Setup, channel: Channel, ranks: Tensor) -> dict[str, Tensor]:
    """Return what the first round of the cohort ``ranks`` releases of nothing, by name."""
    noted: list[tuple[int, str, Tensor]] = []
    channel.record = noted
    for _, clients in rounds(setup, channel, stop=1):
        if setup.gradients is None:
            for plan in channel.plans:
                channel.release(plan.name, *setup.zeros(plan.dimension, ranks[:0]))
        else:
            few = clients[clients < 2 * CLIENTS]
            few = few[local_of(channel).steps(few) > 0]
            empty = torch.zeros(0, setup.records.dimension), torch.zeros(0, dtype=torch.int64)
            local_of(channel).release(few, 0, [empty])
    return {name: value for _, name, value in noted}


def training_freshness(setup: Setup, claims: Claims, seed: int) -> list[Finding]:
    """Check that no local training of a participation has the noise of another one; nothing where there is only one."""
    plan = setup.records
    if plan.trainings == 1:
        return []
    channel = setup.open(seed)
    clients = first_cohort(setup, channel)[:CLIENTS]
    noise: list[list[np.ndarray]] = [[] for _ in range(plan.trainings)]
    empty = torch.zeros(0, plan.dimension), torch.zeros(0, dtype=torch.int64)
    for client in clients.tolist():
        local = local_of(channel)
        for number in local.step_numbers(client):
            value = local.release(torch.tensor([client]), number, [empty]).cpu().numpy()
            noise[number // local.stride].append(standardized(value, claims.of(GRADIENT, client)))
    if not noise[0]:
        return [skipped("freshness: local trainings", "nobody takes part")]
    first, *later = (np.concatenate(rows) for rows in noise)
    check = "freshness: local trainings, 1 and {}"
    return [fresh_between(check.format(number), first, other) for number, other in enumerate(later, start=2)]


# Correlations


def _long(noise: np.ndarray) -> np.ndarray:
    """Return rows of at least the shortest length: consecutive steps put together."""
    group = -(-_SHORTEST // noise.shape[1])
    usable = len(noise) // group * group
    return noise[:usable].reshape(-1, group * noise.shape[1])


def fresh_rows(check: str, noise: np.ndarray) -> Finding:
    """Check that no two rows (T, D) of a channel share noise (the first 64; short ones are put together)."""
    rows = _long(noise)[:_ROWS]
    if len(rows) < 2:
        return skipped(check, "fewer than two steps of noise")
    cosines = correlations(rows, rows) - np.eye(len(rows)) * 2
    return _correlated(check, float(cosines.max()), rows.shape[1], len(rows) * (len(rows) - 1) // 2)


def fresh_between(check: str, first: np.ndarray, second: np.ndarray) -> Finding:
    """Check that no step of one sample shares noise with a step of the other; both (T, D), the first 64 rows of
    each."""
    one, two = _long(first)[:_ROWS], _long(second)[:_ROWS]
    if not len(one) or not len(two):
        return skipped(check, "no noise to compare")
    return _correlated(check, float(correlations(one, two).max()), one.shape[1], len(one) * len(two))


def fresh_within(name: str, noise: np.ndarray, parts: Sequence[tuple[int, int]]) -> list[Finding]:
    """Check that no vector repeats itself at any lag (the first 4,096 of a long one, short ones are put together), and
    no tensor repeats another one."""
    if noise.shape[1] < _SHORTEST:
        noise = noise[: _LAG_ELEMENTS // 128].reshape(1, -1)
        return [_lags(f"freshness: coordinates of {name}", noise)]
    noise = noise[:_ROWS]
    findings = [_lags(f"freshness: coordinates of {name}", noise[: max(1, _LAG_ELEMENTS // noise.shape[1])])]
    pairs = []
    for index, (a, b) in enumerate(parts[:16]):
        for c, e in parts[index + 1 : 16]:
            length = min(b - a, e - c)
            if length * len(noise) >= _SHORTEST:
                pairs.append(((a, a + length), (c, c + length)))
    if not pairs:
        return findings
    scores = []
    for (a, b), (c, e) in pairs:
        one, two = noise[:, a:b].reshape(1, -1), noise[:, c:e].reshape(1, -1)
        scores.append(float(correlations(one, two)[0, 0]) * math.sqrt(one.size))
    worst = int(np.argmax(scores))
    where = "coordinates {}:{} and {}:{}".format(*pairs[worst][0], *pairs[worst][1])
    detail = f"correlation times sqrt(d) of {where}, {len(pairs)} pairs"
    return [*findings, too_large(f"freshness: tensors of {name}", scores[worst], FRESH, detail, len(pairs) * 2e-9)]


def _lags(check: str, noise: np.ndarray) -> Finding:
    """Correlate every vector with itself, shifted: by the Fourier transform, over all steps together."""
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


def fresh_names(noise: Mapping[str, np.ndarray]) -> list[Finding]:
    """Check that releases of one step have noise of their own."""
    names = list(noise)
    findings = []
    for index, one in enumerate(names):
        for two in names[index + 1 :]:
            d = min(noise[one].shape[1], noise[two].shape[1])
            check = f"freshness: {one} and {two}"
            if d < _SHORTEST:
                findings.append(fresh_coordinates(check, noise[one], noise[two]))
            else:
                findings.append(fresh_between(check, noise[one][:, :d], noise[two][:, :d]))
    return findings


def fresh_coordinates(check: str, first: np.ndarray, second: np.ndarray) -> Finding:
    """Check that no coordinate of one sample follows one of the other from step to step: (T, D) and (T, E), the same
    steps."""
    steps = len(first)
    if steps < _SHORTEST:
        return skipped(check, f"fewer than {_SHORTEST} steps of noise")
    found = correlations(first.T, second.T)
    return _correlated(check, float(found.max()), steps, found.size)


def _correlated(check: str, largest: float, d: int, pairs: int) -> Finding:
    return too_large(check, largest * math.sqrt(d), FRESH, f"correlation times sqrt(d), {pairs} pairs", pairs * 2e-9)


# Another channel, a forked process, a restored run


def fresh_objects(setup: Setup, sample: Sample, first: int, second: int, steps: int) -> list[Finding]:
    """Compare two channels: of different seeds, or of the same one in secure mode, where the seed must not matter."""
    seeds = (first, first if setup.secure else second)
    one, two = (sample(setup.open(seed), 0, steps) for seed in seeds)
    return [fresh_between(f"freshness: channels, {name}", one[name], two[name]) for name in one]


def fresh_forks(setup: Setup, sample: Sample, seed: int, steps: int) -> list[Finding]:
    """Compare the noise of both sides where a process forks with an open channel.

    In seeded mode the same step is by design the same release, so the child goes on at the next step; in secure mode
    both take the same step, and copied generator state would repeat the noise.
    """
    if not hasattr(os, "fork"):
        return [skipped("freshness: forked process", "this system has no fork")]
    half = max(1, steps // 2)
    channel = setup.open(seed)
    channel.start(0)
    start = 0 if setup.secure else half
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # a child must not enter a pool of threads that only its parent has
    try:
        theirs = _in_child(lambda: sample(channel, start, start + half))
        ours = sample(channel, 0, half)
    finally:
        torch.set_num_threads(threads)
    if theirs is None:
        return [skipped("freshness: forked process", "the forked process did not answer")]
    return [fresh_between(f"freshness: forked process, {name}", ours[name], theirs[name]) for name in ours]


def fresh_restores(setup: Setup, sample: Sample, seed: int, steps: int) -> list[Finding]:
    """Compare the noise before and after a run ends and is resumed from its ledger."""
    half = max(1, steps // 2)
    with tempfile.TemporaryDirectory(prefix="fedmtl-audit-") as folder:
        path = Path(folder) / "ledger.jsonl"
        with closing(setup.open(seed, ledger=path)) as before:
            first = sample(before, 0, half)
        start = 0 if setup.secure else half  # a replayed step: by design the same release in seeded mode
        with closing(setup.open(seed, ledger=path, resume=True)) as after:
            second = sample(after, start, start + half)
    return [fresh_between(f"freshness: after a restore, {name}", first[name], second[name]) for name in first]


def _in_child(work: Callable[[], dict[str, np.ndarray]]) -> dict[str, np.ndarray] | None:
    """Return what ``work()`` returns in a forked process; None if it fails or takes too long."""
    reading, writing = os.pipe()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # threads of the parent: the child uses none
        child = os.fork()
    if child == 0:
        code = 1
        try:
            os.close(reading)
            buffer = io.BytesIO()
            np.savez(buffer, **work())  # type: ignore[arg-type]
            with os.fdopen(writing, "wb") as pipe:
                pipe.write(buffer.getvalue())
            code = 0
        finally:
            os._exit(code)
    os.close(writing)
    deadline, received = time.monotonic() + _PATIENCE, bytearray()
    with os.fdopen(reading, "rb", buffering=0) as pipe:
        while True:
            ready, _, _ = select.select([pipe], [], [], max(0.0, deadline - time.monotonic()))
            if not ready:
                os.kill(child, signal.SIGKILL)
                break
            part = pipe.read(1 << 20)
            if not part:
                break
            received += part
    _, status = os.waitpid(child, 0)
    if status != 0:
        return None
    with np.load(io.BytesIO(received)) as found:
        return {name: found[name] for name in found.files}
