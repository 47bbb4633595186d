"""The clients' own tensors: rows that changed since the last checkpoint in memory, the others in files that it names.

A record of a file is a client's number and its row of every field. A file only grows. A checkpoint has the number of
records of each file that count, and of several records of a client the last one counts; what an interrupted save has
left behind them is cut off by the next one. A file whose records are replaced by later ones for the most part is
followed by a new one, and is removed when a checkpoint has named that one.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from .._files import append_bytes
from ..errors import ConfigError, ResumeError

Fields = Mapping[str, tuple[tuple[int, ...], torch.dtype]]
"""{name: (shape of one client's value, dtype)}."""

_FILE = re.compile(r"\d+-\d+-of-\d+")
_BYTES = 1 << 26  # of rows that are copied at once
_WHOLE_BYTES = 1 << 30  # of a field


class ClientStore:
    """Named per-client tensors (n, *shape), all zeros at first; clients that were never written take no room.

    Args:
        clients: n.
        fields: shape of one client's value and dtype, by name.
        device: where the tensors live.
        members: int64 (m,), ascending: the clients that have rows here, where several processes have some each; rows
            of the others are dropped. None: all.
        part: of the processes this is, as in ``"0-of-1"``.

    Raises:
        ConfigError: a field that is not a shape and a dtype.
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
        for name, field in fields.items():
            pair = isinstance(field, tuple) and len(field) == 2 and isinstance(field[1], torch.dtype)
            if not pair or not isinstance(field[0], tuple) or not all(isinstance(size, int) for size in field[0]):
                raise ConfigError(
                    f"client_store: field {name!r} is {field!r}; give the shape of one client's value and its dtype, "
                    "such as ((problem.dimension,), torch.float32), or ((), torch.bool) for one value."
                )
        self.clients, self.fields, self.part = clients, dict(fields), part
        self.members = torch.arange(clients) if members is None else members
        row = [(name, "u1", (math.prod(shape) * dtype.itemsize,)) for name, (shape, dtype) in fields.items()]
        self._record = np.dtype([("client", "<i8"), ("row", row)])
        self._zero = {name: torch.zeros(0, *s, dtype=dtype, device=device) for name, (s, dtype) in fields.items()}
        self._size = "-of-" + part.partition("-of-")[2]
        self._is_here = torch.zeros(clients, dtype=torch.bool)
        self._is_here[self.members] = True
        self._file = ""  # to which the next save appends; empty for a new one
        self._line = torch.full((clients,), -1, dtype=torch.int32)  # of a client's record; -1: none
        self._read_from([])

    def _read_from(self, saved: list[np.ndarray]) -> None:
        """Have no rows in memory, where those of ``ids`` are from line ``length`` on: all are in the records ``saved``,
        one array a file."""
        self._saved, self._length = saved, sum(map(len, saved))
        self._ids, self._rows = torch.zeros(0, dtype=torch.int64), dict(self._zero)

    def gather(self, name: str, ids: Tensor) -> Tensor:
        """Return a copy of the rows of ``ids``, int64 (k,) -> (k, *shape)."""
        line, held = self._line[ids.cpu()].long(), self._rows[name]
        in_memory = line >= self._length
        if bool(in_memory.all()):
            return held[line - self._length]
        rows = held.new_zeros(len(line), *held.shape[1:])
        rows[in_memory] = held[line[in_memory] - self._length]
        first = 0
        for records in self._saved:
            here = ((first <= line) & (line < first + len(records))).nonzero()[:, 0]
            read = torch.empty(len(here), math.prod(held.shape[1:]), dtype=held.dtype)
            read.view(torch.uint8).numpy()[:] = records["row"][name][(line[here] - first).numpy()]
            rows[here] = read.reshape(len(here), *held.shape[1:]).to(rows)
            first += len(records)
        return rows

    def gather_all(self, ids: Tensor) -> dict[str, Tensor]:
        """Return the rows of ``ids``, int64 (k,), of every field: (k, *shape) each.

        They must not be changed: where the ids are those of all clients in order they may be no copies.
        """
        if len(ids) == len(self._ids) and torch.equal(ids.cpu(), self.members):
            if not torch.equal(self._ids, self.members):
                self._take({name: self.gather(name, self.members) for name in self.fields})
            return {name: rows[: len(ids)] for name, rows in self._rows.items()}
        return {name: self.gather(name, ids) for name in self.fields}

    def whole(self, name: str) -> Tensor:
        """Return the rows of all clients, (n, *shape), which must not be changed."""
        if len(self.members) < self.clients:
            raise NotImplementedError("A rank has only the tensors of its own clients; gather them first.")
        return self.gather_all(self.members)[name]

    def scatter(self, name: str, ids: Tensor, rows: Tensor) -> None:
        """Replace the rows of ``ids``, int64 (k,) without a repetition, by ``rows`` (k, *shape)."""
        self.scatter_all(ids, {name: rows.detach().clone() if len(ids) == len(self.members) else rows})

    def scatter_all(self, ids: Tensor, rows: Mapping[str, Tensor]) -> None:
        """Replace the rows of ``ids`` in every field of ``rows``, (k, *shape) each, which are the store's own then."""
        ids = ids.cpu()
        if not rows:
            return
        if torch.equal(ids, self.members):
            others = {} if rows.keys() == self.fields.keys() else self.gather_all(ids)
            self._take({**others, **rows})
            return
        here = self._is_here[ids]
        ids = ids[here]
        self._hold(ids[self._line[ids] < self._length], rows)
        place = self._line[ids].long() - self._length
        for name, values in rows.items():
            values = values if bool(here.all()) else values[here.to(values.device)]
            self._rows[name][place] = values.detach().to(self._rows[name])

    def _take(self, rows: Mapping[str, Tensor]) -> None:
        """Replace the rows of all clients here, (m, *shape) by field, without a copy of those that are contiguous:
        products of others have other last bits."""
        self._ids = self.members
        self._rows = {name: rows[name].detach().to(zero).contiguous() for name, zero in self._zero.items()}
        self._line[self.members] = torch.arange(self._length, self._length + len(self.members), dtype=torch.int32)

    def _hold(self, new: Tensor, but: Mapping[str, Tensor]) -> None:
        """Bring clients into memory that have no rows there, int64 (k,), with their values of all fields ``but``
        those."""
        first, count = len(self._ids), len(self._ids) + len(new)
        for name, held in self._rows.items():
            if count > len(held):
                # for all clients, which takes no memory before it is written; of many to twice the size, so that a run
                # copies every row a few times
                whole = held.element_size() * math.prod(held.shape[1:]) * self.clients
                every = held.device.type == "cpu" and whole <= _WHOLE_BYTES
                grown = held.new_empty(
                    self.clients if every else min(max(count, 2 * first), self.clients), *held.shape[1:]
                )
                grown[:first] = held[:first]
                self._rows[name] = grown
            if name not in but:
                self._rows[name][first:count] = self.gather(name, new)
        self._line[new] = torch.arange(self._length + first, self._length + count, dtype=torch.int32)
        self._ids = torch.cat([self._ids, new])

    def save(self, folder: Path, step: int) -> dict[str, int]:
        """Append the rows in memory to their file in ``folder``, or write all rows to a new one where there is none, or
        where most of its records no longer count. The checkpoint of ``step``, which follows, must hold what is
        returned.

        Returns:
            The file and its number of records; empty if no client has a row.
        """
        every, ids, start = (self._line >= 0).nonzero()[:, 0], self._ids, self._length
        if not self._file or start + len(ids) > 2 * len(every):
            ids, self._file, start = every, f"{step}-{self.part}" if len(every) else "", 0
        if len(ids):
            path, length = folder / self._file, start + len(ids)
            append_bytes(path, start * self._record.itemsize, self._encoded(ids))
            self._line[ids] = torch.arange(start, length, dtype=torch.int32)
            self._read_from([self._records(path, length)])
        return {self._file: self._length} if self._file else {}

    def _encoded(self, ids: Tensor) -> Iterator[memoryview]:
        for some in ids.split(max(1, _BYTES // self._record.itemsize)):
            records = np.empty(len(some), self._record)
            records["client"] = some
            for name in self.fields:
                rows = self.gather(name, some).cpu().reshape(len(some), math.prod(self.fields[name][0]))
                records["row"][name] = rows.view(torch.uint8).numpy()
            yield records.view(np.uint8).data

    def _records(self, path: Path, length: int) -> np.ndarray:
        if not path.is_file() or path.stat().st_size < length * self._record.itemsize:
            raise ResumeError(
                f"{path} is missing, or has less than the {length:,} rows of clients that the checkpoint names. Where "
                f"folders are on disks of several machines, resume with as many processes, each on its machine, or "
                f"with any number once the files are in one folder that all machines reach."
            )
        return np.memmap(path, dtype=self._record, mode="r", shape=(length,))

    def commit(self, folder: Path, files: Mapping[str, int]) -> None:
        """Remove the files that are not among ``files`` of all processes, with which a checkpoint is in place."""
        for path in folder.glob("*"):
            others = path.name.endswith(self._size) and not path.name.endswith(f"-{self.part}")  # who may write now
            if not others and path.name not in files:
                path.unlink(missing_ok=True)

    def load(self, folder: Path, files: Mapping[str, int]) -> None:
        """Take the rows that a checkpoint with ``files`` of all processes names, of however many there were.

        Raises:
            ResumeError: a file is missing, or too short, or has the name of none of a store.
        """
        for name in files:
            if not _FILE.fullmatch(name):
                raise ResumeError(
                    f"the checkpoint names {name!r} as a file of clients; such a file is called 7-0-of-1."
                )
        mine = {file: length for file, length in files.items() if file.endswith(f"-{self.part}")}
        continued = all(file.endswith(self._size) for file in files)
        saved = [self._records(folder / name, length) for name, length in (mine if continued else files).items()]
        line, first = np.full(self.clients, -1, np.int32), 0
        for records in saved:
            line[records["client"]] = np.arange(first, first + len(records), dtype=np.int32)  # the last one counts
            first += len(records)
        line[~self._is_here.numpy()] = -1
        self._file = next(iter(mine), "") if continued else ""
        self._line = torch.from_numpy(line)
        self._read_from(saved)
