"""Releases whose unit is one record: clipped, noised gradients of single records, by the client that has them.

Two ways lead to them. In rounds, clients train locally by DP-SGD: a participation is a number of local steps, each on a
secret Poisson subset of the client's records, and neighbours differ by one record replaced by nothing ("zero_out").
Clients that act one at a time release a mean gradient in each activation, and neighbours differ by one record replaced
by another ("replace"). Either way the numbers of records n_i are public, the participation of clients is public and
amplifies nothing, and every client has an account of its own with a hard cap on its uses, to which its noise is
calibrated.

The uses of a client may have positive public weights of mean 1: the k-th has the noise multiplier z / w_k, so a larger
weight is more budget and less noise. A release before all steps (a warm start) has a weight of its own, and one z is
found for the composition of everything.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import cached_property
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor

from .._check import positive_int
from .._rounding import rounded_up
from ..errors import ConfigError, PrivacyError
from .account import Cost, Uses, composed
from .accounting.calibration import calibrate_multiplier
from .accounting.composition import largest_uses
from .accounting.losses import ReplacedPoissonDpEvent
from .allocation import normalized
from .events import dp_event
from .noise.laws import L2LaplaceNoise, NoiseLaw, Norm
from .noise.registry import LAWS
from .settings import RecordPrivacy

RecordRelation = Literal["zero_out", "replace"]


@dataclass(frozen=True, eq=False)
class WarmStartRelease:
    """What an extra release of every client that has data needs, before its activations and within the same budget.

    Args:
        sensitivity: (n,) the most that the vector (D,) of a client moves in the L2 norm when one of its records is
            replaced, above 0 for clients that have data; such as L / (n_i lambda) for the minimizer of a mean of
            L-Lipschitz losses plus lambda ||.||^2. Not used for the others.
        share: of a client's budget, in (0, 1), as its part of the sum of the weights of all its releases.
    """

    sensitivity: np.ndarray
    share: float

    def __post_init__(self) -> None:
        if isinstance(self.share, bool) or not 0 < self.share < 1:
            raise ConfigError(f"WarmStartRelease.share is {self.share!r}; it must be between 0 and 1.")

    def check(self, counts: np.ndarray) -> None:
        """Raise ConfigError unless there is a sensitivity for every client with ``counts`` (n,) records."""
        s = np.asarray(self.sensitivity, dtype=np.float64)
        if s.shape != counts.shape or not bool((np.isfinite(s) & (s > 0))[counts > 0].all()):
            raise ConfigError(
                f"WarmStartRelease.sensitivity has shape {s.shape}; it must have a positive finite number for each of "
                f"{counts.size} clients that have data."
            )


@dataclass(frozen=True)
class PublishedClaim:
    """A published accounting that does not hold: the report prints its figure beside an infinite epsilon.

    Attributes:
        claim: from a client's noise multiplier to the epsilon that is claimed of one activation.
        why_invalid: why it does not hold, in words.
        norm: in which the records' gradients are clipped there; None: that which the law of the noise needs.
    """

    claim: Callable[[float], float]
    why_invalid: str
    norm: Norm | None = None


@dataclass(frozen=True, eq=False, kw_only=True)
class GradientPlan:
    """What an algorithm, or local training, says about its releases of gradients before anything runs.

    Args:
        ids: of the n clients.
        counts: (n,) whole numbers, n_i: the public numbers of records.
        dimension: D, length of a gradient.
        caps: (n,) whole numbers, the most uses of each client: activations, or participations in rounds (there the
            schedule sets them, and None is given).
        keys: int64 (n,), address of each client's random numbers; None: its position.
        ranks: int64 (n,), the rank of each client in the sampler of the rounds; None: its position.
        x: (n_i, D) rows of each client's records, of which gradients are multiples; None where they are of none.
        rate: q in (0, 1], one for all or (n,): a record takes part in a release with that probability, by secret coins
            of its own; sums are divided by q n_i.
        arrivals: whole numbers (n_i,) of each client, the activation from which each record is there; public. None:
            from the start.
        at_cap: what an activation of a client at its cap is: ``"stop"``: the end of the run; ``"silent"``: one that
            releases nothing and costs nothing.
        allocation: (caps[i],) public positive weights of the first, second, ... activation of client i, of any mean.
        first: an extra release of every client that has data, before all activations.
        published: the accounting of an algorithm that runs under ``guarantee="paper"``. The caps and the calibration
            are the same, and the epsilon is infinite.
        relation: how neighbours differ.
        steps: (n,) int64, noised sums of one use: the local steps of one participation, of all its trainings together.
        trainings: local trainings of one participation, each with the same number of local steps.
        batch_size: expected records of one local step, for the report; ``rate`` draws them.
        notes: what else no epsilon covers, for the report.
        given_noise: further arguments, by name, that depend on the settings of a run with noise.

    Raises:
        ConfigError: numbers of another shape, or out of range.
    """

    ids: tuple[str, ...]
    counts: np.ndarray
    dimension: int
    caps: np.ndarray | None = None
    keys: Tensor | None = None
    ranks: Tensor | None = None
    x: Sequence[Tensor] | None = None
    rate: float | np.ndarray = 1.0
    arrivals: Sequence[np.ndarray] | None = None
    at_cap: Literal["stop", "silent"] = "stop"
    allocation: Sequence[np.ndarray] | None = None
    first: WarmStartRelease | None = None
    published: PublishedClaim | None = None
    relation: RecordRelation = "replace"
    steps: np.ndarray | None = None
    trainings: int = 1
    batch_size: int | None = None
    notes: tuple[str, ...] = ()
    given_noise: Callable[[RecordPrivacy], Mapping[str, Any]] | None = None

    def __post_init__(self) -> None:
        n = len(self.ids)
        set_, x = object.__setattr__, self.x
        positive_int(self, dimension=self.dimension, trainings=self.trainings)
        if x is not None and (len(x) != n or any(rows.ndim != 2 or rows.shape[1] != self.dimension for rows in x)):
            raise ConfigError(f"x must have rows (n_i, {self.dimension}) of each of {n:,} clients.")
        set_(self, "counts", whole_numbers("counts", self.counts, n))
        if self.caps is not None:
            set_(self, "caps", whole_numbers("caps", self.caps, n))
        if self.keys is None:
            set_(self, "keys", torch.arange(n))
        if self.addresses.shape != (n,) or self.addresses.unique().numel() != n:
            raise ConfigError(f"keys must be {n:,} numbers, all different, one a client: they address the noise.")
        if self.ranks is not None and not torch.equal(self.ranks.sort().values, torch.arange(n)):
            raise ConfigError(f"ranks must be 0 to {n - 1} in any order, one for each of {n:,} clients.")
        set_(self, "rate", _rates(self.rate, n))
        if self.first is not None:
            self.first.check(self.counts)
        set_(self, "steps", whole_numbers("steps", np.ones(n, dtype=np.int64) if self.steps is None else self.steps, n))
        if (self.local_steps % self.trainings != 0).any():
            raise PrivacyError(f"{self.trainings} trainings cannot share the local steps of a participation equally.")

    def check(self, *, clients: int | None) -> None:
        """Refuse settings that rounds, or clients that act one at a time, do not follow.

        Args:
            clients: number of clients of the rounds; None where clients act one at a time.

        Raises:
            PrivacyError: named.
        """
        if clients is not None:
            what, relation = "rounds", "zero_out"
            unused = {name: getattr(self, name) for name in ("caps", "arrivals", "allocation", "first", "published")}
            if clients != len(self.ids):
                raise PrivacyError(f"The GradientPlan has {len(self.ids):,} clients, and the sampler {clients:,}.")
        else:
            what, relation = "clients that act one at a time", "replace"
            unused = {"ranks": self.ranks, "batch_size": self.batch_size}
            unused |= {"steps": None if (self.local_steps == 1).all() else self.steps}
            if self.caps is None:
                raise PrivacyError("Clients that act one at a time need GradientPlan(caps=...), the most uses of each.")
        given = [name for name, value in unused.items() if value is not None]
        if given or self.relation != relation:
            wrong = f"{given[0]}=..." if given else f"relation={self.relation!r}"
            raise PrivacyError(
                f"GradientPlan({wrong}) is not for {what}, whose releases do not follow it; leave it out."
            )

    def under(self, privacy: Sequence[RecordPrivacy]) -> GradientPlan:
        """Return this plan with what depends on the settings of a run, those of all repetitions or of each."""
        noised = next((one for one in privacy if not one.noiseless), None)
        if noised is None or self.given_noise is None:
            return self
        return replace(self, **self.given_noise(noised), given_noise=None)

    @property
    def rates(self) -> np.ndarray:
        """Return q_i, (n,) float64."""
        assert isinstance(self.rate, np.ndarray)
        return self.rate

    @property
    def local_steps(self) -> np.ndarray:
        """Return (n,) int64 noised sums of one use."""
        assert self.steps is not None
        return self.steps

    @property
    def addresses(self) -> Tensor:
        """Return int64 (n,) keys of the clients."""
        assert self.keys is not None
        return self.keys

    @property
    def order(self) -> Tensor:
        """Return int64 (n,), the client at each rank."""
        return torch.arange(len(self.ids)) if self.ranks is None else torch.argsort(self.ranks)

    @property
    def expected(self) -> np.ndarray:
        """Return (n,) float64: q_i n_i, the public numbers by which sums over all records are divided."""
        return self.rates * self.counts

    @property
    def public_digest(self) -> str:
        """Return a digest of public numbers that the noise depends on: a run goes on with the same ones."""
        arrays = (self.counts, *(self.arrivals or ()), *([] if self.first is None else [self.first.sensitivity]))
        digest = hashlib.blake2b(digest_size=16)
        for array in arrays:
            given = np.ascontiguousarray(array)
            digest.update(f"{given.dtype} {given.shape} ".encode() + given.tobytes())
        return digest.hexdigest()

    def describe(self) -> str:
        """Return which records take part in a release, for the report."""
        there = "records of a client" + (" that are there" if self.arrivals is not None else "")
        low, high = float(self.rates.min(initial=1.0)), float(self.rates.max(initial=0.0))
        if self.batch_size is not None:
            return f"Poisson over records, expected batch {self.batch_size} (q = {low:.4g} to {high:.4g} by client)"
        if self.relation == "zero_out":
            return f"all {there} in every local step"
        if low == 1.0:
            return f"all {there} in every activation"
        q = f"q = {low:.4g}" if low == high else f"q = {low:.4g} to {high:.4g} by client"
        return f"Poisson over the {there}, {q}: drawn anew for every activation and secret"


def whole_numbers(name: str, values: Any, clients: int) -> np.ndarray:
    """Return (n,) int64 of whole numbers of at least 0.

    Raises:
        ConfigError: something else.
    """
    given = np.asarray(values)
    if given.shape != (clients,) or given.dtype.kind not in "iu" or bool((given < 0).any()):
        raise ConfigError(
            f"{name} has shape {given.shape} and dtype {given.dtype}; it must be a whole number of at least 0 for each "
            f"of {clients:,} clients."
        )
    return given.astype(np.int64)


def _rates(rate: Any, clients: int) -> np.ndarray:
    given = np.asarray(rate)
    fits = given.shape in ((), (clients,)) and given.dtype.kind in "fiu"
    if not fits or not bool(((given > 0) & (given <= 1)).all()):
        raise ConfigError(f"rate is {rate!r}; it must be in (0, 1], one for all or for each of {clients:,} clients.")
    return np.array(np.broadcast_to(given, (clients,)), dtype=np.float64)


# What the releases cost


@dataclass(frozen=True)
class AccountKind:
    """Clients of one kind, which are calibrated once and cost the same.

    Attributes:
        cap: most uses.
        weights: of the uses, one for each, of mean 1; None where all are 1.
        first: weight of the release before all steps; 0 without one.
        rate: probability that a record takes part in a release.
        repeats: noised sums in one use.
        relation: how neighbours differ.
        multiplier: z, scale of the noise over the sensitivity at a weight of 1; 0 is no noise.
    """

    cap: int
    weights: tuple[float, ...] | None = None
    first: float = 0.0
    rate: float = 1.0
    repeats: int = 1
    relation: RecordRelation = "replace"
    multiplier: float = 0.0

    def events(self, privacy: RecordPrivacy, dimension: int) -> Uses:
        """Return the event of a noised sum in any use, or those of the release before all steps and of every use, in
        order."""
        made: dict[float, Any] = {}
        for weight in self.weights or (1.0,):
            if weight not in made:
                made[weight] = self._event(LAWS[privacy.mechanism], weight, self.rate, privacy, dimension)
        if self.weights is None and self.first == 0:
            return made[1.0]
        uses = tuple(made[weight] for weight in self.weights or (1.0,) * self.cap)
        if self.first == 0:
            return uses
        return (self._event(first_law(privacy), self.first, 1.0, privacy, dimension), *uses)

    def _event(self, law: type[NoiseLaw], weight: float, rate: float, privacy: RecordPrivacy, dimension: int) -> Any:
        if self.multiplier == 0:
            return dp_event.NonPrivateDpEvent()
        event = law(self.multiplier / weight).event(dimension)
        if rate < 1:
            sampled = ReplacedPoissonDpEvent if self.relation == "replace" else dp_event.PoissonSampledDpEvent
            event = sampled(rate, event)
        return event


def first_law(privacy: RecordPrivacy) -> type[NoiseLaw]:
    """Return the law of the noise of releases before all steps, whose sensitivity is in the L2 norm."""
    return L2LaplaceNoise if (law := LAWS[privacy.mechanism]).norm == "l1" else law


@dataclass(frozen=True, eq=False)
class NoiseTerms:
    """The noise of every client's releases, by kind of client.

    Attributes:
        privacy: settings of all repetitions, or of each.
        kinds: distinct ones.
        kind: (P, n) int64, the kind of every client; P is 1, or R where repetitions have settings of their own.
        cost: what the uses cost.
    """

    privacy: tuple[RecordPrivacy, ...]
    kinds: tuple[AccountKind, ...]
    kind: np.ndarray
    cost: Cost

    @cached_property
    def multipliers(self) -> np.ndarray:
        """Return z of each client, (P, n) float64."""
        return np.array([kind.multiplier for kind in self.kinds])[self.kind]

    @property
    def caps(self) -> np.ndarray:
        """Return the most uses of each client, (n,) int64."""
        return np.array([kind.cap for kind in self.kinds], dtype=np.int64)[self.kind[0]]

    @cached_property
    def weighted(self) -> bool:
        """Whether uses differ in weight."""
        return any(kind.weights is not None for kind in self.kinds)

    @cached_property
    def firsts(self) -> np.ndarray:
        """Return (n,) float64: weights of releases before all steps; 0 without one."""
        return np.array([kind.first for kind in self.kinds])[self.kind[0]]

    def of_uses(self, clients: np.ndarray, uses: np.ndarray) -> np.ndarray:
        """Return the noise multipliers of the uses ``uses`` (from 0) of ``clients``, both (R, S): (R, S) float64; 0 of
        nobody's, -1."""
        rows = np.arange(len(clients))[:, None] if len(self.kind) > 1 else 0
        multipliers = np.where(clients >= 0, self.multipliers[rows, clients], 0.0)
        if not self.weighted:
            return multipliers
        start, flat = self._flat
        first = start[self.kind[0][clients]]
        some = (clients >= 0) & (first >= 0)
        return np.where(some, multipliers / flat[np.where(some, first + uses, 0)], multipliers)

    @cached_property
    def _flat(self) -> tuple[np.ndarray, np.ndarray]:
        start, flat = np.full(len(self.kinds), -1), [1.0]
        for k, kind in enumerate(self.kinds):
            if kind.weights:
                start[k] = len(flat)
                flat += kind.weights
        return start, np.array(flat)

    def header(self) -> dict[str, Any]:
        """Return JSON for a ledger: one entry for every kind, and the kind of every client where there are several."""
        kinds = [asdict(kind) | {"weights": list(kind.weights) if kind.weights else None} for kind in self.kinds]
        return {"kinds": kinds} | ({"kind_of": self.kind[0].tolist()} if len(kinds) > 1 else {})


def noise_terms(
    privacy: Sequence[RecordPrivacy],
    plan: GradientPlan,
    caps: np.ndarray,
    delta: float,
    *,
    header: Mapping[str, Any] | None = None,
) -> NoiseTerms:
    """Calibrate the noise of every kind of client.

    Args:
        privacy: settings of all repetitions, or of each.
        plan: the releases.
        caps: (n,) int64, most uses of each client.
        delta: of every epsilon.
        header: of the ledger that the run goes on with: its noise and caps are taken, and the ledger refuses it if the
            rest differs.

    Raises:
        ConfigError: a budget that cannot be met, or weights that do not fit.
    """
    weights = _weights(plan.allocation, caps)
    places: dict[tuple[Any, ...], int] = {}
    asked: list[tuple[RecordPrivacy, AccountKind, float | None, str]] = []
    kind = np.empty((len(privacy), len(plan.ids)), dtype=np.int64)
    for row, settings in enumerate(privacy):
        if len(privacy) > 1 and settings.epsilon is not None and settings.noise_multiplier is not None:
            raise ConfigError(
                "Repetitions with settings of their own have the caps of all; give epsilon or noise_multiplier."
            )
        for client, (budget, cap) in enumerate(zip(settings.budgets(plan.ids), caps.tolist(), strict=True)):
            first = 0.0
            if plan.first is not None and plan.counts[client] > 0:
                first = plan.first.share / (1 - plan.first.share) * cap if cap else 1.0
            own = weights[client] if weights else None  # equal ones are the same object
            rate, repeats = float(plan.rates[client]), int(plan.local_steps[client])
            key = (budget, settings.noise_multiplier, cap, id(own), first, rate, repeats)
            if key not in places:
                places[key] = len(asked)
                asked.append(
                    (settings, AccountKind(cap, own, first, rate, repeats, plan.relation), budget, plan.ids[client])
                )
            kind[row, client] = places[key]
    known = (header or {}).get("kinds", ())
    if len(known) == len(asked):
        kinds = [
            replace(new, cap=row["cap"], multiplier=row["multiplier"])
            for (_, new, _, _), row in zip(asked, known, strict=True)
        ]
    else:
        kinds = [_calibrated(*one, plan.dimension, delta) for one in asked]
    cost = Cost(
        delta,
        tuple(one.events(privacy[0], plan.dimension) for one in kinds),
        kind,
        tuple(one.repeats for one in kinds),
        None if plan.published is None else plan.published.why_invalid,
        np.array([one.first > 0 for one in kinds])[kind[0]],
    )
    return NoiseTerms(tuple(privacy), tuple(kinds), kind, cost)


def _weights(allocation: Sequence[np.ndarray] | None, caps: np.ndarray) -> list[tuple[float, ...] | None]:
    """Return normalized weights by client, equal ones as the same object; None where all are equal."""
    if allocation is None:
        return []
    if len(allocation) != caps.size:
        raise ConfigError(f"The allocation has weights for {len(allocation):,} clients, there are {caps.size:,}.")
    made: dict[bytes, tuple[float, ...] | None] = {}
    by_client = []
    for client, (given, cap) in enumerate(zip(allocation, caps.tolist(), strict=True)):
        array = np.asarray(given, dtype=np.float64)
        if array.shape != (cap,):
            raise ConfigError(f"The allocation of client {client} has shape {array.shape}; it may act {cap} times.")
        key = array.tobytes()
        if key not in made:
            equal = cap == 0 or bool((array == array[0]).all() and 0 < array[0] < math.inf)
            made[key] = None if equal else normalized(array.tolist())
        by_client.append(made[key])
    return by_client


def _calibrated(
    privacy: RecordPrivacy, kind: AccountKind, budget: float | None, client: str, dimension: int, delta: float
) -> AccountKind:
    """Return the kind of account with its noise multiplier and its hard cap."""

    def whole(multiplier: float) -> Any:
        events = replace(kind, multiplier=multiplier).events(privacy, dimension)
        return composed(events) if isinstance(events, tuple) else events

    if budget == math.inf:
        return kind
    if privacy.noise_multiplier is None:
        assert budget is not None
        uses = 1 if kind.weights is not None or kind.first else max(1, kind.cap)
        z = calibrate_multiplier(whole, target=budget, delta=delta, uses=max(1, uses * kind.repeats))
        return replace(kind, multiplier=z)
    kind = replace(kind, multiplier=float(privacy.noise_multiplier))
    return kind if budget is None else replace(kind, cap=_fitting(privacy, kind, budget, client, dimension, delta))


def _fitting(
    privacy: RecordPrivacy, kind: AccountKind, budget: float, client: str, dimension: int, delta: float
) -> int:
    """Return the most uses up to the cap that the budget allows at a fixed noise multiplier."""
    events = kind.events(privacy, dimension)
    if not isinstance(events, tuple):
        fitting = largest_uses(events, budget, delta) // max(1, kind.repeats)
        if fitting < 1 and kind.relation == "zero_out" and kind.cap > 0:
            raise ConfigError(
                f"RecordPrivacy: noise_multiplier {kind.multiplier:g} spends more than epsilon = "
                f"{rounded_up(budget, 6)} of client {client!r} in one round at delta = {rounded_up(delta, 6)}. Raise "
                f"noise_multiplier or epsilon."
            )
        return min(kind.cap, fitting)
    cost, extra = Cost(delta, (events,)), int(kind.first > 0)
    if extra and cost.epsilon(1) > budget:
        raise ConfigError(
            f"epsilon = {rounded_up(budget, 6)} does not even allow the first release at noise_multiplier = "
            f"{kind.multiplier:g}; ask for more of either, or for a smaller share."
        )
    return kind.cap - _beyond(cost, kind.cap, extra, budget)


def _beyond(cost: Cost, cap: int, extra: int, budget: float) -> int:
    """Return how many of ``cap`` uses, after ``extra`` charges, do not fit the budget."""
    low, high = 0, cap + 1
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if cost.epsilon(middle + extra) <= budget else (low, middle)
    return cap - low
