"""Broken versions of the production release path, each of which the audit must catch.

Every patch point is in this file. A mutant is applied to a configuration that it applies to; ``caught_by`` names the
checks of which at least one must refute it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np
import pytest
import torch

from fedmtl import Trainer, models
from fedmtl.algorithms import PMTL, FedAvg, FedProx
from fedmtl.local import LocalSGD
from fedmtl.privacy import (
    Channel,
    ClientPrivacy,
    CyclicCohorts,
    FixedCohort,
    FullParticipation,
    GaussianNoise,
    L2Clip,
    L2LaplaceNoise,
    LaplaceNoise,
    PoissonSampling,
    QuantileClip,
    RecordPrivacy,
    SecureSource,
    SeededSource,
    account,
    clip,
    forms,
    opening,
    records,
    release,
    samplers,
)
from fedmtl.privacy.accounting import calibration, composition
from fedmtl.privacy.audit import CHECKS, Effort, Finding
from fedmtl.privacy.noise import grid
from fedmtl.random import keyed_generator
from fedmtl.trainer.audit.suite import audit_trainer
from fedmtl.trainer.stopping import EarlyStopping
from tests.helpers import ragged_classification

CLIENTS, COHORT, STEPS, CLIP = 40, 8, 40, 0.5
EFFORT = Effort(noise=6000, canaries=1500, cohorts=120)
_SOLVER = LocalSGD(lr=0.2, epochs=1, batch_size=8)

ALGORITHMS = {
    "pmtl": PMTL(lam=0.5, local=_SOLVER),
    "pmtl-local": PMTL(lam=0.5, local=_SOLVER, delta="local"),
    "fedavg": FedAvg(local=_SOLVER),
    "fedprox": FedProx(local=_SOLVER),
}
_CALIBRATED = ClientPrivacy(clip_norm=CLIP, epsilon=8.0, delta=1e-4)
CONFIGURATIONS = {
    "poisson": (PoissonSampling(cohort=COHORT), _CALIBRATED),
    "fixed": (FixedCohort(cohort=COHORT), _CALIBRATED),
    "full": (FullParticipation(), _CALIBRATED),
    "secure": (PoissonSampling(cohort=COHORT), replace(_CALIBRATED, source="secure")),
    "in turn": (CyclicCohorts(cohort=COHORT), _CALIBRATED),
    "laplace": (PoissonSampling(cohort=COHORT), replace(_CALIBRATED, mechanism="laplace")),
    "l2_laplace": (PoissonSampling(cohort=COHORT), replace(_CALIBRATED, mechanism="l2_laplace")),
    "adaptive": (
        PoissonSampling(cohort=COHORT),
        replace(_CALIBRATED, clip_norm=QuantileClip(CLIP, count_noise=3.0)),
    ),
}
_RECORDS = RecordPrivacy(clip_norm=CLIP, epsilon=6.0, delta=1e-3)
CONFIGURATIONS |= {
    "records": (FullParticipation(), _RECORDS),
    "records, secure": (FullParticipation(), replace(_RECORDS, source="secure")),
}


def trainer_of(algorithm: str, configuration: str) -> Trainer:
    """A small run of an algorithm: 40 clients of 3 to 12 examples, 147 parameters in four tensors."""
    schedule, privacy = CONFIGURATIONS[configuration]
    return Trainer(
        algorithm=ALGORITHMS[algorithm],
        data=ragged_classification(CLIENTS, largest=12),
        model=models.mlp(hidden=16),
        schedule=schedule,
        privacy=privacy,
        rounds=10 if isinstance(privacy, RecordPrivacy) else STEPS,
        device="cpu",
        progress=False,
    )


def audit(trainer: Trainer, seed: int = 0, checks: tuple[str, ...] = CHECKS) -> list[Finding]:
    """A small audit."""
    return audit_trainer(trainer, seed=seed, rounds=3, effort=replace(EFFORT, checks=checks))


@dataclass(frozen=True)
class Mutant:
    """One broken version.

    Attributes:
        name: what is broken.
        apply: patches it in.
        caught_by: kinds of checks, one of which must refute it.
        configuration: where it applies.
    """

    name: str
    apply: Callable[[pytest.MonkeyPatch, Trainer], None]
    caught_by: tuple[str, ...]
    configuration: str = "poisson"


def caught(algorithm: str, mutant: Mutant, checks: tuple[str, ...] = CHECKS) -> list[str]:
    """The checks that refute the mutant in its configuration of the algorithm."""
    trainer = trainer_of(algorithm, mutant.configuration)
    with pytest.MonkeyPatch.context() as patch:
        mutant.apply(patch, trainer)
        return [finding.check for finding in audit(trainer, checks=checks) if finding.refuted]


# Noise: the one place where a Gaussian release gets it

_normal, _secure_normal = SeededSource.normal, SecureSource.normal
_Noise = Callable[[SeededSource, str, int, int], np.ndarray]


def _noise(make: _Noise) -> Callable[[pytest.MonkeyPatch, Trainer], None]:
    return lambda patch, trainer: patch.setattr(SeededSource, "normal", make)


def _scaled(factor: float) -> Callable[[pytest.MonkeyPatch, Trainer], None]:
    return _noise(lambda self, purpose, step, size: factor * _normal(self, purpose, step, size))


def _reused(self: SeededSource, purpose: str, step: int, size: int) -> np.ndarray:
    return _normal(self, purpose, 0, size)


def _any_seed(self: SeededSource, purpose: str, step: int, size: int) -> np.ndarray:
    return _normal(SeededSource(0), purpose, step, size)


def _repeated_within(self: SeededSource, purpose: str, step: int, size: int) -> np.ndarray:
    return np.resize(_normal(self, purpose, step, (size + 1) // 2), size)


def _first_tensor_only(self: SeededSource, purpose: str, step: int, size: int) -> np.ndarray:
    noise = _normal(self, purpose, step, size)
    noise[80:] = 0
    return noise


def _laplace(self: SeededSource, purpose: str, step: int, size: int) -> np.ndarray:
    return keyed_generator(self.seed, purpose, step).laplace(scale=2**-0.5, size=size)


def _every_rank(self: SeededSource, purpose: str, step: int, size: int) -> np.ndarray:
    return _normal(self, purpose, step, size) + _normal(self, f"{purpose}/rank 1", step, size)


_running = np.random.default_rng(0)  # state that a forked process copies


def _stateful(self: SeededSource, purpose: str, step: int, size: int) -> np.ndarray:
    return _running.standard_normal(size)


def _session(self: SeededSource, purpose: str, step: int, size: int) -> np.ndarray:
    """Addressed by the number of the draw in this process's session, which a resumed run begins anew."""
    _drawn[self.seed] = _drawn.get(self.seed, -1) + 1
    return _normal(self, purpose, _drawn[self.seed], size)


def _constant_length(self: SeededSource, purpose: str, step: int, size: int) -> np.ndarray:
    noise = _normal(self, purpose, step, size)
    return noise * size**0.5 / np.linalg.norm(noise)


def _count_of_the_update(self: SeededSource, purpose: str, step: int, size: int) -> np.ndarray:
    """The noise on the count of unclipped clients is that on the first coordinate of the update."""
    update = purpose.removesuffix("/count")
    return _normal(self, update, step, 147)[:1] if size == 1 else _normal(self, purpose, step, size)


def _silent_count(self: SeededSource, purpose: str, step: int, size: int) -> np.ndarray:
    noise = _normal(self, purpose, step, size)
    return 0.0 * noise if purpose.endswith("/count") else noise


_laplace_draw, _l2_laplace_draw = LaplaceNoise.draw, L2LaplaceNoise.draw


def _laplace_halved(patch: pytest.MonkeyPatch, trainer: Trainer) -> None:
    patch.setattr(LaplaceNoise, "draw", lambda self, *address: 0.5 * _laplace_draw(self, *address))


def _gauss_for_laplace(patch: pytest.MonkeyPatch, trainer: Trainer) -> None:
    patch.setattr(LaplaceNoise, "draw", lambda self, *a: GaussianNoise(2**0.5 * self.multiplier).draw(*a))


def _l2_laplace_scaled(patch: pytest.MonkeyPatch, trainer: Trainer) -> None:
    patch.setattr(L2LaplaceNoise, "draw", lambda self, *address: 0.9 * _l2_laplace_draw(self, *address))


def _laplace_for_l2_laplace(patch: pytest.MonkeyPatch, trainer: Trainer) -> None:
    """Independent coordinates of the same size as those of the vector law."""

    def draw(self, source, purpose, step, size):
        return LaplaceNoise(self.multiplier * ((size + 1) / 2) ** 0.5).draw(source, purpose, step, size)

    patch.setattr(L2LaplaceNoise, "draw", draw)


_drawn: dict[int, int] = {}
_open_channel = opening.open_channel


def _by_session(patch: pytest.MonkeyPatch, trainer: Trainer) -> None:
    from fedmtl.privacy.audit import setup

    def opened(*args, seed, **options):
        _drawn.pop(seed, None)
        return _open_channel(*args, seed=seed, **options)

    patch.setattr(SeededSource, "normal", _session)
    patch.setattr(setup, "open_channel", opened)


# Clipping, weights and the denominator

_clipped_sum, _release = clip.clipped_sum, Channel.release


def _sum(make: Callable) -> Callable[[pytest.MonkeyPatch, Trainer], None]:
    return lambda patch, trainer: patch.setattr(forms, "clipped_sum", make)


def _no_clip(rows, bound):
    return _clipped_sum(rows, None)


def _per_layer(rows, bound):
    half = rows.shape[1] // 2
    return torch.cat([_clipped_sum(rows[:, :half], bound), _clipped_sum(rows[:, half:], bound)])


def _nan_through(rows, bound):
    wide = rows.double()
    norms = wide.norm(dim=1, keepdim=True)
    return (wide * torch.where(norms > bound.bound, bound.bound / norms, torch.ones_like(norms))).sum(0)


def _float32_norm(rows, bound):
    norms = rows.norm(dim=1, keepdim=True)  # overflows for 3e38, and the row is kept
    factor = torch.where(torch.isinf(norms), torch.ones_like(norms), torch.clamp(bound.bound / norms, max=1.0))
    return (rows * factor).double().nansum(0)


def _finite_denominator(rows, bound):
    return _clipped_sum(rows, bound) * COHORT / max(1, int(torch.isfinite(rows).all(1).sum()))


def _l2_clip(rows, bound):
    return _clipped_sum(rows, L2Clip(bound.bound))


def _realized_denominator(patch: pytest.MonkeyPatch, trainer: Trainer) -> None:
    patch.setattr(Channel, "denominator", property(lambda self: float(max(1, self._cohort))))


def _realized_mean(rows, bound):
    return _clipped_sum(rows, bound) * COHORT / max(1, len(rows))


def _weighted(patch: pytest.MonkeyPatch, trainer: Trainer) -> None:
    counts = trainer.data.train.counts.double()
    weights = counts / counts.mean()

    def weighted(self, name, rows, clients):
        value = _release(self, name, rows, clients)
        if self._replay is not None:
            return value
        extra = (weights[clients] - 1) @ self.clip(name, rows).double()
        return value + extra / self.denominator

    patch.setattr(Channel, "release", weighted)


def _silent_when_empty(patch: pytest.MonkeyPatch, trainer: Trainer) -> None:
    def quiet(self, name, rows, clients):
        value = _release(self, name, rows, clients)
        return value if len(rows) else torch.zeros_like(value)

    patch.setattr(Channel, "release", quiet)


# Cohorts

_draw = samplers.BoundPoisson.draw


def _fixed_size(self, step, coins, uses=None):
    return torch.from_numpy(samplers.distinct_ranks(self.n, int(self.cohort), coins))


def _same_for_two_steps(self, step, coins, uses=None):
    return _draw(self, 0, SeededSource(0).coins("cohort", step // 2), uses)


def _favourites(self, step, coins, uses=None):
    ranks = _draw(self, step, coins, uses)
    return torch.unique(torch.where(ranks >= self.n - 2, ranks % 4, ranks))


def _cohort(make: Callable) -> Callable[[pytest.MonkeyPatch, Trainer], None]:
    return lambda patch, trainer: patch.setattr(samplers.BoundPoisson, "draw", make)


def _poisson_law(self, **options):
    return samplers.BoundPoisson(self.n, self.cohort).law(**options)


def _poisson_event(self, event, law):
    return samplers.BoundPoisson(self.n, self.cohort).event(event, law)


def _fixed_charged_as_poisson(patch: pytest.MonkeyPatch, trainer: Trainer) -> None:
    """A fixed cohort whose law and event are those of Poisson sampling."""

    def as_poisson(self):
        return samplers.BoundPoisson(self.n, self.cohort)

    patch.setattr(samplers.BoundFixed, "law", lambda self, **facts: as_poisson(self).law(**facts))
    patch.setattr(samplers.BoundFixed, "event", lambda self, *args: as_poisson(self).event(*args))


def _known_cohort(patch: pytest.MonkeyPatch, trainer: Trainer) -> None:
    patch.setattr(SecureSource, "coins", lambda self, purpose, step: SeededSource(7).coins(purpose, step))


def _known_noise(patch: pytest.MonkeyPatch, trainer: Trainer) -> None:
    patch.setattr(
        SecureSource, "normal", lambda self, purpose, step, size: _normal(SeededSource(7), purpose, step, size)
    )


# Charges


def _turns_charged_as_poisson(patch: pytest.MonkeyPatch, trainer: Trainer) -> None:
    patch.setattr(samplers.BoundCyclic, "law", _poisson_law)
    patch.setattr(samplers.BoundCyclic, "event", _poisson_event)


def _count_for_free(patch: pytest.MonkeyPatch, trainer: Trainer) -> None:
    patch.setattr(release, "split_multiplier", lambda multiplier, count: multiplier)


def _charged_at_clip(patch: pytest.MonkeyPatch, trainer: Trainer) -> None:
    patch.setattr(release.Release, "sensitivity", property(lambda self: self.weight_bound * self.clip.bound))


def _past_the_cap(patch: pytest.MonkeyPatch, trainer: Trainer) -> None:
    largest = account.largest_uses
    patch.setattr(account, "largest_uses", lambda *args, **options: largest(*args, **options) + 1)


def _calibrated_for_less(patch: pytest.MonkeyPatch, trainer: Trainer) -> None:
    calibrate = opening.calibrate_multiplier
    patch.setattr(opening, "calibrate_multiplier", lambda *a, uses, **options: calibrate(*a, uses=uses - 1, **options))


def _charged_after(patch: pytest.MonkeyPatch, trainer: Trainer) -> None:
    """Reservations stay in memory until the ledger closes: a crash would forget them."""
    from fedmtl.privacy.ledger import Ledger

    append = Ledger._append
    held: list = []

    def late(self, line):
        if line["kind"] == "reserve":
            held.append(line)
            return
        if line["kind"] == "close":
            for reserved in held:
                append(self, reserved)
            held.clear()
        append(self, line)

    patch.setattr(Ledger, "_append", late)


def _accountant_halved(patch: pytest.MonkeyPatch, trainer: Trainer) -> None:
    """Every epsilon is half of what it is, wherever one is computed: noise is calibrated to it, and claims state it."""
    whole = composition._epsilon
    patch.setattr(composition, "_epsilon", lambda *of: whole(*of) / 2)
    patch.setattr(calibration, "_calibrated", calibration._calibrated.__wrapped__)  # what is cached is sound


def _stated_at_another_delta(patch: pytest.MonkeyPatch, trainer: Trainer) -> None:
    """Noise and budget are those of the delta that is stated; the epsilon beside it is that of a hundred times it."""

    def other(self, uses):
        return replace(self.cost, delta=100 * self.cost.delta).epsilon(uses)

    patch.setattr(account.Account, "epsilon_at", other)


def _stopped_by_the_loss(patch: pytest.MonkeyPatch, trainer: Trainer) -> None:
    patch.setattr(EarlyStopping, "stops", lambda self, history: history[-1]["loss"] < 0.5)


def _early_stop_for_free(patch: pytest.MonkeyPatch, trainer: Trainer) -> None:
    patch.setattr(account.Account, "forfeit", lambda self, done: None)


# The public grid of secure mode


def _plain_float_sum(patch: pytest.MonkeyPatch, trainer: Trainer) -> None:
    patch.setattr(grid, "to_grid", lambda total, noise, width, dither=None: total + noise)


def _grid_of_the_sum(patch: pytest.MonkeyPatch, trainer: Trainer) -> None:
    """The width follows what is added up, and says how large that is."""
    exact = grid.to_grid

    def follows(total, noise, width, dither=None):
        largest = float(total.abs().max())
        return exact(total, noise, width if largest == 0 else 2.0 ** np.floor(np.log2(largest * 2.0**-24)), dither)

    patch.setattr(grid, "to_grid", follows)


# Gradients of single records

_draw_rows, _segment_sums = GaussianNoise.draw_rows, clip.clipped_segment_sums
_batch, _gradients = records.RecordReleases.batch, records.RecordReleases.release


def _rows_scaled(factor: float) -> Callable[[pytest.MonkeyPatch, Trainer], None]:
    return lambda patch, trainer: patch.setattr(
        GaussianNoise, "draw_rows", lambda self, *address: factor * _draw_rows(self, *address)
    )


def _one_noise_for_all(patch: pytest.MonkeyPatch, trainer: Trainer) -> None:
    patch.setattr(
        GaussianNoise, "draw_rows", lambda self, s, p, step, keys, size: _draw_rows(self, s, p, step, 0 * keys, size)
    )


def _one_noise_for_all_steps(patch: pytest.MonkeyPatch, trainer: Trainer) -> None:
    patch.setattr(
        GaussianNoise, "draw_rows", lambda self, s, p, step, keys, size: _draw_rows(self, s, p, 0, keys, size)
    )


def _segments(make: Callable) -> Callable[[pytest.MonkeyPatch, Trainer], None]:
    return lambda patch, trainer: patch.setattr(records, "clipped_segment_sums", make)


def _clip_of_the_mean(rows, owner, count, bound):
    """Clips the sum of an owner, not each record."""
    total = _segment_sums(rows, owner, count, None)
    norms = total.norm(dim=1, keepdim=True)
    return total * torch.clamp(bound.bound / norms.clamp(min=1e-300), max=1.0)


def _realized_records(patch: pytest.MonkeyPatch, trainer: Trainer) -> None:
    def realized(self, clients, step, chunks):
        chunks = list(chunks)
        value = _gradients(self, clients, step, chunks)
        drawn = torch.bincount(torch.cat([owner for _, owner in chunks]), minlength=len(clients)).double()
        expected = self.owners.probabilities[clients] * self.owners.counts[clients]
        return value * (expected / drawn.clamp(min=1.0))[:, None]

    patch.setattr(records.RecordReleases, "release", realized)


def _shuffled_batches(patch: pytest.MonkeyPatch, trainer: Trainer) -> None:
    """Batches of a fixed size, accounted as Poisson."""

    def fixed(self, clients, step):
        rng = np.random.default_rng([7, self._round, step])
        index = [np.sort(rng.permutation(int(n))[: min(8, int(n))]) for n in self.owners.counts[clients]]
        width = max(map(len, index), default=1)
        out, mask = torch.zeros(len(index), width, dtype=torch.int64), torch.zeros(len(index), width, dtype=torch.bool)
        for row, own in enumerate(index):
            out[row, : len(own)], mask[row, : len(own)] = torch.from_numpy(own), True
        return out, mask

    patch.setattr(records.RecordReleases, "batch", fixed)


def _one_batch_a_round(patch: pytest.MonkeyPatch, trainer: Trainer) -> None:
    patch.setattr(records.RecordReleases, "batch", lambda self, clients, step: _batch(self, clients, 0))


def _local_steps_charged_once(patch: pytest.MonkeyPatch, trainer: Trainer) -> None:
    cost = opening.Cost

    def cheap(delta, events, repeats=(1,), **options):
        return cost(delta, events, (1,) * len(repeats), **options)

    patch.setattr(opening, "Cost", cheap)


def _steps_for_nothing(patch: pytest.MonkeyPatch, trainer: Trainer) -> None:
    def unpaid(self, clients, step):
        self._done[clients] = step + 1

    patch.setattr(records.RecordReleases, "_spend", unpaid)


def _raw_gradients(patch: pytest.MonkeyPatch, trainer: Trainer) -> None:
    """Local training on the records themselves, after the private run."""
    from fedmtl.algorithms.base import Problem

    train = Problem._train_privately

    def raw(self, solver, start, clients, result, *rest):
        first = self.data.train.x[self.data.train.offsets[clients]].double().mean(1, keepdim=True)
        return train(self, solver, start, clients, result, *rest).add_(1e-3 * first)

    patch.setattr(Problem, "_train_privately", raw)


# The algorithm


def _data_dependent_step(patch: pytest.MonkeyPatch, trainer: Trainer) -> None:
    kind = type(trainer.algorithm)
    step = kind.step

    def leaky(self, problem, state, event, door):
        before = {name: value.clone() for name, value in state.public.items()}
        state = step(self, problem, state, event, door)
        size = float(problem.data.train.x.abs().mean())
        for name, value in before.items():
            state.public[name] = value + size * (state.public[name] - value)
        return state

    patch.setattr(kind, "step", leaky)


def _raw_local_start(patch: pytest.MonkeyPatch, trainer: Trainer) -> None:
    kind = type(trainer.algorithm)
    init = kind.init

    def raw(self, problem):
        state = init(self, problem)
        trained = problem.train_locally(self.local, problem.initial, torch.tensor([0]), round=0)[0]
        for name in state.public:
            state.public[name] = trained.clone()
        return state

    patch.setattr(kind, "init", raw)


def _counts_in_public(patch: pytest.MonkeyPatch, trainer: Trainer) -> None:
    kind = type(trainer.algorithm)
    step = kind.step

    def leaky(self, problem, state, event, door):
        state = step(self, problem, state, event, door)
        state.public["weights"] = problem.data.train.counts[event.cohort].double().mean()
        return state

    patch.setattr(kind, "step", leaky)


def _in_public(what: Callable) -> Callable[[pytest.MonkeyPatch, Trainer], None]:
    """The public state gets a tensor of the round."""

    def apply(patch: pytest.MonkeyPatch, trainer: Trainer) -> None:
        kind = type(trainer.algorithm)
        step = kind.step

        def leaky(self, problem, state, event, door):
            state = step(self, problem, state, event, door)
            state.public["round"] = what(event.cohort)
            return state

        patch.setattr(kind, "step", leaky)

    return apply


# What is one client's


def _trained(change: Callable) -> Callable[[pytest.MonkeyPatch, Trainer], None]:
    """Local training whose solver or whose models ``change``."""

    def apply(patch: pytest.MonkeyPatch, trainer: Trainer) -> None:
        from fedmtl.algorithms.base import Problem

        train = Problem.train_locally
        patch.setattr(Problem, "train_locally", lambda self, *of, **named: change(train, self, *of, **named))

    return apply


def _members(cohort: torch.Tensor) -> torch.Tensor:
    return torch.isin(torch.arange(CLIENTS), cohort)


def _subsample_in_public(patch: pytest.MonkeyPatch, trainer: Trainer) -> None:
    """The public state says how many records the first local steps of a round have."""
    kind = type(trainer.algorithm)
    step = kind.step

    def leaky(self, problem, state, event, door):
        drawn = door.records.batch(event.cohort, 0)[1].sum()
        state = step(self, problem, state, event, door)
        state.public["drawn"] = drawn
        return state

    patch.setattr(kind, "step", leaky)


def _clip_from_the_raw_count(patch: pytest.MonkeyPatch, trainer: Trainer) -> None:
    """The noised count is released, and the clip norm of the next step follows the count without noise."""
    adapt = Channel._adapt

    def raw(self, name, rows, step, settings):
        release = self.releases[name]
        adapt(self, name, rows, step, settings)
        share = float((rows.norm(dim=1) <= release.clip.bound).sum()) / self.denominator
        self.releases[name] = release.clipped_at(settings.updated_norm(release.clip.bound, share))

    patch.setattr(Channel, "_adapt", raw)


def _models_mixed(train, problem, *of, **named):
    """Every client's model has a thousandth of that of the client before it."""
    models = train(problem, *of, **named)
    return models.copy_(torch.lerp(models, models.roll(1, 0), 1e-3))


def _step_by_the_largest(train, problem, solver, *of, **named):
    """The step size is that of the longest record of any client."""
    longest = float(problem.data.train.x.norm(dim=1).max())
    return train(problem, replace(solver, lr=solver.lr / longest), *of, **named)


def _in_two_rows(patch: pytest.MonkeyPatch, trainer: Trainer) -> None:
    """A client's update is part of its own row and of the next one."""

    def twice(self, name, rows, clients):
        return _release(self, name, rows + 1e-3 * rows.roll(1, -2), clients)

    patch.setattr(Channel, "release", twice)


NOISE, FRESH, SENSITIVITY, CANARY = ("noise law",), ("freshness",), ("sensitivity",), ("canary",)
SAMPLER, CHARGES, TRANSCRIPT, GRID = ("sampler",), ("charges",), ("transcript",), ("grid",)
INDEPENDENCE = ("independence",)

NO_OP = [
    Mutant("no-op: noise", _scaled(1.0), ()),
    Mutant("no-op: clip", _sum(lambda rows, bound: _clipped_sum(rows, bound)), ()),
    Mutant("no-op: fixed cohort", _scaled(1.0), (), "fixed"),
    Mutant("no-op: full", _scaled(1.0), (), "full"),
    Mutant("no-op: in turn", _scaled(1.0), (), "in turn"),
    Mutant("no-op: Laplace", _scaled(1.0), (), "laplace"),
    Mutant("no-op: L2-Laplace", _scaled(1.0), (), "l2_laplace"),
    Mutant("no-op: adaptive", _scaled(1.0), (), "adaptive"),
    Mutant("no-op: records", _rows_scaled(1.0), (), "records"),
    Mutant("no-op: records, secure", _rows_scaled(1.0), (), "records, secure"),
    Mutant("no-op: secure", lambda patch, trainer: None, (), "secure"),
]

MUTANTS = [
    Mutant("noise halved", _scaled(0.5), (*NOISE, *CANARY)),
    Mutant("noise halved, everybody takes part", _scaled(0.5), (*NOISE, *CANARY), "full"),
    Mutant("noise x 0.9", _scaled(0.9), NOISE),
    Mutant("noise doubled", _scaled(2.0), NOISE),
    Mutant("noise left out", _scaled(0.0), NOISE),
    Mutant("noise on the first tensor only", _noise(_first_tensor_only), NOISE),
    Mutant("noise on every rank", _noise(_every_rank), NOISE),
    Mutant("Laplace for Gauss", _noise(_laplace), NOISE),
    Mutant("noise of constant length", _noise(_constant_length), NOISE),
    Mutant("Laplace noise halved", _laplace_halved, NOISE, "laplace"),
    Mutant("Gauss for Laplace", _gauss_for_laplace, NOISE, "laplace"),
    Mutant("L2-Laplace noise x 0.9", _l2_laplace_scaled, NOISE, "l2_laplace"),
    Mutant("Laplace for L2-Laplace", _laplace_for_l2_laplace, NOISE, "l2_laplace"),
    Mutant("one noise for the update and the count", _noise(_count_of_the_update), ("freshness",), "adaptive"),
    Mutant("no noise on the count of unclipped clients", _noise(_silent_count), NOISE, "adaptive"),
    Mutant("count of unclipped clients for free", _count_for_free, CHARGES, "adaptive"),
    Mutant("no noise for an empty cohort", _silent_when_empty, NOISE),
    Mutant("noise reused", _noise(_reused), FRESH),
    Mutant("noise of one seed for all", _noise(_any_seed), FRESH),
    Mutant("noise repeated within a vector", _noise(_repeated_within), FRESH),
    Mutant("noise addressed by session", _by_session, FRESH),
    Mutant("noise of a known seed in secure mode", _known_noise, FRESH, "secure"),
    Mutant("clip skipped", _sum(_no_clip), SENSITIVITY),
    Mutant("clip per layer", _sum(_per_layer), SENSITIVITY),
    Mutant("Laplace calibrated with an L2 clip", _sum(_l2_clip), SENSITIVITY, "laplace"),
    Mutant("NaN pass-through", _sum(_nan_through), SENSITIVITY),
    Mutant("norm in float32", _sum(_float32_norm), SENSITIVITY),
    Mutant("n_k weighting", _weighted, SENSITIVITY),
    Mutant("data-dependent denominator", _sum(_finite_denominator), SENSITIVITY),
    Mutant("realized-batch denominator", _realized_denominator, (*NOISE, *CHARGES)),
    Mutant("mean over the realized batch", _sum(_realized_mean), SENSITIVITY),
    Mutant("replace-one charged at C", _charged_at_clip, (*NOISE, *CANARY), "fixed"),
    Mutant("fixed cohort drawn for Poisson", _cohort(_fixed_size), SAMPLER),
    Mutant("fixed cohort accounted as Poisson", _fixed_charged_as_poisson, SAMPLER, "fixed"),
    Mutant("turns accounted as Poisson", _turns_charged_as_poisson, SAMPLER, "in turn"),
    Mutant("one cohort for two steps", _cohort(_same_for_two_steps), SAMPLER),
    Mutant("some clients drawn more often", _cohort(_favourites), SAMPLER),
    Mutant("cohort of a known seed in secure mode", _known_cohort, SAMPLER, "secure"),
    Mutant("one use past the cap", _past_the_cap, CHARGES),
    Mutant("calibrated for one use less", _calibrated_for_less, CHARGES, "fixed"),
    Mutant("charged after the release", _charged_after, CHARGES),
    Mutant("gradient noise halved", _rows_scaled(0.5), (*NOISE, *CANARY), "records"),
    Mutant("gradient noise x 0.9", _rows_scaled(0.9), NOISE, "records"),
    Mutant("one gradient noise for all owners", _one_noise_for_all, FRESH, "records"),
    Mutant("one gradient noise for all rounds", _one_noise_for_all_steps, FRESH, "records"),
    Mutant("gradients not clipped", _segments(lambda r, o, k, b: _segment_sums(r, o, k, None)), SENSITIVITY, "records"),
    Mutant("sum of gradients clipped", _segments(_clip_of_the_mean), SENSITIVITY, "records"),
    Mutant("mean over the realized records", _realized_records, (*NOISE, *SENSITIVITY), "records"),
    Mutant("batches of a fixed size accounted as Poisson", _shuffled_batches, SAMPLER, "records"),
    Mutant("one batch for all local steps", _one_batch_a_round, SAMPLER, "records"),
    Mutant("local steps charged once", _local_steps_charged_once, CHARGES, "records"),
    Mutant("local steps without a charge", _steps_for_nothing, CHARGES, "records"),
    Mutant("models trained on raw records", _raw_gradients, TRANSCRIPT, "records"),
    Mutant("data-dependent step size", _data_dependent_step, TRANSCRIPT),
    Mutant("raw local start", _raw_local_start, TRANSCRIPT),
    Mutant("numbers of examples in the public state", _counts_in_public, TRANSCRIPT),
    Mutant("cohort in the public state", _in_public(_members), TRANSCRIPT),
    Mutant("size of the cohort in the public state", _in_public(lambda c: torch.tensor(len(c))), TRANSCRIPT),
    Mutant("size of the subsamples in the public state", _subsample_in_public, TRANSCRIPT, "records"),
    Mutant("clip norm from the raw count", _clip_from_the_raw_count, TRANSCRIPT, "adaptive"),
    Mutant("accountant halved", _accountant_halved, CHARGES),
    Mutant("accountant halved, everybody takes part", _accountant_halved, CHARGES, "full"),
    Mutant("accountant halved, fixed cohort", _accountant_halved, CHARGES, "fixed"),
    Mutant("accountant halved, Laplace", _accountant_halved, CHARGES, "laplace"),
    Mutant("accountant halved, L2-Laplace", _accountant_halved, CHARGES, "l2_laplace"),
    Mutant("accountant halved, records", _accountant_halved, CHARGES, "records"),
    Mutant("epsilon of another delta", _stated_at_another_delta, CHARGES),
    Mutant("early stop by the loss of the clients", _stopped_by_the_loss, CHARGES),
    Mutant("early stop not charged", _early_stop_for_free, CHARGES),
    Mutant("early stop not charged, fixed cohort", _early_stop_for_free, CHARGES, "fixed"),
    Mutant("plain float sum in secure mode", _plain_float_sum, GRID, "secure"),
    Mutant("plain float sum in secure mode, records", _plain_float_sum, GRID, "records, secure"),
    Mutant("grid of the sum in secure mode", _grid_of_the_sum, GRID, "secure"),
    Mutant("personal models of two clients mixed", _trained(_models_mixed), INDEPENDENCE),
    Mutant("a client's update in two rows", _in_two_rows, INDEPENDENCE),
    Mutant("step size of the longest record of any client", _trained(_step_by_the_largest), INDEPENDENCE),
]
