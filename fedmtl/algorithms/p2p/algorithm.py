"""Personalized private peer-to-peer learning without a server (Bellet, Guerraoui, Taziki, Tommasi).

"Personalized and Private Peer-to-Peer Machine Learning", AISTATS 2018. n agents on a graph with weights W_ij minimize

    Q(Theta) = 1/2 sum_{i<j} W_ij ||Theta_i - Theta_j||^2 + mu sum_i D_ii c_i L_i(Theta_i)                       (2)

with D_ii = sum_j W_ij, c_i = m_i / max m_j and

    L_i(theta) = (1/m_i) sum_j l(theta; x_ij, y_ij) + lambda_i ||theta||^2                                       (1)

An agent that wakes takes one block step on it, from the models that its neighbours have broadcast, and broadcasts
its own; alpha = 1 / (1 + mu c_i L_i^loc):

    Theta_i <- (1 - alpha) Theta_i + alpha (sum_j (W_ij / D_ii) Theta_j - mu c_i (grad L_i(Theta_i) + eta_i))  (4), (6)

The protected unit is a record of an agent, neighbours differ by one record replaced, observers are all peers and any
eavesdropper. Only the mean gradient of the data is clipped, noised and charged; everything else in the update is
public, and so is the state: the noised iterate. lambda_i ||theta||^2 has no data and is never clipped. The numbers of
records m_i are public, and with them c_i, lambda_i and alpha; L_i^loc is a bound of the domain.

    Trainer(algorithm=PeerToPeer(graph=Ring(), mu=0.5, loss="squared", row_norm=1.0), data=data,
            model=models.linear_regression(bias=False), schedule=PoissonClocks(per_client=10),
            privacy=RecordPrivacy(clip_norm=1.0, epsilon=1.0), rounds=999).fit()

The stop rule is the schedule's: ``PoissonClocks(per_client=T_i)`` has every agent wake exactly T_i times and stop;
``PoissonClocks(events=T, per_client=T_i)`` ends after T ticks of all agents, at most T_i of each. The noise is
calibrated to T_i.

:class:`~fedmtl.algorithms.peer_averaging.PeerAveraging`, which is not in the paper, releases once.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor

from ..._check import Positive
from ...errors import ConfigError
from ...graphs import Graph, GraphSettings
from ...privacy import GradientPlan, RecordPrivacy
from ...privacy.noise.laws import LAWS
from ...schedules import BoundSchedule
from ..activations import Answers, OneAtATime, client_rows
from ..base import Problem, State
from ..linear.data import prepared
from .allocation import Allocation, wakeup_weights
from .network import Array, Ints, Network


@dataclass(frozen=True, kw_only=True)
class PeerToPeer(OneAtATime):
    """Asynchronous block coordinate descent over a graph, with private gradients (Bellet et al. 2018).

    Args:
        graph: who speaks with whom: a :class:`~fedmtl.graphs.Graph` of the clients' ids, or settings such as
            :class:`~fedmtl.graphs.Ring` that make one. It is public, or outside of every epsilon.
        mu: the weight of the local losses, above 0: large means local models, small one model for all.
        loss: ``"logistic"``, or ``"squared"``: (theta.x - y)^2, without 1/2.
        lam: lambda_i of every agent, above 0; ``"inverse"``: 1 / m_i, as in the paper's experiments.
        row_norm: B, a public bound on the L2 norm of a record's features, which are scaled down to it in training and
            wherever the models are used; the 1 of a bias stays. ``"auto"``: the bound that the data state; where they
            state none, a run without privacy leaves all rows as they are and one with privacy is refused. None: no
            bound, without privacy only.
        target: a public bound on abs(y) of the squared loss, at which training targets are cut off. ``"auto"``: that of
            the data, where they state one. None: 2^40.
        smoothness: Lipschitz constant of the gradient of one record's loss. ``None``: that of the domain, B^2 / 4 for
            the logistic and 2 B^2 for the squared loss, with B^2 + 1 for B^2 where there is a bias. A smaller one must
            be public knowledge; only stability rests on it.
        allocation: how the budget is spread over an agent's wake-ups, see
            :func:`~fedmtl.algorithms.p2p.allocation.wakeup_weights`; ``"optimal"`` uses less noise late.

    Raises:
        ConfigError: a value outside these ranges.

    Example:
        >>> from fedmtl import PeerToPeer, PoissonClocks, RecordPrivacy, Trainer, load_data, models
        >>> from fedmtl.graphs import Ring
        >>> trainer = Trainer(
        ...     algorithm=PeerToPeer(graph=Ring()),
        ...     data=load_data("synthetic_tasks", tasks=4),
        ...     model=models.linear_regression(bias=False),
        ...     schedule=PoissonClocks(per_client=2),
        ...     privacy=RecordPrivacy(clip_norm=1.0, epsilon=8.0),
        ...     rounds=8,
        ...     progress=False,
        ... )
        >>> trainer.fit().personal.shape
        torch.Size([4, 28])
    """

    graph: Graph | GraphSettings
    mu: Positive = 1.0
    loss: Literal["logistic", "squared"] = "logistic"
    lam: Positive | Literal["inverse"] = "inverse"
    smoothness: Positive | None = None
    allocation: Allocation = "uniform"

    name, title, colour = "p2p", "Peer-to-peer", "#a0522d"
    accepts_empty_clients = True

    def __post_init__(self) -> None:
        if not isinstance(self.graph, (Graph, GraphSettings)):
            raise ConfigError(f"PeerToPeer.graph is {self.graph!r}; give a Graph, or settings such as Ring().")
        super().__post_init__()

    # What it needs of the problem

    def network(self, problem: Problem) -> Network:
        """Return the graph in the order of the data, with the public constants of every agent; made once.

        Raises:
            ConfigError: the graph and the data have different agents.
        """
        return prepared(problem, self, lambda: self._network(problem))

    def _network(self, problem: Problem) -> Network:
        graph = self.graph if isinstance(self.graph, Graph) else self.graph.build(problem.data)
        return Network(
            graph.ordered(problem.data.ids),
            counts=problem.data.train.counts.numpy().astype(np.int64),
            mu=self.mu,
            lam=None if self.lam == "inverse" else float(self.lam),
            smoothness=self.smoothness or self.linear_loss.smoothness(self.largest_row(problem)),
        )

    def plan(self, problem: Problem, schedule: BoundSchedule) -> tuple[GradientPlan]:
        """Plan mean gradients of the agents' records, T_i of each."""
        (plan,) = super().plan(problem, schedule)
        given_noise = partial(self.given_noise, problem, np.asarray(plan.caps))
        return (replace(plan, notes=self.notes(problem), given_noise=given_noise),)

    def given_noise(self, problem: Problem, caps: np.ndarray, privacy: RecordPrivacy) -> dict[str, Any]:
        """Return what of the plan depends on the noise; ``caps`` are the most releases of each agent."""
        return {} if self.allocation == "uniform" else {"allocation": self.weights(problem, caps, privacy)}

    def weights(self, problem: Problem, caps: np.ndarray, privacy: RecordPrivacy) -> list[np.ndarray]:
        """Return weights of the wake-ups of every agent, (caps[i],) of mean 1, by ``allocation``; equal ones are
        shared."""
        network = self.network(problem)
        contraction = 1.0 - network.convexity / network.largest_curvature
        pure = LAWS[privacy.mechanism].pure and privacy.delta == 0
        made = {
            cap: wakeup_weights(self.allocation, cap, contraction, root=3 if pure else 4) if cap else np.ones(0)
            for cap in np.unique(caps).tolist()
        }
        return [made[cap] for cap in caps.tolist()]

    def notes(self, problem: Problem) -> tuple[str, ...]:
        """Return what no epsilon of a run covers, for its report."""
        graph = self.network(problem).graph.describe()
        made = "" if isinstance(self.graph, Graph) or not self.graph.from_data else ", which was built from the records"
        return (
            f"{graph}{made}: the weights W_ij are inputs, however they were obtained",
            "the confidences c_i, lambda_i and step sizes, which are functions of the numbers of records",
            "features, centring and scaling of the rows, unless they are constants of the domain",
        )

    # The run

    def init(self, problem: Problem, replicates: int = 1) -> State:
        """Start everyone at Theta(0) = 0; no data are read.

        Public: ``theta`` (R, n, D) float64; ``sent`` int64 (R,), the vectors of D numbers sent so far: a broadcast to
        k neighbours is k of them.
        """
        theta = torch.zeros(replicates, problem.clients, problem.dimension, dtype=torch.float64)
        public = {"theta": theta, "sent": torch.zeros(replicates, dtype=torch.int64)}
        return State(public, problem.client_store({}))

    def points(self, problem: Problem, public: Mapping[str, Tensor]) -> Callable[[Ints], Array]:
        """Return the agents' own models, at which they answer."""
        theta = client_rows(public["theta"])
        return lambda at: theta.take(at, 0)

    def serve(self, problem: Problem, public: Mapping[str, Tensor]) -> Callable[[Answers], None]:
        """Let an agent wake in each of R repetitions: it computes its step from what its neighbours have broadcast."""
        network, theta, every_run = self.network(problem), public["theta"].numpy(), np.arange(len(public["theta"]))
        rows, sent = client_rows(public["theta"]), public["sent"].numpy()

        def serve(answers: Answers) -> None:
            who, own = answers.clients, answers.points
            alpha, pull = network.alpha[who, None], self.mu * network.confidence[who, None]
            gradient = answers.values + 2 * network.ridge[who, None] * own  # of L_i, with eta_i
            means = network.means(theta, every_run[answers.runs], who)
            rows[answers.at] = (1 - alpha) * own + alpha * (means - pull * gradient)  # (4), (6)
            sent[answers.runs] += network.graph.degrees[who]

        return serve

    def models(self, problem: Problem, state: State, clients: Tensor) -> Tensor:
        """Return Theta_i of ``clients`` in every replicate, (R, k, D) float64."""
        return state.public["theta"][:, clients]

    def objective(self, problem: Problem, state: State) -> Tensor:
        """Return Q(Theta) of equation (2) on all training records and the whole graph, (R,) float64, not private."""
        network, theta, data = self.network(problem), state.public["theta"], self.data(problem)
        total = torch.tensor([network.roughness(models) for models in theta.numpy()], dtype=torch.float64)
        weight = torch.from_numpy(self.mu * network.graph.normalization * network.confidence)
        total += theta.square().sum(2) @ (weight * torch.from_numpy(network.ridge))
        for i in np.flatnonzero(network.counts).tolist():
            total += weight[i] * self.linear_loss.value(theta[:, i], data.x[i], data.y[i]).mean(1)
        return total
