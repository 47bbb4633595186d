"""A result as the files of its run folder, written and read."""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping, Sequence
from dataclasses import fields
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from safetensors import SafetensorError
from torch import Tensor, nn

from .._files import plain, read_json, write_bytes, write_json
from .._imports import uncollected
from ..algorithms.problem import Problem
from ..data import FederatedDataset
from ..errors import ConfigError, DataError, FedmtlError, MissingExtra, ModelError, first_line
from ..local import Layout, prepare_module
from ..models import ModelFactory
from ..models.build import build_module, with_inputs
from ..models.inputs import ModelBounds
from ..models.networks import NamedFactory
from ..privacy import PrivacyReport
from ..privacy.noise.grid import GridValue
from ..report._names import METHODS
from .coding import Coding
from .folder import COLUMNS, MODEL, OUTCOME, RunFolder
from .metrics import REGISTRY, Metric
from .model_file import bound_note, write_model
from .result_tables import beside_local, client_rows, csv_bytes
from .run_fingerprint import describe
from .scored_models import Finetuned, RecordFacts
from .summary import numbers_of_result
from .targets import restored
from .tensor_files import read_tensors, write_tensors
from .trainer_arguments import as_model

if TYPE_CHECKING:
    from .result import Result
    from .trainer import Trainer

logger = logging.getLogger("fedmtl")
_ELSEWHERE = {
    *("personal", "shared", "parts", "released", "privacy"),
    *("module", "factory", "folder", "baselines", "coding"),
}
"""Fields of a result that are not in its outcome: in files of their own, or known without a
file."""


def write_run(folder: RunFolder, result: Result, problem: Problem) -> None:
    """Writes the models, the metrics and the privacy report of one run, and the description of its
    network.

    Args:
        folder: of the run.
        result: without baselines.
        problem: with the module, its layout and its dtype.
    """
    write_json(folder.public / "privacy.json", result.privacy.to_dict())
    bound = bound_note(result.bounds.records)
    if result.shared is not None:
        write_model(folder.public / MODEL, problem, result.shared, bound)
    # The grid goes with a value: a verifier of a release must see that the value lies on it.
    if result.released:
        grids = {
            name: json.dumps(
                {"step": release.step, "width": release.width, "divisor": release.divisor}
            )
            for name, release in result.released.items()
        }
        values = {name: release.value for name, release in result.released.items()}
        write_tensors(folder.public / "releases.safetensors", values, grids)
    # A stride of 0 is the shared model, repeated for everybody: its file is there already.
    if result.personal.stride(0) != 0:
        ids = json.dumps(result.personal_ids)
        write_tensors(
            folder.private / "models.safetensors", {"models": result.personal}, {"ids": ids} | bound
        )
    if result.parts:
        write_tensors(folder.private / "parts.safetensors", result.parts)
    folder.write_history(result.history)
    if result.replicates is not None:
        write_bytes(folder.private / "replicates.csv", csv_bytes(result.replicates))
    write_json(folder.private / OUTCOME, _outcome(result, problem), indent=None)
    if result.coding is not None:
        # Names and categories that were read off the records are private.
        if result.coding.schema.declared:
            part = folder.public
        else:
            part = folder.private
        write_json(
            part / COLUMNS, result.coding.to_dict() | {"network": _public_network(result, problem)}
        )


def write_result(
    folder: RunFolder, result: Result, settings: dict[str, Any], data: FederatedDataset
) -> None:
    """Writes the plots, the scores by client and result.json, the mark of a finished run.

    Args:
        folder: of the run.
        result: with its baselines.
        settings: see :func:`table_settings`.
        data: with the numbers of records that were trained on.
    """
    _draw(result, folder.private)
    # Without pandas, which the core does not need.
    counts = [side.counts.tolist() for side in (data.train, data.test)]
    beside = beside_local(result, data.ids)
    rows = []
    for client, scores, train, test in zip(
        data.ids, client_rows(result, data.ids), *counts, strict=True
    ):
        row: dict[str, Any] = {"client": client, "train_examples": train, "test_examples": test}
        rows.append(row | beside[client] | scores)
    write_bytes(folder.private / "clients.csv", csv_bytes(rows))
    report = result.privacy.to_dict()
    summary = settings | {"clients": len(result.ids)} | report | numbers_of_result(result)
    summary["rounds"] = result.final["round"]
    local = result.baselines.get("local")
    summary["baselines"] = {
        name: run.privacy.to_dict() | numbers_of_result(run, None if run is local else local)
        for name, run in result.baselines.items()
    }
    names = [name for name in (result.algorithm, *result.baselines) if name in METHODS]
    summary["methods"] = {name: list(METHODS[name]) for name in names}
    # Last: a folder with this file is that of a finished run.
    write_json(folder.private / "result.json", plain(summary))


def _draw(result: Result, folder: Path) -> None:
    """Draws the figures of a run; without matplotlib there are none, and a warning says so."""
    try:
        with uncollected():
            from .plots import plot_result
    except MissingExtra as error:
        logger.warning("%s", error)
    else:
        plot_result(result, folder)


def read_result(
    folder: RunFolder,
    cls: type[Result],
    model: nn.Module | ModelFactory | None = None,
    trust: Sequence[str] = (),
) -> Result:
    """Returns the result of a finished run, with its baselines.

    Args:
        folder: of the run.
        cls: class of the result.
        model: of the run, for files that do not say how it is built.
        trust: modules of which its files may name classes.

    Raises:
        ConfigError: no finished run, or one of an earlier version.
        ModelError: ``model`` does not have the parameters of the run's.
        DataError: a file that cannot be read.
    """
    # A baseline is part of its run, whose result.json has the numbers of both.
    is_baseline = folder.root.parent.name == "baselines"
    for path in (folder.private / name for name in ("result.json", OUTCOME)[is_baseline:]):
        if not path.is_file():
            raise ConfigError(
                f"{folder.root} holds no finished run that can be loaded: {path} is missing; "
                f"fedmtl resume {folder.root} continues a run that has not finished, and writes "
                "the files of one of an earlier version."
            )
    try:
        values = _fields(folder, cls, read_json(folder.private / OUTCOME), model, trust)
    except FedmtlError:
        raise
    except (KeyError, TypeError, ValueError) as error:
        raise DataError(f"{folder.private / OUTCOME} is no outcome of a run: {error!r}.") from error
    names: Any = ()
    if not is_baseline:
        names = read_json(folder.private / "result.json").get("baselines", ())
    for name in names:  # a name that is a path would read another folder
        if name in ("", ".", "..") or "/" in name or "\\" in name:
            raise DataError(f"{folder.private / 'result.json'}: {name!r} is no name of a baseline.")
    return cls(
        **values,
        baselines={name: read_result(folder.baseline(name), cls, model, trust) for name in names},
    )


def _fields(
    folder: RunFolder,
    cls: type[Result],
    outcome: dict[str, Any],
    model: nn.Module | ModelFactory | None,
    trust: Sequence[str],
) -> dict[str, Any]:
    """Returns the fields of a result from its files, without the baselines."""
    network = outcome.pop("network")
    bounds = outcome["bounds"]
    finetuned = outcome["finetuned"]
    # JSON has lists only.
    for each in fields(cls):
        if isinstance(outcome.get(each.name), list) and str(each.type).startswith("tuple"):
            outcome[each.name] = tuple(outcome[each.name])
    if finetuned is not None:
        settings = restored(finetuned["settings"], trust)
        diverged = tuple(finetuned["diverged"])
        outcome["finetuned"] = Finetuned(**finetuned | {"settings": settings, "diverged": diverged})
    try:
        outcome["adaptation"] = restored(outcome["adaptation"], trust)
    except ConfigError:  # objects of the caller's own
        outcome["adaptation"] = None
    state = _tensors(folder.public / MODEL)[0]
    module, factory = _network_of(network, state, model)
    shared = None
    if state:  # the file has frozen parameters too, which a row of a model has not
        shared = torch.cat([state[name].reshape(-1) for name in network["names"]])
    personal = _tensors(folder.private / "models.safetensors")[0].get("models")
    if personal is None and shared is not None:
        personal = shared.expand(len(outcome["evaluated"] or outcome["ids"]), -1)
    released, grids = _tensors(folder.public / "releases.safetensors")
    return outcome | {
        "privacy": PrivacyReport.from_dict(read_json(folder.public / "privacy.json")),
        "personal": personal,
        "shared": shared,
        "module": module,
        "factory": factory,
        "coding": _coding(folder),
        "folder": folder.root,
        "released": {
            name: GridValue(value=x, **json.loads(grids[name])) for name, x in released.items()
        },
        "records": RecordFacts(**outcome["records"]),
        "bounds": ModelBounds(**bounds | {"records": restored(bounds["records"])}),
        "further_metrics": tuple(
            REGISTRY.get(metric["name"]) or Metric(metric["name"], None, metric["up"], own=True)
            for metric in outcome["further_metrics"]
        ),
        "parts": _tensors(folder.private / "parts.safetensors")[0],
    }


def _coding(folder: RunFolder) -> Coding | None:
    """Returns the coding of raw rows of a table for the models; None for other data and for
    runs of earlier versions.

    Raises:
        DataError: a file that has no coding in it.
    """
    for part in (folder.private, folder.public):
        path = part / COLUMNS
        if path.is_file():
            try:
                return Coding.from_dict(read_json(path))
            except DataError as error:
                raise DataError(f"{path} does not say how columns are coded: {error}") from error
    return None


def _outcome(result: Result, problem: Problem) -> dict[str, Any]:
    """Returns the fields of a result beside its tensors and privacy report, ready for JSON."""
    values = {
        each.name: getattr(result, each.name)
        for each in fields(result)
        if each.name not in _ELSEWHERE
    }
    finetuned = result.finetuned
    adaptation = result.adaptation
    if adaptation is not None and not all(
        isinstance(value, str) for value in (adaptation["loss"], *adaptation["metrics"])
    ):
        adaptation = None  # functions of the caller's own
    finetuning = None
    if finetuned is not None:
        finetuning = vars(finetuned) | {"settings": describe(finetuned.settings)}
    return values | {
        "finetuned": finetuning,
        "records": vars(result.records),
        "bounds": vars(result.bounds) | {"records": describe(result.bounds.records)},
        "further_metrics": [
            {"name": metric.name, "up": metric.higher_is_better}
            for metric in result.further_metrics
        ],
        "adaptation": describe(adaptation),
        "network": {
            "made": describe(result.factory),
            "spec": describe(problem.data.spec),
            "seed": problem.seed,
            "dtype": str(problem.initial.dtype).removeprefix("torch."),
            "names": list(problem.layout.names),
            "shapes": [list(shape) for shape in problem.layout.shapes],
        },
    }


def _public_network(result: Result, problem: Problem) -> dict[str, Any]:
    """Returns the description of the network of a run without its seed and its number of
    clients."""
    dtype = str(problem.initial.dtype).removeprefix("torch.")
    return {"made": describe(result.factory), "dtype": dtype}


def _network_of(
    network: dict[str, Any], state: Mapping[str, Tensor], model: nn.Module | ModelFactory | None
) -> tuple[nn.Module | None, NamedFactory | None]:
    """Returns the network of a run as it was trained, None if nothing says how it is built, and the
    factory of :mod:`fedmtl.models` that built it, None for another one.

    Args:
        network: its description.
        state: of the shared model, with the frozen parameters that all models have; empty without
            one.
        model: of the caller's; None for that of the description.

    Raises:
        ModelError: ``model`` has other parameters.
    """
    if model is None:
        try:
            model = restored(network["made"])
        except ConfigError:  # it has parts of the caller's own
            model = None
        if model is None:
            return None, None
    factory = None
    if isinstance(model, NamedFactory):
        factory = model
    spec = restored(network["spec"])
    dtype = getattr(torch, network["dtype"])
    module = build_module(with_inputs(as_model(model), spec), spec, network["seed"])
    module = prepare_module(
        module, spec.sample(2, dtype), seed=network["seed"], dtype=dtype, trainable=network["names"]
    )
    layout = Layout.of(module)
    shapes = dict(zip(network["names"], map(tuple, network["shapes"]), strict=True))
    built = dict(zip(layout.names, layout.shapes, strict=True))
    if built != shapes:
        raise ModelError(f"model has the parameters {built}, but those of the run are {shapes}.")
    try:
        module.load_state_dict(dict(state), strict=False)
    except RuntimeError as error:
        raise ModelError(
            f"model has other frozen parameters than that of the run: {first_line(error)}."
        ) from error
    return module, factory


def _tensors(path: Path) -> tuple[dict[str, Tensor], dict[str, str]]:
    """Returns the tensors of a file by name, and its metadata; nothing without such a file.

    Raises:
        ConfigError: it cannot be read.
    """
    try:
        if path.is_file():
            return read_tensors(path)
        return ({}, {})
    except (OSError, SafetensorError) as error:
        raise ConfigError(f"{path} cannot be read as a model: {error}") from error


def table_settings(settings: Trainer, module: nn.Module | None) -> dict[str, Any]:
    """Returns the settings that a table of runs shows, and those that distinguish its runs.

    Args:
        settings: of the run.
        module: its network.
    """
    values: dict[str, Any] = {
        "seed": settings.seed,
        "planned_rounds": settings.rounds,
        "data": settings.data.name,
    }
    values["data_fingerprint"] = settings.data.fingerprint()
    names = [
        "algorithm",
        "schedule",
        "privacy",
        "rounds",
        "trainable",
        "loss",
        "finetune",
        "dtype",
        "early_stopping",
    ]
    if settings.audit is not None:
        names.append("audit")
    configuration = {name: describe(getattr(settings, name)) for name in names}
    assert module is not None  # only a loaded result may lack it
    size = sum(parameter.numel() for parameter in module.parameters())
    configuration["model"] = {
        "class": type(module).__name__,
        "parameters": size,
        "layers": repr(module),
    }
    return values | {"configuration": configuration}
