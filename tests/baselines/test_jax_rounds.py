"""The round of benchmarks/speed in JAX is the plain loop's, where JAX is installed."""

import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch

sys.path.append(str(Path(__file__).resolve().parents[2] / "benchmarks/speed/contenders"))
pytest.importorskip("jax")

from jax_fedprox import run
from plain_loop import PlainLoop
from work import Clock, Work, batches

SETTINGS = {
    "lr": 0.1, "lam": 0.3, "batch": 4, "clip": 0.05, "noise": 0.0, "denominator": 3.0, "classes": 5, "seed": 0,
}  # fmt: skip


@pytest.mark.parametrize("model", ["logistic", "mlp", "cnn"])
def test_a_round_without_noise_ends_where_the_plain_loop_does(model) -> None:
    generator = torch.Generator().manual_seed(0)
    x = torch.rand(31, 1, 28, 28, generator=generator)
    y = torch.randint(0, 5, (31,), generator=generator)
    offsets = torch.tensor([0, 9, 13, 31])  # one whole batch, and batches that are cut
    empty = torch.zeros(0, dtype=torch.int64)
    cohorts = [torch.tensor([2, 0]), torch.tensor([0, 1, 2]), empty]
    orders = [torch.cat([torch.arange(13, 31).flip(0), torch.arange(9)]), torch.arange(31), empty]
    work = Work(x, y, offsets, torch.zeros(0), cohorts, orders, SETTINGS | {"model": model})
    size = {"logistic": 3925, "mlp": 158005, "cnn": 57221}[model]
    work = replace(work, initial=torch.randn(size, generator=generator) * 0.05)
    loop = PlainLoop(
        work.module(),
        lr=0.1,
        lam=0.3,
        clip_norm=0.05,
        noise_std=0.0,
        denominator=3.0,
        normal=lambda step: torch.zeros(size),
        personal=False,
    )
    for step in range(work.rounds):
        examples = work.examples(step).items()
        loop.round({client: (x, y, batches(order, 4)) for client, order in examples}, step)
    expected = torch.nn.utils.parameters_to_vector(loop.shared.parameters()).detach()
    moved = (expected - work.initial).norm()
    assert moved > 0.01
    assert (run(work, Clock.new(), 1) - expected).norm() < 1e-4 * moved
