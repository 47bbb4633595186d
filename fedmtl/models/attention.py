"""Attention that can be computed for several clients at once; imported where it is needed, as
Opacus is slow to."""

from __future__ import annotations

from typing import Any

from opacus.layers import DPMultiheadAttention
from torch import Tensor


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
