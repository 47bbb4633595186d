"""The one loop: events in, a result and a run folder out."""

from .callbacks import Callback, ProgressBar
from .new_clients import NewClients, personalize
from .result import Result
from .stopping import EarlyStopping
from .trainer import Trainer

__all__ = ["Callback", "EarlyStopping", "NewClients", "ProgressBar", "Result", "Trainer", "personalize"]
