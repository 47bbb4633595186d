"""Momentum at the server as a start for finetuning, on the 206 writers of LEAF's FEMNIST file.

python benchmarks/reproduce/starts/femnist.py --femnist leaf_femnist_206.json.zip
"""

from __future__ import annotations

import argparse
import itertools
import sys
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from statistics import mean

import torch

HERE = Path(__file__).parent
sys.path[:0] = [str(HERE.parent), str(HERE.parent / "comparison")]

from scores import Score, by_client, difference, mark, renew_scores, table  # noqa: E402
from settings import STUDIES, Setting, held_out, load  # noqa: E402
from sweep import existing, markdown, replace_section  # noqa: E402

from fedmtl import FedAvg, FederatedDataset, Finetune, Result, ServerOptimizer  # noqa: E402

SETTING, EPSILONS, SEEDS, TUNING = (
    "FEMNIST: 206 writers, starts for finetuning",
    (1.0, 3.0, 10.0),
    range(5),
    10,
)
STUDY = STUDIES["femnist"]
SOLVER = replace(STUDY.solver, epochs=3)
WAY = Finetune(kind="kl", lam=10.0, local=replace(STUDY.solver, epochs=30, lr=0.03), start="shared")
MOMENTUM = ServerOptimizer(optimizer_name="SGD", lr=0.3, options={"momentum": 0.9})
STARTS = {"FedAvg": None, "FedAvg, server momentum": MOMENTUM}


def train(
    optimizer: ServerOptimizer | None,
    clip: float,
    epsilon: float,
    data: FederatedDataset,
    seed: int,
) -> Result:
    """One run with its finetuning."""
    return STUDY.train(
        data, Setting(FedAvg(local=SOLVER, server_optimizer=optimizer), clip, WAY), epsilon, seed
    )


def scores(root: Path) -> Iterator[Score]:
    """Tune on the training rows of another split, and score."""
    trial = held_out(load("femnist", root, TUNING), TUNING)

    def alone(setting: Setting, data: FederatedDataset, seed: int) -> Mapping[str, float]:
        return STUDY.train(data, setting, 0.0, seed).personal_accuracy

    best = max(
        STUDY.methods()["Local"], key=lambda setting: mean(alone(setting, trial, TUNING).values())
    )
    data = {seed: load("femnist", root, seed) for seed in SEEDS}
    local = {seed: alone(best, data[seed], seed) for seed in SEEDS}
    base = {"setting": SETTING, "metric": "accuracy", "larger": True}
    for seed, own in local.items():
        shares = by_client(own, own, larger=True)
        yield Score(**base, role="local", method="Local", epsilon=0.0, seed=seed, score=mean(own.values()),
                    chosen=best.text(), **shares)  # fmt: skip
    for epsilon, (name, optimizer) in itertools.product(EPSILONS, STARTS.items()):

        def validated(
            clip: float, epsilon: float = epsilon, optimizer: ServerOptimizer | None = optimizer
        ) -> float:
            return train(optimizer, clip, epsilon, trial, TUNING).final["accuracy"]

        clip = max(STUDY.clips, key=validated)
        for seed in SEEDS:
            result = train(optimizer, clip, epsilon, data[seed], seed)
            common = base | {
                "role": "fedavg",
                "epsilon": epsilon,
                "seed": seed,
                "chosen": f"clip {clip:g}",
            }
            shares = by_client(result.personal_accuracy, local[seed], larger=True)
            yield Score(
                **common, method=f"{name}, finetuned", score=result.final["accuracy"], **shares
            )
            yield Score(
                **common, method=f"{name}, not finetuned", score=result.final["global_accuracy"]
            )
            print(
                f"epsilon {epsilon:g}, {name}, seed {seed}: {result.final['accuracy']:.4f}",
                flush=True,
            )


def main() -> None:
    """Parse the command line, train, write the tables."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", maxsplit=1)[0])
    parser.add_argument("--femnist", type=existing, required=True, help="leaf_femnist_206.json.zip")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    found = renew_scores(HERE / "scores.csv", list(scores(arguments.femnist)))
    cells = []
    for epsilon in EPSILONS:
        own, other = (
            [
                s
                for s in found
                if (s.setting, s.method, s.epsilon) == (SETTING, f"{name}, finetuned", epsilon)
            ]
            for name in reversed(STARTS)
        )
        gain, half = difference(own, other)
        cells.append(f"{gain:+.3f} ± {half:.3f} {mark(own, other)}".strip())
    titles = ["server momentum less the plain step", *(f"epsilon {e:g}:" for e in EPSILONS)]
    text = table(found, SETTING) + "\n" + markdown(titles, [["both finetuned", *cells]])
    replace_section(HERE / "README.md", "femnist", text)


if __name__ == "__main__":
    main()
