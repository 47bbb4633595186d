"""Automatic settings: what they follow from, the proximal point method, and what a user sees."""

import itertools
import logging
import math
import re
from dataclasses import replace
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
import torch
import yaml
from scipy.optimize import minimize
from scipy.special import logsumexp

from fedmtl import (
    PMTL,
    Average,
    BackoffSGD,
    ClientPrivacy,
    FedAvg,
    FedProx,
    FedSGD,
    Finetune,
    FixedCohort,
    FullParticipation,
    Local,
    LocalSGD,
    PoissonSampling,
    ProximalPoint,
    QuantileClip,
    RangedSGD,
    RecordPrivacy,
    Result,
    SecureAggregation,
    Trainer,
    check,
    load_data,
    models,
)
from fedmtl.algorithms import ClientBatch
from fedmtl.cli.main import main
from fedmtl.cli.run import unlike
from fedmtl.cli.words import understood
from fedmtl.contrib import LocalAverage
from fedmtl.contrib.automatic import automatic, noise_of
from fedmtl.data import Domain, FederatedDataset, read_table
from fedmtl.errors import ConfigError
from fedmtl.privacy import open_channel
from fedmtl.trainer.personalize import usual_finetuning
from fedmtl.trainer.run_settings import Settings
from fedmtl.trainer.stages import stages_of
from fedmtl.trainer.summary import remedy
from tests.algorithms.harness import problem_of, run
from tests.helpers import ragged_classification, regression


def numbers(clients: int, count: int = 12, seed: int = 0) -> FederatedDataset:
    random = np.random.default_rng(seed)
    rows = {}
    for client in range(clients):
        x = random.uniform(-1, 1, (count, 2)).astype(np.float32)
        y = 0.4 * x[:, 0] - 0.3 * x[:, 1] + 0.1 * random.normal(size=count)
        rows[f"c{client}"] = x, np.clip(y, -1, 1).astype(np.float32)
    data = FederatedDataset.from_tensors(rows, classes=None, domain=Domain(2.0, 2**0.5, 1.0))
    return replace(data, limit=1.0)


@pytest.mark.parametrize("schedule", [None, PoissonSampling(cohort=12), FixedCohort(cohort=12)])
def test_nu_is_the_noise_of_a_round_over_the_clip(schedule) -> None:
    """The report of a run has the standard deviation of a coordinate of a released mean."""
    privacy = ClientPrivacy(epsilon=2.0, clip_norm=0.2)
    settings = {} if schedule is None else {"rounds": 7, "schedule": schedule}
    report = Trainer(data=numbers(30), privacy=privacy, progress=False, **settings).fit().privacy
    measured = report.noise_std * math.sqrt(3) / report.clip_norm
    chosen = automatic(numbers(30), privacy, **settings)
    assert chosen.noise == pytest.approx(measured, rel=5e-3)
    assert (chosen.rounds, chosen.schedule) == (
        (7, schedule) if settings else (22, FullParticipation())
    )
    assert max(map(len, chosen.text().splitlines())) <= 120
    assert ", clip 0.2, " in " ".join(chosen.text().split())
    adaptive = automatic(numbers(30), ClientPrivacy(epsilon=6.0), **settings)
    assert " at first, then about the median of the updates' norms" in " ".join(
        adaptive.text().split()
    )
    clip = adaptive.privacy.clip_norm
    noise = noise_of(ClientPrivacy(epsilon=6.0), numbers(30), 3, chosen.rounds, schedule)
    assert clip.initial == pytest.approx(min(0.3, 0.1 / noise), rel=5e-3)


@pytest.mark.parametrize("some", [{"colluding": 0}, {"colluding": 4, "missing": 1}, {}])
def test_nu_of_a_secure_sum_of_records_is_the_noise_of_its_release(some) -> None:
    """The report has the noise of a coordinate of the mean of 30 sums over 300 records in all."""
    privacy = RecordPrivacy(epsilon=2.0, aggregation=SecureAggregation(**some))
    report = Trainer(data=numbers(30), privacy=privacy, progress=False).fit().privacy
    measured = report.noise_std * 30 / 300 * math.sqrt(3)
    assert automatic(numbers(30), privacy).noise == pytest.approx(measured / 0.07, rel=1e-4)
    of_each = automatic(numbers(30), replace(privacy, aggregation=None)).noise
    honest = 30 - some.get("colluding", 10) - some.get("missing", 0)
    assert of_each / automatic(numbers(30), privacy).noise == pytest.approx(
        math.sqrt(honest), rel=1e-4
    )


@pytest.mark.parametrize("classes", [False, True])
def test_a_secure_sum_of_records_has_automatic_settings(classes) -> None:
    data = numbers(12)
    if classes:
        data = load_data("digits", clients=12)
    privacy = RecordPrivacy(epsilon=8.0, aggregation=SecureAggregation(colluding=2))
    summed = Trainer(data=data, privacy=privacy, progress=False)
    alone = Trainer(data=data, privacy=replace(privacy, aggregation=None), progress=False)
    assert isinstance(summed.algorithm, FedSGD)
    assert summed.algorithm.rate == 1.0
    assert summed.algorithm.server_optimizer == alone.algorithm.server_optimizer
    assert summed.rounds == alone.rounds == 60
    assert summed.privacy.clip_norm == alone.privacy.clip_norm == 1.0
    assert "60 rounds" in automatic(data, privacy).text()


def test_a_secure_sum_of_records_learns_ranges_if_the_counts_are_not_drowned() -> None:
    """The noise of a count, by the calibrated noise of a round and the root of its columns, over the records."""
    data = numbers(40)
    for epsilon in (0.2, 0.5, 1.0, 2.0, 5.0):
        privacy = RecordPrivacy(epsilon=epsilon, aggregation=SecureAggregation(colluding=5))
        chosen = automatic(data, privacy)
        problem = problem_of(data, rounds=60, model=models.linear_regression())
        plain = FedSGD(rate=1.0)
        plans = [*plain.plan(problem, None), plain.gradient_plan(problem, 1)]
        bound = FullParticipation().bind(40)
        clipped = replace(privacy, clip_norm=1.0)
        channel = open_channel(clipped, plans, bound, seed=0, steps=60)
        channel.begin(0, channel.draw(0))
        # the noise of the mean over clients, of six rounds; a count has 1 / sqrt(3) of a record's vector
        of_sum = 40 * float(channel.noise_std("gradient_sum")) / math.sqrt(6)
        noise = of_sum * math.sqrt(3) / int(data.train.counts.sum())
        assert isinstance(chosen.algorithm, RangedSGD) == (noise <= 0.05), (epsilon, noise)
        if isinstance(chosen.algorithm, RangedSGD):
            assert chosen.algorithm.range_rounds == 6
            assert "the first 6 of counts for" in chosen.text()
    few = Trainer(data=data, privacy=privacy, rounds=9, progress=False)
    assert type(few.algorithm) is FedSGD  # of nine rounds none is a tenth


def test_the_model_of_a_secure_sum_is_that_of_descent_on_all_records() -> None:
    """A loop over rounds and records, with next to no noise: steps along the mean over the size of all coordinates."""
    data = numbers(10)
    privacy = RecordPrivacy(noise_multiplier=1e-4, aggregation=SecureAggregation(colluding=1))
    trainer = Trainer(data=data, privacy=privacy, progress=False)
    # the automatic algorithm also learns ranges, of which there are none here
    plain = FedSGD(rate=1.0, averaged=True, server_optimizer=trainer.algorithm.server_optimizer)
    found = replace(trainer, algorithm=plain).fit().shared.double().numpy()
    x = np.append(data.train.x.double().numpy(), np.ones((100, 1)), 1)
    y = data.train.y.double().numpy()
    w, mean, square, models_of_rounds = np.zeros(3), np.zeros(3), 0.0, []
    for t in range(1, 61):
        gradient = np.zeros(3)
        for row, target in zip(x, y, strict=True):
            of_record = (row @ w - target) * row
            gradient += of_record * min(1.0, 1.0 / np.linalg.norm(of_record)) / len(y)
        mean = 0.9 * mean + 0.1 * gradient
        square = 0.99 * square + 0.01 * np.mean(gradient**2)
        w = w - 0.025 * (mean / (1 - 0.9**t)) / math.sqrt(square / (1 - 0.99**t))
        models_of_rounds.append(w)
    np.testing.assert_allclose(found, np.mean(models_of_rounds[30:], 0), atol=2e-3)


def test_a_secure_sum_of_records_helps_where_noise_of_each_client_does_not() -> None:
    """60 clients of ten records at epsilon 1."""
    privacy = RecordPrivacy(epsilon=1.0)
    errors = []
    for each in (privacy, replace(privacy, aggregation=SecureAggregation())):
        result = Trainer(data=numbers(60), privacy=each, baselines=("local",), progress=False).fit()
        errors.append(result.metrics["mse"] / result.baselines["local"].metrics["mse"])
    assert errors[1] < 0.9 < errors[0] < 1.01


def test_check_knows_a_secure_sum_of_records() -> None:
    """At the epsilon and at the number of clients that it names, the noise level is 1."""
    privacy = RecordPrivacy(epsilon=1.0, delta=1e-5, aggregation=SecureAggregation(colluding=0))
    said = check(numbers(30), privacy).split("nu is 1 at epsilon ")[1]
    epsilon, clients = (float(re.findall(r"[0-9.]+", said)[place]) for place in (0, 1))
    assert noise_of(replace(privacy, epsilon=epsilon), numbers(30), 3, 60) == pytest.approx(
        1, rel=0.06
    )
    assert noise_of(privacy, numbers(int(clients)), 3, 60) == pytest.approx(1, rel=0.03)


@pytest.mark.parametrize("schedule", [None, PoissonSampling(cohort=12), FixedCohort(cohort=12)])
def test_the_count_of_the_clip_takes_a_tenth_of_the_budget(schedule) -> None:
    """Noise of the update rises by 1 / sqrt(.9): of two Gaussian releases 1 / z^2 adds up."""
    settings = {} if schedule is None else {"rounds": 7, "schedule": schedule}
    data, ratios = numbers(30), []
    clip = automatic(data, ClientPrivacy(epsilon=6.0), **settings).privacy.clip_norm
    for norm in (clip, clip.initial):
        privacy = ClientPrivacy(epsilon=6.0, clip_norm=norm)
        report = Trainer(data=data, privacy=privacy, progress=False, **settings).fit().privacy
        ratios.append(report.noise_std / report.clip_norm)
    assert ratios[0] / ratios[1] == pytest.approx(1 / math.sqrt(0.9), rel=5e-3)


def test_a_clip_that_noise_alone_would_move_is_fixed() -> None:
    """The clip is replayed with half of the clients within it, and noise on their count."""
    random = np.random.default_rng(0)
    fixed = []
    for clients, epsilon in itertools.product((10, 20, 40, 80), (0.3, 1.0, 3.0)):
        chosen = automatic(numbers(clients, 2), ClientPrivacy(epsilon=epsilon))
        clip = chosen.privacy.clip_norm
        if isinstance(clip, float):
            assert clip == min(0.3, 0.1 / chosen.noise)
            fixed.append((clients, epsilon))
            continue
        norms = []
        for _ in range(200):
            norm = clip.initial
            for noise in random.normal(0, clip.count_noise / clients, chosen.rounds):
                norm = clip.updated_norm(norm, 0.5 + noise)
            norms.append(math.log(norm))
        assert np.std(norms) < 1.1
    assert fixed == [
        (10, 0.3),
        (10, 1.0),
        (10, 3.0),
        (20, 0.3),
        (20, 1.0),
        (40, 0.3),
        (40, 1.0),
        (80, 0.3),
    ]


@pytest.mark.parametrize("adaptive", [False, True])
def test_loud_noise_leaves_clients_their_own_models(adaptive) -> None:
    """Their third feature is rarely 1: their own rows do not tell what a shared slope of it is worth. A clip that
    follows the count under such noise is the broken settings that the other case must beat."""
    random = np.random.default_rng(3)
    rows = {}
    for client in range(12):
        x = random.uniform(-1, 1, (20, 3)).astype(np.float32)
        x[:, 2] = random.random(20) < 0.1
        y = 0.3 * x[:, 0] + 0.1 * random.normal(size=20)
        rows[f"c{client}"] = x, np.clip(y, -1, 1).astype(np.float32)
    data = FederatedDataset.from_tensors(rows, classes=None, domain=Domain(3.0, 3**0.5, 1.0))
    data = replace(data, limit=1.0)
    ratios = []
    for seed in range(6):
        privacy = ClientPrivacy(epsilon=0.3)
        if adaptive:
            noise = automatic(data, privacy).noise
            count_noise = noise * 12 / 2 / 2 / math.sqrt(0.1)
            clip = QuantileClip(initial=0.1 / noise, lr=0.4, count_noise=count_noise)
            privacy = replace(privacy, clip_norm=clip)
        result = Trainer(
            data=data, privacy=privacy, baselines=("local",), seed=seed, progress=False
        ).fit()
        ratios.append(result.metrics["mse"] / result.baselines["local"].metrics["mse"])
    assert (max(ratios) > 1.2) == adaptive, ratios


def test_a_range_that_is_ten_times_too_wide_costs_little() -> None:
    """The level is learned first and the clip follows the updates, so that noise shrinks with the targets."""
    random = np.random.default_rng(7)
    rows, wide = {}, {}
    for client in range(120):
        x = random.uniform(-1, 1, (6, 2)).astype(np.float32)
        y = (
            0.4 * x[:, 0] - 0.3 * x[:, 1] + 0.1 * random.normal() + 0.05 * random.normal(size=6)
        ).astype(np.float32)
        rows[f"c{client}"] = x, y
        wide[f"c{client}"] = x, y / 10 - 0.9
    errors = []
    for clients, unit in ((rows, 1.0), (wide, 10.0)):
        data = FederatedDataset.from_tensors(clients, classes=None, domain=Domain(2.0, 2**0.5, 1.0))
        data = replace(data, limit=1.0)
        result = Trainer(
            data=data, privacy=ClientPrivacy(epsilon=2.0), baselines=("local",), progress=False
        ).fit()
        shared = np.mean(list(result.scores["shared"]["mse"].values()))
        errors.append((unit**2 * shared, unit**2 * result.metrics["mse"]))
        assert result.metrics["mse"] < 0.7 * result.baselines["local"].metrics["mse"]
    assert errors[1][0] < 1.5 * errors[0][0]  # with a fixed clip 100 times
    assert errors[1][1] < 1.2 * errors[0][1]


def test_first_rounds_move_the_level_alone() -> None:
    problem, seen = (
        problem_of(regression(clients=3), model=models.linear_regression(), rounds=4),
        [],
    )
    algorithm = ProximalPoint(intercept_rounds=2)
    run(algorithm, problem, watch=lambda step, state: seen.append(state.public["global"].clone()))
    start, first, second, third = seen[:4]
    assert torch.equal(first[:-1], start[:-1])
    assert torch.equal(second[:-1], start[:-1])
    assert (third[:-1] != start[:-1]).all()
    x, y = problem.data.train.x.double(), problem.data.train.y.double()
    bounds = problem.data.train.offsets.tolist()
    residual = y - x @ start[:-1].double() - start[-1]
    means = [residual[low:high].mean() for low, high in itertools.pairwise(bounds)]
    assert float(first[-1] - start[-1]) == pytest.approx(float(torch.stack(means).mean()), rel=1e-6)
    softmax = problem_of(ragged_classification(3), model=models.softmax_regression(), loss="auto")
    with pytest.raises(
        ConfigError, match="intercept_rounds is 2, but the model has classes or no bias"
    ):
        algorithm.plan(softmax, FullParticipation().bind(3))


def test_models_without_a_bias_have_no_first_rounds() -> None:
    privacy, model = ClientPrivacy(epsilon=1.0), models.linear_regression(bias=False)
    assert automatic(numbers(20), privacy, model=model).algorithm.intercept_rounds == 0
    assert Trainer(
        data=numbers(9), privacy=privacy, model=model, progress=False
    ).fit().shared.shape == (2,)


def test_nu_of_a_noise_multiplier_and_without_noise() -> None:
    assert noise_of(ClientPrivacy(noise_multiplier=2.0), numbers(30), 3, 20) == pytest.approx(
        2 * math.sqrt(3) / 30
    )
    assert (
        noise_of(None, numbers(30), 3, 20)
        == noise_of(ClientPrivacy(epsilon=math.inf), numbers(30), 3, 20)
        == 0
    )


def test_choices_follow_from_public_facts() -> None:
    quiet = automatic(numbers(20), ClientPrivacy(epsilon=20.0))
    assert quiet.privacy.clip_norm.initial == 0.3
    assert quiet.algorithm.intercept_rounds == 4
    assert (
        automatic(
            numbers(20), ClientPrivacy(epsilon=20.0, mechanism="l2_laplace")
        ).privacy.clip_norm
        == 0.3
    )
    assert quiet.finetune.noise == quiet.noise
    assert (
        automatic(numbers(20), ClientPrivacy(epsilon=1.0, clip_norm=7.0)).privacy.clip_norm == 7.0
    )
    assert automatic(numbers(301, 2), None).schedule == PoissonSampling(cohort=300)
    records = automatic(numbers(20), RecordPrivacy(epsilon=1.0))
    assert isinstance(records.algorithm, FedAvg)
    assert records.algorithm.weights == "examples"
    unbounded = automatic(replace(numbers(20), domain=None), RecordPrivacy(epsilon=1.0))
    assert unbounded.algorithm == records.algorithm  # no step follows from a bound on rows
    other = replace(
        numbers(20), train=numbers(20, seed=1).train
    )  # other values, the same numbers of records
    assert replace(automatic(other, RecordPrivacy(epsilon=1.0)), model=records.model) == records


def test_scores_are_in_the_units_of_the_target() -> None:
    data = numbers(9)
    scaled, own = (
        Trainer(data=part, privacy=None, metrics=("mae",), progress=False).fit()
        for part in (data, replace(data, target_range=(10.0, 50.0)))
    )
    assert own.metrics["mse"] == pytest.approx(400 * scaled.metrics["mse"])
    assert own.metrics["mae"] == pytest.approx(20 * scaled.metrics["mae"])
    assert own.metrics["nmse"] == pytest.approx(scaled.metrics["nmse"])


def test_what_is_left_out_is_automatic_and_what_is_given_stays() -> None:
    trainer = Trainer(data=numbers(9), privacy=None, rounds=3, finetune=None, baselines=("local",))
    assert (trainer.rounds, trainer.finetune, trainer.baselines) == (3, None, (LocalAverage(),))
    with pytest.raises(ConfigError, match=r"privacy is 3; give .*ClientPrivacy\(epsilon=3\.0\)"):
        Trainer(data=numbers(9), privacy=3)
    with pytest.raises(
        ConfigError, match="model, schedule, rounds must be given beside an algorithm"
    ):
        Trainer(data=numbers(9), privacy=None, algorithm=FedAvg())
    with pytest.raises(ConfigError, match="clip_norm is missing"):
        Trainer(
            data=numbers(9), privacy=ClientPrivacy(epsilon=1.0), algorithm=FedAvg(), model="linear_regression",
            schedule=FullParticipation(), rounds=3, progress=False,
        ).fit()  # fmt: skip


def test_they_are_printed_before_the_progress(capsys, caplog) -> None:
    trainer = Trainer(data=numbers(9), privacy=None, rounds=3)
    assert capsys.readouterr().err.startswith(
        "automatic settings from public facts (nu = 0): Proximal point, 3 rounds"
    )
    replace(trainer, seed=1)
    Trainer(data=numbers(9), privacy=None, rounds=3, progress=False)
    with caplog.at_level(logging.INFO, "fedmtl"):  # which shows them already
        Trainer(data=numbers(9), privacy=None, rounds=3)
    assert "automatic settings from public facts" in caplog.text
    assert not capsys.readouterr().err


@pytest.mark.parametrize("classes", [False, True])
def test_steps_minimize_the_local_objective(classes: bool) -> None:
    data = ragged_classification(3) if classes else regression(clients=3)
    problem = problem_of(
        data, rounds=1, **{"model": models.softmax_regression(), "loss": "auto"} if classes else {}
    )
    w = np.linspace(-1, 1, problem.dimension)
    c = ClientBatch(problem, torch.arange(3), {"global": torch.from_numpy(w)}, round=0)
    sent = ProximalPoint(mu=0.2, steps=500).local_update(c)[0]
    for client in range(3):
        own = slice(*data.train.offsets[client : client + 2].tolist())
        x, y = data.train.x[own].numpy(), data.train.y[own].numpy()

        def objective(v, x=x, y=y):
            z = x @ (v[:15].reshape(3, 5).T if classes else v) + (v[15:] if classes else 0)
            losses = logsumexp(z, 1) - z[np.arange(len(y)), y] if classes else (z - y) ** 2 / 2
            return np.mean(losses) + 0.1 * np.sum((v - w) ** 2)

        exact = minimize(objective, w, options={"gtol": 1e-8}).x
        np.testing.assert_allclose(sent[client].numpy() + w, exact, atol=1e-6)


@pytest.mark.parametrize("rounds", [1, 2, 5])
def test_the_released_model_is_the_mean_of_the_last_half(rounds: int) -> None:
    problem, seen = problem_of(regression(clients=3), rounds=rounds), []
    algorithm = FedAvg(averaged=True, local=LocalSGD(lr=0.1, steps=2))
    state = run(
        algorithm, problem, watch=lambda step, state: seen.append(state.public["global"].clone())
    )
    last = torch.stack(seen[1 + rounds // 2 :])
    torch.testing.assert_close(algorithm.shared(state), last.mean(0))
    everybody = torch.arange(3)
    assert torch.equal(algorithm.personalize(problem, state, everybody)[0], algorithm.shared(state))


def test_exact_steps_are_refused_where_records_are_protected() -> None:
    """They would be sent without noise: DP-SGD protects gradients of local steps."""
    with pytest.raises(ConfigError, match="no local solver"):
        Trainer(
            data=numbers(9), privacy=RecordPrivacy(epsilon=1.0, clip_norm=1.0), algorithm=ProximalPoint(),
            model="linear_regression", schedule=FullParticipation(), rounds=3, progress=False,
        ).fit()  # fmt: skip


@pytest.mark.parametrize("privacy", [ClientPrivacy(epsilon=8.0), RecordPrivacy(epsilon=8.0), None])
def test_it_helps_clients_with_few_records(privacy) -> None:
    """Clients of ten training records around one truth: the average beats their models, and a constant."""
    result = Trainer(data=numbers(60), privacy=privacy, baselines=("local",), progress=False).fit()
    assert result.metrics["mse"] < result.baselines["local"].metrics["mse"]
    assert result.metrics["mse"] < 0.04  # of targets with the variance .09


def test_networks_of_classes_have_automatic_settings() -> None:
    data, privacy = load_data("digits", clients=12), ClientPrivacy(epsilon=50.0)
    trainer = Trainer(
        data=data, model=models.mlp(hidden=8), privacy=privacy, rounds=6, progress=False
    )
    assert trainer.algorithm == FedProx(mu=0.03, averaged=True, local=BackoffSGD())
    assert trainer.schedule == FullParticipation()
    dimension = 64 * 8 + 8 + 8 * 10 + 10
    noise = noise_of(privacy, data, dimension, 6)
    assert trainer.privacy.clip_norm == pytest.approx(min(3.0, 0.06 * math.sqrt(dimension) / noise))
    linear = Trainer(data=data, model="softmax_regression", privacy=privacy, progress=False)
    assert isinstance(linear.algorithm, ProximalPoint)
    with pytest.raises(ConfigError, match="only for classes and whole clients; set algorithm"):
        Trainer(data=data, model="mlp", privacy=RecordPrivacy(epsilon=8.0))
    with pytest.raises(ConfigError, match="only for classes and whole clients; set algorithm"):
        Trainer(data=numbers(9), model="mlp", privacy=None)


def test_clients_average_networks_of_their_own() -> None:
    settings = {
        "model": models.mlp(hidden=8),
        "privacy": None,
        "rounds": 8,
        "baselines": ("local",),
    }
    result = Trainer(data=load_data("digits", clients=12), progress=False, **settings).fit()
    weights = result.finetuned.weights
    assert sum(weights.values()) == pytest.approx(1)
    assert weights["intercept"] == 0
    assert result.metrics["accuracy"] > result.baselines["local"].metrics["accuracy"]


def test_clients_with_a_single_training_row_are_counted_before_training() -> None:
    """Of 12 clients three have one training row."""
    x, y = torch.linspace(-1, 1, 10)[:, None], torch.linspace(0, 0.9, 10)
    rows = {f"c{i}": (x, y) for i in range(12)}
    few = dict(list(rows.items())[3:])
    few |= {f"c{i}": (x[:1], y[:1]) for i in range(3)}
    said = (
        "clients with a single training row, private: 3; none of them can tell whether the shared"
    )
    for parts, there in ((rows, False), (few, True)):
        data = FederatedDataset.from_tensors(
            parts, test=parts, classes=None, domain=Domain(1.0, 1.0, 1.0)
        )
        found = check(data, ClientPrivacy(epsilon=1.0))
        assert (said in found) is there
        assert ("unless clients with more rows vote for a shared one" in found) is there
        of_records = check(data, RecordPrivacy(epsilon=1.0))
        assert ("after the run compare with local" in of_records) is there
        assert "single training row" not in check(data, ClientPrivacy(epsilon=1.0), public=True)


def test_the_outlook_before_training() -> None:
    """At the epsilon that it names the noise level is 1."""
    data = numbers(12)
    text = check(data, ClientPrivacy(epsilon=1.0))
    assert text.splitlines()[:2] == [
        "data: 12 clients, 2 features, a real target",
        "training rows a client, private: 10 smallest, 10 median, 10 largest",
    ]
    assert "the noise outweighs what sharing gives (nu is " in check(
        data, ClientPrivacy(epsilon=0.1)
    )
    assert (
        "the noise may outweigh what sharing gives (nu is between 1 and 4); whether clients are alike"
        in text
    )
    alike, apart = (check(numbers(60, seed=seed), public=True) for seed in (0, 5))
    assert (
        "the noise allows sharing (nu is at most 1); whether clients are alike the run will show\n"
        in alike
    )
    assert alike == apart
    assert "no noise; whether clients are alike the run will show" in check(
        data, ClientPrivacy(epsilon=math.inf)
    )
    named = float(text.split("nu is 1 at epsilon ")[1].split(",")[0])
    assert noise_of(ClientPrivacy(epsilon=named), data, 3, 22) == pytest.approx(1, rel=0.06)
    pair = numbers(2)
    named = check(pair, ClientPrivacy(epsilon=1.0), rounds=600).split("nu is 1 at epsilon ")[1]
    assert re.match(r"\d{3}, or with", named)  # in digits, and not as 1e+02
    assert noise_of(ClientPrivacy(epsilon=float(named[:3])), pair, 3, 600) == pytest.approx(1, 0.06)
    assert "nobody to share with" in check(numbers(1), ClientPrivacy(epsilon=1.0), rounds=60)
    assert "private" not in check(data, ClientPrivacy(epsilon=0.5), public=True)
    other = replace(data, train=numbers(12, seed=5).train)
    assert check(data, public=True) == check(other, public=True)


def test_what_was_read_off_records_is_not_printed_for_the_public() -> None:
    """The number of classes of other labels would be another one."""
    rows = {f"c{i}": (torch.rand(6, 2), torch.arange(6) % 3) for i in range(4)}
    with pytest.raises(
        ConfigError, match=r"data: classes came from private records.*leave --public out"
    ):
        check(FederatedDataset.from_tensors(rows), public=True)
    declared = check(FederatedDataset.from_tensors(rows, classes=3), public=True)
    assert declared.splitlines()[0] == "data: 4 clients, 2 features, 3 classes"


def test_a_draft_of_a_table_runs(tmp_path, capsys, monkeypatch) -> None:
    random = np.random.default_rng(0)
    rows = [
        f"w{i % 9},{random.integers(18, 95)},{'fm'[i % 2]},{random.uniform(0, 30):.2f},n{i}"
        for i in range(180)
    ]
    (tmp_path / "my visits.csv").write_text("\n".join(["ward,age,sex,days,note", *rows]))
    monkeypatch.chdir(tmp_path)
    words = [
        "data=table",
        "data.path=my visits.csv",
        "data.client=ward",
        "data.target=days",
        "data.classes=null",
    ]
    assert main(["check", *words, "data.features=[age, sex]", "privacy.epsilon=8"]) == 0
    printed = capsys.readouterr().out
    assert "  sex: 2 categories\n" in printed
    assert "whether clients are alike the run will show" in printed
    assert main(["--config-dir", ".", "experiment=my_visits", "hydra.run.dir=run"]) == 0
    assert "proximal_point + finetuning" in capsys.readouterr().out
    draft = Path("experiment/my_visits.yaml")
    confirmed = re.sub(r"(?s)age:.*?sex:", "age: [0, 120]\n    sex:", draft.read_text())
    draft.write_text(confirmed)
    for more, said in (
        ("seed=1", "experiment/my_visits.yaml is there already and stays as it is"),
        (
            "privacy=record",
            "my_visits_2.yaml (other data or another budget: experiment/my_visits.yaml)",
        ),
    ):
        assert main(["check", *words, "data.features=[age, sex]", "privacy.epsilon=8", more]) == 0
        assert said in capsys.readouterr().out
    assert draft.read_text() == confirmed
    second = Path("experiment/my_visits_2.yaml").read_text()
    assert "override /privacy: record" in second
    assert "partition" not in second


def test_a_draft_leaves_out_what_says_nothing_and_counts_missing_values(
    tmp_path, capsys, monkeypatch
) -> None:
    frame = pd.DataFrame(
        {"lab": [f"l{i % 6}" for i in range(120)], "note": [f"n{i}" for i in range(120)]}
    )
    frame = frame.assign(
        one=7.0, number=range(0, 1200, 10), hum=[f"{i / 7:.2f}" for i in range(120)]
    )
    frame = frame.assign(
        day=[f"day {i // 2}" for i in range(120)], night=[i % 3 == 0 for i in range(120)]
    )
    frame["cost"] = np.random.default_rng(0).uniform(1, 9, 120)
    frame.to_csv(tmp_path / "labs.csv", index=False)
    monkeypatch.chdir(tmp_path)
    words = [
        "data=table",
        "data.path=labs.csv",
        "data.client=lab",
        "data.target=cost",
        "privacy.epsilon=8",
    ]
    assert main(["check", *words]) == 0
    printed = capsys.readouterr().out
    assert (
        "  note: 120 categories; it looks like an id of rows: left out of data.features (declare its"
        in printed
    )
    assert (
        "  day: 60 categories; it has more than 50 categories: left out of data.features (declare"
        in printed
    )
    assert (
        "  one: 7 to 7; it is a constant: left out of data.features (declare its data.bounds to have it)"
        in printed
    )
    assert (
        "  number: 0 to 1190; no two rows are alike: if it is an id, leave it out of data.features\n"
        in printed
    )
    assert "6 clients, 3 features" in printed
    draft = yaml.safe_load(Path("experiment/labs.yaml").read_text())["data"]
    assert draft["features"] == ["number", "hum", "night"]
    assert draft["bounds"]["night"] == ["False", "True"]
    low, high = draft["bounds"]["cost"]  # three digits, rounded outwards
    assert frame.cost.min() - 0.01 < low < frame.cost.min()
    assert frame.cost.max() < high < frame.cost.max() + 0.01
    (tmp_path / "experiment" / "labs.yaml").unlink()  # which is never written over
    frame = frame.drop(columns=["day", "night"])
    frame["seen"] = pd.date_range("1980-05-01", periods=120).strftime("%Y-%m-%d")
    frame.loc[[4, 9], "hum"] = "NA"
    frame.loc[3, "seen"] = "NA"
    frame.to_csv(tmp_path / "labs.csv", index=False)
    assert main(["check", *words]) == 0
    said = "  hum: 0 to 17; 2 missing values: 0, and a feature that says so (data.missing)\n"
    assert said in capsys.readouterr().out
    assert yaml.safe_load(Path("experiment/labs.yaml").read_text())["data"]["missing"] == [
        "hum",
        "seen",
    ]
    assert main(["--config-dir", ".", "experiment=labs", "hydra.run.dir=run", "rounds=1"]) == 0


def test_a_draft_points_out_codes_and_what_it_proposes_is_read(
    tmp_path, capsys, monkeypatch
) -> None:
    frame = pd.DataFrame(
        {"lab": [f"l{i % 6}" for i in range(120)], "unit": [(3, 10, 7)[i % 3] for i in range(120)]}
    )
    frame = frame.assign(
        floor=[None, *(i % 4 - 1 for i in range(1, 120))], grade=[i % 13 for i in range(120)]
    )
    frame = frame.assign(half=[i % 4 / 2 for i in range(120)], two=[i % 2 for i in range(120)])
    frame["number"] = [None, *(7001 * i % 10007 for i in range(1, 120))]
    frame = frame.astype({"number": "Int64"}).assign(
        cost=np.random.default_rng(0).uniform(1, 9, 120)
    )
    frame.to_parquet(tmp_path / "labs.parquet")
    frame.to_csv(tmp_path / "labs.csv", index=False)
    monkeypatch.chdir(tmp_path)
    for name in ("labs.parquet", "labs.csv"):
        words = [
            "data=table",
            f"data.path={name}",
            "data.client=lab",
            "data.target=cost",
            "privacy.epsilon=8",
        ]
        assert main(["check", *words]) == 0
        printed = capsys.readouterr().out.split("\n")
        lines = {line.strip().partition(":")[0]: line for line in printed if line.startswith("  ")}
        assert lines["unit"].endswith(
            "; 3 whole numbers: if they are codes, its bounds are ['3', '7', '10']"
        )
        said = "; 4 whole numbers: if they are codes, its bounds are ['-1', '0', '1', '2']; 1 missing value: "
        assert said in lines["floor"]
        assert not any(
            "codes" in lines[column] for column in ("grade", "half", "two", "cost", "number")
        )
        assert (
            "; no two rows are alike: if it is an id, leave it out of data.features; 1 missing"
            in lines["number"]
        )
    bounds = {"unit": ["3", "7", "10"]}
    data = read_table("labs.csv", client="lab", target="cost", features=["unit"], bounds=bounds)
    assert data.train.x.sum(1).unique().tolist() == [1.0]


def test_a_table_is_doubted_in_one_line_each(caplog) -> None:
    frame = pd.DataFrame(
        {
            "ward": [f"w{i % 4}" for i in range(40)],
            "row": range(40),
            "dose": [i % 9 for i in range(40)],
        }
    )
    frame["stay"] = [i % 7 for i in range(40)]
    read_table(frame, client="ward", target="stay", bounds={"dose": [0, 5], "stay": [1, 6]})
    doubts = [record.getMessage() for record in caplog.records]
    assert [text for text in doubts if "examples are left out" not in text] == [
        "table: the column 'row' looks like an id of rows, by its private values; leave it out of data.features",
        "table: cut off at data.bounds (rows of 40, private: covered by no epsilon): dose 12, stay 6; the "
        "bounds of dose and stay do not fit, since more than a tenth of the rows are cut",
    ]
    caplog.clear()
    read_table(
        frame,
        client="ward",
        target="stay",
        features=["dose"],
        bounds={"dose": [0, 8], "stay": [0, 5.5]},
    )
    assert "stay 5; the bounds of stay do not fit" in caplog.text
    caplog.clear()
    read_table(frame[:34], client="ward", target="stay", features=["dose"], bounds={"dose": [0, 7]})
    assert "no epsilon): dose 3\n" in caplog.text
    read_table(frame, client="ward", target="stay", features=["dose"])
    assert (
        "'stay' are taken as 7 classes, 0 to 6; data.classes=null makes them a regression, which needs "
        "their range in data.bounds"
    ) in caplog.text


def test_the_usual_cohort_is_at_most_everybody() -> None:
    assert PoissonSampling().bind(99) == FullParticipation().bind(99)
    assert PoissonSampling().bind(100) == PoissonSampling(cohort=100).bind(100)


TABLE = ("data=table", "data.path=x.csv")


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (TABLE, ("algorithm=auto", *TABLE)),
        (("seed=1,2", *TABLE), ("algorithm=auto", "seed=1,2", *TABLE)),
        ((*TABLE, "schedule.cohort=3"), (*TABLE, "schedule.cohort=3")),
        ((*TABLE, "algorithm.local.lr=1"), (*TABLE, "algorithm.local.lr=1")),
        (("data=images", "model=mlp"), ("algorithm=auto", "data=images", "model=mlp")),
        (("rounds=3",), ("rounds=3",)),
    ],
)
def test_data_of_the_user_take_automatic_settings_unless_something_of_them_is_chosen(
    words, expected
) -> None:
    assert tuple(understood(words)) == expected


def test_automatic_settings_are_compared_in_a_sweep() -> None:
    plain = Settings(algorithm=FedAvg(local=LocalSGD(lr=0.1)), privacy=None, finetune=None)
    tuned = Settings(privacy=None, finetune=Average())
    assert unlike([tuned, plain]).startswith("finetuned after training: auto; not: FedAvg. ")


def test_a_table_from_a_mistaken_check_to_new_clients(tmp_path, capsys, monkeypatch) -> None:
    random = np.random.default_rng(0)
    rows = [
        f"w{i % 9},{random.uniform(0, 1):.3f},{random.uniform(1, 16):.2f},{i}" for i in range(180)
    ]
    (tmp_path / "x.csv").write_text("\n".join(["ward,age,cost,id", *rows]))
    monkeypatch.chdir(tmp_path)
    assert main(["check", *TABLE, "data.client=ward", "data.target=id"]) == 2
    assert main(["check", *TABLE, "data.client=wards", "data.target=cost"]) == 2
    assert main(["check", *TABLE, "data.client=ward"]) == 2
    assert (
        main(["check", *TABLE, "data.client=ward", "data.target=cost", "privacy.epsilon=-1"]) == 2
    )
    printed = capsys.readouterr()
    assert printed.err.count("looks like an id") == 1
    assert "client column 'wards' is missing; did you mean 'ward'?" in printed.err
    assert (
        "a target column is needed (data.target=COLUMN); the columns are 'ward', 'age', 'cost', 'id'"
        in printed.err
    )
    assert not printed.out
    assert not (tmp_path / "experiment").exists()
    words = [*TABLE, "data.client=ward", "data.target=cost", "data.features=[age]"]
    words.append("data.bounds={age: [0, 1], cost: [0, 2]}")
    assert main([*words, "privacy.epsilon=3", "hydra.run.dir=run"]) == 0
    assert capsys.readouterr().err.count("automatic settings from public facts (nu = ") == 1
    assert main(["adapt", "run", *words, "--out", "new"]) == 0
    assert ": 9 clients, 0 rounds\n" in capsys.readouterr().out
    # settings of the last step on the command line keep the noise and the votes of the run
    assert main(["adapt", "run", *words, "finetune=average", "--out", "again"]) == 0
    found = [
        (tmp_path / name / "private/models.safetensors").read_bytes() for name in ("new", "again")
    ]
    assert found[0] == found[1]


@pytest.mark.parametrize(("high", "share"), [(5, 0.0), (3, 0.4), (2, 0.6)])
def test_most_targets_cut_off_are_named_by_the_warning(
    high: int, share: float, tmp_path: Path
) -> None:
    rated = pd.DataFrame(
        {"user": ["a", "b"] * 10, "size": [0.0, 1, 2, 3, 4] * 4, "stars": [1, 2, 3, 4, 5] * 4}
    )
    bounds = {"size": [0, 4], "stars": [1, high]}
    data = load_data(
        "table", path=rated, client="user", target="stars", classes=None, bounds=bounds
    )
    assert data.cut_targets == share
    privacy = ClientPrivacy(epsilon=1.0)
    result = Trainer(data=data, privacy=privacy, rounds=1, folder=tmp_path, progress=False).fit()
    assert Result.load(tmp_path).records.cut_targets == result.records.cut_targets == share
    assert "cut_targets" not in "".join(
        file.read_text("latin-1") for file in (tmp_path / "public").iterdir()
    )
    assert ("; try wider data.bounds" in remedy(result, stages_of(result, "run"))) == (share > 0.5)


def test_a_bad_model_is_given_remedies_that_apply() -> None:
    data = replace(numbers(12), target_range=(0.0, 2.0), cut_targets=0.6)
    result = Trainer(data=data, privacy=ClientPrivacy(epsilon=1.0), rounds=1, progress=False).fit()
    stages = stages_of(result, "run")
    assert remedy(result, stages).startswith("; try wider data.bounds")
    unscaled = replace(result, records=replace(result.records, unscaled=True))
    assert remedy(unscaled, stages).startswith("; try features and targets scaled to [-1, 1] or")
    assert "privacy.epsilon" in remedy(result, stages)
    assert "privacy.epsilon" not in remedy(
        result, [replace(stage, epsilon=math.inf) for stage in stages]
    )


def test_numbers_that_are_not_scaled_are_named(caplog) -> None:
    data, raw = numbers(9), numbers(9)
    raw = replace(raw, train=replace(raw.train, x=raw.train.x * 300, y=raw.train.y * 50))
    for one, expected in ((data, False), (raw, True)):
        caplog.clear()
        Trainer(data=one, privacy=ClientPrivacy(epsilon=8.0), progress=False)
        assert ("features as large as 2" in caplog.text, "targets as large as" in caplog.text) == (
            expected,
            expected,
        )
        assert ("features as large as" in check(one)) == expected
        assert "as large as" not in check(one, public=True)


def test_the_outlook_of_records_is_on_the_scale_of_nu() -> None:
    text = check(replace(numbers(12), domain=None), RecordPrivacy(epsilon=3.0))
    level = float(
        text.split("(nu = ")[1].split(")")[0]
    )  # on the scale of the verdict, as of whole clients
    assert ("above 4" in text, "nu is between 1 and 4" in text) == (level > 4, 1 < level <= 4)


def test_the_usual_finetuning_follows_from_the_target_and_the_model() -> None:
    usual = Finetune(kind="auto", lam=0.3)
    linear = problem_of(regression(clients=3), loss="auto")
    assert usual_finetuning(usual, linear) == Average()
    network = problem_of(regression(clients=3), model=models.mlp(hidden=5), loss="auto")
    assert usual_finetuning(usual, network) == replace(usual, kind="mean")
    assert usual_finetuning(replace(usual, start="personal"), linear).kind == "mean"
    classes = problem_of(
        load_data("digits", clients=3), model=models.softmax_regression(), loss="auto"
    )
    assert usual_finetuning(usual, classes) == replace(usual, kind="kl")


def test_what_clients_have_alone_is_one_thing_whatever_the_algorithm() -> None:
    """Of linear models of a number; of networks and with a local solver of the user's it is local training."""
    given = {
        "data": numbers(9),
        "privacy": None,
        "rounds": 3,
        "schedule": FullParticipation(),
        "progress": False,
    }
    linear = given | {"model": models.linear_regression(), "finetune": None}
    usual = Trainer(baselines=["local"], **given).fit().baselines["local"]
    for algorithm in (
        FedAvg(local=LocalSGD(lr=0.3)),
        PMTL(local=LocalSGD(lr=0.3)),
        ProximalPoint(),
    ):
        found = Trainer(algorithm=algorithm, baselines=["local"], **linear).fit().baselines["local"]
        assert found.by_client["mse"] == usual.by_client["mse"]
    own = Local(local=LocalSGD(lr=0.3))
    fedavg = FedAvg(local=LocalSGD(lr=0.3))
    assert Trainer(algorithm=fedavg, baselines=[own], **linear).comparisons == {"local": own}
    network = linear | {"model": models.mlp(hidden=4)}
    assert Trainer(algorithm=fedavg, baselines=["local"], **network).comparisons == {"local": own}
    classes = given | {"data": load_data("digits", clients=9), "model": models.softmax_regression()}
    assert Trainer(algorithm=fedavg, baselines=["local"], **classes).comparisons == {"local": own}


def test_wide_ranges_are_said_with_what_they_cost() -> None:
    rows = {
        "who": ["a", "b"] * 10,
        "age": [*range(20)],
        "size": [0, None] * 5 + [5.0, 10] * 5,
        "kind": ["x", "y"] * 10,
    }
    table = pd.DataFrame(rows).assign(cost=lambda rows: rows["age"] / 2)
    exact = {"age": [0, 19], "size": [0, 10], "kind": ["x", "y"], "cost": [0, 9.5]}
    wider = {"age": [0, 190], "size": [-10, 20], "cost": [0, 28]}

    def said(**changes: list[float]) -> str:
        bounds = exact | changes
        data = load_data(
            "table",
            path=table,
            client="who",
            target="cost",
            bounds=bounds,
            classes=None,
            missing="indicator",
        )
        assert "wide" not in check(data, public=True)
        return " ".join(check(data).split())

    assert "wide" not in said()
    assert "wide" not in said(cost=[0, 28])
    assert "(private: covered by no epsilon): age 10, size 3. On six tables" in said(**wider)
    assert "epsilon): cost 4. On" in said(cost=[0, 38])
