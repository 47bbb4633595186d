"""The bands are read back from the figure and compared with the percentiles they stand for."""

from pathlib import Path

import numpy as np
import pytest
from matplotlib.figure import Figure

from fedmtl.errors import ConfigError
from fedmtl.report import figures


def history(objective: float, rounds: int = 5) -> list[dict[str, float]]:
    """Two budgets; the objective falls from 10 to ``objective``, the accuracy rises."""
    rows = []
    for r in range(1, rounds + 1):
        for budget in (1.0, 10.0):
            row = {"round": float(r), "budget": budget}
            middle = {
                "accuracy": 0.5 + 0.01 * r * budget,
                "objective": 10 * (objective / 10) ** ((r - 1) / (rounds - 1)),
            }
            for number, value in middle.items():
                row |= {number: value}
                row |= {f"{number}_p{p}": value * (1 + (p - 50) / 1000) for p in (5, 25, 50, 75, 95)}
            rows.append(row)
    return rows


@pytest.mark.parametrize(("objective", "scale"), [(9.0, "linear"), (0.1, "log")])
def test_every_budget_has_its_median_and_its_band(
    objective: float, scale: str, tmp_path: Path, drawn: list[Figure]
) -> None:
    rows = history(objective)
    path = figures.plot_bands(rows, tmp_path / "bands.png", name="pp_dmtl", step="answer")
    assert path.stat().st_size > 0
    left, right = drawn[0].axes
    assert (left.get_yscale(), right.get_yscale()) == ("linear", scale)
    for axes, number in ((left, "accuracy"), (right, "objective")):
        for line, budget in zip(axes.lines, (1.0, 10.0), strict=True):
            own = [row for row in rows if row["budget"] == budget]
            assert np.array_equal(line.get_ydata(), [row[f"{number}_p50"] for row in own])
        edges = np.concatenate([part.get_paths()[0].vertices[:, 1] for part in axes.collections])
        for mark in (5, 25, 75, 95):
            assert {row[f"{number}_p{mark}"] for row in rows} <= set(edges)
    named = {text.get_text() for text in drawn[0].legends[0].get_texts()}
    assert {"epsilon 1", "epsilon 10"} <= named


def test_a_history_without_the_metric_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="history has no 'mse'"):
        figures.plot_bands(history(1.0), tmp_path / "bands.png", name="p2p", metric="mse")
