"""The checkpoint of a run: its state between two steps and the end of its ledger's chain."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from safetensors import SafetensorError
from torch import Tensor

from .._fingerprint import differing
from ..algorithms.problem import Tally
from ..errors import ResumeError
from ..privacy.chain import Head
from .tensor_files import parts_of, read_tensors, write_parts


@dataclass(frozen=True)
class Checkpoint:
    """The state of a run after a number of steps, from which it continues to the same bits.

    Attributes:
        step: number of steps done.
        public: the state's tensors.
        clients: the files of the clients' own tensors, with their numbers of rows.
        history: evaluated rounds.
        fingerprint: of the data, settings and execution the state belongs to.
        channel: public tensors that the channel carries from one step to the next, such as
            adaptive clip norms.
        ledger: end of the ledger's chain when this was written; None without a ledger.
        tally: local trainings so far, and those that diverged.
        earlier: tensors of earlier public states that are in use, by version and name, as
            ``"v17/global"``.
    """

    step: int
    public: dict[str, Tensor]
    clients: dict[str, int]
    history: list[dict[str, Any]]
    fingerprint: str
    channel: dict[str, Tensor] = field(default_factory=dict)
    ledger: Head | None = None
    tally: Tally = field(default_factory=Tally)
    earlier: dict[str, Tensor] = field(default_factory=dict)

    def write(self, path: Path) -> None:
        """Writes one safetensors file, whole or not at all."""
        parts = {"public": self.public, "channel": self.channel, "earlier": self.earlier}
        write_parts(
            path, parts, {name: value for name, value in vars(self).items() if name not in parts}
        )

    @classmethod
    def read(cls, path: Path) -> Checkpoint:
        """Returns the checkpoint at ``path``.

        Raises:
            ResumeError: a file that cannot be read, or is no checkpoint.
        """
        try:
            return cls.made_of(*read_tensors(path))
        except (OSError, SafetensorError, KeyError, ValueError, TypeError) as error:
            raise ResumeError(f"{path} cannot be read as a checkpoint: {error}") from error

    @classmethod
    def made_of(cls, tensors: Mapping[str, Tensor], metadata: Mapping[str, str]) -> Checkpoint:
        """Returns the checkpoint of a file with these tensors and metadata.

        Raises:
            KeyError, ValueError, TypeError: they are not those of a checkpoint.
        """
        parts, notes = parts_of(tensors, metadata, "public", "channel", "earlier")
        notes["tally"] = Tally(**notes["tally"])
        if notes["ledger"]:
            notes["ledger"] = Head(**notes["ledger"])
        return cls(
            public=parts["public"], channel=parts["channel"], earlier=parts["earlier"], **notes
        )

    def check(self, path: Path, fingerprint: str) -> None:
        """Refuses to continue another run from this checkpoint.

        Args:
            path: of the checkpoint, for the message.
            fingerprint: of the run that is to go on.

        Raises:
            ResumeError: it was written by a run with other data, settings or execution.
        """
        # Other settings under the same ledger would be releases that nobody has charged.
        if self.fingerprint != fingerprint:
            names = (
                ", ".join(differing(self.fingerprint, fingerprint))
                or "data, settings, seed, device or execution"
            )
            raise ResumeError(
                f"{path} was written with other {names} than this run has; resume with the same "
                "ones, or start in another folder."
            )
