"""Synthetic tasks: the stated model holds, exactly where it is exact and by its law where it is random."""

import numpy as np
import pytest
import scipy.stats
import torch

from fedmtl.data import load_data, load_synthetic_tasks, make_synthetic_tasks
from fedmtl.errors import ConfigError

ALPHA = 1e-6


def blocks(given, side: str) -> tuple[np.ndarray, np.ndarray]:
    part = given.data.side(side)
    tasks = len(given.data)
    return part.x.view(tasks, -1, part.x.shape[1]).double().numpy(), part.y.view(tasks, -1).double().numpy()


@pytest.mark.parametrize("structure", ["low_rank", "group_sparse"])
@pytest.mark.parametrize("problem", ["regression", "classification"])
def test_without_noise_targets_are_those_of_the_true_models(structure, problem):
    given = make_synthetic_tasks(7, structure=structure, problem=problem, noise=0, rank=2, seed=5)
    for side, count in (("train", 60), ("test", 140)):
        x, y = blocks(given, side)
        assert x.shape == (7, count, 28)
        for task in range(7):
            score = x[task] @ given.weights[:, task].numpy()
            expected = score if problem == "regression" else (score > 0)
            np.testing.assert_allclose(y[task], expected, rtol=1e-6, atol=1e-6)
    assert given.data.domain.target == (1.0 if problem == "classification" else np.inf)


def test_rows_have_unit_norm_and_never_more():
    given = make_synthetic_tasks(50, features=5)
    norms = np.linalg.norm(blocks(given, "train")[0], axis=2)
    assert norms.max() <= given.data.domain.l2 == 1
    assert norms.min() >= 1 - 2.0**-19
    assert given.data.domain.l1 == 5**0.5


def test_low_rank_and_group_sparse_models():
    low = make_synthetic_tasks(40, features=12, rank=3).weights.numpy()
    assert low.shape == (12, 40)
    values = np.linalg.svd(low, compute_uv=False)
    assert values[2] > 1
    assert values[3] < 1e-10
    sparse = make_synthetic_tasks(40, features=12, rank=3, structure="group_sparse").weights.numpy()
    assert (sparse[3:] == 0).all()
    assert (np.abs(sparse[:3]) > 0).all()
    own = make_synthetic_tasks(40, features=12, rank=3, deviation=0.1).weights.numpy()
    assert np.linalg.matrix_rank(own) == 12
    assert scipy.stats.kstest((own - low).ravel() / 0.1, "norm").pvalue > ALPHA


def test_the_laws_are_the_stated_ones():
    given = make_synthetic_tasks(2000, train_examples=5, test_examples=1, features=6, rank=2, problem="regression",
                                 noise=0.5)  # fmt: skip
    x, y = blocks(given, "train")
    weights = given.weights.numpy()
    beta = scipy.stats.beta(2.5, 2.5)  # a coordinate of a uniform point of the sphere in 6 dimensions
    for axis in range(6):
        assert scipy.stats.kstest((1 + x[..., axis].ravel()) / 2, beta.cdf).pvalue > ALPHA
    residual = y - np.einsum("tnd,dt->tn", x, weights)
    assert scipy.stats.kstest(residual.ravel() / 0.5, "norm").pvalue > ALPHA
    assert abs(np.corrcoef(residual[:, 0], residual[:, 1])[0, 1]) < 0.12  # 5 standard deviations
    draws = [x.reshape(2000, -1), residual, weights.T]
    for i, a in enumerate(draws):
        for b in draws[:i]:
            cross = np.corrcoef(a.T, b.T)[: a.shape[1], a.shape[1] :]
            assert np.abs(cross).max() < 6 / 2000**0.5
    sizes = (weights**2).sum(0) * 2 / 6
    assert scipy.stats.kstest(sizes, scipy.stats.chi2(2).cdf).pvalue > ALPHA
    sparse = make_synthetic_tasks(2000, train_examples=1, test_examples=1, features=6, rank=2,
                                  structure="group_sparse").weights.numpy()  # fmt: skip
    assert scipy.stats.kstest(sparse[:2].ravel(), scipy.stats.uniform(-3, 6).cdf).pvalue > ALPHA


def test_tasks_with_a_model_in_common():
    made = make_synthetic_tasks(6, features=40, structure="common", deviation=0.0, seed=3)
    assert torch.equal(made.weights, made.weights[:, :1].expand(40, 6))
    assert abs(float(made.weights[:, 0].square().sum()) / 40 - 1) < 0.8  # chi-squared with 40 degrees of freedom
    assert not torch.equal(made.weights, make_synthetic_tasks(6, features=40, structure="common", seed=4).weights)
    own = make_synthetic_tasks(6, features=40, structure="common", deviation=0.1, seed=3).weights - made.weights
    assert 0.07 < float(own.std()) < 0.13


def test_clusters_of_tasks():
    weights = make_synthetic_tasks(600, train_examples=1, test_examples=1, features=20, rank=4, structure="clustered",
                                   seed=3).weights.numpy()  # fmt: skip
    correlation = np.corrcoef(weights.T)
    same = np.isclose(np.abs(correlation), 1)
    clusters = {tuple(row) for row in same}
    assert len(clusters) == 4
    counts = np.array([sum(row) for row in clusters])
    assert scipy.stats.chisquare(counts).pvalue > ALPHA
    for row in clusters:
        signs = weights[0, list(row)] > 0
        assert scipy.stats.binomtest(int(signs.sum()), len(signs)).pvalue > ALPHA
    centres = np.stack([weights[:, row.index(True)] for row in clusters])
    assert scipy.stats.kstest(centres.ravel(), "norm").pvalue > ALPHA


def test_a_task_does_not_depend_on_how_many_there_are():
    few = make_synthetic_tasks(3, train_examples=4, test_examples=2, seed=9, deviation=0.3)
    many = make_synthetic_tasks(30, train_examples=9, test_examples=5, seed=9, deviation=0.3)
    for side, count in (("train", 4), ("test", 2)):
        for a, b in zip(blocks(few, side), blocks(many, side), strict=True):
            np.testing.assert_array_equal(a, b[:3, :count])
    torch.testing.assert_close(few.weights, many.weights[:, :3], rtol=1e-14, atol=0)
    other = make_synthetic_tasks(3, train_examples=4, test_examples=2, seed=10, deviation=0.3)
    assert not (few.data.train.x == other.data.train.x).any()
    assert not (few.weights == other.weights).any()
    x = np.concatenate([blocks(many, "train")[0], blocks(many, "test")[0]], axis=1).reshape(-1, 28)
    assert len(np.unique(x, axis=0)) == len(x)


def test_tasks_by_name():
    data = load_data("synthetic_tasks", tasks=4, seed=2)
    assert data.fingerprint() == load_synthetic_tasks(4, seed=2).fingerprint()
    assert data.fingerprint() == make_synthetic_tasks(4, seed=2).data.fingerprint()
    assert data.ids == ("task-0", "task-1", "task-2", "task-3")
    assert (data.spec.shape, data.classes, data.notes, data.train.x.dtype) == ((28,), 2, (), torch.float32)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"tasks": 0}, r"make_synthetic_tasks\.tasks is 0"),
        ({"train_examples": 0}, r"train_examples is 0"),
        ({"test_examples": 1.5}, r"test_examples is 1\.5"),
        ({"features": 0}, r"features is 0"),
        ({"rank": 29}, r"rank is 29; it must be at most the number of features, 28"),
        ({"noise": -1}, r"noise is -1"),
        ({"deviation": float("nan")}, r"deviation is nan"),
        ({"structure": "dense"}, r"structure is 'dense'; accepted: 'low_rank', 'group_sparse', 'clustered'"),
        ({"problem": "ranking"}, r"problem is 'ranking'; accepted: 'regression', 'classification'"),
    ],
)
def test_impossible_settings_are_refused(options, message):
    with pytest.raises(ConfigError, match=message):
        make_synthetic_tasks(**options)


def test_public_examples_are_further_examples_of_the_tasks_in_turn():
    plain = make_synthetic_tasks(3, train_examples=4, test_examples=2, features=5, problem="regression", noise=0.0)
    made = make_synthetic_tasks(
        3, train_examples=4, test_examples=2, features=5, problem="regression", noise=0.0, public_examples=7
    )
    assert plain.data.public is None
    assert torch.equal(plain.data.train.x, made.data.train.x)
    assert torch.equal(plain.data.test.y, made.data.test.y)
    public = made.data.public
    assert public.x.shape == (7, 5)
    for k, (row, target) in enumerate(zip(public.x.double(), public.y, strict=True)):
        assert float(target) == pytest.approx(float(row @ made.weights[:, k % 3]), rel=1e-5)
    known = torch.cat([made.data.train.x, made.data.test.x])
    assert not (public.x[:, None] == known).all(2).any()
    with pytest.raises(ConfigError, match="public_examples is -1"):
        make_synthetic_tasks(3, public_examples=-1)
