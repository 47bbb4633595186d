"""The epsilon of an agent's records against some of the other agents, which see their own messages
alone.

The ledger's epsilon of :class:`~.peer_averaging.PeerAveraging` is that of an agent's release g_i,
which an eavesdropper of all messages learns. An agent sees less: the messages of its neighbours to
it, in which the noise of many agents is mixed. This is pairwise network differential privacy
(Cyffers, Even, Bellet, Massoulie, "Muffliato", NeurIPS 2022; "Differential privacy analysis of
decentralized gossip averaging under varying threat models", arXiv 2505.19969), computed exactly.

*Claim.* The unit is a record of agent i, and neighbours differ by one record of it replaced by
another. The adversary is a set S of agents without i, which follow the protocol and pool their
knowledge: the messages that any of them received or sent in the whole run, their own records,
releases and noise, the graph, all public constants and the order of the wake-ups. It does not see
messages between two other agents, nor their models.

*View.* With ``releases=1`` every release g_i = (mean of clipped gradients at the public start)
+ eta_i is made before its agent receives a message, eta_i ~ N(0, sigma_i^2 I). All that follows is
linear in the releases, as alpha (1 + mu c (h + 2 lambda)) = 1: the agent k that wakes at t sends

    theta_k(t) = alpha_k (sum_j (W_kj / D_kk) theta_j(t) - mu c_k g_k) = -sum_i a_ti g_i.

The rows of A with a neighbour of S for their sender are the messages to S. The g_j of S are known,
so their columns are left out. In every one of the D coordinates, independently, the view is
Gaussian with the covariance Sigma = A N A', N diagonal with the sigma_i^2.

*Cost.* A replaced record moves g_i by a vector of length Delta_i at most, Delta_i = 2 C / m_i, and
the mean of the view by that vector times column a_i of A. So the best test of it is that between
N(0, 1) and N(mu, 1) (Dong, Roth, Su, "Gaussian differential privacy", 2022), with

    mu^2 = Delta_i^2 a_i' Sigma^+ a_i = (Delta_i / sigma_i)^2 P_ii,

infinite if a_i is not in the range of Sigma, which is the case of no noise. P is the orthogonal
projection on the rows of A N^(1/2), so P_ii is at most 1: no set has an epsilon above that of g_i.
The squares of mu sigma / Delta over the agents add up to the rank of the view.

*Not covered.* Messages are real numbers here. In floating point, the last digits of a message may
tell more about single terms of a sum; the ledger's epsilon is free of that, and of every assumption
on the messages that an adversary sees. Later releases (``releases`` above 1, a warm start,
:class:`PeerToPeer`) are at models that depend on received messages, and are refused, as are
absences and clocks that were measured, and noise of another law.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
from numpy.typing import NDArray
from scipy.sparse.csgraph import shortest_path

from .._rounding import rounded_up
from ..algorithms.p2p.network import Network
from ..errors import ConfigError, MissingExtra
from ..privacy.accounting.gaussian import gaussian_epsilon
from .linear_views import PRIMES, ROUNDING, information, messages

Array = NDArray[np.float64]
Ints = NDArray[np.int64]

logger = logging.getLogger("fedmtl")
MOST = 1_000  # agents; the messages are a dense matrix of activations and agents
_SHOWN = 4  # distances in a line of text


@dataclass(frozen=True, kw_only=True, eq=False)
class PairwisePrivacy:
    """Epsilons of agents against sets of other agents; see :mod:`fedmtl.contrib.pairwise`.

    Attributes:
        name: of the claim's files.
        ids: of the n agents.
        adversaries: the ids of the agents of each of k sets.
        mu: (k, n) float64, the shift of each agent's view in standard deviations; NaN for the
            members of a set.
        largest: (n,) float64, that of an eavesdropper of all messages.
        distance: (k, n), edges on the shortest path from the set to the agent; infinite without
            one.
        delta: of every epsilon.
        bounded: number of sets of which only an upper bound, the largest mu, could be computed.
    """

    ids: tuple[str, ...]
    adversaries: tuple[tuple[str, ...], ...]
    mu: Array
    largest: Array
    distance: Array
    delta: float
    bounded: int
    name: ClassVar[str] = "pairwise"

    @cached_property
    def epsilon(self) -> Array:
        """Returns the epsilon of each agent against each set, (k, n); NaN for its members."""
        return epsilons(self.mu, self.delta)

    def text(self) -> str:
        """Returns the claim in words, with its adversary."""
        sizes = {len(members) for members in self.adversaries}
        who = "any one other agent"
        if sizes != {1}:
            who = f"any of {len(self.adversaries):,} sets of up to {max(sizes)} other agents"
        parts = []
        for row in self.by_distance()[:_SHOWN]:
            away = f"{row['distance']:g} edges away"
            if row["distance"] == 1:
                away = "neighbours"
            median = rounded_up(row["median"])
            parts.append(f"{away} median {median}, largest {rounded_up(row['largest'])}")
        if self.bounded:
            parts.append(f"an upper bound for {self.bounded:,} of {len(self.adversaries):,}")
        return (
            f"not in place of epsilon, which is against everybody: against {who}, honest but "
            f"curious, that sees only its own messages, as numbers without rounding, epsilon is at "
            f"delta = {rounded_up(self.delta, 3)}: {'; '.join(parts)}"
        )

    def by_distance(self) -> list[dict[str, float]]:
        """Returns a row for each distance: ``distance``, ``pairs``, and the ``median`` and
        ``largest`` epsilon of these pairs."""
        rows = []
        inside = np.isnan(self.epsilon)
        for distance in np.unique(self.distance[~inside]).tolist():
            found = self.epsilon[(self.distance == distance) & ~inside]
            rows.append(
                {
                    "distance": distance,
                    "pairs": float(found.size),
                    "median": float(np.quantile(found, 0.5, method="higher")),
                    "largest": float(found.max()),
                }
            )
        return rows

    def rows(self) -> list[dict[str, Any]]:
        """Returns the table: a row for each set with its members, then the epsilon of each agent,
        which is empty for a member."""
        rows = []
        for members, epsilon in zip(self.adversaries, self.epsilon.tolist(), strict=True):
            row: dict[str, Any] = {"seen by": " ".join(members)}
            for name, value in zip(self.ids, epsilon, strict=True):
                row[name] = value
                if math.isnan(value):
                    row[name] = ""
            rows.append(row)
        return rows

    def draw(self, path: Path) -> None:
        """Draws the matrix of epsilons, and epsilon against the distance on the graph.

        Without matplotlib there is no figure, and a warning says so.

        Args:
            path: of the figure.
        """
        try:
            from ..report.pairs import plot_pairs
        except MissingExtra as error:
            logger.warning("%s", error)
            return
        local = float(epsilons(self.largest, self.delta).max(initial=0.0))
        plot_pairs(self.epsilon, self.distance, path, local=local, delta=self.delta)


def epsilons(mu: Array, delta: float) -> Array:
    """Returns the smallest epsilon of Gaussian mechanisms, of the shape of ``mu``.

    Args:
        mu: shifts in standard deviations, at least 0; infinite without noise, NaN stays.
        delta: of them.
    """
    # many pairs share a value: those that see nothing, and those that see all
    values, place = np.unique(mu, return_inverse=True)
    with np.errstate(divide="ignore"):
        multipliers = 1.0 / values
    found = [math.nan if math.isnan(z) else gaussian_epsilon(z, delta) for z in multipliers]
    return np.array(found)[place].reshape(np.shape(mu))


def pairwise_privacy(
    network: Network,
    acting: Ints,
    multipliers: Array,
    delta: float,
    *,
    released: NDArray[np.bool_] | None = None,
    adversaries: Sequence[Sequence[str]] | None = None,
) -> PairwisePrivacy:
    """Computes the epsilon of every agent against sets of other agents, exactly.

    Args:
        network: the graph and the public constants.
        acting: (T,), the agent of every wake-up, in order.
        multipliers: (n,), sigma_i / Delta_i of each agent's release; 0 for no noise.
        delta: of every epsilon, above 0 and below 1.
        released: (n,), False for agents that released nothing; None: those without records.
        adversaries: ids of each set; None: every agent alone.

    Raises:
        ConfigError: an unknown id, an empty set, or more than 1,000 agents.

    Example:
        >>> import numpy as np
        >>> from fedmtl.algorithms.p2p.network import Network
        >>> from fedmtl.contrib.pairwise import pairwise_privacy
        >>> from fedmtl.graphs import Graph
        >>> path = np.array([[0.0, 1.0, 0.0], [1.0, 0.0, 1.0], [0.0, 1.0, 0.0]])
        >>> graph = Graph(path, ("ann", "bob", "cat"))
        >>> network = Network(graph, np.array([9, 9, 9]), mu=1.0, lam=0.1, smoothness=0.5)
        >>> wakeups = np.array([2, 1, 0])  # cat, bob, ann
        >>> found = pairwise_privacy(network, wakeups, np.full(3, 2.0), 1e-5)
        >>> found.epsilon[0].round(2).tolist()  # ann hears of cat in bob's message
        [nan, 2.03, 0.38]
    """
    ids = network.graph.ids
    n = len(ids)
    if n > MOST:
        raise ConfigError(f"Pairwise epsilons are for up to {MOST:,} agents; there are {n:,}.")
    places = {name: place for place, name in enumerate(ids)}
    if adversaries is None:
        adversaries = [[name] for name in ids]
    for members in adversaries:
        unknown = [name for name in members if name not in places]
        if unknown or not members:
            raise ConfigError(f"a set of adversaries is {list(members)}; give ids of agents.")
    if released is None:
        released = network.counts > 0
    # in units of 2 C, which cancels
    sensitivity = 1.0 / np.maximum(network.counts, 1)
    noise = multipliers * sensitivity
    rows = messages(network, acting, released)
    residues = [messages(network, acting, released, prime) for prime in PRIMES]
    # a message is made of earlier ones by a sum over neighbours
    rounding = len(acting) * (int(network.graph.degrees.max()) + 4) * ROUNDING
    hops = shortest_path(network.graph.weights, directed=False, unweighted=True)
    mu = np.full((len(adversaries), n), math.nan)
    distance = np.zeros((len(adversaries), n))
    bounded = 0
    for each, members in enumerate(adversaries):
        # they know their own releases, and receive the messages of their neighbours
        inside = np.zeros(n, dtype=bool)
        inside[[places[name] for name in members]] = True
        heard = (network.graph.weights[inside].sum(0) > 0) & ~inside
        view = heard[acting]
        others = [part[view][:, ~inside] for part in (rows, *residues)]
        shifts, exact = information(others[0], others[1:], noise[~inside], rounding)
        mu[each, ~inside] = sensitivity[~inside] * np.sqrt(shifts)
        distance[each] = hops[inside].min(0)
        bounded += not exact
    with np.errstate(divide="ignore"):
        largest = np.where(released, 1.0 / multipliers, 0.0)
    return PairwisePrivacy(
        ids=ids,
        adversaries=tuple(map(tuple, adversaries)),
        mu=mu,
        largest=largest,
        distance=distance,
        delta=delta,
        bounded=bounded,
    )


def check_covered(agents: int, schedule: Any, privacy: Sequence[Any]) -> None:
    """Refuses a run whose messages are not Gaussian, or tell more than the noise covers.

    Args:
        agents: their number.
        schedule: of the wake-ups, a ``BoundSchedule``.
        privacy: of the run; None in it is no privacy.

    Raises:
        ConfigError: too many agents, noise of another law than the Gaussian, absences, or measured
            clocks.
    """
    if agents > MOST:
        raise ConfigError(
            f"PeerAveraging.pairwise is for up to {MOST:,} agents; there are {agents:,}."
        )
    settings = privacy[0]
    if settings is None or settings.noiseless or settings.mechanism != "gaussian":
        raise ConfigError(
            "PeerAveraging.pairwise is of Gaussian noise, whose averages are Gaussian; give "
            "privacy.mechanism='gaussian' with a finite epsilon."
        )
    if schedule.dropouts is not None:
        raise ConfigError(
            "PeerAveraging.pairwise is of runs in which every message arrives; leave out dropouts."
        )
    if schedule.measured:
        raise ConfigError(
            "PeerAveraging.pairwise takes it that clocks tell nothing about the records, but "
            "latencies of a trace are measured; give PoissonClocks or a law of latencies."
        )
