"""Mechanisms of rounds: the noised sum of a cohort's clipped rows.

A mechanism is a release, bound to its noise. It is called with rows and with the receipt of
the round, which it spends before it adds anything up, so that nothing is released that is not
charged. :class:`ClippedSum` is the Gaussian mechanism of the field, or with another law of noise
the Laplace or the L2-Laplace mechanism; :class:`OuterProductSum` is that on a matrix.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Generic, Protocol, TypeVar

import numpy as np
import torch
from torch import Tensor

from ..errors import PrivacyError
from .clip import RowTotal, clipped_sum, largest_norm, sum_width
from .noise.banded import CorrelatedNoise
from .noise.grid import GridValue, IndependentNoise, noised
from .noise.sources import NoiseSource
from .noise.symmetric import smat
from .receipt import Receipt
from .release import Release
from .sums import outer_product_sum


@dataclass(frozen=True, eq=False)
class OpenedSum:
    """The opened sum of a secure aggregation: the rows of clients with their shares of the noise,
    of which nobody knows more than this sum.

    Attributes:
        cells: int64 (D,), in cells of the public grid.
        roster: n, clients of the roster, each of which made its share for so many.
    """

    cells: np.ndarray
    roster: int


Message = Tensor | RowTotal | OpenedSum
"""The messages of a cohort for one release: the rows of its clients, the sum that they were added
to, or the sum that a secure aggregation has opened."""


class Mechanism(Protocol):
    """A release of a round that takes rows and a receipt.

    Attributes:
        release: with its clip norm and its noise.
        name: a receipt pays for each name once.
        on_grid: in secure mode, the last value with its grid; None before the first one, in seeded
            mode, and of counts.
    """

    @property
    def release(self) -> Release: ...

    @property
    def name(self) -> str: ...

    @property
    def on_grid(self) -> GridValue | None: ...

    def check(self, rows: Message, clients: Tensor) -> None:
        """Refuses rows, or a sum, that are not those of the release.

        Args:
            rows: (k, D) of the clients, or their sum.
            clients: int64 (k,).

        Raises:
            PrivacyError: another shape, whole numbers, or another number of clients. Or the sum
                of other clients' rows, or one with another clip or on another grid.
        """

    def __call__(self, rows: Message, clients: Tensor, receipt: Receipt) -> Tensor:
        """Releases a value.

        Args:
            rows: (k, D) of the clients, or their sum.
            clients: int64 (k,), whose rows they are.
            receipt: of the round; it is spent on this release.

        Returns:
            The released value, float64 on the CPU.

        Raises:
            PrivacyError: as for :meth:`check`, or the receipt does not pay for this release.
        """


Inner = TypeVar("Inner", bound=Mechanism)


def check_rows(release: Release, rows: Tensor, clients: Tensor, *lead: int) -> None:
    """Refuses rows that are not those of a release, one of each client.

    Args:
        release: whose rows they are.
        rows: (k, D), behind further axes ``lead``.
        clients: int64 (k,).
        lead: sizes of the further axes.

    Raises:
        PrivacyError: another shape, whole numbers, or another number of clients.
    """
    expected = (*lead, *rows.shape[-2:-1], release.dimension)
    if rows.shape != expected or len(expected) != 2 + len(lead) or not rows.is_floating_point():
        shape = ", ".join(str(n) for n in (*lead, "k", release.dimension))
        raise PrivacyError(
            f"Release {release.name!r} takes float rows of shape ({shape}), not "
            f"{tuple(rows.shape)} of {rows.dtype}."
        )
    if clients.shape != rows.shape[-2:-1]:
        raise PrivacyError(
            f"Release {release.name!r} needs one row from each client, and each client once."
        )


def noise_of(release: Release, source: NoiseSource) -> IndependentNoise | CorrelatedNoise | None:
    """Returns the noise that a server adds to a release, step by step; None without noise.

    Args:
        release: with its noise.
        source: of the random bits.
    """
    if release.noise is None:
        return None
    independent = IndependentNoise(
        release.noise,
        source,
        f"noise/{release.name}",
        release.size,
        sensitivity=release.drawn_sensitivity,
        bound=release.drawn_bound,
    )
    if release.bands is None:
        return independent
    return CorrelatedNoise(release.bands, independent.at, repeatable=source.name == "seeded")


class ClippedSum:
    """Clips the rows of a cohort, adds them up, adds noise and divides by a public constant::

        (sum_k clip(w_k) + noise) / m

    The sum is exact (:mod:`.clip`), so the row of one client moves it by at most C, and by at most
    2 C if one row replaces another. The noise has the law of the release, at that sensitivity. With
    :class:`~fedmtl.privacy.GaussianNoise` this is the Gaussian mechanism.

    A mechanism serves all rounds of a run in which its release is the same. Independent noise has
    no state. Correlated noise of a secure source does: the numbers that earlier rounds drew are
    part of the noise of the next ones, and cannot be drawn again.

    Args:
        release: with its clip norm and its noise.
        source: of the random bits.

    Attributes:
        release, source: see above.
        on_grid: see :class:`Mechanism`.
        name: of the release.
        size: number of noised coordinates.
        denominator: m.
        clip: of one client's row; None without one.
        width: of the grid on which sums of clipped rows are exact; None without a clip.

    Example:
        >>> import torch
        >>> from fedmtl import FullParticipation
        >>> from fedmtl.privacy import Clip, ClippedSum, Receipt, Release, SeededSource
        >>> everybody = FullParticipation().bind(2)
        >>> release = Release(name="update", dimension=2, sampling=everybody, clip=Clip(1.0))
        >>> mechanism = ClippedSum(release, SeededSource(0))  # without noise
        >>> clients = torch.arange(2)
        >>> rows = torch.tensor([[3.0, 4.0], [0.0, 0.5]])
        >>> mechanism(rows, clients, Receipt(0, 0, clients)).round(decimals=4).tolist()
        [0.3, 0.65]
    """

    def __init__(self, release: Release, source: NoiseSource) -> None:
        self.release = release
        self.source = source
        self.on_grid: GridValue | None = None
        self.name = release.name
        self.size = release.size
        self.denominator = release.denominator
        self.clip = release.row_clip
        self.width = release.width
        self._noise = noise_of(release, source)

    def check(self, rows: Message, clients: Tensor) -> None:
        """Refuses rows, or a sum, that are not those of the release.

        Args:
            rows: (k, D) of the clients, or their sum.
            clients: int64 (k,).

        Raises:
            PrivacyError: as for :meth:`Mechanism.check`.
        """
        if isinstance(rows, Tensor):
            check_rows(self.release, rows, clients)
            return
        release = self.release
        if isinstance(rows, OpenedSum):
            raise PrivacyError(
                f"Release {self.name!r} takes rows, to which the server adds noise, and got the "
                "opened sum of a secure aggregation."
            )
        sums = release.form == "vector"
        expected = (release.dimension, release.clip, self.width)
        if not sums or (rows.dimension, rows.clip, rows.width) != expected:
            raise PrivacyError(
                f"Release {self.name!r} of form {release.form!r} got a sum with another clip or "
                "grid than its own; take the sum that RoundChannel.new_total returns in this round."
            )
        if rows.clients != sorted(clients.tolist()):
            raise PrivacyError(
                f"Release {self.name!r} got a sum of {len(rows.clients)} rows, of others than one "
                f"row from each of {clients.numel()} clients."
            )

    def __call__(self, rows: Message, clients: Tensor, receipt: Receipt) -> Tensor:
        """Releases the noised sum, see :class:`Mechanism`.

        Returns:
            float64 (D,) on the CPU.
        """
        self.check(rows, clients)
        receipt.spend(self.name, clients)
        return self.noised_mean(self.total(rows, clients), receipt)

    def total(self, rows: Message, clients: Tensor, width: float | None = None) -> Tensor:
        """Adds up the clipped rows; the sum is exact, and private.

        Args:
            rows: (k, D) of the clients, or their sum.
            clients: int64 (k,).
            width: of the grid of a sum without a clip, if it is one of several; None for that of
                these rows.

        Returns:
            float64 (D,) on the CPU.
        """
        if isinstance(rows, RowTotal):
            return rows.sum()
        assert isinstance(rows, Tensor)  # see check
        if self.width is not None:
            width = self.width
        elif width is None:
            width = self.width_of(rows)
        return clipped_sum(rows, self.clip, width)

    def width_of(self, rows: Message) -> float:
        """Returns the width of the grid on which a sum without a clip is exact.

        Args:
            rows: (k, D), whose largest norm sets it.
        """
        assert isinstance(rows, Tensor)  # only rows that are clipped are added up as they are made
        return sum_width(largest_norm(rows), self.release.sampling.n)

    def noised_mean(self, total: Tensor, receipt: Receipt) -> Tensor:
        """Adds the noise of a round to a sum, and divides it by m.

        Args:
            total: float64 (size,), of :meth:`total`.
            receipt: of the round, spent on this release.

        Returns:
            The released value, float64 (D,).

        Raises:
            PrivacyError: the receipt has not been spent on this release.
        """
        step = receipt.charged_step(self.name)
        if self._noise is None:
            return total / self.denominator
        # the noise has a grid of its own, coarser or finer than that of sums
        noise, noise_width = self._noise.at(step)
        value = noised(total, noise, noise_width) / self.denominator
        if noise_width is not None:
            # The value is the caller's, which may write into it.
            self.on_grid = GridValue(step, value.clone(), noise_width, self.denominator)
        return value


class OuterProductSum(ClippedSum):
    """Clips the rows of a cohort, adds up their outer products and adds noise::

        (sum_k clip(w_k) clip(w_k)^T + noise) / m

    or the diagonal of that matrix. The product of one client moves the sum by at most C^2 in the
    Frobenius norm, see :func:`~fedmtl.privacy.noise.symmetric.outer_sensitivity`. Products of
    matrices round, so the rows are added in the order of their clients.

    Example:
        >>> import torch
        >>> from fedmtl import FullParticipation
        >>> from fedmtl.privacy import Clip, OuterProductSum, Receipt, Release, SeededSource
        >>> everybody = FullParticipation().bind(2)
        >>> plan = {"name": "c", "dimension": 2, "form": "symmetric", "sampling": everybody}
        >>> release = Release(**plan, clip=Clip(9.0))
        >>> mechanism = OuterProductSum(release, SeededSource(0))
        >>> clients = torch.arange(2)
        >>> rows = torch.tensor([[1.0, 2.0], [0.0, 2.0]])
        >>> mechanism(rows, clients, Receipt(0, 0, clients)).round(decimals=4).tolist()
        [[0.5, 1.0], [1.0, 4.0]]
    """

    def total(self, rows: Message, clients: Tensor, width: float | None = None) -> Tensor:
        """Adds up the products of the clipped rows.

        Returns:
            float64 (D (D + 1) / 2,) for a matrix, in the isometric coordinates of
            :func:`~fedmtl.privacy.noise.symmetric.svec`; (D,) for a diagonal.
        """
        assert isinstance(rows, Tensor)
        ordered = rows[torch.argsort(clients.to(rows.device))]
        diagonal = self.release.form == "diagonal"
        return outer_product_sum(ordered, self.release.clip, diagonal=diagonal)

    def noised_mean(self, total: Tensor, receipt: Receipt) -> Tensor:
        """Adds the noise of a round to a sum, and divides it by m; see :class:`ClippedSum`.

        Returns:
            The released value, float64 (D, D), or (D,) for a diagonal.
        """
        value = super().noised_mean(total, receipt)
        if self.release.form == "diagonal":
            return value
        return smat(value)


class MechanismAround(Generic[Inner]):
    """A mechanism around another one, of which it has the release, the name and the checks.

    Args:
        mechanism: the one inside.
    """

    def __init__(self, mechanism: Inner) -> None:
        self.release = mechanism.release
        self.name = mechanism.name
        self.check = mechanism.check
        self._mechanism = mechanism

    @property
    def on_grid(self) -> GridValue | None:
        """Returns the last value of the mechanism inside with its grid."""
        return self._mechanism.on_grid
