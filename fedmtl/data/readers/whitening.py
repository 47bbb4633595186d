"""z-scores and a whitened PCA of coded columns, fitted to public rows alone."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from ...errors import ConfigError


@dataclass(frozen=True, eq=False)
class Whitening:
    """A map from coded columns to features, a function of public rows only.

    Args:
        mean: of the coded columns (p,), and
        scale: their standard deviation (p,); 0 for a column that does not vary.
        z_clip: bound on a z-score.
        centre: mean of the clipped z-scores (p,).
        basis: (p, k), principal directions over their standard deviations.
    """

    mean: np.ndarray
    scale: np.ndarray
    z_clip: float
    centre: np.ndarray
    basis: np.ndarray

    def __call__(self, coded: np.ndarray) -> np.ndarray:
        """Turns coded rows (n, p), NaN if a value is missing, into float64 features (n, k)."""
        return (_scores(coded, self.mean, self.scale, self.z_clip) - self.centre) @ self.basis


def fit_whitening(coded: np.ndarray, *, components: int, z_clip: float, where: str) -> Whitening:
    """Fits z-scores clipped at ``z_clip``, and a whitened PCA, to the public rows.

    A value that is missing gets the z-score 0. The public rows' own features have mean 0 and
    covariance I (divided by n - 1); each direction is signed so that its largest weight is
    positive.

    Args:
        coded: (n, p) float64, NaN if a value is missing.
        components: k.
        z_clip: above 0.
        where: for messages.

    Raises:
        ConfigError: more components than the public rows have independent directions.
    """
    known = np.isfinite(coded)
    count = np.maximum(known.sum(0), 1)
    mean = np.where(known, coded, 0).sum(0) / count
    variance = np.square(np.where(known, coded - mean, 0)).sum(0) / count
    # a constant column's variance is rounding
    scale = np.sqrt(np.where(variance > 1e-12 * mean**2, variance, 0))
    z = _scores(coded, mean, scale, z_clip)
    centre = z.mean(0)
    values, vectors = np.linalg.eigh((z - centre).T @ (z - centre) / max(len(z) - 1, 1))
    values = values[::-1]
    vectors = vectors[:, ::-1]
    rank = 0
    if values[0] > 0:
        rank = int((values > 1e-9 * values[0]).sum())
    if components > rank:
        raise ConfigError(
            f"{where}.components is {components}, but the {len(z)} public rows have only {rank} "
            "independent directions; ask for fewer components or more public_rows."
        )
    vectors = vectors[:, :components]
    vectors = vectors * np.sign(
        np.take_along_axis(vectors, np.abs(vectors).argmax(0)[None], axis=0)
    )
    return Whitening(mean, scale, z_clip, centre, vectors / np.sqrt(values[:components]))


def _scores(coded: np.ndarray, mean: np.ndarray, scale: np.ndarray, bound: float) -> np.ndarray:
    """Returns z-scores (n, p) within plus or minus ``bound``; 0 for missing values and columns that
    do not vary."""
    z = np.where(scale > 0, (coded - mean) / np.where(scale > 0, scale, 1), 0)
    return np.clip(np.where(np.isfinite(coded), z, 0), -bound, bound)
