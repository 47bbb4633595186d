"""The covariance projection on a layer of a network: 320 tasks that each train a small network of their own.

A network of 4 tanh units a task, 30 inputs, from one public start. What
training changes of the first layer (120 parameters) is projected with the private covariance of all tasks' changes,
every round; the output weights stay with the task. The tasks are the synthetic ones of low rank. Writes the section
"layers" of README.md.

    python benchmarks/reproduce/mp_mtl/layers.py
"""

from __future__ import annotations

import sys
from pathlib import Path
from statistics import mean, stdev

import torch
from torch import nn

HERE = Path(__file__).parent
sys.path[:0] = [str(HERE), str(HERE.parent)]

from problems import DELTA, synthetic  # noqa: E402
from sweep import markdown, replace_section  # noqa: E402

from fedmtl import ClientPrivacy, FullParticipation, Local, LocalSGD, MPMTLayers, Trainer  # noqa: E402
from fedmtl.algorithms.base import Algorithm  # noqa: E402

SEEDS, ROUNDS, CLIP, THRESHOLD = range(5), 10, 4.0, 2.0
EPSILONS = (1.0, 3.0, 10.0, 30.0)
SOLVER = LocalSGD(lr=0.3, epochs=10, batch_size=30)


def network(seed: int) -> nn.Module:
    """The public start: small weights in, ones out."""
    torch.manual_seed(seed)
    made = nn.Sequential(nn.Linear(30, 4, bias=False), nn.Tanh(), nn.Linear(4, 1, bias=False))
    with torch.no_grad():
        made[0].weight.mul_(0.3)
        made[2].weight.fill_(1.0)
    return made


def error(algorithm: Algorithm, privacy: ClientPrivacy | None, seed: int, rounds: int = ROUNDS) -> float:
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


def main() -> None:
    """Train, and write the table."""
    torch.set_num_threads(1)
    settings: list[tuple[str, Algorithm, ClientPrivacy | None, int]] = [
        (f"alone, rounds: {rounds}", Local(local=SOLVER), None, rounds) for rounds in (1, 2, 3, ROUNDS)
    ]
    for rho in (1.5, 0.25):
        for epsilon in EPSILONS:
            privacy = ClientPrivacy(clip_norm=CLIP, epsilon=epsilon, delta=DELTA)
            settings.append((f"projected, ρ {rho:g}, ε {epsilon:g}", projected(rho), privacy, ROUNDS))
    settings.append(("projected, no noise", projected(0.0), None, ROUNDS))
    lines = []
    for name, algorithm, privacy, rounds in settings:
        found = [error(algorithm, privacy, seed, rounds) for seed in SEEDS]
        lines.append([name, f"{mean(found):.3f}", f"{stdev(found) / len(found) ** 0.5:.3f}"])
        print(*lines[-1], flush=True)
    replace_section(HERE / "README.md", "layers", markdown(["networks", "nMSE:", "± se:"], lines))


if __name__ == "__main__":
    main()
