"""The mutation gate of covariance releases: MP-MTL passes the audit, and every broken version of it is caught."""

from __future__ import annotations

import pytest

from .matrix_mutants import MUTANTS, NO_OP, caught
from .mutants import CHECKS, Mutant


@pytest.mark.parametrize("mutant", NO_OP, ids=lambda mutant: mutant.name)
def test_a_no_op_passes_every_check(mutant: Mutant) -> None:
    assert caught("mp_mtl", mutant, CHECKS) == []


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.name)
def test_a_mutant_is_caught_by_the_checks_that_should(mutant: Mutant) -> None:
    found = caught("mp_mtl", mutant, mutant.caught_by)
    print(f"{mutant.name}: {', '.join(found)}")
    assert {check.split(":")[0] for check in found} & set(mutant.caught_by)
