"""What is audited of owners who act one at a time (how to open a channel of the run) and what is claimed of them.

A claim is read off the event that is charged and the public facts alone: the scale of the noise of an answer is
2 C z / (q n_i), where z and q are of its event, C of the settings and n_i the owner's number of records at the time.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
from dp_accounting import dp_event
from torch import Tensor

from ..accounting.composition import StepEvent, epsilon
from ..owner_channel import OwnerChannel
from ..owner_first import WarmStartRelease
from ..owner_terms import OwnerTerms
from ..settings import RecordPrivacy
from .setup import Claim, law_of

Blocks = Callable[[int], Iterator[tuple[int, Tensor]]]
"""first activation -> (first activation, owners (1, S) int64) of every block of the run."""

OWNERS, ACTIVATIONS = 12, 2000
"""Owners examined one by one, and activations of one channel, at most."""


@dataclass(frozen=True, kw_only=True)
class OwnerSetup:
    """How a run opens its channel of owners, and the public facts.

    Args:
        privacy: the run's settings.
        x: (n_i, D) float64 rows of every owner, as the run gives them to the channel; any, where it gives none.
        counts: n_i, from the data and not from the channel.
        ids: of the owners.
        opening: (seed, privacy, rows or None for the run's own, ``ledger_path``, ``resume`` and ``replicates``) -> the
            channel as the run opens it, and the run's blocks.
        options: what else the run asks of its channel, by keyword of :func:`~fedmtl.privacy.open_owner_channel`.
        linear: whether gradients are multiples of rows that the channel has.
    """

    privacy: RecordPrivacy
    x: tuple[Tensor, ...]
    counts: tuple[int, ...]
    ids: tuple[str, ...]
    opening: Callable[..., tuple[OwnerChannel, Blocks]]
    options: Mapping[str, Any] = field(default_factory=dict)
    linear: bool = True

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

    @property
    def first(self) -> WarmStartRelease | None:
        """The release before all answers, or None."""
        found: WarmStartRelease | None = self.options.get("first")
        return found

    def weight(self, owner: int, use: int) -> float:
        """Of an answer, the mean of an owner's weights being 1."""
        allocation = self.options.get("allocation")
        return 1.0 if allocation is None else float(allocation[owner][use] / np.mean(allocation[owner]))

    def rate(self, owner: int) -> float:
        """Probability that a record takes part in an answer."""
        return float(np.broadcast_to(self.options.get("rate", 1.0), len(self.ids))[owner])

    def present(self, owners: np.ndarray, steps: np.ndarray) -> np.ndarray:
        """(T,) records of ``owners`` (T,) at activations ``steps`` (T,)."""
        arrivals, counts = self.options.get("arrivals"), np.array(self.counts)
        if arrivals is None:
            return counts[owners]
        pairs = zip(owners.tolist(), steps.tolist(), strict=True)
        return np.array([int((arrivals[k] <= step).sum()) for k, step in pairs], dtype=np.int64)

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
        rows = rows if self.linear else None
        return self.opening(seed, self.privacy, rows, ledger_path=ledger, resume=resume, replicates=replicates)

    def open(self, seed: int, rows: Sequence[Tensor] | None = None, **options: Any) -> OwnerChannel:
        """The channel of :meth:`open_run`."""
        return self.open_run(seed, rows, **options)[0]


class OwnerClaims:
    """What the account charges the owners for.

    Args:
        setup: public facts.
        terms: the account's events.
    """

    def __init__(self, setup: OwnerSetup, terms: OwnerTerms) -> None:
        self._setup, self._terms = setup, terms
        self._answers: dict[tuple[int, int], Claim] = {}

    def __len__(self) -> int:
        return len(self._setup.ids)

    def answer(self, owner: int, use: int = 0) -> Claim:
        """On answer ``use`` (from 0) of an owner that has all its records."""
        if (owner, use) not in self._answers:
            self._answers[owner, use] = self._claim(owner, self._terms.answer(owner, use))
        return self._answers[owner, use]

    def first(self, owner: int) -> Claim | None:
        """On the first release of an owner, or None where none is charged. Its sensitivity is enlarged by 2^-20."""
        events, first = self._terms.events(owner), self._setup.first
        if first is None or self._terms.firsts[owner] == 0 or not isinstance(events, tuple):
            return None
        moves = float(first.sensitivity[owner]) * (1 + 2.0**-20)
        return replace(self._claim(owner, events[0]), bound=moves, relation="add_remove", denominator=1.0)

    def spent(self, owner: int, uses: int, *, first: bool = True) -> float:
        """Epsilon of an owner after its first release, where it has one and ``first``, and ``uses`` answers."""
        events = self._terms.events(owner)
        if isinstance(events, StepEvent):
            return epsilon(events.event, uses, self._setup.delta, accountant=events.accountant)
        charged = events[: uses + int(first and self._terms.firsts[owner] > 0)]
        if not charged:
            return 0.0
        whole = dp_event.ComposedDpEvent([one.event for one in charged])
        return epsilon(whole, 1, self._setup.delta, accountant=charged[0].accountant)

    def _claim(self, owner: int, charged: StepEvent) -> Claim:
        event, sampled = charged.event, None
        if type(event).__name__ == "ReplacedPoissonDpEvent":
            event, sampled = event.event, float(event.sampling_probability)
        kind, multiplier = law_of(event)
        return Claim(
            kind=kind,
            multiplier=multiplier,
            bound=self._setup.privacy.initial_norm,
            relation="replace",
            norm="l1" if kind == "laplace" else "l2",
            size=self._setup.dimension,
            denominator=self._setup.counts[owner] * (1.0 if sampled is None else sampled),
            sampled=sampled,
            event=charged.event,
            accountant=charged.accountant,
            per_participation=True,
        )


def channel_claims(setup: OwnerSetup, channel: OwnerChannel) -> OwnerClaims | None:
    """What the account charges each owner for; None without noise."""
    terms = channel.account.terms
    return None if terms is None else OwnerClaims(setup, terms)


def turns(caps: np.ndarray, limit: int) -> np.ndarray:
    """The owners of the first ``limit`` activations at most, who act in turn until their caps are used up: (T,)."""
    kept, total, use = [np.zeros(0, dtype=np.int64)], 0, 0
    while total < limit and (acting := np.flatnonzero(caps > use)).size:
        kept.append(acting)
        total, use = total + acting.size, use + 1
    return np.concatenate(kept)[:limit]
