"""The server's step along a released mean update: post-processing, free of privacy cost."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from .._check import Checked, Positive, one_of
from ..errors import ConfigError

_PREFIX = "server_optimizer."


@dataclass(frozen=True, kw_only=True)
class ServerOptimizer(Checked):
    """An optimizer of ``torch.optim`` that takes the negative released update as its gradient
    (Reddi et al. 2021).

    Args:
        optimizer_name: a class of ``torch.optim``, such as ``"SGD"`` or ``"Adam"``.
        lr: its step size.
        options: its further arguments, such as ``{"momentum": 0.9}``.

    Example:
        >>> from fedmtl import FedAvg, LocalSGD, ServerOptimizer
        >>> server = ServerOptimizer(optimizer_name="Adam", lr=0.01, options={"betas": (0.9, 0.99)})
        >>> FedAvg(local=LocalSGD(lr=0.1), server_optimizer=server).server_optimizer.optimizer_name
        'Adam'
    """

    optimizer_name: str = "SGD"
    lr: Positive = 1.0
    options: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        super().__post_init__()
        names = tuple(
            n for n, c in vars(torch.optim).items() if isinstance(c, type) and n not in ("Optimizer", "LBFGS")
        )
        one_of(self, names, optimizer_name=self.optimizer_name)
        try:
            self._built(torch.zeros(1, requires_grad=True))
        except (TypeError, ValueError) as error:
            raise ConfigError(
                f"ServerOptimizer.options is {self.options!r}, which torch.optim.{self.optimizer_name} does not take: "
                f"{error}."
            ) from error

    def _built(self, parameter: Tensor) -> torch.optim.Optimizer:
        built: torch.optim.Optimizer = getattr(torch.optim, self.optimizer_name)(
            [parameter], lr=self.lr, **dict(self.options)
        )
        return built

    def step(self, public: Mapping[str, Tensor], name: str, update: Tensor) -> dict[str, Tensor]:
        """Returns ``public`` with ``public[name]`` (D,) moved by one step; it also keeps the optimizer's state."""
        parameter = public[name].clone().requires_grad_()
        parameter.grad = -update.to(parameter)
        optimizer = self._built(parameter)
        state = {k.removeprefix(_PREFIX): v.clone() for k, v in public.items() if k.startswith(_PREFIX)}
        if state:
            optimizer.state[parameter] = state
        optimizer.step()
        moments = {_PREFIX + k: v for k, v in optimizer.state[parameter].items() if isinstance(v, Tensor)}
        return {**public, name: parameter.detach(), **moments}


def apply_update(
    public: Mapping[str, Tensor], name: str, update: Tensor, *, lr: float, optimizer: ServerOptimizer | None
) -> dict[str, Tensor]:
    """Returns ``public`` with ``public[name] + lr * update``, or the server optimizer's step with
    ``lr * update``.

    Args:
        public: the public state, not changed.
        name: of the shared model (D,).
        update: the released mean update, float64 (D,).
        lr: the server's step size.
        optimizer: ``None`` for the plain step.
    """
    if optimizer is not None:
        return optimizer.step(public, name, lr * update)
    model = public[name]
    return {**public, name: (model.to(torch.float64) + lr * update.to(model.device)).to(model.dtype)}
