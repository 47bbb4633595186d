"""Runs with Huber's loss, that of a quantile and that of counts: fits of scikit-learn, predictions, refusals."""

import math
import re
from dataclasses import replace

import numpy as np
import pandas as pd
import pytest
import torch
from sklearn.linear_model import PoissonRegressor, QuantileRegressor
from sklearn.metrics import mean_pinball_loss
from torch import nn

from fedmtl import (
    PMTL,
    ClientPrivacy,
    FedAvg,
    Finetune,
    FullParticipation,
    Local,
    LocalSGD,
    PrivatePrior,
    RecordPrivacy,
    Result,
    Trainer,
    load_predictor,
    models,
)
from fedmtl.data import FederatedDataset, read_table
from fedmtl.errors import ConfigError, DataError
from fedmtl.report import report
from tests.helpers import regression

SLOPES = {  # derivatives of the losses by the output, by hand
    "huber:0.2": lambda f, y: torch.clamp(f - y, -0.2, 0.2),
    "quantile:0.9": lambda f, y: torch.where(y > f, -0.9, 0.1).double(),
    "poisson": lambda f, y: f.exp() - y,
}


def counts(rows=200, seed=0):
    rng = np.random.default_rng(seed)
    age = rng.integers(20, 100, rows)
    visits = rng.poisson(np.exp(1 + (age - 60) / 50)).clip(max=30)
    return pd.DataFrame({"ward": rng.choice(["a", "b"], rows), "age": age, "visits": visits})


COUNTED = {"client": "ward", "target": "visits", "bounds": {"age": [20, 100], "visits": [0, 30]}}


def run(data, **settings):
    usual = {
        "model": models.linear_regression(),
        "schedule": FullParticipation(),
        "privacy": None,
        "progress": False,
    }
    return Trainer(data=data, **usual | settings).fit()


def alone(data, loss, **solver):
    settings = {"lr": 5.0, "steps": 400, "batch_size": None} | solver
    return run(
        data, algorithm=Local(local=LocalSGD(**settings)), loss=loss, rounds=1, dtype="float64"
    )


def rows(data, place):
    part = slice(*data.train.offsets[place : place + 2].tolist())
    return data.train.x[part].double().numpy(), data.train.y[part].double().numpy()


def test_counts_are_fitted_as_scikit_learn_does_and_predicted_in_units(tmp_path):
    data = read_table(counts(), **COUNTED)
    algorithm = Local(local=LocalSGD(lr=5.0, steps=400, batch_size=None))
    run(
        data,
        algorithm=algorithm,
        loss="poisson",
        rounds=1,
        dtype="float64",
        folder=tmp_path / "run",
        metrics=["mae"],
    )
    result = Result.load(tmp_path / "run")
    for place, name in enumerate(data.ids):
        x, y = rows(data, place)
        fit = PoissonRegressor(alpha=0, tol=1e-10).fit(x, 15 * (y + 1))
        found = result.predictor(name)(pd.DataFrame({"age": [20, 50, 90]}))
        means = fit.predict(np.array([[-1.0], [-0.25], [0.75]]))
        np.testing.assert_allclose(found, means, rtol=1e-4)
        part = slice(*data.test.offsets[place : place + 2].tolist())
        errors = np.minimum(fit.predict(data.test.x[part].double().numpy()), 30) - 15 * (
            data.test.y[part].numpy() + 1
        )
        assert result.by_client["mae"][name] == pytest.approx(np.abs(errors).mean(), rel=1e-4)
        assert result.by_client["mse"][name] == pytest.approx((errors**2).mean(), rel=1e-4)
        logs = np.log(fit.predict(data.test.x[part].double().numpy()) / 30)
        losses = np.exp(logs) - (data.test.y[part].numpy() + 1) / 2 * logs
        assert result.by_client["loss"][name] == pytest.approx(losses.mean(), rel=1e-4)


def test_the_public_part_alone_predicts_counts_and_not_their_logarithms(tmp_path):
    data = read_table(counts(), **COUNTED, features=["age"])
    fedavg = FedAvg(local=LocalSGD(lr=0.1, steps=5, batch_size=None))
    made = run(data, algorithm=fedavg, loss="poisson", rounds=2, folder=tmp_path)
    age = np.array([20, 50, 90])
    slope, constant = made.shared.double().tolist()
    expected = 30 * np.exp(slope * (2 * (age - 20) / 80 - 1) + constant)
    found = load_predictor(tmp_path / "public")(pd.DataFrame({"age": age}))
    np.testing.assert_allclose(found, expected.clip(0, 30), rtol=1e-5)


def test_raw_counts_have_the_same_fit_and_models_that_predict_means():
    table = counts()
    made = {
        name: (own[["age"]].to_numpy() / 40 - 1.5, own.visits.to_numpy(float))
        for name, own in table.groupby("ward")
    }
    data = FederatedDataset.from_tensors(made, classes=None)
    result = alone(data, "poisson", lr=0.2)
    x, y = rows(data, 0)
    fit = PoissonRegressor(alpha=0, tol=1e-10).fit(x, y)
    with torch.no_grad():
        found = result.model_for("a")(torch.tensor([[0.5]], dtype=torch.float64))
    assert float(found) == pytest.approx(float(fit.predict([[0.5]])[0]), rel=1e-3)


def test_a_quantile_is_that_of_scikit_learn():
    data = read_table(counts(400), **COUNTED)
    result = alone(data, "quantile:0.8", lr=0.01, steps=1000)
    for place, name in enumerate(data.ids):
        x, y = rows(data, place)
        y = y + np.linspace(0, 1e-9, len(y))
        fit = QuantileRegressor(quantile=0.8, alpha=0, solver="highs").fit(x, y)
        slope, constant = result.personal[place].tolist()
        errors = [y - fit.predict(x), y - (slope * x[:, 0] + constant)]
        best, reached = (np.maximum(0.8 * each, -0.2 * each).mean() for each in errors)
        assert best <= reached < 1.002 * best
        assert name in result.by_client["loss"]
    assert "worse than predicting a constant" not in result.summary()


@pytest.mark.parametrize("scale", ["linear", "log"])
def test_models_of_a_quantile_are_judged_by_its_pinball_loss_in_units(scale, tmp_path):
    bounds = {"age": [20, 100], "visits": [1, 40]}
    table = counts().assign(visits=lambda t: t.visits + 1)
    data = read_table(table, **COUNTED | {"bounds": bounds, "target_scale": scale})
    fedavg = FedAvg(local=LocalSGD(lr=0.05, steps=20, batch_size=None))
    options = {"algorithm": fedavg, "loss": "quantile:0.6", "rounds": 3, "baselines": ["local"]}
    run(data, metrics=["mse", "pinball"], folder=tmp_path / "run", **options)
    result = Result.load(tmp_path / "run")
    assert result.metric == "pinball"
    for place, name in enumerate(data.ids):
        (_, own), (_, y) = (
            (
                part.x,
                data.in_units(part.y[slice(*part.offsets[place : place + 2].tolist())]).numpy(),
            )
            for part in (data.train, data.test)
        )
        part = slice(*data.test.offsets[place : place + 2].tolist())
        ages = pd.DataFrame({"age": 20 + 40 * (data.test.x[part, 0].numpy() + 1)})
        found = result.predictor(name)(ages)
        expected = mean_pinball_loss(y, found, alpha=0.6)
        assert result.by_client["pinball"][name] == pytest.approx(expected, rel=1e-4)
        assert result.by_client["mse"][name] == pytest.approx(((y - found) ** 2).mean(), rel=1e-4)
        constants = [
            mean_pinball_loss(own, np.full(len(own), c), alpha=0.6) for c in np.unique(own)
        ]
        best = np.unique(own)[np.argmin(constants)]
        constant = mean_pinball_loss(y, np.full(len(y), best), alpha=0.6)
        assert result.records.constants[name] == pytest.approx(constant, rel=1e-4)
    summary = result.summary()
    assert "nMSE" not in summary
    assert "nmse" not in result.final
    assert "the mean error (pinball) is" in summary
    made = report([tmp_path / "run"])
    rows = pd.read_csv(next(file for file in made.files if file.suffix == ".csv"))
    assert rows["pinball"].iloc[0] == pytest.approx(result.final["pinball"])
    assert "| pinball |" in next(file for file in made.files if file.suffix == ".md").read_text()
    for loss, metric, said in (
        ("quantile:0.6", "nmse", "'nmse', which is of means"),
        ("mse", "pinball", "'pinball', which is for loss=quantile:LEVEL; accepted: loss, mse"),
    ):
        with pytest.raises(ConfigError, match=said):
            run(data, **options | {"loss": loss, "metrics": [metric]})


def test_who_is_worse_than_a_constant_quantile_is_told():
    data = read_table(counts(), **COUNTED)
    local = Local(local=LocalSGD(lr=1e-6, steps=1, batch_size=None))
    result = run(data, algorithm=local, loss="quantile:0.9", rounds=1)
    assert "than the quantile of their own training targets" in result.summary()


@pytest.mark.parametrize("loss", ["huber:0.2", "quantile:0.9", "poisson"])
def test_local_is_one_thing_whatever_the_algorithm_and_needs_no_step_size(loss):
    data = read_table(counts(), **COUNTED)
    algorithms = (
        FedAvg(local=LocalSGD(lr=1e-6, steps=1, batch_size=None)),
        PMTL(local=LocalSGD(lr=0.3, steps=9, batch_size=None)),
    )
    one, two = (
        run(data, algorithm=algorithm, loss=loss, rounds=1, baselines=["local"], dtype="float64")
        for algorithm in algorithms
    )
    own = one.baselines["local"]
    assert torch.equal(own.personal, two.baselines["local"].personal)
    # there is one feature, so that a fit without a penalty is as good but for chance
    solved = alone(data, loss, lr=2.0)
    assert own.metrics[own.metric] < 1.05 * solved.metrics[own.metric]
    assert own.metrics[own.metric] < 0.95 * np.mean(list(one.records.constants.values()))


@pytest.mark.parametrize(("loss", "what"), [("poisson", "mean"), ("quantile:0.9", "quantile")])
def test_a_local_model_that_is_worse_than_a_constant_by_the_mean_is_no_measure(loss, what):
    data = read_table(counts(), **COUNTED)
    near, far = (
        run(data, algorithm=FedAvg(local=solver), loss=loss, rounds=1,
            baselines=[Local(local=solver)])
        for solver in (
            LocalSGD(lr=0.5, steps=300, batch_size=None), LocalSGD(lr=1e-6, steps=1, batch_size=None)
        )
    )  # fmt: skip
    assert "need not be better than alone" not in near.summary()
    said = " ".join(far.summary().split())
    error = np.mean(list(far.baselines["local"].by_client[far.metric].values()))
    constant = np.mean(list(far.records.constants.values()))
    assert error > 1.1 * constant
    found = re.search(
        rf"local has a mean error of (\S+), and the {what} of each client's own training targets "
        r"one of (\S+): who is better than local by the mean need not be better than alone", said,
    )  # fmt: skip
    assert float(found[1]) == pytest.approx(error, rel=1e-2)
    assert float(found[2]) == pytest.approx(constant, rel=1e-2)


@pytest.mark.parametrize("loss", SLOPES)
def test_records_are_protected_by_the_clipped_gradients_of_the_loss(loss):
    data = regression(4, examples=6)
    data = replace(data, train=replace(data.train, y=2 * data.train.y.abs()))
    torch.manual_seed(0)
    model = nn.Linear(4, 1).double()
    start = torch.cat([p.detach().flatten() for p in model.parameters()])
    privacy = RecordPrivacy(clip_norm=0.4, epsilon=math.inf)
    fedavg = FedAvg(local=LocalSGD(lr=0.1, steps=1, batch_size=None))
    result = run(
        data, algorithm=fedavg, loss=loss, model=model, privacy=privacy, rounds=1, dtype="float64"
    )
    steps = []
    cut = 0
    for k in range(4):
        records = data.subset([data.ids[k]]).train
        x = torch.cat([records.x, torch.ones(len(records.x), 1)], 1).double()
        gradients = SLOPES[loss](x @ start, records.y.reshape(-1).double())[:, None] * x
        shares = (0.4 / gradients.norm(dim=1)).clamp(max=1)
        cut += int((shares < 1).sum())
        steps.append(-0.1 * (shares[:, None] * gradients).mean(0))
    assert cut
    torch.testing.assert_close(
        result.shared, start + torch.stack(steps).mean(0), rtol=1e-5, atol=1e-7
    )


@pytest.mark.parametrize("loss", SLOPES)
def test_runs_with_noise_finetune_compare_and_adapt(loss):
    data = read_table(counts(), **COUNTED)
    fedavg = FedAvg(local=LocalSGD(lr=0.1, steps=5, batch_size=None))
    result = run(data, algorithm=fedavg, loss=loss, rounds=2, privacy=ClientPrivacy(clip_norm=0.5, epsilon=50.0),
                 baselines=["local"], finetune=Finetune(kind="auto", local=LocalSGD(lr=0.1)))  # fmt: skip
    assert result.finetuned.settings.kind == "mean"
    assert result.baselines["local"].privacy.headline.startswith("nothing is released")
    adapted = result.adapt(data)
    assert adapted.scores["shared"][result.metric] == pytest.approx(
        result.scores["shared"][result.metric], rel=1e-5
    )
    assert set(adapted.baselines) == {"local"}


def test_who_does_not_take_the_loss_says_so_in_one_sentence():
    data = read_table(counts(), **COUNTED)
    for loss in SLOPES:
        with pytest.raises(
            ConfigError,
            match=f"loss is '{loss}', but private_prior has a loss of its own, 'squared'",
        ):
            run(data, algorithm=PrivatePrior(), loss=loss, rounds=1)
        with pytest.raises(
            ConfigError, match=f"Finetune.kind is 'kl', but .* the loss here is '{loss}'"
        ):
            run(
                data,
                algorithm=PMTL(lam=1.0),
                loss=loss,
                rounds=1,
                finetune=Finetune(kind="kl", local=LocalSGD(lr=0.1)),
            )
        classes = read_table(
            counts().assign(visits=lambda t: t.visits % 2),
            client="ward",
            target="visits",
            classes=2,
        )
        with pytest.raises(
            ConfigError,
            match=f"loss is '{loss}', which is for real targets, but table has 2 classes",
        ):
            run(classes, algorithm=FedAvg(local=LocalSGD(lr=0.1)), loss=loss, rounds=1)


def test_what_is_no_count_is_refused():
    fedavg = FedAvg(local=LocalSGD(lr=0.1))
    for bounds, scale, said in (
        (
            [1, 30],
            "linear",
            r"a range of the target from 0 on, as \[0, 30\], but it is \[1.0, 30.0\]",
        ),
        ([1, 30], "log", "whose outputs are logarithms already; leave data.target_scale=log out"),
    ):
        data = read_table(
            counts(),
            **COUNTED | {"bounds": {"age": [20, 100], "visits": bounds}, "target_scale": scale},
        )
        with pytest.raises(ConfigError, match=said):
            run(data, algorithm=fedavg, loss="poisson", rounds=1)
    raw = read_table(counts().assign(visits=-1.5), client="ward", target="visits", classes=None)
    with pytest.raises(
        DataError, match=r"'a'.*field 'y'.*with the loss 'poisson' targets are counts from 0 on"
    ):
        run(raw, algorithm=fedavg, loss="poisson", rounds=1)
