"""The tables of gpu.py, from the lines that its processes print."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from statistics import median

from gpu_workloads import ABOUT, FACTS, ON_CPU, OURS, WORKLOADS
from rounds import TOLERANCE, Line, summary

PLANNED = 1500
"""Rounds to which the seconds of one are extrapolated."""
TIMES = [
    "workload",
    "contender",
    "seconds a round (least to most)",
    f"{PLANNED:,} rounds",
    "against fedmtl",
    "GPU MiB",
    "final loss",
]
GOALS = {"W1-fedprox": 20.0, "W3": 50.0}
"""How many times as fast as its own CPU path fedmtl is to be on a GPU."""
SHORTEST = {"W2-fedprox": 0.003}
"""Seconds that a round is to take at most."""


def summaries(found: Sequence[Line]) -> list[Line]:
    """Return a line for each workload and contender that ran."""
    groups: dict[tuple[str, str], list[Line]] = {}
    for line in found:
        if "failed" not in line and line["contender"] != FACTS:
            groups.setdefault((line["workload"], line["contender"]), []).append(line)
    # stable: the contenders of a workload stay as they came
    order = sorted(groups, key=lambda one: list(WORKLOADS).index(one[0]))
    return [summary(key, groups[key, name], "wall") for key, name in order]


def ours(key: str, lines: Iterable[Line], name: str = OURS) -> Line | None:
    """Return the line of fedmtl on a workload; None where it has none."""
    for line in lines:
        if (line["workload"], line["contender"]) == (key, name):
            return line
    return None


def told(line: Line, lines: Sequence[Line]) -> str:
    """Return how many times as long as fedmtl a contender takes, or why that is not said."""
    if line["contender"] == OURS:
        return "1"
    own = ours(line["workload"], lines)
    if own is None:
        return "no ratio"
    # on the CPU it makes fewer rounds of the same work
    alike = line["contender"] == ON_CPU or abs(line["loss"] / own["loss"] - 1) <= TOLERANCE
    if not alike:
        return "no ratio: another loss"
    return f"{line['seconds'] / own['seconds']:.2f} x"


def markdown(names: Sequence[str], rows: Iterable[Sequence[object]], left: int) -> str:
    """Return a table whose first ``left`` columns are text."""
    lines = [names, ["---"] * left + ["---:"] * (len(names) - left), *rows]
    return "\n".join(f"| {' | '.join(map(str, line))} |" for line in lines)


def times_table(lines: Sequence[Line]) -> str:
    """The seconds of all contenders."""
    rows = []
    for line in lines:
        spread = f"{line['seconds']:.5f} ({line['least']:.5f} to {line['most']:.5f})"
        rows.append(
            [
                line["workload"],
                f"{line['contender']} {line['version']}",
                spread,
                f"{PLANNED * line['seconds']:.1f} s",
                told(line, lines),
                line["gpu_mib"] or "",
                f"{line['loss']:.4f}",
            ]
        )
    return markdown(TIMES, rows, left=2)


def facts_table(found: Iterable[Line], device: str) -> str:
    """How far fedmtl's models on the device are from those of the CPU, and what a round takes of it."""
    names = ["workload", f"largest difference, {device} to CPU, float64", "largest move"]
    counts = {"operators": "PyTorch operators a round (CPU)"}
    if device != "cpu":
        counts = {
            "kernels": "kernels launched a round",
            "waits": "waits of the host a round",
            "copies": "copies a round",
        }
    rows = {}
    for line in found:
        if line["contender"] == FACTS and "failed" not in line:
            own = [f"{line['difference']:.1e}", f"{line['moved']:.1e}"]
            rows[line["workload"]] = [line["workload"], *own, *(line[name] for name in counts)]
    return markdown([*names, *counts.values()], rows.values(), left=1)


def goals(lines: Sequence[Line]) -> list[str]:
    """Return a sentence for every goal of which both sides have been measured on a GPU."""
    said = []
    for key, least in GOALS.items():
        gpu, cpu = ours(key, lines), ours(key, lines, ON_CPU)
        if gpu is not None and cpu is not None:
            times = cpu["seconds"] / gpu["seconds"]
            cores = cpu["threads"]
            said.append(
                f"{key}: {times:.1f} times as fast as on {cores} cores; the goal is {least:g}."
            )
    for key, most in SHORTEST.items():
        gpu = ours(key, lines)
        if gpu is not None and gpu["device"] != "cpu":
            milliseconds = 1000 * gpu["seconds"]
            said.append(f"{key}: {milliseconds:.2f} ms a round; the goal is {1000 * most:g} ms.")
    return said


def failures(found: Iterable[Line]) -> list[str]:
    """Return a sentence for everything that did not end well."""
    said = []
    for line in found:
        if "failed" in line:
            last = (line["failed"].strip().splitlines() or ["no word of it"])[-1]
            said.append(f"{line['workload']}, {line['contender']}, failed: {last}")
    return said


def page(about: str, found: Sequence[Line], device: str) -> str:
    """Return the whole page: the machine, the tables, the goals and the failures."""
    lines = summaries(found)
    each = [f"{key}: {ABOUT[key]}." for key in WORKLOADS if ours(key, lines) is not None]
    most = max((line["repetitions"] for line in lines), default=0)
    rounds = median(line["rounds"] for line in lines) if lines else 0
    head = f"{about}. At most {most} processes of a contender, of {rounds:g} rounds each."
    parts = [head, times_table(lines), facts_table(found, device), "\n".join(each)]
    parts += goals(lines) + failures(found)
    return "\n\n".join(parts) + "\n"
