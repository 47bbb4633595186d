"""Check 3, deterministic: with equal noise, the releases of neighbours differ by at most the sensitivity."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import torch
from torch import Tensor

from ...errors import PrivacyError
from ..channel import GRADIENT, Channel
from ..settings import ClientPrivacy
from ..sums import BoundedMeans, GradientMessage, RecordGradients, ScaledRows
from .findings import Finding, exact, skipped, too_large
from .play import coordinates, decorrelated, drawing, first_cohort, local_of, next_release, play, silence, turns
from .setup import CLIENTS, MOST_ELEMENTS, Claim, Claims, Setup, clip_claim, whole_width

_EVERY_CLIENT = 64
_FACTORS = (
    (1e9, -1e9),
    (math.nan, 1e9),
    (math.inf, -1e9),
    (1e300, -1e300),
    (1e-3, 1e300),
    (0.0, -math.inf),
    (1e-3, -1e-3),
)


def adversaries(dimension: int, dtype: torch.dtype = torch.float32) -> list[Tensor]:
    """Return rows (D,) of one client or record at its worst."""
    wide = dtype == torch.float64
    huge = 1e300 if wide else 3e38
    values = (1e4, math.nan, math.inf, 0.0, huge, -huge, *((1.0, 1e-120, 1e-200) if wide else ()))
    special = torch.tensor([1e4, math.nan, math.inf, -math.inf, huge, 0.0], dtype=dtype)
    mixed, large, one = (torch.zeros(dimension, dtype=dtype) for _ in range(3))
    mixed[:6] = special[:dimension]
    large[0], large[-1] = huge, -huge
    one[dimension // 2] = 1.0 if wide else 1e4
    return [*(torch.full((dimension,), value, dtype=dtype) for value in values), mixed, large, one]


class Worst:
    """The largest share of a sensitivity that was seen, and where; one that is not a number is infinite."""

    def __init__(self) -> None:
        self.share, self.where, self.cases = 0.0, "", 0

    def see(self, share: float, where: str) -> None:
        """Count one pair of neighbours."""
        self.cases += 1
        if not share <= self.share:
            self.share, self.where = (share if math.isfinite(share) else math.inf), where

    def finding(self, check: str, what: str) -> Finding:
        """Return a finding that is refuted above 1."""
        detail = f"{what}, {self.cases} pairs of neighbours" + (f"; {self.where}" if self.share > 1 else "")
        return too_large(check, self.share, 1.0, detail)


def sensitivity(setup: Setup, claims: Claims, seed: int, coins: np.random.Generator) -> list[Finding]:
    """Check every release, also where it is clipped and not noised."""
    if setup.gradients is None:
        found = {plan.name: claims.of(plan.name) if claims else clip_claim(setup, plan.name) for plan in setup.releases}
        findings = []
        for name, claim in found.items():
            findings += _of_rows(setup.seeded(), name, claim, seed, coins)
            findings += [_over_rounds(setup.seeded(), name, claim, seed)] if claim.bands else []
        return findings
    if setup.one_at_a_time:
        return [_of_activations(setup.seeded(), claims, seed, coins), bounded_sensitivity(setup, claims, seed)]
    return [_of_local_steps(setup.seeded(), claims, seed, coins)]


# Rows of cohorts


def _of_rows(setup: Setup, name: str, claim: Claim, seed: int, coins: np.random.Generator) -> list[Finding]:
    """Try random and aligned cohorts with and without an adversary, and every client of a cohort as the adversary.

    Add/remove: the adversary is drawn and its row is there, or neither. Replace: its row is there, or its opposite is.
    The count of unclipped clients is compared, too, where the clip norm adapts.
    """
    dimension = setup.release(name).dimension
    game, step = _Game(setup, name, claim, max(2, min(256, 2 * MOST_ELEMENTS // dimension))), 0
    direction = torch.nn.functional.normalize(torch.ones(dimension), dim=0)
    worst = {name: Worst()} | ({} if setup.adaptive is None else {f"{name}/count": Worst()})

    def see(shares: dict[str, float], where: str) -> None:
        for released, share in shares.items():
            worst[released].see(share, where)

    for index, adversary in enumerate([*adversaries(dimension), -1e4 * direction]):
        for crowd in ("random", "aligned"):
            ranks, step = game.cohort(seed, step)
            rows = 1e2 * direction.repeat(len(ranks), 1)
            if crowd == "random":
                rows = torch.from_numpy(coins.standard_normal((len(ranks), dimension)).astype(np.float32))
            place = int(coins.integers(len(ranks)))
            see(game.moved(seed, step, ranks, rows, place, adversary), f"adversary {index} in a {crowd} cohort")
    ranks, step = game.cohort(seed + 1, 0)
    for place in coins.permutation(len(ranks))[:_EVERY_CLIENT].tolist():
        rows = torch.zeros(len(ranks), dimension)
        shares = game.moved(seed + 1, step, ranks, rows, place, -1e4 * direction)
        see(shares, f"client of rank {int(ranks[place])}")
    what = f"largest change over S / m, in {claim.norm} norm"
    return [one.finding(f"sensitivity: {released}", what) for released, one in worst.items()]


def _over_rounds(setup: Setup, name: str, claim: Claim, seed: int) -> Finding:
    """Check that clients which send all they can whenever they take part move the noise that is correlated over rounds
    by no more than they are charged for, after every round: the squared length of C (y - y') / S is at most the number
    of participations. Every client has a coordinate of its own."""
    n, d, most = setup.sampler.n, setup.release(name).dimension, MOST_ELEMENTS
    width = min(n, d, max(1, most // max(d, setup.steps)))

    def loud(step: int, plan: str, ranks: Tensor) -> tuple[Tensor, Tensor]:
        if plan != name:
            return silence(setup)(step, plan, ranks)
        who = ranks[ranks < width]
        return 1e4 * claim.bound * torch.nn.functional.one_hot(who, d).float(), who

    sent: list[list[np.ndarray]] = []
    taken = np.zeros((0, n))
    for rows in (loud, silence(setup)):
        played = list(play(setup, setup.open(seed), rows, start=0, stop=setup.steps))
        sent.append([values[name] for _, _, values in played])
        taken = np.array([np.isin(np.arange(n), ranks.numpy()) for _, ranks, _ in played], dtype=float)
    at = np.arange(width)
    if claim.form == "symmetric":
        at = at * d - at * (at - 1) // 2
    change = [(one - two)[at] * claim.denominator / claim.sensitivity for one, two in zip(*sent, strict=True)]
    if not change:
        return skipped(f"sensitivity: rounds of {name}", "no step fits the budget")
    moved, charged = (decorrelated(np.stack(change), claim) ** 2).cumsum(0), taken[:, :width].cumsum(0)
    share = np.divide(moved, charged, out=np.where(moved > 1e-12, math.inf, 0.0), where=charged > 0)
    detail = f"largest squared change over participations, of {width} clients after each of {len(change)} rounds"
    return too_large(f"sensitivity: rounds of {name}", float(share.max()), 1.0, detail)


def exact_sums(setup: Setup, claims: Claims, seed: int, coins: np.random.Generator) -> list[Finding]:
    """Check the sums of all releases of vectors of clients."""
    names = [plan.name for plan in setup.releases if plan.form == "vector" and setup.gradients is None]
    if not names:
        return [skipped("exact sum", "no vectors of clients are clipped and summed")]
    found = {name: claims.of(name) if claims else clip_claim(setup, name) for name in names}
    sums = [_exact_sum(setup, name, claim, seed, coins) for name, claim in found.items()]
    noised = [(name, claim) for name, claim in found.items() if claim.apart is not None]
    return sums + [_exact_with_noise(setup, name, claim, seed, coins) for name, claim in noised]


def _exact_sum(setup: Setup, name: str, claim: Claim, seed: int, coins: np.random.Generator) -> Finding:
    """Check, without noise, that a row within the clip counts as its coordinates truncated toward zero to the public
    grid of sums, so never as more, and that rows in another order give the same bits."""
    assert isinstance(setup.privacy, ClientPrivacy)
    quiet = replace(setup.privacy, clip_norm=claim.bound, epsilon=math.inf, noise_multiplier=None, bands=None)
    setup = replace(setup, privacy=quiet).seeded()
    dimension, n = setup.release(name).dimension, setup.sampler.n
    width = 2.0 ** (math.ceil(math.log2(claim.bound)) + math.ceil(math.log2(n)) - 53)
    game = _Game(setup, name, claim, max(2, min(256, 2 * MOST_ELEMENTS // dimension)))
    ranks, step = game.cohort(seed, 0)
    cells = coins.integers(-1000, 1000, dimension) + coins.choice([0.25, 0.75], dimension)
    counted = game.released(seed, step, torch.from_numpy(cells * width)[None], ranks[:1])[name]
    counted = counted * claim.denominator / width
    wrong = int((np.abs(counted - np.trunc(cells)) > 1e-6).sum())
    rows = torch.from_numpy(coins.standard_normal((len(ranks), dimension)))
    rows *= claim.bound * torch.logspace(-6, 2, len(ranks), dtype=torch.float64)[:, None]
    order = torch.from_numpy(coins.permutation(len(ranks)))
    one, two = game.released(seed, step, rows, ranks), game.released(seed, step, rows[order], ranks[order])
    differ = int((one[name] != two[name]).sum())
    detail = f"{wrong} of {dimension} coordinates are not truncated to the grid, {differ} depend on the order of rows"
    return exact(f"exact sum: {name}", wrong + differ, detail)


def _exact_with_noise(setup: Setup, name: str, claim: Claim, seed: int, coins: np.random.Generator) -> Finding:
    """Check that noise in whole numbers is added to exact sums, to the last cell.

    With the same noise, rows within the clip move a release by the sum of their coordinates, each truncated toward zero
    to the public grid. And the noise alone is not on a coarser grid, which would show the last bits of a sum.
    """
    game = _Game(setup.seeded(), name, claim, 3)
    ranks, step = game.cohort(seed, 0)
    size = (len(ranks), claim.size)
    width = whole_width(claim, setup.sampler.n)
    most = int(min(1000.0, claim.bound / (2 * width * math.sqrt(claim.size))))  # within the clip
    if most < 2:
        return skipped(f"exact sum: {name} with noise", "rows within the clip are shorter than a cell")
    cells = coins.integers(-most, most, size) + coins.choice([0.25, 0.75], size)
    with_rows = game.released(seed, step, torch.from_numpy(cells * width), ranks)[name]
    without = game.released(seed, step, torch.zeros(size), ranks)[name]
    moved = (with_rows - without) * claim.denominator / width
    wrong = int((~(np.abs(moved - np.trunc(cells).sum(0)) < 0.01)).sum())
    detail = f"{wrong} of {claim.size:,} coordinates are not moved by the whole numbers of {len(ranks):,} rows"
    even = claim.size >= 32 and not (np.rint(without * claim.denominator / width) % 2).any()
    detail += "; all noise is in even numbers" if even else ""
    return exact(f"exact sum: {name} with noise", wrong + int(even), detail)


class _Game:
    """Neighbouring cohorts through two channels with the same noise."""

    def __init__(self, setup: Setup, name: str, claim: Claim, count: int) -> None:
        self.setup, self.name, self.claim, self.count = setup, name, claim, count

    def cohort(self, seed: int, step: int) -> tuple[Tensor, int]:
        """Return the next cohort that is not empty, and its step."""
        channel = self.setup.open(seed)
        channel.start(0)
        for later in range(step + 1, step + 10_000):
            ranks = channel.draw(later)
            if len(ranks):
                return ranks[: self.count], later
        raise AssertionError("no client was drawn in 10,000 steps")

    def moved(
        self, seed: int, step: int, ranks: Tensor, rows: Tensor, place: int, adversary: Tensor
    ) -> dict[str, float]:
        """Return the norm of the difference of the two releases over S / m, by release; infinite if one is not
        finite."""
        present = rows.clone()
        present[place] = adversary
        if self.claim.relation == "replace":
            other, there = rows.clone(), ranks
            other[place] = self.opposite(adversary)
        else:
            keep = torch.arange(len(ranks)) != place
            other, there = rows[keep], ranks[keep]
        one, two = self.released(seed, step, present, ranks), self.released(seed, step, other, there)
        counted = (1.0 if self.claim.relation == "replace" else 0.5) * (1 + 1e-9)  # noise is added in floating point
        order = 1 if self.claim.norm == "l1" else 2
        return {
            name: float(np.linalg.norm(one[name] - two[name], ord=order))
            * self.claim.denominator
            / (self.claim.sensitivity if name == self.name else counted)
            for name in one
        }

    def opposite(self, adversary: Tensor) -> Tensor:
        """Return the row farthest from the adversary's: its negative, or for outer products an orthogonal one."""
        if self.claim.form == "vector":
            return -adversary
        return adversary.roll(1) * torch.where(torch.arange(len(adversary)) % 2 == 0, 1.0, -1.0)

    def released(self, seed: int, step: int, rows: Tensor, ranks: Tensor) -> dict[str, np.ndarray]:
        """Return the coordinates of the release of ``rows`` of the clients of ``ranks``, and the count of unclipped
        ones where the clip norm adapts, by name. Where neighbours have other populations, these clients alone are
        drawn."""
        channel = self.setup.open(seed)
        if self.claim.relation == "add_remove":
            channel = drawing(channel, ranks)
        channel.start(0)
        channel.begin(step, channel.draw(step))
        noted: list[tuple[int, str, Tensor]] = []
        channel.record = noted
        value = channel.release(self.name, rows, ranks)
        beside = {name: coordinates(count.numpy(), "vector") for _, name, count in noted if name != self.name}
        return beside | {self.name: coordinates(value.numpy(), self.claim.form)}


# Gradients of local steps


def _of_local_steps(setup: Setup, claims: Claims, seed: int, coins: np.random.Generator) -> Finding:
    """Check that one record more or less moves its client's release by at most C / (q n), and nobody else's at all."""
    plan, worst = setup.records, Worst()
    direction = torch.nn.functional.normalize(torch.ones(plan.dimension), dim=0)
    crowd = max(2, min(24, MOST_ELEMENTS // plan.dimension // 2))
    for index, adversary in enumerate([*adversaries(plan.dimension), -1e4 * direction] * 2):
        channels = setup.open(seed + index), setup.open(seed + index)
        clients = first_cohort(setup, *channels)[:CLIENTS]
        if not len(clients):
            continue
        place = torch.from_numpy(coins.integers(len(clients), size=crowd))
        gradients = 1e2 * direction.repeat(crowd, 1)
        if index % 2:
            gradients = torch.from_numpy(coins.standard_normal((crowd, plan.dimension)).astype(np.float32))
        gradients[-1] = adversary
        one = local_of(channels[0]).release(clients, 0, [(gradients, place)]).cpu().numpy()
        two = local_of(channels[1]).release(clients, 0, [(gradients[:-1], place[:-1])]).cpu().numpy()
        for i, client in enumerate(clients.tolist()):
            claim = claims.of(GRADIENT, client)
            moved = float(np.linalg.norm(one[i] - two[i], ord=1 if claim.norm == "l1" else 2))
            limit = claim.sensitivity / claim.denominator if i == int(place[-1]) else 0.0
            share = 0.0 if moved == 0 else moved / limit if limit else math.inf
            worst.see(share, f"adversary {index} of client {plan.ids[int(clients[int(place[-1])])]!r}")
    return worst.finding("sensitivity: gradients", "largest change over C / (q n)")


# Gradients of clients that act one at a time


def _of_activations(setup: Setup, claims: Claims, seed: int, coins: np.random.Generator) -> Finding:
    """Check that one record replaced, its row and its factor, moves its client's release by at most 2 C / (q n_i).

    The other records pull one way, at random, or have factors that are not numbers.
    """
    sizes, d, worst = setup.sizes, setup.records.dimension, Worst()
    for index, row in enumerate(adversaries(d, torch.float64)):
        places = [int(coins.integers(max(1, n))) for n in sizes]
        base = [torch.where(torch.isfinite(x), x, 0.0).clone() for x in setup.x]
        other = [x.clone() for x in base]
        for x, y, place in zip(base, other, places, strict=True):
            if not len(x):
                continue
            x[place] = y[place] = row
            if index % 2:
                x[:] = row.nan_to_num(1.0, 1.0, -1.0).clamp(-1, 1)  # all records along one direction
                x[place] = row
                y.copy_(x)
            y[place] = -row if index % 3 else torch.ones(d, dtype=torch.float64)
        pair = setup.open(seed + index, x=base), setup.open(seed + index, x=other)
        few = np.where((np.arange(len(sizes)) < CLIENTS) & (sizes > 0), pair[0].caps, 0)
        order = turns(few, len(_FACTORS) * CLIENTS)
        if not order.size:
            return skipped("sensitivity: gradients", "no client may act")
        uses, present = np.zeros(len(sizes), dtype=np.int64), setup.present(order, np.arange(len(order)))
        for channel in pair:
            channel.begin(0, torch.from_numpy(order)[None])
        for step, client in enumerate(order.tolist()):
            case, n, claim = int(uses[client]) + index + client, int(sizes[client]), claims.of(GRADIENT, client)
            uses[client] += 1
            crowd = torch.full((n,), math.inf if index % 2 else 1e9).double()
            crowd = torch.from_numpy(coins.standard_normal(n)) if case % 3 == 0 else crowd
            crowd = torch.full_like(crowd, math.nan) if case % 3 == 1 else crowd
            factors = _FACTORS[case % len(_FACTORS)]
            values = []
            for channel, rows, factor in zip(pair, (base, other), factors, strict=True):
                crowd[places[client]] = factor
                message = _message(setup, rows[client], crowd.clone()[None], case)
                values.append(next_release(channel, message, step))
            with np.errstate(invalid="ignore", over="ignore"):
                moved = float(np.linalg.norm((values[0] - values[1])[0], ord=1 if claim.norm == "l1" else 2))
            share = moved * claim.denominator * (present[step] / n) / claim.sensitivity
            worst.see(share, f"row {index}, factors {factors} of client {setup.records.ids[client]!r}")
    return worst.finding("sensitivity: gradients", "largest change over 2 C / (q n)")


def _message(setup: Setup, rows: Tensor, factors: Tensor, case: int) -> GradientMessage:
    """Return gradients that are ``factors`` (1, n_i) times ``rows`` (n_i, D), given in any way."""
    if not setup.linear or case % 4 == 3:
        return RecordGradients(lambda client, which, where: factors[..., None] * rows)
    of_all = None if case % 4 else (lambda clients, where, turns: factors[0].numpy())
    return ScaledRows(lambda client, which, where: factors.numpy(), of_all)


def bounded_sensitivity(setup: Setup, claims: Claims, seed: int) -> Finding:
    """Check that means that the domain is said to bound are refused beyond C, and released within it; all of them are
    refused where releases take a subsample of the records."""
    channel, wrong, ids = setup.open(seed), [], setup.records.ids
    order = turns(np.minimum(channel.caps, 1), CLIENTS)
    order = order[setup.present(order, np.zeros_like(order)) > 0]
    channel.begin(0, torch.from_numpy(order)[None])
    for client in order.tolist():
        claim = claims.of(GRADIENT, client)
        within = np.ones((1, setup.records.dimension))
        within *= claim.bound / np.linalg.norm(within[0], ord=1 if claim.norm == "l1" else 2)
        for number, factor in enumerate(2 * (1.001, -2.0, math.nan, math.inf, 1e300)):
            if _accepted(channel, within * factor, number):
                wrong.append(f"{factor:g} times C of client {ids[client]!r} was released")
                break
        else:
            released = _accepted(channel, within, client)
            if released and claim.sampled is not None:
                wrong.append(f"a mean over all records of {ids[client]!r}, charged as a subsample, was released")
            elif not released and claim.sampled is None:
                wrong.append(f"a mean within C of client {ids[client]!r} was refused")
    return exact("sensitivity: bounded means", len(wrong), "; ".join(wrong[:3]) or "means beyond C are refused")


def _accepted(channel: Channel, mean: np.ndarray, number: int) -> bool:
    try:
        next_release(channel, BoundedMeans(lambda client, which, where: mean), number)
    except PrivacyError:
        return False
    return True
