"""Local solvers: torch optimizers over stacked parameters, and the local training loop."""

from .batches import BatchPlan
from .local import LocalOptimizer, LocalSGD, LocalSolver, plan_batches, train_locally
from .optimizers import Elementwise, MeanRegularizedSGD, StackedOptimizer, StackedSGD

__all__ = [
    "BatchPlan",
    "Elementwise",
    "LocalOptimizer",
    "LocalSGD",
    "LocalSolver",
    "MeanRegularizedSGD",
    "StackedOptimizer",
    "StackedSGD",
    "plan_batches",
    "train_locally",
]
