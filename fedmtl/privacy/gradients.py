"""Releases whose unit is one record: clipped, noised gradients of single records, by the client
that has them.

Two ways lead to them. In rounds, clients train locally by DP-SGD: a participation is a number of
local steps, each on a secret Poisson subset of the client's records, and neighbours differ by one
record replaced by nothing ("zero_out"). Clients that act one at a time release a mean gradient in
each activation, and neighbours differ by one record replaced by another ("replace"). Either way the
numbers of records n_i are public, the participation of clients is public and amplifies nothing, and
every client has an account of its own with a hard cap on its uses, to which its noise is
calibrated.

The uses of a client may have positive public weights of mean 1: the k-th has the noise multiplier z
/ w_k, so a larger weight is more budget and less noise.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache, cached_property, lru_cache
from typing import Any, Literal

import numpy as np
import torch
from numpy.typing import ArrayLike
from torch import Tensor

from .._check import given, positive_int
from ..errors import ConfigError, PrivacyError
from .account_costs import AccountCosts, Demand, StoredNoise, calibrate_accounts
from .cost import PrivacyCost, normalized
from .noise.laws import Norm
from .settings import RecordPrivacy

RecordRelation = Literal["zero_out", "replace"]


@dataclass(frozen=True)
class PublishedClaim:
    """A published accounting that does not hold: the report prints its figure beside an infinite
    epsilon.

    Attributes:
        claim: from a client's noise multiplier to the epsilon that is claimed of one activation.
        why_invalid: the reason why it does not hold.
        norm: in which the records' gradients are clipped there; None: the one that the law of the
            noise needs.

    Example:
        >>> from fedmtl.privacy import PublishedClaim
        >>> claim = PublishedClaim(lambda z: 1 / z, "the sensitivity is that of another norm")
        >>> claim.claim(2.0)
        0.5
    """

    claim: Callable[[float], float]
    why_invalid: str
    norm: Norm | None = None


@dataclass(frozen=True, eq=False, kw_only=True)
class GradientPlan:
    """The plan of releases of gradients, of an algorithm or of local training, before anything
    runs.

    Args:
        ids: of the n clients.
        counts: (n,) whole numbers, n_i: the public numbers of records.
        total: public number of the records of all clients, N, if others have some that this plan
            does not know; at least the sum of ``counts``. None: that sum.
        dimension: D, length of a gradient.
        caps: (n,) whole numbers, the most activations of each client; None in rounds, of which the
            schedule sets the most participations.
        keys: int64 (n,), address of each client's random numbers; None: its position.
        x: (n_i, D) rows of each client's records, of which gradients are multiples; None if they
            are of none.
        rate: q in (0, 1], one for all or (n,): a record takes part in a release with that
            probability, by secret coins of its own; sums are divided by q n_i.
        at_cap: the effect of an activation of a client at its cap: ``"stop"``, the end of the run;
            ``"silent"``, no release and no cost.
        allocation: (caps[i],) public positive weights of the first, second, ... activation of
            client i, of any mean.
        published: an accounting that a paper claims and that does not hold. The caps and the
            calibration are the same, and the epsilon is infinite.
        steps: (n,) int64, noised sums of one use: the local steps of one participation, of all its
            trainings.
        trainings: local trainings of one participation, each with the same number of local steps.
        batch_size: expected records of one local step, B: q is B / n_i, and 1 of a client with
            fewer; None: ``rate``.
        notes: of parts that no epsilon covers, for the report.
        given_noise: further arguments, by name, that depend on the settings of a run with noise.

    Raises:
        ConfigError: numbers of another shape, or out of range.

    Example:
        >>> import numpy as np
        >>> from fedmtl.privacy import GradientPlan
        >>> counts = np.array([20, 40])
        >>> plan = GradientPlan(ids=("ann", "bob"), counts=counts, dimension=5, batch_size=10)
        >>> plan.rates.tolist()
        [0.5, 0.25]
    """

    ids: tuple[str, ...]
    counts: np.ndarray
    dimension: int
    total: int | None = None
    caps: np.ndarray | None = None
    keys: Tensor | None = None
    x: Sequence[Tensor] | None = None
    rate: float | np.ndarray = 1.0
    at_cap: Literal["stop", "silent"] = "stop"
    allocation: Sequence[np.ndarray] | None = None
    published: PublishedClaim | None = None
    steps: np.ndarray | None = None
    trainings: int = 1
    batch_size: int | None = None
    notes: tuple[str, ...] = ()
    given_noise: Callable[[RecordPrivacy], Mapping[str, Any]] | None = None

    def __post_init__(self) -> None:
        n = len(self.ids)
        set_ = object.__setattr__
        x = self.x
        positive_int(
            self,
            **given(dimension=self.dimension, trainings=self.trainings, batch_size=self.batch_size),
        )
        if x is not None and (
            len(x) != n or any(rows.ndim != 2 or rows.shape[1] != self.dimension for rows in x)
        ):
            raise ConfigError(f"x must have rows (n_i, {self.dimension}) of each of {n:,} clients.")
        # Counts enter sensitivities and rates: a float or a negative number must not get there.
        set_(self, "counts", whole_numbers("counts", self.counts, n))
        if self.total is not None and self.total < self.counts.sum():
            raise ConfigError(
                f"total is {self.total:,}, and the clients here have {self.counts.sum():,} records."
            )
        if self.caps is not None:
            set_(self, "caps", whole_numbers("caps", self.caps, n))
        if self.addresses.shape != (n,) or torch.unique(self.addresses).numel() != n:
            raise ConfigError(
                f"keys must be {n:,} numbers, all different, one a client: they address the noise."
            )
        _ = self.rates  # refuses a rate outside of its range
        if (self.local_steps % self.trainings != 0).any():
            raise PrivacyError(
                f"{self.trainings} trainings cannot share the local steps of a "
                "participation equally."
            )

    def with_canaries(self, canaries: int) -> GradientPlan:
        """Returns this plan with more records, for canaries.

        They are divided equally among the clients that have the most common number of records, or
        of uses if each has a cap of its own: these clients have one cost.

        Args:
            canaries: about their number in all.
        """
        if self.caps is None:
            sizes = self.counts
        else:
            sizes = self.caps * (self.counts > 0)
        numbers, clients = np.unique(sizes, return_counts=True)
        # Clients of one size have one cost, so all canaries measure the same claim.
        group = sizes == numbers[clients == clients.max()].max()
        return replace(self, counts=self.counts + group * max(1, round(canaries / group.sum())))

    def check(self, *, clients: int | None) -> None:
        """Refuses settings that rounds, or clients that act one at a time, do not follow.

        Args:
            clients: number of clients of the rounds; None if clients act one at a time.

        Raises:
            PrivacyError: named.
        """
        if clients is None and self.caps is None:
            raise PrivacyError(
                "Clients that act one at a time need GradientPlan(caps=...), the most uses of each."
            )
        kind = "clients that act one at a time"
        unused = ["batch_size", "steps"]
        if clients is not None:
            kind = "rounds"
            unused = ["caps", "allocation", "published"]
            if clients != len(self.ids):
                raise PrivacyError(
                    f"The GradientPlan has {len(self.ids):,} clients, and the sampler {clients:,}."
                )
        for name in unused:
            if getattr(self, name) is not None:
                raise PrivacyError(
                    f"GradientPlan({name}=...) is not for {kind}, whose releases do not follow it; "
                    "leave it out."
                )

    def under(self, privacy: Sequence[RecordPrivacy]) -> GradientPlan:
        """Returns this plan with the fields that depend on the privacy settings of a run.

        Args:
            privacy: the settings, those of all repetitions or of each.
        """
        noised = next((each for each in privacy if not each.noiseless), None)
        # A run that only clips has no noise for a step size to follow.
        if noised is None or self.given_noise is None:
            return self
        return replace(self, **self.given_noise(noised), given_noise=None)

    @property
    def relation(self) -> RecordRelation:
        """Returns the neighbouring relation: in rounds a record is left out, otherwise it is
        replaced."""
        if self.caps is None:
            return "zero_out"
        return "replace"

    @cached_property
    def rates(self) -> np.ndarray:
        """Returns q_i, (n,) float64."""
        if self.batch_size is not None:
            # A client with fewer records than a batch uses all of them in every step.
            rates: np.ndarray = np.minimum(1.0, self.batch_size / np.maximum(self.counts, 1))
            return rates
        values = np.asarray(self.rate)
        n = len(self.ids)
        fits = values.shape in ((), (n,)) and values.dtype.kind in "fiu"
        if not fits or not bool(((values > 0) & (values <= 1)).all()):
            raise ConfigError(
                f"rate is {self.rate!r}; it must be in (0, 1], one for all or for "
                f"each of {n:,} clients."
            )
        return np.array(np.broadcast_to(values, (n,)), dtype=np.float64)

    @cached_property
    def local_steps(self) -> np.ndarray:
        """Returns (n,) int64 noised sums of one use."""
        n = len(self.ids)
        if self.steps is None:
            return np.ones(n, dtype=np.int64)
        return whole_numbers("steps", self.steps, n)

    @cached_property
    def addresses(self) -> Tensor:
        """Returns int64 (n,) keys of the clients."""
        if self.keys is None:
            return torch.arange(len(self.ids))
        return self.keys

    @property
    def expected(self) -> np.ndarray:
        """Returns (n,) float64: q_i n_i, the public numbers by which sums over all records are
        divided."""
        expected: np.ndarray = self.rates * self.counts
        return expected

    @property
    def records(self) -> int:
        """Returns N, the public number of the records of all clients."""
        if self.total is not None:
            return self.total
        return int(self.counts.sum())

    @property
    def public_digest(self) -> str:
        """Returns a digest of public numbers that the noise depends on: a resumed run must have the
        same ones."""
        counts = np.ascontiguousarray(self.counts)
        digest = hashlib.blake2b(
            f"{counts.dtype} {counts.shape} ".encode() + counts.tobytes(), digest_size=16
        )
        return digest.hexdigest()

    def describe(self) -> str:
        """Returns a phrase on the records that take part in a release, for the report."""
        low = float(self.rates.min(initial=1.0))
        high = float(self.rates.max(initial=0.0))
        if self.batch_size is not None:
            return (
                f"Poisson over records, expected batch {self.batch_size} (q = {low:.4g} to "
                f"{high:.4g} by client)"
            )
        use = "local step" if self.relation == "zero_out" else "activation"
        if low == 1.0:
            return f"all records of a client in every {use}"
        q = f"q = {low:.4g}"
        if low != high:
            q += f" to {high:.4g} by client"
        return f"Poisson over the records of a client, {q}: drawn anew for every {use} and secret"


def whole_numbers(name: str, values: ArrayLike, clients: int) -> np.ndarray:
    """Returns (n,) int64 of whole numbers of at least 0.

    Raises:
        ConfigError: something else.
    """
    entries = np.asarray(values)
    if entries.shape != (clients,) or entries.dtype.kind not in "iu" or bool((entries < 0).any()):
        raise ConfigError(
            f"{name} has shape {entries.shape} and dtype {entries.dtype}; it must be a whole "
            f"number of at least 0 for each of {clients:,} clients."
        )
    return entries.astype(np.int64)


# The privacy cost of the releases


def record_costs(
    privacy: Sequence[RecordPrivacy],
    plan: GradientPlan,
    caps: np.ndarray,
    delta: float,
    *,
    prior: StoredNoise | None = None,
) -> tuple[AccountCosts, np.ndarray]:
    """Calibrates the noise of every kind of client.

    Args:
        privacy: settings of all repetitions, or of each.
        plan: the releases.
        caps: (n,) int64, most uses of each client.
        delta: of every epsilon.
        prior: the noise of the run that is resumed, or None; see :func:`calibrate_accounts`.

    Returns:
        The costs of all clients, and int64 (n,) the most uses of each: fewer than ``caps`` if a
        fixed noise multiplier and a budget are given.

    Raises:
        ConfigError: a budget that cannot be met, or weights that do not fit.
    """
    if len(privacy) > 1 and any(
        each.epsilon is not None and each.noise_multiplier is not None for each in privacy
    ):
        raise ConfigError(
            "Repetitions with settings of their own have the caps of all; give epsilon or "
            "noise_multiplier."
        )

    @cache
    def cost(rate: float, sums: int, weights: tuple[float, ...] | None) -> PrivacyCost:
        return PrivacyCost(
            law=privacy[0].mechanism,
            sizes=(plan.dimension,),
            delta=delta,
            sampled=rate,
            replaced=plan.relation == "replace",
            sums=sums,
            weights=weights,
        )

    uses = map(
        cost, plan.rates.tolist(), plan.local_steps.tolist(), _weights(plan.allocation, caps)
    )
    accounts = list(zip(uses, caps.tolist(), strict=True))
    asked = [
        [
            Demand(use, budget, settings.noise_multiplier, cap)
            for (use, cap), budget in zip(accounts, settings.budgets(plan.ids), strict=True)
        ]
        for settings in privacy
    ]
    refuted = None
    if plan.published is not None:
        refuted = plan.published.why_invalid
    return calibrate_accounts(asked, prior or StoredNoise(), ids=plan.ids, refuted=refuted)


def _weights(
    allocation: Sequence[np.ndarray] | None, caps: np.ndarray
) -> list[tuple[float, ...] | None]:
    """Returns normalized weights by client; None if all are equal."""
    if allocation is None:
        return [None] * caps.size
    if len(allocation) != caps.size:
        raise ConfigError(
            f"The allocation has weights for {len(allocation):,} clients, there are {caps.size:,}."
        )
    by_client = list[tuple[float, ...] | None]()
    scaled = lru_cache(normalized)
    for client, (values, cap) in enumerate(zip(allocation, caps.tolist(), strict=True)):
        array = np.asarray(values, dtype=np.float64)
        if array.shape != (cap,):
            raise ConfigError(
                f"The allocation of client {client} has shape {array.shape}; it may "
                f"act {cap} times."
            )
        # Equal weights are no weights: their cost is shared with the clients that have none.
        equal = cap == 0 or bool((array == array[0]).all() and 0 < array[0] < math.inf)
        if equal:
            by_client.append(None)
        else:
            by_client.append(scaled(tuple(array.tolist())))
    return by_client
