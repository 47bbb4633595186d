"""Releases of single records: noised sums of clipped gradients.

Gradients of a client's records are multiples of its rows, of which the factors are enough, or any
tensors. A sum is over all records of its client, or over a secret Poisson subset of them. The
client and the number of its sums so far address the subset and the noise, which do not depend on
the other participants. That holds for clients that make the local steps of DP-SGD in rounds
(:mod:`.dp_sgd`), and for those that act one at a time (:class:`~fedmtl.privacy.ActivationChannel`).
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

import numpy as np
import torch
from torch import Tensor

from .._devices import on_device
from ..errors import ConfigError
from .account_costs import AccountCosts
from .clip import MARGIN, Clip, sum_width
from .gradients import GradientPlan
from .noise.grid import GridValue, client_noise
from .noise.laws import LAWS, ORDERS, Norm
from .noise.on_device import gaussian_rows, source_there
from .noise.sources import NoiseSource, client_tails
from .sums import clipped_segment_sums

GRADIENT = "gradient"
"""The name of releases whose unit is one record."""

_NOISE = "noise/gradient"
_HOST = torch.device("cpu")
_LEAST_NORM = 1e-140
_IN_FLOAT64 = 1 << 15  # records of which sums in float64 move by less than the margin of the clip
Array = np.ndarray
Gradients = Array | Tensor
"""Gradients of the n_i records of one client in k replicates: an array (k, n_i) of float64 has the
factors s_j of the rows x_j that the plan has of the client, and a floating tensor (k, n_i, D) the
gradients themselves."""


def usable_rows(x: Tensor, norm: Norm) -> tuple[Tensor, Tensor]:
    """Returns rows (n_i, D), of which gradients are multiples, as float64, and their norms (n_i,).

    A row that is not finite, or whose norm is below 1e-140 (its squares underflow), counts as zero:
    no limit on its factor would bound its gradient.
    """
    wide = x.detach().double()
    # Gradients of linear models are multiples of rows: their norms follow from those of the rows.
    norms = torch.linalg.vector_norm(wide, ord=ORDERS[norm], dim=1)
    usable = torch.isfinite(norms) & (norms >= _LEAST_NORM)
    if bool(usable.all()):
        return wide, norms
    nothing = torch.zeros((), dtype=torch.float64)
    return torch.where(usable[:, None], wide, nothing), torch.where(usable, norms, nothing)


class Records:
    """The noised sums of clients under one plan; a client is prepared when it first acts.

    Args:
        plan: rows, numbers of records, rates, keys, and the length of a gradient.
        sources: of the noise and of the coins, one for each replicate.
        costs: of the accounts; None without noise.
        bound: C on the norm of a gradient; infinite for none.
        law: name of the law of the noise; None without privacy.
        stability: gamma of automatic clipping; None without it.
        width: of the grid on which the sums of all clients are added up; None for a grid of each
            client's own.

    Attributes:
        plan, sources, costs, bound: see above.
        coins: sources of the secret subsets, those of the noise; an audit sets others.
        norm: in which gradients are clipped.
        clip: of a gradient; None without a bound.
        counts: numbers of records that have rows, which canaries have not.
        sampled: True if some sums are over a subset.
        in_secure_sum: True if a secure sum adds up the sums of all clients, and has the noise.
        on_grid: in secure mode, the last value that was released with its grid, by name.
    """

    def __init__(
        self,
        plan: GradientPlan,
        sources: Sequence[NoiseSource],
        costs: AccountCosts | None,
        *,
        bound: float,
        law: str | None,
        stability: float | None = None,
        width: float | None = None,
    ) -> None:
        self.plan = plan
        self.costs = costs
        self.bound = bound
        self.counts = plan.counts
        self.law = LAWS[law or "gaussian"](1.0)
        claim = plan.published
        self.norm: Norm = self.law.norm
        if claim is not None and claim.norm is not None:
            self.norm = claim.norm
        self.clip: Clip | None = None
        if math.isfinite(bound):
            self.clip = Clip(bound, self.norm, stability)
        self.sampled = bool((plan.rates < 1).any())
        self.in_secure_sum = width is not None
        self.sources = self.coins = sources
        self.on_grid: dict[str, GridValue] = {}
        self._keys = plan.addresses.numpy()
        self._limit = bound * (1 - MARGIN)
        self._prepared: dict[int, tuple[Array, Array, Array]] = {}
        # of the grids on which sums over the records of each client are exact
        self._widths = torch.ones(len(plan.ids), dtype=torch.float64)
        if width is not None:
            self._widths *= width
        elif self.clip is not None:
            widths = [sum_width(bound, max(1, n)) for n in plan.counts.tolist()]
            self._widths = torch.tensor(widths, dtype=torch.float64)
        self._latest: tuple[tuple[int, bytes, bytes] | None, Array] = None, np.zeros(0)

    # Sums

    def of_factors(self, client: int, factors: Array, drawn: Array | None = None) -> Array:
        """Sums of ``s_j x_j``, clipped: ``factors`` (k, n_i) -> (k, D) float64.

        Args:
            client: whose records.
            factors: s, float64; one that is not a number counts as zero, and an infinite one as any
                that is clipped (as zero if nothing is clipped).
            drawn: (k, n_i) bool, the records that take part, or None for all.

        Raises:
            ConfigError: factors of another shape, or a plan without rows.
        """
        x, low, high = self._rows(client)
        if factors.shape[1:] != (len(x),):
            raise ConfigError(
                f"Factors of the rows of client {client} are of shape {factors.shape}; needed: "
                f"(k, {len(x)})."
            )
        # The usual case costs one product; only a result that is not finite is looked at again.
        total = self._bounded_sum(factors, x, low, high, drawn)
        first = total[:, 0]
        # rows are finite, so a factor that is not shows in every coordinate
        if math.isfinite(first.dot(first)):
            return total
        if self.clip is not None:
            # A clip turns an infinite factor into the largest one, but a NaN stays a NaN.
            wrong = np.isnan(factors)
        else:
            wrong = ~np.isfinite(factors)
        return self._bounded_sum(np.where(wrong, 0.0, factors), x, low, high, drawn)

    def _rows(self, client: int) -> tuple[Array, Array, Array]:
        """Returns the rows of a client (n_i, D), and the least and largest factors (1, n_i) of
        each."""
        if client not in self._prepared:
            if self.plan.x is None:
                raise ConfigError(
                    "The channel was opened without rows; factors of rows need them, "
                    "gradients do not."
                )
            x, norms = usable_rows(self.plan.x[client], self.norm)
            # A row of zeros has no limit: its multiples are all zero.
            limits = torch.clamp(self._limit / norms, max=torch.finfo(torch.float64).max)
            # it would have few digits, and may be rounded up
            limits[limits < torch.finfo(torch.float64).tiny] = 0.0
            self._prepared[client] = x.numpy(), -limits.numpy()[None], limits.numpy()[None]
        return self._prepared[client]

    def _bounded_sum(
        self, factors: Array, x: Array, low: Array, high: Array, drawn: Array | None
    ) -> Array:
        """Returns the sums (k, D) of rows (n_i, D) times clipped ``factors`` (k, n_i): up to 2**15
        of them in float64, for which the clip leaves room (see
        :func:`~fedmtl.privacy.noise.grid.grid_width`); more exactly, on the grid of sums of so
        many."""
        if self.clip is not None:
            factors = np.maximum(factors, low)  # |s_j| ||x_j|| <= C
            np.minimum(factors, high, out=factors)
        if drawn is not None:
            factors = factors * drawn
        total: Array
        # More records than that could move the sum by more than the margin that the clip leaves.
        if self.clip is None or len(x) <= _IN_FLOAT64:
            total = factors.dot(x)  # of small matrices it costs less than matmul
            return total
        width = sum_width(self.clip.bound, len(x))
        total = np.zeros((len(factors), x.shape[1]))
        for first in range(0, len(x), _IN_FLOAT64):
            part = slice(first, first + _IN_FLOAT64)
            cells = x[part] / width
            for row, multiples in zip(total, factors[:, part], strict=True):
                # Whole multiples of the width add up without rounding.
                row += np.trunc(multiples[:, None] * cells).sum(0)
        return total * width

    def of_gradients(self, client: int, gradients: Tensor, drawn: Array | None = None) -> Array:
        """Sums of ``gradients`` (k, n_i, D), clipped: (k, D) float64; one that is not finite counts
        as zero."""
        shape = (len(gradients), int(self.counts[client]), self.plan.dimension)
        if tuple(gradients.shape) != shape:
            raise ConfigError(
                f"Gradients of client {client} are of shape "
                f"{tuple(gradients.shape)}; needed: {shape}."
            )
        # Every replicate is a client of its own: the sums of one call stay apart.
        place = torch.arange(shape[0]).repeat_interleave(shape[1])
        flat = gradients.reshape(-1, shape[2])
        if drawn is not None:
            part = torch.from_numpy(drawn).reshape(-1)
            flat = flat[part.to(flat.device)]
            place = place[part]
        sums = self.of_chunks([(flat, place.to(flat.device))], torch.full(shape[:1], client))
        return sums.cpu().double().numpy()

    def of_chunks(self, chunks: Iterable[tuple[Tensor, Tensor]], clients: Tensor) -> Tensor:
        """Sums of chunks of gradients by the place of their client among ``clients`` (A,): (A, D)
        on the device of the gradients.

        Raises:
            ConfigError: there is not even an empty chunk, or gradients of another length.
        """
        total: Tensor | None = None
        width = None
        if self.clip is not None:
            # Each client's grid follows from its own number of records, so others do not move its
            # bits.
            width = self._widths[clients]
        for rows, place in chunks:
            # A shorter sum would be repeated along the noise.
            if rows.shape[1:] != (self.plan.dimension,):
                raise ConfigError(
                    f"Gradients of records are of shape {tuple(rows.shape)}; needed: "
                    f"(N, {self.plan.dimension})."
                )
            total = clipped_segment_sums(rows, place, len(clients), self.clip, total, width)
        if total is None:
            raise ConfigError(
                "No gradients were given to the release; a step without records "
                "gives an empty chunk."
            )
        return total

    # Which records

    def drawn(self, client: int, numbers: Array, replicates: Array) -> Array | None:
        """Returns the records that take part in sums of one client; asked for again, the same ones.

        Args:
            client: the one that acts.
            numbers: (k,) int64 of the sums.
            replicates: (k,) int64.

        Returns:
            (k, n_i) bool; None for all.
        """
        if self.plan.rates[client] == 1:
            return None
        key = client, numbers.tobytes(), replicates.tobytes()
        # The same coins are asked for twice in a step: for the gradients and for their sum.
        if key != self._latest[0]:
            coins = [self.coins[replicate] for replicate in replicates.tolist()]
            self._latest = (
                key,
                self._subsets(np.full((1, len(numbers)), client), numbers[None], coins)[0],
            )
        return self._latest[1]

    def batch(self, clients: Tensor, numbers: Tensor) -> tuple[Tensor, Tensor]:
        """Returns the records of one sum of each client, drawn anew.

        Args:
            clients: int64 (A,).
            numbers: int64 (A,), of the sums.

        Returns:
            Positions within each client's own records, int64 (A, B), padded with 0, and which of
            them are drawn, bool (A, B); B is the largest subset, at least 1.
        """
        subsets = self._subsets(clients[:, None].numpy(), numbers[:, None].numpy(), self.coins)[
            :, 0
        ]
        drawn = torch.from_numpy(subsets)
        # Padding: the drawn records of one client must fit beside those of the others in a stack.
        widest = int(subsets.sum(1).max(initial=1))
        # Drawn records come first, in their own order, whatever the width of the stack.
        order = torch.argsort((~drawn).to(torch.uint8), dim=1, stable=True)[:, :widest]
        mask = torch.gather(drawn, 1, order)
        return torch.where(mask, order, 0), mask

    def _subsets(self, clients: Array, numbers: Array, sources: Sequence[NoiseSource]) -> Array:
        """Returns a mask of the records that take part in sums of ``clients``, int64 (S, R), by the
        coins of R sources: bool (S, R, n), n the most records of one of them."""
        counts = self.plan.counts[clients]
        rates = self.plan.rates[clients]
        keys = self._keys[clients]
        inside: Array = np.arange(max(1, counts.max(initial=0))) < counts[..., None]
        # Without sampling no coin is drawn from the source.
        if (rates == 1).all():
            return inside
        of = torch.from_numpy(numbers), torch.from_numpy(keys), inside.shape[-1]
        # tails are uniform on (0, 1/2)
        inside &= 2.0 * client_tails(sources, "records", *of)[1] < rates[..., None]
        return inside

    # Noise

    def scales(self, clients: Array, numbers: Array) -> Array:
        """Returns the scale of the noise on sums ``numbers`` of ``clients``, (R, S) both: (R, S)
        float64; 0 without noise and of client -1."""
        if self.costs is None:
            return np.zeros(clients.shape)
        if self.plan.relation == "replace":
            moved = 2 * self.bound
        else:
            moved = self.bound
        return moved * self.costs.of_uses(clients, numbers)

    def noise(
        self, clients: Tensor, numbers: Tensor, scales: Tensor, *, device: torch.device = _HOST
    ) -> tuple[Tensor, Tensor | None]:
        """Returns the noise (S, R, D) on sums ``numbers`` of ``clients``, on a device, and in
        secure mode the widths of its grids (S, R), on the host as the arguments (S, R) are."""
        keys = self.plan.addresses[clients]
        size = self.plan.dimension
        source = source_there(self.law, self.sources, device)
        if source is not None:
            # A simulation: the host would take longer for the numbers than a GPU for the step.
            rows = numbers[:, 0], keys[:, 0], size, device
            noise = gaussian_rows(self.law, source, _NOISE, *rows)
            return (noise * on_device(scales, device))[:, None], None
        of = self.law, self.sources, _NOISE, numbers, keys, size
        noise, widths = client_noise(*of, sensitivity=scales, bound=self.bound)
        return on_device(noise, device), widths
