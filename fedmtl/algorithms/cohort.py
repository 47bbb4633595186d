"""A cohort: the clients of a round that one process computes, what they may read, and their local training."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from ..errors import ConfigError, PrivacyError
from ..local import LocalSolver, LocalTraining, Mixture, plan_batches
from ..local.batches import LANES, batch_widths, grain_of, places, plannable
from ..local.losses import Loss
from ..local.solver import Strength, rows_of
from ..local.train import Trained
from ..privacy import LocalSteps
from ..privacy.clip import RowTotal, not_finite
from .store import Fields

if TYPE_CHECKING:
    from .base import Problem

AFTER = 2**32 - 1
"""The round number that addresses the batches of clients that train after all rounds, for their personal models."""

Own = dict[str, Tensor]
"""What clients keep for themselves, by name: (k, *shape) each, rows in the order of the clients."""

Rows = Tensor | RowTotal
"""What clients send, (k, D), or the clipped sum that it was added to."""


def unclipped(name: str, rows: Tensor) -> Tensor:
    """Return ``rows`` as they are, for the release ``name``."""
    return rows


@dataclass(frozen=True)
class Cohort:
    """Clients of a round, or the client of an activation, whose part is computed in one call.

    They may read the public state, their own tensors and their own examples, and nothing else, so that a client's
    numbers do not depend on who is computed beside it.

    Attributes:
        problem: the data and the model; only the examples of ``ids`` are read.
        ids: int64 (k,), positions of the clients in the data.
        public: the public state, not to be changed.
        own: what the clients keep, their rows of the store; not to be changed in place.
        round: number of the round, from 0; it addresses batches and dropout masks. :data:`AFTER` for personal models,
            for which nothing is sent.
        clip: (name, rows (k, D)) -> the rows as the release ``name`` counts them; for clients that remember what they
            sent.
        local: the local steps that the round has charged, where single records are protected; else None.
        members: int64 (m,), all who take part in the round; the position of a client among them determines its lane in
            a stack (:mod:`fedmtl.local.batches`), and no number. None: all clients of the data.
        weights: (k,), of the rows that :meth:`change` adds up as they are made; None: 1 each.
        total: name -> where rows of that release are added up as they are made; None where the channel needs the rows.
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

    @property
    def initial(self) -> Tensor:
        """Return (D,), the public starting point."""
        return self.problem.initial

    @property
    def shared(self) -> Tensor:
        """Return (D,), the shared model of a :class:`~.shared_model.SharedModel`, or (C, D) of one with several."""
        return self.public["global"]

    @property
    def examples(self) -> Tensor:
        """Return the clients' numbers of training examples, int64 (k,)."""
        return self.problem.data.train.counts[self.ids]

    def steps(self, solver: LocalSolver) -> Tensor:
        """Return the clients' numbers of local steps in one training by ``solver``, int64 (k,)."""
        return solver.step_counts(self.examples) if self.local is None else self.local.steps(self.ids)

    @property
    def new(self) -> Tensor:
        """Return the places of the clients that never took part, int64 on the host."""
        return (~self.own["seen"]).nonzero()[:, 0].cpu()

    def part(self, places: Tensor) -> Cohort:
        """Return the clients at ``places``, int64 (j,) on the host."""
        return replace(self, ids=self.ids[places], own={name: rows[places] for name, rows in self.own.items()})

    # Personal models, in a store with the fields of personal_fields

    def models(self, first: Tensor) -> Tensor:
        """Return each client's own last model, or ``first``, (D,) or (k, D), of a client that never took part: (k, D).

        May be ``own["model"]`` itself.
        """
        rows, took_part = self.own["model"], self.own["seen"]
        return rows if bool(took_part.all()) else torch.where(took_part[:, None], rows, first)

    def keep(self, models: Tensor, start: Tensor) -> Own:
        """Return what clients keep that have trained from ``start`` to ``models``, (k, D) each.

        A client whose model is no longer finite keeps its start.
        """
        trained = torch.ones_like(self.own["seen"])
        if not bool(torch.isfinite(models.sum(1)).all()):  # no sum is finite by chance, and few are not by overflow
            finite = torch.isfinite(models).all(1)
            models, trained = torch.where(finite[:, None], models, start), self.own["trained"] | finite
        return self.own | {"model": models, "seen": torch.ones_like(self.own["seen"]), "trained": trained}

    def personal(self, new: Callable[[Cohort], Tensor]) -> Tensor:
        """Return the clients' own models (k, D), with ``new(clients)`` for those that never took part."""
        if not len(self.new):
            return self.own["model"]
        rows = self.own["model"].clone()
        rows[self.new] = new(self.part(self.new))
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
        """Return every client's model after its local run: (k, D), on the device and in the dtype of ``initial``.

        Where single records are protected it is DP-SGD on the local steps that the ledger has charged in this round: a
        client without one keeps its start, and so does every client after the rounds, :data:`AFTER`.

        Args:
            solver: see :class:`fedmtl.local.LocalSolver`.
            start: (D,) or (k, D).
            lam, anchor: the pull (lam / 2) ||w - anchor||^2; anchor (D,) or (k, D); lam may be a tensor (D,) or (k, D)
                with one strength for each coordinate, or a :class:`~fedmtl.local.precision.Precision` P, and the pull
                is (1/2) (w - anchor)^T P (w - anchor).
            divergence: what the pull measures in place of the squared distance, see
                :class:`fedmtl.local.LocalTraining`; not where records are protected.
            moving: bool (D,), the coordinates that are trained; None for all.
            mixture: personal models (k, D) that are trained beside, at the same batches, see
                :class:`fedmtl.local.Mixture`; changed in place, and without noise where records are protected, since
                nothing of them is sent. None without.
            correction: added to every gradient, (D,) or (k, D); under DP-SGD after the noise. None for none.

        Raises:
            PrivacyError: single records are protected, and the round has charged no local steps.
        """
        models = self.initial.new_empty(len(self.ids), self.problem.dimension)
        data, loss = self.problem.data, self.problem.loss
        run = LocalTraining(data, loss, solver, self.round, start, lam, anchor, divergence, moving, mixture, correction)
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
        trained: Tensor | None = None,
    ) -> Rows:
        """Return how far the clients' models are from the shared one after their local run, for the release
        ``"update"``: rows (k, D), or their weighted, clipped sum where the channel needs no rows. Such a sum takes one
        row of a client, so a second call for the same clients in a round is refused by the release.

        Args:
            solver, start, lam, anchor, mixture: see :meth:`train`.
            trained: (k, D), which the models themselves are written to. None: they are not needed.
        """
        shared, initial = self.shared, self.initial
        total = self.total("update") if self.total is not None and initial.device.type == "cpu" else None
        changes = initial.new_empty(len(self.ids) if total is None else 0, self.problem.dimension)

        data, loss = self.problem.data, self.problem.loss
        run = LocalTraining(data, loss, solver, self.round, start, lam, anchor, mixture=mixture)
        for place, models in self._train(run):
            if trained is not None:
                _write(trained, place, models)
            rows = models - shared
            if total is None:
                _write(changes, place, rows)
            else:
                total.add(self.ids[place], rows if self.weights is None else self.weights[place, None] * rows)
        return changes if total is None else total

    def _train(self, run: LocalTraining) -> Trained:
        """Train the clients, and yield places among them and models as they finish; of a client without a local step
        its start."""
        tally, diverged = self.problem.tally if self.round != AFTER else None, 0
        for place, models in (self._train_on_records if self.problem.protects_records else self._train_on_batches)(run):
            diverged += 0 if tally is None else not_finite(models)
            yield place, models
        if tally is not None:
            beside = () if run.mixture is None or self.problem.protects_records else (run.mixture.models,)
            tally.trained += len(self.ids) * (1 + len(beside))
            tally.diverged += diverged + sum(map(not_finite, beside))

    def _train_on_batches(self, run: LocalTraining) -> Trained:
        """Train on batches."""
        problem, executor = self.problem, self.problem.executor
        steps, widths = run.solver.step_counts(self.examples), batch_widths(self.examples, run.solver.batch_size)
        rank = self.ids.cpu()  # of the clients among all who take part
        if self.members is not None:
            members, order = torch.sort(self.members)
            rank = order[torch.searchsorted(members, rank)]
        for width in widths[steps > 0].unique().tolist():
            alike, grain = ((widths == width) & (steps > 0)).nonzero()[:, 0], grain_of(width, executor.chunk)
            members, real = places(steps[alike], rank[alike] % LANES, grain)
            block = plannable(int(steps[alike].max()), width, grain)
            for place, used in zip(alike[members].split(block), real.split(block), strict=True):
                plan = plan_batches(
                    problem.data,
                    run.solver,
                    self.ids[place],
                    seed=problem.seed,
                    round=run.round,
                    steps=torch.where(used, steps[place], 0),  # a filler never finishes
                    width=width,
                    grain=grain,
                )
                for part in executor.slices(len(place), grain=grain):
                    batches = run.on_batches(executor.stack, plan.part(part), place[part])
                    yield from run.train(executor.stack, place[part], batches)
        yield from _idle(run, steps)

    def _train_on_records(self, run: LocalTraining) -> Trained:
        """Train by DP-SGD on the local steps that are charged."""
        if run.divergence is not None:
            raise ConfigError("A pull that is measured on a client's records has no release; use privacy=client.")
        if self.round == AFTER:
            yield from _idle(run, torch.zeros(len(self.ids)))
            return
        if self.local is None:
            raise PrivacyError(
                "Single records are protected, and these clients have no local steps that the ledger has charged: "
                "train in Algorithm.client, by the cohort that it gets."
            )
        local, executor = self.local, self.problem.executor
        single = executor.chunk < LANES
        width = executor.examples_at_once(float(local.plan.expected.max(initial=0.0)))
        steps = local.steps(self.ids)
        order = torch.argsort(steps, descending=True, stable=True)
        order = order[steps[order] > 0]
        for part in executor.slices(len(order), grain=1 if single else None):
            records = run.on_records(executor.stack, self.ids[order[part]], local, width)
            yield from run.train(executor.stack, order[part], records)
        yield from _idle(run, steps)


def _idle(run: LocalTraining, steps: Tensor) -> Trained:
    """Yield the clients without a local step, and where they start."""
    place = (steps == 0).nonzero()[:, 0]
    if len(place):
        yield place, rows_of(run.start, place).expand(len(place), -1)


def _write(rows: Tensor, place: Tensor, models: Tensor) -> None:
    """Write models (d, D) to their places, int64 (d,) on the host."""
    rows.index_copy_(0, place.to(rows.device), models)


def personal_fields(problem: Problem) -> Fields:
    """Return the fields of a store of personal models: the client's model (D,), whether it has taken part, and whether
    one of its local trainings ended in a finite model."""
    flags: Fields = {"seen": ((), torch.bool), "trained": ((), torch.bool)}
    return {"model": ((problem.dimension,), problem.initial.dtype), **flags}
