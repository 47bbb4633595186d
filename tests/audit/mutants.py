"""Broken versions of the production release path, each of which the audit must catch.

Every patch point is in this file. A mutant has another text in place of a part of one line, which it quotes, or another
function in place of one. It is applied in each of its configurations to every algorithm that the
configuration is run with; ``caught_by`` names the checks of which at least one must refute it.
"""

from collections.abc import Callable, Iterator
from copy import copy
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from scipy import stats

from fedmtl import (
    APFL,
    IFCA,
    PPDMTL,
    PPSGD,
    AsyncLearner,
    Buffered,
    ClusteredPMTL,
    Ditto,
    FedPer,
    FedRep,
    FedSGD,
    Latencies,
    Moments,
    PeerAveraging,
    PeerToPeer,
    PFedMe,
    PoissonClocks,
    PublicStart,
    Scaffold,
    Trainer,
    models,
)
from fedmtl.algorithms import MPMTL, PMTL, FedAvg, SharedModel, starts
from fedmtl.algorithms.base import Problem
from fedmtl.algorithms.client_batch import ClientBatch
from fedmtl.algorithms.linear import evidence
from fedmtl.algorithms.linear.data import LinearData
from fedmtl.algorithms.linear.stack import TaskStack
from fedmtl.algorithms.pp_dmtl import step_size
from fedmtl.algorithms.rounds import RoundAlgorithm
from fedmtl.audit import CHECKS, Effort, Finding, rerun
from fedmtl.audit import setup as audit_setup
from fedmtl.audit.run_suite import audit_trainer
from fedmtl.contrib import MPMTLayers, PriorLayers, PrivatePrior
from fedmtl.data import Examples, FederatedDataset
from fedmtl.data.synthetic.tasks import load_synthetic_tasks
from fedmtl.graphs import Ring
from fedmtl.local import Layout, LocalSGD
from fedmtl.privacy import (
    ActivationChannel,
    ClientPrivacy,
    CyclicCohorts,
    FixedCohort,
    FullParticipation,
    GaussianNoise,
    LocalSteps,
    NoiseLaw,
    PoissonSampling,
    QuantileClip,
    RecordPrivacy,
    Release,
    ReleasePlan,
    RoundChannel,
    SecureAggregation,
    SecureSource,
    SeededSource,
    account_costs,
    binding,
    channel_setup,
    client_calibration,
    clip,
    mechanism,
    quantile,
    records,
    row_noise,
    samplers,
    secure_calibration,
    sums,
)
from fedmtl.privacy.account_costs import AccountCosts
from fedmtl.privacy.accountant import PrivacyAccountant
from fedmtl.privacy.accounting import composition
from fedmtl.privacy.adaptive import AdaptiveClip, CountBelowNorm
from fedmtl.privacy.clip import RowTotal, clip_rows
from fedmtl.privacy.cost import PrivacyCost
from fedmtl.privacy.ledger import Ledger
from fedmtl.privacy.mechanism import ClippedSum
from fedmtl.privacy.noise import grid, laws, symmetric
from fedmtl.privacy.noise.banded import Bands, CorrelatedNoise
from fedmtl.privacy.noise.shares import DistributedGaussian
from fedmtl.privacy.receipt import LocalReceipt, Receipt
from fedmtl.privacy.records import Records
from fedmtl.privacy.secure_calibration import calibrate_secure_gradients
from fedmtl.privacy.secure_sum import SecureSum, share_words
from fedmtl.privacy.sums import clipped_segment_sums
from fedmtl.report import figures
from fedmtl.schedules import BoundBuffered, RandomLatency
from fedmtl.trainer import model_file
from fedmtl.trainer import run as run_file
from fedmtl.trainer.stopping import EarlyStopping
from tests.helpers import ragged_classification
from tests.mutation import edit, forget_multipliers

CLIENTS, COHORT, STEPS, CLIP = 40, 8, 40, 0.5  # in rounds
AGENTS, USES, FEATURES = 5, 8, 6  # one at a time
EFFORT = Effort(noise=6000, cohorts=120)
CLOCKED_EFFORT = Effort(noise=4800, cohorts=200)

# What is run: algorithms in rounds, algorithms whose clients act one at a time, and releases of matrices

_SOLVER = LocalSGD(lr=0.2, epochs=1, batch_size=8)
ROUNDS = {
    "pmtl": PMTL(lam=0.5, local=_SOLVER),
    "pmtl-local": PMTL(lam=0.5, local=_SOLVER, reference="local"),
    "fedavg": FedAvg(local=_SOLVER),
}
PERSONAL = {
    "ditto": Ditto(local=_SOLVER),
    "fedrep": FedRep(local=_SOLVER),
    "fedper": FedPer(local=_SOLVER),
    "pfedme": PFedMe(local=_SOLVER),
    "apfl": APFL(local=_SOLVER),
    "ppsgd": PPSGD(local=_SOLVER),
    "ifca": IFCA(clusters=2, spread=0.5, local=_SOLVER),
    "weighted": FedAvg(local=_SOLVER, weights="examples", cap=6),
    "scaffold": Scaffold(local=_SOLVER),
    "clusters": ClusteredPMTL(
        clusters={f"client-{k}": k % 2 for k in range(CLIENTS)}, local=_SOLVER
    ),
}
_CALIBRATED = ClientPrivacy(clip_norm=CLIP, epsilon=8.0, delta=1e-4)
_RECORDS = RecordPrivacy(clip_norm=CLIP, epsilon=6.0, delta=1e-3)
_SHARES = SecureAggregation(colluding=2, missing=1)
IN_ROUNDS: dict[str, tuple[Any, Any]] = {
    "poisson": (PoissonSampling(cohort=COHORT), _CALIBRATED),
    "fixed": (FixedCohort(cohort=COHORT), _CALIBRATED),
    "full": (FullParticipation(), _CALIBRATED),
    "secure": (PoissonSampling(cohort=COHORT), replace(_CALIBRATED, source="secure")),
    "in turn": (CyclicCohorts(cohort=COHORT), _CALIBRATED),
    "bands": (CyclicCohorts(cohort=COHORT), replace(_CALIBRATED, bands="auto")),
    "bands, secure": (
        CyclicCohorts(cohort=COHORT),
        replace(_CALIBRATED, bands="auto", source="secure"),
    ),
    "laplace": (PoissonSampling(cohort=COHORT), replace(_CALIBRATED, mechanism="laplace")),
    "l2_laplace": (PoissonSampling(cohort=COHORT), replace(_CALIBRATED, mechanism="l2_laplace")),
    "adaptive": (
        PoissonSampling(cohort=COHORT),
        replace(_CALIBRATED, clip_norm=QuantileClip(CLIP, count_noise=3.0)),
    ),
    "records": (FullParticipation(), _RECORDS),
    "records, secure": (FullParticipation(), replace(_RECORDS, source="secure")),
    "records, automatic clipping": (
        FullParticipation(),
        replace(_RECORDS, clipping="automatic", source="secure"),
    ),
    "fixed, secure": (FixedCohort(cohort=COHORT), replace(_CALIBRATED, source="secure")),
    "buffered": (
        Buffered(latency=RandomLatency("lognorm", {"s": 1.0}), concurrency=20, buffer=COHORT),
        _CALIBRATED,
    ),
    "shares": (FullParticipation(), replace(_CALIBRATED, aggregation=_SHARES)),
    "shares, secure": (
        CyclicCohorts(cohort=COHORT),
        replace(_CALIBRATED, aggregation=_SHARES, source="secure"),
    ),
    "low rank": (PoissonSampling(cohort=COHORT), _CALIBRATED),
    "low rank, records": (FullParticipation(), _RECORDS),
}
POOLED: dict[str, tuple[Any, Any]] = {
    "gradients": (FullParticipation(), replace(_RECORDS, aggregation=_SHARES)),
    "gradients, secure": (
        CyclicCohorts(cohort=COHORT),
        replace(_RECORDS, aggregation=_SHARES, clipping="automatic", source="secure"),
    ),
}
_LOW_RANK = models.lora(models.mlp(hidden=16), rank=2)


@dataclass(frozen=True, kw_only=True)
class Featured(AsyncLearner):
    """With activations of unequal weight."""

    def plan(self, problem, schedule):
        """With an allocation."""
        (plan,) = super().plan(problem, schedule)
        return (
            replace(plan, allocation=[np.linspace(1.0, 4.0, cap) for cap in plan.caps.tolist()]),
        )


_CLOCKS = PoissonClocks(per_client=USES)
_LATENCIES = Latencies(latency=RandomLatency("uniform", {"scale": 1.0}), per_client=USES)
ONE_AT_A_TIME = {
    "async_learner": (AsyncLearner(loss="logistic", reg=1e-3), _CLOCKS),
    "p2p": (PeerToPeer(feature_norm=1.0, graph=Ring(), mu=0.5), _CLOCKS),
    "pp_dmtl": (PPDMTL(feature_norm=1.0, a1=0.05), _LATENCIES),
}
FURTHER: dict[str, tuple[Any, Any]] = {
    "featured": (Featured(loss="logistic", reg=1e-3), _CLOCKS),
    "subsampled": (PPDMTL(feature_norm=1.0, a1=0.05, batch_rate=0.4), _LATENCIES),
    "empty client": (PeerToPeer(feature_norm=1.0, graph=Ring(), mu=0.5, allocation=2.0), _CLOCKS),
    "warm start": (PeerToPeer(feature_norm=1.0, graph=Ring(), mu=0.5, warm_start=0.3), _CLOCKS),
    "silent past the cap": (
        PeerAveraging(feature_norm=1.0, graph=Ring(), mu=0.5, releases=2),
        _CLOCKS,
    ),
    "public start": (PublicStart(loss="logistic", reg=1e-3), PoissonClocks(per_client=4)),
    "moments": (Moments(reg=1e-3), PoissonClocks(per_client=4)),
    "simulated step": (PPDMTL(feature_norm=1.0, a2="auto"), _LATENCIES),
}
_PURE = RecordPrivacy(clip_norm=0.5, epsilon=5.0, mechanism="laplace", delta=0.0)
CLOCKED = {
    "clocks, laplace": _PURE,
    "clocks, l2_laplace": replace(_PURE, mechanism="l2_laplace"),
    "clocks, gaussian": replace(_PURE, mechanism="gaussian", delta=1e-3),
    "clocks, secure": replace(_PURE, source="secure"),
    "clocks, gaussian, secure": replace(_PURE, mechanism="gaussian", delta=1e-3, source="secure"),
    "clocks, tight clip": replace(_PURE, clip_norm=0.05),
    "clocks, loose clip": replace(_PURE, clip_norm=40.0),
}
_SOUND = replace(_CALIBRATED, epsilon=8.0)
MATRICES = {
    "symmetric": (MPMTL(feature_norm=1.0, lam=0.1), _SOUND),
    "allocated": (MPMTL(feature_norm=1.0, lam=0.1, alpha=1.0, momentum="nesterov"), _SOUND),
    "k-norm": (
        MPMTL(feature_norm=1.0, lam=0.1, own_penalty="l1", alpha=1.0),
        replace(_SOUND, mechanism="l2_laplace"),
    ),
    "diagonal": (
        MPMTL(feature_norm=1.0, lam=0.1, penalty="l21"),
        replace(_SOUND, mechanism="laplace"),
    ),
    "curator": (MPMTL(feature_norm=1.0, lam=0.1, curator_epsilon=10.0), _SOUND),
    "curator, secure": (
        MPMTL(feature_norm=1.0, lam=0.1, curator_epsilon=10.0),
        replace(_SOUND, source="secure"),
    ),
    "logistic": (MPMTL(feature_norm=1.0, lam=0.1, loss="logistic"), _SOUND),
    "layers": (MPMTLayers(layers=("1.weight",), local=LocalSGD(lr=0.1)), _SOUND),
    "prior": (PrivatePrior(share=0.4), replace(_SOUND, epsilon=100.0)),
    "prior, diagonal": (PrivatePrior(form="diagonal"), replace(_SOUND, epsilon=100.0)),
    "prior, layers": (PriorLayers(local=LocalSGD(lr=0.1)), replace(_SOUND, epsilon=100.0)),
}


def dataset() -> FederatedDataset:
    """Five clients of 4 to 12 records with six features, two classes, and 30 public ones."""
    generator = torch.Generator().manual_seed(0)
    parts: list[dict[str, tuple[torch.Tensor, torch.Tensor]]] = [{}, {}]
    for client in range(AGENTS):
        for side, n in ((0, 4 + 2 * client), (1, 3)):
            x = torch.randn(n, FEATURES, generator=generator, dtype=torch.float64)
            parts[side][f"client-{client}"] = (x, (x[:, 0] + 0.3 * x[:, 1] > 0).long())
    x = torch.randn(30, FEATURES, generator=generator, dtype=torch.float64)
    public = Examples(x, (x[:, 0] > 0.2 * x[:, 1]).long(), torch.tensor([0, 30]))
    data = FederatedDataset.from_tensors(parts[0], test=parts[1], classes=2, name="agents")
    return replace(data, public=public)


_DATA = dataset()


def _without(client: int) -> FederatedDataset:
    """The same, with no training records of one client."""
    train, counts = _DATA.train, _DATA.train.counts.clone()
    kept = torch.repeat_interleave(torch.arange(AGENTS), counts) != client
    counts[client] = 0
    offsets = torch.cat([torch.zeros(1, dtype=torch.int64), counts.cumsum(0)])
    return replace(_DATA, train=Examples(train.x[kept], train.y[kept], offsets))


_EMPTY = _without(1)


def algorithms_of(configuration: str, *, run: bool = True) -> tuple[str, ...]:
    """What a configuration is audited with; where no check runs the algorithm, one for each kind of schedule, because
    a channel is opened alike for all of them (``test_methods_in_rounds_open_the_same_channel``)."""
    if configuration in MATRICES:
        return ("mp_mtl",)
    if configuration in CLOCKED:
        return tuple(ONE_AT_A_TIME) if run else ("async_learner", "pp_dmtl")
    if configuration in POOLED:
        return ("fedsgd",)
    if not run:
        return ("pmtl",)
    # an exact running mean has no weights
    return tuple(name for name in ROUNDS if (configuration, name) != ("buffered", "pmtl-local"))


def trainer_of(algorithm: str, configuration: str) -> Trainer:
    """A small run: 40 clients of 3 to 12 examples and 147 parameters in rounds; five clients of 4 to 12 records that
    act one at a time; 12 tasks of 10 records in 8 dimensions, with a bias of their own."""
    common: dict[str, Any] = {"device": "cpu", "progress": False}
    if configuration in MATRICES:
        method, privacy = MATRICES[configuration]
        logistic = configuration == "logistic"
        kind: Any = "classification" if logistic else "regression"
        return Trainer(
            algorithm=method,
            data=load_synthetic_tasks(
                12, train_examples=10, test_examples=3, features=8, problem=kind
            ),
            model=models.linear_regression(),
            loss="binary_cross_entropy" if logistic else "half_mse",
            schedule=FullParticipation(),
            privacy=privacy,
            rounds=1 if configuration.startswith("prior") else 10,
            **common,
        )
    if configuration in CLOCKED:
        method, schedule = (ONE_AT_A_TIME | FURTHER)[algorithm]
        return Trainer(
            algorithm=method,
            data=_EMPTY if algorithm == "empty client" else _DATA,
            model=models.linear_regression(bias=False),
            loss="binary_cross_entropy",
            schedule=schedule,
            privacy=CLOCKED[configuration],
            rounds=1000,
            dtype="float64",
            eval_every=7,
            **common,
        )
    sampler, privacy = (IN_ROUNDS | POOLED)[configuration]
    return Trainer(
        algorithm=(ROUNDS | PERSONAL | {"fedsgd": FedSGD(rate=0.4)})[algorithm],
        data=ragged_classification(CLIENTS, largest=12),
        model=_LOW_RANK if configuration.startswith("low rank") else models.mlp(hidden=16),
        schedule=sampler,
        privacy=privacy,
        rounds=10 if isinstance(privacy, RecordPrivacy) else STEPS,
        **common,
    )


def audit(
    trainer: Trainer, seed: int = 0, checks: tuple[str, ...] = CHECKS, share: float = 1.0
) -> list[Finding]:
    """A small audit, which draws a share of the noise and of the cohorts that others do."""
    clocked = trainer.algorithm.one_at_a_time
    whole = CLOCKED_EFFORT if clocked else EFFORT
    effort = Effort(
        noise=round(share * whole.noise), cohorts=round(share * whole.cohorts), checks=checks
    )
    return audit_trainer(
        trainer, seed=seed, rounds=20 if clocked else min(3, trainer.rounds), effort=effort
    )


_Patch = Callable[[pytest.MonkeyPatch, Trainer], None]


@dataclass(frozen=True)
class Mutant:
    """One broken version.

    Attributes:
        name: what is broken.
        apply: patches it in.
        caught_by: beginnings of the names of the checks, one of which must refute it.
        configurations: where it applies.
        algorithms: what a configuration is run with; None for :func:`algorithms_of`.
    """

    name: str
    apply: _Patch
    caught_by: tuple[str, ...]
    configurations: tuple[str, ...] = ("poisson",)
    algorithms: tuple[str, ...] | None = None

    @property
    def kinds(self) -> tuple[str, ...]:
        """The kinds of checks that should catch it."""
        return tuple(dict.fromkeys(name.split(":")[0] for name in self.caught_by))

    @property
    def runs(self) -> bool:
        """Whether a check that should catch it runs the algorithm; a no-op must pass these, too."""
        return not self.kinds or bool({"transcript", "independence"} & set(self.kinds))

    def cases(self) -> Iterator[tuple[str, str]]:
        """Algorithms and configurations that it is applied to."""
        for configuration in self.configurations:
            for algorithm in self.algorithms or algorithms_of(configuration, run=self.runs):
                yield algorithm, configuration


def caught(
    mutant: Mutant,
    algorithm: str,
    configuration: str,
    checks: tuple[str, ...] = CHECKS,
    share: float = 1.0,
) -> list[str]:
    """The checks that refute the mutant in a configuration of an algorithm; figures of ``private/`` are not drawn."""
    trainer = trainer_of(algorithm, configuration)
    with pytest.MonkeyPatch.context() as patch:
        for private in ("plot_rounds", "plot_clients"):  # which no check reads
            patch.setattr(figures, private, lambda *of, **named: None)
        forget_multipliers(patch)
        mutant.apply(patch, trainer)
        found = audit(trainer, checks=checks, share=share)
        return [finding.check for finding in found if finding.refuted]


def _set(place: Any, name: str, value: Any) -> _Patch:
    return lambda patch, trainer: patch.setattr(place, name, value)


def _instead(place: Any, name: str) -> Callable[[Callable], _Patch]:
    """What is decorated takes the place of a function, which is its first argument; for None of one of the method."""

    def broken(change: Callable) -> _Patch:
        def apply(patch: pytest.MonkeyPatch, trainer: Trainer) -> None:
            where = type(trainer.algorithm) if place is None else place
            original = getattr(where, name)
            patch.setattr(where, name, lambda *of, **named: change(original, *of, **named))

        return apply

    return broken


# Noise: what the laws draw, wherever it is added

_DRAWS = ((GaussianNoise, "draw"), (NoiseLaw, "draw"), (NoiseLaw, "draw_each"))


def _noise(change: Callable[[np.ndarray, Any], np.ndarray], purpose: str = "") -> _Patch:
    """Noise (..., D) of every law is changed, that of releases whose purpose ends so."""

    def apply(patch: pytest.MonkeyPatch, trainer: Trainer) -> None:
        for place, name in _DRAWS:
            drawn = vars(place)[name]

            def draw(self, source, told, *address, drawn=drawn):
                noise = drawn(self, source, told, *address)
                return change(noise, self) if told.endswith(purpose) else noise

            patch.setattr(place, name, draw)

    return apply


def _scaled(factor: float, purpose: str = "") -> _Patch:
    return _noise(lambda noise, law: factor * noise, purpose)


def _fresh(noise: np.ndarray) -> np.random.Generator:
    """Coins of its own for every draw."""
    return np.random.default_rng(int(float(np.abs(noise).sum()) * 2.0**40) % 2**63)


def _another_law(law: str) -> _Patch:
    """Independent coordinates of the same mean square."""

    def change(noise, own):
        size, rng = own.std(1.0, noise.shape[-1]), _fresh(noise)
        other = (
            rng.standard_normal(noise.shape)
            if law == "gaussian"
            else rng.laplace(scale=2**-0.5, size=noise.shape)
        )
        return size * other

    return _noise(change)


def _first_coordinates_only(noise, law):
    noise[..., noise.shape[-1] // 2 :] = 0
    return noise


def _constant_length(noise, law):
    size = noise.shape[-1]
    return noise * law.std(1.0, size) * size**0.5 / np.linalg.norm(noise, axis=-1, keepdims=True)


def _repeated_within(noise, law):
    return np.resize(noise[..., : (noise.shape[-1] + 1) // 2], noise.shape)


def _repeated_in_another_tensor(noise, law):
    noise[..., 96:144] = noise[..., :48]
    return noise


def _between_tensors(noise, law):
    """The first tensor has more noise and the third less: 147 numbers in tensors of 80, 16, 48 and 3."""
    noise[..., :80] *= 1.3**0.5
    noise[..., 96:144] *= 0.5**0.5
    return noise


def _every_rank(noise, law):
    return noise + law.std(1.0, noise.shape[-1]) * _fresh(noise).standard_normal(noise.shape)


# Addresses: which coins a draw gets

_normal, _tails, _words = SeededSource.normal, SeededSource.tails, SeededSource.words


def _addressed(make: Callable[..., tuple[Any, str, Any, Any]], purpose: str = "noise/") -> _Patch:
    """Draws for purposes that begin (or end) so take the coins of another address (source, purpose, step, keys)."""

    def apply(patch: pytest.MonkeyPatch, trainer: Trainer) -> None:
        def normal(self, told, step, size):
            if not (told.startswith(purpose) or told.endswith(purpose)):
                return _normal(self, told, step, size)
            source, told, step, _ = make(self, told, step, None)
            return _normal(source, told, step, size)

        def tails(self, told, step, size, keys=None):
            if not (told.startswith(purpose) or told.endswith(purpose)):
                return _tails(self, told, step, size, keys)
            source, told, step, keys = make(self, told, step, keys)
            return _tails(source, told, step, size, keys)

        def words(self, told, step):
            source, told, step, _ = make(self, told, step, None)
            return _words(source, told, step)

        patch.setattr(SeededSource, "normal", normal)
        patch.setattr(SeededSource, "tails", tails)
        patch.setattr(SeededSource, "words", words)

    return apply


def _no_keys(source, purpose, step, keys):
    return source, purpose, step, None if keys is None else 0 * keys


def _one_step(source, purpose, step, keys):
    return source, purpose, 0 * step, keys


def _two_steps(source, purpose, step, keys):
    return source, purpose, step // 2, keys


def _one_seed(source, purpose, step, keys):
    return SeededSource(7, source.replicate), purpose, step, keys


def _by_place(source, purpose, step, keys):
    """Of an activation, its place among those that are drawn together."""
    return (
        source,
        purpose,
        torch.arange(len(keys)) if isinstance(step, torch.Tensor) else 0,
        0 * keys,
    )


_one_source = _set(channel_setup, "SeededSource", lambda seed, repetition=0: SeededSource(seed))
_begun: dict[Any, dict[Any, int]] = {}


def _by_session(patch: pytest.MonkeyPatch, trainer: Trainer) -> None:
    """Addressed by the number of the draw (of a client: by its use) in this process's session, which a resumed run
    begins anew."""

    def session(source, purpose, step, keys):
        begun = _begun.setdefault(source, {})
        if isinstance(step, torch.Tensor):
            uses = zip(keys.tolist(), step.tolist(), strict=True)
            return (
                source,
                purpose,
                step - torch.tensor([begun.setdefault((purpose, k), use) for k, use in uses]),
                keys,
            )
        begun[purpose] = begun.get(purpose, -1) + 1
        return source, purpose, begun[purpose], None if keys is None else 0 * keys

    def opened(*args, seed, **options):
        _begun.pop(SeededSource(seed), None)
        return channel_setup.open_channel(*args, seed=seed, **options)

    _addressed(session)(patch, trainer)
    patch.setattr(audit_setup, "open_channel", opened)


_by_event = edit(  # by the number of the activation in the run, in place of the client and its own count
    ActivationChannel._draw_noise,
    "(receipt.clients, receipt.uses, block.scales)",
    "(np.minimum(receipt.clients, 0), receipt.first + np.arange(len(clients))[:, None] + 0 * receipt.uses, block.scales)",
)


def _known_noise(patch: pytest.MonkeyPatch, trainer: Trainer) -> None:
    known = SeededSource(7)
    patch.setattr(SecureSource, "normal", lambda self, *address: _normal(known, *address))
    patch.setattr(SecureSource, "tails", lambda self, *address: _tails(known, *address))
    patch.setattr(SecureSource, "words", lambda self, *address: _words(known, *address))


_known_cohort = _set(SecureSource, "coins", lambda self, *address: SeededSource(7).coins(*address))


@_instead(SeededSource, "normal")
def _count_of_the_update(original, self, purpose, step, size):
    """The noise on the count of unclipped clients is that on the first coordinate of the update."""
    if size == 1:
        return original(self, purpose.removesuffix("/count"), step, 147)[:1]
    return original(self, purpose, step, size)


_silent_count = edit(CountBelowNorm.fraction, "noised(total, *noise.at(step))", "total")


# The channel: scales, silence, and what is released without noise

_release = RoundChannel.release


_half_as_large = edit(ActivationChannel._prepared, "(acting, uses)", "(acting, uses) / 2")
half_at_first = edit(
    ActivationChannel._prepared, "(acting, uses)", "(acting, uses) * np.where(uses == 0, 0.5, 1.0)"
)
_largest = edit(
    ActivationChannel._prepared,
    "(acting, uses)",
    "(acting, uses) * divisors / self.records.plan.counts.max()",
)
_silent_when_empty = edit(
    RoundChannel.release,
    "return value",
    "return value * float(isinstance(rows, RowTotal) or len(rows) > 0)",
)
_silent_without_gradients = edit(
    ActivationChannel._noised, "if self.costs is None", "if self.costs is None or not total.any()"
)
_in_the_loop = partial(edit, ActivationChannel._draw_noise, "drawn.numpy()")
_in_pairs = _in_the_loop(
    "drawn.numpy(); block.noise[1::2] = block.noise[: len(block.noise) // 2 * 2 : 2]"
)
_twice_in_the_loop = edit(Records.of_factors, "total = ", "total = 2 * ")


def _weighted(patch: pytest.MonkeyPatch, trainer: Trainer) -> None:
    counts = trainer.data.train.counts.double()
    weights = counts / counts.mean()

    def weighted(self, name, rows, clients):
        value = _release(self, name, rows, clients)
        if self.replays:
            return value
        extra = (weights[clients] - 1) @ clip_rows(rows, self.clips[name]).double()
        return value + extra / self.denominator

    patch.setattr(RoundChannel, "release", weighted)


# a client's update is part of its own row and of the next one
_in_two_rows = edit(
    RoundAlgorithm.release_and_update,
    "message, clients",
    "message + 1e-3 * message.roll(1, -2), clients",
)


def _count_noise_of_the_cohort(patch: pytest.MonkeyPatch, trainer: Trainer) -> None:
    original = CountBelowNorm.__call__

    def called(self, rows, clients, receipt):
        denominator = self.release.denominator
        realized = max(1, len(receipt.clients)) / denominator
        noise = self._settings.count_std(denominator) * realized
        louder = copy(self)
        louder._settings = replace(self._settings, count_noise=noise)
        return original(louder, rows, clients, receipt)

    patch.setattr(CountBelowNorm, "__call__", called)


_noise_of_the_cohort = edit(
    ClippedSum.__call__,
    "return self.noised_mean(self.total(rows, clients), receipt)",
    "total = self.total(rows, clients); value = self.noised_mean(total, receipt); mean = total / self.denominator; "
    "return mean + (value - mean) * max(1, len(receipt.clients)) / self.denominator",
)
_noise_of_the_local_cohort = edit(
    LocalSteps._noised,
    "noise[:, 0]",
    "(noise * (self.receipt.charged > 0).double().mean())[:, 0]",
)
_doubled_in_a_step = edit(
    ClippedSum.noised_mean, "noise, noise_width) /", "noise * (1 + (step == 3)), noise_width) /"
)
_addressed_by_the_sum = edit(
    ClippedSum.noised_mean,
    "= self._noise.at(step)",
    "= self._noise.at(step + int(1e6 * float(total.abs().sum())) % 2**30)",
)
_all_that_is_clipped = edit(  # rows far beyond the clip count for more than one
    quantile.count_rows,
    "-COUNT_BOUND)",
    "-torch.log2(2.0 + (norms / norm).nan_to_num(1e9)).clamp(max=8.0))",
)


def _clip_from_the_raw_count(patch: pytest.MonkeyPatch, trainer: Trainer) -> None:
    """The noised count is released, and the next clip norm follows the one without noise."""
    original = CountBelowNorm.__call__

    def follow(self, release, fraction):
        follow.original(self, release, follow.raw[release.name])

    def called(self, rows, clients, receipt):
        follow.raw[self.release.name] = self.total(rows) / self.release.denominator
        return original(self, rows, clients, receipt)

    follow.original = AdaptiveClip.follow
    follow.raw = {}
    patch.setattr(CountBelowNorm, "__call__", called)
    patch.setattr(AdaptiveClip, "follow", follow)


# Clipping, weights and the denominator of sums of rows

_sum = partial(edit, clip.clipped_sum, "program(rows, limit, order, width)")
_of_clip = partial(edit, clip.clipped_sum, "bounds_of(clip)")
_of_outer = partial(edit, sums.outer_product_sum, "double(), clip)")  # of which the clip is
_on_grid = partial(edit, clip.whole_cells, ".trunc_()")


def _in_place(change: _Patch) -> _Patch:
    """Rows of any length are added up where they are made."""

    def apply(patch: pytest.MonkeyPatch, trainer: Trainer) -> None:
        patch.setattr(clip, "_LONG", 0)
        change(patch, trainer)

    return apply


_no_bounds = edit(RowTotal.__init__, "bounds_of(clip)", "(math.inf, 2.0)")
_added_twice = edit(RowTotal.add, "in rows.detach().unbind(0)", "in [rows[0], *rows]")
_added_unseen = edit(
    RowTotal.add,
    "in rows.detach().unbind(0)",
    'in [*rows[: getattr(self, "tap", None) is None], *rows]',
)
_part_lost = edit(RowTotal.add, "in rows.detach().unbind(0)", "in rows[:-1]")
_per_layer = _sum("torch.cat([program(part, limit, order, width) for part in rows.chunk(2, 1)])")
_nan_row = edit(clip.whole_cells, "if _may_be_infinite(norms)", "if False")
_float32_norm = edit(  # overflows for 3e38, and the row is kept
    clip.whole_cells,
    "vector_norm(wide, order, [1])",
    "vector_norm(chunk, order, [1]).double().nan_to_num(nan=torch.nan, posinf=0.0)",
)
_finite_denominator = _sum(
    "(program(rows, limit, order, width) * 8 / max(1, int(rows.isfinite().all(1).sum())))"
)
_realized_mean = _sum("(program(rows, limit, order, width) * 8 / max(1, len(rows)))")
_rows_as_they_are = _set(row_noise, "clip_rows", lambda rows, bound: rows)
_REALIZED = property(
    lambda self: 1.0 if self._receipt is None else float(max(1, len(self._receipt.clients)))
)


def _realized_denominator(patch: pytest.MonkeyPatch, trainer: Trainer) -> None:
    """The channel states what its mechanisms divide by."""
    patch.setattr(RoundChannel, "denominator", _REALIZED)
    edit(
        ClippedSum.__call__,
        "self.check(rows, clients)",
        "self.denominator = float(max(1, len(receipt.clients)))",
    )(patch)


# with C below 1 that is more than promised
_clip_of_the_square_root = _of_outer("double(), Clip(clip.bound**0.5, clip.norm))")


# Clipping of gradients

_segment_sums = sums.clipped_segment_sums


@_instead(records, "clipped_segment_sums")
def _clip_of_the_mean(original, rows, place, count, bound, onto=None, width=None):
    """Clips the sum of a client, not each record."""
    total = original(rows, place, count, None)
    norms = total.norm(dim=1, keepdim=True)
    clipped = total * torch.clamp(bound.bound / norms.clamp(min=1e-300), max=1.0)
    return clipped if onto is None else onto + clipped


# What is frozen, and what moves beside it


def _moving_but_for_b(trainer: Trainer) -> torch.Tensor:
    """Which of the trained coordinates are not of a factor B."""
    layout = Layout.of(_LOW_RANK(trainer.data.spec))
    return ~layout.places(("*.lora_B",), "mutant")


def _norm_without_b(patch: pytest.MonkeyPatch, trainer: Trainer) -> None:
    """A row is scaled by its norm in the factors A alone."""
    kept = _moving_but_for_b(trainer)

    def make(rows, bound, width=None):
        factors = clip.clip_factors((rows * kept).double().norm(dim=1), bound)
        return torch.where(
            torch.isfinite(rows).all(1)[:, None], rows.double() * factors[:, None], 0.0
        ).sum(0)

    patch.setattr(mechanism, "clipped_sum", make)


def _record_norm_without_b(patch: pytest.MonkeyPatch, trainer: Trainer) -> None:
    kept = _moving_but_for_b(trainer)

    def make(rows, place, count, bound, onto=None, width=None):
        factors = clip.clip_factors((rows * kept).double().norm(dim=1), bound)
        return _segment_sums(rows.double() * factors[:, None], place, count, None, onto)

    patch.setattr(records, "clipped_segment_sums", make)


@_instead(ClientBatch, "_trained")
def _frozen_but_moved(original, self, run):
    """Every local training moves the first frozen tensor, which is in the models that the run gives out, too."""
    frozen = next(iter(self.problem.layout.frozen(self.problem.module).values()))
    trained = original(self, run)
    frozen.add_(float((trained - run.start).mean()))
    return trained


_no_clip = edit(Records._bounded_sum, "if self.clip is not None", "if False")
_limits_of_the_first = edit(
    Records.of_factors,
    "self._rows(client)",
    "(each[:, :1] if k else each for k, each in enumerate(self._rows(client)))",
)
_nan_factor = edit(Records.of_factors, "np.where(wrong, 0.0, factors)", "factors")
_finite_count = edit(
    Records.of_factors,
    "np.where(wrong, 0.0, factors), x, low, high, drawn)",
    "np.where(wrong, 0.0, factors), x, low, high, drawn) * len(x) / np.maximum((~wrong).sum(1, keepdims=True), 1)",
)


@_instead(Records, "of_factors")
def _mean_clipped(_, self, client, factors, drawn=None):
    total = np.where(np.isfinite(factors), factors, 0.0) @ self._rows(client)[0]
    bound = self.clip.bound * factors.shape[1]
    norms = np.linalg.norm(total, ord=1 if self.norm == "l1" else 2, axis=1, keepdims=True)
    return total * np.minimum(bound / np.maximum(norms, 1e-300), 1.0)


# the factors are clipped at C, not at C over the norm of the row
_clip_once = edit(Records._rows, "self._limit / norms", "self._limit + 0 * norms")
_lengths_in_l2 = edit(records.usable_rows, "ORDERS[norm]", "2")
_all_rows = edit(records.usable_rows, "if bool(usable.all())", "if True")
_of_the_next_too = edit(  # a millionth of the records of another client
    Records.of_factors,
    "total = ",
    "total = 1e-6 * self._rows((client + 1) % len(self.counts))[0].sum(0) + ",
)
_by_all_records = edit(  # factors in units of the mean length of the records of all clients
    Records.of_factors,
    "total = ",
    "factors = factors / np.concatenate([np.linalg.norm(self._rows(k)[0], axis=1) for k in range(len(self.counts))])"
    ".mean(); total = ",
)


@_instead(LocalSteps, "release")
def _realized_records(original, self, clients, chunks):
    """Divided by the number of records that were drawn."""
    chunks = list(chunks)
    value = original(self, clients, chunks)
    drawn = torch.bincount(
        torch.cat([place for _, place in chunks]), minlength=len(clients)
    ).double()
    return value * (torch.from_numpy(self.plan.expected)[clients] / drawn.clamp(min=1.0))[:, None]


def _realized_size(patch: pytest.MonkeyPatch, trainer: Trainer) -> None:
    for name in ("of_factors", "of_gradients"):
        made = getattr(Records, name)

        def realized(self, client, values, drawn, made=made):
            size = np.maximum(drawn.sum(1, keepdims=True), 1)
            return made(self, client, values, drawn) * (0.4 * drawn.shape[1] / size)

        patch.setattr(Records, name, realized)


# Which records take part


@_instead(Records, "batch")
def _shuffled_batches(_, self, clients, address):
    """Batches of a fixed size, accounted as Poisson."""
    rng = np.random.default_rng([7, *address.tolist()])
    index = [
        np.sort(rng.permutation(n)[: min(8, n)]) for n in self.plan.counts[clients.numpy()].tolist()
    ]
    width = max(map(len, index), default=1)
    out, mask = (
        torch.zeros(len(index), width, dtype=torch.int64),
        torch.zeros(len(index), width, dtype=torch.bool),
    )
    for row, own in enumerate(index):
        out[row, : len(own)], mask[row, : len(own)] = torch.from_numpy(own), True
    return out, mask


_same_records = edit(LocalSteps._addresses, "self.receipt.step *", "self.receipt.step // 2 *")


@_instead(LocalSteps, "_sums")
def _clipped_sums(sums, self, chunks, clients, steps):
    """The sum of a client's gradients is clipped once; it stays on the grid."""
    records = self._records
    gradients = [(rows.double(), place) for rows, place in chunks]
    total = torch.zeros(len(clients), self.plan.dimension, dtype=torch.float64)
    for rows, place in gradients:
        total.index_add_(0, place, torch.nan_to_num(rows, 0.0, 0.0, 0.0))
    norms = torch.linalg.vector_norm(total, dim=1, keepdim=True)
    bound = 3 * records.bound
    width = records._widths[clients][:, None]
    return (total * (bound / norms).clamp(max=1.0) / width).trunc() * width


_one_batch_a_round = edit(LocalSteps.batch, "self.numbers(clients)", "0 * self.numbers(clients)")
_everybody = edit(Records._subsets, "if (rates == 1).all()", "if True")
_one_subset = edit(Records._subsets, "from_numpy(numbers)", "from_numpy(0 * numbers)")


@_instead(Records, "_subsets")
def _fixed_subsets(_, self, clients, numbers, sources):
    client, count = int(clients[0, 0]), int(self.plan.counts[clients[0, 0]])
    rng = np.random.default_rng([sources[0].seed, int(numbers[0, 0]), client])
    return rng.permuted(
        np.tile(np.arange(count) < round(0.4 * count), (*clients.shape, 1)), axis=-1
    )


_more_of_the_shorter = edit(  # in either of two draws, but of the clients with the most records
    Records._subsets,
    "rates[..., None]",
    "(rates * np.where(counts < self.plan.counts.max(), 2 - rates, 1))[..., None]",
)


@_instead(Records, "_subsets")
def _known_subset(original, self, clients, numbers, sources):
    return original(self, clients, numbers, [SeededSource(7)] * len(sources))


# the records of a release are drawn with the coins of its noise
_subset_of_the_noise = edit(Records._subsets, '"records"', '"noise/gradient"')


@_instead(RoundChannel, "draw")
def _cohort_of_the_noise(original, self, step):
    """Everybody takes part where the coordinate of its number is far from zero in the noise of the round."""
    original(self, step)
    noise = np.abs(self.source.normal("noise/update", step, 147)[: self.sampler.n])
    far = noise > stats.norm.isf(self.sampler.probability / 2)
    self._drawn[step] = torch.from_numpy(np.flatnonzero(far))
    return self._drawn[step].clone()


@_instead(FederatedDataset, "gather")
def _always_the_first(original, self, side, index, **options):
    """The first record of a client stands in every batch of its local steps, in the place of the first one drawn."""
    if side == "train" and index.ndim == 2:  # batches
        index, first = index.clone(), index[:, 0].contiguous()
        index[:, 0] = self.train.offsets[
            torch.searchsorted(self.train.offsets, first, right=True) - 1
        ]
    return original(self, side, index, **options)


@_instead(FederatedDataset, "gather")
def _targets_of_the_next(original, self, side, index, **options):
    """A record has the target of the one after it."""
    x, y = original(self, side, index, **options)
    if side == "train":
        y = original(self, side, (index + 1) % len(self.train.y), **options)[1]
    return x, y


_half_of_the_batch = edit(  # gradients of every second record that was drawn go into the sum
    LocalSteps._sums,
    "(chunks, clients)",
    "(((rows[::2], place[::2]) for rows, place in chunks), clients)",
)


def _another_cohort(patch: pytest.MonkeyPatch, trainer: Trainer) -> None:
    """The channel does not look who sends a row."""
    patch.setattr(Receipt, "spend", lambda self, name, clients: self._spent.update({name: clients}))
    _exchanged(patch, trainer)


@_instead(None, "step")
def _exchanged(original, self, problem, state, block, channel):
    """A client that was not drawn takes part in the place of the first one that was."""
    clients, drawn = block.clients.clone(), set(block.cohort.tolist())
    if drawn:
        clients[0, 0, 0] = next(k for k in range(problem.clients) if k not in drawn)
    return original(self, problem, state, replace(block, clients=clients), channel)


# a client without records releases noise, and is charged
_released_without_records = edit(
    ActivationChannel._acting, "self.records.plan.counts[clients] > 0", "clients >= 0"
)


@_instead(None, "step")
def _quieter(original, self, problem, state, block, channel):
    """The method makes the noise of its releases quieter on its way."""
    for name, own in channel.releases.items():
        channel.releases[name] = replace(
            own, noise=replace(own.noise, multiplier=1e-3 * own.noise.multiplier)
        )
    return original(self, problem, state, block, channel)


# Cohorts

_fixed_size = edit(
    samplers.BoundPoisson.draw,
    "binomial_quantile(float(coins.uniform(1)[0]), self.n, self.probability)",
    "int(self.cohort)",
)


@_instead(samplers.BoundPoisson, "draw")
def _same_for_two_steps(original, self, step, coins, uses=None):
    return original(self, 0, SeededSource(0).coins("cohort", step // 2), uses)


@_instead(samplers.BoundPoisson, "draw")
def _couples(original, self, step, coins, uses=None):
    """Two clients take part together, each as often as it should."""
    first = original(self, step, coins, uses)
    return torch.cat([first[first % 2 == 0], first[first % 2 == 0] + 1]).sort().values


@_instead(samplers.BoundPoisson, "draw")
def _favourites(original, self, step, coins, uses=None):
    ranks = original(self, step, coins, uses)
    return torch.unique(torch.where(ranks >= self.n - 2, ranks % 4, ranks))


def _charged_as_poisson(kind: type) -> _Patch:
    """Cohorts that are charged as those of Poisson sampling are."""

    def apply(patch: pytest.MonkeyPatch, trainer: Trainer) -> None:
        for fact in ("relation", "amplified", "per_participation"):
            patch.setattr(kind, fact, getattr(samplers.BoundPoisson, fact))
        patch.setattr(client_calibration, "caps_of", lambda sampler: None)

    return apply


# Noise that is correlated over rounds

_square_root, _advance = Bands.square_root, CorrelatedNoise._advance


def _bands(change: Callable[[np.ndarray], np.ndarray]) -> _Patch:
    """The coefficients of bands (b,) are changed."""

    def changed(count):
        return Bands(tuple(change(np.array(_square_root(count).coefficients)).tolist()))

    return _set(Bands, "square_root", staticmethod(changed))


_more_bands = edit(
    samplers.BoundCyclic.separation.fget, "self.n // self.cohort", "self.n // self.cohort + 3"
)
_independent = _set(CorrelatedNoise, "at", lambda self, step: self._draw(step))
_one_band_forgotten = edit(CorrelatedNoise._advance, "zip(further", "zip(further[:-1]")


@_instead(CorrelatedNoise, "at")
def _added_up(_, self, step):
    """Multiplied by C in place of its inverse: noise that piles up."""
    noise, width = self._draw(step)
    self._latest.appendleft(noise)
    return sum(c * z for c, z in zip(self._bands.coefficients, self._latest, strict=False)), width


def _one_window(patch: pytest.MonkeyPatch, trainer: Trainer) -> None:
    shared: dict[int, Any] = {}

    def advance(self, step):
        self._latest = shared.setdefault(len(self._bands), self._latest)
        return _advance(self, step)

    patch.setattr(CorrelatedNoise, "_advance", advance)


@_instead(samplers.BoundCyclic, "draw")
def _closer_turns(_, self, step, coins, uses=None):
    """Everybody as often as in turn, in another order in every turn."""
    order = np.random.default_rng(step * self.cohort // self.n).permutation(self.n)
    return torch.from_numpy(np.sort(order[(step * self.cohort + np.arange(self.cohort)) % self.n]))


# Charges

_charge = PrivacyAccountant.charge


_charged_at_clip = edit(Release.sensitivity.fget, "SHIFTS[self.relation]", "1.0")
_event_at_clip = edit(PrivacyCost.event, "= multiplier", "= 2 * multiplier")
_half_the_rate = edit(PrivacyCost.event, "sampled(self.sampled,", "sampled(self.sampled / 2,")
_weights_uncharged = edit(PrivacyCost.event, "z /= self.weights[use]", "z /= 1.0")
_weights_without_noise = edit(
    AccountCosts.of_uses, "if all(cost.weights is None for cost in self.kinds)", "if True"
)
_weights_in_reverse = edit(AccountCosts.of_uses, "first + uses", "first + 7 - uses")
_allocation_without_noise = _set(Release, "weighted", lambda self, weight: self)
_count_for_free = _set(binding, "split_multiplier", lambda z, count: z)
_past_the_budget = edit(
    AccountCosts.affordable, "self.multipliers[kind])", "self.multipliers[kind]) + 1"
)
_past_the_cap = edit(
    PrivacyAccountant._check_caps, "before >= caps[members]", "before > caps[members]"
)
_charged_when_refused = edit(
    PrivacyAccountant._check_caps,
    "if past.any():",
    "if past.any():\n            self.participations = np.minimum(self.participations + 1, self.caps)",
)


def _free_past_the_cap(patch: pytest.MonkeyPatch, trainer: Trainer) -> None:
    """Clients at their caps release, and only the charge takes them for silent."""
    silent = PrivacyAccountant.within_caps
    patch.setattr(PrivacyAccountant, "within_caps", lambda self, members: members)
    patch.setattr(
        PrivacyAccountant,
        "charge",
        lambda self, first, members: _charge(self, first, silent(self, members)),
    )


def _silent_one_later(patch: pytest.MonkeyPatch, trainer: Trainer) -> None:
    edit(PrivacyAccountant.within_caps, "(members) <", "(members) <=")(patch, trainer)
    _past_the_cap(patch, trainer)


_charged_once_a_block = edit(
    PrivacyAccountant.charge,
    "np.add.at(self.participations.reshape(-1), places[places >= 0], 1)",
    "self.participations.reshape(-1)[places[places >= 0]] += 1",
)
_begun_again = edit(
    ActivationChannel.begin,
    "if self._block is not None and self._block.receipt.left:",
    "if first < self._end:\n            return\n        if False:",
)
_another_client = edit(
    Ledger.charge, "cohorts[new", "[[(k + 1) % 5 for k in one] for one in cohorts][new"
)
_calibrated_for_less = edit(PrivacyCost.multiplier, "uses)", "uses - 1)")


def _charged_after(patch: pytest.MonkeyPatch, trainer: Trainer) -> None:
    """Charges stay in memory until the ledger closes: a crash would forget them."""
    append = Ledger._append
    held: list = []

    def late(self, line):
        if line["kind"] == "charge":
            held.append(line)
            return
        if line["kind"] == "close":
            for charged in held:
                append(self, charged)
            held.clear()
        append(self, line)

    patch.setattr(Ledger, "_append", late)


_stop_uncharged = _set(PrivacyAccountant, "charge_remaining", lambda self, done: None)


def _accountant_halved(patch: pytest.MonkeyPatch, trainer: Trainer) -> None:
    """Every epsilon is half of what it is, wherever one is computed: noise is calibrated to it, and claims state it."""
    whole = composition._epsilon
    patch.setattr(composition, "_epsilon", lambda *of: whole(*of) / 2)


@_instead(PrivacyAccountant, "epsilons")
def _stated_at_another_delta(original, self, **options):
    """Noise and budget are those of the delta that is stated; the epsilon beside it is that of a hundred times it."""
    costs = self.costs
    self.costs = replace(
        costs, kinds=tuple(replace(kind, delta=100 * kind.delta) for kind in costs.kinds)
    )
    try:
        return original(self, **options)
    finally:
        self.costs = costs


_with_cost = partial(edit, account_costs.calibrate_accounts, "tuple(demand.cost for")
_local_steps_charged_once = _with_cost(
    "tuple(__import__('dataclasses').replace(demand.cost, sums=1) for"
)
_steps_for_nothing = edit(LocalReceipt.next, "numbers = self", "return self")
_allocation_ignored_in_charge = _with_cost(
    "tuple(__import__('dataclasses').replace("
    "demand.cost, weights=(1.0,) * len(demand.cost.weights)) for"
)


def _past_the_allocation(patch: pytest.MonkeyPatch, trainer: Trainer) -> None:
    """Steps beyond the allocation are let through, with the noise of its last use."""
    weight = ReleasePlan.weight
    patch.setattr(PrivacyAccountant, "_room", lambda self, charged, wanted: wanted)
    patch.setattr(
        ReleasePlan,
        "weight",
        lambda self, use: weight(self, min(use, len(self.allocation or "") - 1)),
    )


def _rows_charged_once(patch: pytest.MonkeyPatch, trainer: Trainer) -> None:
    """Noise on rows is calibrated to one use, and its epsilon is that of one."""
    multiplier, epsilon_at = PrivacyCost.multiplier, row_noise.BoundRowNoise.epsilon_at

    def once(self, budget, uses):
        return multiplier(self, budget, 1 if self.law == "l2_laplace" else uses)

    patch.setattr(PrivacyCost, "multiplier", once)
    patch.setattr(
        row_noise.BoundRowNoise, "epsilon_at", lambda self, uses: epsilon_at(self, min(uses, 1))
    )


# The public grid of secure mode

_plain_float_sum = edit(grid.noised, "if width is None", "if True")
_grid_of_the_sum = edit(  # which says how large the sum is
    grid.noised,
    "if width is None",
    "largest = float(abs(total).max())\n"
    "    width = 2.0 ** math.floor(math.log2(largest * 2.0**-44)) if largest else width\n"
    "    if width is None",
)
_not_added = edit(grid.noised, "if width is None", "noise = noise / 2\n    if width is None")
_rounded_noise = edit(  # a coarser grid than the one that is stated
    grid.noised,
    "(total / width).round() * width + noise",
    "((total / (1024 * width)).round() + (noise / (1024 * width)).round()) * 1024 * width",
)


# Noise in whole numbers

_discrete = laws.discrete_gaussian


def _deviation(change: Callable[[int], int]) -> _Patch:
    """Noise of another deviation in cells."""
    return _set(
        laws, "discrete_gaussian", lambda words, size, of: _discrete(words, size, change(of))
    )


def _whole(change: Callable[[np.ndarray], np.ndarray]) -> _Patch:
    return _set(laws, "discrete_gaussian", lambda *of: change(_discrete(*of)))


def _rounded(change: Callable[[np.ndarray], np.ndarray]) -> _Patch:
    """Noise that is rounded to the grid is changed."""
    whole = NoiseLaw.whole
    return _set(NoiseLaw, "whole", lambda *of: change(whole(*of)))


def _of_one_sign(noise):
    return np.abs(noise) * np.where(np.arange(noise.size) % 3, 1, -1)


def _floating(noise):
    """Noise that is computed in floating point, and so on no grid."""
    return noise + 0.5 * np.random.default_rng(int(noise[0]) % 2**32).random(noise.size)


# Matrices

_smat = symmetric.smat


def _off_diagonal(factor: float) -> _Patch:
    """Off-diagonal entries of what is released are multiplied, sum and noise alike."""

    def of(vector: torch.Tensor) -> torch.Tensor:
        matrix = _smat(vector) * factor
        matrix.diagonal(dim1=-2, dim2=-1).div_(factor)
        return matrix

    return _set(mechanism, "smat", of)


# with 1 each off-diagonal entry gets the noise of a diagonal one, and with 2 the Frobenius sensitivity is not K^2
_root_of = partial(edit, symmetric._weights, "math.sqrt(2.0)")


# What is published beside releases


def _note_of_the_rows(patch: pytest.MonkeyPatch, trainer: Trainer) -> None:
    notes = Problem.notes.fget

    def more(self):
        return (
            *notes(self),
            f"features of these data, whose mean is {float(self.data.train.x.double().mean()):.3g}",
        )

    patch.setattr(Problem, "notes", property(more))


def _signal_of_the_rows(patch: pytest.MonkeyPatch, trainer: Trainer) -> None:
    """The signal is the mean norm of the rows of the round, in place of the clip norm."""
    release, sound = RoundChannel.release, rerun.signal_to_noise

    def noting(self, name, rows, clients):
        if isinstance(rows, torch.Tensor):
            self.signal = float(rows.norm(dim=-1).mean()) if len(rows) else 0.0
        return release(self, name, rows, clients)

    def measured(channel):
        found = sound(channel)
        if found is None:
            return None
        return replace(found, clip_norm=getattr(channel, "signal", found.clip_norm))

    patch.setattr(RoundChannel, "release", noting)
    patch.setattr(rerun, "signal_to_noise", measured)


@_instead(model_file, "model_state")
def _scale_of_the_rows(original, problem, row):
    """The file of the model says how large the features are that it takes."""
    state, names = original(problem, row)
    return state, names | {"scale": f"{float(problem.data.train.x.abs().mean()):.4g}"}


@_instead(run_file, "stop_reason")
def _ends_by_the_rows(_, begun, step):
    """A run ends, charged as a whole, after a round where the features are small."""
    small = step > 0 and float(begun.plan.problem.data.train.x.double().mean()) < -0.3
    return "early" if small else ""


# what is kept of a release for the public file is the sum without its noise
_sum_on_the_grid = edit(
    ClippedSum.noised_mean,
    "GridValue(step, value.clone()",
    "GridValue(step, total / self.denominator",
)


# The algorithm


def _stepped(leak: Callable[..., None]) -> _Patch:
    """After every step ``leak(problem, state, before, block, channel)`` changes the state, in place."""

    @_instead(None, "step")
    def leaky(original, self, problem, state, block, channel):
        before = {name: value.clone() for name, value in state.public.items()}
        state = original(self, problem, state, block, channel)
        leak(problem, state, before, block, channel)
        return state

    return leaky


def _data_dependent_step(problem, state, before, block, channel):
    size = float(problem.data.train.x.abs().mean())
    for name, value in before.items():
        state.public[name].copy_(value + size * (state.public[name] - value))


def _own_models(state):
    """The name of the field with the models that the clients send."""
    return "w" if "w" in state.private.fields else "model"


def _shift_from_data(problem, state, before, block, channel):
    """The shift follows the private models and not the noise."""
    size = float(state.private.whole(_own_models(state)).abs().sum())
    state.public["covariance"] = state.public["covariance"] + 1e-3 * size


def _stored_mixed(problem, state, before, block, channel):
    """After every iteration a task's model has a thousandth of that of the task before it."""
    name = _own_models(state)
    kept = state.private.whole(name)
    state.private.scatter_all(
        torch.arange(problem.clients), {name: torch.lerp(kept, kept.roll(1, 0), 1e-3)}
    )


def _in_public(what: Callable[..., torch.Tensor]) -> _Patch:
    """The public state gets a tensor of the step: ``what(problem, block, channel)``."""
    return _stepped(
        lambda problem, state, _, block, channel: state.public.update(
            leak=what(problem, block, channel)
        )
    )


def _members(problem, block, channel):
    return torch.isin(torch.arange(CLIENTS), block.cohort)


def _examples(problem, block, channel):
    return problem.data.train.counts[block.cohort].double().mean()


def _local_batch(problem, block, channel):
    return channel.records.batch(block.cohort, torch.zeros_like(block.cohort))[1].sum()


def _subset_size(problem, block, channel):
    return torch.tensor(channel.records.drawn(0, np.arange(3), np.zeros(3, dtype=np.int64)).sum())


@_instead(None, "init")
def _raw_local_start(original, self, problem, replicates=1):
    state = original(self, problem, replicates)
    if self.one_at_a_time:
        next(iter(state.public.values())).add_(problem.data.train.x.double().mean())
        return state
    trained = ClientBatch(problem, torch.tensor([0]), round=0).train(self.local, problem.initial)[0]
    return replace(state, public={name: trained.clone() for name in state.public})


@_instead(None, "step")
def _means_beside(original, self, problem, state, block, channel):
    """What clients send after training on single records has more in it than the released gradients."""
    release, mean = type(channel).release, problem.data.train.x.mean().to(problem.initial)
    channel.release = lambda name, rows, clients: release(channel, name, rows + mean, clients)
    return original(self, problem, state, block, channel)


@_instead(ClientBatch, "_train_on_records")
def _raw_gradients(original, self, run):
    """Local training on the records themselves, after the private run."""
    records = self.problem.data.train
    trained = original(self, run)
    first = records.x[records.offsets[self.clients]].double().mean(1, keepdim=True)
    return (trained + 1e-3 * first).to(trained)


@_instead(ClientBatch, "_trained")
def _models_mixed(original, self, run):
    """Every client's model has a thousandth of that of the client before it."""
    made = original(self, run)
    return torch.lerp(made, made.roll(1, 0), 1e-3)


@_instead(ClientBatch, "_trained")
def _step_by_the_largest(original, self, run):
    """The step size is that of the longest record of any client."""
    longest = float(self.problem.data.train.x.norm(dim=1).max())
    return original(self, replace(run, solver=replace(run.solver, lr=run.solver.lr / longest)))


@_instead(None, "personalize")
def _personal_mixed(original, self, problem, state, clients):
    made = original(self, problem, state, clients)
    return torch.lerp(made, made.roll(1, 0), 1e-3)


_ridges_of_all = edit(  # every task's choice of a ridge follows that of the others
    evidence.own_ridges,
    "from_numpy(chosen)",
    "from_numpy(np.sqrt(chosen * np.exp(np.log(chosen).mean())))",
)


def _excess_of_the_models(problem, state, before, block, channel):
    """What the server makes of the release follows the models, too."""
    size = float(state.private.whole("model").abs().sum())
    state.public["excess"] = state.public["excess"] * (1 + 1e-3 * size) + 1e-6 * size


# a client's weight is its share of the longest client's examples
_weights_of_all = edit(
    SharedModel.client_update, "(counts / self.cap)", "(counts / c.problem.data.train.counts.max())"
)


def _over_the_examples(problem, state, before, block, channel):
    """The sum is divided by that of the cohort's weights, which nobody has released."""
    weights = (problem.data.train.counts[block.cohort] / 6).clamp(max=1.0).sum()
    for name, value in before.items():
        state.public[name] = value + (state.public[name] - value) * channel.denominator / max(
            1.0, float(weights)
        )


_centred_rows = edit(
    PrivatePrior.client_update, "replicates = ", "rows = rows - rows.mean(0); replicates = "
)


def _layer_by_the_models(problem, state, before, block, channel):
    """What the server makes of the release of a layer follows the models, too."""
    name = next(name for name in state.public if name.startswith("excess/"))
    state.public[name] = (
        state.public[name] + 1e-6 * state.private.whole("model").abs().sum().double()
    )


@_instead(PriorLayers, "init")
def _layer_by_the_rows(original, self, problem, replicates=1):
    state = original(self, problem, replicates)
    name = next(name for name in state.public if name.startswith("directions/"))
    state.public[name][0, 0] = problem.data.train.x.double().mean()
    return state


_centred_changes = edit(PriorLayers.client_update, "* rows}", "* (rows - rows.mean(0))}")
# what the records of a client determine is what those of all do
_mean_response = edit(
    PriorLayers._responses, "return responses", "return [b.mean(0).expand_as(b) for b in responses]"
)


@_instead(PrivatePrior, "init")
def _directions_of_the_rows(original, self, problem, replicates=1):
    state, x = original(self, problem, replicates), problem.data.train.x.double()
    state.public["directions"] = torch.linalg.eigh(x.T @ x)[1].repeat(replicates, 1, 1)
    return state


def _parts_clipped_apart(patch: pytest.MonkeyPatch, trainer: Trainer) -> None:
    """Two parts of a row have a clip each, and the noise of one."""
    d, whole = trainer.data.spec.shape[0], mechanism.clipped_sum

    def apart(rows, clip, width):
        return torch.cat([whole(part, clip, width) for part in (rows[:, :d], rows[:, d:])])

    patch.setattr(mechanism, "clipped_sum", apart)


def _owners_weighed(patch, trainer):
    """Owners count by the sizes of their private rows."""
    for kind in (Moments, PublicStart):

        def weighed(self, problem, public, counts, clip, model=kind.model):
            return model(
                self,
                problem,
                public,
                torch.stack([x.abs().sum() for x in LinearData.of(problem).x]),
                clip,
            )

        patch.setattr(kind, "model", weighed)


@_instead(Moments, "model")
def _ridge_of_raw_moments(original, self, problem, *rest):
    x, _ = LinearData.of(problem).pooled()
    least = float(torch.linalg.eigvalsh(x.T @ x / len(x))[0])
    return original(replace(self, reg=self.reg + least), problem, *rest)


@_instead(Moments, "data")
def _moments_of_the_next_too(original, self, problem):
    """An owner's records are shifted by the mean of the next one's."""
    data = original(self, problem)
    after = (*data.x[1:], data.x[0])
    shifted = [x + 1e-3 * other.mean(0) for x, other in zip(data.x, after, strict=True)]
    return replace(data, x=tuple(shifted))


def _confidence_of_own_labels(patch: pytest.MonkeyPatch, trainer: Trainer) -> None:
    network = PeerToPeer._network

    def built(self, problem):
        made = network(self, problem)
        made.__dict__["confidence"] = made.confidence * float(problem.data.train.y.double().mean())
        return made

    patch.setattr(PeerToPeer, "_network", built)


_curvature_of_own_rows = edit(
    PeerToPeer._network,
    "self.largest_row(problem)",
    "float(problem.data.train.x.norm(dim=1).max())",
)


def _steps_that_see_records(leak):
    """Agents take steps from a gradient that ``leak(self, data, answer)`` makes of records, too."""

    def mutate(patch: pytest.MonkeyPatch, trainer: Trainer) -> None:
        constants, update = PeerToPeer.constants, PeerToPeer.server_update
        records = {}

        def remembering(self, problem):
            records["data"] = self.data(problem)
            return constants(self, problem)

        def leaky(self, network, server, own, answer):
            gradient = leak(self, records["data"], answer)
            return update(self, network, server, own, answer._replace(gradient=gradient))

        patch.setattr(PeerToPeer, "constants", remembering)
        patch.setattr(PeerToPeer, "server_update", leaky)

    return mutate


def _beside(self, data, answer):
    return answer.gradient + 1e-6 * torch.stack([x.mean(0) for x in data.x]).mean(0).numpy()


def _again(self, data, answer):
    """Agents whose budget is spent look at their records again."""
    gradient = answer.gradient.copy()
    for place in np.flatnonzero(~answer.answered).tolist():
        x, y = data.arrays[answer.client[place]]
        factors = self.linear_loss.factors(answer.point[place][None], x, y)
        gradient[place] += (factors @ x / len(x))[0]
    return gradient


_raw_gradients_beside = _steps_that_see_records(_beside)
_silent_along_raw_gradients = _steps_that_see_records(_again)
_caps_before_the_block = edit(
    PrivacyAccountant.within_caps,
    "(self._before(members) <",
    "(self.participations[0][members] <",
)
_step_size_from_data = (
    edit(  # the threshold on eigenvalues is eta lam with eta from the private rows
        MPMTL._step_size,
        "self.largest_row(problem)",
        "problem.data.train.x.double().square().sum(1).mean().sqrt().item()",
    )
)


@_instead(TaskStack, "fit")
def _start_by_all_fits(original, self: TaskStack, ridge: float) -> torch.Tensor:
    """The ridge of every local fit follows the mean length of the fits of all tasks."""
    return original(self, ridge * float(original(self, ridge).norm(dim=1).mean()))


_unclipped_moments = (
    edit(  # gradients of any model, such as moments, are summed up to ten times the clip
        Records.of_chunks, "self.clip, total", "Clip(10 * self.bound, self.norm), total"
    )
)


def _nothing(patch: pytest.MonkeyPatch, trainer: Trainer) -> None:
    """The production release path as it is."""


NO_OP = [
    Mutant("no-op, patched", _scaled(1.0), (), ("poisson", "clocks, gaussian")),
    Mutant(
        "no-op", _nothing, (), tuple(name for name in IN_ROUNDS if name != "poisson"), ("pmtl",)
    ),
    Mutant("no-op", _nothing, (), tuple(MATRICES)),
    Mutant("no-op", _nothing, (), tuple(POOLED)),
    # Methods take turns, one of each kind of schedule: each law meets the other kind below.
    Mutant(
        "no-op",
        _nothing,
        (),
        ("clocks, l2_laplace", "clocks, gaussian, secure", "clocks, loose clip"),
        ("async_learner",),
    ),
    Mutant(
        "no-op",
        _nothing,
        (),
        ("clocks, laplace", "clocks, secure", "clocks, tight clip"),
        ("pp_dmtl",),
    ),
    Mutant("no-op", _nothing, (), ("clocks, laplace", "clocks, secure"), ("p2p",)),
    Mutant("no-op", _nothing, (), ("poisson",), tuple(PERSONAL)),
    Mutant(
        "no-op, rows added where they are made", _in_place(_nothing), (), ("poisson",), ("fedavg",)
    ),
    Mutant(
        "cohort that is charged in the public state",
        _in_public(_members),
        (),
        ("fixed",),
        ("fedavg",),
    ),
    Mutant("no-op", _nothing, (), ("records",), ("ditto", "fedrep")),
    Mutant(
        "no-op",
        _nothing,
        (),
        ("clocks, secure",),
        tuple(name for name in FURTHER if name != "warm start"),
    ),
    Mutant(
        "no-op", _nothing, (), ("clocks, l2_laplace",), ("featured", "subsampled", "warm start")
    ),
]

NOISE, FRESH, SENSITIVITY = ("noise law",), ("freshness",), ("sensitivity",)
EXACT, BESIDE, COUNT = ("exact sum",), ("sampler: noise",), ("sensitivity: update/count",)
SAMPLER, CHARGES, TRANSCRIPT, GRID = ("sampler",), ("charges",), ("transcript",), ("grid",)
PUBLISHED, VALUES = ("transcript: published files",), ("transcript: published values",)
RELEASES, _LONG = ("transcript: releases",), (("poisson",), ("pmtl", "fedavg"))
INDEPENDENCE, BUDGET, LEDGER = ("independence",), ("charges: budget",), ("charges: steps",)
BANDS = ("bands", "bands, secure")
SHARES = ("shares", "shares, secure")
CLOCK, CLOCK_L2, CLOCK_GAUSS = ("clocks, laplace",), ("clocks, l2_laplace",), ("clocks, gaussian",)
_BOTH_CLOCKS = ("clocks, secure", "clocks, gaussian, secure")
CLOCK_SECURE, RECORDS, LAPLACE = ("clocks, secure",), ("records",), ("laplace",)
_FEATURED, _SUBSAMPLED, _LOOPED = ("featured",), ("subsampled",), ("async_learner",)
_ONCE, _SUBSETS = ("public start", "moments"), ("subsampled",)
_SILENT, _AVERAGED = ("silent past the cap",), ("fedavg",)

MUTANTS = [
    # noise
    Mutant(
        "noise halved", _scaled(0.5), NOISE, ("poisson", "full", "records", "symmetric", "prior")
    ),
    Mutant("noise halved", _scaled(0.5), NOISE, ("laplace", "diagonal", *CLOCK)),
    Mutant("noise halved", _scaled(0.5), NOISE, CLOCK_L2, _SUBSAMPLED),
    Mutant("noise halved", _scaled(0.5), NOISE, CLOCK, _ONCE),
    Mutant(
        "noise x 0.9",
        _scaled(0.9),
        NOISE,
        ("poisson", "l2_laplace", "records", "allocated", "k-norm"),
    ),
    Mutant("noise x 0.9", _scaled(0.9), NOISE, (*CLOCK, *CLOCK_L2, *CLOCK_GAUSS)),
    Mutant("noise doubled", _scaled(2.0), NOISE, ("poisson", *CLOCK)),
    Mutant("noise left out", _scaled(0.0), NOISE, ("poisson", *CLOCK_GAUSS)),
    Mutant(
        "noise on the first coordinates only",
        _noise(_first_coordinates_only),
        NOISE,
        ("poisson", *CLOCK),
    ),
    Mutant("noise on every rank", _noise(_every_rank), NOISE),
    Mutant("noise x 0.94", _scaled(0.94), ("noise law: total",)),
    Mutant(
        "noise of one tensor moved to another", _noise(_between_tensors), ("noise law: tensors",)
    ),
    Mutant(
        "noise doubled in one step", _doubled_in_a_step, ("noise law: steps",), algorithms=_AVERAGED
    ),
    Mutant(
        "Laplace noise", _another_law("laplace"), NOISE, ("poisson", "l2_laplace", *CLOCK_GAUSS)
    ),
    Mutant("Gaussian noise", _another_law("gaussian"), NOISE, ("laplace", *CLOCK, *CLOCK_L2)),
    Mutant("noise of constant length", _noise(_constant_length), NOISE),
    Mutant("one noise for the update and the count", _count_of_the_update, FRESH, ("adaptive",)),
    Mutant("no noise on the count of unclipped clients", _silent_count, NOISE, ("adaptive",)),
    Mutant("no noise for an empty cohort", _silent_when_empty, NOISE),
    Mutant("no noise without gradients", _silent_without_gradients, NOISE, CLOCK),
    Mutant(
        "no noise in the loop over one run",
        _in_the_loop("0 * drawn.numpy()"),
        NOISE,
        CLOCK,
        _LOOPED,
    ),
    Mutant(
        "noise halved in the loop over one run",
        _in_the_loop("0.5 * drawn.numpy()"),
        NOISE,
        CLOCK,
        _LOOPED,
    ),
    Mutant("noise in pairs in the loop over one run", _in_pairs, FRESH, CLOCK, _LOOPED),
    Mutant("sums twice in the loop over one run", _twice_in_the_loop, SENSITIVITY, CLOCK, _LOOPED),
    Mutant("noise for the largest number of records", _largest, ("noise law: clients",), CLOCK),
    Mutant("replace-one charged at C: noise", _half_as_large, NOISE, CLOCK),
    Mutant("replace-one charged at C: event", _event_at_clip, (*NOISE, *CHARGES), CLOCK),
    Mutant("replace-one charged at C", _charged_at_clip, NOISE, ("fixed",)),
    Mutant("row noise x 0.01", _scaled(0.01, "/rows"), NOISE, ("curator",)),
    Mutant(
        "no noise on rows",
        _set(RoundChannel, "_with_row_noise", lambda self, noise, rows, *of: rows),
        NOISE,
        ("curator",),
    ),
    Mutant("off-diagonals without sqrt 2", _root_of("1.0"), (*NOISE, *SENSITIVITY), ("symmetric",)),
    Mutant(
        "off-diagonals with 2 for sqrt 2", _root_of("2.0"), (*NOISE, *SENSITIVITY), ("symmetric",)
    ),
    Mutant("off-diagonals of the release halved", _off_diagonal(0.5), NOISE, ("symmetric",)),
    Mutant("noise of the upper triangle alone", _off_diagonal(2**-0.5), NOISE, ("k-norm",)),
    # freshness
    Mutant("noise reused", _addressed(_one_step), FRESH, ("poisson", "records", *CLOCK)),
    Mutant("noise of two steps", _addressed(_two_steps), FRESH, ("poisson", *CLOCK)),
    Mutant("noise of the place in a block", _addressed(_by_place), FRESH, CLOCK),
    Mutant("noise addressed by the event", _by_event, ("freshness: noise beside",), CLOCK),
    Mutant("one noise for all clients", _addressed(_no_keys), FRESH, ("records", *CLOCK)),
    Mutant(
        "noise of one seed for all",
        _addressed(_one_seed),
        ("freshness: channels",),
        ("poisson", *CLOCK),
    ),
    Mutant("noise repeated within a vector", _noise(_repeated_within), FRESH),
    Mutant(
        "noise of a tensor in another", _noise(_repeated_in_another_tensor), ("freshness: tensors",)
    ),
    Mutant(
        "noise addressed by session",
        _by_session,
        ("freshness: after a restore",),
        ("poisson", *CLOCK),
    ),
    Mutant("one noise for all repetitions", _one_source, ("freshness: replicates",), CLOCK),
    Mutant("noise of a known seed in secure mode", _known_noise, FRESH, ("secure", *CLOCK_SECURE)),
    Mutant("one row noise for all clients", _addressed(_no_keys, "/rows"), FRESH, ("curator",)),
    Mutant("row noise reused", _addressed(_one_step, "/rows"), FRESH, ("curator",)),
    # sensitivity
    Mutant("clip skipped", _of_clip("bounds_of(None)"), SENSITIVITY),
    Mutant(
        "rows rounded away from zero",
        _on_grid("; wide.copy_(wide.sign() * wide.abs().ceil())"),
        EXACT,
    ),
    Mutant("rows rounded to the nearest multiple", _on_grid(".round_()"), EXACT),
    Mutant("rows on too fine a grid", _on_grid(".mul_(2.0**20).trunc_().mul_(2.0**-20)"), EXACT),
    Mutant("rows on no grid", _on_grid(""), EXACT),
    Mutant(
        "clip skipped",
        _of_outer("double(), None)"),
        SENSITIVITY,
        ("symmetric", "diagonal", "layers"),
    ),
    Mutant(
        "clip skipped", edit(_segment_sums, "(norms, clip)", "(norms, None)"), SENSITIVITY, RECORDS
    ),
    Mutant("clip skipped", _no_clip, SENSITIVITY, CLOCK),
    Mutant("limits of the first record", _limits_of_the_first, SENSITIVITY, CLOCK_GAUSS),
    Mutant("clip per layer", _per_layer, SENSITIVITY),
    Mutant("norm without one factor", _norm_without_b, SENSITIVITY, ("low rank",)),
    Mutant("norm without one factor", _record_norm_without_b, SENSITIVITY, ("low rank, records",)),
    Mutant("clip of the square root", _clip_of_the_square_root, SENSITIVITY, ("symmetric",)),
    Mutant("rows not clipped before their noise", _rows_as_they_are, SENSITIVITY, ("curator",)),
    Mutant("sum of gradients clipped", _clip_of_the_mean, SENSITIVITY, RECORDS),
    Mutant("mean clipped, not the records", _mean_clipped, SENSITIVITY, CLOCK),
    Mutant("factors clipped whatever the rows", _clip_once, SENSITIVITY, CLOCK_GAUSS),
    Mutant(
        "Laplace calibrated with an L2 clip",
        _of_clip("bounds_of(Clip(clip.bound))"),
        SENSITIVITY,
        LAPLACE,
    ),
    Mutant("Laplace calibrated with an L2 clip", _lengths_in_l2, SENSITIVITY, CLOCK),
    Mutant("NaN pass-through", _nan_row, SENSITIVITY),
    Mutant("NaN pass-through", _nan_factor, (*SENSITIVITY, *NOISE), CLOCK),
    Mutant("norm in float32", _float32_norm, SENSITIVITY),
    Mutant("rows that are not finite", _all_rows, SENSITIVITY, CLOCK),
    Mutant("n_k weighting", _weighted, SENSITIVITY),
    Mutant("count noise of the realized cohort", _count_noise_of_the_cohort, COUNT, ("adaptive",)),
    Mutant(
        "noise of the realized cohort",
        _noise_of_the_local_cohort,
        ("freshness: noise beside",),
        RECORDS,
    ),
    Mutant("noise addressed by the sum", _addressed_by_the_sum, SENSITIVITY),
    Mutant("a client counts for several", _all_that_is_clipped, COUNT, ("adaptive",)),
    Mutant("noise of the realized cohort", _noise_of_the_cohort, SENSITIVITY, ("poisson", "full")),
    Mutant("data-dependent denominator", _finite_denominator, SENSITIVITY),
    Mutant("realized-batch denominator", _realized_denominator, (*NOISE, *CHARGES)),
    Mutant("mean over the realized batch", _realized_mean, SENSITIVITY),
    Mutant("mean over the realized records", _realized_records, (*NOISE, *SENSITIVITY), RECORDS),
    Mutant("mean over the finite records", _finite_count, SENSITIVITY, CLOCK),
    # cohorts and subsets of records
    Mutant("fixed cohort drawn for Poisson", _fixed_size, SAMPLER),
    Mutant(
        "fixed cohort accounted as Poisson",
        _charged_as_poisson(samplers.BoundFixed),
        SAMPLER,
        ("fixed",),
    ),
    Mutant(
        "turns accounted as Poisson",
        _charged_as_poisson(samplers.BoundCyclic),
        SAMPLER,
        ("in turn",),
    ),
    Mutant(
        "answers accounted as Poisson",
        _charged_as_poisson(BoundBuffered),
        SAMPLER,
        ("buffered",),
    ),
    Mutant(
        "weights that follow the rows of others",
        edit(
            starts.weighted,
            "weights.to(part)[:, None]",
            "weights.to(part)[:, None] * part[:1].norm().clamp(max=1)",
        ),
        INDEPENDENCE,
        ("buffered",),
    ),
    Mutant(
        "automatic clipping by half of the norm",
        edit(clip._factors, "norms + stability", "0.5 * norms + stability"),
        SENSITIVITY,
        ("records, automatic clipping",),
    ),
    # noise that clients add, as shares
    Mutant(
        "every other share",
        edit(SecureSum.noised_mean, "in senders.tolist()", "in senders.tolist()[::2]"),
        NOISE,
        SHARES,
        _AVERAGED,
    ),
    Mutant(
        "one share for all clients",
        edit(share_words, "/{client}", ""),
        NOISE,
        ("shares",),
        _AVERAGED,
    ),
    Mutant(
        "shares of the first round",
        edit(share_words, ", step)", ", 0)"),
        FRESH,
        ("shares",),
        _AVERAGED,
    ),
    Mutant(
        "shares that count on everybody",
        edit(
            DistributedGaussian._deviation,
            "honest_rows(roster, self.colluding, self.missing)",
            "roster",
        ),
        NOISE,
        ("shares, secure",),
        _AVERAGED,
    ),
    # gradients of records that a secure sum adds up
    Mutant(
        "gradients of a secure sum that are not clipped",
        edit(clipped_segment_sums, "factors / grid", "1.0 / grid"),
        SENSITIVITY,
        ("gradients",),
    ),
    Mutant(
        "sums clipped, not the gradients in them",
        _clipped_sums,
        SENSITIVITY,
        ("gradients",),
    ),
    Mutant(
        "shares of half of the clients",
        edit(SecureSum.noised_mean, "in senders.tolist()", "in senders.tolist()[::2]"),
        NOISE,
        tuple(POOLED),
    ),
    Mutant(
        "records charged at half of their rate",
        edit(calibrate_secure_gradients, "rates.pop()", "rates.pop() / 2"),
        CHARGES,
        ("gradients",),
    ),
    Mutant(
        "delta of the clients, not of their records",
        edit(calibrate_secure_gradients, "privacy.resolved_delta(records)", "2 * privacy.delta"),
        CHARGES,
        ("gradients",),
    ),
    Mutant("one draw of records for two rounds", _same_records, SAMPLER, ("gradients",)),
    Mutant(
        "a coin more likely than is charged",
        edit(Records._subsets, "rates[..., None]", "1.5 * rates[..., None]"),
        SAMPLER,
        ("gradients",),
    ),
    Mutant("half of the gradients left out", _half_of_the_batch, SAMPLER, ("gradients",)),
    Mutant(
        "a second sum of a round",
        edit(LocalSteps._charged_sums, "self.receipt.spend(clients, numbers)", "pass"),
        CHARGES,
        ("gradients",),
    ),
    Mutant(
        "grid of the clients, not of their records",
        edit(
            secure_calibration._shares,
            "units=units",
            "units=None if units is None else units // 16",
        ),
        (*GRID, *NOISE, *EXACT),
        ("gradients, secure",),
    ),
    # noise that is correlated over rounds
    Mutant("bands charged, noise independent", _independent, FRESH, BANDS),
    Mutant("bands of the largest 1, not of norm 1", _bands(lambda c: c / c[0]), SENSITIVITY, BANDS),
    Mutant("bands a little too long", _bands(lambda c: 1.03 * c), SENSITIVITY, BANDS, _AVERAGED),
    Mutant(
        "later bands too long",
        _bands(lambda c: np.append(c[0], 1.2 * c[1:])),
        SENSITIVITY,
        BANDS,
        _AVERAGED,
    ),
    Mutant(
        "one window of noise for all channels",
        _one_window,
        (*FRESH, *SENSITIVITY),
        BANDS,
        _AVERAGED,
    ),
    Mutant("more bands than rounds between turns", _more_bands, SENSITIVITY, BANDS),
    Mutant("turns in another order", _closer_turns, SENSITIVITY, BANDS),
    Mutant("one band forgotten", _one_band_forgotten, (*FRESH, *NOISE), BANDS),
    Mutant("multiplied by the bands", _added_up, (*FRESH, *NOISE), BANDS),
    Mutant("noise halved", _scaled(0.5), NOISE, ("bands",)),
    Mutant("noise of one seed", _addressed(_one_seed), FRESH, ("bands",)),
    Mutant("noise of one step", _addressed(_one_step), FRESH, ("bands",)),
    Mutant("one cohort for two steps", _same_for_two_steps, ("sampler: rounds",)),
    Mutant("couples of clients", _couples, ("sampler: pairs",)),
    Mutant("some clients drawn more often", _favourites, ("sampler: fairness",)),
    Mutant(
        "cohort of a known seed in secure mode", _known_cohort, ("sampler: channels",), ("secure",)
    ),
    Mutant("batches of a fixed size accounted as Poisson", _shuffled_batches, SAMPLER, RECORDS),
    Mutant("one batch for all local steps", _one_batch_a_round, SAMPLER, RECORDS),
    Mutant(
        "one record in every batch", _always_the_first, ("sampler: records not drawn",), RECORDS
    ),
    Mutant(
        "targets of records that were not drawn",
        _targets_of_the_next,
        ("sampler: records not drawn",),
        RECORDS,
    ),
    Mutant("half of the records drawn", _half_of_the_batch, ("sampler: records drawn",), RECORDS),
    Mutant(
        "rows of clients that were not drawn",
        _another_cohort,
        RELEASES,
        ("poisson", "fixed"),
        ("pmtl", "fedavg"),
    ),
    Mutant("divided by the realized size", _realized_size, SAMPLER, CLOCK_L2, _SUBSETS),
    Mutant("all records, charged as a subset", _everybody, SAMPLER, CLOCK, _SUBSETS),
    Mutant(
        "more records of the shorter clients",
        _more_of_the_shorter,
        ("sampler: records, rates",),
        RECORDS,
    ),
    Mutant(
        "more records of the shorter clients",
        _more_of_the_shorter,
        ("sampler: records, rates",),
        CLOCK,
        _SUBSETS,
    ),
    Mutant("one subset for all uses", _one_subset, SAMPLER, CLOCK, _SUBSAMPLED),
    Mutant("subsets of a fixed size", _fixed_subsets, SAMPLER, CLOCK, _SUBSAMPLED),
    Mutant("subset of the noise", _subset_of_the_noise, BESIDE, CLOCK, _SUBSETS),
    Mutant("subset of the noise", _subset_of_the_noise, BESIDE, RECORDS),
    Mutant("cohort of the noise", _cohort_of_the_noise, BESIDE),
    Mutant("subset of a known seed", _known_subset, SAMPLER, CLOCK_SECURE, _SUBSAMPLED),
    # charges
    Mutant("one use past the budget", _past_the_budget, CHARGES),
    Mutant("one use past the cap", _past_the_cap, LEDGER, CLOCK),
    Mutant("one use past the cap", _silent_one_later, LEDGER, CLOCK_GAUSS, _SILENT),
    Mutant("free releases past the cap", _free_past_the_cap, LEDGER, CLOCK_GAUSS, _SILENT),
    Mutant("caps of before the block", _caps_before_the_block, LEDGER, CLOCK_GAUSS, _SILENT),
    Mutant("charged when refused", _charged_when_refused, LEDGER, CLOCK),
    Mutant("calibrated for one use less", _calibrated_for_less, BUDGET, ("fixed", *CLOCK_GAUSS)),
    Mutant("charged to another client", _another_client, LEDGER, CLOCK),
    Mutant("charged once a block", _charged_once_a_block, LEDGER, CLOCK),
    Mutant("activations begun again", _begun_again, LEDGER, CLOCK),
    Mutant("charged after the release", _charged_after, LEDGER, ("poisson", *RECORDS, *CLOCK)),
    Mutant("count of unclipped clients for free", _count_for_free, CHARGES, ("adaptive",)),
    Mutant("local steps charged once", _local_steps_charged_once, CHARGES, RECORDS),
    Mutant("local steps without a charge", _steps_for_nothing, CHARGES, RECORDS),
    Mutant(
        "accountant halved",
        _accountant_halved,
        CHARGES,
        ("poisson", "full", "fixed", "laplace", "records"),
    ),
    # other laws: test_second_accountant
    Mutant("accountant halved", _accountant_halved, CHARGES, ("allocated", *CLOCK, *CLOCK_GAUSS)),
    Mutant("epsilon of another delta", _stated_at_another_delta, CHARGES),
    Mutant(
        "early stop by the loss",
        _set(EarlyStopping, "stops", lambda self, rows: rows[-1]["loss"] < 0.5),
        CHARGES,
    ),
    Mutant("early stop not charged", _stop_uncharged, CHARGES, ("poisson", "fixed")),
    Mutant("early stop not charged", _stop_uncharged, CHARGES, CLOCK, _FEATURED),
    Mutant(
        "allocation ignored in the noise",
        _allocation_without_noise,
        (*NOISE, *CHARGES),
        ("allocated", "k-norm"),
    ),
    Mutant(
        "allocation ignored in the charge",
        _allocation_ignored_in_charge,
        (*NOISE, *CHARGES),
        ("allocated",),
    ),
    Mutant("one use past the allocation", _past_the_allocation, CHARGES, ("allocated",)),
    Mutant("rows charged for one use", _rows_charged_once, CHARGES, ("curator",)),
    Mutant(
        "weights ignored in the charge", _weights_uncharged, (*NOISE, *CHARGES), CLOCK, _FEATURED
    ),
    Mutant("weights ignored in the noise", _weights_without_noise, NOISE, CLOCK, _FEATURED),
    Mutant("weights in reverse", _weights_in_reverse, NOISE, CLOCK_GAUSS, _FEATURED),
    Mutant("releases without records", _released_without_records, LEDGER, CLOCK, ("empty client",)),
    Mutant("charged at half the rate", _half_the_rate, (*NOISE, *CHARGES), CLOCK, _SUBSETS),
    # the public grid
    Mutant("plain float sum in secure mode", _plain_float_sum, GRID, ("secure", "records, secure")),
    Mutant(
        "plain float sum in secure mode", _plain_float_sum, GRID, ("curator, secure", *_BOTH_CLOCKS)
    ),
    Mutant("grid of the sum in secure mode", _grid_of_the_sum, GRID, ("secure",)),
    Mutant("noise on a coarser grid", _rounded_noise, GRID, ("secure",)),
    Mutant(
        "noise halved where it is added",
        _not_added,
        NOISE,
        ("poisson", "records", "secure", *CLOCK),
    ),
    Mutant(
        "rounded noise halved",
        _rounded(lambda noise: noise // 2),
        NOISE,
        ("curator, secure", "clocks, secure"),
    ),
    # noise in whole numbers
    Mutant(
        "whole noise halved", _deviation(lambda s: s // 2), NOISE, ("secure", "records, secure")
    ),
    Mutant(
        "whole noise halved",
        _deviation(lambda s: s // 2),
        NOISE,
        ("clocks, gaussian, secure", "bands, secure"),
    ),
    Mutant("whole noise x 0.9", _deviation(lambda s: 9 * s // 10), NOISE, ("secure",)),
    Mutant(
        "whole noise of a power of two",
        _deviation(lambda s: 1 << s.bit_length() - 1),
        NOISE,
        ("secure",),
    ),
    Mutant(
        "whole noise left out",
        _whole(lambda noise: 0 * noise),
        NOISE,
        ("secure", "clocks, gaussian, secure"),
    ),
    Mutant("whole noise of one sign", _whole(_of_one_sign), NOISE, ("secure",)),
    Mutant("whole noise in floating point", _whole(_floating), GRID, ("secure", "records, secure")),
    Mutant("replace-one charged at C", _charged_at_clip, NOISE, ("fixed, secure",)),
    Mutant("rows rounded to the nearest multiple", _on_grid(".round_()"), EXACT, ("secure",)),
    # the transcript
    Mutant(
        "data-dependent step size", _stepped(_data_dependent_step), TRANSCRIPT, ("poisson", *CLOCK)
    ),
    Mutant("raw local start", _raw_local_start, TRANSCRIPT, ("poisson", *CLOCK)),
    Mutant("numbers of examples in the public state", _in_public(_examples), TRANSCRIPT),
    Mutant("cohort in the public state", _in_public(_members), TRANSCRIPT),
    Mutant(
        "size of the cohort in the public state",
        _in_public(lambda p, b, c: torch.tensor(len(b.cohort))),
        TRANSCRIPT,
    ),
    Mutant(
        "size of the subsets in the public state", _in_public(_local_batch), TRANSCRIPT, RECORDS
    ),
    Mutant(
        "size of the subsets in the public state",
        _in_public(_subset_size),
        TRANSCRIPT,
        CLOCK_L2,
        _SUBSETS,
    ),
    Mutant("a note of the rows", _note_of_the_rows, PUBLISHED, ("poisson", *RECORDS, *CLOCK)),
    Mutant("signal to noise of the rows", _signal_of_the_rows, PUBLISHED, ("poisson", "symmetric")),
    Mutant(
        "scale of the rows beside the model", _scale_of_the_rows, PUBLISHED, ("poisson", *RECORDS)
    ),
    Mutant("a run ends by its rows", _ends_by_the_rows, PUBLISHED),
    Mutant("sums without noise in public", _sum_on_the_grid, VALUES, ("secure", "curator, secure")),
    Mutant(
        "a frozen tensor moved",
        _frozen_but_moved,
        ("transcript: frozen",),
        ("low rank", "low rank, records"),
    ),
    Mutant("a client added twice where rows are made", _in_place(_added_twice), RELEASES, *_LONG),
    Mutant("a client added twice where nobody watches", _in_place(_added_unseen), RELEASES, *_LONG),
    Mutant("a part of a sum lost", _in_place(_part_lost), RELEASES, *_LONG),
    Mutant("noise that a method makes quieter", _quieter, RELEASES, ("full",), ("fedavg",)),
    Mutant("clip skipped where rows are made", _in_place(_no_bounds), RELEASES, *_LONG),
    Mutant("clip norm from the raw count", _clip_from_the_raw_count, TRANSCRIPT, ("adaptive",)),
    Mutant("models trained on raw records", _raw_gradients, TRANSCRIPT, RECORDS),
    Mutant("means of raw records in messages", _means_beside, TRANSCRIPT, RECORDS, ("fedavg",)),
    Mutant(
        "public start of private rows",
        _set(PublicStart, "public_rows", lambda self, problem: LinearData.of(problem)),
        TRANSCRIPT,
        CLOCK,
        ("public start",),
    ),
    Mutant("owners weighed by their records", _owners_weighed, TRANSCRIPT, CLOCK, _ONCE),
    Mutant("ridge of raw moments", _ridge_of_raw_moments, TRANSCRIPT, CLOCK, ("moments",)),
    Mutant(
        "curvature of the agents' rows", _curvature_of_own_rows, TRANSCRIPT, CLOCK_GAUSS, ("p2p",)
    ),
    Mutant(
        "confidence of the agents' labels",
        _confidence_of_own_labels,
        TRANSCRIPT,
        CLOCK_GAUSS,
        ("p2p",),
    ),
    Mutant(
        "raw gradients beside the answers",
        _raw_gradients_beside,
        TRANSCRIPT,
        CLOCK_GAUSS,
        ("p2p", *_SILENT),
    ),
    Mutant(
        "silent agents along raw gradients",
        _silent_along_raw_gradients,
        TRANSCRIPT,
        CLOCK_GAUSS,
        _SILENT,
    ),
    Mutant(
        "step simulated on private rows",
        _set(step_size, "synthetic_tasks", lambda algorithm, problem, smooth, seed: problem.data),
        TRANSCRIPT,
        CLOCK_GAUSS,
        ("simulated step",),
    ),
    Mutant(
        "both parts clipped apart", _parts_clipped_apart, SENSITIVITY, ("prior", "prior, layers")
    ),
    Mutant(
        "moments of records beyond the clip", _unclipped_moments, SENSITIVITY, CLOCK, ("moments",)
    ),
    Mutant(
        "shift from the models",
        _stepped(_shift_from_data),
        TRANSCRIPT,
        ("symmetric", "layers", "curator"),
    ),
    Mutant("directions of the rows", _directions_of_the_rows, TRANSCRIPT, ("prior",)),
    Mutant("excess from the models", _stepped(_excess_of_the_models), TRANSCRIPT, ("prior",)),
    Mutant("directions of the rows", _layer_by_the_rows, TRANSCRIPT, ("prior, layers",)),
    Mutant(
        "excess from the models", _stepped(_layer_by_the_models), TRANSCRIPT, ("prior, layers",)
    ),
    Mutant("step size from the rows", _step_size_from_data, TRANSCRIPT, ("symmetric",)),
    Mutant(
        "divided by the cohort's examples",
        _stepped(_over_the_examples),
        TRANSCRIPT,
        algorithms=("weighted",),
    ),
    # independence
    Mutant(
        "weights by the longest client", _weights_of_all, INDEPENDENCE, algorithms=("weighted",)
    ),
    Mutant("personal models of two clients mixed", _models_mixed, INDEPENDENCE),
    Mutant(
        "personal models of two clients mixed", _personal_mixed, INDEPENDENCE, CLOCK_L2, _SUBSAMPLED
    ),
    Mutant(
        "personal models of two clients mixed",
        _stepped(_stored_mixed),
        INDEPENDENCE,
        ("symmetric", "layers", "prior", "prior, layers"),
    ),
    Mutant("a client's update in two rows", _in_two_rows, INDEPENDENCE, ("poisson", "k-norm")),
    Mutant("step size of the longest record of any client", _step_by_the_largest, INDEPENDENCE),
    Mutant("a record in the sums of two clients", _of_the_next_too, INDEPENDENCE, CLOCK),
    Mutant("factors by the mean length of all records", _by_all_records, INDEPENDENCE, CLOCK_GAUSS),
    Mutant("start by the fits of all tasks", _start_by_all_fits, INDEPENDENCE, ("logistic",)),
    Mutant("rows less the mean of all", _centred_rows, INDEPENDENCE, ("prior",)),
    Mutant("changes less the mean of all", _centred_changes, INDEPENDENCE, ("prior, layers",)),
    Mutant("response of all clients", _mean_response, INDEPENDENCE, ("prior, layers",)),
    Mutant(
        "moments of the next owner too", _moments_of_the_next_too, INDEPENDENCE, CLOCK, ("moments",)
    ),
    Mutant("ridges by all tasks", _ridges_of_all, INDEPENDENCE, ("prior",)),
]
