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
from fedmtl.search.search import _Search
from tests.helpers import ragged_classification
from tests.mutation import edit

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


_own_seeds = edit(_Search._train, "trainers[name],", "trainers[name], seed=index,")
_number_in_report = edit(_Search._publish, "privacy.to_dict()", 'privacy.to_dict() | {"repetition": best}')
_file_named_by_number = edit(_Search._publish, "model.name,", 'f"model-{best}.safetensors",')
_number_printed = edit(
    _Search._result, "history=history,", "history=history, data_name=f'{run.data_name}, repetition {best}',"
)
_same_cohorts = edit(SeededSource.coins, "self.replicate", "0")
_same_score_noise = edit(_Search._score, "coins(index)", "coins(0)")

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
    Mutant("one noise for all repetitions", edit(_Search._coins, "index + 1", "1"), "selection: fresh noise"),
    Mutant("one run of cohorts for all repetitions", _same_cohorts, "selection: fresh cohorts"),
    Mutant("one score noise for all repetitions", _same_score_noise, "selection: fresh scores"),
)
