"""Runs of every method, as command lines, and the numbers that each of them must go on giving.

The models at the end of a run depend on every value that was released, so they stand for the whole transcript: a
restructuring that changes one draw of noise, one clip or the order of a sum beyond rounding changes them. Print new
numbers, after a change that is meant to alter them, with

    python -m tests.golden.transcripts
"""

import json
import math
import tempfile
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from fedmtl.cli.build import build
from fedmtl.cli.config import compose, resolve

FILE = Path(__file__).parent / "transcripts.json"
_DIGITS = "data.clients=24 model=mlp model.hidden=5 schedule.cohort=6 rounds=5 privacy.delta=1e-5"
_MP_MTL = "algorithm=mp_mtl data.problem=classification algorithm.loss=logistic"
_TASKS = "data.tasks=7 data.train_examples=12 data.test_examples=9 data.features=5"
_AGENTS = "data.agents=9 data.features=4 data.least=5 data.most=12 data.test_examples=6"
_STEPS = (
    f"algorithm=async_learner {_TASKS} data.structure=low_rank data.deviation=0 data.public_examples=0 rounds=40 "
    "algorithm.reg=1e-5 schedule.per_client=10"
)
_PP_DMTL = f"algorithm=pp_dmtl {_TASKS} rounds=60 algorithm.feature_norm=1.0 schedule.per_client=6 privacy.clip_norm=1.0"
_PUBLISHED_P2P = f"algorithm=p2p {_AGENTS} algorithm.mu=0.1 schedule.per_client=10"
RUNS = {
    "pmtl": f"algorithm=pmtl {_DIGITS} algorithm.local.epochs=2",
    "pmtl, running mean, fixed cohorts": f"algorithm=pmtl {_DIGITS} algorithm.reference=local schedule=fixed",
    "pmtl, adaptive clip": f"algorithm=pmtl {_DIGITS} privacy=adaptive privacy.clip_norm.count_noise=2.5",
    "pmtl, L2-Laplace, everybody": (
        f"algorithm=pmtl {_DIGITS.replace('schedule.cohort=6', 'schedule=full')} privacy.mechanism=l2_laplace"
    ),
    "fedavg, secure sums": (
        f"{_DIGITS} algorithm=fedavg privacy=secure_aggregation schedule=cyclic finetune=none "
        "privacy.aggregation.colluding=2"
    ),
    "fedavg": f"{_DIGITS} algorithm=fedavg finetune=none",
    "fedprox, records": f"{_DIGITS} algorithm=fedprox privacy=record algorithm.local.batch_size=4",
    "pmtl without a pull, records, Laplace": (
        f"{_DIGITS} algorithm=pmtl algorithm.lam=0 privacy=record privacy.mechanism=laplace privacy.epsilon=20"
    ),
    "fedavg, no privacy": f"{_DIGITS.replace('privacy.delta=1e-5', 'privacy=none')} algorithm=fedavg finetune=none",
    "mp_mtl": f"{_MP_MTL} {_TASKS} rounds=4 algorithm.feature_norm=1.0 algorithm.start_ridge=0.1",
    "mp_mtl, squared loss, P + Q, curator": (
        f"{_MP_MTL} {_TASKS} rounds=4 algorithm.feature_norm=1.0 data.problem=regression algorithm.loss=squared "
        "algorithm.penalty=l21 algorithm.own_penalty=l2 algorithm.momentum=nesterov algorithm.curator_epsilon=5"
    ),
    "mp_mtl_layers": (
        "algorithm=mp_mtl_layers data.clients=12 model.hidden=5 rounds=3 privacy.delta=1e-5 algorithm.local.epochs=1"
    ),
    "pp_dmtl": _PP_DMTL,
    "pp_dmtl, subsamples, L2,1 norm": (
        f"{_PP_DMTL} algorithm.penalty=l21 algorithm.batch_rate=0.4 privacy.mechanism=l2_laplace privacy.delta=0"
    ),
    "pp_dmtl, published": (
        f"{_PP_DMTL.replace('pp_dmtl', 'pp_dmtl_published')} algorithm.a1=0 algorithm.a2=null model.bias=true "
        "privacy.noise_multiplier=null privacy.epsilon=4 privacy.delta=null"
    ),
    "shared_directions": _PP_DMTL.replace("pp_dmtl", "shared_directions"),
    "async_learner": f"{_STEPS} data.problem=regression",
    "public_start": (
        f"{_STEPS.replace('async_learner', 'public_start')} algorithm.loss=logistic data.public_examples=30 "
        "schedule.per_client=2"
    ),
    "moments": (
        f"{_STEPS.replace('async_learner', 'moments')} data.problem=regression "
        "schedule.per_client=1 privacy.mechanism=l2_laplace privacy.delta=0 privacy.epsilon=40"
    ),
    "async_learner, sufficient statistics": (
        f"{_STEPS} data.problem=regression algorithm.feature_norm=2.0 algorithm.target=2.0 privacy.clip_norm=300 "
        "privacy.mechanism=laplace privacy.delta=0"
    ),
    "p2p": f"{_PUBLISHED_P2P} rounds=60 algorithm.allocation=optimal",
    "p2p, Laplace, ring": (
        f"{_PUBLISHED_P2P} algorithm/graph=ring rounds=60 privacy.mechanism=laplace privacy.delta=0"
    ),
    "p2p, repetitions": f"{_PUBLISHED_P2P} rounds=40 replicates=3 epsilons=[1,10]",
    "peer_averaging": f"algorithm=peer_averaging {_AGENTS} rounds=60",
    "mp_mtl, repetitions": f"{_MP_MTL} {_TASKS} rounds=3 algorithm.feature_norm=1.0 replicates=2 epsilons=[1,10]",
}


def run(command: str, folder: Path) -> dict[str, Any]:
    """The numbers of the run that ``fedmtl COMMAND`` makes in a folder, in double precision and one thread."""
    overrides = (*command.split(), "dtype=float64", "baselines=[]", "progress=false", "device=cpu")
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        result = build(resolve(compose(overrides)), folder).fit()
    finally:
        torch.set_num_threads(threads)
    report = result.privacy
    return {
        "epsilon": _plain(result.epsilon),
        "claimed": _plain(report.claimed),
        "noise multiplier": _plain(report.noise_multiplier),
        "noise std": _plain(report.noise_std),
        "releases": report.releases,
        "sampler": report.sampler,
        "stopped": result.stopped,
        "history": [
            {
                key: _plain(value)
                for key, value in row.items()
                if isinstance(value, (int, float)) and key != "time"
            }
            for row in result.history[-2:]
        ],
        "personal": _digest(result.personal),
        "shared": None if result.shared is None else _digest(result.shared),
    }


def _plain(value: float | None) -> float | str | None:
    """JSON has no infinity."""
    return str(value) if isinstance(value, float) and not math.isfinite(value) else value


def _digest(models: Tensor) -> list[float]:
    """Four numbers that every entry moves: norm, sum, and sums weighted by two irrational waves."""
    flat = models.double().flatten()
    place = torch.arange(len(flat), dtype=torch.float64)
    return [
        float(flat.norm()),
        float(flat.sum()),
        *(float(flat @ torch.cos(w * place)) for w in (2**0.5, 5**0.5)),
    ]


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as place:
        found = {name: run(command, Path(place) / name) for name, command in RUNS.items()}
    FILE.write_text(json.dumps(found, indent=1) + "\n")
    print(f"{len(RUNS)} transcripts in {FILE.name}")
