"""Runs that an audit makes again on other data, with the releases forced to a recording, and what it notes of them."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Generator
from contextlib import closing
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from ...algorithms.base import Problem, State
from ...data import FederatedDataset
from ...errors import BudgetExhausted
from ...local import operation_threads
from ...privacy import RecordPrivacy, SeededSource
from ...privacy.channel import Recording, Tap
from ..personalize import rows_at
from ..trainer import Trainer

_FINETUNED = 32  # clients whose finetuned models are compared: each is a function of its own records

Releases = list[tuple[int, str, Tensor]]
"""A recording: (step, name, what was released)."""


def seeded(trainer: Trainer) -> Trainer:
    """Return the same configuration with coins of its seed, which all its runs share."""
    return trainer if trainer.privacy is None else replace(trainer, privacy=replace(trainer.privacy, source="seeded"))


def states(
    trainer: Trainer,
    data: FederatedDataset,
    rounds: int,
    *,
    record: Releases | None = None,
    replay: Recording | None = None,
    tap: Tap | None = None,
    opened: Callable[[Any], None] | None = None,
    finish: Callable[[Problem, State], None] | None = None,
) -> Generator[tuple[State, Any], None, None]:
    """Yield the states of a run of the trainer's algorithm on ``data``: the first one, then that after every block.

    Under record-level privacy the messages of clients are functions of the released gradients, and only these are
    forced.

    Args:
        trainer: the configuration.
        data: of the clients.
        rounds: rounds, or activations, that are run.
        record: every release is appended.
        replay: what is released in place of what the data give.
        tap: is called with all that is handed to a release.
        opened: is called with the channel before anything happens.
        finish: is called with the problem and the last state.

    Yields:
        The state, which the next block may change in place, and the block, None before the first.
    """
    problem, algorithm = trainer.problem(data=data, device="cpu"), trainer.algorithm
    with closing(problem.executor), operation_threads(problem.clients * problem.dimension):
        channel, source = trainer.open(problem, "audit", replay=replay)
        if opened is not None:
            opened(channel)
        channel.record, channel.tap = record, tap
        state = algorithm.init(problem)
        yield state, None
        with closing(channel):
            channel.start(0)
            try:
                for block in source.blocks(0):
                    source.begin(block)
                    state = algorithm.step(problem, state, block, channel)
                    yield state, block
                    if block.step + 1 >= rounds:
                        break
            except BudgetExhausted:
                pass
        if finish is not None:
            finish(problem, state)


Marks = dict[tuple[int, str, int], str]
"""(number of the event, -1 before the first; name; client, -1 of what is public) -> hash."""


@dataclass
class Watch:
    """Hashes of what a run computes.

    Attributes:
        public: the public state, the shared model and the clip norms, after every event.
        store: the tensors that clients keep, after every event; of a run under client-level privacy only with messages.
        messages: rows that are handed to releases, and the personal models at the end.
        first: the clients of the first event.
        releases: all that was released.
    """

    public: Marks = field(default_factory=dict)
    store: Marks = field(default_factory=dict)
    messages: Marks = field(default_factory=dict)
    first: tuple[int, ...] = ()
    releases: Releases = field(default_factory=list)


def watched(
    trainer: Trainer,
    data: FederatedDataset,
    rounds: int,
    *,
    replay: Recording | None = None,
    coins: int | None = None,
    messages: bool = False,
) -> Watch:
    """Run the trainer's algorithm on ``data`` and note its hashes.

    Args:
        trainer, data, rounds, replay: as for :func:`states`.
        coins: seed of the secret coins, in place of the run's.
        messages: whether rows, personal models and the tensors that clients keep are noted.
    """
    watch, everybody, channels, algorithm = Watch(), torch.arange(len(data)), list[Any](), trainer.algorithm

    def opened(channel: Any) -> None:
        channels.append(channel)
        if coins is not None:  # cohorts, or where these are public the records that take part
            (getattr(channel, "draws", None) or channel).sources = [SeededSource(coins)]

    def tap(step: int, name: str, clients: Tensor, rows: Tensor) -> None:
        _note(watch.messages, step, f"the row of {name}", clients, rows)

    def finish(problem: Problem, state: State) -> None:
        models = algorithm.personalize(problem, state, everybody)
        _note(watch.messages, rounds, "the personal model", everybody, models)
        if trainer.finetune is not None:
            some = everybody[:_FINETUNED]
            start = rows_at(trainer.finetune.origin(algorithm.shared(state), models)[1], some)
            _note(watch.messages, rounds, "the finetuned model", some, trainer.finetune.train(problem, start, some))

    hooks: dict[str, Any] = {"replay": replay} if replay is not None else {"record": watch.releases}
    hooks |= {"tap": tap, "finish": finish} if messages else {}
    run = states(trainer, data, rounds, opened=opened, **hooks)
    for when, (state, block) in enumerate(run, start=-1):
        if block is not None and not watch.first:
            watch.first = tuple(k for k in block.clients.flatten().tolist() if k >= 0)
        shared = algorithm.shared(state)
        public = state.public | ({} if shared is None else {"shared model": shared})
        if channels[0].gradients is None:
            public = public | {f"clip norm of {name}": norm for name, norm in channels[0].norms().items()}
        for name, value in public.items():
            _note(watch.public, when, name, torch.tensor([-1]), value[None])
        tensors = state.private.gather_all(everybody) if messages or isinstance(trainer.privacy, RecordPrivacy) else {}
        for name, rows in tensors.items():
            _note(watch.store, when, f"{name!r} in the store", everybody, rows)
    return watch


def differing(first: Marks, other: Marks) -> list[tuple[int, str, int]]:
    """Return what is not the same in two runs, the first first."""
    return sorted(key for key in first.keys() | other.keys() if first.get(key) != other.get(key))


def when(event: int) -> str:
    """Return an event in words."""
    return "at the start" if event < 0 else f"after round {event + 1}"


def row_marks(rows: Tensor) -> list[str]:
    """Return a hash of each of ``rows`` (k, ...), of its dtype and its shape."""
    flat = rows.detach().cpu().reshape(len(rows), math.prod(rows.shape[1:])).contiguous().view(torch.uint8)
    about = f"{rows.dtype} {tuple(rows.shape[1:])} ".encode()
    return [hashlib.blake2b(about + row.tobytes(), digest_size=8).hexdigest() for row in flat.numpy()]


def _note(marks: Marks, event: int, name: str, clients: Tensor, rows: Tensor) -> None:
    """Add ``rows`` (k, ...) of ``clients`` (k,)."""
    for client, mark in zip(clients.tolist(), row_marks(rows), strict=True):
        marks[event, name, client] = mark
