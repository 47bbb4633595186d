"""Epsilon against agents that see their own messages: exact arithmetic, closed forms, attacks on runs, refusals."""

import csv
import math
from dataclasses import replace
from fractions import Fraction

import numpy as np
import pytest
import torch
from scipy import stats

from fedmtl import (
    Latencies,
    PeerAveraging,
    PeerToPeer,
    PoissonClocks,
    RecordPrivacy,
    Trainer,
    load_data,
    models,
)
from fedmtl.algorithms.p2p.network import Network
from fedmtl.audit import verify
from fedmtl.contrib.linear_views import messages
from fedmtl.contrib.pairwise import epsilons, pairwise_privacy
from fedmtl.data.examples import Examples
from fedmtl.errors import ConfigError
from fedmtl.graphs import Graph, Ring
from fedmtl.schedules import Dropouts, TraceLatency
from tests.helpers import library_accountant

from .harness import run_activations as run
from .p2p_harness import agents, random_graph

DELTA = 1e-5


def network(weights: np.ndarray, counts=None, **options) -> Network:
    n = len(weights)
    counts = np.full(n, 10) if counts is None else np.asarray(counts)
    ids = tuple(f"a{k}" for k in range(n))
    settings = {"mu": 2.0, "lam": 0.1, "smoothness": 0.5, "power": 2.0} | options
    return Network(Graph(weights, ids), counts, **settings)


def ring(n: int) -> np.ndarray:
    weights = np.zeros((n, n))
    place = np.arange(n)
    weights[place, (place + 1) % n] = weights[(place + 1) % n, place] = 1.0
    return weights


def shares(found) -> np.ndarray:
    """P_ii of each pair: the square of mu over that of an eavesdropper."""
    return (found.mu / found.largest) ** 2


# Exact arithmetic


def exact_shares(own: Network, events, noise, members) -> np.ndarray:
    """P_ii by Gauss-Jordan elimination in rational numbers, from equation (6) as it is printed."""
    n = len(own.counts)
    weights = own.graph.weights.toarray()
    theta = [[Fraction(0)] * n for _ in range(n)]
    rows = []
    for k in events:
        pull = Fraction(float(own.mu * own.confidence[k]))
        alpha = 1 / (1 + pull * Fraction(float(own.curvature[k])))
        total = Fraction(float(weights[k].sum()))
        row = [
            alpha * sum(Fraction(float(w)) / total * theta[j][i] for j, w in enumerate(weights[k]))
            for i in range(n)
        ]
        row[k] -= alpha * pull
        theta[k] = row
        if k not in members and any(weights[k][list(members)]):
            rows.append([row[i] * Fraction(float(noise[i])) for i in range(n) if i not in members])
    return np.array([float(each) for each in _diagonal_of_projection(rows, n - len(members))])


def _diagonal_of_projection(rows, n):
    """Orthogonalization without roots: the projection is the sum of v v' / v'v."""
    basis = []
    for row in rows:
        left = list(row)
        for v, square in basis:
            part = sum(a * b for a, b in zip(row, v, strict=True)) / square
            left = [a - part * b for a, b in zip(left, v, strict=True)]
        square = sum(a * a for a in left)
        if square:
            basis.append((left, square))
    return [sum((v[i] * v[i] / square for v, square in basis), Fraction(0)) for i in range(n)]


@pytest.mark.parametrize("seed", range(6))
def test_every_pair_agrees_with_rational_arithmetic(seed: int) -> None:
    rng = np.random.default_rng(seed)
    # powers of 2 are exact as weights, means and constants of either computation
    weights = np.zeros((7, 7))
    for i in range(7):
        for step in (1, 3):
            weights[i, (i + step) % 7] = weights[(i + step) % 7, i] = 1.0
    own = network(weights, counts=2 ** rng.integers(2, 6, 7), power=1.0, lam=0.25)
    events = rng.integers(0, 7, 11)
    multipliers = rng.uniform(0.5, 3.0, 7)
    for members in ([2], [0, 4]):
        sets = [[f"a{k}" for k in members]]
        found = pairwise_privacy(own, events, multipliers, DELTA, adversaries=sets)
        noise = multipliers / own.counts
        exact = exact_shares(own, events.tolist(), noise, members)
        outside = [k for k in range(7) if k not in members]
        woke = np.isin(outside, events)
        got = np.where(woke, shares(found)[0, outside], 0.0)
        np.testing.assert_allclose(got, exact, atol=1e-9)
        assert found.bounded == 0
        hidden = len(outside) - exact.sum()
        assert exact.sum() > 0.9
        assert hidden > 0.9 or len(members) == 2


@pytest.mark.parametrize("silent", [(), (4,)])  # an agent with records that may release nothing
def test_the_rows_are_what_a_run_sends(silent: tuple[int, ...]) -> None:
    problem = agents()
    graph = random_graph(6)
    algorithm = PeerAveraging(feature_norm=1.0, graph=graph, mu=0.7)
    events = torch.from_numpy(np.random.default_rng(3).integers(0, 6, (1, 30)))
    privacy = RecordPrivacy(clip_norm=0.4, epsilon=2.0, delta=DELTA)
    released = ~np.isin(np.arange(6), silent)
    rows = messages(algorithm.network(problem), events[0].numpy(), released)
    for length in (7, 30):
        state, _ = run(algorithm, problem, events[:, :length], privacy, caps=9 * released)
        assert (state.public["answers_so_far"][0].numpy() == 0)[~released].all()
        releases = state.public["intercept"][0].numpy()
        last = {k: t for t, k in enumerate(events[0, :length].tolist())}
        for k, t in last.items():
            sent = state.public["theta"][0, k].numpy()
            np.testing.assert_allclose(sent, -rows[t] @ releases, atol=1e-12)


def test_agents_without_records_pass_on_what_they_hear() -> None:
    own = network(ring(5), counts=[10, 0, 10, 10, 10])
    found = pairwise_privacy(own, np.array([2, 1, 0]), np.full(5, 2.0), DELTA)
    assert found.mu[0, 2] == pytest.approx(0.5)  # by the message of agent 1, which has no noise
    assert found.mu[0, 1] == 0.0


# Closed forms


def test_an_agent_with_one_neighbour_hides_nothing_from_it() -> None:
    own = network(np.array([[0.0, 1.0], [1.0, 0.0]]))
    found = pairwise_privacy(own, np.array([0, 1, 0, 1]), np.array([2.0, 3.0]), DELTA)
    np.testing.assert_allclose(found.mu, [[math.nan, 1 / 3], [1 / 2, math.nan]])


def test_a_complete_graph_hides_nothing() -> None:
    own = network(np.ones((6, 6)) - np.eye(6))
    found = pairwise_privacy(own, np.arange(6), np.full(6, 2.0), DELTA)
    np.testing.assert_allclose(found.mu[~np.eye(6, dtype=bool)], 0.5)


def test_a_message_of_a_hub_hides_each_leaf_among_the_others() -> None:
    leaves = 8
    weights = np.zeros((leaves + 2, leaves + 2))
    weights[0, 1:] = weights[1:, 0] = 1.0  # the last leaf is silent, and looks on
    own = network(weights)
    events = np.array([*range(1, leaves + 1), 0])
    found = pairwise_privacy(own, events, np.full(leaves + 2, 2.0), DELTA)
    # a message of weights alpha pull (1, alpha / (leaves + 1), ...) of equal noise
    leaf = (own.alpha[0] / (leaves + 1)) ** 2
    expected = leaf / (1 + leaves * leaf)
    np.testing.assert_allclose(shares(found)[-1, 1:-1], expected)
    np.testing.assert_allclose(shares(found)[-1, 0], 1 / (1 + leaves * leaf))


def test_on_a_ring_in_turn_information_falls_geometrically() -> None:
    n = 9
    own = network(ring(n))
    found = pairwise_privacy(own, np.arange(n), np.full(n, 2.0), DELTA)
    # the last agent hears agent 0 alone, and n - 2 with weights (alpha / 2)^distance
    ratio = (own.alpha[0] / 2) ** 2
    powers = ratio ** np.arange(n - 2)  # of agents n - 2, ..., 1
    expected = powers / powers.sum()
    np.testing.assert_allclose(shares(found)[-1, n - 2 : 0 : -1], expected, rtol=1e-6, atol=1e-12)
    assert shares(found)[-1, 0] == pytest.approx(1.0)
    assert found.epsilon[-1, n - 2] > found.epsilon[-1, n - 3] > found.epsilon[-1, n - 4] > 0


def test_squares_add_up_to_the_number_of_independent_messages() -> None:
    rng = np.random.default_rng(0)
    own = network(ring(12), counts=rng.integers(5, 50, 12))
    events = np.repeat([1, 11, 1, 11], 3)  # the neighbours of agent 0 talk to nobody else
    found = pairwise_privacy(own, events, np.full(12, 2.0), DELTA)
    assert np.nansum(shares(found)[0]) == pytest.approx(2.0), "a message that comes again is known"


def test_those_who_hear_everything_have_the_epsilon_of_the_release() -> None:
    rng = np.random.default_rng(1)
    own = network(ring(8), counts=rng.integers(5, 50, 8))
    multipliers = rng.uniform(0.5, 3, 8)
    sets = [[f"a{k}" for k in range(1, 8)]]
    found = pairwise_privacy(own, rng.integers(0, 8, 60), multipliers, DELTA, adversaries=sets)
    assert found.mu[0, 0] == pytest.approx(1 / multipliers[0])


# Order


@pytest.mark.parametrize("seed", range(3))
def test_more_colluders_see_more_and_none_more_than_the_release_tells(seed: int) -> None:
    rng = np.random.default_rng(seed)
    n = 10
    weights = random_graph(n, seed, density=0.2).weights.toarray()
    own = network(weights, counts=rng.integers(5, 50, n))
    events = rng.permutation(np.repeat(np.arange(n), 3))
    order = [f"a{k}" for k in rng.permutation(n)]
    sets = [order[:size] for size in range(1, n)]
    found = pairwise_privacy(own, events, rng.uniform(0.5, 3, n), DELTA, adversaries=sets)
    for before, after in zip(found.mu[:-1], found.mu[1:], strict=True):
        outside = ~np.isnan(after)
        assert (after[outside] >= before[outside] * (1 - 1e-9)).all()
    outside = ~np.isnan(found.mu)
    assert (found.mu <= found.largest * (1 + 1e-12))[outside].all()
    assert (found.epsilon <= epsilons(found.largest, DELTA) + 1e-9)[outside].all()


def test_what_double_precision_cannot_tell_is_claimed_at_most() -> None:
    rng = np.random.default_rng(0)
    own = network(ring(20), counts=rng.integers(10, 100, 20), mu=15.0, lam=None, smoothness=0.02)
    events = rng.permutation(np.repeat(np.arange(20), 30))
    found = pairwise_privacy(own, events, np.full(20, 2.0), DELTA)
    assert found.bounded > 3
    row = np.flatnonzero((shares(found) > 1 - 1e-12).sum(1) == 19)
    assert len(row) >= found.bounded
    assert f"an upper bound for {found.bounded} of 20" in found.text()


# No noise


def test_an_agent_without_noise_is_protected_by_that_of_others_or_not_at_all() -> None:
    weights = np.zeros((4, 4))
    weights[0, 1:] = weights[1:, 0] = 1.0
    own = network(weights)
    multipliers = np.array([2.0, 0.0, 2.0, 2.0])  # agent 1 forgets its noise
    events = np.array([1, 2, 0])
    found = pairwise_privacy(own, events, multipliers, DELTA)
    # agent 3 hears one sum of agents 0, 1, 2: alpha pull (1, alpha / 3, alpha / 3)
    leaf = (own.alpha[0] / 3) ** 2
    assert found.mu[3, 1] == pytest.approx(math.sqrt(leaf / (4 * (1 + leaf))))
    assert found.mu[0, 1] == math.inf
    assert found.epsilon[0, 1] == math.inf
    assert found.largest[1] == math.inf
    later = pairwise_privacy(own, np.array([1, 2, 0, 2, 0]), multipliers, DELTA)
    assert later.mu[3, 1] == pytest.approx(found.mu[3, 1]), "the same sum again"
    alone = pairwise_privacy(own, np.array([0, 1, 0]), multipliers, DELTA)
    assert alone.mu[3, 1] == math.inf, "the difference of two sums is without noise"


# Attacks on runs


MEMBERS = [3]
EVENTS = [0, 1, 2, 4, 5, 4, 1, 2]
TARGET = 0


class Attack:
    """Two worlds that differ by one record of agent 0, and the optimal statistic of agent 3."""

    def __init__(self, noise: float = 0.5) -> None:
        self.problem = agents(d=2)
        graph = Graph(ring(6), tuple(f"a{k}" for k in range(6)))
        self.algorithm = PeerAveraging(feature_norm=1.0, graph=graph, mu=1.0, smoothness=0.25)
        self.privacy = RecordPrivacy(
            clip_norm=0.4, noise_multiplier=noise, epsilon=None, delta=1e-5, mechanism="gaussian"
        )
        self.network = self.algorithm.network(self.problem)

    def replaced(self):
        """The problem with the other label of the first record of agent 0."""
        train = self.problem.data.train
        y = train.y.clone()
        y[0] = 1 - y[0]
        data = replace(self.problem.data, train=Examples(train.x, y, train.offsets))
        return replace(self.problem, data=data)

    def views(self, problem, runs: int, seed: int, silenced: int | None = None) -> np.ndarray:
        """(R, M): what agent 3 receives in each run, along the record, less what it knows."""
        clients = torch.tensor(EVENTS).repeat(runs, 1)
        options = {"seed": seed, "caps": [9] * 6}
        state, _ = run(self.algorithm, problem, clients, self.privacy, **options)
        releases = state.public["intercept"].numpy()
        if silenced is not None:  # the mean over runs has no noise
            releases[:, silenced] = releases[:, silenced].mean(0)
        record = self.problem.data.train.x[0].double().numpy()
        along = releases @ (record / np.linalg.norm(record))
        along[:, MEMBERS] = 0.0
        return -along @ self.rows.T

    @property
    def rows(self) -> np.ndarray:
        every = messages(self.network, np.array(EVENTS), np.ones(6, dtype=bool))
        heard = np.isin(EVENTS, [2, 4])
        return every[heard]

    def claim(self):
        multipliers = np.full(6, self.privacy.noise_multiplier)
        sets = [[f"a{k}" for k in MEMBERS]]
        return pairwise_privacy(self.network, np.array(EVENTS), multipliers, 0.05, adversaries=sets)

    def separation(self, first: np.ndarray, second: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """The likelihood ratio's statistic in both worlds, in standard deviations of the theory."""
        noise = self.privacy.noise_multiplier * 2 * 0.4 / self.network.counts
        noise[MEMBERS] = 0.0
        covariance = (self.rows * noise**2) @ self.rows.T
        weights = np.linalg.pinv(covariance, rcond=1e-12) @ self.rows[:, TARGET]
        size = math.sqrt(weights @ covariance @ weights)
        one, other = (views @ weights / size for views in (first, second))
        if one.mean() > other.mean():
            one, other = -one, -other
        return one - one.mean(), other - one.mean()


def bounds_of_delta(one: np.ndarray, other: np.ndarray, epsilon: float) -> tuple[float, float]:
    """Delta at ``epsilon`` by the best threshold of a first half, with its deviation, on the second."""
    half = len(one) // 2
    grid = np.linspace(other.min(), other.max(), 400)
    gain = [(other[:half] > c).mean() - math.exp(epsilon) * (one[:half] > c).mean() for c in grid]
    cut = grid[int(np.argmax(gain))]
    above, below = (other[half:] > cut).mean(), (one[half:] > cut).mean()
    variance = above * (1 - above) + math.exp(2 * epsilon) * below * (1 - below)
    return above - math.exp(epsilon) * below, math.sqrt(variance / half)


RUNS = 12_000


@pytest.fixture(scope="module")
def attacked() -> tuple[Attack, np.ndarray, np.ndarray]:
    attack = Attack()
    first = attack.views(attack.problem, RUNS, 1)
    return attack, first, attack.views(attack.replaced(), RUNS, 2)


def test_the_best_attack_on_runs_reaches_the_claim_and_does_not_exceed_it(attacked) -> None:
    attack, first, second = attacked
    found = attack.claim()
    claimed, largest = found.mu[0, TARGET], found.largest[TARGET]
    assert 0.2 * largest < claimed < 0.9 * largest, "something is hidden, and something is not"
    one, other = attack.separation(first, second)
    error = math.sqrt(2 / RUNS)
    assert other.mean() == pytest.approx(claimed, abs=4 * error)
    assert np.concatenate([one, other - other.mean()]).std() == pytest.approx(1, abs=4 * error)
    assert stats.kstest(one / one.std(), "norm").pvalue > 1e-3
    delta, deviation = bounds_of_delta(one, other, float(found.epsilon[0, TARGET]))
    assert delta < 0.05 + 3 * deviation
    assert delta > 0.05 - 4 * deviation
    assert deviation < 0.01


def test_a_forgotten_message_is_detected(attacked) -> None:
    """A claim on fewer messages than agent 3 receives is below what its attack reaches."""
    attack, first, second = attacked
    one, other = attack.separation(first, second)
    without = [agent for agent in EVENTS if agent != 4]
    wrong = pairwise_privacy(
        attack.network, np.array(without), np.full(6, 0.5), 0.05, adversaries=[["a3"]]
    )
    delta, deviation = bounds_of_delta(one, other, float(wrong.epsilon[0, TARGET]))
    assert delta > 0.05 + 4 * deviation


def test_noise_that_is_left_out_is_detected(attacked) -> None:
    attack, *_ = attacked
    broken = {"silenced": 5}  # one of those who hide agent 0
    first = attack.views(attack.problem, RUNS, 1, **broken)
    second = attack.views(attack.replaced(), RUNS, 2, **broken)
    weights = np.linalg.pinv(np.cov(first.T), rcond=1e-12) @ (second.mean(0) - first.mean(0))
    one, other = (views @ weights for views in (first, second))
    epsilon = float(attack.claim().epsilon[0, TARGET])
    delta, deviation = bounds_of_delta(one, other, epsilon)
    assert delta > 0.05 + 4 * deviation


def test_epsilons_are_those_of_the_library() -> None:
    from dp_accounting import dp_event

    mu = np.array([[0.3, 1.0], [2.5, math.nan]])
    found = epsilons(mu, DELTA)
    assert math.isnan(found[1, 1])
    for shift, epsilon in zip(mu.ravel()[:3], found.ravel()[:3], strict=True):
        accountant = library_accountant().compose(dp_event.GaussianDpEvent(1 / shift))
        assert epsilon == pytest.approx(accountant.get_epsilon(DELTA), rel=1e-3)
    assert epsilons(np.array([0.0, math.inf]), DELTA).tolist() == [0.0, math.inf]


# Runs


def trainer(**options) -> Trainer:
    settings = {
        "algorithm": PeerAveraging(graph=Ring(), pairwise=True),
        "data": load_data("synthetic_agents", agents=8, features=3),
        "model": models.linear_regression(bias=False),
        "schedule": PoissonClocks(per_client=2),
        "privacy": RecordPrivacy(clip_norm=1.0, epsilon=2.0, delta=DELTA),
        "rounds": 100,
        "progress": False,
    }
    return Trainer(**settings | options)


def test_a_run_prints_the_claim_beside_epsilon_and_saves_the_matrix(tmp_path) -> None:
    found = trainer(folder=tmp_path / "run").fit()
    plain = trainer(algorithm=PeerAveraging(graph=Ring())).fit()
    assert torch.equal(found.personal, plain.personal)
    assert found.epsilon == plain.epsilon
    assert found.privacy.headline == plain.privacy.headline
    assert "beside" not in plain.privacy.to_dict()
    lines = found.privacy.text().split("\n")
    assert lines[1].split() == ["epsilon", "2", "at", "delta", "=", "1e-05"]
    text = " ".join(found.privacy.text().split())
    assert "beside not in place of epsilon, which is against everybody: against any one" in text
    assert "honest but curious, that sees only its own messages" in text
    with (tmp_path / "run" / "public" / "pairwise.csv").open() as file:
        rows = list(csv.DictReader(file))
    ids = found.ids
    assert [row["seen by"] for row in rows] == list(ids)
    matrix = np.array([[float(row[name] or "nan") for name in ids] for row in rows])
    assert np.isnan(matrix.diagonal()).all()
    assert np.nanmax(matrix) <= found.epsilon * (1 + 1e-3)
    assert np.nanmedian(matrix) < 1.0
    (fields,) = [each for each in verify(tmp_path / "run").checks if each.name == "fields"]
    assert fields.detail.startswith("beside: it follows from graph and clocks")
    assert (tmp_path / "run" / "public" / "pairwise.png").stat().st_size > 10_000


def test_what_is_not_covered_is_refused() -> None:
    def refused(match: str, **options) -> None:
        with pytest.raises(ConfigError, match=match):
            trainer(**options).fit()

    pairs = {"graph": Ring(), "pairwise": True}
    with pytest.raises(ConfigError, match="second release is at a model that depends on"):
        PeerAveraging(**pairs, releases=2)
    with pytest.raises(ConfigError, match="second release is at a model that depends on"):
        PeerAveraging(**pairs, warm_start=0.5)
    with pytest.raises(TypeError, match="pairwise"):
        PeerToPeer(**pairs)
    law = RecordPrivacy(clip_norm=1.0, epsilon=2.0, mechanism="l2_laplace", delta=DELTA)
    refused("is of Gaussian noise", privacy=law)
    refused("is of Gaussian noise", privacy=None)
    refused("is of Gaussian noise", privacy=RecordPrivacy(clip_norm=1.0, epsilon=math.inf))
    refused("is of one run", replicates=2)
    names = trainer().data.ids
    trace = TraceLatency({name: [1.0, 2.0] for name in names})
    refused("latencies of a trace are measured", schedule=Latencies(latency=trace, per_client=2))
    away = Latencies(latency=1.0, per_client=2, dropouts=Dropouts(rate=0.1, duration=1.0))
    refused("every message arrives", schedule=away)
    own = network(ring(4))
    for wrong in ([["nobody"]], [[]]):
        with pytest.raises(ConfigError, match="give ids of agents"):
            pairwise_privacy(own, np.arange(4), np.full(4, 1.0), DELTA, adversaries=wrong)
    wide = network(ring(1001))
    with pytest.raises(ConfigError, match="up to 1,000 agents"):
        pairwise_privacy(wide, np.arange(4), np.full(1001, 1.0), DELTA)
