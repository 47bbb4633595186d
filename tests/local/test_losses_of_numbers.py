"""Huber's loss, that of a quantile and that of counts, against PyTorch, scikit-learn and their definitions."""

import math

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from sklearn.metrics import mean_pinball_loss

from fedmtl.errors import ConfigError
from fedmtl.local import resolve_loss
from fedmtl.local.losses import Huber, Poisson, Quantile, linked

MADE = torch.Generator().manual_seed(0)
OUTPUTS = torch.randn(40, generator=MADE, dtype=torch.float64)
TARGETS = torch.randn(40, generator=MADE, dtype=torch.float64)


def of_torch(loss, outputs, targets):
    """The losses and their derivatives by the outputs, of a function of PyTorch."""
    outputs = outputs.clone().requires_grad_()
    values = loss(outputs, targets)
    return values.detach(), torch.autograd.grad(values.sum(), outputs)[0]


def ours(name, outputs, targets):
    loss = resolve_loss(name) if isinstance(name, str) else name
    return of_torch(lambda o, y: loss(o[:, None], y), outputs, targets)


@pytest.mark.parametrize("delta", [0.05, 0.7, 3.0])
def test_hubers_loss_is_that_of_torch(delta):
    expected = of_torch(
        lambda o, y: F.huber_loss(o, y, reduction="none", delta=delta), OUTPUTS, TARGETS
    )
    for found, true in zip(ours(f"huber:{delta}", OUTPUTS, TARGETS), expected, strict=True):
        torch.testing.assert_close(found, true)


@pytest.mark.parametrize("level", [0.1, 0.5, 0.9])
def test_the_loss_of_a_quantile_is_that_of_scikit_learn(level):
    values, slopes = ours(f"quantile:{level}", OUTPUTS, TARGETS)
    assert float(values.mean()) == pytest.approx(mean_pinball_loss(TARGETS, OUTPUTS, alpha=level))
    expected = np.where(TARGETS > OUTPUTS, -level, 1 - level)
    np.testing.assert_allclose(slopes, expected)


def test_the_loss_of_counts_is_that_of_torch():
    counts = torch.poisson(TARGETS.exp(), generator=MADE)
    expected = of_torch(
        lambda o, y: F.poisson_nll_loss(o, y, log_input=True, reduction="none"), OUTPUTS, counts
    )
    for found, true in zip(ours("poisson", OUTPUTS, counts), expected, strict=True):
        torch.testing.assert_close(found, true)
    torch.testing.assert_close(linked(OUTPUTS, Poisson().link), OUTPUTS.exp())


def test_counts_that_are_mapped_from_their_range_have_the_slopes_of_the_counts():
    """In units of the upper end: counts y of at most 30 are stored as y / 15 - 1."""
    counts = torch.poisson(TARGETS.exp(), generator=MADE).clamp(max=30)
    loss = Poisson(mapped=True)
    logs = OUTPUTS + math.log(30)
    _, expected = of_torch(
        lambda o, y: F.poisson_nll_loss(o, y, log_input=True, reduction="none"), logs, counts
    )
    _, slopes = ours(loss, OUTPUTS, counts / 15 - 1)
    torch.testing.assert_close(30 * slopes, expected)
    torch.testing.assert_close(15 * (linked(OUTPUTS, loss.link) + 1), logs.exp())


def test_several_outputs_are_averaged():
    outputs, targets = OUTPUTS.reshape(10, 4), TARGETS.reshape(10, 4)
    for name in ("huber:0.3", "quantile:0.2", "poisson"):
        alone = torch.stack([ours(name, outputs[:, k], targets[:, k])[0] for k in range(4)], 1)
        torch.testing.assert_close(resolve_loss(name)(outputs, targets), alone.mean(1))


@pytest.mark.parametrize(
    ("name", "message"),
    [
        (
            "huber",
            "loss is 'huber'; it must be huber:DELTA with a number DELTA above 0, as huber:0.1",
        ),
        ("huber:0", "it must be huber:DELTA"),
        ("huber:inf", "it must be huber:DELTA"),
        ("huber:a", "it must be huber:DELTA"),
        ("quantile", "it must be quantile:LEVEL with LEVEL between 0 and 1, as quantile:0.9"),
        ("quantile:1", "it must be quantile:LEVEL"),
        ("quantile:nan", "it must be quantile:LEVEL"),
        ("poisson:2", "loss is 'poisson:2'; accepted: 'poisson', without a number"),
        (
            "hubert",
            "accepted: cross_entropy, mse, half_mse, binary_cross_entropy, huber:DELTA, quantile:LEVEL, poisson",
        ),
    ],
)
def test_impossible_names_are_refused(name, message):
    with pytest.raises(ConfigError, match=message):
        resolve_loss(name)


def test_names_with_numbers_are_settings_of_the_losses():
    assert [resolve_loss(name) for name in ("huber:0.1", "quantile:.9")] == [
        Huber(0.1),
        Quantile(0.9),
    ]
