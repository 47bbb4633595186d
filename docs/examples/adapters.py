"""A network trained on public writers, continued privately: all of it, low-rank adapters, or not at all."""

import argparse
import copy

import torch
from torch import nn

from fedmtl import ClientPrivacy, FedAvg, LocalSGD, PoissonSampling, Trainer, load_data, models

parser = argparse.ArgumentParser(description=__doc__)
parser.add_argument("--clients", type=int, default=500)
parser.add_argument("--public", type=int, default=50)
parser.add_argument("--rounds", type=int, default=30)
words = parser.parse_args()

public, private = (
    load_data("digits", clients=words.public, seed=1),
    load_data("digits", clients=words.clients),
)

# Ordinary training on the public writers.
torch.manual_seed(0)
network = nn.Sequential(nn.Flatten(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10))
images, labels = public.gather("train", torch.arange(len(public.train)))
optimizer = torch.optim.Adam(network.parameters(), lr=0.01)
for _ in range(100):
    optimizer.zero_grad()
    nn.functional.cross_entropy(network(images), labels).backward()
    optimizer.step()
images, labels = private.gather("test", torch.arange(len(private.test)))
print(f"public writers alone     {(network(images).argmax(1) == labels).double().mean():.3f}")


def continued(name, model):
    result = Trainer(
        algorithm=FedAvg(local=LocalSGD(lr=0.1, epochs=5, batch_size=10)),
        data=private,
        model=model,
        schedule=PoissonSampling(cohort=words.clients / 5),
        privacy=ClientPrivacy(clip_norm=0.5, epsilon=2.0),
        rounds=words.rounds,
        progress=False,
    ).fit()
    print(
        f"{name:<24} {result.final['accuracy']:.3f}, {result.personal.shape[1]:,} trained numbers, epsilon 2"
    )


continued("all of it, privately", copy.deepcopy(network))
continued("adapters, privately", models.lora(network, rank=4))
