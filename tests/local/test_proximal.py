"""Proximal operators against closed forms, optimality conditions, the Moreau decomposition and a general minimizer."""

import math

import numpy as np
import pytest
import torch
from scipy.optimize import minimize

from fedmtl.errors import ConfigError
from fedmtl.local.proximal import PENALTIES, prox_nuclear

NORMS = ("nuclear", "l2", "l21", "l1")


def random(*shape, seed=0, scale=2.0):
    return scale * torch.randn(
        *shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed)
    )


def project(name, x, radius):
    """Onto the ball of the dual norm, by loops and a full decomposition."""
    x = x.numpy().copy()
    if name == "l1":
        return torch.from_numpy(np.clip(x, -radius, radius))
    if name == "nuclear":
        u, s, v = np.linalg.svd(x, full_matrices=False)
        return torch.from_numpy(u @ np.diag(np.minimum(s, radius)) @ v)
    lines = x if name == "l2" else x.T
    for line in lines:
        length = math.sqrt(sum(value**2 for value in line))
        if length > radius:
            line *= radius / length
    return torch.from_numpy(x)


# --- values


def test_values_of_a_matrix_by_hand():
    x = torch.tensor([[3.0, 4.0], [0.0, -12.0]], dtype=torch.float64)
    values = {name: float(penalty.value(x)) for name, penalty in PENALTIES.items()}
    assert values["l1"] == 19.0
    assert values["l2"] == 17.0
    assert values["l21"] == pytest.approx(3.0 + math.sqrt(160.0), rel=1e-15)
    assert values["frobenius"] == 84.5
    # s1^2 + s2^2 = 169 and s1 s2 = |det| = 36
    assert values["nuclear"] == pytest.approx(math.sqrt(169.0 + 72.0), rel=1e-14)


@pytest.mark.parametrize("name", PENALTIES)
def test_values_and_operators_are_batched(name):
    x, penalty = random(3, 2, 5, 4), PENALTIES[name]
    value = penalty.value(x)
    assert value.shape == (3, 2)
    for t in (0.0, 1.0, 50.0):
        out = penalty.prox(x, t)
        for i in range(3):
            for j in range(2):
                torch.testing.assert_close(value[i, j], penalty.value(x[i, j]), rtol=1e-13, atol=0)
                torch.testing.assert_close(
                    out[i, j], penalty.prox(x[i, j], t), rtol=1e-12, atol=1e-12
                )


# --- operators


@pytest.mark.parametrize("name", NORMS)
def test_what_the_operator_takes_away_is_the_projection_on_the_dual_ball(name):
    for shape, t in (
        ((1, 1), 0.3),
        ((6, 1), 2.0),
        ((1, 6), 0.3),
        ((7, 4), 0.0),
        ((4, 7), 2.0),
        ((5, 5), 1e3),
    ):
        x = random(*shape, seed=sum(shape))
        out = PENALTIES[name].prox(x, t)
        torch.testing.assert_close(out + project(name, x, t), x, rtol=1e-12, atol=1e-12)


def test_squared_norm_by_hand():
    x = random(4, 3)
    torch.testing.assert_close(PENALTIES["frobenius"].prox(x, 3.0), x / 4, rtol=1e-15, atol=0)


@pytest.mark.parametrize("name", PENALTIES)
def test_zero_stays_zero_and_the_input_stays_as_it_was(name):
    x = torch.zeros(2, 4, 3, dtype=torch.float64)
    for t in (0.0, 0.7):
        assert torch.equal(PENALTIES[name].prox(x, t), x)
    x = random(4, 3)
    kept = x.clone()
    PENALTIES[name].prox(x, 0.7)
    assert torch.equal(x, kept)


# --- the nuclear norm


def spectrum(d, width, values, seed=0):
    """A matrix with given singular values."""
    values = torch.as_tensor(values, dtype=torch.float64)
    u = torch.linalg.qr(random(d, len(values), seed=seed)).Q
    v = torch.linalg.qr(random(width, len(values), seed=seed + 1)).Q
    return (u * values) @ v.mT, u, v


def test_known_singular_values_are_shrunk():
    for d, width in ((20, 28), (28, 20), (80, 150), (150, 80)):
        values = [
            9.0,
            9.0,
            4.0,
            2.0 + 1e-9,
            2.0,
            1.5,
            0.2,
        ]  # a tie, one at the threshold, rank below the side
        x, u, v = spectrum(d, width, values)
        expected = (
            u * torch.tensor([7.0, 7.0, 2.0, 1e-9, 0.0, 0.0, 0.0], dtype=torch.float64)
        ) @ v.mT
        torch.testing.assert_close(prox_nuclear(x, 2.0), expected, rtol=0, atol=1e-12)


def test_small_singular_values_are_exact_beside_large_ones():
    x, u, v = spectrum(20, 28, [1.0, 1e-3, 3e-8])
    expected = (u * torch.tensor([1.0 - 1e-8, 1e-3 - 1e-8, 2e-8], dtype=torch.float64)) @ v.mT
    torch.testing.assert_close(prox_nuclear(x, 1e-8), expected, rtol=0, atol=1e-14)


# --- bad input


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_the_nuclear_operator_refuses_what_is_not_finite(bad):
    x = random(6, 5)
    x[2, 3] = bad
    with pytest.raises(ConfigError, match="not finite"):
        prox_nuclear(x, 1.0)


@pytest.mark.parametrize("name", PENALTIES)
def test_no_general_minimizer_does_better(name):
    x, t = random(3, 2, seed=8), 0.8
    penalty = PENALTIES[name]

    def objective(flat):
        p = torch.from_numpy(np.asarray(flat).reshape(3, 2))
        return float(((p - x) ** 2).sum()) / 2 + t * float(penalty.value(p))

    ours = penalty.prox(x, t).numpy().ravel()
    options = {"xatol": 1e-10, "fatol": 1e-14, "maxiter": 20_000, "maxfev": 20_000}
    found = x.numpy().ravel()
    for _ in range(4):
        found = minimize(objective, found, method="Nelder-Mead", options=options).x
    assert objective(ours) <= objective(found) + 1e-12
    np.testing.assert_allclose(found, ours, atol=1e-4)


@pytest.mark.parametrize("ratio", [1e1, 1e3, 1e5, 1e7])
@pytest.mark.parametrize("shape", [(20, 28), (60, 30)])
def test_several_matrices_are_as_exact_as_one(shape, ratio):
    values, t = (
        torch.logspace(0, -math.log10(ratio) - 1, min(shape), dtype=torch.float64),
        1 / ratio,
    )
    each = [spectrum(*shape, values, seed=seed) for seed in range(4)]
    found = prox_nuclear(torch.stack([x for x, _, _ in each]), t)
    for (x, u, v), p in zip(each, found, strict=True):
        exact = (u * (values - t).clamp_min(0)) @ v.mT
        assert float(torch.linalg.matrix_norm(p - exact)) <= 1e-9 * float(
            torch.linalg.matrix_norm(x)
        )


def test_a_sum_that_overflows_is_no_number_that_is_not_finite():
    x = torch.zeros(1, 2, 3, dtype=torch.float64)
    x[0, 0, 0] = x[0, 1, 1] = 1.5e308
    assert torch.isinf(x.sum())
    torch.testing.assert_close(prox_nuclear(x, 1.0), x)
