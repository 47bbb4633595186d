"""PP-DMTL: slow loops of Algorithm 1 and of its sound variant, the convex optimum, the refinement, privacy."""

import math
from dataclasses import replace
from functools import partial

import numpy as np
import pytest
import torch
from scipy import optimize

from fedmtl import models
from fedmtl.algorithms.pp_dmtl.algorithm import PPDMTL
from fedmtl.algorithms.pp_dmtl.step_size import largest_delay
from fedmtl.contrib.published.pp_dmtl import PublishedPPDMTL
from fedmtl.data import FederatedDataset
from fedmtl.errors import ConfigError, PrivacyError
from fedmtl.privacy import L2LaplaceNoise, RecordPrivacy, SeededSource

from .harness import noise_of, problem_of
from .harness import run_activations as run
from .p2p_harness import agents, arrays, mean_gradient
from .p2p_harness import schedule as draw_clients

TASKS, D = 4, 5
COUNTS = (7, 12, 1, 9)
KNORM = RecordPrivacy(clip_norm=0.3, noise_multiplier=0.5, mechanism="l2_laplace", delta=1e-5)


tasks = partial(agents, counts=COUNTS, d=D)
schedule = partial(draw_clients, count=TASKS)


def inner_noise(problem, clients):
    """Noise of the published variant at the query points at scale 1, (S, R, d), without any data."""
    acted = (
        (clients[:, :, None] == clients[:, None, :]).tril(-1).sum(2)
    )  # (R, S), how often each acted before
    keys = problem.data.keys[clients.clamp(min=0)]
    sources = [SeededSource(3, r) for r in range(len(clients))]
    return L2LaplaceNoise(1.0).draw_each(sources, "noise/local", acted.T, keys.T, problem.dimension)


# Slow loops


def prox_shared(p, threshold, penalty):
    """Of a (d, T) matrix."""
    if penalty == "nuclear":
        u, s, v = np.linalg.svd(p, full_matrices=False)
        return u @ np.diag(np.maximum(s - threshold, 0)) @ v
    out = np.zeros_like(p)
    for i, row in enumerate(p):
        norm = np.linalg.norm(row)
        if norm > threshold:
            out[i] = row * (1 - threshold / norm)
    return out


def move_own(q, gradient, a1, tau, penalty):
    if penalty == "frobenius":
        return q - a1 * (gradient + tau * q)
    q = q - a1 * gradient
    if penalty == "l1":
        return np.sign(q) * np.maximum(np.abs(q) - a1 * tau, 0)
    norm = np.linalg.norm(q)
    return q * max(0.0, 1 - a1 * tau / norm) if norm > 0 else q


def exact_own(loss, x, y, p, tau):
    def value(q):
        m = x @ (p + q)
        each = (m - y) ** 2 if loss == "squared" else np.logaddexp(0, -y * m)
        return each.mean() + tau / 2 * q @ q

    def gradient(q):
        return mean_gradient(loss, x, y, p + q) + tau * q

    return optimize.minimize(
        value, np.zeros(len(p)), jac=gradient, method="BFGS", options={"gtol": 1e-9}
    ).x


def slow(
    algorithm, data, clients, outer, a2, *, clip, inner=None, query=None, start=None, kept=None
):
    """One replicate, one event at a time: P, S, Q, returned columns as (d, T). ``kept``: the subsample of each event,
    a mask over the records of the task, the mean of whose gradients is over ``batch_rate`` times all."""
    d, loss = data[0][0].shape[1], algorithm.loss
    threshold = a2 * algorithm.lam
    p, s, own, returned = (np.zeros((d, len(data))) for _ in range(4))
    if start is not None:
        own = start.copy()
    for k, t in enumerate(clients.tolist()):
        if t < 0:
            continue
        x, y = data[t]
        size = algorithm.batch_rate * len(x)
        if kept is not None:
            x, y = x[kept[k]], y[kept[k]]
        if not isinstance(algorithm, PublishedPPDMTL):
            g = mean_gradient(loss, x, y, returned[:, t] + own[:, t], clip, size=size) + outer[k]
            own[:, t] = move_own(own[:, t], g, algorithm.a1, algorithm.tau, algorithm.own_penalty)
        else:
            old = own[:, t].copy()
            raw = mean_gradient(loss, x, y, returned[:, t] + old, size=size)
            own[:, t] = move_own(old, raw, algorithm.a1, algorithm.tau, algorithm.own_penalty)
            at = own[:, t]
            z1 = inner[k] * (2 * algorithm.a1 * clip / size) / query
            g = mean_gradient(loss, x, y, returned[:, t] + at + z1, clip, size=size) + outer[k]
        s[:, t] = g
        p = prox_shared(p - a2 * s, threshold, algorithm.penalty)
        returned[:, t] = p[:, t]
    return p, s, own, returned


def objective(data, p, q, algorithm):
    total = 0.0
    for t, (x, y) in enumerate(data):
        m = x @ (p[:, t] + q[:, t])
        total += ((m - y) ** 2 if algorithm.loss == "squared" else np.logaddexp(0, -y * m)).mean()
    shared = (
        np.linalg.norm(p, "nuc")
        if algorithm.penalty == "nuclear"
        else np.linalg.norm(p, axis=1).sum()
    )
    own = {
        "frobenius": (q**2).sum() / 2,
        "l1": np.abs(q).sum(),
        "l2": np.linalg.norm(q, axis=0).sum(),
    }[algorithm.own_penalty]
    return total + algorithm.lam * shared + algorithm.tau * own


def check_public(state, r, expected, atol=1e-9):
    p, s, own, returned = expected
    for name, value in (("shared", p), ("stale", s), ("returned", returned), ("q", own)):
        if name in state.public:
            found = state.public[name][r].T
            assert torch.allclose(found, torch.from_numpy(value), rtol=1e-7, atol=atol), name


@pytest.mark.parametrize("loss", ["logistic", "squared"])
@pytest.mark.parametrize(
    ("penalty", "own_penalty"), [("nuclear", "frobenius"), ("l21", "l1"), ("nuclear", "l2")]
)
def test_sound_runs_are_the_slow_loop(loss: str, penalty: str, own_penalty: str) -> None:
    problem = tasks(loss)
    a2 = 0.1 if loss == "squared" else 0.8
    settings = {"lam": 0.05, "tau": 0.2, "a1": 0.2, "a2": a2, "smoothness": 0.25}
    algorithm = PPDMTL(
        feature_norm=1.0, loss=loss, penalty=penalty, own_penalty=own_penalty, **settings
    )
    clients = schedule(3, 40, 1)
    state, _ = run(algorithm, problem, clients, KNORM, pieces=7)
    outer = noise_of(algorithm, problem, clients, KNORM)
    assert np.abs(outer).max() > 0.01
    for r, found in enumerate(algorithm.objective(problem, state).tolist()):
        expected = slow(algorithm, arrays(problem), clients[r], outer[:, r], a2, clip=0.3)
        assert np.linalg.matrix_rank(expected[0], tol=1e-9) >= 1
        check_public(state, r, expected)
        assert found == pytest.approx(
            objective(arrays(problem), expected[0], expected[2], algorithm), rel=1e-7
        )


@pytest.mark.parametrize("loss", ["logistic", "squared"])
def test_paper_runs_are_algorithm_1(loss: str) -> None:
    problem, clients = tasks(loss), schedule(2, 30, 5)
    algorithm = PublishedPPDMTL(
        feature_norm=1.0, loss=loss, lam=0.02, tau=0.3, a1=0.4, a2=0.5, smoothness=0.25
    )
    state, _ = run(algorithm, problem, clients, KNORM, pieces=7)
    outer, inner = noise_of(algorithm, problem, clients, KNORM), inner_noise(problem, clients)
    data = arrays(problem)
    start = np.stack([exact_own(loss, x, y, np.zeros(D), 0.3) for x, y in data], axis=1)
    query = 1 / 0.5
    for r in range(2):
        args = {"clip": 0.3, "inner": inner[:, r], "query": query, "start": start}
        expected = slow(algorithm, data, clients[r], outer[:, r], 0.5, **args)
        check_public(state, r, expected, atol=1e-6)
        own = state.private.gather("q", torch.arange(TASKS))[:, r].T
        assert torch.allclose(own, torch.from_numpy(expected[2]), atol=1e-6)
    assert set(state.public) == {"shared", "stale", "returned", "acted"}, "q_t is private here"


@pytest.mark.parametrize("kind", [PPDMTL, PublishedPPDMTL])
def test_subsampled_runs_are_the_slow_loop_on_the_records_drawn(kind: type[PPDMTL]) -> None:
    problem, clients = tasks(), schedule(2, 30, 5)
    algorithm = kind(
        feature_norm=1.0, lam=0.02, tau=0.3, a1=0.4, a2=0.5, smoothness=0.25, batch_rate=0.4
    )
    state, channel = run(algorithm, problem, clients, KNORM)
    outer, inner = noise_of(algorithm, problem, clients, KNORM), inner_noise(problem, clients)
    data, sizes, start = arrays(problem), [], None
    if kind is PublishedPPDMTL:
        start = np.stack([exact_own("logistic", x, y, np.zeros(D), 0.3) for x, y in data], axis=1)
    for r in range(2):
        kept = []
        for k, t in enumerate(clients[r].tolist()):
            use = clients[r, :k].tolist().count(t)
            key = problem.data.keys[max(t, 0)][None]
            _, tail = SeededSource(3, r).tails(
                "records", torch.tensor([use]), COUNTS[max(t, 0)], key
            )
            kept.append(2 * tail[0] < 0.4)
            sizes.append(kept[-1].mean())
        args = {"clip": 0.3, "inner": inner[:, r], "query": 1 / 0.5, "kept": kept, "start": start}
        check_public(
            state, r, slow(algorithm, data, clients[r], outer[:, r], 0.5, **args), atol=1e-6
        )
    assert 0.3 < np.mean(sizes) < 0.5
    assert np.std(sizes) > 0.05
    report = channel.report
    assert "Poisson over the records of a client, q = 0.4" in report.text()
    if kind is PublishedPPDMTL:  # two of epsilon 2 in one iteration
        assert (report.epsilon, report.claimed) == (
            math.inf,
            pytest.approx(math.log(1 + 0.4 * (math.exp(4) - 1))),
        )
    else:
        full = run(replace(algorithm, batch_rate=1.0), problem, clients, KNORM)[1]
        assert 0 < channel.epsilon < full.epsilon


# The refinement


@pytest.mark.parametrize("loss", ["logistic", "squared"])
@pytest.mark.parametrize("own_penalty", ["frobenius", "l1", "l2"])
def test_the_refinement_meets_the_optimality_conditions(loss: str, own_penalty: str) -> None:
    problem, ids = tasks(loss), torch.tensor([3, 0, 2])
    algorithm = PPDMTL(
        feature_norm=1.0,
        loss=loss,
        a1=0.2,
        tau=0.2,
        refine_tau=0.02,
        own_penalty=own_penalty,
        lam=0.01,
    )
    state, _ = run(algorithm, problem, schedule(1, 30, 4, nobody=0.0), KNORM)
    before = {name: value.clone() for name, value in state.public.items()}
    found, moved = algorithm.personalize(problem, state, ids), 0.0
    for t, w in zip(ids.tolist(), found.numpy(), strict=True):
        x, y = arrays(problem)[t]
        q = w - before["shared"][0, t].numpy()
        moved = max(moved, np.abs(q).max())
        again = move_own(q, mean_gradient(loss, x, y, w), 1.0, 0.02, own_penalty)
        assert np.abs(again - q).max() < 1e-8
    assert moved > 0.05
    assert all(torch.equal(state.public[name], value) for name, value in before.items()), (
        "nothing is sent"
    )
    assert algorithm.personalize(problem, state, torch.tensor([], dtype=torch.int64)).shape == (
        0,
        D,
    )
    plain = replace(algorithm, refine=False, refine_tau=None).personalize(problem, state, ids)
    assert torch.equal(plain, (before["shared"] + before["q"])[0, ids])


# Privacy


class FromZero(PublishedPPDMTL):
    """Starts at q_t = 0, so that only steps move it."""

    def init(self, problem, replicates=1):
        state = super().init(problem, replicates)
        state.private.scatter(
            "q", torch.arange(problem.clients), torch.zeros(problem.clients, replicates, 2)
        )
        return state


def test_the_published_state_moves_further_than_the_published_sensitivity() -> None:
    """Lemma 1 bounds one step from the same q_t; from a common start the steps add up, below the geometric bound
    S1 (1 - (1 - a1 tau)^k) / (a1 tau)."""
    d, n, a1, tau = 2, 10, 0.1, 1e-3
    x = np.zeros((n, d))
    x[:, 1] = 1e-3  # the others hardly pull back
    x[0] = (1.0, 0.0)
    swapped = x.copy()
    swapped[0] = (-1.0, 0.0)
    moved, lemma = {}, 2 * a1 / n
    for steps in (1, 10, 1000):
        ends = []
        for rows in (x, swapped):
            data = {"t0": (rows, np.ones(n))}
            problem = problem_of(FederatedDataset.from_tensors(data, test=data, classes=None))
            algorithm = FromZero(feature_norm=1.0, a1=a1, tau=tau)
            silence = [
                (k, "gradient", torch.zeros(1, d, dtype=torch.float64)) for k in range(steps)
            ]
            state, _ = run(
                algorithm, problem, torch.zeros((1, steps), dtype=torch.int64), replay=silence
            )
            ends.append(state.private.gather("q", torch.tensor([0]))[0, 0])
        moved[steps] = float((ends[0] - ends[1]).norm())
        assert moved[steps] <= lemma * (1 - (1 - a1 * tau) ** steps) / (a1 * tau) * (1 + 1e-12)
    assert moved[1] <= lemma
    assert moved[10] > 4.5 * lemma
    assert moved[1000] > 200 * lemma


def test_the_paper_prints_its_claim_beside_an_infinite_epsilon() -> None:
    problem, clients = tasks(), schedule(1, 20, 0)
    _, channel = run(PublishedPPDMTL(feature_norm=1.0, a1=0.1), problem, clients, KNORM)
    assert (channel.report.epsilon, channel.report.claimed) == (math.inf, pytest.approx(4.0))
    assert "sensitivity" in channel.report.refuted
    _, channel = run(PPDMTL(feature_norm=1.0, a1=0.1), problem, clients, KNORM)
    assert math.isfinite(channel.report.epsilon)
    assert channel.report.claimed is None
    with pytest.raises(
        PrivacyError, match=r"adds L2-Laplace noise: privacy\.mechanism is 'gaussian'"
    ):
        run(
            PublishedPPDMTL(feature_norm=1.0),
            problem,
            clients,
            RecordPrivacy(clip_norm=1.0, noise_multiplier=1.0),
        )


@pytest.mark.parametrize("batch_rate", [1.0, 0.5])
@pytest.mark.parametrize("kind", [PPDMTL, PublishedPPDMTL])
def test_secure_noise_runs(kind: type[PPDMTL], batch_rate: float) -> None:
    problem, clients = tasks(), schedule(1, 12, 3)
    privacy = RecordPrivacy(
        clip_norm=0.3, noise_multiplier=0.5, mechanism="l2_laplace", delta=1e-5, source="secure"
    )
    algorithm = kind(feature_norm=1.0, a1=0.2, lam=0.01, batch_rate=batch_rate)
    one, two = (run(algorithm, problem, clients, privacy)[0] for _ in range(2))
    assert bool(one.public["stale"].isfinite().all())
    assert not torch.isclose(one.public["stale"], two.public["stale"])[0, :2].any()


# Settings and data


def test_step_sizes_beyond_the_stable_ones_are_refused() -> None:
    problem = tasks()  # 4 tasks: 2 / (9 L)
    for loss, bias, smooth in (
        ("logistic", False, 0.25),
        ("squared", False, 2.0),
        ("logistic", True, 0.5),
    ):
        problem = tasks(loss, model=models.linear_regression(bias=bias))
        largest = 2 / (9 * smooth)
        PPDMTL(feature_norm=1.0, loss=loss, a2=largest).init(problem)
        with pytest.raises(
            ConfigError, match=r"a2 is .* 4 tasks, delay = 8 .* at most 2 / \(\(delay \+ 1\) L\)"
        ):
            PPDMTL(feature_norm=1.0, loss=loss, a2=1.01 * largest).init(problem)
        with pytest.raises(ConfigError, match="delay = 38"):
            PPDMTL(feature_norm=1.0, loss=loss, a2=2.01 / (39 * smooth), delay=38).init(problem)
        with pytest.raises(ConfigError, match="a1"):
            PPDMTL(feature_norm=1.0, loss=loss, a1=1.01 / smooth).init(problem)
    PPDMTL(feature_norm=1.0, loss="squared", a2=0.2, smoothness=0.5).init(tasks("squared"))


def test_the_delay_of_a_schedule() -> None:
    assert largest_delay(torch.tensor([[0, 1, 2, 0, 1, 2, 0, 1, 2]])) == 6
    assert largest_delay(torch.tensor([[0, 1, 1, 1, 1], [-1, 0, -1, 1, -1]])) == 6
    assert largest_delay(torch.tensor([[-1, -1]])) == 0


def test_the_optimum_of_an_independent_solver() -> None:
    """||P||_* = min over P = U V^T of (||U||^2 + ||V||^2) / 2: a smooth problem for L-BFGS, without any prox."""
    problem = tasks("logistic", counts=(30, 40, 35), d=4)
    algorithm = PPDMTL(feature_norm=1.0, lam=0.05, tau=0.1, a1=0.3, smoothness=0.12)
    state, _ = run(algorithm, problem, np.tile(np.arange(3), 600)[None])
    data, shape = arrays(problem), (4, 3)

    def smooth(z):
        u, v, q = z[:12].reshape(4, 3), z[12:21].reshape(3, 3), z[21:].reshape(shape)
        w = u @ v.T + q
        g, value = (
            np.zeros(shape),
            0.05 * ((u**2).sum() + (v**2).sum()) / 2 + 0.1 * (q**2).sum() / 2,
        )
        for t, (x, y) in enumerate(data):
            m = x @ w[:, t]
            value += np.logaddexp(0, -y * m).mean()
            g[:, t] = x.T @ (-y / (1 + np.exp(y * m))) / len(y)
        return value, np.concatenate(
            [(g @ v + 0.05 * u).ravel(), (g.T @ u + 0.05 * v).ravel(), (g + 0.1 * q).ravel()]
        )

    start = np.random.default_rng(0).normal(size=33)
    options = {"maxiter": 5000, "ftol": 1e-15, "gtol": 1e-10}
    best = optimize.minimize(smooth, start, jac=True, method="L-BFGS-B", options=options).fun
    assert float(algorithm.objective(problem, state)) == pytest.approx(best, rel=1e-9)
    zero = float(algorithm.objective(problem, algorithm.init(problem)))
    assert best < 0.9 * zero
