"""Noise that is correlated over rounds, so that much of it cancels in the sum of the releases: a
banded factorization.

A server that adds up releases y_t = x_t + w_t is hurt by the noise of the *sums*. Let z_t be
independent with law N(0, s^2 I), c_0, ..., c_{b-1} numbers with sum c_j^2 <= 1 ("bands"), and w the
solution of ``sum_j c_j w_{t-j} = z_t``, w_{t-j} = 0 before the first round: w = C^-1 z with C lower
triangular, Toeplitz and banded (Choquette-Choo et al., "(Amplified) banded matrix factorization",
NeurIPS 2023; Denisov et al., "Improved differential privacy for SGD via optimal private linear
operators on adaptive streams", NeurIPS 2022).

The participants of each round are public, and two participations of one client are b rounds from
each other at least. Let neighbours differ in one client, whose row is replaced by nothing: x_t -
x'_t = g_t, of norm at most S, in the rounds of that client and 0 in all others. Given y_0, ...,
y_{t-1}, the other clients send the same under both, and w_{t-j} = y_{t-j} - x_{t-j}, so y_t is
Gaussian with the deviation s / c_0 of a coordinate, and its means under the two differ by sum_j c_j
g_{t-j} / c_0. The client was in at most one of the rounds t - b + 1, ..., t, say t - j: the release
of round t is a Gaussian mechanism of sensitivity c_j S at the deviation s, whatever the direction
of g and however it depends on the releases before. Adaptive composition of Gaussian mechanisms adds
up squares (Dong, Roth, Su, "Gaussian differential privacy", JRSS B 2022, Corollary 3.3), and every
participation meets each band once, at most:

    sum_t (c_j S / s)^2 <= u (S / s)^2 (c_0^2 + ... + c_{b-1}^2) <= u (S / s)^2        after u
    participations.

That is the cost of u Gaussian releases of multiplier s / S, which the ledger charges with
independent noise; it holds after every round, so a run that ends early is charged for its releases.
With b = 1 the noise is independent.

The bands are those of the square root of the prefix sums, (1 - x)^(-1/2) = sum_j binom(2 j, j) (x /
4)^j, cut at b and scaled to a norm of 1 (Kalinin, Lampert, "Banded square root matrix factorization
for differentially private model training", NeurIPS 2024). They are positive and fall with j, so
their polynomial has no zero in the closed unit disk (Enestroem, Kakeya) and w does not grow.

In secure mode z_t / c_0 is discrete Gaussian noise on a public grid, the other terms of w_t, -c_j
w_{t-j} / c_0, are rounded to it as one sum, and so is x_t. The means of y_t then differ by sqrt(D)
widths more, in units of s / c_0: as c_0 (c_0 + ... + c_{b-1}) <= b, the margin of the clip covers
it for a grid of a clip norm 2 b times smaller.

The last b - 1 vectors w stay in memory and nowhere else. A seeded run draws them anew if it is
resumed. In secure mode w begins anew with every session, since rounds that an earlier session
released, and this one releases again, would otherwise meet a band twice: the matrix of all sessions
is then block diagonal, with columns as short as before.
"""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

_LIMIT = 64  # multiples of b after which the deviation of w has reached its limit


@dataclass(frozen=True)
class Bands:
    """The matrix C of correlated noise.

    Attributes:
        coefficients: c_0, ..., c_{b-1}, whose squares add up to at most 1.
    """

    coefficients: tuple[float, ...]

    @classmethod
    def square_root(cls, count: int) -> Bands:
        """Returns ``count`` bands of the square root of the prefix sums, at a norm of 1."""
        j = np.arange(1, count)
        raw = np.cumprod(np.concatenate([[1.0], (2 * j - 1) / (2 * j)]))
        # A norm of 1 is the condition under which u participations cost as much as u Gaussian
        # releases.
        return cls(tuple((raw / np.linalg.norm(raw)).tolist()))

    def __len__(self) -> int:
        return len(self.coefficients)

    @property
    def gain(self) -> float:
        """Returns the deviation of w over that of z, which it approaches from below."""
        from scipy.signal import lfilter

        # The variance of w_t is the energy of the impulse response of 1 / C up to t.
        impulse = np.zeros(_LIMIT * len(self))
        impulse[0] = 1.0
        return float(np.linalg.norm(lfilter([1.0], self.coefficients, impulse)))


class CorrelatedNoise:
    """The noise of one release, round after round.

    Args:
        bands: the matrix.
        draw: step -> z / c_0 of that step, (D,) float64, and the width of its grid or None.
        repeatable: True if ``draw`` gives the same numbers whenever it is asked (seeded noise).
    """

    def __init__(
        self, bands: Bands, draw: Callable[[int], tuple[Tensor, float | None]], *, repeatable: bool
    ) -> None:
        self._bands = bands
        self._draw = draw
        self._repeatable = repeatable
        # w of the last rounds, the newest first
        self._latest: deque[Tensor] = deque(maxlen=len(bands) - 1)
        self._next: tuple[int, int] | None = None  # step and process

    def at(self, step: int) -> tuple[Tensor, float | None]:
        """Returns w of ``step``, (D,) float64, and the width of its grid. If it does not follow
        the last one that was asked for, repeatable noise is that of a run from step 0, and other
        noise begins anew; so in a process that was forked."""
        # A forked process has the memory of its parent: both would release the same past noise.
        if (step, os.getpid()) != self._next:
            self._latest.clear()
            if self._repeatable:
                for earlier in range(step):
                    self._advance(earlier)
        return self._advance(step)

    def _advance(self, step: int) -> tuple[Tensor, float | None]:
        first, *further = self._bands.coefficients
        noise, width = self._draw(step)
        earlier = torch.zeros_like(noise)
        # In the first rounds there are fewer past vectors than bands.
        for c, w in zip(further, self._latest, strict=False):
            earlier += c / first * w
        if width is not None:
            # The past noise is a function of released values; rounded, the release stays on its
            # grid.
            earlier = torch.round(earlier / width) * width
        noise = noise - earlier
        self._latest.appendleft(noise)
        self._next = step + 1, os.getpid()
        return noise.clone(), width
