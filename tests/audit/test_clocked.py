"""The audit of clients that act one at a time: published accountings, odd caps."""

import math
from dataclasses import replace

import pytest

from fedmtl import AsyncLearner, PeerAveraging, PeerToPeer, Trainer
from fedmtl.audit import Effort, charges
from fedmtl.audit.rerun import watched
from fedmtl.audit.run_suite import audit_trainer
from fedmtl.audit.transcript import transcript
from fedmtl.contrib.published.p2p import PublishedPeerToPeer
from fedmtl.contrib.published.pp_dmtl import PublishedPPDMTL
from fedmtl.data.synthetic.tasks import load_synthetic_tasks
from fedmtl.graphs import KNNCosine, Ring

from .mutants import CLOCKED, FEATURES, audit, half_at_first, trainer_of


def test_an_accounting_that_does_not_hold_is_never_the_epsilon(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    run = replace(
        trainer_of("pp_dmtl", "clocks, l2_laplace"),
        algorithm=PublishedPPDMTL(feature_norm=1.0, a1=0.05),
    )
    refuted = [finding.check for finding in audit(run) if finding.refuted]
    assert refuted == ["transcript: public state"], "its own part moves on raw records"
    found = {finding.check: finding for finding in audit(run, checks=("charges",))}
    assert not found["charges: steps in the ledger"].refuted
    sound = charges.privacy_report
    monkeypatch.setattr(
        charges, "privacy_report", lambda channel: replace(sound(channel), epsilon=5.0)
    )
    found = {finding.check: finding for finding in audit(run, checks=("charges",))}
    assert found["charges: steps in the ledger"].refuted


def test_the_clip_of_a_published_accounting_is_measured() -> None:
    """Laplace noise on gradients that are clipped in the L2 norm: one along the diagonal has sqrt(D) times the L1 norm
    that is claimed. Everything leaves by the release, so that nothing else is refuted."""
    base = trainer_of("p2p", "clocks, laplace")
    run = replace(base, algorithm=PublishedPeerToPeer(feature_norm=1.0, graph=Ring(), mu=0.5))
    refuted = {finding.check: finding.statistic for finding in audit(run) if finding.refuted}
    assert list(refuted) == [
        "sensitivity: gradients",
        "sensitivity: factors of gradients",
    ]
    assert refuted["sensitivity: gradients"] == pytest.approx(math.sqrt(FEATURES), rel=1e-5)


def test_settings_of_other_kinds_pass() -> None:
    base = trainer_of("async_learner", "clocks, laplace")
    budgets = {name: 1.0 + k for k, name in enumerate(base.data.ids)}
    loose = replace(CLOCKED["clocks, laplace"], clip_norm=40.0)
    domain = AsyncLearner(reg=1e-3, theta_max=3.0, feature_norm=2.0, target=1.0)
    for run in (
        replace(
            base,
            algorithm=AsyncLearner(loss="logistic"),
            rounds=3,
            privacy=replace(CLOCKED["clocks, laplace"], epsilon=budgets),
        ),
        replace(base, privacy=replace(CLOCKED["clocks, gaussian"], noise_multiplier=9.0)),
        replace(base, algorithm=domain, privacy=replace(loose, epsilon=None, noise_multiplier=2.0)),
    ):
        findings = audit(run, checks=("noise law", "sensitivity", "charges"))
        assert not [finding for finding in findings if finding.refuted]
        assert any(
            finding.check == "sensitivity: gradients" and not finding.skipped
            for finding in findings
        )


def test_without_noise_nothing_is_claimed() -> None:
    run = trainer_of("pp_dmtl", "clocks, laplace")
    for privacy in (None, replace(CLOCKED["clocks, laplace"], epsilon=float("inf"), delta=1e-5)):
        first, *_ = audit_trainer(
            replace(run, privacy=privacy), rounds=8, effort=Effort(checks=("noise law",))
        )
        assert first.skipped


# Peer-to-peer learning


def trainer(configuration: str, **settings) -> Trainer:
    """Peer-to-peer learning, or averaging where ``settings`` say how often an agent releases."""
    kind = PeerAveraging if "releases" in settings else PeerToPeer
    algorithm = kind(**{"feature_norm": 1.0, "graph": Ring(), "mu": 0.5} | settings)
    return replace(trainer_of("p2p", f"clocks, {configuration}"), algorithm=algorithm)


def test_a_graph_of_the_records_is_outside_and_the_transcript_says_so() -> None:
    for graph, leaks in ((Ring(), False), (KNNCosine(2), True)):
        run = trainer("gaussian", graph=graph)
        assert transcript(run, watched(run, 15), rounds=15)[0].refuted == leaks


def test_agents_that_released_before_a_restore_are_silent_and_have_no_noise_to_compare() -> None:
    data = load_synthetic_tasks(
        120, train_examples=4, test_examples=2, features=8, problem="classification"
    )
    run = replace(trainer("secure", releases=1), data=data)
    found = {finding.check: finding for finding in audit(run, checks=("freshness",))}
    assert not [finding for finding in found.values() if finding.refuted]
    assert found["freshness: after a restore, gradients"].skipped


def test_half_of_the_noise_of_a_warm_start_is_refuted(monkeypatch: pytest.MonkeyPatch) -> None:
    """The first of nine releases of every agent; the run as it is stands among the no-ops of ``mutants``."""
    run, effort = (
        trainer_of("warm start", "clocks, l2_laplace"),
        Effort(noise=80_000, checks=("noise law",)),
    )
    half_at_first(monkeypatch, run)
    found = {
        finding.check: finding.refuted for finding in audit_trainer(run, rounds=20, effort=effort)
    }
    assert found["noise law: total of gradients"]
    assert found["noise law: lengths of gradients"]
