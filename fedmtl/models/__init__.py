"""Small networks of the papers, by name.

A factory takes the shape of the data and returns a module, so that a model can be named before the data are read.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import TYPE_CHECKING

from torch import Tensor, nn

from .._check import positive_int
from ..data.transforms import RowBound
from ..errors import ModelError

if TYPE_CHECKING:
    from ..data import DataSpec

ModelFactory = Callable[["DataSpec"], nn.Module]


class BoundedInputs(nn.Module):
    """A model whose inputs are first scaled down to the bound on features that it was trained with.

    Args:
        model: of inputs (N, *shape).
        bound: on the norm of each of them.
    """

    def __init__(self, model: nn.Module, bound: RowBound) -> None:
        super().__init__()
        self.model, self.bound = model, bound

    def forward(self, x: Tensor) -> Tensor:
        outputs: Tensor = self.model(self.bound(x))
        return outputs

    def extra_repr(self) -> str:
        return f"bound={self.bound.bound:g}, norm={self.bound.norm!r}"


def softmax_regression(*, bias: bool = True) -> ModelFactory:
    """Multinomial logistic regression from zero weights (convex, so the start is only a convention)."""

    def build(spec: DataSpec) -> nn.Module:
        linear = nn.Linear(_features(spec), spec.outputs, bias=bias)
        for parameter in linear.parameters():
            nn.init.zeros_(parameter)
        return nn.Sequential(nn.Flatten(), linear)

    return build


def linear_regression(*, bias: bool = True) -> ModelFactory:
    """A linear map to one real number for each target, from zero weights."""

    def build(spec: DataSpec) -> nn.Module:
        linear = nn.Linear(_features(spec), math.prod(spec.targets), bias=bias)
        for parameter in linear.parameters():
            nn.init.zeros_(parameter)
        return nn.Sequential(nn.Flatten(), linear)

    return build


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


def femnist_cnn() -> ModelFactory:
    """The FEMNIST network of Hu et al. 2023: conv5x5-32, pool, conv5x5-64, pool, linear.

    115,646 parameters on 1 x 28 x 28 images with 62 classes: unpadded convolutions leave 64 x 4 x 4 features.
    """

    def build(spec: DataSpec) -> nn.Module:
        if len(spec.shape) != 3 or min(spec.shape[1:]) < 16:
            raise ModelError(
                f"femnist_cnn needs images (channels, height, width) of 16 pixels or more, not {spec.shape}."
            )
        channels, height, width = spec.shape
        side = [((n - 4) // 2 - 4) // 2 for n in (height, width)]
        return nn.Sequential(
            nn.Conv2d(channels, 32, 5),
            nn.ReLU(),
            nn.MaxPool2d(2),
            nn.Conv2d(32, 64, 5),
            nn.ReLU(),
            nn.MaxPool2d(2),
            nn.Flatten(),
            nn.Linear(64 * side[0] * side[1], spec.outputs),
        )

    return build


def _features(spec: DataSpec) -> int:
    return math.prod(spec.shape)
