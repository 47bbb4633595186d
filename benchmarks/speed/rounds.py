r"""Seconds a round on LEAF FEMNIST: fedmtl, JAX, Apple's pfl, Flower and a plain PyTorch loop on the same work.

The same clients, batches, start, clip and noise; the contenders take turns, each in a process of its own, and every
one prints a line of JSON (see contenders/work.py). fedmtl's round is the trainer's: cohort, ledger entry on disk,
gathering, local training, client store, release. pfl has no personal models, and Flower leaves them to its users;
beside these all run FedProx. Where the final losses differ by more than 2%, there is no ratio.

    python benchmarks/speed/rounds.py --root /path/to/leaf_femnist_206.json.zip --pfl-python /path/to/bin/python \
        --flower-python /path/to/another/bin/python --jax-python /path/to/a/third/bin/python
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from statistics import median
from typing import Any

import torch

HERE = Path(__file__).parent / "contenders"
sys.path[:0] = [str(HERE), str(HERE.parents[1] / "reproduce")]

from sweep import existing  # noqa: E402

WORKLOADS = {
    "W1": ("cnn", "pmtl", "CNN, 115,646 parameters, personal models"),
    "W1-fedprox": ("cnn", "fedprox", "CNN, 115,646 parameters, FedProx"),
    "W2": ("logistic", "pmtl", "logistic regression, 48,670 parameters, personal models"),
    "W2-fedprox": ("logistic", "fedprox", "logistic regression, 48,670 parameters, FedProx"),
    "MLP": ("mlp", "pmtl", "perceptron 784-200-62, 169,462 parameters, personal models"),
    "MLP-fedprox": ("mlp", "fedprox", "perceptron 784-200-62, 169,462 parameters, FedProx"),
}
SCRIPTS = {
    "fedmtl": "fedmtl_rounds.py",
    "pfl": "pfl_fedprox.py",
    "JAX": "jax_fedprox.py",
    "flower": "flower_fedprox.py",
    "plain loop": "loop.py",
}
TOLERANCE = 0.02
Line = dict[str, Any]


def interpreter(text: str) -> str:
    """Return the interpreter of a command line, refused there where it cannot be run: before any work."""
    if shutil.which(text) is None:
        raise argparse.ArgumentTypeError(
            f"{text} is no interpreter that can be run; give a path, .../bin/python"
        )
    return text


def run(
    script: str,
    python: str,
    work: Path,
    threads: int,
    root: Path,
    *more: str,
    limit: float | None = None,
) -> Line:
    """Run a contender once, for ``limit`` seconds at most, and return its line.

    Raises:
        SystemExit: it failed, with the end of what it said.
        subprocess.TimeoutExpired: it took longer.
    """
    command = [
        python,
        str(HERE / script),
        "--work",
        str(work),
        "--threads",
        str(threads),
        "--root",
        str(root),
        *more,
    ]
    here = str(Path(__file__).resolve().parents[2])
    environment = os.environ | {"OMP_NUM_THREADS": str(threads), "PYTHONPATH": here}
    done = subprocess.run(
        command, capture_output=True, text=True, check=False, env=environment, timeout=limit
    )
    if done.returncode:
        raise SystemExit(f"{' '.join(command)} failed:\n{done.stderr[-2000:]}")
    line: Line = json.loads(done.stdout.strip().splitlines()[-1])
    return line


_LOOP = """
import os
parent = os.getppid()
while os.getppid() == parent:  # also where that one was killed
    for _ in range(1_000_000):
        pass
"""


@contextmanager
def busy(count: int) -> Iterator[None]:
    """Keep ``count`` cores busy with other work inside the block."""
    loops = [subprocess.Popen([sys.executable, "-c", _LOOP]) for _ in range(count)]
    try:
        yield
    finally:
        for loop in loops:
            loop.kill()
            loop.wait()


def compare(key: str, given: argparse.Namespace, folder: Path) -> list[Line]:
    """Run one workload, the contenders in turn, and return one line for each contender and number of threads."""
    from fedmtl_run import Run
    from work import WARM_UP

    model, method, _ = WORKLOADS[key]
    total = WARM_UP + given.rounds
    settings = {
        "model": model, "method": method, "lr": given.lr, "lam": given.lam, "batch": 10, "clip": given.clip_norm,
        "epsilon": given.epsilon, "cohort": given.cohort, "seed": 0, "execution": json.loads(given.execution),
    }  # fmt: skip
    prepared = Run.of(settings, total, str(given.root), None)
    prepared.work(settings, total).write(folder)
    sides = [("fedmtl", sys.executable, n) for n in given.fedmtl_threads]
    sides += [("plain loop", sys.executable, n) for n in given.threads]
    others = [("pfl", given.pfl_python), ("flower", given.flower_python), ("JAX", given.jax_python)]
    for name, python in others:
        if python and method == "fedprox":
            sides += [(name, python, n) for n in given.threads]
    lines: dict[tuple[str, int], list[Line]] = {}
    with busy(given.busy):
        for repetition in range(given.repetitions):
            for place in range(len(sides)):  # another one begins every time
                name, python, threads = sides[(repetition + place) % len(sides)]
                lines.setdefault((name, threads), []).append(
                    run(SCRIPTS[name], python, folder, threads, given.root)
                )
    return [summary(key, found, given.clock) for found in lines.values()]


def summary(key: str, found: list[Line], clock: str) -> Line:
    """One line of a contender's repetitions: the median over repetitions of the median round, and its spread."""
    medians = [median(line[clock]) for line in found]
    one = {name: value for name, value in found[0].items() if name not in ("wall", "cpu")}
    return {"workload": key} | one | {
        "clock": clock, "seconds": median(medians), "least": min(medians), "most": max(medians),
        "repetitions": len(found), "peak_mib": max(line["peak_mib"] for line in found),
        "cpu_seconds": median(median(line["cpu"]) for line in found),
    }  # fmt: skip


def ratio(line: Line, lines: list[Line]) -> float | None:
    """How many times as long a contender takes as fedmtl on the same workload; None for fedmtl itself, where it has no
    line, or where the losses differ."""
    ours = [
        one for one in lines if one["workload"] == line["workload"] and one["contender"] == "fedmtl"
    ]
    if (
        line["contender"] == "fedmtl"
        or not ours
        or abs(line["loss"] / ours[0]["loss"] - 1.0) > TOLERANCE
    ):
        return None
    return float(line["seconds"] / min(one["seconds"] for one in ours))


def table(lines: list[Line]) -> str:
    """The lines as a Markdown table."""
    rows = [
        "| workload | contender | threads | seconds a round (least to most) | against fedmtl | peak MiB | final loss |",
        "| --- | --- | ---: | ---: | ---: | ---: | ---: |",
    ]
    for line in lines:
        times = ratio(line, lines)
        told = (
            "1"
            if line["contender"] == "fedmtl"
            else "no ratio: another loss"
            if times is None
            else f"{times:.2f} x"
        )
        rows.append(
            f"| {line['workload']} | {line['contender']} {line['version']} | {line['threads']} | {line['seconds']:.4f} "
            f"({line['least']:.4f} to {line['most']:.4f}) | {told} | {line['peak_mib']:,} | {line['loss']:.4f} |"
        )
    return "\n".join(rows)


def plot(lines: list[Line], path: Path) -> None:
    """Bars of seconds a round, a group for each workload."""
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib import pyplot

    keys = list(dict.fromkeys(line["workload"] for line in lines))
    names = list(dict.fromkeys((line["contender"], line["threads"]) for line in lines))
    figure, axes = pyplot.subplots(figsize=(1.5 + 1.6 * len(keys), 3.6), layout="constrained")
    width = 0.8 / len(names)
    for number, (name, threads) in enumerate(names):
        own = [one for one in lines if (one["contender"], one["threads"]) == (name, threads)]
        at = [keys.index(one["workload"]) + (number - (len(names) - 1) / 2) * width for one in own]
        middle = [one["seconds"] for one in own]
        spread = [
            [one["seconds"] - one["least"] for one in own],
            [one["most"] - one["seconds"] for one in own],
        ]
        axes.bar(
            at,
            middle,
            width,
            yerr=spread,
            label=f"{name}, {threads} thread{'s' if threads > 1 else ''}",
        )
    axes.set(
        yscale="log",
        ylabel=f"seconds a round ({lines[0]['clock']})",
        xticks=range(len(keys)),
        xticklabels=keys,
    )
    figure.legend(fontsize=8, loc="outside upper left", ncols=2)
    figure.savefig(path, dpi=150)


def machine() -> str:
    """Processor, cores, load and versions in one line."""
    name = platform.processor() or platform.machine()
    if Path("/proc/cpuinfo").exists():
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        name = next(
            (line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")), name
        )
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    load = f", load {os.getloadavg()[0]:.2f}" if hasattr(os, "getloadavg") else ""
    return f"{name}, {cores} cores{load}; Python {platform.python_version()}, PyTorch {torch.__version__}"


def main() -> None:
    """Parse the command line, run the workloads, and print the table."""
    cores = (
        len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    )
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", maxsplit=1)[0])
    parser.add_argument(
        "--root", type=existing, required=True, help="LEAF FEMNIST: a JSON file, a zip or a folder"
    )
    parser.add_argument(
        "--pfl-python",
        type=interpreter,
        help="interpreter of an environment with pfl; none leaves it out",
    )
    parser.add_argument(
        "--flower-python", type=interpreter, help="of one with flwr[simulation]; none leaves it out"
    )
    parser.add_argument(
        "--jax-python", type=interpreter, help="of one with jax and torch; none leaves it out"
    )
    parser.add_argument("--workloads", nargs="+", choices=list(WORKLOADS), default=list(WORKLOADS))
    parser.add_argument("--repetitions", type=int, default=5, help="processes of every contender")
    parser.add_argument("--rounds", type=int, default=9, help="timed rounds in each of them")
    parser.add_argument(
        "--threads", type=int, nargs="+", default=sorted({1, cores}), help="of the other contenders"
    )
    parser.add_argument("--fedmtl-threads", type=int, nargs="+", default=[cores])
    parser.add_argument(
        "--busy", type=int, default=0, help="loops that keep cores busy beside the contenders"
    )
    parser.add_argument(
        "--clock", choices=["wall", "cpu"], default="wall", help="cpu: seconds of all threads"
    )
    parser.add_argument("--cohort", type=int, default=100)
    parser.add_argument("--lr", type=float, default=0.1)
    parser.add_argument("--lam", type=float, default=0.1)
    parser.add_argument("--clip-norm", type=float, default=0.5)
    parser.add_argument("--epsilon", type=float, default=8.0)
    parser.add_argument("--execution", default="{}", help='fedmtl\'s, as JSON: {"chunk": 4}')
    parser.add_argument(
        "--out", type=Path, help="folder for rounds.jsonl, rounds.md and rounds.png"
    )
    given = parser.parse_args()
    about = machine() + "; fewer than 5 repetitions, whose median says little" * (
        given.repetitions < 5
    )
    print(about, flush=True)
    lines: list[Line] = []
    with tempfile.TemporaryDirectory() as folder:
        for key in given.workloads:
            found = compare(key, given, Path(folder) / key)
            for line in found:
                print(json.dumps(line), flush=True)
            lines += found
    busy_text = f"; beside {given.busy} busy loops" if given.busy else ""
    text = f"{about}{busy_text}. {given.repetitions} repetitions of {given.rounds} rounds.\n\n{table(lines)}\n"
    print(text)
    if given.out is not None:
        given.out.mkdir(parents=True, exist_ok=True)
        (given.out / "rounds.jsonl").write_text("".join(f"{json.dumps(line)}\n" for line in lines))
        (given.out / "rounds.md").write_text(text)
        plot(lines, given.out / "rounds.png")


if __name__ == "__main__":
    main()
