"""A short run with a few settings, and one that is interrupted and resumed."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from fedmtl import Callback, FedAvg, FullParticipation, LocalSGD, Result, Trainer, models
from tests.helpers import ragged_classification
from tests.trainer.ledgers import charges


def trainer(**settings: Any) -> Trainer:
    """One round of everybody in double precision without privacy, of FedAvg on small data unless there are others."""
    defaults: dict[str, Any] = {
        "model": models.softmax_regression(),
        "schedule": FullParticipation(),
        "privacy": None,
        "rounds": 1,
        "dtype": "float64",
        "progress": False,
    }
    if "algorithm" not in settings:
        defaults["algorithm"] = FedAvg(local=LocalSGD(lr=0.1))
    if "data" not in settings:
        defaults["data"] = ragged_classification(6)
    return Trainer(**defaults | settings)


def check_same(first: Result, second: Result) -> None:
    """Check that two results have the same bits, whatever time they took."""
    assert torch.equal(first.personal, second.personal)
    assert (first.shared is None) == (second.shared is None)
    assert first.shared is None or torch.equal(first.shared, second.shared)
    timeless = [
        [{k: v for k, v in row.items() if k != "time"} for row in run.history]
        for run in (first, second)
    ]
    assert repr(timeless[0]) == repr(timeless[1])
    assert (first.epsilon, first.stopped, first.replicates) == (
        second.epsilon,
        second.stopped,
        second.replicates,
    )


class Ended(BaseException):
    """The process ends here."""


class Ends(Callback):
    """Ends a run after the event of a step, as a crash does unless there is another error."""

    def __init__(self, step: int, error: type[BaseException] = Ended) -> None:
        self.step, self.error = step, error

    def on_block(self, event: Any, state: Any) -> None:
        if event.step >= self.step:
            raise self.error("at the end")


def check_resumed(make: Callable[..., Trainer], folder: Path, step: int = 0) -> Result:
    """Check that a run that ended after ``step`` and was resumed has the bits of one that did not end.

    Args:
        make: makes the trainer of a ``folder`` with ``callbacks``.
        folder: in which the runs have theirs, ``run`` and ``whole``.
        step: the first step that the run has begun and not ended.
    """
    with pytest.raises(Ended):
        make(folder=folder / "run", callbacks=(Ends(step),)).fit()
    ledger = folder / "run" / "private" / "ledger.jsonl"
    assert not ledger.exists() or max(charges(ledger)) >= step
    whole, resumed = (
        make(folder=folder / "whole").fit(),
        make(folder=folder / "run").fit(resume=True),
    )
    check_same(resumed, whole)
    return resumed
