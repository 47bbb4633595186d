"""Releases other than a Gaussian vector of fixed clip: matrices, Laplace laws, a clip norm that adapts."""

import math

import numpy as np
import pytest
import torch
from dp_accounting import dp_event
from dp_accounting.pld import PLDAccountant
from scipy import stats

from fedmtl.errors import ConfigError, PrivacyError
from fedmtl.privacy import (
    ClientPrivacy,
    FullParticipation,
    PoissonSampling,
    QuantileClip,
    ReleasePlan,
    epsilon,
    open_channel,
)
from tests.algorithms.test_composed import optimum

D, CLIENTS, STEPS = 24, 30, 5


def door(privacy: ClientPrivacy, *, sampler=None, dimension: int = D, steps: int = STEPS, seed: int = 0, **options):
    names = options.pop("names", ("update",))
    form = options.pop("form", "vector")
    plans = tuple(ReleasePlan(name=n, dimension=dimension, uses=steps, form=form) for n in names)
    bound = (sampler or FullParticipation()).bind(CLIENTS)
    return open_channel(privacy, plans, bound, seed=seed, steps=steps, **options)


def begin(channel, step: int = 0) -> torch.Tensor:
    ranks = channel.draw(step)
    channel.begin(step, ranks)
    return ranks


def zeros(channel, step: int = 0, name: str = "update") -> np.ndarray:
    ranks = begin(channel, step)
    return channel.release(name, torch.zeros(len(ranks), channel.releases[name].dimension), ranks).numpy()


# Matrices


def test_a_covariance_is_that_of_the_clipped_rows() -> None:
    privacy = ClientPrivacy(clip_norm=2.0, epsilon=math.inf)
    rows = torch.randn(CLIENTS, D, generator=torch.Generator().manual_seed(0))
    rows[3, 2] = math.nan
    clean = rows.double().nan_to_num()
    clean[3] = 0
    clipped = clean * (2.0 / clean.norm(dim=1).clamp(min=2.0))[:, None]
    expected = clipped.T @ clipped / CLIENTS
    for form, wanted in (("symmetric", expected), ("diagonal", expected.diagonal())):
        channel = door(privacy, form=form)
        value = channel.release("update", rows, begin(channel))
        assert torch.allclose(value, wanted, rtol=4e-6)  # the clip's margin, squared
    plain = door(None, form="symmetric")
    assert torch.allclose(plain.release("update", rows, begin(plain)), clean.T @ clean / CLIENTS, rtol=1e-12)


def test_forms_that_no_law_covers_are_refused() -> None:
    with pytest.raises(PrivacyError, match="LaplaceNoise on a symmetric matrix"):
        door(ClientPrivacy(clip_norm=1.0, noise_multiplier=1.0, mechanism="laplace"), form="symmetric")
    with pytest.raises(ConfigError, match="form"):
        ReleasePlan(name="x", dimension=3, uses=1, form="cube")


def test_wishart_noise_is_reproduced_and_its_claim_refuted() -> None:
    settings = {"clip_norm": 0.8, "mechanism": "wishart", "delta": 1e-5}
    privacy = ClientPrivacy(**settings, noise_multiplier=2.0)
    with pytest.raises(PrivacyError, match="symmetric matrices only"):
        door(privacy)
    impossible = 0
    for seed in range(2000):
        channel = door(privacy, form="symmetric", dimension=4, seed=seed)
        noise = zeros(channel) * CLIENTS
        assert (np.linalg.eigvalsh(noise) > 0).all()
        canary = np.array([0.8, 0.0, 0.0, 0.0])  # another client, at the clip: A' = A + canary canary^T
        impossible += canary @ np.linalg.solve(noise, canary) > 1
    claimed = 0.5  # one over the multiplier
    assert stats.binomtest(impossible, 2000, 1 - math.exp(-claimed)).pvalue > 1e-6
    for step in range(1, STEPS):
        zeros(channel, step)
    report = channel.report
    assert report.epsilon == channel.epsilon == math.inf
    assert optimum(claimed, STEPS, 1e-5) * (1 - 1e-9) <= report.claimed <= STEPS * claimed
    assert "impossible with probability" in report.text()
    assert report.headline == "not private: epsilon = inf, the published accounting does not hold"
    calibrated = door(ClientPrivacy(**settings, epsilon=3.0), form="symmetric", steps=60)
    for step in range(60):
        begin(calibrated, step)
    assert 2.9 < calibrated.report.claimed <= 3.0


# Laplace laws


def test_laplace_noise_comes_with_an_l1_clip() -> None:
    privacy = ClientPrivacy(clip_norm=0.5, noise_multiplier=4.0, mechanism="laplace", delta=1e-5)
    channel = door(privacy, dimension=4000)
    noise = zeros(channel)
    assert stats.kstest(noise * CLIENTS / (4.0 * 0.5), "laplace").pvalue > 1e-6
    rows = torch.ones(CLIENTS, 4000)
    clear = door(privacy, dimension=4000)
    moved = clear.release("update", rows, begin(clear)).numpy() - noise
    assert np.abs(moved).sum() == pytest.approx(0.5, rel=1e-5)  # the mean of thirty rows of L1 norm 0.5
    for step in range(1, STEPS):
        zeros(channel, step)
    expected = PLDAccountant().compose(dp_event.LaplaceDpEvent(4.0), STEPS).get_epsilon(1e-5)
    assert channel.epsilon == pytest.approx(expected, rel=1e-3)
    assert channel.report.mechanism == "laplace"


def test_l2_laplace_noise_has_a_gamma_radius_and_composes_better_than_its_pure_epsilon() -> None:
    privacy = ClientPrivacy(clip_norm=0.5, epsilon=0.5, mechanism="l2_laplace", delta=1e-5)
    channel = door(privacy, dimension=2000)
    z = channel.noise_multiplier
    assert z is not None
    radii = [float(np.linalg.norm(zeros(channel, step))) * CLIENTS / (z * 0.5) for step in range(STEPS)]
    assert all(stats.gamma(2000).ppf(1e-7) < r < stats.gamma(2000).isf(1e-7) for r in radii)
    assert 0.499 < channel.epsilon <= 0.5
    assert STEPS / z > 10 * 0.5  # basic composition of the pure epsilons 1 / z


def test_sampled_laplace_is_amplified() -> None:
    privacy = ClientPrivacy(clip_norm=0.5, noise_multiplier=4.0, mechanism="laplace", delta=1e-5)
    channel = door(privacy, sampler=PoissonSampling(6), steps=40)
    for step in range(40):
        begin(channel, step)
    event = dp_event.PoissonSampledDpEvent(0.2, dp_event.LaplaceDpEvent(4.0))
    assert channel.epsilon == pytest.approx(PLDAccountant().compose(event, 40).get_epsilon(1e-5), rel=2e-3)


def test_several_releases_without_a_joint_gaussian_need_a_schedule_without_coins() -> None:
    privacy = ClientPrivacy(clip_norm=0.5, noise_multiplier=4.0, mechanism="laplace", delta=1e-5)
    two = door(privacy, names=("a", "b"))
    for step in range(STEPS):
        begin(two, step)
    expected = PLDAccountant().compose(dp_event.LaplaceDpEvent(4.0), 2 * STEPS).get_epsilon(1e-5)
    assert two.epsilon == pytest.approx(expected, rel=1e-3)
    with pytest.raises(PrivacyError, match="share its coins"):
        door(privacy, names=("a", "b"), sampler=PoissonSampling(6))


# A clip norm that adapts


def adaptive(**settings) -> ClientPrivacy:
    clip = QuantileClip(**{"initial": 1.0, "quantile": 0.5, "lr": 0.3, "count_noise": 2.0} | settings)
    return ClientPrivacy(clip_norm=clip, noise_multiplier=1.5, delta=1e-5)


def test_a_round_speaks_of_the_clip_norm_of_its_release_until_the_next_one_begins() -> None:
    channel = door(adaptive(lr=1.0))
    norms = [1.0]
    for step in range(STEPS):
        ranks = begin(channel, step)
        rows = torch.full((len(ranks), D), 1e-3)
        channel.release("update", rows, ranks)
        release = channel.releases["update"]
        assert release.noise is not None
        expected = release.noise.multiplier * norms[-1] / CLIENTS
        assert float(channel.noise_std("update")) == pytest.approx(expected, rel=1e-12)
        assert (channel.report.noise_std, channel.report.clip_norm) == pytest.approx((expected, norms[-1]), rel=1e-12)
        long = torch.full((1, D), 100.0)
        assert float(channel.clip("update", long).norm()) == pytest.approx(norms[-1], rel=1e-5)
        norms.append(float(channel.state()["update"][-1]))
    assert len(set(norms)) == len(norms)
    again = door(adaptive(lr=1.0))
    again.restore(channel.state())
    assert again.report.clip_norm == norms[-2]
    begin(again)
    assert again.report.clip_norm == norms[-1]


def test_update_and_count_together_cost_the_given_multiplier() -> None:
    channel, fixed = door(adaptive()), door(ClientPrivacy(clip_norm=1.0, noise_multiplier=1.5, delta=1e-5))
    for step in range(STEPS):
        begin(channel, step)
        begin(fixed, step)
    assert channel.epsilon == fixed.epsilon
    release = channel.releases["update"]
    assert release.noise is not None
    update, count = release.noise.multiplier, 2.0 / 0.5  # sigma_b over the sensitivity 1/2
    assert update > 1.5
    joint = dp_event.ComposedDpEvent([dp_event.GaussianDpEvent(z) for z in (update, count)])
    assert epsilon(joint, STEPS, 1e-5) == pytest.approx(channel.epsilon, rel=1e-9)


def test_each_step_clips_and_noises_at_its_own_norm() -> None:
    settings = QuantileClip(initial=1.0, quantile=0.5, lr=0.5, count_noise=2.0)
    channel, silent = (door(adaptive(lr=0.5), seed=4) for _ in range(2))
    expected = 1.0
    for step in range(STEPS):
        ranks = begin(channel, step)
        silent.begin(step, silent.draw(step))
        silent.restore({"update": torch.tensor([expected, expected], dtype=torch.float64)})
        channel.record = []
        clear = channel.release("update", torch.full((len(ranks), D), 9.0), ranks)
        blank = silent.release("update", torch.zeros(len(ranks), D), ranks)
        assert float((clear - blank).norm()) == pytest.approx(expected, rel=1e-5)
        fraction = float(channel.record[1][2]) + 0.5
        expected = expected * math.exp(-settings.lr * (fraction - settings.quantile))
        assert float(channel.state()["update"][-1]) == pytest.approx(expected, rel=1e-12)


def test_an_adaptive_clip_needs_gaussian_noise_and_room_for_the_count() -> None:
    with pytest.raises(ConfigError, match="only with Gaussian noise"):
        ClientPrivacy(clip_norm=QuantileClip(initial=1.0), noise_multiplier=1.0, mechanism="laplace")
    with pytest.raises(PrivacyError, match="count"):
        door(adaptive(count_noise=0.7))
