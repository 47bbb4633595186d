"""A stand-in for Flower's Grid in one process: it calls the handlers of ClientApps directly."""

from collections.abc import Callable, Iterable
from typing import Any

from flwr.app import Context, Message, RecordDict
from flwr.serverapp import Grid
from flwr.supercore.task_identity import TaskIdentity

from fedmtl.flower.messages import NAME


class LocalGrid(Grid):
    """Nodes of one process, one for each client.

    Args:
        app: of all nodes.
        names: of the clients.
        lost: (kind of message, client, how many of this kind the client got before) -> whether its reply is lost.
        broken: the same -> what becomes of the reply's content, or None.
        away: (kind, client, number) -> whether the message never reaches the node.
    """

    def __init__(
        self,
        app: Any,
        names: Iterable[str],
        *,
        lost: Callable[[str, str, int], bool] = lambda *_: False,
        away: Callable[[str, str, int], bool] = lambda *_: False,
        broken: Callable[
            [str, str, int, RecordDict], RecordDict
        ] = lambda kind, client, number, content: content,
    ) -> None:
        TaskIdentity.task_id = TaskIdentity.run_id = 1
        TaskIdentity.node_id = 0
        self.app, self.lost, self.away, self.broken = app, lost, away, broken
        self.nodes = {100 + place: name for place, name in enumerate(names)}
        self.counts: dict[tuple[str, str], int] = {}
        self.sent: list[tuple[str, str, RecordDict]] = []
        self.replies: dict[str, Message] = {}

    def set_run(self, run: Any) -> None: ...

    @property
    def run(self) -> Any: ...

    def create_message(self, *args: Any, **options: Any) -> Message:
        raise NotImplementedError

    def send_and_receive(self, *args: Any, **options: Any) -> Iterable[Message]:
        raise NotImplementedError

    def get_node_ids(self) -> list[int]:
        return list(self.nodes)

    def push_messages(self, messages: Iterable[Message]) -> list[str]:
        return [self._push(message) for message in messages]

    def _push(self, message: Message) -> str:
        kind, node = message.metadata.message_type, message.metadata.dst_node_id
        client, number = self.nodes[node], f"message {len(self.sent)}"
        message.metadata.__dict__["_message_id"] = number
        self.sent.append((kind, client, message.content))
        count = self.counts.get((kind, client), 0)
        self.counts[kind, client] = count + 1
        if kind == NAME or not self.away(kind, client, count):
            reply = self.app(message, self.context(node))
            if not self.lost(kind, client, count):
                if reply.has_content():
                    reply.content = self.broken(kind, client, count, reply.content)
                self.replies[number] = reply
        return number

    def context(self, node: int) -> Context:
        return Context(1, node, {"client": self.nodes[node]}, RecordDict(), {})

    def pull_messages(self, message_ids: Iterable[str]) -> list[Message]:
        return [self.replies.pop(one) for one in message_ids if one in self.replies]
