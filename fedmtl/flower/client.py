"""The Flower ``ClientApp`` of a node: messages of a server, and whose node it is."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any

from flwr.app import Context, RecordDict
from flwr.app import Message as FlowerMessage
from flwr.clientapp import ClientApp

from ..errors import ConfigError, FedmtlError
from ..secure.identity import read_identity
from ..secure.masks import Identity
from ..trainer import Trainer
from .identities import checked_identities
from .last_answer import held
from .messages import (
    FINISH,
    NAME,
    OPENING,
    RECEIVE,
    ROUND,
    ROW,
    SHARES,
    log_as_flower,
    logger,
)
from .node import Node
from .server import check

ReadRecords = Callable[[str, Mapping[str, Any]], Any]
Act = Callable[[Node, RecordDict, RecordDict], RecordDict]


def client_app(
    trainer: Trainer,
    records: ReadRecords,
    *,
    folder: str | Path = "nodes",
    identities: Mapping[str, str] | None = None,
) -> ClientApp:
    """Makes the Flower ``ClientApp`` of a node, which has the records of one client.

    The configuration of a node names its client, by ``client`` or by the client's number,
    ``partition-id``.

    Args:
        trainer: the settings, those of the server.
        records: reads the examples of a client from its name and the configuration of the node. It
            returns a dataset of this one client, or a pair (x, y) of which a fifth is held out for
            the node's own scores. It is called on the node, and only there.
        folder: holds a folder for each client, with its state and at the end its model. The
            configuration of a node may override it by ``folder``.
        identities: public identity keys of all clients by name, ``"ed25519:..."``, for secure
            sums. The configuration of a node then names its own key file, by ``key``.

    Returns:
        The app for ``flower-supernode``, or for a simulation of Flower.

    Raises:
        ConfigError: see :func:`~fedmtl.flower.server_app`.
    """
    check(trainer)
    keys = checked_identities(trainer, identities)
    app = ClientApp()
    nodes: dict[str, Node] = {}  # a simulation answers for many clients in one process

    def answer(message: FlowerMessage, context: Context, act: Act) -> FlowerMessage:
        log_as_flower()
        try:
            name = name_of(trainer, context.node_config)
            if name not in nodes:
                place = Path(str(context.node_config.get("folder", folder)))
                read = partial(records, name, context.node_config)
                node = Node(trainer, name, read, place)
                if keys is not None:
                    node.join_sums(keys, _identity_of(context.node_config))
                # only now: a node without its part in secure sums is none
                nodes[name] = node
            node = nodes[name]
            with ExitStack() as stack:
                # Flower may start a process for a message while another one computes an answer
                if act is not Node.hello:
                    stack.enter_context(held(node.folder))
                content = act(node, message.content, context.state)
        except Exception as error:
            # the text of an error may have values of the records: it stays in the node's log, and
            # the reply to the server is empty
            said = "this client has no answer, and adds nothing to the sums: %s"
            logger.error(said, error, exc_info=not isinstance(error, FedmtlError))
            content = RecordDict()
        return FlowerMessage(content, reply_to=message)

    acts: dict[str, Act] = {
        NAME: Node.hello,
        ROUND: Node.train,
        SHARES: Node.shares,
        ROW: Node.row,
        OPENING: Node.opening,
        RECEIVE: Node.receive,
        FINISH: Node.finish,
    }
    # a kind is the name of Flower's decorator, a dot, and the name of the action
    for kind, act in acts.items():
        category, action = kind.split(".")
        getattr(app, category)(action)(partial(answer, act=act))
    return app


def _identity_of(config: Mapping[str, Any]) -> Identity:
    """Returns the identity of a node's client, from the node's configuration.

    Raises:
        ConfigError: the configuration names no key file.
        DataError: the file cannot be read, or is no key file.
    """
    if not config.get("key"):
        raise ConfigError(
            "the node has no identity key, which secure sums need: name the file that fedmtl "
            "identity has made, in --node-config 'key=\"...\"', and start the node again."
        )
    return read_identity(Path(str(config["key"])))


def name_of(trainer: Trainer, config: Mapping[str, Any]) -> str:
    """Returns the name of a node's client, from the node's configuration.

    Raises:
        ConfigError: the configuration names no client, or one that is not in the population.
    """
    names = trainer.data.ids
    option = "--node-config 'client=\"...\"'"
    if "client" not in config and "partition-id" not in config:
        raise ConfigError(f"the node does not know whose it is: start it with {option}.")
    number = int(config.get("partition-id", -1))
    name = f"number {number}"
    if "client" in config:
        name = str(config["client"])
    elif 0 <= number < len(names):
        name = names[number]
    if name not in names:
        some = ", ".join(names[:10])
        if len(names) > 10:
            some += ", …"
        raise ConfigError(
            f"client {name!r} is not in the population, whose {len(names):,} names are {some}. "
            f"Give one of them in {option} and start the node again."
        )
    return name
