"""Seconds of a step of a server that waits for nobody, beside those of a round with as many clients.

PMTL on invented data in the shapes of FEMNIST, logistic regression with 48,670 parameters: rounds of 10 clients, and
steps of 10 answers of 100 busy clients. Both runs are simulated in turns, step by step, so that what else the machine
does hits both. The figures are seconds of the processor.

    OMP_NUM_THREADS=1 python benchmarks/speed/buffered.py
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Iterator
from statistics import median
from typing import Any

import torch
from ranks import data_of

from fedmtl import PMTL, Buffered, ClientPrivacy, FixedCohort, LocalSGD, Trainer, models, simulate
from fedmtl.schedules import RandomLatency

WARM_UP = 3


def steps(schedule: Any, clients: int, rounds: int) -> Iterator[Any]:
    """Returns the steps of a run."""
    return simulate(
        Trainer(
            algorithm=PMTL(lam=0.1, local=LocalSGD(lr=0.1, epochs=1, batch_size=10)),
            data=data_of(clients, 784, 62),
            model=models.softmax_regression(),
            schedule=schedule,
            privacy=ClientPrivacy(clip_norm=0.1, noise_multiplier=1.0),
            rounds=rounds,
            baselines=(),
            progress=False,
        )
    )


def main() -> None:
    """Parses the command line and prints the medians."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", maxsplit=1)[0])
    parser.add_argument("--clients", type=int, default=500)
    parser.add_argument("--rounds", type=int, default=40)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    late = Buffered(latency=RandomLatency("lognorm", {"s": 1.0}), concurrency=100, buffer=10)
    runs = {
        "a round of 10": steps(FixedCohort(cohort=10), arguments.clients, arguments.rounds),
        "10 answers of 100 busy": steps(late, arguments.clients, arguments.rounds),
    }
    spent: dict[str, list[float]] = {name: [] for name in runs}
    for _ in range(arguments.rounds):
        for name, run in runs.items():
            began = time.process_time()
            next(run)
            spent[name].append(time.process_time() - began)
    middle = {name: median(each[WARM_UP:]) for name, each in spent.items()}
    for name, seconds in middle.items():
        print(f"{name}: {seconds:.4f} s")
    first, second = middle.values()
    print(f"ratio {second / first:.2f}")


if __name__ == "__main__":
    main()
