"""The audit of owners who act one at a time: false alarms, published accountings, odd caps."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from scipy import stats

from fedmtl import PPDMTL, AsyncLearner
from fedmtl.algorithms.linear.data import DomainBound
from fedmtl.privacy import OwnerChannel
from fedmtl.privacy.audit import Effort
from fedmtl.privacy.audit.owner_sensitivity import adversarial_rows
from fedmtl.privacy.audit.owner_setup import turns
from fedmtl.privacy.audit.suite import audit_owners
from fedmtl.trainer.audit.suite import audit_trainer, owner_setup_of

from .owner_mutants import CONFIGURATIONS, EFFORT, audit, trainer_of

SEEDS = 75  # of each configuration


@pytest.mark.parametrize("configuration", ["laplace", "l2_laplace"])
def test_sound_releases_raise_no_alarm(configuration: str) -> None:
    setup = owner_setup_of(trainer_of("async_learner", configuration))
    assert setup is not None
    effort = replace(EFFORT, noise=240, checks=("noise law", "freshness"))
    statistics: dict[str, list[float]] = {}
    for seed in range(SEEDS):
        for finding in audit_owners(setup, seed=seed, effort=effort):
            assert not finding.refuted, (seed, finding)
            statistics.setdefault(finding.check, []).append(finding.statistic)
    most = stats.binom.isf(1e-6, SEEDS, 0.02)
    for check, values in statistics.items():
        assert len(values) == SEEDS
        if check.startswith("noise law"):
            assert (np.array(values) < 0.02).sum() <= most, check
            assert min(values) < 0.2, check
        else:
            assert max(values) < 6, check


def test_an_accounting_that_does_not_hold_is_never_the_epsilon(monkeypatch: pytest.MonkeyPatch) -> None:
    run = replace(trainer_of("pp_dmtl", "l2_laplace"), algorithm=PPDMTL(row_norm=1.0, guarantee="paper", a1=0.05))
    refuted = [finding.check for finding in audit(run) if finding.refuted]
    assert refuted == ["transcript: public state"], "its own part moves on raw records"
    found = {finding.check: finding for finding in audit(run, checks=("charges",))}
    assert not found["charges: published accounting"].skipped
    sound = OwnerChannel.report
    monkeypatch.setattr(OwnerChannel, "report", property(lambda self: replace(sound.fget(self), epsilon=5.0)))
    found = {finding.check: finding for finding in audit(run, checks=("charges",))}
    assert found["charges: published accounting"].refuted


def test_settings_of_other_kinds_pass() -> None:
    base = trainer_of("async_learner", "laplace")
    budgets = {name: 1.0 + k for k, name in enumerate(base.data.ids)}
    loose = replace(CONFIGURATIONS["laplace"], clip_norm=40.0)
    domain = AsyncLearner(reg=1e-3, theta_max=3.0, bound="domain", domain=DomainBound(x_l1=2.0, y=1.0))
    for run in (
        replace(base, privacy=replace(CONFIGURATIONS["laplace"], epsilon=budgets)),
        replace(base, privacy=replace(CONFIGURATIONS["gaussian"], noise_multiplier=9.0)),
        replace(base, privacy=replace(CONFIGURATIONS["laplace"], epsilon=None, noise_multiplier=2.0)),
        replace(base, algorithm=domain, privacy=loose),
        replace(base, algorithm=AsyncLearner(loss="logistic", cap=1), rounds=3),
    ):
        findings = audit(run, processes=False)
        assert not [finding for finding in findings if finding.refuted]
        assert any(finding.check == "sensitivity: gradients" and not finding.skipped for finding in findings)


def test_without_noise_nothing_is_claimed() -> None:
    run = trainer_of("pp_dmtl", "laplace")
    for privacy in (None, replace(CONFIGURATIONS["laplace"], epsilon=float("inf"), delta=1e-5)):
        first, *_ = audit_trainer(replace(run, privacy=privacy), rounds=8, effort=Effort(checks=("noise law",)))
        assert first.skipped


def test_turns_and_rows() -> None:
    assert turns(np.array([2, 0, 1, 3]), 100).tolist() == [0, 2, 3, 0, 3, 3]
    assert turns(np.array([2, 0, 1, 3]), 4).tolist() == [0, 2, 3, 0]
    assert turns(np.zeros(3, dtype=np.int64), 4).tolist() == []
    assert all(row.shape == (3,) for row in adversarial_rows(3))
    assert any(bool(row.isnan().any()) for row in adversarial_rows(1))
