"""FedSGD: a gradient step of all clients a round, beside gradient descent on the union of their data."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from fedmtl import (
    ClientPrivacy,
    CyclicCohorts,
    Deadline,
    Execution,
    FedAvg,
    FedSGD,
    Finetune,
    FullParticipation,
    LocalSGD,
    RecordPrivacy,
    Result,
    SecureAggregation,
    ServerOptimizer,
    Trainer,
    models,
)
from fedmtl.audit import Interval
from fedmtl.audit.verification import verify
from fedmtl.errors import ConfigError, PrivacyError
from tests.helpers import ragged_classification
from tests.small import check_resumed

DATA = ragged_classification(6, largest=12)
NETWORK = models.mlp(hidden=4)
LITTLE = 1e-6
SECURE = RecordPrivacy(
    clip_norm=1e3,
    noise_multiplier=LITTLE,
    delta=1e-5,
    aggregation=SecureAggregation(colluding=1, bits=64),
)


def trainer(privacy: Any = None, **options: Any) -> Trainer:
    usual: dict[str, Any] = {
        "algorithm": FedSGD(rate=1.0, server_lr=0.4),
        "data": DATA,
        "model": NETWORK,
        "schedule": FullParticipation(),
        "privacy": privacy,
        "rounds": 4,
        "seed": 2,
        "dtype": "float64",
        "baselines": (),
        "progress": False,
    }
    return Trainer(**{**usual, **options})


def descent(steps: int, rate: float = 0.4) -> torch.Tensor:
    """Gradient descent on the mean loss of the records of all clients, by autograd."""
    problem = trainer().problem()
    module = problem.module
    layout = problem.layout
    train = problem.data.train
    point = problem.initial.clone().double()
    for _ in range(steps):
        parameters = point.clone().requires_grad_()
        named = {name: value.squeeze(0) for name, value in layout.views(parameters[None]).items()}
        outputs = torch.func.functional_call(module, named, (train.x.double(),))
        loss = torch.nn.functional.cross_entropy(outputs, train.y)
        (gradient,) = torch.autograd.grad(loss, parameters)
        point = point - rate * gradient
    return point


def shared(result: Result) -> torch.Tensor:
    assert result.shared is not None
    return result.shared


def test_all_records_without_privacy_are_gradient_descent() -> None:
    torch.testing.assert_close(shared(trainer().fit()), descent(4), rtol=1e-10, atol=1e-12)


def test_little_noise_and_a_wide_clip_change_little() -> None:
    """The path of single gradients, their exact sum, the shares and the scale of the step."""
    found = shared(trainer(SECURE).fit())
    torch.testing.assert_close(found, descent(4), rtol=0, atol=1e-3)
    alone = shared(trainer(replace(SECURE, aggregation=None)).fit())
    torch.testing.assert_close(alone, descent(4), rtol=0, atol=1e-3)


def test_turns_of_clients_make_steps_of_the_same_length_on_average() -> None:
    """Three of six clients in turn: two rounds have every record once, divided by half of all."""
    few = trainer(schedule=CyclicCohorts(cohort=3), rounds=2, model=models.softmax_regression())
    small = replace(few, algorithm=FedSGD(rate=1.0, server_lr=1e-4))
    whole = replace(small, schedule=FullParticipation(), rounds=1)
    start = small.problem().initial
    moved = shared(small.fit()) - start
    torch.testing.assert_close(moved, 2 * (shared(whole.fit()) - start), rtol=1e-3, atol=1e-9)


def test_a_record_takes_part_at_the_rate() -> None:
    """The step of one round is that of the records drawn, over those expected: its mean is that of all."""
    moves = []
    model = models.softmax_regression()
    for seed in range(30):
        one = trainer(algorithm=FedSGD(rate=0.5, server_lr=1.0), rounds=1, seed=seed, model=model)
        moves.append(shared(one.fit()) - one.problem().initial)
    every = trainer(algorithm=FedSGD(rate=1.0, server_lr=1.0), rounds=1, model=model)
    whole = shared(every.fit()) - every.problem().initial
    stacked = torch.stack(moves)
    error = (stacked.mean(0) - whole).abs()
    assert bool((error <= 5 * stacked.std(0) / 30**0.5 + 1e-12).all())
    assert float(stacked.std(0).max()) > 0.01


def test_several_processes_and_pieces_give_the_same_bits() -> None:
    private = replace(SECURE, clip_norm=0.5, noise_multiplier=0.8)
    whole = trainer(private, algorithm=FedSGD(rate=0.3, averaged=True))
    first = whole.fit()
    for execution in (Execution(processes=2), Execution(chunk=1), Execution(chunk=8)):
        again = replace(whole, execution=execution).fit()
        assert torch.equal(shared(first), shared(again))


def test_a_run_is_resumed_and_confirmed(tmp_path: Path) -> None:
    private = replace(SECURE, clip_norm=0.5, noise_multiplier=0.8, source="secure")

    def make(folder: Path | None = None, **options: Any) -> Trainer:
        return trainer(
            private, algorithm=FedSGD(rate=0.3), folder=folder, checkpoint_every=1, **options
        )

    make(tmp_path / "run").fit()
    found = verify(tmp_path / "run")
    assert found.fits
    assert "gradient_sum of step 3" in found.text()


def test_a_seeded_run_that_ended_early_goes_on_with_the_same_bits(tmp_path: Path) -> None:
    private = replace(SECURE, clip_norm=0.5, noise_multiplier=0.8)
    optimizer = ServerOptimizer(optimizer_name="Adam", lr=0.1)

    def make(**options: Any) -> Trainer:
        return trainer(private, algorithm=FedSGD(rate=0.3, server_optimizer=optimizer), **options)

    check_resumed(make, tmp_path, step=2)


def test_clients_finetune_the_model_at_home() -> None:
    private = replace(SECURE, clip_norm=0.5, noise_multiplier=0.8)
    result = trainer(private, finetune=Finetune(kind="mean", local=LocalSGD(lr=0.1))).fit()
    assert list(result.scores) == ["shared", "personal", "finetuned"]
    assert result.privacy.unit == "record"
    assert "one record" in result.privacy.clipping


def test_baselines_of_other_methods_have_noise_of_each_client() -> None:
    """They send no gradients that could be added up."""
    private = replace(SECURE, clip_norm=0.5, noise_multiplier=0.8)
    baseline = FedAvg(local=LocalSGD(lr=0.1))
    result = trainer(private, baselines=(baseline,)).fit()
    (found,) = result.baselines.values()
    assert found.privacy.observer == "server, other clients and public"


# Refusals


def test_whole_clients_are_not_protected_by_gradients_of_records() -> None:
    with pytest.raises(ConfigError, match=r"take privacy=record, or fedavg with local\.steps=1"):
        trainer(ClientPrivacy(clip_norm=1.0, epsilon=4.0)).fit()


def test_local_training_has_no_secure_sum_of_records() -> None:
    with pytest.raises(PrivacyError, match="'update' is of other rows; take FedSGD"):
        trainer(SECURE, algorithm=FedAvg(local=LocalSGD(lr=0.1))).fit()


def test_canaries_are_not_among_the_records_of_a_secure_sum() -> None:
    with pytest.raises(ConfigError, match="no canaries among the records of a secure sum"):
        trainer(replace(SECURE, noise_multiplier=1.0), audit=Interval(canaries=10)).fit()


@pytest.mark.parametrize("rate", [0, 1.5])
def test_a_rate_is_above_0_and_at_most_1(rate: float) -> None:
    with pytest.raises(ConfigError, match=r"FedSGD\.rate is .*above 0"):
        FedSGD(rate=rate)


def test_a_deadline_is_of_a_trusted_server() -> None:
    schedule = Deadline(sampler=FullParticipation(), latency=1.0, limit=2.0)
    with pytest.raises(ConfigError, match="give the sampler of Deadline as the schedule"):
        trainer(SECURE, schedule=schedule)


def test_fewer_records_than_the_data_have_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"FedSGD\.records is 3, and the data have"):
        trainer(SECURE, algorithm=FedSGD(records=3)).fit()
