"""Hospitals that protect single patients: one epsilon for each hospital, nobody trusted, own data as tensors."""

import argparse

import numpy as np

from fedmtl import (
    PMTL,
    FederatedDataset,
    FullParticipation,
    LocalSGD,
    RecordPrivacy,
    Trainer,
    models,
)

parser = argparse.ArgumentParser(description=__doc__)
parser.add_argument("--silos", type=int, default=12)
parser.add_argument("--patients", type=int, default=50)
parser.add_argument("--rounds", type=int, default=20)
words = parser.parse_args()

# Every hospital has a law of its own, near a common one.
rng = np.random.default_rng(0)
common = rng.normal(size=8)
train, test = {}, {}
for i in range(words.silos):
    x = rng.uniform(-1, 1, size=(2 * words.patients, 8)).astype("float32")
    own = common + 0.3 * rng.normal(size=8)
    y = (x @ own + 0.3 * rng.normal(size=len(x)) > 0).astype("int64")
    train[f"hospital-{i}"] = (x[: words.patients], y[: words.patients])
    if i % 3:  # a third of them have no test records: they train, and are not scored
        test[f"hospital-{i}"] = (x[words.patients :], y[words.patients :])
data = FederatedDataset.from_tensors(train, test=test, classes=2, name="hospitals")
print(data)

# Half of the hospitals ask for three times the protection.
budgets = {name: 1.0 if i % 2 else 3.0 for i, name in enumerate(data.ids)}
result = Trainer(
    algorithm=PMTL(lam=1.0, local=LocalSGD(lr=0.5, epochs=1, batch_size=50)),
    data=data,
    model=models.logistic_regression(),
    schedule=FullParticipation(),
    privacy=RecordPrivacy(clip_norm=1.0, epsilon=budgets, delta=1e-5),
    rounds=words.rounds,
    baselines=["local"],
    progress=False,
).fit()
print(
    "unit",
    result.privacy.unit,
    "- smallest, median, largest epsilon",
    *(round(e, 2) for e in result.privacy.by_client),
)
for epsilon in (1.0, 3.0):
    names = [name for name in result.personal_accuracy if budgets[name] == epsilon]
    together, alone = (
        sum(scores[name] for name in names) / len(names)
        for scores in (result.personal_accuracy, result.baselines["local"].personal_accuracy)
    )
    print(
        f"hospitals with epsilon {epsilon:g}: accuracy {together:.3f} together, {alone:.3f} alone"
    )
