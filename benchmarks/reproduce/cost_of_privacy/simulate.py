"""Runs of a learner without a trainer, with simulated noise: many repetitions as one program."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from fedmtl import RecordPrivacy, models
from fedmtl.algorithms import Problem
from fedmtl.algorithms.async_learner.algorithm import AsyncLearner
from fedmtl.algorithms.async_learner.central import CentralLearner
from fedmtl.algorithms.linear.data import LinearData
from fedmtl.algorithms.one_at_a_time import simulated_states
from fedmtl.data import Examples, FederatedDataset
from fedmtl.random import derive_key
from fedmtl.schedules import Block
from fedmtl.trainer.make_problem import ProblemSettings, build_problem

KAPPAS = (1.0, 2.0, 5.0, 10.0, 20.0, 40.0)


@dataclass(frozen=True)
class Caps:
    """A schedule of which only the caps are read."""

    caps: np.ndarray


def problem_of(data: LinearData, events: int, public: LinearData | None = None) -> Problem:
    """The owners' records as the problem of a run of so many events."""
    own, known = (
        part
        and Examples(
            x[:, : x.shape[1] - part.bias].contiguous(),
            y,
            torch.tensor([0, *np.cumsum(part.counts)]),
        )
        for part in (data, public)
        for x, y in [(None, None) if part is None else part.pooled()]
    )
    names = tuple(map(str, range(len(data.x))))
    dataset = FederatedDataset(own, own, names, public=known, verify=False)
    model = models.linear_regression(bias=data.bias)
    return build_problem(
        dataset, model, ProblemSettings(loss="mse", rounds=events, dtype="float64")
    )


def simulate(
    learner: CentralLearner,
    data: LinearData,
    privacy: RecordPrivacy | None,
    clients: Tensor,
    *,
    caps: np.ndarray | None = None,
    seed: int = 0,
    public: LinearData | None = None,
) -> Tensor:
    """theta_L (R, p) float64 of R repetitions of a run; each ends where an owner is asked beyond its cap.

    Args:
        learner, privacy: settings; ``privacy`` None is a run without clip and noise.
        data: the owners' records.
        clients: int64 (R, S), the owner of each activation; -1 is none.
        caps: int64 (n,), most answers of each owner, to which noise is calibrated; default the most that any
            repetition asks for.
        seed: of the noise, which is addressed by an owner's place in the data.
        public: the public rows, for a learner that starts at their fit.
    """
    problem = problem_of(data, clients.shape[1], public)
    if caps is None:
        answers = [torch.bincount(row[row >= 0], minlength=len(data.x)) for row in clients]
        caps = torch.stack(answers).amax(0).numpy()
    plans = [replace(plan, keys=None) for plan in learner.plan(problem, Caps(caps))]  # type: ignore[arg-type]
    block = Block(0, torch.zeros(clients.shape), clients[:, :, None])
    *_, state = simulated_states(learner, problem, plans, block, privacy, seed=seed)
    return state.public["theta_l"]


def fitness_by_kappa(
    learner: AsyncLearner,
    public: LinearData,
    *,
    counts: Sequence[int],
    privacy: RecordPrivacy | None,
    clients: Tensor,
    kappas: Sequence[float] = KAPPAS,
    seed: int = 0,
    caps: np.ndarray | None = None,
) -> dict[float, float]:
    """The mean fitness f of every kappa, by simulation with owners of ``counts`` records drawn from public ones.

    Args:
        learner: settings; its ``kappa`` is not used.
        public: public records, of any owners.
        counts: n_i.
        privacy, clients, seed, caps: as for :func:`simulate`.
        kappas: candidates.
    """
    data, fitness = drawn(public, counts, seed), {}
    for kappa in kappas:
        tried = replace(learner, step_size="auto", kappa=float(kappa))
        theta = simulate(tried, data, privacy, clients, seed=seed, caps=caps)
        fitness[float(kappa)] = float(learner.fitness(learner.bounded(data), theta).mean())
    return fitness


def drawn(public: LinearData, counts: Sequence[int], seed: int) -> LinearData:
    """Owners of ``counts`` records that are drawn from the public ones with replacement."""
    x, y = public.pooled()
    rng = np.random.default_rng(derive_key(seed, "public rows"))
    each = [torch.from_numpy(rng.integers(0, len(y), count)) for count in counts]
    return LinearData(
        tuple(x[i] for i in each), tuple(y[i] for i in each), public.bias, public.name
    )
