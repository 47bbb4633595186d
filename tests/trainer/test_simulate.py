"""Rounds one by one: those of a whole run, charged and stopped by the caller."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from fedmtl import (
    PMTL,
    PPDMTL,
    AsyncLearner,
    ClientPrivacy,
    FedAvg,
    Local,
    LocalSGD,
    PoissonClocks,
    PoissonSampling,
    RecordPrivacy,
    load_data,
    models,
    simulate,
)
from fedmtl.algorithms import RoundAlgorithm
from fedmtl.errors import ConfigError
from fedmtl.privacy import RoundChannel
from tests.small import trainer

LOCAL = LocalSGD(lr=0.1, batch_size=4)
PRIVATE = ClientPrivacy(clip_norm=0.5, epsilon=4.0)
CASES: dict[str, dict[str, Any]] = {
    "pmtl": {"algorithm": PMTL(lam=0.5, local=LOCAL), "schedule": PoissonSampling(cohort=3)},
    "fedavg": {"algorithm": FedAvg(local=LOCAL)},
    "records": {
        "algorithm": FedAvg(local=LOCAL),
        "privacy": RecordPrivacy(clip_norm=0.5, epsilon=4.0),
    },
    "local": {"algorithm": Local(local=LOCAL), "privacy": None},
}


@pytest.mark.parametrize("name", CASES)
def test_the_steps_are_those_of_a_run(name: str) -> None:
    settings = trainer(**{"privacy": PRIVATE, "rounds": 4, "eval_every": 1} | CASES[name])
    found = settings.fit()
    steps = []
    for step in simulate(settings):
        steps.append((step.done, step.epsilon))
        personal = step.personal()
        shared = None if step.shared is None else step.shared.clone()
    assert [done for done, _ in steps] == [1, 2, 3, 4]
    assert [epsilon for _, epsilon in steps] == [row["epsilon"] for row in found.history]
    assert torch.equal(personal, found.personal)
    if found.shared is not None:
        assert shared is not None
        assert torch.equal(shared, found.shared)


def test_activations_come_in_blocks() -> None:
    settings = trainer(
        algorithm=PPDMTL(feature_norm=1.0),
        data=load_data("synthetic_tasks", tasks=4),
        model=models.linear_regression(bias=False),
        schedule=PoissonClocks(per_client=3),
        privacy=RecordPrivacy(clip_norm=1.0, epsilon=8.0),
        rounds=12,
        eval_every=5,
    )
    *before, last = simulate(settings)
    found = settings.fit()
    assert [step.done for step in before] == [5, 10]  # where the run would be evaluated
    assert last.done == 12
    torch.testing.assert_close(last.personal(torch.tensor([2]))[0], found.personal[2])
    assert last.epsilon == found.epsilon


@pytest.mark.parametrize("algorithm", [AsyncLearner(), PPDMTL(feature_norm=1.0)])
def test_the_models_of_a_step_stay_as_they_were(algorithm) -> None:
    settings = trainer(
        algorithm=algorithm,
        data=load_data("synthetic_tasks", tasks=4),
        model=models.linear_regression(bias=False),
        schedule=PoissonClocks(per_client=3),
        privacy=RecordPrivacy(clip_norm=1.0, epsilon=8.0),
        rounds=12,
        eval_every=4,
        dtype="float64",
    )
    taken = []
    for step in simulate(settings):
        for model in (step.shared, step.personal()):
            if model is not None:
                taken.append((model, model.clone()))
    assert len(taken) >= 3
    for model, before in taken:
        assert torch.equal(model, before)


def test_a_loop_that_is_left_has_spent_less_and_closes_the_channel() -> None:
    settings = trainer(privacy=PRIVATE, rounds=4)
    loop = simulate(settings)
    first = next(loop)
    whole = settings.fit()
    assert 0 < first.epsilon < whole.epsilon
    alone = replace(
        settings,
        rounds=1,
        privacy=replace(PRIVATE, epsilon=None, noise_multiplier=_multiplier(whole)),
    ).fit()
    assert first.epsilon == pytest.approx(alone.epsilon, rel=1e-9)
    loop.close()
    assert list(loop) == []


def test_the_epsilon_of_a_step_holds_for_all_clients_and_budgets() -> None:
    """After one activation one client has spent something, and the others nothing."""
    settings = trainer(
        algorithm=PPDMTL(feature_norm=1.0),
        data=load_data("synthetic_tasks", tasks=4),
        model=models.linear_regression(bias=False),
        schedule=PoissonClocks(per_client=3),
        privacy=RecordPrivacy(clip_norm=1.0, epsilon=6.0, mechanism="laplace", delta=0.0),
        rounds=12,
        epsilons=[3.0, 6.0],
    )
    loop = simulate(settings)
    assert next(loop).epsilon == pytest.approx(2.0, rel=1e-3)  # a third of the larger budget
    loop.close()


@pytest.mark.parametrize("end", ["close", "error"])
def test_the_channel_is_closed_however_the_loop_ends(
    end: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    closed: list[str] = []
    close, step = RoundChannel.close, RoundAlgorithm.step
    monkeypatch.setattr(RoundChannel, "close", lambda self: closed.append(end) or close(self))
    loop = simulate(trainer(privacy=PRIVATE, rounds=3))
    next(loop)
    assert closed == []
    if end == "close":
        loop.close()
    else:
        monkeypatch.setattr(RoundAlgorithm, "step", lambda *_: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            next(loop)
        monkeypatch.setattr(RoundAlgorithm, "step", step)
    assert closed == [end]
    assert list(loop) == []  # a round that failed is charged, and is not computed again


def _multiplier(result: Any) -> float:
    return float(result.privacy.noise_multiplier)


def test_nothing_is_computed_before_the_first_step(monkeypatch: pytest.MonkeyPatch) -> None:
    """A generator that nobody asks charges nothing; a step is charged before it is computed."""
    order: list[str] = []
    begin, step = RoundChannel.begin, RoundAlgorithm.step
    monkeypatch.setattr(
        RoundChannel, "begin", lambda self, *a: order.append("charge") or begin(self, *a)
    )
    monkeypatch.setattr(
        RoundAlgorithm, "step", lambda self, *a: order.append("step") or step(self, *a)
    )
    loop = simulate(trainer(privacy=PRIVATE, rounds=2))
    assert order == []
    next(loop)
    assert order == ["charge", "step"]
    loop.close()


@pytest.mark.parametrize(
    "clients",
    ["anna", [0, 1], torch.tensor([6]), torch.tensor([-1]), torch.tensor([0.0]), torch.tensor(1)],
    ids=str,
)
def test_personal_models_are_asked_for_by_places(clients: Any) -> None:
    step = next(simulate(trainer()))
    with pytest.raises(ConfigError, match="numbers from 0 to 5"):
        step.personal(clients)


def test_what_is_no_trainer_is_refused() -> None:
    with pytest.raises(ConfigError, match="takes a Trainer, not 'pmtl'"):
        simulate("pmtl")  # type: ignore[arg-type]


def test_a_folder_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="keeps nothing on the disk"):
        simulate(trainer(folder=tmp_path / "run"))  # by the call, before a step is asked for
    assert not (tmp_path / "run").exists()


def test_secure_noise_is_refused_in_one_of_several_processes(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Each would draw noise of its own, and two noised values of the same data cost twice as much as one."""
    monkeypatch.setenv("WORLD_SIZE", "2")
    secure = replace(PRIVATE, source="secure")
    with pytest.raises(ConfigError, match=r"2 were launched.*no report would count them all"):
        simulate(trainer(privacy=secure, rounds=2))
    alike = [next(simulate(trainer(privacy=PRIVATE, rounds=2))).shared for _ in range(2)]
    assert torch.equal(*alike)  # seeded noise is one release, however often it is computed
