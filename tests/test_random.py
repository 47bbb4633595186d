"""Philox4x32-10 against the published known answers, and the addressing of draws."""

import numpy as np
import pytest
import torch
from scipy import stats

from fedmtl.random import (
    derive_key,
    id_key,
    keyed_bits,
    keyed_generator,
    keyed_uniform,
    philox,
    philox_words,
)


@pytest.mark.parametrize(
    ("counter", "key", "expected"),
    [  # kat_vectors of Random123 (Salmon et al. 2011)
        ((0, 0, 0, 0), 0, (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)),
        ((0xFFFFFFFF,) * 4, -1, (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD)),
        (
            (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344),
            0x299F31D0A4093822,
            (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1),
        ),
    ],
)
def test_philox_known_answers(counter, key, expected):
    words = philox(key, *(torch.tensor(c) for c in counter))
    assert tuple(int(w) for w in words) == expected
    pairs = np.empty((2, 1), dtype=np.uint64)
    philox_words(pairs, key, *(np.array([c], dtype=np.uint64) for c in counter))
    assert pairs[:, 0].tolist() == [
        (expected[0] << 32) | expected[1],
        (expected[2] << 32) | expected[3],
    ]


def test_pairs_of_words_are_those_of_philox_however_they_are_broadcast():
    rng = np.random.default_rng(0)
    c0, c1, c2, c3 = (
        rng.integers(0, 1 << 32, shape, dtype=np.uint64) for shape in ((7,), (1,), (5, 1), (5, 7))
    )
    for key in (-3, rng.integers(0, 1 << 63, (5, 1), dtype=np.uint64)):
        pairs = np.empty((2, 7, 5), dtype=np.uint64).swapaxes(1, 2)  # not contiguous
        philox_words(pairs, key, c0, c1, c2, c3)
        w0, w1, w2, w3 = philox(key, *np.broadcast_arrays(c0, c1, c2, c3))
        assert np.array_equal(pairs[0], (w0 << 32) | w1)
        assert np.array_equal(pairs[1], (w2 << 32) | w3)


def test_draws_are_addressed_by_client_step_and_index_only():
    key, clients = derive_key(3, "test"), torch.tensor([id_key("a"), id_key("b"), id_key("c")])
    index = torch.arange(7)
    together = keyed_bits(key, clients[:, None], 5, index)
    for place in range(3):
        assert torch.equal(together[place], keyed_bits(key, clients[place], 5, index))
    assert torch.equal(together[:, :4], keyed_bits(key, clients[:, None], 5, index[:4]))
    others = [
        keyed_bits(derive_key(3, "else"), clients[:, None], 5, index),
        keyed_bits(key, clients[:, None], 6, index),
    ]
    for other in others:
        assert not (together == other).any()


def test_uniforms_are_uniform():
    values = keyed_uniform(
        derive_key(0, "u"), torch.tensor(id_key("x")), 0, torch.arange(20000)
    ).numpy()
    assert values.min() >= 0
    assert values.max() < 1
    assert stats.kstest(values, "uniform").pvalue > 1e-4
    assert abs(np.corrcoef(values[:-1], values[1:])[0, 1]) < 5 / np.sqrt(len(values))


def test_generators_of_different_steps_are_different_streams():
    a, b = keyed_generator(0, "noise", 1), keyed_generator(0, "noise", 2)
    x, y = a.standard_normal(5000), b.standard_normal(5000)
    assert abs(np.corrcoef(x, y)[0, 1]) < 5 / np.sqrt(5000)
    assert np.array_equal(x, keyed_generator(0, "noise", 1).standard_normal(5000))
