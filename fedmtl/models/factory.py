"""What a model is before the data are read."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import wraps
from typing import TYPE_CHECKING, Any, ParamSpec

import numpy as np
from torch import nn

if TYPE_CHECKING:
    from ..data import DataSpec

ModelFactory = Callable[["DataSpec"], nn.Module]
"""From the shape of the data to a module, so that a model can be named before the data are read."""

Arguments = ParamSpec("Arguments")


@dataclass(frozen=True)
class NamedFactory:
    """A factory that knows how it was made, so that a run folder can say it.

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
        found: dict[str, Any] = {"factory": self.maker}
        for name, value in self.arguments.items():
            if isinstance(value, NamedFactory):
                value = value.description()
                if value is None:
                    return None
            elif callable(value):
                return None
            value = value.item() if isinstance(value, np.generic) else value
            found[name] = list(value) if isinstance(value, tuple) else value
        return found


def named(maker: Callable[Arguments, ModelFactory]) -> Callable[Arguments, ModelFactory]:
    """Make the factories of ``maker`` know how they were made."""
    names = list(inspect.signature(maker).parameters)

    @wraps(maker)
    def make(*args: Arguments.args, **kwargs: Arguments.kwargs) -> ModelFactory:
        return NamedFactory(maker(*args, **kwargs), maker.__name__, {**dict(zip(names, args, strict=False)), **kwargs})

    return make
