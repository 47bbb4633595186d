"""Waiting against not waiting in virtual time, with the step of both servers chosen by simulating their schedules.

Writes waiting.csv and its table of README.md beside this file.

    python benchmarks/reproduce/pp_dmtl/waiting.py
"""

from __future__ import annotations

import math
import sys
from dataclasses import replace
from pathlib import Path

import torch

HERE = Path(__file__).parent
sys.path[:0] = [str(HERE), str(HERE.parent)]

import scores  # noqa: E402
from run import FACTOR, SLOWEST, STRAGGLERS, WAIT_A1, WAIT_LAM, WAIT_TAU  # noqa: E402
from scores import Score, difference, interval, write_scores  # noqa: E402
from sweep import markdown, replace_section  # noqa: E402
from tasks import TASKS, optimum, run, tasks  # noqa: E402

from fedmtl import Latencies  # noqa: E402
from fedmtl.algorithms.pp_dmtl.step_size import largest_delay  # noqa: E402
from fedmtl.contrib.published.pp_dmtl import PublishedPPDMTL  # noqa: E402
from fedmtl.schedules import RandomLatency, Synchronous  # noqa: E402
from fedmtl.trainer.run_channel import bind_schedule  # noqa: E402

SEEDS, EVENTS, TARGET, RECORDED = range(10, 15), 30_000, 0.02, TASKS
SERVERS = {"never waits": Latencies, "waits": Synchronous}
RULES = {"worst delays": "worst delays", "simulated": "simulated"}


def seconds(stragglers: int, server: str, rule: str, seed: int) -> Score:
    """Return the virtual time until the objective is within 2% of its optimum, in one problem and schedule."""
    own = tasks("classification", seed)
    best = optimum(own, WAIT_LAM, WAIT_TAU, tolerance=1e-7).objective
    scale = [FACTOR] * stragglers + [1.0] * (TASKS - stragglers)
    schedule = SERVERS[server](
        latency=RandomLatency("uniform", {"scale": SLOWEST}), activations=EVENTS, scale=scale
    )
    problem = replace(own.problem, seed=seed)
    bound = bind_schedule(schedule, problem.data)
    algorithm = PublishedPPDMTL(
        feature_norm=1.0, lam=WAIT_LAM, tau=WAIT_TAU, a1=WAIT_A1, smoothness=own.curvature, a2="auto",
    )  # fmt: skip
    if rule == "simulated":
        algorithm = algorithm.resolve_auto(problem, bound, [None])
    else:
        delay = largest_delay(bound.activations(seed, 0, 2000, replicates=1).client)
        algorithm = replace(algorithm, a2=1 / ((delay + 1) * own.curvature), delay=delay)
    reached = math.inf
    marks = range(RECORDED, EVENTS + 1, RECORDED)
    for _, now, state in run(own, algorithm, schedule, None, at=marks, replicates=1, seed=seed):
        if float(algorithm.objective(own.problem, state)) <= (1 + TARGET) * best:
            reached = float(now)
            break
    return Score(
        f"{stragglers} stragglers of {TASKS}", "seconds to 2%", False, "new" if rule == "simulated" else "published",
        f"{server}, {rule}", math.inf, seed, reached, chosen=f"a2 {algorithm.a2:.3g}",
    )  # fmt: skip


def main() -> None:
    """Compute, and write the scores and the table."""
    torch.set_num_threads(1)
    file, found = HERE / "waiting.csv", []
    if "--collect" not in sys.argv:
        for seed in SEEDS:
            for stragglers in STRAGGLERS:
                for server in SERVERS:
                    for rule in RULES:
                        found.append(seconds(stragglers, server, rule, seed))
                        print(found[-1], flush=True)
            write_scores(file, found)
    found = scores.read_scores(file)
    lines = []
    for setting in dict.fromkeys(score.setting for score in found):
        for rule in RULES:
            never, waits = ([s for s in found if (s.setting, s.method) == (setting, f"{server}, {rule}")]
                            for server in SERVERS)  # fmt: skip
            steps = [sorted(float(s.chosen.split()[1]) for s in part) for part in (never, waits)]
            lines.append(
                [setting, rule]
                + [f"{part[0]:.3g} to {part[-1]:.3g}" for part in steps]
                + [
                    "{:.2f} ± {:.2f}".format(*interval(s.score for s in part))
                    for part in (never, waits)
                ]
                + ["{:+.2f} ± {:.2f}".format(*difference(never, waits))]
            )
    titles = ["", "step", "a2, never waits:", "a2, waits:", "never waits:", "waits:", "difference:"]
    replace_section(HERE / "README.md", "tuned", markdown(titles, lines))


if __name__ == "__main__":
    main()
