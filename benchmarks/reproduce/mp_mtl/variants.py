"""What the paper has beside Algorithms 2 and 3: Wishart noise at the epsilon that it claims, Algorithms 4 and 5, and
School with 10 to 30 percent of the pupils for training.

Tuned and evaluated as in once.py, on the same deals, so that all rows are paired with those there. Adds its rows to
scores.csv, writes three sections of README.md and a figure; finished parts are kept in --out.

    python benchmarks/reproduce/mp_mtl/variants.py --school /path/to/school.mat
"""

from __future__ import annotations

import argparse
import itertools
import math
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from statistics import mean
from typing import Any

import torch
from once import HERE, METHODS, NAMES, Chosen, Method, grid, kept
from problems import DELTA, ROUNDS, Setup, run, school, setups
from scores import Score, difference, interval, mark, renew_scores
from sweep import existing, markdown, replace_section
from torch import Tensor

from fedmtl.algorithms.mp_mtl import MPMTL
from fedmtl.contrib.published.mp_mtl import PublishedMPMTL
from fedmtl.data import FederatedDataset
from fedmtl.privacy import PrivacyCost
from fedmtl.report.canvas import drawing, styles_of

CLAIMED, PERCENTS = (1.0, 10.0), (10, 20, 30)
SOUND, WISHART, PRINTED = (
    "MP-MTL, low rank, Gaussian noise",
    "Wishart noise",
    "Wishart noise, as printed",
)
FOUR, FIVE = "MP-MTL, W = P + Q (Algorithm 4)", "MP-MTL, no trusted curator (Algorithm 5)"
TEN = "MP-MTL, ten releases"
CURVES = ("alone", TEN, "MP-MTL, one release", "private prior", "FedAvg + finetuning")


def ten(
    setup: Setup, data: FederatedDataset, epsilons: Sequence[float], repetitions: int, seed: int, chosen: Chosen,
    *, curator: bool = False, options: Any = (), kind: type[MPMTL] = MPMTL, **fixed: Any,
) -> Tensor:  # fmt: skip
    """MP-MTL of ten releases; with ``curator`` every epsilon is that of a task's data against the curator as well."""
    settings = dict(chosen, lam=chosen["lam"] * setup.clip)
    if (
        "own_lam" in settings
    ):  # h of Q in multiples of the ridge, an L1 norm of models as long as the clip
        settings["own_lam"] *= setup.ridge * (
            setup.clip if settings["own_penalty"] == "l1" else 1.0
        )
    found = []
    for part in ((epsilon,) for epsilon in epsilons) if curator else (tuple(epsilons),):
        own = {"curator_epsilon": part[0], "curator_delta": DELTA} if curator else {}
        algorithm = kind(feature_norm=1.0, ridge=setup.ridge, alpha=0.0, **settings, **own, **fixed)
        found.append(
            run(
                algorithm, data, part, repetitions, clip=setup.clip, seed=seed, **dict(options)
            ).models
        )
    return torch.cat(found)


UNSOUND = {"mechanism": "wishart"}
SHIFTS = grid(rho=(0.0, 0.25, 0.5, 1.5), lam=(0.03, 0.1, 0.3, 1.0))
NOISES = (
    Method(SOUND, "published", ten, SHIFTS, CLAIMED),
    Method(WISHART, "published", partial(ten, options=UNSOUND), SHIFTS, CLAIMED),
    Method(
        PRINTED, "published", partial(ten, options=UNSOUND, kind=PublishedMPMTL), SHIFTS, CLAIMED
    ),
)
OWN = grid(
    penalty=("nuclear", "l21"),
    rho=(0.25, 1.5),
    lam=(0.1,),
    own_penalty=("l1", "frobenius"),
    own_lam=(0.1, 1.0),
)
BOTH = grid(penalty=("nuclear", "l21"), rho=(0.25, 0.5, 1.5), lam=(0.03, 0.1))
ALGORITHMS = (
    Method(FOUR, "published", ten, OWN, CLAIMED),
    Method(FIVE, "published", partial(ten, curator=True), BOTH, CLAIMED),
)


def unsound(score: Score) -> Score:
    """The score with the epsilon that holds, which is infinite, and the claim in its name."""
    if score.method not in (WISHART, PRINTED):
        return score
    return replace(
        score, epsilon=math.inf, method=f"{score.method}, claimed epsilon {score.epsilon:g}"
    )


def refuted(epsilon: float) -> float:
    """The least delta at which Wishart noise could hold over the ten releases: 1 - exp(-sum of the epsilon_t)."""
    cost = PrivacyCost(law="wishart", sizes=(1,), delta=DELTA)
    z = cost.multiplier(epsilon, ROUNDS)
    assert cost.epsilon(ROUNDS, z) <= epsilon
    return -math.expm1(-ROUNDS / z)


def percent_setup(root: Path, percent: int) -> Setup:
    """School with that part of the pupils for training; the ridge goes with the inverse of their number."""
    known = setups(root)["school"]
    if percent == 30:
        return known
    name = f"School, {percent}% for training"
    return replace(
        known,
        name=name,
        deal=lambda seed: school(root, seed, percent),
        ridge=known.ridge * 30 / percent,
    )


def found_of(scores: Sequence[Score], setting: str, method: str, epsilon: float) -> list[Score]:
    own = [score for score in scores if score.setting == setting and score.epsilon == epsilon]
    return [score for score in own if score.method == method]


def cell(found: Sequence[Score], local: Sequence[Score]) -> str:
    value, half = interval(score.score for score in found)
    return f"{value:.3f} ± {half:.3f} {mark(found, local)}".strip()


def soundness(scores: Sequence[Score], names: Sequence[str]) -> str:
    """Sound and unsound noise at the same number, and the paired difference."""
    lines = []
    for setting, epsilon in itertools.product(names, CLAIMED):
        local = found_of(scores, setting, "alone", 0.0)
        sound = found_of(scores, setting, SOUND, epsilon)
        wishart, printed = (
            found_of(scores, setting, f"{name}, claimed epsilon {epsilon:g}", math.inf)
            for name in (WISHART, PRINTED)
        )
        gain, half = difference(sound, wishart)
        base = mean(score.score for score in wishart) / 100
        lines.append([setting, f"{epsilon:g}", cell(local, local), *(cell(s, local) for s in (sound, wishart, printed)),
                      f"{gain / base:+.1f} ± {half / base:.1f} %", f"{refuted(epsilon):.5f}"])  # fmt: skip
    titles = ["problem", "epsilon:", "alone:", "Gaussian, sound:", "Wishart:", "Wishart, as printed:",
              "cost of soundness:", "delta of Wishart at least:"]  # fmt: skip
    return markdown(titles, lines)


def algorithms(scores: Sequence[Score], names: Sequence[str]) -> str:
    """Algorithms 4 and 5 beside 2 and 3, with shares of tasks, at the same epsilons."""
    lines = []
    for setting, method in itertools.product(names, ("alone", TEN, FOUR, FIVE)):
        local = found_of(scores, setting, "alone", 0.0)
        line = [setting, method]
        for epsilon in CLAIMED:
            own = found_of(scores, setting, method, epsilon) or local
            better, worse = (
                100 * mean(getattr(score, key) for score in own) for key in ("better", "worse")
            )
            line.append(
                cell(own, local) + (f" ({better:.0f}/{worse:.0f})" if own is not local else "")
            )
        lines.append(line)
    return markdown(["problem", "method", *(f"epsilon {epsilon:g}:" for epsilon in CLAIMED)], lines)


def curves(scores: Sequence[Score], settings: dict[int, str], path: Path) -> str:
    """nMSE by part of the pupils at epsilon 1: the table, and the figure in ``path``."""
    with drawing(path, 6.4, 4.0) as figure:
        axes = figure.subplots()
        axes.set(title="School, epsilon 1", xlabel="pupils for training, percent", ylabel="nMSE")
        styles, lines = styles_of(CURVES), []
        for method in CURVES:
            line, points = [method], []
            for setting in settings.values():
                local = found_of(scores, setting, "alone", 0.0)
                own = local if method == "alone" else found_of(scores, setting, method, 1.0)
                line.append(cell(own, local))
                points.append(interval(score.score for score in own))
            lines.append(line)
            means, halves = zip(*points, strict=True)
            colour, marker = styles[method]
            axes.errorbar(
                list(settings), means, halves, color=colour, marker=marker, capsize=2, label=method
            )
        axes.set_xticks(list(settings))
        axes.legend(fontsize=8)
    return markdown(["method", *(f"{percent}%:" for percent in settings)], lines)


def main() -> None:
    """Parse the command line, compute what is missing, write scores, tables and the figure."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", maxsplit=1)[0])
    parser.add_argument("--school", type=existing, required=True, help="school.mat, or its folder")
    parser.add_argument(
        "--out",
        type=Path,
        default=Path("outputs/reproduce/mp_mtl_once"),
        help="parts are kept here",
    )
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    known = setups(arguments.school)
    problems = [known[name] for name in ("low_rank", "school")]
    new = [
        score
        for setup in problems
        for method in NOISES
        for score in kept(arguments.out, setup, method)
    ]
    new += [
        score
        for setup in known.values()
        for method in ALGORITHMS
        for score in kept(arguments.out, setup, method)
    ]
    parts = {percent: percent_setup(arguments.school, percent) for percent in PERCENTS}
    for setup in (setup for percent, setup in parts.items() if percent != 30):
        for method in METHODS:
            if method.name in CURVES:
                new += kept(arguments.out, setup, replace(method, epsilons=(1.0,)))
    scores = renew_scores(HERE / "scores.csv", [unsound(score) for score in new])
    names = [NAMES[setup.name] for setup in problems]
    replace_section(HERE / "README.md", "soundness", soundness(scores, names))
    replace_section(HERE / "README.md", "algorithms", algorithms(scores, list(NAMES.values())))
    settings = {percent: NAMES.get(setup.name, setup.name) for percent, setup in parts.items()}
    replace_section(HERE / "README.md", "percents", curves(scores, settings, HERE / "percents.png"))


if __name__ == "__main__":
    main()
