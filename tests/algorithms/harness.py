"""Runs an algorithm block by block, without the trainer."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from fedmtl import models
from fedmtl.algorithms import Problem, State
from fedmtl.audit.recording import RecordedActivations, RecordedRounds
from fedmtl.data import load_synthetic_tasks
from fedmtl.local import Execution
from fedmtl.privacy import ClientPrivacy, FullParticipation, open_channel
from fedmtl.schedules import Block, rounds
from fedmtl.trainer.make_problem import ProblemSettings, build_problem
from tests.privacy.activations import Door


def problem_of(
    data, *, rounds=10, model=None, loss="mse", seed=0, execution=None, device="cpu"
) -> Problem:
    """A float64 problem; linear regression without intercept unless another model is given."""
    model = models.linear_regression(bias=False) if model is None else model
    return build_problem(
        data,
        model,
        ProblemSettings(
            loss=loss,
            execution=execution or Execution(),
            rounds=rounds,
            seed=seed,
            device=device,
            dtype="float64",
        ),
    )


def run(
    algorithm,
    problem: Problem,
    *,
    sampler=None,
    privacy: ClientPrivacy | None = None,
    watch: Callable[[int, State], None] | None = None,
    record: list | None = None,
) -> State:
    """The state after all rounds; ``watch(step, state)`` sees every state."""
    bound = (sampler or FullParticipation()).bind(problem.clients)
    order = torch.argsort(problem.data.keys, stable=True)
    channel = open_channel(
        privacy,
        algorithm.plan(problem, bound),
        bound,
        order=order,
        seed=problem.seed,
        steps=problem.rounds,
        fingerprint="test",
        channel_class=RecordedRounds,
    )
    channel.record = record
    state = algorithm.init(problem)
    if watch is not None:
        watch(-1, state)
    for block in rounds(channel.draw, start=0, stop=problem.rounds):
        channel.begin(block.first, block.cohort)
        state = algorithm.step(problem, state, block, channel)
        if watch is not None:
            watch(block.step, state)
    channel.close()
    return state


def repeated(algorithm, problem: Problem, privacy, replicates: int, sources: Any = None) -> State:
    """The state after all rounds of R repetitions; ``sources`` replaces the noise's."""
    bound = FullParticipation().bind(problem.clients)
    plans = algorithm.plan(problem, bound)
    channel = open_channel(
        privacy, plans, bound, seed=3, steps=problem.rounds, replicates=replicates
    )
    if sources is not None:
        channel.sources[:] = sources
    state = algorithm.init(problem, replicates)
    for step in range(problem.rounds):
        channel.begin(step, channel.draw(step))
        event = Block(step, torch.zeros(1, 1), torch.arange(problem.clients)[None, None])
        state = algorithm.step(problem, state, event, channel)
    return state


def linear_tasks(
    tasks: int, kind: str, *, rounds: int = 1, bias: bool = False, **options: Any
) -> Problem:
    """Synthetic linear tasks, under the loss of their kind."""
    loss = "half_mse" if kind == "regression" else "binary_cross_entropy"
    data = load_synthetic_tasks(tasks, problem=kind, **{"noise": 0.3} | options)
    return problem_of(data, rounds=rounds, model=models.linear_regression(bias=bias), loss=loss)


def everyone(problem: Problem, algorithm, state: State) -> Tensor:
    """All personal models (n, D)."""
    return algorithm.personalize(problem, state, torch.arange(problem.clients))


@dataclass(frozen=True)
class GivenCaps:
    """A schedule of which only the caps are known."""

    caps: np.ndarray


def open_activations(
    algorithm, problem: Problem, clients, privacy, *, caps=None, seed=3, **options: Any
) -> Door:
    """The channel of activations ``clients`` (R, S); caps are what the busiest repetition of each client needs."""
    clients = torch.as_tensor(clients)
    if caps is None:
        uses = [np.bincount(row[row >= 0], minlength=problem.clients) for row in clients.numpy()]
        caps = np.maximum(np.stack(uses).max(0), 1)
    plans = algorithm.plan(
        replace(problem, rounds=max(problem.rounds, clients.shape[1])), GivenCaps(np.asarray(caps))
    )
    options = {
        "seed": seed,
        "replicates": len(clients),
        "channel_class": RecordedActivations,
    } | options
    return Door(open_channel(privacy, plans, "as given", **options))


def block_of(clients, first=0) -> Block:
    """Activations ``clients`` (R, S), one time unit apart."""
    clients = torch.as_tensor(clients)
    steps = torch.arange(first, first + clients.shape[1]).double().expand(clients.shape)
    return Block(first, steps, clients[:, :, None])


def blocks_of(clients, pieces=None) -> Iterator[Block]:
    """Blocks of ``pieces`` activations."""
    clients = torch.as_tensor(clients)
    pieces = clients.shape[1] if pieces is None else pieces
    for start in range(0, clients.shape[1], pieces):
        yield block_of(clients[:, start : start + pieces], start)


def run_activations(
    algorithm, problem: Problem, clients, privacy=None, *, pieces=None, replay=None, **options
):
    """The state after all activations, and the channel; blocks of ``pieces``; releases of ``replay`` are forced."""
    channel = open_activations(algorithm, problem, clients, privacy, **options)
    channel.record = []
    if replay is not None:
        channel.replay(replay)
    state = algorithm.init(problem, len(clients))
    for block in blocks_of(clients, pieces):
        channel.begin(block.first, block.client)
        state = algorithm.step(problem, state, block, channel.channel)
    return state, channel


def noise_of(algorithm, problem: Problem, clients, privacy, **options) -> np.ndarray:
    """(S, R, D): what the channel adds, from releases of zeros."""
    channel = open_activations(algorithm, problem, clients, privacy, **options)
    channel.begin(0, torch.as_tensor(clients))
    plan, counts = channel.channel.records.plan, problem.data.train.counts.tolist()
    record = () if plan.x is not None else (plan.dimension,)  # a factor of its row, or a vector
    each = [
        channel.release(
            lambda k, where: torch.zeros(len(where), counts[k], *record, dtype=torch.float64)
        )
        for _ in range(np.shape(clients)[1])
    ]
    return torch.stack(each).numpy()
