"""Where random bits come from: a seed (reproducible, not private) or the operating system (private, not
reproducible).

Neither source keeps state that a caller could rewind by accident: seeded draws are addressed by (seed,
purpose, step), secure draws are fresh at every call and are never stored or logged.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Protocol

import numpy as np
import torch
from scipy.special import ndtri
from torch import Tensor

from ...random import Coins, derive_key, keyed_generator

Words = Callable[[int], np.ndarray]
"""count -> (count,) uint64, the next random words of a stream."""
More = Callable[[np.ndarray], np.ndarray]
"""(m,) places in a flat array of numbers -> (m,) uint64, a second random word of each of these."""


class NoiseSource(Protocol):
    """Supplies the noise of releases and the coins of cohorts."""

    @property
    def name(self) -> str:
        """Return ``"seeded"`` or ``"secure"``."""

    def normal(self, purpose: str, step: int, size: int) -> np.ndarray:
        """Return (size,) float64 standard normal numbers for one release of one step."""

    def tails(
        self, purpose: str, step: int | Tensor, size: int, keys: Tensor | None = None
    ) -> tuple[np.ndarray, np.ndarray]:
        """Return random signs and tail probabilities, from which every law of noise is made by inversion.

        Args:
            purpose: name of the release.
            step: number of the step; (k,) int64 where every row has one of its own.
            size: numbers a row.
            keys: (k,) int64 keys of clients, one row each, or None for a single release.

        Returns:
            Signs (-1 or 1) and probabilities, uniform on (0, 1/2), independent, float64, of shape (size,), or
            (k, size) with keys. A probability carries 53 significant bits down to about 2**-75, and its least
            value is 2**-129.
        """

    def words(self, purpose: str, step: int) -> Words:
        """Return a stream of uniform words for one release of one step, as long as it is asked for."""

    def coins(self, purpose: str, step: int) -> Coins:
        """Return coins for one draw of a cohort."""


@dataclass(frozen=True)
class SeededSource:
    """Counter-based draws keyed by (seed, purpose, replicate, step): the same address gives the same bits.

    Args:
        seed: any integer.
        replicate: index of an independent repetition.
    """

    seed: int
    replicate: int = 0
    name: ClassVar[str] = "seeded"

    def normal(self, purpose: str, step: int, size: int) -> np.ndarray:
        return keyed_generator(self.seed, f"privacy/{purpose}", step, self.replicate).standard_normal(size)

    def tails(
        self, purpose: str, step: int | Tensor, size: int, keys: Tensor | None = None
    ) -> tuple[np.ndarray, np.ndarray]:
        """Return signs and tails that are a function of (seed, purpose, replicate, step), and of the key of the row
        where there are keys: which clients are drawn together does not matter."""
        if keys is None:
            assert isinstance(step, int)
            generator = keyed_generator(self.seed, f"privacy/tails/{purpose}", step, self.replicate)
            first, second = generator.integers(0, 1 << 64, size=(2, size), dtype=np.uint64)
            return signs_and_tails(first, second.__getitem__)
        clients = keys.cpu().numpy().view(np.uint64)
        uses = np.broadcast_to(torch.as_tensor(step).numpy().astype(np.uint64), clients.shape)
        return signs_and_tails(*client_words(np.broadcast_to(self.key(purpose), clients.shape), clients, uses, size))

    def key(self, purpose: str) -> np.uint64:
        """Return the key of the random numbers of clients."""
        return np.uint64(derive_key(self.seed, f"privacy/owners/{purpose}", self.replicate))

    def words(self, purpose: str, step: int) -> Words:
        return keyed_generator(self.seed, f"privacy/words/{purpose}", step, self.replicate).bit_generator.random_raw

    def coins(self, purpose: str, step: int) -> Coins:
        return GeneratorCoins(keyed_generator(self.seed, f"privacy/{purpose}", step, self.replicate))


@dataclass(frozen=True)
class SecureSource:
    """Fresh bits from the operating system's generator at every call; the arguments address nothing."""

    name: ClassVar[str] = "secure"

    def normal(self, purpose: str, step: int, size: int) -> np.ndarray:
        """Return (size,) float64 standard normal numbers by inversion of :meth:`tails`: no gaps wider than about 2**-53
        out to 9 standard deviations."""
        sign, tail = self.tails(purpose, step, size)
        return sign * ndtri(tail)

    def tails(
        self, purpose: str, step: int | Tensor, size: int, keys: Tensor | None = None
    ) -> tuple[np.ndarray, np.ndarray]:
        """Return fresh signs and tails; of ``keys`` only the number matters."""
        shape = (size,) if keys is None else (keys.numel(), size)
        return signs_and_tails(_system_words(math.prod(shape)).reshape(shape), lambda at: _system_words(len(at)))

    def words(self, purpose: str, step: int) -> Words:
        return _system_words

    def coins(self, purpose: str, step: int) -> Coins:
        return SystemCoins()


@dataclass(frozen=True)
class GeneratorCoins:
    generator: np.random.Generator

    def uniform(self, count: int) -> np.ndarray:
        return self.generator.random(count)


@dataclass(frozen=True)
class SystemCoins:
    def uniform(self, count: int) -> np.ndarray:
        return (_system_words(count) >> np.uint64(11)).astype(np.float64) * 2.0**-53


def _system_words(count: int) -> np.ndarray:
    """Return (count,) uint64 from the operating system."""
    return np.frombuffer(os.urandom(8 * count), dtype=np.uint64)


BLOCK_ELEMENTS = 1 << 15  # the numbers of a block, and those from which they are made, stay in the cache

_ONE = np.array(1.0).view(np.uint64)  # its highest bit is the sign


def signs_and_tails(first: np.ndarray, more: More) -> tuple[np.ndarray, np.ndarray]:
    """Return signs and ``(a + (b + 1/2) 2**-64) 2**-64`` with a of 63 bits from ``first`` and b of 64 from ``more``.

    The bit left over is the sign. b is drawn for one number in 1,024, where a is below 2**53. Elsewhere rounding leaves
    out bits of a, and of b it matters only that it adds something to them: from 2**54 on a lowest bit 1 does the same.
    """
    some = first >> 1
    some |= 1
    tail = some.view(np.int64).astype(np.float64)  # faster than of uint64
    tail *= 2.0**-64
    few = np.flatnonzero(tail < 2.0**-10)
    if few.size:
        a, b = first.flat[few] >> 1, np.full(few.size, 1 << 63, dtype=np.uint64)
        deep = a < 1 << 53
        b[deep] = more(few[deep])
        tail.reshape(-1)[few] = _deep_tails(a, b)
    np.left_shift(first, 63, out=some)
    some |= _ONE
    return some.view(np.float64), np.minimum(tail, 0.5 - 2.0**-54, out=tail)


def _deep_tails(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """Return ``(a + (b + 1/2) 2**-64) 2**-64`` for a below 2**63."""
    tail = (b.astype(np.float64) + 0.5) * 2.0**-64 + (a & 0x3FF).astype(np.float64)
    # the other 53 bits of a are exact as a double, so the sum is rounded once, with b to break ties
    tail = tail + (a >> 10).astype(np.float64) * 2.0**10
    return tail * 2.0**-64


class ClientDraws:
    """Signs and tails of clients in several repetitions, ordered so that the uses of a client follow one another.

    Args:
        sources: of each of R repetitions.
        purpose: name of the release.
        uses: int64 (S, R), addresses along each client's stream.
        keys: int64 (S, R) keys of the clients.

    Attributes:
        order: int64 (S R,), the place of each row among those of ``uses``.
    """

    order: np.ndarray

    def __init__(self, sources: Sequence[NoiseSource], purpose: str, uses: Tensor, keys: Tensor) -> None:
        self._sources, self._purpose = sources, purpose
        where = np.broadcast_to(np.arange(len(sources)), uses.shape).reshape(-1)
        flat = [one.reshape(-1).numpy().view(np.uint64) for one in (keys.cpu(), uses)]
        seeds = [source.key(purpose) for source in sources if isinstance(source, SeededSource)]
        self._seed: np.ndarray | None = None
        if len(seeds) == len(sources):
            seed = np.array(seeds, dtype=np.uint64)[where]
            self.order = np.argsort(seed * _ODD + flat[0] + flat[1])  # clients far apart, and their uses in order
            self._seed = seed[self.order]
        else:
            self.order = np.argsort(where, kind="stable")
        self._where, self._clients, self._uses = (one[self.order] for one in (where, *flat))

    def tails(self, part: slice, size: int) -> tuple[np.ndarray, np.ndarray]:
        """Return signs and tails (k, size) of the rows ``order[part]``; each is that of its source's ``tails``."""
        clients, uses = self._clients[part], self._uses[part]
        if self._seed is not None and len(self._sources) > 1:
            return signs_and_tails(*client_words(self._seed[part], clients, uses, size))
        own, at = torch.from_numpy(clients.view(np.int64)), torch.from_numpy(uses.view(np.int64))
        if len(self._sources) == 1:
            return self._sources[0].tails(self._purpose, at, size, own)
        where, each = self._where[part], []
        for r in np.unique(where).tolist():
            each.append(self._sources[r].tails(self._purpose, at[where == r], size, own[where == r]))
        return np.concatenate([sign for sign, _ in each]), np.concatenate([tail for _, tail in each])


_ODD = np.uint64(0x9E3779B97F4A7C15)


def client_words(keys: np.ndarray, clients: np.ndarray, uses: np.ndarray, size: int) -> tuple[np.ndarray, More]:
    """Return a random word for each number of each row, uint64 (k, size), and second ones.

    A client's words are streams of Philox4x64-10, NumPy's generator, under the key (``keys``, ``clients``). Four words
    have the counter (block, carry, size, which). The first words of use u are words u size to u size + size - 1 of the
    stream of this size with ``which`` 0, its second ones the same with ``which`` 1. So no two uses overlap, and
    consecutive uses of a client that follow one another here are drawn by one call.

    Args:
        keys: uint64 (k,), of seed, purpose and repetition.
        clients: uint64 (k,) keys of the clients.
        uses: uint64 (k,).
        size: numbers a row.
    """
    words, generator = np.empty((len(uses), size), dtype=np.uint64), np.random.Philox(key=0)
    apart = (keys[1:] != keys[:-1]) | (clients[1:] != clients[:-1]) | (uses[1:] != uses[:-1] + np.uint64(1))
    apart |= uses[1:] == 0  # which does not follow 2**64 - 1
    starts = [0, *(np.flatnonzero(apart) + 1).tolist()] if words.size else []
    each = zip(starts, [*starts[1:], len(uses)], *(one[starts].tolist() for one in (keys, clients, uses)), strict=True)
    for start, stop, key, client, use in each:
        found = _stream(generator, (key, client), (size, 0), use * size, (stop - start) * size)
        words[start:stop] = found.reshape(-1, size)

    def more(places: np.ndarray) -> np.ndarray:
        rows, columns = np.divmod(places, size)
        address = zip(*(one.tolist() for one in (keys[rows], clients[rows], uses[rows], columns)), strict=True)
        found = [
            _stream(generator, (key, client), (size, 1), use * size + column, 1)[0]
            for key, client, use, column in address
        ]
        return np.array(found, dtype=np.uint64)

    return words, more


def _stream(
    generator: np.random.Philox, key: tuple[int, int], stream: tuple[int, int], first: int, count: int
) -> np.ndarray:
    """Return words ``first`` to ``first + count - 1`` of the counters (block, carry, *stream), four to a block."""
    block, skip = divmod(first, 4)
    address = {"counter": (block & 0xFFFFFFFFFFFFFFFF, block >> 64, *stream), "key": key}
    state: Any = {"bit_generator": "Philox", "state": address, **_NO_BUFFER}
    generator.state = state
    words: np.ndarray = generator.random_raw(skip + count)
    return words[skip:]


_NO_BUFFER: Any = {"buffer": (0, 0, 0, 0), "buffer_pos": 4, "has_uint32": 0, "uinteger": 0}
