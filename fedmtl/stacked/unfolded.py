"""Convolutions of stacked copies as one batched product instead of a grouped convolution.

Under :func:`torch.func.vmap` a convolution of K copies with weights of their own is a convolution with K groups, for
which libraries have slow kernels on many devices. Here the windows of the images are copied, as the columns of a
matrix a copy, and the filters are multiplied with it: one batched product forward, and two backward, which use what
makes products fast (TF32, bfloat16). The windows take ``kernel height * kernel width`` times the memory of the images.
"""

from __future__ import annotations

import copy

import torch.nn.functional as F
from torch import Tensor, nn

from .._devices import waits


class UnfoldedConv2d(nn.Conv2d):
    """``nn.Conv2d`` of one group that pads with zeros, by a product of its filters with the windows of its input."""

    def forward(self, x: Tensor) -> Tensor:
        """(B, C, H, W) -> (B, outputs, H', W'); an image alone (C, H, W) -> (outputs, H', W')."""
        if x.dim() == 3:
            return self.forward(x[None])[0]
        heights, widths = (
            (size + 2 * pad - dilation * (kernel - 1) - 1) // stride + 1
            for size, pad, dilation, kernel, stride in zip(
                x.shape[2:], self._pads, self.dilation, self.kernel_size, self.stride, strict=True
            )
        )
        found = self.weight.flatten(1) @ self._columns(x)
        if self.bias is not None:
            found = found + self.bias[:, None]
        return found.view(self.out_channels, len(x), heights, widths).transpose(0, 1)

    def _columns(self, x: Tensor) -> Tensor:
        """(B, C, H, W) -> the windows (C kh kw, B H' W')."""
        if not waits(x.device):
            return F.unfold(x, self.kernel_size, self.dilation, self._pads, self.stride).transpose(0, 1).flatten(1)
        (high, wide), sizes = self._pads, zip(self.kernel_size, self.dilation, self.stride, strict=True)
        x = F.pad(x, (wide, wide, high, high)) if high or wide else x
        for axis, (kernel, dilation, stride) in enumerate(sizes, 2):  # F.unfold has a kernel on a GPU for every image
            x = x.unfold(axis, dilation * (kernel - 1) + 1, stride)
            x = x[..., ::dilation] if dilation > 1 else x
        return x.permute(1, 4, 5, 0, 2, 3).flatten(0, 2).flatten(1)  # from (B, C, H', W', kh, kw), in one copy

    @property
    def _pads(self) -> tuple[int, int]:
        assert not isinstance(self.padding, str)
        return self.padding[0], self.padding[1]


def by_products(module: nn.Module) -> nn.Module:
    """Return a copy of a module, with the same parameters, whose convolutions are batched products; those of several
    groups, with another padding than zeros, or of another dimension stay as they are."""
    found = copy.deepcopy(module, {id(parameter): parameter for parameter in module.parameters()})
    for child in found.modules():
        plain = type(child) is nn.Conv2d and child.groups == 1 and child.padding_mode == "zeros"
        if plain and not isinstance(child.padding, str):
            child.__class__ = UnfoldedConv2d
    return found
