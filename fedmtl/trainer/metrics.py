"""Metrics of a client's test rows: by name, or a function of the caller's own.

A metric is a function of the outputs (N, ...) and the targets (N, ...) of one client, in this one
place; a run's number is the mean over clients. Where it is not defined for a client (AUC of a
single class) it is NaN, and the client is left out of the mean.

The normalized mean squared error (nMSE) is the mean squared error over the variance of the targets
(Liang et al., "Model-protected multi-task learning", section 5.3, which does not say which
variance). Here it is the variance of the evaluated targets themselves (the test side's for a test
error) with divisor n: so a constant prediction at the mean of these targets scores exactly 1, and a
number is comparable between methods whatever they were trained on. Each task is normalized by its
own variance; the pooled error takes all examples as those of one task. Recall at 5 is the share of
the labels that are there which are among the 5 largest outputs, over all examples of a client: the
metric of StackOverflow tag prediction (Reddi et al., "Adaptive federated optimization", ICLR 2021).

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

RECALL_AT = 5
CUSTOM = "custom_"
"""How the names of metrics begin that are functions of the caller's: no other column has such a
name."""
Kind = Literal["classes", "labels", "many labels", "numbers", "number"]
"""What is predicted: one class, up to 5 labels, more labels, several real targets, or one."""
MetricFunction = Callable[[Tensor, Tensor], float]
"""(outputs (N, ...), targets (N, ...)) of the N >= 1 test rows of one client, on the CPU -> a
number; NaN where it is not defined."""


def normalized(mse: Tensor, targets: Tensor, offsets: Tensor) -> tuple[Tensor, Tensor]:
    """Return normalized mean squared errors of tasks, and of all their examples taken as one task.

    Args:
        mse: float64 (..., n), each task's mean squared error, such as ``evaluate_each(...).score``.
        targets: (N,), of examples in the order of the tasks.
        offsets: int64 (n + 1,); task t has the examples ``offsets[t]:offsets[t + 1]``.

    Returns:
        float64 (..., n), each task's error over the variance of its own targets, NaN where they do
        not vary or where there are none; and float64 (...), squared errors of all examples over
        their squared distances from the common mean, NaN where no target varies.
    """
    y = targets.double()
    counts = offsets.diff()
    owner = torch.arange(len(counts)).repeat_interleave(counts)

    def sums(values: Tensor) -> Tensor:
        return values.new_zeros(len(counts)).index_add_(0, owner, values)

    mean = sums(y) / counts
    variance = sums((y - mean[owner]).square()) / counts
    varies = sums((y != y[offsets[:-1].repeat_interleave(counts)]).double()) > 0
    task = torch.where(varies, mse / variance, torch.nan)
    spread = (y - y.mean()).square().sum()
    total = torch.where(counts > 0, mse * counts, 0.0).sum(-1)
    return task, total / spread if bool((y != y[0]).any()) else torch.full_like(total, torch.nan)


def example_scores(outputs: Tensor, y: Tensor) -> Tensor:
    """Return the accuracy, or for floating targets the squared error, of every example of K
    clients.

    Args:
        outputs: (K, B, ...); one logit, one a class, or one a label or target.
        y: (K, B, ...), int64 or floating.

    Returns:
        float64 (K, B), averaged over the labels or targets of an example.
    """
    if y.is_floating_point():
        return _residuals(outputs, y).square().reshape(*y.shape[:2], -1).mean(-1)
    if y.dim() == 2:
        if outputs.dim() == 2:
            outputs = outputs.unsqueeze(-1)
        return (_guess(outputs) == y).to(torch.float64)
    return ((outputs > 0) == (y > 0.5)).to(torch.float64).reshape(*y.shape[:2], -1).mean(-1)


def found_labels(outputs: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
    """Return the labels of every example that are among its 5 largest outputs, and the labels that
    are there.

    Args:
        outputs, y: (K, B, T) each, T > 5.

    Returns:
        Two numbers of labels, float64 (K, B).
    """
    flat = y.flatten(2)
    first = outputs.reshape(flat.shape).topk(RECALL_AT, -1).indices
    return flat.gather(-1, first).sum(-1).to(torch.float64), flat.sum(-1).to(torch.float64)


def _residuals(outputs: Tensor, y: Tensor) -> Tensor:
    if outputs.numel() == y.numel():
        shaped = outputs.reshape(y.shape)
    else:
        shaped = outputs
    return (shaped - y).to(torch.float64)


def _guess(outputs: Tensor) -> Tensor:
    """Predicted classes (...): of one logit (..., 1), or of one a class (..., C)."""
    if outputs.shape[-1] == 1:
        return (outputs[..., 0] > 0).long()
    return outputs.argmax(-1)


def _mean_score(outputs: Tensor, y: Tensor) -> float:
    return float(example_scores(outputs[None], y[None]).mean())


def _rmse(outputs: Tensor, y: Tensor) -> float:
    return math.sqrt(_mean_score(outputs, y))


def _mae(outputs: Tensor, y: Tensor) -> float:
    return float(_residuals(outputs, y).abs().mean())


def _recall(outputs: Tensor, y: Tensor) -> float:
    right, true = found_labels(outputs[None], y[None])
    return float(right.sum() / true.sum())


def class_scores(outputs: Tensor) -> Tensor:
    """Return the log-odds of every class against all others, float64 (N, C); of one logit itself.

    They order examples as the softmax probabilities do, without their rounding to 1.

    Args:
        outputs: (N,) or (N, 1), one logit for the second class, or (N, C), one a class.
    """
    z = outputs.double().reshape(len(outputs), -1)
    if z.shape[1] == 1:
        return z
    others = [torch.cat([z[:, :c], z[:, c + 1 :]], 1).logsumexp(1) for c in range(z.shape[1])]
    return z - torch.stack(others, 1)


def _columns_auc(scores: Tensor, there: Tensor) -> float:
    """Mean area under the ROC curve, by the sum of the positive examples' ranks, of the columns (N,
    T) in which both classes occur; NaN if there is none."""
    from scipy.stats import rankdata

    positive = there.numpy() > 0.5
    up = positive.sum(0)
    pairs = up * (len(scores) - up)
    if not pairs.any() or not bool(torch.isfinite(scores).all()):
        return math.nan
    areas = (rankdata(scores.numpy(), axis=0) * positive).sum(0) - up * (up + 1) / 2
    return float((areas[pairs > 0] / pairs[pairs > 0]).mean())


def _auc(outputs: Tensor, y: Tensor) -> float:
    if y.dim() > 1:
        return _columns_auc(outputs.double().reshape(len(y), -1), y.reshape(len(y), -1))
    scores = class_scores(outputs)
    if scores.shape[1] > 1:
        classes = torch.arange(scores.shape[1])
    else:
        classes = torch.tensor([1])
    return _columns_auc(scores, (y[:, None] == classes).long())


def _micro_auc(outputs: Tensor, y: Tensor) -> float:
    return _columns_auc(outputs.double().reshape(-1, 1), y.reshape(-1, 1))


def _counts(outputs: Tensor, y: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """True positives, predicted and true examples of every class or label, float64 (C,) each."""
    if y.dim() > 1:
        guess = (outputs.reshape(len(y), -1) > 0).double()
        true = (y.reshape(len(y), -1) > 0.5).double()
    else:
        flat = outputs.reshape(len(y), -1)
        classes = max(2, flat.shape[1])
        guess, true = (
            torch.nn.functional.one_hot(labels, classes).double() for labels in (_guess(flat), y)
        )
    return (guess * true).sum(0), guess.sum(0), true.sum(0)


def _f1(outputs: Tensor, y: Tensor) -> float:
    both, guessed, true = _counts(outputs, y)
    defined = guessed + true > 0
    return float((2 * both[defined] / (guessed + true)[defined]).mean())


def _balanced_accuracy(outputs: Tensor, y: Tensor) -> float:
    both, _, true = _counts(outputs, y)
    return float((both[true > 0] / true[true > 0]).mean())


@dataclass(frozen=True)
class Metric:
    """A number of one client's test rows.

    Args:
        name: in the history, tables and files.
        function: of outputs and targets; none of ``"loss"``, which is the run's own, and
            ``"nmse"``, which follows from the mean squared error.
        higher_is_better: False for errors.
        kinds: the tasks that have it by name.
        own: whether the function is the caller's, who may err.
    """

    name: str
    function: MetricFunction | None
    higher_is_better: bool
    kinds: tuple[Kind, ...] = ()
    own: bool = False

    def resolution(self, dtype: torch.dtype) -> float:
        """Return the relative difference up to which two values are equal.

        One model has values that differ in their rounding, by the way in which it was computed.
        Where more is better a metric of the registry is a ratio of whole numbers, rounded in
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
        """Return the number; NaN where it is not defined or not finite, or where the caller's
        function raises, with a warning: a metric ends no run.

        Args:
            outputs, targets: (N, ...) each, N >= 1.
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
            outputs, targets: (N, ...) each, N >= 1.

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
            what = repr(value)
        else:
            what = f"{size} numbers"
        raise ConfigError(
            f"metric {self.name!r} returns {what}; it must return one number for all rows of a "
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
        Metric("accuracy", _mean_score, True, _CLASSES),
        # area under the ROC curve; mean of classes against the rest, or of labels
        Metric("auc", _auc, True, _CLASSES),
        # area under the ROC curve, pooled over labels and examples
        Metric("auc_micro", _micro_auc, True, _LABELS),
        # mean F1 of the classes or labels that are there or predicted
        Metric("f1", _f1, True, _CLASSES),
        # mean recall of the classes there
        Metric("balanced_accuracy", _balanced_accuracy, True, ("classes",)),
        # share of the labels among the 5 largest outputs
        Metric("recall_at_5", _recall, True, ("many labels",)),
        Metric("mse", _mean_score, False, _NUMBERS),  # mean squared error
        Metric("rmse", _rmse, False, _NUMBERS),  # root of the mean squared error
        Metric("mae", _mae, False, _NUMBERS),  # mean absolute error
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


def main_metric(spec: DataSpec) -> Metric:
    """Return ``mse`` for real targets, ``recall_at_5`` for more than 5 labels an example, else
    ``accuracy``."""
    kind = kind_of(spec)
    if kind in _NUMBERS:
        return REGISTRY["mse"]
    if kind == "many labels":
        return REGISTRY["recall_at_5"]
    return REGISTRY["accuracy"]


def further_metrics(asked: Sequence[Metric], spec: DataSpec) -> tuple[Metric, ...]:
    """Return the metrics that are not measured in any case, as the loss, the main one and the nMSE
    of one real target are."""
    usual = ("loss", main_metric(spec).name, *(("nmse",) if kind_of(spec) == "number" else ()))
    return tuple(metric for metric in asked if metric.name not in usual)


def check_metrics(metrics: Sequence[str | MetricFunction]) -> None:
    """Refuse what is no metric, whatever the data.

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
    metrics: Sequence[str | MetricFunction], spec: DataSpec, name: str = "data"
) -> tuple[Metric, ...]:
    """Return the metrics that were asked for.

    Args:
        metrics: names, or functions with an attribute ``higher_is_better`` where less is better.
        spec: of the data.
        name: of the data, for the message.

    Raises:
        ConfigError: see :func:`check_metrics`, or a name that is not for such data.
    """
    check_metrics(metrics)
    kind = kind_of(spec)
    resolved = []
    for asked in metrics:
        if not isinstance(asked, str):
            better, column = (
                bool(getattr(asked, "higher_is_better", True)),
                f"{CUSTOM}{asked.__name__}",
            )  # type: ignore[attr-defined]
            resolved.append(Metric(column, asked, better, own=True))
        elif kind not in REGISTRY[asked].kinds:
            accepted = ", ".join(other.name for other in REGISTRY.values() if kind in other.kinds)
            raise ConfigError(
                f"metrics has {asked!r}, which is not for {name} ({_WORDS[kind]}); "
                f"accepted: {accepted}."
            )
        else:
            resolved.append(REGISTRY[asked])
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
    """Return outputs (N, ...) and targets (N, ...) that come from no record, to try a metric on.

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


def distribution(scores: Tensor, *, higher_is_better: bool) -> dict[str, float]:
    """Return the mean, median, mean of the worst tenth and standard deviation of clients' scores,
    and their number; NaN and 0 without any.

    The worst tenth are the ceil(n / 10) clients with the lowest scores, of an error those with the
    largest. The deviation has divisor n.

    Args:
        scores: (n,).
        higher_is_better: False for errors.
    """
    tenth = math.ceil(len(scores) / 10)
    ordered = torch.sort(scores, descending=not higher_is_better).values
    return {
        "mean": float(scores.mean()),
        "median": float(np.median(scores.numpy())) if len(scores) else math.nan,
        "worst_tenth": float(ordered[:tenth].mean()),
        "spread": float(scores.std(correction=0)) if len(scores) else math.nan,
        "clients": len(scores),
    }


def compared(
    scores: Tensor, others: Tensor, *, higher_is_better: bool, resolution: float = 0.0
) -> Tensor:
    """Return by client 1 where its score is better than the other one, 0 where they are equal and
    -1 where it is worse, int64 (n,). What is not finite is worse than every number.

    Args:
        scores, others: (n,).
        higher_is_better: False for errors.
        resolution: relative difference up to which two scores are equal, see
            :meth:`Metric.resolution`.
    """
    sign = 1.0
    if not higher_is_better:
        sign = -1.0
    own, other = (
        torch.where(torch.isfinite(values), sign * values.double(), -1e300)
        for values in (scores, others)
    )
    equal = (own - other).abs() <= resolution * torch.maximum(own.abs(), other.abs())
    return torch.where(equal, 0, torch.where(own > other, 1, -1))


def shares(
    scores: Tensor, others: Tensor, *, higher_is_better: bool, resolution: float = 0.0
) -> tuple[float, float, float]:
    """Return the shares of the clients that score better, equal and worse than ``others``, see
    :func:`compared`."""
    signs = compared(scores, others, higher_is_better=higher_is_better, resolution=resolution)
    better, equal, worse = ((signs == sign).double().mean().item() for sign in (1, 0, -1))
    return better, equal, worse
