"""Models of tokens, of several inputs and of dictionaries; models that cannot be stacked."""

import copy
import dataclasses
import json

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional as F

from fedmtl import (
    PMTL,
    AsyncLearner,
    FedAvg,
    Finetune,
    Local,
    LocalSGD,
    PoissonClocks,
    PoissonSampling,
    Result,
    Trainer,
    load_data,
    models,
)
from fedmtl.data import Cast, FederatedDataset, Integers, read_leaf
from fedmtl.errors import ConfigError, DataError, ModelError
from fedmtl.local import Execution
from fedmtl.models import MeanEmbedding, NamedInputs
from fedmtl.privacy import ClientPrivacy, RecordPrivacy
from tests import small
from tests.data.rows import leaf
from tests.helpers import ragged_classification
from tests.test_cli import command


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
        algorithm=algorithm or Local(local=LocalSGD(lr=0.5, batch_size=4)), data=data, model=model, **options
    ).fit()


def by_hand(module: nn.Module, data: FederatedDataset, client: int, inputs) -> torch.Tensor:
    """One step of plain gradient descent on all of a client's training examples."""
    module = copy.deepcopy(module).double().train()
    own = slice(int(data.train.offsets[client]), int(data.train.offsets[client + 1]))
    loss = F.cross_entropy(inputs(module, own), data.train.y[own])
    gradients = torch.autograd.grad(loss, list(module.parameters()))
    with torch.no_grad():
        return torch.cat([(p - 0.5 * g).reshape(-1) for p, g in zip(module.parameters(), gradients, strict=True)])


def check_step(data: FederatedDataset, network, inputs=None, **options) -> Result:
    """Check the models of all clients after one such step of the module that ``network`` makes; the run."""
    torch.manual_seed(0)
    module = network()
    inputs = inputs or (lambda module, own: module(data.train.x[own]))
    run = fit(data, module, algorithm=Local(local=LocalSGD(lr=0.5, batch_size=None)), **options)
    for client in range(len(data)):
        expected = by_hand(module, data, client, inputs)
        torch.testing.assert_close(run.personal[client], expected, rtol=1e-8, atol=1e-10)
    return run


def test_tokens_stay_whole_numbers_and_train_an_embedding():
    data = sentences()
    assert data.spec.integer
    assert data.gather("train", torch.arange(2), dtype=torch.float64)[0].dtype == torch.int64
    run = check_step(data, lambda: models.mean_embedding(vocabulary=21, width=5, hidden=4)(data.spec))
    x = data.train.x[:3]
    model = run.model_for("user-1")
    assert model(x).shape == (3, 2)
    padded = torch.cat([x, torch.zeros(3, 2, dtype=torch.int64)], 1)
    torch.testing.assert_close(model(padded), model(x))  # padding changes nothing
    assert MeanEmbedding(5, 3, 0)(torch.zeros(2, 4, dtype=torch.int64)).abs().sum() == 0


def test_tokens_train_with_gradients_of_single_records():
    run = fit(
        sentences(),
        models.mean_embedding(vocabulary=21, width=5),
        algorithm=FedAvg(local=LocalSGD(lr=0.1, batch_size=4)),
        privacy=RecordPrivacy(clip_norm=1.0, epsilon=8.0, delta=1e-2),
        rounds=2,
    )
    assert run.epsilon <= 8
    assert torch.isfinite(run.personal).all()


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
            {"picture": generator.normal(size=(8 + i, 3, 4)), "kind": generator.integers(0, 7, size=8 + i)},
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
        (changed("c1", np.zeros((9, 3))), r"client 'c1', field 'x' is no mapping; accepted: one of picture \(3, 4\)"),
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
        self.embedding, self.lstm, self.out = nn.Embedding(21, 4), nn.LSTM(4, 3, batch_first=True), nn.Linear(3, 2)

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
    with pytest.raises(ModelError, match=r"forward of Other takes a, b, but the data have the inputs picture, kind"):
        fit(FederatedDataset.from_tensors(rows, test=rows), Other())
    with pytest.raises(ModelError, match=r"mean_embedding needs sequences of tokens \(length,\), not \(2,\) of real"):
        models.mean_embedding(vocabulary=5)(FederatedDataset.from_tensors({"a": (np.zeros((3, 2)), [0, 1, 1])}).spec)
    for option in ({"max_norm": 1.0}, {"sparse": True}, {"scale_grad_by_freq": True}):
        layer = nn.Embedding(21, 2, **option)
        with pytest.raises(ModelError, match=rf"Layer '0' is Embedding with {next(iter(option))}="):
            fit(sentences(), nn.Sequential(layer, nn.Flatten(), nn.Linear(12, 2)))
    with pytest.raises(
        ModelError, match=r"cannot be computed for several clients at once .*; use layers that"
    ) as error:
        fit(sentences(), Choosing(), execution=Execution(processes=1))
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
    torch.testing.assert_close(fit(floats, net).personal, fit(data, net).personal, rtol=0, atol=0)
    dense = nn.Sequential(nn.Linear(6, 2))
    fit(floats, dense)  # takes the same numbers as floats


def test_the_command_trains_an_embedding_on_tokens_of_a_file(tmp_path):
    lines = ["user,a,b,c,label"]
    for i in range(40):
        lines.append(f"u{i % 5},{i % 7},{(3 * i) % 7},0,{i % 2}")
    (tmp_path / "x.csv").write_text("\n".join(lines))
    words = ("data=table", "data.path=x.csv", "data.client=user", "data.target=label", "data.integers=true")
    more = (
        "data.classes=2",
        "model=mean_embedding",
        "model.vocabulary=7",
        "schedule.cohort=3",
        "rounds=2",
        "hydra.run.dir=run",
    )
    done = command(*words, *more, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert "5 clients, 2 rounds" in done.stdout
    (tmp_path / "x.csv").write_text("\n".join([*lines[:3], "u3,1.5,2,0,1", *lines[3:]]))
    refused = command(*words, *more[:-1], "hydra.run.dir=other", cwd=tmp_path)
    assert refused.returncode == 2
    said = "x.csv: client 'u3', line 4, column 'a' holds 1.5; accepted: with integers=True a whole number below 2^24."
    assert said in refused.stderr


def test_leaf_json_of_tokens(tmp_path):
    content = leaf({"a": ([[1, 2], [3, 0], [5, 6]], [0, 1, 1]), "b": ([[4, 4], [2.0, 1]], [1, 0])})
    (tmp_path / "x.json").write_text(json.dumps(content))
    data = read_leaf(tmp_path / "x.json", integers=True)
    assert data.spec.integer
    assert data.train.x.dtype == torch.int64
    content["user_data"]["b"]["x"][1][1] = 0.5
    (tmp_path / "x.json").write_text(json.dumps(content))
    with pytest.raises(DataError, match=r"client 'b', example 1, field 'x' holds 0\.5; with integers=True every"):
        read_leaf(tmp_path / "x.json", integers=True)


def test_embeddings_of_real_numbers_are_refused_with_the_way_out():
    data = FederatedDataset.from_tensors({"a": (np.zeros((4, 2)), [0, 1, 1, 0])})
    with pytest.raises(ModelError, match=r"embeddings take whole numbers, which data keep with transform=Integers\(\)"):
        fit(data, nn.Sequential(nn.Embedding(5, 3), nn.Flatten(), nn.Linear(6, 2)))
    with pytest.raises(ModelError, match=r"fails on a batch of whole numbers of shape \(2, 6\)"):
        fit(sentences(), nn.Linear(6, 2))


@pytest.mark.parametrize("loss", ["mse", "half_mse", "binary_cross_entropy"])
def test_a_loss_that_does_not_take_the_outputs_is_refused_before_training(loss):
    rows = {"a": (np.ones((4, 2), dtype=np.float32), [0, 1, 2, 0])}
    with pytest.raises(ConfigError, match=rf"loss is '{loss}', which does not take outputs of shape \(3,\) with"):
        fit(FederatedDataset.from_tensors(rows), nn.Linear(2, 3), loss=loss)


def test_a_baseline_that_cannot_train_the_model_is_refused_before_the_run(tmp_path):
    rows = {client: (np.ones((4, 2), dtype=np.float32), [0, 1, 2, 0]) for client in "ab"}
    data, net = FederatedDataset.from_tensors(rows), nn.Sequential(nn.Flatten(), nn.Linear(2, 3))
    options = {"algorithm": FedAvg(local=LocalSGD(lr=0.5)), "baselines": ["fedrep"], "folder": tmp_path / "run"}
    with pytest.raises(ConfigError, match=r"baselines has 'fedrep', which cannot be run here: FedRep\.head is"):
        fit(data, net, **options)
    assert not list(tmp_path.rglob("ledger*"))


# What a trainer is given


def of_plain_words(**settings):
    return small.trainer(**{"data": ragged_classification(4), "dtype": "float32"} | settings)


class Pairs(Items):
    def __getitem__(self, i: int):
        return super().__getitem__(i)[0]["picture"].flatten(), i % 2


@pytest.mark.parametrize("data", [{"a": (np.ones((6, 12), np.float32), [0, 1] * 3), "b": Pairs()}, "synthetic_tasks"])
def test_names_and_mappings_become_data(data):
    made = of_plain_words(data=data, model="linear_regression" if data == "synthetic_tasks" else "mlp")
    assert isinstance(made.data, FederatedDataset)
    if isinstance(data, dict):
        assert made.data.ids == ("a", "b")
        assert made.fit().data_name == "data"


def test_a_model_by_name_is_the_factory_of_that_name():
    named, called, made = (of_plain_words(model=one).fit() for one in ("mlp", models.mlp, models.mlp()))
    assert torch.equal(named.personal, made.personal)
    assert torch.equal(called.personal, made.personal)


def test_what_is_no_solver_and_no_optimizer_of_the_server():
    """Of Local, which checks nothing of its own."""
    with pytest.raises(ConfigError, match=r"local is <class 'torch.optim.sgd.SGD'>; give a local solver, such as"):
        of_plain_words(algorithm=Local(local=torch.optim.SGD))
    for given in ("adam", {"lr": 0.1}, torch.optim.Adam):
        with pytest.raises(ConfigError, match=r"server_optimizer is .*; give None or a ServerOptimizer, such as"):
            of_plain_words(algorithm=FedAvg(server_optimizer=given))


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
    x = torch.tensor([[9, 0], [0, 9]] * 6)  # the largest value at every place is (9, 9), which nobody has
    data = FederatedDataset.from_tensors(dict.fromkeys(("a", "b"), (x, x[:, 0] // 9)), transform=Integers())
    assert fit(data, FirstOrSecond()).metrics["loss"] > 0


def test_settings_take_numbers_of_numpy_as_pythons_own(tmp_path):
    whole, real = np.int64, np.float32
    settings = {
        "algorithm": PMTL(lam=real(0.5), local=LocalSGD(lr=real(0.25), epochs=whole(1), batch_size=np.int32(4))),
        "data": ragged_classification(6),
        "model": models.mlp(hidden=whole(3)),
        "schedule": PoissonSampling(cohort=whole(3)),
        "privacy": ClientPrivacy(clip_norm=real(0.5), noise_multiplier=real(1.0), delta=np.float64(1e-5)),
        "rounds": whole(2),
        "seed": whole(3),
        "eval_every": whole(1),
        "replicates": whole(1),
        "finetune": Finetune(kind="mean", lam=real(0.5), local=LocalSGD(lr=real(0.25))),
        "folder": tmp_path / "run",
        "progress": False,
    }
    first = Trainer(**settings).fit()
    plain = {"rounds": 2, "seed": 3, "model": models.mlp(hidden=3), "schedule": PoissonSampling(cohort=3)}
    plain["algorithm"] = PMTL(lam=0.5, local=LocalSGD(lr=0.25, epochs=1, batch_size=4))
    again = Trainer(**settings | plain).fit(resume=True)
    assert torch.equal(first.personal, again.personal)
    assert type(Trainer(**settings).seed) is type(Trainer(**settings).rounds) is int


def test_repetitions_and_budgets_take_numbers_of_numpy():
    agents = load_data("synthetic_agents", agents=4, features=3)
    bands = (
        small.trainer(
            algorithm=AsyncLearner(),
            data=agents,
            model=models.linear_regression(),
            schedule=PoissonClocks(per_client=np.int64(1)),
            privacy=RecordPrivacy(clip_norm=1.0, epsilon=1.0),
            rounds=10,
            replicates=np.int64(2),
            epsilons=[np.float32(1.0), np.int64(3)],
        )
        .fit()
        .bands
    )
    assert [row["budget"] for row in bands] == [1.0, 3.0]


@pytest.mark.parametrize(
    ("model", "message"),
    [
        (lambda: nn.Linear(4, 3), "cannot be called with the data's DataSpec"),
        (lambda spec, width: nn.Linear(4, width), "missing a required argument: 'width'"),
        (lambda spec: nn.Linear, "returned type; it must return an nn.Module"),
        (lambda spec: None, "returned NoneType"),
        (
            lambda spec: nn.Linear(spec.shape[1], 3),
            "The model cannot be made for data of DataSpec.* index out of range",
        ),
    ],
)
def test_a_function_that_makes_no_model_is_refused(model, message):
    with pytest.raises((ConfigError, ModelError), match=message):
        fit(ragged_classification(3), model)
