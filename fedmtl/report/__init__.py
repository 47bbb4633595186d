"""Tables and figures from run folders; ``python -m fedmtl report FOLDER...`` on the command line."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from shutil import get_terminal_size

from ._names import CHOICE_NOT_COVERED
from .runs import find_runs, frame
from .tables import csv_text, grouped, main_metric, markdown_text, terminal_text, write_text

__all__ = ["CHOICE_NOT_COVERED", "Report", "frame", "report"]


@dataclass(frozen=True)
class Report:
    """The files of one report, without a figure where no run has a finite score, and without a page where none was
    asked for; and the runs that were left out: those that have not finished, and those that failed, with the reason."""

    table: Path
    markdown: Path
    figure: Path | None
    unfinished: tuple[Path, ...]
    failed: Mapping[Path, str]
    page: Path | None = None


def report(
    folders: Sequence[str | os.PathLike[str]],
    out: str | os.PathLike[str] | None = None,
    *,
    show: bool = True,
    html: bool | str | os.PathLike[str] = False,
) -> Report:
    """Turn the runs under ``folders`` into one table and one privacy-utility plot.

    Writes ``table.csv`` (one line for each method of each run), ``table.md`` (seeds averaged) and
    ``privacy_utility.png``. All three hold accuracies on private test data.

    Args:
        folders: run folders, or folders that hold runs at any depth (a sweep's).
        out: where the files go; default ``report/`` in the first folder, ``private/report/`` in a run's.
        show: print the table.
        html: whether to write the same as one page that needs no other file, ``report.html`` beside the others, with
            the plots of a run, its privacy report and its settings; or the name of that file.

    Raises:
        DataError: no finished run, or a result that cannot be read.
    """
    from .figures import plot_frontier

    rows = frame(folders)
    _, unfinished, failed = find_runs(folders)
    groups = grouped(rows)
    metric = main_metric(groups)
    first = Path(folders[0])
    one_run = (first / "private" / "result.json").is_file()
    inside = first / "private" if one_run else first
    target = Path(out) if out is not None else inside / "report"
    files = Report(
        table=write_text(target / "table.csv", csv_text(rows)),
        markdown=write_text(target / "table.md", markdown_text(groups)),
        figure=None if metric is None else plot_frontier(groups, target / "privacy_utility.png", metric=metric),
        unfinished=tuple(unfinished),
        failed=failed,
    )
    if html is not False:
        from .page import run_page, sweep_page  # reads a privacy report, which takes PyTorch's time to start

        page = target / "report.html" if html is True else Path(html)
        if one_run and len(folders) == 1:
            text = run_page(first, rows)
        else:
            text = sweep_page(rows, unfinished, failed, files.figure, page.parent)
        files = replace(files, page=write_text(page, text))
    if show:
        print(terminal_text(groups, get_terminal_size().columns))
    return files
