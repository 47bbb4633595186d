"""In secure mode, and with noise in whole numbers, every released number is a whole multiple of a public width.

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

from ..channel import FIRST, GRADIENT
from ..sums import ClientVectors, RecordGradients
from .findings import Finding, exact, skipped
from .play import coordinates, local_of, rounds, turns
from .rows import row_claims, sent_rows
from .setup import CLIENTS, MOST_ELEMENTS, Claim, Claims, Setup, count_std, expected_cohort, whole_width
from .statistics import auditor

_STEPS, _LOCAL = 4, 2
_ROUNDING = 2.0**-49  # of a product, a division and the scaling of an off-diagonal entry

Parts = Iterator[tuple[str, np.ndarray, float]]
"""Name, numbers in units of the sum (any shape), width."""


def width_of(bound: float, norm: str, size: int, scale: float) -> float:
    """Return the largest power of two that is at most C 2^-21 over the spread of a cell, and 2^-20 of the noise."""
    spread = float(size) if norm == "l1" else math.sqrt(size)
    return 2.0 ** math.floor(math.log2(min(bound / spread * 2.0**-21, scale * 2.0**-20)))


def deviation(claim: Claim, size: int) -> float:
    """Return the root mean square of a noised coordinate at sensitivity 1."""
    return claim.multiplier * {"gaussian": 1.0, "laplace": math.sqrt(2.0), "knorm": math.sqrt(size + 1.0)}[claim.kind]


def on_grid(parts: Parts) -> list[Finding]:
    """Return one finding for every name: numbers off the grid, and grids of another width."""
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


def on_public_grids(setup: Setup, claims: Claims, seed: int) -> list[Finding]:
    """Check every release of a run, the count of adaptive clipping, and rows with noise of their own."""
    if not setup.secure and (setup.gradients is not None or claims.of(claims.names[0]).apart is None):
        return [skipped("grid", "seeded noise is not rounded")]
    coins = auditor(seed, "grid")
    if setup.gradients is not None:
        return on_grid((_of_activations if setup.one_at_a_time else _of_local_steps)(setup, claims, seed, coins))
    findings = on_grid(_of_rows(setup, claims, seed, coins))
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


def _of_rows(setup: Setup, claims: Claims, seed: int, coins: np.random.Generator) -> Parts:
    channel, adaptive, m = setup.open(seed), setup.adaptive, expected_cohort(setup.sampler)
    noted: list[tuple[int, str, torch.Tensor]] = []
    channel.record = noted
    growth = dict.fromkeys(claims.names, 1.0)
    for step, ranks in rounds(setup, channel, stop=min(_STEPS, setup.steps)):
        for name in claims.names:
            claim = claims.of(name, use=channel.account.steps_charged - 1 if setup.uses_differ else 0)
            dimension = setup.release(name).dimension
            few = ranks[: max(1, MOST_ELEMENTS // dimension)]
            rows = _loud(coins, dimension)(step, len(few)) * 1e-2 * claim.bound
            value = coordinates(channel.release(name, rows, few).numpy(), claim.form)
            one = claim.bound if claim.form == "vector" else claim.bound**2
            scale = deviation(claim, claim.size) * claim.sensitivity
            norm = "l1" if claim.kind == "laplace" else "l2"
            if claim.apart is not None:
                yield name, value * m, whole_width(claim, setup.sampler.n)
                continue
            yield name, value * m, width_of(one * growth[name], norm, claim.size, scale * growth[name])
            if adaptive is None:
                continue
            (count,) = [float(v) for at, key, v in noted if (at, key) == (step, f"{name}/count")]
            moves = 1.0 if claim.relation == "replace" else 0.5
            yield f"{name}/count", np.array([count * m]), width_of(moves, "l2", 1, count_std(adaptive, setup.sampler))
            growth[name] *= math.exp(-adaptive.lr * (count + 0.5 - adaptive.quantile))


def _of_local_steps(setup: Setup, claims: Claims, seed: int, coins: np.random.Generator) -> Parts:
    d, channel = setup.records.dimension, setup.open(seed)
    for step, everybody in rounds(setup, channel, stop=min(_STEPS, setup.steps)):
        clients = everybody[: min(CLIENTS, max(1, MOST_ELEMENTS // d))]
        local = local_of(channel)
        for index in range(_LOCAL):
            active = clients[local.steps(clients) > index]
            if not len(active):
                break
            rows = _loud(coins, d)(step, len(active))
            value = local.release(active, index, [(rows, torch.arange(len(active)))]).cpu().numpy()
            for row, client in zip(value, active.tolist(), strict=True):
                claim = claims.of(GRADIENT, client)
                width = width_of(claim.bound, claim.norm, d, claim.multiplier * claim.bound)
                yield "gradients", row * claim.denominator, width


def _of_activations(setup: Setup, claims: Claims, seed: int, coins: np.random.Generator) -> Parts:
    n, d, small = len(setup.sizes), setup.records.dimension, 1e-3
    message = RecordGradients(
        lambda k, which, where: torch.full((1, int(setup.sizes[k]), d), small, dtype=torch.float64)
    )
    for other in range(seed, seed + 1 + 64 // (d * max(1, n))):  # first releases are few
        channel = setup.open(other)
        if setup.first is not None:
            vectors = ClientVectors(lambda client: torch.full((d,), small, dtype=torch.float64))
            value = channel.release(FIRST, vectors).numpy()[0]
            for k in range(n):
                if claims.starts(k):
                    claim, bound = claims.of(FIRST, k), float(setup.first.sensitivity[k])
                    # the law is at scale 1, and its scale, not its deviation, sets the width
                    yield "first releases", value[k], width_of(bound, "l2", d, claim.multiplier * claim.bound)
        order = turns(np.minimum(channel.caps, 4), 4 * CLIENTS)
        present = setup.present(order, np.arange(len(order)))
        channel.begin(0, torch.from_numpy(order)[None])
        uses: dict[int, int] = {}
        for client, there in zip(order.tolist(), present.tolist(), strict=True):
            use = uses[client] = uses.get(client, -1) + int(there > 0)
            claim = claims.of(GRADIENT, client, max(use, 0))
            value = channel.release(GRADIENT, message).numpy()
            if there:
                width = width_of(claim.bound, claim.norm, d, claim.multiplier * claim.sensitivity)
                yield "gradients", value * (claim.denominator * there / setup.sizes[client]), width
