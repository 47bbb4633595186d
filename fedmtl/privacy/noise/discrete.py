r"""The discrete Gaussian: noise in whole numbers, drawn exactly.

N_Z(0, s^2) has P(k) = exp(-k^2 / (2 s^2)) / Z on the integers (Canonne, Kamath, Steinke, "The
discrete Gaussian for differential privacy", NeurIPS 2020). In secure mode sums are rounded to a
public grid (see :mod:`.grid`), s in cells of that grid is a whole number of at least 2**40, no
smaller than the deviation that the multiplier gives, and :func:`discrete_gaussian` draws from the
law itself, not from an approximation in floating point. The release is therefore, bit by bit, that
of the theorem; it is divided by a public constant afterwards.

The cost. Let Q be the law of a Gaussian number of deviation s, rounded to the nearest integer.
Q added to a whole number is a Gaussian mechanism followed by rounding, so all accounting of
Gaussian noise holds for it, with any sampling and in any number of coordinates. P is close to Q.
With u uniform on (-1/2, 1/2),

    Q(k) = exp(-k^2 / (2 s^2)) / (s sqrt(2 pi)) r(k),    r(k) = E[exp(-u^2 / (2 s^2)) cosh(k u /
    s^2)],

and s sqrt(2 pi) <= Z <= s sqrt(2 pi) (1 + 2.1 exp(-2 pi^2 s^2)) by Poisson's summation formula. By
Jensen's inequality r(k) >= exp(-1 / (24 s^2)), and r(k) <= E[cosh(k u / s^2)] = sinh(x) / x <=
exp(x^2 / 6) with x = k / (2 s^2), so for every k

    log P(k) / Q(k) <= 1 / (24 s^2),      log Q(k) / P(k) <= k^2 / (24 s^4) + 2.1 exp(-2 pi^2 s^2).

Let x and x' be neighbours, M the run with noise P and M' that with noise Q, which is (epsilon,
delta)-private, and let N numbers be drawn in all, independent of one another and of everything
else. Under Q their squares add up to at most R^2 = (s (sqrt(N) + sqrt(2 t)) + sqrt(N) / 2)^2 but
for a probability of exp(-t) (Laurent, Massart, "Adaptive estimation of a quadratic functional by
model selection", Ann. Statist. 2000, Lemma 1; rounding moves a number by 1/2 at most). So for every
set E of outputs

    P(M(x) in E) <= exp(N / (24 s^2)) P(M'(x) in E) <= exp(N / (24 s^2)) (exp(epsilon) P(M'(x') in
    E) + delta), P(M'(x') in E) <= exp(R^2 / (24 s^4)) P(M(x') in E) + exp(-t).

Take t = epsilon + 1000: the last term, times exp(epsilon), is exp(-1000), which no double shows
beside delta, and neither does exp(-2 pi^2 s^2) for s >= 16. The run M is private at delta
exp(slack / 2) with epsilon + slack,

    slack = N / (24 s^2) + R^2 / (24 s^4),      about N / (12 s^2),

which is the first term and no smaller one. That is added to every epsilon of Gaussian noise: for s
>= 2**40 about 1e-16 for a million numbers in each of a thousand rounds. A release in which a client
takes no part has one law under both neighbours, whatever that law is: let M' have the noise Q only
in the client's own releases. So the account of a client counts the numbers of its own releases.

The draw is by rejection from blocks of 2**b integers under a staircase (after Algorithm 3 of
the paper, with a staircase in place of the discrete Laplace law, and one comparison in place of
Algorithm 1). A trial is accepted if a uniform number, whose bits are drawn as they are needed,
is below a probability. Doubles with a margin of 2**-40 decide nearly all trials; the others are
decided by whole numbers of any length. The number of trials, and so the time, depends on the
noise: an observer that can time single releases to a microsecond may learn a little of it.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from fractions import Fraction
from functools import lru_cache
from typing import TYPE_CHECKING

import numpy as np

from ...errors import PrivacyError

if TYPE_CHECKING:
    from .sources import Words

MARGIN = 2.0**-40
"""Relative error that doubles are trusted to stay below in the probability of a trial (it is below
2**-42)."""

LEAST = 1 << 40
"""Deviation in cells of the noise that a server adds, or more."""

LARGEST = 1 << 47
"""Largest deviation in cells; below it a magnitude of 64 deviations is exact as a double."""

_SLOT_BITS = 16
_SLOTS = 1 << _SLOT_BITS
_LOG2 = Fraction(6931471806, 10**10)  # a little above log(2)
_TRIALS = 1 << 15  # whose arrays all fit the cache
_FAR = 256.0  # exponents beyond are left to whole numbers


def slack(numbers: int, epsilon: float, deviation: int = LEAST) -> float:
    """Returns the addition to an ``epsilon`` of Gaussian noise that is drawn as whole numbers.

    Args:
        numbers: N, noised numbers of all the releases.
        epsilon: of the releases with Gaussian noise; infinite without noise.
        deviation: s in cells, or less; at least 16.
    """
    root = math.sqrt(numbers)
    # R / s^2
    reach = (root + math.sqrt(2 * (epsilon + 1000))) / deviation + root / 2 / deviation**2
    return (numbers / deviation**2 + reach**2) / 24


def discrete_gaussian(
    words: Words, size: int, deviation: int | Fraction, *, margin: float = MARGIN
) -> np.ndarray:
    """Returns (size,) int64 independent numbers with the law N_Z(0, s^2).

    Args:
        words: count -> (count,) uint64 fresh random words.
        size: number of draws, at least 1.
        deviation: s, above 0 and below 2**47, of any size (2**40 and more if it is accounted
            for).
        margin: relative error of doubles; whatever it is, the numbers made of the same words are
            the same.

    Raises:
        PrivacyError: a deviation out of range.
    """
    stairs = _stairs(Fraction(deviation))
    out = np.empty(size, dtype=np.int64)
    filled = 0
    while filled < size:
        trials = min(_TRIALS, size - filled + (size - filled >> 4) + 16)
        drawn = stairs.trial(words, trials, margin)[: size - filled]
        out[filled : filled + len(drawn)] = drawn
        filled += len(drawn)
    return out


@dataclass(frozen=True, eq=False)
class _Stairs:
    """A staircase above exp(-x^2 / (2 s^2)), x >= 0: block j, the 2**b integers from j 2**b on, has
    ``slots[j]`` of 2**16 chances, and the height ``slots[j] * unit``. The last entry is the tail
    from there on: block ``last + i`` of it has the part 2**-(i + 1) of its chances, and of its
    height. That is above the curve if the tail begins far enough out, last 4**b >= log(2) s^2:
    from a block to the next the curve falls to a half at least.

    Attributes:
        deviation: s.
        bits: b.
        slots: (last + 1,) int64, 2**16 in sum.
        unit: of the heights; a double, and as such exact.
        block: (2**16,) the block of every slot.
    """

    deviation: Fraction
    bits: int
    slots: np.ndarray
    unit: float
    block: np.ndarray

    def trial(self, words: Words, count: int, margin: float) -> np.ndarray:
        """Returns the numbers that are accepted of ``count`` trials, in order.

        A trial draws a point below the staircase: a block by its chances, a whole number in it, and
        a height. The number is accepted if the point is below the curve.
        """
        first, second = words(2 * count).reshape(2, count)
        block, halvings = self._blocks(first, words)
        # One word is enough for the slot, the sign and the place in the block: 16 + 1 + b bits.
        negative = (first >> np.uint64(63 - _SLOT_BITS) & np.uint64(1)).astype(bool)
        size = (block << self.bits) + (first & np.uint64((1 << self.bits) - 1)).astype(np.int64)
        accepted = self._accepted(second, size, block, halvings, words, margin)
        # Zero has one sign: with two it would be twice as likely.
        accepted &= ~(negative & (size == 0))
        signed: np.ndarray = np.where(negative, -size, size)[accepted]
        return signed

    def _blocks(self, first: np.ndarray, words: Words) -> tuple[np.ndarray, np.ndarray]:
        """Returns the block of each word of ``first`` (m,), and how often its step of the staircase
        was halved, both int64 (m,). Only blocks of the tail are halved."""
        block = self.block[(first >> np.uint64(64 - _SLOT_BITS)).astype(np.int64)]
        halvings = np.zeros_like(block)
        for place in np.flatnonzero(block == len(self.slots) - 1).tolist():
            # Block last + i has half the chance of the one before: a run of coins chooses it.
            run = _zeros(words)
            block[place] += run
            halvings[place] = run + 1
        return block, halvings

    def _accepted(
        self,
        second: np.ndarray,
        size: np.ndarray,
        block: np.ndarray,
        halvings: np.ndarray,
        words: Words,
        margin: float,
    ) -> np.ndarray:
        """Returns a mask of the trials that lie below the curve, bool (m,).

        Doubles decide unless the height is within their error ``margin`` of the curve, or so far
        out that they would underflow; whole numbers decide there.
        """
        slots = self.slots[np.minimum(block, len(self.slots) - 1)]
        height = np.ldexp(slots * self.unit, -halvings)
        exponent = np.square(size * (1.0 / float(self.deviation)))
        exponent *= 0.5
        chance = np.exp(-exponent)
        chance /= height
        # The first 53 bits of the word: the uniform number is in [uniform, uniform + 2**-53).
        uniform = (second >> np.uint64(11)).astype(np.float64) * 2.0**-53
        accepted = uniform + 2.0**-53 <= chance * (1 - margin)
        undecided = ~accepted & (uniform < chance * (1 + margin))
        undecided |= exponent > _FAR
        for place in np.flatnonzero(undecided).tolist():
            top = int(slots[place]) * Fraction(self.unit) / (1 << int(halvings[place]))
            gamma = (int(size[place]) / self.deviation) ** 2 / 2
            accepted[place] = _below(int(second[place]), gamma, top, words)
        return accepted


@lru_cache(maxsize=64)
def _stairs(deviation: Fraction) -> _Stairs:
    if not 0 < deviation < LARGEST:
        raise PrivacyError(
            f"The deviation of discrete Gaussian noise is {float(deviation):g} cells; it must be "
            "in (0, 2**47)."
        )
    # 8 to 16 blocks in a deviation: few words are rejected, and the tables stay in the cache.
    bits = max(0, math.floor(deviation).bit_length() - 4)
    square = (deviation / (1 << bits)) ** 2
    last = max(1, math.ceil(_LOG2 * square))
    curve = np.exp(-np.square(np.arange(last + 1)) / (2 * float(square)))
    # The tail is a geometric series of steps, which add up to twice the first.
    curve[-1] *= 2
    slots = np.ceil((_SLOTS - last - 1) / curve.sum() * curve).astype(np.int64)
    slots = np.maximum(slots, 1)
    slots[0] += _SLOTS - slots.sum()
    # The staircase must not be below the curve: 2**-30 is more than these doubles can be wrong by.
    unit = float((curve / slots).max()) * (1 + 2.0**-30)
    return _Stairs(deviation, bits, slots, unit, np.repeat(np.arange(last + 1), slots))


def _zeros(words: Words) -> int:
    """Returns the number of zeros before the first one in a stream of fresh bits."""
    count = 0
    while not (word := int(words(1)[0])):
        count += 64
    return count + 64 - word.bit_length()


def _below(word: int, gamma: Fraction, height: Fraction, words: Words) -> bool:
    """Returns True if a uniform number with the first 64 bits ``word`` is below ``exp(-gamma) /
    height``."""
    bits = 64
    # A word more halves the chance of a further one 64 times: the loop ends almost at once.
    while True:
        low, high = exponential(gamma, bits + 32)
        if (word + 1) * height <= low * (1 << bits):
            return True
        if word * height >= high * (1 << bits):
            return False
        word = word << 64 | int(words(1)[0])
        bits = bits + 64


def exponential(gamma: Fraction, precision: int) -> tuple[Fraction, Fraction]:
    """Returns rational numbers on both sides of ``exp(-gamma)``, gamma >= 0, within
    ``2**-precision`` of each other.

    The alternating series of exp(-gamma / 2**h), gamma / 2**h <= 1/2, in whole numbers of 2**-p
    that are rounded down, with a bound on the rounding error; the result is squared h times,
    rounding outwards.
    """
    halvings = max(0, (2 * math.ceil(gamma)).bit_length())
    p = precision + halvings + 16 + precision.bit_length()
    y = math.floor(gamma / (1 << halvings) * (1 << p))
    total = term = 1 << p
    count = 0
    while term:
        count += 1
        term = (term * y >> p) // count
        if count % 2:
            total += -term
        else:
            total += term
    slack = 4 * (count + 1)  # of y, of every term, and of the rest of the series
    low = max(0, total - slack)
    high = total + slack
    for _ in range(halvings):
        low = low * low >> p
        high = (high * high >> p) + 1
    return Fraction(low, 1 << p), Fraction(min(high, 1 << p), 1 << p)
