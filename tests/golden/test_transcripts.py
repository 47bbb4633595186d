"""Every method goes on giving the numbers it gave: see transcripts.py."""

import json
from typing import Any

import pytest

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
def test_the_numbers_are_those_it_gave(name: str) -> None:
    assert name in KEPT, "a run without kept numbers: print them with python -m tests.golden.transcripts"
    _close(KEPT[name], run(RUNS[name]), name)


def test_another_seed_gives_other_numbers() -> None:
    other = run(f"{RUNS['pmtl']} seed=1")
    with pytest.raises(AssertionError):
        _close(KEPT["pmtl"], other, "pmtl")
