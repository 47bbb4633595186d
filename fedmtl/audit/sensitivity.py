"""Check 3, deterministic: with equal noise, the releases of neighbours differ by at most the
sensitivity."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from functools import partial

import numpy as np
import torch
from torch import Tensor

from ..privacy.settings import ClientPrivacy, RecordPrivacy
from .claim import GRADIENTS, Claim
from .findings import Finding, exact, skipped, too_large
from .play import Sent, played, silence
from .samples import Sample, decorrelated
from .setup import CLIENTS, MOST_ELEMENTS, Setup

_COHORT = 256
_EVERY_CLIENT = 64
_TURNS = 3
_ROUNDING = 1 + 1e-9  # noise is added in floating point
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
    """Returns rows (D,) of one client or record at its worst."""
    wide = dtype == torch.float64
    huge = 1e300 if wide else 3e38
    values = (1e4, math.nan, math.inf, 0.0, huge, -huge, *((1.0, 1e-120, 1e-200) if wide else ()))
    special = torch.tensor([1e4, math.nan, math.inf, -math.inf, huge, 0.0], dtype=dtype)
    mixed, large, single = (torch.zeros(dimension, dtype=dtype) for _ in range(3))
    mixed[:6] = special[:dimension]
    large[0] = huge
    large[-1] = -huge
    single[dimension // 2] = 1.0 if wide else 1e4
    return [
        *(torch.full((dimension,), value, dtype=dtype) for value in values),
        mixed,
        large,
        single,
    ]


def _largest(check: str, shares: Sequence[tuple[float, str]]) -> Finding:
    """Returns a finding on the shares of a sensitivity by which neighbours differ, each with its
    place in words."""
    share, where = max(shares, default=(0.0, ""))
    detail = f"largest change over the sensitivity, {len(shares)} pairs"
    return too_large(check, share, 1.0, f"{detail}; {where}" if share > 1 else detail)


def sensitivity(setup: Setup, seed: int, coins: np.random.Generator) -> list[Finding]:
    """Checks the sensitivity of every release, also of one that is clipped and not noised."""
    setup = setup.seeded()
    findings = []
    for name in setup.claims.names:
        findings += _neighbours(setup, name, seed, coins)
        if setup.claims.of(name).bands:
            findings += [_over_rounds(setup, name, seed)]
    if setup.one_at_a_time and setup.records.x is not None:
        findings += [_of_factors(setup, setup.records.x, seed, coins)]
    return findings


def _neighbours(setup: Setup, name: str, seed: int, coins: np.random.Generator) -> list[Finding]:
    """Tries random and aligned clients or records with and without an adversary, and every client
    as the adversary.

    Add/remove: the adversary is drawn and its row is there, or neither. Zero out: its row, or one
    of the records of a client, is there or not. Replace: it is there, or its opposite is. The
    releases of others must be the same to the last bit. The count of unclipped clients is compared,
    too, if the clip norm adapts.
    """
    relation = setup.claims.of(name).relation
    plan = setup.rows or name
    d = setup.dimension(plan)
    if setup.gradients is None:
        n = setup.sampler.n
        able = np.arange(n)
    else:
        n = len(setup.sizes)
        # a client without records, or whose cap is 0, releases nothing that could move
        able = np.flatnonzero((setup.sizes > 0) & (setup.open(seed).caps > 0))
    if not len(able):
        return [skipped(f"sensitivity: {name}", "no client may act")]
    most = _most_clients(setup, d)
    # the type in which runs hand over their gradients or rows
    dtype = torch.float64 if setup.one_at_a_time else torch.float32
    direction = torch.nn.functional.normalize(torch.ones(d, dtype=dtype), dim=0)
    shares: dict[str, list[tuple[float, str]]] = {}
    trials = [
        (row, crowd)
        for row in [*adversaries(d, dtype), -1e4 * direction]
        for crowd in ("random", "aligned")
    ]
    # alone among silent ones nothing of others can hide a move, so many clients are tried like this
    trials += [(-1e4 * direction, "silent")] * min(_EVERY_CLIENT, len(able))
    for index, (adversary, crowd) in enumerate(trials):
        clients = np.sort(coins.permutation(able)[:most])
        who = int(coins.choice(clients))
        # all along the adversary's direction, so that a clip of the sum in place of the rows shows
        rows = 1e2 * direction.repeat(n, 1)
        if crowd == "random":
            rows = torch.from_numpy(coins.standard_normal((n, d))).to(dtype)
        if crowd == "silent":
            others = rows[:0]
        else:
            others = rows
        pair = []
        for row in (
            adversary,
            _opposite(adversary, setup.claims.of(name)) if relation == "replace" else None,
        ):
            if row is not None or relation != "add_remove":
                drawn = clients
            else:
                drawn = clients[clients != who]
            sent = _with(setup, plan, others, who, row)
            stop = 1
            if setup.one_at_a_time:
                stop = _TURNS * len(clients)
            pair.append(played(setup, setup.open(seed + index), 0, stop, sent, who=drawn, local=1))
        where = f"adversary {index} is client {setup.name(who)} among {crowd} others"
        for released, sample in pair[0].items():
            moved = _shares(sample, pair[1][released], [who])
            shares.setdefault(released, []).extend((share, where) for share in moved)
    return [_largest(f"sensitivity: {released}", each) for released, each in shares.items()]


def _most_clients(setup: Setup, dimension: int) -> int:
    """Returns the number of clients whose rows are added up."""
    if setup.shares is not None:
        return setup.shares.cohort  # as many as the noise is planned for
    usual = _COHORT
    if setup.gradients is not None:
        usual = 2 * CLIENTS
    return max(2, min(usual, 2 * MOST_ELEMENTS // dimension))


def _with(setup: Setup, name: str, crowd: Tensor, who: int, row: Tensor | None) -> Sent:
    """Returns the message in which clients contribute their rows of ``crowd``, (n, D) or (0, D),
    and client ``who`` contributes ``row``. If rows of clients are released, this row replaces
    its own."""

    def sent(release: str, step: int, clients: Tensor) -> tuple[Tensor, Tensor]:
        if release != name and setup.gradients is None:
            return silence(setup)(release, 1, clients)
        some = torch.unique(clients)
        own = some[some == who][: int(row is not None)]
        if setup.gradients is not None or setup.pooled is not None:
            others = some
        else:
            others = some[some != who]
        others = others[: len(crowd)]
        if row is None:
            adversary = torch.zeros(1, crowd.shape[1], dtype=crowd.dtype)
        else:
            adversary = row[None]
        return torch.cat([adversary.expand(len(own), -1), crowd[others]]), torch.cat([own, others])

    return sent


def _opposite(adversary: Tensor, claim: Claim) -> Tensor:
    """Returns the row farthest from the adversary's: its negative, or for outer products an
    orthogonal one."""
    if claim.form == "vector":
        return -adversary
    return adversary.roll(1) * torch.where(torch.arange(len(adversary)) % 2 == 0, 1.0, -1.0)


def _shares(left: Sample, right: Sample, who: Sequence[int] | np.ndarray) -> list[float]:
    """Returns the move of each release over its sensitivity; infinite for a change that is not
    finite, and for any of a client that is not among ``who``."""
    shares = []
    for first, second in zip(left.releases, right.releases, strict=True):
        claim = first.claim
        with np.errstate(invalid="ignore", over="ignore"):
            moved = float(
                np.linalg.norm(first.value - second.value, ord=1 if claim.norm == "l1" else 2)
            )
        # the released mean is m times smaller than the sum that the sensitivity is about
        share = moved * claim.denominator / claim.sensitivity / _ROUNDING
        # the releases of another client may not move at all: its unit is not the one that changes
        if not math.isfinite(share) or (moved != 0 and first.client not in (-1, *who)):
            share = math.inf
        shares.append(share)
    return shares


def _over_rounds(setup: Setup, name: str, seed: int) -> Finding:
    """Checks that clients which send all they can whenever they take part move the noise that is
    correlated over rounds by no more than they are charged for, after every round: the squared
    length of C (y - y') / S is at most the number of participations. Every client has a coordinate
    of its own."""
    claim = setup.claims.of(name)
    d = setup.release(name).dimension
    width = min(setup.sampler.n, d, 64, max(1, MOST_ELEMENTS // max(d, setup.steps)))

    def loud(release: str, step: int, cohort: Tensor) -> tuple[Tensor, Tensor]:
        if release != name:
            return silence(setup)(release, step, cohort)
        who = cohort[cohort < width]
        return 1e4 * claim.bound * torch.nn.functional.one_hot(who, d).float(), who

    moving, still = (
        played(setup, setup.open(seed), 0, setup.steps, sent)[name]
        for sent in (loud, silence(setup))
    )
    if not moving.releases:
        return skipped(f"sensitivity: rounds of {name}", "no step fits the budget")
    at = np.arange(width)
    if claim.form == "symmetric":
        # the places of the diagonal among the coordinates of the upper triangle, row by row
        at = at * d - at * (at - 1) // 2
    change = (moving.values - still.values)[:, at] * claim.denominator / claim.sensitivity
    # the mechanism adds independent noise to C y, so its sensitivity is the length of C (y - y')
    moved = (decorrelated(change, claim) ** 2).cumsum(0)
    charged = moving.drawn[:, :width].cumsum(0)
    share = np.divide(moved, charged, out=np.where(moved > 1e-12, math.inf, 0.0), where=charged > 0)
    detail = (
        f"largest squared change over participations, of {width} clients after each of "
        f"{len(change)} rounds"
    )
    return too_large(f"sensitivity: rounds of {name}", float(share.max()), 1.0, detail)


# Exact sums


def exact_sums(setup: Setup, seed: int, coins: np.random.Generator) -> list[Finding]:
    """Checks the sums of all releases of vectors of clients."""
    names = [
        name
        for name in setup.claims.names
        if setup.gradients is None and setup.claims.of(name).form == "vector"
    ]
    if not names:
        return [skipped("exact sum", "no vectors of clients are clipped and summed")]
    return [_exact_sum(setup, name, setup.claims.of(name), seed, coins) for name in names]


def _released(setup: Setup, name: str, seed: int, rows: Tensor, clients: np.ndarray) -> np.ndarray:
    """Returns the released sum of ``rows`` (k, D) of the first of ``clients``, which are the
    cohort."""

    def sent(release: str, step: int, cohort: Tensor) -> tuple[Tensor, Tensor]:
        if release == name:
            return (rows, torch.from_numpy(clients)[: len(rows)])
        return silence(setup)(release, 1, cohort)

    (made,) = played(setup, setup.open(seed), 0, 1, sent, who=clients)[name].releases
    return made.value * made.claim.denominator


def _exact_sum(
    setup: Setup, name: str, claim: Claim, seed: int, coins: np.random.Generator
) -> Finding:
    """Checks, without noise, that a row within the clip counts as its coordinates truncated toward
    zero to the public grid of sums, so never as more, and that rows in another order give the same
    bits."""
    dimension = setup.release(name).dimension
    n = setup.sampler.n
    if claim.shares is None:
        assert isinstance(setup.privacy, ClientPrivacy)
        quiet = replace(
            setup.privacy,
            clip_norm=claim.bound,
            epsilon=math.inf,
            noise_multiplier=None,
            bands=None,
        )
        setup = replace(setup, privacy=quiet)
        # computed here again: n rows within the bound add up exactly in the 53 bits of float64
        width = 2.0 ** (math.ceil(math.log2(claim.bound)) + math.ceil(math.log2(n)) - 53)
    else:
        # shares of the noise are part of the sum, and the same with equal seeds
        width = claim.width
    setup = setup.seeded()
    clients = np.sort(coins.permutation(n)[: _most_clients(setup, dimension)])
    # between cells on both sides of the middle, where rounding and truncation differ
    cells = coins.integers(-1000, 1000, dimension) + coins.choice([0.25, 0.75], dimension)
    sums = [
        _released(setup, name, seed, torch.from_numpy(each * width)[None], clients)
        for each in (cells, 0 * cells)
    ]
    counted = (sums[0] - sums[1]) / width
    wrong = int((np.abs(counted - np.trunc(cells)) > 1e-6).sum())
    # automatic clipping lengthens short gradients, which are then other cells
    if isinstance(setup.privacy, RecordPrivacy) and setup.privacy.stability is not None:
        wrong = 0
    rows = torch.from_numpy(coins.standard_normal((len(clients), dimension)))
    # rows of very different length, whose floating-point sums depend most on their order
    rows *= claim.bound * torch.logspace(-6, 2, len(clients), dtype=torch.float64)[:, None]
    order = coins.permutation(len(clients))
    first = _released(setup, name, seed, rows, clients)
    second = _released(setup, name, seed, rows[order], clients[order])
    differ = int((first != second).sum())
    detail = (
        f"{wrong} of {dimension} coordinates are not truncated to the grid, {differ} depend "
        "on the order of rows"
    )
    return exact(f"exact sum: {name}", wrong + differ, detail)


# Multiples of rows


def _of_factors(
    setup: Setup, x: Sequence[Tensor], seed: int, coins: np.random.Generator
) -> Finding:
    """Checks that one record replaced, its row and its factor, moves its client's release by at
    most 2 C / (q n_i), if gradients are multiples of rows ``x`` that the channel has.

    The other records are random, in every second trial along one direction; in two of three
    activations their factors are not numbers, or too large.
    """
    shares = list[tuple[float, str]]()
    few = np.arange(len(x))[:CLIENTS]
    for index, row in enumerate(adversaries(setup.records.dimension, torch.float64)):
        places = [int(coins.integers(max(1, len(rows)))) for rows in x]
        crowd = [
            coins.standard_normal((len(rows), 1 if index % 2 else rows.shape[1])) for rows in x
        ]
        factors = [coins.standard_normal((3, len(rows))) for rows in x]
        for each in factors:
            each[1:] = np.array([[math.nan], [math.inf if index % 2 else 1e9]])
        pair = []
        for side, own in enumerate((row, -row if index % 3 else torch.ones_like(row))):
            rows = [torch.from_numpy(each).repeat(1, len(row) // each.shape[1]) for each in crowd]
            for k, place in enumerate(places):
                rows[k][place : place + 1] = own
                factors[k][:, place : place + 1] = _FACTORS[(k + index) % len(_FACTORS)][side]
            sent = partial(_scaled, [each.copy() for each in factors])
            pair.append(
                played(setup, setup.open(seed + index, x=rows), 0, 7 * CLIENTS, sent, who=few)[
                    GRADIENTS
                ]
            )
        for client, share in zip(
            pair[0].clients.tolist(), _shares(pair[0], pair[1], few), strict=True
        ):
            words = (
                f"row {index}, factors {_FACTORS[(client + index) % len(_FACTORS)]} of "
                f"{setup.name(client)}"
            )
            shares.append((share, words))
    return _largest("sensitivity: factors of gradients", shares)


def _scaled(factors: Sequence[np.ndarray], name: str, step: int, clients: Tensor) -> np.ndarray:
    """Returns the factors of the client that acts, of (3, n_i) those of every third activation."""
    return factors[int(clients[0])][step % 3]
