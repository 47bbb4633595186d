"""From epsilon to noise: the smallest multiplier whose composed epsilon does not exceed the target."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import lru_cache

from scipy import optimize

from ..errors import ConfigError
from .composition import epsilon
from .release import step_event
from .samplers import BoundSampler, SamplingLaw
from .settings import Accountant

_LARGEST = 1e5
_TOLERANCE = 1e-5


@lru_cache(maxsize=256)
def calibrate_noise(
    sampler: BoundSampler,
    law: SamplingLaw,
    *,
    target: float,
    delta: float,
    uses: int,
    releases: int = 1,
    accountant: Accountant = "pld",
) -> float:
    """The noise multiplier of each release such that ``uses`` steps cost at most ``target``.

    Args:
        sampler, law: who takes part, and what that guarantees.
        target: epsilon, above 0 and finite.
        delta: in (0, 1).
        uses: number of steps (participations of one client, where these are what is charged).
        releases: Gaussian releases in one step, with equal multipliers.
        accountant: ``"pld"`` or ``"rdp"``.

    Returns:
        z with ``epsilon(z) <= target`` by the accountant's own figure, within 1e-5 relative of the smallest
        such z.

    Raises:
        ConfigError: no multiplier up to 1e5 reaches the target.
    """

    def excess(coarsen: float) -> Callable[[float], float]:
        def of(log_z: float) -> float:
            step = step_event((math.exp(log_z),) * releases, sampler, law, accountant)
            value = epsilon(step.event, uses, delta, accountant=step.accountant, coarsen=coarsen)
            return math.log(min(max(value, 1e-300), 1e300) / target)

        return of

    coarse, fine = excess(8.0), excess(1.0)
    high = 0.0
    while coarse(high) > 0:
        high += 0.7
        if high > math.log(_LARGEST):
            raise ConfigError(
                f"epsilon = {target:g} at delta = {delta:g} cannot be reached in {uses} steps with "
                f"{sampler.describe()}: even noise {_LARGEST:g} times the sensitivity is not enough. "
                f"Ask for a larger epsilon or delta."
            )
    low = high - 0.7
    while coarse(low) <= 0:
        low, high = low - 0.7, low
    # A coarse grid overstates epsilon, so its root lies just above that of the fine one.
    high = _meets(coarse, _root(coarse, low, high))
    low, gap = high, 1e-3
    while fine(low) <= 0:
        low, high, gap = low - gap, low, 8 * gap
    return math.exp(_meets(fine, _root(fine, low, high) if low < high else high))


def _root(excess: Callable[[float], float], low: float, high: float) -> float:
    """A point within the tolerance of where ``excess`` changes sign."""
    if excess(high) == 0:
        return high
    return float(optimize.brentq(excess, low, high, xtol=_TOLERANCE / 4))


def _meets(excess: Callable[[float], float], start: float) -> float:
    """The first point from ``start`` on, in growing steps, where nothing is in excess."""
    step = _TOLERANCE / 2
    while excess(start) > 0:
        start, step = start + step, 2 * step
    return start
