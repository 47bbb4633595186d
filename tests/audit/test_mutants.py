"""The mutation gate: the production release path passes the audit, and every broken version of it is caught.

``pytest -s`` prints which checks caught each mutant; ``python scripts/mutants.py`` makes a table with all checks.
"""

import pytest

from fedmtl.audit.run_suite import setup_of

from .mutants import IN_ROUNDS, MUTANTS, NO_OP, ROUNDS, Mutant, caught, trainer_of


def cases(mutants: list[Mutant]) -> list:
    return [
        pytest.param(mutant, *case, id="-".join((mutant.name, *case))) for mutant in mutants for case in mutant.cases()
    ]


def test_methods_in_rounds_open_the_same_channel() -> None:
    """So that checks which are given the channel and not the run are made with one of the methods."""
    for configuration in IN_ROUNDS:
        assert len({repr(setup_of(trainer_of(method, configuration))) for method in ROUNDS}) == 1, configuration


@pytest.mark.parametrize(("mutant", "algorithm", "configuration"), cases(NO_OP))
def test_a_no_op_passes_every_check(mutant: Mutant, algorithm: str, configuration: str) -> None:
    assert caught(mutant, algorithm, configuration) == []


@pytest.mark.filterwarnings("ignore:invalid value encountered in")  # of rows that are not finite
@pytest.mark.parametrize(("mutant", "algorithm", "configuration"), cases(MUTANTS))
def test_a_mutant_is_caught_by_the_checks_that_should(mutant: Mutant, algorithm: str, configuration: str) -> None:
    found = caught(mutant, algorithm, configuration, mutant.kinds)
    print(f"{algorithm}, {configuration}, {mutant.name}: {', '.join(found)}")
    assert any(check.startswith(mutant.caught_by) for check in found), found
