"""Noise that is correlated over rounds: its matrix, what it costs against slow oracles, and runs that have it."""

import gc
import itertools
import os
import shutil
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from scipy import special

from fedmtl import FedAvg
from fedmtl.errors import ConfigError, PrivacyError
from fedmtl.privacy import (
    ClientPrivacy,
    CyclicCohorts,
    FixedCohort,
    FullParticipation,
    GaussianNoise,
    PoissonSampling,
    QuantileClip,
    ReleasePlan,
    RoundChannel,
    open_channel,
    privacy_report,
)
from fedmtl.privacy.noise.banded import Bands, CorrelatedNoise
from fedmtl.privacy.row_noise import RowNoise

from ..small import check_resumed
from ..trainer.settings import SOLVER, trainer

PRIVACY = ClientPrivacy(clip_norm=0.5, noise_multiplier=1.3, delta=1e-5, bands="auto")
PLAN = ReleasePlan(name="update", dimension=4)


def opened(
    privacy: ClientPrivacy = PRIVACY, cohort: int = 2, n: int = 8, seed: int = 3, **options: Any
) -> RoundChannel:
    plan = replace(PLAN, dimension=options.pop("dimension", PLAN.dimension))
    return open_channel(
        privacy, (plan,), CyclicCohorts(cohort).bind(n), seed=seed, steps=12, **options
    )


def released(channel: RoundChannel, steps: range, rows: torch.Tensor | None = None) -> np.ndarray:
    """(T, 4) of clients that send ``rows`` (n, 4), or nothing."""
    found = []
    for step in steps:
        ranks = channel.draw(step)
        channel.begin(step, ranks)
        sent = torch.zeros(len(ranks), 4) if rows is None else rows[ranks]
        found.append(channel.release("update", sent, ranks).numpy())
    return np.stack(found)


def matrix(bands: Bands, steps: int) -> np.ndarray:
    """C of so many rounds."""
    padded = [*bands.coefficients, *[0.0] * steps]
    return np.array(
        [[padded[t - s] if t >= s else 0.0 for s in range(steps)] for t in range(steps)]
    )


# The matrix


@pytest.mark.parametrize("count", [1, 2, 5, 9])
def test_bands_are_the_square_root_of_the_prefix_sums(count: int) -> None:
    bands = Bands.square_root(count)
    series = special.binom(2 * np.arange(count), np.arange(count)) / 4.0 ** np.arange(count)
    assert np.allclose(bands.coefficients, series / np.linalg.norm(series), rtol=1e-12)
    square = matrix(bands, count) @ matrix(
        bands, count
    )  # no round beyond the bands: all ones, but for the scale
    assert np.allclose(square, np.tril(np.ones((count, count))) / np.linalg.norm(series) ** 2)


def drawn(bands: Bands, units: np.ndarray):
    return lambda step: (torch.from_numpy(units[step] / bands.coefficients[0]), None)


@pytest.mark.parametrize("count", [2, 5])
def test_noise_on_a_grid_stays_there(count: int) -> None:
    """C w is the independent noise, but for roundings to the grid."""
    bands, steps, width = Bands.square_root(count), 30, 2.0**-30
    units = np.rint(np.random.default_rng(0).standard_normal((steps, 3)) / width) * width
    noise = CorrelatedNoise(
        bands, lambda step: (torch.from_numpy(units[step]), width), repeatable=False
    )
    found = np.stack([noise.at(step)[0].numpy() for step in range(steps)])
    assert np.array_equal(np.rint(found / width) * width, found)
    assert (
        np.abs(matrix(bands, steps) @ found / bands.coefficients[0] - units).max()
        <= width / 2 + 1e-15
    )


@pytest.mark.parametrize("count", [1, 3, 6])
def test_noise_is_the_inverse_of_the_matrix_times_independent_noise(count: int) -> None:
    bands, steps = Bands.square_root(count), 30
    noise = CorrelatedNoise(bands, drawn(bands, np.eye(steps)), repeatable=True)
    inverse = np.stack([noise.at(step)[0] for step in range(steps)])
    assert np.allclose(inverse, np.linalg.inv(matrix(bands, steps)), atol=1e-12)
    lengths = np.linalg.norm(np.linalg.inv(matrix(bands, 64 * count)), axis=1)
    assert bands.gain == pytest.approx(lengths[-1], rel=1e-4)
    assert (np.diff(lengths) >= -1e-12).all()


def test_noise_is_that_of_a_run_from_the_first_step_or_begins_anew(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    bands, rng = Bands.square_root(4), np.random.default_rng(0)
    units = rng.standard_normal((20, 3))
    run = CorrelatedNoise(bands, drawn(bands, units), repeatable=True)
    kept = [run.at(step)[0] for step in range(12)]
    later = CorrelatedNoise(bands, drawn(bands, units), repeatable=True)
    assert np.array_equal(later.at(11)[0], kept[11])
    assert np.array_equal(later.at(5)[0], kept[5])
    assert np.array_equal(later.at(6)[0], kept[6])
    session = CorrelatedNoise(bands, drawn(bands, units), repeatable=False)
    assert np.array_equal(session.at(11)[0], units[11] / bands.coefficients[0])
    session.at(12)
    assert np.array_equal(session.at(12)[0], units[12] / bands.coefficients[0])
    monkeypatch.setattr(os, "getpid", lambda: -1)
    assert np.array_equal(
        session.at(13)[0], units[13] / bands.coefficients[0]
    )  # the window stays with the parent
    assert np.array_equal(run.at(12)[0], later.at(12)[0])


def test_what_is_returned_is_not_what_is_kept() -> None:
    bands = Bands.square_root(3)
    noise = CorrelatedNoise(bands, drawn(bands, np.ones((2, 2))), repeatable=False)
    other = CorrelatedNoise(bands, drawn(bands, np.ones((2, 2))), repeatable=False)
    noise.at(0)[0][:] = 1e9
    other.at(0)
    assert np.array_equal(noise.at(1)[0], other.at(1)[0])


# What it costs


def patterns(steps: int, apart: int) -> list[tuple[int, ...]]:
    """Every set of rounds, two of them ``apart`` rounds apart or more."""
    every = itertools.chain.from_iterable(
        itertools.combinations(range(steps), k) for k in range(1, steps + 1)
    )
    return [one for one in every if all(b - a >= apart for a, b in itertools.pairwise(one))]


@pytest.mark.parametrize("count", [2, 3, 4])
def test_the_cost_of_every_pattern_of_participations(count: int) -> None:
    """The distance of neighbours in the covariance of the noise, (y - y')^T Cov^-1 (y - y'), is at most the number of
    participations: all patterns, rows in many directions and all of one; larger where turns are closer."""
    bands, steps, rng = Bands.square_root(count), 9, np.random.default_rng(1)
    inverse = np.linalg.inv(matrix(bands, steps))
    precision = np.linalg.inv(inverse @ inverse.T)
    for pattern in patterns(steps, count):
        for rows in (
            np.ones((len(pattern), 1)),
            *(rng.standard_normal((len(pattern), 3)) for _ in range(3)),
        ):
            moved = np.zeros((steps, rows.shape[1]))
            moved[list(pattern)] = rows / np.linalg.norm(rows, axis=1, keepdims=True)
            for stop in range(1, steps + 1):  # a run that stops early: the marginal covariance
                part = np.linalg.inv((inverse @ inverse.T)[:stop, :stop])
                distance = np.einsum("td,ts,sd", moved[:stop], part, moved[:stop])
                assert distance <= sum(t < stop for t in pattern) + 1e-9
    whole = [p for p in patterns(steps, count) if p[-1] <= steps - count]
    ones = [np.isin(np.arange(steps), one).astype(float) for one in whole]
    for pattern, x in zip(whole, ones, strict=True):
        assert x @ precision @ x == pytest.approx(len(pattern))
    close = np.isin(np.arange(steps), (0, count - 1)).astype(float)
    assert close @ precision @ close > 2.1


@pytest.mark.parametrize(("n", "cohort"), [(8, 2), (9, 2), (11, 3), (10, 10), (7, 5), (100, 7)])
def test_the_separation_of_turns(n: int, cohort: int) -> None:
    sampler = CyclicCohorts(cohort).bind(n)
    rounds = np.stack([np.isin(np.arange(n), sampler.draw(t, None)) for t in range(60)])
    gaps = [np.diff(np.flatnonzero(rounds[:, k])).min() for k in range(n) if rounds[:, k].sum() > 1]
    assert min(gaps, default=sampler.separation) == sampler.separation


# Runs


def test_released_noise_has_the_covariance_of_the_matrix() -> None:
    nothing = torch.zeros(8, 160)
    draws = [released(opened(seed=seed, dimension=160), range(12), nothing).T for seed in range(10)]
    draws = np.concatenate(draws)  # (1600, 12)
    scale = 1.3 * 0.5 / 2
    inverse = np.linalg.inv(matrix(Bands.square_root(4), 12))
    expected = scale**2 * inverse @ inverse.T
    spread = np.sqrt((np.outer(np.diag(expected), np.diag(expected)) + expected**2) / len(draws))
    assert (np.abs(np.cov(draws.T) - expected) < 5 * spread).all()
    independent = 12 * scale**2
    assert draws.sum(1).var() == pytest.approx(np.ones(12) @ expected @ np.ones(12), rel=0.2)
    assert draws.sum(1).var() < 0.45 * independent


def test_the_sum_is_what_clients_sent() -> None:
    rows = torch.randn(8, 4, generator=torch.Generator().manual_seed(0)) * 0.1
    moved = released(opened(), range(8), rows) - released(opened(), range(8))
    for step in range(8):
        assert np.allclose(
            moved[step], rows[[2 * step % 8, 2 * step % 8 + 1]].sum(0) / 2, atol=1e-6
        )


def test_one_band_is_independent_noise() -> None:
    one, two = (released(opened(replace(PRIVACY, bands=bands)), range(12)) for bands in (1, None))
    assert np.array_equal(one, two)


def test_as_many_bands_as_asked_for() -> None:
    assert len(opened().releases["update"].bands) == 4
    assert len(opened(cohort=3, n=8).releases["update"].bands) == 2
    assert len(opened(n=100).releases["update"].bands) == 12  # no more than rounds
    assert len(opened(replace(PRIVACY, bands=3)).releases["update"].bands) == 3
    channel = opened()
    assert privacy_report(channel).mechanism == "gaussian, correlated over 4 rounds"
    assert "4 rounds from one to the next at least" in privacy_report(channel).sampler
    gain = np.linalg.norm(np.linalg.inv(matrix(Bands.square_root(4), 400))[-1])
    assert privacy_report(channel).noise_std == pytest.approx(gain * 1.3 * 0.5 / 2)


def test_a_secure_session_begins_anew(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The first release of a session has nothing of the noise that another session drew before."""
    drawn = np.random.default_rng(0).standard_normal((9, 4))
    units = iter(drawn)
    monkeypatch.setattr(
        GaussianNoise, "whole", lambda self, *of: np.rint(next(units) * self.multiplier * of[-1])
    )
    privacy = replace(PRIVACY, source="secure")
    crashed = opened(privacy, ledger_path=tmp_path / "ledger.jsonl")
    released(crashed, range(6))
    del crashed
    gc.collect()
    again = opened(privacy, ledger_path=tmp_path / "ledger.jsonl", resume=True)
    again.start(4)
    c = Bands.square_root(4).coefficients
    first = drawn[6] / c[0]
    expected = [first, (drawn[7] - c[1] * first) / c[0]]
    assert np.allclose(released(again, range(4, 6)), 1.3 * 0.5 / 2 * np.array(expected), atol=1e-5)


def test_copies_of_a_run_share_no_noise_that_is_correlated_with_what_was_released(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each copy of a folder begins anew: the noise of the run before is in no file, and in no release of a copy."""
    drawn = np.random.default_rng(1).standard_normal((20, 4))
    units = iter(drawn)
    monkeypatch.setattr(
        GaussianNoise, "whole", lambda self, *of: np.rint(next(units) * self.multiplier * of[-1])
    )
    privacy = replace(PRIVACY, source="secure")
    first = opened(privacy, ledger_path=tmp_path / "run/ledger.jsonl")
    released(first, range(4))
    assert first.state() == {}  # what a checkpoint keeps
    first.close()
    shutil.copytree(tmp_path / "run", tmp_path / "copy")
    c = Bands.square_root(4).coefficients
    for place, folder in enumerate(("run", "copy")):
        again = opened(privacy, ledger_path=tmp_path / folder / "ledger.jsonl", resume=True)
        again.start(4)
        values = released(again, range(4, 6))
        own = drawn[4 + 2 * place : 6 + 2 * place]
        expected = [own[0] / c[0], (own[1] - c[1] * own[0] / c[0]) / c[0]]
        assert np.allclose(values, 1.3 * 0.5 / 2 * np.array(expected), atol=1e-5)
        again.close()


@pytest.mark.skipif(not hasattr(os, "fork"), reason="this system has no forks")
def test_a_forked_process_begins_anew() -> None:
    """The child has a copy of the window: what it released with that would share noise with its parent."""
    bands, units = Bands.square_root(4), np.random.default_rng(0).standard_normal((5, 3))
    noise = CorrelatedNoise(bands, drawn(bands, units), repeatable=False)
    for step in range(3):
        noise.at(step)
    child = os.fork()
    if child == 0:  # leaves at once, whatever happens
        fresh = False
        try:
            fresh = bool(np.array_equal(noise.at(3)[0], units[3] / bands.coefficients[0]))
        finally:
            os._exit(0 if fresh else 1)
    _, status = os.waitpid(child, 0)
    assert os.waitstatus_to_exitcode(status) == 0
    assert not np.array_equal(noise.at(3)[0], units[3] / bands.coefficients[0])


@pytest.mark.parametrize(
    ("privacy", "plan", "sampler", "message"),
    [
        (PRIVACY, PLAN, PoissonSampling(2), "Poisson, expected cohort 2"),
        (PRIVACY, PLAN, FixedCohort(2), "CyclicCohorts"),
        (PRIVACY, PLAN, FullParticipation(), "all 8 clients in every step"),
        (PRIVACY, PLAN, CyclicCohorts(5), "Take smaller cohorts"),
        (
            replace(PRIVACY, bands=5),
            PLAN,
            CyclicCohorts(2),
            "is 5, at most .* makes 4. Take fewer bands",
        ),
        (
            PRIVACY,
            replace(PLAN, rows=RowNoise(8.0)),
            CyclicCohorts(2),
            "clients add independent noise",
        ),
    ],
)
def test_what_does_not_keep_turns_apart_is_refused(privacy, plan, sampler, message: str) -> None:
    with pytest.raises(PrivacyError, match=message):
        open_channel(privacy, (plan,), sampler.bind(8), seed=0, steps=12)


@pytest.mark.parametrize("bad", [{"mechanism": "laplace"}, {"clip_norm": QuantileClip(1.0)}])
def test_impossible_settings_are_refused(bad: dict) -> None:
    with pytest.raises(ConfigError, match=r"ClientPrivacy\.bands"):
        ClientPrivacy(**{"clip_norm": 1.0, "epsilon": 1.0, "bands": 2} | bad)


def test_a_run_that_was_interrupted_goes_on_to_the_same_bits(tmp_path: Path) -> None:
    settings = {
        "algorithm": FedAvg(local=SOLVER),
        "schedule": CyclicCohorts(3),
        "privacy": PRIVACY,
        "rounds": 8,
    }
    check_resumed(partial(trainer, **settings), tmp_path, 4)
