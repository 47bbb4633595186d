"""Convolutions by batched products equal PyTorch's, with their gradients."""

import pytest
import torch
from torch import nn

from fedmtl.local import Execution, Executor
from fedmtl.stacked import StackedModule, prepare_module
from fedmtl.stacked.unfolded import UnfoldedConv2d, by_products

CPU = torch.device("cpu")


@pytest.mark.parametrize(
    "options",
    [
        {"kernel_size": 5},
        {"kernel_size": 3, "padding": 1},
        {"kernel_size": (2, 3), "stride": (2, 1), "padding": (0, 2), "bias": False},
        {"kernel_size": 3, "dilation": (1, 2), "stride": 2},
    ],
)
@pytest.mark.parametrize("copies", [1, 3])
@pytest.mark.parametrize("on_a_gpu", [False, True])
def test_outputs_and_gradients_are_those_of_grouped_convolutions(options, copies, on_a_gpu, monkeypatch):
    monkeypatch.setattr("fedmtl.stacked.unfolded.waits", lambda device: on_a_gpu)
    torch.manual_seed(0)
    net = nn.Sequential(nn.Conv2d(2, 4, **options), nn.Tanh(), nn.Conv2d(4, 3, 2), nn.Flatten()).double()
    x = torch.randn(copies, 5, 2, 9, 8, dtype=torch.float64)
    module = prepare_module(net, x[0], seed=0)
    found = []
    for one in (module, by_products(module)):
        stack = StackedModule(one, capacity=copies, device=CPU, dtype=torch.float64)
        rows = stack.layout.flatten(module) * (1 + torch.arange(copies)[:, None])
        stack.load(rows, copies)
        outputs = stack.forward(x)
        found.append((outputs.detach(), stack.backward(outputs.square().flatten(1).sum(1)).clone()))
    for one, other in zip(*found, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-10, atol=1e-10)


def test_only_plain_convolutions_are_replaced_and_parameters_are_shared():
    net = nn.Sequential(
        nn.Conv2d(2, 2, 3),
        nn.Conv2d(2, 2, 3, groups=2),
        nn.Conv2d(2, 2, 3, padding="same"),
        nn.Conv2d(2, 2, 3, padding=1, padding_mode="circular"),
        nn.Conv1d(2, 2, 3),
    )
    found = by_products(net)
    assert [isinstance(m, UnfoldedConv2d) for m in found] == [True, False, False, False, False]
    assert not any(isinstance(m, UnfoldedConv2d) for m in net)
    assert all(a is b for a, b in zip(net.parameters(), found.parameters(), strict=True))


def test_an_image_alone():
    conv = nn.Conv2d(2, 3, 3)
    x = torch.randn(2, 6, 6)
    torch.testing.assert_close(by_products(conv)(x), conv(x))


def test_a_gpu_takes_products_and_a_cpu_what_it_is_told():
    conv = nn.Sequential(nn.Conv2d(1, 2, 3))
    assert Execution().resolve(conv, torch.device("cuda")).convolutions == "products"
    assert Execution(convolutions="grouped").resolve(conv, torch.device("cuda")).convolutions == "grouped"
    for asked, kind in (("auto", nn.Conv2d), ("products", UnfoldedConv2d)):
        execution = Execution("stacked", convolutions=asked).resolve(conv, CPU)
        executor = Executor(execution, conv, device=CPU, dtype=torch.float32)
        with executor.stack() as stack:
            assert type(stack.train_module[0]) is kind
        executor.close()
