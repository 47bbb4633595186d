"""What the parts of the study share: records of owners, budgets, clocks, and models without noise beside them."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import torch
from collaboration import Collaboration
from simulate import KAPPAS, drawn, fitness_by_kappa, simulate

from fedmtl import RecordPrivacy
from fedmtl.algorithms import Problem
from fedmtl.algorithms.async_learner.algorithm import AsyncLearner
from fedmtl.algorithms.linear.data import LinearData
from fedmtl.data import Examples
from fedmtl.data.readers.lending import read_lending
from fedmtl.privacy import GradientPlan
from fedmtl.schedules import BoundSchedule, PoissonClocks

Row = dict[str, Any]
Load = Callable[[int, int, int], tuple[LinearData, LinearData]]
"""(owners, records of each, deal) -> records of the owners, and the public ones."""
CLIP, CAP, CAP_MANY = 5.0, 10, 6  # Xi; answers of an owner, and where there are more than 10 owners
CANDIDATES = (0.1, 0.3, *KAPPAS)


def owners_rows(examples: Examples, *, bias: bool = False) -> LinearData:
    """Examples as rows of a linear model, an owner each."""
    counts = examples.counts.tolist()
    return LinearData(examples.x.double().split(counts), examples.y.double().split(counts), bias)


@cache
def lending(root: Path, owners: int, size: int, deal: int) -> tuple[LinearData, LinearData]:
    """Records of the owners, and the public ones; the same records an owner, however many owners there are."""
    read = read_lending(root, clients=owners, sizes=size, test_fraction=None, seed=deal)
    return owners_rows(read.train), owners_rows(read.public)


def first_owners(data: LinearData, owners: int) -> LinearData:
    return LinearData(data.x[:owners], data.y[:owners], data.bias)


def budget(epsilon: float, clip: float = CLIP) -> RecordPrivacy:
    """Pure epsilon for each owner over all of its answers; infinite: clipping without noise."""
    return RecordPrivacy(clip_norm=clip, epsilon=epsilon, delta=0, mechanism="laplace")


def clocks(
    owners: int,
    runs: int,
    seed: int,
    cap: int | Sequence[int] | None = None,
    rate: float | Sequence[float] = 1.0,
) -> torch.Tensor:
    """Who answers, (runs, ticks): Poisson clocks until every owner has given all its answers."""
    bound = PoissonClocks(per_client=cap or (CAP if owners <= 10 else CAP_MANY), rate=rate).bind(
        owners
    )
    return bound.activations(seed, 0, bound.steps, replicates=runs).client


def from_public(public: LinearData, owners: int, size: int, seed: int) -> LinearData:
    """Owners whose records are drawn from the public ones with replacement."""
    x, y = public.pooled()
    drawn = torch.randint(len(y), (owners, size), generator=torch.Generator().manual_seed(seed))
    return LinearData(tuple(x[i] for i in drawn), tuple(y[i] for i in drawn), public.bias)


@dataclass(frozen=True, kw_only=True)
class Horizon(AsyncLearner):
    """The learner with the noise of Theorem 1: every owner's is made for all T answers of the run."""

    def plan(self, problem: Problem, schedule: BoundSchedule) -> tuple[GradientPlan]:
        """Plan noise for T answers of every owner."""
        (plan,) = super().plan(problem, schedule)
        return (replace(plan, caps=np.full(problem.clients, self.horizon or problem.rounds)),)


@dataclass(frozen=True)
class KappaChoice:
    """Mean psi of every kappa that was tried, and the one with the least."""

    kappa: float
    psi: dict[float, float]


def kappa_for(
    learner: AsyncLearner,
    public: LinearData,
    counts: list[int],
    epsilon: float,
    clients: torch.Tensor,
    **other: Any,
) -> KappaChoice:
    """kappa by simulation on public rows; ``clip`` and ``caps`` may be given."""
    privacy, seed = budget(epsilon, other.pop("clip", CLIP)), 7
    fitness = fitness_by_kappa(
        learner,
        public,
        counts=counts,
        privacy=privacy,
        clients=clients,
        kappas=CANDIDATES,
        seed=seed,
        **other,
    )
    least = Collaboration(learner, drawn(public, counts, seed)).optimum.value
    psi = {kappa: value / least - 1 for kappa, value in fitness.items()}
    return KappaChoice(min(psi, key=lambda kappa: psi[kappa]), psi)


def references(data: LinearData, public: LinearData, learner: AsyncLearner) -> Row:
    """psi of models without noise: of the owners alone, of the public rows alone, and of theta = 0."""
    together, model = Collaboration(learner, data), Collaboration(learner, public).optimum.theta
    models = [*(together.alone(i).theta for i in range(len(data.x))), model, np.zeros_like(model)]
    *alone, known, zero = together.psi(torch.from_numpy(np.stack(models))).tolist()
    return {"alone": alone, "public": known, "zero": zero}


def quartiles(values: torch.Tensor) -> Row:
    """Mean and quartiles of repetitions (R,)."""
    low, middle, high = values.quantile(torch.tensor([0.25, 0.5, 0.75]).double()).tolist()
    return {"psi": float(values.mean()), "q25": low, "median": middle, "q75": high}


def value_rows(
    load: Load,
    learner: AsyncLearner,
    numbers: dict[int, Sequence[int]],
    epsilons: Sequence[float],
    *,
    deals: int,
    runs: int,
    clip: float = CLIP,
) -> list[Row]:
    """psi of the learner by number of owners and epsilon, against models without noise.

    Args:
        load: records.
        learner: its kappa is chosen from the public rows, for each cell.
        numbers: numbers of owners, by the records of each.
        epsilons: finite ones; clipping without noise comes after them.
        deals, runs: deals of the records, and runs of each.
        clip: Xi.
    """
    rows: list[Row] = []
    for size, counts in numbers.items():
        loaded = [load(max(counts), size, deal) for deal in range(deals)]
        public = loaded[0][1]
        for owners in counts:
            own = [first_owners(data, owners) for data, _ in loaded]
            known = [references(data, public, learner) for data in own]
            alone = [psi for one in known for psi in one["alone"]]
            trial = clocks(owners, runs, 2)
            for epsilon in (*epsilons, math.inf):
                found = kappa_for(learner, public, [size] * owners, epsilon, trial, clip=clip)
                values, better = [], []
                for place, data in enumerate(own):
                    seed = 100 * len(rows) + place
                    clients = clocks(owners, runs, seed)
                    tried = replace(learner, kappa=found.kappa)
                    theta = simulate(tried, data, budget(epsilon, clip), clients, seed=seed)
                    psi = Collaboration(learner, data).psi(theta)
                    values.append(float(psi.mean()))
                    better += [float(psi.mean()) < other for other in known[place]["alone"]]
                rows.append(
                    {
                        "records": size,
                        "owners": owners,
                        "epsilon": epsilon,
                        "kappa": found.kappa,
                        "foreseen": found.psi[found.kappa],
                        "runs": deals * runs,
                        "psi": sum(values) / deals,
                        "deals": values,
                        "alone": sum(alone) / len(alone),
                        "public": sum(one["public"] for one in known) / deals,
                        "zero": sum(one["zero"] for one in known) / deals,
                        "worth": sum(better) / len(better),
                    }
                )
    return rows
