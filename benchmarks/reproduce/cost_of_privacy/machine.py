"""A support vector machine on census income, in place of the paper's card frauds: hinge loss with an intercept.

Gradients are bounded by the domain itself: ``||[x; 1]||_1`` is at most 13 for every record, so that nothing is clipped.
"""

from __future__ import annotations

import math
from dataclasses import replace
from functools import cache, partial
from pathlib import Path

import torch
from collaboration import Collaboration
from setting import Row, budget, clocks, kappa_for, owners_rows, references, value_rows
from simulate import simulate

from fedmtl.algorithms.async_learner.algorithm import AsyncLearner
from fedmtl.algorithms.linear.data import LinearData
from fedmtl.data.readers.adult import read_adult

COMPONENTS, BOUND = 10, 12.0
XI = BOUND + 1
LEARNER = AsyncLearner(loss="hinge", reg=5e-6, theta_max=10.0, feature_norm=XI)
EPSILONS = tuple(0.1 * 2.0**k for k in range(9))  # 0.1 .. 25.6
SIZES, DEALS, RUNS = (250, 500, 1000, 2000, 4000, 8000, 15_000), 3, 50
VALUE_OWNERS = {100: (3, 10, 30), 500: (3, 10, 30)}
VALUE_EPSILONS = (1.0, 3.0, 10.0, 30.0, 100.0)
VALUE_DEALS, VALUE_RUNS = 5, 20


@cache
def census(root: Path, owners: int, size: int, deal: int) -> tuple[LinearData, LinearData]:
    """Records of the owners, and the public ones; the same records an owner, however many owners there are."""
    read = read_adult(
        root,
        clients=owners,
        sizes=size,
        components=COMPONENTS,
        l1=BOUND,
        labels="signed",
        test_fraction=None,
        seed=deal,
    )
    return owners_rows(read.train), owners_rows(read.public)


def machine(root: Path) -> list[Row]:
    """Figure 11: psi of 3 owners by records and epsilon.

    Rules: ``fixed``, one kappa for all, the one that public rows choose without noise; ``chosen``, what public rows
    choose for the setting (every other size).
    """
    public, trial = census(root, 3, min(SIZES), 0)[1], clocks(3, 20, 2)
    fixed = kappa_for(LEARNER, public, [4000] * 3, math.inf, trial, clip=XI).kappa
    rows: list[Row] = []
    for place, size in enumerate(SIZES):
        deals = [census(root, 3, size, deal)[0] for deal in range(DEALS)]
        fitness = [Collaboration(LEARNER, data) for data in deals]
        for epsilon in (*EPSILONS, math.inf):
            plans = [("fixed", fixed)]
            if place % 2 == 1:
                plans.append(
                    (
                        "chosen",
                        kappa_for(LEARNER, public, [size] * 3, epsilon, trial, clip=XI).kappa,
                    )
                )
            for rule, kappa in plans:
                values = []
                for data, f in zip(deals, fitness, strict=True):
                    seed = 1000 + 10 * len(rows) + len(values)  # every mean has noise of its own
                    tried = replace(LEARNER, kappa=kappa)
                    theta = simulate(
                        tried, data, budget(epsilon, XI), clocks(3, RUNS, seed), seed=seed
                    )
                    values.append(float(f.psi(theta).mean()))
                rows.append({"records": size, "epsilon": epsilon, "rule": rule, "kappa": kappa, "runs": DEALS * RUNS,
                             "psi": sum(values) / DEALS, "deals": values})  # fmt: skip
        known = [references(data, public, LEARNER) for data in deals]
        wrong = [
            wrong_share(data, torch.from_numpy(f.optimum.theta))
            for data, f in zip(deals, fitness, strict=True)
        ]
        rows.append({"records": size, "rule": "references", "gap": max(f.optimum.gap for f in fitness),
                     "wrong": sum(wrong) / DEALS,
                     "alone": sum(sum(one["alone"]) for one in known) / (3 * DEALS),
                     **{key: sum(one[key] for one in known) / DEALS for key in ("public", "zero")}})  # fmt: skip
    return rows


def wrong_share(data: LinearData, theta: torch.Tensor) -> float:
    """Share of records on the wrong side."""
    x, y = data.pooled()
    return float((y * (x @ theta) <= 0).double().mean())


def machine_value(root: Path) -> list[Row]:
    """The value of collaboration: psi by number of owners and epsilon, against models without noise."""
    return value_rows(
        partial(census, root),
        LEARNER,
        VALUE_OWNERS,
        VALUE_EPSILONS,
        deals=VALUE_DEALS,
        runs=VALUE_RUNS,
        clip=XI,
    )
