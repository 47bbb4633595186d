"""Finetuning after a run: what it makes of the personal models, how they score, and why it costs nothing."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from ..algorithms.base import Algorithm, Problem
from ..algorithms.finetune import Finetune
from ..algorithms.losses import own_losses
from ..data import FederatedDataset
from ..data.examples import cut
from ..errors import ConfigError
from ..privacy import Privacy, RecordPrivacy
from .evaluation import Metrics, evaluate_rows
from .metrics import REGISTRY, Metric
from .replicates import numbers_of
from .result import Result
from .summary import ByClient, beside, percent

CLIENT_LEVEL = (
    "the finetuned models: every client makes its own from what was released and from its own data, and sends nothing, "
    "so they cost no epsilon; it covers them as long as each stays with its client (private/ folder)"
)
RECORD_LEVEL = (
    "the finetuned models: every client trains its own on its records without noise and sends nothing, so nothing is "
    "charged; whoever else gets one is outside (private/ folder)"
)
_HOLD_OUT_SEED = 1 << 40  # of the validation records: other draws than those of any test split


@dataclass(frozen=True)
class Finetuned:
    """What finetuning made of a run, by client id. All of it is computed on private data.

    Attributes:
        settings: of the finetuning.
        start: ``"shared"`` or ``"personal"``, the model that every client started from.
        metric: the main metric.
        by_client: scores of each client's ``"shared"`` (where there is one), ``"personal"`` and ``"finetuned"`` model,
            and ``"local"`` where clients chose, each by metric and client.
        chosen: name of the model that each client chose; empty where they did not choose.
        better, equal, worse: shares of the clients whose final model scores better than, as, or worse than the model
            that finetuning started from.
    """

    settings: Finetune
    start: str
    metric: str
    by_client: Mapping[str, ByClient]
    chosen: Mapping[str, str]
    better: float
    equal: float
    worse: float

    @property
    def scores(self) -> dict[str, Mapping[str, float]]:
        """The main metric of every model, by client."""
        return {name: scores[self.metric] for name, scores in self.by_client.items()}

    def numbers(self) -> dict[str, Any]:
        """Plain values for tables."""
        found: dict[str, Any] = {
            "finetune": self.settings.kind,
            "finetuned_from": self.start,
            "better": self.better,
            "equal": self.equal,
            "worse": self.worse,
        }
        names = [name for name in self.scores if any(name == one for one in self.chosen.values())]
        for name in names:
            found[f"chose_{name}"] = sum(one == name for one in self.chosen.values()) / len(self.chosen)
        return found

    def lines(self) -> list[str]:
        """The lines of the summary."""
        three = percent((self.better, self.equal, self.worse))
        found = [
            f"  finetuning: {self.settings.text()}, from the {self.start} model",
            f"    better/equal/worse than the {self.start} model for {three} % of the clients",
        ]
        if self.chosen:
            shares = ", ".join(
                f"{key.removeprefix('chose_')} {share:.0%}"
                for key, share in self.numbers().items()
                if key.startswith("chose_")
            )
            found.append(f"  chosen by each client on its own validation records: {shares}")
        return found


def check_finetune(finetune: Finetune | None, algorithm: Algorithm, repetitions: int) -> None:
    """Refuse what cannot be finetuned.

    Raises:
        ConfigError: an algorithm with a loss of its own, or several repetitions.
    """
    if finetune is None:
        return
    if not isinstance(finetune, Finetune):
        raise ConfigError(f"finetune is {finetune!r}; give Finetune(...) or None.")
    if algorithm.loss is not None:
        raise ConfigError(
            f"finetune goes on with the loss of the run, but {algorithm.name} has a loss of its own; use finetune=none."
        )
    if repetitions > 1:
        raise ConfigError("finetune takes a single run; use finetune=none with replicates or epsilons.")


def held_out(data: FederatedDataset, finetune: Finetune | None) -> tuple[FederatedDataset, FederatedDataset | None]:
    """The data of the run, and those with the clients' validation records as test side, where they choose.

    The split of a client depends on its own id and number of records alone; one with a single record trains on it.
    """
    if finetune is None or not finetune.validation:
        return data, None
    train = data.train
    fit, validation = cut(
        train.x,
        train.y,
        train.offsets,
        data.ids,
        test_fraction=finetune.validation,
        seed=_HOLD_OUT_SEED,
        where=f"{data.name} (validation)",
    )
    return replace(data, train=fit, verify=False), replace(data, train=fit, test=validation, verify=False)


def finetuned(
    result: Result,
    problem: Problem,
    finetune: Finetune,
    validation: FederatedDataset | None,
    privacy: Privacy | None,
    metrics: Sequence[Metric] = (),
) -> Result:
    """The result with finetuned personal models.

    Args:
        result: of the run.
        problem: its data, with the records that clients train on.
        finetune: the settings.
        validation: the data with validation records as test side, where clients choose.
        privacy: of the run; says why nothing is charged.
        metrics: to measure beside the usual ones.

    Raises:
        ConfigError: ``start="shared"`` and no shared model.
    """
    origin, start = finetune.origin(result.shared, result.personal)
    everyone = torch.arange(problem.clients)
    models = {"personal": result.personal}
    if result.shared is not None:
        models = {"shared": result.shared.expand(problem.clients, -1)} | models
    models["finetuned"] = finetune.train(problem, start, everyone)
    scores: dict[str, ByClient] = {"personal": result.by_client}
    if result.shared_by_client is not None:
        scores = {"shared": result.shared_by_client} | scores
    final = models["finetuned"]
    chosen: dict[str, str] = {}
    if validation is not None:
        local = replace(finetune, kind="vanilla")
        models["local"] = local.train(problem, problem.initial, everyone)
        final, chosen = _chosen(problem, models, validation)
    measured = {"finetuned": evaluate_rows(problem, models["finetuned"], everyone, "test", metrics)}
    if validation is not None:
        measured["local"] = evaluate_rows(problem, models["local"], everyone, "test", metrics)
    scores |= {name: found.by_client(problem) for name, found in measured.items()}
    found = measured["finetuned"] if validation is None else evaluate_rows(problem, final, everyone, "test", metrics)
    metric = result.metric
    better, equal, worse = beside(found.by_client(problem)[metric], scores[origin][metric], REGISTRY[metric])
    summary = Finetuned(finetune, origin, metric, scores, chosen, better, equal, worse)
    return replace(
        result,
        personal=final,
        by_client=found.by_client(problem),
        final=_final(result, problem, found),
        finetuned=summary,
        privacy=replace(result.privacy, outside=(*result.privacy.outside, *_why(privacy))),
    )


def _final(result: Result, problem: Problem, found: Metrics) -> dict[str, Any]:
    """The last row of the history with the numbers of the final models; those before keep their names behind
    ``trained_``."""
    numbers = numbers_of(problem, found)
    before = {f"trained_{name}": result.final[name] for name in numbers if name in result.final}
    return result.final | numbers | before


def _chosen(
    problem: Problem, models: Mapping[str, Tensor], validation: FederatedDataset
) -> tuple[Tensor, dict[str, str]]:
    """Each client's model of the least mean loss on its own validation records, the finetuned one without any."""
    everyone, names = torch.arange(problem.clients), ["finetuned", *(n for n in models if n != "finetuned")]
    judged = replace(problem, data=validation)
    losses = torch.stack([own_losses(judged, models[name], everyone, "test") for name in names])
    best = losses.nan_to_num(nan=torch.inf).argmin(0)
    place = best.to(models["finetuned"].device)
    rows = models["finetuned"].clone()
    for number, name in enumerate(names):
        rows[place == number] = models[name][place == number]
    return rows, {client: names[k] for client, k in zip(problem.data.ids, best.tolist(), strict=True)}


def _why(privacy: Privacy | None) -> tuple[str, ...]:
    if privacy is None:
        return ()
    return (RECORD_LEVEL,) if isinstance(privacy, RecordPrivacy) else (CLIENT_LEVEL,)
