"""The embedded digits: pools, classes, styles, order and population independence."""

import math

import numpy as np
import pytest
import torch
from scipy import ndimage
from sklearn.datasets import load_digits

from fedmtl.data import load_digits_clients
from fedmtl.data.readers.digits import deal, pools, raw_digits, write
from fedmtl.errors import ConfigError
from fedmtl.random import id_key


@pytest.fixture(scope="module")
def digits():
    return load_digits_clients()


def test_the_default_has_a_thousand_clients_of_ten_images_and_four_classes(digits):
    assert len(digits) == 1000
    assert digits.ids[7] == "client-7"
    assert digits.spec.shape == (1, 8, 8)
    assert digits.spec.classes == 10
    assert set(digits.train.counts.tolist()) == set(digits.test.counts.tolist()) == {10}
    train, test = digits.train.y.view(1000, 10), digits.test.y.view(1000, 10)
    for i in range(1000):
        assert len(set(train[i].tolist()) | set(test[i].tolist())) <= 4
    # over all clients the classes are even: 1,000 images each, standard deviation about 60
    assert (torch.bincount(digits.train.y, minlength=10) - 1000).abs().max() < 300
    assert digits.train.x.min() >= 0
    assert digits.train.x.max() <= 1


def test_the_raw_images_are_scikit_learns_over_16():
    images, labels = raw_digits()
    source = load_digits()
    assert images.shape == (1797, 8, 8)
    assert np.array_equal(images.numpy() * 16, source.images)
    assert np.array_equal(labels.numpy(), source.target)


def test_no_test_image_is_in_any_training_part():
    # rotation 0 and gamma 1 leave the images as they are: every client image is one of the raw ones
    data = load_digits_clients(rotation=0.0, gamma=1.0)
    images, _ = raw_digits()
    known = {
        image.numpy().tobytes(): i for i, image in enumerate((images * 16).round().to(torch.uint8))
    }
    assert len(known) == 1797  # no image occurs twice in the source

    def numbers(side):
        rows = (side.x * 16).round().to(torch.uint8)
        torch.testing.assert_close(rows / 16, side.x, rtol=0, atol=1e-5)
        return [known[row.numpy().tobytes()] for row in rows]

    train, test = numbers(data.train), numbers(data.test)
    assert not set(train) & set(test)
    train_pool, test_pool = (set(pool.tolist()) for pool in pools(1797, 0.2, 0))
    assert set(train) <= train_pool
    assert set(test) <= test_pool
    assert len(set(train)) > 0.99 * len(train_pool)  # 10,000 draws reach nearly all of it
    labels = load_digits().target
    assert np.array_equal(labels[train], data.train.y.numpy())
    assert np.array_equal(labels[test], data.test.y.numpy())
    for part in np.array(train).reshape(1000, 10):
        assert len(set(part)) == 10  # without replacement


def test_a_client_has_the_same_data_in_every_population(digits):
    few = load_digits_clients(20)
    assert few.fingerprint() == digits.subset(digits.ids[:20]).fingerprint()
    assert load_digits_clients(20, seed=1).fingerprint() != few.fingerprint()


def test_the_deal_is_uniform_over_a_clients_images():
    labels = torch.arange(40) % 10
    keys = torch.tensor([id_key(f"k{i}") for i in range(4000)])
    chosen = torch.tensor([[2, 5]]).expand(4000, 2)
    pool = torch.arange(5, 40)
    rows = deal(labels, pool, chosen, keys, 2, seed=0)
    members = [i for i in range(5, 40) if i % 10 in (2, 5)]
    counts = torch.bincount(rows.flatten(), minlength=40)
    assert counts.sum() == counts[members].sum() == 8000
    expected = 8000 / len(members)
    assert (counts[members] - expected).abs().max() < 4 * math.sqrt(expected)


def test_a_style_is_a_rotation_and_a_gamma():
    rng = np.random.default_rng(0)
    smooth = ndimage.gaussian_filter(rng.random((2, 3, 32, 32)), (0, 0, 3, 3))
    smooth = (smooth - smooth.min()) / np.ptp(smooth)
    angle, power = torch.tensor([0.5, -0.3]), torch.tensor([2.0, 0.7])
    ours = write(torch.from_numpy(smooth).float(), angle, power)
    assert ours.shape == (2, 3, 1, 32, 32)
    inside = np.hypot(*np.meshgrid(np.arange(32) - 15.5, np.arange(32) - 15.5)) < 12
    for i in range(2):
        for j in range(3):
            turned = ndimage.rotate(smooth[i, j], math.degrees(angle[i]), reshape=False, order=1)
            expected = np.clip(turned, 0, 1) ** power[i].item()
            assert np.abs(ours[i, j, 0].numpy() - expected)[inside].max() < 1e-4


def test_both_sides_of_a_client_have_the_same_angle_and_gamma_within_the_bounds(monkeypatch):
    seen = []

    def spy(images, angle, power):
        seen.append((angle, power))
        return write(images, angle, power)

    monkeypatch.setattr("fedmtl.data.readers.digits.write", spy)
    load_digits_clients(2000, rotation=30.0, gamma=1.5)
    (train, train_power), (test, test_power) = seen
    assert torch.equal(train, test)
    assert torch.equal(train_power, test_power)
    exponent = train_power.log() / math.log(1.5)  # of the gamma, within [1 / 1.5, 1.5]
    assert exponent.abs().max() <= 1 + 1e-6
    assert exponent.min() < -0.99 < 0.99 < exponent.max()
    degrees = torch.rad2deg(train)
    assert degrees.abs().max() <= 30
    # uniform on [-30, 30]: standard deviation 60 / sqrt(12), of the mean of 2,000 draws .39
    assert abs(degrees.std() - 60 / math.sqrt(12)) < 1
    assert abs(degrees.mean()) < 4 * 0.39


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            {"clients": 0},
            r"load_digits_clients.clients is 0; it must be a whole number of at least 1",
        ),
        ({"classes_per_client": 11}, r"classes_per_client is 11; it must be at most 10"),
        (
            {"clients": 2, "test_images": 200, "classes_per_client": 1},
            r"needs 200 images of its 1 classes .* only",
        ),
    ],
)
def test_impossible_settings_are_refused(options, message):
    with pytest.raises(ConfigError, match=message):
        load_digits_clients(**options)
