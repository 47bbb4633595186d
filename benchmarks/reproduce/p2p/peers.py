"""Runs of peer-to-peer learning for the study: several budgets as one batched program, and what they reach."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from benchmarks.baselines.p2p import PeerProblem
from fedmtl import PeerToPeer, RecordPrivacy, models
from fedmtl.algorithms.base import Problem
from fedmtl.algorithms.linear.data import LinearData, LinearLoss, LossName
from fedmtl.algorithms.linear.solve import minimize
from fedmtl.data import FederatedDataset
from fedmtl.privacy import open_channel
from fedmtl.schedules import PoissonClocks
from fedmtl.trainer.make_problem import ProblemSettings, build_problem
from fedmtl.trainer.run_channel import bind_schedule, releases_of

Array = NDArray[np.float64]
Row = dict[str, Any]
EVERY = 10**9


def problem_of(data: FederatedDataset, seed: int = 0) -> Problem:
    """Linear models without bias on the data."""
    linear = models.linear_regression(bias=False)
    return build_problem(data, linear, ProblemSettings(rounds=EVERY, seed=seed, dtype="float64"))


def objective_of(algorithm: PeerToPeer, data: FederatedDataset) -> PeerProblem:
    """Objective (2) of the algorithm on the data, for exact solutions."""
    return PeerProblem.of(algorithm, problem_of(data))


def budgets(
    epsilons: Sequence[float], clip: float, delta: float, mechanism: str = "gaussian"
) -> list[RecordPrivacy]:
    """One a repetition; infinite: clipping alone."""
    return [
        RecordPrivacy(clip_norm=clip, epsilon=e, delta=delta, mechanism=mechanism) for e in epsilons
    ]  # type: ignore[arg-type]


def simulate(
    algorithm: PeerToPeer,
    data: FederatedDataset,
    privacies: Sequence[RecordPrivacy] | None,
    wakeups: int,
    seed: int,
    *,
    at: Sequence[int] = (),
    events: int | None = None,
    seen: Callable[[int, Array, Array], None] | None = None,
) -> tuple[Array, float]:
    """One run for each of ``privacies``, each with its own clocks and noise.

    Args:
        algorithm: its settings.
        data: of the agents.
        privacies: one a repetition; None: one run without clipping or noise.
        wakeups: of every agent.
        seed: of clocks and noise.
        at: numbers of events after which ``seen`` is called with the number, the models (R, n, p) and the vectors sent.
        events: end after so many events of all agents.
        seen: see ``at``.

    Returns:
        The final models (R, n, p) and the largest epsilon that the report states (of repetition 0 where budgets
        differ, infinite under a refuted accounting).
    """
    given = [None] if privacies is None else list(privacies)
    problem = problem_of(data, seed)
    schedule = algorithm.scheduled(
        bind_schedule(PoissonClocks(per_client=wakeups, activations=events), data)
    )
    privacy: Any = given[0] if len(given) == 1 else tuple(given)
    plans = releases_of(algorithm, problem, schedule)
    channel = open_channel(privacy, plans, schedule.describe(), seed=seed, replicates=len(given))
    state = algorithm.init(problem, len(given))
    ends = sorted({*(a for a in at if 0 < a < schedule.steps), schedule.steps})
    if seen is not None and 0 in at:
        seen(0, state.public["theta"].numpy(), state.public["sent"].numpy())
    start = 0
    for end in ends:
        block = schedule.activations(seed, start, end, replicates=len(given))
        channel.begin(start, block.clients)
        state = algorithm.step(problem, state, block, channel)
        if seen is not None and end in at:
            seen(end, state.public["theta"].numpy(), state.public["sent"].numpy())
        start = end
    stated = math.inf if given[0] is None else float(channel.epsilon)
    return state.public["theta"].numpy().copy(), stated


def owners(
    data: FederatedDataset, side: str = "test"
) -> tuple[Array, Array, NDArray[np.int64], NDArray[np.int64]]:
    """Rows (N, p), targets (N,), agents (N,) and examples of every agent (n,) of a side."""
    part = data.side(side)  # type: ignore[arg-type]
    counts = part.counts.numpy()
    return (
        part.x.double().numpy(),
        part.y.double().numpy(),
        np.repeat(np.arange(len(data)), counts),
        counts,
    )


def accuracy(theta: Array, data: FederatedDataset) -> float:
    """Mean over agents of the share of right test labels: theta (n, p)."""
    x, y, agent, counts = owners(data)
    right = ((x * theta[agent]).sum(1) > 0) == (y > 0.5)
    return float((np.bincount(agent, right) / counts).mean())


def rmse(theta: Array, data: FederatedDataset) -> float:
    """Mean over users of the root mean squared error on their test ratings: theta (n, p)."""
    x, y, agent, counts = owners(data)
    squares = ((x * theta[agent]).sum(1) - y) ** 2
    return float(np.sqrt(np.bincount(agent, squares) / counts).mean())


def refined(theta: Array, data: FederatedDataset, pull: float, loss: LossName = "squared") -> Array:
    """Every agent's own last step, which never leaves it: argmin sum_j l(v . x_j, y_j) + pull ||v - theta_i||^2."""
    rows, found = LinearData.of_data(data), theta.copy()
    for i, (x, y) in enumerate(zip(rows.x, rows.y, strict=True)):
        if len(x):
            found[i] += minimize(
                LinearLoss(loss), x.numpy(), y.numpy(), 2 * pull / len(x), base=theta[i]
            ).theta
    return found


def seeded(seed: int) -> np.random.Generator:
    """Draws of the study that are no privacy."""
    return np.random.default_rng(seed)
