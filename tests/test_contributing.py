"""The program in CONTRIBUTING.md does what the text says of it."""

import os
import re
import shutil
import subprocess
import sys
from importlib.util import cache_from_source
from pathlib import Path

import fedmtl
from fedmtl.cli.names import config_folder

TEXT = Path(__file__).parents[1] / "CONTRIBUTING.md"


def blocks(section: str, language: str) -> list[str]:
    """The fenced blocks of one language in a section."""
    text = TEXT.read_text(encoding="utf-8")
    (found,) = re.findall(rf"^## {section}\n(.*?)(?=^## |\Z)", text, re.DOTALL | re.MULTILINE)
    return re.findall(rf"^```{language}\n(.*?)^```", found, re.DOTALL | re.MULTILINE)


def copied(source: str, target: str) -> None:
    """Copy a file, and what Python has compiled of a module, which holds for the copy: it is of the same time."""
    shutil.copy2(source, target)
    if source.endswith(".py"):
        compiled = Path(cache_from_source(source))
        if compiled.exists():
            there = Path(cache_from_source(target))
            there.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(compiled, there)


def test_one_module_and_one_yaml_add_a_data_set(tmp_path):
    """In a copy of the package: no other file changes, and both the program and the command know the new name."""
    root = Path(fedmtl.__file__).parent
    ignored = shutil.ignore_patterns("__pycache__")
    shutil.copytree(root, tmp_path / "fedmtl", ignore=ignored, copy_function=copied)
    shutil.copytree(config_folder(), tmp_path / "configs")
    (module,), (yaml,) = (blocks("Add a data set", language) for language in ("python", "yaml"))
    (tmp_path / "fedmtl" / "data" / "readers" / "coins.py").write_text(module)
    (tmp_path / "configs" / "data" / "coins.yaml").write_text(yaml)
    environment = {**os.environ, "PYTHONPATH": str(tmp_path)}

    program = """
import sys
from fedmtl.cli import main
from fedmtl.data import load_data
print(load_data("coins", clients=3).ids)
print([main(words.split()) for words in sys.argv[1:]])
"""
    train = "data=coins data.clients=5 rounds=2 schedule=full baselines=null privacy=none hydra.run.dir=out"
    commands = [sys.executable, "-c", program, "--help", train, "data=coins data.purses=5"]
    done = subprocess.run(commands, env=environment, cwd=tmp_path, capture_output=True, text=True)
    assert done.stdout.startswith("('purse-0', 'purse-1', 'purse-2')\n"), done.stderr
    assert "coins              Coins of several purses." in done.stdout
    assert "fedavg on coins: 5 clients, 2 rounds" in done.stdout
    assert done.stdout.endswith("[0, 0, 2]\n")
    assert done.stderr.endswith("fedmtl: error: data.purses is no setting; accepted: clients.\n")


def test_the_walks_name_files_and_functions_that_exist():
    text = TEXT.read_text(encoding="utf-8")
    (walks,) = re.findall(
        r"^## Three walks through the code\n(.*?)(?=^## )", text, re.DOTALL | re.MULTILINE
    )
    root = Path(fedmtl.__file__).parent
    named = re.findall(r"`([\w/]+\.py)`(?:: `([\w.]+)`)?", walks)
    assert len(named) > 25
    for file, name in named:
        (path,) = [path for path in (root / file, root / "privacy" / file) if path.is_file()] or [
            None
        ]
        if path is None:  # named for all papers
            assert list(root.glob(f"algorithms/*/{file}")), file
            continue
        for part in name.split("."):
            assert not part or re.search(
                rf"^ *(def|class) {part}\b", path.read_text(), re.MULTILINE
            ), (file, name)
