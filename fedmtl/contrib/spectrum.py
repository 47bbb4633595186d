"""Estimates of means, matrices and numbers below Gaussian noise of a known law."""

from __future__ import annotations

import math

import torch
from torch import Tensor

EDGE = 1.05
"""The limit of the noise, in units of the end of its spectrum: larger values are a signal."""


def mean_signal(mean: Tensor, noise: float) -> Tensor:
    """Returns the part of u u^T above the noise, (d, d), for a noised mean u.

    The squared length of pure noise has mean d s^2 and standard deviation s^2 sqrt(2 d). A length
    counts from two of these above the mean on, and if that limit is below 1: u is the mean of
    vectors of length 1, so no longer than that. The rest is the squared length of u; divided by the
    whole it is the squared cosine between u and the released vector. Else the result is zero.

    Args:
        mean: (d,), of vectors of unit length, with noise.
        noise: s, standard deviation of the noise on a coordinate; at least 0.
    """
    d = len(mean)
    square = float(mean.square().sum())
    own = square - d * noise**2  # estimates ||u||^2
    limit = noise**2 * (d + 2 * math.sqrt(2 * d))
    if own <= 0 or not limit < min(square, 1.0):
        return mean.new_zeros(d, d)
    return min(own, 1.0) * own / square**2 * torch.outer(mean, mean)


def matrix_signal(matrix: Tensor, noise: float) -> Tensor:
    """Returns an estimate (d, d) of the matrix below the noise.

    An eigenvalue above 1.05 times s sqrt(2 d) becomes that of the matrix below times the squared
    cosine of the two eigenvectors; the others become 0. All become 0 if that limit is 1 or more,
    since the mean of M_i has no eigenvalue above 1.

    Args:
        matrix: symmetric, with noise.
        noise: s, its standard deviation on a diagonal entry, 1 / sqrt(2) of it elsewhere; at least
            0.
    """
    values, vectors = torch.linalg.eigh(matrix)
    quarter = noise**2 * len(matrix) / 2  # the square of half the end of the spectrum
    below = (values + (values.square() - 4 * quarter).clamp_min(0.0).sqrt()) / 2
    limit = EDGE * 2 * math.sqrt(quarter)
    if not limit < 1:
        return torch.zeros_like(matrix)
    estimates = below - quarter / below.clamp_min(1e-300)
    shrunk = torch.where(values > limit, estimates, 0.0).clamp_max(1.0)
    return (vectors * shrunk) @ vectors.T


def entry_signal(values: Tensor, noise: float) -> Tensor:
    """Returns an estimate (d,) of the numbers below the noise (the garrote of Breiman 1995).

    Numbers y above c become y - c^2 / y, the others 0. The limit c is 1.05 times s sqrt(2 log 2d),
    about the largest of d draws of noise. All become 0 if c is 1 or more.

    Args:
        values: (d,), with noise.
        noise: s, its standard deviation.
    """
    limit = EDGE * noise * math.sqrt(2 * math.log(2 * len(values)))
    if not limit < 1:
        return torch.zeros_like(values)
    estimates = values - limit**2 / values.clamp_min(1e-300)
    return torch.where(values > limit, estimates, 0.0).clamp_max(1.0)


def excess_of(signal: Tensor) -> tuple[Tensor, Tensor]:
    """Returns the eigenvalues (d,) and eigenvectors (d, d) of a signal, its trace made 0.

    The part of the trace that the signal takes is missing, in equal parts, along the directions
    without a signal, since the trace of all is 0. No signal has no excess.
    """
    values, vectors = torch.linalg.eigh(signal)
    # eigenvalues that are 0 but for rounding have no signal
    clear = values.abs() > 1e-12 * values.abs().max()
    rest = int((~clear).sum())
    if not rest or rest == len(values):
        return torch.where(clear, values - values.mean(), 0.0), vectors
    return torch.where(clear, values, -values[clear].sum() / rest), vectors
