"""Personal models after a run: finetuning of the clients of the run, and new clients that start
from its model."""

from __future__ import annotations

import dataclasses
import logging
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar

import torch
from torch import Tensor, nn

from ..algorithms.base import Algorithm, Problem, State
from ..algorithms.client_batch import ClientBatch, ClientStates
from ..algorithms.client_losses import own_losses
from ..algorithms.finetune import Finetune, Personalization, settled, usual_of_linear_numbers
from ..algorithms.linear.data import check_linear, is_linear
from ..algorithms.local_only import Local
from ..algorithms.rounds import RoundAlgorithm
from ..data import FederatedDataset, RowBound
from ..data.examples import cut
from ..data.readers.schema import TableSchema
from ..errors import DataError, ModelError
from ..local.losses import Loss, half_mse, is_of_numbers, mse
from ..privacy import Privacy, RecordPrivacy
from ..ranks import noticed
from .baselines import has_tuned_local
from .comparison import Stage, beside
from .evaluation import Metrics, evaluate_each
from .metrics import REGISTRY, Metric
from .scored_models import Finetuned, ScoredModels

if TYPE_CHECKING:
    from .trainer import Trainer

logger = logging.getLogger("fedmtl")
Models = TypeVar("Models", bound=ScoredModels)

CLIENT_LEVEL = (
    "the finetuned models: every client makes its own from what was released and from its own "
    "data, and sends nothing, so they cost no epsilon; it covers them as long as each stays with "
    "its client (private/ folder)"
)
RECORD_LEVEL = (
    "the finetuned models: every client trains its own on its records without noise and sends "
    "nothing, so nothing is charged; whoever else gets one is outside (private/ folder)"
)
_HOLD_OUT_SEED = 1 << 40  # of the validation records: other draws than those of any test split


def held_out(
    data: FederatedDataset, finetune: Personalization | None
) -> tuple[FederatedDataset, FederatedDataset | None]:
    """Returns the data to train on, and the validation data of a choice between models.

    The split of a client depends only on its own id and number of records; one with a single record
    trains on it.

    Args:
        data: of the run.
        finetune: the settings; None for no finetuning.

    Returns:
        The data without the validation records, and the data with these as test side; None if no
        client chooses.
    """
    if finetune is None or not finetune.validation:
        return data, None
    # Test records stay unseen: a choice on them would make the scores of the run too good.
    where = f"{data.name} (validation)"
    fit, validation = cut(
        data.train, data.ids, test_fraction=finetune.validation, seed=_HOLD_OUT_SEED, where=where
    )
    return replace(data, train=fit, verify=False), replace(
        data, train=fit, test=validation, verify=False
    )


def usual_finetuning(finetune: Personalization, problem: Problem) -> Personalization:
    """Returns the finetuning that kind ``"auto"`` stands for; others as they are.

    Classes are pulled to the start by a divergence of predictions, numbers by the distance of
    weights, and linear models of real targets have the method that is registered for them.
    """
    if not isinstance(finetune, Finetune) or finetune.kind != "auto":
        return finetune
    of_numbers = is_of_numbers(problem.loss)
    if problem.loss not in (mse, half_mse) and not of_numbers:
        return replace(finetune, kind="kl")
    # A divergence needs classes. The method of linear models needs squared errors and no choice.
    pulled = replace(finetune, kind="mean")
    usual = usual_of_linear_numbers()
    if usual is None or finetune.start == "personal" or finetune.validation or of_numbers:
        return pulled
    try:
        check_linear(problem)
    except ModelError:
        return pulled
    return usual()


def finetuned(
    trained: Models,
    problem: Problem,
    finetune: Personalization,
    *,
    name: str,
    validation: FederatedDataset | None = None,
    metrics: Sequence[Metric] = (),
) -> tuple[Models, Metrics]:
    """Finetunes personal models and scores them.

    Args:
        trained: the models before.
        problem: the data, with the records that clients train on.
        finetune: the settings.
        name: of the method whose models are finetuned, for warnings.
        validation: the data with validation records as test side; None if clients do not choose.
        metrics: to measure beside the usual ones.

    Returns:
        ``trained`` with the finetuned models and their scores, and the scores as tensors.

    Raises:
        ConfigError: ``start="shared"`` and no shared model.
    """
    origin, start = finetune.origin(trained.shared, trained.personal)
    ids = problem.data.ids
    everyone = torch.arange(problem.clients)
    models = {"personal": trained.personal}
    scores = dict(trained.scores)

    def scored(name: str, rows: Tensor) -> Metrics:
        measured = evaluate_each(problem, partial(rows_at, rows), everyone, metrics)
        scores[name] = measured.by_client(problem)
        return measured

    if trained.shared is not None:
        models = {"shared": trained.shared.expand(problem.clients, -1)} | models
    with noticed(f"{name}: finetuning {problem.clients:,} clients, {finetune.text()}"):
        reached = problem.spread(
            lambda own: finetune.personalized(problem, rows_at(start, own), own), everyone
        )
    # A client's row is its model, and behind it the weights of the models that it averaged.
    reached, weights = reached.split([problem.dimension, len(finetune.parts)], 1)
    models["finetuned"], diverging = settled(reached, start)
    final = models["finetuned"]
    chosen = dict[str, str]()
    measured = scored("finetuned", final)
    if validation is not None:
        assert isinstance(finetune, Finetune)  # no other one has a choice
        # The third candidate owes nothing to the run: a client that sharing harms can leave.
        local = replace(finetune, kind="vanilla")
        models["local"] = problem.spread(
            lambda own: local.train(problem, problem.initial, own), everyone
        )
        scored("local", models["local"])
        final, chosen = _chosen(problem, models, validation)
        measured = scored("chosen", final)
    lost = {ids[place] for place in diverging.nonzero()[:, 0].cpu().tolist()} | Stage(
        "", scores["finetuned"]
    ).left_out
    diverged = tuple(client for client in ids if client in lost)
    if diverged and problem.ranks.first:
        text = "%s: finetuning diverged for %d of %d clients, who keep the %s model; "
        text += "a smaller learning rate (finetune.local.lr) may help"
        logger.warning(text, name, len(diverged), len(ids), origin)
    before = Stage(
        origin, scores[origin], diverged=trained.untrained if origin == "personal" else ()
    )
    after = Stage("finetuned", list(scores.values())[-1], diverged=diverged)
    compared = beside(after, before, REGISTRY[trained.metric], final.dtype) or (math.nan,) * 3
    shares = dict(zip(finetune.parts, weights.double().mean(0).tolist(), strict=True))
    summary = Finetuned(finetune, origin, chosen, *compared, diverged, shares)
    return replace(trained, personal=final, scores=scores, finetuned=summary), measured


def rows_at(models: Tensor, clients: Tensor) -> Tensor:
    """Returns the models of ``clients``, int64 (k,), of (n, D); one (D,) for all as it is."""
    if models.dim() == 1:
        return models
    return models[clients.to(models.device)]


def _chosen(
    problem: Problem, models: Mapping[str, Tensor], validation: FederatedDataset
) -> tuple[Tensor, dict[str, str]]:
    """Returns each client's model of the least mean loss on its own validation records, (n, D),
    and the name of that model by client.

    A client without such records keeps the finetuned model.
    """
    everyone = torch.arange(problem.clients)
    # The first of equal losses is taken, and a client without records has none.
    names = ["finetuned", *(n for n in models if n != "finetuned")]
    judged = replace(problem, data=validation)

    def losses_of(rows: Tensor) -> Tensor:
        return judged.spread(
            lambda own: own_losses(judged, rows_at(rows, own), own, "test"), everyone
        )

    losses = torch.stack([losses_of(models[name]) for name in names])
    best = losses.nan_to_num(nan=torch.inf).argmin(0)
    place = best.to(models["finetuned"].device)
    rows = models["finetuned"].clone()
    for number, name in enumerate(names):
        rows[place == number] = models[name][place == number]
    return rows, {
        client: names[k] for client, k in zip(problem.data.ids, best.tolist(), strict=True)
    }


NOTHING_SENT = (
    "nothing was sent: these models cost no epsilon. What the clients of the run may lose is "
    "bounded by the epsilon of the released model; of the new clients nobody learns anything while "
    "their models and scores stay with them"
)


def not_covered(algorithm: Algorithm, privacy: Privacy | None) -> tuple[str, ...]:
    """Returns the sentence of the report on the models that are finetuned after the run; none
    without privacy.

    Models of new clients have one also without privacy of their own: they start from a model that
    an earlier run has released.
    """
    if isinstance(algorithm, ReleasedModel):
        return (NOTHING_SENT,)
    if privacy is None:
        return ()
    if isinstance(privacy, RecordPrivacy):
        return (RECORD_LEVEL,)
    return (CLIENT_LEVEL,)


def adaptation_of(settings: Trainer) -> dict[str, Any] | None:
    """Returns the arguments of :func:`personalize` for new clients of a run; None if the algorithm
    has a loss of its own.

    They leave out a choice on validation records, and have the local solver of the algorithm, for
    a run that did not finetune.
    """
    algorithm = settings.algorithm
    finetune = settings.finetune
    if algorithm.loss is not None:
        return None
    values = {name: getattr(settings, name) for name in ("loss", "seed", "dtype")}
    if finetune is not None:
        finetune = finetune.of_new_clients()
    return {
        "finetune": finetune,
        "local": algorithm.local,
        "metrics": tuple(settings.metrics),
        **values,
    }


@dataclass(frozen=True)
class ReleasedModel(RoundAlgorithm):
    """The released model for everybody: nothing is trained before the clients finetune, and nothing
    leaves them.

    Args:
        bound: on the features of a record, which the model was trained with; None for no bound.
    """

    bound: RowBound | None = None

    name = "released"
    title = "Released model"
    accepts_empty_clients = True

    def row_bound(self, problem: Problem) -> RowBound | None:
        return self.bound

    def init(self, problem: Problem, replicates: int = 1) -> State:
        return State({"model": problem.initial}, problem.client_store({}))

    def client_update(self, c: ClientBatch) -> tuple[dict[str, Tensor], ClientStates]:
        return {}, c.states

    def personal_models(self, c: ClientBatch) -> Tensor:
        return c.public["model"].expand(len(c.clients), -1)

    def shared(self, state: State) -> Tensor:
        return state.public["model"]


def check_columns(old: TableSchema | None, new: TableSchema | None, name: str) -> None:
    """Refuses a table of new clients whose columns become other features, or another target, than
    those of the run.

    Args:
        old: of the table of the run; None of other data.
        new: of the table of the new clients; None of other data.
        name: of that table.

    Raises:
        DataError: the first column that differs, with both codings.
    """
    if old is None or new is None:  # data that are no table have no names to compare
        return
    names = [[column.name for column in schema.columns] for schema in (old, new)]
    remedy = (
        "; give data.features, data.bounds and data.labels of the run, which fedmtl adapt RUN FILE "
        "keeps"
    )
    if names[0] != names[1]:
        first, second = (", ".join(map(repr, each)) for each in names)
        raise DataError(
            f"{name}: the features are {second}, and those of the run {first}, in this "
            f"order{remedy}."
        )
    for one, other in zip(old.columns, new.columns, strict=True):
        if one != other:
            differing = _differing(one, other)
            raise DataError(f"{name}: the column {one.name!r} has {differing}{remedy}.")
    # Two tables may differ in their columns of clients, and in the origin of the ranges.
    targets = [
        replace(schema, columns=(), target="", client=None, form=None, declared=True)
        for schema in (old, new)
    ]
    if targets[0] != targets[1]:
        raise DataError(f"{name}: the target {new.target!r} has {_differing(*targets)}{remedy}.")


def _differing(old: Any, new: Any) -> str:
    """Returns in words the first field in which two dataclasses differ: its value now, and in the
    run."""
    fields = [field.name for field in dataclasses.fields(old)]
    field = next(name for name in fields if getattr(old, name) != getattr(new, name))
    values = [getattr(each, field) for each in (new, old)]
    texts = ["none" if value in (None, ()) else str(value) for value in values]
    return f"{field.replace('_', ' ')} {texts[0]}, in the run {texts[1]}"


@dataclass(frozen=True)
class FromZero(Local):
    """Local training of every client from zero parameters, in place of the given model. Nothing
    leaves a client."""

    def client_update(self, c: ClientBatch) -> tuple[dict[str, Tensor], ClientStates]:
        return {}, c.states

    def personal_models(self, c: ClientBatch) -> Tensor:
        return c.train(self.local, torch.zeros_like(c.initial))


def alone(
    model: nn.Module,
    data: FederatedDataset,
    finetune: Personalization,
    loss: str | Loss,
    trainable: Sequence[str] | None,
) -> tuple[Algorithm, ...]:
    """Returns the baseline ``local`` of new clients, which does not know the released model.

    With a linear model of a real target, or of classes of a table, it is that of the registered
    method, and else that of the finetuning, if it has one; of classes of other data it is local
    training from zero by the solver of the finetuning. There is none with a
    network, whose own training would need a starting point that is not the released model, with a
    loss of the caller's own, with parameters that are frozen, or beside clients without training
    records.

    Args:
        model: the released one.
        data: of the new clients.
        finetune: of the new clients.
        loss: that they minimize.
        trainable: names of the parameters that are trained; None for all.
    """
    # From zero, frozen parameters would be another model than the one that is compared.
    frozen = trainable is not None or not all(
        parameter.requires_grad for parameter in model.parameters()
    )
    several = data.train.y.ndim > 1
    if frozen or several or not isinstance(loss, str) or not bool((data.train.counts > 0).all()):
        return ()
    if not is_linear(model, data):
        return ()
    usual = usual_of_linear_numbers()
    if usual is not None and has_tuned_local(data, loss):
        local = usual.alone()
    else:
        local = finetune.alone()
    if local is not None:
        return (local,)
    if isinstance(finetune, Finetune):
        return (FromZero(local=finetune.local),)
    return ()
