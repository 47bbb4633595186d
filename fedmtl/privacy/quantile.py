"""Adaptive clipping: the clip norm follows a quantile of the norms of updates, privately.

Andrew, Thakkar, McMahan, Ramaswamy, "Differentially private learning with adaptive clipping",
NeurIPS 2021, Algorithm 1. In every step a second release counts the clients whose update is at most
C; it shares the cohort with the update, so both are one Gaussian release of joint multiplier z
(Theorem 1 there), and the update's own multiplier grows a little to make room.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from .._check import Checked, Fraction, Positive, positive
from ..errors import PrivacyError
from .clip import LEAST, MOST
from .samplers import SHIFTS, Relation

COUNT_BOUND = 0.5
"""Largest absolute value of one client's ``b - 1/2``."""


@dataclass(frozen=True)
class QuantileClip(Checked):
    """Adapts the clip norm to a quantile of the norms of the clients' updates (Andrew et al. 2021,
    Algorithm 1).

    Args:
        initial: the clip norm of the first step, above 0, in units of the updates.
        quantile: gamma, the fraction of clients not clipped that is aimed at, in (0, 1).
        lr: eta_C, the rate of the geometric update, above 0.
        count_noise: sigma_b, standard deviation of the noise on the count, in clients; None for a
            twentieth of the expected cohort, as in the paper.

    Example:
        >>> from fedmtl import QuantileClip
        >>> clip = QuantileClip(initial=1.0, quantile=0.5, lr=0.2)
        >>> clip.updated_norm(1.0, noisy_fraction=0.9) < 1.0
        True
    """

    initial: Positive
    quantile: Fraction = 0.5
    lr: Positive = 0.2
    count_noise: Positive | None = None

    def count_std(self, denominator: float) -> float:
        """Returns sigma_b: standard deviation of the noise on the count, in clients.

        Args:
            denominator: m, the expected cohort.
        """
        if self.count_noise is None:
            return denominator / 20.0
        return self.count_noise

    def count_multiplier(self, denominator: float, relation: Relation = "add_remove") -> float:
        """Returns the multiplier of the count's release, sigma_b over :func:`count_sensitivity`.

        Args:
            denominator: m, the expected cohort.
            relation: the neighbour relation of the rows, as for :func:`count_sensitivity`.
        """
        return self.count_std(denominator) / count_sensitivity(relation)

    def updated_norm(self, norm: float, noisy_fraction: float) -> float:
        """Returns the next clip norm, C exp(-eta_C (b - gamma)): Algorithm 1, within the bounds of
        every clip.

        Args:
            norm: C, above 0.
            noisy_fraction: b, the released mean of ``b_k - 1/2``, plus 1/2; it may lie outside [0,
                1].
        """
        # Too many rows within the norm: it shrinks. Too few: it grows.
        exponent = -self.lr * (noisy_fraction - self.quantile)
        return min(max(norm * math.exp(min(max(exponent, -500.0), 500.0)), LEAST), MOST)


def count_sensitivity(relation: Relation) -> float:
    """Returns the most that the sum of ``b - 1/2`` over a cohort moves between neighbours.

    A client whose row is in the sum adds 1/2 or -1/2, one whose row is not there adds 0, and the
    others add the same for both neighbours. So the sum moves by

    - 1/2 for add/remove: a row is there or not;
    - 1 for replace-one: from 1/2 to -1/2, by a row within the clip norm and one beyond it;
    - 1/2 for zero-out if a client without data sends no row: 1/2 or -1/2, and 0 for nothing;
    - 1 for zero-out if a client without data sends a row as well: that row may be within the
      clip norm (as 0 is) and the row of its data beyond it, which is replace-one.
      :attr:`Release.relation <fedmtl.privacy.release.Release.relation>` says so.

    Each bound is attained by a cohort of one client.

    Args:
        relation: the neighbour relation of the rows: ``"replace"`` for zero-out too if clients
            without data send rows.
    """
    return COUNT_BOUND * SHIFTS[relation]


def count_rows(norms: Tensor, norm: float) -> Tensor:
    """Returns the addends of the clients to the count, ``b_k - 1/2`` with ``b_k = 1`` if the norm
    is at most C, else 0.

    Args:
        norms: (k,) float norms of updates before clipping; one that is not finite counts as above
            C.
        norm: C.

    Returns:
        (k, 1), the dtype and device of ``norms``.
    """
    below = norms <= norm
    return torch.where(below, COUNT_BOUND, -COUNT_BOUND).to(norms.dtype)[:, None]


def split_multiplier(multiplier: float, count_multiplier: float) -> float:
    """Returns the update's multiplier when the count shares its step, z_delta = (z^-2 -
    z_b^-2)^-1/2 (Theorem 1).

    Args:
        multiplier: z of both releases, above 0.
        count_multiplier: z_b of the count, above z.

    Raises:
        PrivacyError: the count would by itself spend all of z.
    """
    positive("split_multiplier", multiplier=multiplier, count_multiplier=count_multiplier)
    # The precisions of the two releases add up to that of their step.
    if count_multiplier <= multiplier:
        raise PrivacyError(
            f"Adaptive clipping: the count's noise multiplier {count_multiplier:.6g} must be above "
            f"the total {multiplier:.6g}, or nothing is left for the update; use a larger "
            "count_noise or cohort, or less noise in total."
        )
    ratio = multiplier / count_multiplier
    return multiplier / math.sqrt((1.0 - ratio) * (1.0 + ratio))
