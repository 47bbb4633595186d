"""Where the clients of a run compute: in this process and its ranks."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
import torch
from torch import Tensor

from ..algorithms.base import Algorithm, State
from ..privacy import NoiseSource, PrivacyReport
from ..schedules import Block
from .evaluation import (
    Metrics,
    bands,
    columns_of,
    each_run,
    evaluate_each,
    evaluate_models,
    evaluate_shared,
    numbers_of,
    summarize,
)
from .sources import Source

if TYPE_CHECKING:
    from .run import Run


@dataclass(frozen=True)
class Measured:
    """One evaluation.

    Attributes:
        rows: of the history, one for each budget.
        personal, shared: scores by client, of replicate 0; None where nothing was scored.
        runs: a mapping of numbers for each run, where there are several.
    """

    rows: list[dict[str, Any]]
    personal: Metrics | None
    shared: Metrics | None
    runs: list[dict[str, Any]] | None = None


class Engine(Protocol):
    """Where the clients of a run compute: in this process and its ranks, or on the nodes of Flower.

    Attributes:
        coins: where the noise and the cohorts come from, in place of the seed; all that is public stays that of the
            seed, and nothing is logged, nor are local trainings counted.
    """

    @property
    def coins(self) -> NoiseSource | None: ...

    def open(self, run: Run, resume: bool) -> tuple[Any, Source]:
        """Return the channel and the blocks of the run."""

    def init(self, run: Run) -> State:
        """Return the state before the first step."""

    def step(self, run: Run, state: State, block: Block) -> State:
        """Return the state after a block that is charged."""

    def measure(self, run: Run, state: State) -> Measured:
        """Evaluate the clients' models."""

    def models(self, run: Run, state: State) -> tuple[Tensor, dict[str, Tensor]]:
        """Return the personal models (n, D) after the last step, and their parts by name; only the models (k, D) of
        clients that were drawn for evaluation."""

    def report(self, run: Run, report: PrivacyReport) -> PrivacyReport:
        """Return what the run reports of its privacy, given the report of its channel."""


@dataclass(frozen=True)
class LocalEngine:
    """The engine of a run whose clients are computed by this process, or each by one of its ranks."""

    coins: NoiseSource | None = None

    def open(self, run: Run, resume: bool) -> tuple[Any, Source]:
        return run.settings.open(run.problem, run.fingerprint, run.ledger, resume, coins=self.coins)

    def init(self, run: Run) -> State:
        return run.algorithm.init(run.problem, run.settings.runs)

    def step(self, run: Run, state: State, block: Block) -> State:
        return run.algorithm.step(run.problem, state, block, run.channel)

    def measure(self, run: Run, state: State) -> Measured:
        if run.settings.runs > 1:
            return _measured_replicates(run, state)
        problem, algorithm, panel = run.problem, run.algorithm, run.panel
        metrics, model = run.settings.further_metrics, algorithm.shared(state)
        shared = None if model is None else evaluate_shared(panel.problem, model, metrics)
        personal = shared if _is_everyones(run, model, state) else None
        personal = personal or evaluate_each(
            problem, lambda own: algorithm.personalize(problem, state, own), panel.clients, metrics
        )
        if type(algorithm).objective is not Algorithm.objective:
            state = State(state.public, problem.gathered(state.private))

        def row() -> dict[str, Any]:
            values: dict[str, Any] = {"epsilon": run.channel.epsilon} | numbers_of(panel.problem, personal)
            objective = algorithm.objective(problem, state)
            values |= {} if objective is None else {"objective": float(objective)}
            if shared is not None:
                values |= summarize(panel.problem, shared, "global_")
            return values

        return Measured([problem.ranks.share(row)], personal, shared)

    def models(self, run: Run, state: State) -> tuple[Tensor, dict[str, Tensor]]:
        problem, algorithm, clients = run.problem, run.algorithm, run.panel.clients
        if _is_everyones(run, algorithm.shared(state), state):
            personal = algorithm.personalize(problem, state, clients)
        else:
            personal = problem.spread(lambda own: algorithm.personalize(problem, state, own), clients)
        if run.panel.drawn or type(algorithm).parts is Algorithm.parts:
            return personal, {}
        whole = State(state.public, problem.gathered(state.private))
        return personal, algorithm.parts(problem, whole, personal)

    def report(self, run: Run, report: PrivacyReport) -> PrivacyReport:
        return report


def _is_everyones(run: Run, model: Tensor | None, state: State) -> bool:
    """Return whether the personal models are the shared one, as a view of it, so that it is scored once."""
    if model is None or state.private.fields:
        return False
    rows = run.algorithm.personalize(run.problem, state, run.panel.clients[:2])
    return (len(rows) == 1 or rows.stride(0) == 0) and torch.equal(rows[0], model.to(rows))


def _measured_replicates(run: Run, state: State) -> Measured:
    """Evaluate all replicates: a row for each budget."""
    settings, problem, algorithm = run.settings, run.problem, run.algorithm
    groups = settings.budgets
    each = evaluate_models(problem, algorithm.models(problem, state), settings.further_metrics)
    objective = algorithm.objective(problem, state)
    columns = columns_of(problem, each) | ({} if objective is None else {"objective": objective})
    spent = np.broadcast_to(run.channel.epsilons, settings.runs)  # of each run, the largest of its owners
    rows = [
        {"budget": row.pop("budget"), "epsilon": float(spent[members].max())} | row
        for row, (_, members) in zip(bands(columns, groups), groups, strict=True)
    ]
    return Measured(rows, each[0], None, each_run(columns, groups))
