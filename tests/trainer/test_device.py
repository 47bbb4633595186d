"""Runs on a GPU: the numbers are those of the CPU."""

from typing import Any

import pytest
import torch
from torch import nn

from fedmtl import (
    MPMTL,
    PPDMTL,
    ClientPrivacy,
    FedAvg,
    Finetune,
    FullParticipation,
    LocalOptimizer,
    PoissonClocks,
    PoissonSampling,
    PrivatePrior,
    RecordPrivacy,
    models,
)
from fedmtl.data import FederatedDataset
from tests import small
from tests.helpers import ragged_classification, regression
from tests.methods import NETWORKS

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU"),
]


def network(spec: Any) -> nn.Module:
    hidden = nn.Sequential(nn.Linear(5, 6), nn.LayerNorm(6), nn.Tanh(), nn.Dropout(0.3))
    return nn.Sequential(hidden, nn.Linear(6, 3))


def small_cnn(spec: Any) -> nn.Module:
    return nn.Sequential(
        nn.Unflatten(1, (1, 1, 5)),
        nn.Conv2d(1, 3, (1, 2)),
        nn.ReLU(),
        nn.Flatten(),
        nn.Linear(12, 3),
    )


def image_cnn(spec: Any) -> nn.Module:
    """A network whose convolutions are batched products."""
    first = nn.Sequential(nn.Conv2d(1, 2, 3), nn.ReLU(), nn.MaxPool2d(2))
    return nn.Sequential(
        first, nn.Conv2d(2, 3, 2, padding=1), nn.Tanh(), nn.Flatten(), nn.Linear(27, 3)
    )


def images() -> FederatedDataset:
    """Clients of 4 to 9 images of 6 x 6."""
    generator = torch.Generator().manual_seed(0)
    rows = {}
    for client in range(7):
        size = 4 + client % 6
        x = torch.randn(size, 1, 6, 6, generator=generator, dtype=torch.float64)
        rows[f"client-{client}"] = (x, torch.randint(0, 3, (size,), generator=generator))
    return FederatedDataset.from_tensors(rows, test_fraction=0.3, classes=3, name="images")


NAMES = (
    "pmtl",
    "pmtl, running mean",
    "fedavg",
    "ditto",
    "apfl",
    "pfedme",
    "ppsgd",
    "fedrep",
    "fedper",
)
SINGLE = {"dtype": "float32"}
RECORDS = RecordPrivacy(clip_norm=1.0, epsilon=8.0)
CASES: dict[str, dict[str, Any]] = {
    **{name: {"algorithm": NETWORKS[name]} for name in NAMES},
    "adam": {
        "algorithm": FedAvg(local=LocalOptimizer(optimizer_name="Adam", lr=0.01, batch_size=4))
    },
    "network": {"model": network},
    "small cnn": {"model": small_cnn},
    "images": {"model": image_cnn, "data": images()},
    "evaluated clients": {
        "evaluate_clients": 4,
        "finetune": Finetune(validation=0.3),
        "baselines": ("local",),
        **SINGLE,
    },
    "records": {"model": small_cnn, "privacy": RECORDS, "rounds": 1, **SINGLE},
    "records of images": {
        "model": image_cnn,
        "data": images(),
        "privacy": RECORDS,
        "rounds": 1,
        **SINGLE,
    },
    "records of a perceptron": {"privacy": RECORDS, "rounds": 1},
    "nothing is released": {"model": network, "privacy": None, "rounds": 1, **SINGLE},
}


@pytest.mark.parametrize("case", CASES)
def test_a_run_on_a_gpu_gives_the_numbers_of_the_cpu(case: str) -> None:
    settings: dict[str, Any] = {
        "algorithm": NETWORKS["pmtl"],
        "data": ragged_classification(11),
        "rounds": 3,
    }
    settings |= {"model": models.mlp(hidden=4), "schedule": PoissonSampling(cohort=7)}
    settings |= {"privacy": ClientPrivacy(clip_norm=1.0, epsilon=8.0, delta=1e-5)} | CASES[case]
    found, expected = (small.trainer(**settings, device=device).fit() for device in ("cuda", "cpu"))
    tolerance = (
        {"rtol": 1e-3, "atol": 1e-4} if "dtype" in CASES[case] else {"rtol": 1e-4, "atol": 1e-5}
    )
    torch.testing.assert_close(found.personal.cpu(), expected.personal, **tolerance)
    torch.testing.assert_close(found.shared.cpu(), expected.shared, **tolerance)
    assert found.final.keys() == expected.final.keys()
    # which clients have which scores, without pandas, which a machine with a GPU may lack
    scored, usual = ({k: set(v) for k, v in one.columns().items()} for one in (found, expected))
    assert scored == usual


@pytest.mark.parametrize(
    "algorithm",
    [
        MPMTL(feature_norm=1.0),
        PPDMTL(loss="squared", feature_norm=1.0),
        PrivatePrior(feature_norm=1.0),
    ],
)
def test_methods_in_numpy_are_on_the_cpu_whatever_the_device(algorithm: Any) -> None:
    schedule = PoissonClocks(activations=10) if algorithm.one_at_a_time else FullParticipation()
    settings = {
        "model": models.linear_regression(),
        "schedule": schedule,
        "rounds": 10 if algorithm.one_at_a_time else 1,
    }
    result = small.trainer(algorithm=algorithm, data=regression(3), device="cuda", **settings).fit()
    assert result.personal.device.type == "cpu"
