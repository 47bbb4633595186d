"""Layers that can be computed for several clients at once, in the place of those that cannot."""

from __future__ import annotations

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

    Example:
        >>> from torch import nn
        >>> from fedmtl import models
        >>> models.fix(nn.Sequential(nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4)))[1]
        GroupNorm(4, 4, eps=1e-05, affine=True, bias=True)
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
        kind = type(child)
        recurrent = kind in (nn.RNN, nn.LSTM, nn.GRU) and not getattr(child, "proj_size", 0)
        if not recurrent and kind is not nn.MultiheadAttention:
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
            layer = _of_opacus(child).to(next(child.parameters()))
            # Parameters have the same names and shapes in both, so outputs stay the same.
            layer.load_state_dict(child.state_dict())
            made[child] = layer.requires_grad_(moving.pop()).train(child.training)
        setattr(module, name, made[child])


def _of_opacus(layer: nn.Module) -> nn.Module:
    """Returns a layer of Opacus with the settings of a recurrent or an attention layer."""
    from .opacus_layers import attention, recurrent

    if isinstance(layer, nn.MultiheadAttention):
        return attention(layer)
    return recurrent(layer)
