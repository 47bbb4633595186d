"""Runs that an audit repeats with one thing changed, and its notes of them.

A run is that of the configuration, by its own loop, ended after some rounds. A change may be of
the data, the secret coins, or the releases, which are then forced to those that another run has
recorded.
"""

from __future__ import annotations

import hashlib
import json
import math
from dataclasses import dataclass, field, replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np
import torch
from torch import Tensor

from ..algorithms.base import State
from ..data import FederatedDataset
from ..errors import PrivacyError, TrainingError
from ..privacy import ActivationChannel, BoundSampler, NoiseSource, RoundChannel, SeededSource
from ..privacy.channel_report import privacy_report, signal_to_noise
from ..privacy.records import GRADIENT
from ..schedules import Block
from ..trainer.engine import Engine
from ..trainer.fit import run_in_claimed_folder
from ..trainer.folder import MANIFEST, RunFolder
from ..trainer.run_channel import open_run
from ..trainer.tensor_files import read_tensors
from ..trainer.trainer import Trainer
from .recording import RecordedActivations, RecordedRounds, Recording
from .samples import coordinates

if TYPE_CHECKING:
    from ..trainer.run_plan import RunPlan

RELEASED = "releases.safetensors"
AGAIN = 2
_EVALUATED = 32  # clients, at most, whose models are scored and finetuned

Marks = dict[tuple[int, str, int], str]
"""(number of the step or of the block, -1 before the first; name; client, -1 of public values) ->
hash."""


@dataclass
class Notes:
    """The hashes of the values that a run computed, and its published files.

    Attributes:
        public: the public state, the shared model and the clip norms, after every block.
        store: the tensors that clients keep, after every block.
        messages: rows that are handed to releases, and the personal models at the end.
        first: the clients of the first block.
        drawn: places of the records of each local step, by (round, number of the step, client),
            int64 (k,).
        releases: (step, name, value) of all that was released.
        rows: of the clients (k,), and (k, D), that were handed to releases in the first two steps,
            by (step, name).
        frozen: names of the parameters that are frozen, and whether the run changed them.
        published: files of ``public/`` and facts of the report, by name, but for the released
            values.
        values: names of the values that are published as released, and whether they were released.
    """

    public: Marks = field(default_factory=dict)
    store: Marks = field(default_factory=dict)
    messages: Marks = field(default_factory=dict)
    first: tuple[int, ...] = ()
    drawn: dict[tuple[int, int, int], Tensor] = field(default_factory=dict)
    releases: list[tuple[int, str, Tensor]] = field(default_factory=list)
    rows: dict[tuple[int, str], list[tuple[Tensor, Tensor]]] = field(default_factory=dict)
    frozen: dict[str, bool] = field(default_factory=dict)
    published: dict[str, bytes] = field(default_factory=dict)
    values: dict[str, bool] = field(default_factory=dict)


def watched(
    trainer: Trainer,
    rounds: int,
    *,
    data: FederatedDataset | None = None,
    coins: int | None = None,
    replay: Recording | None = None,
    publish: bool = False,
    tapped: bool = True,
) -> Notes:
    """Runs a configuration for some rounds, and notes the numbers that it computes.

    Args:
        trainer: the configuration, on the CPU.
        rounds: rounds, or activations, that are run.
        data: in place of the trainer's.
        coins: seed of the secret coins, in place of the trainer's.
        replay: values to release in place of those of the data.
        publish: True if files are written and noted.
        tapped: True if the inputs of releases are recorded, which no other run does.
    """
    # scores are no subject of the audit and would take most of its time
    few = min(_EVALUATED, trainer.evaluate_clients or _EVALUATED)
    trainer = replace(trainer, data=trainer.data if data is None else data, evaluate_clients=few)
    seed = trainer.seed if coins is None else coins
    public = _source(trainer, trainer.seed)
    secret = _source(trainer, seed)
    engine = _Watching(coins=public, secret=secret, stop=rounds, replay=replay, tapped=tapped)
    notes = engine.notes
    with TemporaryDirectory(prefix="fedmtl-audit-") as name:
        folder = RunFolder(Path(name) / "run")
        try:
            result = run_in_claimed_folder(
                replace(trainer, folder=folder.root if publish else None), False, engine
            )
            ending = result.stopped
            if trainer.finetune is not None:
                _note(
                    notes.messages, rounds, "the finetuned model", engine.evaluated, result.personal
                )
        except (TrainingError, PrivacyError) as error:
            # a run that is not forced has no reason to be refused, so the audit itself has failed
            if isinstance(error, PrivacyError) and replay is None:
                raise
            ending = str(error)  # such as that of a run which releases more than the recording has
        if publish:
            _note_files(notes, folder, engine.channel)
            notes.published["the end"] = ending.encode()
    return notes


class _SecureSeed(SeededSource):
    """Seeded coins on the path of secret ones, which rounds to a grid."""

    name: ClassVar[str] = "secure"


def _source(trainer: Trainer, seed: int) -> NoiseSource:
    secure = trainer.privacy is not None and trainer.privacy.source == "secure"
    # the path of secret coins is the one to be audited, but two runs have to draw the same
    return (_SecureSeed if secure else SeededSource)(seed)


@dataclass(kw_only=True)
class _Watching(Engine):
    """Computes a run in this process, ends it after some rounds, and notes its releases, states and
    messages.

    Attributes:
        secret: the source of the secret coins: of the records that take part in a release; else of
            cohorts, unless participations are charged.
        replay, tapped: see :func:`watched`.
        notes: of the run.
        last_block: its number, from 0; -1 before the first one.
    """

    secret: NoiseSource
    replay: Recording | None
    tapped: bool
    notes: Notes = field(default_factory=Notes)
    last_block: int = -1

    def open(self, plan: RunPlan, resume: bool) -> RoundChannel | ActivationChannel:
        options: dict[str, Any] = {
            "ledger": plan.ledger,
            "resume": resume,
            "coins": self.coins,
            "channel_class": _kind(plan.settings),
        }
        channel = open_run(plan.settings, plan.problem, plan.fingerprint, **options)
        assert isinstance(channel, RecordedRounds | RecordedActivations)
        self.channel = channel
        # all clients, so that the models of those who are not scored are compared, too
        self.evaluated = plan.clients
        self._plan = plan
        channel.record = self.notes.releases
        if self.tapped:
            channel.tap = self._tap
        if self.replay is not None:
            channel.replay(self.replay)
        # only coins whose effect the analysis hides are drawn anew; cohorts are public if
        # participations are charged
        if channel.records is not None:
            channel.records.coins = [self.secret]
        elif not channel.accountant.by_client:
            channel.sources = [self.secret]
        return channel

    def init(self, plan: RunPlan, channel: RoundChannel | ActivationChannel) -> State:
        self._frozen = {
            k: v.clone() for k, v in plan.problem.layout.frozen(plan.problem.module).items()
        }
        return self._noted(super().init(plan, channel))

    def step(
        self, plan: RunPlan, channel: RoundChannel | ActivationChannel, state: State, block: Block
    ) -> State:
        state = super().step(plan, channel, state, block)
        self.last_block += 1
        self.notes.first = self.notes.first or tuple(
            k for k in block.clients.flatten().tolist() if k >= 0
        )
        return self._noted(state)

    def models(
        self, plan: RunPlan, channel: RoundChannel | ActivationChannel, state: State, done: int
    ) -> tuple[Tensor, dict[str, Tensor]]:
        now = plan.problem.layout.frozen(plan.problem.module)
        everybody = torch.arange(plan.problem.clients)
        self.notes.frozen = {
            name: not torch.equal(value, now[name]) for name, value in self._frozen.items()
        }
        models = plan.algorithm.personalize(plan.problem, state, everybody)
        _note(self.notes.messages, plan.stop, "the personal model", everybody, models)
        return super().models(plan, channel, state, done)

    def _tap(self, step: int, name: str, clients: Tensor, rows: Tensor) -> None:
        _note(self.notes.messages, step, f"the row of {name}", clients, rows)
        # rows are kept for a few steps only: those of all rounds may not fit in memory
        records = self.channel.records
        of_rows = records is None or records.in_secure_sum
        if of_rows and self.replay is None and step < AGAIN:
            self.notes.rows.setdefault((step, name), []).append((clients, rows))
        number = name.removeprefix(f"{GRADIENT}/")
        if (
            isinstance(self.channel, RoundChannel)
            and self.channel.local is not None
            and number != name
        ):
            # drawn again from their keys, as no one but the channel knows the batch
            index, mask = self.channel.local.batch(clients)
            places = self._plan.problem.data.train.offsets[clients][:, None] + index
            for client, own, drawn in zip(clients.tolist(), places, mask, strict=True):
                self.notes.drawn[step, int(number), client] = own[drawn]

    def _noted(self, state: State) -> State:
        """Notes a state, and returns it."""
        shared = self._plan.algorithm.shared(state)
        everybody = torch.arange(self._plan.problem.clients)
        public = state.public | ({} if shared is None else {"shared model": shared})
        if isinstance(self.channel, RoundChannel):
            public = public | {
                f"clip norm of {name}": norm for name, norm in self.channel.norms().items()
            }
        for name, value in public.items():
            _note(self.notes.public, self.last_block, name, torch.tensor([-1]), value[None])
        for name, rows in state.private.gather_all(everybody).items():
            _note(self.notes.store, self.last_block, f"{name!r} in the store", everybody, rows)
        return state


def _kind(trainer: Trainer) -> type[RecordedRounds | RecordedActivations]:
    if isinstance(trainer.bound_schedule, BoundSampler):
        return RecordedRounds
    return RecordedActivations


def _note_files(notes: Notes, folder: RunFolder, channel: Any) -> None:
    """Notes the files of ``public/``, the report, and which of the values published as released
    were released."""
    files = {
        path.name: path.read_bytes() for path in folder.public.glob("*") if path.name != MANIFEST
    }
    if files.pop(RELEASED, None) is not None:
        values = read_tensors(folder.public / RELEASED)[0]
    else:
        values = {}
    facts = {
        f"{key} in privacy.json": value
        for key, value in json.loads(files.pop("privacy.json", b"{}")).items()
    }
    facts["the signal to noise"] = signal_to_noise(channel)
    facts["the report"] = privacy_report(channel).text()
    # the identity of a run is random on purpose, and the head follows from it
    random = {"run in privacy.json", "ledger_head in privacy.json"}
    notes.published = files | {
        key: repr(value).encode() for key, value in facts.items() if key not in random
    }
    if isinstance(channel, RoundChannel):
        forms = {plan.name: plan.form for plan in channel.plans}
    else:
        forms = {}
    for name, value in values.items():
        each = (made.numpy() for _, key, made in notes.releases if key.split("/")[0] == name)
        released = (coordinates(row, forms.get(name, "vector")).reshape(-1) for row in each)
        notes.values[name] = any(
            row.shape == value.shape and np.allclose(row, value.numpy(), rtol=1e-12, atol=0)
            for row in released
        )


def released_again(trainer: Trainer, notes: Notes) -> tuple[Recording, int]:
    """Returns the releases that another channel makes of the rows of a run, and the number of
    releases with rows of clients that were not drawn."""
    coins = _source(trainer, trainer.seed)
    other = open_run(trainer, trainer.problem(), coins=coins, channel_class=RecordedRounds)
    strangers = 0
    assert isinstance(other, RecordedRounds)
    other.record = again = list[tuple[int, str, Tensor]]()
    other.handed = True
    for step in sorted({step for step, _, _ in notes.releases if step < AGAIN}):
        cohort = other.draw(step)
        other.begin(step, cohort)
        for plan in other.plans:
            parts = notes.rows.get(
                (step, plan.name), [(cohort[:0], torch.zeros(0, plan.dimension))]
            )
            clients, rows = (torch.cat(each) for each in zip(*parts, strict=True))
            # a row of a client that was not drawn would be charged to nobody
            strangers += not set(clients.tolist()) <= set(cohort.tolist())
            other.release(plan.name, rows, clients)
    return again, strangers


def differing(first: Marks, other: Marks) -> list[tuple[int, str, int]]:
    """Returns the differences between two runs, values of the first one first."""
    return sorted(key for key in first.keys() | other.keys() if first.get(key) != other.get(key))


def when(block: int) -> str:
    """Returns the moment after a block in words; before the first one it is -1."""
    if block < 0:
        return "at the start"
    return f"after round {block + 1}"


def row_marks(rows: Tensor) -> list[str]:
    """Returns a hash of each of ``rows`` (k, ...), of its dtype and its shape."""
    flat = (
        rows.detach()
        .cpu()
        .reshape(len(rows), math.prod(rows.shape[1:]))
        .contiguous()
        .view(torch.uint8)
    )
    # so that equal bytes of another type or shape are another value
    about = f"{rows.dtype} {tuple(rows.shape[1:])} ".encode()
    return [
        hashlib.blake2b(about + row.tobytes(), digest_size=8).hexdigest() for row in flat.numpy()
    ]


def _note(marks: Marks, number: int, name: str, clients: Tensor, rows: Tensor) -> None:
    """Adds ``rows`` (k, ...) of ``clients`` (k,)."""
    for client, mark in zip(clients.tolist(), row_marks(rows), strict=True):
        marks[number, name, client] = mark
