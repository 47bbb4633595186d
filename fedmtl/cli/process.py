"""The process of a command, one or one of several of a launch: its errors in one line, and its exit
code."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from .._files import remove_empty
from ..errors import (
    ConfigError,
    DataError,
    FedmtlError,
    MissingExtra,
    ModelError,
    PrivacyError,
    ResumeError,
)
from .build import import_trainer
from .folders import short
from .output import say

if TYPE_CHECKING:
    from ..ranks import Ranks


# exit codes
FAILED = 1
REFUSED = 2
INTERRUPTED = 130
# the user's to fix, before training
_REQUEST = (ConfigError, DataError, MissingExtra, ModelError, PrivacyError)


@dataclass
class Process:
    """This process, one or one of several of a launch, and the printing of its errors.

    Args:
        debug: True if errors are raised, for their traceback.
        ranks: of a launch of several processes.
        codes: the exit codes so far.
    """

    debug: bool = False
    ranks: Ranks | None = None
    codes: list[int] = field(default_factory=list)

    @property
    def writes(self) -> bool:
        """Returns True if this process is the one that writes and prints."""
        return self.ranks is None or self.ranks.first

    def join(self) -> None:
        """Joins the processes that torchrun started, or those of the process group of the program
        that calls the command, without importing PyTorch for a single process."""
        # a program that has made a group has imported it
        distributed = sys.modules.get("torch.distributed")
        in_a_group = (
            distributed is not None
            and distributed.is_available()
            and distributed.is_initialized()
            and distributed.get_world_size() > 1
        )
        if os.environ.get("WORLD_SIZE", "1") != "1" or in_a_group:
            from ..ranks import Ranks

            self.ranks = Ranks.of_launch()

    def refuse_others(self, command: str) -> None:
        """Refuses to be one of several processes.

        Raises:
            ConfigError: several were started; at all but one of them SystemExit.
        """
        size = os.environ.get("WORLD_SIZE", "1")
        if size == "1":
            return
        # one process says why, and the others leave without a word
        if os.environ.get("RANK", "0") != "0":
            raise SystemExit(REFUSED)
        raise ConfigError(
            f"{command} runs in one process, and {size} were started; start it without torchrun."
        )

    def agree(self) -> AbstractContextManager[None]:
        """Raises an error of the block at any rank at all ranks."""
        if self.ranks is None:
            return nullcontext()
        return self.ranks.agree()

    def shared(self, make: Callable[[], str]) -> str:
        """Returns the value of ``make`` at the first rank."""
        if self.ranks is None:
            return make()
        return self.ranks.share(make)

    @contextmanager
    def claimed(self, folder: Path, *, resume: bool = False) -> Iterator[None]:
        """Holds the folder of a run for the block, for all ranks.

        Args:
            folder: of the run.
            resume: True if a run that has begun there is continued.

        Raises:
            ConfigError: another process holds it, or a run has begun there that is not continued.
        """
        import_trainer()
        from ..trainer.folder import RunFolder

        run = RunFolder(folder)
        with ExitStack() as stack:
            # before the claim, so that a run that is refused leaves no empty folders
            for empty in (folder.parent.parent, folder.parent, folder) if self.writes else ():
                stack.callback(remove_empty, empty)
            with self.agree():
                try:
                    if self.writes:
                        stack.enter_context(run.claimed(resume=resume))
                except ResumeError as error:
                    held = (
                        f"{short(folder)} already holds a run; continue it with fedmtl resume "
                        f"{short(folder)}"
                    )
                    raise ConfigError(f"{held}, or choose another folder.") from error
            yield

    @contextmanager
    def errors(self, job: object = None) -> Iterator[None]:
        """Prints an error in one line and keeps its exit code, unless ``debug`` asks for the
        traceback.

        Args:
            job: of a sweep, named in the line. An error that the other ranks do not have ends this
                process: they wait for it in that job, and are told that it has ended.
        """
        try:
            yield
        except Exception as error:
            agreed = getattr(error, "agreed", False)
            ends = job is not None and self.ranks is not None and not agreed
            if self.debug and not ends:
                raise
            if self.ranks is None:
                # the ranks are not connected yet, or never will be: the launcher has told the
                # number
                rank = int(os.environ.get("RANK", "0"))
            else:
                rank = self.ranks.rank
            text = " ".join(str(error).split())
            foreign = not isinstance(error, FedmtlError)
            if foreign or ends:
                text = f"{type(error).__name__}: {text}"
            if foreign and not ends:
                text += " (--debug shows the traceback)"
            if rank == 0 or not agreed:  # else the first rank prints it
                where = f"{job}: " * (job is not None) + f"rank {rank}: " * (rank > 0 or ends)
                say(f"error: {where}{text}")
            if ends:
                raise SystemExit(FAILED) from error
            self.codes.append(REFUSED if isinstance(error, _REQUEST) else FAILED)
