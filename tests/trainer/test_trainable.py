"""Frozen parameters: chosen by name, public, bit-identical after a run, and in no release, norm or store."""

import copy
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from sklearn.linear_model import LogisticRegression
from torch import nn

from fedmtl import (
    PMTL,
    ClientPrivacy,
    Ditto,
    Execution,
    FedAvg,
    FedRep,
    Finetune,
    LocalSGD,
    Result,
    Trainer,
    models,
    personalize,
)
from fedmtl.audit.run_suite import setup_of
from fedmtl.audit.verification import CONFIRMED, FAILED, OPEN, verify
from fedmtl.data import FederatedDataset
from fedmtl.errors import ConfigError, ModelError, ResumeError
from fedmtl.local import Layout
from fedmtl.local.layout import set_trainable
from fedmtl.privacy import FullParticipation, RecordPrivacy
from tests.helpers import ragged_classification
from tests.methods import NETWORKS
from tests.small import check_resumed

from .settings import CLIENTS, DATA, DELTA, NOISE, SOLVER, epsilon, trainer

NAMES = (
    "fedavg",
    "fedprox",
    "pmtl",
    "ditto",
    "apfl",
    "pfedme",
    "ppsgd",
    "ifca",
    "clustered_pmtl",
    "local",
)
ALGORITHMS: dict[str, Any] = {name: NETWORKS[name] for name in NAMES}
ALGORITHMS |= {name: replace(NETWORKS[name], head=("3.bias",)) for name in ("fedrep", "fedper")}


def network() -> nn.Sequential:
    torch.manual_seed(3)
    return nn.Sequential(nn.Flatten(), nn.Linear(5, 4), nn.Tanh(), nn.Linear(4, 3))


NETWORK = network()
FROZEN = ("1.weight", "1.bias")


def head(**settings: Any) -> Trainer:
    """A run that trains the last layer alone."""
    return trainer(**{"model": NETWORK, "trainable": ("3.*",), "dtype": "float32"} | settings)


def modules_of(result: Result) -> list[nn.Module]:
    return [result.model_for(i) for i in result.ids] + (
        [] if result.shared is None else [result.shared_model()]
    )


# Names


def test_names_say_what_moves_whatever_the_module_says() -> None:
    module = network()
    module[1].requires_grad_(False)
    set_trainable(module, None)
    assert Layout.of(module).names == ("3.weight", "3.bias")
    for patterns, expected in {
        ("3.*",): ("3.weight", "3.bias"),
        ("3",): ("3.weight", "3.bias"),
        ("*.bias", "1"): ("1.weight", "1.bias", "3.bias"),
        ("[13].weight",): ("1.weight", "3.weight"),
    }.items():
        set_trainable(module, patterns)
        assert Layout.of(module).names == expected


LISTED = r"the model's parameters are 1\.weight, 1\.bias, 3\.weight, 3\.bias\.$"


def test_a_tied_weight_can_be_named_by_each_of_its_names() -> None:
    tied = nn.ModuleDict(
        {"tokens": nn.Linear(5, 5), "words": nn.Linear(5, 5, bias=False), "head": nn.Linear(5, 3)}
    )
    tied["words"].weight = tied["tokens"].weight
    for patterns, moving in (
        (("words",), {"tokens.weight"}),
        (("words.weight", "head.bias"), {"tokens.weight", "head.bias"}),
        (("tokens.bias",), {"tokens.bias"}),
    ):
        set_trainable(tied, patterns)
        assert {name for name, p in tied.named_parameters() if p.requires_grad} == moving
    set_trainable(tied, ("*",))
    layout = Layout.of(tied)
    assert torch.equal(layout.places(["words"], "head"), layout.places(["tokens.weight"], "head"))
    assert int(layout.places(["words"], "head").sum()) == 25
    with pytest.raises(ConfigError, match=r"tokens\.weight, words\.weight, tokens\.bias, head"):
        layout.places(["body"], "head")
    with pytest.raises(
        ConfigError, match=r"no parameter is named by; .* tokens\.weight, words\.weight"
    ):
        set_trainable(tied, ("body",))


@pytest.mark.parametrize(
    ("value", "message"),
    [
        (("head.*",), r"^trainable has 'head\.\*', which no parameter is named by; "),
        (("3.*", 3), r"^trainable has 3, which is not text \(write '3'\); "),
        ((), r"^trainable is empty, so that it names none; "),
        ("3.*", r"^trainable is '3\.\*'; give a list of names, such as \['3\.\*'\]; "),
        ({"3": True}, r"^trainable is \{'3': True\}; give a list"),
    ],
)
def test_names_that_do_not_fit_are_refused_with_those_that_exist(value: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=message + ".*" + LISTED):
        head(trainable=value).fit()


ALL_FROZEN = (
    rf"no trainable parameter: all are frozen, and trainable is None; {LISTED[:-1]} Unfreeze some"
)


def test_a_model_without_a_trainable_parameter_is_refused_with_their_names() -> None:
    with pytest.raises(ModelError, match=ALL_FROZEN):
        head(model=network().requires_grad_(False), trainable=None).fit()


# What moves, and what does not


@pytest.mark.parametrize(
    ("name", "processes"), [*((name, 1) for name in ALGORITHMS), ("pmtl", 2), ("fedrep", 2)]
)
def test_frozen_parameters_keep_every_bit_and_the_rest_moves(name: str, processes: int) -> None:
    before = copy.deepcopy(NETWORK.state_dict())
    result = head(
        algorithm=ALGORITHMS[name], execution=Execution(processes=processes), rounds=3
    ).fit()
    assert result.personal.shape == (CLIENTS, 15)
    assert [p.requires_grad for p in NETWORK.parameters()] == [True] * 4
    for module in (NETWORK, *modules_of(result)):
        state = module.state_dict()
        assert [*state] == [*before]
        assert all(
            torch.equal(state[key].view(torch.int32), before[key].view(torch.int32))
            for key in FROZEN
        )
    assert all(torch.equal(NETWORK.state_dict()[key], before[key]) for key in before)
    moved = modules_of(result)[0].state_dict()
    assert any(not torch.equal(moved[key], before[key]) for key in before)


def test_single_records_are_protected_with_a_frozen_part() -> None:
    """Gradients have no coordinates for what is frozen."""
    privacy = RecordPrivacy(clip_norm=0.5, epsilon=6.0, delta=1e-3)
    run = head(
        algorithm=FedAvg(local=SOLVER), privacy=privacy, schedule=FullParticipation(), rounds=2
    )
    setup = setup_of(run)
    assert setup is not None
    assert [plan.dimension for plan in setup.plans] == [15, 15]
    result = run.fit()
    assert result.epsilon <= 6.0
    for module in modules_of(result):
        assert all(
            torch.equal(module.state_dict()[key], NETWORK.state_dict()[key]) for key in FROZEN
        )


def test_a_frozen_part_gives_what_a_module_with_it_inside_gives() -> None:
    """Against the same rounds on the features of the frozen part, as data of their own."""
    module = network().double().requires_grad_(False)
    features = module[:3]

    def through(side: Any) -> dict[str, tuple[torch.Tensor, torch.Tensor]]:
        rows = zip(side.offsets[:-1].tolist(), side.offsets[1:].tolist(), strict=True)
        return {
            i: (features(side.x[a:b]), side.y[a:b])
            for i, (a, b) in zip(DATA.ids, rows, strict=True)
        }

    data = FederatedDataset.from_tensors(through(DATA.train), test=through(DATA.test), classes=3)
    for algorithm in (PMTL(lam=0.5, local=SOLVER), Ditto(local=SOLVER)):
        alone = trainer(
            algorithm=algorithm, data=data, model=copy.deepcopy(module[3]).requires_grad_(True)
        )
        whole = trainer(algorithm=algorithm, model=module, trainable=("3",))
        assert torch.allclose(whole.fit().personal, alone.fit().personal, rtol=1e-9, atol=1e-12)


def test_the_last_layer_reaches_the_logistic_regression_on_the_frozen_features() -> None:
    data = ragged_classification(1, largest=150, seed=5)
    x, y = data.train.x, data.train.y
    y[::4] = (y[::4] + 1) % 3  # so that no line separates the classes
    result = head(
        algorithm=FedAvg(local=LocalSGD(lr=3.0, momentum=0.95, steps=800, batch_size=None)),
        data=data,
        schedule=FullParticipation(),
        privacy=None,
        rounds=1,
        dtype="float64",
        device="cpu",
    ).fit()
    with torch.no_grad():
        features = copy.deepcopy(NETWORK[:3]).double()(x).numpy()
        found = torch.softmax(result.shared_model()(x), 1).numpy()
    exact = LogisticRegression(C=np.inf, tol=1e-10, max_iter=10_000).fit(features, y.numpy())
    np.testing.assert_allclose(found, exact.predict_proba(features), atol=1e-4)
    assert exact.score(features, y.numpy()) < 0.95


# Privacy


@pytest.mark.parametrize(
    ("settings", "size"),
    [
        ({}, 15),
        ({"algorithm": ALGORITHMS["fedrep"]}, 12),
        ({"algorithm": ALGORITHMS["ifca"]}, 45),
        ({"model": models.lora(NETWORK, rank=2), "trainable": None}, 2 * (5 + 4) + 2 * (4 + 3)),
    ],
)
def test_as_many_coordinates_are_noised_as_there_are_to_train_at_the_same_epsilon(
    settings: dict[str, Any], size: int
) -> None:
    privacy = ClientPrivacy(clip_norm=0.7, noise_multiplier=NOISE, delta=DELTA, source="secure")
    run = head(**{"algorithm": FedAvg(local=SOLVER), "privacy": privacy} | settings)
    setup = setup_of(run)
    assert setup is not None
    assert [plan.dimension for plan in setup.plans] == [size]
    result = run.fit()
    assert result.released["update"].value.shape == (size,)
    assert bool((result.released["update"].value != 0).all())
    assert result.epsilon == pytest.approx(epsilon(6), rel=1e-3)


def test_the_report_says_that_frozen_parameters_are_public_and_how_many_they_are() -> None:
    told = [line for line in head().fit().privacy.outside if "frozen" in line]
    assert len(told) == 1
    assert "(24 of 39 numbers)" in told[0]
    assert not any("frozen" in line for line in head(trainable=None).fit().privacy.outside)


# The stack


def test_frozen_parameters_are_one_tensor() -> None:
    stack = head().problem().executor.stack
    assert len({one[1].weight.data_ptr() for one in (stack.train_module, stack.eval_module)}) == 1
    assert stack.rows.shape == (1, 15)


# Splits of an algorithm's own, finetuning, new clients


def test_a_split_of_shared_and_private_parameters_is_one_of_what_moves() -> None:
    low = models.lora(NETWORK, rank=2)
    shared_a = FedRep(local=SOLVER, head=("*.lora_B",))  # A shared, B kept
    result = head(algorithm=shared_a, model=low, trainable=None).fit()
    layout, start = Layout.of(low), Layout.of(low).flatten(low)
    b = layout.places(("*.lora_B",), "test")
    assert result.shared is not None
    assert torch.equal(result.shared[b], start[b])
    assert not torch.equal(result.shared[~b], start[~b])
    assert not torch.equal(result.personal[0, b], result.personal[1, b])
    with pytest.raises(ConfigError, match=r"head.*so nothing is shared"):
        head(algorithm=FedRep(local=SOLVER)).fit()  # the last layer is all that moves


def test_finetuning_and_new_clients_train_what_moves() -> None:
    finetune = Finetune(kind="ewc", lam=0.1, local=SOLVER)
    result = head(algorithm=FedAvg(local=SOLVER), finetune=finetune).fit()
    assert all(
        torch.equal(m.state_dict()[k], NETWORK.state_dict()[k])
        for m in modules_of(result)
        for k in FROZEN
    )
    assert not torch.equal(result.personal[0], result.personal[1])
    new = ragged_classification(3, seed=9)
    remembered = personalize(result.shared_model(), new, finetune=finetune)
    merged = result.shared_model().requires_grad_(True)
    named = personalize(merged, new, finetune=finetune, trainable=("3.*",))
    assert remembered.personal.shape == named.personal.shape == (3, 15)
    assert torch.equal(remembered.personal, named.personal)
    own = remembered.model_for(new.ids[0]).state_dict()
    assert all(torch.equal(own[key], NETWORK.state_dict()[key]) for key in FROZEN)
    assert personalize(merged, new, finetune=finetune).personal.shape == (3, 39)


def test_new_clients_of_a_finished_run_train_what_moved(tmp_path: Path) -> None:
    low = models.lora(models.mlp(hidden=4), rank=2)
    run = head(algorithm=FedAvg(local=SOLVER), model=low, trainable=("*.lora_B",), folder=tmp_path)
    result, new = run.fit(), ragged_classification(3, seed=9)
    found = result.adapt(new)
    assert found.personal.shape == (3, 2 * 4 + 2 * 3)
    assert result.adaptation is not None
    read = Result.load(tmp_path, low).shared_model()
    for name, value in result.shared_model().state_dict().items():
        assert torch.equal(read.state_dict()[name], value)
    assert torch.equal(
        personalize(read, new, finetune=Finetune(local=result.adaptation["local"])).personal,
        found.personal,
    )


# Files


def test_the_file_of_the_model_is_complete_and_verified(tmp_path: Path) -> None:
    privacy = ClientPrivacy(clip_norm=0.7, noise_multiplier=NOISE, delta=DELTA, source="secure")
    head(algorithm=FedAvg(local=SOLVER), privacy=privacy, folder=tmp_path).fit()
    module = network()
    module.load_state_dict(load_file(tmp_path / "public/model.safetensors"))
    assert all(torch.equal(module.state_dict()[key], NETWORK.state_dict()[key]) for key in FROZEN)
    with safe_open(tmp_path / "public/model.safetensors", framework="pt") as file:
        assert json.loads(file.metadata()["frozen"]) == list(FROZEN)
    found = verify(tmp_path)
    assert found.fits
    assert next(c for c in found.checks if c.name == "model").verdict == CONFIRMED
    path = tmp_path / "private/outcome.json"
    outcome = json.loads(path.read_text())
    path.write_text(json.dumps(outcome | {"network": outcome["network"] | {"names": list(FROZEN)}}))
    assert (
        next(c for c in verify(tmp_path).checks if c.name == "model").verdict == OPEN
    )  # no vector of their length


def test_files_of_tied_weights_are_complete(tmp_path: Path) -> None:
    tied = nn.Sequential(nn.Linear(5, 5), nn.Tanh(), nn.Linear(5, 5), nn.Linear(5, 3))
    tied[2].weight = tied[0].weight
    head(algorithm=FedAvg(local=SOLVER), model=tied, trainable=("0", "3"), folder=tmp_path).fit()
    state = load_file(tmp_path / "public/model.safetensors")
    assert torch.equal(state["0.weight"], state["2.weight"])
    assert not torch.equal(state["0.weight"], tied[0].weight)
    assert torch.equal(state["2.bias"], tied[2].bias)
    copy.deepcopy(tied).load_state_dict(state)
    with safe_open(tmp_path / "public/model.safetensors", framework="pt") as file:
        assert json.loads(file.metadata()["frozen"]) == ["2.bias"]
        assert json.loads(file.metadata()["tied"]) == {"2.weight": "0.weight"}
        told = file.metadata()
    assert (
        next(check for check in verify(tmp_path).checks if check.name == "model").verdict
        == CONFIRMED
    )
    save_file(
        state | {"2.weight": state["2.weight"] + 1}, tmp_path / "public/model.safetensors", told
    )
    assert (
        next(check for check in verify(tmp_path).checks if check.name == "model").verdict == FAILED
    )


def test_an_interrupted_run_goes_on_and_another_frozen_part_is_refused(tmp_path: Path) -> None:
    check_resumed(head, tmp_path, 3)
    assert verify(tmp_path / "run").fits
    other = copy.deepcopy(NETWORK)
    with torch.no_grad():
        other[1].bias += 1.0
    moved = "trainable parameters, starting point, (execution, )?frozen parameters"  # stacks follow what moves
    for changed, named in (
        (head(trainable=("3.weight",)), moved),
        (head(trainable=None), moved),
        (head(model=other), "frozen parameters"),
    ):
        with pytest.raises(ResumeError, match=f"was written for other {named}"):
            replace(changed, folder=tmp_path / "run").fit(resume=True)
