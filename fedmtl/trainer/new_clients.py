"""Clients that join after a run: personal models from what was released and from their own data."""

from __future__ import annotations

import copy
import difflib
from collections.abc import Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, fields, replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from .._check import id_of
from .._rounding import number_text
from ..algorithms.base import Algorithm
from ..algorithms.finetune import Finetune, settled
from ..data import FederatedDataset
from ..errors import ConfigError
from ..local import Execution, operation_threads
from ..stacked import Layout
from ..stacked.losses import Loss
from .evaluation import evaluate_rows, evaluate_shared, metric_name, try_metrics
from .inputs import a_kind, as_data
from .metrics import REGISTRY, Metric, MetricFunction, resolve_metrics, usual_metrics
from .problem import build_problem, coded_for
from .summary import ByClient, Stage, beside, score_lines, spread_of

if TYPE_CHECKING:
    from .trainer import Trainer

NOTHING_SENT = (
    "nothing was sent: these models cost no epsilon. What the clients of the run may lose is bounded by the epsilon of "
    "the released model; of the new clients nobody learns anything while their models and scores stay with them"
)


@dataclass(frozen=True)
class Terms:
    """The settings of a run by which new clients make models of their own.

    Attributes:
        algorithm: of the run.
        loss, finetune, metrics, seed, dtype, trainable: as of :class:`~fedmtl.Trainer`.
    """

    algorithm: Algorithm
    loss: str | Loss
    finetune: Finetune | None
    metrics: tuple[str | MetricFunction, ...]
    seed: int
    dtype: str
    trainable: Sequence[str] | None = None

    @classmethod
    def of(cls, settings: Trainer) -> Terms:
        """Return the terms of a run with these settings."""
        values = {one.name: getattr(settings, one.name) for one in fields(cls)}
        return cls(**values | {"metrics": tuple(settings.metrics)})

    def coded(self, data: FederatedDataset) -> FederatedDataset:
        """Return the data as the run's loss takes them, see :func:`~fedmtl.trainer.problem.coded_for`."""
        return coded_for(data, self.algorithm, self.loss)

    def settings(self) -> Finetune:
        """Return how new clients finetune: as those of the run, from the released model and without a choice; where
        they did not, as :class:`~fedmtl.Finetune` does with the algorithm's local solver."""
        if self.finetune is not None:
            return replace(self.finetune, start="auto", validation=0.0)
        return Finetune() if self.algorithm.local is None else Finetune(local=self.algorithm.local)


@dataclass(frozen=True)
class NewClients:
    """Personal models of clients that took no part in a run.

    Attributes:
        ids: of the clients.
        personal: (k, D).
        by_client, shared_by_client: scores by metric and client id, of their own models and of the model they started
            from, without the clients for which a metric is not defined; not private.
        metric: the main one, ``"accuracy"``, ``"mse"`` or ``"recall_at_5"``.
        module: the network.
        finetune: how the models were made.
        asked: the metrics that were asked for.
        data_name: of the data.
        diverged: ids of the clients whose finetuning did: they keep the model that they started from, and are in no
            comparison.
    """

    ids: tuple[str, ...]
    personal: Tensor
    by_client: ByClient
    shared_by_client: ByClient
    metric: str
    module: nn.Module
    finetune: Finetune
    asked: tuple[Metric, ...] = ()
    data_name: str = "data"
    diverged: tuple[str, ...] = ()

    def __repr__(self) -> str:
        metrics = ", ".join(f"{name} {number_text(value)}" for name, value in self.metrics.items())
        return f"NewClients: {len(self.ids):,} clients of {self.data_name}\n  not private: {metrics}"

    @property
    def metrics(self) -> dict[str, float]:
        """Mean over clients of every metric of their own models; those that were asked for, the loss, the main one."""
        found = {name: list(scores.values()) for name, scores in self.by_client.items()}
        return {name: sum(values) / len(values) if values else float("nan") for name, values in found.items()}

    @property
    def personal_accuracy(self) -> dict[str, float]:
        """The main metric of each client's own model, by id."""
        return dict(self.by_client[self.metric])

    @property
    def shared_accuracy(self) -> dict[str, float]:
        """The main metric of the model that they started from, by id."""
        return dict(self.shared_by_client[self.metric])

    @property
    def shown(self) -> tuple[Metric, ...]:
        """The main metric, and those that were asked for."""
        return (REGISTRY[self.metric], *(one for one in self.asked if one.name != self.metric))

    def numbers(self) -> dict[str, object]:
        """The summary's numbers, as plain values."""
        values: dict[str, object] = {"data": self.data_name, "clients": len(self.ids), "metric": self.metric}
        values |= {"finetune": self.finetune.kind, "finetuning_diverged": len(self.diverged)}
        values |= {"metrics": [metric.name for metric in self.shown]}
        for metric in self.shown:
            own, before = self.by_client[metric.name], self.shared_by_client[metric.name]
            found, started = spread_of(own, metric), spread_of(before, metric)
            values |= {metric.name: found.pop("mean"), f"global_{metric.name}": started["mean"]}
            values |= {f"{metric.name}_{key}": value for key, value in found.items()}
            names = (f"{metric.name}_{name}" for name in ("better", "equal", "worse"))
            compared = beside(*self._stages, metric, self.personal.dtype)
            values |= dict(zip(names, compared or (), strict=compared is not None))
        return values

    @property
    def _stages(self) -> tuple[Stage, Stage]:
        return Stage("finetuned", self.by_client, diverged=self.diverged), Stage("released", self.shared_by_client)

    def summary(self) -> str:
        """The printed summary: scores with the released model and with their own, and what it costs."""
        head = f"{len(self.ids):,} new clients of {self.data_name}"
        stages = self._stages
        scores = score_lines(stages, self.shown, len(self.ids), self.personal.dtype, stages[1])
        lines = [head, "", "not private (computed on the new clients' test data)", *scores]
        return "\n".join([*lines, f"  finetuning: {self.finetune.text()}, from the released model", "", NOTHING_SENT])

    def model_for(self, client: str | int) -> nn.Module:
        """Return a client's personal model, in evaluation mode.

        Raises:
            ConfigError: no client of that id.
        """
        row = self.personal[place_of(client, self.ids)]
        module = copy.deepcopy(self.module).to(device=row.device, dtype=row.dtype)
        return Layout.of(module).load(module, row).eval()


def place_of(client: str | int, ids: Sequence[str]) -> int:
    """Return the place of a client; a whole number stands for the text of its id.

    Raises:
        ConfigError: no client of that id.
    """
    if (name := id_of(client)) in ids:
        return ids.index(name)
    close = difflib.get_close_matches(str(client), ids[:10_000], n=1)  # of a million it would take minutes
    hint = f"did you mean {close[0]!r}? " if close else ""
    raise ConfigError(f"There is no client {client!r}; {hint}the {len(ids):,} clients are {ids[0]!r} .. {ids[-1]!r}.")


def personalize(
    model: nn.Module,
    data: FederatedDataset | str | Mapping[str, Any],
    *,
    finetune: Finetune | None = None,
    trainable: Sequence[str] | None = None,
    loss: str | Loss = "auto",
    metrics: Sequence[str | MetricFunction] = (),
    seed: int = 0,
    device: str = "auto",
    dtype: str = "float32",
    execution: Execution | None = None,
) -> NewClients:
    """Return personal models of new clients, by finetuning a released model on each one's own training records.

    Nothing is sent: the new clients' data cost no epsilon as long as their models stay with them, and those of the
    clients of the run are covered by the epsilon of the released model. Beside a :class:`~fedmtl.Result` use
    :meth:`~fedmtl.Result.adapt`, which has the settings of the run.

    Args:
        model: such as :meth:`Result.shared_model() <fedmtl.Result.shared_model>`, or one read from ``public/``.
        data: the new clients' data, as of :class:`~fedmtl.Trainer`.
        finetune: how; None for the defaults of :class:`~fedmtl.Finetune`. Only the given model can be started from.
        trainable: names of the parameters that are trained, as of :class:`~fedmtl.Trainer`; a model that came from
            a result remembers its own, with None.
        loss, metrics, seed, device, dtype, execution: as of :class:`~fedmtl.Trainer`.

    Raises:
        ConfigError: ``finetune`` starts from personal models, or holds out validation records; impossible ``metrics``.
        ModelError: see :func:`fedmtl.stacked.prepare_module`.
    """
    data = as_data(data)
    if not isinstance(model, nn.Module):
        raise ConfigError(f"model is {a_kind(model)}; give the released module, such as result.shared_model().")
    if not isinstance(finetune, Finetune | None):
        raise ConfigError(f"finetune is {finetune!r}; give Finetune(...) or None.")
    finetune = Finetune() if finetune is None else finetune
    if finetune.start == "personal" or finetune.validation:
        raise ConfigError("new clients start from the given model: Finetune.start and validation must be left as is.")
    asked = resolve_metrics(metrics, data.spec, data.name)
    further = tuple(one for one in asked if one.name not in usual_metrics(data.spec))
    execution = Execution() if execution is None else execution
    problem = build_problem(data, model, loss, execution, 1, seed, device, dtype, trainable=trainable)
    with closing(problem.executor), operation_threads(problem.clients * problem.dimension):
        finetune.check(problem)
        try_metrics(problem, further)
        everyone = torch.arange(problem.clients)
        models, apart = settled(finetune.reach(problem, problem.initial, everyone), problem.initial)
        own = evaluate_rows(problem, models, everyone, "test", further)
        shared = evaluate_shared(problem, problem.initial, "test", further)
    by_client = own.by_client(problem)
    lost = {data.ids[place] for place in apart.nonzero()[:, 0].tolist()} | Stage("", by_client).left_out
    return NewClients(
        ids=data.ids,
        personal=models,
        by_client=by_client,
        shared_by_client=shared.by_client(problem),
        metric=metric_name(problem),
        module=problem.module,
        finetune=finetune,
        asked=asked,
        data_name=data.name,
        diverged=tuple(name for name in data.ids if name in lost),
    )


def adapt(
    model: nn.Module,
    data: FederatedDataset | str | Mapping[str, Any],
    terms: Terms | None,
    finetune: Finetune | None,
    device: str,
) -> NewClients:
    """Return personal models of new clients, by the settings of a run.

    Args:
        model: the released one.
        data: of the new clients.
        terms: of the run.
        finetune: in place of that of the run.
        device: as of :class:`~fedmtl.Trainer`.

    Raises:
        ConfigError: no settings, an algorithm with a loss of its own, or see :func:`personalize`.
        ModelError: data that the model does not take.
    """
    if terms is None:
        raise ConfigError(
            "this result does not know the settings of its run; use personalize(model, data, ...), or where its "
            "algorithm is your own Result.load(folder, trust=[MODULE])."
        )
    if terms.algorithm.loss is not None:
        raise ConfigError(
            f"new clients finetune with the loss of the run, but {terms.algorithm.name} has a loss of its own; use "
            "personalize(model, data, loss=...)."
        )
    return personalize(
        model,
        terms.coded(as_data(data)),
        finetune=terms.settings() if finetune is None else finetune,
        loss=terms.loss,
        metrics=terms.metrics,
        seed=terms.seed,
        device=device,
        dtype=terms.dtype,
    )
