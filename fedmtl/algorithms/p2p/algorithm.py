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

An agent's budget allows so many releases. With ``releases=K`` they are those of its first K wake-ups, and in later ones
it goes on averaging, free of charge: it steps along what it has released before (g_1, ..., g_K at Theta_i(1), ...,
Theta_i(K)), taken to its present model by the public curvature h of the domain, and reads no record,

    grad L_i(Theta_i) + eta_i  ->  (1/K) sum_k (g_k + h (Theta_i - Theta_i(k))) + 2 lambda_i Theta_i

With one release its gradient is at the public start, since nobody else moves its model, and however the agents wake,
they end at the minimum of (2) with quadratic losses of those gradients: the solution Theta of the linear system

    (D + mu D C (h + 2 Lambda) - W) Theta = mu D C (h Theta(0) - G)

with one right-hand side a coordinate. All of the budget is in one release, as little noise as there can be, and
everything after it is post-processing.

Agents may come and go (``absences``), and records may arrive during a run (``arrivals``); budgets persist.

The stop rule is the schedule's: ``PoissonClocks(per_client=T_i)`` has every agent wake exactly T_i times and stop;
``PoissonClocks(events=T, per_client=T_i)`` ends after T ticks of all agents, at most T_i of each. The noise is
calibrated to T_i.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor

from ..._check import given, non_negative, one_of, positive, positive_int, positive_or
from ...data import FederatedDataset, RowBound
from ...errors import ConfigError, PrivacyError
from ...graphs import Graph, GraphSettings
from ...privacy import Channel, GradientMessage, GradientPlan, PublishedClaim, RecordPrivacy, WarmStartRelease
from ...privacy.accounting.kov import kov_heterogeneous
from ...privacy.channel import GRADIENT
from ...privacy.noise.registry import LAWS
from ...schedules import Block, BoundSchedule, Dropouts
from ..base import Own, Problem, Released, Round, State
from ..linear.data import LinearAlgorithm, prepared
from ..linear.solve import fit_own
from .allocation import Allocation, wakeup_weights
from .availability import Availability, arrival_steps
from .model import LinearRecords, ModelRecords
from .network import Network
from .steps import GraphData, GraphState
from .warm_start import LocalFits, make_warm_start

REFUTED = (
    "i.i.d. Laplace noise of scale 2 L0 / (epsilon m) needs the L1 norm of every record's gradient within L0; the "
    "claim takes L0 for a Lipschitz constant with respect to the L1 norm, which bounds the largest coordinate alone"
)
REFUTED_START = "; and the run starts from models fitted to the raw records, which no noise covers"
_ALONE = np.zeros(1, dtype=np.int64)
"""The repetition of a run that is computed in the parts of client and server."""


@dataclass(frozen=True, kw_only=True)
class PeerToPeer(LinearAlgorithm):
    """Asynchronous block coordinate descent over a graph, with private gradients (Bellet et al. 2018).

    Args:
        graph: who speaks with whom: a :class:`~fedmtl.graphs.Graph` of the clients' ids, or settings such as
            :class:`~fedmtl.graphs.Ring` that make one. It is public, or outside of every epsilon.
        mu: the weight of the local losses, above 0: large means local models, small one model for all.
        loss: ``"logistic"``, or ``"squared"``: (theta.x - y)^2, without 1/2, of linear models; or ``"model"``: the
            problem's own model and loss, whatever they are (beyond the paper), which needs ``smoothness``.
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
        idle_confidence: c_i of an agent without data, above 0; its loss is lambda ||theta||^2 alone.
        start: Theta(0), a public constant: a number for all coordinates or one a coordinate; ``None``: 0, and with
            ``loss="model"`` the model's own start. ``"local"``: every agent's fit of its own raw records, without
            privacy only, or under ``guarantee="paper"``.
        warm_start: None, or the share of every agent's budget, in (0, 1), for a first release of its exact local
            minimizer, from which all models start (:mod:`fedmtl.algorithms.p2p.warm_start`); linear models only.
        warm_lam: lambda of those local fits: the noise of the release is proportional to 1 / (m_i lambda). None: that
            of the run, with which ``lam="inverse"`` gives the same noise to every m_i.
        allocation: how the budget is spread over an agent's wake-ups, see
            :func:`~fedmtl.algorithms.p2p.allocation.wakeup_weights`; ``"optimal"`` uses less noise late.
        absences: when agents are away, as intervals of virtual time by id: give the schedule the same. One that is
            away at time 0 joins later, from its neighbours' weighted mean.
        refine: a, above 0, of every agent's own last step, which never leaves it and so costs nothing: its personal
            model is argmin_v sum_j l(v; x_ij, y_ij) + a ||v - Theta_i||^2 on its raw records. None: Theta_i. Linear
            models only.
        refine_from: where that last step begins, and what it is pulled to: the agent's ``"own"`` model, or its
            ``"neighbours"``' mean sum_j (W_ij / D_ii) Theta_j, in which there is less of its own noise: the exact
            minimum of Q in its block of coordinates on the raw records. Without neighbours, its own.
        releases: K, the most releases of an agent, those of its first wake-ups; afterwards it goes on averaging
            without its records. None: every wake-up is one.
        confidence_power: k of c_i = (m_i / max_j m_j)^k, at least 0. 1 is the paper's; with 2 models weigh as the
            inverse of their noise's variance, which is proportional to 1 / m_i^2.
        departed: what neighbours make of the model of an agent that has left: ``"forget"`` it, or ``"keep"`` the last.
        arrivals: by id, the number of the event (from 0) from which each of a client's training records is there, in
            their order; the others have all of theirs from the start. m_i counts what is there, max_j m_j what ever is.
        guarantee: ``"sound"``; or ``"paper"``, for reproduction: Laplace noise with every record's gradient clipped in
            the *L2* norm, where a record moves the L1 norm up to sqrt(D) times as far as Theorem 1 has it, so that the
            epsilon is infinite; linear models only.

    Raises:
        ConfigError: a value outside these ranges, or settings that exclude one another.
    """

    graph: Graph | GraphSettings
    mu: float = 1.0
    loss: Literal["logistic", "squared", "model"] = "logistic"
    lam: float | Literal["inverse"] = "inverse"
    row_norm: float | Literal["auto"] | None = "auto"
    target: float | Literal["auto"] | None = "auto"
    smoothness: float | None = None
    idle_confidence: float = 1e-3
    start: float | tuple[float, ...] | Literal["local"] | None = None
    warm_start: float | None = None
    warm_lam: float | None = None
    allocation: Allocation = "uniform"
    absences: Dropouts | None = None
    refine: float | None = None
    refine_from: Literal["own", "neighbours"] = "own"
    releases: int | None = None
    confidence_power: float = 1.0
    departed: Literal["forget", "keep"] = "forget"
    arrivals: Mapping[str, Sequence[int]] | None = None
    guarantee: Literal["sound", "paper"] = "sound"

    name = "p2p"
    supports_replicates = True
    one_at_a_time = True
    accepts_empty_clients = True

    def __post_init__(self) -> None:
        if not isinstance(self.graph, (Graph, GraphSettings)):
            raise ConfigError(f"PeerToPeer.graph is {self.graph!r}; give a Graph, or settings such as Ring().")
        one_of(self, ("logistic", "squared", "model"), loss=self.loss)
        one_of(self, ("sound", "paper"), guarantee=self.guarantee)
        one_of(self, ("forget", "keep"), departed=self.departed)
        one_of(self, ("own", "neighbours"), refine_from=self.refine_from)
        if self.releases is not None:
            positive_int(self, releases=self.releases)
        non_negative(self, confidence_power=self.confidence_power)
        positive(self, mu=self.mu, idle_confidence=self.idle_confidence)
        self.check_bounds()
        positive_or(self, "inverse", lam=self.lam)
        positive(self, **given(smoothness=self.smoothness, warm_lam=self.warm_lam, refine=self.refine))
        if self.start is not None and not isinstance(self.start, (int, float, str)):
            object.__setattr__(self, "start", tuple(float(value) for value in self.start))
        if isinstance(self.start, str):
            one_of(self, ("local",), start=self.start)
        if self.arrivals is not None:
            fixed = {str(name): tuple(int(step) for step in steps) for name, steps in self.arrivals.items()}
            object.__setattr__(self, "arrivals", fixed)
        wakeup_weights(self.allocation, 2, 0.5)
        self._check_together()

    def _check_together(self) -> None:
        positive(self, **given(warm_start=self.warm_start))
        if self.warm_start is not None and self.warm_start >= 1:
            raise ConfigError(f"PeerToPeer.warm_start is {self.warm_start!r}; it is a share, between 0 and 1.")
        idle = {
            "warm_lam": (self.warm_lam is not None and self.warm_start is None, "warm_start"),
            "refine_from": (self.refine_from != "own" and self.refine is None, "refine"),
            "departed": (self.departed != "forget" and self.absences is None, "absences"),
        }
        for field, (ineffective, needed) in idle.items():
            if ineffective:
                raise ConfigError(
                    f"PeerToPeer.{field} is {getattr(self, field)!r}, which has no effect without {needed}; give "
                    f"{needed}, or leave it out."
                )
        if self.warm_start is not None and self.start is not None:
            raise ConfigError("PeerToPeer has both start and warm_start; a run starts from one of them.")
        if self.warm_start is not None and (self.absences is not None or self.arrivals is not None):
            raise ConfigError("PeerToPeer.warm_start needs all agents and records from the start.")
        if self.loss == "model":
            if self.smoothness is None:
                raise ConfigError("PeerToPeer.loss='model' needs smoothness: no bound on the domain is known.")
            fits = {"warm_start": self.warm_start, "start": self.start == "local" or None, "refine": self.refine}
            for field, value in fits.items():
                if value is not None:
                    raise ConfigError(f"PeerToPeer.{field} needs exact local fits, of linear models only.")
            if self.guarantee == "paper":
                raise ConfigError("PeerToPeer.guarantee='paper' is of linear models only.")

    def __hash__(self) -> int:
        return hash(
            (self.mu, self.loss, self.lam, self.row_norm, self.target, self.guarantee)
        )  # mappings are compared, not hashed

    def check_data(self, data: FederatedDataset) -> None:
        """Refuse more than two classes, which ``loss="model"`` takes."""
        if self.loss != "model":
            super().check_data(data)

    def resolve_auto(self, problem: Problem, schedule: Any, privacy: Any) -> PeerToPeer:
        """Resolve as every linear method does; ``loss="model"`` has no bounds. Where the noise is fixed and the budget
        is, too, it may allow fewer releases than the schedule has wake-ups, and agents will remember theirs."""
        resolved = self if self.loss == "model" else super().resolve_auto(problem, schedule, privacy)
        settings = privacy if isinstance(privacy, Sequence) else [privacy]
        fixed = any(one is not None and None not in (one.epsilon, one.noise_multiplier) for one in settings)
        if fixed and self.releases is None:
            resolved = replace(resolved, releases=max(1, int(schedule.caps.max())))
        return resolved

    # What it needs of the problem

    def network(self, problem: Problem) -> Network:
        """Return the graph in the order of the data, with the public constants of every agent; made once.

        Raises:
            ConfigError: the graph and the data have different agents.
        """
        return self._work(problem).network

    def row_bound(self, problem: Problem) -> RowBound | None:
        """Return the bound on features, which holds where the models are used too; None with ``loss="model"``."""
        return None if self.loss == "model" else super().row_bound(problem)

    def plan(self, problem: Problem, schedule: BoundSchedule) -> tuple[GradientPlan]:
        """Plan mean gradients of the agents' records, T_i of each or ``releases``, after a warm start where it is asked
        for.

        Raises:
            PrivacyError: a raw local start with noise, or the published accounting of another law than Laplace.
        """
        work, caps = self._work(problem), schedule.caps.clip(max=problem.rounds)
        if self.releases is not None:
            caps = caps.clip(max=self.releases)
        warm = None if self.warm_start is None else WarmStartRelease(np.ones(problem.clients), self.warm_start)

        def given_noise(privacy: RecordPrivacy) -> dict[str, Any]:
            return self._given_noise(problem, caps, privacy)

        return (
            GradientPlan(
                ids=tuple(problem.data.ids),
                keys=problem.data.keys,
                counts=work.network.counts,
                dimension=problem.dimension,
                caps=caps,
                at_cap="stop" if self.releases is None else "silent",
                x=None if self.loss == "model" else self.data(problem).x,
                arrivals=work.arrivals,
                first=warm,
                notes=self.notes(problem),
                given_noise=given_noise,
            ),
        )

    def _given_noise(self, problem: Problem, caps: np.ndarray, privacy: RecordPrivacy) -> dict[str, Any]:
        """Return what of the plan depends on the law of the noise and on the clip norm."""
        self._check_start(noised=True)
        options: dict[str, Any] = {}
        weights = self.weights(problem, caps, privacy)
        if self.allocation != "uniform":
            options["allocation"] = weights
        if self.warm_start is not None:
            moves = self._local_fits(problem, privacy.clip_norm, self.warm_lam).sensitivities
            options["first"] = WarmStartRelease(moves, self.warm_start)
        if self.guarantee == "paper":
            if privacy.mechanism != "laplace":
                raise PrivacyError(
                    f"PeerToPeer.guarantee='paper' adds i.i.d. Laplace noise, mechanism 'laplace'; the releases have "
                    f"{privacy.mechanism!r}."
                )
            longest = weights[int(np.argmax(caps))].tolist()
            if self.warm_start is not None:  # the first release's own weight
                longest = [self.warm_start / (1 - self.warm_start) * len(longest), *longest]
            delta = privacy.resolved_delta(int(self._work(problem).network.counts.sum()))
            options["published"] = PublishedClaim(
                lambda z: kov_heterogeneous([w / z for w in longest], delta),
                REFUTED + (REFUTED_START if self.start == "local" else ""),
                norm="l2",
            )
        return options

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
        """Start everyone at Theta(0), no data are read; except with ``start="local"``.

        Public: ``theta`` (R, n, D) float64; ``sent`` int64 (R,), the vectors of D numbers sent so far: a broadcast to
        k neighbours is k of them; ``warm`` int64 (1,), whether the warm start has been made, where there is one; and
        those of agents that come and go (:meth:`GraphData.public_state`).
        """
        theta = torch.zeros(replicates, problem.clients, problem.dimension, dtype=torch.float64)
        if self.start == "local":
            theta += self._local_fits(problem, math.inf).all()
        elif self.start is None:
            theta += problem.initial.cpu().double() if self.loss == "model" else 0.0
        else:
            if isinstance(self.start, tuple) and len(self.start) != problem.dimension:
                raise ConfigError(
                    f"PeerToPeer.start has {len(self.start):,} numbers for a model of {problem.dimension:,} parameters."
                )
            theta += torch.tensor(self.start, dtype=torch.float64)
        public = self._work(problem).public_state(theta)
        if self.warm_start is not None:
            public["warm"] = torch.zeros(1, dtype=torch.int64)
        return State(public, problem.client_store({}))

    def client(
        self, problem: Problem, public: Mapping[str, Tensor], own: Own, clients: Tensor, round: Round
    ) -> tuple[dict[str, GradientMessage], Own]:
        # the gradient of the agent's records at its own model, or, if it is there for the first time, at its
        # neighbours' mean
        graph = GraphState(self._work(problem), {name: value.clone() for name, value in public.items()})
        graph.arrive(clients.numpy(), _ALONE, round.time[:, 0])
        return {GRADIENT: graph.message}, own

    def server(self, problem: Problem, public: Mapping[str, Tensor], released: Released) -> dict[str, Tensor]:
        # (6): nobody serves; every agent computes its own step, from its neighbours' broadcasts and its own release
        assert released.clients is not None
        new = {name: value.clone() for name, value in public.items()}
        graph, agent = GraphState(self._work(problem), new), released.clients.numpy()
        graph.arrive(agent, _ALONE, released.time[:, 0])
        answer, answered = released.values[GRADIENT].numpy()[None], np.array([released.answered])
        graph.update(agent, _ALONE, released.step + _ALONE, answer, answered)
        return new

    def step(self, problem: Problem, state: State, block: Block, channel: Channel) -> State:
        """Compute all activations of a block, of all replicates; in place. The first one makes the warm start before
        them."""
        self.begin(problem, state, channel)
        GraphState(self._work(problem), state.public).run(block, channel)
        return state

    def begin(self, problem: Problem, state: State, channel: Channel) -> None:
        """Make the warm start, where there is one and it has not been made."""
        self._check_start(noised=channel.noise_multipliers is not None)
        if self.warm_start is not None and not int(state.public["warm"]):
            fits = self._local_fits(problem, channel.bound, self.warm_lam)
            make_warm_start(self.network(problem), fits, state.public, channel)

    def personalize(self, problem: Problem, state: State, clients: Tensor) -> Tensor:
        """Return the personal models of ``clients`` in replicate 0, (k, D): Theta_i, or its refinement; of agents that
        never were there their neighbours' mean."""
        theta = state.public["theta"][0][clients]
        if "known" in state.public:
            agents = clients.numpy()
            counted = state.public["counted"].numpy()
            where = np.zeros(len(agents), dtype=np.int64)
            means = self.network(problem).means(state.public["theta"].numpy(), where, agents, counted)
            theta = torch.where(state.public["known"][0][clients][:, None], theta, torch.from_numpy(means))
        return self._refined(problem, state, theta[None], clients)[0].to(problem.initial)

    def models(self, problem: Problem, state: State) -> Tensor:
        """Return the personal models of every replicate, (R, n, D) float64."""
        return self._refined(problem, state, state.public["theta"], torch.arange(problem.clients))

    def shared(self, state: State) -> Tensor | None:
        """Return None: there is no model of all."""
        return None

    def objective(self, problem: Problem, state: State) -> Tensor:
        """Return Q(Theta) of equation (2) on all training records and the whole graph, (R,) float64, not private."""
        work, theta = self._work(problem), state.public["theta"]
        network = work.network
        total = torch.tensor([network.roughness(one) for one in theta.numpy()], dtype=torch.float64)
        weight = torch.from_numpy(self.mu * network.graph.normalization * network.confidence(network.counts))
        total += theta.square().sum(2) @ (weight * torch.from_numpy(network.ridge(network.counts)))
        for i in np.flatnonzero(network.counts).tolist():
            total += weight[i] * work.records.mean_losses(i, theta[:, i])
        return total

    # Inside

    def _refined(self, problem: Problem, state: State, theta: Tensor, clients: Tensor) -> Tensor:
        """Return the models (R, k, D) of ``clients`` after their own last step; ``theta`` before it."""
        if self.refine is None:
            return theta
        if self.refine_from == "neighbours":
            theta = self._around(problem, state, theta, clients)
        data, refined = self.data(problem), theta.clone()
        for place, agent in enumerate(clients.tolist()):
            x, y = data.x[agent], data.y[agent]
            if len(x):
                pull = 2 * self.refine / len(x)  # of the mean loss, and of half the squared norm
                refined[:, place] += fit_own(self.linear_loss, x, y, theta[:, place], pull, "frobenius")
        return refined

    def _around(self, problem: Problem, state: State, theta: Tensor, clients: Tensor) -> Tensor:
        """Return the means (R, k, D) of the models of the neighbours of ``clients``; ``theta`` of those without any."""
        network, agents, all_models = self.network(problem), clients.numpy(), state.public["theta"].numpy()
        counted = state.public["counted"].numpy() if "counted" in state.public else None
        where = np.repeat(np.arange(len(theta)), len(agents))
        means = network.means(all_models, where, np.tile(agents, len(theta)), counted)
        alone = torch.from_numpy(network.graph.degrees[agents] == 0)
        return torch.where(alone[:, None], theta, torch.from_numpy(means).reshape(theta.shape))

    def _work(self, problem: Problem) -> GraphData:
        return prepared(problem, self, lambda: self._built(problem))

    def _built(self, problem: Problem) -> GraphData:
        given = self.graph if isinstance(self.graph, Graph) else self.graph.build(problem.data)
        graph, ids = given.ordered(problem.data.ids), problem.data.ids
        counts = problem.data.train.counts.numpy().astype(np.int64)
        lam = None if self.lam == "inverse" else float(self.lam)
        smooth = self.smoothness
        if smooth is None:
            smooth = self.linear_loss.smoothness(self.largest_row(problem))
        network = Network(
            graph,
            counts,
            most=max(1, int(counts.max())),
            mu=self.mu,
            lam=lam,
            smoothness=smooth,
            idle=self.idle_confidence,
            power=self.confidence_power,
        )
        linear = self.loss != "model"
        records = LinearRecords(self.data(problem), self.linear_loss) if linear else ModelRecords(problem)
        presence = None if self.absences is None else Availability(self.absences, ids)
        arrivals, forgets = arrival_steps(self.arrivals, ids, counts), self.departed == "forget"
        return GraphData(network, records, presence, arrivals, forgets, self.releases is not None)

    def _check_start(self, *, noised: bool) -> None:
        if noised and self.start == "local" and self.guarantee == "sound":
            raise PrivacyError(
                "PeerToPeer.start='local' begins with models fitted to the raw records, and no noise covers them: a "
                "private run starts from a public constant or from warm_start, which is paid for."
            )

    def _local_fits(self, problem: Problem, clip: float, lam: float | None = None) -> LocalFits:
        network = self.network(problem)
        ridge = network.ridge(network.counts) if lam is None else np.full(problem.clients, lam)
        row = self.largest_row(problem)
        bound = row if self.loss == "logistic" else math.inf  # its slope is at most 1
        return LocalFits(
            self.linear_loss, self.data(problem), ridge, min(clip, bound), self.linear_loss.smoothness(row)
        )
