"""Several runs as one batched program: equal to runs of their own, bands, exact resume, refusals."""

import json
import math
from dataclasses import replace
from functools import partial

import numpy as np
import pytest
import torch
from sklearn.metrics import f1_score

from fedmtl import (
    MPMTL,
    PMTL,
    ClientPrivacy,
    EarlyStopping,
    FullParticipation,
    PrivatePrior,
    RecordPrivacy,
    Trainer,
)
from fedmtl.errors import ConfigError
from fedmtl.privacy import SeededSource, open_channel
from fedmtl.report import frame
from fedmtl.report.tables import grouped
from fedmtl.trainer.problem import build_problem

from ..small import check_resumed
from . import test_asynchronous
from .test_asynchronous import DATA, TASKS

SEED, EPSILONS, RUNS = 3, (2.0, math.inf), 3
CASES = {name: test_asynchronous.CASES[name] for name in ("learner", "pp_dmtl", "p2p")}
BY_CLIENT = {"schedule": FullParticipation(), "privacy": ClientPrivacy(clip_norm=1.0, epsilon=9.0)}
ROUNDS = {
    "mp_mtl": {"algorithm": MPMTL(row_norm=1.0, loss="logistic", lam=0.1), "rounds": 20, **BY_CLIENT},
    "private_prior": {"algorithm": PrivatePrior(loss="logistic", share=0.5), "rounds": 1, **BY_CLIENT},
}
EVERY = CASES | ROUNDS


def trainer(case: str, **settings) -> Trainer:
    defaults = {"seed": SEED, "replicates": RUNS, "epsilons": EPSILONS, "eval_every": 7} | ROUNDS.get(case, {})
    return test_asynchronous.trainer(case if case in CASES else "learner", **defaults | settings)


def plain_numbers(weights: torch.Tensor) -> dict[str, float]:
    """Mean logistic loss, accuracy and F1 over tasks of weights (n, p) on the test examples, in NumPy."""
    loss, right, f1 = [], [], []
    for task, w in zip(DATA.ids, weights.numpy(), strict=True):
        own = DATA.subset([task]).test
        margin, sign = own.x.double().numpy() @ w, 2.0 * own.y.numpy() - 1
        loss.append(np.log1p(np.exp(-sign * margin)).mean())
        right.append((sign * margin > 0).mean())
        f1.append(f1_score(sign > 0, margin > 0, average="macro"))
    return {"loss": float(np.mean(loss)), "accuracy": float(np.mean(right)), "f1": float(np.mean(f1))}


@pytest.mark.parametrize("case", CASES)
def test_every_replicate_is_a_run_of_its_own(case):
    """Run m alone, an event at a time, from its own schedule and noise, without the trainer."""
    run = trainer(case, metrics=["f1"])
    algorithm, found = run.algorithm, run.fit().replicates
    problem = build_problem(DATA, run.model, run.loss, run.execution, 1000, SEED, "cpu", "float64")
    bound = run.bound
    problem = replace(problem, rounds=bound.steps)
    for m, numbers in enumerate(found):
        privacy = replace(run.privacy, epsilon=EPSILONS[m // RUNS])
        plans = algorithm.plan(problem, bound)
        channel = open_channel(privacy, plans, "alone", seed=SEED, source=SeededSource(SEED, m))
        state = algorithm.init(problem)
        for step in range(bound.steps):
            event = bound.events(SEED, step, step + 1, replicates=m + 1)
            event = replace(event, time=event.time[m:], clients=event.clients[m:])
            channel.begin(step, event.client)
            state = algorithm.step(problem, state, event, channel)
        expected = plain_numbers(algorithm.personalize(problem, state, torch.arange(TASKS)))
        expected["objective"] = float(algorithm.objective(problem, state))
        assert (numbers["budget"], numbers["repetition"]) == (EPSILONS[m // RUNS], m % RUNS)
        assert {key: numbers[key] for key in expected} == pytest.approx(expected, rel=1e-9)
    assert len({one["loss"] for one in found}) == len(found) == len(EPSILONS) * RUNS


@pytest.mark.parametrize("case", ["learner", *ROUNDS])
def test_the_first_run_is_the_trainers_own(case):
    several, alone = trainer(case).fit(), trainer(case).first_run().fit()
    assert torch.allclose(several.personal, alone.personal, rtol=1e-9, atol=1e-12)
    assert several.personal_accuracy == pytest.approx(alone.personal_accuracy)
    rows = [row for row in trainer(case, replicates=1).fit().history if row["budget"] == EPSILONS[0]]
    names = set(alone.final) - {"time"} - {name for name in alone.final if name.startswith("global_")}
    assert len(rows) == len(alone.history)
    for row, own in zip(rows, alone.history, strict=True):
        assert {key: row[key] for key in names} == pytest.approx({key: own[key] for key in names}, nan_ok=True)


def test_rows_are_means_and_percentiles_by_budget():
    result = trainer("learner", replicates=8).fit()
    rounds = [row["round"] for row in result.history]
    assert rounds == [r for r in (*range(7, 60, 7), 60) for _ in EPSILONS]
    for row in result.bands:
        own = [one for one in result.replicates if one["budget"] == row["budget"]]
        assert len(own) == 8
        for name in ("loss", "accuracy", "objective"):
            values = np.array([one[name] for one in own])
            assert row[name] == pytest.approx(values.mean())
            for mark in (5, 25, 50, 75, 95):
                assert row[f"{name}_p{mark}"] == pytest.approx(np.percentile(values, mark))
    assert [row["epsilon"] for row in result.bands] == pytest.approx(EPSILONS)


@pytest.mark.parametrize("case", EVERY)
def test_an_interrupted_run_resumes_to_the_same_bits(case, tmp_path, monkeypatch):
    monkeypatch.setattr("fedmtl.report.figures.plot_rounds", lambda *args, **options: None)
    step = min(10, EVERY[case].get("rounds", 1000) - 1)
    check_resumed(partial(trainer, case, checkpoint_every=4), tmp_path, step)


def test_files_and_words_of_several_runs(tmp_path):
    result = trainer("learner", folder=tmp_path / "run").fit()
    private = {file.name for file in (tmp_path / "run/private").iterdir()}
    assert {"bands.png", "metrics.csv", "replicates.csv", "result.json"} <= private
    assert not {"accuracy.png", "ledger.jsonl"} & private
    told = json.loads((tmp_path / "run/public/privacy.json").read_text())["outside"][0]
    assert told.startswith("the 6 runs behind a band: an epsilon covers one run")
    said = result.summary()
    assert "mean of 3 runs, and 5th to 95th percentile" in said
    assert [line.split()[0] for line in said.splitlines()[4:6]] == ["2", "inf"]
    groups = grouped(frame([tmp_path])).sort_values("epsilon")
    assert list(zip(groups.epsilon, groups.seeds, strict=True)) == [(2.0, RUNS), (math.inf, RUNS)]
    assert groups.accuracy.iloc[0] == pytest.approx(result.bands[0]["accuracy"])


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"replicates": 0}, r"replicates is 0; it must be a whole number"),
        ({"replicates": 2.5}, r"replicates is 2\.5"),
        ({"epsilons": 3.0}, r"epsilons is 3\.0; it must be a list"),
        ({"epsilons": ()}, r"epsilons is \(\); it must be a list"),
        ({"epsilons": (1, -1)}, r"epsilons is \(1, -1\); it must be a list of different budgets above 0"),
        ({"epsilons": (1, 1.0)}, r"epsilons is \(1, 1\.0\); it must be a list of different budgets"),
        ({"privacy": None}, r"without privacy, beside privacy\.noise_multiplier"),
        ({"privacy": RecordPrivacy(clip_norm=1.0, noise_multiplier=2.0)}, r"beside privacy\.noise_multiplier"),
        ({"privacy": RecordPrivacy(clip_norm=1.0, epsilon=dict.fromkeys(DATA.ids, 1.0))}, r"beside budgets by client"),
        ({"privacy": RecordPrivacy(clip_norm=1.0, epsilon=1.0, source="secure")}, r"need privacy\.source='seeded'"),
        ({"early_stopping": EarlyStopping()}, r"6 runs as one program have none"),
        ({"algorithm": PMTL(), "schedule": FullParticipation()}, r"pmtl cannot compute 6 runs.*async_learner"),
    ],
)  # fmt: skip
def test_what_cannot_be_replicated_is_refused_by_name(settings, said):
    with pytest.raises(ConfigError, match=said):
        trainer("learner", **settings)


def test_one_budget_is_an_ordinary_run():
    result = trainer("learner", replicates=1, epsilons=(2.0,)).fit()
    assert result.replicates is None
    assert result.epsilon == pytest.approx(2.0)
