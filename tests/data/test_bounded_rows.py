"""Public bounds and the deal to clients, against plain loops."""

from __future__ import annotations

import numpy as np
import pytest

from fedmtl.data import Domain
from fedmtl.data.readers.bounded_rows import assemble, check_share, clip_rows, clip_targets, deal, with_intercept
from fedmtl.errors import ConfigError


@pytest.mark.parametrize(("l1", "l2"), [(2.0, None), (None, 1.0), (2.0, 1.0), (0.1, 0.07), (1e-3, 1e3), (None, None)])
def test_clipped_rows_are_those_of_a_loop_and_never_cross_a_bound(l1, l2):
    rng = np.random.default_rng(0)
    x = rng.standard_normal((500, 7)) * np.exp(rng.uniform(-8, 8, (500, 1)))
    x[0] = 0
    x[1] = [0.1] * 7
    x[2, :] = 0
    x[2, 3] = 1e30
    got = clip_rows(x, l1=l1, l2=l2)
    assert got.dtype == np.float32
    for row, out in zip(x, got.astype(np.float64), strict=True):
        size1, size2 = sum(abs(v) for v in row), sum(v * v for v in row) ** 0.5
        scale = min([1.0] + [b / s for b, s in ((l1, size1), (l2, size2)) if b is not None and s > 0])
        np.testing.assert_allclose(out, row * scale, rtol=3e-6, atol=1e-30)
        assert l1 is None or sum(abs(v) for v in out) <= l1
        assert l2 is None or sum(v * v for v in out) <= l2**2


def test_targets_and_the_intercept():
    y = clip_targets(np.array([-9.0, -0.05, 0.0, 0.1, 9.0]), 0.1)
    assert (np.abs(y.astype(np.float64)) <= 0.1).all()
    np.testing.assert_allclose(y, [-0.1, -0.05, 0, 0.1, 0.1], rtol=2e-6)
    np.testing.assert_array_equal(with_intercept(np.array([[2.0, 3.0]])), [[2, 3, 1]])


def test_equal_parts_use_every_row_once():
    parts = deal(101, 4, None, 3, where="t", least=2)
    assert list(parts) == ["owner-0", "owner-1", "owner-2", "owner-3"]
    assert [len(p) for p in parts.values()] == [26, 25, 25, 25]
    np.testing.assert_array_equal(np.sort(np.concatenate(list(parts.values()))), np.arange(101))
    other = deal(101, 4, None, 4, where="t", least=2)
    assert not np.array_equal(parts["owner-0"], other["owner-0"])
    again = deal(101, 4, None, 3, where="t", least=2)
    assert all(np.array_equal(parts[k], again[k]) for k in parts)


def test_the_deal_is_uniform():
    hits = np.zeros(20)
    for seed in range(2000):
        hits[deal(20, 1, 5, seed, where="t", least=2)["owner-0"]] += 1
    assert np.abs(hits - 500).max() < 5 * (2000 * 0.25 * 0.75) ** 0.5  # five standard deviations


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


def test_clients_of_one_record_need_the_public_test_rows():
    check_share("t", None, 1)
    with pytest.raises(ConfigError, match=r"t\.min_examples is 1, .*test_fraction=None"):
        check_share("t", 0.2, 1)
    with pytest.raises(ConfigError, match="test_fraction is 0"):
        check_share("t", 0.0, 2)
    with pytest.raises(ConfigError, match=r"t\.min_examples is 0"):
        check_share("t", None, 0)


def test_clients_without_a_test_part_train_on_all_rows_and_are_tested_on_the_public_ones():
    x, y = np.arange(16, dtype=np.float32).reshape(8, 2), np.arange(8, dtype=np.float32)
    x[6:], y[6:] = 50, (7, 8)
    parts = {"a": np.array([4]), "b": np.array([0, 5])}
    out = assemble(
        x, y, parts, slice(6, None), Domain(1, 1, 1), test_fraction=None, seed=0, classes=None, name="t", notes=("n",)
    )
    assert out.train.y.tolist() == [4, 0, 5]
    assert out.train.x.tolist() == [[8, 9], [0, 1], [10, 11]]
    assert out.train.offsets.tolist() == [0, 1, 3]
    assert out.test.y.tolist() == [7, 8, 7, 8]
    assert (out.test.x == 50).all()
    assert out.test.offsets.tolist() == [0, 2, 4]
    assert (out.public.y.tolist(), out.public.offsets.tolist(), out.notes) == ([7, 8], [0, 2], ("n",))
