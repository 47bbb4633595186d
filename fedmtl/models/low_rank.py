"""Low-rank adapters: a frozen layer plus a product of two small matrices, and only the product is
trained.

Hu et al.: "LoRA: Low-Rank Adaptation of Large Language Models", ICLR 2022:

    h = W x + b + (alpha / rank) B A x        with W (o, i) frozen, A (rank, i), B (o, rank)

B is 0 at the start, so that the adapted model is the given one. A and B keep the name of their
layer and are called ``lora_A`` and ``lora_B``; names in settings, such as ``"*.lora_B"``, choose
among them. Noise that is added to both A and B is multiplied in their product; Sun et al.,
"Improving LoRA in Privacy-preserving Federated Learning" (FFA-LoRA), ICLR 2024, therefore train
only B and leave A at its random start: ``trainable=("*.lora_B",)``.

If K clients have adapters of their own, their layer is one product with the shared W and two
batched products with the rows of A and B; no (K, o, i) weight is ever made.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Iterator, Sequence
from functools import partial
from typing import cast

import torch.nn.functional as F
from torch import Tensor, nn

from .._check import Count, Positive, check_arguments
from ..errors import ConfigError
from ..local import named_by
from .networks import Model, transformed


class _LowRank(nn.Module):
    """The common part of adapted layers: the two factors and their scale, beside the parameters of
    the plain layer."""

    plain: type[nn.Module]
    lora_A: nn.Parameter
    lora_B: nn.Parameter
    rank: int
    scale: float

    @staticmethod
    def factors(layer: nn.Module, rank: int) -> tuple[Tensor, Tensor]:
        """Returns A and B at the start, for a plain layer: random, and 0."""
        raise NotImplementedError

    def increment(self) -> Tensor:
        """Returns the low-rank change of the weight, in its shape."""
        raise NotImplementedError

    def extra_repr(self) -> str:
        return f"{super().extra_repr()}, rank={self.rank}, scale={self.scale:g}"


class LowRankLinear(_LowRank, nn.Linear):
    """A linear layer with A (rank, i) and B (o, rank).

    Shape:
        (..., i) -> (..., o).
    """

    plain = nn.Linear

    @staticmethod
    def factors(layer: nn.Module, rank: int) -> tuple[Tensor, Tensor]:
        weight = cast(nn.Linear, layer).weight
        return _uniform(weight.new_empty(rank, weight.shape[1])), weight.new_zeros(
            weight.shape[0], rank
        )

    def forward(self, x: Tensor) -> Tensor:
        low = F.linear(F.linear(x, self.lora_A), self.lora_B)
        return F.linear(x, self.weight, self.bias) + self.scale * low

    def increment(self) -> Tensor:
        return self.scale * (self.lora_B @ self.lora_A)


class LowRankConv2d(_LowRank, nn.Conv2d):
    """A convolution with A, one of the same window to ``rank`` channels (a group), and B, one of 1
    x 1 from them.

    Shape:
        (B, i, height, width) -> (B, o, height', width'); A (groups * rank, i / groups, *kernel), B
        (o, rank, 1, 1).
    """

    plain = nn.Conv2d

    @staticmethod
    def factors(layer: nn.Module, rank: int) -> tuple[Tensor, Tensor]:
        convolution = cast(nn.Conv2d, layer)
        weight = convolution.weight
        groups = convolution.groups
        a = _uniform(weight.new_empty(groups * rank, *weight.shape[1:]))
        return a, weight.new_zeros(weight.shape[0], rank, 1, 1)

    def forward(self, x: Tensor) -> Tensor:
        low = F.conv2d(self._conv_forward(x, self.lora_A, None), self.lora_B, groups=self.groups)
        return self._conv_forward(x, self.weight, self.bias) + self.scale * low

    def increment(self) -> Tensor:
        a = self.lora_A.reshape(self.groups, self.rank, -1)
        b = self.lora_B.reshape(self.groups, -1, self.rank)
        return self.scale * (b @ a).reshape(self.weight.shape)


class LowRankEmbedding(_LowRank, nn.Embedding):
    """An embedding with A (rank, tokens), whose column of the padding is 0 at the start, and B
    (width, rank).

    Shape:
        int64 (...) -> (..., width).
    """

    plain = nn.Embedding

    @staticmethod
    def factors(layer: nn.Module, rank: int) -> tuple[Tensor, Tensor]:
        embedding = cast(nn.Embedding, layer)
        a = nn.init.normal_(embedding.weight.new_empty(rank, embedding.num_embeddings))
        if embedding.padding_idx is not None:
            # Padding has no embedding, and no increment of one.
            a[:, embedding.padding_idx] = 0.0
        return a, embedding.weight.new_zeros(embedding.embedding_dim, rank)

    def forward(self, x: Tensor) -> Tensor:
        low = F.linear(F.embedding(x, self.lora_A.T, self.padding_idx), self.lora_B)
        return F.embedding(x, self.weight, self.padding_idx) + self.scale * low

    def increment(self) -> Tensor:
        return self.scale * (self.lora_B @ self.lora_A).T


_ADAPTED: dict[type[nn.Module], type[_LowRank]] = {
    kind.plain: kind for kind in (LowRankLinear, LowRankConv2d, LowRankEmbedding)
}


@check_arguments
def lora(
    model: Model, *, rank: Count = 4, alpha: Positive | None = None, targets: Sequence[str] = ("*",)
) -> Model:
    """Returns the model, or the factory of it, with low-rank adapters, and everything else of it
    frozen.

    Its outputs are at first those of the given model, which is not changed. ``trainable`` of
    :class:`fedmtl.Trainer` can choose among the adapters (``("*.lora_B",)``), or let layers without
    one move beside them (``("*.lora_*", "head")``).

    Args:
        model: a module, or a factory such as ``models.mlp()``. The random A of a module are drawn
            by PyTorch's global generator, those of a factory with the start of the run, by its
            seed.
        rank: of every product.
        alpha: the products are multiplied by ``alpha / rank``; None for ``rank``, a factor of 1.
        targets: names of the layers that get one, or of modules that hold them; ``*``, ``?`` and
            ``[...]`` match as in names of files. Among them ``torch.nn.Linear``, ``Conv2d`` and
            ``Embedding`` are adapted; subclasses, and layers with hooks or parametrizations, stay
            as they are.

    Raises:
        ConfigError: a value outside these ranges, a name without such a layer, or a rank that is no
            less than the smaller side of any layer's weight, so that nothing were low; for a
            factory, when the model is built.

    Example:
        >>> from torch import nn
        >>> from fedmtl.models import lora
        >>> adapted = lora(nn.Sequential(nn.Linear(100, 10)), rank=2)
        >>> sum(p.numel() for p in adapted.parameters() if p.requires_grad)
        220
    """
    scale = 1.0
    if alpha is not None:
        scale = alpha / rank
    adapt = partial(_adapt, rank=rank, scale=scale, targets=targets)
    result: Model = transformed("lora", adapt, model, rank=rank, alpha=alpha, targets=targets)
    return result


def merge_lora(model: nn.Module) -> nn.Module:
    """Returns a copy with plain layers and the same outputs: every weight W becomes W + (alpha /
    rank) B A.

    All its parameters can be trained again.

    Args:
        model: from :func:`lora`, such as a personal model of a result.

    Raises:
        ConfigError: a model without adapters.

    Example:
        >>> import torch
        >>> from fedmtl import models
        >>> from fedmtl.data import DataSpec
        >>> spec = DataSpec(shape=(5,), classes=3, clients=2)
        >>> adapted = models.lora(models.mlp(hidden=4), rank=2)(spec)
        >>> x = torch.ones(2, 5)
        >>> torch.allclose(models.merge_lora(adapted)(x), adapted(x))
        True
    """
    merged = copy.deepcopy(model)
    adapted = [child for child in merged.modules() if isinstance(child, _LowRank)]
    if not adapted:
        raise ConfigError("merge_lora: the model has no adapters of fedmtl.models.lora.")
    for layer in adapted:
        layer.weight = nn.Parameter((cast(Tensor, layer.weight) + layer.increment()).detach())
        # Back to the plain class, without the attributes of the adapter.
        layer.__class__ = layer.plain  # type: ignore[assignment]
        for name in ("lora_A", "lora_B", "rank", "scale"):
            delattr(layer, name)
    return merged.requires_grad_(True)


def _adapt(model: nn.Module, rank: int, scale: float, targets: Sequence[str]) -> nn.Module:
    """Adapts the chosen layers in place: they keep their tensors and settings under a class with
    two factors."""
    # Listed before the first change: an adapted layer is not adapted again.
    layers = list(_layers(model))
    kinds = "linear, convolutional or embedding layer"
    is_named = named_by(targets, [[name] for name, _ in layers], "lora.targets", kinds)
    chosen = dict.fromkeys(
        layer for (_, layer), named in zip(layers, is_named, strict=True) if named
    )
    weights = [cast(Tensor, layer.weight) for layer in chosen]
    largest = max(min(weight.shape[0], weight[0].numel()) for weight in weights)
    if rank > largest:
        raise ConfigError(
            f"lora.rank is {rank}, but the weights it applies to have ranks up to {largest}; give "
            f"{largest} or less."
        )
    # The adapters are the only parameters that train.
    model.requires_grad_(False)
    for layer in chosen:
        low_rank_class = _ADAPTED[type(layer)]
        a, b = low_rank_class.factors(layer, rank)
        # The class changes and the tensors stay, so tied layers and names stay too.
        layer.__class__ = low_rank_class
        low = cast(_LowRank, layer)
        low.rank = rank
        low.scale = scale
        low.lora_A = nn.Parameter(a)
        low.lora_B = nn.Parameter(b)
    for parent in model.modules():
        if isinstance(parent, nn.TransformerEncoderLayer):
            # else evaluation reads the weights of its layers and calls none
            parent.activation_relu_or_gelu = 0
    return model


def _layers(model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """Returns the layers that can be adapted, by every name they have."""
    for name, child in model.named_modules(remove_duplicate=False):
        hooked = child._forward_hooks or child._forward_pre_hooks or child._backward_hooks
        # A hook or a parametrization may read the weight that the adapter changes.
        if type(child) in _ADAPTED and not hooked and getattr(child, "weight", None) is not None:
            yield name, child


def _uniform(tensor: Tensor) -> Tensor:
    """Fills as PyTorch fills a layer's weight: uniform numbers up to 1 / sqrt(fan-in)."""
    return nn.init.kaiming_uniform_(tensor, a=math.sqrt(5))
