"""Seconds a round, and memory, of what moves in a network: all of it, low-rank adapters, or the last layer.

Every contender trains the same cohorts of all clients on the same random images, of the shape and the classes of
FEMNIST, by FedAvg or PMTL under the same clip and noise. They take turns within every round. A stack holds the rows and
gradients of K clients, and once what is frozen.

    python benchmarks/speed/frozen.py
    python benchmarks/speed/frozen.py --unit record --rounds 5
"""

from __future__ import annotations

import argparse
import time
from statistics import median

import torch
from rounds import machine

from fedmtl import (
    PMTL,
    ClientPrivacy,
    FedAvg,
    FullParticipation,
    LocalSGD,
    RecordPrivacy,
    models,
)
from fedmtl.algorithms import Algorithm
from fedmtl.data import FederatedDataset
from fedmtl.privacy import open_channel
from fedmtl.schedules import rounds as round_events
from fedmtl.trainer.make_problem import ProblemSettings, build_problem
from fedmtl.trainer.run_channel import releases_of

NETWORK = models.mlp(hidden=512, layers=2)  # 784-512-512-62
CONTENDERS = {
    "all": (NETWORK, None),
    "adapters, rank 4": (models.lora(NETWORK, rank=4), None),
    "adapters, B alone": (models.lora(NETWORK, rank=4), ("*.lora_B",)),
    "last layer": (NETWORK, ("5",)),
}
ALGORITHMS: dict[str, type[Algorithm]] = {"fedavg": FedAvg, "pmtl": PMTL}
WARM_UP = 2


def images(clients: int) -> FederatedDataset:
    """Clients of 10 to 50 random images 28 x 28 of 62 classes."""
    generator = torch.Generator().manual_seed(0)
    parts = {}
    for client in range(clients):
        n = int(torch.randint(10, 51, (1,), generator=generator))
        x, y = (
            torch.rand(n, 1, 28, 28, generator=generator),
            torch.randint(62, (n,), generator=generator),
        )
        parts[f"writer-{client}"] = x, y
    return FederatedDataset.from_tensors(parts, test=parts, classes=62, name="random images")


class Contender:
    """One choice of what moves, with a run of its own."""

    def __init__(self, name: str, data: FederatedDataset, arguments: argparse.Namespace) -> None:
        model, trainable = CONTENDERS[name]
        records = arguments.unit == "record"
        total = WARM_UP + arguments.rounds
        self.problem = build_problem(
            data,
            model,
            ProblemSettings(
                loss="cross_entropy",
                rounds=total,
                device=arguments.device,
                protects_records=records,
                trainable=trainable,
            ),
        )
        self.algorithm = ALGORITHMS[arguments.algorithm](local=LocalSGD(lr=0.1, batch_size=10))  # type: ignore[call-arg]
        privacy = (RecordPrivacy if records else ClientPrivacy)(
            clip_norm=0.5, epsilon=8.0, delta=1e-5
        )
        sampler = FullParticipation().bind(len(data))
        plans = releases_of(self.algorithm, self.problem, sampler)
        self.channel = open_channel(privacy, plans, sampler, seed=0, steps=total)
        self.state = self.algorithm.init(self.problem)
        self.events = round_events(self.channel.draw, start=0, stop=total)
        self.seconds: list[float] = []

    def take(self) -> None:
        self.wait()
        began = time.perf_counter()
        event = next(self.events)
        self.channel.begin(event.first, event.cohort)
        self.state = self.algorithm.step(self.problem, self.state, event, self.channel)
        self.wait()
        self.seconds.append(time.perf_counter() - began)

    def wait(self) -> None:
        """Wait for what is queued on a GPU."""
        if self.problem.initial.device.type == "cuda":
            torch.cuda.synchronize(self.problem.initial.device)

    def line(self, name: str) -> str:
        timed = self.seconds[WARM_UP:]
        stack = self.problem.executor.stack
        frozen = sum(p.nbytes for p in stack.train_module.parameters() if not p.requires_grad)
        size, copies = (2 * stack.rows.nbytes + frozen) / 2**20, len(stack.rows)
        total = sum(p.numel() for p in self.problem.module.parameters())
        return (
            f"  {name:<18} {self.problem.dimension:>8,} of {total:,} "
            f"numbers   median {median(timed):.3f} s/round  ({min(timed):.3f} to {max(timed):.3f})   stack of {copies} "
            f"{size:,.1f} MiB"
        )


def main() -> None:
    """Parse the command line, take turns and print a line each."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", maxsplit=1)[0])
    parser.add_argument("--rounds", type=int, default=11, help="timed rounds")
    parser.add_argument("--clients", type=int, default=100)
    parser.add_argument("--algorithm", choices=list(ALGORITHMS), default="fedavg")
    parser.add_argument("--unit", choices=["client", "record"], default="client")
    parser.add_argument("--device", default="cpu")
    arguments = parser.parse_args()
    print(machine())
    data = images(arguments.clients)
    contenders = {name: Contender(name, data, arguments) for name in CONTENDERS}
    order = list(contenders.values())
    for step in range(WARM_UP + arguments.rounds):
        for place in range(len(order)):  # another one begins every time
            order[(step + place) % len(order)].take()
    counts = data.train.counts
    steps = int(order[0].algorithm.local.step_counts(counts).sum())  # type: ignore[union-attr]
    print(
        f"{arguments.algorithm}, unit {arguments.unit}: {arguments.rounds} rounds of {len(data)} clients, "
        f"{int(counts.sum()):,} examples and {steps:,} gradient steps each"
    )
    for name, contender in contenders.items():
        print(contender.line(name))


if __name__ == "__main__":
    main()
