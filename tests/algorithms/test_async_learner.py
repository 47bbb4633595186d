"""The asynchronous learner against a scalar loop of the printed equations."""

from functools import partial

import numpy as np
import pytest
import torch

from fedmtl import models
from fedmtl.algorithms.async_learner.algorithm import AsyncLearner
from fedmtl.algorithms.linear.data import LinearData
from fedmtl.contrib.published.async_learner import PublishedAsyncLearner
from fedmtl.errors import DataError
from fedmtl.privacy import RecordPrivacy
from fedmtl.schedules import PoissonClocks

from .harness import noise_of
from .harness import run_activations as run
from .p2p_harness import agents

COUNTS = (4, 9, 1, 6)
problem = partial(
    agents, counts=COUNTS, d=3, length=3.0, model=models.linear_regression(), rounds=40
)
NOISY = RecordPrivacy(clip_norm=2.0, noise_multiplier=0.5, mechanism="laplace", delta=0.0)


def slope(loss: str, margin: float, y: float) -> float:
    if loss == "squared":
        return 2 * (margin - y)
    if loss == "hinge":
        return -y if y * margin < 1 else 0.0
    return -y / (1 + np.exp(y * margin))


def scalar_loop(x, y, loss, reg, top, a, owners, noise, clip, *, paper):
    """Equations (3) to (7) of one repetition, one record at a time."""
    total, p, n = sum(map(len, x)), x[0].shape[1], len(x)
    project = lambda v: np.array([min(top, max(-top, c)) for c in v])  # noqa: E731
    central, own = np.zeros(p), [np.zeros(p) for _ in x]
    for step, owner in enumerate(owners):
        if owner < 0:
            continue
        tbar, mean = (central + own[owner]) / 2, np.zeros(p)  # (6)
        for row, target in zip(x[owner], y[owner], strict=True):
            gradient = slope(loss, float(row @ tbar), target) * row
            mean += gradient * min(1.0, clip / max(np.abs(gradient).sum(), 1e-300)) / len(x[owner])
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


@pytest.mark.parametrize("name", OPTIONS)
@pytest.mark.parametrize("loss", ["squared", "hinge", "logistic"])
def test_every_run_is_the_scalar_loop(name: str, loss: str) -> None:
    settings = {"loss": loss, "reg": 0.05, "step_size": 0.08, "theta_max": 0.6} | OPTIONS[name]
    kind = PublishedAsyncLearner if name == "paper" else AsyncLearner
    learner, work = kind(**settings), problem(loss)
    rng = np.random.default_rng(len(name))
    clients = torch.from_numpy(rng.integers(-1, 4, (3, 40)))
    clients[0, 7] = -1
    noise = noise_of(learner, work, clients, NOISY)
    state, _ = run(learner, work, clients, NOISY, pieces=7)
    data = LinearData.of(work)
    x, y = [v.numpy() for v in data.x], [v.numpy() for v in data.y]
    a = 0.08 if name != "auto" else 0.7 * 5 / (2 * 40)
    for r in range(3):
        settings = (
            loss,
            0.05,
            learner.theta_max,
            a,
            clients[r].tolist(),
            noise[:, r],
            NOISY.clip_norm,
        )
        central, own = scalar_loop(x, y, *settings, paper=name == "paper")
        assert np.allclose(state.public["theta_l"][r].numpy(), central, rtol=1e-5, atol=5e-7)
        assert np.allclose(state.public["theta"][r].numpy(), own, rtol=1e-5, atol=5e-7)
    assert float(state.public["theta_l"].abs().max()) > 1e-3
    assert torch.equal(learner.shared(state), state.public["theta_l"][0])
    everyone = learner.personalize(work, state, torch.arange(4))
    assert torch.equal(everyone, state.public["theta_l"][:1].expand(4, -1))


def test_noise_is_made_for_the_cap_or_for_the_papers_horizon() -> None:
    work = problem("squared")
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
    assert channel.noise_multipliers == pytest.approx(
        40 / 4.0, rel=1e-4
    )  # scale 2 Xi T / (n_i eps), Theorem 1
    assert channel.epsilon == pytest.approx(4.0 * 4 / 40, rel=1e-4)


def test_nobody_answers_more_often_than_the_run_has_activations() -> None:
    """Noise for answers that never come would be noise for nothing."""
    (plan,) = AsyncLearner().plan(problem("squared"), PoissonClocks(per_client=100).bind(4))
    assert plan.caps is not None
    assert plan.caps.tolist() == [40] * 4


def test_the_step_is_that_of_the_planned_horizon() -> None:
    """kappa (N + 1) / (2 T), here 8 * 5 / (2 * 100), whatever the number of events."""
    assert AsyncLearner(kappa=8.0, horizon=100).effective_step(4, 40) == pytest.approx(0.2)
    assert AsyncLearner(kappa=8.0).effective_step(4, 40) == pytest.approx(0.5)


def test_data_of_another_loss_are_refused() -> None:
    with pytest.raises(DataError, match="two classes"):
        AsyncLearner(loss="hinge").init(problem("squared"))
