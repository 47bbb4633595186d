"""Record-level privacy: the same checks on the gradients that leave the records of every owner.

One use of an owner's account is one participation with all its local steps; the claim on one local step is the owner's
own event, so every owner is checked against its own multiplier, sampling rate and public number of records.
"""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from ...errors import BudgetExhausted, PrivacyError
from ..accounting.composition import epsilon
from ..channel import Channel
from ..records import Owners, RecordReleases
from .canary import Seeds, curve_of, enough_trials, judge_curve, judge_gaussian
from .cohorts import binomial_sizes, drawn_law
from .findings import Finding, exact, skipped, too_large
from .noise import fresh_between, standardized
from .sensitivity import adversaries
from .setup import Claim, Setup, law_of, unsampled

_LOUD = 1e3
_OWNERS = 12  # owners whose sensitivity and subsets are examined
_MOST_ELEMENTS = 1 << 22


@dataclass(frozen=True)
class OwnerClaims:
    """The claim on a local step of each owner, and what one participation costs.

    Attributes:
        claims: by owner.
        repeats: local steps of one participation that are charged, by owner.
    """

    claims: tuple[Claim, ...]
    repeats: tuple[int, ...]


def owners_of(setup: Setup) -> Owners:
    """The owners of the records."""
    if setup.owners is None:
        raise PrivacyError("Record-level privacy is audited with its owners.")
    return setup.owners


def owner_claims(setup: Setup, channel: Channel) -> OwnerClaims | None:
    """What the account charges each owner for; None without noise."""
    cost, owners = channel.account.cost, owners_of(setup)
    if cost is None:
        return None
    claims, repeats = [], []
    for k in range(len(owners.ids)):
        rank, n = int(owners.ranks[k]), int(owners.counts[k])
        charged = cost.step(rank)
        inner, sampled, _ = unsampled(charged.event)
        kind, multiplier = law_of(inner)
        claims.append(
            Claim(
                kind=kind,
                multiplier=multiplier,
                bound=setup.privacy.initial_norm,
                relation="zero_out",
                norm="l1" if kind == "laplace" else "l2",
                size=owners.dimension,
                denominator=float(n if owners.batch_size is None else min(owners.batch_size, n)),
                sampled=sampled,
                event=charged.event,
                accountant=charged.accountant,
                per_participation=True,
            )
        )
        repeats.append(int(cost.repeats[rank if len(cost.repeats) > 1 else 0]))
    return OwnerClaims(tuple(claims), tuple(repeats))


def _releases(channel: Channel) -> RecordReleases:
    if channel.records is None:
        raise PrivacyError("The channel releases no records.")
    return channel.records


def _begin(channel: Channel, step: int, owners: Owners) -> Tensor:
    """The owners of a round, in the order of their ranks."""
    ranks = channel.draw(step)
    channel.begin(step, ranks)
    return torch.argsort(owners.ranks)[ranks]


def gradient_noise(setup: Setup, claims: OwnerClaims, channel: Channel, start: int, stop: int) -> dict[str, np.ndarray]:
    """Standardized noise (T, D) of owners whose records have zero gradients, or (every other step) none."""
    owners, rows = owners_of(setup), []
    for step in range(start, stop):
        try:
            clients = _begin(channel, step, owners)
        except BudgetExhausted:
            break
        records = _releases(channel)
        local = records.steps(clients)
        for index in range(min(int(local.max()) if len(local) else 0, 4)):
            active = clients[local > index]
            _used, mask = records.batch(active, index)
            place, _ = mask.nonzero(as_tuple=True) if index % 2 == 0 else (torch.zeros(0, dtype=torch.int64), None)
            place = place[: max(1, _MOST_ELEMENTS // owners.dimension)]
            zero = torch.zeros(1, owners.dimension).expand(len(place), -1)
            value = records.release(active, index, [(zero, place)]).cpu().numpy()
            rows += [
                standardized(value[i : i + 1], claims.claims[int(client)]) for i, client in enumerate(active.tolist())
            ]
    return {"gradients": np.concatenate(rows) if rows else np.zeros((0, owners.dimension))}


def training_freshness(setup: Setup, claims: OwnerClaims, seed: int) -> list[Finding]:
    """No local training of a participation has the noise of another one; nothing where there is only one."""
    owners = owners_of(setup)
    if owners.trainings == 1:
        return []
    channel, clients, step = setup.open(seed), torch.zeros(0, dtype=torch.int64), 0
    while not len(clients) and step < setup.steps:
        clients, step = _begin(channel, step, owners)[:_OWNERS], step + 1
    noise: list[list[np.ndarray]] = [[] for _ in range(owners.trainings)]
    empty = torch.zeros(0, owners.dimension), torch.zeros(0, dtype=torch.int64)
    for client in clients.tolist():
        for number in owners.step_numbers(client):
            value = _releases(channel).release(torch.tensor([client]), number, [empty]).cpu().numpy()
            noise[number // owners.stride].append(standardized(value, claims.claims[client]))
    if not noise[0]:
        return [skipped("freshness: local trainings", "nobody takes part")]
    first, *later = (np.concatenate(rows) for rows in noise)
    check = "freshness: local trainings, 1 and {}"
    return [fresh_between(check.format(number), first, other) for number, other in enumerate(later, start=2)]


def record_sensitivity(setup: Setup, claims: OwnerClaims, seed: int, coins: np.random.Generator) -> Finding:
    """One record more or less moves its owner's release by at most C / (q n), and nobody else's at all."""
    setup, owners = setup.seeded(), owners_of(setup)
    worst, where, cases = 0.0, "", 0
    direction = torch.nn.functional.normalize(torch.ones(owners.dimension), dim=0)
    crowd = max(2, min(24, _MOST_ELEMENTS // owners.dimension // 2))
    for index, adversary in enumerate([*adversaries(owners.dimension), -1e4 * direction] * 2):
        channels = (setup.open(seed + index), setup.open(seed + index))
        step, clients = 0, torch.zeros(0, dtype=torch.int64)
        while not len(clients) and step < setup.steps:
            both = [_begin(channel, step, owners) for channel in channels]
            clients, step = both[0][:_OWNERS], step + 1
        if not len(clients):
            continue
        place = torch.from_numpy(coins.integers(len(clients), size=crowd))
        gradients = 1e2 * direction.repeat(crowd, 1)
        if index % 2:
            gradients = torch.from_numpy(coins.standard_normal((crowd, owners.dimension)).astype(np.float32))
        gradients[-1] = adversary
        one = _releases(channels[0]).release(clients, 0, [(gradients, place)]).cpu().numpy()
        two = _releases(channels[1]).release(clients, 0, [(gradients[:-1], place[:-1])]).cpu().numpy()
        for i, client in enumerate(clients.tolist()):
            claim = claims.claims[client]
            moved = float(np.linalg.norm(one[i] - two[i], ord=1 if claim.norm == "l1" else 2))
            share = moved * claim.denominator / claim.sensitivity if i == int(place[-1]) else moved * math.inf
            share = 0.0 if moved == 0 else share
            cases += 1
            if not share <= worst:
                worst = share if math.isfinite(share) else math.inf
                where = f"adversary {index} of owner {owners.ids[int(clients[int(place[-1])])]!r}"
    detail = f"largest change over C / (q n), in {cases} releases" + (f"; {where}" if worst > 1 else "")
    return too_large("sensitivity: gradients", worst, 1.0, detail)


def record_subsets(
    setup: Setup,
    claims: OwnerClaims,
    seeds: tuple[int, int],
    draws: int,
    level: float,
    coins: np.random.Generator,
) -> list[Finding]:
    """The records of a local step are a Poisson subset with the rate of the owner's event, anew in every step."""
    owners = owners_of(setup)
    sampled = [k for k in range(len(owners.ids)) if claims.claims[k].sampled is not None]
    if not sampled:
        return [_all_records(setup, seeds[0])]
    most = max(sampled, key=lambda k: int(owners.counts[k]))
    n, claim = int(owners.counts[most]), claims.claims[most]
    assert claim.sampled is not None
    twins = [k for k in sampled if int(owners.counts[k]) == n and k != most]
    members = [
        _subsets(setup, seeds[0], most, draws),
        _subsets(setup, seeds[0] if setup.secure else seeds[1], most, draws),
    ]
    q, prefix = claim.sampled, "sampler: records, "
    findings = [binomial_sizes(f"{prefix}sizes", members[0], n, q, level, coins)]
    findings += drawn_law(prefix, members, n, q, q * q, level, coins, fixed=False, secure=setup.secure)
    if twins:  # two owners of one size have subsets of their own
        pair = [members[0], _subsets(setup, seeds[0], twins[0], draws)]
        prefix = "sampler: records of two owners, "
        findings.append(drawn_law(prefix, pair, n, q, q * q, level, coins, fixed=False, secure=False)[-1])
    return findings


def _subsets(setup: Setup, seed: int, owner: int, draws: int) -> list[np.ndarray]:
    """Records of an owner in ``draws`` local steps: four a round, whether or not so many are paid for."""
    owners, records = owners_of(setup), _releases(setup.open(seed))
    clients, found = torch.tensor([owner]), []
    for draw in range(draws):
        records.open(draw // 4, owners.ranks[clients])
        index, mask = records.batch(clients, draw % 4)
        found.append(torch.sort(index[mask]).values.numpy())
    return found


def _all_records(setup: Setup, seed: int) -> Finding:
    owners, records = owners_of(setup), _releases(setup.open(seed))
    clients = torch.arange(len(owners.ids))[: 4 * _OWNERS]
    records.open(0, owners.ranks[clients])
    index, mask = records.batch(clients, 0)
    wrong = sum(
        sorted(i[m].tolist()) != list(range(int(n)))
        for i, m, n in zip(index, mask, owners.counts[clients], strict=True)
    )
    return exact("sampler: all records", wrong, "owners that left records out, with nothing sampled")


def record_canaries(
    setup: Setup, claims: OwnerClaims, seeds: Seeds, trials: int, alpha: float, coins: np.random.Generator
) -> list[Finding]:
    """Canary records on coordinates of their own: in one local step, and in one participation with its sampling.

    In one step every owner plays; scores are in units of its noise, and the claim is the largest mu of all owners. In a
    participation the owner with most records plays, against its event composed over its local steps.
    """
    if any(claim.kind != "gaussian" for claim in claims.claims):
        return [skipped("canary: gradients", "record-level games are played against Gaussian noise")]
    owners, check = owners_of(setup), "canary: one local step"
    mu = max(1 / claim.multiplier for claim in claims.claims)
    wanted = enough_trials(1 / mu, trials, 10 * trials)
    scores: list[float] = []
    present: list[bool] = []
    for seed in seeds("canary/records", 200):
        channel = setup.open(seed)
        for step in range(setup.steps):
            try:
                clients = _begin(channel, step, owners)
            except BudgetExhausted:
                break
            clients = clients[: max(1, _MOST_ELEMENTS // owners.dimension)]
            axis, inside = coins.integers(owners.dimension, size=len(clients)), coins.random(len(clients)) < 0.5
            value = _loud(channel, clients, 0, axis[inside], np.flatnonzero(inside), owners.dimension, setup)
            for i, client in enumerate(clients.tolist()):
                claim = claims.claims[client]
                scores.append(float(value[i, axis[i]]) / claim.scale)
            present += inside.tolist()
            if len(scores) >= wanted:
                break
        if len(scores) >= wanted:
            break
    if len(scores) < 100:
        return [skipped(check, f"only {len(scores)} trials")]
    findings = [judge_gaussian(check, np.array(scores), np.array(present), mu, alpha, coins)]
    return [*findings, _participation(setup, claims, seeds, trials, alpha, coins)]


def _loud(
    channel: Channel, clients: Tensor, step: int, axis: np.ndarray, place: np.ndarray, dimension: int, setup: Setup
) -> np.ndarray:
    rows = torch.zeros(len(axis), dimension)
    rows[torch.arange(len(axis)), torch.from_numpy(axis)] = _LOUD * setup.privacy.initial_norm
    return _releases(channel).release(clients, step, [(rows, torch.from_numpy(place))]).cpu().numpy()


def _participation(
    setup: Setup, claims: OwnerClaims, seeds: Seeds, trials: int, alpha: float, coins: np.random.Generator
) -> Finding:
    owners, check = owners_of(setup), "canary: one participation"
    owner = int(torch.argmax(owners.counts))
    claim, local = claims.claims[owner], claims.repeats[owner]
    width = min(int(owners.counts[owner]), owners.dimension)
    q = 1.0 if claim.sampled is None else claim.sampled
    scores, present = [], []
    for seed in seeds("canary/participation", 400):
        channel = setup.open(seed)
        try:
            step = 0
            while owner not in (clients := _begin(channel, step, owners)).tolist():
                step += 1
                if step >= setup.steps:
                    break
        except BudgetExhausted:
            continue
        if owner not in clients.tolist():
            continue
        one, inside, score = torch.tensor([owner]), coins.random(width) < 0.5, np.zeros(width)
        axis = coins.permutation(owners.dimension)[:width]
        for index in owners.step_numbers(owner):
            position, mask = _releases(channel).batch(one, index)
            used = position[0][mask[0]].numpy()
            used = used[(used < width)]
            used = used[inside[used]]
            value = _loud(channel, one, index, axis[used], np.zeros(len(used), dtype=np.int64), owners.dimension, setup)
            ratio = (2 * value[0, axis] * claim.denominator / claim.bound - 1) / (2 * claim.multiplier**2)
            score += ratio if q >= 1 else np.logaddexp(math.log1p(-q), math.log(q) + ratio)
        scores.append(score)
        present.append(inside)
        if width * len(scores) >= trials:
            break
    if width * len(scores) < 100:
        return skipped(check, f"only {width * len(scores)} trials")
    curve = curve_of(claim.event, local, claim.accountant)
    curve.append((epsilon(claim.event, local, setup.delta, accountant=claim.accountant), setup.delta))
    return judge_curve(check, np.concatenate(scores), np.concatenate(present), curve, alpha, coins)


def record_charges(setup: Setup, claims: OwnerClaims, seed: int) -> list[Finding]:
    """Events agree with the noise and the subsets; participations end within the budget of every owner."""
    channel, owners = setup.open(seed), owners_of(setup)
    records, wrong = _releases(channel), []
    assert records.multipliers is not None
    for k, claim in enumerate(claims.claims):
        n = int(owners.counts[k])
        q = 1.0 if owners.batch_size is None or owners.batch_size >= n else owners.batch_size / n
        if not math.isclose(float(records.multipliers[k]), claim.multiplier, rel_tol=1e-9):
            wrong.append(f"{owners.ids[k]!r}: noise {float(records.multipliers[k]):.6g}, event {claim.multiplier:.6g}")
        if not math.isclose(claim.sampled or 1.0, q, rel_tol=1e-12):
            wrong.append(f"{owners.ids[k]!r}: the event samples with q = {claim.sampled}, the batch is {q:.6g} of n")
        if claims.repeats[k] != int(owners.steps[k]):
            wrong.append(f"{owners.ids[k]!r}: {int(owners.steps[k])} local steps, {claims.repeats[k]} charged")
    findings = [exact("charges: event of a local step", len(wrong), "; ".join(wrong[:3]) or "noise, rate and steps")]
    uses: Counter[int] = Counter()
    again = 0
    for step in range(4 * setup.steps + 16):
        try:
            clients = _begin(channel, step, owners)
        except BudgetExhausted:
            break
        uses.update(clients.tolist())
        if step < 3 and len(clients):
            again += _steps_again(channel, clients, owners)
    findings.append(exact("charges: a local step happens once", again, "second or unpaid local steps accepted"))
    budgets = setup.privacy.budgets(owners.ids)  # type: ignore[union-attr]
    check, spent = "charges: budget of every owner", []
    for k, (claim, budget) in enumerate(zip(claims.claims, budgets, strict=True)):
        if budget is not None and uses[k]:
            total = uses[k] * int(owners.steps[k])
            spent.append((epsilon(claim.event, total, setup.delta, accountant=claim.accountant) / budget, k))
    if not spent:
        return [*findings, skipped(check, "no budget is set")]
    ratio, worst = max(spent)
    text = f"largest epsilon over budget, of {owners.ids[worst]!r} after {uses[worst]} participations"
    return [*findings, too_large(check, ratio, 1 + 1e-6, text)]


def _steps_again(channel: Channel, clients: Tensor, owners: Owners) -> int:
    """Releases that must be refused: of a step made already, after the last one, of an owner outside the round."""
    records = _releases(channel)
    empty = [(torch.zeros(0, owners.dimension), torch.zeros(0, dtype=torch.int64))]
    one = clients[:1]
    numbers = owners.step_numbers(int(one[0]))
    for index in numbers:
        records.release(one, index, empty)
    accepted = 0
    others = [k for k in range(len(owners.ids)) if k not in clients.tolist()][:1]
    tries: list[tuple[Tensor, int]] = [(one, 0), (one, numbers[-1] + 1), *((torch.tensor([k]), 0) for k in others)]
    for who, index in tries:
        try:
            records.release(who, index, empty)
            accepted += 1
        except PrivacyError:
            continue
    return accepted
