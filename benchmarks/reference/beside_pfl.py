"""FedAvg with client-level noise beside Apple's pfl, on the same cohorts, batches and noise multiplier.

    python -m benchmarks.reference.beside_pfl --pfl-python PATH

PATH is the interpreter of an environment with ``pip install "pfl[pytorch]"``, in which pfl's own FedAvg
trains, clips and adds its noise (``contenders/pfl_fedavg.py``). The settings are those of its benchmark
of central differential privacy on CIFAR10, ``benchmarks/image_classification/configs/baseline.yaml``:
1,000 clients of 50 images, cohorts of 50, one local epoch of batches of 10 at a step size of 0.1, a
server's step of 1, a clip norm of 0.4, and epsilon 2 at delta 1e-6. CIFAR10 is not here, so the clients
are writers of scikit-learn's digits, of four classes each, and the model is linear.

There are 100 rounds in place of 1,500. pfl divides a noised sum by the number of clients that took
part; here by the expected cohort, since the size of a Poisson cohort is not public.

Three noises are compared. ``clients`` is the noise that epsilon 2 takes for the 1,000 clients that are
there. ``population`` is that of pfl's benchmark, whose account pretends cohorts of 1,000 out of a
million clients and scales the noise down to a cohort of 50: its epsilon of 2 is not that of these
clients, which the CSV has beside it. ``none`` clips and adds nothing, so that both sides must end at the
same model but for rounding. With noise each side draws its own.
"""

from __future__ import annotations

import argparse
import json
import math
import subprocess
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from fedmtl import (
    ClientPrivacy,
    FedAvg,
    FederatedDataset,
    LocalSGD,
    PoissonSampling,
    Trainer,
    load_data,
    models,
    simulate,
)
from fedmtl.local import plan_batches
from fedmtl.privacy import ReleasePlan, open_channel, privacy_report

from .measure import commit
from .records import number
from .settings import SEEDS

IMAGES = 50
COHORT = 50
ROUNDS = 100
CLIP = 0.4
EPSILON = 2.0
DELTA = 1e-6
SOLVER = LocalSGD(lr=0.1, epochs=1, batch_size=10)
SERVER_LR = 1.0
FILE = Path(__file__).parent / "pfl.csv"
PROGRAM = Path(__file__).parent / "contenders" / "pfl_fedavg.py"
COLUMNS = (
    "noise", "seed", "fedmtl", "pfl", "difference", "multiplier", "epsilon", "account_fedmtl",
    "account_pfl", "commit", "pfl_version",
)  # fmt: skip


@dataclass(frozen=True)
class Account:
    """A population for which noise is calibrated to :data:`EPSILON`.

    Attributes:
        cohort, clients: of the population.
    """

    cohort: int
    clients: int

    @property
    def scale(self) -> float:
        """Returns the factor that brings the noise on a sum to a cohort of :data:`COHORT`."""
        return COHORT / self.cohort

    def multiplier(self) -> float:
        """Returns the noise multiplier on a sum of :data:`COHORT` rows, as fedmtl calibrates it."""
        # The dimension does not enter the calibration.
        plan = ReleasePlan(name="update", dimension=1)
        privacy = ClientPrivacy(clip_norm=CLIP, epsilon=EPSILON, delta=DELTA)
        sampler = PoissonSampling(cohort=self.cohort).bind(self.clients)
        channel = open_channel(privacy, [plan], sampler, seed=0, steps=ROUNDS)
        found = privacy_report(channel).noise_multiplier
        assert found is not None
        return self.scale * found


ACCOUNTS = {"clients": Account(COHORT, 1000), "none": None, "population": Account(1000, 10**6)}
"""The noises, by their words in the CSV."""


@dataclass(frozen=True)
class Run:
    """What fedmtl's side has done, and pfl's side repeats.

    Attributes:
        data: of the clients.
        initial, model: the shared model (D,) before and after.
        cohorts: clients of each round.
        multiplier: of the noise on a sum, over the clip norm; 0 adds none.
        epsilon: at :data:`DELTA`, of the clients that are there; infinite without noise.
    """

    data: FederatedDataset
    initial: Tensor
    model: Tensor
    cohorts: list[Tensor]
    multiplier: float
    epsilon: float


def ours(noise: str, seed: int) -> Run:
    """Returns fedmtl's run, with the cohorts that it drew.

    Args:
        noise: a key of :data:`ACCOUNTS`.
        seed: of the split, the cohorts, the batches and the noise.
    """
    account = ACCOUNTS[noise]
    multiplier = 0.0
    privacy = ClientPrivacy(clip_norm=CLIP, epsilon=math.inf, delta=DELTA)
    if account is not None:
        multiplier = account.multiplier()
        privacy = ClientPrivacy(clip_norm=CLIP, noise_multiplier=multiplier, delta=DELTA)
    data = load_data("digits", train_images=IMAGES, seed=seed)
    trainer = Trainer(
        algorithm=FedAvg(local=SOLVER, server_lr=SERVER_LR),
        data=data,
        model=models.softmax_regression(),
        schedule=PoissonSampling(cohort=COHORT),
        privacy=privacy,
        rounds=ROUNDS,
        seed=seed,
        progress=False,
    )
    cohorts = []
    for step in simulate(trainer):
        cohorts.append(step.block.cohort)
    assert step.shared is not None
    return Run(data, step.problem.initial, step.shared, cohorts, multiplier, step.epsilon)


def examples(data: FederatedDataset) -> tuple[Tensor, Tensor]:
    """Returns the training images (N, F) and labels (N,) as fedmtl's clients see them."""
    x, y = data.gather("train", torch.arange(len(data.train)))
    return x.flatten(1), y


def orders(data: FederatedDataset, cohorts: list[Tensor], seed: int) -> Tensor:
    """Returns the rows of every participant's images in the order of its batches, (participations, IMAGES)."""
    found = []
    for step, cohort in enumerate(cohorts):
        plan = plan_batches(data, SOLVER, cohort, seed=seed, round=step)
        # Clients have equally many images, so every row of the plan is full.
        found.append(plan.index.transpose(0, 1).flatten(1))
    return torch.cat(found)


def write(path: Path, run: Run, noise: str, seed: int) -> None:
    """Writes the work that pfl's side does: data, start, cohorts, batches and settings."""
    account = ACCOUNTS[noise] or ACCOUNTS["clients"]
    assert account is not None
    x, y = examples(run.data)
    settings = {
        "classes": run.data.classes, "lr": SOLVER.lr, "batch": SOLVER.batch_size, "clip": CLIP,
        "central_lr": SERVER_LR, "expected": COHORT, "multiplier": run.multiplier, "delta": DELTA,
        "rate": account.cohort / account.clients, "noise_scale": account.scale, "seed": seed,
    }  # fmt: skip
    work = {
        "x": x,
        "y": y,
        "initial": run.initial,
        "members": torch.cat(run.cohorts),
        "sizes": torch.tensor([len(cohort) for cohort in run.cohorts]),
        "rows": orders(run.data, run.cohorts, seed),
    }
    arrays = {name: value.numpy() for name, value in work.items()}
    np.savez(path, settings=json.dumps(settings), **arrays)  # type: ignore[arg-type]


def accuracy(model: Tensor, data: FederatedDataset) -> float:
    """Returns the mean over clients of the accuracy of a shared model (D,) on their test images."""
    x, y = data.gather("test", torch.arange(len(data.test)))
    module = torch.nn.Linear(x[0].numel(), data.classes or 1)
    torch.nn.utils.vector_to_parameters(model.float(), module.parameters())
    # Clients have equally many test images, so the mean over images is the mean over clients.
    return float((module(x.flatten(1)).argmax(1) == y).double().mean())


def compared(run: Run, noise: str, seed: int, found: Any) -> str:
    """Returns a line of the CSV.

    Args:
        run: of fedmtl.
        noise: a key of :data:`ACCOUNTS`.
        seed: of the split, the cohorts, the batches and both sides' noise.
        found: what pfl's side has written.
    """
    other = torch.from_numpy(found["model"])
    claimed = EPSILON
    if ACCOUNTS[noise] is None:
        claimed = math.inf
    cells = [
        noise, str(seed), number(accuracy(run.model, run.data)), number(accuracy(other, run.data)),
        number(float((run.model - other).abs().max()), 2), number(run.multiplier),
        number(run.epsilon, 5), number(claimed), number(float(found["epsilon"]), 5), commit(),
        str(found["version"]),
    ]  # fmt: skip
    return ",".join(cells)


def main() -> None:
    """Runs both sides with every noise and seed, and writes the CSV."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", maxsplit=1)[0])
    parser.add_argument("--pfl-python", type=Path, required=True, help="interpreter with pfl")
    python = parser.parse_args().pfl_python
    has = [python, "-c", "import pfl.model.pytorch"]
    if not python.is_file() or subprocess.run(has, check=False, capture_output=True).returncode:
        parser.error(
            f"{python} is no interpreter with pfl: in its environment pip install 'pfl[pytorch]'"
        )
    with tempfile.TemporaryDirectory() as folder:
        runs = {}
        for noise in ACCOUNTS:
            for seed in SEEDS:
                runs[noise, seed] = ours(noise, seed)
                write(Path(folder) / f"{noise}-{seed}.npz", runs[noise, seed], noise, seed)
        # pfl prints the metrics of every round
        subprocess.run([python, PROGRAM, folder], check=True, stdout=subprocess.DEVNULL)
        lines = [",".join(COLUMNS)]
        for (noise, seed), run in runs.items():
            with np.load(Path(folder) / f"{noise}-{seed}.model.npz") as found:
                lines.append(compared(run, noise, seed, found))
    print("\n".join(lines))
    FILE.write_text("\n".join(lines) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
