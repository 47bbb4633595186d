"""The programs in CONTRIBUTING.md do what the text says of them."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from safetensors.torch import load_file

import fedmtl
from fedmtl import cli
from fedmtl.cli.config import config_folder

TEXT = Path(__file__).parents[1] / "CONTRIBUTING.md"


def blocks(section: str, language: str) -> list[str]:
    """The fenced blocks of one language in a section."""
    text = TEXT.read_text(encoding="utf-8")
    (found,) = re.findall(rf"^## {section}\n(.*?)(?=^## |\Z)", text, re.DOTALL | re.MULTILINE)
    return re.findall(rf"^```{language}\n(.*?)^```", found, re.DOTALL | re.MULTILINE)


@pytest.fixture(scope="module")
def mine(tmp_path_factory):
    """A folder outside of the package with the algorithm of the text."""
    folder = tmp_path_factory.mktemp("mine")
    section = "Write your own private algorithm"
    (folder / "my_ditto.py").write_text("\n".join(blocks(section, "python")))
    (folder / "mine" / "algorithm").mkdir(parents=True)
    (yaml,) = blocks(section, "yaml")
    (folder / "mine" / "algorithm" / "my_ditto.yaml").write_text(yaml)
    return folder


@pytest.mark.parametrize("privacy", ["client", "record", "none"])
def test_the_algorithm_of_the_text_is_ditto(mine, privacy):
    here = str(Path(fedmtl.__file__).parents[1])
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(mine), here])}
    words = [f"privacy={privacy}", "rounds=2", "data.clients=20", "schedule.cohort=10", "baselines=null"]
    for name in ("my_ditto", "ditto"):
        run = [*words, f"algorithm={name}", f"hydra.run.dir={privacy}_{name}"]
        command = [sys.executable, "-m", "fedmtl", "--config-dir", "mine", *run]
        done = subprocess.run(command, env=environment, cwd=mine, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
        assert "public/   privacy.json, " in done.stdout
        assert ("a simulation, not private; to publish" in done.stdout) == (privacy != "none")
        assert ("not private, to be kept like private/" in done.stdout) == (privacy == "none")
    for file in ("public/model.safetensors", "private/models.safetensors"):
        own, known = (load_file(mine / f"{privacy}_{name}" / file) for name in ("my_ditto", "ditto"))
        assert own.keys() == known.keys()
        assert all((own[key] == known[key]).all() for key in known)


def test_the_algorithm_of_the_text_is_audited(mine, monkeypatch, capsys):
    monkeypatch.chdir(mine)
    monkeypatch.syspath_prepend(str(mine))
    words = ["algorithm=my_ditto", "data.clients=20", "schedule.cohort=10", "rounds=10"]
    assert cli.main(["audit", "--config-dir", "mine", *words]) == 0
    assert re.search(r"\b0 of \d\d checks refuted", capsys.readouterr().out)


def test_a_module_that_python_does_not_find_is_named(mine, monkeypatch, capsys):
    monkeypatch.chdir(mine)
    for module in (mine / "mine" / "algorithm").glob("*.yaml"):
        (module.parent / "lost.yaml").write_text(module.read_text().replace("my_ditto.", "nowhere."))
    assert cli.main(["--config-dir", "mine", "algorithm=lost"]) == 2
    assert capsys.readouterr().err == (
        "fedmtl: error: algorithm._target_ is 'nowhere.MyDitto', which cannot be imported (No module named 'nowhere'); "
        "it must be MODULE.NAME, with the module's folder on PYTHONPATH.\n"
    )


def test_one_module_and_one_yaml_add_a_data_set(tmp_path):
    """In a copy of the package: no other file changes, and both the program and the command know the new name."""
    root = Path(fedmtl.__file__).parent
    shutil.copytree(root, tmp_path / "fedmtl", ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copytree(config_folder(), tmp_path / "configs")
    (module,), (yaml,) = (blocks("Add a data set", language) for language in ("python", "yaml"))
    (tmp_path / "fedmtl" / "data" / "readers" / "coins.py").write_text(module)
    (tmp_path / "configs" / "data" / "coins.yaml").write_text(yaml)
    environment = {**os.environ, "PYTHONPATH": str(tmp_path)}

    def run(*words):
        return subprocess.run([sys.executable, *words], env=environment, cwd=tmp_path, capture_output=True, text=True)

    program = "from fedmtl.data import load_data; print(load_data('coins', clients=3).ids)"
    assert run("-c", program).stdout.strip() == "('purse-0', 'purse-1', 'purse-2')"
    assert "coins              Coins of several purses." in run("-m", "fedmtl", "--help").stdout
    words = ["data=coins", "data.clients=5", "rounds=2", "schedule=full", "baselines=null", "privacy=none"]
    trained = run("-m", "fedmtl", *words, "hydra.run.dir=out")
    assert trained.returncode == 0, trained.stderr
    assert "fedavg on coins: 5 clients, 2 rounds" in trained.stdout
    refused = run("-m", "fedmtl", "data=coins", "data.purses=5")
    assert refused.returncode == 2
    assert refused.stderr == "fedmtl: error: data.purses is no setting; accepted in data: clients.\n"
