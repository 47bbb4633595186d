"""The mutation gate of covariance releases: MP-MTL passes the audit, and every broken version of it is caught."""

from __future__ import annotations

import pytest

from .matrix_mutants import MATRIX_MUTANTS, MATRIX_NO_OP, matrix_caught
from .mutants import CHECKS, Mutant


@pytest.mark.parametrize("mutant", MATRIX_NO_OP, ids=lambda mutant: mutant.name)
def test_a_no_op_passes_every_check(mutant: Mutant) -> None:
    assert matrix_caught(mutant, CHECKS) == []


@pytest.mark.parametrize("mutant", MATRIX_MUTANTS, ids=lambda mutant: mutant.name)
def test_a_mutant_is_caught_by_the_checks_that_should(mutant: Mutant) -> None:
    found = matrix_caught(mutant, mutant.caught_by)
    print(f"{mutant.name}: {', '.join(found)}")
    assert {check.split(":")[0] for check in found} & set(mutant.caught_by)
