"""The arguments of a trainer: names and plain values become the objects that they stand for."""

from __future__ import annotations

from collections.abc import Mapping
from inspect import signature
from typing import Any

from torch import nn

from .. import models
from ..data import FederatedDataset, load_data
from ..errors import ConfigError
from ..models import ModelFactory

AUTO = ("algorithm", "model", "schedule", "rounds", "finetune")
"""Settings that can be automatic."""
_NAMED = (
    "softmax_regression",
    "logistic_regression",
    "linear_regression",
    "mlp",
    "femnist_cnn",
    "celeba_cnn",
)


def is_auto(value: Any) -> bool:
    """Returns True if a setting is to be chosen automatically."""
    return isinstance(value, str) and value == "auto"


def as_data(data: Any) -> FederatedDataset:
    """Returns the dataset of a dataset, the name of one, a mapping from client to (x, y) or
    Dataset, or a function without arguments that returns one of these."""
    if _is_reader(data):
        data = data()
    if isinstance(data, FederatedDataset):
        return data
    if isinstance(data, str):
        return load_data(data)
    if isinstance(data, Mapping):
        return FederatedDataset.from_tensors(data)
    raise ConfigError(
        f"data is {a_kind(data)}; give a FederatedDataset, the name of a reader such as 'digits', "
        "a mapping from client to a pair (x, y) or torch Dataset, or a function without arguments "
        "that returns one of these; of a table "
        "load_data('table', path=TABLE, client=COLUMN, target=COLUMN)."
    )


def _is_reader(data: Any) -> bool:
    """Returns True if data are a function that can be called without arguments."""
    # a class is a mistake for an object of it
    if not callable(data) or isinstance(data, type):
        return False
    try:
        signature(data).bind()
    except (TypeError, ValueError):
        return False
    return True


def as_model(model: Any) -> nn.Module | ModelFactory:
    """Returns the model that ``model`` stands for: a module, a factory, or the name of one, such as
    ``"mlp"``."""
    # Factories that need no settings: a name alone says which network it is.
    factories = {name: getattr(models, name) for name in _NAMED}
    if isinstance(model, str) and model in factories:
        return factories[model]()  # type: ignore[no-any-return]
    # the function that makes a factory, not called
    if any(model is factory for factory in factories.values()):
        return model()  # type: ignore[no-any-return]
    if isinstance(model, nn.Module) or (callable(model) and not isinstance(model, type)):
        return model  # type: ignore[no-any-return]
    if isinstance(model, str):
        kind = repr(model)
    else:
        kind = a_kind(model)
    raise ConfigError(
        f"model is {kind}; give a module, a function of the data's DataSpec that returns one, or a "
        f"name: {', '.join(map(repr, _NAMED))}."
    )


def a_kind(value: Any) -> str:
    """Returns the class of a value with its article, for messages: the value itself may be data.
    None and classes are returned by name."""
    if value is None or isinstance(value, type):
        return repr(value)
    name = type(value).__name__
    return f"{'an' if name[:1].lower() in 'aeiou' else 'a'} {name}"
