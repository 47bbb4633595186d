"""Noise of secure sums as shares of clients: its law and its grid, what it costs, and the account that is charged
before a share exists."""

from __future__ import annotations

import json
import math
import os
import signal
from collections.abc import Callable
from dataclasses import replace
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from dp_accounting import dp_event
from scipy import stats

from fedmtl.errors import BudgetExhausted, ConfigError, PrivacyError, ResumeError, SecureSumError
from fedmtl.privacy import (
    ClientPrivacy,
    CyclicCohorts,
    FixedCohort,
    FullParticipation,
    PoissonSampling,
    PrivacyCost,
    QuantileClip,
    ReleasePlan,
    SecureSource,
    SeededSource,
    epsilon,
)
from fedmtl.privacy.clip import Clip, RowTotal
from fedmtl.privacy.noise import shares
from fedmtl.privacy.noise.discrete import discrete_gaussian
from fedmtl.privacy.noise.shares import DistributedGaussian
from fedmtl.privacy.receipt import Receipt
from fedmtl.privacy.row_noise import RowNoise
from fedmtl.privacy.secure_calibration import (
    SecureCalibration,
    _calibrated,
    _shares,
    calibrate_secure_sum,
)
from fedmtl.privacy.secure_sum import LocalRandomizer, SecureSum, ShareAccount, share_words
from fedmtl.privacy.settings import SecureAggregation
from fedmtl.secure.roster import honest_rows
from tests.helpers import library_accountant
from tests.mutation import edit, forget_multipliers

ALPHA = 1e-6
CLIP = 0.7
PLAN = ReleasePlan(name="update", dimension=50)
PRIVACY = ClientPrivacy(clip_norm=CLIP, epsilon=4.0, delta=1e-5, source="secure")
SOME = SecureAggregation(colluding=4, missing=2)


def calibrated(
    schedule: Any = None, clients: int = 20, steps: int = 5, **options: Any
) -> SecureCalibration:
    schedule = schedule or FullParticipation()
    privacy = replace(PRIVACY, **options.pop("privacy", {}))
    plan = replace(PLAN, **options.pop("plan", {}))
    privacy = replace(privacy, aggregation=replace(SOME, **options))
    return calibrate_secure_sum(privacy, (plan,), schedule.bind(clients), steps)


def noise(**options: Any) -> DistributedGaussian:
    usual = {
        "multiplier": 1.3,
        "sensitivity": CLIP,
        "bound": CLIP,
        "max_roster": 20,
        "colluding": 4,
        "missing": 2,
    }
    return DistributedGaussian(**{**usual, **options})


# The law


def convolved(masses: np.ndarray, times: int) -> np.ndarray:
    found = np.ones(1)
    for _ in range(times):
        found = np.convolve(found, masses)
    return found


def masses(deviation: float, reach: int) -> np.ndarray:
    k = np.arange(-reach, reach + 1)
    weights = np.exp(-(k**2) / (2 * deviation**2))
    return weights / weights.sum()


@pytest.mark.parametrize("rows", [2, 5, 20])
@pytest.mark.parametrize("deviation", [0.6, 0.8, 1.0])
def test_the_sum_of_shares_is_as_near_to_its_discrete_law_as_is_proved(
    rows: int, deviation: float
) -> None:
    """Kairouz, Liu and Steinke's tau, beside the exact convolution out to six deviations."""
    tau = 10 * sum(math.exp(-2 * math.pi**2 * deviation**2 * k / (k + 1)) for k in range(1, rows))
    reach = math.ceil(12 * deviation * math.sqrt(rows)) + 2
    total = convolved(masses(deviation, reach), rows)
    law = masses(deviation * math.sqrt(rows), len(total) // 2)
    near = np.abs(np.arange(len(total)) - len(total) // 2) <= 6 * deviation * math.sqrt(rows)
    assert np.abs(np.log(total[near] / law[near])).max() <= tau


@pytest.mark.parametrize("lost", [0, 2])
def test_the_noise_of_a_sum_has_the_law_of_its_rows(lost: int) -> None:
    """Five shares of deviation 3, of which two may be missing: chi-square beside the convolution."""
    rows = 5 - lost
    drawn = sum(
        discrete_gaussian(SeededSource(i).words("test", 0), 100_000, 3) for i in range(rows)
    )
    law = convolved(masses(3.0, 40), rows)
    k = np.arange(len(law)) - len(law) // 2
    seen = np.bincount(drawn - k[0], minlength=len(law)).astype(float)
    rare = law * 100_000 < 10
    both = [np.append(each[~rare], each[rare].sum()) for each in (seen, law * 100_000)]
    assert stats.chisquare(both[0], both[1] * both[0].sum() / both[1].sum()).pvalue > ALPHA


# The grid


CASES = [
    {}, {"max_roster": 100, "colluding": 10, "missing": 10}, {"max_roster": 1000, "colluding": 100, "missing": 100},
    {"multiplier": 50.0}, {"sensitivity": 2 * CLIP}, {"bits": 64}, {"multiplier": 0.01}, {"multiplier": 1e6, "bits": 64},
]  # fmt: skip


def check_shares() -> None:
    """The least whole deviation for which h shares have the noise that is charged, by fractions."""
    for case in CASES:
        one = noise(**case)
        assert math.log2(one.width).is_integer()
        asked = (Fraction(one.multiplier) * Fraction(one.sensitivity) / Fraction(one.width)) ** 2
        assert one.cells**2 <= asked < (one.cells + 1) ** 2
        for roster in {one.min_roster, (one.min_roster + one.max_roster) // 2, one.max_roster}:
            rows = honest_rows(roster, one.colluding, one.missing)
            share = one.deviation(roster)
            assert rows * (share - 1) ** 2 < asked <= rows * share**2


def test_shares_of_the_honest_rows_are_the_noise_that_is_charged() -> None:
    check_shares()


@pytest.mark.parametrize("case", CASES, ids=str)
def test_the_grid_is_the_finest_on_which_no_sum_wraps_around(case: dict[str, Any]) -> None:
    one = noise(**case)

    def room(width: float) -> float:
        """Of the largest sum of any roster, with 12.5 deviations of noise, in half of all words."""
        found = []
        for roster in range(one.min_roster, one.max_roster + 1):
            rows = honest_rows(roster, one.colluding, one.missing)
            share = one.multiplier * one.sensitivity / width / math.sqrt(rows)
            found.append(roster * one.bound / width + 12.5 * math.sqrt(roster) * share)
        return max(found) / 2.0 ** (one.bits - 1)

    assert room(one.width) < 1
    if one.bits == 32:
        assert room(one.width / 2) > 0.9  # but for whole numbers that are rounded up
    assert one.bound / one.width >= 2**16
    assert one.bound / one.width <= 2**50


def test_grids_of_the_design() -> None:
    """Cells in the clip norm of 32 bits, for 10 to 1,000 clients and noise multipliers 1 and 10."""
    for most, multiplier, cells in (
        (10, 1, 26),
        (100, 1, 24),
        (100, 10, 23),
        (1000, 1, 21),
        (1000, 10, 20),
    ):
        one = noise(
            max_roster=most,
            multiplier=float(multiplier),
            bound=1.0,
            sensitivity=1.0,
            colluding=0,
            missing=0,
        )
        assert 2**cells <= 1 / one.width <= 2 ** (cells + 1)


def test_the_excess_over_a_trusted_server() -> None:
    """Of 100 clients of which ten may be missing and ten collude, 79 count; a third more colluding leaves 56."""
    assert noise(max_roster=100, colluding=10, missing=10).excess(100) == pytest.approx(
        math.sqrt(100 / 79)
    )
    assert noise(max_roster=100, colluding=33, missing=10).excess(100, 10) == pytest.approx(
        math.sqrt(90 / 56)
    )
    assert noise(max_roster=3, colluding=1, missing=0).excess(3) == pytest.approx(1.2247, abs=1e-4)


@pytest.mark.parametrize(
    ("case", "match"), [
        ({"max_roster": 10}, "takes rosters of 11 clients or more if 4 of them may collude and 2 be missing; cohorts have 10"),
        ({"multiplier": 1e5}, "do not fit 32 bits on a grid of 65,536 cells .* Take 64 bits"),
        ({"multiplier": 1e12, "bits": 64}, "do not fit 64 bits .* Ask for less noise"),
        ({"multiplier": 1e-9}, "do not fit 32 bits .* 16 in the noise of a client"),
    ],
)  # fmt: skip
def test_noise_that_no_grid_fits(case: dict[str, Any], match: str) -> None:
    with pytest.raises(PrivacyError, match=match):
        noise(**case)


@pytest.mark.parametrize("roster", [0, 10, 21])
def test_rosters_that_the_noise_is_not_planned_for(roster: int) -> None:
    with pytest.raises(
        PrivacyError, match="is not one of those that the noise is planned for, of 11 to 20"
    ):
        noise().deviation(roster)


# What it costs


def hockey_stick(p: np.ndarray, q: np.ndarray, value: float) -> float:
    """The larger of both directions."""
    return max(float(np.maximum(a - math.exp(value) * b, 0).sum()) for a, b in ((p, q), (q, p)))


def check_one_number(h: Callable[[int, int, int], int] = honest_rows) -> None:
    """One number and one use: the exact law of the sum of the honest shares, moved by the sensitivity, never exceeds
    delta at the epsilon that is charged; with one row less it does."""
    roster, colluding, missing, shift, delta = 7, 1, 1, 40, 1e-3
    z = 1.1
    charged = PrivacyCost(law="gaussian", sizes=(1,), delta=delta, cells=math.floor(z * shift))
    claimed = charged.epsilon(1, z)
    assert (
        claimed < epsilon(dp_event.GaussianDpEvent(z), 1, delta) + 0.4
    )  # the slack of so few cells
    plain = epsilon(dp_event.GaussianDpEvent(z), 1, delta)
    rows = h(roster, colluding, missing)
    share = math.isqrt(math.ceil((z * shift) ** 2 / rows) - 1) + 1
    # what the server has in the worst case, whatever is counted on
    honest = roster - colluding - missing
    for least, holds in ((honest, True), (honest - 2, False)):
        total = convolved(masses(share, 400), least)
        moved = np.zeros(len(total) + shift)
        moved[shift:] = total
        still = np.append(total, np.zeros(shift))
        exact = hockey_stick(moved, still, plain if not holds else claimed)
        assert (exact <= delta) == holds


def test_epsilon_holds_for_the_exact_law_of_a_sum() -> None:
    check_one_number()


def test_epsilon_is_that_of_the_library_and_the_slack() -> None:
    one = calibrated()
    library = library_accountant().compose(dp_event.GaussianDpEvent(one.noise.multiplier), 5)
    assert one.epsilon_at(5) == pytest.approx(library.get_epsilon(1e-5), rel=2e-3)
    assert one.epsilon_at(5) <= 4.0
    # of a model of a million numbers the slack shows: N / (12 V) and thrice, for what may stand beside it
    large = calibrated(plan={"dimension": 10**6}, steps=50)
    numbers = 3 * 10**6 * 50
    exact = epsilon(dp_event.GaussianDpEvent(large.noise.multiplier), 50, 1e-5)
    assert exact + numbers / (12 * large.noise.cells**2) <= large.epsilon_at(50) <= 4.0
    assert large.epsilon_at(50) == pytest.approx(4.0, abs=1e-4)


@pytest.mark.parametrize(
    ("budget", "trusted", "secure"), [(1, 29.9, 35.7), (4, 8.44, 10.1), (8, 4.62, 5.52)]
)
def test_noise_of_twenty_hospitals(budget: float, trusted: float, secure: float) -> None:
    """Fifty rounds at delta 1e-6; two may be missing and four collude, so fourteen rows count."""
    one = calibrated(steps=50, privacy={"epsilon": budget, "delta": 1e-6})
    assert one.noise.multiplier == pytest.approx(trusted, rel=5e-3)
    assert one.noise.multiplier * one.noise.excess(20) == pytest.approx(secure, rel=5e-3)


def test_participations_are_charged_in_full() -> None:
    """A client of cohorts in turn takes part in five of twenty rounds."""
    one = calibrated(CyclicCohorts(cohort=20), 80, 20)
    assert one.uses == 5
    assert one.noise.multiplier == calibrated(steps=5).noise.multiplier
    fixed = calibrated(FixedCohort(cohort=20, max_uses=5), 80, 20)
    assert fixed.uses == 5
    assert fixed.noise.sensitivity == 2 * CLIP
    assert one.noise.sensitivity == CLIP
    assert [one.relation, fixed.relation] == ["zero_out", "replace"]


@pytest.mark.parametrize("schedule", [FullParticipation(), CyclicCohorts(cohort=20)])
def test_a_client_without_data_that_sends_a_row_replaces_one(schedule: Any) -> None:
    """The server knows the roster, so that neighbours differ by the data of a client alone: its row by 2 C."""
    one = calibrated(schedule, plan={"without_data": True})
    assert one.relation == one.header()["relation"] == "replace"
    assert one.noise.sensitivity == 2 * CLIP
    assert calibrated(schedule).relation == "zero_out"


def test_a_multiplier_and_a_budget_end_the_participations() -> None:
    one = calibrated(steps=50, privacy={"noise_multiplier": 8.44, "epsilon": 2.0, "delta": 1e-6})
    assert 5 < one.uses < 50
    assert one.epsilon_at(one.uses) <= 2.0 < one.epsilon_at(one.uses + 1)
    assert one.text(1).startswith("epsilon 0.")
    assert one.text(1).endswith(
        "for one client against the server and up to 4 colluding clients (relation zero_out)"
    )


REFUSED = [
    (
        {"schedule": PoissonSampling(cohort=15)},
        "so sampling amplifies nothing against it; take CyclicCohorts",
    ),
    ({"privacy": {"mechanism": "laplace"}}, "take mechanism='gaussian' and a finite epsilon"),
    ({"privacy": {"epsilon": math.inf}}, "take mechanism='gaussian' and a finite epsilon"),
    ({"privacy": {"bands": 2}}, "leave bands out"),
    ({"privacy": {"clip_norm": QuantileClip(initial=1.0)}}, "takes a number as clip_norm"),
    ({"plan": {"form": "symmetric"}}, "'update' is of products"),
    ({"plan": {"rows": RowNoise(1.0)}}, "'update' is of products, has noise of its own"),
    ({"plan": {"allocation": (1.5, 0.5, 1.0, 1.0, 1.0)}}, "or an allocation"),
    ({"clients": 10}, "takes rosters of 11 clients or more"),
    ({"missing": 10**6}, "takes rosters of more than 2,000,004 clients"),
    ({"schedule": CyclicCohorts(cohort=10), "clients": 100}, "cohorts have 10"),
]


@pytest.mark.parametrize(("options", "match"), REFUSED, ids=[match for _, match in REFUSED])
def test_what_a_secure_sum_does_not_support(options: dict[str, Any], match: str) -> None:
    with pytest.raises((PrivacyError, ConfigError), match=match):
        calibrated(**options)


def test_a_method_with_two_releases_is_refused() -> None:
    privacy = replace(PRIVACY, aggregation=SOME)
    with pytest.raises(PrivacyError, match="one release in a round, not update, control"):
        calibrate_secure_sum(
            privacy, (PLAN, replace(PLAN, name="control")), FullParticipation().bind(20), 5
        )


def test_a_third_of_a_cohort_may_collude_if_nothing_is_said() -> None:
    for cohort, colluding in ((3, 1), (20, 7), (21, 7), (100, 34)):
        privacy = replace(PRIVACY, aggregation=SecureAggregation())
        one = calibrate_secure_sum(privacy, (PLAN,), FullParticipation().bind(cohort), 5)
        assert one.noise.colluding == colluding


@pytest.mark.parametrize("options", [{"colluding": -1}, {"missing": 1.5}, {"bits": 16}])
def test_settings_out_of_range(options: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match="SecureAggregation"):
        replace(SOME, **options)


# A share


def paid(share: LocalRandomizer, client: int = 3, step: int = 0) -> Receipt:
    return Receipt(step, 0, torch.tensor([client]))


def row_of(seed: int = 0, size: int = 50, scale: float = 1.0) -> torch.Tensor:
    return torch.randn(1, size, generator=torch.Generator().manual_seed(seed)) * scale


def check_words() -> None:
    """A share is the clipped row, truncated by fractions, and the client's own words of noise."""
    one = calibrated()
    share = LocalRandomizer(one.release, SeededSource(5))
    for scale in (0.01, 1.0, 100.0):
        row = row_of(scale=scale).double()
        limit = Fraction(CLIP) * (1 - Fraction(1, 2**20))
        factor = min(1.0, float(limit) / float(row.norm()))
        for client in (3, 4):
            found = share(row, torch.tensor([client]), paid(share, client, 2), 15)
            drawn = discrete_gaussian(
                SeededSource(5).words(f"noise/update/share/{client}", 2),
                50,
                one.noise.deviation(15),
            )
            for word, value, own in zip(
                found.tolist(), row[0].tolist(), drawn.tolist(), strict=True
            ):
                cells = math.trunc(Fraction(value * factor) / Fraction(one.noise.width))
                assert (word - cells - own + 1) % 2**32 in (0, 1, 2)  # but for a cell of rounding
    lengths = [share.cells(row_of(seed, scale=scale)) for seed in range(5) for scale in (0.1, 10.0)]
    for cells in lengths:
        assert (
            sum(cell**2 for cell in cells.tolist())
            <= (Fraction(CLIP) / Fraction(one.noise.width)) ** 2
        )


def test_a_share_is_the_row_in_cells_and_noise() -> None:
    check_words()


@pytest.mark.parametrize("bits", [32, 64])
def test_words_of_sums_open_to_the_sum_with_its_noise(bits: int) -> None:
    one = calibrated(bits=bits, plan={"dimension": 20_000})
    share = LocalRandomizer(one.release, SeededSource(1))
    total = np.zeros(20_000, dtype=f"<u{bits // 8}")
    exact = np.zeros(20_000, dtype=np.int64)
    for client in range(18):  # two of the roster are missing
        row = row_of(client, 20_000)
        total += share(row, torch.tensor([client]), paid(share, client), 20)
        exact += share.cells(row)
    opened = total.view(f"<i{bits // 8}").astype(np.int64)
    units = (opened - exact) / (one.noise.deviation(20) * math.sqrt(18))
    assert stats.kstest(units, stats.norm.cdf).pvalue > ALPHA
    value = one.noise.opened(opened)
    assert np.allclose(
        value, exact * one.noise.width, atol=8 * one.noise.multiplier * CLIP * one.noise.excess(20)
    )
    # the noise of fourteen of them is what is charged
    assert (
        14 * one.noise.deviation(20) ** 2 * one.noise.width**2 >= (one.noise.multiplier * CLIP) ** 2
    )


def test_a_row_that_is_not_finite_counts_as_zero() -> None:
    share = LocalRandomizer(calibrated().release, SeededSource(1))
    row = row_of()
    row[0, 3] = math.nan
    assert not share.cells(row).any()


def test_shares_that_are_refused() -> None:
    share = LocalRandomizer(calibrated().release, SecureSource())
    client = torch.tensor([3])
    receipt = paid(share)
    with pytest.raises(PrivacyError, match="takes float rows of shape"):
        share(row_of(size=49), client, receipt, 20)
    with pytest.raises(PrivacyError, match="the row of one client, not of 2"):
        share(row_of().repeat(2, 1), torch.tensor([3, 4]), receipt, 20)
    with pytest.raises(PrivacyError, match="A roster of 10 clients is not one"):
        share(row_of(), client, receipt, 10)
    with pytest.raises(PrivacyError, match="client 4, who was not drawn"):
        share(row_of(), torch.tensor([4]), receipt, 20)
    share(row_of(), client, receipt, 20)
    with pytest.raises(PrivacyError, match="happened already in step 0"):
        share(row_of(), client, receipt, 20)


# The account


def account(path: Path, one: SecureCalibration | None = None, source: Any = None) -> ShareAccount:
    return ShareAccount(path, one or calibrated(), "north", 3, "settings", source or SecureSource())


def charges(path: Path) -> list[dict[str, Any]]:
    return [
        line for line in map(json.loads, path.read_text().splitlines()) if line["kind"] == "charge"
    ]


def check_charged_first(path: Path) -> None:
    """The charge is on the disk when the noise is drawn, and stays if drawing it fails."""
    one = calibrated()

    class Watching(SecureSource):
        def words(self, purpose: str, step: int) -> Any:
            seen.append(len(charges(path)))
            raise OSError("no entropy")

    seen: list[int] = []
    own = account(path, one)
    share = LocalRandomizer(one.release, Watching())
    for attempt in (1, 2):
        with pytest.raises(OSError, match="no entropy"), own.charged(4, 20) as receipt:
            share(row_of(), torch.tensor([3]), receipt, 20)
        assert seen[-1] == attempt + 1  # with the line of the rounds before
        assert own.used == attempt
    assert [(line["first"], line["end"]) for line in charges(path)] == [(0, 4), (4, 5), (4, 5)]
    assert charges(path)[0]["cohorts"] == [[]] * 4


def test_a_charge_is_on_the_disk_before_the_noise_is_drawn(tmp_path: Path) -> None:
    check_charged_first(tmp_path / "ledger.jsonl")


def check_exhausted(path: Path) -> None:
    own = account(path)
    for step in (0, 1, 1, 0, 3):  # two of them second attempts
        with own.charged(step, 20) as receipt:
            assert receipt.step == step
    before = path.read_bytes()
    with pytest.raises(
        BudgetExhausted, match=r"north has taken part in the 5 secure sums .* no run gets more"
    ):
        own.charged(4, 20).__enter__()
    assert path.read_bytes() == before
    assert account(path).used == 5


def test_no_server_gets_more_shares_than_were_planned(tmp_path: Path) -> None:
    check_exhausted(tmp_path / "ledger.jsonl")


@pytest.mark.parametrize(
    "changes", [{"colluding": 3}, {"missing": 1}, {"bits": 64}, {"privacy": {"epsilon": 5.0}}, {"steps": 6},
                {"privacy": {"clip_norm": 1.0}}, {"clients": 25}], ids=str,
)  # fmt: skip
def test_an_account_is_of_one_setting(changes: dict[str, Any], tmp_path: Path) -> None:
    path = tmp_path / "ledger.jsonl"
    with account(path).charged(0, 20):
        pass
    with pytest.raises(ResumeError, match="was written with"):
        account(path, calibrated(**changes)).charged(1, 20).__enter__()


def test_a_simulated_share_is_charged_once(tmp_path: Path) -> None:
    own = account(tmp_path / "ledger.jsonl", source=SeededSource(3))
    for _ in range(9):
        with own.charged(0, 20):
            pass
    assert own.used == 1


def test_a_simulated_round_that_has_passed_without_its_client_is_not_free(tmp_path: Path) -> None:
    own = account(tmp_path / "ledger.jsonl", source=SeededSource(3))
    with own.charged(2, 20):
        pass
    for step in (0, 1):
        with pytest.raises(ResumeError, match=f"Round {step + 1} has passed without north"):
            own.charged(step, 20).__enter__()
    with own.charged(2, 20):
        pass
    assert own.used == 1


def test_a_roster_that_is_refused_costs_nothing(tmp_path: Path) -> None:
    own = account(tmp_path / "ledger.jsonl")
    with pytest.raises(PrivacyError, match="A roster of 21 clients is not one"):
        own.charged(0, 21).__enter__()
    assert own.used == 0


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs processes that are forked")
@pytest.mark.parametrize("moment", ["charged", "drawn", "made"])
def test_a_client_that_is_killed_has_paid_for_one_share(moment: str, tmp_path: Path) -> None:
    """kill -9 after the charge, while noise is drawn, and once the row is made: a process after it finds the charge, and
    no share without one."""
    own = account(tmp_path / "ledger.jsonl")

    class Killed(SecureSource):
        def words(self, purpose: str, step: int) -> Any:
            if moment == "drawn":
                os.kill(os.getpid(), signal.SIGKILL)
            return super().words(purpose, step)

    for times in range(1, 6):
        child = os.fork()
        if child == 0:
            try:
                with own.charged(2, 20) as receipt:
                    if moment == "charged":
                        os.kill(os.getpid(), signal.SIGKILL)
                    LocalRandomizer(calibrated().release, Killed())(
                        row_of(), torch.tensor([3]), receipt, 20
                    )
                    os.kill(os.getpid(), signal.SIGKILL)
            finally:
                os._exit(1)
        _, status = os.waitpid(child, 0)
        assert os.WTERMSIG(status) == signal.SIGKILL
        assert own.used == times
    with pytest.raises(BudgetExhausted):
        own.charged(2, 20).__enter__()


def test_secure_shares_are_new_in_every_attempt() -> None:
    one = calibrated(plan={"dimension": 2000})
    share = LocalRandomizer(one.release, SecureSource())
    row = row_of(size=2000)
    drawn = [share(row, torch.tensor([3]), paid(share, step=0), 20) for _ in range(2)]
    # of 2,000 numbers with a deviation of millions of cells hardly any are equal
    assert (drawn[0] == drawn[1]).sum() < 5
    assert one.noise.deviation(20) > 10**6


def check_sum_of_the_protocol(tmp_path: Path) -> None:
    """Shares behind masks: the server opens the sum of the rows that came, and each client is charged once."""
    pytest.importorskip("cryptography", reason="secure aggregation needs the extra secure")
    from tests.secure.parties import parties

    one = calibrated(clients=12)
    group = parties(12, 4, 2, length=50)
    share = LocalRandomizer(one.release, SeededSource(2))
    accounts = {}
    for place, name in enumerate(group.members):
        accounts[name] = ShareAccount(tmp_path / name, one, name, place, "", SecureSource())

    def row(name: str, boxes: bytes) -> bytes:
        place = int(name[1:])

        def contribute(roster: int) -> np.ndarray:
            with accounts[name].charged(0, roster) as receipt:
                return share(row_of(place), torch.tensor([place]), receipt, roster)

        return group.members[name].row(boxes, contribute)

    group.row = row  # type: ignore[method-assign]
    opened = group.run({"c2": "shares", "c5": "row"})
    expected = 0
    for place in range(12):
        if place not in (2, 5):
            words = SeededSource(2).words(f"noise/update/share/{place}", 0)
            expected = (
                expected
                + share.cells(row_of(place))
                + discrete_gaussian(words, 50, one.noise.deviation(12))
            )
    assert opened.tolist() == expected.tolist()
    # in one process, without masks: the same bits
    came = torch.tensor([place for place in range(12) if place not in (2, 5)])
    rows = torch.cat([row_of(int(place)) for place in came])
    value = SecureSum(one.release, SeededSource(2))(rows, came, Receipt(0, 0, torch.arange(12)))
    assert value.tolist() == (one.noise.opened(opened) / 12).tolist()
    order = torch.randperm(10, generator=torch.Generator().manual_seed(0))
    again = SecureSum(one.release, SeededSource(2))(
        rows[order], came[order], Receipt(0, 0, torch.arange(12))
    )
    assert torch.equal(again, value)
    # and of a sum to which rows were added as they were made
    assert one.release.clip is not None
    total = RowTotal(50, one.release.clip, one.noise.width)
    total.add(came, rows)
    receipt = Receipt(0, 0, torch.arange(12))
    assert torch.equal(SecureSum(one.release, SeededSource(2))(total, came, receipt), value)
    # who was lost before its row had nothing to pay for
    assert [own.used for own in accounts.values()] == [
        0 if place in (2, 5) else 1 for place in range(12)
    ]


def test_shares_behind_masks_open_to_the_same_sum(tmp_path: Path) -> None:
    check_sum_of_the_protocol(tmp_path)


def test_sums_in_one_process_that_are_refused() -> None:
    one = calibrated(clients=12)
    everybody = torch.arange(12)
    rows = torch.zeros(12, 50)
    receipt = Receipt(0, 0, everybody)
    total = SecureSum(one.release, SeededSource(2))
    with pytest.raises(PrivacyError, match="got a sum with another clip or grid"):
        total(RowTotal(50, Clip(CLIP), 0.5), everybody, receipt)
    with pytest.raises(PrivacyError, match="one row from each client"):
        total(rows[:11], everybody, receipt)
    with pytest.raises(PrivacyError, match="A roster of 10 clients is not one"):
        total(rows[:10], everybody[:10], Receipt(0, 0, everybody[:10]))
    with pytest.raises(
        SecureSumError,
        match="9 of 12 clients have a row in release 'update', and the secure sum takes 10",
    ):
        total(rows[:9], everybody[:9], receipt)
    with pytest.raises(PrivacyError, match="happened already"):
        total(rows, everybody, receipt)


# Broken noise and accounts


def check_hospitals() -> None:
    test_noise_of_twenty_hospitals(4, 8.44, 10.1)


def check_library() -> None:
    test_epsilon_is_that_of_the_library_and_the_slack()


def check_fixed() -> None:
    test_participations_are_charged_in_full()


MUTANTS: dict[str, tuple[Any, Callable[..., None]]] = {
    "noise of one row too many": (edit(DistributedGaussian._deviation, "ratio**2 / rows)", "ratio**2 / (rows + 1))"), check_shares),
    "noise of all clients": (edit(DistributedGaussian._deviation, "honest_rows(roster, self.colluding, self.missing)", "roster"), check_shares),
    "a deviation rounded down": (edit(DistributedGaussian._deviation, "math.isqrt(square - 1) + 1", "math.isqrt(square - 1)"), check_shares),
    "cells rounded up": (edit(DistributedGaussian.cells.func, "math.floor(ratio)", "math.floor(ratio) + 1"), check_shares),  # type: ignore[attr-defined]
    "no noise": (edit(DistributedGaussian.words, "(cells + noise).astype", "(cells).astype"), check_words),
    "noise of 16 bits": (edit(DistributedGaussian.words, "(cells + noise)", "(cells + noise.astype('i2'))"), check_words),
    "one noise for all clients": (edit(share_words, "/{client}", ""), check_words),
    "a row that is not clipped": (edit(LocalRandomizer.cells, "*bounds_of(clip)", "*bounds_of(None)"), check_words),
    "a share without a receipt": (edit(LocalRandomizer.__call__, "receipt.spend(self.name, clients)", "receipt._spent[self.name] = clients"), test_shares_that_are_refused),
    "no charge": (edit(ShareAccount.charged.__wrapped__, "ledger.charge(step, step + 1, [[0]])", "pass"), check_charged_first),  # type: ignore[attr-defined]
    "a charge of nobody": (edit(ShareAccount.charged.__wrapped__, "[[0]]", "[[]]"), check_exhausted),  # type: ignore[attr-defined]
    "a cap that is not kept": (edit(ShareAccount.charged.__wrapped__, "used >= self._calibration.uses", "used > self._calibration.uses"), check_exhausted),  # type: ignore[attr-defined]
    "charged after the row": (edit(ShareAccount.charged.__wrapped__, "            ledger.charge(step, step + 1, [[0]])\n            yield Receipt(step, used, torch.tensor([self._position]))", "            yield Receipt(step, used, torch.tensor([self._position]))\n            ledger.charge(step, step + 1, [[0]])"), check_charged_first),  # type: ignore[attr-defined]
    "no slack": (edit(_calibrated, "shares.cells >= demand.cost.cells", "True"), check_library),
    "sampling that amplifies": (edit(PrivacyCost.event, "if self.sampled < 1:", "event = dp_event.PoissonSampledDpEvent(0.5, event)\n        if self.sampled < 1:"), check_hospitals),
    "one noise in all rounds": (edit(share_words, "{client}\", step)", "{client}\", 0)"), check_words),
    "a sensitivity of one clip": (edit(_shares, "sensitivity=release.sensitivity", "sensitivity=release.bound"), check_fixed),
}  # fmt: skip


@pytest.mark.parametrize("name", MUTANTS)
def test_broken_shares_are_found(
    name: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    mutant, check = MUTANTS[name]
    mutant(monkeypatch)
    forget_multipliers(monkeypatch)
    arguments = (
        [tmp_path / "ledger.jsonl"] if check in (check_charged_first, check_exhausted) else []
    )
    with pytest.raises((AssertionError, pytest.fail.Exception)):
        check(*arguments)


def test_a_row_less_than_is_counted_on_is_found() -> None:
    """With noise for all rows of the roster the sum of the honest ones has too little."""
    with pytest.raises(AssertionError):
        check_one_number(lambda roster, colluding, missing: roster + 2)


def test_the_module_names_its_least_share() -> None:
    assert shares.LEAST_CELLS == 2**16
