"""MP-MTL: fedmtl's 100 repetitions as one batched program against plain NumPy loops, one repetition after another.

320 tasks of 30 records in 30 dimensions, least squares, trace norm, symmetric Gaussian noise. Two loops: one that takes
the tasks of an iteration one by one, and one that stacks them in NumPy. fedmtl's time includes the charges and the
noise of its generator. Without noise all must end with the same models; with noise, the final training objectives,
averaged over repetitions, are printed, and where they differ by more than 2% there is no ratio. The contenders take
turns. The loops' time grows with iterations x repetitions: they run ``--loop-runs`` of them, and are scaled up.

    python benchmarks/speed/mp_mtl.py --iterations 500
"""

from __future__ import annotations

import argparse
import math
import sys
import time
from pathlib import Path
from statistics import median

import numpy as np
import torch

HERE = Path(__file__).parent
sys.path[:0] = [str(HERE), str(HERE.parents[1]), str(HERE.parent / "reproduce" / "mp_mtl")]

from problems import Run, rows_of, run, synthetic  # noqa: E402
from rounds import machine  # noqa: E402

from fedmtl.algorithms.linear.stack import TaskStack  # noqa: E402
from fedmtl.algorithms.mp_mtl.algorithm import MPMTL  # noqa: E402

Array = np.ndarray
CLIP, RIDGE, LAM, RHO, EPSILON = 4.0, 0.01, 0.4, 1.5, 10.0
SHORT = CLIP * (1 - 2.0**-20)  # fedmtl clips a little shorter, for rounding: models agree to 1e-6
TOLERANCE = 0.02


def loop(
    x: list[Array], y: list[Array], iterations: int, sigma: float, seed: int, *, stacked: bool
) -> Array:
    """One repetition in NumPy: models (n, d).

    Args:
        x, y: records of every task.
        iterations: T.
        sigma: standard deviation of the noise on a diagonal entry.
        seed: of the noise.
        stacked: products of all tasks at once, or task by task.
    """
    rng, d, eta = np.random.default_rng(seed), x[0].shape[1], 1 / (1 + RIDGE)
    gram = np.stack([a.T @ a / len(a) for a in x])
    moment = np.stack([a.T @ b / len(b) for a, b in zip(x, y, strict=True)])
    w = np.stack(
        [np.linalg.solve(g + RIDGE * np.eye(d), m) for g, m in zip(gram, moment, strict=True)]
    )
    upper = np.triu_indices(d, 1)
    for _ in range(iterations):
        noise = np.diag(sigma * rng.standard_normal(d))
        noise[upper] = sigma / math.sqrt(2) * rng.standard_normal(len(upper[0]))
        noise += np.triu(noise, 1).T
        if stacked:
            clipped = w / np.maximum(1, np.linalg.norm(w, axis=1, keepdims=True) / SHORT)
            covariance = clipped.T @ clipped
        else:
            covariance = np.zeros((d, d))
            for own in w:
                short = own / max(1.0, math.sqrt(own @ own) / SHORT)
                covariance += np.outer(short, short)
        values, vectors = np.linalg.eigh(covariance + noise)
        root = np.sqrt(np.maximum(values + RHO * sigma * math.sqrt(2 * d), 0))
        kept = np.maximum(0, 1 - eta * LAM / np.maximum(root, 1e-300))
        project = (vectors * kept) @ vectors.T
        if stacked:
            what = w @ project
            gradient = (gram @ what[..., None])[..., 0] - moment
            w = what - eta * (gradient + RIDGE * what)
        else:
            what = np.empty_like(w)
            for i in range(len(w)):
                what[i] = project @ w[i]
                w[i] = what[i] - eta * (gram[i] @ what[i] - moment[i] + RIDGE * what[i])
    return what


def main() -> None:
    """Parse the command line, check, time, print a table."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", maxsplit=1)[0])
    parser.add_argument("--iterations", type=int, default=500)
    parser.add_argument("--runs", type=int, default=100, help="repetitions")
    parser.add_argument(
        "--loop-runs", type=int, default=3, help="repetitions that the loops really make"
    )
    parser.add_argument(
        "--repeats", type=int, default=5, help="timings of each contender; the median counts"
    )
    arguments = parser.parse_args()
    iterations, runs, made = arguments.iterations, arguments.runs, arguments.loop_runs
    torch.set_num_threads(1)
    data = synthetic("low_rank", 0)
    rows = rows_of(data.train)
    x, y = [a.numpy() for a in rows.x], [b.numpy() for b in rows.y]
    algorithm = MPMTL(feature_norm=1.0, lam=LAM, rho=RHO, ridge=RIDGE, momentum="none", alpha=0.0)

    def batched(epsilon: float, repetitions: int, rounds: int) -> tuple[float, Run]:
        found = run(algorithm, data, (epsilon,), repetitions, clip=CLIP, rounds=rounds)
        return found.seconds, found

    quiet = batched(math.inf, 2, 7)[1].models[0].numpy()
    for stacked in (True, False):
        gap = np.abs(loop(x, y, 7, 0.0, 0, stacked=stacked) - quiet).max()
        if gap > 1e-6:
            raise SystemExit(f"Without noise the models differ by {gap:g}.")
    seconds: dict[str, list[float]] = {"fedmtl": [], "stacked": [], "one by one": []}
    ends: dict[str, list[Array]] = {"stacked": [], "one by one": []}
    for repeat in range(arguments.repeats):
        spent, found = batched(EPSILON, runs, iterations)
        seconds["fedmtl"].append(spent)
        sigma = float(found.noise[0, 0])
        for name in ends:
            began = time.perf_counter()
            ends[name] += [loop(x, y, iterations, sigma, 100 * repeat + k, stacked=name == "stacked")
                           for k in range(made)]  # fmt: skip
            seconds[name].append((time.perf_counter() - began) * runs / made)
    stack = TaskStack.of(rows, "squared")

    def objective(models: torch.Tensor) -> float:
        penalty = torch.linalg.svdvals(models).sum(-1)
        ridge = RIDGE / 2 * models.square().sum((1, 2))
        return float((stack.value(models.transpose(0, 1)).sum(0) + LAM * penalty + ridge).mean())

    values = {"fedmtl": objective(found.models)}
    values |= {name: objective(torch.from_numpy(np.stack(own))) for name, own in ends.items()}
    print(machine())
    print(f"{len(x)} tasks, d = {rows.dimension}, {iterations} iterations, {runs} repetitions, epsilon {EPSILON:g}; "
          f"loops: {made} repetitions, scaled to {runs}")  # fmt: skip
    for name, own in seconds.items():
        close = abs(values[name] / values["fedmtl"] - 1) <= TOLERANCE
        ratio = (
            f"{median(own) / median(seconds['fedmtl']):.1f} x"
            if close
            else "no ratio: objectives differ"
        )
        shown = f"{median(own):9.1f} s ({min(own):.1f} to {max(own):.1f})"
        print(f"{name:<11} {shown:<28} {ratio:<8} objective {values[name]:.4f}")


if __name__ == "__main__":
    main()
