"""What a module must be before K copies of it can be trained side by side."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.utils._python_dispatch import TorchDispatchMode

from ..errors import ModelError
from .dropout import swap_dropout
from .module import StackedModule, set_trainable


def prepare_module(
    module: nn.Module,
    sample: Tensor,
    *,
    seed: int,
    outputs: int | None = None,
    dtype: torch.dtype | None = None,
    trainable: Sequence[str] | None = None,
) -> nn.Module:
    """Return a copy of ``module`` ready for stacking: checked, with keyed dropout, in training mode, in the sample's
    dtype.

    Args:
        module: any module whose forward takes one batch tensor.
        sample: a batch of the right shape (B, ...) whose values do not matter.
        seed: keys the dropout masks.
        dtype: of the parameters; ``None`` for that of the sample.
        outputs: numbers that the model must return for an example; ``None`` skips the check.
        trainable: names of the parameters that are trained, all others are frozen, see :func:`set_trainable`; ``None``
            for those with ``requires_grad``.

    Raises:
        ConfigError: ``trainable`` does not fit the module.
        ModelError: batch normalization, buffers that change in training mode, random operations outside
            ``nn.Dropout`` modules, no trainable parameter, or an output of the wrong shape.
    """
    for name, child in module.named_modules():
        if isinstance(child, _BatchNorm):
            channels = child.num_features
            raise ModelError(
                f"Layer {name or type(child).__name__!r} is {type(child).__name__}: its running statistics mix clients "
                f"and leave them without noise. Use torch.nn.GroupNorm (for example GroupNorm({_groups(channels)}, "
                f"{channels})) instead; model.fix=true, in Python models.fix(model), does so."
            )
        if isinstance(child, (nn.Embedding, nn.EmbeddingBag)):
            for option in ("max_norm", "sparse", "scale_grad_by_freq"):
                if getattr(child, option):
                    raise ModelError(
                        f"Layer {name!r} is {type(child).__name__} with {option}={getattr(child, option)}, which mixes"
                        f" the examples of a batch; leave {option} out."
                    )
        several = not isinstance(child, nn.RNNBase) or child.num_layers > 1  # dropout is between layers
        if isinstance(child, (nn.MultiheadAttention, nn.RNNBase)) and child.dropout > 0 and several:
            raise ModelError(
                f"Layer {name or type(child).__name__!r} is {type(child).__name__} with dropout={child.dropout:g}, "
                "which draws from a global random generator; model.fix=true, in Python models.fix(model), replaces it "
                "by a layer whose dropout is keyed, or leave dropout out."
            )
        if isinstance(child, (nn.AlphaDropout, nn.FeatureAlphaDropout)):
            raise ModelError(f"Layer {name!r} is {type(child).__name__}; use nn.Dropout, whose masks can be keyed.")
    ready = copy.deepcopy(module).to(sample.device, sample.dtype if dtype is None else dtype).train()
    set_trainable(ready, trainable)
    swap_dropout(ready, seed)
    before = {name: buffer.clone() for name, buffer in ready.named_buffers()}
    try:
        with torch.no_grad(), _RefuseRandomness():
            result = ready(sample)
    except (RuntimeError, TypeError, ValueError) as error:
        if isinstance(error, ModelError):
            raise
        hint = ""
        if "indices" in str(error) and sample.is_floating_point():
            hint = "; embeddings take whole numbers, which data keep with transform=Integers()"
        kind = "" if sample.is_floating_point() else " of whole numbers"
        raise ModelError(
            f"The model fails on a batch{kind} of shape {tuple(sample.shape)}, the shape of this data: {error}{hint}"
        ) from error
    for name, buffer in ready.named_buffers():
        if not torch.equal(before[name], buffer):
            raise ModelError(
                f"Buffer {name!r} changes during the forward pass; a changing buffer would leave the client without "
                "noise. Remove it, or use a layer without running statistics."
            )
    if not isinstance(result, Tensor) or result.shape[0] != sample.shape[0]:
        raise ModelError(f"The model must map (B, ...) to one tensor (B, ...); it returned {_describe(result)}.")
    if outputs is not None and (result.dim() != 2 or result.shape[-1] != outputs):
        raise ModelError(
            f"The model returns {_describe(result)} but the data has {outputs} classes or labels; "
            f"the output must be (B, {outputs})."
        )
    return ready


def check_stackable(module: nn.Module, sample: Tensor) -> None:
    """Refuse a module whose copies cannot be computed as one batched program (:func:`torch.func.vmap`).

    Args:
        module: from :func:`prepare_module`.
        sample: as there.

    Raises:
        ModelError: an operation without a batching rule, or one whose course depends on values.
    """
    kind = next(module.parameters()).dtype
    stack = StackedModule(module, capacity=2, device=sample.device, dtype=kind)
    both = sample.expand(2, *sample.shape)
    start = stack.layout.flatten(module)
    address = torch.zeros(2, 3, dtype=torch.int64) if stack.has_dropout else None
    try:
        rows = stack.load(start, 2)
        stack.backward(stack.forward(both, address=address).reshape(2, -1).sum(1))
        stack.predict(rows, both)
    except (RuntimeError, NotImplementedError, TypeError, ValueError) as error:
        reason = " ".join(str(error).split(". ")[0].split())[:200]
        raise ModelError(
            f"The model cannot be computed for several clients at once ({reason}); use layers that torch.func.vmap "
            "takes (model.fix=true, in Python models.fix(model), replaces recurrent layers and attention), or "
            "execution={chunk: 1}, which computes one client after another."
        ) from error


class _RefuseRandomness(TorchDispatchMode):
    """Raises on any operation that would draw from PyTorch's global generator."""

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """Nothing is compiled inside; True would import all of torch._dynamo, seconds at the start of every run."""
        return False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if torch.Tag.nondeterministic_seeded in func.tags and _draws(func, args, kwargs or {}):
            raise ModelError(
                f"The forward pass calls {func.overloadpacket.__name__!r}, which draws from a global random generator; "
                "use nn.Dropout modules (they become keyed) instead of functional dropout or random operations."
            )
        return func(*args, **(kwargs or {}))


def _draws(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Return whether a call draws random numbers: attention does so only where its ``dropout_p`` is above 0."""
    for place, argument in enumerate(func._schema.arguments):
        if argument.name == "dropout_p":
            return bool(kwargs.get("dropout_p", args[place] if place < len(args) else argument.default_value) > 0)
    return True


def _groups(channels: int) -> int:
    return next(g for g in (8, 4, 2, 1) if channels % g == 0)


def _describe(result: object) -> str:
    return f"a tensor of shape {tuple(result.shape)}" if isinstance(result, Tensor) else f"a {type(result).__name__}"
