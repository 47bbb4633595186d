"""Local training of the clients of a cohort: each is trained once, and one without a step keeps its start."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from fedmtl import Execution, LocalSGD, local
from fedmtl.algorithms import ClientBatch
from fedmtl.data import FederatedDataset
from fedmtl.local import Executor, Layout
from fedmtl.local.clients import Piece, _models, pieces_of, train_on_batches
from fedmtl.local.losses import resolve_loss
from fedmtl.local.train import LocalTraining
from tests.algorithms.harness import problem_of

COUNTS = [5, 40, 3, 17, 29]


def problem(chunk):
    random = np.random.default_rng(0)
    rows = {f"c{n}": (random.normal(size=(n, 4)), random.normal(size=n)) for n in COUNTS}
    data = FederatedDataset.from_tensors(rows, test_fraction=0.3, name="ragged")
    return problem_of(data, rounds=1, execution=Execution(chunk=chunk, processes=1))


@pytest.mark.parametrize("chunk", [1, 16])
def test_a_client_is_trained_once_also_where_others_fill_up_a_stack(chunk, monkeypatch):
    parts: list[tuple[Tensor, int]] = []
    monkeypatch.setattr(
        local.clients,
        "_models",
        lambda run, executor, steps, finished: parts.extend((p, len(rows)) for p, rows in finished),
    )
    whole = problem(chunk)
    start = torch.zeros(whole.dimension, dtype=torch.float64)
    run = LocalTraining(whole.data, whole.loss, LocalSGD(lr=0.1, batch_size=4), 0, start)
    clients = torch.arange(len(COUNTS))
    train_on_batches(run, whole.executor, clients, seed=0)
    places = torch.cat([place for place, _ in parts])
    assert places.sort().values.tolist() == clients.tolist()
    assert all(len(place) == count for place, count in parts)


@pytest.mark.parametrize("start", [torch.ones(4), torch.arange(12.0).reshape(3, 4)])
def test_a_client_without_a_step_keeps_its_start(start):
    whole = problem(1)
    run = LocalTraining(whole.data, whole.loss, LocalSGD(lr=0.1), 0, start)
    trained = torch.full((1, 4), 7.0, dtype=torch.float64)
    models = _models(run, whole.executor, torch.tensor([0, 3, 0]), [(torch.tensor([1]), trained)])
    assert torch.equal(models[[0, 2]].to(start), start.expand(3, 4)[[0, 2]])
    assert torch.equal(models[1], trained[0])


def test_a_part_of_a_batch_has_the_starts_of_its_clients():
    models = torch.arange(8.0).reshape(2, 4)
    clients = torch.tensor([3, 5, 9])
    batch = ClientBatch(problem(1), clients, {"global": models}, starts=torch.tensor([1, 0, 1]))
    assert torch.equal(batch.part(torch.tensor([2, 1])).shared, models[[1, 0]])
    assert torch.equal(batch.of(Piece(torch.tensor([9, 3, 5])), {}).shared, models[[1, 1, 0]])


@pytest.mark.parametrize("chunk", [1, 4, 16])
def test_a_piece_has_the_models_of_a_training_by_itself_whatever_the_solver(chunk):
    """Batches that are planned for a piece are those of its solver and its round, and no other."""
    whole = problem(chunk)
    solver = LocalSGD(lr=0.1, batch_size=4)
    clients = torch.arange(len(COUNTS))
    pieces = list(
        pieces_of(whole.data, solver, whole.executor, clients, size=1, seed=whole.seed, round=3)
    )
    assert len(pieces) > 1 or chunk > len(COUNTS)
    mine = ClientBatch(whole, clients, {"global": whole.initial}, round=3)
    cases = [(solver, 3), (LocalSGD(lr=0.1, batch_size=4, epochs=2), 3), (solver, 4)]
    for used, number in cases:
        mine = replace(mine, round=number)
        models = mine.train(used, mine.shared)
        for piece in pieces:
            part = mine.of(piece, {})
            assert torch.equal(part.train(used, part.shared), models[piece.clients])


def test_sigmoids_round_alike_in_stacks_of_any_number_of_clients():
    """PyTorch computes the elements that fill no vector register by other code: who else is in a stack must not choose
    for which client that is."""
    random = np.random.default_rng(0)
    rows = {f"c{n}": (3 * random.normal(size=(12, 4)), random.normal(size=12)) for n in range(12)}
    data = FederatedDataset.from_tensors(rows, test_fraction=0.3)
    module = nn.Sequential(nn.Linear(4, 7), nn.Sigmoid(), nn.Linear(7, 1))
    executor = Executor(
        Execution(chunk=12, processes=1), module, device=torch.device("cpu"), dtype=torch.float32
    )
    start = Layout.of(module).flatten(module)
    run = LocalTraining(
        data, resolve_loss("mse"), LocalSGD(lr=0.1, epochs=20, batch_size=5), 0, start
    )
    models = train_on_batches(run, executor, torch.arange(12), seed=0)
    assert bool(torch.isfinite(models).all())
    for count in range(1, 12):
        some = train_on_batches(run, executor, torch.arange(count), seed=0)
        assert torch.equal(some, models[:count])
