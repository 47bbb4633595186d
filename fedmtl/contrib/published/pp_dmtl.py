"""PP-DMTL as printed, for reproduction (Xie et al., KDD 2017, Algorithm 1).

Its epsilon is infinite. A task keeps q_t, moves it on its raw records, and sends the noised
gradient there:

    q_t = q_t - a1 ((1/n_t) sum_j grad l(x_tj . (p_t + q_t), y_tj) + tau q_t)           lines 9, 10
    z1, z2 of density prop. to exp(-b ||z||_2)                                          line 11
    b1 = epsilon_1 / S1, b2 = epsilon_2 / S2                                            (12)
    G_t = (1/n_t) sum_j grad l(x_tj . (p_t + q_t + z1), y_tj) + z2                      lines 12, 13

and the server takes the three steps of :mod:`fedmtl.algorithms.pp_dmtl.algorithm`. Theorem 3.5 is
of one iteration: with S1 = 2 a1 C1 C2 / n_t, Lemma 1 bounds the change of a step of q_t by the
replacement of a record, from the *same* q_t. Every further step adds S1 and shrinks the former
change by 1 - a1 tau at least, so after k iterations q_t may have moved by S1 (1 - (1 - a1 tau)^k) /
(a1 tau).
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor

from ..._check import NonNegative, Positive
from ...algorithms.base import Problem, State
from ...algorithms.linear.solve import fit_own
from ...algorithms.one_at_a_time import Answer
from ...algorithms.pp_dmtl.algorithm import PPDMTL
from ...errors import PrivacyError
from ...privacy import (
    ActivationChannel,
    GradientPlan,
    L2LaplaceNoise,
    PublishedClaim,
    RecordPrivacy,
)
from ...schedules import Block, BoundSchedule

REASON = (
    "the claim is of one iteration, and bounds a step of q_t from the same q_t; q_t is a private "
    "state without noise, whose sensitivity after k iterations grows up to "
    "S1 (1 - (1 - a1 tau)^k) / (a1 tau)"
)


@dataclass(frozen=True, kw_only=True)
class PublishedPPDMTL(PPDMTL):
    """Algorithm 1 as printed, with noise of equation (12), ``mechanism="l2_laplace"``.

    Args:
        tau: see :class:`PPDMTL`; above 0, so that the initial single-task fits of Algorithm 1
            exist.
        a1: see :class:`PPDMTL`; the default is that of section 4.1.
        a2: see :class:`PPDMTL`; the default is that of section 4.1.
        refine: see :class:`PPDMTL`; the paper has no fit of q_t after training.
    """

    tau: Positive = 1e-3
    a1: NonNegative = 0.1
    a2: Positive | Literal["auto"] | None = 0.1
    refine: bool = False

    by_client = ("returned",)  # q_t is private here
    name = "pp_dmtl_published"
    title = "PP-DMTL, published"

    def plan(self, problem: Problem, schedule: BoundSchedule) -> tuple[GradientPlan]:
        """Plans the release of :class:`PPDMTL`, with the claim of Theorem 3.5."""
        (plan,) = super().plan(problem, schedule)

        def claimed(multiplier: float) -> float:
            return claimed_epsilon(multiplier, self.batch_rate)

        claim = PublishedClaim(claimed, REASON)
        return (replace(plan, published=claim, given_noise=_only_l2_laplace),)

    def init(self, problem: Problem, replicates: int = 1) -> State:
        """Starts as :class:`PPDMTL`, but from single-task fits q_t.

        These are private, (T, R, p) float64. ``acted``, int64 (R, T), counts activations.
        """
        public = super().init(problem, replicates).public
        public.pop("q")
        public["acted"] = torch.zeros(replicates, problem.clients, dtype=torch.int64)
        size = (replicates, problem.dimension)
        store = problem.client_store({"q": (size, torch.float64)})
        data = self.data(problem)
        zero = torch.zeros(problem.dimension, dtype=torch.float64)
        for task, (x, y) in enumerate(zip(data.x, data.y, strict=True)):
            own = fit_own(self.linear_loss, x, y, zero, self.tau, self.own_penalty)
            store.scatter("q", torch.tensor([task]), own.expand(1, *size))
        return State(public, store)

    def step(
        self, problem: Problem, state: State, block: Block, channel: ActivationChannel
    ) -> State:
        """Computes all activations of a block, of all replicates; in place."""
        data = self.data(problem)
        public = state.public
        server = {name: public[name].numpy() for name in ("shared", "stale")}
        a2 = self.constants(problem)
        for tasks in block.client.T:
            points = self._query_noise(problem, public["acted"], tasks, channel)  # line 11: z1
            for task in tasks[tasks >= 0].unique().tolist():
                runs = torch.nonzero(tasks == task)[:, 0]
                x = data.x[task]
                y = data.y[task]
                row = state.private.gather("q", torch.tensor([task]))
                p = public["returned"][runs, task]
                q = row[0, runs]
                factors = self.linear_loss.factors_of(p + q, x, y)
                drawn = channel.members(task, runs.numpy())
                if drawn is not None:
                    factors = factors * torch.from_numpy(drawn)
                gradient = factors @ x / (self.batch_rate * len(x))  # line 9
                stepped = self.own_step(q.numpy(), gradient.numpy())  # line 10
                row[0, runs] = torch.from_numpy(stepped)
                points[runs] += p + row[0, runs]
                state.private.scatter("q", torch.tensor([task]), row)
                public["acted"][runs, task] += 1
            sent = [
                self.gradient_factors(*data.arrays[task], points.numpy()[runs])
                for task, runs in channel.acting
            ]
            released = channel.release(sent)  # lines 12 and 13
            acting = tasks.numpy() >= 0
            answer = Answer(
                client=tasks.clamp(min=0).numpy(),
                point=points.numpy(),
                gradient=released,
                answered=acting,
                noise_std=np.zeros(len(tasks)),  # the server of this method reads none
            )
            new_server, new_row = self.proximal_step(a2, server, answer)
            runs = torch.from_numpy(np.flatnonzero(acting))
            for name, new in new_server.items():
                public[name][runs] = torch.from_numpy(new)[runs]
            returned = torch.from_numpy(new_row)
            public["returned"][runs, tasks[runs]] = returned[runs]
        return state

    def _query_noise(
        self, problem: Problem, acted: Tensor, tasks: Tensor, channel: ActivationChannel
    ) -> Tensor:
        """Returns z1 (R, p) of density exp(-b1 ||z||_2).

        It has b1 = epsilon_1 / S1 and S1 = 2 a1 C1 C2 / (q n_t).
        """
        own = tasks.clamp(min=0)  # a run without an activation draws numbers that nobody uses
        runs = torch.arange(len(tasks))
        if channel.noise_multipliers is None:
            return torch.zeros(len(tasks), problem.dimension, dtype=torch.float64)
        multipliers = torch.from_numpy(np.atleast_2d(channel.noise_multipliers))
        each = multipliers.expand(len(tasks), -1)[runs, own]
        scale = 2 * channel.bound * each / (self.batch_rate * problem.data.train.counts[own])
        drawn = L2LaplaceNoise(1.0).draw_each(
            channel.sources,
            "noise/local",
            acted[runs, own][None],
            problem.data.keys[own][None],
            problem.dimension,
        )
        return self.a1 * (torch.from_numpy(drawn[0]) * scale[:, None])

    def _own(self, state: State) -> Tensor:
        return state.private.gather("q", torch.arange(state.private.clients)).transpose(0, 1)


def claimed_epsilon(multiplier: float, rate: float) -> float:
    """Returns the claim of Theorem 3.5 for one iteration.

    It is e = epsilon_1 + epsilon_2, and log(1 + q (exp(e) - 1)) on a subset.

    Args:
        multiplier: of the noise z2 of the release, 1 / epsilon_2, and of z1.
        rate: q, the share of records in an answer.
    """
    epsilon = 2.0 / multiplier
    if rate == 1:
        return epsilon
    return math.log1p(rate * math.expm1(epsilon))


def _only_l2_laplace(privacy: RecordPrivacy) -> dict[str, Any]:
    if privacy.mechanism != "l2_laplace":
        given = f"privacy.mechanism is {privacy.mechanism!r}"
        raise PrivacyError(f"pp_dmtl_published adds L2-Laplace noise: {given}.")
    return {}
