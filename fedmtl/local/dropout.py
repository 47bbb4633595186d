"""Dropout whose mask is a pure function of (seed, layer, client, round, local step, position)."""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn

from ..random import derive_key, keyed_uniform

_GOLDEN = -7046029254386353131  # 0x9E3779B97F4A7C15 as a signed 64-bit number: spreads local steps over keys
_CHANNELWISE = (nn.Dropout1d, nn.Dropout2d, nn.Dropout3d)


class KeyedDropout(nn.Module):
    """Inverted dropout on a counter-based generator; the stacked twin of ``nn.Dropout``.

    The mask does not depend on which clients are computed in one batch, nor on the padding of a batch: element ``j`` of
    example ``i`` of one client has the counter ``(first + i) * numel(example) + j``.

    Args:
        p: probability that an element is zeroed, in ``[0, 1]``.
        key: 64-bit key of this layer.
        channelwise: zero whole channels, like ``nn.Dropout2d``.

    Shape:
        Input (B, ...), output the same. ``address`` is an int64 buffer (3,): client key, round, local step; ``first``,
        an int64 buffer (), numbers the first example of the batch.
    """

    address: Tensor
    first: Tensor

    def __init__(self, p: float, *, key: int, channelwise: bool = False) -> None:
        super().__init__()
        self.p, self.key, self.channelwise = p, key, channelwise
        self.register_buffer("address", torch.zeros(3, dtype=torch.int64), persistent=False)
        self.register_buffer("first", torch.zeros((), dtype=torch.int64), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        if not self.training or self.p == 0.0:
            return x
        shape = (*x.shape[:2], *[1] * (x.dim() - 2)) if self.channelwise else x.shape
        size = math.prod(shape[1:])
        index = torch.arange(shape[0] * size, device=x.device) + self.first * size
        client, step, local = self.address.unbind(-1)
        key = local * _GOLDEN + _signed(self.key)
        stays = keyed_uniform(key, client, step, index).reshape(shape) >= self.p
        return torch.where(stays, x / (1.0 - self.p) if self.p < 1.0 else x, x.new_zeros(()))

    def extra_repr(self) -> str:
        return f"p={self.p}"


def swap_dropout(module: nn.Module, seed: int) -> None:
    """Replace, in place, every ``nn.Dropout``, ``Dropout1d/2d/3d`` by a :class:`KeyedDropout` keyed by its name."""
    for name, child in list(module.named_modules()):
        if isinstance(child, (nn.Dropout, *_CHANNELWISE)) and name:
            parent = module.get_submodule(name.rpartition(".")[0])
            keyed = KeyedDropout(
                child.p, key=derive_key(seed, f"dropout/{name}"), channelwise=isinstance(child, _CHANNELWISE)
            )
            setattr(parent, name.rpartition(".")[2], keyed)


def _signed(key: int) -> int:
    return key - (1 << 64) if key >= 1 << 63 else key
