"""Bounds on features and shapes of models are public: they are given, hold everywhere, and do not come from records."""

import dataclasses
import itertools
import json
import math

import numpy as np
import pandas as pd
import pytest
import torch

from fedmtl import (
    MPMTL,
    PPDMTL,
    AsyncLearner,
    ClientPrivacy,
    PeerToPeer,
    PoissonClocks,
    RecordPrivacy,
    models,
)
from fedmtl.algorithms.local_fit import LocalFit
from fedmtl.audit import Effort
from fedmtl.audit.independence import public_shape
from fedmtl.audit.run_suite import audit_trainer
from fedmtl.data import Domain, FederatedDataset, RowBound, read_table
from fedmtl.errors import ConfigError
from fedmtl.graphs import Ring
from fedmtl.trainer.tensor_files import read_tensors
from tests import small
from tests.test_cli import command

TRUE = np.array([1.0, -2.0, 0.5])


def dataset(norm=7.0, domain=None):
    """y = x . TRUE with rows of norm ``norm``; half of the test rows are half as long."""
    rng, sides = np.random.default_rng(0), ({}, {})
    for i in range(4):
        for side, count in zip(sides, (60, 20), strict=True):
            x = rng.normal(size=(count, 3))
            x *= norm / np.linalg.norm(x, axis=1, keepdims=True)
            if side is sides[1]:
                x[::2] /= 2
            side[f"c{i}"] = x, x @ TRUE
    data = FederatedDataset.from_tensors(sides[0], test=sides[1], classes=None)
    return dataclasses.replace(data, domain=domain)


METHODS = {
    "mp_mtl": lambda **k: MPMTL(loss="squared", lam=1e-4, ridge=1e-6, **k),
    "pp_dmtl": lambda **k: PPDMTL(loss="squared", lam=1e-4, tau=1e-6, **k),
    "p2p": lambda **k: PeerToPeer(graph=Ring(), loss="squared", mu=100.0, lam=1e-6, **k),
}


ACTIVATIONS = {"schedule": PoissonClocks(per_client=40), "rounds": 10_000}


def trainer(algorithm, data, privacy=None, **options):
    settings = {"rounds": 30} if isinstance(algorithm, (MPMTL, LocalFit)) else ACTIVATIONS
    model = models.linear_regression(bias=False)
    return small.trainer(
        algorithm=algorithm, data=data, model=model, privacy=privacy, **settings | options
    )


def protection(name):
    """Privacy of the unit that the method protects."""
    kind = ClientPrivacy if name == "mp_mtl" else RecordPrivacy
    return kind(clip_norm=1.0, epsilon=5.0, delta=1e-5)


@pytest.mark.parametrize("name", METHODS)
def test_without_privacy_and_stated_bound_no_row_is_shortened(name):
    result = trainer(METHODS[name](), dataset()).fit()
    assert result.final["nmse"] < 1e-2
    assert result.bounds.records is None
    assert result.records.shortened == {}
    assert "scaled down" not in result.summary()
    x = torch.from_numpy(np.array([[30.0, 0.0, 0.0]]))
    assert result.model_for("c1")(x).item() == pytest.approx(30.0, rel=0.1)


@pytest.mark.parametrize("name", METHODS)
def test_with_privacy_a_bound_must_be_stated(name):
    needed = r"state no public bounds .* algorithm\.feature_norm=1\.0 .*Domain\(l1="
    for algorithm in (METHODS[name](), METHODS[name](feature_norm="auto")):
        with pytest.raises(ConfigError, match=needed) as e:
            trainer(algorithm, dataset(), protection(name)).fit()
        assert algorithm.__class__.__name__ in str(e.value)
    with pytest.raises(
        ConfigError, match=r"feature_norm is None; with privacy .*algorithm\.feature_norm=1\.0"
    ):
        trainer(METHODS[name](feature_norm=None), dataset(), protection(name)).fit()


@pytest.mark.parametrize("name", METHODS)
def test_auto_takes_the_bound_that_the_data_state(name, tmp_path):
    data = dataset(norm=0.9, domain=Domain(l1=2.0, l2=0.9, target=3.0))
    result = trainer(METHODS[name](), data, protection(name), folder=tmp_path / "run").fit()
    assert result.chosen["feature_norm"] == 0.9
    assert result.chosen["target"] == 3.0
    assert result.bounds.records == RowBound(0.9)
    assert result.records.shortened == {"train": 0.0, "test": 0.0}


LIMIT = 3.5
BOUNDED = {name: make(feature_norm=LIMIT) for name, make in METHODS.items()} | {
    "async": AsyncLearner(loss="squared", feature_norm=LIMIT, target=20.0, kappa=20.0, reg=1e-6),
    "local": LocalFit(loss="squared", feature_norm=LIMIT, ridge=1e-6),
}


@pytest.mark.parametrize(
    ("name", "private"), [*itertools.product([*METHODS, "async"], [False, True]), ("local", False)]
)
def test_models_are_scored_and_served_on_rows_bounded_as_in_training(name, private, tmp_path):
    data, order = dataset(norm=7.0), 1 if name == "async" else 2
    result = trainer(
        BOUNDED[name], data, protection(name) if private else None, folder=tmp_path / "run"
    ).fit()
    for place, client in enumerate(data.ids):
        own = data.subset([client]).test
        x, y = own.x.numpy(), own.y.numpy()
        bounded = x * np.minimum(1.0, LIMIT / np.linalg.norm(x, ord=order, axis=1, keepdims=True))
        expected = bounded @ result.personal[place].numpy()
        with torch.no_grad():
            served = result.model_for(client)(own.x).numpy().ravel()
        np.testing.assert_allclose(served, expected, rtol=1e-9, atol=1e-12)
        assert result.personal_accuracy[client] == pytest.approx(
            np.mean((expected - y) ** 2), rel=1e-9
        )
    beyond = np.mean(np.linalg.norm(data.test.x.numpy(), ord=order, axis=1) > LIMIT * (1 + 1e-6))
    assert result.records.shortened == {"train": 1.0, "test": pytest.approx(beyond)}
    assert (
        f"100.0% (train), {beyond:.1%} (test) scaled down to L{order} norm 3.5" in result.summary()
    )
    private_result = json.loads((tmp_path / "run/private/result.json").read_text())
    assert private_result["shortened_test"] == pytest.approx(beyond)
    for file in (tmp_path / "run/public").rglob("*.json"):
        assert "shortened" not in file.read_text()
    files = list((tmp_path / "run").glob("p*/model*.safetensors"))
    assert files
    for file in files:
        _, metadata = read_tensors(file)
        assert json.loads(metadata["bound"]) == {"bound": LIMIT, "norm": f"l{order}"}
    if result.shared is not None:
        fresh = models.linear_regression(bias=False)(data.spec).double()
        state, metadata = read_tensors(tmp_path / "run/public/model.safetensors")
        fresh.load_state_dict(state)
        served = models.BoundedInputs(fresh, RowBound(**json.loads(metadata["bound"])))
        assert torch.equal(served(data.test.x), result.shared_model()(data.test.x))


@pytest.mark.parametrize("norm", ["l1", "l2"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_a_row_bound_holds_and_leaves_shorter_rows_as_they_are(norm, dtype):
    x = torch.tensor(
        [[3.0, 4.0], [0.3, 0.4], [0.0, 0.0], [3e38, -3e38], [math.inf, 1.0], [math.nan, 0.0]],
        dtype=dtype,
    )
    bound = RowBound(1.0, norm)
    out, order = bound(x), int(norm[1])
    assert out.dtype == dtype
    assert torch.equal(out[1:3], x[1:3])
    assert torch.equal(out[4:], torch.zeros(2, 2, dtype=dtype))
    assert bool((out.double().norm(p=order, dim=1) <= 1 + 1e-6).all())
    expected = (
        torch.tensor([[0.6, 0.8]], dtype=torch.float64) * (5 / 7 if norm == "l1" else 1) * (1.0)
    )
    torch.testing.assert_close(out[:1].double(), expected, rtol=1e-6, atol=0)
    assert bound.exceeded(x).tolist() == [True, False, False, True, True, True]
    images = x.reshape(6, 1, 2, 1)
    assert torch.equal(bound(images).reshape(6, 2), out)


def test_targets_of_the_squared_loss_are_cut_off_at_their_bound():
    data = dataset(norm=7.0)
    for target, largest in ((2.0, 2.0), (None, float(data.train.y.abs().max()))):
        algorithm = MPMTL(loss="squared", feature_norm=7.0, target=target)
        run = trainer(algorithm, data)
        assert max(float(y.abs().max()) for y in algorithm.data(run.problem()).y) == pytest.approx(
            largest
        )


UNITS = {
    unit: unit(clip_norm=1.0, epsilon=1.0, source="secure")
    for unit in (ClientPrivacy, RecordPrivacy)
}


def table(row=None, column="y", value=None):
    """Three clients with two cities and three classes; one cell may be another."""
    made = pd.DataFrame(
        {"who": list("abc") * 6, "city": list("XY") * 9, "n": range(18), "y": [0, 1, 2] * 6}
    )
    if row is not None:
        made.loc[row, column] = value
    return made


def shapes(data, privacy, **options):
    result = small.trainer(data=data, privacy=privacy, **options).fit()
    return [tuple(parameter.shape) for parameter in result.shared_model().parameters()]


@pytest.mark.parametrize("unit", UNITS)
@pytest.mark.parametrize("cell", [(4, "y", 3), (4, "city", "Z")])
def test_one_cell_does_not_decide_the_shape_of_a_private_model(unit, cell):
    for data in (table(), table(*cell)):
        inferred = read_table(data, client="who", target="y", one_hot=["city"])
        said = r"the number of classes and the categories of 'city' came from the records"
        with pytest.raises(ConfigError, match=said):
            shapes(inferred, UNITS[unit])
        given = read_table(
            data,
            client="who",
            target="y",
            bounds={"city": ["X", "Y", "Z"], "n": [0, 20]},
            classes=5,
        )
        assert shapes(given, UNITS[unit]) == [(5, 4), (5,)]


ROWS = {name: (np.ones((6, 2), dtype="float32"), np.arange(6) % 3) for name in "abc"}
NUMBER = {"client": "who", "target": "y", "features": ["n"]}
REFUSED = {
    "classes": (
        lambda: read_table(table(), **NUMBER),
        "the number of classes came from the records",
    ),
    "floating classes": (
        lambda: read_table(table().astype({"y": float}), **NUMBER),
        "the number of classes came from the records",
    ),
    "ranges": (
        lambda: read_table(table(), **NUMBER, classes=None),
        r"no public range is declared for 'n', 'y'\. Give them: 'data\.bounds=\{n:",
    ),
    "tensors": (lambda: ROWS, r"FederatedDataset\.from_tensors\(clients, classes=K\) in Python"),
    "a dataset": (
        lambda: FederatedDataset.from_tensors(ROWS, test=ROWS),
        r"from_tensors\(clients, classes=K\)",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_a_shape_that_the_records_decide_is_refused_with_noise_only(case):
    make, said = REFUSED[case]
    options = {"model": models.linear_regression()} if case == "ranges" else {}
    with pytest.raises(ConfigError, match=said):
        shapes(make(), UNITS[ClientPrivacy], **options)
    without_noise = ClientPrivacy(clip_norm=1.0, epsilon=math.inf)
    assert shapes(make(), None, **options) == shapes(make(), without_noise, **options)
    with pytest.raises(ConfigError, match=said):  # the budgets take the place of the epsilon
        shapes(make(), without_noise, epsilons=[1.0], **options)


def test_the_line_of_the_refusal_is_taken_by_the_command(tmp_path):
    table().to_csv(tmp_path / "t.csv", index=False)
    words = [
        "data=table",
        "data.path=t.csv",
        "data.client=who",
        "data.target=y",
        "data.one_hot=[city]",
    ]
    words += [
        "schedule=full",
        "model=softmax_regression",
        "rounds=1",
        "baselines=[]",
        "finetune=none",
    ]
    refused = command(*words, cwd=tmp_path)
    assert refused.returncode == 2
    assert (
        "data.classes=K 'data.bounds={city: [A, B, ...], n: [LOW, HIGH]}' on the command line"
        in refused.stderr
    )
    done = command(*words, "data.classes=3", "data.bounds={city: [X, Y], n: [0, 20]}", cwd=tmp_path)
    assert done.returncode == 0, done.stderr


@dataclasses.dataclass(frozen=True, eq=False)
class OfItsLabels(FederatedDataset):
    """Reads the number of classes off its records and does not say so."""

    def __post_init__(self, verify):
        object.__setattr__(self, "classes", int(self.train.y.max()) + 1)
        super().__post_init__(verify)


@dataclasses.dataclass(frozen=True, eq=False)
class OfItsRows(FederatedDataset):
    """Has the largest entry of its records as its domain."""

    def __post_init__(self, verify):
        object.__setattr__(
            self, "domain", Domain(math.inf, float(self.train.x.norm(dim=1).max()), math.inf)
        )
        super().__post_init__(verify)


@pytest.mark.parametrize(("broken", "fact"), [(OfItsLabels, "spec"), (OfItsRows, "domain")])
def test_the_audit_finds_data_that_take_a_public_fact_from_their_records(broken, fact):
    sound = read_table(
        table(), client="who", target="y", bounds={"city": ["X", "Y"], "n": [0, 20]}, classes=3
    )
    fields = {field.name: getattr(sound, field.name) for field in dataclasses.fields(sound)}
    assert not public_shape(sound).refuted
    run = small.trainer(data=broken(**fields), privacy=UNITS[ClientPrivacy])
    found = [
        one for one in audit_trainer(run, effort=Effort(checks=("independence",))) if one.refuted
    ]
    assert [one.check for one in found] == ["independence: public shape"]
    assert found[0].detail.startswith(f"{fact} of the data depends on the records of client 'a'")
