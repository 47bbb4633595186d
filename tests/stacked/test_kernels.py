"""Faster kernels are the same functions."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import Tensor, nn
from torch.func import functional_call, grad, vmap

from fedmtl.stacked.kernels import ChannelsLastPool, use_fast_kernels


def network(channels: int = 16) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(1, channels, 3),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Conv2d(channels, 8, 3, padding=1),
        nn.MaxPool2d(3, 2, 1, ceil_mode=True),
        nn.Flatten(),
        nn.Linear(128, 5),
    )


def gradients(module: nn.Module, x: Tensor) -> list[Tensor]:
    outputs = module(x)
    return [outputs, *torch.autograd.grad(outputs.square().sum(), list(module.parameters()))]


@pytest.mark.parametrize("channels", [2, 16])
def test_values_and_gradients_are_the_same(channels: int) -> None:
    module, x = network(channels).double(), torch.randn(7, 1, 16, 16, dtype=torch.float64)
    fast = use_fast_kernels(copy.deepcopy(module))
    assert [type(one) for one in fast][1:3] == [ChannelsLastPool, nn.ReLU]
    for got, expected in zip(gradients(fast, x), gradients(module, x), strict=True):
        torch.testing.assert_close(got, expected, rtol=1e-12, atol=1e-12)


def test_channels_come_last_where_there_are_many() -> None:
    for channels, last in ((16, True), (4, False)):
        pooled = ChannelsLastPool(2)(torch.randn(2, channels, 8, 8))
        assert pooled.is_contiguous(memory_format=torch.channels_last) == last


def test_stacked_copies_are_those_of_a_loop() -> None:
    module = use_fast_kernels(network().double())
    values = {name: torch.randn(3, *p.shape, dtype=torch.float64) for name, p in module.named_parameters()}
    x = torch.randn(3, 4, 1, 16, 16, dtype=torch.float64)
    together = vmap(lambda own, batch: functional_call(module, own, (batch,)))(values, x)
    for place in range(3):
        alone = functional_call(module, {name: value[place] for name, value in values.items()}, (x[place],))
        torch.testing.assert_close(together[place], alone, rtol=1e-12, atol=1e-12)


def test_gradients_of_single_examples_are_those_of_a_loop() -> None:
    module = use_fast_kernels(network().double())
    values, x = dict(module.named_parameters()), torch.randn(3, 1, 16, 16, dtype=torch.float64)

    def loss(own: dict[str, Tensor], one: Tensor) -> Tensor:
        return functional_call(module, own, (one[None],)).square().sum()

    found = vmap(grad(loss), in_dims=(None, 0))(values, x)
    for place in range(3):
        alone = gradients(module, x[place : place + 1])[1:]
        for name, expected in zip(values, alone, strict=True):
            torch.testing.assert_close(found[name][place], expected, rtol=1e-10, atol=1e-12)


def test_what_has_hooks_stays_as_it_is() -> None:
    module = network()
    module[1].register_forward_hook(lambda *given: None)
    module[4].register_forward_hook(lambda *given: None)
    fast = use_fast_kernels(copy.deepcopy(module))
    assert [type(one) for one in fast][:5] == [nn.Conv2d, nn.ReLU, ChannelsLastPool, nn.Conv2d, nn.MaxPool2d]


def test_a_maximum_that_is_asked_for_its_place_stays_behind_the_rectifier() -> None:
    fast = use_fast_kernels(nn.Sequential(nn.ReLU(), nn.MaxPool2d(2, return_indices=True)))
    assert type(fast[0]) is nn.ReLU
