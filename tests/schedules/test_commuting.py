"""Blocks of commuting events, against a search one event at a time."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from scipy.sparse import csr_array

from fedmtl.errors import ConfigError
from fedmtl.schedules import Adjacency, block_bounds, bounds_of_each


def brute(client, limit, clash):
    """Cuts found by comparing every event with every event of its block."""
    cuts, start = [0], 0
    for s in range(1, client.shape[1]):
        pairs = [(row[s], row[j]) for row in client.tolist() for j in range(start, s)]
        if s - start == limit or any(a >= 0 and b >= 0 and (a == b or clash(a, b)) for a, b in pairs):
            cuts.append(s)
            start = s
    return [*cuts, client.shape[1]] if client.shape[1] else [0]


@pytest.mark.parametrize("replicates", [1, 3])
@pytest.mark.parametrize("limit", [1, 5, 1000])
@pytest.mark.parametrize("density", [0.0, 0.02, 0.3, 1.0])
def test_blocks_of_a_graph_are_those_of_a_search(replicates, limit, density):
    rng = np.random.default_rng(int(100 * density) + limit)
    client = torch.from_numpy(rng.integers(-1, 40, (replicates, 250)))
    dense = np.triu(rng.random((40, 40)) < density).astype(float)  # one triangle and the diagonal
    found = block_bounds(client, csr_array(dense), limit)
    expected = brute(client, limit, lambda a, b: dense[a, b] + dense[b, a] > 0)
    assert found.tolist() == expected
    assert block_bounds(client, Adjacency.of(csr_array(dense)), limit).tolist() == expected
    assert density == 0.3 or limit == 1 or max(np.diff(expected)) > 1 or density == 1.0


@pytest.mark.parametrize("conflicts", ["none", "all", csr_array(np.eye(40, k=3))])
def test_bounds_of_each_replicate_are_those_of_its_own(conflicts):
    client = torch.from_numpy(np.random.default_rng(0).integers(-1, 40, (5, 250)))
    found = bounds_of_each(client, conflicts, 9)
    assert [own.tolist() for own in found] == [block_bounds(row[None], conflicts, 9).tolist() for row in client]
    assert len({len(own) for own in found}) > 1 or conflicts == "all"


@pytest.mark.parametrize("limit", [1, 4, 100])
def test_without_conflicts_a_client_still_acts_once_a_block(limit):
    client = torch.from_numpy(np.random.default_rng(0).integers(-1, 60, (2, 300)))
    found = block_bounds(client, "none", limit).tolist()
    assert found == brute(client, limit, lambda a, b: False)
    assert block_bounds(client, csr_array((60, 60)), limit).tolist() == found


def test_all_conflict():
    client = torch.arange(7)[None]
    assert block_bounds(client, "all", 100).tolist() == list(range(8))


def test_stored_zeros_are_no_conflict():
    stored = csr_array((np.array([0.0, 2.0]), (np.array([0, 1]), np.array([1, 2]))), shape=(3, 3))
    client = torch.tensor([[0, 1, 2]])
    assert block_bounds(client, stored, 9).tolist() == [0, 2, 3]


@pytest.mark.parametrize("chunk", [1, 7, 50])
@pytest.mark.parametrize("limit", [3, 50])
def test_the_pieces_of_a_long_table_agree(monkeypatch, chunk, limit):
    rng = np.random.default_rng(1)
    client = torch.from_numpy(rng.integers(-1, 90, (2, 400)))
    dense = (rng.random((90, 90)) < 0.01).astype(float)
    monkeypatch.setattr("fedmtl.schedules.commuting._CHUNK", chunk)
    expected = brute(client, limit, lambda a, b: dense[a, b] + dense[b, a] > 0)
    assert block_bounds(client, csr_array(dense), limit).tolist() == expected
    assert max(np.diff(expected)) > 2


def test_bad_conflicts_are_refused():
    table = torch.tensor([[0, 4]])
    for conflicts, says in (
        ("some", "accepted: 'none', 'all'"),
        (csr_array((3, 4)), r"shape \(3, 4\)"),
        (csr_array((4, 4)), "above client 4"),
    ):
        with pytest.raises(ConfigError, match=says):
            block_bounds(table, conflicts, 5)
    with pytest.raises(ConfigError, match="limit is 0"):
        block_bounds(table, "none", 0)
