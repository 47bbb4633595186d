"""How client work runs: stacked, or in threads."""

from .executor import Execution, Executor, operation_threads

__all__ = ["Execution", "Executor", "operation_threads"]
