"""Every field of a report is derived again: altered by hand, it fails or is named as one that nothing derives."""

import json
import math
import shutil
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest

from fedmtl import (
    ClientPrivacy,
    CyclicCohorts,
    EarlyStopping,
    FedSGD,
    Finetune,
    FixedCohort,
    FullParticipation,
    PeerAveraging,
    PoissonClocks,
    QuantileClip,
    RecordPrivacy,
    SecureAggregation,
    models,
)
from fedmtl.audit.lower_bound import Interval
from fedmtl.audit.verification import CONFIRMED, FAILED, OPEN, verify
from fedmtl.contrib.published.mp_mtl import PublishedMPMTL
from fedmtl.contrib.published.pp_dmtl import PublishedPPDMTL
from fedmtl.data import load_synthetic_tasks
from fedmtl.graphs import Ring
from fedmtl.privacy.accounting.library import library_epsilon
from fedmtl.privacy.report import PrivacyReport

from ..trainer.settings import COHORT, DELTA, NOISE, SOLVER
from .test_verification import both, failed, lists, run

SECURE: dict[str, Any] = {"delta": DELTA, "source": "secure"}
CLIENT = ClientPrivacy(clip_norm=0.7, noise_multiplier=NOISE, **SECURE)
ADAPTIVE = QuantileClip(initial=0.7, count_noise=2.0)
ONE_AT_A_TIME = {
    "algorithm": PeerAveraging(feature_norm=1.0, graph=Ring()),
    "data": load_synthetic_tasks(tasks=4, train_examples=5, test_examples=3, features=3),
    "model": models.linear_regression(bias=False),
    "loss": "auto",
    "schedule": PoissonClocks(per_client=6),
    "rounds": 24,
}
RUNS: dict[str, dict[str, Any]] = {
    "clients": {},
    "a budget, stopped early": {
        "privacy": ClientPrivacy(clip_norm=0.7, epsilon=4.0, **SECURE),
        "early_stopping": EarlyStopping(patience=1, min_delta=1e6),
        "schedule": FixedCohort(cohort=COHORT),
        "eval_every": 1,
    },
    "bands, finetuned": {
        "privacy": ClientPrivacy(clip_norm=0.7, noise_multiplier=NOISE, bands=2, **SECURE),
        "schedule": CyclicCohorts(COHORT),
        "finetune": Finetune(kind="vanilla", local=SOLVER),
    },
    "an adaptive clip": {
        "privacy": ClientPrivacy(clip_norm=ADAPTIVE, noise_multiplier=NOISE, **SECURE),
    },
    "secure sums": {
        "privacy": ClientPrivacy(clip_norm=0.7, noise_multiplier=NOISE, aggregation=SecureAggregation(colluding=1), **SECURE),
        "schedule": CyclicCohorts(COHORT),
    },
    "secure sums of everybody": {
        "privacy": ClientPrivacy(clip_norm=0.7, epsilon=4.0, aggregation=SecureAggregation(bits=64), delta=DELTA),
        "schedule": FullParticipation(),
    },
    "secure sums of gradients": {
        "algorithm": FedSGD(rate=0.5),
        "privacy": RecordPrivacy(clip_norm=0.7, epsilon=4.0, aggregation=SecureAggregation(colluding=1), **SECURE),
        "schedule": FullParticipation(),
    },
    "laplace": {
        "privacy": ClientPrivacy(clip_norm=0.7, noise_multiplier=NOISE, mechanism="laplace", **SECURE),
        "schedule": FullParticipation(),
    },
    "records": {"privacy": RecordPrivacy(clip_norm=0.7, noise_multiplier=NOISE, **SECURE)},
    "records, automatic clipping": {
        "privacy": RecordPrivacy(clip_norm=0.7, noise_multiplier=NOISE, clipping="automatic", **SECURE)
    },
    "one at a time": {"privacy": RecordPrivacy(clip_norm=1.0, epsilon=3.0, **SECURE), **ONE_AT_A_TIME},
    "seeded": {"privacy": ClientPrivacy(clip_norm=0.7, noise_multiplier=NOISE, delta=DELTA)},
    "canaries": {"audit": Interval(canaries=4)},
    "no noise": {"privacy": ClientPrivacy(clip_norm=0.7, epsilon=math.inf)},
    "a refuted claim on clients": {
        **ONE_AT_A_TIME,
        "algorithm": PublishedMPMTL(feature_norm=1.0, lam=0.05),
        "privacy": ClientPrivacy(clip_norm=1.0, noise_multiplier=NOISE, mechanism="wishart", delta=DELTA),
        "schedule": FullParticipation(),
        "rounds": 2,
    },
    "a refuted claim on records": {
        **ONE_AT_A_TIME,
        "algorithm": PublishedPPDMTL(feature_norm=1.0, a1=0.05),
        "privacy": RecordPrivacy(clip_norm=1.0, noise_multiplier=NOISE, mechanism="l2_laplace", **SECURE),
    },
}  # fmt: skip


@pytest.fixture(scope="module", params=RUNS)
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    settings = {"rounds": 2, "checkpoint_every": 1} | RUNS[request.param]
    return run(tmp_path_factory.mktemp("restated") / "run", **settings)


def places(value: Any, at: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Where the values in a JSON value are, with those of objects and arrays as wholes."""
    if at:
        yield at
    inner: Any = ()
    if isinstance(value, dict):
        inner = value.items()
    elif isinstance(value, list):
        inner = enumerate(value)
    for key, each in inner:
        yield from places(each, (*at, key))


def other(value: Any) -> Any:
    """A value of the same kind that says something else."""
    if isinstance(value, bool):
        return not value
    if isinstance(value, (int, float)):
        return value * 1.1 + 1
    if isinstance(value, str):
        return f"{value} or less"
    if isinstance(value, list):
        return value[1:] or ["more"]
    if isinstance(value, dict):
        return {}
    return "something"


def altered(report: dict[str, Any], at: tuple[Any, ...], value: Any) -> dict[str, Any]:
    made = json.loads(json.dumps(report))
    holder = made
    for key in at[:-1]:
        holder = holder[key]
    holder[at[-1]] = value
    return made


def remembered(call: Callable[..., Any]) -> Callable[..., Any]:
    """The same function, which computes nothing twice."""
    known: dict[str, Any] = {}

    def answer(*arguments: Any) -> Any:
        key = repr(arguments)
        if key not in known:
            known[key] = call(*arguments)
        return known[key]

    return answer


def test_every_altered_field_fails_or_is_named_as_not_covered(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In privacy.json and result.json alike, under lists of files that fit; the headline follows the fields."""
    monkeypatch.setattr("fedmtl.audit.lines.library_epsilon", remembered(library_epsilon))
    found = verify(folder)
    assert found.fits, [each for each in found.checks if each.verdict == FAILED]
    copy = tmp_path / "run"
    shutil.copytree(folder, copy)
    stated, result = (
        json.loads((folder / name).read_text())
        for name in ("public/privacy.json", "private/result.json")
    )
    assert {part.name for part in fields(PrivacyReport)} - set(stated) <= {
        "beside",
        "elsewhere",
        "interval",
        "search",
    }
    named = " ".join(f"{each.name} {each.detail}" for each in found.checks if each.verdict == OPEN)
    stated |= {"elsewhere": None}
    missed = []
    for at in places(stated):
        holder = stated
        for key in at[:-1]:
            holder = holder[key]
        made = altered(stated, at, other(holder[at[-1]]))
        if made["elsewhere"] is None:
            del made["elsewhere"]
        if at != ("headline",):
            with suppress(TypeError, ValueError, AttributeError):  # fields that make no headline
                made["headline"] = PrivacyReport.from_dict(made).headline
        for name, values in (("public/privacy.json", made), ("private/result.json", result | made)):
            (copy / name).write_text(json.dumps(values))
        lists(copy)
        names = [key for key in at if isinstance(key, str)]
        if verify(copy).fits and ".".join(names[:2]) not in named:
            missed.append(at)
    assert missed == []


def test_a_field_that_no_report_has(folder: Path, tmp_path: Path) -> None:
    copy = tmp_path / "run"
    shutil.copytree(folder, copy)
    place = copy / "public/privacy.json"
    place.write_text(json.dumps(json.loads(place.read_text()) | {"certified_by": "nobody"}))
    lists(copy)
    assert "certified_by is no field of a report" in [each.detail for each in verify(copy).checks]


def test_what_is_derived_of_good_runs(folder: Path) -> None:
    """Nothing of a run under noise is left open but the guesses of its canaries and a formula of others."""
    (found,) = [each for each in verify(folder).checks if each.name == "fields"]
    stated = json.loads((folder / "public/privacy.json").read_text())
    if stated["run"] is None:
        assert found.detail.endswith("there is no ledger to derive them from")
    elif "interval" in stated:
        assert found.verdict == OPEN
        assert found.detail.startswith("interval.confidence, interval.account, ")
    elif stated["refuted"] is not None and stated["unit"] == "record":
        assert found.verdict == OPEN
        assert found.detail.startswith("claimed: the formula of a published accounting")
    else:
        assert found.verdict == CONFIRMED


@pytest.mark.parametrize("name", [name for name in RUNS if name.startswith("a refuted claim")])
def test_the_line_of_epsilon_fails_where_a_refuted_accounting_has_a_figure(
    name: str, tmp_path: Path
) -> None:
    folder = run(tmp_path / "run", **{"rounds": 2, "checkpoint_every": 1} | RUNS[name])
    claimed = json.loads((folder / "public/privacy.json").read_text())["claimed"]
    assert math.isfinite(claimed)
    both(folder, epsilon=claimed)
    lists(folder)
    told = f"epsilon is {claimed}, and the accounting is refuted"
    assert failed(folder)["epsilon"] == told
