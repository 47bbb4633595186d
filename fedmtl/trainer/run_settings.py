"""The settings of a run, apart from its data."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from torch import nn

from .._check import AutoCount, Checked, Count
from ..algorithms.base import Algorithm
from ..algorithms.finetune import Personalization, personalization_of
from ..local import Execution
from ..local.losses import Loss
from ..models import ModelFactory
from ..privacy import Privacy
from .callbacks import Callback
from .hooks import RunAudit
from .metrics import MetricFunction
from .run_channel import Schedule
from .setting_checks import check_settings
from .stopping import EarlyStopping


@dataclass(frozen=True, kw_only=True)
class Settings(Checked):
    """Checks the settings of a run that need no data: a :class:`~fedmtl.Trainer` without ``data``.

    A trainer is one, with the same fields; configuration files and the command line fill them.

    Raises:
        ConfigError: a value outside its range, or settings that do not fit each other whatever the
            data.
    """

    algorithm: Algorithm = "auto"  # type: ignore[assignment]  # "auto" becomes settings
    data: Any = None  # never read here; declared for its place among the others, see Trainer
    model: nn.Module | ModelFactory = "auto"  # type: ignore[assignment]
    schedule: Schedule = "auto"  # type: ignore[assignment]
    privacy: Privacy | None
    rounds: AutoCount = "auto"  # type: ignore[assignment]
    trainable: Sequence[str] | None = None
    loss: str | Loss = "auto"
    seed: int = 0
    folder: str | Path | None = None
    baselines: Sequence[str | Algorithm] = ()
    finetune: Personalization | None = "auto"  # type: ignore[assignment]
    device: str = "auto"
    dtype: Literal["float32", "float64"] = "float32"
    execution: Execution = field(default_factory=Execution)
    eval_every: Count | None = None
    evaluate_clients: Count | None = None
    checkpoint_every: Count | None = None
    early_stopping: EarlyStopping | None = None
    audit: RunAudit | None = None
    replicates: Count = 1
    epsilons: Sequence[float] | None = None
    metrics: Sequence[str | MetricFunction] = ()
    callbacks: Sequence[Callback] = ()
    progress: bool = True

    def __post_init__(self) -> None:
        self._set(finetune=personalization_of(self.finetune))
        check_settings(self)

    def _set(self, **values: Any) -> None:
        """Sets fields of the frozen trainer while it is made, to the objects that their given
        values name."""
        for name, value in values.items():
            object.__setattr__(self, name, value)
