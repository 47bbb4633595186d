"""Clusters of clients: one is the method without clusters, several are runs of their own; what a client sends."""

import math

import numpy as np
import pytest
import torch

from fedmtl import IFCA, PMTL, ClientPrivacy, ClusteredPMTL, FedAvg, LocalSGD, RecordPrivacy, models
from fedmtl.algorithms.clusters import blocks
from fedmtl.audit.recording import RecordedRounds
from fedmtl.errors import ConfigError, DataError, PrivacyError
from fedmtl.privacy import FixedCohort, clip_rows, open_channel
from fedmtl.schedules import Block
from tests.algorithms.harness import everyone, problem_of, run
from tests.algorithms.test_fedavg import local_steps
from tests.algorithms.test_pmtl import blocks as records
from tests.helpers import ragged_classification, regression
from tests.trainer.settings import DATA, DELTA, trainer

SOLVER = LocalSGD(lr=0.05, steps=3, batch_size=None)
NOISY = ClientPrivacy(clip_norm=0.3, noise_multiplier=0.5, delta=1e-5)
PARITY = {client: f"half {k % 2}" for k, client in enumerate(DATA.ids)}


def test_public_clusters_are_runs_of_their_own() -> None:
    """With everybody in every round, each cluster's mean and models are those of PMTL on its clients alone."""
    data = regression(clients=7)
    clusters = {client: "ab"[k in (1, 4, 5)] for k, client in enumerate(data.ids)}
    algorithm = ClusteredPMTL(clusters=clusters, lam=0.7, local=SOLVER)
    problem = problem_of(data, rounds=5)
    state = run(algorithm, problem)
    found = everyone(problem, algorithm, state)
    for number, name in enumerate("ab"):
        ids = [client for client in data.ids if clusters[client] == name]
        apart, alone = problem_of(data.subset(ids), rounds=5), PMTL(lam=0.7, local=SOLVER)
        reached = run(alone, apart)
        torch.testing.assert_close(
            state.public["global"][number], reached.public["global"], rtol=1e-11, atol=1e-13
        )
        places = [data.ids.index(client) for client in ids]
        torch.testing.assert_close(
            found[places], everyone(apart, alone, reached), rtol=1e-11, atol=1e-13
        )


def test_a_client_reaches_the_block_of_its_cluster_alone_and_the_clip_is_joint() -> None:
    """Whichever clusters a client is in, or chooses, its clipped row is no longer than the clip."""
    seen: list[torch.Tensor] = []
    problem = problem_of(ragged_classification(), rounds=2, model=models.mlp(hidden=3), loss="auto")
    algorithm = IFCA(clusters=3, spread=0.5, local=LocalSGD(lr=0.5, epochs=5))
    sampler = FixedCohort(4).bind(problem.clients)
    channel = open_channel(
        NOISY,
        algorithm.plan(problem, sampler),
        sampler,
        seed=0,
        steps=2,
        channel_class=RecordedRounds,
    )
    channel.tap = lambda step, name, clients, given: seen.append(
        clip_rows(given, channel.clips[name])
    )
    ranks = channel.draw(0)
    channel.begin(0, ranks)
    block = Block(0, torch.zeros(1, 1), ranks[None, None])
    state = algorithm.init(problem)
    algorithm.step(problem, state, block, channel)
    (clipped,) = seen
    torch.testing.assert_close(
        clipped.norm(dim=1), torch.full((4,), 0.3, dtype=clipped.dtype), rtol=1e-5, atol=0
    )
    filled = clipped.view(4, 3, -1).abs().sum(2) > 0
    assert filled.sum(1).tolist() == [1, 1, 1, 1]
    other = blocks(
        clipped.view(4, 3, -1).sum(1), (filled.int().argmax(1) + 1) % 3, 3
    )  # had they chosen otherwise
    assert float((clipped - other).norm(dim=1).max()) <= 2 * 0.3 + 1e-12  # replace-one
    assert math.isclose(float(clipped[0].norm()), float(other[0].norm()))


def test_ifca_rounds_by_hand() -> None:
    """Every client trains the model of its least loss, whose mean update is over a public third of the clients."""
    data, algorithm = (
        regression(clients=9),
        IFCA(clusters=3, spread=2.0, server_lr=0.5, local=SOLVER),
    )
    problem = problem_of(data, rounds=4)
    state, w = run(algorithm, problem), algorithm.init(problem).public["global"].numpy()
    for _ in range(5):
        chosen = [
            int(np.argmin([np.mean((x @ one - y) ** 2) for one in w])) for x, y in records(data)
        ]
        before, w = w, w.copy()
        for k, (x, y) in zip(chosen, records(data), strict=True):
            w[k] += 0.5 * 3 / 9 * (local_steps(x, y, before[k]) - before[k])
    assert len(set(chosen)) > 1
    np.testing.assert_allclose(state.public["global"].numpy(), before, rtol=1e-9)
    np.testing.assert_allclose(
        everyone(problem, algorithm, state).numpy(), before[chosen], rtol=1e-9
    )


def test_one_cluster_is_federated_averaging() -> None:
    problem = problem_of(
        ragged_classification(7), rounds=4, model=models.mlp(hidden=4), loss="auto"
    )
    one, other = (
        run(method, problem, sampler=FixedCohort(3), privacy=NOISY).public["global"]
        for method in (IFCA(clusters=1, spread=0.0, local=SOLVER), FedAvg(local=SOLVER))
    )
    torch.testing.assert_close(one[0], other, rtol=1e-13, atol=1e-15)


def test_units_and_settings(tmp_path) -> None:
    records = RecordPrivacy(clip_norm=0.4, noise_multiplier=1.3, delta=DELTA)
    assert (
        trainer(algorithm=ClusteredPMTL(clusters=PARITY, local=SOLVER), privacy=records)
        .fit()
        .epsilon
        > 0
    )
    with pytest.raises(PrivacyError, match="not made only of locally trained models"):
        trainer(algorithm=IFCA(local=SOLVER), privacy=records).fit()
    file = tmp_path / "clusters.csv"
    file.write_text(
        "client,cluster\n" + "".join(f"{client},{name}\n" for client, name in PARITY.items())
    )
    one, other = (ClusteredPMTL(clusters=given, local=SOLVER) for given in (str(file), PARITY))
    assert torch.equal(
        trainer(algorithm=one).fit().personal, trainer(algorithm=other).fit().personal
    )
    file.write_text("client,cluster\na,0\nb,0\na,1\n")
    with pytest.raises(ConfigError, match=r"clusters\.csv, row 4: client 'a' has two clusters"):
        ClusteredPMTL(clusters=file)
    file.write_text("who,where\na,b\n")
    with pytest.raises(DataError, match="the header is 'who,where'; it must be 'client,cluster'"):
        ClusteredPMTL(clusters=file)
    with pytest.raises(ConfigError, match="no cluster of client 'client-3'"):
        trainer(
            algorithm=ClusteredPMTL(clusters={k: v for k, v in PARITY.items() if k != "client-3"})
        ).fit()
