"""What a reader of ledgers finds wrong in lines that are chained as they should be, and what ``fedmtl verify`` makes of
an early stop, of steps beyond the plan, and of several kinds of accounts."""

import json
from pathlib import Path
from typing import Any

import pytest

from fedmtl import EarlyStopping, FullParticipation, RecordPrivacy
from fedmtl.audit.lines import Reading
from fedmtl.privacy.cost import PrivacyCost

from ..trainer.settings import DELTA, NOISE
from .test_verification import both, change, failed, lists, rewrite, run

Line = dict[str, Any]


def header(sampler: str, n: int, cohort: int, cap: int | None, *, free: bool = True) -> Line:
    cost = PrivacyCost(law="gaussian", sizes=(3,), delta=1e-5)
    by_client = sampler in ("BoundFixed", "BoundCyclic")
    return {
        "kinds": [{"cost": cost.to_dict(), "multiplier": 4.0, "cap": cap}],
        "accounts": n if by_client else 1,
        "schedule": {"class": sampler, "n": n, "cohort": cohort, "per_participation": by_client},
        "releases": [["update", "vector", 3]],
        "privacy": {},
        "replays_free": free,
    }


def opened(session: int) -> Line:
    return {"kind": "open", "session": session}


def charge(first: int, *cohorts: list[int]) -> Line:
    return {"kind": "charge", "first": first, "end": first + len(cohorts), "cohorts": list(cohorts)}


CLOSE = {"kind": "close"}
FIXED = header("BoundFixed", 4, 2, 2)
SECURE = header("BoundFixed", 4, 2, 4, free=False)
TURNS = header("BoundCyclic", 6, 2, 9)
WRONG: dict[str, tuple[list[Line], str | None]] = {
    "sound": (
        [FIXED, opened(1), charge(0, [0, 1], [1, 2]), CLOSE, opened(2), charge(2, [3])],
        None,
    ),
    "above a cap": (
        [FIXED, opened(1), charge(0, [0, 1], [0, 2]), charge(2, [0])],
        "1 clients are charged above their caps",
    ),
    "a client twice": ([FIXED, opened(1), charge(0, [1, 1])], "no cohort of distinct clients"),
    "too many": ([FIXED, opened(1), charge(0, [0, 1, 2])], "a cohort that Fixed does not draw"),
    "after the end": (
        [FIXED, opened(1), charge(0, [0]), CLOSE, charge(1, [0])],
        "line 5: charge outside of an open session",
    ),
    "a session left out": ([FIXED, opened(1), opened(3)], "session 3 follows session 1"),
    "a step left out": ([FIXED, opened(1), charge(0, [0]), charge(2, [0])], "steps 2 to 2 are not"),
    "a replay in a simulation": (
        [FIXED, opened(1), charge(0, [0]), opened(2), charge(0, [0])],
        "line 5: steps 0 to 0 are not the next ones",
    ),
    "a replay in secure mode": (
        [SECURE, opened(1), charge(0, [0], [1]), opened(2), charge(1, [1], [0])],
        None,
    ),
    "a step twice in one session": (
        [SECURE, opened(1), charge(0, [0]), charge(0, [0])],
        "line 4: steps 0 to 0 are not the next ones",
    ),
    "cohorts of other steps": (
        [FIXED, opened(1), charge(0, [0]) | {"end": 2}],
        "1 cohorts for 2 steps",
    ),
    "turns": ([TURNS, opened(1), charge(0, [0, 1], [2, 3], [4, 5], [0, 1])], None),
    "turns too close": (
        [TURNS, opened(1), charge(0, [0, 1], [2, 3], [0, 4])],
        "step 2 has a cohort that Cyclic does not draw",
    ),
}


@pytest.mark.parametrize("name", WRONG)
def test_what_is_wrong_in_lines_is_named(name: str) -> None:
    lines, told = WRONG[name]
    problems = Reading(lines).problems()
    if told is None:
        assert problems == []
    else:
        assert [told in problem for problem in problems].count(True) == 1


def test_an_early_stop_is_charged_to_the_cap_or_to_so_many_steps() -> None:
    stop = {"kind": "remaining", "uses": 7}
    fixed = Reading([FIXED, opened(1), charge(0, [0, 1]), stop])
    assert (fixed.participations.tolist(), fixed.uses.tolist()) == ([1, 1, 0, 0], [2, 2, 2, 2])
    steps = {"kind": "charge", "first": 0, "end": 3}
    everybody = Reading([header("BoundPoisson", 40, 2, None), opened(1), steps, stop])
    assert (everybody.participations.tolist(), everybody.uses.tolist()) == ([3], [7])
    assert everybody.releases == 7


def without_the_rest(lines: list[Line]) -> list[Line]:
    return [line for line in lines if line["kind"] != "remaining"]


def test_what_an_early_stop_left_out_is_missed(tmp_path: Path) -> None:
    """Also where the report says nothing of it; and steps beyond those that were planned are."""
    stopping = EarlyStopping(patience=1, min_delta=1e6)
    folder = run(tmp_path / "run", early_stopping=stopping, eval_every=1)
    assert failed(folder) == {}
    planned = json.loads((folder / "private/result.json").read_text())["planned_rounds"]
    change(folder / "private/result.json", planned_rounds=1)
    rewrite(folder)
    assert "is charged, and 1 were planned" in failed(folder)["charges"]
    change(folder / "private/result.json", planned_rounds=planned)
    both(folder, remaining_charged=False)
    rewrite(folder, without_the_rest)
    assert "the run stopped early, and the steps that were planned" in failed(folder)["charges"]


def test_epsilon_is_computed_again_for_every_kind_of_accounts(tmp_path: Path) -> None:
    """And a figure that is a fiftieth too small is above what the two accountants may differ by."""
    privacy = RecordPrivacy(clip_norm=0.7, noise_multiplier=NOISE, delta=DELTA, source="secure")
    folder = run(tmp_path / "run", privacy=privacy, schedule=FullParticipation(), rounds=2)
    report = json.loads((folder / "public/privacy.json").read_text())
    both(folder, epsilon=report["epsilon"] * 0.98)
    lists(folder)
    assert "by dp-accounting" in failed(folder)["epsilon"]
    both(folder, epsilon=report["epsilon"])

    def less_noise_of_the_last(lines: list[Line]) -> list[Line]:
        *others, last = lines[0]["kinds"]
        assert len(others) > 1
        kinds = [*others, last | {"multiplier": NOISE / 4}]
        return [lines[0] | {"kinds": kinds}, *lines[1:]]

    rewrite(folder, less_noise_of_the_last)
    assert "by dp-accounting" in failed(folder)["epsilon"]
