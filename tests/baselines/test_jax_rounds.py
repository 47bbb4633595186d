"""The round of benchmarks/speed in JAX is the plain loop's, where JAX is installed."""

import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor

sys.path.append(str(Path(__file__).resolve().parents[2] / "benchmarks/speed/contenders"))
pytest.importorskip("jax")

from jax_fedprox import run
from loop import of_clients, of_records
from work import Clock, Work

SETTINGS = {
    "method": "fedprox", "lr": 0.1, "lam": 0.3, "batch": 4, "clip": 0.05, "noise": 0.0, "denominator": 3.0,
    "classes": 5, "seed": 0,
}  # fmt: skip
SIZES = {"logistic": 3925, "mlp": 158005, "cnn": 57221, "cnn3": 1199237, "cifar": 1640741}


def work_of(model: str, **more: object) -> Work:
    """Rounds of three clients: one whole batch, batches that are cut, and a round of nobody."""
    generator = torch.Generator().manual_seed(0)
    shape = (1, 28, 28)
    if model == "cifar":
        shape = (3, 32, 32)
    x = torch.rand(31, *shape, generator=generator)
    y = torch.randint(0, 5, (31,), generator=generator)
    offsets = torch.tensor([0, 9, 13, 31])
    empty = torch.zeros(0, dtype=torch.int64)
    cohorts = [torch.tensor([2, 0]), torch.tensor([0, 1, 2]), empty]
    orders = [torch.cat([torch.arange(13, 31).flip(0), torch.arange(9)]), torch.arange(31), empty]
    settings = SETTINGS | {"model": model} | more
    work = Work(x, y, offsets, torch.zeros(0), cohorts, orders, settings)
    return replace(work, initial=torch.randn(SIZES[model], generator=generator) * 0.05)


def check_equal(work: Work, loop: Callable, at_once: bool) -> None:
    one, model = loop(work, "cpu")
    for step in range(work.rounds):
        one(step)
    expected = torch.nn.utils.parameters_to_vector(model(-1).parameters()).detach()
    moved = (expected - work.initial).norm()
    assert moved > 0.01
    assert (run(work, Clock.new(), 1, at_once) - expected).norm() < 1e-4 * moved


@pytest.mark.parametrize("at_once", [False, True])
@pytest.mark.parametrize("model", ["logistic", "mlp", "cnn"])
def test_a_round_without_noise_ends_where_the_plain_loop_does(model: str, at_once: bool) -> None:
    check_equal(work_of(model), of_clients, at_once)


@pytest.mark.parametrize("model", ["cnn3", "cifar"])
def test_large_networks_end_where_the_plain_loop_does(model: str) -> None:
    work = work_of(model)
    check_equal(replace(work, cohorts=work.cohorts[:1], orders=work.orders[:1]), of_clients, True)


@pytest.mark.parametrize("at_once", [False, True])
@pytest.mark.parametrize("model", ["logistic", "cnn"])
def test_steps_on_single_records_end_where_the_plain_loop_does(model: str, at_once: bool) -> None:
    work = work_of(model, unit="record", clip=0.5)
    records: list[Tensor] = [torch.tensor([30, 13, 20, 0, 8]), torch.arange(31)]
    # a step that draws nothing, and clients with fewer steps than others
    lengths = [
        torch.tensor([[3, 0], [2, -1]]),
        torch.tensor([[9, -1, -1], [4, -1, -1], [1, 8, 9]]),
    ]
    check_equal(
        replace(work, cohorts=work.cohorts[:2], orders=records, lengths=lengths),
        of_records,
        at_once,
    )
