"""The nuclear norm's proximal operator for a sequence of similar matrices: a subspace carried from call to call."""

from __future__ import annotations

import math
from collections.abc import Mapping

import torch
from torch import Tensor

from .._check import positive, positive_int
from .proximal import Threshold, check_finite, gram_error, prox_nuclear, shrinkage, threshold_of


class NuclearProx:
    """:func:`~fedmtl.local.proximal.prox_nuclear` for matrices that change little between calls.

    Only the singular directions above the threshold matter, and they hardly turn from one call to the next. A basis
    of them (and of ``oversample`` more) is carried along and improved by subspace iteration with Rayleigh-Ritz (Halko,
    Martinsson and Tropp, 2011) on G = x x^T, x turned so that G is on the smaller side. This spares the decomposition
    of G, which costs several times more than G itself.

    Every result is proved from the call's own matrix. Let (s, q) be the r Ritz pairs with s > t, G q = q s^2 + R and
    u = x^T q / s. Then x' = x - (R / s) u^T has (s, q, u) as exact singular triplets and differs from x by
    ||R / s||_F. The operator is nonexpansive, so the result, q (1 - t / s) q^T x, is off by no more than that if no
    other singular value of x' is above t; which holds if t^2 I - (I - q q^T) G (I - q q^T) has a Cholesky
    decomposition. The rounding of G comes on top, :func:`~fedmtl.local.proximal.gram_error`.

    Where this does not show an error of at most ``tolerance`` ||x||_F, or the matrix is small, the call decomposes
    the matrix as ``prox_nuclear`` does, and the basis starts again from there. After each failure in a row it waits
    twice as many calls before it tries again, so that a threshold in the midst of the spectrum costs little more
    than decompositions.

    Args:
        tolerance: largest Frobenius error, relative to ||x||_F.
        oversample: directions carried beyond those near or above the threshold.
        iterations: the most subspace iterations of a call.
        least_side: matrices whose smaller side is below this always go through ``prox_nuclear``.

    Attributes:
        carried, decomposed: matrices done by the carried basis, and by a decomposition.
    """

    def __init__(
        self, *, tolerance: float = 1e-9, oversample: int = 8, iterations: int = 12, least_side: int = 96
    ) -> None:
        positive(self, tolerance=tolerance)
        positive_int(self, oversample=oversample, iterations=iterations, least_side=least_side)
        self.tolerance, self.oversample, self.iterations = tolerance, oversample, iterations
        self.least_side = least_side
        self.carried = self.decomposed = 0
        self._bases: dict[int, Tensor] = {}
        self._waits: dict[int, tuple[int, int]] = {}

    def __call__(self, x: Tensor, t: Threshold) -> Tensor:
        """Apply the operator to x (..., d, T); each matrix of a batch has a basis of its own, by its position.

        Raises:
            ConfigError: as :func:`~fedmtl.local.proximal.prox_nuclear`.
        """
        level = threshold_of(t, x)
        if min(x.shape[-2:]) < self.least_side or x.numel() == 0:
            self.decomposed += math.prod(x.shape[:-2])
            return prox_nuclear(x, t, tolerance=self.tolerance)
        flat = x.reshape(-1, *x.shape[-2:])
        levels = torch.as_tensor(level, dtype=x.dtype).expand(*x.shape[:-2], 1, 1).flatten().tolist()
        wide = x.shape[-2] <= x.shape[-1]
        out = [self._one(i, a if wide else a.mT, s) for i, (a, s) in enumerate(zip(flat, levels, strict=True))]
        out = [a if wide else a.mT for a in out]
        return out[0].reshape(x.shape) if len(out) == 1 else torch.stack(out).reshape(x.shape)

    def state_dict(self) -> dict[str, dict[int, Tensor]]:
        """Return what later results depend on, to the last bit: by place in the batch, ``bases`` (side, k) and, after
        failures, ``waits`` int64 (2,)."""
        waits = {place: torch.tensor(wait) for place, wait in self._waits.items()}
        return {"bases": {place: basis.clone() for place, basis in self._bases.items()}, "waits": waits}

    def load_state_dict(self, state: Mapping[str, Mapping[int, Tensor]]) -> None:
        """Continue from a :meth:`state_dict`; without ``waits`` every matrix with a basis is tried at once."""
        self._bases = {int(place): basis.clone() for place, basis in state["bases"].items()}
        self._waits = {}
        for place, wait in state.get("waits", {}).items():
            left, last = wait.tolist()
            self._waits[int(place)] = (left, last)

    def _one(self, place: int, a: Tensor, t: float) -> Tensor:
        """Apply the operator to a (m, n), m <= n."""
        norm = torch.linalg.matrix_norm(a)
        check_finite(norm)
        basis = self._bases.pop(place, None)
        allowed = float(self.tolerance * norm - gram_error(norm, t, a.shape)) if t > 0 else -1.0
        if allowed < 0:  # a threshold so small that G would be too coarse
            self.decomposed += 1
            return prox_nuclear(a, t, method="svd")
        gram = a @ a.mT
        if basis is not None and basis.shape[0] == len(gram) and basis.dtype == a.dtype:
            decomposition = self._carry(place, gram, basis, t, allowed)
            if decomposition is not None:
                self.carried += 1
                self._waits.pop(place, None)
                q, s = decomposition
                return (q * (1.0 - t / s)) @ (q.mT @ a)
            wait = min(2 * self._waits.get(place, (0, 1))[1], 64)
            self._waits[place] = (wait, wait)
        self.decomposed += 1
        left, last = self._waits.get(place, (0, 1))
        if left:
            self._waits[place] = (left - 1, last)
        w, v = torch.linalg.eigh(gram)
        s = w.clamp_min(0.0).sqrt()
        above = int((s > t).sum())
        carried = int((s > 0.9 * t).sum()) + self.oversample
        if left <= 1 and carried <= len(s) // 2:
            self._bases[place] = v[:, len(s) - carried :].contiguous()
        q = v[:, len(s) - above :]
        return (q * shrinkage(s[len(s) - above :], t)) @ (q.mT @ a)

    def _carry(self, place: int, gram: Tensor, basis: Tensor, t: float, allowed: float) -> tuple[Tensor, Tensor] | None:
        """Kept directions (m, r) and singular values (r,), or None where they cannot be shown to be right."""
        for _ in range(self.iterations):
            image = gram @ basis
            w, turn = torch.linalg.eigh(basis.mT @ image)
            keep = w > t * t
            if bool(keep[0]):  # every direction is kept: there may be more
                return None
            q, s = basis @ turn[:, keep], w[keep].sqrt()
            residual = image @ turn[:, keep] - q * w[keep]
            basis = torch.linalg.qr(image).Q
            if float(torch.linalg.matrix_norm(residual / s)) <= allowed:
                break
        else:
            return None
        others = residual @ q.mT
        others = gram - (q * w[keep]) @ q.mT - others - others.mT
        others.diagonal().sub_(t * t)
        if int(torch.linalg.cholesky_ex(-others).info):
            return None
        self._bases[place] = basis
        return q, s
