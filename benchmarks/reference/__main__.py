"""The command of the reference table."""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from .problems import missing
from .records import compared, finished, line, number, read, renewed, write
from .rows import BY_NAME, ROWS
from .settings import SEEDS, Row
from .studies import ROWS as STUDIES

ORDER = (*(row.name for row in ROWS), *(study.name for study in STUDIES))
"""The lines of the CSV."""
DATA = Path(__file__).resolve().parents[3] / "shared" / "data"
QUICK = Path("outputs/reference/quick.csv")


def bar(done: int, total: int, began: float, words: str) -> None:
    """Writes a progress bar to standard error, in place if that is a terminal."""
    filled = 24 * done // max(1, total)
    minutes, seconds = divmod(int(time.monotonic() - began), 60)
    shown = f"[{'#' * filled}{'.' * (24 - filled)}] {done}/{total} {minutes}:{seconds:02} {words}"
    end = "\n"
    if sys.stderr.isatty():
        end = "\r"
        shown = f"{shown:<110}"
    print(shown, end=end, file=sys.stderr, flush=True)


def run(rows: Sequence[Row], seeds: Sequence[int], data: Path, out: Path, *, again: bool, canaries: bool) -> None:  # fmt: skip
    """Measures the cells of rows that the CSV does not have, and writes each as it is there.

    Args:
        rows: whose data are there.
        seeds: of the scores.
        data: folder of the data.
        out: the CSV.
        again: True also measures what is there.
        canaries: False leaves the lower bounds out.
    """
    from .training import measure

    cells = [(row, epsilon) for row in rows for epsilon in row.epsilons]
    began = time.monotonic()
    for place, (row, epsilon) in enumerate(cells):
        lines = read(out)
        if not again and finished(row, epsilon, seeds, lines):
            continue
        bar(place, len(cells), began, f"{row.name} at epsilon {number(epsilon)}")
        cell = measure(row, epsilon, seeds, data, canaries=canaries)
        lines = renewed(lines, line(row, epsilon, cell), ORDER)
        write(out, compared(lines, ROWS))
    bar(len(cells), len(cells), began, "done")


def collect(out: Path) -> None:
    """Writes the lines of the studies anew, from their committed CSVs."""
    lines = read(out)
    for study in STUDIES:
        lines = renewed(lines, study.line(), ORDER)
    write(out, compared(lines, ROWS))


def listed() -> str:
    """Returns a line a row."""
    here = [f"{row.name:<28}{row.method}, {row.problem.title}" for row in ROWS]
    there = [f"{study.name:<28}{study.method}, {study.data}: {study.command}" for study in STUDIES]
    return "\n".join([*here, *there])


def arguments(words: Sequence[str] | None) -> argparse.Namespace:
    """Returns the words of the command; refuses a row that is not there, before any work."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.reference", description=__doc__)
    parser.add_argument("action", choices=("list", "run", "page"))
    parser.add_argument("rows", nargs="*", metavar="ROW", help="as `list` names them; default all")
    parser.add_argument("--quick", action="store_true", help="one seed, few rounds, no canaries")
    parser.add_argument("--again", action="store_true", help="measure also what the CSV has")
    parser.add_argument("--data", type=Path, default=Path(os.environ.get("FEDMTL_DATA", DATA)))
    parser.add_argument("--out", type=Path, help="CSV; with --quick outputs/reference/quick.csv")
    found = parser.parse_args(words)
    names = {*BY_NAME, *(study.name for study in STUDIES)}
    unknown = [name for name in found.rows if name not in names]
    if unknown:
        parser.error(f"no row {', '.join(unknown)}; `list` names the rows")
    for name in found.rows:
        lacks = name in BY_NAME and missing(BY_NAME[name].problem, found.data)
        if lacks:
            parser.error(f"{name}: {lacks}")
    return found


def main(words: Sequence[str] | None = None) -> None:
    """Runs the command."""
    from .page import CSV, PAGE, PICTURE, draw, text

    given = arguments(words)
    if given.action == "list":
        print(listed())
        return
    out = given.out or CSV
    if given.action == "page":
        collect(out)
        PAGE.write_text(text(read(out)), encoding="utf-8")
        draw(PICTURE, read(out))
        return
    for study in STUDIES:
        if study.name in given.rows:
            print(f"{study.name} is the study's: {study.command}")
    rows = [row for row in ROWS if row.name in (given.rows or BY_NAME)]
    for problem in dict.fromkeys(row.problem for row in rows):
        lacks = missing(problem, given.data)
        if lacks:
            print(f"left out, {problem.title}: {lacks}", file=sys.stderr)
    rows = [row for row in rows if not missing(row.problem, given.data)]
    seeds: Sequence[int] = SEEDS
    if given.quick:
        rows = [row.quick() for row in rows]
        seeds = SEEDS[:1]
        out = given.out or QUICK
    run(rows, seeds, given.data, out, again=given.again, canaries=not given.quick)
    collect(out)


if __name__ == "__main__":
    main()
