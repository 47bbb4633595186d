"""Ditto against hand-written rounds, and at the ends of lambda."""

import numpy as np
import pytest
import torch

from fedmtl import Ditto, FedAvg, Local, LocalSGD
from fedmtl.privacy import FixedCohort
from tests.algorithms.harness import everyone, problem_of, run
from tests.algorithms.test_pmtl import blocks
from tests.helpers import regression

SOLVER = LocalSGD(lr=0.05, steps=3, batch_size=None)


@pytest.mark.parametrize("lam", [0.0, 1.5])
def test_rounds_by_hand(lam):
    """Algorithm 1 with full gradients: the update from w^t, and v_k pulled to the same w^t."""
    data = regression(clients=5)
    problem, algorithm = problem_of(data, rounds=4), Ditto(lam=lam, local=SOLVER)
    state = run(algorithm, problem)
    w, own = np.zeros(4), [np.zeros(4) for _ in range(5)]
    for _ in range(4):
        updates = []
        for k, (x, y) in enumerate(blocks(data)):
            v, local = own[k], w.copy()
            for _ in range(3):
                local = local - 0.05 * 2 / len(x) * x.T @ (x @ local - y)
                v = v - 0.05 * (2 / len(x) * x.T @ (x @ v - y) + lam * (v - w))
            own[k] = v
            updates.append(local - w)
        w = w + np.mean(updates, axis=0)
    np.testing.assert_allclose(state.public["global"].numpy(), w, rtol=1e-10)
    np.testing.assert_allclose(everyone(problem, algorithm, state).numpy(), np.stack(own), rtol=1e-9)


def test_the_global_model_is_fedavg_and_without_a_pull_the_personal_ones_are_local():
    data, rounds = regression(), 5
    sampler = FixedCohort(3)
    ditto, fedavg, local = Ditto(lam=0.0, local=SOLVER), FedAvg(local=SOLVER), Local(local=SOLVER)
    problem = problem_of(data, rounds=rounds)
    states = [run(algorithm, problem, sampler=sampler) for algorithm in (ditto, fedavg, local)]
    assert torch.equal(states[0].public["global"], states[1].public["global"])
    seen = states[0].private.whole("seen")
    assert torch.equal(everyone(problem, ditto, states[0])[seen], everyone(problem, local, states[2])[seen])
