"""Seeded noise that is drawn beside the sums: the words, signs and tails of the host, and its law."""

import numpy as np
import pytest
import torch
from scipy import stats

from fedmtl import RecordPrivacy
from fedmtl.errors import PrivacyError
from fedmtl.privacy import SecureSource, SeededSource
from fedmtl.privacy.noise import on_device
from fedmtl.privacy.noise.laws import GaussianNoise, LaplaceNoise
from fedmtl.privacy.noise.on_device import gaussian_rows, source_there, tails_on
from tests import small
from tests.simulated_device import NAME, Remote, simulated

CPU = torch.device("cpu")
DEVICE = torch.device(NAME)
SOURCE = SeededSource(seed=7, replicate=3)
KEYS = torch.tensor([0, -1, 5, -(1 << 63), (1 << 63) - 1, 1 << 32])
USES = torch.tensor([0, 1, 2, 3, (1 << 32) - 1, 5])


@pytest.mark.parametrize("size", [1, 2, 7, 1000])
def test_signs_and_tails_have_the_bits_of_the_host(size):
    found = tails_on(SOURCE, "some", USES, KEYS, size, CPU)
    expected = SOURCE.tails("some", USES, size, KEYS)
    for there, here in zip(found, expected, strict=True):
        assert np.array_equal(there.numpy(), here)


def test_normal_numbers_are_those_of_the_host(monkeypatch):
    law = GaussianNoise(1.5)
    expected = law.draw_rows(SOURCE, "some", USES, KEYS, 20_000)
    for at_once in (1 << 24, 30_000):  # all rows, and one after another
        monkeypatch.setattr(on_device, "_AT_ONCE", at_once)
        found = gaussian_rows(law, SOURCE, "some", USES, KEYS, 20_000, CPU).numpy()
        np.testing.assert_allclose(found, expected, rtol=1e-12, atol=1e-15)
    assert stats.kstest(found.ravel() / 1.5, "norm").pvalue > 1e-3


def test_a_use_without_words_is_refused():
    with pytest.raises(PrivacyError, match="no random numbers"):
        gaussian_rows(GaussianNoise(1.0), SOURCE, "some", torch.tensor([1 << 32]), KEYS[:1], 2, CPU)


def test_only_seeded_gaussian_noise_is_drawn_off_the_host():
    assert source_there(GaussianNoise(1.0), [SOURCE], DEVICE) is SOURCE
    for law, sources, device in (
        (GaussianNoise(1.0), [SOURCE], CPU),
        (GaussianNoise(1.0), [SecureSource()], DEVICE),
        (LaplaceNoise(1.0), [SOURCE], DEVICE),
        (GaussianNoise(1.0), [SOURCE, SOURCE], DEVICE),
    ):
        assert source_there(law, sources, device) is None


@pytest.mark.parametrize("source", ["seeded", "secure"])
def test_local_steps_on_a_device_have_their_noise_there(source, monkeypatch):
    drawn = []

    def recorded(law, source, purpose, uses, keys, size, device):
        drawn.append(gaussian_rows(law, source, purpose, uses, keys, size, device))
        return drawn[-1]

    monkeypatch.setattr("fedmtl.privacy.records.gaussian_rows", recorded)
    privacy = RecordPrivacy(clip_norm=1.0, epsilon=8.0, source=source)
    with simulated():
        small.trainer(privacy=privacy, device=NAME).fit()
        assert all(isinstance(noise, Remote) for noise in drawn)
    assert bool(drawn) == (source == "seeded")
