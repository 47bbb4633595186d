"""Perceptrons of K copies by batched products: forward and backward straight from and to their [K, D] rows.

What :func:`torch.func.vmap` computes for such a network, without its price: gradients that arrive in another layout
and are copied, and, of plain gradient descent, a gradient that is written before it is read again.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from .kernels import hooked
from .losses import Loss, client_means, cross_entropy, example_losses

if TYPE_CHECKING:
    from .module import Layout

_SLOPES: dict[type[nn.Module], tuple[Callable[[Tensor], Tensor], Callable[[Tensor, Tensor], Tensor]]] = {
    nn.ReLU: (torch.relu, lambda signal, value: torch.ops.aten.threshold_backward(signal, value, 0)),
    nn.Tanh: (torch.tanh, torch.ops.aten.tanh_backward),
    nn.Sigmoid: (torch.sigmoid, torch.ops.aten.sigmoid_backward),
}
"""Elementwise functions, and (gradient by their value, their value) -> gradient by their argument."""


@dataclass(frozen=True)
class Linear:
    """A linear layer: where its parameters stand in a row.

    Attributes:
        weight: first number of the weight (outputs, inputs).
        bias: first number of the bias (outputs,); None without one.
        outputs, inputs: sizes.
        function: type of the elementwise function after it; None without one.
    """

    weight: int
    bias: int | None
    outputs: int
    inputs: int
    function: type[nn.Module] | None = None

    def matrices(self, rows: Tensor) -> Tensor:
        """(K, D) -> the weights (K, outputs, inputs), a view."""
        place = rows.storage_offset() + self.weight
        return rows.as_strided((len(rows), self.outputs, self.inputs), (rows.stride(0), self.inputs, 1), place)

    def shifts(self, rows: Tensor) -> Tensor:
        """(K, D) -> the biases (K, 1, outputs), a view."""
        assert self.bias is not None
        return rows[:, None, self.bias : self.bias + self.outputs]


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
        parts = _parts(module)
        names = {id(p): name for name, p in module.named_parameters()}
        if parts is None or len(names) != len(layout.names) or any(len(names) > 1 for names in layout.all_names):
            return None
        places = dict(zip(layout.names, layout.offsets, strict=False))
        layers: list[Linear] = []
        flattens = False
        for part in parts:
            if type(part) is nn.Linear:
                bias = None if part.bias is None else places[names[id(part.bias)]]
                layers.append(Linear(places[names[id(part.weight)]], bias, part.out_features, part.in_features))
            elif type(part) in _SLOPES:
                if not layers or layers[-1].function is not None:
                    return None
                layers[-1] = replace(layers[-1], function=type(part))
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
            weight = layer.matrices(rows).mT
            value = torch.bmm(value, weight) if layer.bias is None else torch.baddbmm(layer.shifts(rows), value, weight)
            values.append(value if layer.function is None else _SLOPES[layer.function][0](value))
            value = values[-1]
        return values

    def backward(self, rows: Tensor, values: list[Tensor], signal: Tensor, gradients: Tensor) -> None:
        """Write the gradients of all parameters into ``gradients`` (K, D).

        Args:
            rows: (K, D), as in :meth:`forward`.
            values: what that returned.
            signal: (K, B, ...), the gradient by the output.
            gradients: may be padded, each row's numbers stand together.
        """
        for layer, product, value in self._signals(rows, values, signal):
            layer.matrices(gradients).baddbmm_(product.mT, value, beta=0.0)
            if layer.bias is not None:
                torch.sum(product, 1, keepdim=True, out=layer.shifts(gradients))

    def descend(self, rows: Tensor, values: list[Tensor], signal: Tensor, *, keep: float, rate: float) -> None:
        """Make every parameter ``keep`` times itself less ``rate`` times its gradient, in one pass over the rows."""
        for layer, product, value in self._signals(rows, values, signal):
            layer.matrices(rows).baddbmm_(product.mT, value, beta=keep, alpha=-rate)
            if layer.bias is not None:
                layer.shifts(rows).mul_(keep).sub_(product.sum(1, keepdim=True), alpha=rate)

    def _signals(self, rows: Tensor, values: list[Tensor], signal: Tensor) -> list[tuple[Linear, Tensor, Tensor]]:
        """Return for each layer, the last one first, the gradient by its product, and its input."""
        found = []
        for number in range(len(self.layers) - 1, -1, -1):
            layer = self.layers[number]
            signal = signal.reshape(values[number + 1].shape)
            if layer.function is not None:
                signal = _SLOPES[layer.function][1](signal, values[number + 1])
            found.append((layer, signal, values[number]))
            if number:
                signal = torch.bmm(signal, layer.matrices(rows))
        return found


def output_gradient(
    loss: Loss, outputs: Tensor, targets: Tensor, mask: Tensor, extra: Callable[[Tensor], Tensor] | None = None
) -> Tensor:
    """Return the gradient, by its outputs, of every copy's mean loss: (K, B, ...), which may be in ``outputs``' memory.

    Args:
        loss: one value per example.
        outputs, targets: (K, B, ...).
        mask: bool (K, B), which entries are examples and no padding.
        extra: outputs -> what is added to the losses, (K, B).
    """
    if loss is cross_entropy and extra is None and outputs.dim() == 3 and targets.dim() == 2:
        weight = mask.to(outputs.dtype).div_(mask.sum(1, keepdim=True))[..., None]
        wrong = torch.softmax(outputs, -1)
        wrong.scatter_add_(-1, targets[..., None], torch.full_like(weight, -1.0))
        return wrong.mul_(weight)
    with torch.enable_grad():
        values = outputs.detach().requires_grad_()
        losses = example_losses(loss, values, targets)
        losses = losses if extra is None else losses + extra(values)
        return torch.autograd.grad(client_means(losses, mask).sum(), values)[0]


def _parts(module: nn.Module) -> list[nn.Module] | None:
    """Return the layers, functions and first flattening of nested ``nn.Sequential``; None where there is anything
    else."""
    if hooked(module):
        return None
    if type(module) is nn.Sequential:
        found: list[nn.Module] = []
        for child in module:
            parts = _parts(child)
            if parts is None:
                return None
            found += parts
        return found
    if type(module) is nn.Identity:
        return []
    if type(module) is nn.Flatten:
        return [module] if (module.start_dim, module.end_dim) == (1, -1) else None
    return [module] if type(module) is nn.Linear or type(module) in _SLOPES else None
