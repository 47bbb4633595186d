"""Perceptrons by batched products against automatic differentiation of one module at a time."""

from __future__ import annotations

from functools import partial

import pytest
import torch
from torch import Tensor, nn
from torch.func import functional_call

import fedmtl.stacked.perceptron as perceptron_of
from fedmtl._compiled import without_interpreter
from fedmtl.data import DataSpec
from fedmtl.stacked import Layout, StackedModule, client_means, set_trainable
from fedmtl.stacked.losses import LOSSES, Pull, example_losses, softmax_divergence
from fedmtl.stacked.perceptron import Ends, Examples, Linear, Perceptron, Rule, output_gradient

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
    stack = StackedModule(module.double(), capacity=K, device=torch.device("cpu"), dtype=torch.float64)
    assert stack.perceptron is not None
    rows = stack.load(torch.randn(K, stack.layout.dimension, dtype=torch.float64) * 0.5, K)
    return stack, stack.perceptron, rows


def gradients(module: nn.Module, rows: Tensor, x: Tensor, y: Tensor, mask: Tensor, loss) -> Tensor:
    """The definition: one copy after another, by autograd."""
    layout, found = Layout.of(module), []
    for row, one, targets, used in zip(rows, x, y, mask, strict=True):
        leaf = row.clone().requires_grad_()
        losses = loss(functional_call(module, layout.views(leaf), (one[used],)), targets[used])
        found.append(torch.autograd.grad(losses.mean(), leaf)[0])
    return torch.stack(found)


@pytest.mark.parametrize("loss", LOSSES)
@pytest.mark.parametrize("name", networks())
def test_gradients_and_steps_are_those_of_automatic_differentiation(name: str, loss: str) -> None:
    module = networks()[name]
    stack, perceptron, rows = stacked(module)
    x, y = torch.randn(K, B, *SHAPE, dtype=torch.float64), TARGETS[loss]()
    mask = torch.rand(K, B) > 0.4
    mask[:, 0] = True
    expected = gradients(stack.train_module, rows, x, y, mask, LOSSES[loss])
    values = perceptron.forward(rows, x)
    assert values is not None
    signal = output_gradient(LOSSES[loss], values[-1], y, mask)
    perceptron.backward(rows, values, signal, stack.grads)
    torch.testing.assert_close(stack.grads, expected, rtol=1e-10, atol=1e-12)
    before = rows.clone()
    perceptron.descend(rows, values, signal, keep=0.9, rate=0.3)
    torch.testing.assert_close(rows, 0.9 * before - 0.3 * expected, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("compiled", [True, False])
@pytest.mark.parametrize("name", networks())
def test_local_steps_in_one_call_are_single_steps(name: str, compiled: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    if not compiled:
        monkeypatch.setattr(perceptron_of, "without_interpreter", lambda function: function)
    _, network, rows = stacked(networks()[name])
    active, widths, last = [5, 5, 3], [6, 6, 6], [2, 2, 2, 1, -1]
    x, y = torch.randn(3, K, B, 6, dtype=torch.float64), torch.randint(4, (3, K, B))
    mask = torch.rand(3, K, B) > 0.4
    mask[..., 0] = True
    anchor, less = torch.randn(2, *rows.shape, dtype=torch.float64)
    expected = torch.zeros(7, rows.shape[1], dtype=torch.float64)
    loose, where = rows.clone(), [4, 2, 0, 1, 6]
    for step, count in enumerate(active):
        values = network.forward(loose[:count], x[step, :count])
        assert values is not None
        signal = output_gradient(LOSSES["cross_entropy"], values[-1], y[step, :count], mask[step, :count])
        network.descend(loose[:count], values, signal, keep=0.9, rate=0.3)
        loose[:count] += 0.2 * anchor[:count]
        for copy in range(K):
            if last[copy] == step:
                expected[where[copy]] = loose[copy] - less[0]
    out, kept = torch.zeros_like(expected), torch.zeros_like(expected)
    order = torch.randperm(3 * K * B)
    stored, labels = torch.empty(3 * K * B, 6, dtype=torch.float64), torch.empty(3 * K * B, dtype=torch.int64)
    stored[order], labels[order] = (x.reshape(-1, 6) - 1.0) / 0.5, y.flatten()
    network.run(
        rows,
        Examples(stored, labels, 0.5, 1.0, order.view(3, K, B), mask, active, widths),
        Rule(keep=0.9, rate=0.3, towards=0.2, anchor=anchor),
        Ends(last=last, where=where, out=out, less=less[0], kept=kept),
    )
    torch.testing.assert_close(out, expected, rtol=1e-10, atol=1e-12)
    assert torch.equal(kept[[4, 2, 0, 1]] - less[0], out[[4, 2, 0, 1]])
    assert not out[[3, 5, 6]].any()
    assert not kept[[3, 5, 6]].any()


@pytest.mark.parametrize("compiled", [True, False])
@pytest.mark.parametrize("bias", [True, False])
def test_copies_by_their_differences_from_a_common_start(
    bias: bool, compiled: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The same ends as of whole copies, whatever the rows held, also of copies whose steps end before others' do."""
    if not compiled:
        monkeypatch.setattr(perceptron_of, "without_interpreter", lambda function: function)
    network = Perceptron((Linear(0, 24 if bias else None, 4, 6),), flattens=False)
    start = torch.randn(28 if bias else 24, dtype=torch.float64)
    x, y, index = torch.randn(50, 6, dtype=torch.float64), torch.randint(4, (50,)), torch.randint(50, (3, K, B))
    mask = torch.rand(3, K, B) > 0.4
    mask[..., 0] = True
    examples = Examples(x, y, 0.5, 1.0, index, mask, [K, K, 2], [B, B, B])
    found = []
    for rule, less in (
        (Rule(keep=0.9, rate=0.3, towards=0.1, anchor=start), start),
        (Rule(keep=0.9, rate=0.3, towards=0.1, anchor=start, apart=True), None),
    ):
        rows = torch.full((K, len(start)), torch.nan) if rule.apart else start.expand(K, -1).clone()
        out, sums = torch.zeros(K, len(start), dtype=torch.float64), torch.zeros(K, dtype=torch.float64)
        cells = torch.zeros(len(start), dtype=torch.float64)
        ends = Ends([2, 2, *[1] * (K - 3), -1], list(range(K)), out, less, None, sums, cells, [0.3, 2.0, 2.0**-40])
        network.run(rows.double(), examples, rule, ends)
        found.append((out, cells * 2.0**-40))
        assert torch.isfinite(sums).all()
    (plain, total), (apart, other) = found
    assert plain[:-1].abs().min() > 0
    assert not apart[-1].any()
    torch.testing.assert_close(apart, plain, rtol=1e-10, atol=1e-12)
    torch.testing.assert_close(other, total, rtol=1e-9, atol=1e-9)


def test_copies_are_computed_by_differences_only_from_their_start() -> None:
    start = torch.randn(28)
    one = Perceptron((Linear(0, 24, 4, 6),), flattens=False)
    two = Perceptron((Linear(0, 24, 4, 6), Linear(0, 24, 4, 6)), flattens=False)
    spec = DataSpec(shape=(6,), classes=4, clients=K)
    pulled, free = Rule(0.9, 0.3, 0.1, start), Rule(1.0, 0.3, 0.0, None)
    assert one.runs_apart(spec, pulled, start)
    assert one.runs_apart(spec, free, start)
    for network, rule, at in (
        (two, pulled, start),
        (one, pulled._replace(anchor=start.clone()), start),
        (one, pulled._replace(keep=0.85), start),  # weight decay
        (one, free._replace(keep=0.99), start),
        (one, free, start[None]),
    ):
        assert not network.runs_apart(spec, rule, at)


def test_compiled_steps_have_the_bits_of_the_interpreter(monkeypatch: pytest.MonkeyPatch) -> None:
    found = []
    for compile_it in (True, True, True, False):  # TorchScript optimizes what it has run a few times
        if not compile_it:
            monkeypatch.setattr(perceptron_of, "without_interpreter", lambda function: function)
        torch.manual_seed(3)
        rows = torch.randn(K, 6 * 7 + 7 + 7 * 4 + 4)
        network = Perceptron((Linear(0, 42, 7, 6, 1), Linear(49, 77, 4, 7)), flattens=False)
        x, y, index = torch.randn(50, 6), torch.randint(4, (50,)), torch.randint(50, (2, K, B))
        examples = Examples(x, y, 0.5, 1.0, index, torch.ones(2, K, B).bool(), [K, K], [B, B])
        out = torch.zeros_like(rows)
        rule = Rule(keep=0.9, rate=0.3, towards=0.1, anchor=torch.randn(rows.shape[1]))
        network.run(rows, examples, rule, Ends([1] * K, list(range(K)), out, None))
        found.append(out)
    assert found[0].abs().min() > 0
    assert all(torch.equal(one, found[-1]) for one in found)


def test_without_torchscript_the_function_itself_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(function):
        raise RuntimeError("torch.jit.script is not supported here")

    def double(x: Tensor) -> Tensor:
        return 2 * x

    monkeypatch.setattr(torch.jit, "script", refuse)
    assert without_interpreter(double) is double


def test_what_is_added_to_the_losses_is_differentiated_too() -> None:
    torch.manual_seed(1)
    outputs, others = torch.randn(2, K, B, 4, dtype=torch.float64)
    y, mask = torch.randint(4, (K, B)), torch.ones(K, B, dtype=torch.bool)
    loss = LOSSES["cross_entropy"]
    leaf = outputs.clone().requires_grad_()
    total = client_means(example_losses(loss, leaf, y) + (leaf - others).square().sum(-1), mask).sum()
    expected = torch.autograd.grad(total, leaf)[0]
    got = output_gradient(loss, outputs, y, mask, lambda values: (values - others).square().sum(-1))
    torch.testing.assert_close(got, expected, rtol=1e-12, atol=0.0)


def test_a_pull_to_predictions_has_the_gradient_of_its_divergence() -> None:
    torch.manual_seed(2)
    outputs, others = 3 * torch.randn(2, K, B, 4, dtype=torch.float64)
    y, mask = torch.randint(4, (K, B)), torch.rand(K, B) < 0.7
    mask[:, 0] = True
    loss, leaf = LOSSES["cross_entropy"], outputs.clone().requires_grad_()
    log_p, log_q = leaf.log_softmax(-1), others.log_softmax(-1)
    both_ways = (log_p.exp() * (log_p - log_q) + log_q.exp() * (log_q - log_p)).sum(-1)
    expected = torch.autograd.grad(client_means(example_losses(loss, leaf, y) + 0.3 * both_ways, mask).sum(), leaf)[0]
    got = output_gradient(loss, outputs, y, mask, Pull(softmax_divergence, others, 0.3))
    torch.testing.assert_close(got, expected, rtol=1e-10, atol=1e-14)


def hooked() -> nn.Module:
    module = nn.Linear(3, 2)
    module.register_forward_hook(lambda *given: None)
    return module


def tied() -> nn.Module:
    first, second = nn.Linear(3, 3), nn.Linear(3, 3)
    second.weight = first.weight
    return nn.Sequential(first, second)


def partly_frozen() -> nn.Module:
    module = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 2))
    set_trainable(module, ["1"])
    return module


class Doubled(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        return 2 * super().forward(x)


@pytest.mark.parametrize(
    "make",
    [
        hooked,
        tied,
        partly_frozen,
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
