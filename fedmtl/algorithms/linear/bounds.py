"""Public bounds on the records of linear problems: where they come from, and how they are enforced."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, TypeVar

import torch

from ..._check import positive
from ...data import Domain, FederatedDataset, RowBound
from ...errors import ConfigError
from .data import LinearData, LinearLoss, prepared

if TYPE_CHECKING:
    from ...privacy.owner_opening import Privacies
    from ..base import Problem

LARGEST_TARGET = 2.0**40
"""Bound on targets where no smaller one is stated."""


def bounded_rows(problem: Problem, loss: LinearLoss, row_norm: float | None, target: float | None = None) -> LinearData:
    """The training records of every task within public bounds, enforced record by record and never fitted.

    Features are scaled down to ``||x||_2 <= row_norm``, and a bias's 1 stays; targets of the squared loss are cut off
    at abs(y) <= ``target``. A record that is not finite becomes zero features and target. Made once for each pair of
    data and model.

    Args:
        problem: the data and the model.
        loss: of the records.
        row_norm: None leaves finite features as they are.
        target: None for 2^40, within which nothing overflows.

    Raises:
        DataError: targets that do not suit the loss.
    """

    def build() -> LinearData:
        data = LinearData.of(problem)
        loss.check_targets(data.y, data.name)
        limit, width = (
            LARGEST_TARGET if target is None else min(target, LARGEST_TARGET),
            data.dimension - int(data.bias),
        )
        x, y = data.pooled()
        features = x[:, :width]
        valid = torch.isfinite(torch.linalg.vector_norm(features, dim=1)) & torch.isfinite(y)
        features = torch.where(valid[:, None], features if row_norm is None else RowBound(row_norm)(features), 0.0)
        y = torch.where(valid, y.clamp(-limit, limit) if loss.name == "squared" else y, 0.0)
        counts = data.counts.tolist()
        return LinearData(
            torch.cat([features, x[:, width:]], dim=1).split(counts), y.split(counts), data.bias, data.name
        )

    return prepared(problem, ("bounded", loss.name, row_norm, target), build)


def largest_row(problem: Problem, loss: LinearLoss, row_norm: float | None) -> float:
    """B, the bound on the norm of a record's features; without one the largest norm of the training records, which is
    for runs without privacy."""
    if row_norm is not None:
        return row_norm
    x, _ = (data := bounded_rows(problem, loss, None)).pooled()
    return max(float(x[:, : data.dimension - int(data.bias)].norm(dim=1).max()), 1e-12)


def stated_domain(data: FederatedDataset, what: str) -> Domain:
    """The bounds that the data state.

    Raises:
        ConfigError: they state none; ``what`` names the setting that needs them.
    """
    if data.domain is None:
        raise ConfigError(f"{what} is 'auto', but {data.name} states no public bounds on its records; give a number.")
    return data.domain


Settings = TypeVar("Settings")


def check_bounds(settings: Any) -> None:
    """Raise ConfigError unless ``row_norm`` and ``target`` are numbers above 0, ``"auto"`` or None."""
    for name in ("row_norm", "target"):
        value = getattr(settings, name)
        if value is not None and value != "auto":
            positive(settings, **{name: value})


def bound_of(settings: Any, problem: Problem) -> float | None:
    """The bound ``row_norm`` on the L2 norm of features, also where it is ``"auto"``; None for none.

    Raises:
        ConfigError: ``"auto"``, and the data state no bound.
    """
    if settings.row_norm != "auto":
        return None if settings.row_norm is None else float(settings.row_norm)
    domain = problem.data.domain
    if domain is None or not math.isfinite(domain.l2):
        raise ConfigError(
            f"{type(settings).__name__}.row_norm is 'auto', but {problem.data.name} states no public bounds on its "
            f"records, and with privacy the step sizes rest on one. Give a number, as algorithm.row_norm=1.0 (features "
            f"of larger L2 norm are scaled down to it), or state bounds with the data: dataclasses.replace(data, "
            f"domain=Domain(l1=..., l2=..., target=...))."
        )
    return domain.l2


def target_of(settings: Any, problem: Problem) -> float | None:
    """The bound ``target`` on targets, also where it is ``"auto"``; None for none."""
    if settings.target != "auto":
        return None if settings.target is None else float(settings.target)
    domain = problem.data.domain
    return domain.target if domain is not None and math.isfinite(domain.target) else None


def resolve_bounds(settings: Settings, problem: Problem, privacy: Privacies) -> Settings:
    """Settings whose ``row_norm`` and ``target`` are numbers or None.

    Without privacy and without a stated bound, rows stay as they are.

    Raises:
        ConfigError: no bound on rows, with privacy.
    """
    several = isinstance(privacy, Sequence)
    private = any(one is not None for one in privacy) if several else privacy is not None  # type: ignore[union-attr]
    asked: Any = settings
    if private and asked.row_norm is None:
        raise ConfigError(
            f"{type(settings).__name__}.row_norm is None, and with privacy the step sizes rest on a public bound on "
            f"rows; give a number, as algorithm.row_norm=1.0, or 'auto' for the bound that the data state."
        )
    stated = problem.data.domain is not None and math.isfinite(problem.data.domain.l2)
    row_norm = bound_of(settings, problem) if private or stated or asked.row_norm != "auto" else None
    resolved: Settings = replace(asked, row_norm=row_norm, target=target_of(settings, problem))
    return resolved
