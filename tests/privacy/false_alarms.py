"""The statistical audit of a sound release path over many seeds, shared by two processes."""

from __future__ import annotations

from dataclasses import replace

import torch

from fedmtl.privacy import ClientPrivacy, FullParticipation, PoissonSampling, ReleasePlan
from fedmtl.privacy.audit import Effort, Setup, audit_channel
from fedmtl.privacy.row_noise import RowNoise

EFFORT = Effort(
    noise=1600,
    canaries=150,
    cohorts=24,
    processes=False,  # the same statistic as between two channels
    checks=("noise law", "freshness", "canary", "sampler"),
)


def setup() -> Setup:
    """80 clients, 200 coordinates in two tensors, 8 steps, little noise: one audit takes some 30 ms."""
    plan = ReleasePlan(name="update", dimension=200, uses=8, stateful=True)
    return Setup(
        privacy=ClientPrivacy(clip_norm=1.5, noise_multiplier=0.5),
        plans=(plan,),
        schedule=PoissonSampling(16).bind(80),
        steps=8,
        tensors=(150, 50),
    )


def rows_setup() -> Setup:
    """12 clients that add noise to their own rows of 20 coordinates, 6 steps."""
    plan = ReleasePlan(name="update", dimension=20, uses=6, stateful=True, rows=RowNoise(8.0))
    return Setup(
        privacy=ClientPrivacy(clip_norm=1.5, noise_multiplier=2.0),
        plans=(plan,),
        schedule=FullParticipation().bind(12),
        steps=6,
    )


SETUPS = {"sums": (setup, EFFORT), "rows": (rows_setup, replace(EFFORT, noise=480, checks=("noise law", "freshness")))}


def audits(which: str, first: int, last: int) -> tuple[list[str], dict[str, list[float]]]:
    """Refuted checks and all statistics by check, of the seeds in [first, last)."""
    torch.set_num_threads(1)
    made, effort = SETUPS[which]
    refuted: list[str] = []
    statistics: dict[str, list[float]] = {}
    for seed in range(first, last):
        for finding in audit_channel(made(), seed=seed, effort=effort):
            statistics.setdefault(finding.check, []).append(finding.statistic)
            if finding.refuted:
                refuted.append(f"seed {seed}: {finding}")
    return refuted, statistics
