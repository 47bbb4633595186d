"""Clients that act one at a time, and several runs as one program: charges, exact resume, bands, refusals."""

import json
import math
from collections import Counter
from dataclasses import replace
from functools import partial

import numpy as np
import pytest
import torch
from sklearn.metrics import f1_score

from fedmtl import (
    MPMTL,
    PMTL,
    PPDMTL,
    AsyncLearner,
    ClientPrivacy,
    EarlyStopping,
    FullParticipation,
    Latencies,
    Moments,
    PeerToPeer,
    PoissonClocks,
    PrivatePrior,
    PublicStart,
    RecordPrivacy,
    Trainer,
    models,
)
from fedmtl.data import load_synthetic_tasks
from fedmtl.errors import ConfigError
from fedmtl.graphs import Ring
from fedmtl.privacy import SeededSource, open_channel
from fedmtl.report import frame
from fedmtl.report.tables import grouped
from fedmtl.schedules import RandomLatency, TraceLatency
from fedmtl.trainer.make_problem import ProblemSettings, build_problem
from fedmtl.trainer.run_channel import bind_schedule
from tests import small

from ..small import Ended, Ends, check_resumed
from .ledgers import participations

TASKS, ANSWERS = 5, 12
DATA = load_synthetic_tasks(
    tasks=TASKS, train_examples=15, test_examples=10, features=6, public_examples=30
)
CLOCKS = PoissonClocks(per_client=ANSWERS)
LATENCIES = Latencies(latency=RandomLatency("uniform", {"scale": 1.0}), per_client=ANSWERS)
LAPLACE = RecordPrivacy(clip_norm=1.0, epsilon=5.0, mechanism="laplace", delta=0.0)
L2_LAPLACE = replace(LAPLACE, mechanism="l2_laplace", delta=1e-5)
CASES = {
    "learner": {
        "algorithm": AsyncLearner(loss="logistic", reg=1e-3),
        "schedule": CLOCKS,
        "privacy": LAPLACE,
    },
    "public start": {
        "algorithm": PublicStart(loss="logistic", reg=1e-3),
        "schedule": CLOCKS,
        "privacy": LAPLACE,
    },
    "moments": {"algorithm": Moments(), "schedule": CLOCKS, "privacy": LAPLACE},
    "pp_dmtl": {
        "algorithm": PPDMTL(feature_norm=1.0),
        "schedule": LATENCIES,
        "privacy": L2_LAPLACE,
    },
    "pp_dmtl, chosen step": {
        "algorithm": PPDMTL(feature_norm=1.0, a2="auto"),
        "schedule": LATENCIES,
        "privacy": L2_LAPLACE,
    },
    "p2p": {
        "algorithm": PeerToPeer(feature_norm=1.0, graph=Ring(), mu=0.5, allocation=2.0),
        "schedule": CLOCKS,
        "privacy": replace(LAPLACE, mechanism="gaussian", delta=1e-5),
    },
}


def trainer(case: str, **settings) -> Trainer:
    defaults = {"data": DATA, "rounds": 1000, "eval_every": 13}
    defaults |= {"model": models.linear_regression(bias=False), "loss": "binary_cross_entropy"}
    return small.trainer(**defaults | CASES[case] | settings)


@pytest.mark.parametrize("case", CASES)
def test_every_answer_is_charged_to_its_owner_up_to_the_budget(case, tmp_path):
    result = trainer(case, folder=tmp_path / "run").fit()
    total = TASKS * ANSWERS
    assert [row["round"] for row in result.history] == [13, 26, 39, 52, total]
    assert participations(tmp_path / "run/private/ledger.jsonl") == Counter(
        dict.fromkeys(range(TASKS), ANSWERS)
    )
    assert 4.99 < result.epsilon <= 5.0
    report = result.privacy
    assert (report.unit, report.relation, report.releases) == ("record", "replace", total)
    assert [row["epsilon"] for row in result.history] == sorted(
        row["epsilon"] for row in result.history
    )
    assert result.personal.shape == (TASKS, 6)


def test_a_secure_run_that_crashed_ends_within_its_caps(tmp_path):
    settings = {
        "privacy": replace(LAPLACE, source="secure"),
        "folder": tmp_path / "run",
        "checkpoint_every": 10,
    }
    with pytest.raises(Ended):
        trainer("learner", **settings, callbacks=(Ends(20),)).fit()
    result = trainer("learner", **settings).fit(resume=True)
    assert result.stopped == "budget"  # what was lost stays charged
    assert result.epsilon <= 5.0
    assert result.final["round"] < TASKS * ANSWERS


def test_schedules_and_units_that_do_not_fit_are_refused_by_name():
    with pytest.raises(
        ConfigError,
        match=r"async_learner has clients that act one at a time.*not FullParticipation",
    ):
        trainer("learner", schedule=FullParticipation())
    with pytest.raises(ConfigError, match=r"pp_dmtl protects single records"):
        trainer("pp_dmtl", privacy=ClientPrivacy(clip_norm=1.0, epsilon=1.0))
    with pytest.raises(ConfigError, match=r"pmtl goes in rounds.*not PoissonClocks"):
        trainer("learner", algorithm=PMTL())
    with pytest.raises(ConfigError, match="baselines"):
        trainer("learner", baselines=("fedavg",))


def test_the_schedule_is_of_the_names_and_keys_of_the_clients():
    run = trainer("learner")
    events = run.bound_schedule.activations(0, 0, 9)
    turned = DATA.subset(DATA.ids[::-1])
    again = build_problem(
        turned,
        run.model,
        ProblemSettings(loss=run.loss, execution=run.execution, rounds=9, dtype="float64"),
    )
    mirrored = bind_schedule(run.schedule, again.data).activations(0, 0, 9)
    assert torch.equal(4 - mirrored.client, events.client)


FEW = 4
NEVER = {
    "cap": PoissonClocks(per_client=[FEW, 0, FEW, FEW, FEW]),
    "rate": PoissonClocks(per_client=FEW, rate=[1.0, 0.0, 2.0, 1.0, 1.0]),
    "trace": Latencies(
        latency=TraceLatency([[1.0], [1e9], [2.0], [1.0], [1.0]]),
        per_client=[FEW, 0, FEW, FEW, FEW],
    ),
}


@pytest.mark.parametrize("case", ["learner", "pp_dmtl"])
@pytest.mark.parametrize("how", NEVER)
def test_an_owner_that_never_wakes_is_charged_nothing_and_holds_up_nobody(case, how, tmp_path):
    result = trainer(case, schedule=NEVER[how], folder=tmp_path).fit()
    assert participations(tmp_path / "private/ledger.jsonl") == dict.fromkeys((0, 2, 3, 4), FEW)
    least, *others = result.privacy.by_client
    assert least == 0
    assert all(4.99 < spent <= 5.0 for spent in others)
    assert bool(torch.isfinite(result.personal).all())


@pytest.mark.parametrize("case", ["learner", "pp_dmtl"])
def test_budgets_that_differ_are_each_owners_own(case):
    budgets = dict(zip(DATA.ids, (4.0, 1.0, 2.0, 3.0, 5.0), strict=True))
    privacy = replace(CASES[case]["privacy"], epsilon=budgets)
    result = trainer(case, privacy=privacy, schedule=PoissonClocks(per_client=FEW)).fit()
    assert [round(e, 2) for e in result.privacy.by_client] == [
        1.0,
        3.0,
        5.0,
    ]  # least, median and most


SEED, EPSILONS, RUNS = 3, (2.0, math.inf), 3
FEW_CASES = ("learner", "pp_dmtl", "p2p")
BY_CLIENT = {"schedule": FullParticipation(), "privacy": ClientPrivacy(clip_norm=1.0, epsilon=9.0)}
ROUNDS = {
    "mp_mtl": {
        "algorithm": MPMTL(feature_norm=1.0, loss="logistic", lam=0.1),
        "rounds": 20,
        **BY_CLIENT,
    },
    "private_prior": {
        "algorithm": PrivatePrior(loss="logistic", share=0.5),
        "rounds": 1,
        **BY_CLIENT,
    },
}


def several(case: str, **settings) -> Trainer:
    defaults = {
        "seed": SEED,
        "replicates": RUNS,
        "epsilons": EPSILONS,
        "eval_every": 7,
    } | ROUNDS.get(case, {})
    return trainer("learner" if case in ROUNDS else case, **defaults | settings)


def plain_numbers(weights: torch.Tensor) -> dict[str, float]:
    """Mean logistic loss, accuracy and F1 over tasks of weights (n, p) on the test examples, in NumPy."""
    loss, right, f1 = [], [], []
    for task, w in zip(DATA.ids, weights.numpy(), strict=True):
        own = DATA.subset([task]).test
        margin, sign = own.x.double().numpy() @ w, 2.0 * own.y.numpy() - 1
        loss.append(np.log1p(np.exp(-sign * margin)).mean())
        right.append((sign * margin > 0).mean())
        f1.append(f1_score(sign > 0, margin > 0, average="macro"))
    return {
        "loss": float(np.mean(loss)),
        "accuracy": float(np.mean(right)),
        "f1": float(np.mean(f1)),
    }


@pytest.mark.parametrize("case", FEW_CASES)
def test_every_replicate_is_a_run_of_its_own(case):
    """Run m alone, an event at a time, from its own schedule and noise, without the trainer."""
    run = several(case, metrics=["f1"])
    algorithm, found = run.algorithm, run.fit().replicates
    problem = build_problem(
        DATA,
        run.model,
        ProblemSettings(
            loss=run.loss, execution=run.execution, rounds=1000, seed=SEED, dtype="float64"
        ),
    )
    bound = run.bound_schedule
    problem = replace(problem, rounds=bound.steps)
    for m, numbers in enumerate(found):
        privacy = replace(run.privacy, epsilon=EPSILONS[m // RUNS])
        plans = algorithm.plan(problem, bound)
        channel = open_channel(privacy, plans, "alone", seed=SEED, source=SeededSource(SEED, m))
        state = algorithm.init(problem)
        for step in range(bound.steps):
            event = bound.activations(SEED, step, step + 1, replicates=m + 1)
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
    every, alone = several(case).fit(), several(case).first_run().fit()
    assert torch.allclose(every.personal, alone.personal, rtol=1e-9, atol=1e-12)
    assert every.personal_accuracy == pytest.approx(alone.personal_accuracy)
    rows = [
        row for row in several(case, replicates=1).fit().history if row["budget"] == EPSILONS[0]
    ]
    names = (
        set(alone.final) - {"time"} - {name for name in alone.final if name.startswith("global_")}
    )
    assert len(rows) == len(alone.history)
    for row, own in zip(rows, alone.history, strict=True):
        assert {key: row[key] for key in names} == pytest.approx(
            {key: own[key] for key in names}, nan_ok=True
        )


def test_rows_are_means_and_percentiles_by_budget():
    result = several("learner", replicates=8).fit()
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


@pytest.mark.parametrize(
    ("make", "case", "at"),
    [
        (trainer, "learner", 6),
        *((trainer, case, 33) for case in CASES),
        *((several, case, 10) for case in FEW_CASES),
        (several, "mp_mtl", 10),
        (several, "private_prior", 0),
    ],
)
def test_an_interrupted_run_resumes_to_the_same_bits(make, case, at, tmp_path):
    check_resumed(partial(make, case, checkpoint_every=5), tmp_path, at)


def test_files_and_words_of_several_runs(tmp_path):
    result = several("learner", folder=tmp_path / "run").fit()
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
        several("learner", **settings)


def test_one_budget_is_an_ordinary_run():
    result = several("learner", replicates=1, epsilons=(2.0,)).fit()
    assert result.replicates is None
    assert result.epsilon == pytest.approx(2.0)
