"""Perceptrons by batched products against automatic differentiation of one module at a time."""

from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.func import functional_call

from fedmtl.local import Layout, StackedModule
from fedmtl.local.layout import set_trainable
from fedmtl.local.losses import LOSSES, Pull, example_losses, softmax_divergence
from fedmtl.local.products import Perceptron, output_gradient

K, B, SHAPE = 5, 6, (2, 3)
TARGETS = {
    "cross_entropy": lambda: torch.randint(4, (K, B)),
    "mse": lambda: torch.randn(K, B, 4, dtype=torch.float64),
    "half_mse": lambda: torch.randn(K, B, 4, dtype=torch.float64),
    "binary_cross_entropy": lambda: torch.randint(2, (K, B, 4)).double(),
}


def networks() -> dict[str, nn.Module]:
    torch.manual_seed(0)
    return {
        "linear": nn.Sequential(nn.Flatten(), nn.Linear(6, 4)),
        "without bias": nn.Sequential(nn.Flatten(), nn.Linear(6, 4, bias=False)),
        "one function": nn.Sequential(nn.Flatten(), nn.Linear(6, 7), nn.Tanh(), nn.Linear(7, 4)),
        "nested": nn.Sequential(
            nn.Sequential(nn.Flatten(), nn.Linear(6, 5), nn.ReLU()),
            nn.Identity(),
            nn.Sequential(nn.Linear(5, 3, bias=False), nn.Sigmoid(), nn.Linear(3, 4), nn.Tanh()),
        ),
    }


def stacked(module: nn.Module) -> tuple[StackedModule, Perceptron, Tensor]:
    stack = StackedModule(
        module.double(), capacity=K, device=torch.device("cpu"), dtype=torch.float64
    )
    assert isinstance(stack.network, Perceptron)
    rows = stack.load(torch.randn(K, stack.layout.dimension, dtype=torch.float64) * 0.5, K)
    return stack, stack.network, rows


def gradients(module: nn.Module, rows: Tensor, x: Tensor, y: Tensor, mask: Tensor, loss) -> Tensor:
    """The definition: one copy after another, by autograd."""
    layout, found = Layout.of(module), []
    for row, one, targets, used in zip(rows, x, y, mask, strict=True):
        leaf = row.clone().requires_grad_()
        losses = loss(functional_call(module, layout.views(leaf), (one[used],)), targets[used])
        found.append(torch.autograd.grad(losses.mean(), leaf)[0])
    return torch.stack(found)


def check_descent(
    network: Any, module: nn.Module, rows: Tensor, x: Tensor, y: Tensor, mask: Tensor, loss
) -> None:
    """Outputs, gradients and steps with a momentum are those of automatic differentiation."""
    expected = gradients(module, rows, x, y, mask, loss)
    values = network.forward(rows, x)
    assert values is not None
    outputs = torch.stack(
        [
            functional_call(module, Layout.of(module).views(row), (one,))
            for row, one in zip(rows, x, strict=True)
        ]
    )
    torch.testing.assert_close(values[-1], outputs, rtol=1e-10, atol=1e-12)
    signal = output_gradient(loss, values[-1], y, mask.double() / mask.sum(1, keepdim=True))
    found = torch.full_like(rows, torch.nan)
    network.descend(rows, values, signal, found, keep=0.0, rate=-1.0)
    torch.testing.assert_close(found, expected, rtol=1e-10, atol=1e-12)
    before = rows.clone()
    network.descend(rows, values, signal, rows, keep=0.9, rate=0.3)
    torch.testing.assert_close(rows, 0.9 * before - 0.3 * expected, rtol=1e-10, atol=1e-12)


def check_examples(
    network: Any, module: nn.Module, rows: Tensor, x: Tensor, y: Tensor, loss
) -> None:
    """The gradients of examples apart are those of one example after another."""
    count = x.shape[1]
    alone = [
        gradients(
            module, rows, x[:, i : i + 1], y[:, i : i + 1], torch.ones(len(x), 1).bool(), loss
        )
        for i in range(count)
    ]
    expected = torch.stack(alone, 1).flatten(0, 1)
    values = network.forward(rows, x)
    signal = output_gradient(loss, values[-1], y, torch.ones(x.shape[:2], dtype=x.dtype))
    found = torch.full_like(expected, torch.nan)
    network.descend(rows, values, signal, found, keep=0.0, rate=-1.0)
    torch.testing.assert_close(found, expected, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("loss", LOSSES)
@pytest.mark.parametrize("name", networks())
def test_gradients_of_examples_apart(name: str, loss: str) -> None:
    stack, perceptron, rows = stacked(networks()[name])
    x = torch.randn(K, B, *SHAPE, dtype=torch.float64)
    check_examples(perceptron, stack.train_module, rows, x, TARGETS[loss](), LOSSES[loss])


@pytest.mark.parametrize("loss", LOSSES)
@pytest.mark.parametrize("name", networks())
def test_gradients_and_steps_are_those_of_automatic_differentiation(name: str, loss: str) -> None:
    stack, perceptron, rows = stacked(networks()[name])
    mask = torch.rand(K, B) > 0.4
    mask[:, 0] = True
    x = torch.randn(K, B, *SHAPE, dtype=torch.float64)
    check_descent(perceptron, stack.train_module, rows, x, TARGETS[loss](), mask, LOSSES[loss])


def test_what_is_added_to_the_losses_is_differentiated_too() -> None:
    torch.manual_seed(1)
    outputs, others = torch.randn(2, K, B, 4, dtype=torch.float64)
    y, weight = torch.randint(4, (K, B)), torch.rand(K, B, dtype=torch.float64)
    loss = LOSSES["cross_entropy"]
    leaf = outputs.clone().requires_grad_()
    total = ((example_losses(loss, leaf, y) + (leaf - others).square().sum(-1)) * weight).sum()
    expected = torch.autograd.grad(total, leaf)[0]
    got = output_gradient(
        loss, outputs, y, weight, lambda values: (values - others).square().sum(-1)
    )
    torch.testing.assert_close(got, expected, rtol=1e-12, atol=0.0)


def test_a_pull_to_predictions_has_the_gradient_of_its_divergence() -> None:
    torch.manual_seed(2)
    outputs, others = 3 * torch.randn(2, K, B, 4, dtype=torch.float64)
    y, weight = torch.randint(4, (K, B)), torch.rand(K, B, dtype=torch.float64)
    loss, leaf = LOSSES["cross_entropy"], outputs.clone().requires_grad_()
    log_p, log_q = leaf.log_softmax(-1), others.log_softmax(-1)
    both_ways = (log_p.exp() * (log_p - log_q) + log_q.exp() * (log_q - log_p)).sum(-1)
    expected = torch.autograd.grad(
        ((example_losses(loss, leaf, y) + 0.3 * both_ways) * weight).sum(), leaf
    )[0]
    got = output_gradient(loss, outputs, y, weight, Pull(softmax_divergence, others, 0.3))
    torch.testing.assert_close(got, expected, rtol=1e-10, atol=1e-14)


def hooked(*layers: nn.Module) -> nn.Module:
    layers[0].register_forward_hook(lambda *given: None)
    return nn.Sequential(*layers)


def partly_frozen(*layers: nn.Module) -> nn.Module:
    module = nn.Sequential(*layers)
    set_trainable(module, [str(len(layers) - 1)])
    return module


def tied() -> nn.Module:
    first, second = nn.Linear(3, 3), nn.Linear(3, 3)
    second.weight = first.weight
    return nn.Sequential(first, second)


class Doubled(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        return 2 * super().forward(x)


@pytest.mark.parametrize(
    "make",
    [
        partial(hooked, nn.Linear(3, 2)),
        tied,
        partial(partly_frozen, nn.Linear(3, 3), nn.Linear(3, 2)),
        partial(Doubled, 3, 2),
        partial(nn.Sequential, nn.Linear(3, 2), nn.LayerNorm(2)),
        partial(nn.Sequential, nn.ReLU(), nn.Linear(3, 2)),
        partial(nn.Sequential, nn.Linear(3, 2), nn.ReLU(), nn.Tanh()),
        partial(nn.Sequential, nn.Flatten(2), nn.Linear(3, 2)),
        partial(nn.Sequential, nn.Linear(3, 2), nn.Dropout()),
    ],
)
def test_any_other_network_is_none(make) -> None:
    module = make()
    assert Perceptron.of(module, Layout.of(module)) is None


def test_inputs_that_are_no_vectors_of_this_size_are_left_to_others() -> None:
    _, perceptron, rows = stacked(nn.Linear(6, 4))  # of (B, 2, 6) it would make (B, 2, 4)
    assert perceptron.forward(rows, torch.zeros(K, B, 2, 6, dtype=torch.float64)) is None
    assert perceptron.forward(rows, torch.zeros(K, B, 6)) is None
    assert perceptron.forward(rows, torch.zeros(K, B, 6, dtype=torch.float64)) is not None
