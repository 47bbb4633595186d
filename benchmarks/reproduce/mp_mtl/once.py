"""One release against ten: what a single private covariance, or a single private mean, is worth to tasks that fit
themselves.

On the problems of run.py, at epsilon .1 to 10, a whole task protected. Every method chooses among its settings for each
epsilon on deals apart from the evaluation (other synthetic tasks; other splits of School), and is then run on eight
deals. Writes scores.csv and a section of README.md beside this file; finished parts are kept in --out.

    python benchmarks/reproduce/mp_mtl/once.py --school /path/to/school.mat
"""

from __future__ import annotations

import argparse
import itertools
import json
import math
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import mean
from typing import Any

import torch
from torch import Tensor

HERE = Path(__file__).parent
sys.path[:0] = [str(HERE), str(HERE.parent), str(HERE.parents[2])]

from problems import DELTA, Setup, errors_of, run, setups  # noqa: E402
from scores import Score, by_client, difference, mark, renew_scores, table  # noqa: E402
from sweep import existing, markdown, replace_section  # noqa: E402

from fedmtl import ClientPrivacy, FedAvg, FullParticipation, LocalSGD, Trainer, models  # noqa: E402
from fedmtl.algorithms import Problem  # noqa: E402
from fedmtl.algorithms.linear.data import LinearData  # noqa: E402
from fedmtl.algorithms.linear.evidence import own_ridges  # noqa: E402
from fedmtl.algorithms.linear.stack import TaskStack  # noqa: E402
from fedmtl.algorithms.mp_mtl.algorithm import MPMTL  # noqa: E402
from fedmtl.contrib.private_prior import PrivatePrior  # noqa: E402
from fedmtl.data import FederatedDataset  # noqa: E402
from fedmtl.privacy import ReleasePlan, open_channel  # noqa: E402
from fedmtl.schedules import Block  # noqa: E402
from fedmtl.trainer.make_problem import ProblemSettings, build_problem  # noqa: E402

EPSILONS = (0.1, 0.3, 1.0, 3.0, 10.0)
TUNING, DEALS, REPETITIONS = (10_000, 10_001), tuple(range(8)), 3
NAMES = {
    "low_rank": "synthetic tasks, low rank",
    "group_sparse": "synthetic tasks, group sparse",
    "school": "School, 139 schools",
}
Chosen = dict[str, Any]
Fit = Callable[[Setup, FederatedDataset, Sequence[float], int, int, Chosen], Tensor]
"""(setup, data, epsilons, repetitions, seed, settings) -> models (epsilons x repetitions, n, d)."""


@dataclass(frozen=True)
class Method:
    """A method with the settings that it chooses from; several epsilons are one program."""

    name: str
    role: Any
    fit: Fit
    grid: tuple[Chosen, ...]
    epsilons: tuple[float, ...] = EPSILONS


def stack_of(data: FederatedDataset) -> TaskStack:
    return TaskStack.of(LinearData.of_data(data), "squared")


def alone(
    setup: Setup, data: FederatedDataset, epsilons: Any, repetitions: int, seed: int, chosen: Chosen
) -> Tensor:
    """Every task's own ridge fit."""
    tasks, ridge = stack_of(data), setup.ridge * chosen["ridge"]
    return tasks.fit(own_ridges(tasks, ridge) if chosen["own"] else ridge)[None]


def published(
    setup: Setup,
    data: FederatedDataset,
    epsilons: Sequence[float],
    repetitions: int,
    seed: int,
    chosen: Chosen,
) -> Tensor:
    """MP-MTL, ten releases with sound noise."""
    algorithm = MPMTL(
        feature_norm=1.0, ridge=setup.ridge, alpha=0.0, penalty=chosen["penalty"], rho=chosen["rho"],
        lam=chosen["lam"] * setup.clip,
    )  # fmt: skip
    return run(algorithm, data, epsilons, repetitions, clip=setup.clip, seed=seed).models


def prior(
    setup: Setup,
    data: FederatedDataset,
    epsilons: Sequence[float],
    repetitions: int,
    seed: int,
    chosen: Chosen,
) -> Tensor:
    """The private prior; with share 0, MP-MTL in one release."""
    problem = problem_of(data, seed)
    algorithm = PrivatePrior(feature_norm=1.0, ridge=setup.ridge, scale=1.0, **chosen)
    state, count = None, len(epsilons) * repetitions
    channel = open_one(problem, algorithm.plan, epsilons, repetitions, 1.0, seed)
    state = algorithm.init(problem, count)
    everyone = torch.arange(problem.clients)
    channel.begin(0, channel.draw(0))
    state = algorithm.step(
        problem, state, Block(0, torch.zeros(1, 1), everyone[None, None]), channel
    )
    return algorithm.models(problem, state, torch.arange(problem.clients))


def mean_and_ridge(
    setup: Setup,
    data: FederatedDataset,
    epsilons: Sequence[float],
    repetitions: int,
    seed: int,
    chosen: Chosen,
) -> Tensor:
    """One release of the mean of the clipped fits, and every task's ridge about it."""
    tasks, problem = stack_of(data), problem_of(data, seed)

    def plan(problem: Problem, schedule: Any) -> tuple[ReleasePlan, ...]:
        return (ReleasePlan(name="mean", dimension=tasks.data.dimension),)

    channel = open_one(problem, plan, epsilons, repetitions, setup.clip * chosen["clip"], seed)
    everyone = torch.arange(problem.clients)
    channel.begin(0, channel.draw(0))
    fits = tasks.fit(setup.ridge)
    centres = channel.release("mean", fits.expand(channel.replicates, -1, -1), everyone)
    return about(tasks, centres, setup.ridge * chosen["strength"])


def about(tasks: TaskStack, centres: Tensor, ridge: float) -> Tensor:
    """argmin L_i(w) + (ridge / 2) ||w - centre||^2 for every centre (R, d) and task: (R, n, d)."""
    assert tasks.moments is not None
    gram, cross, _ = tasks.moments
    pulled = cross[:, :, None] + ridge * centres.T
    return torch.linalg.solve(
        gram + ridge * torch.eye(tasks.data.dimension, dtype=gram.dtype), pulled
    ).permute(2, 0, 1)


def fedavg(
    setup: Setup,
    data: FederatedDataset,
    epsilons: Sequence[float],
    repetitions: int,
    seed: int,
    chosen: Chosen,
) -> Tensor:
    """FedAvg, and every task's ridge about the shared model; an infinite strength is the shared model itself."""
    centres = torch.stack([averaged(setup, data, epsilon, seed, chosen) for epsilon in epsilons])
    if chosen["strength"] == math.inf:
        return centres[:, None].expand(-1, len(data), -1)
    return about(stack_of(data), centres, setup.ridge * chosen["strength"])


_AVERAGED: dict[Any, Tensor] = {}


def averaged(
    setup: Setup, data: FederatedDataset, epsilon: float, seed: int, chosen: Chosen
) -> Tensor:
    key = setup.name, epsilon, seed, chosen["rounds"], chosen["clip"]
    if key not in _AVERAGED:
        trained = Trainer(
            algorithm=FedAvg(local=LocalSGD(lr=1.0, steps=20, batch_size=None)), data=data, loss="half_mse",
            model=models.linear_regression(bias=False), schedule=FullParticipation(), rounds=chosen["rounds"],
            privacy=ClientPrivacy(clip_norm=setup.clip * chosen["clip"], epsilon=epsilon, delta=DELTA), seed=seed,
            baselines=(), eval_every=chosen["rounds"], progress=False, dtype="float64",
        ).fit()  # fmt: skip
        assert trained.shared is not None
        _AVERAGED[key] = trained.shared.double()
    return _AVERAGED[key]


def problem_of(data: FederatedDataset, seed: int) -> Problem:
    model = models.linear_regression(bias=False)
    return build_problem(
        data, model, ProblemSettings(loss="mse", rounds=1, seed=seed, dtype="float64")
    )


def open_one(
    problem: Problem, plan: Any, epsilons: Sequence[float], repetitions: int, clip: float, seed: int
) -> Any:
    """A channel of one step of all repetitions at all epsilons."""
    bound, count = FullParticipation().bind(problem.clients), len(epsilons) * repetitions
    options: dict[str, Any] = {"clip_norm": clip, "delta": DELTA}
    privacy = tuple(
        ClientPrivacy(epsilon=e, **options) for e in epsilons for _ in range(repetitions)
    )
    own = privacy if count > 1 else privacy[0]
    return open_channel(
        own, plan(problem, bound), bound, seed=seed, steps=1, fingerprint="study", replicates=count
    )


def grid(**values: Sequence[Any]) -> tuple[Chosen, ...]:
    return tuple(dict(zip(values, one, strict=True)) for one in itertools.product(*values.values()))


ONCE = grid(share=(0.0,), form=("symmetric", "diagonal"), own_ridge=(False, True))
METHODS = (
    Method("alone", "local", alone, grid(ridge=(0.5, 0.7, 1.0, 1.4, 2.0), own=(False, True))),
    Method(
        "MP-MTL, ten releases", "published", published,
        grid(penalty=("nuclear", "l21"), rho=(0.25, 0.5, 1.5), lam=(0.03, 0.1)),
    ),
    Method("FedAvg", "fedavg", fedavg, grid(rounds=(3, 10), clip=(0.25, 1.0), strength=(math.inf,))),
    Method(
        "FedAvg + finetuning", "fedavg", fedavg, grid(rounds=(3, 10), clip=(0.25, 1.0), strength=(1.0, 3.0, 10.0, 30.0))
    ),
    Method(
        "private mean + ridge", "baseline", mean_and_ridge,
        grid(clip=(0.5, 1.0, 2.0), strength=(1.0, 3.0, 10.0, 30.0)),
    ),
    Method("MP-MTL, one release", "new", prior, ONCE),
    Method(
        "private prior", "new", prior,
        (*ONCE, *grid(share=(0.5,), form=("symmetric",), own_ridge=(False, True)),
         *grid(share=(1.0,), form=("symmetric",), own_ridge=(False, True))),
    ),
    Method("MP-MTL, one release, nothing tuned", "new", prior, ({},)),
    Method("private prior, share 1, nothing tuned", "new", prior, ({"share": 1.0},)),
)  # fmt: skip


def scored(errors: Tensor) -> list[dict[str, float]]:
    """nMSE of each task by its number, of each repetition (R, n); to 12 digits, so that equal models are equally good
    whatever they are computed with."""
    found = [[float(f"{value:.12g}") for value in one] for one in errors.tolist()]
    return [
        {str(task): value for task, value in enumerate(one) if not math.isnan(value)}
        for one in found
    ]


def choose(method: Method, setup: Setup) -> dict[float, Chosen]:
    """The settings with the least mean error over the deals for tuning, at every epsilon."""
    epsilons = method.epsilons
    if len(method.grid) == 1:
        return dict.fromkeys(epsilons, method.grid[0])
    totals = []
    for chosen in method.grid:
        total = torch.zeros(len(epsilons), dtype=torch.float64)
        for deal in TUNING:
            data = setup.deal(deal)
            found = errors_of(method.fit(setup, data, epsilons, 2, deal, chosen), data).mean
            total += found if len(found) == 1 else found.view(len(epsilons), -1).mean(1)
        totals.append(total)
    best = torch.stack(totals).argmin(0).tolist()
    return {epsilon: method.grid[place] for epsilon, place in zip(epsilons, best, strict=True)}


def evaluate(method: Method, setup: Setup) -> list[Score]:
    """A score for every epsilon and deal, beside that of learning alone with its best setting."""
    chosen, reference = choose(method, setup), choose(METHODS[0], setup)[EPSILONS[0]]
    scores = []
    for deal in DEALS:
        data = setup.deal(deal)
        local = scored(errors_of(alone(setup, data, (), 1, deal, reference), data).task)[0]
        for epsilon in method.epsilons if method.role != "local" else (0.0,):
            own = chosen[epsilon or method.epsilons[0]]
            tasks = scored(
                errors_of(method.fit(setup, data, (epsilon,), REPETITIONS, deal, own), data).task
            )
            counts = [by_client(one, local, larger=False) for one in tasks]
            shares = {key: mean(count[key] for count in counts) for key in counts[0]}
            if method.role == "local":
                shares = {"worst_tenth": shares["worst_tenth"]}
            words = ", ".join(f"{key} {value}" for key, value in own.items())
            score = mean(mean(one.values()) for one in tasks)
            scores.append(
                Score(NAMES.get(setup.name, setup.name), "nMSE", False, method.role, method.name, epsilon, deal, score,
                      chosen=words or "defaults", **shares)
            )  # fmt: skip
    return scores


def kept(out: Path, setup: Setup, method: Method) -> list[Score]:
    """The scores of a method, computed where ``out`` does not have them yet."""
    file = out / f"{setup.name}-{method.name.replace(' ', '_')}.json"
    if not file.exists():
        out.mkdir(parents=True, exist_ok=True)
        began = time.monotonic()
        file.write_text(json.dumps([vars(score) for score in evaluate(method, setup)]))
        print(f"{setup.name}, {method.name}: {time.monotonic() - began:.0f} s", flush=True)
    return [Score(**row) for row in json.loads(file.read_text())]


def claims(scores: Sequence[Score]) -> str:
    """Percent below learning alone, with the 95% interval of the paired difference, and the shares of tasks."""
    lines = []
    for setting in dict.fromkeys(score.setting for score in scores):
        own = [score for score in scores if score.setting == setting]
        local = [score for score in own if score.role == "local"]
        base = mean(score.score for score in local) / 100
        for name in ("MP-MTL, ten releases", "FedAvg + finetuning", "private mean + ridge", "MP-MTL, one release",
                     "private prior"):  # fmt: skip
            line = [setting, name]
            for epsilon in EPSILONS:
                found = [
                    score for score in own if score.method == name and score.epsilon == epsilon
                ]
                gain, half = difference(found, local)
                shares = "/".join(
                    f"{100 * mean(getattr(s, key) for s in found):.0f}"
                    for key in ("better", "equal", "worse")
                )
                line.append(
                    f"{-gain / base:+.1f} ± {half / base:.1f} {mark(found, local)} ({shares})"
                )
            lines.append(line)
    return markdown(["problem", "method", *(f"ε {epsilon:g}:" for epsilon in EPSILONS)], lines)


def main() -> None:
    """Parse the command line, compute what is missing, write scores and tables."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", maxsplit=1)[0])
    parser.add_argument(
        "--school", type=existing, help="school.mat, or its folder; without it no School part"
    )
    parser.add_argument(
        "--out",
        type=Path,
        default=Path("outputs/reproduce/mp_mtl_once"),
        help="parts are kept here",
    )
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    scores = [
        score
        for setup in setups(arguments.school).values()
        for method in METHODS
        for score in kept(arguments.out, setup, method)
    ]
    renew_scores(HERE / "scores.csv", scores)
    tables = "\n\n".join(
        f"{name}:\n\n{table(scores, name)}" for name in dict.fromkeys(s.setting for s in scores)
    )
    replace_section(HERE / "README.md", "once", tables)
    replace_section(HERE / "README.md", "once_claims", claims(scores))


if __name__ == "__main__":
    main()
