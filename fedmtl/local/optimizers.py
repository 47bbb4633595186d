"""Optimizers of a stack of models: one step of every client that is still in training."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor

from .._devices import on_device
from ..errors import ConfigError
from .precision import Precision

Strength = float | Tensor | Precision
"""Strength of the pull to an anchor: one number, one for each coordinate, (D,) or (K, D), or a
precision matrix."""
Rule = Callable[[Tensor], None]
"""gradients (A, D) -> the leading A rows are moved."""
Descent = Callable[[Tensor, float, float], None]
"""A step along the gradients at the leading A rows, which need not be in memory for it:
(target (A, D), keep, rate) -> ``target = keep * target - rate * gradient``, in place. With
``keep=0`` the target is not read, and with ``rate=-1`` it becomes the gradients. It may be these
rows."""


class StackedOptimizer:
    """Moves rows by an update rule and the anchor term (1/2) sum_j lam_j (w_j - anchor_j)^2.

    Args:
        rows: (K, D) parameters.
        rule: of an update of these rows, such as :func:`torch_rule`; None for gradient
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
            for any ``eta * lam``. With a precision matrix it is w <- anchor + (I + eta P)^-1
            (w - anchor).

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
    def step(self, active: int, descend: Descent) -> None:
        """Moves the leading rows by one step; all others keep every bit.

        Args:
            active: A, the number of rows that move.
            descend: along the gradients of the losses at these rows.
        """
        if self.rule is None and not isinstance(self.lam, (Tensor, Precision)):
            self._gradient_descent(active, descend, self.lam)
            return
        w = self.rows[:active]
        if self._gradients is None:
            self._gradients = torch.empty_like(self.rows)
        g = self._gradients[:active]
        descend(g, 0.0, -1.0)  # g becomes the gradients
        anchor = rows_of(self.anchor, slice(active))
        lam = rows_of(self.lam, slice(active))
        if anchor is not None and not self.proximal:
            g.add_(lam.times(w - anchor) if isinstance(lam, Precision) else lam * (w - anchor))
        if self.rule is None:
            w.mul_(1.0 - self.lr * self.decay).sub_(g, alpha=self.lr)
        else:
            self.rule(g)
        if anchor is not None and self.proximal:
            self._pull(w, lam, anchor)

    def _gradient_descent(self, active: int, descend: Descent, lam: float) -> None:
        """Moves the rows by gradient descent with a pull of one strength.

        w <- a w - b gradient + c anchor takes one pass over the rows and one over the anchor: of
        small models the passes are most of the time of a step.
        """
        w = self.rows[:active]
        pull = 0.0
        if self.anchor is not None:
            pull = self.lr * lam
        keep = 1.0 - pull
        scale = 1.0
        if self.proximal:
            keep = 1.0
            scale = 1.0 + pull
        descend(w, (keep - self.lr * self.decay) / scale, self.lr / scale)
        if self.anchor is not None:
            w.add_(rows_of(self.anchor, slice(active)), alpha=pull / scale)

    def _pull(self, w: Tensor, lam: Any, anchor: Tensor) -> None:
        """Moves rows (A, D) by the proximal step of the anchor term, in place."""
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

    A row moves on if its gradient points downhill along its last step. If it points uphill
    after a step of momentum, momentum starts again (O'Donoghue and Candes: "Adaptive Restart for
    Accelerated Gradient Schemes", 2015); after a step by the gradient only, the step was too long.
    Such a step, and one that led to numbers that are not finite, is taken back, and the step size
    halved.

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
        if isinstance(select, Tensor):
            select = on_device(select, value.device)
        return value[select]
    return value
