"""Peer-to-peer learning: wake-ups a second beside a plain NumPy loop, and over populations of many sizes.

    OMP_NUM_THREADS=1 python benchmarks/speed/p2p.py            # both parts, a minute

The first part is 100 agents with models of 100 numbers and about 40 neighbours each, 20,000 wake-ups of one run and
1,000 of each of 100: the same updates by a loop that has no ledger and is told who wakes, beside the library, which
charges every wake-up. They take turns; ``--clock cpu`` counts the processor seconds of all threads.
The second has rows of 10 numbers and six neighbours an agent, with 10^3 to 10^5 agents.
"""

from __future__ import annotations

import argparse
import resource
import sys
import time
from pathlib import Path
from statistics import median

import numpy as np
import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from rounds import machine

from fedmtl import PeerToPeer, PoissonClocks, RecordPrivacy, models
from fedmtl.data import FederatedDataset
from fedmtl.data.examples import Examples
from fedmtl.data.synthetic.agents import TargetAngles, load_synthetic_agents
from fedmtl.graphs import Graph, GraphSettings, Ring
from fedmtl.local import Execution, operation_threads
from fedmtl.privacy import open_channel
from fedmtl.trainer.make_problem import ProblemSettings, build_problem
from fedmtl.trainer.run_channel import bind_schedule, releases_of

CLOCKS = {"wall": time.perf_counter, "cpu": time.process_time}


def numpy_loop(
    x, y, graph: Graph, who, mu: float, smooth: float, scale: float, clip: float
) -> np.ndarray:
    """Equation (6) with clipped gradients and Gaussian noise, one wake-up after another: Theta (n, p)."""
    limits = [clip / np.linalg.norm(rows, axis=1) for rows in x]
    n, p, rng = len(x), x[0].shape[1], np.random.default_rng(0)
    weights = (graph.weights / graph.normalization[:, None]).toarray() if n <= 2000 else None
    shares = graph.weights.data / np.repeat(graph.normalization, graph.degrees)
    ptr, columns = graph.weights.indptr, graph.weights.indices
    m = np.array([len(rows) for rows in x])
    pull, lam = mu * m / m.max(), 1 / m
    alpha = 1 / (1 + pull * (smooth + 2 * lam))
    theta = np.zeros((n, p))
    for i in who:
        own, target = theta[i], y[i]
        factor = -target / (1 + np.exp(target * (x[i] @ own)))
        np.minimum(np.maximum(factor, -limits[i], out=factor), limits[i], out=factor)
        gradient = factor @ x[i] / m[i] + 2 * lam[i] * own + scale / m[i] * rng.standard_normal(p)
        if weights is not None:
            around = weights[i] @ theta
        else:
            part = slice(ptr[i], ptr[i + 1])
            around = shares[part] @ theta[columns[part]]
        theta[i] = (1 - alpha[i]) * own + alpha[i] * (around - pull[i] * gradient)
    return theta


def population(n: int, p: int, records: int, seed: int = 0) -> FederatedDataset:
    """n agents with unit rows and labels of their own separators."""
    rng = np.random.default_rng(seed)
    x = rng.standard_normal((n * records, p))
    x /= np.linalg.norm(x, axis=1, keepdims=True)
    y = (np.einsum("nmp,np->nm", x.reshape(n, records, p), rng.standard_normal((n, p))) > 0).astype(
        np.int64
    )
    offsets = torch.arange(n + 1) * records
    side = Examples(torch.from_numpy(x).float(), torch.from_numpy(y.ravel()), offsets)
    return FederatedDataset(
        side, side, tuple(f"a{i}" for i in range(n)), classes=2, name=f"{n} agents"
    )


def run(
    data: FederatedDataset,
    graph: Graph | GraphSettings,
    events: int,
    per_client: int,
    replicates: int = 1,
    clock=time.perf_counter,
) -> tuple[float, float]:
    """Seconds to open everything, and wake-ups a second after that."""
    began = clock()
    execution, model = Execution(), models.linear_regression(bias=False)
    problem = build_problem(
        data,
        model,
        ProblemSettings(
            loss="binary_cross_entropy", execution=execution, rounds=events, dtype="float64"
        ),
    )
    algorithm = PeerToPeer(graph=graph, mu=0.1, feature_norm=10.0)
    privacy = RecordPrivacy(clip_norm=1.0, epsilon=4.0, delta=1e-5)
    schedule = bind_schedule(PoissonClocks(activations=events, per_client=per_client), data)
    plans = releases_of(algorithm, problem, schedule)
    channel = open_channel(privacy, plans, schedule.describe(), seed=0, replicates=replicates)
    state = algorithm.init(problem, replicates)
    channel.start(0)
    opened = clock()
    with operation_threads(
        problem.dimension, problem.dimension * problem.clients
    ):  # as a trainer has it
        for event in schedule.blocks(0, 0, schedule.steps, replicates=replicates):
            channel.begin(event.first, event.clients)
            state = algorithm.step(problem, state, event, channel)
    spent = clock() - opened
    channel.close()
    return opened - began, events * replicates / spent


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--part", choices=("loop", "scale", "both"), default="both")
    parser.add_argument("--clock", choices=list(CLOCKS), default="wall")
    parser.add_argument("--threads", type=int, default=1, help="of the library")
    parser.add_argument("--repeats", type=int, default=5, help="of the loop part, in turns")
    given = parser.parse_args()
    part, clock = given.part, CLOCKS[given.clock]
    torch.set_num_threads(given.threads)
    print(f"{machine()}, NumPy {np.__version__}")
    if part in ("loop", "both"):
        made = load_synthetic_agents(100, features=100)
        graph, train = TargetAngles().build(made), made.train
        x = [
            train.x[a:b].double().numpy()
            for a, b in zip(train.offsets[:-1], train.offsets[1:], strict=True)
        ]
        y = [
            2.0 * train.y[a:b].numpy() - 1
            for a, b in zip(train.offsets[:-1], train.offsets[1:], strict=True)
        ]
        events = (
            PoissonClocks(activations=20_000, per_client=250)
            .bind(100)
            .activations(0, 0, 20_000)
            .client[0]
            .tolist()
        )

        def loop() -> float:
            began = clock()
            numpy_loop(x, y, graph, events, 0.1, 25.0, 1.0, 1.0)
            return len(events) / (clock() - began)

        sides = {
            "NumPy loop": loop,
            "one run": lambda: run(made, graph, 20_000, 250, clock=clock)[1],
            "100 runs": lambda: run(made, graph, 1_000, 20, 100, clock=clock)[1],
        }
        speeds: dict[str, list[float]] = {name: [] for name in sides}
        for _ in range(given.repeats + 1):  # one of warm-up
            for name, side in sides.items():
                speeds[name].append(side())
        speeds = {name: found[1:] for name, found in speeds.items()}
        plain = median(speeds["NumPy loop"])
        print("100 agents, p = 100, wake-ups a second")
        for name, found in speeds.items():
            middle = median(found)
            spread = f"({min(found):,.0f} to {max(found):,.0f})"
            print(f"  {name:<10} {middle:>8,.0f} {spread}   {middle / plain:.2f} x the loop")
    if part in ("scale", "both"):
        for n in (1_000, 10_000, 100_000):
            opened, speed = run(population(n, 10, 5), Ring(3), 20_000, 100)
            top = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
            print(
                f"{n:>7,} agents: {speed:,.0f} wake-ups a second, opened in {opened:.1f} s, {top:,.0f} MiB at most"
            )


if __name__ == "__main__":
    main()
