"""The mechanism of a release, by the form of its rows and the party that adds the noise."""

from __future__ import annotations

from .mechanism import ClippedSum, OuterProductSum
from .noise.sources import NoiseSource
from .release import Release
from .secure_sum import SecureSum


def mechanism_of(release: Release, source: NoiseSource) -> ClippedSum:
    """Returns the mechanism of a release.

    Args:
        release: with its clip and its noise.
        source: of the random bits.
    """
    if release.shares is not None:
        return SecureSum(release, source)
    if release.form == "vector":
        return ClippedSum(release, source)
    return OuterProductSum(release, source)
