"""The private prior of layers against NumPy, automatic differentiation, Monte Carlo, and the limits of its settings."""

import math
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from fedmtl import ClientPrivacy, PriorLayers, RecordPrivacy, Trainer, models
from fedmtl.algorithms import ClientBatch, Problem, State
from fedmtl.data import FederatedDataset
from fedmtl.errors import ConfigError
from fedmtl.local import LocalSGD
from tests import small
from tests.helpers import ragged_classification

from .harness import everyone, problem_of, run
from .p2p_harness import arrays
from .test_private_prior import (
    FLOOR,
    RIDGE,
    TASKS,
    D,
    excess_in_numpy,
    linear,
    rows_of,
    symmetric_signal,
)

EXACT = LocalSGD(lr=1.0, steps=300, batch_size=None, proximal=True)
SHORT = LocalSGD(lr=0.2, epochs=3, batch_size=4, proximal=True)


def network(**options: Any) -> Problem:
    """12 clients, and a perceptron whose last layer is ``3``, 5 inputs and 3 outputs."""
    return problem_of(
        ragged_classification(12, largest=12),
        rounds=1,
        model=models.mlp(hidden=5),
        loss="cross_entropy",
        **options,
    )


def prior(**settings: Any) -> PriorLayers:
    return PriorLayers(**({"ridge": RIDGE, "scale": 1.0, "local": SHORT} | settings))


def alone(problem: Problem, algorithm: PriorLayers) -> Tensor:
    c = ClientBatch(problem, torch.arange(problem.clients), round=0)
    return c.train(algorithm.local, problem.initial, lam=algorithm.ridge, anchor=problem.initial)


# A whole run


def in_numpy(problem: Problem) -> np.ndarray:
    """The models (n, D) of a run without noise, one task after the other, of linear regression."""
    start, h = problem.initial.numpy(), RIDGE + 1 / (EXACT.lr * 300)
    moments, kept = np.zeros((D, D)), []
    for x, y in arrays(problem):
        gram = x.T @ x / len(y)
        change = np.linalg.solve(gram + RIDGE * np.eye(D), x.T @ (y - x @ start) / len(y))
        gradients = (x @ start - y)[:, None] * x
        fisher = gradients.T @ gradients / len(y)
        b = np.linalg.inv(fisher + h * np.eye(D)) @ fisher
        u = change / np.linalg.norm(change)
        moments += (np.outer(u, u) - (b + b.T) / 2 / np.trace(b)) / TASKS
        kept.append((x, y, gram, np.trace(b) / D))
    values, vectors = excess_in_numpy(symmetric_signal(moments, TASKS))
    found = []
    for x, y, gram, b in kept:
        variances = np.clip(1 + D * values / b, FLOOR, D / FLOOR)
        precision = vectors @ np.diag(RIDGE / variances) @ vectors.T
        found.append(start + np.linalg.solve(gram + precision, x.T @ (y - x @ start) / len(y)))
    return np.stack(found)


@pytest.mark.parametrize("alike", [False, True])
def test_without_noise_it_is_the_formula(alike: bool) -> None:
    problem = linear()
    if alike:
        x, y = problem.data.train.x, problem.data.train.y
        train = replace(problem.data.train, y=x.sum(1) * 0.5 + y)
        problem = problem_of(
            replace(problem.data, train=train),
            rounds=1,
            model=models.linear_regression(bias=False),
            loss="half_mse",
        )
    algorithm = prior(local=EXACT)
    found = everyone(problem, algorithm, run(algorithm, problem)).numpy()
    np.testing.assert_allclose(found, in_numpy(problem), rtol=1e-6, atol=1e-7)


def dense_precision(problem: Problem, algorithm: PriorLayers, state: State, client: int) -> Tensor:
    """P of a client as a matrix, from the public state and its own b e."""
    p = RIDGE * torch.eye(problem.dimension, dtype=torch.float64)
    determined = state.private.gather("determined", torch.tensor([client]))[0]
    for part, own in zip(algorithm.matrices(problem), determined, strict=True):
        v, excess = state.public[f"directions/{part.name}"], state.public[f"excess/{part.name}"]
        variances = (1 + part.width * excess / own).clamp(FLOOR, part.width / FLOOR)
        side, eye = (
            (v * (RIDGE / variances)) @ v.T,
            torch.eye(math.prod(part.shape) // part.width).double(),
        )
        p[part.places, part.places] = (
            torch.kron(eye, side) if part.columns else torch.kron(side, eye)
        )
    return p


def one_direction() -> FederatedDataset:
    """16 clients of 8 records in 5 dimensions and 3 classes, who differ in the sign of one feature for two classes."""
    generator = torch.Generator().manual_seed(3)
    parts = {}
    for client in range(16):
        x = torch.randn(8, 5, generator=generator, dtype=torch.float64)
        score = (-1) ** client * 2 * x[:, 0] + 0.3 * torch.randn(
            8, generator=generator, dtype=torch.float64
        )
        parts[f"client-{client}"] = (
            x,
            torch.where(score > 0.5, 2, torch.where(score < -0.5, 1, 0)),
        )
    return FederatedDataset.from_tensors(parts, test_fraction=0.25, classes=3)


@pytest.mark.parametrize("side", ["input", "output", "auto"])
def test_a_softmax_model_under_the_prior_is_a_stationary_point(side: Any) -> None:
    data = one_direction()
    problem = problem_of(data, rounds=1, model=models.softmax_regression(), loss="cross_entropy")
    algorithm = prior(side=side, local=LocalSGD(lr=1.0, steps=700, batch_size=None, proximal=True))
    state = run(algorithm, problem)
    (name,) = (name for name in state.public if name.startswith("excess/"))
    assert bool(state.public[name].any())
    if side == "input":  # the direction in which they differ
        assert float(state.public[name.replace("excess", "directions")][0, -1].abs()) > 0.9
    found, shape, train = everyone(problem, algorithm, state), problem.layout.shapes[0], data.train
    for client in range(0, 16, 5):
        part = slice(int(train.offsets[client]), int(train.offsets[client + 1]))
        w = found[client].clone().requires_grad_()
        x = data.transform(train.x[part], torch.float64)
        logits = x @ w[: math.prod(shape)].view(shape).T + w[math.prod(shape) :]
        away = w - problem.initial
        pull = away @ dense_precision(problem, algorithm, state, client) @ away / 2
        (nn.functional.cross_entropy(logits, train.y[part]) + pull).backward()
        assert w.grad is not None
        assert float(w.grad.abs().max()) < 1e-5


@pytest.mark.parametrize("make", [linear, network])
def test_what_drowns_in_noise_leaves_every_client_alone_to_the_bit(make: Any) -> None:
    problem, algorithm = make(), prior()
    privacy = ClientPrivacy(clip_norm=1.0, noise_multiplier=1e4, delta=1e-5)
    state = run(algorithm, problem, privacy=privacy)
    assert torch.equal(everyone(problem, algorithm, state), alone(problem, algorithm))


def test_low_rank_adapters_vectors_and_convolutions() -> None:
    """Whatever has parameters has a prior; what has no gradient at the start has that of learning alone."""
    adapted = problem_of(
        ragged_classification(12, largest=12),
        rounds=1,
        model=models.lora(models.mlp(hidden=5), rank=2),
        loss="cross_entropy",
    )
    algorithm = prior(side="input")
    state = run(algorithm, adapted)
    names = [part.name for part in algorithm.shared_parts(adapted)]
    assert {name.rsplit("_", 1)[1] for name in names} == {"A", "B"}
    first = next(
        at for at, part in enumerate(algorithm.shared_parts(adapted)) if part.name.endswith("A")
    )
    assert not bool(state.private.gather("determined", torch.arange(12))[:, first].any())
    assert not bool(state.public[f"excess/{names[first]}"].any())
    assert bool(everyone(adapted, algorithm, state).isfinite().all())
    torch.manual_seed(0)
    filters = nn.Sequential(
        nn.Unflatten(1, (1, -1)), nn.Conv1d(1, 2, 3), nn.Flatten(), nn.LazyLinear(3)
    )
    filters(torch.zeros(1, 5))
    convolved = problem_of(
        ragged_classification(12, largest=12), rounds=1, model=filters, loss="cross_entropy"
    )
    (part, bias) = prior(layers=("1",)).shared_parts(convolved)
    assert (part.shape, part.width, bias.shape, bias.width) == ((2, 3), 3, (2, 1), 1)
    assert bool(everyone(convolved, algorithm, run(algorithm, convolved)).isfinite().all())


def test_layers_that_are_not_chosen_are_trained_alone_under_the_same_pull() -> None:
    problem = network()
    algorithm = prior(layers=("3.weight",), ridge=1e9)
    state = run(algorithm, problem)
    assert set(state.public) == {"directions/3.weight", "excess/3.weight"}
    rest = torch.ones(problem.dimension, dtype=torch.bool)
    rest[problem.layout.offsets[2] : problem.layout.offsets[3]] = False
    found = everyone(problem, algorithm, state)
    torch.testing.assert_close(
        found[:, rest], problem.initial[rest].expand(12, -1), rtol=0, atol=1e-6
    )


def test_a_client_that_never_took_part() -> None:
    """Its model is the one it would have had: all of its records are in every step."""
    problem, algorithm = linear(), prior(local=replace(EXACT, steps=5))
    state = run(algorithm, problem)
    took_part = everyone(problem, algorithm, state)
    nothing = {
        "seen": torch.zeros(TASKS, dtype=torch.bool),
        "model": torch.zeros(TASKS, D, dtype=torch.float64),
    }
    state.private.scatter_all(torch.arange(TASKS), nothing)
    assert not torch.equal(took_part, alone(problem, algorithm))
    torch.testing.assert_close(everyone(problem, algorithm, state), took_part)


def test_the_rows_do_not_depend_on_how_many_clients_are_computed_together(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    problem, algorithm = network(), prior()
    together = rows_of(algorithm, problem)
    monkeypatch.setattr("fedmtl.contrib.prior_layers._BLOCK", 1)
    assert torch.equal(rows_of(algorithm, problem), together)


# A run of the trainer


def trainer(algorithm: Any, **options: Any) -> Trainer:
    privacy = ClientPrivacy(clip_norm=0.7, epsilon=1e4, delta=1e-5)
    settings = {
        "data": one_direction(),
        "model": models.mlp(hidden=5),
        "privacy": privacy,
        "dtype": "float32",
    }
    return small.trainer(algorithm=algorithm, **settings | options)


def test_a_trainer_fills_in_twice_the_clip_norm_for_the_scale() -> None:
    once = trainer(PriorLayers(layers=("1",), ridge=RIDGE, local=SHORT)).fit()
    same = trainer(prior(layers=("1",), scale=2 * 0.7)).fit()
    assert torch.equal(once.personal, same.personal)
    loud = ClientPrivacy(clip_norm=0.7, epsilon=0.01, delta=1e-5)
    assert not torch.equal(
        once.personal, trainer(prior(layers=("1",)), privacy=loud).fit().personal
    )


def test_the_parameters_that_are_frozen_stay_and_are_not_released() -> None:
    run = trainer(prior(), trainable=("3",))
    assert run.fit().personal.shape == (16, 5 * 3 + 3)


@pytest.mark.parametrize(
    ("settings", "options", "message"),
    [
        (
            {},
            {"privacy": RecordPrivacy(clip_norm=1.0, epsilon=5.0)},
            "no release for single records",
        ),
        ({}, {"rounds": 2}, "rounds must be 1, not 2"),
        ({"layers": ("fc",)}, {}, r"1\.weight, 1\.bias, 3\.weight, 3\.bias"),
        ({"layers": ("3.bias",)}, {}, "vectors"),
        ({"side": "output"}, {"model": models.mlp(hidden=513)}, "513 rows, of at most 512"),
    ],
)
def test_what_a_run_refuses(settings: Any, options: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        trainer(prior(**settings), **options).fit()
