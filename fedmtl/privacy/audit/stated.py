"""What a run states: its epsilon after all its steps, against a second accountant; and after it stopped early."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from ..._rounding import rounded_up
from ..channel import Channel
from .accountant import Composition, least_epsilon
from .findings import Finding, exact, skipped, too_large
from .play import rounds
from .setup import Claims, Setup

_SLACK = 1 + 1e-5
_EXAMINED = 6  # accounts of one run that are computed again
CHECK = "charges: second accountant"


@dataclass(frozen=True)
class Stated:
    """Says an epsilon as a run does: what it was charged for, and whose it is, in a phrase."""

    epsilon: float
    composition: Composition
    whose: str


def second_accountant(stated: Sequence[Stated], delta: float, check: str = CHECK) -> Finding:
    """Check that every stated epsilon, at the settings' ``delta``, is at least what the second accountant computes of
    the same charges."""
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
    """Return what the second accountant computes."""
    if one.epsilon <= 0:
        return math.inf if any(count for _, count in one.composition) else 0.0
    return least_epsilon(one.composition, delta, one.epsilon)


def _spread(stated: Sequence[Stated]) -> list[Stated]:
    """Return some accounts: of the least and the largest epsilon per use, and between."""
    ordered = sorted(stated, key=lambda one: one.epsilon / max(1, sum(count for _, count in one.composition)))
    if len(ordered) <= _EXAMINED:
        return ordered
    return [ordered[place] for place in np.linspace(0, len(ordered) - 1, _EXAMINED).round().astype(int)]


@dataclass(frozen=True)
class Played:
    """Holds an open channel after all the ``steps`` that its budget allows, and the participations (n,) of accounts."""

    channel: Channel
    uses: np.ndarray
    steps: int


def played(setup: Setup, seed: int) -> Played:
    """Make all planned steps of a channel, in which nothing is released."""
    channel = setup.open(seed)
    uses, steps = np.zeros(setup.sampler.n, dtype=np.int64), 0
    for _, members in rounds(setup, channel):
        uses[members.numpy()] += 1
        steps += 1
    return Played(channel, uses, steps)


def stated_figures(setup: Setup, claims: Claims, seed: int) -> list[Finding]:
    """Check a run after all its steps, every account; the delta that is printed is that of the settings."""
    check, delta = [], setup.delta
    if setup.one_at_a_time:
        uses = setup.open(seed).caps
    else:
        done = played(setup, seed)
        report, uses = done.channel.report, done.uses
        check = [_delta(report.delta, delta)]
    if setup.gradients is None:
        count = int(uses.max(initial=0)) if done.channel.account.by_client else done.steps
        figure = report.epsilon if report.refuted is None else report.claimed
        whole = Stated(figure or 0.0, claims.composition(0, count), f"of {count} uses")
        return [*check, second_accountant([whole], delta)]
    figures = claims.cost.epsilons(uses[None], first=True)[0]
    stated = []
    for k, name in enumerate(setup.records.ids):
        count = int(uses[k])
        whose = f"of {name!r} after {count} uses"
        stated.append(Stated(float(figures[k]), claims.composition(k, count), whose))
    second = second_accountant(stated, delta)
    if setup.one_at_a_time:
        return [_delta(claims.cost.delta, delta), second]
    return [*check, second, _report(report.epsilon, max(one.epsilon for one in stated))]


def _delta(stated: float | None, delta: float) -> Finding:
    return exact(
        "charges: delta", int(stated != delta), f"delta is stated as {stated}, the settings have {rounded_up(delta, 6)}"
    )


def _report(stated: float, largest: float) -> Finding:
    return too_large("charges: report", largest, stated * _SLACK, "largest epsilon of a client, against the report's")


def early_stop(stated: float, stopped: str, setup: Setup, seed: int) -> Finding:
    """Check that a run that ended early, because of what it showed, states the epsilon of everything planned, no less
    and no more."""
    check = "charges: early stop"
    if stopped != "early":
        return skipped(check, f"the run did not stop early: {stopped}")
    planned = planned_epsilon(setup, seed)
    wrong = 0 if math.isclose(stated, planned, rel_tol=1e-9) else 1
    told = f"epsilon {rounded_up(stated, 6)} after an early stop, {rounded_up(planned, 6)} of all that is planned"
    return exact(check, wrong, told)


def planned_epsilon(setup: Setup, seed: int) -> float:
    """Return epsilon of all planned steps, or of every client up to its cap."""
    if setup.one_at_a_time:
        channel = setup.open(seed)
        cost = channel.account.cost
        assert cost is not None
        return math.inf if cost.refuted is not None else float(cost.epsilons(channel.caps[None], first=True).max())
    done = played(setup, seed)
    account = done.channel.account
    capped = account.by_client and account.caps is not None
    return account.epsilon_at(account.caps if capped and account.caps is not None else done.steps)
