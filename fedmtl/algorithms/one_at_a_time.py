"""Methods with clients that act one at a time, on clocks of their own, and their simulation.

An activation of a client is three pure functions and a release between them:

    point        = query_point(server, rows)      the parameters at which the client answers
    factors      = gradient_factors(x, y, point)  of its records' gradients, which stay with it
    gradient     = (sum_j clip(factor_j x_j) + noise) / n_i                        by the channel
    server, rows = server_update(server, rows, answer)                   from the release alone

``server`` is the public state, and ``rows`` are the acting client's rows of its tensors with one
row for each client (:attr:`OneAtATime.by_client`): public, too. The functions are written for one
run. :meth:`OneAtATime.step` computes R runs at once: it calls them with a leading axis R in every
array, which NumPy's functions take.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import pairwise
from typing import Any, ClassVar, NamedTuple

import numpy as np
import torch
from torch import Tensor

from ..privacy import ActivationChannel, GradientPlan, Gradients, RecordPrivacy, open_channel
from ..schedules import Block, BoundSchedule
from .base import Problem, State
from .linear.algorithm import LinearAlgorithm

Array = np.ndarray[Any, Any]

Arrays = Mapping[str, Array]
"""A public state, or the rows of a client in it, by name; not to be changed."""


class Answer(NamedTuple):
    """The released answer of a client.

    Attributes:
        client: int64 (), the place of the client in the data.
        point: (D,) float64, see :meth:`OneAtATime.query_point`.
        gradient: (D,) float64, the noised mean gradient of its records at the point; zero unless it
            ``answered``.
        answered: bool (), True if the client released something.
        noise_std: float64 (), the standard deviation of the noise on a coordinate of the gradient.
    """

    client: Array
    point: Array
    gradient: Array
    answered: Array
    noise_std: Array


class OneAtATime(LinearAlgorithm):
    """A method for linear models with clients that act one at a time.

    Attributes:
        by_client: the names of public tensors (R, n, ...) with one row for each client.
    """

    one_at_a_time = True
    by_client: ClassVar[tuple[str, ...]] = ()

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

    def constants(self, problem: Problem) -> Any:
        """Returns the public constants of all activations, which are computed once; None by
        default.

        Args:
            problem: of the run.
        """
        return None

    @abstractmethod
    def query_point(self, constants: Any, server: Arrays, rows: Arrays) -> Array:
        """Returns the point (D,) at which a client computes its gradient.

        Args:
            constants: see :meth:`constants`.
            server: the public state.
            rows: the client's rows of the tensors of :attr:`by_client`.
        """

    def gradient_factors(self, x: Array, y: Array, points: Array) -> Gradients:
        """Returns the gradients of a client's records at k points (k, D), one of each run.

        The gradient of a linear model at a record is a factor times its features, and the factor is
        returned; see :mod:`fedmtl.privacy.records`.

        Args:
            x: (n_i, D), the features of its records.
            y: (1, n_i), their targets.
            points: (k, D).
        """
        return self.linear_loss.factors(points, x, y)

    @abstractmethod
    def server_update(
        self, constants: Any, server: Arrays, rows: Arrays, answer: Answer
    ) -> tuple[Arrays, Arrays]:
        """Returns the public tensors that an answer changes, by name: post-processing of a release.

        Args:
            constants: see :meth:`constants`.
            server: the public state.
            rows: the client's rows of the tensors of :attr:`by_client`.
            answer: of the client.

        Returns:
            The changed entries of ``server``, without tensors of :attr:`by_client`; and the
            client's new rows of these. They are written one after another, so none may be a
            view of ``server`` or ``rows``.
        """

    def personalize(self, problem: Problem, state: State, clients: Tensor) -> Tensor:
        """Returns the models of ``clients`` in replicate 0."""
        return self.models(problem, state, clients)[0].to(problem.initial)

    def step(
        self, problem: Problem, state: State, block: Block, channel: ActivationChannel
    ) -> State:
        """Computes all activations of a block in their order, of all runs; in place."""
        constants = self.constants(problem)
        records = self.data(problem).arrays
        server = {name: tensor.numpy() for name, tensor in state.public.items()}
        # Rows are replaced where they stand: a new tensor of all clients at every activation would
        # take as long as there are clients.
        of_clients = {name: _joined(server[name]) for name in self.by_client}
        acting = np.ascontiguousarray(block.client.T.numpy())  # (S, R), -1 for no client
        # A run without an acting client computes for client 0, and nothing of it is kept.
        clients = np.maximum(acting, 0)
        places = np.arange(block.replicates) * problem.clients + clients
        every_run = bool((acting >= 0).all())
        for step, (client, place) in enumerate(zip(clients, _selected(places), strict=True)):
            rows = {name: each[place] for name, each in of_clients.items()}
            point = self.query_point(constants, server, rows)
            answered = channel.answering
            # a client that acts in several runs computes its gradients once, at all their points
            factors = [
                self.gradient_factors(*records[each], _points_of(its_runs, point))
                for each, its_runs in channel.acting
            ]
            gradient = channel.release(factors)
            answer = Answer(client, point, gradient, answered, channel.latest_std)
            new_server, new_rows = self.server_update(constants, server, rows, answer)
            if every_run:
                for name, new in new_server.items():
                    server[name][...] = new
                for name, new in new_rows.items():
                    of_clients[name][place] = new
                continue
            runs = np.flatnonzero(acting[step] >= 0)
            for name, new in new_server.items():
                server[name][runs] = new[runs]
            for name, new in new_rows.items():
                of_clients[name][places[step, runs]] = new[runs]
        return state


def _joined(array: Array) -> Array:
    """Returns a view (R n, ...) of the rows of all clients (R, n, ...) in all runs."""
    return array.reshape(-1, *array.shape[2:])


def _selected(places: Array) -> Sequence[slice] | Array:
    """Returns the selection of the rows (R,) of each activation: (S, R) -> S of them.

    A slice of the only row is taken and written faster than a list of one place.
    """
    if places.shape[1] > 1:
        return places
    return [slice(place, place + 1) for place in places[:, 0].tolist()]


def _points_of(runs: Array, points: Array) -> Array:
    """Returns the points (k, D) of k runs in ascending order, among those of all, (R, D)."""
    if len(runs) == len(points):
        return points
    return points.take(runs, 0)


def row_of(array: Array, client: Array) -> Array:
    """Returns the row of a client: (n, D) and int64 () -> (D,), also of R runs."""
    if not client.ndim:
        row: Array = array[client]
        return row
    if len(client) == 1:
        only: Array = array[:, client[0]]
        return only
    each: Array = array[np.arange(len(client)), client]
    return each


def with_row(array: Array, client: Array, row: Array) -> Array:
    """Returns a copy of (n, D) with another row (D,) of a client, also of R runs."""
    copy = array.copy()
    if client.ndim and len(client) == 1:
        copy[:, client[0]] = row
    elif client.ndim:
        copy[np.arange(len(client)), client] = row
    else:
        copy[client] = row
    return copy


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
    runs, activations = block.client.shape
    # a channel without a ledger: simulated noise on public records costs nothing
    channel = open_channel(settings, plans, "simulated", seed=seed, replicates=runs)
    assert isinstance(channel, ActivationChannel)
    lengths = torch.from_numpy(channel.accountant.fitting(block.clients.numpy()))
    # (R, S, 1): after the end of its budget no client acts in a run
    within = (torch.arange(activations) < lengths[:, None])[:, :, None]
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
