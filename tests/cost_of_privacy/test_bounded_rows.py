"""Public bounds, against plain loops."""

import numpy as np
import pytest

from benchmarks.reproduce.cost_of_privacy.readers.bounded_rows import clip_rows, with_intercept


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


def test_the_intercept():
    np.testing.assert_array_equal(with_intercept(np.array([[2.0, 3.0]])), [[2, 3, 1]])
