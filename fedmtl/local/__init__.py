"""Local training: K copies of one module as one batch, solvers over their stacked parameters, plain and by DP-SGD, and
how client work is executed."""

from .batches import BatchPlan, plan_batches
from .checks import check_stackable, prepare_module
from .executor import Execution, Executor, operation_threads
from .losses import resolve_loss
from .mixture import Mixture
from .module import Layout, StackedModule, named_by, place_module, set_trainable
from .optimizers import StackedOptimizer
from .per_example import example_gradients
from .proximal import PENALTIES, Penalty, prox_nuclear
from .solver import LocalOptimizer, LocalSGD, LocalSolver
from .train import LocalTraining

__all__ = [
    "PENALTIES",
    "BatchPlan",
    "Execution",
    "Executor",
    "Layout",
    "LocalOptimizer",
    "LocalSGD",
    "LocalSolver",
    "LocalTraining",
    "Mixture",
    "Penalty",
    "StackedModule",
    "StackedOptimizer",
    "check_stackable",
    "example_gradients",
    "named_by",
    "operation_threads",
    "place_module",
    "plan_batches",
    "prepare_module",
    "prox_nuclear",
    "resolve_loss",
    "set_trainable",
]
