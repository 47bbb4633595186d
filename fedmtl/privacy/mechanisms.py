"""Laws of noise. A mechanism knows its accounting event and the norm in which it needs the sensitivity."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

from .._check import positive

Norm = Literal["l1", "l2"]


@dataclass(frozen=True)
class GaussianNoise:
    """N(0, (z S)^2) on every coordinate, S the L2 sensitivity.

    Args:
        multiplier: z, the standard deviation in units of the sensitivity, above 0.
    """

    multiplier: float

    def __post_init__(self) -> None:
        positive(self, multiplier=self.multiplier)

    @property
    def norm(self) -> Norm:
        """The norm of the sensitivity that the law needs."""
        return "l2"

    def event(self) -> Any:
        """The ``dp_accounting`` event of one release; its multiplier is relative to the full sensitivity."""
        from dp_accounting import dp_event

        return dp_event.GaussianDpEvent(self.multiplier)

    def std(self, sensitivity: float) -> float:
        """Standard deviation of a coordinate, in units of the released sum."""
        return self.multiplier * sensitivity
