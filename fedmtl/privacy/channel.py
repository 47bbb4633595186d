"""The channel: the only path from private rows to public values.

Clients take part in rounds (:class:`~fedmtl.privacy.round_channel.RoundChannel`), or act one at a
time (:class:`~fedmtl.privacy.activation_channel.ActivationChannel`). Either way a step, a round or
a block of activations, begins with its charge in the ledger, in secure mode on the disk
(``BudgetExhausted`` before any data is read), and every release is clip, sum by segment (the
cohort, or a client), noise of the sum's sensitivity, division by a public constant.

R replicates of a run, each with its own noise (and its own clients, if these act one at a time),
are computed at once; they are simulations, and an epsilon is that of one of them.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Sequence

import numpy as np
from torch import Tensor

from .accountant import PrivacyAccountant
from .chain import Head
from .gradients import GradientPlan
from .noise.grid import GridValue
from .noise.sources import NoiseSource
from .records import Records
from .settings import Privacy, RecordPrivacy


class Channel(ABC):
    """The common part of both kinds of channel; :func:`~fedmtl.privacy.open_channel` makes them.

    Most of its methods answer one question of the report or of a checkpoint each.

    Attributes:
        settings: the privacy of all replicates, or of each; empty without privacy.
        privacy: the settings, of replicates those with the largest epsilon; None without privacy.
        law: name of the law of the noise; None without privacy.
        accountant: of the charges. costs: of the charges; None without noise.
        sources: of the noise and cohorts of each replicate.
        replicates: R, the replicates that are released at once.
        ledger_name: of the ledger, for the report.
        notes: of parts that no epsilon covers.
        records: the releases of the clients' own records, if the unit is one record; else None.

    Example:
        >>> from fedmtl import ClientPrivacy, FullParticipation
        >>> from fedmtl.privacy import ReleasePlan, open_channel
        >>> privacy = ClientPrivacy(clip_norm=1.0, epsilon=8.0, delta=1e-5)
        >>> plan = ReleasePlan(name="update", dimension=3)
        >>> channel = open_channel(privacy, [plan], FullParticipation().bind(10), seed=0, steps=2)
        >>> channel.begin(0, channel.draw(0))
        >>> 0 < channel.epsilon < channel.epsilon_at(2) <= 8.0
        True
    """

    def __init__(
        self,
        settings: tuple[Privacy, ...],
        accountant: PrivacyAccountant,
        sources: Sequence[NoiseSource],
        *,
        ledger_name: str = "none",
        notes: tuple[str, ...] = (),
    ) -> None:
        self.settings = settings
        self.accountant = accountant
        self.costs = accountant.costs
        self.sources = list(sources)
        self.privacy: Privacy | None = None
        self.law: str | None = None
        if settings:
            self.privacy = settings[0]
            self.law = settings[0].mechanism
        self.replicates = len(sources)
        self.ledger_name = ledger_name
        self.notes = notes
        self.records: Records | None = None

    # The settings and the noise

    @property
    def source(self) -> NoiseSource:
        """Returns the source of random bits of the first replicate."""
        return self.sources[0]

    @property
    def bound(self) -> float:
        """Returns C on the norm of a row, or of one record's gradient, in the first step; infinite
        without privacy."""
        if self.privacy is None:
            return math.inf
        return self.privacy.initial_norm

    @property
    def noised(self) -> bool:
        """Returns True if anything is noised."""
        return self.costs is not None

    @property
    def noise_multipliers(self) -> np.ndarray | None:
        """Returns the noise multiplier z of every account, at a weight of 1 if uses have weights.

        Returns:
            (m,) float64 for m accounts, 1 if all clients share one; (R, m) if replicates have
            budgets of their own; None without noise.
        """
        if self.costs is None:
            return None
        if len(self.costs.by_account) > 1:
            return self.costs.by_account
        shared: np.ndarray = self.costs.by_account[0]
        return shared

    @property
    def noise_multiplier(self) -> float | None:
        """Returns the largest z of all accounts and replicates; None without noise."""
        if self.costs is None:
            return None
        return max(self.costs.multipliers)

    @property
    def caps(self) -> np.ndarray:
        """Returns (n,) int64, the most uses of each client."""
        assert self.accountant.caps is not None
        return self.accountant.caps

    @property
    @abstractmethod
    def releases_anything(self) -> bool:
        """Returns True if the channel releases something, and therefore charges."""

    @property
    def on_grid(self) -> dict[str, GridValue]:
        """Returns the last value of every release with its grid, by name; none in seeded mode."""
        if self.records is None:
            return {}
        return self.records.on_grid

    # A step

    def start(self, step: int) -> None:
        """States the first step of this session; a run with no step left then reports its cost.

        Args:
            step: number of the round or activation.

        Raises:
            ResumeError: charges of earlier steps are missing.
        """
        self.accountant.start(step)

    @abstractmethod
    def noise_std(self, name: str) -> Tensor:
        """Returns the root mean square of a noised coordinate, or of a diagonal one of a matrix.

        Args:
            name: of a release of the step that has begun, or that was released last.

        Returns:
            (R,) float64, of each replicate; 0 without noise, and if no client acted.
        """

    # The privacy cost

    @property
    def delta(self) -> float | None:
        """Returns the delta of every epsilon here, or None without noise."""
        return self.accountant.delta

    @property
    def epsilons(self) -> np.ndarray:
        """Returns (R,) float64 epsilon of each replicate up to the current step, the largest of all
        clients; infinite without noise, 0 when nothing has been released."""
        if not self.releases_anything:
            return np.zeros(self.replicates)
        return np.broadcast_to(self.accountant.epsilons().max(1, initial=0.0), self.replicates)

    @property
    def epsilon(self) -> float:
        """Returns the largest of :attr:`epsilons`."""
        return float(self.epsilons.max())

    def epsilon_at(self, uses: int) -> float:
        """Returns the epsilon of a number of uses.

        Args:
            uses: rounds, or participations of every client if these are charged.
        """
        if self.releases_anything:
            return self.accountant.epsilon_at(uses)
        return 0.0

    def records_of(self, plan: GradientPlan, width: float | None = None) -> Records:
        """Returns the sums of gradients of a plan.

        Args:
            plan: of the gradients.
            width: of the grid of a secure sum, to which the clients add the noise; None for sums
                that are noised one by one.
        """
        stability = None
        if isinstance(self.privacy, RecordPrivacy):
            stability = self.privacy.stability
        costs = self.costs
        # the secure sum has the noise, and the sums of each client have none
        if width is not None:
            costs = None
        return Records(
            plan,
            self.sources,
            costs,
            bound=self.bound,
            law=self.law,
            stability=stability,
            width=width,
        )

    # Its end

    def state(self) -> dict[str, Tensor]:
        """Returns the state that a checkpoint must keep: charges of replicates, which no file
        holds, and adaptive clip norms."""
        return self.accountant.state()

    def restore(self, state: dict[str, Tensor]) -> None:
        """Continues from a state.

        Args:
            state: of :meth:`state`.
        """
        self.accountant.restore(state)

    def sync(self) -> Head | None:
        """Returns the end of the ledger's chain of hashes once all of it is on the disk; None if
        no file is kept."""
        if self.accountant.ledger is None:
            return None
        return self.accountant.ledger.sync()

    def charge_remaining(self, done: int) -> None:
        """Stops early because of the released values, and charges all planned steps.

        Args:
            done: number of steps that were made.
        """
        self.accountant.charge_remaining(done)

    def close(self) -> None:
        """Ends cleanly; idempotent."""
        self.accountant.close()
