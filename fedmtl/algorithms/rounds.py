"""The base class of methods in rounds: a cohort computes, its messages are released, and the server
computes from the releases."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar

import torch
from torch import Tensor

from ..privacy import RoundChannel
from ..privacy.clip import RowTotal
from ..privacy.mechanism import Message
from ..schedules import Block
from .base import Algorithm, Public, State
from .client_batch import ClientBatch, ClientStates
from .problem import Problem
from .returned import checked_models, checked_states, checked_tensors, checked_update, unchanged
from .starts import by_start, one_start_needed, weighted
from .store import ClientStore


@dataclass(frozen=True)
class Released:
    """The releases of a round: public values, the only ones that a server gets.

    Attributes:
        values: the releases of the round by name, each a noised sum over ``denominator``. (D,)
            float64, (D, D) for a symmetric one, with a leading R for several replicates.
        denominator: m, the public constant that divides every sum.
        noise_std: the standard deviation (R,) float64 of the noise on a coordinate of a release, or
            on the diagonal of a matrix, by the release's name; 0 without noise.
        step: number of the round.
        bounds: the norm C to which a client's row was clipped, by release; infinite without a clip.

    Example:
        >>> import torch
        >>> from fedmtl.algorithms import Released
        >>> noise = {"update": torch.tensor([0.1], dtype=torch.float64)}
        >>> update = torch.ones(2, dtype=torch.float64)
        >>> released = Released({"update": update}, denominator=10.0, noise_std=noise)
        >>> float(released.values["update"].sum() / released.noise_std["update"])
        20.0
    """

    values: Mapping[str, Tensor]
    denominator: float
    noise_std: Mapping[str, Tensor]
    step: int = 0
    bounds: Mapping[str, float] = field(default_factory=dict)


class Messages:
    """Collects the rows that the clients of a round send, by release.

    Long rows are clipped and added to a sum piece by piece, so that a round of many clients and a
    large model is never in memory as a whole. The sum is exact and has the bits of the rows' sum.

    Args:
        channel: of the round; it makes the sums.
    """

    def __init__(self, channel: RoundChannel) -> None:
        self._channel = channel
        self._clients: list[Tensor] = []
        self._collected: dict[str, RowTotal | list[Tensor]] = {}

    def add(self, clients: Tensor, rows: Mapping[str, Tensor]) -> None:
        """Adds the messages of one piece.

        Args:
            clients: int64 (k,), positions of the clients in the data.
            rows: their rows, (k, D) or (R, k, D), by release.
        """
        self._clients.append(clients)
        for name, part in rows.items():
            if name not in self._collected:
                self._collected[name] = []
                total = None
                # sums are exact on the CPU alone
                if part.device.type == "cpu":
                    total = self._channel.new_total(name)
                # None for short rows, and for releases that need the rows themselves
                if total is not None:
                    self._collected[name] = total
            collected = self._collected[name]
            if isinstance(collected, RowTotal):
                collected.add(clients, part)
            else:
                collected.append(part)

    def take(self) -> tuple[Tensor, dict[str, Message]]:
        """Returns the clients, int64 (k,), and their rows in this order, or their sum, by release.

        Their order is that of the pieces and their stacks; a release does not depend on it. Rows
        are handed over, so that they are in memory once: call it once.
        """
        messages: dict[str, Message] = {}
        for name, collected in self._collected.items():
            if isinstance(collected, RowTotal):
                messages[name] = collected
            elif len(collected) == 1:
                messages[name] = collected.pop()
            else:
                messages[name] = _joined(collected)
        return torch.cat(self._clients), messages


def _joined(parts: list[Tensor]) -> Tensor:
    """Joins the rows (..., k, D) of pieces; they are taken out of the list, so that none is in
    memory twice."""
    first = parts[0]
    count = sum(part.shape[-2] for part in parts)
    dtype = first.dtype
    # clients that start from earlier models may have rows of another precision
    for part in parts:
        dtype = torch.promote_types(dtype, part.dtype)
    whole = first.new_empty(*first.shape[:-2], count, first.shape[-1], dtype=dtype)
    del first, part
    begin = 0
    while parts:
        part = parts.pop(0)
        end = begin + part.shape[-2]
        whole[..., begin:end, :] = part
        begin = end
    return whole


class RoundAlgorithm(Algorithm):
    """A method in rounds: four functions, and a release between the second and the third.

    - :meth:`init`: the state before the first round;
    - :meth:`client_update`: the messages and the new states of a batch of clients;
    - :meth:`server_update`: the public state, from the releases of the messages;
    - :meth:`personal_models`: the clients' models.

    A method whose clients need the new public state in the same round defines :meth:`receive`, too.

    All of them are pure functions. The values that ``client_update`` returns are private: a round
    clips the messages, adds them up and noises them, and ``server_update`` gets the noised sums. A
    client is computed from its own data and its own state alone, so its numbers are the same in a
    process of its own as in a stack of clients.

    Example:
        >>> from fedmtl import FullParticipation, LocalSGD, Trainer, load_data, models
        >>> from fedmtl.algorithms import RoundAlgorithm, State
        >>> from fedmtl.privacy import ReleasePlan
        >>> class Average(RoundAlgorithm):
        ...     name = "average"
        ...     local = LocalSGD(lr=0.1)
        ...     def plan(self, problem, schedule):  # the releases of each round
        ...         return (ReleasePlan(name="step", dimension=problem.dimension),)
        ...     def init(self, problem, replicates=1):  # clients keep nothing
        ...         return State({"w": problem.initial}, problem.client_store({}))
        ...     def client_update(self, c):  # rows (k, D) of the clients, and their state
        ...         w = c.public["w"]
        ...         return {"step": c.train(self.local, w) - w}, c.states
        ...     def server_update(self, problem, public, released):
        ...         return {"w": public["w"] + released.values["step"].to(public["w"])}
        ...     def personal_models(self, c):  # the clients' models (k, D) in the end
        ...         return c.public["w"].expand(len(c.clients), -1)
        >>> trainer = Trainer(
        ...     algorithm=Average(),
        ...     data=load_data("digits", clients=10),
        ...     model=models.softmax_regression(),
        ...     schedule=FullParticipation(),
        ...     privacy=None,
        ...     rounds=2,
        ...     progress=False,
        ... )
        >>> trainer.fit().personal.shape
        torch.Size([10, 650])

    Attributes:
        one_start: True if all clients of a round must start from one public state.
        own_starts: True if clients read the shared model alone, (D,), or (k, D) with one for each.
            A subclass says it anew, since its clients may read more.
    """

    one_start: ClassVar[bool] = False
    own_starts: ClassVar[bool] = False

    def __init_subclass__(cls, **options: Any) -> None:
        super().__init_subclass__(**options)
        # clients of a subclass may read more than those of its base
        cls.own_starts = bool(vars(cls).get("own_starts", False))

    def client_update(self, c: ClientBatch) -> tuple[Mapping[str, Tensor], ClientStates]:
        """Computes the messages and the new states of a batch of clients.

        Args:
            c: the clients of the cohort that are computed in this call, with the public state and
                their own.

        Returns:
            The messages, rows (k, D) by release; and the clients' new states.
        """
        raise NotImplementedError(f"{type(self).__name__} does not say what its clients compute.")

    def server_update(
        self, problem: Problem, public: Public, released: Released
    ) -> dict[str, Tensor]:
        """Returns the public state after the round; unchanged by default.

        It is free post-processing of the releases.

        Args:
            problem: its public parts: the initial model, the dimension, the number of clients.
            public: the public state, not to be changed.
            released: the releases of the round.
        """
        return dict(public)

    def receive(self, c: ClientBatch) -> ClientStates:
        """Returns the clients' states at the end of the round; unchanged by default.

        Args:
            c: clients of the cohort, with the new public state.
        """
        return c.states

    def personal_models(self, c: ClientBatch) -> Tensor:
        """Returns the personal models (k, D) of clients, from the public state and their own.

        Nothing is released. Clients that never took part have a model, too.

        Args:
            c: clients with their states, after any round; its round is
                :data:`~.client_batch.AFTER`.
        """
        name = type(self).__name__
        raise NotImplementedError(f"{name} does not say what the personal models are.")

    def check_starts(self) -> None:
        """Refuses clients that start from different public states, if the method needs one for all
        of them: it sets :attr:`one_start` or ``all_at_once``, or defines :meth:`receive`.
        """
        receives = type(self).receive is not RoundAlgorithm.receive
        if self.one_start or self.all_at_once or receives:
            raise one_start_needed(self.name)

    def step(self, problem: Problem, state: State, block: Block, channel: RoundChannel) -> State:
        """Computes one round.

        Args:
            problem: the data and the model.
            state: the state before the block; it is changed in place, and returned.
            block: the participants; charged already.
            channel: makes all releases of the clients.

        Returns:
            ``state``, after the round.
        """
        store = state.private
        method = type(self).__name__
        cohort = block.cohort.sort().values  # as the store's rows
        # those of the cohort that this process computes, all of them without further ranks
        mine = ClientBatch(
            problem=problem,
            clients=cohort[problem.places_here(cohort)],
            public=state.public,
            round=block.first,
            clips=channel.clips,
            charged_steps=channel.local,
            cohort=block.cohort,
        )
        # all start from the present public state, and count alike, unless the schedule is Buffered
        started: list[tuple[ClientBatch, Tensor | None]] = [(mine, None)]
        if block.starts is not None:
            started = self._by_start(mine, block, state)
        messages = Messages(channel)
        for some, weights in started:
            for clients, c in self._pieces(some, store):
                with unchanged(f"{method}.client_update", c.public):
                    returned = self.client_update(c)
                rows, states = checked_update(method, c, returned)
                store.scatter_all(clients, states)
                if weights is not None:
                    places = torch.searchsorted(some.clients, clients)
                    rows = weighted(rows, weights[places], mine.clips)
                messages.add(clients, rows)
                del returned, rows, states, c  # frees their memory before the next piece
        # private up to here; the server computes from releases alone
        clients, sent = messages.take()
        state.public = self.release_and_update(
            problem, state.public, sent, clients, block.first, channel
        )
        # clients of a method that needs the new public state in the same round
        if type(self).receive is not RoundAlgorithm.receive:
            function = f"{method}.receive"
            for clients, c in self._pieces(replace(mine, public=state.public), store):
                with unchanged(function, c.public):
                    states = self.receive(c)
                store.scatter_all(clients, checked_states(function, c, states))
        return state

    def _by_start(
        self, mine: ClientBatch, block: Block, state: State
    ) -> list[tuple[ClientBatch, Tensor | None]]:
        """Returns the clients of a round of :class:`~fedmtl.Buffered` by the state they start from.

        A client starts from the public state of the round in which the server sent it the model;
        ``state`` keeps those that later rounds may use.
        """
        self.check_starts()
        ascending = block.ascending()
        assert ascending.starts is not None
        known = {**state.earlier, block.first: state.public}
        state.earlier = {version: known[version] for version in sorted(ascending.starts.kept)}
        return by_start(mine, ascending.cohort, ascending.starts, known, self.own_starts)

    def _pieces(
        self, mine: ClientBatch, store: ClientStore
    ) -> Iterator[tuple[Tensor, ClientBatch]]:
        """Yields the clients of this process piece by piece: their positions in the data, and
        their batch with their states."""
        problem = mine.problem
        if not self.all_at_once:
            for piece in problem.pieces(mine.clients, self.local, mine.round, mine.cohort):
                yield piece.clients, mine.of(piece, store.gather_all(piece.clients))
            return
        clients = mine.clients
        if problem.rank_of is not None:
            # the problem of this rank's clients alone, with positions among them
            mine = replace(mine, problem=problem.mine, clients=torch.arange(len(clients)))
        yield clients, replace(mine, states=store.gather_all(clients))

    def release_and_update(
        self,
        problem: Problem,
        public: Public,
        rows: Mapping[str, Message],
        clients: Tensor,
        step: int,
        channel: RoundChannel,
    ) -> dict[str, Tensor]:
        """Releases the messages of a round and returns the public state after
        :meth:`server_update`.

        A server with clients in processes of their own does nothing else.

        Args:
            problem: its public parts.
            public: the public state, not to be changed.
            rows: the messages of :meth:`client_update` by release, (k, D).
            clients: int64 (k,), whose rows they are: of the cohort that is charged already, those
                that answered, or that this rank computes.
            step: number of the round.
            channel: makes the releases.

        Returns:
            The new public state, by name.
        """
        values = {}
        for name, message in rows.items():
            values[name] = channel.release(name, message, clients)
        noise = {name: channel.noise_std(name) for name in rows}
        bounds = {name: channel.releases[name].bound for name in rows}
        released = Released(values, channel.denominator, noise, step, bounds)
        function = f"{type(self).__name__}.server_update"
        with unchanged(function, public):
            moved = self.server_update(problem, public, released)
        return checked_tensors(function, "a public state", moved)

    def personalize(self, problem: Problem, state: State, clients: Tensor) -> Tensor:
        """Returns :meth:`personal_models` of ``clients``, (k, D)."""
        states = state.private.gather_all(clients)
        function = f"{type(self).__name__}.personal_models"
        with unchanged(function, state.public):
            models = self.personal_models(ClientBatch(problem, clients, state.public, states))
        return checked_models(function, models, len(clients), problem.dimension)
