"""Hyper-parameter search on private data (Papernot, Steinke, "Hyperparameter tuning with Renyi
differential privacy", ICLR 2022).

A candidate is a whole run: hyper-parameters drawn at random, training under noise, and a noised
score. It is repeated K times, K drawn from a law of known mean, and the candidate with the best
score is released, with its hyper-parameters and score and nothing of the others. Choosing K, or
stopping, by looking at the scores is not covered, and neither is an output that tells which of the
K runs it comes from: the runs must be independent draws of one mechanism, alike in everything that
is public, such that the output is the best candidate and not its number.

The law of K is the truncated negative binomial one of Definition 1 with shape eta and halting
probability gamma,

    P(K = k) = (1 - gamma)^k / (gamma^-eta - 1) prod_{l < k} (l + eta) / (l + 1),   k = 1, 2, ...

(logarithmic at eta = 0, geometric at eta = 1), or, at an infinite shape, Poisson, where K = 0
releases nothing.
"""

from __future__ import annotations

import math
from functools import lru_cache

import numpy as np
from scipy import optimize, special

from ...errors import ConfigError
from ...random import Coins
from ..events import DpEvent, dp_event


def selection_event(event: DpEvent, *, mean: float, shape: float) -> DpEvent:
    """Returns the event of the whole search.

    Args:
        event: one candidate, its score included.
        mean: expected number of repetitions, at least 1.
        shape: eta >= 0; infinite for Poisson.

    Raises:
        ConfigError: a mean below 1 or a negative shape.
    """
    halting_probability(mean, shape)
    return dp_event.RepeatAndSelectDpEvent(event, mean, shape)


def selection_curve(
    orders: np.ndarray, candidate: np.ndarray, *, mean: float, shape: float
) -> np.ndarray:
    """Returns Renyi divergences of the search from those of one candidate.

    Args:
        orders: (m,) orders, all above 1.
        candidate: (m,) divergences e(a) of one candidate.
        mean: as for :func:`selection_event`.
        shape: as for :func:`selection_event`.

    Returns:
        (m,) divergences: by Theorem 2
        ``e(a) + (1 + eta) min_b ((1 - 1 / b) e(b) + log(1 / gamma) / b) + log E[K] / (a - 1)``, by
        Theorem 6 (Poisson) ``e(a) + E[K] delta(log(1 + 1 / (a - 1))) + log E[K] / (a - 1)``, delta
        being that of one candidate.
    """
    repeats = math.log(mean) / (orders - 1)
    if math.isinf(shape):
        from dp_accounting.rdp import rdp_privacy_accountant as rdp

        deltas = [
            rdp.compute_delta(orders.tolist(), candidate.tolist(), math.log1p(1 / (a - 1)))[0]
            for a in orders
        ]
        return candidate + mean * np.asarray(deltas) + repeats
    gamma = halting_probability(mean, shape)
    halting = float(np.min((1 - 1 / orders) * candidate - math.log(gamma) / orders))
    return candidate + (1 + shape) * halting + repeats


@lru_cache(maxsize=256)
def halting_probability(mean: float, shape: float) -> float:
    """Returns gamma of the law of K with this mean; 1 for a mean of 1. Poisson has none: nan.

    Raises:
        ConfigError: a mean below 1 (or infinite) or a negative shape.
    """
    if not (math.isfinite(mean) and mean >= 1):
        raise ConfigError(
            f"PrivateSearch.mean is {mean!r}; the expected number of repetitions must be finite, "
            "at least 1."
        )
    if not shape >= 0:
        raise ConfigError(
            f"PrivateSearch.shape is {shape!r}; it must be at least 0 (inf: Poisson)."
        )
    if math.isinf(shape):
        return math.nan
    if mean == 1:
        return 1.0

    def excess(log_inverse: float) -> float:
        """Returns the logarithm of the mean at gamma = exp(-log_inverse), less that asked for."""
        top = math.log(math.expm1(log_inverse))
        if shape == 0:
            return top - math.log(log_inverse) - math.log(mean)
        return top + math.log(shape) - math.log(-math.expm1(-shape * log_inverse)) - math.log(mean)

    high = 1.0
    while excess(high) < 0:
        high *= 2
    return math.exp(-float(optimize.brentq(excess, 1e-18, high, xtol=1e-16, rtol=1e-14)))


def most_repetitions(mean: float, shape: float) -> int:
    """Returns a number that K exceeds with a probability below exp(-1000).

    Args:
        mean: as for :func:`selection_event`.
        shape: as for :func:`selection_event`.
    """
    if math.isinf(shape):
        return math.ceil(math.e**2 * mean + 1000)  # P(K > k) <= exp(-mean) (e mean / k)^k
    return math.ceil(2000 * (1 + shape) / halting_probability(mean, shape))


def draw_repetitions(source: Coins | np.random.Generator, mean: float, shape: float) -> int:
    """Returns K, by inversion of its distribution function from one uniform number.

    Args:
        source: coins of a noise source (they are privacy coins), or a NumPy generator for
            simulation.
        mean: as for :func:`selection_event`.
        shape: as for :func:`selection_event`.

    Returns:
        Number of candidates to run; 0 is possible under Poisson only.

    Example:
        >>> import numpy as np
        >>> from fedmtl.privacy import draw_repetitions
        >>> generator = np.random.default_rng(0)
        >>> draws = [draw_repetitions(generator, mean=5.0, shape=1.0) for _ in range(1000)]
        >>> min(draws), 4.5 < sum(draws) / 1000 < 5.5
        (1, True)
    """
    gamma = halting_probability(mean, shape)
    if gamma == 1:
        return 1
    if isinstance(source, np.random.Generator):
        uniform = source.random()
    else:
        uniform = float(np.asarray(source.uniform(1))[0])
    total = 0.0
    first = 0 if math.isinf(shape) else 1
    size = 64
    while True:
        ks = np.arange(first, first + size, dtype=np.float64)
        cumulative = total + np.cumsum(np.exp(_log_probability(ks, mean, shape, gamma)))
        beyond = np.flatnonzero(cumulative > uniform)
        if beyond.size:
            return first + int(beyond[0])
        # the uniform number lies above the largest sum in float64
        if first > mean and cumulative[-1] - total < 1e-17:
            return first
        total = float(cumulative[-1])
        first = first + size
        size = 2 * size


def _log_probability(ks: np.ndarray, mean: float, shape: float, gamma: float) -> np.ndarray:
    """Returns (n,) logarithms of P(K = k)."""
    if math.isinf(shape):
        return ks * math.log(mean) - mean - special.gammaln(ks + 1)
    log_inverse = -math.log(gamma)
    decay = ks * math.log1p(-gamma)
    if shape == 0:
        logs: np.ndarray = decay - np.log(ks) - math.log(log_inverse)
        return logs
    norm = shape * log_inverse + math.log(-math.expm1(-shape * log_inverse))
    return (
        decay
        + special.gammaln(ks + shape)
        - special.gammaln(shape)
        - special.gammaln(ks + 1)
        - norm
    )
