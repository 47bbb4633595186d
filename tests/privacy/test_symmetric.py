import math

import numpy as np
import pytest
import torch
from scipy import stats

from fedmtl.algorithms.mp_mtl.published import WishartNoise
from fedmtl.errors import ConfigError
from fedmtl.privacy.accounting.losses import PureDpEvent
from fedmtl.privacy.noise.laws import GaussianNoise, L2LaplaceNoise
from fedmtl.privacy.noise.sources import SecureSource, SeededSource
from fedmtl.privacy.noise.symmetric import smat, svec

ALPHA = 1e-6
SOURCES = [SeededSource(3), SecureSource()]
LAWS = [GaussianNoise(1.3), L2LaplaceNoise(0.4)]


def symmetric(*shape: int, seed: int = 0) -> torch.Tensor:
    half = torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))
    return half + half.mT


def matrices(law, source, d: int, count: int) -> np.ndarray:
    size = d * (d + 1) // 2
    return smat(torch.from_numpy(np.stack([law.draw(source, "noise", step, size) for step in range(count)]))).numpy()


# The isometry


def test_svec_entry_by_entry():
    matrix = symmetric(4, 4)
    expected = [matrix[i, j] * (1 if i == j else math.sqrt(2)) for i in range(4) for j in range(i, 4)]
    assert torch.allclose(svec(matrix), torch.stack(expected), rtol=1e-15)


@pytest.mark.parametrize("d", [1, 2, 7])
def test_svec_keeps_inner_products_and_smat_undoes_it(d):
    a, b = symmetric(3, d, d), symmetric(3, d, d, seed=1)
    assert svec(a).shape == (3, d * (d + 1) // 2)
    expected = torch.stack([torch.trace(x @ y) for x, y in zip(a, b, strict=True)])
    assert torch.allclose((svec(a) * svec(b)).sum(-1), expected, rtol=1e-12)
    assert torch.allclose(smat(svec(a)), a, rtol=1e-15)
    assert torch.equal(smat(svec(a)), smat(svec(a)).mT)
    vector = torch.randn(2, d * (d + 1) // 2)
    assert torch.allclose(svec(smat(vector)), vector)
    assert smat(vector).dtype == vector.dtype


def test_shapes_are_checked():
    with pytest.raises(ConfigError, match="svec"):
        svec(torch.zeros(2, 3))
    with pytest.raises(ConfigError, match="smat"):
        smat(torch.zeros(5))


# Wishart noise, and what its paper claims


COUNT = 3000


@pytest.mark.parametrize("d", [1, 2, 10])
@pytest.mark.parametrize("epsilon", [0.1, 1.0, 3.0])
def test_outputs_that_a_neighbour_cannot_make(d, epsilon):
    """With one more client v, ||v|| = K, the output A + E is impossible with probability 1 - exp(-epsilon)."""
    clip_norm = 0.7
    v = np.random.default_rng(d).standard_normal(d)
    v *= clip_norm / np.linalg.norm(v)
    noise = clip_norm**2 * matrices(WishartNoise(1 / epsilon), SeededSource(1), d, COUNT)
    # what is left when the neighbour's sum is taken off is not positive definite
    impossible = np.linalg.eigvalsh(noise - np.outer(v, v))[:, 0] < 0
    claim = 1 - math.exp(-epsilon)
    assert stats.binomtest(int(impossible.sum()), COUNT, claim).pvalue > ALPHA
    # so the claimed pure epsilon is false: such outputs do happen
    assert stats.binomtest(int(impossible.sum()), COUNT).proportion_ci(1 - ALPHA).low > 0.5 * claim


def test_the_event_is_what_the_paper_claims():
    assert WishartNoise(0.25).event(30) == PureDpEvent(4.0)
    assert WishartNoise.refuted is not None
