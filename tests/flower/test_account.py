"""A node's own account: records that it protects itself, noise against the server, and servers that ask too often."""

import json
from contextlib import nullcontext
from dataclasses import replace
from functools import cache
from pathlib import Path

import numpy as np
import pytest
import torch

from fedmtl import MPMTL, Finetune, FixedCohort, FullParticipation, Trainer
from fedmtl.audit.verification import verify
from fedmtl.data import FederatedDataset
from fedmtl.errors import BudgetExhausted, ConfigError, ResumeError
from fedmtl.privacy import ClientPrivacy, PoissonSampling, RecordPrivacy
from fedmtl.privacy.ledger import Ledger
from fedmtl.trainer.result import Result

pytest.importorskip("flwr", reason="the extra flower is not installed")

from flwr.app import ConfigRecord, RecordDict

from fedmtl.flower.messages import NAME, ROUND, facts_of, pack, tensors_of
from fedmtl.flower.node import Node
from fedmtl.flower.nodes import Nodes
from tests.algorithms.test_client_half import CLIENTS, ROUNDS, trainer_of
from tests.flower.grid import LocalGrid
from tests.flower.test_apps import (
    apart,
    beside_trainer,
    killed,
    own_models,
    public_state,
    run,
    same,
    small,
)
from tests.small import Ended

RECORDS = RecordPrivacy(clip_norm=1.0, epsilon=6.0, delta=1e-3)
SCHEDULES = {
    "full": FullParticipation(),
    "poisson": PoissonSampling(cohort=4),
    "fixed": FixedCohort(cohort=3),
}


def protected(name: str, schedule: str = "full", **settings) -> Trainer:
    return replace(
        trainer_of(name),
        privacy=replace(RECORDS, **settings),
        schedule=SCHEDULES[schedule],
        dtype="float64",
    )


def own_report(folder: Path, client: str) -> dict:
    return json.loads((folder / "nodes" / client / "public/privacy.json").read_text())


def ledger(folder: Path) -> list[dict]:
    return [json.loads(line) for line in (folder / "private/ledger.jsonl").read_text().splitlines()]


def answers(folder: Path) -> list[int]:
    """The rounds for which an answer is charged, counted from the lines by hand."""
    lines = [line for line in ledger(folder) if line["kind"] == "charge"]
    return [
        line["first"] + k for line in lines for k, cohort in enumerate(line["cohorts"]) if cohort
    ]


# Records


@pytest.mark.parametrize(
    ("name", "schedule"), [("pmtl", "poisson"), ("pmtl", "fixed"), ("ditto", "full")]
)
def test_nodes_that_protect_their_records_give_the_numbers_of_the_trainer(
    name: str, schedule: str, tmp_path: Path
) -> None:
    expected, found, _ = beside_trainer(protected(name, schedule), tmp_path, 1e-10)
    epsilons = []
    for client in expected.ids:
        same(expected.model_for(client).state_dict(), own_models(tmp_path, client), 1e-10)
        epsilons.append(own_report(tmp_path, client)["epsilon"])
    for client in (expected.ids[0], expected.ids[-1]):
        found_here = verify(tmp_path / "nodes" / client)
        assert found_here.fits
        verdicts = {check.name: check.verdict for check in found_here.checks}
        assert {verdicts[check] for check in ("chain", "head", "charges", "epsilon", "budget")} == {
            "confirmed"
        }
    assert (min(epsilons), max(epsilons)) == (
        expected.privacy.by_client[0],
        expected.privacy.by_client[2],
    )
    assert verify(tmp_path / "server").fits
    assert found.epsilon == np.inf  # this folder has no account
    assert (
        found.privacy.headline
        == "no account here: every node keeps its own, see fedmtl verify nodes/NAME there"
    )
    assert "clip only" not in found.privacy.text()
    assert any("the accounts of the nodes" in line for line in found.privacy.outside)


def test_nodes_that_train_alone_release_nothing_and_keep_no_account(tmp_path: Path) -> None:
    expected, found, _ = beside_trainer(protected("local"), tmp_path)
    assert found.epsilon == expected.epsilon == 0.0
    assert not list((tmp_path / "nodes").rglob("ledger.jsonl"))


def test_nothing_is_amplified_by_what_the_server_controls(tmp_path: Path, log) -> None:
    """A node of a sampled run has the noise of its most participations, each charged in full, whatever q is; with
    seeded noise it says that it is a simulation."""
    trainer = protected("pmtl", "poisson", noise_multiplier=3.0, epsilon=None)
    server, grid = apart(trainer, tmp_path)
    run(server, grid)
    certified = [text for text in log.messages if "of its records" in text]
    assert len(certified) == CLIENTS
    assert all(
        "a simulation, not private; to publish, run with privacy.source=secure" in line
        for line in certified
    )
    for client in trainer.data.ids:
        (header, *_) = ledger(tmp_path / "nodes" / client)
        (kind,) = header["kinds"]
        assert header["schedule"]["amplified"] is False
        assert header["schedule"]["relation"] == "zero_out"
        assert kind["cap"] == min(ROUNDS, int(np.ceil(ROUNDS * 4 / 6)) + 1)
        counts = trainer.data.subset([client]).train.counts.tolist()
        assert kind["cost"]["sampled"] == min(1.0, 4 / counts[0])  # its own batches, of 4
        asked = sum(one == client for message, one, _ in grid.sent if message == ROUND)
        assert len(answers(tmp_path / "nodes" / client)) == asked


def test_clients_may_have_budgets_of_their_own(tmp_path: Path) -> None:
    epsilons = {f"client-{k}": 2.0 + k for k in range(6)}
    trainer = protected("pmtl", epsilon=epsilons)
    server, grid = apart(trainer, tmp_path)
    run(server, grid)
    for client, budget in epsilons.items():
        report = own_report(tmp_path, client)
        assert report["budget"] == budget
        assert 0.9 * budget < report["epsilon"] <= budget


def test_without_a_budget_records_are_clipped_only(tmp_path: Path) -> None:
    beside_trainer(protected("pmtl", epsilon=np.inf, delta=None), tmp_path, 1e-10)
    assert (
        "clip only" in json.loads((tmp_path / "server/public/privacy.json").read_text())["headline"]
    )
    assert not list((tmp_path / "nodes").rglob("ledger.jsonl"))


# A server that asks too often


@cache
def questions(
    kind: str, folder: Path, source: str = "secure"
) -> tuple[Trainer, list[RecordDict], FederatedDataset]:
    """A run in which noise is the nodes', what its server has asked the first client, and that client's records."""
    if kind == "records":
        trainer = protected("pmtl", source=source)
    else:
        algorithm = MPMTL(feature_norm=1.0, lam=0.05, curator_epsilon=5.0)
        privacy = ClientPrivacy(clip_norm=0.5, noise_multiplier=0.8, delta=1e-5, source=source)
        settings = {"algorithm": algorithm, "schedule": FullParticipation(), "privacy": privacy}
        trainer = replace(trainer_of("mp_mtl"), **settings)
    server, grid = apart(trainer, folder)
    run(server, grid)
    name = trainer.data.ids[0]
    asked = [
        content for message, client, content in grid.sent if (message, client) == (ROUND, name)
    ]
    assert len(asked) == ROUNDS
    return replace(server, callbacks=()), asked, trainer.data.subset([name])


@pytest.fixture(scope="module", params=["records", "rows"])
def asked(request, tmp_path_factory) -> tuple[Trainer, list[RecordDict], FederatedDataset]:
    return questions(request.param, tmp_path_factory.mktemp(request.param))


def node_of(asked, folder: Path) -> Node:
    """A process of the node, which may have run before."""
    server, _, data = asked
    return Node(server, server.data.ids[0], lambda: data, folder)


def changed(content: RecordDict, **facts) -> RecordDict:
    return RecordDict({**content, "facts": ConfigRecord(facts_of(content) | facts)})


def place(folder: Path) -> Path:
    """The folder of the only client there."""
    (found,) = folder.iterdir()
    return found


def sent(reply: RecordDict) -> dict[str, bytes]:
    return {name: array.data for name, array in reply.array_records["rows"].items()}


def test_the_same_question_has_the_same_answer_and_is_charged_once(asked, tmp_path: Path) -> None:
    first = node_of(asked, tmp_path).train(asked[1][0], RecordDict())
    again = node_of(asked, tmp_path).train(asked[1][0], RecordDict())  # after a restart
    assert sent(again) == sent(first)
    assert answers(place(tmp_path)) == [0]


def test_a_round_is_answered_once(asked, tmp_path: Path) -> None:
    """With other values, or after a later round, a server gets no second noise on the same answer."""
    _, contents, _ = asked
    node = node_of(asked, tmp_path)
    node.train(contents[0], RecordDict())
    with pytest.raises(ResumeError, match="asks for round 1 again, with other values"):
        node.train(changed(contents[1], round=0, counted=0), RecordDict())
    node.train(changed(contents[1], counted=0), RecordDict())
    with pytest.raises(ResumeError, match="after round 2; a round of a run is answered once"):
        node.train(contents[0], RecordDict())
    public = tensors_of(contents[0], "public")
    for wrong in (public | {(name := min(public)): public[name][None]}, {}):
        with pytest.raises(ConfigError, match=f"the server sends no '{name}' of shape"):
            node.train(
                changed(
                    RecordDict({**contents[0], "public": pack({}, public=wrong)["public"]}),
                    run="d" * 16,
                ),
                RecordDict(),
            )
    with pytest.raises(
        ConfigError, match=f"asks for round {ROUNDS + 1}, and the settings have {ROUNDS}"
    ):
        node.train(changed(contents[0], round=ROUNDS), RecordDict())
    assert answers(place(tmp_path)) == [0, 1]


def test_answers_are_counted_over_all_runs_and_restarts(asked, tmp_path: Path, log) -> None:
    """A server that gives itself new identities gets as many answers as were planned, and the first are all different:
    each has noise of its own."""
    given = set()
    for number in range(ROUNDS):
        reply = node_of(asked, tmp_path).train(
            changed(asked[1][0], run=f"{number:016x}"), RecordDict()
        )
        given.add(tuple(sent(reply).items()))
    assert len(given) == ROUNDS
    new, known = changed(asked[1][0], run="f" * 16), changed(asked[1][1], run="0" * 16, counted=0)
    for content in (new, known):
        with pytest.raises(
            BudgetExhausted,
            match=rf"the {ROUNDS} answers that its privacy pays for, .*: .*epsilon [56]",
        ):
            node_of(asked, tmp_path).train(content, RecordDict())
    assert answers(place(tmp_path)) == [0] * ROUNDS
    again = node_of(asked, tmp_path).train(
        changed(asked[1][0], run=f"{ROUNDS - 1:016x}"), RecordDict()
    )  # what it has given
    assert tuple(sent(again).items()) in given
    node_of(asked, tmp_path).finish(changed(asked[1][0], run="0" * 16, counted=1), RecordDict())
    if isinstance(asked[0].privacy, RecordPrivacy):
        certificate = verify(place(tmp_path))
        assert certificate.fits
        assert 0.99 * 6 < certificate.epsilon <= 6
    else:
        assert any(f"after {ROUNDS} answers: epsilon 5 at" in text for text in log.messages)


def test_an_answer_is_charged_on_disk_before_it_is_computed(
    asked, tmp_path: Path, monkeypatch
) -> None:
    """A node that is killed while it computes has paid, and is not asked for more than was planned."""
    seen, kind = [], type(asked[0].algorithm)

    def dies(self, c):
        seen.append(answers(place(tmp_path)))
        raise KeyboardInterrupt

    def gone(
        self: Ledger,
    ) -> None:  # what the system does for a process that is gone: no line is written
        self._file.close()

    for number in range(ROUNDS - 1):
        with monkeypatch.context() as patch:
            patch.setattr(kind, "client_update", dies)
            patch.setattr(Ledger, "close", gone)
            with pytest.raises(KeyboardInterrupt):
                node_of(asked, tmp_path).train(
                    changed(asked[1][0], run=f"{number:016x}"), RecordDict()
                )
    assert seen == [[0], [0, 0]]
    node_of(asked, tmp_path).train(asked[1][0], RecordDict())
    with pytest.raises(BudgetExhausted):
        node_of(asked, tmp_path).train(changed(asked[1][1], counted=1), RecordDict())


def test_rounds_that_were_not_this_nodes_are_not_charged(asked, tmp_path: Path) -> None:
    node = node_of(asked, tmp_path)
    node.train(changed(asked[1][2], counted=0), RecordDict())
    assert answers(place(tmp_path)) == [2]
    spans = [
        (line["first"], line["end"]) for line in ledger(place(tmp_path)) if line["kind"] == "charge"
    ]
    assert spans == [(0, 2), (2, 3)]


@pytest.mark.parametrize("source", ["seeded", "secure"])
@pytest.mark.parametrize("kind", ["records", "rows"])
def test_every_answer_is_charged_in_whatever_order_a_server_asks(
    kind: str, source: str, tmp_path: Path
) -> None:
    """Under seeded noise a round behind the last one of the ledger costs nothing, since its answer was given before."""
    asked, folder = questions(kind, tmp_path / "run", source=source), tmp_path / "node"
    last, *earlier = (
        changed(asked[1][number], counted=0, run=f"{number:016x}") for number in (2, 0, 1)
    )
    node_of(asked, folder).train(last, RecordDict())
    for content in earlier:
        passed = pytest.raises(ResumeError, match=r"round [12], which has passed without this node")
        with passed if source == "seeded" else nullcontext():
            node_of(asked, folder).train(content, RecordDict())
    assert answers(place(folder)) == ([2] if source == "seeded" else [2, 0, 1])


def test_a_node_with_other_settings_does_not_go_on_with_the_account(asked, tmp_path: Path) -> None:
    server, contents, data = asked
    node_of(asked, tmp_path).train(contents[0], RecordDict())
    if isinstance(server.privacy, RecordPrivacy):
        other = replace(server, privacy=replace(server.privacy, epsilon=7.0))
    else:
        other = replace(server, algorithm=replace(server.algorithm, curator_epsilon=7.0))
    node = Node(other, server.data.ids[0], lambda: data, tmp_path)
    content = changed(contents[0], settings=node.settings, run="f" * 16)
    with pytest.raises(ResumeError, match="was written with"):
        node.train(content, RecordDict())


def forged(content: RecordDict, number: int) -> RecordDict:
    """The same question in another run, about another public state."""
    moved = {name: one + number for name, one in tensors_of(content, "public").items()}
    other = pack({}, public=moved).array_records["public"]
    return changed(RecordDict({**content, "public": other}), run=f"{number:016x}")


@pytest.mark.parametrize("kind", ["records", "rows"])
def test_a_seeded_node_has_one_answer_for_a_round(kind: str, tmp_path: Path) -> None:
    """Its noise is that of the round, in every run: what another question adds would be the answer without noise."""
    asked, folder = questions(kind, tmp_path / "run", source="seeded"), tmp_path / "node"
    contents = asked[1]
    first = node_of(asked, folder).train(contents[0], RecordDict())
    for number in range(1, 4):
        with pytest.raises(
            ResumeError, match=r"round 1 again, in another run with other values.*a new folder"
        ):
            node_of(asked, folder).train(forged(contents[0], number), RecordDict())
    again = node_of(asked, folder).train(
        changed(contents[0], run="f" * 16), RecordDict()
    )  # a simulation that is repeated
    assert sent(again) == sent(first)
    node_of(asked, folder).train(contents[1], RecordDict())
    with pytest.raises(ResumeError, match="round 2 again, in another run with other values"):
        node_of(asked, folder).train(changed(contents[1], run="e" * 16, counted=0), RecordDict())
    assert answers(place(folder)) == [0, 1]


def test_a_server_writes_nothing_into_the_account_of_a_node(asked, tmp_path: Path) -> None:
    """Of the channel's state a message has the clip norms, of the releases that there are."""
    node = node_of(asked, tmp_path)
    node.train(asked[1][0], RecordDict())
    path = place(tmp_path) / "private/ledger.jsonl"
    before = path.read_bytes()
    many = {
        "charged": torch.tensor(4),
        "uses": torch.zeros(1, 1, dtype=torch.int64),
        "first": torch.tensor(0),
    }
    state = pack({}, channel=many).array_records["channel"]
    with pytest.raises(
        ConfigError, match="the server sends clip norms of charged, first, uses; accepted: none"
    ):
        node.train(changed(RecordDict({**asked[1][1], "channel": state}), counted=1), RecordDict())
    assert path.read_bytes() == before
    node.train(asked[1][1], RecordDict())
    assert answers(place(tmp_path)) == [0, 1]


@pytest.mark.parametrize("source", ["seeded", "secure"])
@pytest.mark.parametrize("name", ["pmtl", "pmtl, running mean"])
def test_a_server_that_was_killed_gets_the_answers_that_it_paid_for(
    name: str, source: str, tmp_path: Path
) -> None:
    """Nodes answer the interrupted round with the same rows, and pay for it once."""
    trainer = protected(name, source=source)
    server, grid = apart(trainer, tmp_path)
    rows = {}

    def note(kind: str, client: str, number: int, content: RecordDict) -> RecordDict:
        if kind == ROUND:
            rows.setdefault(client, []).append(
                {one: a.data for one, a in content.array_records["rows"].items()}
            )
        return content

    first = LocalGrid(grid.app, trainer.data.ids, **killed(ROUND, 8, after=True))
    first.broken = grid.broken = note
    with pytest.raises(Ended):
        run(server, first)
    run(server, grid)
    assert sorted(map(len, rows.values())) == [3, 3, 3, 3, 4, 4]  # the last reply was lost
    for client, given in rows.items():
        assert len(given) == 3 or given[1] == given[2]
        assert answers(tmp_path / "nodes" / client) == [0, 1, 2]
        assert verify(tmp_path / "nodes" / client).fits
    if source == "seeded":
        replace(trainer, folder=tmp_path / "one").fit()
        same(public_state(tmp_path / "one"), public_state(tmp_path / "server"), 1e-10)


# Scores and finetuning stay with the node


@pytest.mark.parametrize(
    "finetune", [None, Finetune(), Finetune(kind="vanilla", start="personal", validation=0.3)]
)
def test_metrics_and_finetuning_are_those_of_the_trainer(finetune, tmp_path: Path) -> None:
    trainer = small(finetune=finetune, metrics=("balanced_accuracy",))
    expected: Result = trainer.fit()
    server, grid = apart(trainer, tmp_path)
    run(server, grid)
    for place, client in enumerate(expected.ids):
        (path,) = (tmp_path / "nodes" / client).rglob("scores.json")
        scores = json.loads(path.read_text())
        for metric, values in expected.by_client.items():
            assert scores.get(metric) == pytest.approx(values.get(client), rel=1e-6)
        model = torch.cat([value.flatten() for value in own_models(tmp_path, client).values()])
        assert torch.allclose(
            model.sort().values, expected.personal[place].sort().values, atol=1e-6
        )
        if finetune is not None and finetune.validation:
            assert scores["chosen"] == expected.finetuned.chosen[client]
        frame = expected.to_frame().loc[client].dropna()
        assert {name: scores[name] for name in frame.index} == pytest.approx(
            frame.to_dict(), rel=1e-6
        )


# Who does not say a name


@pytest.mark.parametrize("at_start", [True, False])
def test_a_node_that_does_not_say_its_name_is_waited_for_once(
    at_start: bool, tmp_path: Path, monkeypatch
) -> None:
    """It has the patience of a round at the start, and no round waits for it later; a name that comes late counts."""
    now = [0.0]
    monkeypatch.setattr(
        "fedmtl.flower.nodes.time.sleep", lambda seconds: now.__setitem__(0, now[0] + seconds)
    )
    monkeypatch.setattr("fedmtl.flower.nodes.time.monotonic", lambda: now[0])
    server, grid = apart(small(), tmp_path)
    late, silent = next(node for node, name in grid.nodes.items() if name == "client-2"), [True]

    def pull(numbers):
        ready = [grid.replies[number] for number in numbers]
        return [reply for reply in ready if not (silent[0] and reply.metadata.src_node_id == late)]

    monkeypatch.setattr(grid, "pull_messages", pull)
    nodes = Nodes(grid, server.data.ids, patience=600.0)
    if not at_start:
        del grid.nodes[late]
    nodes.gather(20.0, CLIENTS)
    waited = now[0]
    assert waited == pytest.approx(600 if at_start else 20, abs=1)
    grid.nodes[late] = "client-2"
    assert len(nodes.connected()) == CLIENTS - 1
    silent[0] = False
    assert len(nodes.connected()) == CLIENTS
    assert now[0] - waited <= 1
    assert sum((kind, client) == (NAME, "client-2") for kind, client, _ in grid.sent) == 1
