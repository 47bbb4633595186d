"""Trade-off functions: the best that any test can do against a privacy loss distribution."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from .pld import LossLaw

_LARGEST = 600.0  # loss whose exponential is a float64


@dataclass(frozen=True, eq=False)
class TradeOff:
    """The trade-off between two laws P and Q, as a bound on all tests: for every event E, P(E) <=
    F(Q(E)) and Q(E) <= F(P(E)).

    F is one minus the trade-off function of Dong, Roth, Su (2022, "Gaussian differential privacy"),
    made symmetric. It is increasing and concave: the smallest of the lines ``delta(e) + exp(e) x``
    and their mirror images ``1 - exp(-e) (1 - delta(e) - x)``, here of the losses e on a grid,
    which is an upper bound on the smallest of all.

    Attributes:
        x, y: (n,) increasing coordinates of the corners of F, from (0, delta) to (1 - delta, 1) for
            the last delta.
    """

    x: np.ndarray
    y: np.ndarray

    @classmethod
    def of_laws(cls, *laws: LossLaw) -> TradeOff:
        """Returns the curve of pairs of laws; if there are several, of the largest delta at
        every loss."""
        width = laws[0].width
        last = max(law.first + law.masses.size for law in laws)
        losses = width * np.arange(max(2, min(last, int(_LARGEST / width)) + 1))
        return cls._of_deltas(
            losses, np.maximum.reduce([_deltas(law, losses.size) for law in laws])
        )

    @classmethod
    def of_epsilon(cls, epsilon: float, delta: float) -> TradeOff:
        """Returns the curve of (``epsilon``, ``delta``)-differential privacy alone; no bound if
        epsilon is infinite."""
        if math.isinf(epsilon):
            return cls(np.zeros(2), np.array([0.0, 1.0]))
        corner = (1 - delta) / (1 + math.exp(epsilon))
        return cls(np.array([0.0, corner, 1 - delta]), np.array([delta, 1 - corner, 1.0]))

    @classmethod
    def _of_deltas(cls, losses: np.ndarray, deltas: np.ndarray) -> TradeOff:
        """Returns the curve of the lines of the ``losses`` (n,), increasing from 0, with their
        ``deltas`` (n,)."""
        slopes = np.exp(losses)
        # Two neighbouring lines delta(e) + exp(e) x cross at a corner of the curve.
        x = ((deltas[:-1] - deltas[1:]) / np.diff(slopes))[::-1]
        y = np.append(deltas[-1], deltas[-2::-1] + slopes[-2::-1] * x)
        x = np.append(0.0, x)
        # The mirror image is the other direction: the test of Q against P.
        corners = np.append(x, 1 - y[::-1]), np.append(y, 1 - x[::-1])
        # where rounding decides
        return cls(*(np.maximum.accumulate(np.clip(one, 0.0, 1.0)) for one in corners))

    @property
    def advantage(self) -> float:
        """Returns the total variation between P and Q: the largest F(x) - x."""
        return float(np.max(self.y - self.x))

    def smallest(self, y: float) -> float:
        """Returns the smallest x with F(x) >= ``y``."""
        return float(np.interp(y, self.y, self.x))


def _deltas(law: LossLaw, count: int) -> np.ndarray:
    """Returns the hockey-stick divergences at the losses ``law.width * arange(count)``,
    (count,)."""
    beyond = np.arange(count) + 1 - law.first  # the index of the first larger loss
    with np.errstate(over="ignore"):
        # The masses under Q of the same outcomes.
        shares = law.masses * np.exp(-law.losses)
    p, q = (np.append(np.cumsum(masses[::-1])[::-1], 0.0) for masses in (law.masses, shares))
    at = np.clip(beyond, 0, law.masses.size)
    losses = law.width * np.arange(count)
    excess: np.ndarray = np.maximum(p[at] - np.exp(losses) * q[at], 0.0)
    return excess + law.infinity
