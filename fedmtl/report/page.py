"""A run or a sweep as one page that needs nothing else: no network, no script, its pictures inside of it.

The numbers are those of the text report: the table is :func:`fedmtl.report.tables.table_of`, the privacy block
:meth:`fedmtl.privacy.PrivacyReport.rows`, and the pictures are the files of the run folder. ``page.html`` is a template
of jinja2, which escapes every text.
"""

from __future__ import annotations

import base64
import json
import math
import os
import shlex
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import quote

from .. import __version__
from .._files import read_json
from .._rounding import number_text, rounded_up
from ..errors import DataError
from ..privacy import PrivacyReport
from ._names import CHOICE_NOT_COVERED, UNITS, title_of
from ._settings import command_of, value_text
from .runs import SETTING, named_of, settings_of
from .tables import TITLE, data_text, grouped, main_metric, table_of

if TYPE_CHECKING:
    import pandas as pd

_PLOTS = {
    "private/accuracy.png": "The score in the course of the run, and the epsilon spent",
    "private/clients.png": "The score of each client, and who gains",
    "private/bands.png": "Percentile bands of the repetitions",
    "public/epsilon.png": "The epsilon spent in the course of the run",
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
    own = rows[~rows["comparison"]]
    first = own.iloc[0]
    where = f" on {first['data']}" if isinstance(first["data"], str) else ""
    plots = {name: words for name, words in _PLOTS.items() if (run / name).is_file()}
    if "private/accuracy.png" in plots:
        plots.pop("public/epsilon.png", None)  # which is its lower half
    file, command = run / "private" / "config.yaml", command_of(run)
    chosen = result.get("chosen") or {}
    shares = [(key.removeprefix("chose_"), value) for key, value in result.items() if key.startswith("chose_")]
    return _page(
        rows,
        title=f"{title_of(first['algorithm'])}{where}",
        sentence=_sentence(own, result),
        own=first["algorithm"],
        plots=[(_embedded(run / name), words) for name, words in plots.items()],
        privacy=_privacy_of(run),
        chosen=[(str(key), value_text(value)) for key, value in chosen.items()] if isinstance(chosen, Mapping) else [],
        chosen_by_clients="; ".join(f"{name} {float(share):.0%}" for name, share in shares),
        command=command,
        settings=file.read_text(encoding="utf-8")
        if file.is_file()
        else json.dumps(result.get("configuration"), indent=2),
        run=run,
        verify=shlex.join(["fedmtl", "verify", str(run)]),
    )


def sweep_page(
    rows: pd.DataFrame, unfinished: Sequence[Path], failed: Mapping[Path, str], figure: Path | None, target: Path
) -> str:
    """Return the page of several runs.

    Args:
        rows: from :func:`fedmtl.report.frame`.
        unfinished, failed: from :func:`fedmtl.report.runs.find_runs`.
        figure: the plot of the text report, if there is one.
        target: the folder of the page, from which links lead to the runs.
    """
    own = rows[~rows["comparison"]]
    facts = [own["algorithm"].map(title_of), own.apply(data_text, axis=1)]
    others = [(run, "failed", why) for run, why in failed.items()]
    others += [(run, "unfinished", "go on with " + shlex.join(["fedmtl", "resume", str(run)])) for run in unfinished]
    return _page(
        rows,
        title=f"A sweep: {rows['run'].nunique():,} finished, {len(failed):,} failed, {len(unfinished):,} unfinished",
        sentence="; ".join(filter(None, (", ".join(fact.unique()) for fact in facts))),
        plots=[] if figure is None else [(_embedded(figure), "The score against epsilon")],
        differences=_differences(own),
        choice=CHOICE_NOT_COVERED[0].upper() + CHOICE_NOT_COVERED[1:] + ".",
        runs=_runs(own, target),
        left_out=[(_link(run, target), str(run), what, why) for run, what, why in others],
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
        loader=folder, autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True
    )
    empty = dict.fromkeys(("own", "run", "privacy", "differences", "runs"))
    return templates.get_template("page.html").render(
        **empty | parts,
        version=__version__,
        note=TITLE,
        compared=bool(rows["comparison"].any()),
        table=table,
        algorithms=list(groups["algorithm"]),
        caption=caption,
    )


def _sentence(own: pd.DataFrame, result: Mapping[str, Any]) -> str:
    """Return what was run, in one sentence; ``own`` has a row for each repetition."""
    first = own.iloc[0]
    words = [data_text(first)]
    if first["rounds"]:
        words.append(f"{result.get('step', 'round')}s {first['rounds']:,.0f}")
    words += [f"repetitions {len(own):,}"] * (len(own) > 1) + [f"seed {first['seed'].split('.')[0]}"]
    if first["epsilon"] == 0:
        words.append("nothing is released, so epsilon is 0")
    elif first["epsilon"] == math.inf:
        words.append("epsilon is infinite, so nothing is protected")
    else:
        words.append(f"epsilon {_epsilons(own, ' or ')} protects {UNITS.get(first['unit'], first['unit'])}")
    return f"{'; '.join(filter(None, words))}."


def _runs(own: pd.DataFrame, target: Path) -> list[tuple[str, str, str, str | None]]:
    """Return of each run its link, its name, a line, and the link of its page, where it has one."""
    labels = grouped(own).explode("members").set_index("members")["label"]
    lines = []
    for name, rows in own.groupby("run", sort=False):
        run, first = Path(str(name)), rows.iloc[0]
        text = f": {labels[rows.index[0]]}, epsilon {_epsilons(rows, ', ')}, seed {first['seed'].split('.')[0]}"
        metric = main_metric(rows)
        if len(rows) > 1:
            text += f", {len(rows):,} repetitions"
        elif metric is not None:
            text += f", {metric.replace('_', ' ')} {number_text(first[metric])}"
        page = run / "private" / "report" / "report.html"
        lines.append((_link(run, target), str(name), text, _link(page, target) if page.is_file() else None))
    return lines


def _differences(own: pd.DataFrame) -> dict[str, str]:
    """Return what differs between the runs, with its values: method, epsilon, what the command lines named or what has
    several values, and seeds."""
    named = named_of(own)
    columns = {"algorithm": own["algorithm"].map(title_of), "epsilon": own["epsilon"].map(lambda e: rounded_up(e, 3))}
    for key in settings_of(own):
        if own[key].nunique() > 1 or (key in named and own[key].nunique(dropna=False) > 1):
            columns.setdefault(key.removeprefix(SETTING), own[key].fillna("none"))
    texts = {key: list(dict.fromkeys(values)) for key, values in (columns | {"seed": own["seed"]}).items()}
    return {key: ", ".join(values) for key, values in texts.items() if len(values) > 1}


def _epsilons(rows: pd.DataFrame, between: str) -> str:
    return between.join(dict.fromkeys(rounded_up(epsilon, 3) for epsilon in rows["epsilon"]))


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
