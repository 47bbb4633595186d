"""Local training: K copies of one module as one batch, solvers over their stacked parameters, plain
and by DP-SGD, and how client work is executed. :class:`LocalTrainer` is the way in from a program
without a federation."""

from .batched import check_examples, check_stackable
from .batches import BatchPlan, plan_batches
from .behaviour import check_behaviour, check_loss
from .executor import Execution, Executor, operation_threads
from .layout import Layout, check_names, named_by
from .lazy import with_shapes
from .local_trainer import LocalTrainer, gradient_plan
from .losses import resolve_loss
from .mixture import Mixture
from .module import StackedModule
from .module_checks import check_copyable, check_layers, prepare_module
from .per_example import example_gradients
from .solver import BackoffSGD, LocalOptimizer, LocalSGD, LocalSolver
from .train import LocalTraining

__all__ = [
    "BackoffSGD",
    "BatchPlan",
    "Execution",
    "Executor",
    "Layout",
    "LocalOptimizer",
    "LocalSGD",
    "LocalSolver",
    "LocalTrainer",
    "LocalTraining",
    "Mixture",
    "StackedModule",
    "check_behaviour",
    "check_copyable",
    "check_examples",
    "check_layers",
    "check_loss",
    "check_names",
    "check_stackable",
    "example_gradients",
    "gradient_plan",
    "named_by",
    "operation_threads",
    "plan_batches",
    "prepare_module",
    "resolve_loss",
    "with_shapes",
]
