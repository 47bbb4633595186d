"""The channel of rounds: what it refuses and reports, what comes out without privacy, forms of releases and clips."""

import json
import math
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from dp_accounting import dp_event

from fedmtl.audit.recording import RecordedRounds
from fedmtl.contrib.published.mp_mtl import WishartNoise
from fedmtl.errors import BudgetExhausted, ConfigError, PrivacyError
from fedmtl.privacy import (
    ClientPrivacy,
    Clip,
    FixedCohort,
    FullParticipation,
    GaussianNoise,
    PoissonSampling,
    QuantileClip,
    Release,
    ReleasePlan,
    SeededSource,
    epsilon,
    open_channel,
    privacy_report,
    signal_to_noise,
)
from fedmtl.privacy.clip import clip_rows
from fedmtl.privacy.noise.symmetric import smat
from fedmtl.privacy.quantile import count_rows, split_multiplier
from fedmtl.privacy.report import SIMULATED
from tests.algorithms.test_composed import optimum
from tests.helpers import library_accountant

FEW = PoissonSampling(4)


def door(
    privacy: ClientPrivacy | None = None, *, steps=10, dimension=5, names=("update",), form="vector",
    sampler=FEW, clients=40, seed=3, **options,
):  # fmt: skip
    plans = tuple(ReleasePlan(name=name, dimension=dimension, form=form) for name in names)
    return open_channel(privacy, plans, sampler.bind(clients), seed=seed, steps=steps, **options)


def begin(channel, step: int = 0) -> torch.Tensor:
    ranks = channel.draw(step)
    channel.begin(step, ranks)
    return ranks


NOISED = ClientPrivacy(clip_norm=1.0, noise_multiplier=2.0)


def test_without_privacy_it_is_the_plain_mean_over_a_public_denominator(tmp_path: Path) -> None:
    channel = door(None, ledger_path=tmp_path / "ledger.jsonl")
    assert channel.epsilon == 0.0
    ranks = begin(channel)
    rows = torch.arange(5.0 * len(ranks)).reshape(-1, 5) * 100
    rows[0, 0] = math.nan
    expected = rows[1:].double().sum(0) / 4
    assert torch.equal(channel.release("update", rows, ranks), expected)
    assert channel.epsilon == math.inf
    assert signal_to_noise(channel) is None
    assert privacy_report(channel).text() == "not private: epsilon = inf, no clip, no noise"
    channel.close()
    assert not (tmp_path / "ledger.jsonl").exists()


def test_an_infinite_epsilon_clips_only() -> None:
    channel = door(ClientPrivacy(clip_norm=0.5, epsilon=math.inf))
    ranks = begin(channel)
    rows = torch.zeros(len(ranks), 5)
    rows[:, 0] = 7.0
    value = channel.release("update", rows, ranks)
    assert value[0] == pytest.approx(len(ranks) * 0.5 * (1 - 2.0**-20) / 4, rel=1e-12)
    assert value[1:].abs().sum() == 0
    assert channel.epsilon == math.inf
    assert privacy_report(channel).to_dict()["epsilon"] == "inf"
    assert "clip only" in privacy_report(channel).text()


def test_an_algorithm_that_releases_nothing_spends_nothing() -> None:
    channel = door(NOISED, names=())
    begin(channel)
    assert channel.epsilon == 0.0
    assert privacy_report(channel).epsilon == 0.0
    assert "nothing is released" in privacy_report(channel).text()
    with pytest.raises(PrivacyError, match="not declared"):
        channel.release("update", torch.zeros(0, 5), torch.zeros(0))


def test_misuse_is_refused() -> None:
    channel = door(NOISED)
    rows = torch.ones(1, 5)
    with pytest.raises(PrivacyError, match="no step has begun"):
        channel.release("update", rows, torch.tensor([0]))
    with pytest.raises(PrivacyError, match="cohort that was drawn"):
        channel.begin(0, torch.tensor([1, 2]))
    ranks = channel.draw(0)
    assert torch.equal(ranks, channel.draw(0))
    with pytest.raises(PrivacyError, match="cohort that was drawn"):
        channel.begin(0, ranks[:-1])
    channel.begin(0, ranks.flip(0))
    k = len(ranks)
    for bad in (torch.ones(k, 4), torch.ones(k, 5, dtype=torch.int64), torch.ones(5)):
        with pytest.raises(PrivacyError, match="shape"):
            channel.release("update", bad, ranks)
    with pytest.raises(PrivacyError, match="not declared"):
        channel.release("other", torch.ones(k, 5), ranks)
    with pytest.raises(PrivacyError, match="each client once"):
        channel.release("update", torch.ones(k, 5), ranks[[0] * k])
    processes = SimpleNamespace(
        size=2, first=True, share=lambda make: make(), gather=lambda _: [ranks[:2], ranks[1:3]]
    )
    ranked = door(NOISED, ranks=processes)
    ranked.begin(0, ranked.draw(0))
    with pytest.raises(PrivacyError, match="each client once"):
        ranked.release("update", torch.ones(2, 5), ranks[:2])
    channel.release("update", torch.ones(k, 5), ranks)
    with pytest.raises(PrivacyError, match="already"):
        channel.release("update", torch.ones(k, 5), ranks)
    channel.draw(0)
    with pytest.raises(PrivacyError, match="begun already"):
        channel.begin(0, ranks)


@pytest.mark.parametrize("privacy", [NOISED, None])
def test_a_release_takes_rows_of_clients_that_were_drawn_and_of_no_others(privacy) -> None:
    order = torch.arange(40).flip(0)  # by which the sampler numbers clients
    channel = door(privacy, order=order)
    members = begin(channel)
    other = next(k for k in range(40) if k not in members.tolist())
    for clients in (
        torch.tensor([other]),
        torch.cat([members[1:], torch.tensor([other])]),
        torch.tensor([-1]),
    ):
        with pytest.raises(
            PrivacyError, match=f"of client {int(clients[-1])}, who was not drawn for step 0"
        ):
            channel.release("update", torch.ones(len(clients), 5), clients)
    channel.release("update", torch.ones(len(members) - 1, 5), members[1:])


def test_plans_are_checked() -> None:
    with pytest.raises(PrivacyError, match="same name"):
        door(NOISED, names=("a", "a"))
    plan = ReleasePlan(name="a", dimension=3, allocation=(0.5, 1.5))
    with pytest.raises(PrivacyError, match="an allocation of 2 weights; the run has 5 steps"):
        open_channel(NOISED, (plan,), FullParticipation().bind(40), seed=0, steps=5)
    with pytest.raises(ConfigError, match="dimension"):
        ReleasePlan(name="a", dimension=0)
    with pytest.raises(ConfigError, match="'/count'"):  # such noise is that of the count of 'a'
        ReleasePlan(name="a/count", dimension=1)
    sampling = PoissonSampling(4).bind(40)
    with pytest.raises(PrivacyError, match=r"GaussianNoise.*l2.*clip bounds the l1"):
        Release(
            name="a", dimension=3, sampling=sampling, clip=Clip(0.5, "l1"), noise=GaussianNoise(3.0)
        )
    with pytest.raises(ConfigError, match="one round"):
        door(ClientPrivacy(clip_norm=1.0, noise_multiplier=0.2, epsilon=0.5))


def test_noise_is_set_by_a_budget_or_by_a_multiplier() -> None:
    for settings in ({}, {"epsilon": math.inf, "noise_multiplier": 1.0}):
        with pytest.raises(ConfigError, match="ClientPrivacy"):
            ClientPrivacy(clip_norm=1.0, **settings)


def test_default_delta() -> None:
    privacy = ClientPrivacy(clip_norm=1.0, epsilon=1.0)
    assert privacy.resolved_delta(100) == 1e-5
    assert privacy.resolved_delta(10**6) == pytest.approx(10**-6.6)
    assert ClientPrivacy(clip_norm=1.0, epsilon=1.0, delta=1e-3).resolved_delta(100) == 1e-3


def test_signal_to_noise_uses_public_quantities() -> None:
    signal = signal_to_noise(door(NOISED, dimension=400))
    assert signal.noise_norm == pytest.approx(2.0 * 1.0 * 20 / 4)
    assert signal.ratio == pytest.approx(10.0)
    assert signal.warning is None
    louder = signal_to_noise(door(NOISED, dimension=500))
    assert louder.warning is not None
    assert louder.text().endswith("times the clip norm 1")
    follows = ClientPrivacy(clip_norm=QuantileClip(initial=1.0, count_noise=2.0), epsilon=2.0)
    assert (
        signal_to_noise(door(follows)).text().endswith("times the clip norm 1 of the first round")
    )


def test_report_names_everything_an_epsilon_depends_on() -> None:
    channel = door(ClientPrivacy(clip_norm=1.0, epsilon=2.0), names=("a", "b"))
    for step in range(10):
        ranks = begin(channel, step)
        for name in ("a", "b"):
            channel.release(name, torch.zeros(len(ranks), 5), ranks)
    channel.close()
    report = privacy_report(channel)
    assert (report.unit, report.relation, report.observer) == ("client", "add_remove", "clients")
    assert report.releases == 20
    assert 1.99 < report.epsilon <= 2.0
    assert report.epsilon == channel.epsilon
    assert (
        report.text().splitlines()[0]
        == SIMULATED
        == (
            "a simulation: the noise is made from a stored seed, so these outputs are not private; "
            "the same run with privacy.source=secure has the epsilon below"
        )
    )
    written = json.loads(json.dumps(report.to_dict(), allow_nan=False))
    for word in (
        "client",
        "add_remove",
        "clients",
        "Poisson",
        "pld",
        "seeded",
        "in memory",
        "tuned",
    ):
        assert word in report.text()
        assert word in json.dumps(written)
    secure = privacy_report(door(ClientPrivacy(clip_norm=1.0, epsilon=2.0, source="secure")))
    assert secure.headline.startswith("private")
    assert "whole numbers" in secure.text()
    assert not any("precision" in text for text in secure.outside)
    assert any("took to draw" in text for text in secure.outside)


# Secure mode


def test_nothing_secret_reaches_the_ledger(tmp_path: Path) -> None:
    privacy = ClientPrivacy(clip_norm=0.7, noise_multiplier=1.3, source="secure")
    channel = door(privacy, ledger_path=tmp_path / "ledger")
    for step in range(6):
        ranks = begin(channel, step)
        channel.release("update", torch.randn(len(ranks), 5), ranks)
    channel.close()
    kinds = {}
    for line in (tmp_path / "ledger").read_text().splitlines():
        entry = json.loads(line)
        kinds.setdefault(entry["kind"], set()).update(entry)
    assert kinds["charge"] == {"kind", "first", "end", "previous"}
    assert kinds["close"] == {"kind", "previous"}
    assert "seed" not in kinds["header"]


@pytest.mark.parametrize("privacy", [None, ClientPrivacy(clip_norm=1.0, epsilon=math.inf)])
def test_a_cap_on_uses_holds_without_noise_and_after_a_resume(privacy):
    sampler = FixedCohort(cohort=3, max_uses=2).bind(6)
    plans = (ReleasePlan(name="update", dimension=2),)

    states = []

    def cohorts(first):
        channel = open_channel(privacy, plans, sampler, seed=5, steps=10)
        if first:
            channel.restore(states[first - 1])
        drawn = []
        try:
            for step in range(first, 10):
                ranks = channel.draw(step)
                channel.begin(step, ranks)
                states.append(channel.state())
                drawn.append(ranks.tolist())
        except BudgetExhausted:
            return drawn
        pytest.fail("the cap was ignored")

    whole = cohorts(0)
    uses = torch.bincount(torch.tensor(whole).flatten(), minlength=6)
    assert 1 < len(whole) <= 4
    assert int(uses.max()) == 2
    assert cohorts(1) == whole[1:]


# Forms of releases: matrices, Laplace laws, a clip norm that adapts


D, CLIENTS, STEPS = 24, 30, 5
everybody = partial(
    door, sampler=FullParticipation(), clients=CLIENTS, dimension=D, steps=STEPS, seed=0
)


def zeros(channel, step: int = 0, name: str = "update") -> np.ndarray:
    ranks = begin(channel, step)
    return channel.release(
        name, torch.zeros(len(ranks), channel.releases[name].dimension), ranks
    ).numpy()


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
        channel = everybody(privacy, form=form)
        value = channel.release("update", rows, begin(channel))
        assert torch.allclose(value, wanted, rtol=4e-6)  # the clip's margin, squared
    plain = everybody(None, form="symmetric")
    assert torch.allclose(
        plain.release("update", rows, begin(plain)), clean.T @ clean / CLIENTS, rtol=1e-12
    )


def test_forms_that_no_law_covers_are_refused() -> None:
    with pytest.raises(PrivacyError, match="LaplaceNoise on a symmetric matrix"):
        everybody(
            ClientPrivacy(clip_norm=1.0, noise_multiplier=1.0, mechanism="laplace"),
            form="symmetric",
        )
    with pytest.raises(ConfigError, match="form"):
        ReleasePlan(name="x", dimension=3, form="cube")


def test_wishart_noise_is_reproduced_and_its_claim_refuted() -> None:
    """That a neighbour makes some outputs impossible, with the probability that the report states: test_symmetric."""
    settings = {"clip_norm": 0.8, "mechanism": "wishart", "delta": 1e-5}
    privacy = ClientPrivacy(**settings, noise_multiplier=2.0)
    with pytest.raises(PrivacyError, match="symmetric matrices only"):
        everybody(privacy)
    channel = everybody(privacy, form="symmetric", dimension=4)
    for step in range(STEPS):
        expected = smat(
            torch.from_numpy(WishartNoise(2.0).draw(SeededSource(0), "noise/update", step, 10))
        )
        np.testing.assert_allclose(zeros(channel, step) * CLIENTS, 0.8**2 * expected, rtol=1e-12)
    report, claimed = privacy_report(channel), 0.5  # one over the multiplier
    assert report.epsilon == channel.epsilon == math.inf
    assert optimum(claimed, STEPS, 1e-5) * (1 - 1e-9) <= report.claimed <= STEPS * claimed
    assert "impossible with probability" in report.text()
    assert report.headline == "not private: epsilon = inf, the published accounting does not hold"
    calibrated = everybody(ClientPrivacy(**settings, epsilon=3.0), form="symmetric", steps=60)
    for step in range(60):
        begin(calibrated, step)
    assert 2.9 < privacy_report(calibrated).claimed <= 3.0


# Laplace laws


def test_several_releases_without_a_joint_gaussian_need_a_schedule_without_coins() -> None:
    privacy = ClientPrivacy(clip_norm=0.5, noise_multiplier=4.0, mechanism="laplace", delta=1e-5)
    two = everybody(privacy, names=("a", "b"))
    for step in range(STEPS):
        begin(two, step)
    expected = (
        library_accountant().compose(dp_event.LaplaceDpEvent(4.0), 2 * STEPS).get_epsilon(1e-5)
    )
    assert two.epsilon == pytest.approx(expected, rel=1e-3)
    with pytest.raises(PrivacyError, match="share its coins"):
        everybody(privacy, names=("a", "b"), sampler=PoissonSampling(6))


# A clip norm that adapts


def adaptive(**settings) -> ClientPrivacy:
    clip = QuantileClip(
        **{"initial": 1.0, "quantile": 0.5, "lr": 0.3, "count_noise": 2.0} | settings
    )
    return ClientPrivacy(clip_norm=clip, noise_multiplier=1.5, delta=1e-5)


def test_a_round_speaks_of_the_clip_norm_of_its_release_until_the_next_one_begins() -> None:
    channel = everybody(adaptive(lr=1.0))
    norms = [1.0]
    for step in range(STEPS):
        ranks = begin(channel, step)
        rows = torch.full((len(ranks), D), 1e-3)
        channel.release("update", rows, ranks)
        release = channel.releases["update"]
        expected = release.noise.multiplier * norms[-1] / CLIENTS
        assert float(channel.noise_std("update")) == pytest.approx(expected, rel=1e-12)
        assert (
            privacy_report(channel).noise_std,
            privacy_report(channel).clip_norm,
        ) == pytest.approx((expected, norms[-1]), rel=1e-12)
        long = torch.full((1, D), 100.0)
        kept = clip_rows(long, channel.clips["update"])
        assert float(kept.norm()) == pytest.approx(norms[-1], rel=1e-5)
        norms.append(float(channel.state()["update"][-1]))
    assert len(set(norms)) == len(norms)
    again = everybody(adaptive(lr=1.0))
    again.restore(channel.state())
    assert privacy_report(again).clip_norm == norms[-2]
    begin(again)
    assert privacy_report(again).clip_norm == norms[-1]


def test_update_and_count_together_cost_the_given_multiplier() -> None:
    channel, fixed = (
        everybody(adaptive()),
        everybody(ClientPrivacy(clip_norm=1.0, noise_multiplier=1.5, delta=1e-5)),
    )
    for step in range(STEPS):
        begin(channel, step)
        begin(fixed, step)
    assert channel.epsilon == fixed.epsilon
    release = channel.releases["update"]
    update, count = release.noise.multiplier, 2.0 / 0.5  # sigma_b over the sensitivity 1/2
    assert update > 1.5
    joint = dp_event.ComposedDpEvent([dp_event.GaussianDpEvent(z) for z in (update, count)])
    assert epsilon(joint, STEPS, 1e-5) == pytest.approx(channel.epsilon, rel=1e-9)


def test_each_step_clips_and_noises_at_its_own_norm() -> None:
    settings = QuantileClip(initial=1.0, quantile=0.5, lr=0.5, count_noise=2.0)
    channel, silent = (
        everybody(adaptive(lr=0.5), seed=4, channel_class=RecordedRounds) for _ in range(2)
    )
    expected, update = (
        1.0,
        (1.5**-2 - 4.0**-2) ** -0.5,
    )  # z of both together 1.5, of the count 2 / .5
    for step in range(STEPS):
        ranks = begin(channel, step)
        silent.restore({"update": torch.tensor([expected, expected], dtype=torch.float64)})
        silent.begin(step, silent.draw(step))
        channel.record = []
        clear = channel.release("update", torch.full((len(ranks), D), 9.0), ranks)
        blank = silent.release("update", torch.zeros(len(ranks), D), ranks)
        assert float((clear - blank).norm()) == pytest.approx(expected, rel=1e-5)
        noise = SeededSource(4).normal("noise/update", step, D) * update * expected / CLIENTS
        np.testing.assert_allclose(blank, noise, rtol=1e-12)
        count = (
            -0.5 + 2.0 * SeededSource(4).normal("noise/update/count", step, 1) / CLIENTS
        )  # of nobody within the norm
        np.testing.assert_allclose(channel.record[1][2], count, rtol=1e-12)
        fraction = float(channel.record[1][2]) + 0.5
        expected = expected * math.exp(-settings.lr * (fraction - settings.quantile))
        assert float(channel.state()["update"][-1]) == pytest.approx(expected, rel=1e-12)


def test_an_adaptive_clip_needs_gaussian_noise_and_room_for_the_count() -> None:
    with pytest.raises(ConfigError, match="only with Gaussian noise"):
        ClientPrivacy(
            clip_norm=QuantileClip(initial=1.0), noise_multiplier=1.0, mechanism="laplace"
        )
    with pytest.raises(PrivacyError, match="count"):
        everybody(adaptive(count_noise=0.7))


# The quantile that a clip norm follows


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
        total = (
            float(count_rows(cohort, norm).sum())
            + settings.count_std(COHORT) * generator.standard_normal()
        )
        norm = settings.updated_norm(norm, total / COHORT + 0.5)
        if step >= 500:
            last.append(norm)
    reached = math.exp(np.mean(np.log(last)))
    fraction = float((norms <= reached).double().mean())
    assert abs(fraction - quantile) < 0.04
    assert abs(math.log(reached / target)) < 0.15


def test_an_impossible_split_is_refused_and_a_nearly_impossible_one_accurate():
    for count in (0.5, 1.0):
        with pytest.raises(PrivacyError, match=r"count_noise"):
            split_multiplier(1.0, count)
    assert split_multiplier(1.0, 1.0 + 2.0**-40) == pytest.approx(2.0**19.5, rel=1e-9)


def test_no_noise_on_the_count_takes_the_clip_norm_beyond_the_bounds_of_a_clip():
    clip = QuantileClip(initial=1.0)
    for fraction, bound in ((1e4, 1e-100), (-1e4, 1e100), (1e300, 1e-100), (-1e300, 1e100)):
        assert Clip(clip.updated_norm(1.0, fraction)).bound == bound


def test_replicates_with_budgets_of_their_own_have_multipliers_of_their_own() -> None:
    budgets = [ClientPrivacy(clip_norm=1.0, epsilon=epsilon, delta=1e-5) for epsilon in (1.0, 8.0)]
    plans = [ReleasePlan(name="update", dimension=3)]
    sampler = FullParticipation().bind(10)
    channel = open_channel(budgets, plans, sampler, seed=0, steps=5, replicates=2)
    singly = [open_channel(each, plans, sampler, seed=0, steps=5) for each in budgets]
    expected = [[each.noise_multipliers[0]] for each in singly]
    assert channel.noise_multipliers.tolist() == expected
    assert channel.noise_multiplier == max(expected)[0]


def test_a_class_of_its_own_is_refused_beside_replicates_and_ranks() -> None:
    """It would be passed over, and a recording would stay empty."""
    with pytest.raises(ConfigError, match="RecordedRounds is that of one run in one process"):
        door(NOISED, sampler=FullParticipation(), replicates=2, channel_class=RecordedRounds)
    two = SimpleNamespace(size=2, first=True, share=lambda make: make())
    with pytest.raises(ConfigError, match="leave channel_class out"):
        door(NOISED, ranks=two, channel_class=RecordedRounds)
