"""The problem that algorithms work on: data, model and loss, and the processes of a run."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, nn

from ..data import FederatedDataset
from ..local import Executor, Layout, LocalSolver
from ..local.clients import Piece, pieces_of
from ..local.losses import Loss
from ..ranks import SINGLE, Ranks
from .store import ClientStore, Fields

_PIECE_BYTES = 1 << 23  # of the models that are computed at a time


@dataclass
class Tally:
    """Counts of local trainings.

    Attributes:
        trained: all local trainings.
        diverged: those that ended in a model that is not finite. Such a client sends nothing and
            keeps the model that it had.
    """

    trained: int = 0
    diverged: int = 0


@dataclass(frozen=True)
class Problem:
    """The data, the model and the loss that an algorithm works on.

    Attributes:
        data: the clients' data.
        module: prepared template of the model.
        initial: (D,), the public starting point.
        loss: one value per example.
        executor: computes chunks of clients.
        rounds: planned number of rounds, or of activations.
        seed: of the run.
        protects_records: True if the protected unit is one record; gradients of local training are
            released then.
        tally: counts local trainings, for the report of a simulation; private.
        ranks: the processes that compute the run.
        rank_of: int64 (n,), the rank that computes each client; None in a single process.
        prepared: a cache of values that algorithms derive from the data and the model, see
            :func:`~.linear.data.prepared`; the same object in every problem that is derived from
            this one.
        clients: number of clients, the public nominal population.

    Example:
        >>> from fedmtl import FedAvg, FullParticipation, Trainer, load_data, models
        >>> trainer = Trainer(
        ...     algorithm=FedAvg(),
        ...     data=load_data("digits", clients=4),
        ...     model=models.softmax_regression(),
        ...     schedule=FullParticipation(),
        ...     privacy=None,
        ...     rounds=1,
        ...     progress=False,
        ... )
        >>> problem = trainer.problem()
        >>> problem.clients, problem.dimension
        (4, 650)
    """

    data: FederatedDataset
    module: nn.Module
    initial: Tensor
    loss: Loss
    executor: Executor
    rounds: int
    seed: int
    protects_records: bool = False
    tally: Tally | None = None
    ranks: Ranks = SINGLE
    rank_of: Tensor | None = None
    prepared: dict[Hashable, Any] = field(default_factory=dict, repr=False, compare=False)

    @property
    def clients(self) -> int:
        return len(self.data)

    def over(self, ranks: Ranks) -> Problem:
        """Divides the clients among processes.

        Args:
            ranks: of the run; of a single process no client has a rank.

        Returns:
            The same problem with ``ranks`` and ``rank_of``.
        """
        rank_of = None
        if ranks.size > 1:
            rank_of = ranks.assigned(self.data.train.counts)
        return replace(self, ranks=ranks, rank_of=rank_of)

    def places_here(self, clients: Tensor) -> Tensor:
        """Returns the places of the clients that this process computes.

        Args:
            clients: int64 (k,), positions in the data.

        Returns:
            int64 (j,), places in ``clients``; all of them in a single process.
        """
        if self.rank_of is None:
            return torch.arange(len(clients))
        return (self.rank_of[clients] == self.ranks.rank).nonzero()[:, 0]

    @cached_property
    def mine(self) -> Problem:
        """Returns the problem of this rank's clients alone, as that of a single process."""
        members = self.places_here(torch.arange(self.clients))
        return replace(self, data=self.data.take_clients(members), ranks=SINGLE, rank_of=None)

    def pieces(
        self, clients: Tensor, solver: LocalSolver | None, round: int, cohort: Tensor | None
    ) -> Iterator[Piece]:
        """Divides clients into pieces that are computed one after another, each as a
        :class:`~.client_batch.ClientBatch`.

        They are one piece if their models take at most 8 MiB. If they take more, a piece has the
        clients of about 8 MiB, so that their rows are still in a cache when they are added up; and
        it has whole stacks of local training.

        Args:
            clients: int64 (k,), positions in the data.
            solver: of their local training; None without one.
            round: addresses their batches.
            cohort: all participants of the round, see :class:`~.client_batch.ClientBatch`.

        Yields:
            The pieces, in which every client is once.
        """
        row = max(1, self.initial.nbytes)  # of a model
        size = max(1, _PIECE_BYTES // row)
        if len(clients) <= size:
            yield Piece(clients)
        # methods with closed-form clients have no stacks
        elif solver is None:
            yield from map(Piece, clients.split(max(size, self.executor.chunk)))
        else:
            yield from pieces_of(
                self.data,
                solver,
                self.executor,
                clients,
                size=size,
                seed=self.seed,
                round=round,
                cohort=cohort,
            )

    def spread(self, work: Callable[[Tensor], Tensor], clients: Tensor) -> Tensor:
        """Returns ``work(clients)``, a row for each client (k, ...), at every rank.

        Args:
            work: int64 (m,) clients -> (m, ...); each rank calls it with its own clients.
            clients: int64 (k,).
        """
        if self.rank_of is None:
            return work(clients)
        place = self.places_here(clients)
        return self.ranks.join(work(clients[place]), place, len(clients))

    @property
    def dimension(self) -> int:
        """Returns D, the number of trainable parameters."""
        return len(self.initial)

    @property
    def layout(self) -> Layout:
        return Layout.of(self.module)

    @property
    def notes(self) -> tuple[str, ...]:
        """Returns the notes on everything outside of epsilon: the data's, and frozen parameters."""
        total = sum(p.numel() for p in self.module.parameters())
        still = total - self.dimension
        if not still:
            return self.data.notes
        frozen = (
            f"the model's frozen parameters ({still:,} of {total:,} numbers): they are public and "
            "stay as they were given, so nothing covers them if these data were used to make them"
        )
        return (*self.data.notes, frozen)

    def trainings(self) -> Tally:
        """Returns the counts of local trainings of all ranks; zeros if they are not counted."""
        mine = self.tally or Tally()
        each = self.ranks.gather((mine.trained, mine.diverged))
        return Tally(*(sum(counts) for counts in zip(*each, strict=True)))

    def client_store(self, fields: Fields) -> ClientStore:
        """Returns an empty store of the clients' own tensors, on the problem's device.

        Args:
            fields: shape of one client's value and dtype, by name.
        """
        members = None
        if self.rank_of is not None:
            members = (self.rank_of == self.ranks.rank).nonzero()[:, 0]
        part = f"{self.ranks.rank}-of-{self.ranks.size}"
        device = self.initial.device
        return ClientStore(self.clients, fields, device=device, members=members, part=part)

    def gathered(self, store: ClientStore) -> ClientStore:
        """Returns a store with the tensors of all clients, at every rank.

        In a single process it is ``store`` itself.

        Args:
            store: with the tensors of this rank's clients.
        """
        if self.rank_of is None:
            return store
        whole = ClientStore(self.clients, store.fields, device=self.initial.device)
        own = store.members
        joined = {}
        for name in store.fields:
            joined[name] = self.ranks.join(store.gather(name, own), own, self.clients)
        whole.scatter_all(torch.arange(self.clients), joined)
        return whole
