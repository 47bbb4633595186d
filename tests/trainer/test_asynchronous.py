"""The same trainer for clients that act one at a time: blocks, charges, exact resume, refusals."""

from collections import Counter
from dataclasses import replace
from functools import partial

import pytest
import torch

from fedmtl import (
    PMTL,
    PPDMTL,
    AsyncLearner,
    ClientPrivacy,
    FullParticipation,
    Latencies,
    Moments,
    PeerToPeer,
    PoissonClocks,
    PublicStart,
    RecordPrivacy,
    Trainer,
    models,
)
from fedmtl.data import load_synthetic_tasks
from fedmtl.errors import ConfigError
from fedmtl.graphs import Ring
from fedmtl.schedules import RandomLatency, TraceLatency
from fedmtl.trainer.engine import bind_schedule
from fedmtl.trainer.problem import build_problem
from tests import small

from ..small import Ended, Ends, check_resumed
from .ledgers import participations

TASKS, ANSWERS = 5, 12
DATA = load_synthetic_tasks(tasks=TASKS, train_examples=15, test_examples=10, features=6, public_examples=30)
CLOCKS = PoissonClocks(per_client=ANSWERS)
LATENCIES = Latencies(latency=RandomLatency("uniform", {"scale": 1.0}), activations=ANSWERS)
LAPLACE = RecordPrivacy(clip_norm=1.0, epsilon=5.0, mechanism="laplace", delta=0.0)
L2_LAPLACE = replace(LAPLACE, mechanism="l2_laplace", delta=1e-5)
CASES = {
    "learner": {"algorithm": AsyncLearner(loss="logistic", reg=1e-3), "schedule": CLOCKS, "privacy": LAPLACE},
    "public start": {"algorithm": PublicStart(loss="logistic", reg=1e-3), "schedule": CLOCKS, "privacy": LAPLACE},
    "moments": {"algorithm": Moments(), "schedule": CLOCKS, "privacy": LAPLACE},
    "pp_dmtl": {"algorithm": PPDMTL(row_norm=1.0), "schedule": LATENCIES, "privacy": L2_LAPLACE},
    "pp_dmtl, chosen step": {
        "algorithm": PPDMTL(row_norm=1.0, a2="auto"),
        "schedule": LATENCIES,
        "privacy": L2_LAPLACE,
    },
    "p2p": {
        "algorithm": PeerToPeer(row_norm=1.0, graph=Ring(), mu=0.5, allocation=2.0),
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
    assert participations(tmp_path / "run/private/ledger.jsonl") == Counter(dict.fromkeys(range(TASKS), ANSWERS))
    assert 4.99 < result.epsilon <= 5.0
    report = result.privacy
    assert (report.unit, report.relation, report.releases) == ("record", "replace", total)
    assert [row["epsilon"] for row in result.history] == sorted(row["epsilon"] for row in result.history)
    assert result.personal.shape == (TASKS, 6)


@pytest.mark.parametrize(("case", "at"), [("learner", 6), *((case, 33) for case in CASES)])
def test_an_interrupted_run_resumes_to_the_same_bits(case, at, tmp_path):
    check_resumed(partial(trainer, case, checkpoint_every=5), tmp_path, at)
    assert participations(tmp_path / "run/private/ledger.jsonl") == Counter(dict.fromkeys(range(TASKS), ANSWERS))


def test_a_secure_run_that_crashed_ends_within_its_caps(tmp_path):
    settings = {"privacy": replace(LAPLACE, source="secure"), "folder": tmp_path / "run", "checkpoint_every": 10}
    with pytest.raises(Ended):
        trainer("learner", **settings, callbacks=(Ends(20),)).fit()
    result = trainer("learner", **settings).fit(resume=True)
    assert result.stopped == "budget"  # what was lost stays charged
    assert result.epsilon <= 5.0
    assert result.final["round"] < TASKS * ANSWERS


def test_schedules_and_units_that_do_not_fit_are_refused_by_name():
    with pytest.raises(ConfigError, match=r"async_learner has clients that act one at a time.*not FullParticipation"):
        trainer("learner", schedule=FullParticipation())
    with pytest.raises(ConfigError, match=r"pp_dmtl protects single records"):
        trainer("pp_dmtl", privacy=ClientPrivacy(clip_norm=1.0, epsilon=1.0))
    with pytest.raises(ConfigError, match=r"pmtl goes in rounds.*not PoissonClocks"):
        trainer("learner", algorithm=PMTL())
    with pytest.raises(ConfigError, match="baselines"):
        trainer("learner", baselines=("fedavg",))


def test_the_schedule_is_of_the_names_and_keys_of_the_clients():
    run = trainer("learner")
    events = run.bound.events(0, 0, 9)
    turned = DATA.subset(DATA.ids[::-1])
    again = build_problem(turned, run.model, run.loss, run.execution, 9, 0, "cpu", "float64")
    mirrored = bind_schedule(run.schedule, again.data).events(0, 0, 9)
    assert torch.equal(4 - mirrored.client, events.client)


FEW = 4
NEVER = {
    "cap": PoissonClocks(per_client=[FEW, 0, FEW, FEW, FEW]),
    "rate": PoissonClocks(per_client=FEW, rate=[1.0, 0.0, 2.0, 1.0, 1.0]),
    "trace": Latencies(latency=TraceLatency([[1.0], [1e9], [2.0], [1.0], [1.0]]), activations=[FEW, 0, FEW, FEW, FEW]),
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
    assert [round(e, 2) for e in result.privacy.by_client] == [1.0, 3.0, 5.0]  # least, median and most
