"""Composition of identical steps by ``dp_accounting``: privacy loss distributions (default) or Renyi DP.

Every figure is an upper bound. The discretization of a privacy loss distribution is pessimistic ("connect the
dots"), so a coarser grid is looser and never wrong; its relative error on epsilon is about T (h / eps)^2 for
T steps and grid
width h, so the grid follows the standard deviation of the loss of one step: about 1e-4 relative, at a cost of
milliseconds. ``dp_accounting``'s RDP accountant ignores REPLACE_ONE for the plain Gaussian, hence multipliers
given to this module are always relative to the full sensitivity.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Iterator
from contextlib import contextmanager
from functools import lru_cache
from typing import Any

from ..errors import PrivacyError
from .settings import Accountant

_GRID = 0.03
_POINTS = 1e5
_COARSEST = 0.1


@lru_cache(maxsize=4096)
def epsilon(event: Any, uses: int, delta: float, *, accountant: Accountant = "pld", coarsen: float = 1.0) -> float:
    """An upper bound on the epsilon of ``uses`` compositions of ``event`` at ``delta``.

    Args:
        event: a ``dp_accounting`` event: Gaussian, Poisson-sampled Gaussian, or Gaussian sampled without
            replacement (replace-one, RDP only). Its noise multiplier is relative to the full sensitivity.
        uses: number of steps; 0 costs 0.
        delta: in (0, 1).
        accountant: ``"pld"`` or ``"rdp"``.
        coarsen: factor on the width of the grid; above 1 is faster and looser, still an upper bound.

    Raises:
        PrivacyError: an event that the accountant does not support.
    """
    if uses == 0:
        return 0.0
    if accountant == "rdp":
        return _rdp_epsilon(event, uses, delta)
    multiplier, probability = gaussian_parameters(event)
    if probability < 1:
        loss = _step_distribution(multiplier, probability, _grid(multiplier, probability, coarsen)).self_compose(uses)
        return max(0.0, float(loss.get_epsilon_for_delta(delta)))
    from dp_accounting import gaussian_mechanism

    # T Gaussian releases are one with sqrt(T) times less noise, whose epsilon is a closed form.
    return max(0.0, float(gaussian_mechanism.get_epsilon_gaussian(multiplier / math.sqrt(uses), delta)))


def gaussian_parameters(event: Any) -> tuple[float, float]:
    """(noise multiplier, sampling probability) of a Gaussian or Poisson-sampled Gaussian event."""
    from dp_accounting import dp_event

    if isinstance(event, dp_event.GaussianDpEvent):
        return float(event.noise_multiplier), 1.0
    if isinstance(event, dp_event.PoissonSampledDpEvent) and isinstance(event.event, dp_event.GaussianDpEvent):
        return float(event.event.noise_multiplier), float(event.sampling_probability)
    raise PrivacyError(f"The pld accountant does not support {event}; sampling without replacement needs 'rdp'.")


def largest_uses(event: Any, budget: float, delta: float, *, accountant: Accountant, at_least: int = 0) -> int:
    """The largest number of steps whose epsilon is at most ``budget``.

    Args:
        event, delta, accountant: as for :func:`epsilon`.
        budget: finite epsilon.
        at_least: a number of steps known to fit, where the search starts.
    """

    def fits(uses: int) -> bool:
        return epsilon(event, uses, delta, accountant=accountant) <= budget

    low, high = at_least, max(1, at_least + max(1, at_least // 8))
    while fits(high):
        low, high = high, 2 * high
        if high > 1 << 40:
            return low
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if fits(middle) else (low, middle)
    return low


def _grid(multiplier: float, probability: float, coarsen: float) -> float:
    """Grid width from the standard deviation of the loss of one step, q sqrt(exp(1 / z^2) - 1) or at most 1 /
    z.

    Where the loss has a long thin tail (small q and z), the number of points is bounded instead: the largest
    loss is about log(1 + q (exp(r) - 1)), r = 10 / z + 1 / (2 z^2).
    """
    exponent = multiplier**-2.0
    spread, reach = math.sqrt(exponent), 10 / multiplier + exponent / 2
    if exponent < 50:
        spread = min(spread, probability * math.sqrt(math.expm1(exponent)))
    reach = math.log1p(probability * math.expm1(reach)) if reach < 500 else reach + math.log(probability)
    return min(max(_GRID * spread, reach / _POINTS) * coarsen, _COARSEST)


@lru_cache(maxsize=64)
def _step_distribution(multiplier: float, probability: float, width: float) -> Any:
    from dp_accounting.pld import privacy_loss_distribution as pld

    return pld.from_gaussian_mechanism(
        multiplier, sampling_prob=probability, value_discretization_interval=width, use_connect_dots=True
    )


def _rdp_epsilon(event: Any, uses: int, delta: float) -> float:
    with _quiet():
        orders, divergences = _rdp_curve(event)
        from dp_accounting.rdp import rdp_privacy_accountant as rdp

        return max(0.0, float(rdp.compute_epsilon(orders, uses * divergences, delta)[0]))


@lru_cache(maxsize=256)
def _rdp_curve(event: Any) -> tuple[Any, Any]:
    """Orders and Renyi divergences of one step."""
    import dp_accounting
    from dp_accounting.rdp import RdpAccountant

    relation = dp_accounting.NeighboringRelation.ADD_OR_REMOVE_ONE
    if isinstance(event, dp_accounting.SampledWithoutReplacementDpEvent):
        relation = dp_accounting.NeighboringRelation.REPLACE_ONE
    accountant = RdpAccountant(neighboring_relation=relation)
    if not accountant.supports(event):
        raise PrivacyError(f"The rdp accountant does not support {event}.")
    accountant.compose(event)
    return accountant.orders, accountant.rdp


@contextmanager
def _quiet() -> Iterator[None]:
    """Silence the library's notes on orders it leaves out; without them the bound is looser, and sound."""
    logger = logging.getLogger("absl")
    disabled, logger.disabled = logger.disabled, True
    try:
        yield
    finally:
        logger.disabled = disabled
