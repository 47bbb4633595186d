import itertools
import math

import numpy as np
import pytest
import torch
from scipy import stats

from fedmtl.privacy.noise import laws
from fedmtl.privacy.noise.laws import GaussianNoise, L2LaplaceNoise, LaplaceNoise
from fedmtl.privacy.noise.sources import SecureSource, SeededSource
from fedmtl.random import id_key

ALPHA = 1e-6
SOURCES = [SeededSource(3), SecureSource()]
LAWS = [GaussianNoise(1.3), LaplaceNoise(0.7), L2LaplaceNoise(0.4)]
KEYS = torch.tensor([id_key(str(name)) for name in range(20)])
COUNT = 60_000


class Given:
    """A source whose signs and tails are given."""

    name = "given"

    def __init__(self, sign, tail) -> None:
        self.values = np.array(sign, dtype=float), np.array(tail, dtype=float)

    def tails(self, purpose, step, size, keys=None):
        assert self.values[0].shape == ((size,) if keys is None else (len(keys), size))
        return self.values

    def coins(self, purpose, step):
        return SecureSource().coins(purpose, step)


def energy_refuted(noise: np.ndarray, std: float) -> bool:
    """Two-sided chi-square of Gaussian noise."""
    law = stats.chi2(noise.size)
    return not law.ppf(ALPHA / 2) < float((noise**2).sum()) / std**2 < law.isf(ALPHA / 2)


def refuted(sample: np.ndarray, law) -> bool:
    return stats.kstest(sample, law.cdf).pvalue < ALPHA


def coordinates(law, source, clients: bool) -> np.ndarray:
    if clients:
        noise = law.draw_rows(source, "noise", 0, KEYS, COUNT // len(KEYS))
        assert noise.shape == (len(KEYS), COUNT // len(KEYS))
    else:
        noise = law.draw(source, "noise", 0, COUNT)
        assert noise.shape == (COUNT,)
    assert noise.dtype == np.float64
    return noise.ravel()


@pytest.mark.parametrize("clients", [False, True])
@pytest.mark.parametrize("source", SOURCES, ids=lambda source: source.name)
def test_the_law_of_independent_coordinates(source, clients):
    gaussian = coordinates(GaussianNoise(1.3), source, clients)
    assert not refuted(gaussian, stats.norm(scale=1.3))
    assert not energy_refuted(gaussian, 1.3)
    laplace = coordinates(LaplaceNoise(0.7), source, clients)
    assert not refuted(laplace, stats.laplace(scale=0.7))
    total = stats.gamma(COUNT)  # the sum of |x| / b
    assert total.ppf(ALPHA / 2) < np.abs(laplace).sum() / 0.7 < total.isf(ALPHA / 2)
    for noise in (gaussian, laplace):
        half = COUNT // 2
        for power in (1, 2):
            left, right = (
                np.abs(part) ** power * np.sign(part) ** power
                for part in (noise[:half], noise[half:])
            )
            assert abs(np.corrcoef(left, right)[0, 1]) < 6 / math.sqrt(half)
            assert abs(np.corrcoef(left[1:], left[:-1])[0, 1]) < 6 / math.sqrt(half)


@pytest.mark.parametrize("scale", [0.95, 1.05])
def test_the_checks_refute_a_wrong_scale(scale):
    gaussian = coordinates(GaussianNoise(1.3 * scale), SeededSource(3), True)
    assert energy_refuted(gaussian, 1.3)
    laplace = coordinates(LaplaceNoise(0.7 * scale), SeededSource(3), True)
    total = stats.gamma(COUNT)
    assert not total.ppf(ALPHA / 2) < np.abs(laplace).sum() / 0.7 < total.isf(ALPHA / 2)
    assert refuted(gaussian, stats.laplace(scale=1.3 / math.sqrt(2)))


def many_vectors(source, dimension: int, clients: int = 20_000) -> np.ndarray:
    return L2LaplaceNoise(0.4).draw_rows(source, "noise", 0, torch.arange(clients), dimension)


@pytest.mark.parametrize("source", SOURCES, ids=lambda source: source.name)
@pytest.mark.parametrize("dimension", [2, 3, 10])
def test_the_law_of_l2_laplace(source, dimension):
    noise = many_vectors(source, dimension)
    radius = np.linalg.norm(noise, axis=1)
    assert not refuted(radius, stats.gamma(dimension, scale=0.4))
    assert refuted(radius, stats.gamma(dimension, scale=0.4 * 1.06))
    unit = noise / radius[:, None]
    axis = np.random.default_rng(0).standard_normal(dimension)
    half = (dimension - 1) / 2
    for projection in (unit[:, 0], unit[:, -1], unit @ axis / np.linalg.norm(axis)):
        assert not refuted((projection + 1) / 2, stats.beta(half, half))
        assert abs(np.corrcoef(projection, radius)[0, 1]) < 6 / math.sqrt(len(radius))
    moments = unit.T @ unit / len(unit) * dimension - np.eye(dimension)
    assert np.abs(moments).max() < 8 / math.sqrt(len(unit))


# Sizes


@pytest.mark.parametrize("law", LAWS, ids=lambda law: type(law).__name__)
def test_std_is_the_root_mean_square_of_a_coordinate(law):
    dimension, clients = 12, 20_000
    noise = law.draw_rows(SeededSource(0), "noise", 0, torch.arange(clients), dimension)
    energy = (noise**2).mean(1)
    claim = law.std(1.0, dimension) ** 2
    assert abs(energy.mean() - claim) < 6 * energy.std() / math.sqrt(clients)
    assert abs(energy.mean() / claim - 1) < 0.05
    assert law.std(3.0, dimension) == pytest.approx(3.0 * law.std(1.0, dimension))


# The tails of the laws, by formulas that do not invert anything


TAILS = [2.0**-129, 1e-38, 1e-20, 1e-9, 1e-3, 0.1, 0.4, 0.5 - 2.0**-54]


def test_deep_tails_of_coordinates():
    for sign in (-1, 1):
        for tail in TAILS:
            source = Given([sign], [tail])
            laplace = float(LaplaceNoise(0.7).draw(source, "noise", 0, 1)[0])
            assert 0.5 * math.exp(-abs(laplace) / 0.7) == pytest.approx(tail, rel=1e-13)
            gaussian = float(
                GaussianNoise(1.3).draw_rows(Given([[sign]], [[tail]]), "noise", 0, KEYS[:1], 1)[
                    0, 0
                ]
            )
            assert 0.5 * math.erfc(abs(gaussian) / 1.3 / math.sqrt(2)) == pytest.approx(
                tail, rel=1e-11
            )
            if tail < 0.4:
                assert math.copysign(1, laplace) == math.copysign(1, gaussian) == -sign


def test_an_l2_laplace_vector_is_a_direction_of_normals_and_a_sum_of_exponentials():
    for dimension in (1, 2, 3, 10, 465):
        for tail in TAILS:
            law, pairs = L2LaplaceNoise(0.4), (dimension + 1) // 2
            rng = np.random.default_rng(dimension)
            tails, signs = (
                rng.uniform(0, 0.5, dimension + pairs),
                rng.choice([-1.0, 1.0], dimension + pairs),
            )
            tails[0] = tail
            noise = law.draw(Given(signs, tails), "noise", 0, dimension)
            exponentials = [
                -math.log(2 * t) for t in tails[:dimension]
            ]  # P(e > x) = exp(-x) = 2 tail, to the last tail
            assert float(np.linalg.norm(noise)) == pytest.approx(
                0.4 * math.fsum(exponentials), rel=1e-12
            )
            angles = [
                2 * math.pi * s * t
                for s, t in zip(signs[dimension:], tails[dimension:], strict=True)
            ]
            lengths = [math.sqrt(e) for e in exponentials[:pairs]]
            normals = [
                r * f(a) for f in (math.cos, math.sin) for r, a in zip(lengths, angles, strict=True)
            ][:dimension]
            np.testing.assert_allclose(
                noise / np.linalg.norm(noise), normals / np.linalg.norm(normals), atol=1e-12
            )


# Addresses


@pytest.mark.parametrize("dimension", [1, 3, 10])
@pytest.mark.parametrize("law", LAWS, ids=lambda law: type(law).__name__)
def test_noise_belongs_to_the_client_its_use_and_the_repetition_whatever_is_beside_it(
    law, dimension, monkeypatch
):
    sources = [SeededSource(3, replicate) for replicate in range(5)]
    uses = torch.arange(200).reshape(40, 5) % 7 + 2**31
    keys = KEYS[torch.arange(200) % len(KEYS)].reshape(40, 5)
    whole = law.draw_each(sources, "noise", uses, keys, dimension)
    assert whole.shape == (40, 5, dimension)
    for cuts in ([0, 1, 2, 3, 40], [0, 17, 40]):
        parts = [
            law.draw_each(sources, "noise", uses[a:b], keys[a:b], dimension)
            for a, b in itertools.pairwise(cuts)
        ]
        assert np.array_equal(np.concatenate(parts), whole)
    for r, source in enumerate(sources):
        part = slice(7, 27)
        single = law.draw_each(
            [source], "noise", uses[part, r : r + 1], keys[part, r : r + 1], dimension
        )
        assert np.array_equal(single[:, 0], whole[part, r])
        rows = law.draw_rows(source, "noise", int(uses[8, r]), keys[8:9, r], dimension)
        assert np.array_equal(rows[0], whole[8, r])
    for elements in (1, 40, 200):  # the last block is shorter
        monkeypatch.setattr(laws, "BLOCK_ELEMENTS", elements)
        assert np.array_equal(law.draw_each(sources, "noise", uses, keys, dimension), whole)


# Accounting


def losses(law, dimension: int, shift: np.ndarray) -> np.ndarray:
    noise = law.draw_rows(SeededSource(1), "noise", 0, torch.arange(20_000), dimension)
    if law.norm == "l1":
        return (np.abs(noise - shift) - np.abs(noise)).sum(1) / law.multiplier
    return (np.linalg.norm(noise - shift, axis=1) - np.linalg.norm(noise, axis=1)) / law.multiplier


@pytest.mark.parametrize(
    "law", [LaplaceNoise(0.7), L2LaplaceNoise(0.7)], ids=lambda law: type(law).__name__
)
def test_pure_epsilon(law):
    """Densities are as claimed: the mean of exp(-loss) is 1, and no loss is above epsilon."""
    dimension = 4
    axis = np.zeros(dimension)
    axis[1] = 1.0
    even = np.ones(dimension) / np.linalg.norm(np.ones(dimension), 1 if law.norm == "l1" else 2)
    for shift in (axis, even):
        loss = losses(law, dimension, shift)
        assert loss.max() <= (1 + 1e-12) / law.multiplier
        assert loss.max() > 0.8 / law.multiplier
        ratio = np.exp(-loss)
        assert abs(ratio.mean() - 1) < 6 * ratio.std() / math.sqrt(ratio.size)
