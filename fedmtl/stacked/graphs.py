"""Work that is recorded once and then replayed at one call: a CUDA graph, or on a CPU the work itself.

A local step of a small model is a hundred kernels of a few microseconds, and launching them one by one takes longer
than they do. A graph launches all of them at once, always on the same memory: whoever replays it writes its inputs
there first.
"""

from __future__ import annotations

import logging
from collections import OrderedDict
from collections.abc import Callable, Hashable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

logger = logging.getLogger("fedmtl")
_KEPT = 4  # programs of a stack: a method with two trainings a round has two
_ALIKE = 0.1  # of how far work moves a tensor: a replay that is further off has not done the work


class Graph(Protocol):
    """Recorded work."""

    def replay(self) -> None:
        """Do it again."""


class EagerGraph:
    """Stands in for a graph where there is no GPU: its replay does the work."""

    def __init__(self, work: Callable[[], None]) -> None:
        self.replay = work


@dataclass(frozen=True)
class Work:
    """Work to be recorded, on tensors that stay where they are.

    Attributes:
        do: does it.
        begin: writes again what it starts from, so that it can be repeated.
        moved: some of what it changes.
    """

    do: Callable[[], None]
    begin: Callable[[], None]
    moved: Tensor


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
        self._stream: Any = None
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

    def forget(self) -> None:
        """Drop all programs, and with them the data and the memory of a device that they hold."""
        self._programs.clear()

    def capture(self, work: Work, device: torch.device, beside: Graph | None = None) -> Graph | None:
        """Record work; it is done a few times on the way, and its replay is compared with it.

        Args:
            work: all of its tensors are on the device.
            device: whose.
            beside: a graph that lives as long as this one and is never replayed at the same time: they share memory for
                what they compute in between.

        Returns:
            None where it cannot be recorded, such as for a model that asks for its own numbers.
        """
        if device.type == "cuda":
            return self._captured(work, device, beside)
        self.captures += 1
        return EagerGraph(work.do)

    def _captured(self, work: Work, device: torch.device, beside: Any) -> Graph | None:
        if self._refused:
            return None
        try:
            with torch.cuda.device(device):  # of several: streams and graphs are those of the current one
                graph = self._recorded(work, beside)
        except RuntimeError as error:
            self._refused = True
            logger.warning("local steps are launched kernel by kernel, since no CUDA graph records them: %s", error)
            return None
        self.captures += 1
        return graph

    def _recorded(self, work: Work, beside: Any) -> Graph:
        current, graph = torch.cuda.current_stream(), torch.cuda.CUDAGraph()
        self._stream = torch.cuda.Stream() if self._stream is None else self._stream
        self._stream.wait_stream(current)
        try:
            with torch.cuda.stream(self._stream):
                work.begin()
                work.do()  # what is made once, libraries' handles and memory of their own, is made before
                work.begin()
                first = work.moved.clone()
                with _no_waiting():  # a recording that fails leaves more behind than work that fails
                    work.do()
                done = work.moved.clone()
                pool = None if beside is None else beside.pool()
                mode = "thread_local"  # what other threads ask of the GPU meanwhile is theirs
                with torch.cuda.graph(graph, pool=pool, stream=self._stream, capture_error_mode=mode):
                    work.do()
                work.begin()
                graph.replay()
                off, far = (work.moved - done).norm(), (done - first).norm()
                if bool(off > _ALIKE * far):
                    raise RuntimeError("its replay gives other numbers")
        finally:
            current.wait_stream(self._stream)
        recorded: Graph = graph
        return recorded


@contextmanager
def _no_waiting() -> Iterator[None]:
    """Within the block, an operation that waits for the GPU raises RuntimeError."""
    before = torch.cuda.get_sync_debug_mode()
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode(before)
