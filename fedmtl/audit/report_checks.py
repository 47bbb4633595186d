"""Checks of the privacy report against the header of the ledger, field by field."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import fields
from typing import Any

from ..privacy.cost import normalized
from ..privacy.noise.discrete import LEAST
from ..privacy.record_calibration import OF_RECORDS
from ..privacy.report import PrivacyReport
from ..schedules.buffered import MEASURED
from .finished_run import Answer, FinishedRun, NotCovered
from .ledger_claims import claimed
from .lines import differences
from .restated import near

_SETTINGS = (
    *(
        "noise_multiplier",
        "budget",
        "source",
        "clip_norm",
        "mechanism",
        "refuted",
        "delta",
        "sampler",
        "records",
    ),
    *("observer", "names", "noise_std", "relation"),
)
_OF_ACCOUNTANTS = ("epsilon", "by_client", "claimed")  # compared up to the error of the grid
_OF_SEARCH = ("search", "run", "ledger_lines", "ledger_head", "accountant", "observer")
_GUESSED = (
    "interval.confidence",
    "interval.account",
    "interval.added",
    "interval.dependence",
    "interval.observers",
)


def check_settings(run: FinishedRun) -> Answer:
    """Compares the report with the facts that follow from the header of the ledger."""
    header = run.account
    if header is None:
        return None
    privacy = header["privacy"]
    schedule = header.get("schedule")
    assumed = OF_RECORDS
    facts = {"law": privacy["mechanism"], "delta": header["delta"]}
    if "releases" in header:
        setup, claims = claimed(header)
        assumed = setup.sampler.facts
        facts = claims.facts() | facts
        facts["delta"] = setup.delta
    else:
        facts["sizes"] = (header["dimension"],)
        facts["replaced"] = schedule is None
        if schedule is None:
            facts["sums"] = 1
    made = {name: run.restated.made[name] for name in _SETTINGS if name in run.restated.made}
    if "releases" in header:
        del made["records"]  # None, among the other fields
    wrong = []
    if schedule is not None:
        wrong += differences(
            schedule, assumed, "{} of the schedule is {!r} in the ledger, its sampler makes {!r}"
        )
    text = "{} of the cost is {!r} in the ledger, its settings and schedule make {!r}"
    for kind in run.ledger.kinds:
        weights = kind["cost"]["weights"]
        if weights is None or "releases" in header:
            own = {}
        else:
            own = {"weights": normalized(weights)}
        wrong += differences(kind["cost"], facts | own, text)
    wrong += _cells(header)
    wrong += differences(run.report, made, "{} is {!r} in privacy.json and {!r} in the ledger")
    wrong += _population(run)
    fresh = privacy["source"] == "secure"
    if schedule is not None and schedule.get("latency") == MEASURED:
        fresh = True
    if header["replays_free"] == fresh:
        wrong.append(
            f"source is {privacy['source']!r} and replays_free {header['replays_free']} "
            "in the ledger"
        )
    return wrong, f"{', '.join(made)} are the same in privacy.json and in the ledger"


def _cells(header: Mapping[str, Any]) -> list[str]:
    """Returns the costs that assume a finer grid than the noise has: their epsilon leaves out a
    part of the cost of the discrete law of the noise."""
    most = LEAST
    if header["privacy"].get("aggregation") is not None:
        _, claims = claimed(header)
        most = min(claims.of(name).cells for name in claims.names)
    return [
        f"the cost assumes {cells:,} cells in the deviation of the noise, the grid has {most:,}"
        for cells in (kind["cost"]["cells"] for kind in header["kinds"])
        if cells > most
    ]


def _population(run: FinishedRun) -> list[str]:
    """Returns the numbers of clients and of their records in the ledger that are not those of the
    results."""
    header = run.header
    if header is None or run.counts is None:
        return []
    counts = run.counts.tolist()
    if "schedule" in header:
        n = header["schedule"]["n"]
    else:
        n = header["accounts"]
    interval = run.report.get("interval") or {"unit": None}
    # canaries have accounts, and no line in clients.csv
    if interval["unit"] == "client":
        n -= interval["canaries"]
    if interval["unit"] == "record":
        counts = [
            count + interval["added"]["each"] * (count == interval["added"]["to"])
            for count in counts
        ]
    if len(counts) != n:
        return [f"the ledger is that of {n:,} clients, clients.csv has {len(counts):,}"]
    if "units" in header and sum(counts) > header["units"]:
        return [
            f"the ledger is that of {header['units']:,} records, clients.csv has {sum(counts):,}"
        ]
    if "releases" in header or "schedule" not in header:
        return []
    pairs = [
        (run.ledger.kinds[k]["cost"]["sampled"], count)
        for k, count in zip(run.ledger.kind_of, counts, strict=True)
    ]
    # a client with fewer records than a batch has rate 1, which says nothing of the batch size
    batch = max((rate * count for rate, count in pairs if rate < 1), default=math.inf)
    if not all(math.isclose(rate, min(1.0, batch / count), rel_tol=1e-9) for rate, count in pairs):
        return [
            "the sampling rates in the ledger are not those of one batch size and the records "
            "in clients.csv"
        ]
    return []


def check_fields(run: FinishedRun) -> Answer:
    """Compares the other fields of the report with those of the ledger, and names the ones that
    nothing derives."""
    known = {"headline", *(part.name for part in fields(PrivacyReport))}
    strange = sorted(str(name) for name in run.report if name not in known)
    if strange:
        return [f"{name} is no field of a report" for name in strange], ""
    made: dict[str, Any] = {}
    if run.account is not None:
        told = [name for name in _SETTINGS if name != "records" or "releases" not in run.account]
        made = {name: value for name, value in run.restated.made.items() if name not in told}
    for name in _OF_ACCOUNTANTS:
        if name in made and near(run.report.get(name), made[name]):
            made[name] = run.report.get(name)
    wrong = differences(run.report, made, "{} is {!r} in privacy.json, and the ledger makes {!r}")
    unknown = _underived(run)
    if wrong or not unknown:
        return wrong, f"{', '.join(made)} are what the ledger makes of them"
    raise NotCovered("; ".join(f"{name}: {why}" for name, why in unknown.items()))


def _underived(run: FinishedRun) -> dict[str, str]:
    """Returns the fields of the report that are compared with nothing but its copy in result.json,
    and why."""
    stated = [part.name for part in fields(PrivacyReport)]
    if run.secret:
        why = "a search publishes nothing of the ledgers of its runs"
        return {", ".join(name for name in stated if name not in _OF_SEARCH): why}
    if run.account is None:
        return {", ".join(stated): "there is no ledger to derive them from"}
    unknown = dict(run.restated.unknown)
    if run.report.get("beside") is not None:
        unknown["beside"] = "it follows from graph and clocks, which are in no ledger"
    if run.report.get("interval") is not None:
        unknown[", ".join(_GUESSED)] = (
            "the attack is counted with the noise known, and noise is in no file"
        )
    return unknown


def check_search(run: FinishedRun) -> Answer:
    """Compares the statements on the search in the report of a private search with the header of
    its ledger."""
    if not run.secret or run.header is None:
        return None
    header = run.header
    search = run.report["search"]
    bound = header["score_bound"]
    score = "test accuracy"
    if bound is not None:
        score = f"1 - min(error, {bound:g}) / bound"
    made = {
        "candidates": list(header["candidates"]),
        "mean": header["mean"],
        "shape": float(header["shape"]),
        "score": f"mean over all clients of the {score} of their own models",
        "score_noise": header["score_noise"],
    }
    stated = dict(search)
    # JSON may hold inf as a text, and 1 for 1.0
    stated["shape"] = float(stated["shape"])
    wrong = differences(
        stated, made, "{} of the search is {!r} in privacy.json and {!r} in the ledger"
    )
    wrong += [f"{name} is no fact of a search" for name in sorted(set(search) - set(made))]
    fixed = dict.fromkeys(("run", "ledger_lines", "ledger_head")) | {
        "accountant": "rdp",
        "observer": "public",
    }
    wrong += differences(run.report, fixed, "{} is {!r} in privacy.json, and {!r} of every search")
    return wrong, f"{', '.join(made)} are the same in privacy.json and in the ledger"


def check_headline(run: FinishedRun) -> Answer:
    text = run.report.get("headline")
    made = PrivacyReport.from_dict(run.report).headline
    if text != made:
        wrong = [f"the headline is {text!r}, and the figures of the report make {made!r}"]
    else:
        wrong = []
    return wrong, "it states the figures of the report"


def check_report(run: FinishedRun) -> Answer:
    """Compares the report in its two files."""
    if not run.private:
        raise NotCovered("private/result.json is not here")
    wrong = differences(
        run.result, run.report, "{0} is {2!r} in privacy.json and {1!r} in result.json"
    )
    names = [part.name for part in fields(PrivacyReport) if part.name in run.result]
    wrong += [f"{name} is missing in privacy.json" for name in names if name not in run.report]
    return wrong, "every field of privacy.json is the one in result.json"
