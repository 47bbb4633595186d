"""Methods whose clients act one at a time, by clocks of their own; and their objective in a simulated run.

A method says what a client answers at the public state (:meth:`OneAtATime.gradients`), and what an answer does to that
state (:meth:`OneAtATime.serve`). Both are of R runs at once, with arrays that have a leading axis of that length.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import replace
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from ..privacy import Activations, GradientMessage, GradientPlan, RecordPrivacy, open_channel
from ..schedules import Block, BoundSchedule
from .base import Algorithm, Problem, State

Array = np.ndarray[Any, Any]


class Answers(NamedTuple):
    """One activation in each of R runs.

    Attributes:
        clients: int64 (R,), who acts; -1 where no client does.
        values: (R, D) float64, the noised mean of the gradients of its records; zero unless it ``answered``.
        answered: bool (R,), whether it releases something.
        noise_std: returns the standard deviations of the noise on a coordinate of ``values``, (R,).
    """

    clients: Array
    values: Array
    answered: Array
    noise_std: Callable[[], Tensor]


class OneAtATime(Algorithm):
    """A method whose clients act one at a time."""

    supports_replicates = True
    one_at_a_time = True
    on_host = True

    @abstractmethod
    def gradients(self, problem: Problem, public: Mapping[str, Tensor], clients: Array) -> GradientMessage:
        """Return what the ``clients``, int64 (R,), of R runs answer at the public state; -1 where no client acts, which
        is not asked."""

    @abstractmethod
    def serve(self, problem: Problem, public: dict[str, Tensor], answers: Answers) -> None:
        """Change the public state by an answer, in place."""

    @staticmethod
    def gradient_plan(problem: Problem, caps: Array, **others: Any) -> GradientPlan:
        """Return the plan of mean gradients of the clients' records, of at most ``caps`` (n,) activations each."""
        ids, counts = tuple(problem.data.ids), problem.data.train.counts.numpy()
        return GradientPlan(
            ids=ids, keys=problem.data.keys, counts=counts, dimension=problem.dimension, caps=caps, **others
        )

    def step(self, problem: Problem, state: State, block: Block, channel: Activations) -> State:
        """Compute all activations of a block in their order, of all runs; in place."""
        for clients in block.client.T.numpy():
            answered = channel.answering
            values = channel.release(self.gradients(problem, state.public, clients))
            self.serve(problem, state.public, Answers(clients, values, answered, channel.noise_std))
        return state


def simulated_objectives(
    algorithm: OneAtATime,
    problem: Problem,
    schedule: BoundSchedule,
    block: Block,
    privacy: RecordPrivacy | None,
    *,
    seed: int,
    parts: int = 1,
) -> Tensor:
    """Return the training objective before R simulated runs and at the end of each of ``parts`` equal parts of them.

    Every run ends where its budget does. The noise is simulated, so a problem of public records is not charged for.

    Args:
        algorithm: settings.
        problem: its data may be public records, or synthetic ones; nothing that is made of them is stored.
        schedule: of which the caps are read.
        block: the activations, from the first on.
        privacy: of the runs.
        seed: of the noise.
        parts: how many.

    Returns:
        (parts + 1, R) float64, fewer of runs of fewer activations; NaN or infinite where a run diverges.
    """
    problem = replace(problem, prepared={})
    settings = None if privacy is None else replace(privacy, source="seeded")
    runs, events = block.client.shape
    channel = open_channel(settings, algorithm.plan(problem, schedule), "simulated", seed=seed, replicates=runs)
    lengths = torch.from_numpy(channel.account.fitting(block.clients.numpy()))
    block = replace(
        block, clients=torch.where((torch.arange(events) < lengths[:, None])[:, :, None], block.clients, -1)
    )
    state, last = algorithm.init(problem, runs), int(lengths.max())
    objectives = [algorithm.objective(problem, state)]
    for start, stop in pairwise(sorted({last * part // parts for part in range(parts + 1)})):
        channel.begin(start, block.client[:, start:stop])
        state = algorithm.step(problem, state, block.window(start, stop), channel)
        objectives.append(algorithm.objective(problem, state))
    channel.close()
    return torch.stack([value for value in objectives if value is not None])
