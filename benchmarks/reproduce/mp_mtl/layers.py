"""The covariance projection on a layer of a network: 320 tasks that each train a small network of their own.

A network of 4 tanh units a task, 30 inputs, from one public start. What
training changes of the first layer (120 parameters) is projected with the private covariance of all tasks' changes,
every round; the output weights stay with the task. The tasks are the synthetic ones of low rank. Writes the section
"layers" of README.md.

    python benchmarks/reproduce/mp_mtl/layers.py

With one release in place of ten (``PriorLayers``), and beside it every task alone with the same pull to the start;
the ridge is chosen for each on other tasks. Writes the section "layers once", and the scores.

    python benchmarks/reproduce/mp_mtl/layers.py --once
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator
from pathlib import Path

import torch
from torch import nn

HERE = Path(__file__).parent
sys.path[:0] = [str(HERE), str(HERE.parent)]

from intervals import interval  # noqa: E402
from problems import DELTA, PUBLIC, synthetic  # noqa: E402
from scores import Score, renew_scores, table  # noqa: E402
from sweep import markdown, replace_section  # noqa: E402

from fedmtl import (  # noqa: E402
    ClientPrivacy,
    FullParticipation,
    Local,
    LocalSGD,
    MPMTLayers,
    PriorLayers,
    Trainer,
)
from fedmtl.algorithms.base import Algorithm  # noqa: E402

SEEDS, ROUNDS, CLIP, THRESHOLD = range(5), 10, 4.0, 2.0
EPSILONS = (1.0, 3.0, 10.0, 30.0)
SOLVER = LocalSGD(lr=0.3, epochs=10, batch_size=30)
STOPPED = "alone, rounds: 3"
"""Training alone with the best stopping, which the others are compared with in paired differences."""


def network(seed: int) -> nn.Module:
    """The public start: small weights in, ones out."""
    torch.manual_seed(seed)
    made = nn.Sequential(nn.Linear(30, 4, bias=False), nn.Tanh(), nn.Linear(4, 1, bias=False))
    with torch.no_grad():
        made[0].weight.mul_(0.3)
        made[2].weight.fill_(1.0)
    return made


def error(
    algorithm: Algorithm, privacy: ClientPrivacy | None, seed: int, rounds: int = ROUNDS
) -> float:
    """Test nMSE, the mean over tasks."""
    result = Trainer(
        algorithm=algorithm,
        data=synthetic("low_rank", seed),
        model=network(seed),
        loss="half_mse",
        schedule=FullParticipation(),
        privacy=privacy,
        rounds=rounds,
        seed=seed,
        eval_every=rounds,
        progress=False,
    ).fit()
    return float(result.final["nmse"])


def projected(rho: float) -> MPMTLayers:
    return MPMTLayers(layers=("0",), threshold=THRESHOLD, rho=rho, local=SOLVER)


SETTING = "networks of 4 tanh units, low rank"
RIDGES, ONCE = (0.01, 0.03, 0.1), (0.3, 1.0, 3.0, 10.0)
PULLED = LocalSGD(lr=0.3, epochs=20, batch_size=30, proximal=True)


def once(ridge: float, epsilon: float, seed: int) -> float:
    """Test nMSE with one release; with so little epsilon that nothing stands out, that of every task alone."""
    algorithm = PriorLayers(layers=("0",), ridge=ridge, local=PULLED)
    return error(
        algorithm,
        ClientPrivacy(clip_norm=1.0, epsilon=epsilon or 1e-3, delta=DELTA),
        seed,
        rounds=1,
    )


def once_scores() -> Iterator[Score]:
    """The scores with a ridge that is chosen on other tasks."""
    for epsilon in (0.0, *ONCE):
        method = "MP-MTL of a layer, one release" if epsilon else "alone, pulled to the start"
        ridge = min(RIDGES, key=lambda ridge: once(ridge, epsilon, PUBLIC))
        for seed in SEEDS:
            found = once(ridge, epsilon, seed)
            print(method, epsilon, ridge, seed, found, flush=True)
            yield Score(
                SETTING, "nMSE", False, "new" if epsilon else "local", method, epsilon, seed, found,
                chosen=f"ridge {ridge:g}",
            )  # fmt: skip


def main() -> None:
    """Train, and write the table."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", maxsplit=1)[0])
    parser.add_argument("--once", action="store_true", help="one release instead of ten")
    torch.set_num_threads(1)
    if parser.parse_args().once:
        scores = list(once_scores())
        renew_scores(HERE / "scores.csv", scores)
        replace_section(HERE / "README.md", "layers once", table(scores, SETTING))
        return
    settings: list[tuple[str, Algorithm, ClientPrivacy | None, int]] = [
        (f"alone, rounds: {rounds}", Local(local=SOLVER), None, rounds)
        for rounds in (1, 2, 3, ROUNDS)
    ]
    for rho in (1.5, 0.25):
        for epsilon in EPSILONS:
            privacy = ClientPrivacy(clip_norm=CLIP, epsilon=epsilon, delta=DELTA)
            settings.append(
                (f"projected, ρ {rho:g}, ε {epsilon:g}", projected(rho), privacy, ROUNDS)
            )
    settings.append(("projected, no noise", projected(0.0), None, ROUNDS))
    errors = {}
    for name, algorithm, privacy, rounds in settings:
        errors[name] = [error(algorithm, privacy, seed, rounds) for seed in SEEDS]
        print(name, *errors[name], flush=True)
    lines = []
    for name, own in errors.items():
        gain = ""
        if name != STOPPED:
            gain = "{:+.3f} ± {:.3f}".format(
                *interval(a - b for a, b in zip(own, errors[STOPPED], strict=True))
            )
        lines.append([name, "{:.3f} ± {:.3f}".format(*interval(own)), gain])
    replace_section(
        HERE / "README.md", "layers", markdown(["networks", "nMSE:", f"less {STOPPED}:"], lines)
    )


if __name__ == "__main__":
    main()
