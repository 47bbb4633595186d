"""Finetuning: local training of every client after the run, of which nothing is sent.

The four objectives of Hu, Wu, Smith: "Private Multi-Task Learning", TMLR 2023 (section 5.3 and
Table 1), from a model w0, for client k with the mean loss l_k of its own records:

    vanilla    l_k(w)
    mean       l_k(w) + (lam / 2) ||w - w0||^2
    kl         l_k(w) + lam * mean_i [ KL(p_w || p_w0) + KL(p_w0 || p_w) ](x_i)
    ewc        l_k(w) + (lam / 2) sum_j F_kj (w_j - w0_j)^2,   F_kj = mean_i (d l_i(w0) / d w_j)^2

The last is elastic weight consolidation (Kirkpatrick et al., PNAS 2017), with the empirical Fisher
information of the client's own records.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar, Literal, Self

import torch
from torch import Tensor

from .._check import Below1, Checked, NonNegative
from ..errors import ConfigError
from ..local import LocalSGD, LocalSolver
from ..local.losses import divergence_of
from .base import Algorithm, Problem, Public
from .client_batch import ClientBatch
from .own_gradients import FINETUNE_ROUND, fisher_diagonals
from .returned import checked_models, unchanged

Kind = Literal["vanilla", "mean", "kl", "ewc", "auto"]
Start = Literal["auto", "shared", "personal"]
PERSONALIZATIONS: dict[str, type[Personalization]] = {}
"""The settings of personalization that a name stands for; their classes register themselves."""


class Personalization(Checked, ABC):
    """The last step of every client after the run, from its own training records.

    Nothing of it is sent. A class with a ``name`` is registered under it when it is defined, and a
    trainer then takes ``finetune=NAME``.

    Attributes:
        name: of the class with its defaults; empty for one that is given as an object only.
        kind: its name in reports.
        votes_help: True if automatic settings end with rounds of votes on its use.
        of_linear_numbers: True if linear models of a real target with squared errors have it
            unless another one is chosen.
        start: the model to start from, see :class:`Finetune`.
        validation: share of training records that clients keep out of the run, see
            :class:`Finetune`.
        parts: names of the models that are averaged, if any.
    """

    name: ClassVar[str] = ""
    kind: str
    start: Start = "auto"
    validation: float = 0.0
    parts: ClassVar[tuple[str, ...]] = ()
    votes_help: ClassVar[bool] = False
    of_linear_numbers: ClassVar[bool] = False

    def __init_subclass__(cls, **options: Any) -> None:
        super().__init_subclass__(**options)
        # The name of a class is its own: a subclass without one is another method.
        if name := cls.__dict__.get("name"):
            PERSONALIZATIONS[name] = cls

    @abstractmethod
    def text(self) -> str:
        """Returns the settings in words."""

    @abstractmethod
    def personalize(self, problem: Problem, start: Tensor, clients: Tensor) -> Tensor:
        """Returns the models (k, D) at the end of :meth:`train`, with the weights of the parts.

        The weights of the :attr:`parts` follow the parameters, (k, D + parts). A model that has
        diverged is not finite here.

        Args:
            problem: of the run.
            start: (D,) or (k, D), the models before.
            clients: int64 (k,).
        """

    def check(self, problem: Problem) -> None:
        """Refuses a problem without use for these settings.

        Args:
            problem: of the run.

        Raises:
            ConfigError: says the reason.
        """

    def resolved(self, noise: float) -> Self:
        """Returns these settings, adjusted to the noise of the run.

        Args:
            noise: see :func:`~fedmtl.algorithms.noise_level.noise_of`.
        """
        return self

    def informed(self, public: Public) -> Self:
        """Returns these settings with the other releases of the run; unchanged by default.

        Args:
            public: the public state after the last round.
        """
        return self

    def with_releases_of(self, run: Personalization | None) -> Self:
        """Returns these settings for new clients of a run, completed by its releases; unchanged by
        default.

        Args:
            run: the settings of that run after its last round; None if it has none.
        """
        return self

    @classmethod
    def alone(cls) -> Algorithm | None:
        """Returns the same from a client's own records alone, the baseline ``"local"`` of linear
        models; None, the default, for local training."""
        return None

    def of_new_clients(self) -> Self:
        """Returns these settings for clients that took no part in the run.

        They start from the released model and have no choice.
        """
        return self

    def origin(self, shared: Tensor | None, personal: Tensor) -> tuple[str, Tensor]:
        """Returns the name of the initial model, ``"shared"`` or ``"personal"``, and the model.

        Args:
            shared: (D,), the released model; None without one.
            personal: (k, D), the clients' own models.

        Raises:
            ConfigError: ``start="shared"``, and nothing is shared.
        """
        if shared is not None and self.start != "personal":
            return "shared", shared
        if self.start == "shared":
            without = "the algorithm has no shared model; use 'personal'"
            raise ConfigError(f"{type(self).__name__}.start is 'shared', but {without}.")
        return "personal", personal

    def train(self, problem: Problem, start: Tensor, clients: Tensor) -> Tensor:
        """Returns the final models of ``clients``.

        They depend on ``start`` and on each client's own training records. Nothing is released, so
        the records are used without noise, also under record-level privacy. A client keeps its
        start if it has no training records, or if its model is no longer finite.

        Args:
            problem: the data, the model and the loss.
            start: w0, (D,) or (k, D).
            clients: int64 (k,).

        Returns:
            (k, D).
        """
        models = self.personalized(problem, start, clients)[:, : problem.dimension]
        models, _ = settled(models, start)
        return models

    def personalized(self, problem: Problem, start: Tensor, clients: Tensor) -> Tensor:
        """Returns the models of :meth:`personalize`, checked.

        Args:
            problem: see :meth:`personalize`.
            start: see :meth:`personalize`.
            clients: see :meth:`personalize`.

        Raises:
            ConfigError: they are no tensor (k, D + parts).
            PrivacyError: ``start`` was changed in place.
        """
        function = f"{type(self).__name__}.personalize"
        with unchanged(function, {"start": start}):
            models = self.personalize(problem, start, clients)
        return checked_models(function, models, len(clients), problem.dimension + len(self.parts))


def personalization_of(value: Any) -> Any:
    """Returns the registered settings that a name stands for; other values as they are.

    Raises:
        ConfigError: a name that no class has.
    """
    if not isinstance(value, str) or value == "auto":
        return value
    if value not in PERSONALIZATIONS:
        names = ", ".join(map(repr, ("auto", *sorted(PERSONALIZATIONS))))
        raise ConfigError(
            f"finetune is {value!r}; accepted: {names}, None, or an object such as "
            "Finetune(kind='kl')."
        )
    return PERSONALIZATIONS[value]()


def usual_of_linear_numbers() -> type[Personalization] | None:
    """Returns the registered class that linear models of a real target with squared errors have
    unless another one is chosen; None without one."""
    found = (kind for kind in PERSONALIZATIONS.values() if kind.of_linear_numbers)
    return next(found, None)


@dataclass(frozen=True, kw_only=True)
class Finetune(Personalization):
    """Trains the models of all clients further after the run, each on its own examples.

    Args:
        kind: ``"vanilla"`` has no penalty; ``"mean"``, ``"kl"`` and ``"ewc"`` penalize a distance
            to the model that a client starts from, ``"kl"`` that of its predictions, for losses
            that have a name. ``"auto"`` is ``"kl"`` for classes; for real targets it is
            :class:`~fedmtl.Average`, which needs no step size, if the model is linear, and else
            ``"mean"``.
        lam: strength of the penalty; without effect for ``"vanilla"``.
        local: the local solver: step size, steps or epochs, batches. Its ``decay``, which is per
            round, is not used. ``"ewc"`` always makes proximal steps, since the strengths of its
            penalty come from the data.
        start: the model to start from: the released ``"shared"`` one, each client's ``"personal"``
            one, or ``"auto"``, which is the shared one if there is one.
        validation: 0, or a share in (0, 1) of the training records of every client that is used
            neither in the run nor in finetuning. On these records the client chooses the model of
            the least loss: the shared, its personal, its finetuned, or its local one (trained by
            ``local`` from the public starting point).

    Raises:
        ConfigError: a value outside these ranges, or ``lr * lam >= 2`` of ``"mean"`` without the
            proximal step.

    Example:
        >>> from fedmtl import FedAvg, Finetune, FullParticipation, LocalSGD, Trainer
        >>> from fedmtl import load_data, models
        >>> trainer = Trainer(
        ...     algorithm=FedAvg(local=LocalSGD(lr=0.1)),
        ...     data=load_data("digits", clients=10),
        ...     model=models.softmax_regression(),
        ...     schedule=FullParticipation(),
        ...     privacy=None,
        ...     rounds=2,
        ...     finetune=Finetune(kind="mean", lam=0.1, local=LocalSGD(lr=0.1)),
        ...     progress=False,
        ... )
        >>> result = trainer.fit()
        >>> result.finetuned.start, list(result.scores)
        ('shared', ['shared', 'personal', 'finetuned'])
    """

    kind: Kind = "mean"
    lam: NonNegative = 0.1
    local: LocalSolver = field(default_factory=lambda: LocalSGD(lr=0.1, epochs=5))
    start: Start = "auto"
    validation: Below1 = 0.0

    def __post_init__(self) -> None:
        super().__post_init__()
        # only the pull of "mean" is a term of the gradient for which a step may be too large
        pull = self.lam if self.kind == "mean" else 0.0
        LocalSolver.check_given(self, self.local, pull)

    def text(self) -> str:
        """Returns the kind and lambda, such as ``"kl, lambda 0.1"``."""
        if self.kind == "vanilla":
            return self.kind
        return f"{self.kind}, lambda {self.lam:g}"

    def check(self, problem: Problem) -> None:
        """Refuses a loss without an objective of this kind.

        Raises:
            ConfigError: ``kind="kl"`` and a loss of the caller's own.
        """
        if self.kind == "kl":
            try:
                divergence_of(problem.loss)
            except ConfigError as error:
                raise ConfigError(f"Finetune.kind is 'kl', but {error}") from None

    def of_new_clients(self) -> Self:
        """Returns the settings with a start from the shared model, and without validation."""
        return replace(self, start="auto", validation=0.0)

    def personalize(self, problem: Problem, start: Tensor, clients: Tensor) -> Tensor:
        """Trains ``start`` on each client's records, with the pull of ``kind``, (k, D)."""
        self.check(problem)
        problem = replace(problem, protects_records=False)  # nothing is sent
        models = start.expand(len(clients), -1).clone()
        # a client without records keeps its start
        able = (problem.data.train.counts[clients] > 0).nonzero()[:, 0]
        if not len(able):
            return models
        place = able.to(start.device)
        models[place] = self._train(problem, models[place], clients[able])
        return models

    def _train(self, problem: Problem, start: Tensor, clients: Tensor) -> Tensor:
        """Trains clients with records from ``start`` (k, D)."""
        c = ClientBatch(problem, clients, round=FINETUNE_ROUND)
        solver = replace(self.local, decay=1.0)
        if self.kind == "vanilla":
            return c.train(solver, start)
        if self.kind == "ewc":
            # the strength of each coordinate comes from the data: only proximal steps are stable
            strength = self.lam * fisher_diagonals(problem, start, clients)
            solver = replace(solver, proximal=True)
            return c.train(solver, start, lam=strength, anchor=start.clone())
        divergence = None
        if self.kind == "kl":
            divergence = divergence_of(problem.loss)
        return c.train(solver, start, lam=self.lam, anchor=start, divergence=divergence)


def settled(models: Tensor, start: Tensor) -> tuple[Tensor, Tensor]:
    """Replaces models that are not finite by their start.

    Args:
        models: (k, D).
        start: (D,) or (k, D).

    Returns:
        The models (k, D), and a mask bool (k,) of the replaced ones.
    """
    diverged = ~torch.isfinite(models).all(dim=1)
    return torch.where(diverged[:, None], start, models), diverged
