"""Flower apps on Flower's own simulation engine: virtual nodes in processes of Ray."""

from dataclasses import replace
from pathlib import Path

import pytest

pytest.importorskip("flwr", reason="the extra flower is not installed")
pytest.importorskip("ray", reason="Ray is not installed: pip install 'flwr[simulation]'")

from flwr.simulation import run_simulation

from fedmtl.audit.verification import verify
from fedmtl.flower import client_app, population, server_app
from tests.algorithms.test_client_half import trainer_of
from tests.flower.test_apps import own_models, public_state, same


def test_the_simulation_engine_gives_the_numbers_of_the_trainer(tmp_path: Path) -> None:
    trainer = trainer_of("pmtl")
    expected = replace(trainer, folder=tmp_path / "one").fit()
    data = trainer.data
    names = population(data.ids, data.spec.shape, classes=data.classes)
    server = replace(trainer, data=names, folder=tmp_path / "server")
    client = client_app(server, lambda name, config: data.subset([name]), folder=tmp_path / "nodes")
    resources = {"client_resources": {"num_cpus": 1, "num_gpus": 0.0}, "init_args": {"num_cpus": 1}}
    run_simulation(
        server_app(server, patience=300), client, num_supernodes=len(data), backend_config=resources
    )
    same(public_state(tmp_path / "one"), public_state(tmp_path / "server"))
    for name in data.ids:
        same(expected.model_for(name).state_dict(), own_models(tmp_path, name))
    assert verify(tmp_path / "server").fits
