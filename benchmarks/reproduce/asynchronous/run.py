"""Is it worth waiting for the slowest clients of a round?

FedAvg with finetuning on the embedded digits, by a server that waits for its cohort and by one that steps when some of
the busy clients have answered (buffered aggregation). Latencies are log-normal, and those of every tenth writer ten
times as long. The server that waits has secret cohorts, whose privacy is amplified; the other has none, and noise that
is correlated over steps instead. Both keep about 100 writers busy, and choose one of four settings for each epsilon by
the score on validation rows of another seed. Nothing is chosen on test rows.

    python benchmarks/reproduce/asynchronous/run.py
    python benchmarks/reproduce/asynchronous/run.py --collect  # tables and picture of what is finished
"""

from __future__ import annotations

import argparse
import json
import math
import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

HERE = Path(__file__).parent
sys.path[:0] = [str(HERE.parent), str(HERE.parent / "comparison")]

from intervals import interval  # noqa: E402
from settings import DELTA, STUDIES, held_out, load  # noqa: E402
from sweep import markdown, read_csv, replace_section, write_csv  # noqa: E402

from fedmtl import (  # noqa: E402
    Buffered,
    Callback,
    ClientPrivacy,
    FedAvg,
    Finetune,
    PoissonSampling,
    Trainer,
    models,
)
from fedmtl.report.canvas import drawing, legend_above  # noqa: E402
from fedmtl.schedules import RandomLatency  # noqa: E402

EPSILONS = (4.0, math.inf, 2.0, 8.0)
SEEDS = (0, 1, 2, 3, 4)
TUNING = 10
STUDY = STUDIES["digits"]
WAY = Finetune(kind="kl", lam=0.1, local=replace(STUDY.solver, epochs=20), start="shared")
SPREAD = 1.0  # standard deviation of the logarithm of a latency, whose median is 1
SLOW = 10.0  # factor of the latencies of every tenth writer
WRITERS = 1000
SPREADS = ((0.0, 1.0), (0.5, 1.0), (1.0, 1.0), (SPREAD, SLOW), (1.5, SLOW))
SPREADS_AT = 4.0  # epsilon of the runs by spread
COLUMNS = ("side", "epsilon", "seed", "chosen", "finetuned", "shared", "time", "shared_then")
SPREAD_COLUMNS = ("spread", "slow", "seed", "waited", "time", "finetuned_waiting", "finetuned")


@dataclass(frozen=True)
class Side:
    """A server.

    Attributes:
        schedule: of its clients.
        bands: of the noise.
        settings: four clip norms and numbers of steps.
    """

    schedule: Any
    bands: Any
    settings: tuple[tuple[float, int], ...]


LOW, MIDDLE, HIGH = STUDY.clips


def scale(slow: float) -> list[float]:
    """Returns the factors of the latencies: ``slow`` for every tenth writer, 1 for the others."""
    return [slow if place % 10 == 9 else 1.0 for place in range(WRITERS)]


def late(spread: float, slow: float) -> Buffered:
    """Returns the schedule that does not wait, for latencies of a spread and with slow writers."""
    latency: float | RandomLatency = 1.0
    if spread:
        latency = RandomLatency("lognorm", {"s": spread})
    return Buffered(latency=latency, concurrency=100, buffer=50, rest=15, scale=scale(slow))


LATE = late(SPREAD, SLOW)
SIDES = {
    "waiting": Side(
        PoissonSampling(cohort=100), None, ((LOW, 50), (MIDDLE, 50), (HIGH, 50), (MIDDLE, 20))
    ),
    "not waiting": Side(LATE, "auto", ((LOW, 80), (MIDDLE, 80), (HIGH, 80), (MIDDLE, 40))),
}


class Clock(Callback):
    """The simulated time at which each step ends.

    Args:
        seed: of the latencies of a server that waits.
        waits: True for such a server.
        spread: standard deviation of the logarithm of a latency.
        slow: factor of the latencies of every tenth writer.
    """

    def __init__(self, seed: int, waits: bool, spread: float, slow: float) -> None:
        self.coins = np.random.default_rng(seed)
        self.waits = waits
        self.spread = spread
        self.scale = np.array(scale(slow))
        self.times: list[float] = [0.0]

    def on_event(self, block: Any, state: Any) -> None:
        if not self.waits:
            self.times.append(float(block.time[0, 0]))
            return
        slowest = self.slowest(block.cohort.numpy())
        self.times.append(self.times[-1] + slowest)

    def slowest(self, cohort: np.ndarray) -> float:
        """Returns the longest latency of a cohort in a round."""
        drawn = np.exp(self.spread * self.coins.standard_normal(WRITERS)) * self.scale
        return float(drawn[cohort].max(initial=0.0))


def train(
    name: str, index: int, epsilon: float, seed: int, spread: float = SPREAD, slow: float = SLOW
) -> dict[str, Any]:
    """Returns the scores of a run, and the accuracy of its shared model by simulated time."""
    side = SIDES[name]
    if name != "waiting":
        side = replace(side, schedule=late(spread, slow))
    clip, rounds = side.settings[index]
    data = load("digits", None, seed)
    if seed == TUNING:
        data = held_out(data, seed)
    clock = Clock(seed, name == "waiting", spread, slow)
    bands = side.bands
    if math.isinf(epsilon):
        bands = None
    result = Trainer(
        algorithm=FedAvg(local=STUDY.solver),
        data=data,
        model=models.softmax_regression(),
        schedule=side.schedule,
        privacy=ClientPrivacy(clip_norm=clip, epsilon=epsilon, delta=DELTA, bands=bands),
        rounds=rounds,
        finetune=WAY,
        seed=seed,
        eval_every=1,
        callbacks=(clock,),
        baselines=(),
        progress=False,
    ).fit()
    curve = [(clock.times[row["round"]], row["global_accuracy"]) for row in result.history]
    return {
        "finetuned": result.final["accuracy"],
        "shared": result.final["global_accuracy"],
        "curve": curve,
    }


def kept(out: Path, name: str, index: int, epsilon: float, seed: int) -> dict[str, Any]:
    """Returns a run, which is trained if it is not finished."""
    file = out / f"{name}-{epsilon:g}-{index}-{seed}.json"
    if not file.exists():
        found = train(name, index, epsilon, seed)
        file.write_text(json.dumps(found))
        print(f"{file.stem}: {found['finetuned']:.4f}, shared {found['shared']:.4f}", flush=True)
    result: dict[str, Any] = json.loads(file.read_text())
    return result


def chosen(out: Path, name: str, epsilon: float) -> int:
    """Returns the setting with the best score on validation rows, after finetuning."""
    count = len(SIDES[name].settings)
    tried = [kept(out, name, index, epsilon, TUNING)["finetuned"] for index in range(count)]
    return int(np.argmax(tried))


def at(curve: Sequence[Sequence[float]], time: float) -> float:
    """Returns the accuracy of the shared model at a time; that of the first step before it."""
    before = [accuracy for when, accuracy in curve if when <= time]
    if not before:
        return float(curve[0][1])
    return float(before[-1])


def rows(out: Path, epsilons: Sequence[float]) -> list[dict[str, Any]]:
    """Returns a row for each side, epsilon and seed."""
    found = []
    for epsilon in epsilons:
        best = {name: chosen(out, name, epsilon) for name in SIDES}
        for seed in SEEDS:
            runs = {name: kept(out, name, index, epsilon, seed) for name, index in best.items()}
            end = runs["not waiting"]["curve"][-1][0]
            for name, run in runs.items():
                clip, steps = SIDES[name].settings[best[name]]
                found.append(
                    {
                        "side": name,
                        "epsilon": epsilon,
                        "seed": seed,
                        "chosen": f"clip {clip:g}, {steps} steps",
                        "finetuned": run["finetuned"],
                        "shared": run["shared"],
                        "time": run["curve"][-1][0],
                        # at the time at which the server that does not wait has ended
                        "shared_then": at(run["curve"], end),
                    }
                )
    return found


def by_spread(out: Path) -> list[dict[str, Any]]:
    """Returns a row for each spread and seed, with the settings that were chosen for one of them.

    What the server that waits computes does not depend on latencies, only its times do.
    """
    best = {name: chosen(out, name, SPREADS_AT) for name in SIDES}
    found = []
    for spread, slow in SPREADS:
        for seed in SEEDS:
            waited = kept(out, "waiting", best["waiting"], SPREADS_AT, seed)
            index = best["not waiting"]
            file = out / f"spread-{spread:g}-{slow:g}-{seed}.json"
            if not file.exists():
                run = train("not waiting", index, SPREADS_AT, seed, spread, slow)
                file.write_text(json.dumps(run))
                print(f"{file.stem}: {run['finetuned']:.4f}", flush=True)
            run = json.loads(file.read_text())
            rounds = SIDES["waiting"].settings[best["waiting"]][1]
            clock = Clock(seed, True, spread, slow)
            coins = np.random.default_rng(seed + 1000)
            cohorts = [np.flatnonzero(coins.random(WRITERS) < 0.1) for _ in range(rounds)]
            found.append(
                {
                    "spread": spread,
                    "slow": slow,
                    "seed": seed,
                    "waited": sum(clock.slowest(cohort) for cohort in cohorts),
                    "time": run["curve"][-1][0],
                    "finetuned_waiting": waited["finetuned"],
                    "finetuned": run["finetuned"],
                }
            )
    return found


def spreads_table(found: Sequence[dict[str, str]]) -> str:
    """Returns the times and the paired differences of the accuracy, by spread."""
    lines = []
    for spread, slow in SPREADS:
        own = [
            {column: float(value) for column, value in row.items()}
            for row in found
            if (float(row["spread"]), float(row["slow"])) == (spread, slow)
        ]
        times = [interval(row[column] for row in own)[0] for column in ("waited", "time")]
        mean, half = interval(row["finetuned"] - row["finetuned_waiting"] for row in own)
        writers = "none" if slow == 1 else f"a tenth, {slow:g} times"
        cells = [f"{spread:g}", writers, *(f"{time:.0f}" for time in times)]
        lines.append([*cells, f"{times[0] / times[1]:.1f}", f"{mean:+.4f} ± {half:.4f}"])
    titles = ["sigma", "slow writers", "time, waiting:", "not waiting:", "ratio:"]
    return markdown([*titles, "finetuned, difference:"], lines)


def table(found: Sequence[dict[str, str]]) -> str:
    """Returns the means over seeds and the paired differences, by epsilon."""
    lines = []
    for epsilon in sorted({float(row["epsilon"]) for row in found}):
        own = {
            name: [row for row in found if row["side"] == name and float(row["epsilon"]) == epsilon]
            for name in SIDES
        }
        cells = ["none" if math.isinf(epsilon) else f"{epsilon:g}"]
        for column in ("finetuned", "shared_then"):
            values = {name: [float(row[column]) for row in own[name]] for name in SIDES}
            cells += [f"{interval(values[name])[0]:.3f}" for name in SIDES]
            pairs = zip(values["not waiting"], values["waiting"], strict=True)
            mean, half = interval(late - waited for late, waited in pairs)
            cells.append(f"{mean:+.3f} ± {half:.3f}")
        times = {name: [float(row["time"]) for row in own[name]] for name in SIDES}
        cells += [f"{interval(times[name])[0]:.0f}" for name in SIDES]
        pairs = zip(times["waiting"], times["not waiting"], strict=True)
        ratio, half = interval(waited / late for waited, late in pairs)
        lines.append([*cells, f"{ratio:.1f} ± {half:.1f}"])
    titles = ["epsilon", "finetuned, waiting:", "not waiting:", "difference:"]
    titles += ["shared at equal time, waiting:", "not waiting:", "difference:"]
    titles += ["time, waiting:", "not waiting:", "ratio:"]
    return markdown(titles, lines)


def settings_text(found: Sequence[dict[str, str]]) -> str:
    """Returns the chosen settings, a line for each epsilon."""
    each = {(row["epsilon"], row["side"]): row["chosen"] for row in found}
    shown = sorted({float(row["epsilon"]) for row in found})
    lines = []
    for epsilon in shown:
        name = "none" if math.isinf(epsilon) else f"{epsilon:g}"
        both = [text for (value, _), text in each.items() if float(value) == epsilon]
        lines.append([name, *both])
    return markdown(["epsilon", *SIDES], lines)


def draw(out: Path, epsilons: Sequence[float]) -> None:
    """Draws the accuracy of the shared model by simulated time, a panel for each epsilon."""
    with drawing(HERE / "time.png", 3.2 * len(epsilons), 3.2) as figure:
        panels = figure.subplots(1, len(epsilons), sharey=True, squeeze=False)[0]
        for axes, epsilon in zip(panels, sorted(epsilons), strict=True):
            for name in SIDES:
                index = chosen(out, name, epsilon)
                curves = [kept(out, name, index, epsilon, seed)["curve"] for seed in SEEDS]
                times = np.geomspace(min(curve[0][0] for curve in curves), 1e4, 200)
                mean = [np.mean([at(curve, time) for curve in curves]) for time in times]
                axes.plot(times, mean, label=name)
            axes.set_xscale("log")
            title = "no noise" if math.isinf(epsilon) else f"epsilon {epsilon:g}"
            axes.set_title(title)
            axes.set_xlabel("simulated time (median latencies)")
        panels[0].set_ylabel("accuracy of the shared model")
        legend_above(figure)


def main() -> None:
    """Parses the command line, trains what is missing, writes the tables and the picture."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", maxsplit=1)[0])
    parser.add_argument("--epsilons", type=float, nargs="+", default=list(EPSILONS))
    parser.add_argument("--out", type=Path, default=Path("outputs/reproduce/asynchronous"))
    parser.add_argument("--collect", action="store_true", help="tables from scores.csv alone")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    if not arguments.collect:
        arguments.out.mkdir(parents=True, exist_ok=True)
        write_csv(HERE / "scores.csv", rows(arguments.out, arguments.epsilons), COLUMNS)
        draw(arguments.out, arguments.epsilons)
        write_csv(HERE / "spreads.csv", by_spread(arguments.out), SPREAD_COLUMNS)
    found = read_csv(HERE / "scores.csv")
    replace_section(HERE / "README.md", "scores", table(found))
    replace_section(HERE / "README.md", "chosen", settings_text(found))
    spreads = read_csv(HERE / "spreads.csv")
    replace_section(HERE / "README.md", "spreads", spreads_table(spreads))


if __name__ == "__main__":
    main()
