"""Federated SGD of a linear model in units that are learned: first rounds count the records in
public bins of every column, and the others descend on features and targets in the ranges that these
counts show.

A step of gradient descent follows the units of the columns, and the noise of a release is in units
of the target's range: a range that is ten times too wide makes slopes ten times as far away, and
the noise ten times as loud. The values of a column show its range, and no public fact does.

In a round of counts the vector of a record has one 1 for each of the d features and the target, in
the bin of its value; the clip gives it the length C, so that each count has 1 / sqrt(d + 1) of it.
In other rounds the vector is the gradient of the record. Both are clipped and added up by client in
the same way, and a record moves the release by C at most in every round, whichever it is. So counts
cost as much as any other round. From the released sums server and clients compute the units
(:mod:`.units`), and nothing else of the counts is used.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Self

import numpy as np
import torch
from torch import Tensor

from .._check import Count
from ..algorithms import FedSGD
from ..algorithms.base import Problem, Public, State
from ..algorithms.client_batch import ClientBatch, ClientStates
from ..algorithms.fedsgd import GRADIENT_SUM
from ..algorithms.linear.data import Array, check_linear, records_of
from ..algorithms.noise_level import RECORDS_SHARE
from ..algorithms.rounds import Released
from ..errors import ConfigError, PrivacyError
from ..local.losses import half_mse, mse
from ..privacy import BoundSampler, GradientPlan, RecordPrivacy, ReleasePlan
from ..privacy.sums import clipped_segment_sums
from .units import BINS, Units, places

_FAR = 1e6  # of an entry of a vector of counts before the clip, above any clip norm
_TENTH = 10  # of the rounds, one in so many counts
_LOUDEST = 0.05  # standard deviation of the noise of a count, as a share of the records
_NUMBERS = 1 << 24  # of the vectors of records that are in memory at a time, 128 MiB


@dataclass(frozen=True, kw_only=True)
class RangedSGD(FedSGD):
    """Federated SGD of a linear model of a real target in learned units of the columns.

    Args:
        range_rounds: number of first rounds that count records; less than the rounds.
        records, server_lr, local, averaged, server_optimizer: see :class:`~fedmtl.FedSGD`.

    Example:
        >>> from fedmtl import FullParticipation, RangedSGD, RecordPrivacy, SecureAggregation
        >>> from fedmtl import Trainer, load_data, models
        >>> trainer = Trainer(
        ...     algorithm=RangedSGD(range_rounds=1),
        ...     data=load_data("synthetic_tasks", tasks=4, problem="regression"),
        ...     model=models.linear_regression(),
        ...     schedule=FullParticipation(),
        ...     privacy=RecordPrivacy(
        ...         clip_norm=1.0, epsilon=8.0, aggregation=SecureAggregation(colluding=1)
        ...     ),
        ...     rounds=3,
        ...     progress=False,
        ... )
        >>> trainer.fit().personal.shape
        torch.Size([4, 29])
    """

    rate: ClassVar[float] = 1.0  # type: ignore[misc]  # all records are counted
    range_rounds: Count = 6

    name = "ranged_sgd"
    title = "FedSGD in learned ranges"
    colour = "#4b6a2f"
    baseline = False

    def resolve_auto(self, problem: Problem, schedule: Any, privacy: Sequence[Any]) -> Self:
        """Refuses noise of each client's own, and the protection of whole clients.

        Raises:
            ConfigError: names the setting.
        """
        for settings in privacy:
            summed = isinstance(settings, RecordPrivacy) and settings.aggregation is not None
            if settings is None or summed:
                continue
            raise ConfigError(
                f"{type(self).__name__} counts single records in a secure sum: set "
                "privacy=secure_records, in Python RecordPrivacy(aggregation=SecureAggregation()), "
                "or take fedsgd for noise of each client's own, or fedavg for whole clients."
            )
        return super().resolve_auto(problem, schedule, privacy)

    def plan(self, problem: Problem, schedule: BoundSampler) -> tuple[ReleasePlan, ...]:
        """Declares the sum of the vectors of all records, (D + BINS (d + 1),).

        Raises:
            ConfigError: a model without a bias, another loss than the squared error, or no
                round after those of counts.
        """
        name = type(self).__name__
        if problem.loss not in (mse, half_mse) or not check_linear(problem):
            raise ConfigError(
                f"{name} learns the ranges of features and of a real target, for a linear model "
                "with a bias and the squared error; take FedSGD for others."
            )
        if self.range_rounds >= problem.rounds:
            raise ConfigError(
                f"{name}.range_rounds is {self.range_rounds}, and the run has {problem.rounds} "
                "rounds: there must be one after those of counts."
            )
        (gradients,) = super().plan(problem, schedule)
        model = problem.dimension
        return (replace(gradients, dimension=_length(problem), model=model),)

    def gradient_plan(self, problem: Problem, trainings: int) -> GradientPlan:
        """Returns the plan of the vectors of single records, all of them in every round."""
        plan = super().gradient_plan(problem, trainings)
        return replace(plan, dimension=_length(problem))

    def init(self, problem: Problem, replicates: int = 1) -> State:
        """Adds the released shares of the records ``"shares"`` (d + 1, BINS), and the units
        ``"units"`` (2, d + 1) by them."""
        state = super().init(problem, replicates)
        columns = problem.dimension
        state.public["shares"] = torch.zeros(columns, BINS, dtype=torch.float64)
        state.public["units"] = torch.zeros(2, columns, dtype=torch.float64)
        state.public["units"][1] = 1.0
        return state

    def client_update(self, c: ClientBatch) -> tuple[Mapping[str, Tensor], ClientStates]:
        """Sends the sums of the vectors of each client's records, (k, D + BINS (d + 1))."""
        return {GRADIENT_SUM: _sums(c, self._vectors(c))}, c.states

    def _vectors(self, c: ClientBatch) -> Iterator[tuple[Tensor, Tensor]]:
        """Yields vectors of records (n, D + BINS (d + 1)), and the places of their clients (n,)."""
        length = _length(c.problem)
        at_once = max(1, _NUMBERS // length)
        # of clients without records there is an empty chunk all the same
        yield torch.zeros(0, length, dtype=torch.float64), torch.zeros(0, dtype=torch.int64)
        for place, client in enumerate(c.clients.tolist()):
            x, y = records_of(c.problem, client)
            for first in range(0, len(y), at_once):
                part = slice(first, first + at_once)
                # a record that is not finite has a vector that is not, and counts as zero
                with np.errstate(all="ignore"):
                    rows = self._rows(c, x[part], y[part])
                yield torch.from_numpy(rows), torch.full((len(rows),), place)

    def _rows(self, c: ClientBatch, x: Array, y: Array) -> Array:
        """Returns the vectors of some records of a client, (n, D + BINS (d + 1))."""
        size = c.problem.dimension
        rows = np.zeros((len(y), _length(c.problem)))
        if c.round < self.range_rounds:
            values = np.append(x, y[:, None], 1)
            columns = size + np.arange(size) * BINS + places(np.nan_to_num(values))
            np.put_along_axis(rows, columns, _FAR, 1)
            rows[~np.isfinite(values).all(1)] = np.nan
            return rows
        units = Units.of(c.public["units"].double().cpu().numpy())
        model = units.inside(c.shared.double().cpu().numpy())
        x, y = units.records(x, y)
        errors = x @ model[:-1] + model[-1] - y
        if c.problem.loss is mse:
            errors = 2 * errors
        rows[:, : size - 1] = errors[:, None] * x
        rows[:, size - 1] = errors
        return rows

    def server_update(
        self, problem: Problem, public: Public, released: Released
    ) -> dict[str, Tensor]:
        """Learns the units, and then moves the shared model in them, see
        :meth:`FedSGD.server_update`."""
        value = released.values[GRADIENT_SUM]
        size = problem.dimension
        if released.step < self.range_rounds:
            return self._counted(problem, public, released, value[size:])
        units = Units.of(public["units"].double().cpu().numpy())
        names = [name for name in ("global", "mean") if name in public]
        inside = {name: _in_units(public[name], units.inside) for name in names}
        gradient = replace(released, values={GRADIENT_SUM: value[:size]})
        moved = super().server_update(problem, {**public, **inside}, gradient)
        return {**moved, **{name: _in_units(moved[name], units.declared) for name in names}}

    def _counted(
        self, problem: Problem, public: Public, released: Released, sums: Tensor
    ) -> dict[str, Tensor]:
        """Returns the public state after a round of counts, whose model predicts the middle of the
        target's range.

        Args:
            problem: see :meth:`server_update`.
            public: see :meth:`server_update`.
            released: see :meth:`server_update`.
            sums: released counts, over m, (BINS (d + 1),).
        """
        columns = problem.dimension
        # the clip has given the vector of a record, of equal entries, this length
        bound = released.bounds.get(GRADIENT_SUM, math.inf)
        entry = min(bound / math.sqrt(columns), _FAR)
        records = self.gradient_plan(problem, 1).records
        shares = sums.cpu().double().reshape(columns, BINS) * problem.clients / (records * entry)
        before = public["shares"]
        shares = before + (shares.to(before) - before) / (released.step + 1)
        units = Units.by_shares(shares.cpu().numpy())
        start = torch.from_numpy(units.declared(np.zeros(columns)))
        moved = {**public, "shares": shares}
        moved["units"] = torch.from_numpy(np.stack([units.middle, units.half])).to(before)
        for name in ("global", "mean"):
            if name in public:
                moved[name] = start.to(public[name])
        return moved


def range_rounds(useful: bool, noise: float, rounds: int) -> int:
    """Returns the number of first rounds of records in a secure sum that count for the ranges of
    the columns: a tenth, or 0 if the noise would drown the counts.

    A record is one vector in a round, of a count for each of the p columns, so that a count has the
    noise sigma sqrt(T p) of N records, over the root of the rounds that count. Without the root nu
    has it as nu .07.

    Args:
        useful: False without a secure sum, or for a target of classes.
        noise: nu.
        rounds: T.
    """
    counted = rounds // _TENTH
    if not useful or not counted:
        return 0
    if noise * RECORDS_SHARE / math.sqrt(counted) > _LOUDEST:
        return 0
    return counted


def _sums(c: ClientBatch, chunks: Iterator[tuple[Tensor, Tensor]]) -> Tensor:
    """Returns the sums of vectors of records by client, (k, D), as
    :meth:`ClientBatch.gradient_sums` returns those of gradients: clipped if single records are
    protected.

    Args:
        c: the clients.
        chunks: pairs of vectors (N, D) and places of their clients, int64 (N,); at least one.

    Raises:
        PrivacyError: single records are protected, and the round has charged no local steps.
    """
    if not c.problem.protects_records:
        total = None
        for vectors, place in chunks:
            total = clipped_segment_sums(vectors, place, len(c.clients), None, total)
        assert total is not None
        return total
    steps = c.charged_steps
    if steps is None:
        raise PrivacyError(
            "Single records are protected, and the ledger has charged no local steps of these "
            "clients: their vectors are added up in RangedSGD.client_update, by its ClientBatch."
        )
    return steps.grid_sums(c.clients, chunks)


def _length(problem: Problem) -> int:
    """Returns the length of the vector of a record: D of its gradient, and a bin of each column."""
    return problem.dimension * (1 + BINS)


def _in_units(model: Tensor, change: Callable[[Array], Array]) -> Tensor:
    """Returns a model (D,) in other units, by :meth:`Units.inside` or :meth:`Units.declared`."""
    return torch.from_numpy(change(model.double().cpu().numpy())).to(model)
