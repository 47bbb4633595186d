"""The check that what a run publishes is a function of its releases: every file of ``public/`` and the report.

A run is made in a folder and its releases are recorded. It is made again with every client's examples replaced, the
secret coins drawn anew, and the releases forced to the recording. The files of ``public/``, what the privacy report
says, how loud the noise is said to be, and how the run ends must be the same, but for what has the random number of the
run in it. Nothing but the released values themselves is left out; these are compared with the recording.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, fields, replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, ClassVar

import numpy as np

from ...errors import TrainingError
from ...privacy import RecordPrivacy, SeededSource
from ...privacy.audit import Finding
from ...privacy.audit.findings import exact
from ...privacy.audit.play import coordinates
from ...privacy.channel import Recording
from ...privacy.release import Form
from ...random import derive_key
from ..engine import Source
from ..folder import MANIFEST, RunFolder, read_tensors
from ..trainer import Trainer
from .others import replaced_data
from .rerun import Releases

RELEASED = "releases.safetensors"
_FINETUNED = 32  # clients, at most


def publication(trainer: Trainer, *, seed: int, rounds: int = 2) -> list[Finding]:
    """Compare what a run publishes with what it publishes on other data, with the releases forced; nothing without
    noise, where nothing is published.

    Args:
        trainer: the configuration, on the CPU.
        seed: of the secret coins, and of the other data.
        rounds: rounds, or activations, at most.
    """
    if trainer.privacy is None or trainer.privacy.noiseless:
        return []
    data = replaced_data(trainer.data, seed, counts=not isinstance(trainer.privacy, RecordPrivacy))
    data = replace(data, notes=trainer.data.notes, verify=False)
    run = replace(trainer, rounds=min(rounds, trainer.rounds), baselines=(), callbacks=(), progress=False)
    if run.finetune is not None:  # of as many clients as are evaluated
        run = replace(run, evaluate_clients=min(_FINETUNED, run.evaluate_clients or _FINETUNED))
    first = _published(run, derive_key(seed, "audit/published") >> 1)
    again = _published(replace(run, data=data), derive_key(seed, "audit/coins") >> 1, replay=first.recording)
    files, others = first.files, again.files
    differing = sorted(name for name in files | others if files.get(name) != others.get(name))
    detail = f"of {len(files)} files and facts that differ, data replaced, coins drawn anew and releases forced"
    if differing:
        detail = f"depends on private data or coins otherwise than through the releases: {', '.join(differing[:3])}"
    findings = [exact("transcript: published files", len(differing), detail)]
    if first.values:
        strange = [name for name, value in first.values.items() if not first.has(name, value)]
        detail = f"of {len(first.values)} values in public/{RELEASED} are none that was released"
        findings.append(exact("transcript: published values", len(strange), detail))
    return findings


class _SecureSeed(SeededSource):
    """Seeded coins on the path of secret ones, which rounds to a grid."""

    name: ClassVar[str] = "secure"


@dataclass(frozen=True)
class _Published:
    """What a run publishes.

    Attributes:
        files: and facts, by name.
        values: that are published as released, by name.
        forms: what is released of rows, by name.
        recording: of all that was released.
    """

    files: dict[str, bytes]
    values: dict[str, np.ndarray]
    forms: dict[str, Form]
    recording: Releases

    def has(self, name: str, value: np.ndarray) -> bool:
        """Return whether ``value`` was released under ``name``."""
        each = (tensor.numpy() for _, key, tensor in self.recording if key.split("/")[0] == name)
        made = (coordinates(row, self.forms.get(name, "vector")).reshape(-1) for row in each)
        return any(row.shape == value.shape and np.allclose(row, value, rtol=1e-12, atol=0) for row in made)


def _published(trainer: Trainer, coins: int, replay: Recording | None = None) -> _Published:
    """Run a configuration with secret coins of a seed, and the releases forced to a recording, if there is one."""
    channels, recording = list[Any](), Releases()

    class Recorded(Trainer):
        def open(self, *args: Any, **options: Any) -> tuple[Any, Source]:
            channel, source = super().open(*args, **options | {"replay": replay})
            channels[:], channel.record = [channel], recording
            draws = getattr(channel, "draws", None)  # of records
            secret = not channel.account.by_client or draws is not None  # else who takes part is charged for it
            seed = coins if secret else self.seed
            drawn = _SecureSeed(seed) if channel.source.name == "secure" else SeededSource(seed)
            (channel if draws is None else draws).sources = [drawn]
            return channel, source

    with TemporaryDirectory(prefix="fedmtl-audit-") as name:
        folder, ending = RunFolder(Path(name) / "run"), "as planned"
        settings = {part.name: getattr(trainer, part.name) for part in fields(Trainer)} | {"folder": folder.root}
        try:
            Recorded(**settings).fit()
        except TrainingError as error:
            ending = str(error)
        files = {path.name: path.read_bytes() for path in folder.public.iterdir() if path.name != MANIFEST}
        tensors = read_tensors(folder.public / RELEASED)[0] if files.pop(RELEASED, None) is not None else {}
    (channel,) = channels
    report = json.loads(files.pop("privacy.json"))
    facts = {f"{key} in privacy.json": value for key, value in report.items() if key not in ("run", "ledger_head")}
    facts |= {"the signal to noise": channel.snr(), "the end": ending, "the report": channel.report.text()}
    return _Published(
        files | {key: repr(value).encode() for key, value in facts.items()},
        {key: value.numpy() for key, value in tensors.items()},
        {plan.name: plan.form for plan in getattr(channel, "plans", ())},
        recording,
    )
