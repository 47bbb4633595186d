"""The one loop: events in, a result and a run folder out."""

from .callbacks import Callback, ProgressBar
from .result import Result
from .trainer import Trainer

__all__ = ["Callback", "ProgressBar", "Result", "Trainer"]
