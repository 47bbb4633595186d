"""How client work runs: stacked, or one client a thread."""

from .executor import Execution, Executor, operation_threads

__all__ = ["Execution", "Executor", "operation_threads"]
