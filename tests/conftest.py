"""Settings of all tests."""

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

os.environ.setdefault("MPLBACKEND", "Agg")
os.environ.setdefault("OMP_NUM_THREADS", "1")  # one worker for each core, one thread for each worker

# what `pytest -m quick` runs: every layer once, with the recorded numbers of every method, in less than a minute
QUICK = {
    "test_settings.py", "golden", "graphs", "data/test_dataset.py", "models/test_models.py", "local/test_batches.py",
    "local/test_local.py", "local/test_optimizers.py", "local/test_products.py", "schedules/test_rounds.py",
    "privacy/test_clip.py", "privacy/test_samplers.py", "privacy/test_channel.py", "privacy/test_ledger.py",
    "privacy/test_records.py", "algorithms/test_fedavg.py", "algorithms/test_ditto.py", "algorithms/test_linear.py",
    "algorithms/test_client_half.py", "trainer/test_evaluation.py", "trainer/test_trainer.py",
}  # fmt: skip


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        path = item.path.relative_to(Path(__file__).parent)
        if {path.as_posix(), path.parts[0]} & QUICK:
            item.add_marker("quick")


@pytest.fixture(autouse=True, scope="session")
def no_sync() -> Iterator[None]:
    """Leaves it to the system when files are written to the disk: tests kill processes, but no machine."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "fsync", lambda file: None)
        yield


def quick_figures(patch: pytest.MonkeyPatch) -> None:
    """Let runs write a line of text in place of each figure: drawing takes seconds, and has tests of its own."""
    import fedmtl.report.figures as figures

    def plot(*args: Any, **options: Any) -> None:
        next(a for a in args if isinstance(a, Path)).write_text("a figure")

    for name in ("plot_rounds", "plot_clients"):
        patch.setattr(figures, name, plot)


@pytest.fixture(autouse=True, scope="module")
def figures(request: pytest.FixtureRequest) -> Iterator[pytest.MonkeyPatch]:
    """Patches the figures of every module that is not marked by ``pytest.mark.figures``."""
    with pytest.MonkeyPatch.context() as patch:
        if request.node.get_closest_marker("figures") is None:
            quick_figures(patch)
        yield patch


@pytest.fixture
def real_figures(figures: pytest.MonkeyPatch) -> Iterator[None]:
    """Draws the figures of one test."""
    figures.undo()
    yield
    quick_figures(figures)
