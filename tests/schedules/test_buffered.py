"""Buffered answers: beside a slow simulation, in the limits, and what the schedule guarantees."""

import math
from collections import Counter, defaultdict
from itertools import pairwise

import pytest
import torch

from fedmtl.errors import BudgetExhausted, ConfigError
from fedmtl.schedules import Dropouts, Latencies, RandomLatency, TraceLatency
from fedmtl.schedules.buffered import Buffered

LOGNORMAL = RandomLatency("lognorm", {"s": 1.0})
STRAGGLERS = [1.0] * 27 + [10.0] * 3


def slow(latency, n, *, concurrency, buffer, max_staleness, rest, per_client, stop):
    """Simulates moment after moment; ``latency(client, number)`` is that of a question."""
    queue = list(range(n))
    numbers = Counter()
    asked = 0
    uses = defaultdict(list)  # steps in which a client's answer was used
    open_questions = []
    steps = []
    now = 0.0
    members = []
    while len(steps) < stop:
        for client in list(queue):
            version = len(steps)
            rested = not uses[client] or version >= uses[client][-1] + rest
            if len(open_questions) < concurrency and rested and len(uses[client]) < per_client:
                queue.remove(client)
                due = now + latency(client, numbers[client])
                open_questions.append((due, asked, client, version))
                numbers[client] += 1
                asked += 1
        now = min(open_questions)[0]
        for question in sorted(q for q in open_questions if q[0] == now):
            open_questions.remove(question)
            _, _, client, version = question
            queue.append(client)
            if len(steps) - version > max_staleness:
                continue
            members.append((client, version))
            uses[client].append(len(steps))
            if len(members) == buffer:
                steps.append((now, sorted(members)))
                members = []
    return steps[:stop]


def listed(steps):
    return [
        (step.time, list(zip(step.clients.tolist(), step.versions.tolist(), strict=True)))
        for step in steps
    ]


@pytest.mark.parametrize(
    ("concurrency", "buffer", "max_staleness", "rest", "per_client"),
    [
        (12, 4, 20, 1, None),
        (30, 1, 3, 1, None),
        (20, 5, 1, 4, 12),
        (7, 7, 0, 2, None),
        (9, 5, 20, 5, None),
    ],
)
def test_the_steps_are_those_of_a_slow_simulation(
    concurrency, buffer, max_staleness, rest, per_client
):
    settings = Buffered(
        latency=LOGNORMAL,
        concurrency=concurrency,
        buffer=buffer,
        max_staleness=max_staleness,
        rest=rest,
        per_client=per_client,
        scale=STRAGGLERS,
    )
    # the gaps between the activations of a client that never waits
    alone = Latencies(latency=LOGNORMAL, per_client=200, scale=STRAGGLERS).bind(30)
    gaps, _ = alone.draws(5)

    def latency(client, number):
        return float(gaps(torch.tensor([client]).numpy(), torch.tensor([[number]]).numpy())[0, 0])

    expected = slow(
        latency,
        30,
        concurrency=concurrency,
        buffer=buffer,
        max_staleness=max_staleness,
        rest=rest,
        per_client=per_client or math.inf,
        stop=40,
    )
    assert listed(settings.bind(30, seed=5).steps(40)) == expected


def test_equal_latencies_and_a_buffer_of_all_clients_are_full_rounds():
    schedule = Buffered(latency=2.0, concurrency=6, buffer=6).bind(6)
    for step in schedule.steps(5):
        assert step.time == 2.0 * (step.step + 1)
        assert step.clients.tolist() == list(range(6))
        assert (step.step - step.versions).tolist() == [0] * 6


def test_without_latency_clients_take_turns():
    schedule = Buffered(latency=0.0, concurrency=3, buffer=3).bind(7)
    for step in schedule.steps(9):
        turns = (3 * step.step + torch.arange(3)) % 7
        assert step.clients.tolist() == turns.sort().values.tolist()
        assert step.time == 0.0
        assert (step.step - step.versions).tolist() == [0] * 3


def test_what_the_schedule_guarantees():
    settings = Buffered(
        latency=LOGNORMAL,
        concurrency=20,
        buffer=3,
        max_staleness=5,
        rest=4,
        per_client=15,
        scale=STRAGGLERS,
        dropouts=Dropouts(rate=0.1, duration=3.0),
    )
    schedule = settings.bind(30, seed=1)
    uses = defaultdict(list)
    for step in schedule.steps(100):
        assert len(set(step.clients.tolist())) == 3
        assert (
            0
            <= int((step.step - step.versions).min())
            <= int((step.step - step.versions).max())
            <= 5
        )
        for client in step.clients.tolist():
            uses[client].append(step.step)
    assert max(map(len, uses.values())) <= 15
    gaps = [after - before for own in uses.values() for before, after in pairwise(own)]
    assert min(gaps) >= schedule.separation == 4


def test_a_longer_run_begins_with_the_shorter_one():
    settings = Buffered(latency=LOGNORMAL, concurrency=9, buffer=2)
    whole = listed(settings.bind(20, seed=3).steps(30))
    assert whole[:11] == listed(settings.bind(20, seed=3).steps(11))
    assert whole != listed(settings.bind(20, seed=4).steps(30))
    # any step can be asked for first
    later = settings.bind(20, seed=3)
    assert listed([later.answers(29), later.answers(7)]) == [whole[29], whole[7]]


@pytest.mark.parametrize("latency", [1.0, LOGNORMAL])
def test_versions_that_later_steps_use_are_kept(latency):
    """With equal latencies more answers arrive at once than a step takes."""
    steps = list(Buffered(latency=latency, concurrency=8, buffer=3).bind(12, seed=2).steps(30))
    late = 0
    for step in steps[:10]:
        later = torch.cat([other.versions for other in steps[step.step + 1 :]])
        needed = set(later[later <= step.step].tolist())
        late += len(needed)
        assert step.kept == needed
    assert late > 5


def test_weights_are_public_and_at_most_one():
    staleness = torch.tensor([0, 1, 3, 20])
    weights = Buffered(latency=1.0).weights(staleness)
    assert weights.tolist() == pytest.approx([1.0, 1 / math.sqrt(2), 0.5, 1 / math.sqrt(21)])
    assert Buffered(latency=1.0, staleness="none").weights(staleness).tolist() == [1.0] * 4


def test_the_run_ends_once_the_caps_are_reached():
    schedule = Buffered(latency=1.0, concurrency=2, buffer=2, per_client=2).bind(4)
    assert len(list(schedule.steps(4))) == 4
    with pytest.raises(BudgetExhausted, match="Step 4 needs 2 answers"):
        list(schedule.steps(5))


def test_clients_that_never_return_hold_their_places():
    away = Dropouts(intervals={"0": [(0.5, math.inf)], "1": [(0.5, math.inf)]})
    trace = TraceLatency([[1.0]] * 4)
    schedule = Buffered(latency=trace, concurrency=3, buffer=1, dropouts=away).bind(4)
    assert [step.clients.tolist() for step in schedule.steps(4)] == [[2], [3], [2], [3]]
    stuck = Buffered(latency=trace, concurrency=2, buffer=1, dropouts=away).bind(4)
    with pytest.raises(BudgetExhausted, match="away for good"):
        list(stuck.steps(1))


@pytest.mark.parametrize(
    ("settings", "clients", "message"),
    [
        ({"buffer": 11, "concurrency": 10}, 20, "at most concurrency, 10"),
        ({"concurrency": 21}, 20, "at most the number of clients, 20"),
        ({"concurrency": 10, "rest": 3}, 20, "at most 2"),
        ({"buffer": 0}, 200, "buffer"),
        ({"max_staleness": -1}, 200, "max_staleness"),
        ({"rest": 0}, 200, "rest"),
        ({"per_client": 0}, 200, "per_client"),
        ({"latency": math.nan}, 200, "latency"),
        ({"latency": -1.0}, 200, "latency"),
        ({"staleness": "linear"}, 200, "staleness"),
        ({"scale": math.nan}, 200, "scale"),
    ],
)
def test_settings_that_do_not_fit_are_refused(settings, clients, message):
    with pytest.raises(ConfigError, match=message):
        Buffered(**{"latency": 1.0, **settings}).bind(clients)
