"""Metrics of a client's test rows: by name, or a function of the caller's own.

A metric is a function of the outputs (N, ...) and the targets (N, ...) of one client, in this one
place; a run's number is the mean over clients. If it is not defined for a client (AUC of a
single class) it is NaN, and the client is left out of the mean.

The normalized mean squared error (nMSE) is the mean squared error over the variance of the targets
(Liang et al., "Model-protected multi-task learning", section 5.3, which does not say which
variance). Here it is the variance of the evaluated targets themselves (the test side's for a test
error) with divisor n: so a constant prediction at the mean of these targets scores exactly 1, and a
number is comparable between methods whatever they were trained on. Each task is normalized by its
own variance; the pooled error takes all examples as those of one task. Recall at 5 is the share of
the labels that are there which are among the 5 largest outputs, over all examples of a client: the
metric of StackOverflow tag prediction (Reddi et al., "Adaptive federated optimization", ICLR 2021).
A run with the loss of a quantile is judged by the pinball loss at its level, in the target's units,
and has a squared error only if that is asked for.

All numbers come from records without noise: on private records they are not private.
"""

from __future__ import annotations

import math
import numbers
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor

from ..data import DataSpec
from ..errors import ConfigError
from ..local.losses import Loss, is_quantile
from .client_scores import (
    RECALL_AT,
    auc,
    balanced_accuracy,
    f1,
    mae,
    mean_score,
    micro_auc,
    recall,
    rmse,
)

CUSTOM = "custom_"
"""The prefix of the names of metrics that are functions of the caller's: no other column has such a
name."""
Kind = Literal["classes", "labels", "many labels", "numbers", "number"]
"""The kind of the targets: one class, up to 5 labels, more labels, several real targets, or one."""
MetricFunction = Callable[[Tensor, Tensor], float]
"""(outputs (N, ...), targets (N, ...)) of the N >= 1 test rows of one client, on the CPU -> a
number; NaN if it is not defined."""


@dataclass(frozen=True)
class Metric:
    """A number of one client's test rows.

    Args:
        name: in the history, tables and files.
        function: of outputs and targets; none of ``"loss"``, which is the run's own, of
            ``"pinball"``, whose level is that of its loss, and of ``"nmse"``, which follows from
            the mean squared error.
        higher_is_better: False for errors.
        kinds: the tasks that have it by name.
        own: True if the function is the caller's, and may be wrong.
    """

    name: str
    function: MetricFunction | None
    higher_is_better: bool
    kinds: tuple[Kind, ...] = ()
    own: bool = False

    def resolution(self, dtype: torch.dtype) -> float:
        """Returns the relative difference up to which two values are equal.

        One model has values that differ in their rounding, by the way in which it was computed.
        If more is better, a metric of the registry is a ratio of whole numbers, rounded in
        float64: sums of thousands of such numbers agree to 2^-40, and two different ones of n
        examples differ by more than 1 / n^2. Others follow the outputs, which are computed in
        ``dtype`` with the relative error eps: a squared residual that is sqrt(eps) times as large
        as the output it is made of has half of the digits, so values agree to sqrt(eps).

        Args:
            dtype: of the models.
        """
        if self.higher_is_better and not self.own:
            return 2.0**-40
        return math.sqrt(torch.finfo(dtype).eps)

    def value(self, outputs: Tensor, targets: Tensor) -> float:
        """Returns the number; NaN if it is not defined or not finite.

        It is NaN too, with a warning, if the caller's function raises: a metric ends no run.

        Args:
            outputs: (N, ...), N >= 1.
            targets: (N, ...).
        """
        try:
            value = self.number(outputs, targets)
        except ConfigError as error:
            warnings.warn(f"{error} Such clients are left out of its mean.", stacklevel=2)
            return math.nan
        if math.isfinite(value):
            return value
        return math.nan

    def number(self, outputs: Tensor, targets: Tensor) -> float:
        """Returns the value of the function.

        Args:
            outputs: (N, ...), N >= 1.
            targets: (N, ...).

        Raises:
            ConfigError: a function of the caller's that raises, or returns something else than a
                number.
        """
        assert self.function is not None
        if not self.own:
            return self.function(outputs, targets)
        try:
            value: Any = self.function(outputs.clone(), targets.clone())  # may write in place
        except Exception as error:
            shapes = (
                f"outputs (N, *{tuple(outputs.shape[1:])}) and targets (N, "
                f"*{tuple(targets.shape[1:])})"
            )
            raise ConfigError(
                f"metric {self.name!r} raises {type(error).__name__} on {shapes}: {error}."
            ) from error
        size = 1
        if isinstance(value, (Tensor, np.ndarray)):
            size = math.prod(value.shape)
        if size == 1 and isinstance(value, (Tensor, np.ndarray, numbers.Real, np.bool_)):
            return float(value)
        if size == 1:
            found = repr(value)
        else:
            found = f"{size} numbers"
        raise ConfigError(
            f"metric {self.name!r} returns {found}; it must return one number for all rows of a "
            "client, such as the mean."
        )


_CLASSES: tuple[Kind, ...] = ("classes", "labels", "many labels")
_LABELS: tuple[Kind, ...] = ("labels", "many labels")
_NUMBERS: tuple[Kind, ...] = ("numbers", "number")
REGISTRY: Mapping[str, Metric] = {
    metric.name: metric
    for metric in (
        Metric("loss", None, False, (*_CLASSES, *_NUMBERS)),  # the loss of the run
        # share of right classes, or of right labels
        Metric("accuracy", mean_score, True, _CLASSES),
        # area under the ROC curve; mean of classes against the rest, or of labels
        Metric("auc", auc, True, _CLASSES),
        # area under the ROC curve, pooled over labels and examples
        Metric("auc_micro", micro_auc, True, _LABELS),
        # mean F1 of the classes or labels that are there or predicted
        Metric("f1", f1, True, _CLASSES),
        # mean recall of the classes there
        Metric("balanced_accuracy", balanced_accuracy, True, ("classes",)),
        # share of the labels among the 5 largest outputs
        Metric("recall_at_5", recall, True, ("many labels",)),
        Metric("pinball", None, False, _NUMBERS),  # mean loss of a quantile
        Metric("mse", mean_score, False, _NUMBERS),  # mean squared error
        Metric("rmse", rmse, False, _NUMBERS),  # root of the mean squared error
        Metric("mae", mae, False, _NUMBERS),  # mean absolute error
        # mean squared error over the variance of the targets
        Metric("nmse", None, False, ("number",)),
    )
}


def kind_of(spec: DataSpec) -> Kind:
    """Returns the kind of prediction."""
    if spec.classes is None:
        if spec.targets:
            return "numbers"
        return "number"
    if spec.labels:
        if spec.labels > RECALL_AT:
            return "many labels"
        return "labels"
    return "classes"


def main_metric(spec: DataSpec, loss: Loss | str) -> Metric:
    """Returns the main metric of such data: ``mse`` for real targets, with the loss of a quantile
    ``pinball``; ``recall_at_5`` for more than 5 labels an example, otherwise ``accuracy``."""
    kind = kind_of(spec)
    if kind in _NUMBERS and is_quantile(loss):
        return REGISTRY["pinball"]
    if kind in _NUMBERS:
        return REGISTRY["mse"]
    if kind == "many labels":
        return REGISTRY["recall_at_5"]
    return REGISTRY["accuracy"]


def has_nmse(spec: DataSpec, loss: Loss | str) -> bool:
    """Returns True if models have a normalized mean squared error: those of one real target, but
    not of its quantiles."""
    return kind_of(spec) == "number" and not is_quantile(loss)


def further_metrics(
    requested: Sequence[Metric], spec: DataSpec, loss: Loss | str
) -> tuple[Metric, ...]:
    """Returns the metrics beside those of every run: the loss, the main one and the nMSE."""
    usual = {"loss", "nmse", main_metric(spec, loss).name}
    return tuple(metric for metric in requested if metric.name not in usual)


def check_metrics(metrics: Sequence[str | MetricFunction]) -> None:
    """Refuses metrics that no data could make valid.

    Raises:
        ConfigError: an unknown name, a function without a name, or a name twice.
    """
    if isinstance(metrics, str) or not isinstance(metrics, Sequence):
        raise ConfigError(f"metrics is {metrics!r}; give a list, such as ['auc', 'f1'].")
    names = [
        metric if isinstance(metric, str) else getattr(metric, "__name__", "") for metric in metrics
    ]
    for metric, name in zip(metrics, names, strict=True):
        is_function = callable(metric) and not isinstance(metric, type) and name.isidentifier()
        if name not in REGISTRY if isinstance(metric, str) else not is_function:
            raise ConfigError(
                f"metrics has {metric!r}; accepted: {', '.join(REGISTRY)}, or in Python functions "
                "with a name of their own (def) that take outputs and targets and return a number."
            )
        if names.count(name) > 1:
            raise ConfigError(f"metrics has {name!r} twice.")


def resolve_metrics(
    metrics: Sequence[str | MetricFunction],
    spec: DataSpec,
    name: str = "data",
    loss: Loss | str = "auto",
) -> tuple[Metric, ...]:
    """Returns the metrics that were asked for.

    Args:
        metrics: names, or functions; one for which less is better has the attribute
            ``higher_is_better = False``.
        spec: of the data.
        name: of the data, for the message.
        loss: of the run.

    Raises:
        ConfigError: see :func:`check_metrics`, or a name that is not for such data or such a loss.
    """
    check_metrics(metrics)
    kind = kind_of(spec)
    left_out = {"pinball": "is for loss=quantile:LEVEL"}
    if is_quantile(loss):
        left_out = {"nmse": "is of means, and the loss is that of a quantile"}
    resolved = []
    for metric in metrics:
        if not isinstance(metric, str):
            better = bool(getattr(metric, "higher_is_better", True))
            column = f"{CUSTOM}{metric.__name__}"  # type: ignore[attr-defined]
            resolved.append(Metric(column, metric, better, own=True))
        elif kind not in REGISTRY[metric].kinds or metric in left_out:
            why = f"is not for {name} ({_WORDS[kind]})"
            if kind in REGISTRY[metric].kinds:
                why = left_out[metric]
            accepted = ", ".join(
                other.name
                for other in REGISTRY.values()
                if kind in other.kinds and other.name not in left_out
            )
            raise ConfigError(f"metrics has {metric!r}, which {why}; accepted: {accepted}.")
        else:
            resolved.append(REGISTRY[metric])
    return tuple(resolved)


_WORDS: Mapping[Kind, str] = {
    "classes": "one class an example",
    "labels": f"up to {RECALL_AT} labels an example",
    "many labels": f"more than {RECALL_AT} labels an example",
    "numbers": "several real targets an example",
    "number": "one real target an example",
}


def invented_rows(
    spec: DataSpec, outputs: tuple[int, ...], rows: int = 16
) -> tuple[Tensor, Tensor]:
    """Returns outputs (N, ...) and targets (N, ...) that come from no record, to try a metric on.

    Args:
        spec: of the data.
        outputs: shape of the outputs of one example.
        rows: N.
    """
    generator = torch.Generator().manual_seed(0)
    z = torch.randn(rows, *outputs, generator=generator)
    if spec.classes is None:
        return z, torch.randn(rows, *spec.targets, generator=generator)
    if spec.targets:
        return z, torch.randint(0, spec.classes, (rows, *spec.targets), generator=generator)
    return z, torch.arange(rows) % spec.classes
