"""The shape of what a run publishes does not come from private records: it is given, or a run with noise is refused."""

import dataclasses
import math

import numpy as np
import pandas as pd
import pytest

from fedmtl import ClientPrivacy, FedAvg, FullParticipation, LocalSGD, RecordPrivacy, Trainer, models
from fedmtl.data import Domain, FederatedDataset, read_table
from fedmtl.errors import ConfigError
from fedmtl.privacy.audit import Effort
from fedmtl.trainer.audit.independence import public_shape
from fedmtl.trainer.audit.suite import audit_trainer
from tests.test_cli import command

UNITS = {unit: unit(clip_norm=1.0, epsilon=1.0, source="secure") for unit in (ClientPrivacy, RecordPrivacy)}


def table(row=None, column="y", value=None):
    """Three clients with two cities and three classes; one cell may be another."""
    made = pd.DataFrame({"who": list("abc") * 6, "city": list("XY") * 9, "n": range(18), "y": [0, 1, 2] * 6})
    if row is not None:
        made.loc[row, column] = value
    return made


def shapes(data, privacy, **options):
    given = {"model": models.softmax_regression(), "privacy": privacy, "rounds": 1, "progress": False} | options
    schedule = FullParticipation()
    result = Trainer(algorithm=FedAvg(local=LocalSGD(lr=0.1)), data=data, schedule=schedule, **given).fit()
    return [tuple(parameter.shape) for parameter in result.shared_model().parameters()]


@pytest.mark.parametrize("unit", UNITS)
@pytest.mark.parametrize("cell", [(4, "y", 3), (4, "city", "Z")])
def test_one_cell_does_not_decide_the_shape_of_a_private_model(unit, cell):
    for data in (table(), table(*cell)):
        inferred = read_table(data, client="who", target="y", one_hot=["city"])
        with pytest.raises(
            ConfigError, match=r"the number of classes and the categories of 'city' came from the records"
        ):
            shapes(inferred, UNITS[unit])
        given = read_table(data, client="who", target="y", bounds={"city": ["X", "Y", "Z"], "n": [0, 20]}, classes=5)
        assert shapes(given, UNITS[unit]) == [(5, 4), (5,)]


def test_a_cell_that_makes_a_regression_of_classes_is_refused_alike():
    for data in (table(), table().astype({"y": float})):
        with pytest.raises(ConfigError, match="the number of classes came from the records"):
            shapes(read_table(data, client="who", target="y", features=["n"]), UNITS[ClientPrivacy])


def test_a_table_without_public_ranges_is_refused_with_noise_only():
    plain = {"client": "who", "target": "y", "features": ["n"], "classes": None}
    data = read_table(table(), **plain)
    with pytest.raises(ConfigError, match=r"no public range is declared for 'n', 'y'\. Give them: 'data\.bounds=\{n:"):
        shapes(data, UNITS[ClientPrivacy])
    linear = {"model": models.linear_regression()}
    assert shapes(data, None, **linear) == [(1, 1), (1,)]
    assert shapes(read_table(table(), bounds={"n": [0, 20], "y": [0, 2]}, **plain), UNITS[ClientPrivacy], **linear) == [
        (1, 1),
        (1,),
    ]


def test_without_noise_classes_and_categories_may_come_from_the_records():
    data = read_table(table(), client="who", target="y", one_hot=["city"])
    for privacy in (None, ClientPrivacy(clip_norm=1.0, epsilon=math.inf)):
        assert shapes(data, privacy) == [(3, 3), (3,)]
    with pytest.raises(ConfigError, match="the number of classes"):  # the budgets take the place of the epsilon
        shapes(data, ClientPrivacy(clip_norm=1.0, epsilon=math.inf), epsilons=[1.0])


def test_classes_of_tensors_are_given_too():
    rows = {name: (np.ones((6, 2), dtype="float32"), np.arange(6) % 3) for name in "abc"}
    for data in (rows, FederatedDataset.from_tensors(rows), FederatedDataset.from_tensors(rows, test=rows)):
        with pytest.raises(ConfigError, match=r"FederatedDataset\.from_tensors\(clients, classes=K\) in Python"):
            shapes(data, UNITS[ClientPrivacy])
    assert shapes(FederatedDataset.from_tensors(rows, classes=3), UNITS[ClientPrivacy]) == [(3, 2), (3,)]


def test_the_line_of_the_refusal_is_taken_by_the_command(tmp_path):
    table().to_csv(tmp_path / "t.csv", index=False)
    words = ["data=table", "data.path=t.csv", "data.client=who", "data.target=y", "data.one_hot=[city]"]
    words += ["schedule=full", "model=softmax_regression", "rounds=1", "baselines=[]", "finetune=none"]
    refused = command(*words, cwd=tmp_path)
    assert refused.returncode == 2
    assert "data.classes=K 'data.bounds={city: [A, B, ...], n: [LOW, HIGH]}' on the command line" in refused.stderr
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
        object.__setattr__(self, "domain", Domain(math.inf, float(self.train.x.norm(dim=1).max()), math.inf))
        super().__post_init__(verify)


@pytest.mark.parametrize(("broken", "fact"), [(OfItsLabels, "spec"), (OfItsRows, "domain")])
def test_the_audit_finds_data_that_take_a_public_fact_from_their_records(broken, fact):
    sound = read_table(table(), client="who", target="y", bounds={"city": ["X", "Y"], "n": [0, 20]}, classes=3)
    fields = {field.name: getattr(sound, field.name) for field in dataclasses.fields(sound)}
    assert not public_shape(sound).refuted
    settings = {"model": models.softmax_regression(), "schedule": FullParticipation(), "rounds": 1, "progress": False}
    run = Trainer(algorithm=FedAvg(), data=broken(**fields), privacy=UNITS[ClientPrivacy], **settings)
    found = [one for one in audit_trainer(run, effort=Effort(checks=("independence",))) if one.refuted]
    assert [one.check for one in found] == ["independence: public shape"]
    assert found[0].detail.startswith(f"{fact} of the data depends on the records of client 'a'")
