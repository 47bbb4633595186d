"""The server: ``Trainer.fit`` with nodes as its clients."""

from __future__ import annotations

import math
import secrets
from dataclasses import dataclass, replace
from typing import Any

import torch
from flwr.app import ConfigRecord, Context, RecordDict
from flwr.serverapp import Grid, ServerApp
from torch import Tensor

from .._check import Positive, check_arguments
from .._files import read_json, write_json
from ..algorithms.base import State
from ..algorithms.rounds import RoundAlgorithm
from ..algorithms.store import ClientStore
from ..errors import ConfigError
from ..privacy import RecordPrivacy, Rounds
from ..schedules import Block, Buffered
from ..trainer import Trainer
from ..trainer.engine import Engine, open_run
from ..trainer.evaluation import Metrics
from ..trainer.fit import fitted
from ..trainer.metrics import main_metric
from ..trainer.processes import in_one_process
from ..trainer.result import Result
from ..trainer.run import Run
from .messages import FINISH, RECEIVE, ROUND, checked_rows, log_as_flower, logger, pack
from .nodes import Nodes
from .population import OWN_ACCOUNTS, TRUST

COUNTED = "counted"
_ELSEWHERE = "every node keeps its own, see fedmtl verify nodes/NAME there"


@check_arguments
def server_app(trainer: Trainer, *, patience: Positive = 600.0, gather: float = 60.0) -> ServerApp:
    """Makes the Flower ``ServerApp`` of a run in rounds.

    Its run folder is that of ``Trainer.fit``: ledger, checkpoint, report, and a seal that ``fedmtl
    verify`` reads. It has no scores and no personal models, which stay with the nodes. If the
    folder holds a run already, that run is resumed; the last state of a finished run is sent to the
    nodes once more.

    Args:
        trainer: the settings, with a :func:`~fedmtl.flower.population` as data and a folder, which
            the app's configuration may override by ``folder``.
        patience: seconds that a round waits for replies; later ones are left out of the sum.
        gather: seconds that the run waits at its start for all clients to be connected. Connected
            nodes have ``patience`` to say their names. A node that comes later takes part from the
            round on that follows its answer with the name.

    Returns:
        The app for ``flower-superlink``, or for a simulation of Flower.

    Raises:
        ConfigError: clients of the algorithm act one at a time, or nodes cannot follow the
            settings.
        TrainingError: the app raises it during the run if no client is there in time, at the start
            or for a round. No further round is charged then.
    """
    check(trainer)
    app = ServerApp()

    @app.main()
    def main(grid: Grid, context: Context) -> None:
        log_as_flower()
        folder: Any = context.run_config.get("folder", trainer.folder)
        result = serve(replace(trainer, folder=folder), grid, patience=patience, gather=gather)
        rounds = f"{result.algorithm}: {result.final['round']} rounds"
        if folder is not None:
            rounds += f"; fedmtl verify {folder}"
        logger.info("%s\n%s", rounds, result.privacy.text())

    return app


def serve(trainer: Trainer, grid: Grid, *, patience: float = 600.0, gather: float = 60.0) -> Result:
    """Runs the rounds over the nodes of a grid.

    Args:
        trainer: see :func:`server_app`.
        grid: connects the nodes.
        patience: see :func:`server_app`.
        gather: see :func:`server_app`.

    Returns:
        The result; all its models are the released one.
    """
    trust = TRUST
    if isinstance(trainer.privacy, RecordPrivacy):
        trust = OWN_ACCOUNTS
    logger.info("not covered by epsilon: %s", trust)
    trainer.problem()  # refuses a model here, with the reason, before nodes do without
    nodes = Nodes(grid, trainer.data.ids, patience)
    nodes.gather(gather, len(nodes.names))
    settings = replace(
        trainer,
        data=replace(trainer.data, notes=(trust,), verify=False),
        checkpoint_every=1,  # nodes can go back by one round
        progress=False,
        finetune=None,  # nodes finetune, and compute the metrics
        metrics=(),
    )
    return fitted(settings, trainer.folder is not None, NodeEngine(nodes=nodes))


def check(trainer: Trainer) -> None:
    """Refuses settings that nodes cannot follow.

    Raises:
        ConfigError: names the setting.
    """
    kind = in_one_process(trainer)
    if trainer.baselines:
        kind = "baselines"
    if isinstance(trainer.schedule, Buffered):
        kind = "the schedule Buffered(...)"
    if kind:
        needs = "needs all clients in one process; a Flower app has a process for each"
        raise ConfigError(f"A run with {kind} {needs}.")
    algorithm = trainer.algorithm
    if not isinstance(algorithm, RoundAlgorithm):
        lacks = "has no part that a client computes by itself; Flower apps need one"
        raise ConfigError(f"{algorithm.name} {lacks}.")
    privacy = trainer.privacy
    if not isinstance(privacy, RecordPrivacy):
        return
    privacy.budgets(trainer.data.ids)  # refuses a budget for a client that is not in the population
    if privacy.delta is None and not privacy.noiseless:
        raise ConfigError(
            "RecordPrivacy needs delta in a Flower app: its default is made of the number of all "
            "records, which neither the server nor a node knows."
        )


@dataclass(kw_only=True)
class NodeEngine(Engine):
    """The engine of a run with nodes: messages take the place of the clients' part of a step.

    Args:
        nodes: that are connected.
    """

    nodes: Nodes

    def open(self, run: Run, resume: bool) -> Rounds:
        settings = run.settings
        privacy = settings.privacy
        if isinstance(privacy, RecordPrivacy) and not privacy.noiseless:
            # each node adds its noise and charges its own ledger: the server's channel has none
            privacy = replace(privacy, epsilon=math.inf, noise_multiplier=None)
            settings = replace(settings, privacy=privacy)
            self.facts = {
                "records": "drawn by each node of its own",
                "releases": 0,
                "elsewhere": _ELSEWHERE,
            }
        channel = open_run(
            settings, run.problem, run.plan.fingerprint, ledger=run.ledger, resume=resume
        )
        assert isinstance(channel, Rounds)
        channel.rows_are_noised = True
        return channel

    def init(self, run: Run) -> State:
        """Returns the state of a run: its public part, and a counter for each client.

        The counter is the number of rounds that had ended when a row of the client last counted.
        All else that clients keep is with them.
        """
        self.sizes = {plan.name: plan.dimension for plan in run.channel.plans}
        self.run = secrets.token_hex(8)
        # nodes know the run by its name, also after a resume
        if run.folder is not None:
            path = run.folder.private / "nodes.json"
            if path.exists():
                self.run = str(read_json(path)["run"])
            write_json(path, {"run": self.run})
        counted = ClientStore(run.problem.clients, {COUNTED: ((), torch.int64)})
        return State(run.algorithm.init(run.problem).public, counted)

    def contents(self, run: Run, state: State, step: int, clients: Tensor) -> dict[str, RecordDict]:
        """Returns the messages to ``clients``, int64 (k,), by their names."""
        facts: dict[str, Any] = {"run": self.run, "round": step, "settings": run.plan.fingerprint}
        common = pack({}, public=state.public, channel=run.channel.norms())
        counted = state.private.gather(COUNTED, clients).tolist()
        contents = {}
        for client, rounds in zip(clients.tolist(), counted, strict=True):
            own = ConfigRecord(facts | {"counted": rounds})
            contents[run.problem.data.ids[client]] = RecordDict({**common, "facts": own})
        return contents

    def step(self, run: Run, state: State, block: Block) -> State:
        """Computes one round with the answers of its cohort.

        A client without a valid answer adds nothing to any sum, as if it were not in the
        population. It is also left out of the count of an adaptive clip, to which a row of zeros
        would add 1/2.
        """
        algorithm = run.algorithm
        assert isinstance(algorithm, RoundAlgorithm)  # see check
        cohort = block.cohort
        step = block.first
        logger.info("round %d of %d", step + 1, run.stop)
        self.nodes.gather(self.nodes.patience, 1)
        contents = self.contents(run, state, step, cohort)
        replies = self.nodes.ask(ROUND, contents)
        # the rows of valid answers, by the client's place in the cohort
        sent: dict[int, dict[str, Tensor]] = {}
        for place, client in enumerate(contents):
            try:
                sent[place] = checked_rows(replies.get(client), self.sizes)
            except ValueError as error:
                left_out = "is left out of the sum"
                logger.warning("round %d: client %r %s: %s", step + 1, client, left_out, error)
        counted = cohort[list(sent)]
        rows = {}
        for name, dimension in self.sizes.items():
            none = torch.zeros(0, dimension)  # a round without answers has rows (0, d)
            rows[name] = torch.cat([none, *(own[name] for own in sent.values())])
        heard = replace(block, clients=counted[None, None])
        state.public = algorithm.conclude(run.problem, state.public, rows, heard, run.channel)
        state.private.scatter(COUNTED, counted, torch.full((len(counted),), step + 1))
        if type(algorithm).receive is not RoundAlgorithm.receive:
            self.nodes.ask(RECEIVE, self.contents(run, state, step, counted))
        return state

    def measure(self, run: Run, state: State) -> tuple[list[dict[str, float]], dict[str, Metrics]]:
        """Returns NaN for every score: a server has no records to measure on."""
        metric = main_metric(run.problem.data.spec, run.problem.loss).name
        return [{"loss": math.nan, metric: math.nan}], {}

    def models(self, run: Run, state: State) -> tuple[Tensor, dict[str, Tensor]]:
        """Sends the last public state to all nodes, each of which makes its own model from it.

        Returns:
            The released model for every client, (n, D), or the initial one if none is released.
        """
        clients = run.problem.clients
        step = run.evaluations.rows[-1]["round"]
        replies = self.nodes.ask(FINISH, self.contents(run, state, step, torch.arange(clients)))
        logger.info("%d of %d clients have the final state", len(replies), clients)
        shared = run.algorithm.shared(state)
        if shared is None:
            shared = run.problem.initial
        return shared.expand(clients, -1), {}
