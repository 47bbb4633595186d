"""From epsilon to noise: the smallest multiplier whose composed epsilon does not exceed the target."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import lru_cache

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

    def cost(coarsen: float) -> Callable[[float], float]:
        def of(log_z: float) -> float:
            step = step_event((math.exp(log_z),) * releases, sampler, law, accountant)
            value = epsilon(step.event, uses, delta, accountant=step.accountant, coarsen=coarsen)
            return math.log(max(value, 1e-300) / target)

        return of

    coarse = cost(8.0)
    low, high = 0.0, 0.0
    while coarse(high) > 0:
        low, high = high, high + 0.7
        if high > math.log(_LARGEST):
            raise ConfigError(
                f"epsilon = {target:g} at delta = {delta:g} cannot be reached in {uses} steps with "
                f"{sampler.describe()}: even noise {_LARGEST:g} times the sensitivity is not enough. Ask for a "
                f"larger epsilon or delta."
            )
    while low == high or coarse(low) <= 0:
        low, high = low - 0.7, low
    # The coarse grid overstates epsilon, so its root is an upper end for the fine one.
    high = _root(coarse, low, high)
    fine = cost(1.0)
    low = high
    gap = 2e-3
    while fine(low) <= 0:
        low, high, gap = low - gap, low, 4 * gap
    return math.exp(_root(fine, low, high) if low < high else _widen(fine, high))


def _root(cost: Callable[[float], float], low: float, high: float) -> float:
    """Upper end of a bracket of the root, narrowed to the tolerance by the Illinois variant of regula falsi."""
    at_low, at_high = cost(low), cost(high)
    side = 0
    for _ in range(60):
        if high - low <= _TOLERANCE:
            break
        guess = (
            high - at_high * (high - low) / (at_high - at_low) if math.isfinite(at_low) else (low + high) / 2
        )
        guess += 0.25 * _TOLERANCE  # lands just above the root, where the bracket closes
        guess = min(max(guess, low + 0.1 * _TOLERANCE), high - 0.1 * _TOLERANCE)
        value = cost(guess)
        if value > 0:
            low, at_low = guess, value
            at_high, side = (at_high / 2, -1) if side == -1 else (at_high, -1)
        else:
            if value > -_TOLERANCE:
                return guess
            high, at_high = guess, value
            at_low, side = (at_low / 2, 1) if side == 1 else (at_low, 1)
    return high


def _widen(cost: Callable[[float], float], start: float) -> float:
    """The first point from ``start`` on that meets the target, in steps that begin at twice the tolerance."""
    step = 2 * _TOLERANCE
    while cost(start) > 0:
        start, step = start + step, 2 * step
    return start
