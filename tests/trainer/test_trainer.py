"""The loop: history, epsilon, budgets, resuming, baselines, callbacks."""

import itertools
import math
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch import nn

from fedmtl import (
    PMTL,
    Callback,
    ClientPrivacy,
    Execution,
    FedAvg,
    FedProx,
    FixedCohort,
    Local,
    PoissonSampling,
    models,
)
from fedmtl.errors import ConfigError, ModelError, ResumeError
from fedmtl.trainer import evaluator
from tests.helpers import ragged_classification, regression
from tests.small import Ends, check_same

from .ledgers import charges
from .settings import CLIENTS, COHORT, DATA, DELTA, NOISE, SOLVER, epsilon, trainer

# History and epsilon


def test_history():
    result = trainer(rounds=7).fit()
    assert [row["round"] for row in result.history] == [2, 4, 6, 7]
    assert result.stopped == "rounds"
    measured = [row["epsilon"] for row in result.history]
    assert measured == pytest.approx([epsilon(n) for n in (2, 4, 6, 7)], rel=1e-3)
    assert result.epsilon == measured[-1] == result.privacy.epsilon
    times = [row["time"] for row in result.history]
    assert times == sorted(times)
    assert times[0] > 0
    assert result.final is result.history[-1]
    assert result.final["accuracy"] == pytest.approx(
        np.mean(list(result.personal_accuracy.values()))
    )
    assert result.final["global_accuracy"] == pytest.approx(
        np.mean(list(result.shared_accuracy.values()))
    )
    sizes = DATA.test.counts.numpy()
    weighted = np.average(list(result.personal_accuracy.values()), weights=sizes)
    assert result.final["weighted_accuracy"] == pytest.approx(weighted)


@pytest.mark.parametrize(
    ("algorithm", "privacy", "expected"),
    [
        (PMTL(local=SOLVER), None, math.inf),
        (PMTL(local=SOLVER), ClientPrivacy(clip_norm=1.0, epsilon=math.inf), math.inf),
        (Local(local=SOLVER), ClientPrivacy(clip_norm=1.0, epsilon=0.5), 0.0),
        (Local(local=SOLVER), None, 0.0),
    ],
    ids=["open", "clipped", "local", "local-open"],
)
def test_epsilon_without_noise(algorithm, privacy, expected):
    result = trainer(algorithm=algorithm, privacy=privacy).fit()
    assert [row["epsilon"] for row in result.history] == [expected] * 3
    assert result.epsilon == result.privacy.epsilon == expected


def test_evaluation_about_twenty_times_by_default():
    result = trainer(rounds=60, eval_every=None, model=models.softmax_regression()).fit()
    assert [row["round"] for row in result.history] == list(range(3, 61, 3))


def test_default_checkpoint_is_by_time(tmp_path):
    seen = []

    class Look(Callback):
        def on_block(self, event, state):
            seen.append((tmp_path / "private/checkpoint.safetensors").exists())

    trainer(checkpoint_every=None, folder=tmp_path, callbacks=[Look()]).fit()
    assert seen == [False] * 6
    assert (tmp_path / "private/checkpoint.safetensors").exists()


# Budgets


@pytest.mark.parametrize("every", [2, 3])
def test_budget_ends_the_run_cleanly(tmp_path, every):
    budget = (epsilon(4) + epsilon(5)) / 2
    privacy = ClientPrivacy(clip_norm=0.7, noise_multiplier=NOISE, epsilon=budget, delta=DELTA)
    run = trainer(rounds=9, privacy=privacy, folder=tmp_path, eval_every=every)
    result = run.fit()
    assert result.stopped == "budget"
    assert [row["round"] for row in result.history] == sorted({*range(every, 5, every), 4})
    assert result.epsilon == pytest.approx(epsilon(4), rel=1e-3)
    assert result.epsilon <= budget
    assert charges(tmp_path / "private/ledger.jsonl") == dict.fromkeys(range(4), 1)
    assert "budget is spent" in result.summary()
    check_same(run.fit(resume=True), result)
    four = trainer(rounds=4, eval_every=every).fit()
    assert torch.equal(four.personal, result.personal), (
        "the rounds within the budget are those of a shorter run"
    )


def test_cap_on_uses_of_a_fixed_cohort_ends_the_run():
    result = trainer(schedule=FixedCohort(cohort=4, max_uses=1)).fit()
    assert (result.stopped, result.final["round"]) == ("budget", CLIENTS // 4)


# Resuming


def test_a_finished_run_resumes_to_itself_with_its_baselines(tmp_path):
    run = trainer(folder=tmp_path, baselines=("local", "fedavg"))
    result, again = run.fit(), run.fit(resume=True)
    check_same(again, result)
    for name in ("local", "fedavg"):
        check_same(again.baselines[name], result.baselines[name])
    for folder in (tmp_path, tmp_path / "private/baselines/fedavg"):
        assert charges(folder / "private/ledger.jsonl") == dict.fromkeys(range(6), 1)


OTHERS = {
    "data": {"data": ragged_classification(CLIENTS, seed=1)},
    "seed": {"seed": 1},
    "rounds": {"rounds": 7},
    "lam": {"algorithm": PMTL(lam=0.6, local=SOLVER)},
    "algorithm": {"algorithm": FedAvg(local=SOLVER)},
    "noise": {"privacy": ClientPrivacy(clip_norm=0.7, noise_multiplier=1.6, delta=DELTA)},
    "clip": {"privacy": ClientPrivacy(clip_norm=0.8, noise_multiplier=NOISE, delta=DELTA)},
    "schedule": {"schedule": PoissonSampling(cohort=5)},
    "model": {"model": models.mlp(hidden=5)},
    "dtype": {"dtype": "float32"},
    "execution": {"execution": Execution(3)},
}


@pytest.mark.parametrize("source", ["seeded", "secure"])
def test_resume_refuses_another_run(tmp_path, source):
    def run(**settings):
        run = trainer(folder=tmp_path, **settings)
        return replace(run, privacy=replace(run.privacy, source=source))

    run().fit()
    before = {p: p.read_bytes() for p in tmp_path.rglob("*") if p.is_file() and p.stem != "ledger"}
    kept = []
    for settings in OTHERS.values():
        with pytest.raises(ResumeError, match=r"was written (with|for)") as error:
            run(**settings).fit(resume=True)
        if "checkpoint" in str(
            error.value
        ):  # its traceback stays alive: the refused run must hold no lock
            kept.append(error)
        del error
    assert len(kept) == (7 if source == "secure" else 0)
    assert before == {p: p.read_bytes() for p in before}
    run().fit(resume=True)


def test_resume_refuses_other_settings_without_a_ledger(tmp_path):
    trainer(privacy=None, folder=tmp_path).fit()
    with pytest.raises(
        ResumeError, match="written with other starting point, seed than this run has"
    ):
        trainer(privacy=None, folder=tmp_path, seed=1).fit(resume=True)


def test_used_folder_is_refused(tmp_path):
    for privacy in (None, trainer().privacy):
        folder = tmp_path / str(privacy is None)
        trainer(folder=folder, privacy=privacy).fit()
        before = {p: p.read_bytes() for p in folder.rglob("*") if p.is_file()}
        with pytest.raises(ResumeError, match="already holds a run"):
            trainer(folder=folder, privacy=privacy).fit()
        assert before == {p: p.read_bytes() for p in folder.rglob("*") if p.is_file()}


def test_nothing_to_resume():
    with pytest.raises(ResumeError, match="without a folder"):
        trainer().fit(resume=True)


# Callbacks


class Record(Callback):
    def __init__(self):
        self.calls = []

    def on_start(self, name, rounds, step):
        self.calls.append(("start", name, rounds, step))

    def on_block(self, event, state):
        self.calls.append(("event", event.step))

    def on_evaluate(self, row):
        self.calls.append(("evaluate", row["round"]))

    def on_end(self, result):
        self.calls.append(("end", result))


def test_callbacks_in_order():
    record = Record()
    result = trainer(rounds=3, callbacks=[record], baselines=("local",)).fit()
    *calls, (last, ended) = record.calls
    assert calls == [
        ("start", "pmtl", 3, 0),
        ("event", 0),
        ("event", 1),
        ("evaluate", 2),
        ("event", 2),
        ("evaluate", 3),
    ]
    assert last == "end"
    assert torch.equal(ended.personal, result.personal)


@pytest.mark.parametrize("error", [KeyboardInterrupt, RuntimeError])
@pytest.mark.parametrize("source", ["seeded", "secure"])
def test_interrupted_run_ends_its_callbacks_and_resumes(tmp_path, error, source):
    privacy = ClientPrivacy(clip_norm=0.7, noise_multiplier=NOISE, delta=DELTA, source=source)
    record = Record()
    with pytest.raises(error) as kept:
        trainer(folder=tmp_path, privacy=privacy, callbacks=[Ends(3, error), record]).fit()
    assert record.calls[-1] == ("end", None)
    # steps that never began are given back, steps that did are not
    assert charges(tmp_path / "private/ledger.jsonl") == dict.fromkeys(range(4), 1)
    record = Record()
    result = trainer(folder=tmp_path, privacy=privacy, callbacks=[record]).fit(resume=True)
    assert kept.value is not None  # the traceback is alive, and holds no lock
    assert record.calls[0] == ("start", "pmtl", 6, 2)
    if source == "seeded":
        check_same(result, trainer().fit())
    else:
        assert charges(tmp_path / "private/ledger.jsonl") == {0: 1, 1: 1, 2: 2, 3: 2, 4: 1, 5: 1}
        assert result.epsilon == pytest.approx(epsilon(8), rel=1e-3)


def test_the_clock_goes_on_where_an_interrupted_run_left_it(tmp_path, monkeypatch):
    """A run of 100 seconds an evaluation that is interrupted is not younger when it goes on."""
    slow = itertools.count(step=100.0)
    with monkeypatch.context() as patch:
        patch.setattr(evaluator, "time", SimpleNamespace(monotonic=lambda: next(slow)))
        with pytest.raises(RuntimeError):
            trainer(folder=tmp_path, callbacks=[Ends(4, RuntimeError)]).fit()
    history = trainer(folder=tmp_path).fit(resume=True).history
    assert [row["round"] for row in history] == [2, 4, 6]
    times = [row["time"] for row in history]
    assert times == sorted(times)
    assert times[-1] > 100


# Baselines


def test_baselines_are_runs_of_their_own(tmp_path):
    prox = FedProx(mu=0.3, local=SOLVER)
    result = trainer(folder=tmp_path, baselines=("pmtl", "local", "fedavg", prox)).fit()
    assert list(result.baselines) == ["local", "fedavg", "fedprox"]  # its own method is skipped
    alone = {"local": Local(local=SOLVER), "fedavg": FedAvg(local=SOLVER), "fedprox": prox}
    for name, algorithm in alone.items():
        check_same(result.baselines[name], trainer(algorithm=algorithm).fit())
    root = tmp_path / "private/baselines"
    assert result.baselines["local"].epsilon == 0.0
    assert not (root / "local/private/ledger.jsonl").exists()
    for ledger in (tmp_path, root / "fedavg", root / "fedprox"):
        assert charges(ledger / "private/ledger.jsonl") == dict.fromkeys(range(6), 1)
    assert result.baselines["fedavg"].epsilon == result.epsilon
    check_same(result, trainer().fit())


# Errors by name


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"rounds": 0}, "Trainer.rounds is 0"),
        ({"dtype": "float16"}, "Trainer.dtype is 'float16'; accepted: 'float32', 'float64'"),
        (
            {"schedule": PoissonSampling(cohort=CLIENTS + 1)},
            "PoissonSampling.cohort is 13, but there are only 12",
        ),
        ({"schedule": COHORT}, "schedule is 4; give a sampler"),
        ({"schedule": PoissonSampling}, "schedule is <class 'fedmtl"),
        ({"algorithm": "pmtl"}, "algorithm is 'pmtl'; give an algorithm object"),
        ({"privacy": 4.0}, "privacy is 4.0; give ClientPrivacy"),
        ({"baselines": "local"}, "baselines is 'local'; give a list"),
        ({"baselines": None}, "baselines is None; give a list, such as"),
        ({"baselines": ("fedava",)}, "baselines has 'fedava'; accepted: apfl, ditto, fedavg"),
        ({"baselines": ("local", Local())}, "baselines has 'local' twice"),
        ({"model": "mlpp"}, "model is 'mlpp'; give a module, a function of the data's DataSpec"),
        ({"model": nn.Linear}, "model is <class 'torch.nn.modules.linear.Linear'>; give a module"),
        (
            {"callbacks": [print]},
            "callbacks is [<built-in function print>]; give a list of objects of classes",
        ),
        ({"callbacks": print}, "callbacks is <built-in function print>; give a list of objects"),
        ({"folder": 3}, "folder is 3; give a path, as text or Path, or None"),
        (
            {"data": [1]},
            "data is a list; give a FederatedDataset, the name of a reader such as 'digits', a mapping",
        ),
        ({"data": "digitz"}, "data.name is 'digitz'; accepted: "),
        ({"execution": 3}, "execution is 3; give Execution"),
        ({"early_stopping": 3}, "early_stopping is 3; give EarlyStopping(patience=3) or None"),
    ],
)
def test_settings_that_cannot_be(settings, said):
    with pytest.raises(ConfigError) as caught:
        trainer(**settings)
    assert str(caught.value).startswith(said)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    "wrong", [{"model": "mlpp"}, {"loss": "mze"}, {"loss": [1]}, {"metrics": ["f7"]}]
)
def test_wrong_names_are_refused_before_the_data_are_read(wrong):
    def read():
        pytest.fail("the data were read")

    with pytest.raises(ConfigError, match=f"{next(iter(wrong))} (is|has) "):
        trainer(data=read, **wrong)


def test_a_file_is_no_folder_for_a_run(tmp_path):
    (tmp_path / "notes.txt").write_text("mine")
    record = Record()
    with pytest.raises(
        ConfigError, match=r"where no file can be written .*; choose another folder"
    ):
        trainer(folder=tmp_path / "notes.txt" / "run", callbacks=[record]).fit()
    assert not record.calls, "refused before training"


class NamedOutput(nn.Linear):
    """A network that looks for an output that it does not have."""

    def __init__(self):
        super().__init__(5, 3)

    def forward(self, x):
        return {"scores": super().forward(x)}["logits"]


@pytest.mark.parametrize(
    ("settings", "error", "message"),
    [
        (
            {"device": "abacus"},
            ConfigError,
            r"device is 'abacus', which is not available here; accepted: auto, cpu",
        ),
        (
            {"data": regression(CLIENTS), "loss": "cross_entropy"},
            ConfigError,
            "targets are real numbers; use",
        ),
        ({"loss": "hinge"}, ConfigError, "hinge"),
        (
            {"model": nn.Linear(5, 4)},
            ModelError,
            r"to one tensor \(B, 3\), since the data has 3 classes",
        ),
        ({"model": nn.Linear(6, 3)}, ModelError, r"fails on a batch of shape \(2, 5\)"),
        (
            {"model": NamedOutput()},
            ModelError,
            r"fails on a batch of shape \(2, 5\), .*: KeyError\('logits'\)",
        ),
    ],
)
def test_runs_that_cannot_be(tmp_path, settings, error, message):
    with pytest.raises(error, match=message):
        trainer(folder=tmp_path / "run", **settings).fit()
    assert not (tmp_path / "run").exists(), "refused before any work"


@pytest.mark.parametrize(
    ("loss", "message"),
    [
        (
            lambda z, y: nn.functional.cross_entropy(z, y),
            r"^loss returned shape \(\); it must return shape \(\d+,\), one",
        ),
        (lambda z, y: 0.0, r"^loss returned a float; it must return shape"),
        (
            lambda z, y: z @ y,
            r"^loss fails on outputs of shape \(\d+, 3\) with targets of shape \(\d+,\): ",
        ),
    ],
)
def test_a_loss_that_does_not_fit_is_named(loss, message):
    with pytest.raises(ConfigError, match=message):
        trainer(loss=loss).fit()
