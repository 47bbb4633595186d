"""Convolutional networks of K copies by batched matrix products, for a GPU: forward and backward
straight from and to their [K, D] rows.

The windows of all images are copied once into the rows of a matrix for each copy, and a convolution
is one batched product of it with the filters; :func:`torch.func.vmap` would make a grouped
convolution of it, with one group for each copy. The gradient by the filters is the product of the
same windows with the signal, and the gradient by the input is a convolution of the padded signal
with the filters turned by half a circle.

The points of :mod:`.toom` save products, at the price of digits and of smaller products. A CPU
gains by that; a GPU has products to spare.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import pad

from .convolutions import Convolution, ConvolutionalNetwork, Tape
from .products import Views, move_along

# numbers in the windows of one convolution: 4 GiB of float32
_LARGEST = 1 << 30


def windows_of(value: Tensor, height: int, width: int) -> Tensor:
    """Returns the windows of images as the rows of a matrix for each copy.

    Args:
        value: images (K, B, H, W, C), of any strides.
        height: of a window, at most H.
        width: of a window, at most W.

    Returns:
        A copy (K, B (H - height + 1) (W - width + 1), height width C).
    """
    copies, batch, tall, broad, channels = value.shape
    high = tall - height + 1
    wide = broad - width + 1
    k, b, h, w, c = value.stride()
    # Views of the images; the reshape copies each window once.
    windows = value.as_strided(
        (copies, batch, high, wide, height, width, channels), (k, b, h, w, h, w, c)
    )
    return windows.reshape(copies, batch * high * wide, height * width * channels)


def _padded(value: Tensor, up: int, left: int) -> Tensor:
    """Returns images (K, B, H, W, C) with zeros around them; with less around them for numbers
    below 0."""
    if up or left:
        return pad(value, (0, 0, left, left, up, up))
    return value


def _forward(stage: Convolution, parameters: Views, value: Tensor) -> Tape:
    """Computes a convolution of images (K, B, H, W, C).

    Returns:
        The tape, with columns (K, B h w, N) and filters (K, N, O), and all other parts as of one
        image (K B H, 1, W, O).
    """
    up, left = stage.padding
    outputs, _, height, width = stage.shape
    value = _padded(value, up, left)
    copies, batch, tall, broad, _ = value.shape
    columns = windows_of(value, height, width)
    # (K, O, C, h, w) -> (K, h w C, O), the order of a window
    filters = parameters[stage.weight].permute(0, 3, 4, 2, 1).reshape(copies, -1, outputs)
    product = torch.bmm(columns, filters)
    # The rows of all images below one another: a pool has an even number of each.
    flat = product.view(copies * batch * (tall - height + 1), 1, broad - width + 1, outputs)
    value, across, down = stage.pooled(flat)
    if stage.bias is not None:
        value.view(copies, -1, outputs).add_(parameters[stage.bias][:, None])
    if stage.function is not None:
        value = stage.function.value(value)
    return Tape(columns, filters, across, down, value)


def _input_gradient(stage: Convolution, filters: Tensor, signal: Tensor) -> Tensor:
    """Returns the gradient by the input (K, B, H, W, C) from that by the product (K, B, h, w, O),
    with the filters (K, N, O) of the forward pass, whose weights may have changed since."""
    up, left = stage.padding
    outputs, inputs, height, width = stage.shape
    copies, batch = signal.shape[:2]
    # Every number of the input was under each place of the filter once.
    signal = _padded(signal, height - 1 - up, width - 1 - left)
    turned = filters.view(copies, height, width, inputs, outputs).flip(1, 2).transpose(3, 4)
    columns = windows_of(signal, height, width)
    gradient = torch.bmm(columns, turned.reshape(copies, -1, inputs))
    tall = signal.shape[2] - height + 1
    return gradient.view(copies, batch, tall, -1, inputs)


@dataclass(frozen=True)
class UnfoldedNetwork:
    """Convolutions, pools and increasing functions, and a perceptron of their outputs, of K copies.

    Its interface is that of :class:`~fedmtl.local.products.Perceptron`.

    Attributes:
        network: the parts, those of a network on a CPU.
    """

    network: ConvolutionalNetwork

    def forward(self, rows: Tensor, x: Tensor) -> list[Any] | None:
        """Returns the intermediate values of the gradients, and last the output (K, B, outputs).

        None for an input that is no batch of images of the right size and dtype, or whose windows
        would take more than 4 GiB in float32.

        Args:
            rows: (K, D).
            x: (K, B, C, H, W).
        """
        stages = self.network.stages
        shape = tuple(x.shape[2:])
        if x.dtype != rows.dtype or not self.network.fits(shape):
            return None
        if math.prod(x.shape[:2]) * self._window_numbers(shape) > _LARGEST:
            return None
        head = self.network.head
        parameters = head.layout.views(rows)
        value = x.permute(0, 1, 3, 4, 2)  # channels last, where the filters add up
        tapes: list[Tape] = []
        for stage in stages:
            tapes.append(_forward(stage, parameters, value))
            flat = tapes[-1].value
            value = flat.view(*x.shape[:2], -1, *flat.shape[2:])
        # nn.Flatten orders an example by channel, height and width.
        vectors = value.permute(0, 1, 4, 2, 3).reshape(*x.shape[:2], -1)
        return [*tapes, *(head.forward(rows, vectors) or [])]

    def _window_numbers(self, shape: tuple[int, ...]) -> int:
        """Returns the most numbers in the windows of one image (C, H, W), of an input or of the
        signal of an output."""
        largest = 0
        size: tuple[int, int] | None = (shape[1], shape[2])
        for stage in self.network.stages:
            assert size is not None  # the network takes the image
            outputs, inputs, height, width = stage.shape
            largest = max(largest, math.prod(size) * height * width * max(inputs, outputs))
            size = stage.size(*size)
        return largest

    def descend(
        self,
        rows: Tensor,
        values: list[Any],
        signal: Tensor,
        target: Tensor,
        *,
        keep: float,
        rate: float,
    ) -> None:
        """Sets ``target`` (K, D) to ``keep * target - rate * gradient``, by all parameters; see
        :meth:`.products.Perceptron.descend`.

        A ``target`` (K B, D) has the gradients of the examples of each copy apart.
        """
        stages = self.network.stages
        head = self.network.head
        tapes = values[: len(stages)]
        values = values[len(stages) :]
        changed = head.layout.views(target)
        copies, batch = signal.shape[:2]
        groups = len(target)  # the windows of a copy, or of an example, add up
        # The head hands down the gradient of its inputs before its weights change.
        below = head.descend(rows, values, signal, target, keep=keep, rate=rate, inward=True)
        flat = tapes[-1].value
        channels = flat.shape[3]
        below = below.view(copies, batch, channels, -1, flat.shape[2]).permute(0, 1, 3, 4, 2)
        for number in reversed(range(len(stages))):
            stage = stages[number]
            tape = tapes[number]
            shifted, above = stage.signals(tape, below.reshape(tape.value.shape))
            outputs, inputs, height, width = stage.shape
            wide = above.shape[2]
            columns = tape.columns.view(groups, -1, tape.columns.shape[2])
            gradient = torch.bmm(columns.mT, above.view(groups, -1, outputs))
            # (groups, h w C, O) -> (groups, O, C, h, w)
            gradient = gradient.view(groups, height, width, inputs, outputs)
            gradient = gradient.permute(0, 4, 3, 1, 2)
            move_along(changed[stage.weight], gradient, keep=keep, rate=rate)
            if stage.bias is not None:
                bias = shifted.view(groups, -1, outputs).sum(1)
                move_along(changed[stage.bias], bias, keep=keep, rate=rate)
            if number:
                images = above.view(copies, batch, -1, wide, outputs)
                below = _input_gradient(stage, tape.filters, images)
