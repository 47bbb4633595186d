"""MP-MTL against certificates of optimality, a plain NumPy loop and closed forms."""

import math
from typing import Any

import numpy as np
import pytest
import torch
from scipy import optimize
from torch import Tensor

from fedmtl import ClientPrivacy, FullParticipation, PoissonSampling, models
from fedmtl.algorithms import MPMTL, Problem, State
from fedmtl.algorithms.linear.data import LinearData
from fedmtl.algorithms.linear.stack import TaskStack
from fedmtl.algorithms.mp_mtl.sharing import budget_weights
from fedmtl.contrib.published.mp_mtl import PublishedMPMTL
from fedmtl.errors import ConfigError, PrivacyError
from fedmtl.privacy import (
    QuantileClip,
    Receipt,
    SecureSource,
    SeededSource,
    mechanism,
    open_channel,
    privacy_report,
)
from tests import small

from .harness import everyone, linear_tasks, run

TASKS, D = 7, 4


def linear(rounds: int, kind: str = "regression", bias: bool = False, **options: Any) -> Problem:
    sizes = {"features": D, "train_examples": 12, "test_examples": 9, "rank": 2} | options
    return linear_tasks(TASKS, kind, rounds=rounds, bias=bias, **sizes)


def rows_of(problem: Problem) -> list[tuple[np.ndarray, np.ndarray]]:
    """(X_i, y_i) with a last column of ones for a bias, as NumPy arrays; labels -1 and 1."""
    found = LinearData.of(problem)
    return [(x.numpy(), y.numpy()) for x, y in zip(found.x, found.y, strict=True)]


def gradients(rows: list[tuple[np.ndarray, np.ndarray]], w: np.ndarray, loss: str) -> np.ndarray:
    """Gradients of the L_i at the rows of w, one task after the other."""
    out = np.zeros_like(w)
    for i, (x, y) in enumerate(rows):
        margins = x @ w[i]
        slope = margins - y if loss == "squared" else -y / (1 + np.exp(y * margins))
        out[i] = x.T @ slope / len(y)
    return out


# The optimum


def excess(algorithm: MPMTL, problem: Problem, state: State) -> float:
    """An upper bound on the objective minus its minimum, by Fenchel duality, from the raw records in NumPy.

    With F(W) = f(W) + h(W), f convex with gradient G at W: F(V) >= f(W) + <G, V - W> + h(V), and the least value of
    <G, V> + h(V) is 0 for h = lam ||.|| where the dual norm of G is at most lam, and -||G||^2 / (2 lam) for
    h = lam ||.||^2 / 2.
    """
    store = state.private
    shared = store.whole("w_hat")[:, 0].numpy()
    own = (
        store.whole("q_hat")[:, 0].numpy()
        if algorithm.own_penalty is not None
        else np.zeros((TASKS, D))
    )
    w = shared.copy()
    w[:, :D] += own
    gradient = gradients(rows_of(problem), w, algorithm.loss) + algorithm.ridge * w
    assert np.abs(gradient[:, D:]).max(initial=0.0) < 1e-7  # of the bias, which nothing penalizes
    p, g = shared[:, :D], gradient[:, :D]
    if algorithm.penalty == "nuclear":
        norm, dual = np.linalg.norm(p, "nuc"), np.linalg.norm(g, 2)
    else:
        norm, dual = np.linalg.norm(p, axis=0).sum(), np.linalg.norm(g, axis=0).max()
    assert dual <= algorithm.lam * (1 + 1e-7)
    total = algorithm.lam * norm + (g * p).sum()
    lam = algorithm.own_lam
    if algorithm.own_penalty == "l1":
        assert np.abs(g).max() <= lam * (1 + 1e-7)
        total += lam * np.abs(own).sum() + (g * own).sum()
    elif algorithm.own_penalty == "l2":
        assert np.linalg.norm(g, axis=1).max() <= lam * (1 + 1e-7)
        total += lam * np.linalg.norm(own, axis=1).sum() + (g * own).sum()
    elif algorithm.own_penalty == "frobenius":
        total += lam / 2 * (own**2).sum() + (g * own).sum() + (g**2).sum() / (2 * lam)
    return float(total)


OPTIMA: list[tuple[bool, dict[str, Any]]] = [
    (False, {"lam": 0.3, "momentum": "none", "ridge": 0.02}),
    (True, {"lam": 0.3, "momentum": "nesterov"}),
    (False, {"lam": 0.3, "momentum": "strongly_convex", "ridge": 0.02, "penalty": "l21"}),
    (True, {"lam": 0.2, "own_penalty": "l1", "own_lam": 0.12, "momentum": "strongly_convex", "ridge": 0.02}),
    (False, {"lam": 0.2, "own_penalty": "l2", "own_lam": 0.15, "momentum": "strongly_convex", "ridge": 0.02,
             "penalty": "l21"}),
    (True, {"lam": 0.2, "own_penalty": "frobenius", "own_lam": 0.3, "momentum": "strongly_convex", "ridge": 0.02}),
    (False, {"loss": "logistic", "lam": 0.1, "momentum": "strongly_convex", "ridge": 0.01}),
    (True, {"loss": "logistic", "lam": 0.1, "momentum": "none", "ridge": 0.01, "penalty": "l21"}),
]  # fmt: skip


@pytest.mark.parametrize(("bias", "settings"), OPTIMA)
def test_without_noise_it_reaches_the_optimum(bias: bool, settings: dict[str, Any]) -> None:
    algorithm = MPMTL(feature_norm=1.0, **settings)
    rounds = 450 if algorithm.own_penalty == "l2" else 300  # whole tasks leave the penalty slowly
    kind = "regression" if algorithm.loss == "squared" else "classification"
    problem = linear(rounds, kind, bias)
    state = run(algorithm, problem)
    assert abs(excess(algorithm, problem, state)) < 1e-8
    shared = state.private.whole("w_hat")[:, 0, :D]
    assert (
        int((torch.linalg.svdvals(shared) > 1e-9).sum()) < D or algorithm.penalty == "l21"
    )  # the penalty matters
    assert float(shared.norm()) > 0.1
    if algorithm.own_penalty is not None:
        assert float(state.private.whole("q_hat").norm()) > 0.1


# Against a plain loop


def ridge_fits(rows: list[tuple[np.ndarray, np.ndarray]], ridge: float) -> np.ndarray:
    return np.stack(
        [
            np.linalg.solve(x.T @ x / len(y) + ridge * np.eye(x.shape[1]), x.T @ y / len(y))
            for x, y in rows
        ]
    )


def loop(
    algorithm: MPMTL, problem: Problem, released: list[np.ndarray], sigmas: list[float]
) -> np.ndarray:
    """Algorithms 2 to 4, task by task, from recorded covariances (sums over tasks) and their noise."""
    rows = rows_of(problem)
    bias = rows[0][0].shape[1] - D
    mu, decomposed = algorithm.ridge, algorithm.own_penalty is not None
    smooth = (1.0 + bias) * (1.0 if algorithm.loss == "squared" else 0.25) + mu
    eta = 1 / smooth / (2 if decomposed else 1)
    w = algorithm.tasks(problem).fit(algorithm.start_ridge or mu or 0.01).numpy().copy()
    q = np.zeros((TASKS, D))
    hat_before, own_before = w.copy(), q.copy()
    rho = algorithm.rho
    for t, (sigma_matrix, sigma) in enumerate(zip(released, sigmas, strict=True), start=1):
        shift = rho * sigma * math.sqrt(2 * D)
        if algorithm.penalty == "nuclear":
            values, vectors = np.linalg.eigh(sigma_matrix + shift * np.eye(D))
        else:
            values, vectors = sigma_matrix + shift, np.eye(D)
        kept = [max(0.0, 1 - eta * algorithm.lam / math.sqrt(v)) if v > 0 else 0.0 for v in values]
        matrix = vectors @ np.diag(kept) @ vectors.T
        root = math.sqrt(mu * eta)
        b = {
            "none": 0.0,
            "nesterov": (t - 1) / (t + 2),
            "strongly_convex": (1 - root) / (1 + root),
        }[algorithm.momentum]
        b = 0.0 if t == 1 else b
        hat, own = np.zeros_like(w), np.zeros_like(q)
        for i, (x, y) in enumerate(rows):
            hat[i] = w[i]
            hat[i, :D] = matrix @ w[i, :D]
            z = hat[i] + b * (hat[i] - hat_before[i])
            point = z.copy()
            if decomposed:
                limit = eta * algorithm.own_lam
                own[i] = np.sign(q[i]) * np.maximum(np.abs(q[i]) - limit, 0)
                v = own[i] + b * (own[i] - own_before[i])
                point[:D] += v
            slope = gradients([(x, y)], point[None], algorithm.loss)[0] + mu * point
            w[i] = z - eta * slope
            if decomposed:
                q[i] = v - eta * slope[:D]
        hat_before, own_before = hat, own
    out = hat_before.copy()
    out[:, :D] += own_before
    return out


LOOPS = [
    {"lam": 0.3},
    {
        "lam": 0.3,
        "rho": 0.0,
    },  # noise leaves some eigenvalues below 0, and their directions are lost
    {"lam": 0.3, "momentum": "nesterov", "penalty": "l21", "rho": 0.25},
    {
        "lam": 0.1,
        "momentum": "strongly_convex",
        "ridge": 0.05,
        "own_penalty": "l1",
        "own_lam": 0.02,
    },
    {"loss": "logistic", "lam": 0.1, "momentum": "nesterov", "q": 1.1, "start_ridge": 0.1},
]


@pytest.mark.parametrize("settings", LOOPS, ids=[str(i) for i in range(len(LOOPS))])
def test_a_noised_run_is_the_plain_loop_on_the_same_releases(settings: dict[str, Any]) -> None:
    algorithm = MPMTL(feature_norm=1.0, **settings)
    problem = linear(
        6, "regression" if algorithm.loss == "squared" else "classification", bias=True
    )
    privacy = ClientPrivacy(clip_norm=0.7, epsilon=20.0, delta=1e-5)
    record: list[Any] = []
    state = run(algorithm, problem, privacy=privacy, record=record)
    plans = algorithm.plan(problem, FullParticipation().bind(TASKS))
    z = open_channel(
        privacy, plans, FullParticipation().bind(TASKS), seed=0, steps=6
    ).noise_multiplier
    assert z is not None
    sigmas = [z / w * 0.7**2 for w in algorithm.budget(problem)]  # add/remove: C^2
    found = everyone(problem, algorithm, state).numpy()
    expected = loop(algorithm, problem, [TASKS * v.numpy() for _, _, v in record], sigmas)
    np.testing.assert_allclose(found, expected, atol=1e-10)
    assert (
        np.abs(found - everyone(problem, algorithm, run(algorithm, problem)).numpy()).max() > 1e-3
    )


def test_the_release_is_the_clipped_covariance_of_the_weights_alone() -> None:
    problem = linear(1, bias=True)
    record: list[Any] = []
    run(
        MPMTL(feature_norm=1.0),
        problem,
        privacy=ClientPrivacy(clip_norm=0.5, epsilon=math.inf),
        record=record,
    )
    w = ridge_fits(rows_of(problem), 0.01)[:, :D]
    w = w / np.maximum(1, np.linalg.norm(w, axis=1) / 0.5)[:, None]
    np.testing.assert_allclose(record[0][2].numpy() * TASKS, w.T @ w, rtol=1e-5)


def test_tasks_project_their_own_models_and_in_the_paper_the_clipped_ones() -> None:
    problem = linear(1)
    privacy = ClientPrivacy(clip_norm=0.5, epsilon=math.inf)
    own = everyone(
        problem,
        MPMTL(feature_norm=1.0, lam=0.0),
        run(MPMTL(feature_norm=1.0, lam=0.0), problem, privacy=privacy),
    )
    np.testing.assert_allclose(own.numpy(), ridge_fits(rows_of(problem), 0.01), atol=1e-10)
    printed = PublishedMPMTL(feature_norm=1.0, lam=0.0)
    clipped = everyone(problem, printed, run(printed, problem, privacy=privacy))
    assert float(clipped.norm(dim=1).max()) <= 0.5 < float(own.norm(dim=1).max())


# Noise


def test_the_published_noise_has_a_claim_and_an_infinite_epsilon() -> None:
    algorithm = PublishedMPMTL(feature_norm=1.0)
    privacy = ClientPrivacy(clip_norm=1.0, epsilon=2.0, delta=1e-5, mechanism="wishart")
    given = {"model": models.linear_regression(bias=False), "rounds": 4, "loss": "half_mse"}
    result = small.trainer(algorithm=algorithm, data=linear(4).data, privacy=privacy, **given).fit()
    assert torch.isfinite(result.personal).all()
    # tests/privacy/test_symmetric.py: a neighbour makes an output impossible
    assert result.epsilon == result.privacy.epsilon == math.inf
    assert all(row["epsilon"] == math.inf for row in result.history)
    assert 1.99 < result.privacy.claimed <= 2.0
    assert "impossible" in result.privacy.refuted


def test_noise_on_models_protects_them_from_the_curator() -> None:
    problem = linear(3)
    algorithm = MPMTL(feature_norm=1.0, curator_epsilon=6.0, curator_delta=1e-4)
    bound = FullParticipation().bind(TASKS)
    privacy = ClientPrivacy(clip_norm=0.8, epsilon=2.0, delta=1e-5)
    channel = open_channel(privacy, algorithm.plan(problem, bound), bound, seed=5, steps=3)
    noise = channel.row_noise["covariance"]
    assert noise.sensitivity == pytest.approx(1.6)
    assert 6.0 * (1 - 1e-4) < noise.epsilon_at(3) <= 6.0
    # what the curator gets: a clipped model and noise of radius Gamma(d, z 2 C), mean d z 2 C
    many = torch.zeros(4000, D, dtype=torch.float64)
    everyone = torch.arange(4000)
    receipt = Receipt(0, 0, everyone)
    receipt.spend(noise.name, everyone)
    radius = noise.added(many, everyone, receipt, SeededSource(1)).norm(dim=1) / (
        1.6 * noise.multiplier
    )
    assert float(radius.mean()) == pytest.approx(D, abs=5 * math.sqrt(D / 4000))
    assert float(radius.var()) == pytest.approx(D, rel=0.15)
    # and what it adds up: the noised models, clipped again
    rows = torch.randn(TASKS, D, dtype=torch.float64)
    channel.begin(0, channel.draw(0))
    value = channel.release("covariance", rows, torch.arange(TASKS)).numpy() * TASKS
    sent = noise.added(rows, torch.arange(TASKS), receipt, channel.source).numpy()
    sent = sent * np.minimum(1, 0.8 * (1 - 2.0**-20) / np.linalg.norm(sent, axis=1))[:, None]
    plain = open_channel(
        privacy, MPMTL(feature_norm=1.0).plan(problem, bound), bound, seed=5, steps=3
    )
    plain.begin(0, plain.draw(0))
    silent = (
        plain.release("covariance", torch.zeros_like(rows), torch.arange(TASKS)).numpy() * TASKS
    )
    np.testing.assert_allclose(value - silent, sent.T @ sent, atol=1e-5)
    assert "against the server" in privacy_report(channel).text()
    assert channel.epsilon == pytest.approx(plain.epsilon)
    with pytest.raises(PrivacyError, match="without noise"):
        run(algorithm, problem)
    # in secure mode the rows are on a public grid, and fresh
    first, second = (
        noise.added(rows, torch.arange(TASKS), receipt, SecureSource()) for _ in range(2)
    )
    assert not torch.equal(first, second)
    assert torch.equal(torch.round(first * 2.0**24), first * 2.0**24)


def test_the_shift_follows_the_noise_of_its_own_round_while_the_clip_norm_adapts(
    monkeypatch,
) -> None:
    problem = linear(4, features=20)
    clip = QuantileClip(initial=50.0, quantile=0.1, lr=1.0, count_noise=4.0)
    added, stated = [], []

    def watched(total: Tensor, noise: Tensor, *args: Any, **options: Any) -> Any:
        if noise.numel() > 1:  # that of the count is one number
            added.append(float(noise.square().mean().sqrt()))
        return real(total, noise, *args, **options)

    def server(self: MPMTL, problem: Problem, public: Any, released: Any) -> Any:
        stated.append(float(released.noise_std["covariance"]) * released.denominator)
        return serve(self, problem, public, released)

    real, serve = mechanism.noised, MPMTL.server_update
    monkeypatch.setattr(mechanism, "noised", watched)
    monkeypatch.setattr(MPMTL, "server_update", server)
    run(
        MPMTL(feature_norm=1.0, alpha=0.0),
        problem,
        privacy=ClientPrivacy(clip_norm=clip, noise_multiplier=1.0),
    )
    assert stated == pytest.approx(added, rel=0.2)  # of 210 numbers
    assert added[0] > 2 * added[1] > 4 * added[2]


# Budgets


@pytest.mark.parametrize(
    ("momentum", "condition", "errors"),
    [
        ("none", 0.0, lambda t: 1.0),
        ("nesterov", 0.0, lambda t: t),
        ("none", 0.05, lambda t: 0.95**-t),
        ("strongly_convex", 0.05, lambda t: (1 - math.sqrt(0.05)) ** (-t / 2)),
    ],
)
def test_default_budgets_minimize_the_utility_bound(
    momentum: Any, condition: float, errors: Any
) -> None:
    """Theorem 6: the bound grows with sum_t a_t / sqrt(eps_t), under sum eps_t^2."""
    rounds = 9
    a = np.array([errors(t) for t in range(1, rounds + 1)], dtype=float)
    power = 2

    def bound(logs: np.ndarray) -> float:  # on the constraint sum eps^power = 1
        eps = np.exp(logs)
        return float((a / np.sqrt(eps / (eps**power).sum() ** (1 / power))).sum())

    best = np.exp(
        optimize.minimize(bound, np.zeros(rounds), method="BFGS", options={"gtol": 1e-10}).x
    )
    weights = budget_weights(rounds, momentum=momentum, condition=condition)
    np.testing.assert_allclose(weights, best / best.mean(), rtol=1e-4)


def test_budgets_of_the_users_own() -> None:
    np.testing.assert_allclose(budget_weights(3, alpha=2.0), np.array([1, 4, 9]) * 3 / 14)
    np.testing.assert_allclose(budget_weights(3, q=0.5), np.array([2, 4, 8]) * 3 / 14)
    assert min(budget_weights(5000, q=0.5)) > 0


@pytest.mark.parametrize("loss", ["squared", "logistic"])
@pytest.mark.parametrize("wide", [False, True])
def test_stacked_tasks_are_the_loop_over_tasks(loss: Any, wide: bool) -> None:
    """Ragged tasks of 1 to 40 records; wide ones have no sufficient statistics."""
    generator = torch.Generator().manual_seed(1)
    counts, p = [3, 40, 1, 9, 17, 2], 100 if wide else 5
    xs = tuple(torch.randn(n, p, generator=generator, dtype=torch.float64) / p**0.5 for n in counts)
    ys = tuple(torch.randn(n, generator=generator, dtype=torch.float64) for n in counts)
    ys = ys if loss == "squared" else tuple(torch.sign(y) for y in ys)
    stack = TaskStack.of(LinearData(xs, ys, False), loss)
    assert (stack.moments is None) == (wide or loss == "logistic")
    w = torch.randn(6, 3, p, generator=generator, dtype=torch.float64)

    def value(i: int, one: Tensor) -> Tensor:
        margins = xs[i] @ one
        each = (
            (margins - ys[i]) ** 2 / 2
            if loss == "squared"
            else torch.log1p(torch.exp(-ys[i] * margins))
        )
        return each.mean()

    for i in range(6):
        for r in range(3):
            own = w[i, r].clone().requires_grad_()
            expected = value(i, own)
            (slope,) = torch.autograd.grad(expected, own)
            torch.testing.assert_close(
                stack.value(w)[i, r], expected.detach(), rtol=1e-10, atol=1e-12
            )
            torch.testing.assert_close(stack.gradient(w)[i, r], slope, rtol=1e-10, atol=1e-12)
    ridges = 0.1 * torch.arange(1, 7, dtype=torch.float64)
    scale = torch.randn(6, p, p, generator=generator, dtype=torch.float64) / p**0.5 + torch.eye(p)
    for i, fit in enumerate(
        stack.fit(ridges, scale)
    ):  # a stationary point under the covariance S_i S_i^T
        own = fit.clone().requires_grad_()
        prior = torch.linalg.solve(scale[i], own).square().sum() * ridges[i] / 2
        (slope,) = torch.autograd.grad(value(i, own) + prior, own)
        assert float(slope.norm()) < 1e-6 * float(torch.linalg.inv(scale[i] @ scale[i].mT).norm())


# Refusals


def test_what_is_refused() -> None:
    problem = linear(3)
    with pytest.raises(ConfigError, match="all tasks take part"):
        run(MPMTL(feature_norm=1.0), problem, sampler=PoissonSampling(3))
