"""How much of it is luck? Peer-to-peer learning, many runs at several budgets as one program, with bands."""

import argparse

from fedmtl import PeerToPeer, PoissonClocks, RecordPrivacy, Trainer, load_data, models
from fedmtl.data import TargetAngles

parser = argparse.ArgumentParser(description=__doc__)
parser.add_argument("--agents", type=int, default=100)
parser.add_argument("--answers", type=int, default=10)
parser.add_argument("--replicates", type=int, default=50)
words = parser.parse_args()

result = Trainer(
    algorithm=PeerToPeer(graph=TargetAngles(), feature_norm="auto"),
    data=load_data("synthetic_agents", agents=words.agents, features=20),
    model=models.linear_regression(bias=False),
    schedule=PoissonClocks(per_client=words.answers),
    privacy=RecordPrivacy(clip_norm=1.0, epsilon=1.0),
    rounds=10**6,  # at most: the schedule ends the run
    replicates=words.replicates,
    epsilons=(1, 10, 100),
    progress=False,
).fit()
print("epsilon  accuracy: mean    5%  median   95%")
for row in result.bands:
    low, middle, high = (row[f"accuracy_p{percentile}"] for percentile in (5, 50, 95))
    print(
        f"{row['budget']:7g}           {row['accuracy']:.3f}  {low:.3f}   {middle:.3f}  {high:.3f}"
    )
