"""What a run states: its epsilon after all its steps, against a second accountant; and after it stopped early."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from ..._rounding import rounded_up
from ...errors import BudgetExhausted
from ..accounting.composition import StepEvent
from ..channel import Channel
from .accountant import Composition, least_epsilon, library_epsilon
from .findings import Finding, exact, skipped, too_large
from .owner_setup import OwnerClaims, OwnerSetup
from .setup import Setup, step_event_of, uses_differ

_SLACK = 1 + 1e-5
_EXAMINED = 6  # accounts of one run that are computed again
CHECK = "charges: second accountant"


@dataclass(frozen=True)
class Stated:
    """One epsilon that a run states.

    Attributes:
        epsilon: as stated.
        composition: what it was charged for.
        accountant: that the run says it is by.
        whose: a phrase.
    """

    epsilon: float
    composition: Composition
    accountant: str
    whose: str


def second_accountant(stated: Sequence[Stated], delta: float, check: str = CHECK) -> Finding:
    """Every stated epsilon is at least what the second accountant computes of the same charges.

    Args:
        stated: what is stated.
        delta: of the settings, and of every epsilon.
        check: name of the finding.
    """
    worst, text = 0.0, ""
    uncovered: list[str] = []
    for one in _spread([one for one in stated if math.isfinite(one.epsilon)]):
        least = _least(one, delta)
        if least is None:
            uncovered.append(one.whose)
            continue
        ratio = least / one.epsilon if one.epsilon > 0 else (math.inf if least else 0.0)
        if not ratio <= worst or not text:
            at = f"at delta = {rounded_up(delta, 6)}"
            worst, text = ratio, f"epsilon {rounded_up(one.epsilon, 5)} {one.whose}; at least {least:.5g} {at}"
    if not text:
        reason = f"no law of {uncovered[0]} is covered" if uncovered else "no finite epsilon is stated"
        return skipped(check, reason)
    return too_large(check, worst, _SLACK, text)


def _least(one: Stated, delta: float) -> float | None:
    """What the second accountant computes; of Renyi DP also the library's own figure, which the claim is by."""
    if one.epsilon <= 0:
        return math.inf if any(count for _, count in one.composition) else 0.0
    least = least_epsilon(one.composition, delta, one.epsilon)
    library = library_epsilon(one.composition, delta) if one.accountant == "rdp" and delta > 0 else None
    known = [value for value in (least, library) if value is not None]
    return max(known) if known else None


def _spread(stated: Sequence[Stated]) -> list[Stated]:
    """Some accounts: of the least and the largest epsilon per use, and between."""
    ordered = sorted(stated, key=lambda one: one.epsilon / max(1, sum(count for _, count in one.composition)))
    if len(ordered) <= _EXAMINED:
        return ordered
    return [ordered[place] for place in np.linspace(0, len(ordered) - 1, _EXAMINED).round().astype(int)]


@dataclass(frozen=True)
class Played:
    """A channel after all the steps that its budget allows.

    Attributes:
        channel: still open.
        uses: participations by rank, int64 (n,).
        steps: number of steps.
    """

    channel: Channel
    uses: np.ndarray
    steps: int


def played(setup: Setup, seed: int) -> Played:
    """All planned steps of a channel, in which nothing is released."""
    channel = setup.open(seed)
    uses, step = np.zeros(setup.sampler.n, dtype=np.int64), 0
    while step < setup.steps:
        try:
            ranks = channel.draw(step)
            channel.begin(step, ranks)
        except BudgetExhausted:
            break
        uses[ranks.numpy()] += 1
        step += 1
    return Played(channel, uses, step)


def stated_channel(setup: Setup, seed: int) -> list[Finding]:
    """Of a run in rounds, of clients or of the records of each; the delta that is printed is that of the settings."""
    done = played(setup, seed)
    channel, delta = done.channel, setup.delta
    cost, report = channel.account.cost, channel.report
    assert cost is not None
    findings = [_delta(report.delta, delta)]
    if setup.records:
        assert setup.owners is not None
        each = cost.epsilons(done.uses)
        stated = []
        for k, name in enumerate(setup.owners.ids):
            rank = int(setup.owners.ranks[k])
            charged, count = cost.step(rank), int(done.uses[rank] * setup.owners.steps[k])
            stated.append(Stated(float(each[rank]), [(charged.event, count)], charged.accountant, f"of {name!r}"))
        largest = max(stated, key=lambda one: one.epsilon)
        return [*findings, second_accountant(stated, delta), _report(report.epsilon, largest.epsilon)]
    uses = int(done.uses.max(initial=0)) if channel.account.per_participation else done.steps
    charged = step_event_of(channel)
    composition: Composition = [(charged.event, uses)]
    if uses_differ(setup):
        composition = [(step_event_of(channel, use).event, 1) for use in range(uses)]
    whose = f"of {uses} uses"
    figure = report.epsilon if report.refuted is None else report.claimed
    return [*findings, second_accountant([Stated(figure or 0.0, composition, charged.accountant, whose)], delta)]


def stated_owners(setup: OwnerSetup, claims: OwnerClaims, seed: int) -> list[Finding]:
    """Of owners who act one at a time, each after all its answers."""
    channel = setup.open(seed)
    terms = channel.account.terms
    assert terms is not None
    figures = terms.epsilons(channel.caps[None], first=True)[0]
    stated = []
    for k, name in enumerate(setup.ids):
        events, cap = terms.events(k), int(channel.caps[k])
        if isinstance(events, StepEvent):
            composition, accountant = [(events.event, cap)], events.accountant
        else:
            charged = events[: cap + int(claims.first(k) is not None)]
            composition = [(one.event, 1) for one in charged]
            accountant = setup.privacy.accountant
        stated.append(Stated(float(figures[k]), composition, accountant, f"of {name!r} after {cap} answers"))
    return [_delta(terms.delta, setup.delta), second_accountant(stated, setup.delta)]


def _delta(stated: float | None, delta: float) -> Finding:
    return exact(
        "charges: delta", int(stated != delta), f"delta is stated as {stated}, the settings have {rounded_up(delta, 6)}"
    )


def _report(stated: float, largest: float) -> Finding:
    return too_large("charges: report", largest, stated * _SLACK, "largest epsilon of a client, against the report's")


def early_stop(stated: float, stopped: str, setup: Setup | OwnerSetup, seed: int) -> Finding:
    """A run that stopped because of what it showed states the epsilon of everything planned, no less and no more.

    Args:
        stated: epsilon of the stopped run.
        stopped: why it ended.
        setup: of the run.
        seed: of the channels opened here.
    """
    check = "charges: early stop"
    if stopped != "early":
        return skipped(check, f"the run did not stop early: {stopped}")
    planned = planned_epsilon(setup, seed)
    wrong = 0 if math.isclose(stated, planned, rel_tol=1e-9) else 1
    told = f"epsilon {rounded_up(stated, 6)} after an early stop, {rounded_up(planned, 6)} of all that is planned"
    return exact(check, wrong, told)


def planned_epsilon(setup: Setup | OwnerSetup, seed: int) -> float:
    """Epsilon of all planned steps, or of every owner up to its cap."""
    if isinstance(setup, OwnerSetup):
        channel = setup.open(seed)
        terms = channel.account.terms
        assert terms is not None
        return (
            math.inf if channel.published is not None else float(terms.epsilons(channel.caps[None], first=True).max())
        )
    done = played(setup, seed)
    account = done.channel.account
    if account.per_participation and account.caps is not None:
        return account.epsilon_at(account.caps)
    return account.epsilon_at(done.steps)
