"""Nodes with tables of a real target: one range and one scale for all, or no part in the run."""

from dataclasses import replace

import numpy as np
import pandas as pd
import pytest
import torch

from fedmtl import ClientPrivacy, FedAvg, FullParticipation, LocalSGD, Trainer, load_data, models
from fedmtl.errors import DataError
from fedmtl.local.losses import Poisson

pytest.importorskip("flwr", reason="the extra flower is not installed")

from fedmtl.flower import client_app, population, with_target_range
from fedmtl.flower.node import Node
from tests.flower.grid import LocalGrid
from tests.flower.test_apps import run

WARDS = ("a", "b", "c")


def table(ward, high=40, scale="linear", low=1):
    rng = np.random.default_rng(ord(ward))
    age = rng.integers(20, 100, 30)
    cost = np.exp(age / 50 + rng.normal(0, 0.1, 30))
    frame = pd.DataFrame({"ward": ward, "age": age, "cost": cost})
    bounds = {"age": [20, 100], "cost": [low, high]}
    options = {"client": "ward", "target": "cost", "bounds": bounds, "target_scale": scale}
    return frame, load_data("table", path=frame, **options)


def trainer(*units, **settings):
    clients = population(WARDS, shape=(1,), classes=None)
    if units:
        clients = with_target_range(clients, *units)
    return Trainer(
        algorithm=FedAvg(local=LocalSGD(lr=0.3, steps=20, batch_size=None)),
        data=clients,
        model=models.linear_regression(),
        schedule=FullParticipation(),
        privacy=ClientPrivacy(clip_norm=1.0, epsilon=float("inf"), delta=1e-3),
        rounds=6,
        progress=False,
        **settings,
    )


@pytest.mark.parametrize(
    ("units", "high", "scale", "wrong"),
    [
        ((1, 40, "log"), 40, "linear", "target_scale 'linear'"),
        ((1, 40), 40, "log", "target_scale 'log'; the population's is 'linear'"),
        ((1, 40), 50, "linear", r"target_range \(1.0, 50.0\)"),
        ((), 40, "linear", r"target_range \(1.0, 40.0\); the population's is None"),
    ],
)
def test_a_node_whose_targets_are_stored_otherwise_takes_no_part(
    units, high, scale, wrong, tmp_path
):
    _, data = table("a", high, scale)
    with pytest.raises(DataError, match=wrong) as error:
        Node(trainer(*units), "a", lambda: data, tmp_path)
    assert "with_target_range(population(...), LOW, HIGH)" in str(error.value)


def test_nodes_of_logarithms_learn_what_one_process_does(tmp_path):
    """The released model, in the target's units, is that of a run on the table of all clients."""
    tables = {ward: table(ward, scale="log") for ward in WARDS}
    settings = trainer(1, 40, "log")
    server = replace(settings, folder=tmp_path / "server")
    app = client_app(server, lambda name, config: tables[name][1], folder=tmp_path / "nodes")
    result = run(server, LocalGrid(app, WARDS))
    whole = pd.concat([frame for frame, _ in tables.values()])
    options = {"client": "ward", "target": "cost", "target_scale": "log"}
    data = load_data("table", path=whole, bounds={"age": [20, 100], "cost": [1, 40]}, **options)
    alone = replace(settings, data=data).fit()
    torch.testing.assert_close(result.shared, alone.shared, rtol=1e-4, atol=1e-5)
    scores = [alone.scores["shared"]["mse"][ward] for ward in WARDS]
    assert np.mean(scores) < 0.2 * np.var(whole.cost)


def test_a_node_of_counts_has_the_loss_of_its_range(tmp_path):
    frame, _ = table("a")
    counts = frame.assign(cost=frame.cost.round().astype(int))
    bounds = {"age": [20, 100], "cost": [0, 40]}
    data = load_data("table", path=counts, client="ward", target="cost", bounds=bounds)
    node = Node(trainer(0, 40, loss="poisson"), "a", lambda: data, tmp_path)
    assert node.problem.loss == Poisson(mapped=True)
    np.testing.assert_allclose(
        np.sort(node.problem.data.in_units(torch.cat([data.train.y, data.test.y]))),
        np.sort(counts.cost),
        atol=1e-5,
    )
