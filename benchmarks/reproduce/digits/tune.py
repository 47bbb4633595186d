"""The settings of the main job's methods, each chosen with the same effort, apart from the data of its scores.

The writers of this page are others than those of the main job (other ids, so another slant and stroke each), and their
images come from the training pool of the main job alone: no image that the main job tests on is seen. Every method has
32 settings: Local, FedAvg and PMTL one grid of 32; with finetuning a grid of 16 trainings, judged after one way of
finetuning, and 16 ways of finetuning from the best of them. The setting of the largest mean test accuracy over the
tuning seeds is chosen. Epsilon, cohort and rounds are those of the main job.

    python benchmarks/reproduce/digits/tune.py          # writes tuning.csv and prints the choices
"""

from __future__ import annotations

import argparse
import itertools
import math
import sys
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from statistics import mean
from typing import Any

import torch

HERE = Path(__file__).parent
sys.path.insert(0, str(HERE.parent))

from sweep import write_csv  # noqa: E402

from fedmtl import (  # noqa: E402
    PMTL,
    ClientPrivacy,
    FedAvg,
    FederatedDataset,
    Finetune,
    Local,
    LocalSGD,
    PoissonSampling,
    Result,
    Trainer,
    models,
)
from fedmtl.data.examples import Examples, client_keys  # noqa: E402
from fedmtl.data.readers.digits import CLASSES, deal, pools, raw_digits, write  # noqa: E402
from fedmtl.random import derive_key, keyed_bits, keyed_generator, keyed_uniform  # noqa: E402

WRITERS, IMAGES, EPSILON, ROUNDS, COHORT = 1000, 10, 4.0, 100, 100
CLIPS, EPOCHS = (0.5, 1.0, 1.5, 3.0), (1, 2, 5, 10)
REFERENCE = Finetune(kind="mean", lam=0.1, local=LocalSGD(lr=0.5, epochs=5))
COLUMNS = ("method", "setting", "accuracy", "seeds")


@dataclass(frozen=True)
class Setting:
    """A training: the algorithm and the clip of its release, and how its clients finetune."""

    algorithm: FedAvg | PMTL | Local
    clip: float | None = None
    finetune: Finetune | None = None

    def text(self) -> str:
        """What differs between settings, in words."""
        solver = self.algorithm.local
        parts = [f"lr {solver.lr:g}", f"{solver.epochs} epochs", f"batches of {solver.batch_size}"]
        if isinstance(self.algorithm, PMTL):
            parts.insert(0, f"lam {self.algorithm.lam:g}")
        if self.clip is not None:
            parts.append(f"clip {self.clip:g}")
        if self.finetune is not None:
            own = self.finetune
            pull = "" if own.kind == "vanilla" else f" lam {own.lam:g}"
            parts.append(
                f"then {own.kind}{pull}, {own.local.epochs} epochs from the {own.start} model"
            )
        return ", ".join(parts)


def sgd(lr: float = 0.5, epochs: int = 5, batch_size: int = 10) -> LocalSGD:
    return LocalSGD(lr=lr, epochs=epochs, batch_size=batch_size)


LOCAL = [
    Setting(Local(local=sgd(*v))) for v in itertools.product((0.05, 0.1, 0.2, 0.5), EPOCHS, (5, 10))
]
FEDAVG = [
    Setting(FedAvg(local=sgd(lr, e)), c)
    for lr, e, c in itertools.product((0.1, 0.5), EPOCHS, CLIPS)
]
PMTLS = [
    Setting(PMTL(lam=lam, local=sgd(epochs=e)), c)
    for lam, e, c in itertools.product((0.1, 0.3, 1.0, 3.0), (2, 5), CLIPS)
]
FINETUNES = [
    *(
        Finetune(kind="mean", lam=lam, local=sgd(epochs=e))
        for lam, e in itertools.product((0.03, 0.1, 0.3), (5, 20, 60))
    ),
    *(Finetune(kind="vanilla", local=sgd(epochs=e)) for e in (5, 20)),
    *(Finetune(kind="kl", lam=lam, local=sgd(epochs=20)) for lam in (0.1, 1.0)),
    *(Finetune(kind="ewc", lam=lam, local=sgd(epochs=20)) for lam in (1.0, 10.0, 100.0)),
]


@cache
def tuning_data(seed: int) -> FederatedDataset:
    """Writers of their own, with images of the main job's training pool only: split into two pools by ``seed``."""
    images, labels = raw_digits()
    pool = pools(len(images), 0.2, 0)[0]
    order = torch.from_numpy(keyed_generator(seed, "tuning/pools").permutation(len(pool)))
    cut = round(0.2 * len(pool))
    ids = tuple(f"tuning-{seed}-{i}" for i in range(WRITERS))
    keys = client_keys(ids)
    chosen = keyed_bits(
        derive_key(seed, "tuning/classes"), keys[:, None], 0, torch.arange(CLASSES)
    ).argsort(1)[:, :4]
    place = torch.zeros_like(keys)
    angle = math.radians(45.0) * (
        2 * keyed_uniform(derive_key(seed, "tuning/rotation"), keys, 0, place) - 1
    )
    power = torch.exp(
        math.log(2.0) * (2 * keyed_uniform(derive_key(seed, "tuning/gamma"), keys, 0, place) - 1)
    )
    sides = []
    for part in (pool[order[cut:]].sort().values, pool[order[:cut]].sort().values):
        rows = deal(labels, part, chosen, keys, IMAGES, seed)
        offsets = torch.arange(0, WRITERS * IMAGES + 1, IMAGES)
        sides.append(
            Examples(
                write(images[rows], angle, power).flatten(0, 1), labels[rows].flatten(), offsets
            )
        )
    return FederatedDataset(sides[0], sides[1], ids, classes=CLASSES, name="tuning writers")


def trained(setting: Setting, seed: int) -> Result:
    """One run on the tuning writers."""
    return Trainer(
        algorithm=setting.algorithm,
        data=tuning_data(seed),
        model=models.softmax_regression(),
        schedule=PoissonSampling(cohort=COHORT),
        privacy=None
        if setting.clip is None
        else ClientPrivacy(clip_norm=setting.clip, epsilon=EPSILON, delta=1e-5),
        rounds=ROUNDS,
        finetune=setting.finetune,
        seed=seed,
        eval_every=ROUNDS,
        progress=False,
    ).fit()


def best(
    method: str, settings: list[Setting], seeds: list[int], rows: list[dict[str, Any]]
) -> Setting:
    """The setting of the largest mean accuracy; every one becomes a row."""
    scores = []
    for setting in settings:
        scores.append(mean(trained(setting, seed).final["accuracy"] for seed in seeds))
        rows.append(
            {
                "method": method,
                "setting": setting.text(),
                "accuracy": scores[-1],
                "seeds": len(seeds),
            }
        )
        print(f"{method}: {setting.text()}: {scores[-1]:.4f}", flush=True)
    return settings[max(range(len(settings)), key=scores.__getitem__)]


def finetuned(setting: Setting, finetune: Finetune) -> Setting:
    return Setting(setting.algorithm, setting.clip, finetune)


def main() -> None:
    """Parse the command line, train, print the choices."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", maxsplit=1)[0])
    parser.add_argument(
        "--seeds", type=int, nargs="+", default=[1, 2], help="of writers, images, start and noise"
    )
    seeds = parser.parse_args().seeds
    torch.set_num_threads(1)
    rows: list[dict[str, Any]] = []
    choices = {
        "Local": best("Local", LOCAL, seeds, rows),
        "FedAvg": best("FedAvg", FEDAVG, seeds, rows),
        "PMTL": best("PMTL", PMTLS, seeds, rows),
    }
    bases = {"FedAvg": [s for s in FEDAVG if s.algorithm.local.lr == 0.5]}
    for start in ("shared", "personal"):
        bases[f"PMTL, {start} model"] = [s for s in PMTLS if s.algorithm.lam in (0.3, 1.0)]
    for name, settings in bases.items():
        start = "personal" if "personal" in name else "shared"
        method = f"{name}, finetuned"
        first = Finetune(kind=REFERENCE.kind, lam=REFERENCE.lam, local=REFERENCE.local, start=start)
        base = best(method, [finetuned(s, first) for s in settings], seeds, rows)
        ways = [Finetune(kind=f.kind, lam=f.lam, local=f.local, start=start) for f in FINETUNES]
        choices[method] = best(method, [base, *(finetuned(base, way) for way in ways)], seeds, rows)
    write_csv(HERE / "tuning.csv", rows, COLUMNS)
    for method, setting in choices.items():
        score = max(row["accuracy"] for row in rows if row["method"] == method)
        print(f"chosen for {method}: {setting.text()} ({score:.4f})")


if __name__ == "__main__":
    main()
