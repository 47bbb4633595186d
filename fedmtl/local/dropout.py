"""Dropout with addressed masks: the same for a record whatever else its batch holds, and free of
any generator."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor, nn

from ..random import derive_key, keyed_uniform

# 0x9E3779B97F4A7C15 as a signed 64-bit number: spreads local steps over keys
_GOLDEN = -7046029254386353131
# 0xD1B54A32D192ED03 likewise: spreads the calls of one layer in a forward pass
_CALL = -3335678366873096957
_WORD = 1 << 64
_PLAIN = (nn.Dropout.forward,)
_CHANNELWISE = (nn.Dropout1d.forward, nn.Dropout2d.forward, nn.Dropout3d.forward)


def _signed(number: int) -> int:
    """Returns ``number`` modulo 2^64 as a signed 64-bit number."""
    number %= _WORD
    if number >= _WORD // 2:
        return number - _WORD
    return number


class KeyedDropout(nn.Module):
    """Applies inverted dropout by a counter-based generator, as the stacked twin of ``nn.Dropout``.

    The mask depends neither on the clients that are computed in one batch nor on the padding of a
    batch: element ``j`` of example ``i`` of one client has the counter
    ``(first + i) * numel(example) + j``. A layer that a forward pass calls several times has other
    masks each time.

    Args:
        p: probability that an element is zeroed, in ``[0, 1]``.
        key: 64-bit key of this layer.
        channelwise: zero whole channels, like ``nn.Dropout2d``.

    Shape:
        Input (B, ...), output the same. ``address`` is an int64 buffer (3,): client key, round,
        local step. ``first``, an int64 buffer (), numbers the first example of the batch.
    """

    address: Tensor
    first: Tensor

    def __init__(self, p: float, *, key: int, channelwise: bool = False) -> None:
        super().__init__()
        self.p = p
        self.key = _signed(key)
        self.channelwise = channelwise
        self.calls = 0
        self.register_buffer("address", torch.zeros(3, dtype=torch.int64), persistent=False)
        self.register_buffer("first", torch.zeros((), dtype=torch.int64), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        if not self.training or self.p == 0.0:
            return x
        shape = tuple(x.shape)
        if self.channelwise:
            shape = (*x.shape[:2], *[1] * (x.dim() - 2))
        size = math.prod(shape[1:])
        index = torch.arange(shape[0] * size, device=x.device) + self.first * size
        client, step, local = self.address.unbind(-1)
        key = local * _GOLDEN + _signed(self.key + self.calls * _CALL)
        self.calls += 1
        stays = keyed_uniform(key, client, step, index).reshape(shape) >= self.p
        zero = x.new_zeros(())
        if self.p == 1.0:
            return torch.where(stays, x, zero)
        return torch.where(stays, x / (1.0 - self.p), zero)

    def extra_repr(self) -> str:
        return f"p={self.p}"


def swap_dropout(module: nn.Module, seed: int) -> None:
    """Replaces, in place, every ``nn.Dropout``, ``Dropout1d/2d/3d`` by a :class:`KeyedDropout`.

    The key of a layer derives from ``seed`` and its name. Subclasses with a forward of their own
    stay as they are.

    Args:
        module: with layers below it; a module that is itself a dropout layer has no place for
            another.
        seed: of the run.
    """
    for name, child in list(module.named_modules(remove_duplicate=False)):
        forward = type(child).forward
        channelwise = forward in _CHANNELWISE
        if not name or not (channelwise or forward in _PLAIN):
            continue
        parent_name, _, attribute = name.rpartition(".")
        parent = module.get_submodule(parent_name)
        # reached by another name of the parent
        if isinstance(getattr(parent, attribute), KeyedDropout):
            continue
        key = derive_key(seed, f"dropout/{name}")
        setattr(parent, attribute, KeyedDropout(child.p, key=key, channelwise=channelwise))
    keyed = any(isinstance(child, KeyedDropout) for child in module.modules())
    if keyed and _restart not in module._forward_pre_hooks.values():
        module.register_forward_pre_hook(_restart)


def _restart(module: nn.Module, _: Any) -> None:
    """Sets the counts of calls to zero, before each forward pass of the whole module."""
    for child in module.modules():
        if isinstance(child, KeyedDropout):
            child.calls = 0
