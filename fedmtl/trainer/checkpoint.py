"""Everything a run leaves on disk is written to a temporary name, synced and renamed. Nothing is pickled."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import astuple, dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save
from torch import Tensor

from .._files import write_bytes
from .._fingerprint import differing
from ..algorithms.base import Tally
from ..errors import ResumeError
from ..privacy.chain import Head


def write_json(path: Path, value: Any, *, indent: int | None = 2) -> None:
    """Write ``value`` as JSON, by :func:`write_bytes`: with ``indent=None``, for many numbers, in one line and in a
    tenth of the time."""
    write_bytes(path, (json.dumps(value, indent=indent) + "\n").encode())


def write_tensors(path: Path, tensors: Mapping[str, Tensor], metadata: Mapping[str, str] | None = None) -> None:
    """Write tensors as safetensors, by :func:`write_bytes`."""
    ready = {name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()}
    write_bytes(path, save(ready, metadata=dict(metadata or {})))


def read_tensors(path: Path) -> tuple[dict[str, Tensor], dict[str, str]]:
    """Return the tensors of a safetensors file by name, and its metadata.

    Raises:
        OSError, SafetensorError: it cannot be read.
    """
    with safe_open(path, framework="pt") as file:
        return {name: file.get_tensor(name) for name in file.keys()}, file.metadata() or {}  # noqa: SIM118 - no mapping


@dataclass(frozen=True)
class Checkpoint:
    """The state after ``step`` events, and the history so far.

    Attributes:
        step: number of events done.
        public: the state's tensors.
        clients: the files of the clients' own tensors, with their numbers of rows.
        history: evaluated rounds.
        fingerprint: of the data, settings and execution the state belongs to.
        channel: what the channel carries from one step to the next: public tensors.
        ledger: end of the ledger's chain when this was written; None without a ledger.
        tally: local trainings so far, and those that diverged.
    """

    step: int
    public: dict[str, Tensor]
    clients: dict[str, int]
    history: list[dict[str, Any]]
    fingerprint: str
    channel: dict[str, Tensor] = field(default_factory=dict)
    ledger: Head | None = None
    tally: Tally = field(default_factory=Tally)

    def write(self, path: Path) -> None:
        """Write one atomic safetensors file."""
        tensors = {f"public.{k}": v for k, v in self.public.items()}
        tensors |= {f"channel.{k}": v for k, v in self.channel.items()}
        tensors["step"] = torch.tensor(self.step)
        tensors["trainings"] = torch.tensor(astuple(self.tally))
        metadata = {"history": json.dumps(self.history), "fingerprint": self.fingerprint}
        metadata["clients"] = json.dumps(self.clients)
        if self.ledger is not None:
            metadata["ledger"] = self.ledger.text()
        write_tensors(path, tensors, metadata)

    @classmethod
    def read(cls, path: Path) -> Checkpoint:
        """Return the checkpoint at ``path``.

        Raises:
            ResumeError: unreadable.
        """
        try:
            tensors, metadata = read_tensors(path)
            public, channel = (
                {name.removeprefix(part): value for name, value in tensors.items() if name.startswith(part)}
                for part in ("public.", "channel.")
            )
            return cls(
                step=int(tensors["step"]),
                public=public,
                clients=json.loads(metadata["clients"]),
                history=json.loads(metadata["history"]),
                fingerprint=metadata["fingerprint"],
                channel=channel,
                ledger=Head.parse(metadata.get("ledger", "")),
                tally=Tally(*tensors["trainings"].tolist()),
            )
        except (OSError, SafetensorError, KeyError) as error:
            raise ResumeError(f"{path} cannot be read as a checkpoint: {error}") from error

    def check(self, path: Path, fingerprint: str) -> None:
        """Refuse to continue another run from the checkpoint at ``path``.

        Raises:
            ResumeError: it was written by a run with other data, settings or execution.
        """
        if self.fingerprint != fingerprint:
            names = ", ".join(differing(self.fingerprint, fingerprint)) or "data, settings, seed, device or execution"
            raise ResumeError(
                f"{path} was written with other {names} than this run has; resume with the same ones, or start in "
                "another folder."
            )
