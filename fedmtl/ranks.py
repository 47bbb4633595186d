"""Processes that compute one run: torch.distributed in a few operations.

Every rank runs the same program. A client belongs to one rank, which computes it and keeps its own
tensors; public values are the same everywhere. Rank 0, the first, draws the cohorts, keeps the
ledger, adds the noise, and writes.

Values travel through main memory by gloo, whatever devices the ranks compute on: the sum of a round
over the ranks is one vector in float64, which is noised on a CPU in any case.
"""

from __future__ import annotations

import logging
import os
import re
import sys
import tempfile
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from threading import Timer
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from ._messages import SHORT, agreed, packed, portable, size_of, unpacked
from ._processes import end, fork, report
from .errors import ConfigError, FedmtlError, TrainingError

logger = logging.getLogger(__name__)
T = TypeVar("T")
_ARRIVAL = timedelta(minutes=5)  # for processes of a launch that have not come yet
# for copies of this process, which meet at once unless one has ended
_MEETING = timedelta(minutes=1)
_NOTICE = 10.0  # seconds after which a process logs the reason of its wait
# for a rank that is alive and does not answer; the loss of a rank is noticed at once
_WAIT = timedelta(hours=1)
# gloo has no class for it
_LOST = re.compile(r"connect|socket|broken pipe|timed? ?out", re.IGNORECASE)


@dataclass(frozen=True, eq=False)
class Ranks:
    """The place of this process among those of a run; the default is a run of one process.

    All ranks call the same methods in the same order. An error of a method that names no other rank
    is that of this process. If another rank is lost, every method raises TrainingError.

    Attributes:
        rank: of this process, in [0, size).
        size: number of processes.
        group: their process group; None for a single one.
        local: number of this process on its machine.
        beside: number of processes that the launch started on this machine.
        begins: True if the launch's process group was made with this, and not by the program
            before.
        may_fork: True if a run of this single process may start more of them.
    """

    rank: int = 0
    size: int = 1
    group: Any = None
    local: int = 0
    beside: int = 1
    begins: bool = False
    may_fork: bool = False

    @classmethod
    def of_launch(cls) -> Ranks:
        """Returns the ranks that torchrun (or another launcher that sets RANK and WORLD_SIZE)
        started, or those of the process group that the program has made.

        Without either it is a single one, which may start others.

        Raises:
            ConfigError: torch was built without gloo, the variables of the launch are incomplete,
                or the other processes do not come within five minutes.
        """
        if not dist.is_available():
            return cls()
        try:
            begins = not dist.is_initialized() and int(os.environ.get("WORLD_SIZE", "1")) > 1
            if begins:
                with noticed(f"{_awaited()}, at most {_ARRIVAL.total_seconds() / 60:g} minutes"):
                    dist.init_process_group("gloo", timeout=_ARRIVAL)
        except dist.DistError as error:
            raise ConfigError(
                f"{_awaited()}, and they did not come within {_ARRIVAL.total_seconds() / 60:g} "
                "minutes. Start all "
                f"of them with torchrun, or unset RANK and WORLD_SIZE for a single process."
            ) from error
        except ValueError as error:
            raise ConfigError(
                f"The environment has WORLD_SIZE={os.environ.get('WORLD_SIZE')}, as for several "
                f"processes, but {error}"
                "; start them with torchrun, or unset WORLD_SIZE for a single one."
            ) from error
        if not dist.is_initialized():
            return cls(may_fork=cls.can_fork())
        if dist.get_world_size() == 1:
            return cls()
        if not dist.is_gloo_available():
            raise ConfigError("A run over several processes needs a build of torch with gloo.")
        rank = dist.get_rank()
        size = dist.get_world_size()
        # A launcher that says nothing of machines is taken to be on one.
        local = int(os.environ.get("LOCAL_RANK", rank))
        beside = int(os.environ.get("LOCAL_WORLD_SIZE", size))
        return cls(rank, size, dist.new_group(backend="gloo", timeout=_WAIT), local, beside, begins)

    @staticmethod
    def can_fork() -> bool:
        """Returns True if copies of this process can compute clients: on Linux if no GPU was
        found, whose libraries have threads that a copy lacks."""
        return (
            sys.platform == "linux" and dist.is_gloo_available() and not torch.cuda.is_available()
        )

    @contextmanager
    def forked(self, count: int) -> Iterator[Ranks]:
        """Computes the block in ``count`` processes, copies of this one, each with its own rank; in
        this one alone if there is one.

        Only this process, rank 0, goes on after the block; the others end there, and with this one.
        Their operations use one thread, since a copy has no others.

        Raises:
            TrainingError: another process cannot be reached, or failed.
        """
        if count == 1:
            yield self
            return
        threads = torch.get_num_threads()
        hook = sys.excepthook
        this = os.getpid()
        children = list[int]()
        failed = False
        ranks = self
        with tempfile.TemporaryDirectory() as folder:
            try:
                rank = fork(count, children)
                ranks = Ranks._met(f"file://{folder}/ranks", rank, count)
                yield ranks
            except BaseException as error:
                failed = True
                if os.getpid() != this:
                    report(error)
                raise
            finally:
                if os.getpid() != this:  # a copy ends here, whatever happened
                    os._exit(failed)
                try:
                    codes = end(children, failed)
                finally:
                    # A result that refers to these ranks must not keep the group.
                    object.__setattr__(ranks, "group", None)
                    torch.set_num_threads(threads)
                    sys.excepthook = hook  # a process group has its own
        if any(codes):
            raise TrainingError(
                "A process of the run has failed after its last work for the others; it says why."
            )

    @classmethod
    def _met(cls, meeting: str, rank: int, size: int) -> Ranks:
        """Returns the place ``rank`` of this process among ``size`` on this machine that meet at an
        address."""
        torch.set_num_threads(1)
        if rank:  # the first one says it
            logging.disable(logging.WARNING)
            warnings.simplefilter("ignore")
        before = dict(os.environ)
        os.environ["GLOO_SOCKET_IFNAME"] = "lo"  # nothing leaves the machine
        try:
            with cls(rank, size)._reached():
                dist.init_process_group(
                    "gloo", init_method=meeting, rank=rank, world_size=size, timeout=_MEETING
                )
                return cls(rank, size, dist.new_group(backend="gloo", timeout=_WAIT), rank, size)
        finally:
            os.environ.pop("GLOO_SOCKET_IFNAME")
            os.environ.update(before)

    @property
    def first(self) -> bool:
        """Returns True at rank 0, which draws, charges, adds noise and writes."""
        return self.rank == 0

    def leave(self) -> None:
        """Ends this process's part in a launch, when it has nothing more to ask or to answer.

        A group that the program made itself stays.
        """
        # Threads of a group that still wait when the process ends would abort it.
        if self.begins:
            dist.destroy_process_group()

    def assigned(self, work: Tensor) -> Tensor:
        """Returns the rank of every client, int64 (n,). No number of a run depends on it.

        Clients are dealt out back and forth in the order of their work, so that the ranks have
        about as much to do.

        Args:
            work: (n,), expected of each client, in any unit.
        """
        order = torch.argsort(work, descending=True, stable=True)
        there_and_back = torch.cat([torch.arange(self.size), torch.arange(self.size).flip(0)])
        rank_of = torch.empty(len(work), dtype=torch.int64)
        rank_of[order] = there_and_back.repeat(len(work) // (2 * self.size) + 1)[: len(work)]
        return rank_of

    def sum(self, values: Tensor) -> Tensor:
        """Returns the sum over ranks at rank 0; ignore it on others.

        It is exact if all partial sums are, as those of
        :func:`fedmtl.privacy.clip.clipped_sum`, and then the same for any number of ranks.

        Args:
            values: float64, the same shape everywhere; overwritten.
        """
        if self.size > 1:
            with self._reached():
                dist.reduce(values, 0, group=self.group)
        return values

    def share(self, make: Callable[[], T]) -> T:
        """Returns the value of ``make`` at every rank; it is called at rank 0 alone.

        Its error, or that of pickling the value, is raised at every rank. Tensors arrive on the
        CPU.
        """
        if self.size == 1:
            return make()
        outcome: tuple[Any, Exception | None] = None, None
        message = torch.empty(SHORT, dtype=torch.uint8)
        if self.first:
            try:
                outcome = make(), None
                message = packed(outcome)
            except Exception as raised:
                outcome = None, portable(raised)
                message = packed(outcome)
        # The others learn the length from the first part: most values fit into it.
        with self._reached():
            dist.broadcast(message[:SHORT], 0, group=self.group)
            if (size := size_of(message)) > SHORT:
                if not self.first:
                    message = torch.cat([message, message.new_empty(size - SHORT)])
                dist.broadcast(message[SHORT:], 0, group=self.group)
        value, error = outcome if self.first else unpacked(message)
        if error is not None:
            raise agreed(error)
        return value  # type: ignore[no-any-return]

    def gather(self, value: T) -> list[T]:
        """Returns the value of every rank, in their order, at every rank."""
        if self.size == 1:
            return [value]
        mine = packed(value)
        heads = [torch.empty_like(mine[:SHORT]) for _ in range(self.size)]
        with self._reached():
            dist.all_gather(heads, mine[:SHORT], group=self.group)
            sizes = [size_of(head) for head in heads]
            if (longest := max(sizes)) > SHORT:
                # Gathered parts have one length, so the shorter ones are padded.
                wide = torch.nn.functional.pad(mine[SHORT:], (0, longest - len(mine)))
                rests = [torch.empty_like(wide) for _ in heads]
                dist.all_gather(rests, wide, group=self.group)
                heads = [torch.cat(parts) for parts in zip(heads, rests, strict=True)]
        return [unpacked(each) for each in heads]

    def join(self, rows: Tensor, places: Tensor, count: int) -> Tensor:
        """Returns rows from all ranks in one tensor, at every rank.

        Args:
            rows: (k, ...), those of this rank, the same dtype and further sizes everywhere.
            places: int64 (k,), their places among all rows.
            count: n, rows in all; every place is that of one rank.

        Returns:
            (n, ...) on the device of ``rows``; ``rows`` themselves in a single process whose places
            are in order.
        """
        if self.size == 1 and bool((places == torch.arange(count)).all()):
            return rows
        mine = rows.detach().cpu().contiguous()
        joined = mine.new_zeros(count, *rows.shape[1:])
        for rank, where in enumerate(self.gather(places)):
            if rank == self.rank:
                part = mine
            else:
                part = mine.new_empty(len(where), *rows.shape[1:])
            if self.size > 1 and part.numel():
                with self._reached():
                    # As bytes: gloo does not know every dtype.
                    dist.broadcast(part.view(-1).view(torch.uint8), rank, group=self.group)
            joined[where] = part
        return joined.to(rows.device)

    @contextmanager
    def agree(self) -> Iterator[None]:
        """Makes an error of one rank that of all: the error of the lowest rank that has one is
        raised at every rank at the end of the block.

        The block has no other operation of all ranks: a rank with an error would not take part in
        it, and the others would wait.
        """
        error: Exception | None = None
        try:
            yield
        except Exception as raised:
            if self.size == 1 or getattr(raised, "agreed", False):
                raise
            error = raised
        for rank, first in enumerate(self.gather(None if error is None else portable(error))):
            if first is not None:
                if isinstance(first, FedmtlError) and rank and self.first:
                    first = type(first)(f"rank {rank}: {first}")
                raise agreed(first) from error

    @contextmanager
    def _reached(self) -> Iterator[None]:
        """Raises TrainingError for a rank that is lost during the block."""
        try:
            yield
        except RuntimeError as error:
            if not (isinstance(error, dist.DistError) or _LOST.search(str(error))):
                raise  # an error of this process
            raise TrainingError(
                f"Rank {self.rank} of {self.size} can no longer reach the others: one of them has "
                "ended, or cannot be reached. Its own message says why. A run with a folder "
                "continues from its last checkpoint, also with another number of ranks: resume it."
            ) from error


def launched() -> int:
    """Returns the number of processes that a launcher or the program has started, of which this is
    one; it waits for none of them."""
    if dist.is_available() and dist.is_initialized():
        return dist.get_world_size()
    size = os.environ.get("WORLD_SIZE", "1")
    if size.isdecimal():
        return int(size)
    return 1


def _awaited() -> str:
    """Returns the processes that this one waits for at the start of a launch, in words."""
    rank, size, *place = (
        os.environ.get(name, "?") for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
    )
    others = "rank 0 and the other processes, which meet"
    if rank == "0":
        others = "the other processes, which connect to it"
    return (
        f"rank {rank} of {size} waits for {others} at {':'.join(place)} (MASTER_ADDR and "
        "MASTER_PORT)"
    )


@contextmanager
def noticed(text: str) -> Iterator[None]:
    """Logs a warning if the block takes longer than some seconds."""
    timer = Timer(_NOTICE, logger.warning, ["%s", text])
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()


SINGLE = Ranks()
"""A run of one process."""
