"""Secure sums: the mechanism of a client that adds its share of the noise, and its account.

Every client adds a share of the noise to its own clipped row before masks hide it
(:mod:`fedmtl.secure`), so that epsilon holds against the server, too; :mod:`.secure_calibration`
has the settings.

The charges of a client are in a ledger of its own, :class:`ShareAccount`. A charge is on the disk
before the row with its noise exists, and stays whatever becomes of the round. A second attempt of a
round is a second charge with new noise.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import closing, contextmanager
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from .._files import Json
from ..errors import BudgetExhausted, PrivacyError, ResumeError, SecureSumError
from .clip import Clip, are_long, bounds_of, whole_cells, whole_cells_by_row
from .ledger import Ledger
from .mechanism import ClippedSum, Message, OpenedSum, check_rows
from .noise.grid import GridValue, noised
from .noise.shares import DistributedGaussian
from .noise.sources import NoiseSource, Words
from .receipt import Receipt
from .release import Release
from .secure_calibration import SecureCalibration


class LocalRandomizer:
    """The mechanism of one client in a secure sum: clips the row, truncates it to the public grid
    and adds the client's share of the noise::

        trunc(clip(w) / g) + N_Z(0, s^2)    modulo 2**bits

    If the unit is a record, w is the sum of the clipped gradients of the client's records, each of
    them on the grid, and is not clipped again.

    The result is no release by itself: masks hide it, and only the sum is opened, with the shares
    of at least h honest clients.

    Args:
        release: with its clip and its noise as shares.
        source: of the noise.

    Attributes:
        release: see above.
        name: a receipt pays for it once.
    """

    def __init__(self, release: Release, source: NoiseSource) -> None:
        assert release.shares is not None
        self.release = release
        self.name = f"{release.name}/share"
        self._noise = release.shares
        self._source = source

    def __call__(self, row: Tensor, clients: Tensor, receipt: Receipt, roster: int) -> np.ndarray:
        """Returns the words that a client contributes.

        Args:
            row: (1, D), any float dtype and device; one that is not finite counts as zero.
            clients: int64 (1,), whose row it is: with a seeded source it addresses the noise.
            receipt: of this client, from its own ledger; spent on this share.
            roster: n, clients of the roster.

        Returns:
            (D,) uint32, or uint64 of 64 bits.

        Raises:
            PrivacyError: rows of another shape or of several clients, a roster that the noise is
                not planned for, or the receipt does not pay for this share.
        """
        check_rows(self.release, row, clients)
        if len(clients) != 1:
            raise PrivacyError(
                f"Release {self.name!r} takes the row of one client, not of {len(clients)}."
            )
        # Refused rosters must not cost the receipt.
        self._noise.deviation(roster)
        receipt.spend(self.name, clients)
        return self.words(row, int(clients), receipt.charged_step(self.name), roster)

    def words(self, row: Tensor, client: int, step: int, roster: int) -> np.ndarray:
        """Returns the words of one client, which has paid for them; see :meth:`__call__`.

        Args:
            row: (1, D).
            client: its number, which with ``step`` addresses the noise of a seeded source.
            step: the round.
            roster: n, clients of the roster.
        """
        words = share_words(self._source, self.release.name, client, step)
        return self._noise.words(self.cells(row), roster, words)

    def cells(self, row: Tensor) -> np.ndarray:
        """Returns a clipped row in cells of the grid: (1, D) -> int64 (D,)."""
        # Strides and devices change last bits.
        on_host = row.detach().cpu().contiguous()
        if self.release.unit == "record":
            of_row: np.ndarray = whole_rows(self.name, on_host, self._noise.width)[0]
            return of_row
        clip = self.release.clip
        assert isinstance(clip, Clip)
        program = whole_cells
        if are_long(on_host.shape[1]):
            program = whole_cells_by_row
        whole = program(on_host, *bounds_of(clip), self._noise.width)
        cells: np.ndarray = whole.numpy().astype(np.int64)
        return cells


class SecureSum(ClippedSum):
    """The mechanism of a secure sum whose clients are all in one process: it releases, to the last
    bit, the sum that the server of :mod:`fedmtl.secure` opens, and leaves out the masks, which
    cancel::

        (sum_k trunc(clip(w_k) / g) + N_Z(0, s^2)    modulo 2**bits) g / m

    Args:
        release: with its clip and its noise as shares.
        source: of the noise of all clients.
    """

    def __call__(self, rows: Message, clients: Tensor, receipt: Receipt) -> Tensor:
        """Releases the sum with its noise, see :class:`~fedmtl.privacy.Mechanism`.

        Args:
            rows: (k, D) of the clients, or their sum; or the sum that a server has opened, which
                has their shares of the noise.
            clients: int64 (k,), whose rows are in it.
            receipt: of the cohort, of which the clients of the roster are a part.

        Returns:
            float64 (D,) on the CPU.
        """
        if not isinstance(rows, OpenedSum):
            return super().__call__(rows, clients, receipt)
        if rows.cells.shape != (self.size,):
            raise PrivacyError(
                f"Release {self.name!r} has {self.size:,} numbers, and the opened sum is of shape "
                f"{rows.cells.shape}."
            )
        shares = self._shares
        self._check_roster(shares, rows.roster, len(clients))
        receipt.spend(self.name, clients)
        return self._value(shares, rows.cells, receipt)

    def total(self, rows: Message, clients: Tensor, width: float | None = None) -> Tensor:
        """Adds up the rows, see :meth:`ClippedSum.total`.

        Raises:
            PrivacyError: the unit is a record, and a row is not on the grid.
        """
        if self.release.unit == "record":
            assert isinstance(rows, Tensor)  # see RoundChannel.new_total
            whole_rows(self.name, rows, self._shares.width)
        return super().total(rows, clients, width)

    @property
    def _shares(self) -> DistributedGaussian:
        assert self.release.shares is not None
        return self.release.shares

    def noised_mean(self, total: Tensor, receipt: Receipt) -> Tensor:
        """Adds the shares of the noise of the clients that sent a row, and divides by the public
        denominator.

        Args:
            total: float64 (D,), the sum of the clipped rows on the grid.
            receipt: of the cohort, which in one process is the whole roster; spent on this release.

        Returns:
            float64 (D,) on the CPU.

        Raises:
            PrivacyError: the roster is not one that the noise is planned for, or the receipt does
                not pay for this release.
            SecureSumError: more clients are missing than may be. Nothing is released, and the
                charge stays.
        """
        shares = self._shares
        step = receipt.charged_step(self.name)
        senders = receipt.senders(self.name)
        self._check_roster(shares, len(receipt.clients), len(senders))
        noise = np.zeros(self.size, dtype=np.int64)
        for client in senders.tolist():
            words = share_words(self.source, self.name, client, step)
            noise += shares.share(self.size, len(receipt.clients), words)
        # Both are whole numbers of the grid, below 2**53.
        cells = noised(total / shares.width, torch.from_numpy(noise).double())
        return self._value(shares, shares.wrapped(cells.numpy().astype(np.int64)), receipt)

    def _value(self, shares: DistributedGaussian, cells: np.ndarray, receipt: Receipt) -> Tensor:
        """Returns an opened sum, in cells, divided by the public denominator."""
        value = torch.from_numpy(shares.opened(cells)) / self.denominator
        if self.source.name == "secure":
            step = receipt.charged_step(self.name)
            self.on_grid = GridValue(step, value.clone(), shares.width, self.denominator)
        return value

    def _check_roster(self, shares: DistributedGaussian, roster: int, rows: int) -> None:
        """Raises an error for a roster that is not planned for, or of which too many are
        missing."""
        shares.deviation(roster)
        least = roster - shares.missing
        if rows < least:
            raise SecureSumError(
                f"{rows:,} of {roster:,} clients have a row in release {self.name!r}, and "
                f"the secure sum takes {least:,}; nothing is released."
            )


def whole_rows(name: str, rows: Tensor, width: float) -> np.ndarray:
    """Returns rows that are sums of vectors on the grid, in cells.

    To truncate them would move a sum by more than the clip norm, in each of its numbers.

    Args:
        name: of the release.
        rows: (k, D), whole multiples of the width.
        width: of the grid.

    Returns:
        int64 (k, D).

    Raises:
        PrivacyError: rows that are no such sums.
    """
    cells = rows.detach().cpu().double().numpy() / width
    if not np.array_equal(cells, np.trunc(cells)):
        raise PrivacyError(
            f"Release {name!r} takes sums of clipped gradients on the grid of its noise, as "
            "ClientBatch.gradient_sums returns them, and got other rows."
        )
    whole: np.ndarray = cells.astype(np.int64)
    return whole


def share_words(source: NoiseSource, name: str, client: int, step: int) -> Words:
    """Returns the random words of a client's share of the noise.

    Args:
        source: of the noise.
        name: of the release.
        client: its number in the population, which with ``step`` addresses seeded noise.
        step: the round.
    """
    return source.words(f"noise/{name}/share/{client}", step)


class ShareAccount:
    """A client's own account of its shares in secure sums, in a ledger on its own disk.

    No server can make a client contribute more often than was planned, in however many runs,
    rounds or attempts. Seeded noise is a simulation, and promises nothing: a round is charged once,
    however many attempts it has.

    Args:
        path: of the ledger.
        calibration: of the run.
        client: name of the client.
        position: its number in the population, which receipts name it by.
        fingerprint: of the settings.
        source: of the noise.
    """

    def __init__(
        self,
        path: Path,
        calibration: SecureCalibration,
        client: str,
        position: int,
        fingerprint: str,
        source: NoiseSource,
    ) -> None:
        self._path = path
        self._calibration = calibration
        self._client = client
        self._position = position
        self._fingerprint = fingerprint
        self._source = source

    @contextmanager
    def charged(self, step: int, roster: int) -> Iterator[Receipt]:
        """Charges a participation, and yields its receipt. On entry the charge is on the disk.

        Args:
            step: the round.
            roster: n, clients of the roster.

        Raises:
            PrivacyError: the noise is not planned for such a roster; nothing is charged.
            BudgetExhausted: all participations that were planned are charged.
            ResumeError: the ledger was written with other settings, or was altered. Or the noise is
                seeded, and a later round was charged but not this one.
        """
        self._calibration.noise.deviation(roster)
        with closing(self._ledger()) as ledger:
            # A seeded share of a round is the same again, and is charged once.
            before = step if ledger.replays_free else None
            used = int(ledger.uses(before=before)[0])
            if used >= self._calibration.uses:
                raise BudgetExhausted(
                    f"{self._client} has taken part in the {self._calibration.uses:,} secure sums "
                    f"that its privacy pays for, attempts that failed among them: "
                    f"{self._calibration.text(used)}. {self._path} has them, and no run gets more."
                )
            self._check_passed(ledger, step, used)
            # Rounds that have passed without this client are written as such.
            if ledger.reached < step:
                ledger.charge(ledger.reached, step, [[]] * (step - ledger.reached))
            ledger.charge(step, step + 1, [[0]])
            yield Receipt(step, used, torch.tensor([self._position]))

    def _check_passed(self, ledger: Ledger, step: int, used: int) -> None:
        """Raises ResumeError for a round that would not be charged, and was not before."""
        if not ledger.replays_free or step >= ledger.reached:
            return
        if int(ledger.uses(before=step + 1)[0]) == used:
            raise ResumeError(
                f"Round {step + 1} has passed without {self._client}. Under seeded noise a round "
                "of the past is not charged, since it was charged before; this one was not "
                f"({self._path}). Take source='secure', or simulate anew in a new folder."
            )

    @property
    def used(self) -> int:
        """Returns the participations that are charged."""
        with closing(self._ledger()) as ledger:
            return int(ledger.uses()[0])

    def _ledger(self) -> Ledger:
        header: Mapping[str, Json] = {"client": self._client} | self._calibration.header()
        return Ledger(
            self._path,
            header,
            fingerprint=self._fingerprint,
            replays_free=self._source.name == "seeded",
            clients=1,
            resume=True,
        )
