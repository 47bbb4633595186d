"""The clients' own tensors, in memory and in the files of a checkpoint.

Rows that changed since the last checkpoint are in memory; the others are in the files that it
names.

A record of a file is a client's number and its row of every field. A file only grows. A checkpoint
has the number of records of each file that count. If a client has several, the last one
counts. Records of an interrupted save stand behind those that count, and the next save cuts them
off. If most records of a file are replaced by later ones, a new file follows, and the old one is
removed when a checkpoint has named the new one.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from .._devices import on_device
from .._files import append_bytes
from ..errors import ConfigError, ResumeError

Fields = Mapping[str, tuple[tuple[int, ...], torch.dtype]]
"""{name: (shape of one client's value, dtype)}."""

_FILE = re.compile(r"\d+-\d+-of-\d+")
_BYTES = 1 << 26  # rows that are copied at once
_WHOLE_BYTES = 1 << 30  # a field that gets memory for all clients at once


class ClientStore:
    """Named per-client tensors (n, *shape), all zeros at first.

    Clients that were never written take no room.

    Args:
        clients: n.
        fields: shape of one client's value and dtype, by name.
        device: of the tensors.
        members: int64 (m,), ascending: the clients with rows in this process; rows of the others
            are dropped. None: all.
        part: number of this process and number of all, as in ``"0-of-1"``.

    Raises:
        ConfigError: a field is not a pair of a shape and a dtype.

    Example:
        >>> import torch
        >>> from fedmtl.algorithms import ClientStore
        >>> store = ClientStore(3, {"model": ((2,), torch.float32)})
        >>> store.scatter("model", torch.tensor([1]), torch.ones(1, 2))
        >>> store.gather("model", torch.tensor([0, 1]))
        tensor([[0., 0.],
                [1., 1.]])
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
            if not _is_field(field):
                raise ConfigError(
                    f"client_store: field {name!r} is {field!r}; give the shape of one client's "
                    "value and its dtype, such as ((problem.dimension,), torch.float32), or "
                    "((), torch.bool) for one value."
                )
        self.clients = clients
        self.fields = dict(fields)
        self.part = part
        if members is None:
            members = torch.arange(clients)
        self.members = members
        row = []
        self._zero = {}  # an empty tensor (0, *shape) of every field
        for name, (shape, dtype) in fields.items():
            row.append((name, "u1", (math.prod(shape) * dtype.itemsize,)))
            self._zero[name] = torch.zeros(0, *shape, dtype=dtype, device=device)
        self._record = np.dtype([("client", "<i8"), ("row", row)])
        self._size = "-of-" + part.partition("-of-")[2]
        self._is_here = torch.zeros(clients, dtype=torch.bool)
        self._is_here[self.members] = True
        self._file = ""  # the next save appends to it; empty for a new one
        # Number of each client's record: first those of the files in their order, then those in
        # memory; -1 without one.
        self._line = torch.full((clients,), -1, dtype=torch.int32)
        self._read_from([])

    def _read_from(self, saved: list[np.ndarray]) -> None:
        """Empties the memory: all rows are in the records ``saved``, one array for each file."""
        self._saved = saved
        self._length = sum(map(len, saved))  # the first line that is in memory
        self._held = torch.zeros(0, dtype=torch.int64)  # the clients with rows in memory
        self._rows = dict(self._zero)

    def gather(self, name: str, clients: Tensor) -> Tensor:
        """Returns a copy of rows, (k, *shape).

        Args:
            name: of the field.
            clients: int64 (k,), clients of this rank.
        """
        line = self._line[clients.cpu()].long()
        held = self._rows[name]
        in_memory = line >= self._length
        if bool(in_memory.all()):
            return held[on_device(line - self._length, held.device)]
        rows = held.new_zeros(len(line), *held.shape[1:])
        place = on_device(in_memory.nonzero()[:, 0], held.device)
        rows[place] = held[on_device(line[in_memory] - self._length, held.device)]
        first = 0
        for records in self._saved:
            here = ((first <= line) & (line < first + len(records))).nonzero()[:, 0]
            # the bytes of the rows are those of the file, whatever the dtype
            read = torch.empty(len(here), math.prod(held.shape[1:]), dtype=held.dtype)
            read.view(torch.uint8).numpy()[:] = records["row"][name][(line[here] - first).numpy()]
            values = on_device(read.reshape(len(here), *held.shape[1:]), rows.device)
            rows[on_device(here, rows.device)] = values
            first += len(records)
        return rows

    def gather_all(self, clients: Tensor) -> dict[str, Tensor]:
        """Returns the rows of clients in every field.

        They must not be changed: if these are all clients in order, they may be no copies.

        Args:
            clients: int64 (k,), clients of this rank.

        Returns:
            (k, *shape) by field.
        """
        if len(clients) == len(self._held) and torch.equal(clients.cpu(), self.members):
            # in memory in another order, that in which they came
            if not torch.equal(self._held, self.members):
                self._take({name: self.gather(name, self.members) for name in self.fields})
            return {name: rows[: len(clients)] for name, rows in self._rows.items()}
        return {name: self.gather(name, clients) for name in self.fields}

    def whole(self, name: str) -> Tensor:
        """Returns the rows of all clients, which must not be changed.

        Args:
            name: of the field.

        Returns:
            (n, *shape).

        Raises:
            NotImplementedError: the store of a rank, which has its own clients alone.
        """
        if len(self.members) < self.clients:
            own = "A rank has only the tensors of its own clients"
            raise NotImplementedError(f"{own}; gather them first.")
        return self.gather_all(self.members)[name]

    def scatter(self, name: str, clients: Tensor, rows: Tensor) -> None:
        """Replaces the rows of clients in a field.

        Args:
            name: of the field.
            clients: int64 (k,), all different.
            rows: (k, *shape).
        """
        if len(clients) == len(self.members):
            rows = rows.detach().clone()  # the rows of all clients are taken without a copy
        self.scatter_all(clients, {name: rows})

    def scatter_all(self, clients: Tensor, rows: Mapping[str, Tensor]) -> None:
        """Replaces the rows of clients in several fields.

        Args:
            clients: int64 (k,), all different.
            rows: by field, (k, *shape) each; the tensors are the store's own then.
        """
        clients = clients.cpu()
        if not rows:
            return
        if torch.equal(clients, self.members):
            if rows.keys() != self.fields.keys():
                rows = {**self.gather_all(clients), **rows}
            self._take(rows)
            return
        here = self._is_here[clients]
        clients = clients[here]
        self._hold(clients[self._line[clients] < self._length], rows)
        place = self._line[clients].long() - self._length
        for name, values in rows.items():
            if not bool(here.all()):
                values = values[on_device(here.nonzero()[:, 0], values.device)]
            held = self._rows[name]
            held[on_device(place, held.device)] = values.detach().to(held)

    def _take(self, rows: Mapping[str, Tensor]) -> None:
        """Replaces the rows of all clients of this process, (m, *shape) by field.

        Contiguous rows are not copied. Others are, since their products have other last bits.
        """
        self._held = self.members
        self._rows = {}
        for name, zero in self._zero.items():
            self._rows[name] = rows[name].detach().to(zero).contiguous()
        end = self._length + len(self.members)
        self._line[self.members] = torch.arange(self._length, end, dtype=torch.int32)

    def _hold(self, new: Tensor, but: Mapping[str, Tensor]) -> None:
        """Brings the rows of clients into memory that have none there.

        Args:
            new: int64 (k,), the clients.
            but: the fields that are about to be written, whose values are not read.
        """
        first = len(self._held)
        count = first + len(new)
        for name, held in self._rows.items():
            if count > len(held):
                grown = held.new_empty(self._room(held, count), *held.shape[1:])
                grown[:first] = held[:first]
                self._rows[name] = grown
            if name not in but:
                self._rows[name][first:count] = self.gather(name, new)
        lines = torch.arange(self._length + first, self._length + count, dtype=torch.int32)
        self._line[new] = lines
        self._held = torch.cat([self._held, new])

    def _room(self, held: Tensor, count: int) -> int:
        """Returns the rows to allocate for a field that needs ``count`` of them."""
        whole = held.element_size() * math.prod(held.shape[1:]) * self.clients
        # on the CPU memory that is not written takes no room
        if held.device.type == "cpu" and whole <= _WHOLE_BYTES:
            return self.clients
        # growth by a factor of 2 copies every row a few times in a run
        return min(max(count, 2 * len(self._held)), self.clients)

    def save(self, folder: Path, step: int) -> dict[str, int]:
        """Appends the rows in memory to their file, or writes all rows to a new one.

        A new file begins if there is none, or if most records of the file no longer count. The
        checkpoint of ``step``, which follows, must hold the returned value.

        Args:
            folder: of the files.
            step: of the checkpoint.

        Returns:
            The file and its number of records; empty if no client has a row.
        """
        every = (self._line >= 0).nonzero()[:, 0]
        clients = self._held
        start = self._length
        if not self._file or start + len(clients) > 2 * len(every):
            self._file = ""
            if len(every):
                self._file = f"{step}-{self.part}"
            clients = every
            start = 0
        if len(clients):
            path = folder / self._file
            length = start + len(clients)
            append_bytes(path, start * self._record.itemsize, self._encoded(clients))
            self._line[clients] = torch.arange(start, length, dtype=torch.int32)
            self._read_from([self._records(path, length)])
        if not self._file:
            return {}
        return {self._file: self._length}

    def _encoded(self, clients: Tensor) -> Iterator[memoryview]:
        """Yields the bytes of the records of clients, int64 (k,), some at a time."""
        for some in clients.split(max(1, _BYTES // self._record.itemsize)):
            records = np.empty(len(some), self._record)
            records["client"] = some
            for name, (shape, _) in self.fields.items():
                rows = self.gather(name, some).cpu().reshape(len(some), math.prod(shape))
                records["row"][name] = rows.view(torch.uint8).numpy()
            yield records.view(np.uint8).data

    def _records(self, path: Path, length: int) -> np.ndarray:
        """Returns the first ``length`` records of a file, mapped into memory."""
        if not path.is_file() or path.stat().st_size < length * self._record.itemsize:
            raise ResumeError(
                f"{path} is missing, or has less than the {length:,} rows of clients that the "
                "checkpoint names. Where folders are on disks of several machines, resume with as "
                "many processes, each on its machine, or with any number once the files are in one "
                "folder that all machines reach."
            )
        return np.memmap(path, dtype=self._record, mode="r", shape=(length,))

    def commit(self, folder: Path, files: Mapping[str, int]) -> None:
        """Removes the files that a checkpoint in place does not name.

        Args:
            folder: of the files.
            files: those of the checkpoint, of all processes.
        """
        for path in folder.glob("*"):
            if path.name in files:
                continue
            # the other processes of this run may be writing theirs
            if path.name.endswith(self._size) and not path.name.endswith(f"-{self.part}"):
                continue
            path.unlink(missing_ok=True)

    def load(self, folder: Path, files: Mapping[str, int]) -> None:
        """Takes the rows of a checkpoint, which any number of processes may have written.

        Args:
            folder: of the files.
            files: those of the checkpoint, of all processes, with their numbers of records.

        Raises:
            ResumeError: a file is missing or too short, or its name is not one of a store.
        """
        for name in files:
            if not _FILE.fullmatch(name):
                named = f"the checkpoint names {name!r} as a file of clients"
                raise ResumeError(f"{named}; such a file is called 7-0-of-1.")
        read = files
        self._file = ""
        # as many processes as before: each reads and continues its own file
        if all(file.endswith(self._size) for file in files):
            read = {file: n for file, n in files.items() if file.endswith(f"-{self.part}")}
            self._file = next(iter(read), "")
        saved = [self._records(folder / name, length) for name, length in read.items()]
        line = np.full(self.clients, -1, np.int32)
        first = 0
        for records in saved:
            end = first + len(records)
            # of several records of a client the assignment keeps the last
            line[records["client"]] = np.arange(first, end, dtype=np.int32)
            first = end
        line[~self._is_here.numpy()] = -1
        self._line = torch.from_numpy(line)
        self._read_from(saved)


def _is_field(field: object) -> bool:
    """Checks a field for being a pair of a shape and a dtype."""
    if not isinstance(field, tuple) or len(field) != 2:
        return False
    shape, dtype = field
    if not isinstance(shape, tuple) or not isinstance(dtype, torch.dtype):
        return False
    return all(isinstance(size, int) for size in shape)
