"""The noise on a released sum, independent from round to round or correlated."""

from __future__ import annotations

from torch import Tensor

from .noise.banded import CorrelatedNoise
from .noise.grid import release_noise
from .noise.sources import NoiseSource
from .release import Release


class SumNoise:
    """Draws the noise of the releases of one run.

    Independent noise has no state. Correlated noise of a secure source does: what earlier rounds
    drew is part of the noise of the next ones, and cannot be drawn again.
    """

    def __init__(self) -> None:
        self._correlated: dict[str, CorrelatedNoise] = {}

    def of(self, release: Release, source: NoiseSource, step: int) -> tuple[Tensor, float | None]:
        """Draws the noise of one release in one round.

        Args:
            release: with noise.
            source: of the random bits.
            step: number of the round.

        Returns:
            (size,) float64, and the width of its grid in secure mode, otherwise None.
        """
        law = release.noise
        assert law is not None
        sensitivity, bound = release.independent

        def draw(at: int) -> tuple[Tensor, float | None]:
            return release_noise(
                law,
                source,
                f"noise/{release.name}",
                at,
                release.size,
                sensitivity=sensitivity,
                bound=bound,
            )

        if release.bands is None:
            return draw(step)
        # The rounds of a run share one multiplier, so the first one's law is that of all.
        if release.name not in self._correlated:
            self._correlated[release.name] = CorrelatedNoise(
                release.bands, draw, repeatable=source.name == "seeded"
            )
        return self._correlated[release.name].at(step)
