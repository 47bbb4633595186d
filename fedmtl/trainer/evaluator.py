"""The evaluator of a run, which also warns of local trainings that diverged."""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from ..algorithms.base import State
from ..algorithms.problem import Tally
from ..privacy import ActivationChannel, RoundChannel
from .aggregates import bands
from .callbacks import Callback
from .engine import Engine
from .evaluation import Metrics
from .run_plan import RunPlan

logger = logging.getLogger("fedmtl")
_WRITE_SECONDS = 1.0  # between two writes of metrics.csv


class Evaluator:
    """Evaluates the models of a run.

    Its clock starts with the first evaluation, and continues that of an interrupted run.

    Args:
        plan: of the run.
        engine: measures.
        channel: open.
        callbacks: are called with every row.
        rows: the history of a run that is resumed.

    Attributes:
        history: one row for each evaluation; of replicates one for each budget.
    """

    def __init__(
        self,
        plan: RunPlan,
        engine: Engine,
        channel: RoundChannel | ActivationChannel,
        callbacks: Sequence[Callback],
        history: Sequence[dict[str, Any]],
    ) -> None:
        self.history = list(history)
        self._plan = plan
        self._engine = engine
        self._channel = channel
        self._callbacks = callbacks
        before = 0.0
        if history:
            before = history[-1]["time"]
        self._began = time.monotonic() - before
        self._written = -math.inf  # when metrics.csv was
        # diverged local trainings at the last warning; those of a checkpoint were warned of
        self._warned = 0
        if plan.problem.tally is not None:
            self._warned = plan.problem.tally.diverged

    def evaluate(self, state: State, step: int) -> tuple[list[dict[str, Any]], dict[str, Metrics]]:
        """Scores the models and adds the scores to the history.

        A row of the same step is replaced.

        Args:
            state: that is scored.
            step: number of steps done.

        Returns:
            The numbers of each replicate, with its budget and its number among those of the
            budget; and the scores of the first replicate by model.
        """
        plan = self._plan
        settings = plan.settings
        numbers, scores = self._engine.measure(plan, state)
        # The run ended at an evaluated round: its row is made anew, with the same numbers.
        while self.history and self.history[-1]["round"] == step:
            self.history.pop()
        when, spent, numbers = plan.ranks.share(
            lambda: (time.monotonic() - self._began, self._channel.epsilons, numbers)
        )
        counts: dict[str, float] = dict(self._diverged(step, scores))
        if settings.early_stopping is not None:
            model = plan.algorithm.shared(state)
            if model is not None:  # EarlyStopping reads how far it has come
                counts["distance"] = float((model - plan.problem.initial).norm())
        runs: list[dict[str, Any]] = []
        for budget, members in settings.budgets:
            row: dict[str, Any] = {"round": step, "time": when}
            if settings.runs > 1:
                row["budget"] = budget
            # The replicates of a budget differ in their cohorts, and so in their privacy cost.
            row["epsilon"] = float(spent[members].max())
            self.history.append(row | bands(numbers[members]) | counts)
            runs += [
                {"budget": budget, "repetition": k} | row for k, row in enumerate(numbers[members])
            ]
            for callback in self._callbacks:
                callback.on_evaluate(self.history[-1])
        self._write()
        return runs, scores

    def _write(self) -> None:
        """Writes the rows so far, at most once a second: frequent ones would cost more than the
        steps between them."""
        folder = self._plan.folder
        if folder is None or not self._plan.ranks.first:
            return
        if time.monotonic() - self._written > _WRITE_SECONDS:
            folder.write_history(self.history)
            self._written = time.monotonic()

    def warn_first(self, step: int) -> None:
        """Warns of the first diverged local trainings at once: the next evaluation may be far."""
        tally = self._plan.problem.tally
        if tally is not None and tally.diverged and not self._warned:
            self._warn(step, tally)

    def _warn(self, step: int, tally: Tally) -> None:
        """Warns of local trainings that diverged, if they are twice as many as at the last
        warning: a run that diverges in every round has few warnings, and its summary the count."""
        plan = self._plan
        if not tally.diverged or tally.diverged < 2 * self._warned:
            return
        if plan.ranks.first:
            logger.warning(
                "%s, %s %d: so far %d of %d local trainings diverged: their models are not finite, "
                "count as zero in what is "
                "sent, and are not kept; a smaller learning rate (algorithm.local.lr) may help",
                plan.algorithm.name, plan.step_name, step, tally.diverged, tally.trained,
            )  # fmt: skip
        self._warned = tally.diverged

    def _diverged(self, step: int, scores: Mapping[str, Metrics]) -> dict[str, int]:
        """Counts, and warns of, the local trainings that diverged since the last evaluation, and
        the clients whose models have no finite loss.

        Returns:
            The columns ``diverged_trainings`` and ``diverged_clients``, each only if it is not 0.
        """
        plan = self._plan
        if plan.problem.tally is None or not scores:
            return {}
        tally = plan.problem.trainings()
        counts = {}
        self._warn(step, tally)
        # A tally is of the whole run. Rows of one round, of several budgets, have the same count.
        before = {row["round"]: row.get("diverged_trainings", 0) for row in self.history}
        lost = tally.diverged - sum(before.values())
        if lost:
            counts["diverged_trainings"] = lost
        # The loss of a client without test examples is NaN and says nothing about its training.
        losses = scores["personal"].loss[plan.evaluated.data.test.counts > 0]
        diverged = int((~torch.isfinite(losses)).sum())
        if diverged:
            counts["diverged_clients"] = diverged
            if plan.ranks.first:
                text = "%s, %s %d: the loss of %d of %d clients' own models is not finite"
                logger.warning(
                    text, plan.algorithm.name, plan.step_name, step, diverged, len(losses)
                )
        return counts
