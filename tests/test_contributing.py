"""The program in CONTRIBUTING.md does what the text says of it."""

import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from importlib.util import cache_from_source
from pathlib import Path
from types import FrameType

import fedmtl
from fedmtl import (
    ClientPrivacy,
    FedAvg,
    LocalSGD,
    PoissonSampling,
    Trainer,
    load_data,
    models,
)
from fedmtl.cli.main import main
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
        r"^## Four walks through the code\n(.*?)(?=^## )", text, re.DOTALL | re.MULTILINE
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


def entered(call: Callable[[], object]) -> list[tuple[str, str]]:
    """The functions of the package that a call enters, each once, in the order of their first calls."""
    root = Path(fedmtl.__file__).parent
    found: dict[tuple[str, str], None] = {}

    def note(frame: FrameType, event: str, argument: object) -> None:
        code = frame.f_code
        if event == "call" and code.co_filename.startswith(str(root)):
            file = Path(code.co_filename).relative_to(root).as_posix()
            found.setdefault((file, code.co_qualname))

    sys.setprofile(note)
    try:
        call()
    finally:
        sys.setprofile(None)
    return list(found)


def check_order(walk: str, folder: str, count: int, order: list[tuple[str, str]]) -> None:
    """The functions that the column "where" of a walk names are entered in their order."""
    text = TEXT.read_text(encoding="utf-8")
    (table,) = re.findall(rf"^\*\*{walk}\*\*.*?\n\n(\|.*?)\n\n", text, re.DOTALL | re.MULTILINE)
    where = [row.split("|")[2] for row in table.splitlines()[2:]]
    named = re.findall(r"`([\w/]+\.py)`: `([\w.]+)`", " ".join(where))
    places = []
    for file, name in named:
        if name[0].isupper() and "." not in name:  # a class: its call
            name = f"{name}.__call__"
        places.append(order.index((folder + file, name)))
    assert len(places) >= count
    # a function that two rows name is entered once for both
    assert places == sorted(places), walk


def test_a_run_enters_the_functions_of_two_walks_in_their_order(tmp_path):
    """The release, and the round: the functions that the column "where" names."""
    trainer = Trainer(
        algorithm=FedAvg(local=LocalSGD(lr=0.1)),
        data=load_data("digits", clients=4),
        model=models.softmax_regression(),
        schedule=PoissonSampling(2),
        privacy=ClientPrivacy(clip_norm=1.0, epsilon=4.0),
        rounds=2,
        folder=tmp_path / "run",
        baselines=(),
        progress=False,
    )
    order = entered(trainer.fit)
    check_order("A release", "privacy/", 7, order)
    check_order("A round", "", 11, order)


def test_a_command_enters_the_functions_of_the_walk_of_a_setting_in_their_order(
    tmp_path, monkeypatch
):
    monkeypatch.chdir(tmp_path)
    words = [
        "privacy.epsilon=3",
        "data.clients=30",
        "schedule.cohort=6",
        "rounds=1",
        "baselines=[]",
    ]
    order = entered(lambda: main([*words, "finetune=none", "progress=false"]))
    check_order("A setting", "", 6, order)
