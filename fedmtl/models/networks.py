"""Models before the data are read, linear models and perceptrons of features of any shape, and
models of tokens."""

from __future__ import annotations

import copy
import inspect
import math
from collections.abc import Callable
from functools import partial, wraps
from typing import Any, Concatenate, ParamSpec, TypeVar

import torch
from torch import Tensor, nn

from .._check import Count, check_arguments
from ..data.examples import DataSpec
from ..errors import ConfigError, ModelError
from ..local import check_copyable

ModelFactory = Callable[[DataSpec], nn.Module]
"""From the shape of the data to a module, so that a model can be named before the data are read."""

Model = TypeVar("Model", nn.Module, ModelFactory)
"""A module, or a factory of modules."""

Settings = ParamSpec("Settings")


class NamedFactory(partial[nn.Module]):
    """A factory that a run folder can describe: a function of :mod:`fedmtl.models`, and the
    settings that it has.
    """


def copies_of(module: nn.Module, built_by: NamedFactory) -> NamedFactory:
    """Returns the factory of copies of a module, parameters included, which is described as the one
    that built it.

    Args:
        module: the module.
        built_by: its factory.
    """

    def build(spec: DataSpec, **described: Any) -> nn.Module:
        return copy.deepcopy(module)

    # The name and the settings are all that a run folder stores of a factory.
    build.__name__ = built_by.func.__name__
    return NamedFactory(build, **built_by.keywords)


def factory(
    build: Callable[Concatenate[DataSpec, Settings], nn.Module],
) -> Callable[Settings, ModelFactory]:
    """Makes of a function (spec, settings) -> module the function of its settings that returns a
    factory.

    The settings are checked by their annotations before the data are read.
    """
    # Without the spec: it is given later, when the data are known.
    signature = inspect.Signature(list(inspect.signature(build).parameters.values())[1:])

    @wraps(build)
    def make(*args: Settings.args, **kwargs: Settings.kwargs) -> ModelFactory:
        return NamedFactory(build, **dict(zip(signature.parameters, args, strict=False)), **kwargs)

    make.__signature__ = signature  # type: ignore[attr-defined]
    return check_arguments(make)


def transformed(
    name: str, change: Callable[[nn.Module], nn.Module], model: Model, **settings: Any
) -> Any:
    """Returns a changed copy of a module, or the factory of the changed modules of a factory.

    Args:
        name: of the function of :mod:`fedmtl.models` that does so.
        change: changes a module in place, and returns it.
        model: the module, or the factory.
        settings: of the change.

    Raises:
        ConfigError: ``model`` is neither.
        ModelError: a module that cannot be copied.
    """
    if isinstance(model, nn.Module):
        # The caller keeps the module as it is.
        check_copyable(model)
        return change(copy.deepcopy(model))
    if isinstance(model, type) or not callable(model):
        raise ConfigError(
            f"{name}.model is {model!r}; give a module, or a factory such as models.mlp()."
        )

    def build(spec: DataSpec, **described: Any) -> nn.Module:
        return change(model(spec))

    # The name and the settings are all that a run folder stores of a factory.
    build.__name__ = name
    return NamedFactory(build, model=model, **settings)


@factory
def softmax_regression(spec: DataSpec, *, bias: bool = True) -> nn.Module:
    """Builds a multinomial logistic regression with zero weights.

    The problem is convex, so the start is only a convention. Features of any shape are flattened.

    Args:
        spec: the shape of the data.
        bias: True for a bias of each class.

    Returns:
        A module (B, *shape) -> (B, outputs) of logits.

    Example:
        >>> from fedmtl import load_data, models
        >>> spec = load_data("digits", clients=2).spec
        >>> sum(p.numel() for p in models.softmax_regression()(spec).parameters())
        650
    """
    return _linear(spec, spec.outputs, bias)


@factory
def linear_regression(spec: DataSpec, *, bias: bool = True) -> nn.Module:
    """Builds a linear map to one real number for each target, with zero weights.

    Args:
        spec: the shape of the data.
        bias: True for a bias of each target.

    Returns:
        A module (B, *shape) -> (B, targets).

    Example:
        >>> from fedmtl.data import DataSpec
        >>> from fedmtl.models import linear_regression
        >>> linear_regression(bias=False)(DataSpec(shape=(5,), classes=None, clients=3))
        Sequential(
          (0): Flatten(start_dim=1, end_dim=-1)
          (1): Linear(in_features=5, out_features=1, bias=False)
        )
    """
    return _linear(spec, math.prod(spec.targets), bias)


@factory
def logistic_regression(spec: DataSpec, *, bias: bool = True) -> nn.Module:
    """Builds a logistic regression with zero weights: one logit for two classes, or one for each
    label of an example.

    With 500 tags on 10,000 tokens, the StackOverflow model of Hu et al. 2023. More than two classes
    are for :func:`softmax_regression`.

    Args:
        spec: the shape of the data.
        bias: True for a bias of each logit.

    Returns:
        A module (B, *shape) -> (B, 1) or (B, labels) of logits.

    Raises:
        ModelError: more than two classes, or a regression.

    Example:
        >>> from fedmtl.data import DataSpec
        >>> from fedmtl.models import logistic_regression
        >>> spec = DataSpec(shape=(100,), classes=2, clients=3, targets=(8,))
        >>> logistic_regression()(spec)[-1].out_features
        8
    """
    if spec.classes != 2:
        raise ModelError(
            f"logistic_regression is for 2 classes or several labels, not {spec.classes}; use "
            "softmax_regression."
        )
    return _linear(spec, math.prod(spec.targets), bias)


@factory
def mlp(
    spec: DataSpec, *, hidden: Count = 64, layers: Count = 1, dropout: float = 0.0
) -> nn.Module:
    """Builds a perceptron with hidden layers of rectified units.

    Args:
        spec: the shape of the data.
        hidden: units of each hidden layer, at least 1.
        layers: number of hidden layers, at least 1.
        dropout: share of units that are dropped in training, from 0 to below 1; 0 adds no layer.

    Returns:
        A module (B, *shape) -> (B, outputs); its weights are drawn by PyTorch's default.

    Example:
        >>> from fedmtl import load_data, models
        >>> spec = load_data("digits", clients=2).spec
        >>> models.mlp(hidden=16)(spec)
        Sequential(
          (0): Flatten(start_dim=1, end_dim=-1)
          (1): Linear(in_features=64, out_features=16, bias=True)
          (2): ReLU()
          (3): Linear(in_features=16, out_features=10, bias=True)
        )
    """
    blocks: list[nn.Module] = [nn.Flatten()]
    width = math.prod(spec.shape)
    for _ in range(layers):
        blocks += [nn.Linear(width, hidden), nn.ReLU()]
        if dropout > 0.0:
            blocks.append(nn.Dropout(dropout))
        width = hidden
    return nn.Sequential(*blocks, nn.Linear(width, spec.outputs))


def _linear(spec: DataSpec, outputs: int, bias: bool) -> nn.Module:
    """Returns a linear map of the features, from zero weights."""
    linear = nn.Linear(math.prod(spec.shape), outputs, bias=bias)
    for parameter in linear.parameters():
        # A convex problem has one optimum, and zeros need no seed.
        nn.init.zeros_(parameter)
    return nn.Sequential(nn.Flatten(), linear)


class MeanEmbedding(nn.Module):
    """Computes the mean of the embeddings of an example's tokens, without padding.

    Args:
        vocabulary: tokens are in ``0 .. vocabulary - 1``.
        width: of an embedding.
        padding: the token that fills up short examples, whose embedding is not used; None for none.

    Shape:
        int64 (B, tokens) -> (B, width); zero for an example of only padding.

    Example:
        >>> import torch
        >>> from fedmtl.models import MeanEmbedding
        >>> layer = MeanEmbedding(vocabulary=5, width=3, padding=0)
        >>> layer(torch.tensor([[1, 2, 0], [0, 0, 0]]))[1].tolist()
        [0.0, 0.0, 0.0]
    """

    def __init__(self, vocabulary: int, width: int, padding: int | None) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocabulary, width)
        self.padding = padding

    def forward(self, x: Tensor) -> Tensor:
        """Returns the means of embeddings, (B, width).

        Args:
            x: int64 (B, tokens).
        """
        values = self.embedding(x)
        if self.padding is None:
            return values.mean(1)
        # A sequence of padding alone has no mean; dividing by 1 makes it zero.
        present = (x != self.padding).to(values.dtype)[..., None]
        return torch.sum(values * present, 1) / present.sum(1).clamp(min=1.0)


@factory
def mean_embedding(
    spec: DataSpec,
    *,
    vocabulary: Count,
    width: Count = 64,
    hidden: Count | None = None,
    padding: int | None = 0,
) -> nn.Module:
    """Returns a classifier of sequences of tokens by the mean of their embeddings.

    The data keep their features as whole numbers with ``transform=Integers()``.

    Args:
        spec: the shape of the data.
        vocabulary: tokens are in ``0 .. vocabulary - 1``.
        width: of an embedding.
        hidden: rectified units between the mean and the outputs; None for none.
        padding: the token that fills up short sequences; None for none.

    Raises:
        ModelError: the data are no sequences of tokens (length,).

    Example:
        >>> from fedmtl.data import DataSpec
        >>> from fedmtl.models import mean_embedding
        >>> spec = DataSpec(shape=(20,), classes=3, clients=5, integer=True)
        >>> module = mean_embedding(vocabulary=50, width=8)(spec)
        >>> tuple(module(spec.sample(4, None)).shape)
        (4, 3)
    """
    if not spec.integer or len(spec.shape) != 1:
        kind = "real numbers"
        if spec.integer:
            kind = "whole numbers"
        raise ModelError(
            f"mean_embedding needs sequences of tokens (length,), not {spec.shape} of {kind}; give "
            "the data transform=Integers(), on the command line data.integers=true."
        )
    layers: list[nn.Module] = [MeanEmbedding(vocabulary, width, padding)]
    if hidden is not None:
        layers += [nn.Linear(width, hidden), nn.ReLU()]
    return nn.Sequential(*layers, nn.Linear(hidden or width, spec.outputs))
