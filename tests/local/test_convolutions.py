"""Convolutional networks by matrix products against automatic differentiation of the module."""

from functools import partial

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fedmtl.data import DataSpec
from fedmtl.local import Layout, LocalSGD, StackedModule
from fedmtl.local.convolutions import Convolution, ConvolutionalNetwork
from fedmtl.local.losses import LOSSES
from fedmtl.local.products import output_gradient
from fedmtl.local.toom import Toom
from fedmtl.models import femnist_cnn
from tests.local.test_products import check_descent, gradients, hooked, partly_frozen

CPU, LOSS = torch.device("cpu"), LOSSES["cross_entropy"]
SGD = LocalSGD(lr=0.1, epochs=2, batch_size=4)
NETWORKS = {  # of images 24 x 16
    "of FEMNIST, small": lambda: [
        *[
            nn.Conv2d(1, 3, 5),
            nn.ReLU(),
            nn.MaxPool2d(2),
            nn.Conv2d(3, 4, 5),
            nn.ReLU(),
            nn.MaxPool2d(2),
        ],
        *[nn.Flatten(), nn.Linear(4 * 3 * 1, 5)],
    ],
    "padded": lambda: [
        *[
            nn.Conv2d(1, 3, 3, padding=1),
            nn.MaxPool2d(2),
            nn.Tanh(),
            nn.Conv2d(3, 4, 3, padding=(2, 1), bias=False),
        ],
        *[nn.Sigmoid(), nn.Conv2d(4, 2, (2, 3), padding=1), nn.Flatten(), nn.Linear(2 * 15 * 8, 5)],
    ],
    "of many sizes": lambda: [
        *[
            nn.Conv2d(1, 2, (3, 2), bias=False),
            nn.Conv2d(2, 3, (1, 2)),
            nn.ReLU(),
            nn.Conv2d(3, 2, (7, 1)),
            nn.Tanh(),
        ],
        *[
            nn.Conv2d(2, 3, (6, 4)),
            nn.ReLU(),
            nn.Conv2d(3, 2, (4, 5)),
            nn.Flatten(),
            nn.Linear(2 * 8 * 7, 5),
        ],
    ],
    "nested": lambda: [
        nn.Sequential(nn.Conv2d(1, 2, 8), nn.Identity(), nn.ReLU()),
        nn.Sequential(nn.Flatten(), nn.Linear(2 * 17 * 9, 6), nn.Tanh(), nn.Linear(6, 5)),
    ],
}


def stacked(
    module: nn.Module, dtype: torch.dtype
) -> tuple[StackedModule, ConvolutionalNetwork, Tensor]:
    stack = StackedModule(module.to(dtype), capacity=1, device=CPU, dtype=dtype)
    assert isinstance(stack.network, ConvolutionalNetwork)
    return stack, stack.network, stack.load(stack.layout.flatten(module), 1)


@pytest.mark.parametrize("name", NETWORKS)
def test_gradients_and_steps_are_those_of_automatic_differentiation(name: str) -> None:
    torch.manual_seed(0)
    module = nn.Sequential(*NETWORKS[name]())
    _, network, rows = stacked(module, torch.float64)
    x, y = torch.randn(1, 6, 1, 24, 16, dtype=torch.float64), torch.randint(5, (1, 6))
    mask = torch.tensor([[True, False, True, True, False, True]])
    check_descent(network, module, rows, x, y, mask, LOSS)


def test_rounding_in_single_precision_is_that_of_a_few_sums() -> None:
    """Two to four times that of PyTorch's convolutions, on images with a white background."""
    torch.manual_seed(1)
    module = femnist_cnn()(DataSpec((1, 28, 28), 62, torch.float32))
    x, y, mask = (
        torch.rand(1, 10, 1, 28, 28).round(),
        torch.randint(62, (1, 10)),
        torch.ones(1, 10, dtype=torch.bool),
    )
    _, network, rows = stacked(module, torch.float32)
    values = network.forward(rows, x)
    assert values is not None
    signal, got = output_gradient(LOSS, values[-1], y, mask.float() / 10), torch.empty_like(rows)
    network.descend(rows, values, signal, got, keep=0.0, rate=-1.0)
    usual = gradients(module, rows, x, y, mask, LOSS).double()
    exact = gradients(module.double(), rows.double(), x.double(), y, mask, LOSS)
    error, usual_error = ((found - exact).norm() / exact.norm() for found in (got.double(), usual))
    assert error < 3e-6
    assert usual_error < 3e-6


@pytest.mark.parametrize("size", range(1, 9))
def test_correlations_by_values_at_points(size: int) -> None:
    toom = Toom.of(size, torch.float64)
    torch.manual_seed(size)
    x, f = torch.randn(toom.points, dtype=torch.float64), torch.randn(size, dtype=torch.float64)
    expected = F.conv1d(x.view(1, 1, -1), f.view(1, 1, -1)).view(-1)
    torch.testing.assert_close(
        toom.a.mT @ ((toom.g @ f) * (toom.d @ x)), expected, rtol=1e-12, atol=1e-12
    )
    assert toom.points == toom.tile + size - 1


@pytest.mark.parametrize("size", [8, 9])
def test_too_large_filters_have_no_points(size: int) -> None:
    module = nn.Sequential(
        nn.Conv2d(1, 2, 1), nn.Conv2d(2, 2, (size, 1)), nn.Flatten(), nn.Linear(8, 2)
    )
    assert (ConvolutionalNetwork.of(module, Layout.of(module)) is None) == (size == 9)


def test_of_equal_values_the_first_of_a_window_has_the_gradient() -> None:
    torch.manual_seed(2)
    product = torch.randint(3, (4, 5, 6, 7)).double()  # (H, B, W, O), mostly ties
    stage = Convolution("weight", None, (7, 1, 1, 1), (0, 0), pools=True)
    tape = stage.finished({}, product, product, product.clone())
    images = product.permute(1, 3, 0, 2).contiguous().requires_grad_()
    pooled = F.max_pool2d(images, 2)
    signal = torch.randn_like(pooled)
    expected = torch.autograd.grad(pooled, images, signal)[0]
    _, found = stage.signals(tape, signal.permute(2, 0, 3, 1).contiguous())
    torch.testing.assert_close(tape.value.permute(1, 3, 0, 2), pooled.detach(), rtol=0.0, atol=0.0)
    torch.testing.assert_close(found.permute(1, 3, 0, 2), expected, rtol=0.0, atol=1e-15)


class Doubled(nn.Conv2d):
    def forward(self, x: Tensor) -> Tensor:
        return 2 * super().forward(x)


def before_a_head(*parts: nn.Module) -> nn.Module:
    return nn.Sequential(*parts, nn.Flatten(), nn.Linear(8, 2))


@pytest.mark.parametrize(
    "make",
    [
        partial(hooked, nn.Conv2d(1, 2, 3), nn.Flatten(), nn.Linear(8, 2)),
        partial(partly_frozen, nn.Conv2d(1, 2, 3), nn.Flatten(), nn.Linear(8, 2)),
        partial(before_a_head, Doubled(1, 2, 3)),
        partial(before_a_head, nn.Conv2d(1, 2, 3, stride=2)),
        partial(before_a_head, nn.Conv2d(1, 2, 3, dilation=2)),
        partial(before_a_head, nn.Conv2d(2, 2, 3, groups=2)),
        partial(before_a_head, nn.Conv2d(1, 2, 3, padding="same")),
        partial(before_a_head, nn.Conv2d(1, 2, 3, padding=1, padding_mode="reflect")),
        partial(before_a_head, nn.Conv2d(1, 2, 3), nn.ReLU(), nn.Tanh()),
        partial(before_a_head, nn.Conv2d(1, 2, 3), nn.MaxPool2d(2), nn.MaxPool2d(2)),
        partial(before_a_head, nn.Conv2d(1, 2, 3), nn.MaxPool2d(3)),
        partial(before_a_head, nn.Conv2d(1, 2, 3), nn.MaxPool2d(2, stride=1)),
        partial(before_a_head, nn.Conv2d(1, 2, 3), nn.MaxPool2d(2, padding=1)),
        partial(before_a_head, nn.Conv2d(1, 2, 3), nn.GroupNorm(1, 2)),
        partial(before_a_head, nn.ReLU(), nn.Conv2d(1, 2, 3)),
        partial(before_a_head, nn.Conv2d(1, 2, 3), nn.Conv2d(2, 2, 9)),
        partial(nn.Sequential, nn.Conv2d(1, 2, 3), nn.Flatten()),
        partial(nn.Sequential, nn.Conv2d(1, 2, 3), nn.Linear(3, 2)),
        partial(
            nn.Sequential,
            nn.Conv2d(1, 2, 3),
            nn.Flatten(),
            nn.Linear(8, 4),
            nn.Dropout(),
            nn.Linear(4, 2),
        ),
        partial(nn.Conv2d, 1, 2, 3),
    ],
)
def test_any_other_network_is_none(make) -> None:
    module = make()
    assert ConvolutionalNetwork.of(module, Layout.of(module)) is None


def test_inputs_of_another_form_are_left_to_others() -> None:
    module = nn.Sequential(
        nn.Conv2d(1, 2, 3), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten(), nn.Linear(8, 2)
    )
    _, network, rows = stacked(module, torch.float64)
    x = torch.zeros(1, 3, 1, 6, 6, dtype=torch.float64)
    assert network.forward(rows, x) is not None
    assert network.forward(rows, x.float()) is None
    assert network.forward(rows.expand(2, -1), x.expand(2, -1, -1, -1, -1)) is None
    for shape in ((1, 3, 2, 6, 6), (1, 3, 1, 8, 6), (1, 3, 1, 7, 7), (1, 3, 1, 2, 6), (1, 3, 36)):
        assert network.forward(rows, torch.zeros(shape, dtype=torch.float64)) is None


def test_large_images_are_left_to_the_library() -> None:
    module = nn.Sequential(
        nn.Conv2d(3, 32, 5), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten(), nn.Linear(32 * 40 * 40, 2)
    )
    _, network, rows = stacked(module, torch.float64)
    assert network.forward(rows, torch.zeros(1, 1, 3, 84, 84, dtype=torch.float64)) is None
    _, network, rows = stacked(
        femnist_cnn()(DataSpec((1, 28, 28), 62, torch.float32)), torch.float64
    )
    assert network.forward(rows, torch.zeros(1, 1, 1, 28, 28, dtype=torch.float64)) is not None
