"""What the page on objectives says, line by line: closed forms and slow sums of its formulas, on three tiny clients."""

import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from torch.func import grad

from fedmtl import (
    MPMTL,
    PMTL,
    PPDMTL,
    AsyncLearner,
    Ditto,
    FedAvg,
    FederatedDataset,
    FedProx,
    Finetune,
    Local,
    LocalSGD,
    PeerAveraging,
    PeerToPeer,
    PFedMe,
    PoissonClocks,
    PriorLayers,
    PrivatePrior,
    ProximalPoint,
    Result,
    Scaffold,
    models,
)
from fedmtl.algorithms import LocalFit
from fedmtl.graphs import Complete
from fedmtl.local.losses import LOSSES
from tests import small

Array = NDArray[np.float64]
PAGE = Path(__file__).parents[2] / "docs" / "pages" / "objectives.md"
P, LAM = 3, 0.4
RNG = np.random.default_rng(0)
X = {f"c{n}": RNG.normal(size=(n, P)) / 2 for n in (4, 6, 9)}
Y = {name: x @ RNG.normal(size=P) + 0.3 * RNG.normal(size=len(x)) for name, x in X.items()}
SIGNS = {name: np.where(y < 0, -1.0, 1.0) for name, y in Y.items()}
SOLVER = LocalSGD(lr=0.8, steps=60, batch_size=None)
COVERED: set[str] = set()


def covers(*names: str) -> Any:
    """Mark the lines of the page that a test is about."""
    COVERED.update(names)
    return lambda test: test


def fit(algorithm: Any, *, targets: dict[str, Array] = Y, rounds: int = 1, **given: Any) -> Result:
    rows = {name: (x, targets[name]) for name, x in X.items()}
    data = FederatedDataset.from_tensors(rows, test=rows, classes=None)
    model = models.linear_regression(bias=False)
    return small.trainer(algorithm=algorithm, data=data, model=model, rounds=rounds, **given).fit()


def ridge(x: Array, y: Array, curvature: float, pull: float, anchor: Array | float = 0.0) -> Array:
    """argmin (curvature / 2 n) ||x w - y||^2 + (pull / 2) ||w - anchor||^2."""
    n = len(y)
    matrix = curvature * x.T @ x / n + pull * np.eye(P)
    return np.linalg.solve(matrix, curvature * x.T @ y / n + pull * np.broadcast_to(anchor, P))


@covers("cross_entropy", "binary_cross_entropy", "mse", "half_mse")
def test_losses_of_a_record() -> None:
    z = torch.from_numpy(RNG.normal(size=(5, 3)))
    labels, bits, reals = torch.tensor([0, 2, 1, 1, 0]), (z > 0.2).long(), torch.from_numpy(RNG.normal(size=(5, 3)))
    probabilities = np.exp(z.numpy()) / np.exp(z.numpy()).sum(1, keepdims=True)
    both = np.where(bits.numpy() == 1, np.log1p(np.exp(-z.numpy())), np.log1p(np.exp(z.numpy())))
    expected = {
        "cross_entropy": (labels, -np.log(probabilities[np.arange(5), labels.numpy()])),
        "binary_cross_entropy": (bits, both.mean(1)),
        "mse": (reals, ((z - reals).numpy() ** 2).mean(1)),
        "half_mse": (reals, ((z - reals).numpy() ** 2).mean(1) / 2),
    }
    assert set(expected) == set(LOSSES)
    for name, (targets, values) in expected.items():
        np.testing.assert_allclose(LOSSES[name](z, targets).numpy(), values, rtol=1e-12)


@covers("fedavg", "local", "weight_decay of the solver", "pmtl", "ditto", "pfedme", "fedprox")
@pytest.mark.parametrize(
    ("algorithm", "pull"),
    [
        (Local(local=LocalSGD(lr=0.8, steps=60, batch_size=None, weight_decay=LAM)), LAM),
        (PMTL(lam=LAM, local=SOLVER), LAM),
        (Ditto(lam=LAM, local=SOLVER), LAM),
        (PFedMe(lam=LAM, local=SOLVER, local_rounds=1, eta=0.1), LAM),
    ],
    ids=["weight decay", "pmtl", "ditto", "pfedme"],
)
@pytest.mark.parametrize(("loss", "curvature"), [("mse", 2.0), ("half_mse", 1.0)])
def test_pulls_are_halves(algorithm: Any, pull: float, loss: str, curvature: float) -> None:
    """After one long local run, from 0 to 0: what each client minimizes in closed form."""
    result = fit(algorithm, loss=loss)
    for name, found in zip(result.ids, result.personal.numpy(), strict=True):
        np.testing.assert_allclose(found, ridge(X[name], Y[name], curvature, pull), rtol=1e-6, atol=1e-8)


def test_every_client_counts_the_same() -> None:
    """Two rounds: the second pull is to the first global model, the mean over the clients whatever they have."""
    runs = [fit(FedProx(mu=LAM, local=SOLVER), loss="mse", rounds=rounds) for rounds in (1, 2)]
    one, two = (run.shared.numpy() for run in runs if run.shared is not None)
    np.testing.assert_allclose(one, np.mean([ridge(X[k], Y[k], 2.0, LAM) for k in X], 0), rtol=1e-6)
    np.testing.assert_allclose(two, np.mean([ridge(X[k], Y[k], 2.0, LAM, one) for k in X], 0), rtol=1e-6)


@covers("finetune=mean", "finetune=ewc")
@pytest.mark.parametrize("kind", ["mean", "ewc"])
def test_finetuning_to_a_quadratic_pull(kind: str) -> None:
    finetune = Finetune(kind=kind, lam=LAM, local=LocalSGD(lr=0.8, steps=600, batch_size=None))  # type: ignore[arg-type]
    result = fit(FedAvg(local=LocalSGD(lr=0.1, steps=3, batch_size=None)), loss="mse", finetune=finetune)
    assert result.shared is not None
    start = result.shared.numpy()
    for name, found in zip(result.ids, result.personal.numpy(), strict=True):
        x, y = X[name], Y[name]
        slopes = 2 * (x @ start - y)[:, None] * x  # of each record
        fisher = (slopes**2).mean(0) if kind == "ewc" else np.ones(P)
        matrix = 2 * x.T @ x / len(y) + LAM * np.diag(fisher)
        expected = np.linalg.solve(matrix, 2 * x.T @ y / len(y) + LAM * fisher * start)
        np.testing.assert_allclose(found, expected, rtol=1e-4, atol=1e-6)


@covers("prior_layers")
def test_layers_alone_are_pulled_to_the_public_start(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("fedmtl.algorithms.private_prior.EDGE", 99.0)  # nothing stands out of the noise
    start = fit(FedAvg(local=LocalSGD(lr=1e-12, steps=1)), loss="mse").shared
    local = LocalSGD(lr=0.8, steps=600, batch_size=None, proximal=True)
    result = fit(PriorLayers(ridge=LAM, local=local), loss="mse")
    assert start is not None
    for name, found in zip(result.ids, result.personal.numpy(), strict=True):
        np.testing.assert_allclose(found, ridge(X[name], Y[name], 2.0, LAM, start.numpy()), rtol=1e-6, atol=1e-8)


@covers("finetune=kl")
def test_finetuning_to_a_divergence() -> None:
    """The gradient of the formula is 0 at what is found."""
    finetune = Finetune(kind="kl", lam=LAM, local=LocalSGD(lr=4.0, steps=900, batch_size=None))
    local = LocalSGD(lr=0.1, steps=3, batch_size=None)
    result = fit(FedAvg(local=local), loss="binary_cross_entropy", targets=SIGNS, finetune=finetune)
    assert result.shared is not None
    for name, found in zip(result.ids, result.personal, strict=True):
        x, y = torch.from_numpy(X[name]), torch.from_numpy(SIGNS[name])
        before = torch.sigmoid(x @ result.shared)

        def formula(w: torch.Tensor, x: Any = x, y: Any = y, q: Any = before) -> torch.Tensor:
            p = torch.sigmoid(x @ w)
            both = (p * (p / q).log() + (1 - p) * ((1 - p) / (1 - q)).log()).mean()
            both = both + (q * (q / p).log() + (1 - q) * ((1 - q) / (1 - p)).log()).mean()
            return torch.log1p(torch.exp(-y * (x @ w))).mean() + LAM * both

        assert float(grad(formula)(found).norm()) < 1e-4
        assert float(grad(formula)(result.shared).norm()) > 1e-3


@covers("exact local fit", "private_prior")
@pytest.mark.parametrize("algorithm", [LocalFit(loss="squared", ridge=LAM), PrivatePrior(ridge=LAM, own_ridge=False)])
def test_exact_fits_have_a_half(algorithm: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """An edge beyond the largest eigenvalue leaves nothing that stands out of the noise."""
    monkeypatch.setattr("fedmtl.algorithms.private_prior.EDGE", 99.0)
    result = fit(algorithm, loss="half_mse")
    for name, found in zip(result.ids, result.personal.numpy(), strict=True):
        np.testing.assert_allclose(found, ridge(X[name], Y[name], 1.0, LAM), rtol=1e-8)


@covers("mp_mtl")
@pytest.mark.parametrize("own", [None, "frobenius"])
def test_mp_mtl(own: Any) -> None:
    result = fit(MPMTL(lam=LAM, ridge=0.2, own_penalty=own, own_lam=own and 0.7, rho=0.0), rounds=3)
    w = result.personal.numpy()
    value = sum(((X[k] @ one - Y[k]) ** 2).mean() / 2 + 0.1 * one @ one for k, one in zip(X, w, strict=True))
    shared = result.parts["P"].numpy() if own else w
    value += LAM * np.linalg.svd(shared, compute_uv=False).sum()
    value += 0.7 / 2 * (result.parts["Q"].numpy() ** 2).sum() if own else 0.0
    assert result.final["objective"] == pytest.approx(value, rel=1e-10)


CLOCKS: dict[str, Any] = {"schedule": PoissonClocks(per_client=5), "rounds": 15}


@covers("pp_dmtl")
@pytest.mark.parametrize("loss", ["squared", "logistic"])
def test_pp_dmtl(loss: Any) -> None:
    algorithm = PPDMTL(loss=loss, lam=0.02, tau=0.3, a1=0.05, refine=False)
    targets = Y if loss == "squared" else SIGNS
    result = fit(algorithm, targets=targets, **CLOCKS)
    value = 0.02 * np.linalg.svd(result.parts["P"].numpy(), compute_uv=False).sum()
    value += 0.3 / 2 * (result.parts["Q"].numpy() ** 2).sum()
    for k, w in zip(X, result.personal.numpy(), strict=True):
        z = X[k] @ w
        value += ((z - Y[k]) ** 2).mean() if loss == "squared" else np.log1p(np.exp(-SIGNS[k] * z)).mean()
    assert result.final["objective"] == pytest.approx(value, rel=1e-10)
    assert np.abs(result.parts["Q"].numpy()).max() > 1e-3


@covers("async_learner")
@pytest.mark.parametrize("loss", ["squared", "logistic"])
def test_async_learner(loss: Any) -> None:
    result = fit(AsyncLearner(loss=loss, reg=LAM), targets=Y if loss == "squared" else SIGNS, **CLOCKS)
    assert result.shared is not None
    w, x = result.shared.numpy(), np.concatenate(list(X.values()))
    y = np.concatenate(list((Y if loss == "squared" else SIGNS).values()))
    each = (x @ w - y) ** 2 if loss == "squared" else np.log1p(np.exp(-y * (x @ w)))
    assert result.final["objective"] == pytest.approx(each.mean() + LAM * w @ w, rel=1e-10)
    alone = AsyncLearner(loss=loss, reg=LAM).local_baseline()
    assert alone is not None
    assert alone.ridge == pytest.approx(LAM if loss == "squared" else 2 * LAM)


@covers("p2p", "last step of peer_averaging")
def test_p2p() -> None:
    algorithm = PeerToPeer(graph=Complete(), mu=0.7, loss="squared", lam=LAM)
    result = fit(algorithm, **CLOCKS)
    theta, ids = result.personal.numpy(), list(X)
    value = sum(((theta[i] - theta[j]) ** 2).sum() / 2 for i in range(3) for j in range(i))
    for i, k in enumerate(ids):
        degree, confidence = 2, len(Y[k]) / 9
        mean = ((X[k] @ theta[i] - Y[k]) ** 2).mean() + LAM * theta[i] @ theta[i]
        value += 0.7 * degree * confidence * mean
    assert result.final["objective"] == pytest.approx(value, rel=1e-10)
    averaging = PeerAveraging(
        graph=Complete(), mu=0.7, loss="squared", lam=LAM, refine=LAM, refine_from="own", releases=10**6,
        confidence_power=1.0, smoothness=None,
    )  # fmt: skip
    refined = fit(averaging, **CLOCKS).personal.numpy()
    for i, k in enumerate(ids):  # the sum over n records, so 2 / n of both
        n = len(Y[k])
        np.testing.assert_allclose(refined[i], ridge(X[k], Y[k], 2.0, 2 * LAM / n, theta[i]), rtol=1e-7)


@covers("scaffold")
def test_scaffold_minimizes_the_mean_objective() -> None:
    """Control variates take out the drift of many local steps, which moves the fixed point of FedAvg."""
    local = LocalSGD(lr=0.2, steps=10, batch_size=None)
    matrix = sum(2 * X[k].T @ X[k] / len(Y[k]) for k in X)
    least = np.linalg.solve(matrix, sum(2 * X[k].T @ Y[k] / len(Y[k]) for k in X))
    found, drifted = (fit(kind(local=local), rounds=100).shared.numpy() for kind in (Scaffold, FedAvg))
    np.testing.assert_allclose(found, least, rtol=1e-8)
    assert np.abs(drifted - least).max() > 1e-3


@covers("proximal_point", "finetune=average")  # of which test_average fits every model anew without each record
def test_the_proximal_point_method_moves_to_the_mean_of_the_local_minimizers() -> None:
    algorithm, start = ProximalPoint(mu=0.7), np.zeros(P)
    for _ in range(2):
        start = np.mean([ridge(X[k], Y[k], 1.0, 0.7, start) for k in X], axis=0)
    np.testing.assert_allclose(fit(algorithm, loss="half_mse", rounds=2).shared.numpy(), start, rtol=1e-9)


def test_every_line_of_the_page_has_a_test() -> None:
    text = PAGE.read_text(encoding="utf-8")
    first = re.findall(r"^\| (?!(?:`loss`|method) \|)([^|-][^|]*?) \|", text, re.MULTILINE)
    names = {name for cell in first for name in cell.replace("`", "").split(" (")[0].split(", ")}
    assert len(names) > 15
    assert names == COVERED
