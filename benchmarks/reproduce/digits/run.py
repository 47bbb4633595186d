"""PMTL, FedAvg and Local on the embedded digits at epsilon 1, 2, 4 and 8: where does each win?

A thousand writers with label skew and a style of their own, by how many images each has for training.
Launches ``fedmtl -m`` sweeps, then writes table.csv, accuracy.png and the table of README.md beside this file.
Finished sweeps are kept in --out and not repeated. The table and the plot also show what finetune.py found.

    python benchmarks/reproduce/digits/run.py
    python benchmarks/reproduce/digits/finetune.py
"""

from __future__ import annotations

import argparse
import csv
import json
import os
import shlex
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from statistics import mean
from typing import Any

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE.parent))

from intervals import interval  # noqa: E402
from sweep import markdown, replace_section, write_csv  # noqa: E402

from fedmtl.report.canvas import drawing, legend_above, styles_of  # noqa: E402

IMAGES = (5, 10, 20)
SWEEPS = {  # name: the words that choose the method; one curve each
    "PMTL λ 1": ("algorithm=pmtl", "algorithm.lam=1"),
    "PMTL λ 0.1": ("algorithm=pmtl", "algorithm.lam=0.1"),
    "FedAvg": ("algorithm=fedavg", "finetune=none"),
    "Local": ("algorithm=local",),
}
EPSILONS = "1,2,4,8"
FINETUNED, FINETUNING_STEPS = "FedAvg, then 5 local steps", 5
COLUMNS = ("train_images", "method", "epsilon", "seeds", "accuracy", "accuracy_half", "low", "high",
           "worst_tenth", "shared_accuracy", "noise_multiplier", "command")  # fmt: skip


@dataclass(frozen=True)
class Sweep:
    """One curve of one panel: a method at every epsilon and seed, at one number of training images."""

    method: str
    images: int

    def command(self, seeds: str) -> list[str]:
        """The words after ``fedmtl -m``."""
        budget = "privacy=none" if self.method == "Local" else f"privacy.epsilon={EPSILONS}"
        size = f"data.train_images={self.images}"
        return [
            *SWEEPS[self.method],
            budget,
            size,
            f"seed={seeds}",
            "baselines=[]",
            "eval_every=100",
        ]

    def folder(self, out: Path) -> Path:
        return out / f"{self.images}-images" / self.method.lower().replace(" λ ", "-")


def launch(sweep: Sweep, seeds: list[int], out: Path) -> None:
    """Run a sweep, unless it has been run to its end.

    Raises:
        SystemExit: the sweep failed.
    """
    folder = sweep.folder(out)
    done = folder / f"done-{'-'.join(map(str, seeds))}"
    if done.exists():
        return
    words = sweep.command(",".join(map(str, seeds)))
    print(f"fedmtl -m {shlex.join(words)}", flush=True)
    code = subprocess.run(
        [
            sys.executable,
            "-m",
            "fedmtl",
            "-m",
            *words,
            "progress=false",
            f"hydra.sweep.dir={folder}",
        ],
        check=False,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        env=os.environ | {"OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", "1")},
    ).returncode
    if code:
        raise SystemExit(
            f"{folder}: fedmtl ended with code {code}; delete the folder before another try."
        )
    done.touch()


def outcomes(sweep: Sweep, seeds: list[int], out: Path) -> list[dict[str, Any]]:
    """One mapping for each epsilon, averaged over seeds; nothing for a sweep that has not been run."""
    folder = sweep.folder(out)
    if not (folder / f"done-{'-'.join(map(str, seeds))}").exists():
        return []
    results = [json.loads(path.read_text()) for path in folder.glob("*/private/result.json")]
    results = [result for result in results if result["seed"] in seeds]
    command = shlex.join(sweep.command(",".join(map(str, seeds))))
    rows = []
    for budget in sorted({result["budget"] or 0 for result in results}):
        same = [result for result in results if (result["budget"] or 0) == budget]
        accuracy = [result["accuracy"] for result in same]
        row = {
            "train_images": sweep.images,
            "method": sweep.method,
            "epsilon": budget,
            "seeds": len(same),
            "accuracy": mean(accuracy),
            "accuracy_half": interval(accuracy)[1],
            "low": min(accuracy),
            "high": max(accuracy),
            "worst_tenth": mean(result["worst_tenth"] for result in same),
            "noise_multiplier": same[0]["noise_multiplier"],
            "command": f"fedmtl -m {command}",
        }
        if "global_accuracy" in same[0]:
            row["shared_accuracy"] = mean(result["global_accuracy"] for result in same)
        rows.append(row)
    return rows


def finetuned() -> list[dict[str, Any]]:
    """The rows of finetuning.csv for FedAvg's released model and a few local steps of every client."""
    with open(HERE / "finetuning.csv", newline="", encoding="utf-8") as file:
        found = [row for row in csv.DictReader(file) if row["method"] == "FedAvg"]
    return [
        {
            "train_images": int(row["train_images"]),
            "method": FINETUNED,
            "seeds": int(row["seeds"]),
            **{
                name: float(row[name])
                for name in ("epsilon", "accuracy", "accuracy_half", "low", "high")
            },
        }
        for row in found
        if int(row["steps"]) == FINETUNING_STEPS
    ]


def table(rows: list[dict[str, Any]]) -> str:
    """One line a (training images, method), one column an epsilon; the best of a column is bold."""
    epsilons = sorted({round(r["epsilon"], 2) for r in rows if r["method"] != "Local"})
    titles = ["training images:", "method", *(f"epsilon {e:g}:" for e in epsilons)]
    lines = []
    for images in IMAGES:
        cells: dict[str, list[dict[str, Any]]] = {}
        for row in rows:
            if row["train_images"] == images:
                cells.setdefault(row["method"], []).append(row)
        for method, own in cells.items():
            points = own * len(epsilons) if method == "Local" else own
            line = [str(images), f"{method} (epsilon 0)" if method == "Local" else method]
            for place, row in enumerate(points):
                best = max((o * len(epsilons))[place]["accuracy"] for o in cells.values())
                text = f"{row['accuracy']:.3f} ± {row['accuracy_half']:.3f}".replace("0.", ".")
                line.append(f"**{text}**" if row["accuracy"] == best else text)
            lines.append(line)
    return markdown(titles, lines)


def command_list(rows: list[dict[str, Any]]) -> str:
    """The command of every line of the table."""
    commands = dict.fromkeys(row["command"] for row in rows)
    return "```\n" + "".join(f"{command}\n" for command in commands) + "```\n"


def plot(rows: list[dict[str, Any]], path: Path) -> None:
    """A panel for each number of training images: accuracy by epsilon, Local as a level line."""
    shown = [n for n in IMAGES if any(row["train_images"] == n for row in rows)]
    seeds = max(row["seeds"] for row in rows)
    note = f"Mean of {seeds} seeds; bars span lowest to highest. Measured on private test data."
    with drawing(path, 4.3 * len(shown) + 1.6, 3.9, note) as figure:
        panels = figure.subplots(1, len(shown), squeeze=False, sharey=True)[0]
        styles = styles_of(["pmtl", "local", "fedavg"])
        for axes, images in zip(panels, shown, strict=True):
            title = f"{images} training images a writer"
            axes.set(xlabel="epsilon, protecting all data of one writer", title=title)
            axes.set_xscale("log", base=2)
            for method in (*SWEEPS, FINETUNED):
                own = [r for r in rows if r["train_images"] == images and r["method"] == method]
                colour, marker = (
                    ("#000000", "D") if method == FINETUNED else styles[method.split()[0].lower()]
                )
                if not own:
                    continue
                label = "FedAvg + 5 steps" if method == FINETUNED else method
                if method == "Local":
                    axes.axhline(own[0]["accuracy"], color=colour, linewidth=1.6, label=label)
                else:
                    x, y = [r["epsilon"] for r in own], [r["accuracy"] for r in own]
                    bars = [
                        [r["accuracy"] - r["low"] for r in own],
                        [r["high"] - r["accuracy"] for r in own],
                    ]
                    line = "--" if method.endswith("0.1") else "-"
                    axes.errorbar(
                        x, y, yerr=bars, color=colour, fmt=marker + line, capsize=2.5, label=label
                    )
            axes.set_xlim(0.9, 8.8)
            axes.set_xticks([1, 2, 4, 8], ["1", "2", "4", "8"])
        panels[0].set_ylabel("test accuracy, mean over writers")
        legend_above(figure)


def main() -> None:
    """Parse the command line, train what is missing, write the table and the plot."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", maxsplit=1)[0])
    parser.add_argument(
        "--out", type=Path, default=Path("outputs/reproduce/digits"), help="runs are kept here"
    )
    parser.add_argument(
        "--seeds", type=int, nargs="+", default=[0, 1, 2], help="of data, start and noise"
    )
    parser.add_argument(
        "--collect", action="store_true", help="train nothing; tables of the finished sweeps"
    )
    arguments = parser.parse_args()
    sweeps = [Sweep(method, images) for images in IMAGES for method in SWEEPS]
    if not arguments.collect:
        for sweep in sweeps:
            launch(sweep, arguments.seeds, arguments.out)
    rows = [row for sweep in sweeps for row in outcomes(sweep, arguments.seeds, arguments.out)]
    write_csv(HERE / "table.csv", rows, COLUMNS)
    replace_section(HERE / "README.md", "table", table([*rows, *finetuned()]))
    replace_section(HERE / "README.md", "commands", command_list(rows))
    plot([*rows, *finetuned()], HERE / "accuracy.png")


if __name__ == "__main__":
    main()
