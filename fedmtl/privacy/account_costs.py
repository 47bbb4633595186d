"""Privacy costs of all accounts of a run, and the calibration of their noise."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property

import numpy as np

from .._files import Json
from .._rounding import rounded_up
from ..errors import ConfigError
from .cost import PrivacyCost
from .events import DpEvent


@dataclass(frozen=True)
class Demand:
    """The noise that settings ask for in one account.

    Args:
        cost: of the uses.
        budget: epsilon; infinite for no noise, None for no limit.
        multiplier: z; None for the smallest one that meets the budget.
        uses: planned number of uses, at least 0.
    """

    cost: PrivacyCost
    budget: float | None
    multiplier: float | None
    uses: int

    def met(self, of: str = "") -> tuple[float, int]:
        """Returns the noise multiplier, 0 for no noise, and how many of the planned uses the budget
        affords: all of them unless both budget and multiplier are given.

        Args:
            of: the account, for errors.

        Raises:
            ConfigError: no noise meets the budget; or one use with ``multiplier`` exceeds it,
                unless neighbours replace rows.
        """
        if self.budget == math.inf:
            return 0.0, self.uses
        if self.multiplier is None:
            assert self.budget is not None
            # An account of no use has a multiplier, too: that of a single sum.
            return self.cost.single().multiplier(self.budget, max(1, self.uses)), self.uses
        if self.budget is None:
            return float(self.multiplier), self.uses
        fitting = self.cost.affordable(self.budget, self.multiplier, self.uses)
        if fitting < min(self.uses, 1) and not self.cost.replaced:
            raise ConfigError(
                f"noise_multiplier {self.multiplier:g} spends more than epsilon = "
                f"{rounded_up(self.budget, 6)}{of} in one round at delta = "
                f"{rounded_up(self.cost.delta, 6)}. Raise noise_multiplier or epsilon, or leave "
                "the former out."
            )
        return float(self.multiplier), fitting


@dataclass(frozen=True, eq=False)
class AccountCosts:
    """The costs of all accounts of a run: those of one kind have the same cost and noise
    multiplier.

    One account means that everybody is charged for every step, n accounts that every client has its
    own.

    Attributes:
        kinds: distinct costs.
        multipliers: z of each kind, at a weight of 1; 0 is no noise.
        kind_of: int64 (P, m), the kind of every account; P is 1, or R if replicates have settings
            of their own.
        refuted: the reason why the published accounting, that of the events, does not hold; epsilon
            is then infinite.
    """

    kinds: tuple[PrivacyCost, ...]
    multipliers: tuple[float, ...]
    kind_of: np.ndarray
    refuted: str | None = None

    @property
    def delta(self) -> float:
        """Returns the delta of every epsilon."""
        return self.kinds[0].delta

    @cached_property
    def max_uses(self) -> int | None:
        """Returns the largest number of uses of the first account; None without a limit."""
        kind = int(self.kind_of[0, 0])
        return self.kinds[kind].max_uses

    def event(self, account: int = 0, use: int = 0, replicate: int = 0) -> DpEvent:
        """Returns the event of one noised sum in use number ``use`` (from 0) of ``account``."""
        if len(self.kind_of) == 1:
            replicate = 0  # all replicates have the same budgets
        kind = self.kind_of[replicate, account]
        return self.kinds[kind].event(self.multipliers[kind], use)

    def epsilons(self, uses: np.ndarray | int) -> np.ndarray:
        """Returns float64 (R, m), the epsilon of every account after ``uses``, (R, m), (m,) or one
        for all: that of the events, also if these are refuted. R is P at least."""
        kind, charges = np.broadcast_arrays(self.kind_of, np.asarray(uses))
        base = int(charges.max(initial=0)) + 1
        # Accounts of one kind with equal uses have one epsilon: of thousands of clients a few
        # are computed.
        distinct, index = np.unique(kind * base + charges, return_inverse=True)
        pairs = [divmod(int(item), base) for item in distinct]
        each = np.array(
            [self.kinds[k].epsilon(u, self.multipliers[k]) for k, u in pairs], dtype=np.float64
        )
        return each[index.reshape(kind.shape)]

    def epsilon(self, uses: np.ndarray | int) -> float:
        """Returns the largest epsilon after ``uses``, as for :meth:`epsilons`; of one account the
        most uses count."""
        return float(self.epsilons(uses).max())

    def affordable(self, budget: float) -> int:
        """Returns the largest number of uses of the first account whose epsilon is at most
        ``budget``."""
        kind = int(self.kind_of[0, 0])
        return self.kinds[kind].affordable(budget, self.multipliers[kind])

    def header(self, caps: np.ndarray | None) -> dict[str, Json]:
        """Returns JSON for a ledger: the number of accounts; one entry for every kind of them, with
        the cap on its uses of ``caps`` (m,), or None; and the kind of every account if there are
        several."""
        limits: list[int | None] = [None] * len(self.kinds)
        if caps is not None:
            for k in range(len(self.kinds)):
                limits[k] = int(caps[self.kind_of[0] == k].max(initial=0))
        kinds = [
            {"cost": cost.to_dict(), "multiplier": z, "cap": cap}
            for cost, z, cap in zip(self.kinds, self.multipliers, limits, strict=True)
        ]
        header: dict[str, Json] = {"accounts": self.kind_of.shape[1], "kinds": kinds}
        if len(kinds) > 1:
            header["kind_of"] = self.kind_of[0].tolist()
        return header

    @cached_property
    def by_account(self) -> np.ndarray:
        """Returns z of each account at a weight of 1, (P, m) float64."""
        multipliers: np.ndarray = np.array(self.multipliers)[self.kind_of]
        return multipliers

    def of_uses(self, accounts: np.ndarray, uses: np.ndarray) -> np.ndarray:
        """Returns the noise multipliers of the uses ``uses`` (from 0) of ``accounts``, both (R, S):
        (R, S) float64; 0 of account -1."""
        rows: int | np.ndarray = 0
        if len(self.kind_of) > 1:
            rows = np.arange(len(accounts))[:, None]
        multipliers = np.where(accounts >= 0, self.by_account[rows, accounts], 0.0)
        if all(cost.weights is None for cost in self.kinds):
            return multipliers
        start, weights = self._weights
        first = start[self.kind_of[0][accounts]]
        # Clients that do not act, and kinds without weights, have no weight to look up.
        some = (accounts >= 0) & (first >= 0)
        return np.where(some, multipliers / weights[np.where(some, first + uses, 0)], multipliers)

    @cached_property
    def _weights(self) -> tuple[np.ndarray, np.ndarray]:
        """Returns the weights of all kinds one after another, and the first place of each kind:
        -1 if it has none."""
        start = np.full(len(self.kinds), -1)
        weights = [1.0]
        for k, cost in enumerate(self.kinds):
            if cost.weights:
                start[k] = len(weights)
                weights += cost.weights
        return start, np.array(weights)


@dataclass(frozen=True)
class StoredKind:
    """The noise of one kind of account, as a ledger has it.

    Attributes:
        cost: values of :meth:`PrivacyCost.to_dict`.
        multiplier: z, at a weight of 1.
        cap: on its uses; None without one.
    """

    cost: Mapping[str, Json]
    multiplier: float
    cap: int | None


@dataclass(frozen=True)
class StoredNoise:
    """The noise of a run that is resumed: it stands as it was calibrated at first.

    Args:
        header: of the ledger that is resumed; empty without one.
    """

    header: Mapping[str, Json] = field(default_factory=dict)

    @property
    def kinds(self) -> list[StoredKind]:
        """Returns the kinds of accounts; none without a ledger."""
        kinds = []
        entries = self.header.get("kinds")
        # A header of another form is that of another run, which the ledger refuses.
        if isinstance(entries, list):
            for entry in entries:
                match entry:
                    case {
                        "cost": dict() as cost,
                        "multiplier": int() | float() as z,
                        "cap": int() | None as cap,
                    }:
                        kinds.append(StoredKind(cost, float(z), cap))
        return kinds

    def multiplier(self, key: str) -> float | None:
        """Returns the noise multiplier that the header has under a key; None without one."""
        value = self.header.get(key)
        if isinstance(value, float):
            return value
        return None


def calibrate_accounts(
    demands: Sequence[Sequence[Demand]],
    prior: StoredNoise,
    *,
    ids: Sequence[str] = (),
    refuted: str | None = None,
) -> tuple[AccountCosts, np.ndarray]:
    """Calibrates the noise of every kind of account. Accounts of equal demands are of one kind.

    Args:
        demands: of each of m accounts, in each replicate with settings of its own.
        prior: the noise and caps of a run that is resumed, which are taken; its ledger is refused
            if the rest differs.
        ids: of the accounts, for errors.
        refuted: see :class:`AccountCosts`.

    Returns:
        The costs, and int64 (m,), the number of uses of each account that its budget affords.

    Raises:
        ConfigError: a budget that cannot be met.
    """
    numbers: dict[Demand, int] = {}
    for row in demands:
        for demand in row:
            numbers.setdefault(demand, len(numbers))
    kind_of = np.array([[numbers[demand] for demand in row] for row in demands], dtype=np.int64)
    stored = prior.kinds
    # A resumed run keeps the noise it began with, to the last bit.
    if len(stored) == len(numbers):
        noise = [(kind.multiplier, kind.cap or 0) for kind in stored]
    else:
        noise = [
            demand.met(_account_name(ids, kind_of == number)) for demand, number in numbers.items()
        ]
    costs = AccountCosts(
        tuple(demand.cost for demand in numbers),
        tuple(multiplier for multiplier, _ in noise),
        kind_of,
        refuted,
    )
    uses = np.array([uses for _, uses in noise], dtype=np.int64)
    return costs, uses[kind_of[0]]


def _account_name(ids: Sequence[str], members: np.ndarray) -> str:
    """Returns the first account of a kind, in words; ``members`` (P, m) are of the kind."""
    if not ids:
        return ""
    return f" of client {ids[int(members.any(0).argmax())]!r}"
