"""Ditto against hand-written rounds."""

import numpy as np
import pytest
import torch

from fedmtl import Ditto, LocalSGD
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
    np.testing.assert_allclose(
        everyone(problem, algorithm, state).numpy(), np.stack(own), rtol=1e-9
    )


class Counting(Ditto):
    """Ditto whose clients count their rounds."""

    def fields(self, problem):
        return {"rounds": ((), torch.int64)}

    def local_update(self, c):
        change, own = super().local_update(c)
        return change, own | {"rounds": c.states["rounds"] + 1}


def test_clients_keep_fields_beside_a_personal_model():
    problem, plain, counting = (
        problem_of(regression(clients=5), rounds=4),
        Ditto(local=SOLVER),
        Counting(local=SOLVER),
    )
    expected, found = run(plain, problem), run(counting, problem)
    assert torch.equal(everyone(problem, counting, found), everyone(problem, plain, expected))
    assert found.private.whole("rounds").tolist() == [4] * 5
