"""The shared model of a run from its public files alone, which somebody else may have written.

Nothing in these files is code: of a network they name a function of :mod:`fedmtl.models` and its
settings, which is built without memory for its numbers and takes those of the file only if all
names and shapes fit.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from inspect import isfunction
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from .. import models
from .._files import parse_json
from .._text import shown
from ..data import DataSpec, Integers, RowBound
from ..errors import ConfigError, DataError, first_line
from ..models.inputs import ModelBounds
from ..models.networks import NamedFactory
from .coding import Coding, Predictor
from .folder import COLUMNS, MODEL
from .untrusted_files import UntrustedFiles

_MOST_TEXT = 1 << 26  # bytes of the description of columns
_DTYPES = ("float32", "float64")


def is_public_part(folder: Path) -> bool:
    """Returns True if a folder is the public part of a run, or a copy of it, and not a whole
    run."""
    return not (folder / "private").exists() and any(
        (folder / name).exists() for name in (COLUMNS, MODEL)
    )


def published_model(folder: Path) -> Predictor:
    """Returns the shared model of a run on raw rows, from the public part of its folder alone.

    Args:
        folder: with ``columns.json`` and ``model.safetensors``.

    Raises:
        ConfigError: a run whose public files do not say how its model is built or takes raw rows.
        DataError: a file that cannot be read, or has other contents.
    """
    received = UntrustedFiles(folder)
    for name, why in (
        (
            COLUMNS,
            "it is in the private part of a run that read names or categories off its table, and "
            "nowhere if the data were no table",
        ),
        (MODEL, "the run has no shared model"),
    ):
        if not (folder / name).exists():
            raise ConfigError(f"{folder} has no {name} ({why}); give the whole folder of the run.")
    try:
        return _published_model(received, folder)
    except DataError as error:
        raise DataError(shown(f"{folder}: {error}")) from error


def _published_model(received: UntrustedFiles, folder: Path) -> Predictor:
    """Returns the model of a public part with both files."""
    # Nothing in these files is trusted: they may come from somebody else.
    received.content(folder / COLUMNS, _MOST_TEXT)
    values = received.json(folder / COLUMNS)
    try:
        coding = Coding.from_dict(values)
        network = _network(values.get("network"))
    except DataError as error:
        raise DataError(f"{COLUMNS} does not say how columns are coded: {error}") from error
    if network["made"] is None:
        raise ConfigError(
            f"{folder} does not say how the model is built, which was none of fedmtl.models; give "
            "the whole folder of the run, in Python Result.load(folder, model=...)."
        )
    state, metadata = received.tensors(folder / MODEL)
    module = _built(network, coding, state)
    _fill(module, state)
    bound = _bound(metadata)
    module = ModelBounds(bound, coding.limit, coding.link).around(module)
    predictor = Predictor(module.eval(), coding)
    # A row of zeros finds tensors that do not fit each other before a caller does.
    try:
        predictor.outputs(torch.zeros(1, coding.schema.width))
    except (RuntimeError, IndexError, TypeError, ValueError) as error:
        raise DataError(f"{MODEL} is no model of these columns: {first_line(error)}.") from error
    return predictor


def _network(values: Any) -> dict[str, Any]:
    """Returns the description of the network, with its keys and its dtype checked; :func:`_built`
    checks the functions that ``made`` names."""
    if not isinstance(values, dict) or set(values) != {"made", "dtype"}:
        raise DataError("network must have made and dtype, and nothing else.")
    if values["dtype"] not in _DTYPES:
        raise DataError(f"network.dtype is {values['dtype']!r}; accepted: {', '.join(_DTYPES)}.")
    return values


def _built(network: Mapping[str, Any], coding: Coding, state: Mapping[str, Tensor]) -> nn.Module:
    """Returns the network without memory for its numbers.

    Raises:
        DataError: something else than a network, or one that is larger than ``state``.
    """
    settings = network["made"]
    # A file could ask for more memory than there is; an honest one has no setting above the number
    # of its parameters.
    most = max(sum(value.numel() for value in state.values()), 1)
    for place, number in _whole_numbers(settings, "network.made"):
        limit = most
        if place.endswith(".layers"):
            limit = len(state)
        if number > limit:
            raise DataError(f"{COLUMNS}: {place} is {number}, and the model in {MODEL} is smaller.")
    spec = DataSpec(
        shape=(coding.schema.width,),
        classes=coding.schema.classes,
        clients=1,
        integer=isinstance(coding.transform, Integers),
    )
    try:
        with torch.device("meta"):
            module = _factory(settings)(spec)
        return module.to(getattr(torch, network["dtype"]))
    except Exception as error:  # of any kind: the settings are whatever the file says
        raise DataError(f"{COLUMNS}: network.made cannot be built: {first_line(error)}.") from error


def _factory(description: Any) -> NamedFactory:
    """Returns the factory of a network by its description, a mapping with a ``class``.

    Raises:
        DataError: a name that is no function of :mod:`fedmtl.models`, or settings that it does not
            take.
    """
    factory = _restored(description)
    if not isinstance(factory, NamedFactory):
        raise DataError(
            f"{description!r} is no network; accepted: a mapping with a class and its settings."
        )
    return factory


def _restored(value: Any) -> Any:
    """Returns a value of the settings of a network, with the networks in it as factories."""
    if isinstance(value, list):
        return tuple(map(_restored, value))
    if not isinstance(value, dict):
        return value
    settings = {name: _restored(inner) for name, inner in value.items() if name != "class"}
    if "class" not in value:
        return settings
    name = value["class"]
    function = None
    if isinstance(name, str) and name in models.__all__:
        function = getattr(models, name)
    if not isfunction(function):
        accepted = ", ".join(
            sorted(each for each in models.__all__ if isfunction(getattr(models, each)))
        )
        raise DataError(f"it names the class {name!r}, which a file may not; accepted: {accepted}.")
    try:
        return function(**settings)
    except Exception as error:  # of any kind: the settings are whatever the file says
        given = ", ".join(settings) or "none"
        raise DataError(
            f"{name} does not take these settings ({given}): {first_line(error)}."
        ) from error


def _whole_numbers(value: Any, place: str) -> Iterator[tuple[str, int]]:
    """Yields the whole numbers in settings, with their places."""
    if isinstance(value, dict):
        for name, inner in value.items():
            yield from _whole_numbers(inner, f"{place}.{name}")
    elif isinstance(value, list):
        for inner in value:
            yield from _whole_numbers(inner, place)
    elif isinstance(value, int) and not isinstance(value, bool):
        yield place, value


def _fill(module: nn.Module, state: Mapping[str, Tensor]) -> None:
    """Puts the tensors of a file into a network without numbers, in place.

    Raises:
        DataError: other names, shapes or kinds of numbers than the network has, or numbers that are
            not finite.
    """
    wanted = module.state_dict()
    if wanted.keys() != state.keys():
        raise DataError(
            f"{MODEL} has the tensors {_few(state)}, and the network of {COLUMNS} has "
            f"{_few(wanted)}."
        )
    for name, like in wanted.items():
        tensor = state[name]
        if (tensor.shape, tensor.dtype) != (like.shape, like.dtype):
            raise DataError(
                f"{MODEL}: {name} is {_kind(tensor)}, and that of the network of {COLUMNS} is "
                f"{_kind(like)}."
            )
        if tensor.is_floating_point() and not torch.isfinite(tensor).all():
            raise DataError(f"{MODEL}: {name} has numbers that are not finite.")
    module.load_state_dict(dict(state), assign=True)
    # Buffers that are no part of the state, and still have no numbers, would fail in forward.
    for name, left in (*module.named_parameters(), *module.named_buffers()):
        if left.is_meta:
            raise DataError(f"{MODEL} does not have {name}, which the network needs.")


def _kind(tensor: Tensor) -> str:
    return f"{str(tensor.dtype).removeprefix('torch.')} {tuple(tensor.shape)}"


def _few(names: Mapping[str, Any]) -> str:
    """Returns at most six names in one text."""
    some = list(names)[:6]
    more = len(names) - len(some)
    text = ", ".join(some) or "none"
    if more:
        text += f" and {more:,} more"
    return text


def _bound(metadata: Mapping[str, str]) -> RowBound | None:
    """Returns the bound on records of the model's metadata; None without one.

    Raises:
        DataError: an entry ``bound`` that is no bound with its norm.
    """
    if "bound" not in metadata:
        return None
    text = metadata["bound"]
    try:
        values = parse_json(text)
        if set(values) != {"bound", "norm"}:
            raise ValueError("it must have bound and norm")
        return RowBound(values["bound"], values["norm"])
    except (ValueError, TypeError) as error:  # a ConfigError is a ValueError
        raise DataError(
            f"{MODEL}: the bound on records {text!r} cannot be read: {first_line(error)}."
        ) from error
