"""Standard output and error of a command: a reader that leaves, as of ``| head``, does not change
the work of the command.

A run whose output nobody reads any more is trained, written and ends as any other, with the exit
code of its work.
"""

from __future__ import annotations

import errno
import os
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, redirect_stderr, redirect_stdout, suppress
from typing import Any, TextIO

from .._text import shown_lines

_LEFT = (errno.EPIPE, errno.ECONNRESET)


class Output:
    """A text stream that takes no more once it cannot be written.

    Args:
        stream: the one behind it.

    Attributes:
        error: the first error of the stream; None without one.
    """

    def __init__(self, stream: TextIO) -> None:
        self.stream = stream
        self.error: OSError | None = None

    def write(self, text: str) -> int:
        """Writes text, or drop it after an error."""
        if self.error is None:
            try:
                return self.stream.write(text)
            except OSError as error:
                self._end(error)
        return len(text)

    def flush(self) -> None:
        """Flushes the written text to the stream."""
        if self.error is None:
            try:
                self.stream.flush()
            except OSError as error:
                self._end(error)

    def _end(self, error: OSError) -> None:
        """Notes an error, and sends the text that is still in the stream, or is written beside it,
        to the null device."""
        self.error = error
        with suppress(OSError, ValueError):  # a stream without a file
            number = self.stream.fileno()
            nowhere = os.open(os.devnull, os.O_WRONLY)
            os.dup2(nowhere, number)
            os.close(nowhere)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.stream, name)


@contextmanager
def outputs() -> Iterator[Output]:
    """Lets this block print although its reader may have left; yields standard output.

    A stream that was closed before is one that nobody reads.
    """
    with ExitStack() as stack:
        streams = []
        for stream in (sys.stdout, sys.stderr):
            if stream is None:
                stream = stack.enter_context(open(os.devnull, "w"))
            streams.append(Output(stream))
        out, err = streams
        stack.enter_context(redirect_stdout(out))  # type: ignore[type-var]
        stack.enter_context(redirect_stderr(err))  # type: ignore[type-var]
        try:
            yield out
        finally:
            out.flush()
            err.flush()


def lost(out: Output) -> str:
    """Returns the reason why standard output lacks something; empty if nothing is missing or its
    reader has left."""
    if out.error is None or out.error.errno in _LEFT:
        return ""
    return f"standard output could not be written: {out.error}"


def show(text: str) -> None:
    """Prints text on standard output, without characters that steer a terminal."""
    print(shown_lines(text), flush=True)


def say(text: str) -> None:
    """Prints a line on standard error, without characters that steer a terminal."""
    print(f"fedmtl: {shown_lines(text)}", file=sys.stderr, flush=True)
