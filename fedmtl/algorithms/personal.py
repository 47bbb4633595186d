"""Personal models kept by their clients: shared by every algorithm whose clients remember one."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from .base import Own, Problem
from .store import Fields


def personal_fields(problem: Problem) -> Fields:
    """Return the fields of the store: the client's model (D,), whether it has taken part, and whether one of its local
    trainings ended in a finite model."""
    flags: Fields = {"seen": ((), torch.bool), "trained": ((), torch.bool)}
    return {"model": ((problem.dimension,), problem.initial.dtype), **flags}


def starting_models(own: Own, first: Tensor) -> Tensor:
    """Return each client's own last model, or ``first`` (D,) for a client seen for the first time: (k, D).

    May be ``own["model"]`` itself.
    """
    rows, seen = own["model"], own["seen"]
    return rows if bool(seen.all()) else torch.where(seen[:, None], rows, first)


def keep_models(own: Own, models: Tensor, start: Tensor) -> Own:
    """Return what clients keep that have trained from ``start`` (k, D) to ``models`` (k, D).

    A client whose model is no longer finite keeps its start.
    """
    trained = torch.ones_like(own["seen"])
    if not bool(torch.isfinite(models.sum(1)).all()):  # no sum is finite by chance, and few are not by overflow
        finite = torch.isfinite(models).all(1)
        models, trained = torch.where(finite[:, None], models, start), own["trained"] | finite
    return own | {"model": models, "seen": torch.ones_like(own["seen"]), "trained": trained}


def personal_models(own: Own, clients: Tensor, train_new: Callable[[Tensor], Tensor]) -> Tensor:
    """Return the clients' own models (k, D); ``train_new(ids)`` computes those of clients that never took part."""
    new = (~own["seen"]).nonzero()[:, 0].cpu()
    if not len(new):
        return own["model"]
    rows = own["model"].clone()
    rows[new.to(rows.device)] = train_new(clients[new])
    return rows
