"""The account of a run: what has been charged, what that costs, and whether the next step still fits."""

from __future__ import annotations

import bisect
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from dp_accounting import dp_event
from torch import Tensor

from .._rounding import rounded_up
from ..errors import BudgetExhausted, ConfigError, PrivacyError, ResumeError
from .accounting.composition import StepEvent, epsilon, largest_uses
from .ledger import Ledger
from .samplers import BoundSampler

Uses = StepEvent | tuple[StepEvent, ...]
"""What one owner's uses cost: every use the same event, or the first, second, ... use each its own."""


@dataclass(frozen=True)
class Cost:
    """What uses cost: one entry for everybody, or one for each owner.

    Attributes:
        delta: of every epsilon.
        events: one entry, or one per owner, by rank: the event of each charge, or a tuple of the events of the first,
            second, ... use, whose cost after u uses is the composition of the first u. There is no use beyond them.
        repeats: charges in one use: one number, or one per owner (the local steps of one participation).
        refuted: why the published accounting, which the events are, does not hold; epsilon is then infinite.
    """

    delta: float
    events: tuple[Uses, ...]
    repeats: tuple[int, ...] = (1,)
    refuted: str | None = None

    @property
    def accountant(self) -> str:
        """The accountant that composes the events."""
        return self.step(0).accountant

    def step(self, owner: int, use: int = 0) -> StepEvent:
        """The event of one charge in the use numbered ``use`` (from 0) of ``owner``."""
        uses = self.events[owner]
        return uses[use] if isinstance(uses, tuple) else uses

    def limit(self, owner: int = 0) -> int | None:
        """The number of uses that have an event, or None where all uses have the same one."""
        uses = self.events[owner]
        return len(uses) if isinstance(uses, tuple) else None

    def epsilons(self, uses: np.ndarray | int) -> np.ndarray:
        """Epsilon of each owner after ``uses``, (n,) or a number; (1,) float64 where there is one event for all.

        The figures are the accountant's, refuted or not.
        """
        owners = np.broadcast_arrays(np.arange(len(self.events)), np.asarray(self.repeats), uses)
        return np.array([self._one(int(k), int(r), int(u)) for k, r, u in zip(*map(np.ravel, owners), strict=True)])

    def epsilon(self, uses: np.ndarray | int) -> float:
        """The largest epsilon after ``uses``: (n,) by owner, or the same number for everybody."""
        if len(self.events) == 1 and len(self.repeats) == 1:
            return self._one(0, self.repeats[0], int(np.max(uses, initial=0)))
        return float(self.epsilons(uses).max())

    def _one(self, owner: int, repeats: int, uses: int) -> float:
        if uses == 0 or repeats == 0:
            return 0.0
        steps = self.events[owner]
        if isinstance(steps, StepEvent):
            return epsilon(steps.event, repeats * uses, self.delta, accountant=steps.accountant)
        if uses > len(steps):
            raise PrivacyError(f"{uses} uses were charged, but the budget is allocated to {len(steps)}.")
        return epsilon(together(steps[:uses]).event, repeats, self.delta, accountant=steps[0].accountant)


def together(steps: Sequence[StepEvent]) -> StepEvent:
    """The uses of one owner as one event; the same accountant composes all of them."""
    return StepEvent(dp_event.ComposedDpEvent([step.event for step in steps]), steps[0].accountant)


class Account:
    """The charges of a run against its budget.

    Either every step is charged to everybody (one number), or each participation to the client that takes part, with
    a hard cap on the uses of each.

    Args:
        sampler: who takes part, with the cap on uses where it has one.
        steps: planned number of steps; blocks are not reserved beyond it.
        cost: what uses cost, or None where nothing is noised (epsilon is then infinite).
        budget: epsilon that ends the run, or None.
        ledger: where charges are kept, or None with ``cost`` None.
        replays_free: seeded mode: a step that is replayed after a crash is the same release.
        per_participation: a client is charged for the steps it took part in, not everybody for every step.
        caps: (n,) int64, most uses of each client by rank; None takes the sampler's cap.
        block: steps reserved by one flush to disk.
    """

    def __init__(
        self,
        sampler: BoundSampler,
        *,
        steps: int,
        cost: Cost | None = None,
        budget: float | None = None,
        ledger: Ledger | None = None,
        replays_free: bool = True,
        per_participation: bool = False,
        caps: np.ndarray | None = None,
        block: int = 16,
    ) -> None:
        self.cost, self.budget = cost, budget
        self.per_participation = per_participation and ledger is not None
        if caps is None and sampler.cap is not None:
            caps = np.full(sampler.n, sampler.cap, dtype=np.int64)
        self.caps = caps
        self._steps, self._block = steps, block
        self._ledger, self._replays_free = ledger, replays_free
        self._started = False
        self._begun: set[int] = set()
        self._capacity: int | None = None
        self._base = ledger.charged() if ledger is not None else 0
        self._uses = np.zeros(sampler.n, dtype=np.int64)
        if ledger is not None and self.per_participation:
            self._uses = ledger.uses()

    @property
    def ledger(self) -> Ledger | None:
        """Where charges are kept, or None where nothing is charged."""
        return self._ledger

    @property
    def delta(self) -> float | None:
        """Delta of every epsilon, or None where nothing is noised."""
        return None if self.cost is None else self.cost.delta

    @property
    def client_uses(self) -> Tensor:
        """(n,) int64 participations by rank; only kept where they are charged or capped."""
        return torch.from_numpy(self._uses)

    @property
    def uses(self) -> int:
        """Steps charged up to the current one (of the busiest client, where participations are charged)."""
        return int(self._uses.max()) if self.per_participation else self.steps_charged

    @property
    def steps_charged(self) -> int:
        """Steps charged up to the current one; in secure mode with everything earlier sessions charged."""
        return self._base + len(self._begun)

    @property
    def charged(self) -> int:
        """As ``uses``, but all that the ledger holds: reserved steps and crashed sessions too."""
        if self._ledger is None:
            return self.uses
        return int(self._ledger.uses().max()) if self.per_participation else self._ledger.charged()

    @property
    def spent(self) -> int:
        """As ``charged``, without the reservations that a clean close returns."""
        if self._ledger is None or self.per_participation:
            return int(np.max(self.spent_uses, initial=0))
        return max(self._ledger.spent(), self.uses, self._ledger.forfeited or 0)

    @property
    def forfeited(self) -> bool:
        """Whether the run stopped because of what it showed, and is charged as if it had gone on."""
        return self._ledger is not None and self._ledger.forfeited is not None

    def forfeit(self, done: int) -> None:
        """Charge everything that was planned: the run stops after ``done`` steps because of what it showed.

        Stopping is then post-processing of a run that goes on; the epsilon of the steps made would be wrong, since
        whether it is read at all depends on the data.
        """
        if self._ledger is not None and not self.forfeited:
            more = max(0, self._steps - done)
            charged = self.steps_charged
            self._ledger.forfeit(charged if self.per_participation else charged + max(0, self._room(charged, more)))

    def claimed_at(self, uses: np.ndarray | int) -> float:
        """The accountant's largest epsilon after ``uses`` steps, or participations of each client, (n,) by rank."""
        if not np.any(uses):
            return 0.0
        return math.inf if self.cost is None else self.cost.epsilon(uses)

    def epsilon_at(self, uses: np.ndarray | int) -> float:
        """As :meth:`claimed_at`, but infinite where the accounting is refuted."""
        refuted = self.cost is not None and self.cost.refuted is not None
        return math.inf if refuted and np.any(uses) else self.claimed_at(uses)

    @property
    def spent_uses(self) -> np.ndarray | int:
        """As ``spent``, by rank where participations are charged."""
        if self._ledger is None or not self.per_participation:
            return self.spent if self._ledger is not None else self.uses
        if self.forfeited and self.caps is not None:
            return self.caps
        return np.maximum(self._uses, self._ledger.uses())  # a session that fell back released more than this one yet

    def start(self, step: int, draw: Callable[[int], Tensor]) -> None:
        """Set the account to the first step of this session; seeded: later charged steps will be replays.

        Args:
            step: number of the step.
            draw: the cohort of an earlier step, given the uses so far.

        Raises:
            ResumeError: steps before this one are missing from the ledger.
        """
        if step < 0:
            raise ConfigError(f"step is {step}; steps are numbered from 0.")
        if self._started:
            return
        if self._ledger is None:
            self._base = step
            for earlier in range(0 if self.caps is None else step):  # no ledger remembers who took part: draw again
                self._uses[draw(earlier).numpy()] += 1
        elif self._ledger.charged(before=step) < step:
            raise ResumeError(
                f"The run continues at step {step}, but its ledger has charged only "
                f"{self._ledger.charged(before=step)} of the steps before."
            )
        elif self._replays_free:
            self._base = self._ledger.charged(before=step)
            if self.per_participation:
                self._uses = self._ledger.uses(before=step)
        self._started = True

    def assume(self, steps: int) -> None:
        """Note the first ``steps`` as charged, in an account in memory that continues another one."""
        if self._ledger is not None and steps:
            self._ledger.reserve(0, steps)
            for step in range(steps):
                self._ledger.begin(step)

    def charge(self, step: int, ranks: Tensor) -> None:
        """Charge ``step``; on return the charge is on the disk.

        Args:
            step: number of the step.
            ranks: (k,) distinct ranks that take part.

        Raises:
            BudgetExhausted: the step does not fit the budget, or a client is at its cap.
            PrivacyError: the step has begun already in this session.
            ResumeError: a replayed step with another cohort.
        """
        if step in self._begun:
            raise PrivacyError(f"Step {step} has begun already; its noise would be used twice.")
        if self._ledger is not None:
            if self.per_participation:
                self._reserve_participations(self._ledger, step, ranks.cpu().numpy())
            elif not self._ledger.reserved(step):
                self._reserve_block(self._ledger, step)
            self._ledger.begin(step)
        self._begun.add(step)
        if self.per_participation or self.caps is not None:
            self._uses[ranks.cpu().numpy()] += 1

    def close(self) -> None:
        """End cleanly: reservations that were never begun return to the budget; idempotent."""
        if self._ledger is not None:
            self._ledger.close()

    def _reserve_block(self, ledger: Ledger, step: int) -> None:
        length = max(1, min(self._block, self._steps - step))
        charged = ledger.charged()
        room = self._room(charged, length)
        if room < 1:
            of = "" if self.budget is None else f" of {rounded_up(self.budget, 6)}"
            raise BudgetExhausted(
                f"Step {step} would exceed the privacy budget: {charged} steps are charged, "
                f"epsilon = {rounded_up(self.claimed_at(charged))}{of}."
            )
        ledger.reserve(step, step + min(length, room))

    def _reserve_participations(self, ledger: Ledger, step: int, ranks: np.ndarray) -> None:
        if ledger.reserved(step):
            recorded = ledger.participants(step)
            if recorded is None or not np.array_equal(recorded, np.sort(ranks)):
                raise ResumeError(f"Step {step} was charged with another cohort; a replay draws the same one.")
            return
        if self.caps is not None and bool((self._uses[ranks] >= self.caps[ranks]).any()):
            full = int(self.caps[ranks][self._uses[ranks] >= self.caps[ranks]][0])
            raise BudgetExhausted(f"Step {step}: a client of the cohort has reached its cap of {full} uses.")
        ledger.reserve(step, step + 1, [np.sort(ranks).tolist()])

    def _room(self, charged: int, wanted: int) -> int:
        """How many of ``wanted`` more steps fit the budget."""
        if self.cost is None:
            return wanted
        limit = self.cost.limit()
        if limit is not None:
            wanted = max(0, min(wanted, limit - charged))
        if self.budget is None:
            return wanted
        if self._capacity is None:
            planned = max(self._steps, charged + wanted)
            if self.claimed_at(planned if limit is None else min(planned, limit)) <= self.budget:
                return wanted  # one figure answers for all the planned steps
            self._capacity = self._affordable(self.cost, self.budget)
        return min(wanted, self._capacity - charged)

    def _affordable(self, cost: Cost, budget: float) -> int:
        """The most steps that fit the budget."""
        limit = cost.limit()
        if limit is None:
            step = cost.step(0)
            return largest_uses(step.event, budget, cost.delta, accountant=step.accountant)
        return bisect.bisect_right(range(limit + 1), budget, key=lambda uses: cost.epsilon(uses)) - 1
