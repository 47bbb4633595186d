"""What epsilon buys: one page of the scores of all studies, each method beside what costs no epsilon.

    python benchmarks/reproduce/gains/report.py

reads the scores.csv of the studies and writes the tables of README.md and the figure. Nothing is trained.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import mean

from PIL import Image

HERE = Path(__file__).parent
sys.path[:0] = [str(HERE.parent)]

from scores import AS_PUBLISHED, Score, difference, epsilons_of, mark, plot, read_scores, table  # noqa: E402
from sweep import markdown, replace_section  # noqa: E402

ROLES = ("local", "public", "fedavg", "baseline", "published", "new")
FREE = ("local", "public")
LINES = {  # label of the best of a role, colour and line
    "local": ("training alone", "0.35", "--"),
    "public": ("public rows, best", "C4", "-."),
    "fedavg": ("FedAvg, best", "C0", "-"),
    "baseline": ("other baseline, best", "C9", ":"),
    "published": ("published, best", "C1", "-"),
    "new": ("new, best", "C2", "-"),
}
NOTE = "The best of each kind at every epsilon. Training alone and public rows release nothing."


@dataclass(frozen=True)
class Source:
    """A study: its folder, what epsilon protects there, the commands that compute its scores, and words in the titles
    of settings in which epsilon protects something else, or that have other commands."""

    folder: str
    unit: str
    commands: tuple[str, ...]
    others: tuple[tuple[str, str], ...] = ()
    apart: tuple[tuple[str, tuple[str, ...]], ...] = ()

    def unit_of(self, setting: str) -> str:
        """Return what epsilon protects in ``setting``."""
        return next((unit for words, unit in self.others if words in setting), self.unit)

    def commands_of(self, setting: str) -> tuple[str, ...]:
        """Return the commands that compute the scores of ``setting``."""
        return next((found for words, found in self.apart if words in setting), self.commands)


SOURCES = (
    Source(
        "comparison",
        "a client",
        ("comparison/run.py --femnist FILE --school FILE",),
        others=(("epsilon of a pupil", "a record"),),
        apart=(
            (
                "epsilon of a pupil",
                ('comparison/run.py --chosen --studies "school records" --school FILE',),
            ),
        ),
    ),
    Source("adapters", "a client", ("adapters/run.py --femnist FILE",)),
    Source("starts", "a client", ("starts/run.py", "starts/femnist.py --femnist FILE")),
    Source(
        "mp_mtl",
        "a client",
        (
            "mp_mtl/once.py --school FILE",
            "mp_mtl/variants.py --school FILE",
            "mp_mtl/layers.py --once",
        ),
    ),
    Source("p2p", "a record", ("p2p/once.py --root FOLDER",)),
    Source(
        "cost_of_privacy",
        "a record",
        (
            "cost_of_privacy/public_start.py --root FOLDER --hospital FOLDER",
            "cost_of_privacy/remarks.py --hospital FOLDER",
        ),
    ),
    Source("pp_dmtl", "a record", ("pp_dmtl/directions.py", "pp_dmtl/forms.py")),
)


def named_by_metric(scores: Sequence[Score]) -> list[Score]:
    """The scores of tuned methods, with the metric in the title of the setting: one may be measured in several ways."""
    tuned = [score for score in scores if not score.setting.endswith(AS_PUBLISHED)]
    return [replace(score, setting=f"{score.setting}; {score.metric}") for score in tuned]


def settings_of(scores: Sequence[Score]) -> list[str]:
    return list(dict.fromkeys(score.setting for score in scores))


def best(scores: Sequence[Score], roles: Sequence[str], epsilons: Sequence[float]) -> list[Score]:
    """The scores of the method, among ``roles``, with the best mean at one of ``epsilons``; empty if there is none."""
    found: dict[str, list[Score]] = {}
    for score in scores:
        if score.role in roles and score.epsilon in epsilons:
            found.setdefault(score.method, []).append(score)
    sign = 1.0 if scores[0].larger else -1.0
    return max(
        found.values(), key=lambda own: sign * mean(score.score for score in own), default=[]
    )


def summary(scores: Sequence[Score]) -> str:
    """A line for each setting and epsilon: the best of what costs nothing, of FedAvg, of the published methods and of
    all."""
    lines = []
    for setting in settings_of(scores):
        own = [score for score in scores if score.setting == setting]
        free = best(own, FREE, (0.0,))
        for epsilon in epsilons_of(own):
            line = [setting, f"{epsilon:g}", named(free)]
            line += [
                named(best(own, (role,), (epsilon,)), free) for role in ("fedavg", "published")
            ]
            top = best(own, ("fedavg", "baseline", "published", "new"), (epsilon,))
            lines.append([*line, named(top, free), gain(top, free)])
    titles = [
        "setting",
        "epsilon:",
        "without epsilon",
        "FedAvg",
        "published",
        "best private",
        "gain over what is free:",
    ]
    return markdown(titles, lines)


def named(own: Sequence[Score], other: Sequence[Score] = ()) -> str:
    """The method and its mean, with a mark against another one."""
    if not own:
        return ""
    text = f"{own[0].method}: {number(mean(score.score for score in own))}"
    return f"{text} {mark(own, other)}".strip() if other else text


def gain(own: Sequence[Score], other: Sequence[Score]) -> str:
    """How much better, in the better direction, with its interval; errors in percent of the other's."""
    if not own or not other:
        return ""
    value, half = difference(own, other)
    if own[0].larger:
        return f"{value:+.3f} ± {half:.3f}"
    base = mean(score.score for score in other) / 100
    return f"{-value / base:+.1f} ± {half / base:.1f} %"


def number(value: float) -> str:
    return f"{value:.3g}" if abs(value) < 0.1 else f"{value:.3f}"


def sections(scores: dict[str, list[Score]]) -> str:
    """A table for each setting, with the command of its study."""
    parts = []
    for source in SOURCES:
        for setting in settings_of(scores.get(source.folder, [])):
            own = [score for score in scores[source.folder] if score.setting == setting]
            ordered = sorted(own, key=lambda score: ROLES.index(score.role))
            way = "Larger is better" if own[0].larger else "Smaller is better"
            seeds = len({score.seed for score in own})
            small = max(abs(score.score) for score in own) < 0.1
            commands = "\n".join(
                f"    python benchmarks/reproduce/{command}"
                for command in source.commands_of(setting)
            )
            parts.append(
                f"### {setting}\n\n{way}; {seeds} seeds; epsilon protects {source.unit_of(setting)}. "
                f"[Study](../{source.folder}/README.md)\n\n{commands}\n\n"
                + table(ordered, setting, digits=5 if small else 3)
            )
    return "\n".join(parts)


def draw(scores: Sequence[Score], path: Path) -> None:
    """A panel a setting: what is free as lines, and the best method of each kind by epsilon."""
    found = []
    for setting in settings_of(scores):
        own = [score for score in scores if score.setting == setting]
        for role, (label, _, _) in LINES.items():
            at = (0.0,) if role in FREE else epsilons_of(own)
            found += [
                replace(score, method=label) for e in at for score in best(own, (role,), (e,))
            ]
    styles = {
        label: {"color": color, "linestyle": line, "marker": "o"}
        for label, color, line in LINES.values()
    }
    plot(path, found, styles, NOTE, columns=4)
    Image.open(path).convert("RGB").quantize(64).save(path, optimize=True)  # lines of few colours


def main() -> None:
    """Write the page."""
    files = {source.folder: HERE.parent / source.folder / "scores.csv" for source in SOURCES}
    scores = {
        folder: named_by_metric(read_scores(file))
        for folder, file in files.items()
        if file.exists()
    }
    everything = [score for found in scores.values() for score in found]
    draw(everything, HERE / "gains.png")
    replace_section(HERE / "README.md", "summary", summary(everything))
    replace_section(HERE / "README.md", "tables", sections(scores))


if __name__ == "__main__":
    main()
