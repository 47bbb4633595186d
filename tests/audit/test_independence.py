"""No client's numbers depend on another client's data except through a release, numbers of records included."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from torch import nn

from fedmtl import Execution, Trainer, models
from fedmtl.algorithms import MPMTL, PMTL, FedAvg, Local
from fedmtl.algorithms.client_batch import ClientBatch
from fedmtl.algorithms.local_fit import LocalFit
from fedmtl.audit import Finding
from fedmtl.audit.independence import independence
from fedmtl.audit.other_clients import replaced_client
from fedmtl.audit.rerun import row_marks, watched
from fedmtl.contrib import PriorLayers, PrivatePrior
from fedmtl.data import FederatedDataset
from fedmtl.local import LocalOptimizer, LocalSGD
from fedmtl.privacy import ClientPrivacy, FullParticipation, PoissonSampling, RecordPrivacy
from tests import small
from tests.audit.mutants import _models_mixed
from tests.helpers import ragged_classification, regression

PRIVACY = ClientPrivacy(clip_norm=0.5, noise_multiplier=1.0)


def wide_network(spec: Any) -> nn.Module:
    """Odd widths and functions whose vector and scalar code round differently."""
    return nn.Sequential(
        nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 3), nn.GELU(), nn.LayerNorm(3), nn.Linear(3, 3)
    )


def trainer(**options: Any) -> Trainer:
    settings: dict[str, Any] = {
        "algorithm": PMTL(lam=0.5, local=LocalSGD(lr=0.2, epochs=2, batch_size=4)),
        "data": ragged_classification(13, largest=60),
        "model": wide_network,
        "schedule": PoissonSampling(cohort=8),
        "privacy": PRIVACY,
        "rounds": 2,
        "dtype": "float32",
    }
    return small.trainer(**(settings | options))


def findings_of(run: Trainer) -> list[Finding]:
    return independence(run, watched(run, run.rounds), rounds=run.rounds)


def refuted(run: Trainer) -> list[str]:
    return [finding.check for finding in findings_of(run) if finding.refuted]


SOLVERS = {
    "batches": LocalSGD(lr=0.2, epochs=1, batch_size=10, momentum=0.9),
    "small batches": LocalSGD(lr=0.2, epochs=1, batch_size=3),
    "all examples": LocalSGD(lr=0.2, epochs=3, batch_size=None),
    "adam": LocalOptimizer(lr=0.01, steps=4, batch_size=16),
}


def perceptron(spec: Any) -> nn.Module:
    """A network that is computed by batched products, of odd widths."""
    return nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 3))


def images() -> FederatedDataset:
    """Clients with 3 to 40 images of 6 x 6."""
    generator, parts = torch.Generator().manual_seed(7), {}
    for client in range(9):
        x = torch.randn(3 + (client * 14) % 38, 1, 6, 6, generator=generator)
        parts[f"client-{client}"] = (x, (x[:, 0, 2, 2] > 0).long())
    return FederatedDataset.from_tensors(parts, test=parts, classes=2)


def convolutional(spec: Any) -> nn.Module:
    """A network that one client after another computes by products."""
    return nn.Sequential(
        nn.Conv2d(1, 3, 3),
        nn.ReLU(),
        nn.Conv2d(3, 2, 3),
        nn.MaxPool2d(2),
        nn.Flatten(),
        nn.Linear(2, 2),
    )


NETWORKS: dict[str, dict[str, Any]] = {
    "stacked": {},
    "perceptron": {"model": perceptron},
    "convolutional": {"model": convolutional, "data": images(), "execution": Execution(chunk=1)},
}


@pytest.mark.parametrize("solver", SOLVERS)
@pytest.mark.parametrize("network", NETWORKS)
def test_networks_of_clients_with_different_numbers_of_examples(network: str, solver: str) -> None:
    """In single precision with half of the solvers of a network, in double precision with the others."""
    single = (list(NETWORKS).index(network) + list(SOLVERS).index(solver)) % 2
    settings = NETWORKS[network] | {"dtype": "float32" if single else "float64"}
    assert refuted(trainer(algorithm=PMTL(lam=0.5, local=SOLVERS[solver]), **settings)) == []


@pytest.mark.parametrize("execution", [Execution(chunk=1), Execution(chunk=3)])
def test_whatever_the_execution(execution: Execution) -> None:
    assert refuted(trainer(execution=execution, algorithm=PMTL(local=SOLVERS["batches"]))) == []


@pytest.mark.parametrize(
    "algorithm", [FedAvg(local=SOLVERS["batches"]), Local(local=SOLVERS["all examples"])]
)
def test_without_privacy_and_without_personal_training(algorithm: Any) -> None:
    assert refuted(trainer(algorithm=algorithm, privacy=None, schedule=FullParticipation())) == []


def ragged_directions() -> FederatedDataset:
    """Clients of 2 to 40 records that differ in the sign of one feature."""
    generator, parts = torch.Generator().manual_seed(5), {}
    for client in range(24):
        x = torch.randn(2 + (client * 17) % 39, 6, generator=generator)
        parts[f"client-{client}"] = (x, ((-1) ** client * x[:, 0] > 0).long())
    return FederatedDataset.from_tensors(parts, test=parts, classes=2)


@pytest.mark.parametrize("proximal", [False, True])
def test_networks_that_train_again_under_a_prior(proximal: bool) -> None:
    run = trainer(
        algorithm=PriorLayers(
            scale=0.5, local=LocalSGD(lr=0.2, epochs=2, batch_size=10, proximal=proximal)
        ),
        data=ragged_directions(),
        model=models.mlp(hidden=7),
        schedule=FullParticipation(),
        privacy=replace(PRIVACY, noise_multiplier=0.01),
        rounds=1,
    )
    assert refuted(run) == []
    public = watched(run, 1).public
    excess = {key[1] for key in public if key[1].startswith("excess/")}
    assert excess
    assert any(public[-1, name, -1] != public[0, name, -1] for name in excess), "they begin at zero"


def test_numbers_of_records_are_public_where_single_records_are_protected() -> None:
    found = findings_of(trainer(privacy=RecordPrivacy(clip_norm=0.5, epsilon=6.0, delta=1e-3)))
    assert [(one.check, one.refuted) for one in found] == [
        ("independence: values of one client", False),
        ("independence: all clients but one", False),
    ]


def test_rounds_in_which_nobody_takes_part() -> None:
    run = trainer(
        data=ragged_classification(4, largest=9),
        schedule=PoissonSampling(cohort=1),
        rounds=3,
        seed=5,
    )
    assert refuted(run) == []
    assert (
        len({step for step, what, _ in watched(run, 3).messages if what == "the row of update"}) < 3
    )


def ragged_tasks(classes: int | None, features: int = 6) -> FederatedDataset:
    """Ten tasks of 2 to 40 records."""
    generator = torch.Generator().manual_seed(3)
    sides: list[dict[str, tuple[torch.Tensor, torch.Tensor]]] = [{}, {}]
    for task in range(10):
        own = torch.randn(features, generator=generator, dtype=torch.float64)
        for side, n in ((0, 2 + (task * 17) % 39), (1, 4)):
            x = torch.randn(n, features, generator=generator, dtype=torch.float64)
            y = x @ own + torch.randn(n, generator=generator, dtype=torch.float64)
            sides[side][f"task-{task}"] = (x, (y > 0).long() if classes else y)
    return FederatedDataset.from_tensors(sides[0], test=sides[1], classes=classes)


LINEAR: dict[str, Callable[[], Trainer]] = {
    "logistic": lambda: tasks(MPMTL(loss="logistic", ridge=1e-6, feature_norm=50.0), 2),
    "logistic, shared and own": lambda: tasks(
        MPMTL(loss="logistic", own_penalty="l1", feature_norm=1.0), 2
    ),
    "squared, many features": lambda: tasks(MPMTL(feature_norm=1.0), None, features=70),
    "private prior": lambda: tasks(
        PrivatePrior(loss="logistic", share=0.5, feature_norm=None, scale=0.5), 2, rounds=1
    ),
    "private prior, squared": lambda: tasks(
        PrivatePrior(form="diagonal", feature_norm=None, scale=0.5), None, features=70, rounds=1
    ),
    "local fit, own ridge": lambda: tasks(LocalFit(loss="squared", own_ridge=True), None),
    "local fit": lambda: tasks(LocalFit(loss="logistic", ridge=1e-6), 2),
    "local fit, squared": lambda: tasks(LocalFit(loss="squared"), None, features=70),
}


def tasks(algorithm: Any, classes: int | None, features: int = 6, **settings: Any) -> Trainer:
    return trainer(
        algorithm=algorithm,
        data=ragged_tasks(classes, features),
        model=models.linear_regression(),
        loss="binary_cross_entropy" if classes else "half_mse",
        schedule=FullParticipation(),
        dtype="float64",
        **settings,
    )


@pytest.mark.parametrize("name", LINEAR)
def test_linear_tasks_of_different_sizes(name: str) -> None:
    assert refuted(LINEAR[name]()) == []


# What the check finds


def test_a_finding_names_the_first_number_that_differs(monkeypatch: pytest.MonkeyPatch) -> None:
    run = trainer(schedule=FullParticipation())
    _models_mixed(monkeypatch, run)
    found = findings_of(run)[0]
    assert found.refuted
    assert "'model' in the store of client 'client-11'" in found.detail  # who comes after it
    assert "first after round 1" in found.detail


@dataclass(frozen=True, kw_only=True)
class Leaking(PMTL):
    """PMTL in which all clients add a millionth of the mean of one of them to what they send."""

    client_that_leaks: int

    def client_update(self, c: ClientBatch) -> Any:
        sent, kept = super().client_update(c)
        data, client = c.problem.data.train, self.client_that_leaks
        mean = data.x[data.offsets[client] : data.offsets[client + 1]].double().mean()
        return {name: rows + 1e-6 * mean for name, rows in sent.items()}, kept


@pytest.mark.parametrize("client", [0, 10, 12])
def test_what_all_clients_take_from_one_is_found_whichever_that_is(client: int) -> None:
    """Client 10 is the first of the first cohort, 0 is in it, and 12 is not. Other leaks: the mutation gate."""
    algorithm = Leaking(lam=0.5, local=SOLVERS["small batches"], client_that_leaks=client)
    run = trainer(
        algorithm=algorithm, data=ragged_classification(13, largest=9), dtype="float64", rounds=1
    )
    first = watched(run, 1)
    assert (first.first[0], {0, 12} & set(first.first)) == (10, {0})
    found = [finding.check for finding in independence(run, first, rounds=1) if finding.refuted]
    assert (
        "independence: values of one client"
        if client == 10
        else "independence: all clients but one"
    ) in found


# One client's data


@pytest.mark.parametrize("data", [ragged_classification(6), regression(6)])
def test_one_client_alone_has_other_data(data: FederatedDataset) -> None:
    other = replaced_client(data, 2, 50, 0)
    assert other.train.counts.tolist() == [
        50 if k == 2 else n for k, n in enumerate(data.train.counts.tolist())
    ]
    FederatedDataset(other.train, other.test, other.ids, other.transform, other.classes)
    for side in ("train", "test"):
        old, new = data.side(side), other.side(side)
        for k in range(6):
            a, b = (part.x[part.offsets[k] : part.offsets[k + 1]] for part in (old, new))
            c, d = (part.y[part.offsets[k] : part.offsets[k + 1]] for part in (old, new))
            assert (torch.equal(a, b) and torch.equal(c, d)) == (k != 2)
        own = new.x[new.offsets[2] : new.offsets[3]]
        assert set(own[::2].unique().tolist()) <= {float(old.x.min()), float(old.x.max())}
        assert set((own[1::2] * 1024).unique().tolist()) <= {float(old.x.min()), float(old.x.max())}


def test_any_bit_of_a_row_changes_its_mark() -> None:
    rows = torch.randn(5, 3, 4, generator=torch.Generator().manual_seed(0))
    marks = row_marks(rows)
    rows[2, 1, 3] = torch.nextafter(rows[2, 1, 3], torch.tensor(9.0))
    assert [one == other for one, other in zip(row_marks(rows), marks, strict=True)] == [
        True,
        True,
        False,
        True,
        True,
    ]
    assert row_marks(torch.tensor([[0.0]])) != row_marks(torch.tensor([[-0.0]]))
    assert row_marks(torch.zeros(1, 2, 3)) != row_marks(torch.zeros(1, 3, 2))
    assert len(row_marks(torch.zeros(3, 0))) == 3
