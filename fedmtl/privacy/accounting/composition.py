"""Composition of steps by privacy loss distributions; of a private selection by Renyi divergences.

Every figure is an upper bound. The discretization of a privacy loss distribution is pessimistic
(see :mod:`.pld`), so a coarser grid is looser and never wrong; its relative error on epsilon is
about T (h / eps)^2 for T steps and grid width h, so the grid follows the standard deviation of the
loss of one step: about 1e-4 relative, at a cost of milliseconds. ``dp_accounting``'s RDP accountant
ignores REPLACE_ONE for the plain Gaussian, hence multipliers given to this module are always
relative to the full sensitivity, and the relation enters nowhere.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Iterator
from contextlib import contextmanager
from functools import lru_cache
from typing import TYPE_CHECKING

import numpy as np

from ...errors import PrivacyError
from ..events import DpEvent, dp_event
from . import loss_laws, pld
from .gaussian import gaussian_epsilon
from .selection import selection_curve
from .trade_off import TradeOff

if TYPE_CHECKING:
    import numpy as np

Parts = tuple[tuple[DpEvent, int], ...]

_TAIL = 1e-15


def epsilon(event: DpEvent, uses: int, delta: float, *, coarsen: float = 1.0) -> float:
    """Returns an upper bound on the epsilon of ``uses`` compositions of ``event`` at ``delta``;
    cached.

    Args:
        event: a ``dp_accounting`` event: Gaussian, Laplace, K-norm (:class:`.knorm.KNormDpEvent`),
            each of these or several under one Poisson sampling, NoOp (0), NonPrivate (infinite),
            and ComposedDpEvent and SelfComposedDpEvent of all of them. A RepeatAndSelectDpEvent of
            these (see :mod:`.selection`) is composed by Renyi divergences. Noise multipliers are
            relative to the full sensitivity.
        uses: number of steps; 0 costs 0.
        delta: in [0, 1); at 0 pure epsilons add up (infinite for Gaussian noise).
        coarsen: factor on the width of the grid; above 1 is faster and looser, still an upper
            bound.

    Raises:
        PrivacyError: an event that the accountant does not support.

    Example:
        >>> from dp_accounting import dp_event
        >>> from fedmtl.privacy import epsilon
        >>> event = dp_event.GaussianDpEvent(2.0)
        >>> round(epsilon(event, 1, 1e-5), 2), round(epsilon(event, 10, 1e-5), 2)
        (1.99, 7.51)
    """
    if uses == 0:
        return 0.0
    return _epsilon(elementary(event), uses, delta, coarsen)


def renyi_curve(event: DpEvent, orders: tuple[float, ...]) -> np.ndarray:
    """Returns (m,) upper bounds on the Renyi divergences of ``event`` at the ``orders`` (m,), all
    above 1.

    Raises:
        PrivacyError: an event without a known Renyi divergence.
    """
    return sum(
        (count * _renyi_part(part, orders) for part, count in elementary(event)),
        np.zeros(len(orders)),
    )


def elementary(event: DpEvent) -> Parts:
    """Returns the distinct elementary events in ``event`` with their numbers of uses, Gaussian ones
    joined into one.

    Gaussian releases, also under a shared sampling coin, are one release with
    ``sum(z ** -2) ** -0.5``.

    Raises:
        PrivacyError: negative noise, a sampling probability outside [0, 1], or something that is
            not an event.
    """
    counts: dict[DpEvent, int] = {}
    precision = 0.0
    for part, count in _flat(event, 1):
        if isinstance(part, dp_event.GaussianDpEvent):
            # Gaussian releases compose to one whose precision is the sum of theirs.
            precision += count * part.noise_multiplier**-2.0
        elif count:
            counts[part] = counts.get(part, 0) + count
    # One release without noise makes all the others pointless.
    if dp_event.NonPrivateDpEvent() in counts:
        return ((dp_event.NonPrivateDpEvent(), 1),)
    if precision > 0:
        counts[dp_event.GaussianDpEvent(precision**-0.5)] = 1
    return tuple(counts.items())


@lru_cache(maxsize=4096)
def _epsilon(parts: Parts, uses: int, delta: float, coarsen: float) -> float:
    if not parts:
        return 0.0
    if isinstance(parts[0][0], dp_event.NonPrivateDpEvent):
        return math.inf
    if delta == 0:
        # Pure epsilons add up, and no composition is tighter at delta 0.
        return sum(count * uses * loss_laws.loss_of(part).largest for part, count in parts)
    if any(isinstance(part, dp_event.RepeatAndSelectDpEvent) for part, _ in parts):
        return _rdp_epsilon(parts, uses, delta, coarsen)
    if len(parts) == 1 and isinstance(gaussian := parts[0][0], dp_event.GaussianDpEvent):
        # T Gaussian releases are one with sqrt(T) times less noise, whose epsilon is a closed form.
        multiplier = gaussian.noise_multiplier / math.sqrt(parts[0][1] * uses)
        return max(0.0, gaussian_epsilon(multiplier, delta))
    return _pld_epsilon(parts, uses, delta, coarsen)


def trade_off(event: DpEvent, uses: int) -> TradeOff:
    """Returns a bound on the power of every test that observes ``uses`` compositions of ``event``:
    its trade-off curve; cached.

    Args:
        event: as for :func:`epsilon`, without private selection.
        uses: number of steps.

    Raises:
        PrivacyError: an event whose loss has no law here.
    """
    return _trade_off(elementary(event) if uses else (), uses)


@lru_cache(maxsize=32)
def _trade_off(parts: Parts, uses: int) -> TradeOff:
    if not parts:
        return TradeOff.of_epsilon(0.0, 0.0)
    if isinstance(parts[0][0], dp_event.NonPrivateDpEvent):
        return TradeOff.of_epsilon(math.inf, 0.0)
    pairs = _loss_pairs(parts, uses, 1.0)
    return TradeOff.of_laws(
        *(pld.compose([(pair[side], n) for pair, n in pairs], _TAIL) for side in (0, 1))
    )


def _pld_epsilon(parts: Parts, uses: int, delta: float, coarsen: float) -> float:
    pairs = _loss_pairs(parts, uses, coarsen)
    tail = min(_TAIL, delta * 1e-3)
    value = pld.composed_epsilon([(pair.remove, count) for pair, count in pairs], delta, tail)
    if any(pair.add is not pair.remove for pair, _ in pairs):
        value = max(
            value, pld.composed_epsilon([(pair.add, count) for pair, count in pairs], delta, tail)
        )
    return min(value, sum(count * uses * loss_laws.loss_of(part).largest for part, count in parts))


def _joint(part: DpEvent, count: int) -> tuple[DpEvent, int]:
    """Returns ``count`` Gaussian uses as the joint one, and other uses as they are."""
    if isinstance(part, dp_event.GaussianDpEvent):
        return dp_event.GaussianDpEvent(part.noise_multiplier / math.sqrt(count)), 1
    return part, count


def _loss_pairs(parts: Parts, uses: int, coarsen: float) -> list[tuple[pld.LossPair, int]]:
    """Returns the laws of the losses of the parts on one grid, each with its number of
    repetitions."""
    # many Gaussian uses are few of the joint one, so that its width is not taken for that of one
    # step
    scaled = tuple(_joint(part, count * uses) for part, count in parts)
    width = loss_laws.grid_width(scaled, coarsen)
    return [(loss_laws.step_pair(part, width), count) for part, count in scaled]


def _rdp_epsilon(parts: Parts, uses: int, delta: float, coarsen: float) -> float:
    from dp_accounting.rdp import rdp_privacy_accountant as rdp

    # every order gives a bound, so the least of a few is one, too
    orders = tuple(float(order) for order in rdp.DEFAULT_RDP_ORDERS)[:: max(1, round(coarsen))]
    divergences = uses * sum(
        (count * _renyi_part(part, orders) for part, count in parts), np.zeros(len(orders))
    )
    with _quiet():
        return max(0.0, float(rdp.compute_epsilon(orders, divergences, delta)[0]))


@lru_cache(maxsize=256)
def _renyi_part(event: DpEvent, orders: tuple[float, ...]) -> np.ndarray:
    """Returns Renyi divergences of one use of an elementary event."""
    if isinstance(event, dp_event.RepeatAndSelectDpEvent):
        return selection_curve(
            np.asarray(orders), renyi_curve(event.event, orders), mean=event.mean, shape=event.shape
        )
    from dp_accounting.rdp import RdpAccountant

    accountant = RdpAccountant(orders=orders)
    if accountant.supports(event):
        with _quiet():
            accountant.compose(event)
        return np.asarray(accountant.rdp)
    largest = loss_laws.loss_of(event).largest
    if math.isinf(largest):
        raise PrivacyError(f"The accounting by Renyi divergences does not support {event}.")
    pair = loss_laws.step_pair(event, loss_laws.grid_width(((event, 1),), 0.3))
    bounds = [pld.renyi(law, np.asarray(orders), largest) for law in pair]
    curve: np.ndarray = np.minimum(np.maximum(*bounds), largest)
    return curve


def _flat(event: DpEvent, times: int) -> Iterator[tuple[DpEvent, int]]:
    """Yields elementary events: sampled ones in a form that can be hashed, none without noise, none
    without an effect."""
    if isinstance(event, dp_event.ComposedDpEvent):
        for part in event.events:
            yield from _flat(part, times)
    elif isinstance(event, dp_event.SelfComposedDpEvent):
        if event.count > 0:
            yield from _flat(event.event, times * event.count)
    elif isinstance(event, dp_event.PoissonSampledDpEvent):
        yield from _sampled_parts(event, times)
    elif isinstance(event, dp_event.RepeatAndSelectDpEvent):
        yield from _selected_parts(event, times)
    elif isinstance(event, dp_event.NoOpDpEvent):
        return
    elif isinstance(event, dp_event.DpEvent):
        yield _single_part(event, times)
    else:
        raise PrivacyError(f"{event!r} is not a dp_accounting event.")


def _sampled_parts(event: DpEvent, times: int) -> Iterator[tuple[DpEvent, int]]:
    q = event.sampling_probability
    if not 0 <= q <= 1:
        raise PrivacyError(f"{event}: the sampling probability is {q}; it must be in [0, 1].")
    parts = elementary(event.event)
    if not parts or q == 0:
        return
    if q == 1:
        yield from ((part, times * count) for part, count in parts)
    elif isinstance(parts[0][0], dp_event.NonPrivateDpEvent):
        # Sampling hides nothing of a release without noise: at some delta its epsilon is infinite.
        yield parts[0]
    elif len(parts) == 1 and parts[0][1] == 1:
        yield dp_event.PoissonSampledDpEvent(q, parts[0][0]), times
    else:
        yield dp_event.PoissonSampledDpEvent(q, _joined(parts)), times


def _selected_parts(event: DpEvent, times: int) -> Iterator[tuple[DpEvent, int]]:
    parts = elementary(event.event)
    if parts and isinstance(parts[0][0], dp_event.NonPrivateDpEvent):
        yield parts[0]
    else:
        yield dp_event.RepeatAndSelectDpEvent(_joined(parts), event.mean, event.shape), times


def _single_part(event: DpEvent, times: int) -> tuple[DpEvent, int]:
    noise = getattr(event, "noise_multiplier", 1.0)
    if not noise >= 0:
        raise PrivacyError(f"{event}: the noise multiplier is {noise}; it must be at least 0.")
    if noise == 0:
        return dp_event.NonPrivateDpEvent(), 1
    return event, times


def _joined(parts: Parts) -> DpEvent:
    """Returns one event of all parts that can be hashed."""
    return dp_event.ComposedDpEvent(
        tuple(dp_event.SelfComposedDpEvent(part, count) for part, count in parts)
    )


@contextmanager
def _quiet() -> Iterator[None]:
    """Silences the library's notes on orders it leaves out; without them the bound is looser, and
    sound."""
    logger = logging.getLogger("absl")
    disabled = logger.disabled
    logger.disabled = True
    try:
        yield
    finally:
        logger.disabled = disabled
