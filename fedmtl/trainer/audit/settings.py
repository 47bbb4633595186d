"""The checks of what a run takes as it is: settings that an algorithm fills in by itself, and frozen parameters."""

from __future__ import annotations

from contextlib import closing
from dataclasses import fields, replace
from typing import Any

import torch
from torch import Tensor

from ...algorithms.base import Problem, State
from ...data import FederatedDataset
from ...data.examples import Examples
from ...privacy import RecordPrivacy
from ...privacy.audit import Finding
from ...privacy.audit.findings import exact
from ..trainer import Trainer
from .independence import ROUNDS
from .others import replaced_data
from .rerun import states

_SHAPES = {"__get__", "__len__", "size", "dim", "ndimension", "numel", "is_floating_point"}  # which tell no number


def automatic_settings(written: Trainer, trainer: Trainer, *, seed: int = 0) -> list[Finding]:
    """Check that an algorithm chooses the settings that it fills in by itself, such as a step size, without a look at
    any record, and the same where every client's data are replaced; nothing without privacy, where it may read them.

    Such settings shape every client's numbers and are in no release, and all other checks take them as they are.

    Args:
        written: the configuration as it was written.
        trainer: the same with its settings from public rows, bounds and sizes.
        seed: of the data that are put in place.
    """
    if written.privacy is None or trainer.algorithm is written.algorithm:
        return []
    data = replaced_data(written.data, seed, counts=not isinstance(written.privacy, RecordPrivacy))
    read: list[str] = []
    again, chosen = resolved(replace(written, data=data), read).algorithm, trainer.algorithm
    names = [setting.name for setting in fields(chosen)]  # type: ignore[arg-type]
    wrong = [name for name in names if getattr(chosen, name) != getattr(again, name)]
    wrong += [f"what {name} reads of the records" for name in dict.fromkeys(read)]
    detail = "settings that an algorithm chose by itself and that depend on records, or differ where all are replaced"
    detail = f"automatic settings depend on private data: {', '.join(wrong[:3])}" if wrong else detail
    return [exact("transcript: automatic settings", len(wrong), detail)]


def frozen_parameters(trainer: Trainer, *, rounds: int = ROUNDS) -> list[Finding]:
    """What is frozen in the model has every bit after a run that it had before; nothing where nothing is frozen.

    It is in every model that a run gives out, and no release covers it.

    Args:
        trainer: the configuration.
        rounds: rounds that are run.
    """
    fresh = trainer.problem(device="cpu")
    with closing(fresh.executor):
        before = {name: value.clone() for name, value in fresh.layout.frozen(fresh.module).items()}
    if not before:
        return []
    changed: list[str] = []

    def finish(problem: Problem, state: State) -> None:
        after = problem.layout.frozen(problem.module)
        changed.extend(name for name, value in before.items() if not torch.equal(value, after[name]))

    for _ in states(trainer, trainer.data, rounds, finish=finish):
        pass
    detail = f"tensors that a run changed, of {len(before)} that are frozen and public"
    detail = f"a run changes {', '.join(changed)}, frozen and public" if changed else detail
    return [exact("transcript: frozen parameters", len(changed), detail)]


def resolved(trainer: Trainer, read: list[str] | None = None) -> Trainer:
    """Return the trainer with its settings from public rows, chosen once for all that is checked; every operation on
    the numbers of a record is appended to ``read``."""
    problem = trainer.problem(device="cpu")
    with closing(problem.executor):
        if read is not None:
            problem = replace(problem, data=_watched(problem.data, read))
            read.clear()  # of what a data set looks at when it is made
        return trainer.resolved(problem)


def _watched(data: FederatedDataset, read: list[str]) -> FederatedDataset:
    """Return the same data, whose records append to ``read`` what is done with them."""

    class Watched(Tensor):
        @classmethod
        def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            if func.__name__ not in _SHAPES:
                read.append(func.__name__)
            return super().__torch_function__(func, types, args, kwargs or {})

    def watched(side: Examples) -> Examples:
        return replace(side, x=side.x.as_subclass(Watched), y=side.y.as_subclass(Watched))

    return replace(data, train=watched(data.train), test=watched(data.test), verify=False)
