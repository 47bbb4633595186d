"""Losses by name against torch's own, one value per example."""

import pytest
import torch
import torch.nn.functional as F

from fedmtl.local import resolve_loss

GENERATOR = torch.Generator().manual_seed(0)
LOGITS = torch.randn(5, 3, generator=GENERATOR, dtype=torch.float64)
REAL = torch.randn(5, 3, generator=GENERATOR, dtype=torch.float64)
LABELS = torch.tensor([2, 0, 1, 1, 0])
BITS = torch.randint(2, (5, 3), generator=GENERATOR)

CASES = {
    "cross_entropy": (LOGITS, LABELS, lambda o, y: F.cross_entropy(o, y)),
    "mse": (LOGITS, REAL, lambda o, y: F.mse_loss(o, y)),
    "half_mse": (LOGITS, REAL, lambda o, y: ((o - y) ** 2).mean() / 2),
    "binary_cross_entropy": (LOGITS, BITS, lambda o, y: F.binary_cross_entropy_with_logits(o, y.double())),
}


@pytest.mark.parametrize("name", CASES)
def test_losses_by_name(name):
    outputs, targets, plain = CASES[name]
    values = resolve_loss(name)(outputs, targets)
    expected = torch.stack([plain(outputs[i : i + 1], targets[i : i + 1]) for i in range(5)])
    torch.testing.assert_close(values, expected, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("name", ["mse", "half_mse"])
def test_one_output_meets_flat_targets(name):
    """(N, 1) outputs and (N,) targets must not broadcast to (N, N)."""
    values = resolve_loss(name)(LOGITS[:, :1], REAL[:, 0])
    factor = 0.5 if name == "half_mse" else 1.0
    torch.testing.assert_close(values, factor * (LOGITS[:, 0] - REAL[:, 0]) ** 2)
