"""Finetuning after a run: what it makes of the personal models, how they score, and why it costs nothing."""

from __future__ import annotations

import logging
import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from ..algorithms.base import Algorithm, Problem
from ..algorithms.finetune import Finetune, settled
from ..algorithms.losses import own_losses
from ..data import FederatedDataset
from ..data.examples import cut
from ..errors import ConfigError
from ..privacy import Privacy, RecordPrivacy
from .evaluation import Metrics, evaluate_each
from .finetuned import Finetuned
from .metrics import REGISTRY, Metric
from .replicates import numbers_of
from .result import Result
from .summary import ByClient, Stage, beside

logger = logging.getLogger("fedmtl")

CLIENT_LEVEL = (
    "the finetuned models: every client makes its own from what was released and from its own data, and sends nothing, "
    "so they cost no epsilon; it covers them as long as each stays with its client (private/ folder)"
)
RECORD_LEVEL = (
    "the finetuned models: every client trains its own on its records without noise and sends nothing, so nothing is "
    "charged; whoever else gets one is outside (private/ folder)"
)
_HOLD_OUT_SEED = 1 << 40  # of the validation records: other draws than those of any test split


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
    reached = problem.spread(lambda own: finetune.reach(problem, rows_at(start, own), own), everyone)
    models["finetuned"], apart = settled(reached, start)
    scores: dict[str, ByClient] = {"personal": result.by_client}
    if result.shared_by_client is not None:
        scores = {"shared": result.shared_by_client} | scores
    final = models["finetuned"]
    chosen: dict[str, str] = {}
    if validation is not None:
        local = replace(finetune, kind="vanilla")
        models["local"] = problem.spread(lambda own: local.train(problem, problem.initial, own), everyone)
        final, chosen = _chosen(problem, models, validation)
    measured = {"finetuned": _measured(problem, models["finetuned"], metrics)}
    if validation is not None:
        measured["local"] = _measured(problem, models["local"], metrics)
    scores |= {name: found.by_client(problem) for name, found in measured.items()}
    found = measured["finetuned"] if validation is None else _measured(problem, final, metrics)
    metric = result.metric
    ids = problem.data.ids
    lost = {ids[place] for place in apart.nonzero()[:, 0].cpu().tolist()} | Stage("", scores["finetuned"]).left_out
    diverged = tuple(name for name in ids if name in lost)
    if diverged and problem.ranks.first:
        text = "%s: finetuning diverged for %d of %d clients, who keep the %s model; a smaller learning rate may help"
        logger.warning(text, result.algorithm, len(diverged), len(ids), origin)
    after, before = Stage("finetuned", found.by_client(problem), diverged=diverged), Stage(origin, scores[origin])
    before = replace(before, diverged=result.untrained) if origin == "personal" else before
    compared = beside(after, before, REGISTRY[metric], final.dtype)
    better, equal, worse = compared or (math.nan,) * 3
    summary = Finetuned(finetune, origin, metric, scores, chosen, better, equal, worse, diverged)
    return replace(
        result,
        personal=final,
        by_client=found.by_client(problem),
        final=_final(result, problem, found),
        finetuned=summary,
        privacy=replace(result.privacy, outside=(*result.privacy.outside, *_why(privacy))),
    )


def rows_at(models: Tensor, clients: Tensor) -> Tensor:
    """The models of ``clients``, int64 (k,), of (n, D); one (D,) for all as it is."""
    return models if models.dim() == 1 else models[clients.to(models.device)]


def _measured(problem: Problem, models: Tensor, metrics: Sequence[Metric]) -> Metrics:
    return evaluate_each(problem, lambda own: rows_at(models, own), torch.arange(problem.clients), "test", metrics)


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

    def losses_of(rows: Tensor) -> Tensor:
        return judged.spread(lambda own: own_losses(judged, rows_at(rows, own), own, "test"), everyone)

    losses = torch.stack([losses_of(models[name]) for name in names])
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
