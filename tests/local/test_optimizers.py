"""Stacked optimizers against torch's own, row by row; inactive rows keep every bit."""

from functools import partial

import pytest
import torch

from fedmtl.errors import ConfigError
from fedmtl.local import Elementwise, LocalOptimizer, LocalSGD, StackedSGD

K, D, STEPS = 5, 7, 12
PATTERN = torch.rand(STEPS, K, generator=torch.Generator().manual_seed(3)) > 0.4  # who moves when


def gradients() -> torch.Tensor:
    return torch.randn(STEPS, K, D, generator=torch.Generator().manual_seed(4), dtype=torch.float64)


def run(optimizer, rows, pattern=PATTERN):
    for step, gradient in enumerate(gradients()):
        rows.grad = gradient.clone()
        before = rows.clone()
        optimizer.step(active=pattern[step])
        still = ~pattern[step]
        assert torch.equal(rows[still], before[still])
    return rows


def reference(factory, start, pattern=PATTERN):
    """Each row alone under torch's own optimizer, stepping only when active."""
    result = []
    for i in range(K):
        p = start[i].clone().requires_grad_()
        optimizer = factory([p])
        for step, gradient in enumerate(gradients()):
            if pattern[step, i]:
                p.grad = gradient[i].clone()
                optimizer.step()
        result.append(p.detach())
    return torch.stack(result)


def start() -> torch.Tensor:
    return torch.randn(K, D, generator=torch.Generator().manual_seed(5), dtype=torch.float64)


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"momentum": 0.9},
        {"momentum": 0.9, "nesterov": True},
        {"weight_decay": 0.1},
        {"momentum": 0.5, "weight_decay": 0.1},
    ],
)
def test_sgd_equals_torch(options):
    rows = run(StackedSGD(s := start(), lr=0.1, **options), s)
    expected = reference(partial(torch.optim.SGD, lr=0.1, **options), start())
    torch.testing.assert_close(rows, expected, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("name", ["Adam", "AdamW", "RMSprop", "Adagrad", "Adadelta", "NAdam", "RAdam", "Adamax"])
@pytest.mark.parametrize("prefix", [False, True])
def test_any_elementwise_optimizer_equals_torch(name, prefix):
    factory = partial(getattr(torch.optim, name), lr=0.05)
    pattern = PATTERN.sort(0, descending=True).values if prefix else PATTERN
    rows = run(Elementwise(s := start(), factory=factory), s, pattern)
    torch.testing.assert_close(rows, reference(factory, start(), pattern), rtol=1e-10, atol=1e-12)


def test_slices_and_masks_are_the_same_step():
    a, b = start(), start()
    one, two = StackedSGD(a, lr=0.1, momentum=0.9), StackedSGD(b, lr=0.1, momentum=0.9)
    for gradient in gradients():
        a.grad, b.grad = gradient.clone(), gradient.clone()
        one.step(active=slice(0, 3))
        two.step(active=torch.tensor([True, True, True, False, False]))
    assert torch.equal(a, b)
    assert torch.equal(one.state[a]["momentum"], two.state[b]["momentum"])


@pytest.mark.parametrize("per_row", [False, True])
def test_mean_regularized_step_by_hand(per_row):
    rows = start()
    anchor = (
        torch.arange(D, dtype=torch.float64) if not per_row else torch.arange(K * D, dtype=torch.float64).view(K, D)
    )
    gradient = gradients()[0]
    rows.grad = gradient.clone()
    expected = start() - 0.1 * (gradient + 3.0 * (start() - anchor))
    StackedSGD(rows, anchor=anchor, lam=3.0, lr=0.1).step()
    torch.testing.assert_close(rows, expected, rtol=1e-12, atol=1e-12)


def test_proximal_step_minimizes_its_objective():
    """w+ = argmin_v (lam / 2) ||v - anchor||^2 + ||v - (w - lr g)||^2 / (2 lr): its gradient vanishes at w+."""
    rows, anchor, lr, lam = start(), torch.ones(D, dtype=torch.float64), 0.7, 50.0
    rows.grad = gradients()[0]
    moved = start() - lr * gradients()[0]
    StackedSGD(rows, anchor=anchor, lam=lam, lr=lr, proximal=True).step()
    residual = lam * (rows - anchor) + (rows - moved) / lr
    assert float(residual.abs().max()) < 1e-10


@pytest.mark.parametrize("lam", [4.0, 5.0])
def test_divergent_regularization_is_refused_and_really_diverges(lam):
    with pytest.raises(ConfigError, match=r"lr \* lam"):
        LocalSGD(lr=0.5).check(lam)
    LocalSGD(lr=0.5, proximal=True).check(lam)
    rows = start()
    optimizer = StackedSGD(rows, lr=0.5, lam=lam, anchor=torch.zeros(D, dtype=torch.float64))
    for _ in range(50):
        rows.grad = torch.zeros_like(rows)
        optimizer.step()
    assert float(rows.norm()) >= 0.99 * float(start().norm())


@pytest.mark.parametrize("name", ["LBFGS", "Adafactor"])
def test_optimizers_that_mix_elements_are_refused(name):
    with pytest.raises(ConfigError, match=r"local solver|mixes"):
        LocalOptimizer(lr=0.1, optimizer_name=name)


@pytest.mark.parametrize(
    ("options", "named"),
    [
        ({"lr": 0.0}, "lr"),
        ({"lr": float("nan")}, "lr"),
        ({"lr": 0.1, "epochs": 0}, "epochs"),
        ({"lr": 0.1, "batch_size": -3}, "batch_size"),
        ({"lr": 0.1, "steps": 1.5}, "steps"),
        ({"lr": 0.1, "momentum": 1.0}, "momentum"),
        ({"lr": 0.1, "decay": 1.5}, "decay"),
    ],
)
def test_impossible_settings_are_named(options, named):
    with pytest.raises(ConfigError, match=rf"LocalSGD\.{named}"):
        LocalSGD(**options)
