"""How client work runs: stacked, or one client a thread."""

from .executor import Execution, Executor

__all__ = ["Execution", "Executor"]
