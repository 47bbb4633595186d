"""The records of owners who act one at a time: sums of clipped gradients over those that take part in an answer."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from ..errors import ConfigError
from .clip import CLIPS, MARGIN, Clip, clipped_segment_sums
from .noise.laws import Norm
from .noise.sources import NoiseSource

_LEAST_NORM = 1e-140


@dataclass(frozen=True)
class OwnerRecords:
    """The rows x_j of one owner's records, whose gradients are multiples of them, and their norms.

    Attributes:
        x: (n_i, D) float64.
        norms: (n_i,) float64, in the norm of the clip.
    """

    x: Tensor
    norms: Tensor

    @classmethod
    def of(cls, x: Tensor, norm: Norm) -> OwnerRecords:
        """Rows ``x`` (n_i, D) with their norms, computed here once.

        A row that is not finite, or whose norm is below 1e-140 (its squares underflow), counts as zero: no limit on its
        factor would bound its gradient.
        """
        wide = x.detach().double()
        norms = torch.linalg.vector_norm(wide, ord=1 if norm == "l1" else 2, dim=1)
        usable = torch.isfinite(norms) & (norms >= _LEAST_NORM)
        if bool(usable.all()):
            return cls(wide, norms)
        nothing = torch.zeros((), dtype=torch.float64)
        return cls(torch.where(usable[:, None], wide, nothing), torch.where(usable, norms, nothing))


class RecordSums:
    """Sums over records of their gradients, each within the bound; an owner is prepared when it first acts.

    Args:
        x: (n_i, D) rows of every owner, or None where gradients are not multiples of rows.
        counts: (n,) int64, n_i.
        dimension: D.
        bound: C on the norm of a gradient; infinite for none.
        norm: its norm.
    """

    def __init__(
        self, x: Sequence[Tensor] | None, counts: np.ndarray, dimension: int, *, bound: float, norm: Norm
    ) -> None:
        self.counts, self.dimension = counts, dimension
        self._x, self._norm = x, norm
        self._limit = bound * (1 - MARGIN)
        self._clip: Clip | None = CLIPS[norm](bound) if math.isfinite(bound) else None
        self._prepared: dict[int, tuple[np.ndarray, np.ndarray, np.ndarray]] = {}

    def of_factors(self, owner: int, factors: Tensor, kept: Tensor | None) -> np.ndarray:
        """Sums of ``s_j x_j``, clipped: ``factors`` (k, n_i) -> (k, D) float64.

        Args:
            owner: whose records.
            factors: s, float64; one that is not finite counts as zero.
            kept: (k, n_i) bool, the records that take part, or None for all.
        """
        prepared = self._prepared.get(owner)
        if prepared is None:
            x, limits = self._rows_and_limits(owner)
            prepared = self._prepared[owner] = x, -limits, limits
        x, low, high = prepared
        s: np.ndarray = factors.numpy()  # of small matrices numpy's operations are faster than torch's
        if not math.isfinite(np.vdot(s, s)):
            s = np.where(np.isfinite(s), s, 0.0)
        if self._clip is not None:
            s = np.maximum(s, low)  # |s_j| ||x_j|| <= C
            np.minimum(s, high, out=s)
        if kept is not None:
            s = s * kept.numpy()
        total: np.ndarray = s.dot(x)  # of small matrices it costs less than matmul
        return total

    def of_rows(self, owner: int, rows: Tensor, kept: Tensor | None) -> np.ndarray:
        """Sums of gradients ``rows`` (k, n_i, D), clipped: (k, D) float64; one that is not finite counts as zero."""
        shape = (len(rows), int(self.counts[owner]), self.dimension)
        if tuple(rows.shape) != shape:
            raise ConfigError(f"Gradients of owner {owner} are of shape {tuple(rows.shape)}; it must be {shape}.")
        place = torch.arange(shape[0]).repeat_interleave(shape[1])
        flat = rows.reshape(-1, shape[2])
        if kept is not None:
            flat, place = flat[kept.reshape(-1).to(flat.device)], place[kept.reshape(-1)]
        return clipped_segment_sums(flat, place.to(flat.device), shape[0], self._clip).cpu().double().numpy()

    def _rows_and_limits(self, owner: int) -> tuple[np.ndarray, np.ndarray]:
        if self._x is None:
            raise ConfigError("The channel was opened without rows; factors of rows need them, gradients do not.")
        records = OwnerRecords.of(self._x[owner], self._norm)
        limits = torch.clamp(self._limit / records.norms, max=torch.finfo(torch.float64).max)
        return records.x.numpy(), limits.numpy()


class Participation:
    """Which records take part in an answer: those that are there, of these a secret Poisson subsample.

    Attributes:
        sampled: whether some answers take a subsample.
        arriving: whether records arrive while a run goes on.
        partial: whether some answers do not have all records.

    Args:
        counts: (n,) int64, n_i.
        arrivals: (n_i,) int64 of every owner: the activation from which each record is there; None: always.
        rates: (n,) float64, q_i: a record takes part in an answer with that probability, independently.
        sources: of the coins, one for each repetition.
    """

    def __init__(
        self,
        counts: np.ndarray,
        arrivals: Sequence[np.ndarray] | None,
        rates: np.ndarray,
        sources: Sequence[NoiseSource],
    ) -> None:
        self.counts, self.rates = counts, rates
        self.sampled = bool((rates < 1).any())
        self.arriving = arrivals is not None
        self.partial = self.sampled or self.arriving
        self._sources = sources
        self._arrivals = None if arrivals is None else [np.asarray(times) for times in arrivals]
        if self._arrivals is not None and len(self._arrivals) != counts.size:
            raise ConfigError(f"arrivals has {len(self._arrivals)} arrays; it must have one for each of {counts.size}.")
        for owner, times in enumerate(self._arrivals or ()):
            if times.shape != (counts[owner],) or times.dtype.kind not in "iu" or bool((times < 0).any()):
                raise ConfigError(
                    f"arrivals[{owner}] has shape {times.shape} and dtype {times.dtype}; it must be a whole number of "
                    f"at least 0 for each of {counts[owner]} records."
                )
        self._sorted: dict[int, np.ndarray] = {}
        self._held: dict[tuple[int, int], np.ndarray] = {}

    def present(self, first: int, owners: np.ndarray) -> np.ndarray:
        """(R, S) int64: records there at activations ``first``, ``first + 1``, ... of ``owners`` (R, S); 0 of -1."""
        if self._arrivals is None:
            return np.where(owners >= 0, self.counts[owners], 0)
        found = np.zeros(owners.shape, dtype=np.int64)
        for owner in np.unique(owners[owners >= 0]).tolist():
            if owner not in self._sorted:
                self._sorted[owner] = np.sort(self._arrivals[owner])
            replicates, places = np.nonzero(owners == owner)
            found[replicates, places] = np.searchsorted(self._sorted[owner], first + places, side="right")
        return found

    def of(self, owner: int, steps: np.ndarray, replicates: np.ndarray, *, hold: bool = False) -> Tensor | None:
        """The records that take part in an owner's answers.

        Args:
            owner: who answers.
            steps: (k,) int64, the activations.
            replicates: (k,) int64.
            hold: keep the subsamples: the next time these answers are asked for, they are the same.

        Returns:
            (k, n_i) bool; None for all.
        """
        kept: np.ndarray | None = None
        if self._arrivals is not None:
            kept = self._arrivals[owner] <= steps[:, None]
        if self.rates[owner] < 1:
            drawn = self._subsample(owner, steps, replicates)
            for key, row in zip(zip(steps.tolist(), replicates.tolist(), strict=True), drawn, strict=True):
                if key in self._held:
                    row[:] = self._held[key] if hold else self._held.pop(key)
                elif hold:
                    self._held[key] = row.copy()
            kept = drawn if kept is None else kept & drawn
        return None if kept is None else torch.from_numpy(kept)

    def _subsample(self, owner: int, steps: np.ndarray, replicates: np.ndarray) -> np.ndarray:
        drawn = np.empty((len(steps), self.counts[owner]), dtype=bool)
        for r in np.unique(replicates).tolist():
            at = replicates == r
            _, tails = self._sources[r].tails("records", 0, drawn.shape[1], torch.from_numpy(steps[at]))
            drawn[at] = 2.0 * tails < self.rates[owner]  # tails are uniform on (0, 1/2)
        return drawn
