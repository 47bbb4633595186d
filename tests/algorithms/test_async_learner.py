"""The asynchronous learner against a scalar loop of the printed equations."""

from dataclasses import replace

import numpy as np
import pytest
import torch

from benchmarks.reproduce.cost_of_privacy.weighted import Sampled
from fedmtl import models
from fedmtl.algorithms.async_learner.algorithm import AsyncLearner
from fedmtl.algorithms.async_learner.published import PublishedAsyncLearner
from fedmtl.algorithms.linear.data import LinearData
from fedmtl.data import FederatedDataset
from fedmtl.errors import DataError
from fedmtl.privacy import RecordPrivacy, SeededSource
from fedmtl.schedules import PoissonClocks

from .harness import noise_of, problem_of
from .harness import run_activations as run

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
    noise = noise_of(learner, work, clients, NOISY)
    state, _ = run(learner, work, clients, NOISY, pieces=7)
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
    work = problem()
    clients = torch.from_numpy(np.random.default_rng(1).integers(-1, 4, (replicates, 40)))
    noise = noise_of(learner, work, clients, NOISY)
    state, channel = run(learner, work, clients, NOISY, pieces=7)
    rows, sizes = learner.data(work), []
    for r in range(replicates):
        kept = []
        for k, owner in enumerate(clients[r].tolist()):
            use, key = clients[r, :k].tolist().count(owner), work.data.keys[max(owner, 0)][None]
            _, tail = SeededSource(3, r).tails("records", torch.tensor([use]), COUNTS[owner], key)
            kept.append(2 * tail[0] < 0.4)
            sizes.append(kept[-1].mean() if owner >= 0 else 0.4)
        x, y = [v.numpy() for v in rows.x], [v.numpy() for v in rows.y]
        args = (x, y, "squared", 0.05, 0.6, 0.08, clients[r].tolist(), noise[:, r], NOISY.clip_norm)
        central, own = scalar_loop(*args, kept=kept, rate=0.4)
        assert np.allclose(state.public["theta_l"][r].numpy(), central, rtol=1e-5, atol=5e-7)
        assert np.allclose(state.public["theta"][r].numpy(), own, rtol=1e-5, atol=5e-7)
    assert 0.3 < np.mean(sizes) < 0.5
    assert "Poisson over the records of a client, q = 0.4" in channel.report.text()
    full = run(replace(learner, batch_rate=1.0), work, clients, NOISY)[1]
    assert 0 < channel.epsilon < full.epsilon, "the same noise over the sensitivity, amplified"


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
