"""Per-client private tensors for any population."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Literal

import numpy as np
import torch
from safetensors.torch import load_file, save
from torch import Tensor

from .._devices import sent
from .._files import write_bytes
from ..errors import ConfigError, ResumeError

Fields = Mapping[str, tuple[tuple[int, ...], torch.dtype]]
"""{name: (shape of one client's value, dtype)}."""


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


class WrittenRows:
    """Rows (n, *shape) of which those that were ever written take memory.

    Args:
        clients: n.
        shape: of one row.
        dtype: of the rows.
        device: where they are.
    """

    def __init__(
        self, clients: int, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device | str = "cpu"
    ) -> None:
        self._place = torch.full((clients,), -1, dtype=torch.int32)  # of a client's row among those written
        self._ids = torch.zeros(0, dtype=torch.int64)
        self._rows = torch.zeros(0, *shape, dtype=dtype, device=device)  # the first len(self) of them

    def __len__(self) -> int:
        """Return the number of rows that were written."""
        return len(self._ids)

    @property
    def ids(self) -> Tensor:
        """Return whose rows these are, in the order in which they were first written, int64 (m,)."""
        return self._ids

    @property
    def rows(self) -> Tensor:
        """Return the rows of :attr:`ids`, (m, *shape): not a copy."""
        return self._rows[: len(self)]

    def fill(self, ids: Tensor, rows: Tensor) -> Tensor:
        """Return ``rows`` (k, *shape), those of ``ids`` (k,) as they are without what is here, with what is written
        here in their place; may be ``rows`` itself, changed."""
        place = self._place[ids.cpu()].long()
        known = (place >= 0).nonzero()[:, 0]
        if len(known) == len(ids):
            return self._rows[sent(place, self._rows.device)]
        rows[sent(known, rows.device)] = self._rows[sent(place[known], self._rows.device)].to(rows.device)
        return rows

    def write(self, ids: Tensor, rows: Tensor) -> None:
        """Keep a copy of ``rows`` (k, *shape) for ``ids``, int64 (k,), of which none is there twice."""
        ids = ids.cpu()
        new = ids[self._place[ids] < 0]
        if len(new):
            first = len(self)
            self._place[new] = torch.arange(first, first + len(new), dtype=torch.int32)
            self._ids = torch.cat([self._ids, new])
            if len(self) > len(self._rows):  # to twice the size, so that a run copies every row a few times at most
                size = min(max(len(self), 2 * first), len(self._place))
                grown = self._rows.new_empty(size, *self._rows.shape[1:])
                grown[:first] = self._rows[:first]
                self._rows = grown
        place = self._place[ids].long()
        self._rows[sent(place, self._rows.device)] = rows.detach().to(self._rows)

    def dense(self) -> Tensor:
        """Return a tensor with the rows of all clients (n, *shape), zero where none was written."""
        whole = self._rows.new_zeros(len(self._place), *self._rows.shape[1:])
        whole[sent(self._ids, whole.device)] = self.rows
        return whole


class ClientStore:
    """Named per-client tensors (n, *shape), all zeros at first.

    Only clients whose rows were written take memory, and room in a checkpoint, until they are more than half of all.

    Args:
        clients: n.
        fields: shape of one client's value and dtype, by name.
        device: where the tensors live.
    """

    def __init__(self, clients: int, fields: Fields, *, device: torch.device | str = "cpu") -> None:
        self.clients = clients
        self.fields = checked(fields)
        self.device = device
        self._written = {name: WrittenRows(clients, shape, dtype, device) for name, (shape, dtype) in fields.items()}
        self._dense: dict[str, Tensor] = {}  # of the fields that most clients have

    def gather(self, name: str, ids: Tensor) -> Tensor:
        """Return a copy of the rows of ``ids``, int64 (k,) -> (k, *shape)."""
        if name in self._dense:
            return self._dense[name][sent(ids, self._dense[name].device)]
        shape, dtype = self.fields[name]
        return self._written[name].fill(ids, torch.zeros(len(ids), *shape, dtype=dtype, device=self.device))

    def scatter(self, name: str, ids: Tensor, rows: Tensor) -> None:
        """Replace the rows of ``ids`` by ``rows`` (k, *shape)."""
        if name in self._dense:
            tensor = self._dense[name]
            tensor[sent(ids, tensor.device)] = rows.to(tensor)
            return
        self._written[name].write(ids, rows)
        if 2 * len(self._written[name]) > self.clients:
            self.whole(name)

    def gather_all(self, ids: Tensor) -> dict[str, Tensor]:
        """Return the rows of ``ids``, int64 (k,), of every field: (k, *shape) each.

        They must not be changed: where the ids are those of all clients in order they may be no copies.
        """
        whole = self._in_order(ids)
        return {
            name: self.whole(name) if whole and name in self._dense else self.gather(name, ids) for name in self.fields
        }

    def scatter_all(self, ids: Tensor, rows: Mapping[str, Tensor]) -> None:
        """Replace the rows of ``ids`` in every field of ``rows``, (k, *shape) each, which are the store's own then."""
        whole = self._in_order(ids)
        for name, values in rows.items():
            if whole:
                self.assign(name, values)
            else:
                self.scatter(name, ids, values)

    def _in_order(self, ids: Tensor) -> bool:
        return len(ids) == self.clients and bool((ids.cpu() == torch.arange(self.clients)).all())

    def whole(self, name: str) -> Tensor:
        """Return the rows of all clients, (n, *shape): not a copy where they are in memory, so it must not be
        changed."""
        if name not in self._dense:
            self.assign(name, self._written[name].dense())
        return self._dense[name]

    def assign(self, name: str, rows: Tensor) -> None:
        """Replace the rows of all clients by ``rows`` (n, *shape), which are the store's own from now on."""
        self._dense[name] = rows.to(self.device, self.fields[name][1])
        self._written.pop(name, None)

    def snapshot(self, step: int) -> dict[str, Tensor]:
        """Return what the checkpoint of ``step`` must hold of the clients, not copies: by name the rows of all of them,
        or of those whose rows were written, with their numbers under the name and ``.ids``."""
        found = {name: tensor.contiguous() for name, tensor in self._dense.items()}
        for name, written in self._written.items():
            found |= {name: written.rows, f"{name}.ids": written.ids}
        return found

    def commit(self) -> None:
        """Take note that the checkpoint of the last snapshot is in place."""

    def restore(self, tensors: Mapping[str, Tensor], step: int) -> None:
        """Take the values of the snapshot of ``step``.

        Raises:
            ResumeError: names or shapes differ.
        """
        numbers = {name: tensors[f"{name}.ids"] for name in self.fields if f"{name}.ids" in tensors}
        found = {name: tuple(t.shape) for name, t in tensors.items() if name.removesuffix(".ids") not in numbers}
        for name, ids in numbers.items():  # rows of some clients
            rows = tensors.get(name, ids)
            fit = len(rows) == len(ids) and bool(((ids >= 0) & (ids < self.clients)).all())
            found[name] = (self.clients if fit else len(rows), *rows.shape[1:])
        shapes = {name: (self.clients, *shape) for name, (shape, _) in self.fields.items()}
        if shapes != found:
            raise ResumeError(f"The checkpoint holds client tensors {found}; this run expects {shapes}.")
        for name, (shape, dtype) in self.fields.items():
            self._dense.pop(name, None)
            self._written[name] = WrittenRows(self.clients, shape, dtype, self.device)
            if name in numbers:
                self._written[name].write(numbers[name], tensors[name])
            else:
                self.assign(name, tensors[name].clone())


class PartStore(ClientStore):
    """The tensors of some of the clients, which are addressed by their numbers among all; rows of the others are
    dropped. A rank of a run over several processes has one.

    Args:
        clients: n, all of them.
        members: int64 (m,), whose tensors are kept, ascending.
        inner: keeps them, in this order.
    """

    def __init__(self, clients: int, members: Tensor, inner: ClientStore) -> None:
        self.clients, self.members, self.inner, self.fields = clients, members, inner, inner.fields
        self._place = torch.full((clients,), -1)
        self._place[members] = torch.arange(len(members))

    def gather(self, name: str, ids: Tensor) -> Tensor:
        return self.inner.gather(name, self._place[ids.cpu()])

    def gather_all(self, ids: Tensor) -> dict[str, Tensor]:
        return self.inner.gather_all(self._place[ids.cpu()])

    def scatter(self, name: str, ids: Tensor, rows: Tensor) -> None:
        place = self._place[ids.cpu()]
        kept = (place >= 0).nonzero()[:, 0]
        self.inner.scatter(name, place[kept], rows[sent(kept, rows.device)])

    def scatter_all(self, ids: Tensor, rows: Mapping[str, Tensor]) -> None:
        place = self._place[ids.cpu()]
        if bool((place >= 0).all()):
            self.inner.scatter_all(place, rows)
        else:
            super().scatter_all(ids, rows)

    def _in_order(self, ids: Tensor) -> bool:
        return False

    def whole(self, name: str) -> Tensor:
        raise NotImplementedError("A rank has the tensors of its own clients alone; gather them first.")

    def assign(self, name: str, rows: Tensor) -> None:
        self.inner.assign(name, rows[self.members.to(rows.device)])

    def snapshot(self, step: int) -> dict[str, Tensor]:
        return self.inner.snapshot(step)

    def commit(self) -> None:
        self.inner.commit()

    def restore(self, tensors: Mapping[str, Tensor], step: int) -> None:
        """Take the values of the snapshot of ``step``, of all clients (those of a mapped store are in its folder)."""
        if not tensors:
            self.inner.restore(tensors, step)
            return
        whole = ClientStore(self.clients, self.fields)
        whole.restore(tensors, step)
        for name in self.fields:
            self.inner.assign(name, whole.gather(name, self.members))


class MappedClientStore(ClientStore):
    """A :class:`ClientStore` in memory-mapped files, for populations larger than memory.

    The files hold the rows of the last committed checkpoint; rows written since then are kept in memory, over them.
    A snapshot writes these to a journal named by its step, the checkpoint's own rename decides whether the step
    counts, and the commit copies the journal into the files. After a crash, :meth:`restore` applies the journal of
    the checkpoint's step again, which is idempotent, and drops any other: what is found is the checkpoint's state.

    Args:
        clients, fields: see :class:`ClientStore`.
        folder: where the files live; existing files are opened.
        device: where gathered rows go.
    """

    def __init__(self, clients: int, fields: Fields, *, folder: str | Path, device: torch.device | str = "cpu") -> None:
        self.clients, self.fields, self.folder, self.device = clients, checked(fields), Path(folder), device
        self.folder.mkdir(parents=True, exist_ok=True)
        layout = json.dumps({k: [clients, list(s), str(d)] for k, (s, d) in self.fields.items()}, sort_keys=True)
        description = self.folder / "layout.json"
        if description.exists() and description.read_text() != layout:
            raise ResumeError(f"{description} describes other client tensors than this run has: {layout}.")
        self._maps: dict[str, Tensor] = {}
        for name, (shape, dtype) in self.fields.items():
            kind = torch.zeros((), dtype=dtype).numpy().dtype
            path, full = self.folder / f"{name}.bin", (clients, *shape)
            mode: Literal["r+", "w+"] = "r+" if path.exists() else "w+"
            self._maps[name] = torch.from_numpy(np.memmap(path, dtype=kind, mode=mode, shape=full))
        if not description.exists():
            write_bytes(description, layout.encode())
        self._dense = {}
        self._drop()

    @classmethod
    def existing(cls, clients: int, folder: Path) -> MappedClientStore:
        """Open the files of ``clients`` clients in ``folder``, with the fields that they were written with."""
        layout = json.loads((folder / "layout.json").read_text())
        fields = {name: (tuple(s), getattr(torch, d.removeprefix("torch."))) for name, (_, s, d) in layout.items()}
        return cls(clients, fields, folder=folder)

    def _drop(self) -> None:
        """Forget what was written since the last committed checkpoint."""
        self._pending: tuple[Path, dict[str, Tensor]] | None = None
        self._written = {name: WrittenRows(self.clients, *field) for name, field in self.fields.items()}

    def gather(self, name: str, ids: Tensor) -> Tensor:
        return self._written[name].fill(ids, self._maps[name][ids.cpu()]).to(self.device)

    def scatter(self, name: str, ids: Tensor, rows: Tensor) -> None:
        self._written[name].write(ids, rows)

    def whole(self, name: str) -> Tensor:
        return self.gather(name, torch.arange(self.clients))

    def assign(self, name: str, rows: Tensor) -> None:
        self.scatter(name, torch.arange(self.clients), rows)

    def snapshot(self, step: int) -> dict[str, Tensor]:
        """Write the journal of ``step``; the checkpoint itself need not hold anything of the clients."""
        journal: dict[str, Tensor] = {}
        for name, written in self._written.items():
            if len(written):
                journal |= {f"{name}.ids": written.ids, f"{name}.rows": written.rows}
        if journal:
            path = self.folder / f"journal-{step}.safetensors"
            write_bytes(path, save(journal))  # durable before the checkpoint is
            self._pending = path, journal
        return {}

    def commit(self) -> None:
        """Copy the journal of the last snapshot into the files."""
        if self._pending is not None:
            self._apply(*self._pending)
            self._drop()

    def restore(self, tensors: Mapping[str, Tensor], step: int) -> None:
        """Go to the checkpoint of ``step``: finish its commit if a crash cut it short, and drop everything later.

        Raises:
            ResumeError: the checkpoint holds client tensors itself, so it was written by a store in memory.
        """
        if tensors:
            raise ResumeError("The checkpoint was written with client_store='memory'; resume it with that.")
        self._drop()
        for path in self.folder.glob("journal-*"):
            if path.name == f"journal-{step}.safetensors":
                self._apply(path, load_file(path))
            else:
                path.unlink()

    def _apply(self, path: Path, journal: Mapping[str, Tensor]) -> None:
        for name in self.fields:
            if f"{name}.ids" in journal:
                self._maps[name][journal[f"{name}.ids"]] = journal[f"{name}.rows"]
                _sync(self.folder / f"{name}.bin")
        path.unlink()


def _sync(path: Path) -> None:
    with open(path, "rb+") as file:
        os.fsync(file.fileno())
