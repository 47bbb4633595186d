"""Tables and figures from run folders; ``python -m fedmtl report FOLDER...`` on the command line."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from shutil import get_terminal_size

from .._text import shown_lines
from ._names import CHOICE_NOT_COVERED
from .runs import find_runs, frame
from .tables import csv_text, grouped, latex_text, main_metric, markdown_text, terminal_text, write_text

__all__ = ["CHOICE_NOT_COVERED", "Report", "frame", "report"]


@dataclass(frozen=True)
class Report:
    """The files of one report: the tables, a figure if a run has a finite score, and a page if one was asked for; and
    the runs that were left out, each with the reason."""

    tables: tuple[Path, ...]
    figure: Path | None
    page: Path | None
    left_out: Mapping[Path, str]

    @property
    def files(self) -> tuple[Path, ...]:
        """Return all of them."""
        return (*self.tables, *(file for file in (self.figure, self.page) if file is not None))


def report(
    folders: Sequence[str | os.PathLike[str]],
    out: str | os.PathLike[str] | None = None,
    *,
    show: bool = True,
    html: bool = False,
    format: str = "png",
    width: float | None = None,
) -> Report:
    """Turn the runs under ``folders`` into one table and one privacy-utility plot.

    Writes ``table.csv`` (one line for each method of each run), ``table.md`` and ``table.tex`` (seeds averaged) and
    ``privacy_utility.png``. All hold accuracies on private test data.

    Args:
        folders: run folders, or folders that hold runs at any depth (a sweep's).
        out: where the files go; default ``report/`` in the first folder, ``private/report/`` in a run's.
        show: print the table.
        html: write the same as one page that needs no other file, ``report.html`` beside the others, with the plots of
            a run, its privacy report and its settings.
        format: of the figure: png, pdf or svg.
        width: in inches, of a figure for a paper.

    Raises:
        DataError: no finished run, or a result that cannot be read.
    """
    from .figures import plot_frontier

    rows, first = frame(folders), Path(folders[0])
    groups, left_out = grouped(rows), {run: why for run, why in find_runs(folders).items() if why}
    metric = main_metric(groups)
    one_run = (first / "private" / "result.json").is_file()
    target = Path(out) if out is not None else (first / "private" if one_run else first) / "report"
    tables = {"table.csv": csv_text(rows), "table.md": markdown_text(groups), "table.tex": latex_text(groups)}
    figure = target / f"privacy_utility.{format}"
    files = Report(
        tables=tuple(write_text(target / name, text) for name, text in tables.items()),
        figure=None if metric is None else plot_frontier(groups, figure, metric=metric, paper=width),
        page=target / "report.html" if html else None,
        left_out=left_out,
    )
    if files.page is not None:
        from .page import run_page, sweep_page  # reads a privacy report, which takes PyTorch's time to start

        if one_run and len(folders) == 1:
            text = run_page(first, rows)
        else:
            picture = None if metric is None else plot_frontier(groups, figure.with_suffix(".png"), metric=metric)
            text = sweep_page(rows, left_out, picture, target)
        write_text(files.page, text)
    if show:
        print(shown_lines(terminal_text(groups, get_terminal_size((120, 24)).columns)))
    return files
