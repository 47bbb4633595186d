"""No record, however large, ends a run early: whether a run ends would be an answer that nobody has paid for."""

import math
import random
from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import nn

from fedmtl import (
    MPMTL,
    PMTL,
    PPDMTL,
    AsyncLearner,
    ClientPrivacy,
    FedAvg,
    Moments,
    MPMTLayers,
    PeerAveraging,
    PeerToPeer,
    PoissonClocks,
    PriorLayers,
    PrivatePrior,
    ProximalPoint,
    RecordPrivacy,
    SharedDirections,
    models,
)
from fedmtl.data import FederatedDataset
from fedmtl.graphs import Ring
from fedmtl.local import LocalSGD
from tests import small

CLIP = ClientPrivacy(clip_norm=1.0, epsilon=5.0, delta=1e-5)
RECORD = RecordPrivacy(clip_norm=1.0, epsilon=5.0, delta=1e-5)
LOUD = ClientPrivacy(clip_norm=1.0, epsilon=1e4, delta=1e-5)
LOCAL = LocalSGD(lr=0.1, batch_size=4)

LINEAR = {
    "mp_mtl": (lambda loss: MPMTL(loss=loss, row_norm=1.0), CLIP),
    "mp_mtl, P + Q, curator": (
        lambda loss: MPMTL(loss=loss, row_norm=1.0, own_penalty="l2", penalty="l21", curator_epsilon=5.0),
        CLIP,
    ),
    "private_prior": (lambda loss: PrivatePrior(loss=loss, share=0.3, row_norm=None), CLIP),
    "private_prior, diagonal": (lambda loss: PrivatePrior(loss=loss, form="diagonal", own_ridge=False), CLIP),
    "pp_dmtl": (lambda loss: PPDMTL(loss=loss, row_norm=1.0, a1=0.1), RECORD),
    "pp_dmtl, l1": (lambda loss: PPDMTL(loss=loss, row_norm=1.0, own_penalty="l1"), RECORD),
    "shared_directions": (lambda loss: SharedDirections(loss=loss, row_norm=1.0), RECORD),
    "p2p": (lambda loss: PeerToPeer(graph=Ring(), loss=loss, row_norm=1.0), RECORD),
    "peer_averaging": (lambda loss: PeerAveraging(graph=Ring(), loss=loss, row_norm=1.0, refine=0.1), RECORD),
    "proximal_point": (lambda loss: ProximalPoint(), CLIP),
    "async, clip": (lambda loss: AsyncLearner(loss=loss), RECORD),
    "async, moments": (lambda loss: Moments(), RECORD),
    "async, bounded rows": (
        lambda loss: AsyncLearner(loss=loss, row_norm=1.0, theta_max=1.0),
        RecordPrivacy(clip_norm=4.0, epsilon=5.0, delta=1e-5),
    ),
}
NETWORKS = {
    "fedavg": (lambda loss: FedAvg(local=LOCAL), CLIP),
    "pmtl": (lambda loss: PMTL(local=LOCAL, lam=1.0), CLIP),
    "fedavg, records": (lambda loss: FedAvg(local=LOCAL), RECORD),
    "mp_mtl_layers": (lambda loss: MPMTLayers(layers=("2",), local=LOCAL), CLIP),
    "prior_layers": (lambda loss: PriorLayers(local=replace(LOCAL, proximal=True)), LOUD),
}
METHODS = LINEAR | NETWORKS
KINDS = [
    *[(size, what) for size in (1e15, 1e30, 3e38) for what in ("target", "row", "constant columns")],
    (1e30, "one column"),
    (0.0, "zeros"),
    (0.0, "duplicates"),
]
DRAWN = random.Random(0)


def spoiled(kinds, loss):
    """Training records of one client of each kind are replaced, beside those of three ordinary clients."""
    rng, sides = np.random.default_rng(0), ({}, {})
    for i in range(3 + len(kinds)):
        for side in sides:
            x = rng.normal(size=(12, 3)).astype(np.float32)
            y = (x @ [1.0, -1.0, 0.5]).astype(np.float32)
            side[f"c{i}"] = [x, y if loss == "squared" else (y > 0).astype(np.int64)]
    for i, (size, what) in enumerate(kinds, start=1):
        x, y = sides[0][f"c{i}"]
        if what == "target" and loss == "squared":
            y[0], y[1] = size, -size
        elif what == "row":
            x[0], x[1] = size, [size, 0.0, -size]
        elif what == "duplicates":
            x[:] = x[0]
        elif what == "constant columns":
            x[:, :2] = size
        elif what == "zeros":
            x[:] = 0.0
        elif what == "one column":
            x[:, 1:] = 0.0
            x[:, 0] *= size
    data = [{name: tuple(pair) for name, pair in side.items()} for side in sides]
    return FederatedDataset.from_tensors(data[0], test=data[1], classes=None if loss == "squared" else 2)


SLOW = ("pp_dmtl, l1", "squared")  # its own problems take 20 s where all kinds, or the largest targets, are in a run


def cases():
    """Each method with clients of all kinds in one run, and with a single one of a kind that is drawn."""
    for name in METHODS:
        for loss in ("squared", "logistic"):
            slow = (name, loss) == SLOW
            for kinds in ([(1e15, "row")], [(0.0, "duplicates")]) if slow else (KINDS, [DRAWN.choice(KINDS)]):
                said = "all kinds" if kinds is KINDS else str(*kinds)
                yield pytest.param(name, kinds, loss, id=f"{name}-{said}-{loss}")


def run(name, data, loss="squared", **options):
    make, privacy = METHODS[name]
    algorithm, model, rounds = make(loss), models.linear_regression(bias=False), 3
    if name in NETWORKS:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 1 if loss == "squared" else 2))
    if algorithm.one_at_a_time:
        options |= {"schedule": PoissonClocks(per_client=4)}
        rounds = 1000
    elif isinstance(algorithm, PrivatePrior | PriorLayers):
        rounds = 1
    settings = {"model": model, "privacy": privacy, "rounds": rounds, "dtype": "float32"} | options
    return small.trainer(algorithm=algorithm, data=data, **settings).fit()


def check(result, data, kinds):
    """Models are finite; so is what they say of ordinary examples, of a spoiled client's own where it is the only one
    (its numbers are the largest that there are)."""
    assert bool(torch.isfinite(result.personal).all())
    assert result.shared is None or bool(torch.isfinite(result.shared).all())
    assert math.isfinite(result.epsilon)
    for client in data.ids if len(kinds) == 1 else (data.ids[0], *data.ids[len(kinds) + 1 :]):
        with torch.no_grad():
            assert bool(torch.isfinite(result.model_for(client)(data.test.x[:5])).all())


@pytest.mark.parametrize(("name", "kinds", "loss"), list(cases()))
def test_methods_end_with_finite_models_whatever_one_client_holds(name, kinds, loss):
    data = spoiled(kinds, loss)
    check(run(name, data, loss), data, kinds)


def test_equal_records_as_large_as_float64_can_tell_send_nothing():
    """Their normal equations are singular by rounding, whatever the ridge."""
    data = spoiled([(1.0, "zeros")], "squared")
    data.train.x[data.train.offsets[1] : data.train.offsets[2]] = 1e12
    check(run("proximal_point", data), data, ["zeros"])


@pytest.mark.parametrize("name", [name for name in LINEAR if name not in ("async, clip", "async, moments")])
def test_a_run_in_double_precision_takes_the_largest_numbers_there(name):
    """Where records have a bound: what the other methods state is the clip of gradients, or of moments."""
    data = spoiled([(1.0, "zeros")], "squared")
    train, test = (replace(side, x=side.x.double(), y=side.y.double()) for side in (data.train, data.test))
    train.x[0], train.y[1] = 1.7e308, -1.7e308
    large = FederatedDataset(train, test, data.ids)
    check(run(name, large, dtype="float64"), large, ["zeros"])
