"""Convolutional networks of one copy by matrix products: forward and backward straight from and to
its row.

Activations are ordered (height, batch, width, channels). Along the width a filter's windows, copied
once, are the rows of a matrix. Along the height a convolution is a product of polynomials, which
the algorithm of Toom and Cook computes from its values at a few points, as Winograd's convolution
does in two dimensions: four heights of the output by ``size + 3`` products instead of ``4 size``.
Both derivatives are computed at the same points, from the same windows and filters. The points 0,
1, -1, 2, -2, 1/2, -1/2 and infinity make the rounding error of outputs and input gradients three to
five times that of a direct sum.
"""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.functional import pad

from .products import FUNCTIONS, Function, Perceptron, Views, flat_parts, move_along, names_of
from .toom import _POINTS, Toom

if TYPE_CHECKING:
    from .layout import Layout

# numbers of a convolution of one image: beyond it memory takes the time, and libraries use less
_LARGEST = 1 << 16


class Tape(NamedTuple):
    """The values of a forward pass that the gradients of a convolution need.

    Attributes:
        columns: the windows of its input: of the first one (C h w, H B W), later at each point (P,
            T B W, w C), where T tiles make the height.
        filters: the weights at each point (P, O, w C); of the first one the columns.
        across: of a pool, how much the right of two neighbours is larger, (H, B W / 2, O).
        down: and then the lower, (H / 2, B W / 2, O).
        value: the output (H, B, W, O).
    """

    columns: Tensor
    filters: Tensor
    across: Tensor
    down: Tensor
    value: Tensor


@dataclass(frozen=True)
class Convolution:
    """A convolution, a pool of 2 x 2 after it, and an increasing function, which may stand before
    the pool as well.

    Attributes:
        weight: name of the weight.
        bias: name of the bias (outputs,); None without one.
        shape: of the weight, (outputs, inputs, height, width).
        padding: zeros on either side, of height and width.
        pools: True if there is the pool.
        function: the elementwise function; None without one.
    """

    weight: str
    bias: str | None
    shape: tuple[int, int, int, int]
    padding: tuple[int, int]
    pools: bool = False
    function: Function | None = None

    def size(self, height: int, width: int) -> tuple[int, int] | None:
        """Returns height and width of the output for those of the input; None if there is none,
        or a pool leaves something over."""
        sides = (height, width)
        high, wide = (
            n + 2 * p - k + 1 for n, p, k in zip(sides, self.padding, self.shape[2:], strict=True)
        )
        if min(high, wide) < 1 or (self.pools and (high % 2 or wide % 2)):
            return None
        if self.pools:
            return high // 2, wide // 2
        return high, wide

    def of_images(self, parameters: Views, x: Tensor) -> Tape:
        """Computes the first convolution, of images (B, C, H, W)."""
        up, left = self.padding
        outputs, inputs, height, width = self.shape
        # The same zeros on both sides, as PyTorch pads.
        if up or left:
            x = pad(x, (left, left, up, up))
        batch = len(x)
        high = x.shape[2] - height + 1
        wide = x.shape[3] - width + 1
        b, c, h, w = x.stride()
        # Views of the input; the reshape copies each window once.
        windows = x.as_strided((inputs, height, width, high, batch, wide), (c, h, w, h, b, w))
        columns = windows.reshape(inputs * height * width, high * batch * wide)
        product = torch.mm(columns.T, parameters[self.weight].view(outputs, -1).T)
        return self.finished(parameters, columns, columns, product.view(high, batch, wide, outputs))

    def of_values(self, parameters: Views, value: Tensor) -> Tape:
        """Computes a later convolution, of (H, B, W, C), contiguous."""
        up, left = self.padding
        outputs, inputs, height, width = self.shape
        toom = Toom.of(height, value.dtype)
        points = toom.points
        tile = toom.tile
        batch = value.shape[1]
        high = value.shape[0] + 2 * up - height + 1
        wide = value.shape[2] + 2 * left - width + 1
        tiles = -(-high // tile)
        down = up + tiles * tile - high
        if left or up or down:
            value = pad(value, (0, 0, left, left, 0, 0, up, down))
        broad = value.shape[2] * inputs
        long = batch * broad
        heights = value.as_strided((tiles, points, long), (tile * long, long, 1))
        # The input at the points, for all tiles at once.
        lines = torch.bmm(toom.d.expand(tiles, -1, -1), heights)  # (T, P, B W C)
        columns = lines.as_strided(
            (points, tiles, batch, wide, width * inputs), (long, points * long, broad, inputs, 1)
        )
        columns = columns.reshape(points, -1, width * inputs)
        filters = parameters[self.weight].permute(2, 0, 3, 1).reshape(height, -1)
        filters = torch.mm(toom.g, filters).view(points, outputs, -1)
        # One matrix product for each point: this is where the time goes.
        products = torch.bmm(columns, filters.mT).view(points, tiles, -1)
        product = torch.bmm(toom.a.mT.expand(tiles, -1, -1), products.transpose(0, 1))
        return self.finished(
            parameters, columns, filters, product.view(-1, batch, wide, outputs)[:high]
        )

    def pooled(self, product: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Returns the largest values of windows of 2 x 2 of a product (H, B, W, O), and ``across``
        and ``down`` of the tape; the product itself without a pool, where nothing reads these.

        If several are equal, the first of a window is the largest, as in PyTorch.
        """
        if not self.pools:
            return product, product, product
        high, batch, wide, outputs = product.shape
        left, right = product.view(high, -1, 2, outputs).unbind(2)
        upper, lower = torch.maximum(left, right).view(high // 2, 2, -1, outputs).unbind(1)
        value = torch.maximum(upper, lower).view(high // 2, batch, wide // 2, outputs)
        return value, right - left, lower - upper

    def finished(
        self, parameters: Views, columns: Tensor, filters: Tensor, product: Tensor
    ) -> Tape:
        """Returns the layer's values from its product: pooled, with the bias, under the function.

        In this order there is least to do, and the values are the same.

        Args:
            parameters: of the copy.
            columns: remembered for the gradient.
            filters: remembered for the gradient.
            product: (H, B, W, O), overwritten.
        """
        value, across, down = self.pooled(product)
        if self.bias is not None:
            value = value.add_(parameters[self.bias])
        if self.function is not None:
            value = self.function.value(value)
        return Tape(columns, filters, across, down, value)

    def signals(self, tape: Tape, signal: Tensor) -> tuple[Tensor, Tensor]:
        """Returns the gradients of the loss by the values before the function, of the shape of the
        output, and by the product, (H, B, W, O), from the gradient by the output. With a pool the
        output has half the height and half the width of the product."""
        if self.function is not None:
            signal = self.function.slope(signal, tape.value)
        if not self.pools:
            return signal, signal
        high, batch, wide, outputs = signal.shape
        rows = _spread(signal.view(high, -1, outputs), tape.down, 1)
        above = _spread(rows.view(2 * high, -1, outputs), tape.across, 2)
        return signal, above.view(2 * high, batch, 2 * wide, outputs)

    def at_points(self, signal: Tensor) -> Tensor:
        """Returns the gradient by a later convolution's product, (H, B, W, O), at the points, (P, T
        B W, O)."""
        toom = Toom.of(self.shape[2], signal.dtype)
        high, _, _, outputs = signal.shape
        tiles = -(-high // toom.tile)
        missing = tiles * toom.tile - high
        if missing:
            signal = pad(signal, (0, 0, 0, 0, 0, 0, 0, missing))
        signal = signal.view(tiles, toom.tile, -1)
        points = signal.new_empty(toom.points, tiles, signal.shape[2])
        torch.bmm(toom.a.expand(tiles, -1, -1), signal, out=points.transpose(0, 1))
        return points.view(toom.points, -1, outputs)

    def weight_gradient(self, tape: Tape, signal: Tensor) -> Tensor:
        """Returns the gradient by the weight of a later convolution from that at the points."""
        gradient = torch.bmm(signal.mT, tape.columns).view(signal.shape[0], -1)
        # (h, O, w, C)
        gradient = torch.mm(Toom.of(self.shape[2], signal.dtype).g.T, gradient).view(-1)
        return gradient.index_select(0, _order(self.shape)).view(self.shape)

    def input_gradient(self, tape: Tape, signal: Tensor) -> Tensor:
        """Returns the gradient by the input of a later convolution, (H, B, W, C), from that at the
        points."""
        up, left = self.padding
        _, inputs, height, width = self.shape
        toom = Toom.of(height, signal.dtype)
        high, batch, wide, _ = tape.value.shape
        if self.pools:  # the product is twice as high and wide as the output
            high = 2 * high
            wide = 2 * wide
        tiles = -(-high // toom.tile)
        broad = wide + width - 1
        # The transposed product, from outputs back to windows.
        windows = torch.bmm(signal, tape.filters).view(-1, batch, wide, width, inputs)
        lines = signal.new_zeros(toom.points * tiles, batch, broad, inputs)
        # Windows overlap, so their gradients add up where they do.
        for j in range(width):
            lines.narrow(2, j, wide).add_(windows.select(3, j))
        lines = lines.view(toom.points, tiles, -1)
        gradient = signal.new_zeros(tiles * toom.tile + height - 1, batch, broad, inputs)
        for t in range(tiles):
            gradient.narrow(0, t * toom.tile, toom.points).view(toom.points, -1).addmm_(
                toom.d.T, lines.select(1, t)
            )
        return (
            gradient.narrow(0, up, high + height - 1 - 2 * up)
            .narrow(2, left, broad - 2 * left)
            .contiguous()
        )


@dataclass(frozen=True)
class ConvolutionalNetwork:
    """Convolutions, pools and increasing functions, and a perceptron of their outputs.

    Its interface is that of :class:`~fedmtl.local.products.Perceptron`, of one copy on a CPU.

    Attributes:
        stages: the convolutions, in the order of computation.
        head: the perceptron.
    """

    stages: tuple[Convolution, ...]
    head: Perceptron

    @classmethod
    def of(cls, module: nn.Module, layout: Layout) -> ConvolutionalNetwork | None:
        """Returns the network that a module computes in training mode; None if it is no such
        network, or if a parameter is frozen, occurs twice, or has a hook."""
        parts = flat_parts(module, (nn.Conv2d, nn.MaxPool2d))
        names = names_of(module, layout)
        if parts is None or names is None:
            return None
        flat = next((k for k, part in enumerate(parts) if type(part) is nn.Flatten), 0)
        stages: list[Convolution] = []
        for part in parts[:flat]:
            last: Convolution | None = None
            if stages:
                last = stages[-1]
            if type(part) is nn.Conv2d and _plain(part):
                bias = None
                if part.bias is not None:
                    bias = names[id(part.bias)]
                sides: Any = tuple(part.weight.shape)
                padding: Any = part.padding  # two numbers, as the layer is plain
                stages.append(Convolution(names[id(part.weight)], bias, sides, padding))
            elif (
                type(part) is nn.MaxPool2d and last is not None and not last.pools and _halves(part)
            ):
                stages[-1] = replace(last, pools=True)
            elif type(part) in FUNCTIONS and last is not None and last.function is None:
                stages[-1] = replace(last, function=FUNCTIONS[type(part)])
            else:
                return None
        head = Perceptron.of_parts(parts[flat + 1 :], names, layout)
        has_points = all(stage.shape[2] <= len(_POINTS) + 1 for stage in stages[1:])
        if head is None or not stages or not has_points:
            return None
        return cls(tuple(stages), head)

    def fits(self, shape: tuple[int, ...], largest: float = math.inf) -> bool:
        """Returns true for images (C, H, W) that the stages take one after another, none of which
        makes more than ``largest`` numbers of an image."""
        if len(shape) != 3:
            return False
        channels = shape[0]
        size = (shape[1], shape[2])
        for stage in self.stages:
            if stage.shape[1] != channels:
                return False
            after = stage.size(*size)
            if after is None:
                return False
            channels = stage.shape[0]
            size = after
            numbers = channels * size[0] * size[1]
            if stage.pools:  # the convolution before the pool has four times as many
                numbers *= 4
            if numbers > largest:
                return False
        return channels * size[0] * size[1] == self.head.layers[0].inputs

    def forward(self, rows: Tensor, x: Tensor) -> list[Any] | None:
        """Returns the intermediate values of the gradients, and last the output (1, B, outputs).

        None for several copies, and for an input that is no batch of images of the right size and
        dtype.
        """
        if (
            rows.shape[0] > 1
            or x.dtype != rows.dtype
            or not self.fits(tuple(x.shape[2:]), _LARGEST)
        ):
            return None
        parameters = self.head.layout.views(rows[0])
        tapes = [self.stages[0].of_images(parameters, x[0])]
        for stage in self.stages[1:]:
            tapes.append(stage.of_values(parameters, tapes[-1].value))
        # nn.Flatten orders an example by channel, height and width.
        vectors = tapes[-1].value.permute(1, 3, 0, 2).reshape(1, x.shape[1], -1)
        return [*tapes, *(self.head.forward(rows, vectors) or [])]

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
        """Sets ``target`` (1, D) to ``keep * target - rate * gradient``, by all parameters; see
        :meth:`.products.Perceptron.descend`."""
        tapes = values[: len(self.stages)]
        values = values[len(self.stages) :]
        changed = self.head.layout.views(target[0])
        high, batch, wide, channels = tapes[-1].value.shape
        # The head hands down the gradient of its inputs before its weights change.
        below = self.head.descend(rows, values, signal, target, keep=keep, rate=rate, inward=True)
        below = below.view(batch, channels, high, wide).permute(2, 0, 3, 1).contiguous()
        for number in reversed(range(len(self.stages))):
            stage = self.stages[number]
            tape = tapes[number]
            shifted, above = stage.signals(tape, below)
            if number:
                above = stage.at_points(above)
                gradient = stage.weight_gradient(tape, above)
                below = stage.input_gradient(tape, above)
            else:
                gradient = torch.mm(tape.columns, above.view(-1, stage.shape[0])).T.reshape(
                    stage.shape
                )
            move_along(changed[stage.weight], gradient, keep=keep, rate=rate)
            if stage.bias is not None:
                move_along(changed[stage.bias], shifted.sum((0, 1, 2)), keep=keep, rate=rate)


def _spread(signal: Tensor, wins: Tensor, dim: int) -> Tensor:
    """Returns the gradient by two neighbours, side by side in a new dimension, from that by the
    larger of them: the second gets it if it is larger, otherwise the first."""
    pair = signal.new_empty(*signal.shape[:dim], 2, *signal.shape[dim:])
    first, second = pair.unbind(dim)
    torch.ops.aten.threshold_backward(signal, wins, 0, grad_input=second)
    torch.sub(signal, second, out=first)
    return pair


@functools.cache
def _order(shape: tuple[int, int, int, int]) -> Tensor:
    """Returns the positions of the numbers of a weight (outputs, inputs, height, width) in its
    transpose (height, outputs, width, inputs)."""
    outputs, inputs, height, width = shape
    places = torch.arange(outputs * inputs * height * width)
    return places.view(height, outputs, width, inputs).permute(1, 3, 0, 2).reshape(-1)


def _plain(part: nn.Conv2d) -> bool:
    """Returns true for a convolution with steps of 1, one group, and no padding but zeros of a
    given number."""
    steps = (part.stride, part.dilation, part.groups, part.padding_mode) == (
        (1, 1),
        (1, 1),
        1,
        "zeros",
    )
    return steps and not isinstance(part.padding, str)


def _halves(part: nn.MaxPool2d) -> bool:
    """Returns true for a pool over adjacent windows of 2 x 2."""
    settings = (part.kernel_size, part.stride, part.padding, part.dilation)
    wanted = (2, 2, 0, 1)
    halves = all(value in (n, (n, n)) for value, n in zip(settings, wanted, strict=True))
    return halves and not part.return_indices
