"""Checks of the privacy cost: the charges in the ledger, epsilon by dp-accounting, the budget and
the lower bounds of the canaries."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from .._rounding import rounded_down, rounded_up
from ..privacy.accounting.library import TOLERANCE
from ..privacy.cost import PrivacyCost
from .finished_run import Answer, FinishedRun, NotCovered
from .lines import differences, spread
from .lower_bound import with_bounds

_SLACK = 1e-6  # relative, of figures that were computed in two ways
_ROWS = "row noise of "
_KINDS = 20  # kinds of clients whose epsilon is computed again


def check_charges(run: FinishedRun) -> Answer:
    """Compares the charges in the ledger with the steps in result.json."""
    if run.header is None:
        return None
    if run.secret:
        raise NotCovered("a search: its runs have ledgers of their own, which stay private")
    wrong = [*run.ledger.problems(), *_uncharged(run)]
    return wrong, _charges_in_words(run, run.header)


def _uncharged(run: FinishedRun) -> list[str]:
    """Returns the differences of the charged steps from those that were done and planned."""
    steps = run.ledger.by_step
    result = run.result
    wrong = []
    done = int(result["rounds"])
    if sum(0 <= step < done for step in steps) < done:
        wrong.append(f"{done} steps are done, and not all of them are charged")
    if run.checkpoint is not None and run.checkpoint.step != done:
        wrong.append(f"result.json has {done} rounds, the checkpoint {run.checkpoint.step}")
    # when a run stops is a function of its scores, so that the steps it leaves out cost, too
    if result.get("stopped") == "early" and run.ledger.remaining is None:
        wrong.append("the run stopped early, and the steps that were planned are not charged")
    planned = result.get("planned_rounds")
    if planned is not None and steps and max(steps) >= planned:
        wrong.append(f"step {max(steps)} is charged, and {planned} were planned")
    return wrong


def _charges_in_words(run: FinishedRun, header: Mapping[str, Any]) -> str:
    charges = len(run.ledger.steps)
    distinct = len(run.ledger.by_step)
    text = f"{distinct:,} steps, in order and each once"
    # secure noise cannot be drawn again: steps that an interruption has lost are charged anew
    if charges > distinct:
        text = f"{distinct:,} steps, in order, in {charges:,} charges: lost ones were charged anew"
    if run.ledger.by_client:
        uses = "activations"
        if "schedule" in header:
            uses = "participations"
        text += f"; at most {int(run.ledger.uses.max(initial=0))} {uses} of one client"
    if header.get("bands"):
        text += (
            f", {len(header['bands'])} rounds between them at least, over which noise is correlated"
        )
    if run.ledger.remaining is not None:
        text += ", the rest after an early stop included"
    return text


def check_epsilon(run: FinishedRun) -> Answer:
    """Composes the cost of all charged uses of each kind of account by dp-accounting."""
    claim = run.report.get("epsilon")
    if run.header is None:
        return _epsilon_without_ledger(run)
    if run.secret:
        raise NotCovered("that of a search is not computed again")
    if run.header["refuted"] is not None:
        wrong = []
        if claim != "inf" and run.ledger.uses.any():
            wrong.append(f"epsilon is {claim}, and the accounting is refuted")
        return wrong, "infinite: the published accounting does not hold"
    if not isinstance(claim, (int, float)):
        return [f"epsilon is {claim!r} in privacy.json; a ledger charges a finite one"], ""
    charged = run.ledger.most_charged
    tested = spread(charged, _KINDS)
    least = 0.0
    if tested:
        bounds = [run.ledger.library_epsilon(account, float(claim)) for account in tested]
        found = [bound for bound in bounds if bound is not None]
        if not found:
            raise NotCovered(
                "dp-accounting does not have this law of noise, so it is not computed again"
            )
        least = max(found)
    among = ""
    if len(tested) != len(charged):
        among = f" (the largest of {len(tested):,} of {len(charged):,} kinds)"
    text = f"{least:.6g}{among} by dp-accounting, {rounded_up(claim, 6)} in privacy.json"
    # both are upper bounds by grids of losses, which differ in the last digits
    if claim < least * (1 - TOLERANCE) - 1e-9:
        return [text], text
    return [], text


def _epsilon_without_ledger(run: FinishedRun) -> Answer:
    """Confirms an epsilon that needs no ledger: an infinite one, or 0 of a run that releases
    nothing."""
    claim = run.report.get("epsilon")
    if claim == "inf":
        text = "infinite: no protection is claimed"
        elsewhere = run.report.get("elsewhere")
        if elsewhere:
            text += f" here, {elsewhere}"
        return [], text
    if claim == 0 and not run.report.get("names"):
        return [], "0: nothing is released"
    why = "there is no ledger whose chain holds"
    if run.result.get("replicates"):
        why = "replicates are simulations, whose charges are not kept"
    raise NotCovered(f"{why}, so there is nothing to compute it from")


def check_budget(run: FinishedRun) -> Answer:
    claim = run.report.get("epsilon")
    budget = run.report.get("budget")
    if run.chain is None or run.secret:
        return None
    if not isinstance(claim, (int, float)) or not isinstance(budget, (int, float)):
        return None
    text = f"epsilon {rounded_up(claim, 6)} of a budget of {rounded_up(budget, 6)}"
    return [text] if claim > budget * (1 + _SLACK) else [], text


def check_interval(run: FinishedRun) -> Answer:
    """Computes the lower bounds again from the guesses in the report, and the cost and the uses in
    the ledger."""
    interval = run.report.get("interval")
    header = run.header
    if interval is None:
        return None
    if header is None:
        raise NotCovered(
            "the cost and the uses that bounds are made of are in the ledger, which is not here"
        )
    account = interval["account"]
    uses = {
        "uses": int(run.ledger.uses[account]),
        "delta": header["delta"],
        "claimed": run.report.get("epsilon"),
    }
    wrong = differences(
        interval, uses, "{} of the interval is {!r}, and {!r} in the ledger or the report"
    )
    again = with_bounds(
        interval | uses,
        PrivacyCost.from_dict(run.ledger.kinds[run.ledger.kind_of[account]]["cost"]),
    )
    pairs = [(interval["measured"], again["measured"])]
    for stated, made in zip(interval["observers"], again["observers"], strict=True):
        bounds = zip(stated["bounds"], made["bounds"], strict=True)
        pairs += [(bound["epsilon"], other["epsilon"]) for bound, other in bounds]
    if not all(math.isclose(stated, made, rel_tol=_SLACK) for stated, made in pairs):
        wrong.append("the bounds are not those of the guesses")
    least = rounded_down(interval["measured"])
    text = f"epsilon is at least {least} by the guesses on {interval['canaries']:,} canaries"
    return wrong, f"{text}, at {100 * interval['confidence']:.4g}%"


def check_row_noise(run: FinishedRun) -> Answer:
    names = [key.removeprefix(_ROWS) for key in run.header or () if key.startswith(_ROWS)]
    if names:
        raise NotCovered(
            f"the account of the noise on rows of {', '.join(names)} is not computed again"
        )
    return None
