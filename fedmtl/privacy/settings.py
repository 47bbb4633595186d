"""Privacy settings, as the user gives them; everything else (sensitivity, noise, accounting) is
derived from these."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated, ClassVar, Literal

from .._check import (
    Below1,
    Checked,
    Count,
    Fraction,
    Positive,
    Range,
    bounded,
    fraction,
    given,
    id_of,
    one_of,
    positive,
)
from .._rounding import rounded_up
from ..errors import ConfigError
from .aggregation import SecureAggregation
from .noise.laws import LAWS
from .quantile import QuantileClip
from .report import SERVER_AND_CLIENTS

SourceName = Literal["seeded", "secure"]
Mechanism = str
"""The name of a law of noise, see :data:`~fedmtl.privacy.noise.laws.LAWS`."""

_BUDGET = Range(lambda v: v > 0, "a number above 0, inf for no noise")
Multiplier = Annotated[
    float,
    # their squares are doubles as well
    Range(lambda v: 1e-100 <= v <= 1e100, "a finite number above 0, from 1e-100 to 1e+100"),
]
"""Annotation of a setting that is a noise multiplier."""


_STABILITY = 0.01  # gamma, that of the paper's experiments

LEAST_DELTA = 1e-18
"""Smallest delta of settings: the accountant is compared with closed forms down to it
(tests/privacy/test_delta.py)."""


class _Budgeted(Checked):
    """The common part of both kinds of settings."""

    clip_norm: float | QuantileClip | None
    epsilon: float | Mapping[str, float] | None
    delta: float | None
    mechanism: Mechanism
    aggregation: SecureAggregation | None
    units: ClassVar[str]
    usual_observer: ClassVar[str]  # without a secure sum

    @property
    def observer(self) -> str:
        """Returns the parties that data are protected from, in words."""
        if self.aggregation is None:
            return self.usual_observer
        return SERVER_AND_CLIENTS

    def _check_aggregation(self) -> None:
        """Refuses a secure sum of other than independent Gaussian noise."""
        if self.aggregation is None:
            return
        name = f"{type(self).__name__}.aggregation"
        if not isinstance(self.aggregation, SecureAggregation):
            raise ConfigError(
                f"{name} is {self.aggregation!r}; give a SecureAggregation, or None for none."
            )
        if self.noiseless or self.mechanism != "gaussian":
            raise ConfigError(
                f"{name} adds shares of Gaussian noise; take mechanism='gaussian' and a finite "
                "epsilon."
            )

    @property
    def noiseless(self) -> bool:
        """Returns True if the settings ask for clipping only."""
        return self.epsilon == math.inf

    @property
    def initial_norm(self) -> float:
        """Returns C of the first step.

        Raises:
            ConfigError: without a clip norm.
        """
        norm = self.clip_norm
        if isinstance(norm, QuantileClip):
            norm = norm.initial
        if norm is None:
            name = type(self).__name__
            raise ConfigError(
                f"{name}.clip_norm is missing, and only the automatic settings choose one; give a "
                "number."
            )
        return float(norm)

    def resolved_delta(self, units: int) -> float:
        """Returns the delta of ``units`` clients or records: the one given, or ``min(1e-5, units **
        -1.1)``."""
        if self.delta is not None:
            return self.delta
        return min(1e-5, float(max(1.0, units) ** -1.1))

    def loose_delta(self, units: int) -> str | None:
        """Returns a warning of a delta at which one of ``units`` clients or records may be given
        away whole; None of a smaller one, and if nothing is noised."""
        if self.delta is None or self.noiseless or self.delta <= 1 / max(1, units):
            return None
        return (
            f"delta = {rounded_up(self.delta, 3)} is above 1 / {units:,}, one over the number of "
            f"{self.units}: it would allow that everything of one of them is released as it is, "
            "whatever epsilon says."
        )


@dataclass(frozen=True, kw_only=True)
class ClientPrivacy(_Budgeted):
    """Protects a client, with all its examples, by differential privacy.

    It holds against a coalition of all other clients, which know who of them took part in a step,
    and so, if cohorts have a fixed size, whether the protected client did.

    Args:
        clip_norm: bound C on the norm of everything one client contributes to one release, above 0:
            the L1 norm for ``mechanism="laplace"``, else the L2 norm. A :class:`QuantileClip`
            follows a quantile of the clients' norms instead, whose cost is part of the same budget.
            None for that of the automatic settings.
        epsilon: the budget. Without ``noise_multiplier`` the noise is calibrated to it; with one it
            is a hard budget that ends the run. ``math.inf`` clips without noise; the reported
            epsilon is then infinite.
        noise_multiplier: scale of the noise over the *sensitivity* of the sum (``clip_norm`` for
            add/remove, ``2 * clip_norm`` for replace-one), so that equal multipliers mean equal
            privacy. The scale is the standard deviation of Gaussian noise, and 1 / epsilon of one
            release for the Laplace laws.
        delta: probability of failure, from 1e-18 to below 1; default ``min(1e-5, n ** -1.1)`` for n
            clients.
        mechanism: ``"gaussian"`` (in secure mode drawn in whole numbers, exact in law, see
            :mod:`.noise.discrete`), ``"laplace"`` (independent coordinates), ``"l2_laplace"``
            (density decreasing in the L2 norm), or a law that a published method registers, such as
            ``"wishart"``, which protects nothing: epsilon is infinite, and the paper's claim stands
            beside it.
        bands: rounds over which Gaussian noise is correlated, so that much of it cancels in the sum
            of the releases (see :mod:`.noise.banded`); ``"auto"`` for as many as the schedule
            allows, None for independent noise. Only with :class:`CyclicCohorts`, and at most
            as many as there are rounds from one turn of a client to the next.
        aggregation: settings of a secure sum, in which the clients add the noise and no server is
            trusted; None for a trusted server, which adds it.
        source: ``"seeded"`` (reproducible simulation) or ``"secure"`` (operating system entropy).

    Raises:
        ConfigError: an impossible value, or neither ``epsilon`` nor ``noise_multiplier``.

    Example:
        >>> from fedmtl import ClientPrivacy
        >>> privacy = ClientPrivacy(clip_norm=0.5, epsilon=4.0)
        >>> privacy.mechanism, privacy.resolved_delta(1000)
        ('gaussian', 1e-05)
    """

    clip_norm: float | QuantileClip | None = None
    epsilon: Annotated[float, _BUDGET] | None = None
    noise_multiplier: Multiplier | None = None
    delta: Fraction | None = None
    mechanism: Mechanism = "gaussian"
    bands: Count | Literal["auto"] | None = None
    aggregation: SecureAggregation | None = None
    source: SourceName = "seeded"

    def __post_init__(self) -> None:
        _check_budget(self, self.epsilon)
        _check_delta(self)
        if not isinstance(self.clip_norm, QuantileClip):
            positive(self, **given(clip_norm=self.clip_norm))
        one_of(self, tuple(LAWS), mechanism=self.mechanism)
        if isinstance(self.clip_norm, QuantileClip) and (
            not LAWS[self.mechanism].joint or self.noiseless
        ):
            raise ConfigError(
                "ClientPrivacy.clip_norm follows a quantile only with Gaussian "
                "noise; give a number."
            )
        self._check_bands()
        self._check_aggregation()
        if self.aggregation is not None:
            self._check_sums()

    def _check_bands(self) -> None:
        # How many rounds correlate depends on the schedule, which the settings do not know.
        if self.bands is None:
            return
        if self.mechanism != "gaussian" or isinstance(self.clip_norm, QuantileClip):
            raise ConfigError(
                "ClientPrivacy.bands correlates Gaussian noise at a fixed clip norm; use "
                "mechanism='gaussian' and a number as clip_norm, or leave bands out."
            )

    def _check_sums(self) -> None:
        if self.bands is not None:
            raise ConfigError(
                "ClientPrivacy.aggregation has noise that is new in every round; leave bands out."
            )
        if isinstance(self.clip_norm, QuantileClip):
            raise ConfigError(
                "ClientPrivacy.aggregation takes a number as clip_norm: the count of a "
                "QuantileClip would need shares of its own."
            )

    units: ClassVar[str] = "clients"
    usual_observer: ClassVar[str] = "clients"


@dataclass(frozen=True, kw_only=True)
class RecordPrivacy(_Budgeted):
    """Protects one record (example) of one client by differential privacy.

    Every client perturbs the gradients of its own local training, so whatever it sends afterwards,
    and its own model, are functions of noised values. With an ``aggregation``, the clients' sums of
    gradients are added up in a secure sum instead, whose noise is that of one client alone. Every
    client has an account of its own. The number of records of each client is public: in rounds,
    neighbours differ by one record replaced by nothing (``"zero_out"``), and if clients act one at
    a time by one record replaced by another (``"replace"``).

    Args:
        clip_norm: bound C on the norm of one record's gradient, above 0: the L1 norm for
            ``mechanism="laplace"``, else the L2 norm. None for that of the automatic settings.
        epsilon: the budget of every client, or one for each by its id. As for
            :class:`ClientPrivacy`.
        noise_multiplier: scale of the noise over the sensitivity C, the same for every client.
        delta: from 1e-18 to below 1, or 0 (pure epsilon) without Gaussian noise; default
            ``min(1e-5, N ** -1.1)`` for N records of all clients.
        mechanism: ``"gaussian"``, ``"laplace"`` or ``"l2_laplace"``.
        clipping: ``"norm"`` scales gradients down that are longer than C, ``"automatic"`` scales
            every gradient g to ``C g / (norm(g) + 0.01)``, so that C and the step size are one
            setting and C needs no search (Bu et al., NeurIPS 2023). Local training in rounds takes
            it.
        aggregation: settings of a secure sum of the gradients of all clients, to which each of them
            adds a share of the noise; for :class:`~fedmtl.FedSGD`. None: every client adds noise of
            its own to its own gradients.
        source: as for :class:`ClientPrivacy`.

    Raises:
        ConfigError: an impossible value, or neither ``epsilon`` nor ``noise_multiplier``.

    Example:
        >>> from fedmtl import RecordPrivacy
        >>> privacy = RecordPrivacy(clip_norm=1.0, epsilon={"ann": 1.0, "bob": 4.0})
        >>> privacy.budgets(("ann", "bob"))
        (1.0, 4.0)
    """

    clip_norm: Positive | None = None
    epsilon: float | Mapping[str, float] | None = None
    noise_multiplier: Multiplier | None = None
    delta: Below1 | None = None
    mechanism: Mechanism = "gaussian"
    clipping: Literal["norm", "automatic"] = "norm"
    aggregation: SecureAggregation | None = None
    source: SourceName = "seeded"

    def __post_init__(self) -> None:
        accepted = tuple(name for name, law in LAWS.items() if law.refuted is None)
        one_of(self, accepted, mechanism=self.mechanism)
        if isinstance(self.epsilon, Mapping):
            budgets: list[float | None] = list(self.epsilon.values())
        else:
            budgets = [self.epsilon]
        for value in budgets:
            bounded(self, given(epsilon=value), _BUDGET)
            _check_budget(self, value)
        # Only laws with a pure epsilon have a guarantee at delta 0.
        if not LAWS[self.mechanism].pure:
            fraction(self, **given(delta=self.delta))
        if self.delta != 0:
            _check_delta(self)
        if isinstance(self.epsilon, Mapping) and math.inf in self.epsilon.values():
            raise ConfigError(
                "RecordPrivacy.epsilon is inf for some clients; give each a finite budget, or inf "
                "to all."
            )
        self._check_aggregation()
        if self.aggregation is not None and isinstance(self.epsilon, Mapping):
            raise ConfigError(
                "RecordPrivacy.aggregation has one noise for the records of all clients; give one "
                "number as epsilon."
            )

    units: ClassVar[str] = "records"
    usual_observer: ClassVar[str] = "server, other clients and public"

    @property
    def stability(self) -> float | None:
        """Returns gamma of automatic clipping; None without it."""
        if self.clipping == "automatic":
            return _STABILITY
        return None

    def budgets(self, ids: tuple[str, ...]) -> tuple[float | None, ...]:
        """Returns the budget of each client.

        Args:
            ids: of the n clients.

        Returns:
            Epsilon of each client, or None for a noise multiplier instead.

        Raises:
            ConfigError: a client without one, or an unknown client.
        """
        if not isinstance(self.epsilon, Mapping):
            return (self.epsilon,) * len(ids)
        known = set(ids)
        stated = {id_of(name): budget for name, budget in self.epsilon.items()}
        for name in stated:
            if name not in known:
                raise ConfigError(
                    f"RecordPrivacy.epsilon names {name!r}; the clients are "
                    f"{ids[0]!r} .. {ids[-1]!r}."
                )
        for name in ids:
            if name not in stated:
                raise ConfigError(
                    f"RecordPrivacy.epsilon has no budget for client {name!r}; give "
                    "one to every client."
                )
        return tuple(float(stated[name]) for name in ids)


Privacy = ClientPrivacy | RecordPrivacy


def _check_budget(owner: ClientPrivacy | RecordPrivacy, epsilon: float | None) -> None:
    """Refuses a budget and a noise multiplier that do not fit each other."""
    name = type(owner).__name__
    if epsilon is None and owner.noise_multiplier is None:
        raise ConfigError(
            f"{name} needs epsilon (the noise is calibrated to it), noise_multiplier, or both."
        )
    if epsilon == math.inf and owner.noise_multiplier is not None:
        raise ConfigError(
            f"{name}.epsilon=inf means no noise; leave noise_multiplier out, or epsilon."
        )


def _check_delta(owner: ClientPrivacy | RecordPrivacy) -> None:
    """Refuses a delta at which rounding of the accountant's transforms is as large as delta
    itself."""
    if owner.delta is not None and owner.delta < LEAST_DELTA:
        raise ConfigError(
            f"{type(owner).__name__}.delta is {owner.delta!r}; the accountant was measured down to "
            f"{LEAST_DELTA!r}, the least."
        )
