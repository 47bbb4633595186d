"""Checks of the accounting: what is charged, and what is said of it. All deterministic."""

from __future__ import annotations

import json
import math
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ..._rounding import rounded_up
from ...errors import BudgetExhausted, PrivacyError
from ..accounting.composition import epsilon
from ..accounting.library import TOLERANCE, library_epsilon
from ..channel import GRADIENT, Channel
from ..report import PrivacyReport
from ..settings import RecordPrivacy
from ..sums import RecordGradients
from .findings import Finding, exact, skipped, too_large
from .play import caps_of, local_of, release_nothing, rounds, silence, stated_multiplier, uses_of
from .setup import ACTIVATIONS, CLIENTS, Claims, Setup

_SLACK = 1 + 1e-6
_STEPS = 20  # of a run whose ledger is read back
_EXAMINED = 6  # accounts of one run that are computed again
_KINDS = {"gaussian": "gaussian", "laplace": "laplace", "l2_laplace": "knorm"}


def charges(setup: Setup, claims: Claims, seed: int) -> list[Finding]:
    """Make all checks of the accounting of sums."""
    findings = [_ledger(setup, claims, seed), _events(setup, claims, seed)]
    if setup.one_at_a_time:
        uses = setup.open(seed).caps
        return [*findings, _caps(setup, seed), _budgets(setup, claims, uses), *_stated(setup, claims, uses, None)]
    refused, uses, most, report = _rounds(setup, seed)
    return [*findings, *refused, _budgets(setup, claims, most), *_stated(setup, claims, uses, report)]


# What an event says


def _events(setup: Setup, claims: Claims, seed: int) -> Finding:
    """Check that the charged events agree with the settings, the public facts, and the noise that the channel says it
    adds, in the first uses of every account, the last and one between."""
    channel, wrong, mechanism = setup.open(seed), [], setup.privacy.mechanism
    if claims.delta != setup.delta:
        wrong.append(f"delta is {rounded_up(claims.delta, 6)}, the settings have {rounded_up(setup.delta, 6)}")
    if channel.bound != setup.privacy.initial_norm:
        wrong.append(f"the clip norm is {channel.bound:g}, the settings have {setup.privacy.initial_norm:g}")
    accounts = range(len(setup.sizes)) if setup.gradients is not None else (0,)
    for k in accounts:
        cap, rate = setup.steps, setup.rate(k)
        whose = f"{setup.name(k)}: " if setup.gradients is not None else ""
        if setup.gradients is not None:
            cap = int(channel.caps[k])
            if claims.repeats(k) != int(setup.records.local_steps[k]):
                wrong.append(f"{whose}{setup.records.local_steps[k]} local steps, {claims.repeats(k)} charged")
            if setup.linear and len(setup.x[k]) != setup.sizes[k]:
                wrong.append(f"{whose}{len(setup.x[k])} rows of {setup.sizes[k]} records")
        for use in sorted({0, cap // 2, cap - 1} & set(range(cap))):
            for name in claims.names:
                claim, stated = claims.of(name, k, use), stated_multiplier(setup, channel, name, k, use)
                if claim.kind != _KINDS.get(mechanism, claim.kind):
                    wrong.append(f"{whose}the event is {claim.event}, the mechanism {mechanism}")
                if not math.isclose(stated, claim.multiplier, rel_tol=1e-9):
                    wrong.append(f"{whose}{name} has noise {stated:.6g} in use {use}, the event {claim.multiplier:.6g}")
                if claim.sampled is not None and not math.isclose(claim.sampled, rate, rel_tol=1e-12):
                    wrong.append(f"{whose}the event samples with q = {claim.sampled}, the run with {rate:g}")
            event = claims.of(claims.names[0], k, use).event
            if _coordinates(event) not in ([], [claims.of(name).size for name in claims.names]):
                wrong.append(f"{whose}the event {event} has other numbers of coordinates than the releases")
    if setup.gradients is None and channel.denominator != claims.of(claims.names[0]).denominator:
        wrong.append(f"sums are divided by {channel.denominator:g}, not by the expected cohort")
    told = "; ".join(wrong[:3]) or "law, noise, clip, delta, sampling, numbers of sums"
    return exact("charges: event of a release", len(wrong), told)


def _coordinates(event: Any) -> list[int]:
    """Return the numbers of coordinates that the K-norm noise of an event has."""
    parts = getattr(event, "events", [getattr(event, "event", None)])
    return [event.dimension] if hasattr(event, "dimension") else [d for one in parts if one for d in _coordinates(one)]


# The ledger, by the audit's own reader


def _ledger(setup: Setup, claims: Claims, seed: int) -> Finding:
    """Read the steps of the run back from the file: charged before the release, once, to those that take part."""
    wrong: list[str] = []
    charged: list[list[int]] = []
    with tempfile.TemporaryDirectory(prefix="fedmtl-audit-") as folder:
        path = Path(folder) / "ledger.jsonl"
        channel = setup.open(seed, ledger=path)
        channel.start(0)
        try:
            for first, members, who in _blocks(setup, channel, seed):
                try:
                    channel.begin(first, members)
                except BudgetExhausted:
                    wrong += [f"the run's own activation {first} is refused"] if setup.one_at_a_time else []
                    break
                charged += who
                if _by_step(path)[first:] != who:
                    wrong.append(f"steps from {first} began without a charge on the disk")
                values = release_nothing(setup, channel, first, members)
                if values[[not one for one in who][: len(values)]].any():
                    wrong.append(f"a client without records, or at its cap, released in the block of step {first}")
                if _begins(channel, first, members):
                    wrong.append(f"step {first} began twice")
                    break
                if len(charged) >= (ACTIVATIONS if setup.one_at_a_time else _STEPS):
                    break
        finally:
            channel.close()
        kept = _by_step(path)
    if kept != charged:
        wrong.append(f"{len(charged)} steps began, {len(kept)} stay charged, or to others")
    stated = uses_of(channel)
    uses = np.bincount(np.array([max(k, 0) for who in charged for k in who], dtype=np.int64), minlength=len(stated))
    if stated.tolist() != uses.tolist():
        wrong.append("the account has other uses than happened")
    made = len(charged) * len(setup.releases)
    if setup.gradients is not None:
        made = int((uses * setup.records.local_steps).sum())
    if channel.report.releases != made:
        wrong.append(f"{made} releases happened, the report has {channel.report.releases}")
    if claims.refuted is not None and (channel.report.refuted is None or channel.report.epsilon != math.inf):
        wrong.append("the published accounting does not hold, and the report states its figure without the reason")
    found = channel.account.epsilons()[0]
    for k, used in enumerate(uses.tolist() if claims.refuted is None else ()):
        spent = claims.spent(k if setup.gradients is not None else 0, used)
        if not math.isclose(float(found[k]), spent, rel_tol=1e-9, abs_tol=1e-12):
            wrong.append(f"account {k} has epsilon {found[k]}, {used} uses {rounded_up(spent, 6)}")
    detail = f"{len(charged):,} steps charged before they release, uses and epsilons of all accounts"
    return exact("charges: steps in the ledger", len(wrong), "; ".join(wrong[:3]) or detail)


def _blocks(setup: Setup, channel: Channel, seed: int) -> Iterator[tuple[int, Tensor, list[list[int]]]]:
    """Yield the first step, what begins, and the accounts that each step is charged to: -1 is that of all clients."""
    if setup.one_at_a_time:
        left = channel.caps if setup.records.at_cap == "silent" else np.full(len(setup.sizes), setup.steps)
        left = left.copy()
        for first, clients in setup.clocks.blocks(channel, seed):
            charged: list[list[int]] = []
            for k in clients[0].tolist():
                acts = k >= 0 and setup.sizes[k] > 0 and left[k] > 0
                left[k] -= acts
                charged.append([k] if acts else [])
            yield first, clients, charged
        return
    for step in range(setup.steps):
        try:
            ranks = channel.draw(step)
        except BudgetExhausted:
            return
        accounts = ranks if setup.gradients is None else setup.records.order[ranks]
        yield step, ranks, [sorted(accounts.tolist()) if channel.account.by_client else [-1]]


def charged_steps(path: Path) -> dict[int, list[int]]:
    """Return the clients that each step of a ledger file is charged to (-1 is all), by the audit's own reader; a step
    that is charged twice is there with its clients twice."""
    kept: dict[int, list[int]] = {}
    for text in path.read_text(encoding="utf-8").splitlines():
        line = json.loads(text)
        if line["kind"] == "charge":
            steps = range(line["first"], line["end"])
            for step, clients in zip(steps, line.get("cohorts", [[-1]] * len(steps)), strict=True):
                kept[step] = kept.get(step, []) + clients
    return kept


def _by_step(path: Path) -> list[list[int]]:
    kept = charged_steps(path)
    return [sorted(kept.get(step, [-2])) for step in range(max(kept, default=-1) + 1)]


def _begins(channel: Channel, first: int, clients: Tensor) -> bool:
    try:
        channel.begin(first, clients)
    except (PrivacyError, BudgetExhausted):
        return False
    return True


# What must be refused


def _rounds(setup: Setup, seed: int) -> tuple[list[Finding], np.ndarray, np.ndarray, PrivacyReport]:
    """Go on with rounds until they are refused: each once, its releases once, and no client past its cap.

    Returns:
        The findings; the uses of every account after the steps of the run, and of those beyond that are let through;
        and the report after the steps of the run.
    """
    channel, again, steps = setup.open(seed), 0, 0
    planned, report = uses_of(channel).copy(), channel.report
    taken = np.zeros(setup.sampler.n, dtype=np.int64)
    for step, members in rounds(setup, channel, stop=4 * setup.steps + 64):
        if step % 16 == 0 and setup.gradients is None:
            again += sum(_releases_twice(channel, p.name, silence(setup)(p.name, step, members)) for p in channel.plans)
        if step < 3 and setup.gradients is not None and len(members):
            again += _steps_again(setup, channel, members)
        if step % 16 == 0:
            again += _begins_again(channel, step)
        taken[members.numpy()] += 1
        steps += 1
        if steps <= setup.steps:
            planned, report = uses_of(channel).copy(), channel.report
    findings = [exact("charges: a step happens once", again, f"second or unpaid times accepted, in {steps} steps")]
    caps = channel.account.caps
    if caps is not None:
        over = int((taken - caps).max())
        findings.append(
            too_large("charges: cap on uses", over, 0, f"uses of one client above its cap, in {steps} steps")
        )
    return findings, planned, taken if channel.account.by_client else np.array([steps]), report


def _begins_again(channel: Channel, step: int) -> int:
    try:
        return int(_begins(channel, step, channel.draw(step)))
    except BudgetExhausted:
        return 0


def _releases_twice(channel: Channel, name: str, sent: tuple[Any, Any]) -> int:
    try:
        channel.release(name, *sent)
        channel.release(name, *sent)
    except PrivacyError:
        return 0
    return 1


def _steps_again(setup: Setup, channel: Channel, clients: Tensor) -> int:
    """Try releases that must be refused: of a step made already, after the last one, of a client outside the round."""
    local, plan = local_of(channel), setup.records
    empty = [(torch.zeros(0, plan.dimension), torch.zeros(0, dtype=torch.int64))]
    one = clients[:1]
    numbers = local.step_numbers(int(one[0]))
    for index in numbers:
        local.release(one, index, empty)
    others = [k for k in range(len(plan.ids)) if k not in clients.tolist()][:1]
    tries: list[tuple[Tensor, int]] = [(one, 0), (one, numbers[-1] + 1), *((torch.tensor([k]), 0) for k in others)]
    accepted = 0
    for who, index in tries:
        try:
            local.release(who, index, empty)
            accepted += 1
        except PrivacyError:
            continue
    return accepted


def _caps(setup: Setup, seed: int) -> Finding:
    """Check that every client acts up to its cap; one activation more, in the block of the others or after them, is
    refused with nothing charged and no data read; or, where clients at their caps are silent, is free and releases
    nothing."""
    wrong, asked = [], 0
    for k in range(min(CLIENTS, len(setup.sizes))):
        with tempfile.TemporaryDirectory(prefix="fedmtl-audit-") as folder:
            path = Path(folder) / "ledger.jsonl"
            channel = setup.open(seed, ledger=path)
            channel.start(0)
            cap = int(channel.caps[k])
            try:
                if setup.sizes[k] and 0 < cap * setup.records.dimension <= 1 << 22:
                    asked += 1
                    wrong += [f"client {setup.name(k)} {what}" for what in _past(setup, channel, path, k, cap)]
            finally:
                channel.close()
    check = "charges: cap on uses"
    if not asked:
        return skipped(check, "the caps are 0, too many activations to make, or no records")
    detail = f"activations past the cap of {asked:,} clients are refused, or silent and free"
    return exact(check, len(wrong), "; ".join(wrong[:3]) or detail)


def _past(setup: Setup, channel: Channel, path: Path, k: int, cap: int) -> list[str]:
    silent, read, wrong = setup.records.at_cap == "silent", 0, []

    def gradients(client: int, which: np.ndarray, where: np.ndarray) -> Tensor:
        nonlocal read
        read += len(which)
        return torch.ones(len(which), int(setup.sizes[client]), setup.records.dimension, dtype=torch.float64)

    def released(count: int) -> Tensor:
        return torch.cat([channel.release(GRADIENT, RecordGradients(gradients)) for _ in range(count)])

    if _begins(channel, 0, torch.full((1, cap + 1), k)) != silent:
        return [f"may act {cap + 1} times, its cap is {cap}" if not silent else f"may not go on past its cap of {cap}"]
    if not silent:
        if channel.account.uses.any() or charged_steps(path) or channel.epsilon != 0:
            wrong.append("was charged for a block that was refused")
        if not _begins(channel, 0, torch.full((1, cap), k)):
            return [*wrong, f"may not act {cap} times, its cap"]
    value = released(cap + silent)
    if _begins(channel, cap + silent, torch.full((1, 1), k)) != silent:
        wrong.append(f"may act once more after {cap} times, its cap" if not silent else "may not go on past its cap")
    elif silent:
        value = torch.cat([value, released(1)])
    if read != cap or bool(value[cap:].any()):
        wrong.append(f"released something past its cap of {cap}")
    made = [clients for clients in charged_steps(path).values() if clients]
    if made != [[k]] * cap or int(channel.account.uses[0, k]) != cap:
        wrong.append(f"was charged {len(made)} times, its cap is {cap}")
    return wrong


# Figures


def _budgets(setup: Setup, claims: Claims, uses: np.ndarray) -> Finding:
    """Check that all that an account may be charged for stays within its budget."""
    check, privacy = "charges: budget", setup.privacy
    budgets = privacy.budgets(setup.records.ids) if isinstance(privacy, RecordPrivacy) else (privacy.epsilon,)
    most = uses if setup.gradients is not None else uses.max(keepdims=True)
    spent = [
        (claims.spent(k, int(most[k])) / budget, k)
        for k, budget in enumerate(budgets)
        if isinstance(budget, (int, float)) and most[k]
    ]
    if not spent:
        return skipped(check, "no budget is set")
    ratio, worst = max(spent)
    return too_large(check, ratio, _SLACK, f"largest epsilon over budget, of account {worst} after {most[worst]} uses")


def _stated(setup: Setup, claims: Claims, uses: np.ndarray, report: PrivacyReport | None) -> list[Finding]:
    """Check what a run says after all its steps, ``uses`` (m,) of its accounts: its delta, and that no epsilon is below
    what dp-accounting makes of the same charges."""
    delta, findings = setup.delta, []
    stated = claims.delta if report is None else report.delta
    detail = f"delta is stated as {stated}, the settings have {rounded_up(delta, 6)}"
    findings.append(exact("charges: delta", int(stated != delta), detail))
    figures = [(claims.spent(k, int(uses[k])), k) for k in range(len(uses) if setup.gradients is not None else 0)]
    if setup.gradients is None:
        assert report is not None
        figure = report.epsilon if report.refuted is None else report.claimed
        uses, figures = uses.max(keepdims=True), [(figure or 0.0, 0)]
    elif report is not None:
        detail = "largest epsilon of a client, against the report's"
        findings.append(too_large("charges: report", max(figures)[0], report.epsilon * _SLACK, detail))
    ordered = sorted((figure / max(1, uses[k]), figure, k) for figure, k in figures if math.isfinite(figure))
    some = {int(place) for place in np.linspace(0, len(ordered) - 1, _EXAMINED).round()} if ordered else ()
    check, worst, text, lacking = "charges: epsilon by dp-accounting", -1.0, "", "no finite epsilon is stated"
    for _, figure, k in (ordered[place] for place in some):
        library = library_epsilon(claims.composition(k, int(uses[k])), delta, figure)
        if library is None:
            lacking = "dp-accounting lacks a law of the run"
            continue
        ratio = library / figure if figure > 0 else (math.inf if library else 0.0)
        if not ratio <= worst:
            worst, text = ratio, f"epsilon {rounded_up(figure, 5)} of {uses[k]} uses, by dp-accounting {library:.5g}"
    return [*findings, too_large(check, worst, 1 + TOLERANCE, text) if text else skipped(check, lacking)]


def planned_epsilon(setup: Setup, seed: int) -> float:
    """Return epsilon of all planned steps, or of every client up to its cap."""
    channel = setup.open(seed)
    claims, caps = Claims(setup, channel), caps_of(channel)
    if claims.refuted is not None:
        return math.inf
    if caps is None:
        caps = np.array([sum(1 for _ in rounds(setup, channel))])
    accounts = range(len(caps)) if setup.gradients is not None else [int(caps.argmax())]
    return max(claims.spent(k if setup.gradients is not None else 0, int(caps[k])) for k in accounts)


# Noise that clients add to their own rows


def row_charges(setup: Setup, claims: Claims, seed: int) -> list[Finding]:
    """Check that the event agrees with the noise, and its composition over all uses stays within the budget."""
    findings, channel = [], setup.open(seed)
    steps = sum(1 for _ in rounds(setup, channel))
    for name in claims.names:
        claim, wrong = claims.of(name), []
        asked, noise = setup.release(name.removeprefix("rows of ")).rows, channel.rows[name.removeprefix("rows of ")]
        assert asked is not None
        delta = setup.delta if asked.delta is None else asked.delta
        if claim.kind != "knorm" or claim.event.dimension != claim.size:
            wrong.append(f"the event is {claim.event}, rows have {claim.size} coordinates")
        if abs(noise.multiplier / claim.multiplier - 1) > 1e-9:
            wrong.append(f"noise {noise.multiplier:.6g}, event {claim.multiplier:.6g}")
        spent, stated = epsilon(claim.event, steps, delta), noise.epsilon_at(steps)
        if not math.isclose(stated, spent, rel_tol=1e-9):
            wrong.append(f"epsilon is {rounded_up(stated, 6)}, {steps} uses cost {rounded_up(spent, 6)}")
        if not spent <= asked.epsilon * (1 + 1e-6):
            wrong.append(f"{steps} uses cost epsilon {rounded_up(spent, 6)} of {rounded_up(asked.epsilon, 6)}")
        findings.append(exact(f"charges: {name}", len(wrong), "; ".join(wrong) or "law, noise, delta, budget"))
    return findings
