"""What a client reaches without anybody else, and what an analyst with the rows of all clients and no privacy does."""

from __future__ import annotations

import math
from statistics import mean

import numpy as np
import torch

from fedmtl import FederatedDataset
from fedmtl.algorithms.linear.classes import fit_classes, log_likelihoods
from fedmtl.contrib.average import SLOPE_RIDGES, Records, average_numbers

Array = np.ndarray
RIDGES = (0.01, 0.1, 0.3, 1.0, 3.0, 10.0, 30.0, 100.0, 300.0, math.inf)
PULLS = np.array([0.001, 0.003, 0.01, 0.03, 0.1, 0.3, 1.0, 3.0])
FOLDS, STEPS = 5, 100
ALONE, ALONE_AVERAGED, OPEN = "alone", "alone, averaged", "by hand, not private"
INTERCEPTS = (0.0, 0.01, 0.03, 0.1, 0.3, 1.0, 3.0, 10.0, math.inf)


def alone(data: FederatedDataset) -> dict[str, float]:
    """Return the mean error over clients of tuned models, and of averaged ones."""
    errors = []
    for client in range(len(data)):
        (x, y), (x_test, y_test) = (rows_of(data, side, client) for side in ("train", "test"))
        if len(y) and len(y_test):
            errors.append(
                (_numbers if data.classes is None else _classes)(x, y, x_test, y_test, data)
            )
    return dict(zip((ALONE, ALONE_AVERAGED), map(mean, zip(*errors, strict=True)), strict=True))


def rows_of(data: FederatedDataset, side: str, client: int) -> tuple[Array, Array]:
    """Return the features (n, d) and the targets (n,) of a client's training or test rows."""
    first, end = getattr(data, side).offsets[client : client + 2].tolist()
    x, y = data.gather(side, torch.arange(first, end), dtype=torch.float64)
    return x.flatten(1).numpy(), y.numpy()


def open_by_hand(data: FederatedDataset) -> dict[str, float]:
    """Return the mean error over clients of what an analyst with all rows at hand would do, without privacy.

    One model for all clients, of the least mean squared error of records left out one at a time: own ridge
    regressions, or an own intercept and own slopes that penalties of 9 and 10 strengths pull to a regression on the
    pooled rows, or on rows less the means of their client. ClientStates slopes of infinite penalty are the empirical-Bayes
    intercept. The pooled regression is not fitted again without each record.
    """
    clients = [(rows_of(data, "train", i), rows_of(data, "test", i)) for i in range(len(data))]
    clients = [(train, test) for train, test in clients if len(train[1]) and len(test[1])]
    if data.classes is not None:
        return {OPEN: _open_classes(clients, data.classes)}
    bases = [pooled([train for train, _ in clients], within) for within in (False, True)]
    left_out, errors = [], []
    for (x, y), (x_test, y_test) in clients:
        records = Records.of(x, y, True, data.limit)
        found = [records.fits(np.zeros_like(bases[0]), 0.0, SLOPE_RIDGES)]
        found += [records.fits(base, kappa, SLOPE_RIDGES) for base in bases for kappa in INTERCEPTS]
        models = np.concatenate([each for each, _ in found])
        predicted = np.clip(x_test @ models[:, :-1].T + models[:, -1], -data.limit, data.limit)
        left_out.append(np.concatenate([each for _, each in found]))
        errors.append(np.mean((predicted - y_test[:, None]) ** 2, 0))
    chosen = int(np.mean(left_out, 0).argmin())
    return {OPEN: float(np.mean(errors, 0)[chosen])}


def _open_classes(
    clients: list[tuple[tuple[Array, Array], tuple[Array, Array]]], classes: int
) -> float:
    """Return the share of wrong labels of what an analyst with all rows would do about classes: one strength of the
    pull of each client's model to a model of the pooled rows or to zero, or the pooled model itself, by the most hits
    of all clients in five folds (then the largest likelihood). The pooled model is not fitted again for each fold."""
    outputs = 1 if classes == 2 else classes
    rows = [
        tuple((np.append(x, np.ones((len(x), 1)), 1), y.astype(np.int64)) for x, y in client)
        for client in clients
    ]
    x, y = (np.concatenate(parts) for parts in zip(*(train for train, _ in rows), strict=True))
    base = fit_classes(x, y, np.zeros((1, outputs, x.shape[1])), np.array([1e-3]), 1000)[0]
    bases = np.stack([np.zeros_like(base)] * len(PULLS) + [base] * (len(PULLS) + 1))
    pulls = np.append(np.tile(PULLS, 2), 1e6)
    hits, likelihood, wrong = np.zeros(len(pulls)), np.zeros(len(pulls)), []
    for (x, y), (x_test, y_test) in rows:
        right, log_likelihood = _held_out(x, y, bases, pulls)
        hits, likelihood = hits + right, likelihood + log_likelihood
        fits = fit_classes(x, y, bases, pulls, STEPS)
        wrong.append(1 - log_likelihoods(x_test, y_test, fits)[1].mean(1))
    chosen = max(range(len(pulls)), key=lambda place: (hits[place], likelihood[place]))
    return float(np.mean(wrong, 0)[chosen])


def _held_out(x: Array, y: Array, bases: Array, pulls: Array) -> tuple[Array, Array]:
    """Return the hits and the log likelihood of the records of five folds by the fits without them, (m,) each."""
    fold = np.random.default_rng(0).permutation(len(y)) % FOLDS
    hits, likelihood = np.zeros(len(pulls)), np.zeros(len(pulls))
    for held in range(min(FOLDS, len(y))):
        out = fold == held
        fits = fit_classes(x[~out], y[~out], bases, pulls, STEPS) if (~out).any() else bases
        of_fold, right = log_likelihoods(x[out], y[out], fits)
        hits, likelihood = hits + right.sum(1), likelihood + of_fold.sum(1)
    return hits, likelihood


def pooled(rows: list[tuple[Array, Array]], within: bool) -> Array:
    """Return [weights, bias] of a regression on the rows of all clients, or on rows less their client's means."""
    x = np.concatenate([x - x.mean(0) * within for x, _ in rows])
    y = np.concatenate([y - y.mean() * within for _, y in rows])
    center, level = x.mean(0), y.mean()
    gram = (x - center).T @ (x - center) + 1e-3 * np.eye(x.shape[1])
    w = np.linalg.solve(gram, (x - center).T @ (y - level))
    whole_x, whole_y = (np.concatenate(parts) for parts in zip(*rows, strict=True))
    return np.append(w, whole_y.mean() - whole_x.mean(0) @ w)


def _numbers(
    x: Array, y: Array, x_test: Array, y_test: Array, data: FederatedDataset
) -> tuple[float, float]:
    """Return the squared errors of a ridge regression chosen by records left out, and of the average."""
    tuned = np.clip(x_test @ (w := ridge(x, y, data.limit))[:-1] + w[-1], -data.limit, data.limit)
    with np.errstate(divide="ignore"):  # the logarithm of a prior weight of 0
        w, _ = average_numbers(x, y, np.zeros(x.shape[1] + 1), True, math.inf, data.limit)
    averaged = np.clip(x_test @ w[:-1] + w[-1], -data.limit, data.limit)
    return float(np.mean((tuned - y_test) ** 2)), float(np.mean((averaged - y_test) ** 2))


def ridge(x: Array, y: Array, limit: float) -> Array:
    """Return [weights, bias] of a ridge regression whose penalty leaves records out one at a time; the bias is free.

    Features are divided by their deviations, which are pulled to .4 with the weight of ten rows.
    """
    n, center = len(x), x.mean(0)
    spread = np.sqrt((n * x.var(0) + 10 * 0.4**2) / (n + 10))
    u, s, vt = np.linalg.svd((x - center) / spread, full_matrices=False)
    along, best, least = u.T @ (y - y.mean()), np.zeros(x.shape[1] + 1), math.inf
    for penalty in RIDGES:
        shrunk = s**2 / (s**2 + penalty)
        free = 1 - 1 / n - (u**2) @ shrunk
        left_out = (y - y.mean() - u @ (shrunk * along)) / np.maximum(free, 1e-9)
        predicted = np.where(free > 1e-9, np.clip(y - left_out, -limit, limit), 0.0)
        if (error := float(np.mean((predicted - y) ** 2))) < least:
            w = vt.T @ (shrunk / np.where(s > 0, s, 1.0) * along) / spread
            best, least = np.append(w, y.mean() - w @ center), error
    return best


def _classes(
    x: Array, y: Array, x_test: Array, y_test: Array, data: FederatedDataset
) -> tuple[float, float]:
    """Return the shares of wrong labels of the regression with the most hits in five folds (then the likeliest), and of
    the average by hits and a tenth of the log likelihood."""
    x, x_test = (np.append(rows, np.ones((len(rows), 1)), 1) for rows in (x, x_test))
    y, y_test = y.astype(np.int64), y_test.astype(np.int64)
    bases = np.zeros((len(PULLS), 1 if data.classes == 2 else int(data.classes or 0), x.shape[1]))
    hits, likelihood = _held_out(x, y, bases, PULLS)
    fits = fit_classes(x, y, bases, PULLS, STEPS)
    tuned = max(range(len(PULLS)), key=lambda place: (hits[place], likelihood[place]))
    weights = np.exp((logs := hits + 0.1 * likelihood) - logs.max())
    averaged = np.tensordot(weights / weights.sum(), fits, 1)
    chosen = np.stack([fits[tuned], averaged])
    wrong = 1 - log_likelihoods(x_test, y_test, chosen)[1].mean(1)
    return float(wrong[0]), float(wrong[1])
