"""Models that cannot be stacked are refused with advice."""

import math

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from fedmtl.errors import ConfigError, ModelError
from fedmtl.local import check_copyable, prepare_module, resolve_loss
from fedmtl.local.behaviour import check_behaviour
from fedmtl.local.losses import example_losses


class Counting(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 3)
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        return self.linear(x)


@pytest.mark.parametrize(
    ("layer", "text"),
    [
        (nn.BatchNorm1d(4), "Layer '1' is BatchNorm1d"),
        (
            nn.TransformerEncoderLayer(4, 2, 8, dropout=0.1, batch_first=True),
            "draws from a global random generator",
        ),
        (nn.LSTM(4, 4, num_layers=2, dropout=0.1), "draws from a global random generator"),
    ],
)
def test_a_layer_that_can_be_replaced_is_refused_with_the_setting_that_does_it(layer, text):
    net = nn.Sequential(nn.Linear(4, 4), layer)
    with pytest.raises(
        ModelError, match=rf"{text}.*model\.fix=true, in Python models\.fix\(model\)"
    ):
        prepare_module(net, torch.zeros(2, 5, 4), seed=0)


class Shifted(nn.Module):
    """A linear layer and a constant, which is a buffer or a plain tensor."""

    def __init__(self, value: float, *, buffer: bool) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 3)
        if buffer:
            self.register_buffer("shift", torch.tensor([0.0, value, 0.0]))
        else:
            self.shift = torch.tensor([0.0, value, 0.0])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.linear(x) + self.shift


@pytest.mark.parametrize(
    ("net", "text"),
    [
        (Shifted(math.nan, buffer=True), "Buffer 'shift' holds NaN"),
        (Shifted(math.nan, buffer=False), "The tensor 'shift' of the model holds NaN"),
        (
            nn.Sequential(nn.Linear(4, 4), Shifted(math.nan, buffer=False)),
            "The tensor 'shift' of layer '1' holds NaN",
        ),
    ],
)
def test_constants_that_are_no_numbers_are_refused_by_name(net, text):
    with pytest.raises(ModelError, match=text):
        check_copyable(net)


@pytest.mark.parametrize("buffer", [True, False])
def test_infinite_masks_are_kept(buffer):
    check_copyable(Shifted(-math.inf, buffer=buffer))
    net = prepare_module(Shifted(-math.inf, buffer=buffer), torch.zeros(2, 4), seed=0)
    assert net(torch.zeros(2, 4))[:, 1].tolist() == [-math.inf] * 2


class OfEight(nn.Module):
    """Takes batches of eight examples alone, as an exported program does."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        assert len(x) == 8, "Guard failed: input.size()[0] == 8"
        return self.linear(x)


def test_a_model_of_one_batch_size_is_refused():
    text = r"fails on a batch of shape \(2, 4\), a batch of any size is to be taken: Guard failed"
    with pytest.raises(ModelError, match=text):
        check_behaviour(OfEight(), [torch.zeros(2, 4), torch.ones(2, 4)])


def test_mutated_buffers_are_refused_by_name():
    with pytest.raises(ModelError, match="'calls' changes"):
        prepare_module(Counting(), torch.zeros(2, 4), seed=0)


def test_the_given_module_is_not_changed():
    net = nn.Sequential(nn.Linear(4, 3), nn.Dropout(0.5)).eval()
    prepare_module(net, torch.zeros(2, 4), seed=0)
    assert type(net[1]) is nn.Dropout
    assert not net.training
    prepare_module(net, torch.zeros(2, 4, dtype=torch.float64), seed=0)
    assert net[0].weight.dtype == torch.float32


def test_a_reducing_loss_is_refused():
    with pytest.raises(ConfigError, match="one value per example"):
        example_losses(F.cross_entropy, torch.zeros(2, 3, 4), torch.zeros(2, 3, dtype=torch.int64))


@pytest.mark.parametrize(("name", "factor"), [("mse", 1.0), ("half_mse", 0.5)])
def test_one_output_meets_flat_targets(name, factor):
    """(N, 1) outputs and (N,) targets must not broadcast to (N, N)."""
    outputs, targets = torch.randn(5, 1), torch.randn(5)
    torch.testing.assert_close(
        resolve_loss(name)(outputs, targets), factor * (outputs[:, 0] - targets) ** 2
    )
