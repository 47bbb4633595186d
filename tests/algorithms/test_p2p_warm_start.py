"""The private warm start of peer-to-peer learning: its fits, their sensitivity, its noise, its charge, its spread."""

import math
from dataclasses import replace

import numpy as np
import pytest
import torch
from dp_accounting import dp_event
from scipy import optimize

from fedmtl import PeerAveraging, PoissonClocks, Trainer, models
from fedmtl.algorithms import PeerToPeer
from fedmtl.algorithms.linear.data import LinearLoss
from fedmtl.algorithms.p2p.warm_start import accuracy, mean_at_minimizer
from fedmtl.contrib.published.p2p import PublishedPeerToPeer, composed
from fedmtl.data import Examples
from fedmtl.errors import ConfigError, PrivacyError
from fedmtl.privacy import RecordPrivacy
from fedmtl.privacy.clip import Clip
from fedmtl.privacy.records import Records
from tests.helpers import library_accountant
from tests.trainer.ledgers import participations

from .harness import run_activations as run
from .p2p_harness import COUNTS, D, agents, arrays, mean_gradient, random_graph, slow

N, LAM, MU = len(COUNTS), 0.3, 0.7
OPENING = torch.arange(N)[None]
PURE = RecordPrivacy(clip_norm=0.4, epsilon=3.0, mechanism="l2_laplace", delta=0.0)


def method(**options) -> PeerToPeer:
    return PeerToPeer(
        **{"feature_norm": 1.0, "graph": random_graph(N), "mu": MU, "lam": LAM, "warm_start": 0.25}
        | options
    )


def model_of(
    loss: str, x: np.ndarray, y: np.ndarray, clip: float = math.inf, lam: float = LAM
) -> np.ndarray:
    """Theta^loc, as it is released without noise."""
    bound = None if clip == math.inf else Clip(clip, "l2")
    return mean_at_minimizer(LinearLoss(loss), x, y, lam, bound) / (-2 * lam)


# The agents' own models


@pytest.mark.parametrize("loss", ["squared", "logistic"])
@pytest.mark.parametrize("clip", [math.inf, 3.0, 0.2])
def test_an_agents_own_model_has_no_clipped_gradient_left(loss: str, clip: float) -> None:
    for x, y in arrays(agents(loss)):
        theta = model_of(loss, x, y, clip)
        assert np.linalg.norm(mean_gradient(loss, x, y, theta, clip) + 2 * LAM * theta) < 1e-9


def test_without_a_clip_it_is_the_ridge_fit_and_with_one_the_huber_fit() -> None:
    x, y = arrays(agents("squared"))[1]
    ridge = np.linalg.solve(x.T @ x / len(x) + LAM * np.eye(D), x.T @ y / len(x))
    assert np.allclose(model_of("squared", x, y), ridge, rtol=1e-9)
    limits = 0.3 / np.linalg.norm(x, axis=1)

    def huber(
        theta: np.ndarray,
    ) -> float:  # quadratic in an error up to half the limit, then linear
        error = np.abs(x @ theta - y)
        linear = limits * error - limits**2 / 4
        return float(np.where(2 * error <= limits, error**2, linear).mean() + LAM * theta @ theta)

    found = optimize.minimize(huber, np.zeros(D), method="BFGS", options={"gtol": 1e-10}).x
    assert np.allclose(model_of("squared", x, y, 0.3), found, atol=1e-5)


# Sensitivity: L / (m lambda)


@pytest.mark.parametrize("loss", ["squared", "logistic"])
def test_no_neighbour_moves_a_model_further_than_the_supplement_says(loss: str) -> None:
    generator, clip, m = np.random.default_rng(0), 0.4, 5
    largest = 0.0
    for _ in range(150):
        rows = generator.normal(size=(m + 1, D))
        rows *= generator.choice([0.1, 1.0], (m + 1, 1)) / np.linalg.norm(
            rows, axis=1, keepdims=True
        )
        y = generator.choice([-1.0, 1.0], m + 1) * (
            1 if loss == "logistic" else generator.choice([0.1, 50.0])
        )
        if (
            generator.random() < 0.5
        ):  # records that all pull one way, and a neighbour's that pulls the other
            rows[:] = rows[0]
            y[:], y[-1] = y[0], -y[0]
        before = model_of(loss, rows[:m], y[:m], clip)
        after = model_of(loss, rows[1:], y[1:], clip)
        largest = max(largest, float(np.linalg.norm(after - before)) * m * LAM / clip)
    assert 0.8 < largest <= 1


def test_a_neighbour_attains_it() -> None:
    """Targets so far away that every gradient is clipped: m - 1 records cancel out, and the last changes its side."""
    m, clip, row = 5, 0.4, np.eye(D)[:1]
    x, side = np.repeat(row, m, 0), np.array([1.0, -1.0, 1.0, -1.0, 1.0])
    before, after = (model_of("squared", x, 1e3 * y, clip) for y in (side, side * [1, 1, 1, 1, -1]))
    assert np.linalg.norm(after - before) == pytest.approx(clip / (m * LAM), rel=1e-5)


@pytest.mark.parametrize("magnitude", [1e-3, 1.0, 1e6])
def test_an_agent_with_many_records_is_as_exact_as_the_margin_of_the_clip_asks(
    magnitude: float,
) -> None:
    generator, m = np.random.default_rng(1), 2000
    x = generator.normal(size=(m, D))
    x /= np.linalg.norm(x, axis=1, keepdims=True)
    y, lam, clip = magnitude * generator.normal(size=m), 1 / m, 0.4
    theta = model_of("squared", x, y, clip, lam)
    left = mean_gradient("squared", x, y, theta, clip) + 2 * lam * theta
    assert m * np.linalg.norm(left) < 2.0**-21 * clip


# Noise


def models_noise(
    privacy: RecordPrivacy, runs: int, algorithm: PeerToPeer | None = None
) -> np.ndarray:
    """The noise on the models of all agents (runs, n, D): of a release less what is released without noise."""
    problem, algorithm = agents("squared"), algorithm or method(loss="squared")
    clients = torch.cat([OPENING, OPENING.flip(1), OPENING], 1).expand(runs, -1)
    state, _ = run(algorithm, problem, clients, privacy)
    exact = [model_of("squared", x, y, privacy.clip_norm) for x, y in arrays(problem)]
    return state.public["warm_models"].numpy() - np.array(exact)


def expected_norms(epsilon: float, share: float, clip: float) -> np.ndarray:
    """Of L2-Laplace noise of scale L / (m lambda epsilon_0) in D dimensions, which is a Gamma variable's mean."""
    return D * clip / (np.array(COUNTS) * LAM * share * epsilon)


def close(norms: np.ndarray, expected: np.ndarray) -> bool:
    error = 4.5 / math.sqrt(
        D * len(norms)
    )  # the standard deviation of a Gamma(D) variable is 1 / sqrt(D) of its mean
    return bool((np.abs(norms.mean(0) / expected - 1) < error).all())


def test_the_noise_on_a_model_has_the_scale_of_the_supplement() -> None:
    norms = np.linalg.norm(models_noise(PURE, 2000), axis=2)
    assert close(norms, expected_norms(3.0, 0.25, 0.4))


def test_half_of_the_noise_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    whole = Records.scales
    monkeypatch.setattr(
        Records, "scales", lambda self, who, uses: whole(self, who, uses) * np.where(uses, 1.0, 0.5)
    )
    norms = np.linalg.norm(models_noise(PURE, 2000), axis=2)
    assert not close(norms, expected_norms(3.0, 0.25, 0.4))
    assert close(norms, expected_norms(3.0, 0.5, 0.4))


# Its cost


@pytest.mark.parametrize("share", [0.1, 1 / 3])
def test_pure_budgets_are_split_as_asked(share: float) -> None:
    clients = OPENING.repeat(1, 4)
    _, channel = run(method(warm_start=share), agents(), clients, PURE)
    each = [channel.channel.costs.event(2, use).epsilon for use in range(4)]
    assert each[0] == pytest.approx(3.0 * share, rel=1e-4)
    assert each[1:] == pytest.approx([3.0 * (1 - share) / 3] * 3, rel=1e-4)
    assert channel.epsilon == pytest.approx(3.0, rel=1e-4)


def test_gaussian_noise_of_the_start_and_of_the_wakeups_composes_to_the_budget() -> None:
    privacy = RecordPrivacy(clip_norm=0.4, epsilon=2.0, delta=1e-4)
    for allocation in ("uniform", "optimal"):
        _, channel = run(
            method(allocation=allocation, warm_start=0.4), agents(), OPENING.repeat(1, 4), privacy
        )
        scales = np.array(
            [
                channel.channel.records.scales(np.array([[2]]), np.array([[t]]))[0, 0]
                for t in range(4)
            ]
        )
        precision = ((2 * 0.4 / scales) ** 2).sum()  # of sums, which a record moves by 2 C
        accountant = library_accountant()
        accountant.compose(dp_event.GaussianDpEvent(float(precision**-0.5)))
        assert accountant.get_epsilon(1e-4) == pytest.approx(2.0, rel=2e-3)
        assert scales[0] < scales[1:].min(), "it has more than the fourth part"


def test_the_ledger_is_charged_for_every_agents_release_before_it_is_made(tmp_path) -> None:
    data = agents().data
    trainer = Trainer(
        algorithm=method(),
        data=data,
        model=models.linear_regression(bias=False),
        schedule=PoissonClocks(per_client=3),
        privacy=PURE,
        rounds=1000,
        folder=tmp_path,
        progress=False,
    )
    assert trainer.bound_schedule.activations(0, 0, N + 4).client[0, :N].tolist() == list(range(N))
    result = trainer.fit()
    assert participations(tmp_path / "private/ledger.jsonl") == dict.fromkeys(range(N), 4)
    assert result.privacy.releases == 4 * N
    assert result.privacy.epsilon == pytest.approx(3.0, rel=1e-4)
    assert "each acts once before all others" in str(result.privacy)
    channel_of_others = PoissonClocks(per_client=3).bind(N, names=data.ids, keys=data.keys)
    rest = trainer.bound_schedule.activations(0, N, 4 * N).client
    assert torch.equal(rest, channel_of_others.activations(0, 0, 3 * N).client), (
        "the clocks are as without a warm start"
    )


# Where all start


def test_all_start_at_the_fixed_point_of_the_supplement() -> None:
    """One with no records of its own has no model to release, and takes part with its neighbours'."""
    problem = agents(counts=(7, 12, 3, 1, 5, 8))
    train = problem.data.train
    keep = torch.arange(len(train)) != int(train.offsets[3])
    offsets = train.offsets - (torch.arange(N + 1) > 3).long()
    without = replace(problem.data, train=Examples(train.x[keep], train.y[keep], offsets))
    problem, algorithm = replace(problem, data=without), method()
    clients = torch.cat([OPENING, torch.full((1, 2), -1)], 1).repeat(2, 1)
    state, _ = run(algorithm, problem, clients, PURE, pieces=4)
    own, weights = state.public["warm_models"].numpy(), algorithm.graph.weights.toarray()
    assert not own[:, 3].any()
    pull = MU * np.array([7, 12, 3, 0, 5, 8])[:, None] / 12
    for run_own, start in zip(own, state.public["theta"].numpy(), strict=True):
        theta = np.zeros((N, D))
        for _ in range(3000):
            theta = (weights / weights.sum(1, keepdims=True) @ theta + pull * run_own) / (1 + pull)
        assert np.allclose(start, theta, atol=1e-10)
    degrees = algorithm.network(problem).graph.degrees
    assert state.public["sent"].tolist() == [int(degrees.sum() - degrees[3])] * 2, (
        "that one has nothing to send"
    )


def test_nobody_moves_before_all_have_released_their_models() -> None:
    state, _ = run(method(), agents(), OPENING[:, : N - 1])
    assert state.public["warm_models"][0, : N - 1].any(1).all()
    assert not state.public["theta"].any()


def test_wakeups_go_on_from_the_start() -> None:
    problem, algorithm = agents(), method()
    wakeups = torch.tensor([[2, 0, 5]])
    start, _ = run(algorithm, problem, torch.cat([OPENING, torch.full((1, 1), -1)], 1))
    state, _ = run(algorithm, problem, torch.cat([OPENING, wakeups], 1), pieces=5)
    settings = {"mu": MU, "lam": LAM, "smooth": 0.25, "noise": np.zeros((3, D)), "clip": math.inf}
    begin = start.public["theta"][0].numpy()
    expected = slow(
        arrays(problem),
        algorithm.graph.weights.toarray(),
        "logistic",
        wakeups[0],
        start=begin,
        **settings,
    )
    assert np.allclose(state.public["theta"][0].numpy(), expected, rtol=1e-8)


def test_peers_that_release_once_have_one_release_more() -> None:
    once = PeerAveraging(feature_norm=1.0, graph=random_graph(N), lam=LAM, warm_start=0.25)
    _, channel = run(once, agents(), OPENING.repeat(1, 4), PURE)
    assert channel.channel.accountant.uses.tolist() == [[2] * N]
    assert channel.epsilon == pytest.approx(3.0, rel=1e-4)


# The published variant, and what is refused


def test_the_published_start_has_laplace_noise_and_counts_in_the_claim() -> None:
    paper = PublishedPeerToPeer(feature_norm=1.0, graph=random_graph(N), lam=LAM, warm_start=0.25)
    privacy = RecordPrivacy(
        clip_norm=0.4, noise_multiplier=2.0, mechanism="laplace", delta=math.exp(-5)
    )
    _, channel = run(paper, agents(), OPENING.repeat(1, 4), privacy)
    assert channel.epsilon == math.inf
    assert channel.report.claimed == pytest.approx(composed([0.5, 0.5, 0.5, 0.5], math.exp(-5)))


def test_what_a_warm_start_needs_is_said() -> None:
    laplace = RecordPrivacy(clip_norm=0.4, epsilon=1.0, mechanism="laplace", delta=0.0)
    with pytest.raises(PrivacyError, match="is noise for the l1 norm"):
        run(method(), agents(), OPENING.repeat(1, 2), laplace)
    with pytest.raises(ConfigError, match="each of 6 agents answers once"):
        run(method(), agents(rounds=1), OPENING, PURE)
    with pytest.raises(ConfigError, match=r"agent 'a1' has 12 records.*Give a larger lam"):
        run(method(lam=1e-12), agents(), OPENING.repeat(1, 2), PURE)
    with pytest.raises(ConfigError, match="both local_start and warm_start"):
        PublishedPeerToPeer(graph=random_graph(N), warm_start=0.1, local_start=True)


def test_fits_that_end_early_move_a_sum_by_half_of_the_margin_at_most() -> None:
    """Those of two neighbours; the other half of 2^-20 C is for the grid and for rounding."""
    for bound in (0.4, 3.0):
        for records in (1, 50, 10**6):
            assert 2 * records * accuracy(bound, records) <= bound * 2.0**-21 * (1 + 1e-12)
