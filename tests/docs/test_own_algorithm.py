"""The algorithm of the documentation is FedDyn: rounds by hand, its fixed point; its page has it audited."""

import importlib
import json
import sys
from pathlib import Path

import numpy as np
import pytest

from fedmtl import Buffered, LocalSGD, PoissonSampling, cli
from fedmtl.algorithms import SharedModel
from fedmtl.errors import ConfigError
from tests.algorithms.harness import problem_of, run
from tests.algorithms.test_pmtl import blocks as records
from tests.docs.pages import blocks, write
from tests.helpers import regression
from tests.small import trainer

D, CLIENTS, ALPHA = 4, 6, 0.5


@pytest.fixture
def mine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The current folder, outside of the package, with the algorithm of the text."""
    for block in blocks("own-algorithm.md"):
        if block.title:
            write(block, tmp_path)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delitem(sys.modules, "my_feddyn", raising=False)
    return tmp_path


def feddyn(**settings: object) -> SharedModel:
    found: SharedModel = importlib.import_module("my_feddyn").FedDyn(**settings)
    return found


def test_rounds_of_it_by_hand(mine: Path) -> None:
    data, cohorts, local = (
        regression(clients=CLIENTS),
        [],
        LocalSGD(lr=0.05, steps=3, batch_size=None),
    )
    algorithm = feddyn(alpha=ALPHA, local=local)
    kind = type(algorithm)

    class Watched(kind):  # type: ignore[misc, valid-type]
        def client_update(self, c):  # type: ignore[no-untyped-def]
            cohorts.append(c.clients.tolist())
            return super().client_update(c)

    state = run(
        Watched(alpha=ALPHA, local=local),
        problem_of(data, rounds=4),
        sampler=PoissonSampling(cohort=3),
    )
    w, h, own = np.zeros(D), np.zeros(D), np.zeros((CLIENTS, D))
    for cohort in cohorts:
        total = np.zeros(D)
        for k in cohort:
            (x, y), v = records(data)[k], w.copy()
            for _ in range(3):
                v = v - 0.05 * (2 / len(x) * x.T @ (x @ v - y) - own[k] + ALPHA * (v - w))
            own[k] -= ALPHA * (v - w)
            total += v - w
        h = h - ALPHA * total / CLIENTS
        w = w + total / 3 - h / ALPHA
    np.testing.assert_allclose(state.public["global"].numpy(), w, rtol=1e-9, atol=1e-10)
    np.testing.assert_allclose(state.public["h"].numpy(), own.mean(0), rtol=1e-9, atol=1e-10)


def test_late_answers_are_refused(mine: Path) -> None:
    """Their weights would move the mean of the h_k away from the server's h."""
    late = Buffered(latency=1.0, concurrency=3, buffer=2)
    with pytest.raises(ConfigError, match="feddyn needs one public state for all clients"):
        trainer(algorithm=feddyn(), schedule=late)


def test_the_command_runs_it(mine: Path) -> None:
    words = [
        "rounds=2",
        "data.clients=20",
        "schedule.cohort=10",
        "baselines=[]",
        "progress=false",
        "hydra.run.dir=run",
    ]
    given = [
        "--config-dir",
        "mine",
        "--trust",
        "my_feddyn",
        "algorithm=my_feddyn",
        "privacy=record",
        *words,
    ]
    assert cli.main(given) == 0
    stored = json.loads((mine / "run" / "private" / "result.json").read_text())
    assert stored["methods"] == {"feddyn": ["FedDyn", "#4e342e"]}
