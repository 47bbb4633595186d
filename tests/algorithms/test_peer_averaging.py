"""A few releases of each agent, and free averaging after them: the slow loop, what is charged, the last step."""

import math
from dataclasses import replace
from functools import partial

import numpy as np
import pytest
import torch
from dp_accounting import dp_event
from scipy import optimize

from fedmtl import PeerAveraging, PoissonClocks, RecordPrivacy, models
from fedmtl.data import FederatedDataset
from fedmtl.data.examples import Examples
from fedmtl.graphs import Ring
from tests import small
from tests.helpers import library_accountant
from tests.small import check_resumed

from .harness import run_activations as run
from .p2p_harness import COUNTS, D, agents, arrays, mean_gradient, random_graph, schedule

N = len(COUNTS)
CLIP_ONLY = RecordPrivacy(clip_norm=0.4, epsilon=math.inf)
GAUSSIAN = RecordPrivacy(clip_norm=0.4, epsilon=2.0, delta=1e-5, mechanism="gaussian")


def without_records(problem, agent: int):
    """The same, where an agent has no training records."""
    train = problem.data.train
    low, high = train.offsets[agent : agent + 2].tolist()
    offsets = torch.cat([train.offsets[: agent + 1], train.offsets[agent + 1 :] - (high - low)])
    x, y = (torch.cat([part[:low], part[high:]]) for part in (train.x, train.y))
    return replace(problem, data=replace(problem.data, train=Examples(x, y, offsets)))


def slow(data, weights, loss, clients, *, releases, mu, lam, curvature, power, given=None):
    """One replicate, event by event, from the definition: the first releases of an agent are gradients (those
    ``given``, by event and agent, or exact ones), afterwards it steps along the mean of their linear models."""
    theta, told = np.zeros((N, D)), [[] for _ in range(N)]
    for k, i in enumerate(clients.tolist()):
        if i < 0:
            continue
        x, y = data[i]
        pull = mu * ((len(y) / max(COUNTS)) ** power if len(y) else 1e-3)
        ridge = 1 / max(len(y), 1) if lam == "inverse" else lam
        smooth = curvature if len(y) else 0.0
        alpha = 1 / (1 + pull * (smooth + 2 * ridge))
        if len(told[i]) < releases:
            step = mean_gradient(loss, x, y, theta[i], 0.4) if given is None else given[k, i]
            told[i].append((theta[i].copy(), step))
        else:
            step = np.mean([g + smooth * (theta[i] - at) for at, g in told[i]], axis=0)
        around = weights[i] @ theta / weights[i].sum()
        theta[i] = (1 - alpha) * theta[i] + alpha * (around - pull * (step + 2 * ridge * theta[i]))
    return theta


@pytest.mark.parametrize(
    ("loss", "releases", "lam"), [("logistic", 1, "inverse"), ("squared", 3, 0.05)]
)
def test_runs_are_the_slow_loop(loss: str, releases: int, lam: float | str) -> None:
    problem, graph, clients = without_records(agents(loss), 2), random_graph(N), schedule(3, 70, 1)
    settings = {
        "mu": 0.7,
        "lam": lam,
        "releases": releases,
        "confidence_power": 2.0,
        "smoothness": 0.9,
    }
    algorithm = PeerAveraging(feature_norm=1.0, graph=graph, loss=loss, **settings)
    about = {"releases": releases, "mu": 0.7, "lam": lam, "curvature": 0.9, "power": 2.0}
    for privacy in (CLIP_ONLY, GAUSSIAN):
        whole, channel = run(algorithm, problem, clients, privacy)
        assert (channel.accountant.uses <= releases).all()
        for r in range(3):
            given = None
            if privacy is GAUSSIAN:  # noise and all, as it was released
                given = {
                    (k, int(clients[r, k])): value[r].numpy() for k, _, value in channel.record
                }
            expected = slow(
                arrays(problem), graph.weights.toarray(), loss, clients[r], given=given, **about
            )
            np.testing.assert_allclose(
                whole.public["theta"][r].numpy(), expected, rtol=1e-9, atol=1e-12
            )


def test_all_of_the_budget_is_in_the_releases_and_nothing_else_is_charged() -> None:
    problem, clients = agents(), torch.arange(N).repeat(12)[None]
    for releases in (1, 4):
        algorithm = PeerAveraging(feature_norm=1.0, graph=Ring(), releases=releases)
        _, channel = run(algorithm, problem, clients, GAUSSIAN, pieces=5)
        assert channel.accountant.uses.tolist() == [[releases] * N]
        assert channel.accountant.epsilons()[0] == pytest.approx(2.0, rel=1e-3)
        z = channel.channel.noise_multipliers[0]
        accountant = library_accountant()
        accountant.compose(dp_event.GaussianDpEvent(float(z)), releases)
        assert accountant.get_epsilon(1e-5) == pytest.approx(2.0, rel=2e-3)
        values = torch.stack([value for *_, value in channel.record])
        assert values[: releases * N].ne(0).all()
        assert not values[releases * N :].any()


RNG = np.random.default_rng(0)
CLIENTS = {f"c{k}": (RNG.normal(size=(8, 3)), RNG.integers(0, 2, 8)) for k in range(6)}
trainer = partial(  # six clients of eight records on a ring; three releases at most, nine wake-ups
    small.trainer,
    algorithm=PeerAveraging(feature_norm=1.0, graph=Ring(), releases=3),
    data=FederatedDataset.from_tensors(CLIENTS, test=CLIENTS, classes=2),
    model=models.linear_regression(bias=False),
    schedule=PoissonClocks(per_client=9),
    privacy=RecordPrivacy(clip_norm=0.5, epsilon=2.0, delta=1e-4),
    rounds=1000,
)


@pytest.mark.parametrize("at", [3, 18, 40])
def test_an_interrupted_run_resumes_to_the_same_bits(at: int, tmp_path) -> None:
    found = check_resumed(partial(trainer, eval_every=100, checkpoint_every=2), tmp_path, at)
    assert found.privacy.releases == 18
    assert found.epsilon == pytest.approx(2.0, rel=1e-3)


def test_where_the_budget_ends_before_the_schedule_agents_go_on_averaging() -> None:
    """With a fixed noise multiplier: the run is that of as many releases as the budget allows."""
    fixed = RecordPrivacy(
        clip_norm=0.5, epsilon=2.0, noise_multiplier=4.0, delta=1e-4, mechanism="gaussian"
    )
    algorithm = PeerAveraging(feature_norm=1.0, graph=Ring(), releases=9)
    found = trainer(algorithm=algorithm, privacy=fixed).fit()
    assert found.stopped == "rounds"
    accountant, fits = library_accountant(), 0
    while accountant.compose(dp_event.GaussianDpEvent(4.0)).get_epsilon(1e-4) <= 2.0:
        fits += 1
    assert 1 < fits < 9
    assert found.privacy.releases == 6 * fits
    assert found.epsilon <= 2.0
    same = trainer(
        algorithm=replace(algorithm, releases=fits), privacy=replace(fixed, epsilon=None)
    ).fit()
    assert torch.equal(found.personal, same.personal)


def test_the_last_step_minimizes_the_agents_block_of_the_objective() -> None:
    """v minimizes sum_j l(v; x_j, y_j) + a ||v - mean||^2; with a = m_i / (2 mu c_i) it is Q's minimum there."""
    problem, graph = agents(counts=(7, 12, 3, 9, 5, 8)), random_graph(N)
    weights = graph.weights.toarray()
    algorithm = PeerAveraging(feature_norm=1.0, graph=graph, refine=0.7)
    state = algorithm.init(problem, 2)
    state.public["theta"].normal_(generator=torch.Generator().manual_seed(1))
    found = algorithm.models(problem, state, torch.arange(N)).numpy()
    for r in range(2):
        theta = state.public["theta"][r].numpy()
        for i, (x, y) in enumerate(arrays(problem)):
            mean = weights[i] @ theta / weights[i].sum()
            value = lambda v, x=x, y=y, mean=mean: (  # noqa: E731
                np.logaddexp(0, -y * (x @ v)).sum() + 0.7 * ((v - mean) ** 2).sum()
            )
            best = optimize.minimize(value, mean, options={"gtol": 1e-9}).x
            np.testing.assert_allclose(found[r, i], best, atol=2e-6)
    some = torch.tensor([4, 1])
    torch.testing.assert_close(
        algorithm.personalize(problem, state, some).double(), torch.from_numpy(found[0])[some]
    )
