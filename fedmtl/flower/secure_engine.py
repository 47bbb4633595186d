"""The engine of a run with nodes whose rows the server does not see: four messages a round, and at
the end the sum with its noise."""

from __future__ import annotations

import secrets
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import torch
from flwr.app import RecordDict

from ..algorithms.base import State
from ..algorithms.rounds import RoundAlgorithm
from ..errors import SecureSumError
from ..privacy import ActivationChannel, RoundChannel
from ..privacy.mechanism import OpenedSum
from ..privacy.secure_calibration import SecureCalibration
from ..schedules import Block
from ..secure.server import SecureSumServer
from ..trainer.run_plan import RunPlan
from .messages import OPENING, RECEIVE, ROUND, ROW, SHARES, Facts, facts_of, logger, pack
from .node_engine import COUNTED, NodeEngine
from .secure_node import public_parameters, secure_calibration_of


@dataclass(kw_only=True)
class SecureEngine(NodeEngine):
    """The engine of a run of secure sums.

    Args:
        identities: public keys of all clients, in the order of the population.
    """

    identities: Mapping[str, bytes]
    secure: SecureCalibration | None = field(default=None, init=False)

    def init(self, plan: RunPlan, channel: RoundChannel | ActivationChannel) -> State:
        self.secure = secure_calibration_of(plan.settings, plan.problem)
        return super().init(plan, channel)

    def step(
        self, plan: RunPlan, channel: RoundChannel | ActivationChannel, state: State, block: Block
    ) -> State:
        """Computes one round.

        A client that is away before the roster is made adds nothing. If more clients are lost after
        it than ``missing``, nothing is released, and the state stays as it was; charges stay.
        """
        algorithm = plan.algorithm
        assert isinstance(algorithm, RoundAlgorithm)  # see check
        assert isinstance(channel, RoundChannel)  # see open
        assert self.secure is not None
        step = block.first
        logger.info("round %d of %d", step + 1, plan.stop)
        self.nodes.gather(self.nodes.patience, 1)
        # a number that no attempt had before, also of a server that was killed
        facts: Facts = {"run": self.run, "round": step, "attempt": secrets.randbits(62)}
        questions = self.contents(plan, channel, state, step, block.cohort)
        for content in questions.values():
            content.config_records["facts"]["attempt"] = facts["attempt"]
        public = public_parameters(self.secure, self.identities, plan.fingerprint, facts)
        server = SecureSumServer(public)
        try:
            self._answered(ROUND, questions, facts, server)
            roster = server.roster()
            names = server.waiting
            self._answered(SHARES, _each(facts, dict.fromkeys(names, roster)), facts, server)
            self._answered(ROW, _each(facts, server.boxes()), facts, server)
            came = server.names()
            counted = server.counted
            self._answered(OPENING, _each(facts, dict.fromkeys(counted, came)), facts, server)
            total = OpenedSum(server.total(), len(names))
        except SecureSumError as error:
            logger.warning("round %d releases nothing: %s", step + 1, error)
            return state
        place = plan.problem.data.ids.index
        clients = torch.tensor([place(name) for name in counted])
        rows = {self.secure.release.name: total}
        state.public = algorithm.release_and_update(
            plan.problem, state.public, rows, clients, step, channel
        )
        state.private.scatter(COUNTED, clients, torch.full((len(clients),), step + 1))
        if type(algorithm).receive is not RoundAlgorithm.receive:
            self.nodes.ask(RECEIVE, self.contents(plan, channel, state, step, clients))
        return state

    def _answered(
        self, kind: str, questions: Mapping[str, RecordDict], facts: Facts, server: SecureSumServer
    ) -> None:
        """Asks clients, and gives the answers that come in time to the server."""
        replies = self.nodes.ask(kind, questions)
        for name in questions:
            _taken(name, replies.get(name), facts, server.take)


def _taken(
    name: str,
    reply: RecordDict | None,
    facts: Facts,
    take: Callable[[str, bytes], None],
) -> None:
    """Takes the answer of one client; one that is missing or refused is logged."""
    try:
        if reply is None:
            raise SecureSumError("no answer in time")
        message = facts_of(reply).get("message")
        if not isinstance(message, bytes):
            raise SecureSumError("the answer is empty; the node's own log says why")
        take(name, message)
    except SecureSumError as error:
        logger.warning("round %d: client %r is left out: %s", int(facts["round"]) + 1, name, error)


def _each(facts: Facts, messages: Mapping[str, bytes]) -> dict[str, RecordDict]:
    """Returns the contents of messages to clients, by name."""
    return {name: pack({**facts, "message": message}) for name, message in messages.items()}
