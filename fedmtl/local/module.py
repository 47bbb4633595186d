"""K copies of a module whose parameters are one (K, D) storage with named leaf views."""

from __future__ import annotations

import copy
from collections.abc import Mapping

import torch
from torch import Tensor, nn
from torch.func import functional_call, vmap

from .._devices import on_device
from .convolutions import ConvolutionalNetwork
from .dropout import KeyedDropout
from .layout import Layout
from .products import Perceptron
from .unfolded import UnfoldedNetwork

_ALIGNED = 16


Network = Perceptron | ConvolutionalNetwork | UnfoldedNetwork
"""A network by products: it has the functions ``forward`` and ``descend``."""


def _network_of(module: nn.Module, layout: Layout, device: torch.device) -> Network | None:
    """Returns the network by products that is made for a device; None if the module is none."""
    perceptron = Perceptron.of(module, layout)
    if perceptron is not None:
        return perceptron
    convolutions = ConvolutionalNetwork.of(module, layout)
    # A CPU computes the convolutions of one copy after another, a GPU those of all copies at once.
    if convolutions is not None and device.type != "cpu":
        return UnfoldedNetwork(convolutions)
    return convolutions


class StackedModule:
    """K copies of one module, computed and differentiated as one batch.

    The trainable parameters live in one buffer ``rows`` (capacity, D), allocated once and reused.
    The losses of different copies are independent, so the gradient of their sum holds each copy's
    own gradient, and clip, proximal step, distance to an anchor and aggregation are single
    operations on rows. Frozen parameters are not batched: they are the given module's own tensors,
    and operations before the first trainable parameter are neither differentiated nor recorded.

    Args:
        module: prepared by :func:`fedmtl.local.prepare_module`; its structure is copied, and its
            parameters only if they are on another device or in another dtype.
        capacity: number of copies to allocate; grows when more are loaded.
        device, dtype: of parameters and computation.

    Attributes:
        has_dropout: True if :meth:`forward` needs an ``address`` per copy.

    Example:
        >>> import torch
        >>> from fedmtl.local import StackedModule, prepare_module
        >>> module = prepare_module(torch.nn.Linear(3, 1), torch.zeros(2, 3), seed=0)
        >>> cpu = torch.device("cpu")
        >>> stack = StackedModule(module, capacity=2, device=cpu, dtype=torch.float32)
        >>> _ = stack.load(torch.zeros(4), 2)
        >>> stack.predict(stack.rows, torch.ones(2, 5, 3)).shape  # of 5 examples for each copy
        torch.Size([2, 5, 1])
    """

    def __init__(
        self, module: nn.Module, *, capacity: int, device: torch.device, dtype: torch.dtype
    ) -> None:
        # A device without an index is the current one; a tensor on it says which.
        like = torch.empty(0, device=device, dtype=dtype)
        tensors = (*module.parameters(), *module.buffers())
        if any(
            t.device != like.device or (t.is_floating_point() and t.dtype != dtype) for t in tensors
        ):
            module = copy.deepcopy(module).to(device=device, dtype=dtype)
        # which the copies share
        same = {id(parameter): parameter for parameter in module.parameters()}
        self.train_module, self.eval_module = (
            copy.deepcopy(module, dict(same)).train(mode) for mode in (True, False)
        )
        self.layout = Layout.of(self.train_module)
        # Batched products are faster than vmap; None leaves the work to vmap.
        self.network = _network_of(self.train_module, self.layout, like.device)
        self._dropouts = [
            n for n, m in self.train_module.named_modules() if isinstance(m, KeyedDropout)
        ]
        self.has_dropout = bool(self._dropouts)
        self._allocate(like, capacity)

    def _allocate(self, like: Tensor, capacity: int) -> None:
        """Makes the buffers: each row begins at the same alignment in memory, at which products and
        sums are fastest and round alike."""
        padded = -(-self.layout.dimension // _ALIGNED) * _ALIGNED
        self.rows = like.new_zeros(capacity, padded)[:, : self.layout.dimension]

    def load(self, start: Tensor, count: int, *, place: Tensor | None = None) -> Tensor:
        """Sets the parameters of the first copies.

        Args:
            start: (D,) or (count, D); (n, D) with ``place``.
            count: number of copies.
            place: int64 (count,), the row of ``start`` for each copy; None for its own.

        Returns:
            A view of ``rows``, (count, D).
        """
        if count > len(self.rows):
            self._allocate(self.rows, count)
        rows = self.rows[:count]
        if start.dim() == 2 and place is not None:
            torch.index_select(start, 0, on_device(place, start.device), out=rows)
        else:
            rows.copy_(start.expand(count, -1))
        return rows

    def forward(self, x: Tensor, *, address: Tensor | None = None) -> Tensor:
        """Returns the training-mode outputs of the first K copies on their own batches.

        Args:
            x: (K, B, ...).
            address: int64 (K, 3), client key, round and local step, for keyed dropout.

        Returns:
            (K, B, ...), differentiable with respect to the copies' parameters.
        """
        # Leaves without history: a backward pass ends at them.
        views = self.layout.views(self.rows[: len(x)])
        self._leaves = {name: view.detach().requires_grad_() for name, view in views.items()}
        return self._call(self.train_module, self._leaves, x, address)

    def backward(self, losses: Tensor) -> Tensor:
        """Returns the gradient of ``losses.sum()`` by the copies' parameters, (K, D).

        Args:
            losses: (K,), one loss a copy, from :meth:`forward` on the same K.
        """
        leaves = list(self._leaves.values())
        gradients = torch.autograd.grad(
            losses.sum(), leaves, allow_unused=True, materialize_grads=True
        )
        return torch.cat([gradient.reshape(len(losses), -1) for gradient in gradients], 1)

    @torch.no_grad()
    def predict(self, rows: Tensor, x: Tensor) -> Tensor:
        """Returns the evaluation-mode outputs of copies with given parameters.

        Args:
            rows: (K, D) parameters, one row a copy.
            x: (K, B, ...).

        Returns:
            (K, B, ...).
        """
        return self._call(self.eval_module, self.layout.views(rows), x, None)

    def dropout_buffers(
        self, address: Tensor | None, first: Tensor | None = None
    ) -> dict[str, Tensor]:
        """Returns the buffers of the dropout layers by name, for a functional call.

        Args:
            address: see :class:`KeyedDropout`; None without dropout.
            first: see :class:`KeyedDropout`.
        """
        inputs = {"address": address, "first": first}
        return {
            f"{name}.{buffer}": value
            for name in self._dropouts
            for buffer, value in inputs.items()
            if value is not None
        }

    def _call(
        self, module: nn.Module, tensors: Mapping[str, Tensor], x: Tensor, address: Tensor | None
    ) -> Tensor:
        stacked = dict(tensors) | self.dropout_buffers(address)
        if x.shape[0] == 1:  # one copy needs no batching rule: ordinary kernels are faster
            single = {name: value.squeeze(0) for name, value in stacked.items()}
            return functional_call(module, single, (x.squeeze(0),)).unsqueeze(0)
        return vmap(lambda values, batch: functional_call(module, values, (batch,)))(stacked, x)
