"""Checks of a module before a run: its layers, tensors, copies, shapes, randomness and state."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.parameter import UninitializedBuffer, is_lazy
from torch.utils._python_dispatch import TorchDispatchMode

from ..errors import ModelError, first_line
from .dropout import swap_dropout
from .layout import set_trainable

_WRAPPED = {
    "ScriptModule": "whose parameters cannot be exchanged; give the module that it was made from.",
    "OptimizedModule": "made by torch.compile; give the module that it was made from.",
    "DataParallel": "which computes elsewhere; give its module, model.module.",
    "DistributedDataParallel": "which computes elsewhere; give its module, model.module.",
}
_MIXING_OPTIONS = ("max_norm", "sparse", "scale_grad_by_freq")


def check_layers(module: nn.Module) -> None:
    """Refuses layers that mix the examples of a batch.

    Args:
        module: any module; it is not changed.

    Raises:
        ModelError: batch normalization, or an embedding with an option that mixes examples.

    Example:
        >>> import torch
        >>> from fedmtl.errors import ModelError
        >>> from fedmtl.local import check_layers
        >>> try:
        ...     check_layers(torch.nn.BatchNorm1d(3))
        ... except ModelError as error:
        ...     print(str(error).split(",")[0])
        Layer 'BatchNorm1d' is BatchNorm1d
    """
    # A layer that mixes examples gives one record a way into the gradients of others, past their
    # clips.
    for name, child in module.named_modules():
        if isinstance(child, _BatchNorm):
            raise ModelError(
                f"Layer {name or type(child).__name__!r} is {type(child).__name__}, which "
                "normalizes over the examples of a batch, and whose running statistics would "
                f"leave the clients without noise. Use torch.nn.GroupNorm{_groups_for(child)} "
                "instead; model.fix=true, in Python models.fix(model), does so for a layer whose "
                "shape is known."
            )
        if isinstance(child, (nn.Embedding, nn.EmbeddingBag)):
            for option in _MIXING_OPTIONS:
                if getattr(child, option):
                    raise ModelError(
                        f"Layer {name!r} is {type(child).__name__} with "
                        f"{option}={getattr(child, option)}, which mixes the examples of a batch; "
                        f"leave {option} out."
                    )


def _groups_for(layer: _BatchNorm) -> str:
    """Returns an example of the group normalization that takes the place of ``layer``; "" if its
    shape is not known."""
    channels = layer.num_features
    if channels == 0:  # lazy
        return ""
    groups = 1  # of vectors; a group with a single number would be constant
    if isinstance(layer, (nn.BatchNorm2d, nn.BatchNorm3d)):
        groups = next(count for count in (8, 4, 2, 1) if channels % count == 0)
    return f" (for example GroupNorm({groups}, {channels}))"


def check_copyable(module: nn.Module) -> None:
    """Refuses a module whose parameters cannot be exchanged for those of a client, or are no start
    of training.

    Args:
        module: any module; it is not changed.

    Raises:
        ModelError: a module of ``torch.jit``, ``torch.compile`` or ``nn.DataParallel``, one that
            cannot be copied, a stored tensor that was computed from parameters, a parameter with a
            hook, or a tensor without data, sparse, of complex numbers, or that is not finite.

    Example:
        >>> import torch
        >>> from fedmtl.local import check_copyable
        >>> check_copyable(torch.nn.Linear(3, 1))  # nothing is wrong with it
    """
    for name, child in module.named_modules():
        _check_exchangeable(name, child)
    for name, tensor in (*module.named_parameters(), *module.named_buffers()):
        _check_tensor(name, tensor)
    try:
        copy.deepcopy(module)
    except Exception as error:
        raise ModelError(
            f"The model cannot be copied ({first_line(error)}); each client needs a copy, so let "
            "it hold nothing that copy.deepcopy refuses."
        ) from error


def _check_exchangeable(name: str, layer: nn.Module) -> None:
    """Refuses a layer that computes with other tensors than its parameters and buffers."""
    where = "The model"
    if name:
        where = f"Layer {name!r}"
    classes = [kind.__name__ for kind in type(layer).__mro__]
    for kind, reason in _WRAPPED.items():
        if kind in classes:
            raise ModelError(f"{where} is of class {type(layer).__name__}, {reason}")
    if any(type(hook).__name__ == "WeightNorm" for hook in layer._forward_pre_hooks.values()):
        raise ModelError(
            f"{where} has torch.nn.utils.weight_norm, with which it cannot be copied; use "
            "torch.nn.utils.parametrizations.weight_norm instead."
        )
    if any(hasattr(hook, "apply_mask") for hook in layer._forward_pre_hooks.values()):
        raise ModelError(
            f"{where} is pruned by torch.nn.utils.prune, with which it cannot be copied; make the "
            "weights permanent with torch.nn.utils.prune.remove(layer, name)."
        )
    # The gradient of such a tensor leads to the parameters of the module, not of a client's copy.
    for attribute, value in vars(layer).items():
        if isinstance(value, Tensor) and value.grad_fn is not None:
            raise ModelError(
                f"{where} holds {attribute!r}, a tensor that was computed from parameters and "
                "cannot be copied; set it to None, or compute it in forward."
            )
        if isinstance(value, Tensor):
            _check_constant(f"The tensor {attribute!r} of {where[0].lower()}{where[1:]}", value)


def _check_constant(subject: str, tensor: Tensor) -> None:
    """Refuses NaN in a tensor that is not trained; masks may hold infinities."""
    if tensor.is_floating_point() and not tensor.is_meta and bool(torch.isnan(tensor).any()):
        raise ModelError(f"{subject} holds NaN, which no training removes; give it numbers.")


def _check_tensor(name: str, tensor: Tensor) -> None:
    """Refuses a parameter or buffer that copies cannot have, or that no training can start from."""
    if tensor.is_meta:
        raise ModelError(
            f"{name!r} is on the device 'meta' and has no data; build the model on a device that "
            "has them, such as device='cpu', or load its weights first."
        )
    if isinstance(tensor, UninitializedBuffer):
        raise ModelError(
            f"Buffer {name!r} is lazy, and lazy buffers cannot be copied; use a layer with a shape."
        )
    if is_lazy(tensor):  # it has neither a shape nor numbers yet
        return
    if tensor.is_complex():
        raise ModelError(f"{name!r} has complex numbers; use two real tensors instead.")
    if tensor.layout != torch.strided:
        raise ModelError(f"{name!r} has layout {tensor.layout}; make it dense with to_dense().")
    if not isinstance(tensor, nn.Parameter):
        _check_constant(f"Buffer {name!r}", tensor)
        return
    if not bool(torch.isfinite(tensor).all()):
        raise ModelError(
            f"Parameter {name!r} has values that are not finite; start from finite ones."
        )
    # A clip bounds the gradients that torch computes; a hook would change them afterwards.
    if tensor._backward_hooks or tensor._post_accumulate_grad_hooks:
        raise ModelError(
            f"Parameter {name!r} has a hook on its gradient, which the copies of clients do not "
            "have; remove the hook, and name the parameters to train in trainable=[...] or change "
            "the gradient in a torch.autograd.Function."
        )


def prepare_module(
    module: nn.Module,
    sample: Tensor,
    *,
    seed: int,
    outputs: int | None = None,
    dtype: torch.dtype | None = None,
    trainable: Sequence[str] | None = None,
) -> nn.Module:
    """Returns a checked copy of ``module`` for stacking, with keyed dropout, in training mode.

    Args:
        module: any module whose forward takes one batch tensor.
        sample: a batch of the right shape (B, ...) whose values do not matter.
        seed: keys the dropout masks.
        dtype: of the parameters; None for that of the sample.
        outputs: numbers that the model must return for an example; None skips the check.
        trainable: names of the parameters that are trained, all others are frozen, see
            :func:`~fedmtl.local.layout.set_trainable`; None for those with ``requires_grad``.

    Raises:
        ConfigError: ``trainable`` does not fit the module.
        ModelError: batch normalization, parameters or buffers that change in a forward pass, random
            operations outside ``nn.Dropout`` modules, no trainable parameter, or an output of the
            wrong shape.

    Example:
        >>> import torch
        >>> from fedmtl.local import prepare_module
        >>> module = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.Linear(4, 2))
        >>> ready = prepare_module(module, torch.zeros(2, 3), seed=0, outputs=2, trainable=["1"])
        >>> [name for name, p in ready.named_parameters() if p.requires_grad]
        ['1.weight', '1.bias']
    """
    check_layers(module)
    if dtype is None:
        dtype = sample.dtype
    ready = copy.deepcopy(module).to(sample.device, dtype).train()
    set_trainable(ready, trainable)
    # Keyed masks depend on the record alone, whoever else is in the batch.
    swap_dropout(ready, seed)
    before = tensors_of(ready)
    result = _tried(ready, sample)
    # The two modes may run other code, and scores are of the second.
    _tried(ready.eval(), sample)
    check_unchanged(ready.train(), before)
    _check_outputs(result, sample, outputs)
    return ready


def _tried(module: nn.Module, sample: Tensor) -> Any:
    """Returns the module's outputs for a copy of ``sample``.

    Raises:
        ModelError: a module that fails, or that draws random numbers.
    """
    try:
        with torch.no_grad(), _RefuseRandomness():
            return module(sample.clone())
    except ModelError:
        raise
    except Exception as error:
        raise failed_on(sample, error) from error


def failed_on(sample: Tensor, error: Exception, why: str = "the shape of this data") -> ModelError:
    """Returns the refusal of a module that fails on a batch like ``sample`` with ``error``.

    Args:
        sample: the batch.
        error: of the module.
        why: says why it is to take such a batch.
    """
    kind = ""
    hint = ""
    text = str(error)
    if isinstance(error, KeyError):
        text = repr(error)
    if not sample.is_floating_point():
        kind = " of whole numbers"
    elif "indices" in text:
        hint = "; embeddings take whole numbers, which data keep with transform=Integers()"
    if "dtype" in text or "scalar type" in text:
        hint += (
            "; parameters and real features have the dtype of the run, so let forward convert to "
            "that of its layers, such as x.to(self.layer.weight.dtype)"
        )
    if "does not require grad" in text:
        hint += (
            "; evaluation is without gradients, so a forward that differentiates needs "
            "torch.func.grad"
        )
    return ModelError(
        f"The model fails on a batch{kind} of shape {tuple(sample.shape)}, {why}: {text}{hint}"
    )


def tensors_of(module: nn.Module) -> dict[str, Tensor]:
    """Returns copies of the parameters and buffers of a module, by name."""
    return {name: tensor.detach().clone() for name, tensor in _named_tensors(module)}


def _named_tensors(module: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Yields the parameters and buffers of a module with their names."""
    yield from module.named_parameters()
    yield from module.named_buffers()


def check_unchanged(module: nn.Module, before: dict[str, Tensor]) -> None:
    """Refuses a module that has other parameters or buffers than ``before`` its forward passes.

    Args:
        module: after the passes.
        before: from :func:`tensors_of`.

    Raises:
        ModelError: a tensor that is another, named.
    """
    parameters = dict(module.named_parameters())
    for name, tensor in _named_tensors(module):
        if name in before and same(before[name], tensor.detach(), 0.0):
            continue
        if name in parameters:
            raise ModelError(
                f"Parameter {name!r} changes during the forward pass; parameters may change by "
                "training alone, so let forward compute with a copy of it."
            )
        raise ModelError(
            f"Buffer {name!r} changes during the forward pass; a changing buffer would leave the "
            "client without noise. Remove it, or use a layer without running statistics."
        )


def same(first: Tensor, second: Tensor, tolerance: float) -> bool:
    """Returns true for tensors of one shape that differ by at most ``tolerance`` times the largest
    finite number.

    NaN is the same as NaN, and an infinity the same as itself.
    """
    if first.shape != second.shape:
        return False
    equal = first == second
    if not first.is_floating_point():
        return bool(equal.all())
    # Two paths that overflow alike are the same function.
    equal |= first.isnan() & second.isnan()
    if tolerance > 0.0:
        size = torch.maximum(first.abs(), second.abs()).nan_to_num(0.0, 0.0, 0.0)
        largest = size.sum()
        if size.numel():  # an empty tensor has no largest number
            largest = size.max()
        equal |= (first - second).abs() <= tolerance * largest
    return bool(equal.all())


def _check_outputs(result: Any, sample: Tensor, outputs: int | None) -> None:
    """Refuses outputs that are not one tensor with a row for every example, of ``outputs`` numbers
    if that is given."""
    is_batch = isinstance(result, Tensor) and result.shape[:1] == sample.shape[:1]
    if is_batch and (outputs is None or result.shape[1:] == (outputs,)):
        return
    shape = "(B, ...)"
    if outputs is not None:
        shape = f"(B, {outputs}), since the data has {outputs} classes or labels"
    returned = f"a {type(result).__name__}"
    if isinstance(result, Tensor):
        returned = f"a tensor of shape {tuple(result.shape)}"
    raise ModelError(f"The model must map (B, ...) to one tensor {shape}; it returned {returned}.")


class _RefuseRandomness(TorchDispatchMode):
    """Raises on any operation that would draw from PyTorch's global generator."""

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """Returns False, as nothing is compiled inside; True would import all of torch._dynamo,
        seconds at the start of every run."""
        return False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        named = kwargs or {}
        if torch.Tag.nondeterministic_seeded in func.tags and _draws(func, args, named):
            raise ModelError(
                f"The forward pass calls {func.overloadpacket.__name__!r}, which draws from a "
                "global random generator; use nn.Dropout modules (they become keyed) instead of "
                "functional dropout or random operations; model.fix=true, in Python "
                "models.fix(model), replaces attention and recurrent layers with dropout."
            )
        return func(*args, **named)


def _draws(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Returns true for a call that draws random numbers; attention does so only if its
    ``dropout_p`` is above 0."""
    for position, argument in enumerate(func._schema.arguments):
        if argument.name != "dropout_p":
            continue
        value = argument.default_value
        if position < len(args):
            value = args[position]
        return bool(kwargs.get("dropout_p", value) > 0)
    return True
