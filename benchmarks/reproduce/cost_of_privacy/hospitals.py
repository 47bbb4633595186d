"""Hospitals: psi by epsilon and along a run, and who answers when."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from pathlib import Path

import numpy as np
import torch
from collaboration import Collaboration
from setting import Horizon, Row, budget, clocks, kappa_for, owners_rows, quartiles, references
from simulate import simulate

from fedmtl.algorithms.async_learner.algorithm import AsyncLearner
from fedmtl.algorithms.linear.data import LinearData
from fedmtl.data.readers.hospital import read_hospital
from fedmtl.schedules import PoissonClocks

EPSILONS, RUNS, TRIAL_RUNS = (0.1, 0.3, 1.0, 3.0, 10.0, 30.0, 100.0), 100, 30
CLIPS, CAPS = (1.0, 2.0, 5.0), (6, 20, 50)
BAND_EPSILONS, HORIZON, POINTS = (0.1, 1.0, 10.0), 1000, 16


@cache
def stays(root: Path) -> tuple[LinearData, LinearData]:
    """Records of the hospitals, and the public ones."""
    read = read_hospital(root, test_fraction=None)
    return owners_rows(read.train, bias=True), owners_rows(read.public, bias=True)


@cache
def chosen(root: Path, epsilon: float) -> tuple[int, float, float]:
    """Answers of a hospital, clip and kappa, by simulation on the public rows."""
    data, public = stays(root)
    counts, tried = data.counts.tolist(), []
    for cap in CAPS:
        trial = clocks(len(counts), TRIAL_RUNS, 2, cap)
        for clip in CLIPS:
            found = kappa_for(AsyncLearner(), public, counts, epsilon, trial, clip=clip)
            tried.append((found.psi[found.kappa], cap, clip, found.kappa))
    return min(tried)[1:]


def hospital(root: Path) -> list[Row]:
    """Figures 9 and 10: 17 hospitals with the records they have; cap, clip and kappa are chosen on public rows."""
    data, public = stays(root)
    learner, counts, rows = AsyncLearner(), data.counts.tolist(), []
    known, psi = references(data, public, learner), Collaboration(learner, data).psi
    for epsilon in (*EPSILONS, math.inf):
        cap, clip, kappa = chosen(root, epsilon)
        clients = clocks(len(counts), RUNS, 3, cap)
        values = psi(
            simulate(replace(learner, kappa=kappa), data, budget(epsilon, clip), clients, seed=5)
        )
        row = {
            "epsilon": epsilon,
            "cap": cap,
            "clip": clip,
            "kappa": kappa,
            "runs": RUNS,
            **quartiles(values),
        }
        worth = sum(row["psi"] < other for other in known["alone"])
        rows.append({**row, "worth": worth, "counts": counts, **known})
    return rows


def hospital_bands(root: Path) -> list[Row]:
    """Figure 7: psi along a run at 3 epsilons, with the cap that public rows choose, and with the paper's horizon.

    Noise is addressed by tick, so that a run cut off at a tick is the beginning of the whole one.
    """
    data, public = stays(root)
    counts, rows = data.counts.tolist(), []
    learner, psi = AsyncLearner(), Collaboration(AsyncLearner(), data).psi
    for epsilon in BAND_EPSILONS:
        cap, clip, kappa = chosen(root, epsilon)
        short = clocks(len(counts), RUNS, 3, cap)
        caps = torch.full((len(counts),), cap).numpy()
        plan = replace(learner, kappa=kappa, horizon=short.shape[1])
        rows += band_rows("answers chosen", plan, data, psi, epsilon, clip, short, caps)
        long = (
            PoissonClocks(activations=HORIZON)
            .bind(len(counts))
            .activations(1, 0, HORIZON, replicates=RUNS)
            .client
        )
        horizon = Horizon(horizon=HORIZON)
        best = min(
            (found.psi[found.kappa], clip, found.kappa)
            for clip in CLIPS
            for found in [kappa_for(horizon, public, counts, epsilon, long[:10], clip=clip)]
        )
        plan = replace(horizon, kappa=best[2])
        rows += band_rows(f"horizon T = {HORIZON}", plan, data, psi, epsilon, best[1], long, None)
    return [*rows, {"plan": "references", **references(data, public, learner)}]


def band_rows(
    plan: str,
    learner: AsyncLearner,
    data: LinearData,
    psi: Callable[[torch.Tensor], torch.Tensor],
    epsilon: float,
    clip: float,
    clients: torch.Tensor,
    caps: np.ndarray | None,
) -> list[Row]:
    """Quartiles of psi at about 16 ticks of one plan."""
    length, rows = clients.shape[1], []
    ticks = sorted({round(length ** (k / (POINTS - 1))) for k in range(POINTS)})
    for tick in ticks:
        theta = simulate(learner, data, budget(epsilon, clip), clients[:, :tick], caps=caps, seed=3)
        row = {
            "plan": plan,
            "epsilon": epsilon,
            "tick": tick,
            "kappa": learner.kappa,
            "clip": clip,
            "runs": RUNS,
        }
        row["cap"] = length // len(data.x) if caps is not None else HORIZON
        rows.append(row | quartiles(psi(theta)))
    return rows


def timeline(root: Path) -> list[Row]:
    """Figures 3 and 8: who answers at each tick, of 3 owners and of the hospitals, under a cap and without."""
    rows: list[Row] = []
    for name, owners, cap in (("lending", 3, 10), ("hospital", len(stays(root)[0].x), 20)):
        capped = PoissonClocks(per_client=cap).bind(owners)
        free = PoissonClocks(activations=HORIZON).bind(owners)
        for plan, bound in ((f"{cap} answers an owner", capped), (f"horizon T = {HORIZON}", free)):
            table = bound.activations(1, 0, bound.steps)
            rows.append({"data": name, "owners": owners, "plan": plan, "who": table.client[0].tolist(),
                         "time": [round(t, 4) for t in table.time[0].tolist()]})  # fmt: skip
    return rows
