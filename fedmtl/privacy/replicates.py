"""Replicates of a run: simulations with noise, and maybe budgets, of their own."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import torch
from torch import Tensor

from ..errors import ConfigError
from .clip import RowTotal
from .mechanism import ClippedSum, Mechanism, Message, check_rows
from .mechanism_choice import mechanism_of
from .noise.grid import GridValue
from .quantile import QuantileClip
from .receipt import Receipt
from .release import Release
from .round_channel import RoundChannel
from .samplers import BoundFull, BoundSampler
from .settings import ClientPrivacy, Privacy, RecordPrivacy


def settings_of(
    privacy: Privacy | Sequence[Privacy] | None, replicates: int
) -> tuple[Privacy, ...]:
    """Returns settings of all replicates, or of each, which differ only in their budgets; none
    without privacy."""
    if privacy is None:
        return ()
    if isinstance(privacy, (ClientPrivacy, RecordPrivacy)):
        return (privacy,)
    values = tuple(privacy)
    if len(values) != replicates:
        raise ConfigError(
            f"{len(values)} privacy settings were given for {replicates} replicates; give one each."
        )
    for each in values:
        if not isinstance(each, (ClientPrivacy, RecordPrivacy)):
            raise ConfigError(
                f"The privacy of a replicate is {each!r}; give ClientPrivacy(...) or "
                "RecordPrivacy(...)."
            )
        if type(each) is not type(values[0]):
            raise ConfigError(
                "Replicates have ClientPrivacy or RecordPrivacy, all of them the same."
            )
        if replace(each, epsilon=1.0, noise_multiplier=None) != replace(
            values[0], epsilon=1.0, noise_multiplier=None
        ):
            raise ConfigError(
                "Replicates differ only in epsilon or noise_multiplier, not as "
                f"{values[0]} and {each}."
            )
    return values


def check_replicates(settings: tuple[Privacy, ...], sampler: BoundSampler) -> None:
    """Raises ConfigError if replicates in rounds cannot be computed at once."""
    if not isinstance(sampler, BoundFull):
        raise ConfigError(
            "Replicates in rounds need FullParticipation(), where all have the same cohort; not "
            f"{sampler.describe()}."
        )
    for each in settings:
        if not isinstance(each, ClientPrivacy) or isinstance(each.clip_norm, QuantileClip):
            raise ConfigError(
                "Replicates in rounds need ClientPrivacy(...) with a number as clip_norm."
            )
        if each.aggregation is not None:
            raise ConfigError(
                "Replicates in rounds need a trusted server, without ClientPrivacy.aggregation."
            )
        if each.noise_multiplier is not None and each.epsilon is not None:
            raise ConfigError(
                "Replicates take epsilon or noise_multiplier, not both: none of them stops early."
            )


class ReplicatedRounds(RoundChannel):
    """Rounds of R replicates in which everybody takes part.

    Rows are (R, k, D), and their releases (R, D), or (R, D, D) of matrices: replicate r has the
    noise of its own source and of its own budget.
    """

    def new_total(self, name: str) -> RowTotal | None:
        self._declared(name)
        return None

    def noise_std(self, name: str) -> Tensor:
        super().noise_std(name)  # refuses a round that has not begun
        mechanism = self._mechanisms[name]
        assert isinstance(mechanism, ReplicatedSum)
        each = [replicate.release.noise_std for replicate in mechanism.replicates]
        return torch.tensor(each, dtype=torch.float64)

    def _mechanism(self, release: Release) -> Mechanism:
        receipt = self._begun(release.name)
        releases = [release] * self.replicates
        if self.costs is not None:
            # One multiplier is that of all; with budgets of their own each has one.
            multipliers = np.broadcast_to(self.costs.by_account[:, 0], self.replicates).tolist()
            declared = self.releases[release.name]
            releases = [declared.with_multiplier(z).weighted(receipt.use) for z in multipliers]
        each = zip(releases, self.sources, strict=True)
        return ReplicatedSum([mechanism_of(one, source) for one, source in each])

    def _with_row_noise(
        self, mechanism: Mechanism, rows: Message, clients: Tensor, receipt: Receipt
    ) -> Message:
        noise = self.row_noise[mechanism.name]
        mechanism.check(rows, clients)
        assert isinstance(rows, Tensor)  # there are no sums of replicates
        receipt.spend(noise.name, clients)
        each = zip(rows, self.sources, strict=True)
        return torch.stack([noise.added(part, clients, receipt, source) for part, source in each])


class ReplicatedSum:
    """The noised sums of R replicates of a run.

    Args:
        replicates: the mechanism of each, with its own source and multiplier.

    Attributes:
        release: of the first replicate.
        name: of the release.
        replicates: see above.
    """

    def __init__(self, replicates: Sequence[ClippedSum]) -> None:
        self.replicates = replicates
        self.release = replicates[0].release
        self.name = self.release.name

    @property
    def on_grid(self) -> GridValue | None:
        """Returns None: replicates are simulations, with seeded noise."""
        return None

    def check(self, rows: Message, clients: Tensor) -> None:
        """Refuses rows of another shape than (R, k, D)."""
        assert isinstance(rows, Tensor)  # there are no sums of replicates
        check_rows(self.release, rows, clients, len(self.replicates))

    def __call__(self, rows: Message, clients: Tensor, receipt: Receipt) -> Tensor:
        """Releases the noised sum of each replicate: rows (R, k, D) -> (R, D), or (R, D, D) of
        matrices."""
        assert isinstance(rows, Tensor)  # there are no sums of replicates
        self.check(rows, clients)
        receipt.spend(self.name, clients)
        values = []
        for mechanism, part in zip(self.replicates, rows, strict=True):
            values.append(mechanism.noised_mean(mechanism.total(part, clients), receipt))
        return torch.stack(values)
