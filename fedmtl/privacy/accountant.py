"""The accountant of a run: it keeps the charges so far, composes their privacy cost, and checks
that the next step fits the budget.

Without caps there is one account, which is charged for every step. With caps every client has an
account of its own, which is charged for the steps in which it takes part, with a hard cap on their
number. Composition is in :mod:`.accounting`.
"""

from __future__ import annotations

import math

import numpy as np
import torch
from torch import Tensor

from .._rounding import rounded_up
from ..errors import BudgetExhausted, ConfigError, PrivacyError, ResumeError
from .account_costs import AccountCosts
from .ledger import Ledger


class PrivacyAccountant:
    """Keeps the charges of a run, or of R replicates of it, and composes them into epsilon.

    Charging, the check before it and the epsilon after it read the same counts, of one account or
    of one for each client; they stand in one class so that no caller can change one without the
    others.

    Args:
        clients: n, the population.
        steps: planned number of steps.
        costs: the privacy cost of the uses, or None if nothing is noised (epsilon is then
            infinite).
        budget: epsilon that ends the run, or None.
        caps: (n,) int64, the most participations of each client, if these are counted, and
            charged if there is a ledger; None: everybody is charged for every step.
        ledger: the record of the charges, or None if nothing is charged.
        replicates: R.

    Attributes:
        by_client: True if participations are counted.
        participations: (R, n) int64, up to the current step; 0 if they are not counted.
        left_out: participations of this session that were drawn for clients at their cap.
    """

    def __init__(
        self,
        clients: int,
        *,
        steps: int,
        costs: AccountCosts | None = None,
        budget: float | None = None,
        caps: np.ndarray | None = None,
        ledger: Ledger | None = None,
        replicates: int = 1,
    ) -> None:
        self.by_client = caps is not None
        if ledger is not None and self.by_client and replicates != 1:
            raise PrivacyError(
                "A ledger holds the charges of one run; replicates are simulations without one."
            )
        self.costs = costs
        self.budget = budget
        self.caps = caps
        self.ledger = ledger
        self._steps = steps
        self._fitting = 0  # uses that are known to fit the budget
        self._next: int | None = None  # the step after those of this session, once it has started
        self.left_out = 0
        self.participations = np.zeros((replicates, clients), dtype=np.int64)
        if ledger is not None and self.by_client:
            self.participations[0] = ledger.uses()

    # The charges

    @property
    def delta(self) -> float | None:
        """Returns the delta of every epsilon, or None if nothing is noised."""
        if self.costs is None:
            return None
        return self.costs.delta

    @property
    def steps_charged(self) -> int:
        """Returns steps charged up to the current one; in secure mode with everything earlier
        sessions charged."""
        # Fresh noise of an earlier session was released, whether or not this one repeats its steps.
        if self.ledger is not None and (self._next is None or not self.ledger.replays_free):
            return self.ledger.charged
        return self._next or 0

    @property
    def uses(self) -> np.ndarray:
        """Returns (R, m) int64 uses of every account up to the current step."""
        if self.by_client:
            return self.participations
        return np.full((len(self.participations), 1), self.steps_charged)

    @property
    def spent(self) -> np.ndarray:
        """Returns (R, m) int64 as :attr:`uses`, with the charges of earlier sessions for steps that
        this one has not reached again; all planned uses, if the rest is charged."""
        if self.ledger is None:
            return self.uses
        if self.caps is not None:
            if self.remaining_charged:
                return np.broadcast_to(self.caps, self.participations.shape)
            # The charges of a crashed session stay, even if this one stops earlier.
            by_client: np.ndarray = np.maximum(self.participations, self.ledger.uses())
            return by_client
        spent = max(self.ledger.charged, self.steps_charged, self.ledger.remaining or 0)
        return np.full((len(self.participations), 1), spent)

    # Their privacy cost

    def epsilons(self, *, spent: bool = False) -> np.ndarray:
        """Returns (R, m) float64 epsilon of every account after its :attr:`uses`; with ``spent``,
        and after an early stop, after its :attr:`spent` uses.

        Infinite without noise or if the accounting is refuted, 0 if nothing was charged.
        """
        if spent or self.remaining_charged:
            uses = self.spent
        else:
            uses = self.uses
        if self.costs is None or self.costs.refuted is not None:
            # Something without noise was released, or nothing was.
            return np.where(uses > 0, math.inf, 0.0)
        return self.costs.epsilons(uses)

    def epsilon_at(self, uses: np.ndarray | int) -> float:
        """Returns the largest epsilon after ``uses``, (m,) or of everybody: infinite if the
        accounting is refuted."""
        refuted = self.costs is not None and self.costs.refuted is not None
        if refuted and np.any(uses):
            return math.inf
        return self.claimed_at(uses)

    def claimed_at(self, uses: np.ndarray | int) -> float:
        """Returns the accountant's largest epsilon after ``uses``, whether it is refuted or not."""
        if not np.any(uses):
            return 0.0
        if self.costs is None:
            return math.inf
        return self.costs.epsilon(uses)

    # Charging

    def start(self, step: int) -> None:
        """Sets the account to ``step``, the first of this session; seeded: later charged steps will
        be replays.

        Raises:
            ConfigError: a step below 0.
            ResumeError: steps before this one are missing from the ledger.
        """
        if step < 0:
            raise ConfigError(f"step is {step}; steps are numbered from 0.")
        if self._next is not None:
            return
        if self.ledger is not None and self.ledger.reached < step:
            raise ResumeError(
                f"The run continues at step {step}, and in its ledger step {self.ledger.reached} "
                "is not charged."
            )
        if self.ledger is not None and self.ledger.replays_free and self.by_client:
            # Later steps are replays: they count again when they are reached, and not twice.
            self.participations[0] = self.ledger.uses(before=step)
        self._next = step

    def charge(self, first: int, members: np.ndarray) -> np.ndarray | None:
        """Charges a block of consecutive steps; on return the charge is written, in secure mode to
        the disk.

        Args:
            first: number of the first step; no step is charged twice in a session.
            members: (R, S, k) int64, the participants of each step; -1 is no client.

        Returns:
            (R, S, k) int64: in how many steps that client took part before, 0 for -1; None if
            that is not counted.

        Raises:
            BudgetExhausted: a step does not fit the budget, or a client is at its cap; nothing is
                charged.
            PrivacyError: a step that has begun already in this session, or does not follow the last
                one.
            ResumeError: charges of earlier steps are missing.
        """
        end = first + members.shape[1]
        if self._next is not None and first < self._next:
            raise PrivacyError(f"Step {first} has begun already; its noise would be used twice.")
        before: np.ndarray | None = None
        if self.caps is not None:
            before = self._before(members)
            self._check_caps(self.caps, before, members, first)
        if self.ledger is not None:
            cohorts = None
            if self.by_client:
                # The cohorts are in the line, so that each client's account can be read off the
                # file.
                cohorts = [
                    sorted(client for client in step if client >= 0) for step in members[0].tolist()
                ]
            else:
                self._check_budget(self.ledger, first, end)
            self.ledger.charge(first, end, cohorts)
        if before is not None:
            places = self._places(members)
            np.add.at(self.participations.reshape(-1), places[places >= 0], 1)
        self._next = end
        return before

    def charge_remaining(self, done: int) -> None:
        """Charges everything that was planned. Called on early stopping after ``done`` steps, which
        depends on the releases.

        Stopping is then post-processing of the whole run; the epsilon of the steps made would be
        wrong, since whether it is read at all depends on the data.
        """
        if self.ledger is None:
            return
        charged = self.steps_charged
        if not self.by_client:
            charged += max(0, self._room(charged, max(0, self._steps - done)))
        # steps that a crash lost are charged beside it
        if self.ledger.remaining is None or charged > self.ledger.remaining:
            self.ledger.charge_remaining(charged)

    @property
    def remaining_charged(self) -> bool:
        """Returns True if the run stopped early and is charged for all its planned steps."""
        return self.ledger is not None and self.ledger.remaining is not None

    def close(self) -> None:
        """Ends cleanly; idempotent."""
        if self.ledger is not None:
            self.ledger.close()

    def state(self) -> dict[str, Tensor]:
        """Returns the state that a checkpoint must keep because no file holds it."""
        if self.ledger is not None and len(self.participations) == 1:
            return {}
        if self.by_client:
            return {"uses": torch.from_numpy(self.participations.copy())}
        if len(self.participations) > 1:
            return {"charged": torch.tensor(self.steps_charged)}
        return {}

    def restore(self, state: dict[str, Tensor]) -> None:
        """Continues from :meth:`state`."""
        if "uses" in state:
            self.participations[:] = state["uses"].numpy()
        if "charged" in state and self.ledger is not None and int(state["charged"]):
            self.ledger.charge(0, int(state["charged"]))

    # Caps and the budget

    def below_caps(self, step: int, clients: Tensor, *, needed: bool) -> Tensor:
        """Returns the clients of a round that are below their caps.

        Charges are public, and sums are divided by the same number: the others count as before.

        Args:
            step: number of the round.
            clients: int64 (k,), its cohort.
            needed: True if a round without any of its clients is not to be charged.

        Raises:
            BudgetExhausted: it is needed, and there is none.
        """
        if self.caps is None:
            return clients
        able = clients[torch.from_numpy(self.participations[0] < self.caps)[clients]]
        if needed and len(able) < len(clients) and len(able) == 0:
            raise BudgetExhausted(
                f"Step {step}: all its clients have given the answers that their privacy pays "
                f"for, {int(self.caps[clients.numpy()].min())} each; steps that were interrupted "
                "and are repeated with new noise count among them."
            )
        self.left_out += len(clients) - len(able)
        return able

    def within_caps(self, members: np.ndarray) -> np.ndarray:
        """Returns ``members`` (R, S, k), as for :meth:`charge`, with -1 in place of clients at
        their caps."""
        if self.caps is None:
            return members
        return np.where(self._before(members) < self.caps[members], members, -1)

    def fitting(self, members: np.ndarray) -> np.ndarray:
        """Returns the number of steps of ``members`` (R, S, k) before the first one with a
        client past its cap: int64 (R,), S if there is none."""
        past = (self.within_caps(members) != members).any(2)
        first: np.ndarray = np.where(past.any(1), past.argmax(1), past.shape[1])
        return first

    def _places(self, members: np.ndarray) -> np.ndarray:
        """Returns the place of each entry of ``members`` (R, S, k) in the flat participations:
        int64 (R, S k); -1 for no client."""
        flat = members.reshape(len(members), -1)
        first = self.participations.shape[1] * np.arange(len(flat))[:, None]
        places: np.ndarray = np.where(flat >= 0, first + flat, -1)
        return places

    def _before(self, members: np.ndarray) -> np.ndarray:
        """Returns the participations before each entry of ``members`` (R, S, k), those of earlier
        steps of the block included: int64 of that shape; 0 for no client."""
        places = self._places(members)
        acting = places >= 0
        before = np.zeros(places.shape, dtype=np.int64)
        before[acting] = self.participations.ravel()[places[acting]] + _repeats(places[acting])
        return before.reshape(members.shape)

    def _check_caps(
        self, caps: np.ndarray, before: np.ndarray, members: np.ndarray, first: int
    ) -> None:
        """Raises BudgetExhausted if a client of a block takes part more often than its cap."""
        past = (members >= 0) & (before >= caps[members])
        if past.any():
            client = int(members[past].min())
            times = int(before[past & (members == client)].max()) + 1
            raise BudgetExhausted(
                f"Steps {first} to {first + members.shape[1] - 1}: client {client} would take part "
                f"{times} times, above its cap of {int(caps[client])}."
            )

    def _check_budget(self, ledger: Ledger, first: int, end: int) -> None:
        """Raises BudgetExhausted unless the steps [first, end) that are not charged yet fit the
        budget."""
        if ledger.replays_free:
            new = end - max(first, ledger.reached)
        else:
            new = end - first
        charged = ledger.charged
        # Charged steps that are only replayed need no room.
        if new > 0 and self._room(charged, new) < new:
            of = ""
            if self.budget is not None:
                of = f" of {rounded_up(self.budget, 6)}"
            raise BudgetExhausted(
                f"Step {first} would exceed the privacy budget: {charged} steps are charged, "
                f"epsilon = {rounded_up(self.claimed_at(charged))}{of}."
            )

    def _room(self, charged: int, wanted: int) -> int:
        """Returns the number of steps among ``wanted`` more ones that fit the budget."""
        if self.costs is None:
            return wanted
        limit = self.costs.max_uses
        if limit is not None:
            wanted = max(0, min(wanted, limit - charged))
        if self.budget is None:
            return wanted
        if charged + wanted > self._fitting:
            planned = max(self._steps, charged + wanted)
            if limit is not None:
                planned = min(planned, limit)
            # one figure answers for all the planned steps
            fits = self.claimed_at(planned) <= self.budget
            if fits:
                # Costs grow with uses: if all planned ones fit, none of them needs an accountant.
                self._fitting = planned
            else:
                self._fitting = self.costs.affordable(self.budget)
        return min(wanted, self._fitting - charged)


def _repeats(keys: np.ndarray) -> np.ndarray:
    """Returns the number of earlier entries of ``keys`` (m,) that are equal to each one, int64
    (m,)."""
    # Equal keys stand together after a stable sort, in the order in which they came.
    order = np.argsort(keys, kind="stable")
    starts = np.flatnonzero(np.diff(keys[order], prepend=-1))
    lengths = np.diff(starts, append=keys.size)
    repeats = np.empty(keys.size, dtype=np.int64)
    repeats[order] = np.arange(keys.size) - np.repeat(starts, lengths)
    return repeats
