"""Shared linear models with the noise of a budget: many methods, each with the whole budget, computed with NumPy.

They are candidates of a hindsight choice (``ceiling.py``), so what a method would have to know first is given to some
of them for free: means, deviations and quantiles of all rows.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import product

import numpy as np
from alone import rows_of

from fedmtl import ClientPrivacy, FederatedDataset, RecordPrivacy
from fedmtl.privacy.accounting.gaussian import gaussian_multiplier

Array = np.ndarray
SUMMED = "record, summed"
"""Records whose noise is added once to the sum of all clients, by a trusted server or in a secure sum."""
UNITS = ("client", "record", SUMMED)
_STEPS = "descent, 60 rounds of 0.025, clip 1"
USUAL = {
    "client": "proximal steps, 20 rounds, 4 of the level, clip 0.1",
    "record": _STEPS,
    SUMMED: _STEPS,
}
"""The model of automatic settings; for clients without the clip that follows a quantile."""
_UNITS = ("", ", standardized for free")


@dataclass(frozen=True)
class Clients:
    """The rows of all clients that have training and test rows.

    Attributes:
        train, test: features and targets of each client.
        limit: absolute value at which predictions are cut off.
    """

    train: list[tuple[Array, Array]]
    test: list[tuple[Array, Array]]
    limit: float

    @classmethod
    def of(cls, data: FederatedDataset) -> Clients:
        """Read the rows of a data set."""
        found = [(rows_of(data, "train", i), rows_of(data, "test", i)) for i in range(len(data))]
        found = [sides for sides in found if len(sides[0][1]) and len(sides[1][1])]
        return cls([train for train, _ in found], [test for _, test in found], data.limit)


@dataclass(frozen=True)
class Space:
    """Features and targets in other units, in which a shared model is learned.

    Attributes:
        center, scale: of the features, (d,).
        level, spread: of the target.
    """

    center: Array
    scale: Array
    level: float
    spread: float

    @classmethod
    def of(cls, clients: Clients, free: bool) -> Space:
        """Return the declared units, or the means and deviations of all rows, as if they had been released for free."""
        x, y = (np.concatenate(parts) for parts in zip(*clients.train, strict=True))
        if not free:
            return cls(np.zeros(x.shape[1]), np.ones(x.shape[1]), 0.0, 1.0)
        return cls(x.mean(0), np.maximum(x.std(0), 1e-6), float(y.mean()), float(y.std()) or 1.0)

    def rows(self, clients: Clients) -> list[tuple[Array, Array]]:
        """Return features with a last 1, and targets, of each client."""
        return [
            (
                np.append((x - self.center) / self.scale, np.ones((len(x), 1)), 1),
                (y - self.level) / self.spread,
            )
            for x, y in clients.train
        ]

    def declared(self, w: Array) -> Array:
        """Return a model in the declared units."""
        slopes = w[:-1] * self.spread / self.scale
        return np.append(slopes, self.level + self.spread * w[-1] - slopes @ self.center)


def of_clients(
    clients: Clients, sigma: float, rng: np.random.Generator
) -> Iterator[tuple[str, Array]]:
    """Yield models that are released with noise for whole clients.

    Proximal steps of all clients, with and without first rounds of the level, and one release of second moments.

    Args:
        clients: their rows.
        sigma: noise multiplier of one release.
        rng: of the noise.
    """
    for free in (False, True):
        space, units = Space.of(clients, free), _UNITS[free]
        rows = space.rows(clients)
        count, p = len(rows), rows[0][0].shape[1]
        grams = np.stack([a.T @ a / len(a) for a, _ in rows])
        moments = np.stack([a.T @ y / len(a) for a, y in rows])
        solve = np.linalg.inv(grams + 0.03 * np.eye(p))
        for rounds, clip in product((1, 5, 20, 60), (0.03, 0.1, 0.3)):
            for first in sorted({0, rounds // 5, min(rounds, 20)}):
                w, kept = np.zeros(p), []
                for step in range(rounds):
                    updates = np.einsum("kij,kj->ki", solve, moments - grams @ w)
                    if step < first:  # the level alone
                        updates = np.zeros((count, p))
                        updates[:, -1] = moments[:, -1] - grams[:, -1] @ w
                    clipped = _clipped(updates, clip).sum(0)
                    noise = sigma * math.sqrt(rounds) * clip * rng.normal(size=p)
                    if step < first:
                        noise[:-1] = 0
                    w = w + (clipped + noise) / count
                    kept.append(w)
                name = f"proximal steps, {rounds} rounds, {first} of the level, clip {clip:g}"
                yield name + units, space.declared(np.mean(kept[len(kept) // 2 :], 0))
        both = np.concatenate([grams.reshape(count, -1), moments], 1)
        for part in (0.5, 0.9):
            clip = float(np.quantile(np.linalg.norm(both, axis=1), part))
            noise = sigma * clip * rng.normal(size=both.shape[1])
            total = (_clipped(both, clip).sum(0) + noise) / count
            gram = total[: p * p].reshape(p, p)
            for ridge in (0.01, 0.03, 0.1, 0.3, 1.0):
                name = f"second moments, clip at {part:g}, ridge {ridge:g}"
                yield name + units, space.declared(_solved(gram, total[p * p :], ridge))


def of_records(
    clients: Clients, sigma: float, rng: np.random.Generator
) -> Iterator[tuple[str, Array]]:
    """Yield models that are released with noise for single records.

    One release of second moments, of rows or of rows less the means of their client, and descent on gradients.

    Args:
        clients: their rows.
        sigma: noise multiplier of one release of a sum over all clients.
        rng: of the noise.
    """
    for free in (False, True):
        space, units = Space.of(clients, free), _UNITS[free]
        rows = space.rows(clients)
        a, y = (np.concatenate(parts) for parts in zip(*rows, strict=True))
        p = a.shape[1]
        inner = np.concatenate([a - a.mean(0) for a, _ in rows])
        inner_y = np.concatenate([y - y.mean() for _, y in rows])
        level = y.mean() + sigma * np.abs(y).max() * rng.normal() / len(y)
        for within, part in product((False, True), (0.9, 1.0)):
            z, target = (inner, inner_y) if within else (a, y)
            norms = np.linalg.norm(z, axis=1)
            clip = float(np.quantile(norms, part)) or 1.0
            cut = float(np.quantile(np.abs(target), part)) or 1.0
            z = _clipped(z, clip) / clip
            target = np.clip(target, -cut, cut) / cut
            noise = math.sqrt(2) * sigma * rng.normal(size=(p, p + 1))
            gram = z.T @ z + (noise[:, :p] + noise[:, :p].T) / 2
            for times in (0.1, 0.3, 1.0, 3.0, 10.0):
                w = (
                    _solved(gram, z.T @ target + noise[:, p], times * sigma * math.sqrt(p))
                    * cut
                    / clip
                )
                if within:  # the level by itself
                    w = np.append(w[:-1], level - a[:, :-1].mean(0) @ w[:-1])
                name = f"second moments{', within' * within}, clip at {part:g}, ridge {times:g}"
                yield name + units, space.declared(w)
        yield "level" + units, space.declared(np.append(np.zeros(p - 1), level))
        for rounds, step, clip in product((20, 60), (0.025, 0.1), (0.3, 1.0)):
            w = _descended(a, y, sigma * math.sqrt(rounds), rounds, step, clip, rng)
            yield f"descent, {rounds} rounds of {step:g}, clip {clip:g}" + units, space.declared(w)


def _descended(
    a: Array,
    y: Array,
    sigma: float,
    rounds: int,
    step: float,
    clip: float,
    rng: np.random.Generator,
) -> Array:
    """Return the mean of the last half of the models of descent with one size of all coordinates, as of AdamNorm."""
    w, mean, square, kept = np.zeros(a.shape[1]), np.zeros(a.shape[1]), 0.0, []
    norms = np.linalg.norm(a, axis=1)
    for t in range(1, rounds + 1):
        errors = a @ w - y
        factor = np.minimum(1, clip / np.maximum(np.abs(errors) * norms, 1e-12))
        gradient = (a.T @ (errors * factor) + sigma * clip * rng.normal(size=len(w))) / len(y)
        mean = 0.9 * mean + 0.1 * gradient
        square = 0.99 * square + 0.01 * float(np.mean(gradient**2))
        w = w - step * (mean / (1 - 0.9**t)) / (math.sqrt(square / (1 - 0.99**t)) + 1e-8)
        kept.append(w)
    return np.mean(kept[rounds // 2 :], 0)


def _clipped(rows: Array, clip: float) -> Array:
    return rows * np.minimum(1, clip / np.maximum(np.linalg.norm(rows, axis=1), 1e-12))[:, None]


def _solved(gram: Array, moment: Array, ridge: float) -> Array:
    """Solve a ridge regression whose noised second moments may have negative eigenvalues."""
    values, vectors = np.linalg.eigh((gram + gram.T) / 2)
    return vectors @ (vectors.T @ moment / (np.maximum(values, 0) + max(ridge, 1e-9)))


def released(
    clients: Clients, unit: str, epsilon: float, rng: np.random.Generator
) -> Iterator[tuple[str, Array]]:
    """Yield the models of a cell, each with noise of its own and with the whole budget."""
    if unit == "client":
        delta = ClientPrivacy(epsilon=epsilon).resolved_delta(len(clients.train))
        yield from of_clients(clients, gaussian_multiplier(epsilon, delta), rng)
        return
    records = sum(len(y) for _, y in clients.train)
    sigma = gaussian_multiplier(epsilon, RecordPrivacy(epsilon=epsilon).resolved_delta(records))
    if unit == "record":  # every client adds noise of its own
        sigma *= math.sqrt(len(clients.train))
    yield from of_records(clients, sigma, rng)
