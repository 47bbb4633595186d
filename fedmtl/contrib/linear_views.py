"""The messages of peer averaging as sums of releases, and the information of some messages on each
release.

The row of a message in the matrix A has the weights of all agents' releases in it. With independent
noise of deviations sigma_i on the releases, the messages have the covariance Sigma = A N A', N the
diagonal matrix of the sigma_i^2, and a_i' Sigma^+ a_i is the information on release i: the square
of the shift of the best statistic when release i moves by 1. For an agent with noise it is
P_ii / sigma_i^2, P the orthogonal projection on the rows of A N^(1/2). It is infinite if a_i is not
in the range of Sigma.

*Rank.* P depends on the rank of A, and rows of averages are close to each other. An adversary with
exact numbers uses the smallest differences, so none may be taken for rounding. The rank is
computed without rounding, modulo two primes below 2^31: it cannot be too large, and is too small
with a probability of about (n / 2^31)^2. The entries of A are sums of positive terms, each exact to
a few units in the last place, which bounds the error of P by its smallest singular value; the bound
is added to P_ii. If it is above .01, P_ii is 1 for every agent that the view depends on.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..algorithms.p2p.network import Network

Array = NDArray[np.float64]
Ints = NDArray[np.int64]

PRIMES = (2**31 - 1, 2**31 - 19)  # products of two residues fit into 63 bits
ROUNDING = 2.0**-52
_SLACK = 0.01  # the largest error of P that is added to it


def messages(
    network: Network, acting: Ints, released: NDArray[np.bool_], prime: int | None = None
) -> NDArray[Any]:
    """Returns A (T, n): the message of activation t is minus the sum of a_ti g_i.

    Args:
        network: the graph and the public constants.
        acting: (T,), the agents that wake up and send, in order.
        released: (n,), False for agents that release nothing.
        prime: for the residues of the same numbers, int64; None for float64.
    """
    alpha = network.alpha
    pull = alpha * network.mu * network.confidence
    # the weight of an agent's own model, which is 0 with the curvature of a release
    kept = np.where(released | (network.counts == 0), 0.0, pull * network.smoothness)
    mixing = [alpha[k] * shares for k, (_, shares) in enumerate(network.neighbours)]
    sent = np.where(released, pull, 0.0)
    if prime is not None:
        mixing = [_residues(weights, prime) for weights in mixing]
        sent = _residues(sent, prime)
        kept = _residues(kept, prime)
    latest = np.zeros((len(alpha), len(alpha)), dtype=sent.dtype)
    rows = np.zeros((len(acting), len(alpha)), dtype=sent.dtype)
    for activation, k in enumerate(acting.tolist()):
        neighbours, _ = network.neighbours[k]
        terms = mixing[k][:, None] * latest[neighbours]
        own = kept[k] * latest[k]
        if prime is not None:
            terms %= prime
            own %= prime
        row = terms.sum(0) + own
        row[k] += sent[k]
        if prime is not None:
            row %= prime
        latest[k] = row
        rows[activation] = row
    return rows


def information(
    rows: Array, residues: Sequence[Ints], noise: Array, rounding: float
) -> tuple[Array, bool]:
    """Returns a_i' Sigma^+ a_i of every agent, and False if only an upper bound was computed.

    It is infinite for an agent without noise whose column is not in the range of Sigma.

    Args:
        rows: (M, n), A, nonnegative.
        residues: the same numbers modulo the primes, without error.
        noise: (n,), sigma.
        rounding: the largest relative error of an entry of A.

    Returns:
        (n,) float64, and a bool.
    """
    # a message that came twice says nothing new
    _, first = np.unique(residues[0], axis=0, return_index=True)
    rows = rows[first]
    residues = [each[first] for each in residues]
    reached = np.any([each.any(0) for each in residues], axis=0)
    noisy = noise > 0
    found = np.zeros(len(noise))
    rank = max(_rank(each[:, noisy], prime) for each, prime in zip(residues, PRIMES, strict=True))
    for i in np.flatnonzero(reached & ~noisy):
        wider = noisy.copy()
        wider[i] = True
        pairs = zip(residues, PRIMES, strict=True)
        found[i] = math.inf
        if max(_rank(each[:, wider], prime) for each, prime in pairs) == rank:
            found[i] = math.nan  # within the range, and computed below
    largest = np.where(reached & noisy, 1.0 / np.where(noisy, noise, 1.0) ** 2, found)
    # as many independent messages as agents: everything is decoded
    if rank == int((reached & noisy).sum()) and not np.isnan(largest).any():
        return largest, True
    weighted = rows[:, noisy] * noise[noisy]
    scale = 1.0 / np.maximum(np.linalg.norm(weighted, axis=1), 1e-300)
    u, s, vt = np.linalg.svd(weighted * scale[:, None], full_matrices=False)
    # of the entries, and of the decomposition
    errors = (rounding + sum(rows.shape) * ROUNDING) * float(np.linalg.norm(s))
    slack = math.inf
    if s[rank - 1] > 0:
        slack = 2 * errors / s[rank - 1]
    if slack > _SLACK:
        return np.where(np.isnan(largest), math.inf, largest), False
    shares = np.square(vt[:rank]).sum(0) + slack
    found[noisy] = np.where(reached[noisy], np.minimum(shares, 1.0), 0.0) / noise[noisy] ** 2
    for i in np.flatnonzero(np.isnan(found)):
        shifted = (u[:, :rank].T @ (scale * rows[:, i])) / s[:rank]
        found[i] = shifted @ shifted
    return found, True


def _residues(values: Array, prime: int) -> Ints:
    """Returns float64 numbers, which are whole multiples of powers of 2, modulo a prime."""
    ratios = [value.as_integer_ratio() for value in values.tolist()]
    return np.array([top * pow(low, -1, prime) % prime for top, low in ratios], dtype=np.int64)


def _rank(matrix: Ints, prime: int) -> int:
    """Returns the rank of residues (M, n) by elimination."""
    matrix = matrix.copy()
    rank = 0
    for column in range(matrix.shape[1]):
        rest = matrix[rank:]
        pivots = np.flatnonzero(rest[:, column])
        if not len(pivots):
            continue
        rest[[0, pivots[0]]] = rest[[pivots[0], 0]]
        top = rest[0] * pow(int(rest[0, column]), -1, prime) % prime
        below = 1 + np.flatnonzero(rest[1:, column])
        rest[below] = (rest[below] - rest[below, column, None] * top) % prime
        rank += 1
    return rank
