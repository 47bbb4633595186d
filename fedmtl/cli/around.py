"""The surroundings of a run of the command: the printed log, the note of a failure, and the advice
after an interruption."""

from __future__ import annotations

import logging
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING

from .._files import CLAIM
from .._text import shown_lines
from ..errors import TrainingError
from ..report.runs import ERROR
from ..report.tables import write_text
from .output import say
from .process import INTERRUPTED, Process

if TYPE_CHECKING:
    from ..ranks import Ranks


@contextmanager
def noted(folder: Path, job: object, process: Process) -> Iterator[None]:
    """Leaves the reason of a failure in the claimed folder of a run that has begun, or of a job, by
    which a report knows it from an unfinished one."""
    note = folder / "private" / ERROR
    if process.writes:
        # of an earlier try
        note.unlink(missing_ok=True)
    try:
        yield
    except Exception as error:
        with suppress(OSError):
            # a run that is refused before it writes anything leaves nothing behind
            begun = any(file.name != CLAIM for file in folder.glob("*/*"))
            if process.writes and (job is not None or begun):
                write_text(note, f"{' '.join(str(error).split()) or type(error).__name__}\n")
        raise


@contextmanager
def resumable(folder: Path, ranks: Ranks | None = None) -> Iterator[None]:
    """Says how to continue if the block is interrupted.

    Args:
        folder: of the run, sweep or search.
        ranks: of torchrun, which sends SIGTERM to this process if another one has ended.

    Raises:
        SystemExit: an interruption.
        TrainingError: a file that could not be written or read, such as on a full disk; it says how
            to continue.
    """
    remedy = (
        f"the run is stored up to its last checkpoint; continue it with: fedmtl resume {folder}"
    )

    def end(number: int, frame: FrameType | None) -> None:
        say(f"a rank has ended; {remedy}")
        raise SystemExit(128 + number)

    before = None
    if ranks is not None:
        before = signal.signal(signal.SIGTERM, end)
    try:
        yield
    except KeyboardInterrupt:
        say(f"interrupted; {remedy}")
        raise SystemExit(INTERRUPTED) from None
    except OSError as error:
        # on a full disk the run is whole up to its last checkpoint, which the bare error does not
        # tell
        raise TrainingError(f"{error}; {remedy}") from error
    finally:
        if ranks is not None:
            signal.signal(signal.SIGTERM, before)


class _Printed(logging.Handler):
    """Writes to the present standard error, which a progress bar may have replaced."""

    def emit(self, record: logging.LogRecord) -> None:
        print(shown_lines(self.format(record)), file=sys.stderr, flush=True)


@contextmanager
def printed_log(level: int) -> Iterator[None]:
    """Prints the package's log from ``level`` on as plain lines, each of them once, while the block
    runs."""
    log = logging.getLogger("fedmtl")
    handler = _Printed()
    log.addHandler(handler)
    before = log.level, log.propagate
    # the handlers of a program or of Hydra would print each line once more
    log.propagate = False
    log.setLevel(level)
    try:
        yield
    finally:
        log.removeHandler(handler)
        log.setLevel(before[0])
        log.propagate = before[1]
