"""Seconds a round: fedmtl against a plain per-client PyTorch loop doing the same work on LEAF FEMNIST.

Both sides train the same cohorts on the same batches from the same start, clip and add the same noise, so
they must end with the same loss; when the losses differ by more than 2% no ratio is printed. fedmtl's round
is the trainer's: cohort, ledger entry on disk, gathering, local training, client store, release. The loop holds
every client's examples as float tensors and is handed their order; in its clock it only indexes them. The
contenders take turns within every round; the loop runs with one and with all threads, and the faster counts.

    python benchmarks/speed/rounds.py --root /path/to/leaf_femnist_206.json.zip
"""

from __future__ import annotations

import argparse
import os
import platform
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median

import torch
from plain_loop import PlainLoop
from torch import Tensor

import fedmtl
from fedmtl import PMTL, ClientPrivacy, Execution, LocalSGD, PoissonSampling, load_data, models
from fedmtl.algorithms.base import Problem
from fedmtl.data import FederatedDataset
from fedmtl.local import plan_batches
from fedmtl.privacy import Channel, open_channel
from fedmtl.privacy.noise.sources import SeededSource
from fedmtl.schedules import rounds as round_events
from fedmtl.trainer.evaluation import evaluate_rows
from fedmtl.trainer.problem import build_problem

WORKLOADS = {
    "W1": ("CNN, 115,646 parameters", models.femnist_cnn()),
    "W2": ("logistic regression, 48,670 parameters", models.softmax_regression()),
}
TOLERANCE = 0.02
WARM_UP = 2


@dataclass
class Contender:
    """One side of the comparison: its clock, and what prepares a round without being timed."""

    name: str
    round: Callable[[int], None]
    rows: Callable[[Tensor], Tensor]
    threads: int
    seconds: list[float] = field(default_factory=list)

    def take(self, step: int, device: torch.device) -> None:
        torch.set_num_threads(self.threads)
        synchronize(device)
        began = time.perf_counter()
        self.round(step)
        synchronize(device)
        self.seconds.append(time.perf_counter() - began)

    @property
    def timed(self) -> list[float]:
        return self.seconds[WARM_UP:]


class Workload:
    """Everything the contenders share: problem, cohorts, batches and noise.

    Args:
        data: FEMNIST.
        key: of :data:`WORKLOADS`.
        arguments: of the command line.
        ledger: path of fedmtl's ledger.
    """

    def __init__(self, data: FederatedDataset, key: str, arguments: argparse.Namespace, ledger: Path) -> None:
        self.title, factory = WORKLOADS[key]
        self.total = WARM_UP + arguments.rounds
        began = time.perf_counter()
        execution = Execution(strategy=arguments.strategy, chunk=arguments.chunk)
        self.problem: Problem = build_problem(
            data, factory, "cross_entropy", execution, self.total, 0, arguments.device, "float32"
        )
        self.device = self.problem.initial.device
        self.solver = LocalSGD(lr=arguments.lr, epochs=1, batch_size=10)
        self.algorithm = PMTL(lam=arguments.lam, local=self.solver)
        privacy = ClientPrivacy(clip_norm=arguments.clip_norm, epsilon=arguments.epsilon, delta=1e-5)
        sampler = PoissonSampling(cohort=arguments.cohort).bind(len(data))
        plans = self.algorithm.plan(self.problem, sampler)
        self.channel: Channel = open_channel(privacy, plans, sampler, seed=0, ledger_path=ledger, steps=self.total)
        self.state = self.algorithm.init(self.problem)
        self.order = torch.argsort(data.keys.cpu(), stable=True)
        self.rank = torch.argsort(self.order)
        self.set_up = time.perf_counter() - began
        self.cohorts: list[Tensor] = []
        self.events = round_events(self.channel.draw, self.order, start=0, stop=self.total)

    def fedmtl(self) -> Contender:
        return Contender("fedmtl", self._step, self._rows, torch.get_num_threads())

    def loop(self, threads: int) -> Contender:
        assert self.channel.noise_multiplier is not None
        clip_norm = next(iter(self.channel.releases.values())).clip.bound
        source = SeededSource(0)  # fedmtl's own noise, so that both sides reach the same model
        dimension = self.problem.dimension
        loop = PlainLoop(
            self.problem.layout.load(self.problem.module, self.problem.initial.cpu()).to(self.device),
            lr=self.solver.lr,
            lam=self.algorithm.lam,
            clip_norm=clip_norm,
            noise_std=self.channel.noise_multiplier * self.channel.releases["update"].sensitivity,
            denominator=self.channel.denominator,
            normal=lambda step: torch.from_numpy(source.normal("noise/update", step, dimension)),
        )
        return Contender(
            f"plain loop, {threads} thread{'s' if threads > 1 else ''}",
            lambda step: loop.round(step, self.batches),
            lambda clients: loop.rows(clients.tolist()),
            threads,
        )

    def prepare(self, step: int) -> None:
        """The loop's examples and batches of this round: those that fedmtl addresses by (seed, client, round)."""
        data, cohort = self.problem.data, self.cohorts[step]
        self.batches: dict[int, tuple[Tensor, Tensor, list[Tensor]]] = {}
        for client in cohort:
            plan = plan_batches(data, self.solver, client[None], seed=0, round=step)
            first, count = int(data.train.offsets[client]), int(data.train.counts[client])
            x, y = data.gather("train", torch.arange(first, first + count), device=self.device)
            order = [(batch.index[0][batch.mask[0]] - first).to(self.device) for batch in plan.batches()]
            self.batches[int(client)] = x, y, order

    def _step(self, step: int) -> None:
        event = next(self.events)
        self.channel.begin(event.first, self.rank[event.cohort])
        self.state = self.algorithm.step(self.problem, self.state, event, self.channel)

    def _rows(self, clients: Tensor) -> Tensor:
        return self.algorithm.personalize(self.problem, self.state, clients)

    def close(self) -> None:
        self.channel.close()
        self.problem.executor.close()


def compare(data: FederatedDataset, key: str, arguments: argparse.Namespace, ledger: Path) -> None:
    """Run one workload and print its block."""
    threads = torch.get_num_threads()
    work = Workload(data, key, arguments, ledger)
    sides = [work.fedmtl(), *(work.loop(n) for n in sorted({1, threads}))]
    for step in range(work.total):
        # for the loop's batches; the channel returns the same cohort until the round begins
        work.cohorts.append(work.order[work.channel.draw(step)])
        work.prepare(step)
        for place in range(len(sides)):  # another one begins every time
            sides[(step + place) % len(sides)].take(step, work.device)
    torch.set_num_threads(threads)
    seen = torch.unique(torch.cat(work.cohorts))
    counts = [work.problem.data.train.counts[c] for c in work.cohorts[WARM_UP:]]
    examples = sum(int(c.sum()) for c in counts)
    steps = sum(int(work.solver.step_counts(c).sum()) for c in counts)
    execution = work.problem.executor.execution
    print(f"{key}: {work.title}; {execution.strategy}, chunk {execution.chunk}, threads {execution.threads}")
    print(
        f"  {arguments.rounds} timed rounds: {sum(map(len, counts)):,} clients, {examples:,} examples, "
        f"{steps:,} gradient steps; noise multiplier {work.channel.noise_multiplier:.3f}; "
        f"set-up and calibration {work.set_up:.2f} s"
    )
    losses = {}
    for side in sides:
        loss = evaluate_rows(work.problem, side.rows(seen), seen, "train").loss.mean()
        losses[side.name] = float(loss)
        low, middle, high = min(side.timed), median(side.timed), max(side.timed)
        print(
            f"  {side.name:<22} median {middle:.3f} s/round  ({low:.3f} to {high:.3f})   "
            f"{examples / sum(side.timed):,.0f} examples/s   final training loss {loss:.4f}"
        )
    ours, best = sides[0], min(sides[1:], key=lambda s: median(s.timed))
    gap = abs(losses[ours.name] / losses[best.name] - 1.0)
    if gap > TOLERANCE:
        print(f"  no ratio: the losses differ by {gap:.1%}")
    else:
        print(f"  fedmtl is {median(best.timed) / median(ours.timed):.2f} x the faster plain loop")
    work.close()


def synchronize(device: torch.device) -> None:
    """Wait for a GPU's queue; nothing on a CPU."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def machine(device: str) -> str:
    """Processor, cores, accelerator and versions in one line."""
    name = platform.processor() or platform.machine()
    if Path("/proc/cpuinfo").exists():
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        name = next((line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")), name)
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    load = f", load {os.getloadavg()[0]:.2f}" if hasattr(os, "getloadavg") else ""
    gpu = f", {torch.cuda.get_device_name()}" if device != "cpu" and torch.cuda.is_available() else ""
    return (
        f"{name}, {cores} cores{gpu}{load}; Python {platform.python_version()}, PyTorch {torch.__version__}, "
        f"fedmtl {fedmtl.__version__}"
    )


def main() -> None:
    """Parse the command line and run the workloads."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", maxsplit=1)[0])
    parser.add_argument("--root", required=True, help="LEAF FEMNIST: a JSON file, a zip or a folder")
    parser.add_argument("--workloads", nargs="+", choices=list(WORKLOADS), default=list(WORKLOADS))
    parser.add_argument("--rounds", type=int, default=11, help="timed rounds, at least 5")
    parser.add_argument("--cohort", type=int, default=100)
    parser.add_argument("--lr", type=float, default=0.1)
    parser.add_argument("--lam", type=float, default=0.1)
    parser.add_argument("--clip-norm", type=float, default=0.5)
    parser.add_argument("--epsilon", type=float, default=8.0)
    parser.add_argument("--strategy", choices=["auto", "stacked", "threads"], default="auto")
    parser.add_argument("--chunk", type=int, help="clients computed together; default: fedmtl's own choice")
    parser.add_argument("--device", default="cpu")
    arguments = parser.parse_args()
    if arguments.rounds < 5:
        parser.error("--rounds must be at least 5: a median of fewer says little")
    print(machine(arguments.device))
    data = load_data("femnist", root=arguments.root)
    with tempfile.TemporaryDirectory() as folder:
        for key in arguments.workloads:
            compare(data, key, arguments, Path(folder) / f"{key}.jsonl")


if __name__ == "__main__":
    main()
