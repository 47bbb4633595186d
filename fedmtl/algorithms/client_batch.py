"""A batch of clients: those of a cohort that are computed in one call, and their local training."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from .._devices import on_device
from ..errors import ConfigError, PrivacyError
from ..local import LocalSGD, LocalSolver, LocalTraining, Mixture
from ..local.clients import Piece, train_on_batches, train_on_records
from ..local.gradient_sums import clipped_gradient_sums, plain_sums
from ..local.losses import Loss
from ..local.optimizers import Strength
from ..privacy import GradientPlan, LocalSteps
from ..privacy.clip import Clip, clip_rows, not_finite
from .store import Fields

if TYPE_CHECKING:
    from .problem import Problem

AFTER = 2**32 - 1
"""The round number, for batches, of local training after all rounds, for personal models."""

ClientStates = dict[str, Tensor]
"""The states of clients, by name: (k, *shape) each, rows in the order of the clients."""


@dataclass(frozen=True)
class ClientBatch:
    """A batch of clients: some clients of a round's cohort, which are computed in one call.

    A cohort is divided into them by :meth:`.problem.Problem.pieces`, and its messages are released
    together. The clients may read the public state, their own tensors and their own examples, and
    nothing else: a client's numbers do not depend on the other clients.

    Attributes:
        problem: the data and the model; only the examples of ``clients`` are read.
        clients: int64 (k,), positions of the clients in the data.
        public: the public state, not to be changed.
        states: the clients' states, their rows of the store; not to be changed in place.
        round: number of the round, from 0; it addresses batches and dropout masks. :data:`AFTER`
            for personal models, for which nothing is sent.
        clips: the clip of each release in this round, by name; None for one that does not clip. It
            is for clients that remember their messages.
        charged_steps: of DP-SGD, for this round, if single records are protected; else None.
        cohort: int64 (m,), all participants of the round; None: all clients of the data. A place
            among them determines a lane in a stack (:mod:`fedmtl.local.stacking`), and no number.
        starts: int64 (k,), the rows of the public state's ``"global"`` from which the clients
            start; None: all from the whole of it.
        piece: plans these clients' batches with those of others; None: they are planned alone.

    Example:
        >>> import torch
        >>> from fedmtl import FedAvg, FullParticipation, LocalSGD, Trainer, load_data, models
        >>> from fedmtl.algorithms import ClientBatch
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
        >>> c = ClientBatch(problem, torch.tensor([0, 3]), public={"global": problem.initial})
        >>> c.train(LocalSGD(lr=0.1), c.shared).shape
        torch.Size([2, 650])
    """

    problem: Problem
    clients: Tensor
    public: Mapping[str, Tensor] = field(default_factory=dict)
    states: ClientStates = field(default_factory=dict)
    round: int = AFTER
    clips: Mapping[str, Clip | None] = field(default_factory=dict)
    charged_steps: LocalSteps | None = None
    cohort: Tensor | None = None
    starts: Tensor | None = None
    piece: Piece | None = None

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
        return self.problem.data.train.counts[self.clients]

    def steps(self, solver: LocalSolver) -> Tensor:
        """Returns the numbers of local steps of the clients in one training.

        Args:
            solver: of the training; under record-level privacy the charged steps count instead.

        Returns:
            int64 (k,).
        """
        if self.charged_steps is not None:
            return self.charged_steps.steps(self.clients)
        return solver.step_counts(self.examples)

    @property
    def newcomers(self) -> Tensor:
        """Returns the places of the clients that never took part in a round, int64 on the host."""
        return (~self.states["seen"]).cpu().nonzero()[:, 0]

    def of(self, piece: Piece, states: ClientStates) -> ClientBatch:
        """Returns some of the clients, with their states as a store has them.

        Args:
            piece: of the clients, in ascending order.
            states: of these clients.
        """
        starts = self.starts
        if starts is not None:
            starts = starts[torch.searchsorted(self.clients, piece.clients)]
        return replace(self, clients=piece.clients, states=states, starts=starts, piece=piece)

    def part(self, places: Tensor) -> ClientBatch:
        """Returns some of the clients, with their states in this batch.

        Args:
            places: int64 (j,) on the host, places among the k clients.
        """
        states = {name: rows[on_device(places, rows.device)] for name, rows in self.states.items()}
        starts = self.starts
        if starts is not None:
            starts = starts[places]
        return replace(self, clients=self.clients[places], states=states, starts=starts)

    def clip(self, name: str, rows: Tensor) -> Tensor:
        """Clips the rows of clients as a release counts them, for clients that remember them.

        Args:
            name: of the release.
            rows: (k, D), or (R, k, D) of R replicates.

        Returns:
            The shape, dtype and device of ``rows``.

        Raises:
            PrivacyError: the round has no release of this name.
        """
        if name not in self.clips:
            declared = ", ".join(self.clips) or "none"
            raise PrivacyError(f"Release {name!r} was not declared; declared: {declared}.")
        clipped = clip_rows(rows.reshape(-1, rows.shape[-1]), self.clips[name])
        return clipped.reshape(rows.shape)

    # Personal models, in a store with the fields of personal_fields

    def last_models(self, first: Tensor) -> Tensor:
        """Returns the clients' models after their last participations, (k, D).

        The tensor may be ``states["model"]`` itself.

        Args:
            first: (D,) or (k, D), the models of clients that never took part.
        """
        rows = self.states["model"]
        took_part = self.states["seen"]
        # off the CPU to ask is to wait
        if took_part.device.type == "cpu" and bool(took_part.all()):
            return rows
        return torch.where(took_part[:, None], rows, first)

    def keep(self, models: Tensor, start: Tensor) -> ClientStates:
        """Returns the states of clients after a training.

        A client whose model is no longer finite keeps its start.

        Args:
            models: (k, D), after the training.
            start: (k, D), before it.

        Returns:
            The fields of :func:`personal_fields`, and the other fields of the clients as they were.
        """
        seen = torch.ones_like(self.states["seen"])
        trained = torch.ones_like(seen)  # a tensor of its own: a store takes both without a copy
        # a sum is a cheap first look: it is never finite by chance, and rarely overflows
        look = models.device.type == "cpu"
        if not look or not bool(torch.isfinite(models.sum(1)).all()):
            finite = torch.isfinite(models).all(1)
            models = torch.where(finite[:, None], models, start)
            trained = self.states["trained"] | finite
        return self.states | {"model": models, "seen": seen, "trained": trained}

    def with_newcomers(self, models: Tensor) -> Tensor:
        """Returns the clients' last models with models for those that never took part, (k, D).

        Args:
            models: (j, D), of the clients :attr:`newcomers`.
        """
        if not len(models):
            return self.states["model"]
        return self.states["model"].index_copy(0, on_device(self.newcomers, models.device), models)

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
            correction: added to every gradient, (D,) or (k, D); under DP-SGD after the noise. None
                for none.

        Returns:
            The models after local training, (k, D), on the device and in the dtype of ``initial``.

        Raises:
            PrivacyError: single records are protected, and the round has charged no local steps.
        """
        problem = self.problem
        training = LocalTraining(
            problem.data,
            problem.loss,
            solver,
            self.round,
            start,
            lam=lam,
            anchor=anchor,
            divergence=divergence,
            moving=moving,
            correction=correction,
        )
        return self._trained(training)

    def train_mixture(
        self, solver: LocalSolver, start: Tensor, mixture: Mixture
    ) -> tuple[Tensor, Mixture]:
        """Trains the clients' models, and personal models in a mixture with them at the same
        batches.

        Args:
            solver: of both.
            start: (D,) or (k, D), the initial models.
            mixture: the personal models (k, D) and their weights.

        Returns:
            The models after local training, as of :meth:`train`; and the mixture after it. Nothing
            of the mixture is sent, so it has no noise.

        Raises:
            PrivacyError: see :meth:`train`.
        """
        problem = self.problem
        # a copy, which the steps move
        moved = replace(mixture, models=mixture.models.clone(), weights=mixture.weights.clone())
        training = LocalTraining(
            problem.data, problem.loss, solver, self.round, start, mixture=moved
        )
        return self._trained(training), moved

    def gradient_sums(self, models: Tensor, plan: GradientPlan) -> Tensor:
        """Returns the sum of the gradients of each client's records that are drawn for this round.

        If single records are protected, their gradients are clipped. The sums have noise of each
        client's own, or are private whole multiples of the grid of a secure sum.

        Args:
            models: (D,) or (k, D), the points of the gradients.
            plan: of the records that are drawn; not read if single records are protected.

        Returns:
            (k, D), float64 if single records are protected.

        Raises:
            PrivacyError: single records are protected, and the round has charged no local steps.
        """
        problem = self.problem
        # the step size has no effect, as nothing is trained
        training = LocalTraining(problem.data, problem.loss, LocalSGD(lr=1.0), self.round, models)
        if problem.protects_records:
            parts = clipped_gradient_sums(
                training, problem.executor, self.clients, self._needed_steps()
            )
        else:
            parts = plain_sums(training, problem.executor, self.clients, plan, problem.seed)
        return torch.cat([sums.clone() for sums in parts])

    def _needed_steps(self) -> LocalSteps:
        """Returns the local steps that the round has charged."""
        if self.charged_steps is None:
            raise PrivacyError(
                "Single records are protected, and these clients have no local steps that the "
                "ledger has charged: train in RoundAlgorithm.client_update, by its ClientBatch."
            )
        return self.charged_steps

    def _trained(self, training: LocalTraining) -> Tensor:
        """Trains the clients, and counts those whose models are not finite.

        Returns:
            The models after local training, (k, D); a client without a step keeps its start.
        """
        problem = self.problem
        if problem.protects_records:
            models = self._train_on_records(training)
        elif self.piece is not None and self.piece.trains(training, self.clients):
            models = self.piece.train(training, problem.executor)
        else:
            models = train_on_batches(
                training, problem.executor, self.clients, seed=problem.seed, cohort=self.cohort
            )
        tally = problem.tally
        # personal models are no local trainings of a round
        if tally is None or self.round == AFTER:
            return models
        tally.trained += len(self.clients)
        tally.diverged += int(not_finite(models))
        if training.mixture is not None and not problem.protects_records:
            tally.trained += len(self.clients)
            tally.diverged += int(not_finite(training.mixture.models))
        return models

    def _train_on_records(self, training: LocalTraining) -> Tensor:
        """Trains by DP-SGD on the local steps that are charged."""
        if training.divergence is not None:
            measured = "A pull that is measured on a client's records"
            raise ConfigError(f"{measured} has no release; use privacy=client.")
        if self.round == AFTER:
            return training.start.to(self.initial).expand(len(self.clients), -1).clone()
        return train_on_records(training, self.problem.executor, self.clients, self._needed_steps())


def personal_fields(problem: Problem) -> Fields:
    """Returns the fields of a store of personal models.

    Args:
        problem: of the run, for the size and the dtype of a model.

    Returns:
        ``model``, the client's model (D,); ``seen``, True if it has taken part; ``trained``, True
        if one of its local trainings ended in a finite model.

    Example:
        >>> from fedmtl import FedAvg, FullParticipation, Trainer, load_data, models
        >>> from fedmtl.algorithms import personal_fields
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
        >>> {name: shape for name, (shape, _) in personal_fields(problem).items()}
        {'model': (650,), 'seen': (), 'trained': ()}
    """
    flags: Fields = {"seen": ((), torch.bool), "trained": ((), torch.bool)}
    return {"model": ((problem.dimension,), problem.initial.dtype), **flags}
