"""Who gains by taking part? Private training with finetuning against training alone, at three budgets."""

import argparse

from fedmtl import (
    ClientPrivacy,
    FedAvg,
    Finetune,
    LocalSGD,
    PoissonSampling,
    Trainer,
    load_data,
    models,
)

parser = argparse.ArgumentParser(description=__doc__)
parser.add_argument("--clients", type=int, default=500)
parser.add_argument("--rounds", type=int, default=50)
parser.add_argument("--epsilons", type=float, nargs="+", default=[0.5, 2.0, 8.0])
words = parser.parse_args()


def mean(scores):
    return sum(scores) / len(scores)


def tenth(scores):
    return mean(sorted(scores)[: max(1, len(scores) // 10)])


data = load_data("digits", clients=words.clients)
local = LocalSGD(lr=0.5, epochs=5, batch_size=10)
print(data)
print(
    "epsilon  alone  shared  finetuned  worst tenth: alone  finetuned  better/equal/worse than alone"
)
for epsilon in words.epsilons:
    result = Trainer(
        algorithm=FedAvg(local=local),
        data=data,
        model=models.softmax_regression(),
        schedule=PoissonSampling(cohort=words.clients / 10),
        privacy=ClientPrivacy(clip_norm=1.5, epsilon=epsilon),
        rounds=words.rounds,
        finetune=Finetune(kind="kl", lam=0.1, local=LocalSGD(lr=0.5, epochs=20, batch_size=10)),
        baselines=["local"],
        progress=False,
    ).fit()
    alone, own, shared = (
        result.baselines["local"].personal_accuracy,
        result.personal_accuracy,
        result.shared_accuracy,
    )

    better = mean([own[client] > alone[client] for client in own])
    worse = mean([own[client] < alone[client] for client in own])
    print(
        f"{epsilon:7g}  {mean(alone.values()):.3f}   {mean(shared.values()):.3f}      {mean(own.values()):.3f}"
        f"               {tenth(alone.values()):.3f}      {tenth(own.values()):.3f}"
        f"  {better:.0%}/{1 - better - worse:.0%}/{worse:.0%}"
    )
