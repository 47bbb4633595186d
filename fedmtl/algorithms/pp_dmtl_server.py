"""The server of PP-DMTL: its proximal step on P after every gradient that arrives."""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Callable
from typing import Literal

import torch
from torch import Tensor

from ..optim.nuclear import NuclearProx
from ..optim.proximal import Penalty, column_norm, nuclear_norm, prox_columns, prox_nuclear

SharedPenalty = Literal["nuclear", "l21"]
SHARED_PENALTIES: dict[SharedPenalty, Penalty] = {
    "nuclear": Penalty(nuclear_norm, prox_nuclear),
    "l21": Penalty(column_norm, prox_columns),
}
"""r by name, of P^T (..., T, p): one row a task, one column a feature."""


def carried_basis(replicates: int, tasks: int, dimension: int, penalty: SharedPenalty) -> dict[str, Tensor]:
    """What :class:`SharedProx` carries in the state, before the first event; nothing where P is small."""
    side = min(tasks, dimension)
    if penalty != "nuclear" or side < NuclearProx().least_side:
        return {}
    shapes = {"basis": (replicates, side, side // 2), "basis_use": (replicates, 3)}
    return {name: torch.zeros(shape, dtype=torch.float64) for name, shape in shapes.items()}


def prox_nuclear_small(x: Tensor, t: float, *, tolerance: float = 1e-9) -> Tensor:
    """:func:`~fedmtl.optim.proximal.prox_nuclear` of small matrices x (R, m, n), with its error bounded afterwards.

    The product G of x with its transpose on the smaller side is decomposed; let D be the rounding error of G and of
    its decomposition. As :func:`~fedmtl.optim.proximal.gram_error` has it, the result is off by at most ``||D||_F``
    times the largest ``s |f[w, w']|`` with w = s^2 of x and w' of G + D, f(w) = max(0, 1 - t / sqrt(w)); at most
    ``1 / (2 t)``. Where no singular value lies between c < t < u, it is at most ``t / (2 u^2)`` of two above, for
    ``f[w, w'] = t / (s s' (s + s'))``; 0 of two below; ``1 / (u - c^2 / u)`` of one each. That is for noise that is
    large beside the threshold. Where the error is not shown to be within ``tolerance`` ||x||_F, x is decomposed.
    """
    if len(x) == 1:  # two axes are faster than three
        return _by_gram(x[0], t, tolerance)[None]
    return _by_gram(x, t, tolerance)


def _by_gram(x: Tensor, t: float, tolerance: float) -> Tensor:
    short, long = sorted(x.shape[-2:])
    wide = x.shape[-2] == short
    w, v = torch.linalg.eigh(x @ x.mT if wide else x.mT @ x)
    factor = (v * (1 - t / w.clamp(min=t * t).sqrt())[..., None, :]) @ v.mT
    out = factor @ x if wide else x @ factor
    ulps = (long + 10 * short) * torch.finfo(x.dtype).eps
    rows = w.tolist() if x.dim() == 3 else [w.tolist()]
    coarse = [place for place, row in enumerate(rows) if not _fine(row, ulps, t, tolerance)]
    if coarse and x.dim() == 3:
        out[coarse] = prox_nuclear(x[coarse], t, method="svd")
    return prox_nuclear(x, t, method="svd") if coarse and x.dim() == 2 else out


def _fine(values: list[float], ulps: float, t: float, tolerance: float) -> bool:
    """Whether the error is shown to be small, by the eigenvalues of G, which rise."""
    square = sum(values)
    if t <= 0 or not math.isfinite(square):
        return False
    rounding, first = ulps * square, bisect_right(values, t * t)
    high = values[first] - rounding if first < len(values) else math.inf
    low = values[first - 1] + rounding if first else 0.0
    gain = 1 / (2 * t)
    if low < t * t < high:
        mixed = 1 / (math.sqrt(high) - low / math.sqrt(high)) if first else 0.0
        gain = min(gain, max(t / (2 * high), mixed))
    return rounding * gain <= tolerance * math.sqrt(max(square, 0.0))


class SharedProx:
    """The proximal operator of r on P^T (R, T, p); for a large nuclear norm with bases carried in the public state.

    The bases are part of the state, so that a run that stops and goes on is the run that did not stop: ``basis``
    (R, side, side // 2), zeros beyond its columns, and ``basis_use`` (R, 3), their number and the operator's two
    counts of calls to wait.
    """

    def __init__(self, public: dict[str, Tensor], penalty: SharedPenalty, threshold: float) -> None:
        self._public, self._threshold = public, threshold
        self._prox: Callable[[Tensor, float], Tensor]
        self._prox = prox_nuclear_small if penalty == "nuclear" else SHARED_PENALTIES[penalty].prox
        self._nuclear: NuclearProx | None = None
        if "basis" not in public:
            return
        self._prox = self._nuclear = NuclearProx()
        bases, waits = {}, {}
        for r, (columns, left, last) in enumerate(public["basis_use"].long().tolist()):
            if columns:
                bases[r] = public["basis"][r, :, :columns].contiguous()
            if last:
                waits[r] = torch.tensor([left, last])
        self._nuclear.load_state_dict({"bases": bases, "waits": waits})

    def __call__(self, p: Tensor) -> Tensor:
        return self._prox(p, self._threshold)

    def keep(self) -> None:
        """Put the bases back into the state."""
        if self._nuclear is None:
            return
        padded, use = self._public["basis"].zero_(), self._public["basis_use"].zero_()
        kept = self._nuclear.state_dict()
        for place, basis in kept["bases"].items():
            padded[place, :, : basis.shape[1]] = basis
            use[place, 0] = basis.shape[1]
        for place, wait in kept["waits"].items():
            use[place, 1:] = wait


def serve(public: dict[str, Tensor], part: Tensor, released: Tensor, a2: float, prox: SharedProx) -> None:
    """The server's steps, in order: column t of S is G_t, P <- prox_{a2 lam r}(P - a2 S), p_t goes back to task t."""
    shared, stale, returned = public["shared"], public["stale"], public["returned"]
    if len(shared) == 1:
        for task, gradient in zip(part[:, 0].tolist(), released[:, 0], strict=True):
            if task >= 0:
                stale[0, task] = gradient
                shared = prox(torch.sub(shared, stale, alpha=a2))
                returned[0, task] = shared[0, task]
        public["shared"].copy_(shared)
        return
    where, everyone = torch.arange(len(shared)), bool((part >= 0).all())
    for tasks, gradient in zip(part, released, strict=True):
        acts = where if everyone else (tasks >= 0).nonzero()[:, 0]
        own = tasks[acts]
        stale[acts, own] = gradient[acts]
        new = prox(torch.sub(shared, stale, alpha=a2))  # of all: a basis belongs to a place in the batch
        shared = new if everyone else torch.where((tasks >= 0)[:, None, None], new, shared)
        returned[acts, own] = shared[acts, own]
    public["shared"].copy_(shared)
