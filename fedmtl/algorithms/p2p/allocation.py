"""The allocation of an agent's budget to its wake-ups (Bellet et al. 2018, Proposition 2).

It is there as printed and corrected. Theorem 2 bounds the loss of utility by the noise: with C = 1
- sigma / (n L_max) for each tick of the network,

    E[Q(Theta(T)) - Q*] <= C^T (Q(Theta(0)) - Q*)
                           + (p / (n L_min)) sum_t sum_i C^(T-1-t) (mu D_ii c_i s_i(t))^2.

The printed theorem lacks the factor p, since E||Laplace(s)^p||^2 = 2 p s^2. It has C^t for
C^(T-1-t): the noise of tick t shrinks in the T - 1 - t ticks that follow. So the best noise is
*less* late, and the printed Proposition 2 has more. With s_t proportional to 1 / e_t, the sum of
C^(T-1-t) / e_t^2 is least

- for a given sum of e_t (basic composition of pure mechanisms) at e_t proportional to
  C^((T-1-t)/3);
- for a given sum of e_t^2 (Gaussian noise; the leading term of composition with a delta) at
  C^((T-1-t)/4).

An agent does not know the ticks of the others. It counts its own wake-ups, about n ticks each, and
takes C = 1 - sigma / L_max for them: a public constant of the graph, the domain and the numbers of
records.
"""

from __future__ import annotations

from typing import Literal

import numpy as np
from numpy.typing import NDArray

from ..._check import Positive

Array = NDArray[np.float64]
Allocation = Positive | Literal["uniform", "optimal", "paper"]


def wakeup_weights(
    policy: Allocation, wakeups: int, contraction: float, *, root: Literal[3, 4] = 4
) -> Array:
    """Returns weights of an agent's wake-ups, of mean 1: twice the weight is half the noise.

    Args:
        policy: ``"uniform"``; ``"optimal"``: C^((T-1-t) / root); ``"paper"``: the printed C^(t /
            3), whose order is reversed; or a number above 0: the last weight over the first, with
            equal ratios between.
        wakeups: T, at least 1.
        contraction: C of one wake-up, above 0 and at most 1.
        root: 3 if the sum of the epsilons is limited, 4 if that of their squares is.

    Returns:
        (T,) float64.
    """
    step = np.arange(wakeups, dtype=np.float64)
    if policy == "uniform":
        return np.ones(wakeups)
    if policy == "optimal":
        log = np.log(contraction) * (wakeups - 1 - step) / root
    elif policy == "paper":
        log = np.log(contraction) * step / 3
    else:
        log = np.log(policy) * step / max(1, wakeups - 1)
    # relative to the largest, so that nothing overflows
    weights = np.exp(log - log.max())
    normalized: Array = weights / weights.mean()
    return normalized
