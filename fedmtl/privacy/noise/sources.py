"""Sources of random bits: a seed (reproducible, not private) or the operating system (private, not
reproducible).

Neither source keeps state that a caller could rewind by accident: seeded draws are addressed by
(seed, purpose, step), secure draws are fresh at every call and are never stored or logged.
"""

from __future__ import annotations

import itertools
import math
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import ClassVar, Protocol

import numpy as np
import torch
from scipy.special import ndtri
from torch import Tensor

from ...errors import PrivacyError
from ...random import Coins, derive_key, keyed_generator, philox_words

Words = Callable[[int], np.ndarray]
"""count -> (count,) uint64, the next random words of a stream."""
More = Callable[[np.ndarray], np.ndarray]
"""(m,) places in a flat array of numbers -> (m,) uint64, a second random word of each of these."""


class NoiseSource(Protocol):
    """Supplies the noise of releases and the coins of cohorts.

    Example:
        >>> from fedmtl.privacy import NoiseSource, SeededSource
        >>> source: NoiseSource = SeededSource(seed=7)
        >>> signs, tails = source.tails("update", step=0, size=4)
        >>> signs.tolist(), bool(((0 < tails) & (tails <= 0.5)).all())
        ([1.0, -1.0, 1.0, 1.0], True)
    """

    @property
    def name(self) -> str:
        """Returns ``"seeded"`` or ``"secure"``."""

    def normal(self, purpose: str, step: int, size: int) -> np.ndarray:
        """Draws standard normal numbers for one release of one step.

        Args:
            purpose: name of the release.
            step: number of the step.
            size: number of coordinates.

        Returns:
            float64 (size,).
        """

    def tails(
        self, purpose: str, step: int | Tensor, size: int, keys: Tensor | None = None
    ) -> tuple[np.ndarray, np.ndarray]:
        """Returns random signs and tail probabilities, from which every law of noise is made by
        inversion.

        Args:
            purpose: name of the release.
            step: number of the step; (k,) int64 if every row has one of its own.
            size: numbers a row.
            keys: (k,) int64 keys of clients, one row each, or None for a single release.

        Returns:
            Signs (-1 or 1) and probabilities, uniform on (0, 1/2), independent, float64, of shape
            (size,), or (k, size) with keys. A secure probability carries 53 significant bits down
            to about 2**-75, and its least value is 2**-129; a seeded one 63 bits, and its least
            value is 2**-64.
        """

    def words(self, purpose: str, step: int) -> Words:
        """Returns a stream of uniform words for one release of one step.

        Args:
            purpose: name of the release.
            step: number of the step.

        Returns:
            A function from a count to that many words, uint64; each call goes on in the stream.
        """

    def coins(self, purpose: str, step: int) -> Coins:
        """Returns coins for one draw of a cohort.

        Args:
            purpose: name of the draw, such as ``"cohort"``.
            step: number of the step.
        """


@dataclass(frozen=True)
class SeededSource:
    """Counter-based draws keyed by (seed, purpose, replicate, step): the same address gives the
    same bits.

    Args:
        seed: any integer.
        replicate: number of the replicate, from 0.

    Example:
        >>> from fedmtl.privacy import SeededSource
        >>> source = SeededSource(seed=7)
        >>> bool((source.normal("update", 0, 3) == source.normal("update", 0, 3)).all())
        True
    """

    seed: int
    replicate: int = 0
    name: ClassVar[str] = "seeded"

    def normal(self, purpose: str, step: int, size: int) -> np.ndarray:
        """Returns numbers that are a function of the address; see :meth:`NoiseSource.normal`."""
        return keyed_generator(
            self.seed, f"privacy/{purpose}", step, self.replicate
        ).standard_normal(size)

    def tails(
        self, purpose: str, step: int | Tensor, size: int, keys: Tensor | None = None
    ) -> tuple[np.ndarray, np.ndarray]:
        """Returns signs and tails that are a function of (seed, purpose, replicate, step), and of
        the key of the row if there are keys: which other clients are drawn does not matter. See
        :meth:`NoiseSource.tails`.
        """
        if keys is None:
            assert isinstance(step, int)
            generator = keyed_generator(self.seed, f"privacy/tails/{purpose}", step, self.replicate)
            return signs_and_tails(generator.integers(0, 1 << 64, size=size, dtype=np.uint64))
        # Keys are hashes of names: the noise of a client does not depend on the other participants.
        clients = keys.cpu().numpy().view(np.uint64)
        uses = np.broadcast_to(torch.as_tensor(step).numpy().astype(np.uint64), clients.shape)
        return signs_and_tails(
            client_words(np.broadcast_to(self.key(purpose), clients.shape), clients, uses, size)
        )

    def key(self, purpose: str) -> np.uint64:
        """Returns the key of the random numbers of clients.

        Args:
            purpose: name of the release.
        """
        return np.uint64(derive_key(self.seed, f"privacy/owners/{purpose}", self.replicate))

    def words(self, purpose: str, step: int) -> Words:
        """Returns the words of the generator at the address; see :meth:`NoiseSource.words`."""
        return keyed_generator(
            self.seed, f"privacy/words/{purpose}", step, self.replicate
        ).bit_generator.random_raw

    def coins(self, purpose: str, step: int) -> Coins:
        """Returns the coins of the generator at the address; see :meth:`NoiseSource.coins`."""
        return GeneratorCoins(
            keyed_generator(self.seed, f"privacy/{purpose}", step, self.replicate)
        )


@dataclass(frozen=True)
class SecureSource:
    """Fresh bits from the operating system's generator at every call; the arguments address
    nothing.

    Example:
        >>> from fedmtl.privacy import SecureSource
        >>> source = SecureSource()
        >>> bool((source.normal("update", 0, 3) == source.normal("update", 0, 3)).any())
        False
    """

    name: ClassVar[str] = "secure"

    def normal(self, purpose: str, step: int, size: int) -> np.ndarray:
        """Returns numbers by inversion of :meth:`tails`: no gaps wider than about 2**-53 out to 9
        standard deviations. See :meth:`NoiseSource.normal`.
        """
        sign, tail = self.tails(purpose, step, size)
        # Inversion of a tail, and not of a probability near 1, keeps far values exact.
        return sign * ndtri(tail)

    def tails(
        self, purpose: str, step: int | Tensor, size: int, keys: Tensor | None = None
    ) -> tuple[np.ndarray, np.ndarray]:
        """Returns fresh signs and tails; of ``keys`` only the number matters. See
        :meth:`NoiseSource.tails`.
        """
        shape: tuple[int, ...] = (size,)
        if keys is not None:
            shape = (keys.numel(), size)
        return signs_and_tails(
            _system_words(math.prod(shape)).reshape(shape), lambda at: _system_words(len(at))
        )

    def words(self, purpose: str, step: int) -> Words:
        """Returns fresh words; see :meth:`NoiseSource.words`."""
        return _system_words

    def coins(self, purpose: str, step: int) -> Coins:
        """Returns fresh coins; see :meth:`NoiseSource.coins`."""
        return SystemCoins()


@dataclass(frozen=True)
class GeneratorCoins:
    generator: np.random.Generator

    def uniform(self, count: int) -> np.ndarray:
        return self.generator.random(count)


@dataclass(frozen=True)
class SystemCoins:
    def uniform(self, count: int) -> np.ndarray:
        # A double in [0, 1) holds 53 bits.
        return (_system_words(count) >> np.uint64(11)).astype(np.float64) * 2.0**-53


def _system_words(count: int) -> np.ndarray:
    """Returns (count,) uint64 from the operating system."""
    return np.frombuffer(os.urandom(8 * count), dtype=np.uint64)


# the numbers of a block, and those from which they are made, stay in the cache
BLOCK_ELEMENTS = 1 << 15

_ONE = np.array(1.0).view(np.uint64)  # its highest bit is the sign


def signs_and_tails(first: np.ndarray, more: More | None = None) -> tuple[np.ndarray, np.ndarray]:
    """Returns signs and probabilities in (0, 1/2), float64, from random words of any shape.

    The lowest bit of a word is the sign. With ``more``, a tail is ``(a + (b + 1/2) 2**-64) 2**-64``
    with a of 63 bits from ``first`` and b of 64 from ``more``, rounded. b is drawn for one number
    in 1,024, if a is below 2**53. Elsewhere rounding leaves out bits of a, and of b it matters
    only that it adds something to them: from 2**54 on a lowest bit 1 does the same. Without
    ``more`` that bit stands for b everywhere, and the least tail is 2**-64.
    """
    some = first >> 1
    some |= 1
    tail = some.view(np.int64).astype(np.float64)  # faster than of uint64
    tail *= 2.0**-64
    few = np.zeros(0, dtype=np.int64)
    if more is not None:
        few = np.flatnonzero(tail < 2.0**-10)
    if more is not None and len(few):
        a = first.flat[few] >> 1
        b = np.full(len(few), 1 << 63, dtype=np.uint64)
        deep = a < 1 << 53
        b[deep] = more(few[deep])
        tail.reshape(-1)[few] = _deep_tails(a, b)
    np.left_shift(first, 63, out=some)
    some |= _ONE
    return some.view(np.float64), np.minimum(tail, 0.5 - 2.0**-54, out=tail)


def _deep_tails(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """Returns ``(a + (b + 1/2) 2**-64) 2**-64`` for a below 2**63."""
    tail = (b.astype(np.float64) + 0.5) * 2.0**-64 + (a & 0x3FF).astype(np.float64)
    # the other 53 bits of a are exact as a double, so the sum is rounded once, with b to break ties
    tail = tail + (a >> 10).astype(np.float64) * 2.0**10
    return tail * 2.0**-64


def client_tails(
    sources: Sequence[NoiseSource], purpose: str, uses: Tensor, keys: Tensor, size: int
) -> tuple[np.ndarray, np.ndarray]:
    """Returns the signs and tails of clients in R repetitions, float64 (S, R, size): of each those
    of its source.

    Args:
        sources: of the repetitions, all seeded if there are several.
        purpose: name of the release.
        uses: int64 (S, R), the number of each client's use.
        keys: int64 (S, R), keys of the clients.
        size: numbers a client.
    """
    if len(sources) == 1:
        sign, tail = sources[0].tails(purpose, uses[:, 0], size, keys[:, 0])
        return sign[:, None], tail[:, None]
    seeds = [source.key(purpose) for source in sources if isinstance(source, SeededSource)]
    seed = np.broadcast_to(np.array(seeds, dtype=np.uint64), uses.shape)
    clients, at = (
        each.cpu().numpy().view(np.uint64) for each in (keys.contiguous(), uses.contiguous())
    )
    words = client_words(seed.reshape(-1), clients.reshape(-1), at.reshape(-1), size)
    return signs_and_tails(words.reshape(*uses.shape, size))


def check_uses(uses: np.ndarray) -> None:
    """Refuses numbers of clients' uses that have no random words.

    Args:
        uses: whole numbers, not negative.

    Raises:
        PrivacyError: one is 2**32 or more.
    """
    # The counter of the generator has 32 bits for the use: a larger one would repeat noise.
    if uses.size and int(uses.max()) >> 32:
        raise PrivacyError(
            f"Use {int(uses.max())} of a client has no random numbers; there are 2**32 of them."
        )


def client_words(keys: np.ndarray, clients: np.ndarray, uses: np.ndarray, size: int) -> np.ndarray:
    """Returns a random word for each number of each row, uint64 (k, size): a function of the row's
    arguments and of the place of the number, whatever ``size`` is.

    Places 2 i and 2 i + 1 are the two words of Philox4x32-10 under the row's key with the counter
    (i, use, client).

    Args:
        keys: uint64 (k,), of seed, purpose and repetition.
        clients: uint64 (k,) keys of the clients.
        uses: uint64 (k,), below 2**32.
        size: numbers a row, at most 2**32.

    Raises:
        PrivacyError: a larger number of a use.
    """
    check_uses(uses)
    pairs = -(-size // 2)
    words = np.empty((len(uses), pairs, 2), dtype=np.uint64)
    # Blocks bound the memory: the words of 10,000 clients of a large model do not fit it.
    rows = max(1, BLOCK_ELEMENTS // max(1, size))
    columns = BLOCK_ELEMENTS // 2
    for row, column in itertools.product(range(0, len(uses), rows), range(0, pairs, columns)):
        part = slice(row, row + rows)
        key, client, use = (each[part, None] for each in (keys, clients, uses))
        block = words[part, column : column + columns]
        place = np.arange(column, column + block.shape[1], dtype=np.uint64)[None]
        addresses = [key, place, use, client & _MASK, client >> _HALF]
        if len(block) > block.shape[1]:  # the longer axis last
            block = block.transpose(1, 0, 2)
            addresses = [each.T for each in addresses]
        philox_words(block.transpose(2, 0, 1), *addresses)
    return words.reshape(len(uses), 2 * pairs)[:, :size]


_MASK = np.uint64(0xFFFFFFFF)
_HALF = np.uint64(32)
