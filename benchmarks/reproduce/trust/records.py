"""What does it cost hospitals that nobody trusts the others or a server? FedSGD at equal epsilon of a record.

- *Trusted server*: it gets the clipped gradients of single records and adds the noise once, as central DP-SGD does.
- *Secure sums*: every client adds a share of the noise to the sum of its own gradients; a third of the clients may
  collude with the server.
- *Noise of each client alone*: every client adds all the noise that its own records need.

Records are drawn by secret coins of their clients in all three, so that each has the same amplification. Each model of
trust tries the same six settings for each epsilon: three step sizes, each with 50 rounds at rate .1 or 150 rounds at
rate .2. Validation rows of another seed choose one. Nothing is chosen on test rows.

    python benchmarks/reproduce/trust/records.py --school school.mat
    python benchmarks/reproduce/trust/records.py --collect  # the table and the picture of the scores
"""

from __future__ import annotations

import argparse
import itertools
import json
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np

HERE = Path(__file__).parent
sys.path[:0] = [str(HERE.parent), str(HERE.parent / "comparison"), str(HERE)]

from intervals import interval  # noqa: E402
from settings import DELTA, held_out, load  # noqa: E402
from sweep import existing, markdown, read_csv, renew, replace_section  # noqa: E402

from fedmtl import (  # noqa: E402
    Average,
    FederatedDataset,
    FedSGD,
    Finetune,
    FullParticipation,
    Local,
    LocalSGD,
    RecordPrivacy,
    SecureAggregation,
    Trainer,
    load_data,
    models,
)
from fedmtl.models import ModelFactory  # noqa: E402
from fedmtl.report.canvas import drawing, legend_above  # noqa: E402

EPSILONS = (0.5, 1.0, 4.0)
SEEDS = (0, 1, 2, 3, 4)
TUNING = 10
TRUSTED, SECURE, ALONE = "trusted server", "secure sums", "noise of each client alone"
TRUST = (TRUSTED, SECURE, ALONE)
COLUMNS = (
    "study",
    "trust",
    "epsilon",
    "seed",
    "step",
    "rate",
    "rounds",
    "shared",
    "finetuned",
    "noise",
)
OUT = Path("outputs/reproduce/trust_records")


@dataclass(frozen=True)
class Problem:
    """A data set with the settings that all trust models share.

    Attributes:
        title: its name in tables.
        metric: of the test rows of a client.
        larger: True if a larger one is better.
        data: of a seed, from the file of the data.
        model: a linear one.
        steps: step sizes of the server that are tried.
        way: of each client's own last step.
    """

    title: str
    metric: str
    larger: bool
    data: Callable[[Path | None, int], FederatedDataset]
    model: ModelFactory
    steps: tuple[float, float, float]
    way: Finetune | Average


@dataclass(frozen=True)
class Setting:
    """What a trust model chooses.

    Attributes:
        step: size of a step of the server.
        rate: of the records in a round.
        rounds: of the run.
    """

    step: float
    rate: float
    rounds: int


def _silos(root: Path | None, seed: int) -> FederatedDataset:
    """Returns the digits of 20 clients with 60 training images of all classes, each in a style of its own."""
    return load_data(
        "digits", clients=20, train_images=60, test_images=60, classes_per_client=10, seed=seed
    )


PROBLEMS = (
    Problem(
        title="digits",
        metric="accuracy",
        larger=True,
        data=_silos,
        model=models.softmax_regression(),
        steps=(0.25, 1.0, 4.0),
        way=Finetune(kind="kl", lam=0.1, local=LocalSGD(lr=0.3, epochs=20), start="shared"),
    ),
    Problem(
        title="School",
        metric="nmse",
        larger=False,
        data=lambda root, seed: load("school records", root, seed),
        model=models.linear_regression(),
        steps=(0.02, 0.1, 0.5),
        way=Average(),
    ),
)


def privacy_of(trust: str, epsilon: float) -> RecordPrivacy:
    """Returns the settings of privacy of a trust model."""
    # without clients that collude or are missing, the shares add up to the noise of one server
    aggregation = {
        TRUSTED: SecureAggregation(colluding=0, bits=64),
        SECURE: SecureAggregation(bits=64),
        ALONE: None,
    }[trust]
    return RecordPrivacy(
        clip_norm=1.0,
        clipping="automatic",
        epsilon=epsilon,
        delta=DELTA,
        aggregation=aggregation,
    )


def trainer(problem: Problem, data: FederatedDataset, seed: int, **options: Any) -> Trainer:
    """Returns a run with the settings that all have."""
    return Trainer(
        data=data,
        model=problem.model,
        schedule=FullParticipation(),
        seed=seed,
        baselines=(),
        progress=False,
        **options,
    )


def train(
    problem: Problem,
    data: FederatedDataset,
    trust: str,
    epsilon: float,
    setting: Setting,
    seed: int,
) -> dict[str, float]:
    """Returns the mean score of the clients' models, and the length of the noise on a mean gradient of length 1 at
    most."""
    run = trainer(
        problem,
        data,
        seed,
        algorithm=FedSGD(rate=setting.rate, server_lr=setting.step, averaged=True),
        privacy=privacy_of(trust, epsilon),
        rounds=setting.rounds,
        finetune=problem.way,
        eval_every=setting.rounds,
    )
    result = run.fit()
    scores = {
        name: float(np.mean(list(result.scores[name][problem.metric].values())))
        for name in ("shared", "finetuned")
    }
    privacy = result.privacy
    if trust == ALONE:
        assert privacy.noise_multiplier is not None
        deviation = privacy.noise_multiplier * len(data) ** 0.5  # of the sum, at a clip norm of 1
    else:
        assert privacy.noise_std is not None
        deviation = privacy.noise_std * len(data)
    records = setting.rate * int(data.train.counts.sum())
    size = result.personal.shape[1]
    return {**scores, "noise": deviation * size**0.5 / records}


def alone(problem: Problem, data: FederatedDataset, seed: int) -> float:
    """Returns the mean score of training alone, without privacy, by the same last step from the public start."""
    run = trainer(
        problem,
        data,
        seed,
        algorithm=Local(local=LocalSGD(lr=0.3, epochs=20)),
        privacy=None,
        rounds=1,
        eval_every=1,
    )
    if isinstance(problem.way, Average):
        run = trainer(problem, data, seed, algorithm=Average.alone(), privacy=None, rounds=1)
    scores = run.fit().scores["personal"][problem.metric]
    return float(np.mean(list(scores.values())))


@cache
def _data(problem: Problem, root: Path | None, seed: int) -> FederatedDataset:
    data = problem.data(root, seed)
    if seed == TUNING:
        return held_out(data, seed)
    return data


def run(
    problem: Problem, root: Path | None, trust: str, epsilon: float, setting: Setting, seed: int
) -> dict[str, float]:
    """Returns the scores of a run, which is trained if it is not finished."""
    parts = [trust, f"{epsilon:g}", f"{setting.step:g}", f"{setting.rate:g}"]
    name = "_".join([*parts, str(setting.rounds), str(seed)]).replace(" ", "-")
    file = OUT / problem.title / f"{name}.json"
    if not file.exists():
        found = train(problem, _data(problem, root, seed), trust, epsilon, setting, seed)
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(json.dumps(found))
        print(f"{problem.title}_{name}: {found['finetuned']:.4f}", flush=True)
    result: dict[str, float] = json.loads(file.read_text())
    return result


def chosen(problem: Problem, root: Path | None, trust: str, epsilon: float) -> Setting:
    """Returns the best of six settings on the validation rows."""
    settings = [
        Setting(step, rate, rounds)
        for step in problem.steps
        for rate, rounds in ((0.1, 50), (0.2, 150))
    ]
    tried = [run(problem, root, trust, epsilon, each, TUNING)["finetuned"] for each in settings]
    if problem.larger:
        return settings[int(np.argmax(tried))]
    return settings[int(np.argmin(tried))]


def scored(problem: Problem, root: Path | None) -> Iterator[dict[str, Any]]:
    """Yields a row for each trust model, epsilon and seed, and for training alone."""
    for epsilon, trust in itertools.product(EPSILONS, TRUST):
        setting = chosen(problem, root, trust, epsilon)
        for seed in SEEDS:
            found = run(problem, root, trust, epsilon, setting, seed)
            yield {
                "study": problem.title,
                "trust": trust,
                "epsilon": epsilon,
                "seed": seed,
                "step": setting.step,
                "rate": setting.rate,
                "rounds": setting.rounds,
                **found,
            }
    for seed in SEEDS:
        yield {
            "study": problem.title,
            "trust": "training alone",
            "epsilon": "none",
            "seed": seed,
            "step": "",
            "rate": "",
            "rounds": "",
            "shared": "",
            "finetuned": alone(problem, _data(problem, root, seed), seed),
            "noise": "",
        }


# The table and the picture


def cell(
    rows: Sequence[Mapping[str, str]], title: str, epsilon: str, trust: str, column: str
) -> list[float]:
    """Returns the values of a cell by seed."""
    own = [
        row
        for row in rows
        if (row["study"], row["epsilon"], row["trust"]) == (title, epsilon, trust)
    ]
    return [float(row[column]) for row in sorted(own, key=lambda row: int(row["seed"]))]


def table(rows: Sequence[Mapping[str, str]]) -> str:
    """Returns the table of README.md: means after each client's last step, the length of the noise, and paired
    differences to the trusted server."""
    titles = ["data", "epsilon", "training alone:"]
    titles += [f"{trust}:" for trust in TRUST]
    titles += ["noise, secure:", "noise, alone:", "secure less trusted:", "alone less trusted:"]
    lines = []
    for problem in PROBLEMS:
        for epsilon in (f"{one:g}" for one in EPSILONS):
            cells = {
                trust: cell(rows, problem.title, epsilon, trust, "finetuned") for trust in TRUST
            }
            if not cells[TRUSTED]:
                continue
            by_itself = cell(rows, problem.title, "none", "training alone", "finetuned")
            line = [f"{problem.title}, {problem.metric}", epsilon, f"{np.mean(by_itself):.3f}"]
            line += [f"{np.mean(cells[trust]):.3f}" for trust in TRUST]
            for trust in (SECURE, ALONE):
                noise = cell(rows, problem.title, epsilon, trust, "noise")
                line.append(f"{np.mean(noise):.2g}")
            for trust in (SECURE, ALONE):
                pairs = zip(cells[trust], cells[TRUSTED], strict=True)
                mean, half = interval(own - other for own, other in pairs)
                line.append(f"{mean:+.3f} ± {half:.3f}")
            lines.append(line)
    return markdown(titles, lines)


def draw(path: Path, rows: Sequence[Mapping[str, str]]) -> None:
    """Draws the score of the shared model by epsilon."""
    with drawing(path, 9.0, 4.0) as figure:
        for axis, problem in zip(figure.subplots(1, len(PROBLEMS)), PROBLEMS, strict=True):
            for trust in TRUST:
                cells = [cell(rows, problem.title, f"{e:g}", trust, "finetuned") for e in EPSILONS]
                axis.plot(EPSILONS, [float(np.mean(one)) for one in cells], marker="o", label=trust)
            by_itself = cell(rows, problem.title, "none", "training alone", "finetuned")
            level = float(np.mean(by_itself))
            axis.axhline(level, color="gray", linestyle=":", label="training alone")
            axis.set(title=problem.title, xlabel="epsilon", ylabel=problem.metric, xscale="log")
            axis.minorticks_off()
            axis.set_xticks(EPSILONS, [f"{e:g}" for e in EPSILONS])
        legend_above(figure)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--school", type=existing, help="school.mat")
    parser.add_argument("--collect", action="store_true", help="write table and picture only")
    options = parser.parse_args()
    if not options.collect:
        for problem in PROBLEMS:
            if problem.title == "School" and options.school is None:
                continue
            renew(HERE / "records.csv", list(scored(problem, options.school)), COLUMNS)
    rows = read_csv(HERE / "records.csv")
    replace_section(HERE / "README.md", "records", table(rows))
    draw(HERE / "records.png", rows)


if __name__ == "__main__":
    main()
