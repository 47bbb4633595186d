"""The tasks of the study, what is measured on them, and models without noise to compare with."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Literal

import torch
from torch import Tensor

from fedmtl import PPDMTL, RecordPrivacy, models
from fedmtl.algorithms.base import Problem, State
from fedmtl.algorithms.linear.data import LinearLoss
from fedmtl.algorithms.linear.solve import fit_own
from fedmtl.data.synthetic.tasks import load_synthetic_tasks
from fedmtl.privacy import open_channel
from fedmtl.schedules import AsynchronousSchedule
from fedmtl.trainer.make_problem import ProblemSettings, build_problem
from fedmtl.trainer.run_channel import bind_schedule, releases_of

Kind = Literal["classification", "regression"]
TASKS, FEATURES, FIRST = 20, 28, 5
LOSS = {"classification": LinearLoss("logistic"), "regression": LinearLoss("squared")}
_BLOCK = 512


@dataclass(frozen=True, eq=False)
class Tasks:
    """A problem, and its records as arrays: x (T, n, d), y (T, n), float64, y in {-1, +1} for classes."""

    kind: Kind
    problem: Problem
    x: Tensor
    y: Tensor
    test_x: Tensor
    test_y: Tensor

    @property
    def loss(self) -> LinearLoss:
        return LOSS[self.kind]

    @property
    def curvature(self) -> float:
        """The largest curvature of a task's mean loss at any model: the L of step sizes."""
        second = self.x.mT @ self.x / self.x.shape[1]
        return self.loss.smoothness(1.0) * float(torch.linalg.eigvalsh(second)[:, -1].max())

    def errors(self, models_: Tensor) -> Tensor:
        """Share of wrong test labels, or mean squared error, of each task: (..., T, d) -> (..., T)."""
        margins = torch.einsum("tnd,...td->...tn", self.test_x, models_)
        wrong = (
            (margins * self.test_y <= 0).double()
            if self.kind == "classification"
            else margins - self.test_y
        )
        return wrong.square().mean(-1)


@cache
def tasks(kind: Kind, seed: int, records: int = 60) -> Tasks:
    """20 tasks in 28 dimensions whose models have rank 3, with 60 training and 140 test examples as in the paper."""
    data = load_synthetic_tasks(
        TASKS, train_examples=records, features=FEATURES, problem=kind, seed=seed
    )
    model = models.linear_regression(bias=False)
    problem = build_problem(data, model, ProblemSettings(rounds=10**9, seed=seed, dtype="float64"))
    sides = []
    for side in (data.train, data.test):
        y = 2 * side.y.double() - 1 if kind == "classification" else side.y.double()
        sides += [side.x.double().view(TASKS, -1, FEATURES), y.view(TASKS, -1)]
    return Tasks(kind, problem, *sides)


def run(
    own: Tasks,
    algorithm: PPDMTL,
    schedule: AsynchronousSchedule,
    privacy: RecordPrivacy | None,
    *,
    at: Sequence[int],
    replicates: int,
    seed: int,
) -> Iterator[tuple[int, Tensor, State]]:
    """R repetitions as one program: (events so far, virtual time (R,), state) at each number of events in ``at``."""
    bound = bind_schedule(schedule, own.problem.data)
    plans = releases_of(algorithm, own.problem, bound)
    channel = open_channel(privacy, plans, bound.describe(), seed=seed, replicates=replicates)
    state, start, time = (
        algorithm.init(own.problem, replicates),
        0,
        torch.zeros(replicates, dtype=torch.float64),
    )
    for stop in at:
        while start < stop:
            end = min(stop, start + _BLOCK)
            block = bound.activations(seed, start, end, replicates=replicates)
            channel.begin(start, block.clients)
            state, time, start = (
                algorithm.step(own.problem, state, block, channel),
                block.time[:, -1],
                end,
            )
        yield start, time, state
    channel.close()


def personal(state: State) -> Tensor:
    """W = P + Q of every repetition, (R, T, d), as the run left them."""
    own = state.public.get("q")
    if own is None:
        own = state.private.gather("q", torch.arange(state.private.clients)).transpose(0, 1)
    return state.public["shared"] + own


def refined(own: Tasks, shared: Tensor, tau: float) -> Tensor:
    """P + Q (R, T, d) with every q_t fitted to its task's raw records: equation (8) with the ridge tau / 2 ||q||^2."""
    points = shared.reshape(-1, *shared.shape[-2:])
    each = enumerate(zip(own.x, own.y, strict=True))
    fits = [
        fit_own(own.loss, x, y, points[:, t].contiguous(), tau, "frobenius") for t, (x, y) in each
    ]
    return shared + torch.stack(fits, dim=1).reshape(shared.shape)


def alone(own: Tasks, tau: float) -> Tensor:
    """Single-task learning: every task's exact ridge fit of its own records, (T, d)."""
    zero = torch.zeros(FEATURES, dtype=torch.float64)
    return torch.stack(
        [fit_own(own.loss, x, y, zero, tau, "frobenius") for x, y in zip(own.x, own.y, strict=True)]
    )


@dataclass(frozen=True, eq=False)
class Best:
    """The minimizer of equation (2): objective, P and Q (T, d)."""

    objective: float
    shared: Tensor
    own: Tensor


def optimum(own: Tasks, lam: float, tau: float, *, tolerance: float = 1e-9) -> Best:
    """sum_t mean loss + lam ||P||_* + tau / 2 ||Q||^2, by accelerated proximal gradient with restarts, without noise.

    Ends where the proximal gradient is shorter than ``tolerance``; since Q makes the sum strongly convex in Q and the
    nuclear norm bounds P, what is then missing in the objective is below 1e-6.
    """
    lr = 1 / (2 * own.curvature + tau)
    p = q = ahead_p = ahead_q = torch.zeros(TASKS, FEATURES, dtype=torch.float64)
    weight = 1.0
    for _ in range(100_000):
        margins = torch.einsum("tnd,td->tn", own.x, ahead_p + ahead_q)
        scale = (
            -own.y * torch.sigmoid(-margins * own.y)
            if own.kind == "classification"
            else 2 * (margins - own.y)
        )
        gradient = torch.einsum("tn,tnd->td", scale, own.x) / own.x.shape[1]
        u, s, v = torch.linalg.svd(ahead_p - lr * gradient, full_matrices=False)
        new_p = (u * (s - lr * lam).clamp(min=0)) @ v
        new_q = ahead_q - lr * (gradient + tau * ahead_q)
        moved = torch.cat([new_p - ahead_p, new_q - ahead_q])
        uphill = float(-(moved * torch.cat([new_p - p, new_q - q])).sum()) > 0
        following = 1.0 if uphill else (1 + (1 + 4 * weight**2) ** 0.5) / 2
        gain = 0.0 if uphill else (weight - 1) / following
        ahead_p, ahead_q = new_p + gain * (new_p - p), new_q + gain * (new_q - q)
        p, q, weight = new_p, new_q, following
        if float(moved.norm()) / lr < tolerance:
            break
    margins = torch.einsum("tnd,td->tn", own.x, p + q)
    signed = torch.nn.functional.softplus(-margins * own.y)
    losses = signed if own.kind == "classification" else (margins - own.y).square()
    value = losses.mean(1).sum() + lam * torch.linalg.svdvals(p).sum() + tau / 2 * q.square().sum()
    return Best(float(value), p, q)
