"""The shape of what a run publishes does not come from private records: it is given, or a run with noise is refused."""

import dataclasses
import math

import numpy as np
import pandas as pd
import pytest

from fedmtl import ClientPrivacy, RecordPrivacy, models
from fedmtl.data import Domain, FederatedDataset, read_table
from fedmtl.errors import ConfigError
from fedmtl.privacy.audit import Effort
from fedmtl.trainer.audit.independence import public_shape
from fedmtl.trainer.audit.suite import audit_trainer
from tests import small
from tests.test_cli import command

UNITS = {unit: unit(clip_norm=1.0, epsilon=1.0, source="secure") for unit in (ClientPrivacy, RecordPrivacy)}


def table(row=None, column="y", value=None):
    """Three clients with two cities and three classes; one cell may be another."""
    made = pd.DataFrame({"who": list("abc") * 6, "city": list("XY") * 9, "n": range(18), "y": [0, 1, 2] * 6})
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
        given = read_table(data, client="who", target="y", bounds={"city": ["X", "Y", "Z"], "n": [0, 20]}, classes=5)
        assert shapes(given, UNITS[unit]) == [(5, 4), (5,)]


ROWS = {name: (np.ones((6, 2), dtype="float32"), np.arange(6) % 3) for name in "abc"}
NUMBER = {"client": "who", "target": "y", "features": ["n"]}
REFUSED = {
    "classes": (lambda: read_table(table(), **NUMBER), "the number of classes came from the records"),
    "floating classes": (
        lambda: read_table(table().astype({"y": float}), **NUMBER),
        "the number of classes came from the records",
    ),
    "ranges": (
        lambda: read_table(table(), **NUMBER, classes=None),
        r"no public range is declared for 'n', 'y'\. Give them: 'data\.bounds=\{n:",
    ),
    "tensors": (lambda: ROWS, r"FederatedDataset\.from_tensors\(clients, classes=K\) in Python"),
    "a dataset": (lambda: FederatedDataset.from_tensors(ROWS, test=ROWS), r"from_tensors\(clients, classes=K\)"),
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


def test_shapes_that_are_given_are_taken_with_noise():
    assert shapes(FederatedDataset.from_tensors(ROWS, classes=3), UNITS[ClientPrivacy]) == [(3, 2), (3,)]
    data = read_table(table(), **NUMBER, classes=None, bounds={"n": [0, 20], "y": [0, 2]})
    assert shapes(data, UNITS[ClientPrivacy], model=models.linear_regression()) == [(1, 1), (1,)]


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
    run = small.trainer(data=broken(**fields), privacy=UNITS[ClientPrivacy])
    found = [one for one in audit_trainer(run, effort=Effort(checks=("independence",))) if one.refuted]
    assert [one.check for one in found] == ["independence: public shape"]
    assert found[0].detail.startswith(f"{fact} of the data depends on the records of client 'a'")
