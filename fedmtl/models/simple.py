"""Linear models and perceptrons, of features of any shape."""

from __future__ import annotations

import math

from torch import nn

from .._check import Count
from ..data.examples import DataSpec
from ..errors import ModelError
from .factory import factory


@factory()
def softmax_regression(spec: DataSpec, *, bias: bool = True) -> nn.Module:
    """Multinomial logistic regression from zero weights (convex, so the start is only a convention)."""
    return _linear(spec, spec.outputs, bias)


@factory()
def linear_regression(spec: DataSpec, *, bias: bool = True) -> nn.Module:
    """A linear map to one real number for each target, from zero weights."""
    return _linear(spec, math.prod(spec.targets), bias)


@factory()
def logistic_regression(spec: DataSpec, *, bias: bool = True) -> nn.Module:
    """Logistic regression from zero weights: one logit for two classes, or one for each label of an example.

    With 500 tags on 10,000 tokens, the StackOverflow model of Hu et al. 2023. More than two classes are for
    :func:`softmax_regression`.
    """
    if spec.classes != 2:
        raise ModelError(
            f"logistic_regression is for 2 classes or several labels, not {spec.classes}; use softmax_regression."
        )
    return _linear(spec, math.prod(spec.targets), bias)


@factory()
def mlp(spec: DataSpec, *, hidden: Count = 64, layers: Count = 1, dropout: float = 0.0) -> nn.Module:
    """A perceptron with ``layers`` hidden layers of ``hidden`` rectified units."""
    blocks: list[nn.Module] = [nn.Flatten()]
    width = math.prod(spec.shape)
    for _ in range(layers):
        blocks += [nn.Linear(width, hidden), nn.ReLU()]
        if dropout > 0.0:
            blocks.append(nn.Dropout(dropout))
        width = hidden
    return nn.Sequential(*blocks, nn.Linear(width, spec.outputs))


def _linear(spec: DataSpec, outputs: int, bias: bool) -> nn.Module:
    """Return a linear map of the features, from zero weights."""
    linear = nn.Linear(math.prod(spec.shape), outputs, bias=bias)
    for parameter in linear.parameters():
        nn.init.zeros_(parameter)
    return nn.Sequential(nn.Flatten(), linear)
