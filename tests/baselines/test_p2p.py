"""The exact optimum, local models, gossip ADMM and local privacy, against SciPy and by enumeration of sensitivities."""

import math

import numpy as np
import pytest
import scipy.stats
import torch
from scipy.optimize import minimize

from benchmarks.baselines.p2p import PeerProblem, local_models, optimum
from benchmarks.baselines.p2p_admm import GossipADMM, GossipState, random_neighbours
from benchmarks.baselines.p2p_local_dp import perturb_records, record_vectors
from fedmtl import PeerToPeer, RecordPrivacy, models
from fedmtl.algorithms.linear.data import LinearData, LinearLoss
from fedmtl.algorithms.p2p.network import Network
from fedmtl.data import FederatedDataset
from fedmtl.errors import ConfigError
from fedmtl.graphs import Graph, Ring
from fedmtl.privacy import open_channel
from fedmtl.schedules import PoissonClocks
from fedmtl.trainer.make_problem import ProblemSettings, build_problem
from fedmtl.trainer.run_channel import bind_schedule, releases_of
from tests.helpers import library_accountant

ALPHA = 1e-6


def given(loss="squared", n=6, p=3, seed=0, empty=(), mu=0.7, lam=None):
    """Agents with 3 to 9 records on a graph of random weights."""
    rng = np.random.default_rng(seed)
    counts = rng.integers(3, 10, n)
    counts[list(empty)] = 0
    xs, ys = [], []
    for m in counts:
        x = rng.normal(size=(m, p))
        y = x @ rng.normal(size=p) + rng.normal(size=m)
        xs.append(torch.from_numpy(x))
        ys.append(torch.from_numpy(y if loss == "squared" else np.where(y >= 0, 1.0, -1.0)))
    weights = np.triu(rng.random((n, n)) * (rng.random((n, n)) < 0.6), 1)
    weights[0, 1:] = weights[0, 1:].clip(min=0.1)  # connected
    weights = weights + weights.T
    graph = Graph(weights, tuple(map(str, range(n))))
    largest = max(float(x.norm(dim=1).max()) for x in xs if len(x))
    smooth = LinearLoss(loss).smoothness(largest)
    network = Network(graph, counts.astype(np.int64), mu, lam, smooth)
    return PeerProblem(network, LinearData(tuple(xs), tuple(ys), False), LinearLoss(loss)), weights


def plain_objective(problem, weights, theta):
    """Equation (2) term by term."""
    counts = problem.network.counts
    total = 0.0
    for i in range(len(theta)):
        for j in range(i + 1, len(theta)):
            total += weights[i, j] * float(((theta[i] - theta[j]) ** 2).sum()) / 2
    for i, row in enumerate(theta):
        m = int(counts[i])
        confidence = m / counts.max() if m else 1e-3
        lam = (1 / m if m else 1.0) if problem.network.lam is None else problem.network.lam
        local = lam * float(row @ row)
        for x, y in zip(problem.data.x[i].numpy(), problem.data.y[i].numpy(), strict=True):
            margin = float(x @ row)
            local += (
                (margin - y) ** 2
                if problem.loss.name == "squared"
                else math.log1p(math.exp(-y * margin))
            ) / m
        total += problem.network.mu * weights[i].sum() * confidence * local
    return total


@pytest.mark.parametrize("loss", ["squared", "logistic"])
@pytest.mark.parametrize("lam", [None, 0.03])
def test_the_optimum_is_that_of_a_dense_solver(loss, lam):
    problem, weights = given(loss, empty=(4,), lam=lam, seed=3)
    found = optimum(problem)
    assert found.value == pytest.approx(plain_objective(problem, weights, found.theta), rel=1e-12)
    assert 0 <= found.gap < 1e-9
    assert optimum(given(loss, lam=0.0)[0]).gap == math.inf
    if loss == "squared":  # the linear system, assembled entry by entry
        n, p = problem.shape
        system, right = np.zeros((n * p, n * p)), np.zeros(n * p)
        for i in range(n):
            x, y = problem.data.x[i].numpy(), problem.data.y[i].numpy()
            m, own = len(x), slice(i * p, i * p + p)
            pull = (
                problem.network.mu
                * weights[i].sum()
                * (m / problem.network.counts.max() if m else 1e-3)
            )
            ridge = lam if lam is not None else (1 / m if m else 1.0)
            system[own, own] = (weights[i].sum() + 2 * pull * ridge) * np.eye(p)
            if m:
                system[own, own] += 2 * pull * x.T @ x / m
                right[own] = 2 * pull * x.T @ y / m
            for j in range(n):
                if j != i:
                    system[own, j * p : j * p + p] = -weights[i, j] * np.eye(p)
        np.testing.assert_allclose(
            found.theta.ravel(), np.linalg.solve(system, right), rtol=1e-8, atol=1e-10
        )
    else:
        other = minimize(
            lambda flat: plain_objective(problem, weights, flat.reshape(problem.shape)),
            np.zeros(18),
            method="L-BFGS-B",
            options={"ftol": 1e-15, "gtol": 1e-9, "maxfun": 100_000},
        )
        np.testing.assert_allclose(found.theta.ravel(), other.x, atol=1e-4)
        assert found.value - found.gap <= other.fun <= found.value + 1e-6


@pytest.mark.parametrize("loss", ["squared", "logistic"])
def test_local_models_are_each_agents_own_minimizers(loss):
    problem, _ = given(loss, empty=(1,))
    theta = local_models(problem)
    for i in range(6):
        m = len(problem.data.y[i])
        if not m:
            assert (theta[i] == 0).all()
            continue
        x, y = problem.data.x[i].numpy(), problem.data.y[i].numpy()

        def value(t, x=x, y=y, m=m):
            margins = x @ t
            each = (margins - y) ** 2 if loss == "squared" else np.logaddexp(0, -y * margins)
            return each.mean() + t @ t / m

        np.testing.assert_allclose(
            theta[i], minimize(value, np.zeros(3), tol=1e-9).x, rtol=1e-5, atol=1e-6
        )
    with pytest.raises(ConfigError, match="lambda is 0"):
        local_models(given(lam=0.0)[0])


@pytest.mark.parametrize(("loss", "steps"), [("squared", 10), ("squared", 1), ("logistic", 10)])
def test_gossip_admm_converges_to_the_optimum_of_the_same_objective(loss, steps):
    problem, _ = given(loss, n=5, p=2, empty=(3,), seed=2)
    best = optimum(problem)
    state = GossipState(problem, GossipADMM(gradient_steps=steps), local_models(problem))
    before = problem.value(state.theta)
    rng = np.random.default_rng(4)
    agents = rng.integers(0, 5, 2500)
    for i, j in zip(
        agents.tolist(), random_neighbours(problem, agents, rng.random(2500)).tolist(), strict=True
    ):
        state.step(i, j)
    assert before - best.value > 1e-2
    np.testing.assert_allclose(state.theta, best.theta, atol=2e-5)
    assert state.vectors == problem.network.graph.weights.nnz + 4 * 2500


@pytest.mark.parametrize("loss", ["squared", "logistic"])
def test_peers_without_privacy_reach_the_optimum_of_their_objective(loss):
    x, y = (
        torch.randn(60, 3, generator=torch.Generator().manual_seed(0)),
        torch.arange(60.0) % 7 - 3,
    )
    rows = {f"a{i}": (x[12 * i : 12 * i + 12], y[12 * i : 12 * i + 12]) for i in range(5)}
    if loss == "logistic":
        rows = {name: (a, (b > 0).long()) for name, (a, b) in rows.items()}
    data = FederatedDataset.from_tensors(rows, classes=None if loss == "squared" else 2)
    model = models.linear_regression(bias=False)
    problem = build_problem(data, model, ProblemSettings(rounds=10**6, dtype="float64"))
    algorithm = PeerToPeer(graph=Ring(), mu=0.5, loss=loss, feature_norm=5.0, smoothness=6.0)
    schedule = bind_schedule(PoissonClocks(per_client=250), data)
    channel = open_channel(
        None, releases_of(algorithm, problem, schedule), schedule.describe(), seed=0
    )
    state, block = algorithm.init(problem), schedule.activations(0, 0, schedule.steps)
    exact = optimum(objective := PeerProblem.of(algorithm, problem))
    assert float(algorithm.objective(problem, state)[0]) == pytest.approx(
        objective.value(np.zeros((5, 3)))
    )
    channel.begin(0, block.clients)
    algorithm.step(problem, state, block, channel)
    np.testing.assert_allclose(state.public["theta"][0].numpy(), exact.theta, atol=1e-5)
    assert float(algorithm.objective(problem, state)[0]) == pytest.approx(exact.value, rel=1e-9)


def test_neighbours_are_uniform_among_an_agents_own():
    problem, _ = given()
    agents = np.repeat(np.arange(6), 800)
    taken = random_neighbours(problem, agents, np.random.default_rng(0).random(4800))
    for i in range(6):
        degree = int(problem.network.graph.degrees[i])
        counts = np.bincount(taken[agents == i], minlength=degree)
        assert len(counts) == degree
        assert degree == 1 or scipy.stats.chisquare(counts).pvalue > ALPHA


def test_impossible_problems_are_refused():
    problem, _ = given()
    with pytest.raises(ConfigError, match=r"GossipADMM\.rho is 0"):
        GossipADMM(rho=0)
    with pytest.raises(ConfigError, match="loss is 'hinge'"):
        PeerProblem(problem.network, problem.data, LinearLoss("hinge"))
    with pytest.raises(ConfigError, match="numbers of records"):
        PeerProblem(problem.network, given(seed=1)[0].data, LinearLoss("squared"))


# Local privacy


@pytest.mark.parametrize("mechanism", ["laplace", "gaussian", "l2_laplace"])
@pytest.mark.parametrize("loss", ["squared", "logistic"])
def test_a_replaced_record_moves_its_vector_by_at_most_the_sensitivity_and_by_that_much(
    mechanism, loss
):
    bound, target = 1.5, 3.0
    privacy = RecordPrivacy(clip_norm=bound, epsilon=1.0, delta=1e-5, mechanism=mechanism)
    rng = np.random.default_rng(0)
    x = rng.normal(size=(40, 4)) * 10.0 ** rng.uniform(-2, 4, size=(40, 1))
    y = rng.normal(size=40) * 10 if loss == "squared" else np.where(rng.random(40) < 0.5, 1.0, -1.0)
    x[0], x[1], y[0], y[1] = [1e9, 0, 0, 0], [-1e9, 0, 0, 0], 1e9 if loss == "squared" else 1, -1e9
    x[2, 0], x[3, 1] = np.inf, np.nan
    if loss == "logistic":
        y[1], x[1] = -1.0, [1e9, 0, 0, 0]
    data = LinearData((torch.from_numpy(x),), (torch.from_numpy(y),), False)
    vectors, largest = record_vectors(data, LinearLoss(loss), privacy, target)
    order = 1 if mechanism == "laplace" else 2
    apart = np.linalg.norm((vectors[:, None] - vectors[None]).numpy(), ord=order, axis=2).max()
    assert apart <= 2 * largest
    assert apart >= 2 * largest * (1 - 1e-9)
    assert (vectors[2:4, :4] == 0).all()
    inside = np.flatnonzero((np.linalg.norm(x, ord=order, axis=1) < bound) & (np.abs(y) < target))
    sign = y[inside, None] if loss == "logistic" else 1.0
    np.testing.assert_allclose(vectors[inside, :4].numpy(), sign * x[inside], rtol=1e-9)


@pytest.mark.parametrize(
    ("mechanism", "delta"), [("laplace", 0.0), ("laplace", 1e-5), ("gaussian", 1e-5)]
)
def test_the_noise_is_that_of_the_budget(mechanism, delta):
    records, epsilon, bound = 3000, 2.0, 0.5
    x = torch.full((records, 2), 0.1).double()
    data = LinearData(
        (x[:1000], x[1000:]), (torch.ones(1000).double(), torch.ones(2000).double()), False
    )
    privacy = RecordPrivacy(clip_norm=bound, epsilon=epsilon, delta=delta, mechanism=mechanism)
    given = perturb_records(data, LinearLoss("logistic"), privacy, seed=3)
    noise = torch.cat(given.data.x).numpy().ravel() - 0.1
    if mechanism == "laplace":
        scale = 2 * bound / epsilon  # of one release delta buys nothing but its own tail
        assert given.sensitivity * given.law.multiplier <= scale * (1 + 1e-4)
        scale = given.sensitivity * given.law.multiplier
        assert delta > 0 or scale >= 2 * bound / epsilon * (1 - 1e-12)
        law = scipy.stats.laplace(scale=scale)
    else:
        from dp_accounting import dp_event

        accountant = library_accountant().compose(dp_event.GaussianDpEvent(given.law.multiplier))
        assert accountant.get_epsilon(delta) == pytest.approx(epsilon, rel=1e-3)
        law = scipy.stats.norm(scale=2 * bound * given.law.multiplier)
    assert scipy.stats.kstest(noise, law.cdf).pvalue > ALPHA
    assert given.epsilon <= epsilon
    assert given.data.counts.tolist() == [1000, 2000]
    assert all(bool((y == 1).all()) for y in given.data.y)
    again = perturb_records(data, LinearLoss("logistic"), privacy, seed=3)
    other = perturb_records(data, LinearLoss("logistic"), privacy, seed=3, replicate=1)
    assert torch.equal(again.data.x[0], given.data.x[0])
    assert not torch.equal(other.data.x[0], given.data.x[0])


def test_targets_are_perturbed_with_their_rows():
    x, y = torch.zeros(4000, 1).double(), torch.full((4000,), 2.0).double()
    privacy = RecordPrivacy(clip_norm=1.0, epsilon=8.0, delta=0, mechanism="laplace")
    given = perturb_records(
        LinearData((x,), (y,), False), LinearLoss("squared"), privacy, target=4.0, seed=1
    )
    # v = (x, y / 4) moves by at most 4 in the L1 norm: scale 1/2 on v, 2 on y
    assert (
        scipy.stats.kstest(
            given.data.x[0].numpy().ravel(), scipy.stats.laplace(scale=0.5).cdf
        ).pvalue
        > ALPHA
    )
    assert (
        scipy.stats.kstest(given.data.y[0].numpy() - 2, scipy.stats.laplace(scale=2.0).cdf).pvalue
        > ALPHA
    )


def test_impossible_local_privacy_is_refused():
    data = given("logistic")[0].data
    good = {"clip_norm": 1.0, "epsilon": 1.0, "delta": 1e-5}
    for settings, loss, message in (
        (good, "hinge", "loss is 'hinge'"),
        (good | {"epsilon": math.inf}, "logistic", "epsilon is inf"),
        (good | {"epsilon": {"0": 1.0}}, "logistic", "one finite budget"),
        (good | {"noise_multiplier": 1.0}, "logistic", "noise_multiplier is not read"),
        (good | {"source": "secure"}, "logistic", "use source='seeded'"),
    ):
        with pytest.raises(ConfigError, match=message):
            perturb_records(data, LinearLoss(loss), RecordPrivacy(**settings))
    biased = LinearData(data.x, data.y, True)
    with pytest.raises(ConfigError, match="has a bias"):
        perturb_records(biased, LinearLoss("logistic"), RecordPrivacy(**good))
