"""Sound PP-DMTL whose tasks refine along directions that they share, beside single-task learning with a tuned ridge.

Writes scores.csv and its tables of README.md beside this file.

    python benchmarks/reproduce/pp_dmtl/directions.py
"""

from __future__ import annotations

import itertools
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

HERE = Path(__file__).parent
sys.path[:0] = [str(HERE), str(HERE.parent)]

import scores  # noqa: E402
from run import DELTA, SLOWEST, SMOOTHNESS, TRIALS  # noqa: E402
from scores import Score, by_client, difference, renew_scores  # noqa: E402
from sweep import markdown, replace_section  # noqa: E402
from tasks import TASKS, Tasks, alone, run, tasks  # noqa: E402

from fedmtl import PPDMTL, Latencies, RecordPrivacy, SharedDirections  # noqa: E402
from fedmtl.algorithms import State  # noqa: E402
from fedmtl.schedules import RandomLatency  # noqa: E402

FILE = HERE / "scores.csv"
RECORDS, EPSILONS, PROBLEMS, RUNS = (200, 60, 1000), (1.0, 3.0, 10.0), range(20, 28), 2
CLIP = 0.5  # a record's gradient at P = 0 has this norm, and is shorter once it is fitted
RIDGES = (1e-5, 3e-5, 1e-4, 3e-4, 1e-3, 3e-3, 1e-2, 3e-2)
Training = tuple[str, int, float]
Refinements = dict[str, tuple[tuple[float, float | None], ...]]
TRAINING = tuple(itertools.product(("l2_laplace", "gaussian"), (1, 2), (0.08, 0.13, 0.2)))
REFINEMENTS: Refinements = {
    "PP-DMTL, sound": tuple((tau, None) for tau in (*RIDGES, 0.1)),
    "PP-DMTL, shared directions": tuple(
        (tau, tau * k) for tau in (3e-5, 1e-4, 3e-4, 1e-3) for k in (3, 10, 30)
    ),
}


def trained(
    own: Tasks, epsilon: float, training: Training, runs: int, seed: int, **options: Any
) -> tuple[PPDMTL, State]:
    """Return the learner, with ``options`` of it, and the state at the end; ``epsilon`` is each task's total."""
    mechanism, answers, lam = training
    privacy = RecordPrivacy(clip_norm=CLIP, epsilon=epsilon, mechanism=mechanism, delta=DELTA)
    learner = PPDMTL(feature_norm=1.0, lam=lam, a2=1.6, smoothness=SMOOTHNESS, **options)
    schedule = Latencies(latency=RandomLatency("uniform", {"scale": SLOWEST}), per_client=answers)
    ((_, _, state),) = run(
        own, learner, schedule, privacy, at=[TASKS * answers], replicates=runs, seed=seed
    )
    return learner, state


def errors(
    own: Tasks, learner: PPDMTL, state: State, refinement: tuple[float, float | None]
) -> Tensor:
    """Return the mean error of each task, (T,)."""
    tau, across = refinement
    last = replace(learner, refine_tau=tau)
    if across is not None:
        last = SharedDirections(feature_norm=1.0, refine_tau=tau, refine_across=across)
    models = last.models(own.problem, state, torch.arange(TASKS))
    return own.errors(models).mean(0)


def chosen(
    trials: list[Tasks],
    epsilon: float,
    methods: Refinements = REFINEMENTS,
    trainings: Any = TRAINING,
    **options: Any,
) -> dict[str, tuple[Any, Any]]:
    """Return training and refinement of each method with the least error on the trial problems."""
    best: dict[str, tuple[float, Any, Any]] = {}
    for training in trainings:
        ends = [(own, *trained(own, epsilon, training, 1, 7, **options)) for own in trials]
        for name, refinements in methods.items():
            for refinement in refinements:
                error = sum(float(errors(*end, refinement).mean()) for end in ends)
                if name not in best or error < best[name][0]:
                    best[name] = error, training, refinement
    return {name: found[1:] for name, found in best.items()}


def tuned_alone(trials: list[Tasks]) -> float:
    """Return the ridge of training alone with the least error on the trial problems."""
    return min(
        RIDGES, key=lambda tau: sum(float(own.errors(alone(own, tau)).mean()) for own in trials)
    )


def score(
    records: int,
    seed: int,
    role: Any,
    method: str,
    epsilon: float,
    by: Tensor,
    local: Tensor,
    said: str,
) -> Score:
    """Return the score of the errors ``by`` task, (T,), beside those of training alone."""
    own, other = (
        {str(t): value for t, value in enumerate(values.tolist())} for values in (by, local)
    )
    return Score(f"synthetic tasks of {records} records", "error", False, role, method, epsilon, seed,
                 sum(own.values()) / len(own), **by_client(own, other, larger=False), chosen=said)  # fmt: skip


def private(
    records: int,
    seed: int,
    method: str,
    epsilon: float,
    choice: tuple[Any, Any],
    local: Tensor,
    **options: Any,
) -> Score:
    """Return the score of a private method on a problem, with the ``choice`` of :func:`chosen`."""
    own, (training, refinement) = tasks("classification", seed, records), choice
    by = errors(own, *trained(own, epsilon, training, RUNS, 1000 + seed, **options), refinement)
    said = "{}, {} answers, lam {:g}".format(*training) + f", refinement {refinement[0]:g}"
    said += "" if refinement[1] is None else f", across {refinement[1]:g}"
    return score(
        records,
        seed,
        "published" if refinement[1] is None else "new",
        method,
        epsilon,
        by,
        local,
        said,
    )


def measured(records: int) -> list[Score]:
    """Return the scores of tasks with so many records."""
    trials = [tasks("classification", seed, records) for seed in TRIALS]
    ridge, found = tuned_alone(trials), []
    choices = {epsilon: chosen(trials, epsilon) for epsilon in EPSILONS}
    for seed in PROBLEMS:
        own = tasks("classification", seed, records)
        local = own.errors(alone(own, ridge))
        found.append(
            score(
                records, seed, "local", "alone (tuned ridge)", 0.0, local, local, f"ridge {ridge:g}"
            )
        )
        for epsilon in EPSILONS:
            for name, choice in choices[epsilon].items():
                found.append(private(records, seed, name, epsilon, choice, local))
        print(f"{records} records, problem {seed}", flush=True)
    return found


def main() -> None:
    """Compute, and write the scores and the tables."""
    torch.set_num_threads(1)
    if "--collect" not in sys.argv:
        for records in RECORDS:
            renew_scores(FILE, measured(records))
    write_tables(scores.read_scores(FILE))


def write_tables(found: list[Score]) -> None:
    """Write a table for every setting but those as published, and what the refinements gain."""
    own_settings = [s.setting for s in found if not s.setting.endswith(scores.AS_PUBLISHED)]
    lines = []
    for setting in dict.fromkeys(own_settings):
        part = [score for score in found if score.setting == setting]
        replace_section(HERE / "README.md", setting, scores.table(part, setting, digits=4))
        local = [score for score in part if score.role == "local"]
        for name in REFINEMENTS:
            for epsilon in EPSILONS:
                own = [score for score in part if score.method == name and score.epsilon == epsilon]
                if own:
                    gain = "{:+.4f} ± {:.4f}".format(*difference(own, local))
                    better = sum(score.better for score in own) / len(own)
                    worse = sum(score.worse for score in own) / len(own)
                    shares = f"{100 * better:.0f} / {100 * worse:.0f}"
                    lines.append(
                        [setting.split()[3], name, f"{epsilon:g}", gain, shares, own[0].chosen]
                    )
    titles = ["records", "", "epsilon:", "less than alone:", "% of tasks better / worse:", "chosen"]
    replace_section(HERE / "README.md", "gains", markdown(titles, lines))


if __name__ == "__main__":
    main()
