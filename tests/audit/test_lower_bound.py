"""Runs with canaries: the certificate, broken noise, resumed and secure runs, and what is refused."""

import json
import math
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from scipy import stats

import fedmtl.privacy.dp_sgd
import fedmtl.privacy.records
import fedmtl.privacy.round_channel
import fedmtl.trainer.run
from fedmtl import (
    FedAvg,
    FederatedDataset,
    Finetune,
    FixedCohort,
    FullParticipation,
    Interval,
    Local,
    LocalSGD,
    PoissonSampling,
    QuantileClip,
    RecordPrivacy,
    Result,
    Scaffold,
    Trainer,
    models,
)
from fedmtl._rounding import rounded_down
from fedmtl.audit.lower_bound import MODEL, RELEASES
from fedmtl.audit.verification import verify
from fedmtl.cli import main
from fedmtl.contrib.published.mp_mtl import PublishedMPMTL
from fedmtl.contrib.published.pp_dmtl import PublishedPPDMTL
from fedmtl.data import load_synthetic_tasks
from fedmtl.errors import ConfigError, PrivacyError, ResumeError
from fedmtl.privacy import ClientPrivacy
from fedmtl.privacy.noise.grid import IndependentNoise
from fedmtl.trainer.processes import processes

from ..trainer.settings import CLIENTS, DELTA, SOLVER, trainer
from ..trainer.test_asynchronous import LAPLACE
from ..trainer.test_asynchronous import trainer as one_at_a_time
from ..trainer.test_endings import Interrupting, keyboard  # noqa: F401 - which this module uses, too

CANARIES = 200
AUDITED = {
    "algorithm": FedAvg(local=SOLVER),
    "model": models.mlp(hidden=60),  # of 563 parameters
    "schedule": FullParticipation(),
    "privacy": ClientPrivacy(clip_norm=0.7, epsilon=4.0, delta=DELTA),
    "audit": Interval(canaries=CANARIES),
}


def interval(**settings):
    """The certificate of a run, and the run."""
    result = trainer(**AUDITED | settings).fit()
    return result.privacy.interval, result


def observer(certificate, name):
    (found,) = [one for one in certificate["observers"] if one["observer"] == name]
    return found


def test_a_sound_run_measures_less_than_it_claims():
    certificate, result = interval(baselines=("local",))
    assert result.baselines["local"].privacy.interval is None
    assert certificate["claimed"] == result.epsilon <= 4.0
    assert 0.5 < certificate["measured"] < certificate["claimed"]
    assert certificate["delta"] == DELTA
    assert (certificate["canaries"], certificate["confidence"], certificate["uses"]) == (
        CANARIES,
        0.95,
        6,
    )
    for name in (RELEASES, MODEL):
        for bound in observer(certificate, name)["bounds"]:
            assert bound["canaries"] == CANARIES
            assert bound["made"] == (CANARIES if bound["independent"] else CANARIES // 10)
    assert len(result.ids) == len(result.personal_accuracy) == CLIENTS, (
        "canaries have no models and no scores"
    )


@pytest.mark.parametrize(
    ("settings", "canaries", "independent"),
    [
        ({"schedule": PoissonSampling(cohort=120)}, 200, True),
        ({"schedule": FixedCohort(cohort=150)}, 200, True),
        ({"algorithm": Scaffold(local=SOLVER)}, 200, True),
        ({"schedule": FullParticipation()}, 800, False),
    ],
)
def test_every_schedule_and_two_releases_have_their_bounds(settings, canaries, independent):
    certificate, result = interval(audit=Interval(canaries=canaries), **settings)
    first = certificate["observers"][0]
    assert first["observer"] == RELEASES
    assert first["bounds"][0]["independent"] == independent
    assert 0 <= certificate["measured"] < certificate["claimed"] == result.epsilon
    assert (MODEL in [one["observer"] for one in certificate["observers"]]) == independent


def test_an_adaptive_clip_makes_canaries_dependent():
    privacy = ClientPrivacy(clip_norm=QuantileClip(initial=0.7), epsilon=4.0, delta=DELTA)
    certificate, result = interval(privacy=privacy)
    assert not any(
        bound["independent"] for one in certificate["observers"] for bound in one["bounds"]
    )
    assert "the clip norm follows the rows of canaries" in " ".join(result.privacy.text().split())


def test_a_secure_run_is_saved_verified_and_read_again(tmp_path, capsys):
    folder = tmp_path / "run"
    privacy = replace(AUDITED["privacy"], source="secure")
    certificate, result = interval(privacy=privacy, folder=folder)
    stored = json.loads((folder / "public" / "privacy.json").read_text())["interval"]
    assert stored == certificate
    assert Result.load(folder).privacy.interval == certificate
    line = f"epsilon 4 claimed, at least {rounded_down(certificate['measured'])} measured (95%)"
    assert line in result.summary()
    assert f"{CLIENTS} clients and {CANARIES} canaries, 6 rounds" in result.summary()
    checks = {check.name: check for check in verify(folder).checks}
    assert {name for name, check in checks.items() if check.verdict == "FAILED"} == set()
    assert checks["interval"].verdict == "confirmed"
    assert main(["report", str(folder), "--html"]) == 0
    capsys.readouterr()
    assert line in (folder / "private" / "report" / "report.html").read_text()


@pytest.mark.parametrize(
    ("change", "match"),
    [
        (lambda one: one.update(measured=one["measured"] * 1.5), "not those of the guesses"),
        (lambda one: one.update(uses=7), "uses of the interval is 7"),
    ],
)
def test_an_altered_certificate_is_not_confirmed(tmp_path, change, match):
    folder = tmp_path / "run"
    interval(folder=folder)
    path = folder / "public" / "privacy.json"
    report = json.loads(path.read_text())
    change(report["interval"])
    path.write_text(json.dumps(report))
    (check,) = [check for check in verify(folder).checks if check.name == "interval"]
    assert check.verdict == "FAILED"
    assert match in check.detail


GENERATOR = torch.Generator().manual_seed(0)
RECORDS = {
    "data": FederatedDataset.from_tensors(
        {
            f"c{k}": (
                torch.randn(15, 3, generator=GENERATOR, dtype=torch.float64),
                torch.arange(15) % 2,
            )
            for k in range(5)
        },
        classes=2,
        test_fraction=0.2,
    ),
    "privacy": RecordPrivacy(clip_norm=0.7, epsilon=4.0, delta=DELTA),
    "algorithm": FedAvg(local=LocalSGD(lr=0.1, steps=2, batch_size=None)),
    "rounds": 3,
}


@pytest.mark.parametrize("batch", [None, 30])
def test_scores_of_records_have_their_law(monkeypatch, batch):
    """mu-GDP where all records take part; where they are sampled, the likelihood ratio of one out has mean 1."""
    channels = []

    certificate = Interval.certificate

    def kept(audit, channel, *rest):
        channels.append(channel)
        return certificate(audit, channel, *rest)

    monkeypatch.setattr(Interval, "certificate", kept)
    local = LocalSGD(lr=0.1, steps=4, batch_size=batch)
    audit = Interval(canaries=1000)
    found, _ = interval(**RECORDS | {"algorithm": FedAvg(local=local), "audit": audit})
    (channel,) = channels
    canaries, sums = channel.canaries, 3 * 4
    assert (len(canaries), canaries.each, found["unit"], found["uses"]) == (1000, 200, "record", 3)
    assert bool((canaries.uses == sums).all())
    assert channel.records.plan.counts.tolist() == [212] * 5
    if batch is None:
        mu = math.sqrt(sums) / channel.noise_multiplier
        centred = canaries.scores - torch.where(canaries.coins, 1.0, -1.0) * mu**2 / 2
        assert stats.kstest(centred.numpy() / mu, "norm").pvalue > 1e-3
    else:
        ratios = canaries.scores[~canaries.coins].exp()
        assert abs(float(ratios.mean()) - 1) < 5 * float(ratios.std()) / math.sqrt(len(ratios))
    assert 0 < found["measured"] < found["claimed"]


TASKS = load_synthetic_tasks(
    tasks=20, train_examples=15, test_examples=10, features=20, public_examples=30
)
ACTIVATIONS = {"data": TASKS, "audit": Interval(canaries=400)}


@pytest.mark.parametrize("case", ["learner", "public start", "moments", "p2p", "pp_dmtl"])
def test_activations_measure_less_than_they_claim(case):
    """20 canaries of each of 20 tasks, which have as many coordinates; the noise of PP-DMTL is spherical."""
    found = one_at_a_time(case, **ACTIVATIONS).fit().privacy.interval
    assert (found["unit"], found["canaries"], found["uses"]) == ("record", 400, 12)
    assert found["observers"][0]["bounds"][0]["independent"] == (case != "pp_dmtl")
    assert 0 <= found["measured"] < found["claimed"]
    assert found["measured"] > 1 or case == "pp_dmtl"


KINDS: dict[
    str, tuple[Callable[..., Trainer], Any, str, int]
] = {  # runs, where their noise is made, and a middle step
    "rounds": (partial(trainer, **AUDITED), IndependentNoise, "at", 3),
    "records": (partial(trainer, **AUDITED | RECORDS), fedmtl.privacy.records, "client_noise", 1),
    "learner": (
        partial(one_at_a_time, "learner", **ACTIVATIONS),
        fedmtl.privacy.records,
        "client_noise",
        103,
    ),
    "p2p": (
        partial(one_at_a_time, "p2p", **ACTIVATIONS),
        fedmtl.privacy.records,
        "client_noise",
        103,
    ),
}


@pytest.mark.parametrize("kind", KINDS)
def test_halved_noise_is_measured_above_the_claim(monkeypatch, kind):
    make, place, name, _ = KINDS[kind]
    original = getattr(place, name)

    def halved(*args, **options):
        noise, width = original(*args, **options)
        return noise / 2, width

    monkeypatch.setattr(place, name, halved)
    found = make().fit().privacy.interval
    assert found["measured"] > found["claimed"]


@pytest.mark.parametrize(("kind", "source"), [("rounds", "seeded"), ("learner", "seeded"), ("records", "seeded"),
                                              ("records", "secure"), ("learner", "secure")])  # fmt: skip
def test_a_resumed_run_has_the_same_certificate_and_is_verified(tmp_path, kind, source):
    make, _, _, step = KINDS[kind]
    run = make()
    run = replace(run, privacy=replace(run.privacy, source=source))
    part = replace(run, folder=tmp_path / "run")
    with pytest.raises(KeyboardInterrupt):
        replace(part, callbacks=(Interrupting(step),)).fit()
    found = part.fit(resume=True).privacy.interval
    checks = {check.name: check.verdict for check in verify(tmp_path / "run").checks}
    assert "FAILED" not in checks.values()
    assert checks["interval"] == "confirmed"
    if source == "seeded":
        assert found == run.fit().privacy.interval
        with pytest.raises(ResumeError, match="audit"):
            replace(part, audit=Interval(canaries=7)).fit(resume=True)


def test_activations_without_one_claim_for_all_canaries_are_refused():
    with pytest.raises(
        PrivacyError, match=r"Canaries measure a claimed epsilon, and .* has none that holds"
    ):
        one_at_a_time("pp_dmtl", algorithm=PublishedPPDMTL(feature_norm=1.0), **ACTIVATIONS).fit()
    wishart = replace(AUDITED["privacy"], mechanism="wishart")
    tasks = {"data": TASKS, "model": models.linear_regression(), "loss": "auto", "privacy": wishart}
    with pytest.raises(PrivacyError, match="and mp_mtl_published has none that holds"):
        interval(algorithm=PublishedMPMTL(feature_norm=1.0, lam=0.05), **tasks)
    budgets = {name: 1.0 + k for k, name in enumerate(TASKS.ids)}
    with pytest.raises(
        PrivacyError, match="Canaries join clients of one cost; give one epsilon to all clients"
    ):
        one_at_a_time("learner", privacy=replace(LAPLACE, epsilon=budgets), **ACTIVATIONS).fit()


@pytest.mark.parametrize(
    ("settings", "match"),
    [
        ({"privacy": None}, "audit measures a claimed epsilon, and privacy is None of fedavg"),
        (
            {"privacy": ClientPrivacy(clip_norm=1.0, epsilon=math.inf)},
            "audit measures a claimed epsilon",
        ),
        ({"audit": 200}, r"audit is 200; give Interval\(canaries=200\) or None"),
        (
            {"algorithm": Local(local=SOLVER)},
            "audit measures what is released, and local releases nothing",
        ),
    ],
)
def test_what_cannot_be_measured_is_refused(settings, match):
    with pytest.raises(ConfigError, match=match):
        trainer(**AUDITED | settings).fit()


def test_several_processes_and_repetitions_are_refused():
    with pytest.raises(
        ConfigError, match="audit measures one run; leave replicates and epsilons out"
    ):
        one_at_a_time("learner", replicates=2, **ACTIVATIONS)
    with pytest.raises(
        ConfigError, match=r"audit=Interval\(...\) needs one process, and 2 were started"
    ):
        processes(trainer(**AUDITED), SimpleNamespace(ranks=SimpleNamespace(size=2)))


def test_few_clients_all_take_part_with_canaries_as_without() -> None:
    run = trainer(**AUDITED | {"schedule": PoissonSampling()})
    assert run.bound_schedule == FullParticipation().bind(len(run.data) + CANARIES)


def test_canary_records_stand_behind_the_records_that_are_trained_on(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Where records are withheld for validation, positions behind those left would be records of the next client."""
    sums, noised = [], fedmtl.privacy.dp_sgd.LocalSteps._noised

    def noted(self, total, clients, steps):
        sums[-1].append((clients, total.clone()))
        return noised(self, total, clients, steps)

    monkeypatch.setattr(fedmtl.privacy.dp_sgd.LocalSteps, "_noised", noted)
    solver = LocalSGD(lr=0.2, batch_size=8)
    finetune = Finetune(kind="vanilla", local=solver, validation=0.3)
    changed = {
        "algorithm": FedAvg(local=solver),
        "finetune": finetune,
        "audit": Interval(canaries=40),
        "rounds": 1,
    }
    own = slice(*RECORDS["data"].train.offsets[2:4].tolist())
    for scale in (1.0, 3.0):
        sums.append([])
        train = replace(RECORDS["data"].train, x=RECORDS["data"].train.x.clone())
        train.x[own] *= scale
        interval(**RECORDS | changed | {"data": replace(RECORDS["data"], train=train)})
    assert {
        int(client)
        for (clients, first), (_, second) in zip(*sums, strict=True)
        for client in clients[(first - second).norm(dim=1) > 1e-9]
    } == {2}
