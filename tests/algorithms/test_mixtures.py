"""pFedMe, APFL and PP-SGD against rounds written out by hand, and at the ends of their settings."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from dp_accounting import dp_event
from dp_accounting.pld import PLDAccountant

from fedmtl import (
    APFL,
    PPSGD,
    FedAvg,
    FedProx,
    FullParticipation,
    Local,
    LocalOptimizer,
    LocalSGD,
    PFedMe,
    RecordPrivacy,
    models,
)
from fedmtl.errors import ConfigError
from fedmtl.privacy import ClientPrivacy, FixedCohort
from fedmtl.trainer.audit.suite import audit_trainer
from tests.algorithms.harness import everyone, problem_of, run
from tests.algorithms.test_pmtl import blocks
from tests.helpers import ragged_classification, regression
from tests.trainer.settings import DATA, DELTA, trainer

STEPS = LocalSGD(lr=0.05, steps=3, batch_size=None)
BATCHES = LocalSGD(lr=0.2, epochs=2, batch_size=4, momentum=0.5)
NOISE = ClientPrivacy(clip_norm=0.3, noise_multiplier=0.5, delta=1e-5)


def gradient(x, y, w):
    return 2 / len(x) * x.T @ (x @ w - y)


def test_pfedme_rounds_by_hand() -> None:
    problem = problem_of(regression(clients=5), rounds=4)
    algorithm = PFedMe(lam=1.5, eta=0.4, local_rounds=2, local=STEPS)
    state = run(algorithm, problem)
    w, own = np.zeros(4), [np.zeros(4) for _ in range(5)]
    for _ in range(4):
        updates = []
        for k, (x, y) in enumerate(blocks(problem.data)):
            copy, theta = w.copy(), w.copy()
            for _ in range(2):
                for _ in range(3):
                    theta = theta - 0.05 * (gradient(x, y, theta) + 1.5 * (theta - copy))
                copy = copy - 0.4 * 1.5 * (copy - theta)
            own[k] = theta
            updates.append(copy - w)
        w = w + np.mean(updates, axis=0)
    np.testing.assert_allclose(state.public["global"].numpy(), w, rtol=1e-10)
    np.testing.assert_allclose(everyone(problem, algorithm, state).numpy(), np.stack(own), rtol=1e-10)


def test_pfedme_of_one_local_round_is_fedprox() -> None:
    problem, sampler = classified(), FixedCohort(3)
    one = run(PFedMe(lam=0.5, eta=2.0, local_rounds=1, local=BATCHES), problem, sampler=sampler, privacy=NOISE)
    other = run(FedProx(mu=0.5, local=BATCHES), problem, sampler=sampler, privacy=NOISE)
    torch.testing.assert_close(one.public["global"], other.public["global"], rtol=1e-12, atol=1e-13)


def test_pfedme_solves_for_the_proximal_points() -> None:
    """At its fixed point theta_k is the exact proximal point, and w their mean: the paper's stationarity."""
    data, lam = regression(), 2.0
    problem = problem_of(data, rounds=400)
    algorithm = PFedMe(lam=lam, eta=0.5, local_rounds=1, local=LocalSGD(lr=0.1, steps=60, batch_size=None))
    state = run(algorithm, problem)
    w = state.public["global"].numpy()
    theta = everyone(problem, algorithm, state).numpy()
    for k, (x, y) in enumerate(blocks(data)):
        a = 2 / len(x) * x.T @ x + lam * np.eye(4)
        np.testing.assert_allclose(theta[k], np.linalg.solve(a, 2 / len(x) * x.T @ y + lam * w), rtol=1e-8, atol=1e-9)
    np.testing.assert_allclose(theta.mean(0), w, rtol=1e-8, atol=1e-9)


@pytest.mark.parametrize("alpha", [0.25, 0.7])
def test_apfl_rounds_by_hand(alpha: float) -> None:
    """Deng et al. 2020, Algorithm 1, with one local step: v moves by alpha times the gradient at the mixture."""
    problem = problem_of(regression(clients=5), rounds=5)
    algorithm = APFL(alpha=alpha, local=LocalSGD(lr=0.05, steps=1, batch_size=None))
    state = run(algorithm, problem)
    w, v = np.zeros(4), np.zeros((5, 4))
    for _ in range(5):
        updates = []
        for k, (x, y) in enumerate(blocks(problem.data)):
            mixture = alpha * v[k] + (1 - alpha) * w
            v[k] = v[k] - 0.05 * alpha * gradient(x, y, mixture)
            updates.append(-0.05 * gradient(x, y, w))
        w = w + np.mean(updates, axis=0)
    np.testing.assert_allclose(state.public["global"].numpy(), w, rtol=1e-10)
    expected = alpha * v + (1 - alpha) * w
    np.testing.assert_allclose(everyone(problem, algorithm, state).numpy(), expected, rtol=1e-9)


def classified():
    return problem_of(ragged_classification(), rounds=4, model=models.mlp(hidden=3), loss="auto")


def test_apfl_between_federated_averaging_and_local_training() -> None:
    problem, sampler = classified(), FixedCohort(3)
    fedavg, local = FedAvg(local=BATCHES), Local(local=BATCHES)
    states = [run(a, problem, sampler=sampler) for a in (fedavg, local)]
    for alpha, personal in ((0.0, (fedavg, states[0])), (1.0, (local, states[1]))):
        algorithm = APFL(alpha=alpha, local=BATCHES)
        state = run(algorithm, problem, sampler=sampler)
        assert torch.equal(state.public["global"], states[0].public["global"])
        found = everyone(problem, algorithm, state)
        torch.testing.assert_close(found, everyone(problem, *personal), rtol=1e-12, atol=1e-13)


@pytest.mark.parametrize("ratio", [0.5, 2.0])
def test_ppsgd_rounds_by_hand(ratio: float) -> None:
    """Bietti et al. 2022: both parts follow the gradient at their sum, of the client's own copy of w."""
    problem = problem_of(regression(clients=5), rounds=4)
    algorithm = PPSGD(ratio=ratio, local=STEPS)
    state = run(algorithm, problem)
    w, theta = np.zeros(4), np.zeros((5, 4))
    for _ in range(4):
        updates = []
        for k, (x, y) in enumerate(blocks(problem.data)):
            copy = w.copy()
            for _ in range(3):
                g = gradient(x, y, copy + theta[k])
                copy, theta[k] = copy - 0.05 * g, theta[k] - ratio * 0.05 * g
            updates.append(copy - w)
        w = w + np.mean(updates, axis=0)
    np.testing.assert_allclose(state.public["global"].numpy(), w, rtol=1e-10)
    np.testing.assert_allclose(everyone(problem, algorithm, state).numpy(), w + theta, rtol=1e-10)


def test_ppsgd_between_federated_averaging_and_local_training() -> None:
    problem, sampler = classified(), FixedCohort(3)
    fedavg, local = FedAvg(local=BATCHES), Local(local=BATCHES)
    algorithm = PPSGD(ratio=0.0, local=BATCHES)
    one, other = (run(a, problem, sampler=sampler, privacy=NOISE) for a in (algorithm, fedavg))
    assert torch.equal(one.public["global"], other.public["global"])
    assert torch.equal(everyone(problem, algorithm, one), everyone(problem, fedavg, other))
    ratio = 1e9  # the shared part stands still, and the sum moves by the local solver's step
    algorithm = PPSGD(ratio=ratio, local=LocalSGD(lr=0.2 / (1 + ratio), epochs=2, batch_size=4, momentum=0.5))
    one, other = (run(a, problem, sampler=sampler) for a in (algorithm, local))
    seen = one.private.whole("seen")
    found, alone = (everyone(problem, a, s)[seen] for a, s in ((algorithm, one), (local, other)))
    torch.testing.assert_close(found, alone, rtol=1e-7, atol=1e-7)


def test_every_training_of_a_record_is_charged() -> None:
    solver = LocalSGD(lr=0.2, epochs=1, batch_size=4)
    privacy = RecordPrivacy(clip_norm=0.4, noise_multiplier=1.3, delta=DELTA)
    for algorithm, trainings in (
        (PFedMe(local=solver, local_rounds=3), 3),
        (APFL(local=solver), 2),
        (PPSGD(local=solver), 1),
    ):
        found = trainer(
            algorithm=algorithm, privacy=privacy, schedule=FullParticipation(), rounds=2, eval_every=2
        ).fit()
        spent = []
        for count in DATA.train.counts.tolist():
            event = dp_event.GaussianDpEvent(1.3)
            event = dp_event.PoissonSampledDpEvent(4 / count, event) if count > 4 else event
            spent.append(PLDAccountant().compose(event, 2 * trainings * -(-count // 4)).get_epsilon(DELTA))
        assert found.epsilon == pytest.approx(max(spent), rel=1e-3)


@pytest.mark.parametrize("cls", [PFedMe, APFL, PPSGD])
def test_the_audit_refutes_nothing(cls) -> None:
    findings = audit_trainer(trainer(algorithm=cls(local=LocalSGD(lr=0.2, epochs=1, batch_size=4))))
    assert not [finding for finding in findings if finding.refuted]


def test_impossible_settings_are_refused_by_name() -> None:
    for broken, message in (
        (lambda: PFedMe(lam=0.0), r"PFedMe\.lam"),
        (lambda: PFedMe(eta=3.0, lam=1.0), r"PFedMe\.eta \* lam"),
        (lambda: PFedMe(local_rounds=0), r"PFedMe\.local_rounds"),
        (lambda: APFL(alpha=1.5), r"APFL\.alpha"),
        (lambda: APFL(local=LocalOptimizer(lr=0.1)), r"APFL\.local"),
        (lambda: PPSGD(ratio=-1.0), r"PPSGD\.ratio"),
        (lambda: PPSGD(local=LocalSGD(lr=0.1, weight_decay=0.1)), r"PPSGD\.local"),
    ):
        with pytest.raises(ConfigError, match=message):
            broken()
