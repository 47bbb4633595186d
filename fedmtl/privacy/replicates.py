"""The settings of replicates, which differ in their budgets alone, and the rounds they can have."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from ..errors import ConfigError
from .quantile import QuantileClip
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
