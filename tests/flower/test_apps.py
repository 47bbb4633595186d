"""Flower apps on a grid of one process: the numbers of ``Trainer.fit``, whatever does not answer as it should."""

import itertools
import json
import math
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from fedmtl import (
    MPMTL,
    PMTL,
    FullParticipation,
    Interval,
    PeerToPeer,
    PoissonClocks,
    Trainer,
)
from fedmtl.algorithms import Released, RoundAlgorithm
from fedmtl.algorithms.local_fit import LocalFit
from fedmtl.audit.verification import verify
from fedmtl.data import FederatedDataset
from fedmtl.errors import ConfigError, DataError, TrainingError
from fedmtl.graphs import Ring
from fedmtl.privacy import ClientPrivacy, QuantileClip, RecordPrivacy
from fedmtl.schedules import rounds
from fedmtl.trainer.callbacks import Callback
from fedmtl.trainer.result import Result
from fedmtl.trainer.run_channel import open_run
from fedmtl.trainer.tensor_files import read_parts, read_tensors, write_parts
from tests.algorithms.test_client_half import CLIENTS, NAMES, ROUNDS, _Client, trainer_of

pytest.importorskip("flwr", reason="the extra flower is not installed")

from flwr.app import Array, ArrayRecord, ConfigRecord, Context, RecordDict

from fedmtl.flower import client_app, population, server_app
from fedmtl.flower.client import name_of
from fedmtl.flower.last_answer import folder_name
from fedmtl.flower.messages import FINISH, NAME, RECEIVE, ROUND, checked_rows, facts_of, tensors_of
from fedmtl.flower.node import Node
from fedmtl.flower.server import serve
from tests.flower.grid import LocalGrid
from tests.small import Ended

KEEPING = (  # that differ in what server and clients keep from round to round
    *(
        "fedavg",
        "pmtl",
        "pmtl, running mean",
        "ditto",
        "fedrep",
        "apfl",
        "scaffold",
        "ifca",
        "mp_mtl_layers",
    ),
    *("prior_layers", "mp_mtl", "private_prior"),
)


def within(name: str) -> float:
    """Sums of outer products depend on the order of the rows; of vectors the numbers are the same to the last bit."""
    return 1e-13 if name.startswith("mp_mtl") else 0.0


def apart(trainer: Trainer, folder: Path, **options):
    """The same settings over a population, and the grid of its nodes, which have the records."""
    data = trainer.data
    public = {
        "classes": data.spec.classes,
        "targets": data.spec.targets,
        "public": data.public,
        "domain": data.domain,
    }
    server = replace(
        trainer, data=population(data.ids, data.spec.shape, **public), folder=folder / "server"
    )
    app = client_app(server, lambda name, config: data.subset([name]), folder=folder / "nodes")
    return server, LocalGrid(app, data.ids, **options)


def run(server: Trainer, grid: LocalGrid) -> Result:
    return serve(server, grid, patience=0.01, gather=0)


def beside_trainer(
    trainer: Trainer, folder: Path, within: float = 0.0
) -> tuple[Result, Result, LocalGrid]:
    """Run the settings in one process and over a grid, and check that both end in the same public state.

    Returns:
        The results of both, and the grid.
    """
    expected = replace(trainer, folder=folder / "one").fit()
    server, grid = apart(trainer, folder)
    found = run(server, grid)
    same(public_state(folder / "one"), public_state(folder / "server"), within)
    return expected, found, grid


def public_state(folder: Path) -> dict[str, torch.Tensor]:
    tensors, _ = read_tensors(folder / "private" / "checkpoint.safetensors")
    return {name: value for name, value in tensors.items() if name.startswith("public.")}


def own_models(folder: Path, client: str) -> dict[str, torch.Tensor]:
    (path,) = (folder / "nodes" / client).rglob("model.safetensors")
    return load_file(path)


def same(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor], within: float = 0.0) -> None:
    assert one.keys() == other.keys()
    for name, value in one.items():
        torch.testing.assert_close(other[name], value, rtol=within, atol=within)


@cache
def expected_of(name: str) -> tuple[Result, dict[str, torch.Tensor]]:
    """What ``Trainer.fit`` gives in one process: its result, and the last public state."""
    seen = {}

    class Watch(Callback):
        def on_block(self, block, state) -> None:
            seen.update({f"public.{key}": value.clone() for key, value in state.public.items()})

    return replace(trainer_of(name), callbacks=(Watch(),)).fit(), seen


def check(name: str, folder: Path) -> None:
    """Compare server and nodes with the trainer in one process."""
    expected, public = expected_of(name)
    same(public, public_state(folder / "server"), within(name))
    for client in expected.ids:
        model = expected.model_for(client)
        same(
            (model.model if expected.bounds.records else model).state_dict(),
            own_models(folder, client),
            within(name),
        )
    assert verify(folder / "server").fits


@pytest.mark.parametrize("name", NAMES)
def test_nodes_give_the_numbers_of_the_trainer(name: str, tmp_path: Path) -> None:
    server, grid = apart(trainer_of(name), tmp_path)
    found, (expected, _) = run(server, grid), expected_of(name)
    check(name, tmp_path)
    for client, score in expected.personal_accuracy.items():
        (scores,) = (tmp_path / "nodes" / client).rglob("scores.json")
        assert json.loads(scores.read_text())[expected.metric] == pytest.approx(score, rel=1e-6)
    assert (found.epsilon, found.by_client[found.metric]) == (expected.epsilon, {})


def fails(kind: str, client: str, number: int) -> bool:
    """About a third of the rounds of each client: the first one of some, the second or the third one of others."""
    return kind == ROUND and (int(client.split("-")[1]) + number) % 3 == 1


@cache
def expected_under_failures(name: str):
    """Public state and own models when rows that fail are zeros and nobody else notices: a slow loop of its own, one
    client at a time, over the trainer's channel."""
    trainer = trainer_of(name)
    problem = trainer.problem()
    trainer = trainer.resolved(problem)
    algorithm, bound = trainer.algorithm, trainer.algorithm.row_bound(problem)
    if bound is not None:
        problem = replace(problem, data=problem.data.bounded(bound))
    channel = open_run(trainer, problem)
    public, ids = algorithm.init(problem).public, problem.data.ids
    clients = [_Client(algorithm, problem, place, channel) for place in range(len(ids))]
    asked, failed = dict.fromkeys(ids, 0), 0
    channel.start(0)
    for block in rounds(channel.draw, start=0, stop=problem.rounds):
        channel.begin(block.first, block.clients)
        rows, there = [], []
        for client in block.cohort.tolist():
            if fails(ROUND, ids[client], asked[ids[client]]):
                rows.append({plan.name: torch.zeros(1, plan.dimension) for plan in channel.plans})
                failed += 1
            else:
                rows.append(clients[client].send(public, block.first))
                there.append(client)
            asked[ids[client]] += 1
        stacked = {plan.name: torch.cat([one[plan.name] for one in rows]) for plan in channel.plans}
        values = {key: channel.release(key, value, block.cohort) for key, value in stacked.items()}
        public = algorithm.server_update(
            problem,
            public,
            Released(
                values, channel.denominator, {name: channel.noise_std(name) for name in values}
            ),
        )
        for client in there:
            clients[client].receive(public, block.first)
    assert failed >= 2
    return public, {client: one.model(public) for client, one in zip(ids, clients, strict=True)}


def broken(kind: str, client: str, number: int, content: RecordDict) -> RecordDict:
    """Make no rows of some replies of those that fail, and rows that are not finite of others."""
    if not fails(kind, client, number):
        return content
    rows = {
        name: Array(np.full_like(array.numpy(), np.nan))
        for name, array in content.array_records["rows"].items()
    }
    return RecordDict({**content, "rows": ArrayRecord(rows)} if number % 2 else {})


@pytest.mark.parametrize("name", KEEPING)
def test_replies_that_are_lost_or_broken_count_as_zeros_and_leave_no_trace(
    name: str, tmp_path: Path
) -> None:
    """Some messages never arrive, some replies are lost when the client has trained, some are no rows."""

    def lost(kind: str, client: str, number: int) -> bool:
        return fails(kind, client, number) and (3 * int(client.split("-")[1]) + number) % 4 == 3

    public, own = expected_under_failures(name)
    server, grid = apart(trainer_of(name), tmp_path, broken=broken, lost=lost)
    grid.away = lambda *message: lost(*message) and message[1] > "client-3"
    run(server, grid)
    same(
        {f"public.{key}": value for key, value in public.items()},
        public_state(tmp_path / "server"),
        within(name),
    )
    names = [key for key, _ in server.problem().module.named_parameters()]
    for client, row in own.items():
        model = own_models(tmp_path, client)
        same(
            {client: torch.cat([model[key].flatten() for key in names])},
            {client: row},
            within(name),
        )
    assert verify(tmp_path / "server").fits


def killed(kind: str, number: int, *, after: bool) -> dict[str, Callable[[str, str, int], bool]]:
    """The options of a grid whose server dies at a message of a kind: before it is sent, or when its reply is on the
    way."""
    count = itertools.count()

    def dies(message: str, client: str, _: int) -> bool:
        if message == kind and next(count) == number:
            raise Ended
        return False

    return {"lost" if after else "away": dies}


@pytest.mark.parametrize("name", KEEPING)
def test_a_server_that_was_killed_goes_on_with_the_same_numbers(name: str, tmp_path: Path) -> None:
    receives = type(trainer_of(name).algorithm).receive is not RoundAlgorithm.receive
    kind, number = (RECEIVE, 3) if receives else (ROUND, 5)
    server, grid = apart(trainer_of(name), tmp_path)
    names = trainer_of(name).data.ids
    with pytest.raises(Ended):
        run(server, LocalGrid(grid.app, names, **killed(kind, number, after=len(name) % 2 == 0)))
    with pytest.raises(Ended):
        run(server, LocalGrid(grid.app, names, **killed(FINISH, 2, after=True)))
    run(server, grid)
    check(name, tmp_path)


# Privacy


def small(**settings) -> Trainer:
    """Two rounds of PMTL of everybody."""
    return replace(trainer_of("pmtl"), **{"schedule": FullParticipation(), "rounds": 2} | settings)


def test_the_ledger_is_charged_on_disk_before_the_first_message_of_a_round(tmp_path: Path) -> None:
    server, grid = apart(small(), tmp_path)
    charged = []

    def away(kind: str, client: str, number: int) -> bool:
        if kind == ROUND:
            lines = map(
                json.loads, (tmp_path / "server/private/ledger.jsonl").read_text().splitlines()
            )
            reserved = [
                range(line["first"], line["end"]) for line in lines if line["kind"] == "charge"
            ]
            charged.append(any(number in steps for steps in reserved))
            assert not any(
                number + 1 in steps for steps in reserved
            )  # a crash loses one round at most
        return False

    grid.away = away
    run(server, grid)
    assert charged == [True] * 2 * CLIENTS


def test_a_client_that_never_connects_is_one_whose_answers_are_lost(tmp_path: Path) -> None:
    """Cohorts are drawn from the whole population, and the sum is divided by the same constant."""
    trainer = trainer_of("fedavg")
    there = trainer.data.ids[: CLIENTS // 2]
    absent, grid = apart(trainer, tmp_path / "absent")
    grid.nodes = dict(list(grid.nodes.items())[: CLIENTS // 2])
    without = run(absent, grid)
    silent, grid = apart(
        trainer, tmp_path / "silent", away=lambda kind, client, number: client not in there
    )
    assert run(silent, grid).epsilon == without.epsilon
    same(public_state(tmp_path / "silent/server"), public_state(tmp_path / "absent/server"))


def test_a_run_without_nodes_is_not_begun(tmp_path: Path) -> None:
    server, grid = apart(trainer_of("fedavg"), tmp_path)
    grid.nodes = {}
    with pytest.raises(
        TrainingError, match=f"None of {CLIENTS} clients is connected and has said its name in time"
    ):
        run(server, grid)
    assert not (tmp_path / "server").exists()


def test_a_run_whose_nodes_are_all_gone_does_not_spend_its_budget_on_noise(tmp_path: Path) -> None:
    server, grid = apart(trainer_of("fedavg"), tmp_path)

    class Gone(Callback):
        def on_block(self, block, state):
            grid.nodes = {}

    with pytest.raises(TrainingError, match="ends before a further round is charged"):
        run(replace(server, callbacks=(Gone(),), rounds=5), grid)
    lines = (tmp_path / "server" / "private" / "ledger.jsonl").read_text().splitlines()
    assert (
        sum(json.loads(line)["kind"] == "charge" for line in lines) == 2
    )  # that of the round that waited, too


def test_rows_are_clipped_by_the_node_and_again_by_the_server(tmp_path: Path) -> None:
    norms = []

    def longer(kind: str, client: str, number: int, content: RecordDict) -> RecordDict:
        if kind != ROUND:
            return content
        row = content.array_records["rows"]["update"].numpy()
        norms.append(float(np.linalg.norm(row)))
        longer = ArrayRecord({"update": Array(row * (1e6 if client == "client-2" else 1.0))})
        return RecordDict({**content, "rows": longer})

    quiet = ClientPrivacy(clip_norm=1e-3, epsilon=math.inf)
    one, grid = apart(small(privacy=quiet), tmp_path / "one", broken=longer)
    run(one, grid)
    two, grid = apart(small(privacy=quiet), tmp_path / "two")
    run(two, grid)
    assert max(norms) <= 1e-3
    assert min(norms) > 0.9e-3
    same(public_state(tmp_path / "one/server"), public_state(tmp_path / "two/server"), 1e-7)


def test_a_clip_that_adapts_goes_with_the_message(tmp_path: Path) -> None:
    privacy = ClientPrivacy(
        clip_norm=QuantileClip(initial=0.05, count_noise=2.0), noise_multiplier=0.8, delta=1e-5
    )
    expected, found, grid = beside_trainer(
        replace(trainer_of("pmtl"), privacy=privacy), tmp_path, 1e-6
    )
    assert found.epsilon == expected.epsilon
    bounds = {
        float(tensors_of(content, "channel")["update"][-1])
        for kind, _, content in grid.sent
        if kind == ROUND
    }
    assert len(bounds) == ROUNDS


@pytest.mark.parametrize("initial", [1e-6, 1e6])
def test_a_client_that_is_away_moves_the_count_of_an_adaptive_clip_by_a_half(
    initial: float, tmp_path: Path
) -> None:
    """That is what the count is charged for, whether the client's row is longer than the clip norm or not."""
    clip = QuantileClip(initial=initial, count_noise=2.0)
    trainer = small(privacy=ClientPrivacy(clip_norm=clip, noise_multiplier=0.8, delta=1e-5))
    counts = []
    for missing in ("nobody", "client-2"):
        server, grid = apart(trainer, tmp_path / missing)
        grid.away = lambda kind, client, number, missing=missing: client == missing
        run(server, grid)
        bound = min(
            float(tensors_of(content, "channel")["update"][-1])
            for kind, _, content in grid.sent
            if kind == ROUND and facts_of(content)["round"] == 1
        )
        counts.append(CLIENTS * math.log(bound / initial) / clip.lr)
    assert abs(counts[0] - counts[1]) == pytest.approx(0.5)


def test_noise_against_the_server_is_added_on_the_node(tmp_path: Path) -> None:
    """The rows that leave differ from those of a run without it by the noise that the trainer adds in one process."""
    algorithm = MPMTL(feature_norm=1.0, lam=0.05, curator_epsilon=5.0)
    expected, found, _ = beside_trainer(
        replace(trainer_of("mp_mtl"), algorithm=algorithm), tmp_path, 1e-10
    )
    assert found.privacy.to_dict()["server"] == expected.privacy.to_dict()["server"] is not None


@pytest.mark.parametrize("privacy", [None, ClientPrivacy(clip_norm=0.5, epsilon=math.inf)])
def test_runs_without_noise(privacy, tmp_path: Path) -> None:
    beside_trainer(replace(trainer_of("fedavg"), privacy=privacy), tmp_path)


def test_secret_coins(tmp_path: Path) -> None:
    """In secure mode a server that is killed pays for the round again, and its certificate holds."""
    privacy = ClientPrivacy(clip_norm=0.5, noise_multiplier=2.0, delta=1e-5, source="secure")
    server, grid = apart(small(privacy=privacy), tmp_path)
    with pytest.raises(Ended):
        run(server, LocalGrid(grid.app, server.data.ids, **killed(ROUND, CLIENTS + 1, after=True)))
    found = run(server, grid)
    charged = [
        json.loads(line)
        for line in (tmp_path / "server/private/ledger.jsonl").read_text().splitlines()
    ]
    assert [(line["first"], line["end"]) for line in charged if line["kind"] == "charge"] == [
        (0, 1),
        (1, 2),
        (1, 2),
    ]
    assert found.privacy.headline.startswith("private:")
    assert verify(tmp_path / "server").fits


def unreadable(header: bytes) -> Array:
    """An array whose bytes begin with a header of NumPy that it cannot read."""
    raw = b"\x93NUMPY\x01\x00" + (len(header) + 1).to_bytes(2, "little") + header + b"\n"
    return Array("float32", (1, 3), "numpy.ndarray", raw)


@pytest.mark.parametrize(
    ("rows", "text"),
    [
        ({}, "its releases are not"),
        ({"other": Array(np.zeros((1, 3)))}, "its releases are not"),
        ({"update": Array(np.zeros((1, 2)))}, "not a row of 3 numbers"),
        ({"update": Array(np.zeros((2, 3)))}, "not a row of 3 numbers"),
        ({"update": Array(np.zeros((1, 3), dtype=np.int64))}, "int64 of shape"),
        ({"update": Array(np.array([["a", "b", "c"]]))}, r"numpy\.str_.*only supported types"),
        ({"update": Array(np.array([[0.0, np.nan, 0.0]]))}, "not finite"),
        (
            {"update": Array("float32", (1, 3), "numpy.ndarray", b"PK\x03\x04" + bytes(40))},
            "rows: ",
        ),
        ({"update": unreadable(b"(" * 9000)}, "rows: "),  # cut off
        ({"update": unreadable(b"-" * 9000 + b"1")}, "rows: "),  # too deep
        (
            {
                "update": unreadable(
                    b"{'descr': '<f4', 'fortran_order': False, 'shape': (1, %d)}" % 2**60
                )
            },
            "rows: ",
        ),
    ],
)
def test_replies_that_are_no_rows_are_refused_with_a_reason(
    rows: dict[str, Array], text: str
) -> None:
    """Whatever NumPy raises for the bytes of a node, its reply is left out, and the run goes on."""
    question = ConfigRecord({"run": "a", "round": 0})
    reply = RecordDict({"facts": question, "rows": ArrayRecord(rows)})
    with pytest.raises(ValueError, match=text):
        checked_rows(reply, {"update": 3}, "a", 0)


def test_a_node_whose_name_is_no_text_is_no_client(tmp_path: Path, log) -> None:
    server, grid = apart(small(), tmp_path)

    def lies(kind: str, client: str, number: int, content: RecordDict) -> RecordDict:
        wrong = kind == NAME and client == "client-1"
        return RecordDict({"facts": ConfigRecord({"name": b"client-1"})}) if wrong else content

    grid.broken = lies
    assert run(server, grid).stopped == "rounds"
    assert "a node says no name of the population" in log.text


# What a node says, and to whom


def test_records_that_do_not_fit_are_named_on_the_node_and_nowhere_else(
    tmp_path: Path, log
) -> None:
    trainer = small()
    server, grid = apart(trainer, tmp_path)
    secret = "diagnosis-of-4711"

    def records(name: str, config):
        if name == "client-1":
            return torch.zeros(5, 77), torch.zeros(5, dtype=torch.int64)
        if name == "client-2":
            raise ValueError(secret)
        if name == "client-3":
            torch.load(tmp_path / "missing.pt")
        return trainer.data.subset([name])

    replies = []
    grid.app = client_app(server, records, folder=tmp_path / "nodes")
    grid.broken = lambda kind, client, number, content: replies.append((client, content)) or content
    run(server, grid)
    assert all(
        not content for client, content in replies if client in ("client-1", "client-2", "client-3")
    )
    assert secret not in repr(replies)
    said = [text for text in log.messages if "no answer" in text]
    assert any("have shape (77,); the population's is (5,)" in text for text in said)
    assert any(secret in text for text in said)
    (missing,) = [record for record in log.records if "missing.pt" in record.message]
    assert (
        "the records of client 'client-3' cannot be read: [Errno 2] No such file" in missing.message
    )
    assert f"can be read from {Path.cwd()}, or a whole path, in --node-config" in missing.message
    assert (missing.exc_info or None) is None  # one line, without a traceback
    assert not [
        one for one in grid.sent if one[:2] == (ROUND, "client-1")
    ]  # it never said its name


def test_nothing_but_rows_and_a_name_leaves_a_node(tmp_path: Path) -> None:
    replies = []

    def note(kind: str, client: str, number: int, content: RecordDict) -> RecordDict:
        replies.append((kind, {name: sorted(record) for name, record in content.items()}))
        return content

    server, grid = apart(trainer_of("mp_mtl_layers"), tmp_path, broken=note)
    run(server, grid)
    assert dict(replies) == {
        NAME: {"facts": ["name"]},
        ROUND: {"facts": ["round", "run"], "rows": ["covariance"]},  # of the question
        RECEIVE: {"facts": []},
        FINISH: {"facts": []},
    }


def test_a_node_with_other_settings_has_no_answer(tmp_path: Path, log) -> None:
    trainer = small()
    server, grid = apart(trainer, tmp_path)
    other, _ = apart(replace(trainer, algorithm=PMTL(lam=0.7)), tmp_path)
    grid.app = client_app(
        other, lambda name, config: trainer.data.subset([name]), folder=tmp_path / "nodes"
    )
    run(server, grid)
    assert any(
        "the server has other settings than this node: algorithm" in text for text in log.messages
    )
    assert (
        sum("is left out of the sum: it has no rows" in text for text in log.messages)
        == 2 * CLIENTS
    )


def test_a_node_that_was_rolled_back_has_no_answer_and_one_without_its_folder_begins_anew(
    tmp_path: Path, log
) -> None:
    server, grid = apart(small(), tmp_path)
    with pytest.raises(Ended):
        run(server, LocalGrid(grid.app, server.data.ids, **killed(FINISH, 0, after=False)))
    (state,) = (tmp_path / "nodes/client-1").rglob("state.safetensors")
    parts, notes = read_parts(state, "before", "after", "received", "rows")
    write_parts(state, parts, notes | {"before": 0, "after": 1})
    (lost,) = (tmp_path / "nodes/client-3").rglob("state.safetensors")
    lost.unlink()
    run(server, grid)
    assert any("after 0 and 1 rounds, but the server counts 2" in text for text in log.messages)
    assert not (state.parent / "model.safetensors").exists()
    assert any("client-3" in text and "begins anew" in text for text in log.messages)
    assert (lost.parent / "model.safetensors").exists()


def test_a_name_that_is_taken_or_nobodys(tmp_path: Path, log) -> None:
    server, grid = apart(small(), tmp_path)
    grid.nodes |= {997: "client-0", 998: "nobody"}
    grid.context = lambda node: Context(1, node, {"client": grid.nodes[node]}, RecordDict(), {})
    run(server, grid)
    assert any("a node calls itself 'client-0', and another" in text for text in log.messages)
    assert any("client 'nobody' is not in the population" in text for text in log.messages)
    assert sum(kind == ROUND for kind, _, _ in grid.sent) == 2 * CLIENTS
    asked = [client for kind, client, _ in grid.sent if kind == NAME]
    assert asked.count("nobody") == 1
    assert asked.count("client-0") > 2  # until the other one is gone


WRONG = r"client 'x' is not in the population, whose 6 names are client-0, .*, client-5\. Give one of them in --node-"


def test_names_of_nodes(tmp_path: Path) -> None:
    server, _ = apart(small(), tmp_path)
    assert name_of(server, {"partition-id": 2}) == "client-2"
    assert name_of(server, {"client": "client-5", "partition-id": 2}) == "client-5"
    for config, text in [
        ({}, "--node-config"),
        ({"partition-id": 6}, "number 6"),
        ({"client": "x"}, WRONG),
    ]:
        with pytest.raises(ConfigError, match=text):
            name_of(server, config)


def test_records_as_pairs_are_split_as_the_trainer_splits_them(tmp_path: Path) -> None:
    x, y = torch.randn(20, 5), torch.arange(20) % 3
    data = FederatedDataset.from_tensors({"here": (x, y)}, classes=3, seed=3)
    node = Node(small(data=population(["here"], (5,), classes=3)), "here", lambda: (x, y), tmp_path)
    assert torch.equal(node.problem.data.train.x, data.train.x)


# Bad input


@pytest.mark.parametrize(
    ("settings", "text"),
    [
        (
            {"algorithm": LocalFit(), "privacy": None, "rounds": 1},
            "no part that a client computes by itself",
        ),
        (
            {"privacy": RecordPrivacy(clip_norm=1.0, epsilon=1.0)},
            "RecordPrivacy needs delta in a Flower app",
        ),
        ({"privacy": RecordPrivacy(clip_norm=1.0, epsilon={"x": 1.0}, delta=1e-5)}, "names 'x'"),
        ({"baselines": ("local",)}, "baselines needs all clients in one process"),
        ({"audit": Interval()}, "audit=Interval.* needs all clients in one process"),
        (
            {
                "algorithm": PeerToPeer(graph=Ring()),
                "schedule": PoissonClocks(activations=8),
                "privacy": None,
                "rounds": 8,
            },
            "p2p, whose clients act one at a time, needs all clients in one process",
        ),
    ],
)
def test_settings_that_nodes_cannot_follow(settings, text: str) -> None:
    trainer = small(**settings)
    with pytest.raises(ConfigError, match=text):
        server_app(trainer)
    with pytest.raises(ConfigError, match=text):
        client_app(trainer, lambda name, config: None)


@pytest.mark.parametrize(("names", "shape"), [((), (3,)), (("a", "a"), (3,)), (("a",), (0,))])
def test_populations_that_are_none(names, shape) -> None:
    with pytest.raises(DataError):
        population(names, shape, classes=2)


@pytest.mark.parametrize(
    "name",
    ["..", ".", "...", "", "a/b", "../x", "\\", "\x00", "a\nb", "x" * 5000, "ä" * 300, "%2E%2E"],
)
def test_a_name_of_a_client_is_the_name_of_one_folder(name: str, tmp_path: Path) -> None:
    (tmp_path / "nodes").mkdir()
    place = tmp_path / "nodes" / folder_name(name)
    place.mkdir()
    assert place.resolve().parent == tmp_path / "nodes"
    others = {
        folder_name(other)
        for other in ("..", ".", "", "%2E", "%", "x" * 5001, "x" * 4999)
        if other != name
    }
    assert place.name not in others
