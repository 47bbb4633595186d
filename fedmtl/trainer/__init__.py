"""The one loop: rounds and activations in, a result and a run folder out."""

from .callbacks import Callback, ProgressBar
from .hooks import RunAudit
from .new_clients import personalize
from .predict import load_predictor
from .result import Result
from .scored_models import ScoredModels
from .simulate import Step, simulate
from .stopping import EarlyStopping
from .trainer import Trainer

__all__ = [
    "Callback",
    "EarlyStopping",
    "ProgressBar",
    "Result",
    "RunAudit",
    "ScoredModels",
    "Step",
    "Trainer",
    "load_predictor",
    "personalize",
    "simulate",
]
