"""Budgets that differ from step to step, and repetitions of a run: against the libraries and closed forms."""

import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from dp_accounting import dp_event, gaussian_mechanism

from fedmtl.errors import BudgetExhausted, ConfigError, PrivacyError, ResumeError
from fedmtl.privacy import (
    ClientPrivacy,
    FixedCohort,
    FullParticipation,
    PoissonSampling,
    QuantileClip,
    RecordPrivacy,
    ReleasePlan,
    RoundChannel,
    SeededSource,
    open_channel,
    privacy_report,
)
from fedmtl.privacy.cost import PrivacyCost, normalized
from fedmtl.privacy.row_noise import RowNoise
from tests.helpers import l2_laplace_losses, library_accountant

WEIGHTS = normalized([float(t) ** 0.7 for t in range(1, 9)])
GAUSSIAN = ClientPrivacy(clip_norm=2.0, epsilon=1.5, delta=1e-5)


def plan(
    form: Any = "symmetric", weights: tuple[float, ...] | None = WEIGHTS, d: int = 3
) -> ReleasePlan:
    return ReleasePlan(name="c", dimension=d, form=form, allocation=weights)


def opened(
    privacy: Any, one: ReleasePlan, sampler: Any = None, seed: int = 1, **options: Any
) -> RoundChannel:
    bound, steps = (
        (sampler or FullParticipation()).bind(20),
        options.pop("steps", len(one.allocation or ())),
    )
    return open_channel(privacy, (one,), bound, seed=seed, steps=steps, **options)


def step(channel: RoundChannel, number: int, rows: torch.Tensor | None = None) -> torch.Tensor:
    ranks = channel.draw(number)
    channel.begin(number, ranks)
    rows = torch.zeros(20, 3, dtype=torch.float64) if rows is None else rows
    return channel.release("c", rows, ranks)


def gaussian_epsilon(multipliers: list[float], delta: float) -> float:
    joint = math.fsum(z**-2 for z in multipliers) ** -0.5
    return float(gaussian_mechanism.get_epsilon_gaussian(joint, delta))


def test_gaussian_uses_compose_to_the_budget_in_closed_form() -> None:
    channel = opened(GAUSSIAN, plan())
    z = channel.noise_multiplier
    own = [z / w for w in WEIGHTS]
    for uses in (1, 3, 8):
        assert channel.epsilon_at(uses) == pytest.approx(
            gaussian_epsilon(own[:uses], 1e-5), rel=1e-9
        )
    assert 1.5 * (1 - 1e-4) < channel.epsilon_at(8) <= 1.5


@pytest.mark.parametrize(
    ("mechanism", "sampled", "event", "rel"),
    [
        ("gaussian", 1.0, dp_event.GaussianDpEvent, 2e-3),
        ("laplace", 1.0, dp_event.LaplaceDpEvent, 2e-3),
        (
            "laplace",
            0.2,
            lambda z: dp_event.PoissonSampledDpEvent(0.2, dp_event.LaplaceDpEvent(z)),
            5e-3,
        ),
        (
            "gaussian",
            0.2,
            lambda z: dp_event.PoissonSampledDpEvent(0.2, dp_event.GaussianDpEvent(z)),
            5e-3,
        ),
    ],
)
def test_different_uses_compose_as_the_library_does(
    mechanism: str, sampled: float, event: Callable[[float], Any], rel: float
) -> None:
    library = library_accountant()
    for w in WEIGHTS:
        library.compose(event(3.0 / w))
    ours = PrivacyCost(
        law=mechanism, sizes=(1,), delta=1e-5, sampled=sampled, weights=WEIGHTS
    ).epsilon(8, 3.0)
    assert ours == pytest.approx(library.get_epsilon(1e-5), rel=rel)


def test_different_k_norm_uses_against_samples_of_their_losses() -> None:
    epsilons, d, samples = np.linspace(0.2, 1.4, 7), 5, 200_000
    weights = normalized(epsilons.tolist())
    cost = PrivacyCost(law="l2_laplace", sizes=(d,), delta=1e-2, weights=weights)
    assert cost.event(1 / float(np.mean(epsilons)), 2).epsilon == pytest.approx(float(epsilons[2]))
    losses = sum(l2_laplace_losses(e, d, samples, seed=use) for use, e in enumerate(epsilons))
    value = cost.epsilon(7, 1 / float(np.mean(epsilons)))
    excess = np.maximum(-np.expm1(value - losses), 0.0)
    assert abs(excess.mean() - 1e-2) < 5 * excess.std() / math.sqrt(samples) + 1e-5


def test_the_noise_of_each_use_follows_its_weight() -> None:
    channel = opened(GAUSSIAN, plan(form="vector", weights=normalized([1.0, 2.0, 5.0]), d=3))
    z = channel.noise_multiplier
    for t, w in enumerate(normalized([1.0, 2.0, 5.0])):
        value = step(channel, t)
        expected = SeededSource(1).normal("noise/c", t, 3) * (z / w) * 2.0 / 20  # z C / m
        np.testing.assert_allclose(value.numpy(), expected, rtol=1e-12)
        assert float(channel.noise_std("c")) == pytest.approx(z / w * 2.0 / 20, rel=1e-12)


def test_a_report_says_how_the_budget_is_divided() -> None:
    said = f"steps have public weights {WEIGHTS[0]:.3g} to {WEIGHTS[-1]:.3g}, and noise in inverse proportion"
    assert said in privacy_report(opened(GAUSSIAN, plan())).sampler
    assert "weights" not in privacy_report(opened(GAUSSIAN, plan(weights=None))).text()


def test_a_fixed_multiplier_stops_where_the_next_use_does_not_fit() -> None:
    weights = normalized([1.0, 1.0, 2.0, 4.0])
    privacy = ClientPrivacy(clip_norm=1.0, noise_multiplier=5.0, epsilon=1.6, delta=1e-5)
    fitting = sum(
        gaussian_epsilon([5.0 / w for w in weights[:u]], 1e-5) <= 1.6 for u in range(1, 5)
    )
    assert fitting == 3
    channel = opened(privacy, plan(weights=weights))
    for t in range(3):
        step(channel, t)
    with pytest.raises(BudgetExhausted, match="3 steps are charged"):
        channel.begin(3, channel.draw(3))


def test_a_crash_in_secure_mode_takes_the_next_uses_of_the_allocation(tmp_path: Path) -> None:
    """What a crash left charged is spent: the noise continues with the use that is charged next, not with the step."""
    weights = normalized([8.0, 1.0, 1.0, 1.0, 2.0, 3.0])
    privacy = ClientPrivacy(clip_norm=1.0, epsilon=3.0, delta=1e-5, source="secure")
    first = opened(privacy, plan(weights=weights), ledger_path=tmp_path / "l")
    step(first, 0)
    loud = float(first.noise_std("c"))
    first.accountant.ledger._file.close()  # the process dies with use 0 charged
    again = opened(privacy, plan(weights=weights), ledger_path=tmp_path / "l", resume=True)
    step(again, 0)
    assert float(again.noise_std("c")) == pytest.approx(loud * weights[0] / weights[1])
    z = again.noise_multiplier
    assert again.epsilon == pytest.approx(
        gaussian_epsilon([z / w for w in weights[:2]], 1e-5), rel=1e-6
    )


@pytest.mark.parametrize("budget", [None, 50.0])
def test_a_crash_in_secure_mode_does_not_outspend_the_noise_on_rows(
    tmp_path: Path, budget: float | None
) -> None:
    noisy = ReleasePlan(name="c", dimension=3, form="symmetric", rows=RowNoise(1.0))
    fixed = ClientPrivacy(
        clip_norm=1.0, epsilon=budget, noise_multiplier=5.0, delta=1e-5, source="secure"
    )
    path = tmp_path / "ledger.jsonl"
    for session in range(3):
        channel = opened(fixed, noisy, steps=3, ledger_path=path, resume=session > 0)
        step(channel, 0)
        assert channel.row_noise["c"].epsilon_at(channel.accountant.ledger.charged) <= 1.0
        channel.accountant.ledger._file.close()
        channel.accountant.ledger._file = None
    channel = opened(fixed, noisy, steps=3, ledger_path=path, resume=True)
    with pytest.raises(BudgetExhausted):
        step(channel, 0)
    channel.close()


def test_a_ledger_keeps_the_budget_of_the_noise_on_rows(tmp_path: Path) -> None:
    private = ClientPrivacy(clip_norm=1.0, epsilon=2.0, delta=1e-5, source="secure")
    path = tmp_path / "ledger.jsonl"

    def noisy(budget: float) -> ReleasePlan:
        return ReleasePlan(name="c", dimension=3, form="symmetric", rows=RowNoise(budget))

    opened(private, noisy(5.0), steps=3, ledger_path=path).close()
    opened(private, noisy(5.0), steps=3, ledger_path=path, resume=True).close()
    with pytest.raises(ResumeError, match="rows of c"):
        opened(private, noisy(1.0), steps=3, ledger_path=path, resume=True)


@pytest.mark.parametrize(
    "weights", [(), (1.0,) * 7 + (2.0,), (0.0,) + (8 / 7,) * 7, (math.inf,) * 8]
)
def test_wrong_weights_are_refused(weights: tuple[float, ...]) -> None:
    with pytest.raises(ConfigError, match="allocation"):
        plan(weights=weights)


def test_the_noise_of_the_least_weight_is_what_must_be_drawable() -> None:
    """The largest of the run, which for one number may be up to 2**26 times the clip norm."""
    loud = ClientPrivacy(clip_norm=1.0, noise_multiplier=2.0**24, delta=1e-5, source="secure")
    opened(loud, plan("vector", normalized((1.0, 3.0)), 1)).close()
    with pytest.raises(PrivacyError, match="too large to be drawn exactly"):
        opened(loud, plan("vector", normalized((1.0, 15.0)), 1))


def test_what_an_allocation_does_not_go_with() -> None:
    with pytest.raises(PrivacyError, match="FullParticipation"):
        opened(GAUSSIAN, plan(), FixedCohort(4))
    both = tuple(
        replace(plan(weights=normalized(weights)), name=name)
        for name, weights in (("a", (1.0, 2.0)), ("b", (2.0, 1.0)))
    )
    with pytest.raises(PrivacyError, match="'a' and 'b' have different allocations"):
        open_channel(GAUSSIAN, both, FullParticipation().bind(20), seed=0, steps=2)
    with pytest.raises(ConfigError, match="fixed clip norm"):
        opened(ClientPrivacy(clip_norm=QuantileClip(1.0), epsilon=1.0), plan(form="vector"))
    with pytest.raises(ConfigError, match="positive"):
        normalized([1.0, -1.0])


# Repetitions


@pytest.mark.parametrize("form", ["vector", "symmetric", "diagonal"])
@pytest.mark.parametrize("mechanism", ["gaussian", "laplace", "l2_laplace"])
def test_repetitions_are_separate_runs(form: Any, mechanism: Any) -> None:
    if form == "symmetric" and mechanism == "laplace":
        pytest.skip("i.i.d. Laplace noise is not for symmetric matrices")
    weights = normalized([1.0, 2.0, 1.5])
    settings = [
        ClientPrivacy(clip_norm=1.0, epsilon=e, delta=1e-5, mechanism=mechanism)
        for e in (0.5, 4.0, math.inf, 0.5)
    ]
    one = plan(form=form, weights=weights)
    together = opened(settings, one, replicates=4)
    alone = [opened(p, one) for p in settings]
    for r, channel in enumerate(alone):
        channel.sources = [SeededSource(1, r)]
    generator = torch.Generator().manual_seed(0)
    for t in range(3):
        rows = torch.randn(4, 20, 3, generator=generator, dtype=torch.float64)
        rows[1, 3, 0] = math.nan
        found = step(together, t, rows)
        apart = torch.stack([step(channel, t, rows[r]) for r, channel in enumerate(alone)])
        torch.testing.assert_close(found, apart, rtol=1e-12, atol=1e-14)
        stds = [float(channel.noise_std("c")) for channel in alone]
        np.testing.assert_allclose(together.noise_std("c").numpy(), stds, rtol=1e-12)
    np.testing.assert_allclose(together.epsilons, [channel.epsilon for channel in alone], rtol=1e-9)


def test_what_repetitions_do_not_go_with(tmp_path: Path) -> None:
    one = plan(weights=None)
    for privacy, options, match in (
        (GAUSSIAN, {"ledger_path": tmp_path / "l"}, "simulation"),
        (ClientPrivacy(clip_norm=1.0, epsilon=1.0, source="secure"), {}, "simulation"),
        (GAUSSIAN, {"sampler": PoissonSampling(4)}, "FullParticipation"),
        (RecordPrivacy(clip_norm=1.0, epsilon=1.0), {}, "ClientPrivacy"),
        ([GAUSSIAN], {}, "1 privacy settings"),
        ([GAUSSIAN, ClientPrivacy(clip_norm=3.0, epsilon=1.0)], {}, "differ only in epsilon"),
    ):
        with pytest.raises(ConfigError, match=match):
            opened(privacy, one, replicates=2, **options)


def test_repetitions_without_privacy_release_exact_sums() -> None:
    channel = opened(None, plan(form="vector", weights=None), replicates=2)
    rows = torch.randn(2, 20, 3, dtype=torch.float64)
    torch.testing.assert_close(step(channel, 0, rows), rows.sum(1) / 20)
    assert channel.noise_std("c").tolist() == [0.0, 0.0]
    assert channel.epsilons.tolist() == [math.inf] * 2
