r"""Run every driver of this folder, one after another, and keep what each prints: the numbers of the README.

Best on an idle machine. rounds.py also leaves rounds.jsonl, rounds.md and rounds.png. gpu.py is for another machine.

    python benchmarks/speed/all.py --root /path/to/leaf_femnist_206.json.zip --out speed --pfl-python /path/to/python \
        --flower-python /path/to/another/python
"""

from __future__ import annotations

import argparse
import subprocess
import sys
from pathlib import Path

from rounds import existing, interpreter

HERE = Path(__file__).parent


def drivers(given: argparse.Namespace) -> dict[str, list[str]]:
    """Name of the output -> command, without the interpreter."""
    rounds = ["rounds.py", "--root", str(given.root), "--repetitions", str(given.repetitions)]
    rounds += ["--rounds", str(given.rounds), *(["--pfl-python", given.pfl_python] if given.pfl_python else [])]
    flower = ["--flower-python", given.flower_python] if given.flower_python else []
    chosen = ["--workloads", *given.workloads] if given.workloads else []
    single = ["--clock", "cpu", "--threads", "1"]
    return {
        "rounds": [*rounds, *flower, *chosen, "--out", str(given.out)],
        "rounds-busy": [*rounds, "--busy", "2", "--workloads", "W2", "W2-fedprox", "--out", str(given.out / "busy")],
        "frozen": ["frozen.py", "--rounds", "7"],
        "asynchronous": ["asynchronous.py", "--workloads", "learner", "--runs", "1", "100", *single],
        "tasks": ["asynchronous.py", "--workloads", "tasks", "--runs", "1", "100", "--events", "200", *single],
        "mp_mtl": ["mp_mtl.py"],
        "p2p": ["p2p.py"],
        "noise": ["noise.py"],
        "ranks": ["ranks.py", "--ranks", "1", "2", "--repeats", "1"],
        "population": ["population.py"],
    }  # fmt: skip


def main() -> None:
    """Run them; one that fails is said, and the others go on."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", maxsplit=1)[0])
    parser.add_argument("--root", type=existing, required=True, help="LEAF FEMNIST: a JSON file, a zip or a folder")
    parser.add_argument("--out", type=Path, required=True, help="folder of the outputs")
    parser.add_argument(
        "--pfl-python", type=interpreter, help="interpreter of an environment with pfl; none leaves it out"
    )
    parser.add_argument("--flower-python", type=interpreter, help="interpreter of an environment with flwr[simulation]")
    parser.add_argument("--repetitions", type=int, default=5)
    parser.add_argument("--rounds", type=int, default=9, help="timed rounds of every process of rounds.py")
    parser.add_argument("--workloads", nargs="+", help="of rounds.py; none takes all")
    parser.add_argument("--only", nargs="+", help="some of the outputs, by name")
    given = parser.parse_args()
    given.out.mkdir(parents=True, exist_ok=True)
    known = drivers(given)
    failed = []
    for name in given.only or known:
        print(f"{name} ...", flush=True)
        with open(given.out / f"{name}.txt", "w") as file:
            command = [sys.executable, str(HERE / known[name][0]), *known[name][1:]]
            code = subprocess.run(command, stdout=file, stderr=subprocess.STDOUT, check=False).returncode
        print((given.out / f"{name}.txt").read_text(), flush=True)
        failed += [name] if code else []
    if failed:
        raise SystemExit(f"failed: {', '.join(failed)}")


if __name__ == "__main__":
    main()
