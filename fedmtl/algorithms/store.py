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

from .._files import write_bytes
from ..errors import ResumeError

Fields = Mapping[str, tuple[tuple[int, ...], torch.dtype]]
"""{name: (shape of one client's value, dtype)}."""


class ClientStore:
    """Named per-client tensors (n, *shape), all zeros at first.

    Args:
        clients: n.
        fields: shape of one client's value and dtype, by name.
        device: where the tensors live.
    """

    def __init__(self, clients: int, fields: Fields, *, device: torch.device | str = "cpu") -> None:
        self.clients = clients
        self.fields = dict(fields)
        self._tensors = {
            name: torch.zeros(clients, *shape, dtype=dtype, device=device) for name, (shape, dtype) in fields.items()
        }

    def gather(self, name: str, ids: Tensor) -> Tensor:
        """Return a copy of the rows of ``ids``, int64 (k,) -> (k, *shape)."""
        return self._tensors[name][ids.to(self._tensors[name].device)]

    def scatter(self, name: str, ids: Tensor, rows: Tensor) -> None:
        """Replace the rows of ``ids`` by ``rows`` (k, *shape)."""
        tensor = self._tensors[name]
        tensor[ids.to(tensor.device)] = rows.to(tensor)

    def gather_all(self, ids: Tensor) -> dict[str, Tensor]:
        """Return the rows of ``ids``, int64 (k,), of every field: (k, *shape) each.

        They must not be changed: where the ids are those of all clients in order they are no copies.
        """
        whole = self._in_order(ids)
        return {name: self.whole(name) if whole else self.gather(name, ids) for name in self.fields}

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
        return self._tensors[name]

    def assign(self, name: str, rows: Tensor) -> None:
        """Replace the rows of all clients by ``rows`` (n, *shape), which are the store's own from now on."""
        self._tensors[name] = rows.to(self._tensors[name])

    def snapshot(self, step: int) -> dict[str, Tensor]:
        """Return what the checkpoint of ``step`` must hold of the clients: the full tensors by name, not copies."""
        return {name: tensor.contiguous() for name, tensor in self._tensors.items()}

    def commit(self) -> None:
        """Take note that the checkpoint of the last snapshot is in place."""

    def restore(self, tensors: Mapping[str, Tensor], step: int) -> None:
        """Take the values of the snapshot of ``step``.

        Raises:
            ResumeError: names or shapes differ.
        """
        shapes = {name: tuple(t.shape) for name, t in self._tensors.items()}
        found = {name: tuple(t.shape) for name, t in tensors.items()}
        if shapes != found:
            raise ResumeError(f"The checkpoint holds client tensors {found}; this run expects {shapes}.")
        for name, tensor in tensors.items():
            self._tensors[name].copy_(tensor)


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
        self.clients, self.fields, self.folder, self.device = clients, dict(fields), Path(folder), device
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
        self._pending: tuple[Path, dict[str, Tensor]] | None = None
        self._written: dict[str, dict[int, Tensor]] = {name: {} for name in self.fields}

    def gather(self, name: str, ids: Tensor) -> Tensor:
        rows = self._maps[name][ids.cpu()]
        written = self._written[name]
        for place, client in enumerate(ids.tolist()):
            if client in written:
                rows[place] = written[client]
        return rows.to(self.device)

    def scatter(self, name: str, ids: Tensor, rows: Tensor) -> None:
        values = rows.detach().to("cpu", self.fields[name][1], copy=True)
        self._written[name].update(zip(ids.tolist(), values, strict=True))

    def whole(self, name: str) -> Tensor:
        return self.gather(name, torch.arange(self.clients))

    def assign(self, name: str, rows: Tensor) -> None:
        self.scatter(name, torch.arange(self.clients), rows)

    def snapshot(self, step: int) -> dict[str, Tensor]:
        """Write the journal of ``step``; the checkpoint itself need not hold anything of the clients."""
        journal: dict[str, Tensor] = {}
        for name, written in self._written.items():
            if written:
                journal[f"{name}.ids"] = torch.tensor(list(written))
                journal[f"{name}.rows"] = torch.stack(list(written.values()))
        if journal:
            path = self.folder / f"journal-{step}.safetensors"
            write_bytes(path, save(journal))  # durable before the checkpoint is
            self._pending = path, journal
        return {}

    def commit(self) -> None:
        """Copy the journal of the last snapshot into the files."""
        if self._pending is not None:
            self._apply(*self._pending)
            self._pending, self._written = None, {name: {} for name in self.fields}

    def restore(self, tensors: Mapping[str, Tensor], step: int) -> None:
        """Go to the checkpoint of ``step``: finish its commit if a crash cut it short, and drop everything later.

        Raises:
            ResumeError: the checkpoint holds client tensors itself, so it was written by a store in memory.
        """
        if tensors:
            raise ResumeError("The checkpoint was written with client_store='memory'; resume it with that.")
        self._pending, self._written = None, {name: {} for name in self.fields}
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
