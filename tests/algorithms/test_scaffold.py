"""SCAFFOLD against a slow loop in NumPy, one client and one batch at a time; and what its two releases cost."""

import math

import numpy as np
import pytest
import torch
from dp_accounting import dp_event

from fedmtl import FullParticipation, LocalSGD, Scaffold
from fedmtl.data import FederatedDataset
from fedmtl.local import plan_batches
from fedmtl.privacy import ClientPrivacy, FixedCohort
from tests.algorithms.harness import everyone, problem_of, run
from tests.helpers import library_accountant, regression
from tests.trainer.settings import DELTA, trainer

BATCHES = LocalSGD(
    lr=0.05, epochs=2, batch_size=4, decay=0.9
)  # numbers of local steps differ between clients
CLIENTS, D = 7, 4


def ragged() -> FederatedDataset:
    """Regression of clients with 3 to 15 examples."""
    data = regression(clients=CLIENTS, examples=15)
    x, y, first = data.train.x, data.train.y, data.train.offsets.tolist()
    train = {
        name: (x[a : a + 3 + 2 * k], y[a : a + 3 + 2 * k])
        for k, (name, a) in enumerate(zip(data.ids, first, strict=False))
    }
    return FederatedDataset.from_tensors(train, test=train, classes=None)


class Watched(Scaffold):
    """SCAFFOLD that notes the cohorts."""

    cohorts: list[list[int]] = []  # noqa: RUF012

    def client_update(self, c):
        self.cohorts.append(c.clients.tolist())
        return super().client_update(c)


@pytest.mark.parametrize("clip", [None, 0.3])
def test_it_is_algorithm_1_of_the_paper(clip: float | None) -> None:
    """Option II, with partial participation, on minibatches; also where rows are clipped, each by itself."""
    data, rounds, server_lr = ragged(), 5, 0.7
    problem, algorithm = (
        problem_of(data, rounds=rounds),
        Watched(local=BATCHES, server_lr=server_lr),
    )
    algorithm.cohorts.clear()
    privacy = None if clip is None else ClientPrivacy(clip_norm=clip, epsilon=math.inf)
    state = run(algorithm, problem, sampler=FixedCohort(3), privacy=privacy)

    def clipped(row: np.ndarray) -> np.ndarray:
        return row if clip is None else row * min(1.0, clip / np.linalg.norm(row))

    x, c, own, cut = np.zeros(D), np.zeros(D), np.zeros((CLIENTS, D)), 0
    assert len(algorithm.cohorts) == rounds
    for round, cohort in enumerate(algorithm.cohorts):
        lr, updates, controls = 0.05 * 0.9**round, np.zeros(D), np.zeros(D)
        for k in cohort:
            y, steps = x.copy(), 0
            for batch in plan_batches(
                data, BATCHES, torch.tensor([k]), seed=problem.seed, round=round
            ).batches():
                rows, targets = data.gather(
                    "train", batch.index[0][batch.weight[0] > 0], dtype=torch.float64
                )
                a, b = rows.numpy(), targets.numpy().reshape(-1)
                y -= lr * (2 / len(a) * a.T @ (a @ y - b) - own[k] + c)
                steps += 1
            change = -c + (x - y) / (steps * lr)
            cut += clip is not None and np.linalg.norm(change) > clip
            updates, controls, own[k] = (
                updates + clipped(y - x),
                controls + clipped(change),
                own[k] + clipped(change),
            )
        x, c = x + server_lr * updates / 3, c + controls / CLIENTS
    assert (cut > 0) == (clip is not None)
    np.testing.assert_allclose(state.public["global"].numpy(), x, rtol=1e-6, atol=1e-7)
    np.testing.assert_allclose(state.public["control"].numpy(), c, rtol=1e-6, atol=1e-7)
    np.testing.assert_allclose(
        state.private.gather("control", torch.arange(CLIENTS)).numpy(), own, atol=1e-6
    )
    np.testing.assert_allclose(
        state.public["control"].numpy(), own.mean(0), atol=1e-6
    )  # c is the mean of all c_k
    assert torch.equal(everyone(problem, algorithm, state)[2], state.public["global"])


def test_a_round_is_charged_as_one_release_of_both_rows() -> None:
    """Two rows of norm C each are one of norm sqrt(2) C; dp-accounting composes the rounds."""
    privacy = ClientPrivacy(clip_norm=0.5, noise_multiplier=2.0, delta=DELTA)
    result = trainer(
        algorithm=Scaffold(local=BATCHES), privacy=privacy, rounds=3, schedule=FullParticipation()
    ).fit()
    event = dp_event.GaussianDpEvent(2.0 / math.sqrt(2.0))
    assert result.epsilon == pytest.approx(
        library_accountant().compose(event, 3).get_epsilon(DELTA), rel=1e-3
    )
    assert result.privacy.releases == 2 * 3


def test_a_client_whose_training_diverges_sends_nothing_and_keeps_its_control_variate() -> None:
    data = regression(clients=3)
    problem = problem_of(data, rounds=1)
    run_away = Scaffold(local=LocalSGD(lr=1e200, steps=5, batch_size=None))
    state = run(run_away, problem)
    assert not state.private.gather("control", torch.arange(3)).any()
    assert torch.equal(state.public["global"], problem.initial)
