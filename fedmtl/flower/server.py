"""The server: ``Trainer.fit`` whose clients are nodes."""

from __future__ import annotations

import math
import secrets
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from flwr.app import ConfigRecord, Context, Message, RecordDict
from flwr.serverapp import Grid, ServerApp
from torch import Tensor

from .._check import Positive, check_arguments
from .._files import read_json
from ..algorithms.base import Algorithm, State
from ..algorithms.store import ClientStore
from ..errors import ConfigError, TrainingError
from ..privacy import RecordPrivacy, Rounds
from ..schedules import Block
from ..trainer import Trainer
from ..trainer.engine import Engine, open_run
from ..trainer.evaluation import Metrics
from ..trainer.folder import write_json
from ..trainer.metrics import main_metric
from ..trainer.result import Result
from ..trainer.run import Run, fitted, in_one_process
from .messages import FINISH, NAME, RECEIVE, ROUND, checked_rows, facts_of, log_as_flower, logger, pack
from .population import OWN_ACCOUNTS, TRUST

COUNTED = "counted"
_ELSEWHERE = "every node keeps its own, see fedmtl verify nodes/NAME there"
_PAUSE = 0.2  # seconds between two questions for replies


@check_arguments
def server_app(trainer: Trainer, *, patience: Positive = 600.0, gather: float = 60.0) -> ServerApp:
    """Return the Flower ``ServerApp`` of a run in rounds.

    Its run folder is that of ``Trainer.fit``: ledger, checkpoint, report, and a seal that ``fedmtl verify`` reads; but
    it has no scores and no personal models, which stay with the nodes. Where the folder holds a run already, that run
    is resumed; the last state of a run that is finished is sent to the nodes once more.

    Args:
        trainer: the settings, with a :func:`~fedmtl.flower.population` as data and a folder, which the app's
            configuration may override by ``folder``.
        patience: seconds that a round waits for replies; what comes later is left out of the sum.
        gather: seconds that the run waits at its start for all clients to be connected; those that are have
            ``patience`` to say their names. A node that comes later takes part from the next round on after that in
            which it has said its name.

    Raises:
        ConfigError: an algorithm whose clients act one at a time, or settings that nodes cannot follow.
        TrainingError: of the run, where no client is there at its start, when nothing has been charged, or in time
            for a round: no further one is charged then.
    """
    check(trainer)
    app = ServerApp()

    @app.main()
    def main(grid: Grid, context: Context) -> None:
        log_as_flower()
        folder: Any = context.run_config.get("folder", trainer.folder)
        result = serve(replace(trainer, folder=folder), grid, patience=patience, gather=gather)
        where = "" if folder is None else f"; fedmtl verify {folder}"
        logger.info("%s: %d rounds%s\n%s", result.algorithm, result.final["round"], where, result.privacy.text())

    return app


def serve(trainer: Trainer, grid: Grid, *, patience: float = 600.0, gather: float = 60.0) -> Result:
    """Run the rounds over the nodes of ``grid`` and return the result, whose models are the released one; see
    :func:`server_app`."""
    trust = OWN_ACCOUNTS if isinstance(trainer.privacy, RecordPrivacy) else TRUST
    logger.info("not covered by epsilon: %s", trust)
    nodes = Nodes(grid, trainer.data.ids, patience)
    nodes.gather(gather, len(nodes.names))
    settings = replace(
        trainer,
        data=replace(trainer.data, notes=(trust,), verify=False),
        checkpoint_every=1,  # nodes can go back by one round
        progress=False,
        finetune=None,  # of the nodes, as the metrics
        metrics=(),
    )
    return fitted(settings, trainer.folder is not None, NodeEngine(nodes=nodes))


def check(trainer: Trainer) -> None:
    """Refuse settings that nodes cannot follow.

    Raises:
        ConfigError: named.
    """
    algorithm, privacy = trainer.algorithm, trainer.privacy
    if kind := "baselines" if trainer.baselines else in_one_process(trainer):
        raise ConfigError(f"A run with {kind} needs all clients in one process; a Flower app has a process for each.")
    if type(algorithm).client is Algorithm.client:
        raise ConfigError(f"{algorithm.name} has no part that a client computes by itself; Flower apps need one.")
    if isinstance(privacy, RecordPrivacy):
        privacy.budgets(trainer.data.ids)
        if privacy.delta is None and not privacy.noiseless:
            raise ConfigError(
                "RecordPrivacy needs delta in a Flower app: its default is made of the number of all records, which "
                "neither the server nor a node knows."
            )


class Nodes:
    """The nodes that are connected, by the names of their clients.

    Args:
        grid: of Flower.
        names: of all clients.
        patience: seconds to wait for replies.
    """

    def __init__(self, grid: Grid, names: Sequence[str], patience: float) -> None:
        self.grid, self.names, self.patience = grid, tuple(names), patience
        self._nodes: dict[str, int] = {}
        self._asked: dict[str, int] = {}  # questions for names that are open, and whose they are
        self._strangers: set[int] = set()  # they have answered, and are no client

    def gather(self, seconds: float, clients: int) -> None:
        """Wait until so many ``clients`` are connected, for ``seconds`` at most; and until all nodes that are have said
        their names, for which they may have to read their records, for as long as a round waits.

        Raises:
            TrainingError: there is no client, so that every further round would be charged for noise alone.
        """
        began = time.monotonic()
        while (count := len(self.connected())) < clients:
            rest = began + (max(seconds, self.patience) if self._asked else seconds) - time.monotonic()
            if rest <= 0 and not count:
                raise TrainingError(
                    f"None of {len(self.names):,} clients is connected and has said its name in time, so the run ends "
                    "before a further round is charged. Start the nodes, or have the server wait longer for them "
                    "(gather=, patience=), and run again or resume."
                )
            if rest <= 0:
                logger.warning("%d of %d clients are connected; the others are left out of the sums", count, clients)
                return
            time.sleep(min(1.0, rest))

    def connected(self) -> Mapping[str, int]:
        """Return the nodes by client. A node that is new is asked for its name, which counts when it has come; one that
        bears the name of another that is still there, or no name of the population, is left out."""
        there = set(self.grid.get_node_ids())
        self._nodes = {name: node for name, node in self._nodes.items() if node in there}
        self._asked = {sent: node for sent, node in self._asked.items() if node in there}
        new = sorted(there - self._strangers - set(self._nodes.values()) - set(self._asked.values()))
        self._asked |= self._pushed([Message(pack({}), node, NAME, ttl=self.patience) for node in new])
        for node, reply in self._replies(self._asked, 0.0):
            name = facts_of(reply).get("name")
            if name not in self.names:
                self._strangers.add(node)
                logger.warning("a node says no name of the population; its own log says why")
            elif name in self._nodes:
                logger.warning("a node calls itself %r, and another that is connected bears this name", name)
            else:
                self._nodes[str(name)] = node
        return self._nodes

    def ask(self, kind: str, contents: Mapping[str, RecordDict]) -> dict[str, RecordDict]:
        """Send the contents to the clients whose they are, and return the replies of those that answer in time."""
        nodes = self.connected()
        names = {nodes[name]: name for name in contents if name in nodes}
        messages = [Message(contents[name], node, kind, ttl=self.patience) for node, name in names.items()]
        return {names[node]: reply for node, reply in self._replies(self._pushed(messages), self.patience)}

    def _pushed(self, messages: list[Message]) -> dict[str, int]:
        """Send messages; return the node of each that was taken, by the message's number."""
        if not messages:
            return {}
        numbers = self.grid.push_messages(messages)
        return {n: message.metadata.dst_node_id for n, message in zip(numbers, messages, strict=False) if n}

    def _replies(self, waiting: dict[str, int], seconds: float) -> Iterable[tuple[int, RecordDict]]:
        """Yield node and content of every reply in time to the messages ``waiting``, in which those remain that are
        still open; not of a reply that is an error, or cannot be read."""
        end = time.monotonic() + seconds
        while waiting:
            for reply in self._pulled(list(waiting), waiting):
                node = waiting.pop(reply.metadata.reply_to_message_id, None)
                if node is not None and reply.has_content():
                    yield node, reply.content
            if waiting and time.monotonic() >= end:
                return
            time.sleep(_PAUSE if waiting else 0)

    def _pulled(self, sent: list[str], waiting: dict[str, int]) -> Iterable[Message]:
        """Yield the replies that are there. One that cannot be read must not cost the others theirs."""
        try:
            yield from list(self.grid.pull_messages(sent))
        except Exception:
            if len(sent) > 1:
                for number in sent:
                    yield from self._pulled([number], waiting)
            else:
                logger.warning("the reply of node %d cannot be read", waiting.pop(sent[0]))


@dataclass(kw_only=True)
class NodeEngine(Engine):
    """The engine of a run whose clients are nodes: messages in place of the clients' part of a step.

    Args:
        nodes: that are connected.
    """

    nodes: Nodes

    def open(self, run: Run, resume: bool) -> Rounds:
        settings = run.settings
        if isinstance(settings.privacy, RecordPrivacy) and not settings.privacy.noiseless:  # each node adds its noise
            settings = replace(settings, privacy=replace(settings.privacy, epsilon=math.inf, noise_multiplier=None))
            self.facts = {"records": "drawn by each node of its own", "releases": 0, "elsewhere": _ELSEWHERE}
        channel = open_run(settings, run.problem, run.fingerprint, ledger=run.ledger, resume=resume)
        assert isinstance(channel, Rounds)
        channel.rows_are_noised = True
        return channel

    def init(self, run: Run) -> State:
        """Return the public part of the state, and how many rounds were done when a client's rows last counted; what
        clients keep is with them."""
        self.sizes = {plan.name: plan.dimension for plan in run.channel.plans}
        self.run = secrets.token_hex(8)
        if run.folder is not None:  # nodes know the run by it, also after a resume
            path = run.folder.private / "nodes.json"
            self.run = str(read_json(path)["run"]) if path.exists() else self.run
            write_json(path, {"run": self.run})
        counted = ClientStore(run.problem.clients, {COUNTED: ((), torch.int64)})
        return State(run.algorithm.init(run.problem).public, counted)

    def contents(self, run: Run, state: State, step: int, clients: Tensor) -> dict[str, RecordDict]:
        """Return what is sent to each of ``clients``."""
        facts: dict[str, Any] = {"run": self.run, "round": step, "settings": run.fingerprint}
        common = pack({}, public=state.public, channel=run.channel.norms())
        counted = state.private.gather(COUNTED, clients).tolist()
        return {
            run.problem.data.ids[client]: RecordDict({**common, "facts": ConfigRecord(facts | {"counted": rounds})})
            for client, rounds in zip(clients.tolist(), counted, strict=True)
        }

    def step(self, run: Run, state: State, block: Block) -> State:
        """One round: the cohort is asked, and who does not answer as it should adds nothing to any sum, as if it were
        not in the population: also not to the count of an adaptive clip, to which a row of zeros would add 1/2."""
        algorithm, cohort, step = run.algorithm, block.cohort, block.first
        logger.info("round %d of %d", step + 1, run.stop)
        self.nodes.gather(self.nodes.patience, 1)
        replies = self.nodes.ask(ROUND, contents := self.contents(run, state, step, cohort))
        sent: dict[int, dict[str, Tensor]] = {}
        for place, client in enumerate(contents):
            try:
                sent[place] = checked_rows(replies.get(client), self.sizes)
            except ValueError as error:
                logger.warning("round %d: client %r is left out of the sum: %s", step + 1, client, error)
        counted = cohort[list(sent)]
        rows = {
            name: torch.cat([torch.zeros(0, d), *(own[name] for own in sent.values())])
            for name, d in self.sizes.items()
        }
        heard = replace(block, clients=counted[None, None])
        state.public = algorithm.conclude(run.problem, state.public, rows, heard, run.channel)
        state.private.scatter(COUNTED, counted, torch.full((len(counted),), step + 1))
        if type(algorithm).receive is not Algorithm.receive:
            self.nodes.ask(RECEIVE, self.contents(run, state, step, counted))
        return state

    def measure(self, run: Run, state: State) -> tuple[list[dict[str, float]], dict[str, Metrics]]:
        """Nothing is measured where there are no records."""
        return [dict.fromkeys(("loss", main_metric(run.problem.data.spec).name), math.nan)], {}

    def models(self, run: Run, state: State) -> tuple[Tensor, dict[str, Tensor]]:
        """Hand the last public state to all nodes, each of which makes its own model of it; return the released model
        for every client, or the starting point where there is none."""
        clients, step = run.problem.clients, run.history[-1]["round"]
        replies = self.nodes.ask(FINISH, self.contents(run, state, step, torch.arange(clients)))
        logger.info("%d of %d clients have the final state", len(replies), clients)
        shared = run.algorithm.shared(state)
        return (run.problem.initial if shared is None else shared).expand(clients, -1), {}
