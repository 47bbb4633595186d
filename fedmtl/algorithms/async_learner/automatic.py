"""Settings that are chosen from what is public: the public rows of the data, and the bounds of their domain."""

from __future__ import annotations

import logging
import math
from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, TypeVar

from ..._check import positive
from ...data import Domain, FederatedDataset
from ...errors import ConfigError
from ...privacy import RecordPrivacy
from ...random import derive_key
from ...schedules import BoundSchedule
from ..linear.data import DomainBound, LinearData, probe_linear
from .collaboration import choose_kappa

if TYPE_CHECKING:
    from ...privacy.owner_opening import Privacies
    from ..base import Problem
    from .algorithm import AsyncLearner

logger = logging.getLogger("fedmtl")
_TRIALS = 20


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


def resolve_learner(
    learner: AsyncLearner, problem: Problem, schedule: BoundSchedule, privacy: Privacies
) -> AsyncLearner:
    """``domain`` from the data's bounds, ``kappa`` by noisy simulation on the public rows, once for each budget.

    The simulation has owners of the true sizes whose records are drawn from the public rows, the true caps and
    budgets, and 20 schedules and noises of its own. Only public things enter, so the choice costs no privacy.
    """
    data = problem.data
    if learner.domain == "auto":
        stated = stated_domain(data, "AsyncLearner.domain")
        room = stated.l1 + probe_linear(problem.module, data.spec.shape)
        target = stated.target if data.classes is None else 1.0
        learner = replace(learner, domain=DomainBound(x_l1=room, y=target))
    if learner.kappa != "auto":
        return learner
    if data.public is None:
        raise ConfigError(
            f"AsyncLearner.kappa is 'auto', but {data.name} has no public rows to choose it with; give a number."
        )
    events = min(problem.rounds, schedule.steps)
    seed = derive_key(problem.seed, "kappa") >> 1
    clients = schedule.events(seed, 0, events, replicates=_TRIALS).client
    rows = LinearData.of_examples(problem, data.public)
    each = list(privacy) if isinstance(privacy, Sequence) else [privacy]
    found: list[tuple[RecordPrivacy | None, float]] = []
    kappas: tuple[float, ...] = ()
    for settings in each:
        known = [kappa for other, kappa in found if other == settings]  # budgets by name have no hash
        if not known:
            chosen = choose_kappa(
                replace(learner, kappa=1.0),
                rows,
                counts=data.train.counts.tolist(),
                privacy=None if settings is None else replace(settings, source="seeded"),  # the rows are public
                clients=clients,
                ids=tuple(data.ids),
                caps=schedule.caps.clip(max=events),
                seed=seed,
            )
            found.append((settings, chosen.kappa))
            known = [chosen.kappa]
            of = "" if settings is None or settings.epsilon is None else f" for epsilon {settings.epsilon}"
            logger.info("kappa = %g%s, by simulation on %d public rows", chosen.kappa, of, len(data.public))
        kappas += (known[0],)
    return replace(learner, kappa=kappas if len(set(kappas)) > 1 else kappas[0])
