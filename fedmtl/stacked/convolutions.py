"""Convolutional networks of one copy by matrix products: forward and backward straight from and to its row.

Activations are ordered (height, batch, width, channels). Along the width a filter's windows, copied once, are the rows
of a matrix. Along the height a convolution is a product of polynomials, which Toom and Cook compute from its values at
a few points (in one dimension, what Winograd's convolution is in two): four heights of the output by ``size + 3``
products instead of ``4 size``. Both derivatives are computed at the same points, from the same windows and filters. The
points 0, 1, -1, 2, -2, 1/2, -1/2 and infinity make the rounding error of outputs and input gradients three to five
times that of a direct sum.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Optional

import torch
from torch import Tensor, nn

from .._compiled import without_interpreter
from .kernels import ChannelsLastPool
from .perceptron import (
    FUNCTIONS,
    Ends,
    Examples,
    Perceptron,
    Rule,
    cross_entropy_signal,
    flat_parts,
    inputs_of,
    move,
    places_of,
    signals_of,
    slope_of,
    value_of,
    values_of,
    write_ends,
)

if TYPE_CHECKING:
    from ..data import DataSpec
    from .module import Layout

_POINTS = (0.0, 1.0, -1.0, 2.0, -2.0, 0.5, -0.5)
_TILE = 4
_LARGEST = 1 << 16  # numbers of a convolution of one image: beyond it memory takes the time, and libraries use less


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
        return row[self.weight : self.weight + math.prod(self.shape)].view(self.shape)

    def shift(self, row: Tensor) -> Tensor:
        """(D,) -> the bias (outputs,), a view; (0,) without one."""
        first = self.bias or 0
        return row[first : first + (0 if self.bias is None else self.shape[0])]

    def form(self) -> list[int]:
        """Return padding, pool and function, as the functions below take them."""
        return [*self.padding, int(self.pools), self.function]

    def tables(self, dtype: torch.dtype) -> list[Tensor]:
        """Return :class:`Toom`'s a, g and d and where the weight's numbers stand, as the functions below take them."""
        toom = Toom.of(self.shape[2], dtype)
        return [] if toom is None else [toom.a, toom.g, toom.d, _order(self.shape)]

    def size(self, height: int, width: int) -> tuple[int, int] | None:
        """Return height and width of the output for those of the input; None where there is none, or a pool leaves
        something over."""
        sides = (height, width)
        high, wide = (n + 2 * p - k + 1 for n, p, k in zip(sides, self.padding, self.shape[2:], strict=True))
        if min(high, wide) < 1 or (self.pools and (high % 2 or wide % 2)):
            return None
        return (high // 2, wide // 2) if self.pools else (high, wide)


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
        known = all(stage.tables(torch.float64) for stage in stages[1:])
        return cls(tuple(stages), head) if head is not None and stages and known else None

    def takes(self, spec: DataSpec, rows: Tensor) -> bool:
        """Return whether examples are images of the right size, and ``rows`` (K, D) one copy on a CPU."""
        return not spec.integer and _alone(rows) and self._fits(tuple(spec.shape))

    def _fits(self, shape: tuple[int, ...]) -> bool:
        if len(shape) != 3:
            return False
        channels, size = shape[0], (shape[1], shape[2])
        for stage in self.stages:
            after = stage.size(*size) if stage.shape[1] == channels else None
            if after is None:
                return False
            channels, size = stage.shape[0], after
            if channels * size[0] * size[1] * (4 if stage.pools else 1) > _LARGEST:
                return False
        return channels * size[0] * size[1] == self.head.layers[0].inputs

    def forward(self, rows: Tensor, x: Tensor) -> list[Any] | None:
        """Return what the gradients need, and last the output (1, B, outputs); None of several copies, on another
        device than a CPU, and where the input is no batch of images of the right size, or of another dtype."""
        if not _alone(rows) or x.dtype != rows.dtype or not self._fits(tuple(x.shape[2:])):
            return None
        tapes, values = values_of_images(x[0], *self._tensors(rows), *self.head.tensors(rows))
        return [*tapes, *values]

    def backward(self, rows: Tensor, values: list[Any], signal: Tensor, gradients: Tensor) -> None:
        """Write the gradients of all parameters into ``gradients`` (1, D); see the perceptron's."""
        places = (*self._tensors(gradients)[:2], *self.head.tensors(gradients)[:2])
        self._move(rows, values, signal, places, keep=0.0, rate=-1.0)

    def descend(self, rows: Tensor, values: list[Any], signal: Tensor, *, keep: float, rate: float) -> None:
        """Make every parameter ``keep`` times itself less ``rate`` times its gradient."""
        places = (*self._tensors(rows)[:2], *self.head.tensors(rows)[:2])
        self._move(rows, values, signal, places, keep=keep, rate=rate)

    def _move(
        self,
        rows: Tensor,
        values: list[Any],
        signal: Tensor,
        places: tuple[list[Tensor], list[Tensor], list[Tensor], list[Tensor]],
        *,
        keep: float,
        rate: float,
    ) -> None:
        _, _, forms, tables = self._tensors(rows)
        weights, _, functions = self.head.tensors(rows)
        tapes, values = values[: len(self.stages)], values[len(self.stages) :]
        move_images(
            tapes, values, signal.reshape(values[-1].shape), forms, tables, weights, functions, *places, keep, rate
        )

    def run(self, rows: Tensor, examples: Examples, rule: Rule, ends: Ends) -> None:
        """Make local steps of gradient descent on cross-entropies, and write out the copy after its last one; see the
        perceptron's."""
        program: Callable[..., None] = without_interpreter(run_image_steps)
        tensors = (*self._tensors(rows), *self.head.tensors(rows))
        program(*examples, rows, *tensors, *rule[:4], *ends)

    def _tensors(self, rows: Tensor) -> tuple[list[Tensor], list[Tensor], list[list[int]], list[list[Tensor]]]:
        """Return weights, biases, forms and tables of the convolutions."""
        row = rows[0]
        filters, shifts = [n.filters(row) for n in self.stages], [n.shift(row) for n in self.stages]
        return filters, shifts, [n.form() for n in self.stages], [n.tables(rows.dtype) for n in self.stages]


def values_of_images(
    x: Tensor,
    filters: list[Tensor],
    shifts: list[Tensor],
    forms: list[list[int]],
    tables: list[list[Tensor]],
    weights: list[Tensor],
    biases: list[Tensor],
    functions: list[int],
) -> tuple[list[list[Tensor]], list[Tensor]]:
    """Return what each convolution remembers (:func:`finished`), and the head's input and its layers' outputs.

    This function and those below are compiled by :func:`~fedmtl._compiled.without_interpreter`, so that they
    keep to what it knows.

    Args:
        x: (B, C, H, W).
        filters, shifts: of every convolution (O, C, h, w), and (O,) or (0,) without a bias.
        forms, tables: :meth:`Convolution.form` and :meth:`Convolution.tables`.
        weights, biases, functions: of the head, see :func:`~fedmtl.stacked.perceptron.values_of`.
    """
    tapes = [first_convolution(x, filters[0], shifts[0], forms[0])]
    for stage in range(1, len(filters)):
        tapes.append(later_convolution(tapes[stage - 1][4], filters[stage], shifts[stage], forms[stage], tables[stage]))
    vectors = tapes[len(tapes) - 1][4].permute(1, 3, 0, 2).reshape(1, x.shape[0], -1)
    return tapes, values_of(vectors, weights, biases, functions)


def move_images(
    tapes: list[list[Tensor]],
    values: list[Tensor],
    signal: Tensor,
    forms: list[list[int]],
    tables: list[list[Tensor]],
    weights: list[Tensor],
    functions: list[int],
    to_filters: list[Tensor],
    to_shifts: list[Tensor],
    to_weights: list[Tensor],
    to_biases: list[Tensor],
    keep: float,
    rate: float,
) -> None:
    """Make every parameter ``keep`` times itself, and of 0 nothing, less ``rate`` times its gradient.

    Args:
        tapes, values: of :func:`values_of_images`.
        signal: (1, B, outputs), the gradient by the output.
        forms, tables, weights, functions: as in :func:`values_of_images`.
        to_filters, to_shifts, to_weights, to_biases: what is changed.
        keep, rate: of gradient descent with decay; 0 and -1 write the gradients.
    """
    high, batch, wide, channels = tapes[len(tapes) - 1][4].shape
    signals = signals_of(signal, values, weights, functions)
    below = torch.bmm(signals[len(signals) - 1], weights[0]).view(batch, channels, high, wide)
    below = below.permute(2, 0, 3, 1).contiguous()
    move(values, signals, to_weights, to_biases, keep, rate)
    for back in range(1, len(tapes) + 1):
        stage = len(tapes) - back
        tape, form = tapes[stage], forms[stage]
        shifted, above = convolution_signals(tape, form, below)
        if stage > 0:
            above = at_points(above, tables[stage])
            gradient = later_weight_gradient(tape, above, tables[stage], to_filters[stage])
            below = input_gradient(tape, form, above, tables[stage], to_filters[stage])
        else:
            outputs = above.shape[3]
            gradient = torch.mm(tape[0], above.view(-1, outputs)).T
        change(to_filters[stage], gradient.reshape(to_filters[stage].shape), keep, rate)
        if to_shifts[stage].shape[0] > 0:
            change(to_shifts[stage], shifted.sum([0, 1, 2]), keep, rate)


def change(parameter: Tensor, gradient: Tensor, keep: float, rate: float) -> None:
    """Make a parameter ``keep`` times itself, and of 0 nothing, less ``rate`` times its gradient."""
    if keep == 0.0:
        parameter.copy_(gradient).mul_(-rate)
    else:
        parameter.mul_(keep).sub_(gradient, alpha=rate)


def first_convolution(x: Tensor, weight: Tensor, shift: Tensor, form: list[int]) -> list[Tensor]:
    """Compute a convolution of images (B, C, H, W); what it remembers begins with the windows (C h w, H B W)."""
    up, left = form[0], form[1]
    if up > 0 or left > 0:
        x = torch.constant_pad_nd(x, [left, left, up, up], 0.0)
    outputs, inputs, height, width = weight.shape
    batch, _, high, wide = x.shape
    high, wide = high - height + 1, wide - width + 1
    b, c, h, w = x.stride()
    windows = x.as_strided([inputs, height, width, high, batch, wide], [c, h, w, h, b, w])
    columns = windows.reshape(inputs * height * width, high * batch * wide)
    product = torch.mm(columns.T, weight.view(outputs, -1).T).view(high, batch, wide, outputs)
    return finished(columns, columns, product, shift, form)


def later_convolution(
    value: Tensor, weight: Tensor, shift: Tensor, form: list[int], tables: list[Tensor]
) -> list[Tensor]:
    """Compute a convolution of (H, B, W, C), contiguous. What it remembers begins with the windows at each point (P, T
    B W, w C), where T tiles make the height, and the weights there (P, O, w C)."""
    up, left = form[0], form[1]
    outputs, inputs, height, width = weight.shape
    points, tile = tables[0].shape
    high, batch, wide, _ = value.shape
    high, wide = high + 2 * up - height + 1, wide + 2 * left - width + 1
    tiles = (high + tile - 1) // tile
    down = up + tiles * tile - high
    if left > 0 or up > 0 or down > 0:
        value = torch.constant_pad_nd(value, [0, 0, left, left, 0, 0, up, down], 0.0)
    long = batch * value.shape[2] * inputs
    heights = value.as_strided([tiles, points, long], [tile * long, long, 1])
    lines = torch.bmm(tables[2].expand([tiles, points, points]), heights)  # (T, P, B W C)
    columns = lines.as_strided(
        [points, tiles, batch, wide, width * inputs], [long, points * long, value.shape[2] * inputs, inputs, 1]
    ).reshape(points, -1, width * inputs)
    filters = torch.mm(tables[1], weight.permute(2, 0, 3, 1).reshape(height, -1)).view(points, outputs, -1)
    products = torch.bmm(columns, filters.mT).view(points, tiles, -1)
    product = torch.bmm(tables[0].mT.expand([tiles, tile, points]), products.transpose(0, 1))
    return finished(columns, filters, product.view(-1, batch, wide, outputs)[:high], shift, form)


def finished(columns: Tensor, filters: Tensor, product: Tensor, shift: Tensor, form: list[int]) -> list[Tensor]:
    """Pool, add the bias and apply the function: in this order there is least to do, and the values are the same. Of
    equal ones the first of a window is the largest, as PyTorch has it.

    Args:
        columns, filters: are remembered.
        product: (H, B, W, O), overwritten.
        shift: (O,), or (0,).
        form: of the convolution.

    Returns:
        columns; filters; of a pool how much the right of two neighbours is larger, (H, B W / 2, O), and then the lower,
        (H / 2, B W / 2, O); and the output (H, B, W, O).
    """
    value, across, down = product, product, product
    if form[2] > 0:
        high, batch, wide, outputs = product.shape
        pairs = product.view(high, -1, 2, outputs)
        left, right = pairs.select(2, 0), pairs.select(2, 1)
        value = torch.maximum(left, right).view(high // 2, 2, -1, outputs)
        upper, lower = value.select(1, 0), value.select(1, 1)
        across, down = right - left, lower - upper
        value = torch.maximum(upper, lower).view(high // 2, batch, wide // 2, outputs)
    if shift.shape[0] > 0:
        value.add_(shift)
    return [columns, filters, across, down, value_of(form[3], value)]


def convolution_signals(tape: list[Tensor], form: list[int], signal: Tensor) -> tuple[Tensor, Tensor]:
    """Return the gradients by what the bias is added to and by the product, (H, B, W, O).

    Args:
        tape: what the convolution remembers.
        form: of it.
        signal: the gradient by its output, (H, B, W, O).
    """
    signal = slope_of(form[3], signal, tape[4])
    if form[2] == 0:
        return signal, signal
    high, batch, wide, outputs = signal.shape
    rows = spread(signal.view(high, -1, outputs), tape[3], 1)
    above = spread(rows.view(2 * high, -1, outputs), tape[2], 2)
    return signal, above.view(2 * high, batch, 2 * wide, outputs)


def spread(signal: Tensor, wins: Tensor, dim: int) -> Tensor:
    """Return the gradient by two neighbours, side by side in a new dimension, from that by the larger of them: the
    second gets it where it is larger, else the first."""
    size = list(signal.shape)
    size.insert(dim, 2)
    found = torch.empty(size, dtype=signal.dtype)
    second = found.select(dim, 1)
    torch.ops.aten.threshold_backward(signal, wins, 0, grad_input=second)
    torch.sub(signal, second, out=found.select(dim, 0))
    return found


def at_points(signal: Tensor, tables: list[Tensor]) -> Tensor:
    """Return the gradient by a later convolution's product, (H, B, W, O), at the points, (P, T B W, O)."""
    points, tile = tables[0].shape
    tiles, outputs = (signal.shape[0] + tile - 1) // tile, signal.shape[3]
    missing = tiles * tile - signal.shape[0]
    if missing > 0:
        signal = torch.constant_pad_nd(signal, [0, 0, 0, 0, 0, 0, 0, missing], 0.0)
    signal = signal.view(tiles, tile, -1)
    found = torch.empty([points, tiles, signal.shape[2]], dtype=signal.dtype)
    torch.bmm(tables[0].expand([tiles, points, tile]), signal, out=found.transpose(0, 1))
    return found.view(points, -1, outputs)


def later_weight_gradient(tape: list[Tensor], signal: Tensor, tables: list[Tensor], weight: Tensor) -> Tensor:
    """Return the gradient by the weight of a later convolution from that at the points; ``weight`` gives the shape."""
    found = torch.bmm(signal.mT, tape[0]).view(signal.shape[0], -1)
    found = torch.mm(tables[1].T, found).view(-1)  # (h, O, w, C)
    return found.index_select(0, tables[3]).view(weight.shape)


def input_gradient(tape: list[Tensor], form: list[int], signal: Tensor, tables: list[Tensor], weight: Tensor) -> Tensor:
    """Return the gradient by the input of a later convolution, (H, B, W, C), from that at the points."""
    _, inputs, height, width = weight.shape
    points, tile = tables[0].shape
    up, left, scale = form[0], form[1], 1 + form[2]
    high, batch, wide = scale * tape[4].shape[0], tape[4].shape[1], scale * tape[4].shape[2]
    tiles, broad = (high + tile - 1) // tile, wide + width - 1
    windows = torch.bmm(signal, tape[1]).view(-1, batch, wide, width, inputs)
    lines = torch.zeros([points * tiles, batch, broad, inputs], dtype=signal.dtype)
    for j in range(width):
        lines.narrow(2, j, wide).add_(windows.select(3, j))
    lines = lines.view(points, tiles, -1)
    found = torch.zeros([tiles * tile + height - 1, batch, broad, inputs], dtype=signal.dtype)
    for t in range(tiles):
        found.narrow(0, t * tile, points).view(points, -1).addmm_(tables[2].T, lines.select(1, t))
    return found.narrow(0, up, high + height - 1 - 2 * up).narrow(2, left, broad - 2 * left).contiguous()


def run_image_steps(
    x: Tensor,
    y: Tensor,
    scale: float,
    shift: float,
    used: Tensor,
    mask: Tensor,
    active: list[int],
    widths: list[int],
    rows: Tensor,
    filters: list[Tensor],
    shifts: list[Tensor],
    forms: list[list[int]],
    tables: list[list[Tensor]],
    weights: list[Tensor],
    biases: list[Tensor],
    functions: list[int],
    keep: float,
    rate: float,
    towards: float,
    anchor: Optional[Tensor],  # noqa: UP045 - what TorchScript can read in every version
    last: list[int],
    where: list[int],
    out: Optional[Tensor],  # noqa: UP045
    less: Optional[Tensor],  # noqa: UP045
    kept: Optional[Tensor],  # noqa: UP045
    sums: Optional[Tensor],  # noqa: UP045
    cells: Optional[Tensor],  # noqa: UP045
    limits: list[float],
) -> None:
    """Make the local steps of :meth:`ConvolutionalNetwork.run`, whose arguments these are."""
    for step in range(len(active)):
        width = widths[step]
        taken = used[step, 0, :width]
        inputs = inputs_of(x, taken, scale, shift, rows)
        tapes, values = values_of_images(inputs, filters, shifts, forms, tables, weights, biases, functions)
        classes = y.index_select(0, taken).view(1, width)
        signal = cross_entropy_signal(values[len(values) - 1], classes, mask[step, :1, :width])
        move_images(
            tapes, values, signal, forms, tables, weights, functions, filters, shifts, weights, biases, keep, rate
        )  # fmt: skip
        if anchor is not None and towards != 0.0:
            rows.add_(anchor, alpha=towards)
        write_ends(step, rows, last, where, out, less, kept, sums, cells, limits)


@functools.cache
def _order(shape: tuple[int, int, int, int]) -> Tensor:
    """Return where the numbers of a weight (outputs, inputs, height, width) stand among those of its transpose (height,
    outputs, width, inputs)."""
    outputs, inputs, height, width = shape
    places = torch.arange(outputs * inputs * height * width)
    return places.view(height, outputs, width, inputs).permute(1, 3, 0, 2).reshape(-1)


def _alone(rows: Tensor) -> bool:
    return rows.shape[0] == 1 and rows.device.type == "cpu"


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
