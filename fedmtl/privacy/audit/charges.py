"""Checks of the accounting: what is charged, and that the figures move the right way. All deterministic."""

from __future__ import annotations

import itertools
import json
import math
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from dp_accounting import dp_event
from torch import Tensor

from ..._rounding import rounded_up
from ...errors import BudgetExhausted, PrivacyError
from ..accounting.composition import epsilon
from ..channel import FIRST, GRADIENT, Channel
from ..settings import RecordPrivacy
from ..sums import ClientVectors, RecordGradients
from .findings import Finding, exact, skipped, too_large
from .play import local_of, rounds, silence, turns, zero_factors, zero_gradients
from .setup import ACTIVATIONS, CLIENTS, Claim, Claims, Setup, whole_width

_SLACK = 1 + 1e-6
_KINDS = {"gaussian": "gaussian", "laplace": "laplace", "l2_laplace": "knorm"}


def charges(setup: Setup, claims: Claims, seed: int) -> list[Finding]:
    """Make all checks of the accounting."""
    events = _events_of_rows if setup.gradients is None else _events_of_gradients
    findings = [_ledger(setup, claims, seed), events(setup, claims, seed)]
    if setup.one_at_a_time:
        findings.append(_cap_of_activations(setup, seed))
        uses = setup.open(seed).caps
    else:
        refused, uses = _rounds(setup, seed)
        findings += refused
    findings += [_budgets(setup, claims, uses), _monotone_in_uses(setup, claims, uses)]
    if setup.gradients is None:
        return [*findings, *_monotone(setup, claims)]
    return [*findings, _published(setup, seed)]


# What an event says


def _events_of_rows(setup: Setup, claims: Claims, seed: int) -> Finding:
    """Check that the typed releases and the charged event agree on noise, sensitivity, sampling and denominator."""
    channel, wrong = setup.open(seed), []
    for name in claims.names:
        release, plan, claim = channel.releases[name], setup.release(name), claims.of(name)
        for use in range(plan.uses if setup.uses_differ else 1):
            noise, claimed = release.weighted(plan.weight(use)).noise, claims.of(name, use=use).multiplier
            if noise is None or not math.isclose(noise.multiplier, claimed, rel_tol=1e-9):
                wrong.append(f"{name} has noise {noise} in use {use}, the event a multiplier of {claimed:.6g}")
        if not math.isclose(release.sensitivity, claim.sensitivity, rel_tol=1e-12):
            wrong.append(
                f"{name} has sensitivity {release.sensitivity:.6g}, {claim.relation} means {claim.sensitivity:.6g}"
            )
        needed = claim.norm if claim.form == "vector" else "l2"
        if release.clip.norm != needed:
            wrong.append(f"{name} bounds the {release.clip.norm} norm, {claim.kind} noise needs {needed}")
        if release.denominator != claim.denominator or channel.denominator != claim.denominator:
            wrong.append(f"{name} divides by {release.denominator:g}, the expected cohort is {claim.denominator:g}")
    claim = claims.of(claims.names[0])
    wrong += _distance(setup, claims)
    q = claim.denominator / setup.sampler.n
    if claim.sampled is not None and not math.isclose(claim.sampled, q, rel_tol=1e-12):
        wrong.append(f"the event samples with q = {claim.sampled:.6g}, the cohort is {q:.6g} of the clients")
    told = "; ".join(wrong) or "noise, sensitivity, sampling, denominator"
    return exact("charges: event of a release", len(wrong), told)


def _distance(setup: Setup, claims: Claims) -> list[str]:
    """Return what is wrong with the divergence from Gaussian noise that is charged for noise in whole numbers: it is at
    most D / (300 s^4), with s the deviation in cells."""
    whole, wrong = setup.privacy.mechanism == "discrete_gaussian", []
    uses = setup.release(claims.names[0]).uses if setup.uses_differ else 1
    for use in range(uses):
        needed = 0.0
        for name in claims.names:
            claim = claims.of(name, use=use)
            spacing = whole_width(claim, setup.sampler.n) / (claim.multiplier * claim.sensitivity)
            needed += claim.size / 300 * spacing**4
        apart = claims.of(claims.names[0], use=use).apart
        if whole and (apart is None or apart < needed * (1 - 1e-6)):
            wrong.append(f"noise in whole numbers diverges by {needed:.3g} from Gaussian noise, charged are {apart}")
    return wrong


def _events_of_gradients(setup: Setup, claims: Claims, seed: int) -> Finding:
    """Check that events agree with the settings, the public facts, and the noise that the channel says it adds."""
    channel, plan, wrong = setup.open(seed), setup.records, []
    assert channel.noise_multipliers is not None
    if claims.cost.delta != setup.delta:
        wrong.append(f"delta is {rounded_up(claims.cost.delta, 6)}, the settings have {rounded_up(setup.delta, 6)}")
    if channel.bound != setup.privacy.initial_norm:
        wrong.append(f"records are clipped to {channel.bound:g}, the settings have {setup.privacy.initial_norm:g}")
    for k, name in enumerate(map(repr, plan.ids)):
        cap, z = int(channel.caps[k]), float(channel.noise_multipliers[k])
        for use in sorted({0, cap // 2, cap - 1} & set(range(cap))):
            claim = claims.of(GRADIENT, k, use)
            wrong += _law(setup, claim, setup.privacy.mechanism, f"use {use} of {name}")
            weight = setup.weight(k, use)
            if not math.isclose(z, claim.multiplier * weight, rel_tol=1e-9):
                wrong.append(f"{name}: noise {z:.6g}, event of use {use} {claim.multiplier:.6g}, weight {weight:g}")
            if not math.isclose(claim.sampled or 1.0, setup.rate(k), rel_tol=1e-12):
                wrong.append(f"{name}: the event samples with q = {claim.sampled}, the run with {setup.rate(k):g}")
        if claims.repeats(k) != int(plan.local_steps[k]):
            wrong.append(f"{name}: {int(plan.local_steps[k])} local steps, {claims.repeats(k)} charged")
        share = setup.share(k, cap)
        if claims.starts(k) != (share > 0):
            wrong.append(f"{name}: a first release without an event, or the other way round")
        elif share:
            first = claims.of(FIRST, k)
            law = "gaussian" if setup.privacy.mechanism == "gaussian" else "l2_laplace"
            wrong += _law(setup, first, law, f"first release of {name}")
            if not math.isclose(z, first.multiplier * share, rel_tol=1e-9):
                wrong.append(f"{name}: noise {z:.6g}, event of its first release {first.multiplier:.6g}")
        if setup.linear and len(setup.x[k]) != setup.sizes[k]:
            wrong.append(f"{name}: {len(setup.x[k])} rows of {setup.sizes[k]} records")
    told = "; ".join(wrong[:3]) or "law, noise, clip, delta, rate, records, numbers of sums"
    return exact("charges: event of a release", len(wrong), told)


def _law(setup: Setup, claim: Claim, mechanism: str, name: str) -> list[str]:
    wrong = []
    inner = claim.event.event if claim.sampled is not None else claim.event
    if claim.kind != _KINDS[mechanism]:
        wrong.append(f"{name}: the event is {claim.event}, the mechanism {mechanism}")
    if claim.kind == "knorm" and inner.dimension != setup.records.dimension:
        wrong.append(f"{name}: the event has {inner.dimension} coordinates of {setup.records.dimension}")
    return wrong


# The ledger


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
                if first == 0 and setup.first is not None:
                    wrong += _first_release(setup, channel, path)
                wrong += _released_for_nothing(setup, channel, members, first, who)
                if _begins(channel, first, members):
                    wrong.append(f"step {first} began twice")
                    break
                if len(charged) >= (ACTIVATIONS if setup.one_at_a_time else 20):
                    break
        finally:
            channel.close()
        kept = _by_step(path)
    if kept != charged:
        wrong.append(f"{len(charged)} steps began, {len(kept)} stay charged, or to others")
    accounts = channel.account.uses.shape[1]
    taken = np.array([max(k, 0) for who in charged for k in who], dtype=np.int64)
    uses = np.bincount(taken, minlength=accounts)
    if channel.account.uses.tolist() != [uses.tolist()]:
        wrong.append("the account has other uses than happened")
    made = len(charged) * len(setup.releases)
    if setup.gradients is not None:
        made = int((uses * setup.records.local_steps).sum()) + sum(claims.starts(k) for k in range(accounts))
    if channel.report.releases != made:
        wrong.append(f"{made} releases happened, the report has {channel.report.releases}")
    found = channel.account.epsilons()[0]
    for k, used in enumerate(uses.tolist() if claims.cost.refuted is None else ()):
        spent = claims.spent(min(k, claims.cost.kind.shape[1] - 1), used)
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
            who = clients[0].numpy()
            present = setup.present(np.maximum(who, 0), first + np.arange(len(who)))
            charged: list[list[int]] = []
            for k, n in zip(who.tolist(), present.tolist(), strict=True):
                acts = k >= 0 and n > 0 and left[k] > 0
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


def _released_for_nothing(
    setup: Setup, channel: Channel, members: Tensor, first: int, who: list[list[int]]
) -> list[str]:
    """Release a block in which clients contribute nothing; those without records, or at their caps, must not release at
    all."""
    if setup.gradients is None:
        for plan in channel.plans:
            channel.release(plan.name, *silence(setup)(first, plan.name, members))
    if not setup.one_at_a_time:
        return []
    silent = np.array([not one for one in who])
    loud = bool(_released(channel, setup, len(who))[silent].any())
    return [f"a client without records, or at its cap, released in the block of activation {first}"] if loud else []


def charged_steps(path: Path) -> dict[int, list[int]]:
    """Return the clients that each step of a ledger file is charged to (-1 is all), by the audit's own reader; a step
    that is charged twice is there with its clients twice."""
    kept: dict[int, list[int]] = {}
    for line in _lines(path):
        if line["kind"] == "charge":
            steps = range(line["first"], line["end"])
            for step, clients in zip(steps, line.get("cohorts", [[-1]] * len(steps)), strict=True):
                kept[step] = kept.get(step, []) + clients
    return kept


def _lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(text) for text in path.read_text(encoding="utf-8").splitlines()]


def _released(channel: Channel, setup: Setup, count: int) -> Tensor:
    if setup.linear:
        return channel.release(GRADIENT, zero_factors(setup), count=count)
    return torch.cat([channel.release(GRADIENT, zero_gradients(setup)) for _ in range(count)])


def _first_release(setup: Setup, channel: Channel, path: Path) -> list[str]:
    """Check that it is on the disk before a vector is asked for, and happens once."""
    wrong: list[str] = []

    def vector(client: int) -> Tensor:
        if kinds().count("first") != 1:
            wrong.append(f"the first release of {setup.records.ids[client]!r} was made without a charge on the disk")
        return torch.zeros(setup.records.dimension, dtype=torch.float64)

    def kinds() -> list[str]:
        return [line["kind"] for line in _lines(path)]

    channel.release(FIRST, ClientVectors(vector))
    try:
        channel.release(FIRST, ClientVectors(vector))
        wrong.append("the first release was made twice")
    except (PrivacyError, BudgetExhausted):
        pass
    if kinds().count("first") != 1:
        wrong.append("the first release is not in the ledger once")
    return wrong


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


def _rounds(setup: Setup, seed: int) -> tuple[list[Finding], np.ndarray]:
    """Go on with rounds until they are refused: each once, its releases once, and no client past its cap; return the
    uses of every account too."""
    channel, again, steps = setup.open(seed), 0, 0
    taken = np.zeros(setup.sampler.n, dtype=np.int64)
    for step, members in rounds(setup, channel, stop=4 * setup.steps + 64):
        if step % 16 == 0 and setup.gradients is None:
            sent = silence(setup)
            again += sum(_releases_twice(channel, p.name, sent(step, p.name, members)) for p in channel.plans)
        if step < 3 and setup.gradients is not None and len(members):
            again += _steps_again(setup, channel, members)
        if step % 16 == 0:
            again += _begins_again(channel, step)
        taken[members.numpy()] += 1
        steps += 1
    findings = [exact("charges: a step happens once", again, f"second or unpaid times accepted, in {steps} steps")]
    if channel.account.caps is not None:
        over = int((taken - channel.account.caps).max())
        findings.append(
            too_large("charges: cap on uses", over, 0, f"uses of one client above its cap, in {steps} steps")
        )
    return findings, taken if channel.account.by_client else np.array([steps])


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


def _cap_of_activations(setup: Setup, seed: int) -> Finding:
    """Check that every client acts up to its cap; one activation more is refused, with nothing charged and no data
    read; or, where clients at their caps are silent, is free and releases nothing."""
    wrong, asked = [], []
    with tempfile.TemporaryDirectory(prefix="fedmtl-audit-") as folder:
        for k in range(min(CLIENTS, len(setup.sizes))):
            path = Path(folder) / f"{k}.jsonl"
            channel = setup.open(seed, ledger=path)
            channel.start(0)
            cap = int(channel.caps[k])
            there = int(setup.present(np.array([k]), np.zeros(1, dtype=np.int64))[0])
            try:
                if there and 0 < cap * setup.records.dimension <= 1 << 22:
                    asked.append(k)
                    past = _silent_past if setup.records.at_cap == "silent" else _past
                    wrong += past(setup, channel, path, k, cap)
            finally:
                channel.close()
    check = "charges: cap on uses"
    if not asked:
        return skipped(check, "the caps are 0, too many activations to make, or no records at first")
    return exact(
        check,
        len(wrong),
        "; ".join(wrong[:3]) or f"activations past the cap of {len(asked):,} clients are refused, or silent and free",
    )


def _silent_past(setup: Setup, channel: Channel, path: Path, k: int, cap: int) -> list[str]:
    """Make two activations more than the cap, one in the block of the others and one after them: both read no record,
    release zero and are charged to nobody."""
    name, asked = f"client {setup.records.ids[k]!r}", 0

    def gradients(client: int, which: np.ndarray, where: np.ndarray) -> Tensor:
        nonlocal asked
        asked += len(which)
        return torch.ones(len(which), int(setup.sizes[client]), setup.records.dimension, dtype=torch.float64)

    values = []
    for first, count in ((0, cap + 1), (cap + 1, 1)):
        if not _begins(channel, first, torch.full((1, count), k)):
            return [f"{name} may not go on past its cap of {cap}, and is said to be silent there"]
        values += [channel.release(GRADIENT, RecordGradients(gradients)) for _ in range(count)]
    wrong = []
    if asked != cap or bool(torch.cat(values[cap:]).any()):
        wrong.append(f"{name} released something past its cap of {cap}")
    made = [clients for clients in charged_steps(path).values() if clients]
    if made != [[k]] * cap or int(channel.account.uses[0, k]) != cap:
        wrong.append(f"{name} was charged {len(made)} times, its cap is {cap}")
    return wrong


def _past(setup: Setup, channel: Channel, path: Path, k: int, cap: int) -> list[str]:
    """Try two ways to one activation more: in one block with the others, and after them."""
    name = f"client {setup.records.ids[k]!r}"
    if _begins(channel, 0, torch.full((1, cap + 1), k)):
        return [f"{name} may act {cap + 1} times, its cap is {cap}"]
    wrong = []
    if channel.account.uses.any() or charged_steps(path) or channel.epsilon != 0:
        wrong.append(f"a refused block of {name} was charged")
    if not _begins(channel, 0, torch.full((1, cap), k)):
        return [*wrong, f"{name} may not act {cap} times, its cap"]
    _released(channel, setup, cap)
    before = path.read_bytes()
    if _begins(channel, cap, torch.full((1, 1), k)):
        wrong.append(f"{name} may act once more after {cap} times, its cap")
    elif path.read_bytes() != before or int(channel.account.uses[0, k]) != cap:
        wrong.append(f"an activation of {name} that was refused was charged")
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
        if isinstance(budget, (int, float)) and (most[k] or claims.starts(k))
    ]
    if not spent:
        return skipped(check, "no budget is set")
    ratio, worst = max(spent)
    return too_large(check, ratio, _SLACK, f"largest epsilon over budget, of account {worst} after {most[worst]} uses")


def _monotone_in_uses(setup: Setup, claims: Claims, uses: np.ndarray) -> Finding:
    """Check that epsilon grows with the uses."""
    falls = 0
    largest: dict[float, tuple[int, int]] = {}
    name, most = claims.names[0], uses if setup.gradients is not None else np.array([setup.steps])
    for k, cap in enumerate(most.tolist()):
        kind = claims.of(name, k).multiplier if cap else 0.0
        largest[kind] = max((cap, k), largest.get(kind, (0, k)))
    for cap, k in list(largest.values())[:3]:
        at = sorted({cap, *(1 << i for i in range(cap.bit_length()))} - {0})
        figures = [claims.spent(k, count) for count in at]
        falls += sum(b < a * (1 - 1e-12) for a, b in itertools.pairwise(figures)) + sum(f <= 0 for f in figures)
    return exact("charges: monotone in uses", falls, f"{min(3, len(largest))} kinds of accounts")


def _monotone(setup: Setup, claims: Claims) -> list[Finding]:
    """Check that epsilon grows with the sampling rate, and falls with the noise."""
    delta, claim = setup.delta, claims.of(claims.names[0])
    base = max(1, setup.steps // 4)
    findings = []
    if claim.sampled is not None:
        rates = [claim.sampled * f for f in (0.25, 0.5, 1.0)]
        at_q = [epsilon(_with_rate(claim.event, q), base, delta) for q in rates]
        falls = sum(b < a for a, b in itertools.pairwise(at_q))
        findings.append(exact("charges: monotone in the sampling rate", falls, _shown("q", rates, at_q)))
    if claim.kind == "gaussian":
        noise = [claim.multiplier * f for f in (4.0, 2.0, 1.0)]
        at_z = [epsilon(_with_noise(claim.event, f), base, delta) for f in (4.0, 2.0, 1.0)]
        falls = sum(b < a for a, b in itertools.pairwise(at_z))
        findings.append(exact("charges: monotone in the noise", falls, _shown("z", noise, at_z)))
    return findings


def _published(setup: Setup, seed: int) -> Finding:
    """Check that a published accounting that is refuted is never stated as the run's epsilon."""
    check, channel = "charges: published accounting", setup.open(seed)
    if channel.report.guarantee != "paper":
        return skipped(check, "none is used: the guarantee is sound")
    channel.start(0)
    channel.begin(0, torch.from_numpy(turns(channel.caps, 1))[None])
    report = channel.report
    wrong = int(not report.refuted) + int(bool(report.releases) and report.epsilon != math.inf)
    return exact(check, wrong, "it does not hold, and the report states its figure without the reason")


def _with_rate(event: Any, q: float) -> Any:
    return dp_event.PoissonSampledDpEvent(q, event.event)


def _with_noise(event: Any, factor: float) -> Any:
    """Return the event with ``factor`` times the noise."""
    if isinstance(event, dp_event.GaussianDpEvent):
        return dp_event.GaussianDpEvent(event.noise_multiplier * factor)
    return dp_event.PoissonSampledDpEvent(event.sampling_probability, _with_noise(event.event, factor))


def _shown(name: str, at: list[Any], values: list[float]) -> str:
    return ", ".join(f"{name} {x:.4g}: {value:.4g}" for x, value in zip(at, values, strict=True))
