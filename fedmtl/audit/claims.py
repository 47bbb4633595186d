"""The claims about all releases of a run, made from its setup and its costs."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import numpy as np
from dp_accounting import dp_event

from ..privacy.accounting.composition import epsilon
from ..privacy.cost import PrivacyCost
from ..privacy.costs import PrivacyCosts
from .claim import GRADIENTS, ROWS, Claim, composition, count_std, weighted

if TYPE_CHECKING:
    from .setup import Setup


class Claims:
    """The claims on all releases of a run; false if no noise is claimed.

    Args:
        setup: public facts.
        costs: what the account charges, or None.
        bands: of noise that is correlated over rounds, by release.

    Attributes:
        names: the releases: those of rows, ``"gradients"``, or ``"rows of <name>"``.
    """

    def __init__(
        self,
        setup: Setup,
        costs: PrivacyCosts | None,
        bands: Mapping[str, tuple[float, ...]] | None = None,
    ) -> None:
        self._setup = setup
        self._prices = costs
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
        return range(1 if self._setup.gradients is None else len(self._setup.sizes))

    def charged(self, uses: np.ndarray) -> np.ndarray:
        """Returns the uses of the accounts that have costs of their own.

        Args:
            uses: (n,) whole numbers, uses of each client.

        Returns:
            (m,), where m is 1 and the value the largest if clients share a cost.
        """
        if self._setup.gradients is None:
            return uses.max(keepdims=True)
        return uses

    def __bool__(self) -> bool:
        return bool(self.names) and self._prices is not None

    @property
    def costs(self) -> PrivacyCosts:
        """Returns the costs of the account."""
        assert self._prices is not None
        return self._prices

    @property
    def refuted(self) -> str | None:
        """Returns why the published accounting that is charged does not hold; None where it
        does."""
        return self.costs.refuted

    def cost(self, client: int = 0) -> tuple[PrivacyCost, float]:
        """Returns the privacy cost of an account and its noise multiplier.

        Args:
            client: whose account, if the unit is a record.
        """
        kind = self.costs.kind[0, 0 if self._setup.gradients is None else client]
        return self.costs.kinds[kind], self.costs.multipliers[kind]

    def of(self, name: str, client: int = 0, use: int = 0) -> Claim:
        """Returns the claim on a release.

        Args:
            name: of the release, or ``"<name>/count"`` for the count of its unclipped clients.
            client: whose account, if the unit is a record; with all its records.
            use: number of the use, from 0; beyond an allocation the last one. Of a clip norm that
                adapts the first.
        """
        key = name, client, use
        if key not in self._made:
            self._made[key] = self._claim(*key)
        return self._made[key]

    def _claim(self, name: str, client: int, use: int) -> Claim:
        setup = self._setup
        adaptive = self._setup.adaptive
        if name.endswith("/count"):  # which one client moves by 1/2, or by 1 if it is replaced
            assert adaptive is not None
            bound = 1.0 if self._exchanged(name.removesuffix("/count")) else 0.5
            claim = replace(
                self.of(name.removesuffix("/count")), law="gaussian", norm="l2", size=1, bound=bound
            )
            return replace(
                claim, relation="add_remove", multiplier=count_std(adaptive, setup.sampler) / bound
            )
        cost, multiplier = (None, 0.0) if self._prices is None else self.cost(client)
        if cost is None:
            law = setup.privacy.mechanism
        else:
            law = cost.mechanism
        if cost is None or cost.sampled == 1:
            sampled = None
        else:
            sampled = cost.sampled
        if cost is not None:
            multiplier = weighted(cost, multiplier, use)
        form = setup.form(name)
        d = setup.dimension(name)
        if adaptive is not None and cost is not None:  # the count takes its part
            count = count_std(adaptive, setup.sampler) / (1.0 if self._exchanged(name) else 0.5)
            multiplier = (multiplier**-2 - count**-2) ** -0.5
        return Claim(
            law=law,
            multiplier=multiplier,
            bound=setup.privacy.initial_norm,
            relation="replace" if self._exchanged(name) else setup.relation,
            norm="l1" if law == "laplace" and form != "symmetric" else "l2",
            form=form,
            size=d * (d + 1) // 2 if form == "symmetric" else d,
            denominator=setup.denominator(client, sampled),
            sampled=sampled,
            bands=self._bands.get(name, ()),
        )

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
        of_records = self._setup.gradients is not None
        return {
            "mechanism": "l2_laplace" if setup.rows else setup.privacy.mechanism,
            "sizes": tuple(self.of(name, client).size for name in self.names),
            "delta": setup.delta,
            "sampled": setup.rate(client),
            "replaced": setup.one_at_a_time,
            "sums": int(setup.records.local_steps[client]) if of_records else 1,
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
        whole, count = (
            parts[0]
            if len(parts) == 1
            else (dp_event.ComposedDpEvent([event for event, _ in parts]), 1)
        )
        return epsilon(whole, count, self._setup.delta)
