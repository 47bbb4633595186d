"""What is summed before noise: gradients of single records by client, and rows of a cohort.

Gradients of a client's records are multiples of its rows, of which the factors are enough, or any tensors.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

import numpy as np
import torch
from torch import Tensor

from ..errors import ConfigError
from .clip import MARGIN, Clip, clipped_segment_sums, sum_width
from .gradients import GradientPlan
from .noise.laws import Norm
from .noise.sources import NoiseSource

_LEAST_NORM = 1e-140
_IN_FLOAT64 = 1 << 15  # records of which sums in float64 move by less than the margin of the clip
Array = np.ndarray
Gradients = Array | Tensor
"""Of the n_i records of one client in k replicates: an array (k, n_i) of float64 has the factors s_j of the rows x_j
that the plan has of the client, and a floating tensor (k, n_i, D) the gradients themselves."""


def usable_rows(x: Tensor, norm: Norm) -> tuple[Tensor, Tensor]:
    """Return rows (n_i, D), of which gradients are multiples, as float64, and their norms (n_i,).

    A row that is not finite, or whose norm is below 1e-140 (its squares underflow), counts as zero: no limit on its
    factor would bound its gradient.
    """
    wide = x.detach().double()
    norms = torch.linalg.vector_norm(wide, ord=1 if norm == "l1" else 2, dim=1)
    usable = torch.isfinite(norms) & (norms >= _LEAST_NORM)
    if bool(usable.all()):
        return wide, norms
    nothing = torch.zeros((), dtype=torch.float64)
    return torch.where(usable[:, None], wide, nothing), torch.where(usable, norms, nothing)


class RecordSums:
    """Sums over records of their gradients, each within the bound; a client is prepared when it first acts.

    Args:
        plan: rows, numbers of records, and the length of a gradient.
        bound: C on the norm of a gradient; infinite for none.
        norm: its norm.
    """

    def __init__(self, plan: GradientPlan, *, bound: float, norm: Norm) -> None:
        self.counts, self.dimension = plan.counts, plan.dimension
        self._x, self.norm = plan.x, norm
        self._limit = bound * (1 - MARGIN)
        self.clip: Clip | None = Clip(bound, norm) if math.isfinite(bound) else None
        self._prepared: dict[int, tuple[Array, Array, Array]] = {}
        widths = [sum_width(bound, max(1, n)) if self.clip is not None else 1.0 for n in self.counts.tolist()]
        self.widths = np.array(widths)  # of the grids on which sums over the records of each client are exact
        self.long = self.clip is not None and int(self.counts.max(initial=0)) > _IN_FLOAT64

    def of(self, client: int, gradients: Gradients, drawn: Array | None) -> Array:
        """Return the sums (k, D) over the records of a client in k replicates: over all of them, or those that are
        ``drawn``, bool (k, n_i)."""
        if isinstance(gradients, Tensor):
            return self.of_gradients(client, gradients, drawn)
        return self.of_factors(client, gradients, drawn)

    def of_factors(self, client: int, factors: Array, drawn: Array | None = None) -> Array:
        """Sums of ``s_j x_j``, clipped: ``factors`` (k, n_i) -> (k, D) float64.

        Args:
            client: whose records.
            factors: s, float64; one that is not a number counts as zero, and an infinite one as any that is clipped
                (as zero where nothing is clipped).
            drawn: (k, n_i) bool, the records that take part, or None for all.
        """
        x, low, high = self._rows(client)
        total = self._bounded_sum(factors, x, low, high, drawn)
        first = total[:, 0]
        if math.isfinite(first.dot(first)):  # rows are finite, so a factor that is not shows in every coordinate
            return total
        wrong = np.isnan(factors) if self.clip is not None else ~np.isfinite(factors)
        return self._bounded_sum(np.where(wrong, 0.0, factors), x, low, high, drawn)

    def _rows(self, client: int) -> tuple[Array, Array, Array]:
        """Return the rows of a client (n_i, D), and the least and largest factors (1, n_i) of each."""
        if client not in self._prepared:
            if self._x is None:
                raise ConfigError("The channel was opened without rows; factors of rows need them, gradients do not.")
            x, norms = usable_rows(self._x[client], self.norm)
            limits = torch.clamp(self._limit / norms, max=torch.finfo(torch.float64).max)
            limits[limits < torch.finfo(torch.float64).tiny] = 0.0  # it would have few digits, and may be rounded up
            self._prepared[client] = x.numpy(), -limits.numpy()[None], limits.numpy()[None]
        return self._prepared[client]

    def _bounded_sum(self, factors: Array, x: Array, low: Array, high: Array, drawn: Array | None) -> Array:
        """Return the sums (k, D) of rows (n_i, D) times clipped ``factors`` (k, n_i): up to 2**15 of them in float64,
        for which the clip leaves room (see :func:`~fedmtl.privacy.noise.grid.grid_width`); more exactly, on the grid of
        sums of so many."""
        if self.clip is not None:
            factors = np.maximum(factors, low)  # |s_j| ||x_j|| <= C
            np.minimum(factors, high, out=factors)
        if drawn is not None:
            factors = factors * drawn
        total: Array
        if self.clip is None or len(x) <= _IN_FLOAT64:
            total = factors.dot(x)  # of small matrices it costs less than matmul
            return total
        width, total = sum_width(self.clip.bound, len(x)), np.zeros((len(factors), x.shape[1]))
        for first in range(0, len(x), _IN_FLOAT64):
            part = slice(first, first + _IN_FLOAT64)
            cells = x[part] / width
            for row, own in zip(total, factors[:, part], strict=True):
                row += np.trunc(own[:, None] * cells).sum(0)
        return total * width

    def of_gradients(self, client: int, gradients: Tensor, drawn: Array | None = None) -> Array:
        """Sums of ``gradients`` (k, n_i, D), clipped: (k, D) float64; one that is not finite counts as zero."""
        shape = (len(gradients), int(self.counts[client]), self.dimension)
        if tuple(gradients.shape) != shape:
            raise ConfigError(f"Gradients of client {client} are of shape {tuple(gradients.shape)}; needed: {shape}.")
        place = torch.arange(shape[0]).repeat_interleave(shape[1])
        flat = gradients.reshape(-1, shape[2])
        if drawn is not None:
            part = torch.from_numpy(drawn).reshape(-1)
            flat, place = flat[part.to(flat.device)], place[part]
        sums = self.of_chunks([(flat, place.to(flat.device))], torch.full(shape[:1], client))
        return sums.cpu().double().numpy()

    def of_chunks(self, chunks: Iterable[tuple[Tensor, Tensor]], clients: Tensor) -> Tensor:
        """Sums of chunks of gradients by the place of their client among ``clients`` (A,): (A, D) on the device of the
        gradients.

        Raises:
            ConfigError: there is not even an empty chunk.
        """
        total: Tensor | None = None
        width = None if self.clip is None else torch.from_numpy(self.widths)[clients]
        for rows, place in chunks:
            total = clipped_segment_sums(rows, place, len(clients), self.clip, total, width)
        if total is None:
            raise ConfigError("No gradients were given to the release; a step without records gives an empty chunk.")
        return total


class RecordDraws:
    """Which records take part in a release: all, or a secret Poisson subset.

    Attributes:
        sampled: whether some releases take a subset.
        never_empty: whether every client has records.

    Args:
        plan: numbers of records, rates, keys.
        sources: of the coins, one for each repetition.
    """

    def __init__(self, plan: GradientPlan, sources: Sequence[NoiseSource]) -> None:
        self.counts, self.rates, self.sources = plan.counts, plan.rates, sources
        self.sampled = bool((self.rates < 1).any())
        self.never_empty = bool((self.counts > 0).all())
        self._keys = plan.addresses
        self._latest: tuple[tuple[int, bytes, bytes] | None, Array] = None, np.zeros(0)

    def of(self, client: int, uses: Array, replicates: Array) -> Array | None:
        """Return the records that take part in releases of one client; asked for again, the same ones.

        Args:
            client: who acts.
            uses: (k,) int64, how often the client acted before, which addresses the subset.
            replicates: (k,) int64.

        Returns:
            (k, n_i) bool; None for all.
        """
        if self.rates[client] == 1:
            return None
        key = client, uses.tobytes(), replicates.tobytes()
        if key != self._latest[0]:
            self._latest = key, self._subsets(client, uses, replicates)
        return self._latest[1]

    def batch(self, clients: Tensor, address: Tensor) -> tuple[Tensor, Tensor]:
        """Return the records of one local step, drawn anew for each client.

        Args:
            clients: int64 (A,).
            address: int64 (A,), the number of the local step in each client's own stream.

        Returns:
            Positions within each client's own records, int64 (A, B), padded with 0, and which of them are drawn, bool
            (A, B); B is the largest subset, at least 1.
        """
        counts = torch.from_numpy(self.counts)[clients]
        widest = int(counts.max()) if len(clients) else 1
        position = torch.arange(widest)
        inside = position < counts[:, None]
        rates = torch.from_numpy(self.rates)[clients]
        if bool((rates == 1).all()):
            return torch.where(inside, position, 0), inside
        drawn = inside & (self._coins(clients, address, widest) < rates[:, None])
        width = max(1, int(drawn.sum(1).max()))
        order = torch.argsort((~drawn).to(torch.uint8), dim=1, stable=True)[:, :width]
        mask = torch.gather(drawn, 1, order)
        return torch.where(mask, order, 0), mask

    def _coins(self, clients: Tensor, address: Tensor, widest: int) -> Tensor:
        """Return (A, widest) float64 in (0, 1), of each client's first records a function of its own address."""
        _, tail = self.sources[0].tails("records", address, widest, self._keys[clients])
        return torch.from_numpy(2.0 * tail)  # tails are uniform on (0, 1/2)

    def _subsets(self, client: int, uses: Array, replicates: Array) -> Array:
        drawn = np.empty((len(uses), self.counts[client]), dtype=bool)
        for r in np.unique(replicates).tolist():
            at = replicates == r
            keys = self._keys[client].expand(int(at.sum()))
            _, tails = self.sources[r].tails("records", torch.from_numpy(uses[at]), drawn.shape[1], keys)
            drawn[at] = 2.0 * tails < self.rates[client]  # tails are uniform on (0, 1/2)
        return drawn
