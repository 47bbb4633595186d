"""The step size that is chosen from the public rows of the data."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from ...errors import ConfigError
from ...privacy import RecordPrivacy
from ...random import derive_key
from ...schedules import BoundSchedule
from ..linear.data import LinearData
from .collaboration import choose_kappa

if TYPE_CHECKING:
    from ..base import Problem
    from .algorithm import AsyncLearner

logger = logging.getLogger("fedmtl")
_TRIALS = 20


def resolve_kappa(
    learner: AsyncLearner,
    problem: Problem,
    schedule: BoundSchedule,
    privacy: RecordPrivacy | Sequence[RecordPrivacy] | None,
) -> AsyncLearner:
    """Return the settings with ``kappa`` by noisy simulation on the public rows, for each budget.

    The simulation has owners of the true sizes whose records are drawn from the public rows, the true caps and
    budgets, and 20 schedules and noises of its own. Only public things enter, so the choice costs no privacy.
    """
    data = problem.data
    if data.public is None:
        raise ConfigError(
            f"AsyncLearner.kappa is 'auto', but {data.name} has no public rows to choose it with; give a number."
        )
    events = min(problem.rounds, schedule.steps)
    seed = derive_key(problem.seed, "kappa") >> 1
    clients = schedule.events(seed, 0, events, replicates=_TRIALS).client
    rows = LinearData.of_examples(problem, data.public)
    each = list(privacy) if isinstance(privacy, Sequence) else [privacy]
    found: list[tuple[RecordPrivacy | None, float]] = []
    kappas: tuple[float, ...] = ()
    for settings in each:
        known = [kappa for other, kappa in found if other == settings]  # budgets by name have no hash
        if not known:
            chosen = choose_kappa(
                replace(learner, kappa=1.0),
                rows,
                counts=data.train.counts.tolist(),
                privacy=None if settings is None else replace(settings, source="seeded"),  # the rows are public
                clients=clients,
                ids=tuple(data.ids),
                caps=schedule.caps.clip(max=events),
                seed=seed,
            )
            found.append((settings, chosen.kappa))
            known = [chosen.kappa]
            of = "" if settings is None or settings.epsilon is None else f" for epsilon {settings.epsilon}"
            logger.info("kappa = %g%s, by simulation on %d public rows", chosen.kappa, of, len(data.public))
        kappas += (known[0],)
    return replace(learner, kappa=kappas if len(set(kappas)) > 1 else kappas[0])
