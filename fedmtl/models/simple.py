"""Linear models and perceptrons, of features of any shape."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

from torch import nn

from .._check import positive_int
from ..errors import ModelError
from .factory import ModelFactory, named

if TYPE_CHECKING:
    from ..data import DataSpec


@named
def softmax_regression(*, bias: bool = True) -> ModelFactory:
    """Multinomial logistic regression from zero weights (convex, so the start is only a convention)."""

    def build(spec: DataSpec) -> nn.Module:
        linear = nn.Linear(_features(spec), spec.outputs, bias=bias)
        for parameter in linear.parameters():
            nn.init.zeros_(parameter)
        return nn.Sequential(nn.Flatten(), linear)

    return build


@named
def linear_regression(*, bias: bool = True) -> ModelFactory:
    """A linear map to one real number for each target, from zero weights."""

    def build(spec: DataSpec) -> nn.Module:
        linear = nn.Linear(_features(spec), math.prod(spec.targets), bias=bias)
        for parameter in linear.parameters():
            nn.init.zeros_(parameter)
        return nn.Sequential(nn.Flatten(), linear)

    return build


@named
def logistic_regression(*, bias: bool = True) -> ModelFactory:
    """Logistic regression from zero weights: one logit for two classes, or one for each label of an example.

    With 500 tags on 10,000 tokens, the StackOverflow model of Hu et al. 2023. More than two classes are for
    :func:`softmax_regression`.
    """

    def build(spec: DataSpec) -> nn.Module:
        if spec.classes != 2:
            raise ModelError(
                f"logistic_regression is for 2 classes or several labels, not {spec.classes}; use softmax_regression."
            )
        linear = nn.Linear(_features(spec), math.prod(spec.targets), bias=bias)
        for parameter in linear.parameters():
            nn.init.zeros_(parameter)
        return nn.Sequential(nn.Flatten(), linear)

    return build


@named
def mlp(*, hidden: int = 64, layers: int = 1, dropout: float = 0.0) -> ModelFactory:
    """A perceptron with ``layers`` hidden layers of ``hidden`` rectified units."""
    positive_int("mlp", hidden=hidden, layers=layers)

    def build(spec: DataSpec) -> nn.Module:
        blocks: list[nn.Module] = [nn.Flatten()]
        width = _features(spec)
        for _ in range(layers):
            blocks += [nn.Linear(width, hidden), nn.ReLU()]
            if dropout > 0.0:
                blocks.append(nn.Dropout(dropout))
            width = hidden
        return nn.Sequential(*blocks, nn.Linear(width, spec.outputs))

    return build


def _features(spec: DataSpec) -> int:
    return math.prod(spec.shape)
