"""The audit's own parts: statistics against SciPy, and setups it must read rightly."""

import math
from dataclasses import replace

import numpy as np
import pytest
import torch
from scipy import stats

from fedmtl.audit import CHECKS, Claim, Effort, Finding, Setup, any_refuted, audit_channel, table
from fedmtl.audit.findings import exact, low_p, skipped, too_large
from fedmtl.audit.freshness import _lags
from fedmtl.audit.noise_check import noise_law
from fedmtl.audit.play import turns
from fedmtl.audit.samples import standardized
from fedmtl.audit.sensitivity import adversaries
from fedmtl.audit.statistics import (
    correlations,
    energy_p,
    from_binomial,
    kolmogorov_p,
    normal_p,
)
from fedmtl.privacy import (
    ClientPrivacy,
    CyclicCohorts,
    FixedCohort,
    FullParticipation,
    GradientPlan,
    Ledger,
    PoissonSampling,
    QuantileClip,
    RecordPrivacy,
    ReleasePlan,
)
from fedmtl.privacy.accounting import composition
from fedmtl.privacy.samplers import BoundFixed
from tests.mutation import forget_multipliers

SMALL = Effort(noise=3000, cohorts=60)


def a_setup(
    sampler=None, dimension: int = 120, steps: int = 30, releases: int = 1, **options
) -> Setup:
    sampler = sampler or PoissonSampling(8)
    privacy = {"clip_norm": 0.7, "epsilon": 8.0, "delta": 1e-4} | options
    plans = tuple(
        ReleasePlan(name=f"part {index}", dimension=dimension) for index in range(releases)
    )
    return Setup(
        privacy=ClientPrivacy(**privacy),
        plans=plans,
        schedule=sampler.bind(40),
        steps=steps,
        tensors=(100, 20),
    )


# Statistics


def test_energy_is_a_two_sided_chi_square_test() -> None:
    law = stats.chi2(50)
    for energy in (12.0, 30.0, 50.0, 77.0, 140.0):
        assert float(energy_p(energy, 50)) == pytest.approx(
            min(1.0, 2 * min(law.cdf(energy), law.sf(energy))), rel=1e-10
        )
    assert float(energy_p(math.nan, 50)) == 0
    assert float(energy_p(0.0, 50)) == 0


@pytest.mark.parametrize("scale", [1.0, 1.1])
def test_kolmogorov_agrees_with_scipy(scale: float) -> None:
    values = scale * np.random.default_rng(1).standard_normal(3000)
    assert kolmogorov_p(values) == pytest.approx(stats.kstest(values, "norm").pvalue, rel=0.03)
    assert kolmogorov_p(np.append(values, np.nan)) == 0


def test_discrete_samples_become_normal() -> None:
    rng = np.random.default_rng(2)
    normal = from_binomial(rng.binomial(30, 0.2, 20_000), 30, 0.2, rng)
    assert stats.kstest(normal, "norm").pvalue > 1e-4
    sizes, rates = rng.integers(0, 12, 20_000), rng.uniform(0.1, 0.9, 20_000)
    assert (
        stats.kstest(from_binomial(rng.binomial(sizes, rates), sizes, rates, rng), "norm").pvalue
        > 1e-4
    )
    # a wrong parameter shows
    assert normal_p(from_binomial(rng.binomial(30, 0.25, 20_000), 30, 0.2, rng)) < 1e-6


def test_correlations_of_rows() -> None:
    rows = np.array([[1.0, 0.0], [0.0, 2.0], [0.0, 0.0]])
    assert correlations(rows, rows[:2]).tolist() == [[1, 0], [0, 1], [1, 1]]


def _claim(kind: str, dimension: int) -> Claim:
    return Claim(
        law=kind,
        multiplier=1.5,
        bound=0.5,
        relation="replace",
        norm="l2",
        size=dimension,
        denominator=4.0,
    )


def _law(kind: str, rng: np.random.Generator, shape: tuple[int, int]) -> np.ndarray:
    """Noise of multiplier 1.5 at sensitivity 2 * 0.5, over the denominator 4, written out."""
    if kind == "gaussian":
        return rng.normal(scale=1.5, size=shape) / 4
    if kind == "laplace":
        return rng.laplace(scale=1.5, size=shape) / 4
    direction = rng.standard_normal(shape)
    direction /= np.linalg.norm(direction, axis=1, keepdims=True)
    return direction * rng.gamma(shape[1], 1.5, size=(shape[0], 1)) / 4


@pytest.mark.parametrize("kind", ["gaussian", "laplace", "l2_laplace"])
@pytest.mark.parametrize("dimension", [1, 3, 400])
def test_every_law_becomes_normal_and_no_other_does(kind: str, dimension: int) -> None:
    rng = np.random.default_rng(3)
    raw = _law(kind, rng, (24_000 // dimension, dimension))
    noise = standardized(raw, _claim(kind, dimension))
    assert stats.kstest(noise.ravel(), "norm").pvalue > 1e-4
    parts = [(0, dimension)]
    assert not any_refuted(noise_law("x", noise, parts))
    for factor in (0.5, 2.0):
        assert any_refuted(
            noise_law("x", standardized(factor * raw, _claim(kind, dimension)), parts)
        )
    others = (
        {"gaussian", "laplace", "l2_laplace"}
        - {kind}
        - ({"laplace", "l2_laplace"} if dimension == 1 else set())
    )
    for other in others if kind != "l2_laplace" or dimension > 1 else {"gaussian"}:
        assert any_refuted(noise_law("x", standardized(raw, _claim(other, dimension)), parts)), (
            other
        )


def test_repetition_at_any_lag_is_found() -> None:
    noise = np.random.default_rng(4).standard_normal((6, 300))
    assert not _lags("lags", noise).refuted
    for lag in (1, 7, 150, 151, 211):
        repeated = noise[:, np.arange(300) % lag]
        assert _lags("lags", repeated).refuted, lag


# Whole audits


UNUSUAL = {  # beside what the mutation gate passes as it is
    "laplace, fixed": {"mechanism": "laplace", "sampler": FixedCohort(8)},
    "l2_laplace, full": {"mechanism": "l2_laplace", "sampler": FullParticipation()},
    "bands, uneven turns": {"sampler": CyclicCohorts(9), "bands": "auto"},
    "adaptive, fixed": {
        "clip_norm": QuantileClip(0.5, count_noise=30.0),
        "sampler": FixedCohort(8),
    },
    "adaptive, secure": {"clip_norm": QuantileClip(0.5, count_noise=3.0), "source": "secure"},
    "laplace, secure": {"mechanism": "laplace", "source": "secure"},
    "everybody drawn": {"sampler": PoissonSampling(40)},
    "full, secure": {"sampler": FullParticipation(), "source": "secure"},
    "two releases, secure": {"releases": 2, "source": "secure"},
}


@pytest.mark.parametrize("name", UNUSUAL)
def test_nothing_sound_is_refuted(name: str) -> None:
    made = a_setup(**UNUSUAL[name])
    findings = audit_channel(made, effort=SMALL)
    assert not any_refuted(findings), table(findings)
    kinds = {finding.check.split(":")[0] for finding in findings if not finding.skipped}
    everybody = made.sampler.probability == 1  # then who takes part cannot follow the noise
    apart = (
        {"transcript", "independence"}
        | ({"grid"} if "secure" not in name else set())
        | ({"sampler"} if everybody else set())
    )
    assert kinds == set(CHECKS) - apart
    unchecked = [finding.check for finding in findings if finding.skipped]
    assert ("sampler: noise of part 0" in unchecked) == everybody
    assert ("sampler: pairs" in [finding.check for finding in findings]) == (
        made.sampler.amplified and not everybody
    )
    assert any(finding.check.endswith("/count") for finding in findings) == name.startswith(
        "adaptive"
    )
    assert any(
        finding.check == "freshness: part 0 and part 1" for finding in findings
    ) == name.startswith("two")


@pytest.mark.parametrize(
    ("form", "mechanism", "sampler"),
    [
        ("symmetric", "gaussian", FullParticipation()),
        ("symmetric", "gaussian", FixedCohort(8)),
        ("symmetric", "l2_laplace", FixedCohort(8)),
        ("diagonal", "gaussian", FixedCohort(8)),
        ("diagonal", "l2_laplace", FullParticipation()),
        ("diagonal", "laplace", FixedCohort(8)),
    ],
)
def test_outer_products(form: str, mechanism: str, sampler) -> None:
    plan = ReleasePlan(name="update", dimension=14, form=form)
    findings = audit_channel(
        replace(a_setup(sampler, mechanism=mechanism), plans=(plan,)), effort=SMALL
    )
    assert not any_refuted(findings), table(findings)
    (moved,) = [
        finding.statistic for finding in findings if finding.check.startswith("sensitivity")
    ]
    assert moved > 0.999  # the worst pair of neighbours is among those tried


def test_without_noise_only_the_clip_is_checked() -> None:
    findings = audit_channel(a_setup(epsilon=math.inf), effort=SMALL)
    checked = {finding.check.split(":")[0] for finding in findings if not finding.skipped}
    assert checked == {"sensitivity", "exact sum"}
    assert not any_refuted(findings)


def test_small_vectors_and_few_steps() -> None:
    for dimension, steps in ((1, 30), (2, 3), (20_000, 2)):
        tiny = replace(a_setup(dimension=dimension, steps=steps), tensors=())
        assert not any_refuted(audit_channel(tiny, effort=SMALL)), dimension


def test_an_audit_repeats_under_its_seed_and_leaves_the_threads_of_torch() -> None:
    threads, effort = torch.get_num_threads(), Effort(noise=600, cohorts=10)
    one, again, other = (
        str(audit_channel(a_setup(), seed=seed, effort=effort)) for seed in (3, 3, 4)
    )
    assert one == again != other
    assert torch.get_num_threads() == threads


def test_turns_and_rows() -> None:
    assert turns(np.array([2, 0, 1, 3]), 100).tolist() == [0, 2, 3, 0, 3, 3]
    assert turns(np.array([2, 0, 1, 3]), 4).tolist() == [0, 2, 3, 0]
    assert turns(np.zeros(3, dtype=np.int64), 4).tolist() == []
    for dtype in (torch.float32, torch.float64):
        assert all(row.shape == (3,) and row.dtype == dtype for row in adversaries(3, dtype))
        assert any(bool(row.isnan().any()) for row in adversaries(1, dtype))


# Findings


def test_findings_say_what_happened() -> None:
    assert not low_p("x", 0.2, "").refuted
    assert low_p("x", math.nan, "").refuted
    assert too_large("x", math.nan, 1.0, "").refuted
    assert not exact("x", 0, "").refuted
    rows = [
        low_p("a", 1e-9, "off"),
        low_p("b", 0.5, ""),
        exact("c", 0, ""),
        skipped("d", "no noise"),
    ]
    text = table(rows).splitlines()
    assert [line.split()[0] for line in text] == ["check", "a", "b", "c", "d"]
    assert text[1].endswith("REFUTED: off")
    assert text[2].endswith("could not refute at level 1e-06")
    assert text[3].endswith("could not refute")
    assert text[4].endswith("not checked: no noise")
    assert "proved" not in table(rows)
    assert any_refuted(rows)
    assert not any_refuted(rows[1:])
    assert isinstance(rows[0], Finding)


def test_charges_that_count_in_files_alone_are_refuted(monkeypatch: pytest.MonkeyPatch) -> None:
    """A run without a folder would go on past its budget."""
    counted = Ledger._charge
    monkeypatch.setattr(
        Ledger, "_charge", lambda self, line: self._file is not None and counted(self, line)
    )
    privacy = ClientPrivacy(clip_norm=0.7, epsilon=8.0, noise_multiplier=2.0, delta=1e-4)
    plans = (ReleasePlan(name="a", dimension=20),)
    setup = Setup(privacy=privacy, plans=plans, schedule=FullParticipation().bind(40), steps=60)
    findings = audit_channel(setup, seed=1, effort=Effort(checks=("charges",)))
    assert "charges: steps in the ledger" in [
        finding.check for finding in findings if finding.refuted
    ]


def test_the_budget_is_that_of_the_client_that_takes_part_most(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The first client is never drawn."""
    draw = BoundFixed.draw

    def others(self, step, coins, uses=None):
        return draw(self, step, coins, uses.index_fill(0, torch.tensor([0]), self.max_uses))

    monkeypatch.setattr(BoundFixed, "draw", others)
    findings = audit_channel(a_setup(FixedCohort(8)), effort=Effort(checks=("charges",)))
    (budget,) = [finding.statistic for finding in findings if finding.check == "charges: budget"]
    assert budget == pytest.approx(1, rel=1e-6)


def test_an_accountant_that_is_wrong_for_small_figures_is_refuted(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The budgets of clients differ, and the largest epsilon is right."""
    whole = composition._epsilon
    monkeypatch.setattr(
        composition,
        "_epsilon",
        lambda *of: (lambda made: made / 2 if made < 2 else made)(whole(*of)),
    )
    forget_multipliers(monkeypatch)
    ids, counts = ("a", "b", "c"), np.array([6, 7, 8])
    privacy = RecordPrivacy(clip_norm=1.0, epsilon={"a": 0.5, "b": 0.7, "c": 8.0}, delta=1e-4)
    plan = GradientPlan(
        ids=ids, counts=counts, dimension=20, steps=np.array([2, 2, 2]), batch_size=4
    )
    setup = Setup(privacy=privacy, plans=(plan,), schedule=FullParticipation().bind(3), steps=5)
    findings = audit_channel(setup, seed=1, effort=Effort(checks=("charges",)))
    assert "charges: epsilon by dp-accounting" in [
        finding.check for finding in findings if finding.refuted
    ]
