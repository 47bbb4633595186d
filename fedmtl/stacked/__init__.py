"""K copies of one module computed together: stacked parameters, batched losses, keyed dropout, model checks."""

from .checks import check_stackable, prepare_module
from .losses import client_means, resolve_loss
from .module import Layout, StackedModule
from .per_example import example_gradients

__all__ = [
    "Layout",
    "StackedModule",
    "check_stackable",
    "client_means",
    "example_gradients",
    "prepare_module",
    "resolve_loss",
]
