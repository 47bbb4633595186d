"""Losses with one value per example, and their means per client."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal, get_args

import torch
import torch.nn.functional as F
from torch import Tensor

from ..errors import ConfigError, first_line

Loss = Callable[[Tensor, Tensor], Tensor]
"""(outputs (N, ...), targets (N, ...)) -> (N,)."""
Link = Literal["identity", "exp", "exp of share"]
"""The link from outputs to predictions: none, the exponential, or, of targets that are mapped from
[0, HIGH] to [-1, 1], the exponential as the share of HIGH."""
LINKS: tuple[Link, ...] = get_args(Link)


def cross_entropy(outputs: Tensor, targets: Tensor) -> Tensor:
    """Returns the softmax cross-entropy in nats: logits (N, C), int64 labels (N,) -> (N,)."""
    return F.cross_entropy(outputs, targets, reduction="none")


def _shaped(outputs: Tensor, targets: Tensor) -> Tensor:
    """Returns the outputs in the shape of the targets, if they are as many."""
    if outputs.numel() == targets.numel():
        return outputs.reshape(targets.shape)
    return outputs


def mse(outputs: Tensor, targets: Tensor) -> Tensor:
    """Returns the squared error, averaged over an example's outputs: (N, ...), (N, ...) -> (N,)."""
    outputs = _shaped(outputs, targets)
    return (outputs - targets).square().reshape(len(targets), -1).mean(1)


def half_mse(outputs: Tensor, targets: Tensor) -> Tensor:
    """Returns half of :func:`mse`, whose gradient is error times derivative:
    (N, ...), (N, ...) -> (N,)."""
    return 0.5 * mse(outputs, targets)


def binary_cross_entropy(outputs: Tensor, targets: Tensor) -> Tensor:
    """Returns the logistic loss in nats, averaged over an example's labels:
    logits (N, ...), {0, 1} (N, ...) -> (N,)."""
    outputs = _shaped(outputs, targets)
    loss = F.binary_cross_entropy_with_logits(outputs, targets.to(outputs.dtype), reduction="none")
    return loss.reshape(len(targets), -1).mean(1)


@dataclass(frozen=True)
class Huber:
    """Computes Huber's loss of real targets, averaged over an example's outputs: r^2 / 2 of errors
    r up to delta in absolute value, and delta (|r| - delta / 2) of larger ones.

    P. J. Huber, "Robust estimation of a location parameter", Annals of Mathematical Statistics 35,
    1964.

    Args:
        delta: above 0, a public constant, in the units of the targets as they are stored.
    """

    delta: float

    def __call__(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """Returns the losses, (N, ...), (N, ...) -> (N,)."""
        errors = (_shaped(outputs, targets) - targets).abs()
        # One formula for both branches: e^2 / 2 within delta, delta (e - delta / 2) beyond.
        inside = errors.clamp(max=self.delta)
        return (inside * (errors - inside / 2)).reshape(len(targets), -1).mean(1)


@dataclass(frozen=True)
class Quantile:
    """Computes the pinball loss of real targets, averaged over an example's outputs: level (y - f)
    of targets y above the output f, and (1 - level) (f - y) of those below; it is least at the
    quantile of that level.

    R. Koenker and G. Bassett, "Regression quantiles", Econometrica 46, 1978.

    Args:
        level: between 0 and 1, as 0.9.
    """

    level: float

    def __call__(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """Returns the losses, (N, ...), (N, ...) -> (N,)."""
        # Both branches are linear, so the larger one is the loss.
        errors = targets - _shaped(outputs, targets)
        losses = torch.maximum(self.level * errors, (self.level - 1) * errors)
        return losses.reshape(len(targets), -1).mean(1)


@dataclass(frozen=True)
class Poisson:
    """Computes the negative log-likelihood of counts y whose mean is the exponential of the output
    f, without the terms of y alone, averaged over an example's outputs: exp(f) - y f.

    Args:
        mapped: targets are stored as 2 y / HIGH - 1, mapped from a range [0, HIGH] to [-1, 1]. The
            loss is then that of the shares y / HIGH, and exp(f) is the mean of the share: the loss
            of counts over HIGH, up to a constant.
    """

    mapped: bool = False

    def __call__(self, outputs: Tensor, targets: Tensor) -> Tensor:
        """Returns the losses, (N, ...), (N, ...) -> (N,)."""
        outputs = _shaped(outputs, targets)
        counts = targets
        if self.mapped:
            counts = (targets + 1) / 2
        # A mean of any sign of the output is positive; log(y!) does not depend on the model.
        return (outputs.exp() - counts * outputs).reshape(len(targets), -1).mean(1)

    @property
    def link(self) -> Link:
        """Returns the link function from outputs to predictions, the mean counts."""
        if self.mapped:
            return "exp of share"
        return "exp"


LOSSES: dict[str, Loss] = {
    "cross_entropy": cross_entropy,
    "mse": mse,
    "half_mse": half_mse,
    "binary_cross_entropy": binary_cross_entropy,
}


def softmax_divergence(outputs: Tensor, others: Tensor) -> Tensor:
    """Returns the symmetrized divergence KL(p || q) + KL(q || p) of classes' probabilities, in
    nats, (N,).

    Args:
        outputs: (N, C), logits of p.
        others: (N, C), logits of q.
    """
    log_p = outputs.log_softmax(-1)
    log_q = others.log_softmax(-1)
    return ((log_p.exp() - log_q.exp()) * (log_p - log_q)).reshape(len(outputs), -1).sum(1)


def bernoulli_divergence(outputs: Tensor, others: Tensor) -> Tensor:
    """Returns the symmetrized divergence KL(p || q) + KL(q || p) of labels' probabilities, averaged
    over the labels, in nats, (N,).

    Args:
        outputs: (N, ...), logits of p.
        others: (N, ...), logits of q.
    """
    gap = (outputs.sigmoid() - others.sigmoid()) * (outputs - others)
    return gap.reshape(len(outputs), -1).mean(1)


DIVERGENCES: dict[Loss, Loss] = {
    cross_entropy: softmax_divergence,
    binary_cross_entropy: bernoulli_divergence,
    mse: mse,
    half_mse: mse,
}
"""The symmetrized Kullback-Leibler divergence of two predictions, of the law whose log-likelihood a
loss is; of normal laws of variance 1 about the outputs it is the squared difference."""


@dataclass(frozen=True)
class Pull:
    """Predictions are pulled to others: ``strength`` times a divergence is added to the losses of
    the examples.

    Attributes:
        divergence: of two predictions, one value per example.
        others: (K, B, ...), logits or values.
        strength: its weight.
    """

    divergence: Loss
    others: Tensor
    strength: float

    def __call__(self, outputs: Tensor) -> Tensor:
        """Returns the weighted divergences, (K, B), of outputs (K, B, ...)."""
        return self.strength * example_losses(self.divergence, outputs, self.others)


def divergence_of(loss: Loss) -> Loss:
    """Returns the symmetrized divergence of predictions that belongs to a loss.

    Raises:
        ConfigError: a loss of the caller's own, whose outputs are predictions of no known law.
    """
    if loss not in DIVERGENCES:
        raise ConfigError(
            f"the divergence of two predictions is known for the losses {', '.join(LOSSES)}; the "
            f"loss here is {name_of(loss)!r}."
        )
    return DIVERGENCES[loss]


OF_NUMBERS = ("huber", "quantile", "poisson")
"""Names of losses of real targets beside the squared errors; they begin with them, as
``"huber:0.1"``."""
ACCEPTED = f"{', '.join(LOSSES)}, huber:DELTA, quantile:LEVEL, poisson"


def is_of_numbers(loss: object) -> bool:
    """Returns true for a loss, or the name of one, that is Huber's, of a quantile or of counts."""
    if isinstance(loss, str):
        return loss.partition(":")[0] in OF_NUMBERS
    return isinstance(loss, (Huber, Quantile, Poisson))


def is_counts(loss: object) -> bool:
    """Returns true for the loss of counts, or its name."""
    return isinstance(loss, Poisson) or loss == "poisson"


def is_quantile(loss: object) -> bool:
    """Returns true for the loss of a quantile, or its name."""
    return isinstance(loss, Quantile) or (isinstance(loss, str) and loss.startswith("quantile:"))


def link_of(loss: Loss) -> Link:
    """Returns the link function from outputs to predictions of a model that minimizes a loss."""
    if isinstance(loss, Poisson):
        return loss.link
    return "identity"


def linked(outputs: Tensor, link: Link) -> Tensor:
    """Returns the predictions of a model, in the units in which targets are stored.

    Args:
        outputs: of the model, of any shape.
        link: see :func:`link_of`.
    """
    if link == "exp":
        return outputs.exp()
    if link == "exp of share":
        return 2 * outputs.exp() - 1
    return outputs


def resolve_loss(loss: str | Loss, *, mapped: bool = False) -> Loss:
    """Returns a loss by name, or the given callable.

    Args:
        loss: a name, or a function (outputs, targets) -> (N,).
        mapped: the targets are mapped from a public range to [-1, 1], which the loss of counts
            undoes.

    Raises:
        ConfigError: an unknown name, or one with an impossible number.

    Example:
        >>> import torch
        >>> from fedmtl.local import resolve_loss
        >>> resolve_loss("mse")(torch.tensor([[1.0], [3.0]]), torch.tensor([1.0, 1.0])).tolist()
        [0.0, 4.0]
    """
    if mapped and (isinstance(loss, Poisson) or loss == "poisson"):
        return Poisson(mapped=True)
    if callable(loss):
        return loss
    if is_of_numbers(loss):
        return _of_numbers(loss)
    if not isinstance(loss, str) or loss not in LOSSES:
        raise ConfigError(
            f"loss is {loss!r}; accepted: {ACCEPTED}, or a function (outputs, targets) -> (N,)."
        )
    return LOSSES[loss]


def _of_numbers(loss: str) -> Loss:
    """Returns the loss of a name such as ``"huber:0.1"``.

    Raises:
        ConfigError: a number that is missing, impossible or too many.
    """
    name, _, text = loss.partition(":")
    if name == "poisson":
        if text:
            raise ConfigError(f"loss is {loss!r}; accepted: 'poisson', without a number.")
        return Poisson()
    try:
        number = float(text)
    except ValueError:
        number = math.nan
    if name == "huber":
        if not 0 < number < math.inf:
            example = "as huber:0.1, in the units of the targets as they are stored"
            raise ConfigError(
                f"loss is {loss!r}; it must be huber:DELTA with a number DELTA above 0, {example}."
            )
        return Huber(number)
    if not 0 < number < 1:
        raise ConfigError(
            f"loss is {loss!r}; it must be quantile:LEVEL with LEVEL between 0 and "
            "1, as quantile:0.9."
        )
    return Quantile(number)


def name_of(loss: str | Loss) -> str:
    """Returns the name of a loss in settings."""
    if isinstance(loss, str):
        return loss
    if isinstance(loss, Huber):
        corner = loss.delta  # of the loss, not of privacy
        return f"huber:{corner:g}"
    if isinstance(loss, Quantile):
        return f"quantile:{loss.level:g}"
    if isinstance(loss, Poisson):
        return "poisson"
    return next(
        (name for name, known in LOSSES.items() if known is loss),
        getattr(loss, "__name__", repr(loss)),
    )


def example_losses(loss: Loss, outputs: Tensor, targets: Tensor) -> Tensor:
    """Returns the losses of the examples of stacked batches, (K, B).

    A loss of the caller's own is called for one client at a time, so that it cannot mix the
    examples of one with those of another.

    Args:
        loss: of one batch, (N, ...), (N, ...) -> (N,).
        outputs: (K, B, ...).
        targets: (K, B, ...).

    Raises:
        ConfigError: a loss of the caller's own that fails, or does not return one value per
            example.
    """
    k, b = outputs.shape[:2]
    ours = loss in LOSSES.values() or loss in DIVERGENCES.values()
    if k > 1 and not ours and not isinstance(loss, (Huber, Quantile, Poisson)):
        pairs = zip(outputs.split(1), targets.split(1), strict=True)
        return torch.cat([example_losses(loss, *pair) for pair in pairs])
    # A loss sees one batch; copies are not its affair.
    outputs = outputs.reshape(k * b, *outputs.shape[2:])
    targets = targets.reshape(k * b, *targets.shape[2:])
    try:
        values = loss(outputs, targets)
    except Exception as error:
        if ours:
            raise
        raise ConfigError(
            f"loss fails on outputs of shape {tuple(outputs.shape)} with targets of shape "
            f"{tuple(targets.shape)}: {first_line(error)}."
        ) from error
    if not isinstance(values, Tensor) or values.shape != (k * b,):
        found = f"a {type(values).__name__}"
        if isinstance(values, Tensor):
            found = f"shape {tuple(values.shape)}"
        raise ConfigError(
            f"loss returned {found}; it must return shape ({k * b},), one value per example "
            "(reduction='none')."
        )
    return values.view(k, b)
