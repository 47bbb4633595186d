"""The experiments of Hu et al. 2023 on small models: Figures 1, 2, 3, 7 and 8, Tables 1 and 3.

The problems and the settings that methods choose among are those of ../comparison, whose table is read for Figures 3, 7
and 8. Everything that is chosen here, too, is chosen on validation rows, which are held out from the training rows.

    python benchmarks/reproduce/pmtl/run.py --femnist leaf_femnist_206.json.zip
    python benchmarks/reproduce/pmtl/run.py --collect       # only the tables and figures
"""

from __future__ import annotations

import argparse
import json
import math
import os
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

HERE = Path(__file__).parent
sys.path[:0] = [str(HERE.parent), str(HERE.parent / "comparison"), str(HERE.parents[2])]

from settings import STUDIES, Setting, Study, held_out, load  # noqa: E402
from sweep import existing  # noqa: E402
from tables import write_tables  # noqa: E402

from benchmarks.baselines.concatenated import ConcatenatedModels  # noqa: E402
from fedmtl import FederatedDataset, Finetune, LocalSGD, Result, models  # noqa: E402
from fedmtl.trainer.evaluation import evaluate_each  # noqa: E402
from fedmtl.trainer.make_problem import ProblemSettings, build_problem  # noqa: E402

EPSILONS = (0.3, 1.0, 3.0, 10.0, math.inf)
METHODS = {"MTL": "PMTL", "global": "FedAvg"}  # columns of Table 1, by method
JOBS = (*METHODS.values(), "concatenated", "curve")
PROBLEMS = ("digits", "femnist")
KINDS = ("vanilla", "mean", "kl", "ewc")


def ways(study: Study) -> dict[str, list[Finetune]]:
    """Three settings of each kind of finetuning."""

    def sgd(lr: float, epochs: int) -> LocalSGD:
        return replace(study.solver, lr=lr, epochs=epochs)

    if study.name == "digits":
        return {
            "vanilla": [Finetune(kind="vanilla", local=sgd(0.5, epochs)) for epochs in (2, 5, 20)],
            "mean": [
                Finetune(kind="mean", lam=lam, local=sgd(0.5, 20)) for lam in (0.03, 0.1, 0.3)
            ],
            "kl": [Finetune(kind="kl", lam=lam, local=sgd(0.5, 20)) for lam in (0.03, 0.1, 1.0)],
            "ewc": [
                Finetune(kind="ewc", lam=lam, local=sgd(0.5, 20)) for lam in (1.0, 10.0, 100.0)
            ],
        }
    return {
        "vanilla": [Finetune(kind="vanilla", local=sgd(*way)) for way in ((0.03, 1), (0.03, 5), (0.1, 20))],
        "mean": [Finetune(kind="mean", lam=lam, local=sgd(0.1, 10)) for lam in (0.1, 1.0, 5.0)],
        "kl": [Finetune(kind="kl", lam=lam, local=sgd(0.03, 20)) for lam in (1.0, 3.0, 10.0)],
        "ewc": [Finetune(kind="ewc", lam=lam, local=sgd(0.1, 10)) for lam in (10.0, 100.0, 1000.0)],
    }  # fmt: skip


def score(result: Result, data: FederatedDataset, way: Finetune, seed: int) -> float:
    """The mean test accuracy after finetuning each client's model of ``result``."""
    problem = build_problem(data, models.softmax_regression(), ProblemSettings(rounds=1, seed=seed))
    everyone = torch.arange(problem.clients)
    tuned = way.train(problem, result.personal, everyone)
    scores = evaluate_each(problem, lambda own: tuned[own], everyone).by_client(problem)["accuracy"]
    return sum(scores.values()) / len(scores)


def cell(
    study: Study,
    method: str,
    data: FederatedDataset,
    inner: FederatedDataset,
    epsilon: float,
    seed: int,
) -> Any:
    """One method at one epsilon: as trained, and after each kind of finetuning, everything chosen on ``inner``."""
    settings = study.methods()[method]
    best, tried, _ = study.choose(inner, settings, epsilon, seed)
    result = study.train(data, settings[best], epsilon, seed)
    found = {"trained": result.final["accuracy"], "chosen": settings[best].text()}
    for kind, choices in ways(study).items():
        scores = [score(tried, inner, way, seed) for way in choices]
        chosen = max(range(len(choices)), key=scores.__getitem__)
        found[kind] = score(result, data, choices[chosen], seed)
        found[f"{kind} validation"], found[f"{kind} chosen"] = (
            scores[chosen],
            choices[chosen].text(),
        )
    return found


def concatenated(study: Study, data: FederatedDataset, epsilon: float, seed: int) -> Any:
    """Figure 1: client-level privacy on all models together, with the smallest and the largest clip."""
    runs = [
        study.train(data, Setting(ConcatenatedModels(local=study.solver), clip), epsilon, seed)
        for clip in (study.clips[0], study.clips[-1])
    ]
    return {"trained": max(run.final["accuracy"] for run in runs)}


def curve(study: Study, data: FederatedDataset, seed: int) -> Any:
    """Figure 2: training loss, and the epsilon that is spent, by round, of PMTL at epsilon 3."""
    scored = replace(data, test=data.train)
    result = study.train(scored, study.methods()["PMTL"][5], 3.0, seed, eval_every=1)
    return {
        "rounds": [
            {key: row[key] for key in ("round", "epsilon", "loss")} for row in result.history
        ]
    }


def work(
    study: Study, root: Path | None, seed: int, names: list[str], epsilons: list[float], out: Path
) -> None:
    """Compute the cells that have no file in ``out`` yet."""
    data = load(study.name, root, seed)
    inner = held_out(data, seed)
    jobs: list[tuple[str, float]] = [(name, e) for e in EPSILONS for name in METHODS.values()]
    jobs += [("concatenated", e) for e in EPSILONS if e < math.inf] + [("curve", 3.0)]
    for name, epsilon in jobs:
        if name not in names or epsilon not in epsilons:
            continue
        file = out / f"{study.name}-{seed}-{epsilon:g}-{name}.json"
        if file.exists():
            continue
        began = time.process_time()
        if name == "curve":
            found = curve(study, data, seed)
        elif name == "concatenated":
            found = concatenated(study, data, epsilon, seed)
        else:
            found = cell(study, name, data, inner, epsilon, seed)
        found |= {"study": study.name, "method": name, "epsilon": epsilon, "seed": seed}
        part = file.with_suffix(f".{os.getpid()}")
        part.write_text(json.dumps(found))
        part.replace(file)
        shown = ", ".join(f"{key} {found[key]:.4f}" for key in ("trained", *KINDS) if key in found)
        print(f"{study.name}, seed {seed}, epsilon {epsilon:g}, {name}: {shown} "
              f"({time.process_time() - began:.0f} s)", flush=True)  # fmt: skip


def main() -> None:
    """Parse the command line, train what is missing, write the tables."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", maxsplit=1)[0])
    parser.add_argument("--studies", nargs="+", choices=PROBLEMS, default=list(PROBLEMS))
    parser.add_argument(
        "--seeds",
        type=int,
        nargs="+",
        default=[0, 1, 2, 3, 4],
        help="of rows, start, cohorts, noise",
    )
    parser.add_argument(
        "--epsilons", type=float, nargs="+", default=list(EPSILONS), help="inf: no privacy"
    )
    parser.add_argument(
        "--methods", nargs="+", choices=JOBS, default=list(JOBS), help="PMTL and FedAvg: Table 1"
    )
    parser.add_argument("--femnist", type=existing, help="leaf_femnist_206.json.zip")
    parser.add_argument("--out", type=Path, default=Path("outputs/reproduce/pmtl"))
    parser.add_argument("--collect", action="store_true", help="train nothing")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    arguments.out.mkdir(parents=True, exist_ok=True)
    if not arguments.collect:
        for name in arguments.studies:
            root = arguments.femnist if name == "femnist" else None
            if name == "femnist" and root is None:
                parser.error(
                    "the study femnist needs --femnist FILE; or leave it out: --studies digits"
                )
            for seed in arguments.seeds:
                work(
                    STUDIES[name], root, seed, arguments.methods, arguments.epsilons, arguments.out
                )
    write_tables(arguments.out, HERE)


if __name__ == "__main__":
    main()
