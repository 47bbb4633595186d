"""Owners who act one at a time: the same checks on the releases of an :class:`~fedmtl.privacy.OwnerChannel`.

The claim on an owner is read off its own event and the public facts alone: the scale of its noise is 2 C z / n_i, where
z is of the event, C of the settings and n_i its number of records. Who acts when is public, so nothing is sampled.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ...errors import BudgetExhausted, PrivacyError
from ..owner_channel import OwnerChannel
from ..settings import RecordPrivacy
from .findings import Finding, exact, low_p, skipped, too_large
from .noise import fresh_between, fresh_steps, fresh_within, noise_law, standardized
from .setup import Claim, law_of
from .statistics import energy_p, seeds

Blocks = Callable[[int], Iterator[tuple[int, Tensor]]]
"""first activation -> (first activation, owners (1, S) int64) of every block of the run."""

OWNERS, ACTIVATIONS = 12, 2000
"""Owners examined one by one, and activations of one channel, at most."""


@dataclass(frozen=True, kw_only=True)
class OwnerSetup:
    """How a run opens its channel of owners, and the public facts.

    Args:
        privacy: the run's settings.
        x: (n_i, D) float64 rows of every owner, as the run gives them to the channel.
        counts: n_i, from the data and not from the channel.
        ids: of the owners.
        opening: (seed, privacy, rows or None for the run's own, ``ledger_path``, ``resume`` and ``replicates``) -> the
            channel as the run opens it, and the run's blocks.
    """

    privacy: RecordPrivacy
    x: tuple[Tensor, ...]
    counts: tuple[int, ...]
    ids: tuple[str, ...]
    opening: Callable[..., tuple[OwnerChannel, Blocks]]

    @property
    def secure(self) -> bool:
        """Whether the run takes its coins from the operating system."""
        return self.privacy.source == "secure"

    @property
    def dimension(self) -> int:
        """D."""
        return self.x[0].shape[1]

    @property
    def delta(self) -> float:
        """Of every epsilon."""
        return self.privacy.resolved_delta(sum(self.counts))

    def seeded(self) -> OwnerSetup:
        """The same with reproducible noise, so that two channels can share it."""
        return replace(self, privacy=replace(self.privacy, source="seeded"))

    def open_run(
        self,
        seed: int,
        rows: Sequence[Tensor] | None = None,
        *,
        ledger: Path | None = None,
        resume: bool = False,
        replicates: int = 1,
    ) -> tuple[OwnerChannel, Blocks]:
        """A channel of the run with another seed, and the run's blocks."""
        return self.opening(seed, self.privacy, rows, ledger_path=ledger, resume=resume, replicates=replicates)

    def open(self, seed: int, rows: Sequence[Tensor] | None = None, **options: Any) -> OwnerChannel:
        """The channel of :meth:`open_run`."""
        return self.open_run(seed, rows, **options)[0]


def channel_claims(setup: OwnerSetup, channel: OwnerChannel) -> tuple[Claim, ...] | None:
    """What the account charges each owner for; None without noise."""
    terms = channel.account.terms
    if terms is None:
        return None
    claims = []
    for owner, n in enumerate(setup.counts):
        charged = terms.answer(owner)
        kind, multiplier = law_of(charged.event)
        claims.append(
            Claim(
                kind=kind,
                multiplier=multiplier,
                bound=setup.privacy.initial_norm,
                relation="replace",
                norm="l1" if kind == "laplace" else "l2",
                size=setup.dimension,
                denominator=float(n),
                sampled=None,
                event=charged.event,
                accountant=charged.accountant,
                per_participation=True,
            )
        )
    return tuple(claims)


def turns(caps: np.ndarray, limit: int) -> np.ndarray:
    """The owners of the first ``limit`` activations at most, who act in turn until their caps are used up: (T,)."""
    kept, total, use = [np.zeros(0, dtype=np.int64)], 0, 0
    while total < limit and (acting := np.flatnonzero(caps > use)).size:
        kept.append(acting)
        total, use = total + acting.size, use + 1
    return np.concatenate(kept)[:limit]


# Noise


def silent(
    channel: OwnerChannel, setup: OwnerSetup, start: int, stop: int, block: int | None = None
) -> tuple[np.ndarray, np.ndarray]:
    """Releases of owners whose records have zero gradients, or factors that are not numbers.

    Activations before ``start`` happen where they are not charged yet, and are left out. They come in blocks of
    ``block`` activations, or None for uneven ones.

    Returns:
        owners (T,), and values (T, R, D) float64; fewer than ``stop - start`` where the caps end.
    """
    order = turns(channel.caps, stop)
    at = min(start, int(channel.account.uses[0].sum()))
    channel.start(at)
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
    found = np.concatenate(values)[max(0, start - first) :]
    return order[start:at], found


def no_gradients(setup: OwnerSetup, factor: float = 0.0) -> Callable[..., Tensor]:
    """Factors of records whose gradients are all zero (or not a number)."""

    def scales(owner: int, *where: Tensor) -> Tensor:
        return torch.full((len(where[-1]), setup.counts[owner]), factor, dtype=torch.float64)

    return scales


def _nothing(channel: OwnerChannel, setup: OwnerSetup, count: int, factor: float) -> np.ndarray:
    scales = no_gradients(setup, factor)
    if count % 2:  # both ways out
        return torch.stack([channel.release(scales) for _ in range(count)]).numpy()
    return channel.release_run(count, scales).numpy()


def owner_noise(
    setup: OwnerSetup, claims: Sequence[Claim], channel: OwnerChannel, start: int, stop: int
) -> dict[str, np.ndarray]:
    """Standardized noise (T, D) of activations ``start`` to ``stop``, for the checks of freshness."""
    owners, values = silent(channel, setup, start, stop)
    return {"gradients": _units(claims, owners, values[:, 0])}


def _units(claims: Sequence[Claim], owners: np.ndarray, values: np.ndarray) -> np.ndarray:
    out = np.empty_like(values)
    for owner in np.unique(owners).tolist():
        out[owners == owner] = standardized(values[owners == owner], claims[owner])
    return out


def owner_noise_law(setup: OwnerSetup, claims: Sequence[Claim], seed: int, wanted: int, level: float) -> list[Finding]:
    """The tests of :func:`~fedmtl.privacy.audit.noise.noise_law`, and the total of each owner.

    Args:
        setup, claims, seed: of the run.
        wanted: numbers of noise, at least, from up to 50 channels.
        level: of each finding.
    """
    kept, d = [], setup.dimension
    for other in seeds(seed, "noise/owners", 50):
        owners, values = silent(setup.open(other), setup, 0, min(ACTIVATIONS, -(-wanted // d)))
        kept.append((owners, _units(claims, owners, values[:, 0])))
        wanted -= max(d, values.size)
        if wanted <= 0:
            break
    who, noise = (np.concatenate(parts) for parts in zip(*kept, strict=True))
    if not noise.size:
        return [skipped("noise law: gradients", "no owner may answer")]
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
    by_owner = low_p("noise law: owners of gradients", min(1.0, float(p_values[worst]) * len(acting)), level, detail)
    return [*noise_law("gradients", noise, parts, level), by_owner]


def owner_freshness(setup: OwnerSetup, claims: Sequence[Claim], seed: int) -> list[Finding]:
    """No two activations, owners or repetitions share noise, and no noise repeats itself at any lag."""
    channel = setup.open(seed)
    caps, d = channel.caps, setup.dimension
    acting, uses = int((caps > 0).sum()), int(min(caps[caps > 0], default=0))
    uses = min(uses, max(1, ACTIVATIONS // max(1, acting)))
    if not acting:
        return [skipped("freshness: gradients", "no owner may answer")]
    owners, values = silent(channel, setup, 0, acting * uses, acting)  # in blocks in which all act once
    noise = _units(claims, owners, values[:, 0])
    cube = noise.reshape(uses, acting, d)
    findings = [
        replace(fresh_steps("", rows), check=f"freshness: {name} of gradients")
        for name, rows in (("activations", cube.reshape(uses, -1)), ("owners", cube.swapaxes(0, 1).reshape(acting, -1)))
    ]
    findings += fresh_within("gradients", noise.reshape(1, -1), [(0, noise.size)])
    if setup.secure:
        return findings
    with closing(setup.open(seed, replicates=2)) as both:
        owners, values = silent(both, setup, 0, acting * uses)
    one, two = (_units(claims, owners, values[:, r]) for r in range(2))
    return [*findings, fresh_between("freshness: repetitions of gradients", one, two)]


# Sensitivity


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


def owner_sensitivity(setup: OwnerSetup, claims: Sequence[Claim], seed: int, coins: np.random.Generator) -> Finding:
    """One record replaced, its row and its factor, moves its owner's release by at most 2 C / n_i.

    The other records pull one way, at random, or have factors that are not numbers.
    """
    setup, d = setup.seeded(), setup.dimension
    worst, where, cases = 0.0, "", 0
    for index, row in enumerate(adversarial_rows(d)):
        places = [int(coins.integers(n)) for n in setup.counts]
        base = [torch.where(torch.isfinite(x), x, 0.0).clone() for x in setup.x]
        other = [x.clone() for x in base]
        for x, y, place in zip(base, other, places, strict=True):
            x[place] = y[place] = row
            if index % 2:
                x[:] = row.nan_to_num(1.0, 1.0, -1.0).clamp(-1, 1)  # all records along one direction
                x[place] = row
                y.copy_(x)
            y[place] = -row if index % 3 else torch.ones(d, dtype=torch.float64)
        pair = setup.open(seed + index, base), setup.open(seed + index, other)
        order = turns(np.where(np.arange(len(setup.counts)) < OWNERS, pair[0].caps, 0), len(_FACTORS) * OWNERS)
        if not order.size:
            return skipped("sensitivity: gradients", "no owner may answer")
        uses = np.zeros(len(setup.counts), dtype=np.int64)
        for channel in pair:
            channel.begin(0, torch.from_numpy(order)[None])
        for owner in order.tolist():
            case, n = int(uses[owner]) + index + owner, setup.counts[owner]
            uses[owner] += 1
            crowd = torch.from_numpy(coins.standard_normal(n)) if case % 3 == 0 else torch.full((n,), 1e9).double()
            crowd = torch.full_like(crowd, math.nan) if case % 3 == 1 else crowd
            values = []
            for channel, factor in zip(pair, _FACTORS[case % len(_FACTORS)], strict=True):
                crowd[places[owner]] = factor
                values.append(_given(channel, crowd.clone()[None], case).numpy())
            with np.errstate(invalid="ignore", over="ignore"):
                moved = float(np.linalg.norm((values[0] - values[1])[0], ord=1 if claims[owner].norm == "l1" else 2))
            share = moved * claims[owner].denominator / claims[owner].sensitivity
            cases += 1
            if not share <= worst:
                worst = share if math.isfinite(share) else math.inf
                where = f"row {index}, factors {_FACTORS[case % len(_FACTORS)]} of owner {setup.ids[owner]!r}"
    detail = f"largest change over 2 C / n, in {cases} pairs of neighbours" + (f"; {where}" if worst > 1 else "")
    return too_large("sensitivity: gradients", worst, 1.0, detail)


def _given(channel: OwnerChannel, factors: Tensor, case: int) -> Tensor:
    if case % 2:
        return channel.release(lambda owner, where: factors)
    return channel.release_run(1, lambda owner, which, where: factors)[0]


def bounded_sensitivity(setup: OwnerSetup, claims: Sequence[Claim], seed: int) -> Finding:
    """Means that the domain is said to bound are refused beyond C, and are released within it."""
    channel, wrong = setup.open(seed), []
    order = turns(np.minimum(channel.caps, 1), OWNERS)
    channel.begin(0, torch.from_numpy(order)[None])
    for owner in order.tolist():
        claim = claims[owner]
        within = torch.full((1, setup.dimension), 1.0, dtype=torch.float64)
        within *= claim.bound / torch.linalg.vector_norm(within, ord=1 if claim.norm == "l1" else 2)
        for factor in (1.001, -2.0, math.nan, math.inf, 1e300):
            try:
                channel.release_bounded(lambda k, where, v=within * factor: v)  # type: ignore[misc]
                wrong.append(f"{factor:g} times C of owner {setup.ids[owner]!r} was released")
                break
            except PrivacyError:
                continue
        else:
            channel.release_bounded(lambda k, where, v=within: v)  # type: ignore[misc]
    return exact("sensitivity: bounded means", len(wrong), "; ".join(wrong[:3]) or "means beyond C are refused")
