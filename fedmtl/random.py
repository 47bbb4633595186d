"""Counter-based random numbers: every draw is a pure function of its key.

A draw is addressed by ``(seed, purpose, replicate)``, which make a 64-bit key, and by
``(client, step, index)``, which make the 128-bit counter of Philox4x32-10 (Salmon et al., "Parallel
random numbers: as easy as 1, 2, 3", SC 2011). Draws therefore do not depend on the order of
clients, on chunking, on threads or on the device.

These numbers are for simulation. Privacy coins go through :mod:`fedmtl.privacy.noise.sources`.
"""

from __future__ import annotations

import hashlib
import math
import threading
from collections.abc import Sequence
from functools import lru_cache
from typing import Any, Protocol, TypeVar

import numpy as np
import torch
from scipy.special import betaincc, ndtri
from torch import Tensor

_MASK = 0xFFFFFFFF
_M0 = 0xD2511F53
_M1 = 0xCD9E8D57
_W0 = 0x9E3779B9
_W1 = 0xBB67AE85


@lru_cache(maxsize=1 << 12, typed=True)
def derive_key(seed: int, purpose: str, replicate: int = 0) -> int:
    """Returns a 64-bit key, from SHA-256 of the three arguments.

    Args:
        seed: any Python integer.
        purpose: the use of the numbers, such as ``"batches"``; different purposes are independent
            streams.
        replicate: index of an independent repetition.
    """
    digest = hashlib.sha256(f"{seed}\x00{purpose}\x00{replicate}".encode()).digest()
    return int.from_bytes(digest[:8], "little")


def id_key(name: str) -> int:
    """Returns a signed 64-bit number from a client's id: the client's address in every counter."""
    return int(id_keys([name])[0])


def id_keys(names: Sequence[str]) -> np.ndarray:
    """Returns :func:`id_key` of each id, int64 (n,)."""
    digests = b"".join([hashlib.blake2b(name.encode(), digest_size=8).digest() for name in names])
    return np.frombuffer(digests, dtype="<i8").astype(np.int64)


Words = TypeVar("Words", Tensor, np.ndarray)


def philox(key: int | Words, c0: Words, c1: Any, c2: Words, c3: Words) -> tuple[Words, ...]:
    """Returns Philox4x32-10 of arrays that each hold one 32-bit word: int64 tensors, or NumPy's
    uint64.

    Args:
        key: 64-bit key; an array of 64-bit keys broadcasts against the counters.
        c0: first counter word in ``[0, 2**32)``; the words broadcast.
        c1: second counter word, an array or a number.
        c2: third counter word.
        c3: fourth counter word.

    Returns:
        Four arrays of random words in ``[0, 2**32)``, of the kind that was given.
    """
    k0: Any = key & _MASK
    k1: Any = (key >> 32) & _MASK
    for _ in range(10):
        p0 = c0 * _M0
        p1 = c2 * _M1
        c0 = ((p1 >> 32) ^ c1 ^ k0) & _MASK
        c2 = ((p0 >> 32) ^ c3 ^ k1) & _MASK
        # of which the low words count
        c1 = p1
        c3 = p0
        k0 = (k0 + _W0) & _MASK
        k1 = (k1 + _W1) & _MASK
    return c0, c1 & _MASK, c2, c3 & _MASK


def philox_words(
    words: np.ndarray,
    key: int | np.ndarray,
    c0: np.ndarray,
    c1: np.ndarray,
    c2: np.ndarray,
    c3: np.ndarray,
) -> None:
    """Fills ``words`` (2, ...) with :func:`philox` as pairs, ``(w0 << 32) | w1`` and
    ``(w2 << 32) | w3``, all of uint64.

    The first round is made on the arguments as they are, which costs little if a word is the
    same along an axis. The others are made in place, on two words at a time: those that are
    multiplied, x, and those that are not, y. ``words`` should be so small that a few arrays of its
    size fit the cache.
    """
    mask = np.uint64(_MASK)
    half = np.uint64(32)
    shape = (10, *[1] * (words.ndim - 1))
    turns = np.arange(10, dtype=np.uint64).reshape(shape)
    keys = np.stack([(key & _MASK) + turns * _W0, (key >> 32 & _MASK) + turns * _W1], axis=1) & mask
    factors = np.array([_M1, _M0], dtype=np.uint64).reshape(2, *shape[1:])
    p0 = c0 * _M0
    p1 = c2 * _M1
    x, y, product, high = _scratch(4, words.shape)
    x[0] = ((p1 >> 32) ^ c1 ^ keys[0, 0]) & _MASK
    x[1] = ((p0 >> 32) ^ c3 ^ keys[0, 1]) & _MASK
    # of which the low words count
    y[0] = p1
    y[1] = p0
    for turn in range(1, 10):
        np.multiply(x[::-1], factors, out=product)
        np.right_shift(product, half, out=high)
        np.bitwise_xor(high, y, out=high)
        np.bitwise_xor(high, keys[turn], out=high)
        np.bitwise_and(high, mask, out=high)
        x, y, product, high = high, product, y, x
    np.left_shift(x, half, out=x)
    np.bitwise_and(y, mask, out=y)
    np.bitwise_or(x, y, out=words)


def _scratch(count: int, shape: tuple[int, ...]) -> np.ndarray:
    """Returns uint64 (count, *shape) of the thread's own, with whatever it holds: new memory would
    come page by page."""
    size = count * math.prod(shape)
    if getattr(_LOCAL, "scratch", np.empty(0)).size < size:
        _LOCAL.scratch = np.empty(size, dtype=np.uint64)
    return _LOCAL.scratch[:size].reshape(count, *shape)


_LOCAL = threading.local()


def keyed_bits(key: int | Words, client: Words, step: int | Words, index: Words) -> Words:
    """Returns 63 random bits per address: non-negative int64 of tensors, uint64 of NumPy's arrays
    of these.

    Args:
        key: from :func:`derive_key`, or 64-bit keys that broadcast.
        client: 64-bit client keys.
        step: number of the round or activation in ``[0, 2**32)``.
        index: position within (client, step), in ``[0, 2**32)``; broadcast against ``client``.
    """
    low = client & _MASK
    high = (client >> 32) & _MASK
    w0, w1, _, _ = philox(key, index, step, low, high)
    return ((w0 & 0x7FFFFFFF) << 32) | w1


def keyed_uniform(key: int | Tensor, client: Tensor, step: int | Tensor, index: Tensor) -> Tensor:
    """Returns uniform numbers in ``[0, 1)``, float64 with 53 random bits; arguments of
    :func:`keyed_bits`."""
    return (keyed_bits(key, client, step, index) >> 10).to(torch.float64) * 2.0**-53


def keyed_generator(
    seed: int, purpose: str, step: int = 0, replicate: int = 0
) -> np.random.Generator:
    """Returns a NumPy generator (Philox4x64) of its own for one (seed, purpose, replicate,
    step)."""
    counter = np.array([0, 0, 0, step], dtype=np.uint64)
    key = np.array(
        [derive_key(seed, purpose, replicate), derive_key(seed, purpose + "/1", replicate)],
        np.uint64,
    )
    return np.random.Generator(np.random.Philox(key=key, counter=counter))


class Coins(Protocol):
    """Gives random bits for one draw of a cohort."""

    def uniform(self, count: int) -> np.ndarray:
        """Returns ``count`` float64 numbers in [0, 1) with 53 random bits each."""


def distinct_numbers(n: int, size: int, coins: Coins) -> np.ndarray:
    """Draws a uniform subset of whole numbers; memory and time are O(size) for small sizes.

    Draws with replacement and keeps the first ``size`` distinct values, which is exactly uniform
    sampling without replacement; more than half of the population is drawn as a complement.

    Args:
        n: the numbers are those of ``range(n)``.
        size: of the subset, from 0 to n.
        coins: source of uniform numbers.

    Returns:
        int64 (size,), ascending.

    Example:
        >>> from fedmtl.privacy import SeededSource, distinct_numbers
        >>> numbers = distinct_numbers(100, 5, SeededSource(0).coins("cohort", 0))
        >>> len(set(numbers.tolist())), bool((numbers < 100).all())
        (5, True)
    """
    if 2 * size > n:
        left_out = distinct_numbers(n, n - size, coins)
        return np.delete(np.arange(n, dtype=np.int64), left_out)
    drawn = np.empty(0, dtype=np.int64)
    while drawn.size < size:
        fresh = np.floor(coins.uniform(size - drawn.size + 16) * n).astype(np.int64)
        drawn = np.concatenate([drawn, fresh])
        _, first = np.unique(drawn, return_index=True)
        drawn = drawn[np.sort(first)]
    return np.sort(drawn[:size])


def binomial_quantile(coin: float, n: int, probability: float) -> int:
    """Returns the least k of at least 0 with P(Binomial(n, probability) <= k) >= coin, a number in
    [0, 1).

    It is the value of ``scipy.stats.binom.ppf``, whose import takes longer than many runs.
    """

    def reaches(k: int) -> bool:
        return k >= n or float(betaincc(k + 1, n - k, probability)) >= coin

    # The quantile of 0 is the end of the support, where ndtri is minus infinity.
    if coin <= 0:
        return 0
    # The normal approximation is off by a few; steps from there cost less than a bisection.
    near = n * probability + float(ndtri(coin)) * math.sqrt(n * probability * (1 - probability))
    k = round(min(max(near, 0.0), float(n)))
    while not reaches(k):
        k += 1
    while k > 0 and reaches(k - 1):
        k -= 1
    return k
