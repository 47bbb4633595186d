"""The number of uses: the noise of each, the cap at which a client falls silent, the budget and the delta of all."""

import math
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from dp_accounting import gaussian_mechanism

from fedmtl.errors import BudgetExhausted, ConfigError, PrivacyError, ResumeError
from fedmtl.privacy import (
    ClientPrivacy,
    Clip,
    FixedCohort,
    FullParticipation,
    GradientPlan,
    LaplaceNoise,
    PoissonSampling,
    RecordPrivacy,
    Release,
    ReleasePlan,
    RoundChannel,
    SeededSource,
    open_channel,
    privacy_report,
)
from fedmtl.privacy.row_noise import RowNoise

from .activations import COUNTS, PURE, door, rows


def released(channel, activations: int) -> np.ndarray:
    """(S, D): what so many activations release of clients that contribute nothing."""
    counts = channel.records.counts
    values = [
        channel.release(lambda k, runs: torch.zeros(len(runs), int(counts[k])).double())[0]
        for _ in range(activations)
    ]
    return torch.stack(values).numpy()


@pytest.mark.parametrize("weights", [(1.0, 1.0, 1.0, 1.0), (1.0, 2.0, 3.0, 10.0)])
def test_the_noise_of_every_use_is_that_of_its_part_of_the_budget(weights: tuple) -> None:
    """Laplace noise on a sum that a record moves by 2 C: of scale 2 C / e for a use with the part e of epsilon = 2.
    Clients act in turn, in two blocks, each of which begins in the middle of their uses."""
    parts = 2.0 * np.array(weights) / sum(weights)
    counts = (1, 2)
    channel = door(
        PURE, caps=(4, 4), counts=counts, dimension=4000, allocation=[np.array(weights)] * 2
    )
    clients = [0, 1, 1, 0, 1, 0, 1, 0]
    uses = [0, 0, 1, 1, 2, 2, 3, 3]
    stds = []
    found = []
    for block in (slice(0, 3), slice(3, 8)):
        channel.begin(block.start, torch.tensor([clients[block]]))
        for _ in clients[block]:
            found.append(np.abs(released(channel, 1)).mean())
            stds.append(float(channel.noise_std("gradient")))
    scales = 2 * 0.5 / parts[uses] / np.array(counts)[clients]
    np.testing.assert_allclose(found, scales, rtol=0.08)  # five deviations of the mean of |v|
    np.testing.assert_allclose(stds, math.sqrt(2.0) * scales, rtol=1e-4)


def test_a_client_past_its_cap_is_silent_and_free() -> None:
    """Within a block, after it, and beside others; all of the budget, and no more, is in the uses up to the cap."""
    privacy = RecordPrivacy(clip_norm=0.5, epsilon=2.0, mechanism="laplace", delta=0.0)
    channel = door(privacy, caps=(2, 3, 0), at_cap="silent")
    blocks = [[0, 0, 0, 1, 2], [1, 0, 1, 1, 0]]
    speaks = [[1, 1, 0, 1, 0], [1, 0, 1, 0, 0]]
    for first, (clients, loud) in enumerate(zip(blocks, speaks, strict=True)):
        channel.begin(5 * first, torch.tensor([clients]))
        assert released(channel, 5).any(1).tolist() == [bool(one) for one in loud]
    assert channel.accountant.uses.tolist() == [[2, 3, 0]]
    assert channel.accountant.epsilons()[0] == pytest.approx([2.0, 2.0, 0.0], rel=1e-4)


def test_repetitions_with_budgets_of_their_own_have_noise_of_their_own() -> None:
    settings = [replace(PURE, epsilon=epsilon) for epsilon in (1.0, 4.0)]
    channel = door(settings, caps=(3,), counts=(2,), dimension=4000, replicates=2)
    channel.begin(0, torch.tensor([[0], [0]]))
    value = channel.release(lambda k, runs: torch.zeros(len(runs), 2).double()).numpy()
    scales = 2 * 0.5 / np.array([1.0 / 3, 4.0 / 3]) / 2  # 2 C / e over two records
    np.testing.assert_allclose(np.abs(value).mean(1), scales, rtol=0.08)


def test_noise_and_drawn_records_belong_to_the_key_of_a_client() -> None:
    """And not to its place among the others."""
    privacy = replace(PURE, mechanism="l2_laplace", delta=1e-5)
    found = []
    for order in ([0, 1, 2], [2, 0, 1]):
        channel = door(
            privacy,
            x=[rows()[k] for k in order],
            keys=torch.tensor([11, -5, 2**40])[order],
            rate=0.5,
        )
        channel.begin(0, torch.tensor([[order.index(1)] * 2]))
        ones = torch.ones(1, COUNTS[1], dtype=torch.float64)
        found += [channel.release(lambda *_, ones=ones: ones).numpy() for _ in range(2)]
    np.testing.assert_array_equal(found[:2], found[2:])


def test_which_records_are_drawn_says_nothing_of_the_noise_beside_them() -> None:
    """As many coordinates as records: were the coins those of the noise, drawn ones would have the tails of it."""
    n, uses = 500, 4
    x = [torch.zeros(n, n, dtype=torch.float64)]
    channel = door(PURE, x=x, caps=(uses,), rate=0.5)
    channel.begin(0, torch.zeros(1, uses, dtype=torch.int64))
    sizes = []
    drawn = []
    for _ in range(uses):
        drawn.append(channel.members(0, np.zeros(1, dtype=np.int64))[0])
        sizes.append(np.abs(released(channel, 1)[0]))
    drawn = np.concatenate(drawn)
    sizes = np.concatenate(sizes)
    apart = sizes[drawn].mean() / sizes[~drawn].mean()
    assert abs(math.log(apart)) < 6 * 2 / math.sqrt(n * uses)


def test_no_factor_moves_a_sum_by_more_than_the_clip() -> None:
    for mechanism, order in (("laplace", 1), ("gaussian", 2)):
        channel = door(replace(PURE, mechanism=mechanism, delta=1e-5))
        for client, count in enumerate(COUNTS):
            for factor in (1e300, -1e300, 7.0):
                alone = factor * np.eye(count)
                sums = channel.records.of_factors(client, alone)
                assert np.linalg.norm(sums, ord=order, axis=1).max() <= 0.5


@pytest.mark.parametrize("changed", [{"counts": (5, 20, 61)}, {"caps": (4, 4, 5)}])
def test_a_secure_ledger_is_not_continued_with_other_public_numbers(
    changed: dict, tmp_path: Path
) -> None:
    privacy = RecordPrivacy(clip_norm=0.5, noise_multiplier=2.0, delta=1e-5, source="secure")
    path = tmp_path / "ledger.jsonl"
    door(privacy, ledger_path=path).close()
    door(privacy, ledger_path=path, resume=True).close()
    with pytest.raises(ResumeError, match="was written with"):
        door(privacy, ledger_path=path, resume=True, **changed)


# Rounds


def opened(privacy: ClientPrivacy, clients: int = 4, steps: int = 6, **options) -> RoundChannel:
    plan = ReleasePlan(name="update", dimension=2)
    bound = FullParticipation().bind(clients)
    return open_channel(privacy, (plan,), bound, seed=0, steps=steps, **options)


@pytest.mark.parametrize(("share", "steps"), [(1 - 1e-6, 5), (1 + 1e-6, 6)])
def test_a_step_that_is_a_hair_beyond_the_budget_is_refused(share: float, steps: int) -> None:
    """Of six planned ones, whose noise multiplier is given: against the closed form."""
    budget = float(gaussian_mechanism.get_epsilon_gaussian(5.0 / math.sqrt(6), 1e-5)) * share
    channel = opened(ClientPrivacy(clip_norm=1.0, noise_multiplier=5.0, epsilon=budget, delta=1e-5))
    for step in range(steps):
        channel.begin(step, channel.draw(step))
    with pytest.raises(BudgetExhausted, match=f"{steps} steps are charged"):
        channel.begin(steps, channel.draw(steps))
    assert channel.epsilon <= budget


def test_nothing_more_is_released_once_a_further_round_was_refused() -> None:
    """Not even what the round before has paid for."""
    plans = tuple(ReleasePlan(name=name, dimension=2) for name in ("a", "b"))
    budget = float(gaussian_mechanism.get_epsilon_gaussian(5.0 / math.sqrt(2), 1e-5)) * 1.001
    privacy = ClientPrivacy(clip_norm=1.0, noise_multiplier=5.0, epsilon=budget, delta=1e-5)
    channel = open_channel(privacy, plans, FullParticipation().bind(4), seed=0, steps=1)
    everybody = channel.draw(0)
    channel.begin(0, everybody)
    channel.release("a", torch.zeros(4, 2), everybody)
    with pytest.raises(BudgetExhausted):
        channel.begin(1, channel.draw(1))
    with pytest.raises(PrivacyError, match="no step has begun"):
        channel.release("b", torch.zeros(4, 2), everybody)


@pytest.mark.parametrize("source", ["seeded", "secure"])
def test_a_run_that_is_one_step_ahead_of_its_ledger_is_refused(source: str, tmp_path: Path) -> None:
    privacy = ClientPrivacy(clip_norm=1.0, noise_multiplier=5.0, delta=1e-5, source=source)
    first = opened(privacy, ledger_path=tmp_path / "ledger.jsonl")
    for step in range(3):
        first.begin(step, first.draw(step))
    first.close()
    again = opened(privacy, ledger_path=tmp_path / "ledger.jsonl", resume=True)
    with pytest.raises(ResumeError, match=r"continues at step 4.*step 3 is not charged"):
        again.start(4)
    again.start(3)
    again.close()


def test_delta_is_that_of_all_protected_units() -> None:
    """n^-1.1 where there are many: of clients, or of the records of all of them."""
    plan = ReleasePlan(name="update", dimension=2)
    many = PoissonSampling(10).bind(10**6)
    channel = open_channel(
        ClientPrivacy(clip_norm=1.0, noise_multiplier=2.0), (plan,), many, seed=0
    )
    assert channel.delta == pytest.approx(10**-6.6)
    records = GradientPlan(
        ids=("a", "b"), counts=np.array([10**6, 3]), dimension=2, caps=np.array([1, 1])
    )
    private = RecordPrivacy(clip_norm=1.0, noise_multiplier=2.0)
    assert open_channel(private, (records,), "in turn", seed=0).delta == pytest.approx(
        (10**6 + 3) ** -1.1
    )


def in_part(privacy: ClientPrivacy, steps: int, max_uses: int | None = None) -> RoundChannel:
    """Two of four clients a round, each charged for its own participations."""
    plan = ReleasePlan(name="update", dimension=2)
    bound = FixedCohort(2, max_uses).bind(4)
    return open_channel(privacy, (plan,), bound, seed=0, steps=steps)


def gaussian_epsilon(multiplier: float, uses: int) -> float:
    return float(gaussian_mechanism.get_epsilon_gaussian(multiplier / math.sqrt(uses), 1e-5))


def test_a_fixed_multiplier_and_a_budget_give_the_cap_of_clients_in_rounds() -> None:
    budget = gaussian_epsilon(4.0, 5) * (1 + 1e-6)
    privacy = ClientPrivacy(clip_norm=1.0, noise_multiplier=4.0, epsilon=budget, delta=1e-5)
    channel = in_part(privacy, 20)
    assert channel.caps.tolist() == [5] * 4, "without a budget it would be 11"
    with suppress(BudgetExhausted):
        for step in range(20):
            channel.begin(step, channel.draw(step))
    assert channel.accountant.uses.max() == 5
    assert privacy_report(channel).epsilon == pytest.approx(gaussian_epsilon(4.0, 5), rel=1e-9)


def test_after_an_early_stop_every_client_has_spent_its_cap() -> None:
    """Also one that took part less often, or never."""
    channel = in_part(ClientPrivacy(clip_norm=1.0, noise_multiplier=4.0, delta=1e-5), 6, 3)
    channel.begin(0, channel.draw(0))
    assert channel.epsilon == pytest.approx(gaussian_epsilon(4.0, 1), rel=1e-9)
    channel.charge_remaining(1)
    assert channel.accountant.spent.tolist() == [[3] * 4]
    whole = pytest.approx(gaussian_epsilon(4.0, 3), rel=1e-9)
    assert channel.epsilon == whole
    assert privacy_report(channel).epsilon == whole


def test_the_epsilon_of_so_many_uses_is_the_largest_of_all_clients() -> None:
    budgets = {"a": 0.5, "b": 4.0, "c": 1.0}
    channel = door(replace(PURE, epsilon=budgets), caps=(4, 4, 4))
    for uses in (1, 4):
        assert channel.epsilon_at(uses) == pytest.approx(uses * 4.0 / 4, rel=1e-4)


@pytest.mark.parametrize("source", ["seeded", "secure"])
def test_a_ledger_keeps_an_early_stop(source: str, tmp_path: Path) -> None:
    """Also where the run that resumes it does nothing."""
    privacy = ClientPrivacy(clip_norm=1.0, noise_multiplier=5.0, delta=1e-5, source=source)
    first = opened(privacy, ledger_path=tmp_path / "ledger.jsonl")
    first.begin(0, first.draw(0))
    first.charge_remaining(1)
    first.close()
    again = opened(privacy, ledger_path=tmp_path / "ledger.jsonl", resume=True)
    again.start(1)
    assert again.accountant.spent.tolist() == [[6]]
    assert again.epsilon == pytest.approx(gaussian_epsilon(5.0, 6), rel=1e-9)
    again.close()


def test_a_secure_step_that_is_released_again_needs_room_in_the_budget(tmp_path: Path) -> None:
    """Its noise is drawn anew, so it is a further use: three fit, of which two were spent before a crash."""
    path = tmp_path / "ledger.jsonl"
    budget = gaussian_epsilon(5.0, 3) * (1 + 1e-6)
    privacy = ClientPrivacy(
        clip_norm=1.0, noise_multiplier=5.0, epsilon=budget, delta=1e-5, source="secure"
    )
    for resume, steps in ((False, 2), (True, 1)):
        channel = opened(privacy, steps=3, ledger_path=path, resume=resume)
        for step in range(steps):
            channel.begin(step, channel.draw(step))
        if not resume:
            channel.close()
    with pytest.raises(BudgetExhausted, match="3 steps are charged"):
        channel.begin(1, channel.draw(1))
    channel.close()


# What must be refused before anything is opened

CLIENT = ClientPrivacy(clip_norm=1.0, noise_multiplier=2.0, delta=1e-5)
VECTOR = ReleasePlan(name="update", dimension=3)
RECORDS = GradientPlan(ids=("a", "b"), counts=np.array([5, 6]), dimension=3, steps=np.array([2, 4]))


def test_refusals_without_which_a_price_would_not_hold() -> None:
    everybody = FullParticipation().bind(2)
    secure = replace(CLIENT, source="secure")
    with pytest.raises(PrivacyError, match="is seeded, but the settings ask for another"):
        open_channel(secure, (VECTOR,), everybody, seed=0, source=SeededSource(0))
    with pytest.raises(ConfigError, match="simulation"):
        open_channel(secure, (VECTOR,), everybody, seed=0, replicates=2)
    hidden = replace(VECTOR, rows=RowNoise(1.0))
    with pytest.raises(PrivacyError, match="in a run without noise"):
        open_channel(None, (hidden,), everybody, seed=0)
    with pytest.raises(PrivacyError, match="clipped in the L2 norm"):
        open_channel(replace(CLIENT, mechanism="laplace"), (hidden,), everybody, seed=0)
    with pytest.raises(PrivacyError, match="needs an L2 clip"):
        Release(name="c", dimension=3, form="diagonal", sampling=everybody,
                clip=Clip(1.0, "l1"), noise=LaplaceNoise(2.0))  # fmt: skip
    with pytest.raises(PrivacyError, match="2 trainings cannot share"):
        replace(RECORDS, steps=np.array([2, 5]), trainings=2)
    both = [replace(PURE, noise_multiplier=3.0, epsilon=epsilon) for epsilon in (1.0, 9.0)]
    with pytest.raises(ConfigError, match="have the caps of all"):
        door(both, replicates=2)
