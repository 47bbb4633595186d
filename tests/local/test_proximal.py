"""Proximal operators against closed forms, optimality conditions, the Moreau decomposition and a general minimizer."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from scipy.optimize import minimize

from fedmtl.errors import ConfigError
from fedmtl.local.nuclear import NuclearProx
from fedmtl.local.proximal import PENALTIES, gram_error, prox_nuclear

NORMS = ("nuclear", "rows", "columns", "l1")
SHAPES = [(1, 1), (6, 1), (1, 6), (7, 4), (4, 7), (5, 5)]


def random(*shape, seed=0, scale=2.0):
    return scale * torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def dual_norm(name, x):
    """Of one matrix, in NumPy; the unit ball of the dual norm is the subdifferential at 0."""
    x = x.numpy()
    return {
        "nuclear": lambda: np.linalg.norm(x, 2),
        "rows": lambda: np.sqrt((x**2).sum(axis=1)).max(),
        "columns": lambda: np.sqrt((x**2).sum(axis=0)).max(),
        "l1": lambda: np.abs(x).max(),
    }[name]()


def project(name, x, radius):
    """Onto the ball of the dual norm, by loops and a full decomposition."""
    x = x.numpy().copy()
    if name == "l1":
        return torch.from_numpy(np.clip(x, -radius, radius))
    if name == "nuclear":
        u, s, v = np.linalg.svd(x, full_matrices=False)
        return torch.from_numpy(u @ np.diag(np.minimum(s, radius)) @ v)
    lines = x if name == "rows" else x.T
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
    assert values["rows"] == 17.0
    assert values["columns"] == pytest.approx(3.0 + math.sqrt(160.0), rel=1e-15)
    assert values["frobenius"] == 84.5
    # s1^2 + s2^2 = 169 and s1 s2 = |det| = 36
    assert values["nuclear"] == pytest.approx(math.sqrt(169.0 + 72.0), rel=1e-14)


@pytest.mark.parametrize("name", PENALTIES)
def test_values_and_operators_are_batched(name):
    x, t = random(3, 2, 5, 4), torch.tensor([[0.1, 1.0], [2.0, 0.0], [3.0, 50.0]], dtype=torch.float64)
    penalty = PENALTIES[name]
    value, out = penalty.value(x), penalty.prox(x, t)
    assert value.shape == (3, 2)
    for i in range(3):
        for j in range(2):
            torch.testing.assert_close(value[i, j], penalty.value(x[i, j]), rtol=1e-13, atol=0)
            torch.testing.assert_close(out[i, j], penalty.prox(x[i, j], float(t[i, j])), rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(penalty.prox(x, t[:, :1]), penalty.prox(x, t[:, :1].expand(3, 2)), rtol=1e-12, atol=0)
    torch.testing.assert_close(penalty.prox(x, t[0]), penalty.prox(x, t[:1].expand(3, 2)), rtol=1e-12, atol=0)


# --- operators


@pytest.mark.parametrize("name", NORMS)
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("t", [0.0, 0.3, 2.0, 1e3])
def test_what_the_operator_takes_away_is_the_projection_on_the_dual_ball(name, shape, t):
    x = random(*shape, seed=sum(shape))
    out = PENALTIES[name].prox(x, t)
    torch.testing.assert_close(out + project(name, x, t), x, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("name", NORMS)
@pytest.mark.parametrize("t", [0.5, 3.0])
def test_optimality(name, t):
    """x - p = t g with g a subgradient at p: dual norm at most 1, and <g, p> = penalty(p)."""
    x = random(9, 6, seed=3)
    p = PENALTIES[name].prox(x, t)
    g = (x - p) / t
    assert dual_norm(name, g) <= 1 + 1e-12
    assert float((g * p).sum()) == pytest.approx(float(PENALTIES[name].value(p)), rel=1e-12, abs=1e-12)
    assert 0 < float(PENALTIES[name].value(p)) < float(PENALTIES[name].value(x))


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


# --- the nuclear norm's ways


def spectrum(d, width, values, seed=0):
    """A matrix with given singular values."""
    values = torch.as_tensor(values, dtype=torch.float64)
    u = torch.linalg.qr(random(d, len(values), seed=seed)).Q
    v = torch.linalg.qr(random(width, len(values), seed=seed + 1)).Q
    return (u * values) @ v.mT, u, v


@pytest.mark.parametrize("method", ["auto", "svd", "gram"])
@pytest.mark.parametrize(("d", "width"), [(20, 28), (28, 20), (80, 150), (150, 80)])
def test_known_singular_values_are_shrunk(method, d, width):
    values = [9.0, 9.0, 4.0, 2.0 + 1e-9, 2.0, 1.5, 0.2]  # a tie, one at the threshold, rank below the side
    x, u, v = spectrum(d, width, values)
    expected = (u * torch.tensor([7.0, 7.0, 2.0, 1e-9, 0.0, 0.0, 0.0], dtype=torch.float64)) @ v.mT
    torch.testing.assert_close(prox_nuclear(x, 2.0, method=method), expected, rtol=0, atol=1e-12)


@pytest.mark.parametrize("ratio", [1e1, 1e3, 1e5, 1e7])
@pytest.mark.parametrize("shape", [(20, 28), (60, 30)])
def test_the_product_is_within_its_stated_error(ratio, shape):
    side = min(shape)
    for seed in range(4):
        values = torch.logspace(0, -math.log10(ratio) - 1, side, dtype=torch.float64)
        x, u, v = spectrum(*shape, values, seed=seed)
        t = 1 / ratio
        exact = (u * (values - t).clamp_min(0)) @ v.mT
        norm = torch.linalg.matrix_norm(x)
        bound = float(gram_error(norm, t, x.shape)) + 1e-14
        assert float(torch.linalg.matrix_norm(prox_nuclear(x, t, method="gram") - exact)) <= bound
        assert float(torch.linalg.matrix_norm(prox_nuclear(x, t) - exact)) <= 1e-9 * float(norm)


def test_auto_decomposes_x_where_the_product_is_too_coarse():
    x, u, v = spectrum(20, 28, [1.0, 1e-3, 3e-8])
    expected = (u * torch.tensor([1.0 - 1e-8, 1e-3 - 1e-8, 2e-8], dtype=torch.float64)) @ v.mT
    x = torch.stack([x, x, 1e7 * x])
    t = torch.tensor([1e-8, 0.1, 0.0], dtype=torch.float64)
    out = prox_nuclear(x, t)
    torch.testing.assert_close(out[0], expected, rtol=0, atol=1e-14)
    torch.testing.assert_close(out[1], 0.9 * u[:, :1] @ v[:, :1].mT, rtol=0, atol=1e-13)
    torch.testing.assert_close(out[2], x[2], rtol=0, atol=1e-8)
    coarse = prox_nuclear(x[0], 1e-8, method="gram")
    assert float((coarse - expected).abs().max()) > 1e-12  # which is why


# --- the carried basis


def drift(d, width, steps, *, rank=5, seed=0):
    """A low-rank matrix under noise that changes a column and a little everywhere at each step."""
    x = random(d, rank, seed=seed) @ random(rank, width, seed=seed + 1) / 4 + random(
        d, width, seed=seed + 2, scale=0.01
    )
    for k in range(steps):
        x = x + random(d, width, seed=100 + k, scale=1e-4)
        x[:, k % width] += random(d, seed=500 + k, scale=0.02)
        yield x


@pytest.mark.parametrize("shape", [(40, 90), (90, 40)])
@pytest.mark.parametrize("tolerance", [1e-6, 1e-10])
@pytest.mark.parametrize("t", [0.5, 0.2, 0.1])
def test_a_carried_basis_gives_the_exact_operator(shape, tolerance, t):
    prox = NuclearProx(least_side=1, tolerance=tolerance)
    for x in drift(*shape, 25):
        exact = prox_nuclear(x, t, method="svd")
        assert float(torch.linalg.matrix_norm(prox(x, t) - exact)) <= tolerance * float(torch.linalg.matrix_norm(x))
    assert prox.carried + prox.decomposed == 25
    assert t != 0.5 or prox.carried == 24


def test_a_direction_that_the_basis_does_not_know_is_never_missed():
    """A new direction orthogonal to the basis and everything else, and above t: no iteration would find it."""
    q = torch.linalg.qr(random(60, 60)).Q
    v = torch.linalg.qr(random(100, 100, seed=1)).Q
    prox = NuclearProx(least_side=1, oversample=4)
    for new, carried, decomposed in ((0.4, 0, 1), (0.4, 1, 1), (0.9, 2, 1), (5.0, 2, 2), (5.0, 2, 3), (5.0, 3, 3)):
        values = torch.tensor([9.0, 8.0, 7.0, *[0.5] * 17, *[0.0] * 30, new, *[0.0] * 9], dtype=torch.float64)
        out = prox((q * values) @ v[:, :60].mT, 1.0)
        torch.testing.assert_close(out, (q * (values - 1.0).clamp_min(0)) @ v[:, :60].mT, rtol=0, atol=1e-8)
        assert (prox.carried, prox.decomposed) == (carried, decomposed)


def test_thresholds_and_matrices_that_jump():
    prox = NuclearProx(least_side=1)
    for k, t in enumerate([0.5, 40.0, 0.5, 0.0, 1e-12, 3.0, 1e6, 0.5]):
        x = torch.zeros(30, 50, dtype=torch.float64) if k == 5 else random(30, 50, seed=k)
        torch.testing.assert_close(prox(x, t), prox_nuclear(x, t, method="svd"), rtol=0, atol=1e-7)


def test_a_batch_has_a_basis_for_each_matrix():
    prox, t = NuclearProx(least_side=1), torch.tensor([0.2, 0.3], dtype=torch.float64)
    for pair in zip(drift(30, 50, 6), drift(30, 50, 6, seed=40), strict=True):
        x = torch.stack(pair)
        exact = torch.stack([prox_nuclear(a, float(s), method="svd") for a, s in zip(pair, t, strict=True)])
        torch.testing.assert_close(prox(x, t), exact, rtol=0, atol=1e-7)
    assert (prox.carried, prox.decomposed) == (10, 2)


def test_a_restored_basis_continues_to_the_last_bit():
    prox, other, late = NuclearProx(least_side=1), NuclearProx(least_side=1), NuclearProx(least_side=1)
    xs = list(drift(40, 60, 8))
    for x in xs[:4]:
        prox(x, 0.2)
    other.load_state_dict(prox.state_dict())
    ends = [[p(x, 0.2) for x in xs[4:]] for p in (prox, other, late)]
    assert all(torch.equal(a, b) for a, b in zip(ends[0], ends[1], strict=True))
    assert not all(torch.equal(a, b) for a, b in zip(ends[0], ends[2], strict=True))


def test_failures_in_a_row_are_tried_ever_less_often():
    prox, tried = NuclearProx(least_side=1, iterations=1, tolerance=1e-12), []
    carry = prox._carry
    prox._carry = lambda *args: tried.append(prox.decomposed) or carry(*args)
    for k in range(40):
        x = spectrum(30, 40, [9.0, 8.0, 7.0], seed=10 * k)[0]
        torch.testing.assert_close(prox(x, 1.0), prox_nuclear(x, 1.0, method="svd"), rtol=0, atol=1e-10)
    assert tried == [1, 3, 7, 15, 31]
    late = NuclearProx(least_side=1)
    late.load_state_dict(prox.state_dict())
    for _ in range(24):  # 9 of 32 are done
        assert late.carried == 0
        late(x, 1.0)
    assert (late.carried, late.decomposed) == (1, 23)


def test_small_matrices_are_decomposed():
    prox = NuclearProx()
    x = random(3, 28, 20)
    torch.testing.assert_close(prox(x, 1.0), prox_nuclear(x, 1.0, method="svd"), rtol=0, atol=1e-10)
    assert (prox.carried, prox.decomposed) == (0, 3)


# --- bad input


@pytest.mark.parametrize("name", PENALTIES)
@pytest.mark.parametrize(
    ("x", "t", "says"),
    [
        (torch.zeros(3), 1.0, r"shape \(3,\)"),
        (torch.zeros(3, 3, dtype=torch.int64), 1.0, "torch.int64"),
        (torch.zeros(3, 3), -1.0, "threshold is -1.0"),
        (torch.zeros(3, 3), math.nan, "threshold is nan"),
        (torch.zeros(3, 3), math.inf, "threshold is inf"),
        (torch.zeros(2, 3, 3), torch.tensor([1.0, -1.0]), "negative or not finite"),
        (torch.zeros(2, 3, 3), torch.tensor([1.0, math.nan]), "negative or not finite"),
        (torch.zeros(2, 3, 3), torch.tensor([1.0, 1.0, 1.0]), r"threshold has shape \(3,\)"),
        (torch.zeros(3, 3), torch.tensor([1.0]), r"threshold has shape \(1,\)"),
    ],
)
def test_bad_input_is_refused(name, x, t, says):
    with pytest.raises(ConfigError, match=says):
        PENALTIES[name].prox(x, t)


@pytest.mark.parametrize("bad", [math.nan, math.inf])
@pytest.mark.parametrize("prox", [prox_nuclear, NuclearProx(least_side=1)])
def test_the_nuclear_operator_refuses_what_is_not_finite(prox, bad):
    x = random(6, 5)
    x[2, 3] = bad
    with pytest.raises(ConfigError, match="not finite"):
        prox(x, 1.0)


def test_bad_settings_are_refused():
    with pytest.raises(ConfigError, match="accepted: 'auto', 'svd', 'gram'"):
        prox_nuclear(random(2, 2), 1.0, method="qr")
    for setting in ({"tolerance": 0.0}, {"oversample": 0}, {"iterations": 0}, {"least_side": 0}):
        with pytest.raises(ConfigError, match=next(iter(setting))):
            NuclearProx(**setting)
