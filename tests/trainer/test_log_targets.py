"""Real targets on the scale of logarithms: what is stored, and scores and predictions in the target's own units."""

import math
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
import torch
import yaml

from fedmtl import FedAvg, FullParticipation, LocalSGD, Result, Trainer, models
from fedmtl.cli.main import main
from fedmtl.data import read_table
from fedmtl.errors import ConfigError, DataError
from fedmtl.trainer.constants import own_constants

from ..algorithms.harness import problem_of

LOW, HIGH = 2.0, 5000.0
OPTIONS = {
    "client": "ward",
    "target": "cost",
    "bounds": {"age": [20, 100], "cost": [LOW, HIGH]},
    "target_scale": "log",
}


def costs(rows=120, seed=0):
    rng = np.random.default_rng(seed)
    age = rng.integers(20, 100, rows)
    return pd.DataFrame(
        {
            "ward": rng.choice(["a", "b", "c"], rows),
            "age": age,
            "cost": np.exp(2 + age / 40 + rng.normal(size=rows)).clip(0.01).round(2),
        }
    )


def in_log(values):
    return 2 * (np.log(np.clip(values, LOW, HIGH)) - math.log(LOW)) / math.log(HIGH / LOW) - 1


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    folder = tmp_path_factory.mktemp("log") / "run"
    data = read_table(costs(), **OPTIONS)
    settings = {
        "model": models.linear_regression(),
        "schedule": FullParticipation(),
        "privacy": None,
    }
    fedavg = FedAvg(local=LocalSGD(lr=0.1, epochs=3, batch_size=8))
    result = Trainer(
        data=data,
        algorithm=fedavg,
        rounds=10,
        metrics=["mae", "rmse"],
        folder=folder,
        progress=False,
        **settings,
    ).fit()
    return data, result, folder


def test_the_logarithm_of_the_range_is_stored_and_given_back():
    table = costs()
    table.loc[:2, "cost"] = [0.0, -7.0, 9e9]
    data = read_table(table, **OPTIONS)
    values = torch.cat([data.train.y, data.test.y])
    np.testing.assert_allclose(sorted(values.tolist()), sorted(in_log(table.cost)), atol=1e-6)
    given = sorted(data.in_units(values).tolist())
    np.testing.assert_allclose(given, sorted(table.cost.clip(LOW, HIGH)), rtol=1e-5)
    assert data.cut_targets == ((table.cost < LOW) | (table.cost > HIGH)).mean()
    assert (data.limit, data.domain.target, data.unit) == (1.0, 1.0, 1.0)


def test_scores_are_the_errors_in_units_of_predictions_by_hand(run):
    data, result, _ = run
    *slopes, constant = result.shared.double().numpy()
    for place, name in enumerate(data.ids):
        part = slice(*data.test.offsets[place : place + 2].tolist())
        outputs = data.test.x[part].double().numpy() @ np.array(slopes) + constant
        guess = LOW * (HIGH / LOW) ** ((np.clip(outputs, -1, 1) + 1) / 2)
        true = LOW * (HIGH / LOW) ** ((data.test.y[part].double().numpy() + 1) / 2)
        errors = np.abs(guess - true)
        assert result.by_client["mae"][name] == pytest.approx(errors.mean(), rel=1e-5)
        assert result.by_client["rmse"][name] == pytest.approx(
            math.sqrt((errors**2).mean()), rel=1e-5
        )
        assert result.by_client["mse"][name] == pytest.approx((errors**2).mean(), rel=1e-5)
        assert result.by_client["nmse"][name] == pytest.approx(
            (errors**2).mean() / true.var(), rel=1e-5
        )


def test_new_rows_have_predictions_in_units(run):
    _, result, folder = run
    slope, constant = result.shared.double().tolist()
    rows = pd.DataFrame({"age": [20, 60, 100]})
    outputs = np.clip(slope * np.array([-1.0, 0.0, 1.0]) + constant, -1, 1)
    expected = np.exp(math.log(LOW) + (outputs + 1) / 2 * math.log(HIGH / LOW))
    np.testing.assert_allclose(Result.load(folder).predictor()(rows), expected, rtol=1e-5)


def test_predictions_are_medians_and_the_constant_is_the_mean_of_logarithms():
    """The mean of a law whose logarithm is N(3, 1) is exp(3.5), its median exp(3)."""
    rng = np.random.default_rng(1)
    table = pd.DataFrame({"ward": ["a"] * 4000 + ["b"] * 4000, "age": rng.integers(20, 100, 8000)})
    table["cost"] = np.exp(3 + rng.normal(size=8000))
    data = read_table(table, **OPTIONS | {"bounds": {"age": [20, 100], "cost": [1e-2, 1e5]}})
    settings = {
        "model": models.linear_regression(),
        "schedule": FullParticipation(),
        "privacy": None,
    }
    fedavg = FedAvg(local=LocalSGD(lr=0.1, epochs=1, batch_size=64))
    result = Trainer(data=data, algorithm=fedavg, rounds=3, progress=False, **settings).fit()
    found = result.predictor()(pd.DataFrame({"age": [40, 80]}))
    np.testing.assert_allclose(found, math.exp(3), rtol=0.1)
    own = own_constants(problem_of(data, model=models.linear_regression()))
    for place, name in enumerate(data.ids):
        sides = [data.in_units(part.y[slice(*part.offsets[place : place + 2].tolist())]).numpy()
                 for part in (data.train, data.test)]  # fmt: skip
        expected = ((sides[1] - np.exp(np.log(sides[0]).mean())) ** 2).mean()
        assert own[name] == pytest.approx(expected, rel=1e-4)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"target_scale": "sqrt"}, "data.target_scale is 'sqrt'; accepted: 'linear', 'log'"),
        (
            {"bounds": {"age": [20, 100]}},
            "which needs a range of the target above 0, such as 'data.bounds={cost: ",
        ),
        (
            {"bounds": {"age": [20, 100], "cost": [0, 10]}},
            "targets below its lower end are cut there",
        ),
        (
            {"labels": ["1", "2"], "bounds": {"age": [20, 100]}},
            "which needs a range of the target above 0",
        ),
    ],
)
def test_a_scale_without_a_range_above_zero_is_refused(changes, message):
    with pytest.raises(ConfigError, match=message):
        read_table(costs(), **OPTIONS | changes)


def test_a_dataset_on_a_scale_of_logarithms_has_a_range(run):
    data, _, _ = run
    from dataclasses import replace

    for changes in ({"target_range": None}, {"target_range": (0.0, 1.0)}, {"target_scale": "root"}):
        with pytest.raises(DataError, match="target_scale is"):
            replace(data, **changes)


def test_a_check_says_that_a_target_is_skewed_and_drafts_its_scale(tmp_path, capsys, monkeypatch):
    costs().to_csv(tmp_path / "t.csv", index=False)
    monkeypatch.chdir(tmp_path)
    words = [
        "data=table",
        "data.path=t.csv",
        "data.client=ward",
        "data.target=cost",
        "privacy.epsilon=8",
    ]
    assert main(["check", *words]) == 0
    assert (
        "; its mean is far above its median: data.target_scale=log may fit\n"
        in capsys.readouterr().out
    )
    assert main(["check", *words, "data.target_scale=log"]) == 0
    assert "may fit" not in capsys.readouterr().out
    draft = yaml.safe_load(Path("experiment/t_2.yaml").read_text())["data"]
    assert (draft["target_scale"], draft["classes"]) == ("log", None)
    assert main(["--config-dir", ".", "experiment=t_2", "hydra.run.dir=run", "rounds=1"]) == 0
