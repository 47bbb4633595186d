"""Seconds and memory of whole runs on 10^3 to 10^6 clients, with cohorts of 100: what grows with the population.

The population is written once, as a file that runs map into memory: 5 rows to train on and 2 to test on for each
client, of 16 bytes and one of 4 classes, made by one draw for all clients. Every run is a process of its own, with the
whole of `Trainer.fit`: ledger, noise, evaluation, checkpoint, plots, tables and models in a folder. A part counts
without the parts that it calls, in processor seconds, which other work on the machine does not lengthen.

    OMP_NUM_THREADS=1 python benchmarks/speed/population.py
    OMP_NUM_THREADS=1 python benchmarks/speed/population.py --clients 1000000 --evaluate all
"""

from __future__ import annotations

import argparse
import json
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
import torch

from fedmtl import (
    PMTL,
    ClientPrivacy,
    FedAvg,
    FederatedDataset,
    FixedCohort,
    LocalSGD,
    PoissonSampling,
    Trainer,
    models,
)
from fedmtl.data.examples import Examples
from fedmtl.data.transforms import Affine
from fedmtl.privacy import RoundChannel
from fedmtl.trainer import fit
from fedmtl.trainer import run as run_file
from fedmtl.trainer.engine import Engine
from fedmtl.trainer.evaluator import Evaluator
from fedmtl.trainer.folder import RunFolder
from fedmtl.trainer.saving import Checkpoints

TRAIN, TEST, WIDTH, CLASSES = 5, 2, 16, 4
ALGORITHMS = {"pmtl": PMTL, "fedavg": FedAvg}
SAMPLERS = {"poisson": PoissonSampling, "fixed": FixedCohort}
COLUMNS = ("open", "start", "rounds", "evaluation", "checkpoint", "files", "other")


def write_population(clients: int, file: Path) -> None:
    """Write a population whose clients tell classes apart by a common pattern of bytes that each of them shifts."""
    draws = np.random.default_rng(0)
    pattern = draws.integers(0, 192, (CLASSES, WIDTH), dtype=np.uint8)
    shift = draws.integers(0, 32, (clients, 1, WIDTH), dtype=np.uint8)
    sides = []
    for count in (TRAIN, TEST):
        y = draws.integers(0, CLASSES, (clients, count))
        x = pattern[y] + shift + draws.integers(0, 32, (clients, count, WIDTH), dtype=np.uint8)
        offsets = torch.arange(0, clients * count + 1, count)
        sides.append(
            Examples(torch.from_numpy(x).flatten(0, 1), torch.from_numpy(y).flatten(), offsets)
        )
    ids = tuple(f"client-{number}" for number in range(clients))
    torch.save(FederatedDataset(*sides, ids, Affine(scale=1 / 255), CLASSES, "population"), file)


class Clock:
    """Processor and wall seconds of the parts of a run; a part does not count the parts that it calls."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}
        self.wall: dict[str, float] = {}
        self.each: dict[str, list[float]] = {}
        self._inner = [(0.0, 0.0)]

    def timed(self, part: str, function: Callable[..., Any]) -> Callable[..., Any]:
        """Return the function, timed as ``part``."""

        def call(*given: Any, **named: Any) -> Any:
            self._inner.append((0.0, 0.0))
            began = time.process_time(), time.perf_counter()
            try:
                return function(*given, **named)
            finally:
                spent = time.process_time() - began[0], time.perf_counter() - began[1]
                inner = self._inner.pop()
                for table, whole, own in zip((self.seconds, self.wall), spent, inner, strict=True):
                    table[part] = table.get(part, 0.0) + whole - own
                outer = self._inner[-1]
                self._inner[-1] = outer[0] + spent[0], outer[1] + spent[1]
                self.each.setdefault(part, []).append(spent[0] - inner[0])

        return call


def run(arguments: argparse.Namespace) -> dict[str, Any]:
    """Return what one run took; this process makes no other."""
    clock = Clock()
    for kind, name, part in (
        (Evaluator, "evaluate", "evaluation"),
        (Checkpoints, "save", "checkpoint"),
        (run_file, "write_run", "files"),
        (fit, "write_result", "files"),
        (RunFolder, "write_lists", "files"),
        (Engine, "open", "start"),
        (Trainer, "problem", "start"),
        (ALGORITHMS[arguments.algorithm], "step", "rounds"),
        (RoundChannel, "draw", "rounds"),
        (RoundChannel, "begin", "rounds"),
    ):
        setattr(kind, name, clock.timed(part, getattr(kind, name)))
    imported = memory()
    whole = time.process_time(), time.perf_counter()
    data = clock.timed("open", torch.load)(arguments.data, weights_only=False, mmap=True)
    evaluated = None if arguments.evaluate == "all" else int(arguments.evaluate)
    trainer = Trainer(
        algorithm=ALGORITHMS[arguments.algorithm](local=LocalSGD(lr=0.1, batch_size=5)),
        data=data,
        model=models.softmax_regression(),
        schedule=SAMPLERS[arguments.sampling](cohort=arguments.cohort),
        privacy=ClientPrivacy(clip_norm=0.5, epsilon=8.0, delta=1e-8),
        rounds=arguments.rounds,
        folder=arguments.folder,
        eval_every=max(1, arguments.rounds // 2),
        evaluate_clients=evaluated,
        progress=False,
    )
    result = trainer.fit()
    spent = time.process_time() - whole[0], time.perf_counter() - whole[1]
    parts = clock.seconds | {"other": spent[0] - sum(clock.seconds.values())}
    files = {
        path.name: path.stat().st_size
        for path in Path(arguments.folder).rglob("*")
        if path.is_file()
    }
    events = clock.each["rounds"]
    # the cohort is drawn, then charged, then computed
    rounds = [sum(parts) for parts in zip(events[::3], events[1::3], events[2::3], strict=True)]
    return {
        "clients": len(data),
        "algorithm": arguments.algorithm,
        "sampling": arguments.sampling,
        "evaluated": arguments.evaluate,
        "rounds": len(rounds),
        "seconds_per_round": [median(rounds), min(rounds), max(rounds)],
        "processor_seconds": parts,
        "wall_seconds": clock.wall | {"all": spent[1]},
        "memory_mib": memory(),
        "memory_imported_mib": imported,
        "ledger_bytes": files["ledger.jsonl"],
        "checkpoint_bytes": files["checkpoint.safetensors"],
        "models_bytes": files.get("models.safetensors", 0),
        "accuracy": result.final["accuracy"],
        "epsilon": result.epsilon,
    }


def memory() -> float:
    """Return the largest resident memory of this process so far, in MiB."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


def line(found: dict[str, Any]) -> str:
    """Return one row of the table."""
    parts = found["processor_seconds"]
    cells = [f"{found['clients']:>9,}", found["algorithm"], found["sampling"], found["evaluated"]]
    cells += [
        f"{1e3 * found['seconds_per_round'][0]:.1f}",
        *(f"{parts.get(name, 0.0):.2f}" for name in COLUMNS),
    ]
    cells += [
        f"{sum(parts.values()):.1f}",
        f"{found['memory_mib']:,.0f}",
        f"{found['memory_imported_mib']:,.0f}",
    ]
    return "| " + " | ".join(cells) + " |"


def main() -> None:
    """Parse the command line, start a process for each run and print a JSON line each, and then the table."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", maxsplit=1)[0])
    parser.add_argument("--clients", type=int, nargs="+", default=[10**3, 10**4, 10**5, 10**6])
    parser.add_argument("--algorithm", choices=list(ALGORITHMS), default="pmtl")
    parser.add_argument("--sampling", choices=list(SAMPLERS), nargs="+", default=list(SAMPLERS))
    parser.add_argument(
        "--evaluate", default="1000", help="number of clients that are evaluated, or all"
    )
    parser.add_argument("--cohort", type=int, default=100, help="clients of a round")
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument(
        "--data", type=Path, help="keep the populations in this folder (default: a temporary one)"
    )
    parser.add_argument("--folder", help=argparse.SUPPRESS)  # of the one run of this process
    arguments = parser.parse_args()
    if arguments.folder is not None:
        arguments.sampling = arguments.sampling[0]
        print(json.dumps(run(arguments)))
        return
    rows = []
    with tempfile.TemporaryDirectory() as temporary:
        place = arguments.data or Path(temporary)
        for clients in arguments.clients:
            data = place / f"population-{clients}"
            if not data.exists():
                write_population(clients, data)
            for sampling in arguments.sampling:
                with tempfile.TemporaryDirectory() as folder:
                    words = [
                        sys.executable,
                        __file__,
                        "--data",
                        str(data),
                        "--folder",
                        f"{folder}/run",
                    ]
                    words += ["--sampling", sampling, "--evaluate", arguments.evaluate]
                    words += ["--rounds", str(arguments.rounds), "--algorithm", arguments.algorithm]
                    words += ["--cohort", str(arguments.cohort)]
                    text = subprocess.run(
                        words, check=True, stdout=subprocess.PIPE, text=True
                    ).stdout
                print(text, end="", flush=True)
                rows.append(json.loads(text))
    names = ["clients", "algorithm", "cohorts", "evaluated", "ms a round", *COLUMNS]
    names += ["all", "memory, MiB", "of which imports"]
    print("", f"| {' | '.join(names)} |", "| " + "--- | " * len(names), sep="\n")
    print("\n".join(map(line, rows)))


if __name__ == "__main__":
    main()
