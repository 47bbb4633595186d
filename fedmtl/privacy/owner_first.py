"""The first release: one noised vector of every owner before its answers, such as a warm start."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from ..errors import ConfigError, PrivacyError
from .clip import MARGIN
from .noise.grid import privatize
from .noise.sources import NoiseSource
from .owner_terms import OwnerTerms, first_law


@dataclass(frozen=True, eq=False)
class WarmStartRelease:
    """What an extra release of every owner that has data needs, before its answers and within the same budget.

    Args:
        sensitivity: (n,) the most that the vector (D,) of an owner moves in the L2 norm when one of its records is
            replaced, above 0 for owners that have data; such as L / (n_i lambda) for the minimizer of a mean of
            L-Lipschitz losses plus lambda ||.||^2. Not used for the others.
        share: of an owner's budget, in (0, 1), as its part of the sum of the weights of all its releases.
    """

    sensitivity: np.ndarray
    share: float

    def __post_init__(self) -> None:
        if isinstance(self.share, bool) or not 0 < self.share < 1:
            raise ConfigError(f"WarmStartRelease.share is {self.share!r}; it must be between 0 and 1.")

    def shares(self, counts: np.ndarray) -> np.ndarray:
        """(n,): the share of owners that have data, 0 of the others.

        Raises:
            ConfigError: sensitivities that do not fit owners with ``counts`` (n,) records.
        """
        s = np.asarray(self.sensitivity, dtype=np.float64)
        if s.shape != counts.shape or not bool((np.isfinite(s) & (s > 0))[counts > 0].all()):
            raise ConfigError(
                f"WarmStartRelease.sensitivity has shape {s.shape}; it must have a positive finite number for each of "
                f"{counts.size} owners that have data."
            )
        return np.where(counts > 0, self.share, 0.0)


def released_first(
    first: WarmStartRelease,
    vectors: Callable[[int], Tensor],
    terms: OwnerTerms | None,
    counts: np.ndarray,
    dimension: int,
    sources: Sequence[NoiseSource],
) -> Tensor:
    """The vectors of all owners that have data with their noise.

    The noise is L2-Laplace or, with Gaussian answers, Gaussian; its scale is that of a sensitivity larger by 2**-20,
    which leaves room for rounding to the grid of secure mode.

    Args:
        first: the sensitivity.
        vectors: owner -> (D,); one that is not finite counts as zero.
        terms: noise multipliers and weights; None without noise.
        counts: (n,) records.
        dimension: D.
        sources: of noise, one for each repetition.

    Returns:
        (R, n, D) float64; zero for owners without data.

    Raises:
        PrivacyError: a vector of another shape.
    """
    value = torch.zeros(counts.size, dimension, dtype=torch.float64)
    acting = np.flatnonzero(counts > 0)
    for owner in acting.tolist():
        vector = vectors(owner).detach().cpu().double()
        if vector.shape != (dimension,):
            raise PrivacyError(f"The first vector of owner {owner} has not {dimension} numbers.")
        value[owner] = torch.where(torch.isfinite(vector).all(), vector, 0.0)
    out = value.expand(len(sources), -1, -1).clone()
    if terms is None:
        return out
    law = first_law(terms.privacy[0])(1.0)
    weights = np.where(terms.firsts > 0, terms.firsts, 1.0)
    scales = (1 + MARGIN) * np.asarray(first.sensitivity, dtype=np.float64) * terms.multipliers / weights  # (P, n)
    keys = torch.from_numpy(acting)
    for r, source in enumerate(sources):
        scale = scales[r if len(scales) > 1 else 0, acting]
        noise = torch.from_numpy(law.draw_rows(source, "noise/first", 0, keys, dimension) * scale[:, None])
        for place, owner in enumerate(acting.tolist()):
            bound = float(first.sensitivity[owner])
            out[r, owner], _ = privatize(
                value[owner], noise[place], source, bound=bound, norm="l2", scale=float(scale[place])
            )
    return out
