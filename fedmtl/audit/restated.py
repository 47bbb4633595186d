"""The report of a run, derived again from its ledger: every field of ``privacy.json`` that the
ledger decides.

The header has the settings, the schedule, the releases and the costs, the lines have the charges.
The last value of an adaptive clip norm is in the checkpoint; that clients finetuned their models,
in ``result.json``.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

# registers the law of noise of its ledgers
from ..contrib.published import mp_mtl as _published  # noqa: F401
from ..privacy.accounting.library import TOLERANCE
from ..privacy.cost import PrivacyCost
from ..privacy.noise.laws import LAWS
from ..privacy.records import GRADIENT
from ..privacy.report import (
    AUTOMATIC,
    EXACT,
    EXACT_OUTSIDE,
    ON_GRID,
    OUTSIDE,
    RECORDS_OUTSIDE,
    ROUNDED_OUTSIDE,
    SECURE_OUTSIDE,
    SHARED,
    SHARED_OUTSIDE,
)
from ..privacy.row_noise import row_key, rows_text
from ..privacy.settings import RecordPrivacy
from ..secure.roster import honest_rows
from ..trainer.personalize import CLIENT_LEVEL, RECORD_LEVEL
from .claim import Claim
from .ledger_claims import claimed, noise_std
from .lines import Reading, turns_apart
from .lower_bound import Interval

_MOST_COSTS = 200  # distinct costs of which epsilon is computed
_MOST_SUMS = 1 << 20  # noised sums of one account of which epsilon is computed


@dataclass(frozen=True)
class Restated:
    """The fields of a report that follow from the ledger.

    Attributes:
        made: the fields that it decides, JSON-ready, with their values.
        unknown: names of fields that it does not decide, each with the reason.
    """

    made: dict[str, Any]
    unknown: dict[str, str]


@dataclass(frozen=True)
class Beside:
    """Facts of a run that are not in its ledger.

    Attributes:
        ledger: name of its file.
        norms: clip norms of the last round by release, if these adapt and there is a checkpoint.
        counts: numbers of records of the clients, None without ``clients.csv``.
        finetuned: True if clients finetuned their models; None without ``result.json``.
        interval: True if canaries took part.
    """

    ledger: str
    norms: Mapping[str, float]
    counts: np.ndarray | None
    finetuned: bool | None
    interval: bool


def restated(ledger: Reading, beside: Beside) -> Restated:
    """Returns the report derived from the ledger of a run and the facts beside it.

    Raises:
        KeyError, TypeError, ValueError, FedmtlError: a header that no run writes.
    """
    header = ledger.header
    privacy = header["privacy"]
    law = LAWS[privacy["mechanism"]]
    numerics = "float64"
    if privacy["source"] == "secure":
        numerics = EXACT if law.joint else ON_GRID
    if privacy.get("aggregation") is not None:
        numerics = SHARED
    made: dict[str, Any] = {
        "delta": header["delta"],
        "refuted": header["refuted"],
        "noise_multiplier": max(kind["multiplier"] for kind in ledger.kinds),
        "source": privacy["source"],
        "accountant": "pld",
        "numerics": numerics,
        "ledger": beside.ledger,
        "remaining_charged": ledger.remaining is not None,
        "releases": ledger.releases,
        "clipping": f"{law.norm.upper()} norm",
        "mechanism": privacy["mechanism"],
        "elsewhere": None,
    }
    unknown: dict[str, str] = {}
    for some in (
        _costs(ledger),
        _of_rows(ledger, beside) if "releases" in header else _of_records(ledger, beside),
        _outside(header, beside),
    ):
        made |= some.made
        unknown |= some.unknown
    return Restated({name: value for name, value in made.items() if name not in unknown}, unknown)


def near(stated: Any, made: Any) -> bool:
    """Returns True if two figures of accountants agree up to the effect of a finer grid of
    losses."""
    if isinstance(stated, list) and isinstance(made, list):
        return len(stated) == len(made) and all(map(near, stated, made))
    numbers = all(
        isinstance(each, (int, float)) and not isinstance(each, bool) for each in (stated, made)
    )
    if not numbers:
        return bool(stated == made)
    return math.isclose(stated, made, rel_tol=TOLERANCE, abs_tol=1e-9)


def _costs(ledger: Reading) -> Restated:
    """Returns epsilon, that of the clients' own accounts, and the figure of an accounting that is
    refuted."""
    header = ledger.header
    names = ("epsilon", "by_client", "claimed")
    # clients of one kind with as many uses have one epsilon, which is computed once
    pairs, index = np.unique(np.stack([ledger.kind_of, ledger.uses]), axis=1, return_inverse=True)
    sums = [ledger.kinds[kind]["cost"]["sums"] * uses for kind, uses in pairs.T.tolist()]
    # a ledger is given by others, and must not make a verification endless
    if len(sums) > _MOST_COSTS or max(sums) > _MOST_SUMS:
        return Restated({}, dict.fromkeys(names, "too many costs or uses to compute them again"))
    # by the package's own accountant, whose figure the report states
    each = np.array([_epsilon(ledger.kinds[kind], uses) for kind, uses in pairs.T.tolist()])
    of_clients = None
    worst = each[index.ravel()]
    if "releases" not in header:
        of_clients = [float(worst.min()), float(np.median(worst)), float(worst.max())]
    made: dict[str, float | str | list[float] | None] = {
        "epsilon": float(worst.max()),
        "by_client": of_clients,
        "claimed": None,
    }
    if header["refuted"] is None:
        return Restated(made, {})
    spent = bool(ledger.uses.any())
    # the figure that the published accounting gives is a claim, and no guarantee
    made["epsilon"] = "inf" if spent else 0.0
    made["by_client"] = None
    made["claimed"] = float(worst.max())
    if "releases" in header:
        return Restated(made, {})
    return Restated(made, {"claimed": "the formula of a published accounting is in no file"})


def _epsilon(kind: Mapping[str, Any], uses: int) -> float:
    return PrivacyCost.from_dict(kind["cost"]).epsilon(uses, kind["multiplier"])


def _of_rows(ledger: Reading, beside: Beside) -> Restated:
    """Returns the fields of a run that releases sums over rows: its unit is a client, or in a
    secure sum of gradients a record."""
    header = ledger.header
    unknown = dict[str, str]()
    privacy = header["privacy"]
    clip = header["privacy"]["clip_norm"]
    setup, claims = claimed(header)
    mechanism = privacy["mechanism"]
    clipping = f"{LAWS[privacy['mechanism']].norm.upper()} norm"
    if header.get("bands"):
        mechanism += f", correlated over {len(header['bands'])} rounds"
    server = _server(ledger)
    if privacy.get("aggregation") is not None:
        server = "; ".join(_shares_text(claims.of(name)) for name in claims.names)
    unit = "client"
    if "records" in header:
        unit = "record"
        clipping = _clipping(header)
    norms: Mapping[str, float] = dict.fromkeys(claims.names, clip)
    if isinstance(clip, dict):
        towards = (
            f"from {clip['initial']:g} on towards the quantile {clip['quantile']:g}, within "
            "the budget"
        )
        clipping += f"; {towards}"
        # an adaptive norm moves in every round, and the ledger has the first one
        norms = beside.norms
    made = {
        "unit": unit,
        "relation": header["schedule"]["relation"],
        "observer": setup.privacy.observer,
        "budget": privacy["epsilon"],
        "clipping": clipping,
        "mechanism": mechanism,
        "sampler": _rounds(header),
        "records": header.get("records"),
        "server": server,
        "names": list(claims.names),
    }
    if norms.keys() >= set(claims.names):
        # the report has one figure for all releases, the largest
        made["clip_norm"] = max(norms[name] for name in claims.names)
        weights = header["kinds"][0]["cost"]["weights"] or (1.0,)
        stds = [noise_std(replace(claims.of(name), bound=norms[name])) for name in claims.names]
        made["noise_std"] = max(stds) * weights[0]  # of the report: at a weight of 1
    else:
        why = "the last clip norm is in the checkpoint, which is not here"
        unknown = {"clip_norm": why, "noise_std": why}
    return Restated(made, unknown)


def _of_records(ledger: Reading, beside: Beside) -> Restated:
    """Returns the fields of a run whose clients noise the gradients of their own records."""
    header = ledger.header
    unknown = dict[str, str]()
    privacy = header["privacy"]
    schedule = header.get("schedule")
    budget = privacy["epsilon"]
    if isinstance(budget, dict):
        # clients may have budgets of their own, of which the report states the largest
        budget = max(budget.values(), default=None)
    made = {
        "unit": "record",
        "relation": "replace" if schedule is None else schedule["relation"],
        "observer": RecordPrivacy.usual_observer,
        "budget": budget,
        "clip_norm": privacy["clip_norm"],
        "clipping": _clipping(header),
        "noise_std": None,
        "records": header["records"],
        "server": None,
        "names": [GRADIENT],
    }
    if header["refuted"] is not None:
        unknown["clipping"] = "the norm of a published method is in no file"
    if schedule is not None:
        made["sampler"] = _rounds(header)
        return Restated(made, unknown)
    made["sampler"] = _activations(ledger)
    if beside.counts is None and len(ledger.kinds) > 1:
        unknown["mechanism"] = (
            "the range of its noise is of clients with records, which private/clients.csv has"
        )
        return Restated(made, unknown)
    acting = ledger.caps > 0
    if beside.counts is not None and beside.counts.shape == acting.shape:
        # clients without records never release, so their noise is no one's
        acting &= beside.counts > 0
    each = np.array([kind["multiplier"] for kind in ledger.kinds])[ledger.kind_of][acting]
    if each.size and each.min() < each.max():
        made["mechanism"] = (
            f"{privacy['mechanism']} of multipliers {each.min():.5g} to {each.max():.5g} by client"
        )
    return Restated(made, unknown)


def _clipping(header: Mapping[str, Any]) -> str:
    """Returns the norm of the clip of gradients of single records."""
    privacy = header["privacy"]
    text = f"{LAWS[privacy['mechanism']].norm.upper()} norm of the gradient of one record"
    if privacy.get("clipping") == "automatic":
        text += AUTOMATIC
    return text


def _rounds(header: Mapping[str, Any]) -> str:
    """Returns the facts of the schedule: participants, their charges, and the division of the
    budget."""
    text = str(header["sampler"])
    kind = header["kinds"][0]
    schedule = header["schedule"]
    # a cohort that is no secret draw hides no one's participation
    if kind["cap"] is not None:
        text += "; not amplified, a client is charged for each participation"
    weights = kind["cost"]["weights"]
    if weights:
        low = min(weights)
        high = max(weights)
        text += (
            f"; steps have public weights {low:.3g} to {high:.3g}, and noise in inverse proportion"
        )
    if header.get("bands"):
        between = turns_apart(schedule)
        text += f"; {between} rounds from one to the next at least, which correlated noise needs"
    return text


def _activations(ledger: Reading) -> str:
    """Returns the sentence on clients that act one at a time: the law of the activations, and the
    charges for them."""
    header = ledger.header
    text = f"{header['sampler']}; every activation is charged to the client that acts"
    if header["at_cap"] == "silent":
        low = int(ledger.caps.min())
        high = int(ledger.caps.max())
        if low == high:
            most = f"{high}"
        else:
            most = f"{low} to {high}"
        text += (
            f", and at most {most} of one client release something: later ones read no record "
            "and cost nothing"
        )
    if any(kind["cost"]["weights"] is not None for kind in ledger.kinds):
        text += "; activations have public weights, and noise in inverse proportion"
    return text


def _server(ledger: Reading) -> str | None:
    """Returns the guarantee of noise on rows against the server; None without such noise."""
    header = ledger.header
    uses = int(ledger.uses.max())
    texts = []
    for name, _, dimension in header["releases"]:
        multiplier = header.get(row_key(name))
        stated = header.get(f"rows of {name}")
        if multiplier is not None and stated is not None:
            if stated["delta"] is None:
                delta = header["delta"]
            else:
                delta = stated["delta"]
            cost = PrivacyCost(law="l2_laplace", sizes=(dimension,), delta=delta)
            texts.append(rows_text(cost, multiplier, uses))
    return "; ".join(texts) or None


def _shares_text(claim: Claim) -> str:
    """Returns the conditions on which a secure sum protects the clients of a cohort."""
    shares = claim.shares
    assert shares is not None
    rows = honest_rows(shares.cohort, shares.colluding, shares.missing)
    return (
        f"of {shares.cohort:,} clients of a cohort at most {shares.colluding:,} may collude with "
        f"it and {shares.missing:,} be lost, and the noise counts on the shares of {rows:,}"
    )


def _outside(header: Mapping[str, Any], beside: Beside) -> Restated:
    """Returns the parts that epsilon does not cover, in the order of a report."""
    of_records = "records" in header
    outside = list(OUTSIDE)
    if header["privacy"]["source"] == "secure":
        exact = LAWS[header["privacy"]["mechanism"]].joint
        outside += [*(EXACT_OUTSIDE if exact else ROUNDED_OUTSIDE), *SECURE_OUTSIDE]
    if header["privacy"].get("aggregation") is not None:
        outside += SHARED_OUTSIDE
    outside += header["outside"]
    if of_records:
        outside += RECORDS_OUTSIDE
    if beside.interval:
        outside.append(Interval.outside)
    if beside.finetuned:
        outside.append(RECORD_LEVEL if of_records else CLIENT_LEVEL)
    if beside.finetuned is None:
        return Restated(
            {}, {"outside": "whether clients finetuned their models is in private/result.json"}
        )
    return Restated({"outside": outside}, {})
