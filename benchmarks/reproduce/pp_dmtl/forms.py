"""What else PP-DMTL may be: minibatches, other penalties of P and Q, and the delta of the paper's regression.

Adds its rows to scores.csv and to the tables of directions.py in README.md beside this file.

    python benchmarks/reproduce/pp_dmtl/forms.py
"""

from __future__ import annotations

import itertools
from typing import Any

import torch
from directions import FILE, HERE, PROBLEMS, Refinements, chosen, private, tuned_alone, write_tables
from run import A1, A2, CLIP, DELTA, LAM, SLOWEST, TAU, TRIALS
from scores import Score, renew_scores
from sweep import markdown, replace_section
from tasks import TASKS, alone, personal, run, tasks

from fedmtl import Latencies, RecordPrivacy
from fedmtl.contrib.published.pp_dmtl import PublishedPPDMTL
from fedmtl.schedules import RandomLatency

EPSILONS = (3.0, 10.0)
BATCHES: Refinements = {
    "minibatches": tuple((tau, None) for tau in (1e-5, 3e-5, 1e-4, 3e-4, 1e-3, 3e-3, 1e-2, 0.1))
}
SPARSE: Refinements = {"sparse": tuple((tau, None) for tau in (3e-4, 3e-3, 3e-2))}
FORMS: dict[str, tuple[dict[str, Any], Refinements]] = {
    "half of the records an answer": ({"batch_rate": 0.5}, BATCHES),
    "a quarter of the records an answer": ({"batch_rate": 0.25}, BATCHES),
    "robust: low rank, and tasks apart": ({"own_penalty": "l2"}, SPARSE),
    "dirty: shared features, and single ones": ({"penalty": "l21", "own_penalty": "l1"}, SPARSE),
}
LAWS = (("l2_laplace", 2, 0.13), ("gaussian", 2, 0.13))
"""Trainings of the forms whose refinement has no closed form, which takes seconds a fit."""


def measured(records: int) -> list[Score]:
    """Return the scores of every form."""
    trials, found = [tasks("classification", seed, records) for seed in TRIALS], []
    ridge = tuned_alone(trials)
    for (name, (options, methods)), epsilon in itertools.product(FORMS.items(), EPSILONS):
        fewer = {"trainings": LAWS} if methods is SPARSE else {}
        (choice,) = chosen(trials, epsilon, methods, **fewer, **options).values()
        for seed in PROBLEMS:
            own = tasks("classification", seed, records)
            local = own.errors(alone(own, ridge))
            found.append(
                private(records, seed, f"PP-DMTL, {name}", epsilon, choice, local, **options)
            )
        print(f"{records} records, {name}, epsilon {epsilon:g}: {found[-1].chosen}", flush=True)
    return found


def claimed_delta(answers: int = 100, runs: int = 10) -> str:
    """Theorem 3.6: delta_1 + delta_2 is how often ||p_t + q_t|| is above the constant of the sensitivity, which is 1
    for the clip of 4 of run.py, since it is 2 (C_3 + 1) there."""
    own, lines, most = tasks("regression", 0), [], CLIP["regression"] / 2 - 1
    algorithm = PublishedPPDMTL(
        feature_norm=1.0, loss="squared", a1=A1, a2=A2, lam=LAM, tau=TAU["regression"],
        delay=4 * TASKS, smoothness=own.curvature,
    )  # fmt: skip
    schedule = Latencies(
        latency=RandomLatency("uniform", {"scale": SLOWEST}), activations=TASKS * answers
    )
    at = range(TASKS, TASKS * answers + 1, TASKS)
    start = alone(own, TAU["regression"]).norm(dim=-1)[None]
    for epsilon in (0.3, 1.0, 3.0, 10.0):
        privacy = RecordPrivacy(
            clip_norm=CLIP["regression"],
            noise_multiplier=1 / epsilon,
            mechanism="l2_laplace",
            delta=DELTA,
        )
        states = run(own, algorithm, schedule, privacy, at=at, replicates=runs, seed=0)
        norms = torch.stack(
            [personal(state).norm(dim=-1) for _, _, state in states]
        )  # (answers, R, T)
        above = [float((part > most).double().mean()) for part in (start, norms[0], norms[-1])]
        lines.append([f"{epsilon:g}", f"{2 * epsilon:g}", *(f"{value:.2f}" for value in above),
                      f"{float(norms[-1].median()):.3g}"])  # fmt: skip
    titles = ["epsilon:", "claimed:", "norms above C_3 at the start:", "after one answer:", "after the last:",
              "median norm then:"]  # fmt: skip
    return markdown(titles, lines)


def main() -> None:
    """Compute, and write the scores and the tables."""
    torch.set_num_threads(1)
    replace_section(HERE / "README.md", "claimed delta", claimed_delta())
    write_tables(renew_scores(FILE, measured(60)))


if __name__ == "__main__":
    main()
