"""Synthetic linear tasks that share a low-rank or a group-sparse model matrix.

The simulations of Xie, Baytas, Lin, Zhou: "Privacy-preserving distributed multi-task learning with
asynchronous updates", KDD 2017 (20 tasks of 200 examples in 28 dimensions, 30% for training), and
of Liang et al.: "Model-protected multi-task learning", 2020 (320 tasks of 30 training examples in
30 dimensions; tasks of equal models up to the sign for its covariance of tasks in blocks, and
models of few features). Neither paper prints its generator completely; this one is stated in
:func:`load_synthetic_tasks`.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import KW_ONLY, dataclass
from typing import Literal

import torch
from torch import Tensor

from ..._check import Count, NonNegative, Whole, check_arguments
from ...errors import ConfigError
from ...random import derive_key, keyed_bits
from ..dataset import FederatedDataset
from ..examples import Domain, Examples, client_keys
from ..loaders import reader, with_settings
from ..transforms import SHRINK

_BITS = 52


@dataclass(frozen=True)
class SyntheticTasks:
    """Settings of :func:`~fedmtl.data.load_synthetic_tasks`, which takes them as its arguments.

    Args:
        tasks: number of tasks T.
        train_examples: training examples a task.
        test_examples: test examples a task.
        features: dimensions d.
        structure: of W, ``"low_rank"``, ``"group_sparse"``, ``"clustered"`` or ``"common"``.
        rank: r: the rank of W, its rows that are not zero, or the number of clusters; no part of
            ``"common"``.
        deviation: size of each task's own part; above 0, W has full rank.
        problem: ``"regression"``, or ``"classification"`` of two classes.
        noise: standard deviation of the score's noise.
        public_examples: further examples of the tasks, of each in turn, that belong to no client; 0
            for none.
        seed: of all draws.

    Example:
        >>> from fedmtl.data import SyntheticTasks
        >>> settings = SyntheticTasks(tasks=5)
        >>> settings.features, settings.structure
        (28, 'low_rank')
    """

    tasks: Count = 20
    _: KW_ONLY
    train_examples: Count = 60
    test_examples: Count = 140
    features: Count = 28
    structure: Literal["low_rank", "group_sparse", "clustered", "common"] = "low_rank"
    rank: Count = 3
    deviation: NonNegative = 0.0
    problem: Literal["regression", "classification"] = "classification"
    noise: NonNegative = 0.1
    public_examples: Whole = 0
    seed: int = 0


@reader("synthetic_tasks")
@check_arguments
@with_settings(SyntheticTasks)
def load_synthetic_tasks(settings: SyntheticTasks) -> FederatedDataset:
    """Makes tasks y = x . w_t with unit-norm rows x and related models w_t (:func:`true_weights`),
    one client a task.

    Rows are uniform on the unit sphere of d dimensions. ``low_rank``: ``w_t = sqrt(d / r) U v_t``
    with U (d, r) of orthonormal columns, uniform, shared by all tasks, and v_t ~ N(0, I_r).
    ``group_sparse``: the first r entries of w_t are uniform within plus or minus ``sqrt(3 d / r)``,
    the others 0. ``clustered``: ``w_t = s_t u_c`` with a sign s_t and one of r centres u_c ~ N(0,
    I_d), both uniform: given these, each row of W is N(0, Sigma) with a covariance Sigma of tasks
    that is 1 or -1 within a cluster and 0 between them. ``common``: ``w_t = u``, one for all, u ~
    N(0, I_d). All have E||w_t||^2 = d, so that x . w_t has variance 1. Then ``w_t += deviation *
    N(0, I_d)``, the part that a task shares with no other. The score is ``s = x . w_t + noise *
    N(0, 1)``; a regression's target is s, a classification's label is 1 if s is at least 0, else 0.

    Every draw is keyed by (seed, task id, example): a task is the same among 10 and among 1,000
    tasks, and its first examples are the same when there are more.

    Args:
        settings: the fields of :class:`~fedmtl.data.SyntheticTasks`, each an argument of its own:
            ``load_synthetic_tasks(tasks=50, structure="group_sparse")``.

    Returns:
        Ids ``task-0``, ``task-1``, ...; features (d,) with ``||x||_2 <= 1`` (and at least 1 -
        2^-19), float32, and float32 targets or int64 labels.

    Raises:
        ConfigError: an impossible setting.

    Example:
        >>> from fedmtl.data import load_synthetic_tasks
        >>> data = load_synthetic_tasks(tasks=3, train_examples=4, features=5, problem="regression")
        >>> data.ids, data.spec.shape, data.classes, len(data.train)
        (('task-0', 'task-1', 'task-2'), (5,), None, 12)
    """
    tasks = settings.tasks
    features = settings.features
    seed = settings.seed
    if settings.rank > features:
        raise ConfigError(
            f"load_synthetic_tasks.rank is {settings.rank}; it must be at most the number of "
            f"features, {features}."
        )
    ids = tuple(f"task-{i}" for i in range(tasks))
    keys = client_keys(ids)
    weights = true_weights(
        ids, features, settings.structure, settings.rank, settings.deviation, seed
    )
    classified = settings.problem == "classification"
    sides = []
    # so many of each task that they are enough in all
    further = -(-settings.public_examples // tasks)
    for step, count in enumerate((settings.train_examples, settings.test_examples, further)):
        x = keyed_normal(seed, "tasks/x", keys, step, count * features).view(tasks, count, features)
        # shrunk, so that rounding to float32 leaves no row longer than 1
        rows = (SHRINK * x / x.norm(dim=2, keepdim=True)).float()
        score = torch.einsum("tnd,dt->tn", rows.double(), weights)
        score = score + settings.noise * keyed_normal(seed, "tasks/noise", keys, step, count)
        if classified:
            y = (score >= 0).to(torch.int64)
        else:
            y = score.float()
        offsets = torch.arange(tasks + 1) * count
        sides.append(Examples(rows.flatten(0, 1), y.flatten(), offsets))
    public = None
    if settings.public_examples:
        public = _spread(sides[2], tasks, settings.public_examples)
    classes = None
    bound = math.inf
    if classified:
        classes = 2
        bound = 1.0
    return FederatedDataset(
        sides[0],
        sides[1],
        ids,
        classes=classes,
        name=f"synthetic tasks ({settings.structure}, {settings.problem})",
        public=public,
        domain=Domain(math.sqrt(features), 1.0, bound),
    )


def _spread(examples: Examples, tasks: int, count: int) -> Examples:
    """Returns the first ``count`` examples, of each task in turn, so that any number of rows is
    spread over all tasks."""
    x = examples.x.view(tasks, -1, examples.x.shape[1])
    y = examples.y.view(tasks, -1)
    rows = x.transpose(0, 1).flatten(0, 1)
    targets = y.T.flatten()
    # copies, so that the further rows are freed
    return Examples(rows[:count].clone(), targets[:count].clone(), torch.tensor([0, count]))


def true_weights(
    ids: Sequence[str],
    features: int,
    structure: str = "low_rank",
    rank: int = 3,
    deviation: float = 0.0,
    seed: int = 0,
) -> Tensor:
    """Returns the true models W of tasks, float64 (d, T), as :func:`load_synthetic_tasks` states
    them."""
    keys = client_keys(ids)
    own = deviation * keyed_normal(seed, "tasks/deviation", keys, 0, features).T
    return _shared_weights(keys, features, structure, rank, seed) + own


def _shared_weights(keys: Tensor, features: int, structure: str, rank: int, seed: int) -> Tensor:
    if structure == "group_sparse":
        uniform = keyed_unit(seed, "tasks/sparse", keys, 0, rank)
        weights = torch.zeros(features, len(keys), dtype=torch.float64)
        weights[:rank] = math.sqrt(3 * features / rank) * (2 * uniform.T - 1)
        return weights
    # the key of the draws that all tasks share
    shared = torch.zeros(1, dtype=torch.int64)
    if structure == "common":
        return (
            keyed_normal(seed, "tasks/common", shared, 0, features)
            .T.expand(features, len(keys))
            .clone()
        )
    if structure == "clustered":
        centres = keyed_normal(seed, "tasks/centres", shared, 0, features * rank).view(
            features, rank
        )
        uniform = keyed_unit(seed, "tasks/clusters", keys, 0, 2)
        # the product may round up to the rank itself
        cluster = (uniform[:, 0] * rank).long().clamp(max=rank - 1)
        return centres[:, cluster] * torch.where(uniform[:, 1] < 0.5, -1.0, 1.0)
    gaussian = keyed_normal(seed, "tasks/basis", shared, 0, features * rank).view(features, rank)
    basis, triangle = torch.linalg.qr(gaussian)
    # makes the decomposition unique, and the basis uniform
    basis = basis * triangle.diagonal().sign()
    return math.sqrt(features / rank) * basis @ keyed_normal(seed, "tasks/factors", keys, 0, rank).T


def keyed_unit(seed: int, purpose: str, keys: Tensor, step: int, count: int) -> Tensor:
    """Returns uniform numbers strictly between 0 and 1, float64 (n, count), one row a client key
    (n,)."""
    bits = keyed_bits(derive_key(seed, purpose), keys[:, None], step, torch.arange(count)) >> (
        63 - _BITS
    )
    return (bits.double() + 0.5) * 2.0**-_BITS


def keyed_normal(seed: int, purpose: str, keys: Tensor, step: int, count: int) -> Tensor:
    """Returns standard normal numbers, float64 (n, count), one row a client key (n,), by
    inversion."""
    return torch.special.ndtri(keyed_unit(seed, purpose, keys, step, count))
