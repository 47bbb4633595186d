"""Perceptrons of K copies by batched products: forward and backward straight from and to their [K, D] rows.

What :func:`torch.func.vmap` computes for such a network, without its price: gradients that arrive in another layout
and are copied, and, of plain gradient descent, a gradient that is written before it is read again.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor, nn

from .losses import Loss, cross_entropy, example_losses

if TYPE_CHECKING:
    from .module import Layout


class Function(NamedTuple):
    """An increasing elementwise function, and its gradient: (gradient by the value, value) -> by the argument."""

    value: Callable[[Tensor], Tensor]
    slope: Callable[[Tensor, Tensor], Tensor]


FUNCTIONS: dict[type[nn.Module], Function] = {
    nn.ReLU: Function(torch.relu, lambda signal, value: torch.ops.aten.threshold_backward(signal, value, 0)),
    nn.Tanh: Function(torch.tanh, torch.ops.aten.tanh_backward),
    nn.Sigmoid: Function(torch.sigmoid, torch.ops.aten.sigmoid_backward),
}
"""Functions that may stand after a layer."""


@dataclass(frozen=True)
class Linear:
    """A linear layer: where its parameters stand in a row.

    Attributes:
        weight: first number of the weight (outputs, inputs).
        bias: first number of the bias (outputs,); None without one.
        outputs, inputs: sizes.
        function: the elementwise function after it; None without one.
    """

    weight: int
    bias: int | None
    outputs: int
    inputs: int
    function: Function | None = None

    def matrices(self, rows: Tensor) -> Tensor:
        """(K, D) -> the weights (K, outputs, inputs), a view."""
        place = rows.storage_offset() + self.weight
        return rows.as_strided((len(rows), self.outputs, self.inputs), (rows.stride(0), self.inputs, 1), place)

    def shifts(self, rows: Tensor) -> Tensor:
        """(K, D) -> the biases (K, 1, outputs), a view; of a layer that has them."""
        assert self.bias is not None
        return rows[:, None, self.bias : self.bias + self.outputs]

    def forward(self, rows: Tensor, x: Tensor) -> Tensor:
        """(K, D), (K, B, inputs) -> (K, B, outputs)."""
        weights = self.matrices(rows).mT
        value = torch.bmm(x, weights) if self.bias is None else torch.baddbmm(self.shifts(rows), x, weights)
        return value if self.function is None else self.function.value(value)

    def change(self, target: Tensor, x: Tensor, signal: Tensor, *, keep: float, rate: float) -> None:
        """Make the layer's parameters in ``target`` (K, D) ``keep`` times themselves, and of 0 nothing, less ``rate``
        times their gradients, given those by the product (K, B, outputs)."""
        self.matrices(target).baddbmm_(signal.mT, x, beta=keep, alpha=-rate)
        if self.bias is not None:
            ones = signal.new_ones(len(signal), 1, signal.shape[1])
            self.shifts(target).baddbmm_(ones, signal, beta=keep, alpha=-rate)


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
                if not layers or layers[-1].function is not None:
                    return None
                layers[-1] = replace(layers[-1], function=FUNCTIONS[type(part)])
            elif not layers:  # later there are vectors already
                flattens = True
        return cls(tuple(layers), flattens) if layers else None

    def forward(self, rows: Tensor, x: Tensor) -> list[Tensor] | None:
        """Return the input as vectors (K, B, inputs) and the output of every layer (K, B, outputs); None where the
        input is no batch of vectors of this size, or of another dtype."""
        value = x.flatten(2) if self.flattens and x.dim() > 3 else x
        if value.dim() != 3 or value.shape[-1] != self.layers[0].inputs or value.dtype != rows.dtype:
            return None
        values = [value]
        for layer in self.layers:
            values.append(layer.forward(rows, values[-1]))
        return values

    def descend(
        self,
        rows: Tensor,
        values: list[Tensor],
        signal: Tensor,
        target: Tensor,
        *,
        keep: float,
        rate: float,
        inward: bool = False,
    ) -> Tensor:
        """Make ``target`` ``keep`` times itself, and of 0 nothing, less ``rate`` times the gradient by all parameters.

        Args:
            rows: (K, D), as in :meth:`forward`.
            values: what that returned.
            signal: (K, B, ...), the gradient by the output.
            target: (K, D), may be padded, and may be ``rows``.
            keep, rate: of gradient descent with decay; 0 and -1 write the gradients.
            inward: whether the gradient by the input is asked for.

        Returns:
            That gradient, (K, B, inputs), where it is asked for.
        """
        signal = signal.reshape(values[-1].shape)
        for number in reversed(range(len(self.layers))):
            layer = self.layers[number]
            if layer.function is not None:
                signal = layer.function.slope(signal, values[number + 1])
            below = torch.bmm(signal, layer.matrices(rows)) if number or inward else signal
            layer.change(target, values[number], signal, keep=keep, rate=rate)
            signal = below
        return signal


def descend(target: Tensor, gradient: Tensor, *, keep: float, rate: float) -> None:
    """Make ``target`` ``keep`` times itself, and of 0 nothing, less ``rate`` times a gradient."""
    if keep:
        target.mul_(keep).sub_(gradient, alpha=rate)
    else:
        torch.mul(gradient, -rate, out=target)


def output_gradient(
    loss: Loss, outputs: Tensor, targets: Tensor, weight: Tensor, extra: Callable[[Tensor], Tensor] | None = None
) -> Tensor:
    """Return the gradient, by its outputs, of every copy's weighted sum of losses: (K, B, ...).

    Args:
        loss: one value per example.
        outputs, targets: (K, B, ...).
        weight: (K, B), of the examples; 0 of padding.
        extra: outputs -> what is added to the losses, (K, B).
    """
    if loss is cross_entropy and extra is None and outputs.dim() == 3 and targets.dim() == 2:
        wrong = torch.softmax(outputs, -1).mul_(weight[..., None])
        return wrong.scatter_add_(-1, targets[..., None], -weight[..., None])
    with torch.enable_grad():
        values = outputs.detach().requires_grad_()
        losses = example_losses(loss, values, targets)
        losses = losses if extra is None else losses + extra(values)
        return torch.autograd.grad((losses * weight).sum(), values)[0]


def places_of(module: nn.Module, layout: Layout) -> dict[int, int] | None:
    """Return the first number of each parameter in a row, by its identity; None where one is frozen or occurs twice."""
    parameters = dict(module.named_parameters())
    if len(parameters) != len(layout.names) or any(len(names) > 1 for names in layout.all_names):
        return None
    return {id(parameters[name]): place for name, place in zip(layout.names, layout.offsets, strict=False)}


def flat_parts(module: nn.Module, others: tuple[type[nn.Module], ...] = ()) -> list[nn.Module] | None:
    """Return the linear layers, elementwise functions and flattenings of nested ``nn.Sequential``, and modules of the
    ``others``; None where there is anything else, or a hook."""
    if any((module._forward_hooks, module._forward_pre_hooks, module._backward_hooks, module._backward_pre_hooks)):
        return None
    if type(module) is nn.Sequential:
        flat: list[nn.Module] = []
        for child in module:
            parts = flat_parts(child, others)
            if parts is None:
                return None
            flat += parts
        return flat
    if type(module) is nn.Identity:
        return []
    if type(module) is nn.Flatten:
        return [module] if (module.start_dim, module.end_dim) == (1, -1) else None
    return [module] if type(module) in (nn.Linear, *FUNCTIONS, *others) else None
