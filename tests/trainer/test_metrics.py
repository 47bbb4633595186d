"""nMSE and aAUC against scikit-learn, and against plain loops with real models."""

from __future__ import annotations

import copy

import numpy as np
import pytest
import torch
from sklearn.metrics import r2_score, roc_auc_score

from fedmtl import Execution, models
from fedmtl.data import Examples, FederatedDataset
from fedmtl.errors import ConfigError, DataError
from fedmtl.stacked import Layout
from fedmtl.trainer.metrics import (
    average_auc,
    evaluate_auc,
    evaluate_nmse,
    linear_outputs,
    nmse,
    normalized_numbers,
    task_auc,
)
from fedmtl.trainer.problem import build_problem

OFFSETS = torch.tensor([0, 5, 6, 18, 25])


class Given:
    """An algorithm whose personal models are given."""

    name = "given"

    def __init__(self, rows):
        self.rows = rows

    def personalize(self, problem, state, clients):
        return self.rows[clients]


def draws(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def tasks():
    return list(zip(OFFSETS[:-1].tolist(), OFFSETS[1:].tolist(), strict=True))


def test_nmse_is_one_minus_r2_of_each_task_and_of_all():
    predictions, y = draws(3, 25), 3 + draws(25, seed=1)
    found = nmse(predictions, y, OFFSETS)
    assert found.task.shape == (3, 4)
    for r in range(3):
        for t, (a, b) in enumerate(tasks()):
            if b - a == 1:
                assert found.task[r, t].isnan()
                continue
            assert float(found.task[r, t]) == pytest.approx(1 - r2_score(y[a:b], predictions[r, a:b]), rel=1e-12)
        assert float(found.pooled[r]) == pytest.approx(1 - r2_score(y, predictions[r]), rel=1e-12)
        assert float(found.mean[r]) == pytest.approx(np.nanmean(found.task[r].numpy()), rel=1e-12)
        assert float(found.mse[r, 1]) == pytest.approx(float((predictions[r, 5] - y[5]) ** 2), rel=1e-12)


def test_predicting_the_mean_scores_one():
    y = draws(25)
    means = torch.cat([y[a:b].mean().expand(b - a) for a, b in tasks()])
    assert nmse(means, y, OFFSETS).task[[0, 2, 3]].numpy() == pytest.approx(1.0, rel=1e-12)
    assert float(nmse(y.mean().expand(25), y, OFFSETS).pooled) == pytest.approx(1.0, rel=1e-12)


def test_targets_that_do_not_vary_are_not_a_number():
    y = draws(25)
    y[6:18] = 0.1  # a sum of these is not exactly 12 times as much
    found = nmse(draws(25, seed=1), y, OFFSETS)
    assert found.task.isnan().tolist() == [False, True, True, False]
    assert float(found.mean) == pytest.approx(float(found.task[[0, 3]].mean()))
    same = nmse(draws(25, seed=1), torch.full((25,), 0.1), OFFSETS)
    assert same.mean.isnan()
    assert same.pooled.isnan()
    assert same.mse.isfinite().all()


@pytest.mark.parametrize("coarse", [False, True])
def test_auc_is_that_of_scikit_learn_with_ties(coarse):
    scores, labels = draws(2, 3, 25), (draws(25, seed=2) > 0).long()
    labels[6:18] = 1
    if coarse:
        scores = scores.round()
    found = task_auc(scores, labels, OFFSETS)
    assert found.shape == (2, 3, 4)
    both = [t for t, (a, b) in enumerate(tasks()) if len(labels[a:b].unique()) == 2]
    assert both == [0, 3]
    for t, (a, b) in enumerate(tasks()):
        for i in np.ndindex(2, 3):
            if t in both:
                assert float(found[i][t]) == pytest.approx(roc_auc_score(labels[a:b], scores[i][a:b]), rel=1e-12)
            else:
                assert found[i][t].isnan()
    np.testing.assert_allclose(average_auc(scores, labels, OFFSETS), found[..., both].mean(-1))
    torch.testing.assert_close(task_auc(scores, 2 * labels - 1, OFFSETS), found, equal_nan=True, rtol=0, atol=0)
    assert average_auc(scores, torch.ones(25), OFFSETS).isnan().all()


def test_linear_models_predict_their_own_tasks():
    x, rows = draws(25, 3), draws(2, 4, 4, seed=5)
    examples = Examples(x.float(), draws(25).float(), OFFSETS)
    for bias in (0, 1):
        found = linear_outputs(rows[..., : 3 + bias], examples)
        for t, (a, b) in enumerate(tasks()):
            expected = x[a:b].float().double() @ rows[1, t, :3] + bias * rows[1, t, 3]
            torch.testing.assert_close(found[1, a:b], expected)


def dataset(classes):
    def side(seed):
        y = (draws(25, seed=seed) > 0).long() if classes else draws(25, seed=seed).float()
        return Examples(draws(25, 3, seed=seed + 1).float(), y, OFFSETS)

    return FederatedDataset(side(0), side(10), tuple("abcd"), classes=classes)


@pytest.mark.parametrize("outputs", [1, 2])
def test_any_model_of_any_algorithm(outputs):
    data = dataset(2)
    model = models.linear_regression() if outputs == 1 else models.mlp(hidden=4)
    loss = "binary_cross_entropy" if outputs == 1 else "cross_entropy"
    problem = build_problem(data, model, loss, Execution(), rounds=1, seed=0, device="cpu", dtype="float64")
    rows = draws(4, problem.dimension, seed=3)
    found = evaluate_auc(problem, Given(rows), None)
    for t, (a, b) in enumerate(tasks()):
        module = Layout.of(problem.module).load(copy.deepcopy(problem.module), rows[t]).eval()
        raw = module(data.test.x[a:b].double()).detach().reshape(b - a, -1)
        y = data.test.y[a:b]
        if len(y.unique()) == 2:
            scores = raw[:, 0] if outputs == 1 else raw.softmax(1)[:, 1]
            assert float(found[t]) == pytest.approx(roc_auc_score(y, scores), rel=1e-12)
        else:
            assert found[t].isnan()
    assert normalized_numbers(problem, torch.ones(4)) == {}
    with pytest.raises(DataError, match="regression"):
        evaluate_nmse(problem, Given(rows), None)


def test_nmse_of_any_model():
    data = dataset(None)
    problem = build_problem(
        data, models.mlp(hidden=4), "mse", Execution(), rounds=1, seed=0, device="cpu", dtype="float64"
    )
    rows = draws(4, problem.dimension, seed=3)
    found = evaluate_nmse(problem, Given(rows), None, "train")
    for t, (a, b) in enumerate(tasks()):
        module = Layout.of(problem.module).load(copy.deepcopy(problem.module), rows[t]).eval()
        guess = module(data.train.x[a:b].double()).detach()[:, 0]
        if b - a > 1:
            assert float(found.task[t]) == pytest.approx(1 - r2_score(data.train.y[a:b], guess), rel=1e-9)
    tested = evaluate_nmse(problem, Given(rows), None)
    both = normalized_numbers(problem, torch.stack([tested.mse, 3 * tested.mse]))
    assert both["nmse"].tolist() == pytest.approx([float(tested.mean), 3 * float(tested.mean)])
    assert both["pooled_nmse"].tolist() == pytest.approx([float(tested.pooled), 3 * float(tested.pooled)])
    with pytest.raises(DataError, match="two classes"):
        evaluate_auc(problem, Given(rows), None)


def test_a_task_without_examples_changes_nothing_of_the_others():
    guess, target = draws(25), draws(25)
    whole, gap = nmse(guess, target, torch.tensor([0, 5, 25])), nmse(guess, target, torch.tensor([0, 5, 5, 25]))
    assert gap.task[[0, 2]].tolist() == whole.task.tolist()
    assert gap.task[1].isnan()
    assert (float(gap.pooled), float(gap.mean)) == (float(whole.pooled), float(whole.mean))


def test_shapes_that_do_not_fit_are_refused():
    with pytest.raises(ConfigError, match="offsets end at 25"):
        nmse(draws(24), draws(25), OFFSETS)
    with pytest.raises(ConfigError, match="no task has examples"):
        nmse(draws(0), draws(0), torch.tensor([0, 0, 0]))
    with pytest.raises(DataError, match="finite"):
        task_auc(draws(25) / 0, (draws(25) > 0).long(), OFFSETS)
    with pytest.raises(ConfigError, match="models have shape"):
        linear_outputs(draws(3, 3), Examples(draws(25, 3), draws(25), OFFSETS))
