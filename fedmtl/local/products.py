"""Perceptrons of K copies by batched products: forward and backward straight from and to their [K,
D] rows.

They have the values of :func:`torch.func.vmap` without its price: gradients that arrive in another
layout and are copied, and, of plain gradient descent, a gradient that is written before it is read
again.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor, nn

from .losses import Loss, cross_entropy, example_losses

if TYPE_CHECKING:
    from .layout import Layout


class Function(NamedTuple):
    """An increasing elementwise function, and its gradient: (gradient by the value, value) -> by
    the argument."""

    value: Callable[[Tensor], Tensor]
    slope: Callable[[Tensor, Tensor], Tensor]


FUNCTIONS: dict[type[nn.Module], Function] = {
    nn.ReLU: Function(
        torch.relu, lambda signal, value: torch.ops.aten.threshold_backward(signal, value, 0)
    ),
    nn.Tanh: Function(torch.tanh, torch.ops.aten.tanh_backward),
    nn.Sigmoid: Function(torch.sigmoid, torch.ops.aten.sigmoid_backward),
}
"""Functions that may stand after a layer."""


Views = Mapping[str, Tensor]
"""Parameters by name, views of rows, see :meth:`.module.Layout.views`."""


@dataclass(frozen=True)
class Linear:
    """A linear layer.

    Attributes:
        weight: name of the weight (outputs, inputs).
        bias: name of the bias (outputs,); None without one.
        inputs: their number.
        function: the elementwise function after it; None without one.
    """

    weight: str
    bias: str | None
    inputs: int
    function: Function | None = None


@dataclass(frozen=True)
class Perceptron:
    """Linear layers with elementwise functions between them.

    Attributes:
        layout: of a row.
        layers: in the order of computation.
        flattens: True if an example of any shape is first made a vector.
    """

    layout: Layout
    layers: tuple[Linear, ...]
    flattens: bool

    @classmethod
    def of(cls, module: nn.Module, layout: Layout) -> Perceptron | None:
        """Returns the perceptron that a module computes in training mode; None if it is no such
        network, or if a parameter is frozen, occurs twice, or has a hook."""
        parts = flat_parts(module)
        names = names_of(module, layout)
        if parts is None or names is None:
            return None
        return cls.of_parts(parts, names, layout)

    @classmethod
    def of_parts(
        cls, parts: list[nn.Module], names: dict[int, str], layout: Layout
    ) -> Perceptron | None:
        """Returns the perceptron of consecutive :func:`flat_parts`; None if they make none."""
        layers: list[Linear] = []
        flattens = False
        for part in parts:
            if type(part) is nn.Linear:
                bias = None
                if part.bias is not None:
                    bias = names[id(part.bias)]
                layers.append(Linear(names[id(part.weight)], bias, part.in_features))
            elif type(part) in FUNCTIONS:
                if not layers or layers[-1].function is not None:
                    return None
                layers[-1] = replace(layers[-1], function=FUNCTIONS[type(part)])
            elif not layers:  # later there are vectors already
                flattens = True
        if not layers:
            return None
        return cls(layout, tuple(layers), flattens)

    def forward(self, rows: Tensor, x: Tensor) -> list[Tensor] | None:
        """Returns the input as vectors (K, B, inputs) and the output of every layer (K, B,
        outputs); None if the input is no batch of vectors of this size, or of another dtype."""
        value = x
        if self.flattens and x.dim() > 3:
            value = x.flatten(2)
        if (
            value.dim() != 3
            or value.shape[-1] != self.layers[0].inputs
            or value.dtype != rows.dtype
        ):
            return None
        values = [value]
        parameters = self.layout.views(rows)
        for layer in self.layers:
            weights = parameters[layer.weight].mT
            if layer.bias is None:
                value = torch.bmm(value, weights)
            else:
                value = torch.baddbmm(parameters[layer.bias][:, None], value, weights)
            if layer.function is not None:
                value = layer.function.value(value)
            values.append(value)
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
        """Sets ``target`` to ``keep * target - rate * gradient``, the gradient by all parameters;
        with ``keep`` 0 the old values are not read.

        Args:
            rows: (K, D), as in :meth:`forward`.
            values: the values that :meth:`forward` returned.
            signal: (K, B, ...), the gradient by the output.
            target: (K, D), may be padded, and may be ``rows``; (K B, D) for the gradients of the
                examples of each copy apart.
            keep: 1 less the decay of a step of gradient descent; 0 to write the gradients.
            rate: step size; -1 to write the gradients.
            inward: asks for the gradient by the input.

        Returns:
            The gradient by the input, (K, B, inputs), if it is asked for; else that by the product
            of the first layer.
        """
        signal = signal.reshape(values[-1].shape)
        parameters = self.layout.views(rows)
        changed = parameters
        if target.data_ptr() != rows.data_ptr():
            changed = self.layout.views(target)
        # Backward through the layers; a layer changes after the signal has passed it.
        for number in reversed(range(len(self.layers))):
            layer = self.layers[number]
            if layer.function is not None:
                signal = layer.function.slope(signal, values[number + 1])
            below = signal
            if number or inward:  # before the weights change, which may be those of the target
                below = torch.bmm(signal, parameters[layer.weight])
            x = values[number]
            weights = changed[layer.weight]
            # of the gradients of examples apart, each is a group of its own
            if len(weights) != len(signal):
                signal = signal.reshape(len(weights), -1, signal.shape[2])
                x = x.reshape(len(weights), -1, x.shape[2])
            # Weight decay and the step in one pass over the weights.
            weights.baddbmm_(signal.mT, x, beta=keep, alpha=-rate)
            if layer.bias is not None:
                # A product with ones, since it can scale the target in the same call.
                ones = signal.new_ones(len(signal), 1, signal.shape[1])
                changed[layer.bias][:, None].baddbmm_(ones, signal, beta=keep, alpha=-rate)
            signal = below
        return signal


def move_along(target: Tensor, gradient: Tensor, *, keep: float, rate: float) -> None:
    """Sets ``target`` to ``keep * target - rate * gradient``; with ``keep`` 0 the old values are
    not read."""
    if keep:
        target.mul_(keep).sub_(gradient, alpha=rate)
    else:
        torch.mul(gradient, -rate, out=target)


def output_gradient(
    loss: Loss,
    outputs: Tensor,
    targets: Tensor,
    weight: Tensor,
    extra: Callable[[Tensor], Tensor] | None = None,
) -> Tensor:
    """Returns the gradient, by its outputs, of every copy's weighted sum of losses: (K, B, ...).

    Args:
        loss: one value per example.
        outputs: (K, B, ...).
        targets: (K, B, ...).
        weight: (K, B), of the examples; 0 of padding.
        extra: outputs -> an addition to the losses, (K, B).
    """
    if loss is cross_entropy and extra is None and outputs.dim() == 3 and targets.dim() == 2:
        # The gradient of the cross-entropy: probabilities less the label, without autograd.
        wrong = torch.softmax(outputs, -1).mul_(weight[..., None])
        return wrong.scatter_add_(-1, targets[..., None], -weight[..., None])
    with torch.enable_grad():
        values = outputs.detach().requires_grad_()
        losses = example_losses(loss, values, targets)
        if extra is not None:
            losses = losses + extra(values)
        return torch.autograd.grad((losses * weight).sum(), values)[0]


def names_of(module: nn.Module, layout: Layout) -> dict[int, str] | None:
    """Returns the name of each parameter by its identity; None if one is frozen or occurs
    twice."""
    names = {id(parameter): name for name, parameter in module.named_parameters()}
    tied = any(len(names) > 1 for names in layout.all_names)
    if tied or len(names) != len(layout.names):
        return None
    return names


def flat_parts(
    module: nn.Module, others: tuple[type[nn.Module], ...] = ()
) -> list[nn.Module] | None:
    """Returns the linear layers, elementwise functions and flattenings of nested ``nn.Sequential``,
    and modules of the ``others``; None if there is anything else, or a hook."""
    if any(
        (
            module._forward_hooks,
            module._forward_pre_hooks,
            module._backward_hooks,
            module._backward_pre_hooks,
        )
    ):
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
        if (module.start_dim, module.end_dim) == (1, -1):
            return [module]
        return None
    if type(module) in (nn.Linear, *FUNCTIONS, *others):
        return [module]
    return None
