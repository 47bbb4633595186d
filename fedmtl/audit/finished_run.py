"""The files of a finished run as a verification reads them: each once, and only when a check needs
it."""

from __future__ import annotations

import csv
import io
from collections.abc import Mapping
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from ..errors import DataError, FedmtlError
from ..privacy.chain import Chain, parse
from ..privacy.ledger_file import VERSION
from ..trainer.checkpoint import Checkpoint
from ..trainer.folder import MANIFEST, RunFolder
from ..trainer.untrusted_files import UntrustedFiles
from .lines import Reading
from .restated import Beside, Restated, restated


class NotCovered(Exception):
    """The folder lacks a file or value that a check needs; the message is the detail of its
    line."""


Answer = tuple[list[str], str] | None
"""The faults, and the sentence that is confirmed if there are none; None if the check does not
apply to the run."""


def ledger_header(folder: RunFolder) -> Mapping[str, Any]:
    """Returns the header of the ledger in a folder; nothing of one that is missing or cannot be
    read, such as a pipe in its place."""
    try:
        lines = parse(UntrustedFiles(folder.root).content(folder.ledger), folder.ledger).lines
    except FedmtlError:
        return {}
    if not lines:
        return {}
    return lines[0]


class FinishedRun:
    """The files of a finished run.

    Attributes:
        folder: of the run.
        report: of ``public/privacy.json``.
        result: of ``private/result.json``; empty without the private part.
        files: reads the files of the folder, each of them once.
        chain: the lines of the ledger; None if it is missing or does not hold, with the reason
            in ``broken``.

    Raises:
        DataError: see :func:`verify`.
    """

    def __init__(self, folder: RunFolder) -> None:
        # the private folder of a run holds parts that look like runs
        whole = next(
            (p.parent for p in folder.root.absolute().parents if p.name == "private"), None
        )
        if whole is not None and RunFolder(whole).started:
            raise DataError(f"{folder.root} is a part of the run in {whole}; fedmtl verify {whole}")
        if folder.started and not (folder.private / "result.json").is_file():
            if "client" in ledger_header(folder):
                raise DataError(
                    f"{folder.root} is the folder of a node, whose account has no certificate: "
                    f"the charges are in {folder.ledger}, and the node's log says what they cost."
                )
            raise DataError(f"{folder.root} is unfinished; fedmtl resume {folder.root}")
        if not folder.public.is_dir():
            raise DataError(f"{folder.root} is not the folder of a run: it has no public/.")
        self.folder = folder
        self.files = UntrustedFiles(folder.root)
        self.report = self.files.json(folder.public / "privacy.json")
        self.private = folder.private.is_dir()
        if self.private:
            self.result = self.files.json(folder.private / "result.json")
        else:
            self.result = {}
        self.chain: Chain | None = None
        self.broken = ""
        if folder.ledger.exists():
            self._read_ledger(folder.ledger)

    def _read_ledger(self, path: Path) -> None:
        """Reads the chain, or why there is none."""
        try:
            content = self.files.content(path)
            chain = parse(content, path, VERSION)
        except Exception as error:  # without the advice on a resume
            self.broken = str(error).replace(str(path), path.name).split(". ")[0]
            return
        # a write that was interrupted; no charge of a whole line is lost
        if chain.size < len(content):
            self.broken = "the last line is torn; fedmtl resume drops it"
        elif not chain.lines:
            self.broken = "the ledger has no line"
        else:
            self.chain = chain

    @cached_property
    def seal(self) -> str | None:
        """Returns the hash of the list of public files; None if it cannot be read."""
        try:
            return self.files.digest(self.folder.public / MANIFEST)
        except DataError:
            return None

    @property
    def header(self) -> Mapping[str, Any] | None:
        """Returns the first line of the ledger; None without a chain."""
        if self.chain is None:
            return None
        return self.chain.lines[0]

    @property
    def account(self) -> Mapping[str, Any] | None:
        """Returns the header of a ledger that has the settings of the run; None of a search, and
        without one."""
        if self.header is None or self.header.get("privacy") is None:
            return None
        return self.header

    @cached_property
    def ledger(self) -> Reading:
        """Returns the contents of the ledger."""
        assert self.chain is not None
        return Reading(self.chain.lines)

    @property
    def secret(self) -> bool:
        """Returns True for a search, whose runs have ledgers of their own."""
        return self.report.get("search") is not None

    @cached_property
    def restated(self) -> Restated:
        """Returns the report derived from the ledger."""
        interval = self.report.get("interval")
        finetuned = None
        if self.private:
            finetuned = self.result.get("configuration", {}).get("finetune") is not None
        counts = self.counts
        # canaries are clients of the ledger that have no line in clients.csv
        if counts is not None and interval is not None and interval["unit"] == "client":
            counts = None
        beside = Beside(
            self.folder.ledger.name, self.norms, counts, finetuned, interval is not None
        )
        return restated(self.ledger, beside)

    @property
    def adaptive(self) -> bool:
        """Returns True if clip norms follow a quantile."""
        return self.header is not None and isinstance(self.header["privacy"]["clip_norm"], dict)

    @cached_property
    def norms(self) -> dict[str, float]:
        """Returns the clip norms of the last round by release, if these adapt and there is a
        checkpoint."""
        if not self.adaptive or self.checkpoint is None:
            return {}
        return {name: float(norms[0]) for name, norms in self.checkpoint.channel.items()}

    @cached_property
    def counts(self) -> np.ndarray | None:
        """Returns the numbers of records of the clients, int64 (n,); None without
        ``clients.csv``."""
        path = self.folder.private / "clients.csv"
        if not path.exists():
            return None
        table = csv.DictReader(io.StringIO(self.files.text(path), newline=""))
        return np.array([int(row["train_examples"]) for row in table], dtype=np.int64)

    @cached_property
    def checkpoint(self) -> Checkpoint | None:
        """Returns the checkpoint; None without one."""
        if not self.folder.checkpoint.exists():
            return None
        return Checkpoint.made_of(*self.files.tensors(self.folder.checkpoint))
