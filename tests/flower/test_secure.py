"""Secure sums over a grid of one process: the numbers of ``Trainer.fit``, and nothing of a row on the way."""

from __future__ import annotations

import json
import shutil
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from scipy import stats

from fedmtl import CyclicCohorts, FedSGD, FullParticipation, SecureAggregation, Trainer
from fedmtl.audit.verification import verify
from fedmtl.errors import ConfigError, DataError
from fedmtl.privacy import ClientPrivacy, RecordPrivacy
from fedmtl.privacy.chain import PREVIOUS, Head, digest_of, head_file
from fedmtl.privacy.ledger import Ledger
from fedmtl.secure.identity import new_identity, read_identity
from fedmtl.secure.masks import Words
from fedmtl.secure.wire import DIGEST, Kind, Reader, packed, table
from fedmtl.trainer.callbacks import Callback
from tests.algorithms.test_client_half import trainer_of
from tests.small import Ended, Ends

pytest.importorskip("flwr", reason="the extra flower is not installed")

from flwr.app import ArrayRecord, ConfigRecord, Message, RecordDict

from fedmtl.flower import client_app, population, server_app
from fedmtl.flower.identities import checked_identities
from fedmtl.flower.last_answer import Answer
from fedmtl.flower.messages import OPENING, ROUND, ROW, SHARES, facts_of
from fedmtl.flower.node import Node
from fedmtl.flower.secure_node import MEMORY, SecureNode, secure_calibration_of
from fedmtl.flower.server import serve
from tests.flower.grid import LocalGrid
from tests.flower.test_apps import public_state, same

KINDS = (ROUND, SHARES, ROW, OPENING)
SOME = SecureAggregation(colluding=1, missing=1)
PRIVACY = ClientPrivacy(clip_norm=0.5, noise_multiplier=1.0, delta=1e-3, aggregation=SOME)


def secured(name: str = "fedavg", **changes: Any) -> Trainer:
    settings = {"privacy": PRIVACY, "schedule": FullParticipation(), "rounds": 3} | changes
    return replace(trainer_of(name), **settings)


class Hospitals:
    """The nodes of a population with keys of their own, and its server."""

    def __init__(self, trainer: Trainer, folder: Path, **options: Any) -> None:
        data = trainer.data
        (folder / "keys").mkdir(parents=True)
        self.identities = {
            name: new_identity(folder / "keys" / f"{place}.key")
            for place, name in enumerate(data.ids)
        }
        people = population(data.ids, data.spec.shape, classes=data.spec.classes)
        self.trainer = replace(trainer, data=people, folder=folder / "server")
        self.folder = folder
        self.data = data
        self.keys = {
            name: {"key": str(folder / "keys" / f"{place}.key")}
            for place, name in enumerate(data.ids)
        }
        self.options = options
        self.grid = self.started()

    def started(self, **changes: Any) -> LocalGrid:
        """The nodes, as after they were all started anew."""
        trainer = replace(self.trainer, folder=None, **changes)
        app = client_app(
            trainer,
            lambda name, config: self.data.subset([name]),
            folder=self.folder / "nodes",
            identities=self.identities,
        )
        grid = LocalGrid(app, self.data.ids, **self.options)
        grid.config = self.keys
        return grid

    def run(self) -> Any:
        keys = checked_identities(self.trainer, self.identities)
        return serve(self.trainer, self.grid, patience=0.01, gather=0, identities=keys)

    def used(self, name: str) -> int:
        """Shares that a node has charged, read off the lines of its ledger."""
        path = self.folder / "nodes" / name / "private" / "ledger.jsonl"
        if not path.exists():
            return 0
        lines = [json.loads(line) for line in path.read_text().splitlines()]
        return sum(len(who) for line in lines for who in line.get("cohorts", ()))


@pytest.mark.parametrize("name", ["fedavg", "pmtl", "ditto", "fedrep", "ifca"])
def test_sums_over_nodes_give_the_numbers_of_the_trainer(name: str, tmp_path: Path) -> None:
    trainer = secured(name)
    replace(trainer, folder=tmp_path / "one").fit()
    hospitals = Hospitals(trainer, tmp_path)
    hospitals.run()
    same(public_state(tmp_path / "one"), public_state(tmp_path / "server"))
    assert [hospitals.used(client) for client in trainer.data.ids] == [3] * len(trainer.data.ids)


def test_cohorts_in_turn_and_secure_noise(tmp_path: Path) -> None:
    """With noise of the operating system each node charges a share for each of its turns."""
    privacy = replace(PRIVACY, source="secure", aggregation=replace(SOME, missing=0))
    hospitals = Hospitals(secured(privacy=privacy, schedule=CyclicCohorts(cohort=4)), tmp_path)
    result = hospitals.run()
    assert [hospitals.used(name) for name in hospitals.data.ids] == [2] * 6
    assert result.privacy.observer == "server and clients"
    assert "no server" in result.privacy.trusted
    found = verify(tmp_path / "server")
    assert found.fits
    account = verify(tmp_path / "nodes" / hospitals.data.ids[0])
    assert account.fits
    noise = secure_calibration_of(hospitals.trainer, hospitals.trainer.problem())
    assert account.epsilon == noise.epsilon_at(2)
    assert "2 shares, each charged once, of 2 that were planned" in account.text()


RECORDS = RecordPrivacy(clip_norm=0.5, noise_multiplier=1.0, delta=1e-3, aggregation=SOME)


def descending(**changes: Any) -> Trainer:
    """Federated SGD, with the number of all records, which no node knows."""
    records = int(secured().data.train.counts.sum())
    settings = {"privacy": RECORDS, "algorithm": FedSGD(rate=0.3, records=records)} | changes
    return secured(**settings)


def test_gradients_of_records_over_nodes_give_the_numbers_of_the_trainer(tmp_path: Path) -> None:
    trainer = descending()
    replace(trainer, folder=tmp_path / "one").fit()
    hospitals = Hospitals(trainer, tmp_path)
    result = hospitals.run()
    same(public_state(tmp_path / "one"), public_state(tmp_path / "server"))
    assert [hospitals.used(client) for client in trainer.data.ids] == [3] * len(trainer.data.ids)
    assert result.privacy.unit == "record"
    assert result.privacy.observer == "server and clients"
    assert verify(tmp_path / "server").fits


def test_every_attempt_draws_other_records(tmp_path: Path) -> None:
    """Two sums with one draw would have one coin of each record, which is charged as two."""
    privacy = replace(RECORDS, source="secure", aggregation=replace(SOME, missing=0))
    trainer = descending(privacy=privacy, rounds=2)
    hospitals = Hospitals(trainer, tmp_path)
    rows = dict[str, list[torch.Tensor]]()

    class Rows(Callback):
        """What every node has on its disk when an attempt has ended."""

        def on_block(self, event: Any, state: Any) -> None:
            for name in trainer.data.ids:
                (path,) = (tmp_path / "nodes" / name).glob("*/state.safetensors")
                answer = Answer.read(path, torch.device("cpu"))
                rows.setdefault(name, []).append(answer.parts["rows"]["gradient_sum"])

    hospitals.trainer = replace(hospitals.trainer, callbacks=(Rows(), Ends(1)))
    with pytest.raises(Ended):
        hospitals.run()
    hospitals.trainer = replace(hospitals.trainer, callbacks=(Rows(),))
    hospitals.grid = hospitals.started()
    hospitals.run()
    assert all(len(made) == 3 for made in rows.values())
    # of the second round, asked with the same model, before the server was killed and after it
    differ = [not torch.equal(made[1], made[2]) for made in rows.values()]
    assert sum(differ) >= 5


def test_a_server_of_gradients_needs_the_number_of_records(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="FedSGD needs records in a Flower app"):
        Hospitals(descending(algorithm=FedSGD(rate=0.3)), tmp_path)


# What a node's account confirms


def written_anew(folder: Path, change: Callable[[list[dict[str, Any]]], None]) -> None:
    """The ledger of a node with changed lines, each with the hash of the one before, and its head."""
    path = folder / "private" / "ledger.jsonl"
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    change(lines)
    previous = "0" * 64
    written = b""
    for line in lines:
        whole = (json.dumps({**line, PREVIOUS: previous}) + "\n").encode()
        previous = digest_of(whole)
        written += whole
    path.write_bytes(written)
    head_file(path).write_text(Head(len(lines), previous).text())


def kind(lines: list[dict[str, Any]]) -> dict[str, Any]:
    found: dict[str, Any] = lines[0]["kinds"][0]
    return found


CHANGES: dict[str, tuple[str, Callable[[list[dict[str, Any]]], Any]]] = {
    "a smaller sensitivity": ("settings", lambda lines: lines[0].update(sensitivity=0.25)),
    "a wider grid": ("settings", lambda lines: kind(lines)["cost"].update(cells=1 << 40)),
    "another size": ("settings", lambda lines: lines[0].update(release=["update", 1])),
    "cohorts that amplify": ("settings", lambda lines: kind(lines)["cost"].update(sampled=0.1)),
    "a roster of nobody": ("settings", lambda lines: lines[0].update(max_roster=1)),
    "too many to look for": ("settings", lambda lines: lines[0].update(missing=1 << 40)),
    "more than was planned": ("charges", lambda lines: kind(lines).update(cap=1)),
    "a round in another order": ("charges", lambda lines: lines[2].update(first=5, end=6)),
    "no kinds": ("settings", lambda lines: lines[0].pop("kinds")),
}


@pytest.fixture(scope="module")
def node(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a node after a run of three rounds."""
    folder = tmp_path_factory.mktemp("node")
    hospitals = Hospitals(secured(privacy=replace(PRIVACY, source="secure")), folder)
    hospitals.run()
    return folder / "nodes" / hospitals.data.ids[0]


@pytest.mark.parametrize("name", CHANGES)
def test_an_account_that_was_altered_does_not_fit(name: str, node: Path, tmp_path: Path) -> None:
    folder = tmp_path / "copy"
    shutil.copytree(node, folder)
    written_anew(folder, lambda lines: None)
    assert verify(folder).fits
    check, change = CHANGES[name]
    written_anew(folder, change)
    found = verify(folder)
    assert not found.fits
    assert check in [each.name for each in found.checks if each.verdict == "FAILED"]
    assert found.epsilon is None


def test_an_account_that_was_rolled_back_does_not_fit(node: Path, tmp_path: Path) -> None:
    """The head file says how long the ledger was; a line in between that is gone breaks the chain."""
    for part, check in ((slice(None, -3), "head"), (slice(1), "chain")):
        folder = tmp_path / check
        shutil.copytree(node, folder)
        path = folder / "private" / "ledger.jsonl"
        lines = path.read_text().splitlines(keepends=True)
        kept = lines[part]
        if check == "chain":
            kept = [lines[0], *lines[3:]]
        path.write_text("".join(kept))
        found = verify(folder)
        assert not found.fits
        assert check in [each.name for each in found.checks if each.verdict == "FAILED"]


# Losses


def away(kind: str, names: tuple[str, ...]) -> Callable[[str, str, int], bool]:
    """Messages of this kind of the second round do not reach these clients."""
    return lambda asked, name, count: asked == kind and name in names and count == 1


@pytest.mark.parametrize("kind", KINDS)
def test_a_node_that_is_lost_in_any_step(
    kind: str, tmp_path: Path, log: pytest.LogCaptureFixture
) -> None:
    """The others' sum is opened; who was lost goes on from before the round."""
    name = secured().data.ids[2]
    privacy = replace(PRIVACY, source="secure")
    hospitals = Hospitals(secured(privacy=privacy), tmp_path, away=away(kind, (name,)))
    assert hospitals.run().final["round"] == 3
    assert f"round 2: client {name!r} is left out: no answer in time" in log.text
    assert "releases nothing" not in log.text
    # a row is charged as it is made, whether or not it is opened
    assert hospitals.used(name) == (3 if kind == OPENING else 2)
    assert all(hospitals.used(other) == 3 for other in hospitals.data.ids if other != name)


@pytest.mark.parametrize("kind", KINDS)
def test_too_many_losses_release_nothing(
    kind: str, tmp_path: Path, log: pytest.LogCaptureFixture
) -> None:
    names = secured().data.ids[:5]
    hospitals = Hospitals(secured(rounds=2), tmp_path, away=away(kind, names))
    hospitals.run()
    assert "round 2 releases nothing" in log.text
    seen = []

    class Watch(Callback):
        def on_block(self, block: Any, state: Any) -> None:
            seen.append({f"public.{key}": each.clone() for key, each in state.public.items()})

    replace(secured(rounds=2), callbacks=(Watch(),)).fit()
    same(seen[0], public_state(tmp_path / "server"))


def test_a_node_that_restarts_between_two_messages_is_lost_to_the_round(
    tmp_path: Path, log: pytest.LogCaptureFixture
) -> None:
    """Its secrets were in memory only."""
    hospitals = Hospitals(secured(), tmp_path)
    name = hospitals.data.ids[1]

    def restarted(kind: str, client: str, count: int) -> bool:
        if (kind, client, count) == (ROW, name, 1):
            hospitals.grid.memory[name].clear()
        return False

    hospitals.grid.away = restarted
    hospitals.run()
    assert f"client {name!r} is left out: the answer is empty" in log.text
    assert "of which this node knows nothing (any more)" in log.text
    assert hospitals.used(name) == 2


def test_a_process_that_ends_while_it_makes_a_row_makes_no_second_one(
    tmp_path: Path, log: pytest.LogCaptureFixture
) -> None:
    """The memory of the SuperNode is that of before; the question is asked again."""
    hospitals = Hospitals(secured(privacy=replace(PRIVACY, source="secure"), rounds=1), tmp_path)
    name = hospitals.data.ids[1]
    grid = hospitals.grid
    push = grid._push

    def twice(message: Any) -> str:
        if (
            message.metadata.message_type == ROW
            and grid.nodes[message.metadata.dst_node_id] == name
        ):
            before = dict(grid.memory[name])
            push(message)
            grid.memory[name].clear()
            grid.memory[name].update(before)
        return push(message)

    grid._push = twice  # type: ignore[method-assign]
    hospitals.run()
    assert "has given its answer (row) in this attempt already" in log.text
    assert hospitals.used(name) == 1


class Twice:
    """Two processes of every node at once: each finds the memory that the SuperNode had before.

    Args:
        grid: of the nodes.
        kind: of the messages that nodes get twice.
        first: (node's client, message) -> the bytes that the first process gets.
    """

    def __init__(
        self, grid: LocalGrid, kind: str, first: Callable[[str, bytes], bytes] | None = None
    ) -> None:
        self.answers: dict[str, list[bytes]] = {}
        push = grid._push

        def twice(message: Any) -> str:
            name = grid.nodes[message.metadata.dst_node_id]
            if message.metadata.message_type != kind:
                return push(message)
            asked = facts_of(message.content)
            facts = message.content["facts"]
            memory = grid.memory[name]
            grid.memory[name] = RecordDict(dict(memory))
            if first is None:
                facts["attempt"] = asked["attempt"] + 1
            else:
                facts["message"] = first(name, asked["message"])
            reply = grid.app(message, grid.context(message.metadata.dst_node_id))
            self.answers[name] = [facts_of(reply.content).get("message", b"")]
            grid.memory[name] = memory
            for key in facts:
                facts[key] = asked[key]
            number = push(message)
            last = facts_of(grid.replies[number].content).get("message", b"")
            self.answers[name].append(last)
            return number

        grid._push = twice  # type: ignore[method-assign]


def without_another(name: str, message: bytes, names: tuple[str, ...]) -> bytes:
    """The names of the rows that came, without one that this client may call missing, too."""
    reader = Reader(message, Kind.NAMES, message[6:38])
    views = reader.take(DIGEST)
    came = reader.table(0)
    other = max(place for place in came if names[place] != name)
    return packed(Kind.NAMES, message[6:38], views, table({p: b"" for p in came if p != other}))


def test_both_kinds_of_shares_of_a_client_are_not_given(
    tmp_path: Path, log: pytest.LogCaptureFixture
) -> None:
    """Two lists of names at once would open the row of the client that only one of them has."""
    hospitals = Hospitals(secured(privacy=replace(PRIVACY, source="secure"), rounds=1), tmp_path)
    names = hospitals.data.ids
    twice = Twice(hospitals.grid, OPENING, lambda name, asked: without_another(name, asked, names))
    hospitals.run()
    assert len(twice.answers) == 6
    assert all(first and not second for first, second in twice.answers.values())
    assert "has given its answer (opening) in this attempt already" in log.text


def test_the_same_names_have_the_same_answer_in_two_processes(tmp_path: Path) -> None:
    hospitals = Hospitals(secured(privacy=replace(PRIVACY, source="secure"), rounds=1), tmp_path)
    twice = Twice(hospitals.grid, OPENING, lambda name, asked: asked)
    assert hospitals.run().final["round"] == 1
    assert all(first == second != b"" for first, second in twice.answers.values())


def test_a_client_seals_one_set_of_boxes_of_its_keys(
    tmp_path: Path, log: pytest.LogCaptureFixture
) -> None:
    """A second one, of the same roster, would have the keys and nonces of the first one; of another
    roster, the secrets."""
    hospitals = Hospitals(secured(privacy=replace(PRIVACY, source="secure"), rounds=1), tmp_path)
    twice = Twice(hospitals.grid, SHARES, lambda name, asked: asked)
    hospitals.run()
    assert len(twice.answers) == 6
    assert all(first and not second for first, second in twice.answers.values())
    assert "has given its answer (shares) in this attempt already" in log.text


def test_keys_end_with_the_next_ones(tmp_path: Path, log: pytest.LogCaptureFixture) -> None:
    """A process with the memory of an attempt has no answer once another attempt has begun."""
    hospitals = Hospitals(secured(privacy=replace(PRIVACY, source="secure"), rounds=1), tmp_path)
    grid = hospitals.grid
    kept: dict[str, RecordDict] = {}
    push = grid._push

    def older(message: Any) -> str:
        name = grid.nodes[message.metadata.dst_node_id]
        if message.metadata.message_type == ROUND:
            push(message)
            kept[name] = RecordDict(dict(grid.memory[name]))
            facts = message.content["facts"]
            facts["attempt"] = int(facts["attempt"]) + 1
            push(message)
            facts["attempt"] = int(facts["attempt"]) - 1
            grid.memory[name] = kept[name]
            return f"message {len(grid.sent) - 2}"
        return push(message)

    grid._push = older  # type: ignore[method-assign]
    hospitals.run()
    assert "has begun another attempt since" in log.text
    assert [hospitals.used(name) for name in hospitals.data.ids] == [0] * 6


def test_a_server_that_was_killed_asks_again(tmp_path: Path) -> None:
    """With new keys, new noise and a second charge."""
    hospitals = Hospitals(secured(privacy=replace(PRIVACY, source="secure"), rounds=3), tmp_path)
    hospitals.trainer = replace(hospitals.trainer, callbacks=(Ends(1),))
    with pytest.raises(Ended):
        hospitals.run()
    # the checkpoint of the second round is not there any more
    assert [hospitals.used(name) for name in hospitals.data.ids] == [2] * 6
    hospitals.trainer = replace(hospitals.trainer, callbacks=())
    hospitals.grid = hospitals.started()
    hospitals.run()
    assert [hospitals.used(name) for name in hospitals.data.ids] == [3] * 6


def test_a_node_gives_no_more_shares_than_were_planned(
    tmp_path: Path, log: pytest.LogCaptureFixture
) -> None:
    """A server that runs twice, in two folders, gets no sum the second time."""
    hospitals = Hospitals(secured(privacy=replace(PRIVACY, source="secure"), rounds=2), tmp_path)
    hospitals.run()
    hospitals.trainer = replace(hospitals.trainer, folder=tmp_path / "again")
    hospitals.grid = hospitals.started()
    hospitals.run()
    assert "has taken part in the 2 secure sums that its privacy pays for" in log.text
    assert "round 1 releases nothing" in log.text
    assert [hospitals.used(name) for name in hospitals.data.ids] == [2] * 6


@pytest.mark.parametrize(
    "changes",
    [{"aggregation": replace(SOME, colluding=0)}, {"noise_multiplier": 0.1}, {"clip_norm": 5.0}],
    ids=str,
)
def test_nodes_with_other_settings_take_no_part(
    changes: dict[str, Any], tmp_path: Path, log: pytest.LogCaptureFixture
) -> None:
    """A server cannot ask for less noise, a longer clip or fewer that collude."""
    hospitals = Hospitals(secured(rounds=1), tmp_path)
    hospitals.trainer = replace(hospitals.trainer, privacy=replace(PRIVACY, **changes))
    hospitals.run()
    assert "the server has other settings than this node: privacy" in log.text
    assert [hospitals.used(name) for name in hospitals.data.ids] == [0] * 6


def test_no_message_has_the_row_of_a_client(tmp_path: Path) -> None:
    """What a node sends is no array, and as bytes far from its row and from that of the round before."""
    hospitals = Hospitals(secured(rounds=2), tmp_path)
    replies: list[tuple[str, RecordDict]] = []

    def seen(kind: str, name: str, count: int, content: RecordDict) -> RecordDict:
        replies.append((kind, content))
        return content

    hospitals.grid.broken = seen
    hospitals.run()
    assert not any(content.array_records for _, content in replies)
    rows = [
        np.frombuffer(facts_of(content)["message"][-48 * 4 :], dtype="<u4")
        for kind, content in replies
        if kind == ROW
    ]
    assert len(rows) == 12
    words = np.concatenate(rows) / 2.0**32
    assert stats.kstest(words, "uniform").pvalue > 1e-6
    assert len(np.unique(words)) > len(words) - 3


# Keys and refusals


def test_keys_are_made_and_read(tmp_path: Path) -> None:
    path = tmp_path / "north.key"
    public = new_identity(path)
    assert public == "ed25519:" + read_identity(path).public.hex()
    assert path.stat().st_mode & 0o077 == 0
    with pytest.raises(ConfigError, match="cannot be made: File exists"):
        new_identity(path)
    with pytest.raises(ConfigError, match="cannot be made: No such file"):
        new_identity(tmp_path / "no" / "north.key")
    with pytest.raises(DataError, match=r"no\.key cannot be read"):
        read_identity(tmp_path / "no.key")
    (tmp_path / "bad.key").write_text("secret")
    with pytest.raises(DataError, match="is no key file") as caught:
        read_identity(tmp_path / "bad.key")
    assert "secret" not in str(caught.value)


def test_identities_that_are_refused(tmp_path: Path) -> None:
    trainer = secured()
    names = trainer.data.ids
    good = {name: new_identity(tmp_path / f"{place}.key") for place, name in enumerate(names)}
    cases: list[tuple[Trainer, dict[str, str] | None, str]] = [
        (trainer, None, "needs the public keys of all clients here"),
        (secured(privacy=None), good, "the settings have none: leave them out"),
        (trainer, {**good, "nobody": good[names[0]]}, "'nobody' is only in one of the two"),
        (
            trainer,
            {name: good[name] for name in names[1:]},
            f"{names[0]!r} is only in one of the two",
        ),
        (trainer, {**good, names[1]: "ed25519:12"}, f"{names[1]!r} is no public key"),
        (
            trainer,
            {**good, names[1]: good[names[0]]},
            f"one key for clients {names[0]!r} and {names[1]!r}",
        ),
    ]
    for settings, identities, match in cases:
        for make in (server_app, lambda *a, **b: client_app(a[0], lambda *_: None, **b)):
            with pytest.raises(ConfigError, match=match):
                make(settings, identities=identities)


@pytest.mark.parametrize(
    ("made", "said"),
    [
        (None, "the node has no identity key, which secure sums need"),
        ("", "is no key file; make one with fedmtl identity"),
        ("folder", "cannot be read: Is a directory"),
    ],
)
def test_a_node_without_a_key_charges_nothing(
    made: str | None, said: str, tmp_path: Path, log: pytest.LogCaptureFixture
) -> None:
    hospitals = Hospitals(secured(rounds=1), tmp_path)
    name = hospitals.data.ids[0]
    config: dict[str, Any] = {}
    if made is not None:
        path = tmp_path / "own.key"
        if made:
            path.mkdir()
        else:
            path.write_bytes(b"")
        config = {"key": str(path)}
    hospitals.grid.config = {**hospitals.keys, name: config}
    hospitals.run()
    assert said in log.text
    assert hospitals.used(name) == 0
    assert not list((tmp_path / "nodes" / name).rglob("attempt.json"))


def test_a_node_without_a_key_never_sends_its_row(tmp_path: Path) -> None:
    """Also not at the second message to the process that has refused the first one."""
    hospitals = Hospitals(secured(rounds=1), tmp_path)
    name = hospitals.data.ids[0]
    hospitals.grid.config = {**hospitals.keys, name: {}}
    hospitals.run()
    node = next(node for node, client in hospitals.grid.nodes.items() if client == name)
    (asked,) = [
        content
        for kind, client, content in hospitals.grid.sent
        if (kind, client) == (ROUND, hospitals.data.ids[1])
    ]
    for _ in range(2):
        message = Message(asked, dst_node_id=node, message_type=ROUND)
        reply = hospitals.grid.app(message, hospitals.grid.context(node))
        assert not reply.content.array_records


def test_a_node_with_the_key_of_another_takes_no_part(
    tmp_path: Path, log: pytest.LogCaptureFixture
) -> None:
    hospitals = Hospitals(secured(rounds=1), tmp_path)
    first, second = hospitals.data.ids[:2]
    hospitals.grid.config = {**hospitals.keys, first: hospitals.keys[second]}
    hospitals.run()
    assert f"the key of this node is not that of client {first!r} in identities=" in log.text
    assert hospitals.used(first) == 0
    assert hospitals.used(second) == 1


# Broken nodes


def forgets(kind: Kind) -> Callable[[pytest.MonkeyPatch], None]:
    """A node that does not write down its answers of one kind."""
    once = SecureNode._once

    def marked(node: SecureNode, of: Kind, *others: Any) -> None:
        if of != kind:
            once(node, of, *others)

    return lambda patch: patch.setattr(SecureNode, "_once", marked)


def keeps_old_keys(patch: pytest.MonkeyPatch) -> None:
    """A node whose older keys are as good as those of the last attempt."""
    once = SecureNode._once

    def marked(node: SecureNode, kind: Kind, answer: bytes, memory: RecordDict, path: Path) -> None:
        begun = json.loads(path.read_text())["begun"]
        kept = RecordDict({MEMORY: ConfigRecord({**memory.config_records[MEMORY], "begun": begun})})
        once(node, kind, answer, kept, path)

    patch.setattr(SecureNode, "_once", marked)


def charges_nothing(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Ledger, "charge", lambda *_: None)


def is_never_spent(patch: pytest.MonkeyPatch) -> None:
    """An account that counts no charge."""
    patch.setattr(Ledger, "uses", lambda *_, **__: np.zeros(1, dtype=np.int64))


def has_no_masks(patch: pytest.MonkeyPatch) -> None:
    for name in ("add_mask", "subtract_mask"):
        patch.setattr(Words, name, lambda *_: None)


def sends_rows(patch: pytest.MonkeyPatch) -> None:
    """A node that also sends its row as before there were secure sums."""
    train = Node.train

    def trained(node: Node, content: RecordDict, memory: RecordDict) -> RecordDict:
        reply = train(node, content, memory)
        answer = Answer.read(node._path(content), torch.device("cpu"))
        rows = OrderedDict(answer.parts["rows"])
        reply["rows"] = ArrayRecord.from_torch_state_dict(rows)
        return reply

    patch.setattr(Node, "train", trained)


def takes_any_key(patch: pytest.MonkeyPatch) -> None:
    """A node that signs with whatever key it is given, for the client that the key belongs to."""
    init = SecureNode.__init__

    def made(node: SecureNode, *others: Any) -> None:
        *settings, identities, identity = others
        settings[4] = next(name for name, key in identities.items() if key == identity.public)
        init(node, *settings, identities, identity)

    patch.setattr(SecureNode, "__init__", made)


def tried(check: Callable[..., None]) -> Callable[[Path, pytest.LogCaptureFixture], None]:
    """A test that has no use for the log."""
    return lambda path, log: check(path)


MUTANTS: dict[str, tuple[Callable[[pytest.MonkeyPatch], None], Callable[..., None]]] = {
    "two lists": (forgets(Kind.OPENING), test_both_kinds_of_shares_of_a_client_are_not_given),
    "two sets of boxes": (forgets(Kind.SHARES), test_a_client_seals_one_set_of_boxes_of_its_keys),
    "two rows": (
        forgets(Kind.ROW),
        test_a_process_that_ends_while_it_makes_a_row_makes_no_second_one,
    ),
    "old keys": (keeps_old_keys, test_keys_end_with_the_next_ones),
    "no charge": (charges_nothing, tried(test_a_server_that_was_killed_asks_again)),
    "no cap": (is_never_spent, test_a_node_gives_no_more_shares_than_were_planned),
    "no masks": (has_no_masks, tried(test_no_message_has_the_row_of_a_client)),
    "rows sent": (sends_rows, tried(test_no_message_has_the_row_of_a_client)),
    "any key": (takes_any_key, test_a_node_with_the_key_of_another_takes_no_part),
}


@pytest.mark.parametrize("name", MUTANTS)
def test_broken_nodes_are_found(
    name: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    log: pytest.LogCaptureFixture,
) -> None:
    mutant, check = MUTANTS[name]
    mutant(monkeypatch)
    with pytest.raises(AssertionError):
        check(tmp_path, log)
