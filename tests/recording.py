"""CUDA graphs without a GPU: a recording keeps the operations and the memory of the work, and a replay makes the same
operations on the same memory, with the numbers that they had and without a line of Python between them.

What a stand-in that does the work again cannot show, this one does: a number that Python has changed since, a tensor
that is another one now, memory that was given back. Within ``recording`` an operation that would break a recording is
an error, as it is on a GPU: one that waits for a number, or whose result has a shape that depends on values.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten

from fedmtl.stacked.graphs import Graphs
from tests.pretend import SHAPED_BY_VALUES

ASKED = "asks for a number"


class RecordedGraph:
    """Stands in for ``torch.cuda.CUDAGraph``.

    Attributes:
        calls: of a replay, an operation with its arguments and what it gave.
        replays: how often it was replayed.
    """

    def __init__(self) -> None:
        self.calls: list[tuple[Any, Any, Any, list[Tensor]]] = []
        self.replays = 0

    def pool(self) -> RecordedGraph:
        return self

    def replay(self) -> None:
        self.replays += 1
        with torch.no_grad():
            for func, args, kwargs, kept in self.calls:
                found = [t for t in tree_flatten(func(*args, **kwargs))[0] if isinstance(t, Tensor)]
                for old, new in zip(kept, found, strict=True):
                    if new.data_ptr() != old.data_ptr():  # what it computes goes where it went; a view is there
                        old.copy_(new)


class Checked(TorchDispatchMode):
    """Refuses operations that wait for a number, and keeps all others for a graph, where there is one."""

    def __init__(self, graph: RecordedGraph | None = None) -> None:
        super().__init__()
        self.graph = graph

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        by_mask = func.overloadpacket.__name__.startswith("index") and any(
            t is not None and t.dtype == torch.bool for t in (args[1] if isinstance(args[1], (list, tuple)) else ())
        )
        if func.overloadpacket.__name__ in SHAPED_BY_VALUES or by_mask:
            raise RuntimeError(f"{func} {ASKED}")
        found = func(*args, **kwargs)
        if self.graph is not None:
            kept = [t for t in tree_flatten(found)[0] if isinstance(t, Tensor)]
            self.graph.calls.append((func, args, kwargs, kept))
        return found


@contextmanager
def recording(monkeypatch: Any) -> Iterator[list[RecordedGraph]]:
    """Within the block, stacks on the CPU record as they do on a GPU, in :class:`RecordedGraph`; yields the graphs."""
    graphs: list[RecordedGraph] = []
    modes: list[Checked] = []

    inside: list[torch.device] = []  # of several devices streams and graphs are those of the current one
    stream = SimpleNamespace(wait_stream=lambda other: None)

    @contextmanager
    def current(device: torch.device) -> Iterator[None]:
        inside.append(device)
        yield
        inside.pop()

    def made() -> Any:
        assert inside
        return stream

    def graph() -> RecordedGraph:
        assert inside
        graphs.append(RecordedGraph())
        return graphs[-1]

    def set_mode(mode: Any) -> None:
        if mode == "error":
            modes.append(Checked())
            modes[-1].__enter__()
        else:
            modes.pop().__exit__(None, None, None)

    fakes = {
        "device": current,
        "stream": lambda stream: nullcontext(),
        "Stream": made,
        "current_stream": made,
        "CUDAGraph": graph,
        "graph": lambda graph, pool, stream, capture_error_mode: Checked(graph),
        "get_sync_debug_mode": lambda: 0,
        "set_sync_debug_mode": set_mode,
    }
    with monkeypatch.context() as patch:
        for name, value in fakes.items():
            patch.setattr(torch.cuda, name, value)
        patch.setattr(Graphs, "capture", Graphs._captured)
        yield graphs
