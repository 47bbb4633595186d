"""Released values as samples, and the forms in which a test of the noise reads them."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from functools import cached_property

import numpy as np
from scipy import signal, special

from ..privacy.release import Form
from .claim import Claim

MARKED = 64  # clients or records whose part in a release is noted


@dataclass(frozen=True, eq=False)
class ReleasedValue:
    """One release.

    Attributes:
        value: (D,) float64, the coordinates that are noised.
        claim: on it.
        client: whose it is; -1 of a cohort.
        step: number of the round, or of its client's releases before.
        drawn: (k,) int64, the clients that take part, or the records of the client, in order.
    """

    value: np.ndarray
    claim: Claim
    client: int
    step: int
    drawn: np.ndarray


@dataclass(frozen=True, eq=False)
class Sample:
    """The values that a channel released under one name.

    Attributes:
        size: D, the number of coordinates.
        releases: T of them.
    """

    size: int
    releases: list[ReleasedValue] = field(default_factory=list)

    @property
    def values(self) -> np.ndarray:
        """Returns (T, D) float64."""
        return np.array([each.value for each in self.releases]).reshape(-1, self.size)

    @property
    def clients(self) -> np.ndarray:
        """Returns (T,) int64, whose they are."""
        return np.array([each.client for each in self.releases], dtype=np.int64)

    @property
    def steps(self) -> np.ndarray:
        """Returns (T,) int64, the numbers of their steps."""
        return np.array([each.step for each in self.releases], dtype=np.int64)

    @property
    def drawn(self) -> np.ndarray:
        """Returns (T, 64) bool: True for each of the first clients, or records, that takes part."""
        first = np.arange(MARKED)
        return np.array([np.isin(first, each.drawn) for each in self.releases], dtype=bool).reshape(
            -1, MARKED
        )

    @cached_property
    def units(self) -> np.ndarray:
        """Returns, of pure noise, numbers (T, D) that are i.i.d. N(0, 1) under the claims."""
        units = self.values
        rows = dict[Claim, list[int]]()
        for row, each in enumerate(self.releases):
            rows.setdefault(each.claim, []).append(row)
        for claim, places in rows.items():
            units[places] = standardized(units[places], claim)
        return units


def standardized(values: np.ndarray, claim: Claim) -> np.ndarray:
    """Returns releases (T, D) of pure noise as numbers that are i.i.d. N(0, 1) under the claim.

    Gaussian: divided by the standard deviation. Laplace: by the distribution function. K-norm: the
    radius, Gamma(D), is replaced by the chi variable of the same quantile; a uniform direction
    times that is standard normal.
    """
    units = values / claim.scale
    if claim.law == "gaussian":
        return units
    with np.errstate(divide="ignore", invalid="ignore", over="ignore"):
        if claim.law == "laplace":
            return np.sign(units) * -special.ndtri(0.5 * np.exp(-np.abs(units)))
        radius = np.linalg.norm(units, axis=1, keepdims=True)
        d = units.shape[1]
        upper = special.gammaincc(d, radius)
        lower = special.gammainc(d, radius)
        half = np.where(
            upper < 0.5, special.gammainccinv(d / 2, upper), special.gammaincinv(d / 2, lower)
        )
        return units / radius * np.sqrt(2 * half)


def decorrelated(values: np.ndarray, claim: Claim) -> np.ndarray:
    """Returns C w of releases w (T, D) of consecutive rounds, the first of which is the first of a
    session; ``values`` if noise is independent over rounds."""
    if claim.bands and len(values):
        return signal.lfilter(claim.bands, [1.0], values, axis=0)
    return values


def coordinates(value: np.ndarray, form: Form) -> np.ndarray:
    """Returns the coordinates that are noised: of a symmetric matrix the upper triangle,
    off-diagonals times sqrt(2). A matrix that is not symmetric gives NaN."""
    if form != "symmetric":
        return value
    if not np.array_equal(value, value.T):
        return np.full(len(value) * (len(value) + 1) // 2, np.nan)
    upper = np.triu_indices(len(value))
    return value[upper] * np.where(upper[0] == upper[1], 1.0, math.sqrt(2.0))
