"""Runs on a GPU: the numbers are those of the CPU."""

import pytest
import torch
from torch import nn

from fedmtl import (
    MPMTL,
    PMTL,
    PPDMTL,
    FedAvg,
    FullParticipation,
    PoissonClocks,
    PrivatePrior,
    RecordPrivacy,
    Trainer,
    models,
)
from fedmtl.algorithms.finetune import Finetune
from fedmtl.local import LocalOptimizer, LocalSGD
from fedmtl.privacy import ClientPrivacy, PoissonSampling
from tests.algorithms.harness import problem_of
from tests.algorithms.harness import run as run_rounds
from tests.helpers import ragged_classification, regression
from tests.methods import NETWORKS

SGD = LocalSGD(lr=0.1, epochs=2, batch_size=4)
NAMES = ("pmtl", "pmtl, running mean", "fedavg", "ditto", "apfl", "pfedme", "ppsgd", "fedrep", "fedper")
ALGORITHMS = {name: NETWORKS[name] for name in NAMES}
ALGORITHMS["adam"] = FedAvg(local=LocalOptimizer(optimizer_name="Adam", lr=0.01, batch_size=4))


def network(spec) -> nn.Module:
    torch.manual_seed(0)
    hidden = nn.Sequential(nn.Linear(5, 6), nn.LayerNorm(6), nn.Tanh(), nn.Dropout(0.3))
    return nn.Sequential(hidden, nn.Linear(6, 3))


def small_cnn(spec) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Unflatten(1, (1, 1, 5)), nn.Conv2d(1, 3, (1, 2)), nn.ReLU(), nn.Flatten(), nn.Linear(12, 3))


def released(algorithm, device, model=None):
    """Return the released values and the personal models of a run of three rounds on a device."""
    problem = problem_of(
        ragged_classification(11), rounds=3, model=model or models.mlp(hidden=4), loss="cross_entropy", device=device
    )
    record: list = []
    privacy = ClientPrivacy(clip_norm=1.0, epsilon=8.0, delta=1e-5)
    state = run_rounds(algorithm, problem, sampler=PoissonSampling(cohort=7), privacy=privacy, record=record)
    personal = algorithm.personalize(problem, state, torch.arange(problem.clients)).cpu()
    return [value for _, _, value in record], personal


def whole(device, **changes):
    """Return every number of a run from beginning to end."""
    given = {
        "algorithm": PMTL(lam=0.5, local=SGD), "model": models.mlp(hidden=4), "schedule": PoissonSampling(cohort=7),
        "privacy": ClientPrivacy(clip_norm=1.0, epsilon=8.0), "rounds": 2, "baselines": ("local",), "progress": False,
    }  # fmt: skip
    result = Trainer(data=ragged_classification(11), device=device, **given | changes).fit()
    return result.personal.cpu(), result.final, result.by_client


WHOLE = {
    "clients that are drawn for evaluation": {"evaluate_clients": 4, "finetune": Finetune(validation=0.3)},
    "records": {
        "model": small_cnn, "privacy": RecordPrivacy(clip_norm=1.0, epsilon=8.0, source="seeded"), "rounds": 1,
        "baselines": (),
    },
    "nothing is released": {"model": network, "privacy": None, "rounds": 1, "baselines": ()},
}  # fmt: skip


gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")


@pytest.mark.gpu
@gpu
@pytest.mark.parametrize("name", [*ALGORITHMS, "network", "small_cnn"])
def test_a_round_on_a_gpu_gives_the_numbers_of_the_cpu(name):
    model = {"network": network, "small_cnn": small_cnn}.get(name)
    algorithm = ALGORITHMS[name if model is None else "pmtl"]
    values, personal = released(algorithm, "cuda", model)
    expected, models_expected = released(algorithm, "cpu", model)
    for one, other in zip(values, expected, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(personal, models_expected, rtol=1e-4, atol=1e-5)


@pytest.mark.gpu
@gpu
@pytest.mark.parametrize("name", WHOLE)
def test_a_whole_run_on_a_gpu(name):
    (found, final, by_client), (expected, final_there, by_client_there) = (
        whole(device, **WHOLE[name]) for device in ("cuda", "cpu")
    )
    torch.testing.assert_close(found, expected, rtol=1e-3, atol=1e-4)
    assert final.keys() == final_there.keys()
    assert by_client.keys() == by_client_there.keys()


@pytest.mark.gpu
@gpu
@pytest.mark.parametrize(
    "algorithm", [MPMTL(row_norm=1.0), PPDMTL(loss="squared", row_norm=1.0), PrivatePrior(row_norm=1.0)]
)
def test_methods_in_numpy_are_on_the_cpu_whatever_the_device(algorithm):
    given = {"algorithm": algorithm, "model": models.linear_regression(), "privacy": None, "baselines": ()}
    if algorithm.one_at_a_time:
        given |= {"schedule": PoissonClocks(events=10), "rounds": 10}
    else:
        given |= {"schedule": FullParticipation(), "rounds": 1}
    result = Trainer(data=regression(3), device="cuda", progress=False, **given).fit()
    assert result.personal.device.type == "cpu"


@pytest.mark.gpu
@gpu
def test_clients_of_data_on_a_device_are_chosen_there():
    data = ragged_classification(5)
    there = data.to("cuda")
    assert torch.equal(
        there.take_clients(torch.tensor([3, 1])).train.x.cpu(), data.take_clients(torch.tensor([3, 1])).train.x
    )
    assert torch.equal(
        there.take_clients(torch.tensor([3, 1])).test.y.cpu(), data.take_clients(torch.tensor([3, 1])).test.y
    )
