"""Perceptrons of K copies by batched products: forward and backward straight from and to their [K, D] rows.

What :func:`torch.func.vmap` computes for such a network, without its price: gradients that arrive in another layout
and are copied, and, of plain gradient descent, a gradient that is written before it is read again.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, NamedTuple, Optional

import torch
from torch import Tensor, nn

from .._clipped import add_clipped
from .._compiled import without_interpreter
from .kernels import hooked
from .losses import Loss, Pull, client_means, cross_entropy, example_losses, softmax_divergence

if TYPE_CHECKING:
    from ..data import DataSpec
    from .module import Layout

FUNCTIONS: tuple[type[nn.Module], ...] = (nn.ReLU, nn.Tanh, nn.Sigmoid)
"""Elementwise functions that may stand after a layer; below they are known by their number here, and -1 is none."""


@dataclass(frozen=True)
class Linear:
    """A linear layer: where its parameters stand in a row.

    Attributes:
        weight: first number of the weight (outputs, inputs).
        bias: first number of the bias (outputs,); None without one.
        outputs, inputs: sizes.
        function: number of the elementwise function after it in :data:`FUNCTIONS`; -1 without one.
    """

    weight: int
    bias: int | None
    outputs: int
    inputs: int
    function: int = -1

    def matrices(self, rows: Tensor) -> Tensor:
        """(K, D) -> the weights (K, outputs, inputs), a view."""
        place = rows.storage_offset() + self.weight
        return rows.as_strided((len(rows), self.outputs, self.inputs), (rows.stride(0), self.inputs, 1), place)

    def shifts(self, rows: Tensor) -> Tensor:
        """(K, D) -> the biases (K, 1, outputs), a view; (K, 1, 0) without them."""
        first = self.bias or 0
        return rows[:, None, first : first + (0 if self.bias is None else self.outputs)]


@dataclass(frozen=True)
class Perceptron:
    """Linear layers with elementwise functions between them.

    Attributes:
        layers: in the order of computation.
        flattens: whether an example of any shape is first made a vector.
    """

    layers: tuple[Linear, ...]
    flattens: bool

    @classmethod
    def of(cls, module: nn.Module, layout: Layout) -> Perceptron | None:
        """Return the perceptron that a module computes in training mode; None where it is no such network, or where a
        parameter is frozen, occurs twice, or has a hook."""
        parts, places = flat_parts(module), places_of(module, layout)
        return None if parts is None or places is None else cls.of_parts(parts, places)

    @classmethod
    def of_parts(cls, parts: list[nn.Module], places: dict[int, int]) -> Perceptron | None:
        """Return the perceptron of consecutive :func:`flat_parts`; None where they make none.

        Args:
            parts: layers, functions and flattenings.
            places: the first number of each parameter in a row, by its identity.
        """
        layers: list[Linear] = []
        flattens = False
        for part in parts:
            if type(part) is nn.Linear:
                bias = None if part.bias is None else places[id(part.bias)]
                layers.append(Linear(places[id(part.weight)], bias, part.out_features, part.in_features))
            elif type(part) in FUNCTIONS:
                if not layers or layers[-1].function >= 0:
                    return None
                layers[-1] = replace(layers[-1], function=FUNCTIONS.index(type(part)))
            elif not layers:  # later there are vectors already
                flattens = True
        return cls(tuple(layers), flattens) if layers else None

    def forward(self, rows: Tensor, x: Tensor) -> list[Tensor] | None:
        """Return the input as vectors (K, B, inputs) and the output of every layer (K, B, outputs); None where the
        input is no batch of vectors of this size, or of another dtype."""
        value = x.flatten(2) if self.flattens and x.dim() > 3 else x
        if value.dim() != 3 or value.shape[-1] != self.layers[0].inputs or value.dtype != rows.dtype:
            return None
        return values_of(value, *self.tensors(rows))

    def tensors(self, rows: Tensor) -> tuple[list[Tensor], list[Tensor], list[int]]:
        """Return weights, biases and functions of the layers, as the functions below take them."""
        weights, biases = [n.matrices(rows) for n in self.layers], [n.shifts(rows) for n in self.layers]
        return weights, biases, [layer.function for layer in self.layers]

    def backward(self, rows: Tensor, values: list[Tensor], signal: Tensor, gradients: Tensor) -> None:
        """Write the gradients of all parameters into ``gradients`` (K, D).

        Args:
            rows: (K, D), as in :meth:`forward`.
            values: what that returned.
            signal: (K, B, ...), the gradient by the output.
            gradients: may be padded, each row's numbers stand together.
        """
        weights, _, functions = self.tensors(rows)
        signals = signals_of(signal.reshape(values[-1].shape), values, weights, functions)
        move(values, signals, *self.tensors(gradients)[:2], keep=0.0, rate=-1.0)

    def descend(self, rows: Tensor, values: list[Tensor], signal: Tensor, *, keep: float, rate: float) -> None:
        """Make every parameter ``keep`` times itself less ``rate`` times its gradient, in one pass over the rows."""
        weights, biases, functions = self.tensors(rows)
        signals = signals_of(signal.reshape(values[-1].shape), values, weights, functions)
        move(values, signals, weights, biases, keep=keep, rate=rate)

    def takes(self, spec: DataSpec, rows: Tensor) -> bool:
        """Return whether examples are vectors of this network's size, or are made such by it."""
        shaped = len(spec.shape) == 1 or (self.flattens and len(spec.shape) > 1)
        return shaped and not spec.integer and math.prod(spec.shape) == self.layers[0].inputs

    def run(self, rows: Tensor, examples: Examples, rule: Rule, ends: Ends) -> None:
        """Make local steps of gradient descent on cross-entropies, and write out every copy after its last one.

        All of it is one call without Python's interpreter, where PyTorch can do that.

        Args:
            rows: (K, D) parameters, may be padded.
            examples: of the steps.
            rule: of a step.
            ends: where the copies go.
        """
        program: Callable[..., None] = without_interpreter(run_steps) if rows.device.type == "cpu" else run_steps
        keep, rate, towards, anchor, apart = rule
        common: list[Tensor] = []
        if apart and anchor is not None:  # the pull to it is in what is kept of a difference
            weights, biases, _ = self.tensors(anchor[None])
            common, towards = weights + biases, 0.0
        program(*examples, rows, *self.tensors(rows), keep, rate, towards, anchor, common, *ends)

    def runs_apart(self, spec: DataSpec, rule: Rule, start: Tensor) -> bool:
        """Return whether copies that ``start`` (D,) at one point can be computed by their differences from it: those of
        one layer, under a rule that leaves the start where it is without a gradient.

        The point's share of the outputs is a product with weights that all copies have in common; the pull is a factor
        of the difference, no pass over the rows; and in the first step there is no difference yet.
        """
        layer = self.layers[0]
        alone = len(self.layers) == 1 and layer.function < 0 and start.dim() == 1 and self.takes(spec, start)
        return alone and (rule.anchor is None or rule.anchor is start) and abs(rule.keep + rule.towards - 1) < 1e-12


class Examples(NamedTuple):
    """What S local steps of K copies are made on.

    Attributes:
        x: (N, ...), numbers of any type.
        y: int64 (N,), classes.
        scale, shift: the inputs are ``x * scale + shift``.
        used: int64 (S, K, B), rows of ``x`` and ``y``.
        mask: bool (S, K, B), which of them are examples and no padding.
        active: how many leading copies a step has.
        widths: with how many leading examples each.
    """

    x: Tensor
    y: Tensor
    scale: float
    shift: float
    used: Tensor
    mask: Tensor
    active: list[int]
    widths: list[int]


class Rule(NamedTuple):
    """w <- keep w - rate gradient + towards anchor; the anchor is (D,), (K, D) or None.

    Where the copies are ``apart``, the rows become their differences from the anchor (D,), at which all of them start,
    whatever the rows held; see :meth:`Perceptron.runs_apart`.
    """

    keep: float
    rate: float
    towards: float
    anchor: Tensor | None
    apart: bool = False


class Ends(NamedTuple):
    """Where a copy goes after its last step.

    Attributes:
        last: the number of that step, by copy; one that is not among the steps goes nowhere.
        where: its row of ``out``.
        out: (n, D); None for nowhere.
        less: (D,), what is subtracted from it there; None for nothing.
        kept: (n, D), where it goes as it is, beside; None for nowhere.
        sums: (n,), where the sum of its numbers goes, which is finite where they are; None for nowhere.
        cells: float64 (D,), a clipped sum that what would go to ``out`` is added to, see
            :func:`~fedmtl._clipped.add_clipped`; None for none.
        limits: its limit, order and width.
    """

    last: list[int]
    where: list[int]
    out: Tensor | None
    less: Tensor | None = None
    kept: Tensor | None = None
    sums: Tensor | None = None
    cells: Tensor | None = None
    limits: list[float] = [0.0, 2.0, 1.0]  # noqa: RUF012 - nobody changes it


def values_of(x: Tensor, weights: list[Tensor], biases: list[Tensor], functions: list[int]) -> list[Tensor]:
    """Return the input (K, B, inputs) and the output (K, B, outputs) of every layer of K copies.

    This function and those below are compiled by :func:`~fedmtl._compiled.without_interpreter`, so that they
    keep to what it knows.

    Args:
        x: (K, B, inputs).
        weights: (K, outputs, inputs), by layer.
        biases: (K, 1, outputs), or (K, 1, 0) of a layer without them.
        functions: numbers in :data:`FUNCTIONS`, or -1.
    """
    values = [x]
    for layer in range(len(weights)):
        if biases[layer].shape[2] > 0:
            value = torch.baddbmm(biases[layer], values[layer], weights[layer].mT)
        else:
            value = torch.bmm(values[layer], weights[layer].mT)
        values.append(value_of(functions[layer], value))
    return values


def value_of(function: int, x: Tensor) -> Tensor:
    """Return a function of :data:`FUNCTIONS`, elementwise."""
    if function == 0:
        return torch.relu(x)
    if function == 1:
        return torch.tanh(x)
    if function == 2:
        return torch.sigmoid(x)
    return x


def slope_of(function: int, signal: Tensor, value: Tensor) -> Tensor:
    """Return the gradient by the argument of a function of :data:`FUNCTIONS`, from that by its value."""
    if function == 0:
        return torch.ops.aten.threshold_backward(signal, value, 0)  # type: ignore[no-any-return]
    if function == 1:
        return torch.ops.aten.tanh_backward(signal, value)  # type: ignore[no-any-return]
    if function == 2:
        return torch.ops.aten.sigmoid_backward(signal, value)  # type: ignore[no-any-return]
    return signal


def signals_of(signal: Tensor, values: list[Tensor], weights: list[Tensor], functions: list[int]) -> list[Tensor]:
    """Return the gradients (K, B, outputs) by every layer's product, the last layer first.

    Args:
        signal: (K, B, outputs), by the output of the last one.
        values: of :func:`values_of`.
        weights, functions: as there.
    """
    signals: list[Tensor] = []
    for back in range(1, len(weights) + 1):
        layer = len(weights) - back
        if back > 1:
            signal = torch.bmm(signals[back - 2], weights[layer + 1])
        signals.append(slope_of(functions[layer], signal, values[layer + 1]))
    return signals


def move(
    values: list[Tensor],
    signals: list[Tensor],
    weights: list[Tensor],
    biases: list[Tensor],
    keep: float,
    rate: float,
) -> None:
    """Make every parameter ``keep`` times itself, and of 0 nothing, less ``rate`` times its gradient.

    Args:
        values, signals: of :func:`values_of` and :func:`signals_of`.
        weights, biases: what is changed.
        keep, rate: of gradient descent with decay; 0 and -1 write the gradients.
    """
    for layer in range(len(weights)):
        signal = signals[len(weights) - 1 - layer]
        weights[layer].baddbmm_(signal.mT, values[layer], beta=keep, alpha=-rate)
        if biases[layer].shape[2] > 0:
            ones = torch.ones([signal.shape[0], 1, signal.shape[1]], dtype=signal.dtype, device=signal.device)
            biases[layer].baddbmm_(ones, signal, beta=keep, alpha=-rate)


def cross_entropy_signal(outputs: Tensor, targets: Tensor, mask: Tensor) -> Tensor:
    """Return the gradient (K, B, C), by the outputs (K, B, C), of every copy's mean cross-entropy.

    Args:
        outputs: (K, B, C).
        targets: int64 (K, B).
        mask: bool (K, B), which entries are examples and no padding.
    """
    weight = mask.to(outputs.dtype)
    weight = weight.div_(weight.sum(1, keepdim=True))[:, :, None]
    wrong = probabilities_of(outputs)
    return wrong.scatter_add_(-1, targets[:, :, None], torch.full_like(weight, -1.0)).mul_(weight)


def pulled_signal(outputs: Tensor, targets: Tensor, mask: Tensor, pull: Pull) -> Tensor:
    """Return the gradient (K, B, C), by the outputs, of every copy's mean of cross-entropy and strength s times
    :func:`.losses.softmax_divergence`.

    With the probabilities p and q of outputs and others and g = outputs - others, which is log p - log q but for a
    constant, the divergence sum (p - q) g has the gradient p (g - sum p g) + p - q.

    Args:
        outputs, targets, mask: as for :func:`cross_entropy_signal`.
        pull: its divergence is that one.
    """
    p, q, gap = probabilities_of(outputs), probabilities_of(pull.others), outputs - pull.others
    towards = gap.sub_((p * gap).sum(-1, keepdim=True)).mul_(p).add_(p).sub_(q)
    weight = mask.to(outputs.dtype)
    weight = weight.div_(weight.sum(1, keepdim=True))[:, :, None]
    wrong = p.add_(towards, alpha=pull.strength)
    return wrong.scatter_add_(-1, targets[:, :, None], torch.full_like(weight, -1.0)).mul_(weight)


def probabilities_of(outputs: Tensor) -> Tensor:
    """Return the softmax of outputs (K, B, C): of fewer than 16 classes, which :func:`torch.softmax` takes one number
    after another on a CPU, by operations on all of them, in up to a fifth of the time."""
    if outputs.shape[-1] >= 16:
        return torch.softmax(outputs, -1)
    masses = (outputs - outputs.amax(-1, keepdim=True)).exp_()
    return masses.div_(masses.sum(-1, keepdim=True))


def run_steps(
    x: Tensor,
    y: Tensor,
    scale: float,
    shift: float,
    used: Tensor,
    mask: Tensor,
    active: list[int],
    widths: list[int],
    rows: Tensor,
    weights: list[Tensor],
    biases: list[Tensor],
    functions: list[int],
    keep: float,
    rate: float,
    towards: float,
    anchor: Optional[Tensor],  # noqa: UP045 - what TorchScript can read in every version
    common: list[Tensor],
    last: list[int],
    where: list[int],
    out: Optional[Tensor],  # noqa: UP045
    less: Optional[Tensor],  # noqa: UP045
    kept: Optional[Tensor],  # noqa: UP045
    sums: Optional[Tensor],  # noqa: UP045
    cells: Optional[Tensor],  # noqa: UP045
    limits: list[float],
) -> None:
    """Make the local steps of :meth:`Perceptron.run`, whose arguments these are; ``common`` is empty, or where rows are
    differences what :func:`values_apart` takes."""
    for step in range(len(active)):
        copies, width = active[step], widths[step]
        leading = [weight[:copies] for weight in weights]
        shifts = [bias[:copies] for bias in biases]
        taken = used[step, :copies, :width].reshape(-1)
        inputs = inputs_of(x, taken, scale, shift, rows).view(copies, width, -1)
        moved = len(common) == 0 or step > 0
        if len(common) == 0:
            values = values_of(inputs, leading, shifts, functions)
        else:
            values = values_apart(inputs, leading, shifts, common, moved)
        classes = y.index_select(0, taken).view(copies, width)
        signal = cross_entropy_signal(values[-1], classes, mask[step, :copies, :width])
        signals = signals_of(signal, values, leading, functions)
        move(values, signals, leading, shifts, keep if moved else 0.0, rate)
        if anchor is not None and towards != 0.0:
            rows[:copies].add_(anchor if anchor.dim() == 1 else anchor[:copies], alpha=towards)
        write_ends(step, rows, last, where, out, less, kept, sums, cells, limits)


def values_apart(
    x: Tensor, weights: list[Tensor], biases: list[Tensor], common: list[Tensor], moved: bool
) -> list[Tensor]:
    """Return :func:`values_of` of one layer whose parameters are differences from those that all copies have in common.

    Args:
        x, weights, biases: as there; of one layer.
        common: its weight (1, outputs, inputs) and bias (1, 1, outputs), or (1, 1, 0) without one.
        moved: whether there are differences yet; else what the rows hold is not read.
    """
    outputs = torch.bmm(x, common[0].expand(x.shape[0], -1, -1).mT)
    if common[1].shape[2] > 0:
        outputs.add_(common[1])
    if moved:
        outputs.baddbmm_(x, weights[0].mT)
        if biases[0].shape[2] > 0:
            outputs.add_(biases[0])
    return [x, outputs]


def inputs_of(x: Tensor, taken: Tensor, scale: float, shift: float, rows: Tensor) -> Tensor:
    """Return the rows of ``x`` that are ``taken``, int64 (n,), times a scale and shifted, in the dtype of ``rows``."""
    inputs = x.index_select(0, taken).to(rows.dtype)
    if scale != 1.0:
        inputs.mul_(scale)
    if shift != 0.0:
        inputs.add_(shift)
    return inputs


def write_ends(
    step: int,
    rows: Tensor,
    last: list[int],
    where: list[int],
    out: Optional[Tensor],  # noqa: UP045
    less: Optional[Tensor],  # noqa: UP045
    kept: Optional[Tensor],  # noqa: UP045
    sums: Optional[Tensor],  # noqa: UP045
    cells: Optional[Tensor],  # noqa: UP045
    limits: list[float],
) -> None:
    """Write out the copies whose last step this was, see :class:`Ends`."""
    for copy in range(len(last)):
        if last[copy] == step:
            if out is not None:
                if less is None:
                    out[where[copy]].copy_(rows[copy])
                else:
                    torch.sub(rows[copy], less, out=out[where[copy]])
            if cells is not None:
                row = rows[copy] if less is None else rows[copy] - less
                add_clipped(cells, row, limits[0], limits[1], limits[2])
            if kept is not None:
                kept[where[copy]].copy_(rows[copy])
            if sums is not None:
                torch.sum(rows[copy], 0, out=sums[where[copy]])


def output_gradient(
    loss: Loss, outputs: Tensor, targets: Tensor, mask: Tensor, extra: Callable[[Tensor], Tensor] | None = None
) -> Tensor:
    """Return the gradient, by its outputs, of every copy's mean loss: (K, B, ...).

    Args:
        loss: one value per example.
        outputs, targets: (K, B, ...).
        mask: bool (K, B), which entries are examples and no padding.
        extra: outputs -> what is added to the losses, (K, B).
    """
    if loss is cross_entropy and outputs.dim() == 3 and targets.dim() == 2:
        if extra is None:
            return cross_entropy_signal(outputs, targets, mask)
        if isinstance(extra, Pull) and extra.divergence is softmax_divergence:
            return pulled_signal(outputs, targets, mask, extra)
    with torch.enable_grad():
        values = outputs.detach().requires_grad_()
        losses = example_losses(loss, values, targets)
        losses = losses if extra is None else losses + extra(values)
        return torch.autograd.grad(client_means(losses, mask).sum(), values)[0]


def places_of(module: nn.Module, layout: Layout) -> dict[int, int] | None:
    """Return the first number of each parameter in a row, by its identity; None where one is frozen or occurs twice."""
    parameters = dict(module.named_parameters())
    if len(parameters) != len(layout.names) or any(len(names) > 1 for names in layout.all_names):
        return None
    return {id(parameters[name]): place for name, place in zip(layout.names, layout.offsets, strict=False)}


def flat_parts(module: nn.Module, others: tuple[type[nn.Module], ...] = ()) -> list[nn.Module] | None:
    """Return the linear layers, elementwise functions and flattenings of nested ``nn.Sequential``, and modules of the
    ``others``; None where there is anything else, or a hook."""
    if hooked(module):
        return None
    if type(module) is nn.Sequential:
        found: list[nn.Module] = []
        for child in module:
            parts = flat_parts(child, others)
            if parts is None:
                return None
            found += parts
        return found
    if type(module) is nn.Identity:
        return []
    if type(module) is nn.Flatten:
        return [module] if (module.start_dim, module.end_dim) == (1, -1) else None
    return [module] if type(module) in (nn.Linear, *FUNCTIONS, *others) else None
