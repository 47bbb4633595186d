"""Accounts of owners who act one at a time: uses as arrays, a hard cap for each, charged in blocks."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from ..errors import BudgetExhausted, PrivacyError, ResumeError
from .ledger import Ledger
from .owner_terms import OwnerTerms


class OwnerAccount:
    """Uses of every owner, of one run or of R repetitions of it.

    Args:
        caps: (n,) int64, most uses of each owner.
        terms: what they cost, or None without noise.
        ledger: where charges are kept, or None (without noise, and for repetitions, which are simulations).
        replicates: R.
    """

    def __init__(
        self, caps: np.ndarray, *, terms: OwnerTerms | None, ledger: Ledger | None, replicates: int = 1
    ) -> None:
        if ledger is not None and replicates != 1:
            raise PrivacyError("A ledger holds the charges of one run; repetitions are simulations without one.")
        self.caps, self.terms = caps, terms
        self._ledger, self._next = ledger, 0
        self._first = ledger is not None and ledger.firsts > 0  # whether the first release was charged
        self._first_mine = False  # and in this session
        self._ahead = 0, np.zeros(0, dtype=np.int64)  # what reserve wrote: first activation, and who acts
        self._uses = np.zeros((replicates, caps.size), dtype=np.int64)
        if ledger is not None:
            self._uses[0] = ledger.uses()

    @property
    def ledger(self) -> Ledger | None:
        """Where charges are kept, or None where nothing is charged or several repetitions are."""
        return self._ledger

    @property
    def uses(self) -> np.ndarray:
        """(R, n) int64 uses charged up to the current block."""
        return self._uses

    def start(self, step: int) -> None:
        """Set the account to the first activation of this session; seeded: later charged ones will be replays.

        Raises:
            ResumeError: activations before this one are missing from the ledger.
        """
        self._next = step
        if self._ledger is None:
            return
        if self._ledger.charged(before=step) < step:
            raise ResumeError(
                f"The run continues at activation {step}, but its ledger has charged only "
                f"{self._ledger.charged(before=step)} of those before."
            )
        if self._ledger.replays_free:
            self._uses[0] = self._ledger.uses(before=step)

    def charge_first(self) -> None:
        """Charge the first release of every owner that has one, once; on return the charge is on the disk.

        Raises:
            BudgetExhausted: an earlier session of secure mode was charged for it, and its noise is lost.
        """
        if self._first_mine or self.terms is None:
            return
        ledger = self._ledger
        if ledger is not None and ledger.firsts and not ledger.replays_free:
            raise BudgetExhausted(
                "The first release was charged in an earlier session and cannot be made again: its budget is spent. "
                "Start a new run."
            )
        if ledger is not None and not ledger.firsts:
            ledger.reserve_first()
        self._first_mine = self._first = True

    def reserve(self, first: int, owners: np.ndarray) -> None:
        """Write the charges of activations to come, so that the blocks among them find theirs on the disk.

        One line serves many blocks; :meth:`charge` says what an owner has used, and what never begins returns when the
        run closes. Only where a charged activation is free to be repeated: fresh noise must not be charged ahead of
        its block, since a crash would spend it.

        Args:
            first: number of the first activation.
            owners: (R, S) int64, as for :meth:`charge`; nothing is written where they pass a cap.
        """
        if self._ledger is None or not self._ledger.replays_free:
            return
        _, (_, who), totals = self._counted(owners)
        if (totals <= self.caps[who]).all():
            new = self._write(self._ledger, first, owners[0])
            self._ahead = new, owners[0, new - first :].copy()

    def charge(self, first: int, owners: np.ndarray) -> np.ndarray:
        """Charge a block of activations; on return the charge is on the disk.

        Args:
            first: number of the first activation of the block; blocks follow one another.
            owners: (R, S) int64, who acts; -1 is nobody.

        Returns:
            (R, S) int64: how many answers of the owner, in that repetition, were charged before; 0 of nobody.

        Raises:
            BudgetExhausted: an owner would pass its cap; nothing is charged.
            PrivacyError: a block that does not follow the last one.
            ResumeError: a replay with other owners, or without the first release that comes before.
        """
        if first != self._next:
            raise PrivacyError(f"Activation {first} does not follow {self._next - 1}; its noise could be used twice.")
        end = first + owners.shape[1]
        before, acting, totals = self._counted(owners)
        replicates, who = acting
        over = np.flatnonzero(totals > self.caps[who])
        if over.size:
            owner = int(who[over[0]])
            raise BudgetExhausted(
                f"Activations {first} to {end - 1}: owner {owner} would act {int(totals[who == owner].max())} times, "
                f"above its cap of {int(self.caps[owner])}."
            )
        if self.terms is not None and self.terms.firsts.any():
            if first == 0:
                self.charge_first()
            elif not self._first:
                raise ResumeError(f"Activation {first} comes after a first release, which was never charged.")
        if self._ledger is not None:
            self._reserve(self._ledger, first, owners[0])
        self._uses[replicates, who] = totals
        self._next = end
        return before

    def _counted(self, owners: np.ndarray) -> tuple[np.ndarray, tuple[np.ndarray, np.ndarray], np.ndarray]:
        """Uses before every activation (R, S); the pairs (replicates, owners) that act, and their uses after all."""
        n = self.caps.size
        keys = np.where(owners >= 0, owners + n * np.arange(len(owners))[:, None], -1).ravel()
        order = np.argsort(keys, kind="stable")
        sorted_keys = keys[order]
        starts = np.flatnonzero(np.diff(sorted_keys, prepend=-2))
        lengths = np.diff(starts, append=keys.size)
        place = np.arange(keys.size) - np.repeat(starts, lengths)  # in time order: the sort is stable
        acting = sorted_keys[starts] >= 0
        pairs = np.divmod(sorted_keys[starts][acting], n)
        earlier = np.zeros(starts.size, dtype=np.int64)
        earlier[acting] = self._uses[pairs]
        before = np.empty(keys.size, dtype=np.int64)
        before[order] = np.where(sorted_keys >= 0, place + np.repeat(earlier, lengths), 0)
        return before.reshape(owners.shape), pairs, earlier[acting] + lengths[acting]

    def _write(self, ledger: Ledger, first: int, owners: np.ndarray) -> int:
        """Reserve what is not reserved yet of activations of ``owners`` (S,); returns the first of them."""
        end = first + owners.size
        new = ledger.reserved_until(first, end)
        if new < end:
            ledger.reserve(new, end, [[owner] if owner >= 0 else [] for owner in owners[new - first :].tolist()])
        return new

    def _reserve(self, ledger: Ledger, first: int, owners: np.ndarray) -> None:
        end = first + owners.size
        new = ledger.reserved_until(first, end)
        for step in range(first, first if self._foreseen(first, owners) else new):
            recorded = ledger.participants(step)
            if recorded is None or recorded.tolist() != [o for o in owners[step - first : step - first + 1] if o >= 0]:
                raise ResumeError(f"Activation {step} was charged to another owner; a replay has the same one.")
        self._write(ledger, first, owners)
        ledger.begin(first, end)

    def _foreseen(self, first: int, owners: np.ndarray) -> bool:
        """Whether activations are those that this session has reserved, with the same ``owners`` (S,)."""
        began, ahead = self._ahead
        return first >= began and np.array_equal(ahead[first - began : first - began + owners.size], owners)

    @property
    def forfeited(self) -> bool:
        """Whether the run stopped because of what it showed, and every owner is charged up to its cap."""
        return self._ledger is not None and self._ledger.forfeited is not None

    def forfeit(self) -> None:
        """Charge every owner up to its cap: stopping is then post-processing of a run that goes on."""
        if self._ledger is not None and not self.forfeited:
            self._ledger.forfeit(int(self._uses.sum()))

    def epsilons(self) -> np.ndarray | None:
        """(n,) epsilon of each owner after its uses, the largest of the repetitions; None without noise."""
        found = self.epsilons_by_repetition()
        return None if found is None else found.max(0)

    def epsilons_by_repetition(self, *, spent: bool = False) -> np.ndarray | None:
        """(R, n) epsilon of each owner after its uses, or after all that is ``spent``; None without noise."""
        if self.terms is None:
            return None
        uses = self.spent if spent or self.forfeited else self._uses
        return self.terms.epsilons(uses, first=self._first or self.forfeited)

    @property
    def firsts(self) -> int:
        """Number of first releases charged."""
        made = self.terms is not None and (self._first or self.forfeited)
        return int((self.terms.firsts > 0).sum()) if made and self.terms is not None else 0

    @property
    def spent(self) -> np.ndarray:
        """(R, n) as ``uses``, with the activations of earlier sessions that this one has not reached again; the caps,
        where the rest is forfeited."""
        if self.forfeited:
            return np.broadcast_to(self.caps, self._uses.shape)
        return self._uses if self._ledger is None else np.maximum(self._uses, self._ledger.spent_uses())

    def state(self) -> dict[str, Tensor]:
        """What a checkpoint must keep: the uses of repetitions, which no ledger holds."""
        if self._ledger is not None:
            return {}
        return {"uses": torch.from_numpy(self._uses.copy()), "first": torch.tensor(self._first)}

    def restore(self, state: dict[str, Tensor]) -> None:
        """Continue from :meth:`state`."""
        if "uses" in state:
            self._uses[:] = state["uses"].numpy()
            self._first = bool(state["first"])

    def close(self) -> None:
        """End cleanly; idempotent."""
        if self._ledger is not None:
            self._ledger.close()
