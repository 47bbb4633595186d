import math

import numpy as np
import pytest
import torch
from scipy import stats

from fedmtl.contrib.published.mp_mtl import WishartNoise
from fedmtl.errors import ConfigError
from fedmtl.privacy import (
    ClientPrivacy,
    FixedCohort,
    FullParticipation,
    PoissonSampling,
    ReleasePlan,
)
from fedmtl.privacy.accounting.loss_laws import PureDpEvent
from fedmtl.privacy.binding import bind_releases
from fedmtl.privacy.noise.laws import GaussianNoise, L2LaplaceNoise
from fedmtl.privacy.noise.sources import SecureSource, SeededSource
from fedmtl.privacy.noise.symmetric import outer_sensitivity, smat, svec
from fedmtl.privacy.release import Form
from fedmtl.privacy.sums import outer_product_sum

ALPHA = 1e-6
SOURCES = [SeededSource(3), SecureSource()]
LAWS = [GaussianNoise(1.3), L2LaplaceNoise(0.4)]


def symmetric(*shape: int, seed: int = 0) -> torch.Tensor:
    half = torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))
    return half + half.mT


def matrices(law, source, d: int, count: int) -> np.ndarray:
    size = d * (d + 1) // 2
    return smat(
        torch.from_numpy(np.stack([law.draw(source, "noise", step, size) for step in range(count)]))
    ).numpy()


# The isometry


def test_svec_entry_by_entry():
    matrix = symmetric(4, 4)
    expected = [
        matrix[i, j] * (1 if i == j else math.sqrt(2)) for i in range(4) for j in range(i, 4)
    ]
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


# The laws


# Sensitivity, by search


def largest_move(clip_norm: float, relation: str, size) -> float:
    """Largest ``size(w w^T - u u^T)`` found over ||w||, ||u|| <= K (u = 0 for add/remove), by gradient ascent."""
    w, u = (
        torch.randn(
            200, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(seed)
        ).requires_grad_()
        for seed in (0, 1)
    )
    optimizer = torch.optim.Adam([w, u], lr=0.05)

    def moves():
        a, b = (v * clip_norm / v.norm(dim=1, keepdim=True).clamp(min=1.0) for v in (w, u))
        b = b if relation == "replace" else 0 * b
        return size(a[:, :, None] * a[:, None] - b[:, :, None] * b[:, None])

    for _ in range(400):
        optimizer.zero_grad()
        (-moves().sum()).backward()
        optimizer.step()
    return float(moves().detach().max())


def frobenius(matrix: torch.Tensor) -> torch.Tensor:
    return (matrix**2).sum((1, 2)).sqrt()


def diagonal_l1(matrix: torch.Tensor) -> torch.Tensor:
    return matrix.diagonal(dim1=1, dim2=2).abs().sum(1)


@pytest.mark.parametrize("relation", ["add_remove", "replace"])
@pytest.mark.parametrize(("norm", "size"), [("l2", frobenius), ("l1", diagonal_l1)])
def test_sensitivities_are_attained_and_not_exceeded(norm, size, relation):
    claim = outer_sensitivity(0.7, relation, diagonal_norm=norm)
    found = largest_move(0.7, relation, size)
    assert claim * (1 - 1e-3) < found <= claim * (1 + 1e-12)


@pytest.mark.parametrize("relation", ["add_remove", "replace"])
def test_sensitivities_are_attained_by_orthogonal_rows(relation):
    """That no pair of neighbours moves a release farther is what the audit looks for: test_audit."""
    rows = 0.7 * torch.eye(2, dtype=torch.float64)
    moved = torch.outer(rows[0], rows[0]) - (
        torch.outer(rows[1], rows[1]) if relation == "replace" else 0
    )
    assert outer_sensitivity(0.7, relation) == pytest.approx(float(moved.norm()))
    assert outer_sensitivity(0.7, relation, diagonal_norm="l1") == pytest.approx(
        float(moved.diagonal().abs().sum())
    )


@pytest.mark.parametrize(
    ("form", "mechanism", "size"),
    [
        ("symmetric", "gaussian", frobenius),
        ("symmetric", "l2_laplace", frobenius),
        ("diagonal", "gaussian", lambda moved: moved.diagonal(dim1=1, dim2=2).norm(dim=1)),
        ("diagonal", "laplace", diagonal_l1),
    ],
)
@pytest.mark.parametrize("sampler", [PoissonSampling(2), FixedCohort(2)])
def test_a_release_has_the_sensitivity_of_its_schedule_form_and_noise(
    form: Form, mechanism, size, sampler
) -> None:
    """A cohort of a fixed size replaces a row by another, of which the farthest is an orthogonal one."""
    rows = 0.7 * torch.eye(2, dtype=torch.float64)
    moved = torch.outer(rows[0], rows[0])
    if isinstance(sampler, FixedCohort):
        moved = moved - torch.outer(rows[1], rows[1])
    plan = ReleasePlan(name="covariance", dimension=2, form=form)
    privacy = ClientPrivacy(clip_norm=0.7, noise_multiplier=1.0, mechanism=mechanism)
    release = bind_releases((plan,), sampler.bind(6), privacy, 1.0)["covariance"]
    assert release.sensitivity == pytest.approx(float(size(moved[None])), rel=1e-12)


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
    impossible = (
        np.einsum(
            "i,ni->n", v, np.linalg.solve(noise, np.broadcast_to(v[:, None], (COUNT, d, 1)))[..., 0]
        )
        > 1
    )
    # the same event without an inverse: what is left when the neighbour's sum is taken off is not positive definite
    assert np.array_equal(impossible, np.linalg.eigvalsh(noise - np.outer(v, v))[:, 0] < 0)
    claim = 1 - math.exp(-epsilon)
    assert stats.binomtest(int(impossible.sum()), COUNT, claim).pvalue > ALPHA
    # so the claimed pure epsilon is false: such outputs do happen
    assert stats.binomtest(int(impossible.sum()), COUNT).proportion_ci(1 - ALPHA).low > 0.5 * claim


@pytest.mark.parametrize(
    "source", [SeededSource(3), SecureSource()], ids=lambda source: source.name
)
def test_the_law_of_wishart_noise(source):
    d, epsilon = 4, 0.5
    noise = matrices(WishartNoise(1 / epsilon), source, d, COUNT)
    assert np.array_equal(noise, noise.transpose(0, 2, 1))
    # tr E = (1 / (2 epsilon)) chi-square with d (d + 1) degrees of freedom
    assert (
        stats.kstest(
            2 * epsilon * np.trace(noise, axis1=1, axis2=2), stats.chi2(d * (d + 1)).cdf
        ).pvalue
        > ALPHA
    )
    # a quadratic form has d + 1 degrees of freedom
    v = np.array([0.5, -0.5, 0.5, 0.5])
    assert stats.kstest(2 * epsilon * (noise @ v @ v), stats.chi2(d + 1).cdf).pvalue > ALPHA
    mean = stats.wishart(df=d + 1, scale=np.eye(d) / (2 * epsilon)).mean()
    np.testing.assert_allclose(
        noise.mean(0), mean, atol=6 * math.sqrt(2 * (d + 1) / COUNT) / (2 * epsilon)
    )


def test_the_event_is_what_the_paper_claims():
    assert WishartNoise(0.25).event(30) == PureDpEvent(4.0)
    assert WishartNoise.refuted is not None


@pytest.mark.parametrize("form", ["symmetric", "diagonal"])
@pytest.mark.parametrize("clip", [0.25, 3.0])
def test_one_client_contributes_the_square_of_its_clip(form: Form, clip: float) -> None:
    """A unit vector times C, along a coordinate, gives a matrix with one entry C^2: the grid is set by that."""
    row = torch.zeros(1, 4, dtype=torch.float64)
    row[0, 1] = clip
    plan = ReleasePlan(name="covariance", dimension=4, form=form)
    privacy = ClientPrivacy(clip_norm=clip, noise_multiplier=1.0)
    release = bind_releases((plan,), FullParticipation().bind(3), privacy, 1.0)["covariance"]
    assert release.contribution_bound == pytest.approx(
        float(outer_product_sum(row, None, diagonal=form == "diagonal").norm()), rel=1e-12
    )
