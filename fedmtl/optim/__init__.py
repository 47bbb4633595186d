"""Local solvers: torch optimizers over stacked parameters, and the local training loops, plain and by DP-SGD."""

from .batches import BatchPlan
from .local import LocalOptimizer, LocalSGD, LocalSolver, plan_batches, train_locally
from .nuclear import NuclearProx
from .optimizers import Elementwise, MeanRegularizedSGD, StackedOptimizer, StackedSGD
from .private import Records, train_privately
from .proximal import PENALTIES, Penalty, prox_nuclear

__all__ = [
    "PENALTIES",
    "BatchPlan",
    "Elementwise",
    "LocalOptimizer",
    "LocalSGD",
    "LocalSolver",
    "MeanRegularizedSGD",
    "NuclearProx",
    "Penalty",
    "Records",
    "StackedOptimizer",
    "StackedSGD",
    "plan_batches",
    "prox_nuclear",
    "train_locally",
    "train_privately",
]
