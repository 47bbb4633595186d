"""Loss laws of the mechanisms: Gaussian, Laplace, K-norm, and Poisson sampling of any of these.

The pair of Poisson-sampled Gaussian noise is ((1 - q) N(0, z^2) + q N(1, z^2), N(0, z^2)); its loss
``log(1 - q + q exp((2 x - 1) / (2 z^2)))`` grows with x, so the cells of losses are intervals of x
and their probabilities differences of normal distribution functions.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache

import attr
import numpy as np
from scipy import special

from ..._check import positive
from ...errors import PrivacyError
from ..events import DpEvent, dp_event
from . import pld
from .knorm import KNormDpEvent, loss_law, loss_scale
from .pld import LossLaw, LossPair
from .subsampling import sampled_atoms

Parts = tuple[tuple[DpEvent, int], ...]
# probabilities of cells (n,), below the first and above the last
Cells = tuple[np.ndarray, float, float]

_GRID = 0.03
_POINTS = 1e5
_COARSEST = 0.1
_FAR = 1400.0  # a loss whose hyperbolic cosine a double holds, and whose probabilities are 0 and 1
_REACH = 10.5  # standard deviations of Gaussian noise inside the grid


@attr.s(frozen=True, slots=True, auto_attribs=True)
class PureDpEvent(dp_event.DpEvent):  # type: ignore[misc]
    """A mechanism of which only the pure epsilon is known; randomized response is the worst one.

    Attributes:
        epsilon: above 0.

    Example:
        >>> from fedmtl.privacy import PureDpEvent, epsilon
        >>> round(epsilon(PureDpEvent(0.5), 3, 0.0), 6)  # pure epsilons add up
        1.5
    """

    epsilon: float

    def __attrs_post_init__(self) -> None:
        positive(self, epsilon=self.epsilon)


@attr.s(frozen=True, slots=True, auto_attribs=True)
class ReplacedPoissonDpEvent(dp_event.DpEvent):  # type: ignore[misc]
    """Noise on the sum over a secret Poisson subsample, for neighbours that differ by one record
    *replaced*.

    Let A0, A1 and A1' be the laws of the release given the other records drawn, without the record
    in question, with it and with its replacement; the release is P = (1 - q) A0 + q A1 under one
    neighbour and Q = (1 - q) A0 + q A1' under the other. Whatever is bounded for all subsamples of
    the others holds for their mixture.

    *Pure noise.* Let no two of the three differ by more than exp(e). With A1 = s A0 and A1' = t A0
    pointwise, A1 - A1' is at most (exp(e) - 1) A1', and at most (exp(e) - 1) A0: for t >= 1 as s <=
    exp(e), for t < 1 as s - t <= t (exp(e) - 1). Hence P = Q + q (A1 - A1') <= (1 + q (exp(e) - 1))
    Q: pure epsilon log(1 + q (exp(e) - 1)).

    *Any noise.* With a' = 1 + q (a - 1), a >= 1 and b = a' / a, advanced joint convexity (Balle,
    Barthe, Gaboardi, "Privacy amplification by subsampling", NeurIPS 2018, Theorem 2) gives H_a'(P,
    Q) = q H_a(A1, (1 - b) A0 + b A1') <= q max(H_a(A1, A0), H_a(A1, A1')), and both are at most
    that of the full shift. That is the divergence of the same noise Poisson-sampled for a record
    removed, in both directions: see :func:`.pld.symmetric`.

    *Gaussian noise* has a dominating pair: of the shifts |u|, |v| <= C of A1 and A1', u = -v with
    |u| = C is the worst. For a >= 1, H_a(P, Q) / q = E (1 - c X0 - a X1)_+ with
    c = (1 - q) (a - 1) / q >= 0 and X0, X1 the densities of A0 and A1' over that of A1, under A1:
    lognormal with mean 1 and scales |u| / sigma, |u - v| / sigma. A convex function of a sum is
    largest for comonotone terms, and grows with each one's scale; for u = -v they are comonotone.

    Attributes:
        sampling_probability: q in (0, 1).
        event: of the noise without sampling, relative to the sensitivity 2 C of a record replaced
            by another.
    """

    sampling_probability: float
    event: dp_event.DpEvent


@dataclass(frozen=True, eq=False)
class Loss:
    """The privacy loss of one elementary event, as ``composition`` makes them.

    Attributes:
        largest: the largest possible loss; infinite if there is none.
        scale: () -> standard deviation of the loss and length of its range, both approximate.
        pair: grid width -> its laws.
    """

    largest: float
    scale: Callable[[], tuple[float, float]]
    pair: Callable[[float], LossPair]


@lru_cache(maxsize=1024)
def loss_of(event: DpEvent) -> Loss:
    """Returns the loss of one elementary event.

    Raises:
        PrivacyError: an event whose loss has no law here.
    """
    # In one dimension every K-norm mechanism is Laplace noise.
    if isinstance(event, dp_event.LaplaceDpEvent):
        event = KNormDpEvent(1 / event.noise_multiplier, 1)
    if isinstance(event, KNormDpEvent):
        e = event.epsilon
        d = event.dimension
        return Loss(e, lambda: loss_scale(e, d), lambda width: _both(loss_law(e, d, width)))
    if isinstance(event, PureDpEvent):
        e = event.epsilon
        # Randomized response: the true answer with this probability.
        likely = 1 / (1 + math.exp(-e))
        two = np.array([e, -e]), np.array([likely, 1 - likely])
        return Loss(
            e,
            lambda: (e / math.cosh(min(e, _FAR) / 2), 2 * e),
            lambda width: _both(pld.on_grid(*two, width)),
        )
    if isinstance(event, dp_event.GaussianDpEvent):
        z = event.noise_multiplier
        return Loss(
            math.inf, lambda: _gaussian_scale(z, 1.0), lambda width: gaussian_pair(z, 1.0, width)
        )
    if isinstance(event, dp_event.PoissonSampledDpEvent):
        return _sampled(event.event, event.sampling_probability)
    if isinstance(event, ReplacedPoissonDpEvent):
        return _replaced(event.event, event.sampling_probability)
    raise PrivacyError(f"The accounting by privacy loss distributions does not support {event}.")


def _sampled(event: DpEvent, q: float) -> Loss:
    """Returns the loss of an event that is Poisson-sampled."""
    if isinstance(event, dp_event.GaussianDpEvent):
        z = event.noise_multiplier
        return Loss(
            math.inf, lambda: _gaussian_scale(z, q), lambda width: gaussian_pair(z, q, width)
        )
    pure = sum(count * loss_of(part).largest for part, count in _parts(event))
    # Beyond that exp overflows, and sampling moves the largest loss by log(q) at most.
    if pure < 500:
        largest = math.log1p(q * math.expm1(pure))
    else:
        largest = pure

    def scale() -> tuple[float, float]:
        losses, masses, _ = _atoms(event, q)[0]
        return pld.spread(losses, masses), float(np.ptp(losses[masses > 0]))

    def pair(width: float) -> LossPair:
        return LossPair(
            *(
                pld.on_grid(losses, masses, width, beyond)
                for losses, masses, beyond in _atoms(event, q)
            )
        )

    return Loss(largest, scale, pair)


def _replaced(event: DpEvent, q: float) -> Loss:
    """Returns the loss of an event that is Poisson-sampled, if neighbours replace a record."""
    sampled = _sampled(event, q)

    def scale() -> tuple[float, float]:
        spread, reach = sampled.scale()
        return spread, 2 * reach

    def pair(width: float) -> LossPair:
        if isinstance(event, dp_event.GaussianDpEvent):
            return _both(_replaced_law(2 * event.noise_multiplier, q, width))  # in units of C
        return _both(pld.symmetric(sampled.pair(width).remove))

    return Loss(sampled.largest, scale, pair)


def grid_width(parts: Parts, coarsen: float) -> float:
    """Returns the grid width of a composition: a part of the root mean square deviation of its
    losses, or as their range allows.

    The error of epsilon is about T (h / eps)^2 for T steps, so the width follows the deviation of
    the loss of one step.
    """
    scales = [loss_of(event).scale() for event, _ in parts]
    counts = [count for _, count in parts]
    mean_square = sum(c * s[0] ** 2 for c, s in zip(counts, scales, strict=True)) / sum(counts)
    reach = max(s[1] for s in scales)
    # The second bound keeps a law with a long tail at 100,000 points.
    return max(min(_GRID * math.sqrt(mean_square) * coarsen, _COARSEST), reach / _POINTS * coarsen)


@lru_cache(maxsize=256)
def step_pair(event: DpEvent, width: float) -> LossPair:
    """Returns the pair of laws of one elementary event."""
    return loss_of(event).pair(width)


def gaussian_pair(multiplier: float, probability: float, width: float) -> LossPair:
    """Returns the laws of Poisson-sampled Gaussian noise, or of Gaussian noise with ``probability``
    1."""
    z = multiplier
    q = probability

    def loss(x: float) -> float:
        exponent = (2 * x - 1) / (2 * z * z)
        if q == 1:
            return exponent
        if exponent > 500:
            return exponent + math.log(q)
        return math.log1p(q * math.expm1(exponent))

    # Beyond 10.5 deviations a Gaussian has less mass than any delta here.
    first = math.floor(loss(-_REACH * z) / width)
    last = math.ceil(loss(1 + _REACH * z) / width)
    losses = width * np.arange(first, last + 1)
    with np.errstate(divide="ignore", invalid="ignore", over="ignore"):
        inner = np.where(
            losses < 500, np.log(np.expm1(np.minimum(losses, 500.0)) + q), losses
        ) - math.log(q)
    # Losses below log(1 - q) are never reached: their cells begin at minus infinity.
    edges = np.where(np.isnan(inner), -np.inf, z * z * inner + 0.5)
    without = _gaussian_cells(edges / z)
    with_unit = _gaussian_cells((edges - 1) / z)
    return _reflected(width, first, _weighted(without, with_unit, q), without)


def _replaced_law(multiplier: float, probability: float, width: float) -> LossLaw:
    """Returns the law of P = (1 - q) N(0, z^2) + q N(1, z^2) against its mirror image."""
    z = multiplier
    q = probability
    log_a = math.log(q) - 0.5 / z**2

    def edges(losses: np.ndarray) -> np.ndarray:
        half = np.abs(losses) / 2
        if q == 1:
            return z * z * losses / 2
        with np.errstate(divide="ignore", over="ignore"):
            log_sinh = np.where(
                half > 1, half + np.log1p(-np.exp(-2 * half)) - math.log(2), np.log(np.sinh(half))
            )
            u = math.log1p(-q) + log_sinh - log_a
            grown = np.where(
                u > 0,
                u + np.log1p(np.sqrt(1 + np.exp(-2 * np.maximum(u, 0)))),
                np.arcsinh(np.exp(np.minimum(u, 0))),
            )
        derivative: np.ndarray = np.sign(losses) * z * z * (half + grown)
        return derivative

    x = 1 + _REACH * z
    if q < 1:
        absent = math.log1p(-q)
    else:
        absent = -math.inf
    largest = np.logaddexp(absent, log_a + x / z**2) - np.logaddexp(absent, log_a - x / z**2)
    last = math.ceil(float(largest) / width)
    cuts = edges(width * np.arange(-last, last + 1))
    centre = _gaussian_cells(cuts / z)
    right = _gaussian_cells((cuts - 1) / z)
    left = _gaussian_cells((cuts + 1) / z)
    return _reflected(width, -last, _weighted(centre, right, q), _weighted(centre, left, q)).remove


def _weighted(a: Cells, b: Cells, share: float) -> Cells:
    return (
        (1 - share) * a[0] + share * b[0],
        (1 - share) * a[1] + share * b[1],
        (1 - share) * a[2] + share * b[2],
    )


def _gaussian_cells(edges: np.ndarray) -> Cells:
    """Returns the standard normal probabilities of the cells between the edges (n + 1,), below the
    first and above the last."""
    below = special.ndtr(edges)
    above = special.ndtr(-edges)
    # The difference of the smaller tails keeps its digits.
    cells = np.where(edges[:-1] > 0, above[:-1] - above[1:], below[1:] - below[:-1])
    return cells, float(below[0]), float(above[-1])


def _reflected(width: float, first: int, p: Cells, q: Cells) -> LossPair:
    """Returns both laws from (cells, below, above) under P and under Q."""
    remove = pld.from_cells(width, first, p[0], q[0], below=p[1], above=(p[2], q[2]))
    # Seen from Q the loss has the other sign: the cells stand in reverse order.
    mirrored = -(first + p[0].size)
    add = pld.from_cells(width, mirrored, q[0][::-1], p[0][::-1], below=q[2], above=(q[1], p[1]))
    return LossPair(remove, add)


def _both(law: LossLaw) -> LossPair:
    return LossPair(law, law)


def _parts(event: DpEvent) -> Parts:
    if isinstance(event, dp_event.ComposedDpEvent):
        return tuple((part.event, part.count) for part in event.events)
    return ((event, 1),)


@lru_cache(maxsize=64)
def _atoms(event: DpEvent, q: float) -> tuple[tuple[np.ndarray, np.ndarray, float], ...]:
    """Returns atoms of a Poisson-sampled event, from the laws of the joint event on a grid of its
    own."""
    parts = _parts(event)
    width = grid_width(parts, 1.0)
    pairs = [(step_pair(part, width), count) for part, count in parts]
    # Amplification by sampling applies to the joint event, so the parts are composed before it.
    both = (pld.compose_exactly([(pair[side], count) for pair, count in pairs]) for side in (0, 1))
    return sampled_atoms(LossPair(*both), q)


def _gaussian_scale(multiplier: float, probability: float) -> tuple[float, float]:
    """Returns the smaller of q sqrt(exp(1 / z^2) - 1) and 1 / z, and the largest loss, about log(1
    + q (exp(10 / z + 1 / (2 z^2)) - 1)).

    If the loss has a long thin tail (small q and z), the range bounds the number of points
    instead.
    """
    exponent = multiplier**-2.0
    spread = math.sqrt(exponent)
    reach = 10 / multiplier + exponent / 2
    if exponent < 50 and probability < 1:
        spread = min(spread, probability * math.sqrt(math.expm1(exponent)))
    # exp(reach) overflows from about 709 on, and is far above 1 before
    if reach < 500:
        return spread, math.log1p(probability * math.expm1(reach))
    return spread, reach + math.log(probability)
