"""What every algorithm is made of: the problem, the state, events, and four methods."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Protocol, runtime_checkable

import numpy as np
from torch import Tensor, nn

from ..data import FederatedDataset
from ..execution import Executor
from ..execution.executor import by_decreasing
from ..optim import BatchPlan, LocalSolver, plan_batches, train_locally
from ..optim.batches import plannable
from ..optim.private import train_privately
from ..privacy import BoundSampler, Channel, OwnerChannel, RecordReleases, ReleasePlan
from ..schedules import Event, EventTable
from ..stacked import Layout, StackedModule
from ..stacked.losses import Loss
from .store import ClientStore, Fields, MappedClientStore

PERSONALIZE_ROUND = 2**32 - 1
"""The round number that addresses the batches of :meth:`Algorithm.personalize`: after every real round."""


@dataclass
class State:
    """All that an algorithm carries from one event to the next: tensors only, so this is the checkpoint.

    Attributes:
        public: tensors that observers may see; they change only by releases.
        private: per-client tensors that never leave their clients.
    """

    public: dict[str, Tensor]
    private: ClientStore


@dataclass(frozen=True)
class Problem:
    """The data, the model and the loss that an algorithm works on.

    Attributes:
        data: the clients' data.
        module: prepared template of the model.
        initial: (D,), the public starting point.
        loss: one value per example.
        executor: computes chunks of clients.
        rounds: planned number of events.
        seed: of the run.
        store_folder: where the clients' own tensors are memory-mapped; ``None`` keeps them in memory.
        records: releases the gradients of local training, where single records are protected; else ``None``.
        clients: number of clients, the public nominal population.
    """

    data: FederatedDataset
    module: nn.Module
    initial: Tensor
    loss: Loss
    executor: Executor
    rounds: int
    seed: int
    store_folder: Path | None = None
    records: RecordReleases | None = None

    @property
    def clients(self) -> int:
        return len(self.data)

    @property
    def dimension(self) -> int:
        """D, the number of trainable parameters."""
        return len(self.initial)

    @property
    def layout(self) -> Layout:
        return Layout.of(self.module)

    def client_store(self, fields: Fields) -> ClientStore:
        """An empty store of the clients' own tensors, on the problem's device."""
        device = self.initial.device
        if self.store_folder is None:
            return ClientStore(self.clients, fields, device=device)
        return MappedClientStore(self.clients, fields, folder=self.store_folder, device=device)

    def train_locally(
        self,
        solver: LocalSolver,
        start: Tensor,
        clients: Tensor,
        *,
        round: int,
        lam: float = 0.0,
        anchor: Tensor | None = None,
        out: Tensor | None = None,
    ) -> Tensor:
        """Every client's model after its local run.

        With ``records`` it is DP-SGD on the local steps that the ledger has charged in this round: a client without
        one keeps its start, and so does every client in :data:`PERSONALIZE_ROUND`.

        Args:
            solver: see :class:`fedmtl.optim.LocalSolver`.
            start: (D,) or (k, D).
            clients: int64 (k,).
            round: addresses batches and dropout masks.
            lam, anchor: the pull (lam / 2) ||w - anchor||^2; anchor (D,).
            out: (k, D), where the models go; may be ``start``.

        Returns:
            (k, D), on the device and in the dtype of ``initial``.
        """
        result = self.initial.new_empty(len(clients), self.dimension) if out is None else out
        if self.records is not None:
            return self._train_privately(solver, start, clients, result, self.records, round, lam, anchor)
        counts = self.data.train.counts[clients]
        steps = solver.step_counts(counts)
        order = by_decreasing(steps)
        block = plannable(steps, counts, solver.batch_size) if len(clients) else 1
        for members in order.split(block):
            plan = plan_batches(self.data, solver, clients[members], seed=self.seed, round=round)

            def work(stack: StackedModule, part: slice, members: Tensor = members, plan: BatchPlan = plan) -> None:
                own = members[part].to(start.device)
                first = start if start.dim() == 1 else start[own]
                result[own] = train_locally(
                    stack, self.data, self.loss, solver, plan.part(part), first, lam=lam, anchor=anchor
                )

            self.executor.map(work, len(members))
        return result

    def _train_privately(
        self,
        solver: LocalSolver,
        start: Tensor,
        clients: Tensor,
        result: Tensor,
        records: RecordReleases,
        round: int,
        lam: float,
        anchor: Tensor | None,
    ) -> Tensor:
        if round == PERSONALIZE_ROUND:
            return result.copy_(start if start.dim() == 2 else start.expand(len(clients), -1))
        order = by_decreasing(records.steps(clients))

        def work(stack: StackedModule, part: slice) -> None:
            own = order[part]
            place = own.to(start.device)
            result[place] = train_privately(
                stack,
                self.data,
                self.loss,
                solver,
                start if start.dim() == 1 else start[place],
                clients=clients[own],
                round=round,
                records=records,
                lam=lam,
                anchor=anchor,
            )

        self.executor.map(work, len(clients))
        return result


@runtime_checkable
class Algorithm(Protocol):
    """An algorithm: one file a paper. Everything that leaves a client goes through ``channel.release``."""

    name: str

    def plan(self, problem: Problem, sampler: BoundSampler) -> tuple[ReleasePlan, ...]:
        """Every release the algorithm will make, and how often: what calibration needs."""
        ...

    def init(self, problem: Problem) -> State:
        """The state before the first event; the public part never reads data."""
        ...

    def step(self, problem: Problem, state: State, event: Event, channel: Channel) -> State:
        """The state after one event; may change ``state`` in place."""
        ...

    def personalize(self, problem: Problem, state: State, clients: Tensor) -> Tensor:
        """The personal models (k, D) of ``clients``, int64 (k,), also of clients that never took part."""
        ...

    def shared(self, state: State) -> Tensor | None:
        """The released shared model (D,), if the algorithm has one."""
        ...


@runtime_checkable
class AsyncAlgorithm(Protocol):
    """An algorithm whose clients act one at a time: a block of activations in, everything out through ``channel``.

    R repetitions run together; the trainer runs one.
    """

    name: str

    def rows(self, problem: Problem) -> list[Tensor]:
        """(n_i, p) float64: the rows of which the gradients of each client's records are multiples."""
        ...

    def caps(self, problem: Problem, scheduled: np.ndarray) -> np.ndarray:
        """Hard cap on the answers of each client, int64 (n,), given the most that the schedule has for it."""
        ...

    def init(self, problem: Problem, replicates: int = 1) -> State:
        """The state before the first activation; the public part never reads data."""
        ...

    def step(self, problem: Problem, state: State, block: EventTable, channel: OwnerChannel) -> State:
        """The state after a block of activations: one release for each, in order."""
        ...

    def personalize(self, problem: Problem, state: State, clients: Tensor) -> Tensor:
        """The personal models (k, D) of ``clients``, int64 (k,)."""
        ...

    def shared(self, state: State) -> Tensor | None:
        """The released shared model (D,), if the algorithm has one."""
        ...


AnyAlgorithm = Algorithm | AsyncAlgorithm
