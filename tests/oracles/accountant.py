"""A second accountant: epsilon from below, by ``dp_accounting`` and by quadrature, apart from the run's own accountant.

Gaussian and Laplace noise, also under Poisson sampling, are left to ``dp_accounting`` with
``pessimistic_estimate=False``, so its figure is not above the true epsilon of the composition. For the laws that it
does not have, K-norm noise and a unit replaced in a secret subsample, the losses are those of two data sets that are
neighbours indeed: (1 - q) f(0) + q f(c) against (1 - q) f(0) + q f(c'), f(c) the density of the noise around c. They
are taken at the nodes of a quadrature of these densities, rounded down to a grid, and composed by ``dp_accounting``. So
a figure is at most the true epsilon, but for the error of the quadrature, which is far below that of the rounding, and
a claim below it is wrong. Where the accounting of a run is an upper bound that is not tight, the two differ and nothing
is refuted.
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from functools import lru_cache, reduce
from typing import Any

import attr
import numpy as np
from dp_accounting import dp_event
from dp_accounting.pld import pld_pmf
from dp_accounting.pld import privacy_loss_distribution as pld
from scipy import special

Composition = Sequence[tuple[Any, int]]
"""Events of ``dp_accounting`` (or of this package), each with its number of uses."""

_SAMPLED = ("PoissonSampledDpEvent", "ReplacedPoissonDpEvent")
_COARSE = (
    0.005  # of the epsilon that is looked at: the most by which rounding down lowers the figure
)
_WIDEST, _NARROWEST = 1e-2, 5e-6
_POINTS = 200_000  # of one law on its grid
_DEEPEST = 1e-14
_NODES = np.polynomial.legendre.leggauss(4)


def least_epsilon(composition: Composition, delta: float, scale: float) -> float:
    """Return a lower bound on the epsilon of a composition.

    Args:
        composition: events and their numbers of uses.
        delta: in (0, 1).
        scale: the epsilon that it is compared with, above 0: the grid of losses follows it.
    """
    counts: dict[Any, int] = {}
    precision = 0.0
    for event, count in _flat(composition):
        if isinstance(event, dp_event.GaussianDpEvent):  # T Gaussian releases are one
            precision += count / event.noise_multiplier**2
            continue
        if type(event).__name__ in _SAMPLED:
            event = attr.evolve(event, event=_alone(event.event))
        counts[event] = counts.get(event, 0) + count
    width = min(max(_COARSE * 2 * scale / max(sum(counts.values()), 1), _NARROWEST), _WIDEST)
    if precision:
        counts[dp_event.GaussianDpEvent(precision**-0.5)] = 1
    laws = [_law(event, width).self_compose(count) for event, count in counts.items()]
    return max(
        0.0, float(reduce(lambda one, other: one.compose(other), laws).get_epsilon_for_delta(delta))
    )


def _flat(composition: Iterable[tuple[Any, int]]) -> Iterable[tuple[Any, int]]:
    for event, count in composition:
        if isinstance(event, dp_event.ComposedDpEvent):
            yield from _flat((part, count) for part in event.events)
        elif isinstance(event, dp_event.SelfComposedDpEvent):
            yield from _flat([(event.event, event.count * count)])
        else:
            yield event, count


@lru_cache(maxsize=256)
def _law(event: Any, width: float) -> Any:
    """Return the privacy loss distribution of one event, from below, on a grid of ``width``."""
    name, inner, q = type(event).__name__, event, 1.0
    options: dict[str, Any] = {
        "pessimistic_estimate": False,
        "value_discretization_interval": width,
    }
    options["use_connect_dots"] = False  # it has no estimate from below
    if name in _SAMPLED:
        inner = event.event
        q = float(event.sampling_probability)
        if (
            name != "PoissonSampledDpEvent"
        ):  # one unit replaced: the sum with it moves by half of S, or the other way
            return _pair(inner, {0.0: 1 - q, 0.5: q}, {0.0: 1 - q, -0.5: q}, width)
    kind = type(inner).__name__
    if kind == "GaussianDpEvent":
        return pld.from_gaussian_mechanism(inner.noise_multiplier, sampling_prob=q, **options)
    if kind == "LaplaceDpEvent":
        return pld.from_laplace_mechanism(inner.noise_multiplier, sampling_prob=q, **options)
    return _pair(inner, {0.0: 1 - q, 1.0: q}, {0.0: 1.0}, width)


def _alone(event: Any) -> Any:
    """Return what is under one coin, which is one law: Gaussian releases are one."""
    parts = list(_flat([(event, 1)]))
    if all(type(part).__name__ == "GaussianDpEvent" for part, _ in parts):
        return dp_event.GaussianDpEvent(
            sum(count / part.noise_multiplier**2 for part, count in parts) ** -0.5
        )
    ((part, _),) = parts
    return part


def _pair(
    noise: Any, first: Mapping[float, float], second: Mapping[float, float], width: float
) -> Any:
    """Return the losses of two mixtures of one noise, each {centre in units of the sensitivity: weight}."""
    density, nodes = _noise(noise)

    def losses(over: Mapping[float, float], against: Mapping[float, float]) -> Any:
        values, masses = [], []
        for centre, weight in over.items():
            if weight == 0:
                continue
            x, y, mass = nodes
            values.append(
                _mixed(density, over, x + centre, y) - _mixed(density, against, x + centre, y)
            )
            masses.append(weight * mass)
        loss, mass = np.concatenate(values), np.concatenate(masses)
        cells = max(
            1, math.ceil(float(np.ptp(loss)) / width / _POINTS)
        )  # rounded down to every so many
        cell = np.floor(loss / (cells * width) + 1e-9).astype(np.int64) * cells
        lowest = int(cell.min())
        return pld_pmf.DensePLDPmf(
            width, lowest, np.bincount(cell - lowest, weights=mass), 0.0, False
        )

    return pld.PrivacyLossDistribution(losses(first, second), losses(second, first))


def _mixed(
    density: Any, mixture: Mapping[float, float], x: np.ndarray, y: np.ndarray
) -> np.ndarray:
    terms = [
        math.log(weight) + density(x - centre, y)
        for centre, weight in mixture.items()
        if weight > 0
    ]
    out: np.ndarray = np.logaddexp.reduce(terms)
    return out


@lru_cache(maxsize=64)
def _noise(event: Any) -> tuple[Any, tuple[np.ndarray, np.ndarray, np.ndarray]]:
    """Log density (but for a constant) as a function of the coordinate along the shift and of the length across it; and
    nodes (x, y) with their masses, for noise at sensitivity 1."""
    name = type(event).__name__
    low, mass = _quantiles()
    if name == "GaussianDpEvent":
        z = float(event.noise_multiplier)
        x = z * special.ndtri(low)
        x, mass = np.concatenate([x, -x]), np.concatenate([mass, mass])
        return (lambda x, y: -(x**2) / (2 * z * z)), (x, np.zeros_like(x), mass)
    if name == "LaplaceDpEvent":
        b = float(event.noise_multiplier)
        x = b * np.log(2 * low)
        x, mass = np.concatenate([x, -x]), np.concatenate([mass, mass])
        return (lambda x, y: -np.abs(x) / b), (x, np.zeros_like(x), mass)
    beta, d = float(event.epsilon), int(event.dimension)
    radius = (
        np.concatenate([special.gammaincinv(d, low), special.gammainccinv(d, low)])[:, None] / beta
    )
    half = special.betaincinv((d - 1) / 2, (d - 1) / 2, low)  # (1 + cosine) / 2 below its median
    cosine = np.concatenate([2 * half - 1, 1 - 2 * half])
    sine = 2 * np.sqrt(half * (1 - half))
    both = np.concatenate([mass, mass])
    x, y = radius * cosine, radius * np.concatenate([sine, sine])
    return (lambda x, y: -beta * np.hypot(x, y)), (
        x.ravel(),
        y.ravel(),
        (both[:, None] * both).ravel(),
    )


@lru_cache(maxsize=1)
def _quantiles() -> tuple[np.ndarray, np.ndarray]:
    """Return probabilities below 1/2 and their masses, of a Gauss-Legendre rule in panels that shrink towards 0."""
    edges = np.concatenate([[0.0], np.geomspace(_DEEPEST, 0.1, 40), np.linspace(0.1, 0.5, 41)[1:]])
    points, weights = _NODES
    middle, half = (edges[1:] + edges[:-1]) / 2, np.diff(edges) / 2
    return (middle[:, None] + half[:, None] * points).ravel(), (half[:, None] * weights).ravel()
