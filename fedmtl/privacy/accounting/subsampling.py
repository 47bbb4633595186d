"""Poisson sampling of a mechanism: the losses of a unit that takes part by a secret coin."""

from __future__ import annotations

import math

import numpy as np

from .pld import LossPair

_STRAY = 1e-12  # mass that may be the rounding of a sum of masses
_NEVER = 1e-25  # mass at infinity that leaves every delta as it is


def sampled_atoms(
    pair: LossPair, probability: float
) -> tuple[tuple[np.ndarray, np.ndarray, float], ...]:
    """Returns losses, masses and mass at infinity of the Poisson-sampled mechanism, for (remove,
    add).

    With P the law with the unit drawn and Q the law without it, sampling with probability q turns
    the pair (P, Q) into ((1 - q) Q + q P, Q) for a removal and (Q, (1 - q) Q + q P) for an addition
    (Zhu, Dong, Wang 2022, Theorem 11).

    The mass that Q has and P has not is at the loss log(1 - q) for a removal and -log(1 - q) for an
    addition. Under much noise all other losses are tiny, and a grid of their width that reaches so
    far does not fit any memory. A mass there that is rounding (or 0) goes to the lowest other loss,
    and to infinity: both are larger losses, and delta, the mean of ``(1 - exp(epsilon - loss))_+``,
    grows with every loss, also with those of a sum. It is an upper bound still.

    Args:
        pair: the laws of the mechanism on a unit that takes part.
        probability: q, from 0 to below 1.
    """
    removal, addition = pair
    losses = removal.losses
    without = np.zeros_like(losses)
    # A loss of zero mass has no likelihood ratio: log would be minus infinity.
    chosen = removal.masses > 0
    without[chosen] = np.exp(np.log(removal.masses[chosen]) - losses[chosen])
    # Outcomes that P cannot give, but Q can: their loss is log(1 - q) after sampling.
    only_without = max(0.0, 1.0 - float(without.sum()))
    losses = _sampled_loss(losses, probability)
    masses = (1 - probability) * without + probability * removal.masses
    if only_without > _STRAY:
        losses = np.append(losses, math.log1p(-probability))
        masses = np.append(masses, (1 - probability) * only_without)
    else:
        masses[0] += (1 - probability) * only_without
    down = losses, masses, probability * removal.infinity
    losses = -_sampled_loss(-addition.losses, probability)
    masses = addition.masses
    if addition.infinity <= _NEVER:
        return down, (losses, masses, addition.infinity)
    return down, (
        np.append(losses, -math.log1p(-probability)),
        np.append(masses, addition.infinity),
        0.0,
    )


def _sampled_loss(losses: np.ndarray, probability: float) -> np.ndarray:
    """Returns log(1 - q + q exp(loss)) for losses (n,)."""
    return np.where(
        losses < 500,
        np.log1p(probability * np.expm1(np.minimum(losses, 500.0))),
        losses + math.log(probability),
    )
