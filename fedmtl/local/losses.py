"""Losses with one value per example, and their means per client."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch.nn.functional as F
from torch import Tensor

from ..errors import ConfigError, first_line

Loss = Callable[[Tensor, Tensor], Tensor]
"""(outputs (N, ...), targets (N, ...)) -> (N,)."""


def cross_entropy(outputs: Tensor, targets: Tensor) -> Tensor:
    """Softmax cross-entropy in nats: logits (N, C), int64 labels (N,) -> (N,)."""
    return F.cross_entropy(outputs, targets, reduction="none")


def mse(outputs: Tensor, targets: Tensor) -> Tensor:
    """Squared error, averaged over an example's outputs: (N, ...), (N, ...) -> (N,)."""
    outputs = outputs.reshape(targets.shape) if outputs.numel() == targets.numel() else outputs
    return (outputs - targets).square().reshape(len(targets), -1).mean(1)


def half_mse(outputs: Tensor, targets: Tensor) -> Tensor:
    """Half of :func:`mse`, whose gradient is error times derivative: (N, ...), (N, ...) -> (N,)."""
    return 0.5 * mse(outputs, targets)


def binary_cross_entropy(outputs: Tensor, targets: Tensor) -> Tensor:
    """Logistic loss in nats, averaged over an example's labels: logits (N, ...), {0, 1} (N, ...) -> (N,)."""
    outputs = outputs.reshape(targets.shape) if outputs.numel() == targets.numel() else outputs
    loss = F.binary_cross_entropy_with_logits(outputs, targets.to(outputs.dtype), reduction="none")
    return loss.reshape(len(targets), -1).mean(1)


LOSSES: dict[str, Loss] = {
    "cross_entropy": cross_entropy,
    "mse": mse,
    "half_mse": half_mse,
    "binary_cross_entropy": binary_cross_entropy,
}


def softmax_divergence(outputs: Tensor, others: Tensor) -> Tensor:
    """KL(p || q) + KL(q || p) of the classes' probabilities, in nats: logits (N, C) twice -> (N,)."""
    log_p, log_q = outputs.log_softmax(-1), others.log_softmax(-1)
    return ((log_p.exp() - log_q.exp()) * (log_p - log_q)).reshape(len(outputs), -1).sum(1)


def bernoulli_divergence(outputs: Tensor, others: Tensor) -> Tensor:
    """KL(p || q) + KL(q || p) of probabilities of labels, averaged over the labels: logits (N, ...) twice -> (N,)."""
    gap = (outputs.sigmoid() - others.sigmoid()) * (outputs - others)
    return gap.reshape(len(outputs), -1).mean(1)


DIVERGENCES: dict[Loss, Loss] = {
    cross_entropy: softmax_divergence,
    binary_cross_entropy: bernoulli_divergence,
    mse: mse,
    half_mse: mse,
}
"""The symmetrized Kullback-Leibler divergence of two predictions, of the law whose log-likelihood a loss is; of normal
laws of variance 1 about the outputs it is the squared difference."""


@dataclass(frozen=True)
class Pull:
    """Predictions are pulled to others: ``strength`` times a divergence is added to the losses of the examples.

    Attributes:
        divergence: of two predictions, one value per example.
        others: (K, B, ...), logits or values.
        strength: its weight.
    """

    divergence: Loss
    others: Tensor
    strength: float

    def __call__(self, outputs: Tensor) -> Tensor:
        """Return what is added, (K, B), for outputs (K, B, ...)."""
        return self.strength * example_losses(self.divergence, outputs, self.others)


def divergence_of(loss: Loss) -> Loss:
    """Return the symmetrized divergence of predictions that belongs to a loss.

    Raises:
        ConfigError: a loss of the caller's own, whose outputs are predictions of no known law.
    """
    if loss not in DIVERGENCES:
        raise ConfigError(
            f"the divergence of two predictions is known for the losses {', '.join(LOSSES)}; the loss here is "
            f"{getattr(loss, '__name__', loss)!r}."
        )
    return DIVERGENCES[loss]


def resolve_loss(loss: str | Loss) -> Loss:
    """Return a loss by name, or the given callable.

    Raises:
        ConfigError: an unknown name.
    """
    if callable(loss):
        return loss
    if loss not in LOSSES:
        raise ConfigError(f"loss is {loss!r}; accepted: {', '.join(LOSSES)}, or a function (outputs, targets) -> (N,).")
    return LOSSES[loss]


def example_losses(loss: Loss, outputs: Tensor, targets: Tensor) -> Tensor:
    """Per-example losses of stacked batches: (K, B, ...), (K, B, ...) -> (K, B).

    Raises:
        ConfigError: a loss of the caller's own that fails, or does not return one value per example.
    """
    k, b = outputs.shape[:2]
    outputs = outputs.reshape(k * b, *outputs.shape[2:])
    targets = targets.reshape(k * b, *targets.shape[2:])
    try:
        values = loss(outputs, targets)
    except Exception as error:
        if loss in LOSSES.values() or loss in DIVERGENCES.values():
            raise
        raise ConfigError(
            f"loss fails on outputs of shape {tuple(outputs.shape)} with targets of shape {tuple(targets.shape)}: "
            f"{first_line(error)}."
        ) from error
    if not isinstance(values, Tensor) or values.shape != (k * b,):
        what = f"shape {tuple(values.shape)}" if isinstance(values, Tensor) else f"a {type(values).__name__}"
        raise ConfigError(
            f"loss returned {what}; it must return shape ({k * b},), one value per example (reduction='none')."
        )
    return values.view(k, b)
