"""Events a second of the asynchronous methods: fedmtl against plain NumPy loops of the same updates.

A single run has its ledger on disk; R runs are one batched program in fedmtl, and R loops one after another in NumPy.
fedmtl's time includes schedule, charges, noise and updates; the NumPy loop is told who acts, and draws noise. Both
are first run on the same events with the same noise and must end in the same state. In the timed runs each draws its
own noise, of the same law; the final objectives, averaged over the runs, are printed, and where they differ by more
than 2% there is no ratio. The contenders take turns; calibration and preparation are timed apart.

    python benchmarks/speed/asynchronous.py
"""

from __future__ import annotations

import argparse
import tempfile
import time
from collections.abc import Callable
from contextlib import closing
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import torch
from numpy_loops import Array, Loop, Noise, central_learner, gaussian, l2_laplace, laplace, pp_dmtl
from rounds import machine
from torch import Tensor

from fedmtl import PPDMTL, AsyncLearner, FederatedDataset, RecordPrivacy, models
from fedmtl.algorithms.base import Algorithm, Problem
from fedmtl.algorithms.linear.data import LinearData, LinearLoss
from fedmtl.data.synthetic.tasks import load_synthetic_tasks
from fedmtl.local import operation_threads
from fedmtl.privacy import SeededSource, open_channel
from fedmtl.privacy.noise.laws import LAWS
from fedmtl.schedules import Latencies, PoissonClocks, RandomLatency
from fedmtl.schedules.clocks import AsynchronousSchedule
from fedmtl.trainer.make_problem import ProblemSettings, build_problem
from fedmtl.trainer.run_channel import bind_schedule, releases_of

TOLERANCE = 0.02
CLOCKS = {"wall": time.perf_counter, "cpu": time.process_time}
Clock = Callable[[], float]


@dataclass(frozen=True)
class Workload:
    """One method on one problem.

    Attributes:
        title: in a line.
        problem, algorithm: of fedmtl.
        budgets: of one run, and of repetitions with several budgets, so many repetitions of each.
        schedule: of so many events.
        loop: the NumPy loop on the same records.
        law: (generator, scales of the owners, p) -> the loop's noise.
        released: name of the state's tensor that the loop returns, of one run.
        objective: of the models of several runs, (R, ...) -> (R,).
    """

    title: str
    problem: Problem
    algorithm: Algorithm
    budgets: tuple[RecordPrivacy, ...]
    schedule: Callable[[int], AsynchronousSchedule]
    loop: Loop
    law: Callable[[np.random.Generator, Array, int], Noise]
    released: str
    objective: Callable[[Tensor], Tensor]

    def open(self, events: int, runs: int, ledger: Path | None = None) -> Any:
        """Channel and schedule of events, as the trainer opens them."""
        bound = bind_schedule(self.schedule(events), self.problem.data)
        plans = releases_of(self.algorithm, self.problem, bound)
        options: dict[str, Any] = {"seed": 0, "replicates": runs, "ledger_path": ledger}
        return open_channel(self.privacy(runs), plans, bound.describe(), **options), bound

    def privacy(self, runs: int) -> Any:
        """One budget, or from 300 runs on each of the budgets for a part of them."""
        if runs < 300 or len(self.budgets) == 1:
            return self.budgets[0]
        return [self.budgets[run * len(self.budgets) // runs] for run in range(runs)]

    def fedmtl(
        self, events: int, runs: int, ledger: Path | None, clock: Clock = time.perf_counter
    ) -> tuple[float, Tensor]:
        """Seconds, and the models (R, ...) at the end."""
        channel, bound = self.open(events, runs, ledger)
        state = self.algorithm.init(self.problem, runs)
        size = self.problem.dimension
        with (
            closing(channel),
            operation_threads(size, size * self.problem.clients),
        ):  # as a trainer has it
            channel.start(0)
            began = clock()
            for block in bound.blocks(0, 0, events, replicates=runs):
                channel.begin(block.first, block.clients)
                state = self.algorithm.step(self.problem, state, block, channel)
            seconds = clock() - began
        return seconds, state.public[self.released].clone()

    def numpy(
        self, events: int, runs: int, scales: Array, clock: Clock = time.perf_counter
    ) -> tuple[float, Tensor]:
        """Seconds, and the models (R, ...) at the end; ``scales`` (R, n) of the noise."""
        models, bound = [], self.open(events, runs)[1]
        table = bound.activations(0, 0, events, replicates=runs)
        everyone = table.client.tolist()
        began = clock()
        for run, who in enumerate(everyone):
            rng = np.random.default_rng(run)
            models.append(self.loop(who, self.law(rng, scales[run], self.problem.dimension)))
        return clock() - began, torch.from_numpy(np.stack(models))

    def scales(self, events: int, runs: int) -> Array:
        """Of every owner's noise in every run, 2 C z / n_i: (R, n)."""
        with closing(self.open(events, runs)[0]) as channel:
            scale = (
                2
                * channel.bound
                * channel.noise_multipliers
                / self.problem.data.train.counts.numpy()
            )
        return np.broadcast_to(scale, (runs, self.problem.clients))

    def check(self, events: int) -> float:
        """Largest difference of the two on the same events with the same noise, relative to the largest entry."""
        channel, bound = self.open(events, 1)
        blocks, noise = list(bound.blocks(0, 0, events)), []
        counts = self.problem.data.train.counts.tolist()
        with closing(channel):
            channel.start(0)
            for block in blocks:  # releases of zeros are the noise
                channel.begin(block.first, block.clients)
                for _ in range(len(block)):
                    silent = [np.zeros((len(runs), counts[k])) for k, runs in channel.acting]
                    noise.append(channel.release(silent)[0])
        expected = self.loop(
            torch.cat([b.client[0] for b in blocks]).tolist(), lambda event, _: noise[event]
        )
        found = self.fedmtl(events, 1, None)[1][0].numpy()
        return float(np.abs(found - expected).max() / np.abs(expected).max())


def learner(records: int) -> Workload:
    """10 owners of so many records in 10 dimensions, squared loss."""
    rng, owners, p = np.random.default_rng(0), 10, 10
    x = rng.standard_normal((owners, records, p))
    y = np.clip(
        x @ rng.standard_normal(p) / 3 + 0.1 * rng.standard_normal((owners, records)), -1, 1
    )
    data = FederatedDataset.from_tensors(
        {f"owner-{i}": (x[i], y[i]) for i in range(owners)}, classes=None
    )
    algorithm, clip = AsyncLearner(kappa=20.0, horizon=1000, theta_max=2.0), 5.0
    problem = problem_of(data, 10**6)
    rows = list(algorithm.data(problem).x)
    arrays, targets = [r.numpy() for r in rows], [t.numpy() for t in LinearData.of(problem).y]
    pooled, values, loss = (
        torch.cat(rows),
        torch.from_numpy(np.concatenate(targets)),
        LinearLoss("squared"),
    )

    loop = central_learner(
        arrays, targets, a=algorithm.effective_step(owners, 1000), reg=algorithm.reg,
        top=algorithm.theta_max, clip=clip,
    )  # fmt: skip

    return Workload(
        title=f"asynchronous learner, {owners} owners x {records} records x {p}, squared loss",
        problem=problem,
        algorithm=algorithm,
        budgets=tuple(
            RecordPrivacy(clip_norm=clip, epsilon=epsilon, delta=0.0, mechanism="laplace")
            for epsilon in (90_000.0 / records, 180_000.0 / records, 360_000.0 / records)
        ),
        schedule=lambda events: PoissonClocks(
            activations=events, per_client=max(1, 2 * events // owners)
        ),
        loop=loop,
        law=laplace,
        released="theta_l",
        objective=lambda theta: (
            loss.value(theta, pooled, values).mean(1) + algorithm.reg * theta.square().sum(1)
        ),
    )


def tasks() -> Workload:
    """The 20 tasks of Xie et al."""
    algorithm = PPDMTL(feature_norm=1.0)
    data = load_synthetic_tasks()
    problem = problem_of(data, 10**6)
    records = LinearData.of(problem)
    rows, targets = [r.numpy() for r in algorithm.data(problem).x], [t.numpy() for t in records.y]
    a2 = algorithm.step_size(problem)

    run = pp_dmtl(rows, targets, a2=a2, threshold=a2 * algorithm.lam, clip=1.0)

    def objective(shared: Tensor) -> Tensor:
        state = algorithm.init(problem, len(shared))
        state.public["shared"].copy_(shared)
        return algorithm.objective(problem, state)

    return Workload(
        title="PP-DMTL, 20 tasks x 60 records x 28, logistic loss, nuclear norm, epsilon 10 an answer",
        problem=problem,
        algorithm=algorithm,
        budgets=(RecordPrivacy(clip_norm=1.0, noise_multiplier=0.1, mechanism="l2_laplace"),),
        schedule=lambda events: Latencies(
            latency=RandomLatency("uniform", {"scale": 15.0}), activations=events
        ),
        loop=lambda who, noise: run(who, noise).T,
        law=l2_laplace,
        released="shared",
        objective=objective,
    )


def problem_of(data: FederatedDataset, events: int) -> Problem:
    model = models.linear_regression(bias=False)
    return build_problem(data, model, ProblemSettings(loss="mse", rounds=events, dtype="float64"))


@dataclass
class Contender:
    """One side of a comparison."""

    name: str
    run: Callable[[], tuple[float, Tensor]]
    threads: int
    seconds: list[float] = field(default_factory=list)
    loss: float = 0.0


def compare(
    work: Workload, events: int, runs: int, repeats: int, folder: Path, clock: Clock
) -> None:
    """Time both sides in turns and print one block."""
    scales, most = work.scales(events, runs), torch.get_num_threads()
    files = iter(range(10**6))

    def ours() -> tuple[float, Tensor]:
        return work.fedmtl(
            events, runs, folder / f"{next(files)}.jsonl" if runs == 1 else None, clock
        )

    sides = [
        Contender(f"fedmtl, {n} thread{'s' if n > 1 else ''}", ours, n) for n in sorted({1, most})
    ]
    sides.append(Contender("NumPy loop", lambda: work.numpy(events, runs, scales, clock), 1))
    for repeat in range(-1, repeats):  # one of warm-up
        for place in range(len(sides)):
            side = sides[(repeat + place) % len(sides)]
            torch.set_num_threads(side.threads)
            seconds, found = side.run()
            if repeat >= 0:
                side.seconds.append(seconds)
            side.loss = float(work.objective(found).mean())
    torch.set_num_threads(most)
    several = f", {len(work.budgets)} budgets" if runs >= 300 and len(work.budgets) > 1 else ""
    print(f"  {runs} run{'s' if runs > 1 else ''} x {events:,} events{several}")
    for side in sides:
        low, middle, high = (
            events * runs / s for s in (max(side.seconds), median(side.seconds), min(side.seconds))
        )
        rate = f"{middle:>9,.0f} events/s ({low:,.0f} to {high:,.0f})"
        print(f"    {side.name:<18} {rate}   final objective {side.loss:.4f}")
    loop = sides[-1]
    for side in sides[:-1]:
        gap = abs(side.loss / loop.loss - 1)
        ratio = median(loop.seconds) / median(side.seconds)
        print(
            f"    {side.name}: "
            + (f"{ratio:.2f} x NumPy" if gap <= TOLERANCE else f"no ratio, {gap:.1%} apart")
        )


def noise_alone(repeats: int, clock: Clock) -> None:
    """Print what the noise of an answer takes: of 100 runs at once, and one answer after another by the loops."""
    runs, seeded = 100, [SeededSource(0, run) for run in range(100)]
    print(f"noise alone, microseconds an answer: {runs} runs of fedmtl, and numpy.random")
    loops = {"laplace": laplace, "l2_laplace": l2_laplace, "gaussian": gaussian}
    for law, size in (("laplace", 10), ("l2_laplace", 28), ("gaussian", 100)):
        answers = (1 << 19) // (runs * size)
        uses = torch.arange(answers)[:, None].expand(-1, runs)
        keys, draw = torch.zeros_like(uses), loops[law](np.random.default_rng(0), np.ones(1), size)
        ours, theirs = [], []
        for _ in range(repeats):
            began = clock()
            LAWS[law](1.0).draw_each(seeded, "noise", uses, keys, size)
            between = clock()
            for event in range(answers * runs):
                draw(event, 0)
            ours.append((between - began) / (answers * runs))
            theirs.append((clock() - between) / (answers * runs))
        print(f"  {law:<10} x {size:<3} {1e6 * median(ours):5.2f}, {1e6 * median(theirs):5.2f}")


def bounds_alone(repeats: int, clock: Clock) -> None:
    """Print what an event cannot do without: the products of clipped records, and the decompositions of PP-DMTL."""
    rng, runs = np.random.default_rng(0), 100
    points, x = rng.standard_normal((10, runs // 10, 10)), rng.standard_normal((10, 90, 10))
    across, limit = (
        np.ascontiguousarray(x.swapaxes(1, 2)),
        torch.ones(10, 1, 90, dtype=torch.float64),
    )

    def clipped() -> None:
        factors = torch.from_numpy(np.matmul(points, across))
        np.matmul(torch.clamp(factors, -limit, limit, out=factors).numpy(), x)

    wide = rng.standard_normal((runs, 20, 28))
    gram = np.matmul(wide, wide.swapaxes(1, 2))
    double = torch.from_numpy(gram)
    single = double.float()
    print(f"parts of an event alone, microseconds each, of {runs}")
    for title, run in {
        "clipped records, 10 owners x 90 x 10, as many runs of each: products and clip": clipped,
        "20 x 20, torch.linalg.eigh of all": lambda: torch.linalg.eigh(double),
        "20 x 20, torch.linalg.eigh of all, single precision": lambda: torch.linalg.eigh(single),
        "20 x 20, numpy.linalg.eigh of all": lambda: np.linalg.eigh(gram),
        "20 x 28, numpy.linalg.svd, one after another": lambda: [
            np.linalg.svd(one, full_matrices=False) for one in wide
        ],
    }.items():
        seconds = []
        for _ in range(20 * repeats):
            began = clock()
            run()
            seconds.append((clock() - began) / runs)
        print(f"  {title}: {1e6 * median(seconds):.2f}")


def main() -> None:
    """Parse the command line and run the workloads."""
    workloads = {
        "learner": lambda: learner(90),
        "records": lambda: learner(900),
        "tasks": tasks,
    }
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", maxsplit=1)[0])
    parser.add_argument(
        "--workloads", nargs="+", choices=["noise", "bounds", *workloads], default=list(workloads)
    )
    parser.add_argument("--runs", nargs="+", type=int, default=[1, 100, 300])
    parser.add_argument(
        "--events",
        type=int,
        help="of a run; default: 1,000, and 10,000 for a single run of the tasks",
    )
    parser.add_argument("--repeats", type=int, default=5, help="timed repeats, at least 5")
    parser.add_argument(
        "--threads", type=int, help="the most threads of fedmtl; default: all cores, and one"
    )
    parser.add_argument(
        "--clock",
        choices=list(CLOCKS),
        default="wall",
        help="cpu: of the process, without the disk",
    )
    arguments = parser.parse_args()
    if arguments.repeats < 5:
        parser.error("--repeats must be at least 5: a median of fewer says little")
    torch.set_num_threads(arguments.threads or torch.get_num_threads())
    print(f"{machine()}, NumPy {np.__version__}")
    for name in arguments.workloads:
        if name in ("noise", "bounds"):
            alone = noise_alone if name == "noise" else bounds_alone
            alone(arguments.repeats, CLOCKS[arguments.clock])
            continue
        began = time.perf_counter()
        work = workloads[name]()
        print(f"{work.title}; set-up {time.perf_counter() - began:.2f} s")
        print(
            f"  same events, same noise: largest difference {work.check(500):.1e} of the largest entry"
        )
        for runs in arguments.runs:
            events = arguments.events or (10_000 if name == "tasks" and runs == 1 else 1_000)
            with tempfile.TemporaryDirectory() as folder:
                compare(
                    work, events, runs, arguments.repeats, Path(folder), CLOCKS[arguments.clock]
                )


if __name__ == "__main__":
    main()
