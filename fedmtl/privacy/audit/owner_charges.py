"""What owners who act one at a time are charged: events, caps, the ledger on the disk. All deterministic."""

from __future__ import annotations

import itertools
import json
import math
import tempfile
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from ..._rounding import rounded_up
from ...errors import BudgetExhausted, PrivacyError
from ..owner_channel import OwnerChannel
from .findings import Finding, exact, skipped, too_large
from .owner_noise import no_gradients, no_rows
from .owner_setup import ACTIVATIONS, OWNERS, OwnerClaims, OwnerSetup, turns
from .setup import Claim

_SLACK = 1 + 1e-6
_KINDS = {"gaussian": "gaussian", "laplace": "laplace", "l2_laplace": "knorm"}


def owner_charges(setup: OwnerSetup, claims: OwnerClaims, seed: int) -> list[Finding]:
    """All checks of the accounting."""
    channel = setup.open(seed)
    return [
        _events(setup, claims, channel),
        _ledger(setup, claims, seed),
        _caps(setup, seed),
        _budgets(setup, claims, channel),
        _monotone(setup, claims, channel),
        _published(channel),
    ]


def _events(setup: OwnerSetup, claims: OwnerClaims, channel: OwnerChannel) -> Finding:
    """The events agree with the settings and with the noise that the channel says it adds."""
    terms, wrong = channel.account.terms, []
    assert terms is not None
    assert channel.noise_multipliers is not None
    if terms.delta != setup.delta:
        wrong.append(f"delta is {rounded_up(terms.delta, 6)}, the settings have {rounded_up(setup.delta, 6)}")
    if channel.bound != setup.privacy.initial_norm:
        wrong.append(f"records are clipped to {channel.bound:g}, the settings have {setup.privacy.initial_norm:g}")
    for k in range(len(claims)):
        name, cap = repr(setup.ids[k]), int(channel.caps[k])
        z = float(channel.noise_multipliers[k])
        for use in sorted({0, cap // 2, cap - 1} & set(range(max(1, cap)))):
            claim = claims.answer(k, use)
            wrong += _event(setup, claim, setup.privacy.mechanism, f"answer {use} of {name}")
            weight = setup.weight(k, use) if cap else 1.0
            if not math.isclose(z, claim.multiplier * weight, rel_tol=1e-9):
                wrong.append(f"{name}: noise {z:.6g}, event of answer {use} {claim.multiplier:.6g}, weight {weight:g}")
            if not math.isclose(claim.sampled or 1.0, setup.rate(k), rel_tol=1e-12):
                wrong.append(f"{name}: the event samples with q = {claim.sampled}, the run with {setup.rate(k):g}")
        first = claims.first(k)
        if (first is not None) != (setup.first is not None and setup.counts[k] > 0):
            wrong.append(f"{name}: a first release without an event, or the other way round")
        if first is not None and setup.first is not None:
            law = "gaussian" if setup.privacy.mechanism == "gaussian" else "l2_laplace"
            wrong += _event(setup, first, law, f"first release of {name}")
            share = setup.first.share / (1 - setup.first.share) * cap if cap else 1.0
            if not math.isclose(z, first.multiplier * share, rel_tol=1e-9):
                wrong.append(f"{name}: noise {z:.6g}, event of its first release {first.multiplier:.6g}")
        if setup.linear and len(setup.x[k]) != setup.counts[k]:
            wrong.append(f"{name}: {len(setup.x[k])} rows of {setup.counts[k]} records")
    return exact("charges: event of an answer", len(wrong), "; ".join(wrong[:3]) or "law, noise, clip, delta, records")


def _event(setup: OwnerSetup, claim: Claim, mechanism: str, name: str) -> list[str]:
    wrong = []
    inner = getattr(claim.event, "event", claim.event)
    if claim.kind != _KINDS[mechanism]:
        wrong.append(f"{name}: the event is {claim.event}, the mechanism {mechanism}")
    if claim.kind == "knorm" and inner.dimension != setup.dimension:
        wrong.append(f"{name}: the event has {inner.dimension} coordinates of {setup.dimension}")
    if claim.accountant != setup.privacy.accountant:
        wrong.append(f"{name}: composed by {claim.accountant}, the settings have {setup.privacy.accountant}")
    return wrong


def _ledger(setup: OwnerSetup, claims: OwnerClaims, seed: int) -> Finding:
    """The run's own blocks, read back from the file: charged before the release, once, to the owner that acts."""
    wrong: list[str] = []
    acted: list[int] = []
    with tempfile.TemporaryDirectory(prefix="fedmtl-audit-") as folder:
        path = Path(folder) / "ledger.jsonl"
        channel, blocks = setup.open_run(seed, ledger=path)
        channel.start(0)
        try:
            for first, owners in blocks(0):
                who = _with_records(setup, first, owners)
                try:
                    channel.begin(first, owners)
                except BudgetExhausted:
                    wrong.append(f"the run's own activation {first} is refused")
                    break
                acted += who.tolist()
                if charged_owners(path)[first : first + len(who)] != _by_step(
                    who.tolist()
                ):  # more may be charged ahead
                    wrong.append(f"activations from {first} began without a charge on the disk")
                if first == 0 and setup.first is not None:
                    wrong += _first_release(setup, claims, channel, path)
                value = _released(channel, setup, owners.shape[1])
                if bool(value[who < 0].any()):
                    wrong.append(f"an owner without records answered in the block of activation {first}")
                if _begins(channel, first, owners):
                    wrong.append(f"activation {first} began twice")
                    break
                if len(acted) >= ACTIVATIONS:
                    break
        finally:
            channel.close()
        kept = charged_owners(path)
    if kept != _by_step(acted):
        wrong.append(f"{len(acted)} activations began, {len(kept)} stay charged, or to other owners")
    uses = np.bincount([k for k in acted if k >= 0], minlength=len(setup.ids))
    if channel.account.uses.tolist() != [uses.tolist()]:
        wrong.append("the account has other uses than happened")
    firsts = 0 if setup.first is None else sum(n > 0 for n in setup.counts)
    if channel.report.releases != uses.sum() + firsts:
        wrong.append(f"{uses.sum() + firsts} releases happened, the report has {channel.report.releases}")
    found = channel.account.epsilons()
    for k, used in enumerate(uses.tolist()):
        spent = claims.spent(k, used)
        if found is None or not math.isclose(float(found[k]), spent, rel_tol=1e-9, abs_tol=1e-12):
            figure = found if found is None else found[k]
            wrong.append(f"{setup.ids[k]!r} has epsilon {figure}, {used} uses {rounded_up(spent, 6)}")
    detail = f"{len(acted)} activations charged before they are released, epsilons of all owners"
    return exact("charges: activations in the ledger", len(wrong), "; ".join(wrong[:3]) or detail)


def _with_records(setup: OwnerSetup, first: int, owners: Tensor) -> np.ndarray:
    """The owners (S,) of a block, -1 for nobody and for those without records."""
    who = owners[0].numpy()
    present = setup.present(np.maximum(who, 0), first + np.arange(len(who)))
    return np.where((who >= 0) & (present > 0), who, -1)


def _released(channel: OwnerChannel, setup: OwnerSetup, count: int) -> Tensor:
    if setup.linear:
        return channel.release_run(count, no_gradients(setup))
    return torch.stack([channel.release_rows(no_rows(setup)) for _ in range(count)])


def _first_release(setup: OwnerSetup, claims: OwnerClaims, channel: OwnerChannel, path: Path) -> list[str]:
    """It is on the disk before a vector is asked for, and happens once."""
    wrong: list[str] = []

    def vector(owner: int) -> Tensor:
        if _kinds(path).count("first") != 1:
            wrong.append(f"the first release of {setup.ids[owner]!r} was made without a charge on the disk")
        return torch.zeros(setup.dimension, dtype=torch.float64)

    channel.release_first(vector)
    try:
        channel.release_first(vector)
        wrong.append("the first release was made twice")
    except (PrivacyError, BudgetExhausted):
        pass
    if _kinds(path).count("first") != 1:
        wrong.append("the first release is not in the ledger once")
    return wrong


def _kinds(path: Path) -> list[str]:
    return [json.loads(text)["kind"] for text in path.read_text(encoding="utf-8").splitlines()]


def _by_step(owners: Sequence[int]) -> list[list[int]]:
    return [[owner] if owner >= 0 else [] for owner in owners]


def charged_owners(path: Path) -> list[list[int]]:
    """The owners that each activation of a ledger file is charged to, by the audit's own reader."""
    kept: dict[int, list[int]] = {}
    for text in path.read_text(encoding="utf-8").splitlines():
        line = json.loads(text)
        if line["kind"] == "reserve":
            for step, owners in zip(range(line["first"], line["end"]), line["cohorts"], strict=True):
                kept[step] = kept.get(step, []) + owners
        elif line["kind"] == "close":
            for step in line["unused"]:
                del kept[step]
    return [kept.get(step, [-1]) for step in range(max(kept, default=-1) + 1)]


def _begins(channel: OwnerChannel, first: int, owners: Tensor) -> bool:
    try:
        channel.begin(first, owners)
    except (PrivacyError, BudgetExhausted):
        return False
    return True


def _caps(setup: OwnerSetup, seed: int) -> Finding:
    """Every owner answers up to its cap; one answer more is refused, with nothing charged and no data read."""
    wrong, asked = [], []
    with tempfile.TemporaryDirectory(prefix="fedmtl-audit-") as folder:
        for k in range(min(OWNERS, len(setup.ids))):
            path = Path(folder) / f"{k}.jsonl"
            channel = setup.open(seed, ledger=path)
            channel.start(0)
            cap = int(channel.caps[k])
            there = int(setup.present(np.array([k]), np.zeros(1, dtype=np.int64))[0])
            if not there or not 0 < cap * setup.dimension <= 1 << 22:
                channel.close()
                continue
            asked.append(k)
            try:
                wrong += _past(setup, channel, path, k, cap)
            finally:
                channel.close()
    if not asked:
        return skipped("charges: cap of an owner", "the caps are 0, too many answers to make, or no records at first")
    detail = f"answers past the cap of {len(asked)} owners are refused"
    return exact("charges: cap of an owner", len(wrong), "; ".join(wrong[:3]) or detail)


def _past(setup: OwnerSetup, channel: OwnerChannel, path: Path, k: int, cap: int) -> list[str]:
    """Two ways to one answer more: in one block with the others, and after them."""
    name = f"owner {setup.ids[k]!r}"
    if _begins(channel, 0, torch.full((1, cap + 1), k)):
        return [f"{name} may answer {cap + 1} times, its cap is {cap}"]
    wrong = []
    if channel.account.uses.any() or charged_owners(path) or channel.epsilon != 0:
        wrong.append(f"a refused block of {name} was charged")
    if not _begins(channel, 0, torch.full((1, cap), k)):
        return [*wrong, f"{name} may not answer {cap} times, its cap"]
    _released(channel, setup, cap)
    before = path.read_bytes()
    if _begins(channel, cap, torch.full((1, 1), k)):
        wrong.append(f"{name} may answer once more after {cap} times, its cap")
    elif path.read_bytes() != before or int(channel.account.uses[0, k]) != cap:
        wrong.append(f"an answer of {name} that was refused was charged")
    return wrong


def _budgets(setup: OwnerSetup, claims: OwnerClaims, channel: OwnerChannel) -> Finding:
    """The event composed as often as the cap allows stays within the owner's budget."""
    check, spent = "charges: budget of every owner", []
    for k, budget in enumerate(setup.privacy.budgets(setup.ids)):
        if budget is not None and (channel.caps[k] or claims.first(k) is not None):
            spent.append((claims.spent(k, int(channel.caps[k])) / budget, k))
    if not spent:
        return skipped(check, "no budget is set")
    ratio, worst = max(spent)
    text = f"largest epsilon over budget, of {setup.ids[worst]!r} after {channel.caps[worst]} answers"
    return too_large(check, ratio, _SLACK, text)


def _monotone(setup: OwnerSetup, claims: OwnerClaims, channel: OwnerChannel) -> Finding:
    """Epsilon grows with the answers."""
    falls = 0
    largest: dict[float, tuple[int, int]] = {}
    for k, cap in enumerate(channel.caps.tolist()):
        kind = claims.answer(k).multiplier if cap else 0.0
        largest[kind] = max((cap, k), largest.get(kind, (0, k)))
    for cap, k in list(largest.values())[:3]:
        at = sorted({cap, *(1 << i for i in range(cap.bit_length()))} - {0})
        figures = [claims.spent(k, uses) for uses in at]
        falls += sum(b < a * (1 - 1e-12) for a, b in itertools.pairwise(figures)) + sum(f <= 0 for f in figures)
    return exact("charges: monotone in the answers", falls, f"{min(3, len(largest))} kinds of owners")


def _published(channel: OwnerChannel) -> Finding:
    """A published accounting that is refuted is never stated as the run's epsilon."""
    check, report = "charges: published accounting", channel.report
    if report.guarantee != "paper":
        return skipped(check, "none is used: the guarantee is sound")
    channel.start(0)
    channel.begin(0, torch.from_numpy(turns(channel.caps, 1))[None])
    report = channel.report
    wrong = int(not report.refuted) + int(bool(report.releases) and report.epsilon != math.inf)
    return exact(check, wrong, "it does not hold, and the report states its figure without the reason")
