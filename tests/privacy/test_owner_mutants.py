"""The mutation gate of owners who act one at a time: sound releases pass, every broken version is caught."""

from __future__ import annotations

import pytest

from .owner_mutants import ALGORITHMS, FEATURED, FEATURED_MUTANTS, MUTANTS, NO_OP, OwnerMutant, caught, kinds


@pytest.mark.parametrize("mutant", NO_OP, ids=lambda mutant: mutant.name)
@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_a_no_op_passes_every_check(algorithm: str, mutant: OwnerMutant) -> None:
    assert caught(algorithm, mutant) == []


@pytest.mark.filterwarnings("ignore:invalid value encountered in matmul")  # of rows that are not finite
@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.name)
@pytest.mark.parametrize("algorithm", ALGORITHMS)
def test_a_mutant_is_caught_by_the_checks_that_should(algorithm: str, mutant: OwnerMutant) -> None:
    found = caught(algorithm, mutant, kinds(mutant))
    print(f"{algorithm}, {mutant.name}: {', '.join(found)}")
    assert any(check.startswith(mutant.caught_by) for check in found), found


_WHERE = {"bounded": ("loose clip",)}  # elsewhere the domain's own bound is above the clip
_SOUND = [
    (name, mutant)
    for name in FEATURED
    for mutant in NO_OP
    if mutant.configuration in _WHERE.get(name, ("l2_laplace", "secure"))
]


@pytest.mark.parametrize(("algorithm", "mutant"), _SOUND, ids=lambda one: getattr(one, "name", one))
def test_a_no_op_of_further_releases_passes(algorithm: str, mutant: OwnerMutant) -> None:
    assert caught(algorithm, mutant) == []


@pytest.mark.parametrize(("algorithm", "mutant"), FEATURED_MUTANTS, ids=lambda one: getattr(one, "name", one))
def test_a_mutant_of_further_releases_is_caught(algorithm: str, mutant: OwnerMutant) -> None:
    found = caught(algorithm, mutant, kinds(mutant))
    print(f"{algorithm}, {mutant.name}: {', '.join(found)}")
    assert any(check.startswith(mutant.caught_by) for check in found), found
