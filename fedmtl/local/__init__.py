"""Local training: K copies of one module as one batch, solvers over their stacked parameters, plain and by DP-SGD, and
how client work is executed."""

from .batches import BatchPlan, plan_batches
from .executor import Execution, Executor, operation_threads
from .losses import resolve_loss
from .module import (
    Layout,
    StackedModule,
    check_names,
    check_stackable,
    named_by,
    prepare_module,
)
from .per_example import example_gradients
from .solver import BackoffSGD, LocalOptimizer, LocalSGD, LocalSolver
from .train import LocalTraining, Mixture

__all__ = [
    "BackoffSGD",
    "BatchPlan",
    "Execution",
    "Executor",
    "Layout",
    "LocalOptimizer",
    "LocalSGD",
    "LocalSolver",
    "LocalTraining",
    "Mixture",
    "StackedModule",
    "check_names",
    "check_stackable",
    "example_gradients",
    "named_by",
    "operation_threads",
    "plan_batches",
    "prepare_module",
    "resolve_loss",
]
