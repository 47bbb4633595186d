"""The base class of methods for linear models, with public bounds on records."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, ClassVar, Literal, Self

from ..._check import Positive
from ...data.transforms import RowBound
from ...errors import ConfigError
from ..base import Algorithm, Problem
from .data import (
    TWO_CLASS_LOSSES,
    LinearData,
    LinearLoss,
    check_classes,
    loss_of,
    prepared,
    probe_linear,
)

if TYPE_CHECKING:
    from ...data import Domain, FederatedDataset

LARGEST_TARGET = 2.0**40
"""The default bound on the targets of the squared loss: within it nothing overflows."""


@dataclass(frozen=True, kw_only=True)
class LinearAlgorithm(Algorithm):
    """A method for linear models with public bounds on records.

    Args:
        feature_norm: bound on the norm of a record's features; ``"auto"``: the one that the data
            state; None: no bound.
        target: bound on abs(y) of the squared loss; ``"auto"`` and None likewise.

    Attributes:
        norm: of the features, ``"l2"`` or ``"l1"``.
        needs_row_bound: True if privacy needs a bound on rows, because the step sizes rest on one.
    """

    feature_norm: Positive | Literal["auto"] | None = "auto"
    target: Positive | Literal["auto"] | None = "auto"

    on_host = True
    norm: ClassVar[Literal["l1", "l2"]] = "l2"
    needs_row_bound: ClassVar[bool] = True

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.target not in (None, "auto") and self.loss in TWO_CLASS_LOSSES:
            raise ConfigError(
                f"{type(self).__name__}.target is {self.target}, which bounds targets of the "
                f"squared loss, and loss is {self.loss!r}; leave it out."
            )

    def check_data(self, data: FederatedDataset) -> None:
        """Refuses more than two classes."""
        check_classes(data, self.name)

    @property
    def linear_loss(self) -> LinearLoss:
        """Returns the loss of a record."""
        return loss_of(self.loss)  # type: ignore[arg-type]

    def resolve_auto(self, problem: Problem, schedule: Any, privacy: Sequence[Any]) -> Self:
        """Fills in the ``"auto"`` bounds by those that the data state: numbers or None.

        Without privacy and without a stated bound, rows stay as they are.

        Raises:
            ConfigError: no bound on rows, with privacy.
        """
        rows, target = self.bounds(problem.data.domain)
        # None among the settings of several runs is one without privacy
        private = any(settings is not None for settings in privacy)
        if rows is None and self.needs_row_bound and private:
            given = f"{type(self).__name__}.feature_norm is {self.feature_norm!r}"
            if self.feature_norm == "auto":
                given += ", and the data state no public bounds on their records"
            raise ConfigError(
                f"{given}; with privacy the step sizes rest on a public bound on rows. Give a "
                "number, as algorithm.feature_norm=1.0 (features of larger norm are scaled down to "
                "it), or 'auto' and bounds that the data state: "
                "dataclasses.replace(data, domain=Domain(l1=..., l2=..., target=...))."
            )
        feature_norm = None
        if rows is not None:
            feature_norm = rows.bound
        largest = None
        if target < math.inf:
            largest = target
        return replace(self, feature_norm=feature_norm, target=largest)

    def bounds(self, domain: Domain | None) -> tuple[RowBound | None, float]:
        """Returns the bounds on records.

        Args:
            domain: the bounds that the data state, which ``"auto"`` takes; None for none.

        Returns:
            The bound on features, None for none; and the bound on abs(y) of the squared loss,
            infinite for none.
        """
        # without a public statement about the records nothing bounds them
        stated_norm = math.inf
        stated_target = math.inf
        if domain is not None:
            stated_norm = getattr(domain, self.norm)
            stated_target = domain.target
        norm = _bound(self.feature_norm, stated_norm)
        target = math.inf
        if self.loss not in TWO_CLASS_LOSSES:
            target = _bound(self.target, stated_target)
        if norm == math.inf:
            return None, target
        return RowBound(norm, self.norm), target

    def row_bound(self, problem: Problem) -> RowBound | None:
        """Returns the bound on features, in training and in use of the models; None for none."""
        return self.bounds(problem.data.domain)[0]

    def data(self, problem: Problem) -> LinearData:
        """Returns the training records within the bounds; made once for data and model.

        Args:
            problem: of the run.

        Raises:
            ModelError: the model is not linear.
            DataError: targets that do not suit the loss.
        """
        domain = problem.data.domain
        key = ("records", self.linear_loss, self.bounds(domain))
        return prepared(problem, key, lambda: self.bounded(LinearData.of(problem), domain))

    def bounded(self, records: LinearData, domain: Domain | None = None) -> LinearData:
        """Returns records within the bounds, of which ``"auto"`` are those of ``domain``.

        Args:
            records: of all clients.
            domain: the bounds that the data state; None for none.

        Raises:
            DataError: targets that do not suit the loss.
        """
        self.linear_loss.check_targets(records.y, records.name)
        rows, target = self.bounds(domain)
        return records.bounded(rows, min(target, LARGEST_TARGET))

    def largest_row(self, problem: Problem) -> float:
        """Returns B, the bound on the L2 norm of a whole row, with the 1 of a bias.

        Without ``feature_norm`` it is the largest norm of the training records; only runs without
        privacy get there.

        Args:
            problem: of the run.
        """
        shape = problem.data.spec.shape
        bias = prepared(problem, "bias", lambda: int(probe_linear(problem.module, shape)))
        bound = self.row_bound(problem)
        # B^2 = ||x||^2 + 1 with the last 1 of a bias
        if bound is None:
            data = self.data(problem)
            rows, _ = data.pooled()
            features = rows[:, : data.dimension - bias]
            largest = max(float(features.norm(dim=1).max()), 1e-12)
        else:
            largest = bound.bound
        return math.sqrt(largest**2 + bias)


def _bound(setting: float | str | None, stated: float) -> float:
    """Returns the bound of a setting: a number, ``"auto"`` for ``stated``, None for infinity."""
    if setting == "auto":
        return stated
    if setting is None:
        return math.inf
    return float(setting)
