"""Sums of rows that are made where the rows are: the same numbers as of rows that are handed over, to the last bit."""

import math
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from fedmtl import (
    APFL,
    PMTL,
    ClientPrivacy,
    Ditto,
    FedAvg,
    FedProx,
    FullParticipation,
    LocalOptimizer,
    LocalSGD,
    PoissonSampling,
    Trainer,
)
from fedmtl.data import FederatedDataset
from fedmtl.errors import PrivacyError
from fedmtl.privacy import QuantileClip, ReleasePlan, clip, open_channel
from fedmtl.privacy.audit import Effort
from fedmtl.privacy.clip import Clip, RowTotal, clipped_sum, sum_width
from fedmtl.privacy.rounds import Rounds
from fedmtl.trainer.audit.suite import audit_trainer

SIZE = 40
PLAN = ReleasePlan(name="update", dimension=SIZE)


@pytest.fixture(autouse=True)
def all_rows_are_long(monkeypatch):
    monkeypatch.setattr(clip, "_LONG", 0)


def begun(plan: ReleasePlan = PLAN, *, clients: int = 9, **settings) -> tuple[Rounds, Tensor]:
    """A channel whose first round has begun, and its cohort."""
    given = {"clip_norm": 1.5, "noise_multiplier": 0.8, "delta": 1e-5} | settings
    channel = open_channel(ClientPrivacy(**given), (plan,), PoissonSampling(6).bind(clients), seed=0, steps=3)
    cohort = channel.draw(0)
    channel.begin(0, cohort)
    return channel, cohort


def rows_of(count: int) -> Tensor:
    rows = torch.randn(count, SIZE, generator=torch.Generator().manual_seed(3))
    rows[1] *= 1e-3
    rows[2, 5], rows[3, 0] = math.nan, -math.inf
    return rows


@pytest.mark.parametrize("bound", [Clip(1.5), Clip(4.0, "l1")])
def test_a_sum_in_parts_is_the_sum_of_the_rows(bound) -> None:
    rows, width = rows_of(60), sum_width(bound.bound, 60)
    total, order = RowTotal(SIZE, bound, width), torch.randperm(60)
    with ThreadPoolExecutor(4) as pool:
        list(pool.map(total.add, order.split(7), rows[order].split(7)))
    assert torch.equal(total.sum(), clipped_sum(rows, bound, width))
    assert total.clients == list(range(60))


@pytest.mark.parametrize("settings", [{}, {"mechanism": "laplace"}])
def test_a_release_of_a_sum_is_that_of_its_rows(settings) -> None:
    (by_rows, cohort), (by_sum, _) = begun(**settings), begun(**settings)
    rows, total = rows_of(len(cohort)), by_sum.total("update")
    total.add(cohort, rows)
    assert torch.equal(by_sum.release("update", total, cohort), by_rows.release("update", rows, cohort))


def test_a_sum_is_released_once_with_one_row_of_each_client() -> None:
    channel, cohort = begun()
    total = channel.total("update")
    with pytest.raises(PrivacyError, match=f"sum of 0 rows.* each of {len(cohort)} clients"):
        channel.release("update", total, cohort)
    rows = rows_of(len(cohort))
    absent = next(client for client in range(9) if client not in cohort.tolist())
    total.add(cohort[1:], rows[1:])
    with pytest.raises(PrivacyError, match=f"of others than one row from each of {len(cohort)} clients"):
        channel.release("update", total, cohort)
    total.add(cohort[:1], rows[:1])
    channel.release("update", total, cohort)
    with pytest.raises(PrivacyError, match="happened already"):
        channel.release("update", total, cohort)
    for twice in (absent, int(cohort[2])):
        total.add(torch.tensor([twice]), rows[:1])
        with pytest.raises(PrivacyError, match="of others than"):
            channel.release("update", total, cohort)
    with pytest.raises(PrivacyError, match="'other' was not declared"):
        channel.total("other")


def test_a_sum_of_a_client_that_was_not_drawn_is_refused() -> None:
    channel, cohort = begun()
    absent = next(client for client in range(9) if client not in cohort.tolist())
    others = torch.cat([cohort[1:], torch.tensor([absent])])
    total = channel.total("update")
    total.add(others, rows_of(len(others)))
    with pytest.raises(PrivacyError, match=f"row of client {absent}, who was not drawn"):
        channel.release("update", total, others)


def test_rows_of_an_attempt_that_failed_are_in_no_release() -> None:
    """A caller that catches an error of its own and adds all rows again would have a client's row twice in the sum."""
    (by_rows, cohort), (by_sum, _) = begun(), begun()
    rows, failed = rows_of(len(cohort)), by_sum.total("update")
    failed.add(cohort, rows)
    total = by_sum.total("update")
    total.add(cohort, rows)
    with pytest.raises(PrivacyError, match="did not make last"):
        by_sum.release("update", failed, cohort)
    assert torch.equal(by_sum.release("update", total, cohort), by_rows.release("update", rows, cohort))


def test_a_tap_gets_the_rows_that_are_added_to_a_sum() -> None:
    (tapped, cohort), (plain, _) = begun(), begun()
    rows, heard = rows_of(len(cohort)), list[tuple[int, str, Tensor, Tensor]]()
    tapped.tap = lambda *row: heard.append(row)
    released = []
    for channel in (tapped, plain):
        total = channel.total("update")
        for part in (slice(0, 2), slice(2, None)):
            total.add(cohort[part], rows[part])
        released.append(channel.release("update", total, cohort))
    assert torch.equal(*released)
    assert [(step, name) for step, name, _, _ in heard] == [(0, "update")] * 2
    assert torch.equal(torch.cat([clients for _, _, clients, _ in heard]), cohort)
    assert torch.equal(torch.cat([part for _, _, _, part in heard]).nan_to_num(), rows.nan_to_num())


@pytest.mark.parametrize(("size", "bound"), [(SIZE, Clip(1.6)), (SIZE, Clip(1.5, "l1")), (SIZE + 1, Clip(1.5))])
def test_a_sum_that_the_channel_did_not_make_in_this_round_is_refused(size, bound) -> None:
    channel, cohort = begun()
    assert channel.total("update") is not None
    other = RowTotal(size, bound, sum_width(1.5, 9))
    other.add(cohort, torch.zeros(len(cohort), size))
    with pytest.raises(PrivacyError, match=r"did not make last in step 0"):
        channel.release("update", other, cohort)


def test_rows_are_asked_for_where_they_are_needed(monkeypatch) -> None:
    channel, _ = begun()
    assert channel.total("update") is not None
    assert begun(clip_norm=QuantileClip(initial=1.0, count_noise=3.0))[0].total("update") is None
    matrices = ReleasePlan(name="update", dimension=SIZE, form="symmetric")
    assert begun(matrices)[0].total("update") is None
    monkeypatch.setattr(clip, "_LONG", SIZE + 1)
    assert begun()[0].total("update") is None


def images(clients: int, extreme: float) -> FederatedDataset:
    """Clients of 3 to 18 examples; the features of the fourth are ``extreme`` times those of the others."""
    generator = torch.Generator().manual_seed(1)
    sizes = [3 + 5 * (i % 4) for i in range(clients)]
    given = {
        f"client-{i}": (
            torch.rand(n, 1, 8, 8, generator=generator) * (extreme if i == 3 else 1.0),
            torch.randint(0, 4, (n,), generator=generator),
        )
        for i, n in enumerate(sizes)
    }
    return FederatedDataset.from_tensors(given, test_fraction=0.25, classes=4)


MODELS = {
    "perceptron": lambda spec: torch.nn.Sequential(
        torch.nn.Flatten(), torch.nn.Linear(64, 6), torch.nn.ReLU(), torch.nn.Linear(6, 4)
    ),
    "convolutions": lambda spec: torch.nn.Sequential(
        torch.nn.Conv2d(1, 3, 3, padding=1),
        torch.nn.ReLU(),
        torch.nn.MaxPool2d(2),
        torch.nn.Flatten(),
        torch.nn.Linear(48, 4),
    ),
    "dropout": lambda spec: torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Dropout(0.3), torch.nn.Linear(64, 4)),
}
SGD = LocalSGD(lr=0.2, batch_size=4)


@pytest.mark.parametrize(
    ("algorithm", "model"),
    [
        (FedAvg(local=SGD), "perceptron"),
        (FedAvg(local=LocalOptimizer(lr=0.01, batch_size=4)), "dropout"),
        (FedAvg(local=LocalSGD(lr=0.3, epochs=2, batch_size=4)), "perceptron"),
        (FedProx(mu=0.3, local=SGD), "convolutions"),
        (PMTL(lam=0.3, local=SGD), "perceptron"),
        (Ditto(lam=0.3, local=SGD), "dropout"),
        (APFL(local=SGD), "perceptron"),
    ],
    ids=lambda value: value if isinstance(value, str) else value.name,
)
def test_runs_have_the_same_bits(algorithm, model, monkeypatch) -> None:
    hot = algorithm.local.epochs > 1

    def run():
        trainer = Trainer(
            algorithm=algorithm, model=MODELS[model], data=images(24, 1e30 if hot else 1.0), rounds=3,
            schedule=PoissonSampling(20), privacy=ClientPrivacy(clip_norm=0.5, noise_multiplier=0.5, delta=1e-5),
            seed=4, progress=False,
        )  # fmt: skip
        return trainer.fit()

    released = []
    sum_of = RowTotal.sum
    monkeypatch.setattr(RowTotal, "sum", lambda self: released.append(len(self.clients)) or sum_of(self))
    summed = run()
    assert len(released) == 3
    assert all(released)
    monkeypatch.setattr(Rounds, "total", lambda self, name: None)
    by_rows = run()
    assert len(released) == 3
    assert torch.equal(summed.shared.nan_to_num(7.0), by_rows.shared.nan_to_num(7.0))
    assert torch.equal(summed.personal.nan_to_num(7.0), by_rows.personal.nan_to_num(7.0))
    lost = "diverged_trainings"
    assert summed.final.get(lost) == by_rows.final.get(lost)
    assert (summed.final.get(lost) is not None) == hot


def test_an_audit_compares_what_a_run_adds_up_with_its_rows(monkeypatch) -> None:
    trainer = Trainer(
        algorithm=FedAvg(local=SGD), model=MODELS["convolutions"], data=images(12, 1e30), rounds=3,
        schedule=PoissonSampling(6), privacy=ClientPrivacy(clip_norm=0.5, noise_multiplier=0.5, delta=1e-5),
        progress=False,
    )  # fmt: skip
    asked, sum_of = [], RowTotal.sum
    monkeypatch.setattr(RowTotal, "sum", lambda self: asked.append(len(self.clients)) or sum_of(self))
    findings = audit_trainer(trainer, rounds=2, effort=Effort(checks=("transcript",)))
    assert [finding.refuted for finding in findings if finding.check == "transcript: releases"] == [False]
    assert sum(asked) > 0


def test_an_audit_refutes_a_run_that_changes_its_releases() -> None:
    """Noise that a method makes quieter on its way is not what a channel adds to the same rows."""

    class Quiet(FedAvg):
        def step(self, problem, state, block, channel):
            for name, release in channel.releases.items():
                noise = replace(release.noise, multiplier=1e-3 * release.noise.multiplier)
                channel.releases[name] = replace(release, noise=noise)
            return super().step(problem, state, block, channel)

    trainer = Trainer(
        algorithm=Quiet(local=SGD), model=MODELS["perceptron"], data=images(6, 1.0), rounds=2,
        schedule=FullParticipation(), privacy=ClientPrivacy(clip_norm=0.5, epsilon=8.0), progress=False,
    )  # fmt: skip
    findings = audit_trainer(trainer, rounds=2, effort=Effort(checks=("transcript",)))
    assert [finding.refuted for finding in findings if finding.check == "transcript: releases"] == [True]
