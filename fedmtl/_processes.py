"""Copies of this process: started, awaited and ended."""

from __future__ import annotations

import gc
import os
import signal
import traceback
import warnings
from contextlib import suppress

import torch.distributed as dist


def fork(count: int, children: list[int]) -> int:
    """Starts copies of this process, and returns the rank of the process that returns.

    Args:
        count: number of processes, this one among them.
        children: gets the copies' process ids at rank 0, one by one: an interruption in between
            still finds all of them.
    """
    with warnings.catch_warnings():
        # Python warns of a fork beside threads; a copy uses none of this process's threads.
        warnings.simplefilter("ignore", DeprecationWarning)
        for place in range(1, count):
            child = os.fork()
            if child == 0:
                # An earlier process group that is garbage would wait for threads that it had.
                gc.freeze()
                return place
            children.append(child)
    return 0


def report(error: BaseException) -> None:
    """Prints an error of a copy, unless rank 0 has it too and prints it."""
    if isinstance(error, Exception) and not getattr(error, "agreed", False):
        traceback.print_exception(error)


def end(children: list[int], failed: bool) -> list[int]:
    """Ends the process group, waits for the copies, and returns their exit codes.

    Args:
        children: process ids.
        failed: True if this process failed, for which a copy may wait forever.
    """
    try:
        if failed:
            for child in children:
                _kill(child)
        if dist.is_initialized():
            dist.destroy_process_group()
        return [_ended(child) for child in children]
    except BaseException:  # such as a second interruption: no copy may stay behind
        for child in children:
            _kill(child)
            _ended(child)
        raise


def _kill(child: int) -> None:
    """Ends a process that may have ended."""
    with suppress(ProcessLookupError):
        os.kill(child, signal.SIGKILL)


def _ended(child: int) -> int:
    """Waits until a process has ended, and returns its exit code.

    It is 0 if the program does not keep exit codes, by ignoring SIGCHLD.
    """
    try:
        return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    except ChildProcessError:
        return 0
