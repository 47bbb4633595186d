"""What the page on objectives says: slow sums of its formulas on three tiny clients, and where every line is tested."""

import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from torch.distributions import Bernoulli, Categorical, Normal, kl_divergence

from fedmtl import (
    MPMTL,
    AsyncLearner,
    FederatedDataset,
    PeerToPeer,
    PoissonClocks,
    ProximalPoint,
    Result,
    models,
)
from fedmtl.graphs import Graph
from fedmtl.local.losses import LOSSES, divergence_of, resolve_loss
from tests import small

Array = NDArray[np.float64]
PAGE = Path(__file__).parents[2] / "docs" / "pages" / "objectives.md"
P, LAM = 3, 0.4
RNG = np.random.default_rng(0)
X = {f"c{n}": RNG.normal(size=(n, P)) / 2 for n in (4, 6, 9)}
Y = {name: x @ RNG.normal(size=P) + 0.3 * RNG.normal(size=len(x)) for name, x in X.items()}
SIGNS = {name: np.where(y < 0, -1.0, 1.0) for name, y in Y.items()}


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


def test_losses_of_a_record() -> None:
    rng = np.random.default_rng(1)
    z = torch.from_numpy(rng.normal(size=(5, 3)))
    labels, bits, reals = (
        torch.tensor([0, 2, 1, 1, 0]),
        (z > 0.2).long(),
        torch.from_numpy(rng.normal(size=(5, 3))),
    )
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


def test_losses_of_a_real_target() -> None:
    z = torch.tensor([0.0, 1.0, 1.0, -1.0, 2.0], dtype=torch.float64)
    y = torch.tensor([0.2, 0.0, 3.0, 0.0, 2.0], dtype=torch.float64)
    expected = {
        "huber:0.5": [0.02, 0.5 * (1 - 0.25), 0.5 * (2 - 0.25), 0.5 * (1 - 0.25), 0.0],
        "quantile:0.9": [0.9 * 0.2, 0.1 * 1, 0.9 * 2, 0.9 * 1, 0.0],
        "poisson": [1.0, np.e, np.e - 3, np.exp(-1), np.exp(2) - 4],
    }
    for name, values in expected.items():
        np.testing.assert_allclose(resolve_loss(name)(z, y).numpy(), values, rtol=1e-12)


def test_divergences_of_two_predictions() -> None:
    """Of ``finetune=kl``: Kullback-Leibler divergences in both directions, a mean over several outputs."""
    z, other = torch.from_numpy(np.random.default_rng(2).normal(size=(2, 5, 3)))
    laws = {
        "cross_entropy": lambda z: Categorical(logits=z),
        "binary_cross_entropy": lambda z: Bernoulli(logits=z),
        "mse": lambda z: Normal(z, 1.0),
    }
    for name, law in laws.items():
        both = kl_divergence(law(z), law(other)) + kl_divergence(law(other), law(z))
        found = divergence_of(LOSSES[name])(z, other)
        torch.testing.assert_close(found, both if both.dim() == 1 else both.mean(1))


@pytest.mark.parametrize("own", [None, "frobenius"])
def test_mp_mtl(own: Any) -> None:
    result = fit(MPMTL(lam=LAM, ridge=0.2, own_penalty=own, own_lam=own and 0.7, rho=0.0), rounds=3)
    w = result.personal.numpy()
    value = sum(
        ((X[k] @ one - Y[k]) ** 2).mean() / 2 + 0.1 * one @ one for k, one in zip(X, w, strict=True)
    )
    shared = result.parts["P"].numpy() if own else w
    value += LAM * np.linalg.svd(shared, compute_uv=False).sum()
    value += 0.7 / 2 * (result.parts["Q"].numpy() ** 2).sum() if own else 0.0
    assert result.final["objective"] == pytest.approx(value, rel=1e-10)


CLOCKS: dict[str, Any] = {"schedule": PoissonClocks(per_client=5), "rounds": 15}


@pytest.mark.parametrize("loss", ["squared", "logistic"])
def test_async_learner(loss: Any) -> None:
    result = fit(
        AsyncLearner(loss=loss, reg=LAM), targets=Y if loss == "squared" else SIGNS, **CLOCKS
    )
    assert result.shared is not None
    w, x = result.shared.numpy(), np.concatenate(list(X.values()))
    y = np.concatenate(list((Y if loss == "squared" else SIGNS).values()))
    each = (x @ w - y) ** 2 if loss == "squared" else np.log1p(np.exp(-y * (x @ w)))
    assert result.final["objective"] == pytest.approx(each.mean() + LAM * w @ w, rel=1e-10)


def test_p2p() -> None:
    """On a graph of weights 1, 2 and 3, of clients with 4, 6 and 9 records."""
    weights = np.array([[0.0, 1.0, 2.0], [1.0, 0.0, 3.0], [2.0, 3.0, 0.0]])
    result = fit(
        PeerToPeer(graph=Graph(weights, tuple(X)), mu=0.7, loss="squared", lam=LAM), **CLOCKS
    )
    theta = result.personal.numpy()
    value = sum(
        weights[i, j] * ((theta[i] - theta[j]) ** 2).sum() / 2 for i in range(3) for j in range(i)
    )
    for own, degree, k in zip(theta, weights.sum(1), X, strict=True):
        mean = ((X[k] @ own - Y[k]) ** 2).mean() + LAM * own @ own
        value += 0.7 * degree * len(Y[k]) / 9 * mean
    assert result.final["objective"] == pytest.approx(value, rel=1e-10)


def test_the_proximal_point_method_moves_to_the_mean_of_the_local_minimizers() -> None:
    algorithm, start = ProximalPoint(mu=0.7), np.zeros(P)
    for _ in range(2):
        start = np.mean([ridge(X[k], Y[k], 1.0, 0.7, start) for k in X], axis=0)
    np.testing.assert_allclose(
        fit(algorithm, loss="half_mse", rounds=2).shared.numpy(), start, rtol=1e-9
    )


TESTS = {  # of every line: a closed form or a slow loop of its formula
    **dict.fromkeys(LOSSES, "objectives::test_losses_of_a_record"),
    **dict.fromkeys(
        ("huber:DELTA", "quantile:LEVEL", "poisson"), "objectives::test_losses_of_a_real_target"
    ),
    **dict.fromkeys(("fedavg", "fedprox"), "fedavg::test_rounds_by_hand"),
    **dict.fromkeys(
        [f"finetune={kind}" for kind in ("mean", "kl", "ewc")], "finetune::test_steps_by_hand"
    ),
    "local": "fedavg::test_local_is_every_client_alone",
    "weight_decay of the solver": "fedavg::test_local_is_every_client_alone",
    "pmtl": "pmtl::test_two_rounds_by_hand",
    "ditto": "ditto::test_rounds_by_hand",
    "pfedme": "mixtures::test_pfedme_rounds_by_hand",
    "scaffold": "scaffold::test_it_is_algorithm_1_of_the_paper",
    "prior_layers": "prior_layers::test_without_noise_it_is_the_formula",
    "proximal_point": "objectives::test_the_proximal_point_method_moves_to_the_mean_of_the_local_minimizers",
    "finetune=average": "average::test_the_average_is_that_of_refits_without_each_record",
    "exact local fit": "local_fit::test_the_local_baseline_minimizes_the_methods_own_function_of_a_clients_records",
    "mp_mtl": "objectives::test_mp_mtl",
    "private_prior": "private_prior::test_without_noise_it_is_the_formula",
    "pp_dmtl": "pp_dmtl::test_sound_runs_are_the_slow_loop",
    "async_learner": "objectives::test_async_learner",
    "p2p": "objectives::test_p2p",
    "last step of peer_averaging": "peer_averaging::test_the_last_step_minimizes_the_agents_block_of_the_objective",
}


def test_every_line_of_the_page_has_a_test() -> None:
    text = PAGE.read_text(encoding="utf-8")
    first = re.findall(r"^\| (?!(?:`loss`|method) \|)([^|-][^|]*?) \|", text, re.MULTILINE)
    assert TESTS.keys() == {
        name for cell in first for name in cell.replace("`", "").split(" (")[0].split(", ")
    }
    for file, test in (place.split("::") for place in TESTS.values()):
        assert f"def {test}(" in Path(__file__).with_name(f"test_{file}.py").read_text(
            encoding="utf-8"
        )
