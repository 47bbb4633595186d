"""Nothing that a search publishes tells which repetition won, and every broken version of it is caught.

The bound of a search (:mod:`fedmtl.privacy.accounting.selection`) holds for repetitions that have one law and for an
output that does not tell which of them it is. :func:`leaks` checks both on the production path.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from tempfile import TemporaryDirectory
from types import SimpleNamespace
from typing import Any, ClassVar
from unittest.mock import patch

import numpy as np
import pytest
import torch
from torch import Tensor

from fedmtl import FedAvg, PoissonSampling, PrivateSearch, models
from fedmtl.errors import PrivacyError
from fedmtl.privacy import Channel, ClientPrivacy, NoiseSource, SeededSource
from fedmtl.search.run import SearchRun
from fedmtl.trainer.folder import RunFolder
from fedmtl.trainer.run_channel import open_run
from tests.helpers import ragged_classification
from tests.mutation import edit

from ..trainer.settings import SOLVER, trainer

CLIENTS, REPETITIONS, SCORES = 30, 3, 20
DATA = ragged_classification(CLIENTS)
MODULE = models.mlp(hidden=4)(DATA.spec)
PRIVACY = ClientPrivacy(clip_norm=0.7, epsilon=4.0, delta=1e-5)


def searched(source: str = "seeded", **settings: Any) -> PrivateSearch:
    """Two candidates of 30 clients, cohorts of 10 in expectation, two rounds."""
    shared = {"data": DATA, "schedule": PoissonSampling(cohort=10), "rounds": 2} | settings
    shared["privacy"] = replace(PRIVACY, source=source)
    candidates = {
        "pmtl": trainer(**shared),
        "fedavg": trainer(**shared, algorithm=FedAvg(local=SOLVER)),
    }
    return PrivateSearch(candidates=candidates, score_noise=0.1, progress=False)


@dataclass
class Record:
    """What passes the channel of one run; with ``silent``, rows become zeros, such that a release is its noise."""

    silent: bool = False
    rows: list[Tensor] = field(default_factory=list)
    released: list[Tensor] = field(default_factory=list)
    cohorts: list[Tensor] = field(default_factory=list)

    def watch(self, channel: Channel) -> None:
        release, begin = channel.release, channel.begin

        def recorded_release(name: str, rows: Tensor, clients: Tensor) -> Tensor:
            self.rows.append(rows.detach().cpu().clone())
            value = release(name, torch.zeros_like(rows) if self.silent else rows, clients)
            self.released.append(value.clone())
            return value

        def recorded_begin(step: int, ranks: Tensor) -> None:
            self.cohorts.append(torch.sort(ranks.cpu()).values)
            begin(step, ranks)

        channel.release, channel.begin = recorded_release, recorded_begin


@contextmanager
def watched(record: Record) -> Iterator[Record]:
    """Record what passes the channels that are opened inside of the block."""

    def opened(*args: Any, **options: Any) -> Channel:
        channel = open_run(*args, **options)
        record.watch(channel)
        return channel

    with patch("fedmtl.trainer.engine.open_run", opened):
        yield record


def joined(tensors: list[Tensor]) -> bytes:
    return b"".join(one.contiguous().numpy().tobytes() for one in tensors)


class Forced(SearchRun):
    """A search whose repetitions all have the same coins."""

    def _coins(self, index: int) -> NoiseSource:
        return Addressed(0) if self.secure else SeededSource(0)


@dataclass(frozen=True)
class Addressed(SeededSource):
    """Seeded coins on the path of secret ones, which rounds to a grid."""

    name: ClassVar[str] = "secure"


def outputs(search: SearchRun, index: int, candidate: int) -> dict[str, bytes]:
    """What clients hand to the releases of a repetition, and what is published and printed where it wins."""
    with watched(Record()) as record:
        run = search._train(index, candidate)
    scores = [search._score(index, candidate, run)] * REPETITIONS
    summary = search._result([candidate] * REPETITIONS, scores, index, run).summary()
    assert search.root is not None
    files = {
        path.name: path.read_bytes() for path in search.root.public.rglob("*") if path.is_file()
    }
    return {
        **files,
        "summary": summary.replace(str(search.root.root), "").encode(),
        "rows": joined(record.rows),
    }


def leaks(settings: PrivateSearch) -> set[str]:
    """What differs between repetitions of a candidate that have the same coins, and which of their own coins are not
    fresh."""
    plan, leaking = settings.plan(), set()
    for candidate in range(len(settings.candidates)):
        with TemporaryDirectory() as folder:
            places = [RunFolder(Path(folder) / str(index)) for index in range(REPETITIONS)]
            every = [
                outputs(Forced(settings, plan, each), k, candidate) for k, each in enumerate(places)
            ]
        assert len(every[0]) == 5  # three files, the summary, the rows
        leaking |= {
            name
            for one in every
            for name in one
            if any(one[name] != other.get(name) for other in every)
        }
    search, records = SearchRun(settings, plan, None), []
    for index in range(REPETITIONS):
        with watched(Record(silent=True)) as record:
            search._train(index, 0)
        records.append(record)
    noise = np.stack(
        [torch.cat([value.reshape(-1) for value in one.released]).numpy() for one in records]
    )
    if (
        np.abs(np.corrcoef(noise)[~np.eye(REPETITIONS, dtype=bool)]).max()
        > 6 / noise.shape[1] ** 0.5
    ):
        leaking.add("same noise")
    if len({joined(one.cohorts) for one in records}) < REPETITIONS:  # by chance once in 10^14
        leaking.add("same cohorts")
    even = SimpleNamespace(ids=DATA.ids, personal_accuracy=dict.fromkeys(DATA.ids, 0.5))
    if len({search._score(index, 0, even) for index in range(SCORES)}) < SCORES:
        leaking.add("same score noise")
    return leaking


@pytest.mark.parametrize("source", ["seeded", "secure"])
def test_the_production_search_leaks_nothing(source: str) -> None:
    assert leaks(searched(source)) == set()


own_seeds = edit(
    SearchRun._train,
    "trainer = self.plan.trainers[name]",
    "trainer = replace(self.plan.trainers[name], seed=index)",
)
MUTANTS: dict[str, tuple[Callable[..., None], PrivateSearch, set[str]]] = {
    "starts of their own": (own_seeds, searched(), {"model.safetensors", "rows"}),
    "starts of their own, secret coins": (
        own_seeds,
        searched("secure"),
        {"model.safetensors", "rows"},
    ),
    "batches of their own": (own_seeds, searched(model=MODULE), {"rows"}),
    "number in privacy.json": (
        edit(SearchRun._publish, "privacy.to_dict()", 'privacy.to_dict() | {"repetition": best}'),
        searched(),
        {"privacy.json"},
    ),
    "model named by the number": (
        edit(
            SearchRun._publish, "/ name, file.read", '/ f"{name[:5]}-{best}.safetensors", file.read'
        ),
        searched("secure"),
        {"model-0.safetensors"},
    ),
    "number printed": (
        edit(
            SearchRun._result,
            "history=history,",
            "history=history, data_name=f'{run.data_name}, repetition {best}',",
        ),
        searched(),
        {"summary"},
    ),
    "one noise for all": (edit(SearchRun._coins, "index + 1", "1"), searched(), {"same noise"}),
    "cohorts for all": (
        edit(SeededSource.coins, "self.replicate", "0"),
        searched(),
        {"same cohorts"},
    ),
    "one score noise for all": (
        edit(SearchRun._score, "coins(index)", "coins(0)"),
        searched(),
        {"same score noise"},
    ),
}


@pytest.mark.parametrize("name", MUTANTS)
def test_a_broken_search_is_caught(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    apply, settings, expected = MUTANTS[name]
    apply(monkeypatch)
    assert expected <= leaks(settings)


def test_addressed_noise_is_refused_in_secure_mode(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(SearchRun, "_coins", lambda self, index: SeededSource(index))
    search = replace(searched("secure"), mean=1.0)
    with pytest.raises(PrivacyError, match="is seeded, but the settings ask for another one"):
        search.fit()
