"""Sums of rows that are made where the rows are: the same numbers as of rows that are handed over, to the last bit."""

import math

import pytest
import torch
from torch import Tensor

from fedmtl import (
    APFL,
    ClientPrivacy,
    Ditto,
    FedAvg,
    FedProx,
    LocalOptimizer,
    LocalSGD,
    PoissonSampling,
    Trainer,
)
from fedmtl.audit.recording import RecordedRounds
from fedmtl.data import FederatedDataset
from fedmtl.errors import PrivacyError
from fedmtl.privacy import QuantileClip, ReleasePlan, clip, open_channel
from fedmtl.privacy.clip import Clip, RowTotal, clipped_sum, sum_width
from fedmtl.privacy.round_channel import RoundChannel

SIZE = 40
PLAN = ReleasePlan(name="update", dimension=SIZE)


@pytest.fixture(autouse=True)
def all_rows_are_long(monkeypatch):
    monkeypatch.setattr(clip, "_LONG", 0)


def begun(plan: ReleasePlan = PLAN, *, clients: int = 9, **settings) -> tuple[RoundChannel, Tensor]:
    """A channel whose first round has begun, and its cohort."""
    given = {"clip_norm": 1.5, "noise_multiplier": 0.8, "delta": 1e-5} | settings
    channel = open_channel(
        ClientPrivacy(**given),
        (plan,),
        PoissonSampling(6).bind(clients),
        seed=0,
        steps=3,
        channel_class=RecordedRounds,
    )
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
    for clients in order.split(7):
        total.add(clients, rows[clients])
    assert torch.equal(total.sum(), clipped_sum(rows, bound, width))
    assert total.clients == list(range(60))


def test_a_sum_is_released_once_with_one_row_of_each_client() -> None:
    channel, cohort = begun()
    total = channel.new_total("update")
    with pytest.raises(PrivacyError, match=f"sum of 0 rows.* each of {len(cohort)} clients"):
        channel.release("update", total, cohort)
    rows = rows_of(len(cohort))
    absent = next(client for client in range(9) if client not in cohort.tolist())
    total.add(cohort[1:], rows[1:])
    with pytest.raises(
        PrivacyError, match=f"of others than one row from each of {len(cohort)} clients"
    ):
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
        channel.new_total("other")
    channel, cohort = begun()
    others, total = torch.cat([cohort[1:], torch.tensor([absent])]), channel.new_total("update")
    total.add(others, rows)
    with pytest.raises(PrivacyError, match=f"row of client {absent}, who was not drawn"):
        channel.release("update", total, others)


@pytest.mark.parametrize("mechanism", ["gaussian", "laplace"])
def test_a_release_of_a_sum_is_that_of_its_rows_of_which_a_tap_hears(mechanism) -> None:
    """Rows of an attempt that failed are in no release: with all rows again, each would be there twice."""
    (tapped, cohort), (plain, _) = begun(mechanism=mechanism), begun(mechanism=mechanism)
    rows, heard = rows_of(len(cohort)), list[tuple[int, str, Tensor, Tensor]]()
    failed = tapped.new_total("update")
    failed.add(cohort, rows)
    tapped.tap = lambda *row: heard.append(row)
    total = tapped.new_total("update")
    for part in (slice(0, 2), slice(2, None)):
        total.add(cohort[part], rows[part])
    with pytest.raises(PrivacyError, match="did not make last"):
        tapped.release("update", failed, cohort)
    assert torch.equal(
        tapped.release("update", total, cohort), plain.release("update", rows, cohort)
    )
    assert [(step, name) for step, name, _, _ in heard] == [(0, "update")] * 2
    assert torch.equal(torch.cat([clients for _, _, clients, _ in heard]), cohort)
    assert torch.equal(torch.cat([part for _, _, _, part in heard]).nan_to_num(), rows.nan_to_num())


@pytest.mark.parametrize(
    ("size", "bound"), [(SIZE, Clip(1.6)), (SIZE, Clip(1.5, "l1")), (SIZE + 1, Clip(1.5))]
)
def test_a_sum_that_the_channel_did_not_make_in_this_round_is_refused(size, bound) -> None:
    channel, cohort = begun()
    assert channel.new_total("update") is not None
    other = RowTotal(size, bound, sum_width(1.5, 9))
    other.add(cohort, torch.zeros(len(cohort), size))
    with pytest.raises(PrivacyError, match=r"did not make last in step 0"):
        channel.release("update", other, cohort)


def test_rows_are_asked_for_where_they_are_needed(monkeypatch) -> None:
    channel, _ = begun()
    assert channel.new_total("update") is not None
    assert (
        begun(clip_norm=QuantileClip(initial=1.0, count_noise=3.0))[0].new_total("update") is None
    )
    matrices = ReleasePlan(name="update", dimension=SIZE, form="symmetric")
    assert begun(matrices)[0].new_total("update") is None
    monkeypatch.setattr(clip, "_LONG", SIZE + 1)
    assert begun()[0].new_total("update") is None


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
    "dropout": lambda spec: torch.nn.Sequential(
        torch.nn.Flatten(), torch.nn.Dropout(0.3), torch.nn.Linear(64, 4)
    ),
}
SGD = LocalSGD(lr=0.2, batch_size=4)


@pytest.mark.parametrize(
    ("algorithm", "model"),
    [
        (FedAvg(local=LocalOptimizer(lr=0.01, batch_size=4)), "dropout"),
        (FedAvg(local=LocalSGD(lr=0.3, epochs=2, batch_size=4)), "perceptron"),
        (FedProx(mu=0.3, local=SGD), "convolutions"),
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
    monkeypatch.setattr(
        RowTotal, "sum", lambda self: released.append(len(self.clients)) or sum_of(self)
    )
    summed = run()
    assert len(released) == 3
    assert all(released)
    monkeypatch.setattr(RoundChannel, "new_total", lambda self, name: None)
    by_rows = run()
    assert len(released) == 3
    assert torch.equal(summed.shared.nan_to_num(7.0), by_rows.shared.nan_to_num(7.0))
    assert torch.equal(summed.personal.nan_to_num(7.0), by_rows.personal.nan_to_num(7.0))
    lost = "diverged_trainings"
    assert summed.final.get(lost) == by_rows.final.get(lost)
    assert (summed.final.get(lost) is not None) == hot
