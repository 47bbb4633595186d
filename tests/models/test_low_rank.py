"""Low-rank adapters: against written-out weights W + s B A, a loop over clients, the closed form of a full fit."""

import copy
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.func import functional_call
from torch.utils._python_dispatch import TorchDispatchMode

from fedmtl import models
from fedmtl.data import DataSpec
from fedmtl.errors import ConfigError
from fedmtl.local import Layout, StackedModule, check_stackable, example_gradients
from fedmtl.local.losses import cross_entropy
from fedmtl.models import lora, merge_lora

CPU = torch.device("cpu")


class Shared(nn.Module):
    """One layer in two places, and a weight that two layers share."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(6, 6)
        self.again = self.first
        self.tied = nn.Linear(6, 6, bias=False)
        self.tied.weight = self.first.weight
        self.head = nn.Linear(6, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(torch.tanh(self.tied(torch.tanh(self.again(torch.tanh(self.first(x)))))))


def networks() -> dict[str, tuple[nn.Module, Tensor]]:
    torch.manual_seed(0)
    strided = nn.Conv2d(4, 8, 3, stride=2, padding=1, groups=2)
    reflected = nn.Conv2d(8, 4, 3, padding="same", padding_mode="reflect", dilation=2, bias=False)
    encoder = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True)
    tokens = nn.Embedding(10, 6, padding_idx=0)
    with torch.no_grad():
        tokens.weight[0] = 1.0
    return {
        "root": (nn.Linear(6, 3), torch.randn(5, 6)),
        "mlp": (nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 3)), torch.randn(5, 6)),
        "shared": (Shared(), torch.randn(5, 6)),
        "cnn": (
            nn.Sequential(strided, nn.ReLU(), reflected, nn.Flatten(), nn.Linear(64, 3)),
            torch.randn(5, 4, 8, 8),
        ),
        "tokens": (
            nn.Sequential(tokens, nn.Flatten(), nn.Linear(24, 3)),
            torch.randint(10, (5, 4)),
        ),
        "encoder": (nn.Sequential(encoder, nn.Flatten(), nn.Linear(32, 3)), torch.randn(5, 4, 8)),
    }


NAMES = ("root", "mlp", "shared", "cnn", "tokens", "encoder")


def adapted(name: str, **options: Any) -> tuple[nn.Module, Tensor]:
    """A network in float64 with adapters that are not 0."""
    module, x = networks()[name]
    module = lora(module.double(), **options)
    with torch.no_grad():
        for key, parameter in module.named_parameters():
            if key.endswith("lora_B"):
                parameter.normal_()
    return module, x if x.dtype == torch.int64 else x.double()


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("training", [True, False])
@torch.no_grad()
def test_outputs_are_those_of_the_given_model_at_first_and_of_the_merged_one_later(
    name: str, training: bool
) -> None:
    module, x = networks()[name]
    before = copy.deepcopy(module.state_dict())
    fresh = lora(module, rank=2, alpha=3.0)
    assert torch.equal(fresh.train(training)(x), module.train(training)(x))
    assert all(torch.equal(value, before[key]) for key, value in module.state_dict().items())
    assert all(p.requires_grad for p in module.parameters())
    moved, x = adapted(name, rank=2, alpha=3.0)
    merged = merge_lora(moved).train(training)
    torch.testing.assert_close(merged(x), moved.train(training)(x), rtol=1e-9, atol=1e-9)
    assert (moved(x) - module.double()(x)).abs().max() > 0.1
    assert [type(child) for child in merged.modules()] == [
        type(child) for child in module.modules()
    ]
    assert [*merged.state_dict()] == [*module.state_dict()]
    assert all(p.requires_grad for p in merged.parameters())


def test_only_the_factors_can_be_trained_and_keep_the_names_of_their_layer() -> None:
    module, _ = adapted("mlp", rank=2)
    trainable = {name: tuple(p.shape) for name, p in module.named_parameters() if p.requires_grad}
    assert trainable == {
        "0.lora_A": (2, 6),
        "0.lora_B": (8, 2),
        "2.lora_A": (2, 8),
        "2.lora_B": (3, 2),
    }
    assert Layout.of(module).dimension == 2 * (6 + 8 + 8 + 3)
    assert module[0].scale == 1.0  # alpha is the rank unless it is given
    assert {"0.weight", "0.bias", "2.weight", "2.bias"} == set(Layout.of(module).frozen(module))


def test_targets_are_names_of_layers_or_of_what_holds_them() -> None:
    encoder, _ = networks()["encoder"]
    for targets, expected in {
        ("0",): {"0.linear1", "0.linear2"},
        ("*.linear1", "2"): {"0.linear1", "2"},
        ("*",): {
            "0.linear1",
            "0.linear2",
            "2",
        },  # not the projection of attention, which no one calls
    }.items():
        names = Layout.of(lora(encoder, rank=2, targets=targets)).names
        assert {name.rpartition(".")[0] for name in names} == expected


def test_layers_with_hooks_stay_as_they_are() -> None:
    hooked = nn.Sequential(
        nn.Linear(4, 4), nn.utils.parametrizations.weight_norm(nn.Linear(4, 4)), nn.Linear(4, 4)
    )
    hooked[2].register_forward_hook(lambda module, x, y: y)
    assert Layout.of(lora(hooked, rank=1)).names == ("0.lora_A", "0.lora_B")


def test_a_factory_draws_the_start_of_the_model_and_then_the_factors() -> None:
    spec = DataSpec((4,), 3, 5)
    torch.manual_seed(0)
    plain = models.mlp(hidden=8)(spec)
    torch.manual_seed(0)
    low = lora(models.mlp(hidden=8), rank=2)(spec)
    assert torch.equal(low[1].weight, plain[1].weight)
    assert torch.equal(low[3].weight, plain[3].weight)
    assert low[1].lora_A.abs().max() <= 0.5  # 1 / sqrt(4)
    assert low[1].lora_A.abs().min() > 0


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"rank": 0}, r"lora\.rank is 0; it must be a whole number"),
        (
            {"rank": 7},
            r"lora\.rank is 7, but the weights it applies to have ranks up to 6; give 6 or less",
        ),
        ({"alpha": 0.0}, r"lora\.alpha is 0\.0; it must be a finite number above 0"),
        ({"targets": "0"}, r"lora\.targets is '0'; give a list"),
        ({"targets": [0]}, r"lora\.targets has 0, which is not text \(write '0'\)"),
        ({"targets": []}, r"lora\.targets is empty, .*embedding layers are 0, 2\."),
        (
            {"targets": ["0", "fc*"]},
            r"lora\.targets has 'fc\*', which no .* layer is named by; .*layers are 0, 2\.",
        ),
    ],
)
def test_wrong_settings_are_refused_by_name(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        lora(networks()["mlp"][0], **options)


def test_what_is_no_model_or_has_nothing_to_merge_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"lora\.model is 'mlp'"):
        lora("mlp")  # type: ignore[call-overload]
    with pytest.raises(ConfigError, match="layers are none"):
        lora(nn.Sequential(nn.ReLU(), nn.LayerNorm(3)))
    with pytest.raises(ConfigError, match="has no adapters"):
        merge_lora(nn.Linear(3, 3))


# Stacks of clients


def by_hand(
    module: nn.Module, row: Tensor, x: Tensor, y: Tensor, mask: Tensor
) -> tuple[Tensor, Tensor]:
    """Outputs, and the gradient of the mean loss, of one client whose weights are written out as W + s B A."""
    layout = Layout.of(module)
    factors = {name: value.clone().requires_grad_() for name, value in layout.views(row).items()}
    tensors = {}
    for name, child in module.named_modules():
        if hasattr(child, "lora_A"):
            prefix = f"{name}." if name else ""
            a, b = factors[f"{prefix}lora_A"], factors[f"{prefix}lora_B"]
            if isinstance(child, nn.Conv2d):
                parts = zip(a.chunk(child.groups), b.chunk(child.groups), strict=True)
                product = torch.cat(
                    [torch.einsum("or,rihw->oihw", v[:, :, 0, 0], u) for u, v in parts]
                )
            else:
                product = b @ a
            product = product.T if isinstance(child, nn.Embedding) else product
            tensors[f"{prefix}weight"] = child.weight + child.scale * product
    plain = merge_lora(module)
    outputs = functional_call(plain, tensors, (x,))
    F.cross_entropy(outputs[mask], y[mask]).backward()
    return outputs.detach(), torch.cat([factors[name].grad.flatten() for name in layout.names])


@pytest.mark.filterwarnings("ignore:There is a performance drop")  # of attention under vmap
@pytest.mark.parametrize("name", [name for name in NAMES if name != "shared"])
@pytest.mark.parametrize("k", [1, 4])
def test_a_stack_of_clients_equals_a_loop_over_written_out_weights(name: str, k: int) -> None:
    module, x = adapted(name, rank=2, alpha=5.0)
    check_stackable(module, x)
    layout, generator = Layout.of(module), torch.Generator().manual_seed(1)
    rows = 0.5 * torch.randn(k, layout.dimension, generator=generator, dtype=torch.float64)
    stack = StackedModule(module, capacity=k, device=CPU, dtype=torch.float64)
    stack.load(rows, k)
    batches = torch.stack([x.roll(client, 0) for client in range(k)])
    y, mask = torch.randint(3, (k, 5), generator=generator), torch.ones(k, 5, dtype=torch.bool)
    outputs = stack.forward(batches)
    losses = (
        F.cross_entropy(outputs.flatten(0, 1), y.flatten(), reduction="none").view(k, 5).mean(1)
    )
    gradients = stack.backward(losses)
    for client in range(k):
        expected, gradient = by_hand(module, rows[client], batches[client], y[client], mask[client])
        torch.testing.assert_close(outputs[client], expected, rtol=1e-8, atol=1e-10)
        torch.testing.assert_close(gradients[client], gradient, rtol=1e-8, atol=1e-10)
        alone = stack.predict(rows[client : client + 1], batches[client : client + 1])[0]
        torch.testing.assert_close(alone, expected, rtol=1e-8, atol=1e-10)


@pytest.mark.parametrize("name", ["mlp", "cnn", "tokens"])
def test_gradients_of_single_examples_equal_a_loop_over_written_out_weights(name: str) -> None:
    module, x = adapted(name, rank=2)
    layout = Layout.of(module)
    rows = 0.5 * torch.randn(2, layout.dimension, dtype=torch.float64)
    stack = StackedModule(module, capacity=2, device=CPU, dtype=torch.float64)
    stack.load(rows, 2)
    y = torch.randint(3, (2, 5))
    found = list(example_gradients(stack, torch.stack([x, x.flip(0)]), y, cross_entropy))
    gradients, owner = torch.cat([g for g, _ in found]), torch.cat([o for _, o in found])
    assert owner.tolist() == [0] * 5 + [1] * 5
    for place, client in enumerate(owner.tolist()):
        one = (x, x.flip(0))[client][place % 5 : place % 5 + 1]
        target = y[client, place % 5 : place % 5 + 1]
        expected = by_hand(module, rows[client], one, target, torch.ones(1, dtype=torch.bool))[1]
        torch.testing.assert_close(gradients[place], expected, rtol=1e-8, atol=1e-10)


class Largest(TorchDispatchMode):
    """Notes how many numbers the largest tensor has that any operation stores."""

    def __init__(self) -> None:
        super().__init__()
        self.numbers = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for value in result if isinstance(result, (tuple, list)) else (result,):
            if isinstance(value, Tensor):
                self.numbers = max(
                    self.numbers, value.untyped_storage().nbytes() // value.element_size()
                )
        return result


def test_no_weight_for_each_client_is_ever_made() -> None:
    k, wide, width = 16, 96, 4
    plain = nn.Sequential(nn.Linear(wide, wide), nn.ReLU(), nn.Linear(wide, wide))
    head = nn.Sequential(copy.deepcopy(plain).requires_grad_(False), nn.Linear(wide, 2))
    largest = {}
    for name, module in {"low rank": lora(plain, rank=2), "head": head, "all": plain}.items():
        stack = StackedModule(module, capacity=k, device=CPU, dtype=torch.float32)
        rows = stack.load(Layout.of(module).flatten(module), k)
        with Largest() as seen:
            stack.backward(stack.forward(torch.randn(k, width, wide)).square().flatten(1).sum(1))
            stack.predict(rows, torch.randn(k, width, wide))
            list(
                example_gradients(
                    stack, torch.randn(k, width, wide), torch.zeros(k, width).long(), cross_entropy
                )
            )
        largest[name] = seen.numbers
    assert largest["all"] >= k * wide * wide  # the check sees one where there is one
    assert largest["low rank"] < k * wide * wide / 2
    assert largest["head"] < k * wide * wide / 2
