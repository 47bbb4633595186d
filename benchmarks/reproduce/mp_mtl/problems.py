"""The problems of the study, its settings, and how a private run of many repetitions is made."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fedmtl import ClientPrivacy, FullParticipation, models
from fedmtl.algorithms.linear.data import LinearData
from fedmtl.algorithms.mp_mtl.algorithm import MPMTL
from fedmtl.data import Examples, FederatedDataset, load_synthetic_tasks, read_school
from fedmtl.privacy import open_channel
from fedmtl.schedules import rounds as round_events
from fedmtl.trainer.client_scores import normalized
from fedmtl.trainer.make_problem import ProblemSettings, build_problem

ROUNDS, DELTA = 10, 1e-5
PUBLIC = 10_000
"""Seed of the synthetic tasks that settings are chosen on: of other tasks than those of the study."""


@dataclass(frozen=True)
class Setup:
    """A problem with public settings.

    Args:
        name: of the part.
        deal: data of a seed.
        clip: K, a public guess of the norm of a model.
        ridge: of every task's own fit, which its gradient steps keep: the best for learning alone.
        target: Y, bound on targets that the baselines need.
    """

    name: str
    deal: Callable[[int], FederatedDataset]
    clip: float
    ridge: float
    target: float


@cache
def synthetic(
    structure: str, seed: int, tasks: int = 320, problem: str = "regression"
) -> FederatedDataset:
    """320 tasks of 30 records in 30 dimensions, noise 1/2 on scores of variance 1; 60 records a task for test."""
    return load_synthetic_tasks(
        tasks,
        train_examples=30,
        test_examples=60,
        features=30,
        structure=structure,  # type: ignore[arg-type]
        rank=4 if structure == "group_sparse" else 3,
        problem=problem,  # type: ignore[arg-type]
        noise=0.5,
        seed=seed,
    )


@cache
def school(root: Path, seed: int, percent: int = 30) -> FederatedDataset:
    """The paper's School: z-scores, unit rows, ``percent`` for training; scores centred by the school."""
    return read_school(
        root, test_fraction=1 - percent / 100, standardize="client", targets="centred", unit_rows=True, min_examples=4,
        seed=seed,
    )  # fmt: skip


def setups(root: Path | None) -> dict[str, Setup]:
    """By name; School where its file is given."""
    found = [
        Setup(
            "low_rank", lambda seed: synthetic("low_rank", seed), clip=4.0, ridge=0.015, target=3.0
        ),
        Setup(
            "group_sparse",
            lambda seed: synthetic("group_sparse", seed),
            clip=4.0,
            ridge=0.01,
            target=3.0,
        ),
    ]
    if root is not None:
        found.append(
            Setup("school", lambda seed: school(root, seed), clip=0.25, ridge=0.055, target=0.5)
        )
    return {one.name: one for one in found}


def rows_of(examples: Examples) -> LinearData:
    """Examples as the tasks' rows; labels 0 and 1 become -1 and +1."""
    counts = examples.counts.tolist()
    y = examples.y.double() if examples.y.is_floating_point() else 2.0 * examples.y - 1
    return LinearData(
        tuple(examples.x.double().split(counts)), tuple(y.double().split(counts)), False
    )


def linear_outputs(models_: Tensor, examples: Examples) -> Tensor:
    """Return the predictions (..., N) of linear models (..., n, d) on the examples of their tasks."""
    x = examples.x.to(models_.dtype).split(examples.counts.tolist())
    return torch.cat([models_[..., task, :] @ rows.T for task, rows in enumerate(x)], -1)


class Errors(NamedTuple):
    """Normalized squared errors of each task (..., n), and of all examples as those of one task (...)."""

    task: Tensor
    pooled: Tensor

    @property
    def mean(self) -> Tensor:
        """The mean over the tasks with targets that vary."""
        return self.task.nanmean(-1)


def errors_of(models_: Tensor, data: FederatedDataset, tasks: int | None = None) -> Errors:
    """Test errors of models (..., n, d); of the first ``tasks`` where given."""
    test = data.test if tasks is None else data.test.take_clients(torch.arange(tasks))
    models_ = models_ if tasks is None else models_[..., :tasks, :]
    squared = (linear_outputs(models_, test).double() - test.y.double()).square()
    mse = torch.stack([part.mean(-1) for part in squared.split(test.counts.tolist(), -1)], -1)
    return Errors(*normalized(mse, test.y.double(), test.offsets))


@dataclass(frozen=True)
class Run:
    """All repetitions of a private run.

    Attributes:
        models: (R, n, d).
        noise: (rounds, R), standard deviation of the noise on a diagonal entry of the released sum.
        signal: (rounds, R), Frobenius norm of the sum before noise: read off without privacy.
        epsilon: (R,), spent.
        seconds: of the iterations, with their noise, without preparation and calibration.
    """

    models: Tensor
    noise: Tensor
    signal: Tensor
    epsilon: Tensor
    seconds: float


def run(
    algorithm: MPMTL,
    data: FederatedDataset,
    epsilons: Sequence[float],
    repetitions: int,
    *,
    clip: float,
    rounds: int = ROUNDS,
    delta: float = DELTA,
    seed: int = 0,
    mechanism: str = "gaussian",
) -> Run:
    """MP-MTL at every epsilon, ``repetitions`` times each, as one program: replicate e R + r is repetition r at
    ``epsilons[e]``."""
    count = len(epsilons) * repetitions
    problem = build_problem(
        data,
        models.linear_regression(bias=False),
        ProblemSettings(loss="mse", rounds=rounds, seed=seed, dtype="float64"),
    )
    options: dict[str, Any] = {"clip_norm": clip, "delta": delta, "mechanism": mechanism}
    privacy = tuple(
        ClientPrivacy(epsilon=e, **options) for e in epsilons for _ in range(repetitions)
    )
    bound = FullParticipation().bind(problem.clients)
    channel = open_channel(
        privacy if count > 1 else privacy[0],
        algorithm.plan(problem, bound),
        bound,
        seed=seed,
        steps=rounds,
        fingerprint="study",
        **({"replicates": count} if count > 1 else {}),
    )
    state = algorithm.init(problem, count)
    noise, signal, seconds = [], [], 0.0
    for event in round_events(channel.draw, start=0, stop=rounds):
        rows = state.private.whole("w").transpose(0, 1)
        rows = rows * (clip / rows.norm(dim=2, keepdim=True).clamp(min=clip))
        signal.append((rows.mT @ rows).norm(dim=(1, 2)))
        began = time.perf_counter()
        channel.begin(event.first, event.cohort)
        state = algorithm.step(problem, state, event, channel)
        seconds += time.perf_counter() - began
        noise.append(
            torch.as_tensor(channel.noise_std("covariance")).double().expand(count)
            * channel.denominator
        )
    spent = torch.tensor(channel.epsilons, dtype=torch.float64).expand(count)
    channel.close()
    found = algorithm.models(problem, state, torch.arange(problem.clients))
    return Run(found, torch.stack(noise), torch.stack(signal), spent, seconds)
