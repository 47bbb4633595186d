"""Concatenated models: local training without noise, and noise that no number of clients averages out."""

import pytest
import torch

from benchmarks.baselines.concatenated import ConcatenatedModels
from fedmtl import ClientPrivacy, FedAvg, Local, LocalSGD
from tests.algorithms.harness import everyone, problem_of, run
from tests.helpers import regression

SOLVER = LocalSGD(lr=0.05, steps=3, batch_size=None)


def test_without_noise_it_is_local_training() -> None:
    problem = problem_of(regression(), rounds=4)
    one, other = ConcatenatedModels(local=SOLVER), Local(local=SOLVER)
    found, alone = (everyone(problem, a, run(a, problem)) for a in (one, other))
    torch.testing.assert_close(found, alone, rtol=1e-12, atol=1e-13)


@pytest.mark.parametrize("clients", [50, 400])
def test_noise_is_that_of_the_clip_whatever_the_number_of_clients(clients: int) -> None:
    """z C on every coordinate of every model after one round, where a mean has z C / K."""
    problem = problem_of(regression(clients=clients), rounds=1)
    loud = ClientPrivacy(clip_norm=1e-6, noise_multiplier=2e6, delta=1e-5)  # z C = 2, and no signal
    algorithm = ConcatenatedModels(local=SOLVER)
    personal = everyone(problem, algorithm, run(algorithm, problem, privacy=loud))
    assert float(personal.std()) == pytest.approx(2.0, rel=6 / (2 * 4 * clients) ** 0.5)
    shared = run(FedAvg(local=SOLVER), problem, privacy=loud).public["global"]
    assert float(shared.abs().max()) < 6 * 2.0 / clients
