"""Is it worth waiting for the slowest clients of a round?

Three servers train FedAvg and PMTL on the embedded digits and on a sample of FEMNIST: one waits
for its cohort, one drops who has not answered by a public deadline, and one steps when some of the
busy clients have answered (buffered aggregation). The first two have secret cohorts, whose privacy
is amplified; the third has noise that is correlated over steps instead. Each server tries
six settings of a method for each epsilon, of which validation rows of another seed choose one.
Nothing is chosen on test rows.

    python benchmarks/reproduce/asynchronous/run.py --femnist leaf_femnist_206.json.zip
    python benchmarks/reproduce/asynchronous/run.py --collect  # tables and pictures of the scores
"""

from __future__ import annotations

import argparse
import itertools
import json
import math
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import torch

HERE = Path(__file__).parent
sys.path[:0] = [str(HERE.parent), str(HERE.parent / "comparison"), str(HERE)]

from servers import Clock, Deadline, LastTime, Law, Turns  # noqa: E402
from settings import DELTA, STUDIES, Study, held_out, load  # noqa: E402
from sweep import existing, read_csv, renew, write_csv  # noqa: E402
from tables import write_report  # noqa: E402

from fedmtl import (  # noqa: E402
    PMTL,
    ClientPrivacy,
    FedAvg,
    FederatedDataset,
    Finetune,
    Trainer,
    models,
)

EPSILONS = (2.0, 4.0, 8.0, math.inf)
SEEDS = (0, 1, 2, 3, 4)
TUNING = 10
SPREADS_AT = (2.0, 4.0, math.inf)
"""The epsilons of the runs by the law of latencies."""
Length = tuple[int, float]
LAW = Law(1.0, 10.0)
LAWS = (Law(0.0, 1.0), Law(0.5, 1.0), Law(1.0, 1.0), LAW, Law(1.5, 10.0))
SERVERS = ("waiting", "deadline", "not waiting")
COLUMNS = (
    "study", "method", "server", "epsilon", "seed", "clip", "lam", "steps", "share", "chosen",
    "accuracy", "slow", "before", "time",
)  # fmt: skip
SPREAD_COLUMNS = (
    "study", "spread", "slow", "server", "epsilon", "seed", "accuracy", "time",
)  # fmt: skip


@dataclass(frozen=True)
class Problem:
    """A data set with the settings of all servers.

    Attributes:
        title: its name in tables.
        study: of the comparison, which has the data, solver and clip norms.
        way: of the finetuning, from the shared model.
        turns: sizes of the steps.
        methods: that are trained, with the pull of PMTL, which is that of the comparison.
        lengths: by server four numbers of steps, each with the share of the clients who answer by
            the deadline, 1 without one.
        by_length: epsilons at which each of the lengths of FedAvg is scored, so that accuracy can
            be drawn by time.
    """

    title: str
    study: Study
    way: Finetune
    turns: Turns
    methods: Mapping[str, float]
    lengths: Mapping[str, tuple[Length, ...]]
    by_length: tuple[float, ...] = ()


@dataclass(frozen=True)
class Setting:
    """What a server chooses.

    Attributes:
        clip: L2 norm of an update.
        lam: pull of PMTL; 0 for FedAvg.
        steps: of the server.
        share: of the clients, who answer by the deadline; 1 without one.
    """

    clip: float
    lam: float
    steps: int
    share: float


@dataclass(frozen=True)
class Place:
    """Where runs are kept, and what they train on.

    Attributes:
        out: folder of the runs.
        problem: the data set.
        root: file of the data, or None.
    """

    out: Path
    problem: Problem
    root: Path | None

    def data(self, seed: int) -> FederatedDataset:
        """Returns the rows of a seed: of the tuning seed training rows, divided again."""
        return _data(self.problem.study.name, self.root, seed)

    def run(
        self,
        method: str,
        server: str,
        epsilon: float,
        setting: Setting,
        seed: int,
        law: Law = LAW,
    ) -> dict[str, Any]:
        """Returns the scores of a run, which is trained if it is not finished."""
        trained = method.split(",")[0]
        parts = [trained, server, f"{epsilon:g}", f"{setting.clip:g}", f"{setting.lam:g}"]
        parts += [str(setting.steps), f"{setting.share:g}", law.name, str(seed)]
        file = self.out / self.problem.study.name / ("_".join(parts) + ".json")
        if not file.exists():
            data = self.data(seed)
            found = train(self.problem, data, trained, server, epsilon, setting, seed, law)
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_text(json.dumps(found))
            print(f"{self.problem.study.name}_{file.stem}: {found['finetuned']:.4f}", flush=True)
        result: dict[str, Any] = json.loads(file.read_text())
        return result

    def best(
        self, method: str, server: str, epsilon: float, settings: Sequence[Setting]
    ) -> Setting:
        """Returns the setting with the best score on the validation rows."""
        runs = [self.run(method, server, epsilon, each, TUNING) for each in settings]
        tried = [run["finetuned"] for run in runs]
        return settings[int(np.argmax(tried))]

    def chosen(self, method: str, server: str, epsilon: float) -> Setting:
        """Returns the best of six settings: two clips by the three longer lengths."""
        problem = self.problem
        lam = problem.methods[method]
        settings = [
            Setting(clip, lam, *length)
            for clip in problem.study.clips[1:]
            for length in problem.lengths[server][1:]
        ]
        return self.best(method, server, epsilon, settings)

    def choices(self, method: str, server: str, epsilon: float) -> dict[Setting, bool]:
        """Returns what is scored on test rows: the chosen setting, and of FedAvg the other lengths
        with its clip, if accuracy is drawn by time."""
        chosen = self.chosen(method, server, epsilon)
        found = {chosen: True}
        if method.startswith("FedAvg") and epsilon in self.problem.by_length:
            for steps, share in self.problem.lengths[server]:
                found.setdefault(replace(chosen, steps=steps, share=share), False)
        return found


@cache
def _data(name: Any, root: Path | None, seed: int) -> FederatedDataset:
    data = load(name, root, seed)
    if seed == TUNING:
        return held_out(data, seed)
    return data


_DIGITS = STUDIES["digits"]
_FEMNIST = STUDIES["femnist"]
PROBLEMS = (
    Problem(
        title="digits",
        study=_DIGITS,
        way=Finetune(kind="kl", lam=0.1, local=replace(_DIGITS.solver, epochs=20), start="shared"),
        turns=Turns(cohort=100, buffer=50, rest=15),
        methods={"FedAvg, finetuned": 0.0, "PMTL, finetuned": 1.0},
        lengths={
            "waiting": ((10, 1.0), (20, 1.0), (50, 1.0), (100, 1.0)),
            "deadline": ((20, 0.5), (50, 0.5), (100, 0.5), (100, 0.8)),
            "not waiting": ((20, 1.0), (40, 1.0), (80, 1.0), (160, 1.0)),
        },
        by_length=(4.0, math.inf),
    ),
    Problem(
        title="FEMNIST",
        study=_FEMNIST,
        way=Finetune(
            kind="kl", lam=3.0, local=replace(_FEMNIST.solver, epochs=10, lr=0.1), start="shared"
        ),
        turns=Turns(cohort=100, buffer=50, rest=2),
        methods={"FedAvg, finetuned": 0.0, "PMTL, finetuned": 1.0},
        lengths={
            "waiting": ((8, 1.0), (15, 1.0), (30, 1.0), (60, 1.0)),
            "deadline": ((15, 0.5), (30, 0.5), (60, 0.5), (60, 0.8)),
            "not waiting": ((15, 1.0), (30, 1.0), (60, 1.0), (120, 1.0)),
        },
    ),
)


def train(
    problem: Problem,
    data: FederatedDataset,
    method: str,
    server: str,
    epsilon: float,
    setting: Setting,
    seed: int,
    law: Law,
) -> dict[str, Any]:
    """Returns the mean accuracies of a run, also those of the slow clients, and its time.

    Args:
        problem: with the settings of all servers.
        data: of the clients.
        method: "FedAvg" or "PMTL".
        server: one of ``SERVERS``.
        epsilon: for a client.
        setting: of the method and the server.
        seed: of start, cohorts, noise and latencies.
        law: of the latencies; a server that waits has its time by every law.
    """
    algorithm: Any = FedAvg(local=problem.study.solver)
    if method == "PMTL":
        algorithm = PMTL(lam=setting.lam, local=problem.study.solver)
    turns = problem.turns
    clock: Clock | LastTime = Clock((*LAWS, law), len(data), seed)
    schedule: Any = turns.waiting()
    bands: Any = None
    if server == "deadline":
        schedule = Deadline(turns.cohort, setting.share, law, seed, data.keys)
    if server == "not waiting":
        schedule = turns.buffered(law, len(data))
        clock = LastTime()
        if epsilon < math.inf:
            bands = "auto"
    privacy = ClientPrivacy(clip_norm=setting.clip, epsilon=epsilon, delta=DELTA, bands=bands)
    result = Trainer(
        algorithm=algorithm,
        data=data,
        model=models.softmax_regression(),
        schedule=schedule,
        privacy=privacy,
        rounds=setting.steps,
        finetune=problem.way,
        seed=seed,
        eval_every=setting.steps,
        callbacks=(clock,),
        baselines=(),
        progress=False,
    ).fit()
    slow = data.ids[9::10]
    found: dict[str, Any] = {}
    for model in ("finetuned", "personal"):
        scores = result.scores[model]["accuracy"]
        found[model] = float(np.mean(list(scores.values())))
        found[f"{model}_slow"] = float(np.mean([scores[name] for name in slow if name in scores]))
    if server == "deadline":
        found["times"] = {law.name: setting.steps * law.deadline(len(data), setting.share)}
    elif isinstance(clock, Clock):
        found["times"] = {each.name: time for each, time in clock.times.items()}
    else:
        found["times"] = {law.name: clock.time}
    return found


def scored(place: Place, epsilons: Sequence[float]) -> Iterator[dict[str, Any]]:
    """Yields a row for each method, epsilon, server, setting and seed."""
    for method, epsilon, server in itertools.product(place.problem.methods, epsilons, SERVERS):
        for setting, chosen in place.choices(method, server, epsilon).items():
            for seed in SEEDS:
                run = place.run(method, server, epsilon, setting, seed)
                yield {
                    "study": place.problem.title,
                    "method": method,
                    "server": server,
                    "epsilon": epsilon,
                    "seed": seed,
                    "clip": setting.clip,
                    "lam": setting.lam,
                    "steps": setting.steps,
                    "share": setting.share,
                    "chosen": int(chosen),
                    "accuracy": run["finetuned"],
                    "slow": run["finetuned_slow"],
                    # the clients' models of the run, of FedAvg the shared one
                    "before": run["personal"],
                    "time": run["times"][LAW.name],
                }


def by_spread(place: Place, epsilons: Sequence[float]) -> Iterator[dict[str, Any]]:
    """Yields a row of FedAvg for each law of latencies, epsilon, server and seed.

    The settings are those that were chosen for one law. What the server that waits computes does
    not depend on latencies, only its times do.
    """
    method = "FedAvg, finetuned"
    for epsilon, server in itertools.product(epsilons, SERVERS):
        setting = place.chosen(method, server, epsilon)
        for law, seed in itertools.product(LAWS, SEEDS):
            trained_for = law
            if server == "waiting":
                trained_for = LAW
            run = place.run(method, server, epsilon, setting, seed, trained_for)
            yield {
                "study": place.problem.title,
                "spread": law.spread,
                "slow": law.slow,
                "server": server,
                "epsilon": epsilon,
                "seed": seed,
                "accuracy": run["finetuned"],
                "time": run["times"][law.name],
            }


def main() -> None:
    """Parses the command line, trains what is missing, writes the tables and the picture."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", maxsplit=1)[0])
    parser.add_argument("--femnist", type=existing, help="file of FEMNIST; without it digits alone")
    parser.add_argument("--out", type=Path, default=Path("outputs/reproduce/asynchronous"))
    parser.add_argument("--collect", action="store_true", help="tables of what is recorded")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    if not arguments.collect:
        digits = Place(arguments.out, PROBLEMS[0], None)
        renew(HERE / "scores.csv", list(scored(digits, EPSILONS)), COLUMNS)
        write_csv(HERE / "spreads.csv", list(by_spread(digits, SPREADS_AT)), SPREAD_COLUMNS)
        if arguments.femnist is not None:
            femnist = Place(arguments.out, PROBLEMS[1], arguments.femnist)
            renew(HERE / "scores.csv", list(scored(femnist, EPSILONS)), COLUMNS)
    write_report(HERE, read_csv(HERE / "scores.csv"), read_csv(HERE / "spreads.csv"))


if __name__ == "__main__":
    main()
