"""A run or a sweep as one page that needs nothing else: no network, no script, its pictures inside of it.

The numbers are those of the text report: the table is :func:`fedmtl.report.tables.printed`, the privacy block
:meth:`fedmtl.privacy.PrivacyReport.rows`, and the pictures are the files of the run folder. Every text is escaped by
:func:`tag`, which takes all of it for text but what it has made itself.
"""

from __future__ import annotations

import base64
import json
import math
import os
import shlex
from collections.abc import Iterable, Mapping, Sequence
from html import escape
from pathlib import Path
from typing import Any
from urllib.parse import quote

from .. import __version__
from .._files import read_json
from .._rounding import number_text, rounded_up
from ..errors import DataError
from ..privacy import PrivacyReport
from ._names import CHOICE_NOT_COVERED, UNITS, title_of
from ._settings import command_of, value_text
from .tables import EPSILON, TITLE, Group, Printed, Row, group, labels, main_metric, printed, than_local, varying

PRIVATE = "This page holds private numbers"
_WHY = "scores on the clients' test data, which no epsilon covers. Keep it with the private/ folders it comes from."
_PLOTS = {
    "private/accuracy.png": "The score in the course of the run, and the epsilon spent",
    "private/clients.png": "The score of each client, and who gains",
    "private/bands.png": "Percentile bands of the repetitions",
    "public/epsilon.png": "The epsilon spent in the course of the run",
}
_STYLE = """
:root { color-scheme: light dark; --ink: #1f2430; --muted: #5c6370; --page: #fff; --card: #f5f6f8; --line: #dcdfe4;
  --accent: #0072b2; --better: #0072b2; --equal: #b9bec7; --worse: #e69f00; --warn: #fff3d6; --warn-line: #d9a400; }
@media (prefers-color-scheme: dark) { :root { --ink: #e6e8ec; --muted: #a2a9b4; --page: #14171c; --card: #1e2229;
  --line: #363c46; --accent: #6cb8ea; --better: #3d93cc; --equal: #5b636f; --worse: #cf9212; --warn: #3a2f10;
  --warn-line: #a37c0a; } img { filter: invert(0.92) hue-rotate(180deg); mix-blend-mode: lighten; } }
* { box-sizing: border-box; }
body { margin: 0 auto; padding: 1.2rem 1rem 3rem; max-width: 68rem; background: var(--page); color: var(--ink);
  font: 16px/1.5 system-ui, -apple-system, "Segoe UI", Roboto, sans-serif; overflow-wrap: anywhere; }
h1 { font-size: 1.7rem; line-height: 1.2; margin: 0.6rem 0; } h2 { font-size: 1.15rem; margin: 2.2rem 0 0.6rem; }
p { margin: 0.5rem 0; max-width: 46rem; } a { color: var(--accent); }
.private { background: var(--warn); border-left: 4px solid var(--warn-line); padding: 0.6rem 0.9rem; max-width: none; }
.note { color: var(--muted); font-size: 0.88rem; }
.wide { overflow-x: auto; } table { border-collapse: collapse; font-variant-numeric: tabular-nums; width: 100%; }
th, td { padding: 0.35rem 0.7rem; border-bottom: 1px solid var(--line); text-align: right; white-space: nowrap; }
th { color: var(--muted); font-weight: 500; font-size: 0.85rem; vertical-align: bottom; }
.text { text-align: left; } th:first-child, td:first-child { text-align: left; padding-left: 0; position: sticky;
  left: 0; background: var(--page); white-space: normal; min-width: 8rem; overflow-wrap: normal; }
.own td { font-weight: 600; }
.bar { display: flex; height: 1.3rem; border-radius: 3px; overflow: hidden; background: var(--card); }
.bar span { display: block; } .better { background: var(--better); } .equal { background: var(--equal); }
.worse { background: var(--worse); } .key span { display: inline-block; width: 0.8rem; height: 0.8rem;
  border-radius: 2px; margin: 0 0.35rem 0 0.9rem; vertical-align: -0.05rem; } .key span:first-child { margin-left: 0; }
.shares { display: grid; grid-template-columns: minmax(7rem, 16rem) 1fr 6rem; gap: 0.5rem 0.9rem; align-items: center; }
.shares .number { text-align: right; font-variant-numeric: tabular-nums; }
figure { margin: 1rem 0; } img { max-width: 100%; height: auto; border-radius: 4px; }
figcaption { color: var(--muted); font-size: 0.88rem; }
dl { display: grid; grid-template-columns: minmax(9rem, max-content) 1fr; gap: 0.35rem 1rem; }
dt { color: var(--muted); } dd { margin: 0; }
pre { background: var(--card); padding: 0.7rem 0.9rem; overflow-x: auto; border-radius: 4px; font-size: 0.85rem;
  white-space: pre-wrap; } summary { cursor: pointer; color: var(--accent); } ul.runs { list-style: none; padding: 0; }
.runs li { padding: 0.35rem 0; border-bottom: 1px solid var(--line); } .bad { color: #c1272d; font-weight: 600; }
@media (prefers-color-scheme: dark) { .bad { color: #ff8a80; } }
@media (max-width: 34rem) { dl { grid-template-columns: 1fr; gap: 0; } dd { margin-bottom: 0.6rem; }
  img { max-width: none; width: 38rem; } .shares { display: block; } .shares > div { margin-bottom: 0.2rem; }
  .shares .number { text-align: left; margin-bottom: 0.8rem; } body { padding: 0.8rem 0.8rem 2rem; }
  h1 { font-size: 1.4rem; } }
"""


class Markup(str):
    """Text that is HTML already."""


def tag(name: str, /, *children: str, **attributes: str) -> Markup:
    """Return an element; children and attributes are escaped unless they are :class:`Markup`. ``class_`` is the
    attribute ``class``; an element without an end has no children."""
    given = "".join(f' {key.rstrip("_")}="{escape(value)}"' for key, value in attributes.items())
    if name in ("img", "meta"):
        return Markup(f"<{name}{given}>")
    return Markup(f"<{name}{given}>{joined(children)}</{name}>")


def joined(children: Iterable[str]) -> Markup:
    """Return several pieces as one, escaped unless they are :class:`Markup`."""
    return Markup("".join(one if isinstance(one, Markup) else escape(one) for one in children))


def run_page(run: Path, rows: Sequence[Row]) -> str:
    """Return the page of one finished run.

    Args:
        run: its folder.
        rows: of the run, from :func:`fedmtl.report.tables.collect`.

    Raises:
        DataError: a file that cannot be read.
    """
    result = read_json(run / "private" / "result.json")
    own = [row for row in rows if not row.comparison]
    groups = group(rows)
    privacy = _privacy_of(run)
    what = title_of(own[0].algorithm)
    settings = dict(own[0].settings)
    where = f" on {settings['data']}" if "data" in settings else ""
    plots = [name for name in _PLOTS if (run / name).is_file()]
    if "private/accuracy.png" in plots and "public/epsilon.png" in plots:
        plots.remove("public/epsilon.png")  # which is its lower half
    pictures = [_figure(run / name, _PLOTS[name]) for name in plots]
    body = [
        tag("h1", f"{what}{where}"),
        tag("p", _sentence(own, result, what, where)),
        *_scores(groups, own[0].algorithm, compared=len(own) < len(rows)),
        *_beside_local(groups),
        *([tag("h2", "Plots"), *pictures] if pictures else []),
        *(_privacy_block(privacy) if privacy is not None else []),
        *_tuned(result),
        *_repeat(run, result),
    ]
    return _page(f"{what}{where}", body)


def sweep_page(
    rows: Sequence[Row], unfinished: Sequence[Path], failed: Mapping[Path, str], figure: Path | None, target: Path
) -> str:
    """Return the page of several runs.

    Args:
        rows, unfinished, failed: from :func:`fedmtl.report.tables.collect`.
        figure: the plot of the text report, if there is one.
        target: the folder of the page, from which links lead to the runs.
    """
    groups = group(rows)
    runs = list(dict.fromkeys(row.run for row in rows))
    methods = list(dict.fromkeys(title_of(row.algorithm) for row in rows if not row.comparison))
    data = list(dict.fromkeys(one.data for one in groups if one.data))
    what = f"A sweep of {len(runs):,} run{'s' * (len(runs) != 1)}"
    sentence = f"{' and '.join(methods)}{' on ' + '; '.join(data) if data else ''}."
    left = [("failed", len(failed)), ("unfinished", len(unfinished))]
    rest = ", ".join(f"{count:,} {word}" for word, count in left if count)
    body = [
        tag("h1", what),
        tag("p", sentence, f" Left out: {rest}; see the list of runs." if rest else ""),
        *_scores(groups, compared=any(row.comparison for row in rows)),
        *([tag("h2", "Plots"), _figure(figure, "The score against epsilon")] if figure is not None else []),
        *_beside_local(groups),
        tag("h2", "What was tuned, or differs between the runs"),
        _list((key, ", ".join(values)) for key, values in _differences(rows).items()),
        tag("p", CHOICE_NOT_COVERED[0].upper() + CHOICE_NOT_COVERED[1:] + "."),
        tag("p", "An epsilon is that of one run; what it rests on is in the report of that run.", class_="note"),
        tag("h2", "Runs"),
        _runs(rows, unfinished, failed, target),
    ]
    return _page(what, body)


def _page(title: str, body: Sequence[str]) -> str:
    head = tag(
        "head",
        tag("meta", charset="utf-8"),
        tag("meta", name="viewport", content="width=device-width, initial-scale=1"),
        tag("title", title),
        tag("style", Markup(_STYLE)),
    )
    notice = tag("p", tag("strong", PRIVATE), f": {_WHY}", class_="private")
    foot = tag("p", f"Made by fedmtl {__version__} from the files of the run folders alone.", class_="note")
    return f"<!doctype html>\n{tag('html', head, tag('body', notice, tag('main', *body), foot), lang='en')}\n"


def _sentence(own: Sequence[Row], result: Mapping[str, Any], what: str, where: str) -> str:
    """Return what was run, in one sentence; ``own`` has a row for each repetition."""
    first, step = own[0], str(result.get("step", "round"))
    rounds = f" in {first.rounds:,} {step}{'s' * (first.rounds != 1)}" if isinstance(first.rounds, int) else ""
    clients = result.get("clients")
    who = f" for {clients:,} clients" if isinstance(clients, int) else ""
    ended = {"budget": ", until the privacy budget was spent", "early": ", stopped early"}.get(first.stopped, "")
    times = f", {len(own):,} times" if len(own) > 1 else ""
    if first.epsilon == 0:
        paid = "nothing is released, so epsilon is 0"
    elif first.epsilon == math.inf:
        paid = "epsilon is infinite, so nothing is protected"
    else:
        at = "" if first.delta is None else f" at delta {rounded_up(first.delta, 3)}"
        epsilons = " or ".join(dict.fromkeys(rounded_up(row.epsilon, 3) for row in own))
        paid = f"the unit that epsilon {epsilons}{at} protects is {UNITS.get(first.unit, first.unit)}"
    return f"{what} made models{who}{where}{rounds}{ended}{times}, with seed {first.seed.split('.')[0]}; {paid}."


def _scores(groups: Sequence[Group], own: str = "", *, compared: bool) -> list[Markup]:
    """Return the table of the text report, with what its columns mean; the lines of the method ``own`` stand out.
    ``compared``: whether there are baselines."""
    shown: Printed = printed(groups)
    places = [0, EPSILON, *sorted([*shown.others, *shown.common]), *shown.asked]
    titles = [tag("th", shown.titles[place], class_="text" if place < EPSILON else "number") for place in places]
    lines = []
    for one, line in zip(groups, shown.lines, strict=True):
        cells = [tag("td", line[place], class_="text" if place < EPSILON else "number") for place in places]
        lines.append(tag("tr", *cells, class_="own" if one.algorithm == own else "other"))
    table = tag("table", tag("thead", tag("tr", *titles)), tag("tbody", *lines))
    meaning = "worst tenth: mean over the tenth of the clients with the worst scores; spread: standard deviation"
    words = [*shown.caption, *([meaning] if "worst tenth" in shown.titles else [])]
    return [
        tag("h2", "Result, with baselines" if compared else "Result"),
        tag("p", TITLE + (". Baselines are not released." if compared else "."), class_="note"),
        tag("div", table, class_="wide"),
        *(tag("p", text, class_="note") for text in words),
    ]


def _beside_local(groups: Sequence[Group]) -> list[Markup]:
    """Return a bar for each group of the shares of clients that are better, equally and worse off than alone."""
    lines: list[Markup] = []
    for one, label in zip(groups, labels(groups), strict=True):
        shares = than_local(one)
        if not shares or one.algorithm == "local":
            continue
        name = label if one.epsilon in (0.0, math.inf) else f"{label}, epsilon {rounded_up(one.epsilon, 3)}"
        words = ("better", "equal", "worse")
        bar = [tag("span", class_=word, style=f"width:{share:.1%}") for word, share in zip(words, shares, strict=True)]
        numbers = "/".join(f"{100 * share:.0f}" for share in shares) + " %"
        lines += [tag("div", name), tag("div", *bar, class_="bar"), tag("div", numbers, class_="number")]
    if not lines:
        return []
    key = [part for word in ("better", "equal", "worse") for part in (tag("span", class_=word), word)]
    return [
        tag("h2", "Clients that are better, equally and worse off than alone"),
        tag("p", *key, class_="note key"),
        tag("div", *lines, class_="shares"),
    ]


def _privacy_block(privacy: PrivacyReport) -> list[Markup]:
    """Return the privacy report: its headline, whether it may be published, who is trusted, and its rows."""
    rows = [("publication", f"public/: {privacy.publication}"), ("trusted", privacy.trusted), *privacy.rows()]
    return [tag("h2", "Privacy"), tag("p", tag("strong", privacy.headline)), _list(rows)]


def _tuned(result: Mapping[str, Any]) -> list[Markup]:
    """Return which settings a run chose by itself, and what is said of the others."""
    chosen = result.get("chosen") or {}
    rows = [(str(key), value_text(value)) for key, value in chosen.items()] if isinstance(chosen, Mapping) else []
    shares = [(key.removeprefix("chose_"), value) for key, value in result.items() if key.startswith("chose_")]
    text = (
        "Chosen from public rows and bounds, at no epsilon:"
        if rows
        else "This run chose no setting by itself; all were given."
    )
    own = "; ".join(f"{name} {float(share):.0%}" for name, share in shares)
    return [
        tag("h2", "What was tuned"),
        tag("p", text),
        *([_list(rows)] if rows else []),
        *([tag("p", f"Chosen by each client on its own validation records: {own}.")] if own else []),
        tag("p", "Where settings were chosen by scores on these data, no epsilon covers the choice.", class_="note"),
    ]


def _repeat(run: Path, result: Mapping[str, Any]) -> list[Markup]:
    """Return the command of the run and its configuration."""
    file = run / "private" / "config.yaml"
    command = command_of(run)
    if command is None:
        again: list[Markup] = [tag("p", "The run was made by a program, with the settings below.")]
    else:
        again = [tag("pre", command)]
    text = file.read_text(encoding="utf-8") if file.is_file() else json.dumps(result.get("configuration"), indent=2)
    return [
        tag("h2", "To repeat it"),
        *again,
        tag("details", tag("summary", "All settings"), tag("pre", text)),
        tag("p", f"The files of the run are in {run}; they are checked by", class_="note"),
        tag("pre", shlex.join(["fedmtl", "verify", str(run)])),
    ]


def _runs(rows: Sequence[Row], unfinished: Sequence[Path], failed: Mapping[Path, str], target: Path) -> Markup:
    """Return a line for each run, with links to its folder and to its page, where it has one."""
    own: dict[str, list[Row]] = {}
    for row in rows:
        if not row.comparison:
            own.setdefault(row.run, []).append(row)
    groups = group([row for row in rows if not row.comparison])
    named = {_kind(one): label for one, label in zip(groups, labels(groups), strict=True)}
    lines: list[Markup] = []
    for name, found in own.items():
        run, first = Path(name), found[0]
        epsilons = ", ".join(dict.fromkeys(rounded_up(row.epsilon, 3) for row in found))
        text = f": {named[_kind(group([first])[0])]}, epsilon {epsilons}, seed {first.seed.split('.')[0]}"
        metrics = dict(first.metrics)
        metric = main_metric(set(metrics) - set(first.asked))
        if len(found) > 1:
            text += f", {len(found):,} repetitions"
        elif metric in metrics:
            text += f", {metric.replace('_', ' ')} {number_text(metrics[metric])}"
        page = run / "private" / "report" / "report.html"
        more = [" (", tag("a", "its report", href=_link(page, target)), ")"] if page.is_file() else []
        lines.append(tag("li", tag("a", name, href=_link(run, target)), text, *more))
    lines += [_left_out(run, "failed", why, target) for run, why in failed.items()]
    lines += [
        _left_out(run, "unfinished", "go on with " + shlex.join(["fedmtl", "resume", str(run)]), target)
        for run in unfinished
    ]
    return tag("ul", *lines, class_="runs")


def _kind(one: Group) -> tuple[Any, ...]:
    """Return what the rows of a group have in common."""
    return one.algorithm, one.unit, one.settings, round(one.epsilon, 6), one.delta


def _left_out(run: Path, what: str, why: str, target: Path) -> Markup:
    return tag("li", tag("a", str(run), href=_link(run, target)), ": ", tag("span", what, class_="bad"), f", {why}")


def _differences(rows: Sequence[Row]) -> dict[str, list[str]]:
    """Return what differs between the runs, with its values: method, epsilon, what the command lines named or what has
    several values, and seeds."""
    own = [row for row in rows if not row.comparison]
    named = {key for row in own for key in row.named or ()}
    settings = {key: values for key, values in varying(own).items() if len(set(values) - {None}) > 1 or key in named}
    columns: dict[str, Iterable[str | None]] = {
        "algorithm": [title_of(row.algorithm) for row in own],
        "epsilon": [rounded_up(row.epsilon, 3) for row in own],
        **{key: values for key, values in settings.items() if key != "algorithm"},
        "seed": [row.seed for row in own],
    }
    found = {key: [one or "none" for one in dict.fromkeys(values)] for key, values in columns.items()}
    return {key: values for key, values in found.items() if len(values) > 1}


def _privacy_of(run: Path) -> PrivacyReport | None:
    file = run / "public" / "privacy.json"
    if not file.is_file():
        return None
    try:
        return PrivacyReport.from_dict(read_json(file))
    except (TypeError, ValueError) as error:
        raise DataError(f"{file} is no privacy report: {error}.") from error


def _list(rows: Iterable[tuple[str, str]]) -> Markup:
    return tag("dl", *(part for name, text in rows for part in (tag("dt", name), tag("dd", text))))


def _figure(path: Path, words: str) -> Markup:
    """Return a picture that is inside of the page."""
    data = base64.b64encode(path.read_bytes()).decode()
    picture = tag("img", src=f"data:image/png;base64,{data}", alt=words)
    return tag("figure", tag("div", picture, class_="wide"), tag("figcaption", words + "."))


def _link(path: Path, start: Path) -> str:
    return quote(Path(os.path.relpath(path, start)).as_posix()) + ("/" if path.is_dir() else "")
