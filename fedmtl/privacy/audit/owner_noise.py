"""Checks 1 and 2 of owners who act one at a time: the law of their noise and its freshness."""

from __future__ import annotations

import math
from collections.abc import Callable
from contextlib import closing
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from ...errors import BudgetExhausted
from ..owner_channel import OwnerChannel
from .findings import Finding, low_p, skipped
from .noise import fresh_between, fresh_steps, fresh_within, noise_law, standardized
from .owner_setup import ACTIVATIONS, OwnerClaims, OwnerSetup, turns
from .statistics import energy_p, seeds

_ROWS = 1 << 20  # numbers of per-record gradients given to a channel at once, at most


@dataclass(frozen=True, eq=False)
class Silent:
    """Releases of owners whose records have zero gradients, or factors that are not numbers.

    Attributes:
        owners, uses, present: (T,) who answers, after how many answers of its own, with how many records.
        values: (T, R, D) float64.
    """

    owners: np.ndarray
    uses: np.ndarray
    present: np.ndarray
    values: np.ndarray

    def units(self, setup: OwnerSetup, claims: OwnerClaims, replicate: int = 0) -> np.ndarray:
        """(T, D) numbers that are i.i.d. N(0, 1) under the claims."""
        values, out = self.values[:, replicate].copy(), np.empty_like(self.values[:, replicate])
        for row, (owner, use, n) in enumerate(zip(self.owners, self.uses, self.present, strict=True)):
            louder = claims.answer(int(owner), int(use)).multiplier / claims.answer(int(owner)).multiplier
            values[row] *= n / setup.counts[owner] / louder
        for owner in np.unique(self.owners).tolist():
            out[self.owners == owner] = standardized(values[self.owners == owner], claims.answer(owner))
        return out


def silent(
    channel: OwnerChannel,
    setup: OwnerSetup,
    start: int,
    stop: int,
    block: int | None = None,
    who: np.ndarray | None = None,
) -> Silent:
    """Play activations in which nothing is there to be seen but noise.

    Activations before ``start`` happen where they are not charged yet, and are left out. They come in blocks of
    ``block`` activations, or None for uneven ones; owners act in turn up to their caps, all or those of ``who`` (n,).
    Activations without records are left out; fewer are played where the caps end.
    """
    order = turns(channel.caps if who is None else np.where(who, channel.caps, 0), stop)
    present = setup.present(order, np.arange(len(order)))
    at = min(start, _charged(channel, present))
    channel.start(at)
    uses = channel.account.uses[0].copy()
    values: list[np.ndarray] = [np.zeros((0, channel.replicates, setup.dimension))]
    first = at
    while at < len(order):
        length = min(len(order) - at, block or 1 + at * 7 % 61)
        acting = torch.from_numpy(order[at : at + length])
        try:
            channel.begin(at, acting.expand(channel.replicates, -1))
        except BudgetExhausted:
            break
        values.append(_nothing(channel, setup, length, math.nan if at % 2 else 0.0))
        at += length
    number = np.zeros(at - first, dtype=np.int64)
    for row, owner in enumerate(order[first:at].tolist()):
        number[row] = uses[owner]
        uses[owner] += int(present[first + row] > 0)
    kept = np.flatnonzero((present[first:at] > 0) & (np.arange(first, at) >= start))
    return Silent(order[first:at][kept], number[kept], present[first:at][kept], np.concatenate(values)[kept])


def _charged(channel: OwnerChannel, present: np.ndarray) -> int:
    """Activations that an earlier session charged: as many as its answers take, with those of nobody between."""
    answers = int(channel.account.uses[0].sum())
    return 0 if answers == 0 else int(np.searchsorted(np.cumsum(present > 0), answers)) + 1


def no_gradients(setup: OwnerSetup, factor: float = 0.0) -> Callable[..., Tensor]:
    """Factors of records whose gradients are all zero (or not a number)."""

    def scales(owner: int, *where: Tensor) -> Tensor:
        return torch.full((len(where[-1]), setup.counts[owner]), factor, dtype=torch.float64)

    return scales


def no_rows(setup: OwnerSetup, factor: float = 0.0) -> Callable[..., Tensor]:
    """As :func:`no_gradients`, the gradients themselves."""

    def rows(owner: int, *where: Tensor) -> Tensor:
        shape = (len(where[-1]), setup.counts[owner], setup.dimension)
        return torch.full((1, 1, 1), factor, dtype=torch.float64).expand(shape)

    return rows


def _no_means(setup: OwnerSetup) -> Callable[[int, Tensor], Tensor]:
    """As :func:`no_gradients`, the means of gradients that the domain bounds."""

    def means(owner: int, where: Tensor) -> Tensor:
        return torch.zeros(len(where), setup.dimension, dtype=torch.float64)

    return means


def _nothing(channel: OwnerChannel, setup: OwnerSetup, count: int, factor: float) -> np.ndarray:
    """All ways out."""
    if not channel.participation.sampled and count % 5 == 3:
        return torch.stack([channel.release_bounded(_no_means(setup)) for _ in range(count)]).numpy()
    small = max(setup.counts) * setup.dimension * count <= _ROWS
    if not setup.linear or (small and count % 4 > 1):
        rows = no_rows(setup, factor)
        if count % 2 or not small:
            return torch.stack([channel.release_rows(rows) for _ in range(count)]).numpy()
        return channel.release_rows_run(count, rows).numpy()
    scales = no_gradients(setup, factor)
    if count % 2:
        return torch.stack([channel.release(scales) for _ in range(count)]).numpy()
    return channel.release_run(count, scales).numpy()


def owner_noise(
    setup: OwnerSetup, claims: OwnerClaims, channel: OwnerChannel, start: int, stop: int
) -> dict[str, np.ndarray]:
    """Standardized noise (T, D) of activations ``start`` to ``stop``, for the checks of freshness."""
    return {"gradients": silent(channel, setup, start, stop).units(setup, claims)}


def owner_noise_law(setup: OwnerSetup, claims: OwnerClaims, seed: int, wanted: int, level: float) -> list[Finding]:
    """The tests of :func:`~fedmtl.privacy.audit.noise.noise_law`, and the total of each owner; of first releases too.

    Args:
        setup, claims, seed: of the run.
        wanted: numbers of noise, at least, from up to 50 channels.
        level: of each finding.
    """
    kept, d, more = [], setup.dimension, wanted
    for other in seeds(seed, "noise/owners", 50):
        played = silent(setup.open(other), setup, 0, min(ACTIVATIONS, -(-more // d)))
        kept.append((played.owners, played.units(setup, claims)))
        more -= max(d, played.values.size)
        if more <= 0:
            break
    who, noise = (np.concatenate(parts) for parts in zip(*kept, strict=True))
    findings = _laws("gradients", setup, who, noise, level)
    if setup.first is not None:
        findings += _laws("first releases", setup, *_first_noise(setup, claims, seed, wanted), level)
    return findings


def _laws(name: str, setup: OwnerSetup, who: np.ndarray, noise: np.ndarray, level: float) -> list[Finding]:
    if not noise.size:
        return [skipped(f"noise law: {name}", "no owner may answer")]
    d = setup.dimension
    parts = [(i, i + 1) for i in range(d)] if 1 < d <= 64 else [(0, d)]
    acting = np.unique(who)
    with np.errstate(over="ignore", invalid="ignore"):
        energies = np.array([(noise[who == k] ** 2).sum() for k in acting])
    sizes = np.array([(who == k).sum() * d for k in acting])
    p_values = energy_p(energies, sizes)
    worst = int(p_values.argmin())
    detail = (
        f"owner {setup.ids[acting[worst]]!r} has {math.sqrt(max(energies[worst] / sizes[worst], 0)):.4g} of the "
        f"claimed deviation, {sizes[worst]} numbers"
    )
    by_owner = low_p(f"noise law: owners of {name}", min(1.0, float(p_values[worst]) * len(acting)), level, detail)
    return [*noise_law(name, noise, parts, level), by_owner]


def _first_noise(setup: OwnerSetup, claims: OwnerClaims, seed: int, wanted: int) -> tuple[np.ndarray, np.ndarray]:
    """First releases of zero vectors, from up to 50 channels: owners (T,), and standardized noise (T, D)."""
    charged = [(k, claim) for k in range(len(claims)) if (claim := claims.first(k)) is not None]
    found = [np.zeros((0, setup.dimension))]
    for other in seeds(seed, "noise/first", 50 if charged else 0):
        value = setup.open(other).release_first(lambda owner: torch.zeros(setup.dimension)).numpy()[0]
        found += [standardized(value[k : k + 1], claim) for k, claim in charged]
        if sum(part.size for part in found) >= wanted:
            break
    noise = np.concatenate(found)
    return np.resize(np.array([k for k, _ in charged], dtype=np.int64), len(noise)), noise


def owner_freshness(setup: OwnerSetup, claims: OwnerClaims, seed: int) -> list[Finding]:
    """No two activations, owners or repetitions share noise, and no noise repeats itself at any lag."""
    channel = setup.open(seed)
    n, d = len(setup.ids), setup.dimension
    who = (channel.caps > 0) & (setup.present(np.arange(n), np.zeros(n, dtype=np.int64)) > 0)
    acting, uses = int(who.sum()), int(min(channel.caps[who], default=0))
    uses = min(uses, max(1, ACTIVATIONS // max(1, acting)))
    if not acting:
        return [skipped("freshness: gradients", "no owner may answer from the start")]
    noise = silent(channel, setup, 0, acting * uses, acting, who).units(setup, claims)  # in blocks in which all act
    cube = noise.reshape(uses, acting, d)
    findings = [
        replace(fresh_steps("", rows), check=f"freshness: {name} of gradients")
        for name, rows in (("activations", cube.reshape(uses, -1)), ("owners", cube.swapaxes(0, 1).reshape(acting, -1)))
    ]
    findings += fresh_within("gradients", noise.reshape(1, -1), [(0, noise.size)])
    if setup.first is not None:
        _, noise = _first_noise(setup, claims, seed, 10 * n * d)
        findings += fresh_within("first releases", noise.reshape(1, -1), [(0, noise.size)])
    if setup.secure:
        return findings
    with closing(setup.open(seed, replicates=2)) as both:
        played = silent(both, setup, 0, acting * uses, None, who)
    one, two = (played.units(setup, claims, r) for r in range(2))
    return [*findings, fresh_between("freshness: repetitions of gradients", one, two)]
