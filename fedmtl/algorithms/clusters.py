"""Several shared models, one for each cluster of clients.

The clusters are public (PMTL), or each client chooses one (IFCA).

Hu, Wu, Smith: "Private Multi-Task Learning", TMLR 2023, for means of public clusters; Ghosh, Chung,
Yin, Ramchandran: "An Efficient Framework for Clustered Federated Learning", NeurIPS 2020, for the
choice.

There is one release for any number C of clusters. A client's row is the concatenation of C blocks,
its update in the block of its cluster and zero elsewhere, clipped as a whole. Adding or removing a
client moves the sum by one clipped row, so the sensitivity is that of a single model, and so is the
noise on each block.

- Public clusters. The blocks have disjoint clients: the release of a cluster is a function of its
  own clients, so a client spends in the releases of one cluster only. This is parallel composition
  with an account for each cluster, all of the same epsilon. It needs a public and fixed membership,
  and neighbours that differ in a client of the same cluster.
- Clusters that clients choose. The choice depends on the client's records, and may differ between
  neighbours in every round. It moves the row from one block to another within the same norm, and
  every client contributes to all C blocks, so only the noised blocks depend on it.

A cluster's sum is divided by a public constant: the expected number of its members in a cohort if
they are public, else the expected cohort over C.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from .._check import Count, NonNegative, Rate
from .._files import csv_rows
from ..errors import ConfigError
from ..privacy import BoundSampler, ReleasePlan
from ..random import derive_key, keyed_generator
from .base import Problem, Public, State
from .client_batch import ClientBatch, ClientStates
from .client_losses import own_losses
from .rounds import Released
from .shared_model import SharedModel


@dataclass(frozen=True, kw_only=True)
class SharedModels(SharedModel):
    """A method with a shared model for each of C clusters, the rows of ``"global"`` (C, D).

    A client sends an update in the block of one cluster.
    """

    baseline = False

    @abstractmethod
    def rates(self, problem: Problem) -> Tensor:
        """Returns m / m_c for each cluster, (C,) float64.

        The denominator m_c of its sum is the expected number of its members in a cohort of m.

        Args:
            problem: of the run; its public parts are read.
        """

    def plan(self, problem: Problem, schedule: BoundSampler) -> tuple[ReleasePlan, ...]:
        (update,) = super().plan(problem, schedule)
        clusters = len(self.rates(problem))
        return (replace(update, dimension=clusters * problem.dimension),)

    def server_update(
        self, problem: Problem, public: Public, released: Released
    ) -> dict[str, Tensor]:
        rates = self.rates(problem)
        update = released.values["update"]  # (C D,), the sum over m
        means = rates.to(update)[:, None] * update.reshape(len(rates), -1)
        return super().server_update(problem, public, replace(released, values={"update": means}))

    def shared(self, state: State) -> Tensor | None:
        """Returns the shared model if there is a single one; else None."""
        models = state.public["global"]
        if len(models) > 1:
            return None
        return models[0]


@dataclass(frozen=True, kw_only=True)
class ClusteredPMTL(SharedModels):
    """Trains personal models that are pulled to a private mean of their public cluster (Hu et al.
    2023).

    Args:
        clusters: the cluster of every client by its id, any names; or a CSV file with the columns
            ``client`` and ``cluster``. Both are public.
        lam: lambda, the strength of the pull of every personal model towards the mean of its
            cluster.
        server_lr: step size of the server, in (0, 1].
        local, server_optimizer: see :class:`SharedModel`.

    Raises:
        ConfigError: a value is outside these ranges, or a file lacks these columns; later, a client
            has no cluster.

    Example:
        >>> from fedmtl import ClusteredPMTL, FullParticipation, LocalSGD, Trainer
        >>> from fedmtl import load_data, models
        >>> data = load_data("digits", clients=10)
        >>> groups = {name: place % 2 for place, name in enumerate(data.ids)}
        >>> trainer = Trainer(
        ...     algorithm=ClusteredPMTL(clusters=groups, local=LocalSGD(lr=0.1)),
        ...     data=data,
        ...     model=models.softmax_regression(),
        ...     schedule=FullParticipation(),
        ...     privacy=None,
        ...     rounds=2,
        ...     progress=False,
        ... )
        >>> trainer.fit().personal.shape
        torch.Size([10, 650])
    """

    clusters: Mapping[str, Any] | str | Path
    lam: NonNegative = 1.0
    server_lr: Rate = 1.0

    name = "clustered_pmtl"
    title = "Clustered PMTL"
    colour = "#4a8fd0"
    keeps_models = True

    def __post_init__(self) -> None:
        if not isinstance(self.clusters, Mapping):
            object.__setattr__(self, "clusters", read_clusters(self.clusters))
        super().__post_init__()

    def cluster_of(self, problem: Problem) -> Tensor:
        """Returns the number of each client's cluster.

        Clusters are numbered from 0 in the order of their names.

        Args:
            problem: of the run; only the ids of its clients are read.

        Returns:
            int64 (n,) on the host.

        Raises:
            ConfigError: a client has no cluster.
        """
        assert isinstance(self.clusters, Mapping)
        for client in problem.data.ids:
            if client not in self.clusters:
                raise ConfigError(f"ClusteredPMTL.clusters has no cluster of client {client!r}.")
        number = {name: k for k, name in enumerate(self._names())}
        return torch.tensor([number[str(self.clusters[client])] for client in problem.data.ids])

    def _names(self) -> list[str]:
        assert isinstance(self.clusters, Mapping)
        return sorted({str(name) for name in self.clusters.values()})

    def init(self, problem: Problem, replicates: int = 1) -> State:
        """Starts one mean for each cluster, ``"global"`` (clusters, D), at the initial model."""
        means = problem.initial.expand(len(self._names()), -1).clone()
        return State({"global": means}, self.client_store(problem))

    def client_update(self, c: ClientBatch) -> tuple[dict[str, Tensor], ClientStates]:
        """Trains with a pull to the mean of the client's cluster; sends the difference in the block
        of that cluster, (k, clusters D).
        """
        # PMTL with the mean of the client's own cluster
        cluster, mean = self._means(c)
        start = c.last_models(mean)
        models = c.train(self.local, start, lam=self.lam, anchor=mean)
        return {"update": blocks(models - mean, cluster, len(c.shared))}, c.keep(models, start)

    def _means(self, c: ClientBatch) -> tuple[Tensor, Tensor]:
        """Returns the number and the mean of each client's cluster, int64 (k,) and (k, D)."""
        cluster = self.cluster_of(c.problem)[c.clients].to(c.initial.device)
        return cluster, c.shared[cluster]

    def rates(self, problem: Problem) -> Tensor:
        """Returns K over the number of clients in each cluster."""
        sizes = torch.bincount(self.cluster_of(problem), minlength=len(self._names()))
        return problem.clients / sizes.clamp(min=1).double()  # of the cohort, in expectation

    def newcomer_models(self, c: ClientBatch) -> Tensor:
        """Returns the personal models (k, D) of clients that never took part.

        Each is trained once from the mean of its client's cluster.
        """
        _, mean = self._means(c)
        return c.train(self.local, mean, lam=self.lam, anchor=mean)


@dataclass(frozen=True, kw_only=True)
class IFCA(SharedModels):
    """Trains several global models, of which each client chooses the best one (Ghosh et al. 2020).

    It is Algorithm 1 with Option II: the best model has the least loss on the client's records. The
    published average of a model is over the members of the cohort that chose it. Their number is
    private, so here the sum of their updates is divided by a public constant. Record-level privacy
    is refused: the choice reads records without noise.

    Args:
        clusters: C, number of models.
        spread: standard deviation of the public random differences between the initial models; with
            0 they would stay alike.
        server_lr: step size of the server, on a mean over the expected cohort divided by C.
        local, server_optimizer: see :class:`SharedModel`.

    Raises:
        ConfigError: a value outside these ranges.

    Example:
        >>> from fedmtl import FullParticipation, IFCA, LocalSGD, Trainer, load_data, models
        >>> trainer = Trainer(
        ...     algorithm=IFCA(clusters=2, local=LocalSGD(lr=0.1)),
        ...     data=load_data("digits", clients=10),
        ...     model=models.softmax_regression(),
        ...     schedule=FullParticipation(),
        ...     privacy=None,
        ...     rounds=2,
        ...     progress=False,
        ... )
        >>> trainer.fit().personal.shape
        torch.Size([10, 650])
    """

    clusters: Count = 3
    spread: NonNegative = 0.1

    name = "ifca"
    title = "IFCA"
    colour = "#5d4037"
    from_training = False

    def init(self, problem: Problem, replicates: int = 1) -> State:
        """Starts all models, ``"global"`` (C, D), at public random places near the initial one."""
        generator = keyed_generator(derive_key(problem.seed, "ifca"), "start")
        noise = generator.normal(size=(self.clusters, problem.dimension))
        models = problem.initial + self.spread * torch.from_numpy(noise).to(problem.initial)
        return State({"global": models}, self.client_store(problem))

    def choice(self, problem: Problem, models: Tensor, clients: Tensor) -> Tensor:
        """Returns the model of the least loss on each client's training records, int64 (k,).

        Args:
            problem: the data and the loss.
            models: (C, D).
            clients: int64 (k,).
        """
        losses = torch.stack([own_losses(problem, model, clients, "train") for model in models])
        # a client without records, or whose losses are all NaN, chooses the first
        return losses.nan_to_num(nan=torch.inf).argmin(0).to(models.device)

    def client_update(self, c: ClientBatch) -> tuple[dict[str, Tensor], ClientStates]:
        """Trains the model that each client chooses; sends its change in the block of that model,
        (k, C D).
        """
        chosen = self.choice(c.problem, c.shared, c.clients)
        start = c.shared[chosen]
        updates = c.train(self.local, start) - start
        return {"update": blocks(updates, chosen, self.clusters)}, c.states

    def rates(self, problem: Problem) -> Tensor:
        """Returns C for every model: each is chosen by a C-th of the cohort, if all are alike."""
        return torch.full((self.clusters,), self.clusters, dtype=torch.float64)

    def personal_models(self, c: ClientBatch) -> Tensor:
        """Returns the model that each client chooses.

        Args:
            c: clients; the loss of every model on their own records decides.

        Returns:
            (k, D).
        """
        return c.shared[self.choice(c.problem, c.shared, c.clients)]


def blocks(updates: Tensor, cluster: Tensor, count: int) -> Tensor:
    """Returns rows (k, count * D) of blocks, with each client's update in its cluster's block.

    Args:
        updates: (k, D).
        cluster: int64 (k,), the cluster of each client.
        count: number of clusters.
    """
    # zero in the blocks of all other clusters
    rows = updates.new_zeros(len(updates), count, updates.shape[1])
    rows[torch.arange(len(updates), device=updates.device), cluster] = updates
    return rows.flatten(1)


def read_clusters(path: str | Path) -> dict[str, str]:
    """Reads clusters by client id from a CSV file with the columns ``client`` and ``cluster``.

    Raises:
        DataError: there is no such file, or it has another header.
        ConfigError: a client has two clusters.
    """
    clusters: dict[str, str] = {}
    for where, (client, cluster) in csv_rows(Path(path), "client,cluster", subject="clusters are"):
        if clusters.setdefault(client, cluster) != cluster:
            found = f"client {client!r} has two clusters"
            raise ConfigError(f"ClusteredPMTL.clusters: {where}: {found}.")
    return clusters
