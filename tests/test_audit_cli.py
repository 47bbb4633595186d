"""``fedmtl audit``: one table, and an exit code that says whether a claim fell."""

import pytest

from fedmtl.cli.main import main
from fedmtl.privacy import SeededSource

SMALL = ["data.clients=60", "schedule.cohort=10", "rounds=10", "--rounds", "2"]
_normal = SeededSource.normal


def test_a_sound_configuration_is_not_refuted(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["audit", "algorithm=fedavg", "schedule=fixed", *SMALL]) == 0
    text = capsys.readouterr().out
    kinds = ("noise law", "freshness", "sensitivity", "sampler", "charges", "transcript")
    assert all(any(line.startswith(kind) for line in text.splitlines()) for kind in kinds)
    assert "could not refute at level 1e-06" in text
    assert "REFUTED" not in text
    assert "proved" not in text


def test_a_broken_one_is_refuted(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        SeededSource, "normal", lambda self, *address: 0.9 * _normal(self, *address)
    )
    assert main(["audit", *SMALL]) == 1
    lines = capsys.readouterr().out.splitlines()
    (line,) = [line for line in lines if line.startswith("noise law: total")]
    assert "REFUTED: standard deviation 0.9" in line


def test_nothing_is_written(
    capsys: pytest.CaptureFixture[str], tmp_path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["audit", "privacy=none", *SMALL]) == 0
    assert list(tmp_path.iterdir()) == []
    assert "not checked" in capsys.readouterr().out
