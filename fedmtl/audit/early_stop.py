"""The checks that an early stop reads released values only, and is charged as the whole plan."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np

from .._rounding import rounded_up
from ..trainer.evaluation import METRICS
from ..trainer.stopping import EarlyStopping
from ..trainer.trainer import Trainer
from .charges import planned_epsilon
from .findings import Finding, exact, skipped
from .setup import Setup
from .statistics import auditor

_HISTORIES = 200
_MEASURED = ("loss", *METRICS, "worst_tenth", "spread", "global_accuracy", "objective", "time")


def stopping_rule(trainer: Trainer, seed: int) -> Finding:
    """Checks that the rule of an early stop reads the released model alone: its decision is the
    same for all values of the measurements on private data."""
    rule = trainer.early_stopping or EarlyStopping()
    coins = auditor(seed, "stop")
    wrong = 0
    for _ in range(_HISTORIES):
        moved = np.cumsum(coins.normal(0.1, 1.0, size=int(coins.integers(1, 20)))).tolist()
        public = [
            {"round": step, "distance": abs(distance)}
            for step, distance in enumerate(moved, start=1)
        ]
        decisions = set()
        for value in (0.0, 1.0, math.nan, 1e9):
            decisions.add(rule.stops([row | dict.fromkeys(_MEASURED, value) for row in public]))
        wrong += len(decisions) > 1
    return exact(
        "charges: rule of an early stop", wrong, "histories in which private measurements decide"
    )


def stopped_early(trainer: Trainer, setup: Setup, seed: int) -> Finding:
    """Checks the run itself, with a rule that stops it at once."""
    rule = EarlyStopping(patience=1, min_delta=1e300)
    problem = trainer.problem()
    if trainer.algorithm.shared(trainer.algorithm.init(problem)) is None:
        return skipped("charges: early stop", "no model is common to all, so no run stops early")
    result = replace(
        trainer, early_stopping=rule, eval_every=1, finetune=None, privacy=setup.privacy
    ).fit()
    if result.stopped != "early":
        return skipped("charges: early stop", f"the run did not stop early: {result.stopped}")
    stated = result.privacy.epsilon
    planned = planned_epsilon(setup, seed)
    detail = (
        f"epsilon {rounded_up(stated, 6)} after an early stop, {rounded_up(planned, 6)} of "
        "all that is planned"
    )
    return exact(
        "charges: early stop", int(not math.isclose(stated, planned, rel_tol=1e-9)), detail
    )
