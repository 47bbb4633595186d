"""Laws, caps, order, windows and replicates of asynchronous schedules, against simulations one activation at a time."""

import heapq
from bisect import bisect_right

import numpy as np
import pytest
import torch
from scipy import stats
from scipy.special import ndtri

from fedmtl.errors import ConfigError
from fedmtl.random import derive_key, id_key, keyed_uniform
from fedmtl.schedules import (
    Dropouts,
    Latencies,
    PoissonClocks,
    RandomLatency,
    Synchronous,
    TraceLatency,
)

ALPHA = 1e-6


def numbers_of(purpose, seed, replicate, key, count):
    """The first uniform numbers of one client's stream, straight from the generator."""
    keys = torch.full((count,), key, dtype=torch.int64)
    return keyed_uniform(derive_key(seed, purpose, replicate), keys, 0, torch.arange(count)).numpy()


def back_at(intervals, time):
    """When a client that answers at ``time`` is there."""
    place = bisect_right([start for start, _ in intervals], time) - 1
    return intervals[place][1] if place >= 0 and intervals[place][1] > time else time


def simulate(gaps, caps, activations, intervals=None):
    """A queue of next activations: (time, client), one activation at a time."""
    intervals = intervals or [[] for _ in gaps]
    queue = [(back_at(intervals[i], gaps[i][0]), i, 0) for i in range(len(gaps)) if caps[i] > 0]
    heapq.heapify(queue)
    out = []
    while queue and len(out) < activations:
        time, i, k = heapq.heappop(queue)
        if time == np.inf:
            continue
        out.append((time, i))
        if k + 1 < caps[i]:
            heapq.heappush(queue, (back_at(intervals[i], time + gaps[i][k + 1]), i, k + 1))
    return out


def rows_of(table, replicate=0):
    return list(zip(table.time[replicate].tolist(), table.client[replicate].tolist(), strict=True))


def same(left, right):
    same_places = torch.equal(left.time, right.time) and torch.equal(left.clients, right.clients)
    return same_places and left.first == right.first


# --- laws


def test_poisson_gaps_are_exponential_of_the_summed_rate_and_owners_by_rate():
    rate = np.array([0.5, 1.0, 2.0, 4.5])
    table = PoissonClocks(activations=20_000, rate=rate.tolist()).bind(4).activations(3, 0, 20_000)
    gaps = np.diff(table.time[0].numpy(), prepend=0.0)
    assert stats.kstest(gaps, stats.expon(scale=1 / rate.sum()).cdf).pvalue > ALPHA
    counts = np.bincount(table.client[0].numpy(), minlength=4)
    assert stats.chisquare(counts, 20_000 * rate / rate.sum()).pvalue > ALPHA
    pairs = np.zeros((4, 4))
    np.add.at(pairs, (table.client[0, :-1].numpy(), table.client[0, 1:].numpy()), 1)
    assert stats.chi2_contingency(pairs).pvalue > ALPHA
    slow = gaps < np.median(gaps)
    owners = np.stack(
        [np.bincount(table.client[0].numpy()[part], minlength=4) for part in (slow, ~slow)]
    )
    assert stats.chi2_contingency(owners).pvalue > ALPHA


# --- the order of activations


LAWS = {
    "uniform": (RandomLatency("uniform", {"scale": 15.0}), lambda u: 15.0 * u),
    "lognormal": (
        RandomLatency("lognorm", {"s": 2.0}),
        lambda u: np.exp(2.0 * ndtri(np.maximum(u, 2.0**-54))),
    ),
    "heavy": (
        RandomLatency("lognorm", {"s": 8.0}),
        lambda u: np.exp(8.0 * ndtri(np.maximum(u, 2.0**-54))),
    ),
    "constant": (2.0, lambda u: np.full_like(u, 2.0)),
}


@pytest.mark.parametrize("law", LAWS)
@pytest.mark.parametrize(
    ("per_client", "activations"), [(60, None), ([0, 60, 3, 1, 200], None), (300, 200)]
)
def test_the_order_is_that_of_a_queue(law, per_client, activations):
    latency, of = LAWS[law]
    scale = [1.0, 2.0, 0.5, 30.0, 1.0]
    bound = Latencies(
        latency=latency, per_client=per_client, activations=activations, scale=scale
    ).bind(5)
    caps = [per_client] * 5 if isinstance(per_client, int) else per_client
    for replicate in range(2):
        gaps = [
            of(numbers_of("schedule/latency", 9, replicate, i, max(caps))) * scale[i]
            for i in range(5)
        ]
        expected = simulate(gaps, caps, activations or sum(caps))
        assert rows_of(bound.activations(9, 0, bound.steps, replicates=2), replicate) == expected
        assert len(expected) == bound.steps


def test_the_clocks_are_those_of_a_queue_with_very_different_rates():
    rate = [1e-3, 1.0, 50.0, 0.0, 3.0]
    bound = PoissonClocks(rate=rate, activations=3_000, per_client=2_500).bind(5)
    gaps = [
        -np.log1p(-numbers_of("schedule/poisson", 2, 0, i, 2_501)) * (1 / r) if r else []
        for i, r in enumerate(rate)
    ]
    assert rows_of(bound.activations(2, 0, 3_000)) == simulate(
        gaps, [2_500 if r else 0 for r in rate], 3_000
    )


def test_ties_come_in_the_order_of_clients_and_then_of_activations():
    bound = Latencies(
        latency=TraceLatency([[1.0, 0.0], [1.0, 0.0, 0.0, 0.0], [2.0]]), activations=12
    ).bind(3)
    gaps = [[1.0, 0.0] * 20, [1.0, 0.0, 0.0, 0.0] * 10, [2.0] * 20]
    assert rows_of(bound.activations(0, 0, 12)) == simulate(gaps, [40] * 3, 12)
    assert [client for _, client in simulate(gaps, [40] * 3, 12)] == [
        0,
        0,
        1,
        1,
        1,
        1,
        0,
        0,
        1,
        1,
        1,
        1,
    ]


# --- rounds


def test_synchronous_rounds_end_with_their_slowest():
    scale, caps = [1.0, 3.0, 1.0, 2.0], [5, 40, 40, 0]
    bound = Synchronous(
        latency=RandomLatency("uniform", {"scale": 15.0}), per_client=caps, scale=scale
    ).bind(4)
    for replicate in range(3):
        gaps = [
            15.0 * numbers_of("schedule/latency", 4, replicate, i, 40) * scale[i] for i in range(4)
        ]
        now, expected = 0.0, []
        for k in range(40):
            members = [i for i in range(4) if caps[i] > k]
            now += max(gaps[i][k] for i in members)
            expected += [(now, i) for i in members]
        assert rows_of(bound.activations(4, 0, bound.steps, replicates=3), replicate) == expected


def test_a_round_whose_slowest_never_returns_is_never_over():
    away = Dropouts(intervals={"1": [(5.0, np.inf)]})
    settings = {"latency": 2.0, "per_client": 10, "dropouts": away}
    bound = Synchronous(**settings).bind(2)
    table = bound.activations(0, 0, bound.steps)
    assert table.client[0].tolist() == [0, 1, 0, 1] + [-1] * 16
    assert table.time[0].tolist() == [2.0, 2.0, 4.0] + [4.0] * 17
    free = Latencies(**settings).bind(2).activations(0, 0, 20)
    assert free.client[0].tolist() == [0, 1, 0, 1] + [0] * 8 + [-1] * 8
    assert free.time[0, -9:].tolist() == [20.0] * 9


# --- absences


def drawn_intervals(seed, replicate, key, rate, duration, count):
    u = -np.log1p(-numbers_of("schedule/dropouts", seed, replicate, key, 2 * count))
    now, out = 0.0, []
    for j in range(count):
        start = now + u[2 * j] / rate
        now = start + u[2 * j + 1] * duration
        out.append((start, now))
    return out


FIXED = {
    "0": [(0.0, 4.0), (10.0, 10.5), (11.0, 90.0)],
    "2": [(3.0, 200.0), (201.0, np.inf)],
    "3": [(0.0, np.inf)],
}


@pytest.mark.parametrize("random", [False, True])
def test_answers_wait_until_their_client_is_back(random):
    away = Dropouts(rate=0.2, duration=6.0) if random else Dropouts(intervals=FIXED)
    settings = {
        "latency": RandomLatency("uniform", {"scale": 3.0}),
        "per_client": 300,
        "dropouts": away,
    }
    bound, rounds = Latencies(**settings).bind(4), Synchronous(**settings).bind(4)
    for replicate in range(2):
        gaps = [3.0 * numbers_of("schedule/latency", 5, replicate, i, 300) for i in range(4)]
        gone = [
            drawn_intervals(5, replicate, i, 0.2, 6.0, 500) if random else FIXED.get(str(i), [])
            for i in range(4)
        ]
        expected = simulate(gaps, [300] * 4, 1_200, gone)
        found = rows_of(bound.activations(5, 0, 1_200, replicates=2), replicate)
        found = [row for row in found if row[1] >= 0]
        assert [row[1:] for row in found] == [row[1:] for row in expected]
        np.testing.assert_allclose(
            [row[0] for row in found], [row[0] for row in expected], rtol=1e-12
        )
        now, over = 0.0, []
        for k in range(300):
            now = max(back_at(gone[i], now + gaps[i][k]) for i in range(4))
            over += [(now, i) for i in range(4)] if now < np.inf else []
        found = [
            row
            for row in rows_of(rounds.activations(5, 0, 1_200, replicates=2), replicate)
            if row[1] >= 0
        ]
        assert [row[1:] for row in found] == [row[1:] for row in over]
        np.testing.assert_allclose([row[0] for row in found], [row[0] for row in over], rtol=1e-12)


# --- windows, replicates, clients


SCHEDULES = {
    "poisson": PoissonClocks(activations=900, rate=[0.1, 1.0, 1.0, 9.0, 0.0]),
    "capped": PoissonClocks(per_client=[1, 100, 200, 300, 299]),
    "lognormal": Latencies(latency=RandomLatency("lognorm", {"s": 1.5}), per_client=180),
    "constant": Latencies(latency=1.0, per_client=180),
    "ties": Latencies(
        latency=TraceLatency(
            [[1.0, 0.0, 0.0], [1.0, 0.0, 0.0, 0.0, 0.0], [1.0], [1.0], [0.0, 0.0, 1.0]]
        ),
        per_client=180,
    ),
    "dropouts": Latencies(
        latency=RandomLatency("uniform", {"scale": 3.0}),
        per_client=180,
        dropouts=Dropouts(rate=0.1, duration=20.0),
    ),
    "left": Latencies(
        latency=RandomLatency("uniform", {"scale": 3.0}),
        per_client=180,
        dropouts=Dropouts(intervals={"4": [(30.0, np.inf)]}),
    ),
    "synchronous": Synchronous(
        latency=RandomLatency("lognorm", {"s": 1.5}),
        per_client=180,
        dropouts=Dropouts(rate=0.1, duration=20.0),
    ),
}


@pytest.mark.parametrize("name", SCHEDULES)
def test_windows_and_replicates_do_not_change_a_run(name):
    settings = SCHEDULES[name]
    assert settings.bind(5).steps == 900
    whole = settings.bind(5).activations(11, 0, 900, replicates=4)
    assert (whole.first, whole.step, len(whole)) == (0, 899, 900)
    assert bool((whole.time.diff(dim=1) >= 0).all())
    assert not torch.equal(whole.time[0], whole.time[1]) or name in ("constant", "ties")
    bound = settings.bind(5)
    for start, stop in (
        (0, 1),
        (1, 300),
        (300, 300),
        (450, 451),
        (10, 20),
        (0, 900),
        (899, 900),
        (37, 612),
    ):
        assert same(bound.activations(11, start, stop, replicates=4), whole.window(start, stop))
    fewer = bound.activations(11, 500, 700, replicates=3)
    assert torch.equal(fewer.time, whole.time[:3, 500:700])
    assert torch.equal(fewer.client, whole.client[:3, 500:700])
    other = bound.activations(12, 0, 900, replicates=4)
    assert not torch.equal(other.time, whole.time) or name in ("constant", "ties")


@pytest.mark.parametrize("name", SCHEDULES)
def test_the_size_of_chunks_and_tables_changes_nothing(monkeypatch, name):
    whole = SCHEDULES[name].bind(5).activations(11, 0, 900, replicates=3)
    for chunk in (3, 64):
        monkeypatch.setattr("fedmtl.schedules.activations._CHUNK", chunk)
        monkeypatch.setattr("fedmtl.schedules.activations._TABLE", chunk)
        bound = SCHEDULES[name].bind(5)
        for start, stop in ((0, 1), (1, 30), (30, 900)):
            assert same(bound.activations(11, start, stop, replicates=3), whole.window(start, stop))


def test_a_client_keeps_its_times_in_another_place_and_company():
    settings = Latencies(latency=RandomLatency("uniform"), per_client=50)
    names = ["ann", "bob", "cy"]
    few = settings.bind(2, names=["cy", "ann"]).activations(0, 0, 100)
    many = settings.bind(3, names=names).activations(0, 0, 150)
    keyed = settings.bind(3, keys=torch.tensor([id_key(name) for name in names])).activations(
        0, 0, 150
    )
    assert same(many, keyed)
    assert torch.equal(few.time[few.client == 1], many.time[many.client == 0])
    assert torch.equal(few.time[few.client == 0], many.time[many.client == 2])


# --- bad input


@pytest.mark.parametrize(
    ("make", "says"),
    [
        (lambda: PoissonClocks(), "needs activations, per_client or both"),
        (lambda: PoissonClocks(per_client=2**31), "whole number in"),
        (lambda: PoissonClocks(per_client=[1, -1]), r"per_client\[1\] is -1"),
        (lambda: PoissonClocks(activations=1, rate=[1.0, float("nan")]), r"rate\[1\] is nan"),
        (
            lambda: PoissonClocks(activations=1, rate=[1.0, 2.0]).bind(3),
            "rate has 2 entries for 3 clients",
        ),
        (
            lambda: PoissonClocks(per_client=[1, 2]).bind(3),
            "per_client has 2 entries for 3 clients",
        ),
        (lambda: PoissonClocks(activations=1, rate=0.0).bind(3), "no client ever acts"),
        (lambda: PoissonClocks(activations=1).bind(0), "clients is 0"),
        (lambda: PoissonClocks(activations=5).bind(2).activations(0, 0, 6), r"within \[0, 5\]"),
        (lambda: PoissonClocks(activations=5).bind(2).activations(0, 3, 2), "activations 3 to 2"),
        (
            lambda: PoissonClocks(activations=5).bind(2).activations(0, 0, 2, replicates=0),
            "replicates is 0",
        ),
        (lambda: Latencies(latency=[1.0, 2.0], activations=5), "latency is"),
        (lambda: Latencies(latency=1.0), "needs activations, per_client or both"),
        (lambda: Latencies(latency=1.0, per_client=[2, 1.5]), r"per_client\[1\] is 1.5"),
        (
            lambda: Latencies(latency=1.0, per_client=[2]).bind(3),
            "per_client has 1 entries for 3",
        ),
        (lambda: Latencies(latency=1.0, activations=5, scale=[1.0]).bind(2), "scale has 1 entries"),
        (
            lambda: Latencies(
                latency=1.0, activations=5, dropouts=Dropouts(intervals={"x": [(0, 1)]})
            ).bind(2),
            "names client 'x'",
        ),
    ],
)
def test_bad_settings_are_refused(make, says):
    with pytest.raises(ConfigError, match=says):
        make()


def test_a_client_that_two_names_stand_for_is_refused():
    with pytest.raises(ConfigError, match="names client '1' twice"):
        Dropouts(intervals={1: [(0.0, 5.0)], "1": [(7.0, 9.0)]})


def test_the_share_of_time_away_is_that_of_an_alternating_process():
    waits = 20_000
    bound = Latencies(
        latency=1.0, per_client=waits, dropouts=Dropouts(rate=0.05, duration=5.0)
    ).bind(1)
    gaps = np.diff(bound.activations(0, 0, waits).time[0].numpy(), prepend=0.0)
    away = gaps > 1.0 + 1e-9
    assert away.mean() == pytest.approx(-np.expm1(-0.05), abs=6 * np.sqrt(0.05 / waits))


@pytest.mark.parametrize(
    ("latency", "law"),
    [
        (RandomLatency("uniform", {"loc": 2.0, "scale": 13.0}), stats.uniform(2.0, 13.0)),
        (RandomLatency("lognorm", {"s": 0.7, "scale": 3.0}), stats.lognorm(0.7, scale=3.0)),
        (RandomLatency("expon", {"scale": 2.5}), stats.expon(scale=2.5)),
    ],
)
def test_latencies_have_their_law_and_scale(latency, law):
    bound = Latencies(latency=latency, per_client=4_000, scale=[1.0, 10.0]).bind(2)
    table = bound.activations(1, 0, bound.steps)
    for client, scale in ((0, 1.0), (1, 10.0)):
        gaps = np.diff(table.time[0][table.client[0] == client].numpy(), prepend=0.0) / scale
        assert len(gaps) == 4_000
        assert stats.kstest(gaps, law.cdf).pvalue > ALPHA
        assert abs(stats.spearmanr(gaps[1:], gaps[:-1]).statistic) < 6 / np.sqrt(4_000)
