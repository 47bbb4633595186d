"""Makes the :class:`~fedmtl.algorithms.Problem` of a run from its settings."""

from __future__ import annotations

import copy
import logging
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn

from ..algorithms.base import Problem
from ..algorithms.linear.data import TWO_CLASS_LOSSES
from ..data import FederatedDataset, RowBound
from ..data.examples import Side
from ..data.transforms import Cast, Integers
from ..errors import ConfigError, ModelError
from ..local import (
    Execution,
    Layout,
    prepare_module,
    resolve_loss,
)
from ..local.executor import available_cores, resolve_device
from ..local.losses import Loss, binary_cross_entropy, is_of_numbers, name_of
from ..local.trials import build_executor, placed
from ..models import ModelFactory
from ..models.build import build_module, with_inputs
from ..ranks import SINGLE, Ranks

SIDES: tuple[Side, ...] = ("train", "test")
_ROWS = 1 << 16  # of one piece of the data, if all of them are looked at
logger = logging.getLogger("fedmtl")


@dataclass(frozen=True, kw_only=True)
class ProblemSettings:
    """Settings of a :class:`~fedmtl.algorithms.Problem` beside its data and its model; see the
    arguments of :class:`~fedmtl.Trainer` with the same names.

    Attributes:
        loss, execution, seed, device, dtype, trainable: as of a trainer.
        rounds: number of rounds, or of activations.
        protects_records: True if local training is DP-SGD.
    """

    loss: str | Loss = "auto"
    execution: Execution = field(default_factory=Execution)
    rounds: int
    seed: int = 0
    device: str = "cpu"
    dtype: str = "float32"
    protects_records: bool = False
    trainable: Sequence[str] | None = None


def build_problem(
    data: FederatedDataset,
    model: nn.Module | ModelFactory,
    settings: ProblemSettings,
    ranks: Ranks = SINGLE,
) -> Problem:
    """Returns the problem of a run: the model is built, checked against the data's public shape,
    and everything is on the device.

    Args:
        data: of all clients.
        model: a module, or a factory of one.
        settings: the loss, the execution and the rest.
        ranks: the processes that compute it; every client belongs to one of them.

    Raises:
        ConfigError: an unknown device, a loss that does not fit the targets, or names that the
            model does not have.
        ModelError: see :func:`fedmtl.local.prepare_module` and
            :func:`fedmtl.local.check_stackable`.
    """
    place = resolve_device(settings.device, ranks)
    if ranks.size > len(data):
        raise ConfigError(
            f"There are {ranks.size} ranks for the {len(data):,} clients of "
            f"{data.name}; start fewer."
        )
    _check_one_class(settings.loss, data)
    module, data = _built(model, data, settings)
    loss, template = _prepared(module, data, settings)
    executor = build_executor(
        template,
        data,
        loss,
        settings.execution,
        device=place,
        dtype=getattr(torch, settings.dtype),
        private=settings.protects_records,
        cores=max(1, available_cores() // ranks.beside),  # ranks of a machine share them
    )
    problem = Problem(
        data=placed(data, place),
        module=template,
        initial=Layout.of(template).flatten(template).to(place),
        loss=resolve_loss(loss, mapped=data.target_range is not None),
        executor=executor,
        rounds=settings.rounds,
        seed=settings.seed,
        protects_records=settings.protects_records,
    )
    return problem.over(ranks)


def _check_one_class(loss: str | Loss, data: FederatedDataset) -> None:
    """Refuses cross-entropy of targets that are not one class an example."""
    if loss != "cross_entropy" or (data.classes is not None and not data.spec.labels):
        return
    fits = "real numbers; use loss='mse'"
    if data.classes is not None:
        fits = f"{data.spec.labels} labels; use loss='binary_cross_entropy'"
    raise ConfigError(
        f"loss is 'cross_entropy', which takes one class an example, but the targets are {fits}."
    )


def _built(
    model: nn.Module | ModelFactory, data: FederatedDataset, settings: ProblemSettings
) -> tuple[nn.Module, FederatedDataset]:
    """Returns the module as it was built, and the data with the whole numbers that its embeddings
    look up."""
    model = with_inputs(model, data.spec)
    module = build_module(model, data.spec, settings.seed)
    if any(isinstance(child, (nn.Embedding, nn.EmbeddingBag)) for child in module.modules()):
        data = _kept_whole(data, module, getattr(torch, settings.dtype))
        _check_lookups(data, module)
    return module, data


def _prepared(
    module: nn.Module, data: FederatedDataset, settings: ProblemSettings
) -> tuple[str | Loss, nn.Module]:
    """Returns the loss, with ``"auto"`` chosen, and the module as it is trained."""
    dtype = getattr(torch, settings.dtype)
    sample = data.spec.sample(2, dtype)
    loss = settings.loss
    if loss == "auto":
        loss = natural_loss(data, module, sample, dtype)
    outputs = None  # a loss of real targets, or of the caller's own, checks the outputs itself
    if loss == "cross_entropy" or data.spec.labels > 0:
        outputs = data.spec.outputs
    template = prepare_module(
        module,
        sample,
        seed=settings.seed,
        outputs=outputs,
        dtype=dtype,
        trainable=settings.trainable,
    )
    if loss in ("mse", "half_mse", "binary_cross_entropy") or is_of_numbers(loss):
        _check_loss(loss, template, sample, data)
    return loss, template


def _kept_whole(data: FederatedDataset, module: nn.Module, dtype: torch.dtype) -> FederatedDataset:
    """Returns the data with their whole numbers as they are stored, if an embedding of the module
    looks them up and no transform says otherwise; otherwise the data as they are."""
    if type(data.transform) is not Cast or data.train.x.is_floating_point():
        return data
    # A module may take real numbers and have an embedding of something else, so it is tried.
    whole = replace(data, transform=Integers())
    stored, converted = (
        _tried(module, some.spec.sample(2, dtype), dtype) for some in (whole, data)
    )
    if isinstance(stored, Tensor) and not isinstance(converted, Tensor):
        return whole
    return data


def _tried(module: nn.Module, x: Tensor, dtype: torch.dtype) -> Tensor | Exception:
    """Returns the outputs of a module for examples ``x`` on the CPU, or the error that it
    raises."""
    try:
        with torch.no_grad():
            outputs: Tensor = copy.deepcopy(module).to("cpu", dtype).eval()(x)
    except (IndexError, RuntimeError, TypeError, ValueError) as error:
        return error
    return outputs


def _check_loss(
    loss: str | Loss, module: nn.Module, sample: Tensor, data: FederatedDataset
) -> None:
    """Refuses a loss that compares each output of the model with a target if their numbers
    differ: the operations of torch would broadcast one over the other."""
    with torch.no_grad():
        shape = tuple(module(sample).shape[1:])
    if math.prod(shape) != math.prod(data.spec.targets):
        raise ConfigError(
            f"loss is {name_of(loss)!r}, which does not take outputs of shape {shape} with targets "
            f"of shape {data.spec.targets}; choose another loss, or a model with other outputs."
        )


def _check_lookups(data: FederatedDataset, module: nn.Module) -> None:
    """Refuses whole numbers that an embedding of the module has no row for, before the first round
    meets them.

    The module is tried on the least and the largest value at every place of an example. If it fails
    there, it is tried on all examples: it may compute the looked-up number from several places.
    """
    for side in SIDES:
        parts = list(_features(data, side, device="cpu"))
        if not parts:
            continue
        least = torch.stack([x.amin(0) for x in parts]).amin(0)
        most = torch.stack([x.amax(0) for x in parts]).amax(0)
        if not isinstance(_tried(module, torch.stack((least, most)), torch.float32), IndexError):
            continue  # another error is refused with the shape of an example, see prepare_module
        for x in parts:
            if isinstance(error := _tried(module, x, torch.float32), IndexError):
                raise ModelError(
                    f"{data.name} has numbers from {least.min():g} to {most.max():g}, and an "
                    "embedding of the model "
                    f"has no row for some of them ({error}); accepted: 0 .. num_embeddings - 1."
                )


def coded_for(data: FederatedDataset, *losses: str | Loss | None) -> FederatedDataset:
    """Returns the data with floating targets 0 and 1, or -1 and +1, as two classes, if a loss is
    logistic or a hinge; otherwise the data as they are.

    The targets decide then whether there are classes. A run with noise refuses that in any case, or
    its refusal would tell something about them.

    Args:
        data: of all clients.
        losses: of the run and of its algorithm.
    """
    logistic = ("binary_cross_entropy", binary_cross_entropy, *TWO_CLASS_LOSSES)
    if data.classes is not None or not any(loss in logistic for loss in losses):
        return data
    return replace(data.as_two_classes(), inferred=(*data.inferred, "classes"), verify=False)


def share_beyond(data: FederatedDataset, bound: RowBound) -> dict[str, float]:
    """Returns the shares of the training and of the test records that a bound on features scales
    down, by side. They are computed on the records without noise, and are not private."""
    beyond = {
        side: sum(int(bound.exceeded(x).sum()) for x in _features(data, side)) for side in SIDES
    }
    return {side: count / max(1, len(data.side(side))) for side, count in beyond.items()}


def _features(data: FederatedDataset, side: Side, **options: Any) -> Iterator[Tensor]:
    """Returns the features of all examples of a side, a piece at a time."""
    indices = torch.arange(len(data.side(side))).split(_ROWS)
    return (data.gather(side, index, **options)[0] for index in indices if len(index))


def natural_loss(
    data: FederatedDataset, module: nn.Module, sample: Tensor, dtype: torch.dtype
) -> str:
    """Returns the name of the loss ``"auto"``: squared error for real targets; for classes the
    logistic loss of one output or of several labels, otherwise cross-entropy."""
    if data.classes is None:
        return "mse"
    if data.spec.labels:
        return "binary_cross_entropy"
    if data.classes > 2:
        return "cross_entropy"
    # A module that fails here is refused later, with the shape of an example.
    outputs = _tried(module, sample, dtype)
    single = isinstance(outputs, Tensor) and outputs.shape[1:].numel() == 1
    if single:
        return "binary_cross_entropy"
    return "cross_entropy"
