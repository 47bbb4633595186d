"""What a model is before the data are read."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from torch import nn

if TYPE_CHECKING:
    from ..data import DataSpec

ModelFactory = Callable[["DataSpec"], nn.Module]
"""From the shape of the data to a module, so that a model can be named before the data are read."""
