"""Stacked computation against one module at a time."""

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from fedmtl.local import Layout, StackedModule, prepare_module
from fedmtl.local.losses import cross_entropy, example_losses


class TiedFrozen(nn.Module):
    """Two layers that share one weight, and one frozen layer."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(4, 4)
        self.second = nn.Linear(4, 4)
        self.second.weight = self.first.weight
        self.frozen = nn.Linear(4, 4).requires_grad_(False)
        self.head = nn.Linear(4, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.frozen(torch.tanh(self.second(torch.tanh(self.first(x))))))


def networks() -> dict[str, tuple[nn.Module, tuple[int, ...]]]:
    torch.manual_seed(0)
    return {
        "linear": (nn.Linear(4, 3), (4,)),
        "mlp": (nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.LayerNorm(8), nn.Linear(8, 3)), (4,)),
        "tied": (TiedFrozen(), (4,)),
        "cnn": (
            nn.Sequential(
                nn.Conv2d(1, 4, 3),
                nn.GroupNorm(2, 4),
                nn.ReLU(),
                nn.MaxPool2d(2),
                nn.Flatten(),
                nn.Linear(36, 3),
            ),
            (1, 8, 8),
        ),
    }


@pytest.mark.parametrize("name", ["linear", "mlp", "tied", "cnn"])
@pytest.mark.parametrize("k", [1, 5])
def test_outputs_and_gradients_equal_a_loop_over_modules(name, k):
    module, shape = networks()[name]
    module = module.double()
    layout = Layout.of(module)
    stack = StackedModule(module, capacity=k, device=torch.device("cpu"), dtype=torch.float64)
    rows = torch.randn(k, layout.dimension, dtype=torch.float64) * 0.3
    x, y = torch.randn(k, 6, *shape, dtype=torch.float64), torch.randint(3, (k, 6))
    mask = torch.rand(k, 6) > 0.3
    mask[:, 0] = True
    stack.load(rows, k)
    outputs = stack.forward(x)
    losses = torch.where(mask, example_losses(cross_entropy, outputs, y), 0.0)
    gradients = stack.backward(losses.sum(1) / mask.sum(1))
    for i in range(k):
        single = layout.load(copy.deepcopy(module), rows[i])
        expected = single(x[i])
        loss = F.cross_entropy(expected[mask[i]], y[i][mask[i]])
        loss.backward()
        flat = torch.cat([p.grad.reshape(-1) for p in single.parameters() if p.requires_grad])
        torch.testing.assert_close(outputs[i], expected, rtol=1e-10, atol=1e-12)
        torch.testing.assert_close(gradients[i], flat, rtol=1e-10, atol=1e-12)
        torch.testing.assert_close(
            stack.predict(rows[i : i + 1], x[i : i + 1])[0], expected, rtol=1e-10, atol=1e-12
        )


def dropout_net() -> nn.Module:
    torch.manual_seed(1)
    net = nn.Sequential(nn.Linear(4, 8), nn.Dropout(0.4), nn.ReLU(), nn.Linear(8, 3))
    return prepare_module(net, torch.zeros(2, 4), seed=7)


def test_dropout_depends_on_the_client_not_on_its_neighbours_or_padding():
    net = dropout_net()
    stack = StackedModule(net, capacity=4, device=torch.device("cpu"), dtype=torch.float64)
    rows = torch.randn(4, stack.layout.dimension, dtype=torch.float64)
    x = torch.randn(4, 5, 4, dtype=torch.float64)
    address = torch.stack([torch.tensor([c, 3, 2]) for c in (11, -5, 2**60, 4)])
    stack.load(rows, 4)
    together = stack.forward(x, address=address).detach()
    for i in range(4):
        stack.load(rows[i], 1)
        alone = stack.forward(x[i : i + 1, :3], address=address[i : i + 1]).detach()
        torch.testing.assert_close(alone[0], together[i, :3], rtol=1e-12, atol=1e-12)
    stack.load(rows, 4)
    later = stack.forward(x, address=address + torch.tensor([0, 0, 1])).detach()
    assert not torch.allclose(later, together)


def test_dropout_keeps_the_mean_and_the_rate():
    stack = StackedModule(
        prepare_module(nn.Sequential(nn.Linear(1, 1), nn.Dropout(0.3)), torch.zeros(1, 1), seed=0),
        capacity=1,
        device=torch.device("cpu"),
        dtype=torch.float64,
    )
    stack.load(torch.tensor([0.0, 1.0], dtype=torch.float64), 1)
    values = stack.forward(
        torch.zeros(1, 20000, 1, dtype=torch.float64), address=torch.tensor([[1, 0, 0]])
    ).detach()
    kept = (values != 0).double().mean()
    assert abs(float(kept) - 0.7) < 5 * (0.21 / 20000) ** 0.5
    torch.testing.assert_close(
        values[values != 0].unique(), torch.tensor([1 / 0.7], dtype=torch.float64)
    )
    assert torch.equal(
        stack.predict(stack.rows[:1], torch.zeros(1, 3, 1, dtype=torch.float64)),
        torch.ones(1, 3, 1),
    )


def test_dropout_of_channels_zeroes_whole_ones():
    ready = prepare_module(
        nn.Sequential(nn.Conv1d(3, 2, 1), nn.Dropout1d(0.5)), torch.zeros(1, 3, 8), seed=0
    )
    stays = ready.train()(torch.ones(50, 3, 8)) != 0
    assert torch.equal(stays, stays[..., :1].expand(50, 2, 8))
    assert 0 < int(stays.sum()) < stays.numel()
