"""Models of tokens: whole numbers that stand for words or characters."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from .._check import Count
from ..data.examples import DataSpec
from ..errors import ModelError
from .factory import factory


class MeanEmbedding(nn.Module):
    """The mean of the embeddings of an example's tokens, without padding.

    Args:
        vocabulary: tokens are in ``0 .. vocabulary - 1``.
        width: of an embedding.
        padding: the token that fills up short examples, whose embedding is not used; None for none.

    Shape:
        int64 (B, tokens) -> (B, width); zero for an example of only padding.
    """

    def __init__(self, vocabulary: int, width: int, padding: int | None) -> None:
        super().__init__()
        self.embedding = nn.Embedding(vocabulary, width)
        self.padding = padding

    def forward(self, x: Tensor) -> Tensor:
        values = self.embedding(x)
        if self.padding is None:
            return values.mean(1)
        present = (x != self.padding).to(values.dtype)[..., None]
        return torch.sum(values * present, 1) / present.sum(1).clamp(min=1.0)


@factory()
def mean_embedding(
    spec: DataSpec, *, vocabulary: Count, width: Count = 64, hidden: Count | None = None, padding: int | None = 0
) -> nn.Module:
    """Return a classifier of sequences of tokens by the mean of their embeddings.

    The data keep their features as whole numbers with ``transform=Integers()``.

    Args:
        spec: the shape of the data.
        vocabulary: tokens are in ``0 .. vocabulary - 1``.
        width: of an embedding.
        hidden: rectified units between the mean and the outputs; None for none.
        padding: the token that fills up short sequences; None for none.
    """
    if not spec.integer or len(spec.shape) != 1:
        kind = "whole numbers" if spec.integer else "real numbers"
        raise ModelError(
            f"mean_embedding needs sequences of tokens (length,), not {spec.shape} of {kind}; give the data "
            "transform=Integers(), on the command line data.integers=true."
        )
    layers: list[nn.Module] = [MeanEmbedding(vocabulary, width, padding)]
    if hidden is not None:
        layers += [nn.Linear(width, hidden), nn.ReLU()]
    return nn.Sequential(*layers, nn.Linear(hidden or width, spec.outputs))
