"""Local solvers outside of the trainer: a federated loop of your own, with an optimizer of torch.optim and DP-SGD."""

import argparse

import torch
from torch import nn

from fedmtl import FederatedDataset, FullParticipation, LocalOptimizer, LocalSGD, RecordPrivacy
from fedmtl.local import LocalTrainer
from fedmtl.privacy import open_channel

parser = argparse.ArgumentParser(description=__doc__)
parser.add_argument("--clients", type=int, default=20)
parser.add_argument("--rounds", type=int, default=10)
words = parser.parse_args()

# Every client has a rule of its own, near a common one.
generator = torch.Generator().manual_seed(0)
common = torch.randn(6, generator=generator)
train, test = {}, {}
for k in range(words.clients):
    x = torch.randn(300, 6, generator=generator)
    own = common + 0.7 * torch.randn(6, generator=generator)
    y = (x @ own > 0).long()
    train[f"client-{k}"] = (x[:100], y[:100])
    test[f"client-{k}"] = (x[100:], y[100:])
data = FederatedDataset.from_tensors(train, test=test, classes=2)

torch.manual_seed(0)
local = LocalTrainer(nn.Linear(6, 2), data)


def accuracy(models: torch.Tensor) -> float:
    """The mean over clients of the accuracy of each one's model on its own test examples."""
    scores = []
    for client, model in zip(data.ids, models, strict=True):
        x, y = test[client]
        scores.append((local.module_of(model)(x).argmax(1) == y).float().mean())
    return float(torch.stack(scores).mean())


# 1. Each client by itself, by Adam.
adam = LocalOptimizer(optimizer_name="Adam", lr=0.05, epochs=words.rounds, batch_size=20)
print(f"alone, Adam: {accuracy(local.train(adam)):.3f}")

# 2. Mean-regularized: each client is pulled to the mean of all models. The mean has no noise.
sgd = LocalSGD(lr=0.2, epochs=1, batch_size=20)
mean = local.initial
models = mean.expand(len(data), -1)
for step in range(words.rounds):
    models = local.train(sgd, models, lam=0.3, anchor=mean, round=step)
    mean = models.mean(0)
print(f"mean-regularized: {accuracy(models):.3f}")

# 3. The same by DP-SGD: the gradient of each example is clipped, and their sum has noise. The ledger of the channel is
# charged before a round begins.
for mechanism in ("gaussian", "laplace"):
    privacy = RecordPrivacy(clip_norm=1.0, epsilon=4.0, delta=1e-4, mechanism=mechanism)
    everybody = FullParticipation().bind(len(data))
    channel = open_channel(privacy, [local.plan(sgd)], everybody, seed=0, steps=words.rounds)
    mean = local.initial
    models = mean.expand(len(data), -1)
    for step in range(words.rounds):
        channel.begin(step, channel.draw(step))
        models = local.train(sgd, models, lam=0.3, anchor=mean, round=step, channel=channel)
        mean = models.mean(0)
    print(f"DP-SGD, {mechanism}, epsilon {channel.epsilon:.2f}: {accuracy(models):.3f}")
