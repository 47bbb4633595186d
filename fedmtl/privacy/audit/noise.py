"""Check 1, the noise law, and the correlations of check 2, on noise as numbers that are i.i.d. N(0, 1)."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import numpy as np
from scipy import special

from .findings import Finding, low_p, skipped, too_large
from .play import Noise
from .setup import Setup
from .statistics import correlations, energy_p, kolmogorov_p, normal_p

FRESH = 6.0
"""Correlations above this many times 1 / sqrt(d) are not chance: 2e-9 for one pair under the normal law."""

_SHORTEST, _ROWS = 64, 64  # shortest row for a correlation; most rows compared
_KS_SAMPLES = 1 << 20
_MOST_LAGS, _LAG_ELEMENTS = 1 << 12, 1 << 22


def noise_laws(setup: Setup, noise: Mapping[str, Noise]) -> list[Finding]:
    """Make the tests of :func:`noise_law` on every release, and the total of every client that has noise of its own."""
    findings = []
    for name, one in noise.items():
        findings += noise_law(name, one.units, setup.parts(one.units.shape[1]))
        if one.clients is not None and one.units.size:
            findings.append(_by_client(setup, name, one))
    return findings


def _by_client(setup: Setup, name: str, noise: Noise) -> Finding:
    assert noise.clients is not None
    acting, place = np.unique(noise.clients, return_inverse=True)
    with np.errstate(over="ignore", invalid="ignore"):
        energies = np.bincount(place, (noise.units**2).sum(1))
    sizes = np.bincount(place) * noise.units.shape[1]
    p_values = energy_p(energies, sizes)
    worst = int(p_values.argmin())
    detail = (
        f"client {setup.records.ids[acting[worst]]!r} has {math.sqrt(max(energies[worst] / sizes[worst], 0)):.4g} of "
        f"the claimed deviation, {sizes[worst]} numbers"
    )
    return low_p(f"noise law: clients of {name}", min(1.0, float(p_values[worst]) * len(acting)), detail)


def noise_law(name: str, noise: np.ndarray, parts: Sequence[tuple[int, int]]) -> list[Finding]:
    """Two-sided chi-square tests on the total, on every tensor and on every tensor of every step, and on the spread
    of the lengths; Kolmogorov-Smirnov.

    Args:
        name: of the release.
        noise: (T, D), standardized.
        parts: (start, stop) of every tensor.
    """
    if not noise.size:
        return [skipped(f"noise law: {name}", "no step fits the budget")]
    with np.errstate(over="ignore", invalid="ignore"):
        energies = np.stack([(noise[:, a:b] ** 2).sum(1) for a, b in parts], 1)
    sizes = np.array([b - a for a, b in parts], float)
    steps = len(noise)
    tensors, cells = energy_p(energies.sum(0), steps * sizes), energy_p(energies, sizes)
    worst, cell = int(tensors.argmin()), int(cells.argmin())
    total, count = energies.sum(), noise.size
    return [
        low_p(
            f"noise law: total of {name}",
            float(energy_p(total, count)),
            f"standard deviation {math.sqrt(max(total, 0) / count):.4g} of the claimed one, {count} numbers",
        ),
        low_p(
            f"noise law: tensors of {name}",
            min(1.0, float(tensors[worst]) * len(parts)),
            f"tensor {worst} has {math.sqrt(max(energies[:, worst].sum() / steps / sizes[worst], 0)):.4g} of the "
            "claimed deviation",
        ),
        low_p(
            f"noise law: steps of {name}",
            min(1.0, float(cells.min()) * cells.size),
            f"tensor {cell % len(parts)} in step {cell // len(parts)}",
        ),
        low_p(
            f"noise law: lengths of {name}",
            normal_p(special.ndtri(special.gammainc(noise.shape[1] / 2, energies.sum(1) / 2))),
            f"chi-square quantiles of the {steps} lengths",
        ),
        low_p(
            f"noise law: shape of {name}",
            kolmogorov_p(noise.ravel()[:_KS_SAMPLES]),
            f"Kolmogorov-Smirnov, {min(count, _KS_SAMPLES)} numbers",
        ),
    ]


def _long(noise: np.ndarray) -> np.ndarray:
    """Rows of at least the shortest length: consecutive steps put together."""
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
    """No step of one sample shares noise with a step of the other; both (T, D), the first 64 rows of each."""
    one, two = _long(first)[:_ROWS], _long(second)[:_ROWS]
    if not len(one) or not len(two):
        return skipped(check, "no noise to compare")
    return _correlated(check, float(correlations(one, two).max()), one.shape[1], len(one) * len(two))


def fresh_within(name: str, noise: np.ndarray, parts: Sequence[tuple[int, int]]) -> list[Finding]:
    """No vector repeats itself at any lag (the first 4,096 of a long one, short ones are put together), and no tensor
    repeats another one."""
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
    """Correlation of every vector with itself, shifted: by the Fourier transform, over all steps together."""
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
    """Releases of one step have noise of their own."""
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
    """No coordinate of one sample follows one of the other from step to step: (T, D) and (T, E), the same steps."""
    steps = len(first)
    if steps < _SHORTEST:
        return skipped(check, f"fewer than {_SHORTEST} steps of noise")
    found = correlations(first.T, second.T)
    return _correlated(check, float(found.max()), steps, found.size)


def _correlated(check: str, largest: float, d: int, pairs: int) -> Finding:
    return too_large(check, largest * math.sqrt(d), FRESH, f"correlation times sqrt(d), {pairs} pairs", pairs * 2e-9)
