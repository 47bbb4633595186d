"""Runs on the public rows of the data, without a trainer, and the step size that they choose."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from ..._check import positive_int
from ...errors import ConfigError
from ...privacy import RecordPrivacy, open_channel
from ...random import derive_key
from ...schedules import BoundSchedule
from ..linear.data import LinearData

if TYPE_CHECKING:
    from ..base import Problem
    from .algorithm import AsyncLearner
    from .central import CentralLearner

logger = logging.getLogger("fedmtl")
KAPPAS = (1.0, 2.0, 5.0, 10.0, 20.0, 40.0)
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
    chosen: list[tuple[RecordPrivacy | None, float]] = []
    for settings in each:
        kappas = [kappa for other, kappa in chosen if other == settings]  # budgets by name have no hash
        if not kappas:
            fitness = fitness_by_kappa(
                learner,
                rows,
                counts=data.train.counts.tolist(),
                privacy=None if settings is None else replace(settings, source="seeded"),  # the rows are public
                clients=clients,
                ids=tuple(data.ids),
                caps=schedule.caps.clip(max=events),
                seed=seed,
            )
            kappas = [min(fitness, key=lambda kappa: fitness[kappa])]
            of = "" if settings is None or settings.epsilon is None else f" for epsilon {settings.epsilon}"
            logger.info("kappa = %g%s, by simulation on %d public rows", kappas[0], of, len(data.public))
        chosen.append((settings, kappas[0]))
    each_kappa = tuple(kappa for _, kappa in chosen)
    return replace(learner, kappa=each_kappa if len(set(each_kappa)) > 1 else each_kappa[0])


def fitness_by_kappa(
    learner: AsyncLearner,
    public: LinearData,
    *,
    counts: Sequence[int],
    privacy: RecordPrivacy | None,
    clients: Tensor,
    kappas: Sequence[float] = KAPPAS,
    seed: int = 0,
    **others: Any,
) -> dict[float, float]:
    """Return the mean fitness f, equation (2), of every kappa of ``step_size="auto"``, by noisy simulation.

    Args:
        learner: settings; its ``step_size`` and ``kappa`` are not used.
        public: public records, of any owners; what is learned from them is outside of every epsilon.
        counts: n_i, public.
        kappas: candidates.
        privacy, clients, seed, others: as for :func:`simulate`.

    Raises:
        ConfigError: sizes that are not positive.
    """
    data = drawn(public, counts, seed)
    fitness = {}
    for kappa in kappas:
        tried = replace(learner, step_size="auto", kappa=float(kappa))
        theta = simulate(tried, data, privacy, clients, seed=seed, shorten=True, **others)
        fitness[float(kappa)] = float(learner.fitness(learner.bounded(data), theta).mean())
    return fitness


def drawn(public: LinearData, counts: Sequence[int], seed: int) -> LinearData:
    """Return owners of ``counts`` records that are drawn from the public ones with replacement."""
    for count in counts:
        positive_int("drawn", counts=count)
    x, y = public.pooled()
    rng = np.random.default_rng(derive_key(seed, "public rows"))
    each = [torch.from_numpy(rng.integers(0, len(y), count)) for count in counts]
    return LinearData(tuple(x[i] for i in each), tuple(y[i] for i in each), public.bias, public.name)


def simulate(
    learner: CentralLearner,
    data: LinearData,
    privacy: RecordPrivacy | None,
    clients: Tensor,
    *,
    ids: tuple[str, ...] = (),
    caps: np.ndarray | None = None,
    seed: int = 0,
    public: LinearData | None = None,
    shorten: bool = False,
) -> Tensor:
    """Return theta_L (R, p) float64 of R repetitions of a run, with simulated noise and without a trainer.

    Args:
        learner, privacy: settings; ``privacy`` None is a run without clip and noise.
        data: the owners' records.
        clients: int64 (R, S), the owner of each activation; -1 is none.
        ids: the owners' names, for budgets by name; default "0", "1", ...
        caps: int64 (n,), most answers of each owner, to which noise is calibrated; default the most that any
            repetition asks for.
        seed: of the noise.
        public: the public rows, for a learner that starts at their fit.
        shorten: every repetition ends where an owner is asked beyond its cap, as a run does.

    Raises:
        BudgetExhausted: an owner is asked beyond its cap, without ``shorten``.
    """
    names = ids or tuple(map(str, range(len(data.x))))
    data = learner.bounded(data)
    replicates, events = clients.shape
    if caps is None:
        answers = [torch.bincount(row[row >= 0], minlength=len(names)) for row in clients]
        caps = torch.stack(answers).amax(0).numpy()
    plan = learner.released(data, names, learner.hard_caps(caps, events))
    channel = open_channel(privacy, (plan,), "activations as given", seed=seed, replicates=replicates)
    if shorten:
        fitting = torch.from_numpy(channel.account.fitting(clients.numpy()[:, :, None]))
        clients = torch.where(torch.arange(events) < fitting[:, None], clients, -1)
    theta = learner.simulated(data, public, clients, channel)
    channel.close()
    return theta
