"""Callbacks of the trainer: progress bar and loggers."""

from __future__ import annotations

import math
import os
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from .._extras import console, installed, load, mlflow, progress, tensorboard
from .._files import write_bytes
from .._rounding import number_text, rounded_up
from ..errors import ConfigError
from .evaluation import METRICS

if TYPE_CHECKING:
    from ..algorithms.base import State
    from ..schedules import Block
    from .result import Result

_LINE_SECONDS = 10.0  # between the lines of a run without a terminal
# Limits of MLflow: parameters in one call, and letters of one parameter.
_PARAMETERS = 100
_LONGEST_PARAMETER = 500


class Callback:
    """Hooks around the loop of a run; every method does nothing unless it is overridden.

    A callback must not write private numbers to places that observers can see.

    Example:
        >>> from fedmtl import Callback, FullParticipation, Local
        >>> from fedmtl import LocalSGD, Trainer, load_data, models
        >>> class Count(Callback):
        ...     rounds = 0
        ...     def on_block(self, block, state):
        ...         self.rounds += 1
        >>> count = Count()
        >>> result = Trainer(
        ...     algorithm=Local(local=LocalSGD(lr=0.1)),
        ...     data=load_data("digits", clients=10),
        ...     model=models.softmax_regression(),
        ...     schedule=FullParticipation(),
        ...     privacy=None,
        ...     rounds=3,
        ...     callbacks=(count,),
        ...     progress=False,
        ... ).fit()
        >>> count.rounds
        3
    """

    def on_start(self, name: str, rounds: int, step: int) -> None:
        """Called before the first step of this process.

        Args:
            name: of the method.
            rounds: planned.
            step: rounds that are done already, of a run that is resumed.
        """

    def on_block(self, block: Block, state: State) -> None:
        """Called after each round, or block of activations.

        Args:
            block: the cohort, or the activations; ``block.step`` is the number of its last step.
            state: after it.
        """

    def on_evaluate(self, row: Mapping[str, Any]) -> None:
        """Called after each evaluation.

        Args:
            row: of the history: the round, scores, loss and epsilon by name.
        """

    def on_end(self, result: Result | None) -> None:
        """Called after the last step.

        Args:
            result: of the run; None if it was interrupted.
        """


class ProgressBar(Callback):
    """A bar with round, loss, accuracy, epsilon spent and time left, on standard error.

    Without a terminal, or without rich, it prints lines instead: that of the last evaluation, and
    before it one about every ten seconds.

    Example:
        >>> from fedmtl import FedAvg, FullParticipation, LocalSGD, Trainer, load_data, models
        >>> from fedmtl.trainer import ProgressBar
        >>> trainer = Trainer(
        ...     algorithm=FedAvg(local=LocalSGD(lr=0.1)),
        ...     data=load_data("digits", clients=4),
        ...     model=models.softmax_regression(),
        ...     schedule=FullParticipation(),
        ...     privacy=None,
        ...     rounds=1,
        ...     callbacks=(ProgressBar(),),
        ...     progress=False,
        ... )
        >>> trainer.fit().personal.shape
        torch.Size([4, 650])
    """

    def __init__(self) -> None:
        self._bar: progress.Progress | None = None
        if not installed("rich"):
            return
        place = console.Console(stderr=True)
        # A bar in a file would be thousands of lines.
        if place.is_terminal:
            self._bar = progress.Progress(
                progress.TextColumn("{task.description:>8}"),
                progress.BarColumn(bar_width=24),
                progress.MofNCompleteColumn(),
                progress.TextColumn("{task.fields[numbers]}"),
                progress.TimeRemainingColumn(compact=True),
                console=place,
            )

    def on_start(self, name: str, rounds: int, step: int) -> None:
        """Starts the bar at the first step of this session."""
        self._name = name
        self._began = time.monotonic()
        self._rounds = rounds
        self._printed = self._began
        self._round = 0
        if self._bar is not None:
            self._bar.start()
            self._task = self._bar.add_task(name, total=rounds, completed=step, numbers="")

    def on_block(self, block: Block, state: State) -> None:
        """Moves the bar to the last step of the block."""
        if self._bar is not None:
            self._bar.update(self._task, completed=block.step + 1)

    def on_evaluate(self, row: Mapping[str, Any]) -> None:
        """Shows loss, accuracy and epsilon, beside the bar or as a line if one is due."""
        metric = next(name for name in METRICS if name in row)
        epsilon = "none"
        if not math.isinf(row["epsilon"]):
            epsilon = rounded_up(row["epsilon"], 3)
        numbers = (
            f"loss {number_text(row['loss'])}  {metric.replace('_', ' ')} "
            f"{number_text(row[metric])}"
        )
        numbers += f"  epsilon {epsilon}"
        if self._bar is not None:
            self._bar.update(self._task, numbers=numbers)
            return
        now = time.monotonic()
        # Replicates have a row for each budget: the lines of one round belong together.
        due = row["round"] in (self._round, self._rounds) or now - self._printed >= _LINE_SECONDS
        if due:
            self._printed = now
            self._round = row["round"]
            budget = ""
            if row.get("budget") is not None:
                budget = f", budget {rounded_up(row['budget'], 6)}"
            line = (
                f"{self._name} {row['round']}/{self._rounds}{budget}  {numbers}  "
                f"{now - self._began:.0f} s"
            )
            print(line, file=sys.stderr)

    def on_end(self, result: Result | None) -> None:
        """Stops the bar."""
        if self._bar is not None:
            self._bar.stop()


class TensorBoard(Callback):
    """Writes every number of the history to TensorBoard event files (needs the ``tensorboard``
    extra).

    Args:
        folder: of the event files; keep it private, the numbers are computed on the clients' data.
    """

    def __init__(self, folder: str | Path) -> None:
        self._writer = tensorboard.SummaryWriter(str(folder))

    def on_evaluate(self, row: Mapping[str, Any]) -> None:
        for key, value in _numbers(row).items():
            self._writer.add_scalar(key, value, row["round"])

    def on_end(self, result: Result | None) -> None:
        self._writer.close()


class MLflow(Callback):
    """Logs the settings and every number of the history to MLflow (needs the ``mlflow`` extra).

    These numbers are computed on the clients' data, so they are kept in ``folder``, whose
    ``mlflow.db`` is read by ``mlflow ui --backend-store-uri sqlite:///FOLDER/mlflow.db``; nothing
    is written elsewhere. A run that is resumed continues under its name there.

    Args:
        folder: of the database; keep it private. None with ``tracking_uri``.
        experiment: its name.
        tracking_uri: of another database, such as one for all runs of a sweep; None for ``folder``.
        parameters: settings of the run by name, logged as they are.

    Raises:
        ConfigError: neither a folder nor a URI.
        MissingExtra: MLflow is not installed.
    """

    def __init__(
        self,
        folder: str | Path | None = None,
        experiment: str = "fedmtl",
        tracking_uri: str | None = None,
        parameters: Mapping[str, Any] | None = None,
    ) -> None:
        if folder is None and tracking_uri is None:
            raise ConfigError("MLflow needs folder, for its database, or tracking_uri.")
        # Before the import, which reads it: nothing is sent unasked.
        os.environ.setdefault("MLFLOW_DISABLE_TELEMETRY", "true")
        load(mlflow)
        self._parameters = dict(parameters or {})
        if folder is None or tracking_uri is not None:
            self._folder = None
        else:
            self._folder = Path(folder).resolve()
        self._experiment = experiment
        self._uri = tracking_uri

    def on_start(self, name: str, rounds: int, step: int) -> None:
        artifacts = None
        before = None
        if self._folder is not None:
            self._folder.mkdir(parents=True, exist_ok=True)
            self._uri = f"sqlite:///{self._folder / 'mlflow.db'}"
            artifacts = (self._folder / "artifacts").as_uri()
            before = self._folder / "run"
        mlflow.set_tracking_uri(self._uri)
        if mlflow.get_experiment_by_name(self._experiment) is None:
            mlflow.create_experiment(self._experiment, artifact_location=artifacts)
        mlflow.set_experiment(self._experiment)
        # A resumed run goes on in the record that it began, by the id that it wrote there.
        if step and before is not None and before.is_file():
            mlflow.start_run(run_id=before.read_text())
            return
        run = mlflow.start_run(run_name=name)
        if before is not None:
            write_bytes(before, run.info.run_id.encode())
        texts = [(key, str(value)[:_LONGEST_PARAMETER]) for key, value in self._parameters.items()]
        for first in range(0, len(texts), _PARAMETERS):
            mlflow.log_params(dict(texts[first : first + _PARAMETERS]))

    def on_evaluate(self, row: Mapping[str, Any]) -> None:
        mlflow.log_metrics(_numbers(row), step=int(row["round"]))

    def on_end(self, result: Result | None) -> None:
        mlflow.end_run("KILLED" if result is None else "FINISHED")


def _numbers(row: Mapping[str, Any]) -> dict[str, float]:
    """Returns the finite numbers of a row by name; names begin with the budget if a round has a row
    for each budget."""
    budget = row.get("budget")
    prefix = ""
    if budget is not None:
        prefix = f"budget_{rounded_up(budget, 6)}/"
    numbers = ((k, v) for k, v in row.items() if k not in ("round", "budget"))
    return {f"{prefix}{k}": v for k, v in numbers if math.isfinite(v)}
