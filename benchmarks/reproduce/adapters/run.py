"""What to share of a network that public writers trained: all of it, low-rank adapters, or the last layer.

Of the 206 writers of LEAF's FEMNIST file 56 are public: a perceptron is trained on all their images. The other 150
learn together from there by FedAvg under client-level privacy, and finetune what they shared on their own images, at
no further epsilon. Or they train alone from there, release once in which directions (the private prior), and train
again. Who is public, the rows, cohorts and noise are a function of the seed. Every method chooses by its score on a
fifth of the private writers' training rows, with five trainings: three clips, then three step sizes with the best clip,
or three sides and scales, then three ridges; finetuning has three settings, chosen in the same way. Nothing is chosen
on test rows.

    python benchmarks/reproduce/adapters/run.py --femnist leaf_femnist_206.json.zip
    python benchmarks/reproduce/adapters/run.py --femnist leaf_femnist_206.json.zip --only last adapters
    python benchmarks/reproduce/adapters/run.py --collect      # only the table
"""

from __future__ import annotations

import argparse
import itertools
import sys
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from statistics import mean
from typing import Literal

import torch
import torch.nn.functional as F
from torch import nn

HERE = Path(__file__).parent
sys.path[:0] = [str(HERE.parent), str(HERE.parent / "comparison")]

from scores import Score, by_client, read_scores, renew_scores, table, write_scores  # noqa: E402
from settings import DELTA, STUDIES, Setting, half_size, held_out  # noqa: E402
from sweep import existing, replace_section  # noqa: E402

from fedmtl import (  # noqa: E402
    ClientPrivacy,
    FedAvg,
    FederatedDataset,
    Finetune,
    FullParticipation,
    LocalSGD,
    PoissonSampling,
    PriorLayers,
    Trainer,
    load_data,
    models,
    personalize,
)

SCORES = HERE / "scores.csv"
PUBLIC = 56
EPSILONS = (1.0, 3.0, 10.0)
ROUNDS = 30
SCHEDULE = PoissonSampling(cohort=75)
CLIPS = (0.1, 0.3, 1.0)
STEPS = (0.03, 0.1, 0.3)
SETTING = f"FEMNIST, {PUBLIC} public and {206 - PUBLIC} private writers"
WAYS = tuple(
    Finetune(kind="vanilla", local=LocalSGD(lr=lr, epochs=epochs, batch_size=10))
    for lr, epochs in ((0.03, 1), (0.03, 5), (0.1, 5))
)
SHARED = {  # what is shared: (rank of adapters or 0, trainable parameters)
    "all parameters": (0, None),
    "adapters, rank 4": (4, None),
    "adapters, B alone": (4, ("*.lora_B",)),
    "last layer": (0, ("3",)),
}
PULLED = LocalSGD(lr=0.1, epochs=5, batch_size=10, proximal=True)
RIDGES = (0.3, 1.0, 3.0, 10.0, 30.0)
SIDES: tuple[tuple[Literal["input", "output"], float], ...] = (
    ("output", 1.0),
    ("output", 2.0),
    ("input", 4.0),
)
"""Of the private prior: the side of the matrices, and what a client's row is multiplied by before the clip."""


@dataclass(frozen=True)
class Writers:
    """The writers of a seed.

    Attributes:
        public, private: their data.
        inner: the training rows of the private writers alone, with a fifth as test rows.
        network: trained on the public rows.
    """

    public: FederatedDataset
    private: FederatedDataset
    inner: FederatedDataset
    network: nn.Module


def writers(data: FederatedDataset, seed: int) -> Writers:
    """Divide the writers, and train the network on the rows of the public ones."""
    order = torch.randperm(len(data), generator=torch.Generator().manual_seed(seed)).tolist()
    public, private = (
        data.subset([data.ids[i] for i in sorted(part)])
        for part in (order[:PUBLIC], order[PUBLIC:])
    )
    x, y = (
        torch.cat([getattr(side, key) for side in (public.train, public.test)])
        for key in ("x", "y")
    )
    return Writers(public, private, held_out(private, seed), pretrained(x.float(), y, seed))


def pretrained(x: torch.Tensor, y: torch.Tensor, seed: int, epochs: int = 20) -> nn.Module:
    """A perceptron 196-128-62 after Adam on all public rows."""
    generator = torch.Generator().manual_seed(seed)
    torch.manual_seed(seed)
    network = nn.Sequential(nn.Flatten(), nn.Linear(196, 128), nn.ReLU(), nn.Linear(128, 62))
    optimizer = torch.optim.Adam(network.parameters(), lr=2e-3, weight_decay=1e-4)
    for _ in range(epochs):
        for rows in torch.randperm(len(x), generator=generator).split(32):
            optimizer.zero_grad()
            F.cross_entropy(network(x[rows]), y[rows]).backward()
            optimizer.step()
    return network


def shared_model(
    network: nn.Module, shared: str, seed: int
) -> tuple[nn.Module, tuple[str, ...] | None]:
    """The network with its adapters, and the names of what is trained."""
    rank, trainable = SHARED[shared]
    torch.manual_seed(seed)
    return (models.lora(network, rank=rank) if rank else network), trainable


def fedavg(
    data: FederatedDataset, model: object, trainable: tuple[str, ...] | None, clip: float, lr: float, epsilon: float,
    seed: int,
) -> tuple[nn.Module, Mapping[str, float]]:  # fmt: skip
    """The released model, and the test accuracy of it by writer."""
    result = Trainer(
        algorithm=FedAvg(local=LocalSGD(lr=lr, epochs=1, batch_size=10)),
        data=data,
        model=model,  # type: ignore[arg-type]
        trainable=trainable,
        schedule=SCHEDULE,
        privacy=ClientPrivacy(clip_norm=clip, epsilon=epsilon, delta=DELTA),
        rounds=ROUNDS,
        seed=seed,
        eval_every=ROUNDS,
        progress=False,
    ).fit()
    return result.shared_model(), result.personal_accuracy


def finetuned(
    model: nn.Module,
    data: FederatedDataset,
    way: Finetune,
    trainable: tuple[str, ...] | None,
    seed: int,
) -> Mapping[str, float]:
    return personalize(model, data, finetune=way, trainable=trainable, seed=seed).personal_accuracy


def average(scores: Mapping[str, float]) -> float:
    return mean(scores.values())


def rows(found: Writers, seed: int) -> Iterator[tuple[str, str, float, Mapping[str, float], str]]:
    """Role, method, epsilon, accuracy by writer and the chosen setting, of everything; Local first."""
    local, chosen = alone(found, seed)
    yield "local", "Local", 0.0, local, chosen
    _, public = evaluated(found.network, found.private, seed)
    yield "public", "public model", 0.0, public, ""
    way = best_way(found.network, found.inner, None, seed)
    tuned = finetuned(found.network, found.private, WAYS[way], None, seed)
    yield "public", "public model, finetuned", 0.0, tuned, WAYS[way].text()
    for epsilon in EPSILONS:
        for name, model, trainable in (
            ("from zero, softmax", models.softmax_regression(), None),
            *((shared, *shared_model(found.network, shared, seed)) for shared in SHARED),
        ):
            clip, lr, tried = choose(found.inner, model, trainable, epsilon, seed)
            released, scores = fedavg(found.private, model, trainable, clip, lr, epsilon, seed)
            text = f"clip {clip:g}, lr {lr:g}"
            yield "fedavg", f"FedAvg, {name}", epsilon, scores, text
            way = best_way(tried, found.inner, trainable, seed)
            tuned = finetuned(released, found.private, WAYS[way], trainable, seed)
            yield (
                "fedavg",
                f"FedAvg, {name}, finetuned",
                epsilon,
                tuned,
                f"{text}, then {WAYS[way].text()}",
            )


def prior_rows(
    found: Writers, seed: int, shared: str
) -> Iterator[tuple[str, str, float, Mapping[str, float], str]]:
    """The same of learning alone with a tuned pull to the public network, and of the private prior, which adds one
    release to it; Local first. Five trainings choose for each."""
    local, chosen = alone(found, seed)
    yield "local", "Local", 0.0, local, chosen
    model, trainable = shared_model(found.network, shared, seed)
    ways = [Finetune(kind="mean", lam=ridge, local=PULLED) for ridge in RIDGES]
    values = [average(finetuned(model, found.inner, way, trainable, seed)) for way in ways]
    way = ways[max(range(len(ways)), key=values.__getitem__)]
    tuned = finetuned(model, found.private, way, trainable, seed)
    yield "public", f"public model, pulled, {shared}", 0.0, tuned, f"ridge {way.lam:g}"
    for epsilon in EPSILONS:
        best = best_prior(found.inner, model, trainable, way.lam, epsilon, seed)
        own = prior(found.private, model, trainable, best, epsilon, seed)
        yield (
            "new",
            f"private prior, {shared}",
            epsilon,
            own,
            (f"{best.side} side, scale {best.scale:g}, ridge {best.ridge:g}"),
        )


def best_prior(
    data: FederatedDataset,
    model: nn.Module,
    trainable: tuple[str, ...] | None,
    ridge: float,
    epsilon: float,
    seed: int,
) -> PriorLayers:
    """The best side and scale at the ridge of learning alone, and then the best ridge with them."""
    runs: dict[PriorLayers, float] = {}

    def score(one: PriorLayers) -> float:
        if one not in runs:
            runs[one] = average(prior(data, model, trainable, one, epsilon, seed))
        return runs[one]

    best = max(
        (PriorLayers(side=side, scale=scale, ridge=ridge, local=PULLED) for side, scale in SIDES),
        key=score,
    )
    return max((replace(best, ridge=factor * ridge) for factor in (1.0, 0.3, 3.0)), key=score)


def prior(
    data: FederatedDataset, model: nn.Module, trainable: tuple[str, ...] | None, algorithm: PriorLayers, epsilon: float,
    seed: int,
) -> Mapping[str, float]:  # fmt: skip
    """The test accuracy of the models under the prior by writer."""
    result = Trainer(
        algorithm=algorithm,
        data=data,
        model=model,
        trainable=trainable,
        schedule=FullParticipation(),
        privacy=ClientPrivacy(clip_norm=1.0, epsilon=epsilon, delta=DELTA),
        rounds=1,
        seed=seed,
        progress=False,
    ).fit()
    return result.personal_accuracy


def evaluated(
    model: nn.Module, data: FederatedDataset, seed: int
) -> tuple[nn.Module, Mapping[str, float]]:
    """The model as it is, and its accuracy by writer."""
    return model, personalize(model, data, finetune=WAYS[0], seed=seed).shared_accuracy


def alone(found: Writers, seed: int) -> tuple[Mapping[str, float], str]:
    """Softmax regression of every writer alone, of the nine settings of the comparison; a choice that is in scores.csv
    is not made again."""
    study = STUDIES["femnist"]

    def train(data: FederatedDataset, setting: Setting) -> Mapping[str, float]:
        return study.train(data, setting, 0.0, seed).personal_accuracy

    made = {
        score.chosen
        for score in read_scores(SCORES)
        if (score.method, score.seed) == ("Local", seed)
    }
    settings = study.methods()["Local"]
    settings = [setting for setting in settings if setting.text() in made] or settings
    best = (
        settings[0]
        if len(settings) == 1
        else max(settings, key=lambda one: average(train(found.inner, one)))
    )
    return train(found.private, best), best.text()


def best_way(
    model: nn.Module, data: FederatedDataset, trainable: tuple[str, ...] | None, seed: int
) -> int:
    scores = [average(finetuned(model, data, way, trainable, seed)) for way in WAYS]
    return max(range(len(WAYS)), key=scores.__getitem__)


def choose(
    data: FederatedDataset,
    model: object,
    trainable: tuple[str, ...] | None,
    epsilon: float,
    seed: int,
) -> tuple[float, float, nn.Module]:
    """The clip and the step size that are best on validation rows, and the model trained with them there."""
    runs: dict[tuple[float, float], tuple[nn.Module, Mapping[str, float]]] = {}

    def score(pair: tuple[float, float]) -> float:
        if pair not in runs:
            runs[pair] = fedavg(data, model, trainable, *pair, epsilon, seed)
        return average(runs[pair][1])

    clip, _ = max(itertools.product(CLIPS, STEPS[1:2]), key=score)
    best = max(((clip, lr) for lr in STEPS), key=score)
    return *best, runs[best][0]


PARTS = {
    "shared": rows,
    "last": partial(prior_rows, shared="last layer"),
    "adapters": partial(prior_rows, shared="adapters, rank 4"),
}


def work(data: FederatedDataset, seed: int, out: Path, part: str) -> None:
    """Write the scores of a part and a seed, unless they are there."""
    file = out / f"{part}-{seed}.csv"
    if file.exists():
        return
    found, local, scores = writers(data, seed), {}, []
    began = time.process_time()
    for role, method, epsilon, own, chosen in PARTS[part](found, seed):
        local = own if role == "local" else local
        if part != "shared" and role == "local":
            continue  # is in that part
        shares = by_client(own, local, larger=True)
        scores.append(
            Score(
                SETTING,
                "accuracy",
                True,
                role,
                method,
                epsilon,
                seed,
                average(own),
                chosen=chosen,
                **shares,
            )  # type: ignore[arg-type]
        )
        spent = time.process_time() - began
        print(
            f"seed {seed}, epsilon {epsilon:g}, {method}: {average(own):.4f} {chosen} ({spent:.0f} s)",
            flush=True,
        )
    write_scores(file, scores)


def main() -> None:
    """Parse the command line, train what is missing, write the table."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", maxsplit=1)[0])
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2, 3, 4])
    parser.add_argument("--femnist", type=existing, help="leaf_femnist_206.json.zip")
    parser.add_argument("--out", type=Path, default=Path("outputs/reproduce/adapters"))
    parser.add_argument(
        "--only",
        choices=PARTS,
        nargs="+",
        default=list(PARTS),
        help="the scores of others are kept",
    )
    parser.add_argument("--collect", action="store_true", help="train nothing")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    arguments.out.mkdir(parents=True, exist_ok=True)
    if not arguments.collect:
        if arguments.femnist is None:
            parser.error("give --femnist FILE")
        for seed in arguments.seeds:
            data = half_size(load_data("femnist", root=arguments.femnist, seed=seed))
            for part in arguments.only:
                work(data, seed, arguments.out, part)
    files = [file for part in PARTS for file in sorted(arguments.out.glob(f"{part}-*.csv"))]
    scores = [score for file in files for score in read_scores(file)]
    if not scores:
        raise SystemExit(f"{arguments.out} holds no finished seed.")
    scores = renew_scores(SCORES, scores)
    replace_section(HERE / "README.md", "accuracy", table(scores, SETTING))


if __name__ == "__main__":
    main()
