"""MP-MTL against learning alone, learning together without privacy, and earlier private methods.

Figures 2 to 6, 8 and 9 of Liang et al. ("Model-Protected Multi-Task Learning", 2020) with sound noise on synthetic
tasks and on ILEA School. All repetitions of a setting, at all epsilons, are one batched program. Writes table.csv, the
plots and the tables of README.md beside this file. Finished parts are kept in --out and not repeated.

    python benchmarks/reproduce/mp_mtl/run.py --school /path/to/school.mat
"""

from __future__ import annotations

import argparse
import itertools
import json
import math
import sys
import time
from collections.abc import Callable, Iterable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from sklearn.metrics import roc_auc_score
from torch import Tensor

HERE = Path(__file__).parent
sys.path[:0] = [str(HERE), str(HERE.parent), str(HERE.parents[2])]

import report  # noqa: E402
from problems import (  # noqa: E402
    DELTA,
    PUBLIC,
    Setup,
    errors_of,
    linear_outputs,
    rows_of,
    run,
    setups,
    synthetic,
)
from sweep import existing  # noqa: E402

from benchmarks.baselines.mp_mtl import choose_multi_task, multi_task, single_task  # noqa: E402
from benchmarks.baselines.mp_mtl_private import DPMTRL, DPAggr, TaskBudget  # noqa: E402
from fedmtl.algorithms.mp_mtl.algorithm import MPMTL  # noqa: E402
from fedmtl.data import Examples, FederatedDataset, load_synthetic_tasks  # noqa: E402
from fedmtl.data.synthetic.tasks import true_weights  # noqa: E402
from fedmtl.privacy import SeededSource  # noqa: E402

Row = dict[str, Any]
EPSILONS = (0.1, 0.3, 1.0, 3.0, 10.0, 30.0, 100.0)
SCALES = {
    "default": (20, 5, 5),
    "paper": (100, 1, 20),
}  # deals, repetitions of a deal, deals of the baselines
LAM, RHO, SMALL_RHO = 0.1, 1.5, 0.25  # lambda in units of the clip
LAMS, RHOS = (0.03, 0.1, 0.3, 1.0), (0.0, 0.25, 0.5, 1.0, 1.25, 1.5, 2.0)
PENALTIES = {"nuclear": "LR", "l21": "GS"}
MTL_LAMS = tuple(10 ** (k / 4) for k in range(-8, 3))
AGGR_REGS = (0.01, 0.1, 1.0, 10.0, 100.0, 1000.0)
MTRL, OWN = (
    ((1.0, 10.0, 100.0, 1000.0), (0.03, 1.0)),
    ((0.01, 0.03, 0.1), (0.0, 0.001, 0.01, 0.1)),
)  # lam1, lam2
COUNTS, FIRST = (20, 40, 80, 160, 320, 640), 20
ALPHAS, QS = (-1.0, -0.5, 0.0, 0.4, 2 / 3, 1.0, 1.5, 2.0), (0.6, 0.8, 0.9, 1.0, 1.1, 1.25)


def method(setup: Setup, penalty: str = "nuclear", **options: Any) -> MPMTL:
    """MP-MTL with the settings of the study: lambda = 0.1 K, rho = 1.5, no momentum."""
    settings = {
        "lam": LAM * setup.clip,
        "rho": RHO,
        "ridge": setup.ridge,
        "momentum": "none",
        "alpha": 0.0,
    }
    return MPMTL(feature_norm=1.0, penalty=penalty, **{**settings, **options})  # type: ignore[arg-type]


def sources(count: int, seed: int) -> list[SeededSource]:
    return [SeededSource(seed, replicate) for replicate in range(count)]


def baselines(setup: Setup) -> Iterable[tuple[str, list[Any], list[Any]]]:
    """Name, settings to choose from, and units of protection of the private baselines."""
    scale = {"target": setup.target, "radius": 1.25 * setup.clip}
    aggr = [DPAggr(reg=reg, **scale) for reg in AGGR_REGS]
    mtrl = [DPMTRL(lam1=a, lam2=b, **scale) for a, b in itertools.product(*MTRL)]
    own = [DPMTRL(lam1=a, lam2=b, output="own", **scale) for a, b in itertools.product(*OWN)]
    yield "DP-AGGR", aggr, ["record_group", "task"]
    yield "DP-MTRL", mtrl, ["record_group", "task"]
    yield "DP-MTRL own", own, ["task"]


def budget(epsilon: float, unit: str) -> TaskBudget:
    return TaskBudget(epsilon=epsilon, delta=DELTA, unit=unit)  # type: ignore[arg-type]


def tradeoff(setup: Setup, scale: str) -> list[Row]:
    """Figures 6 and 9: nMSE by epsilon. A row a method and epsilon, with the mean of every deal."""
    deals, repetitions, few = SCALES[scale]
    found: dict[tuple[str, float, str], list[tuple[float, float]]] = {}
    choices: dict[tuple[str, float], tuple[Any, str]] = {}

    def keep(
        name: str, epsilon: float, models: Tensor, data: FederatedDataset, note: str = ""
    ) -> None:
        error = errors_of(models, data)
        found.setdefault((name, epsilon, note), []).append(
            (float(error.mean.mean()), float(error.pooled.mean()))
        )

    # the public tasks; School has none, so there the baselines choose on the test pupils of another split
    public = setup.deal(PUBLIC)
    rows = rows_of(public.train)
    for name, candidates, units in baselines(setup):
        for unit, epsilon in itertools.product(units, EPSILONS):
            errors = [
                float(
                    errors_of(
                        one.fit(rows, budget(epsilon, unit), sources(2, 5)), public
                    ).mean.mean()
                )
                for one in candidates
            ]
            choices[f"{name} {unit}", epsilon] = candidates[errors.index(min(errors))], unit
    lam = {g: choose_multi_task(rows, MTL_LAMS, penalty=g) for g in ("nuclear", "rows")}  # type: ignore[arg-type]
    for deal in range(deals):
        data = setup.deal(deal)
        rows = rows_of(data.train)
        keep("STL", math.inf, single_task(rows, reg=setup.ridge).models, data)
        keep("STL, leave one out", math.inf, single_task(rows).models, data)
        for g, short in (("nuclear", "LR"), ("rows", "GS")):
            together = multi_task(rows, lam[g], penalty=g, tolerance=1e-4, iterations=1000)  # type: ignore[arg-type]
            keep(f"MTL-{short}", math.inf, together.models, data, f"lambda {lam[g]:.3g}")
        for (penalty, short), rho in itertools.product(PENALTIES.items(), (RHO, SMALL_RHO)):
            algorithm = method(setup, penalty, rho=rho)
            epsilons = (*EPSILONS, math.inf)
            models = run(algorithm, data, epsilons, repetitions, clip=setup.clip, seed=deal).models
            for e, epsilon in enumerate(epsilons):
                own = models[e * repetitions : (e + 1) * repetitions]
                keep(f"MP-MTL-{short} {rho:g}", epsilon, own, data)
        if deal >= few:
            continue
        for (name, epsilon), (settings, unit) in choices.items():
            fitted = settings.fit(rows, budget(epsilon, unit), sources(2, deal))
            keep(name, epsilon, fitted, data, _chosen(settings))
    return [
        {
            "method": name,
            "epsilon": epsilon,
            "note": note,
            "deals": [task for task, _ in values],
            "pooled_deals": [pooled for _, pooled in values],
            "runs": len(values) * (1 if epsilon == math.inf and "MP" not in name else repetitions),
        }
        for (name, epsilon, note), values in found.items()
    ]


def _chosen(settings: Any) -> str:
    if isinstance(settings, DPAggr):
        return f"reg {settings.reg:g}"
    return f"lam1 {settings.lam1:g}, lam2 {settings.lam2:g}"


def labels(setup: Setup, scale: str) -> list[Row]:
    """aAUC by epsilon with the logistic loss: the synthetic tasks of low rank with two classes. The step size is 4, so
    that lambda = 0.1 K / 4 is the same threshold."""
    rows: list[Row] = []
    repetitions = 5
    for deal in range(10):
        data = synthetic("low_rank", deal, problem="classification")
        own = rows_of(data.train)

        def keep(
            name: str, epsilon: float, models: Tensor, deal: int = deal, data: Any = data
        ) -> None:
            scores = linear_outputs(models, data.test).reshape(-1, len(data.test.y)).numpy()
            ends = zip(data.test.offsets[:-1].tolist(), data.test.offsets[1:].tolist(), strict=True)
            auc = [roc_auc_score(data.test.y[a:b], one[a:b]) for a, b in ends for one in scores]
            rows.append(
                {"deal": deal, "method": name, "epsilon": epsilon, "auc": float(np.nanmean(auc))}
            )

        keep("STL", math.inf, single_task(own, loss="logistic", reg=setup.ridge).models)
        keep("STL, five folds", math.inf, single_task(own, loss="logistic").models)
        for g, short in (("nuclear", "LR"), ("rows", "GS")):
            together = multi_task(
                own, 0.3, penalty=g, loss="logistic", tolerance=1e-3, iterations=500
            )  # type: ignore[arg-type]
            keep(f"MTL-{short}", math.inf, together.models)
        for (penalty, short), rho in itertools.product(PENALTIES.items(), (RHO, SMALL_RHO)):
            algorithm = method(setup, penalty, rho=rho, loss="logistic", lam=LAM * setup.clip / 4)
            epsilons = (*EPSILONS, math.inf)
            models = run(algorithm, data, epsilons, repetitions, clip=setup.clip, seed=deal).models
            for e, epsilon in enumerate(epsilons):
                keep(
                    f"MP-MTL-{short} {rho:g}",
                    epsilon,
                    models[e * repetitions : (e + 1) * repetitions],
                )
    return rows


def grid(setup: Setup, scale: str) -> list[Row]:
    """nMSE over lambda, rho and epsilon, on the public tasks (School: on a split that is not in the study), and of
    the pure mechanisms and of momentum."""
    data, epsilons, repetitions = setup.deal(PUBLIC), (*EPSILONS, math.inf), 5
    alone = single_task(rows_of(data.train), reg=setup.ridge).models
    rows: list[Row] = [{"method": "STL", "nmse": float(errors_of(alone, data).mean)}]

    def add(algorithm: MPMTL, row: Row, **options: Any) -> None:
        models = run(
            algorithm, data, epsilons, repetitions, clip=setup.clip, seed=1, **options
        ).models
        errors = errors_of(models, data).mean.view(len(epsilons), repetitions).mean(1).tolist()
        rows.extend(
            {**row, "epsilon": e, "nmse": value} for e, value in zip(epsilons, errors, strict=True)
        )

    for penalty, lam, rho in itertools.product(PENALTIES, LAMS, RHOS):
        row = {"method": f"MP-MTL-{PENALTIES[penalty]}", "lam": lam, "rho": rho}
        add(method(setup, penalty, lam=lam * setup.clip, rho=rho), row)
    for rho in (RHO, SMALL_RHO):
        add(method(setup, rho=rho), {"method": "K-norm noise", "rho": rho}, mechanism="l2_laplace")
        add(
            method(setup, "l21", rho=rho),
            {"method": "GS, Laplace noise", "rho": rho},
            mechanism="laplace",
        )
        add(
            method(setup, rho=rho, momentum="nesterov", alpha=0.4),
            {"method": "Nesterov", "rho": rho},
        )
        add(method(setup, rho=rho), {"method": "30 rounds", "rho": rho}, rounds=30)
    return rows


def allocation(setup: Setup, scale: str) -> list[Row]:
    """Figure 4: nMSE by the power alpha of eps_t = e0 t^alpha, and by Q of eps_t = e0 Q^-t."""
    rows: list[Row] = []
    epsilons = (3.0, 30.0)
    for deal, rho, momentum in itertools.product(
        range(5), (RHO, SMALL_RHO), ("none", "nesterov", "strongly_convex")
    ):
        data = setup.deal(deal)
        ways = (
            [{"q": q} for q in QS]
            if momentum == "strongly_convex"
            else [{"alpha": a} for a in ALPHAS]
        )
        for way in ways:
            algorithm = method(setup, rho=rho, momentum=momentum, **{"alpha": None, **way})
            models = run(algorithm, data, epsilons, 10, clip=setup.clip, seed=deal).models
            errors = errors_of(models, data).mean.view(2, 10).mean(1).tolist()
            row = {"deal": deal, "rho": rho, "momentum": momentum, **way}
            rows += [
                {**row, "epsilon": e, "nmse": value}
                for e, value in zip(epsilons, errors, strict=True)
            ]
    return rows


def noise(setup: Setup, scale: str) -> list[Row]:
    """Figure 5: Frobenius norm of the noise over that of what it is added to; DP-MTRL beside it."""
    data = setup.deal(0)
    rows = rows_of(data.train)
    d, size = rows.dimension, single_task(rows, reg=setup.ridge).models.norm()
    found: list[Row] = []
    done = run(method(setup, rho=SMALL_RHO), data, EPSILONS, 5, clip=setup.clip)
    ratio = done.noise * math.sqrt(d * (d + 1) / 2) / done.signal
    for e, epsilon in enumerate(EPSILONS):
        own = ratio[:, 5 * e : 5 * e + 5].mean(1).tolist()
        found.append(
            {
                "method": "MP-MTL",
                "epsilon": epsilon,
                "ratio": own,
                "spent": float(done.epsilon[5 * e]),
            }
        )
        for unit in ("record_group", "task"):
            settings = DPMTRL(
                lam1=setup.ridge, lam2=0.03, target=setup.target, radius=1.25 * setup.clip
            )
            law = budget(epsilon, unit).law(int(rows.counts.max()), d, settings.iterations)
            sigma = torch.full(
                (len(rows.x),), settings.lam1 + settings.lam2 / 1.1, dtype=torch.float64
            )
            scale_ = settings.sensitivity(sigma, rows.counts, budget(epsilon, unit))
            assert law is not None
            total = law.std(1.0, d) * math.sqrt(d) * float(scale_.norm() / size)
            found.append({"method": f"DP-MTRL {unit}", "epsilon": epsilon, "ratio": [total]})
    return found


def tasks(setup: Setup, scale: str) -> list[Row]:
    """Figure 8: nMSE of the first 20 tasks by the number of tasks that learn."""
    found: list[Row] = []
    for deal, count in itertools.product(range(10), COUNTS):
        data = synthetic("low_rank", deal, count)
        alone = single_task(rows_of(data.train), reg=setup.ridge).models
        row = {"deal": deal, "tasks": count}
        found.append(
            {
                **row,
                "method": "STL",
                "epsilon": math.inf,
                "nmse": float(errors_of(alone, data, FIRST).mean),
            }
        )
        for rho in (RHO, SMALL_RHO):
            epsilons = (1.0, 10.0, math.inf)
            models = run(
                method(setup, rho=rho), data, epsilons, 10, clip=setup.clip, seed=deal
            ).models
            errors = errors_of(models, data, FIRST).mean.view(3, 10).mean(1).tolist()
            found += [
                {**row, "method": f"MP-MTL-LR {rho:g}", "epsilon": e, "nmse": value}
                for e, value in zip(epsilons, errors, strict=True)
            ]
    return found


def heat(setup: Setup, scale: str) -> list[Row]:
    """Figures 2 and 3: matrices of models and of their covariance."""
    generator = torch.Generator().manual_seed(2)
    true = torch.rand(10, 5, generator=generator, dtype=torch.float64)
    true[-1] *= 10  # the anomalous task
    x = torch.randn(10, 60, 5, generator=generator, dtype=torch.float64)
    x /= x.norm(dim=2, keepdim=True) * (1 + 1e-6)
    y = torch.einsum("tnd,td->tn", x, true) + 0.01 * torch.randn(
        10, 60, generator=generator, dtype=torch.float64
    )
    offsets = torch.arange(11) * 30
    sides = [Examples(x[:, part].flatten(0, 1).float(), y[:, part].flatten().float(), offsets)
             for part in (slice(0, 30), slice(30, 60))]  # fmt: skip
    data = FederatedDataset(sides[0], sides[1], tuple(map(str, range(10))), classes=None)
    leak = run(
        MPMTL(feature_norm=1.0, lam=0.5, rho=0.0, ridge=1e-3),
        data,
        (math.inf,),
        1,
        clip=100.0,
        rounds=50,
    )
    kept = run(
        MPMTL(feature_norm=1.0, lam=0.5, rho=RHO, ridge=1e-3), data, (1.0,), 1, clip=1.0, rounds=10
    )
    rows: list[Row] = [{"figure": 2, "true": true.tolist(), "leak": leak.models[0].tolist(),
                        "protected": kept.models[0].tolist()}]  # fmt: skip
    data = load_synthetic_tasks(320, train_examples=30, test_examples=60, features=30, structure="clustered", rank=3,
                                problem="regression", noise=0.5, seed=3)  # fmt: skip
    true = true_weights(data.ids, 30, "clustered", 3, seed=3).T
    centres = torch.unique(
        (true * true[:, :1].sign()).round(decimals=6), dim=0, return_inverse=True
    )[1]
    order = torch.argsort(centres * 2 + (true[:, 0] > 0), stable=True)
    mtrl = DPMTRL(lam1=1.0, lam2=0.03, target=setup.target, radius=1.25 * setup.clip)
    shown = {
        "true": true,
        "DP-MTRL": mtrl.fit(rows_of(data.train), budget(10.0, "record_group"), sources(1, 0))[0],
        "MP-MTL": run(method(setup), data, (10.0,), 1, clip=setup.clip).models[0],
        "STL": single_task(rows_of(data.train), reg=setup.ridge).models,
    }
    row: Row = {"figure": 3}
    for name, models in shown.items():
        ordered = models[order]
        unit = ordered / ordered.norm(dim=1, keepdim=True)
        row[name] = ordered[::8].tolist()
        row[f"{name} covariance"] = (unit @ unit.T)[::4, ::4].tolist()
    return [*rows, row]


def main() -> None:
    """Parse the command line, compute what is missing, write tables and plots."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", maxsplit=1)[0])
    parser.add_argument(
        "--school", type=existing, help="school.mat, or its folder; without it no School part"
    )
    parser.add_argument(
        "--out", type=Path, default=Path("outputs/reproduce/mp_mtl"), help="parts are kept here"
    )
    parser.add_argument("--scale", choices=tuple(SCALES), default="default", help="repetitions")
    parser.add_argument(
        "--collect", action="store_true", help="compute nothing; tables of the finished parts"
    )
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    known = setups(arguments.school)
    parts: dict[str, Callable[[], list[Row]]] = {}
    for name, setup in known.items():
        parts[name] = partial(tradeoff, setup, arguments.scale)
        parts[f"grid_{name}"] = partial(grid, setup, arguments.scale)
    others = {
        "labels": labels,
        "allocation": allocation,
        "noise": noise,
        "tasks": tasks,
        "heat": heat,
    }
    parts |= {
        name: partial(part, known["low_rank"], arguments.scale) for name, part in others.items()
    }
    arguments.out.mkdir(parents=True, exist_ok=True)
    for name, part in parts.items():
        file = arguments.out / f"{name}.json"
        if not arguments.collect and not file.exists():
            began = time.monotonic()
            rows = part()
            file.write_text(json.dumps(rows))
            print(f"{name}: {time.monotonic() - began:.0f} s", flush=True)
    names = ("low_rank", "group_sparse", "school")
    every = [*names, *(f"grid_{name}" for name in names), *others]
    found = {name: json.loads((arguments.out / f"{name}.json").read_text())
             for name in every if (arguments.out / f"{name}.json").exists()}  # fmt: skip
    report.write(found, HERE)


if __name__ == "__main__":
    main()
