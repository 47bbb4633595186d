"""The folder of a run: its paths, its claim, its checkpoint and the list of its files.

Everything is written to a temporary name, synced and renamed. Nothing is pickled. A run holds its
folder while it writes there (:meth:`RunFolder.claimed`).
"""

from __future__ import annotations

import hashlib
import secrets
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from tempfile import TemporaryFile
from typing import Any

from .._files import CLAIM, claimed, remove_empty, remove_temporary, write_bytes, write_json
from ..errors import ConfigError, ResumeError
from ..privacy.chain import read_chain
from .checkpoint import Checkpoint
from .result_tables import csv_bytes

MANIFEST = "manifest.json"
OUTCOME = "outcome.json"
COLUMNS = "columns.json"
MODEL = "model.safetensors"


class RunFolder:
    """Paths of one run, and the writing of its files.

    ``public/`` holds the files that epsilon covers: the shared model, privacy.json, in secure mode
    the last value of every release, and a list of these files with their hashes. ``private/`` holds
    the others: the personal models, metrics, plots, checkpoint, ledger, configuration with the
    seed, the values that :meth:`Result.load <fedmtl.Result.load>` reads beside these
    (``outcome.json``), and the baselines' runs.

    Models are safetensors files: ``public/model.safetensors`` has the model's state by name, as
    ``load_state_dict`` takes it, with the names of frozen tensors in the metadata under ``frozen``,
    and under ``tied`` every further name of a tied weight with its first one;
    ``private/models.safetensors`` has the tensor ``models`` (n, D) of trained parameters, with the
    ids in the metadata under ``ids``: of all clients, or of those that were drawn for evaluation;
    ``private/parts.safetensors`` has the :attr:`~fedmtl.Result.parts` of the methods that have
    some. For a table, ``columns.json`` says how raw rows become inputs of the models and outputs
    predictions, and how the network is built. It is in ``public/`` if names and categories of its
    columns were settings of the run, and in ``private/`` if some were read off the table. If the
    algorithm bounds features, the metadata have ``bound``, such as
    ``{"bound": 1.0, "norm": "l2"}``, and a model predicts on records that
    :class:`fedmtl.data.RowBound` has scaled down to it (:class:`fedmtl.models.BoundedInputs` does
    so).

    Args:
        root: the folder.
    """

    def __init__(self, root: Path) -> None:
        self.root = root
        self.public = root / "public"
        self.private = root / "private"
        self.ledger = self.private / "ledger.jsonl"
        self.checkpoint = self.private / "checkpoint.safetensors"
        # Files of the clients' own tensors; the checkpoint names those that are its own.
        self.clients = self.private / "clients"

    @classmethod
    def of(cls, folder: str | Path | None) -> RunFolder | None:
        """Returns the folder of a run; None for a run that is not saved."""
        if folder is None:
            return None
        return cls(Path(folder))

    @property
    def started(self) -> bool:
        """Returns True if a run has begun here."""
        return self.ledger.exists() or self.checkpoint.exists()

    def make(self) -> None:
        """Makes the folder of a run.

        Raises:
            ConfigError: no file can be written there, or it would be in the public part of another
                run.
        """
        root = self.root.absolute()
        runs = (place.parent for place in (root, *root.parents) if place.name == "public")
        if other := next((run for run in runs if RunFolder(run).started), None):
            raise ConfigError(
                f"folder is {str(self.root)!r}, in the public part of the run in {other}, and a "
                "run has a private part; choose another folder."
            )
        try:
            self.private.mkdir(parents=True, exist_ok=True)
            # A run must not find out after hours that it cannot write.
            with TemporaryFile(dir=self.private):
                pass
        except OSError as error:
            raise ConfigError(
                f"folder is {str(self.root)!r}, where no file can be written ({error}); choose "
                "another folder."
            ) from error

    @contextmanager
    def claimed(self, *, resume: bool) -> Iterator[None]:
        """Holds the folder for the block. A run writes nothing in a folder that it does not hold.

        The claim is that of :func:`fedmtl._files.claimed` on ``private/``; unfinished files of
        killed processes are removed.

        Args:
            resume: True to continue a run that has begun here.

        Raises:
            ConfigError: another run holds the folder; or see :meth:`make`.
            ResumeError: a run has begun here, and ``resume`` is false.
        """
        self._refuse_started(resume)
        existed = self.root.exists()
        self.make()
        with ExitStack() as stack:
            # A run that is refused leaves no empty folder behind.
            if not existed:
                stack.callback(remove_empty, self.root)
            try:
                stack.enter_context(claimed(self.private))
            except BlockingIOError as error:
                raise ConfigError(
                    f"folder is {str(self.root)!r}, in which another process is running; choose "
                    "another folder, or wait until it has ended."
                ) from error
            self._refuse_started(resume)  # another process may have run here in the meantime
            for part in (self.public, self.private):
                remove_temporary(part)
            yield

    def _refuse_started(self, resume: bool) -> None:
        if self.started and not resume:
            raise ResumeError(
                f"{self.root} already holds a run; give another folder, or fit(resume=True)."
            )

    def reopen(self) -> None:
        """Removes the mark of a finished run, before a file of it changes."""
        (self.private / "result.json").unlink(missing_ok=True)

    def read_checkpoint(self) -> Checkpoint | None:
        """Returns the checkpoint of the run; None before the first.

        Raises:
            ResumeError: it cannot be read; or the ledger lacks the line with which it was written,
                being missing, rolled back behind it, or that of another run.
        """
        if not self.checkpoint.exists():
            return None
        checkpoint = Checkpoint.read(self.checkpoint)
        head = checkpoint.ledger
        if head is not None and not read_chain(self.ledger).has(head):
            raise ResumeError(
                f"{self.ledger} does not have line {head.lines} with which {self.checkpoint.name} "
                "was written: the ledger is missing, was rolled back or belongs to another run, "
                "and charges of releases that were made are missing. Restore the ledger, or start "
                "a new run in another folder."
            )
        return checkpoint

    def baseline(self, name: str) -> RunFolder:
        """Returns the folder of a baseline's run; private, because it is not released."""
        return RunFolder(self.private / "baselines" / name)

    def write_history(self, history: list[dict[str, Any]]) -> None:
        """Writes metrics.csv: the evaluations so far."""
        write_bytes(self.private / "metrics.csv", csv_bytes(history))

    def write_lists(self) -> None:
        """Writes the lists of the files of a finished run with their hashes.

        ``private/manifest.json`` has those of ``private/``, the ledger included;
        ``public/manifest.json`` has those of ``public/`` and the hash of the private list. So the
        hash of the public list, :attr:`seal`, stands for all files.

        The private list has a random number of its own: its hash is published, and must not tell
        one guess at the private files from another.
        """
        chain = read_chain(self.ledger)
        run = None
        if chain.digests:
            run = chain.digests[0]
        for part in (self.private, self.public):
            # A list cannot have its own hash, and the heads of a ledger change.
            unlisted = {part / MANIFEST, part / CLAIM, *part.glob("*.head")}
            names = sorted(
                path.name for path in part.iterdir() if path.is_file() and path not in unlisted
            )
            files = {name: sha256(part / name) for name in names}
            private = part == self.private
            if private:
                more = {"salt": secrets.token_hex(32)}
            else:
                more = {"private": sha256(self.private / MANIFEST)}
            write_json(part / MANIFEST, {"run": run, **more, "files": files})

    @property
    def seal(self) -> str:
        """Returns the hash of ``public/manifest.json``, 64 hexadecimal digits, to be published when
        a run has ended."""
        return sha256(self.public / MANIFEST)


def sha256(path: Path) -> str:
    """Returns the hash of a file, 64 hexadecimal digits."""
    return hashlib.sha256(path.read_bytes()).hexdigest()
