"""Which private shared model is the best start for finetuning?

FedAvg's model, finetuned by every client on its own rows at no further epsilon, is the strongest simple private method
on the embedded digits. Here the way it is trained varies, and the finetuning stays: who takes part (secret Poisson
cohorts, all clients, clients in turn), how noise is drawn (independent over rounds, or correlated in bands), how the
clip norm is found (a number, or a private quantile), how the server steps, and what is shared (FedAvg's model or PMTL's
mean). Every way has four settings and chooses one of them for each epsilon by its score on validation rows of another
seed, a fifth of its training rows. Nothing is chosen on test rows.

    python benchmarks/reproduce/starts/run.py
    python benchmarks/reproduce/starts/run.py --starts "PMTL, secret cohorts, lambda chosen"  # only these; others stay
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from statistics import mean
from typing import Any

import torch

HERE = Path(__file__).parent
sys.path[:0] = [str(HERE.parent), str(HERE.parent / "comparison")]

from scores import Role, Score, by_client, difference, mark, renew_scores, table  # noqa: E402
from settings import DELTA, STUDIES, Setting, held_out, load  # noqa: E402
from sweep import markdown, replace_section  # noqa: E402

from fedmtl import (  # noqa: E402
    PMTL,
    ClientPrivacy,
    CyclicCohorts,
    FedAvg,
    FederatedDataset,
    Finetune,
    FullParticipation,
    Local,
    PoissonSampling,
    QuantileClip,
    Result,
    ServerOptimizer,
    Trainer,
    models,
)
from fedmtl.algorithms import Algorithm  # noqa: E402

EPSILONS = (0.3, 1.0, 3.0)
SEEDS, TUNING = (0, 1, 2, 3, 4), (10,)
SETTING = "digits: 1,000 writers, starts for finetuning"
STUDY = STUDIES["digits"]
WAY = Finetune(
    kind="kl", lam=0.1, local=replace(STUDY.solver, epochs=20)
)  # what every method of the comparison chose
ALONE = (
    1.0,
    150,
)  # step size and epochs of training alone, which the comparison chose of nine in every seed
TURNS, SECRET = CyclicCohorts(cohort=100), PoissonSampling(cohort=100)
MOMENTUM = ServerOptimizer(optimizer_name="SGD", lr=0.3, options={"momentum": 0.9})
ADAM = ServerOptimizer(optimizer_name="Adam", lr=0.1)


Settings = tuple[tuple[Algorithm, float | QuantileClip, int], ...]  # algorithm, clip norm, rounds


@dataclass(frozen=True)
class Start:
    """A way to train the shared model.

    Attributes:
        role: in tables.
        schedule: who takes part.
        settings: four of them.
        bands: of the noise.
    """

    role: Role
    schedule: Any
    settings: Settings
    bands: Any = None

    def text(self, index: int) -> str:
        """The setting numbered ``index``, in words."""
        algorithm, clip, rounds = self.settings[index]
        optimizer = getattr(algorithm, "server_optimizer", None)
        server = (
            ""
            if optimizer is None
            else f", {'Adam' if optimizer.optimizer_name == 'Adam' else 'momentum'}, lr {optimizer.lr:g}"
        )
        pull = f"lambda {algorithm.lam:g}, " if isinstance(algorithm, PMTL) else ""
        bound = f"quantile {clip.quantile:g}" if isinstance(clip, QuantileClip) else f"{clip:g}"
        return f"{pull}clip {bound}, {rounds} rounds{server}"


def settings(
    rounds: int,
    fewer: int,
    algorithm: Algorithm | None = None,
    clips: tuple[Any, Any, Any] = STUDY.clips,
) -> Settings:
    """Three clips, and the middle one with fewer rounds."""
    own = algorithm or FedAvg(local=STUDY.solver)
    low, middle, high = clips
    return (own, low, rounds), (own, middle, rounds), (own, high, rounds), (own, middle, fewer)


def with_server(optimizer: ServerOptimizer) -> FedAvg:
    return FedAvg(local=STUDY.solver, server_optimizer=optimizer)


def stepped(rounds: int, clips: tuple[Any, Any, Any] = STUDY.clips) -> Settings:
    """Three clips with momentum, and the middle one with Adam."""
    ways = [(MOMENTUM, clip) for clip in clips] + [(ADAM, clips[1])]
    return tuple((with_server(optimizer), clip, rounds) for optimizer, clip in ways)


def pmtl(lam: float = 1.0, **settings: Any) -> PMTL:
    return PMTL(lam=lam, local=STUDY.solver, **settings)


_RATES = tuple(
    (with_server(replace(ADAM, lr=lr)), clip, 50)
    for lr, clip in ((0.05, 1.0), (0.1, 1.0), (0.2, 1.0), (0.1, 0.3))
)
_QUANTILES = tuple(
    QuantileClip(initial=1.0, quantile=quantile, count_noise=20.0) for quantile in (0.05, 0.2, 0.5)
)
STARTS = {
    "FedAvg, secret cohorts": Start("fedavg", SECRET, settings(50, 20)),
    "FedAvg, secret cohorts, server momentum": Start("fedavg", SECRET, stepped(50)),
    "FedAvg, secret cohorts, server Adam": Start("fedavg", SECRET, _RATES),
    "FedAvg, secret cohorts, quantile clip": Start(
        "fedavg", SECRET, settings(50, 20, clips=_QUANTILES)
    ),
    "FedAvg, secret cohorts, quantile clip, server momentum": Start(
        "fedavg", SECRET, stepped(50, _QUANTILES)
    ),
    "FedAvg, all clients": Start("fedavg", FullParticipation(), settings(20, 10)),
    "FedAvg, all clients, server momentum": Start("fedavg", FullParticipation(), stepped(20)),
    "FedAvg, in turn": Start("fedavg", TURNS, settings(50, 20)),
    "FedAvg, in turn, bands": Start("new", TURNS, settings(50, 20), "auto"),
    "FedAvg, in turn, bands, server momentum": Start("new", TURNS, stepped(50), "auto"),
    "PMTL, secret cohorts": Start("published", SECRET, settings(50, 20, pmtl())),
    "PMTL, secret cohorts, lambda chosen": Start(
        "published", SECRET, tuple((pmtl(lam), STUDY.clips[1], 50) for lam in (0.1, 0.3, 1.0, 3.0))
    ),
    "PMTL, secret cohorts, running mean": Start(
        "published", SECRET, settings(50, 20, pmtl(reference="local"))
    ),
}


@cache
def data_of(seed: int) -> FederatedDataset:
    """The rows of a seed; of a tuning seed its training rows alone, with a fifth as test rows."""
    data = load("digits", None, seed)
    return held_out(data, seed) if seed in TUNING else data


def train(start: Start, index: int, epsilon: float, seed: int) -> Result:
    """One run with its finetuning."""
    algorithm, clip, rounds = start.settings[index]
    return Trainer(
        algorithm=algorithm,
        data=data_of(seed),
        model=models.softmax_regression(),
        schedule=start.schedule,
        privacy=ClientPrivacy(clip_norm=clip, epsilon=epsilon, delta=DELTA, bands=start.bands),
        rounds=rounds,
        finetune=replace(WAY, start="shared"),
        seed=seed,
        eval_every=rounds,
        progress=False,
    ).fit()


def alone(seed: int) -> Result:
    """Training alone."""
    lr, epochs = ALONE
    return STUDY.train(
        data_of(seed),
        Setting(Local(local=replace(STUDY.solver, lr=lr, epochs=epochs)), None),
        0.0,
        seed,
    )


class Kept:
    """Results by name, in one file each, so that a run goes on where it was interrupted."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        folder.mkdir(parents=True, exist_ok=True)

    def get(self, name: str, run: Callable[..., Result], *arguments: Any) -> dict[str, Any]:
        """What is kept of ``run(*arguments)``, which is trained where it is missing."""
        file = self.folder / f"{name}.json"
        if not file.exists():
            result = run(*arguments)
            shared = result.final.get("global_accuracy")
            found = {
                "score": result.final["accuracy"],
                "shared": shared,
                "clients": result.personal_accuracy,
            }
            file.write_text(json.dumps(found))
            print(f"{name}: {found['score']:.4f}, before finetuning {shared}", flush=True)
        return json.loads(file.read_text())


def scores(kept: Kept, seeds: Sequence[int], names: Sequence[str]) -> list[Score]:
    """Tune and score what is missing of the starts ``names``; return their scores, and those of training alone."""
    base = {"setting": SETTING, "metric": "accuracy", "larger": True}
    local = {seed: kept.get(f"alone-{seed}", alone, seed) for seed in seeds}
    found = [
        Score(**base, role="local", method="Local", epsilon=0.0, seed=seed, score=one["score"],
              chosen="lr 1, 150 epochs", **by_client(one["clients"], one["clients"], larger=True))
        for seed, one in local.items()
    ]  # fmt: skip
    for epsilon in EPSILONS:
        for name in names:
            start = STARTS[name]
            tried = [
                mean(kept.get(f"tune-{name}-{epsilon:g}-{i}-{seed}", train, start, i, epsilon, seed)["score"]
                     for seed in TUNING)
                for i in range(len(start.settings))
            ]  # fmt: skip
            best = max(range(len(tried)), key=tried.__getitem__)
            for seed in seeds:
                one = kept.get(f"{name}-{epsilon:g}-{seed}", train, start, best, epsilon, seed)
                common = base | {
                    "role": start.role,
                    "epsilon": epsilon,
                    "seed": seed,
                    "chosen": start.text(best),
                }
                clients = by_client(one["clients"], local[seed]["clients"], larger=True)
                found.append(
                    Score(**common, method=f"{name}, finetuned", score=one["score"], **clients)
                )
                found.append(Score(**common, method=f"{name}, not finetuned", score=one["shared"]))
    return found


FIRST, TURN, BANDS = "FedAvg, secret cohorts", "FedAvg, in turn", "FedAvg, in turn, bands"
STEPPED, QUANTILE, MEAN = "server momentum", "quantile clip", "PMTL, secret cohorts"
PAIRS = (
    *((name, FIRST) for name in STARTS if name != FIRST),
    (BANDS, TURN),
    (f"{BANDS}, {STEPPED}", f"{FIRST}, {STEPPED}"),
    (f"FedAvg, all clients, {STEPPED}", f"{FIRST}, {STEPPED}"),
    (f"{FIRST}, {QUANTILE}, {STEPPED}", f"{FIRST}, {STEPPED}"),
    *((f"{MEAN}, {change}", MEAN) for change in ("lambda chosen", "running mean")),
)


def differences(found: Sequence[Score]) -> str:
    """Return a line for each pair of starts, both finetuned: the paired differences by epsilon."""
    lines = []
    for names in PAIRS:
        cells = []
        for epsilon in EPSILONS:
            own, other = (
                [s for s in found if s.method == f"{name}, finetuned" and s.epsilon == epsilon]
                for name in names
            )
            gain, half = difference(own, other)
            cells.append(f"{gain:+.3f} ± {half:.3f} {mark(own, other)}".strip())
        lines.append([*names, *cells])
    return markdown(["start", "against", *(f"epsilon {e:g}:" for e in EPSILONS)], lines)


def main() -> None:
    """Parse the command line, train what is missing, write the tables."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", maxsplit=1)[0])
    parser.add_argument(
        "--seeds",
        type=int,
        nargs="+",
        default=list(SEEDS),
        help="of rows, start, cohorts and noise",
    )
    parser.add_argument("--starts", nargs="+", choices=STARTS, default=list(STARTS), metavar="NAME")
    parser.add_argument("--out", type=Path, default=Path("outputs/reproduce/starts"))
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    found = renew_scores(
        HERE / "scores.csv", scores(Kept(arguments.out), arguments.seeds, arguments.starts)
    )
    order = [
        "Local",
        *(f"{name}, {after}" for name in STARTS for after in ("finetuned", "not finetuned")),
    ]
    found = sorted((s for s in found if s.setting == SETTING), key=lambda s: order.index(s.method))
    replace_section(HERE / "README.md", "accuracy", table(found, SETTING))
    replace_section(HERE / "README.md", "differences", differences(found))


if __name__ == "__main__":
    main()
