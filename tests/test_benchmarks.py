from __future__ import annotations

import runpy
import sys
from pathlib import Path

import pytest

BENCHMARKS = Path(__file__).resolve().parents[1] / "benchmarks"


@pytest.mark.parametrize(
    ("driver", "words", "message"),
    [
        ("speed/rounds.py", "--root nowhere", "argument --root: nowhere does not exist"),
        ("speed/rounds.py", "--root . --pfl-python nowhere", "argument --pfl-python: nowhere is no interpreter that"),
        ("speed/noise.py", "--opendp-python nowhere", "argument --opendp-python: nowhere is no interpreter that"),
        ("reproduce/school/run.py", "--root nowhere", "argument --root: nowhere does not exist"),
        ("reproduce/school/run.py", "", "--root is needed, except with --collect"),
    ],
)
def test_a_driver_refuses_what_is_not_there_before_any_work(driver, words, message, monkeypatch, capsys):
    monkeypatch.setattr(sys, "path", [str(BENCHMARKS / "speed"), *sys.path])
    monkeypatch.setattr(sys, "argv", [driver, *words.split()])
    with pytest.raises(SystemExit) as stopped:
        runpy.run_path(str(BENCHMARKS / driver), run_name="__main__")
    assert stopped.value.code == 2
    assert message in capsys.readouterr().err.splitlines()[-1]
