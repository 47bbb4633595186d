from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import fedmtl
from fedmtl.cli.config import config_folder
from fedmtl.data import FederatedDataset, load_data, load_digits_clients, loaders, reader
from fedmtl.errors import ConfigError


def test_data_by_name_are_the_loaders_data():
    assert load_data("digits", clients=5).fingerprint() == load_digits_clients(5).fingerprint()


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        (
            "digit",
            {},
            "data.name is 'digit'; accepted: 'adult', 'digits', 'femnist', 'hospital', 'leaf', 'lending', "
            "'movielens', 'school', 'synthetic_agents', 'synthetic_tasks', 'table'",
        ),
        (
            "digits",
            {"client": 5},
            "data.client is no option of 'digits'; accepted: clients, train_images, .*seed",
        ),
        ("femnist", {}, "data.root is missing; 'femnist' needs it"),
        ("femnist", {"root": None}, "data.root is missing; 'femnist' needs it"),
        ("table", {"path": "a.csv"}, "data.client is missing; 'table' needs it"),
    ],
)
def test_unknown_names_and_options_are_refused(name, options, message):
    with pytest.raises(ConfigError, match=message):
        load_data(name, **options)


def test_one_module_and_one_yaml_add_a_data_set(tmp_path):
    """In a copy of the package: no other file changes, and both the program and the command know the new name."""
    root = Path(fedmtl.__file__).parent
    shutil.copytree(root, tmp_path / "fedmtl", ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copytree(config_folder(), tmp_path / "configs")
    (tmp_path / "fedmtl" / "data" / "readers" / "coins.py").write_text(
        "import torch\n"
        "from ..dataset import FederatedDataset\n"
        "from ..loaders import reader\n"
        "\n"
        "@reader('coins')\n"
        "def read_coins(clients: int = 4) -> FederatedDataset:\n"
        "    rows = {f'purse-{i}': (torch.ones(6, 2), torch.tensor([0, 1] * 3)) for i in range(clients)}\n"
        "    return FederatedDataset.from_tensors(rows, test_fraction=0.5, name='coins')\n"
    )
    (tmp_path / "configs" / "data" / "coins.yaml").write_text(
        "# Coins of several purses.\n_target_: fedmtl.data.readers.coins.read_coins\nclients: 4\n"
    )
    environment = {**os.environ, "PYTHONPATH": str(tmp_path)}

    def run(*words):
        return subprocess.run([sys.executable, *words], env=environment, cwd=tmp_path, capture_output=True, text=True)

    program = "from fedmtl.data import load_data; print(load_data('coins', clients=3).ids)"
    assert run("-c", program).stdout.strip() == "('purse-0', 'purse-1', 'purse-2')"
    assert "coins              Coins of several purses." in run("-m", "fedmtl", "--help").stdout
    words = ["data=coins", "data.clients=5", "rounds=2", "schedule=full", "baselines=null", "privacy=none"]
    trained = run("-m", "fedmtl", *words, "hydra.run.dir=out")
    assert trained.returncode == 0, trained.stderr
    assert "pmtl on coins: 5 clients, 2 rounds" in trained.stdout
    refused = run("-m", "fedmtl", "data=coins", "data.purses=5")
    assert refused.returncode == 2
    assert refused.stderr == "fedmtl: error: data.purses is no setting; accepted in data: clients.\n"


def test_a_reader_outside_of_the_package_registers_itself(monkeypatch):
    monkeypatch.setattr(loaders, "LOADERS", dict(loaders.LOADERS))

    @reader("few_digits")
    def read_few(clients: int = 2) -> FederatedDataset:
        return load_digits_clients(clients)

    assert load_data("few_digits", clients=3).ids == ("client-0", "client-1", "client-2")
    with pytest.raises(ConfigError, match=r"data 'digits' is read by .*load_digits_clients; choose another name"):
        reader("digits")(read_few)
    assert load_data("digits", clients=1).name == "digits"
