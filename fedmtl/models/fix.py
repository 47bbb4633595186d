"""Layers that can be computed for several clients at once, in the place of those that cannot."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import nn

from ..errors import ConfigError
from .images import with_group_norm
from .networks import Model, transformed


def fix(model: Model) -> Model:
    """Returns the model, or the factory of it, with layers that ``torch.func.vmap`` can batch.

    ``nn.RNN``, ``nn.LSTM``, ``nn.GRU`` and ``nn.MultiheadAttention``, also within a transformer,
    become Opacus' layers of the same parameters, which are written in single steps; their outputs
    are those of the given model. Every batch normalization becomes one by groups, which has other
    outputs (:func:`~fedmtl.models.with_group_norm`). Everything else stays; the given model is not
    changed.

    Args:
        model: a module, or a factory.

    Raises:
        ConfigError: neither of both, or a layer to be replaced of which some parameters are frozen
            and others not; for a factory, when the model is built.
    """
    result: Model = transformed("fix", _fixed, model)
    return result


def _fixed(module: nn.Module) -> nn.Module:
    # A holder, so that the model itself can be replaced, if it is such a layer.
    holder = nn.ModuleDict({"model": module})
    _replace(with_group_norm(holder), {})
    return holder["model"]


def _replace(module: nn.Module, made: dict[nn.Module, nn.Module]) -> None:
    """Replaces the layers within ``module``, in place; a layer with several places has one
    successor, in ``made``."""
    for name, child in list(module._modules.items()):
        if child is None:
            continue
        if type(child) in (nn.RNN, nn.LSTM, nn.GRU) and not getattr(child, "proj_size", 0):
            build: Callable[[Any], nn.Module] = _recurrent
        elif type(child) is nn.MultiheadAttention:
            build = _attention
        else:
            # Layers within other modules, such as those of a transformer.
            _replace(child, made)
            continue
        # A layer with several places stays one layer, and its weights stay tied.
        if child not in made:
            moving = {p.requires_grad for p in child.parameters()}
            if len(moving) > 1:
                raise ConfigError(
                    f"fix.model has a layer {name!r} of which some parameters are frozen and "
                    "others not; fix the model first, and freeze by trainable=[...]."
                )
            layer = build(child).to(next(child.parameters()))
            # Parameters have the same names and shapes in both, so outputs stay the same.
            layer.load_state_dict(child.state_dict())
            made[child] = layer.requires_grad_(moving.pop()).train(child.training)
        setattr(module, name, made[child])


def _recurrent(layer: nn.Module) -> nn.Module:
    from opacus.layers import DPGRU, DPLSTM, DPRNN

    names = [
        "input_size",
        "hidden_size",
        "num_layers",
        "bias",
        "batch_first",
        "dropout",
        "bidirectional",
    ]
    kinds = {
        nn.RNN: (DPRNN, [*names, "nonlinearity"]),
        nn.LSTM: (DPLSTM, names),
        nn.GRU: (DPGRU, names),
    }
    kind, named = kinds[type(layer)]
    made: nn.Module = kind(**{name: getattr(layer, name) for name in named})
    return made


def _attention(layer: nn.MultiheadAttention) -> nn.Module:
    from opacus.layers import DPMultiheadAttention

    from .attention import BatchFirstAttention

    kind = DPMultiheadAttention
    if layer.batch_first:
        kind = BatchFirstAttention
    made: nn.Module = kind(
        embed_dim=layer.embed_dim, num_heads=layer.num_heads, dropout=layer.dropout,
        bias=layer.in_proj_bias is not None, add_bias_kv=layer.bias_k is not None,
        add_zero_attn=layer.add_zero_attn,
        kdim=layer.kdim, vdim=layer.vdim,
    )  # fmt: skip
    return made
