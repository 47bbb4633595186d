"""Flower apps on a grid of one process: the numbers of ``Trainer.fit``, whatever does not answer as it should."""

from __future__ import annotations

import json
import logging
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
    FedAvg,
    FullParticipation,
    LocalSGD,
    PeerToPeer,
    PoissonClocks,
    Trainer,
    models,
)
from fedmtl.algorithms import Algorithm, Released, Round
from fedmtl.algorithms.local_fit import LocalFit
from fedmtl.data import load_synthetic_tasks
from fedmtl.errors import ConfigError
from fedmtl.privacy import ClientPrivacy, CyclicCohorts, PoissonSampling, QuantileClip, RecordPrivacy
from fedmtl.trainer.callbacks import Callback
from fedmtl.trainer.checkpoint import read_tensors
from fedmtl.trainer.result import Result
from fedmtl.trainer.verify import verify
from tests.algorithms.test_client_half import ALGORITHMS, LINEAR, ONE, PRIVACY, _Client
from tests.helpers import ragged_classification
from tests.trainer.settings import quick_figures

pytest.importorskip("flwr", reason="the extra flower is not installed")

from flwr.app import Array, ArrayRecord, Error, Message, RecordDict

from fedmtl.flower import client_app, population, server_app
from fedmtl.flower.messages import FINISH, NAME, RECEIVE, ROUND
from fedmtl.flower.server import serve
from tests.flower.grid import LocalGrid

CLIENTS, ROUNDS = 6, 3
NAMES = [*ALGORITHMS, *LINEAR]


def within(name: str) -> float:
    """Sums of outer products depend on the order of the rows; of vectors the numbers are the same to the last bit."""
    return 1e-13 if name.startswith("mp_mtl") else 0.0


@pytest.fixture(autouse=True)
def _quick(monkeypatch: pytest.MonkeyPatch) -> None:
    quick_figures(monkeypatch)
    monkeypatch.setattr("fedmtl.flower.server._PAUSE", 0.0)


@cache
def trainer_of(name: str) -> Trainer:
    """The run in one process."""
    algorithm, rounds = (ALGORITHMS | LINEAR)[name], 1 if name.startswith("private_prior") else ROUNDS
    data, model, schedule = ragged_classification(CLIENTS), models.mlp(hidden=5), PoissonSampling(cohort=4)
    if name in LINEAR:
        kind = "regression" if algorithm.loss == "squared" else "classification"
        data = load_synthetic_tasks(tasks=CLIENTS, train_examples=9, test_examples=4, features=5, problem=kind, seed=2)
        model, schedule = models.linear_regression(bias=True), FullParticipation()
    if name == "clustered_pmtl":
        algorithm = replace(algorithm, clusters={client: place % 2 for place, client in enumerate(data.ids)})
    return Trainer(
        algorithm=algorithm,
        data=data,
        model=model,
        schedule=schedule,
        privacy=PRIVACY,
        rounds=rounds,
        seed=3,
        progress=False,
    )


def apart(trainer: Trainer, folder: Path, **options):
    """The same settings over a population, and the grid of its nodes, which have the records."""
    data = trainer.data
    public = {"classes": data.spec.classes, "targets": data.spec.targets, "public": data.public, "domain": data.domain}
    server = replace(trainer, data=population(data.ids, data.spec.shape, **public), folder=folder / "server")
    app = client_app(server, lambda name, config: data.subset([name]), folder=folder / "nodes")
    return server, LocalGrid(app, data.ids, **options)


def run(server: Trainer, grid: LocalGrid) -> Result:
    return serve(server, grid, patience=0.01, gather=0)


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
        def on_event(self, block, state) -> None:
            seen.update({f"public.{key}": value.clone() for key, value in state.public.items()})

    return replace(trainer_of(name), callbacks=(Watch(),)).fit(), seen


def check(name: str, folder: Path) -> None:
    """Compare server and nodes with the trainer in one process."""
    expected, public = expected_of(name)
    same(public, public_state(folder / "server"), within(name))
    for client in expected.ids:
        model = expected.model_for(client)
        same((model.model if expected.bound else model).state_dict(), own_models(folder, client), within(name))
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
    channel, source = trainer.open(problem, "")
    public, ids = algorithm.init(problem).public, problem.data.ids
    clients, asked, failed = [_Client(algorithm, problem, place) for place in range(len(ids))], dict.fromkeys(ids, 0), 0
    channel.start(0)
    for block in source.blocks(0):
        source.begin(block)
        round, rows, there = Round(block.first, channel.clip), [], []
        for client in block.cohort.tolist():
            if fails(ROUND, ids[client], asked[ids[client]]):
                rows.append({plan.name: torch.zeros(1, plan.dimension) for plan in channel.plans})
                failed += 1
            else:
                rows.append(clients[client].send(public, round))
                there.append(client)
            asked[ids[client]] += 1
        stacked = {plan.name: torch.cat([one[plan.name] for one in rows]) for plan in channel.plans}
        values = {key: channel.release(key, value, block.cohort) for key, value in stacked.items()}
        public = algorithm.server(problem, public, Released(values, channel.denominator, channel.noise_std))
        for client in there:
            clients[client].receive(public, round)
    assert failed >= 2
    return public, {client: one.model(public) for client, one in zip(ids, clients, strict=True)}


def broken(kind: str, client: str, number: int, content: RecordDict) -> RecordDict:
    """Make something else of the rows of a reply, as many things as there are places."""
    place = 3 * int(client.split("-")[1]) + number
    if not fails(kind, client, number) or place % 4 == 3:  # the latter are lost
        return content
    (name, array), *_ = [*content.array_records["rows"].items(), ("update", Array(np.zeros((1, 1))))]
    value = array.numpy()
    wrong = [
        {name: value[:, :-1]},  # another shape
        {name: np.where(np.arange(value.size) == 0, np.nan, value)},
        {name: np.full_like(value, np.inf)},
        {name: value.astype(np.int64)},
        {name: np.concatenate([value, value])},  # two rows
        {"another": value},
        {name: value, "another": value},
    ][place % 7]
    if place % 4 == 2:
        raw = Array("float64", value.shape, "numpy.ndarray", b"no array")
        return RecordDict({"rows": ArrayRecord({name: raw})}) if place % 8 == 2 else RecordDict()
    return RecordDict({"rows": ArrayRecord({key: Array(np.ascontiguousarray(one)) for key, one in wrong.items()})})


@pytest.mark.parametrize("name", NAMES)
def test_replies_that_are_lost_or_broken_count_as_zeros_and_leave_no_trace(name: str, tmp_path: Path) -> None:
    """Some messages never arrive, some replies are lost when the client has trained, some are no rows."""

    def lost(kind: str, client: str, number: int) -> bool:
        return fails(kind, client, number) and (3 * int(client.split("-")[1]) + number) % 4 == 3

    public, own = expected_under_failures(name)
    server, grid = apart(trainer_of(name), tmp_path, broken=broken, lost=lost)
    grid.away = lambda *message: lost(*message) and message[1] > "client-3"
    run(server, grid)
    same({f"public.{key}": value for key, value in public.items()}, public_state(tmp_path / "server"), within(name))
    names = [key for key, _ in server.problem().module.named_parameters()]
    for client, row in own.items():
        model = own_models(tmp_path, client)
        same({client: torch.cat([model[key].flatten() for key in names])}, {client: row}, within(name))
    assert verify(tmp_path / "server").fits


class _KilledError(Exception):
    pass


class _Killed(LocalGrid):
    """A server that dies at a message of a kind: before it is sent, or when its reply is on the way."""

    def __init__(self, *args, kind: str, number: int, after: bool) -> None:
        super().__init__(*args)
        self.at, self.after = (kind, number), after

    def _push(self, message: Message) -> str:
        kind = message.metadata.message_type
        here = (kind, sum(one == kind for one, _, _ in self.sent)) == self.at
        if here and not self.after:
            raise _KilledError
        found = super()._push(message)
        if here:
            raise _KilledError
        return found


@pytest.mark.parametrize("name", NAMES)
def test_a_server_that_was_killed_goes_on_with_the_same_numbers(name: str, tmp_path: Path) -> None:
    receives = type(trainer_of(name).algorithm).receive is not Algorithm.receive
    kind, number = (RECEIVE, 3) if receives else (ROUND, 5)
    server, grid = apart(trainer_of(name), tmp_path)
    names = trainer_of(name).data.ids
    with pytest.raises(_KilledError):
        run(server, _Killed(grid.app, names, kind=kind, number=number, after=len(name) % 2 == 0))
    with pytest.raises(_KilledError):
        run(server, _Killed(grid.app, names, kind=FINISH, number=2, after=True))
    run(server, grid)
    check(name, tmp_path)
