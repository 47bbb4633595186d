"""The transcript: the public state is a function of the releases; and the audit of whole configurations."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from fedmtl import Trainer, models
from fedmtl.algorithms import PMTL, Ditto, FedAvg, FedProx, Local, ServerOptimizer
from fedmtl.audit import CHECKS, Effort, Finding, any_refuted, table
from fedmtl.audit.claim import width_of
from fedmtl.audit.early_stop import stopped_early, stopping_rule
from fedmtl.audit.freshness import training_freshness
from fedmtl.audit.grid_check import on_grid
from fedmtl.audit.other_clients import replaced_data
from fedmtl.audit.rerun import watched
from fedmtl.audit.run_suite import audit_trainer, setup_of
from fedmtl.audit.transcript import automatic_settings, transcript
from fedmtl.contrib.automatic import Automatic, automatic
from fedmtl.data import FederatedDataset
from fedmtl.data.examples import Examples
from fedmtl.data.rows import csr
from fedmtl.local import LocalSGD
from fedmtl.privacy import (
    ClientPrivacy,
    FixedCohort,
    FullParticipation,
    GaussianNoise,
    LaplaceNoise,
    LocalSteps,
    PoissonSampling,
    Privacy,
    RecordPrivacy,
)
from fedmtl.privacy.noise.grid import grid_width
from tests import small
from tests.audit.mutants import trainer_of
from tests.helpers import ragged_classification, regression

SOLVER = LocalSGD(lr=0.2, epochs=2, batch_size=4)
ALGORITHMS = {
    "pmtl": PMTL(lam=0.5, local=SOLVER),
    "pmtl-momentum": PMTL(
        local=SOLVER, server_optimizer=ServerOptimizer(options={"momentum": 0.9})
    ),
    "fedavg": FedAvg(local=SOLVER),
    "fedprox": FedProx(local=SOLVER),
    "fedavg-adam": FedAvg(
        local=SOLVER, server_optimizer=ServerOptimizer(optimizer_name="Adam", lr=0.1)
    ),
    "local": Local(local=SOLVER),
}
SAMPLERS = {
    "poisson": PoissonSampling(cohort=4),
    "full": FullParticipation(),
    "fixed": FixedCohort(cohort=4),
}


def trainer(algorithm="fedavg", sampler="full", **options) -> Trainer:
    settings = {
        "algorithm": ALGORITHMS[algorithm] if isinstance(algorithm, str) else algorithm,
        "data": ragged_classification(8),
        "model": models.mlp(hidden=4),
        "schedule": SAMPLERS[sampler],
        "privacy": ClientPrivacy(clip_norm=0.5, noise_multiplier=1.0),
        "rounds": 5,
    }
    return small.trainer(**(settings | options))


def public_state(run: Trainer, rounds: int) -> Finding:
    return transcript(run, watched(run, rounds), rounds=rounds)[0]


@pytest.mark.parametrize(
    "name", ["pmtl-momentum", "fedprox", "fedavg-adam", "local"]
)  # others: the mutation gate
def test_the_public_state_is_a_function_of_the_releases(name: str) -> None:
    found = public_state(trainer(name, "poisson"), 5)
    assert not found.refuted
    assert found.skipped == (name == "local")


def test_local_training_beside_records_that_are_protected_has_nothing_to_audit() -> None:
    run = trainer("local", "full", privacy=RecordPrivacy(clip_norm=0.5, noise_multiplier=1.0))
    assert setup_of(run).gradients is None  # type: ignore[union-attr]
    assert public_state(run, 2).skipped


class Shares(FedAvg):
    """Keeps a clean state, and shares something else."""

    def init(self, problem, replicates=1):
        object.__setattr__(self, "seen", 0.0)
        return super().init(problem, replicates)

    def shared(self, state):
        return state.public["global"] + self.seen

    def step(self, problem, state, event, channel):
        object.__setattr__(self, "seen", problem.data.train.y.double().mean())
        return super().step(problem, state, event, channel)


def test_the_transcript_finds_what_is_shared_beside_a_clean_state() -> None:
    """Leaks in the state: the mutation gate."""
    found = public_state(trainer(Shares(local=SOLVER), "poisson"), 3)
    assert found.refuted
    assert "after round 1" in found.detail


@pytest.mark.parametrize(
    ("step", "told"),
    [
        (
            lambda train: 1 / float(1 + train.x.double().square().mean()),
            "server_lr",
        ),  # shorter where features are large
        (
            lambda train: 0.5 if bool((train.x > 1e9).any()) else 0.25,
            "reads",
        ),  # the same on other data, as it happens
        (
            lambda train: 1.0 + float(train.counts @ torch.arange(8) ** 2),
            "server_lr",
        ),  # numbers of records are private
        (lambda train: 1.0 / len(train.x), ""),
    ],
)
def test_automatic_settings_that_depend_on_records_are_found(step, told: str) -> None:
    class Chooses(FedAvg):
        def resolve_auto(self, problem, schedule, privacy):
            return replace(self, server_lr=step(problem.data.train))

    given = trainer(Chooses(local=SOLVER))
    findings = audit_trainer(given, rounds=1, effort=Effort(checks=("transcript",)))
    (found,) = [
        finding for finding in findings if finding.check == "transcript: automatic settings"
    ]
    assert found.refuted == bool(told)
    assert told in found.detail
    assert not any(
        "automatic" in one.check
        for one in audit_trainer(
            replace(given, privacy=None), rounds=1, effort=Effort(checks=("transcript",))
        )
    )


@pytest.mark.parametrize("told", ["", "differs", "reads"])
def test_what_is_chosen_without_any_setting_looks_at_no_record(
    told: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """``algorithm=auto`` chooses when a trainer is made, before the runs that an audit compares."""

    def choose(data: FederatedDataset, privacy: Privacy, **options: Any) -> Automatic:
        chosen, x = automatic(data, privacy, **options), data.train.x.double()
        tall = {"differs": x.mean() > -0.5, "reads": x.max() > 1e9}.get(told)
        return replace(chosen, rounds=chosen.rounds + int(bool(tall)))

    given = small.trainer(
        algorithm="auto", data=regression(8), privacy=ClientPrivacy(noise_multiplier=1.0)
    )
    monkeypatch.setattr("fedmtl.audit.transcript.automatic", choose if told else automatic)
    (found,) = automatic_settings(given, given)
    assert found.refuted == bool(told)
    assert told in found.detail


@pytest.mark.parametrize("data", [ragged_classification(9), regression(9)])
def test_replaced_data_keep_only_public_facts(data: FederatedDataset) -> None:
    other = replaced_data(data, 1)
    assert (other.ids, other.spec, other.classes) == (data.ids, data.spec, data.classes)
    for side in ("train", "test"):
        old, new = data.side(side), other.side(side)
        assert new.x.dtype == old.x.dtype
        assert new.y.dtype == old.y.dtype
        assert int(new.counts.sum()) == int(old.counts.sum())
        assert int(new.counts.min()) >= 1
        assert not torch.equal(new.counts, old.counts)
        assert (new.x != old.x).float().mean() > 0.9
    # what the constructor checks of fresh data holds as well
    FederatedDataset(other.train, other.test, other.ids, other.transform, other.classes)
    assert (
        other.fingerprint()
        == replaced_data(data, 1).fingerprint()
        != replaced_data(data, 2).fingerprint()
    )


def test_bytes_and_sparse_features_are_replaced_within_their_range() -> None:
    offsets = torch.tensor([0, 3, 6])
    x = torch.randint(0, 256, (6, 4), generator=torch.Generator().manual_seed(0)).to(torch.uint8)
    y = torch.tensor([0, 1, 2, 0, 1, 2])
    side = Examples(x, y, offsets)
    new = replaced_data(FederatedDataset(side, side, ("a", "b"), classes=3), 0)
    assert new.train.x.dtype == torch.uint8
    assert not torch.equal(new.train.x, x)
    full = x.float() + 1
    crow, columns = torch.arange(0, 25, 4), torch.arange(4).repeat(6)
    sparse = Examples(csr(crow, columns, full.flatten(), 4), y, offsets)
    new = replaced_data(FederatedDataset(sparse, sparse, ("a", "b"), classes=3), 0)
    assert new.train.x.layout == torch.sparse_csr
    assert not torch.equal(new.train.x.to_dense(), full)


def test_an_audit_without_privacy_checks_the_transcript_and_independence_alone() -> None:
    findings = audit_trainer(trainer(privacy=None), rounds=2, effort=Effort(noise=100, cohorts=10))
    kinds = {finding.check.split(":")[0] for finding in findings if not finding.skipped}
    assert kinds == {"transcript", "independence"}
    assert not any_refuted(findings)


RECORDS = {  # beside what the mutation gate passes as it is
    "all records": {"algorithm": FedAvg(local=LocalSGD(lr=0.2, steps=2, batch_size=None))},
    "l2_laplace": {"mechanism": "l2_laplace"},
    "clients sampled": {"sampler": "poisson"},
    "a cap by the noise": {"noise_multiplier": 1.2, "epsilon": 12.0},
    "budgets of their own": {"epsilon": {f"client-{k}": 3.0 + k for k in range(8)}},
}


@pytest.mark.parametrize("name", RECORDS)
def test_nothing_sound_is_refuted_of_single_records(name: str) -> None:
    options = dict(RECORDS[name])
    one_epoch = PMTL(lam=0.5, local=LocalSGD(lr=0.2, epochs=1, batch_size=4))
    algorithm, sampler = options.pop("algorithm", one_epoch), options.pop("sampler", "full")
    privacy = RecordPrivacy(**({"clip_norm": 0.5, "epsilon": 6.0, "delta": 1e-3} | options))
    run = trainer(algorithm, sampler, privacy=privacy)
    findings = audit_trainer(run, rounds=2, effort=Effort(noise=2000, cohorts=60))
    assert not any_refuted(findings), table(findings)
    kinds = {finding.check.split(":")[0] for finding in findings if not finding.skipped}
    assert kinds == set(CHECKS) - {"grid", "exact sum"}


# Early stops, trainings of one participation, public grids


RUNS = {
    "no budget": (FullParticipation(), ClientPrivacy(clip_norm=0.5, noise_multiplier=2.0)),
    "a budget that ends before": (
        FullParticipation(),
        ClientPrivacy(clip_norm=0.5, epsilon=3.0, noise_multiplier=3.0),
    ),
}


@pytest.mark.parametrize("name", RUNS)
def test_an_early_stop_is_charged_as_all_that_is_planned(name: str) -> None:
    schedule, privacy = RUNS[name]
    run = trainer("pmtl", schedule=schedule, privacy=privacy, rounds=12)
    found = stopped_early(run, setup_of(run), 0)
    assert not found.refuted
    assert not found.skipped
    assert not stopping_rule(run, 0).refuted


def test_a_run_without_a_common_model_never_stops_early() -> None:
    run = trainer_of("pp_dmtl", "clocks, laplace")
    assert stopped_early(run, setup_of(run), 0).skipped


def test_a_second_training_with_the_noise_of_the_first_is_refuted(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The difference of the two gradients would have no noise at all."""
    privacy = RecordPrivacy(clip_norm=0.5, epsilon=6.0, delta=1e-3)
    setup = setup_of(trainer(Ditto(lam=0.5, local=SOLVER), privacy=privacy))
    assert [finding.refuted for finding in training_freshness(setup, 0)] == [False]
    noised = LocalSteps._noised

    def again(self, total, clients, steps):
        return noised(self, total, clients, steps % self.steps(clients))

    monkeypatch.setattr(LocalSteps, "_noised", again)
    assert [finding.refuted for finding in training_freshness(setup, 0)] == [True]


def test_numbers_on_a_grid_are_told_from_others() -> None:
    """Others than in the mutation gate."""
    coins = np.random.default_rng(0)
    cells = np.rint(coins.standard_normal(500) * 2.0**22)

    def verdict(values: np.ndarray) -> bool:
        return on_grid("update", values).refuted

    assert not verdict(cells / 7.3 * 7.3)
    assert verdict(cells + 0.5 * (coins.random(500) < 0.05)), "a finer grid"
    assert verdict(2 * cells), "a coarser grid"
    assert verdict(np.where(np.arange(500) == 3, np.nan, cells))


@pytest.mark.parametrize(("law", "part"), [(LaplaceNoise, 2.0**-20), (GaussianNoise, 2.0**-40)])
def test_the_width_is_the_one_that_the_channel_promises(law, part: float) -> None:
    for bound, size, scale in ((0.5, 147, 3.0), (1e-3, 1, 1e3), (20.0, 100_000, 0.01)):
        assert width_of(bound, law.norm, size, scale * part) == grid_width(law, bound, size, scale)
