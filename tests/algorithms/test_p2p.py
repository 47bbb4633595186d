"""Peer-to-peer learning: the printed update as a slow loop, optima of independent solvers, blocks and replicates."""

import numpy as np
import pytest
from scipy import optimize

from fedmtl.algorithms import PeerToPeer
from fedmtl.errors import ConfigError
from fedmtl.graphs import Graph, Ring
from fedmtl.privacy import open_channel
from fedmtl.schedules import PoissonClocks
from fedmtl.trainer.engine import bind_schedule, releases_of

from .harness import noise_of
from .harness import run_activations as run
from .p2p_harness import COUNTS, NOISED, D, agents, arrays, mean_gradient, objective, random_graph, schedule, slow

SMOOTH = {"logistic": 0.25, "squared": 2.0}
N = len(COUNTS)


@pytest.mark.parametrize("loss", ["logistic", "squared"])
@pytest.mark.parametrize("lam", ["inverse", 0.3])
def test_runs_are_the_slow_loop(loss: str, lam: float | str) -> None:
    problem, graph = agents(loss), random_graph(N)
    algorithm = PeerToPeer(row_norm=1.0, graph=graph, mu=0.7, loss=loss, lam=lam)
    for seed, replicates, pieces in ((0, 1, None), (1, 3, 7)):
        clients = schedule(replicates, 40, seed)
        noise = noise_of(algorithm, problem, clients, NOISED)
        state, _ = run(algorithm, problem, clients, NOISED, pieces=pieces)
        assert np.abs(noise).max() > 0.01
        for r in range(replicates):
            expected = slow(
                arrays(problem),
                graph.weights.toarray(),
                loss,
                clients[r],
                mu=0.7,
                lam=lam,
                smooth=SMOOTH[loss],
                noise=noise[:, r],
                clip=0.4,
            )
            assert np.allclose(state.public["theta"][r].numpy(), expected, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize(
    ("schedule_of", "answers"),
    [(PoissonClocks(per_client=3), [3] * N), (PoissonClocks(events=9, per_client=3), None)],
    ids=["own wake-ups", "ticks of all"],
)
def test_both_stop_rules_calibrate_the_noise_to_the_wakeups_of_an_agent(schedule_of, answers) -> None:
    problem, algorithm = agents(rounds=10**6), PeerToPeer(row_norm=1.0, graph=random_graph(N))
    bound = bind_schedule(schedule_of, problem.data)
    channel = open_channel(NOISED, releases_of(algorithm, problem, bound), bound.describe(), seed=0)
    assert channel.caps.tolist() == [3] * N
    state = algorithm.init(problem)
    channel.start(0)
    for block in bound.blocks(0, 0, bound.steps):
        channel.begin(block.first, block.clients)
        state = algorithm.step(problem, state, block, channel)
    uses = channel.account.uses[0]
    assert uses.max() <= 3
    assert uses.sum() == (3 * N if answers else 9)
    assert answers is None or uses.tolist() == answers
    assert channel.report.releases == uses.sum()


def test_vectors_sent_are_the_neighbours_of_those_who_woke() -> None:
    problem, clients, graph = agents(), schedule(2, 60, 3), random_graph(N)
    state, _ = run(PeerToPeer(row_norm=1.0, graph=graph), problem, clients)
    degree = (graph.weights.toarray() > 0).sum(1)
    expected = [sum(degree[i] for i in row if i >= 0) for row in clients.tolist()]
    assert state.public["sent"].tolist() == expected


# Optima


def sweeps(count, seed=0):
    rng = np.random.default_rng(seed)
    return np.concatenate([rng.permutation(N) for _ in range(count)])[None]


def test_without_noise_the_logistic_loss_reaches_the_optimum_of_lbfgs() -> None:
    problem, graph = agents(), random_graph(N)
    weights, data = graph.weights.toarray(), arrays(problem)

    def value(flat):
        theta = flat.reshape(N, D)
        gradient = weights.sum(1)[:, None] * theta - weights @ theta
        for i, (x, y) in enumerate(data):
            local = mean_gradient("logistic", x, y, theta[i]) + 0.2 * theta[i]
            gradient[i] += 0.6 * weights[i].sum() * len(y) / max(COUNTS) * local
        return objective(data, weights, "logistic", theta, mu=0.6, lam=0.1), gradient.ravel()

    options = {"maxiter": 5000, "ftol": 1e-16, "gtol": 1e-11}
    found = optimize.minimize(value, np.zeros(N * D), jac=True, method="L-BFGS-B", options=options)
    algorithm = PeerToPeer(row_norm=1.0, graph=graph, mu=0.6, lam=0.1)
    state, _ = run(algorithm, problem, sweeps(500))
    assert np.abs(state.public["theta"][0].numpy().ravel() - found.x).max() < 1e-6
    assert float(algorithm.objective(problem, state)) == pytest.approx(found.fun, rel=1e-10)
    assert found.fun < 0.98 * float(algorithm.objective(problem, algorithm.init(problem)))


def test_a_graph_has_the_agents_of_the_data() -> None:
    problem = agents()
    with pytest.raises(ConfigError, match="no agent 'a0', which the data have"):
        PeerToPeer(row_norm=1.0, graph=Graph(1 - np.eye(N), tuple(map(str, range(N))))).network(problem)
    assert PeerToPeer(row_norm=1.0, graph=Ring()).network(problem).graph.edges == N
