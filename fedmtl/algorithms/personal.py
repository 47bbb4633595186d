"""Personal models kept by their clients: shared by every algorithm whose clients remember one."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from .base import Problem
from .store import ClientStore, Fields


def personal_fields(problem: Problem) -> Fields:
    """Store fields: the client's model (D,), and whether it has taken part."""
    return {"model": ((problem.dimension,), problem.initial.dtype), "seen": ((), torch.bool)}


def starting_models(store: ClientStore, clients: Tensor, first: Tensor) -> Tensor:
    """Each client's own last model, or ``first`` (D,) for a client seen for the first time: (k, D)."""
    rows = store.gather("model", clients)
    new = ~store.gather("seen", clients)
    if bool(new.any()):
        rows[new] = first
    return rows


def keep_models(store: ClientStore, clients: Tensor, models: Tensor, first: Tensor) -> None:
    """Remember ``models`` (k, D); a client whose model is no longer finite keeps its last one, a new one ``first``."""
    if models.numel():
        extremes = torch.stack(torch.aminmax(models, dim=1))  # NaN passes through both
        finite = torch.isfinite(extremes).all(dim=0)
        if not bool(finite.all()):
            models = torch.where(finite[:, None], models, starting_models(store, clients, first))
    store.scatter("model", clients, models)
    store.scatter("seen", clients, torch.ones(len(clients), dtype=torch.bool))


def personal_models(store: ClientStore, clients: Tensor, train_new: Callable[[Tensor], Tensor]) -> Tensor:
    """The clients' own models (k, D); ``train_new(ids)`` computes those of clients that never took part."""
    rows = store.gather("model", clients)
    new = (~store.gather("seen", clients)).nonzero()[:, 0].cpu()
    if len(new):
        rows[new.to(rows.device)] = train_new(clients[new])
    return rows
