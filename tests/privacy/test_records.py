"""Record-level releases: the law of the records drawn, clip and noise by client, accounts of their own."""

import json
import math
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from dp_accounting import dp_event

from fedmtl.errors import ConfigError, PrivacyError, ResumeError
from fedmtl.privacy import (
    FixedCohort,
    FullParticipation,
    GradientPlan,
    PoissonSampling,
    RecordPrivacy,
    ReleasePlan,
    open_channel,
    privacy_report,
)
from fedmtl.privacy.clip import sum_width
from fedmtl.privacy.records import Records
from fedmtl.random import id_key
from tests.helpers import library_accountant

COUNTS = (10, 25, 40, 8, 100)
DIMENSION, BATCH = 6, 8
STEPS = tuple(math.ceil(n / BATCH) for n in COUNTS)


def plan_of(
    counts: tuple[int, ...] = COUNTS, batch: int | None = BATCH, dimension: int = DIMENSION
) -> GradientPlan:
    n = len(counts)
    steps = [1 if batch is None else math.ceil(c / batch) for c in counts]
    ids = tuple(f"client-{k}" for k in range(n))
    return GradientPlan(
        ids=ids,
        keys=torch.tensor([id_key(name) for name in ids]),
        counts=np.array(counts),
        steps=np.array(steps),
        batch_size=batch,
        dimension=dimension,
    )


def door(
    privacy: RecordPrivacy,
    *,
    rounds: int = 4,
    sampler=None,
    who: GradientPlan | None = None,
    seed: int = 0,
    **options,
):
    who = who or plan_of()
    plan = ReleasePlan(name="update", dimension=who.dimension, from_training=True)
    bound = (sampler or FullParticipation()).bind(len(who.ids))
    order = torch.arange(len(who.ids)).flip(0)  # not that of the clients
    return open_channel(
        privacy, (plan, who), bound, seed=seed, steps=rounds, **({"order": order} | options)
    )


NOISED = RecordPrivacy(clip_norm=0.5, noise_multiplier=1.7, delta=1e-5)
EMPTY = (torch.zeros(0, DIMENSION), torch.zeros(0, dtype=torch.int64))


def begin(channel, step: int = 0) -> torch.Tensor:
    clients = channel.draw(step)
    channel.begin(step, clients)
    return clients


def test_subsets_do_not_depend_on_who_is_drawn_together() -> None:
    channel = door(NOISED)
    begin(channel)
    index, mask = channel.local.batch(torch.arange(5))
    for chosen in ([4], [2, 0], [1, 4, 3]):
        part, inside = channel.local.batch(torch.tensor(chosen))
        for row, k in enumerate(chosen):
            assert part[row][inside[row]].tolist() == index[k][mask[k]].tolist()


def test_a_batch_of_all_records_is_all_records() -> None:
    for batch in (None, 100):
        channel = door(NOISED, who=plan_of(batch=batch))
        begin(channel)
        index, mask = channel.local.batch(torch.arange(5))
        for k, n in enumerate(COUNTS):
            assert index[k][mask[k]].tolist() == list(range(n))
    _, mask = _one(plan_of((5, 40), batch=8)).batch(torch.tensor([0, 1]))
    assert mask[0].sum() == 5  # a client with fewer records than the batch takes all of them


def _one(who: GradientPlan):
    channel = door(NOISED, who=who)
    begin(channel)
    return channel.local


@pytest.mark.parametrize("mechanism", ["gaussian", "laplace", "l2_laplace"])
def test_the_release_is_the_clipped_sum_and_noise_over_the_public_batch(mechanism: str) -> None:
    wide = 3000
    privacy = RecordPrivacy(clip_norm=0.5, noise_multiplier=1.7, mechanism=mechanism)
    channel = door(privacy, who=plan_of(dimension=wide))
    begin(channel)
    clients = torch.tensor([4, 0, 2])
    rows = torch.randn(9, wide, generator=torch.Generator().manual_seed(0)) * 10
    whose = torch.tensor([0, 1, 2, 0, 0, 2, 1, 2, 0])
    rows[3, 1] = math.nan
    small = torch.full((1, wide), 1e-6)
    nothing = torch.zeros(0, wide), torch.zeros(0, dtype=torch.int64)
    with_rows = channel.local.release(clients, iter([(rows, whose), (small, torch.tensor([1]))]))
    other = door(privacy, who=plan_of(dimension=wide))
    begin(other)
    noise = other.local.release(clients, [nothing])
    order = 1 if mechanism == "laplace" else 2
    clean = rows.double()
    clean[3] = 0
    clipped = (
        clean
        / torch.linalg.vector_norm(clean, ord=order, dim=1, keepdim=True).clamp(min=1e-9)
        * 0.5
    )
    clipped[3] = 0
    expected = torch.zeros(3, wide, dtype=torch.float64).index_add_(0, whose, clipped)
    expected[1] += small[0].double() * min(1.0, 0.5 / float(small.double().norm(p=order)))
    assert torch.allclose(with_rows - noise, expected / BATCH, rtol=1e-5, atol=1e-9)
    # z C on a coordinate, sqrt(2) times that of Laplace noise, sqrt(D + 1) times of L2-Laplace noise
    shape = {"gaussian": 1.0, "laplace": math.sqrt(2.0), "l2_laplace": math.sqrt(wide + 1.0)}
    stated = 1.7 * 0.5 * shape[mechanism] / BATCH
    assert float(noise.square().mean().sqrt()) == pytest.approx(stated, rel=0.05)


def test_noise_belongs_to_the_client_the_round_and_the_local_step() -> None:
    def noise(clients: list[int], *, rounds: int = 1, step: int = 0, seed: int = 0) -> torch.Tensor:
        channel = door(NOISED, seed=seed)
        for number in range(rounds):
            begin(channel, number)
        for _ in range(step):
            channel.local.release(torch.tensor(clients), [EMPTY])
        return channel.local.release(torch.tensor(clients), [EMPTY])

    together = noise([0, 1, 2, 3, 4])
    assert torch.equal(noise([3, 1]), together[[3, 1]])
    for fresh in (noise([1], rounds=2), noise([1], step=1), noise([1], seed=1), together[[2]]):
        assert not torch.isclose(fresh, together[[1]]).any()


def test_no_two_local_steps_of_three_rounds_share_their_noise_or_their_records() -> None:
    """Not the second step of a round with the first one of the next round, either."""
    for client in (1, 4):
        one = torch.tensor([client])
        noise = []
        subsets = []
        channel = door(NOISED)
        for number in range(3):
            begin(channel, number)
            for _ in range(STEPS[client]):
                index, drawn = channel.local.batch(one)
                subsets.append(tuple(index[drawn].tolist()))
                noise.append(channel.local.release(one, [EMPTY]).flatten())
        assert torch.cat(noise).unique().numel() == 3 * STEPS[client] * DIMENSION
        assert len(set(subsets)) == 3 * STEPS[client]


def millions(large: float) -> np.ndarray:
    """Values up to 1: without ``large`` the first 2^21 add up to less than 2^20, where a double has more digits for
    the 10^6 small ones that follow."""
    return np.concatenate(
        [np.full(2**21 - 2, 0.5), [0.25, large], np.full(10**6, 2.0**-33 * 1.001)]
    )


def cells_of(values: np.ndarray, width: float) -> float:
    return sum(np.trunc(values / width).astype(np.int64).tolist()) * width


def test_one_record_of_three_million_moves_the_sum_of_a_client_by_at_most_the_clip() -> None:
    with_record, without = (
        torch.from_numpy(millions(large))[:, None] for large in (1 - 2.0**-20, 0.0)
    )
    size = len(with_record)
    plan = plan_of((size,), batch=None, dimension=1)
    sums = Records(plan, (), None, bound=1.0, law="gaussian")
    found = []
    for rows in (with_record, without):
        parts = rows.split(size // 3 + 1)
        chunks = ((part, torch.zeros(len(part), dtype=torch.int64)) for part in parts)
        found.append(sums.of_chunks(chunks, torch.tensor([0])).item())
        assert sums.of_gradients(0, rows[None]).item() == found[-1]
        assert found[-1] == cells_of(rows[:, 0].numpy(), sum_width(1.0, size))
    assert 1 - 2.0**-19 < found[0] - found[1] <= 1.0


def test_sums_of_millions_of_multiples_of_rows_are_exact() -> None:
    values = millions(1 - 2.0**-20)
    x = (torch.linspace(0.5, 1.0, len(values), dtype=torch.float64)[:, None],)
    plan = replace(plan_of((len(values),), batch=None, dimension=1), x=x)
    sums, width = (
        Records(plan, (), None, bound=1.0, law="gaussian"),
        sum_width(1.0, len(values)),
    )
    factors = values / x[0][:, 0].numpy()
    rows = np.minimum(factors, (1 - 2.0**-20) / x[0][:, 0].numpy()) * (x[0][:, 0].numpy() / width)
    expected = sum(np.trunc(rows).astype(np.int64).tolist()) * width
    assert sums.of_factors(0, factors[None]).item() == expected


def test_accounts_are_what_dp_accounting_says_of_each_client() -> None:
    channel = door(NOISED, rounds=3)
    for step in range(3):
        begin(channel, step)
    found = channel.accountant.epsilons()[0]
    for k, n in enumerate(COUNTS):
        event = dp_event.GaussianDpEvent(1.7)
        if n > BATCH:
            event = dp_event.PoissonSampledDpEvent(BATCH / n, event)
        expected = library_accountant().compose(event, 3 * STEPS[k]).get_epsilon(1e-5)
        assert found[k] == pytest.approx(expected, rel=2e-3)
    report = privacy_report(channel)
    assert channel.epsilon == report.epsilon == found.max()
    assert report.by_client == (found.min(), np.median(found), found.max())
    assert (report.unit, report.relation) == ("record", "zero_out")
    assert report.releases == 3 * sum(STEPS)
    assert "q = 0.08 to 1 by client" in report.text()


def test_clients_reach_the_budgets_of_their_own() -> None:
    budgets = {f"client-{k}": e for k, e in enumerate((0.5, 1.0, 2.0, 4.0, 8.0))}
    channel = door(RecordPrivacy(clip_norm=0.5, epsilon=budgets, delta=1e-5))
    for step in range(4):
        begin(channel, step)
    found = channel.accountant.epsilons()[0]
    wanted = np.array(list(budgets.values()))
    assert (found <= wanted).all()
    assert found == pytest.approx(wanted, rel=1e-3)
    assert privacy_report(channel).budget == 8.0


def test_the_budget_is_a_hard_cap_on_each_client() -> None:
    privacy = RecordPrivacy(clip_norm=0.5, noise_multiplier=4.0, epsilon=6.0, delta=1e-5)
    channel = door(privacy, rounds=40)
    drawn = [begin(channel, step) for step in range(40)]
    uses = channel.accountant.participations[0]
    cost = channel.accountant.costs
    assert cost.epsilons(uses).max() <= 6.0
    for k in range(5):  # one more participation would not fit
        more = uses.copy()
        more[k] += 1
        assert uses[k] == 40 or cost.epsilons(more)[0, k] > 6.0
    assert min(uses) < 40
    assert [len(ranks) for ranks in drawn] == sorted((len(ranks) for ranks in drawn), reverse=True)


def test_only_local_steps_that_are_paid_for_are_made() -> None:
    channel = door(NOISED, sampler=FixedCohort(2))
    inside = sorted(begin(channel).tolist())
    outside = [k for k in range(5) if k not in inside]
    everyone = torch.arange(5)
    expected = [STEPS[k] if k in inside else 0 for k in range(5)]
    assert channel.local.steps(everyone).tolist() == expected
    with pytest.raises(PrivacyError, match="not charged"):
        channel.local.release(torch.tensor(outside[:1]), [EMPTY])
    again = door(NOISED)
    begin(again)
    again.local.release(torch.tensor([3]), [EMPTY])
    with pytest.raises(PrivacyError, match="not charged"):
        again.local.release(torch.tensor([3]), [EMPTY])
    assert again.local.numbers(torch.tensor([0, 1])).tolist() == [0, 0]


def test_one_address_of_noise_serves_one_release() -> None:
    channel = door(NOISED)
    one, record = torch.tensor([1]), (torch.ones(1, DIMENSION), torch.zeros(1, dtype=torch.int64))
    assert channel.local is None
    begin(channel)
    first = channel.local
    with pytest.raises(PrivacyError, match="named twice"):
        first.release(torch.tensor([1, 2, 1]), [EMPTY])
    values = [first.release(one, [EMPTY]) for _ in range(STEPS[1])]
    assert torch.cat(values).unique().numel() == STEPS[1] * DIMENSION
    for _ in range(2):
        with pytest.raises(PrivacyError, match="not charged"):
            first.release(one, [record])
    begin(channel, 1)
    with pytest.raises(PrivacyError, match="Round 0 is over"):
        first.release(torch.tensor([2]), [record])


def test_every_training_of_a_participation_has_subsets_and_noise_of_its_own() -> None:
    who = replace(plan_of(), steps=2 * np.array(STEPS), trainings=2)
    channel = door(NOISED, who=who)
    begin(channel)
    clients, noise, subsets = torch.tensor([2, 4]), [], []
    assert channel.local.steps(clients).tolist() == [5, 13]
    for _ in range(2):
        for _ in range(5):
            subsets.append(channel.local.batch(clients)[0].flatten().tolist())
            noise.append(channel.local.release(clients, [EMPTY]).flatten())
        for _ in range(5, 13):
            channel.local.release(clients[1:], [EMPTY])
    assert channel.local.numbers(torch.tensor([1])).tolist() == [0]
    assert len({tuple(subset) for subset in subsets}) == len(subsets)
    assert torch.unique(torch.cat(noise)).numel() == 2 * 5 * 2 * DIMENSION
    with pytest.raises(PrivacyError, match=r"not charged.*all local trainings.*trainings=2"):
        channel.local.batch(clients)
    with pytest.raises(PrivacyError, match="not charged"):
        channel.local.release(clients, [EMPTY])


def test_nobody_takes_part_more_often_than_the_cap() -> None:
    channel = door(NOISED, rounds=30, sampler=PoissonSampling(2))
    cap = 13  # 30 x 2 / 5 = 12 on average, and one more
    for step in range(30):
        begin(channel, step)
    assert channel.accountant.participations.max() <= cap
    assert (channel.accountant.caps == cap).all()


def test_clip_only_adds_no_noise_and_promises_nothing() -> None:
    channel = door(RecordPrivacy(clip_norm=0.5, epsilon=math.inf))
    begin(channel)
    assert not channel.local.release(torch.tensor([0]), [EMPTY]).any()
    assert channel.epsilon == math.inf
    assert privacy_report(channel).headline == "not private: epsilon = inf, clip only, no noise"


def test_what_clients_send_is_added_up_as_it_is() -> None:
    channel = door(NOISED)
    ranks = begin(channel)
    rows = 100.0 * torch.arange(5 * DIMENSION).reshape(5, DIMENSION)
    assert torch.equal(channel.release("update", rows, ranks), rows.double().sum(0) / 5)


def test_the_ledger_names_who_took_part(tmp_path: Path) -> None:
    channel = door(NOISED, sampler=FixedCohort(2), ledger_path=tmp_path / "ledger.jsonl")
    drawn = [begin(channel, step).tolist() for step in range(2)]
    channel.close()
    lines = [json.loads(line) for line in (tmp_path / "ledger.jsonl").read_text().splitlines()]
    assert [line["cohorts"] for line in lines if line["kind"] == "charge"] == [
        [sorted(d)] for d in drawn
    ]
    assert lines[0]["accounts"] == 5
    resumed = door(
        NOISED, sampler=FixedCohort(2), ledger_path=tmp_path / "ledger.jsonl", resume=True
    )
    resumed.start(2)
    assert resumed.accountant.participations.sum() == 4
    assert resumed.draw(2) is not None


@pytest.mark.parametrize(
    "changed", [{"steps": np.ones(5, dtype=np.int64)}, {"batch_size": 16}, {"dimension": 9}]
)
def test_a_secure_ledger_is_not_continued_by_cheaper_steps(tmp_path: Path, changed: dict) -> None:
    """What was released before would be charged as if it had been released by the new steps."""
    privacy = replace(NOISED, source="secure", mechanism="l2_laplace")
    first = door(privacy, ledger_path=tmp_path / "ledger.jsonl")
    begin(first)
    first.close()
    with pytest.raises(ResumeError):
        door(
            privacy,
            who=replace(plan_of(), **changed),
            ledger_path=tmp_path / "ledger.jsonl",
            resume=True,
        )


def test_more_rounds_do_not_raise_the_caps_of_a_secure_ledger(tmp_path: Path) -> None:
    privacy = RecordPrivacy(clip_norm=0.5, epsilon=2.0, delta=1e-5, source="secure")
    first = door(privacy, rounds=3, ledger_path=tmp_path / "ledger.jsonl")
    begin(first)
    first.close()
    longer = door(privacy, rounds=9, ledger_path=tmp_path / "ledger.jsonl", resume=True)
    for step in range(1, 9):
        begin(longer, step)
    assert longer.accountant.participations.tolist() == [[3] * 5]
    assert 1.9 < privacy_report(longer).epsilon <= 2.0


def test_impossible_requests_are_refused_by_name() -> None:
    plan = ReleasePlan(name="statistics", dimension=3)
    with pytest.raises(
        PrivacyError, match="'statistics' is not made only of locally trained models"
    ):
        open_channel(NOISED, (plan, plan_of()), FullParticipation().bind(5), seed=0, steps=2)
    update = replace(plan, name="update", dimension=DIMENSION, from_training=True)
    with pytest.raises(PrivacyError, match="needs a GradientPlan"):
        open_channel(NOISED, (update,), FullParticipation().bind(5), seed=0, steps=2)
    with pytest.raises(PrivacyError, match="2 GradientPlans"):
        open_channel(
            NOISED, (update, plan_of(), plan_of()), FullParticipation().bind(5), seed=0, steps=2
        )
    with pytest.raises(PrivacyError, match="5 clients, and the sampler 6"):
        open_channel(NOISED, (update, plan_of()), FullParticipation().bind(6), seed=0, steps=2)
    for unused in (
        {"caps": np.ones(5, dtype=np.int64)},
        {"allocation": [np.arange(1, 5)] * 5},
    ):
        with pytest.raises(PrivacyError, match=f"{next(iter(unused))}.*not for rounds"):
            door(NOISED, who=replace(plan_of(), **unused))
    for wrong in ({"steps": np.ones(4, dtype=np.int64)}, {"keys": torch.ones(5)}):
        with pytest.raises(ConfigError, match=next(iter(wrong))):
            replace(plan_of(), **wrong)
    with pytest.raises(ConfigError, match="each of 0 to 4 once"):
        door(NOISED, order=torch.ones(5, dtype=torch.int64))
    with pytest.raises(ConfigError, match="no budget for client 'client-1'"):
        door(RecordPrivacy(clip_norm=1.0, epsilon={"client-0": 1.0}))
    with pytest.raises(ConfigError, match="names 'nobody'"):
        door(RecordPrivacy(clip_norm=1.0, epsilon={"nobody": 1.0}))
    with pytest.raises(ConfigError, match="client 'client-0' in one round"):
        door(RecordPrivacy(clip_norm=1.0, noise_multiplier=0.1, epsilon=0.5))
    with pytest.raises(ConfigError, match="inf for some clients"):
        RecordPrivacy(clip_norm=1.0, epsilon={"a": 1.0, "b": math.inf})
