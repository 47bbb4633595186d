"""Local solvers: how long a client trains before it answers, on which batches, and with which
optimizer.

Optimizers work on stacked parameters: one (K, D) tensor is K independent problems. A step moves
only the leading rows; how many they are only falls in the course of a local run.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Annotated, Any

import torch
from torch import Tensor

from .._check import Checked, Count, NonNegative, Positive, Range, Rate, one_of
from ..errors import ConfigError
from .batches import batches_per_epoch
from .precision import Precision

Strength = float | Tensor | Precision
"""Strength of the pull to an anchor: one number, one for each coordinate, (D,) or (K, D), or a
precision matrix."""

Rule = Callable[[Tensor], None]
"""gradients (A, D) -> the leading A rows are moved."""

Gradient = Callable[[Tensor, float, float], None]
"""(target (A, D), keep, rate) -> ``target = keep * target - rate * gradient``, in place, with the
gradients at the leading A rows. With ``keep=0`` the target is not read. It may be these rows."""


class StackedOptimizer:
    """Moves rows by an update rule and the anchor term (1/2) sum_j lam_j (w_j - anchor_j)^2.

    Args:
        rows: (K, D) parameters.
        rule: of an update of these rows, such as :func:`torch_rule`; None where it is gradient
            descent with weight decay.
        lr: step size eta.
        decay: weight decay of gradient descent.
        lam: strength lambda of the pull towards ``anchor``, at least 0: one number for all
            coordinates, or a tensor (D,) or (K, D) with one for each. Or a
            :class:`~fedmtl.local.precision.Precision` P, and the term is (1/2) (w - anchor)^T P (w
            - anchor).
        anchor: (D,) or (K, D); needed when ``lam > 0``.
        proximal: take the anchor term by its proximal step, w <- (w + eta lam anchor) / (1 + eta
            lam), after the update rule instead of adding lam (w - anchor) to the gradient. Stable
            for any ``eta * lam``. Of a precision matrix it is w <- anchor + (I + eta P)^-1 (w -
            anchor).

    Raises:
        ConfigError: a pull without an anchor.
    """

    def __init__(
        self,
        rows: Tensor,
        rule: Rule | None,
        *,
        lr: float,
        decay: float = 0.0,
        lam: Strength = 0.0,
        anchor: Tensor | None = None,
        proximal: bool = False,
    ) -> None:
        # A tensor or a precision may be zero in places, so it counts as a pull.
        pulls = isinstance(lam, (Tensor, Precision)) or lam > 0.0
        if pulls and anchor is None:
            raise ConfigError("lam > 0 needs an anchor to pull towards.")
        if not pulls:  # an anchor without a strength is none
            anchor = None
        self.rows = rows
        self.rule = rule
        self.lr = lr
        self.decay = decay
        self.lam = lam
        self.anchor = anchor
        self.proximal = proximal
        self._gradients: Tensor | None = None

    @torch.no_grad()
    def step(self, active: int, gradient: Gradient) -> None:
        """Moves the first ``active`` rows by one step; all others keep every bit."""
        w = self.rows[:active]
        if self.rule is None and not isinstance(self.lam, (Tensor, Precision)):
            # w <- a w - b gradient + c anchor in one pass over the rows, and one for the anchor
            pull = 0.0
            if self.anchor is not None:
                pull = self.lr * self.lam
            keep = 1.0 - pull
            scale = 1.0
            if self.proximal:
                keep = 1.0
                scale = 1.0 + pull
            gradient(w, (keep - self.lr * self.decay) / scale, self.lr / scale)
            if self.anchor is not None:
                w.add_(rows_of(self.anchor, slice(active)), alpha=pull / scale)
            return
        if self._gradients is None:
            self._gradients = torch.empty_like(self.rows)
        g = self._gradients[:active]
        gradient(g, 0.0, -1.0)
        anchor = rows_of(self.anchor, slice(active))
        lam = rows_of(self.lam, slice(active))
        if anchor is not None and not self.proximal:
            if isinstance(lam, Precision):
                g.add_(lam.times(w - anchor))
            else:
                g.add_(lam * (w - anchor))
        if self.rule is None:
            w.mul_(1.0 - self.lr * self.decay).sub_(g, alpha=self.lr)
        else:
            self.rule(g)
        if anchor is not None and self.proximal:
            if isinstance(lam, Precision):
                w.copy_(anchor + lam.resolvent(w - anchor, self.lr))
            else:
                w.add_(self.lr * lam * anchor).div_(1.0 + self.lr * lam)


def torch_rule(rows: Tensor, factory: Callable[[Iterable[Tensor]], Any]) -> Rule:
    """Returns the rule of any elementwise optimizer of ``torch.optim`` over ``rows`` (K, D).

    Args:
        rows: parameters.
        factory: builds the optimizer from a list of parameters, e.g.
            ``partial(torch.optim.Adam, lr=1e-3)``.
    """
    optimizer = factory([rows])
    state: dict[str, Any] = optimizer.state.pop(rows, {})

    def step(gradients: Tensor) -> None:
        nonlocal state
        leading = rows[: len(gradients)]
        leading.grad = gradients
        # The optimizer sees the leading rows alone, so that all others keep every bit.
        optimizer.param_groups[0]["params"] = [leading]
        optimizer.state[leading] = {
            name: rows_of(value, slice(len(leading))) for name, value in state.items()
        }
        optimizer.step()
        state = optimizer.state.pop(leading)

    return step


def backoff_rule(rows: Tensor, lr: float, momentum: float) -> Rule:
    """Returns the rule of gradient descent with momentum, each row of which has a step size of its
    own.

    A row moves on where its gradient points downhill along its last step. Where it points uphill
    after a step of momentum, momentum starts again (O'Donoghue and Candes: "Adaptive Restart for
    Accelerated Gradient Schemes", 2015); after a step by the gradient only, this was too long, or
    what it led to is not finite: it is taken back, and the step size halved.

    Args:
        rows: (K, D) parameters.
        lr: first step size of every row.
        momentum: of a step in the next one.
    """
    rates = rows.new_full((len(rows), 1), lr)
    # the last step had no momentum
    plain = torch.ones(len(rows), 1, dtype=torch.bool, device=rows.device)
    before = rows.clone()
    slopes = torch.zeros_like(rows)
    moved = torch.zeros_like(rows)
    first = True

    def step(gradients: Tensor) -> None:
        nonlocal first
        k = len(gradients)
        w = rows[:k]
        # The negation of "<= 0", so that a gradient that is NaN counts as uphill.
        uphill = ~((gradients * moved[:k]).sum(1, keepdim=True) <= 0)
        # A step of the gradient alone that went uphill was too long.
        back = uphill & plain[:k]
        w.copy_(torch.where(back, before[:k], w))
        slopes[:k] = torch.where(back, slopes[:k], gradients)
        rates[:k] = torch.where(back, 0.5 * rates[:k], rates[:k])
        moved[:k] = torch.where(uphill, 0.0, momentum * moved[:k]) - rates[:k] * slopes[:k]
        plain[:k] = uphill | first
        before[:k] = w
        w.add_(moved[:k])
        first = False

    return step


def rows_of(value: Any, select: Any) -> Any:
    """Returns the selected rows of a tensor (K, D), or of a precision of K clients; anything else,
    such as (D,) for all clients, as it is."""
    if isinstance(value, Precision):
        return value.of(select)
    if isinstance(value, Tensor) and value.dim() == 2:
        return value[select]
    return value


@dataclass(frozen=True, kw_only=True)
class LocalSolver(Checked, ABC):
    """How long a client trains and on which batches; subclasses say with which optimizer.

    Args:
        lr: step size.
        epochs: passes over a client's own training examples, per participation.
        steps: local steps per participation instead of epochs, the same for every client.
        batch_size: examples per step; ``None`` takes all of a client's examples.
        proximal: take a regularizer's anchor term by its proximal step.
        decay, decay_every: the step size is multiplied by ``decay`` after every ``decay_every``
            rounds.
    """

    lr: Positive
    epochs: Count = 1
    steps: Count | None = None
    batch_size: Count | None = 10
    proximal: bool = False
    decay: Rate = 1.0
    decay_every: Count = 1

    def lr_at(self, round: int) -> float:
        """Returns the step size of a round, counted from 0."""
        return self.lr * self.decay ** (round // self.decay_every)

    def step_counts(self, counts: Tensor) -> Tensor:
        """Local steps of clients with ``counts`` examples: int64 (k,) -> (k,)."""
        if self.steps is not None:
            return torch.full_like(counts, self.steps)
        return self.epochs * batches_per_epoch(counts, self.batch_size)

    @staticmethod
    def check_given(owner: object, solver: object, lam: float = 0.0, name: str = "local") -> None:
        """Refuses what an algorithm has as its field ``name`` that is no solver, or cannot follow a
        strength ``lam``.

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
        """Refuses a regularization strength this solver cannot follow."""

    @abstractmethod
    def optimizer(
        self, rows: Tensor, *, round: int, lam: Strength = 0.0, anchor: Tensor | None = None
    ) -> StackedOptimizer:
        """Returns the optimizer of one local run over ``rows`` (k, D), which pulls them to an
        anchor."""


@dataclass(frozen=True, kw_only=True)
class LocalSGD(LocalSolver):
    """Stochastic gradient descent, mean-regularized when the algorithm gives an anchor.

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
        if not self.proximal and self.lr * lam >= 2.0:
            raise ConfigError(
                f"lr * lam = {self.lr:g} * {lam:g} = {self.lr * lam:g}: from 2 on, the anchor "
                f"term makes every step "
                "overshoot and the local models explode. Lower lr or lam, or set proximal=True."
            )

    def optimizer(
        self, rows: Tensor, *, round: int, lam: Strength = 0.0, anchor: Tensor | None = None
    ) -> StackedOptimizer:
        lr = self.lr_at(round)
        decay = self.weight_decay
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
    """Gradient descent on all of a client's examples, whose step size each client adapts to its own
    gradients.

    See :func:`~fedmtl.local.solver.backoff_rule`: no step size has to be tuned, and few diverge.

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
        if self.proximal or self.batch_size is not None:
            raise ConfigError(
                "BackoffSGD judges a step by the gradient of all of a client's examples after it; "
                "leave proximal and batch_size out."
            )

    def optimizer(
        self, rows: Tensor, *, round: int, lam: Strength = 0.0, anchor: Tensor | None = None
    ) -> StackedOptimizer:
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
    """Any elementwise optimizer of ``torch.optim``, by name.

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
        lr = self.lr_at(round)
        rule = torch_rule(rows, self._factory(lr))
        return StackedOptimizer(rows, rule, lr=lr, lam=lam, anchor=anchor, proximal=self.proximal)
