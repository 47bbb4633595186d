"""Methods whose clients act one at a time, on clocks of their own, and a simulation of their
objective.

A method says at which point of the public state a client answers (:meth:`OneAtATime.points`), what
it answers there (:meth:`OneAtATime.gradients`), and what an answer does to that state
(:meth:`OneAtATime.serve`). Each of them returns a function of one activation, which computes
nothing that is the same in all of them. All are of R runs at once, with arrays that have a leading
axis of that length.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from ..privacy import Activations, GradientPlan, Gradients, RecordPrivacy, open_channel
from ..schedules import Block, BoundSchedule
from .base import Problem, State
from .linear.algorithm import LinearAlgorithm

Array = np.ndarray[Any, Any]


class Answers(NamedTuple):
    """One activation in each of the k runs in which a client acts.

    Attributes:
        runs: int64 (k,), which of the R runs these are; a slice of all of them where a client acts
            in each.
        clients: int64 (k,), who acts.
        at: int64 (k,), rows of these clients in public tensors (R, n, ...), whose first two axes
            are one.
        points: (k, D) float64, where they answer.
        values: (k, D) float64, the noised mean of the gradients of its records; zero unless it
            ``answered``.
        answered: bool (k,), whether it releases something.
        noise_std: returns the standard deviations of the noise on a coordinate of a value, (R,).
    """

    runs: Array | slice
    clients: Array
    at: Array
    points: Array
    values: Array
    answered: Array
    noise_std: Callable[[], Tensor]

    def acting(self) -> Answers:
        """Returns those of runs in which a client acts, of all R runs."""
        runs = np.flatnonzero(self.clients >= 0)
        clients, at, points, values, answered = (field[runs] for field in self[1:6])
        return Answers(runs, clients, at, points, values, answered, self.noise_std)


class OneAtATime(LinearAlgorithm):
    """A method for linear models whose clients act one at a time."""

    one_at_a_time = True

    def plan(self, problem: Problem, schedule: BoundSchedule) -> tuple[GradientPlan]:
        """Plan mean gradients of the clients' rows, of as many activations as the schedule has.

        Raises:
            ModelError: the model is not linear.
            DataError: targets that do not suit the loss.
        """
        plan = GradientPlan(
            ids=tuple(problem.data.ids),
            keys=problem.data.keys,
            counts=problem.data.train.counts.numpy(),
            dimension=problem.dimension,
            caps=schedule.caps.clip(max=problem.rounds),
            x=self.data(problem).x,
        )
        return (plan,)

    @abstractmethod
    def points(self, problem: Problem, public: Mapping[str, Tensor]) -> Callable[[Array], Array]:
        """Returns the function from the rows ``at``, int64 (R,), of clients to the points (R, D) at
        which they answer by the public state; where no client acts the point is that of any."""

    def gradients(self, problem: Problem) -> Callable[[int, Array], Gradients]:
        """Returns the function from a client and points (k, D) to the gradients of its records at
        each of them, see :mod:`fedmtl.privacy.records`: factors of its rows, of which the gradients
        are multiples."""
        loss, arrays = self.linear_loss, self.data(problem).arrays
        return lambda client, points: loss.factors(points, *arrays[client])

    @abstractmethod
    def serve(self, problem: Problem, public: Mapping[str, Tensor]) -> Callable[[Answers], None]:
        """Returns the function that changes the public state by answers, in place."""

    def personalize(self, problem: Problem, state: State, clients: Tensor) -> Tensor:
        """Returns the models of ``clients`` in replicate 0."""
        return self.models(problem, state, clients)[0].to(problem.initial)

    def step(self, problem: Problem, state: State, block: Block, channel: Activations) -> State:
        """Computes all activations of a block in their order, of all runs; in place."""
        public, acting = state.public, np.ascontiguousarray(block.client.T.numpy())
        points, gradients, serve = self.points(problem, public), self.gradients(problem), self.serve(problem, public)
        rows = np.arange(block.replicates) * problem.clients + np.maximum(acting, 0)
        runs, everyone = slice(None), bool((acting >= 0).all())
        for clients, at in zip(acting, rows, strict=True):
            asked, answered = points(at), channel.answering
            values = channel.release([gradients(client, asked.take(of, 0)) for client, of in channel.acting])
            answers = Answers(runs, clients, at, asked, values, answered, channel.noise_std)
            serve(answers if everyone else answers.acting())
        return state


def client_rows(tensor: Tensor) -> Array:
    """Returns a view (R n, ...) of a public tensor (R, n, ...)."""
    return tensor.numpy().reshape(-1, *tensor.shape[2:])


def simulated_states(
    algorithm: OneAtATime,
    problem: Problem,
    plans: Sequence[GradientPlan],
    block: Block,
    privacy: RecordPrivacy | None,
    *,
    seed: int,
    parts: int = 1,
) -> Iterator[State]:
    """Yields the state before R simulated runs and at the end of each of ``parts`` equal parts of
    them, which the next part changes in place.

    Every run ends where its budget does. The noise is simulated, so a problem of public records is
    not charged for.

    Args:
        algorithm: settings.
        problem: its data may be public records, or synthetic ones.
        plans: of the releases.
        block: the activations, from the first on.
        privacy: of the runs.
        seed: of the noise.
        parts: how many; fewer of runs of fewer activations.
    """
    settings = None if privacy is None else replace(privacy, source="seeded")
    runs, events = block.client.shape
    channel = open_channel(settings, plans, "simulated", seed=seed, replicates=runs)
    assert isinstance(channel, Activations)
    lengths = torch.from_numpy(channel.account.fitting(block.clients.numpy()))
    block = replace(
        block, clients=torch.where((torch.arange(events) < lengths[:, None])[:, :, None], block.clients, -1)
    )
    state, last = algorithm.init(problem, runs), int(lengths.max())
    yield state
    for start, stop in pairwise(sorted({last * part // parts for part in range(parts + 1)})):
        channel.begin(start, block.client[:, start:stop])
        state = algorithm.step(problem, state, block.window(start, stop), channel)
        yield state
    channel.close()


def simulated_objectives(
    algorithm: OneAtATime, problem: Problem, schedule: BoundSchedule, *args: Any, **options: Any
) -> Tensor:
    """Returns the training objective at the states of :func:`simulated_states`.

    Args:
        algorithm, problem: settings and data, of which nothing that is made of them is stored.
        schedule: of which the caps are read.
        args, options: as for :func:`simulated_states`.

    Returns:
        (parts + 1, R) float64; NaN or infinite where a run diverges.
    """
    problem = replace(problem, prepared={})
    states = simulated_states(algorithm, problem, algorithm.plan(problem, schedule), *args, **options)
    objectives = [algorithm.objective(problem, state) for state in states]
    return torch.stack([value for value in objectives if value is not None])
