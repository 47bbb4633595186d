"""Runs on a device beside the host, simulated on the CPU: the numbers are those of the CPU, and how often the host
waits for the device."""

from typing import Any

import pytest
import torch

from fedmtl import (
    ClientPrivacy,
    Execution,
    FedAvg,
    FullParticipation,
    LocalSGD,
    PoissonSampling,
    RecordPrivacy,
    models,
)
from tests import small
from tests.helpers import ragged_classification
from tests.methods import NETWORKS
from tests.simulated_device import NAME, Device, Remote, simulated
from tests.trainer.test_device import CASES, image_cnn, images, network, small_cnn

TWICE = ("apfl", "fedrep")
"""Methods whose clients train twice in a round, which counts the models that diverged twice."""


def settings(**more: Any) -> dict[str, Any]:
    given: dict[str, Any] = {"data": ragged_classification(7), "rounds": 2}
    given |= {"model": models.mlp(hidden=4), "schedule": PoissonSampling(cohort=5)}
    given |= {"privacy": ClientPrivacy(clip_norm=1.0, epsilon=8.0, delta=1e-5)}
    return given | {"algorithm": NETWORKS["pmtl"]} | more


def waits(**more: Any) -> int:
    """Returns how often the host waits in a run that is evaluated once."""
    with simulated() as device:
        small.trainer(**settings(**more), device=NAME, eval_every=100).fit()
    return device.waits.total()


@pytest.mark.parametrize("case", CASES)
def test_a_run_on_a_device_gives_the_numbers_of_the_cpu(case):
    given = settings(**CASES[case]) | {"rounds": 2}
    expected = small.trainer(**given).fit()
    with simulated() as device:
        found = small.trainer(**given, device=NAME).fit()
        assert isinstance(found.personal, Remote)
        personal, shared = found.personal.cpu(), found.shared.cpu()
    assert device.operations > 500
    tolerance = {"rtol": 1e-10, "atol": 1e-12}
    if "dtype" in CASES[case]:
        tolerance = {"rtol": 1e-5, "atol": 1e-6}
    torch.testing.assert_close(personal, expected.personal, **tolerance)
    torch.testing.assert_close(shared, expected.shared, **tolerance)


@pytest.mark.parametrize(
    "case",
    [
        "pmtl",
        "pmtl, running mean",
        "fedavg",
        "apfl",
        "fedrep",
        "ppsgd",
        "adam",
        "small cnn",
        "images",
    ],
)
def test_the_host_waits_twice_in_a_round(case):
    # for the number of models that diverged in each training, and for the sum
    each = 2 + (case in TWICE)
    assert waits(**CASES[case], rounds=3) - waits(**CASES[case], rounds=1) <= 2 * each


def test_pieces_of_a_cohort_are_joined_without_a_wait(monkeypatch):
    monkeypatch.setattr("fedmtl.algorithms.problem._PIECE_BYTES", 1)
    monkeypatch.setattr(Execution, "resolve", lambda self, *given: Execution(4, 1))
    # in each round for the models of each of two pieces that diverged, and for the sum
    everyone = FullParticipation()
    assert waits(schedule=everyone, rounds=3) - waits(schedule=everyone, rounds=1) == 2 * 3


def test_a_sum_without_a_clip_makes_the_host_wait_once_more():
    more = {"privacy": RecordPrivacy(clip_norm=1.0, epsilon=8.0), "schedule": FullParticipation()}
    assert waits(**more, rounds=3) - waits(**more, rounds=1) == 2 * 3


@pytest.mark.parametrize(
    "more",
    [
        {},
        {"model": network},
        {"model": small_cnn},
        {"model": image_cnn, "data": images()},
        {"model": small_cnn, "privacy": RecordPrivacy(clip_norm=1.0, epsilon=8.0)},
        {
            "model": image_cnn,
            "data": images(),
            "privacy": RecordPrivacy(clip_norm=1.0, epsilon=8.0),
        },
    ],
    ids=["perceptron", "dropout", "convolution", "images", "records", "records of images"],
)
def test_a_local_step_makes_nobody_wait(more):
    few, many = (
        waits(**more, algorithm=FedAvg(local=LocalSGD(lr=0.1, epochs=epochs, batch_size=4)))
        for epochs in (1, 3)
    )
    assert few == many


def waited(program) -> int:
    with Device() as device:
        program(torch.tensor([3.0, 0.0, 1.0]).to(NAME, non_blocking=True))
    return device.waits.total()


def test_the_device_counts_what_a_gpu_waits_for():
    for program in (
        lambda x: x[0].item(),
        lambda x: bool(x.any()),
        lambda x: x.tolist(),
        lambda x: x.cpu(),
        lambda x: x.nonzero(),
        lambda x: x[x > 0],
        lambda x: x[torch.tensor([0])],
        lambda x: x.copy_(torch.ones(3)),
        lambda x: torch.equal(x, x),
        lambda x: torch.bincount(x.long()),
    ):
        assert waited(program) == 1
    for program in (
        lambda x: x * 2 + torch.tensor(1.0),
        lambda x: x[:2].sum(),
        lambda x: x[torch.tensor([0]).to(NAME, non_blocking=True)],
        lambda x: x.copy_(torch.ones(3), non_blocking=True),
        lambda x: torch.where(x > 0, x, 0.0),
    ):
        assert waited(program) == 0


def test_the_device_refuses_numbers_of_the_host():
    with pytest.raises(RuntimeError, match="same device"):
        waited(lambda x: x + torch.ones(3))
    with pytest.raises(RuntimeError, match="numpy"):
        waited(lambda x: x.numpy())
