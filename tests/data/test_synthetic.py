"""Synthetic tasks: the stated model holds, exactly where it is exact and by its law where it is random."""

import numpy as np
import pytest
import scipy.stats
import torch

from fedmtl.data import load_data, load_synthetic_tasks
from fedmtl.data.synthetic.tasks import true_weights
from fedmtl.errors import ConfigError

ALPHA = 1e-6


def models(tasks: int, features: int, structure: str = "low_rank", **options) -> torch.Tensor:
    return true_weights([f"task-{i}" for i in range(tasks)], features, structure, **options)


def blocks(given, side: str) -> tuple[np.ndarray, np.ndarray]:
    part, tasks = given.side(side), len(given)
    return part.x.view(tasks, -1, part.x.shape[1]).double().numpy(), part.y.view(
        tasks, -1
    ).double().numpy()


@pytest.mark.parametrize("structure", ["low_rank", "group_sparse"])
@pytest.mark.parametrize("problem", ["regression", "classification"])
def test_without_noise_targets_are_those_of_the_true_models(structure, problem):
    given = load_synthetic_tasks(7, structure=structure, problem=problem, noise=0, rank=2, seed=5)
    for side, count in (("train", 60), ("test", 140)):
        x, y = blocks(given, side)
        assert x.shape == (7, count, 28)
        for task in range(7):
            score = x[task] @ models(7, 28, structure, rank=2, seed=5)[:, task].numpy()
            expected = score if problem == "regression" else (score > 0)
            np.testing.assert_allclose(y[task], expected, rtol=1e-6, atol=1e-6)
    assert given.domain.target == (1.0 if problem == "classification" else np.inf)


def test_rows_have_unit_norm_and_never_more():
    given = load_synthetic_tasks(50, features=5)
    norms = np.linalg.norm(blocks(given, "train")[0], axis=2)
    assert norms.max() <= given.domain.l2 == 1
    assert norms.min() >= 1 - 2.0**-19
    assert given.domain.l1 == 5**0.5


def test_low_rank_and_group_sparse_models():
    low = models(40, 12).numpy()
    assert low.shape == (12, 40)
    values = np.linalg.svd(low, compute_uv=False)
    assert values[2] > 1
    assert values[3] < 1e-10
    sparse = models(40, 12, "group_sparse").numpy()
    assert (sparse[3:] == 0).all()
    assert (np.abs(sparse[:3]) > 0).all()
    own = models(40, 12, deviation=0.1).numpy()
    assert np.linalg.matrix_rank(own) == 12
    assert scipy.stats.kstest((own - low).ravel() / 0.1, "norm").pvalue > ALPHA


def test_the_laws_are_the_stated_ones():
    given = load_synthetic_tasks(2000, train_examples=5, test_examples=1, features=6, rank=2, problem="regression",
                                 noise=0.5)  # fmt: skip
    x, y = blocks(given, "train")
    weights = models(2000, 6, rank=2).numpy()
    beta = scipy.stats.beta(
        2.5, 2.5
    )  # a coordinate of a uniform point of the sphere in 6 dimensions
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
    sparse = models(2000, 6, "group_sparse", rank=2).numpy()
    assert scipy.stats.kstest(sparse[:2].ravel(), scipy.stats.uniform(-3, 6).cdf).pvalue > ALPHA


def test_tasks_with_a_model_in_common():
    shared = models(6, 40, "common", seed=3)
    assert torch.equal(shared, shared[:, :1].expand(40, 6))
    assert (
        abs(float(shared[:, 0].square().sum()) / 40 - 1) < 0.8
    )  # chi-squared with 40 degrees of freedom
    assert not torch.equal(shared, models(6, 40, "common", seed=4))
    own = models(6, 40, "common", deviation=0.1, seed=3) - shared
    assert 0.07 < float(own.std()) < 0.13


def test_clusters_of_tasks():
    weights = models(600, 20, "clustered", rank=4, seed=3).numpy()
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
    few = load_synthetic_tasks(3, train_examples=4, test_examples=2, seed=9, deviation=0.3)
    many = load_synthetic_tasks(30, train_examples=9, test_examples=5, seed=9, deviation=0.3)
    for side, count in (("train", 4), ("test", 2)):
        for a, b in zip(blocks(few, side), blocks(many, side), strict=True):
            np.testing.assert_array_equal(a, b[:3, :count])
    first = models(3, 28, deviation=0.3, seed=9)
    torch.testing.assert_close(
        first, models(30, 28, deviation=0.3, seed=9)[:, :3], rtol=1e-14, atol=0
    )
    other = load_synthetic_tasks(3, train_examples=4, test_examples=2, seed=10, deviation=0.3)
    assert not (few.train.x == other.train.x).any()
    assert not (first == models(3, 28, deviation=0.3, seed=10)).any()
    x = np.concatenate([blocks(many, "train")[0], blocks(many, "test")[0]], axis=1).reshape(-1, 28)
    assert len(np.unique(x, axis=0)) == len(x)


def test_tasks_by_name():
    data = load_data("synthetic_tasks", tasks=4, seed=2)
    assert data.fingerprint() == load_synthetic_tasks(4, seed=2).fingerprint()
    assert data.ids == ("task-0", "task-1", "task-2", "task-3")
    assert (data.spec.shape, data.classes, data.notes, data.train.x.dtype) == (
        (28,),
        2,
        (),
        torch.float32,
    )


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"tasks": 0}, r"load_synthetic_tasks\.tasks is 0"),
        ({"train_examples": 0}, r"train_examples is 0"),
        ({"test_examples": 1.5}, r"test_examples is 1\.5"),
        ({"features": 0}, r"features is 0"),
        ({"rank": 29}, r"rank is 29; it must be at most the number of features, 28"),
    ],
)
def test_impossible_settings_are_refused(options, message):
    with pytest.raises(ConfigError, match=message):
        load_synthetic_tasks(**options)


def test_public_examples_are_further_examples_of_the_tasks_in_turn():
    plain = load_synthetic_tasks(
        3, train_examples=4, test_examples=2, features=5, problem="regression", noise=0.0
    )
    made = load_synthetic_tasks(
        3,
        train_examples=4,
        test_examples=2,
        features=5,
        problem="regression",
        noise=0.0,
        public_examples=7,
    )
    assert plain.public is None
    assert torch.equal(plain.train.x, made.train.x)
    assert torch.equal(plain.test.y, made.test.y)
    public = made.public
    assert public.x.shape == (7, 5)
    for k, (row, target) in enumerate(zip(public.x.double(), public.y, strict=True)):
        assert float(target) == pytest.approx(float(row @ models(3, 5)[:, k % 3]), rel=1e-5)
    known = torch.cat([made.train.x, made.test.x])
    assert not (public.x[:, None] == known).all(2).any()
    with pytest.raises(ConfigError, match="public_examples is -1"):
        load_synthetic_tasks(3, public_examples=-1)
