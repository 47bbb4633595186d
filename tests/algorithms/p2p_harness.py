"""Small peer-to-peer problems, runs without the trainer, and the update written out as a slow loop."""

import math
from itertools import pairwise

import numpy as np
import torch

from fedmtl.data import FederatedDataset
from fedmtl.graphs import Graph
from fedmtl.privacy import RecordPrivacy

from .harness import problem_of

D = 4
COUNTS = (7, 12, 3, 9, 5, 8)
NOISED = RecordPrivacy(clip_norm=0.4, noise_multiplier=0.5, mechanism="l2_laplace", delta=1e-5)


def agents(loss="logistic", *, counts=COUNTS, d=D, seed=0, model=None, length=0.99, **options):
    """A problem of agents with rows of norm ``length``."""
    rng = np.random.default_rng(seed)
    common, clients = rng.normal(size=d), {}
    for k, n in enumerate(counts):
        x = rng.normal(size=(n, d))
        x *= length / np.linalg.norm(x, axis=1, keepdims=True)
        score = x @ (common + 0.5 * rng.normal(size=d)) + 0.1 * rng.normal(size=n)
        clients[f"a{k}"] = (x, score if loss == "squared" else (score > 0).astype(np.int64))
    classes = None if loss == "squared" else 2
    data = FederatedDataset.from_tensors(clients, test=clients, classes=classes)
    return problem_of(
        data, model=model, loss="mse" if loss == "squared" else "binary_cross_entropy", **options
    )


def random_graph(n, seed=0, density=0.4):
    """Random weights; everyone has a neighbour."""
    rng = np.random.default_rng(seed)
    w = np.triu(rng.uniform(0.2, 2.0, (n, n)) * (rng.random((n, n)) < density), 1)
    for i in range(n):
        if not (w + w.T)[i].any():
            j = (i + 1) % n
            w[min(i, j), max(i, j)] = 1.0
    return Graph(w + w.T, tuple(f"a{k}" for k in range(n)))


def arrays(problem):
    """The agents' x and y, two classes as -1 and 1, without the package's own preparation."""
    train = problem.data.train
    y = train.y.double().numpy() if problem.data.classes is None else 2.0 * train.y.numpy() - 1
    return [(train.x.double().numpy()[a:b], y[a:b]) for a, b in pairwise(train.offsets.tolist())]


def schedule(replicates, events, seed, *, nobody=0.1, count=6):
    rng = np.random.default_rng(seed)
    clients = rng.integers(0, count, (replicates, events))
    clients[rng.random(clients.shape) < nobody] = -1
    return torch.from_numpy(clients)


def slope(loss, margin, y):
    return 2 * (margin - y) if loss == "squared" else -y / (1 + math.exp(y * margin))


def mean_gradient(loss, x, y, theta, clip=math.inf, order=2, size=None):
    """Returns the sum of the clipped gradients of all records over ``size``, their number unless it is given."""
    clip *= 1 - 2.0**-20  # the channel's margin
    total = np.zeros(len(theta))
    for row, target in zip(x, y, strict=True):
        gradient = slope(loss, row @ theta, target) * row
        total += gradient * min(1.0, clip / max(np.linalg.norm(gradient, order), 1e-300))
    return total / (max(len(x), 1) if size is None else size)


def slow(data, weights, loss, clients, *, mu, lam, smooth, noise, clip, order=2, start=None):
    """One replicate, one event at a time, as equation (6) is printed, from zero or ``start``: Theta (n, d)."""
    n, d = len(data), data[0][0].shape[1]
    theta = np.zeros((n, d)) if start is None else start.copy()
    most = max(len(y) for _, y in data)
    for k, i in enumerate(clients.tolist()):
        if i < 0:
            continue
        x, y = data[i]
        c = len(y) / most
        ridge = 1 / len(y) if lam == "inverse" else lam
        alpha = 1 / (1 + mu * c * (smooth + 2 * ridge))
        gradient = (
            mean_gradient(loss, x, y, theta[i], clip, order) + 2 * ridge * theta[i] + noise[k]
        )
        around = sum(weights[i, j] / weights[i].sum() * theta[j] for j in range(n))
        theta[i] = (1 - alpha) * theta[i] + alpha * (around - mu * c * gradient)
    return theta
