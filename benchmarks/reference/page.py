"""The page and the picture, made of the CSV and of nothing else."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from fedmtl.report.canvas import drawing, legend_above

from .settings import CONFIDENCE, EPSILONS, NO_NOISE, NOTHING_SENT

Line = Mapping[str, str]
HERE = Path(__file__).parent
CSV = HERE / "reference.csv"
PICTURE = HERE / "reference.png"
PAGE = HERE.parents[1] / "docs" / "pages" / "reference.md"
WORDS = HERE / "page.md"
TRUSTS = {
    "none": "nobody",
    "trusted": "server",
    "secure": "nobody: secure sums",
    "local": "nobody: own noise",
}
"""Who must be trusted, by the word of the CSV."""
_DASHES = {"trusted": "-", "secure": "--", "local": ":", "none": "-"}


def table(titles: Sequence[str], lines: Sequence[Sequence[str]]) -> str:
    """Returns a table; columns whose title ends in a colon are of numbers."""
    rule = ["---:" if title.endswith(":") else "---" for title in titles]
    shown = [[title.rstrip(":") for title in titles], rule, *lines]
    return "".join("| " + " | ".join(line) + " |\n" for line in shown)


def measured(lines: Sequence[Line]) -> list[Line]:
    """Returns the lines that were measured here."""
    return [one for one in lines if one["settings"]]


def outside(lines: Sequence[Line]) -> list[Line]:
    """Returns the lines with figures from outside."""
    return [one for one in lines if not one["settings"]]


def by(lines: Sequence[Line], *names: str) -> dict[tuple[str, ...], list[Line]]:
    """Returns the lines in groups of equal texts, in their order."""
    found: dict[tuple[str, ...], list[Line]] = {}
    for one in lines:
        found.setdefault(tuple(one[name] for name in names), []).append(one)
    return found


def shown(one: Line, name: str) -> str:
    """Returns a score as the page prints it: accuracies as they are, errors times 1,000."""
    text = one[name]
    if not text:
        return ""
    if one["metric"] == "accuracy":
        return f"{float(text):.3f}".replace("0.", ".", 1)
    return f"{1000 * float(text):.2f}"


def mark(one: Line, name: str) -> str:
    """Returns ▲ or ▼ if the 95% interval of a paired difference leaves out 0, else a dot."""
    gain, half = one[f"gain_{name}"], one[f"gain_{name}_half"]
    if not gain or not half:
        return ""
    if abs(float(gain)) <= float(half):
        return "·"
    if float(gain) > 0:
        return "▲"
    return "▼"


def score(one: Line | None) -> str:
    """Returns a cell of the first table."""
    if one is None:
        return ""
    text = shown(one, "mean")
    if one["half"]:
        text += f" ± {shown(one, 'half')}"
    return f"{text} {mark(one, 'local')}{mark(one, 'fedavg')}".strip()


def at(lines: Sequence[Line], epsilon: float) -> Line | None:
    """Returns the line of an epsilon."""
    return next((one for one in lines if float(one["epsilon"]) == epsilon), None)


def scores(lines: Sequence[Line]) -> str:
    """Returns the tables of scores, one for each data set and unit."""
    parts = []
    for (data, unit), own in by(measured(lines), "data", "unit").items():
        if unit == "none":
            continue
        alone = [one for one in lines if one["data"] == data and one["unit"] == "none"]
        body = []
        for (name,), cells in by([*alone, *own], "row").items():
            first = cells[0]
            sent = at(cells, NOTHING_SENT)
            columns = [at(cells, epsilon) or sent for epsilon in (*EPSILONS, NO_NOISE)]
            body.append(
                [f"`{name}`", first["method"], TRUSTS[first["trust"]], first["turns"]]
                + [score(one) for one in columns]
            )
        metric = "accuracy, higher is better"
        if own[0]["metric"] != "accuracy":
            metric = "squared error times 1,000, lower is better"
        titles = ["row", "method", "must be trusted", "who acts"]
        titles += [f"epsilon {epsilon:g}:" for epsilon in EPSILONS] + ["no noise:"]
        heading = f"### {data}, epsilon of a {unit}\n\nMean {metric}.\n\n"
        parts.append(heading + table(titles, body))
    return "\n".join(parts)


def findings(lines: Sequence[Line]) -> str:
    """Returns a table of the best row of each epsilon, and of how many are better than Local."""
    body = []
    for (data, unit), own in by(measured(lines), "data", "unit").items():
        if unit == "none":
            continue
        in_order = sorted(own, key=lambda one: float(one["epsilon"]))
        for cells in by(in_order, "epsilon").values():
            sign = 1.0
            if cells[0]["larger"] == "0":
                sign = -1.0
            best = max(cells, key=lambda one: sign * float(one["mean"]))
            marks = [mark(one, "local") for one in cells]
            count = f"{marks.count('▲')} / {marks.count('·')} / {marks.count('▼')}"
            gain = f"{shown(best, 'gain_local')} ± {shown(best, 'gain_local_half')}"
            body.append(
                [
                    data.partition(":")[0],
                    unit,
                    _at(best),
                    f"`{best['row']}`",
                    shown(best, "mean"),
                    gain,
                    count,
                ]
            )
    titles = ["data", "unit", "epsilon", "best row", "its score:", "better than Local by:",
              "rows better / no difference / worse than Local:"]  # fmt: skip
    return table(titles, body)


def meanings(lines: Sequence[Line]) -> str:
    """Returns the table of what epsilon means, a line a row."""
    body = []
    noised = [one for one in measured(lines) if one["delta"]]
    for (name,), cells in by(noised, "row").items():
        first = cells[0]
        bounds = " / ".join(one["lower_bound"] or "-" for one in cells)
        body.append(
            [
                f"`{name}`",
                first["unit"],
                first["relation"],
                first["adversary"],
                first["amplification"],
                f"{float(first['delta']):g}, {first['accountant']}",
                bounds,
            ]
        )
    titles = ["row", "unit", "relation", "adversary: who sees what", "amplification",
              "delta, accountant", "measured at 1 / 3 / 10:"]  # fmt: skip
    return table(titles, body)


def efforts(lines: Sequence[Line]) -> str:
    """Returns the table of what was tuned, and of seconds and memory, a line a row."""
    body = []
    for (name,), cells in by(measured(lines), "row").items():
        chosen = "; ".join(f"{_at(one)}: {one['chosen'].replace('; ', ', ')}" for one in cells)
        # Without noise nothing is clipped, and fewer settings are left.
        tried = max(cells, key=lambda one: len(one["tuned"]))["tuned"].partition(":")[0]
        seconds = max(float(one["seconds"]) for one in cells)
        memory = max(int(one["memory_mib"]) for one in cells)
        body.append([f"`{name}`", tried, chosen, f"{seconds:.2f}", f"{memory:,}"])
    return table(["row", "tuned", "chosen, by epsilon", "seconds:", "MiB:"], body)


def _at(one: Line) -> str:
    """Returns the epsilon of a line, in words."""
    epsilon = float(one["epsilon"])
    if epsilon == NO_NOISE:
        return "no noise"
    if epsilon == NOTHING_SENT:
        return "alone"
    return f"{epsilon:g}"


def sources(lines: Sequence[Line]) -> str:
    """Returns the table of the figures from outside."""
    body = []
    for one in outside(lines):
        mean = float(one["mean"])
        own = f"{mean:.4g}"
        if one["half"]:
            own += f" ± {float(one['half']):.2g}"
        theirs = one["outside"] or "drawn"
        delta = one["delta"] and f" at {float(one['delta']):g}"
        folder = one["study"].rpartition("/")[0]
        study = f"[{folder.rpartition('/')[2]}](../../{folder}/README.md)"
        if folder == "benchmarks/reference":
            module = one["command"].split()[2].rpartition(".")[2]
            study = f"[{module}.py](../../{folder}/{module}.py)"
        body.append(
            [
                f"`{one['row']}`",
                f"{one['data']}: {one['method']}",
                one["metric"],
                f"{_at(one)}{delta}",
                one["unit"],
                own,
                theirs,
                one["outside_source"],
                one["note"],
                study,
            ]
        )
    titles = ["row", "data and method", "metric", "epsilon here", "unit", "here:", "outside:",
              "source", "what differs", "study"]  # fmt: skip
    return table(titles, body)


def origin(lines: Sequence[Line]) -> str:
    """Returns the sentence on the commits and processors of the cells."""
    commits = " and ".join(f"`{key[0]}`" for key in by(measured(lines), "commit"))
    processors = " and ".join(key[0] for key in by(measured(lines), "processor"))
    cells = len(measured(lines))
    total = sum(float(one["seconds"]) * len(one["scores"].split()) for one in measured(lines))
    return (
        f"The {cells} cells were measured at commit {commits} on {processors}, one process of one "
        f"thread; their {sum(len(one['scores'].split()) for one in measured(lines)):,} scored runs "
        f"took {total / 60:.0f} minutes of it, without those of the search and of the canaries."
    )


def text(lines: Sequence[Line]) -> str:
    """Returns the page: its words from ``page.md``, its tables from the lines of the CSV."""
    found = WORDS.read_text(encoding="utf-8")
    parts = {
        "origin": origin(lines) + "\n",
        "findings": findings(lines),
        "scores": scores(lines),
        "meanings": meanings(lines),
        "efforts": efforts(lines),
        "sources": sources(lines),
    }
    for name, part in parts.items():
        found = found.replace(f"<!-- {name} -->\n", part)
    return found.replace("CONFIDENCE", f"{100 * CONFIDENCE:g}%")


def _marker(one: Line) -> str:
    """Returns the marker of a row: a square if its trust is compared at equal schedules."""
    if "everybody" in one["row"]:
        return "s"
    return "o"


def _panel(
    axes: Any, own: Sequence[Line], alone: Sequence[Line], colours: Mapping[str, str]
) -> None:
    """Draws the rows of a data set and unit by epsilon, with 95% intervals."""
    scale = 1.0
    if own[0]["metric"] != "accuracy":
        scale = 1000.0
    rows = by(own, "row")
    for place, cells in enumerate(rows.values()):
        points = [one for one in cells if 0 < float(one["epsilon"]) < math.inf]
        first = cells[0]
        if not points:
            continue
        # Lines are drawn a little beside one another, so that their intervals can be told apart.
        shift = 1.03 ** (place - len(rows) / 2)
        axes.errorbar(
            [shift * float(one["epsilon"]) for one in points],
            [scale * float(one["mean"]) for one in points],
            [scale * float(one["half"] or 0) for one in points],
            label=first["method"],
            color=colours[first["method"]],
            linestyle=_DASHES[first["trust"]],
            marker=_marker(first),
            markersize=4,
        )
    for one in alone:
        axes.axhline(scale * float(one["mean"]), color="0.35", linestyle="-.", label="Local")
        # What is far worse than training alone would flatten all other lines.
        low, high = axes.get_ylim()
        if one["larger"] == "0" and high > 1.15 * scale * float(one["mean"]):
            axes.set_ylim(low, 1.15 * scale * float(one["mean"]))
    axes.set_xscale("log")
    axes.set_xticks(EPSILONS, [f"{epsilon:g}" for epsilon in EPSILONS])
    axes.minorticks_off()


def draw(path: Path, lines: Sequence[Line]) -> None:
    """Draws the score by epsilon, a panel for each data set and unit."""
    own = [one for one in measured(lines) if one["unit"] != "none"]
    groups = by(own, "data", "unit")
    drawn = by([one for one in own if one["delta"]], "method")
    colours = {method: f"C{place}" for place, (method,) in enumerate(drawn)}
    note = (
        "Means over five seeds with 95% intervals. Solid: a trusted server; dashed: secure sums; "
        "dotted: each client's own noise, nobody trusted. Squares: everybody in each round. "
        "Local sends nothing. Errors above 1.15 times that of Local are outside. Delta 1e-5; no epsilon covers the tuning."
    )
    columns = 3
    rows = math.ceil(len(groups) / columns)
    with drawing(path, 4.6 * columns, 3.8 * rows + 0.8, note) as figure:
        panels = list(figure.subplots(rows, columns, squeeze=False).flat)
        for beyond in panels[len(groups) :]:
            beyond.remove()
        for axes, ((data, unit), some) in zip(panels, groups.items(), strict=False):
            alone = [one for one in lines if one["data"] == data and one["unit"] == "none"]
            _panel(axes, some, alone, colours)
            metric = "accuracy"
            if some[0]["metric"] != "accuracy":
                metric = "squared error x 1,000"
            axes.set(title=f"{data.partition(':')[0]}: epsilon of a {unit}", xlabel="epsilon")
            axes.set_ylabel(metric)
        legend_above(figure)
