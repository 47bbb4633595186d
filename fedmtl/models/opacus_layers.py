"""Layers of Opacus in the place of PyTorch's that cannot be computed for several clients at once;
imported when a model has one, as Opacus is slow to import."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from .._extras import extras

with extras():
    from opacus.layers import DPGRU, DPLSTM, DPRNN, DPMultiheadAttention


class BatchFirstAttention(DPMultiheadAttention):  # type: ignore[misc]
    """Computes Opacus' attention over (B, T, E) as over (T, B, E).

    With its own ``batch_first`` it joins the heads in another order than ``nn.MultiheadAttention``
    does.
    """

    def forward(
        self, query: Tensor, key: Tensor, value: Tensor, *further: Any, **named: Any
    ) -> Any:
        outputs, weights = super().forward(
            *(x.transpose(0, 1) for x in (query, key, value)), *further, **named
        )
        return outputs.transpose(0, 1), weights


def recurrent(layer: nn.Module) -> nn.Module:
    """Returns a layer with the settings of an ``nn.RNN``, ``nn.LSTM`` or ``nn.GRU``."""
    names = [
        "input_size",
        "hidden_size",
        "num_layers",
        "bias",
        "batch_first",
        "dropout",
        "bidirectional",
    ]
    classes = {
        nn.RNN: (DPRNN, [*names, "nonlinearity"]),
        nn.LSTM: (DPLSTM, names),
        nn.GRU: (DPGRU, names),
    }
    layer_class, named = classes[type(layer)]
    made: nn.Module = layer_class(**{name: getattr(layer, name) for name in named})
    return made


def attention(layer: nn.MultiheadAttention) -> nn.Module:
    """Returns a layer with the settings of an ``nn.MultiheadAttention``."""
    layer_class = DPMultiheadAttention
    if layer.batch_first:
        layer_class = BatchFirstAttention
    made: nn.Module = layer_class(
        embed_dim=layer.embed_dim, num_heads=layer.num_heads, dropout=layer.dropout,
        bias=layer.in_proj_bias is not None, add_bias_kv=layer.bias_k is not None,
        add_zero_attn=layer.add_zero_attn,
        kdim=layer.kdim, vdim=layer.vdim,
    )  # fmt: skip
    return made
