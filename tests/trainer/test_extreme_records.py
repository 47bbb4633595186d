"""No record, however large, ends a run early: whether a run ends would be an answer that nobody has paid for."""

import dataclasses
import math
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
    DomainBound,
    FedAvg,
    FullParticipation,
    Moments,
    MPMTLayers,
    PeerToPeer,
    PoissonClocks,
    PriorLayers,
    PrivatePrior,
    RecordPrivacy,
    Trainer,
    models,
)
from fedmtl.algorithms.linear.data import LinearLoss
from fedmtl.algorithms.p2p.warm_start import LocalFits, local_minimizer, minimizer_sensitivity
from fedmtl.data import FederatedDataset
from fedmtl.errors import ConfigError
from fedmtl.graphs import Ring
from fedmtl.local import LocalSGD

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
    "p2p, warm start": (
        lambda loss: PeerToPeer(graph=Ring(), loss=loss, row_norm=1.0, warm_start=0.3, refine=0.1),
        RECORD,
    ),
    "async, clip": (lambda loss: AsyncLearner(loss=loss, psi=True), RECORD),
    "async, moments": (lambda loss: Moments(psi=True), RECORD),
    "async, domain": (
        lambda loss: AsyncLearner(loss=loss, bound="domain", domain=DomainBound(1.0, 1.0), theta_max=1.0, psi=True),
        RecordPrivacy(clip_norm=4.0, epsilon=5.0, delta=1e-5),
    ),
}
MODULES = {
    "fedavg": (lambda: FedAvg(local=LOCAL), CLIP),
    "pmtl": (lambda: PMTL(local=LOCAL, lam=1.0), CLIP),
    "fedavg, records": (lambda: FedAvg(local=LOCAL), RECORD),
    "mp_mtl_layers": (lambda: MPMTLayers(layers=("2",), local=LOCAL), CLIP),
    "prior_layers": (lambda: PriorLayers(share=0.5, local=replace(LOCAL, proximal=True)), LOUD),
}


def spoiled(kind, loss):
    """Training records of one client among four are replaced; tests are ordinary."""
    rng, sides = np.random.default_rng(0), ({}, {})
    for i in range(4):
        for side in sides:
            x = rng.normal(size=(12, 3)).astype(np.float32)
            y = (x @ [1.0, -1.0, 0.5]).astype(np.float32)
            side[f"c{i}"] = [x, y if loss == "squared" else (y > 0).astype(np.int64)]
    x, y = sides[0]["c1"]
    size, what = kind
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


KINDS = [
    *[(size, what) for size in (1e15, 1e30, 3e38) for what in ("target", "row", "constant columns")],
    (1e30, "one column"),
    (0.0, "zeros"),
    (0.0, "duplicates"),
]


def run(algorithm, privacy, data, model, **options):
    asynchronous = isinstance(algorithm, (PPDMTL, PeerToPeer, AsyncLearner, Moments))
    return Trainer(
        algorithm=algorithm,
        data=data,
        model=model,
        schedule=PoissonClocks(per_client=4) if asynchronous else FullParticipation(),
        privacy=privacy,
        rounds=1000 if asynchronous else 1 if isinstance(algorithm, (PrivatePrior, PriorLayers)) else 3,
        progress=False,
        **options,
    ).fit()


def check(result, data):
    assert bool(torch.isfinite(result.personal).all())
    assert result.shared is None or bool(torch.isfinite(result.shared).all())
    assert math.isfinite(result.epsilon)
    for client in data.ids:
        with torch.no_grad():
            assert bool(torch.isfinite(result.model_for(client)(data.test.x[:5])).all())


@pytest.mark.parametrize("loss", ["squared", "logistic"])
@pytest.mark.parametrize("kind", KINDS, ids=str)
@pytest.mark.parametrize("name", LINEAR)
def test_linear_methods_end_with_finite_models_whatever_one_client_holds(name, kind, loss):
    make, privacy = LINEAR[name]
    data = spoiled(kind, loss)
    check(run(make(loss), privacy, data, models.linear_regression(bias=False)), data)


@pytest.mark.parametrize("loss", ["squared", "classes"])
@pytest.mark.parametrize("kind", KINDS, ids=str)
@pytest.mark.parametrize("name", MODULES)
def test_networks_end_finite_whatever_one_client_holds(name, kind, loss):
    make, privacy = MODULES[name]
    data = spoiled(kind, loss)
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 1 if loss == "squared" else 2))
    check(run(make(), privacy, data, model), data)


def test_a_run_in_double_precision_takes_the_largest_numbers_there():
    data = spoiled((1.0, "zeros"), "squared")
    x, y = data.train.x.double(), data.train.y.double()
    x[0], y[1] = 1.7e308, -1.7e308
    train = dataclasses.replace(data.train, x=x, y=y)
    test = dataclasses.replace(data.test, x=data.test.x.double(), y=data.test.y.double())
    large = FederatedDataset(train, test, data.ids)
    for name, (make, privacy) in LINEAR.items():
        if name in ("async, clip", "async, moments"):
            continue  # have no bound on records: what they state is the clip of gradients, or of moments
        check(run(make("squared"), privacy, large, models.linear_regression(bias=False), dtype="float64"), large)


# The warm start of p2p


@pytest.mark.parametrize("target", [1.0, 1e15, 1e30, 3e38, 1e150])
@pytest.mark.parametrize(("m", "lam"), [(1, 1.0), (8, 0.1), (60, 1e-3)])
def test_local_fits_keep_their_sensitivity_for_targets_of_any_size(m, lam, target):
    rng, clip, moved = np.random.default_rng(m), 0.7, 0.0
    for _ in range(3):
        x = rng.normal(size=(m, 4))
        x /= np.maximum(1.0, np.linalg.norm(x, axis=1, keepdims=True))
        y = rng.normal(size=m)
        fits = []
        for value in (target, -target):
            y[0] = value
            fits.append(local_minimizer(LinearLoss("squared"), x, y, lam, clip))
        gradient = np.clip(2 * (x @ fits[1] - y), *(np.array([[-1], [1]]) * clip / np.linalg.norm(x, axis=1))) @ x / m
        left = np.linalg.norm(gradient + 2 * lam * fits[1])
        assert left <= 2.0**-20 * clip / m, "the gradient at the minimizer vanishes"
        moved = max(moved, float(np.linalg.norm(fits[0] - fits[1])))
    bound = float(minimizer_sensitivity(clip, np.array([m]), np.array([lam]))[0])
    assert 0.02 * bound < moved <= bound


def test_a_lambda_too_small_for_double_precision_is_refused_before_data_are_read():
    fits = LocalFits(LinearLoss("squared"), None, np.array([1e-12]), 1.0, 2.0)  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match=r"lambda = 1e-12, which is too small .* warm_lam of at least 2e-09"):
        _ = fits.sensitivities
