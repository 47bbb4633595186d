"""Local training: solvers over stacked parameters, plain and by DP-SGD, and how client work is executed."""

from .batches import BatchPlan
from .executor import Execution, Executor, operation_threads
from .mixture import Mixture
from .optimizers import Elementwise, StackedOptimizer, StackedSGD
from .private import train_privately
from .proximal import PENALTIES, Penalty, prox_nuclear
from .solver import LocalOptimizer, LocalSGD, LocalSolver, plan_batches, train_locally

__all__ = [
    "PENALTIES",
    "BatchPlan",
    "Elementwise",
    "Execution",
    "Executor",
    "LocalOptimizer",
    "LocalSGD",
    "LocalSolver",
    "Mixture",
    "Penalty",
    "StackedOptimizer",
    "StackedSGD",
    "operation_threads",
    "plan_batches",
    "prox_nuclear",
    "train_locally",
    "train_privately",
]
