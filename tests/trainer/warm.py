"""What the fork server of :mod:`tests.trainer.killed` does before it forks: it is imported there alone.

It imports what a run imports, writes a line of text for each figure, computes the epsilons of the plan, and leaves it
to the system when files are written to the disk: a process is killed, and no machine.
"""

import os
from importlib import import_module

os.environ["CUDA_VISIBLE_DEVICES"] = ""

import pytest
import torch

from fedmtl import ClientPrivacy, PoissonSampling
from fedmtl.privacy import ReleasePlan, open_channel
from tests.conftest import quick_figures
from tests.trainer.killed import PRIVACY, ROUNDS, trainer_of
from tests.trainer.settings import CLIENTS, COHORT

import_module("torch._dynamo")  # which torch imports on first use, in seconds
torch.set_num_threads(1)
quick_figures(pytest.MonkeyPatch())
os.fsync = lambda file: None
trainer_of("pmtl-fixed")
channel = open_channel(
    ClientPrivacy(**PRIVACY),
    (ReleasePlan(name="update", dimension=5),),
    PoissonSampling(cohort=COHORT).bind(CLIENTS),
    seed=0,
    steps=ROUNDS,
)
for uses in (16, ROUNDS):
    channel.epsilon_at(uses)
channel.close()
