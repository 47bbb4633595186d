"""Peer-to-peer learning: the printed update as a slow loop, and what is sent."""

from dataclasses import replace

import numpy as np
import pytest

from fedmtl.algorithms import PeerToPeer
from fedmtl.errors import ConfigError
from fedmtl.graphs import Graph, Ring

from .harness import noise_of
from .harness import run_activations as run
from .p2p_harness import COUNTS, NOISED, agents, arrays, random_graph, schedule, slow

SMOOTH = {"logistic": 0.25, "squared": 2.0}
N = len(COUNTS)


@pytest.mark.parametrize("loss", ["logistic", "squared"])
@pytest.mark.parametrize(
    ("lam", "mechanism", "order"), [("inverse", "l2_laplace", 2), (0.3, "laplace", 1)]
)
def test_runs_are_the_slow_loop(loss: str, lam: float | str, mechanism: str, order: int) -> None:
    problem, graph, clients = agents(loss), random_graph(N), schedule(3, 40, 1)
    algorithm = PeerToPeer(feature_norm=1.0, graph=graph, mu=0.7, loss=loss, lam=lam)
    privacy = replace(NOISED, mechanism=mechanism)
    noise = noise_of(algorithm, problem, clients, privacy)
    state, _ = run(algorithm, problem, clients, privacy, pieces=7)
    assert np.abs(noise).max() > 0.01
    settings = {"mu": 0.7, "lam": lam, "smooth": SMOOTH[loss], "clip": 0.4, "order": order}
    for r in range(3):
        expected = slow(
            arrays(problem),
            graph.weights.toarray(),
            loss,
            clients[r],
            noise=noise[:, r],
            **settings,
        )
        assert np.allclose(state.public["theta"][r].numpy(), expected, rtol=1e-10, atol=1e-12)


def test_vectors_sent_are_the_neighbours_of_those_who_woke() -> None:
    problem, clients, graph = agents(), schedule(2, 60, 3), random_graph(N)
    state, _ = run(PeerToPeer(feature_norm=1.0, graph=graph), problem, clients)
    degree = (graph.weights.toarray() > 0).sum(1)
    expected = [sum(degree[i] for i in row if i >= 0) for row in clients.tolist()]
    assert state.public["sent"].tolist() == expected


def test_a_graph_has_the_agents_of_the_data() -> None:
    problem = agents()
    with pytest.raises(ConfigError, match="the graph has agent '0', and the data has not"):
        PeerToPeer(feature_norm=1.0, graph=Graph(1 - np.eye(N), tuple(map(str, range(N))))).network(
            problem
        )
    assert PeerToPeer(feature_norm=1.0, graph=Ring()).network(problem).graph.edges == N
