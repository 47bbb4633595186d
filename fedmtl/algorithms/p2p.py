"""Personalized private peer-to-peer learning without a server (Bellet, Guerraoui, Taziki, Tommasi).

"Personalized and Private Peer-to-Peer Machine Learning", AISTATS 2018. n agents on a graph with weights W_ij minimize

    Q(Theta) = 1/2 sum_{i<j} W_ij ||Theta_i - Theta_j||^2 + mu sum_i D_ii c_i L_i(Theta_i)                       (2)

with L_i(theta) = (1/m_i) sum_j l(theta; x_ij, y_ij) + lambda_i ||theta||^2, D_ii = sum_j W_ij and c_i = m_i / max m_j.
An agent that wakes takes one block step on it, from the models that its neighbours have broadcast, and broadcasts
its own; alpha = 1 / (1 + mu c_i L_i^loc):

    Theta_i <- (1 - alpha) Theta_i + alpha (sum_j (W_ij / D_ii) Theta_j - mu c_i (grad L_i(Theta_i) + eta_i))  (4), (6)

The protected unit is a record of an agent, neighbours differ by one record replaced, observers are all peers and
whoever listens. Only the mean gradient of the data is clipped, noised and charged, through ``channel``; everything
else in the update is public, and so is the state: the noised iterate. lambda_i ||theta||^2 has no data and is never
clipped. The numbers of records m_i are public, and with them c_i, lambda_i and alpha; L_i^loc is a bound of the domain.

    algorithm = PeerToPeer(graph=ring(data.ids), mu=0.5, loss="logistic")
    Trainer(algorithm=algorithm, data=data, model=models.linear_regression(bias=False),
            schedule=PoissonClocks(per_client=10), privacy=RecordPrivacy(clip_norm=1.0, epsilon=1.0), rounds=10**6)

The stop rule is the schedule's: ``PoissonClocks(per_client=T_i)`` has every agent wake exactly T_i times and stop;
``PoissonClocks(events=T, per_client=T_i)`` ends after T ticks of all agents, at most T_i of each. The noise is
calibrated to T_i.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor

from .._check import one_of, positive
from ..errors import ConfigError
from ..graphs import Graph, GraphSettings
from ..privacy import OwnerChannel
from ..schedules import EventTable
from .base import Problem, State
from .linear import LinearData, LinearLoss, prepared
from .p2p_network import Network
from .pp_dmtl_task import bounded_rows


@dataclass(frozen=True, kw_only=True)
class PeerToPeer:
    """Asynchronous block coordinate descent over a graph, with private gradients (Bellet et al. 2018).

    Args:
        graph: who speaks with whom: a :class:`~fedmtl.graphs.Graph` of the clients' ids, or settings such as
            :class:`~fedmtl.graphs.Ring` that make one. It is public, or outside of every epsilon.
        mu: the weight of the local losses, above 0: large means local models, small one model for all.
        loss: ``"logistic"``, or ``"squared"``: (theta.x - y)^2, without 1/2.
        lam: lambda_i of every agent, above 0; ``"inverse"``: 1 / m_i, as in the paper's experiments.
        row_norm: features are shortened to this L2 norm B, a public constant; the 1 of a bias stays.
        smoothness: Lipschitz constant of the gradient of one record's loss. ``None``: that of the domain, B^2 / 4 for
            the logistic and 2 B^2 for the squared loss, with B^2 + 1 for B^2 where there is a bias. A smaller one must
            be public knowledge; only stability rests on it.
        idle_confidence: c_i of an agent without data, above 0; its loss is lambda ||theta||^2 alone.
        start: Theta(0): a public constant, a number for all coordinates or one a coordinate.

    Raises:
        ConfigError: a value outside these ranges.
    """

    graph: Graph | GraphSettings
    mu: float = 1.0
    loss: Literal["logistic", "squared"] = "logistic"
    lam: float | Literal["inverse"] = "inverse"
    row_norm: float = 1.0
    smoothness: float | None = None
    idle_confidence: float = 1e-3
    start: float | tuple[float, ...] = 0.0

    name = "p2p"
    replicates = True

    def __post_init__(self) -> None:
        if not isinstance(self.graph, (Graph, GraphSettings)):
            raise ConfigError(f"PeerToPeer.graph is {self.graph!r}; give a Graph, or settings such as Ring().")
        one_of(self, ("logistic", "squared"), loss=self.loss)
        positive(self, mu=self.mu, row_norm=self.row_norm, idle_confidence=self.idle_confidence)
        if self.lam != "inverse":
            positive(self, lam=self.lam)
        if self.smoothness is not None:
            positive(self, smoothness=self.smoothness)
        if not isinstance(self.start, (int, float)):
            object.__setattr__(self, "start", tuple(float(value) for value in self.start))

    # What it needs of the problem

    def network(self, problem: Problem) -> Network:
        """The graph in the order of the data, with the public constants of every agent; made once.

        Raises:
            ConfigError: the graph and the data have different agents.
        """

        def build() -> Network:
            given = self.graph if isinstance(self.graph, Graph) else self.graph.build(problem.data)
            counts = problem.data.train.counts.numpy().astype(np.int64)
            lam = None if self.lam == "inverse" else float(self.lam)
            most = max(1, int(counts.max()))
            smooth = self._smoothness(problem)
            graph = given.ordered(problem.data.ids)
            return Network(graph, counts, most, self.mu, lam, smooth, self.idle_confidence)

        return prepared(problem, self, build)

    def rows(self, problem: Problem) -> list[Tensor]:
        """The rows x_j of every agent, (m_i, D) float64, within the bound of the domain."""
        return list(self.data(problem).x)

    def data(self, problem: Problem) -> LinearData:
        """Rows and targets of every agent, within the bound of the domain."""
        return bounded_rows(problem, LinearLoss(self.loss), self.row_norm)

    def caps(self, problem: Problem, scheduled: np.ndarray) -> np.ndarray:
        """(n,) int64, the most wake-ups of each agent: T_i, as many as the schedule has."""
        return np.asarray(scheduled, dtype=np.int64).copy()

    def conflicts(self, problem: Problem) -> Any:
        """The graph: neighbours' wake-ups do not commute."""
        return self.network(problem).graph.weights

    def init(self, problem: Problem, replicates: int = 1) -> State:
        """Theta(0) for everyone, no data are read.

        Public: ``theta`` (R, n, D) float64; ``sent`` int64 (R,), the vectors of D numbers sent so far: a broadcast to
        k neighbours is k of them.
        """
        shape = (replicates, problem.clients, problem.dimension)
        if isinstance(self.start, tuple) and len(self.start) != problem.dimension:
            raise ConfigError(
                f"PeerToPeer.start has {len(self.start)} numbers for a model of {problem.dimension} parameters."
            )
        theta = torch.zeros(shape, dtype=torch.float64) + torch.tensor(self.start, dtype=torch.float64)
        return State({"theta": theta, "sent": torch.zeros(replicates, dtype=torch.int64)}, problem.client_store({}))

    def step(self, problem: Problem, state: State, block: EventTable, channel: OwnerChannel) -> State:
        """All wake-ups of a block, of all replicates; in place."""
        network = self.network(problem)
        run = _Run(self, network, self.data(problem), state.public, channel)
        clients = block.client.numpy().T  # (S, R)
        for start, stop in pairwise(network.cuts(block)):
            run.wake(clients[start:stop])
        return state

    def personalize(self, problem: Problem, state: State, clients: Tensor) -> Tensor:
        """Theta_i of ``clients`` in replicate 0, (k, D)."""
        return state.public["theta"][0][clients].to(problem.initial)

    def models(self, problem: Problem, state: State) -> Tensor:
        """Theta (R, n, D) float64."""
        return state.public["theta"]

    def shared(self, state: State) -> Tensor | None:
        """None: there is no model of all."""
        return None

    def objective(self, problem: Problem, state: State) -> Tensor:
        """Q(Theta) of equation (2) on the training records, (R,) float64, not private."""
        network, data, loss = self.network(problem), self.data(problem), LinearLoss(self.loss)
        theta, graph = state.public["theta"], network.graph
        total = torch.tensor([network.roughness(one) for one in theta.numpy()], dtype=torch.float64)
        weight = torch.from_numpy(self.mu * graph.normalization * network.confidence(network.counts))
        ridge = torch.from_numpy(network.ridge(network.counts))
        total += theta.square().sum(2) @ (weight * ridge)
        for i, (x, y) in enumerate(zip(data.x, data.y, strict=True)):
            if len(y):
                total += weight[i] * loss.value(theta[:, i], x, y).mean(1)
        return total

    def channel_options(self, problem: Problem, privacy: Any, caps: np.ndarray) -> dict[str, Any]:
        """What the channel of a run needs besides rows and caps, by keyword.

        Args:
            problem: of the run.
            privacy: its settings, one or one a replicate, or None.
            caps: of :meth:`caps`.
        """
        return {"notes": self.notes(problem)}

    def notes(self, problem: Problem) -> tuple[str, ...]:
        """What no epsilon of a run covers, for its report."""
        graph = self.network(problem).graph.describe()
        made = "" if isinstance(self.graph, Graph) or not self.graph.from_data else ", which was built from the records"
        return (
            f"{graph}{made}: the weights W_ij are inputs, however they were obtained",
            "the confidences c_i, lambda_i and step sizes, which are functions of the numbers of records",
            "features, centring and scaling of the rows, unless they are constants of the domain",
        )

    def _smoothness(self, problem: Problem) -> float:
        if self.smoothness is not None:
            return self.smoothness
        bias = problem.dimension - int(np.prod(problem.data.spec.shape))
        return LinearLoss(self.loss).smoothness((self.row_norm**2 + bias) ** 0.5)


class _Run:
    """The wake-ups of one block, on the arrays of the state."""

    def __init__(
        self,
        settings: PeerToPeer,
        network: Network,
        data: LinearData,
        public: dict[str, Tensor],
        channel: OwnerChannel,
    ) -> None:
        self.network, self.data, self.channel = network, data, channel
        self.loss = LinearLoss(settings.loss)
        self.points, self.theta, self.sent = public["theta"], public["theta"].numpy(), public["sent"].numpy()
        self.alone = len(self.theta) == 1

    def wake(self, part: np.ndarray) -> None:
        """Agents ``part`` (S, R) that are no neighbours of one another; -1 is nobody."""
        if self.alone and len(part) == 1 and part[0, 0] >= 0:
            self.one(int(part[0, 0]))
            return
        which, where = np.nonzero(part >= 0)
        agents = part[which, where]
        answers = self.channel.release_run(len(part), self.scales).numpy()[which, where]
        keep, share, push = self.network.coefficients(self.network.counts[agents])
        means = self.network.means(self.theta, where, agents)
        self.theta[where, agents] = (
            keep[:, None] * self.theta[where, agents] + share[:, None] * means - push[:, None] * answers
        )
        np.add.at(self.sent, where, self.network.graph.degrees[agents])

    def one(self, agent: int) -> None:
        """As :meth:`wake` for a single agent of a single run."""
        network = self.network
        answer = self.channel.release(lambda owner, where: self.scales(owner, where, where)).numpy()[0]
        keep, share, push = network.coefficients(network.counts[agent : agent + 1])
        mean = network.mean_of(self.theta[0], agent)
        row = self.theta[0, agent]
        row *= keep[0]
        mean *= share[0]
        row += mean
        row -= push[0] * answer
        self.sent[0] += network.graph.degrees[agent]

    def scales(self, agent: int, which: Tensor, where: Tensor) -> Tensor:
        """(k, m_i) factors of the rows at the agent's models in repetitions ``where``."""
        points = self.points[:, agent] if self.alone else self.points[where, agent]
        return self.loss.scale(points, self.data.x[agent], self.data.y[agent])
