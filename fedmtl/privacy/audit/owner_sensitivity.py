"""Check 3 of owners who act one at a time: one record replaced moves a release by at most its sensitivity."""

from __future__ import annotations

import math

import numpy as np
import torch
from torch import Tensor

from ...errors import PrivacyError
from ..owner_channel import OwnerChannel
from .findings import Finding, exact, skipped, too_large
from .owner_setup import OWNERS, OwnerClaims, OwnerSetup, turns


def adversarial_rows(dimension: int) -> list[Tensor]:
    """Rows (D,) float64 of one record at its worst."""
    axis, mixed = torch.zeros(dimension, dtype=torch.float64), torch.zeros(dimension, dtype=torch.float64)
    axis[dimension // 2] = 1.0
    special = torch.tensor([1e4, math.nan, math.inf, -math.inf, 1e300, 0.0], dtype=torch.float64)
    mixed[:6] = special[:dimension]
    values = (1.0, 1e4, math.nan, math.inf, 1e300, 1e-120, 1e-200, 0.0)
    return [axis, *(torch.full((dimension,), value, dtype=torch.float64) for value in values), mixed]


_FACTORS = (
    (1e9, -1e9),
    (math.nan, 1e9),
    (math.inf, -1e9),
    (1e300, -1e300),
    (1e-3, 1e300),
    (0.0, -math.inf),
    (1e-3, -1e-3),
)


def owner_sensitivity(setup: OwnerSetup, claims: OwnerClaims, seed: int, coins: np.random.Generator) -> Finding:
    """One record replaced, its row and its factor, moves its owner's release by at most 2 C / (q n_i).

    The other records pull one way, at random, or have factors that are not numbers.
    """
    setup, d = setup.seeded(), setup.dimension
    worst, where, cases = 0.0, "", 0
    for index, row in enumerate(adversarial_rows(d)):
        places = [int(coins.integers(max(1, n))) for n in setup.counts]
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
        pair = setup.open(seed + index, base), setup.open(seed + index, other)
        few = np.where(np.arange(len(setup.counts)) < OWNERS, pair[0].caps, 0)
        order = turns(np.where(np.array(setup.counts) > 0, few, 0), len(_FACTORS) * OWNERS)
        if not order.size:
            return skipped("sensitivity: gradients", "no owner may answer")
        uses, present = np.zeros(len(setup.counts), dtype=np.int64), setup.present(order, np.arange(len(order)))
        for channel in pair:
            channel.begin(0, torch.from_numpy(order)[None])
        for step, owner in enumerate(order.tolist()):
            case, n, claim = int(uses[owner]) + index + owner, setup.counts[owner], claims.answer(owner)
            uses[owner] += 1
            crowd = torch.from_numpy(coins.standard_normal(n)) if case % 3 == 0 else torch.full((n,), 1e9).double()
            crowd = torch.full_like(crowd, math.nan) if case % 3 == 1 else crowd
            values = []
            for channel, rows, factor in zip(pair, (base, other), _FACTORS[case % len(_FACTORS)], strict=True):
                crowd[places[owner]] = factor
                values.append(_given(channel, setup, rows[owner], crowd.clone()[None], case).numpy())
            with np.errstate(invalid="ignore", over="ignore"):
                moved = float(np.linalg.norm((values[0] - values[1])[0], ord=1 if claim.norm == "l1" else 2))
            share = moved * claim.denominator * (present[step] / n) / claim.sensitivity
            cases += 1
            if not share <= worst:
                worst = share if math.isfinite(share) else math.inf
                where = f"row {index}, factors {_FACTORS[case % len(_FACTORS)]} of owner {setup.ids[owner]!r}"
    detail = f"largest change over 2 C / n, in {cases} pairs of neighbours" + (f"; {where}" if worst > 1 else "")
    return too_large("sensitivity: gradients", worst, 1.0, detail)


def _given(channel: OwnerChannel, setup: OwnerSetup, rows: Tensor, factors: Tensor, case: int) -> Tensor:
    """A release of ``factors`` (1, n_i) times ``rows`` (n_i, D), by all ways out."""
    if not setup.linear or case % 4 > 1:
        gradients = factors[..., None] * rows
        if case % 2:
            return channel.release_rows(lambda owner, where: gradients)
        return channel.release_rows_run(1, lambda owner, which, where: gradients)[0]
    if case % 2:
        return channel.release(lambda owner, where: factors)
    return channel.release_run(1, lambda owner, which, where: factors)[0]


def bounded_sensitivity(setup: OwnerSetup, claims: OwnerClaims, seed: int) -> Finding:
    """Means that the domain is said to bound are refused beyond C, and are released within it; all of them are refused
    where answers take a subsample of the records."""
    channel, wrong = setup.open(seed), []
    order = turns(np.minimum(channel.caps, 1), OWNERS)
    order = order[setup.present(order, np.zeros_like(order)) > 0]
    channel.begin(0, torch.from_numpy(order)[None])
    for owner in order.tolist():
        claim = claims.answer(owner)
        within = torch.full((1, setup.dimension), 1.0, dtype=torch.float64)
        within *= claim.bound / torch.linalg.vector_norm(within, ord=1 if claim.norm == "l1" else 2)
        for factor in (1.001, -2.0, math.nan, math.inf, 1e300):
            if _bounded(channel, within * factor):
                wrong.append(f"{factor:g} times C of owner {setup.ids[owner]!r} was released")
                break
        else:
            released = _bounded(channel, within)
            if released and claim.sampled is not None:
                wrong.append(f"a mean over all records of {setup.ids[owner]!r}, charged as a subsample, was released")
            elif not released and claim.sampled is None:
                wrong.append(f"a mean within C of owner {setup.ids[owner]!r} was refused")
    return exact("sensitivity: bounded means", len(wrong), "; ".join(wrong[:3]) or "means beyond C are refused")


def _bounded(channel: OwnerChannel, mean: Tensor) -> bool:
    try:
        channel.release_bounded(lambda owner, where: mean)
    except PrivacyError:
        return False
    return True
