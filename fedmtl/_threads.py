"""Worker threads whose operations do not divide themselves any further."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor, wait
from contextlib import suppress
from queue import Empty, SimpleQueue
from typing import TypeVar, cast

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
        waiting = list(parts)
        found: list[Result | None] = [None] * len(waiting)
        numbers: SimpleQueue[int] = SimpleQueue()
        for number in range(len(waiting)):
            numbers.put(number)

        def take() -> None:
            try:
                while True:
                    number = numbers.get_nowait()
                    found[number] = work(waiting[number])
            except Empty:
                return
            except BaseException:
                with suppress(Empty):
                    while True:
                        numbers.get_nowait()
                raise

        running = [self._pool.submit(take) for _ in range(min(self.count, len(waiting)))]
        wait(running)
        for thread in running:
            thread.result()
        return cast("list[Result]", found)

    def close(self) -> None:
        """Stop the threads."""
        self._pool.shutdown()
