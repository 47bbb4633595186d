"""Models as programs in ONNX, which need the packages of the extra ``export``; others: test_export."""

import numpy as np
import pandas as pd
import pytest

from fedmtl import models
from fedmtl.data import RowBound
from fedmtl.models import BoundedInputs
from fedmtl.trainer.coding import Predictor
from fedmtl.trainer.export import write_program
from tests.trainer.test_export import (
    NEW,
    ROWS,
    check_classes,
    check_real,
    computed,
    table,
    trained,
)


@pytest.fixture
def onnx(tmp_path):
    for name in ("onnx", "onnxscript", "onnxruntime"):
        pytest.importorskip(name)
    return tmp_path / "model.onnx"


def test_a_program_of_onnx_predicts_what_the_predictor_does(onnx):
    check_real(onnx, trained(models.mlp(hidden=16)).predictor("anna"))


def test_a_program_of_classes_has_their_numbers_and_probabilities(onnx):
    check_classes(onnx, models.softmax_regression())


def test_a_program_of_a_bound_on_records_and_of_adapters_keeps_both(onnx):
    plain = trained(models.lora(models.mlp(hidden=6), rank=2)).predictor()
    predict = Predictor(BoundedInputs(plain.module, RowBound(0.7, "l1")).eval(), plain.coding)
    write_program(predict, onnx)
    np.testing.assert_allclose(computed(onnx, ROWS)[0]["prediction"], predict(NEW), rtol=1e-5)
    assert not np.allclose(predict(NEW), plain(NEW), rtol=1e-3)


def test_dates_missing_values_and_logarithms_are_coded_in_the_program(onnx):
    rng = np.random.default_rng(0)
    days = rng.integers(0, 24_000, 60).astype("datetime64[D]")  # to 2035
    rows = (
        table(60)
        .drop(columns="planned")
        .assign(seen=days.astype(str), days=lambda t: 2 ** t["days"])
    )
    rows.loc[::3, "age"] = np.nan
    rows.loc[1::3, "kind"] = None
    rows.loc[2::3, "seen"] = None
    bounds = {
        "age": [0.1, 99.7],
        "kind": ["x", "y", "*"],
        "seen": ["1980-03-01", "2024-02-29"],
        "days": [0.5, 1e9],
    }
    options = {
        "path": rows,
        "bounds": bounds,
        "missing": "indicator",
        "target_scale": "log",
        "classes": None,
    }
    predict = trained(models.mlp(hidden=16), **options).predictor("anna")
    write_program(predict, onnx)
    some = np.arange("1979-12-30", "1980-04-10", dtype="datetime64[D]")
    for first in ("1999-12-20", "2000-02-20", "2000-12-20", "2023-12-20", "2024-02-20"):
        some = np.concatenate([some, np.arange(20) + np.datetime64(first)])
    new = pd.DataFrame({"age": 40.0, "kind": "x", "seen": some.astype(str)})
    given = np.column_stack(
        [np.full(len(some), 40.0), np.zeros(len(some)), some.astype(float) + 0.75]
    )
    gaps = pd.DataFrame(
        {"age": [np.nan, 40.0, 40.0], "kind": ["x", None, "q"], "seen": ["2000-01-01"] * 2 + [None]}
    )
    new = pd.concat([new, gaps])
    given = np.concatenate([given, [[np.nan, 0, 10957], [40, np.nan, 10957], [40, 2, np.nan]]])
    found, notes = computed(onnx, given)
    np.testing.assert_allclose(found["prediction"], predict(new), rtol=1e-5)
    assert [sorted(column) for column in notes["columns"]] == [
        ["missing", "name", "range"],
        ["categories", "missing", "name"],
        ["missing", "name", "period"],
    ]
    assert found["prediction"].min() > 0.5
    wrong, _ = computed(onnx, np.array([[np.inf, 0, 0], [40.0, 3, 0], [40.0, 0, -np.inf]]))
    assert np.isnan(wrong["prediction"]).all()
