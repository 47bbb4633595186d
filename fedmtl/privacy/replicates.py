"""Replicates of a run: simulations with noise, and maybe budgets, of their own."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import torch
from torch import Tensor

from ..errors import ConfigError
from .clip import RowTotal, largest_norm
from .quantile import QuantileClip
from .release import Release
from .rounds import Message, Rounds
from .samplers import BoundFull, BoundSampler
from .settings import ClientPrivacy, Privacy, RecordPrivacy


def settings_of(
    privacy: Privacy | Sequence[Privacy] | None, replicates: int
) -> tuple[Privacy, ...]:
    """Return settings of all replicates, or of each, which differ only in their budgets; none
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
    """Raise ConfigError where replicates in rounds cannot be computed at once."""
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
        if each.noise_multiplier is not None and each.epsilon is not None:
            raise ConfigError(
                "Replicates take epsilon or noise_multiplier, not both: none of them stops early."
            )


class ReplicatedRounds(Rounds):
    """Rounds of R replicates in which everybody takes part.

    Rows are (R, k, D), and what is released of them is (R, D), or (R, D, D) of matrices: replicate
    r has the noise of its own source and of its own budget.
    """

    def total(self, name: str) -> RowTotal | None:
        self._declared(name)
        return None

    def noise_std(self, name: str) -> Tensor:
        super().noise_std(name)  # refuses what has not begun
        return torch.tensor([each.noise_std for each in self._each(name)], dtype=torch.float64)

    def _each(self, name: str) -> list[Release]:
        """Returns the release of the round that has begun, with the noise of each replicate."""
        receipt = self._begun(name)
        if self.costs is None:
            return [receipt.mechanisms[name]] * self.replicates
        # One multiplier is that of all; with budgets of their own each has one.
        multipliers = np.broadcast_to(self.costs.by_account[:, 0], self.replicates).tolist()
        release = self.releases[name]
        return [release.with_multiplier(each).weighted(receipt.use) for each in multipliers]

    def _check_shape(self, release: Release, rows: Tensor) -> None:
        release.check_rows(rows, self.replicates)

    def _largest(self, release: Release, rows: Tensor) -> float:
        if release.clip is not None:
            return release.clip.bound
        return max(map(largest_norm, rows))

    def _hidden(self, name: str, rows: Tensor, clients: Tensor, step: int) -> Tensor:
        noise = self.rows.get(name)
        if noise is None:
            return rows
        each = zip(rows, self.sources, strict=True)
        return torch.stack([noise.added(own, clients, step, source) for own, source in each])

    def _value(self, release: Release, rows: Message, clients: Tensor, step: int) -> Tensor:
        totals = self._sum(release, rows, clients)
        each = zip(self._each(release.name), totals, self.sources, strict=True)
        return torch.stack(
            [self._noised_sum(own, total, step, source) for own, total, source in each]
        )
