"""Tables and figures from run folders: ``python -m fedmtl report FOLDER...``."""

from __future__ import annotations

import os
import textwrap
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from shutil import get_terminal_size

from .._files import read_json
from .._text import shown, shown_lines
from ._names import CHOICE_NOT_COVERED
from .runs import find_runs, frame
from .tables import (
    csv_text,
    grouped,
    latex_text,
    main_metric,
    markdown_text,
    terminal_text,
    write_text,
)

__all__ = ["CHOICE_NOT_COVERED", "Report", "frame", "report"]


@dataclass(frozen=True)
class Report:
    """The files of one report.

    Attributes:
        tables: the files of the tables.
        figure: the privacy-utility plot; None if no run has a finite score.
        page: the page in HTML; None if none was asked for.
        left_out: the runs without a result, each with the reason.

    Example:
        >>> from pathlib import Path
        >>> from fedmtl.report import Report
        >>> report = Report(tables=(Path("table.csv"),), figure=None, page=None, left_out={})
        >>> len(report.files)
        1
    """

    tables: tuple[Path, ...]
    figure: Path | None
    page: Path | None
    left_out: Mapping[Path, str]

    @property
    def files(self) -> tuple[Path, ...]:
        """Returns all files: the tables, the figure and the page, as far as there are any."""
        optional = [file for file in (self.figure, self.page) if file is not None]
        return (*self.tables, *optional)


def report(
    folders: Sequence[str | os.PathLike[str]],
    out: str | os.PathLike[str] | None = None,
    *,
    show: bool = True,
    html: bool = False,
    format: str = "png",
    width: float | None = None,
) -> Report:
    """Turns the runs under ``folders`` into one table and one privacy-utility plot.

    Writes ``table.csv`` (one line for each method of each run), ``table.md`` and ``table.tex``
    (seeds averaged) and ``privacy_utility.png``. All hold scores on private test data.

    Args:
        folders: run folders, or folders that hold runs at any depth, such as a sweep's.
        out: the folder of the files; default ``report/`` in the first folder, or
            ``private/report/`` in that of a run.
        show: print the table.
        html: write the same as one page that needs no other file, ``report.html`` in ``out``, with
            the plots of a run, its privacy report and its settings.
        format: of the figure: png, pdf or svg.
        width: the width in inches of a figure for a paper; None for one on a screen.

    Returns:
        The files that were written, and the runs that were left out.

    Raises:
        ConfigError: another format, or a width that is not between 1 and 50 inches.
        DataError: no run is finished, or a result cannot be read.
    """
    from .figures import plot_frontier

    rows = frame(folders)
    groups = grouped(rows)
    left_out = {run: reason for run, reason in find_runs(folders).items() if reason}
    metric = main_metric(groups)
    first = Path(folders[0])
    # a sweep's folder has runs below it and no result of its own
    one_run = (first / "private" / "result.json").is_file()
    target = first / "report"
    if out is not None:
        target = Path(out)
    elif one_run:
        target = first / "private" / "report"  # a run's scores stay in its private folder
    texts = {
        "table.csv": csv_text(rows),
        "table.md": markdown_text(groups),
        "table.tex": latex_text(groups),
    }
    tables = tuple(write_text(target / name, text) for name, text in texts.items())
    plot = target / f"privacy_utility.{format}"
    figure = None
    if metric is not None:
        figure = plot_frontier(groups, plot, metric=metric, paper=width)
    page = None
    if html:
        # imported here: it reads a privacy report, which takes PyTorch's time to start
        from .page import run_page, sweep_page

        page = target / "report.html"
        if one_run and len(folders) == 1:
            text = run_page(first, rows)
        else:
            picture = None
            if metric is not None:
                # a page embeds PNG, of the size for a screen, whatever the format of the figure
                picture = plot_frontier(groups, plot.with_suffix(".png"), metric=metric)
            text = sweep_page(rows, left_out, picture, target)
        write_text(page, text)
    if show:
        columns = get_terminal_size((120, 24)).columns
        print(shown_lines(terminal_text(groups, columns)))
        if one_run and len(folders) == 1 and (sentence := _verdict(first)):
            print(textwrap.fill(shown(sentence), columns, break_long_words=False))
    return Report(tables=tables, figure=figure, page=page, left_out=left_out)


def _verdict(run: Path) -> str:
    """Returns the sentence of a run that compares it with local training, by the clients that gain
    and that lose; empty without that baseline."""
    found = read_json(run / "private" / "result.json").get("verdict")
    if not found:
        return ""
    text = str(found)
    return f"{text[:1].upper()}{text[1:]}."
