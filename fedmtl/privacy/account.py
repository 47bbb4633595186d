"""The account of a run: what has been charged, what that costs, and whether the next step still fits."""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np
import torch
from torch import Tensor

from ..errors import BudgetExhausted, ConfigError, PrivacyError, ResumeError
from .composition import epsilon, largest_uses
from .ledger import Ledger
from .release import StepEvent
from .samplers import BoundSampler


class Account:
    """One budget, one ledger; every step costs the same event.

    Args:
        sampler: who takes part, with the cap on uses where participations are charged.
        steps: planned number of steps; blocks are not reserved beyond it.
        event: what one step costs, or None where nothing is noised (epsilon is then infinite).
        delta: of every epsilon, or None with ``event`` None.
        budget: epsilon that ends the run, or None.
        ledger: where charges are kept, or None with ``event`` None.
        replays_free: seeded mode: a step that is replayed after a crash is the same release.
        per_participation: a client is charged for the steps it took part in, not everybody for every step.
        block: steps reserved by one flush to disk.
    """

    def __init__(
        self,
        sampler: BoundSampler,
        *,
        steps: int,
        event: StepEvent | None = None,
        delta: float | None = None,
        budget: float | None = None,
        ledger: Ledger | None = None,
        replays_free: bool = True,
        per_participation: bool = False,
        block: int = 16,
    ) -> None:
        self.event, self.delta, self.budget = event, delta, budget
        self.per_participation = per_participation and ledger is not None
        self._sampler, self._steps, self._block = sampler, steps, block
        self._capped = getattr(sampler, "max_uses", None) is not None
        self._ledger, self._replays_free = ledger, replays_free
        self._started = False
        self._begun: set[int] = set()
        self._capacity: int | None = None
        self._base = ledger.charged() if ledger is not None else 0
        self._uses = np.zeros(sampler.n, dtype=np.int64)
        if ledger is not None and self.per_participation:
            self._uses = ledger.uses()

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
            return self.uses
        return max(self._ledger.spent(), self.uses)

    def epsilon_at(self, uses: int) -> float:
        """Epsilon of ``uses`` steps (or participations of one client)."""
        if uses == 0:
            return 0.0
        if self.event is None or self.delta is None:
            return math.inf
        return epsilon(self.event.event, uses, self.delta, accountant=self.event.accountant)

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
            for earlier in range(step if self._capped else 0):  # no ledger remembers who took part: draw again
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
        if self.per_participation or self._capped:
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
            raise BudgetExhausted(
                f"Step {step} would exceed the privacy budget: {charged} steps are charged, "
                f"epsilon = {self.epsilon_at(charged):.4g} of {self.budget:g}."
            )
        ledger.reserve(step, step + min(length, room))

    def _reserve_participations(self, ledger: Ledger, step: int, ranks: np.ndarray) -> None:
        if ledger.reserved(step):
            recorded = ledger.participants(step)
            if recorded is None or not np.array_equal(recorded, np.sort(ranks)):
                raise ResumeError(f"Step {step} was charged with another cohort; a replay draws the same one.")
            return
        cap = getattr(self._sampler, "max_uses", None)
        if cap is not None and ranks.size and int(self._uses[ranks].max()) >= cap:
            raise BudgetExhausted(f"Step {step}: a client of the cohort has reached its cap of {cap} uses.")
        ledger.reserve(step, step + 1, np.sort(ranks).tolist())

    def _room(self, charged: int, wanted: int) -> int:
        """How many of ``wanted`` more steps fit the budget."""
        if self.budget is None or self.event is None or self.delta is None:
            return wanted
        if self._capacity is None:
            if self.epsilon_at(max(self._steps, charged + wanted)) <= self.budget:
                return wanted  # one figure answers for all the planned steps
            self._capacity = largest_uses(self.event.event, self.budget, self.delta, accountant=self.event.accountant)
        return min(wanted, self._capacity - charged)
