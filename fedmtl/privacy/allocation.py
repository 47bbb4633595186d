"""The budget of a run over its steps: equal steps, or weights w_t of mean 1 that divide the noise multiplier.

A release with :attr:`~fedmtl.privacy.ReleasePlan.allocation` has the multiplier z / w_t in its use t. One z is
calibrated on the composition of all the uses, so the total is the budget whatever the weights are. With Gaussian noise
the composition of the uses is one Gaussian release of multiplier z / sqrt(sum w_t^2); others are composed from the
privacy loss distribution of each distinct use.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, Protocol

from ..errors import ConfigError
from .account import composed
from .release import ReleasePlan, step_event
from .samplers import BoundSampler, SamplingLaw
from .settings import ClientPrivacy


class Steps(Protocol):
    """The event of each step."""

    def __call__(self, multiplier: float, use: int = 0) -> Any:
        """Return the event of the step numbered ``use`` (from 0), under the multiplier z of a weight of 1."""


def normalized(weights: Sequence[float]) -> tuple[float, ...]:
    """Return the weights over their mean: an allocation.

    Raises:
        ConfigError: no weights, or one that is not positive and finite.
    """
    if not weights or not all(0 < weight < math.inf for weight in weights):
        raise ConfigError(f"An allocation has positive finite weights, not {list(weights)[:5]}.")
    mean = math.fsum(weights) / len(weights)
    return tuple(float(weight) / mean for weight in weights)


def allocation_of(plans: tuple[ReleasePlan, ...]) -> int | None:
    """Return the number of uses that have weights, or None where all uses are alike."""
    return next((plan.uses for plan in plans if plan.allocation is not None), None)


def steps_of(plans: tuple[ReleasePlan, ...], sampler: BoundSampler, law: SamplingLaw, privacy: ClientPrivacy) -> Steps:
    """Return the event of each step under a noise multiplier.

    Raises:
        ConfigError: an allocation beside a clip norm that follows a quantile.
    """
    if allocation_of(plans) is not None and not isinstance(privacy.clip_norm, (int, float)):
        raise ConfigError("An allocation of the budget needs a fixed clip norm; ClientPrivacy.clip_norm is a number.")

    def step(multiplier: float, use: int = 0) -> Any:
        return step_event(
            tuple(multiplier / plan.weight(use) for plan in plans),
            sampler,
            law,
            mechanism=privacy.mechanism,
            sizes=tuple(plan.size for plan in plans),
        )

    return step


def whole_run(plans: tuple[ReleasePlan, ...], step: Steps, uses: int) -> tuple[Callable[[float], Any], int]:
    """Return what calibration composes: an event by multiplier, and how often it happens."""
    count = allocation_of(plans)
    if count is None:
        return lambda multiplier: step(multiplier, 0), uses
    return lambda multiplier: composed([step(multiplier, use) for use in range(count)]), 1


def uses_of(plans: tuple[ReleasePlan, ...], step: Steps, multiplier: float, uses: int | None = None) -> Any:
    """Return the event of every step, or of each where they differ, or where their number is fixed to ``uses``."""
    count = allocation_of(plans)
    if count is not None:
        return tuple(step(multiplier, use) for use in range(count))
    return step(multiplier, 0) if uses is None else (step(multiplier, 0),) * uses
