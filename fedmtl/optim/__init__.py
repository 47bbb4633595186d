"""Local solvers: torch optimizers over stacked parameters, and the local training loops, plain and by DP-SGD."""

from .batches import BatchPlan
from .local import LocalOptimizer, LocalSGD, LocalSolver, plan_batches, train_locally
from .optimizers import Elementwise, MeanRegularizedSGD, StackedOptimizer, StackedSGD
from .private import Records, train_privately

__all__ = [
    "BatchPlan",
    "Elementwise",
    "LocalOptimizer",
    "LocalSGD",
    "LocalSolver",
    "MeanRegularizedSGD",
    "Records",
    "StackedOptimizer",
    "StackedSGD",
    "plan_batches",
    "train_locally",
    "train_privately",
]
