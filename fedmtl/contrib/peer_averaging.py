"""Peer-to-peer learning with one release or a few of each agent, and free averaging after them.

An agent of :mod:`fedmtl.algorithms.p2p.algorithm` that has spent its budget need not stop:
averaging with its neighbours is post-processing as long as it reads no record. Here an agent
releases at its first K = ``releases`` wake-ups only, at Theta_i(1), ..., Theta_i(K) the noised
gradients g_1, ..., g_K of its data, without lambda_i. By the public curvature h of the domain the
gradient at another Theta_i is about g_k + h (Theta_i - Theta_i(k)). In later wake-ups the mean of
these over k replaces the gradient of the data in equation (6),

    grad L_i(Theta_i) + eta_i  ->  h Theta_i + b_i + 2 lambda_i Theta_i
    b_i = (1/K) sum_k (g_k - h Theta_i(k))

An agent's first release is at the public start, since no other agent moves its model. With
``releases=1`` and any order of wake-ups the agents therefore end at the minimum of (2) with
quadratic losses of those gradients: the solution Theta of the linear system

    (D + mu D C (h + 2 Lambda) - W) Theta = mu D C (h Theta(0) - G)

with one right-hand side a coordinate; row i of G is g_1 of agent i, and C and Lambda have the c_i
and lambda_i on their diagonals. All of the budget is in one release, as little noise as there can
be. In the end every agent takes a step on its own raw records, which it does not send, and which
costs nothing:

    argmin_v sum_j l(v; x_ij, y_ij) + refine ||v - sum_j (W_ij / D_ii) Theta_j||^2
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor

from .._check import Count, NonNegative, Positive
from ..algorithms.base import Problem, State
from ..algorithms.linear.solve import fit_own
from ..algorithms.one_at_a_time import Answer, Arrays
from ..algorithms.p2p.algorithm import PeerToPeer
from ..algorithms.p2p.network import Network
from ..errors import ConfigError
from ..privacy import ActivationChannel, GradientPlan
from ..schedules import BoundSchedule
from .pairwise import PairwisePrivacy, check_covered, pairwise_privacy


@dataclass(frozen=True, kw_only=True)
class PeerAveraging(PeerToPeer):
    """Trains models peer to peer, by the first releases of each agent and free averaging.

    At the end every agent takes a step on its own records.

    The defaults of ``mu``, ``smoothness`` and ``refine`` were tuned on the synthetic agents of the
    default run, whose rows are uniform in [-1, 1]^p. Other rows need others, above all another
    ``smoothness``.

    Args:
        releases: K, the most releases of an agent.
        confidence_power: k of c_i = (m_i / max_j m_j)^k, at least 0. With 2 models weigh as the
            inverse of their noise's variance, which is proportional to 1 / m_i^2. An agent without
            data has .001.
        refine: the strength of the pull in the last step, above 0.
        refine_from: the start and the anchor of the last step: the mean of the ``"neighbours"``,
            which has less of the agent's own noise, or the agent's ``"own"`` model.
        smoothness: h, a public constant: the curvature of a mean loss in a usual direction, which
            is less than the largest of the domain. ``None``: that one.
        allocation: of the budget over several releases, see :class:`PeerToPeer`.
        mu: the weight of the local losses; mu h is that of a release beside the neighbours' mean.
        warm_start: a release before these, see :class:`PeerToPeer`.
        pairwise: True for a claim beside epsilon, which stays: the epsilon of each agent against
            any one other agent that sees its own messages alone
            (:mod:`fedmtl.contrib.pairwise`). It is printed, and stands in ``public/pairwise.csv``.
        graph, loss, lam, feature_norm, target: see :class:`PeerToPeer`.

    Raises:
        ConfigError: a value outside these ranges, an allocation of a single release, or
            ``pairwise`` of a run that it does not cover.

    Example:
        >>> from fedmtl import PeerAveraging, PoissonClocks, RecordPrivacy, Trainer
        >>> from fedmtl import load_data, models
        >>> from fedmtl.graphs import Ring
        >>> trainer = Trainer(
        ...     algorithm=PeerAveraging(graph=Ring()),
        ...     data=load_data("synthetic_tasks", tasks=4),
        ...     model=models.linear_regression(bias=False),
        ...     schedule=PoissonClocks(per_client=2),
        ...     privacy=RecordPrivacy(clip_norm=1.0, epsilon=8.0),
        ...     rounds=8,
        ...     progress=False,
        ... )
        >>> trainer.fit().privacy.releases
        4
    """

    mu: Positive = 15.0
    smoothness: Positive | None = 0.02
    releases: Count = 1
    confidence_power: NonNegative = 2.0
    refine: Positive = 3.0
    refine_from: Literal["own", "neighbours"] = "neighbours"
    pairwise: bool = False

    by_client = ("theta", "intercept", "answers_so_far")
    name = "peer_averaging"
    title = "Peer averaging"
    colour = "#d2691e"

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.releases == 1 and self.allocation != "uniform":
            without = "which has no effect on a single release; give more releases, or leave it out"
            raise ConfigError(f"PeerAveraging.allocation is {self.allocation!r}, {without}.")

        if self.pairwise and (self.releases > 1 or self.warm_start is not None):
            raise ConfigError(
                "PeerAveraging.pairwise: an agent's second release is at a model that depends on "
                "what it has heard, so the messages are not linear in the noise. Leave out "
                "releases and warm_start, or pairwise."
            )

    def _network(self, problem: Problem) -> Network:
        return replace(super()._network(problem), power=self.confidence_power)

    def plan(self, problem: Problem, schedule: BoundSchedule) -> tuple[GradientPlan]:
        """Plans mean gradients of the first ``releases`` wake-ups and of a warm start."""
        most = self.releases + (self.warm_start is not None)
        # later wake-ups read no record and are not charged
        (plan,) = super().plan(problem, replace(schedule, caps=schedule.caps.clip(max=most)))
        return (replace(plan, at_cap="silent"),)

    def resolve_auto(
        self, problem: Problem, schedule: Any, privacy: Sequence[Any]
    ) -> PeerAveraging:
        """Returns these settings, and refuses a run that ``pairwise`` does not cover.

        Raises:
            ConfigError: another noise than Gaussian, absences, measured clocks or too many agents.
        """
        if self.pairwise:
            check_covered(problem.clients, schedule, privacy)
        return self

    def claim_beside(
        self,
        problem: Problem,
        state: State,
        channel: ActivationChannel,
        acting: Callable[[], Tensor],
    ) -> PairwisePrivacy | None:
        """Returns the epsilons of the agents against each other, if ``pairwise`` asks for them."""
        if not self.pairwise:
            return None
        assert channel.noise_multipliers is not None
        assert channel.delta is not None
        return pairwise_privacy(
            self.network(problem),
            acting().numpy(),
            np.broadcast_to(channel.noise_multipliers, problem.clients),
            channel.delta,
            released=state.public["answers_so_far"][0].numpy() > 0,
        )

    def init(self, problem: Problem, replicates: int = 1) -> State:
        """Starts as :class:`PeerToPeer`.

        The public state also has ``intercept`` (R, n, D), the b_i of the releases so far, and
        ``answers_so_far`` int64 (R, n), their number.
        """
        if self.pairwise and replicates > 1:
            one = "is of one run; leave out replicates and epsilons"
            raise ConfigError(f"PeerAveraging.pairwise {one}.")
        state = super().init(problem, replicates)
        theta = state.public["theta"]
        state.public["intercept"] = torch.zeros_like(theta)
        state.public["answers_so_far"] = torch.zeros(theta.shape[:2], dtype=torch.int64)
        return state

    def server_update(
        self, constants: Network, server: Arrays, rows: Arrays, answer: Answer
    ) -> tuple[Arrays, Arrays]:
        """Takes the step of :class:`PeerToPeer`.

        It is along the released gradient of an agent that answers, and along h Theta_i + b_i of one
        with spent releases; along 0 for an agent without data.
        """
        answered = answer.answered
        h_theta = constants.smoothness * answer.point
        b = rows["intercept"]
        k = rows["answers_so_far"] + answered
        # b_i is the running mean of the k releases
        share = np.where(answered, 1.0 / np.maximum(k, 1), 0.0)[..., None]
        b = b + share * (answer.gradient - h_theta - b)
        silent = np.where(k[..., None] > 0, h_theta + b, 0.0)
        gradient = np.where(answered[..., None], answer.gradient, silent)
        moved = answer._replace(gradient=gradient)
        new_server, new_rows = super().server_update(constants, server, rows, moved)
        return new_server, {**new_rows, "intercept": b, "answers_so_far": k}

    def models(self, problem: Problem, state: State, clients: Tensor) -> Tensor:
        """Returns the models of ``clients`` after their last step, (R, k, D) float64."""
        theta = state.public["theta"]
        starts = super().models(problem, state, clients)
        network = self.network(problem)
        data = self.data(problem)
        agents = clients.numpy()
        if self.refine_from == "neighbours":
            for place, agent in enumerate(agents):
                means = network.means(theta.numpy(), np.full(len(theta), agent))
                starts[:, place] = torch.from_numpy(means)
        refined = starts.clone()
        for place, agent in enumerate(agents.tolist()):
            x = data.x[agent]
            y = data.y[agent]
            if len(x) == 0:
                continue
            start = starts[:, place]
            pull = 2 * self.refine / len(x)  # of the mean loss, and of half the squared norm
            refined[:, place] += fit_own(self.linear_loss, x, y, start, pull, "frobenius")
        return refined
