"""Peer-to-peer learning with noise and accounting of the paper (Bellet et al. 2018).

It serves reproduction. Theorem 1 adds i.i.d. Laplace noise of scale 2 L0 / (epsilon m) to a mean
gradient, with L0 a bound on the *L2* norm of a record's gradient. A record moves the L1 norm up to
sqrt(D) times as far, so its epsilon may be up to sqrt(D) times the claim; the report prints
infinity. The wake-ups of
an agent are composed by Theorem 3.5 of Kairouz, Oh and Viswanath, "The composition theorem for
differential privacy" (ICML 2015); a privacy loss distribution is never looser for a given
mechanism. The budget is split equally over an agent's wake-ups, as in the paper's experiments
(section 5.1); with ``allocation="paper"`` as in Proposition 2, for which agents would have to know
the ticks of the network. The runs of Figure 1 start from models that are fitted to the raw records,
those of Figures 2 (b) and (c) from a private warm start
(:mod:`fedmtl.algorithms.p2p.warm_start`) of epsilon .05, which adds to that of the wake-ups:
``warm_start`` is .05 over the sum of the two. Its noise is i.i.d. Laplace here, too, and its
sensitivity is bounded in the L2 norm only.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ..._check import Positive
from ...algorithms.base import Problem, State
from ...algorithms.linear.solve import minimize
from ...algorithms.p2p.algorithm import PeerToPeer
from ...errors import ConfigError, PrivacyError
from ...privacy import PublishedClaim, RecordPrivacy

REASON = (
    "i.i.d. Laplace noise of scale 2 L0 / (epsilon m) needs the L1 norm of every record's gradient "
    "within L0; the claim takes L0 for a Lipschitz constant with respect to the L1 norm, which "
    "bounds the largest coordinate only"
)
REASON_START = "; and the run starts from models fitted to the raw records, which no noise covers"


@dataclass(frozen=True, kw_only=True)
class PublishedPeerToPeer(PeerToPeer):
    """Peer-to-peer learning with Laplace noise on gradients that are clipped in the L2 norm.

    Args:
        mu: see :class:`PeerToPeer`; the default is for one wake-up at a small epsilon.
        local_start: True starts from the agents' fits of their own raw records, which no noise
            covers.
    """

    mu: Positive = 0.1
    local_start: bool = False

    name = "p2p_published"
    title = "Peer-to-peer, published"

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.local_start and self.warm_start is not None:
            both = "has both local_start and warm_start; a run starts from one of them"
            raise ConfigError(f"PublishedPeerToPeer {both}.")

    def check_law(self, privacy: RecordPrivacy) -> None:
        """Accepts Laplace noise alone, as the paper does.

        Raises:
            PrivacyError: the noise has another law.
        """
        if privacy.mechanism != "laplace":
            given = f"privacy.mechanism is {privacy.mechanism!r}"
            raise PrivacyError(f"p2p_published adds Laplace noise: {given}.")

    def given_noise(
        self, problem: Problem, caps: np.ndarray, privacy: RecordPrivacy
    ) -> dict[str, Any]:
        """Returns the fields of :class:`PeerToPeer`, and the claim of Theorem 1."""
        self.check_law(privacy)
        # the agent with the most wake-ups has the largest epsilon
        longest = self.weights(problem, caps, privacy)[int(np.argmax(caps))].tolist()
        delta = privacy.resolved_delta(len(problem.data.train))
        reason = REASON
        if self.local_start:
            reason += REASON_START

        def claimed(multiplier: float) -> float:
            return composed([weight / multiplier for weight in longest], delta)

        claim = PublishedClaim(claimed, reason, norm="l2")
        return super().given_noise(problem, caps, privacy) | {"published": claim}

    def init(self, problem: Problem, replicates: int = 1) -> State:
        """Returns the state before the first wake-up."""
        state = super().init(problem, replicates)
        if self.local_start:
            state.public["theta"] += self.local_fits(problem)
        return state

    def local_fits(self, problem: Problem) -> Tensor:
        """Returns the minimizers of L_i of all agents, (n, D) float64; zero without records."""
        data = self.data(problem)
        fits = np.zeros((problem.clients, problem.dimension))
        for agent, ridge in enumerate(self.network(problem).ridge.tolist()):
            x = data.x[agent].numpy()
            y = data.y[agent].numpy()
            if len(x):
                fits[agent] = minimize(self.linear_loss, x, y, 2 * ridge).theta
        return torch.from_numpy(fits)


def composed(epsilons: Sequence[float], delta: float) -> float:
    """Returns the composition of pure mechanisms by Theorem 3.5 of Kairouz, Oh and Viswanath.

    It is the least of three bounds. With ``A = sum e (exp(e) - 1) / (exp(e) + 1)`` and ``S = sum
    e^2`` they are ``sum e``, ``A + sqrt(2 S log(exp(1) + sqrt(S) / delta))`` and ``A + sqrt(2 S
    log(1 / delta))``.

    Args:
        epsilons: pure epsilons of the steps, none below 0.
        delta: the slack of the theorem, at least 0 and below 1.
    """
    total = math.fsum(epsilons)
    squares = math.fsum(e * e for e in epsilons)  # S
    if delta == 0 or squares == 0:
        return total
    # e (exp(e) - 1) / (exp(e) + 1) = e tanh(e / 2)
    mean = math.fsum(e * math.tanh(e / 2) for e in epsilons)
    tail = min(math.log(math.e + math.sqrt(squares) / delta), math.log(1 / delta))
    return min(total, mean + math.sqrt(2 * squares * tail))
