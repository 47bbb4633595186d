"""Partitioners: every example once, the stated distributions, keyed by the seed."""

import numpy as np
import pytest
import scipy.sparse
import torch

from fedmtl.data import Dirichlet, Shards, from_partition
from fedmtl.errors import ConfigError, DataError

from .rows import rows_of

LABELS = np.random.default_rng(0).integers(0, 10, 6000)


def partitions():
    return {
        "dirichlet": Dirichlet(30, 0.5).deal(LABELS),
        "shards": Shards(30).deal(LABELS),
    }


@pytest.mark.parametrize("name", partitions())
def test_every_example_is_used_exactly_once(name):
    parts = partitions()[name]
    assert sorted(np.concatenate(list(parts.values())).tolist()) == list(range(6000))
    assert all((np.diff(part) > 0).all() for part in parts.values())
    assert len(parts) == 30


def shares(parts):
    counts = np.array([np.bincount(LABELS[part], minlength=10) for part in parts.values()])
    return counts / counts.sum(0)


def test_dirichlet_shares_have_the_moments_of_the_distribution():
    # a share of a symmetric Dirichlet over n clients has mean 1/n and variance (n - 1) / (n^2 (n alpha + 1))
    n = 10
    for alpha in (0.3, 1.0, 100.0):
        draws = np.concatenate(
            [shares(Dirichlet(n, alpha, min_examples=1).deal(LABELS, seed)) for seed in range(60)]
        )
        variance = (n - 1) / (n**2 * (n * alpha + 1))
        assert draws.mean() == pytest.approx(1 / n)
        assert draws.var() == pytest.approx(variance, rel=0.12, abs=2e-6)


def test_dirichlet_is_keyed_by_the_seed_and_uses_random_examples():
    first, again, other = (Dirichlet(10, 1.0).deal(LABELS, seed) for seed in (1, 1, 2))
    assert all(np.array_equal(first[k], again[k]) for k in first)
    assert any(len(first[k]) != len(other[k]) for k in first)
    zeros = np.flatnonzero(LABELS == 0)
    part = np.intersect1d(first["client-0"], zeros)
    assert not np.array_equal(part, zeros[: len(part)])


def test_dirichlet_gives_every_client_the_asked_minimum():
    for seed in range(20):
        assert (
            min(map(len, Dirichlet(10, 0.2, min_examples=3).deal(LABELS[:300], seed).values())) >= 3
        )


def test_shards_hold_few_labels_and_equal_numbers():
    parts = Shards(30, shards_per_client=2).deal(LABELS)
    assert {len(part) for part in parts.values()} == {200}
    # a shard of 100 sorted examples spans at most 2 of labels that occur about 600 times each
    labels = [len(set(LABELS[part])) for part in parts.values()]
    assert max(labels) <= 4
    assert np.mean(labels) < 3
    uneven = Shards(5).deal(LABELS[:103])
    assert {len(part) for part in uneven.values()} <= {20, 21, 22}


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (
            lambda: Dirichlet(4000, 1.0).deal(LABELS),
            ConfigError,
            r"only 6,000 examples; ask for fewer clients",
        ),
        (
            lambda: Dirichlet(20, 0.01).deal(LABELS[:40]),
            ConfigError,
            r"alpha is 0.01: in 100 draws.*raise alpha",
        ),
        (
            lambda: Dirichlet(2, 1.0).deal(LABELS[:, None]),
            DataError,
            r"y has shape \(6000, 1\); a partition needs",
        ),
        (
            lambda: Shards(4000).deal(LABELS),
            ConfigError,
            r"4,000: with 2 shards each they need 8,000 examples",
        ),
    ],
)
def test_impossible_partitions_are_refused(call, error, message):
    with pytest.raises(error, match=message):
        call()


def test_from_partition_gives_each_client_its_rows():
    x = torch.arange(6000.0)[:, None]
    parts = Dirichlet(12, 0.5).deal(LABELS)
    data = from_partition(x, LABELS, parts, classes=10, name="pool")
    assert data.ids == tuple(parts)
    for i, part in enumerate(parts.values()):
        assert rows_of(data, i) == [(row, LABELS[row]) for row in part]
    sparse = from_partition(scipy.sparse.csr_array(x.numpy()), LABELS, parts, classes=10)
    index = torch.arange(50)
    assert torch.equal(sparse.gather("train", index)[0], data.gather("train", index)[0])


@pytest.mark.parametrize(
    ("parts", "message"),
    [
        ({}, "names no clients; at least one is needed"),
        ({"a": [0, 1], "b": [1, 2]}, r"client 'b' has a row that is used twice"),
        ({"a": [0, 0]}, r"client 'a' has a row that is used twice"),
        ({"a": [0, 9]}, r"client 'a' has a row outside 0\.\.3"),
        ({"a": [-1, 0]}, r"client 'a' has a row outside 0\.\.3"),
        ({"a": [0, 1], "b": []}, r"client 'b' has no examples"),
    ],
)
def test_bad_parts_are_refused(parts, message):
    with pytest.raises(DataError, match=rf"pool: .*{message}"):
        from_partition(torch.rand(4, 2), torch.zeros(4, dtype=torch.int64), parts, name="pool")
