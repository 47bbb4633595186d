"""What stands between the features that data give and the inputs that a model takes."""

from __future__ import annotations

from torch import Tensor, nn

from ..data.transforms import RowBound


class BoundedInputs(nn.Module):
    """A model whose inputs are first scaled down to the bound on features that it was trained with.

    Args:
        model: of inputs (N, *shape).
        bound: on the norm of each of them.
    """

    def __init__(self, model: nn.Module, bound: RowBound) -> None:
        super().__init__()
        self.model, self.bound = model, bound

    def forward(self, x: Tensor) -> Tensor:
        outputs: Tensor = self.model(self.bound(x))
        return outputs

    def extra_repr(self) -> str:
        return f"bound={self.bound.bound:g}, norm={self.bound.norm!r}"
