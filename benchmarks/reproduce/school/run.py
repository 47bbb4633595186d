"""Local, FedAvg and mean-regularized training on ILEA School with record-level privacy inside each school.

The cross-silo protocol of Liu, Hu, Wu, Smith (NeurIPS 2022) at epsilon 6, delta 1e-3: on the train/test splits of the
authors' code, where the difference to their figures is noise alone, and on fedmtl's own splits through the ``fedmtl``
command, also without privacy. Writes table.csv and the tables of README.md beside this file. Finished runs are kept in
--out and not repeated.

    python benchmarks/reproduce/school/run.py --root /path/to/school.mat
"""

from __future__ import annotations

import argparse
import json
import math
import shlex
import sys
from pathlib import Path
from statistics import mean
from typing import Any

import numpy as np

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE.parent))

from intervals import interval  # noqa: E402
from sweep import Run, existing, launch, markdown, outcomes, replace_section, write_csv  # noqa: E402

from fedmtl import PMTL, FedAvg, FullParticipation, LocalSGD, RecordPrivacy, Trainer, models  # noqa: E402
from fedmtl.data import FederatedDataset  # noqa: E402
from fedmtl.data.readers.school import standardized  # noqa: E402

ROOT = "/path/to/school.mat"
PUBLISHED = {"FedAvg": 0.02564, "Local": 0.02628, "Mean-regularized λ 1": 0.02394}
WORDS = {"FedAvg": "fedavg", "Local": "local", "Mean-regularized λ 1": "pmtl"}
FEW = 5  # rounds of the runs that take seconds
ROUNDS, EPSILON, DELTA, CLIP, LR, BATCH = 200, 6.0, 1e-3, 1.0, 0.01, 32
SHORT = f"authors' first, {FEW} rounds"
AUTHORS = {  # (seed of the split, seed of the noise); the authors' script has --seed 100 and repeats 1000 apart
    "authors' first": tuple((100, seed) for seed in range(5)),
    "authors' first five": tuple((seed, seed) for seed in (100, 1100, 2100, 3100, 4100)),
    SHORT: ((100, 0),),
}
COLUMNS = ("splits", "method", "epsilon", "seeds", "weighted_mse", "weighted_mse_half", "published",
           "difference", "mse", "noise_multiplier", "command")  # fmt: skip


def own_splits(method: str, private: bool) -> Run:
    """One row on fedmtl's splits: the words after ``fedmtl``."""
    name = WORDS[method]
    ways = {
        "fedavg": "algorithm=fedavg finetune=none",
        "local": f"algorithm={'pmtl algorithm.lam=0' if private else 'local'}",  # algorithm=local is on raw records
        "pmtl": "algorithm=pmtl algorithm.lam=1",
    }
    budget = f"privacy=record privacy.epsilon={EPSILON:g} privacy.delta={DELTA:g} privacy.clip_norm={CLIP:g}"
    words = [
        "data=school",
        "data.standardize=client",
        "data.targets=unit",
        "model=linear_regression",
        "loss=half_mse",
        *ways[name].split(),
        f"algorithm.local.lr={LR:g}",
        "algorithm.local.epochs=1",
        f"algorithm.local.batch_size={BATCH}",
        "schedule=full",
        *(budget.split() if private else ["privacy=none"]),
        f"rounds={ROUNDS}",
        f"eval_every={ROUNDS}",
        "baselines=[]",
    ]
    return Run(f"{name}-{'private' if private else 'free'}", tuple(words), (ROUNDS,))


def authors_data(root: Path, seed: int) -> FederatedDataset:
    """The schools cut as the authors cut them, standardized by training rows, scores from 1..70 to 0..1."""
    from scipy.io import loadmat
    from sklearn.model_selection import train_test_split

    content = loadmat(root)
    sides: tuple[dict[str, Any], dict[str, Any]] = ({}, {})
    for number, (x, y) in enumerate(zip(content["X"][0], content["Y"][0], strict=True)):
        scores = (y.ravel().astype(np.float64) - 1) / 69
        parts = train_test_split(x.astype(np.float32), scores, test_size=0.3, random_state=seed)
        for side, features, targets in zip(sides, parts[:2], parts[2:], strict=True):
            side[f"school-{number}"] = features, targets.astype(np.float32)
    return standardized(
        FederatedDataset.from_tensors(sides[0], test=sides[1], classes=None, name="school")
    )


def train_on_authors_splits(root: Path, out: Path) -> None:
    """Every method on the authors' splits, privately; the outcome of each is one JSON file."""
    for splits, pairs in AUTHORS.items():
        rounds = rounds_of(splits)
        for split, seed in pairs:
            missing = [
                method
                for method in PUBLISHED
                if not authors_file(out, method, split, seed, rounds).exists()
            ]
            data = authors_data(root, split) if missing else None
            for method in missing:
                assert data is not None
                found = trained(method, data, seed, rounds)
                file = authors_file(out, method, split, seed, rounds)
                file.parent.mkdir(parents=True, exist_ok=True)
                file.write_text(json.dumps(found))
                print(
                    f"{method}, split {split}, seed {seed}: {found['weighted_mse']:.5f}", flush=True
                )


def trained(method: str, data: FederatedDataset, seed: int, rounds: int) -> dict[str, Any]:
    """The outcome of a private run: errors, epsilon and noise multiplier."""
    local = LocalSGD(lr=LR, epochs=1, batch_size=BATCH)
    algorithms = {"FedAvg": FedAvg(local=local), "Local": PMTL(lam=0.0, local=local),
                  "Mean-regularized λ 1": PMTL(lam=1.0, local=local)}  # fmt: skip
    result = Trainer(
        algorithm=algorithms[method],
        data=data,
        model=models.linear_regression(),
        loss="half_mse",
        schedule=FullParticipation(),
        privacy=RecordPrivacy(clip_norm=CLIP, epsilon=EPSILON, delta=DELTA),
        rounds=rounds,
        seed=seed,
        eval_every=rounds,
        progress=False,
    ).fit()
    final = {name: result.history[-1][name] for name in ("weighted_mse", "mse", "epsilon")}
    return {**final, "noise_multiplier": result.privacy.noise_multiplier}


def rounds_of(splits: str) -> int:
    """How many rounds the runs of a row of the table have."""
    if splits == SHORT:
        return FEW
    return ROUNDS


def authors_file(out: Path, method: str, split: int, seed: int, rounds: int) -> Path:
    return out / "authors" / f"{WORDS[method]}-{split}-{seed}-{rounds}.json"


def collect(seeds: list[int], out: Path, root: str) -> list[dict[str, Any]]:
    """The finished rows."""
    rows: list[dict[str, Any]] = []
    for splits, pairs in AUTHORS.items():
        for method in PUBLISHED:
            files = [
                authors_file(out, method, split, seed, rounds_of(splits)) for split, seed in pairs
            ]
            found = [json.loads(file.read_text()) for file in files if file.exists()]
            if found:
                row = {key: mean(one[key] for one in found) for key in found[0]}
                if len(found) > 1:
                    row["weighted_mse_half"] = interval(one["weighted_mse"] for one in found)[1]
                command = f"python benchmarks/reproduce/school/run.py --root {root}"
                rows.append(
                    {
                        **row,
                        "splits": splits,
                        "method": method,
                        "seeds": len(found),
                        "command": command,
                    }
                )
    for private in (True, False):
        for method in PUBLISHED:
            run = own_splits(method, private)
            for row in outcomes(run, seeds, out):
                own = {"splits": "fedmtl's", "method": method, "command": command_of(run, root)}
                rows.append({**row, **own, "epsilon": row["epsilon"] if private else None})
    for row in rows:
        if row["epsilon"] is not None and row["splits"] != SHORT:
            row["published"] = PUBLISHED[row["method"]]
            row["difference"] = row["weighted_mse"] - row["published"]
    return rows


def command_of(run: Run, root: str) -> str:
    return f"fedmtl {shlex.join(run.command(root, 'SEED'))}"


def table(rows: list[dict[str, Any]]) -> str:
    """The table of README.md."""
    titles = ["splits", "epsilon", "method", "mean squared error:", "published:", "difference:",
              "mean over schools:", "seeds:"]  # fmt: skip
    lines = []
    for row in rows:
        difference = row.get("difference")
        half = row.get("weighted_mse_half", math.nan)
        lines.append(
            [
                row["splits"],
                "none" if row["epsilon"] is None else f"{row['epsilon']:.2f}",
                row["method"],
                f"{row['weighted_mse']:.5f}" + ("" if math.isnan(half) else f" ± {half:.5f}"),
                "" if difference is None else f"{row['published']:.5f}",
                "" if difference is None else f"{difference:+.5f}",
                f"{row['mse']:.5f}",
                str(row["seeds"]),
            ]
        )
    return markdown(titles, lines)


def commands(rows: list[dict[str, Any]]) -> str:
    """The command of every number."""
    return (
        "```\n"
        + "".join(f"{command}\n" for command in dict.fromkeys(row["command"] for row in rows))
        + "```\n"
    )


def main() -> None:
    """Parse the command line, train what is missing, write the tables."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", maxsplit=1)[0])
    parser.add_argument("--root", type=existing, help="school.mat")
    parser.add_argument(
        "--out", type=Path, default=Path("outputs/reproduce/school"), help="runs are kept here"
    )
    parser.add_argument(
        "--seeds", type=int, nargs="+", default=[0, 1, 2, 3, 4], help="of fedmtl's splits"
    )
    parser.add_argument(
        "--collect", action="store_true", help="train nothing; tables of the finished runs"
    )
    arguments = parser.parse_args()
    if arguments.root is None and not arguments.collect:
        parser.error("--root is needed, except with --collect")
    if not arguments.collect:
        train_on_authors_splits(arguments.root, arguments.out)
        runs = [own_splits(method, private) for private in (True, False) for method in PUBLISHED]
        launch(runs, arguments.seeds, root=arguments.root, out=arguments.out)
    rows = collect(arguments.seeds, arguments.out, ROOT)
    write_csv(HERE / "table.csv", rows, COLUMNS)
    replace_section(HERE / "README.md", "errors", table(rows))
    replace_section(HERE / "README.md", "commands", commands(rows))


if __name__ == "__main__":
    main()
