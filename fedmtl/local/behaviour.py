"""Trials of a module and a loss before a run: batches in which an example must not depend on the
others.

Inputs and targets are made up, so that no answer depends on a record. Clients and batches differ in
size, batches are padded and, under record-level privacy, cut into single examples: only functions
of one example are the same in all of these.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.func import functional_call

from ..errors import ConfigError, ModelError, first_line
from .dropout import KeyedDropout
from .layout import Layout
from .losses import Loss, example_losses
from .module_checks import check_unchanged, failed_on, same, tensors_of

# of the largest output: a batch and its examples have other rounding, in bfloat16 up to 1 %
_APART = 0.02
_AGAIN = 1e-5  # one batch twice has the same rounding, except if threads share a sum
_MOVE = 0.05  # how far parameters are moved for the second trial; a start with zeros hides much
_SEED = 20211


def check_behaviour(module: nn.Module, batches: Sequence[Tensor]) -> None:
    """Refuses a module whose outputs depend on more than an example and the parameters, or that
    cannot be trained.

    Args:
        module: from :func:`~fedmtl.local.prepare_module`.
        batches: of two examples each (2, ...), on the module's device. The first that the module
            takes is used.

    Raises:
        ModelError: outputs that depend on earlier calls or on the other examples of a batch, a
            module that fails on a single example, outputs without gradient, or gradients that do
            not follow the exchanged parameters.

    Example:
        >>> import torch
        >>> from fedmtl.errors import ModelError
        >>> from fedmtl.local import check_behaviour, prepare_module
        >>> class Centred(torch.nn.Linear):
        ...     def forward(self, x):
        ...         return super().forward(x - x.mean(0))  # of the batch
        >>> module = prepare_module(Centred(3, 1), torch.zeros(2, 3), seed=0)
        >>> try:
        ...     check_behaviour(module, [torch.rand(2, 3)])
        ... except ModelError:
        ...     print("refused")
        refused
    """
    trial = copy.deepcopy(module).train()
    for child in trial.modules():
        if isinstance(child, KeyedDropout):  # whose masks are functions of an example by themselves
            child.eval()
    layout = Layout.of(trial)
    start = layout.flatten(trial)
    noise = torch.randn(
        start.shape, generator=torch.Generator().manual_seed(_SEED), dtype=torch.float64
    )
    moved = start + _MOVE * noise.to(start)
    x = _first_accepted(trial, batches)
    for row in (start, moved):
        layout.load(trial, row)
        before = tensors_of(trial)
        _check_repeated(trial, x)
        _check_apart(trial, x)
        check_unchanged(trial, before)
    _check_gradients(layout.load(trial, start), layout, moved, x)


def _first_accepted(module: nn.Module, batches: Sequence[Tensor]) -> Tensor:
    """Returns the first batch on which the module does not fail.

    Raises:
        ModelError: a module that fails on all of them.
    """
    for x in batches:
        try:
            _outputs(module, x)
        except Exception as error:  # such as a lookup of a number without a row
            failed = error
            continue
        return x
    raise failed_on(batches[-1], failed, "a batch of any size is to be taken") from failed


@torch.no_grad()
def _outputs(module: nn.Module, x: Tensor) -> Tensor:
    """Returns the outputs of a module for a copy of ``x``."""
    outputs: Tensor = module(x.clone())
    return outputs


def _check_repeated(module: nn.Module, x: Tensor) -> None:
    """Refuses other outputs for the same batch."""
    if not same(_outputs(module, x), _outputs(module, x), _AGAIN):
        raise ModelError(
            "The model returns other outputs for the same batch when it is called again: it keeps "
            "something from one call to the next, or draws random numbers that PyTorch does not "
            "know of. Let forward depend on its input and its parameters alone, and draw by "
            "nn.Dropout modules."
        )


def _check_apart(module: nn.Module, x: Tensor) -> None:
    """Refuses other outputs for an example in a batch than for the example by itself."""
    together = _outputs(module, x)
    parts: list[Tensor] = []
    for example in x.split(1):
        try:
            parts.append(_outputs(module, example))
        except Exception as error:
            raise failed_on(example, error, "a batch of any size is to be taken") from error
    if any(part.shape != together[:1].shape for part in parts):
        raise ModelError(
            f"The model returns a tensor of shape {tuple(together.shape)} for 2 examples and of "
            f"shape {tuple(parts[0].shape)} for one; the first dimension must be the batch "
            f"(squeeze() drops one of size 1)."
        )
    if not same(together, torch.cat(parts), _APART):
        raise ModelError(
            "The model's outputs for an example depend on the other examples of its batch, or on "
            "their number. Batches differ in size and are padded, so let every operation stay "
            "within an example: normalize over features (torch.nn.LayerNorm, GroupNorm), and let "
            "no mean, softmax, cumsum, flip or branch run over dimension 0."
        )


def _check_gradients(module: nn.Module, layout: Layout, moved: Tensor, x: Tensor) -> None:
    """Refuses a module without gradients, or with others if parameters are exchanged for a call
    than if they are set.

    Args:
        module: at other parameters than ``moved``.
        layout: of its parameters.
        moved: (D,), the parameters of the trial.
        x: a batch.
    """
    # functional_call leaves exchanged parameters in a layer with several places
    host = copy.deepcopy(module)
    exchanged = {name: view.detach().requires_grad_() for name, view in layout.views(moved).items()}
    called = functional_call(host, exchanged, (x.clone(),))
    if not called.is_floating_point() or not called.requires_grad:
        raise ModelError(
            f"The model's outputs, of dtype {called.dtype}, have no gradient by any trainable "
            "parameter: they are computed without gradients (torch.no_grad, detach, whole or "
            "complex numbers), or from frozen parameters alone."
        )
    generator = torch.Generator().manual_seed(_SEED)
    weights = torch.randn(called.shape, generator=generator, dtype=torch.float64).to(called)
    followed = _flat_gradient(called, list(exchanged.values()), weights)
    layout.load(module, moved)
    named = dict(module.named_parameters())
    expected = _flat_gradient(module(x.clone()), [named[name] for name in layout.names], weights)
    if not same(followed, expected, _AGAIN):
        raise ModelError(
            "The gradients of the model do not follow its parameters: something reads them at "
            "another time than in the forward pass, or from another place than the module. Leave "
            "out torch.utils.checkpoint, and take every parameter from the module itself."
        )


def _flat_gradient(outputs: Tensor, parameters: list[Tensor], weights: Tensor) -> Tensor:
    """Returns the gradient of the weighted sum of outputs by all parameters, (D,).

    Raises:
        ModelError: a backward pass that fails.
    """
    try:
        parts = torch.autograd.grad(
            outputs, parameters, weights, allow_unused=True, materialize_grads=True
        )
    except RuntimeError as error:
        raise ModelError(f"The backward pass of the model fails: {first_line(error)}.") from error
    return torch.cat([part.detach().reshape(-1) for part in parts])


def check_loss(loss: Loss, shape: tuple[int, ...], targets: Tensor, dtype: torch.dtype) -> None:
    """Refuses a loss of the caller's own that is no function of one example, or has no gradient.

    Args:
        loss: (outputs (N, ...), targets (N, ...)) -> (N,).
        shape: of a model's outputs for one example.
        targets: of two examples, (2, ...).
        dtype: of the outputs.

    Raises:
        ConfigError: a loss that fails, returns another shape, has no gradient, is random, or mixes
            examples.

    Example:
        >>> import torch
        >>> from fedmtl.local import check_loss
        >>> def absolute(outputs, targets):
        ...     return (outputs[:, 0] - targets).abs()
        >>> check_loss(absolute, (1,), torch.tensor([0.0, 1.0]), torch.float32)
    """
    generator = torch.Generator().manual_seed(_SEED)
    drawn = torch.randn((2, *shape), generator=generator, dtype=torch.float64)
    outputs = drawn.to(targets.device, dtype).requires_grad_()

    def values_of(some: slice) -> Tensor:
        return example_losses(loss, outputs[None, some], targets[None, some])[0]

    values = values_of(slice(2))
    if not values.is_floating_point() or not values.requires_grad:
        raise ConfigError(
            f"loss returns values of dtype {values.dtype} without a gradient by the outputs; "
            f"compute it from them by "
            "operations with gradients (no detach, argmax or whole numbers)."
        )
    if not same(values.detach(), values_of(slice(2)).detach(), _AGAIN):
        raise ConfigError(
            "loss returns other values for the same outputs and targets; it must "
            "draw no random numbers."
        )
    apart = torch.cat([values_of(slice(1)), values_of(slice(1, 2))])
    if not same(values.detach(), apart.detach(), _APART):
        raise ConfigError(
            "loss returns other values for an example beside another one than for the example by "
            "itself; it must return one value per example (reduction='none') that depends on no "
            "other example, nor on their number."
        )
