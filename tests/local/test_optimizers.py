"""Stacked optimizers against torch's own, row by row; inactive rows keep every bit."""

from functools import partial

import pytest
import torch

from fedmtl.errors import ConfigError
from fedmtl.local import LocalOptimizer, LocalSGD
from fedmtl.local.optimizers import StackedOptimizer, backoff_rule
from fedmtl.local.products import move_along

K, D, STEPS = 5, 7, 12
ACTIVE = [5, 5, 5, 4, 4, 3, 3, 3, 1, 1, 1, 1]  # how many leading rows move


def gradients() -> torch.Tensor:
    return torch.randn(STEPS, K, D, generator=torch.Generator().manual_seed(4), dtype=torch.float64)


def along(gradient):
    """The gradients of the leading rows, as an optimizer takes them."""
    return lambda target, keep, rate: move_along(
        target, gradient[: len(target)], keep=keep, rate=rate
    )


def run(optimizer, rows):
    for active, gradient in zip(ACTIVE, gradients(), strict=True):
        before = rows.clone()
        optimizer.step(active, along(gradient))
        assert torch.equal(rows[active:], before[active:])
    return rows


def reference(factory, start):
    """Each row alone under torch's own optimizer, stepping only when active."""
    result = []
    for i in range(K):
        p = start[i].clone().requires_grad_()
        optimizer = factory([p])
        for active, gradient in zip(ACTIVE, gradients(), strict=True):
            if i < active:
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
    rows = run(LocalSGD(lr=0.1, **options).optimizer(s := start(), round=0), s)
    expected = reference(partial(torch.optim.SGD, lr=0.1, **options), start())
    torch.testing.assert_close(rows, expected, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize(
    "name",
    [
        "Adam",
        "AdamW",
        "RMSprop",
        "Adagrad",
        "Adadelta",
        "NAdam",
        "RAdam",
        "Adamax",
        "Rprop",
        "ASGD",
        "SGD",
    ],
)
def test_any_elementwise_optimizer_equals_torch(name):
    solver = LocalOptimizer(
        optimizer_name=name, lr=0.05, options={"momentum": 0.9} if name == "SGD" else {}
    )
    rows = run(solver.optimizer(s := start(), round=0), s)
    expected = reference(partial(getattr(torch.optim, name), lr=0.05, **solver.options), start())
    torch.testing.assert_close(rows, expected, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("strength", [50.0, torch.full((D,), 50.0, dtype=torch.float64)])
def test_proximal_step_minimizes_its_objective(strength):
    """w+ = argmin_v (lam / 2) ||v - anchor||^2 + ||v - (w - lr g)||^2 / (2 lr): its gradient vanishes at w+."""
    rows, anchor, lr = start(), torch.ones(D, dtype=torch.float64), 0.7
    moved = start() - lr * gradients()[0]
    solver = LocalSGD(lr=lr, proximal=True)
    solver.optimizer(rows, round=0, lam=strength, anchor=anchor).step(K, along(gradients()[0]))
    residual = 50.0 * (rows - anchor) + (rows - moved) / lr
    assert float(residual.abs().max()) < 1e-10


@pytest.mark.parametrize("lam", [4.0, 5.0])
def test_divergent_regularization_is_refused_and_really_diverges(lam):
    with pytest.raises(ConfigError, match=r"lr \* lam"):
        LocalSGD(lr=0.5).check(lam)
    LocalSGD(lr=0.5, proximal=True).check(lam)
    rows = start()
    optimizer = StackedOptimizer(
        rows, None, lr=0.5, lam=lam, anchor=torch.zeros(D, dtype=torch.float64)
    )
    for _ in range(50):
        optimizer.step(K, along(torch.zeros_like(rows)))
    assert float(rows.norm()) >= 0.99 * float(start().norm())


@pytest.mark.parametrize("name", ["LBFGS", "Adafactor"])
def test_optimizers_that_mix_elements_are_refused(name):
    with pytest.raises(ConfigError, match=rf"optimizer_name is '{name}'; accepted: .*'Adam'"):
        LocalOptimizer(lr=0.1, optimizer_name=name)


@pytest.mark.parametrize("options", [{"beta": 0.9}, {"betas": (1.5, 0.9)}])
def test_options_that_an_optimizer_has_not_are_refused(options):
    with pytest.raises(ConfigError, match=r"options does not fit torch.optim.Adam: .*beta"):
        LocalOptimizer(lr=0.1, options=options)


# Steps whose size each row adapts


def test_steps_that_back_off_follow_their_description() -> None:
    """A loop over single rows, on quadratics of very different curvature from a step size that is far too large."""
    curvature = torch.tensor([[0.01, 0.3], [1.0, 2.0], [50.0, 900.0]], dtype=torch.float64)
    rows = torch.ones(3, 2, dtype=torch.float64)
    rule = backoff_rule(rows, 4.0, 0.9)
    for _ in range(60):
        rule(curvature * rows)
    for own, row in zip(curvature, rows, strict=True):
        w = before = torch.ones(2, dtype=torch.float64)
        rate, plain, slope, moved = 4.0, True, torch.zeros_like(w), torch.zeros_like(w)
        for step in range(60):
            gradient = own * w
            uphill = float(gradient @ moved) > 0
            back = uphill and plain
            w, rate = (before, rate / 2) if back else (w, rate)
            slope = slope if back else gradient
            moved = (0.0 if uphill else 0.9) * moved - rate * slope
            before, plain, w = w, uphill or step == 0, w + moved
        torch.testing.assert_close(row, w)
    assert float((curvature * rows.square()).sum(1).max()) < 0.1


def test_steps_that_back_off_return_from_what_is_not_finite() -> None:
    rows = torch.ones(1, 3)
    rule = backoff_rule(rows, 1e30, 0.9)
    for _ in range(200):
        rule(rows * rows.abs())  # overflows at first
    assert float(rows.abs().max()) < 1


def test_a_row_that_backs_off_does_not_depend_on_those_beside_it() -> None:
    generator = torch.Generator().manual_seed(0)
    start, curvature = (torch.rand(7, 1001, generator=generator) for _ in range(2))
    whole, single = start.clone(), start[3:4].clone()
    for rows, own in ((whole, curvature), (single, curvature[3:4])):
        rule = backoff_rule(rows, 3.0, 0.9)
        for _ in range(25):
            rule(own * rows)
    assert torch.equal(whole[3:4], single)
