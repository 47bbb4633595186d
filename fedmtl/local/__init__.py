"""Local training: solvers over stacked parameters, plain and by DP-SGD, and how client work is executed."""

from .batches import BatchPlan
from .executor import Execution, Executor, operation_threads
from .mixture import Mixture
from .optimizers import StackedOptimizer
from .proximal import PENALTIES, Penalty, prox_nuclear
from .solver import LocalOptimizer, LocalSGD, LocalSolver, plan_batches
from .train import LocalTraining

__all__ = [
    "PENALTIES",
    "BatchPlan",
    "Execution",
    "Executor",
    "LocalOptimizer",
    "LocalSGD",
    "LocalSolver",
    "LocalTraining",
    "Mixture",
    "Penalty",
    "StackedOptimizer",
    "operation_threads",
    "plan_batches",
    "prox_nuclear",
]
