"""The one loop: events in, a result and a run folder out."""

from .callbacks import Callback, ProgressBar
from .hooks import RunAudit
from .predict import load_predictor
from .result import Result
from .scored import Scored
from .stopping import EarlyStopping
from .trainer import Trainer, personalize

__all__ = [
    "Callback",
    "EarlyStopping",
    "ProgressBar",
    "Result",
    "RunAudit",
    "Scored",
    "Trainer",
    "load_predictor",
    "personalize",
]
