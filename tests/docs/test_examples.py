"""The programs of docs/examples run, at small sizes, and print lines as those that the documentation shows."""

import json
import re
import runpy
import sys
from pathlib import Path

import pytest

from tests.docs.pages import DOCS, ROOT

EXAMPLES = DOCS / "examples"
SMALL = {
    "adapters": ["--clients=20", "--public=5", "--rounds=2"],
    "bands": ["--agents=8", "--answers=2", "--replicates=2"],
    "gains": ["--clients=20", "--rounds=2", "--epsilons", "0.5", "2", "8"],
    "neighbours": ["--agents=10", "--cut=0.001", "--wakeups", "1", "2", "3", "4", "5", "6"],
    "solvers": ["--clients=4", "--rounds=2"],
    "silos": ["--silos=4", "--patients=30", "--rounds=2"],
}


def shape(text: str) -> str:
    """The text with one mark in the place of every number and of the spaces around it."""
    return re.sub(r"\s*[\d.,]*\d[\d.,]*\s*", "#", text.strip())


def test_every_example_is_tested_and_shown() -> None:
    assert sorted(path.stem for path in EXAMPLES.glob("*.py")) == sorted(
        [*SMALL, "visits"]
    )  # which writes data
    assert sorted(path.stem for path in EXAMPLES.glob("*.txt")) == sorted(
        [*SMALL, "deploy"]
    )  # of scripts/deploy.py


@pytest.mark.parametrize("name", SMALL)
def test_an_example_prints_what_the_page_shows(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", [name, *SMALL[name]])
    runpy.run_path(str(EXAMPLES / f"{name}.py"), run_name="__main__")
    shown = (EXAMPLES / f"{name}.txt").read_text(encoding="utf-8")
    assert shape(capsys.readouterr().out) == shape(shown)


def test_examples_are_notebooks_whose_cells_print_the_same(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Cells are the program in its order; those of one run, one after another in one namespace."""
    monkeypatch.setattr(sys, "argv", ["notebooks", str(tmp_path)])
    runpy.run_path(str(ROOT / "scripts" / "notebooks.py"), run_name="__main__")
    capsys.readouterr()
    for path in EXAMPLES.glob("*.py"):
        found = json.loads((tmp_path / f"{path.stem}.ipynb").read_text(encoding="utf-8"))
        assert (found["nbformat"], found["nbformat_minor"]) == (4, 5)
        text, *code = found["cells"]
        assert (text["cell_type"], {cell["cell_type"] for cell in code}) == ("markdown", {"code"})
        assert len({cell["id"] for cell in found["cells"]}) == len(found["cells"])
        written = "".join(cell["source"] for cell in code).replace("parse_args([])", "parse_args()")
        program = path.read_text(encoding="utf-8").partition(text["source"])[2].lstrip('"')
        assert re.sub(r"\s", "", written) == re.sub(r"\s", "", program)
    namespace: dict[str, object] = {"__name__": "__main__"}
    for cell in json.loads((tmp_path / "bands.ipynb").read_text(encoding="utf-8"))["cells"][1:]:
        exec(cell["source"].replace("parse_args([])", f"parse_args({SMALL['bands']})"), namespace)
    shown = (EXAMPLES / "bands.txt").read_text(encoding="utf-8")
    assert shape(capsys.readouterr().out) == shape(shown)
