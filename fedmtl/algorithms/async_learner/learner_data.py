"""What the learner's updates need besides the state: records, statistics, and owners in fixed groups.

Owners in a group answer the same query (Farokhi et al. 2021, Remark 2).
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from ...errors import ConfigError
from ..linear.data import LinearData

if TYPE_CHECKING:
    from .algorithm import AsyncLearner

_STACKED = 1 << 22  # numbers of all records, of which it is worth while to have copies


@dataclass(frozen=True, eq=False)
class LearnerData:
    """What the updates need besides the state; a function of the settings and the records.

    Attributes:
        settings: of the learner.
        data: the owners' records, forced into the domain where one is given.
        copy_of: int64 (n,), the copy theta_i that an owner's answers move.
        copies: N, owners or groups.
        weights: float64 (N,), factors of (n_i / n) Qbar_i.
        statistics: (2 X'X / n_i, 2 X'y / n_i) of each owner for the squared loss and no more
            parameters than records, else None.
    """

    settings: AsyncLearner
    data: LinearData
    copy_of: np.ndarray
    copies: int
    weights: np.ndarray
    statistics: tuple[tuple[np.ndarray, np.ndarray], ...] | None

    @classmethod
    def of(cls, settings: AsyncLearner, data: LinearData, ids: tuple[str, ...]) -> LearnerData:
        """Prepare the records, :meth:`~.central.CentralLearner.bounded`; ``ids`` name the owners."""
        copy_of = copies_of(settings.groups, ids)
        copies = int(copy_of.max()) + 1
        weights = np.ones(copies)
        if isinstance(settings.frequencies, tuple):
            if len(settings.frequencies) != len(ids):
                raise ConfigError(
                    f"AsyncLearner.frequencies has {len(settings.frequencies):,} numbers for {len(ids):,} owners; "
                    f"give one to each, in the order of the data."
                )
            slowest = np.full(copies, np.inf)
            np.minimum.at(slowest, copy_of, np.array(settings.frequencies, dtype=np.float64))
            weights = slowest.sum() / (copies * slowest)
        statistics = None
        if settings.loss == "squared" and data.dimension <= max(len(x) for x in data.x):  # else records are cheaper
            statistics = tuple(
                ((2 * x.T @ x / len(x)).numpy(), (2 * x.T @ y / len(x)).numpy())
                for x, y in zip(data.x, data.y, strict=True)
            )
        return cls(settings, data, copy_of, copies, weights, statistics)

    @cached_property
    def pooled_statistics(self) -> tuple[np.ndarray, np.ndarray]:
        """Return the statistics of all owners, (p, n p), one owner's columns after another's, and (n, p)."""
        assert self.statistics is not None
        return np.hstack([second for second, _ in self.statistics]), np.stack([first for _, first in self.statistics])

    @cached_property
    def stacked(self) -> tuple[np.ndarray, np.ndarray] | None:
        """Return the records of all owners, x' (n, p, m) and y (n, 1, m), 0 beyond an owner's, and for the squared loss
        doubled, which makes its factors; None for so many or such different owners that their own arrays are better."""
        x, y = self.data.x, self.data.y
        n, most, p = len(x), max(len(rows) for rows in x), self.data.dimension
        if n * most > 2 * sum(len(rows) for rows in x) or n * most * p > _STACKED:
            return None
        rows, targets = np.zeros((n, p, most)), np.zeros((n, 1, most))
        for owner, (own, values) in enumerate(zip(x, y, strict=True)):
            rows[owner, :, : len(own)], targets[owner, 0, : len(own)] = own.numpy().T, values.numpy()
        twice = 2.0 if self.settings.loss == "squared" else 1.0
        return twice * rows, twice * targets

    @cached_property
    def shares(self) -> np.ndarray:
        """Return (n,) float64: N (n_i / n), weighted, which times a is the factor of Qbar_i in (5)."""
        counts = self.data.counts.numpy()
        shares: np.ndarray = self.copies * counts / counts.sum() * self.weights[self.copy_of]
        return shares

    def start(self, replicates: int) -> dict[str, Tensor]:
        """Return zeros: theta_l (R, p) and theta (R, N, p); events (R, N) for observed frequencies; for groups also the
        query point (R, N, p) that is being answered, sums of answers (R, n, p) and their numbers (R, n)."""
        r, n, p = replicates, len(self.data.x), self.data.dimension
        shapes: dict[str, tuple[int, ...]] = {"theta_l": (r, p), "theta": (r, self.copies, p)}
        if self.settings.frequencies == "observed":
            shapes["events"] = (r, self.copies)
        if self.copies < n:
            shapes |= {"query": (r, self.copies, p), "sums": (r, n, p), "answers": (r, n)}
        return {name: torch.zeros(shape, dtype=torch.float64) for name, shape in shapes.items()}


def copies_of(groups: tuple[tuple[str, ...], ...], ids: tuple[str, ...]) -> np.ndarray:
    """Return int64 (n,): the number of each owner's copy; groups first come in the order of their first member."""
    place = {name: k for k, name in enumerate(ids)}
    leader = np.arange(len(ids))
    seen: set[str] = set()
    for group in groups:
        for name in group:
            if name not in place:
                raise ConfigError(f"AsyncLearner.groups names {name!r}; the owners are {ids[0]!r} .. {ids[-1]!r}.")
            if name in seen:
                raise ConfigError(f"AsyncLearner.groups has owner {name!r} twice; an owner is in one group at most.")
            seen.add(name)
        if not group:
            raise ConfigError("AsyncLearner.groups has an empty group; each needs at least 1 owner.")
        leader[[place[name] for name in group]] = min(place[name] for name in group)
    return np.unique(leader, return_inverse=True)[1].astype(np.int64)
