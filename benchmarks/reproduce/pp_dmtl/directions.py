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
from scores import Score, by_client, difference, write_scores  # noqa: E402
from sweep import markdown, replace_section  # noqa: E402
from tasks import TASKS, Tasks, alone, run, tasks  # noqa: E402

from fedmtl import PPDMTL, Latencies, RecordPrivacy  # noqa: E402
from fedmtl.algorithms import State  # noqa: E402
from fedmtl.schedules import UniformLatency  # noqa: E402

RECORDS, EPSILONS, PROBLEMS, RUNS = (200, 60, 1000), (1.0, 3.0, 10.0), range(20, 28), 2
CLIP = 0.5  # a record's gradient at P = 0 has this norm, and is shorter once it is fitted
RIDGES = (1e-5, 3e-5, 1e-4, 3e-4, 1e-3, 3e-3, 1e-2, 3e-2)
TRAINING = tuple(itertools.product(("l2_laplace", "gaussian"), (1, 2), (0.08, 0.13, 0.2)))
REFINEMENTS: dict[str, tuple[tuple[float, float | None], ...]] = {
    "PP-DMTL, sound": tuple((tau, None) for tau in (*RIDGES, 0.1)),
    "PP-DMTL, shared directions": tuple((tau, tau * k) for tau in (3e-5, 1e-4, 3e-4, 1e-3) for k in (3, 10, 30)),
}
Setting = dict[str, Any]


def trained(own: Tasks, epsilon: float, training: tuple[str, int, float], runs: int, seed: int) -> tuple[PPDMTL, State]:
    """Return the learner and the state at the end; ``epsilon`` is each task's total."""
    mechanism, answers, lam = training
    privacy = RecordPrivacy(clip_norm=CLIP, epsilon=epsilon, mechanism=mechanism, delta=DELTA)
    learner = PPDMTL(row_norm=1.0, lam=lam, a2=1.6, smoothness=SMOOTHNESS)
    schedule = Latencies(latency=UniformLatency(0.0, SLOWEST), activations=answers)
    ((_, _, state),) = run(own, learner, schedule, privacy, at=[TASKS * answers], replicates=runs, seed=seed)
    return learner, state


def errors(own: Tasks, learner: PPDMTL, state: State, refinement: tuple[float, float | None]) -> Tensor:
    """Return the mean error of each task, (T,)."""
    tau, across = refinement
    models = replace(learner, refine_tau=tau, refine_across=across).models(own.problem, state)
    return own.errors(models).mean(0)


def chosen(trials: list[Tasks], epsilon: float) -> dict[str, tuple[Any, Any]]:
    """Return training and refinement of each method with the least error on the trial problems."""
    best: dict[str, tuple[float, Any, Any]] = {}
    for training in TRAINING:
        ends = [(own, *trained(own, epsilon, training, 1, 7)) for own in trials]
        for name, refinements in REFINEMENTS.items():
            for refinement in refinements:
                error = sum(float(errors(*end, refinement).mean()) for end in ends)
                if name not in best or error < best[name][0]:
                    best[name] = error, training, refinement
    return {name: found[1:] for name, found in best.items()}


def measured(records: int) -> list[Score]:
    """Return the scores of tasks with so many records."""
    trials = [tasks("classification", seed, records) for seed in TRIALS]
    ridge = min(RIDGES, key=lambda tau: sum(float(own.errors(alone(own, tau)).mean()) for own in trials))
    found, ids = [], [str(t) for t in range(TASKS)]
    choices = {epsilon: chosen(trials, epsilon) for epsilon in EPSILONS}
    for seed in PROBLEMS:
        own = tasks("classification", seed, records)
        local = dict(zip(ids, own.errors(alone(own, ridge)).tolist(), strict=True))

        def row(
            role: Any, method: str, epsilon: float, by: dict[str, float], said: str, *, seed: int = seed, local=local
        ) -> Score:
            setting = f"synthetic tasks of {records} records"
            return Score(setting, "error", False, role, method, epsilon, seed, sum(by.values()) / len(by),
                         **by_client(by, local, larger=False), chosen=said)  # fmt: skip

        found.append(row("local", "alone (tuned ridge)", 0.0, local, f"ridge {ridge:g}"))
        for epsilon in EPSILONS:
            for name, (training, refinement) in choices[epsilon].items():
                end = trained(own, epsilon, training, RUNS, 1000 + seed)
                by = dict(zip(ids, errors(own, *end, refinement).tolist(), strict=True))
                mechanism, answers, lam = training
                said = f"{mechanism}, {answers} answers, lam {lam:g}, refinement {refinement[0]:g}"
                said += "" if refinement[1] is None else f", across {refinement[1]:g}"
                role = "published" if refinement[1] is None else "new"
                found.append(row(role, name, epsilon, by, said))
        print(f"{records} records, problem {seed}", flush=True)
    return found


def main() -> None:
    """Compute, and write the scores and the tables."""
    torch.set_num_threads(1)
    file, found = HERE / "scores.csv", []
    if "--collect" not in sys.argv:
        for records in RECORDS:
            found += measured(records)
            write_scores(file, found)
    found = scores.read_scores(file)
    lines, settings = [], list(dict.fromkeys(score.setting for score in found))
    for setting in settings:
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
                    lines.append([setting.split()[3], name, f"{epsilon:g}", gain, shares, own[0].chosen])
    titles = ["records", "", "epsilon:", "less than alone:", "% of tasks better / worse:", "chosen"]
    replace_section(HERE / "README.md", "gains", markdown(titles, lines))


if __name__ == "__main__":
    main()
