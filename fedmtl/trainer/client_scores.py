"""Scores of one client's outputs against its targets: accuracy, errors, ranks and recalls."""

from __future__ import annotations

import math

import torch
from torch import Tensor

RECALL_AT = 5


def normalized(mse: Tensor, targets: Tensor, offsets: Tensor) -> tuple[Tensor, Tensor]:
    """Returns the normalized mean squared errors of tasks, and of all their examples as one task.

    Args:
        mse: float64 (..., n), each task's mean squared error, such as ``evaluate_each(...).score``.
        targets: (N,), of examples in the order of the tasks.
        offsets: int64 (n + 1,); task t has the examples ``offsets[t]:offsets[t + 1]``.

    Returns:
        float64 (..., n), each task's error over the variance of its own targets, NaN if they do
        not vary or there are none; and float64 (...), squared errors of all examples over
        their squared distances from the common mean, NaN if no target varies.
    """
    y = targets.double()
    counts = offsets.diff()
    owner = torch.arange(len(counts)).repeat_interleave(counts)

    def sums(values: Tensor) -> Tensor:
        return values.new_zeros(len(counts)).index_add_(0, owner, values)

    mean = sums(y) / counts
    variance = sums((y - mean[owner]).square()) / counts
    # Equal targets have a variance of rounding errors, which is not always 0.
    varies = sums((y != y[offsets[:-1].repeat_interleave(counts)]).double()) > 0
    task = torch.where(varies, mse / variance, torch.nan)
    spread = (y - y.mean()).square().sum()
    total = torch.where(counts > 0, mse * counts, 0.0).sum(-1)
    return task, total / spread if bool((y != y[0]).any()) else torch.full_like(total, torch.nan)


def example_scores(outputs: Tensor, y: Tensor) -> Tensor:
    """Returns the accuracy, or for floating targets the squared error, of every example of K
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
    """Returns the numbers of labels of every example that are among its 5 largest outputs, and of
    all its labels.

    Args:
        outputs: (K, B, T), T > 5.
        y: (K, B, T), labels 0 and 1.

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
    """Returns the predicted classes (...) of one logit (..., 1), or of one a class (..., C)."""
    if outputs.shape[-1] == 1:
        return (outputs[..., 0] > 0).long()
    return outputs.argmax(-1)


def mean_score(outputs: Tensor, y: Tensor) -> float:
    return float(example_scores(outputs[None], y[None]).mean())


def rmse(outputs: Tensor, y: Tensor) -> float:
    return math.sqrt(mean_score(outputs, y))


def mae(outputs: Tensor, y: Tensor) -> float:
    return float(_residuals(outputs, y).abs().mean())


def recall(outputs: Tensor, y: Tensor) -> float:
    right, true = found_labels(outputs[None], y[None])
    return float(right.sum() / true.sum())


def class_scores(outputs: Tensor) -> Tensor:
    """Returns the log-odds of every class against all others, float64 (N, C); of one logit itself.

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
    """Returns the mean area under the ROC curve of the columns (N, T) in which both classes occur;
    NaN if there is none.

    The area is that of the Mann-Whitney statistic: the sum of the positive examples' ranks, with
    equal scores at their mean rank.
    """
    from scipy.stats import rankdata

    positive = there.numpy() > 0.5
    up = positive.sum(0)
    pairs = up * (len(scores) - up)
    if not pairs.any() or not bool(torch.isfinite(scores).all()):
        return math.nan
    areas = (rankdata(scores.numpy(), axis=0) * positive).sum(0) - up * (up + 1) / 2
    return float((areas[pairs > 0] / pairs[pairs > 0]).mean())


def auc(outputs: Tensor, y: Tensor) -> float:
    if y.dim() > 1:
        return _columns_auc(outputs.double().reshape(len(y), -1), y.reshape(len(y), -1))
    scores = class_scores(outputs)
    # Of one logit only the second class has a score; the first one would have the same area.
    if scores.shape[1] > 1:
        classes = torch.arange(scores.shape[1])
    else:
        classes = torch.tensor([1])
    return _columns_auc(scores, (y[:, None] == classes).long())


def micro_auc(outputs: Tensor, y: Tensor) -> float:
    return _columns_auc(outputs.double().reshape(-1, 1), y.reshape(-1, 1))


def _counts(outputs: Tensor, y: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Returns the numbers of true positives, predicted and true examples of every class or label,
    float64 (C,) each."""
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


def f1(outputs: Tensor, y: Tensor) -> float:
    both, guessed, true = _counts(outputs, y)
    # A class that is neither there nor predicted has no F1, and is not held against the model.
    defined = guessed + true > 0
    return float((2 * both[defined] / (guessed + true)[defined]).mean())


def balanced_accuracy(outputs: Tensor, y: Tensor) -> float:
    both, _, true = _counts(outputs, y)
    return float((both[true > 0] / true[true > 0]).mean())
