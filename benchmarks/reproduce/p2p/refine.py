"""The private runs of figure 2 (c) with a last step of every agent on its own records, against tuned local models.

The step, argmin_v sum_j l(v; x_j, y_j) + a ||v - theta_i||^2, is that of ``PeerAveraging(refine=a)``: nobody receives
its result, so it costs no privacy. From theta_i = 0 it is a local model with one ridge for all, to which a refined
model falls back. Both are tuned by the same grid on the validation problems. Plans of the runs are those of scores.csv.
Writes refined.csv and the table of README.md beside this file.

    python benchmarks/reproduce/p2p/refine.py
"""

from __future__ import annotations

import re
import sys
from pathlib import Path
from statistics import mean

import torch

HERE = Path(__file__).parent
sys.path[:0] = [str(HERE), str(HERE.parent), str(HERE.parents[2])]

from agents import DELTA, SEEDS, VALIDATION, agents, peers  # noqa: E402
from intervals import interval  # noqa: E402
from peers import Array, Row, accuracy, budgets, refined, simulate  # noqa: E402
from scores import read_scores  # noqa: E402
from sweep import markdown, replace_section, write_csv  # noqa: E402

PULLS = (0.05, 0.15, 0.5, 1.5, 5.0, 15.0)
EPSILONS = (1.0, 10.0)
COLUMNS = ("p", "epsilon", "mu", "wakeups", "clip", "sent", "refined", "refine", "local", "local_refine", "difference",
           "difference_low", "difference_high")  # fmt: skip


def plans() -> list[Row]:
    """The settings of the Gaussian runs of run.py, as chosen on validation problems without the last step."""
    found = []
    for score in read_scores(HERE / "scores.csv"):
        if score.method == "Gaussian, valid norm" and score.epsilon in EPSILONS and score.seed == 0:
            p, mu, wakeups, clip = re.findall(r"[\d.]+", f"{score.setting} {score.chosen}")
            plan = {"p": int(p), "epsilon": score.epsilon, "mu": float(mu), "wakeups": int(wakeups)}
            found.append({**plan, "clip": float(clip)})
    return found


def final_models(plan: Row, seed: int) -> Array:
    """The models (n, p) that a private run ends with."""
    algorithm = peers(plan["p"], seed, plan["mu"])
    privacy = budgets((plan["epsilon"],), plan["clip"], DELTA)
    return simulate(algorithm, agents(plan["p"], seed), privacy, plan["wakeups"], seed)[0][0]


def scores(starts: dict[int, Array], p: int, pull: float) -> list[float]:
    """Test accuracies of the refined models of several problems."""
    return [
        accuracy(refined(theta, agents(p, seed), pull, "logistic"), agents(p, seed))
        for seed, theta in starts.items()
    ]


def outcome(plan: Row) -> Row:
    """One cell of the table."""
    p = plan["p"]
    held = {seed: final_models(plan, seed) for seed in VALIDATION}
    pull = max(PULLS, key=lambda a: mean(scores(held, p, a)))
    zeros = {seed: 0 * theta for seed, theta in held.items()}
    alone = max(PULLS, key=lambda a: mean(scores(zeros, p, a)))
    runs = {seed: final_models(plan, seed) for seed in SEEDS}
    sent = [accuracy(theta, agents(p, seed)) for seed, theta in runs.items()]
    own = scores(runs, p, pull)
    local = scores({seed: 0 * theta for seed, theta in runs.items()}, p, alone)
    gain, half = interval(a - b for a, b in zip(own, local, strict=True))
    return {
        **plan,
        "sent": mean(sent),
        "refined": mean(own),
        "refine": pull,
        "local": mean(local),
        "local_refine": alone,
        "difference": gain,
        "difference_low": gain - half,
        "difference_high": gain + half,
    }


def table(rows: list[Row]) -> str:
    """Bold: the interval of the paired difference lies above zero; ✗: below."""
    titles = [
        "p:",
        "epsilon:",
        "as sent:",
        "refined:",
        "local, tuned ridge:",
        "refined - local (95%):",
    ]
    lines = []
    for r in rows:
        text = f"{r['difference']:+.4f} ({r['difference_low']:+.4f}, {r['difference_high']:+.4f})"
        text = (
            f"**{text}**"
            if r["difference_low"] > 0
            else f"{text} ✗"
            if r["difference_high"] < 0
            else text
        )
        cells = [f"{r[name]:.3f}".lstrip("0") for name in ("sent", "refined", "local")]
        lines.append([str(r["p"]), f"{r['epsilon']:g}", *cells, text])
    return markdown(titles, lines)


def main() -> None:
    """Run every plan, write the table."""
    torch.set_num_threads(1)
    rows = []
    for plan in plans():
        rows.append(outcome(plan))
        print(rows[-1], flush=True)
    write_csv(HERE / "refined.csv", rows, COLUMNS)
    replace_section(HERE / "README.md", "refined", table(rows))


if __name__ == "__main__":
    main()
