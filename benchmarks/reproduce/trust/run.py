"""What does it cost not to trust the server? FedAvg with finetuning at equal epsilon of a client, by three trust models.

- *Trusted server*: it adds the noise, and draws cohorts in secret, which amplifies (Poisson sampling).
- *Secure sums*: clients add shares of the noise, a third of a cohort may collude with the server, and it knows who takes
  part, so that nothing is amplified. Cohorts are taken in turn, publicly.
- *Noise of each client alone*: every client adds all the noise that its row needs, and nobody is trusted. The sum of m
  such rows has sqrt(m) times the noise that one row needs; it is simulated by that noise on the sum.

Each model of trust tries the same six settings for each epsilon: two clips, and cohorts of a tenth for 50 rounds, or of
everybody for 10 or 50 rounds. Validation rows of another seed choose one. Nothing is chosen on test rows.

    python benchmarks/reproduce/trust/run.py --femnist leaf_femnist_206.json.zip
    python benchmarks/reproduce/trust/run.py --collect  # the table and the picture of the scores
"""

from __future__ import annotations

import argparse
import itertools
import json
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np

HERE = Path(__file__).parent
sys.path[:0] = [str(HERE.parent), str(HERE.parent / "comparison"), str(HERE)]

from intervals import interval  # noqa: E402
from settings import DELTA, STUDIES, Study, held_out, load  # noqa: E402
from sweep import existing, markdown, read_csv, renew, replace_section  # noqa: E402

from fedmtl import (  # noqa: E402
    ClientPrivacy,
    CyclicCohorts,
    FedAvg,
    FederatedDataset,
    Finetune,
    FullParticipation,
    PoissonSampling,
    SecureAggregation,
    Trainer,
    models,
)
from fedmtl.privacy import ReleasePlan, Sampler  # noqa: E402
from fedmtl.privacy.client_calibration import calibrated_release  # noqa: E402
from fedmtl.report.canvas import drawing, legend_above  # noqa: E402

EPSILONS = (1.0, 4.0, 8.0)
SEEDS = (0, 1, 2, 3, 4)
TUNING = 10
TRUSTED, SECURE, ALONE = "trusted server", "secure sums", "noise of each client alone"
TRUST = (TRUSTED, SECURE, ALONE)
COLUMNS = ("study", "trust", "epsilon", "seed", "clip", "cohort", "rounds", "accuracy", "noise")
OUT = Path("outputs/reproduce/trust")


@dataclass(frozen=True)
class Problem:
    """A data set with the settings that all trust models share.

    Attributes:
        title: its name in tables.
        study: of the comparison, which has the data, the solver and the clip norms.
        way: of the finetuning, from the shared model.
        alone: the accuracy of training alone on the same rows, in the comparison.
    """

    title: str
    study: Study
    way: Finetune
    alone: float


@dataclass(frozen=True)
class Setting:
    """What a trust model chooses.

    Attributes:
        clip: L2 norm of an update.
        share: of the clients in a cohort.
        rounds: of the run.
    """

    clip: float
    share: float
    rounds: int


_DIGITS = STUDIES["digits"]
_FEMNIST = STUDIES["femnist"]
PROBLEMS = (
    Problem(
        title="digits",
        study=_DIGITS,
        way=Finetune(kind="kl", lam=0.1, local=replace(_DIGITS.solver, epochs=20), start="shared"),
        alone=0.790,
    ),
    Problem(
        title="FEMNIST",
        study=_FEMNIST,
        way=Finetune(
            kind="kl", lam=3.0, local=replace(_FEMNIST.solver, epochs=10, lr=0.1), start="shared"
        ),
        alone=0.364,
    ),
)


def privacy_of(
    trust: str, epsilon: float, setting: Setting, schedule: Sampler, clients: int, dimension: int
) -> ClientPrivacy:
    """Returns the settings of privacy of a trust model."""
    privacy = ClientPrivacy(clip_norm=setting.clip, epsilon=epsilon, delta=DELTA)
    if trust == SECURE:
        return replace(privacy, aggregation=SecureAggregation())
    if trust == TRUSTED:
        return privacy
    bound = schedule.bind(clients)
    plan = ReleasePlan(name="update", dimension=dimension)
    release = calibrated_release(privacy, plan, bound, setting.rounds)
    assert release.noise is not None
    multiplier = release.noise.multiplier * bound.denominator**0.5
    return replace(privacy, epsilon=None, noise_multiplier=multiplier)


def train(
    problem: Problem,
    data: FederatedDataset,
    trust: str,
    epsilon: float,
    setting: Setting,
    seed: int,
) -> dict[str, float]:
    """Returns the mean accuracy of the clients' models, and the deviation of the noise on a coordinate of the mean."""
    clients = len(data)
    cohort = max(2, round(setting.share * clients))
    schedule: Sampler = CyclicCohorts(cohort=cohort)
    if setting.share == 1:
        schedule = FullParticipation()
    elif trust == TRUSTED:
        schedule = PoissonSampling(cohort=cohort)
    model = models.softmax_regression()
    assert data.classes is not None
    dimension = (int(np.prod(data.spec.shape)) + 1) * data.classes
    result = Trainer(
        algorithm=FedAvg(local=problem.study.solver),
        data=data,
        model=model,
        schedule=schedule,
        privacy=privacy_of(trust, epsilon, setting, schedule, clients, dimension),
        rounds=setting.rounds,
        finetune=problem.way,
        seed=seed,
        eval_every=setting.rounds,
        baselines=(),
        progress=False,
    ).fit()
    scores = result.scores["finetuned"]["accuracy"]
    noise = result.privacy.noise_std
    assert noise is not None
    return {"accuracy": float(np.mean(list(scores.values()))), "noise": noise}


@cache
def _data(problem: Problem, root: Path | None, seed: int) -> FederatedDataset:
    data = load(problem.study.name, root, seed)
    if seed == TUNING:
        return held_out(data, seed)
    return data


def run(
    problem: Problem, root: Path | None, trust: str, epsilon: float, setting: Setting, seed: int
) -> dict[str, float]:
    """Returns the scores of a run, which is trained if it is not finished."""
    parts = [trust, f"{epsilon:g}", f"{setting.clip:g}", f"{setting.share:g}"]
    name = "_".join([*parts, str(setting.rounds), str(seed)]).replace(" ", "-")
    file = OUT / problem.study.name / f"{name}.json"
    if not file.exists():
        found = train(problem, _data(problem, root, seed), trust, epsilon, setting, seed)
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(json.dumps(found))
        print(f"{problem.study.name}_{name}: {found['accuracy']:.4f}", flush=True)
    result: dict[str, float] = json.loads(file.read_text())
    return result


def chosen(problem: Problem, root: Path | None, trust: str, epsilon: float) -> Setting:
    """Returns the best of six settings on the validation rows."""
    settings = [
        Setting(clip, share, rounds)
        for clip in problem.study.clips[1:]
        for share, rounds in ((0.1, 50), (1.0, 10), (1.0, 50))
    ]
    tried = [run(problem, root, trust, epsilon, each, TUNING)["accuracy"] for each in settings]
    return settings[int(np.argmax(tried))]


def scored(problem: Problem, root: Path | None) -> Iterator[dict[str, Any]]:
    """Yields a row for each trust model, epsilon and seed."""
    for epsilon, trust in itertools.product(EPSILONS, TRUST):
        setting = chosen(problem, root, trust, epsilon)
        for seed in SEEDS:
            found = run(problem, root, trust, epsilon, setting, seed)
            yield {
                "study": problem.title,
                "trust": trust,
                "epsilon": epsilon,
                "seed": seed,
                "clip": setting.clip,
                "cohort": setting.share,
                "rounds": setting.rounds,
                **found,
            }


# The table and the picture


def accuracies(
    rows: Sequence[Mapping[str, str]], title: str, epsilon: str, trust: str
) -> list[float]:
    """Returns the accuracies of a cell by seed."""
    own = [
        row
        for row in rows
        if (row["study"], row["epsilon"], row["trust"]) == (title, epsilon, trust)
    ]
    return [float(row["accuracy"]) for row in sorted(own, key=lambda row: int(row["seed"]))]


def table(rows: Sequence[Mapping[str, str]]) -> str:
    """Returns the table of README.md: means, and paired differences to the trusted server."""
    numbers = [f"{name}:" for name in (*TRUST, "secure less trusted", "alone less trusted")]
    titles = ["data", "epsilon", *numbers]
    lines = []
    for problem in PROBLEMS:
        for epsilon in (f"{one:g}" for one in EPSILONS):
            cells = {trust: accuracies(rows, problem.title, epsilon, trust) for trust in TRUST}
            if not cells[TRUSTED]:
                continue
            line = [problem.title, epsilon]
            line += [f"{np.mean(cells[trust]):.3f}" for trust in TRUST]
            for trust in (SECURE, ALONE):
                pairs = zip(cells[trust], cells[TRUSTED], strict=True)
                mean, half = interval(own - other for own, other in pairs)
                line.append(f"{mean:+.3f} ± {half:.3f}")
            lines.append(line)
    return markdown(titles, lines)


def draw(path: Path, rows: Sequence[Mapping[str, str]]) -> None:
    """Draws accuracy by epsilon."""
    with drawing(path, 9.0, 4.0) as figure:
        for axis, problem in zip(figure.subplots(1, len(PROBLEMS)), PROBLEMS, strict=True):
            for trust in TRUST:
                cells = [accuracies(rows, problem.title, f"{e:g}", trust) for e in EPSILONS]
                means = [float(np.mean(cell)) for cell in cells]
                axis.plot(EPSILONS, means, marker="o", label=trust)
            axis.axhline(problem.alone, color="gray", linestyle=":", label="training alone")
            axis.set(title=problem.title, xlabel="epsilon", ylabel="accuracy", xscale="log")
            axis.minorticks_off()
            axis.set_xticks(EPSILONS, [f"{e:g}" for e in EPSILONS])
        legend_above(figure)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--femnist", type=existing, help="file of LEAF's sample of 206 writers")
    parser.add_argument("--collect", action="store_true", help="write table and picture only")
    options = parser.parse_args()
    if not options.collect:
        for problem in PROBLEMS:
            root = options.femnist
            if problem.title == "digits":
                root = None
            elif root is None:
                continue
            renew(HERE / "scores.csv", list(scored(problem, root)), COLUMNS)
    rows = read_csv(HERE / "scores.csv")
    replace_section(HERE / "README.md", "table", table(rows))
    draw(HERE / "accuracy.png", rows)


if __name__ == "__main__":
    main()
