"""Repetitions of a run, at one or several epsilons, as one batched program, and their summary statistics.

Replicate ``m = e R + r`` of R repetitions at E epsilons is a run of its own: repetition r at the e-th epsilon, with
its own schedule and its own noise, both drawn from (seed, m). The data, their split into training and test examples
and the public starting point are those of the seed, common to all: another split is another run (``fedmtl -m
seed=1,2,3``), because owners' counts, caps and noise scales then differ.
"""

from __future__ import annotations

import numbers
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from .. import algorithms
from .._check import positive_int
from .._rounding import rounded_up
from ..algorithms.base import Algorithm, Problem
from ..errors import ConfigError
from ..privacy import Privacy
from .evaluation import Metrics, evaluate_common, evaluate_each, summarize
from .metrics import Metric, kind_of, normalized
from .problem import describe

PERCENTILES = (5, 25, 50, 75, 95)
OUTSIDE = (
    "the {count} runs behind a band: an epsilon covers one run, and figures of several show more (what is said here of "
    "epsilon, budget and noise is the largest of any run)"
)


@dataclass(frozen=True)
class Replicates:
    """R repetitions at each of E epsilons.

    Args:
        repetitions: R, at least 1.
        epsilons: E different budgets, each in place of the ``epsilon`` of the privacy settings (infinite: clip
            without noise); ``None`` keeps that one, and E = 1.

    Raises:
        ConfigError: an impossible value.
    """

    repetitions: int = 1
    epsilons: tuple[float, ...] | None = None

    def __post_init__(self) -> None:
        positive_int("Trainer", replicates=self.repetitions)
        epsilons = self.epsilons
        if epsilons is None:
            return
        if isinstance(epsilons, str) or not isinstance(epsilons, Sequence) or not epsilons:
            raise ConfigError(
                f"Trainer.epsilons is {epsilons!r}; it must be a list of budgets such as [1, 3, 10], or None."
            )
        for value in epsilons:
            if isinstance(value, bool) or not isinstance(value, numbers.Real) or not value > 0:
                raise ConfigError(f"Trainer.epsilons has {value!r}; every budget must be a number above 0.")
        if len(set(epsilons)) < len(epsilons):
            raise ConfigError(f"Trainer.epsilons is {list(epsilons)!r}; the budgets must differ.")
        object.__setattr__(self, "epsilons", tuple(float(value) for value in epsilons))

    @property
    def count(self) -> int:
        """M = E R, the number of runs."""
        return self.repetitions * len(self.epsilons or (0,))

    def check(self, algorithm: Algorithm, privacy: Privacy | None, **single: Any) -> None:
        """Refuse settings that cannot have these replicates.

        Args:
            algorithm, privacy: of the run.
            single: settings by name that several runs as one program cannot have; None or empty where the run has none.

        Raises:
            ConfigError: an algorithm that cannot compute several runs as one program, noise that is not simulated,
                privacy without one budget to set, or a setting of a single run.
        """
        if self.epsilons is not None:
            listed = ", ".join(rounded_up(value, 6) for value in self.epsilons)
            if privacy is None:
                raise ConfigError(
                    f"epsilons is [{listed}], but without privacy there is no budget to set; leave it out."
                )
            if privacy.noise_multiplier is not None:
                raise ConfigError(
                    f"epsilons is [{listed}], but privacy.noise_multiplier says how much noise there is; leave out one."
                )
            if isinstance(privacy.epsilon, Mapping):
                raise ConfigError(f"epsilons is [{listed}], but privacy.epsilon has budgets by client; leave out one.")
        if self.count == 1:
            return
        if not algorithm.supports_replicates:
            methods = [getattr(algorithms, name) for name in algorithms.__all__]
            able = ", ".join(method.name for method in methods if getattr(method, "supports_replicates", False))
            raise ConfigError(
                f"replicates: {algorithm.name} cannot compute {self.count} runs as one program; accepted: {able}. "
                "Others are swept: fedmtl -m seed=1,2,3."
            )
        if privacy is not None and privacy.source != "seeded":
            raise ConfigError(
                f"replicates: {self.count} runs on the same records are a simulation, and cost {self.count} times the "
                "epsilon of one; they need privacy.source='seeded'."
            )
        for name, value in single.items():
            if value not in (None, []):
                raise ConfigError(f"replicates: {name} is {value!r}; {self.count} runs as one program have none.")

    def privacies(self, privacy: Privacy | None) -> Any:
        """The settings of the only run, or a tuple of those of all M; None without privacy."""
        if privacy is None or self.epsilons is None:
            return privacy
        each = [replace(privacy, epsilon=epsilon) for epsilon in self.epsilons]
        if self.count == 1:
            return each[0]
        return tuple(each[number // self.repetitions] for number in range(self.count))

    def groups(self, privacy: Privacy | None) -> list[tuple[float | None, slice]]:
        """Each budget with the replicates that have it; None without one, the largest of several owners'."""
        if self.epsilons is None:
            epsilon = None if privacy is None else privacy.epsilon
            budget = max(epsilon.values()) if isinstance(epsilon, Mapping) else epsilon
            return [(budget, slice(0, self.repetitions))]
        size = self.repetitions
        return [(epsilon, slice(e * size, (e + 1) * size)) for e, epsilon in enumerate(self.epsilons)]


def numbers_of(problem: Problem, metrics: Metrics) -> dict[str, float]:
    """What a row of the history says of the scores of all clients, (n,) each."""
    return {name: float(column[0]) for name, column in columns_of(problem, [metrics]).items()}


def columns_of(problem: Problem, each: Sequence[Metrics]) -> dict[str, Tensor]:
    """As :func:`numbers_of` for M runs: float64 (M,) by name."""
    tested = problem.data.test.counts > 0
    rows = [{"loss": float(run.loss[tested].mean())} | summarize(problem, run) for run in each]
    columns = {name: torch.tensor([row[name] for row in rows], dtype=torch.float64) for name in rows[0]}
    if kind_of(problem.data.spec) == "number":
        part = problem.data.test
        tasks, pooled = normalized(torch.stack([run.score for run in each]), part.y.cpu(), part.offsets)
        columns |= {"nmse": tasks.nanmean(-1), "pooled_nmse": pooled}
    return columns


def evaluate_models(problem: Problem, models: Tensor, metrics: Sequence[Metric] = ()) -> list[Metrics]:
    """Return the test scores of M models of every client, (M, n, D); expanded along the clients where they have the
    same model."""
    clients = torch.arange(problem.clients)
    common = len(clients) > 1 and models.stride(1) == 0
    if not common and len(models) <= len(clients):  # the fewer calls
        return [evaluate_each(problem, own.__getitem__, clients, metrics) for own in models]
    groups = [clients] if common else clients.split(1)
    tables = torch.cat([evaluate_common(problem, models[:, own[0]], own, metrics) for own in groups], 1)
    return [Metrics.of(table, metrics) for table in tables]


def bands(columns: Mapping[str, Tensor], groups: Sequence[tuple[float | None, slice]]) -> list[dict[str, Any]]:
    """One mapping for each budget: the mean of every number under its name, its percentiles under NAME_p5, ...

    Args:
        columns: float64 (M,) by name.
        groups: budgets with their replicates.
    """
    rows = []
    for budget, members in groups:
        row: dict[str, Any] = {"budget": budget}
        for name, values in columns.items():
            row[name] = float(values[members].mean())
            if len(values[members]) > 1:
                share = torch.tensor(PERCENTILES, dtype=torch.float64) / 100
                marks = values[members].quantile(share).tolist()
                row |= {f"{name}_p{mark}": value for mark, value in zip(PERCENTILES, marks, strict=True)}
        rows.append(row)
    return rows


def each_run(columns: Mapping[str, Tensor], groups: Sequence[tuple[float | None, slice]]) -> list[dict[str, Any]]:
    """One mapping for each run: its budget, its number among those of the budget, and every number."""
    rows = []
    for budget, members in groups:
        for repetition, place in enumerate(range(members.start, members.stop)):
            row: dict[str, Any] = {"budget": budget, "repetition": repetition}
            rows.append(row | {name: float(values[place]) for name, values in columns.items()})
    return rows


def chosen(asked: Algorithm, resolved: Algorithm, replicates: Replicates) -> dict[str, Any]:
    """The settings of ``resolved`` that were ``"auto"`` in ``asked`` and were filled in; one value for each budget
    where the replicates have values of their own."""
    settings = {}
    for name, value in vars(asked).items():
        new = getattr(resolved, name, value)
        if value == "auto" and new is not None and not isinstance(new, str):
            several = isinstance(new, tuple) and len(new) == replicates.count
            settings[name] = describe(list(new[:: replicates.repetitions]) if several else new)
    return settings
