"""A cohort: the clients of a round that one process computes, and their local training."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from ..errors import ConfigError, PrivacyError
from ..local import LocalSolver, LocalTraining, Mixture
from ..local.clients import idle, train_on_batches, train_on_records
from ..local.losses import Loss
from ..local.optimizers import Strength
from ..local.train import Trained
from ..privacy import LocalSteps
from ..privacy.clip import RowTotal, not_finite
from .store import Fields

if TYPE_CHECKING:
    from .problem import Problem

AFTER = 2**32 - 1
"""The round number, for batches, of local training after all rounds, for personal models."""

Own = dict[str, Tensor]
"""The clients' own states, by name: (k, *shape) each, rows in the order of the clients."""

Rows = Tensor | RowTotal
"""The messages of clients, (k, D), or the clipped sum that they were added to."""


def unclipped(name: str, rows: Tensor) -> Tensor:
    """Returns ``rows`` as they are, for the release ``name``."""
    return rows


@dataclass(frozen=True)
class Cohort:
    """Clients of a round, or the client of an activation, that are computed in one call.

    They may read the public state, their own tensors and their own examples, and nothing else: a
    client's numbers do not depend on the other clients of the cohort.

    Attributes:
        problem: the data and the model; only the examples of ``ids`` are read.
        ids: int64 (k,), positions of the clients in the data.
        public: the public state, not to be changed.
        own: the clients' states, their rows of the store; not to be changed in place.
        round: number of the round, from 0; it addresses batches and dropout masks. :data:`AFTER`
            for personal models, for which nothing is sent.
        clip: (name, rows (k, D)) -> the rows as the release ``name`` counts them; for clients that
            remember their messages.
        local: the local steps that the round has charged, if single records are protected; else
            None.
        members: int64 (m,), all participants of the round. The position of a client among them
            determines its lane in a stack (:mod:`fedmtl.local.batches`), and no number. None: all
            clients of the data.
        weights: (k,), of the rows that :meth:`change` adds up as they are made; None: 1 each.
        total: name -> the sum to which rows of that release are added as they are made; None if the
            channel needs the rows.
        starts: int64 (k,), the rows of the public state's ``"global"`` from which the clients
            start; None: all from the whole of it.
    """

    problem: Problem
    ids: Tensor
    public: Mapping[str, Tensor] = field(default_factory=dict)
    own: Own = field(default_factory=dict)
    round: int = AFTER
    clip: Callable[[str, Tensor], Tensor] = unclipped
    local: LocalSteps | None = None
    members: Tensor | None = None
    total: Callable[[str], RowTotal | None] | None = None
    weights: Tensor | None = None
    starts: Tensor | None = None

    @property
    def initial(self) -> Tensor:
        """Returns (D,), the public starting point."""
        return self.problem.initial

    @property
    def shared(self) -> Tensor:
        """Returns the shared model of a :class:`~.shared_model.SharedModel`, (D,).

        It is (C, D) for a method with several, and (k, D), a row for each client, if these start
        from models of different rounds.
        """
        if self.starts is None:
            return self.public["global"]
        return self.public["global"][self.starts]

    @property
    def examples(self) -> Tensor:
        """Returns the clients' numbers of training examples, int64 (k,)."""
        return self.problem.data.train.counts[self.ids]

    def steps(self, solver: LocalSolver) -> Tensor:
        """Returns the numbers of local steps of the clients in one training.

        Args:
            solver: of the training; under record-level privacy the charged steps count instead.

        Returns:
            int64 (k,).
        """
        if self.local is not None:
            return self.local.steps(self.ids)
        return solver.step_counts(self.examples)

    @property
    def new(self) -> Tensor:
        """Returns the places of the clients that never took part, int64 on the host."""
        return (~self.own["seen"]).nonzero()[:, 0].cpu()

    def of(self, ids: Tensor, own: Own) -> Cohort:
        """Returns some of the clients.

        Args:
            ids: int64 (j,), some of the clients' ids, which are in ascending order.
            own: their states.
        """
        starts = self.starts
        if starts is not None:
            starts = starts[torch.searchsorted(self.ids, ids)]
        return replace(self, ids=ids, own=own, starts=starts)

    def part(self, places: Tensor) -> Cohort:
        """Returns some of the clients.

        Args:
            places: int64 (j,) on the host, places among the k clients.
        """
        own = {name: rows[places] for name, rows in self.own.items()}
        starts = self.starts
        if starts is not None:
            starts = starts[places]
        return replace(self, ids=self.ids[places], own=own, starts=starts)

    # Personal models, in a store with the fields of personal_fields

    def models(self, first: Tensor) -> Tensor:
        """Returns the clients' own last models, (k, D).

        The tensor may be ``own["model"]`` itself.

        Args:
            first: (D,) or (k, D), the models of clients that never took part.
        """
        rows = self.own["model"]
        took_part = self.own["seen"]
        if bool(took_part.all()):
            return rows
        return torch.where(took_part[:, None], rows, first)

    def keep(self, models: Tensor, start: Tensor) -> Own:
        """Returns the states of clients after a training.

        A client whose model is no longer finite keeps its start.

        Args:
            models: (k, D), after the training.
            start: (k, D), before it.

        Returns:
            The fields of :func:`personal_fields`, and the other fields of the clients as they were.
        """
        seen = torch.ones_like(self.own["seen"])
        trained = torch.ones_like(seen)  # a tensor of its own: a store takes both without a copy
        # a sum is a cheap first look: it is never finite by chance, and rarely overflows
        if not bool(torch.isfinite(models.sum(1)).all()):
            finite = torch.isfinite(models).all(1)
            models = torch.where(finite[:, None], models, start)
            trained = self.own["trained"] | finite
        return self.own | {"model": models, "seen": seen, "trained": trained}

    def personal(self, new: Callable[[Cohort], Tensor]) -> Tensor:
        """Returns the clients' own models.

        Args:
            new: from the clients without a model, j of them, to their models (j, D).

        Returns:
            (k, D).
        """
        places = self.new
        if not len(places):
            return self.own["model"]
        rows = self.own["model"].clone()
        rows[places] = new(self.part(places))
        return rows

    # Local training

    def train(
        self,
        solver: LocalSolver,
        start: Tensor,
        *,
        lam: Strength = 0.0,
        anchor: Tensor | None = None,
        divergence: Loss | None = None,
        moving: Tensor | None = None,
        mixture: Mixture | None = None,
        correction: Tensor | None = None,
    ) -> Tensor:
        """Trains the clients' models: local SGD, or DP-SGD if single records are protected.

        DP-SGD takes the local steps that the ledger has charged in this round. A client without one
        keeps its start, and so does every client after the rounds, :data:`AFTER`.

        Args:
            solver: see :class:`fedmtl.local.LocalSolver`.
            start: (D,) or (k, D), the initial models.
            lam: strength of the pull (lam / 2) ||w - anchor||^2. It may be a tensor (D,) or (k, D)
                with one strength for each coordinate, or a
                :class:`~fedmtl.local.precision.Precision` P with the pull
                (1/2) (w - anchor)^T P (w - anchor).
            anchor: (D,) or (k, D); None without a pull.
            divergence: replaces the squared distance of the pull, see
                :class:`fedmtl.local.LocalTraining`; not if records are protected.
            moving: bool (D,), the coordinates that are trained; None for all.
            mixture: personal models (k, D) that are trained at the same batches, see
                :class:`fedmtl.local.Mixture`. They are changed in place. Nothing of them is sent,
                so they have no noise. None without.
            correction: added to every gradient, (D,) or (k, D); under DP-SGD after the noise. None
                for none.

        Returns:
            The models after local training, (k, D), on the device and in the dtype of ``initial``.

        Raises:
            PrivacyError: single records are protected, and the round has charged no local steps.
        """
        models = self.initial.new_empty(len(self.ids), self.problem.dimension)
        run = self._training(
            solver,
            start,
            lam=lam,
            anchor=anchor,
            divergence=divergence,
            moving=moving,
            mixture=mixture,
            correction=correction,
        )
        for place, trained in self._train(run):
            _write(models, place, trained)
        return models

    def change(
        self,
        solver: LocalSolver,
        start: Tensor,
        *,
        lam: Strength = 0.0,
        anchor: Tensor | None = None,
        mixture: Mixture | None = None,
    ) -> Rows:
        """Trains the clients' models and returns their updates, for the release ``"update"``.

        A sum takes one row of a client, so the release refuses a second call for the same clients
        in a round.

        Args:
            solver: see :meth:`train`.
            start: see :meth:`train`.
            lam: see :meth:`train`.
            anchor: see :meth:`train`.
            mixture: see :meth:`train`.

        Returns:
            The model updates w_k - w from the shared model, (k, D); or their weighted, clipped sum
            if the channel needs no rows.
        """
        run = self._training(solver, start, lam=lam, anchor=anchor, mixture=mixture)
        return self._change(run, None)

    def change_and_models(
        self,
        solver: LocalSolver,
        start: Tensor,
        *,
        lam: Strength = 0.0,
        anchor: Tensor | None = None,
    ) -> tuple[Rows, Tensor]:
        """Trains the clients' models and returns their updates and the models themselves.

        Args:
            solver: see :meth:`train`.
            start: see :meth:`train`.
            lam: see :meth:`train`.
            anchor: see :meth:`train`.

        Returns:
            The updates, as those of :meth:`change`, and the models (k, D).
        """
        models = self.initial.new_empty(len(self.ids), self.problem.dimension)
        run = self._training(solver, start, lam=lam, anchor=anchor)
        return self._change(run, models), models

    def _training(self, solver: LocalSolver, start: Tensor, **pull: Any) -> LocalTraining:
        """Returns the local training of the clients in this round."""
        problem = self.problem
        return LocalTraining(problem.data, problem.loss, solver, self.round, start, **pull)

    def _change(self, run: LocalTraining, models: Tensor | None) -> Rows:
        """Trains the clients and returns their updates, rows or a sum; the trained models are
        written to ``models`` (k, D), if it is given."""
        initial = self.initial
        # sums are exact on the CPU alone; long rows are added as they are made
        total = None
        if self.total is not None and initial.device.type == "cpu":
            total = self.total("update")
        kept = len(self.ids) if total is None else 0
        changes = initial.new_empty(kept, self.problem.dimension)
        shared = self.shared
        for place, trained in self._train(run):
            if models is not None:
                _write(models, place, trained)
            if self.starts is None:
                rows = trained - shared
            else:
                rows = trained - shared[place]
            if total is None:
                _write(changes, place, rows)
                continue
            if self.weights is not None:
                rows = self.weights[place, None] * rows
            total.add(self.ids[place], rows)
        if total is None:
            return changes
        return total

    def _train(self, run: LocalTraining) -> Trained:
        """Trains the clients and yields places among them with their models, as they finish.

        The model of a client without a local step is its start.
        """
        tally = self.problem.tally
        if self.round == AFTER:
            tally = None  # personal models are no local trainings of a round
        train = self._train_on_batches
        if self.problem.protects_records:
            train = self._train_on_records
        diverged = 0
        for place, models in train(run):
            if tally is not None:
                diverged += not_finite(models)
            yield place, models
        if tally is None:
            return
        tally.trained += len(self.ids)
        tally.diverged += diverged
        if run.mixture is not None and not self.problem.protects_records:
            tally.trained += len(self.ids)
            tally.diverged += not_finite(run.mixture.models)

    def _train_on_batches(self, run: LocalTraining) -> Trained:
        """Trains on batches, by local SGD."""
        problem = self.problem
        return train_on_batches(
            run, problem.executor, self.ids, seed=problem.seed, members=self.members
        )

    def _train_on_records(self, run: LocalTraining) -> Trained:
        """Trains by DP-SGD on the local steps that are charged."""
        if run.divergence is not None:
            measured = "A pull that is measured on a client's records"
            raise ConfigError(f"{measured} has no release; use privacy=client.")
        if self.round == AFTER:
            return idle(run, torch.zeros(len(self.ids)))
        if self.local is None:
            raise PrivacyError(
                "Single records are protected, and these clients have no local steps that the "
                "ledger has charged: train in Algorithm.client, by the cohort that it gets."
            )
        return train_on_records(run, self.problem.executor, self.ids, self.local)


def _write(rows: Tensor, place: Tensor, models: Tensor) -> None:
    """Writes models (d, D) to their places, int64 (d,) on the host."""
    rows.index_copy_(0, place.to(rows.device), models)


def personal_fields(problem: Problem) -> Fields:
    """Returns the fields of a store of personal models.

    Args:
        problem: of the run, for the size and the dtype of a model.

    Returns:
        ``model``, the client's model (D,); ``seen``, True if it has taken part; ``trained``, True
        if one of its local trainings ended in a finite model.
    """
    flags: Fields = {"seen": ((), torch.bool), "trained": ((), torch.bool)}
    return {"model": ((problem.dimension,), problem.initial.dtype), **flags}
