"""Privacy loss distributions on a grid: composition, delta and epsilon, always as upper bounds.

A law is that of the loss ``log P(o) / Q(o)`` for ``o`` drawn from P, kept on multiples of a grid
width h with a mass at infinity. Mass at a loss between two grid points is split between them so
that its probabilities under P *and* under Q do not change; the pair so obtained dominates the true
one (Doroshenko et al., "Connect the dots", PoPETs 2022), and its loss differs from the true one by
about h^2 a step rather than h.

Composition multiplies discrete Fourier transforms. Mass that could fall outside the window kept, by
a Chernoff bound, is added at infinity.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import NamedTuple

import numpy as np
from scipy import fft

_CHERNOFF = np.array([0.5, 1.0, 2.0, 3.0, 4.0, 5.0, 6.0, 7.0, 8.5, 10.5, 14.0, 20.0])
_ROUNDING = 1e-16
_ALLOWED = 1e-5
_CANCELLED = 1e-14  # relative error of the difference of two nearly equal probabilities, with room
_LONG = 1 << 17  # from here on a filter is worth the half second that its import takes


@dataclass(frozen=True, eq=False)
class LossLaw:
    """Masses (n,) under P at the losses ``width * (first + arange(n))``, and ``infinity`` at an
    infinite loss."""

    width: float
    first: int
    masses: np.ndarray
    infinity: float = 0.0

    @property
    def losses(self) -> np.ndarray:
        """Returns the losses, (n,)."""
        return self.width * (self.first + np.arange(self.masses.size))


class LossPair(NamedTuple):
    """The laws for a unit removed (P has it) and added (Q has it); the same object if they are
    equal."""

    remove: LossLaw
    add: LossLaw


def from_cells(
    width: float,
    first: int,
    p: np.ndarray,
    q: np.ndarray,
    *,
    below: float = 0.0,
    above: tuple[float, float] = (0.0, 0.0),
) -> LossLaw:
    """Returns the law of a pair (P, Q) from the probabilities of cells of losses.

    Args:
        width: grid width h.
        first: losses of cell i lie in [h (first + i), h (first + i + 1)].
        p: (n,) probabilities of the cells under P.
        q: (n,) probabilities of the cells under Q.
        below: probability under P of the losses below the first cell.
        above: probabilities under P and Q of the losses above the last cell.
    """
    left = width * (first + np.arange(p.size))
    with np.errstate(over="ignore", invalid="ignore"):
        # The share at the right end that keeps both p and q of the cell, see the module's head.
        upper = (p - np.exp(left) * q + _CANCELLED * p) / -math.expm1(-width)
    # exp(left) q is beyond float64: all of it to the right, which is safe
    unknown = ~np.isfinite(upper)
    law = from_shares(width, first, p, np.where(unknown, p, upper))
    # Losses below the grid are moved up to its first point, which can only raise delta.
    law.masses[0] += below
    finite = 0.0
    if above[1] > 0:
        finite = min(above[0], math.exp(width * (first + p.size) + math.log(above[1])))
    law.masses[-1] += finite
    return LossLaw(width, first, law.masses, above[0] - finite)


def from_shares(width: float, first: int, p: np.ndarray, upper: np.ndarray) -> LossLaw:
    """Returns the law as :func:`from_cells`, given the part (n,) of each cell's mass that belongs
    at its right end."""
    upper = np.clip(upper, 0.0, p)
    masses = np.append(p - upper, 0.0)
    masses[1:] += upper
    return LossLaw(width, first, masses)


def on_grid(losses: np.ndarray, masses: np.ndarray, width: float, infinity: float = 0.0) -> LossLaw:
    """Returns the law of masses (n,) at arbitrary finite losses (n,), on a grid of the given
    width."""
    # Each atom lies between two grid points, and is split between them as a cell is.
    cell = np.floor(losses / width).astype(np.int64)
    share = np.clip(np.expm1(cell * width - losses) / math.expm1(-width), 0.0, 1.0)
    first = int(cell.min())
    size = int(cell.max()) - first + 2
    placed = np.bincount(cell - first, masses * (1 - share), size) + np.bincount(
        cell - first + 1, masses * share, size
    )
    return LossLaw(width, first, placed, infinity)


def spread(losses: np.ndarray, masses: np.ndarray) -> float:
    """Returns the standard deviation of masses (n,) at losses (n,)."""
    total = masses.sum()
    centred = losses - (masses @ losses) / total
    return math.sqrt(max(float(masses @ centred**2 / total), 0.0))


def symmetric(law: LossLaw) -> LossLaw:
    """Returns the law of a pair that looks the same from both sides, with the hockey-stick
    divergences of ``law`` at every epsilon of at least 0: its positive losses, their mirror images,
    and the remaining mass at 0.

    It dominates every pair (P, Q) whose divergences at epsilon >= 0 are at most those of ``law`` in
    both directions, since ``H_a(P, Q) = 1 - a + a H_{1/a}(Q, P)`` gives those below 0.
    """
    reach = max(law.first + law.masses.size - 1, 0)
    positive = np.zeros(reach)
    begin = max(1, law.first)
    if reach:
        positive[begin - 1 :] = law.masses[begin - law.first :]
    # A loss l under P has mass exp(-l) under Q, and is the loss -l seen from there.
    mirrored = positive * np.exp(-law.width * np.arange(1, reach + 1))
    # The remaining mass is that where P and Q agree: loss 0.
    rest = max(0.0, 1 - law.infinity - float(positive.sum() + mirrored.sum()))
    return LossLaw(
        law.width, -reach, np.concatenate([mirrored[::-1], [rest], positive]), law.infinity
    )


def composed_epsilon(
    parts: Sequence[tuple[LossLaw, int]], delta: float, tail: float = 1e-15
) -> float:
    """Returns epsilon at ``delta`` of the composition; ``parts`` and ``tail`` as for
    :func:`compose`.

    A transform has rounding errors of up to T 1e-16, which may drown a small delta after many
    steps. There, the masses around the epsilon found are made the largest ones by a tilt (see
    :func:`compose`), and epsilon is found again.
    """
    value = epsilon_at(compose(parts, tail), delta)
    # Rounding that moves delta by less than a hundred-thousandth of it needs no tilt.
    if sum(times for _, times in parts) * _ROUNDING <= _ALLOWED * delta:
        return value
    for _ in range(3):
        previous = value
        if math.isinf(value):
            return value
        # Any value is an upper bound; a tilt nearer to the answer is a tighter one.
        value = epsilon_at(compose(parts, tail, value), delta)
        if abs(value - previous) <= 1e-3 * value:
            break
    return value


def compose(
    parts: Sequence[tuple[LossLaw, int]], tail: float = 1e-15, near: float | None = None
) -> LossLaw:
    """Returns the law of the sum of independent losses.

    Args:
        parts: laws on one grid, each with its number of repetitions of at least 1.
        tail: mass given up, and added at infinity, to keep the window short.
        near: a loss around and above which the masses are to be relatively exact: they are
            multiplied by exp(order * loss) before the transform, with the order of the Chernoff
            bound there, and divided afterwards. Well below it they are then good for nothing.
    """
    width = parts[0][0].width
    infinity = -math.expm1(sum(times * math.log1p(-law.infinity) for law, times in parts))
    # A single step needs no transform, and none of the mass is given up.
    if len(parts) == 1 and parts[0][1] == 1:
        return parts[0][0]
    low, high, order = _window(parts, tail, near)
    # Lengths with large prime factors take several times as long.
    size = fft.next_fast_len(high - low + 1, real=True)
    product = np.ones(size // 2 + 1, dtype=np.complex128)
    back = 0.0
    for law, times in parts:
        tilted, moment = _tilted(law, order)
        back += times * moment
        if tilted.size > size:
            # A law longer than the window wraps around it, as its sums would in the transform.
            tilted = np.bincount(np.arange(tilted.size) % size, tilted, size)
        product *= np.asarray(fft.rfft(tilted, size)) ** times
    # The transform is cyclic: the window begins at `low` and not at 0.
    masses = np.roll(np.asarray(fft.irfft(product, size)), -low)[: high - low + 1]
    if order:
        # Undo the tilt; masses that rounding made negative are 0, and none is above 1.
        exponents = back - order * (low + np.arange(masses.size))
        masses = np.minimum(np.maximum(masses, 0.0) * np.exp(np.minimum(exponents, 600.0)), 1.0)
    first = sum(times * law.first for law, times in parts)
    return LossLaw(width, first + low, np.maximum(masses, 0.0), infinity + tail)


def compose_exactly(parts: Sequence[tuple[LossLaw, int]]) -> LossLaw:
    """Composes by direct sums, which keep tiny masses exact; as :func:`compose`, for few
    repetitions."""
    width = parts[0][0].width
    first = 0
    masses = np.ones(1)
    infinity = 0.0
    for law, times in parts:
        power = law.masses
        remaining = times
        while remaining:
            if remaining % 2:
                masses = np.convolve(masses, power)
            remaining //= 2
            if remaining:
                # Squaring: a hundred repetitions take seven convolutions.
                power = np.convolve(power, power)
        first += times * law.first
        infinity = 1 - (1 - infinity) * math.exp(times * math.log1p(-law.infinity))
    return LossLaw(width, first, masses, infinity)


def epsilon_at(law: LossLaw, delta: float) -> float:
    """Returns the smallest epsilon of at least 0 whose hockey-stick divergence is at most
    ``delta``; it may be infinite."""
    if law.infinity > delta:
        return math.inf
    # No divergence is above 1; the sum of the masses may be, by its rounding.
    if delta >= 1.0:
        return 0.0
    # Losses below 0 add nothing to delta at an epsilon of at least 0.
    masses = law.masses[max(0, -law.first) :]
    start = max(0, law.first)
    if masses.size == 0:
        return 0.0
    # above[k] = mass beyond (start + k) h, excess[k] = delta there:
    # excess[k] = exp(-h) excess[k + 1] + (1 - exp(-h)) above[k]
    above = law.infinity + np.append(np.cumsum(masses[:0:-1])[::-1], 0.0)
    keep = math.exp(-law.width)
    gain = -math.expm1(-law.width)
    excess = law.infinity + _discounted((above - law.infinity)[::-1], keep, gain)[::-1]
    if excess[0] <= delta:  # only below the first loss, where all the mass is above
        total = above[0] + masses[0]
        if start == 0 or total <= delta:
            return 0.0
        return max(0.0, law.width * start + math.log((total - delta) / (total - excess[0])))
    # delta falls with epsilon: the answer lies in the cell after the last one that exceeds it.
    k = int(np.nonzero(excess > delta)[0][-1])
    # Within a cell delta is above - gap exp(epsilon), which is solved for epsilon.
    gap = above[k] - excess[k]
    within = law.width
    if gap > 0:
        within = min(law.width, math.log1p((excess[k] - delta) / gap))
    return law.width * (start + k) + within


def _discounted(values: np.ndarray, keep: float, gain: float) -> np.ndarray:
    """Returns y (n,) with ``y[i] = keep y[i - 1] + gain values[i]``, from 0."""
    if values.size > _LONG:
        from scipy.signal import lfilter

        return np.asarray(lfilter([gain], [1.0, -keep], values))
    steps = accumulate(
        values.tolist(), lambda before, value: keep * before + gain * value, initial=0.0
    )
    return np.fromiter(steps, np.float64, values.size + 1)[1:]


def renyi(law: LossLaw, orders: np.ndarray, largest: float) -> np.ndarray:
    """Returns (m,) Renyi divergences ``log E exp((a - 1) loss) / (a - 1)`` of the orders a (m,)
    above 1.

    ``largest`` is a bound on the true loss; the mass at infinity is counted there.
    """
    losses = np.append(law.losses, largest)
    masses = np.append(law.masses, law.infinity)
    exponents = np.outer(orders - 1, losses[masses > 0])
    top = exponents.max(axis=1)
    sums = np.exp(exponents - top[:, None]) @ masses[masses > 0]
    curve: np.ndarray = (top + np.log(sums)) / (orders - 1)
    return curve


def _tilted(law: LossLaw, order: float) -> tuple[np.ndarray, float]:
    """Returns the masses times exp(order * index) over their sum, and the logarithm of that sum."""
    if order == 0:
        return law.masses, 0.0
    with np.errstate(divide="ignore"):
        exponents = np.log(law.masses) + order * np.arange(law.masses.size)
    # Exponents are taken relative to the largest one, or they would overflow.
    top = float(exponents.max())
    weights = np.exp(exponents - top)
    total = float(weights.sum())
    return weights / total, top + math.log(total)


def _window(
    parts: Sequence[tuple[LossLaw, int]], tail: float, near: float | None = None
) -> tuple[int, int, float]:
    """Returns indices outside which the sum, tilted or not, has at most ``tail`` of its mass, and
    the order of the tilt.

    Indices are relative to the sum of the first ones. Chernoff: P(sum >= x) <= exp(log M(s) - s x).
    """
    variance = sum(
        times * spread(np.arange(law.masses.size), law.masses) ** 2 for law, times in parts
    )
    low = 0
    high = sum(times * (law.masses.size - 1) for law, times in parts)
    # A sum of constants needs no window.
    if variance == 0:
        return low, high, 0.0
    longest = max(law.masses.size for law, _ in parts)
    # Orders in units of the sum's deviation, and some for laws with a long thin tail.
    orders = np.sort(
        np.concatenate(
            [_CHERNOFF / math.sqrt(variance), np.array([2.0, 10.0, 20.0, 50.0]) / longest]
        )
    )
    log_tail = math.log(2 / tail)

    with np.errstate(divide="ignore"):
        log_masses = np.log(np.concatenate([law.masses for law, _ in parts]))
    index = np.concatenate([np.arange(law.masses.size) for law, _ in parts])
    sizes = np.array([law.masses.size for law, _ in parts])
    starts = np.cumsum(sizes) - sizes
    repeats = np.array([times for _, times in parts])

    def moment(order: float) -> float:
        """Returns the logarithm of the moment generating function of the sum."""
        exponents = log_masses + order * index
        top = np.maximum.reduceat(exponents, starts)
        sums = np.add.reduceat(np.exp(exponents - np.repeat(top, sizes)), starts)
        return float(repeats @ (top + np.log(sums)))

    above = [moment(order) for order in orders]
    low = max(low, *(math.floor((moment(-order) + log_tail) / -order) for order in orders))
    bound = min(math.ceil((m + log_tail) / order) for m, order in zip(above, orders, strict=True))
    bound = max(low, min(high, bound))
    if near is None:
        return low, bound, 0.0
    at = near / parts[0][0].width - sum(times * law.first for law, times in parts)
    best = 0.0
    tilt = 0.0
    end = bound
    for i, order in enumerate(orders[:-1]):
        # the tilted mass must fit a window that is not much longer
        fits = min(
            math.ceil((m - above[i] + log_tail) / (further - order))
            for m, further in zip(above[i + 1 :], orders[i + 1 :], strict=True)
            if further > order
        )
        if above[i] - order * at < best and fits - low <= 3 * (bound - low):
            best = above[i] - order * at
            tilt = float(order)
            end = max(bound, min(high, fits))
    return low, end, tilt
