"""From epsilon to noise: the smallest multiplier whose composed epsilon does not exceed the target."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any

from scipy import optimize

from ..._rounding import rounded_up
from ...errors import ConfigError
from .composition import elementary, epsilon
from .selection import selection_event

_LARGEST = 1e8
_TOLERANCE = 1e-5


def calibrate_multiplier(
    step: Callable[[float], Any], *, target: float, delta: float, uses: int, within: str = ""
) -> float:
    """Return the noise multiplier such that ``uses`` steps cost at most ``target``; cached.

    Args:
        step: the event of one step under a noise multiplier (scale of the noise over the
            sensitivity; for Laplace and K-norm noise that is 1 / epsilon); more noise must not cost more. Two functions
            that agree at the multipliers 1 and 2 are taken for the same.
        target: epsilon, above 0 and finite.
        delta: in (0, 1).
        uses: number of steps (participations of one client, where these are what is charged).
        within: a phrase for the error, such as who takes part.

    Returns:
        z with ``epsilon(z) <= target`` by the accountant's own figure, within 1e-5 relative of the smallest
        such z.

    Raises:
        ConfigError: no multiplier up to 1e8 reaches the target, or every one does.
        PrivacyError: an event that the accountant does not support.
    """
    probes = tuple(elementary(step(z)) for z in (1.0, 2.0))
    return _calibrated(_Question(probes, target, delta, uses, step, within))


def selection_epsilon(event: Any, delta: float, *, mean: float, shape: float) -> float:
    """Return epsilon of the whole search at ``delta``, by Renyi accounting (Theorems 2 and 6).

    Args:
        event: one candidate: training and noised score, any event with a Renyi divergence.
        delta: in (0, 1).
        mean: expected number of repetitions, at least 1.
        shape: eta >= 0; infinite for Poisson.

    Raises:
        ConfigError: a mean below 1 or a negative shape.
        PrivacyError: an event without a known Renyi divergence.
    """
    return epsilon(selection_event(event, mean=mean, shape=shape), 1, delta)


def calibrate_selection(
    candidate: Callable[[float], Any], *, target: float, delta: float, mean: float, shape: float
) -> float:
    """Return the smallest noise multiplier with which the whole search costs at most ``target``.

    Args:
        candidate: the event of one candidate under a noise multiplier; more noise must not cost more.
        target, delta: of the whole search.
        mean, shape: as for :func:`selection_epsilon`.

    Raises:
        ConfigError: the target cannot be reached (with many repetitions the bound has a floor).
    """

    def step(multiplier: float) -> Any:
        return selection_event(candidate(multiplier), mean=mean, shape=shape)

    within = f"a search of {mean:g} expected repetitions"
    return calibrate_multiplier(step, target=target, delta=delta, uses=1, within=within)


@dataclass(frozen=True)
class _Question:
    """What is asked; ``step`` and the phrase for errors do not tell questions apart."""

    probes: tuple[object, ...]
    target: float
    delta: float
    uses: int
    step: Callable[[float], Any] = field(compare=False)
    within: str = field(compare=False)


@lru_cache(maxsize=1024)
def _calibrated(question: _Question) -> float:
    target, delta, uses, within = question.target, question.delta, question.uses, question.within

    def excess(coarsen: float) -> Callable[[float], float]:
        def of(log_z: float) -> float:
            value = epsilon(question.step(math.exp(log_z)), uses, delta, coarsen=coarsen)
            return math.log(min(max(value, 1e-300), 1e300) / target)

        return of

    where = f" with {within}" if within else ""
    coarse, fine = excess(8.0), excess(1.0)
    high = 0.0
    while coarse(high) > 0:
        high += 0.7
        if high > math.log(_LARGEST):
            raise ConfigError(
                f"epsilon = {rounded_up(target, 6)} at delta = {rounded_up(delta, 6)} cannot be reached in "
                f"{uses} steps{where}: even noise {_LARGEST:g} times the sensitivity is not enough. "
                f"Ask for a larger epsilon or delta."
            )
    low = high - 0.7
    while coarse(low) <= 0:
        low, high = low - 0.7, low
        if low < -math.log(_LARGEST):
            raise ConfigError(
                f"epsilon = {rounded_up(target, 6)} at delta = {rounded_up(delta, 6)} needs no noise in "
                f"{uses} steps{where}: even {1 / _LARGEST:g} times the sensitivity is enough. "
                f"Ask for a smaller epsilon."
            )
    # A coarse grid overstates epsilon, so its root lies just above that of the fine one.
    high = _meets(coarse, _root(coarse, low, high, 1e-4))
    low, gap = high, 1e-3
    while fine(low) <= 0:
        low, high, gap = low - gap, low, 8 * gap
    return math.exp(_meets(fine, _root(fine, low, high, _TOLERANCE / 4) if low < high else high))


def _root(excess: Callable[[float], float], low: float, high: float, tolerance: float) -> float:
    """Return a point within the tolerance of where ``excess`` changes sign."""
    if excess(high) == 0:
        return high
    return float(optimize.brentq(excess, low, high, xtol=tolerance))


def _meets(excess: Callable[[float], float], start: float) -> float:
    """Return the first point from ``start`` on, in growing steps, where nothing is in excess."""
    step = _TOLERANCE / 2
    while excess(start) > 0:
        start, step = start + step, 2 * step
    return start
