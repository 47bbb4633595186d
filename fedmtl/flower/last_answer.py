"""The last answer of a node, on its disk, and the digest of the question to it; the folder of a
node, which one process holds at a time."""

from __future__ import annotations

import hashlib
import time
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import quote

import torch
from flwr.app import RecordDict

from .._files import claimed
from ..algorithms.client_batch import ClientStates
from ..trainer.tensor_files import read_parts, write_parts
from .messages import facts_of, tensors_of

# Letters of the name of a folder: the most, and those that stay of a longer one.
_LONGEST = 200
_BEGINNING = 100
_PAUSE = 0.1  # seconds between two looks at a folder that another process holds


def folder_name(name: str) -> str:
    """Returns the name of a client's folder.

    The folder lies in that of all clients whatever the client is called: ``..`` and ``a/b`` become
    ``%2E%2E`` and ``a%2Fb``. The end of a long name is replaced by a digest.
    """
    text = quote(name, safe="", errors="surrogatepass")
    if not text.strip("."):
        text = text.replace(".", "%2E") or "%"
    if len(text) <= _LONGEST:
        return text
    end = hashlib.sha256(name.encode("utf-8", "surrogatepass")).hexdigest()
    return f"{text[:_BEGINNING]}%-{end}"


@contextmanager
def held(folder: Path) -> Iterator[None]:
    """Holds the folder of a node for one answer, after the answers that other processes compute."""
    with ExitStack() as stack:
        waiting = True
        while waiting:
            try:
                stack.enter_context(claimed(folder))
                waiting = False
            except BlockingIOError:
                time.sleep(_PAUSE)
        yield


@dataclass(frozen=True)
class Answer:
    """The last answer of a client in a run, as it is on the node's disk.

    Attributes:
        before: 1 + the last round for which the client was asked and whose row counted, without
            this answer; 0 for none.
        after: the same number if this answer counts.
        asked: a digest of the question and of the client's state.
        parts: tensors by name: the client's state before the round (``"before"``), after it
            (``"after"``), and after it has received the new public state (``"received"``, empty
            until then); and the rows that were sent (``"rows"``).
    """

    before: int
    after: int
    asked: str
    parts: Mapping[str, ClientStates]

    @classmethod
    def read(cls, path: Path, device: torch.device) -> Answer:
        """Reads an answer from a file; its tensors go to ``device``."""
        stored, notes = read_parts(path, "before", "after", "received", "rows")
        parts = {}
        for part, own in stored.items():
            parts[part] = {name: row.to(device) for name, row in own.items()}
        return cls(**notes, parts=parts)

    def write(self, path: Path) -> None:
        """Writes all of the answer in one file, or nothing."""
        notes = {"before": self.before, "after": self.after, "asked": self.asked}
        write_parts(path, self.parts, notes)


def digest(content: RecordDict, own: ClientStates) -> str:
    """Returns a digest of a question: of the message's values and the client's state.

    Together with the node's records an answer depends on nothing else.
    """
    hashed = hashlib.blake2b(str(facts_of(content)["counted"]).encode(), digest_size=16)
    parts = {
        "public": tensors_of(content, "public"),
        "channel": tensors_of(content, "channel"),
        "own": own,
    }
    for part, values in parts.items():
        for name, value in sorted(values.items()):
            array = value.detach().cpu().contiguous().numpy()
            head = f"{part} {name} {value.dtype} {tuple(value.shape)}"
            hashed.update(head.encode() + array.tobytes())
    return hashed.hexdigest()
