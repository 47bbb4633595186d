import itertools
import math
import os
from fractions import Fraction

import numpy as np
import pytest
import torch
from scipy import stats

from fedmtl.errors import PrivacyError
from fedmtl.privacy.noise import sources
from fedmtl.privacy.noise.sources import SecureSource, SeededSource
from fedmtl.random import id_key, philox

ALPHA = 1e-6
SOURCES = [SeededSource(3), SecureSource()]
KEYS = torch.tensor([id_key(name) for name in ("a", "b", "c")] + [0, 1, -1, 2**62, -(2**63)])
COUNT = 100_000


def uniforms(source, size: int, keys=None, step: int = 0) -> np.ndarray:
    """Signs and tails as one number, uniform on (0, 1)."""
    sign, tail = source.tails("noise", step, size, keys)
    return np.where(sign < 0, tail, 1 - tail)


@pytest.mark.parametrize("source", SOURCES, ids=lambda source: source.name)
@pytest.mark.parametrize("keys", [None, KEYS], ids=["one", "clients"])
def test_the_law_of_tails(source, keys):
    rows = 1 if keys is None else len(keys)
    sign, tail = source.tails("noise", 0, COUNT // rows, keys)
    assert sign.shape == tail.shape == ((COUNT,) if keys is None else (rows, COUNT // rows))
    assert sign.dtype == tail.dtype == np.float64
    assert set(np.unique(sign)) == {-1.0, 1.0}
    assert tail.min() > 0
    assert tail.max() <= 0.5
    assert stats.kstest(2 * tail.ravel(), "uniform").pvalue > ALPHA
    assert stats.binomtest(int((sign > 0).sum()), sign.size).pvalue > ALPHA
    assert abs(np.corrcoef(sign.ravel(), tail.ravel())[0, 1]) < 6 / math.sqrt(COUNT)
    deep = tail[tail < 2.0**-7]
    assert stats.binomtest(deep.size, tail.size, 2.0**-6).pvalue > ALPHA
    assert stats.kstest(deep * 2.0**7, "uniform").pvalue > ALPHA


A = [
    2**52 + 1,
    2**53 - 1,
    2**53,
    2**53 + 1,
    2**53 + 3,
    2**54 - 1,
    2**54,
    2**54 + 1,
    2**54 + 2,
    2**54 + 6,
    2**55 + 4,
]


def test_a_tail_is_its_words_rounded_once():
    edges = (0, 1, 2, 6, 1 << 12, 2**60 + 1, 2 * (2**57 + 2**4), 2 * (2**57 + 3 * 2**4), 2**63)
    for first in (*edges, *(2 * a + a % 2 for a in A)):
        for second in (0, 1, 2**30, 12345 << 40, 2**63, 2**64 - 1):
            words = np.array([second], np.uint64)
            sign, tail = sources.signs_and_tails(np.array([first], np.uint64), words.__getitem__)
            exact = (Fraction(first >> 1) + (Fraction(second) + Fraction(1, 2)) / 2**64) / 2**64
            assert sign[0] == (-1 if first & 1 else 1)
            assert 0 < tail[0] < 0.5
            if second >= 2**30:
                assert tail[0] == float(exact)
            assert abs(Fraction(float(tail[0])) - exact) <= exact * Fraction(1, 2**52)


def test_a_tail_is_never_half():
    last = np.array([2**64 - 1], np.uint64)
    assert sources.signs_and_tails(last, last.__getitem__)[1] == 0.5 - 2.0**-54


def test_a_second_word_is_asked_for_where_it_can_matter():
    first = np.array([[2 * 2**53, 2 * 2**53 - 1], [7, 2**64 - 1]], np.uint64)
    asked = []

    def more(places):
        asked.extend(places.tolist())
        return np.array([2**63, 5], np.uint64)

    tails = sources.signs_and_tails(first, more)[1]
    assert asked == [1, 2]
    assert tails[1, 0] == 2.0**-64 * (3 + 5 * 2.0**-64)


def test_words_without_second_ones_are_tails_of_64_bits():
    words = np.array([0, 1, 2, 2**54 + 1, 2**64 - 1], np.uint64)
    sign, tail = sources.signs_and_tails(words)
    assert sign.tolist() == [1, -1, 1, -1, -1]
    assert tail.tolist() == [2.0**-64, 2.0**-64, 2.0**-64, 2.0**-64 * (2**53 + 1), 0.5 - 2.0**-54]


@pytest.mark.parametrize("size", [1, 2, 5])
@pytest.mark.parametrize("block", [1 << 15, 4, 1])
def test_words_of_clients_are_those_of_their_counters(size, block, monkeypatch):
    """Two words of 64 bits from each block of four of 32, of the plain loop over the counter."""
    monkeypatch.setattr(sources, "BLOCK_ELEMENTS", max(2, block))
    uses = [0, 1, 2, 7, 2**32 - 1, 2**32 - 1, 0]
    clients = [5, 5, 5, 5, 5, 2**64 - 1, 2**64 - 1]
    keys = [9] * 6 + [2**63 + 10]
    words = sources.client_words(*(np.array(one, np.uint64) for one in (keys, clients, uses)), size)
    for k, (key, client, use) in enumerate(zip(keys, clients, uses, strict=True)):
        expected = []
        for place in range(-(-size // 2)):
            counter = (
                torch.tensor(word) for word in (place, use, client & 0xFFFFFFFF, client >> 32)
            )
            w0, w1, w2, w3 = (int(word) for word in philox(key, *counter))
            expected += [w0 << 32 | w1, w2 << 32 | w3]
        assert words[k].tolist() == expected[:size]


def test_a_use_beyond_the_counter_is_refused():
    address = (np.array([value], np.uint64) for value in (1, 2, 2**32))
    with pytest.raises(PrivacyError, match="Use 4294967296 of a client"):
        sources.client_words(*address, 3)


def test_other_addresses_are_other_numbers():
    size = 4000
    draws = []
    for seed, replicate, purpose, step in itertools.product(
        (3, 4), (0, 1), ("noise", "noise/a"), (0, 1)
    ):
        source = SeededSource(seed, replicate)
        for keys in (None, KEYS):
            sign, tail = source.tails(purpose, step, size, keys)
            draws.extend(np.atleast_2d(np.where(sign < 0, tail, 1 - tail)))
            draws.extend(np.atleast_2d(tail))
        draws.append(stats.norm.cdf(source.normal(purpose, step, size)))
        draws.append(source.coins(purpose, step).uniform(size))
    assert fresh(np.stack(draws))


def test_secure_draws_never_repeat():
    draws = [uniforms(SecureSource(), 4000) for _ in range(6)]
    for _ in range(2):
        draws.extend(uniforms(SecureSource(), 4000, torch.zeros(3, dtype=torch.int64)))
        draws.append(stats.norm.cdf(SecureSource().normal("noise", 0, 4000)))
        draws.append(SecureSource().coins("noise", 0).uniform(4000))
        draws.append(SecureSource().words("noise", 0)(4000) * 2.0**-64)
    assert fresh(np.stack(draws))
    assert not vars(SecureSource())


def fresh(draws: np.ndarray) -> bool:
    centred = draws - draws.mean(1, keepdims=True)
    unit = centred / np.linalg.norm(centred, axis=1, keepdims=True)
    return bool(np.abs(unit @ unit.T - np.eye(len(unit))).max() < 6.5 / math.sqrt(draws.shape[1]))


def test_the_secure_source_reads_the_operating_system_alone(monkeypatch):
    asked = []

    def urandom(count: int) -> bytes:
        asked.append(count)
        return np.random.default_rng(count).bytes(count)

    monkeypatch.setattr(os, "urandom", urandom)
    torch.manual_seed(0)
    first = SecureSource().tails("noise", 0, 10, KEYS)
    torch.manual_seed(1)
    second = SecureSource().tails("other", 1, 10, KEYS + 1)
    assert asked == [8 * 10 * len(KEYS)] * 2  # and none of these needs a second word
    assert np.array_equal(first[1], second[1])
    assert np.array_equal(first[0], second[0])
    SecureSource().normal("noise", 0, 7)
    assert asked[2:] == [8 * 7]


def test_secure_normals_are_the_inverse_of_their_tails(monkeypatch):
    monkeypatch.setattr(os, "urandom", lambda count: np.random.default_rng(0).bytes(count))
    sign, tail = SecureSource().tails("noise", 0, 1000)
    normal = SecureSource().normal("noise", 0, 1000)
    assert np.array_equal(np.sign(normal), -sign)
    lower = [0.5 * math.erfc(abs(value) / math.sqrt(2)) for value in normal]
    np.testing.assert_allclose(lower, tail, rtol=1e-12)
