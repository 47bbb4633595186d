"""The recommendation task of section 5.2: Table 1 on MovieLens-100K, in the paper's setting and in a sound one."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
from peers import Array, Row, budgets, objective_of, owners, refined, rmse, seeded, simulate

from benchmarks.baselines.p2p import PeerProblem, local_models, optimum
from fedmtl import PeerToPeer
from fedmtl.data import FederatedDataset, RatingsGraph, read_movielens
from fedmtl.data.readers.movielens import RATINGS, user_ratings
from fedmtl.graphs import Complete, Graph

SEEDS, VALIDATION = tuple(range(5)), 100
MU, FEATURES = 0.04, 20
SMOOTHNESS = (
    40.0  # 2 p, of a film with features of the mean norm sqrt(p); only stability rests on it
)
PAPER_DELTA, DELTA = math.exp(-5), 1e-5
PAPER = {0.0: 1.2834, math.inf: 0.9502, 1.0: 0.9527, 0.5: 0.9545, 0.1: 0.9855}
CLIPS, WAKEUPS = {1.0: 5.0, 0.5: 5.0, 0.1: 3.0}, 100  # chosen on the validation split
SOUND_CLIP, SOUND_WAKEUPS, CONSTANT = 3.0, 50, 5.0
LAPLACE_CLIP, LAPLACE_WAKEUPS = 15.0, 50  # in the L1 norm
PULLS, RIDGES = (30.0, 100.0, 200.0, 300.0, 500.0, 1000.0), (0.1, 0.3, 1.0, 2.0, 3.0, 5.0, 10.0)
EPSILONS = (1.0, 0.5, 0.1)


def peers(data: FederatedDataset, graph: Graph, smoothness: float = SMOOTHNESS) -> PeerToPeer:
    return PeerToPeer(
        graph=graph, mu=MU, loss="squared", feature_norm=data.domain.l2, smoothness=smoothness
    )


class Table:
    """Test errors by method and epsilon, over splits."""

    def __init__(self) -> None:
        self.values: dict[tuple[str, float], list[float]] = {}
        self.about: dict[tuple[str, float], Row] = {}

    def add(self, method: str, epsilon: float, value: float, **about: object) -> None:
        self.values.setdefault((method, epsilon), []).append(value)
        self.about[method, epsilon] = dict(about)

    def rows(self) -> list[Row]:
        found = []
        for (method, epsilon), values in self.values.items():
            found.append(
                {
                    "method": method,
                    "epsilon": epsilon,
                    "values": values,
                    **self.about[method, epsilon],
                }
            )
        return found


def local_with(objective: PeerProblem, ridge: float | None) -> Array:
    """Local models with one lambda for all instead of 1 / m_i."""
    return local_models(replace(objective, network=replace(objective.network, lam=ridge)))


def runs(
    table: Table, name: str, algorithm: PeerToPeer, data: FederatedDataset, clip: float, delta: float, wakeups: int,
    epsilons: Sequence[float], seed: int, *, mechanism: str = "gaussian", pull: float | None = None,
) -> None:  # fmt: skip
    """Private runs at several epsilons as one program, with or without the users' own last step."""
    settings = budgets(epsilons, clip, delta, mechanism)
    theta, _ = simulate(algorithm, data, settings, wakeups, seed)
    for epsilon, one in zip(epsilons, theta, strict=True):
        about = {"delta": delta, "clip": clip, "wakeups": wakeups, "mechanism": mechanism}
        table.add(name, epsilon, rmse(one, data), **about)
        if pull is not None:
            table.add(f"{name}, refined", epsilon, rmse(refined(one, data, pull), data), **about)


def paper_setting(root: Path) -> list[Row]:
    """Table 1: each user's mean removed, features and graph of the training ratings, delta = exp(-5)."""
    table = Table()
    check = read_movielens(root, features=FEATURES, seed=VALIDATION)
    objective = objective_of(peers(check, RatingsGraph(root, seed=VALIDATION).build(check)), check)
    ridge = min(RIDGES, key=lambda r: rmse(local_with(objective, r), check))
    zero = np.zeros((len(check), FEATURES))
    pull = min(PULLS, key=lambda k: rmse(refined(optimum(objective).theta, check, k), check))
    for seed in SEEDS:
        data = read_movielens(root, features=FEATURES, seed=seed)
        algorithm = peers(data, RatingsGraph(root, seed=seed).build(data))
        objective = objective_of(algorithm, data)
        exact = optimum(objective).theta
        table.add("mean", 0.0, rmse(zero, data))
        table.add("local", 0.0, rmse(local_models(objective), data))
        table.add("local, tuned", 0.0, rmse(local_with(objective, ridge), data), ridge=ridge)
        for scale in (0.3, 0.1):
            table.add(f"local, features x {scale}", 0.0, rmse(scaled_local(objective, scale), data))
        table.add("optimum", math.inf, rmse(exact, data))
        table.add("optimum, refined", math.inf, rmse(refined(exact, data, pull), data), pull=pull)
        theta, _ = simulate(algorithm, data, None, WAKEUPS, seed)
        table.add("descent", math.inf, rmse(theta[0], data), wakeups=WAKEUPS)
        for clip in sorted(set(CLIPS.values())):
            at = [epsilon for epsilon in EPSILONS if CLIPS[epsilon] == clip]
            runs(
                table, "gaussian", algorithm, data, clip, PAPER_DELTA, WAKEUPS, at, seed, pull=pull
            )
            runs(
                table,
                "gaussian, small delta",
                algorithm,
                data,
                clip,
                DELTA,
                WAKEUPS,
                at,
                seed,
                pull=pull,
            )
        runs(table, "laplace", algorithm, data, LAPLACE_CLIP, PAPER_DELTA, LAPLACE_WAKEUPS, EPSILONS, seed,
             mechanism="laplace")  # fmt: skip
    return table.rows()


def scaled_local(objective: PeerProblem, scale: float) -> Array:
    """Predictors of local models with lambda_i = 1 / m_i on features times ``scale``, for the features as they are:
    theta with lambda_i / scale^2."""
    theta = np.zeros(objective.shape)
    for i, (x, y) in enumerate(objective.records):
        theta[i] = np.linalg.solve(x.T @ x + np.eye(x.shape[1]) / scale**2, x.T @ y)
    return theta


def sound_setting(root: Path) -> list[Row]:
    """A public centre with a constant feature, delta = 1e-5, valid norms; then nothing of the ratings at all: features
    of 200 public users, and everybody a neighbour of everybody."""
    table = Table()
    settings = {"features": FEATURES, "centre": 3.5, "constant": CONSTANT}
    check = read_movielens(root, seed=VALIDATION, **settings)  # type: ignore[arg-type]
    graph = RatingsGraph(root, seed=VALIDATION).build(check)
    objective = objective_of(peers(check, graph), check)
    ridge = min(RIDGES, key=lambda r: rmse(local_with(objective, r), check))
    smoothness = SMOOTHNESS + 2 * CONSTANT**2
    theta, _ = simulate(peers(check, graph, smoothness), check,
                        budgets((1.0,), SOUND_CLIP, DELTA), SOUND_WAKEUPS, VALIDATION)  # fmt: skip
    pull = min(PULLS, key=lambda k: rmse(refined(theta[0], check, k), check))
    for seed in SEEDS:
        for name, public in (("public centre", 0), ("all public", 200)):
            data = read_movielens(root, seed=seed, public_users=public, **settings)  # type: ignore[arg-type]
            graph = Complete().build(data) if public else RatingsGraph(root, seed=seed).build(data)
            algorithm = peers(data, graph, smoothness)
            objective = objective_of(algorithm, data)
            table.add(f"{name}: centre", 0.0, rmse(np.zeros(objective.shape), data))
            table.add(f"{name}: local", 0.0, rmse(local_models(objective), data))
            table.add(
                f"{name}: local, tuned", 0.0, rmse(local_with(objective, ridge), data), ridge=ridge
            )
            table.add(
                f"{name}: local, pulled to 0",
                0.0,
                rmse(refined(np.zeros(objective.shape), data, pull), data),
            )
            exact = optimum(objective).theta
            table.add(f"{name}: optimum", math.inf, rmse(exact, data))
            table.add(
                f"{name}: optimum, refined",
                math.inf,
                rmse(refined(exact, data, pull), data),
                pull=pull,
            )
            if not public or seed < 2:  # everybody's neighbours are many
                runs(table, f"{name}: gaussian", algorithm, data, SOUND_CLIP, DELTA, SOUND_WAKEUPS, EPSILONS, seed,
                     pull=pull)  # fmt: skip
    return table.rows()


def centring(root: Path) -> list[Row]:
    """How far one replaced rating moves a user's mean clipped gradient, in units of 2 C / m_i.

    A training rating is replaced by another one, of another film. With the user's mean removed, all residuals of the
    user move; with a public centre none but its own.
    """
    rows: list[Row] = []
    data, (items, ratings, _) = read_movielens(root, features=FEATURES), user_ratings(root)
    exact = optimum(objective_of(peers(data, RatingsGraph(root).build(data)), data)).theta
    x, _, _, counts = owners(data, "train")
    rating, start = ratings.train.y.numpy(), data.train.offsets.numpy()
    phi = np.zeros((len(items), FEATURES))
    for side in ("train", "test"):
        phi[ratings.side(side).x] = data.side(side).x
    for clip in (1.0, 3.0, 5.0, 10.0):
        for centre in ("user", "public"):
            generator, ratios, bound = seeded(0), [], 0.0
            for i in range(len(data)):
                own, m = slice(start[i], start[i + 1]), int(counts[i])
                for theta in (np.zeros(FEATURES), exact[i]):
                    for _ in range(10):
                        j, other = int(generator.integers(m)), int(generator.integers(len(phi)))
                        rows_, values = x[own].copy(), rating[own].copy()
                        before = clipped(theta, rows_, values, centre, clip)
                        rows_[j], values[j] = phi[other], RATINGS[1] if values[j] < 3 else 1.0
                        moved = np.linalg.norm(clipped(theta, rows_, values, centre, clip) - before)
                        ratios.append(float(moved * m / (2 * clip)))
            largest = float(np.linalg.norm(phi, axis=1).max())
            bound = (
                (2 * clip + 2 * (RATINGS[1] - 1) * largest) / (2 * clip)
                if centre == "user"
                else 1.0
            )
            rows.append({"clip": clip, "centre": centre, "largest": max(ratios), "median": float(np.median(ratios)),
                         "above": float(np.mean(np.array(ratios) > 1 + 1e-9)), "bound": bound})  # fmt: skip
    return rows


def clipped(theta: Array, x: Array, ratings: Array, centre: str, clip: float) -> Array:
    """Mean over a user's records of gradients of the squared loss, each within ``clip``: (p,)."""
    slope = 2 * (x @ theta - (ratings - (ratings.mean() if centre == "user" else 3.5)))
    limit = clip / np.maximum(np.linalg.norm(x, axis=1), 1e-300)
    mean: Array = np.clip(slope, -limit, limit) @ x / len(x)
    return mean
