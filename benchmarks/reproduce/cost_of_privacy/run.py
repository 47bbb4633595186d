r"""The cost of privacy of an asynchronous learner and the value of collaboration: loans, hospital stays, incomes.

Figures 2 to 11 of Farokhi, Wu, Smith, Kaafar (TIFS 2021) with sound noise on openly published tables: an epsilon is
that of a whole run, and the repetitions of a run are one batched program. Writes table.csv, the plots and the tables of
README.md beside this file. Finished parts are kept in --out and not repeated.

    python benchmarks/reproduce/cost_of_privacy/run.py --root /path/to/lending --hospital /path/to/hospital \
        --adult /path/to/adult
    python benchmarks/reproduce/cost_of_privacy/run.py --root /path/to/lending --hospital /path/to/hospital \
        --parts hospital hospital_bands                            # only these; the tables and plots of others stay
"""

from __future__ import annotations

import argparse
import json
import math
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path

import torch

HERE = Path(__file__).parent
sys.path[:0] = [str(HERE), str(HERE.parent)]

import report  # noqa: E402
from collaboration import Collaboration  # noqa: E402
from hospitals import hospital, hospital_bands, timeline  # noqa: E402
from machine import machine, machine_value  # noqa: E402
from setting import (  # noqa: E402
    CLIP,
    Horizon,
    Row,
    budget,
    clocks,
    from_public,
    kappa_for,
    lending,
    quartiles,
    references,
    value_rows,
)
from simulate import simulate  # noqa: E402
from sweep import existing  # noqa: E402

from fedmtl.algorithms.async_learner.algorithm import AsyncLearner  # noqa: E402
from fedmtl.schedules import PoissonClocks  # noqa: E402

BAND_EPSILONS, BAND_RUNS = (0.3, 1.0, 10.0), 100
TICKS = (1, 2, 5, 10, 20, 50, 100, 200, 350, 500, 750, 1000)
EPSILONS = tuple(0.1 * 2 ** (k / 2) for k in range(17))  # 0.1 .. 25.6
SIZES = (100, 141, 200, 283, 400, 566, 800, 1131, 1600, 2263, 3000)
GRID_DEALS, GRID_RUNS = 3, 100
VALUE_OWNERS = {90: (3, 5, 10, 30, 100), 300: (3, 10, 30)}
VALUE_EPSILONS = (1.0, 3.0, 10.0, 30.0, 100.0, 300.0)
VALUE_DEALS, VALUE_RUNS = 5, 20


def bands(root: Path) -> list[Row]:
    """Figure 2: psi along a run of 3 owners with all records, at 3 epsilons; 100 repetitions in one program.

    Noise is addressed by tick, so that a run cut off at a tick is the beginning of the whole one.
    """
    data, public = lending(root, 3, 3000, 0)
    psi, rows = Collaboration(AsyncLearner(), data).psi, []
    short = clocks(3, BAND_RUNS, 1)
    long = (
        PoissonClocks(activations=max(TICKS))
        .bind(3)
        .activations(1, 0, max(TICKS), replicates=BAND_RUNS)
        .client
    )
    plans = (("10 answers an owner", short, AsyncLearner, range(1, short.shape[1] + 1)),
             ("horizon T = 1000", long, Horizon, TICKS))  # fmt: skip
    for plan, clients, kind, ticks in plans:
        length = clients.shape[1]
        caps = None if kind is Horizon else torch.bincount(clients[0], minlength=3).numpy()
        for epsilon in BAND_EPSILONS:
            learner = kind(horizon=length)
            chosen = kappa_for(learner, public, [3000] * 3, epsilon, clients[:10], caps=caps)
            learner = replace(learner, kappa=chosen.kappa)
            for tick in ticks:
                theta = simulate(
                    learner, data, budget(epsilon), clients[:, :tick], caps=caps, seed=3
                )
                row = {
                    "plan": plan,
                    "epsilon": epsilon,
                    "tick": tick,
                    "kappa": chosen.kappa,
                    "runs": BAND_RUNS,
                }
                rows.append(row | quartiles(psi(theta)))
    return [*rows, {"plan": "references", **references(data, public, AsyncLearner())}]


def grid(root: Path) -> list[Row]:
    """Figures 4 and 5: psi of 3 owners by records and epsilon.

    Rules: ``fixed``, one kappa for all, the one that public rows choose without noise; ``chosen``, what public rows
    choose for the setting; ``public``, the fixed kappa with owners whose records are drawn from the public ones.
    """
    _, public = lending(root, 3, 100, 0)
    learner = AsyncLearner()
    trial = clocks(3, GRID_RUNS, 2)
    fixed = kappa_for(learner, public, [max(SIZES)] * 3, math.inf, trial).kappa
    rows: list[Row] = []
    for place, size in enumerate(SIZES):
        deals = [lending(root, 3, size, deal)[0] for deal in range(GRID_DEALS)]
        for epsilon in (*EPSILONS, math.inf):
            every = place % 2 == 0 and (epsilon == math.inf or EPSILONS.index(epsilon) % 2 == 0)
            row: Row = {"records": size, "epsilon": epsilon, "runs": GRID_DEALS * GRID_RUNS}
            plans = [(fixed, deals, "fixed")]
            if every:
                chosen = kappa_for(learner, public, [size] * 3, epsilon, trial).kappa
                plans += [
                    (chosen, deals, "chosen"),
                    (fixed, [from_public(public, 3, size, 11)], "public"),
                ]
            for kappa, data, name in plans:
                tried = replace(learner, kappa=kappa)
                values = []
                for own in data:
                    seed = 1000 + len(rows) * 10 + len(values)  # every mean has noise of its own
                    theta = simulate(
                        tried, own, budget(epsilon), clocks(3, GRID_RUNS, seed), seed=seed
                    )
                    values.append(float(Collaboration(learner, own).psi(theta).mean()))
                rows.append(
                    {
                        **row,
                        "kappa": kappa,
                        "rule": name,
                        "psi": sum(values) / len(values),
                        "deals": values,
                    }
                )
    return rows


def unclipped(root: Path) -> list[Row]:
    """The fixed kappa of the grid without clipping, under the same noise: a bound and epsilons that are so many times
    larger. What clipping does to the slopes; not a setting for use, epsilon is written as in the grid."""
    learner, times, rows = AsyncLearner(kappa=10.0), 1000.0, []
    for size in SIZES[4:]:
        deals = [lending(root, 3, size, deal)[0] for deal in range(GRID_DEALS)]
        for epsilon in (*EPSILONS, math.inf):
            values = []
            for own in deals:
                seed = 50_000 + len(rows) * 10 + len(values)
                privacy, clients = budget(times * epsilon, times * CLIP), clocks(3, GRID_RUNS, seed)
                theta = simulate(learner, own, privacy, clients, seed=seed)
                values.append(float(Collaboration(learner, own).psi(theta).mean()))
            row: Row = {
                "records": size,
                "epsilon": epsilon,
                "runs": GRID_DEALS * GRID_RUNS,
                "rule": "unclipped",
            }
            rows.append(
                {**row, "kappa": learner.kappa, "psi": sum(values) / len(values), "deals": values}
            )
    return rows


def value(root: Path) -> list[Row]:
    """Figure 6: psi of the learner by number of owners and epsilon, against models without noise."""
    return value_rows(
        partial(lending, root), AsyncLearner(), VALUE_OWNERS, VALUE_EPSILONS, deals=VALUE_DEALS, runs=VALUE_RUNS
    )  # fmt: skip


def main() -> None:
    """Parse the command line, simulate what is missing, write tables and plots."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", maxsplit=1)[0])
    parser.add_argument("--root", type=existing, help="loans_full_schema.csv.gz, or its folder")
    parser.add_argument(
        "--hospital", type=existing, help="azpro.csv, or its folder; without it no hospital part"
    )
    parser.add_argument(
        "--adult",
        type=existing,
        help="adult.csv.gz, or its folder; without it no support vector machine",
    )
    parser.add_argument(
        "--out",
        type=Path,
        default=Path("outputs/reproduce/cost_of_privacy"),
        help="parts are kept here",
    )
    parser.add_argument("--parts", nargs="+", choices=report.PARTS, default=list(report.PARTS))
    parser.add_argument(
        "--collect", action="store_true", help="simulate nothing; tables of the finished parts"
    )
    arguments = parser.parse_args()
    if arguments.root is None and not arguments.collect:
        parser.error("--root is needed, except with --collect")
    parts: dict[str, Callable[[], list[Row]]] = {
        name: partial(part, arguments.root)
        for name, part in (
            ("bands", bands),
            ("grid", grid),
            ("unclipped", unclipped),
            ("value", value),
        )
    }
    if arguments.hospital is not None:
        parts["hospital"] = partial(hospital, arguments.hospital)
        parts["hospital_bands"] = partial(hospital_bands, arguments.hospital)
        parts["timeline"] = partial(timeline, arguments.hospital)
    if arguments.adult is not None:
        parts["machine"] = partial(machine, arguments.adult)
        parts["machine_value"] = partial(machine_value, arguments.adult)
    torch.set_num_threads(1)
    arguments.out.mkdir(parents=True, exist_ok=True)
    for name, part in parts.items():
        file = arguments.out / f"{name}.json"
        if name in arguments.parts and not arguments.collect and not file.exists():
            began = time.monotonic()
            rows = part()
            file.write_text(json.dumps(rows, indent=1))
            print(f"{name}: {time.monotonic() - began:.0f} s", flush=True)
    report.write(
        {
            name: json.loads((arguments.out / f"{name}.json").read_text())
            for name in arguments.parts
            if (arguments.out / f"{name}.json").exists()
        },
        HERE,
    )


if __name__ == "__main__":
    main()
