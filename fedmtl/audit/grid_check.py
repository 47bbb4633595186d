"""In secure mode every released number is a whole multiple of a public width.

The width follows only from public constants (the clip norm, the noise that is charged, the
dimension, the public denominator), so the least significant bits say nothing of the sum that was
noised. :class:`.claim.Claim` computes it anew, by the rule that
:func:`~fedmtl.privacy.noise.grid.grid_width` documents. Released are numbers w k / m rounded once
to doubles; k is recovered by rounding, and a plain sum of doubles is not a multiple but for about
one number in a million.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from .findings import Finding, exact, skipped
from .play import played
from .setup import CLIENTS, MOST_ELEMENTS, Setup
from .statistics import auditor

_STEPS = 4
_LOCAL = 2
_FEWEST = 64  # numbers that are checked
_ROUNDING = 2.0**-49  # of a product, a division and the scaling of an off-diagonal entry


def on_public_grids(setup: Setup, seed: int) -> list[Finding]:
    """Checks releases of clients that contribute small vectors."""
    if not setup.secure:
        return [skipped("grid", "seeded noise is not rounded")]
    coins = auditor(seed, "grid")

    def loud(name: str, step: int, clients: Tensor) -> tuple[Tensor, Tensor]:
        d = setup.dimension(name)
        few = clients[: max(1, MOST_ELEMENTS // d)]
        rows = coins.standard_normal((len(few), d)) * 1e-2 * setup.privacy.initial_norm
        return torch.from_numpy(rows), few

    if setup.one_at_a_time:
        steps = _STEPS * CLIENTS
    else:
        steps = min(_STEPS, setup.steps)
    samples = played(setup, setup.open(seed), 0, steps, loud, local=_LOCAL)
    findings = []
    for name, sample in samples.items():
        scales = [each.claim.denominator / each.claim.width for each in sample.releases]
        findings.append(on_grid(name, sample.values * np.array(scales)[:, None]))
    return findings


def on_grid(name: str, cells: np.ndarray) -> Finding:
    """Checks sums in units of the public width: numbers off the grid, and grids of another
    width."""
    check = f"grid: {name}"
    nearest = np.rint(cells)
    usable = np.abs(cells) < 2.0**45  # beyond, doubles are too coarse to tell
    off = int(
        (
            ~(np.abs(cells - nearest) <= _ROUNDING * np.abs(cells)) & (usable | ~np.isfinite(cells))
        ).sum()
    )
    if usable.sum() < _FEWEST:
        return skipped(check, f"only {usable.sum()} numbers")
    even = not (nearest[usable] % 2).any()
    detail = f"{off} of {usable.sum()} numbers are no multiple of the public width"
    if not off and even:
        detail = f"all of {usable.sum()} numbers are even multiples: the width is another one"
    return exact(check, off + int(even), detail)
