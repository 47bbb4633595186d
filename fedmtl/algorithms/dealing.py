"""Files of the clients' own tensors, dealt out again to another number of processes."""

from __future__ import annotations

import math
import shutil
from pathlib import Path

import torch
from torch import Tensor

from .._files import sync_folder, write_bytes
from ..errors import ResumeError
from ..ranks import Ranks
from .store import MappedClientStore

_BYTES = 1 << 26  # of rows that are copied at once


def part_of(folder: Path, rank: int, size: int) -> Path:
    """Return where rank ``rank`` of ``size`` keeps the tensors of its clients."""
    return folder / f"rank-{rank}-of-{size}"


def deal(folder: Path, work: Tensor, ranks: Ranks, step: int | None) -> None:
    """Make the files of a run those of ``ranks``, before a store opens them; all ranks call it.

    The file ``ranks`` in the folder says of how many processes the files count, which is what makes a change atomic:
    each rank copies the rows of its clients into files beside the old ones; when all of them are on the disk, the
    number is replaced; then the old files are removed. Files of another number, which an interruption has left on
    either side of that, are removed at the next opening. A client's old owner follows from ``work``.

    Args:
        folder: of the memory-mapped stores of all ranks.
        work: (n,), by which clients were and are dealt out, see :meth:`fedmtl.ranks.Ranks.owners`.
        ranks: the processes that go on.
        step: of the checkpoint that they go on from; None where there is none, and all begin with zeros.

    Raises:
        ResumeError: files of a rank are missing here.
    """
    if step is None:
        ranks.share(lambda: _begin(folder, ranks.size))
        return
    size = ranks.share(lambda: _settled(folder, work, ranks.size, step))
    with ranks.agree():
        if size == ranks.size:
            _check(folder, range(ranks.rank, ranks.rank + 1), size)
        else:
            _check(folder, range(size), size)
            _copy(folder, work, ranks, size, step)
    if size != ranks.size:
        ranks.share(lambda: _keep(folder, ranks.size))


def _begin(folder: Path, size: int) -> None:
    if folder.exists():  # of a run without a checkpoint
        shutil.rmtree(folder)
    _keep(folder, size)


def _settled(folder: Path, work: Tensor, wanted: int, step: int) -> int:
    """Return how many processes the files are of, those of the checkpoint of ``step``, when no others are there."""
    count = folder / "ranks"
    if not count.exists():
        raise ResumeError(
            f"{count} is missing, so the files of the clients' tensors are lost, or the checkpoint was written with "
            f"client_store='memory'; then resume it with that."
        )
    size = int(count.read_text())
    _keep(folder, size)
    if size != wanted:
        _check(folder, range(size), size)
        owner = Ranks(size=size).owners(work)
        for rank in range(size):
            MappedClientStore.existing(int((owner == rank).sum()), part_of(folder, rank, size)).restore({}, step)
    return size


def _keep(folder: Path, size: int) -> None:
    """Let the files of ``size`` processes count, and remove all others."""
    write_bytes(folder / "ranks", str(size).encode())
    for path in folder.glob("rank-*-of-*"):
        if not path.name.endswith(f"-of-{size}"):
            shutil.rmtree(path)


def _check(folder: Path, ranks: range, size: int) -> None:
    lost = [path for path in (part_of(folder, rank, size) for rank in ranks) if not (path / "layout.json").exists()]
    if lost:
        raise ResumeError(
            f"{lost[0]} is missing, the tensors of clients of {len(lost)} of the {size} processes of this run: where "
            f"folders are on disks of several machines, a run goes on with as many processes, each on its machine, or "
            f"with any number once all folders rank-*-of-{size} are in one that all machines reach."
        )


def _copy(folder: Path, work: Tensor, ranks: Ranks, size: int, step: int) -> None:
    """Write the files of this rank from those of the ``size`` ranks of before."""
    before, members = Ranks(size=size).owners(work), (ranks.owners(work) == ranks.rank).nonzero()[:, 0]
    place = torch.full((len(work),), -1)
    place[members] = torch.arange(len(members))
    for rank in range(size):
        theirs = (before == rank).nonzero()[:, 0]
        old = MappedClientStore.existing(len(theirs), part_of(folder, rank, size))
        new = MappedClientStore(len(members), old.fields, folder=part_of(folder, ranks.rank, ranks.size))
        taken = (place[theirs] >= 0).nonzero()[:, 0]
        for name, (shape, dtype) in old.fields.items():
            for some in taken.split(max(1, _BYTES // (math.prod(shape, start=1) * dtype.itemsize))):
                rows = old.gather(name, some)
                there = rows.unsqueeze(-1).flatten(1).view(torch.uint8).any(1).nonzero()[:, 0]  # the others stay holes
                new.scatter(name, place[theirs[some[there]]], rows[there])
                new.snapshot(step)
                new.commit()
    sync_folder(folder)
