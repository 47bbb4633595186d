"""K copies of one module as one batched program: stacked parameters, batched losses, keyed dropout, model checks."""

from .checks import check_stackable, prepare_module
from .losses import resolve_loss
from .module import Layout, StackedModule, belongs, place_module, set_trainable
from .per_example import example_gradients

__all__ = [
    "Layout",
    "StackedModule",
    "belongs",
    "check_stackable",
    "example_gradients",
    "place_module",
    "prepare_module",
    "resolve_loss",
    "set_trainable",
]
