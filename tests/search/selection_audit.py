"""The audit of a private search: its repetitions are independent draws of one mechanism, which nothing tells apart.

    findings = audit_search(PrivateSearch(candidates={...}, ...))
    print(table(findings))

The bound of a search (:mod:`fedmtl.privacy.accounting.selection`) holds for repetitions that have one law and for
an output that does not tell which of them it is. Both are checked on the production path:

1. forced coins: every repetition of a candidate is run with the same cohorts and noise, and published as the winner.
   What is published, what is printed, and what clients hand to the releases must be the same, bit for bit;
2. fresh coins: without force, the noise of two repetitions is uncorrelated, and they share neither the noise of a score
   nor a run of cohorts.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from tempfile import TemporaryDirectory
from types import SimpleNamespace
from typing import Any, ClassVar
from unittest.mock import patch

import numpy as np
import torch
from torch import Tensor

from fedmtl.privacy import Channel, NoiseSource, SeededSource
from fedmtl.privacy.audit import Finding
from fedmtl.privacy.audit.findings import exact, skipped, too_large
from fedmtl.search.plan import SearchPlan
from fedmtl.search.search import PrivateSearch, _Search
from fedmtl.trainer.engine import open_run
from fedmtl.trainer.folder import RunFolder

_REPETITIONS, _SCORES, _LEVEL = 3, 20, 1e-8


def audit_search(search: PrivateSearch) -> list[Finding]:
    """Whether anything that a search of short runs publishes could tell which repetition won.

    Returns:
        The findings; a refuted one contradicts the epsilon of the search.
    """
    plan = search.plan()
    return [_forced(search, plan, candidate) for candidate in range(len(search.candidates))] + _fresh(search, plan)


def _forced(settings: PrivateSearch, plan: SearchPlan, candidate: int) -> Finding:
    """Publish every repetition as the winner, with the same coins, and compare digests of all that it shows."""
    digests: list[dict[str, str]] = []
    with TemporaryDirectory() as folder:
        for index in range(_REPETITIONS):
            place, record = RunFolder(Path(folder) / str(index)), _Seen()
            search = _Forced(settings, plan, place)
            with _watched(record):
                run = search._train(index, candidate)
            scores = [search._score(index, candidate, run)] * _REPETITIONS
            result = search._result([candidate] * _REPETITIONS, scores, index, run)
            contents = {path.relative_to(place.public).as_posix(): path.read_bytes() for path in _files(place.public)}
            contents["the printed summary"] = result.summary().replace(str(place.root), "").encode()
            contents["the rows handed to releases"] = b"".join(_bytes(rows) for rows in record.rows)
            digests.append({name: hashlib.blake2b(content).hexdigest() for name, content in contents.items()})
    names = {name for one in digests for name in one}
    differing = sorted(name for name in names if len({one.get(name) for one in digests}) > 1)
    detail = f"of {len(names)} things shown differ between {_REPETITIONS} repetitions with the same coins"
    if differing:
        detail = f"the number of the repetition shows in {', '.join(differing)}"
    return exact(f"selection: forced coins, {search.names[candidate]}", len(differing), detail)


def _fresh(settings: PrivateSearch, plan: SearchPlan) -> list[Finding]:
    """Compare noise, cohorts and scores of repetitions with coins of their own."""
    records = [_Seen(silent=True) for _ in range(_REPETITIONS)]
    for index, one in enumerate(records):
        with _watched(one):
            _Search(settings, plan, None)._train(index, 0)
    noise = np.stack([torch.cat([value.reshape(-1) for value in one.released]).numpy() for one in records])
    size = noise.shape[1]
    pairs = np.abs(np.corrcoef(noise)[~np.eye(_REPETITIONS, dtype=bool)])
    correlation = too_large(
        "selection: fresh noise",
        float(pairs.max()),
        6 / size**0.5,
        f"largest correlation between the noise of {_REPETITIONS} repetitions, {size} numbers each",
    )
    search = _Search(settings, plan, None)
    ids = search.settings._first.data.ids
    even = SimpleNamespace(ids=ids, personal_accuracy=dict.fromkeys(ids, 0.5))
    scores = [search._score(index, 0, even) for index in range(_SCORES)]
    shared = exact(
        "selection: fresh scores",
        _SCORES - len(set(scores)),
        f"of {_SCORES} repetitions have the score noise of another",
    )
    return [correlation, shared, _fresh_cohorts(settings, records)]


def _fresh_cohorts(settings: PrivateSearch, records: list[_Seen]) -> Finding:
    trainer, check = settings._first, "selection: fresh cohorts"
    q = trainer.schedule.bind(len(trainer.data)).probability
    chance = (q * q + (1 - q) ** 2) ** (len(trainer.data) * len(records[0].cohorts))
    if chance > _LEVEL:
        return skipped(check, "two repetitions may well have the same cohorts")
    same = len(records) - len({b"".join(_bytes(ranks) for ranks in one.cohorts) for one in records})
    return exact(check, same, f"of {len(records)} repetitions have the cohorts of another")


class _Forced(_Search):
    """A search whose repetitions all have the same coins."""

    def _coins(self, index: int) -> NoiseSource:
        return _Addressed(0) if self.secure else SeededSource(0)


@dataclass(frozen=True)
class _Addressed(SeededSource):
    """Seeded coins on the path of secret ones, which rounds to a grid."""

    name: ClassVar[str] = "secure"


@dataclass
class _Seen:
    """Records what passes the channel of one run; with ``silent``, rows become zeros, such that a release is its
    noise."""

    silent: bool = False
    rows: list[Tensor] = field(default_factory=list)
    released: list[Tensor] = field(default_factory=list)
    cohorts: list[Tensor] = field(default_factory=list)

    def watch(self, channel: Channel) -> None:
        release, begin = channel.release, channel.begin

        def seen_release(name: str, rows: Tensor, clients: Tensor) -> Tensor:
            self.rows.append(rows.detach().cpu().clone())
            value = release(name, torch.zeros_like(rows) if self.silent else rows, clients)
            self.released.append(value.clone())
            return value

        def seen_begin(step: int, ranks: Tensor) -> None:
            self.cohorts.append(torch.sort(ranks.cpu()).values)
            begin(step, ranks)

        channel.release, channel.begin = seen_release, seen_begin


@contextmanager
def _watched(seen: _Seen) -> Iterator[None]:
    """Record what passes the channels that are opened inside of the block."""

    def opened(*args: Any, **options: Any) -> Channel:
        channel = open_run(*args, **options)
        seen.watch(channel)
        return channel

    with patch("fedmtl.trainer.engine.open_run", opened):
        yield


def _files(folder: Path) -> list[Path]:
    return sorted(path for path in folder.rglob("*") if path.is_file())


def _bytes(tensor: Tensor) -> bytes:
    return tensor.contiguous().numpy().tobytes()
