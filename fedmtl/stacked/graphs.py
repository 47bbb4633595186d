"""Work that is recorded once and then replayed at one call: a CUDA graph, or on a CPU the work itself.

A local step of a small model is a hundred kernels of a few microseconds, and launching them one by one takes longer
than they do. A graph launches all of them at once, always on the same memory: whoever replays it writes its inputs
there first.
"""

from __future__ import annotations

import logging
from collections import OrderedDict
from collections.abc import Callable, Hashable
from typing import Any, Protocol

import torch

logger = logging.getLogger("fedmtl")
_KEPT = 4  # programs of a stack: a method with two trainings a round has two
_WARM_UP = 2


class Graph(Protocol):
    """Recorded work."""

    def replay(self) -> None:
        """Do it again."""


class EagerGraph:
    """Stands in for a graph where there is no GPU: its replay does the work."""

    def __init__(self, work: Callable[[], None]) -> None:
        self.replay = work


class Graphs:
    """What a stack keeps of recorded work: programs by key, of which the last few are kept.

    Args:
        chunk: clients that are stacked, at most.

    Attributes:
        captures: graphs that were recorded so far.
    """

    def __init__(self, chunk: int) -> None:
        self.chunk, self.captures = chunk, 0
        self._programs: OrderedDict[Hashable, Any] = OrderedDict()
        self._pool: Any = None
        self._refused = False

    def size(self, count: int, grain: int) -> int:
        """Return the number of clients, from ``count`` on, for which there is a graph: of 1, 2, 3, 4, 6, 8, 12, ...
        grains the next, or as many as are stacked at most."""
        grains, most = -(-count // grain), max(1, self.chunk // grain)
        power = 1 << (grains - 1).bit_length()
        size = power // 4 * 3 if grains <= power // 4 * 3 else power
        return max(min(size, most), grains) * grain

    def program(self, key: Hashable, fits: Callable[[Any], bool], build: Callable[[], Any]) -> Any:
        """Return the program under ``key``; where there is none that fits, a new one."""
        found = self._programs.pop(key, None)
        if found is None or not fits(found):
            found = build()
        self._programs[key] = found
        if len(self._programs) > _KEPT:
            self._programs.popitem(last=False)
        return found

    def capture(self, work: Callable[[], None], device: torch.device) -> Graph | None:
        """Record ``work``, whose tensors stay where they are; it is done a few times on the way. None where it cannot
        be recorded, such as for a model that asks for its own numbers."""
        if device.type == "cuda":
            return self._captured(work)
        self.captures += 1
        return EagerGraph(work)

    def _captured(self, work: Callable[[], None]) -> Graph | None:
        if self._refused:
            return None
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            for _ in range(_WARM_UP):
                work()
        torch.cuda.current_stream().wait_stream(side)
        self._pool = torch.cuda.graph_pool_handle() if self._pool is None else self._pool
        graph = torch.cuda.CUDAGraph()
        try:
            with torch.cuda.graph(graph, pool=self._pool):
                work()
        except RuntimeError as error:
            self._refused = True
            logger.warning("local steps are launched kernel by kernel, since no CUDA graph records them: %s", error)
            return None
        self.captures += 1
        return graph
