"""The server: ``Trainer.fit`` with nodes as its clients."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from typing import Any

from flwr.app import Context
from flwr.serverapp import Grid, ServerApp

from .._check import Positive, check_arguments
from ..algorithms.fedsgd import FedSGD
from ..algorithms.rounds import RoundAlgorithm
from ..errors import ConfigError
from ..privacy import RecordPrivacy
from ..schedules import Buffered, Deadline
from ..trainer import Trainer
from ..trainer.fit import run_in_claimed_folder
from ..trainer.processes import in_one_process
from ..trainer.result import Result
from .buffered_engine import BufferedEngine
from .identities import checked_identities
from .messages import log_as_flower, logger
from .node_engine import NodeEngine
from .nodes import Nodes
from .population import LATENCIES, OWN_ACCOUNTS, TRUST
from .secure_engine import SecureEngine

_NO_CAP = (
    "Buffered: nobody knows before how often a client answers, so the noise is made for %d answers "
    "of one client; per_client= is a cap on them, with less noise"
)


@check_arguments
def server_app(
    trainer: Trainer,
    *,
    patience: Positive = 600.0,
    gather: float = 60.0,
    identities: Mapping[str, str] | None = None,
) -> ServerApp:
    """Makes the Flower ``ServerApp`` of a run in rounds.

    With ``schedule=Buffered(...)`` it waits for no node: it keeps ``concurrency`` nodes busy, and a
    round takes the first ``buffer`` answers. Latencies are those that nodes have; the settings of
    the schedule about them are for simulations. Without ``per_client`` the noise is made for the
    most answers that the rounds can use of one client.

    Its run folder is that of ``Trainer.fit``: ledger, checkpoint, report, and a seal that ``fedmtl
    verify`` reads. It has no scores and no personal models, which stay with the nodes. If the
    folder holds a run already, that run is resumed; the last state of a finished run is sent to the
    nodes once more.

    Args:
        trainer: the settings, with a :func:`~fedmtl.flower.population` as data and a folder, which
            the app's configuration may override by ``folder``.
        patience: seconds that a round waits for replies; later ones are left out of the sum. With
            ``Buffered``, seconds after which the place of a busy client is given to another one.
        gather: seconds that the run waits at its start for all clients to be connected. Connected
            nodes have ``patience`` to say their names. A node that comes later takes part from the
            round on that follows its answer with the name.
        identities: public identity keys of all clients by name, ``"ed25519:..."``, for secure sums.

    Returns:
        The app for ``flower-superlink``, or for a simulation of Flower.

    Raises:
        ConfigError: clients of the algorithm act one at a time, or nodes cannot follow the
            settings.
        TrainingError: the app raises it during the run if no client is there in time, at the start
            or for a round. No further round is charged then.
    """
    check(trainer)
    keys = checked_identities(trainer, identities)
    app = ServerApp()

    @app.main()
    def main(grid: Grid, context: Context) -> None:
        log_as_flower()
        folder: Any = context.run_config.get("folder", trainer.folder)
        settings = replace(trainer, folder=folder)
        result = serve(settings, grid, patience=patience, gather=gather, identities=keys)
        rounds = f"{result.algorithm}: {result.final['round']} rounds"
        if folder is not None:
            rounds += f"; fedmtl verify {folder}"
        logger.info("%s\n%s", rounds, result.privacy.text())

    return app


def serve(
    trainer: Trainer,
    grid: Grid,
    *,
    patience: float = 600.0,
    gather: float = 60.0,
    identities: Mapping[str, bytes] | None = None,
) -> Result:
    """Runs the rounds over the nodes of a grid.

    Args:
        trainer: see :func:`server_app`.
        grid: connects the nodes.
        patience: see :func:`server_app`.
        gather: see :func:`server_app`.
        identities: public keys of all clients, in the order of the population; None without secure
            sums.

    Returns:
        The result; all its models are the released one.
    """
    notes = [TRUST]
    if isinstance(trainer.privacy, RecordPrivacy):
        notes = [OWN_ACCOUNTS]
    engine: Callable[..., NodeEngine] = NodeEngine
    if identities is not None:
        notes = []  # the server sees sums only
        engine = partial(SecureEngine, identities=identities)
    if isinstance(trainer.schedule, Buffered):
        notes.append(LATENCIES)
        engine = BufferedEngine
        if trainer.schedule.per_client is None and not trainer.noiseless:
            logger.warning(_NO_CAP, math.ceil(trainer.rounds / trainer.schedule.rest))
    if notes:
        logger.info("not covered by epsilon: %s", "; ".join(notes))
    trainer.problem()  # refuses a model here, with the reason, before nodes do without
    nodes = Nodes(grid, trainer.data.ids, patience)
    nodes.gather(gather, len(nodes.names))
    settings = replace(
        trainer,
        data=replace(trainer.data, notes=tuple(notes), verify=False),
        checkpoint_every=1,  # nodes can go back by one round
        progress=False,
        finetune=None,  # nodes finetune, and compute the metrics
        metrics=(),
    )
    return run_in_claimed_folder(settings, trainer.folder is not None, engine(nodes=nodes))


def check(trainer: Trainer) -> None:
    """Refuses settings that nodes cannot follow.

    Raises:
        ConfigError: names the setting.
    """
    kind = in_one_process(trainer)
    if trainer.baselines:
        kind = "baselines"
    if kind:
        needs = "needs all clients in one process; a Flower app has a process for each"
        raise ConfigError(f"A run with {kind} {needs}.")
    if isinstance(trainer.schedule, Deadline):
        raise ConfigError(
            "Deadline(...) has latencies that are simulated; with real ones give its sampler as "
            "the schedule, and its limit as patience of server_app."
        )
    algorithm = trainer.algorithm
    if not isinstance(algorithm, RoundAlgorithm):
        lacks = "has no part that a client computes by itself; Flower apps need one"
        raise ConfigError(f"{algorithm.name} {lacks}.")
    if isinstance(algorithm, FedSGD) and algorithm.records is None:
        raise ConfigError(
            "FedSGD needs records in a Flower app, the public number of the records of all "
            "clients: neither the server nor a node knows those of the others."
        )
    privacy = trainer.privacy
    if not isinstance(privacy, RecordPrivacy) or privacy.aggregation is not None:
        return
    privacy.budgets(trainer.data.ids)  # refuses a budget for a client that is not in the population
    if privacy.delta is None and not privacy.noiseless:
        raise ConfigError(
            "RecordPrivacy needs delta in a Flower app: its default is made of the number of all "
            "records, which neither the server nor a node knows."
        )
