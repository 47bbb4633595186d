"""The cost of privacy of an asynchronous learner and the value of collaboration, on lending and hospital records.

Figures 2, 4, 5, 6, 9 and 10 of Farokhi, Wu, Smith, Kaafar (TIFS 2021) with sound noise on openly published tables: an
epsilon is that of a whole run, and the repetitions of a run are one batched program. Writes table.csv, the plots and
the tables of README.md beside this file. Finished parts are kept in --out and not repeated.

    python benchmarks/reproduce/cost_of_privacy/run.py --root /path/to/lending --hospital /path/to/hospital
"""

from __future__ import annotations

import argparse
import json
import math
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from functools import cache, partial
from pathlib import Path
from typing import Any

import torch

HERE = Path(__file__).parent
sys.path[:0] = [str(HERE), str(HERE.parent)]

import report  # noqa: E402

from fedmtl import RecordPrivacy  # noqa: E402
from fedmtl.algorithms.async_learner import AsyncLearner  # noqa: E402
from fedmtl.algorithms.collaboration import KAPPAS, Collaboration, KappaChoice, choose_kappa, simulate  # noqa: E402
from fedmtl.algorithms.linear import LinearData  # noqa: E402
from fedmtl.data import Examples  # noqa: E402
from fedmtl.data.hospital import hospital_owners  # noqa: E402
from fedmtl.data.lending import lending_owners  # noqa: E402
from fedmtl.schedules import PoissonClocks  # noqa: E402

Row = dict[str, Any]
CLIP, CAP, CAP_MANY = 5.0, 10, 6  # Xi; answers of an owner, and where there are more than 10 owners
BAND_EPSILONS, BAND_RUNS = (0.3, 1.0, 10.0), 100
TICKS = (1, 2, 5, 10, 20, 50, 100, 200, 350, 500, 750, 1000)
EPSILONS = tuple(0.1 * 2 ** (k / 2) for k in range(17))  # 0.1 .. 25.6
SIZES = (100, 141, 200, 283, 400, 566, 800, 1131, 1600, 2263, 3000)
GRID_DEALS, GRID_RUNS = 3, 100
CANDIDATES = (0.1, 0.3, *KAPPAS)
VALUE_OWNERS = {90: (3, 5, 10, 30, 100), 300: (3, 10, 30)}
VALUE_EPSILONS = (1.0, 3.0, 10.0, 30.0, 100.0, 300.0)
VALUE_DEALS, VALUE_RUNS, HOSPITAL_RUNS = 5, 20, 100
HOSPITAL_EPSILONS = (0.1, 0.3, 1.0, 3.0, 10.0, 30.0, 100.0)
HOSPITAL_CLIPS, HOSPITAL_CAPS = (1.0, 2.0, 5.0), (6, 20, 50)


def owners_rows(examples: Examples, *, bias: bool = False) -> LinearData:
    """Examples as rows of a linear model, an owner each."""
    counts = examples.counts.tolist()
    return LinearData(examples.x.double().split(counts), examples.y.double().split(counts), bias)


@cache
def lending(root: Path, owners: int, size: int, deal: int) -> tuple[LinearData, LinearData]:
    """Records of the owners, and the public ones; the same records an owner, however many owners there are."""
    read = lending_owners(root, clients=owners, sizes=size, test_fraction=None, seed=deal)
    return owners_rows(read.data.train), owners_rows(read.public)


def first_owners(data: LinearData, owners: int) -> LinearData:
    return LinearData(data.x[:owners], data.y[:owners], data.bias)


def budget(epsilon: float, clip: float = CLIP) -> RecordPrivacy:
    """Pure epsilon for each owner over all of its answers; infinite: clipping without noise."""
    return RecordPrivacy(clip_norm=clip, epsilon=epsilon, delta=0, mechanism="laplace")


def clocks(owners: int, runs: int, seed: int, cap: int | None = None) -> torch.Tensor:
    """Who answers, (runs, ticks): Poisson clocks until every owner has given all its answers."""
    bound = PoissonClocks(per_client=cap or (CAP if owners <= 10 else CAP_MANY)).bind(owners)
    return bound.events(seed, 0, bound.steps, replicates=runs).client


def from_public(public: LinearData, owners: int, size: int, seed: int) -> LinearData:
    """Owners whose records are drawn from the public ones with replacement."""
    x, y = public.pooled()
    drawn = torch.randint(len(y), (owners, size), generator=torch.Generator().manual_seed(seed))
    return LinearData(tuple(x[i] for i in drawn), tuple(y[i] for i in drawn), public.bias)


def kappa_for(
    learner: AsyncLearner, public: LinearData, counts: list[int], epsilon: float, clients: torch.Tensor, **other: Any
) -> KappaChoice:
    """kappa by simulation on public rows; ``clip`` and ``caps`` may be given."""
    privacy = budget(epsilon, other.pop("clip", CLIP))
    return choose_kappa(
        learner, public, counts=counts, privacy=privacy, clients=clients, kappas=CANDIDATES, seed=7, **other
    )


def references(data: LinearData, public: LinearData, learner: AsyncLearner) -> Row:
    """psi of models without noise: of the owners alone, of the public rows alone, and of theta = 0."""
    together = Collaboration(learner, data)
    alone = [float(together.together.psi(together.alone(i).theta)) for i in range(len(data.x))]
    model = Collaboration(learner, public).together.optimum.theta
    psi = together.together.psi(torch.stack([model, torch.zeros_like(model)]))
    return {"alone": alone, "public": float(psi[0]), "zero": float(psi[1])}


def bands(root: Path) -> list[Row]:
    """Figure 2: psi along a run of 3 owners with all records, at 3 epsilons; 100 repetitions in one program.

    Noise is addressed by tick, so that a run cut off at a tick is the beginning of the whole one.
    """
    data, public = lending(root, 3, 3000, 0)
    psi, rows = Collaboration(AsyncLearner(), data).together.psi, []
    short = clocks(3, BAND_RUNS, 1)
    long = PoissonClocks(events=max(TICKS)).bind(3).events(1, 0, max(TICKS), replicates=BAND_RUNS).client
    plans = (("10 answers an owner", short, None, range(1, short.shape[1] + 1)),
             ("horizon T = 1000", long, "horizon", TICKS))  # fmt: skip
    for plan, clients, cap, ticks in plans:
        length = clients.shape[1]
        caps = None if cap else torch.bincount(clients[0], minlength=3).numpy()
        for epsilon in BAND_EPSILONS:
            learner = AsyncLearner(horizon=length, cap=cap)  # type: ignore[arg-type]
            chosen = kappa_for(learner, public, [3000] * 3, epsilon, clients[:10], caps=caps)
            learner = replace(learner, kappa=chosen.kappa)
            for tick in ticks:
                theta = simulate(learner, data, budget(epsilon), clients[:, :tick], caps=caps, seed=3)
                values = psi(theta)
                low, middle, high = values.quantile(torch.tensor([0.25, 0.5, 0.75]).double()).tolist()
                row = {"plan": plan, "epsilon": epsilon, "tick": tick, "kappa": chosen.kappa, "runs": BAND_RUNS}
                rows.append(row | {"psi": float(values.mean()), "q25": low, "median": middle, "q75": high})
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
                plans += [(chosen, deals, "chosen"), (fixed, [from_public(public, 3, size, 11)], "public")]
            for kappa, data, name in plans:
                tried = replace(learner, kappa=kappa)
                values = []
                for own in data:
                    seed = 1000 + len(rows) * 10 + len(values)  # every mean has noise of its own
                    theta = simulate(tried, own, budget(epsilon), clocks(3, GRID_RUNS, seed), seed=seed)
                    values.append(float(Collaboration(learner, own).together.psi(theta).mean()))
                rows.append({**row, "kappa": kappa, "rule": name, "psi": sum(values) / len(values), "deals": values})
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
                values.append(float(Collaboration(learner, own).together.psi(theta).mean()))
            row: Row = {"records": size, "epsilon": epsilon, "runs": GRID_DEALS * GRID_RUNS, "rule": "unclipped"}
            rows.append({**row, "kappa": learner.kappa, "psi": sum(values) / len(values), "deals": values})
    return rows


def value(root: Path) -> list[Row]:
    """Figure 6: psi of the learner by number of owners and epsilon, against models without noise."""
    rows: list[Row] = []
    learner = AsyncLearner()
    for size, numbers in VALUE_OWNERS.items():
        deals = [lending(root, max(numbers), size, deal) for deal in range(VALUE_DEALS)]
        public = deals[0][1]
        for owners in numbers:
            own = [first_owners(data, owners) for data, _ in deals]
            known = [references(data, public, learner) for data in own]
            alone = [psi for one in known for psi in one["alone"]]
            trial = clocks(owners, VALUE_RUNS, 2)
            for epsilon in (*VALUE_EPSILONS, math.inf):
                found = kappa_for(learner, public, [size] * owners, epsilon, trial)
                values, better = [], []
                for place, data in enumerate(own):
                    seed = 100 * len(rows) + place
                    clients = clocks(owners, VALUE_RUNS, seed)
                    theta = simulate(replace(learner, kappa=found.kappa), data, budget(epsilon), clients, seed=seed)
                    psi = Collaboration(learner, data).together.psi(theta)
                    values.append(float(psi.mean()))
                    better += [float(psi.mean()) < other for other in known[place]["alone"]]
                rows.append(
                    {
                        "records": size,
                        "owners": owners,
                        "epsilon": epsilon,
                        "kappa": found.kappa,
                        "foreseen": found.psi[found.kappa],
                        "runs": VALUE_DEALS * VALUE_RUNS,
                        "psi": sum(values) / VALUE_DEALS,
                        "deals": values,
                        "alone": sum(alone) / len(alone),
                        "public": sum(one["public"] for one in known) / VALUE_DEALS,
                        "zero": sum(one["zero"] for one in known) / VALUE_DEALS,
                        "worth": sum(better) / len(better),
                    }
                )
    return rows


def hospital(root: Path) -> list[Row]:
    """Figures 9 and 10: 17 hospitals with the records they have; cap, clip and kappa are chosen on public rows."""
    read = hospital_owners(root, test_fraction=None)
    data, public = owners_rows(read.data.train, bias=True), owners_rows(read.public, bias=True)
    learner, counts, rows = AsyncLearner(), data.counts.tolist(), []
    known, psi = references(data, public, learner), Collaboration(learner, data).together.psi
    for epsilon in (*HOSPITAL_EPSILONS, math.inf):
        tried = []
        for cap in HOSPITAL_CAPS:
            trial = clocks(len(counts), 10, 2, cap)
            for clip in HOSPITAL_CLIPS:
                found = kappa_for(learner, public, counts, epsilon, trial, clip=clip)
                tried.append((found.psi[found.kappa], cap, clip, found.kappa))
        _, cap, clip, kappa = min(tried)
        clients = clocks(len(counts), HOSPITAL_RUNS, 3, cap)
        values = psi(simulate(replace(learner, kappa=kappa), data, budget(epsilon, clip), clients, seed=5))
        low, middle, high = values.quantile(torch.tensor([0.25, 0.5, 0.75]).double()).tolist()
        mean = float(values.mean())
        row = {"epsilon": epsilon, "cap": cap, "clip": clip, "kappa": kappa, "runs": HOSPITAL_RUNS, "psi": mean}
        worth = sum(mean < other for other in known["alone"])
        rows.append({**row, "q25": low, "median": middle, "q75": high, "worth": worth, "counts": counts, **known})
    return rows


def main() -> None:
    """Parse the command line, simulate what is missing, write tables and plots."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", maxsplit=1)[0])
    parser.add_argument("--root", type=Path, help="loans_full_schema.csv.gz, or its folder")
    parser.add_argument("--hospital", type=Path, help="azpro.csv, or its folder; without it no hospital part")
    parser.add_argument(
        "--out", type=Path, default=Path("outputs/reproduce/cost_of_privacy"), help="parts are kept here"
    )
    parser.add_argument("--collect", action="store_true", help="simulate nothing; tables of the finished parts")
    arguments = parser.parse_args()
    if arguments.root is None and not arguments.collect:
        parser.error("--root is needed, except with --collect")
    parts: dict[str, Callable[[], list[Row]]] = {
        name: partial(part, arguments.root)
        for name, part in (("bands", bands), ("grid", grid), ("unclipped", unclipped), ("value", value))
    }
    if arguments.hospital is not None:
        parts["hospital"] = partial(hospital, arguments.hospital)
    torch.set_num_threads(1)
    arguments.out.mkdir(parents=True, exist_ok=True)
    for name, part in parts.items():
        file = arguments.out / f"{name}.json"
        if not arguments.collect and not file.exists():
            began = time.monotonic()
            rows = part()
            file.write_text(json.dumps(rows, indent=1))
            print(f"{name}: {time.monotonic() - began:.0f} s", flush=True)
    report.write(
        {
            name: json.loads((arguments.out / f"{name}.json").read_text())
            for name in ("bands", "grid", "unclipped", "value", "hospital")
            if (arguments.out / f"{name}.json").exists()
        },
        HERE,
    )


if __name__ == "__main__":
    main()
