"""Peer-to-peer learning on synthetic agents and on MovieLens: figures 1, 2 and Table 1 of Bellet et al. 2018.

An epsilon is that of one agent's whole run. Writes table.csv, the plots and the tables of README.md beside this file.
Finished parts are kept in --out and not repeated.

    python benchmarks/reproduce/p2p/run.py --root /path/to/ml-100k
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import torch

HERE = Path(__file__).parent
sys.path[:0] = [str(HERE), str(HERE.parent), str(HERE.parents[2])]

import agents  # noqa: E402
import films  # noqa: E402
import report  # noqa: E402
from peers import Row  # noqa: E402
from sweep import existing  # noqa: E402

PARTS = ("tuning", "curves", "dimensions", "noise", "allocation", "paper", "sound", "centring")


def main() -> None:
    """Parse the command line, simulate what is missing, write tables and plots."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", maxsplit=1)[0])
    parser.add_argument(
        "--root", type=existing, help="u.data, or its folder; without it the synthetic parts alone"
    )
    parser.add_argument(
        "--out", type=Path, default=Path("outputs/reproduce/p2p"), help="parts are kept here"
    )
    parser.add_argument(
        "--collect", action="store_true", help="simulate nothing; tables of the finished parts"
    )
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    arguments.out.mkdir(parents=True, exist_ok=True)

    def kept(name: str) -> list[Row]:
        found: list[Row] = json.loads((arguments.out / f"{name}.json").read_text())
        return found

    parts: dict[str, Callable[[], list[Row]]] = {
        "tuning": agents.tuning,
        "curves": lambda: agents.curves(kept("tuning")),
        "dimensions": lambda: agents.dimensions(kept("tuning")),
        "noise": agents.noise,
        "allocation": agents.allocation,
    }
    if arguments.root is not None:
        parts |= {
            name: partial(part, arguments.root)
            for name, part in (
                ("paper", films.paper_setting),
                ("sound", films.sound_setting),
                ("centring", films.centring),
            )
        }
    for name, part in parts.items():
        file = arguments.out / f"{name}.json"
        if not arguments.collect and not file.exists():
            began, spent = time.monotonic(), time.process_time()
            rows = part()
            file.write_text(json.dumps(rows, indent=1))
            print(
                f"{name}: {time.monotonic() - began:.0f} s, CPU {time.process_time() - spent:.0f} s",
                flush=True,
            )
    report.write(
        {name: kept(name) for name in PARTS if (arguments.out / f"{name}.json").exists()}, HERE
    )


if __name__ == "__main__":
    main()
