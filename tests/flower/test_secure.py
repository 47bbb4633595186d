"""Secure sums over a grid of one process: the numbers of ``Trainer.fit``, and nothing of a row on the way."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from fedmtl import FullParticipation, SecureAggregation, Trainer
from fedmtl.privacy import ClientPrivacy
from tests.algorithms.test_client_half import trainer_of

pytest.importorskip("flwr", reason="the extra flower is not installed")


from fedmtl.flower import client_app, population
from fedmtl.flower.identities import checked_identities, new_identity
from fedmtl.flower.messages import OPENING, ROUND, ROW, SHARES
from fedmtl.flower.server import serve
from tests.flower.grid import LocalGrid
from tests.flower.test_apps import public_state, same

KINDS = (ROUND, SHARES, ROW, OPENING)
SOME = SecureAggregation(colluding=1, missing=1)
PRIVACY = ClientPrivacy(clip_norm=0.5, noise_multiplier=1.0, delta=1e-3, aggregation=SOME)


def secured(name: str = "fedavg", **changes: Any) -> Trainer:
    settings = {"privacy": PRIVACY, "schedule": FullParticipation(), "rounds": 3} | changes
    return replace(trainer_of(name), **settings)


class Hospitals:
    """The nodes of a population with keys of their own, and its server."""

    def __init__(self, trainer: Trainer, folder: Path, **options: Any) -> None:
        data = trainer.data
        (folder / "keys").mkdir(parents=True)
        self.identities = {
            name: new_identity(folder / "keys" / f"{place}.key")
            for place, name in enumerate(data.ids)
        }
        people = population(data.ids, data.spec.shape, classes=data.spec.classes)
        self.trainer = replace(trainer, data=people, folder=folder / "server")
        self.folder = folder
        self.data = data
        self.keys = {
            name: {"key": str(folder / "keys" / f"{place}.key")}
            for place, name in enumerate(data.ids)
        }
        self.options = options
        self.grid = self.started()

    def started(self, **changes: Any) -> LocalGrid:
        """The nodes, as after they were all started anew."""
        trainer = replace(self.trainer, folder=None, **changes)
        app = client_app(
            trainer,
            lambda name, config: self.data.subset([name]),
            folder=self.folder / "nodes",
            identities=self.identities,
        )
        grid = LocalGrid(app, self.data.ids, **self.options)
        grid.config = self.keys
        return grid

    def run(self) -> Any:
        keys = checked_identities(self.trainer, self.identities)
        return serve(self.trainer, self.grid, patience=0.01, gather=0, identities=keys)

    def used(self, name: str) -> int:
        """Shares that a node has charged, read off the lines of its ledger."""
        path = self.folder / "nodes" / name / "private" / "ledger.jsonl"
        if not path.exists():
            return 0
        lines = [json.loads(line) for line in path.read_text().splitlines()]
        return sum(len(who) for line in lines for who in line.get("cohorts", ()))


@pytest.mark.parametrize("name", ["fedavg", "pmtl", "ditto", "scaffold"])
def test_sums_over_nodes_give_the_numbers_of_the_trainer(name: str, tmp_path: Path) -> None:
    trainer = secured(name)
    replace(trainer, folder=tmp_path / "one").fit()
    hospitals = Hospitals(trainer, tmp_path)
    hospitals.run()
    same(public_state(tmp_path / "one"), public_state(tmp_path / "server"))
    assert [hospitals.used(client) for client in trainer.data.ids] == [3] * len(trainer.data.ids)
