"""The mutation gate: the production release path passes the audit, and every broken version of it is caught.

``pytest -s`` prints which checks caught each mutant; ``python scripts/mutants.py`` makes a table of every mutant with
every method and all checks.
"""

from collections import defaultdict
from dataclasses import replace
from itertools import count

import pytest

from fedmtl.audit import CHECKS
from fedmtl.audit.run_suite import setup_of

from .mutants import IN_ROUNDS, MUTANTS, NO_OP, Mutant, algorithms_of, caught, trainer_of

ALIKE = {
    "pmtl": ("pmtl-local", "fedavg", "weighted", "apfl", "ppsgd", "ditto", "pfedme"),
    "fedrep": ("fedper",),
}
"""Methods in rounds whose channel is that of another one, where clients are protected."""
RUNNING = ("transcript", "independence")
"""Checks that run the method; the others are given its channel."""
FEW = 0.25
"""Of the noise and of the cohorts, with which most of the mutants are found."""
WHOLE = ("pmtl", "async_learner", "pp_dmtl", "mp_mtl")
"""Methods with which each channel is examined whole: others that are given the same one have a small audit."""


def every_case(mutants: list[Mutant]) -> list:
    """Every mutant in each of its configurations, with each of its methods."""
    return [
        pytest.param(mutant, *case, id="-".join((mutant.name, *case)))
        for mutant in mutants
        for case in mutant.cases()
    ]


def cases(mutants: list[Mutant]) -> list:
    """Every mutant in each of its configurations: with all methods that it names, or else with one of those that the
    configuration is run with, which take turns."""
    turns: dict[tuple[str, ...], count] = defaultdict(count)
    chosen = []
    for mutant in mutants:
        for configuration in mutant.configurations:
            one = replace(mutant, configurations=(configuration,))
            if mutant.algorithms is None:
                methods = tuple(algorithm for algorithm, _ in one.cases())
                one = replace(one, algorithms=(methods[next(turns[methods]) % len(methods)],))
            chosen.append(one)
    return every_case(chosen)


def channel(algorithm: str, configuration: str) -> str:
    """How a method opens its channel, but for the number of local trainings: rows of clients are released, whatever
    they are made from."""
    setup = setup_of(trainer_of(algorithm, configuration))
    plans = setup.plans
    if configuration == "poisson":
        plans = tuple(replace(plan, trainings=1) for plan in plans)
    return repr(replace(setup, plans=plans))


def test_methods_in_rounds_open_the_same_channel() -> None:
    """So that checks which are given the channel and not the run are made with one of the methods."""
    for configuration in IN_ROUNDS:
        methods = algorithms_of(configuration)
        assert len({channel(method, configuration) for method in methods}) == 1, configuration
    for method, others in ALIKE.items():
        assert {channel(other, "poisson") for other in others} == {channel(method, "poisson")}


@pytest.mark.parametrize(("mutant", "algorithm", "configuration"), every_case(NO_OP))
def test_a_no_op_passes_every_check(mutant: Mutant, algorithm: str, configuration: str) -> None:
    checks = CHECKS
    share = 1.0
    if algorithm not in WHOLE:
        share = FEW
    if configuration == "poisson" and any(algorithm in others for others in ALIKE.values()):
        checks = RUNNING
    assert caught(mutant, algorithm, configuration, checks, share) == []


@pytest.mark.filterwarnings("ignore:invalid value encountered in")  # of rows that are not finite
@pytest.mark.parametrize(("mutant", "algorithm", "configuration"), cases(MUTANTS))
def test_a_mutant_is_caught_by_the_checks_that_should(
    mutant: Mutant, algorithm: str, configuration: str
) -> None:
    """One that a small audit finds, as it finds most, needs no whole one."""
    for share in (FEW, 1.0):
        found = caught(mutant, algorithm, configuration, mutant.kinds, share)
        print(f"{algorithm}, {configuration}, {mutant.name}: {', '.join(found)}")
        if any(check.startswith(mutant.caught_by) for check in found):
            return
    raise AssertionError(f"caught by {found}")
