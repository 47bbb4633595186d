"""Odd modules and losses train as plain PyTorch trains them, or are refused before anything is charged, with advice."""

import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import nn

from fedmtl import (
    ClientPrivacy,
    Finetune,
    LocalSGD,
    PrivateSearch,
    Result,
    cli,
    models,
    personalize,
)
from fedmtl.errors import ConfigError, ModelError
from fedmtl.local import StackedModule, prepare_module
from tests.trainer.zoo import (
    CLASSES,
    DATA,
    HIDDEN,
    LOSSES,
    REFUSED,
    TRAINS,
    WIDTH,
    Net,
    OfFunction,
    Recurrent,
    by_hand,
    trainer,
    vmap_refuses,
)

CHARGING = ClientPrivacy(clip_norm=1.0, epsilon=8.0, delta=1e-5)


def check_trains(module: nn.Module, kind: str, **settings) -> None:
    """Check that a run and the slow loop end in the same outputs; a sum of clipped rows has a grid finer than 1e-5."""
    got = trainer(module, kind, **settings).fit().shared_model()(DATA.train.x.double())
    torch.testing.assert_close(got, by_hand(module, kind), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("kind", ["none", "client", "record"])
@pytest.mark.parametrize("name", TRAINS)
def test_a_module_trains_as_in_a_plain_loop(name, kind) -> None:
    torch.manual_seed(3)
    check_trains(TRAINS[name](), kind)


@pytest.mark.parametrize("as_factory", [False, True])
@pytest.mark.parametrize("name", REFUSED)
def test_a_module_is_refused_before_anything_is_charged(name, as_factory, tmp_path) -> None:
    make, text, _ = REFUSED[name]
    model = make()
    if as_factory:
        module, model = model, lambda spec: module
    with pytest.raises(ModelError, match=text):
        trainer(model, privacy=CHARGING, folder=tmp_path / "run").fit()
    assert not list(tmp_path.rglob("*.jsonl"))


@pytest.mark.parametrize("name", [name for name, row in REFUSED.items() if row[2] is not None])
def test_the_advice_of_a_refusal_is_true(name) -> None:
    torch.manual_seed(3)
    make = REFUSED[name][2]
    check_trains(make(), "client")


@pytest.mark.parametrize("layer", [nn.BatchNorm1d(HIDDEN), nn.SyncBatchNorm(HIDDEN)])
def test_model_fix_trains_what_was_refused_for_it(layer) -> None:
    check_trains(models.fix(Net(layer)), "record")


@pytest.mark.parametrize("kind", ["none", "record"])
def test_model_fix_makes_the_dropout_of_a_recurrent_layer_keyed(kind) -> None:
    module = Recurrent(nn.LSTM, num_layers=2, dropout=0.5)
    with pytest.raises(ModelError, match=r"bernoulli.*models\.fix\(model\)"):
        trainer(module, kind).problem()
    first, second = (trainer(models.fix(module), kind).fit().shared for _ in range(2))
    assert torch.equal(first, second)


def by_command(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (folder / "model").mkdir()
    (folder / "model/odd.yaml").write_text("# Odd.\n_target_: odd_module.make\n")
    (folder / "odd_module.py").write_text(
        "from torch import nn\n"
        "class Mixing(nn.Linear):\n"
        "    def forward(self, x):\n"
        "        return super().forward(x.flatten(1) - x.flatten(1).mean(0))\n"
        "def make():\n"
        "    return lambda spec: Mixing(64, spec.outputs)\n"
    )
    monkeypatch.syspath_prepend(str(folder))
    monkeypatch.delitem(sys.modules, "odd_module", raising=False)
    monkeypatch.chdir(folder)
    settings = ["model=odd", "data=digits", "data.clients=10", "schedule.cohort=5", "baselines=[]"]
    code = cli.main(["--config-dir", str(folder), "--trust=odd_module", *settings])
    assert code == 2


def by_node(folder: Path) -> None:
    from fedmtl.flower.node import Node

    Node(trainer(mixing(), "client"), "c0", lambda: DATA.subset(["c0"]), folder)


def by_server(folder: Path) -> None:
    from fedmtl.flower.server import serve
    from tests.flower.test_apps import apart

    serve(*apart(trainer(mixing(), "client"), folder), patience=0.01, gather=0)


def by_search(folder: Path) -> None:
    candidates = {"odd": trainer(mixing(), privacy=CHARGING)}
    PrivateSearch(candidates=candidates, folder=folder / "search", progress=False).fit()


def by_load(folder: Path) -> None:
    trainer(Net(), folder=folder / "run").fit()
    Result.load(folder / "run", model=Net(nn.BatchNorm1d(HIDDEN, affine=False)))


def by_personalize(folder: Path) -> None:
    personalize(mixing(), DATA, finetune=Finetune(kind="vanilla", local=LocalSGD(lr=0.1)))


def by_fix(folder: Path) -> None:
    models.fix(REFUSED["old weight norm"][0]())


def by_lora(folder: Path) -> None:
    models.lora(REFUSED["meta"][0]())


def mixing() -> nn.Module:
    return REFUSED["mean of the batch"][0]()


@pytest.mark.parametrize(
    ("enter", "text"),
    [
        (by_node, "depend on the other examples"),
        (by_server, "depend on the other examples"),
        (by_search, "depend on the other examples"),
        (by_personalize, "depend on the other examples"),
        (by_load, "is BatchNorm1d"),
        (by_fix, r"torch\.nn\.utils\.weight_norm"),
        (by_lora, "'meta'"),
    ],
)
def test_every_way_in_refuses(enter: Callable[[Path], None], text: str, tmp_path: Path) -> None:
    if enter in (by_node, by_server):
        pytest.importorskip("flwr", reason="the extra flower is not installed")
    with pytest.raises(ModelError, match=text):
        enter(tmp_path)
    assert not list(tmp_path.rglob("*.jsonl"))


def test_the_command_refuses(tmp_path, monkeypatch, capsys) -> None:
    by_command(tmp_path, monkeypatch)
    assert (
        "fedmtl: error: The model's outputs for an example depend on the other"
        in capsys.readouterr().err
    )
    assert not list(tmp_path.rglob("*.jsonl"))


@pytest.mark.parametrize("middle", [None, nn.LayerNorm(HIDDEN)])
@pytest.mark.parametrize("name", LOSSES)
def test_a_loss_is_refused_before_anything_is_charged(name, middle, tmp_path) -> None:
    loss, text = LOSSES[name]
    with pytest.raises(ConfigError, match=text):
        trainer(Net(middle), privacy=CHARGING, loss=loss, folder=tmp_path / "run").fit()
    assert not list(tmp_path.rglob("*.jsonl"))


@pytest.mark.parametrize("model", [Net(), nn.Linear(WIDTH, CLASSES)])
def test_a_loss_without_a_batching_rule_trains_on_single_records(model) -> None:
    torch.manual_seed(3)
    check_trains(model, "record", loss=vmap_refuses)


def test_a_loss_without_a_batching_rule_finetunes_by_gradients_of_records() -> None:
    finetune = Finetune(kind="ewc", local=LocalSGD(lr=0.1, steps=2))
    model = Net()
    named, own = (
        trainer(model, finetune=finetune, loss=loss).fit().personal
        for loss in ("cross_entropy", vmap_refuses)
    )
    torch.testing.assert_close(own, named, rtol=1e-8, atol=1e-10)


def test_a_loss_of_real_targets_that_takes_some_only_is_not_refused() -> None:
    """It is tried on made-up targets, which may lie beyond those that it takes."""

    def signs(outputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        assert bool((targets.abs() == 1).all())
        return nn.functional.softplus(-targets * outputs[:, 0])

    rows = {
        client: (DATA.subset([client]).train.x, 2.0 * (DATA.subset([client]).train.y > 0) - 1)
        for client in DATA.ids
    }
    data = type(DATA).from_tensors(rows, classes=None)
    assert trainer(nn.Linear(WIDTH, 1), data=data, loss=signs).fit().shared is not None


def masks_of(module: nn.Module, x: torch.Tensor) -> list[torch.Tensor]:
    """The outputs of the dropout layers of a module for ``x``, in the order of the calls."""
    ready = prepare_module(module, x, seed=1)
    stack = StackedModule(ready, capacity=1, device=x.device, dtype=x.dtype)
    stack.load(stack.layout.flatten(ready), 1)
    seen: list[torch.Tensor] = []
    for layer in stack.train_module.modules():
        if type(layer).__name__ == "KeyedDropout":
            layer.register_forward_hook(lambda layer, inputs, outputs: seen.append(outputs == 0))
    for _ in range(2):
        stack.forward(x[None], address=torch.tensor([[1, 2, 3]]))
    return seen


def test_a_dropout_layer_that_is_called_twice_has_two_masks_in_every_pass() -> None:
    drop = nn.Dropout(0.5)
    twice = Net(
        forward=lambda net, x: net.last(
            net.middle(1.0 + 0.0 * net.middle(1.0 + 0.0 * net.first(x)))
        )
    )
    twice.middle = drop
    shared = nn.Sequential(
        nn.Linear(WIDTH, HIDDEN), drop, nn.Sigmoid(), drop, nn.Linear(HIDDEN, CLASSES)
    )
    for module in (twice, shared):
        first, second, *again = masks_of(module, torch.ones(50, WIDTH))
        assert 60 < int(first.sum()) < 140
        assert 60 < int((first ^ second).sum()) < 140
        assert torch.equal(again[0], first)
        assert torch.equal(again[1], second)


def test_a_dropout_layer_of_ones_own_keeps_its_forward() -> None:
    class Half(nn.Dropout):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return 0.5 * x

    check_trains(Net(Half(0.5)), "client")


def test_a_zero_start_hides_no_mixing() -> None:
    module = Net(OfFunction(lambda x: x - x.mean(0)))
    nn.init.zeros_(module.last.weight)
    with pytest.raises(ModelError, match="depend on the other examples"):
        trainer(module).problem()


def test_lazy_parameters_follow_from_the_seed_and_not_from_the_global_generator() -> None:
    def start(generator: int, seed: int) -> torch.Tensor:
        torch.manual_seed(generator)
        module = nn.Sequential(nn.LazyLinear(4), nn.ReLU(), nn.LazyLinear(CLASSES))
        initial = trainer(module, seed=seed).problem().initial
        assert module[0].has_uninitialized_params()
        return initial

    assert torch.equal(start(1, 0), start(2, 0))
    assert not torch.equal(start(1, 0), start(1, 5))
    assert len(start(1, 0)) == WIDTH * 4 + 4 + 4 * CLASSES + CLASSES


def test_a_lazy_network_trains() -> None:
    module = nn.Sequential(nn.LazyLinear(4), nn.ReLU(), nn.LazyLinear(CLASSES))
    assert len(trainer(module).fit().ids) == len(DATA.ids)
