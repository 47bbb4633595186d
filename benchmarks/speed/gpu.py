"""Rounds on a GPU: fedmtl there and on the CPU, a plain PyTorch loop, JAX and pfl, on the same work.

W1 and W2 are those of rounds.py, on random images of as many clients where no ``--root`` is given. W3 has 3,400 clients, cohorts of 10 and a network of 1.2 million parameters; W4 1,000
clients of 50 images in colour, cohorts of 50 and 1.6 million parameters; both on random images, since the time of a
round does not depend on what they show. Contenders take turns, each in a process of its own, and print a line of JSON:
seconds a round (a round ends when the GPU has), memory, final loss.
``--tests`` first runs the tests that need a GPU, for 90 seconds at most. ``--small`` tries the command where there is none.

Whatever fails, takes longer than ``--limit`` or would begin after ``--seconds`` is said, and the rest goes on: first
every contender once on every workload, then all of them again. Each line is printed and written when it is there.

    python benchmarks/speed/gpu.py --tests --out gpu --seconds 360 --limit 60 --jax-python python
    python benchmarks/speed/gpu.py --device cpu --small --repetitions 1
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from rounds import SCRIPTS, Line, existing, interpreter, machine, ratio, run, summary

FEMNIST = {"lr": 0.1, "lam": 0.1, "batch": 10, "clip": 0.5, "cohort": 100}
STILL = {
    "clip": 1e-4
}  # random images teach nothing: with little noise the final losses are comparable
LARGE = {"clients": 3400, "least": 20, "most": 180, "shape": [1, 28, 28], "classes": 62}
LIKE_FEMNIST = {"clients": 206, "least": 10, "most": 46, "shape": [1, 28, 28], "classes": 62}
COLOUR = {
    "clients": 1000,
    "least": 56,
    "most": 56,
    "shape": [3, 32, 32],
    "classes": 10,
}  # 50 of them for training
WORKLOADS: dict[str, dict[str, Any]] = {
    "W1": FEMNIST | {"model": "cnn", "method": "pmtl"},
    "W1-fedprox": FEMNIST | {"model": "cnn", "method": "fedprox"},
    "W2": FEMNIST | {"model": "logistic", "method": "pmtl"},
    "W2-fedprox": FEMNIST | {"model": "logistic", "method": "fedprox"},
    "W3": FEMNIST
    | STILL
    | {"model": "cnn3", "method": "fedprox", "batch": 20, "cohort": 10, "data": LARGE},
    "W4": FEMNIST | STILL | {"model": "cifar", "method": "fedprox", "cohort": 50, "data": COLOUR},
}
PLANNED = 1500  # rounds of W3 and W4
TEST_SECONDS = 90.0


Side = tuple[str, str, str, str]
"""Name, script, interpreter and device of a contender."""


def prepare(key: str, given: argparse.Namespace, folder: Path) -> list[Side]:
    """Write the work of a workload, and return its contenders."""
    from fedmtl_rounds import Run
    from work import WARM_UP

    total = WARM_UP + given.rounds
    settings = WORKLOADS[key] | {"epsilon": 8.0, "seed": 0}
    if given.root is None and "data" not in settings:
        settings |= STILL | {"data": LIKE_FEMNIST}
    if given.small:
        few = {"clients": 20, "least": 6, "most": 12}
        settings |= {"cohort": 4} | ({"data": settings["data"] | few} if "data" in settings else {})
    prepared = Run.of(settings, total, str(given.root), None)
    prepared.work(settings, total).write(folder)
    sides = [
        ("fedmtl", "fedmtl", sys.executable, given.device),
        ("plain loop", "plain loop", sys.executable, given.device),
    ]
    if given.pfl_python and settings["method"] == "fedprox":
        sides.append(("pfl", "pfl", given.pfl_python, given.device))
    # its networks are those of rounds.py
    if given.jax_python and settings["method"] == "fedprox" and key[:2] in ("W1", "W2"):
        sides.append(("JAX", "JAX", given.jax_python, given.device))
    if given.device != "cpu":
        sides.append(("fedmtl, CPU", "fedmtl", sys.executable, "cpu"))
    return sides


def attempt(key: str, side: Side, given: argparse.Namespace, folder: Path) -> Line:
    """Run one contender once and return its line, or one that says how it failed."""
    name, script, python, device = side
    threads = 1
    if device == "cpu" and given.device != "cpu":
        threads = given.cores
    try:
        line = run(
            SCRIPTS[script],
            python,
            folder,
            threads,
            given.root or Path(),
            "--device",
            device,
            # none goes on after the time of all of them
            limit=min(given.limit, max(1.0, given.began + given.seconds - time.monotonic())),
        )
    except (SystemExit, subprocess.TimeoutExpired, OSError, ValueError, IndexError) as error:
        line = {"failed": str(error)}
    return {"workload": key} | line | {"contender": name}


def turns(given: argparse.Namespace, folder: Path) -> Iterator[Line]:
    """Yield the lines of all runs: repetitions one after another, within each the workloads, and in each of them the
    contenders, of which another one begins every time."""
    sides = dict[str, list[Side]]()
    for repetition in range(given.repetitions):
        for key in given.workloads:
            if repetition == 0:
                try:
                    sides[key] = prepare(key, given, folder / key)
                except Exception as error:  # the other workloads may go
                    yield {
                        "workload": key,
                        "contender": "all",
                        "failed": f"{type(error).__name__}: {error}",
                    }
            own = sides.get(key, [])
            for place in range(len(own)):
                if time.monotonic() - given.began > given.seconds:
                    return
                yield attempt(key, own[(repetition + place) % len(own)], given, folder / key)


def summaries(found: list[Line]) -> list[Line]:
    """Return a line for each workload and contender that ran."""
    groups: dict[tuple[str, str], list[Line]] = {}
    for line in found:
        if "failed" not in line:
            groups.setdefault((line["workload"], line["contender"]), []).append(line)
    order = sorted(
        groups, key=lambda one: list(WORKLOADS).index(one[0])
    )  # stable: contenders as they came
    return [summary(key, groups[key, name], "wall") for key, name in order]


def table(lines: list[Line]) -> str:
    """The lines as a Markdown table."""
    names = [
        "workload",
        "contender",
        "seconds a round (least to most)",
        "1,500 rounds",
        "against fedmtl",
    ]
    names += ["GPU MiB", "final loss"]
    rows = [f"| {' | '.join(names)} |", "| --- | --- | ---: | ---: | ---: | ---: | ---: |"]
    for line in lines:
        times = ratio(line, lines)
        told = (
            "1"
            if line["contender"] == "fedmtl"
            else "no ratio"
            if times is None
            else f"{times:.2f} x"
        )
        cells = [
            line["workload"], f"{line['contender']} {line['version']}",
            f"{line['seconds']:.5f} ({line['least']:.5f} to {line['most']:.5f})", f"{PLANNED * line['seconds']:.1f} s",
            told, line["gpu_mib"] or "", f"{line['loss']:.4f}",
        ]  # fmt: skip
        rows.append(f"| {' | '.join(map(str, cells))} |")
    return "\n".join(rows)


def main() -> None:
    """Test, compare, print the lines and the table, and write them where asked."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", maxsplit=1)[0])
    parser.add_argument(
        "--root", type=existing, help="LEAF FEMNIST, for W1 and W2; none takes random images"
    )
    parser.add_argument(
        "--jax-python", type=interpreter, help="of an environment with jax and torch"
    )
    parser.add_argument("--cores", type=int, default=2, help="of fedmtl on the CPU")
    parser.add_argument(
        "--pfl-python",
        type=interpreter,
        help="interpreter of an environment with pfl; none leaves it out",
    )
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--workloads", nargs="+", choices=list(WORKLOADS), default=list(WORKLOADS))
    parser.add_argument("--repetitions", type=int, default=5, help="processes of every contender")
    parser.add_argument("--rounds", type=int, default=20, help="timed rounds in each of them")
    parser.add_argument(
        "--small",
        action="store_true",
        help="cohorts of 4, and 20 clients of 6 to 12 images where they are made up",
    )
    parser.add_argument("--tests", action="store_true", help="first run the tests that need a GPU")
    parser.add_argument("--limit", type=float, default=300.0, help="seconds of one process at most")
    parser.add_argument(
        "--seconds", type=float, default=float("inf"), help="after which no further one begins"
    )
    parser.add_argument("--out", type=Path, help="folder for gpu-runs.jsonl, gpu.jsonl and gpu.md")
    given = parser.parse_args()
    given.began = time.monotonic()  # the tests count as well
    about = machine()
    if given.device != "cpu":
        about = f"{torch.cuda.get_device_name(given.device)}; {about}"
    print(about, flush=True)
    failed = False
    if given.tests:
        command = [sys.executable, "-m", "pytest", "-n", "0", "-m", "gpu", "-rs"]
        root = Path(__file__).resolve().parents[2]
        said = "The tests that need a GPU pass."
        try:
            subprocess.run(command, cwd=root, check=True, timeout=TEST_SECONDS)
        except subprocess.CalledProcessError:
            said = "The tests that need a GPU fail."
        except subprocess.TimeoutExpired:
            said = f"The tests that need a GPU did not end in {TEST_SECONDS:.0f} seconds."
        failed = not said.endswith("pass.")
        print(said, flush=True)
    found: list[Line] = []
    with tempfile.TemporaryDirectory() as folder:
        for line in turns(given, Path(folder)):
            print(json.dumps(line), flush=True)
            found.append(line)
            failed |= "failed" in line
            if given.out is not None:
                lines = summaries(found)
                given.out.mkdir(parents=True, exist_ok=True)
                for name, those in (("gpu-runs.jsonl", found), ("gpu.jsonl", lines)):
                    (given.out / name).write_text("".join(f"{json.dumps(one)}\n" for one in those))
                (given.out / "gpu.md").write_text(f"{about}\n\n{table(lines)}\n")
    print(
        f"At most {given.repetitions} repetitions of {given.rounds} rounds.\n\n{table(summaries(found))}"
    )
    raise SystemExit(int(failed))


if __name__ == "__main__":
    main()
