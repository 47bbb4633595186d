"""Shared by the drivers: launch the ``fedmtl`` command once a run, read what it left, write tables.

A run whose folder holds ``private/result.json`` is finished and is not repeated, so an interrupted driver
goes on where it stopped; delete the folder to run it again.
"""

from __future__ import annotations

import argparse
import csv
import json
import os
import shlex
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from intervals import interval


@dataclass(frozen=True)
class Run:
    """One setting, trained once for every seed.

    Attributes:
        name: its folder.
        overrides: words of the command, but data, seed and folder.
        at: the rounds that become rows of the table.
    """

    name: str
    overrides: tuple[str, ...]
    at: tuple[int, ...]

    def command(self, root: Path | str | None, seed: str) -> list[str]:
        """The words after ``fedmtl``."""
        place = [] if root is None else [f"data.root={root}"]
        return [*self.overrides[:1], *place, *self.overrides[1:], f"seed={seed}"]

    def folder(self, out: Path, seed: int) -> Path:
        return out / f"{self.name}-seed{seed}"


def existing(text: str) -> Path:
    """Return the path of a command line, refused there where nothing is: before any work, on a line of its own."""
    path = Path(text)
    if not path.exists():
        raise argparse.ArgumentTypeError(f"{text} does not exist")
    return path


def launch(runs: Sequence[Run], seeds: Sequence[int], *, root: Path | None, out: Path) -> None:
    """Train what is not finished yet, one run at a time, seed by seed.

    Raises:
        SystemExit: a run failed; its own message is on standard error.
    """
    for seed in seeds:
        for run in runs:
            folder = run.folder(out, seed)
            if (folder / "private" / "result.json").exists():
                continue
            words = run.command(root, str(seed))
            print(f"fedmtl {shlex.join(words)}", flush=True)
            began = time.monotonic()
            done = subprocess.run(
                [
                    sys.executable,
                    "-m",
                    "fedmtl",
                    *words,
                    "progress=false",
                    f"hydra.run.dir={folder}",
                ],
                check=False,
                stdout=subprocess.DEVNULL,
                env=os.environ | {"OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", "1")},
            )
            if done.returncode:
                raise SystemExit(
                    f"{run.name}, seed {seed}: fedmtl ended with code {done.returncode}."
                )
            print(f"  {time.monotonic() - began:.0f} s", flush=True)


def outcomes(run: Run, seeds: Sequence[int], out: Path) -> list[dict[str, Any]]:
    """A mapping for each round of ``run.at``: means over seeds, and half of their intervals, ``name_half``."""
    found = [
        f for f in (run.folder(out, s) for s in seeds) if (f / "private" / "result.json").exists()
    ]
    if not found:
        return []
    results = [json.loads((f / "private" / "result.json").read_text()) for f in found]
    histories = []
    for folder in found:
        with open(folder / "private" / "metrics.csv", newline="", encoding="utf-8") as file:
            histories.append({int(row["round"]): row for row in csv.DictReader(file)})
    rows = []
    for at in run.at:
        row: dict[str, Any] = {"run": run.name, "round": at, "seeds": len(found)}
        row["noise_multiplier"] = results[0].get("noise_multiplier")
        for key in histories[0][at]:
            values = [float(history[at][key]) for history in histories]
            if key == "round":
                row[key] = int(values[0])
                continue
            if key == "epsilon":  # infinite without privacy, of which there is no interval
                row[key] = max(values)
                continue
            row[key], half = interval(values)
            if len(values) > 1:
                row[f"{key}_half"] = half
        rows.append(row)
    return rows


def number(row: dict[str, Any], key: str) -> str:
    """``.497`` or ``.497 ± .012``; empty where the run has no such number."""
    if key not in row:
        return ""
    text = f"{row[key]:.3f}".lstrip("0")
    return (
        f"{text} ± {row[f'{key}_half']:.3f}".replace("± 0.", "± .")
        if f"{key}_half" in row
        else text
    )


def markdown(titles: Sequence[str], lines: Sequence[Sequence[str]]) -> str:
    """A GitHub table; columns of numbers are right-aligned by the caller's titles ending in a colon."""
    rule = ["---:" if title.endswith(":") else "---" for title in titles]
    shown = [[title.rstrip(":") for title in titles], rule, *lines]
    return "".join("| " + " | ".join(line) + " |\n" for line in shown)


def write_csv(path: Path, rows: Sequence[dict[str, Any]], columns: Sequence[str]) -> None:
    """Rows with floats to five decimals."""
    with open(path, "w", newline="", encoding="utf-8") as file:
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow(columns)
        for row in rows:
            cells = [row.get(column, "") for column in columns]
            writer.writerow(
                [f"{c:.5g}" if isinstance(c, float) else "" if c is None else c for c in cells]
            )


def read_csv(path: Path) -> list[dict[str, str]]:
    """The rows of a CSV file; none where there is no file."""
    if not path.exists():
        return []
    with open(path, newline="", encoding="utf-8") as file:
        return list(csv.DictReader(file))


def renew(
    path: Path, rows: Sequence[dict[str, Any]], columns: Sequence[str]
) -> list[dict[str, str]]:
    """Write the rows of the studies (column ``study``) in ``rows``, keep those of others; return all of them."""
    studies = {row["study"] for row in rows}
    kept = [row for row in read_csv(path) if row["study"] not in studies]
    write_csv(path, [*kept, *rows], columns)
    return read_csv(path)


def replace_section(path: Path, name: str, text: str) -> None:
    """Put ``text`` between ``<!-- name -->`` and ``<!-- /name -->`` in a README."""
    content = path.read_text(encoding="utf-8")
    opening, closing = f"<!-- {name} -->\n", f"<!-- /{name} -->"
    head, _, rest = content.partition(opening)
    if closing not in rest:
        raise SystemExit(f"{path} has no section {name!r} to write to.")
    path.write_text(head + opening + text + rest[rest.index(closing) :], encoding="utf-8")
