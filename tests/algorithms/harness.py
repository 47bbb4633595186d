"""Runs an algorithm event by event, without the trainer."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from fedmtl import models
from fedmtl.algorithms import Problem, State
from fedmtl.local import Execution
from fedmtl.privacy import ClientPrivacy, FullParticipation, open_channel
from fedmtl.schedules import rounds as round_events
from fedmtl.trainer.problem import build_problem


def problem_of(data, *, rounds=10, model=None, loss="mse", seed=0, execution=None) -> Problem:
    """A float64 problem on the CPU; linear regression without intercept unless another model is given."""
    model = models.linear_regression(bias=False) if model is None else model
    return build_problem(data, model, loss, execution or Execution("stacked"), rounds, seed, "cpu", "float64")


def run(
    algorithm,
    problem: Problem,
    *,
    sampler=None,
    privacy: ClientPrivacy | None = None,
    watch: Callable[[int, State], None] | None = None,
    record: list | None = None,
    replay=None,
) -> State:
    """The state after all rounds; ``watch(step, state)`` sees every state."""
    bound = (sampler or FullParticipation()).bind(problem.clients)
    channel = open_channel(
        privacy,
        algorithm.plan(problem, bound),
        bound,
        seed=problem.seed,
        steps=problem.rounds,
        fingerprint="test",
        replay=replay,
    )
    channel.record = record
    state = algorithm.init(problem)
    order = torch.argsort(problem.data.keys, stable=True)
    rank = torch.argsort(order)
    if watch is not None:
        watch(-1, state)
    for event in round_events(channel.draw, order, start=0, stop=problem.rounds):
        channel.begin(event.step, rank[event.cohort])
        state = algorithm.step(problem, state, event, channel)
        if watch is not None:
            watch(event.step, state)
    channel.close()
    return state


def everyone(problem: Problem, algorithm, state: State) -> Tensor:
    """All personal models (n, D)."""
    return algorithm.personalize(problem, state, torch.arange(problem.clients))
