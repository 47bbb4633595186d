"""The mutation gate: the production release path passes the audit, and every broken version of it is caught.

``pytest -s`` prints which checks caught each mutant; ``python scripts/mutants.py`` makes a table with all checks.
"""

from __future__ import annotations

import pytest

from .mutants import ALGORITHMS, MUTANTS, NO_OP, Mutant, caught

SOUND = [
    (name, mutant) for name in ALGORITHMS for mutant in NO_OP if name == "pmtl" or mutant.configuration == "poisson"
]


@pytest.mark.parametrize(("algorithm", "mutant"), SOUND, ids=[f"{name}-{mutant.name}" for name, mutant in SOUND])
def test_a_no_op_passes_every_check(algorithm: str, mutant: Mutant) -> None:
    assert caught(algorithm, mutant) == []


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.name)
@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_a_mutant_is_caught_by_the_checks_that_should(algorithm: str, mutant: Mutant) -> None:
    found = caught(algorithm, mutant, mutant.caught_by)
    print(f"{algorithm}, {mutant.name}: {', '.join(found)}")
    assert {check.split(":")[0] for check in found} & set(mutant.caught_by)
