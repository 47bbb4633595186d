"""Accounting that stays true when the run stops, or chooses its next step, by looking at what was released.

*Filter.* Steps whose noise and sampling may depend on everything released before, under a fixed budget. For one Renyi
order a, fixed in advance, a step is admitted while the sum of the divergences at a stays within B; whatever was
chosen, the whole is (a, B)-RDP (Feldman, Zrnic, "Individual privacy accounting via a Renyi filter", NeurIPS 2021),
hence (epsilon, delta)-DP with ``epsilon = B + log((a - 1) / a) - (log delta + log a) / (a - 1)``
(Canonne, Kamath, Steinke 2020, Proposition 12). Taking the best order afterwards would not be covered.

*Odometer.* Equal steps and a stopping time tau that may depend on what was released. ``epsilon(event, tau, delta)`` is
wrong there: an observer who stops when the realized loss happens to be large looks at many epsilons, of which each
may fail with probability delta. Let T_0 < T_1 < ... be fixed numbers of steps, delta_j = 6 delta / (pi^2 (j + 1)^2),
which sum to delta, eps_j = epsilon(event, T_j, delta_j), and let the odometer read eps_J with J the first j with
tau <= T_j.

Claim: for neighbouring inputs with laws P and Q of the stopped transcript, and every set S of transcripts,
``P(S) <= E_Q[1_S exp(eps_J)] + delta``.

Proof. Let A_j be the transcripts with J = j. Whether J = j, and the stopped transcript then, is a function of the
first T_j releases of the run that goes on without regard to tau, since tau is a stopping time. That run is
(eps_j, delta_j)-DP, so what is made of its output is too: ``P(S and A_j) <= exp(eps_j) Q(S and A_j) + delta_j``. Sum
over j. (A reading above eps_J changes nothing, so the odometer shows the largest of eps_0 .. eps_J.)

In particular a run that stops before the reading exceeds a budget E is (E, delta)-DP, whatever else stops it.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from .._check import positive, positive_int
from .._rounding import rounded_up
from ..errors import BudgetExhausted, ConfigError
from .composition import check_relation, elementary, epsilon, renyi_curve
from .settings import Accountant


class PrivacyFilter:
    """A budget for steps that are chosen as the run goes on.

    Args:
        budget_epsilon, delta: guarantee of the whole, whatever is admitted.
        order: Renyi order, above 1; it must not depend on private data.
        planned: instead of ``order``, the event most steps are expected to have: the order that admits most of it is
            taken. With neither, the order that is best for Gaussian noise. A poor guess costs steps, not privacy.

    Attributes:
        order: the order.
        capacity: B, the Renyi divergence that may be spent.
        spent: Renyi divergence spent so far.

    Raises:
        ConfigError: a budget that is not positive, a delta outside (0, 1), or an order at which nothing fits.
    """

    def __init__(
        self, budget_epsilon: float, delta: float, *, order: float | None = None, planned: Any | None = None
    ) -> None:
        positive(self, budget_epsilon=budget_epsilon)
        _check_delta(self, delta)
        if order is not None and planned is not None:
            raise ConfigError("PrivacyFilter takes either an order or a planned event, not both.")
        self.budget_epsilon, self.delta = budget_epsilon, delta
        if order is not None:
            positive(self, order=order)
            if order <= 1:
                raise ConfigError(f"PrivacyFilter.order is {order!r}; it must be above 1.")
            self.order = float(order)
        else:
            self.order = self._best_order(planned)
        self.capacity = budget_epsilon - _conversion(self.order, delta)
        if self.capacity <= 0:
            raise ConfigError(
                f"PrivacyFilter: nothing fits epsilon = {rounded_up(budget_epsilon, 6)} at delta = "
                f"{rounded_up(delta, 6)} with Renyi order {self.order:g}. Use a larger order, epsilon or delta."
            )
        self.spent = 0.0
        self._sampled: dict[type, Any] = {}

    @property
    def epsilon_bound(self) -> float:
        """Epsilon at ``delta`` were the budget to end here: only for a stop that was fixed in advance."""
        return 0.0 if self.spent == 0 else self.spent + _conversion(self.order, self.delta)

    def admits(self, event: Any) -> bool:
        """Whether ``event`` still fits; nothing is spent.

        Raises:
            PrivacyError: an event without a known Renyi divergence, or of another relation than those before.
        """
        return self.spent + self._cost(event) <= self.capacity

    def spend(self, event: Any) -> None:
        """Charge ``event``, before anything of it is released.

        Raises:
            BudgetExhausted: it does not fit; nothing is charged, and a smaller event may still fit.
            PrivacyError: as for :meth:`admits`.
        """
        cost = self._cost(event)
        if self.spent + cost > self.capacity:
            raise BudgetExhausted(
                f"The step costs {cost:.4g} at Renyi order {self.order:g}, but only "
                f"{self.capacity - self.spent:.4g} of {self.capacity:.4g} is left of epsilon = "
                f"{rounded_up(self.budget_epsilon, 6)} at delta = {rounded_up(self.delta, 6)}."
            )
        self.spent += cost
        self._sampled.update({type(part): part for part, _ in elementary(event)})

    def _cost(self, event: Any) -> float:
        check_relation((*((part, 1) for part in self._sampled.values()), *elementary(event)))
        return float(renyi_curve(event, (self.order,))[0]) * (1 + 1e-12)

    def _best_order(self, planned: Any | None) -> float:
        orders = np.concatenate([np.arange(2.0, 65.0), 2.0 ** np.arange(6.5, 16.0, 0.5)])
        room = self.budget_epsilon - np.array([_conversion(order, self.delta) for order in orders])
        cost = orders if planned is None else renyi_curve(planned, tuple(orders.tolist()))
        with np.errstate(divide="ignore", invalid="ignore"):
            uses = np.where(room > 0, room / cost, -math.inf)
        return float(orders[int(np.nanargmax(uses))])


class Odometer:
    """A running epsilon that holds at every data-dependent stopping time at once.

    Args:
        event: one step, the same throughout.
        delta: in (0, 1), of all readings together.
        accountant: ``"pld"`` or ``"rdp"``.
        first: T_0, number of steps below which all readings are alike; 1 or, say, the number planned.
        growth: T_{j + 1} / T_j, above 1.
    """

    def __init__(
        self, event: Any, delta: float, accountant: Accountant = "pld", *, first: int = 1, growth: float = 2.0
    ) -> None:
        _check_delta(self, delta)
        positive_int(self, first=first)
        positive(self, growth=growth)
        if growth <= 1:
            raise ConfigError(f"Odometer.growth is {growth!r}; it must be above 1.")
        self.event, self.delta, self.accountant = event, delta, accountant
        self._grid, self._growth = [first], growth

    def epsilon(self, uses: int) -> float:
        """The reading after ``uses`` steps; 0 for none. It never falls.

        Raises:
            PrivacyError: an event that the accountant does not support.
        """
        if uses == 0:
            return 0.0
        j = self._index(uses)
        return max(self._reading(i) for i in range(j + 1))

    def largest_uses(self, budget: float) -> int:
        """The number of steps up to which the reading stays within ``budget``."""
        j = 0
        while self._reading(j) <= budget:
            j += 1
            if self._steps(j) > 1 << 40:
                break
        return self._steps(j - 1) if j else 0

    def _index(self, uses: int) -> int:
        j = 0
        while self._steps(j) < uses:
            j += 1
        return j

    def _steps(self, j: int) -> int:
        while len(self._grid) <= j:
            last = self._grid[-1]
            self._grid.append(max(last + 1, math.floor(self._growth * last)))
        return self._grid[j]

    def _reading(self, j: int) -> float:
        share = self.delta * 6 / (math.pi * (j + 1)) ** 2
        return epsilon(self.event, self._steps(j), share, accountant=self.accountant)


def _conversion(order: float, delta: float) -> float:
    """What turns a Renyi divergence of this order into epsilon at ``delta``."""
    return math.log1p(-1 / order) - (math.log(delta) + math.log(order)) / (order - 1)


def _check_delta(owner: object, delta: float) -> None:
    if not 0 < delta < 1:
        raise ConfigError(f"{type(owner).__name__}.delta is {delta!r}; it must be between 0 and 1.")
