"""Convolutional networks of one copy by matrix products: forward and backward straight from and to its row.

Activations are ordered (height, batch, width, channels). Along the width a filter's windows, copied once, are the rows
of a matrix. Along the height a convolution is a product of polynomials, which Toom and Cook compute from its values at
a few points (in one dimension, what Winograd's convolution is in two): four heights of the output by ``size + 3``
products instead of ``4 size``. Both derivatives are computed at the same points, from the same windows and filters. The
points 0, 1, -1, 2, -2, 1/2, -1/2 and infinity make the rounding error two to four times that of a direct sum.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from .kernels import ChannelsLastPool
from .perceptron import FUNCTIONS, Perceptron, flat_parts, places_of, slope_of, value_of

if TYPE_CHECKING:
    from .module import Layout

_POINTS = (0.0, 1.0, -1.0, 2.0, -2.0, 0.5, -0.5)
_TILE = 4


@dataclass(frozen=True)
class Toom:
    """A correlation of ``size`` numbers along a line, ``tile`` results at once: y = A^T [(G f) * (D x)], elementwise,
    of a filter f and ``points`` numbers x.

    Attributes:
        tile: the number of results.
        points: the number of products, ``tile + size - 1``.
        a, g, d: (points, tile), (points, size), (points, points).
    """

    tile: int
    points: int
    a: Tensor
    g: Tensor
    d: Tensor

    @classmethod
    @functools.cache
    def of(cls, size: int, dtype: torch.dtype) -> Toom | None:
        """Return it for filters of ``size``; None where there are not enough points for it.

        Polynomials with coefficients u and v are multiplied by their values: (u v) = V^-1 (V_u u * V_v v), V with the
        powers of the points in its rows. The transpose of that linear function of u is the correlation with v.
        """
        tile = 1 if size == 1 else min(_TILE, len(_POINTS) + 2 - size)
        if tile < 1:
            return None
        points = torch.tensor(_POINTS[: tile + size - 2], dtype=torch.float64)

        def powers(count: int) -> Tensor:
            infinite = torch.zeros(1, count, dtype=torch.float64)
            infinite[0, -1] = 1.0
            return torch.cat([points[:, None] ** torch.arange(count), infinite])

        count = tile + size - 1
        inverse = torch.linalg.inv(powers(count))
        return cls(tile, count, powers(tile).to(dtype), powers(size).to(dtype), inverse.mT.to(dtype).contiguous())


class Tape(NamedTuple):
    """What a convolution remembers for its gradient.

    Attributes:
        columns: of the first one the windows (C h w, H B W); of a later one those at each point (P, T B W, w C), where
            T tiles make the height.
        filters: of a later one the weights at each point (P, O, w C); None of the first.
        padded: (H, B, W, C) of the padded input of a later one.
        wins: of a pool how much the right of two neighbours is larger, (H, B W / 2, O), and then the lower, (H / 2,
            B W / 2, O).
        value: the output (H, B, W, O).
    """

    columns: Tensor
    filters: Tensor | None
    padded: tuple[int, ...]
    wins: tuple[Tensor, ...]
    value: Tensor


@dataclass(frozen=True)
class Convolution:
    """A convolution, a pool of 2 x 2 after it, and an increasing function, which may stand before the pool as well.

    Attributes:
        weight: first number of the weight (outputs, inputs, height, width) in a row.
        bias: first number of the bias (outputs,); None without one.
        shape: of the weight.
        padding: zeros on either side, of height and width.
        pools: whether there is the pool.
        function: number of the elementwise function in :data:`~fedmtl.stacked.perceptron.FUNCTIONS`; -1 without one.
    """

    weight: int
    bias: int | None
    shape: tuple[int, int, int, int]
    padding: tuple[int, int]
    pools: bool = False
    function: int = -1

    def filters(self, row: Tensor) -> Tensor:
        """(D,) -> the weight, a view."""
        outputs, inputs, height, width = self.shape
        return row[self.weight : self.weight + outputs * inputs * height * width].view(self.shape)

    def shift(self, row: Tensor) -> Tensor:
        """(D,) -> the bias (outputs,), a view."""
        assert self.bias is not None
        return row[self.bias : self.bias + self.shape[0]]

    def size(self, height: int, width: int) -> tuple[int, int] | None:
        """Return height and width of the output for those of the input; None where there is none, or a pool leaves
        something over."""
        sides = (height, width)
        high, wide = (n + 2 * p - k + 1 for n, p, k in zip(sides, self.padding, self.shape[2:], strict=True))
        if min(high, wide) < 1 or (self.pools and (high % 2 or wide % 2)):
            return None
        return (high // 2, wide // 2) if self.pools else (high, wide)

    def first(self, row: Tensor, x: Tensor) -> Tape:
        """Compute it on images (B, C, H, W)."""
        outputs, inputs, height, width = self.shape
        up, left = self.padding
        x = F.pad(x, (left, left, up, up)) if up or left else x
        batch, _, high, wide = x.shape
        high, wide = high - height + 1, wide - width + 1
        b, c, h, w = x.stride()
        windows = x.as_strided((inputs, height, width, high, batch, wide), (c, h, w, h, b, w))
        columns = windows.reshape(inputs * height * width, high * batch * wide)
        product = torch.mm(columns.T, self.filters(row).view(outputs, -1).T).view(high, batch, wide, outputs)
        return Tape(columns, None, (), *self._finish(row, product))

    def later(self, row: Tensor, value: Tensor) -> Tape:
        """Compute it on (H, B, W, C), contiguous."""
        outputs, inputs, height, width = self.shape
        toom = self._toom(row)
        up, left = self.padding
        high, batch, wide, _ = value.shape
        high, wide = high + 2 * up - height + 1, wide + 2 * left - width + 1
        tiles = -(-high // toom.tile)
        down = up + tiles * toom.tile - high
        value = F.pad(value, (0, 0, left, left, 0, 0, up, down)) if left or up or down else value
        long, results = batch * value.shape[2] * inputs, batch * wide * outputs
        lines = torch.bmm(
            toom.d.expand(tiles, -1, -1),
            value.as_strided((tiles, toom.points, long), (toom.tile * long, long, 1)),
        )  # (T, P, B W C)
        size = (toom.points, tiles, batch, wide, width * inputs)
        columns = lines.as_strided(size, (long, toom.points * long, *value.stride()[1:]))
        columns = columns.reshape(toom.points, -1, width * inputs)
        filters = torch.mm(toom.g, self.filters(row).permute(2, 0, 3, 1).reshape(height, -1))
        filters = filters.view(toom.points, outputs, -1)
        products = torch.bmm(columns, filters.mT).view(toom.points, tiles, results)
        product = torch.bmm(toom.a.mT.expand(tiles, -1, -1), products.transpose(0, 1)).view(-1, batch, wide, outputs)
        return Tape(columns, filters, tuple(value.shape), *self._finish(row, product[:high]))

    def _toom(self, like: Tensor) -> Toom:
        found = Toom.of(self.shape[2], like.dtype)
        assert found is not None
        return found

    def _finish(self, row: Tensor, product: Tensor) -> tuple[tuple[Tensor, ...], Tensor]:
        """Pool, add the bias and apply the function: in this order there is least to do, and the values are the
        same. Of equal ones the first of a window is the largest, as PyTorch has it."""
        wins: tuple[Tensor, ...] = ()
        value = product
        if self.pools:
            high, batch, wide, outputs = product.shape
            left, right = product.view(high, -1, 2, outputs).unbind(2)
            value = torch.maximum(left, right)
            upper, lower = value.view(high // 2, 2, -1, outputs).unbind(1)
            wins = (right - left, lower - upper)
            value = torch.maximum(upper, lower).view(high // 2, batch, wide // 2, outputs)
        if self.bias is not None:
            value.add_(self.shift(row))
        return wins, value_of(self.function, value)

    def signals(self, tape: Tape, signal: Tensor) -> tuple[Tensor, Tensor]:
        """Return the gradients by what the bias is added to and by the product, (H, B, W, O).

        Args:
            tape: what the computation remembered.
            signal: the gradient by its output, (H, B, W, O).
        """
        signal = slope_of(self.function, signal, tape.value)
        if not self.pools:
            return signal, signal
        high, batch, wide, outputs = signal.shape
        rows = _spread(signal.view(high, -1, outputs), tape.wins[1], 1)
        above = _spread(rows.view(2 * high, -1, outputs), tape.wins[0], 2)
        return signal, above.view(2 * high, batch, 2 * wide, outputs)

    def weight_gradient(self, tape: Tape, signal: Tensor) -> Tensor:
        """Return the gradient by the weight, of its shape, from that by the product; of a later one at the points."""
        if tape.filters is None:
            return torch.mm(tape.columns, signal.view(-1, self.shape[0])).T.view(self.shape)
        found = torch.bmm(signal.mT, tape.columns).view(signal.shape[0], -1)
        found = torch.mm(self._toom(found).g.T, found).view(-1)  # (h, O, w, C)
        return found.index_select(0, _order(self.shape)).view(self.shape)

    def at_points(self, tape: Tape, signal: Tensor) -> Tensor:
        """Return what both gradients of a later convolution begin with: the signal (H, B, W, O) at the points, (P,
        T B W, O)."""
        if tape.filters is None:
            return signal
        toom = self._toom(signal)
        missing = -signal.shape[0] % toom.tile
        signal = F.pad(signal, (0, 0, 0, 0, 0, 0, 0, missing)) if missing else signal
        tiles = signal.shape[0] // toom.tile
        signal = signal.view(tiles, toom.tile, -1)
        found = signal.new_empty(toom.points, tiles, signal.shape[2])
        torch.bmm(toom.a.expand(tiles, -1, -1), signal, out=found.transpose(0, 1))
        return found.view(toom.points, -1, self.shape[0])

    def input_gradient(self, tape: Tape, signal: Tensor) -> Tensor:
        """Return the gradient by the input of a later convolution, (H, B, W, C), from that at the points."""
        assert tape.filters is not None
        _, inputs, height, width = self.shape
        toom = self._toom(signal)
        _, batch, wide, _ = tape.padded
        windows = torch.bmm(signal, tape.filters).view(-1, batch, wide - width + 1, width, inputs)
        lines = signal.new_zeros(windows.shape[0], batch, wide, inputs)
        for j in range(width):
            lines[:, :, j : j + wide - width + 1].add_(windows[:, :, :, j])
        lines = lines.view(toom.points, windows.shape[0] // toom.points, -1)
        found = signal.new_zeros(tape.padded)
        for t in range(lines.shape[1]):
            found[t * toom.tile :][: toom.points].view(toom.points, -1).addmm_(toom.d.T, lines[:, t])
        up, left = self.padding
        tall = tape.value.shape[0] * (2 if self.pools else 1) + height - 1 - 2 * up
        return found[up : up + tall, :, left : wide - left].contiguous()


@dataclass(frozen=True)
class ConvolutionalNetwork:
    """Convolutions, pools and increasing functions, and a perceptron of what they leave.

    Its interface is that of :class:`~fedmtl.stacked.perceptron.Perceptron`, of one copy on a CPU.

    Attributes:
        stages: the convolutions, in the order of computation.
        head: what follows.
    """

    stages: tuple[Convolution, ...]
    head: Perceptron

    @classmethod
    def of(cls, module: nn.Module, layout: Layout) -> ConvolutionalNetwork | None:
        """Return the network that a module computes in training mode; None where it is no such network, or where a
        parameter is frozen, occurs twice, or has a hook."""
        parts, places = flat_parts(module, (nn.Conv2d, nn.MaxPool2d, ChannelsLastPool)), places_of(module, layout)
        if parts is None or places is None:
            return None
        flat = next((k for k, part in enumerate(parts) if type(part) is nn.Flatten), 0)
        stages: list[Convolution] = []
        for part in parts[:flat]:
            last = stages[-1] if stages else None
            if type(part) is nn.Conv2d and _plain(part):
                bias = None if part.bias is None else places[id(part.bias)]
                sides: Any = tuple(part.weight.shape)
                stages.append(Convolution(places[id(part.weight)], bias, sides, part.padding))  # type: ignore[arg-type]
            elif isinstance(part, nn.MaxPool2d) and last is not None and not last.pools and _halves(part):
                stages[-1] = replace(last, pools=True)
            elif type(part) in FUNCTIONS and last is not None and last.function < 0:
                stages[-1] = replace(last, function=FUNCTIONS.index(type(part)))
            else:
                return None
        head = Perceptron.of_parts(parts[flat + 1 :], places)
        known = all(Toom.of(stage.shape[2], torch.float64) is not None for stage in stages[1:])
        return cls(tuple(stages), head) if head is not None and stages and known else None

    def forward(self, rows: Tensor, x: Tensor) -> list[Any] | None:
        """Return what the gradients need, and last the output (1, B, outputs); None of several copies, on another
        device than a CPU, and where the input is no batch of images of the right size, or of another dtype."""
        if rows.shape[0] != 1 or rows.device.type != "cpu" or x.dim() != 5 or x.dtype != rows.dtype:
            return None
        channels, size = x.shape[2], (x.shape[3], x.shape[4])
        for stage in self.stages:
            after = stage.size(*size) if stage.shape[1] == channels else None
            if after is None:
                return None
            channels, size = stage.shape[0], after
        if channels * size[0] * size[1] != self.head.layers[0].inputs:
            return None
        tapes = [self.stages[0].first(rows[0], x[0])]
        for stage in self.stages[1:]:
            tapes.append(stage.later(rows[0], tapes[-1].value))
        values = self.head.forward(rows, tapes[-1].value.permute(1, 3, 0, 2).reshape(1, x.shape[1], -1))
        return None if values is None else [*tapes, *values]

    def backward(self, rows: Tensor, values: list[Any], signal: Tensor, gradients: Tensor) -> None:
        """Write the gradients of all parameters into ``gradients`` (1, D); see the perceptron's."""
        row, found = gradients[0], self._gradients(rows, values, signal)
        self.head.backward(rows, values[len(self.stages) :], signal, gradients)
        for stage, by_shift, by_weight in found:
            stage.filters(row).copy_(by_weight)
            if stage.bias is not None:
                torch.sum(by_shift, (0, 1, 2), out=stage.shift(row))

    def descend(self, rows: Tensor, values: list[Any], signal: Tensor, *, keep: float, rate: float) -> None:
        """Make every parameter ``keep`` times itself less ``rate`` times its gradient."""
        row, found = rows[0], self._gradients(rows, values, signal)
        self.head.descend(rows, values[len(self.stages) :], signal, keep=keep, rate=rate)
        for stage, by_shift, by_weight in found:
            stage.filters(row).mul_(keep).sub_(by_weight, alpha=rate)
            if stage.bias is not None:
                stage.shift(row).mul_(keep).sub_(by_shift.sum((0, 1, 2)), alpha=rate)

    def _gradients(self, rows: Tensor, values: list[Any], signal: Tensor) -> list[tuple[Convolution, Tensor, Tensor]]:
        """Return for each convolution, the last one first, the gradients by what its bias is added to, (H, B, W, O),
        and by its weight."""
        tapes: list[Tape] = values[: len(self.stages)]
        found = []
        high, batch, wide, channels = tapes[-1].value.shape
        below = self.head.input_gradient(rows, values[len(self.stages) :], signal)
        below = below.view(batch, channels, high, wide).permute(2, 0, 3, 1).contiguous()
        for number in range(len(self.stages) - 1, -1, -1):
            stage, tape = self.stages[number], tapes[number]
            shifted, above = stage.signals(tape, below)
            above = stage.at_points(tape, above)
            found.append((stage, shifted, stage.weight_gradient(tape, above)))
            if number:
                below = stage.input_gradient(tape, above)
        return found


def _spread(signal: Tensor, wins: Tensor, dim: int) -> Tensor:
    """Return the gradient by two neighbours, side by side in a new dimension, from that by the larger of them: the
    second gets it where it is larger, else the first."""
    size = list(signal.shape)
    size.insert(dim, 2)
    found = signal.new_empty(size)
    first, second = found.unbind(dim)
    torch.ops.aten.threshold_backward.grad_input(signal, wins, 0, grad_input=second)
    torch.sub(signal, second, out=first)
    return found


@functools.cache
def _order(shape: tuple[int, int, int, int]) -> Tensor:
    """Return where the numbers of a weight (outputs, inputs, height, width) stand among those of its transpose (height,
    outputs, width, inputs)."""
    outputs, inputs, height, width = shape
    places = torch.arange(outputs * inputs * height * width, dtype=torch.int32)
    return places.view(height, outputs, width, inputs).permute(1, 3, 0, 2).reshape(-1)


def _plain(part: nn.Conv2d) -> bool:
    """Return whether a convolution has steps of 1, one group, and no padding but zeros of a given number."""
    steps = (part.stride, part.dilation, part.groups, part.padding_mode) == ((1, 1), (1, 1), 1, "zeros")
    return steps and not isinstance(part.padding, str)


def _halves(part: nn.MaxPool2d) -> bool:
    """Return whether a pool is the one of windows of 2 x 2 that stand side by side."""
    pairs = [
        v if isinstance(v, tuple) else (v, v) for v in (part.kernel_size, part.stride, part.padding, part.dilation)
    ]
    return pairs == [(2, 2), (2, 2), (0, 0), (1, 1)] and not part.return_indices
