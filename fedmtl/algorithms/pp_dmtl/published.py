"""PP-DMTL as printed, for reproduction (Xie et al., KDD 2017, Algorithm 1); its epsilon is infinite.

A task keeps q_t, moves it on its raw records (line 10), and sends the noised gradient at p_t + q_t + z1 (lines 11 to
13). Theorem 3.5 is of one iteration: with S1 = 2 a1 C1 C2 / n_t, Lemma 1 bounds how far one step moves q_t when a
record is replaced, from the *same* q_t. Every further step adds S1 and shrinks what was there by 1 - a1 tau at least,
so after k iterations q_t may have moved by S1 (1 - (1 - a1 tau)^k) / (a1 tau).
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor

from ..._check import boolean, given, one_of, positive
from ...errors import ConfigError, PrivacyError
from ...privacy import Channel, GradientPlan, L2LaplaceNoise, PublishedClaim, RecordPrivacy, ScaledRows
from ...privacy.channel import GRADIENT
from ...schedules import Block, BoundSchedule
from ..base import Problem, State
from ..linear.data import LinearData
from ..linear.solve import fit_own, own_step
from .algorithm import PPDMTL

REASON = (
    "the claim is of one iteration, and bounds a step of q_t from the same q_t; q_t is a private state without noise, "
    "whose sensitivity after k iterations grows up to S1 (1 - (1 - a1 tau)^k) / (a1 tau)"
)


@dataclass(frozen=True, kw_only=True)
class PublishedPPDMTL(PPDMTL):
    """Algorithm 1 as printed, with noise of equation (12), ``mechanism="l2_laplace"``.

    Args:
        gauss_seidel: whether the gradient is taken at the new q_t, as printed, and not at the old one.
        exact_q: solve for q_t (Equation 8) in place of one step.
        start: of q_t, ``"zero"``, or ``"single_task"``, the fit of the task alone that Algorithm 1 starts from.
        query_epsilon: epsilon_1, of the noise z1 at the point where the gradient is taken. None: that of the release.
        refine: as for :class:`PPDMTL`, with another default.
    """

    gauss_seidel: bool = True
    exact_q: bool = False
    start: Literal["zero", "single_task"] = "zero"
    query_epsilon: float | None = None
    refine: bool = False

    name = "pp_dmtl_published"

    def __post_init__(self) -> None:
        super().__post_init__()
        boolean(self, gauss_seidel=self.gauss_seidel, exact_q=self.exact_q)
        one_of(self, ("zero", "single_task"), start=self.start)
        positive(self, **given(query_epsilon=self.query_epsilon))
        if self.batch_rate < 1 and self.exact_q:
            raise ConfigError("PublishedPPDMTL.exact_q fits q_t to all records, and batch_rate < 1 takes some.")
        if self.tau == 0 and (self.exact_q or self.start == "single_task"):
            raise ConfigError("PublishedPPDMTL.tau is 0, and the exact fit of q_t has no unique minimum without g.")

    def plan(self, problem: Problem, schedule: BoundSchedule) -> tuple[GradientPlan]:
        """Plan as :class:`PPDMTL`, with what Theorem 3.5 claims."""
        (plan,) = super().plan(problem, schedule)
        claim = PublishedClaim(lambda z: claimed_epsilon(z, self.query_epsilon, self.batch_rate), REASON)
        return (replace(plan, published=claim, given_noise=_only_l2_laplace),)

    def init(self, problem: Problem, replicates: int = 1) -> State:
        """Start as :class:`PPDMTL`; Q is private, (T, R, p) float64, and ``acted`` int64 (R, T) counts activations."""
        public, size = super().init(problem, replicates).public, (replicates, problem.dimension)
        public.pop("own")
        public["acted"] = torch.zeros(replicates, problem.clients, dtype=torch.int64)
        store = problem.client_store({"own": (size, torch.float64)})
        if self.start == "single_task":
            data, zero = self.data(problem), torch.zeros(problem.dimension, dtype=torch.float64)
            for task, (x, y) in enumerate(zip(data.x, data.y, strict=True)):
                own = fit_own(self.linear_loss, x, y, zero, self.tau, self.own_penalty)
                store.scatter("own", torch.tensor([task]), own.expand(1, *size))
        return State(public, store)

    def client(self, *args: Any, **options: Any) -> Any:
        raise NotImplementedError("The published program is computed by step: its tasks add noise inside.")

    def step(self, problem: Problem, state: State, block: Block, channel: Channel) -> State:
        """Compute all activations of a block, of all replicates; in place."""
        for tasks in block.client.T:
            message = self._message(problem, state, tasks, channel)
            self._serve(problem, state.public, tasks.numpy(), channel.release(GRADIENT, message)[0].numpy())
        return state

    def _message(self, problem: Problem, state: State, tasks: Tensor, channel: Channel) -> ScaledRows:
        """Return the gradients of ``tasks`` (R,), -1 for none, at p_t + q_t + z1, whose q_t move first."""
        data, returned, acted = self._work(problem)[0], state.public["returned"], state.public["acted"]
        z1, points = self._query_noise(problem, acted, tasks, channel), torch.zeros_like(returned[:, 0])
        for task in tasks[tasks >= 0].unique().tolist():
            runs, row = torch.nonzero(tasks == task)[:, 0], state.private.gather("own", torch.tensor([task]))
            drawn = channel.members(task, np.zeros(len(runs), dtype=np.int64), runs.numpy())
            p, q = returned[runs, task], row[0, runs]
            points[runs], row[0, runs] = self._moved(data, task, p, q, drawn, z1[runs])
            state.private.scatter("own", torch.tensor([task]), row)
            acted[runs, task] += 1
        return ScaledRows(lambda t, which, where: self.linear_loss.factors(points.numpy()[where], *data.arrays[t]))

    def _moved(
        self, data: LinearData, task: int, p: Tensor, q: Tensor, drawn: np.ndarray | None, z1: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Return p_t + q_t + z1 and the new q_t, (k, p): lines 10 to 12; ``drawn`` (k, n_t) are the records that take
        part, None for all."""
        x, y, loss = data.x[task], data.y[task], self.linear_loss
        if self.exact_q:
            new = fit_own(loss, x, y, p, self.tau, self.own_penalty)
        else:
            taking = 1.0 if drawn is None else torch.from_numpy(drawn)
            gradient = (loss.scale(p + q, x, y) * taking) @ x / (self.batch_rate * len(x))
            new = own_step(q, gradient, self.a1, self.tau, self.own_penalty)
        return p + (new if self.gauss_seidel else q) + z1, new

    def _query_noise(self, problem: Problem, acted: Tensor, tasks: Tensor, channel: Channel) -> Tensor:
        """Return z1 (R, p) of density exp(-b1 ||z||_2) with b1 = epsilon_1 / S1, S1 = 2 a1 C1 C2 / (q n_t)."""
        own, runs = tasks.clamp(min=0), torch.arange(len(tasks))
        if channel.noise_multipliers is None:
            return torch.zeros(len(tasks), problem.dimension, dtype=torch.float64)
        each = torch.from_numpy(np.atleast_2d(channel.noise_multipliers)).expand(len(tasks), -1)[runs, own]
        each = each if self.query_epsilon is None else torch.full_like(each, 1.0 / self.query_epsilon)
        scale = 2 * channel.bound * each / (self.batch_rate * problem.data.train.counts[own])
        address = acted[runs, own][None], problem.data.keys[own][None]
        drawn = L2LaplaceNoise(1.0).draw_each(channel.sources, "noise/local", *address, problem.dimension)
        return self.a1 * (torch.from_numpy(drawn[0]) * scale[:, None])

    def _own(self, state: State) -> Tensor:
        return state.private.gather("own", torch.arange(state.private.clients)).transpose(0, 1)


def claimed_epsilon(multiplier: float, query_epsilon: float | None, rate: float) -> float:
    """Return what Theorem 3.5 claims of one iteration: e = epsilon_1 + epsilon_2; log(1 + q (exp(e) - 1)) on a subset.

    Args:
        multiplier: of the noise z2 of the release, 1 / epsilon_2.
        query_epsilon: epsilon_1, or None for that of the release.
        rate: q, the share of records in an answer.
    """
    whole = 1.0 / multiplier + (1.0 / multiplier if query_epsilon is None else query_epsilon)
    return whole if rate == 1 else math.log1p(rate * math.expm1(whole))


def _only_l2_laplace(privacy: RecordPrivacy) -> dict[str, Any]:
    if privacy.mechanism != "l2_laplace":
        raise PrivacyError(f"pp_dmtl_published adds L2-Laplace noise: privacy.mechanism is {privacy.mechanism!r}.")
    return {}
