"""From settings to a :class:`~fedmtl.algorithms.Problem`, and the fingerprint of a run."""

from __future__ import annotations

import copy
import dataclasses
import functools
import hashlib
import json
import logging
import math
import types
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor, nn

from .._fingerprint import fingerprint_of
from ..algorithms.base import Problem
from ..algorithms.linear.data import TWO_CLASS_LOSSES
from ..data import FederatedDataset, RowBound
from ..data.examples import Side
from ..data.transforms import Cast, Integers, MappedImages, Packed
from ..errors import ConfigError, ModelError, first_line
from ..local import (
    Execution,
    Executor,
    Layout,
    check_behaviour,
    check_examples,
    check_stackable,
    prepare_module,
    resolve_loss,
)
from ..local.executor import available_cores
from ..local.losses import LOSSES, Loss, Poisson, binary_cross_entropy, is_of_numbers, name_of
from ..local.products import Perceptron
from ..models import ModelFactory, NamedInputs
from ..models.build import build_module
from ..models.networks import NamedFactory
from ..privacy import NoiseSource
from ..ranks import SINGLE, Ranks
from .trials import check_own_loss, trial_batches, trial_targets

if TYPE_CHECKING:
    from .trainer import Trainer

SIDES: tuple[Side, ...] = ("train", "test")
_ROWS = 1 << 16
logger = logging.getLogger("fedmtl")


def build_problem(
    data: FederatedDataset,
    model: nn.Module | ModelFactory,
    loss: str | Loss,
    execution: Execution,
    rounds: int,
    seed: int,
    device: str,
    dtype: str,
    *,
    protects_records: bool = False,
    trainable: Sequence[str] | None = None,
    ranks: Ranks = SINGLE,
) -> Problem:
    """Build the model, check it against the data's public shape, and place everything on the
    device.

    With ``protects_records`` local training is DP-SGD. ``trainable`` names the parameters that
    move, see :func:`fedmtl.local.set_trainable`. Over several ``ranks`` every client belongs to one
    of them.

    Raises:
        ConfigError: an unknown device, a loss that does not fit the targets, or names that the
            model does not have.
        ModelError: see :func:`fedmtl.local.prepare_module` and
            :func:`fedmtl.local.check_stackable`.
    """
    place = resolve_device(device, ranks)
    kind = getattr(torch, dtype)
    if ranks.size > len(data):
        raise ConfigError(
            f"There are {ranks.size} ranks for the {len(data):,} clients of "
            f"{data.name}; start fewer."
        )
    if loss == "cross_entropy" and (data.classes is None or data.spec.labels):
        labels = f"{data.spec.labels} labels; use loss='binary_cross_entropy'"
        fits = "real numbers; use loss='mse'"
        if data.classes is not None:
            fits = labels
        raise ConfigError(
            "loss is 'cross_entropy', which takes one class an example, but the "
            f"targets are {fits}."
        )
    if (
        isinstance(model, nn.Module)
        and isinstance(data.transform, Packed)
        and not isinstance(model, NamedInputs)
    ):
        model = NamedInputs(model, data.transform)
    module = build_module(model, data.spec, seed)
    if any(isinstance(child, (nn.Embedding, nn.EmbeddingBag)) for child in module.modules()):
        data = _kept_whole(data, module, kind)
        _check_lookups(data, module)
    sample = data.spec.sample(2, kind)
    if loss == "auto":
        loss = natural_loss(data, module, sample, kind)
    fixed = loss == "cross_entropy" or data.spec.labels > 0
    outputs = data.spec.outputs if fixed else None
    template = prepare_module(
        module, sample, seed=seed, outputs=outputs, dtype=kind, trainable=trainable
    )
    if loss in ("mse", "half_mse", "binary_cross_entropy") or is_of_numbers(loss):
        _check_loss(loss, template, sample, data)
    # computed by batched products
    perceptron = Perceptron.of(template, Layout.of(template)) is not None
    if not perceptron:
        check_behaviour(template, trial_batches(data.spec, kind))
    own_loss = None
    if callable(loss) and loss not in LOSSES.values():
        own_loss = loss
    targets = trial_targets(data, kind)
    if own_loss is not None:
        check_own_loss(own_loss, template, sample, targets, kind)
    cores = max(1, available_cores() // ranks.beside)  # ranks of a machine share them
    resolved = execution.resolve(template, place, cores)
    layout = Layout.of(template)
    batched = True
    try:
        if not perceptron:
            check_stackable(template, sample)
        if protects_records and (own_loss is not None or not perceptron):
            check_examples(template, sample, own_loss, targets)
    except ModelError as error:
        if execution.chunk not in (None, 1):
            raise
        batched = False
        if execution.chunk is None:
            name = type(module).__name__
            reason = first_line(error.__cause__ or error)
            logger.warning("%s: clients are computed one after another, since %s", name, reason)
        resolved = Execution(chunk=1, processes=execution.processes or cores)
    # these are read as they are needed
    if place.type != "cpu" and not isinstance(data.transform, MappedImages):
        data = data.to(place)
    executor = Executor(resolved, template, device=place, dtype=kind, batched=batched)
    problem = Problem(
        data=data,
        module=template,
        initial=layout.flatten(template).to(place),
        loss=loss_of(loss, data),
        executor=executor,
        rounds=rounds,
        seed=seed,
        protects_records=protects_records,
    )
    return problem.over(ranks)


def _kept_whole(data: FederatedDataset, module: nn.Module, dtype: torch.dtype) -> FederatedDataset:
    """The data with their whole numbers as they are stored, where an embedding of the module looks
    them up and no transform says otherwise; else the data as they are."""
    if type(data.transform) is not Cast or data.train.x.is_floating_point():
        return data
    whole = replace(data, transform=Integers())
    stored, converted = (
        _tried(module, some.spec.sample(2, dtype), dtype) for some in (whole, data)
    )
    if isinstance(stored, Tensor) and not isinstance(converted, Tensor):
        return whole
    return data


def _tried(module: nn.Module, x: Tensor, dtype: torch.dtype) -> Tensor | Exception:
    """Return the outputs of a module for examples ``x`` on the CPU, or the error that it raises."""
    try:
        with torch.no_grad():
            outputs: Tensor = copy.deepcopy(module).to("cpu", dtype).eval()(x)
    except (IndexError, RuntimeError, TypeError, ValueError) as error:
        return error
    return outputs


def _check_loss(
    loss: str | Loss, module: nn.Module, sample: Tensor, data: FederatedDataset
) -> None:
    """Refuse a loss by name that compares the outputs of the model with as many targets, where
    there are others."""
    with torch.no_grad():
        shape = tuple(module(sample).shape[1:])
    if math.prod(shape) != math.prod(data.spec.targets):
        raise ConfigError(
            f"loss is {name_of(loss)!r}, which does not take outputs of shape {shape} with targets "
            f"of shape {data.spec.targets}; choose another loss, or a model with other outputs."
        )


def loss_of(loss: str | Loss, data: FederatedDataset) -> Loss:
    """Return a loss by name, or the given one; of counts it knows whether the data have them mapped
    from a range."""
    found = resolve_loss(loss)
    if isinstance(found, Poisson):
        return replace(found, mapped=data.target_range is not None)
    return found


def _check_lookups(data: FederatedDataset, module: nn.Module) -> None:
    """Refuse whole numbers that an embedding of the module has no row for, before the first round
    meets them.

    The module is tried on the least and the largest value at every place of an example; only where
    it fails there, as it may where it computes what it looks up from several places, on all
    examples.
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
    """The data as two classes where a logistic or hinge loss, of the run or of its algorithm, has
    floating targets 0 and 1, or -1 and +1; else the data as they are. Under these losses the
    targets decide then whether there are classes, which a run with noise refuses, whatever they
    are."""
    logistic = ("binary_cross_entropy", binary_cross_entropy, *TWO_CLASS_LOSSES)
    if data.classes is not None or not any(loss in logistic for loss in losses):
        return data
    return replace(data.as_two_classes(), inferred=(*data.inferred, "classes"), verify=False)


def share_beyond(data: FederatedDataset, bound: RowBound) -> dict[str, float]:
    """The share of the training and of the test records that a bound on features scales down, by
    side; computed on the records without noise, and so not private."""
    beyond = {
        side: sum(int(bound.exceeded(x).sum()) for x in _features(data, side)) for side in SIDES
    }
    return {side: count / max(1, len(data.side(side))) for side, count in beyond.items()}


def _features(data: FederatedDataset, side: Side, **options: Any) -> Iterator[Tensor]:
    """Return the features of all examples of a side, some at a time."""
    indices = torch.arange(len(data.side(side))).split(_ROWS)
    return (data.gather(side, index, **options)[0] for index in indices if len(index))


def natural_loss(
    data: FederatedDataset, module: nn.Module, sample: Tensor, dtype: torch.dtype
) -> str:
    """Squared error for real targets; for classes the logistic loss of one output or of several
    labels, else cross-entropy."""
    if data.classes is None:
        return "mse"
    if data.spec.labels:
        return "binary_cross_entropy"
    if data.classes > 2:
        return "cross_entropy"
    # of an error the check of the module says what is wrong
    outputs = _tried(module, sample, dtype)
    single = isinstance(outputs, Tensor) and outputs.shape[1:].numel() == 1
    if single:
        return "binary_cross_entropy"
    return "cross_entropy"


def resolve_device(device: str, ranks: Ranks = SINGLE) -> torch.device:
    """``"auto"`` is the first GPU, else the CPU; of several ranks on a machine each takes the next
    GPU.

    Raises:
        ConfigError: the device does not exist here.
    """
    if device in ("auto", "cuda") and ranks.beside > 1 and torch.cuda.is_available():
        return torch.device("cuda", ranks.local % torch.cuda.device_count())
    if device == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        place = torch.device(device)
        # which clips and sums need, and mps lacks
        torch.zeros(1, dtype=torch.float64, device=place)
    except (RuntimeError, AssertionError, TypeError) as error:
        here = ["auto", "cpu", *(f"cuda:{i}" for i in range(torch.cuda.device_count()))]
        raise ConfigError(
            f"device is {device!r}, which is not available here; accepted: {', '.join(here)}."
        ) from error
    return place


ARITHMETIC = 13
"""Raised by every version whose local training or sums have other last bits for the same settings,
or whose noise has.

With the same seed two versions whose sums differ by rounding add the same noise to them, so that
their releases would jointly show that difference; two whose noise differs make two releases of one
sum. Neither are one release."""


def fingerprint(problem: Problem, settings: Trainer, coins: NoiseSource | None = None) -> str:
    """Return digests of everything the released numbers depend on: data, settings, start, seed and
    execution.

    A release repeated under the same digest is the same release; under another it would be a new
    one.
    """
    alike = problem.initial.device.type == "cpu"
    parts = {
        "data": problem.data.fingerprint(),
        "algorithm": describe(settings.algorithm),
        "privacy": describe(settings.privacy),
        "schedule": describe(settings.schedule),
        "model": repr(problem.module),
        "trainable parameters": list(zip(problem.layout.names, problem.layout.shapes, strict=True)),
        "starting point": _digest(problem.initial),
        "loss": describe(problem.loss),
        "rounds": problem.rounds,
        "seed": problem.seed,
        "execution": problem.executor.chunk,
        "threads": torch.get_num_threads(),
        "device": problem.initial.device.type,
        "dtype": str(problem.initial.dtype),
        "version of torch": torch.__version__,
        "arithmetic": ARITHMETIC,
    }
    frozen = problem.layout.frozen(problem.module)
    if frozen:
        parts["frozen parameters"] = {name: _digest(value) for name, value in frozen.items()}
    if settings.runs > 1:
        parts["replicates"] = describe((settings.replicates, settings.epsilons))
    if coins is not None:
        parts["coins"] = describe(coins)
    if settings.audit is not None:
        parts["audit"] = describe(settings.audit)
    if problem.ranks.size > 1 and not (alike and torch.get_num_threads() == 1):
        parts["ranks"] = problem.ranks.size  # numbers agree up to rounding
    return fingerprint_of(parts)


def describe(value: Any, within: tuple[Any, ...] = ()) -> Any:
    """A JSON-ready description of settings: dataclasses by class and fields, factories of
    :mod:`fedmtl.models` by function and settings, arrays by a digest, functions by their qualified
    name, the caller's own also by their code, and by the values that they are bound to or close
    over, other objects by class and attributes.

    Args:
        value: what is described.
        within: the objects whose attribute ``value`` is, directly or not; one that comes again is
            named only.
    """
    if isinstance(value, np.generic):
        value = value.item()
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        fields = {
            f.name: describe(getattr(value, f.name), within) for f in dataclasses.fields(value)
        }
        return {"class": type(value).__qualname__, **fields}
    if isinstance(value, NamedFactory):
        return {"class": value.func.__name__, **describe(value.keywords, within)}
    if isinstance(value, Mapping):
        return {str(k): describe(v, within) for k, v in value.items()}
    if isinstance(value, Sequence) and not isinstance(value, str):
        return [describe(v, within) for v in value]
    if value is None or isinstance(value, (str, int, float, bool)):
        return value
    if isinstance(value, Tensor | np.ndarray):
        return _digest(value)
    qualified = getattr(value, "__qualname__", type(value).__qualname__)
    name = f"{getattr(value, '__module__', '')}.{qualified}"
    if any(value is outer for outer in within):
        state = {}
    else:
        state = _state(value)
    if state:
        return name + json.dumps(describe(state, (*within, value)), sort_keys=True)
    return name


def _state(value: Any) -> dict[str, Any]:
    """Returns the state that distinguishes two functions or objects of one name."""
    if isinstance(value, functools.partial):
        return {"function": value.func, "arguments": value.args, **value.keywords}
    if isinstance(value, types.MethodType):
        return {"object": value.__self__}
    if isinstance(value, types.FunctionType):
        cells = [cell.cell_contents for cell in value.__closure__ or ()]
        parts: dict[str, Any] = {
            "closure": cells,
            "defaults": value.__defaults__,
            "keywords": value.__kwdefaults__,
        }
        parts["code"] = _code(value.__code__) if _foreign(value) else None
        return {name: part for name, part in parts.items() if part}
    if isinstance(value, type):
        return {}
    if _foreign(type(value)):
        methods = vars(type(value)).items()
    else:
        methods = ()
    codes = {
        f"{name}()": _code(method.__code__)
        for name, method in methods
        if isinstance(method, types.FunctionType)
    }
    return {**getattr(value, "__dict__", {}), **codes}


def _foreign(value: Any) -> bool:
    """Returns True if a function or class is the caller's own: the code of the packages has a
    version."""
    return str(value.__module__).split(".")[0] not in ("fedmtl", "torch", "numpy")


def _code(code: types.CodeType) -> str:
    """Return a digest of what a function computes, but for what it finds in its module."""
    ordered = (
        sorted(map(repr, part)) if isinstance(part, frozenset) else part for part in code.co_consts
    )
    constants = [
        _code(part) if isinstance(part, types.CodeType) else repr(part) for part in ordered
    ]
    parts = (code.co_code, repr(code.co_names).encode(), repr(constants).encode())
    return hashlib.blake2b(b"|".join(parts), digest_size=16).hexdigest()


def _digest(values: Tensor | np.ndarray) -> str:
    if isinstance(values, Tensor):
        array = values.detach().cpu().numpy()
    else:
        array = values
    return hashlib.blake2b(array.tobytes(), digest_size=16).hexdigest()
