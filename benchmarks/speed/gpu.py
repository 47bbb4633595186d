"""Rounds on a GPU: fedmtl there and on the CPU, JAX and a plain PyTorch loop, on the same work.

The first command to run on a machine with a GPU. It ends within ``--seconds``, and needs what fedmtl itself does;
JAX takes part if ``--jax-python`` has it, pytest if it is installed, and no data are needed: W1, W2 and W5 are on
random images of as many clients as LEAF FEMNIST has where no ``--root`` is given, the others always, since the time of
a round does not depend on what images show.

First ``--tests`` runs the tests that need a GPU, for 90 seconds at most. Then every contender runs once on every
workload, each in a process of its own that prints a line of JSON: seconds a round (a round ends when the GPU has),
memory, final loss. A further process measures facts about fedmtl: the largest difference of its models from those of
the CPU, both in float64, and the kernels, copies and waits of a round. All of that is then repeated. What fails, takes
longer than ``--limit`` or would begin after ``--seconds`` is said, and the rest goes on; each line is printed and
written when it is there.

    python benchmarks/speed/gpu.py --tests --out gpu --seconds 360
    python benchmarks/speed/gpu.py --device cpu --small --repetitions 1 --rounds 2
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import torch
from gpu_tables import page, summaries
from gpu_workloads import FACTS, ON_CPU, PROGRAMS, WORKLOADS, Side, prepare, sides_of
from rounds import Line, existing, interpreter, machine, run

ROOT = Path(__file__).resolve().parents[2]
TEST_SECONDS = 90.0


def tests_said() -> str:
    """Run the tests that need a GPU, and return how they ended."""
    if importlib.util.find_spec("pytest") is None:
        return "The tests that need a GPU did not run: pytest is not installed."
    # only their files: others need packages that may not be there, and take time to be read
    files = [file for file in (ROOT / "tests").rglob("test_*.py") if "mark.gpu" in file.read_text()]
    command = [sys.executable, "-m", "pytest", "-o", "addopts=", "-q", "-m", "gpu", "-rs"]
    command.append("--continue-on-collection-errors")
    try:
        done = subprocess.run(
            [*command, *map(str, files)], cwd=ROOT, check=False, timeout=TEST_SECONDS
        )
    except subprocess.TimeoutExpired:
        return f"The tests that need a GPU did not end in {TEST_SECONDS:.0f} seconds."
    if done.returncode:
        return f"The tests that need a GPU fail, with exit status {done.returncode}."
    return "The tests that need a GPU pass."


def attempt(key: str, side: Side, given: argparse.Namespace, folder: Path) -> Line:
    """Run one process once and return its line, or one that says how it failed."""
    threads = 1
    if side.device == "cpu" and given.device != "cpu":
        threads = given.cores
    more = ["--device", side.device]
    if side.rounds is not None:
        more += ["--rounds", str(side.rounds)]
    # none goes on after the time of all of them
    left = given.began + given.seconds - time.monotonic()
    try:
        line = run(
            PROGRAMS[side.name],
            side.python,
            folder,
            threads,
            given.root or Path(),
            *more,
            limit=min(given.limit, max(1.0, left)),
        )
    except (SystemExit, subprocess.TimeoutExpired, OSError, ValueError, IndexError) as error:
        line = {"failed": str(error)}
    return {"workload": key} | line | {"contender": side.name}


def turns(given: argparse.Namespace, folder: Path) -> Iterator[Line]:
    """Yield the lines of all processes: repetitions one after another, within each the workloads, and in each of them
    the contenders, of which another one begins every time. The facts, which have no spread, come once."""
    written = []
    for repetition in range(given.repetitions):
        for key in given.workloads:
            if time.monotonic() - given.began > given.seconds:
                return
            if repetition == 0:
                try:
                    prepare(key, given, folder / key)
                    written.append(key)
                except Exception as error:  # the other workloads may go
                    said = f"{type(error).__name__}: {error}"
                    yield {"workload": key, "contender": "all", "failed": said}
            if key not in written:
                continue
            sides = sides_of(key, given)
            first = repetition % len(sides)
            sides = sides[first:] + sides[:first]
            if repetition == 0:
                sides.append(Side(FACTS, sys.executable, given.device))
            for side in sides:
                if time.monotonic() - given.began > given.seconds:
                    return
                yield attempt(key, side, given, folder / key)


def parsed() -> argparse.Namespace:
    """Return the command line."""
    usual_jax = None
    if importlib.util.find_spec("jax") is not None:
        usual_jax = sys.executable
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", maxsplit=1)[0])
    parser.add_argument("--root", type=existing, help="LEAF FEMNIST; none takes random images")
    parser.add_argument(
        "--jax-python",
        type=interpreter,
        default=usual_jax,
        help="of an environment with jax and torch; default: this one, if it has jax",
    )
    parser.add_argument(
        "--pfl-python", type=interpreter, help="of one with pfl; none leaves it out"
    )
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--cores", type=int, default=2, help=f"of {ON_CPU}")
    parser.add_argument("--workloads", nargs="+", choices=list(WORKLOADS), default=list(WORKLOADS))
    parser.add_argument("--repetitions", type=int, default=5, help="processes of every contender")
    parser.add_argument("--rounds", type=int, default=20, help="timed rounds in each of them")
    parser.add_argument("--small", action="store_true", help="12 clients, cohorts of 3")
    parser.add_argument("--tests", action="store_true", help="first run the tests that need a GPU")
    parser.add_argument("--limit", type=float, default=60.0, help="seconds of one process at most")
    parser.add_argument(
        "--seconds", type=float, default=float("inf"), help="after which nothing begins or goes on"
    )
    parser.add_argument(
        "--out", type=Path, help="folder for gpu-runs.jsonl, gpu.jsonl and the page gpu.md"
    )
    given = parser.parse_args()
    given.began = time.monotonic()  # the tests count as well
    if given.device != "cpu" and not torch.cuda.is_available():
        parser.error(f"--device {given.device}: PyTorch sees no GPU; --device cpu --small tries it")
    return given


def main() -> None:
    """Test, compare, print the lines and the page, and write them where asked."""
    given = parsed()
    about = machine()
    if given.device != "cpu":
        name = torch.cuda.get_device_name(given.device)
        about = (
            f"{name}, CUDA {torch.version.cuda}, cuDNN {torch.backends.cudnn.version()}; {about}"
        )
    failed = False
    if given.tests:
        said = tests_said()
        failed = not said.endswith("pass.")
        about += f". {said.removesuffix('.')}"
    print(about, flush=True)
    found: list[Line] = []
    with tempfile.TemporaryDirectory() as folder:
        for line in turns(given, Path(folder)):
            print(json.dumps(line), flush=True)
            found.append(line)
            failed |= "failed" in line
            if given.out is not None:
                given.out.mkdir(parents=True, exist_ok=True)
                for name, those in (("gpu-runs.jsonl", found), ("gpu.jsonl", summaries(found))):
                    (given.out / name).write_text("".join(f"{json.dumps(one)}\n" for one in those))
                (given.out / "gpu.md").write_text(page(about, found, given.device))
    print(f"\n{page(about, found, given.device)}")
    raise SystemExit(int(failed))


if __name__ == "__main__":
    main()
