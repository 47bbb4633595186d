"""No false alarm in many seeds, and p-values that are small exactly as often as they should be."""

from dataclasses import replace
from functools import partial

import numpy as np
import pytest
from scipy import stats

from fedmtl.audit import Effort, Setup, audit_channel
from fedmtl.audit.run_suite import setup_of
from fedmtl.privacy import ClientPrivacy, FullParticipation, PoissonSampling, ReleasePlan
from fedmtl.privacy.row_noise import RowNoise

from .mutants import trainer_of

EFFORT = Effort(noise=1600, cohorts=24, checks=("noise law", "freshness", "sampler"))


def a_setup() -> Setup:
    """80 clients, 200 coordinates in two tensors, 8 steps, little noise: one audit takes some 60 ms."""
    plan = ReleasePlan(name="update", dimension=200)
    return Setup(
        privacy=ClientPrivacy(clip_norm=1.5, noise_multiplier=0.5),
        plans=(plan,),
        schedule=PoissonSampling(16).bind(80),
        steps=8,
        tensors=(150, 50),
    )


def rows_setup() -> Setup:
    """12 clients that add noise to their own rows of 20 coordinates, 6 steps."""
    plan = ReleasePlan(name="update", dimension=20, rows=RowNoise(8.0))
    return Setup(
        privacy=ClientPrivacy(clip_norm=1.5, noise_multiplier=2.0),
        plans=(plan,),
        schedule=FullParticipation().bind(12),
        steps=6,
    )


def activations(law: str) -> Setup:
    """Clients that act one at a time."""
    return setup_of(trainer_of("async_learner", f"clocks, {law}"))


FEWER = replace(EFFORT, noise=480, checks=("noise law", "freshness"))
SETUPS = {  # with the number of seeds
    "sums": (a_setup, EFFORT, 40),
    "rows": (rows_setup, FEWER, 40),
    "activations, laplace": (partial(activations, "laplace"), FEWER, 20),
    "activations, l2_laplace": (partial(activations, "l2_laplace"), FEWER, 20),
}


@pytest.mark.parametrize("which", SETUPS)
def test_a_sound_release_path_raises_no_alarm(which: str) -> None:
    """Freshness, which takes two thirds of an audit, is checked under every second seed."""
    make, effort, seeds = SETUPS[which]
    made = make()
    lighter = replace(
        effort, checks=tuple(check for check in effort.checks if check != "freshness")
    )
    statistics: dict[str, list[float]] = {}
    for seed in range(seeds):
        for finding in audit_channel(made, seed=seed, effort=lighter if seed % 2 else effort):
            assert not finding.refuted, (seed, finding)
            statistics.setdefault(finding.check, []).append(finding.statistic)
    # the p-values behind the verdicts: no more of them below 1 % than binomial chance allows, and not all near 1; each
    # of the two has a chance of 1e-6 at most to fail for a check whose p-values are uniform
    for check, numbers in statistics.items():
        values = np.array(numbers)
        count = seeds // 2 if check.startswith("freshness") else seeds
        assert len(values) == count
        most = stats.binom.isf(1e-6, count, 0.01)
        least = 1 - 1e-6 ** (1 / count)
        if np.isnan(values).all():  # not checked
            continue
        if check == "sampler: distinct clients" or "beside" in check:  # without chance
            continue
        assert (values < 0.01).sum() <= most, check
        assert values.min() < least, check
