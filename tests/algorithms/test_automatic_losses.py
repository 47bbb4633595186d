"""Automatic settings for Huber's loss, quantiles and counts: fits of other programs, and the limit of squared errors."""

import numpy as np
import pandas as pd
import pytest
import torch
from scipy.optimize import minimize
from sklearn.linear_model import PoissonRegressor, QuantileRegressor

from fedmtl import ClientPrivacy, FedAvg, LocalSGD, RecordPrivacy, Trainer, models
from fedmtl.contrib.automatic import automatic
from fedmtl.contrib.average import Average, Candidates, half_range, level_change, proximal_change
from fedmtl.contrib.average.fits import LossRecords
from fedmtl.contrib.average.fits import minimize as fitted
from fedmtl.contrib.average.losses import average_of_loss, candidates_of_loss
from fedmtl.contrib.average.numbers import Records, intercept_ridges
from fedmtl.contrib.proximal_point import ProximalPoint
from fedmtl.data import read_table
from fedmtl.errors import ConfigError
from fedmtl.local.losses import Huber, Poisson, Quantile
from fedmtl.privacy import FullParticipation, SecureAggregation

HIGH = 30.0
LOSSES = (Huber(0.1), Quantile(0.9), Poisson(mapped=True))


def rows(n, d, loss=None, seed=0):
    """Features, and targets as a table stores them."""
    random = np.random.default_rng(seed)
    x = random.uniform(-1, 1, (n, d))
    y = 0.2 + x @ random.normal(size=d) * 0.3 + 0.1 * random.standard_t(3, n)
    if isinstance(loss, Poisson):
        y = random.poisson(np.exp(1 + y)).clip(max=HIGH).astype(float)
        if loss.mapped:
            y = 2 * y / HIGH - 1
    return x, y


def by_hand(loss, outputs, y):
    """The losses of records."""
    if isinstance(loss, Huber):
        errors = np.abs(outputs - y)
        return np.where(errors < loss.delta, errors**2 / 2, loss.delta * (errors - loss.delta / 2))
    if isinstance(loss, Quantile):
        return np.maximum(loss.level * (y - outputs), (loss.level - 1) * (y - outputs))
    return np.exp(outputs) - (y + 1) / 2 * outputs


@pytest.mark.parametrize("loss", LOSSES)
def test_a_proximal_step_is_the_least_of_its_objective(loss):
    x, y = rows(40, 3, loss)
    x = np.concatenate([x, np.ones((40, 1))], 1)
    shared = np.array([0.2, -0.1, 0.3, -0.5])
    mu = 0.3
    found = proximal_change(x, y, loss, shared, mu, HIGH)
    if isinstance(loss, Poisson):
        mu *= np.exp(x @ shared).mean()

    def objective(change):
        return by_hand(loss, x @ (shared + change), y).mean() + mu / 2 * (change**2).sum()

    least = min(
        minimize(objective, start, method="Nelder-Mead", options={"maxiter": 9000, "fatol": 1e-12, "xatol": 1e-9}).fun
        for start in (found, np.zeros(4))
    )  # fmt: skip
    assert objective(found) == pytest.approx(least, abs=2e-5)
    assert objective(found) < objective(np.zeros(4)) - 1e-3


def test_the_level_is_the_mean_the_quantile_or_the_ratio_of_counts():
    x, y = rows(30, 2)
    outputs = x @ np.array([0.3, -0.2])
    assert level_change(outputs, y, Huber(1e6)) == pytest.approx((y - outputs).mean(), abs=1e-9)
    residuals = np.sort(y - outputs)
    assert residuals[26] - 1e-3 < level_change(outputs, y, Quantile(0.9)) < residuals[27] + 1e-3
    counts = np.random.default_rng(0).poisson(3.0, 30).astype(float)
    ratio = np.log(counts.sum() / np.exp(outputs).sum())
    assert level_change(outputs, counts, Poisson()) == pytest.approx(ratio, abs=1e-6)
    shares = level_change(outputs, 2 * counts / HIGH - 1, Poisson(mapped=True), HIGH)
    assert shares == pytest.approx(ratio - np.log(HIGH), abs=1e-6)


def test_an_own_model_on_the_shared_one_is_that_of_other_programs():
    x, y = rows(60, 2)
    base = x @ np.array([0.4, 0.1]) + 0.1
    # slopes without a penalty, on the base
    own = LossRecords.of(Records.of(x, y, True, np.inf), Quantile(0.8), 1.0)
    free = np.zeros((1, 3))
    model = fitted(own, np.ones((1, 60), bool), free, base)[0, 0]
    program = QuantileRegressor(quantile=0.8, alpha=0.0).fit(own.z[:, :-1], y - base)
    reached, least = (
        by_hand(Quantile(0.8), outputs, y - base).sum()
        for outputs in (own.z @ model, program.predict(own.z[:, :-1]))
    )
    assert least <= reached < 1.003 * least
    # with counts the base is an exposure
    counts = np.random.default_rng(1).poisson(np.exp(1 + y)).astype(float)
    own = LossRecords.of(Records.of(x, counts, True, np.inf), Poisson(), 1.0)
    model = fitted(own, np.ones((1, 60), bool), free, base)[0, 0]
    exposure = np.exp(base)
    program = PoissonRegressor(alpha=0.0, tol=1e-12, max_iter=1000)
    program.fit(own.z[:, :-1], counts / exposure, sample_weight=exposure)
    np.testing.assert_allclose(model, [*program.coef_, program.intercept_], atol=1e-4)


@pytest.mark.parametrize(("n", "d", "bias"), [(5, 3, True), (3, 4, True), (2, 1, True), (1, 2, True), (4, 2, False)])  # fmt: skip
def test_candidates_of_a_huber_loss_without_outliers_are_those_of_squared_errors(n, d, bias):
    # up to five records, so that five folds leave one record out at a time
    x, y = rows(n, d)
    shared = np.random.default_rng(2).normal(size=d + bias) * 0.3
    found = candidates_of_loss(x, y, Huber(1e6), shared, bias, np.arange(n) % 5, limit=1.0)
    expected = Candidates.of(x, y, shared, bias, 1.0)
    # Huber's loss is half the square
    np.testing.assert_allclose(2 * found.errors, expected.errors, rtol=1e-6, atol=1e-12)
    np.testing.assert_allclose(found.models, expected.models, atol=1e-7)
    np.testing.assert_array_equal(found.parts, expected.parts)
    np.testing.assert_array_equal(found.weights, expected.weights)
    assert found.spread == pytest.approx(expected.spread, abs=1e-9)
    np.testing.assert_allclose(found.vote(n), expected.vote(n), atol=1e-6)
    for noise in (0.0, 2.0, np.inf):
        for mine, theirs in zip(found.average(n, noise), expected.average(n, noise), strict=True):
            np.testing.assert_allclose(mine, theirs, atol=1e-6)


@pytest.mark.parametrize("loss", LOSSES)
def test_rows_left_out_are_scored_by_fits_without_them(loss):
    x, y = rows(20, 2, loss)
    fold = np.arange(20) % 5
    shared = np.array([0.2, 0.1, -1.0])
    found = candidates_of_loss(x, y, loss, shared, True, fold, high=HIGH)
    records = Records.of(x, y, True, np.inf)
    own = LossRecords.of(records, loss, HIGH)
    base = x @ shared[:2] + shared[2]
    penalties = own.penalties(0.3 * own.worth)
    place = 10 * (1 + list(intercept_ridges(True)).index(0.3)) + 3
    total = 0.0
    for number in range(5):
        kept = (fold != number)[None]
        model = fitted(own, kept, penalties, base)[0, 3]
        left = fold == number
        total += by_hand(loss, base[left] + own.z[left] @ model, y[left]).sum() / 20
    if isinstance(loss, Quantile):
        total = total**2
    if isinstance(loss, Poisson):
        share = (y + 1) / 2
        total -= (share - share * np.log(np.maximum(share, 1e-300))).mean()
    floor = found.errors[place] - total
    # all have the same addition, a part of the least error of own models
    assert floor == pytest.approx(found.errors[:10].min() / 21, rel=0.05)


@pytest.mark.parametrize("loss", LOSSES)
def test_a_released_model_without_gain_is_ignored(loss):
    x, y = rows(80, 2, loss)
    fold = np.arange(80) % 5
    alone = average_of_loss(x, y, loss, True, fold, high=HIGH)
    # slopes of noise that an own intercept does not mend
    shared = np.array([40.0, -60.0, 0.0])
    found = candidates_of_loss(x, y, loss, shared, True, fold, high=HIGH)
    silent, shares = found.average(80, np.inf)
    np.testing.assert_allclose(silent, alone, atol=1e-12)
    np.testing.assert_allclose(shares, [1, 0, 0, 0], atol=1e-12)
    model, shares = found.average(80, 0.0)
    on_shared = found.weights * (found.parts > 0) * np.exp(found.evidence - found.evidence.max())
    unchanged = on_shared[-1] + on_shared[19::10].sum()  # without slopes of their own
    assert unchanged < 1e-12
    # own slopes without a penalty undo the shared ones
    assert by_hand(loss, x @ model[:2] + model[2], y).mean() == pytest.approx(
        by_hand(loss, x @ alone[:2] + alone[2], y).mean(), rel=0.02
    )


@pytest.mark.parametrize("level", [0, 7])
def test_equal_counts_are_no_error(level):
    x, _ = rows(4, 2)
    y = np.full(4, 2 * level / HIGH - 1)
    loss = Poisson(mapped=True)
    alone = average_of_loss(x, y, loss, True, np.arange(4), high=HIGH)
    found = candidates_of_loss(
        x, y, loss, np.array([0.1, 0.1, -2.0]), True, np.arange(4), high=HIGH
    )
    assert np.isfinite(alone).all()
    assert np.isfinite(np.concatenate(found.average(4, 1.0))).all()
    assert alone[-1] == pytest.approx(np.log(max(level, 0.5 / 4) / HIGH), abs=1e-3)


def wards(clients=30, size=12, seed=0, high=30):
    random = np.random.default_rng(seed)
    ward = np.repeat(np.arange(clients), size)
    age = random.uniform(20, 100, len(ward))
    level = random.normal(0, 0.3, clients)
    mean = np.exp(1.2 + level[ward] + 1.2 * (age - 60) / 40)
    visits = random.poisson(mean).clip(max=high)
    table = pd.DataFrame({"ward": [f"w{i}" for i in ward], "age": age, "visits": visits})
    return read_table(
        table, client="ward", target="visits", bounds={"age": [20, 100], "visits": [0, high]}, classes=None
    )  # fmt: skip


def test_a_run_with_a_huber_loss_without_outliers_is_that_of_squared_errors():
    data = wards(size=5)  # four are trained on
    settings = {"data": data, "privacy": ClientPrivacy(epsilon=3.0), "dtype": "float64"}
    one, two = (
        Trainer(**settings, loss=loss, progress=False, baselines=["local"]).fit()
        for loss in ("huber:1e6", "mse")
    )
    torch.testing.assert_close(one.shared, two.shared, rtol=0, atol=1e-7)
    torch.testing.assert_close(one.personal, two.personal, rtol=0, atol=1e-6)
    own = [result.baselines["local"].personal for result in (one, two)]
    torch.testing.assert_close(*own, rtol=0, atol=1e-6)
    for part, share in two.finetuned.weights.items():
        assert one.finetuned.weights[part] == pytest.approx(share, abs=1e-6)


@pytest.mark.parametrize("loss", ["huber:0.1", "quantile:0.9", "poisson"])
@pytest.mark.parametrize("secure", [False, True])
def test_clients_that_are_alike_gain(loss, secure, tmp_path):
    data = wards(size=8)
    privacy = ClientPrivacy(epsilon=8.0)
    if secure:
        privacy = ClientPrivacy(epsilon=8.0, aggregation=SecureAggregation(colluding=2))
    result = Trainer(
        data=data,
        loss=loss,
        privacy=privacy,
        baselines=["local"],
        progress=False,
        folder=tmp_path,
    ).fit()
    assert result.finetuned.settings.kind == "average"
    alone = result.baselines["local"]
    assert result.metrics["loss"] < alone.metrics["loss"]
    assert result.metrics[result.metric] < 1.01 * alone.metrics[alone.metric]
    adapted = result.adapt(data)
    assert adapted.metrics["loss"] == pytest.approx(result.metrics["loss"], rel=1e-4)
    # predictions are visits, not their logarithms or shares
    name = data.ids[3]
    found = result.predictor(name)(pd.DataFrame({"age": [30.0, 95.0]}))
    slope, constant = result.personal[3].double().tolist()
    outputs = slope * np.array([-0.75, 0.875]) + constant
    expected = 15 * (outputs + 1)
    if loss == "poisson":
        expected = 30 * np.exp(outputs)
    np.testing.assert_allclose(found, expected.clip(0, 30), rtol=1e-5)
    if loss == "quantile:0.9":
        assert result.metric == "pinball"
        errors = [
            float((data.in_units(y).numpy() <= result.predictor(client)(x).to_numpy()).mean())
            for client, x, y in rows_of_test(data)
        ]
        assert 0.75 < np.mean(errors) <= 1


def rows_of_test(data):
    """The test rows of each client, as a table and stored targets."""
    for client, first, last in zip(
        data.ids, data.test.offsets[:-1], data.test.offsets[1:], strict=True
    ):
        ages = 60 + 40 * data.test.x[first:last, 0].double().numpy()
        yield client, pd.DataFrame({"age": ages}), data.test.y[first:last]


def test_the_model_of_counts_starts_in_the_middle_of_their_logarithms():
    data = wards()
    middle = np.log(2 * 30) / 2
    assert half_range("poisson", (0.0, 30.0)) == pytest.approx(middle)
    assert half_range("huber:0.1", (0.0, 30.0)) == half_range("poisson", None) == 1.0
    privacy = ClientPrivacy(epsilon=3.0)
    plain, counted = (
        automatic(data, privacy, loss=loss).privacy.clip_norm.initial for loss in ("mse", "poisson")
    )
    assert counted == pytest.approx(plain * middle)
    # half a count and the upper end are as far
    trainer = Trainer(data=data, loss="poisson", algorithm=ProximalPoint(mu=1e9), privacy=None, rounds=1,
                      model=models.linear_regression(), schedule=FullParticipation(), progress=False)  # fmt: skip
    start = trainer.fit().shared
    assert start.tolist() == pytest.approx([0.0, -middle], abs=1e-4)
    given = models.linear_regression()(data.spec)
    torch.nn.init.constant_(next(given.parameters()), 0.5)
    trainer = Trainer(data=data, loss="poisson", algorithm=ProximalPoint(mu=1e9), privacy=None, rounds=1,
                      model=given, schedule=FullParticipation(), progress=False)  # fmt: skip
    assert trainer.fit().shared.tolist() == pytest.approx([0.5, 0.0], abs=1e-4)


def test_other_algorithms_can_end_with_the_average_of_the_loss():
    data = wards(clients=6)
    result = Trainer(data=data, loss="poisson", algorithm=FedAvg(local=LocalSGD(lr=0.1)), finetune=Average(), rounds=2,
                     privacy=ClientPrivacy(epsilon=3.0, clip_norm=0.3), schedule=FullParticipation(),
                     model=models.linear_regression(), baselines=["local"], progress=False).fit()  # fmt: skip
    assert sum(result.finetuned.weights.values()) == pytest.approx(1, abs=1e-5)
    assert result.metrics["loss"] < result.baselines["local"].metrics["loss"] + 0.05


def own_loss(outputs, targets):
    return (outputs.reshape(targets.shape) - targets).abs()


def test_losses_without_automatic_settings_are_refused_in_a_sentence():
    data = wards(clients=4)
    for loss in ("huber:0.1", "quantile:0.9", "poisson"):
        with pytest.raises(
            ConfigError,
            match=rf"loss is '{loss}', for which there are no automatic settings with privacy=record, .*"
            "take privacy=client, or choose an algorithm that takes it, as algorithm=fedavg",
        ):
            Trainer(data=data, loss=loss, privacy=RecordPrivacy(epsilon=3.0))
    with pytest.raises(
        ConfigError, match=r"loss is 'own_loss', a function of your own, .* as algorithm=fedavg"
    ):
        Trainer(data=data, loss=own_loss, privacy=None)
    with pytest.raises(ConfigError, match="the model has classes or no bias"):
        Trainer(data=data, loss="poisson", algorithm=ProximalPoint(intercept_rounds=1), privacy=None, rounds=4,
                model=models.linear_regression(bias=False), schedule=FullParticipation(), progress=False).fit()  # fmt: skip
    with pytest.raises(ConfigError, match="automatic settings of a network only for classes"):
        Trainer(data=data, loss="huber:0.1", privacy=None, model=models.mlp())
