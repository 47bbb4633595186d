"""Clients that count by their numbers of examples: means by hand, the clip after the weight, and what is refused."""

import math
from dataclasses import replace

import numpy as np
import pytest
import torch

from fedmtl import APFL, PPSGD, Ditto, FedAvg, FedPer, FedProx, FedRep, LocalSGD, PFedMe, models
from fedmtl.algorithms import ClientBatch
from fedmtl.errors import ConfigError
from fedmtl.privacy import ClientPrivacy, FixedCohort, RoundChannel
from tests.algorithms.harness import problem_of, run
from tests.algorithms.test_scaffold import CLIENTS, D, ragged
from tests.helpers import ragged_classification
from tests.trainer.settings import DELTA, trainer

SOLVER = LocalSGD(lr=0.05, steps=3, batch_size=None)
DATA = ragged()
COUNTS = DATA.train.counts.numpy()


def change(k: int, w: np.ndarray) -> np.ndarray:
    """What a client's model changes by in three steps from ``w``."""
    first, v = int(DATA.train.offsets[k]), w.copy()
    x, y = (part[first : first + COUNTS[k]].numpy() for part in (DATA.train.x, DATA.train.y))
    for _ in range(3):
        v = v - 0.05 * 2 / len(x) * x.T @ (x @ v - y)
    return v - w


def test_without_a_cap_it_is_the_mean_over_the_examples_of_the_cohort() -> None:
    cohorts: list[list[int]] = []

    class Watched(FedAvg):
        def local_update(self, c):
            cohorts.append(c.clients.tolist())
            return super().local_update(c)

    algorithm = Watched(local=SOLVER, weights="examples", server_lr=0.5)
    state, w = run(algorithm, problem_of(DATA, rounds=4), sampler=FixedCohort(3)), np.zeros(D)
    for cohort in cohorts:
        w = w + 0.5 * np.average([change(k, w) for k in cohort], axis=0, weights=COUNTS[cohort])
    np.testing.assert_allclose(state.public["global"].numpy(), w, rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("clip", [None, 0.2])
def test_with_a_cap_the_clip_follows_the_weight(clip: float | None) -> None:
    """sum_k clip(min(n_k / cap, 1) change_k) / m, McMahan et al. 2018 with a public denominator."""
    privacy, w, cut = (
        None if clip is None else ClientPrivacy(clip_norm=clip, epsilon=math.inf),
        np.zeros(D),
        0,
    )
    state = run(
        FedAvg(local=SOLVER, weights="examples", cap=8), problem_of(DATA, rounds=3), privacy=privacy
    )
    for _ in range(3):
        rows = [min(COUNTS[k] / 8, 1.0) * change(k, w) for k in range(CLIENTS)]
        cut += sum(clip is not None and np.linalg.norm(row) > clip for row in rows)
        w = (
            w
            + sum(
                row * (1 if clip is None else min(1.0, clip / np.linalg.norm(row))) for row in rows
            )
            / CLIENTS
        )
    assert 0 < cut < 3 * CLIENTS or clip is None
    np.testing.assert_allclose(state.public["global"].numpy(), w, rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("kind", [FedAvg, FedProx, Ditto, APFL, PFedMe, PPSGD, FedRep, FedPer])
def test_what_is_sent_is_what_uniform_weights_send_times_the_weight(kind: type[FedAvg]) -> None:
    problem = problem_of(
        ragged_classification(6), rounds=1, model=models.mlp(hidden=4), loss="auto"
    )
    rows = []
    for algorithm in (kind(local=SOLVER), kind(local=SOLVER, weights="examples", cap=9)):
        state, everyone = algorithm.init(problem), torch.arange(6)
        c = ClientBatch(
            problem, everyone, state.public, state.private.gather_all(everyone), round=0
        )
        rows.append(algorithm.client_update(c)[0]["update"])
    weights = (problem.data.train.counts / 9).clamp(max=1.0)
    assert 0 < int((weights < 1).sum()) < 6
    torch.testing.assert_close(rows[1], weights[:, None] * rows[0])


def test_rows_that_are_added_up_as_they_are_made_have_their_weights(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Of 16,384 numbers or more the sum is made where the rows are."""
    problem = problem_of(
        ragged_classification(6), rounds=2, model=models.mlp(hidden=3000), loss="auto"
    )
    assert problem.dimension > 1 << 14
    algorithm = FedAvg(local=SOLVER, weights="examples", cap=9)
    privacy = ClientPrivacy(clip_norm=0.05, noise_multiplier=1.0, delta=DELTA)
    made = run(algorithm, problem, privacy=privacy).public["global"]
    assert not torch.equal(
        made, run(replace(algorithm, cap=1), problem, privacy=privacy).public["global"]
    )
    monkeypatch.setattr(RoundChannel, "new_total", lambda self, name: None)
    assert torch.equal(made, run(algorithm, problem, privacy=privacy).public["global"])


def test_weights_cost_what_uniform_weights_cost() -> None:
    spent = [
        trainer(algorithm=FedAvg(local=SOLVER, **weights), rounds=3).fit()
        for weights in ({}, WEIGHTED)
    ]
    assert spent[0].epsilon == spent[1].epsilon
    assert spent[0].privacy.noise_std == spent[1].privacy.noise_std
    assert not torch.equal(spent[0].personal, spent[1].personal)


WEIGHTED = {"weights": "examples", "cap": 6}


def test_private_numbers_of_examples_are_refused_as_weights() -> None:
    with pytest.raises(
        ConfigError, match=r"Ditto\.weights is 'examples' without Ditto\.cap.* give a public cap"
    ):
        trainer(algorithm=Ditto(local=SOLVER, weights="examples")).fit()
