"""Trials of a module and a loss as one batched program over clients and over examples."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from ..errors import ModelError
from .losses import Loss
from .module import StackedModule
from .per_example import MICROBATCH, DropoutKeys, example_gradients


def check_stackable(module: nn.Module, sample: Tensor) -> None:
    """Refuses a module whose copies cannot be computed as one batched program
    (:func:`torch.func.vmap`).

    Args:
        module: from :func:`fedmtl.local.prepare_module`.
        sample: a batch of the right shape (B, ...) whose values do not matter.

    Raises:
        ModelError: an operation without a batching rule, or one whose course depends on values.

    Example:
        >>> import torch
        >>> from fedmtl.local import check_stackable, prepare_module
        >>> sample = torch.zeros(2, 3)
        >>> check_stackable(prepare_module(torch.nn.Linear(3, 1), sample, seed=0), sample)
    """
    stack = _two_copies(module, sample)
    both = sample.expand(2, *sample.shape)
    address = None
    if stack.has_dropout:
        address = torch.zeros(2, 3, dtype=torch.int64)
    try:
        outputs = stack.forward(both, address=address)
        stack.backward(outputs.reshape(2, -1).sum(1))
        stack.predict(stack.rows[:2], both)
    except Exception as error:  # an assertion of the caller's own among them
        raise _not_batched(error) from error


def check_examples(
    module: nn.Module, sample: Tensor, loss: Loss | None = None, targets: Tensor | None = None
) -> None:
    """Refuses a module or a loss whose gradients of single examples cannot be computed as one
    batched program.

    Args:
        module: from :func:`~fedmtl.local.prepare_module`.
        sample: a batch of the right shape (B, ...) whose values do not matter.
        loss: one value per example; None for the sum of the outputs.
        targets: (B, ...), of the sample; needed with a loss.

    Raises:
        ModelError: an operation without a batching rule, or one whose course depends on values.

    Example:
        >>> import torch
        >>> from fedmtl.local import check_examples, prepare_module
        >>> sample = torch.zeros(2, 3)
        >>> check_examples(prepare_module(torch.nn.Linear(3, 1), sample, seed=0), sample)
    """
    stack = _two_copies(module, sample)
    x = sample[:1].expand(2, MICROBATCH, *sample.shape[1:])
    numbers = torch.zeros(2, MICROBATCH, dtype=torch.int64)
    address = torch.zeros(2, 3, dtype=torch.int64)
    y = numbers
    if targets is not None:
        y = targets[:1].expand(2, MICROBATCH, *targets.shape[1:])
    if loss is None:
        loss = _total
    try:
        dropout = DropoutKeys(address, numbers)
        for _ in example_gradients(stack, x, y, loss, width=MICROBATCH, dropout=dropout):
            pass
    except Exception as error:
        raise _not_batched(error) from error


def _two_copies(module: nn.Module, sample: Tensor) -> StackedModule:
    """Returns a stack with two copies of the module, both at its parameters."""
    dtype = next(p.dtype for p in module.parameters() if p.requires_grad)
    stack = StackedModule(module, capacity=2, device=sample.device, dtype=dtype)
    stack.load(stack.layout.flatten(module), 2)
    return stack


def _total(outputs: Tensor, targets: Tensor) -> Tensor:
    """Returns the sum of each example's outputs, in the place of a loss."""
    return outputs.reshape(len(outputs), -1).sum(1)


def _not_batched(error: Exception) -> ModelError:
    """Returns the refusal of a module that :func:`torch.func.vmap` does not take, for its
    ``error``."""
    reason = " ".join(str(error).split(". ")[0].split())[:200]
    return ModelError(
        f"The model cannot be computed for several clients at once ({reason}); use layers that "
        f"torch.func.vmap "
        "takes (model.fix=true, in Python models.fix(model), replaces recurrent layers and "
        "attention), or execution={chunk: 1}, in Python Execution(chunk=1), which computes one "
        "client after another."
    )
