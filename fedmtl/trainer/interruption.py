"""An interruption from the keyboard, held back until a step is over."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType


@contextmanager
def held_interruption() -> Iterator[Callable[[], bool]]:
    """Holds back the first SIGINT until the block that is being computed is over; a second one
    interrupts at once.

    It does so only if SIGINT would raise KeyboardInterrupt, in the main thread: other handlers stay
    as they are.

    Yields:
        A function that returns True after the first SIGINT. The caller raises KeyboardInterrupt
        when it is safe.
    """
    came: list[int] = []

    def note(number: int, frame: FrameType | None) -> None:
        if came:
            raise KeyboardInterrupt
        came.append(number)

    # Python lets only the main thread set a handler, and a host program may have its own.
    main = threading.current_thread() is threading.main_thread()
    if not main or signal.getsignal(signal.SIGINT) is not signal.default_int_handler:
        yield lambda: False
        return
    signal.signal(signal.SIGINT, note)
    try:
        yield lambda: bool(came)
    finally:
        signal.signal(signal.SIGINT, signal.default_int_handler)
