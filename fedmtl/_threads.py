"""Worker threads whose operations do not divide themselves any further."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from concurrent.futures import FIRST_EXCEPTION, ThreadPoolExecutor, wait
from typing import TypeVar

import torch

Part = TypeVar("Part")
Result = TypeVar("Result")


class Threads:
    """Worker threads in each of which an operation of PyTorch uses one thread.

    They stay, and keep the memory that they have freed, until they are closed.

    Args:
        count: how many, at least 1.
    """

    def __init__(self, count: int) -> None:
        self.count, before = count, torch.get_num_threads()
        self._pool = ThreadPoolExecutor(count, initializer=torch.set_num_threads, initargs=(1,))
        self.map(lambda _: None, range(count))
        torch.set_num_threads(before)

    def map(self, work: Callable[[Part], Result], parts: Iterable[Part]) -> list[Result]:
        """Return ``work(part)`` of every part, in their order; every thread takes the next one as soon as it is free.

        After an exception no further part is begun, and it is raised when all threads have stopped.
        """
        running = [self._pool.submit(work, part) for part in parts]
        wait(running, return_when=FIRST_EXCEPTION)
        for thread in running:
            thread.cancel()
        wait(running)
        return [thread.result() for thread in running if not thread.cancelled()]

    def close(self) -> None:
        """Stop the threads."""
        self._pool.shutdown()
