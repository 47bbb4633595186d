"""Torch optimizers over stacked parameters: one (K, D) tensor is K independent problems.

``step(*, active)`` moves only the active rows. An inactive row and its optimizer state stay bit-identical: momentum,
weight decay and Adam would otherwise move a client that has finished.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor

from ..errors import ConfigError
from .precision import Precision

Active = Tensor | slice | None
"""Which rows move: a boolean mask (K,), a slice, or ``None`` for all."""

Strength = float | Tensor | Precision
"""Strength of the pull to an anchor: one number, one for each coordinate, (D,) or (K, D), or a precision matrix."""


class StackedOptimizer(torch.optim.Optimizer, ABC):
    """Base of the stacked optimizers: the anchor term (1/2) sum_j lam_j (w_j - anchor_j)^2 around an update rule.

    Args:
        rows: (K, D) parameters; the gradient is read from ``rows.grad``.
        lr: step size eta.
        lam: strength lambda of the pull towards ``anchor``, at least 0: one number for all coordinates, or a tensor
            (D,) or (K, D) with one for each. Or a :class:`~fedmtl.local.precision.Precision` P, and the term is
            (1/2) (w - anchor)^T P (w - anchor).
        anchor: (D,) or (K, D); needed when ``lam > 0``.
        proximal: take the anchor term by its proximal step, w <- (w + eta lam anchor) / (1 + eta lam), after the update
            rule instead of adding lam (w - anchor) to the gradient. Stable for any ``eta * lam``. Of a precision matrix
            it is w <- anchor + (I + eta P)^-1 (w - anchor).
    """

    def __init__(
        self,
        rows: Tensor,
        *,
        lr: float,
        lam: Strength = 0.0,
        anchor: Tensor | None = None,
        proximal: bool = False,
        **defaults: Any,
    ) -> None:
        self.pulls = isinstance(lam, (Tensor, Precision)) or lam > 0.0
        if self.pulls and anchor is None:
            raise ConfigError("lam > 0 needs an anchor to pull towards.")
        super().__init__([rows], dict(lr=lr, proximal=proximal, **defaults))
        self.lam, self.anchor = lam, anchor

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Take the rows, the only group. The method of torch does the same and first imports its compiler, which takes
        longer than a small run."""
        if self.param_groups:
            raise ConfigError("A stacked optimizer has one group of parameters, its rows.")
        self.param_groups.append({**self.defaults, **param_group})

    @torch.no_grad()
    def step(self, *, active: Active = None) -> None:  # type: ignore[override]
        """Move the active rows by one step of ``rows.grad``; all others keep every bit."""
        group = self.param_groups[0]
        rows: Tensor = group["params"][0]
        lr, proximal = group["lr"], group["proximal"]
        if isinstance(active, slice) or active is None:
            select: Any = active if active is not None else slice(None)
        else:
            select = active.nonzero(as_tuple=True)[0]
            if len(select) == 0:
                return
        w, gradient = rows[select], _gradient(rows)[select]
        anchor, lam = rows_of(self.anchor, select), rows_of(self.lam, select)
        if anchor is not None and self.pulls and not proximal:
            if isinstance(lam, Precision):
                gradient = gradient + lam.times(w - anchor)
            elif isinstance(lam, Tensor):
                gradient = torch.addcmul(gradient, lam, w - anchor)
            elif self._follows_gradient(group):  # w - lr (g + lam (w - anchor)), without temporaries
                w.lerp_(anchor.expand_as(w), lr * lam)
            else:
                gradient = torch.add(gradient, w, alpha=lam).sub_(anchor, alpha=lam)
        self._update(rows, select, w, gradient, group)
        if anchor is not None and self.pulls and proximal:
            if isinstance(lam, Precision):
                w.copy_(anchor + lam.resolvent(w - anchor, lr))
            elif isinstance(lam, Tensor):
                w.addcmul_(lam, anchor, value=lr).div_(1.0 + lr * lam)
            else:
                w.add_(anchor, alpha=lr * lam).div_(1.0 + lr * lam)
        if not isinstance(select, slice):
            rows[select] = w

    def _follows_gradient(self, group: dict[str, Any]) -> bool:
        """Return whether the rule is just w <- w - lr * gradient."""
        return False

    def restart(self) -> bool:
        """Forget all steps, in the memory where they are kept. Return whether every step is the same operations on the
        same memory, so that it can be recorded once and replayed; False by default, and nothing is forgotten."""
        return False

    def affine_step(self) -> tuple[float, float, float] | None:
        """Return (a, b, c) where every step is w <- a w - b gradient + c anchor; None where it is another rule."""
        return None

    @abstractmethod
    def _update(self, rows: Tensor, select: Any, w: Tensor, gradient: Tensor, group: dict[str, Any]) -> None:
        """Apply the rule: change ``w`` (k, D) in place, given the active rows' gradient."""


def rows_of(value: Any, select: Any) -> Any:
    """Return the selected rows of a tensor (K, D), or of a precision of K clients; anything else, such as (D,) for all
    clients, as it is."""
    if isinstance(value, Precision):
        return value.of(select)
    return value[select] if isinstance(value, Tensor) and value.dim() == 2 else value


def affine_descent(lr: float, decay: float, lam: float, *, proximal: bool) -> tuple[float, float, float]:
    """Return (a, b, c) of a step w <- a w - b gradient + c anchor: gradient descent with weight decay and a pull to an
    anchor, see :class:`StackedOptimizer`."""
    pull = lr * lam
    if proximal:
        return (1.0 - lr * decay) / (1.0 + pull), lr / (1.0 + pull), pull / (1.0 + pull)
    return 1.0 - lr * decay - pull, lr, pull


class StackedSGD(StackedOptimizer):
    """Stochastic gradient descent on each row, as ``torch.optim.SGD``.

    Args:
        rows: (K, D) parameters.
        lr: step size.
        momentum, nesterov, weight_decay: as in ``torch.optim.SGD``.
    """

    def __init__(
        self,
        rows: Tensor,
        *,
        lr: float,
        momentum: float = 0.0,
        nesterov: bool = False,
        weight_decay: float = 0.0,
        **regularizer: Any,
    ) -> None:
        super().__init__(rows, lr=lr, momentum=momentum, nesterov=nesterov, weight_decay=weight_decay, **regularizer)

    def _follows_gradient(self, group: dict[str, Any]) -> bool:
        return not group["weight_decay"] and not group["momentum"]

    def restart(self) -> bool:
        group = self.param_groups[0]
        if group["momentum"]:
            rows = group["params"][0]
            state = self.state[rows]
            state["momentum"] = state["momentum"].zero_() if state else torch.zeros_like(rows)
        return True

    def affine_step(self) -> tuple[float, float, float] | None:
        group = self.param_groups[0]
        if group["momentum"] or not isinstance(self.lam, (int, float)):
            return None
        return affine_descent(group["lr"], group["weight_decay"], float(self.lam), proximal=group["proximal"])

    def _update(self, rows: Tensor, select: Any, w: Tensor, gradient: Tensor, group: dict[str, Any]) -> None:
        if group["weight_decay"]:
            gradient = gradient + group["weight_decay"] * w
        if group["momentum"]:
            state = self.state[rows]
            if not state:
                state["momentum"] = torch.zeros_like(rows)
            velocity = state["momentum"][select].mul_(group["momentum"]).add_(gradient)
            if not isinstance(select, slice):
                state["momentum"][select] = velocity
            gradient = gradient + group["momentum"] * velocity if group["nesterov"] else velocity
        w.add_(gradient, alpha=-group["lr"])


def check_stable(lr: float, lam: float) -> None:
    """Refuse a gradient step on the anchor term that diverges: needs ``lr * lam < 2``.

    Raises:
        ConfigError: otherwise.
    """
    if lr * lam >= 2.0:
        raise ConfigError(
            f"lr * lam = {lr:g} * {lam:g} = {lr * lam:g}: from 2 on, the anchor term makes every step overshoot and "
            "the local models explode. Lower lr or lam, or set proximal=True."
        )


class Elementwise(StackedOptimizer):
    """Any elementwise torch optimizer (Adam, RMSprop, Adagrad, ...) as K local optimizers.

    Rows keep their own state and their own step count, so a row that pauses continues as if alone.

    Args:
        rows: (K, D) parameters.
        factory: builds the optimizer from a list of parameters, e.g. ``partial(torch.optim.Adam, lr=1e-3)``.

    Raises:
        ConfigError: the optimizer mixes elements (LBFGS, Adafactor, Muon, ...), found by a numerical probe.
    """

    def __init__(self, rows: Tensor, *, factory: Callable[[Iterable[Tensor]], Any], **regularizer: Any) -> None:
        super().__init__(rows, lr=float(factory([torch.zeros(1)]).defaults["lr"]), **regularizer)
        self.factory = factory
        self.counts = torch.zeros(rows.shape[0], dtype=torch.int64)
        self._state: dict[str, Tensor] = {}

    def _update(self, rows: Tensor, select: Any, w: Tensor, gradient: Tensor, group: dict[str, Any]) -> None:
        counts = self.counts[select if isinstance(select, slice) else select.cpu()]
        for count in counts.unique().tolist():
            same = slice(None) if (counts == count).all() else (counts == count).nonzero()[:, 0].to(w.device)
            where = _compose(select, same, rows)
            part = w[same].clone().requires_grad_()
            part.grad = gradient[same].contiguous()
            optimizer = self.factory([part])
            if count:
                optimizer.state[part] = {
                    name: value[where] if value.shape[:1] == rows.shape[:1] and value.dim() == 2 else value.clone()
                    for name, value in self._at(count).items()
                }
            optimizer.step()
            w[same] = part.detach()
            for name, value in optimizer.state[part].items():
                self._keep(name, value, where, rows, count + 1)
        self.counts[select if isinstance(select, slice) else select.cpu()] += 1

    def _at(self, count: int) -> dict[str, Tensor]:
        """Return the stored state seen by rows that have made ``count`` steps."""
        suffix = f"@{count}"
        scalars = {k.removesuffix(suffix): v for k, v in self._state.items() if k.endswith(suffix)}
        return {k: v for k, v in self._state.items() if "@" not in k} | scalars

    def _keep(self, name: str, value: Any, where: Any, rows: Tensor, count: int) -> None:
        if isinstance(value, Tensor) and value.dim() == 2:
            self._state.setdefault(name, torch.zeros_like(rows, dtype=value.dtype))[where] = value
        elif value is not None:  # a scalar such as Adam's step: the same for all rows of one count
            self._state[f"{name}@{count}"] = torch.as_tensor(value).clone()


def check_elementwise(factory: Callable[[Iterable[Tensor]], Any]) -> None:
    """Run three steps on a 2 x 3 tensor and on its elements alone; refuse an optimizer that tells them apart.

    Raises:
        ConfigError: the results differ, or the optimizer cannot step without a closure.
    """
    gradients = torch.linspace(-1.3, 1.7, 18, dtype=torch.float64).reshape(3, 2, 3)

    def run(columns: Tensor) -> Tensor:
        p = torch.ones_like(columns[0]).requires_grad_()
        optimizer = factory([p])
        for g in columns:
            p.grad = g.clone()
            optimizer.step()
        return p.detach()

    try:
        together = run(gradients)
        alone = torch.cat([run(gradients[:, i : i + 1, j : j + 1]) for i in range(2) for j in range(3)]).view(2, 3)
    except (TypeError, RuntimeError) as error:
        raise ConfigError(f"This optimizer cannot be used as a local solver: {error}") from error
    if not torch.allclose(together, alone, rtol=1e-12, atol=0.0):
        raise ConfigError(
            f"{getattr(factory, '__name__', factory)} mixes the elements of a tensor, so stacked clients would "
            "influence one another; use an elementwise optimizer such as SGD, Adam, AdamW, RMSprop or Adagrad."
        )


def _gradient(rows: Tensor) -> Tensor:
    if rows.grad is None:
        raise ConfigError("step() needs rows.grad; run backward first.")
    return rows.grad


def _compose(select: Any, same: Any, rows: Tensor) -> Any:
    if isinstance(same, slice):
        return select
    return torch.arange(rows.shape[0], device=rows.device)[select][same]
