"""Personalized private peer-to-peer learning without a server (Bellet, Guerraoui, Taziki, Tommasi).

"Personalized and Private Peer-to-Peer Machine Learning", AISTATS 2018. n agents on a graph with
weights W_ij minimize

    Q(Theta) = 1/2 sum_{i<j} W_ij ||Theta_i - Theta_j||^2 + mu sum_i D_ii c_i L_i(Theta_i)       (2)

with D_ii = sum_j W_ij, c_i = m_i / max m_j and

    L_i(theta) = (1/m_i) sum_j l(theta; x_ij, y_ij) + lambda_i ||theta||^2                       (1)

An agent that wakes takes one block step on it, from the models that its neighbours have broadcast,
and broadcasts its own; alpha = 1 / (1 + mu c_i L_i^loc):

    Theta_i <- (1 - alpha) Theta_i
               + alpha (sum_j (W_ij / D_ii) Theta_j - mu c_i (grad L_i(Theta_i) + eta_i))   (4), (6)

In the state ``theta`` has the Theta_i; :class:`~.network.Network` has W_ij / D_ii (of the
``neighbours``, over which ``means`` takes the sum), c_i (``confidence``), lambda_i (``ridge``),
L_i^loc (``curvature``) and ``alpha``.

The protected unit is a record of an agent, neighbours differ by one record replaced, observers are
all peers and any eavesdropper. Only the mean gradient of the data is clipped, noised and charged;
everything else in the update is public, and so is the state: the noised iterate. lambda_i
||theta||^2 has no data and is never clipped. The numbers of records m_i are public, and with them
c_i, lambda_i and alpha; L_i^loc is a bound of the domain. Theorem 1 of the paper adds Laplace noise
for a bound in another norm than that noise needs (:mod:`fedmtl.contrib.published.p2p`). There is no
server: ``server_update`` is the waking agent's step, a function of the release and public values.

    Trainer(algorithm=PeerToPeer(graph=Ring(), mu=0.5, loss="squared", feature_norm=1.0), data=data,
            model=models.linear_regression(bias=False), schedule=PoissonClocks(per_client=10),
            privacy=RecordPrivacy(clip_norm=1.0, epsilon=1.0), rounds=999).fit()

The stop rule is the schedule's: ``PoissonClocks(per_client=T_i)`` has every agent wake exactly T_i
times and stop; ``PoissonClocks(activations=T, per_client=T_i)`` ends after T ticks of all agents,
at most T_i of each. The noise is calibrated to T_i. A run starts at Theta(0) = 0, or at a private
warm start (Remark 3, :mod:`.warm_start`), for which every agent releases its own model before the
clocks start: one more release, with a share of the budget.

:class:`~fedmtl.contrib.peer_averaging.PeerAveraging`, which is not in the paper, releases once.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import partial
from typing import Any, ClassVar, Literal

import numpy as np
import torch
from torch import Tensor

from ..._check import Fraction, Positive
from ...errors import ConfigError, PrivacyError
from ...graphs import Graph, GraphSettings
from ...privacy import ActivationChannel, GradientPlan, RecordPrivacy
from ...privacy.noise.laws import LAWS
from ...schedules import Block, BoundSchedule
from ..base import Problem, Public, State
from ..linear.data import prepared
from ..one_at_a_time import Answer, Arrays, OneAtATime
from .allocation import Allocation, wakeup_weights
from .network import Array, Network
from .warm_start import as_gradients, check_accuracy, mean_at_minimizer, spread


@dataclass(frozen=True, kw_only=True)
class PeerToPeer(OneAtATime):
    """Trains models over a graph by asynchronous block coordinate descent (Bellet et al. 2018).

    Args:
        graph: the neighbours of every agent: a :class:`~fedmtl.graphs.Graph` of the clients' ids,
            or settings such as :class:`~fedmtl.graphs.Ring` that make one. It is public, or outside
            of every epsilon.
        mu: the weight of the local losses, above 0: large means local models, small one model for
            all.
        loss: ``"logistic"``, or ``"squared"``: (theta.x - y)^2, without 1/2.
        lam: lambda_i of every agent, above 0; ``"inverse"``: 1 / m_i, as in the paper's
            experiments.
        feature_norm: B, a public bound on the L2 norm of a record's features, which are scaled down
            to it in training and wherever the models are used; the 1 of a bias stays. ``"auto"``:
            the bound that the data state. If they state none, a run without privacy leaves all rows
            as they are, and one with privacy is refused. None: no bound, without privacy only.
        target: a public bound on abs(y) of the squared loss, at which training targets are cut off.
            ``"auto"``: that of the data, if they state one. None: 2^40.
        smoothness: Lipschitz constant of the gradient of one record's loss. ``None``: that of the
            domain, B^2 / 4 for the logistic and 2 B^2 for the squared loss, with B^2 + 1 for B^2 if
            there is a bias. A smaller one must be public knowledge; only stability rests on it.
        allocation: of the budget to an agent's wake-ups, see
            :func:`~fedmtl.algorithms.p2p.allocation.wakeup_weights`; ``"optimal"`` uses less noise
            late.
        warm_start: the share of every agent's budget, above 0 and below 1, for a first release of
            its own model, from which all models start (:mod:`~fedmtl.algorithms.p2p.warm_start`);
            None for no warm start. It is a share of the sum of the epsilons of single releases. The
            noise on an agent's own model is proportional to 1 / (m_i ``lam``).

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
    warm_start: Fraction | None = None

    by_client: ClassVar[tuple[str, ...]] = ("theta",)
    name = "p2p"
    title = "Peer-to-peer"
    colour = "#a0522d"
    accepts_empty_clients = True

    def __post_init__(self) -> None:
        if not isinstance(self.graph, (Graph, GraphSettings)):
            accepted = "give a Graph, or settings such as Ring()"
            raise ConfigError(f"PeerToPeer.graph is {self.graph!r}; {accepted}.")
        super().__post_init__()

    # The network and the releases

    def network(self, problem: Problem) -> Network:
        """Returns the graph with the public constants of every agent, in the order of the data.

        It is made once for data and model.

        Args:
            problem: of the run; the ids of its clients and the numbers of their records are read.

        Raises:
            ConfigError: the graph and the data have different agents.
        """
        return prepared(problem, self, lambda: self._network(problem))

    def _network(self, problem: Problem) -> Network:
        graph = self.graph
        if not isinstance(graph, Graph):
            graph = graph.build(problem.data)
        lam = None  # inversely proportional to the number of records
        if self.lam != "inverse":
            lam = float(self.lam)
        return Network(
            graph.ordered(problem.data.ids),
            counts=problem.data.train.counts.numpy().astype(np.int64),
            mu=self.mu,
            lam=lam,
            smoothness=self.smoothness or self.linear_loss.smoothness(self.largest_row(problem)),
        )

    def scheduled(self, schedule: Any) -> Any:
        """Returns the schedule of a run; with a warm start, every agent acts once before it."""
        if self.warm_start is None:
            return schedule
        return schedule.with_initial_activations()

    def plan(self, problem: Problem, schedule: BoundSchedule) -> tuple[GradientPlan]:
        """Plans mean gradients of the agents' records, T_i of each, and one more for a warm start.

        Raises:
            ConfigError: a warm start in a run that is too short, with an agent that never wakes up,
                or with one that cannot compute its model exactly enough.
        """
        (plan,) = super().plan(problem, schedule)
        if self.warm_start is not None:
            if problem.rounds <= problem.clients or not np.all(schedule.caps):
                raise ConfigError(
                    f"PeerToPeer.warm_start: each of {problem.clients:,} agents answers once "
                    f"before the first wake-up, and must wake; the run has {problem.rounds:,} "
                    "activations. Give more rounds, and every agent a rate and a cap above 0."
                )
            check_accuracy(self.network(problem), problem.dimension)
        given_noise = partial(self.given_noise, problem, np.asarray(plan.caps))
        return (replace(plan, notes=self.notes(problem), given_noise=given_noise),)

    def given_noise(
        self, problem: Problem, caps: np.ndarray, privacy: RecordPrivacy
    ) -> dict[str, Any]:
        """Returns the fields of the plan that depend on the privacy settings: the allocation.

        Args:
            problem: of the run.
            caps: int64 (n,), the most releases of each agent.
            privacy: the settings.

        Raises:
            PrivacyError: a warm start with a law of the noise that is not for the L2 norm.
        """
        if self.allocation == "uniform" and self.warm_start is None:
            return {}
        self.check_law(privacy)
        return {"allocation": self.weights(problem, caps, privacy)}

    def check_law(self, privacy: RecordPrivacy) -> None:
        """Refuses a warm start with noise for another norm than that of its sensitivity.

        The published form of the method accepts other laws, see
        :mod:`fedmtl.contrib.published.p2p`.

        Args:
            privacy: of the run.

        Raises:
            PrivacyError: names the laws that are accepted.
        """
        if self.warm_start is not None and LAWS[privacy.mechanism].norm != "l2":
            raise PrivacyError(
                "PeerToPeer.warm_start: how far an agent's own model moves is bounded in the L2 "
                f"norm, and privacy.mechanism={privacy.mechanism!r} is noise for the "
                f"{LAWS[privacy.mechanism].norm} norm. Use 'gaussian' or 'l2_laplace'."
            )

    def weights(
        self, problem: Problem, caps: np.ndarray, privacy: RecordPrivacy
    ) -> list[np.ndarray]:
        """Returns the weights of the releases of every agent, of mean 1.

        They are those of the wake-ups by ``allocation``, after that of a warm start. Agents with
        equal caps share an array.

        Args:
            problem: of the run.
            caps: int64 (n,), most releases of each agent.
            privacy: of the run; its law of noise sets how releases compose.

        Returns:
            float64 (caps[i],) for each agent.
        """
        network = self.network(problem)
        contraction = 1.0 - network.convexity / network.largest_curvature
        # pure mechanisms add up their epsilons, others the squares
        root: Literal[3, 4] = 4
        if LAWS[privacy.mechanism].pure and privacy.delta == 0:
            root = 3
        made = {}
        for cap in np.unique(caps).tolist():
            wakeups = cap
            if self.warm_start is not None:
                wakeups = max(0, cap - 1)
            weights = np.ones(0)
            if wakeups:
                weights = wakeup_weights(self.allocation, wakeups, contraction, root=root)
            if self.warm_start is not None:
                weights = self._with_warm_start(weights)
            made[cap] = weights
        return [made[cap] for cap in caps.tolist()]

    def _with_warm_start(self, wakeups: Array) -> Array:
        """Returns the weights (T + 1,), of mean 1, of a warm start and of wake-ups.

        Args:
            wakeups: (T,), the weights of the wake-ups alone.
        """
        assert self.warm_start is not None
        if not len(wakeups):
            return np.ones(1)
        first = wakeups.sum() * self.warm_start / (1 - self.warm_start)
        weights = np.concatenate([[first], wakeups])
        normalized: Array = weights / weights.mean()
        return normalized

    def notes(self, problem: Problem) -> tuple[str, ...]:
        """Returns the notes on everything outside of epsilon, for the report of a run.

        Args:
            problem: of the run.
        """
        graph = self.network(problem).graph.describe()
        if not isinstance(self.graph, Graph) and self.graph.from_data:
            graph += ", which was built from the records"
        constants = "the confidences c_i, lambda_i and step sizes"
        return (
            f"{graph}: the weights W_ij are inputs, however they were obtained",
            f"{constants}, which are functions of the numbers of records",
            "features, centring and scaling of the rows, unless they are constants of the domain",
        )

    # The run

    def init(self, problem: Problem, replicates: int = 1) -> State:
        """Starts all agents at Theta(0) = 0; no data are read.

        The public state: ``theta`` (R, n, D) float64; ``sent`` int64 (R,), the number of vectors of
        D numbers sent so far, k of them for a broadcast to k neighbours; and with a warm start
        ``warm_models`` (R, n, D), the agents' released models.
        """
        theta = torch.zeros(replicates, problem.clients, problem.dimension, dtype=torch.float64)
        public = {"theta": theta, "sent": torch.zeros(replicates, dtype=torch.int64)}
        if self.warm_start is not None:
            public["warm_models"] = torch.zeros_like(theta)
        return State(public, problem.client_store({}))

    def step(
        self, problem: Problem, state: State, block: Block, channel: ActivationChannel
    ) -> State:
        """Computes the activations of a block in their order, of all runs; in place.

        With a warm start, agents release their own models in the first n activations of a run.
        """
        initial = 0
        if self.warm_start is not None:
            initial = problem.clients
        first = min(len(block), max(0, initial - block.first))
        if first:
            self._release_own(problem, state.public, block.window(0, first), channel)
            if block.first + first == initial:
                self._start(problem, state.public)
        if first == len(block):
            return state
        return super().step(problem, state, block.window(first, len(block)), channel)

    def _release_own(
        self, problem: Problem, public: Public, block: Block, channel: ActivationChannel
    ) -> None:
        """Lets agents release their own models, Theta^loc with noise, one after another."""
        network = self.network(problem)
        data = self.data(problem)
        clip = channel.records.clip
        for clients in block.client.T.tolist():
            answers = []
            for agent, runs in channel.acting:
                x = data.x[agent].numpy()
                y = data.y[agent].numpy()
                ridge = float(network.ridge[agent])
                mean = mean_at_minimizer(self.linear_loss, x, y, ridge, clip)
                answers.append(as_gradients(mean, len(runs), len(x)))
            # -2 lambda_i Theta_i^loc, with noise
            values = torch.from_numpy(channel.release(answers))
            for run, agent in enumerate(clients):
                if agent >= 0 and network.counts[agent]:
                    public["warm_models"][run, agent] = values[run] / (
                        -2 * float(network.ridge[agent])
                    )
                    public["sent"][run] += int(network.graph.degrees[agent])

    def _start(self, problem: Problem, public: Public) -> None:
        """Starts all models at the fixed point of the released ones, see
        :func:`.warm_start.spread`."""
        network = self.network(problem)
        own = public["warm_models"].transpose(0, 1)  # (n, R, D)
        local = own.reshape(len(own), -1).numpy()
        start = spread(network, local, network.counts > 0).reshape(own.shape)
        public["theta"].copy_(torch.from_numpy(start).transpose(0, 1))

    def constants(self, problem: Problem) -> Network:
        """Returns the network, see :meth:`network`."""
        return self.network(problem)

    def query_point(self, constants: Network, server: Arrays, rows: Arrays) -> Array:
        """Returns the agent's own model, (D,)."""
        return rows["theta"]

    def server_update(
        self, constants: Network, server: Arrays, rows: Arrays, answer: Answer
    ) -> tuple[Arrays, Arrays]:
        """Takes the agent's step from its neighbours' broadcasts, and broadcasts its model."""
        network = constants
        agent = answer.client
        theta = rows["theta"]
        alpha, rest, pull, ridge = (each.take(agent, 0) for each in network.step_columns)
        gradient = answer.gradient + ridge * theta  # of L_i, with eta_i
        means = network.means(server["theta"], agent)
        moved = rest * theta + alpha * (means - pull * gradient)  # (4), (6)
        return {"sent": server["sent"] + network.graph.degrees[agent]}, {"theta": moved}

    def models(self, problem: Problem, state: State, clients: Tensor) -> Tensor:
        """Returns Theta_i of ``clients`` in every replicate, (R, k, D) float64."""
        return state.public["theta"][:, clients]

    def objective(self, problem: Problem, state: State) -> Tensor:
        """Returns Q(Theta) of equation (2) on all training records, (R,) float64; not private."""
        network = self.network(problem)
        data = self.data(problem)
        theta = state.public["theta"]
        roughness = [network.roughness(models) for models in theta.numpy()]
        total = torch.tensor(roughness, dtype=torch.float64)
        # mu D_ii c_i
        weight = torch.from_numpy(self.mu * network.graph.normalization * network.confidence)
        total += theta.square().sum(2) @ (weight * torch.from_numpy(network.ridge))
        for i in np.flatnonzero(network.counts).tolist():
            total += weight[i] * self.linear_loss.value(theta[:, i], data.x[i], data.y[i]).mean(1)
        return total
