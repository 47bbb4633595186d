r"""Run every driver of this folder, one after another, and write what they measure into one page, tables.md.

Best on an idle machine. rounds.py also leaves rounds.jsonl, rounds.md and rounds.png. gpu.py is for another machine.

    python benchmarks/speed/all.py --root /path/to/leaf_femnist_206.json.zip --out speed --pfl-python /path/to/python \
        --flower-python /path/to/another/python

``--quick`` shows in three minutes that all of them run: sizes are so small that their numbers say nothing.
"""

from __future__ import annotations

import argparse
import shlex
import subprocess
import sys
import time
from pathlib import Path

from rounds import existing, interpreter

HERE = Path(__file__).parent
QUICK = {  # driver -> what it is told in place of the sizes of a measurement
    "rounds.py": "--workloads W2-fedprox --repetitions 1 --rounds 1 --threads 1",
    "frozen.py": "--rounds 1 --clients 10",
    "asynchronous.py": "--events 50",
    "mp_mtl.py": "--iterations 5 --runs 2 --loop-runs 1 --repeats 1",
    "p2p.py": "--part loop --repeats 1",
    "noise.py": "--sizes 10000 --repetitions 3",
    "secure.py": "--clients 7 --colluding 1 --missing 1 --lost 1 --numbers 10000",
    "buffered.py": "--clients 120 --rounds 5",
    "ranks.py": "--clients 60 --cohort 20 --rounds 1",
    "population.py": "--clients 1000 --rounds 2",
}


def drivers(given: argparse.Namespace) -> dict[str, list[str]]:
    """Name of the output -> command, without the interpreter."""
    rounds = ["rounds.py", "--root", str(given.root), "--repetitions", str(given.repetitions)]
    rounds += [
        "--rounds",
        str(given.rounds),
        *(["--pfl-python", given.pfl_python] if given.pfl_python else []),
    ]
    others = ["--flower-python", given.flower_python] if given.flower_python else []
    others += ["--jax-python", given.jax_python] if given.jax_python else []
    chosen = ["--workloads", *given.workloads] if given.workloads else []
    single = ["--clock", "cpu", "--threads", "1"]
    commands = {
        "rounds": [*rounds, *others, *chosen, "--out", str(given.out)],
        "rounds-busy": [*rounds, "--busy", "2", "--workloads", "W2", "W2-fedprox", "--out", str(given.out / "busy")],
        "frozen": ["frozen.py", "--rounds", "7"],
        "asynchronous": ["asynchronous.py", "--workloads", "learner", "--runs", "1", "100", *single],
        "tasks": ["asynchronous.py", "--workloads", "tasks", "--runs", "1", "100", "--events", "200", *single],
        "mp_mtl": ["mp_mtl.py"],
        "p2p": ["p2p.py"],
        "noise": ["noise.py"],
        "secure": ["secure.py"],
        "buffered": ["buffered.py"],
        "ranks": ["ranks.py", "--ranks", "1", "2", "--repeats", "1"],
        "population": ["population.py"],
    }  # fmt: skip
    if given.quick:
        del commands["rounds-busy"]
        commands = {
            name: [*command, *QUICK[command[0]].split()] for name, command in commands.items()
        }
    return commands


def section(name: str, command: list[str], printed: str, seconds: float) -> str:
    """Return the part of the page on one driver: its command, and what it printed but for lines of JSON."""
    text = "\n".join(line for line in printed.strip().splitlines() if not line.startswith("{"))
    if "| --- " not in text:
        text = f"```text\n{text}\n```"
    return f"## {name}\n\n    python benchmarks/speed/{shlex.join(command)}\n\n{text}\n\nIn {seconds:.0f} s.\n"


def main() -> None:
    """Run them; the failure of one is printed, and the others run."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", maxsplit=1)[0])
    parser.add_argument(
        "--root", type=existing, required=True, help="LEAF FEMNIST: a JSON file, a zip or a folder"
    )
    parser.add_argument("--out", type=Path, required=True, help="folder of the outputs")
    parser.add_argument(
        "--pfl-python",
        type=interpreter,
        help="interpreter of an environment with pfl; none leaves it out",
    )
    parser.add_argument(
        "--flower-python",
        type=interpreter,
        help="interpreter of an environment with flwr[simulation]",
    )
    parser.add_argument(
        "--jax-python", type=interpreter, help="interpreter of an environment with jax and torch"
    )
    parser.add_argument("--repetitions", type=int, default=5)
    parser.add_argument(
        "--rounds", type=int, default=9, help="timed rounds of every process of rounds.py"
    )
    parser.add_argument("--workloads", nargs="+", help="of rounds.py; none takes all")
    parser.add_argument("--only", nargs="+", help="some of the outputs, by name")
    parser.add_argument(
        "--quick", action="store_true", help="in three minutes, to see that all of them run"
    )
    given = parser.parse_args()
    given.out.mkdir(parents=True, exist_ok=True)
    commands = drivers(given)
    if unknown := set(given.only or ()) - set(commands):
        parser.error(f"--only has {', '.join(sorted(unknown))}; accepted: {', '.join(commands)}")
    title = "# Tables of speed" + (
        ", of a quick run whose numbers say nothing" if given.quick else ""
    )
    sections, failed = [title], []
    for name in given.only or commands:
        print(f"{name} ...", flush=True)
        began = time.monotonic()
        words = [sys.executable, str(HERE / commands[name][0]), *commands[name][1:]]
        with open(given.out / f"{name}.txt", "w") as file:
            code = subprocess.run(
                words, stdout=file, stderr=subprocess.STDOUT, check=False
            ).returncode
        printed = (given.out / f"{name}.txt").read_text()
        print(printed, flush=True)
        failed += [name] if code else []
        sections.append(section(name, commands[name], printed, time.monotonic() - began))
        (given.out / "tables.md").write_text("\n".join(sections))
    if failed:
        raise SystemExit(f"failed: {', '.join(failed)}")


if __name__ == "__main__":
    main()
