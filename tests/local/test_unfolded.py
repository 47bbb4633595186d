"""Convolutional networks of several copies by batched products against automatic differentiation."""

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fedmtl.local import Layout, StackedModule, check_loss, example_gradients, unfolded
from fedmtl.local.convolutions import ConvolutionalNetwork
from fedmtl.local.losses import LOSSES
from fedmtl.local.per_example import ALIKE, MICROBATCH
from fedmtl.local.unfolded import UnfoldedNetwork, windows_of
from tests.local.test_convolutions import NETWORKS
from tests.local.test_products import check_descent, check_examples
from tests.simulated_device import NAME, simulated

LOSS = LOSSES["cross_entropy"]
COPIES = 3


def stacked(module: nn.Module) -> tuple[UnfoldedNetwork, Tensor]:
    """The network, and different parameters of each copy in rows that are padded as those of a stack."""
    stack = StackedModule(
        module.double(), capacity=COPIES, device=torch.device("cpu"), dtype=torch.float64
    )
    assert isinstance(stack.network, ConvolutionalNetwork)
    start = (
        stack.layout.flatten(module) + 0.1 * torch.randn(COPIES, stack.layout.dimension).double()
    )
    return UnfoldedNetwork(stack.network), stack.load(start, COPIES)


@pytest.mark.parametrize("name", NETWORKS)
def test_gradients_and_steps_are_those_of_automatic_differentiation(name: str) -> None:
    torch.manual_seed(0)
    module = nn.Sequential(*NETWORKS[name]())
    network, rows = stacked(module)
    x = torch.randn(COPIES, 6, 1, 24, 16, dtype=torch.float64)
    y, mask = torch.randint(5, (COPIES, 6)), torch.rand(COPIES, 6) > 0.4
    mask[:, 0] = True
    check_examples(network, module, rows, x, y, LOSS)
    check_descent(network, module, rows, x, y, mask, LOSS)


def test_images_in_colour_and_wide_zeros() -> None:
    torch.manual_seed(1)
    # more zeros than the filter reaches over, so that the signal is cut
    parts = [nn.Conv2d(3, 4, 3, padding=1), nn.ReLU(), nn.Conv2d(4, 2, 2, padding=3)]
    module = nn.Sequential(*parts, nn.MaxPool2d(2), nn.Flatten(), nn.Linear(2 * 5 * 6, 3))
    network, rows = stacked(module)
    x = torch.randn(COPIES, 2, 3, 5, 7, dtype=torch.float64)
    y, mask = torch.randint(3, (COPIES, 2)), torch.ones(COPIES, 2, dtype=torch.bool)
    check_descent(network, module, rows, x, y, mask, LOSS)


def test_windows_are_those_of_the_library_whatever_the_strides() -> None:
    torch.manual_seed(2)
    x = torch.randn(2, 3, 4, 6, 5)  # (K, B, C, H, W)
    found = windows_of(x.permute(0, 1, 3, 4, 2), 3, 2)
    expected = F.unfold(x.flatten(0, 1), (3, 2)).mT  # (K B, places, C h w)
    expected = expected.unflatten(2, (4, 3, 2)).permute(0, 1, 3, 4, 2)
    assert torch.equal(found, expected.reshape(found.shape))


def test_inputs_of_another_form_are_left_to_others(monkeypatch: pytest.MonkeyPatch) -> None:
    parts = [nn.Conv2d(1, 2, 3), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten(), nn.Linear(8, 2)]
    network, rows = stacked(nn.Sequential(*parts))
    x = torch.zeros(COPIES, 4, 1, 6, 6, dtype=torch.float64)
    assert network.forward(rows, x) is not None
    assert network.forward(rows, x.float()) is None
    for shape in ((1, 7, 6), (2, 6, 6), (36,)):
        assert network.forward(rows, torch.zeros(COPIES, 4, *shape, dtype=torch.float64)) is None
    # 3 x 4 images of 36 places, whose windows have 9 numbers of each of 2 channels at most
    monkeypatch.setattr(unfolded, "_LARGEST", 3 * 4 * 36 * 9 * 2)
    assert network.forward(rows, x) is not None
    monkeypatch.setattr(unfolded, "_LARGEST", 3 * 4 * 36 * 9 * 2 - 1)
    assert network.forward(rows, x) is None


def test_the_device_decides() -> None:
    module = nn.Sequential(nn.Conv2d(1, 2, 3), nn.Flatten(), nn.Linear(32, 2))
    with simulated():
        for device, kind in (("cpu", ConvolutionalNetwork), (NAME, UnfoldedNetwork)):
            place = torch.device(device)
            stack = StackedModule(module, capacity=1, device=place, dtype=torch.float32)
            assert isinstance(stack.network, kind)


@pytest.mark.parametrize("largest", [1 << 30, 1])
@pytest.mark.parametrize("width", [MICROBATCH, ALIKE])
def test_gradients_of_records_on_a_device_are_those_of_the_cpu(
    width: int, largest: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    # by products, and by vmap of windows that would be too large
    monkeypatch.setattr(unfolded, "_LARGEST", largest)
    torch.manual_seed(3)
    parts = [nn.Conv2d(1, 2, 3), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten(), nn.Linear(8, 2)]
    module = nn.Sequential(*parts).double()
    x = torch.randn(COPIES, 32, 1, 6, 6, dtype=torch.float64)
    y = torch.randint(2, (COPIES, 32))
    mask = torch.arange(32) < torch.tensor([[5], [32], [17]])
    start = torch.randn(COPIES, Layout.of(module).dimension).double()

    def gradients(device: str) -> tuple[Tensor, Tensor]:
        place = torch.device(device)
        stack = StackedModule(module, capacity=COPIES, device=place, dtype=torch.float64)
        stack.load(start.to(place), COPIES)
        chunks = example_gradients(stack, x.to(place), y.to(place), LOSS, mask=mask, width=width)
        rows, owners = zip(*[(r.cpu(), o.cpu()) for r, o in chunks], strict=True)
        return torch.cat(rows), torch.cat(owners)

    with simulated():
        found, owner = gradients(NAME)
    expected, usual_owner = gradients("cpu")
    assert len(found) == 5 + 32 + 17
    assert torch.equal(owner, usual_owner)
    torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-12)


def rescaled(outputs: Tensor, targets: Tensor) -> Tensor:
    """A loss in units of the largest target above 100, which the two examples of its check do not show."""
    return ((outputs[:, 0] - targets) / targets.abs().max().clamp(min=100.0)).square()


@pytest.mark.parametrize("width", [MICROBATCH, ALIKE])
def test_a_loss_sees_one_record_at_a_time(width: int) -> None:
    module = nn.Sequential(nn.Flatten(), nn.Linear(36, 1)).double()
    check_loss(rescaled, (1,), torch.tensor([0.0, 1.0]), torch.float64)
    x = torch.randn(COPIES, 32, 1, 6, 6, dtype=torch.float64)
    usual = torch.randn(COPIES, 32, dtype=torch.float64)
    other = usual.clone()
    other[0, 7] = 1e9
    place = torch.device(NAME)

    def gradients(y: Tensor) -> Tensor:
        stack = StackedModule(module, capacity=COPIES, device=place, dtype=torch.float64)
        stack.load(torch.ones(COPIES, 37, dtype=torch.float64).to(place), COPIES)
        everybody = torch.ones(COPIES, 32, dtype=torch.bool)
        chunks = example_gradients(
            stack, x.to(place), y.to(place), rescaled, mask=everybody, width=width
        )
        return torch.cat([rows.cpu() for rows, _ in chunks])

    with simulated():
        changed = (gradients(usual) != gradients(other)).any(1)
    # the records in the order of their gradients, of which one alone has another target
    assert int(changed.sum()) == 1
