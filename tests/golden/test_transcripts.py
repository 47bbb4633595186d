"""Every method goes on giving the numbers it gave (see transcripts.py), in a folder that verifies."""

import json
from pathlib import Path
from typing import Any

import pytest

from fedmtl.audit.verification import CONFIRMED, FAILED, OPEN, verify

from .transcripts import FILE, RUNS, run

KEPT = json.loads(FILE.read_text())


def _close(kept: Any, now: Any, place: str) -> None:
    if isinstance(kept, dict):
        assert kept.keys() == now.keys(), place
        for key in kept:
            _close(kept[key], now[key], f"{place}, {key}")
    elif isinstance(kept, list):
        assert len(kept) == len(now), place
        for index, (one, other) in enumerate(zip(kept, now, strict=True)):
            _close(one, other, f"{place}[{index}]")
    elif isinstance(kept, float):
        assert now == pytest.approx(kept, rel=1e-7, abs=1e-9), place
    else:
        assert now == kept, place


@pytest.mark.parametrize("name", RUNS)
def test_the_numbers_are_those_it_gave(name: str, tmp_path: Path) -> None:
    assert name in KEPT, (
        "a run without kept numbers: print them with python -m tests.golden.transcripts"
    )
    _close(KEPT[name], run(RUNS[name], tmp_path), name)
    said = {check.name: check.verdict for check in verify(tmp_path).checks}
    assert FAILED not in said.values()
    if name == "fedavg, no privacy" or name.endswith("repetitions"):
        assert said["chain"] == OPEN
    else:
        assert said["chain"] == said["head"] == said["charges"] == CONFIRMED
        assert said["epsilon"] in (CONFIRMED, OPEN)
        assert said["grid"] == OPEN


def test_another_seed_gives_other_numbers(tmp_path: Path) -> None:
    other = run(f"{RUNS['pmtl']} seed=1", tmp_path)
    with pytest.raises(AssertionError):
        _close(KEPT["pmtl"], other, "pmtl")
