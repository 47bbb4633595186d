"""Epsilon of a composition by ``dp_accounting``, which shares no code with the accountant of a
run."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

from dp_accounting import dp_event
from dp_accounting.dp_event import DpEvent
from dp_accounting.pld import PLDAccountant

TOLERANCE = 1e-3
"""Relative difference of the two accountants that is no contradiction: both round losses to a
grid."""

_LARGEST = 600.0  # the library's exponentials overflow beyond
_POINTS = 1 << 18  # of the grid of one use's losses
_MOST = 1 << 17  # uses; more take minutes


def library_epsilon(
    composition: Sequence[tuple[DpEvent, int]], delta: float, near: float
) -> float | None:
    """Returns epsilon of a composition by the privacy loss distributions of ``dp_accounting``.

    Args:
        composition: events with their numbers of uses.
        delta: in [0, 1); at 0 the pure epsilons of Laplace noise are added.
        near: the epsilon that it is compared with, which sets the width of the grid of losses.

    Returns:
        Epsilon, up to :data:`TOLERANCE`; infinite if something is released without noise. None
        if the library does not have a law of the composition, or ``near`` is above 600. If a
        grid as fine as ``near`` asks for would take very long, a lower bound on epsilon by a
        coarser one if it is above ``near``, and None else.
    """
    parts = list(_parts(composition))
    if near > _LARGEST:
        return None
    if delta == 0:
        if not all(isinstance(event, dp_event.LaplaceDpEvent) for event, _ in parts):
            return None
        return math.fsum(count / event.noise_multiplier for event, count in parts)
    uses = sum(count for _, count in parts)
    if uses > _MOST:
        return None
    # rounding adds uses * width**2 / 4 to the variance
    fine = max(near, 0.01) / (200 * math.sqrt(max(1, uses)))
    width = max(fine, max((_reach(event) for event, _ in parts), default=0.0) / _POINTS)
    accountant = PLDAccountant(value_discretization_interval=width)
    for event, count in parts:
        if not accountant.supports(event):
            return None
        accountant.compose(event, count)
    value = float(accountant.get_epsilon(delta))
    if width > fine:  # losses are rounded up by less than a width each
        value -= uses * width
        if value > near:
            return value
        return None
    return max(0.0, min(value, math.fsum(count * _pure(event) for event, count in parts)))


def _pure(event: DpEvent) -> float:
    """Returns the pure epsilon of one use, which bounds that at any delta: the library rounds
    losses up to its grid, and of Laplace noise the largest losses are the likely ones. Infinite of
    other noise."""
    if isinstance(event, dp_event.LaplaceDpEvent):
        return float(1 / event.noise_multiplier)
    if isinstance(event, dp_event.PoissonSampledDpEvent) and isinstance(
        event.event, dp_event.LaplaceDpEvent
    ):
        pure = _pure(event.event)
        if pure < _LARGEST:
            return math.log1p(event.sampling_probability * math.expm1(pure))
    return math.inf


def _reach(event: DpEvent) -> float:
    """Returns about the largest loss of one use; 0 of a Gaussian release, of which the library
    makes one of all uses."""
    if isinstance(event, dp_event.LaplaceDpEvent):
        return 2 / float(event.noise_multiplier)
    inner = getattr(event, "event", None)
    if isinstance(inner, dp_event.GaussianDpEvent):
        z = float(inner.noise_multiplier)
        return 10 / z + 0.5 / z**2
    if inner is None:
        return 0.0
    return _reach(inner)


def _parts(composition: Sequence[tuple[DpEvent, int]]) -> Iterator[tuple[DpEvent, int]]:
    """Yields the elementary events; Gaussian releases under one coin are one, which the library
    has."""
    for event, count in composition:
        if not count:
            continue
        if isinstance(event, dp_event.ComposedDpEvent):
            yield from _parts([(part, count) for part in event.events])
        elif isinstance(event, dp_event.SelfComposedDpEvent):
            yield from _parts([(event.event, event.count * count)])
        elif isinstance(event, dp_event.PoissonSampledDpEvent):
            inner = list(_parts([(event.event, 1)]))
            if all(isinstance(part, dp_event.GaussianDpEvent) for part, _ in inner):
                joint = math.fsum(times / part.noise_multiplier**2 for part, times in inner) ** -0.5
                event = dp_event.PoissonSampledDpEvent(
                    event.sampling_probability, dp_event.GaussianDpEvent(joint)
                )
            yield event, count
        else:
            yield event, count
