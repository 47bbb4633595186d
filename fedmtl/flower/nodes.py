"""The nodes of a grid, by the names of their clients: messages to them, and their replies."""

from __future__ import annotations

import time
from collections.abc import Collection, Iterable, Mapping, Sequence

from flwr.app import Message, RecordDict
from flwr.serverapp import Grid

from ..errors import TrainingError
from .messages import NAME, facts_of, logger, pack

_PAUSE = 0.2  # seconds between two questions for replies


def pause() -> None:
    """Waits until replies are asked for again."""
    time.sleep(_PAUSE)


class Nodes:
    """The nodes that are connected, by the names of their clients.

    Args:
        grid: of Flower.
        names: of all clients.
        patience: seconds to wait for replies.
    """

    def __init__(self, grid: Grid, names: Sequence[str], patience: float) -> None:
        self.grid = grid
        self.names = tuple(names)
        self.patience = patience
        self._nodes: dict[str, int] = {}
        # the nodes with an open question for their name, by the number of the message
        self._asked: dict[str, int] = {}
        # nodes that have answered with no name of the population
        self._strangers: set[int] = set()

    def gather(self, seconds: float, clients: int) -> None:
        """Waits until so many ``clients`` are connected, for ``seconds`` at most.

        It waits for the names of all connected nodes for as long as a round waits for replies: a
        node may have to read its records before it says its name.

        Raises:
            TrainingError: there is no client; every further round would be charged for noise alone.
        """
        began = time.monotonic()
        count = len(self.connected())
        while count < clients:
            limit = seconds
            if self._asked:
                limit = max(seconds, self.patience)
            rest = began + limit - time.monotonic()
            if rest <= 0:
                break
            time.sleep(min(1.0, rest))
            count = len(self.connected())
        if count >= clients:
            return
        if count == 0:
            raise TrainingError(
                f"None of {len(self.names):,} clients is connected and has said its name in time, "
                "so the run ends before a further round is charged. Start the nodes, or have the "
                "server wait longer for them (gather=, patience=), and run again or resume."
            )
        left_out = "the others are left out of the sums"
        logger.warning("%d of %d clients are connected; %s", count, clients, left_out)

    @property
    def there(self) -> Collection[str]:
        """Returns the clients of :meth:`connected` as of its last call."""
        return self._nodes.keys()

    def connected(self) -> Mapping[str, int]:
        """Returns the nodes by client.

        A new node is asked for its name, and counts when its answer has come. A node is left out if
        another one that is connected has its name, or if the population has no such name.
        """
        there = set(self.grid.get_node_ids())
        self._nodes = {name: node for name, node in self._nodes.items() if node in there}
        self._asked = {sent: node for sent, node in self._asked.items() if node in there}
        known = self._strangers.union(self._nodes.values(), self._asked.values())
        questions = []
        for node in sorted(there - known):
            questions.append(Message(pack({}), node, NAME, ttl=self.patience))
        self._asked.update(self._pushed(questions))
        for number, reply in self.poll(self._asked).items():
            node = self._asked.pop(number)
            if reply is None:
                continue
            name = facts_of(reply).get("name")
            if name not in self.names:
                self._strangers.add(node)
                logger.warning("a node says no name of the population; its own log says why")
            elif name in self._nodes:
                other = "another that is connected bears this name"
                logger.warning("a node calls itself %r, and %s", name, other)
            else:
                self._nodes[str(name)] = node
        return self._nodes

    def ask(self, kind: str, contents: Mapping[str, RecordDict]) -> dict[str, RecordDict]:
        """Sends each client its message, and waits for the replies.

        Args:
            kind: of the messages.
            contents: of the messages by client; a client that is not connected gets none.

        Returns:
            The replies that come in time, by client.
        """
        names = self.send(kind, contents)
        return {names[number]: reply for number, reply in self._replies(set(names), self.patience)}

    def send(self, kind: str, contents: Mapping[str, RecordDict]) -> dict[str, str]:
        """Sends each client its message, and waits for nobody.

        Args:
            kind: of the messages.
            contents: of the messages by client; a client that is not connected gets none.

        Returns:
            The client of each message that was taken, by the message's number.
        """
        nodes = self.connected()
        names = {nodes[name]: name for name in contents if name in nodes}
        messages = []
        for node, name in names.items():
            messages.append(Message(contents[name], node, kind, ttl=self.patience))
        return {number: names[node] for number, node in self._pushed(messages).items()}

    def poll(self, sent: Iterable[str]) -> dict[str, RecordDict | None]:
        """Returns the replies that have come, by the number of the message.

        Args:
            sent: numbers of the messages.

        Returns:
            Their contents; None for a reply that is an error, or that cannot be read.
        """
        numbers = list(sent)
        found: dict[str, RecordDict | None] = {}
        if not numbers:
            return found
        for number, reply in self._pulled(numbers):
            # a second reply to one message counts no more than one to none
            if number in numbers and number not in found:
                found[number] = reply
        return found

    def _pushed(self, messages: list[Message]) -> dict[str, int]:
        """Sends messages; returns the node of each that was taken, by the message's number."""
        if not messages:
            return {}
        nodes = {}
        numbers = self.grid.push_messages(messages)
        for number, message in zip(numbers, messages, strict=False):
            if number:  # a message that Flower has not taken has none
                nodes[number] = message.metadata.dst_node_id
        return nodes

    def _replies(self, sent: Collection[str], seconds: float) -> Iterable[tuple[str, RecordDict]]:
        """Yields number and content of every reply that comes within ``seconds``.

        A reply that is an error, or that cannot be read, is left out.

        Args:
            sent: numbers of the messages.
            seconds: to wait.
        """
        waiting = set(sent)
        end = time.monotonic() + seconds
        while waiting:
            for number, reply in self.poll(sorted(waiting)).items():
                waiting.discard(number)
                if reply is not None:
                    yield number, reply
            if waiting and time.monotonic() >= end:
                return
            if waiting:
                pause()

    def _pulled(self, sent: list[str]) -> Iterable[tuple[str, RecordDict | None]]:
        """Yields the replies that have come to the messages ``sent``, as :meth:`poll` returns
        them."""
        try:
            replies = list(self.grid.pull_messages(sent))
        except Exception:
            # one reply that cannot be read must not cost the others theirs: they are pulled singly
            if len(sent) == 1:
                logger.warning("the reply to message %s cannot be read", sent[0])
                yield sent[0], None
                return
            for number in sent:
                yield from self._pulled([number])
            return
        for reply in replies:
            content = None
            if reply.has_content():
                content = reply.content
            yield reply.metadata.reply_to_message_id, content
