"""The server of PP-DMTL: its proximal step on P after every gradient that arrives."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Literal

import numpy as np
import torch
from scipy.linalg.lapack import dsyevd
from torch import Tensor

from ...local.proximal import Penalty, column_norm, nuclear_norm, prox_columns, prox_nuclear

SharedPenalty = Literal["nuclear", "l21"]
SHARED_PENALTIES: dict[SharedPenalty, Penalty] = {
    "nuclear": Penalty(nuclear_norm, prox_nuclear),
    "l21": Penalty(column_norm, prox_columns),
}
"""r by name, of P^T (..., T, p): one row a task, one column a feature."""


_TOLERANCE = 1e-9


def prox_nuclear_small(x: Tensor, t: float, *, tolerance: float = _TOLERANCE) -> Tensor:
    """Return :func:`~fedmtl.local.proximal.prox_nuclear` of small x (R, m, n), with its error bounded afterwards.

    The product G of x with its transpose on the smaller side is decomposed; let D be the rounding error of G and of
    its decomposition. As :func:`~fedmtl.local.proximal.gram_error` has it, the result is off by at most ``||D||_F``
    times the largest ``s |f[w, w']|`` with w = s^2 of x and w' of G + D, f(w) = max(0, 1 - t / sqrt(w)); at most
    ``1 / (2 t)``. Where no singular value lies between c < t < u, it is at most ``t / (2 u^2)`` of two above, for
    ``f[w, w'] = t / (s s' (s + s'))``; 0 of two below; ``1 / (u - c^2 / u)`` of one each. That is for noise that is
    large beside the threshold. Where the error is not shown to be within ``tolerance`` ||x||_F, x is decomposed.
    """
    return torch.from_numpy(_by_gram(x.numpy(), t, tolerance))


def _by_gram(x: np.ndarray, t: float, tolerance: float) -> np.ndarray:
    """Compute that of (R, m, n); numpy's products of many small matrices are faster than torch's."""
    short, long = sorted(x.shape[-2:])
    wide = x.shape[-2] == short
    other = x.swapaxes(-2, -1)
    values, vectors = torch.linalg.eigh(torch.from_numpy(np.matmul(x, other) if wide else np.matmul(other, x)))
    w, v = values.numpy(), vectors.numpy()
    kept = v * (1 - t / np.sqrt(np.maximum(w, t * t)))[..., None, :] if t > 0 else v
    factor = kept @ v.swapaxes(-2, -1)
    out: np.ndarray = factor @ x if wide else x @ factor
    fine = _fine(w, _ulps(short, long), t, tolerance)
    if not fine.all():
        out[~fine] = prox_nuclear(torch.from_numpy(x[~fine]), t, method="svd").numpy()
    return out


def prox_nuclear_one(x: np.ndarray, t: float, *, tolerance: float = _TOLERANCE) -> np.ndarray:
    """Return :func:`prox_nuclear_small` of one matrix x (m, n), with little besides the decomposition."""
    short, long = sorted(x.shape)
    wide = len(x) == short
    gram = x.dot(x.T) if wide else x.T.dot(x)
    w, v, failed = dsyevd(gram.T, overwrite_a=1)  # symmetric, in the order of Fortran
    ulps, size = _ulps(short, long), float(np.add.reduce(w))  # ||x||_F^2
    within = t > 0 and size >= 0 and ulps * math.sqrt(size) <= 2 * t * tolerance
    if failed or not (within or _fine(w, ulps, t, tolerance)):
        return prox_nuclear(torch.from_numpy(x), t, method="svd").numpy()
    below = int(w.searchsorted(t * t))
    v = v[:, below:]
    kept = v * (1 - t / np.sqrt(w[below:]))
    out: np.ndarray = kept.dot(v.T.dot(x)) if wide else x.dot(v).dot(kept.T)
    return out


def _ulps(short: int, long: int) -> float:
    """Return the rounding error of (short, long) times its transpose and of its decomposition, over its trace."""
    return float((long + 10 * short) * np.finfo(np.float64).eps)


def _fine(w: np.ndarray, ulps: float, t: float, tolerance: float) -> np.ndarray:
    """Return (...) bool: whether the error is shown to be small, by the eigenvalues (..., m) of G, which rise."""
    square = w.sum(-1)
    if t <= 0:
        return np.zeros(square.shape, dtype=bool)
    rounding, allowed = ulps * square, tolerance * np.sqrt(np.maximum(square, 0.0))
    fine: np.ndarray = np.isfinite(square) & (rounding <= 2 * t * allowed)
    if fine.all():
        return fine
    above = w > t * t
    high = np.where(above, w, np.inf).min(-1) - rounding  # nearest above the threshold, and below
    low = np.where(above, -np.inf, w).max(-1) + rounding
    low = np.where(above.all(-1), 0.0, low)
    gain = np.full(square.shape, 1 / (2 * t))
    apart = (low < t * t) & (high > t * t)
    root = np.sqrt(np.where(apart, high, 1.0))
    mixed = np.where(above.all(-1) | np.isinf(root), 0.0, 1 / (root - np.where(apart, low, 0.0) / root))
    gain = np.where(apart, np.minimum(gain, np.maximum(t / (2 * root * root), mixed)), gain)
    return np.isfinite(square) & (rounding * gain <= allowed)


_LEAST_PART = 16  # matrices of a thread, below which it costs more than it gives


class SharedProx:
    """The proximal operator of r on P^T (R, T, p), in threads where there are many matrices."""

    def __init__(self, replicates: int, penalty: SharedPenalty, threshold: float) -> None:
        self._threshold = threshold
        self._prox: Callable[[Tensor, float], Tensor]
        self._prox = prox_nuclear_small if penalty == "nuclear" else SHARED_PENALTIES[penalty].prox
        self._pool: ThreadPoolExecutor | None = None
        threads = torch.get_num_threads()
        if penalty == "nuclear" and threads > 1 and replicates >= _LEAST_PART * threads:
            self._pool = ThreadPoolExecutor(threads)

    def __call__(self, p: Tensor) -> Tensor:
        if self._pool is None:
            return self._prox(p, self._threshold)
        parts = p.tensor_split(torch.get_num_threads())  # decompositions of a batch take one core otherwise
        return torch.cat(list(self._pool.map(lambda part: self._prox(part, self._threshold), parts)))

    def single(self, p: np.ndarray) -> np.ndarray:
        """Return :meth:`__call__` of one matrix (T, p)."""
        if self._prox is prox_nuclear_small:
            return prox_nuclear_one(p, self._threshold)
        return self(torch.from_numpy(p)[None]).numpy()[0]

    def close(self) -> None:
        """Let the threads go; nothing follows."""
        if self._pool is not None:
            self._pool.shutdown()


def serve(public: dict[str, Tensor], part: Tensor, released: Tensor, a2: float, prox: SharedProx) -> None:
    """Make the server's steps, in order: G_t is column t of S, P <- prox_{a2 lam r}(P - a2 S), p_t goes back to t."""
    shared, stale = public["shared"], public["stale"]
    s, back = stale.numpy(), public["returned"].numpy()
    everyone, every = bool((part >= 0).all()), np.arange(len(shared))
    for tasks, gradient in zip(part.numpy(), released.numpy(), strict=True):
        acts = every if everyone else np.flatnonzero(tasks >= 0)
        own = tasks[acts]
        s[acts, own] = gradient[acts]
        new = prox(torch.sub(shared, stale, alpha=a2))
        shared = new if everyone else torch.where(torch.from_numpy(tasks >= 0)[:, None, None], new, shared)
        back[acts, own] = shared.numpy()[acts, own]
    public["shared"].copy_(shared)


def serve_one(
    public: dict[str, Tensor], part: Sequence[int], released: Iterator[np.ndarray], a2: float, prox: SharedProx
) -> None:
    """Serve one run as :func:`serve` does: tasks (S,), and an iterator over their G_t (1, p), each made from the
    columns that went back before it."""
    shared, stale, back = (public[name].numpy()[0] for name in ("shared", "stale", "returned"))
    p = shared
    for task, gradient in zip(part, released, strict=True):
        if task >= 0:
            stale[task] = gradient[0]
            moved = stale * -a2
            moved += p
            p = prox.single(moved)
            back[task] = p[task]
    shared[:] = p
