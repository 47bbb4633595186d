"""The audit of peer-to-peer learning: what its own settings release passes, what would leak beside them is caught."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch

from fedmtl import PeerToPeer, Trainer
from fedmtl.algorithms.p2p import algorithm as p2p
from fedmtl.algorithms.p2p.model import LinearRecords
from fedmtl.algorithms.p2p.network import Network
from fedmtl.graphs import KNNCosine
from fedmtl.trainer.audit.suite import transcript

from .owner_mutants import audit, trainer_of

WARM = {"warm_start": 0.3, "warm_lam": 0.5, "allocation": 2.0}


def trainer(configuration: str, **settings) -> Trainer:
    run = trainer_of("p2p", configuration)
    assert isinstance(run.algorithm, PeerToPeer)
    return replace(run, algorithm=replace(run.algorithm, **settings))


@pytest.mark.parametrize("configuration", ["laplace", "gaussian"])
def test_weighted_wakeups_after_a_warm_start_pass(configuration: str) -> None:
    checks = ("noise law", "charges", "transcript")
    findings = audit(trainer(configuration, **WARM), checks=checks, processes=False)
    assert [finding.check for finding in findings if finding.refuted] == []
    assert any(finding.check == "transcript: public state" and not finding.skipped for finding in findings)


_Patch = Callable[[pytest.MonkeyPatch], None]


def _curvature_of_own_rows(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(PeerToPeer, "largest_row", lambda self, problem: float(problem.data.train.x.norm(dim=1).max()))


def _confidence_of_own_labels(patch: pytest.MonkeyPatch) -> None:
    confidence, network = Network.confidence, PeerToPeer._built

    def built(self, problem):
        made = network(self, problem)
        share = float(problem.data.train.y.double().mean())
        patch.setattr(Network, "confidence", lambda self, counts: confidence(self, counts) * share)
        return made

    patch.setattr(PeerToPeer, "_built", built)


def _unreleased_warm_start(patch: pytest.MonkeyPatch) -> None:
    def make(network, fits, public, channel):
        channel.release_first(fits.of)
        public["theta"].copy_(fits.all())
        public["warm"].fill_(1)

    patch.setattr(p2p, "make_warm_start", make)


def _raw_local_start(patch: pytest.MonkeyPatch) -> None:
    init = PeerToPeer.init

    def raw(self, problem, replicates=1):
        state = init(self, problem, replicates)
        state.public["theta"] += self._local_fits(problem, 1.0, 0.5).all()
        return state

    patch.setattr(PeerToPeer, "init", raw)


def _raw_gradients_beside(patch: pytest.MonkeyPatch) -> None:
    release = LinearRecords.release

    def leaky(self, channel, count, points):
        raw = torch.stack([x.mean(0) for x in self.data.x]).mean(0)
        return release(self, channel, count, points) + 1e-6 * raw

    patch.setattr(LinearRecords, "release", leaky)
    patch.setattr(LinearRecords, "release_one", lambda self, channel, points: leaky(self, channel, 1, points)[0])


@pytest.mark.parametrize(
    ("leak", "settings"),
    [
        (_curvature_of_own_rows, {}),
        (_confidence_of_own_labels, {}),
        (_unreleased_warm_start, WARM),
        (_raw_local_start, {}),
        (_raw_gradients_beside, {}),
    ],
    ids=lambda value: value.__name__ if callable(value) else "",
)
def test_what_leaks_beside_the_releases_is_caught(leak: _Patch, settings: dict) -> None:
    assert not transcript(trainer("gaussian", **settings), rounds=15).refuted
    with pytest.MonkeyPatch.context() as patch:
        leak(patch)
        assert transcript(trainer("gaussian", **settings), rounds=15).refuted


def test_a_graph_of_the_records_is_outside_and_the_transcript_says_so() -> None:
    assert transcript(trainer("gaussian", graph=KNNCosine(2)), rounds=15).refuted
