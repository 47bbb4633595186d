"""Local training outside of a trainer: against plain loops of PyTorch, and against whole runs."""

import math

import pytest
import torch
from torch import nn

from fedmtl import (
    PMTL,
    FedAvg,
    FederatedDataset,
    FullParticipation,
    LocalOptimizer,
    LocalSGD,
    RecordPrivacy,
    Result,
    Trainer,
)
from fedmtl.errors import ConfigError, PrivacyError
from fedmtl.local import LocalTrainer
from fedmtl.privacy import open_channel

FLOAT = torch.float64
SOLVER = LocalSGD(lr=0.3, steps=4, batch_size=None)


def data(clients: int = 5) -> FederatedDataset:
    """Clients of different sizes."""
    generator = torch.Generator().manual_seed(7)
    rows = {}
    for k in range(clients):
        x = torch.randn(12 + 5 * k, 3, generator=generator)
        rows[f"client-{k}"] = (x, (x[:, 0] + 0.3 * k > 0.5).long())
    return FederatedDataset.from_tensors(rows, test_fraction=0.25, classes=2)


def linear() -> nn.Linear:
    torch.manual_seed(3)
    return nn.Linear(3, 2).double()


def fitted(algorithm, of: FederatedDataset, privacy, *, rounds: int, seed: int) -> Result:
    """A run of a trainer in which everybody takes part in every round."""
    return Trainer(
        algorithm=algorithm,
        data=of,
        model=linear(),
        rounds=rounds,
        schedule=FullParticipation(),
        privacy=privacy,
        dtype="float64",
        seed=seed,
        progress=False,
    ).fit()


def examples(of: FederatedDataset, k: int) -> tuple[torch.Tensor, torch.Tensor]:
    first, last = of.train.offsets[k : k + 2].tolist() if k + 1 < len(of.train.offsets) else (0, 0)
    return of.train.x[first:last].double(), of.train.y[first:last]


def plain(of: FederatedDataset, k: int, make, lam: float = 0.0, steps: int = 4) -> torch.Tensor:
    """A client by itself: torch.optim on the mean loss of all its examples, with a pull to the start."""
    module = linear()
    anchor = nn.utils.parameters_to_vector(module.parameters()).detach()
    optimizer = make(module.parameters())
    x, y = examples(of, k)
    for _ in range(steps):
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(module(x), y)
        own = nn.utils.parameters_to_vector(module.parameters())
        (loss + lam / 2 * (own - anchor).square().sum()).backward()
        optimizer.step()
    return nn.utils.parameters_to_vector(module.parameters()).detach()


@pytest.mark.parametrize("lam", [0.0, 0.7])
def test_sgd_is_a_loop_of_torch(lam: float) -> None:
    of = data()
    local = LocalTrainer(linear(), of, dtype=FLOAT)
    models = local.train(SOLVER, lam=lam, anchor=local.initial)
    for k in range(len(of)):
        expected = plain(of, k, lambda p: torch.optim.SGD(p, lr=0.3), lam)
        torch.testing.assert_close(models[k], expected, rtol=1e-10, atol=1e-12)


def test_any_optimizer_of_torch() -> None:
    of = data()
    local = LocalTrainer(linear(), of, dtype=FLOAT)
    solver = LocalOptimizer(optimizer_name="Adam", lr=0.05, steps=4, batch_size=None)
    models = local.train(solver, clients=torch.tensor([3, 1]))
    for row, k in zip(models, (3, 1), strict=True):
        expected = plain(of, k, lambda p: torch.optim.Adam(p, lr=0.05))
        torch.testing.assert_close(row, expected, rtol=1e-9, atol=1e-11)


def test_rounds_of_pmtl_are_local_training_towards_the_mean() -> None:
    """Batches too: those of a run's seed and round."""
    of = data()
    solver = LocalSGD(lr=0.2, epochs=1, batch_size=5)
    whole = fitted(PMTL(lam=0.5, local=solver), of, None, rounds=3, seed=11)
    local = LocalTrainer(linear(), of, seed=11, dtype=FLOAT)
    mean = local.initial
    models = mean.expand(len(of), -1)
    for step in range(3):
        models = local.train(solver, models, lam=0.5, anchor=mean, round=step)
        mean = models.mean(0)
    for k, name in enumerate(of.ids):
        found = nn.utils.parameters_to_vector(whole.model_for(name).parameters())
        torch.testing.assert_close(models[k], found.double(), rtol=1e-9, atol=1e-11)
    # a module is that of the run
    x = of.test.x.double()
    torch.testing.assert_close(
        local.module_of(models[0])(x), whole.model_for(of.ids[0])(x), rtol=1e-9, atol=1e-11
    )


@pytest.mark.parametrize("mechanism", ["gaussian", "laplace"])
def test_dp_sgd_is_that_of_a_run(mechanism: str) -> None:
    """The same noise, clip and subsets: clients of one round of FedAvg end where they end here."""
    of = data()
    solver = LocalSGD(lr=0.2, steps=3, batch_size=6)
    privacy = RecordPrivacy(clip_norm=0.8, noise_multiplier=1.1, delta=1e-4, mechanism=mechanism)
    whole = fitted(FedAvg(local=solver), of, privacy, rounds=1, seed=5)
    local = LocalTrainer(linear(), of, seed=5, dtype=FLOAT)
    everybody = FullParticipation().bind(len(of))
    channel = open_channel(privacy, [local.plan(solver)], everybody, seed=5, steps=1)
    with pytest.raises(PrivacyError, match="No round of local steps has begun"):
        local.train(solver, channel=channel)
    channel.begin(0, channel.draw(0))
    models = local.train(solver, channel=channel)
    shared = nn.utils.parameters_to_vector(whole.shared_model().parameters())
    torch.testing.assert_close(models.mean(0), shared.double(), rtol=1e-6, atol=1e-8)
    assert channel.epsilon == pytest.approx(whole.privacy.epsilon)
    # a second training of the round is not paid for
    with pytest.raises(PrivacyError, match="a local step is not charged"):
        local.train(solver, channel=channel)


def test_two_trainings_of_a_round_are_charged_as_two() -> None:
    of = data()
    solver = LocalSGD(lr=0.2, steps=3, batch_size=6)
    local = LocalTrainer(linear(), of, dtype=FLOAT)
    everybody = FullParticipation().bind(len(of))
    epsilons = []
    for trainings in (1, 2):
        privacy = RecordPrivacy(clip_norm=0.8, noise_multiplier=3.0, delta=1e-4)
        plan = local.plan(solver, trainings=trainings)
        channel = open_channel(privacy, [plan], everybody, seed=5, steps=1)
        channel.begin(0, channel.draw(0))
        for _ in range(trainings):
            assert local.train(solver, channel=channel).isfinite().all()
        epsilons.append(channel.epsilon)
    assert epsilons[0] < epsilons[1] < math.inf


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"solver": "sgd"}, "LocalTrainer.local is 'sgd'"),
        ({"start": torch.zeros(3)}, r"start has shape \(3,\); accepted: \(8,\) or \(5, 8\)"),
        ({"anchor": torch.zeros(2, 8)}, r"anchor has shape \(2, 8\)"),
        ({"clients": torch.tensor([0, 5])}, "positions from 0 to 4"),
        ({"clients": torch.tensor([1, 1])}, "named twice"),
        ({"clients": torch.tensor([0.0])}, "positions from 0 to 4"),
        ({"clients": [0, 1]}, r"clients is \[0, 1\], of list; give a Tensor"),
        ({"lam": 9.0, "anchor": torch.zeros(8)}, "overshoot"),
    ],
)
def test_wrong_arguments_are_named(arguments: dict, message: str) -> None:
    local = LocalTrainer(linear(), data(), dtype=FLOAT)
    with pytest.raises(ConfigError, match=message):
        local.train(**{"solver": SOLVER, **arguments})


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"module": "net"}, "module is 'net', of str; give a Module"),
        ({"of": "table.csv"}, "data is 'table.csv', of str; give a FederatedDataset"),
        ({"device": "tpu"}, "device is 'tpu', which is not available here; accepted: auto, cpu"),
        ({"dtype": torch.int32}, r"dtype is torch\.int32; accepted: torch\.float32"),
        ({"loss": "crossentropy"}, "loss is 'crossentropy'; accepted: cross_entropy"),
    ],
)
def test_wrong_settings_are_named(options: dict, message: str) -> None:
    options = {"module": linear(), "of": data(), **options}
    with pytest.raises(ConfigError, match=message):
        LocalTrainer(options.pop("module"), options.pop("of"), **options)


def test_a_model_that_does_not_fit_is_refused() -> None:
    generator = torch.Generator().manual_seed(0)
    rows = {"a": (torch.randn(9, 3, generator=generator), torch.randn(9, generator=generator))}
    real = FederatedDataset.from_tensors(rows, test_fraction=0.3, classes=None)
    with pytest.raises(ConfigError, match="takes one class an example"):
        LocalTrainer(linear(), real)
    local = LocalTrainer(linear(), data(), dtype=FLOAT)
    other = LocalTrainer(nn.Linear(3, 2, bias=False), data(), dtype=FLOAT)
    everybody = FullParticipation().bind(5)
    privacy = RecordPrivacy(clip_norm=0.8, noise_multiplier=3.0, delta=1e-4)
    channel = open_channel(privacy, [other.plan(SOLVER)], everybody, seed=0, steps=1)
    channel.begin(0, channel.draw(0))
    with pytest.raises(PrivacyError, match="6 numbers of 5 clients; this model has 8 parameters"):
        local.train(SOLVER, channel=channel)
