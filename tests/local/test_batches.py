"""Batch plans: every example once an epoch, whoever is planned beside."""

from types import SimpleNamespace

import pytest
import torch

from fedmtl.local.batches import plan_batches
from fedmtl.local.solver import LocalSGD
from fedmtl.random import id_key

COUNTS = torch.tensor([23, 10, 10, 9, 1])
FIRST = torch.tensor([100, 0, 40, 60, 77])
KEYS = torch.tensor([id_key(n) for n in "abcde"])


DATA = SimpleNamespace(train=SimpleNamespace(counts=COUNTS, offsets=FIRST), keys=KEYS)


def plan(select=slice(None), *, batch_size=4, epochs=3, round=2, seed=0):
    solver = LocalSGD(lr=0.1, epochs=epochs, batch_size=batch_size)
    return plan_batches(DATA, solver, torch.arange(5)[select], round=round, seed=seed)


def batches(p, client):
    """The list of (indices) of one client's steps, padding removed."""
    out = []
    for step, batch in enumerate(p.batches()):
        if step == int(p.steps[client]):
            break
        out.append(batch.index[client][batch.weight[client] > 0])
    return out


@pytest.mark.parametrize("batch_size", [1, 4, 10, None])
def test_each_epoch_uses_each_example_once_in_batches_of_the_right_size(batch_size):
    p = plan(batch_size=batch_size)
    assert [len(batch.index) for batch in p.batches()] == [
        int((p.steps > step).sum()) for step in range(p.steps.max())
    ]
    for client, count in enumerate(COUNTS.tolist()):
        own = batches(p, client)
        per_epoch = -(-count // (batch_size or count))
        assert len(own) == 3 * per_epoch
        rows = list(range(int(FIRST[client]), int(FIRST[client]) + count))
        orders = []
        for epoch in range(3):
            part = own[epoch * per_epoch : (epoch + 1) * per_epoch]
            assert [len(b) for b in part[:-1]] == [batch_size] * (per_epoch - 1)
            order = torch.cat(part).tolist()
            assert sorted(order) == rows
            orders.append(order)
        if count >= 9 and batch_size:
            assert len({tuple(o) for o in orders}) == 3


def test_a_clients_batches_do_not_depend_on_the_others():
    together = plan()
    for client in range(len(COUNTS)):
        alone = plan(slice(client, client + 1))
        assert all(
            torch.equal(a, b)
            for a, b in zip(batches(together, client), batches(alone, 0), strict=True)
        )


def test_rounds_and_seeds_permute_differently():
    base = torch.cat(batches(plan(), 0))
    assert not torch.equal(base, torch.cat(batches(plan(round=3), 0)))
    assert not torch.equal(base, torch.cat(batches(plan(seed=1), 0)))


@pytest.mark.parametrize("part", [slice(0, 2), slice(1, 4), slice(4, 5)])
def test_a_part_of_a_plan_is_the_plan_of_the_part(part):
    for shared, own in zip(plan().part(part).batches(), plan(part).batches(), strict=True):
        assert torch.equal(shared.index, own.index)
        assert torch.equal(shared.weight, own.weight)
