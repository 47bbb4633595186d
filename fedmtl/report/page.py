"""A run or a sweep as one page without network or scripts, its pictures inside of it.

The numbers are those of the text report. The table is :func:`fedmtl.report.tables.table_of`, the
privacy block is :meth:`fedmtl.privacy.PrivacyReport.rows`, and the pictures are the files of the
run folder. ``page.html`` is a template of jinja2: it escapes every text and writes out characters
that cannot be printed.
"""

from __future__ import annotations

import base64
import json
import os
import shlex
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import quote

from .. import __version__
from .._extras import jinja2
from .._files import read_json
from .._rounding import number_text, rounded_up
from .._text import shown_lines
from ..errors import DataError
from ..privacy import PrivacyReport
from ._names import CHOICE_NOT_COVERED, title_of
from ._settings import command_of, value_text
from .runs import SETTING, differing
from .tables import TITLE, data_text, grouped, main_metric, table_of

if TYPE_CHECKING:
    import pandas as pd

_PLOTS = {
    "private/accuracy.png": "The score in the course of the run, and the epsilon spent",
    "private/clients.png": "The score of each client, and who gains",
    "private/bands.png": "Percentile bands of the replicates",
}


def run_page(run: Path, rows: pd.DataFrame) -> str:
    """Returns the page of one finished run as HTML.

    Args:
        run: its folder.
        rows: of the run, from :func:`fedmtl.report.frame`.

    Raises:
        DataError: a file cannot be read.
    """
    result = read_json(run / "private" / "result.json")
    first = rows.iloc[0]  # the run itself; baselines follow
    # the pictures of a run were written by its end, as far as it had anything to draw
    plots = {}
    for name, words in _PLOTS.items():
        if (run / name).is_file():
            plots[_embedded(run / name)] = words
    title = [text for text in (title_of(first["algorithm"]), first["data"]) if text]
    chosen = result.get("chosen") or {}
    return _page(
        rows,
        title=" on ".join(title),
        label=first["label"],
        facts=_facts(result, rows),
        plots=plots,
        run=run,
        privacy=_privacy_of(run),
        chosen={str(key): value_text(value) for key, value in chosen.items()},
        verdict=str(result.get("verdict") or ""),
        chosen_by_clients=_chosen_by_clients(result),
        command=command_of(run),
        settings=_settings_text(run, result),
        verify=shlex.join(["fedmtl", "verify", str(run)]),
    )


def sweep_page(
    rows: pd.DataFrame, left_out: Mapping[Path, str], figure: Path | None, target: Path
) -> str:
    """Returns the page of several runs as HTML.

    Args:
        rows: from :func:`fedmtl.report.frame`.
        left_out: runs without a result, each with the reason.
        figure: the plot of the text report, if there is one.
        target: the folder of the page, from which links lead to the runs.
    """
    main = rows[~rows["comparison"]]
    columns = _columns_of_sweep(main)
    metric = main_metric(main)
    scores: Any = ""
    if metric is not None:
        scores = main[metric].map(number_text)
    runs = main.assign(score=scores, epsilon=columns["epsilon"])
    plots = {}
    if figure is not None:
        plots[_embedded(figure)] = "The score against epsilon"
    # links to the pages that reports of single runs have written before
    pages = {}
    for name in main["run"]:
        page = Path(name) / "private" / "report" / "report.html"
        if page.is_file():
            pages[name] = _link(page, target)
    return _page(
        rows,
        title=f"A sweep: {main['run'].nunique():,} finished, {len(left_out):,} left out",
        facts={key: ", ".join(values.unique()) for key, values in columns.items()},
        plots=plots,
        run=None,
        label=None,
        choice=CHOICE_NOT_COVERED,
        metric=metric,
        runs=runs.to_dict("records"),
        links={name: _link(Path(name), target) for name in main["run"]},
        pages=pages,
        left_out={_link(run, target): (run, why) for run, why in left_out.items()},
    )


def _facts(result: Mapping[str, Any], rows: pd.DataFrame) -> dict[str, str]:
    """Returns the facts in the head of a run's page, by their names."""
    first = rows.iloc[0]
    facts = {"data": data_text(first), "seed": first["seed"].partition(".")[0]}
    if first["rounds"]:
        # a step is a round or an activation, as the schedule calls it
        facts[f"{result.get('step', 'round')}s"] = f"{first['rounds']:,.0f}"
    replicates = int((~rows["comparison"]).sum())
    if replicates > 1:
        facts["replicates"] = f"{replicates:,}"
    return facts


def _chosen_by_clients(result: Mapping[str, Any]) -> str:
    """Returns the shares of clients by the model that they chose; empty if they had no choice."""
    shares = []
    for key, share in result.items():
        if key.startswith("chose_"):
            shares.append(f"{key.removeprefix('chose_')} {float(share):.0%}")
    return "; ".join(shares)


def _settings_text(run: Path, result: Mapping[str, Any]) -> str:
    """Returns the configuration: the file of the command, or JSON of a program's objects."""
    file = run / "private" / "config.yaml"
    if file.is_file():
        return file.read_text(encoding="utf-8")
    return json.dumps(result.get("configuration"), indent=2)


def _columns_of_sweep(main: pd.DataFrame) -> dict[str, pd.Series]:
    """Returns the facts by which the runs of a sweep differ, a text for each run that has one."""
    columns = {"method": main["algorithm"].map(title_of), "data": main.apply(data_text, axis=1)}
    columns["epsilon"] = main["epsilon"].map(_epsilon_text)
    # a sweep is a comparison of the settings that differ
    for key in differing(main):
        columns[key.removeprefix(SETTING)] = main[key].dropna()
    columns["seed"] = main["seed"]
    return columns


def _epsilon_text(epsilon: float) -> str:
    return rounded_up(epsilon, 3)


def _page(rows: pd.DataFrame, **parts: Any) -> str:
    groups = grouped(rows)
    table, caption = table_of(groups)
    if "worst tenth" in table:
        worst = "worst tenth: mean over the tenth of the clients with the worst scores"
        caption.append(f"{worst}; spread: standard deviation")
    folder = jinja2.FileSystemLoader(Path(__file__).parent)
    # texts of a run folder may come from anyone: all of them are escaped, and a misspelt name fails
    templates = jinja2.Environment(
        loader=folder,
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        finalize=_finalized,
    )
    return templates.get_template("page.html").render(
        **parts,
        version=__version__,
        note=TITLE,
        compared=bool(rows["comparison"].any()),
        table=table,
        caption=caption,
    )


def _finalized(value: Any) -> Any:
    """Returns a value as the page has it.

    A text loses the characters that steer a terminal or turn its direction.
    """
    if isinstance(value, Path):
        value = str(value)
    # a text that jinja2 has marked as safe is of a subclass, and stays
    if type(value) is not str:
        return value
    return shown_lines(value)


def _privacy_of(run: Path) -> PrivacyReport | None:
    file = run / "public" / "privacy.json"
    if not file.is_file():
        return None
    try:
        return PrivacyReport.from_dict(read_json(file))
    except (TypeError, ValueError) as error:
        raise DataError(f"{file} is no privacy report: {error}.") from error


def _embedded(path: Path) -> str:
    """Returns a picture as a data URL."""
    content = base64.b64encode(path.read_bytes()).decode()
    return f"data:image/png;base64,{content}"


def _link(path: Path, start: Path) -> str:
    """Returns the relative address of ``path`` from ``start``; a folder's ends with a slash."""
    address = quote(Path(os.path.relpath(path, start)).as_posix())
    if path.is_dir():
        return address + "/"
    return address
