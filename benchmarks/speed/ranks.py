"""Scaling over processes of one machine: seconds a round of PMTL for 1, 2, ... ranks, strong and weak.

Strong scaling computes the same rounds by more ranks; weak scaling gives every rank a cohort of the same size. Each
group of ranks is started by torchrun, with one process and one thread a rank, and times the middle of its run, from
round to round, without evaluation and without a checkpoint. A row of the table has the seconds of a round, the seconds
a round that the first rank spends in operations of all ranks (waiting for the slowest, and those around the rounds,
included), and the efficiency: the seconds of one rank over those of N, divided by N for strong scaling.

The last line is a model and no measurement: a round of N ranks takes W / N + r, where W is the clients' work and r what
more ranks do not shorten, both from the rows of strong scaling for one rank and for most.

    OMP_NUM_THREADS=1 python benchmarks/speed/ranks.py --ranks 1 2
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from contextlib import contextmanager
from pathlib import Path
from statistics import median
from typing import Any

import torch

from fedmtl import PMTL, Callback, ClientPrivacy, Execution, FixedCohort, LocalSGD, Trainer, models
from fedmtl.data import FederatedDataset
from fedmtl.ranks import Ranks

WARM_UP = 2


class Clock(Callback):
    """Times of the rounds."""

    def __init__(self) -> None:
        self.times: list[float] = []

    def on_block(self, block: Any, state: Any) -> None:
        self.times.append(time.perf_counter())


def data_of(clients: int, features: int, classes: int) -> FederatedDataset:
    """Return invented data, 20 to 140 training examples a client."""
    generator = torch.Generator().manual_seed(0)
    counts = torch.randint(25, 175, (clients,), generator=generator).tolist()
    rows = {
        f"client-{k}": (
            torch.randn(n, features, generator=generator),
            torch.randint(classes, (n,), generator=generator),
        )
        for k, n in enumerate(counts)
    }
    return FederatedDataset.from_tensors(rows, test_fraction=0.2, classes=classes, name="invented")


def rank(arguments: argparse.Namespace) -> None:
    """Be one rank of a run; the first one prints what it measured."""
    ranks, clock, spent = Ranks.of_launch(), Clock(), [0.0]
    inner = Ranks._reached

    @contextmanager
    def timed(self: Ranks) -> Any:
        began = time.perf_counter()
        with inner(self):
            yield
        spent[0] += time.perf_counter() - began

    Ranks._reached = timed  # type: ignore[method-assign]
    cohort = arguments.cohort * (ranks.size if arguments.weak else 1)
    rounds = WARM_UP + arguments.rounds + 1
    Trainer(
        algorithm=PMTL(lam=0.1, local=LocalSGD(lr=0.1, epochs=1, batch_size=10)),
        data=data_of(arguments.clients, arguments.features, arguments.classes),
        model=models.softmax_regression(),
        schedule=FixedCohort(cohort),
        privacy=ClientPrivacy(clip_norm=1.0, noise_multiplier=1.0, delta=1e-5),
        rounds=rounds,
        eval_every=rounds,
        callbacks=[clock],
        execution=Execution(processes=1),
        progress=False,
    ).fit(ranks=ranks)
    steps = [after - before for before, after in zip(clock.times, clock.times[1:], strict=False)][
        WARM_UP:
    ]
    if ranks.first:
        print(json.dumps({"seconds": median(steps), "together": spent[0] / rounds}), flush=True)
    ranks.leave()


def group(arguments: argparse.Namespace, size: int, weak: bool) -> dict[str, float]:
    """Start a group of ranks; return what the first one measured."""
    command = [sys.executable, "-m", "torch.distributed.run", f"--nproc-per-node={size}"]
    command += ["--rdzv-backend=c10d", "--rdzv-endpoint=localhost:0", str(Path(__file__)), "--rank"]
    for name in ("clients", "cohort", "features", "classes", "rounds"):
        command += [f"--{name}", str(getattr(arguments, name))]
    environment = os.environ | {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    done = subprocess.run(
        command + ["--weak"] * weak,
        env=environment,
        stdout=subprocess.PIPE,
        text=True,
        check=True,
        timeout=1800,
    )
    return json.loads(done.stdout.strip().splitlines()[-1])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--ranks", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--clients", type=int, default=600)
    parser.add_argument("--cohort", type=int, default=100)
    parser.add_argument("--features", type=int, default=784)
    parser.add_argument("--classes", type=int, default=62)
    parser.add_argument("--rounds", type=int, default=4)
    parser.add_argument(
        "--repeats", type=int, default=2, help="groups of each size, in turn; the fastest counts"
    )
    parser.add_argument("--weak", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--rank", action="store_true", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.rank:
        rank(arguments)
        return
    print(f"load of the machine before: {os.getloadavg()[0]:.1f} on {os.cpu_count()} cores")
    print(
        f"{'scaling':<8}{'ranks':>6}{'cohort':>8}{'s/round':>10}{'together':>10}{'efficiency':>12}"
    )
    expected = "no model: it needs a run of one rank, and of several"
    for weak in (False, True):
        found: dict[int, dict[str, float]] = {}
        for _ in range(arguments.repeats):
            for size in arguments.ranks:
                one = group(arguments, size, weak)
                found[size] = min(found.get(size, one), one, key=lambda row: row["seconds"])
        for size, row in found.items():
            cohort = arguments.cohort * (size if weak else 1)
            gain = found[min(found)]["seconds"] / row["seconds"]
            share = gain if weak else gain * min(found) / size
            print(
                f"{'weak' if weak else 'strong':<8}{size:>6}{cohort:>8}{row['seconds']:>10.3f}{row['together']:>10.3f}"
                f"{share:>12.0%}"
            )
        if not weak and min(found) == 1 < max(found):
            most, one = max(found), found[1]["seconds"]
            rest = min(one, max(0.0, (most * found[most]["seconds"] - one) / (most - 1)))
            eight = (one - rest) / 8 + rest
            expected = (
                f"model, not measured: W = {one - rest:.3f} s, r = {rest:.3f} s; 8 ranks would take {eight:.3f} s a "
                f"round, {one / eight:.1f} times as fast as one"
            )
    print(expected)


if __name__ == "__main__":
    main()
