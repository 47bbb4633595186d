"""The deal of rows to clients, against plain loops."""

import numpy as np
import pytest

from fedmtl.data.readers.dealing import clip_targets, deal
from fedmtl.errors import ConfigError


def test_targets_are_clipped_within_their_bound():
    y = clip_targets(np.array([-9.0, -0.05, 0.0, 0.1, 9.0]), 0.1)
    assert (np.abs(y.astype(np.float64)) <= 0.1).all()
    np.testing.assert_allclose(y, [-0.1, -0.05, 0, 0.1, 0.1], rtol=2e-6)


def test_equal_parts_use_every_row_once():
    parts = deal(101, 4, None, 3, where="t", least=2)
    assert list(parts) == ["owner-0", "owner-1", "owner-2", "owner-3"]
    assert [len(p) for p in parts.values()] == [26, 25, 25, 25]
    np.testing.assert_array_equal(np.sort(np.concatenate(list(parts.values()))), np.arange(101))
    other = deal(101, 4, None, 4, where="t", least=2)
    assert not np.array_equal(parts["owner-0"], other["owner-0"])
    again = deal(101, 4, None, 3, where="t", least=2)
    assert all(np.array_equal(parts[k], again[k]) for k in parts)


def test_clients_of_a_fixed_size_do_not_depend_on_how_many_there_are():
    few, many = deal(1000, 3, 90, 0, where="t", least=2), deal(1000, 10, 90, 0, where="t", least=2)
    assert all(np.array_equal(few[k], many[k]) for k in few)
    rows = np.concatenate(list(many.values()))
    assert len(rows) == len(set(rows)) == 900
    assert [len(p) for p in deal(50, 3, (3, 30, 2), 0, where="t", least=2).values()] == [3, 30, 2]


@pytest.mark.parametrize(
    ("clients", "sizes", "message"),
    [
        (0, None, r"t\.clients is 0"),
        (2, (5, 5, 5), r"t\.sizes has 3 numbers, but clients is 2"),
        (2, (5, 0), r"t\.sizes is 0"),
        (2, 2.5, r"t\.sizes is 2\.5"),
        (2, "ab", r"t\.sizes is 'ab'"),
        (2, 1, r"t: a client would have 1 of the 20 private rows; each needs at least 2"),
        (15, None, r"a client would have 1 of the 20 private rows"),
        (3, 7, r"ask for 21 rows, but there are 20 private rows"),
    ],
)
def test_impossible_deals_are_refused(clients, sizes, message):
    with pytest.raises(ConfigError, match=message):
        deal(20, clients, sizes, 0, where="t", least=2)
