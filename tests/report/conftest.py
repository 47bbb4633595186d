"""Figures are read back: what was saved stays in memory."""

from pathlib import Path

import pytest
from matplotlib.figure import Figure

import fedmtl.algorithms  # noqa: F401 - registers the titles and colours of the methods
from fedmtl.report import canvas


@pytest.fixture
def drawn(monkeypatch: pytest.MonkeyPatch) -> list[Figure]:
    """Every figure that was saved, still in memory."""
    saved: list[Figure] = []
    original = canvas.save

    def save(figure: Figure, path: Path) -> None:
        saved.append(figure)
        original(figure, path)

    monkeypatch.setattr(canvas, "save", save)
    return saved
