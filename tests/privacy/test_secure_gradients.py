"""Secure sums of the gradients of single records: their noise, their sensitivity and their account."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from dp_accounting import dp_event
from scipy import stats
from torch import Tensor

from fedmtl import CyclicCohorts, FixedCohort, FullParticipation, PoissonSampling, RecordPrivacy
from fedmtl.errors import BudgetExhausted, ConfigError, PrivacyError
from fedmtl.privacy import (
    GradientPlan,
    Receipt,
    ReleasePlan,
    RoundChannel,
    SeededSource,
    open_channel,
)
from fedmtl.privacy.aggregation import SecureAggregation
from fedmtl.privacy.clip import MARGIN
from fedmtl.privacy.secure_calibration import SecureCalibration, calibrate_secure_gradients
from fedmtl.privacy.secure_sum import LocalRandomizer, SecureSum, share_words
from fedmtl.privacy.sums import clipped_segment_sums
from tests.helpers import library_accountant
from tests.mutation import edit

CLIENTS, RECORDS, SIZE, RATE, STEPS = 6, 15, 7, 0.2, 10
CLIP, DELTA = 0.7, 1e-5
SOME = SecureAggregation(colluding=1, missing=0)
PRIVACY = RecordPrivacy(clip_norm=CLIP, epsilon=3.0, delta=DELTA, aggregation=SOME)
ROW = ReleasePlan(name="gradient_sum", dimension=SIZE, from_gradients=True)
EVERYBODY = FullParticipation().bind(CLIENTS)


def gradients(**options: Any) -> GradientPlan:
    usual = {
        "ids": tuple(f"client-{k}" for k in range(CLIENTS)),
        "counts": np.full(CLIENTS, RECORDS),
        "dimension": SIZE,
        "rate": RATE,
    }
    return GradientPlan(**{**usual, **options})


def opened(privacy: RecordPrivacy = PRIVACY, seed: int = 0, **options: Any) -> RoundChannel:
    channel = open_channel(
        privacy, [ROW, gradients()], EVERYBODY, seed=seed, steps=STEPS, **options
    )
    assert isinstance(channel, RoundChannel)
    return channel


def calibrated(
    privacy: RecordPrivacy = PRIVACY, plan: GradientPlan | None = None
) -> SecureCalibration:
    return calibrate_secure_gradients(privacy, (ROW,), plan or gradients(), EVERYBODY, STEPS)


def drawn(channel: RoundChannel, rows: Tensor) -> tuple[Tensor, Tensor]:
    """The gradients (n, SIZE) of the records that a round has drawn of all clients, of whom client k has ``rows[k]``,
    and the clients that they are of."""
    assert channel.local is not None
    places, mask = channel.local.batch(torch.arange(CLIENTS))
    clients = torch.arange(CLIENTS)[:, None].expand_as(places)[mask]
    return rows[clients, places[mask]], clients


# The noise and its cost


@pytest.mark.parametrize("epsilon", [0.5, 3.0])
def test_the_noise_of_all_clients_is_that_of_dp_sgd_on_the_union_of_their_data(
    epsilon: float,
) -> None:
    """The multiplier spends the budget as dp-accounting composes Poisson-sampled Gaussian sums, whoever has the
    records."""
    found = calibrated(replace(PRIVACY, epsilon=epsilon))
    event = dp_event.PoissonSampledDpEvent(RATE, dp_event.GaussianDpEvent(found.noise.multiplier))
    spent = library_accountant().compose(event, STEPS).get_epsilon(DELTA)
    assert spent <= epsilon * (1 + 1e-6)
    assert spent >= epsilon * 0.999
    alone = open_channel(
        replace(PRIVACY, epsilon=epsilon, aggregation=None),
        [gradients()],
        EVERYBODY,
        seed=0,
        steps=STEPS,
    )
    # DP-SGD of one client on its own records needs the same
    assert alone.noise_multiplier == pytest.approx(found.noise.multiplier, rel=1e-6)


def test_colluding_clients_count_as_no_noise() -> None:
    """The noise of the honest ones alone is what is charged."""
    found = calibrated(replace(PRIVACY, aggregation=SecureAggregation(colluding=3)))
    share = found.noise.deviation(CLIENTS) * found.noise.width
    assert math.sqrt(CLIENTS - 3) * share >= found.noise.multiplier * CLIP
    assert math.sqrt(CLIENTS - 3) * share <= found.noise.multiplier * CLIP * (1 + 1e-4)


def test_the_default_delta_is_that_of_all_records() -> None:
    privacy = replace(PRIVACY, delta=None, aggregation=replace(SOME, bits=64))
    plan = gradients(total=10**6)
    assert calibrated(privacy, plan).cost.delta == privacy.resolved_delta(10**6)


# The sum


def test_a_round_releases_the_clipped_sum_of_a_slow_loop_and_the_shares_of_the_noise() -> None:
    channel = opened(seed=4)
    channel.begin(0, channel.draw(0))
    assert channel.local is not None
    (release,) = channel.releases.values()
    assert release.shares is not None
    noise = release.shares
    generator = torch.Generator().manual_seed(1)
    rows = 3 * torch.randn(CLIENTS, RECORDS, SIZE, generator=generator)
    rows[2, :, 0] = math.nan  # counts as nothing
    taken, clients = drawn(channel, rows)
    sums = channel.local.grid_sums(torch.arange(CLIENTS), [(taken, clients)])

    cells = np.zeros((CLIENTS, SIZE), dtype=np.int64)
    for row, client in zip(taken.double().numpy(), clients.tolist(), strict=True):
        if np.isfinite(row).all():
            clipped = row * min(1.0, CLIP * (1 - MARGIN) / np.linalg.norm(row))
            cells[client] += np.trunc(clipped / noise.width).astype(np.int64)
    # a last bit of the factor of a clip moves a coordinate by one cell at most
    assert np.abs(sums.numpy() / noise.width - cells).max() <= len(taken)

    value = channel.release("gradient_sum", sums, torch.arange(CLIENTS))
    total = (sums.sum(0) / noise.width).numpy().astype(np.int64)
    for client in range(CLIENTS):
        words = share_words(channel.source, "gradient_sum", client, 0)
        total += noise.share(SIZE, CLIENTS, words)
    assert (value.numpy() == total * noise.width / CLIENTS).all()


def test_the_words_of_the_clients_add_up_to_the_release() -> None:
    """What clients of a server that is not trusted send, modulo 2**32, is what one process releases."""
    channel = opened(seed=5)
    channel.begin(0, channel.draw(0))
    assert channel.local is not None
    (release,) = channel.releases.values()
    assert release.shares is not None
    rows = torch.randn(CLIENTS, RECORDS, SIZE, generator=torch.Generator().manual_seed(2))
    sums = channel.local.grid_sums(torch.arange(CLIENTS), [drawn(channel, rows)])
    randomizer = LocalRandomizer(release, SeededSource(5))
    words = np.zeros(SIZE, dtype=np.uint32)
    for client in range(CLIENTS):
        words = words + randomizer.words(sums[client : client + 1], client, 0, CLIENTS)
    opened_sum = release.shares.opened(release.shares.wrapped(words.astype(np.int64)))
    value = channel.release("gradient_sum", sums, torch.arange(CLIENTS))
    assert (value.numpy() * CLIENTS == opened_sum).all()


WORST = (
    torch.full((SIZE,), 1e30),
    torch.tensor([1.0, -1.0, 1e-12, 3.0, -7.0, 0.3, 0.11]),
    torch.tensor([CLIP] + [0.0] * (SIZE - 1)),
    torch.full((SIZE,), -CLIP / math.sqrt(SIZE)),
    torch.tensor([math.inf] + [1.0] * (SIZE - 1)),
)


def largest_move() -> float:
    """The largest move of a sum of all clients by one record more, over the clip norm."""
    moves = []
    generator = torch.Generator().manual_seed(3)
    others = torch.randn(20, SIZE, generator=generator)
    for record in WORST:
        totals = []
        for rows in (others, torch.cat([others, record[None]])):
            channel = opened()
            channel.begin(0, channel.draw(0))
            assert channel.local is not None
            client = torch.arange(len(rows)) % CLIENTS
            totals.append(channel.local.grid_sums(torch.arange(CLIENTS), [(rows, client)]).sum(0))
        moves.append(float(torch.linalg.vector_norm(totals[1] - totals[0])) / CLIP)
    return max(moves)


def test_one_record_moves_the_sum_by_the_clip_norm_at_most() -> None:
    move = largest_move()
    assert 0.99 <= move <= 1.0


def test_gradients_that_are_not_clipped_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    edit(clipped_segment_sums, "factors / grid", "1.0 / grid")(monkeypatch)
    assert largest_move() > 1.0


def test_rows_off_the_grid_are_refused() -> None:
    """To truncate a sum of several records would move it by more than the clip norm."""
    channel = opened()
    channel.begin(0, channel.draw(0))
    (release,) = channel.releases.values()
    rows = torch.full((CLIENTS, SIZE), 0.1, dtype=torch.float64)
    everybody = torch.arange(CLIENTS)
    with pytest.raises(PrivacyError, match="sums of clipped gradients on the grid"):
        SecureSum(release, SeededSource(0)).total(rows, everybody)
    with pytest.raises(PrivacyError, match="sums of clipped gradients on the grid"):
        LocalRandomizer(release, SeededSource(0)).words(rows[:1], 0, 0, CLIENTS)


@pytest.mark.parametrize("change", ["twice", "those of others", "the last round's", "never made"])
def test_rows_that_are_not_the_sums_of_the_round_are_refused(change: str) -> None:
    """A method of the user's own declares gradients: one record would move twice the sum by twice the clip norm."""
    channel = opened()
    everybody = torch.arange(CLIENTS)
    rows = torch.randn(CLIENTS, RECORDS, SIZE, generator=torch.Generator().manual_seed(2))
    sums = []
    for step in range(2):
        channel.begin(step, channel.draw(step))
        assert channel.local is not None
        if change == "never made":
            sums.append(torch.zeros(CLIENTS, SIZE, dtype=torch.float64))
        else:
            sums.append(channel.local.grid_sums(everybody, [drawn(channel, rows)]))
    made = {
        "twice": 2 * sums[1],
        "those of others": sums[1].flip(0),
        "the last round's": sums[0],
        "never made": sums[1],
    }[change]
    refused = "returned in this round, unchanged, and got others"
    with pytest.raises(PrivacyError, match=refused):
        channel.release("gradient_sum", made, everybody)
    with pytest.raises(PrivacyError, match=refused):
        channel.row_to_send("gradient_sum", made[:1], Receipt(1, 1, everybody[:1]))
    if change != "never made":
        channel.release("gradient_sum", sums[1], everybody)


def test_a_client_makes_its_sum_once_and_never_alone() -> None:
    channel = opened()
    channel.begin(0, channel.draw(0))
    assert channel.local is not None
    nothing = (torch.zeros(0, SIZE), torch.zeros(0, dtype=torch.int64))
    with pytest.raises(PrivacyError, match="added up in a secure sum, and have no noise"):
        channel.local.release(torch.arange(2), [nothing])
    channel.local.grid_sums(torch.arange(2), [nothing])
    with pytest.raises(PrivacyError, match="is not charged"):
        channel.local.grid_sums(torch.tensor([1]), [nothing])


# An attack


LOUD = replace(PRIVACY, epsilon=None, noise_multiplier=1.0)
CANARIES = 16_000


def released(seed: int, *, there: bool) -> np.ndarray:
    """A released sum (CANARIES,) over the clip norm, of a client with as many records: each has a gradient along an
    axis of its own, or none."""
    counts = np.array([CANARIES] + [1] * (CLIENTS - 1))
    plans = [replace(ROW, dimension=CANARIES), gradients(counts=counts, dimension=CANARIES)]
    channel = open_channel(LOUD, plans, EVERYBODY, seed=seed, steps=1)
    assert isinstance(channel, RoundChannel)
    channel.begin(0, channel.draw(0))
    assert channel.local is not None
    everybody = torch.arange(CLIENTS)
    places, mask = channel.local.batch(everybody)
    chunks = [(torch.zeros(0, CANARIES), everybody[:0])]
    if there:
        for part in places[0][mask[0]].split(256):
            rows = torch.zeros(len(part), CANARIES)
            rows[torch.arange(len(part)), part] = 10.0
            chunks.append((rows, torch.zeros(len(part), dtype=torch.int64)))
    sums = channel.local.grid_sums(everybody, chunks)
    return channel.release("gradient_sum", sums, everybody).numpy() * CLIENTS / CLIP


def lower_bound(level: float = 1e-3) -> float:
    """An epsilon of one step that an attack proves: Clopper-Pearson bounds at the best of a few thresholds."""
    present, absent = released(1, there=True), released(2, there=False)
    best = 0.0
    thresholds = np.quantile(absent, [0.5, 0.9, 0.99, 0.998, 0.9993])
    split = level / 2 / len(thresholds)
    for threshold in thresholds:
        hits, alarms = int((present > threshold).sum()), int((absent > threshold).sum())
        least = stats.beta.ppf(split, hits, CANARIES - hits + 1) if hits else 0.0
        most = stats.beta.ppf(1 - split, alarms + 1, CANARIES - alarms)
        if least > DELTA:
            best = max(best, math.log((least - DELTA) / most))
    return best


def test_an_attack_proves_no_more_than_is_claimed(monkeypatch: pytest.MonkeyPatch) -> None:
    """And it proves more of a sum that has the share of one client alone."""
    claimed = calibrated(LOUD).epsilon_at(1)
    assert 0.1 < lower_bound() <= claimed
    edit(SecureSum.noised_mean, "in senders.tolist()", "in senders.tolist()[:1]")(monkeypatch)
    assert lower_bound() > claimed


# Refusals


@pytest.mark.parametrize(
    ("schedule", "message"),
    [
        (PoissonSampling(cohort=3), "amplifies nothing"),
        (FixedCohort(cohort=3), "needs a public schedule"),
    ],
)
def test_schedules_that_are_not_public_are_refused(schedule: Any, message: str) -> None:
    with pytest.raises(PrivacyError, match=message):
        open_channel(PRIVACY, [ROW, gradients()], schedule.bind(CLIENTS), seed=0, steps=STEPS)


def test_turns_are_charged_to_those_who_take_them() -> None:
    channel = open_channel(
        PRIVACY, [ROW, gradients()], CyclicCohorts(cohort=3).bind(CLIENTS), seed=0, steps=STEPS
    )
    assert isinstance(channel, RoundChannel)
    assert channel.accountant.by_client
    assert channel.epsilon_at(STEPS // 2) <= 3.0
    assert channel.epsilon_at(STEPS // 2) > 2.99


def test_a_budget_beside_a_fixed_noise_ends_the_run() -> None:
    channel = opened(replace(PRIVACY, epsilon=3.0, noise_multiplier=1.0))
    affordable = sum(channel.epsilon_at(uses) <= 3.0 for uses in range(1, STEPS + 1))
    assert 0 < affordable < STEPS
    for step in range(affordable):
        channel.begin(step, channel.draw(step))
    with pytest.raises(BudgetExhausted, match="would exceed the privacy budget"):
        channel.begin(affordable, channel.draw(affordable))
    assert channel.epsilon <= 3.0


@pytest.mark.parametrize(
    ("plan", "message"),
    [
        ({"rate": np.linspace(0.1, 0.6, CLIENTS)}, "drawn at one rate, once in a round"),
        ({"steps": np.full(CLIENTS, 2)}, "drawn at one rate, once in a round"),
    ],
)
def test_plans_of_several_costs_are_refused(plan: dict[str, Any], message: str) -> None:
    with pytest.raises(PrivacyError, match=message):
        calibrated(plan=gradients(**plan))


def test_rows_of_other_values_are_refused() -> None:
    other = replace(ROW, from_gradients=False, from_training=True)
    with pytest.raises(PrivacyError, match="'gradient_sum' is of other rows; take FedSGD"):
        open_channel(PRIVACY, [other, gradients()], EVERYBODY, seed=0, steps=STEPS)


def test_of_a_method_that_trains_the_method_is_named_before_the_number_of_its_releases() -> None:
    """FedAvg with a weight of examples has two releases, and one of them would be refused as well."""
    trained = replace(ROW, name="update", from_gradients=False)
    examples = replace(trained, name="examples", dimension=1)
    with pytest.raises(PrivacyError, match="'update' is of other rows; take FedSGD"):
        open_channel(PRIVACY, [trained, examples, gradients()], EVERYBODY, seed=0, steps=STEPS)


def test_fewer_records_in_all_than_clients_have_are_refused() -> None:
    with pytest.raises(ConfigError, match=f"total is 10, and the clients here have {90}"):
        gradients(total=10)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"mechanism": "laplace", "epsilon": 1.0}, "shares of Gaussian noise"),
        ({"epsilon": math.inf}, "a finite epsilon"),
        ({"epsilon": {"client-0": 1.0}}, "one noise for the records of all clients"),
        ({"aggregation": "secure"}, "give a SecureAggregation, or None"),
    ],
)
def test_settings_that_no_secure_sum_has(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        replace(PRIVACY, **options)
