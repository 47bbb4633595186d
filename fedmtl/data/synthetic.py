"""Synthetic linear tasks that share a low-rank or a group-sparse model matrix.

The simulations of Xie, Baytas, Lin, Zhou: "Privacy-preserving distributed multi-task learning with asynchronous
updates", KDD 2017 (20 tasks of 200 examples in 28 dimensions, 30% for training), and of Liang et al.: "Effective and
efficient multi-task learning with model-protected knowledge sharing", 2020 (320 tasks of 30 training examples in 30
dimensions). Neither paper prints its generator completely; this one is stated in :func:`make_synthetic_tasks`.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from .._check import non_negative, one_of, positive_int
from ..errors import ConfigError
from ..random import derive_key, keyed_bits
from .dataset import FederatedDataset
from .examples import Examples
from .owners import SHRINK, Domain, data_of
from .split import client_keys

_BITS = 52


@dataclass(frozen=True, eq=False)
class SyntheticTasks:
    """Generated tasks and the models that generated them.

    Args:
        data: one client a task, ids ``task-0``, ``task-1``, ...
        weights: the true models W, float64 (d, T), column t of task t.
        domain: bounds that every row keeps.
    """

    data: FederatedDataset
    weights: Tensor
    domain: Domain


def make_synthetic_tasks(
    tasks: int = 20,
    *,
    train_examples: int = 60,
    test_examples: int = 140,
    features: int = 28,
    structure: Literal["low_rank", "group_sparse"] = "low_rank",
    rank: int = 3,
    deviation: float = 0.0,
    problem: Literal["regression", "classification"] = "classification",
    noise: float = 0.1,
    seed: int = 0,
) -> SyntheticTasks:
    """Tasks y = x . w_t with unit-norm rows x and related models w_t.

    Rows are uniform on the unit sphere of d dimensions. ``low_rank``: ``w_t = sqrt(d / r) U v_t`` with U (d, r) of
    orthonormal columns, uniform, shared by all tasks, and v_t ~ N(0, I_r). ``group_sparse``: the first r entries of
    w_t are uniform within plus or minus ``sqrt(3 d / r)``, the others 0. Both have E||w_t||^2 = d, so that x . w_t
    has variance 1. Then ``w_t += deviation * N(0, I_d)``, what a task shares with no other. The score is
    ``s = x . w_t + noise * N(0, 1)``; a regression's target is s, a classification's label is 1 where s
    is at least 0, else 0.

    Every draw is keyed by (seed, task id, example): a task is the same among 10 and among 1,000 tasks, and its first
    examples are the same when there are more.

    Args:
        tasks: number of tasks T.
        train_examples: training examples a task.
        test_examples: test examples a task.
        features: dimensions d.
        structure: of W, ``"low_rank"`` or ``"group_sparse"``.
        rank: r, the rank of W, or its rows that are not zero.
        deviation: size of each task's own part; above 0, W has full rank.
        problem: ``"regression"``, or ``"classification"`` of two classes.
        noise: standard deviation of the score's noise.
        seed: of all draws.

    Returns:
        Features (d,) with ``||x||_2 <= 1`` (and at least 1 - 2^-19), float32, and float32 targets or int64 labels.

    Raises:
        ConfigError: an impossible setting.
    """
    where = "make_synthetic_tasks"
    positive_int(where, tasks=tasks, train_examples=train_examples, test_examples=test_examples, features=features,
                 rank=rank)  # fmt: skip
    non_negative(where, deviation=deviation, noise=noise)
    one_of(where, ("low_rank", "group_sparse"), structure=structure)
    one_of(where, ("regression", "classification"), problem=problem)
    if rank > features:
        raise ConfigError(f"{where}.rank is {rank}; it must be at most the number of features, {features}.")
    ids = tuple(f"task-{i}" for i in range(tasks))
    keys = client_keys(ids)
    weights = true_weights(keys, features, structure, rank, seed)
    weights = weights + deviation * keyed_normal(seed, "tasks/deviation", keys, 0, features).T
    sides = []
    for step, count in enumerate((train_examples, test_examples)):
        x = keyed_normal(seed, "tasks/x", keys, step, count * features).view(tasks, count, features)
        rows = (SHRINK * x / x.norm(dim=2, keepdim=True)).float()
        score = torch.einsum("tnd,dt->tn", rows.double(), weights)
        score = score + noise * keyed_normal(seed, "tasks/noise", keys, step, count)
        y = score.float() if problem == "regression" else (score >= 0).to(torch.int64)
        offsets = torch.arange(tasks + 1) * count
        sides.append(Examples(rows.flatten(0, 1), y.flatten(), offsets))
    name = f"synthetic tasks ({structure}, {problem})"
    data = FederatedDataset(sides[0], sides[1], ids, classes=2 if problem == "classification" else None, name=name)
    target = 1.0 if problem == "classification" else math.inf
    return SyntheticTasks(data, weights, Domain(math.sqrt(features), 1.0, target))


load_synthetic_tasks = data_of(make_synthetic_tasks)


def true_weights(keys: Tensor, features: int, structure: str, rank: int, seed: int) -> Tensor:
    """The shared part of W, float64 (d, T), for tasks with the keys (T,)."""
    if structure == "group_sparse":
        uniform = keyed_unit(seed, "tasks/sparse", keys, 0, rank)
        weights = torch.zeros(features, len(keys), dtype=torch.float64)
        weights[:rank] = math.sqrt(3 * features / rank) * (2 * uniform.T - 1)
        return weights
    shared = torch.zeros(1, dtype=torch.int64)
    gaussian = keyed_normal(seed, "tasks/basis", shared, 0, features * rank).view(features, rank)
    basis, triangle = torch.linalg.qr(gaussian)
    basis = basis * triangle.diagonal().sign()  # makes the decomposition unique, and the basis uniform
    return math.sqrt(features / rank) * basis @ keyed_normal(seed, "tasks/factors", keys, 0, rank).T


def keyed_unit(seed: int, purpose: str, keys: Tensor, step: int, count: int) -> Tensor:
    """Uniform numbers strictly between 0 and 1, float64 (n, count), one row a client key (n,)."""
    bits = keyed_bits(derive_key(seed, purpose), keys[:, None], step, torch.arange(count)) >> (63 - _BITS)
    return (bits.double() + 0.5) * 2.0**-_BITS


def keyed_normal(seed: int, purpose: str, keys: Tensor, step: int, count: int) -> Tensor:
    """Standard normal numbers, float64 (n, count), one row a client key (n,), by inversion."""
    return torch.special.ndtri(keyed_unit(seed, purpose, keys, step, count))
