"""The synthetic problem of section 5.1: figures 1 and 2, and the allocation of budgets."""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass, field, replace
from functools import cache
from typing import Any

import numpy as np
from intervals import interval
from peers import Array, Row, accuracy, budgets, objective_of, seeded, simulate
from scipy.optimize import brentq

from benchmarks.baselines.p2p import PeerProblem, local_models, optimum
from benchmarks.baselines.p2p_admm import GossipADMM, GossipState, random_neighbours
from benchmarks.baselines.p2p_local_dp import perturb_records
from fedmtl import PeerToPeer, RecordPrivacy
from fedmtl.algorithms.linear.data import LinearLoss
from fedmtl.contrib.published.p2p import PublishedPeerToPeer, composed
from fedmtl.data import FederatedDataset, TargetAngles, load_synthetic_agents
from fedmtl.privacy import epsilon as epsilon_of
from fedmtl.privacy.noise.laws import LaplaceNoise

SEEDS, VALIDATION = tuple(range(5)), (100, 101)
DIMENSIONS = (20, 50, 100)
MUS = (0.3, 1.0, 3.0, 10.0)
SMOOTHNESS = 1.5  # above the curvature of every agent's loss under the public law of rows; only stability rests on it
DELTA, PAPER_DELTA = 1e-5, math.exp(-5)
EPSILONS, PAPER_EPSILONS = (1.0, 10.0, 100.0), (0.1, 0.5, 1.0)
PRIVATE_MUS, WAKEUPS, CLIPS = (0.1, 0.3, 1.0, 3.0), (1, 3, 10, 30), (1.0, 3.0)
CD_EVENTS, ADMM_STEPS = 4000, 16_000
RHOS = (0.03, 0.1, 0.3, 1.0)


@cache
def agents(p: int, seed: int) -> FederatedDataset:
    return load_synthetic_agents(features=p, seed=seed)


def peers(
    p: int, seed: int, mu: float, *, kind: type[PeerToPeer] = PeerToPeer, **settings: Any
) -> PeerToPeer:
    given = agents(p, seed)
    graph, bound = TargetAngles(seed).build(given), given.domain.l2
    return kind(
        graph=graph, mu=mu, loss="logistic", feature_norm=bound, smoothness=SMOOTHNESS, **settings
    )


def exact(p: int, seed: int, mu: float) -> tuple[PeerProblem, Array, float]:
    """The objective, its minimizer and its minimum."""
    objective = objective_of(peers(p, seed, mu), agents(p, seed))
    best = optimum(objective, tolerance=1e-9)
    return objective, best.theta, best.value


def tuning() -> list[Row]:
    """Accuracy without privacy by mu on validation problems, at the exact optimum."""
    rows: list[Row] = []
    for p, mu in itertools.product(DIMENSIONS, MUS):
        reached = [accuracy(exact(p, seed, mu)[1], agents(p, seed)) for seed in VALIDATION]
        rows.append({"p": p, "mu": mu, "accuracy": float(np.mean(reached))})
    return rows


def best_mu(rows: list[Row], p: int) -> float:
    return float(max((r for r in rows if r["p"] == p), key=lambda r: r["accuracy"])["mu"])


def gossip(
    objective: PeerProblem, rho: float, start: Array, steps: int, seed: int
) -> list[tuple[int, int, Array]]:
    """(step, vectors, models) along a run of gossip ADMM, at 0 and 40 times after."""
    state, generator = GossipState(objective, GossipADMM(rho=rho), start), seeded(seed)
    chosen = generator.integers(0, len(start), steps)
    neighbours = random_neighbours(objective, chosen, generator.random(steps))
    found, every = [(0, state.vectors, start.copy())], steps // 40
    for step, (i, j) in enumerate(zip(chosen.tolist(), neighbours.tolist(), strict=True), 1):
        state.step(i, j)
        if step % every == 0:
            found.append((step, state.vectors, state.theta.copy()))
    return found


@dataclass
class Trajectory:
    """Rows along a run."""

    objective: PeerProblem
    least: float
    data: FederatedDataset
    rows: list[Row] = field(default_factory=list)

    def note(self, step: int, theta: Array, sent: Array) -> None:
        """Of the first repetition."""
        value = self.objective.value(theta[0])
        reached = accuracy(theta[0], self.data)
        self.rows.append(
            {
                "step": step,
                "vectors": int(sent[0]),
                "gap": value / self.least - 1,
                "accuracy": reached,
            }
        )


def curves(tuned: list[Row]) -> list[Row]:
    """Figure 1: coordinate descent and gossip ADMM from the local models, p = 100."""
    p, mu = 100, best_mu(tuned, 100)
    objective, _, _ = exact(p, VALIDATION[0], mu)
    start = local_models(objective)
    reached = {rho: objective.value(gossip(objective, rho, start, 4000, 0)[-1][2]) for rho in RHOS}
    rho = min(reached, key=lambda r: reached[r])
    rows: list[Row] = []
    for seed in SEEDS:
        objective, best, least = exact(p, seed, mu)
        data, start = agents(p, seed), local_models(objective)
        common = {
            "mu": mu,
            "seed": seed,
            "best": accuracy(best, data),
            "local": accuracy(start, data),
            "rho": rho,
        }
        descent, admm = Trajectory(objective, least, data), Trajectory(objective, least, data)
        at = range(0, CD_EVENTS + 1, CD_EVENTS // 40)
        algorithm = peers(p, seed, mu, kind=PublishedPeerToPeer, local_start=True)
        simulate(algorithm, data, None, CD_EVENTS, seed, events=CD_EVENTS, at=at, seen=descent.note)
        first = objective.network.graph.weights.nnz  # the local models, sent to all neighbours
        rows += [
            {"method": "cd", **common, **r, "vectors": r["vectors"] + first} for r in descent.rows
        ]
        for step, vectors, theta in gossip(objective, rho, start, ADMM_STEPS, seed):
            admm.note(step, theta[None], np.array([vectors]))
        rows += [{"method": "admm", **common, **r} for r in admm.rows]
    return rows


def equal_step(epsilon: float, wakeups: int) -> float:
    """The equal epsilon of one wake-up for which Theorem 1 states ``epsilon`` for all of them."""
    return float(
        brentq(
            lambda step: composed([step] * wakeups, PAPER_DELTA) - epsilon, 0.0, epsilon, xtol=1e-15
        )
    )


def published(p: int, epsilon: float, wakeups: int) -> RecordPrivacy:
    """The paper's noise: Laplace of scale 2 L0 / (e m) with L0 = 1 and e by its Theorem 1. Nothing is clipped: the
    bound is the largest norm of a row, and gradients are up to sqrt(p) long in the L2 norm, p in the L1 norm."""
    bound = math.sqrt(p)
    multiplier = 1 / (bound * equal_step(epsilon, wakeups))
    return RecordPrivacy(
        clip_norm=bound, noise_multiplier=multiplier, delta=PAPER_DELTA, mechanism="laplace"
    )


def honest(p: int, epsilon: float, wakeups: int) -> float:
    """Epsilon of :func:`published` by a privacy loss distribution, with the L1 norm p that rows may have."""
    step = equal_step(epsilon, wakeups)
    return epsilon_of(LaplaceNoise(1 / (p * step)).event(), wakeups, PAPER_DELTA)


def tuned_private(p: int, paper: bool) -> dict[float, tuple[float, int, float]]:
    """mu, wake-ups and clip of every epsilon with the best accuracy on a validation problem."""
    best: dict[float, list[tuple[float, tuple[float, int, float]]]] = {}
    epsilons = PAPER_EPSILONS if paper else EPSILONS
    for mu, wakeups, clip in itertools.product(PRIVATE_MUS, WAKEUPS, (1.0,) if paper else CLIPS):
        values = private(p, VALIDATION[0], mu, wakeups, clip, epsilons, paper)
        for epsilon, reached in zip(epsilons, values, strict=True):
            best.setdefault(epsilon, []).append((reached, (mu, wakeups, clip)))
    return {epsilon: max(tried)[1] for epsilon, tried in best.items()}


def private(
    p: int,
    seed: int,
    mu: float,
    wakeups: int,
    clip: float,
    epsilons: tuple[float, ...],
    paper: bool,
) -> list[float]:
    """Accuracies of runs from 0, one for each epsilon."""
    data = agents(p, seed)
    if paper:
        settings = [published(p, epsilon, wakeups) for epsilon in epsilons]
        theta, _ = simulate(
            peers(p, seed, mu, kind=PublishedPeerToPeer), data, settings, wakeups, seed
        )
    else:
        theta, _ = simulate(peers(p, seed, mu), data, budgets(epsilons, clip, DELTA), wakeups, seed)
    return [accuracy(one, data) for one in theta]


def dimensions(tuned: list[Row]) -> list[Row]:
    """Figure 2 (c): final accuracy by dimension: baselines, valid sensitivities, and the paper's noise."""
    rows: list[Row] = []
    for p in DIMENSIONS:
        mu = best_mu(tuned, p)
        found: dict[tuple[str, float], list[float]] = {}

        def add(name: str, epsilon: float, value: float) -> None:
            found.setdefault((name, epsilon), []).append(value)  # noqa: B023

        chosen = {paper: tuned_private(p, paper) for paper in (False, True)}
        for seed in SEEDS:
            data = agents(p, seed)
            objective, best, _ = exact(p, seed, mu)
            add("optimum", math.inf, accuracy(best, data))
            add("local", 0.0, accuracy(local_models(objective), data))
            for epsilon in EPSILONS:
                settings = RecordPrivacy(
                    clip_norm=agents(p, seed).domain.l2, epsilon=epsilon, delta=DELTA
                )
                noised = perturb_records(
                    objective.data, LinearLoss("logistic"), settings, seed=seed
                )
                theta = optimum(replace(objective, data=noised.data), tolerance=1e-6).theta
                add("local dp", epsilon, accuracy(theta, data))
            for paper, picked in chosen.items():
                for epsilon, (tried, wakeups, clip) in picked.items():
                    value = private(p, seed, tried, wakeups, clip, (epsilon,), paper)[0]
                    add("paper" if paper else "sound", epsilon, value)
        for (name, epsilon), values in found.items():
            row: Row = {"p": p, "method": name, "epsilon": epsilon, "values": values, "mu": mu}
            if name in ("sound", "paper"):
                row["mu"], row["wakeups"], row["clip"] = chosen[name == "paper"][epsilon]
                row["honest"] = honest(p, epsilon, row["wakeups"]) if name == "paper" else epsilon
            rows.append(row)
    return rows


def noise() -> list[Row]:
    """Figure 2 (a), (b): along the run for several numbers of wake-ups."""
    rows: list[Row] = []
    for (p, paper, epsilon), wakeups, seed in itertools.product(
        ((20, False, 10.0), (100, True, 1.0)), (3, 10, 30), SEEDS
    ):
        data, mu = agents(p, seed), 1.0
        objective, _, least = exact(p, seed, mu)
        if paper:
            algorithm, law = (
                peers(p, seed, mu, kind=PublishedPeerToPeer),
                [published(p, epsilon, wakeups)],
            )
        else:
            algorithm, law = peers(p, seed, mu), budgets((epsilon,), 1.0, DELTA)
        common = {"p": p, "paper": paper, "epsilon": epsilon, "wakeups": wakeups, "seed": seed}
        found = Trajectory(objective, least, data)
        last = 100 * wakeups
        simulate(
            algorithm, data, law, wakeups, seed, at=range(0, last + 1, last // 10), seen=found.note
        )
        rows += [common | row for row in found.rows]
    return rows


def allocation() -> list[Row]:
    """The same budgets spread over the wake-ups in several ways; repetitions are one program."""
    rows: list[Row] = []
    p, mu, clip, repetitions = 20, 1.0, 3.0, 3
    for epsilon, wakeups in itertools.product((10.0,), (10, 30)):
        for policy in ("uniform", "optimal", "paper", 0.5, 2.0, 4.0, 16.0):
            gaps, reached = [], []
            for seed in SEEDS:
                data = agents(p, seed)
                objective, _, least = exact(p, seed, mu)
                algorithm = peers(p, seed, mu, allocation=policy)
                theta, _ = simulate(
                    algorithm, data, budgets((epsilon,) * repetitions, clip, DELTA), wakeups, seed
                )
                gaps.append(float(np.mean([objective.value(one) / least - 1 for one in theta])))
                reached.append(float(np.mean([accuracy(one, data) for one in theta])))
            gap, gap_half = interval(gaps)
            mean, half = interval(reached)
            rows.append({"p": p, "epsilon": epsilon, "wakeups": wakeups, "policy": str(policy), "gap": gap,
                         "gap_half": gap_half, "accuracy": mean, "half": half, "mu": mu, "clip": clip})  # fmt: skip
    return rows
