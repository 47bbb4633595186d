"""Per-example gradients against Opacus, against one backward pass an example, and within bounded memory."""

import copy

import pytest
import torch
import torch.nn.functional as F
from opacus import GradSampleModule
from torch import nn

from fedmtl.errors import ConfigError
from fedmtl.local import Layout, StackedModule, example_gradients, prepare_module
from fedmtl.local.losses import cross_entropy, example_losses, mse
from fedmtl.local.per_example import DropoutKeys
from tests.local.test_module import networks

CPU = torch.device("cpu")


class Words(nn.Module):
    """An embedding under a linear layer; word numbers arrive as floats, as all features do."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(7, 4)
        self.head = nn.Linear(4, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.embedding(x.long()).mean(1))


def network(name: str) -> tuple[nn.Module, tuple[int, ...]]:
    module, shape = (networks() | {"words": (Words(), (5,))})[name]
    return module.double(), shape


def batch(name: str, copies: int, width: int = 6) -> tuple:
    module, shape = network(name)
    stack = StackedModule(module, capacity=copies, device=CPU, dtype=torch.float64)
    rows = torch.randn(copies, stack.layout.dimension, dtype=torch.float64) * 0.3
    stack.load(rows, copies)
    x = torch.randn(copies, width, *shape, dtype=torch.float64)
    if name == "words":
        x = torch.randint(7, x.shape).double()
    counts = torch.randint(1, width, (copies,))
    counts[0] = width
    mask = torch.arange(width) < counts[:, None]
    return stack, module, rows, x, torch.randint(3, (copies, width)), mask


def gathered(chunks) -> tuple[torch.Tensor, torch.Tensor]:
    """All chunks as one, in the order of owners, stable within each."""
    parts = list(chunks)
    rows, owner = torch.cat([r for r, _ in parts]), torch.cat([o for _, o in parts])
    order = torch.argsort(owner, stable=True)
    return rows[order], owner[order]


@pytest.fixture
def _of_doubles():
    """Opacus before 1.6 sums the gradients of an embedding in the default type."""
    usual = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(usual)


@pytest.mark.usefixtures("_of_doubles")
@pytest.mark.filterwarnings("ignore:Full backward hook")
@pytest.mark.parametrize("name", ["linear", "mlp", "cnn", "words"])
@pytest.mark.parametrize("copies", [1, 3])
def test_gradients_equal_opacus(name, copies):
    stack, module, rows, x, y, mask = batch(name, copies)
    got, owner = gathered(example_gradients(stack, x, y, cross_entropy, mask=mask))
    assert torch.equal(owner, mask.nonzero()[:, 0])
    for i in range(copies):
        single = GradSampleModule(
            stack.layout.load(copy.deepcopy(module), rows[i]), loss_reduction="sum"
        )
        F.cross_entropy(single(x[i][mask[i]]), y[i][mask[i]], reduction="sum").backward()
        expected = torch.cat([p.grad_sample.flatten(1) for p in single.parameters()], 1)
        torch.testing.assert_close(got[owner == i], expected, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("name", ["mlp", "cnn"])
@pytest.mark.parametrize("per_chunk", [1, 4, 6, 9, 1000])
def test_any_chunk_size_gives_one_backward_pass_an_example_within_its_bound(name, per_chunk):
    stack, module, rows, x, y, mask = batch(name, 3)
    mask[1] = False
    limit = per_chunk * stack.layout.dimension * 8
    chunks = list(example_gradients(stack, x, y, cross_entropy, mask=mask, chunk_bytes=limit))
    assert max(len(r) for r, _ in chunks) <= per_chunk
    got, owner = gathered(chunks)
    expected = []
    for i, j in mask.nonzero().tolist():
        single = stack.layout.load(copy.deepcopy(module), rows[i])
        F.cross_entropy(single(x[i, j : j + 1]), y[i, j : j + 1]).backward()
        expected.append(torch.cat([p.grad.flatten() for p in single.parameters()]))
    assert torch.equal(owner, mask.nonzero()[:, 0])
    torch.testing.assert_close(got, torch.stack(expected), rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("name", ["mlp", "cnn"])
@pytest.mark.parametrize(("width", "per_chunk"), [(16, 1000), (16, 32), (16, 9)])
def test_gradients_in_pieces_are_the_same_whoever_is_beside(name, width, per_chunk):
    stack, _, _, x, y, mask = batch(name, 5)
    mask = torch.arange(mask.shape[1]) < torch.tensor([3, 0, 6, 1, 5])[:, None]
    whole = stack.rows.clone()
    x, y, mask = (torch.cat([one] * 6, 1)[:, :32] for one in (x, y, mask))  # several pieces
    mask = torch.arange(32) < torch.tensor([20, 0, 32, 1, 17])[:, None]
    limit = {"chunk_bytes": per_chunk * stack.layout.dimension * 8}
    expected, owner = gathered(example_gradients(stack, x, y, cross_entropy, mask=mask))
    limit |= {"width": width}
    got, of = gathered(example_gradients(stack, x, y, cross_entropy, mask=mask, **limit))
    assert torch.equal(of, owner)
    torch.testing.assert_close(got, expected, rtol=1e-10, atol=1e-12)
    torch.set_num_threads(1)
    for some in ([0], [4, 2], [3, 1, 0, 2]):
        stack.load(whole[some], len(some))
        given = x[some], y[some], cross_entropy
        part, _ = gathered(example_gradients(stack, *given, mask=mask[some], **limit))
        assert torch.equal(part, torch.cat([got[owner == k] for k in some]))
        stack.load(whole, 5)


def single_precision() -> dict[str, tuple[nn.Module, tuple[int, ...]]]:
    """Networks whose products a library computes by other code for few examples than for many."""
    torch.manual_seed(0)
    convolutions = (
        nn.Conv2d(1, 8, 5, padding=2),
        nn.GroupNorm(2, 8),
        nn.ReLU(),
        nn.Flatten(),
        nn.Linear(512, 3),
    )
    return {
        "mlp": (nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 3)), (64,)),
        "cnn": (nn.Sequential(*convolutions), (1, 8, 8)),
    }


@pytest.mark.parametrize("name", ["mlp", "cnn"])
@pytest.mark.parametrize(("width", "per_chunk"), [(32, 1000), (32, 31), (16, 1000), (16, 9)])
def test_a_gradient_has_the_same_bits_with_and_without_other_examples(name, width, per_chunk):
    """More than the margin of the clip would else move with a record that is removed: see privacy/clip.py."""
    torch.set_num_threads(1)
    module, shape = single_precision()[name]
    stack = StackedModule(module, capacity=1, device=CPU, dtype=torch.float32)
    stack.load(stack.layout.flatten(module), 1)
    x, y = torch.randn(1, 34, *shape), torch.randint(3, (1, 34))

    def gradients(some: list[int]) -> torch.Tensor:
        index = torch.tensor(some + [some[0]] * (-len(some) % width))
        chunks = example_gradients(
            stack,
            x[:, index],
            y[:, index],
            cross_entropy,
            mask=(torch.arange(len(index)) < len(some))[None],
            width=width,
            chunk_bytes=per_chunk * stack.layout.dimension * 4,
        )
        return torch.cat([rows for rows, _ in chunks])

    everyone = list(range(34))
    whole = gradients(everyone)
    for count in (1, 2, 16, 17, 33):
        assert torch.equal(gradients(everyone[:count]), whole[:count])
        without = [place for place in everyone[: count + 1] if place != count // 2]
        assert torch.equal(gradients(without), whole[without])


def test_frozen_and_unused_parameters():
    module = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 1)).double()
    module[0].requires_grad_(False)
    module.register_parameter("unused", nn.Parameter(torch.ones(2, dtype=torch.float64)))
    stack = StackedModule(module, capacity=2, device=CPU, dtype=torch.float64)
    stack.load(Layout.of(module).flatten(module), 2)
    x, y = torch.randn(2, 3, 4, dtype=torch.float64), torch.randn(2, 3, dtype=torch.float64)
    got, _ = gathered(example_gradients(stack, x, y, mse))
    hidden = module[0](x)
    error = 2 * (module[1](hidden)[..., 0] - y)[..., None]
    values = {"unused": torch.zeros(2, 3, 2), "1.weight": error * hidden, "1.bias": error}
    expected = torch.cat([values[name].double() for name in stack.layout.names], -1).flatten(0, 1)
    torch.testing.assert_close(got, expected, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("width", [0, 6])
def test_padding_alone_gives_one_empty_chunk(width):
    stack, _, _, x, y, mask = batch("linear", 2)
    none = torch.zeros_like(mask[:, :width])
    ((rows, owner),) = example_gradients(
        stack, x[:, :width], y[:, :width], cross_entropy, mask=none
    )
    assert (rows.shape, rows.dtype, owner.shape, owner.dtype) == (
        (0, 15),
        torch.float64,
        (0,),
        torch.int64,
    )


def dropout_stack(copies: int) -> StackedModule:
    torch.manual_seed(1)
    net = nn.Sequential(nn.Unflatten(1, (2, 2)), nn.Dropout1d(0.3), nn.Flatten(), nn.Linear(4, 8), nn.Dropout(0.4),
                        nn.Linear(8, 3))  # fmt: skip
    net = prepare_module(net.double(), torch.zeros(2, 4, dtype=torch.float64), seed=7)
    stack = StackedModule(net, capacity=copies, device=CPU, dtype=torch.float64)
    stack.load(torch.randn(copies, stack.layout.dimension, dtype=torch.float64), copies)
    return stack


@pytest.mark.parametrize("copies", [1, 3])
def test_dropout_masks_are_those_of_the_whole_batch(copies):
    stack = dropout_stack(copies)
    x, y = torch.randn(copies, 5, 4, dtype=torch.float64), torch.randint(3, (copies, 5))
    address = torch.stack([torch.tensor([c, 3, 2]) for c in (11, -5, 2**60)])[:copies]
    expected = stack.backward(
        example_losses(cross_entropy, stack.forward(x, address=address), y).mean(1)
    ).clone()
    position = torch.arange(5).expand(copies, 5)
    rows, owner = gathered(
        example_gradients(stack, x, y, cross_entropy, dropout=DropoutKeys(address, position))
    )
    means = torch.stack([rows[owner == i].mean(0) for i in range(copies)])
    torch.testing.assert_close(means, expected, rtol=1e-10, atol=1e-12)


def test_an_examples_dropout_mask_stays_with_its_record():
    """Whoever else is drawn: removing a record must move nothing but that record's own gradient."""
    stack = dropout_stack(2)
    x, y = torch.randn(2, 5, 4, dtype=torch.float64), torch.randint(3, (2, 5))
    address = torch.tensor([[11, 3, 2], [4, 3, 2]])
    position = torch.arange(5).expand(2, 5)
    whole, _ = gathered(
        example_gradients(stack, x, y, cross_entropy, dropout=DropoutKeys(address, position))
    )
    kept = torch.tensor([0, 3, 4])
    part, _ = gathered(
        example_gradients(
            stack,
            x[:, kept],
            y[:, kept],
            cross_entropy,
            dropout=DropoutKeys(address, position[:, kept]),
        )
    )
    torch.testing.assert_close(
        part, whole.view(2, 5, -1)[:, kept].flatten(0, 1), rtol=1e-12, atol=1e-12
    )
    with pytest.raises(ConfigError, match="address and a position"):
        next(example_gradients(stack, x, y, cross_entropy))


def test_a_loss_without_one_value_per_example_is_refused():
    stack, _, _, x, y, _ = batch("linear", 2)
    with pytest.raises(ConfigError, match="one value per example"):
        next(
            example_gradients(
                stack, x, y, lambda outputs, targets: F.cross_entropy(outputs, targets)
            )
        )
