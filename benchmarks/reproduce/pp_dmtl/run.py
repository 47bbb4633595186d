"""PP-DMTL on synthetic tasks: what noise does to its objective and errors, and what not waiting is worth.

Figures 2a, 2c, 3 and 5 of Xie, Baytas, Lin, Zhou (KDD 2017) with the paper's algorithm and its epsilons of one
iteration, the same method with sound noise and epsilons of a whole run, and the asynchronous server against one that
waits. Writes table.csv, the plots and the tables of README.md beside this file. Finished parts are kept in --out and
not repeated.

    python benchmarks/reproduce/pp_dmtl/run.py
    python benchmarks/reproduce/pp_dmtl/run.py --parts sound      # only this; the tables and plots of others stay
"""

from __future__ import annotations

import argparse
import itertools
import json
import math
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

HERE = Path(__file__).parent
sys.path[:0] = [str(HERE), str(HERE.parent)]

import report  # noqa: E402
from tasks import FIRST, TASKS, Kind, Tasks, alone, optimum, personal, refined, run, tasks  # noqa: E402

from fedmtl import PPDMTL, Latencies, RecordPrivacy  # noqa: E402
from fedmtl.algorithms.pp_dmtl.step_size import largest_delay  # noqa: E402
from fedmtl.contrib.published.pp_dmtl import PublishedPPDMTL  # noqa: E402
from fedmtl.schedules import RandomLatency, Synchronous  # noqa: E402

Row = dict[str, Any]
A1, A2, LAM, SLOWEST = 0.1, 0.1, 0.015, 0.015  # the proximal threshold is A2 LAM = 1.5e-3
TAU: dict[Kind, float] = {"classification": 1e-3, "regression": 1e-5}
CLIP: dict[Kind, float] = {"classification": 1.0, "regression": 4.0}
PUBLISHED_EPSILONS = (math.inf, 10.0, 3.0, 1.0, 0.3)
SIZES = {"default": {"answers": 1000, "runs": 10}, "paper": {"answers": 10_000, "runs": 10}}
AT = (1, 2, 5, 10, 20, 50, 100, 200, 350, 500, 750, 1000, 2000, 3500, 5000, 7500, 10_000)

DELTA, SMOOTHNESS = 1e-5, 0.03  # the largest curvature of a task of this kind is about 0.025
TOTALS, RECORDS = (1.0, 3.0, 10.0, 30.0, 100.0, math.inf), (60, 200, 1000)
ANSWERS, STEPS, STRENGTHS = (1, 2, 4, 8), (0.3, 1.6), (0.03, 0.1, 0.2)
RIDGES = (1e-6, 1e-5, 3e-5, 1e-4, 3e-4, 1e-3, 3e-3, 1e-2, 3e-2, 0.1, 0.3)
TRIALS, PROBLEMS, TRIAL_RUNS, SOUND_RUNS = (101, 102), (0, 1, 2, 3, 4), 3, 10

WAIT_LAM, WAIT_TAU, WAIT_A1 = 0.03, 0.01, 10.0
STRAGGLERS, FACTOR, WAIT_RUNS = (0, 1, 5), 10.0, 5
TARGETS = (0.2, 0.1, 0.05, 0.02)


def quantiles(values: Tensor) -> Row:
    low, middle, high = values.quantile(
        torch.tensor([0.25, 0.5, 0.75], dtype=torch.float64)
    ).tolist()
    return {"q25": low, "median": middle, "q75": high}


def measured(own: Tasks, models: Tensor, objective: Tensor) -> list[Row]:
    """Quartiles over repetitions of the objective and of the mean errors of all and of the first five tasks."""
    errors = own.errors(models)
    return [
        {"what": "objective", **quantiles(objective)},
        {"what": "error", **quantiles(errors.mean(-1))},
        {"what": "error of the first 5", **quantiles(errors[..., :FIRST].mean(-1))},
        *({"what": f"task {t}", **quantiles(errors[..., t])} for t in range(FIRST)),
    ]


def published(kind: Kind, answers: int, runs: int) -> list[Row]:
    """Algorithm 1 as printed, under epsilons of one iteration (epsilon_1 = epsilon_2 = epsilon)."""
    own, tau = tasks(kind, 0), TAU[kind]
    algorithm = PublishedPPDMTL(
            feature_norm=1.0,
        loss=own.loss.name, a1=A1, a2=A2, lam=LAM, tau=tau,
        delay=4 * TASKS, smoothness=own.curvature,
    )  # type: ignore[arg-type]  # fmt: skip
    # of all tasks together: where each stops at its own last answer, its column moves on by that one until the end
    schedule = Latencies(
        latency=RandomLatency("uniform", {"scale": SLOWEST}), activations=TASKS * answers
    )
    at = [TASKS * k for k in AT if k <= answers]
    best, single = optimum(own, LAM, tau), alone(own, tau)
    rows: list[Row] = []
    for name, model in (("optimum", best.shared + best.own), ("alone", single)):
        penalty = LAM * torch.linalg.svdvals(best.shared).sum() + tau / 2 * best.own.square().sum()
        objective = best.objective if name == "optimum" else objective_of_alone(own, single, tau)
        rank = int(torch.linalg.matrix_rank(best.shared)) if name == "optimum" else 0
        known = {
            "epsilon": math.inf,
            "answers": 0,
            "rank": rank,
            "penalty": float(penalty),
            "rule": name,
        }
        rows += [
            known | row for row in measured(own, model[None], torch.tensor([objective]).double())
        ]
    for epsilon in PUBLISHED_EPSILONS:
        privacy = None
        if math.isfinite(epsilon):
            privacy = RecordPrivacy(
                clip_norm=CLIP[kind],
                noise_multiplier=1 / epsilon,
                mechanism="l2_laplace",
                delta=DELTA,
            )
        repeats = 1 if privacy is None else runs
        for event, _, state in run(
            own, algorithm, schedule, privacy, at=at, replicates=repeats, seed=0
        ):
            rank = float(torch.linalg.matrix_rank(state.public["shared"]).double().mean())
            known = {
                "rule": "published",
                "epsilon": epsilon,
                "answers": event // TASKS,
                "runs": repeats,
                "rank": rank,
            }
            objective = algorithm.objective(own.problem, state)
            rows += [known | row for row in measured(own, personal(state), objective)]
    return rows


def objective_of_alone(own: Tasks, models: Tensor, tau: float) -> float:
    margins = torch.einsum("tnd,td->tn", own.x, models)
    if own.kind == "classification":
        losses = torch.nn.functional.softplus(-margins * own.y)
    else:
        losses = (margins - own.y).square()
    return float(losses.mean(1).sum() + tau / 2 * models.square().sum())


def sound_run(
    own: Tasks,
    epsilon: float,
    setting: Row,
    runs: int,
    seed: int,
    kind: type[Latencies] = Latencies,
) -> Tensor:
    """P (R, T, d) after the run; ``epsilon`` is each task's total."""
    privacy = RecordPrivacy(clip_norm=1.0, epsilon=epsilon, mechanism="l2_laplace", delta=DELTA)
    algorithm = PPDMTL(
        feature_norm=1.0, lam=setting["lam"], a2=setting["a2"], smoothness=SMOOTHNESS
    )
    schedule = kind(
        latency=RandomLatency("uniform", {"scale": SLOWEST}), per_client=setting["answers"]
    )
    ((_, _, state),) = run(
        own,
        algorithm,
        schedule,
        privacy,
        at=[TASKS * setting["answers"]],
        replicates=runs,
        seed=seed,
    )
    return state.public["shared"]


def personalized(own: Tasks, shared: Tensor, ridge: float | None) -> Tensor:
    return shared if ridge is None else refined(own, shared, ridge)


def sound() -> list[Row]:
    """Totals per task: settings chosen on other problems of the same kind, results on new ones."""
    rows: list[Row] = []
    for records in RECORDS:
        trials = [tasks("classification", seed, records) for seed in TRIALS]
        own = [tasks("classification", seed, records) for seed in PROBLEMS]
        ridge = min(
            RIDGES, key=lambda tau: sum(float(t.errors(alone(t, tau)).mean()) for t in trials)
        )
        mix = min(
            itertools.product(STRENGTHS, (1e-2, 0.1)),
            key=lambda pair: sum(float(t.errors(joint(t, *pair)).mean()) for t in trials),
        )
        for name, models in (
            ("alone", [alone(t, ridge) for t in own]),
            ("optimum", [joint(t, *mix) for t in own]),
        ):
            errors = [float(t.errors(m).mean()) for t, m in zip(own, models, strict=True)]
            known = {"lam": mix[0], "ridge": mix[1]} if name == "optimum" else {"ridge": ridge}
            rows.append({"rule": name, "records": records, **known, "problems": errors})
        for epsilon in TOTALS:
            setting = choose(trials, epsilon)
            found: dict[str, list[float]] = {"sound": [], "bare": [], "waits": []}
            for place, t in enumerate(own):
                shared = sound_run(t, epsilon, setting, SOUND_RUNS, 1000 + place)
                found["sound"].append(
                    float(t.errors(personalized(t, shared, setting["ridge"])).mean())
                )
                found["bare"].append(float(t.errors(shared).mean()))
                shared = sound_run(t, epsilon, setting, SOUND_RUNS, 1000 + place, Synchronous)
                found["waits"].append(
                    float(t.errors(personalized(t, shared, setting["ridge"])).mean())
                )
            rows += [
                {
                    "rule": rule,
                    "records": records,
                    "epsilon": epsilon,
                    **setting,
                    "problems": errors,
                }
                for rule, errors in found.items()
            ]
    return rows


def joint(own: Tasks, lam: float, tau: float) -> Tensor:
    best = optimum(own, lam, tau, tolerance=1e-7)
    return best.shared + best.own


def mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)


def choose(trials: Sequence[Tasks], epsilon: float) -> Row:
    """Answers, step, lambda and ridge of the refinement (None: P alone) with the least error on ``trials``."""
    tried: list[tuple[float, int, Row]] = []
    for answers, a2, lam in itertools.product(ANSWERS, STEPS, STRENGTHS):
        setting = {"answers": answers, "a2": a2, "lam": lam}
        shared = [sound_run(t, epsilon, setting, TRIAL_RUNS, 7) for t in trials]
        for ridge in (None, *RIDGES):
            error = mean(
                [
                    float(t.errors(personalized(t, s, ridge)).mean())
                    for t, s in zip(trials, shared, strict=True)
                ]
            )
            tried.append((error, len(tried), {**setting, "ridge": ridge}))
    return min(tried)[2]


def waiting() -> list[Row]:
    """The objective in virtual time without noise: a server that never waits, and one that waits for the slowest."""
    own, rows = tasks("classification", 0), []
    best = optimum(own, WAIT_LAM, WAIT_TAU).objective
    for slow in STRAGGLERS:
        scale = [FACTOR] * slow + [1.0] * (TASKS - slow)
        for name, kind in (("never waits", Latencies), ("waits", Synchronous)):
            for steps in ("equal", "own"):
                long = 3 if steps == "own" and name == "never waits" and slow else 1
                schedule = kind(
                    latency=RandomLatency("uniform", {"scale": SLOWEST}),
                    activations=8000 * long,
                    scale=scale,
                )
                table = schedule.bind(TASKS, names=own.problem.data.ids, keys=own.problem.data.keys)
                delay = largest_delay(
                    table.activations(0, 0, table.steps, replicates=WAIT_RUNS).client
                )
                algorithm = PublishedPPDMTL(
            feature_norm=1.0,
                    lam=WAIT_LAM, tau=WAIT_TAU, a1=WAIT_A1, a2=A2 if steps == "equal" else None, delay=delay,
                    smoothness=own.curvature,
                )  # fmt: skip
                reached: list[tuple[Tensor, Tensor]] = []
                for _, now, state in run(
                    own,
                    algorithm,
                    schedule,
                    None,
                    at=range(20, 8000 * long + 1, 40),
                    replicates=WAIT_RUNS,
                    seed=0,
                ):
                    reached.append((now, algorithm.objective(own.problem, state) / best - 1))
                times, gaps = (torch.stack(column) for column in zip(*reached, strict=True))
                row: Row = {"server": name, "steps": steps, "stragglers": slow, "delay": delay}
                row |= {"a2": algorithm.a2 or 1 / ((delay + 1) * own.curvature), "runs": WAIT_RUNS}
                for target in TARGETS:
                    there = gaps <= target
                    first = torch.where(there.any(0), there.double().argmax(0), -1)
                    row[f"to {target}"] = [
                        float(times[k, r]) if k >= 0 else math.inf
                        for r, k in enumerate(first.tolist())
                    ]
                places = sorted({*range(0, len(times), max(1, len(times) // 40)), len(times) - 1})
                row["curve"] = [[float(times[k].mean()), float(gaps[k].mean())] for k in places]
                rows.append(row)
    return rows


PARTS: dict[str, Callable[[dict[str, int]], list[Row]]] = {
    "classification": lambda size: published("classification", **size),
    "regression": lambda size: published("regression", **size),
    "sound": lambda size: sound(),
    "waiting": lambda size: waiting(),
}


def main() -> None:
    """Parse the command line, compute what is missing, write tables and plots."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", maxsplit=1)[0])
    parser.add_argument(
        "--out", type=Path, default=Path("outputs/reproduce/pp_dmtl"), help="parts are kept here"
    )
    parser.add_argument(
        "--scale",
        choices=tuple(SIZES),
        default="default",
        help="answers of a task: 1,000 or 10,000",
    )
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=list(PARTS))
    parser.add_argument(
        "--collect", action="store_true", help="compute nothing; tables of the finished parts"
    )
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    arguments.out.mkdir(parents=True, exist_ok=True)
    found: dict[str, list[Row]] = {}
    for name in arguments.parts:
        scaled = name in ("classification", "regression") and arguments.scale != "default"
        file = arguments.out / f"{name}{'-' + arguments.scale if scaled else ''}.json"
        if not arguments.collect and not file.exists():
            began = time.process_time()
            file.write_text(json.dumps(PARTS[name](SIZES[arguments.scale]), indent=1))
            print(f"{name}: {time.process_time() - began:.0f} s", flush=True)
        if file.exists():
            found[name] = json.loads(file.read_text())
    report.write(found, HERE)


if __name__ == "__main__":
    main()
