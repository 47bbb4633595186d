"""The engine of a run with nodes: messages take the place of the clients' part of a step."""

from __future__ import annotations

import math
import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from flwr.app import ConfigRecord, RecordDict
from torch import Tensor

from .._files import read_json, write_json
from ..algorithms.base import State
from ..algorithms.rounds import RoundAlgorithm
from ..algorithms.store import ClientStore, Fields
from ..privacy import ActivationChannel, BoundSampler, RecordPrivacy, RoundChannel
from ..schedules import Block
from ..trainer.engine import Engine
from ..trainer.evaluation import Metrics
from ..trainer.metrics import main_metric
from ..trainer.run_channel import open_run
from ..trainer.run_plan import RunPlan
from .account import schedule_of
from .messages import FINISH, RECEIVE, ROUND, checked_rows, logger, pack
from .nodes import Nodes

COUNTED = "counted"
_ELSEWHERE = "every node keeps its own, see fedmtl verify nodes/NAME there"


@dataclass(kw_only=True)
class NodeEngine(Engine):
    """The engine of a run with nodes: messages take the place of the clients' part of a step.

    Args:
        nodes: that are connected.
    """

    nodes: Nodes

    def open(self, plan: RunPlan, resume: bool) -> RoundChannel:
        settings = plan.settings
        privacy = settings.privacy
        noised = isinstance(privacy, RecordPrivacy) and not privacy.noiseless
        if isinstance(privacy, RecordPrivacy) and noised and privacy.aggregation is None:
            # each node adds its noise and charges its own ledger: the server's channel has none
            privacy = replace(privacy, epsilon=math.inf, noise_multiplier=None)
            settings = replace(settings, privacy=privacy)
            self.facts = {
                "records": "drawn by each node of its own",
                "releases": 0,
                "elsewhere": _ELSEWHERE,
            }
        channel = open_run(
            settings,
            plan.problem,
            plan.fingerprint,
            sampler=self.schedule(plan),
            ledger=plan.ledger,
            resume=resume,
        )
        assert isinstance(channel, RoundChannel)
        channel.nodes_add_row_noise = True
        return channel

    def schedule(self, plan: RunPlan) -> BoundSampler:
        """Returns the schedule of a run."""
        return schedule_of(plan.settings)

    def fields(self) -> Fields:
        """Returns the fields of the store of clients: a counter for each.

        It is 1 + the last round for which the client was asked and whose row counted. All else that
        clients keep is with them.
        """
        return {COUNTED: ((), torch.int64)}

    def init(self, plan: RunPlan, channel: RoundChannel | ActivationChannel) -> State:
        """Returns the state of a run: its public part, and a client store with :meth:`fields`."""
        assert isinstance(channel, RoundChannel)  # see open
        self.sizes = {release.name: release.dimension for release in channel.plans}
        self.run = secrets.token_hex(8)
        # nodes know the run by its name, also after a resume
        if plan.folder is not None:
            path = plan.folder.private / "nodes.json"
            if path.exists():
                self.run = str(read_json(path)["run"])
            write_json(path, {"run": self.run})
        store = ClientStore(plan.problem.clients, self.fields())
        return State(plan.algorithm.init(plan.problem).public, store)

    def contents(
        self, plan: RunPlan, channel: RoundChannel, state: State, step: int, clients: Tensor
    ) -> dict[str, RecordDict]:
        """Returns the messages to ``clients``, int64 (k,), by their names."""
        facts: dict[str, Any] = {"run": self.run, "round": step, "settings": plan.fingerprint}
        common = pack({}, public=state.public, channel=channel.norms())
        counted = state.private.gather(COUNTED, clients).tolist()
        contents = {}
        for client, rounds in zip(clients.tolist(), counted, strict=True):
            own = ConfigRecord(facts | {"counted": rounds})
            contents[plan.problem.data.ids[client]] = RecordDict({**common, "facts": own})
        return contents

    def step(
        self, plan: RunPlan, channel: RoundChannel | ActivationChannel, state: State, block: Block
    ) -> State:
        """Computes one round with the answers of its cohort.

        A client without a valid answer adds nothing to any sum, as if it were not in the
        population. It is also left out of the count of an adaptive clip, to which a row of zeros
        would add 1/2.
        """
        algorithm = plan.algorithm
        assert isinstance(algorithm, RoundAlgorithm)  # see check
        assert isinstance(channel, RoundChannel)  # see open
        cohort = block.cohort
        step = block.first
        logger.info("round %d of %d", step + 1, plan.stop)
        self.nodes.gather(self.nodes.patience, 1)
        contents = self.contents(plan, channel, state, step, cohort)
        replies = self.nodes.ask(ROUND, contents)
        # the rows of valid answers, by the client's place in the cohort
        sent: dict[int, dict[str, Tensor]] = {}
        for place, client in enumerate(contents):
            try:
                sent[place] = checked_rows(replies.get(client), self.sizes, self.run, step)
            except ValueError as error:
                left_out = "is left out of the sum"
                logger.warning("round %d: client %r %s: %s", step + 1, client, left_out, error)
        counted = cohort[list(sent)]
        rows = self.stacked(list(sent.values()))
        state.public = algorithm.release_and_update(
            plan.problem, state.public, rows, counted, step, channel
        )
        state.private.scatter(COUNTED, counted, torch.full((len(counted),), step + 1))
        if type(algorithm).receive is not RoundAlgorithm.receive:
            self.nodes.ask(RECEIVE, self.contents(plan, channel, state, step, counted))
        return state

    def stacked(self, sent: Sequence[Mapping[str, Tensor]]) -> dict[str, Tensor]:
        """Returns the rows of k clients by release, (k, d).

        Args:
            sent: by client, (1, d) by release.
        """
        rows = {}
        for name, dimension in self.sizes.items():
            none = torch.zeros(0, dimension)  # a round without answers has rows (0, d)
            rows[name] = torch.cat([none, *(own[name] for own in sent)])
        return rows

    def measure(
        self, plan: RunPlan, state: State
    ) -> tuple[list[dict[str, float]], dict[str, Metrics]]:
        """Returns NaN for every score: a server has no records to measure on."""
        metric = main_metric(plan.problem.data.spec, plan.problem.loss).name
        return [{"loss": math.nan, metric: math.nan}], {}

    def models(
        self, plan: RunPlan, channel: RoundChannel | ActivationChannel, state: State, done: int
    ) -> tuple[Tensor, dict[str, Tensor]]:
        """Sends the last public state to all nodes, each of which makes its own model from it.

        Returns:
            The released model for every client, (n, D), or the initial one if none is released.
        """
        assert isinstance(channel, RoundChannel)  # see open
        clients = plan.problem.clients
        contents = self.contents(plan, channel, state, done, torch.arange(clients))
        replies = self.nodes.ask(FINISH, contents)
        logger.info("%d of %d clients have the final state", len(replies), clients)
        shared = plan.algorithm.shared(state)
        if shared is None:
            shared = plan.problem.initial
        return shared.expand(clients, -1), {}
