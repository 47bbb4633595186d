"""Broken versions of a private search, each of which its audit must catch.

A mutant patches the production search; ``caught_by`` names the check that must refute it.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import pytest

from fedmtl import FedAvg, PoissonSampling, PrivateSearch, models
from fedmtl.privacy import ClientPrivacy, SeededSource
from fedmtl.privacy.audit import Finding
from fedmtl.random import derive_key
from fedmtl.search.search import SearchResult, _Search
from fedmtl.trainer.folder import write_json
from fedmtl.trainer.result import Result
from tests.helpers import ragged_classification

from ..trainer.settings import SOLVER, trainer
from .selection_audit import audit_search

CLIENTS = 30
DATA = ragged_classification(CLIENTS)
MODULE = models.mlp(hidden=4)(DATA.spec)
_PRIVACY = ClientPrivacy(clip_norm=0.7, epsilon=4.0, delta=1e-5)


def searched(source: str = "seeded", **settings: Any) -> PrivateSearch:
    """Two candidates of 30 clients, cohorts of 10 in expectation, two rounds."""
    shared = {
        "data": DATA,
        "schedule": PoissonSampling(cohort=10),
        "privacy": replace(_PRIVACY, source=source),
        "rounds": 2,
    } | settings
    algorithms = {"pmtl": {}, "fedavg": {"algorithm": FedAvg(local=SOLVER)}}
    candidates = {name: trainer(**shared | own) for name, own in algorithms.items()}
    return PrivateSearch(candidates=candidates, score_noise=0.1, progress=False)


@dataclass(frozen=True)
class Mutant:
    """One broken version.

    Attributes:
        name: what is broken.
        apply: patches it in.
        caught_by: the check that must refute it.
        source: of the noise.
        settings: of the candidates, where it needs others.
        shows: words of the finding.
    """

    name: str
    apply: Callable[[pytest.MonkeyPatch], None]
    caught_by: str
    source: str = "seeded"
    settings: tuple[tuple[str, Any], ...] = ()
    shows: tuple[str, ...] = ()


def findings(mutant: Mutant) -> list[Finding]:
    """The audit of the mutant."""
    with pytest.MonkeyPatch.context() as patch:
        mutant.apply(patch)
        return audit_search(searched(mutant.source, **dict(mutant.settings)))


_train, _score, _publish, _coins = _Search._train, _Search._score, _Search._publish, _Search._coins
_result, _seeded_coins = _Search._result, SeededSource.coins


def _own_seeds(patch: pytest.MonkeyPatch) -> None:
    def train(self: _Search, index: int, candidate: int) -> Any:
        plan, seed = self.plan, derive_key(self.seed, "search/repetition", index) >> 1
        self.plan = replace(plan, trainers={name: replace(one, seed=seed) for name, one in plan.trainers.items()})
        try:
            return _train(self, index, candidate)
        finally:
            self.plan = plan

    patch.setattr(_Search, "_train", train)


def _number_in_report(patch: pytest.MonkeyPatch) -> None:
    def publish(self: _Search, root: Any, found: SearchResult, best: int | None) -> None:
        _publish(self, root, found, best)
        write_json(root.public / "privacy.json", found.privacy.to_dict() | {"repetition": best})

    patch.setattr(_Search, "_publish", publish)


def _file_named_by_number(patch: pytest.MonkeyPatch) -> None:
    def publish(self: _Search, root: Any, found: SearchResult, best: int | None) -> None:
        _publish(self, root, found, best)
        (root.public / "model.safetensors").rename(root.public / f"model-{best}.safetensors")

    patch.setattr(_Search, "_publish", publish)


def _number_printed(patch: pytest.MonkeyPatch) -> None:
    def result(self: _Search, chosen: list[int], scores: list[float], best: int | None, run: Result | None) -> Any:
        found = _result(self, chosen, scores, best, run)
        return replace(found, best=replace(found.best, data_name=f"{found.best.data_name}, repetition {best}"))

    patch.setattr(_Search, "_result", result)


def _first_cohorts(self: SeededSource, purpose: str, step: int) -> Any:
    return _seeded_coins(replace(self, replicate=0) if purpose == "cohort" else self, purpose, step)


FORCED = "selection: forced coins"
NO_OP = (
    Mutant("none", lambda patch: None, ""),
    Mutant("none, secret coins", lambda patch: None, "", "secure"),
)
MUTANTS = (
    Mutant(
        "repetitions with starts of their own",
        _own_seeds,
        FORCED,
        shows=("model.safetensors", "the rows handed to releases"),
    ),
    Mutant("starts of their own, secret coins", _own_seeds, FORCED, "secure"),
    Mutant("batches of their own", _own_seeds, FORCED, settings=(("model", MODULE),)),
    Mutant("number of the repetition in privacy.json", _number_in_report, FORCED, shows=("shows in privacy.json",)),
    Mutant("model file named by the repetition", _file_named_by_number, FORCED, "secure"),
    Mutant("number of the repetition printed", _number_printed, FORCED),
    Mutant(
        "one noise for all repetitions",
        lambda patch: patch.setattr(_Search, "_coins", lambda self, index: _coins(self, 0)),
        "selection: fresh noise",
    ),
    Mutant(
        "one run of cohorts for all repetitions",
        lambda patch: patch.setattr(SeededSource, "coins", _first_cohorts),
        "selection: fresh cohorts",
    ),
    Mutant(
        "one score noise for all repetitions",
        lambda patch: patch.setattr(
            _Search, "_score", lambda self, index, candidate, result: _score(self, 0, candidate, result)
        ),
        "selection: fresh scores",
    ),
)
