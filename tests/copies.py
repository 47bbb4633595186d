"""Programs in copies of this process, which has imported already what a new one imports for seconds."""

import multiprocessing
import os
import signal
import sys
from collections.abc import Callable
from multiprocessing.context import ForkProcess
from pathlib import Path

OUT = "stdout.txt"
ERR = "stderr.txt"


def begun(program: Callable[[], int], folder: Path) -> ForkProcess:
    """Begin a program in a copy of this process; its exit code is what it returns, and its output is in two files.

    Args:
        program: what the copy runs.
        folder: where it runs and writes :data:`OUT` and :data:`ERR`.
    """
    process = multiprocessing.get_context("fork").Process(target=_run, args=(program, folder))
    process.start()
    return process


def _run(program: Callable[[], int], folder: Path) -> None:
    os.chdir(folder)
    os.dup2(os.open(OUT, os.O_WRONLY | os.O_CREAT), 1)
    os.dup2(os.open(ERR, os.O_WRONLY | os.O_CREAT), 2)
    sys.stdout = open(1, "w", encoding="utf-8", closefd=False)  # noqa: SIM115 - until the copy ends
    sys.stderr = open(2, "w", encoding="utf-8", closefd=False)  # noqa: SIM115
    # Python's own handler, also if a shell started the tests in the background, which ignores it.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    sys.exit(program())  # both streams are flushed by multiprocessing
