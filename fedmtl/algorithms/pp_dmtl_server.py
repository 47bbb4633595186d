"""The server of PP-DMTL: its proximal step on P after every gradient that arrives."""

from __future__ import annotations

import math
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
    its decomposition. The result is off by at most ``||D||_F / (2 t)`` in Frobenius norm, as
    :func:`~fedmtl.optim.proximal.gram_error` has it, and where every singular value is above some u > t by at most
    ``||D||_F t / (2 u^2)``: f(w) = 1 - t / sqrt(w) has the divided difference ``t / (s s' (s + s'))`` between w = s^2
    and w' = s'^2, and x brings a factor s. The second bound is for noise that is large beside the threshold. Where
    neither is at most ``tolerance`` ||x||_F, x itself is decomposed.
    """
    short, long = sorted(x.shape[-2:])
    wide = x.shape[-2] == short
    w, v = torch.linalg.eigh(x @ x.mT if wide else x.mT @ x)
    rounding = (long + 10 * short) * torch.finfo(x.dtype).eps * w.sum(-1)
    above = w[..., 0] - rounding
    bound = torch.where(above > t * t, t / above, 1 / t) if t > 0 else torch.full_like(above, math.inf)
    fine = rounding * bound / 2 <= tolerance * w.sum(-1).sqrt()
    kept = (1 - t / w.clamp(min=t * t).sqrt())[..., None, :]
    factor = (v * kept) @ v.mT
    out = factor @ x if wide else x @ factor
    if not bool(fine.all()):
        out[~fine] = prox_nuclear(x[~fine], t, method="svd")
    return out


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
