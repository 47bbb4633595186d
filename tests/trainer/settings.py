"""A small run, and what dp_accounting says about it."""

from functools import cache
from typing import Any

from dp_accounting import dp_event

from fedmtl import PMTL, ClientPrivacy, LocalSGD, PoissonSampling, Trainer, models
from tests import small
from tests.helpers import library_accountant, ragged_classification

CLIENTS, COHORT, NOISE, DELTA = 12, 4, 1.5, 1e-5
SOLVER = LocalSGD(lr=0.2, epochs=2, batch_size=4)
DATA = ragged_classification(CLIENTS)
FEW = ragged_classification(3)
NOISE_OF_RECORDS = 1.3


def trainer(**settings: Any) -> Trainer:
    """A trainer of twelve clients and six rounds; ``settings`` override."""
    defaults = {
        "algorithm": PMTL(lam=0.5, local=SOLVER),
        "data": DATA,
        "model": models.mlp(hidden=4),
        "schedule": PoissonSampling(cohort=COHORT),
        "privacy": ClientPrivacy(clip_norm=0.7, noise_multiplier=NOISE, delta=DELTA),
        "rounds": 6,
        "eval_every": 2,
        "checkpoint_every": 2,
    }
    return small.trainer(**defaults | settings)


@cache
def epsilon(uses: int) -> float:
    """Straight from dp_accounting."""
    event = dp_event.PoissonSampledDpEvent(COHORT / CLIENTS, dp_event.GaussianDpEvent(NOISE))
    return library_accountant().compose(event, uses).get_epsilon(DELTA)


@cache
def record_epsilon(epochs: int) -> float:
    """The largest of a client of FEW whose records are trained on in batches of 4 on average, straight from
    dp_accounting."""
    spent = []
    for count in FEW.train.counts.tolist():
        event = dp_event.GaussianDpEvent(NOISE_OF_RECORDS)
        event = dp_event.PoissonSampledDpEvent(4 / count, event) if count > 4 else event
        spent.append(
            library_accountant().compose(event, epochs * -(-count // 4)).get_epsilon(DELTA)
        )
    return max(spent)
