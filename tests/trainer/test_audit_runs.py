"""Checks that run a configuration: early stops; and public grids."""

import math
from typing import Any

import numpy as np
import pytest

from fedmtl import Trainer, models
from fedmtl.algorithms import PMTL, Ditto
from fedmtl.local import LocalSGD
from fedmtl.privacy import (
    ClientPrivacy,
    FixedCohort,
    FullParticipation,
    GaussianNoise,
    LaplaceNoise,
    LocalSteps,
    PoissonSampling,
    RecordPrivacy,
)
from fedmtl.privacy.audit import Setup
from fedmtl.privacy.audit.freshness import training_freshness
from fedmtl.privacy.audit.grid import on_grid
from fedmtl.privacy.audit.setup import width_of
from fedmtl.privacy.noise.grid import grid_width
from fedmtl.trainer.audit.stopping import stopped_early, stopping_rule
from fedmtl.trainer.audit.suite import setup_of
from fedmtl.trainer.stopping import EarlyStopping
from tests import small
from tests.helpers import ragged_classification
from tests.privacy.mutants import trainer_of


def opened(run: Trainer) -> Setup:
    setup = setup_of(run)
    assert setup is not None
    return setup


RUNS = {
    "poisson": (PoissonSampling(cohort=4), ClientPrivacy(clip_norm=0.5, epsilon=4.0)),
    "fixed": (FixedCohort(cohort=4), ClientPrivacy(clip_norm=0.5, epsilon=4.0)),
    "no budget": (FullParticipation(), ClientPrivacy(clip_norm=0.5, noise_multiplier=2.0)),
    "a budget that ends before": (FullParticipation(), ClientPrivacy(clip_norm=0.5, epsilon=3.0, noise_multiplier=3.0)),
    "records": (FullParticipation(), RecordPrivacy(clip_norm=0.5, epsilon=6.0, delta=1e-3)),
    "records of some": (PoissonSampling(cohort=4), RecordPrivacy(clip_norm=0.5, epsilon=6.0, delta=1e-3)),
}


@pytest.mark.parametrize("name", RUNS)
def test_an_early_stop_is_charged_as_all_that_is_planned(name: str) -> None:
    schedule, privacy = RUNS[name]
    run = small.trainer(
        algorithm=PMTL(lam=0.5, local=LocalSGD(lr=0.2, steps=2, batch_size=4)),
        schedule=schedule,
        privacy=privacy,
        rounds=12,
    )
    found = stopped_early(run, opened(run), 0)
    assert not found.refuted
    assert not found.skipped
    assert not stopping_rule(run, 0).refuted


def test_a_run_without_a_common_model_never_stops_early() -> None:
    run = trainer_of("pp_dmtl", "clocks, laplace")
    assert stopped_early(run, opened(run), 0).skipped


def ditto(schedule: Any, privacy: Any) -> Trainer:
    return small.trainer(
        algorithm=Ditto(lam=0.5, local=LocalSGD(lr=0.2, epochs=1, batch_size=8)),
        data=ragged_classification(10, largest=12),
        model=models.mlp(hidden=16),
        schedule=schedule,
        privacy=privacy,
        rounds=6,
    )


def test_a_second_training_with_the_noise_of_the_first_is_refuted(monkeypatch: pytest.MonkeyPatch) -> None:
    """The difference of the two gradients would have no noise at all."""
    setup = opened(ditto(FullParticipation(), RecordPrivacy(clip_norm=0.5, epsilon=6.0, delta=1e-3)))
    claims = setup.claims(setup.open(0))
    assert [finding.refuted for finding in training_freshness(setup, claims, 0)] == [False]
    noised = LocalSteps._noised

    def again(self, total, clients, steps):
        return noised(self, total, clients, steps % self.steps(clients))

    monkeypatch.setattr(LocalSteps, "_noised", again)
    assert [finding.refuted for finding in training_freshness(setup, claims, 0)] == [True]


@pytest.mark.parametrize("name", ["loss", "accuracy"])
def test_a_rule_that_reads_what_was_measured_on_the_clients_is_refuted(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = ditto(PoissonSampling(cohort=4), None)
    assert not stopping_rule(run, 0).refuted
    stops = EarlyStopping.stops
    reading = lambda self, history: stops(self, history) and history[-1][name] > 0.5  # noqa: E731
    monkeypatch.setattr(EarlyStopping, "stops", reading)
    assert stopping_rule(run, 0).refuted


def test_numbers_on_a_grid_are_told_from_others() -> None:
    coins, width, denominator = np.random.default_rng(0), 2.0**-24, 7.3
    cells = np.rint(coins.standard_normal(500) * 2.0**22)

    def verdict(values: np.ndarray) -> bool:
        return on_grid("update", values / width).refuted

    released = cells * width / denominator
    assert not verdict(released * denominator)
    assert not verdict(released * denominator * math.sqrt(0.5) * math.sqrt(2.0))
    assert verdict(cells * width + coins.standard_normal(500) * 1e-12)
    assert verdict((cells + 0.5 * (coins.random(500) < 0.05)) * width), "a finer grid"
    assert verdict(2 * cells * width), "a coarser grid"
    assert verdict(np.where(np.arange(500) == 3, np.nan, cells * width))
    assert on_grid("update", cells[:10]).skipped


@pytest.mark.parametrize(("law", "part"), [(LaplaceNoise, 2.0**-20), (GaussianNoise, 2.0**-40)])
def test_the_width_is_the_one_that_the_channel_promises(law, part: float) -> None:
    for bound, size, scale in ((0.5, 147, 3.0), (1e-3, 1, 1e3), (20.0, 100_000, 0.01)):
        assert width_of(bound, law.norm, size, scale * part) == grid_width(law, bound, size, scale)
