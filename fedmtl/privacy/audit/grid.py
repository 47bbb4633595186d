"""In secure mode every released number is a whole multiple of a public width.

The width follows from public constants alone (the clip norm, the noise that is charged, the dimension, the public
denominator), so the least significant bits say nothing of the sum that was noised. It is computed here anew, by the
rule that :func:`~fedmtl.privacy.noise.grid.grid_width` documents. Released are numbers w k / m rounded once to
doubles; k is recovered by rounding, and a plain sum of doubles is not a multiple but for about one number in a million.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import replace

import numpy as np
import torch

from ...errors import BudgetExhausted
from .findings import Finding, exact, skipped
from .owner_setup import OwnerClaims, OwnerSetup, turns
from .records import OwnerClaims as RecordClaims
from .records import owners_of
from .rows import row_claims, sent_rows
from .setup import Claim, Setup, coordinates, count_std, expected_cohort, multipliers_of, uses_differ

_STEPS, _OWNERS, _LOCAL = 4, 12, 2
_ROUNDING = 2.0**-49  # of a product, a division and the scaling of an off-diagonal entry

Parts = Iterator[tuple[str, np.ndarray, float]]
"""Name, numbers in units of the sum (any shape), width."""


def width_of(bound: float, norm: str, size: int, scale: float) -> float:
    """The largest power of two that is at most C 2^-21 over the spread of a cell, and 2^-20 of the noise."""
    spread = float(size) if norm == "l1" else math.sqrt(size)
    return 2.0 ** math.floor(math.log2(min(bound / spread * 2.0**-21, scale * 2.0**-20)))


def deviation(claim: Claim, size: int, multiplier: float | None = None) -> float:
    """Root mean square of a noised coordinate at sensitivity 1."""
    z = claim.multiplier if multiplier is None else multiplier
    return z * {"gaussian": 1.0, "laplace": math.sqrt(2.0), "knorm": math.sqrt(size + 1.0)}[claim.kind]


def on_grid(parts: Parts) -> list[Finding]:
    """One finding for every name: numbers off the grid, and grids of another width."""
    off: dict[str, int] = {}
    seen: dict[str, int] = {}
    odd: dict[str, int] = {}
    for name, values, width in parts:
        cells = values.ravel() / width
        nearest = np.rint(cells)
        usable = np.abs(cells) < 2.0**40  # beyond, doubles are too coarse to tell
        strays = ~(np.abs(cells - nearest) <= _ROUNDING * np.abs(cells)) & (usable | ~np.isfinite(cells))
        off[name] = off.get(name, 0) + int(strays.sum())
        seen[name] = seen.get(name, 0) + int(usable.sum())
        odd[name] = odd.get(name, 0) + int((nearest[usable] % 2 != 0).sum())
    findings = []
    for name, count in seen.items():
        check = f"grid: {name}"
        if count < 64:
            findings.append(skipped(check, f"only {count} numbers"))
            continue
        detail = f"{off[name]} of {count} numbers are no multiple of the public width"
        if not off[name] and not odd[name]:
            detail = f"all of {count} numbers are even multiples: the width is another one"
        findings.append(exact(check, off[name] + int(not odd[name]), detail))
    return findings


def channel_grid(setup: Setup, claims: dict[str, Claim], seed: int, coins: np.random.Generator) -> list[Finding]:
    """Of the releases of a run in rounds, with the count of adaptive clipping, and of rows with noise of their own."""
    if not setup.secure:
        return [skipped("grid", "seeded noise is not rounded")]
    findings = on_grid(_releases(setup, claims, seed, coins))
    hidden = replace(setup, rows=True)
    channel = hidden.open(seed)
    for name, claim in row_claims(hidden, channel).items():
        width = width_of(claim.bound, "l2", claim.size, deviation(claim, claim.size) * claim.sensitivity)
        rows = sent_rows(channel, name, _loud(coins, claim.size), start=0, stop=min(_STEPS, setup.steps))
        findings += on_grid(iter([(f"rows of {name}", rows, width)]))
    return findings


def _loud(coins: np.random.Generator, dimension: int) -> Callable[[int, int], torch.Tensor]:
    def rows(step: int, count: int) -> torch.Tensor:
        return torch.from_numpy(coins.standard_normal((count, dimension)).astype(np.float32))

    return rows


def _releases(setup: Setup, claims: dict[str, Claim], seed: int, coins: np.random.Generator) -> Parts:
    channel, adaptive, m = setup.open(seed), setup.adaptive, expected_cohort(setup.sampler)
    noted: list[tuple[int, str, torch.Tensor]] = []
    channel.record = noted
    growth = dict.fromkeys(claims, 1.0)
    for step in range(min(_STEPS, setup.steps)):
        ranks = channel.draw(step)
        try:
            channel.begin(step, ranks)
        except BudgetExhausted:
            return
        now = multipliers_of(setup, channel, channel.uses - 1) if uses_differ(setup) else {}
        for name, claim in claims.items():
            dimension = next(plan.dimension for plan in setup.plans if plan.name == name)
            few = ranks[: max(1, (1 << 22) // dimension)]
            rows = _loud(coins, dimension)(step, len(few)) * 1e-2 * claim.bound
            value = coordinates(channel.release(name, rows, few).numpy(), claim.form)
            one = claim.bound if claim.form == "vector" else claim.bound**2
            scale = deviation(claim, claim.size, now.get(name)) * claim.sensitivity
            norm = "l1" if claim.kind == "laplace" else "l2"
            yield name, value * m, width_of(one * growth[name], norm, claim.size, scale * growth[name])
            if adaptive is None:
                continue
            (count,) = [float(v) for at, key, v in noted if (at, key) == (step, f"{name}/count")]
            moves = 1.0 if claim.relation == "replace" else 0.5
            yield f"{name}/count", np.array([count * m]), width_of(moves, "l2", 1, count_std(adaptive, setup.sampler))
            growth[name] *= math.exp(-adaptive.lr * (count + 0.5 - adaptive.quantile))


def record_grid(setup: Setup, claims: RecordClaims, seed: int, coins: np.random.Generator) -> list[Finding]:
    """Of the gradients of single records: the owners of one call share the width of the least noise among them."""
    if not setup.secure:
        return [skipped("grid", "seeded noise is not rounded")]
    return on_grid(_gradients(setup, claims, seed, coins))


def _gradients(setup: Setup, claims: RecordClaims, seed: int, coins: np.random.Generator) -> Parts:
    owners, channel = owners_of(setup), setup.open(seed)
    assert channel.records is not None
    for step in range(min(_STEPS, setup.steps)):
        ranks = channel.draw(step)
        try:
            channel.begin(step, ranks)
        except BudgetExhausted:
            return
        clients = torch.argsort(owners.ranks)[ranks][: min(_OWNERS, max(1, (1 << 22) // owners.dimension))]
        for local in range(_LOCAL):
            active = clients[channel.records.steps(clients) > local]
            if not len(active):
                break
            place = torch.arange(len(active))
            rows = _loud(coins, owners.dimension)(step, len(active))
            value = channel.records.release(active, local, [(rows, place)]).cpu().numpy()
            some = [claims.claims[k] for k in active.tolist()]
            width = width_of(
                some[0].bound, some[0].norm, owners.dimension, min(one.multiplier * one.bound for one in some)
            )
            sums = np.array([one.denominator for one in some])[:, None]
            yield "gradients", value * sums, width


def owner_grid(setup: OwnerSetup, claims: OwnerClaims, seed: int) -> list[Finding]:
    """Of the answers of owners who act one at a time, and of first releases."""
    if not setup.secure:
        return [skipped("grid", "seeded noise is not rounded")]
    return on_grid(_answers(setup, claims, seed))


def _answers(setup: OwnerSetup, claims: OwnerClaims, seed: int) -> Parts:
    d = setup.dimension

    def small(owner: int, where: torch.Tensor) -> torch.Tensor:
        return torch.full((1, setup.counts[owner], d), 1e-3, dtype=torch.float64)

    for other in range(seed, seed + 1 + 64 // (d * max(1, len(claims)))):  # first releases are few
        channel = setup.open(other)
        first = setup.first
        if first is not None:
            value = channel.release_first(lambda k: torch.full((d,), 1e-3, dtype=torch.float64)).numpy()[0]
            for k in range(len(claims)):
                claim = claims.first(k)
                if claim is not None:
                    # the law is at scale 1, and its scale, not its deviation, sets the width
                    yield (
                        "first releases",
                        value[k],
                        width_of(float(first.sensitivity[k]), "l2", d, claim.multiplier * claim.bound),
                    )
        order = turns(np.minimum(channel.caps, 4), 4 * _OWNERS)
        present = setup.present(order, np.arange(len(order)))
        channel.begin(0, torch.from_numpy(order)[None])
        uses: dict[int, int] = {}
        for owner, n in zip(order.tolist(), present.tolist(), strict=True):
            use = uses[owner] = uses.get(owner, -1) + int(n > 0)
            claim = claims.answer(owner, max(use, 0))
            value = channel.release_rows(small).numpy()
            if n:
                scale = claim.multiplier * claim.sensitivity
                width = width_of(claim.bound, claim.norm, d, scale)
                yield "gradients", value * (claim.denominator * n / setup.counts[owner]), width
