"""Models of tokens, of several inputs and of dictionaries; models that cannot be stacked."""

import copy
import dataclasses
import json

import numpy as np
import pandas as pd
import pytest
import torch
from torch import nn
from torch.nn import functional as F

from fedmtl import (
    PMTL,
    FedAvg,
    Finetune,
    Local,
    LocalSGD,
    PoissonSampling,
    Result,
    models,
)
from fedmtl.data import Cast, FederatedDataset, Integers, read_leaf, read_table
from fedmtl.errors import ConfigError, DataError, ModelError
from fedmtl.local import Execution
from fedmtl.models import MeanEmbedding, NamedInputs
from fedmtl.privacy import ClientPrivacy
from tests import small
from tests.data.rows import leaf
from tests.helpers import ragged_classification


def sentences(clients: int = 4) -> FederatedDataset:
    """Sequences of tokens 1 to 20 filled up with 0; the class is the parity of the first."""
    generator = np.random.default_rng(0)
    rows = {}
    for i in range(clients):
        x = generator.integers(1, 21, size=(9 + i, 6))
        x[:, 4:] = np.where(generator.random((len(x), 2)) < 0.5, 0, x[:, 4:])
        rows[f"user-{i}"] = x, x[:, 0] % 2
    return FederatedDataset.from_tensors(rows, classes=2, transform=Integers(), name="sentences")


def fit(data, model, *, algorithm=None, **options):
    return small.trainer(
        algorithm=algorithm or Local(local=LocalSGD(lr=0.5, batch_size=4)),
        data=data,
        model=model,
        **options,
    ).fit()


def check_step(data: FederatedDataset, network, inputs=None, **options) -> Result:
    """Check the models of all clients after one step of gradient descent, on all of a client's training examples, of
    the module that ``network`` makes; return the run."""
    torch.manual_seed(0)
    module = network()
    inputs = inputs or (lambda module, own: module(data.train.x[own]))
    run = fit(data, module, algorithm=Local(local=LocalSGD(lr=0.5, batch_size=None)), **options)
    for client in range(len(data)):
        net, own = (
            copy.deepcopy(module).double(),
            slice(*data.train.offsets[client : client + 2].tolist()),
        )
        F.cross_entropy(inputs(net, own), data.train.y[own]).backward()
        expected = torch.cat([(p - 0.5 * p.grad).flatten() for p in net.parameters()])
        torch.testing.assert_close(run.personal[client], expected, rtol=1e-8, atol=1e-10)
    return run


def test_tokens_stay_whole_numbers_and_train_an_embedding():
    data = sentences()
    assert data.spec.integer
    assert data.gather("train", torch.arange(2), dtype=torch.float64)[0].dtype == torch.int64
    run = check_step(
        data, lambda: models.mean_embedding(vocabulary=21, width=5, hidden=4)(data.spec)
    )
    x = data.train.x[:3]
    model = run.model_for("user-1")
    assert model(x).shape == (3, 2)
    padded = torch.cat([x, torch.zeros(3, 2, dtype=torch.int64)], 1)
    torch.testing.assert_close(model(padded), model(x))  # padding changes nothing
    assert MeanEmbedding(5, 3, 0)(torch.zeros(2, 4, dtype=torch.int64)).abs().sum() == 0


class Two(nn.Module):
    """An image and a token, by name."""

    def __init__(self) -> None:
        super().__init__()
        self.image, self.kind, self.out = nn.Linear(12, 3), nn.Embedding(7, 3), nn.Linear(3, 2)

    def forward(self, picture: torch.Tensor, kind: torch.Tensor) -> torch.Tensor:
        assert kind.dtype == torch.int64
        return self.out(torch.tanh(self.image(picture.flatten(1)) + self.kind(kind)))


class OfDictionary(Two):
    def forward(self, inputs):
        return super().forward(inputs["picture"], inputs["kind"])


def pairs(clients: int = 3):
    generator = np.random.default_rng(1)
    return {
        f"c{i}": (
            {
                "picture": generator.normal(size=(8 + i, 3, 4)),
                "kind": generator.integers(0, 7, size=8 + i),
            },
            generator.integers(0, 2, size=8 + i),
        )
        for i in range(clients)
    }


@pytest.mark.parametrize("kind", [Two, OfDictionary])
def test_several_inputs_go_to_the_model_by_name_or_as_a_dictionary(kind):
    rows = pairs()
    data = FederatedDataset.from_tensors(rows, test=rows, name="pairs")

    def outputs(module, own):
        x = data.train.x[own].double()
        inputs = x[:, :12].reshape(-1, 3, 4), x[:, 12].long()
        return module(*inputs) if kind is Two else module({"picture": inputs[0], "kind": inputs[1]})

    model = check_step(data, kind, outputs).model_for("c1")
    assert isinstance(model, NamedInputs)
    given = {name: torch.as_tensor(value) for name, value in rows["c1"][0].items()}
    assert model(model.pack(given).double()).shape == (9, 2)


@pytest.mark.parametrize("kind", [Two, OfDictionary])
def test_a_model_of_several_inputs_is_loaded_from_its_folder(kind, tmp_path):
    rows = pairs()
    data = FederatedDataset.from_tensors(rows, test=rows, name="pairs")
    local = Local(local=LocalSGD(lr=0.5, batch_size=None))
    found = fit(data, kind(), algorithm=local, rounds=1, folder=tmp_path)
    x = data.train.x[:5].to(found.personal)
    for model in (kind(), NamedInputs(kind(), data.transform)):
        again = Result.load(tmp_path, model=model)
        torch.testing.assert_close(again.personal, found.personal, rtol=0, atol=0)
        loaded = again.model_for("c1")
        torch.testing.assert_close(loaded(x), found.model_for("c1")(x), rtol=0, atol=0)
    with pytest.raises(
        ModelError, match="takes input1, input2, but the data have the inputs picture, kind"
    ):
        Result.load(tmp_path, model=nn.Bilinear(12, 1, 2))
    fit(data, models.mlp(hidden=3))  # a model of one row takes the inputs side by side


class Items(torch.utils.data.Dataset):
    def __len__(self) -> int:
        return 6

    def __getitem__(self, i: int):
        return {"picture": torch.full((3, 4), float(i)), "kind": i}, i % 2


def test_a_torch_dataset_of_dictionaries():
    data = FederatedDataset.from_tensors({"a": Items(), "b": Items()})
    assert data.spec.inputs == (("picture", (3, 4), "real"), ("kind", (), "integer"))
    x = data.train.x
    assert torch.equal(x[:, 0], x[:, 12])


def changed(client: str, x):
    rows = pairs()
    rows[client] = x, rows[client][1]
    return rows


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        (
            changed("c1", np.zeros((9, 3))),
            r"client 'c1', field 'x' is no mapping; accepted: one of picture \(3, 4\)",
        ),
        (
            changed("c1", {"picture": np.zeros((9, 3, 4)), "sort": np.zeros(9, int)}),
            r"client 'c1', field 'x' has the inputs picture .*, sort .*; accepted: picture .*, kind",
        ),
        (
            changed("c1", {"picture": np.zeros((9, 3, 4)), "kind": np.zeros(8, int)}),
            r"client 'c1', field 'x' has inputs of different lengths: {'picture': 9, 'kind': 8}",
        ),
        (
            changed("c1", {"picture": np.zeros((9, 3, 4)), "kind": np.full(9, 1 << 24)}),
            r"client 'c1', field 'x\[kind\]' holds a whole number of 2\^24 or more",
        ),
    ],
)
def test_inputs_that_do_not_agree_are_refused(rows, message):
    with pytest.raises(DataError, match=message):
        FederatedDataset.from_tensors(rows)


class Other(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(2, 2)

    def forward(self, a, b):
        return self.layer(a + b)


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.lstm, self.out = (
            nn.Embedding(21, 4),
            nn.LSTM(4, 3, batch_first=True),
            nn.Linear(3, 2),
        )

    def forward(self, x):
        return self.out(self.lstm(self.embedding(x))[0][:, -1])


class Choosing(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.out = nn.Embedding(21, 2)

    def forward(self, x):
        return self.out(x).sum(1) if bool(x.sum() > 0) else self.out(x).mean(1)


def test_models_that_do_not_fit_are_refused_in_one_line():
    rows = pairs()
    with pytest.raises(
        ModelError, match=r"forward of Other takes a, b, but the data have the inputs picture, kind"
    ):
        fit(FederatedDataset.from_tensors(rows, test=rows), Other())
    with pytest.raises(
        ModelError,
        match=r"mean_embedding needs sequences of tokens \(length,\), not \(2,\) of real",
    ):
        models.mean_embedding(vocabulary=5)(
            FederatedDataset.from_tensors({"a": (np.zeros((3, 2)), [0, 1, 1])}).spec
        )
    for option in ("max_norm", "sparse", "scale_grad_by_freq"):
        layer = nn.Embedding(21, 2, **{option: True})
        with pytest.raises(ModelError, match=rf"Layer '0' is Embedding with {option}="):
            fit(sentences(), nn.Sequential(layer, nn.Flatten(), nn.Linear(12, 2)))
    with pytest.raises(
        ModelError, match=r"cannot be computed for several clients at once .*; use layers that"
    ) as error:
        fit(sentences(), Choosing(), execution=Execution(chunk=2))
    assert "\n" not in str(error.value)


def test_without_a_batching_rule_clients_are_computed_one_after_another(caplog):
    check_step(sentences(), Choosing, execution=Execution(chunk=1, processes=2))
    for network in (Recurrent, Choosing):
        caplog.clear()
        check_step(sentences(), network)
        assert "clients are computed one after another, since" in caplog.text


def test_whole_numbers_stay_whole_where_an_embedding_looks_them_up():
    data = sentences()
    floats = dataclasses.replace(data, transform=Cast())
    torch.manual_seed(0)
    net = nn.Sequential(nn.Embedding(21, 2), nn.Flatten(), nn.Linear(12, 2))
    assert torch.equal(fit(floats, net).personal, fit(data, net).personal)
    fit(floats, nn.Sequential(nn.Linear(6, 2)))  # takes the same numbers as floats


def test_tables_of_tokens():
    frame = pd.DataFrame(
        {"user": list("aabbbb"), "a": [1, 2, 3, 4, 5, 6], "b": 0, "label": [0, 1] * 3}
    )
    data = read_table(frame, client="user", target="label", classes=2, integers=True)
    assert data.spec.integer
    assert data.train.x.dtype == torch.int64
    frame["a"] = [1, 2, 1.5, 4, 5, 6]
    with pytest.raises(
        DataError,
        match=r"client 'b', example \d+, field 'x' holds 1\.5; with features that are integers",
    ):
        read_table(frame, client="user", target="label", classes=2, integers=True)


def test_leaf_json_of_tokens(tmp_path):
    content = leaf({"a": ([[1, 2], [3, 0], [5, 6]], [0, 1, 1]), "b": ([[4, 4], [2.0, 1]], [1, 0])})
    (tmp_path / "x.json").write_text(json.dumps(content))
    data = read_leaf(tmp_path / "x.json", integers=True)
    assert data.spec.integer
    assert data.train.x.dtype == torch.int64
    content["user_data"]["b"]["x"][1][1] = 0.5
    (tmp_path / "x.json").write_text(json.dumps(content))
    with pytest.raises(
        DataError,
        match=r"client 'b', example 1, field 'x' holds 0\.5; with features that are integers",
    ):
        read_leaf(tmp_path / "x.json", integers=True)


def test_embeddings_of_real_numbers_are_refused_with_the_way_out():
    data = FederatedDataset.from_tensors({"a": (np.zeros((4, 2)), [0, 1, 1, 0])})
    with pytest.raises(
        ModelError,
        match=r"embeddings take whole numbers, which data keep with transform=Integers\(\)",
    ):
        fit(data, nn.Sequential(nn.Embedding(5, 3), nn.Flatten(), nn.Linear(6, 2)))
    with pytest.raises(ModelError, match=r"fails on a batch of whole numbers of shape \(2, 6\)"):
        fit(sentences(), nn.Linear(6, 2))


def test_a_loss_that_does_not_take_the_outputs_is_refused_before_training():
    for loss in ("mse", "binary_cross_entropy"):
        with pytest.raises(
            ConfigError,
            match=rf"loss is '{loss}', which does not take outputs of shape \(3,\) with",
        ):
            fit(ragged_classification(3), nn.Linear(5, 3), loss=loss)


def test_a_baseline_that_cannot_train_the_model_is_refused_before_the_run(tmp_path):
    net = nn.Sequential(nn.Flatten(), nn.Linear(5, 3))
    options = {
        "algorithm": FedAvg(local=LocalSGD(lr=0.5)),
        "baselines": ["fedrep"],
        "folder": tmp_path / "run",
    }
    with pytest.raises(
        ConfigError, match=r"baselines has 'fedrep', which cannot be run here: FedRep\.head is"
    ):
        fit(ragged_classification(3), net, **options)
    assert not list(tmp_path.rglob("ledger*"))


# What a trainer is given


class Pairs(Items):
    def __getitem__(self, i: int):
        return super().__getitem__(i)[0]["picture"].flatten(), i % 2


def test_names_and_mappings_become_data():
    assert small.trainer(data="synthetic_tasks", model="linear_regression").data.name.startswith(
        "synthetic tasks"
    )
    data = {"a": (np.ones((6, 12), np.float32), [0, 1] * 3), "b": Pairs()}
    made = small.trainer(data=data, model="mlp")
    assert made.data.ids == ("a", "b")
    assert made.fit().data_name == "data"


def test_data_are_read_after_the_other_settings_are_checked():
    calls = []

    def read():
        calls.append("read")
        return "synthetic_tasks"

    with pytest.raises(ConfigError, match=r"Trainer\.eval_every is 0"):
        small.trainer(data=read, eval_every=0)
    assert not calls
    assert small.trainer(data=read, model="linear_regression").data.name.startswith("synthetic")
    assert calls == ["read"]
    for mistaken in (read_table, FederatedDataset, len):
        with pytest.raises(ConfigError, match=r"data is .*; give a FederatedDataset"):
            small.trainer(data=mistaken)


def test_a_model_by_name_is_the_factory_of_that_name():
    named, called, made = (
        small.trainer(model=one).fit() for one in ("mlp", models.mlp, models.mlp())
    )
    assert torch.equal(named.personal, made.personal)
    assert torch.equal(called.personal, made.personal)


def test_what_is_no_solver_and_no_optimizer_of_the_server():
    """Of Local, which checks nothing of its own."""
    with pytest.raises(
        ConfigError, match=r"local is <class 'torch.optim.sgd.SGD'>; give a local solver, such as"
    ):
        small.trainer(algorithm=Local(local=torch.optim.SGD))
    for given in ("adam", {"lr": 0.1}, torch.optim.Adam):
        with pytest.raises(
            ConfigError, match=r"server_optimizer is .*; give None or a ServerOptimizer, such as"
        ):
            small.trainer(algorithm=FedAvg(server_optimizer=given))


def test_numbers_that_an_embedding_has_no_row_for_are_refused_before_training(tmp_path):
    def network(rows: int) -> nn.Module:
        return nn.Sequential(nn.Embedding(rows, 3), nn.Flatten(), nn.Linear(18, 2))

    said = r"sentences has numbers from 0 to 20, and an embedding of the model has no row for some of them"
    with pytest.raises(ModelError, match=said):
        fit(sentences(), network(20), folder=tmp_path / "run")
    assert not (tmp_path / "run").exists()
    assert fit(sentences(), network(21)).metrics["loss"] > 0


class FirstOrSecond(nn.Module):
    """Looks up the sum of two places, of which only one is above 0 in any example."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(10, 2)

    def forward(self, x):
        return self.table(x.sum(1))


def test_embeddings_of_what_a_model_computes_are_tried_on_the_examples_themselves():
    x = torch.tensor(
        [[9, 0], [0, 9]] * 6
    )  # the largest value at every place is (9, 9), which nobody has
    data = FederatedDataset.from_tensors(
        dict.fromkeys(("a", "b"), (x, x[:, 0] // 9)), transform=Integers()
    )
    assert fit(data, FirstOrSecond()).metrics["loss"] > 0


def test_settings_take_numbers_of_numpy_as_pythons_own(tmp_path):
    def run(whole, real):
        return small.trainer(
            algorithm=PMTL(lam=real(0.5), local=LocalSGD(lr=real(0.25), batch_size=whole(4))),
            model=models.mlp(hidden=whole(3)),
            schedule=PoissonSampling(cohort=whole(3)),
            privacy=ClientPrivacy(clip_norm=real(0.5), noise_multiplier=real(1.0)),
            rounds=whole(2),
            seed=whole(3),
            replicates=whole(1),
            finetune=Finetune(kind="mean", lam=real(0.5), local=LocalSGD(lr=real(0.25))),
            folder=tmp_path / "run",
        )

    first, again = run(np.int64, np.float32).fit(), run(int, float).fit(resume=True)
    assert torch.equal(first.personal, again.personal)
    assert type(run(np.int64, np.float32).seed) is type(run(np.int64, np.float32).rounds) is int


@pytest.mark.parametrize(
    ("model", "message"),
    [
        (lambda: nn.Linear(4, 3), "cannot be called with the data's DataSpec"),
        (lambda spec: nn.Linear, "returned type; it must return an nn.Module"),
        (lambda spec: None, "returned NoneType"),
        (
            lambda spec: nn.Linear(spec.shape[1], 3),
            "cannot be made for data of DataSpec.* index out of range",
        ),
    ],
)
def test_a_function_that_makes_no_model_is_refused(model, message):
    with pytest.raises((ConfigError, ModelError), match=message):
        fit(ragged_classification(3), model)
