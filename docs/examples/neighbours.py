"""How much does one agent learn of another? Peer averaging, and epsilon by the distance on the graph."""

import argparse
from dataclasses import replace
from pathlib import Path

import numpy as np

from fedmtl import PeerAveraging, PoissonClocks, RecordPrivacy, Trainer, load_data, models
from fedmtl.contrib.pairwise import pairwise_privacy
from fedmtl.data import TargetAngles
from fedmtl.privacy.accounting.gaussian import gaussian_multiplier

parser = argparse.ArgumentParser(description=__doc__)
parser.add_argument("--agents", type=int, default=100)
parser.add_argument("--cut", type=float, default=0.5, help="edges with less weight are left out")
parser.add_argument("--wakeups", type=int, nargs="+", default=[1, 2, 3, 5, 10, 30])
words = parser.parse_args()

epsilon, delta = 1.0, 1e-5
trainer = Trainer(
    algorithm=PeerAveraging(graph=TargetAngles(cut=words.cut), feature_norm="auto"),
    data=load_data("synthetic_agents", agents=words.agents, features=20),
    model=models.linear_regression(bias=False),
    schedule=PoissonClocks(per_client=3),
    privacy=RecordPrivacy(clip_norm=1.0, epsilon=epsilon, delta=delta),
    rounds=10**6,  # at most: the schedule ends the run
    progress=False,
)
network = trainer.algorithm.network(trainer.problem())
multipliers = np.full(words.agents, gaussian_multiplier(epsilon, delta))
ids = trainer.data.ids
together = [ids[first :: words.agents // 5] for first in range(words.agents // 5)]

print("epsilon against everybody: 1; the median against")
print("wake-ups  accuracy  a neighbour  2 edges away  3 edges away  5 agents together")
for wakeups in words.wakeups:
    run = replace(trainer, schedule=PoissonClocks(per_client=wakeups))
    events = run.bound_schedule.activations(run.seed, 0, run.bound_schedule.steps).client[0].numpy()
    one = pairwise_privacy(network, events, multipliers, delta)
    five = pairwise_privacy(network, events, multipliers, delta, adversaries=together)
    near = [np.median(one.epsilon[one.distance == edges]) for edges in (1, 2, 3)]
    columns = "  ".join(f"{value:12.2f}" for value in [*near, np.nanmedian(five.epsilon)])
    print(f"{wakeups:8d}      {run.fit().final['accuracy']:.3f}  {columns}")

# a run prints the claim beside epsilon, with public/pairwise.csv and public/pairwise.png
found = replace(
    trainer, algorithm=replace(trainer.algorithm, pairwise=True), folder="neighbours"
).fit()
print(*sorted(path.name for path in Path(found.folder, "public").glob("pairwise.*")))
