"""The step size of the asynchronous learner, from simulated runs on the public rows of the data."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from ...data import Examples, FederatedDataset
from ...data.rows import take
from ...errors import ConfigError
from ...random import derive_key
from ...schedules import BoundSchedule
from ..activations import simulated_objectives
from ..base import Problem

if TYPE_CHECKING:
    from .algorithm import AsyncLearner

logger = logging.getLogger("fedmtl")
KAPPAS = (1.0, 2.0, 5.0, 10.0, 20.0, 40.0)
_TRIALS = 20


def resolve_kappa(
    learner: AsyncLearner, problem: Problem, schedule: BoundSchedule, privacy: Sequence[Any]
) -> AsyncLearner:
    """Return the settings with ``kappa`` by noisy simulation on the public rows, for each budget.

    The simulation has owners of the true sizes whose records are drawn from the public rows, the true caps and
    budgets, and 20 schedules and noises of its own. Only public things enter, so the choice costs no privacy.
    """
    if problem.data.public is None:
        raise ConfigError(
            f"AsyncLearner.kappa is 'auto', but {problem.data.name} has no public rows to choose it with; give a "
            f"number."
        )
    events = min(problem.rounds, schedule.steps)
    seed = derive_key(problem.seed, "kappa") >> 1
    block = schedule.events(seed, 0, events, replicates=_TRIALS)
    trial = replace(problem, data=public_owners(problem.data, seed), rounds=events)
    chosen: list[tuple[Any, float]] = []  # budgets by name have no hash
    for settings in privacy:
        kappas = [kappa for other, kappa in chosen if other == settings]
        if not kappas:
            fitness = {}
            for kappa in KAPPAS:
                tried = replace(learner, kappa=kappa)
                fitness[kappa] = float(
                    simulated_objectives(tried, trial, schedule, block, settings, seed=seed)[-1].mean()
                )
            kappas = [min(fitness, key=lambda kappa: fitness[kappa])]
            of = "" if settings is None or settings.epsilon is None else f" for epsilon {settings.epsilon}"
            logger.info("kappa = %g%s, by simulation on %d public rows", kappas[0], of, len(problem.data.public))
        chosen.append((settings, kappas[0]))
    each = tuple(kappa for _, kappa in chosen)
    return replace(learner, kappa=each if len(set(each)) > 1 else each[0])


def public_owners(data: FederatedDataset, seed: int) -> FederatedDataset:
    """Return clients with as many records as those of ``data``, drawn from its public rows with replacement."""
    assert data.public is not None
    rng = np.random.default_rng(derive_key(seed, "public rows"))
    counts, size = data.train.counts.tolist(), len(data.public)
    rows = torch.from_numpy(np.concatenate([rng.integers(0, size, count) for count in counts]))
    drawn = Examples(take(data.public.x, rows), take(data.public.y, rows), data.train.offsets)
    return replace(data, train=drawn, test=drawn, name="public rows")
