"""The proximal point method: clients solve the local objective of FedProx to its minimum.

Li et al.: "Federated Optimization in Heterogeneous Networks", MLSys 2020, with exact local
solutions:

    client k sends  clip(v_k - w^t),   v_k = argmin_v l_k(v) + (mu / 2) ||v - w^t||^2
    w^(t+1) = w^t + (noised mean of the messages)

For linear models only. For squared errors of a real target l_k is half their mean, and the
minimizer solves a linear system. The losses of Huber, of a quantile and of counts are minimized by
Newton steps; of counts mu is in units of the second derivative at w^t, the mean that w^t predicts
for the client, so that it does not depend on the range. For classes it is the mean log loss,
minimized by full-batch accelerated steps at 1 / L. So no local step size has to be tuned, and none
diverges.

In the first rounds the level of a real target can be learned by itself (``intercept_rounds``): a
client then sends the mean of its residuals as the change of the bias, and the server moves the bias
alone. Without these rounds a level far from 0 is first spread over all features, and clients with
little variation in their features take many rounds to undo it.

In the last rounds clients can vote on the models that ``finetune=average`` averages
(``vote_rounds``). The row of a client has D coordinates of the model and one for each candidate;
in the last rounds the first are zero, and the others its :func:`~fedmtl.contrib.average.vote_on` on
the candidates from the released model. So a vote is the release of a round, charged, clipped and
noised like any other, and the model stays as it is. Only the direction of a vote counts: the row is
so long that the clip gives it the length C, and the server divides by C. In other rounds the noise
on the coordinates of the candidates is released with the row, and not used.
"""

from __future__ import annotations

import math
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import ClassVar

import numpy as np
import torch
from torch import Tensor

from .._check import Count, Positive, Whole
from ..algorithms.base import Algorithm, Problem, Public, State
from ..algorithms.client_batch import ClientBatch, ClientStates
from ..algorithms.fedavg import FedAvg
from ..algorithms.linear.classes import fit_classes, flat, layers
from ..algorithms.linear.data import Array, check_linear, records_of
from ..algorithms.rounds import Released
from ..errors import ConfigError
from ..local.losses import Poisson, half_mse, mse
from ..privacy import BoundSampler, ReleasePlan
from .average import (
    LocalAverage,
    half_range,
    high_of,
    level_change,
    proximal_change,
    vote_on,
    votes_on,
)

_ROUNDS_PER_VOTE = 10  # of the run, at least
_FAR = 1e6  # length of a vote before the clip, above any clip norm


@dataclass(frozen=True, kw_only=True)
class ProximalPoint(FedAvg):
    """Trains one shared linear model by exact proximal steps of the clients.

    Args:
        mu: strength of the proximal term, above 0.
        steps: accelerated steps of a model of classes.
        intercept_rounds: number of first rounds that move the bias alone, at most half of the
            rounds; of a real target.
        vote_rounds: number of last rounds in which clients vote on the candidates of
            ``finetune=average``, at most a tenth of the rounds.
        averaged, server_lr, server_optimizer, weights, cap: see :class:`FedAvg`.

    Example:
        >>> from fedmtl import ClientPrivacy, FullParticipation, ProximalPoint, Trainer
        >>> from fedmtl import load_data, models
        >>> trainer = Trainer(
        ...     algorithm=ProximalPoint(mu=0.03),
        ...     data=load_data("synthetic_tasks", tasks=4, problem="regression"),
        ...     model=models.linear_regression(),
        ...     schedule=FullParticipation(),
        ...     privacy=ClientPrivacy(clip_norm=0.3, epsilon=8.0),
        ...     rounds=2,
        ...     progress=False,
        ... )
        >>> trainer.fit().personal.shape
        torch.Size([4, 29])
    """

    mu: Positive = 0.03
    steps: Count = 20
    intercept_rounds: Whole = 0
    vote_rounds: Whole = 0
    local: ClassVar[None] = None  # type: ignore[assignment, misc]  # the objective is minimized

    name = "proximal_point"
    title = "Proximal point"
    colour = "#5c6bff"
    baseline = False
    from_training = False
    one_start = True  # the step is implicit, from one point of all clients

    def check_solver(self) -> None:
        """Accepts that there is no local solver: the objective is minimized."""

    def plan(self, problem: Problem, schedule: BoundSampler) -> tuple[ReleasePlan, ...]:
        """Declares the update with the vote of a client, (D + votes,).

        Raises:
            ModelError: a model that is not linear, or another loss.
            ConfigError: rounds of the intercept that the model has no use for.
        """
        bias = check_linear(problem)  # refuses other models before anything is charged
        number = problem.data.classes is None
        name = type(self).__name__
        if self.intercept_rounds and not (bias and number):
            given = f"{name}.intercept_rounds is {self.intercept_rounds}"
            raise ConfigError(f"{given}, but the model has classes or no bias; leave it out.")
        update, *others = super().plan(problem, schedule)
        model = problem.dimension
        row = replace(update, dimension=model + self._votes(problem), model=model)
        return (row, *others)

    def init(self, problem: Problem, replicates: int = 1) -> State:
        """Adds the mean vote ``"votes"`` and its noise ``"vote_noise"`` (1,) if there are votes."""
        start = problem.initial.clone()
        counted = isinstance(problem.loss, Poisson) and problem.loss.mapped
        if counted and check_linear(problem) and not bool(start.any()):
            # an output of 0 would be the upper end of the range
            start[-1] = -half_range(problem.loss, problem.data.target_range)
        state = super().init(replace(problem, initial=start), replicates)
        if votes := self._votes(problem):
            state.public["votes"] = problem.initial.new_zeros(votes)  # their mean so far
            state.public["vote_noise"] = problem.initial.new_zeros(1)  # its standard deviation
        return state

    def local_baseline(self) -> Algorithm | None:
        """Returns :class:`LocalAverage`, the average of models of a client's own records."""
        return LocalAverage()

    def local_update(self, c: ClientBatch) -> tuple[Tensor, ClientStates]:
        """Minimizes each client's proximal objective, or computes its vote in the last rounds."""
        problem = c.problem
        votes = c.round >= self._model_rounds(problem)
        name = "global"
        if votes:
            name = self.released_name  # clients average the model that is released
        shared = c.public[name].double().cpu().numpy()
        bias = check_linear(problem)
        rows = np.zeros((len(c.clients), problem.dimension + self._votes(problem)))
        for place, client in enumerate(c.clients.tolist()):
            x, y = records_of(problem, client)
            if not len(x):
                continue
            # records that are too large for float64 give a row of zeros, and no error
            with np.errstate(all="ignore"), suppress(np.linalg.LinAlgError):
                if votes:
                    rows[place, problem.dimension :] = _FAR * vote_on(problem, client, shared, bias)
                    continue
                if bias:
                    x = np.concatenate([x, np.ones((len(x), 1))], 1)
                if c.round < self._first_rounds(problem):
                    rows[place, problem.dimension - 1] = _level(problem, x, y, shared)
                else:
                    change = self._change(problem, x, y, shared, bias)
                    rows[place, : problem.dimension] = change
        return torch.from_numpy(rows).to(c.initial), c.states

    def server_update(
        self, problem: Problem, public: Public, released: Released
    ) -> dict[str, Tensor]:
        """Moves the shared model, in the first rounds its bias alone, and in the last ones the
        votes.
        """
        update = released.values["update"]
        number = released.step - self._model_rounds(problem)  # of the votes
        if number >= 0:
            scale = min(released.bounds.get("update", math.inf), _FAR)
            mean = public["votes"]
            mean = mean + (update[problem.dimension :].to(mean) / scale - mean) / (number + 1)
            noise = released.noise_std["update"][:1] / scale / math.sqrt(number + 1)
            return {**public, "votes": mean, "vote_noise": noise.to(mean)}
        update = update[: problem.dimension]
        if released.step < self._first_rounds(problem):
            # the slopes of the release are noise alone
            level = torch.zeros_like(update)
            level[-1] = update[-1]
            update = level
        released = replace(released, values={**released.values, "update": update})
        return super().server_update(problem, public, released)

    def _first_rounds(self, problem: Problem) -> int:
        return min(self.intercept_rounds, problem.rounds // 2)

    def _model_rounds(self, problem: Problem) -> int:
        """Returns the number of rounds before those of votes."""
        return problem.rounds - vote_rounds(self, problem.rounds)

    def _votes(self, problem: Problem) -> int:
        """Returns the length of a vote; 0 without a round of votes."""
        if self._model_rounds(problem) == problem.rounds:
            return 0
        return votes_on(problem, check_linear(problem))

    def _change(self, problem: Problem, x: Array, y: Array, shared: Array, bias: bool) -> Array:
        """Returns the change v_k - w^t (D,) of a client.

        Args:
            problem: of the run.
            x: (n, p), the client's features, with a last 1 for a bias.
            y: (n,), its targets or labels.
            shared: w^t, (D,).
            bias: True if the model has a bias.
        """
        if problem.loss in (mse, half_mse):
            # (X^T X / n + mu I) (v - w) = X^T (y - X w) / n
            system = x.T @ x / len(x) + self.mu * np.eye(len(shared))
            return np.linalg.solve(system, x.T @ (y - x @ shared) / len(x))
        if problem.data.classes is None:
            high = high_of(problem)
            return proximal_change(x, y, problem.loss, shared, self.mu, high)
        start = layers(shared, x.shape[1], bias)[None]
        fit = fit_classes(x, y.astype(np.int64), start, np.array([self.mu]), self.steps)
        change: Array = flat(fit, bias)[0] - shared
        return change


def _level(problem: Problem, x: Array, y: Array, shared: Array) -> float:
    """Returns the change of the bias that minimizes the mean loss of a client.

    Args:
        problem: of the run.
        x: (n, p), its features with a last 1.
        y: (n,), its targets.
        shared: w^t, (D,).
    """
    if problem.loss in (mse, half_mse):
        return float((y - x @ shared).mean())
    return level_change(x @ shared, y, problem.loss, high_of(problem))


def vote_rounds(algorithm: Algorithm, rounds: int) -> int:
    """Returns the number of rounds of votes in a run of ``rounds`` rounds; 0 of other methods.

    Args:
        algorithm: of the run.
        rounds: planned number of rounds.
    """
    if not isinstance(algorithm, ProximalPoint):
        return 0
    return min(algorithm.vote_rounds, rounds // _ROUNDS_PER_VOTE)
