"""The published accounting of PP-DMTL, and by how much it fails (Xie et al., KDD 2017)."""

from __future__ import annotations

import math

REFUTED = (
    "the claim is of one iteration, and bounds a step of q_t from the same q_t; q_t is a private state without noise, "
    "whose sensitivity after k iterations grows up to S1 (1 - (1 - a1 tau)^k) / (a1 tau)"
)


def published_sensitivity(a1: float, tau: float, slope: float, row_norm: float, records: int, steps: int) -> float:
    """Return a bound on how far q_t moves in ``steps`` iterations when one record is replaced; Lemma 1 has one step.

    With ``S1 = 2 a1 C1 C2 / n_t`` (Lemma 1) every step adds S1 and shrinks what was there by ``1 - a1 tau`` at least
    (a gradient step on a convex function expands nothing, a1 <= 1 / (L + tau)): ``S1 (1 - (1 - a1 tau)^k) / (a1 tau)``.

    Args:
        a1, tau: step size and ridge of q_t.
        slope: C2, bound on abs(l').
        row_norm: C1, bound on ||x||_2.
        records: n_t.
        steps: k.
    """
    shrink = a1 * tau
    growth = float(steps) if shrink == 0 else (1 - (1 - shrink) ** steps) / shrink
    return 2 * a1 * row_norm * slope / records * growth


def published_epsilon(multiplier: float, query_epsilon: float | None, rate: float) -> float:
    """Return what Theorem 3.5 claims of one iteration: e = epsilon_1 + epsilon_2; log(1 + q (exp(e) - 1)) on a subset.

    Args:
        multiplier: of the noise z2 of the release, 1 / epsilon_2.
        query_epsilon: epsilon_1, or None for that of the release.
        rate: q, the share of records in an answer.
    """
    whole = 1.0 / multiplier + (1.0 / multiplier if query_epsilon is None else query_epsilon)
    return whole if rate == 1 else math.log1p(rate * math.expm1(whole))
