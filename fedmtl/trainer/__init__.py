"""The one loop: events in, a result and a run folder out."""

from .callbacks import Callback, ProgressBar
from .engine import bind_schedule, open_run
from .evaluation import evaluate_each
from .interval import Interval
from .problem import build_problem
from .result import Result
from .scored import Scored
from .stopping import EarlyStopping
from .trainer import Trainer, personalize

__all__ = [
    "Callback",
    "EarlyStopping",
    "Interval",
    "ProgressBar",
    "Result",
    "Scored",
    "Trainer",
    "bind_schedule",
    "build_problem",
    "evaluate_each",
    "open_run",
    "personalize",
]
