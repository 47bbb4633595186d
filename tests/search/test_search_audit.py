"""The audit of a search: the production search passes, and every broken version is caught by the check meant for it."""

from dataclasses import replace

import pytest

from fedmtl import FullParticipation
from fedmtl.errors import PrivacyError
from fedmtl.privacy import SeededSource
from fedmtl.search.search import _Search

from .search_mutants import MUTANTS, NO_OP, Mutant, findings, searched
from .selection_audit import audit_search


def ids(mutant: Mutant) -> str:
    return mutant.name


@pytest.mark.parametrize("mutant", NO_OP, ids=ids)
def test_the_production_search_passes_every_check(mutant: Mutant) -> None:
    found = findings(mutant)
    assert [finding.check for finding in found] == [
        "selection: forced coins, pmtl",
        "selection: forced coins, fedavg",
        "selection: fresh noise",
        "selection: fresh scores",
        "selection: fresh cohorts",
    ]
    assert not any(finding.refuted or finding.skipped for finding in found)
    assert found[0].detail.startswith("of 5 things shown")  # three files, the summary, the rows


@pytest.mark.parametrize("mutant", MUTANTS, ids=ids)
def test_a_mutant_is_caught_by_the_check_that_should(mutant: Mutant) -> None:
    caught = [finding for finding in findings(mutant) if finding.refuted]
    print(f"{mutant.name}: {', '.join(finding.check for finding in caught)}")
    assert mutant.caught_by in {finding.check.split(",")[0] for finding in caught}
    assert all(words in caught[0].detail for words in mutant.shows)


def test_the_audit_says_what_was_not_checked() -> None:
    full = audit_search(searched(schedule=FullParticipation()))
    assert [finding.check for finding in full if finding.skipped] == ["selection: fresh cohorts"]
    assert not any(finding.refuted for finding in full)


def test_addressed_noise_is_refused_in_secure_mode(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_Search, "_coins", lambda self, index: SeededSource(index))
    search = replace(searched("secure"), mean=1.0)
    with pytest.raises(PrivacyError, match="is seeded, but the settings ask for another one"):
        search.fit()
