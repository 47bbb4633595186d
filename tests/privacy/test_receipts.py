"""Receipts and sums against careless callers: what is refused has neither spent nor released anything."""

from collections.abc import Callable, Iterator
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from fedmtl.audit.recording import RecordedRounds
from fedmtl.errors import ConfigError, PrivacyError
from fedmtl.privacy import (
    BlockReceipt,
    ClientPrivacy,
    FullParticipation,
    LocalReceipt,
    PoissonSampling,
    QuantileClip,
    Receipt,
    ReleasePlan,
    SeededSource,
    open_channel,
)
from fedmtl.privacy.adaptive import CountBelowNorm
from fedmtl.privacy.clip import Clip, RowTotal, sum_width
from fedmtl.privacy.mechanism_choice import mechanism_of
from fedmtl.privacy.row_noise import RowNoise
from tests.privacy import activations
from tests.privacy.test_records import DIMENSION, EMPTY, NOISED, begin, door

EVERYONE = torch.arange(3)


def local(charged: int = 2) -> LocalReceipt:
    return LocalReceipt(0, torch.full((3,), charged), 1)


@pytest.mark.parametrize(
    "clients",
    [
        torch.tensor([-1, 2]),  # two names of the last client
        torch.tensor([3]),
        torch.tensor([[0, 1]]),
        torch.tensor([True, False, True]),
        torch.tensor([0, 1, 1], dtype=torch.uint8),
        torch.tensor([0.0]),
    ],
    ids=str,
)
def test_a_local_step_is_of_positions_of_clients(clients: Tensor) -> None:
    receipt = local()
    for spend in (receipt.next, lambda some: receipt.spend(some, torch.zeros(len(some)).long())):
        with pytest.raises(PrivacyError, match=r"int64 \(k,\) from 0 to 2"):
            spend(clients)
    assert receipt.next(EVERYONE).tolist() == [0, 0, 0]


@pytest.mark.parametrize("clients", [torch.tensor([0.0]), torch.tensor([True]), torch.zeros(0)])
def test_a_receipt_is_spent_on_positions_of_clients(clients: Tensor) -> None:
    receipt = Receipt(0, 0, EVERYONE)
    with pytest.raises(PrivacyError, match="positions of clients as int64"):
        receipt.spend("update", clients)
    receipt.spend("update", EVERYONE)


def test_a_step_is_paid_for_under_the_number_that_it_was_told() -> None:
    receipt = local()
    steps = receipt.next(EVERYONE[:2])
    receipt.spend(EVERYONE[1:2], steps[1:2])
    with pytest.raises(PrivacyError, match="while its gradients were added up"):
        receipt.spend(EVERYONE[:2], steps)
    assert receipt.next(EVERYONE).tolist() == [0, 1, 0]
    block = BlockReceipt(5, np.zeros((2, 1), dtype=np.int64), np.zeros((2, 1), dtype=np.int64))
    block.spend(0)
    with pytest.raises(PrivacyError, match="Activation 5 was released"):
        block.spend(0)
    assert block.left == 1


def test_gradients_that_release_the_same_step_are_refused() -> None:
    """Both releases would have the noise of one address, and their difference would be of the gradients alone."""
    channel = door(NOISED)
    begin(channel)
    one = torch.tensor([2])

    def gradients() -> Iterator[tuple[Tensor, Tensor]]:
        channel.local.release(one, [EMPTY])
        yield torch.ones(1, DIMENSION), torch.zeros(1, dtype=torch.int64)

    with pytest.raises(PrivacyError, match="its noise would be used twice"):
        channel.local.release(one, gradients())
    assert channel.local.numbers(one).tolist() == [1]


def test_gradients_of_another_length_spend_nothing() -> None:
    """One number would be added to every coordinate of the noise: a gradient longer than the clip."""
    channel = door(NOISED)
    begin(channel)
    one = torch.tensor([2])
    for wrong in (torch.ones(1, 1), torch.ones(DIMENSION)):
        with pytest.raises(ConfigError, match=rf"needed: \(N, {DIMENSION}\)"):
            channel.local.release(one, [(wrong, torch.zeros(1, dtype=torch.int64))])
    assert channel.local.numbers(one).tolist() == [0]


@pytest.mark.parametrize(
    "gradients", [np.full((2, 5), 3.0), torch.ones(2, 5, activations.D)], ids=["factors", "whole"]
)
def test_a_replicate_in_which_no_client_acts_gets_no_sum(gradients: np.ndarray | Tensor) -> None:
    """It has no noise either."""
    channel = activations.door(replicates=2).channel
    channel.begin(0, torch.tensor([[-1], [0]]))
    with pytest.raises(PrivacyError, match="acts in 1 replicates; gradients of 2"):
        channel.release([gradients])
    assert not channel.release([gradients[1:]])[0].any()


def test_factors_are_of_each_row() -> None:
    channel = activations.door().channel
    channel.begin(0, torch.tensor([[0]]))
    for shape in ((1, 1), (1, 4), (1, 5, 1)):
        with pytest.raises(ConfigError, match=r"needed: \(k, 5\)"):
            channel.release([np.ones(shape)])


def test_a_block_is_released_whole_before_the_next_one() -> None:
    channel = activations.door().channel
    channel.begin(0, torch.tensor([[0, 1]]))
    channel.release([np.ones((1, 5))])
    with pytest.raises(PrivacyError, match="has releases left"):
        channel.begin(2, torch.tensor([[2]]))
    channel.release([np.ones((1, 20))])
    channel.begin(2, torch.tensor([[2]]))


# Sums of rows


SIZE = 5
NORM = ClientPrivacy(clip_norm=1.0, noise_multiplier=2.0)


def sums(privacy=NORM, *, sampler=None, clients: int = 6, **plan):
    """A channel whose first round has begun, and its cohort."""
    releases = (ReleasePlan(name="update", dimension=SIZE, **plan),)
    bound = (sampler or FullParticipation()).bind(clients)
    channel = open_channel(privacy, releases, bound, seed=0, steps=5, channel_class=RecordedRounds)
    return channel, begin(channel)


def total(bound: float = 1.0, size: int = SIZE, rows: int = 6) -> RowTotal:
    return RowTotal(size, Clip(bound), sum_width(bound, rows))


@pytest.mark.parametrize(
    ("clients", "rows"),
    [
        (EVERYONE, torch.ones(3, 1)),  # would be longer than the clip by the root of 5
        (EVERYONE[:1], torch.ones(3, SIZE)),  # three times the clip of one client
        (EVERYONE, torch.ones(2, SIZE)),
        (EVERYONE, torch.ones(3, SIZE, dtype=torch.int64)),
        (EVERYONE[0], torch.ones(SIZE)),
    ],
)
def test_a_sum_takes_one_row_of_each_client(clients: Tensor, rows: Tensor) -> None:
    summed = total()
    with pytest.raises(PrivacyError, match="one from each of k clients"):
        summed.add(clients, rows)
    assert summed.clients == []
    assert not summed.sum().any()


def test_a_sum_takes_rows_of_a_model_that_is_trained_and_keeps_the_names_of_clients() -> None:
    summed, clients = total(), torch.tensor([2, 0])
    summed.add(clients, torch.ones(2, SIZE, requires_grad=True))
    clients.zero_()
    assert summed.clients == [0, 2]


@pytest.mark.parametrize(
    "wrong", [total(2.0), total(rows=600), total(size=SIZE + 1)], ids=["clip", "grid", "size"]
)
def test_a_mechanism_takes_sums_with_its_own_clip_and_grid(wrong: RowTotal) -> None:
    channel, _ = sums()
    mechanism = mechanism_of(channel.releases["update"], SeededSource(0))
    receipt, none = Receipt(0, 0, EVERYONE), EVERYONE[:0]
    with pytest.raises(PrivacyError, match="another clip or grid"):
        mechanism(wrong, none, receipt)
    summed = total()
    summed.add(EVERYONE, torch.ones(3, SIZE))
    with pytest.raises(PrivacyError, match="of others than one row from each of 2 clients"):
        mechanism(summed, EVERYONE[:2], receipt)
    matrix = mechanism_of(sums(form="symmetric")[0].releases["update"], SeededSource(0))
    with pytest.raises(PrivacyError, match="of form 'symmetric'"):
        matrix(total(), none, receipt)
    assert mechanism(summed, EVERYONE, receipt).shape == (SIZE,)


def test_a_count_takes_one_row_of_each_client() -> None:
    settings = QuantileClip(initial=1.0, count_noise=3.0)
    channel, _ = sums(ClientPrivacy(clip_norm=settings, noise_multiplier=1.0))
    count = CountBelowNorm(channel.releases["update"], settings, SeededSource(0))
    receipt = Receipt(0, 0, EVERYONE)
    for wrong, match in (
        (torch.zeros(600, SIZE), "one row from each client"),
        (torch.zeros(3, 1), "float rows of shape"),
        (total(), "counts rows, and got a sum"),
    ):
        with pytest.raises(PrivacyError, match=match):
            count(wrong, EVERYONE, receipt)
    assert count(torch.zeros(3, SIZE), EVERYONE, receipt).shape == (1,)
    with pytest.raises(PrivacyError, match="'update/count' happened already"):
        count(torch.zeros(3, SIZE), EVERYONE, receipt)


def test_noise_is_added_to_what_a_receipt_was_spent_on() -> None:
    """Sums and counts without their mechanism's call, which spends the receipt, get no noise."""
    settings = QuantileClip(initial=1.0, count_noise=3.0)
    release = sums(ClientPrivacy(clip_norm=settings, noise_multiplier=1.0))[0].releases["update"]
    count = CountBelowNorm(release, settings, SeededSource(0))
    for form in ("vector", "symmetric"):
        release = sums(form=form)[0].releases["update"]
        mechanism = mechanism_of(release, SeededSource(0))
        rows = torch.zeros(3, SIZE)
        summed = mechanism.total(rows, EVERYONE)
        receipt = Receipt(2, 0, EVERYONE)
        receipt.spend("another", EVERYONE)
        with pytest.raises(PrivacyError, match="'update' of step 2 is not paid for"):
            mechanism.noised_mean(summed, receipt)
        value = mechanism(rows, EVERYONE, receipt)
        assert torch.equal(mechanism.noised_mean(summed, receipt), value)
        with pytest.raises(PrivacyError, match="'update/count' of step 2 is not paid for"):
            count.fraction(torch.zeros(1), receipt)


# Rounds


def test_who_was_charged_stays_so_whatever_becomes_of_the_callers_tensor() -> None:
    channel, _ = sums(sampler=PoissonSampling(3), clients=40)
    members = channel.draw(1)
    channel.begin(1, members)
    other = next(client for client in range(40) if client not in members.tolist())
    members[0] = other
    with pytest.raises(PrivacyError, match=f"of client {other}, who was not drawn for step 1"):
        channel.release("update", torch.ones(1, SIZE), members[:1])


def test_a_round_that_does_not_begin_has_ended_the_one_before() -> None:
    channel = door(NOISED)
    begin(channel)
    steps = channel.local
    with pytest.raises(PrivacyError, match="cohort that was drawn"):
        channel.begin(1, EVERYONE[:1])
    with pytest.raises(PrivacyError, match="Round 0 is over"):
        steps.release(EVERYONE[:1], [EMPTY])
    assert channel.local is None


def test_local_steps_end_with_their_round_at_every_rank() -> None:
    """Only the first rank charges."""
    shared: list[Any] = []

    def make(value: Callable[[], Any]) -> Any:
        shared.append(value())
        return shared[-1]

    ranks = (
        SimpleNamespace(size=2, first=True, share=make),
        SimpleNamespace(size=2, first=False, share=lambda _: shared.pop(0)),
    )
    channels = [door(NOISED, ranks=rank) for rank in ranks]
    for channel in channels:
        begin(channel)
    first = [channel.local for channel in channels]
    for channel in channels:
        begin(channel, 1)
    for steps in first:
        with pytest.raises(PrivacyError, match="Round 0 is over"):
            steps.release(EVERYONE[:1], [EMPTY])


def test_noise_on_rows_is_paid_for_once() -> None:
    """Two rows with the same noise would show their difference; and nobody hears of rows that are refused."""
    channel, everyone = sums(rows=RowNoise(2.0))
    channel.record = []
    channel.release("update", torch.zeros(6, SIZE), everyone)
    with pytest.raises(PrivacyError, match="'update/rows' happened already in step 0"):
        channel.release("update", torch.ones(6, SIZE), everyone)
    assert [name for _, name, _ in channel.record] == ["update/rows", "update"]
    with pytest.raises(ConfigError, match="'/rows'"):
        ReleasePlan(name="update/rows", dimension=1)


def test_noise_on_rows_of_replicates_is_their_own_and_paid_for_once() -> None:
    privacy = replace(NORM, clip_norm=1.0)
    plan = ReleasePlan(name="update", dimension=SIZE, rows=RowNoise(2.0))
    bound = FullParticipation().bind(6)
    channel = open_channel(privacy, (plan,), bound, seed=0, steps=5, replicates=2)
    everyone = begin(channel)
    rows = torch.zeros(2, 6, SIZE)
    sent = channel._with_row_noise(channel._mechanisms["update"], rows, everyone, channel._receipt)
    assert torch.unique(sent).numel() == rows.numel()
    with pytest.raises(PrivacyError, match="'update/rows' happened already"):
        channel.release("update", rows, everyone)


def test_clients_have_the_noise_of_their_own_budgets() -> None:
    budgets = {f"client-{k}": 2.0**k for k in range(5)}
    channel = door(replace(NOISED, epsilon=budgets, noise_multiplier=None))
    begin(channel)
    clients = torch.tensor([3, 0, 4])
    scales = channel.local._scale(clients)
    multipliers = torch.from_numpy(channel.noise_multipliers)[clients]
    assert torch.unique(scales).numel() == 3
    torch.testing.assert_close(scales / multipliers, (scales / multipliers)[:1].expand(3))


def test_a_row_leaves_its_client_once_for_a_receipt() -> None:
    channel, _ = sums(rows=RowNoise(2.0))
    receipt = Receipt(3, 0, torch.tensor([4]))
    sent = channel.row_to_send("update", torch.zeros(1, SIZE), receipt)
    law = channel.row_noise["update"]
    noise = law.added(torch.zeros(1, SIZE), torch.tensor([4]), receipt, channel.source)
    assert torch.equal(sent, noise)
    with pytest.raises(PrivacyError, match="'update/rows' happened already in step 3"):
        channel.row_to_send("update", torch.ones(1, SIZE), receipt)
    with pytest.raises(PrivacyError, match="one row from each client"):
        channel.row_to_send("update", torch.zeros(1, SIZE), Receipt(3, 0, EVERYONE))


def test_a_clip_norm_follows_the_rows_that_the_server_has() -> None:
    """With noise on rows, these are the rows with noise: here all of them are longer than the norm."""
    settings = QuantileClip(initial=1e-3, quantile=0.5, count_noise=3.0)
    channel, everyone = sums(
        ClientPrivacy(clip_norm=settings, noise_multiplier=1.0), rows=RowNoise(0.01), clients=600
    )
    channel.record = []
    channel.release("update", torch.zeros(600, SIZE), everyone)
    fraction = {name: value for _, name, value in channel.record}["update/count"]
    # 1/2 less than the fraction within the norm, with noise of deviation 3 / 600
    assert float(fraction) == pytest.approx(-0.5, abs=0.05)


def test_a_caller_may_write_into_what_was_released() -> None:
    secure = ClientPrivacy(clip_norm=1.0, noise_multiplier=2.0, source="secure")
    channel, everyone = sums(secure)
    channel.release("update", torch.ones(6, SIZE), everyone).mul_(0.3)
    assert channel.on_grid["update"].off_grid == 0
    steps = door(replace(NOISED, source="secure"))
    begin(steps)
    steps.local.release(torch.tensor([1]), [EMPTY]).mul_(0.3)
    assert steps.on_grid["gradient"].off_grid == 0


def test_a_replayed_release_is_paid_for_once() -> None:
    first, everybody = sums()
    first.record = []
    value = first.release("update", torch.ones(6, SIZE), everybody)
    again, _ = sums()
    again.replay(first.record)
    nothing = torch.zeros(6, SIZE)
    assert torch.equal(again.release("update", nothing, everybody), value)
    with pytest.raises(PrivacyError, match="happened already"):
        again.release("update", nothing, everybody)
