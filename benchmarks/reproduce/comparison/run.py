"""All methods with rounds, on three problems at four epsilons, every one tuned with the same effort.

For every seed, which divides the rows of all clients anew, and every epsilon, a method chooses one of nine settings,
with five trainings, by its score on a fifth of the training rows; it is then trained on all training rows and scored on
the test rows. Nothing is chosen on test rows.

    python benchmarks/reproduce/comparison/run.py --femnist leaf_femnist_206.json.zip --school school.mat
    python benchmarks/reproduce/comparison/run.py --chosen       # with the settings that scores.csv says were chosen
    python benchmarks/reproduce/comparison/run.py --collect      # only the tables and the figure
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from pathlib import Path

import torch

from fedmtl.errors import DataError

HERE = Path(__file__).parent
sys.path[:0] = [str(HERE.parent), str(HERE)]

from report import write_report  # noqa: E402
from scores import read_scores  # noqa: E402
from settings import STUDIES, Study, held_out, load  # noqa: E402
from sweep import existing  # noqa: E402

EPSILONS = (0.3, 1.0, 3.0, 10.0)
FLAGS = {"femnist": "--femnist", "femnist all images": "--femnist-all", "school": "--school",
         "school records": "--school"}  # fmt: skip
TOGETHER = [name for name in STUDIES if name != "femnist all images"]  # which takes hours


def recorded(study: Study) -> dict[tuple[str, float, int], str]:
    """What scores.csv says was chosen, by method, epsilon and seed."""
    found = [score for score in read_scores(HERE / "scores.csv") if score.setting == study.title]
    return {(score.method, score.epsilon, score.seed): score.chosen for score in found}


def work(study: Study, root: Path | None, seed: int, out: Path, *, search: bool = True) -> None:
    """Tune and score every method that has no file in ``out`` yet; without ``search`` with what scores.csv says."""
    data = load(study.name, root, seed)
    inner = held_out(data, seed)
    known = {} if search else recorded(study)
    for name, settings in study.methods().items():
        for epsilon in EPSILONS if name != "Local" else (0.0,):
            file = out / f"{study.name}-{seed}-{epsilon:g}-{name}.json"
            if file.exists():
                continue
            began = time.process_time()
            if search and len(settings) > 1:
                best, _, scores = study.choose(inner, settings, epsilon, seed)
            else:
                texts = [one.text() for one in settings]
                best, scores = texts.index(known.get((name, epsilon, seed), texts[0])), {}
            result = study.train(data, settings[best], epsilon, seed)
            found = {
                "study": study.name,
                "seed": seed,
                "epsilon": epsilon,
                "method": name,
                "chosen": settings[best].text(),
                "validation": scores,
                "spent": result.epsilon,
                "score": result.final[study.metric],
                "clients": result.personal_accuracy,
            }
            part = file.with_suffix(f".{os.getpid()}")
            part.write_text(json.dumps(found))
            part.replace(file)
            print(
                f"{study.name}, seed {seed}, epsilon {epsilon:g}, {name}: {found['score']:.4f} with {found['chosen']} "
                f"({time.process_time() - began:.0f} s)",
                flush=True,
            )


def main() -> None:
    """Parse the command line, train what is missing, write the tables."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", maxsplit=1)[0])
    parser.add_argument("--studies", nargs="+", choices=STUDIES, default=TOGETHER)
    parser.add_argument(
        "--seeds",
        type=int,
        nargs="+",
        default=[0, 1, 2, 3, 4],
        help="of rows, start, cohorts, noise",
    )
    parser.add_argument("--femnist", type=existing, help="leaf_femnist_206.json.zip")
    parser.add_argument(
        "--femnist-all",
        type=existing,
        help="the full file of FEMNIST, for the study with all images",
    )
    parser.add_argument("--school", type=existing, help="school.mat")
    parser.add_argument("--out", type=Path, default=Path("outputs/reproduce/comparison"))
    parser.add_argument(
        "--chosen", action="store_true", help="search nothing: the settings that scores.csv names"
    )
    parser.add_argument("--collect", action="store_true", help="train nothing")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    roots = {"digits": None, "femnist": arguments.femnist, "femnist all images": arguments.femnist_all,
             "school": arguments.school, "school records": arguments.school}  # fmt: skip
    arguments.out.mkdir(parents=True, exist_ok=True)
    if not arguments.collect:
        for name in arguments.studies:
            if name != "digits" and roots[name] is None:
                parser.error(
                    f"the study {name} needs {FLAGS[name]} FILE; or leave it out: --studies digits"
                )
            if arguments.chosen and not recorded(STUDIES[name]):
                parser.error(
                    f"scores.csv has no settings of {name}; leave out --chosen, which searches for them"
                )
            for seed in arguments.seeds:
                try:
                    work(
                        STUDIES[name], roots[name], seed, arguments.out, search=not arguments.chosen
                    )
                except DataError as error:
                    parser.error(str(error))
    write_report(arguments.out, HERE)


if __name__ == "__main__":
    main()
