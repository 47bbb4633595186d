"""A server that waits for no node: the steps of the simulation, the charges, and replies that do not count."""

import math
from collections import Counter
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from dp_accounting import dp_event
from dp_accounting.pld import PLDAccountant

from fedmtl import PMTL, Buffered, Ditto, Finetune, LocalSGD, Trainer, models
from fedmtl._files import claimed
from fedmtl.audit.verification import verify
from fedmtl.errors import BudgetExhausted, TrainingError
from fedmtl.privacy import ClientPrivacy, RecordPrivacy
from fedmtl.schedules import Latencies, RandomLatency
from fedmtl.trainer.callbacks import Callback
from fedmtl.trainer.result import Result

pytest.importorskip("flwr", reason="the extra flower is not installed")

from flwr.app import ConfigRecord, RecordDict

from fedmtl.flower.messages import FINISH, NAME, ROUND, facts_of
from fedmtl.flower.node import Node
from fedmtl.flower.server import serve
from tests.algorithms.test_client_half import trainer_of
from tests.flower.grid import Clock, LocalGrid, SlowGrid
from tests.flower.test_account import answers, changed, own_report
from tests.flower.test_apps import apart, killed, own_models, public_state, run, same
from tests.small import Ended, Ends
from tests.trainer.ledgers import participations, read_lines

N = 6
NOISE = ClientPrivacy(clip_norm=0.5, noise_multiplier=2.0, delta=1e-5)
RECORDS = RecordPrivacy(clip_norm=1.0, noise_multiplier=2.0, delta=1e-3)
WHOLE = LocalSGD(lr=0.1, epochs=2, batch_size=100)  # all records of a client, so no batch is drawn
BRIEF = PMTL(lam=0.5, local=LocalSGD(lr=0.2, steps=2, batch_size=4))
LOGNORMAL = RandomLatency("lognorm", {"s": 1.2})
LATE = Buffered(latency=LOGNORMAL, concurrency=4, buffer=2, max_staleness=2, per_client=12)
EVERYONE = Buffered(latency=1.0, concurrency=N, buffer=N)


def settings(name: str = "fedavg", **changes) -> Trainer:
    defaults: dict[str, Any] = {"schedule": LATE, "privacy": NOISE, "rounds": 8, "dtype": "float64"}
    defaults["model"] = models.softmax_regression()  # nodes make it anew in every message
    return replace(trainer_of(name), **defaults | changes)


class Watch(Callback):
    """The clients of every step, with the version at which each was asked."""

    def __init__(self) -> None:
        self.steps: list[dict[int, int]] = []

    def on_block(self, block, state) -> None:
        versions = block.starts.versions.tolist()
        self.steps.append(dict(sorted(zip(block.cohort.tolist(), versions, strict=True))))


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    """Virtual time in place of the server's."""
    virtual = Clock()
    monkeypatch.setattr("fedmtl.flower.nodes.time.sleep", virtual.sleep)
    monkeypatch.setattr("fedmtl.flower.nodes.time.monotonic", lambda: virtual.now)
    return virtual


def slow(trainer: Trainer, folder: Path, clock: Clock, latency, **options):
    """The settings over a population, and a grid whose nodes have latencies."""
    server, grid = apart(trainer, folder)
    return server, SlowGrid(grid.app, trainer.data.ids, clock, latency, **options)


def finished(server: Trainer, grid: LocalGrid, patience: float = 50.0) -> Result:
    return serve(server, grid, patience=patience, gather=0)


def asked(grid: LocalGrid) -> Counter[str]:
    return Counter(client for kind, client, _ in grid.sent if kind == ROUND)


# Beside the simulation


@pytest.mark.parametrize(
    ("name", "schedule"),
    [
        ("pmtl", EVERYONE),
        ("ifca", replace(EVERYONE, latency=0.0, buffer=3, concurrency=3)),
    ],
)
def test_equal_latencies_give_the_bits_of_the_simulation(name, schedule, tmp_path: Path) -> None:
    cap = math.ceil(3 * schedule.buffer / N)
    trainer = settings(name, schedule=replace(schedule, per_client=cap), rounds=3)
    expected = replace(trainer, folder=tmp_path / "one").fit()
    server, grid = apart(trainer, tmp_path)
    found = run(server, grid)
    same(public_state(tmp_path / "one"), public_state(tmp_path / "server"))
    for client in expected.ids:
        same(expected.model_for(client).state_dict(), own_models(tmp_path, client))
    assert found.epsilon == expected.epsilon
    assert any("when nodes answer, which decides" in text for text in found.privacy.outside)
    assert verify(tmp_path / "server").fits


def test_nodes_that_protect_their_records_give_the_numbers_of_the_simulation(
    tmp_path: Path,
) -> None:
    trainer = settings(algorithm=BRIEF, schedule=EVERYONE, rounds=2, privacy=RECORDS)
    expected = replace(trainer, folder=tmp_path / "one").fit()
    server, grid = apart(trainer, tmp_path)
    run(server, grid)
    same(public_state(tmp_path / "one"), public_state(tmp_path / "server"), 1e-10)
    for client in expected.ids:
        same(expected.model_for(client).state_dict(), own_models(tmp_path, client), 1e-10)
        assert verify(tmp_path / "nodes" / client).fits


@pytest.mark.parametrize(
    ("algorithm", "rest", "privacy", "within"),
    [
        (PMTL(lam=0.5, local=WHOLE), 1, None, 1e-12),
        # a node clips to the grid of sums before its answer is weighted
        (Ditto(lam=0.5, local=WHOLE), 2, NOISE, 2e-6),
    ],
)
def test_late_answers_are_those_of_the_simulation(
    algorithm, rest: int, privacy, within: float, tmp_path: Path, clock: Clock
) -> None:
    """The same clients in the same steps, from the same versions and with the same weights; a dropped answer leaves
    no trace."""
    scale = [1.0, 1.0, 1.0, 1.0, 2.0, 6.0]
    schedule = replace(LATE, scale=scale, rest=rest, max_staleness=1)
    trainer = settings(algorithm=algorithm, schedule=schedule, privacy=privacy, rounds=12)
    data = trainer.data
    simulated, real = Watch(), Watch()
    expected = replace(trainer, folder=tmp_path / "one", callbacks=(simulated,)).fit()
    alone = Latencies(latency=LOGNORMAL, per_client=200, scale=scale)
    gaps, _ = alone.bind(N, names=data.ids, keys=data.keys).draws(trainer.seed)

    def latency(client: str, number: int) -> float:
        return float(gaps(np.array([data.ids.index(client)]), np.array([[number]]))[0, 0])

    server, grid = slow(trainer, tmp_path, clock, latency)
    found = finished(replace(server, callbacks=(real,)), grid, patience=1000)
    assert real.steps == simulated.steps
    ages = [step - version for step, own in enumerate(real.steps) for version in own.values()]
    assert set(ages) == {0, 1}
    assert (
        asked(grid).total() - len(ages) > 4
    )  # some were dropped beside those that came after the end
    same(public_state(tmp_path / "one"), public_state(tmp_path / "server"), within)
    for client in expected.ids:
        same(expected.model_for(client).state_dict(), own_models(tmp_path, client), within)
    assert found.epsilon == expected.epsilon
    assert verify(tmp_path / "server").fits


# What is charged


def steps_charged(folder: Path) -> list[tuple[int, int]]:
    lines = read_lines(folder / "server" / "private" / "ledger.jsonl")
    return [(line["first"], line["end"]) for line in lines if line["kind"] == "charge"]


def straggler(client: str, number: int) -> float:
    """A latency of one second, and one of 3.5 of the first client."""
    return 3.5 if client == "client-0" else 1.0


def test_a_server_charges_the_answers_that_it_uses(tmp_path: Path, clock: Clock) -> None:
    watch = Watch()
    trainer = settings(schedule=replace(LATE, max_staleness=1, per_client=None))
    server, grid = slow(trainer, tmp_path, clock, straggler)
    finished(replace(server, callbacks=(watch,)), grid)
    used = Counter(client for step in watch.steps for client in step)
    ledger = tmp_path / "server" / "private" / "ledger.jsonl"
    assert participations(ledger) == used
    assert used[0] < asked(grid)["client-0"]
    header = read_lines(ledger)[0]
    # who answers is not known before: the noise is made for an answer in every step
    assert header["kinds"][0]["cap"] == 8
    assert header["schedule"]["latency"] == "measured"
    assert header["replays_free"] is False
    assert verify(tmp_path / "server").fits


def test_a_node_charges_every_answer_that_it_sends(tmp_path: Path, clock: Clock) -> None:
    """Also one that comes too late, and one after the end: its server has seen it."""
    watch = Watch()
    privacy = replace(RECORDS, source="secure", epsilon=6.0, noise_multiplier=None)
    late = replace(LATE, max_staleness=1)
    trainer = settings(algorithm=BRIEF, schedule=late, privacy=privacy, rounds=6)
    server, grid = slow(trainer, tmp_path, clock, straggler)
    result = finished(replace(server, callbacks=(watch,)), grid)
    used = Counter(trainer.data.ids[client] for step in watch.steps for client in step)
    sent = asked(grid)
    assert sent["client-0"] > used["client-0"]
    assert sent.total() > used.total() == 12
    for client in trainer.data.ids:
        folder = tmp_path / "nodes" / client
        assert len(answers(folder)) == sent[client]
        assert verify(folder).fits
    epsilons = [own_report(tmp_path, client)["epsilon"] for client in trainer.data.ids]
    assert max(epsilons) <= 6.0
    assert result.epsilon == math.inf  # no account in the folder of the server


def test_a_node_that_is_asked_more_often_than_its_budget_refuses(tmp_path: Path) -> None:
    """Whether its answers were used or not, and whatever the server says of them."""
    schedule = replace(LATE, per_client=3)
    trainer = settings(
        algorithm=BRIEF, schedule=schedule, privacy=replace(RECORDS, source="secure")
    )
    server, grid = apart(trainer, tmp_path / "run")
    run(server, grid)
    question = next(
        content for kind, client, content in grid.sent if (kind, client) == (ROUND, "client-0")
    )
    node = Node(server, "client-0", lambda: trainer.data.subset(["client-0"]), tmp_path / "node")
    for version, counted in ((1, 0), (4, 2), (6, 2)):  # the second one was dropped
        node.train(changed(question, round=version, counted=counted), RecordDict())
    with pytest.raises(BudgetExhausted, match="the 3 answers that its privacy pays for"):
        node.train(changed(question, round=7, counted=7), RecordDict())
    assert answers(tmp_path / "node" / "client-0") == [1, 4, 6]


def test_without_a_cap_a_node_answers_once_a_step_at_most(tmp_path: Path) -> None:
    trainer = settings(
        algorithm=BRIEF, schedule=replace(LATE, per_client=None), privacy=RECORDS, rounds=3
    )
    server, _ = apart(trainer, tmp_path)
    node = Node(server, "client-0", lambda: trainer.data.subset(["client-0"]), tmp_path / "node")
    with node.account.answer(0, "a question") as (channel, _):
        assert int(channel.caps[0]) == 3


@dataclass(frozen=True)
class Told(Finetune):
    """Finetuning that keeps the noise that it is told of."""

    noise: float = 0.0

    def resolved(self, noise: float) -> "Told":
        return replace(self, noise=noise)


def test_a_node_finetunes_by_the_noise_of_real_clients(tmp_path: Path) -> None:
    """Nobody knows their answers before, so the noise of four answers in eight steps is made, also if simulated clients
    give fewer."""
    privacy = ClientPrivacy(clip_norm=0.5, epsilon=4.0, delta=1e-5)
    rare = replace(LATE, latency=1.0, rest=2, per_client=None)
    trainer = settings(schedule=rare, privacy=privacy, finetune=Told())
    assert int(trainer.bound_schedule.uses(8).max()) == 3
    server, _ = apart(trainer, tmp_path)
    node = Node(server, "client-0", lambda: trainer.data.subset(["client-0"]), tmp_path / "node")
    # the noise on a mean of two rows of norm 1
    multiplier = 2 * node.trainer.finetune.noise / math.sqrt(node.problem.dimension)
    accountant = PLDAccountant()
    accountant.compose(dp_event.GaussianDpEvent(multiplier), 4)
    assert accountant.get_epsilon(1e-5) == pytest.approx(4.0, rel=1e-3)


def test_clients_at_their_cap_are_not_asked_again(tmp_path: Path, clock: Clock, log) -> None:
    """Under record privacy answers that were dropped are among those of the cap."""
    schedule = replace(LATE, max_staleness=0, per_client=2)
    for privacy in (NOISE, RECORDS):
        folder = tmp_path / type(privacy).__name__
        trainer = settings(algorithm=BRIEF, schedule=schedule, privacy=privacy, rounds=30)
        server, grid = slow(trainer, folder, clock, lambda client, _: 1.0 + (client == "client-0"))
        result = finished(server, grid)
        assert result.stopped == "budget"
        if privacy is RECORDS:
            assert max(asked(grid).values()) == 2
            assert "has given the 2 answers" not in log.text
        else:
            assert asked(grid)["client-0"] > 2


def test_under_record_privacy_a_question_without_an_answer_counts(
    tmp_path: Path, clock: Clock
) -> None:
    """Its client may have been charged for the answer. The run ends with a result and not by a client that is asked
    for ever; and a server that was killed goes on with its counts."""
    schedule = replace(LATE, per_client=3)
    server, grid = slow(
        settings(algorithm=BRIEF, schedule=schedule, privacy=RECORDS, rounds=30),
        tmp_path,
        clock,
        straggler,
    )
    grid.lost = lambda kind, client, number: kind == ROUND and client == "client-1"
    with pytest.raises(Ended):
        finished(replace(server, callbacks=(Ends(4),)), grid, patience=2.0)
    before = asked(grid)["client-1"]
    assert before >= 2
    result = finished(server, grid, patience=2.0)
    assert result.stopped == "budget"
    assert asked(grid)["client-1"] in (3, 4)  # one more if a question was open
    assert max(asked(grid).values()) <= 4


# Nodes that sleep


def test_nobody_waits_for_a_node_that_sleeps(tmp_path: Path, clock: Clock) -> None:
    """Its answer counts when it comes, with the weight of its age."""
    watch = Watch()
    schedule = Buffered(latency=1.0, concurrency=3, buffer=1, max_staleness=20)
    trainer = settings(schedule=schedule, rounds=9)
    server, grid = slow(
        trainer, tmp_path, clock, lambda client, _: 4.5 if client == "client-1" else 1.0
    )
    grid.nodes = dict(list(grid.nodes.items())[:3])  # the others never come
    finished(replace(server, callbacks=(watch,)), grid)
    assert clock.now < 6
    (late,) = [step for step, own in enumerate(watch.steps) if 1 in own]
    assert watch.steps[late] == {1: 0}
    assert late == 8


def test_a_node_that_never_answers_costs_its_place_for_a_time(
    tmp_path: Path, clock: Clock, log
) -> None:
    schedule = Buffered(latency=1.0, concurrency=2, buffer=1)
    trainer = settings(schedule=schedule, rounds=8)
    server, grid = slow(trainer, tmp_path, clock, lambda *_: 1.0)
    grid.nodes = dict(list(grid.nodes.items())[:3])
    grid.away = lambda kind, client, number: kind == ROUND and client == "client-0"
    finished(server, grid, patience=3.0)
    assert "client 'client-0' is left out of the sum: no answer in time" in log.text
    used = participations(tmp_path / "server" / "private" / "ledger.jsonl")
    assert 0 not in used
    assert sum(used.values()) == 8
    assert 2 <= asked(grid)["client-0"] <= 3  # once in three seconds
    assert verify(tmp_path / "server").fits


@pytest.mark.parametrize("there", [0, 2])
def test_a_run_without_enough_answers_ends_before_it_is_charged(
    there: int, tmp_path: Path, clock: Clock
) -> None:
    schedule = Buffered(latency=1.0, concurrency=4, buffer=3)
    server, grid = slow(settings(schedule=schedule), tmp_path, clock, lambda *_: 1.0)
    grid.away = lambda kind, client, number: kind == ROUND and int(client[-1]) >= there
    with pytest.raises(
        TrainingError, match="Round 1 needs 3 answers, and no client is left to be asked"
    ):
        finished(server, grid, patience=5.0)
    assert steps_charged(tmp_path) == []
    assert max(asked(grid).values()) == 1


# Replies that do not count


def with_facts(content: RecordDict, **facts) -> RecordDict:
    return RecordDict({**content, "facts": ConfigRecord(facts_of(content) | facts)})


@pytest.mark.parametrize(
    ("facts", "text"),
    [
        ({"round": 0}, "its answer is not to round 2, for which it was asked"),
        ({"round": 5}, "its answer is not to round 2, for which it was asked"),
        ({"run": "0" * 16}, "its answer is to another run"),
    ],
)
def test_replies_to_other_questions_do_not_count(facts, text: str, tmp_path: Path, log) -> None:
    def wrong(kind: str, client: str, number: int, content: RecordDict) -> RecordDict:
        if (kind, client) == (ROUND, "client-2") and facts_of(content)["round"] == 1:
            return with_facts(content, **facts)
        return content

    watch = Watch()
    quick = replace(EVERYONE, latency=0.0, buffer=4, concurrency=4)
    server, grid = apart(settings(schedule=quick, rounds=4), tmp_path, broken=wrong)
    run(replace(server, callbacks=(watch,)), grid)
    assert f"client 'client-2' is left out of the sum: {text}" in log.text
    assert 2 not in watch.steps[1]
    assert sum(2 in step for step in watch.steps) == asked(grid)["client-2"] - 1


def test_an_answer_that_comes_again_counts_once(tmp_path: Path) -> None:
    """The row of a reply that is delivered twice, or again in the next round, is in one sum."""
    trainer = settings(schedule=replace(EVERYONE, buffer=3), rounds=4)
    server, grid = apart(trainer, tmp_path / "one")
    run(server, grid)
    again, twice = apart(trainer, tmp_path / "two")
    kept = []

    def pull(numbers):
        found = LocalGrid.pull_messages(twice, numbers)
        kept.extend(found)
        return [*kept, *found]

    twice.pull_messages = pull
    run(again, twice)
    assert kept
    same(public_state(tmp_path / "one/server"), public_state(tmp_path / "two/server"))


# A server that was killed


def test_a_server_that_was_killed_goes_on_with_the_same_numbers(tmp_path: Path) -> None:
    """Nodes repeat the answers that it has lost, and are not charged for them again."""
    trainer = settings(algorithm=BRIEF, schedule=EVERYONE, rounds=2, privacy=RECORDS)
    server, grid = apart(trainer, tmp_path / "whole")
    run(server, grid)
    server, grid = apart(trainer, tmp_path / "cut")
    for kind, number in ((ROUND, 8), (FINISH, 2)):
        with pytest.raises(Ended):
            run(server, LocalGrid(grid.app, trainer.data.ids, **killed(kind, number, after=True)))
    run(server, grid)
    same(public_state(tmp_path / "whole/server"), public_state(tmp_path / "cut/server"))
    for client in trainer.data.ids:
        assert answers(tmp_path / "cut/nodes" / client) == [0, 1]
        assert verify(tmp_path / "cut/nodes" / client).fits


@pytest.mark.parametrize("source", ["seeded", "secure"])
def test_a_step_that_was_lost_stays_charged(source: str, tmp_path: Path, clock: Clock) -> None:
    """Its second time has other answers, so it is another release, also under seeded noise; and who has a rest keeps
    it."""
    privacy = ClientPrivacy(clip_norm=0.5, noise_multiplier=2.0, delta=1e-5, source=source)
    trainer = settings(schedule=replace(LATE, rest=3, per_client=5), privacy=privacy)
    server, grid = slow(trainer, tmp_path, clock, straggler)
    with pytest.raises(Ended):
        finished(replace(server, callbacks=(Ends(4),)), grid)
    grid.latency = lambda client, _: 3.5 if client == "client-3" else 1.0
    finished(server, grid)
    charged = steps_charged(tmp_path)
    assert [first for first, _ in charged] == [0, 1, 2, 3, 4, 4, 5, 6, 7]
    lines = read_lines(tmp_path / "server" / "private" / "ledger.jsonl")
    uses = Counter(one for line in lines for cohort in line.get("cohorts", []) for one in cohort)
    assert uses.total() == 2 * 9
    assert verify(tmp_path / "server").fits


def test_a_step_that_was_lost_counts_for_the_cap(tmp_path: Path) -> None:
    """Nobody is asked for an answer that could not be charged."""
    server, grid = apart(settings(schedule=replace(EVERYONE, per_client=2), rounds=3), tmp_path)
    with pytest.raises(Ended):
        run(replace(server, callbacks=(Ends(1),)), grid)
    assert run(server, grid).stopped == "budget"
    assert asked(grid).total() == 2 * N
    assert steps_charged(tmp_path) == [(0, 1), (1, 2)]


def test_a_node_answers_one_message_at_a_time(tmp_path: Path, monkeypatch) -> None:
    """Flower may start a process for the end of the run while another one computes a late answer; a node says its name
    at any time."""
    server, grid = apart(settings(schedule=EVERYONE, rounds=1, privacy=None), tmp_path)
    waited = []
    with ExitStack() as other:

        def done(seconds: float) -> None:
            waited.append(dict(grid.counts))
            other.close()

        monkeypatch.setattr("fedmtl.flower.last_answer.time.sleep", done)
        other.enter_context(claimed(tmp_path / "nodes" / "client-0"))
        run(server, grid)
    assert len(waited) == 1
    assert (NAME, "client-5") in waited[0]
    assert (FINISH, "client-0") not in waited[0]
