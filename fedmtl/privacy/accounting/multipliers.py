"""From epsilon to noise: the smallest multiplier whose composed epsilon does not exceed the
target."""

from __future__ import annotations

import math
from collections.abc import Callable

from scipy import optimize

from ..._rounding import rounded_up
from ...errors import ConfigError
from ..events import DpEvent
from .composition import epsilon
from .selection import selection_event

_LARGEST = 1e8
_TOLERANCE = 1e-5


def smallest_multiplier(
    cost: Callable[[float, float], float], *, target: float, delta: float, uses: str
) -> float:
    """Returns the noise multiplier that costs at most ``target``.

    Args:
        cost: epsilon at ``delta`` of a noise multiplier (scale of the noise over the sensitivity;
            of Laplace and K-norm noise 1 / epsilon) and of a factor on the width of the
            accountant's grid; more noise must not cost more.
        target: epsilon, above 0 and finite.
        delta: in (0, 1), for errors.
        uses: the charged uses in words, for errors, such as ``"100 steps"``.

    Returns:
        z with ``cost(z, 1) <= target``, within 1e-5 relative of the smallest such z.

    Raises:
        ConfigError: no multiplier up to 1e8 reaches the target, or every one does.
        PrivacyError: an event that the accountant does not support.
    """

    def excess(coarsen: float) -> Callable[[float], float]:
        def of(log_z: float) -> float:
            return math.log(min(max(cost(math.exp(log_z), coarsen), 1e-300), 1e300) / target)

        return of

    coarse = excess(8.0)
    fine = excess(1.0)
    # The search runs over log z: multipliers span many orders of magnitude.
    high = 0.0
    while coarse(high) > 0:
        high += 0.7
        if high > math.log(_LARGEST):
            raise ConfigError(
                f"epsilon = {rounded_up(target, 6)} at delta = {rounded_up(delta, 6)} cannot be "
                f"reached in {uses}: even noise {_LARGEST:g} times the sensitivity is not enough. "
                "Ask for a larger epsilon or delta."
            )
    low = high - 0.7
    while coarse(low) <= 0:
        high = low
        low = high - 0.7
        if low < -math.log(_LARGEST):
            raise ConfigError(
                f"epsilon = {rounded_up(target, 6)} at delta = {rounded_up(delta, 6)} needs no "
                f"noise in {uses}: even "
                f"{1 / _LARGEST:g} times the sensitivity is enough. Ask for a smaller epsilon."
            )
    # A coarse grid overstates epsilon, so its root lies just above that of the fine one.
    high = _meets(coarse, _root(coarse, low, high, 1e-4))
    low = high
    gap = 1e-3
    while fine(low) <= 0:
        high = low
        low = high - gap
        # The coarse root is nearly right: a bracket that grows finds the fine one in a few steps.
        gap *= 8
    root = high
    if low < high:
        root = _root(fine, low, high, _TOLERANCE / 4)
    # The root is within a tolerance on either side, and the cost must not exceed the target.
    return math.exp(_meets(fine, root))


def selection_epsilon(
    event: DpEvent, delta: float, *, mean: float, shape: float, coarsen: float = 1.0
) -> float:
    """Returns epsilon of the whole search at ``delta``, by Renyi accounting (Theorems 2 and 6).

    Args:
        event: one candidate: training and noised score, any event with a Renyi divergence.
        delta: in (0, 1).
        mean: expected number of repetitions, at least 1.
        shape: eta >= 0; infinite for Poisson.
        coarsen: as for :func:`.composition.epsilon`, here a factor on the steps between orders.

    Raises:
        ConfigError: a mean below 1 or a negative shape.
        PrivacyError: an event without a known Renyi divergence.

    Example:
        >>> from dp_accounting import dp_event
        >>> from fedmtl.privacy import epsilon, selection_epsilon
        >>> event = dp_event.GaussianDpEvent(10.0)
        >>> one = epsilon(event, 1, 1e-6)
        >>> one < selection_epsilon(event, 1e-6, mean=5.0, shape=1.0) < 5 * one
        True
    """
    return epsilon(selection_event(event, mean=mean, shape=shape), 1, delta, coarsen=coarsen)


def calibrate_selection(
    candidate: Callable[[float], DpEvent], *, target: float, delta: float, mean: float, shape: float
) -> float:
    """Returns the smallest noise multiplier with which the whole search costs at most ``target``.

    Args:
        candidate: the event of one candidate under a noise multiplier; more noise must not cost
            more.
        target: epsilon of the whole search.
        delta: of the whole search.
        mean: as for :func:`selection_epsilon`.
        shape: as for :func:`selection_epsilon`.

    Raises:
        ConfigError: the target cannot be reached (with many repetitions the bound has a floor).

    Example:
        >>> from dp_accounting import GaussianDpEvent
        >>> from fedmtl.privacy import calibrate_selection, selection_epsilon
        >>> search = {"delta": 1e-5, "mean": 4.0, "shape": 1.0}
        >>> noise = calibrate_selection(GaussianDpEvent, target=3.0, **search)
        >>> round(selection_epsilon(GaussianDpEvent(noise), **search), 3)
        3.0
    """

    def cost(multiplier: float, coarsen: float) -> float:
        event = candidate(multiplier)
        return selection_epsilon(event, delta, mean=mean, shape=shape, coarsen=coarsen)

    uses = f"a search of {mean:g} expected repetitions"
    return smallest_multiplier(cost, target=target, delta=delta, uses=uses)


def _root(excess: Callable[[float], float], low: float, high: float, tolerance: float) -> float:
    """Returns a point within the tolerance of the sign change of ``excess``."""
    if excess(high) == 0:
        return high
    return float(optimize.brentq(excess, low, high, xtol=tolerance))


def _meets(excess: Callable[[float], float], start: float) -> float:
    """Returns the first point from ``start`` on, in growing steps, with nothing in excess."""
    step = _TOLERANCE / 2
    while excess(start) > 0:
        start = start + step
        step = 2 * step
    return start
