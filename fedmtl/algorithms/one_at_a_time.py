"""Methods with clients that act one at a time, on clocks of their own, and their simulation.

A method defines the point at which a client answers (:meth:`OneAtATime.points`), the answer there
(:meth:`OneAtATime.gradients`), and the change of the public state by an answer
(:meth:`OneAtATime.serve`). Each of them returns a function of one activation: everything that is
the same in all activations is computed before. All functions are of R runs at once, with arrays
that have a leading axis of that length.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from ..privacy import Activations, GradientPlan, Gradients, RecordPrivacy, open_channel
from ..schedules import Block, BoundSchedule
from .base import Problem, Public, State
from .linear.algorithm import LinearAlgorithm

Array = np.ndarray[Any, Any]


class Answers(NamedTuple):
    """One activation in each of the k runs in which a client acts.

    Attributes:
        runs: int64 (k,), the places of these runs among all R; a slice of all if a client acts in
            each.
        clients: int64 (k,), the acting client of each.
        places: int64 (k,), places of these clients in public tensors (R, n, ...) whose first two
            axes are joined, see :func:`client_rows`.
        points: (k, D) float64, the points of the answers.
        values: (k, D) float64, the noised mean of the gradients of the client's records; zero
            unless it ``answered``.
        answered: bool (k,), True if the client releases something.
        noise_std: returns the standard deviations of the noise on a coordinate of a value, (R,).
    """

    runs: Array | slice
    clients: Array
    places: Array
    points: Array
    values: Array
    answered: Array
    noise_std: Callable[[], Tensor]

    def acting(self) -> Answers:
        """Returns the answers of the runs in which a client acts, from those of all R runs."""
        runs = np.flatnonzero(self.clients >= 0)
        clients, places, points, values, answered = (field[runs] for field in self[1:6])
        return Answers(runs, clients, places, points, values, answered, self.noise_std)


class OneAtATime(LinearAlgorithm):
    """A method for linear models with clients that act one at a time."""

    one_at_a_time = True

    def plan(self, problem: Problem, schedule: BoundSchedule) -> tuple[GradientPlan]:
        """Plans mean gradients of the clients' rows, of as many activations as the schedule has.

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
    def points(self, problem: Problem, public: Public) -> Callable[[Array], Array]:
        """Returns the function from clients to the points of their answers, by the public state.

        It takes the clients' places, int64 (R,), see :class:`Answers`, and returns (R, D). A run in
        which no client acts has the point of any client.
        """

    def gradients(self, problem: Problem) -> Callable[[int, Array], Gradients]:
        """Returns the function from a client and points (k, D) to the gradients of its records.

        They are factors of its rows, see :mod:`fedmtl.privacy.records`.
        """
        loss = self.linear_loss
        arrays = self.data(problem).arrays

        def gradients(client: int, points: Array) -> Gradients:
            x, y = arrays[client]
            return loss.factors(points, x, y)

        return gradients

    @abstractmethod
    def serve(self, problem: Problem, public: Public) -> Callable[[Answers], None]:
        """Returns the function that changes the public state by answers, in place."""

    def personalize(self, problem: Problem, state: State, clients: Tensor) -> Tensor:
        """Returns the models of ``clients`` in replicate 0."""
        return self.models(problem, state, clients)[0].to(problem.initial)

    def step(self, problem: Problem, state: State, block: Block, channel: Activations) -> State:
        """Computes all activations of a block in their order, of all runs; in place."""
        public = state.public
        points_of = self.points(problem, public)
        gradients_of = self.gradients(problem)
        serve = self.serve(problem, public)
        acting = np.ascontiguousarray(block.client.T.numpy())  # (S, R), -1 for no client
        # A run without an acting client computes for client 0, and its answer is dropped.
        joined = np.arange(block.replicates) * problem.clients + np.maximum(acting, 0)
        every_run = bool((acting >= 0).all())
        runs = slice(None)
        for clients, places in zip(acting, joined, strict=True):
            points = points_of(places)
            answered = channel.answering
            # a client that acts in several runs computes its gradients once, at all their points
            sent = [gradients_of(client, points.take(own, 0)) for client, own in channel.acting]
            values = channel.release(sent)
            answers = Answers(runs, clients, places, points, values, answered, channel.noise_std)
            if not every_run:
                answers = answers.acting()
            serve(answers)
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
    """Yields the state before R simulated runs and after each of ``parts`` equal parts of them.

    The next part changes the state in place. Every run ends with its budget. The noise is
    simulated, so public records are not charged for.

    Args:
        algorithm: settings.
        problem: its data may be public records, or synthetic ones.
        plans: of the releases.
        block: the activations, from the first on.
        privacy: of the runs.
        seed: of the noise.
        parts: number of parts; runs of fewer activations have fewer.
    """
    settings = None
    if privacy is not None:
        settings = replace(privacy, source="seeded")
    runs, events = block.client.shape
    # a channel without a ledger: simulated noise on public records costs nothing
    channel = open_channel(settings, plans, "simulated", seed=seed, replicates=runs)
    assert isinstance(channel, Activations)
    lengths = torch.from_numpy(channel.accountant.fitting(block.clients.numpy()))
    # (R, S, 1): after the end of its budget no client acts in a run
    within = (torch.arange(events) < lengths[:, None])[:, :, None]
    block = replace(block, clients=torch.where(within, block.clients, -1))
    state = algorithm.init(problem, runs)
    yield state
    last = int(lengths.max())
    ends = sorted({last * part // parts for part in range(parts + 1)})
    for start, stop in pairwise(ends):
        channel.begin(start, block.client[:, start:stop])
        state = algorithm.step(problem, state, block.window(start, stop), channel)
        yield state
    channel.close()


def simulated_objectives(
    algorithm: OneAtATime, problem: Problem, schedule: BoundSchedule, *args: Any, **options: Any
) -> Tensor:
    """Returns the training objective at the states of :func:`simulated_states`.

    Args:
        algorithm: settings.
        problem: the data; nothing that is made of them is stored.
        schedule: its caps are read.
        args: see :func:`simulated_states`.
        options: see :func:`simulated_states`.

    Returns:
        (parts + 1, R) float64; NaN or infinite if a run diverges.
    """
    problem = replace(problem, prepared={})  # a cache of its own, which ends with the call
    plans = algorithm.plan(problem, schedule)
    objectives = []
    for state in simulated_states(algorithm, problem, plans, *args, **options):
        value = algorithm.objective(problem, state)
        if value is not None:
            objectives.append(value)
    return torch.stack(objectives)
