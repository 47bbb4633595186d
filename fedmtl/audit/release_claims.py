"""The claims about all releases of a run, made from its setup and its costs."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
from dp_accounting import dp_event

from ..privacy.account_costs import AccountCosts
from ..privacy.accounting.composition import epsilon
from ..privacy.cost import PrivacyCost
from .claim import GRADIENTS, ROWS, Claim, composition, count_std, weighted

if TYPE_CHECKING:
    from .setup import Setup

_COUNT = "/count"
"""At the end of the name of the count of a release's unclipped clients."""


class ReleaseClaims:
    """The claims on all releases of a run; false if no noise is claimed.

    Args:
        setup: public facts.
        costs: the costs that the accountant charges, or None.
        bands: of noise that is correlated over rounds, by release.

    Attributes:
        names: the releases: those of rows, ``"gradients"``, or ``"rows of <name>"``.

    Example:
        >>> from fedmtl import ClientPrivacy, FullParticipation
        >>> from fedmtl.audit import ReleaseClaims, Setup
        >>> from fedmtl.privacy import ReleasePlan
        >>> setup = Setup(
        ...     privacy=ClientPrivacy(clip_norm=1.0, epsilon=8.0, delta=1e-5),
        ...     plans=(ReleasePlan(name="update", dimension=3),),
        ...     schedule=FullParticipation().bind(10),
        ...     steps=2,
        ... )
        >>> bool(ReleaseClaims(setup, None)), ReleaseClaims(setup, None).names  # nothing is charged
        (False, ('update',))
    """

    def __init__(
        self,
        setup: Setup,
        costs: AccountCosts | None,
        bands: Mapping[str, tuple[float, ...]] | None = None,
    ) -> None:
        self._setup = setup
        self._costs = costs
        self._bands = bands or {}
        self._made: dict[tuple[str, int, int], Claim] = {}
        self.names: tuple[str, ...] = tuple(plan.name for plan in setup.releases)
        if setup.gradients is not None:
            self.names = (GRADIENTS,)
        elif setup.rows:
            self.names = (f"{ROWS}{setup.rows}",)

    @property
    def accounts(self) -> range:
        """Returns the accounts with costs of their own: one for each client if the unit is a
        record, else one."""
        if self._setup.gradients is None:
            return range(1)
        return range(len(self._setup.sizes))

    def charged(self, uses: np.ndarray) -> np.ndarray:
        """Returns the uses of the accounts that have costs of their own.

        Args:
            uses: (n,) whole numbers, uses of each client.

        Returns:
            (m,); m is 1 and the value the largest if clients share a cost.
        """
        if self._setup.gradients is None:
            return uses.max(keepdims=True)
        return uses

    def __bool__(self) -> bool:
        return bool(self.names) and self._costs is not None

    @property
    def costs(self) -> AccountCosts:
        """Returns the costs of the account."""
        assert self._costs is not None
        return self._costs

    @property
    def refuted(self) -> str | None:
        """Returns the reason why the published accounting that is charged does not hold; None if it
        does."""
        return self.costs.refuted

    def cost(self, client: int = 0) -> tuple[PrivacyCost, float]:
        """Returns the privacy cost of an account and its noise multiplier.

        Args:
            client: whose account, if the unit is a record.
        """
        if self._setup.gradients is None:
            client = 0  # all clients share a cost
        kind = self.costs.kind_of[0, client]
        return self.costs.kinds[kind], self.costs.multipliers[kind]

    def of(self, name: str, client: int = 0, use: int = 0) -> Claim:
        """Returns the claim on a release.

        Args:
            name: of the release, or ``"<name>/count"`` for the count of its unclipped clients.
            client: whose account, if the unit is a record; with all its records.
            use: number of the use, from 0; beyond an allocation the last one. If the
                clip norm adapts, the first one.
        """
        key = name, client, use
        if key not in self._made:
            self._made[key] = self._claim(*key)
        return self._made[key]

    def _claim(self, name: str, client: int, use: int) -> Claim:
        if name.endswith(_COUNT):
            return self._claim_on_count(name.removesuffix(_COUNT))
        setup = self._setup
        law = setup.privacy.mechanism
        multiplier = 0.0
        sampled = None
        if self._costs is not None:
            cost, multiplier = self.cost(client)
            law = cost.law
            multiplier = self._without_count(name, weighted(cost, multiplier, use))
            if cost.sampled != 1:
                sampled = cost.sampled
        form = setup.form(name)
        size = setup.dimension(name)
        norm: Literal["l1", "l2"] = "l2"
        if form == "symmetric":
            size = size * (size + 1) // 2
        elif law == "laplace":
            norm = "l1"
        relation = setup.relation
        if self._exchanged(name):
            relation = "replace"
        return Claim(
            law=law,
            multiplier=multiplier,
            bound=setup.privacy.initial_norm,
            relation=relation,
            norm=norm,
            form=form,
            size=size,
            denominator=setup.denominator(client, sampled),
            sampled=sampled,
            bands=self._bands.get(name, ()),
            shares=setup.shares,
        )

    def _claim_on_count(self, name: str) -> Claim:
        """Returns the claim on the count of the unclipped clients of a release."""
        bound = self._count_bound(name)
        return replace(
            self.of(name),
            law="gaussian",
            norm="l2",
            size=1,
            bound=bound,
            relation="add_remove",
            multiplier=self._count_std() / bound,
        )

    def _without_count(self, name: str, multiplier: float) -> float:
        """Returns the noise multiplier of a sum of rows, from that of the sum and its count.

        Both are one Gaussian release, of which the count takes its part if the clip norm adapts.
        """
        if self._setup.adaptive is None:
            return multiplier
        count = self._count_std() / self._count_bound(name)
        return (multiplier**-2 - count**-2) ** -0.5

    def _count_std(self) -> float:
        """Returns the standard deviation of the noise on a count."""
        adaptive = self._setup.adaptive
        assert adaptive is not None
        return count_std(adaptive, self._setup.sampler)

    def _count_bound(self, name: str) -> float:
        """Returns the sensitivity of a count: 1/2, or 1 if one client replaces another."""
        if self._exchanged(name):
            return 1.0
        return 0.5

    def _exchanged(self, name: str) -> bool:
        """Returns True if neighbours have two rows in a release instead of one or none. That is
        so if a unit is replaced, or if the data of a client are replaced by nothing and clients
        without data send rows."""
        setup = self._setup
        if setup.gradients is not None or setup.rows or setup.relation != "zero_out":
            return setup.relation == "replace"
        return setup.release(name).without_data

    def facts(self, client: int = 0) -> dict[str, Any]:
        """Returns the cost facts of an account that follow from the settings and public facts.

        Args:
            client: whose account, if the unit is a record.

        Returns:
            The facts by the names of :class:`~fedmtl.privacy.PrivacyCost`.
        """
        setup = self._setup
        law = setup.privacy.mechanism
        if setup.rows:
            law = "l2_laplace"
        sums = 1
        if setup.gradients is not None:
            sums = int(setup.records.local_steps[client])
        return {
            "law": law,
            "sizes": tuple(self.of(name, client).size for name in self.names),
            "delta": setup.delta,
            "sampled": setup.rate(client),
            "replaced": setup.one_at_a_time,
            "sums": sums,
            "bands": max([1, *map(len, self._bands.values())]),
        }

    def spent(self, client: int, uses: int) -> float:
        """Returns epsilon of an account after ``uses``, at the delta of the settings; see
        :func:`composition`.

        Args:
            client: whose account, if the unit is a record.
            uses: number of uses, from 0.
        """
        parts = [(event, count) for event, count in composition(*self.cost(client), uses) if count]
        if not parts:
            return 0.0
        if len(parts) == 1:
            event, count = parts[0]
            return epsilon(event, count, self._setup.delta)
        whole = dp_event.ComposedDpEvent([event for event, _ in parts])
        return epsilon(whole, 1, self._setup.delta)
