"""A few local steps of every client from a released model: the simplest personal model that a run can end with.

Trains FedAvg and PMTL as run.py does, takes the model that was released, and lets every client go on with it on its own
training images (plain SGD, nothing is sent). For the other clients this is post-processing of what they may see anyway,
and changes no epsilon. Writes finetuning.csv and the table of README.md beside this file.

    python benchmarks/reproduce/digits/finetune.py
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from statistics import mean
from typing import Any

import torch

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE.parent))

from intervals import interval  # noqa: E402
from sweep import markdown, replace_section, write_csv  # noqa: E402

from fedmtl import (  # noqa: E402
    PMTL,
    ClientPrivacy,
    FedAvg,
    FederatedDataset,
    FullParticipation,
    Local,
    LocalSGD,
    PoissonSampling,
    Result,
    Trainer,
    load_data,
    models,
)

IMAGES = (5, 10, 20)
EPSILONS = (1.0, 2.0, 4.0, 8.0)
STEPS = (5, 50)  # local steps after which the models are scored
SGD = LocalSGD(lr=0.5, epochs=5, batch_size=10)  # of the main job
METHODS = {"FedAvg": FedAvg(local=SGD), "PMTL λ 1": PMTL(lam=1.0, local=SGD)}
COLUMNS = ("train_images", "method", "epsilon", "steps", "seeds", "accuracy", "accuracy_half", "low", "high",
           "worst_tenth")  # fmt: skip


def released(method: str, data: FederatedDataset, epsilon: float, seed: int) -> Result:
    """A run of the main job's settings."""
    return Trainer(
        algorithm=METHODS[method],
        data=data,
        model=models.softmax_regression(),
        schedule=PoissonSampling(cohort=100),
        privacy=ClientPrivacy(clip_norm=1.5, epsilon=epsilon, delta=1e-5),
        rounds=100,
        seed=seed,
        eval_every=100,
        progress=False,
    ).fit()


def finetuned(run: Result, data: FederatedDataset, seed: int) -> dict[int, dict[str, Any]]:
    """Scores of the clients' models by local steps from the released model of ``run``."""
    stride = STEPS[0]
    history = (
        Trainer(
            algorithm=Local(local=LocalSGD(lr=SGD.lr, steps=stride, batch_size=SGD.batch_size)),
            data=data,
            model=run.shared_model(),
            schedule=FullParticipation(),
            privacy=None,  # nothing is released
            rounds=STEPS[-1] // stride,
            seed=seed,
            eval_every=1,
            progress=False,
        )
        .fit()
        .history
    )
    return {row["round"] * stride: row for row in history if row["round"] * stride in STEPS}


def outcomes(images: int, seeds: list[int]) -> list[dict[str, Any]]:
    """One row a (method, epsilon, steps), averaged over seeds; 0 steps is the run itself, with its personal models."""
    found: dict[tuple[str, float, int], list[dict[str, Any]]] = {}
    for seed in seeds:
        data = load_data("digits", train_images=images, seed=seed)
        for method in METHODS:
            for epsilon in EPSILONS:
                run = released(method, data, epsilon, seed)
                scores = {0: run.final, **finetuned(run, data, seed)}
                for steps, score in scores.items():
                    found.setdefault((method, epsilon, steps), []).append(score)
                shown = ", ".join(
                    f"{steps} steps {score['accuracy']:.4f}" for steps, score in scores.items()
                )
                print(
                    f"{images} images, seed {seed}, {method}, epsilon {epsilon:g}: {shown}",
                    flush=True,
                )
    return [
        {
            "train_images": images,
            "method": method,
            "epsilon": epsilon,
            "steps": steps,
            "seeds": len(scores),
            "accuracy": mean(score["accuracy"] for score in scores),
            "accuracy_half": interval(score["accuracy"] for score in scores)[1],
            "low": min(score["accuracy"] for score in scores),
            "high": max(score["accuracy"] for score in scores),
            "worst_tenth": mean(score["worst_tenth"] for score in scores),
        }
        for (method, epsilon, steps), scores in found.items()
    ]


def table(rows: list[dict[str, Any]]) -> str:
    """One line a (training images, method, steps), one column an epsilon."""
    titles = [
        "training images:",
        "released model",
        "local steps:",
        *(f"epsilon {e:g}:" for e in EPSILONS),
    ]
    lines = []
    for images, method, steps in dict.fromkeys(
        (r["train_images"], r["method"], r["steps"]) for r in rows
    ):
        own = [
            r
            for r in rows
            if (r["train_images"], r["method"], r["steps"]) == (images, method, steps)
        ]
        cells = [f"{r['accuracy']:.3f} ± {r['accuracy_half']:.3f}".replace("0.", ".") for r in own]
        lines.append([str(images), method, str(steps) if steps else "none", *cells])
    return markdown(titles, lines)


def main() -> None:
    """Parse the command line, train, write the table."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", maxsplit=1)[0])
    parser.add_argument(
        "--seeds", type=int, nargs="+", default=[0, 1, 2], help="of data, start and noise"
    )
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    rows = [row for images in IMAGES for row in outcomes(images, arguments.seeds)]
    write_csv(HERE / "finetuning.csv", rows, COLUMNS)
    replace_section(HERE / "README.md", "finetuning", table(rows))


if __name__ == "__main__":
    main()
