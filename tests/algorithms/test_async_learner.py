"""The asynchronous learner against a scalar loop of the printed equations, and against the exact optimum."""

import itertools
from dataclasses import replace

import numpy as np
import pytest
import torch
from scipy import optimize, special
from sklearn.linear_model import Ridge

from benchmarks.reproduce.cost_of_privacy.weighted import Sampled
from fedmtl import models
from fedmtl.algorithms.async_learner.algorithm import AsyncLearner
from fedmtl.algorithms.async_learner.published import PublishedAsyncLearner
from fedmtl.algorithms.linear.data import LinearData
from fedmtl.data import FederatedDataset
from fedmtl.errors import DataError
from fedmtl.privacy import RecordPrivacy, SeededSource
from fedmtl.schedules import PoissonClocks
from tests.algorithms.harness import block_of, noise_of, open_activations

from .harness import problem_of

COUNTS = (4, 9, 1, 6)
IDS = ("a", "b", "c", "d")
NOISY = RecordPrivacy(clip_norm=2.0, noise_multiplier=0.5, mechanism="laplace", delta=0.0)


def problem(loss: str = "squared", *, counts=COUNTS, p: int = 3, seed: int = 0, rounds: int = 40):
    rng = np.random.default_rng(seed)
    truth, clients = rng.normal(size=p), {}
    for name, n in zip(IDS, counts, strict=False):
        x = rng.normal(size=(n, p)) + rng.normal(size=p)
        y = x @ truth + 0.5 * rng.normal(size=n)
        clients[name] = (x, y if loss == "squared" else (y > 0).astype(np.int64))
    data = FederatedDataset.from_tensors(clients, test=clients, classes=None if loss == "squared" else 2)
    return problem_of(
        data,
        model=models.linear_regression(),
        loss="mse" if loss == "squared" else "binary_cross_entropy",
        rounds=rounds,
    )


def run(learner, work, clients, privacy=NOISY, *, cuts=(), seed=0, **options):
    """The state after all activations, in blocks that end at ``cuts``."""
    caps = np.full(work.clients, clients.shape[1])
    channel = open_activations(learner, work, clients, privacy, caps=caps, seed=seed, **options)
    channel.record = []
    state = learner.init(work, clients.shape[0])
    for start, stop in itertools.pairwise([0, *cuts, clients.shape[1]]):
        channel.begin(start, clients[:, start:stop])
        state = learner.step(work, state, block_of(clients[:, start:stop], start), channel.channel)
    return state, channel


def slope(loss: str, margin: float, y: float) -> float:
    if loss == "squared":
        return 2 * (margin - y)
    if loss == "hinge":
        return -y if y * margin < 1 else 0.0
    return -y / (1 + np.exp(y * margin))


def scalar_loop(x, y, loss, reg, top, a, owners, noise, clip, *, paper=False, kept=None, rate=1.0):
    """Equations (3) to (7) of one repetition, one record at a time; ``kept`` has the records of each answer, the mean
    of whose gradients is over ``rate`` times all."""
    total, p, n = sum(map(len, x)), x[0].shape[1], len(x)
    project = lambda v: np.array([min(top, max(-top, c)) for c in v])  # noqa: E731
    central, own = np.zeros(p), [np.zeros(p) for _ in x]
    for step, owner in enumerate(owners):
        if owner < 0:
            continue
        tbar, mean = (central + own[owner]) / 2, np.zeros(p)  # (6)
        for row, target, taken in zip(x[owner], y[owner], kept[step] if kept else [True] * len(x[owner]), strict=True):
            if not taken:
                continue
            gradient = slope(loss, float(row @ tbar), target) * row
            mean += gradient * min(1.0, clip / max(np.abs(gradient).sum(), 1e-300)) / (rate * len(x[owner]))
        gradient_g = 2 * reg * tbar
        answer = len(x[owner]) / total * (mean + noise[step])  # (4)
        own[owner] = project(tbar - a * n * (gradient_g / (2 * n) + answer))  # (5)
        share = (n - 1) / n if paper else 0.5
        central = project(tbar - a * share * gradient_g)  # (7) as printed, or (7')
    return central, np.array(own)


OPTIONS = {
    "plain": {},
    "paper": {},
    "tight box": {"theta_max": 0.02},
    "auto": {"step_size": "auto", "kappa": 0.7},
}


@pytest.mark.parametrize(("name", "replicates"), [("plain", 1), *((name, 3) for name in OPTIONS)])
@pytest.mark.parametrize("loss", ["squared", "hinge", "logistic"])
def test_every_run_is_the_scalar_loop(name: str, loss: str, replicates: int) -> None:
    settings = {"loss": loss, "reg": 0.05, "step_size": 0.08, "theta_max": 0.6} | OPTIONS[name]
    kind = PublishedAsyncLearner if name == "paper" else AsyncLearner
    learner, work = kind(**settings), problem(loss)
    rng = np.random.default_rng(len(name))
    clients = torch.from_numpy(rng.integers(-1 if replicates > 1 else 0, 4, (replicates, 40)))
    clients[0, 7] = -1
    noise = noise_of(learner, work, clients, NOISY, caps=np.full(4, clients.shape[1]), seed=0)
    cuts = sorted(rng.choice(np.arange(1, 40), 3, replace=False).tolist())
    state, _ = run(learner, work, clients, cuts=cuts)
    data = LinearData.of(work)
    x, y = [v.numpy() for v in data.x], [v.numpy() for v in data.y]
    a = 0.08 if name != "auto" else 0.7 * 5 / (2 * 40)
    says = {"paper": name == "paper"}
    for r in range(replicates):
        central, own = scalar_loop(
            x, y, loss, 0.05, learner.theta_max, a, clients[r].tolist(), noise[:, r], NOISY.clip_norm, **says
        )
        assert np.allclose(state.public["theta_l"][r].numpy(), central, rtol=1e-5, atol=5e-7)
        assert np.allclose(state.public["theta"][r].numpy(), own, rtol=1e-5, atol=5e-7)
    assert float(state.public["theta_l"].abs().max()) > 1e-3
    assert torch.equal(learner.shared(state), state.public["theta_l"][0])
    everyone = learner.personalize(work, state, torch.arange(4))
    assert torch.equal(everyone, state.public["theta_l"][:1].expand(4, -1))


@pytest.mark.parametrize("replicates", [1, 3])
@pytest.mark.parametrize("settings", [{}, {"row_norm": 3.0, "target": 1.5}], ids=str)
def test_subsampled_answers_are_the_scalar_loop_on_the_records_drawn(settings: dict, replicates: int) -> None:
    learner = Sampled(reg=0.05, step_size=0.08, theta_max=0.6, batch_rate=0.4, **settings)
    work, clip = problem(), 2.0
    privacy = RecordPrivacy(clip_norm=clip, noise_multiplier=0.5, mechanism="laplace", delta=0.0)
    clients = torch.from_numpy(np.random.default_rng(1).integers(-1, 4, (replicates, 40)))
    noise = noise_of(learner, work, clients, privacy, caps=np.full(4, 40), seed=0)
    state, channel = run(learner, work, clients, privacy, cuts=(9, 30))
    rows, sizes = learner.data(work), []
    for r in range(replicates):
        kept = []
        for k, owner in enumerate(clients[r].tolist()):
            use, key = clients[r, :k].tolist().count(owner), work.data.keys[max(owner, 0)][None]
            _, tail = SeededSource(0, r).tails("records", torch.tensor([use]), COUNTS[owner], key)
            kept.append(2 * tail[0] < 0.4)
            sizes.append(kept[-1].mean() if owner >= 0 else 0.4)
        x, y = [v.numpy() for v in rows.x], [v.numpy() for v in rows.y]
        args = (x, y, "squared", 0.05, 0.6, 0.08, clients[r].tolist(), noise[:, r], clip)
        central, own = scalar_loop(*args, kept=kept, rate=0.4)
        assert np.allclose(state.public["theta_l"][r].numpy(), central, rtol=1e-5, atol=5e-7)
        assert np.allclose(state.public["theta"][r].numpy(), own, rtol=1e-5, atol=5e-7)
    assert 0.3 < np.mean(sizes) < 0.5
    assert "Poisson over the records of a client, q = 0.4" in channel.report.text()
    full = run(replace(learner, batch_rate=1.0), work, clients, privacy)[1]
    assert 0 < channel.epsilon < full.epsilon, "the same noise over the sensitivity, amplified"


def test_a_clipped_squared_loss_is_a_huber_loss() -> None:
    """(1/n) sum_j 2 huber(residual_j) + reg ||theta||^2, each record with its own threshold C / (2 ||x_j||_1)."""
    work, reg, clip = problem(), 0.05, 1.5
    x, y = (v.numpy() for v in LinearData.of(work).pooled())
    threshold = clip / (2 * np.abs(x).sum(1))
    fitness = lambda theta: 2 * special.huber(threshold, x @ theta - y).mean() + reg * theta @ theta  # noqa: E731
    expected = optimize.minimize(fitness, np.zeros(x.shape[1]), method="BFGS", options={"gtol": 1e-8}).x
    assert (np.abs(x @ expected - y) > threshold).mean() > 0.3, "many records are clipped at the optimum"
    order = torch.from_numpy(np.concatenate([np.random.default_rng(k).permutation(4) for k in range(3000)]))[None]
    wide = RecordPrivacy(clip_norm=clip, epsilon=np.inf, mechanism="laplace")
    end = run(AsyncLearner(reg=reg, step_size=0.01), work, order, wide)[0].public["theta_l"][0].numpy()
    assert np.linalg.norm(end - expected) < 0.02 * np.linalg.norm(expected)
    assert np.linalg.norm(end - exact_ridge(work, reg)) > 0.2 * np.linalg.norm(expected)


def exact_ridge(work, reg: float) -> np.ndarray:
    x, y = LinearData.of(work).pooled()
    ridge = Ridge(alpha=reg * len(y), fit_intercept=False, solver="cholesky")
    return ridge.fit(x.numpy(), y.numpy()).coef_


@pytest.mark.parametrize(("kind", "factor"), [(AsyncLearner, 1.0), (PublishedAsyncLearner, 1 / 2 + 3 / 4)])
def test_without_noise_it_tends_to_the_minimizer_and_the_printed_equation_to_another_one(kind, factor) -> None:
    reg = 0.5  # 1/2 of grad g from (5), 1/2 from (7'), (N - 1) / N from (7)
    work = problem()
    expected = exact_ridge(work, reg * factor)
    order = torch.from_numpy(np.concatenate([np.random.default_rng(k).permutation(4) for k in range(3000)]))[None]
    gaps = []
    for a in (0.004, 0.002):
        learner = kind(reg=reg, step_size=a)
        state, _ = run(learner, work, order, None)
        gaps.append(float(np.linalg.norm(learner.shared(state).numpy() - expected) / np.linalg.norm(expected)))
    assert gaps[1] < 0.02
    assert gaps[1] < 0.65 * gaps[0], "the gap is proportional to the step"
    wrong = exact_ridge(work, reg * (9 / 4 - factor))
    assert np.linalg.norm(wrong - expected) / np.linalg.norm(expected) > 3 * gaps[1]


def test_noise_is_made_for_the_cap_or_for_the_papers_horizon() -> None:
    work = problem(rounds=40)
    privacy = RecordPrivacy(clip_norm=2.0, epsilon=4.0, mechanism="laplace", delta=0.0)
    horizon = PublishedAsyncLearner()
    for learner, caps in (
        (AsyncLearner(), [10, 10, 3, 10]),
        (horizon, [40] * 4),
        (PublishedAsyncLearner(horizon=90), [90] * 4),
    ):
        (plan,) = learner.plan(work, PoissonClocks(per_client=(10, 10, 3, 10)).bind(4))
        assert plan.caps is not None
        assert plan.caps.tolist() == caps
    _, channel = run(horizon, work, torch.zeros(1, 4, dtype=torch.int64), privacy)
    assert channel.noise_multipliers == pytest.approx(40 / 4.0, rel=1e-4)  # scale 2 Xi T / (n_i eps), Theorem 1
    assert channel.epsilon == pytest.approx(4.0 * 4 / 40, rel=1e-4)


def test_data_of_another_loss_are_refused() -> None:
    with pytest.raises(DataError, match="two classes"):
        AsyncLearner(loss="hinge").init(problem())
