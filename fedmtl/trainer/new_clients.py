"""Clients that join after a run: personal models from what was released and from their own data."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from contextlib import closing
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from ..algorithms.finetune import Finetune
from ..data import FederatedDataset
from ..errors import ConfigError
from ..local import Execution, operation_threads
from ..stacked import Layout
from ..stacked.losses import Loss
from .evaluation import evaluate_rows, evaluate_shared, metric_name
from .problem import build_problem


@dataclass(frozen=True)
class NewClients:
    """Personal models of clients that took no part in a run.

    Attributes:
        ids: of the clients.
        personal: (k, D).
        personal_accuracy, shared_accuracy: test accuracy (or mean squared error) by client id, of their own models and
            of the model they started from; not private.
        metric: ``"accuracy"`` or ``"mse"``.
        module: the network.
    """

    ids: tuple[str, ...]
    personal: Tensor
    personal_accuracy: Mapping[str, float]
    shared_accuracy: Mapping[str, float]
    metric: str
    module: nn.Module

    def model_for(self, client: str) -> nn.Module:
        """Return a client's personal model, in evaluation mode.

        Raises:
            ConfigError: no client of that id.
        """
        if client not in self.ids:
            raise ConfigError(f"There is no client {client!r}; the clients are {self.ids[0]!r} .. {self.ids[-1]!r}.")
        row = self.personal[self.ids.index(client)]
        module = copy.deepcopy(self.module).to(device=row.device, dtype=row.dtype)
        return Layout.of(module).load(module, row).eval()


def personalize(
    model: nn.Module,
    data: FederatedDataset,
    *,
    finetune: Finetune | None = None,
    loss: str | Loss = "auto",
    seed: int = 0,
    device: str = "auto",
    dtype: str = "float32",
    execution: Execution | None = None,
) -> NewClients:
    """Personal models of new clients, by finetuning a released model on each one's own training records.

    Nothing is sent: the new clients' data cost no epsilon as long as their models stay with them, and those of the
    clients of the run are covered by the epsilon of the released model.

    Args:
        model: such as :meth:`Result.shared_model() <fedmtl.Result.shared_model>`, or one read from ``public/``.
        data: the new clients' data.
        finetune: how; None for the defaults of :class:`~fedmtl.Finetune`. Only the given model can be started from.
        loss, seed, device, dtype, execution: as of :class:`~fedmtl.Trainer`.

    Raises:
        ConfigError: ``finetune`` starts from personal models, or holds out validation records.
        ModelError: see :func:`fedmtl.stacked.prepare_module`.
    """
    finetune = Finetune() if finetune is None else finetune
    if finetune.start == "personal" or finetune.validation:
        raise ConfigError("personalize starts from the given model: Finetune.start and validation must be left as is.")
    problem = build_problem(data, model, loss, execution or Execution(), 1, seed, device, dtype)
    with closing(problem.executor), operation_threads(problem.clients * problem.dimension):
        everyone = torch.arange(problem.clients)
        models = finetune.train(problem, problem.initial, everyone)
        own, shared = evaluate_rows(problem, models, everyone, "test"), evaluate_shared(problem, problem.initial)
    ids = data.ids
    return NewClients(ids, models, own.by_client(ids), shared.by_client(ids), metric_name(problem), problem.module)
