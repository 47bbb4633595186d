"""The clients' own tensors: rows that changed since the last checkpoint in memory, the others in files that it names.

A file of rows only grows. A checkpoint has the number of rows of each file that count, and of several rows of a client
the last one counts; what an interrupted save has left behind them is cut off by the next one. A file whose rows are
replaced by later ones for the most part is followed by a new one, and is removed when a checkpoint has named that one.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from .._files import append_bytes
from ..errors import ConfigError, ResumeError

Fields = Mapping[str, tuple[tuple[int, ...], torch.dtype]]
"""{name: (shape of one client's value, dtype)}."""

_BYTES = 1 << 26  # of rows that are copied at once


def checked(fields: Fields) -> dict[str, tuple[tuple[int, ...], torch.dtype]]:
    """Return the fields of a store; refuse what is none.

    Raises:
        ConfigError: a value that is not a shape and a dtype.
    """
    for name, field in fields.items():
        pair = isinstance(field, tuple) and len(field) == 2 and isinstance(field[1], torch.dtype)
        if not pair or not isinstance(field[0], tuple) or not all(isinstance(size, int) for size in field[0]):
            raise ConfigError(
                f"client_store: field {name!r} is {field!r}; give the shape of one client's value and its dtype, such "
                "as ((problem.dimension,), torch.float32), or ((), torch.bool) for one value."
            )
    return dict(fields)


class Rows:
    """Rows (n, *shape), zeros at first, of which those that were ever written take room: in memory since the last
    checkpoint, and before in the files that the checkpoint names.

    Args:
        members: int64 (m,), the clients that have rows here, ascending.
        clients: n.
        shape, dtype: of one row.
        device: where the rows are.
    """

    def __init__(
        self,
        members: Tensor,
        clients: int,
        shape: tuple[int, ...],
        dtype: torch.dtype,
        device: torch.device | str = "cpu",
    ) -> None:
        self._members, self._shape = members, shape
        width = math.prod(shape) * dtype.itemsize
        self._record = np.dtype([("client", "<i8"), ("row", "u1", (width,))])
        self._empty = torch.zeros(0, *shape, dtype=dtype, device=device)
        self._file, self._length = "", 0  # to which the next save appends, and its rows
        self._saved: list[np.ndarray] = []  # the records of the last checkpoint, of each of its files
        self._line = torch.full((clients,), -1, dtype=torch.int32)  # of a client's row among all of these; -1: none
        self._clear()

    def _clear(self) -> None:
        """Forget the rows in memory."""
        self._place = torch.full_like(self._line, -1)  # of a client's row in memory; -1: none
        self._ids, self._rows = torch.zeros(0, dtype=torch.int64), self._empty  # the first len(ids) rows

    def read(self, ids: Tensor) -> Tensor:
        """Return the rows of ``ids``, int64 (k,); where they are all of this store in order they may be no copies."""
        everyone = len(ids) == len(self._members) == len(self._ids) and torch.equal(ids, self._ids)
        return self._rows[: len(ids)] if everyone else self.gather(ids)

    def gather(self, ids: Tensor) -> Tensor:
        """Return a copy of the rows of ``ids``, int64 (k,) -> (k, *shape)."""
        place, line = self._place[ids].long(), self._line[ids].long()
        if bool((place >= 0).all()):
            return self._rows[place]
        rows = self._rows.new_zeros(len(ids), *self._shape)
        first = 0
        for records in self._saved:
            here = ((place < 0) & (first <= line) & (line < first + len(records))).nonzero()[:, 0]
            rows[here] = self._decoded(records["row"][(line[here] - first).numpy()])
            first += len(records)
        held = (place >= 0).nonzero()[:, 0]
        rows[held] = self._rows[place[held]]
        return rows

    def write(self, ids: Tensor, rows: Tensor) -> None:
        """Keep a copy of ``rows`` (k, *shape) for ``ids``, int64 (k,), of which none is there twice."""
        new = ids[self._place[ids] < 0]
        if len(new) == len(self._members):  # all of them, and none has a row in memory
            self.take(rows[torch.argsort(ids).to(rows.device)])
            return
        if len(new):
            first = len(self._ids)
            self._place[new] = torch.arange(first, first + len(new), dtype=torch.int32)
            self._ids = torch.cat([self._ids, new])
            if len(self._ids) > len(self._rows):  # to twice the size, so that a run copies every row a few times
                grown = self._rows.new_empty(min(max(len(self._ids), 2 * first), len(self._place)), *self._shape)
                grown[:first] = self._rows[:first]
                self._rows = grown
        self._rows[self._place[ids].long()] = rows.detach().to(self._rows)
        if len(new) and len(self._ids) == len(self._members):
            self.take(self.gather(self._members))

    def take(self, rows: Tensor) -> None:
        """Replace the rows of all clients here by ``rows`` (m, *shape), which belong to the store from now on."""
        self._ids, self._rows = self._members, rows.detach().to(self._rows)
        self._place[self._members] = torch.arange(len(rows), dtype=torch.int32)

    def save(self, folder: Path, name: str) -> dict[str, int]:
        """Append the rows in memory to their file in ``folder``, or write those of all clients to the new file ``name``
        where there is none, or where most rows of the old one no longer count.

        Returns:
            The file and its number of rows, for the checkpoint; empty if no client has a row.
        """
        every = ((self._place >= 0) | (self._line >= 0)).nonzero()[:, 0]
        ids = (self._place >= 0).nonzero()[:, 0]
        if not self._file or self._length + len(ids) > 2 * len(every):
            ids, self._file, self._length = every, name if len(every) else "", 0
        if len(ids):
            append_bytes(folder / self._file, self._length * self._record.itemsize, self._encoded(ids))
            self._line[ids] = torch.arange(self._length, self._length + len(ids), dtype=torch.int32)
            self._length += len(ids)
        return {self._file: self._length} if self._file else {}

    def settle(self, folder: Path) -> None:
        """Read saved rows from their file from now on."""
        if self._file:
            self._saved = [_records(folder / self._file, self._record, self._length)]
            self._clear()

    def load(self, folder: Path, files: Mapping[str, int], file: str) -> None:
        """Read the rows of these clients from ``files``, with their numbers of rows, from now on.

        Args:
            folder: of the files.
            files: of the checkpoint.
            file: to which the next save appends; empty for a new one.

        Raises:
            ResumeError: a file is missing, or too short.
        """
        self._clear()
        self._file, self._length = file, files.get(file, 0)
        self._saved = [_records(folder / name, self._record, length) for name, length in files.items()]
        line = np.full(len(self._line), -1, np.int32)
        first = 0
        for records in self._saved:
            line[records["client"]] = np.arange(first, first + len(records), dtype=np.int32)  # the last row counts
            first += len(records)
        self._line = torch.full_like(self._line, -1)
        self._line[self._members] = torch.from_numpy(line)[self._members]

    @property
    def _chunk(self) -> int:
        return max(1, _BYTES // self._record.itemsize)

    def _encoded(self, ids: Tensor) -> Iterator[memoryview]:
        for some in ids.split(self._chunk):
            records = np.empty(len(some), self._record)
            records["client"] = some
            rows = self.gather(some).cpu().reshape(len(some), math.prod(self._shape))
            records["row"] = rows.view(torch.uint8).numpy()
            yield records.view(np.uint8).data

    def _decoded(self, rows: np.ndarray) -> Tensor:
        found = torch.empty(len(rows), math.prod(self._shape), dtype=self._empty.dtype)
        found.view(torch.uint8).numpy()[:] = rows
        return found.reshape(len(rows), *self._shape).to(self._empty.device)


def _records(path: Path, record: np.dtype, length: int) -> np.ndarray:
    if not path.is_file() or path.stat().st_size < length * record.itemsize:
        raise ResumeError(
            f"{path} is missing, or has less than the {length:,} rows of clients that the checkpoint names. Where "
            f"folders are on disks of several machines, a run goes on with as many processes, each on its machine, or "
            f"with any number once the files are in one folder that all machines reach."
        )
    return np.memmap(path, dtype=record, mode="r", shape=(length,))


class ClientStore:
    """Named per-client tensors (n, *shape), all zeros at first.

    Args:
        clients: n.
        fields: shape of one client's value and dtype, by name.
        device: where the tensors live.
        members: int64 (m,), ascending: the clients that have rows here, where several processes have some each; rows
            of the others are dropped. None: all.
        part: of the processes this is, as in ``"0-of-1"``.
    """

    def __init__(
        self,
        clients: int,
        fields: Fields,
        *,
        device: torch.device | str = "cpu",
        members: Tensor | None = None,
        part: str = "0-of-1",
    ) -> None:
        self.clients, self.fields, self.part = clients, checked(fields), part
        self.members = torch.arange(clients) if members is None else members
        self._rows = {name: Rows(self.members, clients, *field, device) for name, field in fields.items()}
        self._size = "-of-" + part.partition("-of-")[2]
        self._is_here = torch.zeros(clients, dtype=torch.bool)
        self._is_here[self.members] = True

    def gather(self, name: str, ids: Tensor) -> Tensor:
        """Return a copy of the rows of ``ids``, int64 (k,) -> (k, *shape)."""
        return self._rows[name].gather(ids.cpu())

    def gather_all(self, ids: Tensor) -> dict[str, Tensor]:
        """Return the rows of ``ids``, int64 (k,), of every field: (k, *shape) each.

        They must not be changed: where the ids are those of all clients in order they may be no copies.
        """
        return {name: rows.read(ids.cpu()) for name, rows in self._rows.items()}

    def scatter(self, name: str, ids: Tensor, rows: Tensor) -> None:
        """Replace the rows of ``ids`` by ``rows`` (k, *shape)."""
        ids = ids.cpu()
        here = self._is_here[ids]
        if not bool(here.all()):
            ids, rows = ids[here], rows[here.to(rows.device)]
        self._rows[name].write(ids, rows)

    def scatter_all(self, ids: Tensor, rows: Mapping[str, Tensor]) -> None:
        """Replace the rows of ``ids`` in every field of ``rows``, (k, *shape) each, which are the store's own then."""
        everyone = torch.equal(ids.cpu(), self.members)
        for name, values in rows.items():
            if everyone:
                self._rows[name].take(values)
            else:
                self.scatter(name, ids, values)

    def whole(self, name: str) -> Tensor:
        """Return the rows of all clients, (n, *shape), which must not be changed."""
        if len(self.members) < self.clients:
            raise NotImplementedError("A rank has the tensors of its own clients alone; gather them first.")
        return self._rows[name].read(self.members)

    def save(self, folder: Path, step: int) -> dict[str, int]:
        """Write what changed since the last save to files in ``folder``, before the checkpoint of ``step``, which must
        hold what is returned: by file the number of rows that count."""
        return {
            f"{name}/{file}": length
            for name, rows in self._rows.items()
            for file, length in rows.save(folder / name, f"{step}-{self.part}").items()
        }

    def commit(self, folder: Path, files: Mapping[str, int]) -> None:
        """Take note that a checkpoint with ``files`` of all processes is in place: others are removed."""
        for name, rows in self._rows.items():
            rows.settle(folder / name)
            for path in (folder / name).glob("*"):
                others = path.name.endswith(self._size) and not path.name.endswith(f"-{self.part}")  # who may write now
                if not others and f"{name}/{path.name}" not in files:
                    path.unlink(missing_ok=True)

    def load(self, folder: Path, files: Mapping[str, int]) -> None:
        """Take the rows that a checkpoint with ``files`` of all processes names, of however many there were.

        Raises:
            ResumeError: a file is missing, or too short.
        """
        own = {file: length for file, length in files.items() if file.endswith(f"-{self.part}")}
        goes_on = all(file.endswith(self._size) for file in files)
        for name, rows in self._rows.items():
            chosen = (own if goes_on else files).items()
            named = {file.partition("/")[2]: length for file, length in chosen if file.startswith(f"{name}/")}
            rows.load(folder / name, named, next(iter(named), "") if goes_on else "")
