"""Mechanisms by themselves: a value for a receipt, and none without."""

import threading
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from fedmtl import ClientPrivacy, CyclicCohorts, FullParticipation
from fedmtl.errors import PrivacyError
from fedmtl.privacy import (
    BlockReceipt,
    ClippedSum,
    CountBelowNorm,
    OuterProductSum,
    QuantileClip,
    Receipt,
    Release,
    ReleasePlan,
    SecureSource,
    SeededSource,
    open_channel,
)
from fedmtl.privacy.binding import bind_releases
from fedmtl.privacy.mechanism_choice import mechanism_of
from fedmtl.privacy.noise.banded import Bands
from fedmtl.privacy.noise.grid import IndependentNoise
from fedmtl.privacy.ranked import RankedCount, RankedSum
from fedmtl.privacy.release import Form
from fedmtl.privacy.replicates import ReplicatedSum
from fedmtl.ranks import Ranks

CLIENTS = 6
EVERYONE = torch.arange(CLIENTS)


def release(form: Form = "vector", multiplier: float = 0.0) -> Release:
    plan = ReleasePlan(name="update", dimension=3, form=form)
    privacy = ClientPrivacy(clip_norm=0.5, noise_multiplier=1.0)
    return bind_releases((plan,), FullParticipation().bind(CLIENTS), privacy, multiplier)["update"]


def rows() -> torch.Tensor:
    return torch.randn(CLIENTS, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(4))


def clipped() -> np.ndarray:
    own = rows().numpy()
    return own * np.minimum(1.0, 0.5 / np.linalg.norm(own, axis=1))[:, None]


@pytest.mark.parametrize(
    ("form", "expected"),
    [
        ("vector", lambda own: own.mean(0)),
        ("symmetric", lambda own: own.T @ own / len(own)),
        ("diagonal", lambda own: (own * own).mean(0)),
    ],
)
def test_without_noise_it_is_the_mean_of_clipped_rows(form, expected) -> None:
    mechanism = mechanism_of(release(form), SeededSource(0))
    assert isinstance(mechanism, ClippedSum if form == "vector" else OuterProductSum)
    value = mechanism(rows(), EVERYONE, Receipt(0, 0, EVERYONE))
    # a clip leaves a margin of 2**-20
    np.testing.assert_allclose(value.numpy(), expected(clipped()), rtol=3e-6)


def test_a_receipt_pays_once() -> None:
    mechanism = mechanism_of(release(), SeededSource(0))
    receipt = Receipt(3, 3, EVERYONE[:4])
    with pytest.raises(PrivacyError, match="client 4, who was not drawn for step 3"):
        mechanism(rows(), EVERYONE, receipt)
    with pytest.raises(PrivacyError, match="one row from each client"):
        mechanism(rows()[:2], EVERYONE[:1], receipt)
    with pytest.raises(PrivacyError, match="each client once"):
        mechanism(rows()[:2], EVERYONE[:1].repeat(2), receipt)
    # what was refused has spent nothing
    mechanism(rows()[:4], EVERYONE[:4], receipt)
    with pytest.raises(PrivacyError, match="happened already in step 3"):
        mechanism(rows()[:4], EVERYONE[:4], receipt)


@pytest.mark.parametrize("source", [SeededSource(0), SecureSource()], ids=["seeded", "secure"])
def test_the_noise_has_the_size_of_the_sensitivity(source) -> None:
    """Full participation: a client replaces its row, so the noise is z 2 C on the sum."""
    made = release(multiplier=1.5)
    mechanism = mechanism_of(made, source)
    nothing = torch.zeros(CLIENTS, 3)
    values = torch.stack(
        [mechanism(nothing, EVERYONE, Receipt(step, step, EVERYONE)) for step in range(1_000)]
    )
    scale = 2.0 if made.relation == "replace" else 1.0
    # 3,000 numbers: the relative deviation of their root mean square is 1.3%
    measured = float(values.square().mean().sqrt())
    assert measured == pytest.approx(1.5 * 0.5 * scale / CLIENTS, rel=0.07)


def test_a_block_pays_for_its_activations_in_order() -> None:
    receipt = BlockReceipt(10, np.zeros((2, 1), dtype=np.int64), np.zeros((2, 1), dtype=np.int64))
    for place in range(2):
        assert (receipt.next(), receipt.left) == (place, 2 - place)
        receipt.spend(place)
    assert receipt.left == 0
    with pytest.raises(PrivacyError, match="No activation has begun that was not released"):
        receipt.next()


class Thread(Ranks):
    """One of two ranks that are threads."""

    def __init__(self, rank: int, meeting: threading.Barrier, table: dict[int, Any]) -> None:
        super().__init__(rank=rank, size=2)
        object.__setattr__(self, "meeting", meeting)
        object.__setattr__(self, "table", table)

    def gather(self, value):
        self.table[self.rank] = value
        self.meeting.wait(10)
        both = [self.table[0], self.table[1]]
        self.meeting.wait(10)
        return both

    def sum(self, total):
        return torch.stack(self.gather(total)).sum(0)

    def share(self, work):
        return self.gather(work() if self.rank == 0 else None)[0]


@pytest.mark.parametrize("clipped", [True, False], ids=["clip", "no clip"])
def test_ranks_add_up_on_one_grid(clipped: bool) -> None:
    """Without a clip the longest row of all ranks sets it: one rank has rows a million times as long."""
    made = release(multiplier=1.5)
    if not clipped:
        made = replace(made, clip=None, noise=None)
    own = rows() * torch.tensor([1e6, 1e6, 1, 1, 1, 1])[:, None]
    alone = mechanism_of(made, SeededSource(0))(own, EVERYONE, Receipt(0, 0, EVERYONE))
    meeting, table, values = threading.Barrier(2), {}, {}

    def released(rank: int) -> None:
        mechanism = mechanism_of(made, SeededSource(0))
        ranked = RankedSum(mechanism, Thread(rank, meeting, table))
        part = slice(2 * rank, 2 + 4 * rank)
        values[rank] = ranked(own[part], EVERYONE[part], Receipt(0, 0, EVERYONE))

    threads = [threading.Thread(target=released, args=(rank,)) for rank in (0, 1)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert torch.equal(values[0], alone)
    assert torch.equal(values[1], alone)


@pytest.mark.parametrize(
    ("source", "draws"), [(SeededSource(0), 7), (SecureSource(), 2)], ids=["seeded", "secure"]
)
def test_correlated_noise_of_a_later_round(source, draws: int, monkeypatch) -> None:
    """Seeded noise of earlier rounds is drawn again; secure noise cannot be, and begins anew."""
    plan = ReleasePlan(name="update", dimension=3)
    privacy = ClientPrivacy(clip_norm=0.5, noise_multiplier=1.0)
    sampler = FullParticipation().bind(CLIENTS)
    bands = Bands.square_root(3)
    made = bind_releases((plan,), sampler, privacy, 1.0, bands)["update"]
    drawn = []

    at = IndependentNoise.at

    def noted(self, step):
        drawn.append(step)
        return at(self, step)

    monkeypatch.setattr(IndependentNoise, "at", noted)
    mechanism = mechanism_of(made, source)
    for step in (0, 5):
        mechanism(rows(), EVERYONE, Receipt(step, step, EVERYONE))
    assert len(drawn) == draws


def test_correlated_noise_has_the_noise_of_the_round_before_in_it(monkeypatch) -> None:
    """Of a secure source, too, in which nothing can be drawn again: a channel keeps its mechanism."""
    plan = ReleasePlan(name="update", dimension=3)
    privacy = ClientPrivacy(clip_norm=0.5, noise_multiplier=1.0, bands=3, source="secure")
    bands = Bands.square_root(3)
    sampler = CyclicCohorts(cohort=2).bind(CLIENTS)
    channel = open_channel(privacy, (plan,), sampler, seed=0, steps=2)
    drawn = []

    at = IndependentNoise.at

    def noted(self, step):
        drawn.append(at(self, step))
        return drawn[-1]

    monkeypatch.setattr(IndependentNoise, "at", noted)
    values = []
    for step in range(2):
        cohort = channel.draw(step)
        channel.begin(step, cohort)
        values.append(channel.release("update", torch.zeros(2, 3), cohort))
    first, second, *_ = bands.coefficients
    (before, _), (now, width) = drawn
    expected = now - second / first * before
    torch.testing.assert_close(2 * values[1], expected, rtol=0, atol=2 * width)
    assert not torch.allclose(2 * values[1], now, rtol=0, atol=2 * width)


def test_every_replicate_has_the_noise_of_its_own_source() -> None:
    made = release(multiplier=1.5)
    sources = [SeededSource(4, replicate) for replicate in range(3)]
    each = [mechanism_of(made, source) for source in sources]
    receipt = Receipt(2, 2, EVERYONE)
    together = ReplicatedSum(each)(rows().expand(3, -1, -1), EVERYONE, receipt)
    with pytest.raises(PrivacyError, match="happened already in step 2"):
        ReplicatedSum(each)(rows().expand(3, -1, -1), EVERYONE, receipt)
    alone = [own(rows(), EVERYONE, Receipt(2, 2, EVERYONE)) for own in each]
    assert torch.equal(together, torch.stack(alone))
    assert torch.unique(together, dim=0).shape == (3, 3)


@pytest.mark.parametrize("epsilons", [(2.0,), (1.0, 4.0)], ids=["run", "replicates"])
def test_uses_have_their_weights(epsilons: tuple[float, ...]) -> None:
    """A weight three times as large is a third of the noise."""
    plan = ReleasePlan(name="update", dimension=3, allocation=(0.5, 1.5))
    each = [ClientPrivacy(clip_norm=0.5, epsilon=epsilon, delta=1e-5) for epsilon in epsilons]
    runs = len(each)
    sampler = FullParticipation().bind(CLIENTS)
    channel = open_channel(each, (plan,), sampler, seed=0, steps=2, replicates=runs)
    stds = []
    for step in range(2):
        channel.begin(step, channel.draw(step))
        stds.append(channel.noise_std("update"))
        sent = rows() if runs == 1 else rows().expand(runs, -1, -1)
        channel.release("update", sent, EVERYONE)
    torch.testing.assert_close(stds[0], 3 * stds[1])
    assert stds[0][0] >= 2 * stds[0][-1] or runs == 1


def test_a_step_that_is_released_again_has_the_weight_of_its_use(tmp_path: Path) -> None:
    """In secure mode a resumed run pays for a step anew: it is the second use of the budget."""
    plan = ReleasePlan(name="update", dimension=3, allocation=(0.5, 1.5))
    privacy = ClientPrivacy(clip_norm=0.5, epsilon=2.0, delta=1e-5, source="secure")
    sampler = FullParticipation().bind(CLIENTS)
    stds = []
    for resume in (False, True):
        channel = open_channel(
            privacy,
            (plan,),
            sampler,
            seed=0,
            steps=2,
            ledger_path=tmp_path / "ledger.jsonl",
            resume=resume,
        )
        channel.start(0)
        channel.begin(0, channel.draw(0))
        stds.append(float(channel.noise_std("update")))
        channel.close()
    assert stds[0] == pytest.approx(3 * stds[1])


def test_a_sum_is_that_of_its_own_round() -> None:
    """Long rows are added as they are made. What was added in a round that was given up stays there."""
    size = 1 << 14
    plan = ReleasePlan(name="update", dimension=size)
    privacy = ClientPrivacy(clip_norm=0.5, noise_multiplier=1.0)
    channel = open_channel(privacy, (plan,), FullParticipation().bind(CLIENTS), seed=0, steps=2)
    channel.begin(0, channel.draw(0))
    total = channel.new_total("update")
    assert total is not None
    total.add(EVERYONE, torch.ones(CLIENTS, size))
    channel.begin(1, channel.draw(1))
    with pytest.raises(PrivacyError, match="did not make last in step 1"):
        channel.release("update", total, EVERYONE)


def test_a_count_over_ranks_is_paid_for_once() -> None:
    made = release(multiplier=1.5)
    meeting, table, refused = threading.Barrier(2), {}, []

    def counted(rank: int) -> None:
        count = CountBelowNorm(made, QuantileClip(0.5), SeededSource(0))
        ranked = RankedCount(count, Thread(rank, meeting, table))
        part = slice(3 * rank, 3 * rank + 3)
        receipt = Receipt(0, 0, EVERYONE)
        ranked(rows()[part], EVERYONE[part], receipt)
        try:
            ranked(rows()[part], EVERYONE[part], receipt)
        except PrivacyError as error:
            refused.append(str(error))

    threads = [threading.Thread(target=counted, args=(rank,)) for rank in (0, 1)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(refused) == 2
    assert all("'update/count' happened already" in text for text in refused)
