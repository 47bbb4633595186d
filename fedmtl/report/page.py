"""A run or a sweep as one page that needs nothing else: no network, no script, its pictures inside of it.

The numbers are those of the text report: the table is :func:`fedmtl.report.tables.table_of`, the privacy block
:meth:`fedmtl.privacy.PrivacyReport.rows`, and the pictures are the files of the run folder. ``page.html`` is a template
of jinja2, which escapes every text, and writes out what cannot be printed.
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
    "private/bands.png": "Percentile bands of the repetitions",
}


def run_page(run: Path, rows: pd.DataFrame) -> str:
    """Return the page of one finished run.

    Args:
        run: its folder.
        rows: of the run, from :func:`fedmtl.report.frame`.

    Raises:
        DataError: a file that cannot be read.
    """
    result = read_json(run / "private" / "result.json")
    first, runs = rows.iloc[0], int((~rows["comparison"]).sum())
    facts = {"data": data_text(first), "seed": first["seed"].partition(".")[0]}
    facts |= {f"{result.get('step', 'round')}s": f"{first['rounds']:,.0f}"} if first["rounds"] else {}
    facts |= {"repetitions": f"{runs:,}"} if runs > 1 else {}
    chosen = result.get("chosen") or {}
    shares = {key.removeprefix("chose_"): value for key, value in result.items() if key.startswith("chose_")}
    file = run / "private" / "config.yaml"
    settings = file.read_text(encoding="utf-8") if file.is_file() else json.dumps(result.get("configuration"), indent=2)
    return _page(
        rows,
        title=" on ".join(filter(None, (title_of(first["algorithm"]), first["data"]))),
        label=first["label"],
        facts=facts,
        plots={_embedded(run / name): words for name, words in _PLOTS.items() if (run / name).is_file()},
        run=run,
        privacy=_privacy_of(run),
        chosen={str(key): value_text(value) for key, value in chosen.items()},
        verdict=str(result.get("verdict") or ""),
        chosen_by_clients="; ".join(f"{name} {float(share):.0%}" for name, share in shares.items()),
        command=command_of(run),
        settings=settings,
        verify=shlex.join(["fedmtl", "verify", str(run)]),
    )


def sweep_page(rows: pd.DataFrame, left_out: Mapping[Path, str], figure: Path | None, target: Path) -> str:
    """Return the page of several runs.

    Args:
        rows: from :func:`fedmtl.report.frame`.
        left_out: runs without a result, each with the reason.
        figure: the plot of the text report, if there is one.
        target: the folder of the page, from which links lead to the runs.
    """
    main = rows[~rows["comparison"]]
    columns = {"method": main["algorithm"].map(title_of), "data": main.apply(data_text, axis=1)}
    columns["epsilon"] = main["epsilon"].map(lambda epsilon: rounded_up(epsilon, 3))
    columns |= {key.removeprefix(SETTING): main[key].dropna() for key in differing(main)} | {"seed": main["seed"]}
    pages = {name: Path(name) / "private" / "report" / "report.html" for name in main["run"]}
    metric = main_metric(main)
    runs = main.assign(score="" if metric is None else main[metric].map(number_text), epsilon=columns["epsilon"])
    return _page(
        rows,
        title=f"A sweep: {main['run'].nunique():,} finished, {len(left_out):,} left out",
        facts={key: ", ".join(values.unique()) for key, values in columns.items()},
        plots={} if figure is None else {_embedded(figure): "The score against epsilon"},
        run=None,
        label=None,
        choice=CHOICE_NOT_COVERED,
        metric=metric,
        runs=runs.to_dict("records"),
        links={name: _link(Path(name), target) for name in main["run"]},
        pages={name: _link(page, target) for name, page in pages.items() if page.is_file()},
        left_out={_link(run, target): (run, why) for run, why in left_out.items()},
    )


def _page(rows: pd.DataFrame, **parts: Any) -> str:
    from jinja2 import Environment, FileSystemLoader, StrictUndefined

    groups = grouped(rows)
    table, caption = table_of(groups)
    if "worst tenth" in table:
        caption.append(
            "worst tenth: mean over the tenth of the clients with the worst scores; spread: standard deviation"
        )
    folder = FileSystemLoader(Path(__file__).parent)
    templates = Environment(
        loader=folder,
        autoescape=True,
        undefined=StrictUndefined,
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
    """Return what the page has of a value: a text without characters that steer a terminal or turn its direction."""
    if isinstance(value, Path):
        value = str(value)
    return shown_lines(value) if type(value) is str else value


def _privacy_of(run: Path) -> PrivacyReport | None:
    file = run / "public" / "privacy.json"
    if not file.is_file():
        return None
    try:
        return PrivacyReport.from_dict(read_json(file))
    except (TypeError, ValueError) as error:
        raise DataError(f"{file} is no privacy report: {error}.") from error


def _embedded(path: Path) -> str:
    """Return a picture as the address of itself."""
    return f"data:image/png;base64,{base64.b64encode(path.read_bytes()).decode()}"


def _link(path: Path, start: Path) -> str:
    return quote(Path(os.path.relpath(path, start)).as_posix()) + ("/" if path.is_dir() else "")
