"""The same functions by faster kernels of PyTorch: what a CPU's convolutional networks spend their time on, apart from
the convolutions themselves."""

from __future__ import annotations

import torch
from torch import Tensor, nn

_VECTOR = 8  # channels from which a kernel that goes along them is worth the change of layout


class ChannelsLastPool(nn.MaxPool2d):
    """``nn.MaxPool2d`` whose kernel goes along the channels: on a CPU that is vectorized, and the other is not.

    The values are the same; they come with the channels last in memory, as convolutions take them too. Within
    a transform of :mod:`torch.func` it is the ordinary one.
    """

    def forward(self, x: Tensor) -> Tensor:
        transformed = torch._C._functorch.peek_interpreter_stack() is not None
        if x.dim() == 4 and x.shape[1] >= _VECTOR and x.device.type == "cpu" and not transformed:
            x = x.contiguous(memory_format=torch.channels_last)
        return super().forward(x)


def use_fast_kernels(module: nn.Module) -> nn.Module:
    """Replace, in place, max-pooling by :class:`ChannelsLastPool`, and let it go before a rectifier that it follows in
    an ``nn.Sequential``, which then has less to do: the maximum of what is cut off at 0 is the maximum, cut off at 0.

    Modules with hooks stay as they are.
    """
    for parent in list(module.modules()):
        for name, child in list(parent.named_children()):
            if type(child) is nn.MaxPool2d and not hooked(child):
                setattr(parent, name, _fast(child))
        if type(parent) is nn.Sequential and not hooked(parent):
            for place in range(len(parent) - 1):
                first, second = parent[place], parent[place + 1]
                rectified = type(first) is nn.ReLU and not hooked(first)
                if rectified and type(second) is ChannelsLastPool and not second.return_indices:
                    parent[place], parent[place + 1] = second, first
    return module


def _fast(pool: nn.MaxPool2d) -> ChannelsLastPool:
    return ChannelsLastPool(
        pool.kernel_size, pool.stride, pool.padding, pool.dilation, pool.return_indices, pool.ceil_mode
    )


def hooked(module: nn.Module) -> bool:
    """Return whether a module does more than its ``forward``."""
    return any((module._forward_hooks, module._forward_pre_hooks, module._backward_hooks, module._backward_pre_hooks))
