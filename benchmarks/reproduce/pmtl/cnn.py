"""Local, FedAvg, FedProx and PMTL on the 206 writers of LEAF FEMNIST: without privacy, at epsilon 8 and 2.

Launches the ``fedmtl`` command for every setting below, then writes table.csv, accuracy.png and the tables
of cnn.md beside this file. Finished runs are kept in --out and not repeated.

    python benchmarks/reproduce/pmtl/cnn.py --root /path/to/leaf_femnist_206.json.zip
"""

from __future__ import annotations

import argparse
import math
import shlex
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE.parent))

from sweep import Run, existing, launch, markdown, number, outcomes, replace_section, write_csv  # noqa: E402

from fedmtl.report.canvas import MUTED, drawing, styles_of  # noqa: E402

ROOT = "/path/to/leaf_femnist_206.json.zip"


@dataclass(frozen=True)
class Setting:
    """Rows of the table: what is trained, and what an independent plain-loop prototype measured.

    Attributes:
        algorithm: name of the configuration.
        epsilon: ``inf`` is no privacy: no clip and no noise.
        strength: lambda of PMTL, mu of FedProx.
        clip_norm: C.
        rounds: planned rounds; the noise is calibrated to them.
        reference: sample-weighted accuracy of the prototype, by round.
    """

    algorithm: str
    epsilon: float
    rounds: int
    strength: float | None = None
    clip_norm: float | None = None
    reference: tuple[tuple[int, float], ...] = ()

    @property
    def title(self) -> str:
        name = {"pmtl": "PMTL", "fedavg": "FedAvg", "fedprox": "FedProx", "local": "Local"}[
            self.algorithm
        ]
        symbol = {"pmtl": " λ", "fedprox": " μ"}.get(self.algorithm)
        return name if symbol is None else f"{name}{symbol} {self.strength:g}"

    @property
    def run(self) -> Run:
        words = ["experiment=pmtl_femnist", f"algorithm={self.algorithm}"]
        words += ["finetune=none"] if self.algorithm == "fedavg" else []
        if self.strength is not None:
            words.append(
                f"algorithm.{'lam' if self.algorithm == 'pmtl' else 'mu'}={self.strength:g}"
            )
        if math.isinf(self.epsilon):
            words.append("privacy=none")
        else:
            words += [f"privacy.epsilon={self.epsilon:g}", f"privacy.clip_norm={self.clip_norm:g}"]
        words += [f"rounds={self.rounds}", "eval_every=50", "baselines=[]"]
        marks = [
            self.algorithm,
            *(f"{v:g}" for v in (self.strength, self.clip_norm) if v is not None),
        ]
        name = "-".join([*marks, f"eps{self.epsilon:g}", str(self.rounds)])
        at = (50, 100) if self.rounds == 100 and math.isinf(self.epsilon) else (self.rounds,)
        return Run(name, tuple(words), at)


FREE = math.inf
SETTINGS = (
    Setting("local", FREE, 100, reference=((50, 0.302), (100, 0.406))),
    Setting("fedavg", FREE, 100, reference=((50, 0.497), (100, 0.640))),
    Setting("fedprox", FREE, 100, strength=0.1),
    Setting("pmtl", FREE, 100, strength=0.1, reference=((100, 0.396),)),
    Setting("pmtl", FREE, 100, strength=1.0),
    Setting("fedavg", 8, 50, clip_norm=0.5, reference=((50, 0.480),)),
    Setting("fedprox", 8, 50, strength=0.1, clip_norm=0.5),
    Setting("pmtl", 8, 50, strength=0.1, clip_norm=0.5, reference=((50, 0.269),)),
    Setting("pmtl", 8, 100, strength=0.01, clip_norm=0.1),
    Setting("fedavg", 2, 50, clip_norm=0.5, reference=((50, 0.094),)),
    Setting("fedavg", 2, 30, clip_norm=0.2, reference=((30, 0.232),)),
    Setting("fedavg", 2, 100, clip_norm=0.1),
    Setting("fedprox", 2, 30, strength=0.1, clip_norm=0.2),
    Setting("pmtl", 2, 50, strength=0.01, clip_norm=0.1, reference=((50, 0.325),)),
    Setting("pmtl", 2, 100, strength=0.01, clip_norm=0.1, reference=((100, 0.405),)),
)
COLUMNS = (
    "algorithm", "strength", "clip_norm", "target_epsilon", "epsilon", "noise_multiplier", "round", "seeds",
    "accuracy", "accuracy_half", "weighted_accuracy", "weighted_accuracy_half", "worst_tenth", "global_accuracy",
    "global_weighted_accuracy", "reference", "time", "command",
)  # fmt: skip


def collect(seeds: list[int], out: Path) -> list[dict[str, Any]]:
    """The finished rows, in the order of :data:`SETTINGS`."""
    rows = []
    for setting in SETTINGS:
        for row in outcomes(setting.run, seeds, out):
            own = {
                "title": setting.title,
                "algorithm": setting.algorithm,
                "strength": setting.strength,
                "clip_norm": setting.clip_norm,
                "target_epsilon": setting.epsilon,
                "reference": dict(setting.reference).get(row["round"]),
                "command": f"fedmtl {shlex.join(setting.run.command(ROOT, 'SEED'))}",
            }
            rows.append({**row, **own})
    return rows


def accuracy_table(rows: list[dict[str, Any]]) -> str:
    """The table of README.md."""
    titles = ["epsilon", "method", "clip:", "rounds:", "mean over writers:", "sample-weighted:", "prototype:",
              "worst tenth:", "shared model:", "noise multiplier:", "seeds:"]  # fmt: skip
    lines = []
    for row in rows:
        epsilon = "none" if math.isinf(row["target_epsilon"]) else f"{row['epsilon']:.2f}"
        lines.append(
            [
                "0 (nothing leaves)" if row["algorithm"] == "local" else epsilon,
                row["title"],
                "" if row["clip_norm"] is None else f"{row['clip_norm']:g}",
                str(row["round"]),
                number(row, "accuracy"),
                number(row, "weighted_accuracy"),
                "" if row["reference"] is None else f"{row['reference']:.3f}".lstrip("0"),
                number({"worst_tenth": row["worst_tenth"]}, "worst_tenth"),
                number({"g": row["global_accuracy"]}, "g") if "global_accuracy" in row else "",
                "" if row["noise_multiplier"] is None else f"{row['noise_multiplier']:.2f}",
                str(row["seeds"]),
            ]
        )
    return markdown(titles, lines)


def command_table(rows: list[dict[str, Any]]) -> str:
    """The command of every number."""
    lines = [[r["title"], str(r["round"]), f"`{r['command']}`"] for r in rows]
    return markdown(["method", "rounds:", "command"], lines)


def plot(rows: list[dict[str, Any]], path: Path) -> None:
    """Dots of the measured and of the prototype's accuracy, row by row; Local as upright lines."""
    groups = {FREE: "No privacy", 8.0: "Epsilon 8", 2.0: "Epsilon 2"}
    seeds = max(row["seeds"] for row in rows)
    bars = f" Mean and 95% interval of up to {seeds} seeds." if seeds > 1 else ""
    note = f"Filled: fedmtl. Ring: plain-loop prototype.{bars} Measured on private test data."
    with drawing(path, 9.4, 0.31 * len(rows) + 1.6, note) as figure:
        axes = figure.subplots()
        axes.set(
            xlabel="test accuracy, sample-weighted",
            title="LEAF FEMNIST, 206 writers: personal accuracy",
        )
        styles = styles_of(["pmtl", "local", "fedavg", "fedprox"])
        local = {r["round"]: r["weighted_accuracy"] for r in rows if r["algorithm"] == "local"}
        for (rounds, value), side in zip(local.items(), ("right", "left"), strict=True):
            axes.axvline(value, color=styles["local"][0], linewidth=1.2, linestyle=(0, (4, 2)))
            axes.annotate(
                f" Local, {rounds} rounds ", (value, -1.2), color=MUTED, fontsize=8, ha=side
            )
        y, ticks, last = 0.0, [], None
        for row in rows:
            if last is not None and row["target_epsilon"] != last:
                y += 0.6
            last = row["target_epsilon"]
            clip = "" if row["clip_norm"] is None else f", clip {row['clip_norm']:g}"
            ticks.append(
                (y, f"{groups[float(last)]}   {row['title']}{clip}, {row['round']} rounds")
            )
            colour = styles[row["algorithm"]][0]
            spread = row.get("weighted_accuracy_half")
            axes.errorbar(
                row["weighted_accuracy"], y, xerr=spread, color=colour, marker="o", capsize=3
            )
            if row["reference"] is not None:
                axes.plot(
                    row["reference"],
                    y,
                    marker="o",
                    markersize=11,
                    markerfacecolor="none",
                    color=colour,
                )
            y += 1.0
        axes.set_yticks([place for place, _ in ticks], [text for _, text in ticks])
        axes.set_ylim(y - 0.3, -1.8)
        axes.set_xlim(0.0, 0.8)


def main() -> None:
    """Parse the command line, train what is missing, write the tables and the plot."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", maxsplit=1)[0])
    parser.add_argument("--root", type=existing, help="LEAF FEMNIST: JSON, zip or folder")
    parser.add_argument(
        "--out", type=Path, default=Path("outputs/reproduce/pmtl-cnn"), help="runs are kept here"
    )
    parser.add_argument("--seeds", type=int, nargs="+", default=[0], help="of split, start, noise")
    parser.add_argument(
        "--collect", action="store_true", help="train nothing; tables of the finished runs"
    )
    arguments = parser.parse_args()
    if arguments.root is None and not arguments.collect:
        parser.error("--root is needed, except with --collect")
    if not arguments.collect:
        launch([s.run for s in SETTINGS], arguments.seeds, root=arguments.root, out=arguments.out)
    rows = collect(arguments.seeds, arguments.out)
    write_csv(HERE / "table.csv", rows, COLUMNS)
    replace_section(HERE / "cnn.md", "accuracy", accuracy_table(rows))
    replace_section(HERE / "cnn.md", "commands", command_table(rows))
    plot(rows, HERE / "accuracy.png")


if __name__ == "__main__":
    main()
