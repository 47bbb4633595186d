"""The gradient of every single example, for the copies of a stacked module: what DP-SGD clips.

Abadi et al.: "Deep Learning with Differential Privacy", CCS 2016, Algorithm 1, the line "compute gradient".
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch
from torch import Tensor
from torch.func import functional_call, grad, vmap

from ..errors import ConfigError
from .losses import Loss, example_losses
from .module import StackedModule

CHUNK_BYTES = 1 << 26
"""Gradients of one chunk take at most this many bytes, or are those of one example."""

Tensors = dict[str, Tensor]


def example_gradients(
    stack: StackedModule,
    x: Tensor,
    y: Tensor,
    loss: Loss,
    *,
    mask: Tensor | None = None,
    address: Tensor | None = None,
    position: Tensor | None = None,
    chunk_bytes: int = CHUNK_BYTES,
) -> Iterator[tuple[Tensor, Tensor]]:
    """Gradients of each example's own loss with respect to its own copy's parameters, a chunk at a time.

    The copies are the first A that were loaded into ``stack``; they must not change while the chunks are drawn. All
    examples of a copy share its weights: nothing but the gradients is made once an example.

    Args:
        stack: with A copies or more loaded.
        x, y: (A, B, ...), training-mode inputs and targets of each copy, on the stack's device.
        loss: one value per example; must work under :func:`torch.func.vmap`.
        mask: bool (A, B), which entries are examples and not padding; ``None`` for all.
        address: int64 (A, 3), client key, round and local step; needed by a module with dropout.
        position: int64 (A, B), the number that addresses an example's dropout mask. A number that stays with the
            record, such as its place among its client's records, keeps one record from changing the masks of others.
        chunk_bytes: bound on the memory of one chunk's gradients.

    Yields:
        rows (N, D), in the stack's dtype and layout, and owner int64 (N,), numbers of copies in [0, A). Every example
        that is not padding occurs once. There is always one chunk or more, empty where there are no examples at all.

    Raises:
        ConfigError: dropout without ``address`` and ``position``, or a loss without one value per example.
    """
    copies, width = x.shape[:2]
    if stack.has_dropout and (address is None or position is None):
        raise ConfigError("Dropout needs an address and a position for every example to be private example by example.")
    if address is None or position is None:  # no dropout: nothing reads them
        address, position = torch.zeros(copies, 3, dtype=torch.int64), torch.zeros(copies, width, dtype=torch.int64)
    address, position = address.to(x.device), position.to(x.device)
    real = torch.ones(copies, width, dtype=torch.bool) if mask is None else mask.cpu()
    parameters = stack.layout.views(stack.rows[:copies])
    size = max(1, chunk_bytes // (stack.layout.dimension * stack.rows.element_size()))
    columns = min(size, max(1, width))
    gradient = _gradient(stack, loss)
    if not bool(real.any()):
        yield stack.rows.new_zeros(0, stack.layout.dimension), torch.zeros(0, dtype=torch.int64, device=x.device)
    for first in range(0, copies, max(1, size // columns)):
        clients = slice(first, min(first + max(1, size // columns), copies))
        for begin in range(0, width, columns):
            part = slice(begin, min(begin + columns, width))
            present = real[clients, part]
            if not bool(present.any()):
                continue
            used = int(present.any(0).nonzero()[-1]) + 1
            part, present = slice(begin, begin + used), present[:, :used]
            block = gradient(
                {name: value[clients] for name, value in parameters.items()},
                address[clients],
                x[clients, part],
                y[clients, part],
                position[clients, part],
            )
            lead = present.numel()
            rows = torch.cat([block[name].reshape(lead, -1) for name in stack.layout.names], dim=1)
            del block
            owner = torch.arange(first, clients.stop).repeat_interleave(used)
            if not bool(present.all()):
                chosen = present.flatten().nonzero()[:, 0]
                rows, owner = rows[chosen.to(rows.device)], owner[chosen]
            yield rows, owner.to(rows.device)


def _gradient(stack: StackedModule, loss: Loss) -> Callable[[Tensors, Tensor, Tensor, Tensor, Tensor], Tensors]:
    """Return the function (parameters (A, ...), address (A, 3), x (A, B, ...), y (A, B, ...), position (A, B)) ->
    gradients (A, B, ...)."""

    def example_loss(parameters: Tensors, address: Tensor, x: Tensor, y: Tensor, position: Tensor) -> Tensor:
        tensors = parameters | stack.dropout_buffers(address, position)
        outputs = functional_call(stack.train_module, tensors, (x[None],))
        return example_losses(loss, outputs[None], y[None, None])[0, 0]

    over_examples = vmap(grad(example_loss), in_dims=(None, None, 0, 0, 0))
    over_copies = vmap(over_examples)

    def gradient(parameters: Tensors, address: Tensor, x: Tensor, y: Tensor, position: Tensor) -> Tensors:
        if x.shape[0] > 1:
            return over_copies(parameters, address, x, y, position)
        # one copy needs no second batching rule: its weights enter ordinary kernels
        single = {name: value.squeeze(0) for name, value in parameters.items()}
        result: Tensors = over_examples(single, *(value.squeeze(0) for value in (address, x, y, position)))
        return result

    return gradient
