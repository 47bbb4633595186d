import json
import runpy
import sys
from pathlib import Path

import pytest

BENCHMARKS = Path(__file__).resolve().parents[1] / "benchmarks"


def check_refused(driver, message, capsys):
    """Run a driver, whose helpers have the names of those of other drivers, and check that it ends by a message."""
    before = set(sys.modules)
    try:
        with pytest.raises(SystemExit) as stopped:
            runpy.run_path(str(BENCHMARKS / driver), run_name="__main__")
    finally:
        for name in set(sys.modules) - before:
            if str(getattr(sys.modules[name], "__file__", "")).startswith(str(BENCHMARKS)):
                del sys.modules[name]
    assert stopped.value.code == 2
    assert message in capsys.readouterr().err.splitlines()[-1]


@pytest.mark.parametrize(
    ("driver", "words", "message"),
    [
        ("speed/rounds.py", "--root nowhere", "argument --root: nowhere does not exist"),
        (
            "speed/rounds.py",
            "--root . --pfl-python nowhere",
            "argument --pfl-python: nowhere is no interpreter that",
        ),
        (
            "speed/noise.py",
            "--opendp-python nowhere",
            "argument --opendp-python: nowhere is no interpreter that",
        ),
        ("reproduce/school/run.py", "--root nowhere", "argument --root: nowhere does not exist"),
        ("reproduce/school/run.py", "", "--root is needed, except with --collect"),
        ("reproduce/own_data/run.py", "", "--data is needed, except with --quick and --collect"),
        ("reproduce/own_data/ceiling.py", "", "--data is needed, except with --print"),
    ],
)
def test_a_driver_refuses_what_is_not_there_before_any_work(
    driver, words, message, monkeypatch, capsys
):
    monkeypatch.setattr(sys, "path", [str(BENCHMARKS / "speed"), *sys.path])
    monkeypatch.setattr(sys, "argv", [driver, *words.split()])
    check_refused(driver, message, capsys)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (
            [],
            "2 writers, 5 images each on average; the study needs 206 writers and 60 images each: give the full file",
        ),
        (
            ["--chosen"],
            "scores.csv has no settings of femnist all images; leave out --chosen, which searches for them",
        ),
    ],
)
def test_the_study_with_all_images_refuses_a_file_without_them(
    tmp_path, words, message, monkeypatch, capsys
):
    pixels = [[0.5] * 784] * 5
    users = {name: {"x": pixels, "y": [0, 1, 2, 3, 4]} for name in ("a", "b")}
    file = tmp_path / "few.json"
    file.write_text(json.dumps({"users": list(users), "num_samples": [5, 5], "user_data": users}))
    given = [
        "--studies",
        "femnist all images",
        "--femnist-all",
        str(file),
        "--out",
        str(tmp_path / "out"),
    ]
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.setattr(sys, "argv", ["run.py", *given, *words])
    check_refused("reproduce/comparison/run.py", message, capsys)
