"""Scale rows to public norms, each by itself: a row's features depend on no other record."""

from __future__ import annotations

import numpy as np

from ..transforms import SHRINK


def clip_rows(x: np.ndarray, *, l1: float | None = None, l2: float | None = None) -> np.ndarray:
    """Scales rows down to public norms.

    Args:
        x: (n, d), finite.
        l1: bound on ``||x||_1``; None for no bound.
        l2: bound on ``||x||_2``; None for no bound.

    Returns:
        (n, d) float32: ``x min(1, l1 / ||x||_1, l2 / ||x||_2)``, within the bounds also after
        rounding.
    """
    wide = x.astype(np.float64)
    factor = np.ones(len(wide))
    for bound, order in ((l1, 1), (l2, 2)):
        if bound is not None:
            norm = np.linalg.norm(wide, ord=order, axis=1)
            factor = np.minimum(factor, SHRINK * bound / np.maximum(norm, SHRINK * bound))
    return (wide * factor[:, None]).astype(np.float32)


def with_intercept(x: np.ndarray) -> np.ndarray:
    """Appends a column of ones to x (n, d): float32 (n, d + 1)."""
    return np.concatenate([x, np.ones((len(x), 1))], axis=1).astype(np.float32)
