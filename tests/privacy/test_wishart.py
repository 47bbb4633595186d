import math

import numpy as np
import pytest
import torch
from scipy import stats

from fedmtl.algorithms.mp_mtl.published import WishartNoise
from fedmtl.privacy.accounting.losses import PureDpEvent
from fedmtl.privacy.noise.sources import SecureSource, SeededSource
from fedmtl.privacy.noise.symmetric import smat

ALPHA = 1e-6
COUNT = 3000


def matrices(epsilon: float, source, d: int) -> np.ndarray:
    law, size = WishartNoise(1 / epsilon), d * (d + 1) // 2
    return smat(torch.from_numpy(np.stack([law.draw(source, "noise", step, size) for step in range(COUNT)]))).numpy()


@pytest.mark.parametrize("d", [1, 2, 10])
@pytest.mark.parametrize("epsilon", [0.1, 1.0, 3.0])
def test_outputs_that_a_neighbour_cannot_make(d, epsilon):
    """With one more client v, ||v|| = K, the output A + E is impossible with probability 1 - exp(-epsilon)."""
    clip_norm = 0.7
    v = np.random.default_rng(d).standard_normal(d)
    v *= clip_norm / np.linalg.norm(v)
    noise = clip_norm**2 * matrices(epsilon, SeededSource(1), d)
    impossible = np.einsum("i,ni->n", v, np.linalg.solve(noise, np.broadcast_to(v[:, None], (COUNT, d, 1)))[..., 0]) > 1
    # the same event without an inverse: what is left when the neighbour's sum is taken off is not positive definite
    assert np.array_equal(impossible, np.linalg.eigvalsh(noise - np.outer(v, v))[:, 0] < 0)
    claim = 1 - math.exp(-epsilon)
    assert stats.binomtest(int(impossible.sum()), COUNT, claim).pvalue > ALPHA
    # so the claimed pure epsilon is false: such outputs do happen
    assert stats.binomtest(int(impossible.sum()), COUNT).proportion_ci(1 - ALPHA).low > 0.5 * claim


@pytest.mark.parametrize("source", [SeededSource(3), SecureSource()], ids=lambda source: source.name)
def test_the_law(source):
    d, epsilon = 4, 0.5
    noise = matrices(epsilon, source, d)
    assert np.array_equal(noise, noise.transpose(0, 2, 1))
    # tr E = (1 / (2 epsilon)) chi-square with d (d + 1) degrees of freedom
    assert stats.kstest(2 * epsilon * np.trace(noise, axis1=1, axis2=2), stats.chi2(d * (d + 1)).cdf).pvalue > ALPHA
    # a quadratic form has d + 1 degrees of freedom
    v = np.array([0.5, -0.5, 0.5, 0.5])
    assert stats.kstest(2 * epsilon * (noise @ v @ v), stats.chi2(d + 1).cdf).pvalue > ALPHA
    mean = stats.wishart(df=d + 1, scale=np.eye(d) / (2 * epsilon)).mean()
    np.testing.assert_allclose(noise.mean(0), mean, atol=6 * math.sqrt(2 * (d + 1) / COUNT) / (2 * epsilon))


def test_the_event_is_what_the_paper_claims():
    assert WishartNoise(0.25).event(30) == PureDpEvent(4.0)
    assert WishartNoise.refuted is not None
