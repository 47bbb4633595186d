"""A stand-in for Flower's Grid in one process: it calls the handlers of ClientApps directly."""

from collections.abc import Callable, Iterable
from typing import Any

from flwr.app import Context, Message, RecordDict
from flwr.serverapp import Grid
from flwr.supercore.task_identity import TaskIdentity

from fedmtl.flower.messages import NAME, ROUND


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
        # what the SuperNodes keep in memory, and the rest of their configuration, by client
        self.memory = {name: RecordDict() for name in self.nodes.values()}
        self.config: dict[str, dict[str, Any]] = {name: {} for name in self.nodes.values()}

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
        name = self.nodes[node]
        return Context(1, node, {"client": name, **self.config[name]}, self.memory[name], {})

    def pull_messages(self, message_ids: Iterable[str]) -> list[Message]:
        return [self.replies.pop(one) for one in message_ids if one in self.replies]


class Clock:
    """Virtual time: it stands still while anybody computes."""

    def __init__(self) -> None:
        self.now = 0.0
        self.due: dict[str, float] = {}  # when replies come, by the number of the message

    def sleep(self, seconds: float) -> None:
        """Go on to the next reply, and by a second at most."""
        later = [time for time in self.due.values() if time > self.now]
        self.now = min([self.now + 1.0, *later])


class SlowGrid(LocalGrid):
    """Nodes whose replies to the questions of rounds come after a latency, and never after their time to live.

    Args:
        app, names, options: see LocalGrid.
        clock: of the grid.
        latency: (client, how many questions of rounds the client got before) -> seconds.
    """

    def __init__(
        self,
        app: Any,
        names: Iterable[str],
        clock: Clock,
        latency: Callable[[str, int], float],
        **options: Any,
    ) -> None:
        super().__init__(app, names, **options)
        self.clock, self.latency = clock, latency

    def _push(self, message: Message) -> str:
        kind, client = message.metadata.message_type, self.nodes[message.metadata.dst_node_id]
        seconds = self.latency(client, self.counts.get((kind, client), 0)) if kind == ROUND else 0.0
        number = super()._push(message)
        self.clock.due[number] = self.clock.now + seconds
        if seconds > message.metadata.ttl:
            self.replies.pop(number, None)
            del self.clock.due[number]
        return number

    def pull_messages(self, message_ids: Iterable[str]) -> list[Message]:
        there = [one for one in message_ids if self.clock.due.get(one, 0.0) <= self.clock.now]
        return super().pull_messages(there)
