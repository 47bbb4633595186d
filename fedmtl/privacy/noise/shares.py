"""Noise of a secure sum: every client adds a share of it to its own row, in whole numbers.

A row is clipped and truncated toward zero to multiples of a public power of two g, see
:mod:`..clip`, so it is never longer than C, and the sensitivity S of a sum stays that of a trusted
server's. A client of a roster of n adds discrete Gaussian noise of deviation

    s = ceil(z S / (g sqrt(h)))

cells to each number, where z is the noise multiplier of the sum and h the least number of honest
rows in it (:func:`fedmtl.secure.roster.honest_rows`). The noise of clients that collude counts
as nothing.

The sum of h shares is nearly discrete Gaussian itself: at every number its law is within a factor
exp(+-tau) of N_Z(0, h s^2), with tau = 10 sum_{k < h} exp(-2 pi^2 s^2 k / (k + 1)) (Kairouz, Liu,
Steinke, "The distributed discrete Gaussian mechanism for federated learning with secure
aggregation", ICML 2021, Theorem 1). For s >= 16 that is below h exp(-2500), which no double shows.
So the sum is accounted for as Gaussian noise of multiplier z, with the slack of
:mod:`.discrete` at z S / g cells; further shares are further noise, independent of these.

Sums are whole numbers modulo 2**bits. The server sees a function of the sum with its noise,
so a sum that wraps around costs usefulness and no privacy. g is the smallest power of two for which
no sum of n honest rows does, unless their noise is beyond 12.5 deviations, where 1e10 numbers are
with a probability below 1e-24. Of 64 bits it is the smallest for which sums are exact as doubles.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from fractions import Fraction
from functools import cached_property

import numpy as np

from ...errors import PrivacyError
from ...secure.roster import honest_rows, least_roster
from .discrete import LARGEST, discrete_gaussian
from .sources import Words

LEAST_CELLS = 1 << 16
"""Least number of cells of a grid in the bound of a row: truncation to fewer costs usefulness."""
_LEAST_SHARE = 16  # deviation in cells, from which on a double shows no tau
_MOST_CELLS = 1 << 50  # rows are whole numbers in doubles
_MOST_SUM = 1 << 53  # sums are, too
_FAR = Fraction(25, 2)  # deviations


@dataclass(frozen=True, kw_only=True)
class DistributedGaussian:
    """The distributed discrete Gaussian noise of a secure sum, of which each client adds a share.

    Args:
        multiplier: z, of the noise of the sum over its sensitivity.
        sensitivity: S, of the sum.
        bound: C, on the vector of one protected unit.
        max_roster: clients of the largest roster.
        units: the most vectors in a sum, if clients have several; None: one from each client.
        colluding: t, clients of a roster whose noise does not count.
        missing: d, clients of a roster that may be lost after it is fixed.
        bits: 32 or 64; sums are modulo 2**bits.

    Raises:
        PrivacyError: no roster of so many clients protects them, or no grid fits sums of so many
            bits.
    """

    multiplier: float
    sensitivity: float
    bound: float
    max_roster: int
    colluding: int
    missing: int
    bits: int = 32
    units: int | None = None

    def __post_init__(self) -> None:
        # Told before the smallest roster is searched for, which takes memory by the missing.
        if self.max_roster <= self.colluding + 2 * self.missing:
            raise PrivacyError(
                f"A secure sum takes rosters of more than {self.colluding + 2 * self.missing:,} "
                f"clients if {self.colluding:,} of them may collude and {self.missing:,} be "
                f"missing; cohorts have {self.max_roster:,}. Take larger cohorts, or fewer that "
                "collude or are missing."
            )
        least = self.min_roster
        if self.max_roster < least:
            raise PrivacyError(
                f"A secure sum takes rosters of {least:,} clients or more if {self.colluding:,} of "
                f"them may collude and {self.missing:,} be missing; cohorts have "
                f"{self.max_roster:,}. Take larger cohorts, or fewer that collude or are missing."
            )
        coarse = Fraction(self.bound) < LEAST_CELLS * Fraction(self.width)
        # With less noise than a few cells a sum of shares is not Gaussian any more.
        if coarse or self.deviation(self.max_roster) < _LEAST_SHARE:
            remedy = "Take 64 bits." if self.bits == 32 else "Ask for less noise."
            raise PrivacyError(
                f"Sums of {self._units(self.max_roster):,} vectors with noise of multiplier "
                f"{self.multiplier:g} do not fit {self.bits} bits on a grid of {LEAST_CELLS:,} "
                f"cells in the clip norm and {_LEAST_SHARE} in the noise of a client. {remedy}"
            )

    @property
    def min_roster(self) -> int:
        """Returns the number of clients of the smallest roster."""
        return least_roster(self.colluding, self.missing)

    @cached_property
    def width(self) -> float:
        """Returns g, a power of two in the units of the rows."""
        exponent = math.frexp(self.bound / _MOST_CELLS)[1]
        while not self._fits(math.ldexp(1.0, exponent)):
            exponent += 1
        return math.ldexp(1.0, exponent)

    def _fits(self, width: float) -> bool:
        """Returns True if sums of the largest and of the smallest roster fit; those between have
        fewer rows than the one and less noise than the other."""
        cells = math.ceil(Fraction(self.bound) / Fraction(width))
        for roster in (self.max_roster, min(self.min_roster, self.max_roster)):
            share = self._deviation(width, roster)
            far = math.ceil(_FAR * share * (math.isqrt(roster) + 1))
            most = min(1 << (self.bits - 1), _MOST_SUM)
            if self._units(roster) * cells + far >= most or share >= LARGEST:
                return False
        return True

    def _units(self, roster: int) -> int:
        """Returns the most vectors in a sum of a roster."""
        if self.units is None:
            return roster
        return self.units

    def _deviation(self, width: float, roster: int) -> int:
        """Returns s of a grid: the least whole number whose square times h is at least
        (z S / g)**2."""
        rows = honest_rows(roster, self.colluding, self.missing)
        ratio = Fraction(self.multiplier) * Fraction(self.sensitivity) / Fraction(width)
        square = math.ceil(ratio**2 / rows)
        # The whole root rounded up: the noise is never less than the charged noise.
        return math.isqrt(square - 1) + 1

    def deviation(self, roster: int) -> int:
        """Returns s, the standard deviation of a client's share in cells.

        Args:
            roster: n, clients of the roster, as the client sees it.

        Raises:
            PrivacyError: a roster that protects nobody, or that is larger than planned.
        """
        if not self.min_roster <= roster <= self.max_roster:
            raise PrivacyError(
                f"A roster of {roster:,} clients is not one of those that the noise is planned "
                f"for, of {self.min_roster:,} to {self.max_roster:,}."
            )
        return self._deviation(self.width, roster)

    @cached_property
    def cells(self) -> int:
        """Returns the standard deviation of the noise that is charged, in cells, rounded down."""
        ratio = Fraction(self.multiplier) * Fraction(self.sensitivity) / Fraction(self.width)
        return math.floor(ratio)

    def excess(self, roster: int, missing: int = 0) -> float:
        """Returns the deviation of a sum's noise over that of a trusted server.

        Args:
            roster: n, clients of the roster.
            missing: of them, without a row in the sum.
        """
        rows = honest_rows(roster, self.colluding, self.missing)
        return math.sqrt((roster - missing) / rows)

    def std(self, roster: int) -> float:
        """Returns the standard deviation of the noise of a sum in the units of the rows, nobody
        missing.

        Args:
            roster: n, clients of the roster.
        """
        return math.sqrt(roster) * self.deviation(roster) * self.width

    def text(self) -> str:
        """Returns the conditions on which the noise protects the clients of a cohort."""
        rows = honest_rows(self.max_roster, self.colluding, self.missing)
        return (
            f"of {self.max_roster:,} clients of a cohort at most {self.colluding:,} may collude "
            f"with it and {self.missing:,} be lost, and the noise counts on the shares of {rows:,}"
        )

    def share(self, size: int, roster: int, words: Words) -> np.ndarray:
        """Draws a client's share of the noise, in cells.

        Args:
            size: numbers of a row.
            roster: n, clients of the roster.
            words: random words.

        Returns:
            int64 (size,).
        """
        return discrete_gaussian(words, size, self.deviation(roster))

    def words(self, cells: np.ndarray, roster: int, words: Words) -> np.ndarray:
        """Returns a row with a client's share of the noise, modulo 2**bits.

        Args:
            cells: int64 (D,), the row.
            roster: n, clients of the roster.
            words: random words.

        Returns:
            (D,) uint32, or uint64 of 64 bits.
        """
        noise = self.share(len(cells), roster, words)
        # Whole numbers of two's complement are those modulo 2**bits.
        words_of_row: np.ndarray = (cells + noise).astype(f"<u{self.bits // 8}")
        return words_of_row

    def wrapped(self, total: np.ndarray) -> np.ndarray:
        """Returns a sum modulo 2**bits as the server reads it: the number next to zero.

        Args:
            total: int64 (D,), in cells.

        Returns:
            int64 (D,).
        """
        signed: np.ndarray = total.astype(f"<i{self.bits // 8}").astype(np.int64)
        return signed

    def opened(self, total: np.ndarray) -> np.ndarray:
        """Returns an opened sum, int64 (D,), in the units of the rows: float64 (D,)."""
        value: np.ndarray = total * self.width
        return value
