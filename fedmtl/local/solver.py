"""Local solvers: how long a client trains before it answers, on which batches, and with which
optimizer.

Optimizers work on stacked parameters: one (K, D) tensor is K independent problems. A step moves
only the leading rows; their number only falls in the course of a local run.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Annotated, Any

import torch
from torch import Tensor

from .._check import Checked, Count, NonNegative, Positive, Range, Rate, one_of
from ..errors import ConfigError
from .batches import batches_per_epoch
from .optimizers import Rule, StackedOptimizer, Strength, backoff_rule, torch_rule


@dataclass(frozen=True, kw_only=True)
class LocalSolver(Checked, ABC):
    """The base class of local solvers: the number of local steps and their batches. Subclasses add
    the optimizer.

    Args:
        lr: step size.
        epochs: passes over a client's own training examples, per participation.
        steps: local steps per participation instead of epochs, the same for every client.
        batch_size: examples per step; ``None`` takes all of a client's examples.
        proximal: take a regularizer's anchor term by its proximal step.
        decay, decay_every: the step size is multiplied by ``decay`` after every ``decay_every``
            rounds.

    Example:
        >>> from fedmtl import LocalSGD
        >>> solver = LocalSGD(lr=0.1, decay=0.5, decay_every=10)
        >>> [solver.lr_at(round) for round in (0, 9, 10)]
        [0.1, 0.1, 0.05]
    """

    lr: Positive
    epochs: Count = 1
    steps: Count | None = None
    batch_size: Count | None = 10
    proximal: bool = False
    decay: Rate = 1.0
    decay_every: Count = 1

    def lr_at(self, round: int) -> float:
        """Returns the step size of a round.

        Args:
            round: its number, from 0.
        """
        return self.lr * self.decay ** (round // self.decay_every)

    def step_counts(self, counts: Tensor) -> Tensor:
        """Returns the numbers of local steps of clients.

        Args:
            counts: int64 (k,), their numbers of examples.

        Returns:
            int64 (k,).
        """
        if self.steps is not None:
            return torch.full_like(counts, self.steps)
        return self.epochs * batches_per_epoch(counts, self.batch_size)

    @staticmethod
    def check_given(owner: object, solver: object, lam: float = 0.0, name: str = "local") -> None:
        """Refuses a field of an algorithm that is no solver, or that cannot follow a strength.

        Args:
            owner: the algorithm.
            solver: its field.
            lam: strength of the pull to an anchor.
            name: of the field.

        Raises:
            ConfigError: naming the class of ``owner``.
        """
        if not isinstance(solver, LocalSolver):
            raise ConfigError(
                f"{type(owner).__name__}.{name} is {solver!r}; give a local solver, such as "
                "LocalSGD(lr=0.1) or LocalOptimizer(optimizer_name='Adam', lr=0.01)."
            )
        solver.check(lam)

    def check(self, lam: float) -> None:
        """Refuses a regularization strength this solver cannot follow.

        Args:
            lam: strength of the pull to an anchor, at least 0.

        Raises:
            ConfigError: a strength with which the steps diverge.
        """

    @abstractmethod
    def optimizer(
        self, rows: Tensor, *, round: int, lam: Strength = 0.0, anchor: Tensor | None = None
    ) -> StackedOptimizer:
        """Returns the optimizer of one local run.

        Args:
            rows: (k, D), the parameters that it moves.
            round: addresses the step size.
            lam: strength of the pull to the anchor, see :class:`StackedOptimizer`.
            anchor: (D,) or (k, D); None without a pull.
        """


@dataclass(frozen=True, kw_only=True)
class LocalSGD(LocalSolver):
    """Trains locally by stochastic gradient descent, mean-regularized when the algorithm gives an
    anchor.

    Args:
        lr, epochs, steps, batch_size, proximal, decay, decay_every: see :class:`LocalSolver`.
        momentum, nesterov, weight_decay: as in ``torch.optim.SGD``; momentum starts at zero in
            every participation.

    Example:
        >>> import torch
        >>> from fedmtl import LocalSGD
        >>> solver = LocalSGD(lr=0.1, epochs=2, batch_size=10)
        >>> solver.step_counts(torch.tensor([25, 10, 0])).tolist()
        [6, 2, 0]
    """

    momentum: Annotated[
        float, Range(lambda v: 0 <= v < 1, "a number of at least 0 and below 1")
    ] = 0.0
    nesterov: bool = False
    weight_decay: NonNegative = 0.0

    def check(self, lam: float) -> None:
        """Refuses a strength with which steps overshoot, from ``lr * lam = 2`` on, unless
        ``proximal``.
        """
        # A step multiplies the distance to the anchor by 1 - lr lam, below -1 from 2 on.
        if not self.proximal and self.lr * lam >= 2.0:
            raise ConfigError(
                f"lr * lam = {self.lr:g} * {lam:g} = {self.lr * lam:g}: from 2 on, the anchor "
                f"term makes every step "
                "overshoot and the local models explode. Lower lr or lam, or set proximal=True."
            )

    def optimizer(
        self, rows: Tensor, *, round: int, lam: Strength = 0.0, anchor: Tensor | None = None
    ) -> StackedOptimizer:
        """Returns plain descent, or with momentum ``torch.optim.SGD`` on stacked rows."""
        lr = self.lr_at(round)
        decay = self.weight_decay
        # Without momentum a step needs no state, and is fused with the backward pass.
        rule: Rule | None = None
        if self.momentum:
            factory = partial(
                torch.optim.SGD,
                lr=lr,
                momentum=self.momentum,
                nesterov=self.nesterov,
                weight_decay=decay,
            )
            rule = torch_rule(rows, factory)
        return StackedOptimizer(
            rows, rule, lr=lr, decay=decay, lam=lam, anchor=anchor, proximal=self.proximal
        )


@dataclass(frozen=True, kw_only=True)
class BackoffSGD(LocalSolver):
    """Trains locally by gradient descent on all of a client's examples, with a step size that each
    client adapts to its own gradients.

    No step size has to be tuned, and few clients diverge; see
    :func:`~fedmtl.local.optimizers.backoff_rule`.

    Args:
        lr: first step size of a participation.
        epochs, steps, batch_size, decay, decay_every: see :class:`LocalSolver`.
        proximal: has to be False.
        momentum: starts at zero in every participation.

    Example:
        >>> import torch
        >>> from fedmtl import BackoffSGD
        >>> BackoffSGD(steps=20).step_counts(torch.tensor([25, 10])).tolist()
        [20, 20]
    """

    lr: Positive = 0.5
    steps: Count | None = 20
    batch_size: Count | None = None
    momentum: Annotated[
        float, Range(lambda v: 0 <= v < 1, "a number of at least 0 and below 1")
    ] = 0.9

    def check(self, lam: float) -> None:
        """Refuses batches and proximal steps, whatever the strength."""
        # The gradient of a batch changes from step to step, and says nothing about the last step.
        if self.proximal or self.batch_size is not None:
            raise ConfigError(
                "BackoffSGD judges a step by the gradient of all of a client's examples after it; "
                "leave proximal and batch_size out."
            )

    def optimizer(
        self, rows: Tensor, *, round: int, lam: Strength = 0.0, anchor: Tensor | None = None
    ) -> StackedOptimizer:
        """Returns descent with a step size of each client's own."""
        lr = self.lr_at(round)
        return StackedOptimizer(
            rows, backoff_rule(rows, lr, self.momentum), lr=lr, lam=lam, anchor=anchor
        )


ELEMENTWISE = (
    "ASGD",
    "Adadelta",
    "Adagrad",
    "Adam",
    "AdamW",
    "Adamax",
    "NAdam",
    "RAdam",
    "RMSprop",
    "Rprop",
    "SGD",
)
"""The optimizers of ``torch.optim`` that move each element by its own gradients: no client depends
on another."""


@dataclass(frozen=True, kw_only=True)
class LocalOptimizer(LocalSolver):
    """Trains locally by any elementwise optimizer of ``torch.optim``, by name.

    Args:
        lr, epochs, steps, batch_size, proximal, decay, decay_every: see :class:`LocalSolver`.
        optimizer_name: one of :data:`ELEMENTWISE`.
        options: its further arguments.

    Example:
        >>> import torch
        >>> from fedmtl import LocalOptimizer
        >>> options = {"weight_decay": 0.01}
        >>> solver = LocalOptimizer(optimizer_name="AdamW", lr=0.001, steps=5, options=options)
        >>> solver.step_counts(torch.tensor([25, 10])).tolist()
        [5, 5]
    """

    optimizer_name: str = "Adam"
    options: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        super().__post_init__()
        one_of(self, ELEMENTWISE, optimizer_name=self.optimizer_name)
        # Options that do not fit are refused here, and not by the first client of a run.
        try:
            torch_rule(torch.zeros(1, 1), self._factory(self.lr))(torch.zeros(1, 1))
        except (TypeError, ValueError, RuntimeError) as error:
            raise ConfigError(
                f"LocalOptimizer.options does not fit torch.optim.{self.optimizer_name}: {error}"
            ) from error

    def _factory(self, lr: float) -> Callable[..., Any]:
        cls = getattr(torch.optim, self.optimizer_name)
        return partial(cls, lr=lr, **self.options)

    def optimizer(
        self, rows: Tensor, *, round: int, lam: Strength = 0.0, anchor: Tensor | None = None
    ) -> StackedOptimizer:
        """Returns the optimizer of ``torch.optim`` on stacked rows."""
        lr = self.lr_at(round)
        rule = torch_rule(rows, self._factory(lr))
        return StackedOptimizer(rows, rule, lr=lr, lam=lam, anchor=anchor, proximal=self.proximal)
