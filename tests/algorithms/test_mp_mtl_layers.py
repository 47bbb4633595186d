"""Sharing chosen layers of a network: against local training and a singular value decomposition."""

from typing import Any

import numpy as np
import pytest
import torch

from fedmtl import ClientPrivacy, models
from fedmtl.algorithms import Local, Problem
from fedmtl.algorithms.mp_mtl.sharing import mapped
from fedmtl.contrib import MPMTLayers
from fedmtl.errors import ConfigError
from fedmtl.local import LocalSGD
from tests.helpers import ragged_classification

from .harness import everyone, problem_of, run

SOLVER = LocalSGD(lr=0.3, epochs=2, batch_size=4)


def network(rounds: int = 3) -> Problem:
    """8 clients, and a perceptron whose last layer is ``3`` with 5 inputs."""
    return problem_of(
        ragged_classification(8, largest=12),
        rounds=rounds,
        model=models.mlp(hidden=5),
        loss="cross_entropy",
    )


def layers(**settings: Any) -> MPMTLayers:
    return MPMTLayers(**({"layers": ("3",), "local": SOLVER} | settings))


@pytest.mark.parametrize("penalty", ["nuclear", "l21"])
def test_a_round_shrinks_what_training_changed_of_the_layer(penalty: Any) -> None:
    problem = network(1)
    alone = everyone(problem, Local(local=SOLVER), run(Local(local=SOLVER), problem)).numpy()
    algorithm = layers(threshold=0.2, penalty=penalty)
    found = everyone(problem, algorithm, run(algorithm, problem)).numpy()
    last = slice(
        problem.layout.offsets[2], problem.layout.offsets[4]
    )  # weight and bias of the last layer
    np.testing.assert_allclose(found[:, : last.start], alone[:, : last.start], atol=1e-14)
    start = problem.initial.numpy()[last]
    change = alone[:, last] - start
    if penalty == "nuclear":
        u, s, v = np.linalg.svd(change, full_matrices=False)
        assert 0 < (s > 0.2).sum() < len(s)  # some directions are kept, and some are not
        expected = (u * np.maximum(s - 0.2, 0)) @ v
    else:
        norms = np.linalg.norm(change, axis=0)
        expected = change * np.maximum(1 - 0.2 / norms, 0)
    np.testing.assert_allclose(found[:, last] - start, expected, atol=1e-9)


def test_without_a_threshold_it_is_local_training() -> None:
    """Whatever noise is released beside it."""
    problem, algorithm, local = network(), layers(threshold=0.0), Local(local=SOLVER)
    state = run(
        algorithm, problem, privacy=ClientPrivacy(clip_norm=0.3, noise_multiplier=0.5, delta=1e-5)
    )
    alone = everyone(problem, local, run(local, problem))
    np.testing.assert_allclose(everyone(problem, algorithm, state), alone, rtol=0, atol=1e-12)


def test_what_is_released_is_the_covariance_of_the_layer_under_the_clip() -> None:
    problem, record = network(2), []
    run(
        layers(layers=("3.weight",), alpha=1.0),
        problem,
        privacy=ClientPrivacy(clip_norm=0.01, epsilon=np.inf),
        record=record,
    )
    size = problem.layout.offsets[3] - problem.layout.offsets[2]
    assert [value.shape for _, _, value in record] == [(size, size)] * 2
    assert float(record[0][2].trace()) == pytest.approx(
        0.01**2, rel=1e-4
    )  # the mean of w w^T with ||w|| = C


def test_what_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"1\.weight, 1\.bias, 3\.weight, 3\.bias"):
        run(layers(layers=("fc",)), network())
    wide = problem_of(
        ragged_classification(3, largest=5),
        rounds=1,
        model=models.mlp(hidden=500),
        loss="cross_entropy",
    )
    with pytest.raises(ConfigError, match="l21"):
        run(layers(layers=("1",)), wide)


@pytest.mark.parametrize("features", [7, 100, 300])
def test_a_model_is_mapped_to_the_same_bits_in_any_piece(features: int) -> None:
    generator = torch.Generator().manual_seed(0)
    rows = torch.randn(2, 45, features, generator=generator, dtype=torch.float64)
    root = torch.randn(2, features, features, generator=generator, dtype=torch.float64)
    whole = mapped(root @ root.mT, rows)
    torch.testing.assert_close(whole, (root @ root.mT @ rows.mT).mT, rtol=1e-9, atol=1e-9)
    order = torch.randperm(45, generator=generator)
    for size in (1, 2, 7, 20):
        pieces = [mapped(root @ root.mT, rows[:, places]) for places in order.split(size)]
        assert torch.equal(torch.cat(pieces, 1), whole[:, order])
