"""Check 3, deterministic: with equal noise, the releases of neighbours differ by at most S / m."""

from __future__ import annotations

import math

import numpy as np
import torch
from torch import Tensor

from .findings import Finding, too_large
from .setup import Claim, Setup, coordinates

_MOST_ELEMENTS = 1 << 23
_EVERY_CLIENT = 64


def adversaries(dimension: int) -> list[Tensor]:
    """Rows (D,) of one client at its worst, float32."""
    whole = [torch.full((dimension,), value) for value in (1e4, math.nan, math.inf, 0.0, 3e38, -3e38)]
    special = torch.tensor([1e4, math.nan, math.inf, -math.inf, 3e38, 0.0])
    mixed = torch.zeros(dimension)
    mixed[:6] = special[:dimension]
    large, one = torch.zeros(dimension), torch.zeros(dimension)
    large[0], large[-1] = 3e38, -3e38
    one[dimension // 2] = 1e4
    return [*whole, mixed, large, one]


def sensitivity(setup: Setup, claims: dict[str, Claim], seed: int, coins: np.random.Generator) -> list[Finding]:
    """Random and aligned cohorts with and without an adversary, and every client of a cohort as the adversary.

    Add/remove: the adversary's row is there or is missing. Replace: it is there, or its opposite is.
    """
    return [_of_release(setup.seeded(), name, claim, seed, coins) for name, claim in claims.items()]


def _of_release(setup: Setup, name: str, claim: Claim, seed: int, coins: np.random.Generator) -> Finding:
    dimension = next(plan.dimension for plan in setup.plans if plan.name == name)
    count = max(2, min(256, _MOST_ELEMENTS // dimension))
    game = _Game(setup, name, claim, count)
    direction = torch.nn.functional.normalize(torch.ones(dimension), dim=0)
    worst, where, step, cases = 0.0, "", 0, 0

    def judge(value: float, text: str) -> None:
        nonlocal worst, where, cases
        cases += 1
        if not value <= worst:
            worst, where = (value if math.isfinite(value) else math.inf), text

    for index, adversary in enumerate([*adversaries(dimension), -1e4 * direction]):
        for crowd in ("random", "aligned"):
            ranks, step = game.cohort(seed, step)
            rows = 1e2 * direction.repeat(len(ranks), 1)
            if crowd == "random":
                rows = torch.from_numpy(coins.standard_normal((len(ranks), dimension)).astype(np.float32))
            place = int(coins.integers(len(ranks)))
            judge(game.moved(seed, step, ranks, rows, place, adversary), f"adversary {index} in a {crowd} cohort")
    ranks, step = game.cohort(seed + 1, 0)
    chosen = coins.permutation(len(ranks))[:_EVERY_CLIENT]
    for place in chosen.tolist():
        rows = torch.zeros(len(ranks), dimension)
        judge(game.moved(seed + 1, step, ranks, rows, place, -1e4 * direction), f"client of rank {int(ranks[place])}")
    detail = f"largest change over S / m, in {claim.norm} norm, {cases} pairs of neighbours"
    return too_large(f"sensitivity: {name}", worst, 1.0, detail + (f"; {where}" if worst > 1 else ""))


class _Game:
    """Neighbouring cohorts through two channels with the same noise."""

    def __init__(self, setup: Setup, name: str, claim: Claim, count: int) -> None:
        self.setup, self.name, self.claim, self.count = setup, name, claim, count

    def cohort(self, seed: int, step: int) -> tuple[Tensor, int]:
        """The next cohort that is not empty, and its step."""
        channel = self.setup.open(seed)
        channel.start(0)
        for later in range(step + 1, step + 10_000):
            ranks = channel.draw(later)
            if len(ranks):
                return ranks[: self.count], later
        raise AssertionError("no client was drawn in 10,000 steps")

    def moved(self, seed: int, step: int, ranks: Tensor, rows: Tensor, place: int, adversary: Tensor) -> float:
        """Norm of the difference of the two releases over S / m; infinite if a release is not finite."""
        present = rows.clone()
        present[place] = adversary
        if self.claim.relation == "replace":
            other, owners = rows.clone(), ranks
            other[place] = self.opposite(adversary)
        else:
            keep = torch.arange(len(ranks)) != place
            other, owners = rows[keep], ranks[keep]
        change = self._release(seed, step, present, ranks) - self._release(seed, step, other, owners)
        norm = float(np.linalg.norm(change, ord=1 if self.claim.norm == "l1" else 2))
        return norm * self.claim.denominator / self.claim.sensitivity

    def opposite(self, adversary: Tensor) -> Tensor:
        """The row farthest from the adversary's: its negative, or for outer products an orthogonal one."""
        if self.claim.form == "vector":
            return -adversary
        return adversary.roll(1) * torch.where(torch.arange(len(adversary)) % 2 == 0, 1.0, -1.0)

    def _release(self, seed: int, step: int, rows: Tensor, ranks: Tensor) -> np.ndarray:
        channel = self.setup.open(seed)
        channel.start(0)
        channel.begin(step, channel.draw(step))
        return coordinates(channel.release(self.name, rows, ranks).numpy(), self.claim.form)
