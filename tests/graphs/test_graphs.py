"""Graphs: dense definitions, a file of edges, and errors that name the agents."""

import gzip

import numpy as np
import pytest
import torch
from scipy.sparse import csr_array

from fedmtl.data import FederatedDataset
from fedmtl.errors import ConfigError, DataError
from fedmtl.graphs import Complete, EdgesFile, Graph, GraphSettings, KNNCosine, Ring, knn_cosine
from fedmtl.trainer.run_fingerprint import describe

TRIANGLE = np.array([[0, 2, 0.5], [2, 0, 0], [0.5, 0, 0]])


def test_normalization_and_degrees() -> None:
    graph = Graph(csr_array(TRIANGLE), ("a", "b", "c"))
    assert graph.normalization.tolist() == [2.5, 2.0, 0.5]
    assert graph.degrees.tolist() == [2, 1, 1]
    assert graph.edges == 2


def test_the_order_of_the_rows_is_that_of_the_ids() -> None:
    graph = Graph(TRIANGLE, ("a", "b", "c"))
    again = graph.ordered(("c", "a", "b"))
    assert np.array_equal(again.weights.toarray(), TRIANGLE[np.ix_([2, 0, 1], [2, 0, 1])])
    assert graph.ordered(["a", "b", "c"]) is graph
    assert np.array_equal(again.ordered(graph.ids).weights.toarray(), TRIANGLE)
    assert describe(again.ordered(graph.ids)) == describe(graph)
    assert describe(graph) not in (describe(again), describe(Graph(1.5 * TRIANGLE, graph.ids)))
    with pytest.raises(ConfigError, match="the data has agent 'd', and the graph has not"):
        graph.ordered(("a", "b", "c", "d"))
    with pytest.raises(ConfigError, match="the graph has agent 'c', and the data has not"):
        graph.ordered(("a", "b"))


def test_malformed_weights_are_refused_with_the_agents_named() -> None:
    def weights(i: int, j: int, value: float, other: float | None = None) -> np.ndarray:
        w = TRIANGLE.copy()
        w[i, j], w[j, i] = value, value if other is None else other
        return w

    ids = ("a", "b", "c")
    for w, message in (
        (weights(1, 2, 3.0, 4.0), "agents 'b' and 'c' is 3 in one direction and 4"),
        (weights(1, 2, 3.0, 0.0), "agents 'b' and 'c' is 3 in one direction and 0"),
        (weights(0, 1, -1.0), "the weight -1 of agents 'a' and 'b' is negative"),
        (weights(0, 2, np.nan), "the weight nan of agents 'a' and 'c' is not finite"),
        (weights(2, 2, 1.0), "agents 'c' and 'c' is of an agent with itself"),
        (weights(0, 2, 0.0), "Graph: 'c' has no neighbours"),
        (np.zeros((3, 3)), r"'a' has no neighbours \(agents without any: 3\)"),
        (np.ones((2, 3)), r"shape \(2, 3\) for 3 agents"),
    ):
        with pytest.raises(ConfigError, match=message):
            Graph(w, ids)
    with pytest.raises(ConfigError, match="'a' twice"):
        Graph(TRIANGLE, ("a", "b", "a"))


@pytest.mark.parametrize("sparse", [False, True])
def test_nearest_neighbours_are_those_of_the_matrix_of_cosines(sparse: bool) -> None:
    rng = np.random.default_rng(0)
    rows = rng.normal(size=(40, 30)) * (rng.random((40, 30)) < 0.4)
    unit = rows / np.linalg.norm(rows, axis=1, keepdims=True)
    cosine = unit @ unit.T
    np.fill_diagonal(cosine, -2)
    expected = np.zeros((40, 40))
    for i in range(40):
        for j in np.argsort(-cosine[i])[:5]:
            expected[i, j] = expected[j, i] = 1
    ids = [f"u{i}" for i in range(40)]
    graph = knn_cosine(csr_array(rows) if sparse else rows, 5, ids)
    assert np.array_equal(graph.weights.toarray(), expected)
    assert graph.degrees.min() == 5
    assert graph.degrees.max() > 5
    assert np.array_equal(knn_cosine(3.0 * rows, 5, ids).weights.toarray(), expected)
    with pytest.raises(ConfigError, match="k is 40 for 40 agents"):
        knn_cosine(rows, 40, ids)
    rows[7] = 0
    with pytest.raises(ConfigError, match="agent 'u7' is zero"):
        knn_cosine(rows, 5, ids)
    with pytest.raises(ConfigError, match=r"\(40, 30\) for 3 agents"):
        knn_cosine(rows, 5, "abc")


class Clients:
    """What settings read of a dataset."""

    name = "a few"

    def __init__(self, ids) -> None:
        self.ids = tuple(map(str, ids))


def test_simple_shapes() -> None:
    assert np.array_equal(Complete().build(Clients(range(4))).weights.toarray(), 1 - np.eye(4))
    cycle = [[0, 1, 0, 1], [1, 0, 1, 0], [0, 1, 0, 1], [1, 0, 1, 0]]
    assert Ring().build(Clients("abcd")).weights.toarray().tolist() == cycle
    wide = Ring(2).build(Clients(range(7)))
    assert wide.degrees.tolist() == [4] * 7
    assert wide.weights.toarray()[0].tolist() == [0, 1, 1, 0, 0, 1, 1]
    assert Ring().build(Clients("ab")).weights.toarray().tolist() == [[0, 1], [1, 0]]
    with pytest.raises(ConfigError, match=r"Ring\.reach is 2 for 4 clients"):
        Ring(2).build(Clients(range(4)))
    with pytest.raises(ConfigError, match="'0' has no neighbours"):
        Complete().build(Clients("0"))


def test_graphs_of_networkx() -> None:
    import networkx

    drawn = networkx.Graph([("b", "a", {"weight": 2.0}), ("a", "c", {"weight": 0.5})])
    graph = Graph(networkx.to_scipy_sparse_array(drawn), tuple(drawn)).ordered(("a", "b", "c"))
    assert np.array_equal(graph.weights.toarray(), TRIANGLE)
    circle = Graph(
        networkx.to_scipy_sparse_array(networkx.circulant_graph(7, [1, 2])), tuple(range(7))
    )
    assert np.array_equal(
        circle.weights.toarray(), Ring(2).build(Clients(range(7))).weights.toarray()
    )


def test_a_file_of_edges(tmp_path) -> None:
    text = "agent,neighbour,weight\na,b,2\nc,a,0.5\nb,a,2.0\n"
    file = tmp_path / "edges.csv"
    file.write_text(text)
    assert np.array_equal(EdgesFile(file).build(Clients("abc")).weights.toarray(), TRIANGLE)
    packed = tmp_path / "edges.csv.gz"
    packed.write_bytes(gzip.compress(b"agent,neighbour\na,b\nb,c\n"))
    assert EdgesFile(packed).build(Clients("abc")).weights.toarray().tolist() == [
        [0, 1, 0],
        [1, 0, 1],
        [0, 1, 0],
    ]
    for rows, kind, message in (
        ("a,b,2\nb,d,1\n", ConfigError, r"edges.csv, row 3: there is no agent 'd'"),
        (
            "a,b,2\nb,a,3\n",
            ConfigError,
            r"row 3: the pair 'b', 'a' has the weight 3 here and 2 before",
        ),
        ("a,b,-2\n", DataError, r"row 2: the weight is '-2'"),
        ("a,b,x\n", DataError, r"row 2: the weight is 'x'"),
        ("a,b\n", DataError, r"row 2: 2 cells"),
        ("a,a,1\n", ConfigError, r"row 2: agent 'a' is its own neighbour"),
        ("a,b,1\n", ConfigError, r"edges.csv: 'c' has no neighbours"),
    ):
        file.write_text("agent,neighbour,weight\n" + rows)
        with pytest.raises(kind, match=message):
            EdgesFile(file).build(Clients("abc"))
    file.write_text("from,to\na,b\n")
    with pytest.raises(DataError, match="row 1: the header is 'from,to'"):
        EdgesFile(file).build(Clients("ab"))
    with pytest.raises(DataError, match="no such file"):
        EdgesFile(tmp_path / "none.csv")


def test_settings_build_graphs_of_a_dataset(tmp_path) -> None:
    rng = np.random.default_rng(1)
    clients = {name: (rng.normal(size=(6, 3)), rng.integers(0, 2, 6)) for name in "abcde"}
    data = FederatedDataset.from_tensors(clients, test=clients, classes=2)
    (tmp_path / "edges.csv").write_text("agent,neighbour\na,b\nc,d\nd,e\n")
    for settings, edges in (
        (Complete(), 10),
        (Ring(), 5),
        (EdgesFile(str(tmp_path / "edges.csv")), 3),
    ):
        assert isinstance(settings, GraphSettings)
        assert settings.build(data).edges == edges
        assert settings.build(data).ids == data.ids
        assert not settings.from_data
        assert hash(settings) == hash(settings)
    sums = np.stack([((2 * y - 1)[:, None] * x).sum(0) for x, y in clients.values()])
    assert KNNCosine(2).from_data
    found = KNNCosine(2).build(data).weights.toarray()
    assert np.array_equal(found, knn_cosine(sums, 2, data.ids).weights.toarray())
    before = EdgesFile(str(tmp_path / "edges.csv")).digest
    (tmp_path / "edges.csv").write_text("agent,neighbour\na,b\nc,d\nd,a\n")
    assert EdgesFile(str(tmp_path / "edges.csv")).digest != before
    with pytest.raises(DataError, match="no such file"):
        EdgesFile(str(tmp_path / "none.csv"))
    three = FederatedDataset.from_tensors(
        {k: (x, torch.tensor([0, 1, 2, 0, 1, 2])) for k, (x, _) in clients.items()},
        test=clients,
        classes=3,
    )
    with pytest.raises(ConfigError, match="two classes"):
        KNNCosine(2).build(three)


def test_large_graphs_stay_sparse() -> None:
    wide = Ring(3).build(Clients(range(100_000)))
    assert wide.edges == 300_000
    assert wide.weights.data.nbytes == 600_000 * 8
