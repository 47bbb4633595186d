"""Where the time of a run goes: data, local work, releases, charges, evaluation."""

from __future__ import annotations

import copy
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, fields, is_dataclass, replace
from pathlib import Path
from typing import Any

from .._check import positive_int
from ..algorithms.base import State
from ..privacy import Channel
from ..schedules import Block
from .folder import RunFolder
from .loop import Loop, Measured
from .sources import Source
from .trainer import Trainer

PARTS = {
    "opening": "calibrating the noise, opening the ledger",
    "schedule": "who acts when, cohorts",
    "charges": "the ledger; for owners who act one at a time also drawing the noise",
    "data": "gathering examples",
    "local work": "what clients and server compute",
    "release": "clipping, summing, noise",
    "evaluation": "metrics of all clients",
    "checkpoint": "writing the state",
    "other": "building the problem, progress, the result",
}
"""What is told apart, with what belongs to it."""


class Stopwatch:
    """Seconds by part; a part inside another is counted for itself alone. Other threads than the first are not."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = defaultdict(float)
        self._open: list[str] = []
        self._since = 0.0
        self._thread = threading.get_ident()

    @contextmanager
    def __call__(self, part: str) -> Iterator[None]:
        if threading.get_ident() != self._thread:
            yield
            return
        self._turn()
        self._open.append(part)
        try:
            yield
        finally:
            self._turn()
            self._open.pop()

    def timed(self, part: str, function: Callable[..., Any]) -> Callable[..., Any]:
        """``function``, its time counted as ``part``; functions that it is given count as local work."""

        def run(*args: Any, **options: Any) -> Any:
            inside = [self._message(one) for one in args] if part == "release" else args
            with self(part):
                return function(*inside, **options)

        return run

    def timed_each(self, part: str, function: Callable[..., Iterator[Any]]) -> Callable[..., Iterator[Any]]:
        """As :meth:`timed` of a function that yields: the time of everything that it yields."""

        def run(*args: Any) -> Iterator[Any]:
            following = self.timed(part, function(*map(self._message, args)).__next__)
            while True:
                try:
                    one = following()
                except StopIteration:
                    return
                yield one

        return run

    def _message(self, given: Any) -> Any:
        """A message of clients whose functions count as local work."""
        if not is_dataclass(given) or isinstance(given, type):
            return given
        functions = {one.name: getattr(given, one.name) for one in fields(given)}
        timed = {name: self.timed("local work", one) for name, one in functions.items() if callable(one)}
        return replace(given, **timed)

    def _turn(self) -> None:
        now = time.perf_counter()
        if self._open:
            self.seconds[self._open[-1]] += now - self._since
        self._since = now


@dataclass(frozen=True)
class Profile:
    """Seconds of the parts of a run.

    Attributes:
        seconds: by part, in the order of :data:`PARTS`; they add up to ``total``.
        rounds: how many rounds, or activations, were made.
        step: what they are called.
    """

    seconds: dict[str, float]
    rounds: int
    step: str

    @property
    def total(self) -> float:
        """Seconds of everything."""
        return sum(self.seconds.values())

    def text(self) -> str:
        """A table: seconds, share, and milliseconds a round."""
        lines = [f"{'part':<12}{'seconds':>9}{'share':>8}{f'ms/{self.step}':>11}  what"]
        for part, seconds in self.seconds.items():
            each = 1000 * seconds / max(1, self.rounds)
            lines.append(f"{part:<12}{seconds:>9.3f}{seconds / self.total:>8.1%}{each:>11.3f}  {PARTS[part]}")
        return "\n".join([*lines, f"{'total':<12}{self.total:>9.3f}  {self.rounds:,} {self.step}s"])


def profile(trainer: Trainer, *, rounds: int = 20, folder: Path | None = None) -> Profile:
    """Time a short run of ``trainer``.

    Args:
        trainer: its baselines, callbacks and folder are not used.
        rounds: rounds, or activations, at most those of the run. The noise is that of a run of this length;
            evaluations come as often as in the run, and once at the end.
        folder: an empty folder for ledger and checkpoints; None keeps both in memory.

    Raises:
        ConfigError: fewer than 1 round.
    """
    positive_int("profile", rounds=rounds)
    watch = Stopwatch()
    data, algorithm = copy.copy(trainer.data), copy.copy(trainer.algorithm)
    object.__setattr__(data, "gather", watch.timed("data", data.gather))
    object.__setattr__(algorithm, "step", watch.timed("local work", algorithm.step))
    given = {one.name: getattr(trainer, one.name) for one in fields(Trainer)}
    given |= {"data": data, "algorithm": algorithm, "rounds": min(rounds, trainer.rounds), "folder": folder}
    given |= {"baselines": (), "callbacks": (), "progress": False}
    given["eval_every"] = trainer.eval_every or max(1, trainer.rounds // 20)
    timed = _Timed(**given, watch=watch)
    with watch("other"):
        result = timed._run(None if folder is None else RunFolder(folder), False)
    seconds = {part: watch.seconds[part] for part in PARTS if watch.seconds[part] > 0}
    return Profile(seconds, int(result.final["round"]), result.step)


@dataclass(frozen=True, kw_only=True)
class _Timed(Trainer):
    watch: Stopwatch = field(default_factory=Stopwatch)

    def open(self, *args: Any, **options: Any) -> tuple[Channel, Source]:
        with self.watch("opening"):
            channel, source = super().open(*args, **options)
        for name in ("release", "release_gradients"):
            setattr(channel, name, self.watch.timed("release", getattr(channel, name)))
        channel.answers = self.watch.timed_each("release", channel.answers)  # type: ignore[method-assign]
        return channel, _TimedSource(source, self.watch)  # type: ignore[return-value]

    def loop(self, *args: Any) -> Loop:
        made = _TimedLoop(*args)
        made.watch = self.watch
        return made


@dataclass(frozen=True)
class _TimedSource:
    source: Source
    watch: Stopwatch

    def __getattr__(self, name: str) -> Any:
        return getattr(self.source, name)

    def blocks(self, start: int) -> Iterator[Block]:
        blocks = self.source.blocks(start)
        while True:
            with self.watch("schedule"):
                block = next(blocks, None)
            if block is None:
                return
            yield block

    def begin(self, block: Block) -> None:
        with self.watch("charges"):
            self.source.begin(block)


@dataclass
class _TimedLoop(Loop):
    watch: Stopwatch = field(default_factory=Stopwatch)

    def evaluate(self, state: State, step: int) -> Measured:
        with self.watch("evaluation"):
            return super().evaluate(state, step)

    def checkpoint(self, state: State, step: int) -> None:
        with self.watch("checkpoint"):
            super().checkpoint(state, step)
