import math

import numpy as np
import pytest
import torch
from dp_accounting import dp_event, rdp

from fedmtl.errors import PrivacyError
from fedmtl.privacy.clip import Clip
from fedmtl.privacy.quantile import QuantileClip, count_rows, count_sensitivity, split_multiplier

COHORT = 100


@pytest.mark.parametrize("quantile", [0.1, 0.5, 0.9])
@pytest.mark.parametrize("initial", [0.1, 1e3])
def test_the_norm_converges_to_the_quantile(quantile, initial):
    generator = np.random.default_rng(0)
    norms = torch.from_numpy(generator.lognormal(0.0, 0.7, 2000))
    target = float(np.quantile(norms.numpy(), quantile))
    settings = QuantileClip(initial=initial, quantile=quantile, lr=0.2)
    norm, last = settings.initial, []
    for step in range(800):
        cohort = norms[torch.from_numpy(generator.random(2000) < COHORT / 2000)]
        total = float(count_rows(cohort, norm).sum()) + settings.count_std(COHORT) * generator.standard_normal()
        norm = settings.updated_norm(norm, total / COHORT + 0.5)
        if step >= 500:
            last.append(norm)
    reached = math.exp(np.mean(np.log(last)))
    fraction = float((norms <= reached).double().mean())
    assert abs(fraction - quantile) < 0.04
    assert abs(math.log(reached / target)) < 0.15


def test_one_update():
    settings = QuantileClip(initial=1.0, quantile=0.25, lr=0.4)
    assert settings.updated_norm(2.0, 0.75) == pytest.approx(2.0 * math.exp(-0.2))
    assert settings.updated_norm(2.0, -0.25) == pytest.approx(2.0 * math.exp(0.2))


def test_counts():
    rows = count_rows(torch.tensor([0.0, 1.0, 1.0001, math.inf, math.nan]), 1.0)
    assert rows.tolist() == [[0.5], [0.5], [-0.5], [-0.5], [-0.5]]
    assert float(rows.mean()) + 0.5 == pytest.approx(2 / 5)


def test_sensitivity_of_the_count():
    reachable = [float(count_rows(torch.tensor([value]), 1.0)) for value in (0.0, 1.0, 2.0, math.nan)]
    assert count_sensitivity("add_remove") == max(map(abs, reachable))
    assert count_sensitivity("replace") == max(a - b for a in reachable for b in reachable)


@pytest.mark.parametrize("z", [0.5, 1.0, 4.0])
@pytest.mark.parametrize("relation", ["add_remove", "replace"])
def test_both_releases_together_are_the_total(z, relation):
    settings = QuantileClip(initial=1.0)
    count = settings.count_multiplier(COHORT, relation)
    assert count == (10.0 if relation == "add_remove" else 5.0)
    update = split_multiplier(z, count)
    assert update > z
    assert (update**-2 + count**-2) ** -0.5 == pytest.approx(z, rel=1e-12)
    if relation == "add_remove":
        assert update == pytest.approx((z**-2 - (2 * COHORT / 20) ** -2) ** -0.5, rel=1e-12)
    orders = [2.0, 8.0, 32.0]
    together = rdp.RdpAccountant(orders)
    together.compose(dp_event.GaussianDpEvent(update)).compose(dp_event.GaussianDpEvent(count))
    alone = rdp.RdpAccountant(orders).compose(dp_event.GaussianDpEvent(z))
    assert together.get_epsilon(1e-5) == pytest.approx(alone.get_epsilon(1e-5), rel=1e-9)


@pytest.mark.parametrize("count", [0.5, 1.0])
def test_an_impossible_split_is_refused(count):
    with pytest.raises(PrivacyError, match=r"count_noise"):
        split_multiplier(1.0, count)


def test_a_split_that_is_nearly_impossible_is_accurate():
    assert split_multiplier(1.0, 1.0 + 2.0**-40) == pytest.approx(2.0**19.5, rel=1e-9)


def test_settings():
    assert QuantileClip(1.0).count_std(60) == 3.0
    assert QuantileClip(1.0, count_noise=7.0).count_std(60) == 7.0
    assert QuantileClip(1.0, count_noise=7.0).count_multiplier(60) == 14.0


def test_no_noise_on_the_count_takes_the_clip_norm_beyond_the_bounds_of_a_clip():
    clip = QuantileClip(initial=1.0)
    for fraction, bound in ((1e4, 1e-100), (-1e4, 1e100), (1e300, 1e-100), (-1e300, 1e100)):
        assert Clip(clip.updated_norm(1.0, fraction)).bound == bound
