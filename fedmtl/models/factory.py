"""What a model is before the data are read."""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import wraps
from typing import Any, Concatenate, ParamSpec, TypeVar

import numpy as np
from torch import nn

from .._check import check_arguments
from ..data.examples import DataSpec
from ..errors import ConfigError

ModelFactory = Callable[[DataSpec], nn.Module]
"""From the shape of the data to a module, so that a model can be named before the data are read."""

Model = TypeVar("Model", nn.Module, ModelFactory)
"""A module, or a factory of modules."""

Settings = ParamSpec("Settings")


@dataclass(frozen=True)
class NamedFactory:
    """A factory that a run folder can describe.

    Args:
        build: the factory.
        maker: name of the function of :mod:`fedmtl.models` that made it.
        arguments: that it was called with.
    """

    build: ModelFactory
    maker: str
    arguments: Mapping[str, Any] = field(default_factory=dict)

    def __call__(self, spec: DataSpec) -> nn.Module:
        return self.build(spec)

    def description(self) -> dict[str, Any] | None:
        """Return the maker under ``"factory"`` and its arguments, JSON-ready; None where one of them is a factory or a
        module of the caller's own."""
        described: dict[str, Any] = {"factory": self.maker}
        for name, value in self.arguments.items():
            if isinstance(value, NamedFactory):
                value = value.description()
                if value is None:
                    return None
            elif callable(value):
                return None
            value = value.item() if isinstance(value, np.generic) else value
            described[name] = list(value) if isinstance(value, tuple) else value
        return described


def factory(
    **checks: Callable[..., None],
) -> Callable[[Callable[Concatenate[DataSpec, Settings], nn.Module]], Callable[Settings, ModelFactory]]:
    """Make of a function (spec, settings) -> module the function of its settings that returns a factory.

    The settings are checked before the data are read: by their annotations, and by the ``checks`` of their names.
    """

    def decorate(build: Callable[Concatenate[DataSpec, Settings], nn.Module]) -> Callable[Settings, ModelFactory]:
        signature = inspect.Signature(list(inspect.signature(build).parameters.values())[1:])

        @wraps(build)
        def make(*args: Settings.args, **kwargs: Settings.kwargs) -> ModelFactory:
            arguments = {**dict(zip(signature.parameters, args, strict=False)), **kwargs}
            for name in checks.keys() & arguments.keys():
                checks[name](build.__name__, **{name: arguments[name]})
            return NamedFactory(lambda spec: build(spec, *args, **kwargs), build.__name__, arguments)

        make.__signature__ = signature  # type: ignore[attr-defined]
        return check_arguments(make)

    return decorate


def transformed(name: str, change: Callable[[nn.Module], nn.Module], model: Model, **settings: Any) -> Any:
    """Return a changed copy of a module, or the factory of the changed modules of a factory.

    Args:
        name: of the function of :mod:`fedmtl.models` that does so.
        change: changes a module in place, and returns it.
        model: the module, or the factory.
        settings: of the change.

    Raises:
        ConfigError: ``model`` is neither.
    """
    if isinstance(model, nn.Module):
        return change(copy.deepcopy(model))
    if isinstance(model, type) or not callable(model):
        raise ConfigError(f"{name}.model is {model!r}; give a module, or a factory such as models.mlp().")
    return NamedFactory(lambda spec: change(model(spec)), name, {"model": model, **settings})
