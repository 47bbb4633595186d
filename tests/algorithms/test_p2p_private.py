"""Privacy of peer-to-peer learning: allocation, the published variant."""

import math

import numpy as np
import pytest
import torch
from dp_accounting import dp_event
from scipy import optimize

from fedmtl.algorithms import PeerToPeer
from fedmtl.algorithms.p2p.allocation import wakeup_weights
from fedmtl.contrib.published.p2p import PublishedPeerToPeer, composed
from fedmtl.errors import PrivacyError
from fedmtl.graphs import KNNCosine
from fedmtl.privacy import RecordPrivacy
from tests.helpers import library_accountant

from .harness import noise_of
from .harness import run_activations as run
from .p2p_harness import COUNTS, agents, arrays, mean_gradient, random_graph, slow

N = len(COUNTS)


def law(mechanism: str, **options) -> RecordPrivacy:
    return RecordPrivacy(
        **{"clip_norm": 0.4, "noise_multiplier": 0.5, "mechanism": mechanism, "delta": 1e-5}
        | options
    )


# Allocation


@pytest.mark.parametrize(("root", "power"), [(3, 1), (4, 2)])
def test_the_corrected_allocation_minimizes_the_noise_of_theorem_2(root: int, power: int) -> None:
    wakeups, c = 6, 0.7

    def noise(
        budget: np.ndarray,
    ) -> float:  # what is added at wake-up t shrinks in those that follow
        return sum(c ** (wakeups - 1 - t) / e**2 for t, e in enumerate(budget))

    def spent(budget: np.ndarray) -> float:
        return (budget**power).sum()

    found = optimize.minimize(
        noise,
        np.ones(wakeups),
        constraints={"type": "eq", "fun": lambda b: spent(b) - wakeups},
        bounds=[(0.05, 5)] * wakeups,
        options={"ftol": 1e-14, "maxiter": 1000},
    ).x
    weights = wakeup_weights("optimal", wakeups, c, root=root)
    assert weights.mean() == pytest.approx(1)
    assert np.allclose(weights / weights[0], found / found[0], rtol=1e-3)
    assert np.all(np.diff(weights) > 0), "less noise late"
    printed = wakeup_weights("paper", wakeups, c)
    assert np.all(np.diff(printed) < 0)
    same = weights * (wakeups / spent(weights)) ** (1 / power)
    reversed_ = printed * (wakeups / spent(printed)) ** (1 / power)
    assert noise(same) < noise(np.ones(wakeups)) < noise(reversed_)


def test_a_free_tilt_is_the_last_weight_over_the_first() -> None:
    weights = wakeup_weights(3.0, 5, 0.9)
    assert weights[-1] / weights[0] == pytest.approx(3.0)
    assert np.allclose(weights[1:] / weights[:-1], 3.0**0.25)
    assert wakeup_weights(3.0, 1, 0.9).tolist() == [1.0]
    assert wakeup_weights("uniform", 4, 0.9).tolist() == [1.0] * 4


@pytest.mark.parametrize("allocation", ["optimal", "paper", 4.0])
def test_the_channel_spends_each_budget_over_the_weighted_wakeups(allocation: str | float) -> None:
    problem = agents()
    budgets = {f"a{k}": 1.0 + 0.5 * k for k in range(N)}
    privacy = RecordPrivacy(clip_norm=0.4, epsilon=budgets, delta=1e-4)
    algorithm = PeerToPeer(
        feature_norm=1.0, graph=random_graph(N), mu=20.0, lam=0.5, allocation=allocation
    )
    uses = np.array([3, 1, 4, 2, 5, 3])
    clients = torch.from_numpy(np.repeat(np.arange(N), uses))[None]
    _, channel = run(algorithm, problem, clients, privacy)
    network = algorithm.network(problem)
    c = 1 - network.convexity / network.largest_curvature
    assert 0.05 < c < 0.9, "so that the weights differ"
    for k in range(N):
        weights = wakeup_weights(allocation, int(uses[k]), c)
        z = channel.noise_multipliers[k] / weights
        accountant = library_accountant()  # one Gaussian of the summed precision
        accountant.compose(dp_event.GaussianDpEvent(float((z**-2).sum() ** -0.5)))
        assert accountant.get_epsilon(1e-4) == pytest.approx(budgets[f"a{k}"], rel=2e-3)
    assert channel.epsilon == pytest.approx(max(budgets.values()), rel=2e-3)


def test_weights_are_those_of_the_rate_of_an_agents_own_wakeups() -> None:
    problem, graph = agents(), random_graph(N)
    algorithm = PeerToPeer(feature_norm=1.0, graph=graph, mu=3.0, lam=0.5, allocation="optimal")
    degree, m = graph.weights.toarray().sum(1), np.array(COUNTS)
    sigma = 3.0 * (degree * m / m.max() * 2 * 0.5).min()
    largest = (degree * (1 + 3.0 * m / m.max() * (0.25 + 2 * 0.5))).max()
    pure = law("laplace", delta=0.0, noise_multiplier=None, epsilon=1.0)
    found = algorithm.weights(problem, np.array([4] * N), pure)[0]
    assert found[1] / found[0] == pytest.approx((1 - sigma / largest) ** (-1 / 3))
    found = algorithm.weights(problem, np.array([4] * N), law("gaussian"))[0]
    assert found[1] / found[0] == pytest.approx((1 - sigma / largest) ** (-1 / 4))


# What is refused, and the published variant


def test_a_local_start_is_the_minimizers_of_all_agents() -> None:
    problem = agents()
    algorithm = PublishedPeerToPeer(
        feature_norm=1.0, graph=random_graph(N), local_start=True, lam=0.1
    )
    state, _ = run(algorithm, problem, torch.tensor([[-1]]))
    for i, (x, y) in enumerate(arrays(problem)):
        theta = state.public["theta"][0, i].numpy()
        assert np.linalg.norm(mean_gradient("logistic", x, y, theta) + 0.2 * theta) < 1e-8


def test_the_published_variant_clips_in_the_wrong_norm_and_has_an_infinite_epsilon() -> None:
    problem, graph = agents(), random_graph(N)
    sound = PeerToPeer(feature_norm=1.0, graph=graph, mu=0.7)
    paper = PublishedPeerToPeer(feature_norm=1.0, graph=graph, mu=0.7)
    privacy = law("laplace", clip_norm=0.3)
    clients = torch.arange(N)[None]
    state, channel = run(paper, problem, clients, privacy)
    noise = noise_of(sound, problem, clients, privacy)[:, 0]
    settings = {"mu": 0.7, "lam": "inverse", "smooth": 0.25, "noise": noise, "clip": 0.3}
    expected = slow(arrays(problem), graph.weights.toarray(), "logistic", clients[0], **settings)
    assert np.allclose(state.public["theta"][0].numpy(), expected, rtol=1e-9)
    assert channel.epsilon == math.inf
    report = channel.report
    assert report.epsilon == math.inf
    assert "L1 norm" in report.refuted
    assert "raw records" not in report.refuted
    assert report.claimed == pytest.approx(2.0), "one wake-up at 1 / multiplier"
    _, channel = run(paper, problem, clients.repeat(1, 3), privacy)
    assert channel.report.claimed == pytest.approx(composed([2.0] * 3, 1e-5))
    # the claim is that of the agent with the most wake-ups
    _, channel = run(paper, problem, torch.tensor([[0, 1, 1, 1]]), privacy)
    assert channel.report.claimed == pytest.approx(composed([2.0] * 3, 1e-5))
    local = PublishedPeerToPeer(feature_norm=1.0, graph=graph, local_start=True)
    _, channel = run(local, problem, clients, privacy)
    assert "raw records" in channel.report.refuted
    with pytest.raises(PrivacyError, match=r"adds Laplace noise: privacy\.mechanism is 'gaussian'"):
        run(paper, problem, clients, law("gaussian"))


@pytest.mark.parametrize(
    ("epsilon", "expected"),
    [
        # 100 steps at delta = 1e-5, each bound where it is the least one:
        (0.01, 0.4341995),  # tanh(.005) + sqrt(.02 log(e + 1e4))
        (0.5, 36.2387),  # 50 tanh(.25) + sqrt(50 log(1e5))
        (2.0, 200.0),  # the sum
    ],
)
def test_the_claim_is_the_least_bound_of_theorem_3_5(epsilon: float, expected: float) -> None:
    assert composed([epsilon] * 100, 1e-5) == pytest.approx(expected, rel=1e-5)


def test_notes_name_what_is_outside() -> None:
    problem = agents()
    for graph, said in ((random_graph(N), "6 agents"), (KNNCosine(2), "built from the records")):
        _, channel = run(
            PeerToPeer(feature_norm=1.0, graph=graph), problem, torch.tensor([[0]]), law("gaussian")
        )
        outside = " ".join(channel.report.outside)
        assert said in outside
        assert "confidences c_i" in outside
        assert "centring" in outside
