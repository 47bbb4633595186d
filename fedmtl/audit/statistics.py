"""Exact tests that the checks share.

Every sample is first turned into numbers that are independent N(0, 1) under the claim: continuous
laws by their distribution function, discrete laws by the randomized one (a uniform number between
the values just below and at the observation, with the audit's own coins), which is exactly uniform.
One pair of two-sided tests then serves all.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
from scipy import special, stats

from ..random import derive_key
from .findings import Finding, low_p, skipped

LEAST = 40
"""Fewest numbers of noise that are compared."""


def auditor(seed: int, purpose: str) -> np.random.Generator:
    """Returns the audit's own random numbers, independent of those of the run."""
    return np.random.Generator(np.random.PCG64(derive_key(seed, f"audit/{purpose}")))


def seeds(seed: int, purpose: str, count: int) -> Iterator[int]:
    """Yields seeds of ``count`` channels."""
    return (derive_key(seed, f"audit/{purpose}", index) >> 1 for index in range(count))


def energy_p(energy: np.ndarray | float, degrees: np.ndarray | float) -> np.ndarray:
    """Returns two-sided p-values of sums of ``degrees`` squares under the chi-square law; 0 for a
    sum that is not finite."""
    law = stats.chi2(degrees)
    return np.nan_to_num(np.minimum(1.0, 2 * np.minimum(law.cdf(energy), law.sf(energy))))


def kolmogorov_p(values: np.ndarray) -> float:
    """Returns the Kolmogorov-Smirnov p-value of ``values`` (any shape) against N(0, 1); 0 if one is
    not a number."""
    if not values.size or not np.isfinite(values).all():
        if values.size:
            return 0.0
        return 1.0
    return float(stats.kstest(values.ravel(), special.ndtr, method="asymp").pvalue)


def normal_p(values: np.ndarray) -> float:
    """Returns the smaller of the energy's and the Kolmogorov-Smirnov p-value, doubled, of values
    that should be i.i.d. N(0, 1)."""
    if values.size == 0:
        return 1.0
    with np.errstate(over="ignore", invalid="ignore"):
        energy = float((values**2).sum())
    return min(1.0, 2 * min(float(energy_p(energy, values.size)), kolmogorov_p(values)))


def from_binomial(
    count: np.ndarray,
    trials: np.ndarray | int,
    probability: np.ndarray | float,
    coins: np.random.Generator,
) -> np.ndarray:
    """Returns N(0, 1) numbers from binomial counts: their randomized distribution function."""
    law = stats.binom(trials, probability)
    uniform = law.cdf(count - 1) + law.pmf(count) * coins.random(np.shape(count))
    return special.ndtri(np.clip(uniform, 0.0, 1.0))


def extreme_p(
    count: np.ndarray, trials: np.ndarray | int, probability: np.ndarray | float
) -> np.ndarray:
    """Returns two-sided p-values (k,) of k binomial counts, each multiplied by k (Bonferroni): the
    smallest one is a p-value of all of them."""
    law = stats.binom(trials, probability)
    return np.minimum(1.0, 2 * count.size * np.minimum(law.sf(count - 1), law.cdf(count)))


def correlations(first: np.ndarray, second: np.ndarray) -> np.ndarray:
    """Returns cosines between the rows of (a, d) and (b, d): (a, b); a zero row has cosine 1 with
    everything."""
    with np.errstate(invalid="ignore", over="ignore"):
        lengths = np.linalg.norm(first, axis=1)[:, None] * np.linalg.norm(second, axis=1)[None]
        cosines = np.abs(first @ second.T) / np.where(lengths > 0, lengths, 1.0)
    return np.where((lengths > 0) & np.isfinite(cosines), cosines, 1.0)


def unrelated_p(cosines: np.ndarray, size: np.ndarray | int) -> float:
    """Returns the p-value of the largest of some ``cosines``, each between ``size`` independent
    N(0, 1) numbers and anything that does not depend on them: by Student's law and a union bound; 1
    of none."""
    freedom = np.asarray(size, float) - 1
    ratios = cosines * np.sqrt(freedom / np.maximum(1 - cosines**2, 1e-300))
    return min(1.0, 2 * cosines.size * float(np.min(stats.t.sf(ratios, freedom), initial=1.0)))


def unrelated(check: str, rows: np.ndarray, others: np.ndarray | None = None) -> Finding:
    """Returns the finding that no row of (a, d) is correlated with one of ``others`` (b, d), by
    default with another one: of noise, and of noise or anything that does not depend on it."""
    cosines = correlations(rows, rows if others is None else others)
    if others is None:
        cosines = cosines[np.triu_indices(len(rows), 1)]
    if not cosines.size or rows.shape[1] < LEAST:
        return skipped(check, "too little noise to compare")
    detail = f"largest correlation {cosines.max():.4g} of {cosines.size} pairs"
    return low_p(check, unrelated_p(cosines, rows.shape[1]), detail)
