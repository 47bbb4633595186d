"""Broken versions of the releases of owners who act one at a time, each of which the audit must catch."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np
import pytest
import torch
from fedmtl.privacy.owner_records import OwnerRecords, Participation, RecordSums

from fedmtl import PPDMTL, AsyncLearner, Latencies, PeerToPeer, PoissonClocks, Trainer, models
from fedmtl.algorithms.linear.data import DomainBound
from fedmtl.algorithms.p2p import warm_start as p2p_start
from fedmtl.data import FederatedDataset
from fedmtl.graphs import Ring
from fedmtl.privacy import (
    OwnerChannel,
    RecordPrivacy,
    SeededSource,
    WarmStartRelease,
    owner_account,
    owner_channel,
    owner_first,
    owner_opening,
    owner_terms,
)
from fedmtl.privacy.audit import CHECKS, Effort, Finding
from fedmtl.privacy.noise import grid
from fedmtl.schedules import UniformLatency
from fedmtl.trainer.audit.suite import audit_trainer

from .mutants import _accountant_halved, _charged_after

OWNERS, ANSWERS, FEATURES = 5, 8, 6
EFFORT = Effort(noise=4800, cohorts=200, processes=False)
ALGORITHMS = {
    "async_learner": (AsyncLearner(loss="logistic", reg=1e-3), PoissonClocks(per_client=ANSWERS)),
    "p2p": (PeerToPeer(row_norm=1.0, graph=Ring(), mu=0.5), PoissonClocks(per_client=ANSWERS)),
    "pp_dmtl": (PPDMTL(row_norm=1.0, a1=0.05), Latencies(latency=UniformLatency(0.0, 1.0), activations=ANSWERS)),
}


@dataclass(frozen=True, kw_only=True)
class Featured(AsyncLearner):
    """With answers of unequal weight, a first release of zeros, and records that arrive."""

    def channel_options(self, problem, privacy, caps):
        """All of them."""
        counts = problem.data.train.counts.tolist()
        return {
            "allocation": [np.linspace(1.0, 4.0, cap) for cap in caps.tolist()],
            "first": WarmStartRelease(np.array([2.0 / n for n in counts]), 0.3),
            "arrivals": [np.arange(n) % 4 * (2 + k) + 12 * (k == 1) for k, n in enumerate(counts)],
        }

    def step(self, problem, state, block, channel):
        """As ever, after the first release."""
        if int(block.step[0]) == 0:
            first = channel.release_first(lambda owner: torch.zeros(problem.dimension))
            state.public["theta_l"] += first.mean(1)
        return super().step(problem, state, block, channel)


FEATURED = {
    "featured": (Featured(loss="logistic", reg=1e-3), PoissonClocks(per_client=ANSWERS)),
    "subsampled": (
        PPDMTL(row_norm=1.0, a1=0.05, batch_rate=0.4),
        Latencies(latency=UniformLatency(0.0, 1.0), activations=ANSWERS),
    ),
    "warm start": (
        PeerToPeer(row_norm=1.0, graph=Ring(), mu=0.5, warm_start=0.3, warm_lam=0.05, allocation=2.0),
        PoissonClocks(per_client=ANSWERS),
    ),
    "bounded": (
        AsyncLearner(reg=1e-3, theta_max=3.0, bound="domain", domain=DomainBound(x_l1=2.0, y=1.0)),
        PoissonClocks(per_client=ANSWERS),
    ),
}
_PRIVACY = RecordPrivacy(clip_norm=0.5, epsilon=5.0, mechanism="laplace", delta=0.0)
CONFIGURATIONS = {
    "laplace": _PRIVACY,
    "l2_laplace": replace(_PRIVACY, mechanism="l2_laplace"),
    "gaussian": replace(_PRIVACY, mechanism="gaussian", delta=1e-3, accountant="rdp"),
    "secure": replace(_PRIVACY, source="secure"),
    "tight clip": replace(_PRIVACY, clip_norm=0.05),
    "loose clip": replace(_PRIVACY, clip_norm=40.0),
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
    method, schedule = (ALGORITHMS | FEATURED)[algorithm]
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
    events = owner_terms.AccountKind.events
    patch.setattr(
        owner_terms.AccountKind, "events", lambda self, *of: events(replace(self, multiplier=2 * self.multiplier), *of)
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
    return lambda patch, trainer: patch.setattr(RecordSums, "of_factors", lambda *of: make(*of).numpy())


def _finite(scale):
    return torch.where(torch.isfinite(scale), scale, torch.zeros_like(scale))


def _prepared(self, owner):
    x, limits = self._rows_and_limits(owner)
    return torch.from_numpy(x), torch.from_numpy(limits)


def _no_clip(self, owner, scale, kept=None):
    return _finite(scale) @ _prepared(self, owner)[0]


def _nan_through(self, owner, scale, kept):
    x, limit = _prepared(self, owner)
    return torch.clamp(scale, -limit, limit) @ x  # a clamp keeps NaN


def _finite_count(self, owner, scale, kept):
    found = torch.isfinite(scale).sum(1, keepdim=True)
    return torch.from_numpy(_sums(self, owner, scale, kept)) * scale.shape[1] / found.clamp(min=1)


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
    patch.setattr(OwnerChannel, "_within", lambda self, value: True)


# What is one owner's


def _of_the_next_too(self, owner, scale, kept=None):
    """A sum that holds a millionth of the records of another owner."""
    other = _prepared(self, (owner + 1) % OWNERS)[0].sum(0)
    return torch.from_numpy(_sums(self, owner, scale, kept)) + 1e-6 * other


def _by_all_records(self, owner, scale, kept=None):
    """Factors in units of the mean length of the records of all owners."""
    length = torch.cat([_prepared(self, other)[0].norm(dim=1) for other in range(OWNERS)]).mean()
    return torch.from_numpy(_sums(self, owner, scale / length, kept))


def _models_mixed(patch: pytest.MonkeyPatch, trainer: Trainer) -> None:
    kind = type(trainer.algorithm)
    personalize = kind.personalize

    def mixed(self, problem, state, clients):
        models = personalize(self, problem, state, clients)
        return torch.lerp(models, models.roll(1, 0), 1e-3)

    patch.setattr(kind, "personalize", mixed)


# Charges

_charge = owner_account.OwnerAccount.charge


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
    write = owner_account.OwnerAccount._write

    def reserve(self, ledger, first, owners):
        self._write(ledger, first, owners)
        ledger.begin(first, first + owners.size)

    patch.setattr(
        owner_account.OwnerAccount,
        "_write",
        lambda self, ledger, first, owners: write(self, ledger, first, (owners + 1) % OWNERS),
    )
    patch.setattr(owner_account.OwnerAccount, "_reserve", reserve)


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


# Weights, first releases, arrivals, subsamples

_events = owner_terms.AccountKind.events


def _kinds(change: Callable[..., object]) -> _Patch:
    return lambda patch, trainer: patch.setattr(owner_terms.AccountKind, "events", change)


def _weights_uncharged(self, *of):
    """All answers are charged as if they had the same weight."""
    return _events(replace(self, weights=None if self.weights is None else (1.0,) * self.cap), *of)


def _weights_unnoised(patch: pytest.MonkeyPatch, trainer: Trainer) -> None:
    def noise(self, owners, uses):
        return np.where(owners >= 0, self.multipliers[0, owners], 0.0)

    patch.setattr(owner_terms.OwnerTerms, "noise", noise)


def _weights_backwards(patch: pytest.MonkeyPatch, trainer: Trainer) -> None:
    noise, caps = owner_terms.OwnerTerms.noise, ANSWERS
    patch.setattr(owner_terms.OwnerTerms, "noise", lambda self, owners, uses: noise(self, owners, caps - 1 - uses))


def _first_uncharged(patch: pytest.MonkeyPatch, trainer: Trainer) -> None:
    def charge(self):
        self._first_mine = self._first = True

    patch.setattr(owner_account.OwnerAccount, "charge_first", charge)


def _first_unaccounted(patch: pytest.MonkeyPatch, trainer: Trainer) -> None:
    """The answers alone are calibrated to the whole budget."""
    calibrated = owner_terms._calibrated

    def without(privacy, kind, *rest):
        return replace(calibrated(privacy, replace(kind, first=0.0), *rest), first=kind.first)

    patch.setattr(owner_terms, "_calibrated", without)


def _first_twice(patch: pytest.MonkeyPatch, trainer: Trainer) -> None:
    release = OwnerChannel.release_first

    def again(self, vectors):
        self._first_made = False
        return release(self, vectors)

    patch.setattr(OwnerChannel, "release_first", again)


def _first_scaled(factor: float) -> _Patch:
    def scaled(first, *of):
        return _released_first(replace(first, sensitivity=factor * first.sensitivity), *of)

    return lambda patch, trainer: patch.setattr(owner_channel, "released_first", scaled)


_released_first = owner_channel.released_first


def _first_noise_shared(patch: pytest.MonkeyPatch, trainer: Trainer) -> None:
    law = owner_first.first_law

    class Shared:
        def __init__(self, kind):
            self.kind = kind

        def draw_rows(self, source, purpose, step, keys, size):
            return np.repeat(self.kind(1.0).draw_rows(source, purpose, step, keys[:1], size), len(keys), axis=0)

    patch.setattr(owner_first, "first_law", lambda privacy: lambda z: Shared(law(privacy)))


def _answers_without_records(patch: pytest.MonkeyPatch, trainer: Trainer) -> None:
    """An owner without records answers with noise, and is charged."""
    present = Participation.present
    patch.setattr(Participation, "present", lambda self, *at: np.maximum(present(self, *at), 1))


def _final_counts(n: np.ndarray, channel: OwnerChannel) -> np.ndarray:
    return np.where(channel._owners >= 0, channel._sums.counts[channel._owners], n)


def _realized_size(patch: pytest.MonkeyPatch, trainer: Trainer) -> None:
    for name in ("of_factors", "of_rows"):
        sums = getattr(RecordSums, name)

        def realized(self, owner, values, kept, sums=sums):
            size = kept.sum(1, keepdim=True).clamp(min=1)
            return sums(self, owner, values, kept) * (0.4 * kept.shape[1] / size).numpy()

        patch.setattr(RecordSums, name, realized)


def _subsets(change: Callable[..., np.ndarray]) -> _Patch:
    return lambda patch, trainer: patch.setattr(Participation, "_subsample", change)


_subsample = Participation._subsample


def _everybody(self, owner, steps, replicates):
    return np.ones((len(steps), self.counts[owner]), dtype=bool)


def _one_subsample(self, owner, steps, replicates):
    return _subsample(self, owner, np.zeros_like(steps), replicates)


def _fixed_size(self, owner, steps, replicates):
    size = round(0.4 * self.counts[owner])
    rng = np.random.default_rng([self._sources[0].seed, int(steps[0]), owner])
    return rng.permuted(np.tile(np.arange(self.counts[owner]) < size, (len(steps), 1)), axis=1)


def _known_subsample(self, owner, steps, replicates):
    sources, self._sources = self._sources, [SeededSource(7)]
    try:
        return _subsample(self, owner, steps, replicates)
    finally:
        self._sources = sources


def _subsample_in_public(patch: pytest.MonkeyPatch, trainer: Trainer) -> None:
    """The public state says how many records take part in the answers of an owner."""
    kind = type(trainer.algorithm)
    step = kind.step

    def leaky(self, problem, state, block, channel):
        drawn = channel.participation.of(0, np.arange(3), np.zeros(3, dtype=np.int64))
        state = step(self, problem, state, block, channel)
        state.public["drawn"] = drawn.sum()
        return state

    patch.setattr(kind, "step", leaky)


def _charged_at_a_lower_rate(self, *of):
    return _events(replace(self, rate=self.rate / 2), *of)


def _fit_without_clip(patch: pytest.MonkeyPatch, trainer: Trainer) -> None:
    fit = p2p_start.local_minimizer
    patch.setattr(p2p_start, "local_minimizer", lambda loss, x, y, lam, *clip: fit(loss, x, y, lam))


def _start_sensitivity(factor: float) -> _Patch:
    moves = p2p_start.minimizer_sensitivity
    return lambda patch, trainer: patch.setattr(p2p_start, "minimizer_sensitivity", lambda *of: factor * moves(*of))


def _bounded_without_noise(patch: pytest.MonkeyPatch, trainer: Trainer) -> None:
    bounded = OwnerChannel.release_bounded

    def bare(self, means):
        self._noised = lambda value, at: value
        try:
            return bounded(self, means)
        finally:
            del self._noised

    patch.setattr(OwnerChannel, "release_bounded", bare)


def _early_stop_for_free(patch: pytest.MonkeyPatch, trainer: Trainer) -> None:
    patch.setattr(owner_account.OwnerAccount, "forfeit", lambda self: None)


def _plain_float_sum(patch: pytest.MonkeyPatch, trainer: Trainer) -> None:
    patch.setattr(grid, "to_grid", lambda total, noise, width, dither=None: total + noise)


NOISE, FRESH, SENSITIVITY = ("noise law",), ("freshness",), ("sensitivity",)
GRID = ("grid",)
CHARGES, TRANSCRIPT, SAMPLER = ("charges",), ("transcript",), ("sampler",)
INDEPENDENCE = ("independence",)

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
    OwnerMutant("accountant halved", _accountant_halved, CHARGES, "gaussian"),
    OwnerMutant("accountant halved, K-norm", _accountant_halved, CHARGES, "l2_laplace"),
    OwnerMutant("accountant halved, pure", _accountant_halved, CHARGES, "laplace"),
    OwnerMutant("plain float sum in secure mode", _plain_float_sum, GRID, "secure"),
    OwnerMutant("a record in the sums of two owners", _means(_of_the_next_too), INDEPENDENCE),
    OwnerMutant("factors by the mean length of all records", _means(_by_all_records), INDEPENDENCE, "gaussian"),
]

FEATURED_MUTANTS = [
    ("featured", OwnerMutant("weights ignored in the charge", _kinds(_weights_uncharged), (*NOISE, *CHARGES))),
    ("featured", OwnerMutant("weights ignored in the noise", _weights_unnoised, NOISE)),
    ("featured", OwnerMutant("weights in reverse", _weights_backwards, NOISE, "gaussian")),
    ("featured", OwnerMutant("first release without a charge", _first_uncharged, ("charges: activations",))),
    ("featured", OwnerMutant("first release outside the budget", _first_unaccounted, ("charges: budget",))),
    ("featured", OwnerMutant("first release made twice", _first_twice, ("charges: activations",), "gaussian")),
    ("featured", OwnerMutant("first release with half the noise", _first_scaled(0.5), ("noise law",))),
    (
        "featured",
        OwnerMutant(
            "one first noise for all owners", _first_noise_shared, ("freshness: coordinates of first",), "gaussian"
        ),
    ),
    ("featured", OwnerMutant("noise for the final number of records", _divided(_final_counts), NOISE)),
    ("featured", OwnerMutant("answers without records", _answers_without_records, ("charges: activations",))),
    ("subsampled", OwnerMutant("divided by the realized size", _realized_size, SAMPLER, "l2_laplace")),
    ("subsampled", OwnerMutant("all records, charged as a subsample", _subsets(_everybody), SAMPLER)),
    ("subsampled", OwnerMutant("one subsample for all answers", _subsets(_one_subsample), SAMPLER)),
    ("subsampled", OwnerMutant("subsamples of a fixed size", _subsets(_fixed_size), SAMPLER)),
    ("subsampled", OwnerMutant("subsample of a known seed", _subsets(_known_subsample), SAMPLER, "secure")),
    ("subsampled", OwnerMutant("charged at half the rate", _kinds(_charged_at_a_lower_rate), (*NOISE, *CHARGES))),
    (
        "subsampled",
        OwnerMutant("size of the subsamples in the public state", _subsample_in_public, TRANSCRIPT, "l2_laplace"),
    ),
    ("subsampled", OwnerMutant("personal models of two owners mixed", _models_mixed, INDEPENDENCE, "l2_laplace")),
    ("subsampled", OwnerMutant("noise halved", _scaled(0.5), NOISE, "l2_laplace")),
    ("subsampled", OwnerMutant("accountant halved, subsampled", _accountant_halved, CHARGES, "l2_laplace")),
    (
        "warm start",
        OwnerMutant("sensitivity of the warm start x 0.01", _start_sensitivity(0.01), ("sensitivity: first",)),
    ),
    (
        "warm start",
        OwnerMutant("fit of the warm start without clip", _fit_without_clip, ("sensitivity: first",), "tight clip"),
    ),
    ("warm start", OwnerMutant("plain float sum in secure mode", _plain_float_sum, ("grid: first",), "secure")),
    ("bounded", OwnerMutant("bounded means without noise", _bounded_without_noise, NOISE, "loose clip")),
    ("featured", OwnerMutant("early stop not charged", _early_stop_for_free, CHARGES)),
]
