"""Modules from factories: the initial values of a run follow from its seed."""

from __future__ import annotations

import inspect

import torch
from torch import nn

from ..data import DataSpec
from ..data.transforms import Packed
from ..errors import ConfigError, FedmtlError, ModelError, first_line
from ..local import check_copyable, check_layers, with_shapes
from ..random import derive_key
from .inputs import NamedInputs
from .networks import ModelFactory


def with_inputs(model: nn.Module | ModelFactory, spec: DataSpec) -> nn.Module | ModelFactory:
    """Returns a module of the caller's own, for data of several inputs, as one that takes the row
    in which these are stored; any other model as it is.

    Args:
        model: a module, or a function of the shape of the data.
        spec: the shape of the data.
    """
    if not isinstance(model, nn.Module) or isinstance(model, NamedInputs) or not spec.inputs:
        return model
    # the caller's module does not know that several inputs are stored in one row
    return NamedInputs(model, Packed(spec.inputs))


def build_module(model: nn.Module | ModelFactory, spec: DataSpec, seed: int) -> nn.Module:
    """Returns the module, or the one that a factory makes, with the initial values that follow from
    a seed.

    Args:
        model: a module, or a function of the shape of the data.
        spec: the shape of the data.
        seed: of the run.

    Raises:
        ConfigError: a function that does not take the shape only, or that returns no module.
        ModelError: a function that fails, or a module that cannot be trained, see
            :func:`fedmtl.local.check_layers` and :func:`fedmtl.local.check_copyable`.
    """
    # The generator takes 63 bits.
    start = derive_key(seed, "model") >> 1
    if isinstance(model, nn.Module):
        return _ready(model, spec, start)
    try:
        inspect.signature(model).bind(spec)
    except TypeError as error:
        raise ConfigError(
            f"model is a function that cannot be called with the data's DataSpec ({error}); give "
            f"a function of one "
            "argument that returns a module, such as lambda spec: MyModel(), or the module itself."
        ) from error
    # The global generator of the caller stays where it was.
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(start)
        try:
            module = model(spec)
        except FedmtlError:
            raise
        except Exception as error:
            raise ModelError(
                f"The model cannot be made for data of {spec}: {first_line(error)}."
            ) from error
    if not isinstance(module, nn.Module):
        raise ConfigError(
            f"model is a function that returned {type(module).__name__}; it must "
            "return an nn.Module."
        )
    return _ready(module, spec, start)


def _ready(module: nn.Module, spec: DataSpec, start: int) -> nn.Module:
    """Returns the module with the shapes of its lazy parameters, whose values follow from the seed
    ``start``."""
    check_layers(module)
    check_copyable(module)
    shaped = with_shapes(module, spec.sample(2, torch.float32), start)
    if shaped is not module:
        check_copyable(shaped)
    return shaped
