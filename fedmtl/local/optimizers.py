"""Optimizers over stacked parameters: one (K, D) tensor is K independent problems.

A step moves only the leading rows; how many they are only falls in the course of a local run.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor

from ..errors import ConfigError
from .precision import Precision

Strength = float | Tensor | Precision
"""Strength of the pull to an anchor: one number, one for each coordinate, (D,) or (K, D), or a precision matrix."""

Rule = Callable[[Tensor], None]
"""gradients (A, D) -> the leading A rows are moved."""

Gradient = Callable[[Tensor, float, float], None]
"""(target (A, D), keep, rate) -> the target becomes ``keep`` times itself, and of 0 nothing, less ``rate`` times the
gradients at the leading A rows. The target may be these rows themselves."""


class StackedOptimizer:
    """Moves rows by an update rule and the anchor term (1/2) sum_j lam_j (w_j - anchor_j)^2.

    Args:
        rows: (K, D) parameters.
        rule: of an update of these rows, such as :func:`torch_rule`; None where it is gradient descent with weight
            decay.
        lr: step size eta.
        decay: weight decay of gradient descent.
        lam: strength lambda of the pull towards ``anchor``, at least 0: one number for all coordinates, or a tensor
            (D,) or (K, D) with one for each. Or a :class:`~fedmtl.local.precision.Precision` P, and the term is
            (1/2) (w - anchor)^T P (w - anchor).
        anchor: (D,) or (K, D); needed when ``lam > 0``.
        proximal: take the anchor term by its proximal step, w <- (w + eta lam anchor) / (1 + eta lam), after the update
            rule instead of adding lam (w - anchor) to the gradient. Stable for any ``eta * lam``. Of a precision matrix
            it is w <- anchor + (I + eta P)^-1 (w - anchor).

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
        pulls = isinstance(lam, (Tensor, Precision)) or lam > 0.0
        if pulls and anchor is None:
            raise ConfigError("lam > 0 needs an anchor to pull towards.")
        self.rows, self.rule, self.lr, self.decay = rows, rule, lr, decay
        self.lam, self.anchor, self.proximal = lam, anchor if pulls else None, proximal
        self._gradients: Tensor | None = None

    @torch.no_grad()
    def step(self, active: int, gradient: Gradient) -> None:
        """Move the first ``active`` rows by one step; all others keep every bit."""
        w = self.rows[:active]
        if self.rule is None and not isinstance(self.lam, (Tensor, Precision)):
            self._descend(w, gradient)
            return
        if self._gradients is None:
            self._gradients = torch.empty_like(self.rows)
        g = self._gradients[:active]
        gradient(g, 0.0, -1.0)
        anchor, lam = rows_of(self.anchor, slice(active)), rows_of(self.lam, slice(active))
        if anchor is not None and not self.proximal:
            g.add_(lam.times(w - anchor) if isinstance(lam, Precision) else lam * (w - anchor))
        if self.rule is None:
            w.mul_(1.0 - self.lr * self.decay).sub_(g, alpha=self.lr)
        else:
            self.rule(g)
        if anchor is not None and self.proximal:
            if isinstance(lam, Precision):
                w.copy_(anchor + lam.resolvent(w - anchor, self.lr))
            else:
                w.add_(self.lr * lam * anchor).div_(1.0 + self.lr * lam)

    def _descend(self, w: Tensor, gradient: Gradient) -> None:
        """Make a step that is w <- a w - b gradient + c anchor in one pass over the rows, and one for the anchor."""
        assert isinstance(self.lam, (int, float))
        pull = 0.0 if self.anchor is None else self.lr * self.lam
        keep, scale = (1.0, 1.0 + pull) if self.proximal else (1.0 - pull, 1.0)
        gradient(w, (keep - self.lr * self.decay) / scale, self.lr / scale)
        if self.anchor is not None:
            w.add_(rows_of(self.anchor, slice(len(w))), alpha=pull / scale)


def torch_rule(rows: Tensor, factory: Callable[[Iterable[Tensor]], Any]) -> Rule:
    """Return the rule of any elementwise optimizer of ``torch.optim`` over ``rows`` (K, D).

    Args:
        rows: parameters.
        factory: builds the optimizer from a list of parameters, e.g. ``partial(torch.optim.Adam, lr=1e-3)``.
    """
    optimizer, state = factory([rows]), dict[str, Any]()

    def step(gradients: Tensor) -> None:
        nonlocal state
        leading = rows[: len(gradients)]
        leading.grad = gradients
        optimizer.param_groups[0]["params"] = [leading]
        optimizer.state[leading] = {
            name: value[: len(leading)] if isinstance(value, Tensor) and value.dim() == 2 else value
            for name, value in state.items()
        }
        optimizer.step()
        state = optimizer.state.pop(leading)

    return step


def rows_of(value: Any, select: Any) -> Any:
    """Return the selected rows of a tensor (K, D), or of a precision of K clients; anything else, such as (D,) for all
    clients, as it is."""
    if isinstance(value, Precision):
        return value.of(select)
    return value[select] if isinstance(value, Tensor) and value.dim() == 2 else value
