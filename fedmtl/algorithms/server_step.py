"""The server's step along a released mean update: post-processing, free of privacy cost."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from .._check import Checked, Positive, one_of
from .._devices import on_device
from ..errors import ConfigError

_PREFIX = "server_optimizer."


class AdamNorm(torch.optim.Optimizer):
    """Adam with one second moment for all coordinates, as AdaGrad-Norm has one sum of squares (Ward
    et al.: "AdaGrad stepsizes: sharp convergence over nonconvex landscapes", ICML 2019).

        m <- beta_1 m + (1 - beta_1) g,     v <- beta_2 v + (1 - beta_2) ||g||^2 / D,
        w <- w - lr (m / (1 - beta_1^t)) / (sqrt(v / (1 - beta_2^t)) + eps)

    The noise of a release has the same size in every coordinate. Adam divides each coordinate by
    its own size, so that one with hardly more than noise moves about as far as one with a gradient.
    Here the lengths of the moves are in the ratio of the gradients, as in gradient descent.

    Args:
        params: the parameters, each with moments of its own.
        lr: step size.
        betas: decay of the first and of the second moment.
        eps: added to the root, against a division by zero.

    Example:
        >>> import torch
        >>> from fedmtl.algorithms.server_step import AdamNorm
        >>> w = torch.zeros(2, requires_grad=True)
        >>> w.grad = torch.tensor([3.0, 4.0])
        >>> AdamNorm([w], lr=0.1).step()
        >>> w.tolist()  # the root mean square of the gradient is 5 / sqrt(2)
        [-0.08485281467437744, -0.11313708871603012]
    """

    def __init__(
        self,
        params: Iterable[Tensor],
        lr: float = 0.001,
        betas: tuple[float, float] = (0.9, 0.99),
        eps: float = 1e-8,
    ) -> None:
        if not all(0 <= beta < 1 for beta in betas):
            raise ValueError(f"betas are {betas}, but have to be at least 0 and below 1")
        super().__init__(params, {"lr": lr, "betas": betas, "eps": eps})

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        """Moves the parameters by one step; there is no loss to be computed again."""
        for group in self.param_groups:
            first, second = group["betas"]
            for parameter in group["params"]:
                gradient = parameter.grad
                state = self.state[parameter]
                if not state:
                    state["step"] = torch.zeros(())
                    state["exp_avg"] = torch.zeros_like(parameter)
                    state["exp_avg_sq"] = gradient.new_zeros(())
                state["step"] += 1
                state["exp_avg"].lerp_(gradient, 1 - first)
                state["exp_avg_sq"].lerp_(gradient.square().mean(), 1 - second)
                count = float(state["step"])
                scale = (state["exp_avg_sq"] / (1 - second**count)).sqrt() + group["eps"]
                parameter -= group["lr"] / (1 - first**count) * state["exp_avg"] / scale


@dataclass(frozen=True, kw_only=True)
class ServerOptimizer(Checked):
    """Makes the server's step by an optimizer (Reddi et al. 2021): one of ``torch.optim``, or
    :class:`AdamNorm`.

    Its gradient is the negative released update.

    Args:
        optimizer_name: a class of ``torch.optim``, such as ``"SGD"`` or ``"Adam"``, or
            ``"AdamNorm"``.
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
        # LBFGS evaluates the loss again, which a server cannot
        unusable = ("Optimizer", "LBFGS")
        classes = {n: c for n, c in vars(torch.optim).items() if isinstance(c, type)}
        names = (AdamNorm.__name__, *(name for name in classes if name not in unusable))
        one_of(self, names, optimizer_name=self.optimizer_name)
        try:
            self._built(torch.zeros(1, requires_grad=True))
        except (TypeError, ValueError) as error:
            optimizer = self.optimizer_name
            if optimizer != AdamNorm.__name__:
                optimizer = f"torch.optim.{optimizer}"
            raise ConfigError(
                f"ServerOptimizer.options is {self.options!r}, "
                # PyTorch's own words name the option
                f"which {optimizer} does not take: {error}."
            ) from error

    def _built(self, parameter: Tensor) -> torch.optim.Optimizer:
        optimizer: Any = AdamNorm
        if self.optimizer_name != AdamNorm.__name__:
            optimizer = getattr(torch.optim, self.optimizer_name)
        built: torch.optim.Optimizer = optimizer([parameter], lr=self.lr, **dict(self.options))
        return built

    def step(self, public: Mapping[str, Tensor], name: str, update: Tensor) -> dict[str, Tensor]:
        """Moves ``public[name]`` (D,) by one step.

        Args:
            public: the public state, with the optimizer's own tensors.
            name: of the shared model in it.
            update: (D,), the noised mean update of the clients.

        Returns:
            The new public state, which includes the optimizer's.
        """
        parameter = public[name].clone().requires_grad_()
        # the optimizer descends, so the gradient is the negative update
        parameter.grad = -on_device(update, parameter.device).to(parameter.dtype)
        optimizer = self._built(parameter)
        state = {}
        for key, value in public.items():
            if key.startswith(_PREFIX):
                state[key.removeprefix(_PREFIX)] = value.clone()
        if state:
            optimizer.state[parameter] = state
        optimizer.step()
        moments = {}
        for key, value in optimizer.state[parameter].items():
            if isinstance(value, Tensor):
                moments[_PREFIX + key] = value
        return {**public, name: parameter.detach(), **moments}


def apply_update(
    public: Mapping[str, Tensor],
    name: str,
    update: Tensor,
    *,
    lr: float,
    optimizer: ServerOptimizer | None,
) -> dict[str, Tensor]:
    """Moves the shared model by ``lr * update``, or by the server optimizer's step along it.

    Args:
        public: the public state, not changed.
        name: of the shared model (D,).
        update: the released mean update, float64 (D,).
        lr: the server's step size.
        optimizer: ``None`` for the plain step.

    Returns:
        The public state with the moved model, in the dtype that it had.

    Example:
        >>> import torch
        >>> from fedmtl.algorithms import apply_update
        >>> public = {"global": torch.zeros(2)}
        >>> update = torch.tensor([1.0, -2.0], dtype=torch.float64)
        >>> apply_update(public, "global", update, lr=0.5, optimizer=None)["global"].tolist()
        [0.5, -1.0]
    """
    if optimizer is not None:
        return optimizer.step(public, name, lr * update)
    model = public[name]
    # added in float64, the precision of the release
    moved = model.to(torch.float64) + lr * on_device(update, model.device)
    return {**public, name: moved.to(model.dtype)}
