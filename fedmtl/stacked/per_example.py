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

_ALIKE = 32  # examples that are computed together, or a multiple of it: what fills vector registers

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
            rows = _flat(stack, block, lead)
            del block
            owner = torch.arange(first, clients.stop).repeat_interleave(used)
            if not bool(present.all()):
                chosen = present.flatten().nonzero()[:, 0]
                rows, owner = rows[chosen.to(rows.device)], owner[chosen]
            yield rows, owner.to(rows.device)


def piece_width(expected: float) -> int:
    """Return how many examples of a copy :func:`gradients_in_pieces` computes together, where a batch has ``expected``
    examples: a number that is the same for all copies, and public."""
    return 8 if expected <= 5 else 16


def gradients_in_pieces(
    stack: StackedModule,
    x: Tensor,
    y: Tensor,
    loss: Loss,
    *,
    mask: Tensor,
    width: int,
    address: Tensor | None = None,
    position: Tensor | None = None,
    chunk_bytes: int = CHUNK_BYTES,
) -> Iterator[tuple[Tensor, Tensor]]:
    """Gradients of each example's own loss, as :func:`example_gradients`; those of a copy are the same to the last bit
    whatever the other copies are, on a CPU whose operations use one thread.

    A batch is cut into pieces of ``width`` examples, the last one padded, and a piece is computed with its copy's
    parameters beside others like it: in float32 each begins at a multiple of 64 bytes, and they are always so many that
    their examples are a multiple of 32 (see :mod:`fedmtl.local.places`). Where a chunk cannot hold them, copies are
    computed one by one.

    Args:
        stack, x, y, loss, address, position, chunk_bytes: see :func:`example_gradients`; B is a multiple of ``width``.
        mask: bool (A, B), which entries are examples; padding comes last.
        width: examples of a piece, a power of 2 up to 16.

    Yields:
        See :func:`example_gradients`; the examples of a copy come in their order.
    """
    copies, dimension = len(x), stack.layout.dimension
    if stack.has_dropout and (address is None or position is None):
        raise ConfigError("Dropout needs an address and a position for every example to be private example by example.")
    if address is None or position is None:
        address, position = torch.zeros(copies, 3, dtype=torch.int64), torch.zeros(mask.shape, dtype=torch.int64)
    address, position, mask = address.to(x.device), position.to(x.device), mask.cpu()
    size, count = max(1, chunk_bytes // (dimension * stack.rows.element_size())), _ALIKE // width
    gradient, nothing = _gradient(stack, loss), not bool(mask.any())
    if nothing:
        yield stack.rows.new_zeros(0, dimension), torch.zeros(0, dtype=torch.int64, device=x.device)
    elif size < _ALIKE:
        for copy, number in enumerate(mask.sum(1).tolist()):
            own = slice(copy, copy + 1)
            for begin in range(0, number, size):
                part = slice(begin, min(begin + size, number))
                views = stack.layout.views(stack.rows[own])
                found = gradient(views, address[own], x[own, part], y[own, part], position[own, part])
                rows = _flat(stack, found, part.stop - begin)
                del found
                yield rows, torch.full((part.stop - begin,), copy, device=x.device)
    else:
        folded = [one.unflatten(1, (-1, width)) for one in (x, y, position, mask)]
        for pieces in folded[3].any(2).nonzero().split(size // _ALIKE * count):
            filled = torch.cat([pieces, pieces[:1].expand(-len(pieces) % count, 2)])
            copy_of, block = filled.unbind(1)
            real = folded[3][copy_of, block]
            real[len(pieces) :] = False
            place, column = copy_of.to(x.device), block.to(x.device)
            views = stack.layout.views(_rows_of(stack, place, copy_of))
            chosen = real.flatten().nonzero()[:, 0]
            found = gradient(views, address[place], *(one[place, column] for one in folded[:3]))
            rows = _flat(stack, found, real.numel())
            del found
            owner = copy_of.repeat_interleave(width)[chosen]
            yield rows if len(chosen) == len(rows) else rows[chosen.to(rows.device)], owner.to(x.device)


def _flat(stack: StackedModule, gradients: Tensors, examples: int) -> Tensor:
    """Return gradients by name as rows (``examples``, D)."""
    return torch.cat([gradients[name].reshape(examples, -1) for name in stack.layout.names], dim=1)


def _rows_of(stack: StackedModule, place: Tensor, copies: Tensor) -> Tensor:
    """Return the parameters (p, D) of ``copies``, int64 (p,), at the alignment of the stack: a view where these follow
    one another."""
    first, last = int(copies[0]), int(copies[-1])
    if last - first + 1 == len(copies) and bool((copies.diff() == 1).all()):
        return stack.rows[first : last + 1]
    whole = stack.rows.new_empty(len(copies), stack.rows.stride(0))[:, : stack.layout.dimension]
    torch.index_select(stack.rows, 0, place, out=whole)
    return whole


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
