"""Broken versions of the releases of owners who act one at a time, each of which the audit must catch."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np
import pytest
import torch

from fedmtl import PPDMTL, AsyncLearner, Latencies, PeerToPeer, PoissonClocks, Trainer, models
from fedmtl.data import FederatedDataset
from fedmtl.graphs import Ring
from fedmtl.privacy import OwnerChannel, RecordPrivacy, SeededSource, owner_account, owner_opening, owner_terms
from fedmtl.privacy.audit import CHECKS, Effort, Finding
from fedmtl.privacy.owner_records import OwnerRecords, RecordSums
from fedmtl.schedules import UniformLatency
from fedmtl.trainer.audit import audit_trainer

from .mutants import _charged_after

OWNERS, ANSWERS, FEATURES = 5, 8, 6
EFFORT = Effort(noise=4800, processes=False)
ALGORITHMS = {
    "async_learner": (AsyncLearner(loss="logistic", reg=1e-3), PoissonClocks(per_client=ANSWERS)),
    "p2p": (PeerToPeer(graph=Ring(), mu=0.5), PoissonClocks(per_client=ANSWERS)),
    "pp_dmtl": (PPDMTL(a1=0.05), Latencies(latency=UniformLatency(0.0, 1.0), activations=ANSWERS)),
}
_PRIVACY = RecordPrivacy(clip_norm=0.5, epsilon=5.0, mechanism="laplace", delta=0.0)
CONFIGURATIONS = {
    "laplace": _PRIVACY,
    "l2_laplace": replace(_PRIVACY, mechanism="l2_laplace"),
    "gaussian": replace(_PRIVACY, mechanism="gaussian", delta=1e-3, accountant="rdp"),
    "secure": replace(_PRIVACY, source="secure"),
}


def dataset() -> FederatedDataset:
    """Five owners of 4 to 12 records with six features, two classes."""
    generator = torch.Generator().manual_seed(0)
    parts: list[dict[str, tuple[torch.Tensor, torch.Tensor]]] = [{}, {}]
    for owner in range(OWNERS):
        for side, n in ((0, 4 + 2 * owner), (1, 3)):
            x = torch.randn(n, FEATURES, generator=generator, dtype=torch.float64)
            parts[side][f"owner-{owner}"] = (x, (x[:, 0] + 0.3 * x[:, 1] > 0).long())
    return FederatedDataset.from_tensors(parts[0], test=parts[1], classes=2, name="owners")


_DATA = dataset()


def trainer_of(algorithm: str, configuration: str) -> Trainer:
    """A small run."""
    method, schedule = ALGORITHMS[algorithm]
    return Trainer(
        algorithm=method,
        data=_DATA,
        model=models.linear_regression(bias=False),
        loss="binary_cross_entropy",
        schedule=schedule,
        privacy=CONFIGURATIONS[configuration],
        rounds=1000,
        dtype="float64",
        device="cpu",
        progress=False,
        eval_every=7,
    )


def audit(
    trainer: Trainer, seed: int = 0, checks: tuple[str, ...] = CHECKS, *, processes: bool = True
) -> list[Finding]:
    """A small audit."""
    return audit_trainer(trainer, seed=seed, rounds=20, effort=replace(EFFORT, checks=checks, processes=processes))


_Patch = Callable[[pytest.MonkeyPatch, Trainer], None]


@dataclass(frozen=True)
class OwnerMutant:
    """One broken version.

    Attributes:
        name: what is broken.
        apply: patches it in.
        caught_by: beginnings of the names of the checks, one of which must refute it.
        configuration: where it applies.
    """

    name: str
    apply: _Patch
    caught_by: tuple[str, ...]
    configuration: str = "laplace"


def caught(algorithm: str, mutant: OwnerMutant, checks: tuple[str, ...] = CHECKS) -> list[str]:
    """The checks that refute the mutant in its configuration of the algorithm."""
    trainer = trainer_of(algorithm, mutant.configuration)
    with pytest.MonkeyPatch.context() as patch:
        mutant.apply(patch, trainer)
        whole = not mutant.caught_by and mutant.configuration in ("laplace", "secure")
        processes = whole or any("restore" in name for name in mutant.caught_by)
        return [finding.check for finding in audit(trainer, checks=checks, processes=processes) if finding.refuted]


def kinds(mutant: OwnerMutant) -> tuple[str, ...]:
    """The kinds of checks that should catch it."""
    return tuple(dict.fromkeys(name.split(":")[0] for name in mutant.caught_by))


# Noise

_draw, _units, _noised = OwnerChannel._draw, OwnerChannel._units, OwnerChannel._noised


def _scaled(factor: float) -> _Patch:
    return lambda patch, trainer: patch.setattr(OwnerChannel, "_draw", lambda self, *a: factor * _draw(self, *a))


def _drawn(make: Callable[..., np.ndarray]) -> _Patch:
    return lambda patch, trainer: patch.setattr(OwnerChannel, "_units", make)


def _one_for_all(self, purpose, first, shape):
    return np.repeat(_units(self, purpose, 0, (1, *shape[1:])), shape[0], axis=0)


def _by_place(self, purpose, first, shape):
    return _units(self, purpose, 0, shape)


def _two_at_a_time(self, purpose, first, shape):
    long = _units(self, purpose, 0, (first + shape[0], *shape[1:]))
    return long[(first + np.arange(shape[0])) // 2]


def _by_session(self, purpose, first, shape):
    began = getattr(self, "_began", 0)
    self._began = began + shape[0]
    return _units(self, purpose, began, shape)


def _half_of_the_coordinates(self, purpose, first, shape):
    draws = _units(self, purpose, first, shape)
    draws[..., shape[2] // 2 :] = 0
    return draws


def _another_law(law: str) -> _Patch:
    """Independent coordinates of the same mean square: ``law`` in place of the channel's own."""

    def draw(self, purpose, first, shape):
        size = {"laplace": 2.0, "gaussian": 1.0, "l2_laplace": shape[2] + 1.0}[self.mechanism] ** 0.5
        rng = np.random.default_rng([self._sources[0].seed, first])
        return size * (rng.standard_normal(shape) if law == "gaussian" else rng.laplace(scale=2**-0.5, size=shape))

    return _drawn(draw)


def _silent_without_gradients(patch: pytest.MonkeyPatch, trainer: Trainer) -> None:
    patch.setattr(
        OwnerChannel, "_noised", lambda self, value, *a: _noised(self, value, *a) if bool(value.any()) else value
    )


def _divided(change: Callable[[np.ndarray, OwnerChannel], np.ndarray]) -> _Patch:
    """Noise on sums that is divided by something else than the sums are."""

    def draw(self, *address):
        divisors, self._divisors = self._divisors, change(self._divisors, self)
        try:
            return _draw(self, *address)
        finally:
            self._divisors = divisors

    return lambda patch, trainer: patch.setattr(OwnerChannel, "_draw", draw)


def _event_at_clip(patch: pytest.MonkeyPatch, trainer: Trainer) -> None:
    """The same in the account: the event is that of twice the multiplier."""
    events = owner_terms.Kind.events
    patch.setattr(
        owner_terms.Kind, "events", lambda self, *of: events(replace(self, multiplier=2 * self.multiplier), *of)
    )


def _one_stream(patch: pytest.MonkeyPatch, trainer: Trainer) -> None:
    patch.setattr(owner_opening, "SeededSource", lambda seed, replicate=0: SeededSource(seed))


def _any_seed(patch: pytest.MonkeyPatch, trainer: Trainer) -> None:
    patch.setattr(owner_opening, "SeededSource", lambda seed, replicate=0: SeededSource(7, replicate))


class _Known(SeededSource):
    name = "secure"  # type: ignore[assignment]


def _known_seed(patch: pytest.MonkeyPatch, trainer: Trainer) -> None:
    patch.setattr(owner_opening, "SecureSource", lambda: _Known(7))


# Clipping

_sums = RecordSums.of_factors


def _means(make: Callable[..., torch.Tensor]) -> _Patch:
    return lambda patch, trainer: patch.setattr(RecordSums, "of_factors", make)


def _finite(scale):
    return torch.where(torch.isfinite(scale), scale, torch.zeros_like(scale))


def _prepared(self, owner):
    x, limits = self._rows_and_limits(owner)
    return torch.from_numpy(x), limits


def _no_clip(self, owner, scale, kept=None):
    return _finite(scale) @ _prepared(self, owner)[0]


def _nan_through(self, owner, scale, kept):
    x, limit = _prepared(self, owner)
    return torch.clamp(scale, -limit, limit) @ x  # a clamp keeps NaN


def _finite_count(self, owner, scale, kept):
    found = torch.isfinite(scale).sum(1, keepdim=True)
    return _sums(self, owner, scale, kept) * scale.shape[1] / found.clamp(min=1)


def _mean_clipped(self, owner, scale, kept):
    total, bound = _no_clip(self, owner, scale), self._clip.bound * scale.shape[1]
    order = 1 if self._norm == "l1" else 2
    return total * torch.clamp(bound / total.norm(p=order, dim=1, keepdim=True).clamp(min=1e-300), max=1.0)


def _clip_once(self, owner, scale, kept):
    """The factors are clipped at C, not at C over the norm of the row."""
    return torch.clamp(_finite(scale), -self._clip.bound, self._clip.bound) @ _prepared(self, owner)[0]


def _rows(make: Callable[..., OwnerRecords]) -> _Patch:
    return lambda patch, trainer: patch.setattr(OwnerRecords, "of", staticmethod(make))


_of = OwnerRecords.of


def _all_rows(x, norm):
    return OwnerRecords(x, torch.linalg.vector_norm(x, ord=1 if norm == "l1" else 2, dim=1))


def _unchecked(patch: pytest.MonkeyPatch, trainer: Trainer) -> None:
    patch.setattr(OwnerChannel, "release_bounded", lambda self, means: self._finished(self._means(means))[0])


# Charges

_charge, _reserve = owner_account.OwnerAccount.charge, owner_account.OwnerAccount._reserve


def _past_the_cap(patch: pytest.MonkeyPatch, trainer: Trainer) -> None:
    def charge(self, *block):
        caps, self.caps = self.caps, self.caps + 1
        try:
            _charge(self, *block)
        finally:
            self.caps = caps

    patch.setattr(owner_account.OwnerAccount, "charge", charge)


def _charged_when_refused(patch: pytest.MonkeyPatch, trainer: Trainer) -> None:
    def charge(self, first, owners):
        before = self._uses.copy()
        try:
            _charge(self, first, owners)
        except Exception:
            self._uses = np.minimum(before + 1, self.caps)
            raise

    patch.setattr(owner_account.OwnerAccount, "charge", charge)


def _calibrated_for_less(patch: pytest.MonkeyPatch, trainer: Trainer) -> None:
    calibrate = owner_terms.calibrate_multiplier
    patch.setattr(owner_terms, "calibrate_multiplier", lambda *a, uses, **o: calibrate(*a, uses=uses - 1, **o))


def _another_owner(patch: pytest.MonkeyPatch, trainer: Trainer) -> None:
    patch.setattr(
        owner_account.OwnerAccount,
        "_reserve",
        lambda self, ledger, first, owners: _reserve(self, ledger, first, (owners + 1) % OWNERS),
    )


def _charged_once_a_block(patch: pytest.MonkeyPatch, trainer: Trainer) -> None:
    def charge(self, first, owners):
        before = self._uses.copy()
        _charge(self, first, owners)
        self._uses = before + (self._uses > before)

    patch.setattr(owner_account.OwnerAccount, "charge", charge)


def _begun_again(patch: pytest.MonkeyPatch, trainer: Trainer) -> None:
    def charge(self, first, owners):
        if first < self._next:
            return
        _charge(self, first, owners)

    patch.setattr(owner_account.OwnerAccount, "charge", charge)


# The algorithm


def _data_dependent_step(patch: pytest.MonkeyPatch, trainer: Trainer) -> None:
    kind = type(trainer.algorithm)
    step = kind.step

    def leaky(self, problem, state, event, channel):
        before = {name: value.clone() for name, value in state.public.items()}
        state = step(self, problem, state, event, channel)
        size = float(problem.data.train.x.abs().mean())
        for name, value in before.items():
            state.public[name].copy_(value + size * (state.public[name] - value))
        return state

    patch.setattr(kind, "step", leaky)


def _raw_start(patch: pytest.MonkeyPatch, trainer: Trainer) -> None:
    kind = type(trainer.algorithm)
    init = kind.init

    def raw(self, problem, replicates=1):
        state = init(self, problem, replicates)
        next(iter(state.public.values())).add_(problem.data.train.x.double().mean())
        return state

    patch.setattr(kind, "init", raw)


NOISE, FRESH, SENSITIVITY = ("noise law",), ("freshness",), ("sensitivity",)
CHARGES, TRANSCRIPT = ("charges",), ("transcript",)

NO_OP = [OwnerMutant(f"no-op: {name}", _scaled(1.0), (), name) for name in CONFIGURATIONS]

MUTANTS = [
    OwnerMutant("noise halved", _scaled(0.5), NOISE),
    OwnerMutant("noise x 0.9", _scaled(0.9), NOISE, "gaussian"),
    OwnerMutant("Laplace noise x 0.9", _scaled(0.9), NOISE),
    OwnerMutant("L2-Laplace noise x 0.9", _scaled(0.9), NOISE, "l2_laplace"),
    OwnerMutant("noise doubled", _scaled(2.0), NOISE),
    OwnerMutant("noise left out", _scaled(0.0), NOISE, "gaussian"),
    OwnerMutant("noise on the first coordinates only", _drawn(_half_of_the_coordinates), NOISE),
    OwnerMutant("Laplace for Gauss", _another_law("laplace"), NOISE, "gaussian"),
    OwnerMutant("Gauss for Laplace", _another_law("gaussian"), NOISE),
    OwnerMutant("Gauss for L2-Laplace", _another_law("gaussian"), NOISE, "l2_laplace"),
    OwnerMutant("no noise without gradients", _silent_without_gradients, NOISE),
    OwnerMutant(
        "noise for the largest number of records",
        _divided(lambda n, self: np.full_like(n, self._sums.counts.max())),
        ("noise law: owners",),
    ),
    OwnerMutant("replace-one charged at C: noise", _divided(lambda n, self: 2 * n), NOISE),
    OwnerMutant("replace-one charged at C: event", _event_at_clip, (*NOISE, *CHARGES)),
    OwnerMutant("noise reused across activations", _drawn(_one_for_all), FRESH),
    OwnerMutant("noise of the place in a block", _drawn(_by_place), FRESH),
    OwnerMutant("noise of two activations", _drawn(_two_at_a_time), FRESH),
    OwnerMutant("noise addressed by session", _drawn(_by_session), ("freshness: after a restore",)),
    OwnerMutant("one noise for all repetitions", _one_stream, ("freshness: repetitions",)),
    OwnerMutant("noise of one seed for all", _any_seed, ("freshness: channels",)),
    OwnerMutant("noise of a known seed in secure mode", _known_seed, FRESH, "secure"),
    OwnerMutant("clip skipped", _means(_no_clip), SENSITIVITY),
    OwnerMutant("factors clipped whatever the rows", _means(_clip_once), SENSITIVITY, "gaussian"),
    OwnerMutant("mean clipped, not the records", _means(_mean_clipped), SENSITIVITY),
    OwnerMutant("NaN pass-through", _means(_nan_through), (*SENSITIVITY, *NOISE)),
    OwnerMutant("rows that are not finite", _rows(_all_rows), SENSITIVITY),
    OwnerMutant("mean over the finite records", _means(_finite_count), SENSITIVITY),
    OwnerMutant("Laplace calibrated with an L2 clip", _rows(lambda x, norm: _of(x, "l2")), SENSITIVITY),
    OwnerMutant("means beyond the bound", _unchecked, ("sensitivity: bounded",)),
    OwnerMutant("one use past the cap", _past_the_cap, ("charges: cap",)),
    OwnerMutant("charged when refused", _charged_when_refused, ("charges: cap",)),
    OwnerMutant("calibrated for one use less", _calibrated_for_less, ("charges: budget",), "gaussian"),
    OwnerMutant("charged to another owner", _another_owner, ("charges: activations",)),
    OwnerMutant("charged once a block", _charged_once_a_block, ("charges: activations",)),
    OwnerMutant("activations begun again", _begun_again, ("charges: activations",)),
    OwnerMutant("charged after the release", _charged_after, ("charges: activations",)),
    OwnerMutant("data-dependent step size", _data_dependent_step, TRANSCRIPT),
    OwnerMutant("raw start", _raw_start, TRANSCRIPT),
]
