"""The costs of privacy in the reference table have the guarantee that the study gives."""

from setting import budget

from benchmarks.reference.studies import ROWS


def test_costs_of_privacy_have_the_delta_of_the_study() -> None:
    rows = [row for row in ROWS if row.place.folder == "reproduce/cost_of_privacy"]
    assert [row.name.split("-")[1] for row in rows] == ["lending"] * 2 + ["hospitals"] * 2
    for row in rows:
        # Laplace noise has no delta; the text of the row is typed, so it is compared.
        assert float(row.delta) == budget(float(row.epsilon)).delta == 0
