"""The channel's manners: what it refuses, what it reports, and what comes out without privacy."""

import json
import math
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from fedmtl.errors import BudgetExhausted, ConfigError, PrivacyError
from fedmtl.privacy import (
    ClientPrivacy,
    Clip,
    FixedCohort,
    GaussianNoise,
    PoissonSampling,
    Release,
    ReleasePlan,
    open_channel,
)
from fedmtl.privacy.report import SIMULATED


def door(
    privacy: ClientPrivacy | None = None,
    *,
    steps: int = 10,
    dimension: int = 5,
    names=("update",),
    sampler=None,
    **options,
):
    plans = tuple(ReleasePlan(name=name, dimension=dimension, uses=steps) for name in names)
    return open_channel(privacy, plans, sampler or PoissonSampling(4).bind(40), seed=3, steps=steps, **options)


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
    assert channel.snr() is None
    assert channel.report.text() == "not private: epsilon = inf, no clip, no noise"
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
    assert channel.report.to_dict()["epsilon"] == "inf"
    assert "clip only" in channel.report.text()


def test_an_algorithm_that_releases_nothing_spends_nothing() -> None:
    channel = door(NOISED, names=())
    begin(channel)
    assert channel.epsilon == 0.0
    assert channel.report.epsilon == 0.0
    assert "nothing is released" in channel.report.text()
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
    for clients in (torch.tensor([other]), torch.cat([members[1:], torch.tensor([other])]), torch.tensor([-1])):
        with pytest.raises(PrivacyError, match=f"of client {int(clients[-1])}, who was not drawn for step 0"):
            channel.release("update", torch.ones(len(clients), 5), clients)
    channel.release("update", torch.ones(len(members) - 1, 5), members[1:])


def test_a_client_sends_one_row_over_all_ranks() -> None:
    channel = door(NOISED)
    members = begin(channel)
    one, other = members[:2], members[1:3]
    channel.ranks = SimpleNamespace(size=2, first=True, gather=lambda _: [one, other])  # type: ignore[assignment]
    with pytest.raises(PrivacyError, match="each client once"):
        channel.release("update", torch.ones(2, 5), one)


def test_plans_are_checked() -> None:
    with pytest.raises(PrivacyError, match="same name"):
        door(NOISED, names=("a", "a"))
    plan = ReleasePlan(name="a", dimension=3, uses=4)
    with pytest.raises(PrivacyError, match="4 uses"):
        open_channel(NOISED, (plan,), PoissonSampling(4).bind(40), seed=0, steps=5)
    with pytest.raises(ConfigError, match="dimension"):
        ReleasePlan(name="a", dimension=0, uses=4)
    with pytest.raises(ConfigError, match="'/count'"):  # such noise is that of the count of 'a'
        ReleasePlan(name="a/count", dimension=1, uses=4)
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


def test_types_derive_the_sensitivity_and_refuse_mismatched_norms() -> None:
    sampler = PoissonSampling(4).bind(40)
    fields = {"name": "a", "dimension": 3, "uses": 1, "sampling": sampler}
    release = Release(clip=Clip(0.5), noise=GaussianNoise(3.0), **fields)
    assert release.sensitivity == 0.5
    assert release.noise_std == 0.375
    with pytest.raises(PrivacyError, match=r"GaussianNoise.*l2.*clip bounds the l1"):
        Release(clip=Clip(0.5, "l1"), noise=GaussianNoise(3.0), **fields)


def test_signal_to_noise_uses_public_quantities() -> None:
    signal = door(NOISED, dimension=400).snr()
    assert signal is not None
    assert signal.noise_norm == pytest.approx(2.0 * 1.0 * 20 / 4)
    assert signal.ratio == pytest.approx(10.0)
    assert signal.warning is None
    louder = door(NOISED, dimension=500).snr()
    assert louder is not None
    assert louder.warning is not None
    assert "times the clip norm" in louder.text()


def test_report_names_everything_an_epsilon_depends_on() -> None:
    channel = door(ClientPrivacy(clip_norm=1.0, epsilon=2.0), names=("a", "b"))
    for step in range(10):
        ranks = begin(channel, step)
        for name in ("a", "b"):
            channel.release(name, torch.zeros(len(ranks), 5), ranks)
    channel.close()
    report = channel.report
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
    secure = door(ClientPrivacy(clip_norm=1.0, epsilon=2.0, source="secure")).report
    assert secure.headline.startswith("private")
    assert "whole numbers" in secure.text()


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
    plans = (ReleasePlan(name="update", dimension=2, uses=10),)

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
