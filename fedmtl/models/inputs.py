"""Layers around a model: bounds on features and predictions, and inputs by name."""

from __future__ import annotations

import inspect
import math
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from ..data.transforms import Packed, RowBound
from ..errors import ModelError
from ..local.losses import Link, linked


class BoundedInputs(nn.Module):
    """Scales the inputs of a model down to the bound on features that it was trained with.

    Args:
        model: of inputs (N, *shape).
        bound: on the norm of each of them.

    Example:
        >>> import torch
        >>> from fedmtl.data import RowBound
        >>> from fedmtl.models import BoundedInputs
        >>> model = BoundedInputs(torch.nn.Identity(), RowBound(1.0, "l2"))
        >>> model(torch.tensor([[3.0, 4.0]])).norm().round(decimals=4).item()
        1.0
    """

    def __init__(self, model: nn.Module, bound: RowBound) -> None:
        super().__init__()
        self.model = model
        self.bound = bound

    def forward(self, x: Tensor) -> Tensor:
        """Returns the outputs of the model at bounded inputs.

        Args:
            x: (N, *shape) of any floating dtype.
        """
        outputs: Tensor = self.model(self.bound(x))
        return outputs

    def extra_repr(self) -> str:
        """Returns the bound and its norm, for ``repr``."""
        return f"bound={self.bound.bound:g}, norm={self.bound.norm!r}"


class BoundedOutputs(nn.Module):
    """Cuts the predictions of a model off at the public bound on targets.

    Args:
        model: of inputs (N, *shape).
        limit: on the absolute value of its predictions.
        link: makes predictions of the outputs of the model.

    Example:
        >>> import torch
        >>> from fedmtl.models import BoundedOutputs
        >>> BoundedOutputs(torch.nn.Identity(), limit=1.0)(torch.tensor([-3.0, 0.5])).tolist()
        [-1.0, 0.5]
    """

    model: nn.Module
    limit: float
    link: Link

    def __init__(self, model: nn.Module, limit: float, link: Link = "identity") -> None:
        super().__init__()
        self.model = model
        self.limit = limit
        self.link = link

    def forward(self, x: Tensor) -> Tensor:
        """Returns predictions in [-limit, limit].

        Args:
            x: (N, *shape), the model's inputs.
        """
        return linked(self.model(x), self.link).clamp(-self.limit, self.limit)

    def extra_repr(self) -> str:
        """Returns the limit and the link, for ``repr``."""
        if self.link == "identity":
            return f"limit={self.limit:g}"
        return f"limit={self.limit:g}, link={self.link!r}"


@dataclass(frozen=True)
class ModelBounds:
    """Describes the layers around a trained network with which it is scored and served.

    Args:
        records: bound on the features of a record, to which records were scaled down for training
            and for every score; None of an algorithm without one.
        limit: at which predictions are cut off: the data's public bound on targets; infinite for
            none.
        link: makes predictions of the outputs of the network.
    """

    records: RowBound | None = None
    limit: float = math.inf
    link: Link = "identity"

    def around(self, module: nn.Module) -> nn.Module:
        """Returns the module within these bounds."""
        if self.records is not None:
            module = BoundedInputs(module, self.records)
        if self.limit < math.inf or self.link != "identity":
            module = BoundedOutputs(module, self.limit, self.link)
        return module


class NamedInputs(nn.Module):
    """Gives a model of several inputs, or of a dictionary of them, its inputs from one row of
    numbers an example.

    A model whose forward has parameters of the inputs' names gets them by name; one with a single
    parameter gets a dictionary.

    Args:
        model: takes the inputs, (B, *shape) each, real ones in the dtype of the row and integer
            ones as int64.
        packed: the inputs in a row.

    Raises:
        ModelError: a forward that takes neither.

    Example:
        >>> import torch
        >>> from fedmtl.data import Packed
        >>> from fedmtl.models import NamedInputs
        >>> class Sum(torch.nn.Module):
        ...     def forward(self, a, b):
        ...         return a.sum(1) + b.sum(1)
        >>> model = NamedInputs(Sum(), Packed((("a", (2,), "real"), ("b", (1,), "real"))))
        >>> model(model.pack({"a": torch.ones(3, 2), "b": torch.zeros(3, 1)})).tolist()
        [2.0, 2.0, 2.0]
    """

    def __init__(self, model: nn.Module, packed: Packed) -> None:
        super().__init__()
        self.model = model
        self.packed = packed
        names = [name for name, _, _ in packed.inputs]
        # *args of a forward take nothing by name.
        taken = [
            p
            for p in inspect.signature(model.forward).parameters.values()
            if p.kind != p.VAR_POSITIONAL
        ]
        required = [p.name for p in taken if p.default is p.empty and p.kind != p.VAR_KEYWORD]
        free = any(p.kind == p.VAR_KEYWORD for p in taken)
        # By name only if the forward takes every input and needs nothing else.
        self.by_name = set(required) <= set(names) and (
            free or set(names) <= {p.name for p in taken}
        )
        if not self.by_name and len(required) != 1:
            raise ModelError(
                f"The forward of {type(model).__name__} takes {', '.join(p.name for p in taken)}, "
                f"but the data have the inputs {', '.join(names)}; accepted: these names, or one "
                f"parameter for a dictionary of them."
            )

    def forward(self, x: Tensor) -> Tensor:
        """Returns the outputs of the model at the inputs of a row.

        Args:
            x: (B, D), one row an example, as :meth:`pack` makes it.
        """
        inputs: dict[str, Tensor] = {}
        first = 0
        for name, shape, kind in self.packed.inputs:
            size = math.prod(shape)
            # One input of the row, in its own shape.
            part = x[:, first : first + size].reshape(len(x), *shape)
            if kind == "integer":
                part = part.round().long()
            inputs[name] = part
            first += size
        outputs: Tensor
        if self.by_name:
            outputs = self.model(**inputs)
        else:
            outputs = self.model(inputs)
        return outputs

    def pack(self, inputs: Mapping[str, Tensor]) -> Tensor:
        """Returns one row an example, (B, D) float32, as :meth:`forward` takes it.

        Args:
            inputs: (B, *shape) by name.
        """
        rows = [
            inputs[name].float().reshape(len(inputs[name]), -1) for name, _, _ in self.packed.inputs
        ]
        return torch.cat(rows, 1)

    def extra_repr(self) -> str:
        """Returns the names of the inputs, for ``repr``."""
        return f"inputs={', '.join(name for name, _, _ in self.packed.inputs)}"
