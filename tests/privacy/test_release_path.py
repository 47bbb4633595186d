"""The production release path passes the checks, and every broken version of it is caught by them."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from fedmtl.privacy import BoundSampler, clip, forms, samplers, sources

from . import checks


def test_nothing_is_refuted() -> None:
    for seed in range(5):
        assert checks.audit(seed) == []


def test_secure_noise_has_the_same_law() -> None:
    noise = checks.released_noise(source="secure")
    assert checks.noise_law(noise) == []
    assert checks.freshness(noise) == []


_normal = sources.SeededSource.normal
_clipped_sum = clip.clipped_sum
_draw = samplers.BoundPoisson.draw


def _scaled(factor: float):
    return lambda self, purpose, step, size: factor * _normal(self, purpose, step, size)


def _reused(self, purpose: str, step: int, size: int) -> np.ndarray:
    return _normal(self, purpose, 0, size)


def _repeated_within(self, purpose: str, step: int, size: int) -> np.ndarray:
    return np.resize(_normal(self, purpose, step, (size + 1) // 2), size)


def _first_tensor_only(self, purpose: str, step: int, size: int) -> np.ndarray:
    noise = _normal(self, purpose, step, size)
    noise[checks.TENSORS[0] :] = 0
    return noise


def _laplace(self, purpose: str, step: int, size: int) -> np.ndarray:
    return np.random.default_rng(step).laplace(scale=2**-0.5, size=size)


def _no_clip(rows, bound):
    return _clipped_sum(rows, None)


def _per_layer(rows, bound):
    half = rows.shape[1] // 2
    return torch.cat([_clipped_sum(rows[:, :half], bound), _clipped_sum(rows[:, half:], bound)])


def _nan_through(rows, bound):
    wide = rows.double()
    norms = wide.norm(dim=1, keepdim=True)
    return (
        (wide * torch.clamp(bound.bound / norms, max=1.0)).nansum(0)
        if not len(rows)
        else (wide * torch.where(norms > bound.bound, bound.bound / norms, torch.ones_like(norms))).sum(0)
    )


def _float32_norm(rows, bound):
    norms = rows.norm(dim=1, keepdim=True)  # overflows for 3e38: the factor becomes 0 / NaN or the row is kept
    factor = torch.where(torch.isinf(norms), torch.ones_like(norms), torch.clamp(bound.bound / norms, max=1.0))
    return (rows * factor).double().nansum(0)


def _realized_denominator(rows, bound):
    return _clipped_sum(rows, bound) * checks.COHORT / max(1, len(rows))


def _finite_denominator(rows, bound):
    return _clipped_sum(rows, bound) * checks.COHORT / max(1, int(torch.isfinite(rows).all(1).sum()))


def _fixed_size(self, step, coins, uses=None):
    return torch.from_numpy(samplers.distinct_ranks(self.n, int(self.cohort), coins))


def _same_every_step(self, step, coins, uses=None):
    return _draw(self, 0, sources.SeededSource(0).coins("cohort", step // 2), uses)


MUTANTS = {
    "noise halved": (sources.SeededSource, "normal", _scaled(0.5)),
    "noise x 0.9": (sources.SeededSource, "normal", _scaled(0.9)),
    "noise doubled": (sources.SeededSource, "normal", _scaled(2.0)),
    "noise reused": (sources.SeededSource, "normal", _reused),
    "noise repeated within a vector": (sources.SeededSource, "normal", _repeated_within),
    "noise on the first tensor only": (sources.SeededSource, "normal", _first_tensor_only),
    "Laplace for Gauss": (sources.SeededSource, "normal", _laplace),
    "clip skipped": (forms, "clipped_sum", _no_clip),
    "clip per layer": (forms, "clipped_sum", _per_layer),
    "NaN pass-through": (forms, "clipped_sum", _nan_through),
    "norm in float32": (forms, "clipped_sum", _float32_norm),
    "denominator of the realized cohort": (forms, "clipped_sum", _realized_denominator),
    "denominator of the finite rows": (forms, "clipped_sum", _finite_denominator),
    "fixed cohort accounted as Poisson": (samplers.BoundPoisson, "draw", _fixed_size),
    "cohort drawn for two steps": (samplers.BoundPoisson, "draw", _same_every_step),
}


@pytest.mark.parametrize("name", MUTANTS)
def test_mutant_is_caught(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(*MUTANTS[name])
    assert checks.audit(), name


def test_no_op_mutant_passes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sources.SeededSource, "normal", _scaled(1.0))
    monkeypatch.setattr(forms, "clipped_sum", lambda rows, bound: _clipped_sum(rows, bound))
    assert checks.audit() == []


def test_replace_one_is_charged_and_noised_at_twice_the_clip() -> None:
    from fedmtl.privacy import ClientPrivacy, FixedCohort, ReleasePlan, open_channel

    bound: BoundSampler = FixedCohort(cohort=10).bind(50)
    plan = ReleasePlan(name="update", dimension=4000, uses=5, stateful=True)
    door = open_channel(ClientPrivacy(clip_norm=0.5, noise_multiplier=2.0), (plan,), bound, seed=1, steps=5)
    assert door.releases["update"].sensitivity == 1.0
    ranks = door.draw(0)
    door.begin(0, ranks)
    value = door.release("update", torch.zeros(10, 4000), ranks)
    assert float(value.std()) == pytest.approx(2.0 * 2 * 0.5 / 10, rel=0.06)
    # replacing one client moves the sum by at most 2 C
    other = open_channel(ClientPrivacy(clip_norm=0.5, noise_multiplier=2.0), (plan,), bound, seed=1, steps=5)
    other.begin(0, other.draw(0))
    rows = torch.ones(10, 4000)
    replaced = rows.clone()
    replaced[3] *= -1
    door.begin(1, door.draw(1))
    other.begin(1, other.draw(1))
    moved = door.release("update", rows, ranks) - other.release("update", replaced, ranks)
    assert 0.999 < float(moved.norm()) * 10 <= 1.0
