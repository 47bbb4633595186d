"""The gradients of single examples, which DP-SGD clips, for the copies of a stacked module.

Abadi et al.: "Deep Learning with Differential Privacy", CCS 2016, Algorithm 1, the line "compute
gradient".
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.func import functional_call, grad, vmap

from .._devices import on_device
from ..errors import ConfigError
from .losses import Loss, cross_entropy, example_losses
from .module import StackedModule
from .products import output_gradient

CHUNK_BYTES = 1 << 26
"""Gradients of one chunk take at most this many bytes, or are those of one example."""

MICROBATCH = 16
"""Examples of a copy that are computed at once, beside those of other copies."""

ALIKE = 32
"""Examples that are computed in one batch, or a multiple of it: so many fill vector registers."""

Tensors = dict[str, Tensor]
Gradients = Callable[[Tensor, Tensor, Tensor, Tensor, Tensor], Tensor]
"""A function (parameters (A, D), address (A, 3), x (A, B, ...), y (A, B, ...), position (A, B))
-> gradients (A * B, D)."""
Values = tuple[Tensor, Tensor, Tensor]
"""Inputs, targets and positions of the examples of A copies, (A, B, ...) each."""


@dataclass(frozen=True)
class DropoutKeys:
    """The numbers that address the dropout masks of A copies with B examples each.

    Attributes:
        address: int64 (A, 3), client key, round and local step.
        position: int64 (A, B), the number of an example. A number that stays with the record, such
            as its place among its client's records, keeps one record from changing the masks of
            others.
    """

    address: Tensor
    position: Tensor


def example_gradients(
    stack: StackedModule,
    x: Tensor,
    y: Tensor,
    loss: Loss,
    *,
    mask: Tensor | None = None,
    width: int = ALIKE,
    dropout: DropoutKeys | None = None,
    chunk_bytes: int = CHUNK_BYTES,
) -> Iterator[tuple[Tensor, Tensor]]:
    """Yields the gradients of each example's own loss with respect to its own copy's parameters, a
    chunk at a time.

    The copies are the first A that were loaded into ``stack``; they must not change while the
    chunks are drawn. All examples of a copy share its weights: nothing but the gradients is made
    once an example. The gradient of an example is the same to the last bit whatever the other
    examples and the other copies are, and however many there are, on a CPU whose operations use one
    thread.

    A library chooses its code by the number of examples and by the place of one among them, and
    other code has other last bits. So examples are computed in one of three ways:

    - of a ``width`` of 16 microbatches of so many of one copy are computed with its parameters
      beside others: in float32 each begins at a multiple of 64 bytes, and they are always so many
      that their examples are a multiple of 32 (see :mod:`fedmtl.local.stacking`);
    - of 32, copies are computed one by one, so many examples at a time;
    - of 1, and if a chunk cannot hold 32 gradients, every example is computed by itself, which
      needs no batching rule.

    The last microbatch of a copy is filled up with examples whose gradients are not used. Off the
    CPU, microbatches and batches of a network by products are computed by these, with its rounding.

    Args:
        stack: with A copies or more loaded.
        x: (A, B, ...), training-mode inputs of each copy, on the stack's device.
        y: (A, B, ...), targets.
        loss: one value per example; must work under :func:`torch.func.vmap` unless the width is 1.
        mask: bool (A, B), which entries are examples and not padding, which comes last; ``None``
            for all.
        width: 16, which divides B, 32 or 1, see above.
        dropout: needed by a module with dropout.
        chunk_bytes: bound on the memory of one chunk's gradients.

    Yields:
        rows (N, D), in the stack's dtype and layout, and owner int64 (N,), numbers of copies in [0,
        A), in their order. Every example that is not padding occurs once, those of a copy in their
        order. There is always one chunk or more, empty if there are no examples at all.

    Raises:
        ConfigError: dropout without ``dropout``, or a loss without one value per example.

    Example:
        >>> import torch
        >>> from fedmtl.local import StackedModule, example_gradients, prepare_module
        >>> from fedmtl.local.losses import half_mse
        >>> module = prepare_module(torch.nn.Linear(3, 1), torch.zeros(2, 3), seed=0)
        >>> cpu = torch.device("cpu")
        >>> stack = StackedModule(module, capacity=1, device=cpu, dtype=torch.float32)
        >>> _ = stack.load(torch.zeros(4), 1)
        >>> chunks = example_gradients(stack, torch.ones(1, 32, 3), torch.ones(1, 32), half_mse)
        >>> [(rows.shape, rows[0].tolist()) for rows, owner in chunks]
        [(torch.Size([32, 4]), [-1.0, -1.0, -1.0, -1.0])]
    """
    if stack.has_dropout and dropout is None:
        raise ConfigError(
            "Dropout needs an address and a position for every example to be private "
            "example by example."
        )
    if dropout is None:  # nothing reads them
        none = torch.zeros(x.shape[:2], dtype=torch.int64)
        dropout = DropoutKeys(torch.zeros(len(x), 3, dtype=torch.int64), none)
    address = on_device(dropout.address, x.device)
    values = (x, y, on_device(dropout.position, x.device))
    if mask is None:
        mask = torch.ones(x.shape[:2], dtype=torch.bool)
    mask = mask.cpu()
    if not bool(mask.any()):
        yield (
            stack.rows.new_zeros(0, stack.layout.dimension),
            torch.zeros(0, dtype=torch.int64, device=x.device),
        )
        return
    # Gradients dominate the memory: one row of D numbers for each example.
    size = max(1, chunk_bytes // (stack.layout.dimension * stack.rows.element_size()))
    # A batch of 32 gradients does not fit, so the examples are computed one by one.
    if size < ALIKE:
        width = 1
    gradient = _gradient(stack, loss)
    # A CPU keeps the bits of its usual operations; a GPU would compute grouped convolutions.
    if stack.network is not None and x.device.type != "cpu":
        gradient = _gradient_by_products(stack, loss)
    if width == 1:
        yield from _by_copy(stack, _gradient_of_one(stack, loss), address, values, mask, width)
    elif width == MICROBATCH:
        yield from _by_piece(stack, gradient, address, values, mask, size)
    else:
        yield from _by_copy(stack, gradient, address, values, mask, width)


def _by_copy(
    stack: StackedModule,
    gradient: Gradients,
    address: Tensor,
    values: Values,
    mask: Tensor,
    width: int,
) -> Iterator[tuple[Tensor, Tensor]]:
    """Yields the gradients of one copy after another, ``width`` examples at a time.

    The numbers of examples of the copies differ, and nothing is computed for padding.
    """
    device = address.device
    for copy, number in enumerate(mask.sum(1).tolist()):
        own = slice(copy, copy + 1)
        parameters = stack.rows[own]
        for begin in range(0, number, width):
            # The last batch repeats its last example; these gradients are dropped.
            part = torch.arange(begin, begin + width, device=device).clamp_(max=number - 1)
            rows = gradient(parameters, address[own], *(value[own, part] for value in values))
            rows = rows[: number - begin]
            yield rows, torch.full((len(rows),), copy, device=device)


def _by_piece(
    stack: StackedModule,
    gradient: Gradients,
    address: Tensor,
    values: Values,
    mask: Tensor,
    size: int,
) -> Iterator[tuple[Tensor, Tensor]]:
    """Yields the gradients of microbatches of :data:`MICROBATCH` examples of one copy, at most
    ``size`` examples at a time."""
    device = address.device
    count = ALIKE // MICROBATCH
    folded = [value.unflatten(1, (-1, MICROBATCH)) for value in values]
    present = mask.unflatten(1, (-1, MICROBATCH))
    for some in present.any(2).nonzero().split(size // ALIKE * count):
        # Always a multiple of 32 examples, as other numbers of them have other last bits.
        filled = torch.cat([some, some[:1].expand(-len(some) % count, 2)])
        copy_of, block = filled.unbind(1)
        real = present[copy_of, block]
        # Those that fill up are copies of the first one, and count for nothing.
        real[len(some) :] = False
        place = on_device(copy_of, device)
        column = on_device(block, device)
        # Pieces of one copy read the same row of parameters.
        parameters = _rows_of(stack, place, copy_of)
        chosen = real.flatten().nonzero()[:, 0]
        rows = gradient(parameters, address[place], *(value[place, column] for value in folded))
        # The clip adds up by client, so each gradient carries the number of its copy.
        owner = copy_of.repeat_interleave(MICROBATCH)[chosen]
        if len(chosen) < len(rows):
            rows = rows[on_device(chosen, rows.device)]
        yield rows, on_device(owner, device)


def _rows_of(stack: StackedModule, place: Tensor, copies: Tensor) -> Tensor:
    """Returns the parameters (p, D) of ``copies``, int64 (p,), at the alignment of the stack: a
    view if these follow one another."""
    first = int(copies[0])
    last = int(copies[-1])
    if last - first + 1 == len(copies) and bool((copies.diff() == 1).all()):
        return stack.rows[first : last + 1]
    whole = stack.rows.new_empty(len(copies), stack.rows.stride(0))[:, : stack.layout.dimension]
    torch.index_select(stack.rows, 0, place, out=whole)
    return whole


def _gradient_of_one(stack: StackedModule, loss: Loss) -> Gradients:
    """Returns the gradients' function of one copy and one example, A = B = 1, by ordinary
    operations."""

    @torch.enable_grad()
    def gradient(
        parameters: Tensor, address: Tensor, x: Tensor, y: Tensor, position: Tensor
    ) -> Tensor:
        # Leaves of their own: no gradient flows into the stack.
        views = stack.layout.views(parameters[0])
        leaves = {name: value.detach().requires_grad_() for name, value in views.items()}
        tensors = leaves | stack.dropout_buffers(address[0], position[0, 0])
        outputs = functional_call(stack.train_module, tensors, (x[0],))
        own = example_losses(loss, outputs[None], y)[0, 0]
        parts = torch.autograd.grad(
            own, list(leaves.values()), allow_unused=True, materialize_grads=True
        )
        return torch.cat([part.reshape(1, -1) for part in parts], dim=1)

    return gradient


def _gradient(stack: StackedModule, loss: Loss) -> Gradients:
    """Returns the gradients' function by :func:`torch.func.vmap`."""

    def example_loss(
        parameters: Tensors, address: Tensor, x: Tensor, y: Tensor, position: Tensor
    ) -> Tensor:
        tensors = parameters | stack.dropout_buffers(address, position)
        outputs = functional_call(stack.train_module, tensors, (x[None],))
        return example_losses(loss, outputs[None], y[None, None])[0, 0]

    # The weights have no example dimension: all examples of a copy share them.
    over_examples = vmap(grad(example_loss), in_dims=(None, None, 0, 0, 0))
    over_copies = vmap(over_examples)

    def gradient(
        parameters: Tensor, address: Tensor, x: Tensor, y: Tensor, position: Tensor
    ) -> Tensor:
        if x.shape[0] > 1:
            views = stack.layout.views(parameters)
            result = over_copies(views, address, x, y, position)
        else:  # one copy needs no second batching rule: its weights enter ordinary kernels
            single = stack.layout.views(parameters[0])
            result = over_examples(
                single, *(value.squeeze(0) for value in (address, x, y, position))
            )
        return torch.cat(
            [result[name].reshape(position.numel(), -1) for name in stack.layout.names], dim=1
        )

    return gradient


def _gradient_by_products(stack: StackedModule, loss: Loss) -> Gradients:
    """Returns the gradients' function by the batched products of a network, which has no dropout;
    by :func:`torch.func.vmap` of inputs that the network does not take."""
    network = stack.network
    assert network is not None
    otherwise = _gradient(stack, loss)

    @torch.no_grad()
    def gradient(
        parameters: Tensor, address: Tensor, x: Tensor, y: Tensor, position: Tensor
    ) -> Tensor:
        values = network.forward(parameters, x)
        if values is None:
            return otherwise(parameters, address, x, y, position)
        signal = _signal_apart(loss, values[-1], y)
        target = parameters.new_empty(position.numel(), parameters.shape[1])
        network.descend(parameters, values, signal, target, keep=0.0, rate=-1.0)
        return target

    return gradient


def _signal_apart(loss: Loss, outputs: Tensor, targets: Tensor) -> Tensor:
    """Returns the gradient of each example's own loss by its outputs: (A, B, ...)."""
    if loss is cross_entropy:
        # by a formula, without the loss; the weight 1 divides none of them by their number
        return output_gradient(loss, outputs, targets, outputs.new_ones(outputs.shape[:2]))

    def loss_of_one(own: Tensor, target: Tensor) -> Tensor:
        return example_losses(loss, own[None, None], target[None, None])[0, 0]

    # A loss of the caller's own sees one example at a time, so that none has a way into the
    # gradients of others, past their clip.
    over_examples = vmap(vmap(grad(loss_of_one)))
    signal: Tensor = over_examples(outputs, targets)
    return signal
