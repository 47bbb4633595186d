"""The one loop: events in, a result and a run folder out."""

from .callbacks import Callback, ProgressBar
from .result import Result
from .stopping import EarlyStopping
from .trainer import Trainer

__all__ = ["Callback", "EarlyStopping", "ProgressBar", "Result", "Trainer"]
